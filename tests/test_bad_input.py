"""Bad input: exit status, a message that names the file and the dataset, no rank and no output left behind.

    /usr/bin/python3 -m pytest tests/test_bad_input.py      (environment: see tests/harness.py)
"""
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time

import h5py
import numpy as np
import pytest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import harness          # noqa: E402
import model_file       # noqa: E402
import reference        # noqa: E402
from harness import MPIRUN, SEED, Job, decode, k3, needs_mpirun, read_run, refused   # noqa: E402

pytestmark = needs_mpirun
PUBLIC = harness.TESTS / "fixtures" / "public_k3" / "plain"
V = 320                 # of model_file.TINY


@pytest.fixture(scope="module", autouse=True)
def show_seed():
    harness.show_seed()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A sound model: KDA, MLA, dense and expert layers; its vectors are float32."""
    path = tmp_path_factory.mktemp("base") / "base.h5"
    model_file.random_model(path, SEED, num_layers=5, trunk="q8_0", experts="mxfp4")
    return path


@pytest.fixture
def model(base, tmp_path):
    return shutil.copy(base, tmp_path / "model.h5")


@pytest.fixture
def output(tmp_path):
    """The output; after the test there must be none."""
    path = tmp_path / "run.h5"
    yield path
    assert not path.exists(), "an output was left behind"


def run_refused(model, output, *words, prompt="1,2,3", status=3, phrases=(), ranks=1, **more):
    given = ("--prompt", prompt) if prompt is not None else ()
    words = given + words if "--steps" in words else given + ("--steps", 2) + words
    return refused("run", model, *words, "--output", output, status=status, phrases=phrases, ranks=ranks, **more)


def mount_tmpfs(folder, options):
    """A small file system; skips where that is not allowed."""
    folder.mkdir()
    if os.geteuid() != 0 or not shutil.which("mount"):
        pytest.skip("needs root and mount, for a small tmpfs")
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", folder], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {made.stderr.strip()}")


@pytest.fixture
def small_disk(tmp_path):
    """Makes a tmpfs of so many bytes; unmounted afterwards."""
    folder = tmp_path / "disk"

    def make(options):
        mount_tmpfs(folder, options)
        return folder
    yield make
    subprocess.run(["umount", folder], capture_output=True)


# ---------------------------------------------------------------- files that are no model

@pytest.mark.parametrize("ranks", (1, 3))
@pytest.mark.parametrize("cut", ("1", "4096", "half", "all but 100"))
def test_truncated(model, output, cut, ranks):
    size = os.path.getsize(model)
    os.truncate(model, {"1": size - 1, "4096": size - 4096, "half": size // 2, "all but 100": 100}[cut])
    result = run_refused(model, output, phrases=(model,), ranks=ranks)
    if cut != "all but 100":
        assert "truncated" in result.err and str(size) in result.err and str(os.path.getsize(model)) in result.err, result


def test_no_model(tmp_path, output):
    (tmp_path / "empty.h5").touch()
    (tmp_path / "text.h5").write_text("no HDF5 at all\n" * 100)
    for name, phrase in (("gone.h5", "No such file"), ("empty.h5", "empty"), ("text.h5", "HDF5"), (".", "no plain file")):
        run_refused(tmp_path / name, output, phrases=(tmp_path / name, phrase), ranks=2)


def test_run_file_as_model(model, tmp_path, output):
    decode(model, tmp_path / "other.h5", steps=1)
    run_refused(tmp_path / "other.h5", output, phrases=("other.h5", "k3decode-run", "k3decode-model"))


def test_synth_recipes(output):
    for recipe in ("nothing", "tiny:hidden=3", "tiny:num_layers=x", "tiny:experts=q4"):
        run_refused(f"synth:{recipe}", output, status=2, phrases=("recipe",))


# ---------------------------------------------------------------- models that do not keep the contract

def change(model, action):
    with h5py.File(model, "r+") as file:
        return action(file)


@pytest.mark.parametrize("name, value, phrases", [
    ("format", "k3decode-modell", ("format", "k3decode-modell")),
    ("format", None, ("format",)),
    ("format", np.int64(7), ("format",)),
    ("format_version", np.int64(2), ("format_version = 2", "wanted 1")),
    ("format_version", "1", ("format_version",)),
    ("format_version", None, ("format_version",)),
    ("architecture", "llama", ("architecture", "llama")),
    ("architecture", None, ("architecture",)),
])
def test_root_attributes(model, output, name, value, phrases):
    def action(file):
        del file.attrs[name]
        if value is not None:
            file.attrs[name] = value
    change(model, action)
    run_refused(model, output, phrases=(model, *phrases), ranks=1 if value is None else 2)


def test_each_missing_field_is_named(model, output):
    """info opens the model as run does, and starts no MPI."""
    for name in reference.CONFIG_FIELDS:
        with h5py.File(model, "r+") as file:
            value = file["config"].attrs[name]
            del file["config"].attrs[name]
        refused("info", model, phrases=(model, name))
        change(model, lambda file: file["config"].attrs.create(name, value))
    k3("info", model)
    change(model, lambda file: file["config"].attrs.__delitem__("kv_lora_rank"))
    run_refused(model, output, phrases=(model, "kv_lora_rank"), ranks=3)


@pytest.mark.parametrize("name, value", [
    ("num_layers", np.int64(0)), ("num_layers", np.int64(6)), ("num_layers", np.int64(10**9)), ("hidden_size", np.int64(-96)),
    ("num_experts_per_token", np.int64(17)), ("rms_norm_eps", np.float64("nan")), ("rms_norm_eps", np.float64(-1)),
    ("situ_beta", np.float64(0)), ("renormalize", np.uint8(2)), ("attn_res_block_size", np.int64(0)),
    ("vocab_size", np.int64(2**62)), ("hidden_size", "96"), ("kda_conv_kernel", np.int64(0)), ("max_context", np.int64(0)),
    ("hidden_size", np.arange(2)), ("num_heads", np.float64(8))])
def test_wrong_fields(model, name, value):
    change(model, lambda file: file["config"].attrs.create(name, value))
    refused("info", model, phrases=(model, name if name != "num_layers" or value != 6 else "layer_types"))


def test_layer_types(model, output):
    for data, phrase in ((None, "layer_types is missing"), (np.zeros(4, np.uint8), "layer_types holds 4"),
                         (np.full(5, 2, np.uint8), "layer_types"), (np.zeros(5, np.float32), "layer_types")):
        def action(file):
            if "layer_types" in file["config"]:
                del file["config/layer_types"]
            if data is not None:
                file["config/layer_types"] = data
        change(model, action)
        run_refused(model, output, phrases=(model, "/config/", phrase))


def replace(file, name, data, kind=None, shape=None):
    del file[name]
    made = file.create_dataset(name, data=data)
    if kind:
        made.attrs["type"] = kind
    if shape:
        made.attrs["shape"] = np.array(shape, np.int64)


SPOILT = {
    "missing vector": ("final_norm", lambda f, n: f.__delitem__(n), ("missing",)),
    "missing matrix": ("layers/003/kv_b_proj", lambda f, n: f.__delitem__(n), ("missing",)),
    "missing layer": ("layers/002", lambda f, n: f.__delitem__(n), ("missing",)),
    "surplus": ("layers/001/bias", lambda f, n: f.create_dataset(n, data=np.zeros(3)), ("surplus",)),
    "short vector": ("layers/001/o_norm", lambda f, n: replace(f, n, np.ones(15, np.float32)), ("[15]", "[16]")),
    "one axis more": ("final_norm", lambda f, n: replace(f, n, np.ones((96, 1), np.float32)), ("[96, 1]", "[96]")),
    "transposed": ("layers/001/f_b_proj", lambda f, n: replace(f, n, np.ones((16, 128), np.float32)), ("[16, 128]",)),
    "float64": ("layers/001/A_log", lambda f, n: replace(f, n, np.zeros(8)), ("float",)),
    "float16": ("final_norm", lambda f, n: replace(f, n, np.ones(96, np.float16)), ("2 bytes",)),
    "int32": ("final_norm", lambda f, n: replace(f, n, np.ones(96, np.int32)), ("integer",)),
    "text": ("final_norm", lambda f, n: replace(f, n, np.array([b"a"] * 96)), ("text",)),
    "uint16 without type": ("final_norm", lambda f, n: replace(f, n, np.ones(96, np.uint16)), ("type",)),
    "unknown type": ("lm_head", lambda f, n: f[n].attrs.__setitem__("type", "q4_k"), ("q4_k",)),
    "type is a number": ("lm_head", lambda f, n: f[n].attrs.__setitem__("type", 7), ("type",)),
    "quantised vector": ("final_norm", lambda f, n: replace(f, n, np.zeros(102, np.uint8), "q8_0", (96,)),
                         ("only matrices",)),
    "no shape": ("lm_head", lambda f, n: f[n].attrs.__delitem__("shape"), ("shape",)),
    "wrong shape attribute": ("lm_head", lambda f, n: f[n].attrs.__setitem__("shape", np.array([320, 128])), ("128",)),
    "other block type": ("lm_head", lambda f, n: f[n].attrs.__setitem__("type", "mxfp4"), ("mxfp4",)),
    "never written": ("layers/002/experts_up", lambda f, n: (f.__delitem__(n), f.create_dataset(n, (16, 64, 64), np.float32)),
                      ("never written",)),
    "chunks never written": ("layers/002/experts_up", lambda f, n: (
        f.__delitem__(n), f.create_dataset(n, (16, 64, 64), np.float32, chunks=(1, 64, 64))), ("never written",)),
    "written in part": ("layers/002/experts_up", lambda f, n: (
        f.__delitem__(n), f.create_dataset(n, (16, 64, 64), np.float32, chunks=(1, 64, 64)).__setitem__(3, 1)),
        ("written in part", "1 of 16")),
    "external link missing": ("layers/002/experts_up", lambda f, n: (
        f.__delitem__(n), f.__setitem__(n, h5py.ExternalLink("elsewhere.h5", "/w"))), ("elsewhere.h5",)),
    "soft link to nothing": ("final_norm", lambda f, n: (f.__delitem__(n), f.__setitem__(n, h5py.SoftLink("/gone"))), ()),
    "group": ("final_norm", lambda f, n: (f.__delitem__(n), f.create_group(n)), ("no dataset",)),
}


@pytest.mark.parametrize("case", SPOILT)
def test_spoilt_dataset(model, output, case):
    name, action, phrases = SPOILT[case]
    change(model, lambda file: action(file, name))
    run_refused(model, output, phrases=(model, "/" + name, *phrases), ranks=1 + len(case) % 2)


def test_external_link_and_virtual_dataset_are_read(base, model, tmp_path):
    """Weights in another file: the same logits; that file gone: refused by its name."""
    want = decode(base, tmp_path / "a.h5")
    with h5py.File(model, "r+") as file, h5py.File(tmp_path / "part.h5", "w") as part:
        for name in ("layers/002/experts_up", "layers/003/o_proj", "final_norm"):
            part[name.replace("/", "-")] = file[name][...]
            attributes = dict(file[name].attrs)
            part[name.replace("/", "-")].attrs.update(attributes)
            shape, dtype = file[name].shape, file[name].dtype
            del file[name]
            if name == "final_norm":
                layout = h5py.VirtualLayout(shape, dtype)
                layout[...] = h5py.VirtualSource("part.h5", "final_norm", shape, dtype)
                file.create_virtual_dataset(name, layout)
            else:
                file[name] = h5py.ExternalLink("part.h5", name.replace("/", "-"))
    got = decode(model, tmp_path / "b.h5", ranks=3)
    assert np.abs(got[1] - want[1]).max() < 1e-4
    os.rename(tmp_path / "part.h5", tmp_path / "moved.h5")
    refused("run", model, "--prompt", "1", ranks=2, phrases=(model, "part.h5"))


# ---------------------------------------------------------------- values that may not be

NAN_PLACES = [      # dataset, index, layer and phase that the step names
    ("layers/001/o_norm", 3, "layer 1", "attn_kda"),
    ("layers/002/A_log", 7, "layer 2", "attn_kda"),
    ("layers/001/q_conv", (5, 2), "layer 1", "attn_kda"),
    ("layers/001/dt_bias", 9, "layer 1", "attn_kda"),
    ("layers/003/kv_a_norm", 2, "layer 3", "attn_mla"),
    ("layers/004/q_a_norm", 2, "layer 4", "attn_mla"),
    ("layers/002/attn_res_proj", 1, "layer 2", "attn_kda"),
    ("layers/003/routed_norm", 60, "layer 3", "ffn_moe"),
    ("layers/002/router_bias", 11, "layer 2", "ffn_moe"),
    ("layers/000/post_attn_norm", 11, "layer 0", "ffn_dense"),
    ("final_norm", 95, "", "head"),
    ("output_res_norm", 0, "", "head"),
]


@pytest.mark.parametrize("name, index, layer, phase", NAN_PLACES)
def test_nan_weight(model, tmp_path, name, index, layer, phase):
    """Known fault F4: never token 0, but exit status 4 with layer and phase; info --check names the dataset."""
    change(model, lambda file: file[name].__setitem__(index, np.nan))
    ranks = 1 + len(name) % 2
    result = refused("run", model, "--prompt", "1,2,3", "--steps", 2, "--output", tmp_path / "run.h5", ranks=ranks, status=4,
                     phrases=("non-finite", layer, phase))
    assert not result.out.strip(), f"tokens were printed\n{result}"
    if (tmp_path / "run.h5").exists():
        assert len(read_run(tmp_path / "run.h5")[0]) == 0
    result = refused("info", model, "--check", phrases=(model, "/" + name, "NaN"))


def test_nan_in_matrices(tmp_path, output):
    """In a router row, an expert that is chosen, the head's last row: float32 and bf16."""
    path = tmp_path / "nan.h5"
    for name, index, bf16 in (("router", (13, 4), False), ("router", (0, 4), True), ("routed_up_proj", (1, 2), True),
                              ("lm_head", (V - 1, 0), False)):
        model_file.random_model(path, SEED, num_layers=2, mla_layers={2}, trunk="bf16" if bf16 else "f32",
                                num_experts_per_token=3)
        full = name if name == "lm_head" else f"layers/001/{name}"
        change(path, lambda file: file[full].__setitem__(index, 0x7FC1 if bf16 else np.nan))
        refused("run", path, "--prompt", "1,2", status=4, phrases=("non-finite", "head" if name == "lm_head" else "ffn_moe"),
                ranks=2)
        refused("info", path, "--check", phrases=("/" + full, "NaN", str(list(index))))


def test_check_names_scales_and_infinities(model):
    def spoil(file):
        raw = file["layers/002/experts_down"][3, 5]
        raw[17] = 255                                   # the second block's scale
        file["layers/002/experts_down"][3, 5] = raw
        file["layers/003/q_a_norm"][4] = -np.inf
        raw = file["lm_head"][7]
        raw[34:36] = 0, 0x7C                            # float16 infinity
        file["lm_head"][7] = raw
    change(model, spoil)
    result = k3("info", model, "--check", status=3)
    for phrase in ("/layers/002/experts_down", "255", "[3, 5, 32]", "/layers/003/q_a_norm", "-infinity", "[4]", "/lm_head",
                   "[7, 32]"):
        assert phrase in result.out, result


def test_check_of_a_sound_model(model):
    assert "sound" in k3("info", model, "--check").out


# ---------------------------------------------------------------- prompts and numbers

@pytest.mark.parametrize("ranks", (1, 4))
@pytest.mark.parametrize("prompt, position, shown", [
    (str(V), 0, V), ("1,-1", 1, -1), ("1,2,4294967296", 2, 4294967296), ("1.5", 0, "1.5"), ("1,,2", 1, "missing"),
    ("0x10", 0, "0x10"), ("1,99999999999999999999", 1, "99999999999999999999"), ("a", 0, "a"), ("3,", 1, "missing")])
def test_token_out_of_range(base, output, prompt, position, shown, ranks):
    run_refused(base, output, prompt=prompt, phrases=(f"position {position}", shown), ranks=ranks)


def test_edges_of_the_vocabulary(base, tmp_path):
    for ranks in (1, 4):
        decode(base, tmp_path / "run.h5", prompt=(0, V - 1), steps=1, ranks=ranks)


@pytest.mark.parametrize("ranks", (1, 3))
def test_empty_prompt(base, tmp_path, output, ranks):
    run_refused(base, output, prompt="", phrases=("prompt is empty",), ranks=ranks)
    for text in ("", "\n\n \n"):
        file = tmp_path / "prompt.txt"
        file.write_text(text)
        run_refused(base, output, "--prompt-file", file, prompt=None, phrases=(file, "prompt is empty"), ranks=ranks)


def test_prompt_files(base, tmp_path, output):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["token_ids"] = np.zeros(0, np.int64)
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["other"] = np.zeros(3, np.int64)
    with h5py.File(tmp_path / "c.h5", "w") as file:
        file["token_ids"] = np.zeros(3)
    with h5py.File(tmp_path / "d.h5", "w") as file:
        file["token_ids"] = np.array([1, V])
    (tmp_path / "e.h5").write_bytes((tmp_path / "d.h5").read_bytes()[:-100])
    (tmp_path / "f.txt").write_text("1,2,x")
    for name, phrase in (("a.h5", "empty"), ("b.h5", "token_ids"), ("c.h5", "integers"), ("d.h5", str(V)), ("e.h5", "e.h5"),
                         ("f.txt", "position 2"), ("gone.txt", "No such file")):
        run_refused(base, output, "--prompt-file", tmp_path / name, prompt=None, phrases=(phrase,))


@pytest.mark.parametrize("words, status, phrase", [
    (("--steps", "0"), 2, "--steps"), (("--steps", "-3"), 2, "--steps"), (("--steps", "4x"), 2, "--steps"),
    (("--steps", "99999999999999999999"), 2, "--steps"), (("--context", "0"), 2, "--context"),
    (("--logits", "top:0"), 2, "--logits top:0: wanted"), (("--logits", f"top:{V + 1}"), 3, f"{V} tokens"), (("--logits", "some"), 2, "--logits"),
    (("--backend", "gpu"), 2, "--backend"), (("--cache-band", "x"), 2, "--cache-band"), (("--slice", "3/2"), 2, "--slice"),
    (("--prompt-file", "x"), 2, "exclude"), (("--nothing",), 2, "--nothing"), (("second.h5",), 2, "more than one model")])
def test_options(base, output, words, status, phrase):
    run_refused(base, output, *words, status=status, phrases=(phrase,), ranks=1 + len(words[0]) % 2)


def test_usage():
    assert k3(status=2).err.startswith("usage:")
    assert "no command" in k3("nothing", status=2).err
    refused("run", status=2, phrases=("model is missing",))
    refused("run", "m.h5", status=2, phrases=("prompt is missing",))
    assert "usage:" in k3("--help").out and "k3decode" in k3("--version").out


@pytest.mark.parametrize("command", ["run", "sweep", "tune", "synth", "import", "compare", "info", "report", "text"])
def test_refused_options_are_named(command):
    for asked in ("--help", "-h"):
        assert k3(command, asked).out.lower().startswith("usage:")
    own = {"compare": "--steps=3", "info": "--check", "text": "--tokenizer=a=b"}.get(command, "--overwrite")
    wants = {"compare": "--steps", "info": "--ranks", "text": "--tokenizer"}.get(command, "--output")
    for words, phrase in ((("-xz",), "unknown option -xz;"), ((own, "-xz", "m.h5"), "unknown option -xz;"), ((own, "-x"), "unknown option -x;"),
                          ((own, "--nothing", "-xz"), "unknown option --nothing;"), ((own, wants), f"{wants} wants a value;"),
                          ((own, "--help=3"), "--help=3 takes no value;")):
        refused(command, *words, status=2, phrases=(phrase, f"k3decode {command} --help"))


# ---------------------------------------------------------------- outputs

def test_output_is_the_model(model, tmp_path):
    before = open(model, "rb").read()
    os.link(model, tmp_path / "same.h5")
    for path in (model, tmp_path / "same.h5"):
        for more in ((), ("--overwrite",)):
            refused("run", model, "--prompt", "1", "--output", path, *more, phrases=(path, "is the model"))
    assert open(model, "rb").read() == before


def test_output_exists(base, tmp_path):
    path = tmp_path / "run.h5"
    want = decode(base, path)
    refused("run", base, "--prompt", "4", "--output", path, ranks=2, phrases=(path, "exists", "--overwrite"))
    assert np.array_equal(read_run(path)[1], want[1])
    decode(base, path, steps=1)


def test_overwrite_spares_other_files(base, tmp_path):
    for content in (b"my notes\n", open(base, "rb").read()):
        path = tmp_path / "other"
        path.write_bytes(content)
        refused("run", base, "--prompt", "4", "--output", path, "--overwrite", phrases=(path, "not a run file"))
        assert path.read_bytes() == content


@pytest.mark.parametrize("command", ["run", "snapshot", "sweep", "synth", "import"])
def test_partial_of_another_program_is_spared(base, tmp_path, command):
    """PATH.partial is where outputs are written first; what a killed k3decode left there gives way, nothing else does."""
    path, partial = tmp_path / "x.h5", tmp_path / "x.h5.partial"
    words = {"run": ("run", base, "--prompt", "1", "--steps", 2, "--output", path), "snapshot": ("run", base, "--prompt", "1", "--steps", 2, "--snapshot", path),
             "sweep": ("sweep", base, "--contexts", "4", "--steps", 1, "--repeats", 2, "--output", path), "synth": ("synth", "tiny", "--output", path),
             "import": ("import", PUBLIC, "--output", path)}[command]
    with h5py.File(tmp_path / "other", "w") as file:
        file["numbers"] = [1, 2]
    for content in (b"mine", (tmp_path / "other").read_bytes()):
        partial.write_bytes(content)
        refused(*words, phrases=(f"{partial} is in the way", "move it"))
        assert partial.read_bytes() == content and not path.exists()
    for content in (b"", bytes(2000), (tmp_path / "other").read_bytes()[:500], open(base, "rb").read()):
        partial.write_bytes(content)
        k3(*words)
        assert not partial.exists()
        path.unlink()


def test_output_nowhere(base, tmp_path):
    (tmp_path / "file").touch()
    for path, phrase in ((tmp_path / "gone" / "run.h5", "no such directory"), (tmp_path / "file" / "run.h5", "no such directory"),
                         (tmp_path, "output"), ("", "output")):
        refused("run", base, "--prompt", "1", "--output", path, ranks=2, phrases=(phrase, path))


def test_output_in_a_read_only_place(base, small_disk, tmp_path):
    if os.geteuid() == 0:
        folder = small_disk("ro,size=64k")
    else:
        folder = tmp_path / "closed"
        folder.mkdir(mode=0o555)
    refused("run", base, "--prompt", "1", "--output", folder / "run.h5", ranks=2, phrases=(folder / "run.h5", "cannot be written"))
    assert not (folder / "run.h5").exists()


def test_disk_full_at_once(base, small_disk):
    folder = small_disk("size=4k")
    refused("run", base, "--prompt", "1", "--output", folder / "run.h5", ranks=2, phrases=(folder / "run.h5", "No space left"))
    assert not (folder / "run.h5").exists()


def test_disk_full_in_a_run(base, small_disk, tmp_path):
    """The steps before stay readable, and are those of an undisturbed run."""
    folder = small_disk("size=700k")
    refused("run", base, "--prompt", "1", "--steps", 800, "--output", folder / "run.h5", ranks=2,
            phrases=(folder / "run.h5", "No space left"))
    tokens, logits = read_run(folder / "run.h5")
    assert 5 < len(tokens) < 800
    want = decode(base, tmp_path / "whole.h5", prompt=(1,), steps=len(tokens), ranks=2)
    assert np.array_equal(tokens, want[0]) and np.array_equal(logits, want[1])
    k3("info", folder / "run.h5")


def test_output_open_elsewhere(base, tmp_path):
    path = tmp_path / "run.h5"
    decode(base, path, steps=1)
    with open(path, "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        refused("run", base, "--prompt", "1", "--output", path, "--overwrite", ranks=2, phrases=(path, "another process"))
    with h5py.File(path, "r+"):
        refused("run", base, "--prompt", "1", "--output", path, "--overwrite", phrases=(path, "another process"))
    decode(base, path, steps=1)


def test_two_jobs_one_output(base, tmp_path):
    path = tmp_path / "run.h5"
    first = harness.start("run", base, "--prompt", "1", "--steps", 4000, "--logits", "none", "--output", path)
    try:
        end = time.monotonic() + 20
        while not (path.exists() and os.path.getsize(path)) and time.monotonic() < end:
            time.sleep(0.02)
        for more in ((), ("--overwrite",)):
            result = refused("run", base, "--prompt", "2", "--output", path, *more, phrases=(path,))
        assert "another process" in result.err, result
        assert first.process.poll() is None, "the first job ended too early for this test"
        first.process.send_signal(signal.SIGTERM)
    finally:
        result = first.finish()
    with h5py.File(path, "r") as run:
        assert int(run["decode/steps"][()]) == len(run["decode/token_ids"]) > 0
    assert "signal 15" in harness.ending(path)


# ---------------------------------------------------------------- ranks that do not see the same

def two_programs(one, two, *words):
    """Rank 0 runs with model `one`, ranks 1 and 2 with `two`."""
    run = ("run",)
    return Job([MPIRUN, "-n", 1, harness.K3DECODE, *run, one, *words, ":", "-n", 2, harness.K3DECODE, *run, two, *words]).finish()


def test_model_differs_between_ranks(base, tmp_path, output):
    other = tmp_path / "other.h5"
    model_file.random_model(other, SEED + 1, num_layers=5, trunk="q8_0", experts="mxfp4")
    result = two_programs(base, other, "--prompt", "1", "--output", output)
    assert result.status == 3 and len(result.errors()) == 1, result
    for phrase in ("rank 1 of 3", str(other), "digest"):
        assert phrase in result.err, result


def test_one_weight_differs_between_ranks(base, model, output):
    """One value at the end of one tensor, same names, shapes and types."""
    change(model, lambda file: file["layers/004/routed_norm"].__setitem__(63, 0.123))
    result = two_programs(base, model, "--prompt", "1", "--output", output)
    assert result.status == 3 and "digest" in result.err and str(model) in result.err, result


def test_copy_elsewhere_is_the_same_model(base, model, tmp_path):
    assert two_programs(base, model, "--prompt", "1", "--output", tmp_path / "run.h5").status == 0


def test_one_rank_lacks_the_file(base, tmp_path, output):
    for one, two, rank in ((base, tmp_path / "gone.h5", 1), (tmp_path / "gone.h5", base, 0)):
        result = two_programs(one, two, "--prompt", "1", "--output", output)
        assert result.status == 3 and len(result.errors()) == 1, result
        assert f"rank {rank} of 3" in result.err and "gone.h5" in result.err and "No such file" in result.err, result


def test_one_rank_has_a_truncated_file(base, model, output):
    os.truncate(model, os.path.getsize(model) - 1)
    result = two_programs(base, model, "--prompt", "1", "--output", output)
    assert result.status == 3 and "rank 1 of 3" in result.err and str(model) in result.err, result


# ---------------------------------------------------------------- F31: locks

def test_model_is_held_by_readers(base, tmp_path):
    """Eight ranks open a model that h5py and another job read."""
    want = decode(base, tmp_path / "a.h5", ranks=4)
    with h5py.File(base, "r"):
        other = harness.start("run", base, "--prompt", "5", "--steps", 40, ranks=2)
        got = decode(base, tmp_path / "b.h5", ranks=4)
        assert other.finish().status == 0
    assert np.array_equal(got[1], want[1])


def test_eight_ranks_while_h5ls_holds_it(tmp_path):
    path = tmp_path / "model.h5"
    model_file.random_model(path, SEED, num_layers=4)
    with h5py.File(path, "r"):
        decode(path, tmp_path / "run.h5", steps=1, ranks=8)
    if shutil.which("h5ls"):
        holder = subprocess.Popen(["h5ls", "-r", "-d", path], stdout=subprocess.PIPE)   # blocks on a full pipe, file open
        time.sleep(0.2)
        try:
            decode(path, tmp_path / "run.h5", steps=1, ranks=8)
        finally:
            holder.kill()
            holder.communicate()


def test_model_is_open_for_writing(model, output):
    with h5py.File(model, "r+"):
        run_refused(model, output, phrases=(model, "lock"), ranks=2)


def test_model_in_a_read_only_directory(model, tmp_path):
    folder = tmp_path / "closed"
    folder.mkdir()
    os.rename(model, folder / "model.h5")
    os.chmod(folder / "model.h5", 0o444)
    os.chmod(folder, 0o555)
    try:
        decode(folder / "model.h5", tmp_path / "run.h5", ranks=2)
    finally:
        os.chmod(folder, 0o755)


def test_file_system_without_locks(model, tmp_path):
    """HDF5's own switch stands in for one: nothing is locked, everything works."""
    decode(model, tmp_path / "run.h5", ranks=2, env={"HDF5_USE_FILE_LOCKING": "FALSE"})
    refused("run", model, "--prompt", "1", "--output", tmp_path / "run.h5", phrases=("exists",),
            env={"HDF5_USE_FILE_LOCKING": "FALSE"})


# --- what a fresh reader found ----------------------------------------------------------------------------------


def test_prompt_from_a_pipe_is_read_whole(base, tmp_path):
    """A pipe cannot be opened twice: the ids before the second look were once lost."""
    ids = [n % V for n in range(1, 1200)]
    output = tmp_path / "run.h5"
    words = [harness.K3DECODE, "run", base, "--prompt-file", "/dev/stdin", "--steps", "1", "--output", output]
    done = subprocess.run(words, input=harness.ids(ids), text=True, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    with h5py.File(output, "r") as run:
        assert list(run["prompt/token_ids"]) == ids


@pytest.mark.parametrize("other", [("run", "--steps", 4), ("run", "--steps", 2, "--cache-band", "none"), ("info",)])
def test_ranks_with_other_words_are_refused(base, other):
    """mpirun's MPMD form: each would decode something else, or wait for the other for ever."""
    first = [harness.K3DECODE, "run", "--prompt", "1", "--steps", 2, base]
    second = [harness.K3DECODE, other[0], *(("--prompt", "1") if other[0] == "run" else ()), *other[1:], base]
    done = Job([MPIRUN, "-n", 1, *first, ":", "-n", 1, *second]).finish()
    assert done.status == 2 and "give all ranks the same options" in done.err, done


def test_a_program_replaced_between_two_starts(base, output, tmp_path):
    """On one host no other installation is at fault: a new file put in its place between the starts of two ranks is."""
    other = tmp_path / "k3decode"
    shutil.copy(harness.K3DECODE, other)
    with open(other, "ab") as file:
        file.write(b"another build")
    words = ("run", base, "--prompt", "1", "--steps", "1", "--output", output)
    done = Job([MPIRUN, "-n", 2, harness.K3DECODE, *words, ":", "-n", 1, other, *words]).finish()
    assert done.status == 3 and len(done.errors()) == 1, done
    assert "rank 2 of 3" in done.err and "replaced while the ranks were starting" in done.err, done
    assert not output.exists()


def test_unwritable_standard_output_is_an_error(base):
    with open("/dev/full", "w") as full:
        done = subprocess.run([harness.K3DECODE, "info", base], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 3 and "standard output" in done.stderr, done.stderr


def test_srun_without_an_mpi_plugin_is_refused(base):
    done = k3("run", base, "--prompt", "1", "--steps", 1, status=2, env={"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "3"})
    assert "--mpi=pmix" in done.err, done


def test_tokens_are_printed_on_a_terminal(base):
    """The progress bar has the line while it runs; the ids come when it ends."""
    if shutil.which("script") is None:
        pytest.skip("no script(1) to make a terminal")
    words = f"{harness.K3DECODE} run {base} --prompt 1 --steps 3"
    plain = subprocess.run(words.split(), text=True, capture_output=True, timeout=60).stdout.splitlines()[0].split()
    shown = subprocess.run(["script", "-qec", words, "/dev/null"], text=True, capture_output=True, timeout=60).stdout
    assert len(plain) == 3 and " ".join(plain) in shown


@pytest.mark.parametrize("words", [(), ("--prompt", "1"), ("other.h5",)], ids=["info", "run", "compare"])
def test_fifo_is_refused(tmp_path, words, request):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    refused(request.node.callspec.id, fifo, *words, phrases=[fifo], timeout=20)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupted_synth_leaves_nothing(tmp_path, sent):
    output = tmp_path / "big.h5"
    job = harness.start("synth", "k3:num_layers=3,num_experts=64", "--output", output)
    end = time.monotonic() + 30
    while not list(tmp_path.iterdir()) and time.monotonic() < end:
        time.sleep(0.01)
    job.process.send_signal(sent)
    done = job.finish()
    assert done.status == 3 and "stopped by signal" in done.err, done
    assert not list(tmp_path.iterdir())


def test_overwritten_output_survives_a_failed_load(base, model, tmp_path):
    """The old run goes only when there is something to put in its place."""
    output = tmp_path / "run.h5"
    k3("run", base, "--prompt", "1", "--steps", 2, "--output", output)
    before = output.read_bytes()
    with h5py.File(model, "r+") as file:
        del file["/layers/000/q_proj"]
    k3("run", model, "--prompt", "1", "--steps", 2, "--output", output, "--overwrite", status=3)
    assert output.read_bytes() == before
