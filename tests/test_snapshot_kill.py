"""kill -9 at a random moment, fifty times: the run file always opens and holds whole steps, and a file under the snapshot's name
is always a whole snapshot, from which the job goes on to the tokens of a job that nobody killed.

    /usr/bin/python3 -m pytest tests/test_snapshot_kill.py      (environment: see tests/harness.py)
"""
import os
import signal
import sys
import time

import h5py
import numpy as np
import pytest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import harness          # noqa: E402
from harness import K3DECODE_BREAKABLE, SEED, k3, needs_mpirun, start   # noqa: E402

pytestmark = needs_mpirun
KILLS, STEPS = 50, 600
MODEL = f"synth:tiny:seed={SEED},num_layers=5"
PROMPT = (3, 1, 4)
random = np.random.default_rng(SEED)


@pytest.fixture(scope="module")
def want(tmp_path_factory):
    harness.show_seed()
    return harness.decode(MODEL, tmp_path_factory.mktemp("whole") / "whole.h5", prompt=PROMPT, steps=STEPS)


def check_run_file(path, want):
    """Opens, and its whole steps are right; the number of them."""
    with h5py.File(path, "r", swmr=True) as run:
        steps, first = int(run["decode/steps"][()]), int(run.attrs["first_step"])
        for name in ("decode/token_ids", "decode/logits", "timings/step_ms", "timings/phase_ms"):
            assert len(run[name]) >= steps, name
        assert np.array_equal(run["decode/token_ids"][:steps], want[0][first:first + steps])
        assert np.array_equal(run["decode/logits"][:steps], want[1][first:first + steps])
    return steps


def files_like(folder, pattern):
    found = set()
    for path in folder.glob(pattern):
        try:
            found.add((path.name, path.stat().st_ino))
        except FileNotFoundError:       # renamed meanwhile
            pass
    return found


def killed(folder, delay, after=None, program=None, env=None):
    """Starts the job, or goes on with it, and kills it so many seconds after its start, or after a file `after` appears."""
    before = files_like(folder, after) if after else None
    job = start("run", MODEL, "--prompt", harness.ids(PROMPT), "--steps", STEPS, "--continue", folder / "state.h5",
                "--snapshot-every", 1, "--output", folder / "run.h5", program=program, env=env)
    while after and not files_like(folder, after) - before and job.process.poll() is None:
        pass
    time.sleep(delay)
    job.process.send_signal(signal.SIGKILL)
    return job.finish()


def snapshot_is_whole(path, want):
    """The program takes it, and it tells the right tokens."""
    if not path.exists():
        return True
    if harness.k3("info", path, status=None).status != 0:
        return False
    with h5py.File(path, "r") as file:
        tokens = file["token_ids"][...]
    return np.array_equal(tokens, [*PROMPT, *want[0][:len(tokens) - len(PROMPT)]])


def test_fifty_kills(tmp_path, want):
    steps = files = 0
    for kill in range(KILLS):
        delay, after = ((0.8, None), (0.01, "run*.h5*"), (0.005, "state.h5.partial"), (0.3, "run*.h5"))[kill % 4]
        result = killed(tmp_path, random.uniform(0.0, delay), after)
        assert result.status in (-signal.SIGKILL, 0), result
        assert snapshot_is_whole(tmp_path / "state.h5", want), kill
    for path in tmp_path.glob("run*.h5"):
        steps += check_run_file(path, want)
        files += 1
    print(f"{KILLS} kills, {files} run files with {steps} steps in all")
    assert files >= KILLS // 2 and steps > KILLS
    k3("run", MODEL, "--prompt", harness.ids(PROMPT), "--steps", STEPS, "--continue", tmp_path / "state.h5")
    with h5py.File(tmp_path / "state.h5", "r") as file:
        assert np.array_equal(file["token_ids"][len(PROMPT):], want[0])


def test_kill_control(tmp_path, want):
    """A snapshot written in place is soon caught half-made."""
    for kill in range(KILLS):
        (tmp_path / str(kill)).mkdir()
        killed(tmp_path / str(kill), random.uniform(0.0, 0.1), "state.h5", K3DECODE_BREAKABLE, {"K3_BREAK": "snapshot_in_place"})
        if not snapshot_is_whole(tmp_path / str(kill) / "state.h5", want):
            print(f"caught by kill {kill + 1}")
            return
    pytest.fail("no kill found the snapshot half-made")
