"""World sizes, expert grids, cache bands, storage types, prompt lengths: the same logits from all.

    /usr/bin/python3 -m pytest tests/test_parity.py        (environment: see tests/harness.py)
"""
import os
import re
import sys

import h5py
import numpy as np
import pytest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import harness          # noqa: E402
import model_file       # noqa: E402
import reference        # noqa: E402
from harness import SEED, decode, k3, needs_mpirun, refused   # noqa: E402

pytestmark = needs_mpirun

# Sums are taken in float64 and rounded to float32 once, so that the ranks' order of summing shows only where a sum lies
# within 1e-16 of a float32 tie: about one value in 1e8. Then logits move by roundings of float32, else not at all.
STRICT = 1e-9           # for the seed of the recipe, which has no such value
ROUNDING = 1e-4         # for fresh seeds
WORLDS = (2, 3, 4, 6, 8)
SMALL = f"synth:tiny:num_layers=5,vocab_size=203,seed={SEED}"     # two MLA layers, a restart in between
PAGE = 64               # positions of a cache page


def same(got, want, limit=ROUNDING):
    harness.same(got, want, limit)


@pytest.fixture(scope="module", autouse=True)
def show_seed():
    harness.show_seed()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("parity")


@pytest.fixture(scope="module")
def prompt():
    return np.random.default_rng(SEED).integers(0, 203, 300)


@pytest.fixture(scope="module")
def tiny(folder):
    k3("synth", "tiny", "--output", folder / "tiny.h5")
    return folder / "tiny.h5"


@pytest.fixture(scope="module")
def tiny_alone(tiny, folder):
    return decode(tiny, folder / "tiny-1.h5", prompt=range(1, 65), steps=32)


# ---------------------------------------------------------------- world sizes

@pytest.mark.parametrize("world", WORLDS)
def test_tiny_64_token_prompt_32_steps(tiny, tiny_alone, folder, world):
    run = folder / f"tiny-{world}.h5"
    same(decode(tiny, run, prompt=range(1, 65), steps=32, ranks=world), tiny_alone, STRICT)
    table = k3("compare", folder / "tiny-1.h5", run, "--max-mean-kl", "1e-9", "--max-kl", "1e-9", "--min-top1", "1",
               "--max-logit-error", "1e-9")
    assert "compared: 32 of 32 steps" in table.out, table


def test_compare_control(tiny, tiny_alone, folder):
    """Another prompt of equal length is refused, another seed is found different."""
    decode("synth:tiny:seed=2", folder / "other.h5", prompt=range(1, 65), steps=2)
    k3("compare", folder / "tiny-1.h5", folder / "other.h5", "--max-mean-kl", "1e-9", status=1)
    decode(tiny, folder / "other.h5", prompt=range(2, 66), steps=2)
    k3("compare", folder / "tiny-1.h5", folder / "other.h5", status=3)


def test_file_equals_recipe(tiny_alone, folder):
    same(decode("synth:tiny", folder / "recipe.h5", prompt=range(1, 65), steps=4), (tiny_alone[0][:4], tiny_alone[1][:4]), 0)


def test_uneven_worlds(folder, prompt):
    """8 heads, 24 experts, 203 tokens on 5 and 7 ranks."""
    words = ("--context", 70)
    want = decode(SMALL, folder / "one.h5", *words, prompt=prompt[:3])
    for world in (5, 7):
        same(decode(SMALL, folder / "more.h5", *words, prompt=prompt[:3], ranks=world), want)


def test_more_ranks_than_experts(folder):
    """A rank may own no expert, no dense column, no latent row."""
    model = f"synth:tiny:num_layers=5,vocab_size=5,num_experts=3,num_experts_per_token=2,seed={SEED}"
    want = decode(model, folder / "one.h5")
    for grid in ((), ("--expert-grid", "1x8"), ("--expert-grid", "2x4")):
        same(decode(model, folder / "more.h5", *grid, ranks=8), want)


# ---------------------------------------------------------------- ways to divide

@pytest.mark.parametrize("world", (1, 3, 8))
def test_cache_band(folder, prompt, world):
    """Two pages and more: shared by context, or whole on every rank."""
    words = ("--context", 2 * PAGE - 4)
    want = decode(SMALL, folder / "one.h5", *words, prompt=prompt[:5])
    for band in ("context", "none"):
        same(decode(SMALL, folder / "more.h5", *words, "--cache-band", band, prompt=prompt[:5], ranks=world), want)


@pytest.mark.parametrize("grid", ("8x1", "4x2", "2x4", "1x8", "3x2"))
def test_expert_grid(folder, grid):
    groups, bands = map(int, grid.split("x"))
    want = decode(SMALL, folder / "one.h5", steps=6)
    same(decode(SMALL, folder / "more.h5", "--expert-grid", grid, steps=6, ranks=groups * bands), want)


@pytest.mark.parametrize("grid", ("3x2", "8x8", "0x4", "4", "axb"))
def test_expert_grid_wrong(grid):
    refused("run", SMALL, "--prompt", "1", "--expert-grid", grid, ranks=4, status=2, phrases=("--expert-grid", grid))


@pytest.mark.parametrize("experts", ("f32", "mxfp4", "q8_0"))
@pytest.mark.parametrize("trunk", ("f32", "bf16", "q8_0"))
def test_storage_types(folder, prompt, trunk, experts):
    model = f"{SMALL},trunk={trunk},experts={experts}"
    want = decode(model, folder / "one.h5", prompt=prompt[:3], steps=3)
    same(decode(model, folder / "more.h5", prompt=prompt[:3], steps=3, ranks=3 if trunk == "bf16" else 8), want)


def test_threads(folder):
    want = decode(SMALL, folder / "one.h5")
    same(decode(SMALL, folder / "more.h5", env={"OMP_NUM_THREADS": "3"}), want)


# ---------------------------------------------------------------- F13: the norm of the routed sum

def mean_squares(path, tokens):
    """mean(z²) of every routed sum before routed_norm, by the reference, a layer a key (by its norm's address)."""
    model, seen, plain = reference.load(path), {}, reference.rms
    latent = model.config["latent_size"]

    def watch(x, w, eps):
        if np.shape(x) == (latent,):
            seen.setdefault(id(w), []).append(float(np.mean(x * x)))
        return plain(x, w, eps)
    reference.rms = watch
    try:
        model.logits(tokens)
    finally:
        reference.rms = plain
    return [value for values in seen.values() for value in values]


def eps_model(path, seed, prompt):
    """A model whose mean(z²) is about the epsilon and whose routed_norm is far from ones."""
    config = model_file.make_config(num_layers=5)
    assert config["latent_size"] not in (config["hidden_size"], config["q_lora_rank"], config["kv_lora_rank"])
    tensors = model_file.random_tensors(config, seed)
    for name in tensors:
        if name.endswith("/routed_norm"):
            tensors[name] *= np.linspace(0.25, 4, config["latent_size"], dtype=np.float32)
    model_file.write_model(path, config, tensors)
    scale = np.sqrt(config["rms_norm_eps"] / np.median(mean_squares(path, prompt)))
    for name in tensors:
        if name.endswith("/experts_down"):
            tensors[name] *= np.float32(scale)
    path.unlink()                       # the reference holds it open
    model_file.write_model(path, config, tensors)
    assert 0.2 < np.median(mean_squares(path, prompt)) / config["rms_norm_eps"] < 5


def test_routed_norm_near_its_epsilon(folder, prompt):
    """Where mean(z²) is near the epsilon, a norm of partial sums or a misplaced epsilon shows."""
    for attempt in range(20):           # until no expert lies within rounding of the cut
        path = folder / f"eps-{attempt}.h5"
        eps_model(path, SEED + attempt, prompt[:6])
        model = reference.load(path)
        expected = model.greedy(prompt[:6], 8)
        if model.route_margin > 3e-5:
            break
    want = decode(path, folder / "one.h5", prompt=prompt[:6], steps=8)
    same(want, expected, ROUNDING)
    for world in WORLDS:
        same(decode(path, folder / "more.h5", prompt=prompt[:6], steps=8, ranks=world), want)
    broken = decode(path, folder / "more.h5", prompt=prompt[:6], steps=1, ranks=2,
                    program=harness.K3DECODE_BREAKABLE, env={"K3_BREAK": "norm_before_sum"})
    assert harness.relative(broken[1], want[1][:1]) > 1e-3


# ---------------------------------------------------------------- F14: the bank is emptied between tokens

@pytest.mark.parametrize("layers, block, world", [(12, 12, 1), (13, 12, 1), (24, 12, 1), (25, 12, 1), (6, 1, 1), (5, 40, 1),
                                                  (13, 12, 2), (6, 1, 3)])
def test_three_steps_equal_three_runs(folder, layers, block, world):
    model = (f"synth:tiny:num_layers={layers},attn_res_block_size={block},vocab_size=101,hidden_size=64,num_heads=4,"
             f"dense_intermediate_size=64,seed={SEED}")
    tokens, logits = decode(model, folder / "three.h5", prompt=(5, 6), steps=3, ranks=world)
    for n in range(3):
        again = decode(model, folder / "one.h5", prompt=(5, 6, *tokens[:n]), steps=1, ranks=world)
        same(again, (tokens[n:n + 1], logits[n:n + 1]), limit=0)


# ---------------------------------------------------------------- F8: the prompt goes in step by step

@pytest.mark.parametrize("world, lengths", [(1, (2, 15, 16, 17, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE + 1)), (3, (PAGE + 1,))])
def test_long_prompt_equals_growing_prompt(folder, world, lengths):
    """Tokens decoded one at a time, then given as prompts whose lengths lie about the page and its double."""
    tokens, logits = decode(SMALL, folder / "long.h5", prompt=(7,), steps=lengths[-1] + 2, ranks=world)
    whole = [7, *tokens]
    for length in lengths:
        again = decode(SMALL, folder / "again.h5", prompt=whole[:length], steps=2, ranks=world)
        same(again, (tokens[length - 1:length + 1], logits[length - 1:length + 1]), limit=0)


# ---------------------------------------------------------------- long contexts

@pytest.mark.parametrize("prompt_length, steps", [(PAGE - 1, 1), (PAGE, 1), (PAGE - 2, 4), (190, 12)])
def test_page_boundaries(folder, prompt, prompt_length, steps):
    want = decode(SMALL, folder / "one.h5", prompt=prompt[:prompt_length], steps=steps)
    same(decode(SMALL, folder / "more.h5", prompt=prompt[:prompt_length], steps=steps, ranks=2), want)


@pytest.mark.parametrize("context", (1, PAGE - 1, PAGE, PAGE + 1, 8 * PAGE, 1000, 1024, 5000))
def test_synthetic_context(folder, context):
    """A synthetic cache of N positions is the same cache on any world; ranks may hold nothing of it."""
    words = ("--context", context, "--seed", SEED % 1000)
    want = decode(SMALL, folder / "one.h5", *words, steps=3)
    same(decode(SMALL, folder / "more.h5", *words, steps=3, ranks=8), want)


def test_synthetic_context_seed_matters(folder):
    one, two = (decode(SMALL, folder / "one.h5", "--context", "100", "--seed", seed)[1] for seed in (1, 2))
    assert harness.relative(one, two) > 1e-3


def test_context_beyond_the_model(folder):
    model = f"{SMALL},max_context=10"
    decode(model, folder / "one.h5", prompt=range(7), steps=4)          # the last decoded token is not fed
    for words in (("--prompt", harness.ids(range(7)), "--steps", "5"), ("--context", "10"),
                  ("--prompt", "1", "--steps", "11")):
        output = folder / "beyond.h5"
        refused("run", model, *words, "--output", output, ranks=2, phrases=("max_context", "10"))
        assert not output.exists()


# ---------------------------------------------------------------- F17: bands and blocks

@pytest.mark.parametrize("words, worlds", [
    ("moe_intermediate_size=96,experts=mxfp4", (2, 4)),                 # three blocks over two and four bands
    ("moe_intermediate_size=96,experts=q8_0", (2, 4)),
    ("num_heads=9,trunk=q8_0", (3, 9)),
    ("num_heads=10,kda_head_dim=16,v_head_dim=16,trunk=q8_0", (2, 3, 5)),     # two heads share a block
])
def test_bands_of_whole_blocks(folder, words, worlds):
    model = f"{SMALL},{words}"
    want = decode(model, folder / "one.h5")
    for world in worlds:
        same(decode(model, folder / "more.h5", ranks=world), want)
        same(decode(model, folder / "more.h5", "--expert-grid", f"1x{world}", ranks=world), want)


def test_bands_of_iq1_s_super_blocks(folder):
    """Three super-blocks of 256 on 2, 5 and 8 ranks: 768 / 8 is no whole number of them. Random codes and codebook."""
    path, rng = folder / "iq1_s.h5", np.random.default_rng(SEED)
    config = model_file.random_model(path, SEED, num_layers=5, num_experts=8, latent_size=256, moe_intermediate_size=768)
    with h5py.File(path, "a") as file:
        file["codebooks/iq1_s"] = rng.integers(-1, 2, (2048, 8), np.int8)
        for i in range(config["first_dense_layers"], 5):
            for name in ("experts_gate", "experts_up", "experts_down"):
                shape = file[f"layers/{i:03d}/{name}"].shape
                raw = rng.integers(0, 256, (*shape[:2], shape[2] // 256, 50), np.uint8)
                scale = np.full(raw.shape[:-1], 0.02 if name == "experts_down" else 0.05, "<f2")
                raw[..., :2] = scale[..., None].view(np.uint8)
                del file[f"layers/{i:03d}/{name}"]
                data = file.create_dataset(f"layers/{i:03d}/{name}", data=raw.reshape(*shape[:2], -1))
                data.attrs["type"], data.attrs["shape"] = "iq1_s", np.array(shape, np.int64)
    want = decode(path, folder / "one.h5")
    for world, grid in ((2, "1x2"), (5, "1x5"), (8, "1x8"), (8, "2x4")):
        same(decode(path, folder / "more.h5", "--expert-grid", grid, ranks=world), want)


@pytest.mark.parametrize("words, world, works", [
    ("num_heads=10,kda_head_dim=16,v_head_dim=16,trunk=q8_0", 6, 5),
    ("num_heads=3", 4, 3),
    ("num_heads=8,kda_head_dim=4,trunk=q8_0", 2, 1),
])
def test_refusal_lists_worlds_that_work(folder, words, world, works):
    model = f"{SMALL},{words}"
    result = refused("run", model, "--prompt", "1", "--output", folder / "no.h5", ranks=world,
                     phrases=("o_proj", f"a world of {world} ranks cannot work"))
    assert not (folder / "no.h5").exists()
    listed = re.search(r"the only world size that works: (1)$" if works == 1 else r"world sizes that work: 1 to (\d+)$", result.err, re.M)
    assert listed and int(listed[1]) == works, result
    want = decode(model, folder / "one.h5", steps=2)
    if works > 1:
        same(decode(model, folder / "more.h5", steps=2, ranks=works), want)


# ---------------------------------------------------------------- what the run file keeps

def test_top_logits_and_none(folder, prompt):
    want = decode(SMALL, folder / "all.h5")
    k3("run", SMALL, "--prompt", "1,2,3", "--steps", 4, "--logits", "top:7", "--output", folder / "top.h5", ranks=3)
    with h5py.File(folder / "top.h5") as run:
        top = np.argsort(-want[1], axis=1, kind="stable")[:, :7]
        assert np.array_equal(run["decode/top_ids"][...], top)
        assert np.array_equal(run["decode/top_logits"][...], np.take_along_axis(want[1], top, 1))
        assert "logits" not in run["decode"]
    k3("run", SMALL, "--prompt", "1,2,3", "--steps", 4, "--logits", "none", "--output", folder / "none.h5", ranks=3)
    with h5py.File(folder / "none.h5") as run:
        assert np.array_equal(run["decode/token_ids"][...], want[0])


def test_prompt_files(folder):
    want = decode(SMALL, folder / "all.h5", prompt=(9, 8, 7))
    (folder / "prompt.txt").write_text("9, 8\n7\n")
    with h5py.File(folder / "prompt.h5", "w") as file:
        file["token_ids"] = np.array([9, 8, 7], np.int32)
    for name in ("prompt.txt", "prompt.h5", "all.h5"):
        same(decode(SMALL, folder / "again.h5", "--prompt-file", folder / name, prompt=None, ranks=2), want)


@pytest.mark.parametrize("rank", (0, 1, 3))
def test_slice(folder, rank):
    """One process in a rank's place, the others not there: times, no logits to compare; every rank can be stood for."""
    for kind in ("all", "top:3", "none"):
        k3("run", SMALL, "--prompt", "1,2", "--steps", 3, "--slice", f"{rank}/4", "--logits", kind, "--output",
           folder / "slice.h5", "--overwrite")
        with h5py.File(folder / "slice.h5") as run:
            times = run["timings/rank_step_ms"][...]
            assert times.shape == (3, 1) and (times > 0).all() and (run["timings/phase_ms"][...].sum(2) > 0).all()
            assert np.array_equal(times[:, 0], run["timings/step_ms"][...])
    k3("compare", folder / "slice.h5", folder / "slice.h5", status=3)
