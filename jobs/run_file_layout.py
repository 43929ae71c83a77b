#!/usr/bin/env python3
"""How a run file should be laid out: the same steps written with other chunks and filters, and what each costs.

    jobs/run_file_layout.py RUN.h5 [--repeats 3] [--folder DIR]

RUN.h5 is a run with all its logits (--logits all) and as many steps as shall be timed. Each variant is written as
k3decode writes it: the latest format, SWMR, one row a step into each dataset, each dataset flushed after it. The variants
take turns, so that a slow moment of the machine falls on all. Prints file size, milliseconds to write a step (median and
largest of all steps), to read all logits, to read one row, and to read all times.
"chosen" is what src/store/run_file.c does: chunks and filters are read from RUN.h5 itself.
Needs python3-h5py (Debian). Exit status: 0 done, 2 wrong usage, 3 bad input, 4 a module is missing.
"""
import argparse
import os
import pathlib
import platform
import sys
import tempfile
import time

try:
    import h5py
    import numpy as np
except ImportError as error:
    print(f"run_file_layout: {error.name} is missing; install it (Debian: python3-{error.name})", file=sys.stderr)
    sys.exit(4)

LOGITS = "decode/logits"
TIMES = ("timings/step_ms", "timings/rank_step_ms", "timings/phase_ms")
OTHERS = ("decode/token_ids", *TIMES)
KIB = 1024


def read_source(path):
    """dataset -> (rows, chunk) of the whole steps."""
    try:
        with h5py.File(path, "r", swmr=True) as run:
            steps = int(run["decode/steps"][()])
            source = {name: (run[name][:steps], run[name].chunks) for name in (LOGITS, *OTHERS)}
            filters = run[LOGITS].compression
    except (OSError, KeyError) as error:
        print(f"run_file_layout: {path} cannot be read as a run with all logits: {error}", file=sys.stderr)
        sys.exit(3)
    if steps < 2:
        print(f"run_file_layout: {path} holds {steps} steps, wanted 2 or more", file=sys.stderr)
        sys.exit(3)
    return source, filters, steps


def variants(source, filters):
    """name -> dataset -> arguments of create_dataset."""
    vocabulary = source[LOGITS][0].shape[1]
    chosen = {name: dict(chunks=chunk) for name, (_, chunk) in source.items()}
    chosen[LOGITS]["compression"] = filters

    def logits(chunk, **more):
        return {**chosen, LOGITS: dict(chunks=(chunk[0], min(chunk[1], vocabulary)), **more)}

    def times(rows):
        return {name: how if name == LOGITS else dict(chunks=(rows, *source[name][1][1:])) for name, how in chosen.items()}

    row = (1, vocabulary)
    return {
        "chosen": chosen,
        "logits in pieces of 4096": logits((1, 4096)),
        "logits in pieces of 32768": logits((1, 32768)),
        "logits 8 rows a chunk": logits((8, vocabulary)),
        "logits 8 rows x 4096": logits((8, 4096)),
        "logits gzip 1": logits(row, compression="gzip", compression_opts=1),
        "logits shuffle": logits(row, shuffle=True),
        "logits shuffle + gzip 1": logits(row, shuffle=True, compression="gzip", compression_opts=1),
        "logits shuffle + gzip 6": logits(row, shuffle=True, compression="gzip", compression_opts=6),
        "logits shuffle + lzf": logits(row, shuffle=True, compression="lzf"),
        "times 1 row a chunk": times(1),
        "times 4096 rows a chunk": times(4096),
        "times shuffle + gzip 6": {name: how if name == LOGITS else dict(how, shuffle=True, compression="gzip",
                                                                         compression_opts=6) for name, how in chosen.items()},
    }


def write(path, how, source, steps):
    """Seconds of each step."""
    seconds = []
    with h5py.File(path, "w", libver="latest") as file:
        made = {name: file.create_dataset(name, shape=(0, *rows.shape[1:]), maxshape=(None, *rows.shape[1:]), dtype=rows.dtype,
                                          **how[name]) for name, (rows, _) in source.items()}
        file.swmr_mode = True
        for n in range(steps):
            begin = time.perf_counter()
            for name, dataset in made.items():
                dataset.resize(n + 1, axis=0)
                dataset[n] = source[name][0][n]
                dataset.flush()
            seconds.append(time.perf_counter() - begin)
    return seconds


def read(path, source, steps):
    """Seconds to read all logits, one row of them, all times; the values must be those written."""
    found = []
    for names, rows in (((LOGITS,), slice(None)), ((LOGITS,), slice(steps // 2, steps // 2 + 1)), (TIMES, slice(None))):
        begin = time.perf_counter()
        with h5py.File(path, "r") as file:
            values = [file[name][rows] for name in names]
        found.append(time.perf_counter() - begin)
        for name, value in zip(names, values):
            if not np.array_equal(value, source[name][0][rows], equal_nan=True):
                raise SystemExit(f"run_file_layout: {name} does not read back")
    return found


def chunk_text(how):
    def one(name):
        return "x".join(map(str, how[name]["chunks"]))
    return f"{one(LOGITS)}; {one('timings/phase_ms')}"


def main():
    parser = argparse.ArgumentParser(prog="run_file_layout", description=__doc__.split("\n")[0])
    parser.add_argument("run", metavar="RUN.h5")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", help="where to write (default: a temporary directory)")
    options = parser.parse_args()
    source, filters, steps = read_source(options.run)
    table = variants(source, filters)
    writes, reads, size = ({name: [] for name in table} for _ in range(3))
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = pathlib.Path(folder) / "variant.h5"
        for _ in range(max(1, options.repeats)):
            for name, how in table.items():
                writes[name] += write(path, how, source, steps)
                reads[name].append(read(path, source, steps))
                size[name] = os.path.getsize(path)
    rows = source[LOGITS][0]
    print(f"# command: jobs/run_file_layout.py {' '.join(sys.argv[1:])}")
    print(f"# {platform.machine()}, HDF5 {h5py.version.hdf5_version}, h5py {h5py.version.version}; {steps} steps of "
          f"{rows.shape[1]} logits ({rows.nbytes / steps / KIB:.0f} KiB), "
          f"{rows.nbytes / 1e6:.1f} MB of logits; {options.repeats} repeats, taking turns; files in the page cache")
    print(f"{'layout':<28} {'file MB':>9} {'write ms a step':>16} {'largest':>8} {'read all ms':>12} {'one row ms':>11} "
          f"{'times ms':>9}  chunks of logits; of phase_ms")
    for name, how in table.items():
        best = np.min(np.array(reads[name]), axis=0) * 1e3
        print(f"{name:<28} {size[name] / 1e6:>9.2f} {np.median(writes[name]) * 1e3:>16.3f} {max(writes[name]) * 1e3:>8.2f} "
              f"{best[0]:>12.2f} {best[1]:>11.3f} {best[2]:>9.3f}  {chunk_text(how)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
