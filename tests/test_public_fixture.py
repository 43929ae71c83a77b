"""The main job on real input: a checkpoint in the released form, through import and run, against the logits that a
public implementation computed from it (tests/fixtures/public_k3/README.md).

    /usr/bin/python3 -m pytest tests/test_public_fixture.py      (environment: see tests/harness.py)
"""
import hashlib
import math
import os
import sys

import h5py
import numpy as np
import pytest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import harness          # noqa: E402
import reference        # noqa: E402
from harness import decode, k3, needs_mpirun, relative   # noqa: E402

pytestmark = needs_mpirun
FIXTURE = harness.TESTS / "fixtures" / "public_k3"
VARIANTS = ("plain", "mxfp4")
TOLERANCE = 1e-5        # relative L2 over all rows: both sides are float32 (README.md, "How close one can come")
# Of a trunk in 8 bits, the median of rows: not nothing, and not much. A single row may be far off, where another expert is
# chosen: the router is quantised too, and these models are small.
Q8_0_ERROR = (1e-3, 0.25)


def public(variant):
    with h5py.File(FIXTURE / variant / "logits.h5") as file:
        return {name: file[name][...] for name in ("token_ids", "logits", "decode/token_ids", "decode/logits")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("public")


@pytest.fixture(scope="module")
def models(folder):
    for variant in VARIANTS:
        k3("import", FIXTURE / variant, "--output", folder / f"{variant}.h5")
        k3("import", FIXTURE / variant, "--output", folder / f"{variant}-q8_0.h5", "--trunk", "q8_0")
    return folder


def most_ranks(path, block=1):
    """Eight, or as many as there are units of heads whose columns of o_proj fill whole blocks."""
    with h5py.File(path) as file:
        config = file["config"].attrs
        heads = int(config["num_heads"])
        per_unit = [block // math.gcd(block, int(config[name])) for name in ("kda_head_dim", "v_head_dim")]
        return min(8, *(heads // unit for unit in per_unit))


def test_checksums():
    for line in (FIXTURE / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split(maxsplit=1)
        assert hashlib.sha256((FIXTURE / name.lstrip("*")).read_bytes()).hexdigest() == digest, name


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_steps(models, folder, variant):
    """Tokens equal the public implementation's, logits within float32's reach, on every world size."""
    want = public(variant)
    for world in (1, 2, most_ranks(models / f"{variant}.h5")):
        tokens, logits = decode(models / f"{variant}.h5", folder / "run.h5", prompt=want["token_ids"],
                                steps=len(want["decode/token_ids"]), ranks=world)
        error = relative(logits, want["decode/logits"])
        rows = np.linalg.norm(logits - want["decode/logits"], axis=1) / np.linalg.norm(want["decode/logits"], axis=1)
        print(f"{variant}, {world} ranks: relative L2 {error:.3g} ({error / TOLERANCE:.0%}), worst row {rows.max():.3g}")
        assert np.array_equal(tokens, want["decode/token_ids"])
        assert error < TOLERANCE and rows.max() < 2 * TOLERANCE


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_along_the_prompt(models, folder, variant):
    """Row n follows tokens 0 … n: prompts of several lengths."""
    want = public(variant)
    lengths = (1, 2, 3, 4, 5, 9, 17, 24)
    got = np.concatenate([decode(models / f"{variant}.h5", folder / "run.h5", prompt=want["token_ids"][:n], steps=1)[1]
                          for n in lengths])
    assert relative(got, want["logits"][np.array(lengths) - 1]) < TOLERANCE


@pytest.mark.parametrize("variant", VARIANTS)
def test_trunk_q8_0(models, folder, variant):
    """Near the public logits, and exactly what the reference makes of the quantised file."""
    want, path = public(variant), models / f"{variant}-q8_0.h5"
    world = most_ranks(path, 32)
    tokens, logits = decode(path, folder / "q8.h5", prompt=want["token_ids"][:8], steps=4, ranks=world)
    exact = reference.load(path).logits([*want["token_ids"][:8], *tokens[:-1]])[7:]
    assert relative(logits, exact) < TOLERANCE
    lengths = (1, 2, 3, 4, 5, 9, 17, 24)
    errors = [relative(decode(path, folder / "q8.h5", prompt=want["token_ids"][:n], steps=1)[1][0], want["logits"][n - 1])
              for n in lengths]
    print(f"{variant}, trunk q8_0: relative L2 {np.round(errors, 3)} from the public logits")
    assert Q8_0_ERROR[0] < np.median(errors) < Q8_0_ERROR[1]


def test_wrong_weight_is_found_control(models, folder):
    """One element of one norm, doubled, moves the logits beyond the tolerance."""
    want, path = public("plain"), folder / "spoilt.h5"
    path.write_bytes((models / "plain.h5").read_bytes())
    with h5py.File(path, "r+") as file:
        file["layers/001/post_attn_norm"][3] *= 2
    logits = decode(path, folder / "run.h5", prompt=want["token_ids"], steps=1)[1]
    assert relative(logits[0], want["decode/logits"][0]) > 10 * TOLERANCE
