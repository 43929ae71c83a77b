"""k3decode's logits against the float64 reference, and the controls: each planted fault must be found.

    /usr/bin/python3 -m pytest tests/test_against_reference.py      (environment: see tests/harness.py)
"""
import os
import pathlib
import re
import sys

import numpy as np
import pytest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import harness          # noqa: E402
import model_file       # noqa: E402
import reference        # noqa: E402
from harness import SEED, decode, needs_mpirun, relative   # noqa: E402

pytestmark = needs_mpirun
TOLERANCE = 1e-5        # relative L2 of all rows together, float32 activations
FAULT = 1e-4            # what a planted fault must exceed: ten times the tolerance
SOURCES = pathlib.Path(__file__).resolve().parent.parent / "src"

# Each fault of src/base/breakage.h's test binary, and the run that shows it: ranks, tokens before it.
FAULTS = {
    "conv_tap_order": (1, 0),
    "decay_axis": (1, 0),
    "q_unscaled": (1, 0),
    "no_dt_bias": (1, 0),
    "no_gate_kda": (1, 0),
    "residual_normalised": (1, 0),
    "restart_rule": (1, 0),
    "no_score_scale": (1, 0),
    "no_gate_mla": (1, 0),
    "no_up_tanh": (1, 0),
    "bias_weighs": (1, 0),
    "tie_to_higher": (1, 0),            # with a model of exact ties
    "norm_before_sum": (2, 0),
    "band_row_off": (2, 0),
    "merge_without_rescale": (2, 66),   # two pages: both ranks hold positions
}


@pytest.fixture(scope="module", autouse=True)
def show_seed():
    harness.show_seed()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("reference")


def tokens_of(count, seed=SEED, vocabulary=320):
    return np.random.default_rng(seed).integers(0, vocabulary, count)


def tame(path, prompt=tokens_of(5), steps=4, make=None, **words):
    """Writes a random model and returns what the reference decodes: (tokens, logits).

    Another seed is taken where the choice of an expert or of a token lies so near a tie that the rounding of float32
    may turn it: both are steps, on whose other side a right program is far off."""
    for attempt in range(20):
        path.unlink(missing_ok=True)        # the reference may hold an earlier one open
        (make or model_file.random_model)(path, SEED + 7919 * attempt, **words)
        model = reference.load(path)
        tokens, logits = model.greedy(prompt, steps)
        top = np.sort(logits, axis=1)
        if words.get("ties"):               # these ties are exact in any arithmetic
            model.route_margin = np.inf
        if model.route_margin > 3e-5 and (top[:, -1] - top[:, -2]).min() > 1e-3:
            return tokens, logits
    pytest.fail("no seed without near ties")


def close(got, want):
    error = relative(got[1], want[1])
    print(f"relative L2 {error:.3g} ({error / TOLERANCE:.1%} of the tolerance)")
    assert error < TOLERANCE
    assert np.array_equal(got[0], want[0])


def check(folder, worlds, prompt=tokens_of(5), steps=4, **words):
    """The program's greedy run on each world equals the reference's."""
    path = folder / "model.h5"
    want = tame(path, prompt, steps, **words)
    for world in worlds:
        close(decode(path, folder / "run.h5", prompt=prompt, steps=steps, ranks=world), want)


# ---------------------------------------------------------------- agreement

@pytest.mark.parametrize("number", range(3))
def test_fresh_seeds(folder, number):
    def make(path, seed):
        model_file.random_model(path, seed + 1000003 * number)
    check(folder, (1, 8), make=make)


@pytest.mark.parametrize("trunk, experts, vectors, world", [
    ("bf16", "mxfp4", "f32", 8), ("q8_0", "mxfp4", "f32", 4), ("bf16", "bf16", "bf16", 8), ("q8_0", "q8_0", "bf16", 4),
    ("f32", "mxfp4", "bf16", 8)])
def test_storage_types(folder, trunk, experts, vectors, world):
    check(folder, (1, world), num_layers=9, trunk=trunk, experts=experts, vectors=vectors,
          text="fixed" if vectors == "bf16" else "variable")


@pytest.mark.parametrize("words", [
    dict(mla_layers={1, 2}), dict(num_layers=4, mla_layers={1, 2, 3, 4}), dict(num_layers=3, mla_layers=set()),
    dict(renormalize=False), dict(num_shared_experts=3), dict(first_dense_layers=0), dict(num_layers=3, first_dense_layers=3),
    dict(num_experts_per_token=16), dict(num_experts_per_token=1), dict(kda_conv_kernel=2), dict(kda_conv_kernel=1),
    dict(attn_res_block_size=1), dict(num_layers=1), dict(qk_rope_head_dim=1, kv_lora_rank=7)], ids=str)
def test_config_corners(folder, words):
    check(folder, (3,), **{"num_layers": 5, **words})


@pytest.mark.parametrize("width", (12, 20, 100))
def test_kda_width_no_power_of_two(folder, width):
    """Known fault F7."""
    check(folder, (1, 2), num_layers=3, kda_head_dim=width)


def test_exact_ties(folder):
    check(folder, (1, 8), ties=True, num_layers=6)


@pytest.mark.parametrize("count", (1, 15, 16, 17, 64, 65))
@pytest.mark.parametrize("bias", (20, -20))
def test_extreme_decays(folder, bias, count):
    """dt_bias of +20: every channel decays at the lower bound; -20: none decays (known fault F10)."""
    def make(path, seed):
        config = model_file.make_config(num_layers=4, kda_gate_lower_bound=-5.0)
        tensors = model_file.random_tensors(config, seed)
        for name in tensors:
            if name.endswith("/dt_bias"):
                tensors[name][:] = bias
        model_file.write_model(path, config, tensors)
    check(folder, (1,), prompt=tokens_of(count), steps=2, make=make)
    if count > 1:                           # the first token meets a zero state: nothing decays
        words = dict(prompt=tokens_of(count), steps=2, program=harness.K3DECODE_BREAKABLE)
        sound = decode(folder / "model.h5", folder / "run.h5", **words)
        broken = decode(folder / "model.h5", folder / "run.h5", env={"K3_BREAK": "no_dt_bias"}, **words)
        assert relative(broken[1], sound[1]) > FAULT


# ---------------------------------------------------------------- controls

@pytest.fixture(scope="module")
def control(folder):
    """(model, prompt) of a control, the sound program having passed on it."""
    made = {}

    def make(ranks, before, ties):
        key = ranks, before, ties
        if key not in made:
            path, prompt = folder / f"control-{ranks}-{before}-{ties}.h5", tokens_of(3 + before)
            want = tame(path, prompt, 2, ties=ties, num_layers=6)
            for program in (harness.K3DECODE, harness.K3DECODE_BREAKABLE):
                close(decode(path, folder / "run.h5", prompt=prompt, steps=2, ranks=ranks, program=program), want)
            made[key] = path, prompt
        return made[key]
    return make


def test_every_fault_of_the_sources_has_a_control():
    named = set()
    for file in (SOURCES / "host").glob("*.c"):
        named |= set(re.findall(r'K3_BROKEN\("(\w+)"\)', file.read_text()))
    assert named == set(FAULTS) | {"slow_unsplit"}        # right but slow: its control is in test_sweep.py


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_found_control(folder, control, fault):
    ranks, before = FAULTS[fault]
    path, prompt = control(ranks, before, fault == "tie_to_higher")
    tokens, logits = decode(path, folder / "run.h5", prompt=prompt, steps=2, ranks=ranks,
                            program=harness.K3DECODE_BREAKABLE, env={"K3_BREAK": fault})
    want = reference.load(path).logits([*prompt, tokens[0]])[-2:]
    error = relative(logits, want)
    print(f"{fault}: relative L2 {error:.3g}, tolerance {TOLERANCE:.3g}")
    assert error > FAULT


def test_merge_of_slices_control(folder):
    """More than 1024 positions on one rank: slices are merged, and a merge without its rescale shows."""
    model = f"synth:tiny:num_layers=5,vocab_size=203,seed={SEED}"
    words = ("--context", 1500)
    want = decode(model, folder / "run.h5", *words, steps=2)
    got = decode(model, folder / "run.h5", *words, steps=2, program=harness.K3DECODE_BREAKABLE)
    assert np.array_equal(got[1], want[1])
    broken = decode(model, folder / "run.h5", *words, steps=2, program=harness.K3DECODE_BREAKABLE,
                    env={"K3_BREAK": "merge_without_rescale"})
    assert relative(broken[1], want[1]) > FAULT


def test_program_itself_has_no_faults(folder, control):
    """K3_BREAK means nothing to the program that is installed."""
    path, prompt = control(1, 0, False)
    want = decode(path, folder / "run.h5", prompt=prompt, steps=2)
    for fault in ("restart_rule", "no_gate_mla", "tie_to_higher"):
        got = decode(path, folder / "run.h5", prompt=prompt, steps=2, env={"K3_BREAK": fault})
        assert np.array_equal(got[1], want[1]), fault
