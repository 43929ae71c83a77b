"""`k3decode sweep` on the host backend: table, sweep file, noise floor, refusals, ranks, signals; and `info --plan --context`."""
import os
import re
import signal
import time

import h5py
import numpy as np
import pytest

from harness import K3DECODE_BREAKABLE, k3, needs_mpirun, refused, start

SMALL = ("synth:tiny:num_layers=4", "--backend", "host")
CONTEXTS = (8, 70, 1100)
STEPS, REPEATS = 3, 2
STATISTICS = ("median", "min", "max", "p10", "p90")


def text(value):
    return value.decode() if isinstance(value, bytes) else str(value)


def sweep(*words, contexts=CONTEXTS, steps=STEPS, repeats=REPEATS, model=SMALL, **more):
    return k3("sweep", *model, "--contexts", ",".join(map(str, contexts)), "--steps", steps, "--repeats", repeats, *words,
              **more)


def cells(out):
    """Rows of the first table: (context, arm letter, with ' and '' for the A/A pair) -> figures."""
    found = {}
    for line in out.split("# depth:")[0].split("# difference:")[0].splitlines():
        match = re.match(r" *(\d+)  ([AB]'{0,2}) .*?((?: +\d+\.\d{4}){5})", line)
        if match:
            found[int(match[1]), match[2]] = [float(word) for word in match[3].split()]
    return found


def differences(out):
    """Rows of the second table: context -> its words after the medians."""
    rows = out.split("# difference:")[1].split("# depth:")[0].splitlines()
    return {int(row.split()[0]): row.split()[3:] for row in rows if not row.startswith("#") and row.split()[0].isdigit()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """One sweep of the default arms: its Result and its file."""
    path = tmp_path_factory.mktemp("sweep") / "sweep.h5"
    return sweep("--output", path), path


def test_table_head_names_command_versions_device_and_settings(whole):
    head = "\n".join(line for line in whole[0].out.splitlines() if line.startswith("#"))
    for phrase in ("# k3decode sweep synth:tiny", "HDF5", "built with", "rank 0", "settings: 3 steps", "A = split",
                   "B = unsplit", "positions", "ms"):
        assert phrase in head, phrase


def test_file_describes_itself(whole):
    with h5py.File(whole[1]) as file:
        assert text(file.attrs["format"]) == "k3decode-sweep"
        assert text(file.attrs["command"]).startswith("k3decode sweep synth:tiny")
        assert int(file.attrs["steps"]) == STEPS and int(file.attrs["repeats"]) == REPEATS
        assert file["contexts"][()].tolist() == list(CONTEXTS)
        assert [text(name) for name in file["arms/names"]] == ["split", "unsplit"]
        assert file["timings/step_ms"].shape == (3, 2, REPEATS, 2, STEPS)
        assert file["timings/step_ms"].shape == file["timings/same_arm_step_ms"].shape
        assert "slices" in text(file["arms/attention"][2, 0]) and "1 slice " in text(file["arms/attention"][2, 1])

        def described(name, item):
            if isinstance(item, h5py.Dataset) and item.dtype.kind in "fi" and not name.startswith("config/"):
                assert text(item.attrs["axes"]) and text(item.attrs["meaning"]), name
                if name.endswith("_ms"):
                    assert text(item.attrs["units"]) == "ms", name
        file.visititems(described)


def test_statistics_follow_from_the_times(whole):
    with h5py.File(whole[1]) as file:
        times, same = file["timings/step_ms"][()], file["timings/same_arm_step_ms"][()]
        assert np.isfinite(times).all() and (times > 0).all() and np.isfinite(same).all()
        flat = times.reshape(3, 2, -1)
        want = np.stack([np.median(flat, 2), flat.min(2), flat.max(2), np.quantile(flat, 0.1, 2), np.quantile(flat, 0.9, 2)], 2)
        assert [text(name) for name in file["curve/statistic_names"]] == list(STATISTICS)
        np.testing.assert_allclose(file["curve/step_ms"][()], want, rtol=1e-12)
        # the floor is the largest difference of the A/A pair; where both arms run one plan, their difference joins it
        pair = np.median(same.reshape(3, 2, REPEATS, -1), 3)
        np.testing.assert_allclose(file["curve/same_arm_difference_ms"][()], pair[:, 1] - pair[:, 0], atol=1e-12)
        difference = want[:, 1, 0] - want[:, 0, 0]
        np.testing.assert_allclose(file["curve/difference_ms"][()], difference, atol=1e-12)
        path = file["curve/same_path"][()].astype(bool)
        assert path.tolist() == [True, True, False]        # one slice up to 1,024 rows, whichever arm
        floor = np.abs(pair[:, 1] - pair[:, 0]).max(1)
        floor = np.where(path, np.maximum(floor, np.abs(difference)), floor)
        np.testing.assert_allclose(file["curve/own_floor_ms"][()], floor, atol=1e-12)
        # a lucky context does not lower the floor: the worst of all counts, in ms or as a share
        middle = file["curve/same_arm_step_ms"][:, 0, 0]
        floor = np.maximum(floor, np.minimum(floor.max(), (floor / middle).max() * middle))
        np.testing.assert_allclose(file["curve/floor_ms"][()], floor, atol=1e-12)
        arms = np.median(times.reshape(3, 2, REPEATS, -1), 3)
        np.testing.assert_allclose(file["curve/repeat_difference_ms"][()], arms[:, 1] - arms[:, 0], atol=1e-12)
        agree = ((arms[:, 1] - arms[:, 0]) * difference[:, None] > 0).all(1)
        assert (file["curve/above_floor"][()].astype(bool) == ((np.abs(difference) > floor) & ~path & agree)).all()
        np.testing.assert_allclose(file["curve/depth_ms"][()], want[:, :, 0] - want[0, :, 0], atol=1e-12)
        control = np.median(file["timings/phase_ms"][()], 3)
        np.testing.assert_allclose(file["curve/control_ms"][()], control, atol=1e-12)
        kept = [n for n, name in enumerate(file["timings/phase_names"]) if text(name) in ("attn_kda", "ffn_dense", "ffn_moe")]
        assert not file["timings/phase_touched"][()][kept].any()
        mean = control[..., kept].sum(3).mean(1)           # [context, arm]
        want_floor = np.abs(mean - mean[0]) + floor[:, None] + floor[0]
        want_floor[0] = 0
        np.testing.assert_allclose(file["curve/depth_floor_ms"][()], want_floor, atol=1e-12)


def test_table_and_file_agree(whole):
    rows = cells(whole[0].out)
    with h5py.File(whole[1]) as file:
        curve, same, above = file["curve/step_ms"][()], file["curve/same_arm_step_ms"][()], file["curve/above_floor"][()]
        floor = file["curve/floor_ms"][()]
        for c, context in enumerate(CONTEXTS):
            for arm in (0, 1):
                np.testing.assert_allclose(rows[context, "AB"[arm]], curve[c, arm], atol=6e-5)
                np.testing.assert_allclose(rows[context, ("A'", "A''")[arm]], same[c, arm], atol=6e-5)
            words = differences(whole[0].out)[context]
            assert ("no difference" in " ".join(words)) == (not above[c]), words
            assert (words[:2] == ["-", "-"]) == (not above[c]) and abs(float(words[3]) - floor[c]) < 6e-5, words
    assert "verdict: the arms differ at" in whole[0].out


def test_both_arms_choose_the_same_tokens(whole):
    with h5py.File(whole[1]) as file:
        tokens = file["tokens"][()]
    assert tokens.shape == (3, 2, STEPS) and (tokens >= 0).all() and (tokens[:, 0] == tokens[:, 1]).all()
    assert "tokens: both arms chose the same 3 at 3 of 3 contexts" in whole[0].out


def test_phases_show_controls_and_what_the_arms_touch(whole):
    tail = whole[0].out.split("# phases:")[1]
    for phase in ("attn_kda", "ffn_moe"):
        assert re.search(rf"^ *\d+  {phase} .*control$", tail, re.M), tail
    assert re.search(r"^ *\d+  attn_mla .*the arms differ here$", tail, re.M), tail


def test_depth_shows_in_attention_alone(whole):
    """1,100 positions against 8: the MLA phase grows by far more than the clock's noise."""
    with h5py.File(whole[1]) as file:
        names = [text(name) for name in file["timings/phase_names"]]
        best = file["timings/phase_ms"][()].min(axis=(1, 2, 3))[:, names.index("attn_mla")]
    assert best[2] > 2 * best[0], best


def test_planted_slowness_of_one_arm_is_seen_control():
    """30 ms more in the un-split arm alone: above the floor, and the A/A pair stays under it."""
    result = sweep(contexts=(1100,), program=K3DECODE_BREAKABLE, env={"K3_BREAK": "slow_unsplit"})
    words = differences(result.out)[1100]
    assert "split is faster" in " ".join(words) and float(words[0]) > 15 > float(words[3]), result
    assert "the arms differ at 1 of 1 contexts" in result.out


def test_arm_that_does_not_exist_here_is_named_not_replaced(tmp_path):
    path = tmp_path / "sweep.h5"
    result = sweep("--arms", "tensor,unsplit", "--output", path, contexts=(8,), steps=1)
    assert "A = tensor: does not exist here: core and tensor are kernels of the CUDA backend" in result.out
    assert re.search(r"^ *8  A tensor +no such arm here$", result.out, re.M)
    assert (8, "B''") in cells(result.out) and (8, "A") not in cells(result.out)
    assert "one arm does not exist here, nothing to compare" in result.out and "# difference" not in result.out
    with h5py.File(path) as file:
        assert np.isnan(file["timings/step_ms"][0, 0]).all() and np.isfinite(file["timings/step_ms"][0, 1]).all()
        assert np.isnan(file["curve/difference_ms"][0]) and (file["tokens"][0, 0] == -1).all()
        assert "CUDA" in text(file["arms/missing_because"][0])


def test_cache_bands_of_a_slice(tmp_path):
    path = tmp_path / "sweep.h5"
    sweep("--arms", "cache-band:context,cache-band:none", "--slice", "0/2", "--output", path, contexts=(8, 1100), steps=1)
    with h5py.File(path) as file:
        assert text(file.attrs["kind"]).startswith("slice 0/2")
        banded, whole_cache = (text(line) for line in file["arms/attention"][1])
        assert "8 heads" in banded and "4 heads" in whole_cache and "1101 rows" in whole_cache


@needs_mpirun
def test_two_ranks(tmp_path):
    path = tmp_path / "sweep.h5"
    result = sweep("--arms", "cache-band:context,cache-band:none", "--output", path, contexts=(8, 200), ranks=2)
    assert "rank 1" in result.out and set(cells(result.out)) == {(c, a) for c in (8, 200) for a in ("A", "B", "A'", "A''")}
    with h5py.File(path) as file:
        assert int(file.attrs["ranks"]) == 2
        tokens = file["tokens"][()]
        assert (tokens[:, 0] == tokens[:, 1]).all()


def test_arms_give_the_same_logits(tmp_path):
    """run --attention: one slice and several against each other at 1,100 positions."""
    for arm in ("split", "unsplit"):
        k3("run", *SMALL, "--context", 1100, "--steps", 3, "--attention", arm, "--output", tmp_path / f"{arm}.h5")
    k3("compare", tmp_path / "split.h5", tmp_path / "unsplit.h5", "--max-mean-kl", "1e-9")
    refused("run", *SMALL, "--context", 9, "--attention", "tensor", phrases=["--attention tensor", "CUDA backend"])
    refused("run", *SMALL, "--context", 9, "--attention", "flash", status=2, phrases=["wanted split, unsplit, core or tensor"])


def test_info_prints_what_the_sweep_printed(whole, tmp_path):
    printed = [line for line in whole[0].out.splitlines() if not line.startswith("# sweep file:")]
    page = k3("info", whole[1]).out.splitlines()
    assert page[0].startswith("# sweep file ") and page[1:] == printed
    refused("info", whole[1], "--check", status=2, phrases=["--check and --plan are for model files"])
    # a file that lacks a table, or whose tables do not fit together, is refused by name
    for name, change in (("curve/floor_ms", None), ("contexts", 9), ("tokens", 9)):
        damaged = tmp_path / "damaged.h5"
        damaged.write_bytes(whole[1].read_bytes())
        with h5py.File(damaged, "r+") as file:
            del file[name]
            if change:
                file[name] = np.zeros(change, np.int64)
        refused("info", damaged, phrases=[f"dataset /{name}", damaged])


def test_info_of_one_arm_alone(tmp_path):
    path = tmp_path / "sweep.h5"
    result = sweep("--arms", "tensor,split", "--output", path, contexts=(8,), steps=1)
    printed = [line for line in result.out.splitlines() if not line.startswith("# sweep file:")]
    assert k3("info", path).out.splitlines()[1:] == printed


# ---------------------------------------------------------------- refusals

@pytest.mark.parametrize("words, status, phrase", [
    (("--contexts", "8,70,200000"), 3, "max_context is 131072"),
    (("--contexts", "131072"), 3, "needs a context of"),
    (("--contexts", "70,8"), 2, "8 after 70; wanted ascending"),
    (("--contexts", "8,8"), 2, "wanted ascending"),
    (("--contexts", "0,8"), 2, "--contexts 0: wanted a whole number from 1"),
    (("--contexts", "8,x"), 2, "--contexts x"),
    (("--contexts", ""), 2, "--contexts is empty"),
    (("--contexts", "8,"), 2, "ends in a comma"),
    (("--arms", "split,flash"), 2, "flash: no such arm; there are split"),
    (("--arms", "split"), 2, "wanted two arms"),
    (("--arms", "split,unsplit,core"), 2, "wanted two arms"),
    (("--arms", "split,auto"), 2, "both are the same arm"),
    (("--arms", "cache-band:half,split"), 2, "cache-band:context or cache-band:none"),
    (("--arms", "core,tensor"), 3, "neither exists here"),
    (("--steps", "0"), 2, "--steps 0"),
    (("--repeats", "1"), 2, "--repeats 1: wanted a whole number from 2"),
    (("--slice", "2/2"), 2, "rank 2 is not below"),
    (("--logits", "all"), 2, "unknown option"),
])
def test_bad_input_is_refused_and_leaves_no_file(tmp_path, words, status, phrase):
    path = tmp_path / "sweep.h5"
    contexts = () if "--contexts" in words else ("--contexts", "8")
    refused("sweep", *SMALL, *contexts, *words, "--output", path, status=status, phrases=[phrase])
    assert os.listdir(tmp_path) == []


def test_default_contexts_end_where_the_model_does():
    out = k3("sweep", "synth:tiny:num_layers=4,max_context=700", "--steps", 1, "--repeats", 2).out
    assert "at 0 of 2 contexts" in out or "at 1 of 2 contexts" in out or "at 2 of 2 contexts" in out, out


def test_no_model_is_refused():
    refused("sweep", status=2, phrases=["a model is missing"])


def test_output_is_refused_before_anything_is_measured(tmp_path):
    begin = ("sweep", *SMALL, "--contexts", "8", "--steps", 1, "--repeats", 2, "--output")
    refused(*begin, tmp_path / "none" / "sweep.h5", phrases=["no such directory"])
    refused(*begin, tmp_path, phrases=["is a directory"])
    other = tmp_path / "notes.txt"
    other.write_text("mine")
    refused(*begin, other, phrases=["exists"])
    refused(*begin, other, "--overwrite", phrases=["is not a sweep file"])
    assert other.read_text() == "mine"
    path = tmp_path / "sweep.h5"
    k3(*begin, path)
    refused(*begin, path, phrases=["exists; give another path, or --overwrite"])
    k3(*begin, path, "--overwrite")
    assert sorted(os.listdir(tmp_path)) == ["notes.txt", "sweep.h5"]


def test_signal_stops_it_and_leaves_no_file(tmp_path):
    job = start("sweep", *SMALL, "--contexts", "8", "--steps", 50, "--repeats", 5000, "--output", tmp_path / "sweep.h5")
    time.sleep(1.0)
    job.process.send_signal(signal.SIGTERM)
    result = job.finish()
    assert result.status == 128 + signal.SIGTERM, result
    assert os.listdir(tmp_path) == []


# ---------------------------------------------------------------- plan

def plan(*words):
    """Rows of `info --plan --context`: (band, kernel) -> numbers."""
    out = k3("info", "--plan", *words).out
    found = {}
    for line in out.splitlines():
        match = re.match(r"(context|none) +(tensor|core) +(\d+) +(\d+) +(\d+) +(\d+) +(\d+) +(\d+) x (\d+) +(\d+) +(\d+)", line)
        if match:
            names = ("heads", "rows", "up_to", "tile", "slices", "passes", "width", "grid", "busy")
            found[match[1], match[2]] = dict(zip(names, map(int, match.groups()[2:])))
    return found


def test_info_plan_prints_the_attention_plan():
    eight = plan("synth:k3", "--ranks", 8, "--context", 131072)
    assert set(eight) == {(band, kernel) for band in ("context", "none") for kernel in ("tensor", "core")}
    assert (eight["context", "tensor"]["heads"], eight["context", "tensor"]["rows"]) == (96, 16384)
    assert (eight["none", "tensor"]["heads"], eight["none", "tensor"]["rows"]) == (12, 131072)
    for row in eight.values():
        assert row["grid"] == row["passes"] * row["slices"] and row["passes"] * row["width"] >= row["heads"]
        assert row["busy"] >= 0.9 * 132                     # no idle machine at depth
    small = plan("synth:k3", "--ranks", 8, "--context", 131072, "--multiprocessors", 20)
    for row in small.values():
        assert 0.9 * 20 <= row["busy"] <= 60
    assert plan("synth:k3", "--ranks", 8, "--context", 64)["none", "tensor"]["slices"] == 1
    assert set(plan("synth:tiny", "--ranks", 2, "--context", 300)) == {("context", "core"), ("none", "core")}


def memory(*words):
    """Rows of `info --plan --context` about memory: band -> (rows, verdict)."""
    out = k3("info", "--plan", *words).out.split("memory of the fullest rank")[1]
    return {m[1]: (int(m[2]), m[3]) for m in re.finditer(r"^(context|none) +(\d+) .*  (fits|does not fit)$", out, re.M)}


def test_info_plan_says_that_a_million_positions_fit_eight_ranks():
    million = ("--ranks", 8, "--context", 1048576)
    assert memory("synth:k3:experts=iq1_s", *million)["context"] == (131072, "fits")
    assert memory("synth:k3", *million)["context"][1] == "does not fit"             # mxfp4 experts: 1.5 TB
    assert memory("synth:k3:experts=iq1_s", *million, "--memory", 90) == {"context": (131072, "fits"), "none": (1048576, "does not fit")}
    # rows x 576 numbers x 2 bytes x 24 layers
    assert "3.62 GB" in k3("info", "--plan", "synth:k3:experts=iq1_s", *million).out
    for row in plan("synth:k3", *million).values():
        assert row["busy"] >= 0.9 * 132


def test_info_plan_refusals():
    refused("info", "synth:tiny", "--context", 9, status=2, phrases=["--context N goes with --plan"])
    refused("info", "synth:tiny", "--plan", "--ranks", 2, "--context", 0, status=2, phrases=["--context 0"])
    refused("info", "synth:tiny", "--plan", "--ranks", 2, "--context", 131073, phrases=["max_context is 131072"])
    refused("info", "synth:tiny", "--check", status=2, phrases=["--check is for model files"])
