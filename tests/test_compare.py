"""`k3decode compare` against float64 NumPy, on run files made here with h5py; and `info` on the same files."""
import os
import re
import subprocess

import h5py
import numpy as np
import pytest

BINARY = os.environ.get("K3DECODE")
pytestmark = pytest.mark.skipif(not BINARY, reason="K3DECODE does not name the binary")

CONFIG = dict(num_layers=4, hidden_size=64, vocab_size=200, num_heads=4, q_lora_rank=32, kv_lora_rank=32,
              qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, kda_head_dim=16, kda_conv_kernel=4,
              kda_gate_lower_bound=-5.0, num_experts=8, num_experts_per_token=2, num_shared_experts=1, latent_size=32,
              moe_intermediate_size=32, dense_intermediate_size=128, first_dense_layers=1, attn_res_block_size=2,
              rms_norm_eps=1e-5, low_rank_norm_eps=1e-6, situ_beta=4.0, situ_linear_beta=25.0,
              routed_scaling_factor=1.0, renormalize=True, max_context=4096)
PHASES = ["attention", "head"]


def write_run(path, logits, tokens=None, *, prompt=(1, 2, 3), steps=None, logits_kind="all", ranks=2, text=str,
              **attributes):
    """A run file whose times are 1, 2, 3 … ms; `steps`: whole steps, all rows unless given."""
    logits = np.asarray(logits, np.float32)
    rows, vocabulary = logits.shape
    tokens = logits.argmax(axis=1) if tokens is None else np.asarray(tokens)
    root = dict(format="k3decode-run", program_version="0", model="m.h5", backend="host", devices="", command="test",
                start_time="2026-01-01T00:00:00Z", kind="logits", logits=logits_kind)
    with h5py.File(path, "w", libver="latest") as file:
        for name, value in {**root, **attributes}.items():
            file.attrs[name] = text(value) if isinstance(value, str) else value
        for name, value in dict(format_version=1, ranks=ranks, first_context=0).items():
            if name not in attributes:
                file.attrs[name] = np.int64(value)
        if "model_digest" not in attributes:
            file.attrs["model_digest"] = np.uint64(1)
        group = file.create_group("config")
        for name, value in {**CONFIG, "vocab_size": vocabulary}.items():
            group.attrs[name] = (np.uint8 if isinstance(value, bool) else np.int64 if isinstance(value, int)
                                 else np.float64)(value)
        group["layer_types"] = np.array([0, 0, 0, 1], np.uint8)
        file["prompt/token_ids"] = np.asarray(prompt, np.int64)
        file["decode/token_ids"] = tokens.astype(np.int64)
        if logits_kind == "all":
            file["decode/logits"] = logits
        elif logits_kind.startswith("top:"):
            order = np.argsort(-logits, axis=1, kind="stable")[:, :int(logits_kind[4:])]
            file["decode/top_ids"] = order.astype(np.int64)
            file["decode/top_logits"] = np.take_along_axis(logits, order, axis=1)
        file["decode/steps"] = np.uint64(rows if steps is None else steps)
        ms = 1.0 + np.arange(rows)
        file["timings/step_ms"] = ms
        file["timings/rank_step_ms"] = ms[:, None] + 0.5 * np.arange(ranks)
        file["timings/phase_ms"] = np.broadcast_to(ms[:, None, None] * [0.75, 0.25], (rows, ranks, 2))
        file["timings/phase_names"] = np.array(PHASES, dtype="S12")
        file["plan"] = text("one plan")
        file["ending"] = text("done")
    return path


def k3decode(*arguments):
    return subprocess.run([BINARY, *map(str, arguments)], capture_output=True, text=True, timeout=60)


def figures(output):
    """The table as {name: (value, verdict)}."""
    found = {}
    for line in output.splitlines():
        match = re.match(r"(\S.{26}\S?)\s+(-?[\d.]+(?:e[+-]?\d+)?|nan|-nan|inf)\s*(?:(?:<=|>=) \S+)?\s*(pass|FAIL)?", line)
        if match and len(line) > 28:
            found[line[:28].strip()] = (float(match[2]), match[3] or "")
    return found


def expected(a, b, tokens):
    """The same figures from their definitions, in float64."""
    a, b = np.asarray(a, np.float32).astype(np.float64), np.asarray(b, np.float32).astype(np.float64)

    def log_softmax(x):
        x = x - x.max(axis=1, keepdims=True)
        return x - np.log(np.exp(x).sum(axis=1, keepdims=True))
    log_a, log_b = log_softmax(a), log_softmax(b)
    kl = (np.exp(log_a) * (log_a - log_b)).sum(axis=1)
    rows = np.arange(len(a))
    delta = np.exp(log_b[rows, tokens]) - np.exp(log_a[rows, tokens])
    top_a, top_b = (np.argsort(-x, axis=1, kind="stable")[:, :5] for x in (a, b))
    overlap = [len(set(x) & set(y)) / 5 for x, y in zip(top_a, top_b)]
    return {"mean KL divergence": kl.mean(), "max KL divergence": kl.max(),
            "top-1 agreement": (top_a[:, 0] == top_b[:, 0]).mean(), "top-5 overlap": np.mean(overlap),
            "RMS delta p": np.sqrt((delta ** 2).mean()), "largest logit error": np.abs(a - b).max(),
            "relative L2, largest": (np.linalg.norm(a - b, axis=1) / np.linalg.norm(a, axis=1)).max()}


@pytest.fixture
def random():
    seed = int.from_bytes(os.urandom(4), "little")
    print("seed", seed)
    return np.random.default_rng(seed)


@pytest.mark.parametrize("noise", [0.5, 0.01, 1e-4])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_figures_match_numpy(tmp_path, random, noise, scale):
    a = (scale * random.standard_normal((20, 200))).astype(np.float32)
    b = (a + noise * random.standard_normal(a.shape)).astype(np.float32)
    tokens = a.argmax(axis=1)
    write_run(tmp_path / "a.h5", a, tokens)
    write_run(tmp_path / "b.h5", b, tokens)
    result = k3decode("compare", tmp_path / "a.h5", tmp_path / "b.h5", "--max-mean-kl", 1e9, "--min-top1", 0)
    assert result.returncode == 0, result.stdout + result.stderr
    got = figures(result.stdout)
    for name, value in expected(a, b, tokens).items():
        # six digits are printed; NumPy's plain sum cancels below 1e-15
        assert got[name][0] == pytest.approx(value, rel=2e-5, abs=1e-14), name


def test_small_divergence_does_not_cancel(tmp_path, random):
    """One ulp on one logit: the plain sum gives rounding noise, the exact answer is p (1 - p) x² / 2."""
    a = random.standard_normal((1, 200)).astype(np.float32)
    b = a.copy()
    b[0, 7] = np.nextafter(b[0, 7], np.float32(9))
    write_run(tmp_path / "a.h5", a, [0])
    write_run(tmp_path / "b.h5", b, [0])
    got = figures(k3decode("compare", tmp_path / "a.h5", tmp_path / "b.h5").stdout)["mean KL divergence"][0]
    p = np.exp(np.float64(a[0, 7])) / np.exp(a[0].astype(np.float64)).sum()
    x = np.float64(b[0, 7]) - np.float64(a[0, 7])
    assert got == pytest.approx(p * (1 - p) * x * x / 2, rel=1e-4)


def test_equal_runs_agree(tmp_path, random):
    a = 100 * random.standard_normal((5, 200))
    write_run(tmp_path / "a.h5", a)
    write_run(tmp_path / "b.h5", a, text=np.bytes_)
    result = k3decode("compare", tmp_path / "a.h5", tmp_path / "b.h5", "--max-mean-kl", 0, "--max-kl", 0,
                      "--max-logit-error", 0, "--max-relative-l2", 0)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "the runs agree" in result.stdout and "FAIL" not in result.stdout
    assert figures(result.stdout)["top-1 agreement"] == (1.0, "pass")


@pytest.mark.parametrize("option, name", [("--max-mean-kl", "mean KL divergence"), ("--max-kl", "max KL divergence"),
                                          ("--max-logit-error", "largest logit error"),
                                          ("--max-relative-l2", "relative L2, largest")])
def test_each_threshold_passes_and_fails(tmp_path, random, option, name):
    a = 3 * random.standard_normal((6, 200))
    b = a + 1e-3 * random.standard_normal(a.shape)
    tokens = np.asarray(a, np.float32).argmax(axis=1)
    write_run(tmp_path / "a.h5", a, tokens)
    write_run(tmp_path / "b.h5", b, tokens)
    loose = ["compare", tmp_path / "a.h5", tmp_path / "b.h5", "--min-top1", 0]
    value = expected(a, b, tokens)[name]
    good = k3decode(*loose, option, 1.01 * value)
    assert good.returncode == 0 and figures(good.stdout)[name][1] == "pass", good.stdout
    bad = k3decode(*loose, option, 0.99 * value)
    assert bad.returncode == 1 and figures(bad.stdout)[name][1] == "FAIL", bad.stdout
    assert "differ beyond the thresholds" in bad.stderr


def test_top1_threshold(tmp_path, random):
    a = random.standard_normal((4, 200))
    b = a.copy()
    b[2, 9] = 50
    tokens = a.argmax(axis=1)
    write_run(tmp_path / "a.h5", a, tokens)
    write_run(tmp_path / "b.h5", b, tokens)
    pair = ["compare", tmp_path / "a.h5", tmp_path / "b.h5", "--max-mean-kl", 1e9]
    result = k3decode(*pair)
    assert result.returncode == 1 and "first miss at step 2" in result.stdout
    assert figures(result.stdout)["top-1 agreement"] == (0.75, "FAIL")
    assert k3decode(*pair, "--min-top1", 0.75).returncode == 0
    assert k3decode(*pair, "--steps", 2).returncode == 0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["a", "b", "ab"])
def test_non_finite_logits_never_pass(tmp_path, random, value, where):
    a = random.standard_normal((4, 200))
    b = a.copy()
    tokens = a.argmax(axis=1)
    for name, x in zip("ab", (a, b)):
        if name in where:
            x[1, 17] = value
        write_run(tmp_path / f"{name}.h5", x, tokens)
    result = k3decode("compare", tmp_path / "a.h5", tmp_path / "b.h5", "--max-mean-kl", 1e9, "--min-top1", 0)
    assert result.returncode == 1
    assert re.search(r"NaN or infinite logits\s+\d in A, \d in B  FAIL  first at step 1", result.stdout)


def test_all_rows_nan_fail(tmp_path):
    a = np.full((3, 200), np.nan)
    write_run(tmp_path / "a.h5", a, [0, 0, 0])
    result = k3decode("compare", tmp_path / "a.h5", tmp_path / "a.h5", "--max-mean-kl", 1e9, "--min-top1", 0)
    assert result.returncode == 1
    assert figures(result.stdout)["mean KL divergence"][1] == "FAIL"


def test_diverging_tokens_are_compared_up_to_the_first(tmp_path, random):
    a = random.standard_normal((6, 200))
    b = a.copy()
    b[3:] = random.standard_normal((3, 200))        # incomparable: other histories
    tokens = a.argmax(axis=1)
    other = tokens.copy()
    other[2:] = (tokens[2:] + 1) % 200
    write_run(tmp_path / "a.h5", a, tokens)
    write_run(tmp_path / "b.h5", b, other)
    result = k3decode("compare", tmp_path / "a.h5", tmp_path / "b.h5")
    assert result.returncode == 1
    assert "compared: 3 of 6 steps" in result.stdout
    assert re.search(rf"diverge\s+step 2: A chose {tokens[2]}, B chose {other[2]}  FAIL", result.stdout)
    assert figures(result.stdout)["max KL divergence"][0] == 0
    assert k3decode("compare", tmp_path / "a.h5", tmp_path / "b.h5", "--steps", 2).returncode == 0


def test_different_numbers_of_steps(tmp_path, random):
    a = random.standard_normal((6, 200))
    write_run(tmp_path / "a.h5", a)
    write_run(tmp_path / "b.h5", a, steps=4)         # two rows of an unfinished step are there, and do not count
    result = k3decode("compare", tmp_path / "a.h5", tmp_path / "b.h5")
    assert result.returncode == 0
    assert "the common 4 are compared" in result.stdout and "compared: 4 of 4 steps" in result.stdout
    result = k3decode("compare", tmp_path / "a.h5", tmp_path / "b.h5", "--steps", 5)
    assert result.returncode == 3 and "--steps 5" in result.stderr


@pytest.mark.parametrize("change, phrase", [
    (dict(prompt=(1, 2, 4)), "different prompts: token 2 is 3"), (dict(prompt=(1, 2)), "different prompts"),
    (dict(kind="slice 0/8"), 'kind "slice 0/8"'), (dict(logits_kind="none"), "holds no logits"),
    (dict(logits_kind="top:4"), "holds the top 4 logits alone"), (dict(steps=0), "holds no whole step"),
    (dict(first_context=np.int64(64)), "different starts"), (dict(format="k3decode-model"), "is a model file"),
    (dict(format="other"), "not a run file"), (dict(format_version=np.int64(2)), "format_version 2"),
    (dict(logits_kind="most"), 'logits = "most"'), (dict(model_digest="x"), "attribute /:model_digest is no scalar integer"),
    (dict(steps=9), "fewer than the 9 of /decode/steps")])
def test_incomparable_files_exit_3(tmp_path, random, change, phrase):
    a = random.standard_normal((3, 200))
    write_run(tmp_path / "a.h5", a)
    write_run(tmp_path / "b.h5", a, **change)
    result = k3decode("compare", tmp_path / "a.h5", tmp_path / "b.h5")
    assert result.returncode == 3, result.stdout + result.stderr
    assert phrase in result.stderr


def test_different_vocabularies_exit_3(tmp_path, random):
    write_run(tmp_path / "a.h5", random.standard_normal((3, 200)))
    write_run(tmp_path / "b.h5", random.standard_normal((3, 201)))
    result = k3decode("compare", tmp_path / "a.h5", tmp_path / "b.h5")
    assert result.returncode == 3 and "different vocabularies" in result.stderr


@pytest.mark.parametrize("name, kind, phrase", [
    ("decode/token_ids", np.float32, "/decode/token_ids has the wrong type"),
    ("decode/logits", None, "/decode/logits is missing"), ("prompt/token_ids", None, "/prompt/token_ids is missing"),
    ("timings/rank_step_ms", None, "/timings/rank_step_ms is missing"),
    ("config/layer_types", None, "/config/layer_types is missing"), ("ending", None, "/ending is missing")])
def test_broken_datasets_are_named(tmp_path, random, name, kind, phrase):
    path = write_run(tmp_path / "a.h5", random.standard_normal((3, 200)))
    with h5py.File(path, "r+") as file:
        values = file[name][()]
        del file[name]
        if kind:
            file[name] = values.astype(kind)
    for command in (["compare", path, path], ["info", path]):
        result = k3decode(*command)
        assert result.returncode == 3 and phrase in result.stderr and "a.h5" in result.stderr


@pytest.mark.parametrize("arguments, phrase", [
    ([], "wants two run files, got 0"), (["a"], "wants two run files, got 1"),
    (["a", "b", "c"], "wants two run files, got 3"), (["a", "b", "--max-kl", "nan"], "--max-kl nan"),
    (["a", "b", "--max-kl", "-1"], "--max-kl -1"), (["a", "b", "--max-mean-kl", "1x"], "--max-mean-kl 1x"),
    (["a", "b", "--min-top1", "1.5"], "--min-top1 1.5"), (["a", "b", "--steps", "0"], "--steps 0"),
    (["a", "b", "--frobnicate"], "unknown option --frobnicate"), (["a", "b", "--max-kl"], "--max-kl wants a value")])
def test_wrong_usage_exits_2(arguments, phrase):
    result = k3decode("compare", *arguments)
    assert result.returncode == 2 and phrase in result.stderr


def test_missing_file_exits_3(tmp_path):
    result = k3decode("compare", tmp_path / "none.h5", tmp_path / "none.h5")
    assert result.returncode == 3 and "none.h5 cannot be read: No such file" in result.stderr


@pytest.mark.parametrize("command", ["compare", "info"])
def test_help(command):
    result = k3decode(command, "--help")
    assert result.returncode == 0 and result.stdout.startswith(f"usage: k3decode {command}")


def test_info_on_a_run(tmp_path, random):
    path = write_run(tmp_path / "a.h5", random.standard_normal((11, 200)))
    result = k3decode("info", path)
    assert result.returncode == 0, result.stderr
    # steps of 1 … 11 ms
    assert "median 6.000 ms, p10 2.000 ms, p90 10.000 ms" in result.stdout
    assert "166.67 tokens/s" in result.stdout
    assert "slowest rank     1 with a mean of 6.500 ms" in result.stdout
    assert re.search(r"attention\s+4\.5000\s+75\.0 %", result.stdout)
    assert re.search(r"ending\s+done", result.stdout) and re.search(r"whole steps\s+11", result.stdout)
    result = k3decode("info", path, "--check")
    assert result.returncode == 2 and "is a run file" in result.stderr


def test_info_refuses_other_files(tmp_path):
    (tmp_path / "text").write_text("hello")
    (tmp_path / "empty").write_text("")
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["x"] = 1
    (tmp_path / "cut.h5").write_bytes((tmp_path / "other.h5").read_bytes()[:300])
    for name, phrase in [("text", "is no HDF5 file"), ("empty", "is no HDF5 file"), ("other.h5", "format names neither"),
                         ("cut.h5", "truncated"), ("none", "cannot be read"), (".", "cannot be opened")]:
        result = k3decode("info", tmp_path / name)
        assert result.returncode == 3 and phrase in result.stderr, (name, result.stderr)
