"""Model files for tests, written with h5py: nothing here is shared with the C code or with reference.py.

    random_model("m.h5", seed=1, trunk="q8_0", experts="mxfp4", hidden_size=128)

writes a small random model shaped like Kimi K3. The parts can be used alone: make_config, random_tensors,
tie_routers, choose_types, write_model, and the quantisers.
"""
import h5py
import numpy as np

# ---------------------------------------------------------------- block formats

E2M1 = np.array([0, .5, 1, 1.5, 2, 3, 4, 6])
BLOCK = {"q8_0": 32, "mxfp4": 32}                       # values in a block


def quantise_bf16(x):
    """float [...] -> uint16 [...], to nearest, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def pack_q8_0(d, q):
    """d [..., blocks], q int8 [..., blocks, 32] -> uint8 [..., blocks * 34]."""
    d, q = np.ascontiguousarray(d, "<f2"), np.ascontiguousarray(q, np.int8)
    raw = np.concatenate([d[..., None].view(np.uint8), q.view(np.uint8)], axis=-1)
    return raw.reshape(*q.shape[:-2], -1)


def quantise_q8_0(x):
    """float [..., n] -> uint8 [..., n / 32 * 34]: d = max|x| / 127 rounded to float16."""
    x = np.asarray(x, np.float64).reshape(*np.shape(x)[:-1], -1, 32)
    d = (np.abs(x).max(axis=-1) / 127).astype(np.float16)
    divisor = np.where(d == 0, 1, d.astype(np.float64))[..., None]
    return pack_q8_0(d, np.clip(np.rint(x / divisor), -127, 127))


def pack_mxfp4(scale, code):
    """scale bytes [..., blocks], codes 0 .. 15 [..., blocks, 32] -> uint8 [..., blocks * 17]."""
    scale, code = np.asarray(scale, np.uint8), np.asarray(code, np.uint8)
    nibbles = code[..., 0::2] | code[..., 1::2] << 4    # the low nibble is the even element
    return np.concatenate([scale[..., None], nibbles], axis=-1).reshape(*code.shape[:-2], -1)


def quantise_mxfp4(x):
    """float [..., n] -> uint8 [..., n / 32 * 17]: the largest value of a block falls into 4 .. 8, above 6 saturates."""
    x = np.asarray(x, np.float64).reshape(*np.shape(x)[:-1], -1, 32)
    largest = np.abs(x).max(axis=-1)
    exponent = np.where(largest == 0, 0, np.floor(np.log2(np.where(largest == 0, 1, largest))) - 2)
    exponent = np.clip(exponent, -127, 127).astype(np.int64)
    scaled = np.ldexp(x, -exponent[..., None])
    code = np.abs(np.abs(scaled)[..., None] - E2M1).argmin(axis=-1)
    return pack_mxfp4(exponent + 127, code | np.where(scaled < 0, 8, 0))


QUANTISE = {"q8_0": quantise_q8_0, "mxfp4": quantise_mxfp4}

# ---------------------------------------------------------------- the file


def write_model(path, config, tensors, types=None, text="variable"):
    """Write a model file. `tensors`: name -> float array; `types`: name -> f32, bf16, q8_0 or mxfp4 (f32 where
    absent); `text`: text attributes of "variable" or "fixed" length."""
    types = types or {}
    string = {"variable": str, "fixed": np.bytes_}[text]
    with h5py.File(path, "w") as file:
        file.attrs["format"] = string("k3decode-model")
        file.attrs["format_version"] = np.int64(1)
        file.attrs["architecture"] = string("kimi-k3")
        group = file.create_group("config")
        for name, value in config.items():
            if name == "layer_types":
                group[name] = np.asarray(value, np.uint8)
            else:
                kind = np.uint8 if isinstance(value, bool) else np.int64 if isinstance(value, int) else np.float64
                group.attrs[name] = kind(value)
        for name, value in tensors.items():
            kind = types.get(name, "f32")
            if kind == "f32":
                file[name] = np.asarray(value, np.float32)
                continue
            data = quantise_bf16(value) if kind == "bf16" else QUANTISE[kind](value)
            dataset = file.create_dataset(name, data=data)
            dataset.attrs["type"] = string(kind)
            if kind != "bf16":
                dataset.attrs["shape"] = np.array(np.shape(value), np.int64)


# ---------------------------------------------------------------- a random small model

# The constants differ from K3's where that shows a constant compiled in instead of read.
TINY = dict(
    num_layers=14, hidden_size=96, vocab_size=320, num_heads=8, q_lora_rank=48, kv_lora_rank=32,
    qk_nope_head_dim=24, qk_rope_head_dim=8, v_head_dim=16, kda_head_dim=16, kda_conv_kernel=4,
    kda_gate_lower_bound=-3.0, num_experts=16, num_experts_per_token=4, num_shared_experts=1, latent_size=64,
    moe_intermediate_size=64, dense_intermediate_size=128, first_dense_layers=1, attn_res_block_size=4,
    rms_norm_eps=1e-5, low_rank_norm_eps=1e-6, situ_beta=3.0, situ_linear_beta=6.0, routed_scaling_factor=1.5,
    renormalize=True, max_context=4096)


def make_config(mla_layers=None, **overrides):
    """TINY with overrides. `mla_layers`: ONE-based positions; by default every fourth layer and the last."""
    unknown = set(overrides) - set(TINY)
    if unknown:
        raise ValueError(f"unknown config fields: {sorted(unknown)}")
    config = {**TINY, **overrides}
    for name, default in TINY.items():                  # an integer given for a float field is stored as a float
        config[name] = type(default)(config[name])
    last = config["num_layers"]
    if mla_layers is None:
        mla_layers = {*range(4, last + 1, 4), last}
    config["layer_types"] = [int(i + 1 in mla_layers) for i in range(last)]
    return config


def random_tensors(config, seed):
    """name -> float32 array. Activations stay of order one, no term of the formulas is
    negligible, and the model is tame: a relative error in the embedding grows about tenfold up to the logits,
    so that float32 arithmetic can stay below 1e-5."""
    rng = np.random.default_rng(seed)
    c = config
    H, V, heads, D = c["hidden_size"], c["vocab_size"], c["num_heads"], c["kda_head_dim"]
    C, R, Q = c["kv_lora_rank"], c["qk_rope_head_dim"], c["q_lora_rank"]
    qk, kv, v = c["qk_nope_head_dim"] + R, c["qk_nope_head_dim"] + c["v_head_dim"], c["v_head_dim"]
    E, L, wide = c["num_experts"], c["latent_size"], c["moe_intermediate_size"]
    tensors = {}

    def matrix(name, *shape, gain=1.0):                 # keeps the size of its input, times gain
        tensors[name] = rng.standard_normal(shape) * gain / np.sqrt(shape[-1])

    def uniform(name, *shape, low=0.5, high=1.5):       # by default a norm weight, spread around one
        tensors[name] = rng.uniform(low, high, shape)

    def residual(name):
        uniform(name + "_norm", H)
        matrix(name + "_proj", H, gain=0.75)            # scores near one: no softmax is flat or one-hot

    def gated(prefix, inner):
        matrix(prefix + "gate_proj", inner, H)
        matrix(prefix + "up_proj", inner, H, gain=2)    # the up values reach the bend of the tanh
        matrix(prefix + "down_proj", H, inner, gain=0.4)

    tensors["embed"] = rng.standard_normal((V, H))
    for i, is_mla in enumerate(c["layer_types"]):
        at = f"layers/{i:03d}/"
        uniform(at + "input_norm", H)
        uniform(at + "post_attn_norm", H)
        residual(at + "attn_res")
        residual(at + "mlp_res")
        if is_mla:
            # Small low-rank activations, so that low_rank_norm_eps shows; the R shared dims are not normed.
            matrix(at + "q_a_proj", Q, H, gain=0.03)
            uniform(at + "q_a_norm", Q)
            matrix(at + "q_b_proj", heads * qk, Q, gain=1.5)
            matrix(at + "kv_a_proj", C + R, H)
            tensors[at + "kv_a_proj"][:C] *= 0.03
            uniform(at + "kv_a_norm", C)
            matrix(at + "kv_b_proj", heads * kv, C)
            matrix(at + "g_proj", heads * v, H)
            matrix(at + "o_proj", H, heads * v, gain=2)
        else:
            for n in "qkv":
                matrix(at + n + "_proj", heads * D, H)
                matrix(at + n + "_conv", heads * D, c["kda_conv_kernel"], gain=1.5)
            # q resembles k: where q . k is near zero, o_norm would magnify the rounding of float32.
            for n in ("_proj", "_conv"):
                tensors[at + "q" + n] = 0.6 * tensors[at + "q" + n] + 0.8 * tensors[at + "k" + n]
            matrix(at + "g_proj", heads * D, H)
            matrix(at + "f_a_proj", D, H)
            matrix(at + "f_b_proj", heads * D, D, gain=0.5)
            uniform(at + "dt_bias", heads * D, low=-4.5, high=-0.5)    # decays from about 0.2 to 0.999
            uniform(at + "A_log", heads, low=-0.5, high=0.5)
            matrix(at + "b_proj", heads, H)
            uniform(at + "o_norm", D)
            matrix(at + "o_proj", H, heads * D)
        if i < c["first_dense_layers"]:
            gated(at, c["dense_intermediate_size"])
            continue
        matrix(at + "router", E, H)
        tensors[at + "router_bias"] = rng.standard_normal(E) * 0.15     # like the differences of the scores
        matrix(at + "routed_down_proj", L, H)
        uniform(at + "routed_norm", L)
        matrix(at + "routed_up_proj", H, L)
        matrix(at + "experts_gate", E, wide, L)
        matrix(at + "experts_up", E, wide, L, gain=2)
        matrix(at + "experts_down", E, L, wide, gain=0.04)              # small: routed_norm's epsilon shows
        if c["num_shared_experts"]:
            gated(at + "shared_", c["num_shared_experts"] * wide)
    residual("output_res")
    uniform("final_norm", H)
    matrix("lm_head", V, H, gain=2)
    return {name: np.asarray(value, np.float32) for name, value in tensors.items()}


def tie_routers(config, tensors):
    """Make the last place among the chosen experts an exact tie, for every token and in any arithmetic.

    Two experts have zero router rows and bias 1 (score 1.5 exactly), k - 1 others always win (bias 2 or more)
    and the rest always lose (bias near 0)."""
    E, top = config["num_experts"], config["num_experts_per_token"]
    if E < top + 1:
        raise ValueError("a tie needs more experts than are chosen")
    for name in [n for n in tensors if n.endswith("/router_bias")]:
        bias = tensors[name]
        order = np.random.default_rng(E).permutation(E)
        tied, winners, losers = order[:2], order[2:top + 1], order[top + 1:]
        bias[tied] = 1
        bias[winners] = 2 + np.abs(bias[winners])
        bias[losers] = -np.abs(bias[losers])
        tensors[name[:-len("_bias")]][tied] = 0


def choose_types(tensors, trunk="f32", experts="f32", vectors="f32"):
    """Storage types: matrices outside the experts, expert matrices, and the rest (norms, convolutions, ...).
    A matrix whose row is not a whole number of blocks stays f32."""
    types = {}
    for name, value in tensors.items():
        if value.ndim == 1 or name.endswith("_conv"):
            kind = vectors
        else:
            kind = experts if "/experts_" in name else trunk
            if value.shape[-1] % BLOCK.get(kind, 1):
                kind = "f32"
        types[name] = kind
    return types


def random_model(path, seed, trunk="f32", experts="f32", vectors="f32", text="variable", ties=False,
                 mla_layers=None, **overrides):
    """Write a random model; returns its config. `ties`: see tie_routers; `overrides`: config fields."""
    config = make_config(mla_layers, **overrides)
    tensors = random_tensors(config, seed)
    if ties:
        tie_routers(config, tensors)
    write_model(path, config, tensors, choose_types(tensors, trunk, experts, vectors), text)
    return config
