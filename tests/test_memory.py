"""A rank's memory is its band and a bounded buffer, and every byte of the file is read once (known faults F32, F34).

    /usr/bin/python3 -m pytest tests/test_memory.py      (environment: see tests/harness.py)
"""
import os
import re
import shutil
import sys
import time

import h5py
import numpy as np
import pytest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import harness          # noqa: E402
import model_file       # noqa: E402
from harness import SEED, SLOW, decode, k3, needs_mpirun   # noqa: E402

pytestmark = needs_mpirun
MIB = 1 << 20
BUFFER = 256 * MIB      # beyond its band, what a rank may take
RANKS = 4

@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """About 600 MB, nearly all of it experts; mxfp4 and q8_0."""
    folder = tmp_path_factory.mktemp("large")
    if shutil.disk_usage(folder).free < 2000 * MIB:
        pytest.skip("needs 2 GB of disk")
    path = folder / "large.h5"
    k3("synth", "tiny:num_layers=5,num_experts=180,hidden_size=512,latent_size=512,moe_intermediate_size=1024,"
       "trunk=q8_0,experts=mxfp4,vocab_size=4096", "--output", path, timeout=120)
    assert 550 * MIB < path.stat().st_size < 700 * MIB
    yield path
    path.unlink()


def bands_of(result_or_info):
    """The largest rank's weights in bytes, as the plan in the run file states them."""
    match = re.search(r"weights +([\d.]+) to ([\d.]+) GB a rank", result_or_info)
    assert match, result_or_info
    return float(match[2]) * 1e9


def watch(job, seconds=120):
    """Polls the ranks' /proc until the job ends or the time is over: rank -> the largest (resident memory, address space,
    bytes read by system calls)."""
    seen = {}
    end = time.monotonic() + seconds
    while job.process.poll() is None and time.monotonic() < end:
        for rank, pid in job.ranks().items():
            try:
                with open(f"/proc/{pid}/status") as file:
                    status = file.read()
                with open(f"/proc/{pid}/io") as file:
                    status += file.read()
            except OSError:
                continue
            values = [re.search(pattern, status) for pattern in (r"VmHWM:\s+(\d+) kB", r"VmPeak:\s+(\d+) kB", r"rchar: (\d+)")]
            if all(values):
                now = int(values[0][1]) * 1024, int(values[1][1]) * 1024, int(values[2][1])
                seen[rank] = tuple(map(max, now, seen.get(rank, now)))
        time.sleep(0.1)
    return seen


@pytest.fixture(scope="module")
def start_up():
    """(resident memory, address space, bytes read) of a rank before it has a model: libraries, MPI's own files."""
    job = harness.start("run", "synth:tiny:num_layers=1", "--prompt", "1", "--steps", 100000, "--logits", "none", ranks=RANKS)
    seen = watch(job, seconds=2)
    job.process.terminate()
    job.finish()
    assert sorted(seen) == list(range(RANKS))
    return tuple(max(seen[rank][i] for rank in seen) for i in range(3))


def test_four_ranks_read_their_bands(large, start_up, tmp_path):
    """Known fault F34."""
    output = tmp_path / "run.h5"
    # Steps enough that every rank is seen after its load; what a step adds is little.
    job = harness.start("run", large, "--prompt", "1", "--steps", 100, "--logits", "none", "--output", output, ranks=RANKS)
    seen = watch(job)
    result = job.finish()
    assert result.status == 0, result
    assert sorted(seen) == list(range(RANKS))
    size, band = large.stat().st_size, bands_of(k3("info", output).out)
    total = sum(seen[rank][2] - start_up[2] for rank in seen)
    print(f"file {size / MIB:.0f} MiB, largest band {band / MIB:.0f} MiB, peaks "
          f"{[round(seen[rank][0] / MIB) for rank in sorted(seen)]} MiB, read {total / MIB:.0f} MiB = {total / size:.4f} of the "
          f"file ({start_up[2] / MIB:.1f} MiB a rank of start-up taken off)")
    assert max(seen[rank][0] for rank in seen) <= band + BUFFER
    assert total <= 1.05 * size
    assert total >= 0.98 * size, "less than the file holds: the measurement is wrong"


def test_synthetic_model_makes_its_band_alone(tmp_path):
    """synth:RECIPE in place: each rank makes just its own band."""
    model = "synth:tiny:num_layers=3,num_experts=256,latent_size=512,moe_intermediate_size=512"
    output = tmp_path / "run.h5"
    job = harness.start("run", model, "--prompt", "1", "--steps", 100, "--logits", "none", "--output", output, ranks=RANKS)
    seen = watch(job)
    result = job.finish()
    assert result.status == 0, result
    band = bands_of(k3("info", output).out)
    assert band > BUFFER / 2 and max(seen[rank][0] for rank in seen) <= band + BUFFER


def test_limited_address_space(large, start_up, tmp_path):
    """One rank of four, as a slice, with no more address space than its band and 256 MiB above the libraries'."""
    words = ("run", large, "--prompt", "1", "--steps", 2, "--slice", f"0/{RANKS}", "--output", tmp_path / "run.h5")
    k3(*words)
    band = bands_of(k3("info", tmp_path / "run.h5").out)
    limit = int(start_up[1] + band + BUFFER) // 1024
    assert band + BUFFER < large.stat().st_size, "the limit would let the whole model through"
    job = harness.Job(["sh", "-c", f'ulimit -v {limit}; exec "$@"', "sh", harness.K3DECODE, *words, "--overwrite"])
    result = job.finish()
    assert result.status == 0, result


def test_no_memory_is_refused(large, start_up):
    """A model that does not fit is refused before loading, or at the failing allocation; never a crash."""
    job = harness.Job(["sh", "-c", f'ulimit -v {int(start_up[1] + 100 * MIB) // 1024}; exec "$@"', "sh", harness.K3DECODE, "run", large, "--prompt", "1"])
    result = job.finish()
    assert result.status == 3 and "no memory" in result.err, result


def test_too_large_for_this_machine(tmp_path):
    """Known sizes, no file: refused before anything is allocated, with the number of ranks that would do."""
    result = harness.refused("run", "synth:k3", "--prompt", "1", "--output", tmp_path / "run.h5", ranks=2,
                             phrases=("GB on each of 2 ranks", "at least"), timeout=60)
    assert not (tmp_path / "run.h5").exists() and result.seconds < 60


# ---------------------------------------------------------------- F32: offsets beyond 2^31

def sparse_model(path, experts, mark, types):
    """A model of one expert layer, its experts [experts, 2048, 2048] sparse in the file but for expert `mark`, which takes
    every token. `types`: f32 or mxfp4 of gate, up and down."""
    wide = 2048
    config = model_file.make_config(num_layers=2, mla_layers={2}, num_experts=2, num_experts_per_token=1, latent_size=wide,
                                    moe_intermediate_size=wide)
    tensors = model_file.random_tensors(config, SEED)
    config["num_experts"] = experts
    tensors["layers/001/router"] = np.zeros((experts, config["hidden_size"]), np.float32)
    tensors["layers/001/router_bias"] = np.eye(1, experts, mark, dtype=np.float32)[0]
    whole = {name: tensors.pop("layers/001/experts_" + name)[0] for name in ("gate", "up", "down")}
    model_file.write_model(path, config, tensors)
    with h5py.File(path, "r+") as file:
        for (name, value), kind in zip(whole.items(), types):
            data = value if kind == "f32" else model_file.quantise_mxfp4(value)
            properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
            properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
            space = h5py.h5s.create_simple((experts, *data.shape))
            made = h5py.Dataset(h5py.h5d.create(file.id, f"layers/001/experts_{name}".encode(),
                                                h5py.h5t.py_create(data.dtype), space, properties))
            made[mark] = data
            if kind != "f32":
                made.attrs["type"], made.attrs["shape"] = kind, np.array((experts, wide, wide), np.int64)


def available():
    with open("/proc/meminfo") as file:
        return int(re.search(r"MemAvailable:\s+(\d+) kB", file.read())[1]) * 1024


@pytest.mark.parametrize("experts, marks, types, memory", [
    # f32: expert 128 begins at byte 2^31
    pytest.param(129, (127, 128), ("mxfp4", "f32", "mxfp4"), 6, id="2.1 GiB"),
    # 5.1 GiB in float32: also past 2^32 bytes; in mxfp4 past 2^31 elements and, at 2 GiB of mxfp4, 2^31 bytes
    pytest.param(330, (0, 255, 256, 329), ("f32", "mxfp4", "mxfp4"), 12, id="5.2 GiB",
                 marks=pytest.mark.skipif(not SLOW, reason="K3_SLOW_TESTS=1 runs it: 8 GiB of memory")),
    pytest.param(970, (0, 511, 512, 963, 969), ("mxfp4", "mxfp4", "mxfp4"), 12, id="mxfp4 past 2^31 bytes",
                 marks=pytest.mark.skipif(not SLOW, reason="K3_SLOW_TESTS=1 runs it: 7 GiB of memory"))])
def test_experts_beyond_2_31_bytes(tmp_path, experts, marks, types, memory):
    """Sparse files cost no disk: weights at both sides of 2^31 bytes give what the same weights give at another place."""
    if available() < memory << 30:
        pytest.skip(f"needs {memory} GiB of free memory: one rank holds the model")
    path, want = tmp_path / "sparse.h5", None
    for mark in marks:
        path.unlink(missing_ok=True)
        sparse_model(path, experts, mark, types)
        assert path.stat().st_size > 2 << 30 and path.stat().st_blocks * 512 < 200 * MIB
        got = decode(path, tmp_path / "run.h5", steps=2, timeout=300)
        want = want or got
        assert np.array_equal(got[1], want[1]), f"expert {mark}"
