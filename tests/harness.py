"""What the end-to-end tests share: running k3decode and mpirun with time limits, and reading run files.

`make check` sets K3DECODE, K3DECODE_BREAKABLE and MPIRUN; by hand:

    K3DECODE=./k3decode K3DECODE_BREAKABLE=tests/k3decode-breakable /usr/bin/python3 -m pytest tests/test_parity.py

Every process that a test starts bears a mark of its own in its environment, inherited by all ranks wherever
mpirun puts them, so that what is left behind can be found, and ended, without touching anything else.
"""
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid

import h5py
import numpy as np
import pytest

TESTS = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(TESTS))

K3DECODE = os.path.abspath(os.environ.get("K3DECODE", TESTS.parent / "k3decode"))
K3DECODE_BREAKABLE = os.path.abspath(os.environ.get("K3DECODE_BREAKABLE", TESTS / "k3decode-breakable"))
MPIRUN = os.environ.get("MPIRUN") or shutil.which("mpirun") or shutil.which("mpiexec")
SEED = int(os.environ.get("K3_TEST_SEED", np.random.SeedSequence().entropy % 2**31))   # fresh unless given
SLOW = os.environ.get("K3_SLOW_TESTS") == "1"
MARK = "K3_TEST_MARK"

# A signal that is ignored here (under nohup, in the background of a script) would be ignored by every program that a test
# starts, also where the test sends it. One that is caught is the default again behind exec.
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, lambda *_: None)

# As tests/environment.sh, for a run by hand.
SETTINGS = {"OMP_NUM_THREADS": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1",
            "OMPI_MCA_hwloc_base_binding_policy": "none", "OMPI_MCA_mpi_yield_when_idle": "1",
            "OMPI_MCA_btl_vader_single_copy_mechanism": "none"}
if os.geteuid() == 0:
    SETTINGS.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")

needs_mpirun = pytest.mark.skipif(MPIRUN is None, reason="needs mpirun (Debian: openmpi-bin)")


def show_seed():
    print(f"K3_TEST_SEED={SEED}")


# ---------------------------------------------------------------- processes

def processes_of(mark):
    """pid -> command line of the living processes that bear the mark."""
    found, word = {}, f"{MARK}={mark}".encode()
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/environ", "rb") as file:
                if word not in file.read().split(b"\0"):
                    continue
            with open(f"/proc/{entry}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":       # ended, not yet waited for
                    continue
            with open(f"/proc/{entry}/cmdline", "rb") as file:
                found[int(entry)] = file.read().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue
    return found


class Job:
    """A started program, with the processes it starts. `finish` must be called."""

    def __init__(self, words, env=None, cwd=None):
        self.mark = uuid.uuid4().hex
        environment = {**SETTINGS, **os.environ, **(env or {}), MARK: self.mark}
        self.words = [str(word) for word in words]
        self.begin = time.monotonic()
        self.process = subprocess.Popen(self.words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE, env=environment, cwd=cwd, start_new_session=True)

    def ranks(self):
        """rank -> pid of the k3decode processes that run now."""
        ranks = {}
        for pid, command in processes_of(self.mark).items():
            if " run " not in f"{command} " or "mpirun" in command or "orted" in command:
                continue
            try:
                with open(f"/proc/{pid}/environ", "rb") as file:
                    match = re.search(rb"OMPI_COMM_WORLD_RANK=(\d+)", file.read())
            except OSError:
                continue
            ranks[int(match[1]) if match else 0] = pid
        return ranks

    def left_behind(self, within=5.0):
        """Processes that still live `within` seconds from now; ends early when there are none."""
        end = time.monotonic() + within
        while (left := processes_of(self.mark)) and time.monotonic() < end:
            time.sleep(0.05)
        return left

    def kill_all(self):
        for pid in processes_of(self.mark):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def finish(self, timeout=60.0):
        """Waits for the end: a Result. Nothing of it may live on."""
        try:
            out, err = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.kill_all()
            out, err = self.process.communicate()
            pytest.fail(f"no end within {timeout} s: {' '.join(self.words)}\n{err.decode(errors='replace')}")
        seconds = time.monotonic() - self.begin
        left = self.left_behind()
        self.kill_all()
        assert not left, f"left behind after {' '.join(self.words)}: {left}"
        return Result(self.words, self.process.returncode, out.decode(errors="replace"),
                      err.decode(errors="replace"), seconds)


class Result:
    def __init__(self, words, status, out, err, seconds):
        self.words, self.status, self.out, self.err, self.seconds = words, status, out, err, seconds

    def __repr__(self):
        return (f"{' '.join(self.words)}\nexit status {self.status} after {self.seconds:.2f} s\n"
                f"stdout: {self.out[-3000:]}\nstderr: {self.err[-6000:]}")

    def errors(self):
        """The program's own messages, each once."""
        return [line for line in self.err.splitlines() if line.startswith("k3decode: ")]


def start(*words, ranks=1, program=None, env=None, mpi=(), cwd=None):
    """Starts k3decode WORDS, under mpirun for more than one rank (or with `mpi` options)."""
    words = [program or K3DECODE, *words]
    if ranks > 1 or mpi:
        words = [MPIRUN, *mpi, "-n", ranks, *words]
    return Job(words, env, cwd)


def k3(*words, timeout=60.0, status=0, **more):
    """Runs k3decode to its end and checks its exit status (None: any)."""
    result = start(*words, **more).finish(timeout)
    assert status is None or result.status == status, result
    return result


def refused(*words, status=3, phrases=(), **more):
    """A run that must be refused: exit status, phrases, one message alone, no rank left behind."""
    more["env"] = {"OMPI_MCA_odls_base_sigkill_timeout": "0", **more.get("env", {})}    # mpirun waits 1 s otherwise
    result = k3(*words, status=status, **more)
    text = "\n".join(result.errors())
    for phrase in phrases:
        assert str(phrase) in text, f"no {str(phrase)!r} in\n{result}"
    assert len(result.errors()) == 1, f"wanted one message\n{result}"
    return result


# ---------------------------------------------------------------- models and runs

def ids(tokens):
    return ",".join(str(int(token)) for token in tokens)


def decode(model, output, *words, prompt=(1, 2, 3), steps=4, **more):
    """k3decode run MODEL: (tokens [steps], logits [steps, V]) of the run file."""
    given = ("--prompt", ids(prompt)) if prompt is not None else ()
    k3("run", model, *given, "--steps", steps, "--output", output, "--overwrite", *words, **more)
    tokens, logits = read_run(output)
    assert len(tokens) == steps and np.isfinite(logits).all()
    return tokens, logits


def read_run(path):
    """(token_ids, logits) of the whole steps."""
    with h5py.File(path, "r", swmr=True) as run:
        steps = int(run["decode/steps"][()])
        return run["decode/token_ids"][:steps], run["decode/logits"][:steps].astype(np.float64)


def ending(path):
    with h5py.File(path, "r", swmr=True) as run:
        value = run["ending"][()]
    return value.decode() if isinstance(value, bytes) else str(value)


def same(got, want, limit):
    """Two runs: equal tokens, logits within `limit`."""
    assert np.array_equal(got[0], want[0]), f"tokens {got[0]} and {want[0]}"
    error = np.abs(got[1] - want[1]).max()
    print(f"largest logit error {error:.3g}, limit {limit:.3g}")
    assert error <= limit, f"logits differ by {error}"


def relative(got, want):
    return np.linalg.norm(np.asarray(got, float) - want) / np.linalg.norm(want)
