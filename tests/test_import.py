"""`k3decode import` of checkpoints in the released form: what goes in comes out bit for bit, and what is wrong is refused
with exit status 3, a sentence, and no output. Trials F11, F16, F19, F20 and F32 of known-faults are among them.

The checkpoints are written here with numpy alone: nothing is shared with the program, and no public code is used.
Environment: see tests/harness.py; K3_SLOW_TESTS=1 adds a tensor of 5 GiB (needs 11 GB in the temporary directory).
"""
import json
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import time

import h5py
import numpy as np
import pytest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from harness import K3DECODE, SEED, SLOW, TESTS    # noqa: E402

FIXTURES = TESTS / "fixtures" / "public_k3"
print("seed", SEED)


def run(*words, **more):
    return subprocess.run([K3DECODE, "import", *map(str, words)], capture_output=True, text=True, timeout=300, **more)


@pytest.fixture(scope="module", autouse=True)
def json_is_built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("empty")
    if "libjson-c-dev" in run(folder, "--output", folder / "m.h5").stderr:
        pytest.skip("this build of k3decode has no JSON library (Debian: libjson-c-dev)")


# ---------------------------------------------------------------- a checkpoint as dictionaries

def config_of():
    """Small, with all sizes apart. One-based layers 2 and 4 are MLA, layer 1 is dense."""
    return {"model_type": "kimi_k3", "text_config": {
        "architectures": ["KimiLinearForCausalLM"], "vocab_size": 80, "hidden_size": 64, "num_hidden_layers": 4,
        "num_attention_heads": 6, "num_key_value_heads": 6, "intermediate_size": 112, "rms_norm_eps": 1e-5,
        "model_max_length": 4096, "hidden_act": "situ", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0,
        "attn_res_block_size": 2, "q_lora_rank": 40, "kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
        "v_head_dim": 16, "mla_use_nope": True, "mla_use_output_gate": True,
        "linear_attn_config": {"num_heads": 6, "head_dim": 10, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0,
                               "use_full_rank_gate": True, "full_attn_layers": [2, 4], "kda_layers": [1, 3]},
        "num_experts": 5, "num_experts_per_token": 2, "num_shared_experts": 2, "moe_intermediate_size": 32,
        "routed_expert_hidden_size": 96, "latent_moe_use_norm": True, "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid", "topk_method": "noaux_tc", "num_expert_group": 1, "topk_group": 1,
        "routed_scaling_factor": 2.5, "first_k_dense_replace": 1, "moe_layer_freq": 1, "tie_word_embeddings": False,
        "quantization_config": {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}}}


EXPECTED_CONFIG = dict(
    num_layers=4, hidden_size=64, vocab_size=80, num_heads=6, q_lora_rank=40, kv_lora_rank=24, qk_nope_head_dim=12,
    qk_rope_head_dim=8, v_head_dim=16, kda_head_dim=10, kda_conv_kernel=4, kda_gate_lower_bound=-5.0, num_experts=5,
    num_experts_per_token=2, num_shared_experts=2, latent_size=96, moe_intermediate_size=32, dense_intermediate_size=112,
    first_dense_layers=1, attn_res_block_size=2, rms_norm_eps=1e-5, low_rank_norm_eps=1e-6, situ_beta=4.0,
    situ_linear_beta=25.0, routed_scaling_factor=2.5, renormalize=1, max_context=4096)

WIDTH = {"F32": 4, "BF16": 2, "F16": 2, "U8": 1, "F8_E8M0": 1, "F64": 8, "I32": 4}
TOP = "language_model.model."
MOE = TOP + "layers.2.block_sparse_moe."
KDA = TOP + "layers.2.self_attn."


def raw(rng, dtype, *shape):
    """A tensor as (dtype, shape, bytes): random bits, no NaN, of moderate size."""
    count = int(np.prod(shape))
    if dtype == "F32":
        return dtype, list(shape), rng.standard_normal(count).astype("<f4").tobytes()
    if dtype == "F16":
        return dtype, list(shape), rng.standard_normal(count).astype("<f2").tobytes()
    bits = rng.standard_normal(count).astype("<f4").view("<u4") >> 16
    return dtype, list(shape), bits.astype("<u2").tobytes()


def tensors_of(rng, experts="packed", vectors="BF16", hidden=64):
    """Published name -> (dtype, shape, bytes), and model file's name -> published name(s)."""
    heads, dim, inner, latent = 6, 10, 32, 96
    out, origin = {}, {}

    def put(ours, name, dtype, *shape):
        out[name] = raw(rng, dtype, *shape)
        origin[ours] = name

    put("embed", TOP + "embed_tokens.weight", "BF16", 80, hidden)
    put("final_norm", TOP + "norm.weight", vectors, hidden)
    put("output_res_norm", TOP + "output_attn_res_norm.weight", vectors, hidden)
    put("output_res_proj", TOP + "output_attn_res_proj.weight", "BF16", 1, hidden)
    put("lm_head", "language_model.lm_head.weight", "BF16", 80, hidden)
    for n in range(4):
        at, g = f"{TOP}layers.{n}.", f"layers/{n:03}/"
        put(g + "input_norm", at + "input_layernorm.weight", vectors, hidden)
        put(g + "post_attn_norm", at + "post_attention_layernorm.weight", vectors, hidden)
        for ours, name in (("attn_res", "self_attention_res"), ("mlp_res", "mlp_res")):
            put(g + ours + "_norm", at + name + "_norm.weight", vectors, hidden)
            put(g + ours + "_proj", at + name + "_proj.weight", "BF16", 1, hidden)
        a = at + "self_attn."
        if n in (1, 3):
            put(g + "q_a_proj", a + "q_a_proj.weight", "BF16", 40, hidden)
            put(g + "q_a_norm", a + "q_a_layernorm.weight", vectors, 40)
            put(g + "q_b_proj", a + "q_b_proj.weight", "BF16", heads * 20, 40)
            put(g + "kv_a_proj", a + "kv_a_proj_with_mqa.weight", "BF16", 32, hidden)
            put(g + "kv_a_norm", a + "kv_a_layernorm.weight", vectors, 24)
            put(g + "kv_b_proj", a + "kv_b_proj.weight", "BF16", heads * 28, 24)
            put(g + "g_proj", a + "g_proj.weight", "BF16", heads * 16, hidden)
            put(g + "o_proj", a + "o_proj.weight", "BF16", hidden, heads * 16)
        else:
            for x in "qkv":
                put(g + x + "_proj", a + x + "_proj.weight", "BF16", heads * dim, hidden)
                put(g + x + "_conv", a + x + "_conv1d.weight", "BF16", heads * dim, 1, 4)
            put(g + "g_proj", a + "g_proj.weight", "BF16", heads * dim, hidden)
            put(g + "f_a_proj", a + "f_a_proj.weight", "BF16", dim, hidden)
            put(g + "f_b_proj", a + "f_b_proj.weight", "BF16", heads * dim, dim)
            put(g + "dt_bias", a + "dt_bias", "F32", heads * dim)
            put(g + "b_proj", a + "b_proj.weight", "BF16", heads, hidden)
            put(g + "A_log", a + "A_log", "F32", heads)
            put(g + "o_norm", a + "o_norm.weight", vectors, dim)
            put(g + "o_proj", a + "o_proj.weight", "BF16", hidden, heads * dim)
        if n < 1:
            put(g + "gate_proj", at + "mlp.gate_proj.weight", "BF16", 112, hidden)
            put(g + "up_proj", at + "mlp.up_proj.weight", "BF16", 112, hidden)
            put(g + "down_proj", at + "mlp.down_proj.weight", "BF16", hidden, 112)
            continue
        m = at + "block_sparse_moe."
        put(g + "router", m + "gate.weight", "BF16", 5, hidden)
        put(g + "router_bias", m + "gate.e_score_correction_bias", "F32", 5)
        put(g + "routed_down_proj", m + "routed_expert_down_proj.weight", "BF16", latent, hidden)
        put(g + "routed_norm", m + "routed_expert_norm.weight", vectors, latent)
        put(g + "routed_up_proj", m + "routed_expert_up_proj.weight", "BF16", hidden, latent)
        put(g + "shared_gate_proj", m + "shared_experts.gate_proj.weight", "BF16", 64, hidden)
        put(g + "shared_up_proj", m + "shared_experts.up_proj.weight", "BF16", 64, hidden)
        put(g + "shared_down_proj", m + "shared_experts.down_proj.weight", "BF16", hidden, 64)
        for w, ours, rows, columns in (("w1", "gate", inner, latent), ("w2", "down", latent, inner),
                                       ("w3", "up", inner, latent)):
            origin[g + "experts_" + ours] = [f"{m}experts.{e}.{w}" for e in range(5)]
            for name in origin[g + "experts_" + ours]:
                if experts == "packed":
                    out[name + ".weight_packed"] = "U8", [rows, columns // 2], rng.bytes(rows * columns // 2)
                    scale = rng.integers(110, 135, rows * columns // 32, dtype=np.uint8)
                    out[name + ".weight_scale"] = "U8", [rows, columns // 32], scale.tobytes()
                else:
                    out[name + ".weight"] = raw(rng, experts, rows, columns)
    return out, origin


VISION = {"vision_tower.patch_embed.proj.weight": ("F32", [2, 3], bytes(24)),
          "mm_projector.linear_1.weight": ("F64", [3], bytes(24)), "vision_tower.empty": ("I32", [0, 7], b"")}


def header_of(tensors, metadata={"format": "pt"}, length=None):
    """Header bytes (padded with spaces to `length`) with its own length before it."""
    header, at = {} if metadata is None else {"__metadata__": metadata}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(length or (len(text) + 7) // 8 * 8)
    return len(text).to_bytes(8, "little") + text


def write_shard(path, tensors, **more):
    path.write_bytes(header_of(tensors, **more) + b"".join(data for _, _, data in tensors.values()))


def write(folder, tensors, config=None, shards=3):
    """A checkpoint directory; returns name -> shard. shards=0: a single model.safetensors without index."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or config_of()))
    if shards == 0:
        write_shard(folder / "model.safetensors", tensors)
        return {}
    names, where = list(tensors), {}
    for k in range(shards):
        shard = f"model-{k + 1:05}-of-{shards:05}.safetensors"
        part = names[k * len(names) // shards:(k + 1) * len(names) // shards]
        write_shard(folder / shard, {n: tensors[n] for n in part})
        where.update(dict.fromkeys(part, shard))
    write_index(folder, where)
    return where


def write_index(folder, where):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": where}))


@pytest.fixture
def rng():
    return np.random.default_rng(SEED)


@pytest.fixture
def checkpoint(tmp_path, rng):
    """folder, tensors, origin of a good checkpoint that the tests then spoil."""
    tensors, origin = tensors_of(rng)
    return tmp_path / "checkpoint", tensors, origin


def refused(folder, *phrases, status=3, words=()):
    output = folder.parent / "refused.h5"
    done = run(folder, "--output", output, *words)
    assert done.returncode == status, done
    for phrase in phrases:
        assert phrase in done.stderr, done.stderr
    assert not done.stdout and not list(output.parent.glob("refused.h5*"))


def imported(folder, *words):
    output = folder.parent / "model.h5"
    done = run(folder, "--output", output, "--overwrite", *words)
    assert done.returncode == 0, done
    assert [p.name for p in output.parent.glob("model.h5*")] == ["model.h5"]
    return output


# ---------------------------------------------------------------- what must come out

def as_float32(tensor):
    dtype, shape, data = tensor
    if dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4").reshape(shape)
    return np.frombuffer(data, {"F32": "<f4", "F16": "<f2"}[dtype]).astype("<f4").reshape(shape)


def blocks_of(packed, scale):
    """[rows, columns/2] nibbles and [rows, columns/32] scales -> [rows, columns/32 * 17]."""
    nibbles = np.frombuffer(packed[2], np.uint8).reshape(packed[1][0], -1, 16)
    scales = np.frombuffer(scale[2], np.uint8).reshape(scale[1][0], -1, 1)
    return np.concatenate([scales, nibbles], axis=2).reshape(packed[1][0], -1)


def unpack(blocks):
    codes = np.array([0, .5, 1, 1.5, 2, 3, 4, 6, -0., -.5, -1, -1.5, -2, -3, -4, -6])
    blocks = blocks.reshape(*blocks.shape[:-1], -1, 17)
    value = np.stack([codes[blocks[..., 1:] & 15], codes[blocks[..., 1:] >> 4]], axis=-1).reshape(*blocks.shape[:-1], 32)
    return np.ldexp(value, blocks[..., :1].astype(int) - 127).astype(np.float32).reshape(*blocks.shape[:-2], -1)


def q8_0(x):
    """As ggml rounds: d = max|x| / 127, round(x * (1/d)) with halves away from zero, all in float32."""
    x = x.reshape(*x.shape[:-1], -1, 32)
    d = np.abs(x).max(axis=-1, keepdims=True) / np.float32(127)
    scaled = x * np.where(d > 0, np.float32(1) / np.where(d > 0, d, np.float32(1)), np.float32(0))
    q = (np.sign(scaled) * np.floor(np.abs(scaled).astype(np.float64) + 0.5)).astype(np.int8)
    return np.concatenate([d.astype("<f2").view(np.uint8), q.view(np.uint8)], axis=-1).reshape(*x.shape[:-2], -1)


def is_matrix(ours, shape):
    return len(shape) > 1 and not ours.endswith(("_conv", "res_proj"))


def compare(path, tensors, origin, trunk="bf16", experts="keep"):
    with h5py.File(path, "r") as file:
        found = []
        file.visititems(lambda name, item: found.append(name) if isinstance(item, h5py.Dataset) else None)
        assert sorted(found) == sorted(list(origin) + ["config/layer_types"])
        for ours, names in origin.items():
            data, kind = file[ours][()], file[ours].attrs.get("type", "f32")
            kind = kind.decode() if isinstance(kind, bytes) else kind
            if isinstance(names, list):
                packed = names[0] + ".weight" not in tensors
                if packed:
                    blocks = np.stack([blocks_of(tensors[n + ".weight_packed"], tensors[n + ".weight_scale"]) for n in names])
                    value, kept = unpack(blocks), ("mxfp4", blocks)
                else:
                    value = np.stack([as_float32(tensors[n + ".weight"]) for n in names])
                    kept = keep(tensors[names[0] + ".weight"][0], value)
                want = ("q8_0", q8_0(value)) if experts == "q8_0" else kept
            else:
                dtype = tensors[names][0]
                value = as_float32(tensors[names])
                if ours.endswith("A_log"):
                    value = value.reshape(-1)[:6]
                if not is_matrix(ours, value.shape):
                    shape = (value.shape[0], value.shape[-1]) if ours.endswith("_conv") else -1
                    want = "f32", value.reshape(shape)
                elif trunk == "f32":
                    want = "f32", value
                elif trunk == "q8_0" and value.shape[1] % 32 == 0:
                    want = "q8_0", q8_0(value)
                else:
                    want = keep(dtype, value)
            assert kind == want[0], ours
            assert data.dtype == want[1].dtype and data.shape == want[1].shape, ours
            assert data.tobytes() == want[1].tobytes(), ours
            if kind in ("q8_0", "mxfp4"):
                assert tuple(file[ours].attrs["shape"]) == value.shape, ours


def keep(dtype, value):
    return ("bf16", (value.view("<u4") >> 16).astype("<u2")) if dtype == "BF16" else ("f32", value)


def test_every_bit_and_field(checkpoint):
    folder, tensors, origin = checkpoint
    write(folder, {**tensors, **VISION})
    path = imported(folder)
    compare(path, tensors, origin)
    with h5py.File(path, "r") as file:
        assert {k: v for k, v in file["config"].attrs.items()} == EXPECTED_CONFIG
        assert file["config/layer_types"][()].tolist() == [0, 1, 0, 1]
        assert "import" in str(file.attrs["provenance"])


def test_vision_is_counted(checkpoint):
    folder, tensors, _ = checkpoint
    write(folder, {**tensors, **VISION})
    done = run(folder, "--output", folder.parent / "m.h5")
    assert "3 vision tensors skipped" in done.stdout, done


@pytest.mark.parametrize("trunk", ["bf16", "q8_0", "f32"])
@pytest.mark.parametrize("experts", ["keep", "q8_0"])
@pytest.mark.parametrize("stored", ["packed", "BF16", "F32", "F16"])
def test_types(tmp_path, rng, trunk, experts, stored):
    tensors, origin = tensors_of(rng, stored, vectors={"packed": "BF16", "BF16": "F32"}.get(stored, "F16"))
    config = config_of()
    if stored != "packed":
        del config["text_config"]["quantization_config"]
    write(tmp_path / "c", tensors, config)
    compare(imported(tmp_path / "c", "--trunk", trunk, "--experts", experts), tensors, origin, trunk, experts)


def test_q8_0_within_format(checkpoint):
    folder, tensors, origin = checkpoint
    write(folder, tensors)
    with h5py.File(imported(folder, "--trunk", "q8_0"), "r") as file:
        block = file["embed"][()].reshape(-1, 34)
        d = block[:, :2].copy().view("<f2").astype(float)
        value = as_float32(tensors[origin["embed"]]).reshape(-1, 32)
        error = np.abs(d * block[:, 2:].view(np.int8) - value)
        bound = d * (0.5 + 127 * 2.0**-11)
        print("share of the tolerance used", (error / bound).max())
        assert (error <= bound).all() and error.max() > 0


def test_trunk_q8_0_too_large(checkpoint):
    folder, tensors, _ = checkpoint
    dtype, shape, data = tensors[TOP + "embed_tokens.weight"]
    bits = np.frombuffer(data, "<u2").copy()
    bits[64 * 3 + 40] = 0x4E00                        # 5.4e8; block 3 * 2 + 1
    tensors[TOP + "embed_tokens.weight"] = dtype, shape, bits.tobytes()
    write(folder, tensors)
    refused(folder, "embed_tokens", "block 7 ", "q8_0", words=("--trunk", "q8_0"))


@pytest.mark.parametrize("shards", [0, 1, 7])
def test_shards(checkpoint, shards):
    folder, tensors, origin = checkpoint
    write(folder, tensors, shards=shards)
    compare(imported(folder), tensors, origin)


def test_flat_config_and_no_prefix(checkpoint):
    folder, tensors, origin = checkpoint
    strip = lambda name: name.replace("language_model.", "")
    tensors = {strip(n): t for n, t in tensors.items()}
    origin = {o: [strip(x) for x in n] if isinstance(n, list) else strip(n) for o, n in origin.items()}
    write(folder, tensors, config_of()["text_config"])
    compare(imported(folder), tensors, origin)


def test_documented_variants(checkpoint):
    folder, tensors, origin = checkpoint
    change = lambda n: (n.replace("res_norm.weight", "res.norm_weight").replace("res_proj.weight", "res.proj_weight")
                        .replace("gate.e_score", "e_score"))
    tensors = {change(n): t for n, t in tensors.items()}
    origin = {o: n if isinstance(n, list) else change(n) for o, n in origin.items()}
    for name, (dtype, shape, data) in tensors.items():
        if "conv1d" in name:
            tensors[name] = dtype, [60, 4], data
        if "dt_bias" in name:
            tensors[name] = dtype, [6, 10], data
        if "A_log" in name:
            tensors[name] = dtype, [1, 1, 6, 1], data
    config = config_of()
    config["text_config"]["max_position_embeddings"] = config["text_config"].pop("model_max_length")
    config["text_config"]["low_rank_norm_eps"] = 3e-6
    write(folder, tensors, config)
    for name, (dtype, shape, data) in tensors.items():
        if "dt_bias" in name:
            tensors[name] = dtype, [60], data
    path = imported(folder)
    compare(path, tensors, origin)
    with h5py.File(path, "r") as file:
        assert file["config"].attrs["low_rank_norm_eps"] == 3e-6 and file["config"].attrs["max_context"] == 4096


@pytest.mark.parametrize("variant", ["plain", "mxfp4"])
def test_public_fixture(tmp_path, variant):
    if not (FIXTURES / variant / "config.json").exists():
        pytest.skip("no fixture")
    tensors = {}
    for shard in (FIXTURES / variant).glob("*.safetensors"):
        data = shard.read_bytes()
        length = int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:8 + length]).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                tensors[name] = entry["dtype"], entry["shape"], data[8 + length + begin:8 + length + end]
    path = tmp_path / "m.h5"
    done = run(FIXTURES / variant, "--output", path)
    assert done.returncode == 0, done
    text = json.loads((FIXTURES / variant / "config.json").read_text())["text_config"]
    with h5py.File(path, "r") as file:
        value = as_float32(tensors[TOP + "layers.0.self_attn.A_log"])
        heads = text["num_attention_heads"]
        assert file["layers/000/A_log"][()].tobytes() == value[:heads].tobytes()
        assert len(value) == heads + (4 if variant == "mxfp4" else 0)
        assert file["lm_head"][()].tobytes() == tensors["language_model.lm_head.weight"][2]
        names = [f"{MOE}experts.{e}.w2" for e in range(text["num_experts"])]
        got = file["layers/002/experts_down"][()]
        if variant == "mxfp4":
            want = np.stack([blocks_of(tensors[n + ".weight_packed"], tensors[n + ".weight_scale"]) for n in names])
            assert (got == want).all()
        else:
            assert got.tobytes() == b"".join(tensors[n + ".weight"][2] for n in names)
        mla = text["linear_attn_config"]["full_attn_layers"]
        assert file["config/layer_types"][()].tolist() == [int(n in mla) for n in range(1, text["num_hidden_layers"] + 1)]


# ---------------------------------------------------------------- F11: A_log

def with_a_log(tensors, shape, values, dtype="F32"):
    data = np.asarray(values, "<f4")
    data = data.tobytes() if dtype == "F32" else (data.view("<u4") >> 16).astype("<u2").tobytes()
    return {**tensors, KDA + "A_log": (dtype, shape, data)}


@pytest.mark.parametrize("shape", [[8], [1, 1, 8, 1], [8, 1]])
@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_a_log_zero_tail(checkpoint, shape, dtype):
    folder, tensors, origin = checkpoint
    tensors = with_a_log(tensors, shape, [-1, .5, 2, .25, -3, 1, 0, -0.0], dtype)
    write(folder, tensors)
    compare(imported(folder), tensors, origin)


@pytest.mark.parametrize("value", [1e-30, np.nan, -2])
def test_a_log_tail_not_zero(checkpoint, value):
    folder, tensors, _ = checkpoint
    write(folder, with_a_log(tensors, [8], [1, 1, 1, 1, 1, 1, 0, value]))
    refused(folder, KDA + "A_log", "8 numbers", "6 heads", "element 7")


def test_a_log_too_few(checkpoint):
    folder, tensors, _ = checkpoint
    write(folder, with_a_log(tensors, [4], [1, 1, 1, 1]))
    refused(folder, KDA + "A_log", "4 numbers", "6 heads")


def test_a_log_two_axes(checkpoint):
    folder, tensors, _ = checkpoint
    write(folder, with_a_log(tensors, [2, 4], [1] * 8))
    refused(folder, KDA + "A_log", "[2, 4]")


# ---------------------------------------------------------------- F16: nibble order and scale bytes

def test_mxfp4_all_codes_neighbours_share_a_byte(checkpoint):
    folder, tensors, _ = checkpoint
    name = MOE + "experts.1.w2"                       # [96, 32]: one block a row
    nibbles = bytes(i % 8 * 2 | (i % 8 * 2 + 1) << 4 for i in range(16))
    tensors[name + ".weight_packed"] = "U8", [96, 16], nibbles * 96
    scales = bytes([0, 127, 254]) * 32
    tensors[name + ".weight_scale"] = "F8_E8M0", [96, 1], scales
    write(folder, tensors)
    with h5py.File(imported(folder), "r") as file:
        rows = file["layers/002/experts_down"][1]
        for row in range(96):
            assert rows[row].tobytes() == scales[row:row + 1] + nibbles
        assert unpack(rows[1:2])[0].tolist() == [0, .5, 1, 1.5, 2, 3, 4, 6, 0, -.5, -1, -1.5, -2, -3, -4, -6] * 2


def test_mxfp4_scale_255(checkpoint):
    folder, tensors, _ = checkpoint
    name = MOE + "experts.3.w1.weight_scale"          # [32, 3]
    data = bytearray(tensors[name][2])
    data[3 * 20 + 1] = 255
    tensors[name] = "U8", [32, 3], bytes(data)
    write(folder, tensors)
    for words in ((), ("--experts", "q8_0")):
        refused(folder, name, "block 61 ", "row 20", "255", words=words)


# ---------------------------------------------------------------- F19: files shorter or longer than they say

@pytest.mark.parametrize("cut", [1, 4096, "half", "all", "header", -1])
@pytest.mark.parametrize("shards", [0, 3])
def test_cut_shard(checkpoint, cut, shards):
    folder, tensors, _ = checkpoint
    write(folder, tensors, shards=shards)
    shard = sorted(folder.glob("*.safetensors"))[-1]
    data = shard.read_bytes()
    length = len(data)
    keep = {"half": length // 2, "all": 0, "header": 100}.get(cut) if isinstance(cut, str) else length - cut
    shard.write_bytes((data + b"\0")[:keep])
    exact = [f" {length}"] if cut in (1, -1) else [] # the last tensor's end, or the sum of all
    refused(folder, shard.name, "too long" if cut == -1 else "too short", f" {keep} ", *exact)


# ---------------------------------------------------------------- F20: index against shards

def test_index_names_what_the_shard_lacks(checkpoint):
    folder, tensors, _ = checkpoint
    where = write(folder, tensors)
    name = MOE + "gate.weight"
    rest = {n: t for n, t in tensors.items() if where[n] == where[name] and n != name}
    write_shard(folder / where[name], rest)
    refused(folder, "index.json", name, where[name], "lacks")


def test_index_wrong_shard(checkpoint):
    folder, tensors, _ = checkpoint
    where = write(folder, tensors)
    right = where["language_model.lm_head.weight"]
    wrong = next(s for s in where.values() if s != right)
    write_index(folder, {**where, "language_model.lm_head.weight": wrong})
    refused(folder, "language_model.lm_head.weight", "wrong shard", wrong, right)


def test_index_lacks_tensor(checkpoint):
    folder, tensors, _ = checkpoint
    where = write(folder, tensors)
    shard = where.pop(KDA + "dt_bias")
    write_index(folder, where)
    refused(folder, KDA + "dt_bias", shard, "not listed")


def test_deleted_shard(checkpoint):
    folder, tensors, _ = checkpoint
    where = write(folder, tensors)
    (folder / "model-00002-of-00003.safetensors").unlink()
    count = sum(s.startswith("model-00002") for s in where.values())
    refused(folder, "model-00002-of-00003.safetensors", "missing", f"{count} tensors")


def test_tensor_in_two_shards(checkpoint):
    folder, tensors, _ = checkpoint
    where = write(folder, tensors)
    name = TOP + "norm.weight"
    other = next(s for s in where.values() if s != where[name])
    write_shard(folder / other, {n: t for n, t in tensors.items() if where[n] == other or n == name})
    refused(folder, name, "two shards", other, where[name])


def test_tensor_twice_in_one_header(checkpoint):
    folder, tensors, _ = checkpoint
    write(folder, tensors, shards=0)
    path = folder / "model.safetensors"
    data = path.read_bytes()
    name = (TOP + "norm.weight").encode()
    twin = name.replace(b"norm.weight", b"nOrm.weight")
    tensors[twin.decode()] = tensors[name.decode()]
    write_shard(path, tensors)
    data = path.read_bytes().replace(b'"' + twin + b'"', b'"' + name + b'"')
    path.write_bytes(data)
    refused(folder, "model.safetensors", "belong to no tensor")


def test_no_index_no_single_file(checkpoint):
    folder, tensors, _ = checkpoint
    write(folder, tensors)
    (folder / "model.safetensors.index.json").unlink()
    refused(folder, "model.safetensors.index.json", "model.safetensors")


@pytest.mark.parametrize("shard", ["../x.safetensors", "/etc/passwd", "", ".", 7, None, {"a": 1}, "a/b"])
def test_index_bad_shard_name(checkpoint, shard):
    folder, tensors, _ = checkpoint
    where = write(folder, tensors)
    write_index(folder, {**where, KDA + "dt_bias": shard})
    refused(folder, KDA + "dt_bias", "beside the index")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": []}', '{"weight_map": null} x',
                                  "[" * 100, "\0", '{"weight_map": {"a\\u0000b": "x"}'])
def test_index_no_json(checkpoint, text):
    folder, tensors, _ = checkpoint
    write(folder, tensors)
    (folder / "model.safetensors.index.json").write_text(text)
    refused(folder, "model.safetensors.index.json")


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}])
@pytest.mark.parametrize("length", [None, 99_999, 100_000, 100_001, 300_000])
def test_header_lengths_and_metadata(checkpoint, metadata, length):
    folder, tensors, origin = checkpoint
    write(folder, tensors, shards=0)
    write_shard(folder / "model.safetensors", tensors, metadata=metadata, length=length)
    compare(imported(folder), tensors, origin)


# ---------------------------------------------------------------- bad headers

def spoil(name, **changes):
    def change(header):
        header[name].update(changes)
    return change


NORM = TOP + "norm.weight"                            # BF16 [64]: 128 bytes


@pytest.mark.parametrize("change, phrase", [
    (spoil(NORM, dtype="BF17"), "BF17"),
    (spoil(NORM, dtype=3), "dtype"),
    (spoil(NORM, dtype="F32"), "wants 256 bytes"),
    (spoil(NORM, shape=[65]), "wants 130 bytes"),
    (spoil(NORM, shape=[-64]), "axis 0"),
    (spoil(NORM, shape=[64.5]), "axis 0"),
    (spoil(NORM, shape=["64"]), "axis 0"),
    (spoil(NORM, shape=64), "no shape"),
    (spoil(NORM, shape=[1] * 9), "9 axes"),
    (spoil(NORM, shape=[2**40, 2**40]), "no whole number"),
    (spoil(NORM, shape=[2**63 - 1, 0]), "wants 0 bytes"),
    (spoil(NORM, shape=[2**70]), "no whole number"),
    (spoil(NORM, dtype="F4", shape=[3]), "no whole number"),
    (spoil(NORM, data_offsets=[128, 0]), "before the begin"),
    (spoil(NORM, data_offsets=[-128, 0]), "data_offsets"),
    (spoil(NORM, data_offsets=[0]), "data_offsets"),
    (spoil(NORM, data_offsets=[0, 1, 2]), "data_offsets"),
    (spoil(NORM, data_offsets="0"), "data_offsets"),
    (spoil(NORM, data_offsets=[0.0, 128.0]), "data_offsets"),
    (spoil(NORM, data_offsets=[2**62, 2**62 + 128]), "too short"),
    (spoil(NORM, data_offsets=[2**63 - 129, 2**63 - 1]), "too short"),
    (spoil(NORM, data_offsets=[2**64, 2**64 + 128]), "data_offsets"),
    (spoil(NORM, data_offsets=[0, 128]), "overlap"),
    (lambda h: h.pop(NORM), "belong to no tensor"),
    (lambda h: h[NORM].pop("shape"), "no shape"),
    (lambda h: h[NORM].pop("dtype"), "no dtype"),
    (lambda h: h[NORM].pop("data_offsets"), "data_offsets"),
    (lambda h: h.update({NORM: 5}), "no object"),
    (lambda h: h.update({NORM: None}), "no object"),
    (lambda h: h.update({"a\x1b[31m": h.pop(NORM)}), "unprintable"),
    (lambda h: h.update({"": h.pop(NORM)}), "unprintable"),
    (lambda h: h.update({"n" * 5000: h.pop(NORM)}), "unprintable"),
])
def test_bad_header(checkpoint, change, phrase):
    folder, tensors, _ = checkpoint
    write(folder, tensors, shards=0)
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8:8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length:])
    refused(folder, "model.safetensors", phrase)


@pytest.mark.parametrize("data, phrase", [
    (b"", "too short"), (b"\0" * 7, "too short"), (b"\0" * 8, "empty"), (b"\xff" * 64, "header"),
    ((100_000_001).to_bytes(8, "little") + b"{}", "at most 100000000"), ((50).to_bytes(8, "little") + b"{}", "too short"),
    ((2).to_bytes(8, "little") + b"[]", "an object"), ((2).to_bytes(8, "little") + b"{]", "no valid JSON"),
    ((3).to_bytes(8, "little") + b"{}x", "more text"), ((3).to_bytes(8, "little") + b"{} ", "missing"),
    ((200).to_bytes(8, "little") + b"[" * 200, "nesting"), ((7).to_bytes(8, "little") + b'{"\xff":1}', "no valid JSON"),
    ((1_000_009).to_bytes(8, "little") + b'{"a": [' + b"0," * 500_000 + b"0]", "more than any checkpoint needs"),
], ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else f"{len(value)}-bytes")
def test_no_safetensors(checkpoint, data, phrase):
    folder, tensors, _ = checkpoint
    write(folder, tensors, shards=0)
    (folder / "model.safetensors").write_bytes(data)
    refused(folder, phrase)


def test_random_damage_never_crashes(checkpoint, rng):
    """200 headers with a few bytes changed: refused, or imported where only a name's case or a value changed."""
    folder, tensors, _ = checkpoint
    write(folder, tensors, shards=0)
    path = folder / "model.safetensors"
    good = path.read_bytes()
    length = int.from_bytes(good[:8], "little")
    for _ in range(200):
        data = bytearray(good)
        for at in rng.integers(0, 8 + length, rng.integers(1, 4)):
            data[at] = rng.integers(0, 256)
        path.write_bytes(data)
        done = run(folder, "--output", folder.parent / "fuzz.h5", "--overwrite")
        assert done.returncode in (0, 3), done
        assert done.returncode == 0 or done.stderr.strip(), done


# ---------------------------------------------------------------- tensors that do not fit the model

@pytest.mark.parametrize("name", [
    TOP + "embed_tokens.weight", "language_model.lm_head.weight", TOP + "output_attn_res_proj.weight", KDA + "q_conv1d.weight",
    KDA + "A_log", TOP + "layers.1.self_attn.kv_b_proj.weight", TOP + "layers.0.mlp.down_proj.weight",
    MOE + "gate.e_score_correction_bias", MOE + "experts.4.w3.weight_packed", MOE + "experts.0.w2.weight_scale"])
def test_missing_tensor(checkpoint, name):
    folder, tensors, _ = checkpoint
    del tensors[name]
    write(folder, tensors)
    refused(folder, name, "missing")


@pytest.mark.parametrize("name", [
    "language_model.model.layers.4.input_layernorm.weight", MOE + "experts.5.w1.weight_packed", KDA + "q_proj.bias",
    TOP + "layers.1.self_attn.A_log", "extra", "vision_towers", MOE + "experts.0.w1.weight"])
def test_surplus_tensor(checkpoint, name):
    folder, tensors, _ = checkpoint
    tensors[name] = ("U8", [1], b"\0") if not name.endswith("0.w1.weight") else ("BF16", [32, 96], bytes(32 * 96 * 2))
    write(folder, tensors)
    refused(folder, name)                             # the last one stands beside a packed form: two types in one tensor


def test_surplus_says_surplus(checkpoint):
    folder, tensors, _ = checkpoint
    write(folder, {**tensors, "extra.a": ("U8", [1], b"\0"), "extra.b": ("U8", [1], b"\0")})
    refused(folder, "extra.a", "surplus", "2 such")


@pytest.mark.parametrize("name, shape", [
    (TOP + "embed_tokens.weight", [64, 80]), (TOP + "norm.weight", [2, 32]), (KDA + "q_conv1d.weight", [60, 4, 1]),
    (KDA + "q_conv1d.weight", [4, 60]), (KDA + "q_conv1d.weight", [240]), (KDA + "dt_bias", [10, 6]),
    (MOE + "gate.e_score_correction_bias", [5, 1, 1]), (MOE + "experts.2.w1.weight_packed", [96, 16]),
    (MOE + "experts.2.w1.weight_scale", [3, 32]), (TOP + "layers.1.self_attn.o_proj.weight", [96, 64])])
def test_wrong_shape(checkpoint, name, shape):
    folder, tensors, _ = checkpoint
    tensors[name] = tensors[name][0], shape, tensors[name][2]
    write(folder, tensors)
    if shape == [5, 1, 1]:                            # accepted: axes of one carry nothing
        imported(folder)
        return
    refused(folder, name, str(shape), "wanted")


@pytest.mark.parametrize("name, dtype", [
    (NORM, "F64"), (KDA + "k_proj.weight", "I32"), (MOE + "experts.1.w1.weight_packed", "F8_E8M0"),
    (KDA + "A_log", "I32"), (MOE + "experts.1.w1.weight_scale", "BF16")])
def test_wrong_dtype(checkpoint, name, dtype):
    folder, tensors, _ = checkpoint
    shape = tensors[name][1]
    tensors[name] = dtype, shape, bytes(int(np.prod(shape)) * WIDTH[dtype])
    write(folder, tensors)
    refused(folder, name, dtype, "wanted")


def test_experts_of_two_types(checkpoint, rng):
    folder, tensors, _ = checkpoint
    name = MOE + "experts.3.w1"
    del tensors[name + ".weight_packed"], tensors[name + ".weight_scale"]
    tensors[name + ".weight"] = raw(rng, "BF16", 32, 96)
    write(folder, tensors)
    refused(folder, name, "stored differently")


@pytest.mark.parametrize("name, dtype, at, bits", [
    (TOP + "embed_tokens.weight", "BF16", 80 * 64 - 1, 0x7F80), (KDA + "q_proj.weight", "BF16", 0, 0xFFC1),
    (NORM, "F32", 63, 0x7FC00000), (KDA + "A_log", "F32", 5, 0xFF800000), (MOE + "gate.weight", "F16", 17, 0x7C01),
    (KDA + "v_conv1d.weight", "F16", 100, 0xFC00), (KDA + "dt_bias", "BF16", 59, 0x7F81)])
@pytest.mark.parametrize("trunk", ["bf16", "q8_0"])
def test_not_finite(checkpoint, rng, name, dtype, at, bits, trunk):
    folder, tensors, _ = checkpoint
    _, shape, data = raw(rng, dtype, *tensors[name][1])
    data = np.frombuffer(data, "<u4" if dtype == "F32" else "<u2").copy()
    data[at] = bits
    tensors[name] = dtype, shape, data.tobytes()
    write(folder, tensors)
    refused(folder, name, f"element {at} ", "NaN or infinite", words=("--trunk", trunk))


def test_largest_finite_is_fine(checkpoint):
    folder, tensors, origin = checkpoint
    tensors[NORM] = "BF16", [64], np.array([0x7F7F, 0xFF7F, 1, 0x8000] * 16, "<u2").tobytes()
    tensors[KDA + "o_norm.weight"] = "F16", [10], np.array([0x7BFF, 0xFBFF, 1, 0x8001, 0x3FF] * 2, "<u2").tobytes()
    write(folder, tensors)
    compare(imported(folder), tensors, origin)


# ---------------------------------------------------------------- config.json

REQUIRED = [k for k in config_of()["text_config"] if k not in (
    "architectures", "num_key_value_heads", "tie_word_embeddings", "quantization_config")]


@pytest.mark.parametrize("key", REQUIRED + ["linear_attn_config." + k for k in config_of()["text_config"]["linear_attn_config"]])
@pytest.mark.parametrize("null", [False, True])
def test_config_key_missing(checkpoint, key, null):
    folder, tensors, _ = checkpoint
    config = config_of()
    place, name = config["text_config"], key
    if "." in key:
        place, name = place["linear_attn_config"], key.split(".")[1]
    place.pop(name)
    if null:
        place[name] = None
    write(folder, tensors, config)
    refused(folder, "config.json", key, "missing")


@pytest.mark.parametrize("key, value, wanted", [
    ("moe_router_activation_func", "softmax", '"sigmoid"'), ("topk_method", "greedy", '"noaux_tc"'), ("num_expert_group", 8, "1"),
    ("topk_group", 4, "1"), ("moe_layer_freq", 2, "1"), ("hidden_act", "silu", '"situ"'), ("mla_use_nope", False, "true"),
    ("mla_use_output_gate", False, "true"), ("latent_moe_use_norm", False, "true"), ("tie_word_embeddings", True, "false"),
    ("linear_attn_config.use_full_rank_gate", False, "true"), ("attention_bias", True, "false"),
    ("linear_attn_config.num_heads", 5, "6"), ("num_key_value_heads", 2, "6"), ("hidden_size", "64", "whole number"),
    ("hidden_size", 64.0, "whole number"), ("hidden_size", True, "whole number"), ("hidden_size", 2**62, "out of range"),
    ("rms_norm_eps", "x", "number"), ("moe_renormalize", 1, "true or false"), ("num_hidden_layers", 0, "num_hidden_layers"),
    ("num_hidden_layers", 1001, "1 to 1000"), ("num_experts_per_token", 6, "num_experts"), ("rms_norm_eps", 0, "above zero"),
    ("vocab_size", -1, "vocab_size"), ("linear_attn_config.gate_lower_bound", 5.0, "below zero"),
    ("quantization_config", {"quant_method": "fp8"}, "compressed-tensors"),
    ("quantization_config", {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "mxfp4-pack-quantized"),
    ("linear_attn_config.full_attn_layers", [1, 2, 4], "twice"), ("linear_attn_config.full_attn_layers", [2], "neither"),
    ("linear_attn_config.full_attn_layers", [2, 4, 4], "twice"), ("linear_attn_config.full_attn_layers", [1, 3], "twice"),
    ("linear_attn_config.kda_layers", [0, 2], "one-based"), ("linear_attn_config.kda_layers", [1, 3, 5], "one-based"),
    ("linear_attn_config.kda_layers", ["1", 3], "one-based"), ("linear_attn_config.kda_layers", 3, "list"),
    ("linear_attn_config", 3, "linear_attn_config"),
])
def test_config_value_refused(checkpoint, key, value, wanted):
    folder, tensors, _ = checkpoint
    config = config_of()
    place, name = config["text_config"], key
    if "." in key:
        place, name = place["linear_attn_config"], key.split(".")[1]
    place[name] = value
    write(folder, tensors, config)
    ours = wanted in ("twice", "neither", "num_experts", "above zero", "below zero")  # messages in other words
    refused(folder, "config.json", wanted, "" if ours else name)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{} {}", '{"text_config": 3}', "\ufeff{}"])
def test_config_no_json(checkpoint, text):
    folder, tensors, _ = checkpoint
    write(folder, tensors)
    (folder / "config.json").write_text(text)
    refused(folder, "config.json")


def test_config_absent(checkpoint):
    folder, tensors, _ = checkpoint
    write(folder, tensors)
    (folder / "config.json").unlink()
    refused(folder, "config.json", "No such file")


# ---------------------------------------------------------------- the command and its output

def test_usage(checkpoint):
    folder, tensors, _ = checkpoint
    write(folder, tensors)
    good = [folder, "-o", "x.h5"]
    for words in ([], [folder], [folder, *good], [folder, "-o"], [folder, "-o", ""], ["", "-o", "x.h5"],
                  [*good, "--trunk", "q4"], [*good, "--experts", "bf17"], [*good, "--nonsense"]):
        done = run(*words, cwd=folder.parent)
        assert done.returncode == 2 and done.stderr.strip() and not done.stdout, (words, done)
    done = run("--help")
    assert done.returncode == 0 and "--trunk" in done.stdout and not done.stderr
    assert not list(folder.parent.glob("*.h5*"))


def test_existing_output(checkpoint):
    folder, tensors, origin = checkpoint
    write(folder, tensors)
    output = folder.parent / "model.h5"
    output.write_bytes(b"precious")
    done = run(folder, "--output", output)
    assert done.returncode == 3 and "model.h5" in done.stderr and output.read_bytes() == b"precious"
    assert [p.name for p in folder.parent.glob("model.h5*")] == ["model.h5"]
    done = run(folder, "--output", output, "--overwrite")     # of model files alone
    assert done.returncode == 3 and "is not a model file" in done.stderr and output.read_bytes() == b"precious"
    output.unlink()
    imported(folder)
    imported(folder)                                  # with --overwrite
    before = output.read_bytes()
    write(folder, with_a_log(tensors, [4], [1] * 4))
    assert run(folder, "--output", output, "--overwrite").returncode == 3
    assert output.read_bytes() == before              # a failed import leaves the old file


def test_unwritable_output(checkpoint):
    folder, tensors, _ = checkpoint
    write(folder, tensors)
    done = run(folder, "--output", folder.parent / "no" / "such" / "m.h5")
    assert done.returncode == 3 and "m.h5" in done.stderr


def sparse(folder, rows, rng, hidden=64):
    """A checkpoint whose embedding and head, first in its one file, have `rows` rows of zeros that take no disk.
    Returns where in the file they begin."""
    tensors, _ = tensors_of(rng, hidden=hidden)
    head = TOP + "embed_tokens.weight"
    config = config_of()
    config["text_config"].update(vocab_size=rows, hidden_size=hidden)
    tensors.pop(head)
    tensors["language_model.lm_head.weight"] = "BF16", [rows, hidden], b""
    write(folder, tensors, config, shards=0)
    size = rows * hidden * 2
    header, at = {}, 0
    names = [head, "language_model.lm_head.weight", *[n for n in tensors if "lm_head" not in n]]
    for name in names:
        dtype, shape, data = tensors.get(name, ("BF16", [rows, hidden], b""))
        bytes_ = size if name in names[:2] else len(data)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + bytes_]}
        at += bytes_
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        start = file.tell()
        file.seek(start + 2 * size)
        for name in names[2:]:
            file.write(tensors[name][2])
        file.truncate(start + at)
    return start


def wait_for(path, size, process):
    for _ in range(2000):
        if path.exists() and path.stat().st_size > size:
            return
        assert process.poll() is None, "ended before it could be stopped"
        time.sleep(0.005)
    raise AssertionError("no output grew")


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_interruption(tmp_path, rng, how):
    folder, output = tmp_path / "c", tmp_path / "m.h5"
    sparse(folder, 4_000_000, rng)                    # 2 x 512 MB
    process = subprocess.Popen([K3DECODE, "import", folder, "--output", output], stderr=subprocess.PIPE, text=True)
    wait_for(tmp_path / "m.h5.partial", 0, process)
    process.send_signal(how)
    message = process.communicate(timeout=60)[1]
    assert not output.exists()
    if how == signal.SIGKILL:
        assert process.returncode == -9
    else:
        assert process.returncode == 3 and f"signal {int(how)}" in message and "m.h5.partial" in message, message
        assert (tmp_path / "m.h5.partial").exists()
    tensors, origin = tensors_of(rng)                 # another checkpoint under the same name starts from the beginning
    (folder / "model.safetensors").unlink()
    write(folder, tensors, shards=0)
    done = run(folder, "--output", output)
    assert done.returncode == 0 and "whole already" not in done.stdout, done
    assert not list(tmp_path.glob("m.h5.*"))
    compare(output, tensors, origin)


@pytest.mark.parametrize("how", ["go on", "spoilt", "torn", "no journal", "another checkpoint"])
def test_restart(tmp_path, rng, how):
    """What an interrupted import finished is kept when its bytes are still those, and the result is the same."""
    folder, output, journal = tmp_path / "c", tmp_path / "m.h5", tmp_path / "m.h5.partial.journal"
    sparse(folder, 1_000_000, rng)
    digest = lambda done: done.stdout.split("content digest ")[1].split()[0]
    whole = digest(run(folder, "--output", tmp_path / "whole.h5"))
    process = subprocess.Popen([K3DECODE, "import", folder, "--output", output], stderr=subprocess.PIPE, text=True)
    wait_for(journal, 100, process)                   # its first line is shorter: some tensors are whole
    process.send_signal(signal.SIGKILL if how == "torn" else signal.SIGTERM)
    process.communicate(timeout=60)
    finished = [line.split() for line in journal.read_text().splitlines(keepends=True)[1:] if line.endswith("\n")]
    assert finished and not output.exists()
    spoilt = 0
    if how == "spoilt":
        name = next(path for _, path in finished if path.endswith("_norm"))
        with h5py.File(tmp_path / "m.h5.partial", "r+") as file:
            file[name][0] += 1
        spoilt = 1
    if how == "torn":
        journal.write_text(journal.read_text() + "0000")
    if how == "no journal":
        journal.unlink()
    if how == "another checkpoint":                   # of the same name and sizes: known by the time of its last change
        os.utime(folder / "model.safetensors")
    done = run(folder, "--output", output)
    assert done.returncode == 0, done
    kept = 0 if how in ("no journal", "another checkpoint") else len(finished) - spoilt
    assert not kept or f" {kept} tensors were whole already" in done.stdout, done.stdout
    assert ("whole already" in done.stdout) == (kept > 0), done.stdout
    assert (f"{output}.partial of another run was replaced" in done.stdout) == (kept == 0), done.stdout
    assert digest(done) == whole
    assert not list(tmp_path.glob("m.h5.*"))
    checked = subprocess.run([K3DECODE, "info", output, "--check"], capture_output=True, text=True, timeout=300)
    assert checked.returncode == 0 and f"content digest {whole}, as written" in checked.stdout, checked


def test_leftovers(tmp_path, rng):
    """A stopped import's two files are gone when another import cannot begin for want of room; a foreign journal stays."""
    folder, output, journal = tmp_path / "c", tmp_path / "m.h5", tmp_path / "m.h5.partial.journal"
    sparse(folder, 1_000_000, rng)
    process = subprocess.Popen([K3DECODE, "import", folder, "--output", output], stderr=subprocess.PIPE, text=True)
    wait_for(journal, 100, process)
    process.terminate()
    process.communicate(timeout=60)
    assert journal.exists()
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    small = run(folder, "--output", output, "--trunk", "q8_0", preexec_fn=limit)
    assert small.returncode == 3 and "ulimit -f" in small.stderr, small
    assert not list(tmp_path.glob("m.h5*"))
    journal.write_text("mine")
    done = run(folder, "--output", output)
    assert done.returncode == 3 and f"{journal} is in the way" in done.stderr, done
    assert journal.read_text() == "mine" and list(tmp_path.glob("m.h5*")) == [journal]


def test_check_finds_a_changed_byte(checkpoint):
    folder, tensors, _ = checkpoint
    write(folder, tensors)
    path = imported(folder)
    with h5py.File(path, "r+") as file:
        file["layers/001/kv_b_proj"][3, 5] ^= 1
    checked = subprocess.run([K3DECODE, "info", path, "--check"], capture_output=True, text=True, timeout=300)
    assert checked.returncode == 3 and "/layers/001/kv_b_proj" in checked.stderr and "1 of " in checked.stderr, checked
    with h5py.File(path, "r+") as file:
        file["layers/001/kv_b_proj"][3, 5] ^= 1
        file["config"].attrs["routed_scaling_factor"] = 3.5
    checked = subprocess.run([K3DECODE, "info", path, "--check"], capture_output=True, text=True, timeout=300)
    assert checked.returncode == 3 and "content digest" in checked.stderr, checked


def test_memory_stays_bounded(tmp_path, rng):
    """Two tensors of 512 MB pass through two pieces of 16 MiB a thread."""
    folder = tmp_path / "c"
    sparse(folder, 4_000_000, rng)
    child = subprocess.Popen([K3DECODE, "import", folder, "--output", tmp_path / "m.h5", "--trunk", "q8_0"],
                             stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    error = child.stderr.read().decode()
    child.stderr.close()
    assert child.returncode == 0, error
    (tmp_path / "m.h5").unlink()
    print("largest resident size", usage.ru_maxrss // 1024, "MiB")
    if b"__asan_init" not in pathlib.Path(shutil.which(K3DECODE)).read_bytes():
        assert usage.ru_maxrss < 300 * 1024


# ---------------------------------------------------------------- F32: beyond 2^31

def test_offsets_beyond_2_31(checkpoint):
    """A sparse 5 GiB vision tensor stands before the text tensors: their offsets pass 2^32, no disk is used."""
    folder, tensors, origin = checkpoint
    write(folder, tensors, shards=0)
    size, at = 5 * 2**30 + 3, 0
    header = {}
    for name, entry in {"vision_tower.huge": ("U8", [size], None), **tensors}.items():
        count = size if entry[2] is None else len(entry[2])
        header[name] = {"dtype": entry[0], "shape": entry[1], "data_offsets": [at, at + count]}
        at += count
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.seek(size, os.SEEK_CUR)
        for _, _, data in tensors.values():
            file.write(data)
    compare(imported(folder), tensors, origin)


@pytest.mark.skipif(not SLOW, reason="writes 11 GB: K3_SLOW_TESTS=1 runs it")
def test_one_tensor_beyond_2_31_elements(tmp_path, rng):
    """Embedding and head of 5 GiB each, with marks on both sides of 2^31 bytes and of 2^31 elements."""
    hidden, rows, folder = 4096, 655_360, tmp_path / "c"
    start = sparse(folder, rows, rng, hidden)
    marks = {0: 0x3F80, 2**30 - 1: 0x4000, 2**30: 0x4040, 2**31 - 1: 0x4080, 2**31: 0x40A0, 2**31 + 1: 0x40C0,
             rows * hidden - 1: 0x40E0}
    with open(folder / "model.safetensors", "r+b") as file:
        for at, bits in marks.items():
            file.seek(start + 2 * at)
            file.write(int(bits).to_bytes(2, "little"))
    path = imported(folder)
    with h5py.File(path, "r") as file:
        for at, bits in marks.items():
            assert file["embed"][at // hidden, at % hidden] == bits, at
        found = sum(int(np.count_nonzero(file["embed"][at:at + 8192])) for at in range(0, rows, 8192))
        assert found == len(marks)
        assert not file["lm_head"][::8192].any()
    path.unlink()
