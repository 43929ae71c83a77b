"""Block formats: decoded bit for bit as the public package gguf does, and whole models of each format.

    /usr/bin/python3 -m pytest tests/test_formats.py      (environment: see tests/harness.py)

The package's results for 2,048 blocks of each format are kept as digests (fixtures/make_block_digests.py); where the package can
be imported, fresh random blocks are compared value by value too.
"""
import hashlib
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import reference                                                        # noqa: E402
from harness import SEED, TESTS, decode, k3, needs_mpirun, refused, show_seed  # noqa: E402

try:
    import gguf.quants
except ImportError:
    gguf = None
needs_gguf = pytest.mark.skipif(gguf is None, reason="needs the Python package gguf (pip install gguf)")

DECODE = os.environ.get("K3_DECODE_BLOCKS", "tests/decode_blocks")
COUNT = 2048
# name: values and bytes of a block, where its float16 scales begin
SIZES = {"q8_0": (32, 34, (0,)), "q4_0": (32, 18, (0,)), "q4_1": (32, 20, (0, 2)), "q5_0": (32, 22, (0,)),
         "q5_1": (32, 24, (0, 2)), "iq4_nl": (32, 18, (0,)), "mxfp4": (32, 17, ()), "q2_k": (256, 84, (80, 82)),
         "q3_k": (256, 110, (108,)), "q4_k": (256, 144, (0, 2)), "q5_k": (256, 176, (0, 2)), "q6_k": (256, 210, (208,)),
         "iq1_s": (256, 50, (0,)), "iq1_m": (256, 56, ()), "iq2_xxs": (256, 66, (0,)), "iq2_xs": (256, 74, (0,)),
         "iq2_s": (256, 82, (0,)), "iq3_xxs": (256, 98, (0,)), "iq3_s": (256, 110, (0,)), "iq4_xs": (256, 136, (0,))}
# zero, minus zero, infinities, NaN, the largest, the smallest, one
SPECIAL = (0x0000, 0x8000, 0x7c00, 0xfc00, 0x7e01, 0x7bff, 0x0001, 0x3c00)


# ---------------------------------------------------------------- blocks

def dress(name, blocks):
    """All codes 0 and all codes the last one, each with every special scale; mxfp4 without its NaN byte."""
    _, _, scales = SIZES[name]
    for i in range(32):
        if i < 16:
            blocks[i] = 0xff if i & 1 else 0
        for at in scales:
            blocks[i, at:at + 2] = np.array([SPECIAL[i // 2 % 8 if at == scales[0] else i * 3 % 8]], "<u2").view(np.uint8)
        if name == "iq1_m":
            for k in range(4):
                blocks[i, 49 + 2 * k] = (blocks[i, 49 + 2 * k] & 15) | (SPECIAL[i // 2 % 8] >> (4 * k) & 15) << 4
    if name == "mxfp4":
        blocks[:, 0] %= 255
        blocks[:255, 0] = np.arange(255)
    return blocks


def kept_blocks(name):
    """COUNT blocks, the same everywhere."""
    size = SIZES[name][1]
    stream = hashlib.shake_256(name.encode()).digest(COUNT * size)
    return dress(name, np.frombuffer(stream, np.uint8).reshape(COUNT, size).copy())


def by_package(name, blocks):
    """What the package makes of them. mxfp4: it pairs element j with j + 16, model.md neighbours; minus zero is zero here."""
    if name == "mxfp4":
        codes = np.stack([blocks[:, 1:] & 15, blocks[:, 1:] >> 4], -1).reshape(-1, 32)
        blocks = np.hstack([blocks[:, :1], codes[:, :16] | codes[:, 16:] << 4])
    kind = gguf.GGMLQuantizationType[name.upper()]
    with np.errstate(all="ignore"):
        values = gguf.quants.dequantize(np.ascontiguousarray(blocks), kind).reshape(len(blocks), -1)
    return values + np.float32(0) if name == "mxfp4" else values


def by_program(name, blocks):
    done = subprocess.run([DECODE, name], input=blocks.tobytes(), stdout=subprocess.PIPE, check=True, timeout=60)
    return np.frombuffer(done.stdout, "<f4").reshape(len(blocks), -1)


def bits(values):
    """As unsigned integers, all NaN alike."""
    values = np.ascontiguousarray(values, "<f4")
    return np.where(np.isnan(values), np.uint32(0x7fc00000), values.view("<u4"))


def digest(values):
    return hashlib.sha256(bits(values).tobytes()).hexdigest()


@pytest.mark.parametrize("name", SIZES)
def test_decoding_is_bit_equal_to_the_package_digests(name):
    kept = json.loads((TESTS / "fixtures" / "block_digests.json").read_text())
    assert kept["blocks"] == COUNT and sorted(kept["sha256"]) == sorted(SIZES)
    blocks = kept_blocks(name)
    assert digest(by_program(name, blocks)) == kept["sha256"][name]
    control = blocks.copy()
    control[100, -1] ^= 1                       # one bit of one block
    assert digest(by_program(name, control)) != kept["sha256"][name]


@needs_gguf
@pytest.mark.parametrize("name", SIZES)
def test_decoding_is_bit_equal_to_the_package(name):
    show_seed()
    size = SIZES[name][1]
    blocks = dress(name, np.random.default_rng(SEED).integers(0, 256, (COUNT, size), np.uint8))
    want = by_package(name, blocks)
    got = by_program(name, blocks)
    wrong = np.argwhere(bits(got) != bits(want))
    assert len(wrong) == 0, f"{len(wrong)} values differ, the first at {wrong[0]}: {got[tuple(wrong[0])]} {want[tuple(wrong[0])]}"
    assert np.isinf(want).any() or name == "mxfp4"
    if SIZES[name][0] == 256 or "q4" in name or "q5" in name:
        swapped = blocks.copy()                 # wrong order of nibbles
        middle = size // 2
        swapped[:, middle] = blocks[:, middle] >> 4 | blocks[:, middle] << 4
        assert (bits(by_program(name, swapped)) != bits(want)).any()


# ---------------------------------------------------------------- whole models

# Every row but f_b_proj's is a whole number of 256-blocks, and two ranks find two blocks each of what is dealt by columns.
WHOLE = ("tiny:layer_types=0101,hidden_size=256,num_heads=4,kda_head_dim=128,q_lora_rank=256,kv_lora_rank=256,"
         "qk_nope_head_dim=32,qk_rope_head_dim=16,v_head_dim=128,latent_size=512,moe_intermediate_size=512,"
         "dense_intermediate_size=512,num_experts=8,num_experts_per_token=2,vocab_size=300")
PROMPT = [1, 299, 77, 30]


def recipe(trunk, experts, seed):
    return f"{WHOLE},trunk={trunk},experts={experts},seed={seed}"


def deviation(file, path, name):
    """Of a matrix' values, over what its recipe asks for: the gain over the root of a row's length."""
    values = file.read(path, tuple(int(n) for n in file.file[path].attrs["shape"]), None)
    assert abs(values.mean()) < 0.05 * values.std(), f"{name}: mean {values.mean()}, deviation {values.std()}"
    return values.std() * np.sqrt(values.shape[-1])


@needs_gguf
@needs_mpirun
@pytest.mark.parametrize("name", [*SIZES, "f16"])
def test_whole_model_agrees_with_the_reference(name, tmp_path):
    """Trunk, embedding, head and experts of one format: world 1 and 2 against float64 over the package's decoding."""
    show_seed()
    path = tmp_path / "model.h5"
    for attempt in range(20):
        path.unlink(missing_ok=True)
        k3("synth", recipe(name, name, SEED + attempt), "--output", path)
        model = reference.load(str(path))
        want = model.logits(PROMPT)[-1]
        if model.route_margin > 3e-5:
            break
    k3("info", path, "--check")
    if name not in ("f16", "mxfp4"):           # mxfp4 has powers of two alone
        for tensor, gain in (("lm_head", 2.0), ("layers/002/experts_gate", 1.5)):
            got = deviation(model.file, tensor, name) / gain
            assert 0.8 < got < 1.2, f"{name}: {tensor} deviates {got} times what was asked for"
    runs = []
    for ranks in (1, 2):
        _, logits = decode(path, tmp_path / f"run{ranks}.h5", "--backend", "host", prompt=PROMPT, steps=1, ranks=ranks)
        runs.append(logits[-1])
    error = np.linalg.norm(runs[0] - want) / np.linalg.norm(want)
    between = np.linalg.norm(runs[1] - runs[0]) / np.linalg.norm(want)
    print(f"{name}: relative error {error:.3g}, two ranks against one {between:.3g}")
    assert error < 1e-5 and between < 1e-6
    _, logits = decode(f"synth:{recipe(name, name, SEED + attempt)}", tmp_path / "synth.h5", "--backend", "host", prompt=PROMPT,
                       steps=1)
    assert np.array_equal(logits[-1], runs[0]), "the recipe in place differs from the recipe in a file"


def test_a_codebook_with_a_foreign_value_is_refused(tmp_path):
    import h5py
    path = tmp_path / "model.h5"
    k3("synth", recipe("f32", "iq2_xs", 1), "--output", path)
    with h5py.File(path, "r+") as file:
        assert sorted(file["codebooks"]) == ["iq2_xs"]
        file["codebooks/iq2_xs"][17] = 9
    refused("info", path, phrases=("/codebooks/iq2_xs", "value 1 of entry 2 is 9"))
    with h5py.File(path, "r+") as file:
        del file["codebooks/iq2_xs"]
        file["codebooks/iq2_xs"] = np.zeros(100, np.uint8)
    refused("info", path, phrases=("/codebooks/iq2_xs", "100 bytes", "4096"))


def test_bands_of_256_blocks(tmp_path):
    """A band never cuts a block: the grid of the experts follows, the imbalance is printed, and a refusal lists what works (F17)."""
    for experts in ("iq2_xxs", "q2_k", "iq1_m"):
        plan = k3("info", f"synth:k3:experts={experts},trunk=q4_k", "--plan", "--ranks", 8).out
        assert "experts in 2 groups x 4 bands (busiest rank 1.20 of an even share)" in plan, plan
        assert re.search(r"^ +3 .* 2304-3071 ", plan, re.M), plan               # whole 256-blocks, though 3072 / 8 is 1.5
        assert re.search(r"imbalance: the largest rank holds .* 0\.\d+ % over the smallest", plan), plan
    refused("info", f"synth:{recipe('q4_k', 'q4_k', 1)}", "--plan", "--ranks", 3, phrases=("block size 256", "world sizes that work: 1 to 2"))
