"""`k3decode info` on run files: the page about a finished, an interrupted and a strange run, and --follow on a live one."""
import os
import re
import shutil
import signal
import subprocess
import time

import h5py
import numpy as np
import pytest

from harness import K3DECODE, k3, needs_mpirun, refused, start

MODEL = "synth:tiny:num_layers=4"
PHASES = ("embed", "attn_kda", "attn_mla", "ffn_dense", "ffn_moe", "comm", "head")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A run of 20 steps of one rank."""
    path = tmp_path_factory.mktemp("info") / "run.h5"
    k3("run", MODEL, "--backend", "host", "--prompt", "1,2,3", "--steps", 20, "--output", path)
    return path


def changed(source, target, change):
    """A copy of a run file after `change(file)`."""
    shutil.copy(source, target)
    with h5py.File(target, "r+") as file:
        change(file)
    return target


def set_times(step_ms, rank_step_ms=None, phase_ms=None):
    """Times of a run as a change for `changed`."""
    def change(file):
        file["timings/step_ms"][:] = step_ms
        file["timings/rank_step_ms"][:] = np.reshape(step_ms, (-1, 1)) if rank_step_ms is None else rank_step_ms
        if phase_ms is not None:
            file["timings/phase_ms"][:] = phase_ms
    return change


def numbers(text):
    return [float(word) for word in re.findall(r"[-+]?\d+\.\d+", text)]


def line(out, name):
    found = [row for row in out.splitlines() if row.startswith(name)]
    assert len(found) == 1, (name, out)
    return found[0]


# ---------------------------------------------------------------- the page

def test_speed_and_step_are_the_quantiles_of_the_file(plain):
    out = k3("info", plain).out
    with h5py.File(plain) as file:
        step = file["timings/step_ms"][:]
        moved = file["timings/step_bytes"][:]
    p10, median, p90 = np.quantile(step, [0.1, 0.5, 0.9])
    assert numbers(line(out, "speed")) == pytest.approx([1e3 / median, 1e3 / p90, 1e3 / p10], abs=0.006)
    assert numbers(line(out, "step "))[:4] == pytest.approx([median, p10, p90, step.mean()], abs=6e-4)
    assert numbers(line(out, "step "))[4] == pytest.approx(100 * (p90 - p10) / median, abs=0.06)
    gigabytes = float(re.search(r"bytes a step +(\S+) GB on rank 0", line(out, "bytes a step"))[1])
    assert gigabytes == pytest.approx(moved.sum() / 1e9, rel=1e-3)
    rate = float(re.search(r"(\S+) GB/s at the median step", line(out, "bytes a step"))[1])
    assert rate == pytest.approx(moved.sum() / 1e6 / median, rel=2e-3)


def test_phase_table_holds_means_and_shares(plain):
    out = k3("info", plain).out
    with h5py.File(plain) as file:
        phases = file["timings/phase_ms"][:]
    means = phases.mean(axis=(0, 1))
    for name, mean in zip(PHASES, means):
        row = line(out, name + " ")
        assert numbers(row)[0] == pytest.approx(mean, abs=6e-5)
        assert numbers(row)[1] == pytest.approx(100 * mean / means.sum(), abs=0.06)


def test_page_of_an_older_file_without_bytes(plain, tmp_path):
    def change(file):
        del file["timings/step_bytes"], file["timings/step_bytes_names"]
    out = k3("info", changed(plain, tmp_path / "old.h5", change)).out
    assert "speed" in out and "bytes a step" not in out


def test_phases_of_a_captured_step_are_said_to_be_untimed(plain, tmp_path):
    out = k3("info", changed(plain, tmp_path / "zero.h5", set_times(np.ones(20), phase_ms=0.0))).out
    assert "not timed" in out and "attn_kda" not in out


def counted(model, positions):
    """trunk, experts, cache, state of one rank, from the datasets of a model file alone."""
    with h5py.File(model) as file:
        sizes, config = {}, dict(file["config"].attrs)
        layer_types = file["config/layer_types"][:]
        file.visititems(lambda name, item: sizes.update({name: item.size * item.dtype.itemsize}) if hasattr(item, "dtype") else None)
    held = {name: size for name, size in sizes.items() if not name.startswith(("config", "codebooks"))}
    experts = sum(size for name, size in held.items() if "/experts_" in name)
    embed = held.pop("embed")
    trunk = sum(held.values()) - experts + embed // config["vocab_size"]
    mla = int(layer_types.sum())
    cache = mla * positions * (config["kv_lora_rank"] + config["qk_rope_head_dim"]) * 4
    state = 2 * (len(layer_types) - mla) * config["num_heads"] * config["kda_head_dim"]**2 * 4
    return [trunk, experts * config["num_experts_per_token"] // config["num_experts"], cache, state]


@pytest.mark.parametrize("recipe", ["tiny", "tiny:trunk=q8_0,experts=mxfp4"])
def test_bytes_of_a_step_are_those_of_the_model_file(tmp_path, recipe):
    model = tmp_path / "model.h5"
    k3("synth", recipe, "--output", model)
    k3("run", model, "--backend", "host", "--context", 100, "--prompt", "1,2", "--steps", 3, "--output", tmp_path / "run.h5")
    with h5py.File(tmp_path / "run.h5") as run:
        moved = run["timings/step_bytes"]
        assert [name.decode() for name in run["timings/step_bytes_names"]] == ["trunk", "experts", "cache", "state"]
        positions = int(moved.attrs["positions"])
        assert positions == 100 + 2 + 3 - 2                 # of four tokens fed, three before the last step
        assert moved[0].tolist() == counted(model, positions)


@needs_mpirun
def test_bytes_of_the_ranks_are_the_parts_of_the_whole(tmp_path):
    """What is dealt out adds up; only what every rank holds counts more than once."""
    words = ("run", "synth:tiny", "--backend", "host", "--context", 300, "--steps", 2, "--logits", "none", "--overwrite", "--output")
    k3(*words, tmp_path / "one.h5")
    k3(*words, tmp_path / "four.h5", ranks=4)
    one, four = (h5py.File(tmp_path / f"{name}.h5")["timings/step_bytes"][:] for name in ("one", "four"))
    assert four.sum(axis=0)[1:].tolist() == one[0, 1:].tolist()
    assert one[0, 0] < four[:, 0].sum() < 1.5 * one[0, 0]


# ---------------------------------------------------------------- what was unusual

def unusual(path):
    """The section's lines."""
    return re.search(r"\nunusual\n((?:  .*\n)+)", k3("info", path).out)[1].splitlines()


def test_even_run_has_nothing_unusual(plain, tmp_path):
    times = 10 + 0.01 * np.sin(np.arange(20))
    assert unusual(changed(plain, tmp_path / "even.h5", set_times(times))) == ["  nothing"]


def test_slow_steps_are_named(plain, tmp_path):
    times = 10 + 0.01 * np.sin(np.arange(20))
    times[[4, 17]] = 12.5, 30.0
    rows = unusual(changed(plain, tmp_path / "slow.h5", set_times(times)))
    assert len(rows) == 1 and "2 of 20" in rows[0] and "4 (12.500 ms), 17 (30.000 ms)" in rows[0]


def test_step_within_the_spread_is_not_called_slow_control(plain, tmp_path):
    times = 10 + np.sin(np.arange(20))
    times[4] = 13.0                                     # beyond 2 deviations, within 6
    assert unusual(changed(plain, tmp_path / "wide.h5", set_times(times))) == ["  nothing"]
    equal = np.full(20, 10.0)
    equal[4] = 10.05                                    # the MAD is 0, the step below one per cent over
    assert unusual(changed(plain, tmp_path / "equal.h5", set_times(equal))) == ["  nothing"]


def of_ranks(path, target, own):
    """A run of len(own) ranks whose step is their own time, the rest of the slowest's spent in comm."""
    own = np.asarray(own, float)                        # [ranks, steps]
    ranks, steps = own.shape
    step = own.max(axis=0) + 0.1

    def change(file):
        phases = np.zeros((steps, ranks, len(PHASES)))
        phases[:, :, 1] = own.T
        phases[:, :, PHASES.index("comm")] = (step - own).T
        for name, value in (("rank_step_ms", np.repeat(step[:, None], ranks, axis=1)), ("phase_ms", phases)):
            del file["timings"][name]
            file["timings"][name] = value
        file["timings/step_ms"][:] = step
        file.attrs["ranks"] = ranks
        del file["timings/step_bytes"], file["timings/step_bytes_names"]
    return changed(path, target, change)


def test_rank_that_keeps_the_others_waiting_is_named(plain, tmp_path):
    own = 5 + 0.02 * np.random.default_rng(1).random((4, 20))
    assert unusual(of_ranks(plain, tmp_path / "even.h5", own)) == ["  nothing"]
    own[2] += 0.5
    rows = unusual(of_ranks(plain, tmp_path / "lag.h5", own))
    assert len(rows) == 1 and re.match(r"  rank 2 +the slowest in 20 of 20 steps", rows[0]), rows


def test_numbers_of_a_run_of_ranks(plain, tmp_path):
    """Slowest rank, slowest of a phase, sum of the phases, limits of what is unusual: of ranks that differ, by hand."""
    own = 5 + 0.001 * np.arange(20) + np.array([[0.0], [0.3], [0.7], [0.2]])
    rank_step = own + np.array([[0.0], [0.0], [0.4], [0.6]])

    def change(file):
        file["timings/rank_step_ms"][:] = rank_step.T
        file["timings/phase_ms"][:, 1, 0] = 2.0
        file["timings"].create_dataset("step_bytes", data=np.array([[1, 2, 3, 4], [10, 20, 30, 40], [2, 2, 2, 2], [1, 1, 1, 1]]) * 10**8)
        file["timings"].create_dataset("step_bytes_names", data=np.array([b"trunk", b"experts", b"cache", b"state"]))
        file["timings/step_bytes"].attrs["positions"] = 9
    path = changed(of_ranks(plain, tmp_path / "ranks.h5", own), tmp_path / "numbers.h5", change)
    out = k3("info", path).out
    with h5py.File(path) as file:
        phases, step = file["timings/phase_ms"][:], file["timings/step_ms"][:]
    means = rank_step.mean(axis=1)
    assert re.match(r"slowest rank +2 ", line(out, "slowest rank"))
    assert numbers(line(out, "slowest rank")) == pytest.approx([means[2], means.mean()], abs=6e-4)
    for name, slowest in ((PHASES[0], 1), (PHASES[1], 2), ("comm", 0)):
        row, at = line(out, name + " "), PHASES.index(name)
        assert row.split()[-1] == str(slowest) and numbers(row)[2] == pytest.approx(phases[:, slowest, at].mean(), abs=6e-5)
    assert numbers(line(out, "all "))[0] == pytest.approx(phases.sum(axis=2).mean(), abs=6e-5)
    assert re.match(r"bytes a step +10 GB on rank 1 by the plan \(trunk 1, experts 2, cache 3, state 4\)", line(out, "bytes a step"))
    assert float(re.search(r"(\S+) GB/s", line(out, "bytes a step"))[1]) == pytest.approx(1e4 / np.median(step), rel=1e-3)


def test_limits_of_what_is_unusual(plain, tmp_path):
    times = 10 + np.tile([0.0, 0.1, -0.1, 0.2], 5)
    median = np.median(times)
    limit = median + 6 * 1.4826 * np.median(np.abs(times - median))
    for above, found in ((-0.02, 0), (0.02, 1)):
        times[3] = limit + above                        # it was above the median before, so neither median nor MAD move
        rows = unusual(changed(plain, tmp_path / f"{found}.h5", set_times(times)))
        assert len(rows) == 1 and (f"beyond {limit:.3f} ms" in rows[0] if found else rows == ["  nothing"]), rows
    own = np.full((3, 20), 5.0)
    own[1] = 6.0
    own[0, :3] = 7.0                                    # rank 1 is the slowest in 17 of 20: not in nine of ten
    assert not [row for row in unusual(of_ranks(plain, tmp_path / "often.h5", own)) if "  rank" in row]
    own[0, 2] = 5.0                                     # in 18 of 20
    row, = [row for row in unusual(of_ranks(plain, tmp_path / "most.h5", own)) if "  rank" in row]
    assert "rank 1 " in row and numbers(row) == pytest.approx([own[1].mean(), own[[0, 2]].mean()], abs=6e-4)


def test_slice_and_context_are_labelled(tmp_path):
    k3("run", MODEL, "--backend", "host", "--slice", "1/2", "--context", 20, "--steps", 3, "--output", tmp_path / "slice.h5")
    rows = unusual(tmp_path / "slice.h5")
    assert any("slice 1/2" in row and "not logits" in row for row in rows)
    assert any("synthetic" in row for row in rows)


def test_interrupted_run_says_so(plain, tmp_path):
    job = start("run", "synth:tiny", "--backend", "host", "--prompt", "1", "--steps", 100000, "--output", tmp_path / "cut.h5")
    wait_for_steps(tmp_path / "cut.h5", 2)
    job.process.send_signal(signal.SIGTERM)
    job.finish()
    assert any("interrupted    stopped by signal 15 after" in row for row in unusual(tmp_path / "cut.h5"))


def wait_for_steps(path, least, seconds=30):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            with h5py.File(path, "r", swmr=True) as file:
                if int(file["decode/steps"][()]) >= least:
                    return
        except (OSError, KeyError):
            pass
        time.sleep(0.05)
    pytest.fail(f"{path} did not reach {least} steps")


# ---------------------------------------------------------------- following

def followed(out):
    """step -> token of the lines that --follow printed."""
    return {int(n): int(token) for n, token in re.findall(r"^step +(\d+)  token +(\d+) ", out, re.M)}


def tokens_of(path):
    with h5py.File(path, "r", swmr=True) as file:
        return dict(enumerate(file["decode/token_ids"][:int(file["decode/steps"][()])].tolist()))


def follow(path, *words):
    return start("info", "--follow", *words, path)


def test_follow_prints_each_step_of_a_live_run_and_ends_with_it(tmp_path):
    path = tmp_path / "live.h5"
    follower = follow(path)                             # before the file is there
    job = start("run", "synth:tiny", "--backend", "host", "--prompt", "1,2,3", "--steps", 60, "--output", path)
    assert job.finish().status == 0
    result = follower.finish(20)
    assert result.status == 0, result
    assert followed(result.out) == tokens_of(path) and len(followed(result.out)) == 60
    assert "ending           done" in result.out and "phase  " in result.out


@needs_mpirun
def test_follow_prints_steps_before_the_run_ends(tmp_path):
    path = tmp_path / "live.h5"
    job = start("run", "synth:tiny", "--backend", "host", "--prompt", "1", "--steps", 100000, "--output", path, ranks=2)
    wait_for_steps(path, 3)
    follower = follow(path)
    seen = []
    end = time.monotonic() + 20
    while len(seen) < 8 and time.monotonic() < end:     # the steps come while the run goes on
        row = follower.process.stdout.readline().decode()
        seen += re.findall(r"^step +(\d+)  token", row)
    alive = job.process.poll() is None
    follower.process.send_signal(signal.SIGINT)
    assert follower.finish(10).status == -signal.SIGINT and alive and seen == [str(n) for n in range(len(seen))]
    job.process.send_signal(signal.SIGTERM)
    job.finish()


def test_follow_says_that_the_writer_died(tmp_path):
    path = tmp_path / "killed.h5"
    job = start("run", "synth:tiny", "--backend", "host", "--prompt", "1", "--steps", 100000, "--output", path)
    wait_for_steps(path, 3)
    follower = follow(path, "--patience", 1)
    time.sleep(0.5)
    job.kill_all()
    job.finish()
    result = follower.finish(20)
    assert result.status == 3 and "its writer died" in result.err and len(result.errors()) == 1, result
    assert followed(result.out) == tokens_of(path)
    assert "not finished" in k3("info", path).out


def test_follow_waits_for_a_writer_that_lives_but_is_silent(tmp_path):
    path = tmp_path / "stopped.h5"
    job = start("run", "synth:tiny", "--backend", "host", "--prompt", "1", "--steps", 400, "--output", path)
    wait_for_steps(path, 3)
    (pid,) = job.ranks().values()
    os.kill(pid, signal.SIGSTOP)
    follower = follow(path, "--patience", 1)
    time.sleep(2.5)
    assert follower.process.poll() is None
    os.kill(pid, signal.SIGCONT)
    job.finish()
    result = follower.finish(20)
    assert result.status == 0 and "waiting on" in result.err and len(followed(result.out)) == 400, result


def test_follow_of_a_finished_run_ends_at_once(plain):
    result = k3("info", "--follow", plain)
    assert followed(result.out) == tokens_of(plain) and result.seconds < 5


def test_follow_refuses_what_is_no_run(plain, tmp_path):
    (tmp_path / "text").write_text("no HDF5\n")
    k3("synth", "tiny:num_layers=4", "--output", tmp_path / "model.h5")
    refused("info", "--follow", "--patience", 1, tmp_path / "absent.h5", phrases=["absent.h5", "cannot be read"])
    refused("info", "--follow", tmp_path / "text", phrases=["no HDF5 file"])
    refused("info", "--follow", tmp_path / "model.h5", status=2, phrases=["is a model file"])
    refused("info", "--follow", "--check", plain, status=2, phrases=["--follow is for run files"])
    refused("info", "--patience", 3, plain, status=2, phrases=["--patience S goes with --follow"])
    refused("info", "--follow", "synth:tiny", status=2, phrases=["--follow is for run files"])
    for bad in ("0", "x"):
        refused("info", "--follow", "--patience", bad, plain, status=2, phrases=["--patience"])
    os.mkfifo(tmp_path / "fifo")
    refused("info", "--follow", "--patience", 1, tmp_path / "fifo")


def test_page_to_a_closed_pipe_does_not_crash(plain):
    done = subprocess.run(f"'{K3DECODE}' info '{plain}' | head -n 1", shell=True, capture_output=True, text=True, timeout=30)
    assert done.stdout.startswith("run file") and "Traceback" not in done.stderr
