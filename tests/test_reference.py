"""Checks of the float64 reference itself: formats by hand-made bytes, formulas in a second form, every breakage seen.

    /usr/bin/python3 -m pytest tests/test_reference.py
"""
import os
import sys

import h5py
import numpy as np
import pytest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import model_file   # noqa: E402
import reference    # noqa: E402

SEED = int(os.environ.get("K3_TEST_SEED", np.random.SeedSequence().entropy % 2**31))   # fresh unless given
EXACT = 1e-12           # two float64 forms of one formula: some 1e3 roundings of 1e-16


@pytest.fixture(scope="module", autouse=True)
def show_seed():
    print(f"K3_TEST_SEED={SEED}")


@pytest.fixture
def rng():
    return np.random.default_rng(SEED)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "m.h5"
    model_file.random_model(path, SEED, trunk="bf16", experts="mxfp4")
    return reference.load(path)


@pytest.fixture(scope="module")
def tied_model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tied.h5"
    model_file.random_model(path, SEED, ties=True)
    return reference.load(path)


@pytest.fixture(scope="module")
def tokens(model):
    return np.random.default_rng(SEED + 1).integers(0, model.config["vocab_size"], 10)


def relative(got, want):
    return np.linalg.norm(got - want) / np.linalg.norm(want)


# ---------------------------------------------------------------- formats

def test_mxfp4_all_codes_and_scales():
    values = [0, .5, 1, 1.5, 2, 3, 4, 6, 0, -.5, -1, -1.5, -2, -3, -4, -6]
    nibbles = [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]      # codes 0, 1, 2, ... the low nibble first
    for scale in (0, 1, 127, 130, 254):
        raw = np.array([scale, *nibbles, *nibbles], np.uint8)
        want = np.array(values * 2) * 2.0 ** (scale - 127)
        assert np.array_equal(reference.dequantise_mxfp4(raw), want)
        assert np.array_equal(model_file.pack_mxfp4([scale], [[*range(16)] * 2]), raw)
    with pytest.raises(reference.BadInput, match="255"):
        reference.dequantise_mxfp4(np.array([255] + [0] * 16, np.uint8))


def test_mxfp4_blocks_stand_in_row_order():
    raw = np.zeros((2, 3, 34), np.uint8)
    raw[..., 0], raw[..., 17] = 127, 128
    raw[1, 2, 18] = 0x72                                            # second block: elements 32 and 33
    got = reference.dequantise_mxfp4(raw)
    assert got.shape == (2, 3, 64)
    assert got[1, 2, 32] == 2 * 1 and got[1, 2, 33] == 2 * 6 and np.count_nonzero(got) == 2


@pytest.mark.parametrize("bits, d", [(0x3E00, 1.5), (0xBC00, -1.0), (0x0001, 2.0**-24), (0x7BFF, 65504.0), (0, 0.0)])
def test_q8_0_extremes(bits, d):
    q = [-128, -127, -1, 0, 1, 126, 127] + [5] * 25
    raw = np.array([bits & 255, bits >> 8] + [v % 256 for v in q], np.uint8)        # little endian
    assert np.array_equal(reference.dequantise_q8_0(raw), d * np.array(q, float))


def test_bf16_values_and_rounding():
    raw = np.array([0x3F80, 0xBF80, 0x0001, 0x7F7F, 0x4049], np.uint16)
    assert np.array_equal(reference.dequantise_bf16(raw), [1, -1, 2.0**-133, (2 - 2.0**-7) * 2.0**127, 3.140625])
    step = 2.0**-7                                                  # between 1 and 2; ties go to the even neighbour
    x = np.array([1 + step / 2, 1 + 3 * step / 2, 1 + step / 2 + 2.0**-20, -1 - 0.4 * step])
    assert np.array_equal(reference.dequantise_bf16(model_file.quantise_bf16(x)), [1, 1 + 2 * step, 1 + step, -1])


def test_quantisers_stay_within_half_a_step(rng):
    x = rng.standard_normal((3, 5, 96)) * np.exp(rng.standard_normal((3, 5, 1)))
    x[0, 0, :32] = 0
    block = np.abs(x).reshape(3, 5, 3, 32).max(-1).repeat(32, -1).reshape(x.shape)
    q8 = reference.dequantise_q8_0(model_file.quantise_q8_0(x))
    assert (np.abs(q8 - x) <= block / 127 * 0.57).all()             # half a step, and d's own rounding times 127
    fp4 = reference.dequantise_mxfp4(model_file.quantise_mxfp4(x))
    assert (np.abs(fp4 - x) <= block / 4).all()                     # worst: just below 8 saturates at 6
    again = reference.dequantise_mxfp4(model_file.quantise_mxfp4(fp4))
    assert np.array_equal(again, fp4)


@pytest.mark.parametrize("trunk, experts, vectors, text", [
    ("f32", "f32", "f32", "fixed"), ("bf16", "bf16", "bf16", "variable"),
    ("q8_0", "mxfp4", "f32", "fixed"), ("mxfp4", "q8_0", "bf16", "variable")])
def test_stored_types_equal_their_values_in_float32(tmp_path, tokens, trunk, experts, vectors, text):
    """Every format's values fit into float32, so a file of those values gives the same logits to the last bit."""
    first, second = tmp_path / "first.h5", tmp_path / "second.h5"
    config = model_file.random_model(first, SEED, trunk=trunk, experts=experts, vectors=vectors, text=text)
    model = reference.load(first)
    shapes = {name: value.shape for name, value in model_file.random_tensors(config, SEED).items()}
    model_file.write_model(second, config, {name: model.tensor(name, *shape) for name, shape in shapes.items()})
    with h5py.File(first) as file:
        assert {trunk, experts} - {"f32"} <= {reference.text(d.attrs["type"]) for d in
                                              (file["lm_head"], file["layers/002/experts_up"]) if "type" in d.attrs}
    assert np.array_equal(model.logits(tokens[:3]), reference.load(second).logits(tokens[:3]))


def test_tensor_behind_an_external_link(tmp_path, model, tokens):
    path = tmp_path / "linked.h5"
    with h5py.File(path, "w") as file:
        for name, value in model.file.file.attrs.items():
            file.attrs[name] = value
        for name in model.file.file:
            file[name] = h5py.ExternalLink(model.file.path, name)
    assert np.array_equal(reference.load(path).logits(tokens[:2]), model.logits(tokens[:2]))


def test_only_selected_experts_are_read(tmp_path, tokens):
    config = model_file.random_model(tmp_path / "m.h5", SEED, experts="mxfp4")
    model = reference.load(tmp_path / "m.h5")
    model.logits(tokens[:1])
    read = [name for name, at in model.file.kept if name.endswith("experts_down")]
    assert len(read) == (config["num_layers"] - 1) * config["num_experts_per_token"]


@pytest.mark.parametrize("damage, phrase", [
    (lambda f: f.attrs.__setitem__("format_version", 2), "format_version"),
    (lambda f: f.attrs.__delitem__("architecture"), "architecture"),
    (lambda f: f["config"].attrs.__delitem__("situ_beta"), "situ_beta"),
    (lambda f: f.__delitem__("layers/001/q_conv"), "layers/001/q_conv"),
    (lambda f: f["lm_head"].attrs.__setitem__("type", "q5_k"), "q5_k"),
    (lambda f: f["lm_head"].attrs.__setitem__("shape", [320, 64]), "shape"),
    (lambda f: f["config"].attrs.__setitem__("v_head_dim", 24), "shape")])
def test_bad_file_is_refused_by_name(tmp_path, damage, phrase):
    path = tmp_path / "m.h5"
    model_file.random_model(path, SEED, trunk="q8_0")
    with h5py.File(path, "r+") as file:
        damage(file)
    with pytest.raises(reference.BadInput, match=phrase):
        reference.load(path).logits([1])


# ---------------------------------------------------------------- formulas in a second form

def weights(decoder, layer):
    """A layer's tensors by name, read past the reference's shape checks."""
    group = decoder.model.file.file[f"layers/{layer:03d}"]
    return {name: decoder.model.tensor(f"layers/{layer:03d}/{name}", *(group[name].attrs["shape"] if "shape" in
            group[name].attrs else group[name].shape)) for name in group if not name.startswith("experts_")}


def test_mla_expanded_equals_absorbed(model, rng):
    """score = (Wk_h^T q_nope) . c + q_rope . r over a cache of C + R numbers; W_v after the merge."""
    c, layer = model.config, 3
    heads, nope, R, V, C = (c[n] for n in ("num_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank"))
    decoder, cache = reference.Decoder(model), []
    w = weights(decoder, layer)
    kv_b = w["kv_b_proj"].reshape(heads, nope + V, C)
    norm = lambda x, n: x / np.sqrt(np.mean(x**2) + c["low_rank_norm_eps"]) * w[n]      # noqa: E731
    for x in rng.standard_normal((7, c["hidden_size"])):
        got = decoder.mla(layer, x)
        kv_a = w["kv_a_proj"] @ x
        cache.append(np.append(norm(kv_a[:C], "kv_a_norm"), kv_a[C:]))
        q = (w["q_b_proj"] @ norm(w["q_a_proj"] @ x, "q_a_norm")).reshape(heads, nope + R)
        o = np.empty((heads, V))
        for h in range(heads):
            absorbed = np.append(kv_b[h, :nope].T @ q[h, :nope], q[h, nope:])
            weight = np.exp(np.array(cache) @ absorbed / (nope + R) ** 0.5)
            o[h] = kv_b[h, nope:] @ (weight @ np.array(cache)[:, :C] / weight.sum())
        want = w["o_proj"] @ (o.ravel() / (1 + np.exp(-w["g_proj"] @ x)))
        assert relative(got, want) < EXACT


def test_kda_equals_its_transition_matrices(model, rng):
    """S = (1 - beta k k^T) diag(exp g) S + beta k v^T, head by head, the convolution written as a sum over tokens."""
    c, layer = model.config, 1
    heads, D, kernel = c["num_heads"], c["kda_head_dim"], c["kda_conv_kernel"]
    decoder = reference.Decoder(model)
    w = weights(decoder, layer)
    logistic = lambda x: 1 / (1 + np.exp(-x))                       # noqa: E731
    S, xs = np.zeros((heads, D, D)), rng.standard_normal((9, c["hidden_size"]))
    for t, x in enumerate(xs):
        got = decoder.kda(layer, x)
        qkv = []
        for n in "qkv":
            y = sum(w[n + "_conv"][:, kernel - 1 - back] * (w[n + "_proj"] @ xs[t - back])
                    for back in range(min(kernel, t + 1)))
            qkv.append((y * logistic(y)).reshape(heads, D))
        f = (w["f_b_proj"] @ w["f_a_proj"] @ x + w["dt_bias"]).reshape(heads, D)
        beta = logistic(w["b_proj"] @ x)
        out = np.empty((heads, D))
        for h in range(heads):
            q, k, v = (m[h] for m in qkv)
            q, k = q / np.sqrt(q @ q + 1e-6) / np.sqrt(D), k / np.sqrt(k @ k + 1e-6)
            decay = np.exp(c["kda_gate_lower_bound"] * logistic(np.exp(w["A_log"][h]) * f[h]))
            S[h] = (np.eye(D) - beta[h] * np.outer(k, k)) @ np.diag(decay) @ S[h] + beta[h] * np.outer(k, v)
            o = S[h].T @ q
            out[h] = o / np.sqrt(o @ o / D + c["rms_norm_eps"]) * w["o_norm"]
        want = w["o_proj"] @ (out.ravel() * logistic(w["g_proj"] @ x))
        assert relative(got, want) < EXACT


def test_moe_by_explicit_loops(model, rng):
    c, layer = model.config, 2
    decoder = reference.Decoder(model)
    w, E, L, wide = weights(decoder, layer), c["num_experts"], c["latent_size"], c["moe_intermediate_size"]
    gate, up = (model.tensor(f"layers/002/experts_{n}", E, wide, L) for n in ("gate", "up"))
    down = model.tensor("layers/002/experts_down", E, L, wide)
    b, lam = c["situ_beta"], c["situ_linear_beta"]
    situ = lambda g, u: b * np.tanh(g / b) / (1 + np.exp(-g)) * lam * np.tanh(u / lam)      # noqa: E731
    x = rng.standard_normal(c["hidden_size"])
    s = 1 / (1 + np.exp(-w["router"] @ x))
    rank = [sum((s + w["router_bias"])[o] > (s + w["router_bias"])[e] for o in range(E)) for e in range(E)]
    chosen = [e for e in range(E) if rank[e] < c["num_experts_per_token"]]
    y = w["routed_down_proj"] @ x
    z = sum(s[e] / sum(s[o] for o in chosen) * c["routed_scaling_factor"] * (down[e] @ situ(gate[e] @ y, up[e] @ y))
            for e in chosen)
    z = z / np.sqrt(np.mean(z * z) + c["rms_norm_eps"]) * w["routed_norm"]
    want = w["routed_up_proj"] @ z + w["shared_down_proj"] @ situ(w["shared_gate_proj"] @ x, w["shared_up_proj"] @ x)
    assert relative(decoder.moe(layer, x), want) < EXACT


def test_attn_res_with_equal_scores_is_the_mean(tmp_path, rng):
    config = model_file.make_config()
    tensors = model_file.random_tensors(config, SEED)
    tensors["output_res_proj"][:] = 0
    model_file.write_model(tmp_path / "m.h5", config, tensors)
    decoder = reference.Decoder(reference.load(tmp_path / "m.h5"))
    v = rng.standard_normal((4, config["hidden_size"]))
    assert relative(decoder.attn_res(list(v[:3]), v[3], None, "output_res"), v.mean(0)) < EXACT
    assert np.array_equal(decoder.attn_res([], v[3], 1, "attn_res"), v[3])


def test_attn_res_by_explicit_loops(model, rng):
    c, v = model.config, rng.standard_normal((3, model.config["hidden_size"])) * [[1], [3], [0.2]]
    decoder = reference.Decoder(model)
    w = weights(decoder, 9)
    score = [sum(w["mlp_res_proj"][d] * w["mlp_res_norm"][d] * x[d] / np.sqrt(np.mean(x**2) + c["rms_norm_eps"])
                 for d in range(len(x))) for x in v]
    want = sum(np.exp(s) * x for s, x in zip(score, v)) / sum(np.exp(score))
    assert relative(decoder.attn_res(list(v[:2]), v[2], 9, "mlp_res"), want) < EXACT


def test_residual_stream_and_bank(model, rng):
    """With attention and FFN replaced by given vectors: p is the sum since the last restart (the first part being
    the layer's own attention), and the bank holds p as it entered each restarting layer."""
    c, seen = model.config, []
    n, block, H = c["num_layers"], c["attn_res_block_size"], c["hidden_size"]
    a, f = rng.standard_normal((2, n, H))
    decoder = reference.Decoder(model)
    decoder.kda = decoder.mla = lambda layer, x: a[layer]
    decoder.dense = decoder.moe = lambda layer, x: f[layer]
    decoder.attn_res = lambda bank, p, layer, name: seen.append((list(bank), p)) or p
    decoder.step(7)
    entering = [model.tensor("embed", c["vocab_size"], H, at=7)]    # p before each layer, and after the last
    for i in range(n):
        first = i // block * block
        entering.append(a[first:i + 1].sum(0) + f[first:i + 1].sum(0))
    for i in range(n + 1):
        bank, p = seen[2 * i]
        want = entering[0:i:block]                                  # those of the restarts before layer i
        assert len(bank) == len(want) and np.allclose(bank, want, EXACT, EXACT) if want else not bank
        assert relative(p, entering[i]) < EXACT
        if i < n:
            bank, p = seen[2 * i + 1]
            assert len(bank) == i // block + 1 and relative(p, entering[i + 1] - f[i]) < EXACT


def test_ties_go_to_the_lower_index(tied_model, rng):
    """The tie stands at the last chosen place, for every layer and input (see model_file.tie_routers)."""
    top = tied_model.config["num_experts_per_token"]
    for layer in (1, 5, 13):
        bias = weights(reference.Decoder(tied_model), layer)["router_bias"]
        low, high = np.flatnonzero(bias == 1)
        x = rng.standard_normal(tied_model.config["hidden_size"])
        for broken, want, other in ((None, low, high), ("tie_to_higher", high, low)):
            decoder = reference.Decoder(tied_model, broken)
            chosen, _ = decoder.route(layer, x)
            assert len(chosen) == top and want in chosen and other not in chosen and decoder.route_margin == 0


# ---------------------------------------------------------------- the whole model

def test_logits_are_causal_and_runs_start_afresh(model, tokens):
    whole = model.logits(tokens)
    assert whole.shape == (len(tokens), model.config["vocab_size"]) and whole.dtype == np.float64
    assert np.array_equal(model.logits(tokens[:4]), whole[:4])
    assert 0.5 < whole.std() < 8


def test_greedy_is_teacher_forcing_of_its_own_tokens(model, tokens):
    chosen, rows = model.greedy(tokens[:3], 4)
    assert np.array_equal(rows.argmax(1), chosen)
    assert np.array_equal(model.logits([*tokens[:3], *chosen[:-1]])[2:], rows)


def test_random_model_is_tame(model, tokens, rng):
    """Float32 rounding must stay well below the tolerance of comparisons: see random_tensors."""
    want, kept = model.logits(tokens), dict(model.file.kept)
    try:
        for key in [k for k in kept if k[0] == "embed"]:
            model.file.kept[key] = kept[key] * (1 + 1e-9 * rng.standard_normal(kept[key].shape))
        assert relative(model.logits(tokens), want) < 60e-9
    finally:
        model.file.kept.update(kept)


@pytest.mark.parametrize("name, meaning", reference.BREAKAGES, ids=reference.BREAKAGE_NAMES)
def test_breakage_is_seen_control(model, tied_model, tokens, name, meaning):
    subject = tied_model if name == "tie_to_higher" else model
    want, got = subject.logits(tokens), subject.logits(tokens, broken=name)
    assert np.isfinite(got).all() and relative(got, want) > 1e-4, meaning


def test_unknown_breakage_and_bad_tokens_are_refused(model):
    for bad in (dict(token_ids=[1], broken="nonsense"), dict(token_ids=[320]), dict(token_ids=[-1])):
        with pytest.raises(reference.BadInput):
            model.logits(**bad)


# ---------------------------------------------------------------- the command line

def test_command_line(tmp_path, model, tokens, capsys):
    prompt, (chosen, rows) = tokens[:3], model.greedy(tokens[:3], 4)
    output, run = tmp_path / "ref.npz", tmp_path / "run.h5"
    assert reference.main([model.file.path.__fspath__(), "--prompt", ",".join(map(str, prompt)), "--steps", "4",
                           "--output", str(output)]) == 0
    saved = np.load(output)
    assert np.array_equal(saved["token_ids"], chosen) and np.array_equal(saved["logits"], rows)

    def status(logits, *options):
        with h5py.File(run, "w") as file:
            file["prompt/token_ids"], file["decode/token_ids"] = prompt, chosen
            file["decode/logits"] = np.float32(logits)
        return reference.main([str(model.file.path), "--compare", str(run), *options])

    assert status(rows) == 0
    assert "top1_agreement   1\n" in capsys.readouterr().out
    assert status(rows * (1 + 1e-4)) == 1                           # beyond the default tolerance ...
    assert status(rows * (1 + 1e-4), "--tolerance", "1e-3") == 0    # ... and within a wider one
    assert status(rows * np.nan) == 1
    assert status(rows, "--break", "no_beta") == 1
    assert status(rows[:-1]) == 3                                   # fewer rows than tokens
    assert reference.main([str(model.file.path), "--compare", str(tmp_path / "absent.h5")]) == 3
    with pytest.raises(SystemExit) as stop:
        reference.main([str(model.file.path)])
    assert stop.value.code == 2
