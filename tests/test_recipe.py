"""Recipes: activations stay of order one through 93 layers, and no term of the model is negligible in `tiny`.

    /usr/bin/python3 -m pytest tests/test_recipe.py      (environment: see tests/harness.py)
"""
import os
import sys

import numpy as np
import pytest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import reference        # noqa: E402
from harness import k3  # noqa: E402

PROMPT = [1, 500, 77, 1002]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("recipe") / "tiny.h5"
    k3("synth", "tiny", "--output", path)
    return reference.load(str(path))


@pytest.fixture(scope="module")
def whole(tiny):
    return tiny.logits(PROMPT)


def test_activations_stay_of_order_one_through_93_layers(tmp_path):
    path = tmp_path / "deep.h5"
    k3("synth", "tiny:num_layers=93,attn_res_block_size=12,vocab_size=300,num_experts=6", "--output", path)
    model = reference.load(str(path))
    residuals = []
    decoder = reference.Decoder(model, None)
    mix = decoder.attn_res
    decoder.attn_res = lambda bank, p, *rest: (residuals.append(float(np.sqrt(np.mean(p**2)))), mix(bank, p, *rest))[1]
    for token in (1, 2, 250):
        logits = decoder.step(token)
    assert len(residuals) == 3 * (2 * 93 + 1)
    print(f"residual rms {min(residuals):.3g} to {max(residuals):.3g}, logits {np.sqrt(np.mean(logits**2)):.3g}")
    assert 0.1 < min(residuals) and max(residuals) < 10
    assert 0.5 < np.sqrt(np.mean(logits**2)) < 8


@pytest.mark.parametrize("name", [n for n in reference.BREAKAGE_NAMES if n != "tie_to_higher"])
def test_no_term_is_negligible(tiny, whole, name):
    """Each planted fault of the reference shows in the logits (ties apart: random scores have none)."""
    error = np.linalg.norm(tiny.logits(PROMPT, broken=name) - whole) / np.linalg.norm(whole)
    assert error > 1e-3, f"{name} moves the logits by {error:.2g} only"
