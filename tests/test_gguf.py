"""`k3decode import` of GGUF: what goes in comes out bit for bit, decodes to a public engine's logits, and what is wrong is
refused with exit status 3, a sentence, and no output. Trials F11, F16, F17, F19, F20 and F32 of known-faults are among them.

    /usr/bin/python3 -m pytest tests/test_gguf.py      (environment: see tests/harness.py)

The files are written by tests/gguf_model.py, with numpy alone; tests/fixtures/public_gguf/README.md tells of the engine.
"""
import hashlib
import os
import pathlib
import shutil
import struct
import subprocess
import sys

import h5py
import numpy as np
import pytest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import gguf_model       # noqa: E402
import harness          # noqa: E402
import reference        # noqa: E402
from gguf_model import pack_gguf, small_model, write_gguf, write_split    # noqa: E402
from harness import K3DECODE, SEED, decode, k3, needs_mpirun, relative    # noqa: E402

FIXTURE = harness.TESTS / "fixtures" / "public_gguf"
TOLERANCE = 5e-6        # relative L2 against the engine, whose own float32 error is 0.9e-6 (fixtures/public_gguf/README.md)
# A model in miniature, for what is not about values: 4 layers, rows of one or two short blocks.
TINY = dict(layers=4, mla=(2, 4), block=2, hidden=64, vocab=48, heads=4, q_lora=32, kv_lora=64, nope=32, rope=8, v_dim=16, kda_dim=16,
            experts=4, top=2, latent=64, moe_inner=32, dense_inner=96)
harness.show_seed()


def imported(path, folder, *words):
    """Path of the model file."""
    output = folder / "model.h5"
    k3("import", path, "--output", output, "--overwrite", *words)
    return output


def refused(path, *phrases, status=3, words=()):
    """An import that must end so, with one message that holds the phrases, and leave nothing."""
    output = path.parent / "refused.h5"
    done = subprocess.run([K3DECODE, "import", path, "--output", output, *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == status and len(done.stderr.strip().splitlines()) == 1, done
    for phrase in phrases:
        assert str(phrase) in done.stderr, f"no {phrase!r} in {done.stderr}"
    assert not list(path.parent.glob("refused.h5*")) and "Sanitizer" not in done.stderr, done


@pytest.fixture()
def tiny(tmp_path):
    """(path, metadata, tensors) of a fresh small model; the file is not written yet."""
    return tmp_path / "m.gguf", *small_model(SEED, **TINY)


def without(kv, key):
    return [pair for pair in kv if pair[0] != key]


def replaced(kv, key, kind, value):
    assert any(pair[0] == key for pair in kv), key
    return [(key, kind, value) if pair[0] == key else pair for pair in kv]


# ---------------------------------------------------------------- against the public engine

def public():
    with h5py.File(FIXTURE / "logits.h5") as file:
        return {**{name: file[name][...] for name in ("token_ids", "decode/token_ids", "decode/logits", "own_logits")},
                **{name: file.attrs[name] for name in ("seed", "sha256")}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("gguf")


@pytest.fixture(scope="module")
def small(folder):
    """The file that the engine was given, in three shards, as a model file; its metadata and tensors."""
    want = public()
    kv, tensors = small_model(int(want["seed"]))
    assert hashlib.sha256(pack_gguf(kv, tensors)).hexdigest() == want["sha256"], "not the file that the engine was given"
    return imported(write_split(folder, "small", kv, tensors, 3)[0], folder), kv, tensors


@needs_mpirun
@pytest.mark.parametrize("ranks", [1, 8])
def test_public_engine(small, folder, ranks):
    """64 greedy steps: the engine's tokens, its logits, on one rank and on eight."""
    want = public()
    tokens, logits = decode(small[0], folder / "run.h5", prompt=want["token_ids"], steps=64, ranks=ranks, timeout=240)
    rows = np.linalg.norm(logits - want["decode/logits"], axis=1) / np.linalg.norm(want["decode/logits"], axis=1)
    error, engine = relative(logits, want["decode/logits"]), relative(want["own_logits"], want["decode/logits"])
    print(f"{ranks} ranks: relative L2 {error:.3g} ({error / TOLERANCE:.0%}), worst row {rows.max():.3g}; the engine with 8-bit "
          f"activations is off by {engine:.3g}")
    assert np.array_equal(tokens, want["decode/token_ids"])
    assert error < TOLERANCE and rows.max() < 4 * TOLERANCE
    assert relative(logits, want["own_logits"]) < 1.01 * engine


def test_reference_reads_all_types(small):
    """float64 on the imported file (tests/reference.py), against the engine."""
    if not reference.gguf:
        pytest.skip("the Python package gguf is not installed (pip install gguf)")
    want = public()
    exact = reference.load(small[0]).logits([*want["token_ids"], *want["decode/token_ids"][:15]])[7:]
    error = relative(want["decode/logits"][:16], exact)
    print(f"the engine's float32 error: {error:.3g}")
    assert error < TOLERANCE


def test_wrong_half_bytes_are_found_control(small, folder):
    """One mxfp4 matrix in GGUF's order of half-bytes moves the logits (F16)."""
    want, path = public(), folder / "spoilt.h5"
    name = next(n for n, t in small[2].items() if t[0] == "mxfp4" and n.endswith("attn_output.weight"))
    shutil.copy(small[0], path)
    with h5py.File(path, "r+") as file:
        data = file[f"layers/{int(name.split('.')[1]):03}/o_proj"]
        data[...] = np.frombuffer(small[2][name][2], np.uint8).reshape(data.shape)
    logits = decode(path, folder / "run.h5", prompt=want["token_ids"], steps=1)[1]
    assert relative(logits, want["decode/logits"][:1]) > 100 * TOLERANCE


# ---------------------------------------------------------------- bit for bit

ROLES = {"token_embd": "embed", "output_norm": "final_norm", "output": "lm_head", "output_res_score": "output_res_proj",
         "attn_norm": "input_norm", "ffn_norm": "post_attn_norm", "attn_res_score": "attn_res_proj", "ffn_res_score": "mlp_res_proj",
         "attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj", "ssm_g": "g_proj", "ssm_conv1d_q": "q_conv",
         "ssm_conv1d_k": "k_conv", "ssm_conv1d_v": "v_conv", "ssm_f_a": "f_a_proj", "ssm_f_b": "f_b_proj", "ssm_dt": "dt_bias",
         "ssm_beta": "b_proj", "ssm_norm": "o_norm", "attn_output": "o_proj", "attn_q_a": "q_a_proj", "attn_q_a_norm": "q_a_norm",
         "attn_q_b": "q_b_proj", "attn_kv_a_mqa": "kv_a_proj", "attn_kv_a_norm": "kv_a_norm", "attn_kv_b": "kv_b_proj",
         "attn_gate": "g_proj", "ffn_gate": "gate_proj", "ffn_up": "up_proj", "ffn_down": "down_proj", "ffn_gate_inp": "router",
         "exp_probs_b": "router_bias", "ffn_routed_down": "routed_down_proj", "ffn_routed_norm": "routed_norm",
         "ffn_routed_up": "routed_up_proj", "ffn_gate_exps": "experts_gate", "ffn_up_exps": "experts_up",
         "ffn_down_exps": "experts_down", "ffn_gate_shexp": "shared_gate_proj", "ffn_up_shexp": "shared_up_proj",
         "ffn_down_shexp": "shared_down_proj"}


def place(name):
    """Path in the model file."""
    parts = name.split(".")
    if parts[0] != "blk":
        return ROLES[parts[0]]
    return f"layers/{int(parts[1]):03}/{ROLES[parts[2]]}"


def neighbours(raw):
    """mxfp4 blocks with neighbours sharing a byte, by way of the codes: byte j of GGUF's holds elements j and j + 16."""
    block = np.frombuffer(raw, np.uint8).reshape(-1, 17)
    codes = np.concatenate([block[:, 1:] & 15, block[:, 1:] >> 4], axis=1)
    return np.concatenate([block[:, :1], codes[:, 0::2] | codes[:, 1::2] << 4], axis=1).tobytes()


def compare(path, tensors):
    """Every published tensor but ssm_a, attn_k_b and attn_v_b against its dataset."""
    seen = set()
    with h5py.File(path) as file:
        for name, (kind, shape, raw) in tensors.items():
            if name.endswith("ssm_a") or "attn_k_b" in name or "attn_v_b" in name:
                continue
            data = file[place(name)]
            seen.add(place(name))
            assert reference.text(data.attrs.get("type", "f32")) == kind, name
            assert data[...].tobytes() == (neighbours(raw) if kind == "mxfp4" else raw), name
            logical = data.attrs["shape"] if "shape" in data.attrs else data.shape
            assert [n for n in logical if n != 1] == [n for n in shape if n != 1], name
        for name in [n for n in seen if n.endswith("res_proj")]:
            ones = file[name.replace("_proj", "_norm")][...]
            assert ones.dtype == np.float32 and (ones == 1).all()


def test_every_bit(small):
    compare(small[0], small[2])


def test_config(small):
    with h5py.File(small[0]) as file:
        got = dict(file["config"].attrs)
        assert file["config/layer_types"][()].tolist() == [int(i + 1 in (4, 8, 12, 13)) for i in range(13)]
    s = gguf_model.SMALL
    want = dict(num_layers=13, hidden_size=s["hidden"], vocab_size=s["vocab"], num_heads=8, q_lora_rank=64, kv_lora_rank=256,
                qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32, kda_head_dim=32, kda_conv_kernel=4, kda_gate_lower_bound=-5.0,
                num_experts=8, num_experts_per_token=3, num_shared_experts=1, latent_size=256, moe_intermediate_size=256,
                dense_intermediate_size=512, first_dense_layers=1, attn_res_block_size=4, rms_norm_eps=float(np.float32(1e-6)),
                low_rank_norm_eps=1e-6, situ_beta=4.0, situ_linear_beta=25.0, routed_scaling_factor=1.5, renormalize=1, max_context=4096)
    assert got == want


def test_a_log(small):
    """A_log is the float32 next to log(-ssm_a), and gives ssm_a back to the last places that it can hold."""
    with h5py.File(small[0]) as file:
        for name in [n for n in small[2] if n.endswith("ssm_a")]:
            published = -np.frombuffer(small[2][name][2], "<f4").astype(np.float64)
            got = file[f"layers/{int(name.split('.')[1]):03}/A_log"][...]
            assert (np.abs(got - np.log(published)) <= np.spacing(np.abs(got)) / 2 * 1.001).all()
            back = np.exp(got.astype(np.float64))
            assert (np.abs(back / published - 1) <= np.maximum(np.abs(got), 2.0 ** -20) * 2.0 ** -24 * 1.001).all()


def widened(kind, shape, raw):
    """float32 of a type that needs no table."""
    if kind in ("f32", "f16"):
        return np.frombuffer(raw, {"f32": "<f4", "f16": "<f2"}[kind]).astype(np.float32).reshape(shape)
    if kind == "bf16":
        return reference.dequantise_bf16(np.frombuffer(raw, "<u2")).astype(np.float32).reshape(shape)
    rows = np.frombuffer(neighbours(raw) if kind == "mxfp4" else raw, np.uint8).reshape(-1, len(raw) // int(np.prod(shape[:-1])))
    return reference.QUANTISED[kind][2](rows).astype(np.float32).reshape(shape)


def check_kv_b(path, tensors, heads):
    layers = [int(n.split(".")[1]) for n in tensors if "attn_k_b" in n]
    assert layers
    with h5py.File(path) as file:
        for i in layers:
            k, v = (tensors[f"blk.{i}.attn_{x}_b.weight"] for x in "kv")
            want = np.concatenate([widened(*k).transpose(0, 2, 1), widened(*v)], axis=1)
            data = file[f"layers/{i:03}/kv_b_proj"]
            kind = k[0] if k[0] == v[0] and k[0] in gguf_model.PLAIN else "f32"
            assert reference.text(data.attrs.get("type", "f32")) == kind
            got = {"bf16": lambda: reference.dequantise_bf16(data[...]), "f16": lambda: data[...].view("<f2"), "f32": lambda: data[...]}[kind]()
            assert np.array_equal(got, want.reshape(data.shape)), (i, k[0], v[0])
            assert data.shape[0] == heads * (want.shape[1])


def test_kv_b_is_joined(small):
    if not reference.gguf:
        pytest.skip("the Python package gguf is not installed (pip install gguf)")
    check_kv_b(small[0], small[2], 8)


@pytest.mark.parametrize("kinds", [("f32",), ("f16",), ("bf16",), ("q8_0",), ("mxfp4",), ("q8_0", "mxfp4", "f16")])
def test_kv_b_of_each_type(tmp_path, kinds):
    kv, tensors = small_model(SEED, types=(*kinds, "f32") if "f32" not in kinds else kinds, **TINY)
    check_kv_b(imported(write_gguf(tmp_path / "m.gguf", kv, tensors), tmp_path), tensors, 4)


def test_joined_and_split_are_the_same_model(tmp_path):
    """attn_kv_b goes through bit for bit, and holds what K and V parts are joined to."""
    kv, tensors = small_model(SEED, types=("bf16",), **TINY)
    first = imported(write_gguf(tmp_path / "m.gguf", kv, tensors), tmp_path)
    with h5py.File(first) as file:
        joined = file["layers/001/kv_b_proj"][...]
    at = list(tensors).index("blk.1.attn_k_b.weight")
    rest = [(n, t) for n, t in tensors.items() if n not in ("blk.1.attn_k_b.weight", "blk.1.attn_v_b.weight")]
    rest.insert(at, ("blk.1.attn_kv_b.weight", ("bf16", list(joined.shape), joined.astype("<u2").tobytes())))
    second = imported(write_gguf(tmp_path / "m.gguf", kv, dict(rest)), tmp_path)
    with h5py.File(second) as file:
        assert reference.text(file["layers/001/kv_b_proj"].attrs["type"]) == "bf16" and np.array_equal(file["layers/001/kv_b_proj"][...], joined)


def test_half_bytes_all_codes(tiny, tmp_path):
    """F16: a block of all 16 codes twice, under scales 0, 127 and 254; 255 is refused."""
    path, kv, tensors = tiny
    name = "blk.1.ffn_down_exps.weight"
    kind, shape, _ = tensors[name]
    rng = np.random.default_rng(SEED)
    count = int(np.prod(shape)) // 32
    codes = np.array([rng.permutation(np.repeat(np.arange(16, dtype=np.uint8), 2)) for _ in range(count)])
    scales = np.array([0, 127, 254], np.uint8)[np.arange(count) % 3]
    raw = np.concatenate([scales[:, None], codes[:, :16] | codes[:, 16:] << 4], axis=1)
    tensors[name] = "mxfp4", shape, raw.tobytes()
    with h5py.File(imported(write_gguf(path, kv, tensors), tmp_path)) as file:
        got = file["layers/001/experts_down"][...].reshape(-1, 17)
    assert (got[:, 0] == scales).all()
    assert (got[:, 1:] & 15 == codes[:, 0::2]).all() and (got[:, 1:] >> 4 == codes[:, 1::2]).all()
    raw[37, 0] = 255
    tensors[name] = "mxfp4", shape, raw.tobytes()
    refused(write_gguf(path, kv, tensors), name, "block 37 ", "255")


def test_16_bit_vectors_are_widened(tiny, tmp_path):
    path, kv, tensors = tiny
    for name, kind in (("blk.0.attn_norm.weight", "f16"), ("blk.0.ssm_conv1d_q.weight", "bf16"), ("output_norm.weight", "bf16")):
        values = np.frombuffer(tensors[name][2], "<f4")
        tensors[name] = kind, tensors[name][1], gguf_model.as_type(kind, values)
    with h5py.File(imported(write_gguf(path, kv, tensors), tmp_path)) as file:
        for name, ours in (("blk.0.attn_norm.weight", "layers/000/input_norm"), ("blk.0.ssm_conv1d_q.weight", "layers/000/q_conv"),
                           ("output_norm.weight", "final_norm")):
            assert np.array_equal(file[ours][...].ravel(), widened(*tensors[name]).ravel()) and file[ours].dtype == np.float32


def test_shapes_with_and_without_ones(tiny, tmp_path):
    path, kv, tensors = tiny
    kind, _, raw = tensors["blk.0.ssm_conv1d_q.weight"]
    tensors["blk.0.ssm_conv1d_q.weight"] = kind, [64, 1, 4], raw
    kind, _, raw = tensors["blk.0.ssm_conv1d_k.weight"]
    tensors["blk.0.ssm_conv1d_k.weight"] = kind, [64, 4], raw
    compare(imported(write_gguf(path, kv, tensors), tmp_path), tensors)


# ---------------------------------------------------------------- how a model is named

def test_file_directory_and_shards(tiny, tmp_path):
    _, kv, tensors = tiny
    digests = set()
    one, many = tmp_path / "one", tmp_path / "many"
    one.mkdir(), many.mkdir()
    write_gguf(one / "model.gguf", kv, tensors)
    (one / "mmproj-f16.gguf").write_bytes(b"GGUF")
    first = write_split(many, "K3-UD", kv, tensors, 5)[0]
    for path in (one / "model.gguf", one, first, many):
        done = k3("import", path, "--output", tmp_path / "m.h5", "--overwrite")
        digests.add(done.out.split("content digest ")[1].strip())
    assert len(digests) == 1
    refused(many / "K3-UD-00003-of-00005.gguf", "shard 3 of 5", "K3-UD-00001-of-00005.gguf")
    shutil.copy(first, many / "other-00001-of-00005.gguf")
    refused(many, "2 GGUF models")
    (one / "model.safetensors").write_bytes(b"")
    refused(one, "GGUF model and a safetensors checkpoint")
    k3("import", one / "model.gguf", "--output", tmp_path / "m.h5", "--overwrite")
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "mmproj.gguf").write_bytes(b"GGUF")
    refused(empty, "no whole GGUF file")


def test_version_2(tiny, tmp_path):
    path, kv, tensors = tiny
    compare(imported(write_gguf(path, kv, tensors, version=2), tmp_path), tensors)


@pytest.mark.parametrize("option", [("--trunk", "q8_0"), ("--experts", "q8_0"), ("--trunk", "f32")])
def test_no_conversion(tiny, option):
    path, kv, tensors = tiny
    refused(write_gguf(path, kv, tensors), option[0], "GGUF", status=2, words=option)


@pytest.mark.parametrize("kind", ["empty folder", "another name"])
def test_no_checkpoint(tiny, kind):
    """What is neither kind of checkpoint is told what either looks like."""
    path, kv, tensors = tiny
    given = path.parent / "given"
    if kind == "empty folder":
        given.mkdir()
    else:
        write_gguf(path, kv, tensors).rename(given)
    refused(given, "is no checkpoint", "config.json", ".gguf")


# ---------------------------------------------------------------- F19, F20: shards

@pytest.mark.parametrize("cut", [1, 4096, "half", "header", "all", -1])
@pytest.mark.parametrize("shards", [1, 3])
def test_cut_shard(tiny, cut, shards):
    path, kv, tensors = tiny
    paths = write_split(path.parent, "m", kv, tensors, shards) if shards > 1 else [write_gguf(path, kv, tensors)]
    last = paths[-1]
    data = last.read_bytes()
    keep = {"half": len(data) // 2, "header": 100, "all": 0}.get(cut, None) if isinstance(cut, str) else len(data) - cut
    last.write_bytes((data + b"\0")[:keep])
    exact = [f" {len(data)} are expected"] if cut in (1, 4096, "half", -1) else []
    refused(paths[0], last.name, "too long" if cut == -1 else "too short", f" {keep} bytes", *exact)


def test_missing_shard(tiny):
    path, kv, tensors = tiny
    paths = write_split(path.parent, "m", kv, tensors, 4)
    paths[2].unlink()
    refused(paths[0], paths[2].name, "missing", "4")


def test_shards_of_two_models(tiny, tmp_path):
    """By number of tensors, by a tensor in both, by metadata, by shard number; by shape."""
    path, kv, tensors = tiny
    other_kv, other = small_model(SEED + 1, **{**TINY, "layers": 5, "mla": (2, 4)})
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    ours, foreign = write_split(path.parent, "m", kv, tensors, 3), write_split(theirs, "m", other_kv, other, 3)
    good = ours[1].read_bytes()
    ours[1].write_bytes(foreign[1].read_bytes())
    refused(ours[0], "split.tensors.count", "two models")
    ours[1].write_bytes(ours[2].read_bytes())
    refused(ours[0], ours[1].name, "split.no = 2")
    data = {n: tensors[n] for n in list(tensors)[:5]}
    write_gguf(ours[1], [("split.no", "u16", 1), ("split.count", "u16", 3), ("split.tensors.count", "i32", len(tensors)),
                         ("general.name", "str", "large")], data)
    refused(ours[0], ours[1].name, "general.name", "two models")
    names = list(tensors)
    twice = {**{n: tensors[n] for n in names[len(names) // 3 + 1:2 * len(names) // 3]}, names[0]: tensors[names[0]]}
    write_gguf(ours[1], [("split.no", "u16", 1), ("split.count", "u16", 3), ("split.tensors.count", "i32", len(tensors))], twice)
    refused(ours[0], names[0], "two shards", ours[0].name, ours[1].name)
    wide_kv, wide = small_model(SEED, **{**TINY, "hidden": 96})
    ours[1].write_bytes(write_split(theirs, "m", wide_kv, wide, 3)[1].read_bytes())
    refused(ours[0], ours[1].name, "shape", "96")
    ours[1].write_bytes(good)
    k3("import", ours[0], "--output", tmp_path / "m.h5")


def test_renamed_shard(tiny):
    path, kv, tensors = tiny
    paths = write_split(path.parent, "m", kv, tensors, 3)
    shutil.copy(paths[0], path)
    refused(path, "split.count", "00003")


def test_tensor_missing_from_a_shard(tiny):
    path, kv, tensors = tiny
    del tensors["blk.2.ffn_routed_norm.weight"]
    refused(write_split(path.parent, "m", kv, tensors, 2)[0], "blk.2.ffn_routed_norm.weight", "missing")


# ---------------------------------------------------------------- bad headers

def pair(key, kind, value):
    return gguf_model.text(key) + gguf_model.pack_value(kind, value)


def info(name, kind, shape, offset):
    return (gguf_model.text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *reversed(shape)) +
            struct.pack("<IQ", kind, offset))


def header(pairs=(), infos=(), version=3, kv=None, tensors=None, magic=b"GGUF"):
    return (magic + struct.pack("<IQQ", version, len(infos) if tensors is None else tensors, len(pairs) if kv is None else kv) +
            b"".join(pairs) + b"".join(infos))


NAME = pair("general.name", "str", "m")
HUGE = 2**63 - 1
BAD_HEADERS = {
    "empty": (b"", "too short"),
    "magic": (header(magic=b"GGML"), "no GGUF"),
    "version 1": (header(version=1), "version 1"),
    "version 4": (header(version=4), "version 4"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "too many keys": (header(kv=2**40), "too few for the 1099511627776 metadata keys"),
    "too many tensors": (header([NAME], tensors=2**61), "tensors of its header"),
    "long key": (header([struct.pack("<Q", 2**62) + b"x"]), "too short"),
    "very long key": (header([struct.pack("<Q", 5000) + b"x" * 5000 + struct.pack("<IB", 0, 1)]), "5000 bytes long"),
    "empty key": (header([pair("", "u64", 1)]), "wanted 1 to"),
    "unprintable key": (header([pair("a\nb", "u8", 1)]), "unprintable"),
    "unknown kind": (header([gguf_model.text("k") + struct.pack("<IQ", 13, 1)]), "unknown kind 13"),
    "long string": (header([gguf_model.text("k") + struct.pack("<IQ", 8, HUGE)]), "too short"),
    "array of arrays": (header([gguf_model.text("k") + struct.pack("<IIQ", 9, 9, 1)]), "holds arrays"),
    "long array": (header([gguf_model.text("k") + struct.pack("<IIQ", 9, 10, 2**61)]), "array of 2305843009213693952 uint64"),
    "long array of strings": (header([gguf_model.text("k") + struct.pack("<IIQ", 9, 8, 2**40)]), "too short"),
    "key twice": (header([NAME, NAME]), "general.name stands twice"),
    "alignment 0": (header([pair("general.alignment", "u32", 0)]), "general.alignment"),
    "alignment 24": (header([pair("general.alignment", "u32", 24)]), "power of two"),
    "no tensors": (header([NAME]), "no tensors"),
    "no axes": (header([NAME], [gguf_model.text("t") + struct.pack("<IIQ", 0, 0, 0) + b"\0" * 16]), "0 axes"),
    "5 axes": (header([NAME], [info("t", 0, [1] * 5, 0)]), "5 axes"),
    "axis of 0": (header([NAME], [info("t", 0, [4, 0], 0)]), "none or too many"),
    "shape overflows": (header([NAME], [info("t", 0, [2**40, 2**40], 0)]), "none or too many"),
    "bytes overflow": (header([NAME], [info("t", 28, [2**60], 0)]), "too many"),
    "unknown type": (header([NAME], [info("t", 99, [32], 0)]), "type 99"),
    "removed type": (header([NAME], [info("t", 4, [32], 0)]), "type 4"),
    "part of a block": (header([NAME], [info("t", 8, [2, 33], 0)]), "no whole number of q8_0 blocks"),
    "empty name": (header([NAME], [info("", 0, [8, 8], 0)]), "wanted 1 to"),
    "long name": (header([NAME], [info("t" * 200, 0, [8], 0)]), "200 bytes long"),
    "beyond the file": (header([NAME], [info("t", 0, [2**40], 0)]), "too short"),
    "far offset": (header([NAME], [info("t", 0, [8], 2**63 - 32)]), "beyond any file"),
    "unaligned": (gguf_model.padded(header([NAME], [info("t", 0, [8], 0), info("u", 0, [8], 36)])) + b"\0" * 96, "no multiple of 32"),
    "overlap": (gguf_model.padded(header([NAME], [info("t", 0, [16], 0), info("u", 0, [8], 32)])) + b"\0" * 64, "overlap"),
    "hole": (gguf_model.padded(header([NAME], [info("t", 0, [8], 0), info("u", 0, [8], 64)])) + b"\0" * 96, "belong to no tensor"),
    "name twice": (gguf_model.padded(header([NAME], [info("t", 0, [8], 0), info("t", 0, [8], 32)])) + b"\0" * 64, "stands twice"),
    "ends in a key": (header([NAME[:9]]), "too short"),
    "ends in an entry": (header([NAME], [info("t", 0, [8], 0)[:20]], tensors=1), "too"),
}


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_bad_header(tmp_path, case):
    data, phrase = BAD_HEADERS[case]
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    refused(path, "m.gguf", phrase)


def test_absurd_lengths_take_no_memory(tmp_path):
    """Under an address space of 512 MiB, whatever the header asks for."""
    path = tmp_path / "m.gguf"
    for case in ("too many keys", "too many tensors", "long array", "long string", "beyond the file"):
        path.write_bytes(BAD_HEADERS[case][0])
        if b"__asan_init" in pathlib.Path(shutil.which(K3DECODE)).read_bytes():
            pytest.skip("the address sanitizer needs more")
        done = subprocess.run(["sh", "-c", f"ulimit -v 524288; exec {K3DECODE} import {path} --output {tmp_path}/m.h5"],
                              capture_output=True, text=True, timeout=60)
        assert done.returncode == 3 and "memory" not in done.stderr, done


def test_random_damage_never_crashes(tiny):
    path, kv, tensors = tiny
    rng = np.random.default_rng(SEED)
    good = np.frombuffer(pack_gguf(kv, tensors), np.uint8)
    outcomes = set()
    for _ in range(80):
        data = good.copy()
        for at in rng.integers(0, 9000, rng.integers(1, 6)):
            data[at] = rng.integers(256)
        path.write_bytes(data.tobytes()[:rng.integers(20, len(data)) if rng.random() < 0.2 else None])
        done = subprocess.run([K3DECODE, "import", path, "--output", path.parent / "m.h5", "--overwrite"], capture_output=True,
                              text=True, timeout=60, errors="replace")
        assert done.returncode in (0, 3), done
        outcomes.add(done.returncode)
    assert 3 in outcomes


# ---------------------------------------------------------------- metadata

REQUIRED = [key for key, _, _ in gguf_model.metadata(gguf_model.SMALL)
            if not key.startswith(("general.name", "general.quant", "tokenizer")) and not key.endswith(("attention.key_length", "attention.value_length"))]


@pytest.mark.parametrize("key", REQUIRED)
def test_key_missing(tiny, key):
    path, kv, tensors = tiny
    refused(write_gguf(path, without(kv, key), tensors), key, "missing")


def test_optional_keys(tiny, tmp_path):
    """Those that repeat others may be absent; the vocabulary may be told by the tokenizer's tokens."""
    path, kv, tensors = tiny
    for key in ("kimi-k3.attention.key_length", "kimi-k3.attention.value_length", "general.name", "kimi-k3.vocab_size"):
        kv = without(kv, key)
    kv += [("tokenizer.ggml.tokens", "[str]", [f"t{i}" for i in range(48)]), ("kimi-k3.expert_group_count", "u32", 1),
           ("x.all", "[f64]", [1.0]), ("x.bools", "[bool]", [True, False]), ("x.i8", "i8", -1), ("x.u16", "u16", 1), ("x.i16", "i16", -1),
           ("x.i64", "i64", -5), ("x.u64", "u64", 2**63), ("x.f64", "f64", 0.5), ("x.none", "[str]", []), ("x.u8", "u8", 255)]
    with h5py.File(imported(write_gguf(path, kv, tensors), tmp_path)) as file:
        assert file["config"].attrs["vocab_size"] == 48


@pytest.mark.parametrize("key, kind, value, phrases", [
    ("general.architecture", "str", "kimi-linear", ["kimi-linear", "kimi-k3"]),
    ("general.architecture", "u32", 7, ["uint32", "string"]),
    ("kimi-k3.block_count", "str", "4", ["string"]),
    ("kimi-k3.block_count", "u64", 2**60, ["out of range"]),
    ("kimi-k3.block_count", "u64", 2**63 + 5, ["below 2^63"]),
    ("kimi-k3.block_count", "u32", 0, ["block_count"]),
    ("kimi-k3.attention.head_count_kv", "u32", 1, ["uint32", "KDA"]),
    ("kimi-k3.attention.head_count_kv", "[i32]", [0, 1, 0], ["array of 3 int32"]),
    ("kimi-k3.attention.head_count_kv", "[i32]", [0, 1, 0, 2], ["[3] is 2"]),
    ("kimi-k3.attention.head_count_kv", "[f32]", [0, 1, 0, 1], ["float32"]),
    ("kimi-k3.attention.head_count", "[u32]", [4, 4, 4, 2], ["layer 3"]),
    ("kimi-k3.attention.head_count", "[u32]", [4, 4], ["array of 2"]),
    ("kimi-k3.attention.layer_norm_rms_epsilon", "u32", 0, ["uint32", "float32"]),
    ("kimi-k3.attention.layer_norm_rms_epsilon", "f32", float("nan"), ["rms_norm_eps"]),
    ("kimi-k3.kda.gate_lower_bound", "f32", 5.0, ["kda_gate_lower_bound"]),
    ("kimi-k3.expert_gating_func", "u32", 1, ["sigmoid"]),
    ("kimi-k3.expert_weights_norm", "u32", 1, ["bool"]),
    ("kimi-k3.attention.key_length", "u32", 71, ["wanted 72"]),
    ("kimi-k3.attention.value_length", "u32", 16, ["wanted 64"]),
    ("kimi-k3.attention.key_length_mla", "u32", 8, ["qk_nope_head_dim"]),
    ("kimi-k3.expert_used_count", "u32", 5, ["num_experts_per_token"]),
    ("kimi-k3.vocab_size", "u32", 47, ["token_embd.weight", "[48, 64]", "[47, 64]"]),
    ("kimi-k3.leading_dense_block_count", "u32", 0, ["blk.0.ffn_gate_inp.weight", "missing"]),
])
def test_value_refused(tiny, key, kind, value, phrases):
    path, kv, tensors = tiny
    refused(write_gguf(path, replaced(kv, key, kind, value), tensors), *([] if "token" in phrases[0] or "blk" in phrases[0] or "_" in phrases[0] else [key]), *phrases)


def test_lists_of_one_value(tiny, tmp_path):
    path, kv, tensors = tiny
    kv = replaced(kv, "kimi-k3.feed_forward_length", "[u32]", [96] * 4)
    compare(imported(write_gguf(path, kv, tensors), tmp_path), tensors)


# ---------------------------------------------------------------- tensors

@pytest.mark.parametrize("name", ["token_embd.weight", "output_res_score.weight", "blk.0.ssm_a", "blk.0.ssm_dt.bias", "blk.1.attn_v_b.weight",
                                  "blk.1.attn_k_b.weight", "blk.3.attn_gate.weight", "blk.2.exp_probs_b.bias", "blk.1.ffn_up_exps.weight"])
def test_missing_tensor(tiny, name):
    path, kv, tensors = tiny
    del tensors[name]
    refused(write_gguf(path, kv, tensors), name, "missing")


def test_surplus_tensor(tiny):
    path, kv, tensors = tiny
    tensors["blk.0.ssm_g_a.weight"] = tensors["blk.0.ssm_f_a.weight"]
    tensors["blk.4.attn_norm.weight"] = tensors["blk.0.attn_norm.weight"]
    refused(write_gguf(path, kv, tensors), "surplus", "blk.0.ssm_g_a.weight", "2 such tensors")


@pytest.mark.parametrize("name, shape", [("blk.1.attn_k_b.weight", [4, 32, 64]), ("blk.1.attn_v_b.weight", [4, 64, 16]),
                                         ("blk.0.ssm_conv1d_q.weight", [1, 4, 1, 64]), ("output.weight", [64, 48]),
                                         ("blk.1.ffn_gate_exps.weight", [64, 4, 32]), ("blk.0.ssm_dt.bias", [4, 16])])
def test_wrong_shape(tiny, name, shape):
    path, kv, tensors = tiny
    raw = as_zeros(shape)
    tensors[name] = "f32", shape, raw
    refused(write_gguf(path, kv, tensors), name, "shape " + str(shape), "wanted")


def as_zeros(shape):
    return bytes(4 * int(np.prod(shape)))


def test_types_refused(tiny):
    path, kv, tensors = tiny
    good = dict(tensors)
    tensors["token_embd.weight"] = "f64", [48, 64], bytes(8 * 48 * 64)
    refused(write_gguf(path, kv, tensors), "token_embd.weight", "f64", "not implemented")
    tensors = {**good, "output_norm.weight": ("q8_0", [64], bytes(68))}
    refused(write_gguf(path, kv, tensors), "output_norm.weight", "q8_0", "no matrix")
    kv, tensors = small_model(SEED, types=("f32",), **{**TINY, "hidden": 256})
    tensors["output.weight"] = "tq1_0", [48, 256], bytes(48 * 54)
    refused(write_gguf(path, kv, tensors), "output.weight", "tq1_0", "not implemented")


@pytest.mark.parametrize("tail, phrases", [([-1.0] * 4, None), ([0.0] * 4, None), ([-1.0, -0.5], ["6 numbers for 4 heads", "element 5"])])
def test_a_log_tail(tiny, tmp_path, tail, phrases):
    """F11: padding is accepted, anything else means another number of heads."""
    path, kv, tensors = tiny
    raw = tensors["blk.0.ssm_a"][2] + np.array(tail, "<f4").tobytes()
    tensors["blk.0.ssm_a"] = "f32", [len(raw) // 4], raw
    write_gguf(path, kv, tensors)
    if phrases:
        refused(path, "blk.0.ssm_a", *phrases)
    else:
        with h5py.File(imported(path, tmp_path)) as file:
            assert file["layers/000/A_log"].shape == (4,)


def test_a_log_wrong(tiny):
    path, kv, tensors = tiny
    raw = tensors["blk.0.ssm_a"][2]
    tensors["blk.0.ssm_a"] = "f32", [3], raw[:12]
    refused(write_gguf(path, kv, tensors), "blk.0.ssm_a", "3 numbers, fewer than the 4 heads")
    for value in (0.0, 0.5, float("nan"), -float("inf")):
        tensors["blk.0.ssm_a"] = "f32", [4], raw[:8] + struct.pack("<f", value) + raw[12:]
        refused(write_gguf(path, kv, tensors), "blk.0.ssm_a", "element 2", "below zero")


@pytest.mark.parametrize("name, kind", [("output_norm.weight", "f32"), ("token_embd.weight", "bf16"), ("token_embd.weight", "f16")])
def test_not_finite(tiny, name, kind):
    path, kv, tensors = tiny
    values = np.ones(int(np.prod(tensors[name][1])), np.float32)
    for bad in (np.nan, np.inf, -np.inf):
        values[17] = bad
        tensors[name] = kind, tensors[name][1], gguf_model.as_type(kind, values)
        refused(write_gguf(path, kv, tensors), name, "element 17")


@pytest.mark.parametrize("kind", [k for k in gguf_model.SHORT + gguf_model.LONG if k != "mxfp4"])
def test_block_scale_not_finite(tmp_path, kind):
    """Of each block type, a scale (and an offset) of infinity or NaN is refused, and named by its block."""
    kv, tensors = small_model(SEED, types=(kind, "f32"), **{**TINY, "hidden": 256})
    name = "token_embd.weight"
    _, values, size = gguf_model.TYPES[kind]
    tensors[name] = kind, [48, 256], gguf_model.random_blocks(gguf_model.Stream(SEED), kind, 48, 256, 1.0)
    places = gguf_model.D_AT.get(kind, (None,))
    for number, place in enumerate(places):
        raw = np.frombuffer(tensors[name][2], np.uint8).reshape(-1, size).copy()
        if place is None:                               # iq1_m
            gguf_model.set_scale(kind, raw[11:12], np.array([np.inf]))
        else:
            raw[11, place:place + 2] = (0x00, 0x7c) if number == 0 else (0x01, 0xfc)
        bad = {**tensors, name: (kind, [48, 256], raw.tobytes())}
        refused(write_gguf(tmp_path / "m.gguf", kv, bad), name, "block 11 has", "infinite" if number == 0 else "NaN")


def test_only_a_model_file_is_replaced(tiny, tmp_path):
    """--overwrite never takes the checkpoint itself, nor another file."""
    path, kv, tensors = tiny
    write_gguf(path, kv, tensors)
    notes, before = tmp_path / "notes.txt", path.read_bytes()
    notes.write_text("mine")
    for output in (path, notes):
        done = subprocess.run([K3DECODE, "import", path, "--output", output, "--overwrite"], capture_output=True, text=True, timeout=60)
        assert done.returncode == 3 and f"{output} is not a model file" in done.stderr, done
    assert path.read_bytes() == before and notes.read_text() == "mine" and not list(tmp_path.glob("*.partial*"))
    imported(path, tmp_path)
    imported(path, tmp_path)


def test_disk_too_full(tmp_path):
    """Refused before the first byte: sparse tensors that no disk has room for."""
    kv, tensors = small_model(SEED, types=("f32",), **{**TINY, "hidden": 352, "vocab": 416})
    larger = {352: 2**16, 416: 2**24}                   # no other axis has these sizes
    kv = replaced(replaced(kv, "kimi-k3.vocab_size", "u32", 2**24), "kimi-k3.embedding_length", "u32", 2**16)
    infos, at = [], 0
    for name, (_, shape, _) in tensors.items():
        shape = [larger.get(n, n) for n in shape]
        infos.append(info(name, 0, shape, at))
        at += 4 * int(np.prod(shape))
        at += -at % 32
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_model.padded(header([pair(*p) for p in kv], infos)))
    try:
        os.truncate(path, path.stat().st_size + at)     # 8.8 TB, of which none is on the disk
    except OSError:
        pytest.skip("this file system has no sparse files of 8.8 TB")
    refused(path, "too full", "8796")


# ---------------------------------------------------------------- size

def test_memory_and_offsets(tmp_path):
    """A sparse output.weight of 300 MB passes in pieces; marks at its ends arrive (F32 in small; offsets are 64 bits)."""
    kv, tensors = small_model(SEED, types=("f32",), **TINY)
    rows = 1_200_000
    names = [n for n in tensors if n not in ("token_embd.weight", "output.weight")]
    kv = replaced(kv, "kimi-k3.vocab_size", "u32", rows)
    infos, at = [], 0
    for name in names:
        infos.append(info(name, gguf_model.TYPES[tensors[name][0]][0], tensors[name][1], at))
        at += len(gguf_model.padded(tensors[name][2]))
    first = at
    for name in ("token_embd.weight", "output.weight"):
        infos.append(info(name, 0, [rows, 64], at))
        at += rows * 256
    head = gguf_model.padded(header([pair(*p) for p in kv], infos))
    path = tmp_path / "m.gguf"
    with open(path, "wb") as file:
        file.write(head + b"".join(gguf_model.padded(tensors[n][2]) for n in names))
        assert file.tell() == len(head) + first
        file.seek(rows * 256, os.SEEK_CUR)
        file.write(struct.pack("<f", 1.5))
        file.seek(rows * 256 - 8, os.SEEK_CUR)
        file.write(struct.pack("<f", 2.5))
    child = subprocess.Popen([K3DECODE, "import", path, "--output", tmp_path / "m.h5"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0, child.stderr.read()
    child.stderr.close()
    with h5py.File(tmp_path / "m.h5") as file:
        assert file["lm_head"][0, 0] == 1.5 and file["lm_head"][-1, -1] == 2.5 and not file["embed"][::9999].any()
    (tmp_path / "m.h5").unlink()
    print("largest resident size", usage.ru_maxrss // 1024, "MiB")
    if b"__asan_init" not in pathlib.Path(shutil.which(K3DECODE)).read_bytes():
        assert usage.ru_maxrss < 300 * 1024


# ---------------------------------------------------------------- F17: bands of imported blocks

@needs_mpirun
@pytest.mark.parametrize("inner, ranks, types", [(96, (2, 4), ("mxfp4", "f32")), (768, (2, 8), ("iq1_s", "q8_0", "f32"))])
def test_bands_never_cut_a_block(tmp_path, inner, ranks, types):
    """Experts of 3 blocks: 96 in mxfp4, 768 in iq1_s, where inner / ranks is no multiple of a block."""
    kv, tensors = small_model(SEED, types=types, layers=3, mla=(2,), vocab=64, moe_inner=inner, top=3, dense_inner=256)
    path = imported(write_gguf(tmp_path / "m.gguf", kv, tensors), tmp_path)
    tokens, logits = decode(path, tmp_path / "one.h5", prompt=(3, 1, 4), steps=3)
    for world in ranks:
        got = decode(path, tmp_path / "many.h5", prompt=(3, 1, 4), steps=3, ranks=world)
        assert np.array_equal(got[0], tokens) and np.abs(got[1] - logits).max() < 1e-5 * np.abs(logits).max()
