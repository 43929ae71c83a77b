"""GGUF files for tests, written with NumPy alone: nothing is shared with the C code, and no public code is used.

    kv, tensors = small_model(seed=5)                 # a Kimi K3 of 13 layers, all block types mixed
    write_gguf("m.gguf", kv, tensors)
    write_split("folder", "m", kv, tensors, shards=3)

    python3 gguf_model.py m.gguf 5                    # the same from a shell

A model is a list of metadata (key, kind, value) and a dict: tensor name -> (type, shape, bytes), shapes outermost axis first.
The numbers come from PCG64's raw stream, which NumPy keeps stable, through exact arithmetic: the files are the same, bit for
bit, everywhere (tests/fixtures/public_gguf bears the checksum of one).
"""
import pathlib
import struct
import sys

import numpy as np

# type: number in the file, values and bytes of a block (the tables of the gguf package)
TYPES = {"f32": (0, 1, 4), "f16": (1, 1, 2), "q4_0": (2, 32, 18), "q4_1": (3, 32, 20), "q5_0": (6, 32, 22), "q5_1": (7, 32, 24),
         "q8_0": (8, 32, 34), "q2_k": (10, 256, 84), "q3_k": (11, 256, 110), "q4_k": (12, 256, 144), "q5_k": (13, 256, 176),
         "q6_k": (14, 256, 210), "iq2_xxs": (16, 256, 66), "iq2_xs": (17, 256, 74), "iq3_xxs": (18, 256, 98),
         "iq1_s": (19, 256, 50), "iq4_nl": (20, 32, 18), "iq3_s": (21, 256, 110), "iq2_s": (22, 256, 82), "iq4_xs": (23, 256, 136),
         "f64": (28, 1, 8), "iq1_m": (29, 256, 56), "bf16": (30, 1, 2), "tq1_0": (34, 256, 54), "mxfp4": (39, 32, 17)}
KINDS = {"u8": (0, "<B"), "i8": (1, "<b"), "u16": (2, "<H"), "i16": (3, "<h"), "u32": (4, "<I"), "i32": (5, "<i"), "f32": (6, "<f"),
         "bool": (7, "<?"), "str": (8, None), "u64": (10, "<Q"), "i64": (11, "<q"), "f64": (12, "<d")}
ALIGNMENT = 32

# ---------------------------------------------------------------- the file


def text(value):
    value = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(value)) + value


def pack_value(kind, value):
    """kind: one of KINDS, or "[kind]" for an array."""
    if kind.startswith("["):
        inner = kind[1:-1]
        return struct.pack("<IIQ", 9, KINDS[inner][0], len(value)) + b"".join(pack_value(inner, v)[4:] for v in value)
    number, form = KINDS[kind]
    return struct.pack("<I", number) + (text(value) if form is None else struct.pack(form, value))


def padded(data, alignment=ALIGNMENT):
    return data + b"\0" * (-len(data) % alignment)


def pack_gguf(kv, tensors, version=3):
    """The bytes of a file."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(kv))
    head += b"".join(text(key) + pack_value(kind, value) for key, kind, value in kv)
    at, data = 0, []
    for name, (kind, shape, raw) in tensors.items():
        head += text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *reversed(shape))
        head += struct.pack("<IQ", TYPES[kind][0] if isinstance(kind, str) else kind, at)
        data.append(padded(raw))
        at += len(data[-1])
    return padded(head) + b"".join(data)


def write_gguf(path, kv, tensors, **more):
    path.write_bytes(pack_gguf(kv, tensors, **more))
    return path


def write_split(folder, stem, kv, tensors, shards):
    """As gguf-split does: all metadata in the first shard, split.* in each. Returns the paths."""
    names, paths = list(tensors), []
    for n in range(shards):
        own = names[n * len(names) // shards:(n + 1) * len(names) // shards]
        split = [("split.no", "u16", n), ("split.count", "u16", shards), ("split.tensors.count", "i32", len(names))]
        path = folder / f"{stem}-{n + 1:05}-of-{shards:05}.gguf"
        paths.append(write_gguf(path, (kv if n == 0 else []) + split, {name: tensors[name] for name in own}))
    return paths


# ---------------------------------------------------------------- values

class Stream:
    """Random bytes and numbers that no NumPy version changes."""

    def __init__(self, seed):
        self.bits = np.random.PCG64(seed)

    def bytes(self, count):
        return self.bits.random_raw(-(-count // 8)).astype("<u8").view(np.uint8)[:count].copy()

    def uniform(self, count, low, high):
        unit = self.bits.random_raw(count) >> np.uint64(11)
        return low + (high - low) * (unit.astype(np.float64) * 2.0 ** -53)


def as_type(kind, values):
    """float64 -> bytes of a plain type."""
    values = np.asarray(values, np.float32)
    if kind == "bf16":
        return (values.view("<u4") >> 16).astype("<u2").tobytes()
    return values.astype({"f32": "<f4", "f16": "<f2"}[kind]).tobytes()


# Of random codes and a scale d of 1: (standard deviation of the values, dmin that makes their mean zero). Measured with
# the gguf package by make_gguf_fixture.py --measure.
SPREAD = {
    "q4_0": (4.61, 0), "q4_1": (4.62, -7.5), "q5_0": (9.21, 0), "q5_1": (9.22, -15.5), "q8_0": (73.9, 0), "iq4_nl": (67.3, 0),
    "q2_k": (13.9, 1.5), "q3_k": (43.4, 0), "q4_k": (258, 7.5), "q5_k": (527, 15.5), "q6_k": (1360, 0), "iq2_xxs": (53.5, 0),
    "iq2_xs": (55.8, 0), "iq2_s": (56.4, 0), "iq3_xxs": (143, 0), "iq3_s": (141, 0), "iq1_s": (7.19, 0), "iq1_m": (7.2, 0),
    "iq4_xs": (1250, 0)}

# byte at which the float16 d and dmin of a block stand
D_AT = {"q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q8_0": (0,), "iq4_nl": (0,), "q2_k": (80, 82), "q3_k": (108,),
        "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,), "iq2_xxs": (0,), "iq2_xs": (0,), "iq2_s": (0,), "iq3_xxs": (0,),
        "iq3_s": (0,), "iq1_s": (0,), "iq4_xs": (0,)}


def set_scale(kind, blocks, d, dmin=0.0):
    """Puts float16 d (and dmin) [blocks] into blocks uint8 [blocks, bytes]."""
    half = np.asarray(d, np.float16).view(np.uint16)
    if kind == "iq1_m":                                # one nibble in the top of each of four 16-bit scales
        words = blocks[:, 48:56].copy().view("<u2")
        for i in range(4):
            words[:, i] = (words[:, i] & 0x0FFF) | ((half >> (4 * i)) & 15) << 12
        blocks[:, 48:56] = words.view(np.uint8)
        return
    for at, value in zip(D_AT[kind], (half, np.asarray(dmin, np.float16).view(np.uint16))):
        blocks[:, at] = value & 255
        blocks[:, at + 1] = value >> 8


def random_blocks(stream, kind, rows, columns, size):
    """Blocks of random codes whose values have about the standard deviation `size`: bytes."""
    count = rows * columns // TYPES[kind][1]
    blocks = stream.bytes(count * TYPES[kind][2]).reshape(count, -1)
    if kind == "mxfp4":                                # values 2^e times a code; codes spread by about 2.7
        exponent = int(np.floor(np.log2(size / 2.7))) + 127
        blocks[:, 0] = exponent + (blocks[:, 0] & 1)
        return blocks.tobytes()
    spread, middle = SPREAD[kind]
    d = size / spread * stream.uniform(count, 0.75, 1.25)
    set_scale(kind, blocks, d, middle * d)
    return blocks.tobytes()


# ---------------------------------------------------------------- a small model

# All epsilons are equal: llama.cpp's graph uses rms_norm_eps where the model description has constants of 1e-6.
SMALL = dict(layers=13, mla=(4, 8, 12, 13), block=4, hidden=256, vocab=192, heads=8, q_lora=64, kv_lora=256, nope=32, rope=16, v_dim=32,
             kda_dim=32, conv=4, lower_bound=-5.0, experts=8, top=3, shared=1, latent=256, moe_inner=256, dense_inner=512, dense_layers=1,
             eps=1e-6, situ_beta=4.0, situ_linear_beta=25.0, scaling=1.5, renormalize=True, context=4096,
             joined=())     # layers (zero-based) whose K and V up-projections are one tensor, attn_kv_b

PLAIN = ("f32", "f16", "bf16")
SHORT = ("q8_0", "mxfp4", "q4_0", "q5_1", "iq4_nl", "q4_1", "q5_0")             # blocks of 32
LONG = ("iq1_s", "q4_k", "iq2_xxs", "q6_k", "iq3_xxs", "q2_k", "iq4_xs", "q5_k", "iq2_xs", "q3_k", "iq1_m", "iq2_s", "iq3_s")
NOW = ("f32", "bf16", "q8_0", "mxfp4", "iq1_s")


def metadata(s):
    """Keys as llama.cpp's converter writes them."""
    k = "kimi-k3."
    heads_kv = [1 if i + 1 in s["mla"] else 0 for i in range(s["layers"])]
    return [
        ("general.architecture", "str", "kimi-k3"), ("general.name", "str", "small"), ("general.quantization_version", "u32", 2),
        (k + "context_length", "u32", s["context"]), (k + "embedding_length", "u32", s["hidden"]),
        (k + "block_count", "u32", s["layers"]), (k + "feed_forward_length", "u32", s["dense_inner"]),
        (k + "attention.head_count", "u32", s["heads"]), (k + "attention.head_count_kv", "[i32]", heads_kv),
        (k + "attention.layer_norm_rms_epsilon", "f32", s["eps"]), (k + "expert_count", "u32", s["experts"]),
        (k + "expert_used_count", "u32", s["top"]), (k + "vocab_size", "u32", s["vocab"]), (k + "ssm.conv_kernel", "u32", s["conv"]),
        (k + "kda.head_dim", "u32", s["kda_dim"]), (k + "kda.gate_lower_bound", "f32", s["lower_bound"]),
        (k + "attention.q_lora_rank", "u32", s["q_lora"]), (k + "attention.kv_lora_rank", "u32", s["kv_lora"]),
        (k + "rope.dimension_count", "u32", s["rope"]), (k + "attention.key_length", "u32", s["kv_lora"] + s["rope"]),
        (k + "attention.value_length", "u32", s["kv_lora"]), (k + "attention.key_length_mla", "u32", s["nope"] + s["rope"]),
        (k + "attention.value_length_mla", "u32", s["v_dim"]), (k + "expert_feed_forward_length", "u32", s["moe_inner"]),
        (k + "expert_shared_count", "u32", s["shared"]), (k + "leading_dense_block_count", "u32", s["dense_layers"]),
        (k + "expert_weights_scale", "f32", s["scaling"]), (k + "expert_weights_norm", "bool", s["renormalize"]),
        (k + "expert_gating_func", "u32", 2), (k + "expert_latent_length", "u32", s["latent"]),
        (k + "activation.situ_beta", "f32", s["situ_beta"]), (k + "activation.situ_linear_beta", "f32", s["situ_linear_beta"]),
        (k + "attn_res.block_size", "u32", s["block"]), ("tokenizer.ggml.model", "str", "no_vocab")]


def small_tensors(s, seed, types=None):
    """name -> (type, shape, bytes). `types`: the only types that matrices may have."""
    stream, out, turn = Stream(seed), {}, {"short": 0, "long": 0}
    allowed = lambda names: [n for n in names if types is None or n in types]

    def choose(columns, banded):
        """The next type whose blocks fit; `banded`: ranks share the columns, in units of 32."""
        group = "long" if columns % 256 == 0 and not banded else "short" if columns % 32 == 0 else None
        names = allowed(PLAIN) if group is None else allowed(SHORT + PLAIN if group == "short" else LONG + SHORT + PLAIN)
        turn[group] = turn.get(group, 0) + 1
        return names[turn[group] % len(names)]

    def matrix(name, *shape, gain=1.0, banded=False, kind=None):
        kind, size = kind or choose(shape[-1], banded), gain / np.sqrt(shape[-1])
        rows, columns = int(np.prod(shape[:-1])), shape[-1]
        if kind in PLAIN:
            raw = as_type(kind, stream.uniform(rows * columns, -1.75, 1.75) * size)
        else:
            raw = random_blocks(stream, kind, rows, columns, size)
        out[name] = kind, list(shape), raw

    def vector(name, count, low, high, shape=None):
        out[name] = "f32", shape or [count], as_type("f32", stream.uniform(count, low, high))

    hidden, heads, dim, width = s["hidden"], s["heads"], s["kda_dim"], s["heads"] * s["kda_dim"]
    matrix("token_embd.weight", s["vocab"], hidden, gain=np.sqrt(hidden))
    for i in range(s["layers"]):
        b = f"blk.{i}."
        vector(b + "attn_norm.weight", hidden, 0.5, 1.5)
        vector(b + "ffn_norm.weight", hidden, 0.5, 1.5)
        for name in ("attn_res_score", "ffn_res_score"):
            vector(b + name + ".weight", hidden, -1.3 / np.sqrt(hidden), 1.3 / np.sqrt(hidden))
        if i + 1 in s["mla"]:
            matrix(b + "attn_q_a.weight", s["q_lora"], hidden)
            vector(b + "attn_q_a_norm.weight", s["q_lora"], 0.5, 1.5)
            matrix(b + "attn_q_b.weight", heads * (s["nope"] + s["rope"]), s["q_lora"], gain=1.5)
            matrix(b + "attn_kv_a_mqa.weight", s["kv_lora"] + s["rope"], hidden)
            vector(b + "attn_kv_a_norm.weight", s["kv_lora"], 0.5, 1.5)
            if i in s["joined"]:
                kind = choose(s["kv_lora"], False)
                matrix(b + "attn_kv_b.weight", heads * (s["nope"] + s["v_dim"]), s["kv_lora"], kind=kind)
            else:
                scale = np.sqrt(s["nope"] / s["kv_lora"])   # rows are heads' inputs, but the fan-in is kv_lora
                matrix(b + "attn_k_b.weight", heads, s["kv_lora"], s["nope"], gain=scale)
                matrix(b + "attn_v_b.weight", heads, s["v_dim"], s["kv_lora"])
            matrix(b + "attn_gate.weight", heads * s["v_dim"], hidden)
            matrix(b + "attn_output.weight", hidden, heads * s["v_dim"], banded=True)
        else:
            for x in "qkv":
                matrix(b + f"attn_{x}.weight", width, hidden)
            for x in "qkv":
                vector(b + f"ssm_conv1d_{x}.weight", width * s["conv"], -1.2, 1.2, [1, width, 1, s["conv"]])
            matrix(b + "ssm_f_a.weight", dim, hidden)
            matrix(b + "ssm_f_b.weight", width, dim, gain=0.5)
            matrix(b + "ssm_beta.weight", heads, hidden)
            a_log = stream.uniform(heads, -0.5, 0.5).astype(np.float32)
            out[b + "ssm_a"] = "f32", [heads], as_type("f32", -np.exp2(a_log * np.float32(1.5)))
            vector(b + "ssm_dt.bias", width, -4.5, -0.5)
            matrix(b + "ssm_g.weight", width, hidden)
            vector(b + "ssm_norm.weight", dim, 0.5, 1.5)
            matrix(b + "attn_output.weight", hidden, width, gain=0.6, banded=True)
        if i < s["dense_layers"]:
            matrix(b + "ffn_gate.weight", s["dense_inner"], hidden)
            matrix(b + "ffn_up.weight", s["dense_inner"], hidden, gain=2)
            matrix(b + "ffn_down.weight", hidden, s["dense_inner"], gain=0.15, banded=True)
            continue
        matrix(b + "ffn_gate_inp.weight", s["experts"], hidden, kind="f32")
        vector(b + "exp_probs_b.bias", s["experts"], -0.6, 0.6)
        matrix(b + "ffn_routed_down.weight", s["latent"], hidden)
        vector(b + "ffn_routed_norm.weight", s["latent"], 0.5, 1.5)
        matrix(b + "ffn_routed_up.weight", hidden, s["latent"], gain=0.35, banded=True)
        matrix(b + "ffn_gate_exps.weight", s["experts"], s["moe_inner"], s["latent"])
        matrix(b + "ffn_up_exps.weight", s["experts"], s["moe_inner"], s["latent"], gain=2)
        matrix(b + "ffn_down_exps.weight", s["experts"], s["latent"], s["moe_inner"], gain=0.4)
        inner = s["shared"] * s["moe_inner"]
        matrix(b + "ffn_gate_shexp.weight", inner, hidden)
        matrix(b + "ffn_up_shexp.weight", inner, hidden, gain=2)
        matrix(b + "ffn_down_shexp.weight", hidden, inner, gain=0.15, banded=True)
    vector("output_res_score.weight", hidden, -1.3 / np.sqrt(hidden), 1.3 / np.sqrt(hidden))
    vector("output_norm.weight", hidden, 0.5, 1.5)
    matrix("output.weight", s["vocab"], hidden, gain=3)
    return out


def small_model(seed, types=None, **overrides):
    """(metadata, tensors) of SMALL with overrides."""
    s = {**SMALL, **overrides}
    return metadata(s), small_tensors(s, seed, types)


if __name__ == "__main__":
    write_gguf(pathlib.Path(sys.argv[1]), *small_model(int(sys.argv[2])))
