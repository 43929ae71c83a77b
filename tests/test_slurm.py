"""The batch scripts in a real Slurm that the test starts on this machine (tests/slurm_cluster.sh): jobs complete, a job that its
time limit cuts is requeued and gives the tokens of an undisturbed one, and what cannot be done is refused. Also the shell scripts
beside them: jobs/bind.sh and jobs/node.sh.

    /usr/bin/python3 -m pytest tests/test_slurm.py      (environment: see tests/harness.py)
"""
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

import h5py
import numpy as np
import pytest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import harness          # noqa: E402
from harness import K3DECODE, SEED, SETTINGS, TESTS   # noqa: E402

ROOT = TESTS.parent
MODEL = f"synth:tiny:seed={SEED}"
HOST = ("--backend", "host")


def words(*command, env=None, timeout=60, cwd=None):
    return subprocess.run([str(word) for word in command], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          env={**os.environ, **SETTINGS, **(env or {})}, timeout=timeout, cwd=cwd)


class Cluster:
    """A started Slurm and the folder that jobs are submitted from."""

    def __init__(self, folder, work):
        self.folder, self.work = folder, work
        self.env = {"SLURM_CONF": str(folder / "slurm.conf"), "K3DECODE": K3DECODE, "K3_ROOT": str(ROOT)}

    def submit(self, script, *arguments, options=(), env=None):
        options = ("--cpus-per-task=2",) if script == "import.sbatch" else ("--ntasks-per-node=2", *options)
        result = words("sbatch", "--parsable", *options, ROOT / "jobs" / script, *arguments,
                       env={**self.env, **(env or {})}, cwd=self.work)
        assert result.returncode == 0, result
        return result.stdout.strip()

    def show(self, job):
        text = words("scontrol", "-o", "show", "job", job, env=self.env).stdout
        return dict(re.findall(r"(\w+)=(\S+)", text))

    def wait(self, job, timeout=90.0):
        """Until the job has ended for good: what Slurm says of it, and what it printed."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            state = self.show(job)
            if state.get("JobState") in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"):
                return state, self.printed(job)
            time.sleep(0.2)
        pytest.fail(f"job {job} has not ended: {self.show(job)}\n{self.printed(job)}")

    def printed(self, job):
        return "".join(path.read_text() for path in self.work.glob(f"*-{job}.out"))

    def run(self, script, *arguments, **more):
        return self.wait(self.submit(script, *arguments, **more))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = pathlib.Path(tmp_path_factory.mktemp("slurm", numbered=True)) / "cluster"    # a short path: munge's socket is in it
    started = words("sh", TESTS / "slurm_cluster.sh", "start", folder, timeout=100)
    if started.returncode == 77:
        pytest.skip(started.stdout.strip().removeprefix("skipped: "))
    assert started.returncode == 0, started.stdout
    try:
        yield Cluster(folder, tmp_path_factory.mktemp("work"))
    finally:
        words("sh", TESTS / "slurm_cluster.sh", "stop", folder)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    path = tmp_path_factory.mktemp("undisturbed") / "run.h5"
    return harness.decode(MODEL, path, steps=12, ranks=1)


def ended_well(state, printed):
    assert state["JobState"] == "COMPLETED" and state["ExitCode"] == "0:0", (state, printed)


# ---------------------------------------------------------------- jobs that complete

@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_decode_job(cluster, undisturbed, launcher):
    state, printed = cluster.run("decode.sbatch", MODEL, "--prompt", "1,2,3", "--steps", "12", *HOST,
                                 env={"K3_LAUNCHER": launcher, "K3_OUTPUT": f"output/by-{launcher}"})
    ended_well(state, printed)
    with h5py.File(cluster.work / f"output/by-{launcher}.h5") as run:
        assert run.attrs["ranks"] == 2
        assert list(run["decode/token_ids"]) == list(undisturbed[0])
    assert (cluster.work / f"output/by-{launcher}.snapshot.h5").exists()


def test_sweep_job(cluster):
    state, printed = cluster.run("sweep.sbatch", "synth:tiny", "--contexts", "128,256", "--steps", "2", "--repeats", "2", *HOST)
    ended_well(state, printed)
    assert "verdict" in printed
    assert h5py.is_hdf5(cluster.work / f"output/sweep-{state['JobId']}.h5")


def test_parity_job(cluster):
    model = cluster.work / "a model.h5"                    # a path beside the job, not beside the scripts
    assert words(K3DECODE, "synth", "tiny", "--output", model).returncode == 0
    state, printed = cluster.run("parity.sbatch", model.name, env={"WORLDS": "1 2", "STEPS": "4", "PROMPT": "1,2"})
    ended_well(state, printed)
    text = (cluster.work / f"output/parity-{state['JobId']}.txt").read_text()
    assert "1 rank(s) against 2" in text and "mean KL" in text


def test_import_job(cluster):
    checkpoint = TESTS / "fixtures" / "public_k3" / "mxfp4"
    state, printed = cluster.run("import.sbatch", checkpoint, "imported.h5")
    ended_well(state, printed)
    assert words(K3DECODE, "info", cluster.work / "imported.h5").returncode == 0


# ---------------------------------------------------------------- the time limit

def steps_of(path):
    """Whole steps in a run file, also while it is written; 0 when it is not there yet."""
    try:
        with h5py.File(path, "r", swmr=True) as run:
            return int(run["decode/steps"][()])
    except (OSError, KeyError):
        return 0


def all_tokens(cluster, name):
    """The tokens of the run files NAME.h5, NAME.2.h5 … in order, and how many files there are."""
    paths = sorted(cluster.work.glob(f"{name}*.h5"), key=lambda path: (len(path.name), path.name))
    paths = [path for path in paths if "snapshot" not in path.name]
    tokens = []
    for path in paths:
        with h5py.File(path) as run:
            tokens += list(run["decode/token_ids"][: int(run["decode/steps"][()])])
    return tokens, len(paths)


@harness.needs_mpirun
def test_time_limit_requeues_and_goes_on(cluster, tmp_path):
    """Slurm's own signal before a limit of one minute, which it looks at twice a minute, cuts a job of three quarters of a minute;
    it is requeued and ends with the tokens of an undisturbed run."""
    begin = time.monotonic()
    harness.decode(MODEL, tmp_path / "probe.h5", steps=200, ranks=2)
    steps = min(max(int(45 / (time.monotonic() - begin) * 200), 400), 30000)
    harness.k3("run", MODEL, "--prompt", "1,2,3", "--steps", steps, "--logits", "none", "--output", tmp_path / "whole.h5",
               timeout=200.0)
    with h5py.File(tmp_path / "whole.h5") as run:
        whole = list(run["decode/token_ids"])
    job = cluster.submit("decode.sbatch", MODEL, "--prompt", "1,2,3", "--steps", steps, *HOST, "--logits", "none",
                         options=["--time=1", "--signal=B:USR1@58"], env={"K3_OUTPUT": "output/cut"})
    state, printed = cluster.wait(job, timeout=240.0)
    ended_well(state, printed)
    assert int(state["Restarts"]) >= 1 and "requeued, to go on from" in printed, (state, printed)
    tokens, files = all_tokens(cluster, "output/cut")
    assert 2 <= files <= int(state["Restarts"]) + 1         # a start that is stopped before its first step leaves no file
    assert tokens == whole


def test_stopped_without_requeue(cluster):
    """K3_REQUEUE=0: the signal ends the job, its file holds whole steps, and the snapshot is there."""
    job = cluster.submit("decode.sbatch", MODEL, "--prompt", "1,2,3", "--steps", 100000, *HOST, "--logits", "none",
                         env={"K3_OUTPUT": "output/stopped", "K3_REQUEUE": "0"})
    end = time.monotonic() + 60
    while steps_of(cluster.work / "output/stopped.h5") < 3 and time.monotonic() < end:
        time.sleep(0.1)
    words("scancel", "--batch", "--signal=USR1", job, env=cluster.env)
    state, printed = cluster.wait(job)
    assert state["JobState"] == "FAILED" and state["Restarts"] == "0", (state, printed)
    assert (cluster.work / "output/stopped.snapshot.h5").exists(), printed
    tokens, files = all_tokens(cluster, "output/stopped")
    assert files == 1 and 0 < len(tokens) < 100000


@pytest.mark.parametrize("moves", [True, False])
def test_requeued_only_with_a_new_snapshot(tmp_path, moves):
    """A start that is stopped before it wrote its snapshot anew would be stopped there again, for ever."""
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho scontrol \"$@\"\n")
    (tmp_path / "scontrol").chmod(0o755)
    (tmp_path / "snapshot").write_text("of an earlier start")
    ranks = tmp_path / "ranks.sh"           # says that it runs, and ends at the signal as the ranks do
    ranks.write_text(f"trap '{'echo new >new; mv new snapshot;' if moves else ''} exit 138' USR1\ntouch runs\n"
                     "for i in $(seq 100); do sleep 0.1; done\n")
    script = (f"job_script=x root={ROOT}; . {ROOT}/jobs/slurm.sh; start() {{ exec bash ranks.sh; }}; "
              "(while [ ! -e runs ]; do sleep 0.05; done; kill -USR1 $$) & stop_before_limit snapshot start; exit $status")
    result = words("bash", "-c", script, cwd=tmp_path,
                   env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "K3DECODE": K3DECODE, "K3_LAUNCHER": "mpirun"})
    assert result.returncode == 138, result
    assert ("scontrol requeue 7" in result.stdout) == moves
    assert ("before it had written" in result.stderr) == (not moves)


# ---------------------------------------------------------------- what is refused

@pytest.mark.parametrize("script, arguments, env, sentence", [
    ("decode.sbatch", (), {}, "which model?"),
    ("decode.sbatch", (MODEL, "--output", "x.h5"), {}, "K3_OUTPUT"),
    ("decode.sbatch", (MODEL, "--out=x.h5"), {}, "K3_OUTPUT"),
    ("sweep.sbatch", (), {}, "which model?"),
    ("import.sbatch", ("one",), {}, "from where to where?"),
    ("parity.sbatch", ("one", "two"), {}, "one model"),
    ("decode.sbatch", (MODEL,), {"K3_LAUNCHER": "telnet"}, "srun or mpirun"),
    ("decode.sbatch", (MODEL,), {"K3_ROOT": "/nowhere"}, "no checkout"),
])
def test_refused(cluster, script, arguments, env, sentence):
    state, printed = cluster.run(script, *arguments, env=env)
    assert state["JobState"] == "FAILED" and state["ExitCode"] == "2:0", (state, printed)
    assert sentence in printed


@pytest.mark.parametrize("script", ["decode.sbatch", "sweep.sbatch", "import.sbatch", "parity.sbatch"])
def test_without_slurm(script):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    result = subprocess.run(["bash", str(ROOT / "jobs" / script), MODEL], capture_output=True, text=True,
                            env={**environment, "K3_ROOT": str(ROOT)}, timeout=20)
    assert result.returncode == 2 and "sbatch" in result.stderr


def test_a_failure_is_the_jobs(cluster):
    state, printed = cluster.run("decode.sbatch", "nosuch.h5", "--prompt", "1", *HOST)
    assert state["JobState"] == "FAILED" and state["ExitCode"] == "3:0" and "nosuch.h5" in printed, (state, printed)


# ---------------------------------------------------------------- a shell on a node

@pytest.fixture
def machine(tmp_path):
    """A made-up node: three GPUs of which the first two stand by one set of cores, seen through PATH and K3_SYSFS."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("needs two processor cores")
    places = {"0f": f"{cores[0]},{cores[1]}", "2d": f"{cores[0]},{cores[1]}", "44": "4000-4003"}
    program = tmp_path / "nvidia-smi"
    lines = [f"{index}, GPU-{place}aaaa, 00000000:{place.upper()}:00.0" for index, place in enumerate(places)]
    program.write_text("#!/bin/sh\ncat <<END\n" + "\n".join(lines) + "\nEND\n")
    program.chmod(0o755)
    for place, local in places.items():
        device = tmp_path / "sys" / "bus" / "pci" / "devices" / f"0000:{place}:00.0"
        device.mkdir(parents=True)
        (device / "local_cpulist").write_text(local + "\n")
    return cores, {"PATH": f"{tmp_path}:{os.environ['PATH']}", "K3_SYSFS": str(tmp_path / "sys"), "K3_VERBOSE": "1"}


def bound(env, rank, ranks=3, **more):
    result = words("sh", ROOT / "jobs" / "bind.sh", sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))",
                   env={**env, "OMPI_COMM_WORLD_LOCAL_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_SIZE": str(ranks), **more})
    assert result.returncode == 0, result
    return eval(result.stdout), result.stderr


def test_ranks_are_bound_to_the_cores_of_their_gpu(machine):
    cores, env = machine
    assert bound(env, 0)[0] == [cores[0]] and bound(env, 1)[0] == [cores[1]]    # two ranks share two cores
    assert bound(env, 0, ranks=1)[0] == cores[:2]
    assert bound(env, 0, ranks=1, CUDA_VISIBLE_DEVICES="1")[0] == cores[:2]


def test_without_known_cores_nothing_is_bound(machine):
    cores, env = machine
    for rank, sentence in ((2, "too few"), (3, "not known")):
        where, said = bound(env, rank)
        assert where == cores and sentence in said
    where, said = bound({**env, "K3_SYSFS": "/nowhere"}, 0)
    assert where == cores and "not known" in said


@harness.needs_mpirun
def test_node(tmp_path):
    environment = {"K3DECODE": K3DECODE, "RANKS": "2"}
    if shutil.which("nvidia-smi"):
        pytest.skip("this machine has GPUs: jobs/gpu_check.sh runs there")
    result = words("bash", ROOT / "jobs" / "node.sh", MODEL, "--prompt", "1,2,3", "--steps", "3", cwd=tmp_path, env=environment)
    assert result.returncode == 0 and re.search(r"^ranks +2,", result.stdout, re.M), result
    assert len(list((tmp_path / "output").glob("node-*.h5"))) == 1


@pytest.mark.parametrize("env, arguments, status, sentence", [
    ({"RANKS": "two"}, (MODEL,), 2, "no number"),
    ({}, (MODEL,), 4, "no GPU"),
    ({"RANKS": "2", "SLURM_JOB_ID": "1", "SLURM_NNODES": "2"}, (MODEL,), 2, "decode.sbatch"),
    ({"RANKS": "2"}, ("nosuch.h5", "--prompt", "1"), 3, "nosuch.h5"),
    ({"K3DECODE": "/nowhere", "PATH": "/usr/bin:/bin"}, (MODEL,), 2, "K3DECODE"),
])
def test_node_refuses(tmp_path, env, arguments, status, sentence):
    result = words("bash", ROOT / "jobs" / "node.sh", *arguments, cwd=tmp_path, env={"K3DECODE": K3DECODE, **env})
    assert result.returncode == status and sentence in result.stderr, result


def test_node_refuses_more_ranks_than_gpus(machine, tmp_path):
    result = words("bash", ROOT / "jobs" / "node.sh", MODEL, cwd=tmp_path, env={**machine[1], "K3DECODE": K3DECODE, "RANKS": "4"})
    assert result.returncode == 4 and "4 ranks, but 3 GPUs" in result.stderr, result


@pytest.mark.parametrize("visible, places", [
    (None, "0f 2d 44"), ("", ""), ("2,0", "44 0f"), ("GPU-2d", "2d"), ("1,7,0", "2d"), ("-1", ""),
])
def test_gpus(machine, visible, places):
    env = {**machine[1], **({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})}
    result = words("sh", ROOT / "jobs" / "gpus.sh", env=env)
    assert result.returncode == 0 and [line.split(":")[1].lower() for line in result.stdout.split()] == places.split(), result


def test_no_gpus(tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho NVIDIA-SMI has failed because it could not communicate with the driver.\nexit 9\n")
    program.chmod(0o755)
    for path in (f"{tmp_path}:{os.environ['PATH']}", *([] if shutil.which("nvidia-smi") else [os.environ["PATH"]])):
        result = words("sh", ROOT / "jobs" / "gpus.sh", env={"PATH": path})
        assert result.returncode == 0 and result.stdout == "", result
