"""Files of k3decode against doc/file_schema.json, each kind with what must be found out; and the HDF5 tools and h5py on
them, without any code of ours."""
import json
import re
import shutil
import subprocess
import sys

import h5py
import numpy as np
import pytest

import test_tune
from harness import SEED, TESTS, k3, needs_mpirun, show_seed

pytest.importorskip("jsonschema", reason="needs jsonschema (Debian: python3-jsonschema)")
sys.path.insert(0, str(TESTS.parent / "jobs"))
import validate_h5                                                  # noqa: E402

SCHEMA = validate_h5.load_schema()
SMALL = "synth:tiny:num_layers=4"


def tool(name):
    return pytest.mark.skipif(shutil.which(name) is None, reason=f"needs {name} (Debian: hdf5-tools)")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One file of each kind: name -> path."""
    at = tmp_path_factory.mktemp("schema")
    k3("synth", "tiny:num_layers=4", "--output", at / "synth.h5")
    k3("synth", "k3:num_layers=2,num_experts=8,num_experts_per_token=2,hidden_size=256,vocab_size=512,num_heads=8,experts=iq1_s,"
       "max_context=4096,moe_intermediate_size=256,latent_size=256,dense_intermediate_size=256", "--output", at / "blocks.h5")
    k3("import", TESTS / "fixtures" / "public_k3" / "mxfp4", "--output", at / "import.h5")
    for kind in ("all", "none", "top:3"):
        k3("run", SMALL, "--backend", "host", "--prompt", "1,2,3", "--steps", 5, "--logits", kind, "--output",
           at / f"run_{kind.replace(':', '')}.h5")
    k3("run", SMALL, "--backend", "host", "--context", 9, "--slice", "1/2", "--steps", 2, "--output", at / "run_slice.h5")
    k3("run", SMALL, "--backend", "host", "--prompt", "1,2,3", "--steps", 0, "--snapshot", at / "snapshot.h5")
    k3("run", SMALL, "--backend", "host", "--resume", at / "snapshot.h5", "--prompt", 4, "--steps", 2, "--output", at / "run_resumed.h5")
    k3("sweep", SMALL, "--backend", "host", "--contexts", "8,70", "--steps", 3, "--repeats", 2, "--output", at / "sweep.h5")
    return at


KINDS = ("synth", "blocks", "import", "run_all", "run_none", "run_top3", "run_slice", "run_resumed", "snapshot", "sweep")


@pytest.mark.parametrize("name", KINDS)
def test_file_is_as_the_schema_says(folder, name):
    assert validate_h5.faults(folder / f"{name}.h5", SCHEMA) == []


@needs_mpirun
def test_file_of_two_ranks_is_as_the_schema_says(tmp_path):
    k3("run", SMALL, "--backend", "host", "--prompt", "1,2", "--steps", 3, "--output", tmp_path / "two.h5", ranks=2)
    assert validate_h5.faults(tmp_path / "two.h5", SCHEMA) == []


def test_schema_itself_is_sound():
    import jsonschema
    for name, part in SCHEMA["formats"].items():
        jsonschema.Draft202012Validator.check_schema({**part, "$defs": SCHEMA["$defs"]})
        assert part["properties"]["attributes"]["properties"]["format"]["const"] == name


@pytest.mark.parametrize("name", KINDS)
def test_every_numeric_dataset_has_units(folder, name):
    """The same by h5py alone, so that the schema cannot forget it."""
    without = []
    with h5py.File(folder / f"{name}.h5", "r") as file:
        file.visititems(lambda path, item: without.append(path) if isinstance(item, h5py.Dataset) and
                        item.dtype.kind in "iuf" and "units" not in item.attrs else None)
    assert without == []


# ---------------------------------------------------------------- what must be found out

def drop(path):
    def change(file):
        del file[path]
    return change


def replace(path, change_value):
    def change(file):
        attributes, value = dict(file[path].attrs), change_value(file[path][()])
        del file[path]
        file[path] = value
        file[path].attrs.update(attributes)
    return change


def attribute(path, name, value=None):
    def change(file):
        if value is None:
            del file[path].attrs[name]
        else:
            file[path].attrs[name] = value
    return change


def add(path):
    def change(file):
        file[path] = np.zeros(3)
    return change


CONTROLS = [
    ("synth", "lm_head", drop("lm_head")),
    ("synth", "units", attribute("embed", "units")),
    ("synth", "float64", replace("layers/000/input_norm", lambda x: x.astype(np.float64))),
    ("synth", "axis vocab_size", replace("lm_head", lambda x: x[:-1])),
    ("synth", "layers/000/q_proj", replace("layers/000/q_proj", lambda x: x.ravel())),
    ("synth", "hidden_size", attribute("config", "hidden_size", 1.5)),
    ("blocks", "shape", attribute("layers/001/experts_up", "shape")),
    ("blocks", "type", attribute("layers/001/experts_up", "type")),
    ("import", "unwanted", add("layers/000/unwanted")),
    ("run_all", "axis ranks", replace("timings/rank_step_ms", lambda x: np.repeat(x, 2, axis=1))),
    ("run_all", "at least", replace("timings/step_ms", lambda x: x[:-1])),
    ("run_all", "'float64' was expected", replace("timings/step_ms", lambda x: x.astype(np.float32))),
    ("run_all", "'s' is not one of", attribute("timings/step_ms", "units", "s")),
    ("run_all", "meaning", attribute("timings/phase_ms", "meaning")),
    ("run_all", "/decode/logits", drop("decode/logits")),
    ("run_all", "command", attribute("/", "command")),
    ("run_all", "format", attribute("/", "format", "k3decode-walk")),
    ("run_all", "start_time", attribute("/", "start_time", "yesterday")),
    ("run_none", "/decode/extra", add("decode/extra")),
    ("run_top3", "axis top", replace("decode/top_logits", lambda x: x[:, :-1])),
    ("run_slice", "kind", attribute("/", "kind", "piece 1/2")),
    ("run_resumed", "resumed_from", attribute("/", "resumed_from")),
    ("snapshot", "axis position", replace("state/cache", lambda x: x[:, :-1])),
    ("snapshot", "axis kda_head_dim", replace("state/kda", lambda x: x[..., :-1])),
    ("snapshot", "/state/conv", drop("state/conv")),
    ("snapshot", "units", attribute("token_ids", "units", "byte")),
    ("snapshot", "cache_type", attribute("/", "cache_type", "q8_0")),
    ("sweep", "axes, wanted", replace("timings/step_ms", lambda x: x[0])),
    ("sweep", "axis contexts", replace("curve/floor_ms", lambda x: x[:1])),
    ("sweep", "/arms/names", drop("arms/names")),
    ("sweep", "repeats", attribute("/", "repeats", 3)),
]


@pytest.mark.parametrize("name, phrase, change", CONTROLS, ids=[f"{name}-{i}" for i, (name, _, _) in enumerate(CONTROLS)])
def test_damage_is_found_control(folder, tmp_path, name, phrase, change):
    path = tmp_path / "changed.h5"
    shutil.copy(folder / f"{name}.h5", path)
    with h5py.File(path, "r+") as file:
        change(file)
    found = validate_h5.faults(path, SCHEMA)
    assert found and any(phrase in fault for fault in found), found


UNITS = {"heads": "head", "heads_per_pass": "head", "rows": "row", "tile_rows": "row", "rows_from": "row", "rows_to": "row",
         "shared_bytes": "byte", "gbs": "GB/s", **dict.fromkeys(test_tune.REAL[:-1], "ms")}


@pytest.mark.parametrize("phrase, change", [
    (None, lambda file: None), ("/trials/chosen", drop("trials/chosen")), ("'head' was expected", attribute("trials/heads", "units", "row")),
    ("axis trials", replace("trials/slices", lambda x: x[:-1])), ("int64", replace("trials/rows", lambda x: x.astype(np.float64))),
    ("kernels", attribute("/", "kernels")), ("cache", attribute("/", "cache", "f8"))])
def test_tuning_file_and_its_controls(tmp_path, phrase, change):
    """tests/test_tuning.c checks what the program writes; tuning itself wants a GPU."""
    path = tmp_path / "tune.h5"
    test_tune.write_tuning(path)
    with h5py.File(path, "r+") as file:
        for name in (*test_tune.WHOLE, *test_tune.REAL):
            file[f"trials/{name}"].attrs.update(dict(units=UNITS.get(name, "1"), axes="trial", meaning="as in tuning_file.c"))
        change(file)
    found = validate_h5.faults(path, SCHEMA)
    assert (phrase is None and found == []) or (phrase and any(phrase in fault for fault in found)), found


def test_script_says_what_is_wrong(folder, tmp_path):
    bad = tmp_path / "bad.h5"
    shutil.copy(folder / "run_none.h5", bad)
    with h5py.File(bad, "r+") as file:
        del file["ending"]
    script = [sys.executable, TESTS.parent / "jobs" / "validate_h5.py"]
    good = subprocess.run([*script, folder / "run_none.h5"], capture_output=True, text=True)
    assert good.returncode == 0 and "as the schema says" in good.stdout
    both = subprocess.run([*script, folder / "run_none.h5", bad], capture_output=True, text=True)
    assert both.returncode == 1 and "1 faults" in both.stdout and "/ending" in both.stdout
    assert subprocess.run([*script, __file__], capture_output=True).returncode == 3
    assert subprocess.run(script, capture_output=True).returncode == 2


# ---------------------------------------------------------------- the tools of HDF5

def run_tool(*words):
    return subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=60)


@tool("h5ls")
@pytest.mark.parametrize("name", KINDS)
def test_h5ls_lists_every_dataset(folder, name):
    done = run_tool("h5ls", "-r", folder / f"{name}.h5")
    assert done.returncode == 0 and not done.stderr, done
    with h5py.File(folder / f"{name}.h5", "r") as file:
        paths = []
        file.visit(paths.append)
    listed = [line.split()[0] for line in done.stdout.splitlines()]
    assert sorted(listed) == sorted(["/"] + ["/" + path for path in paths])


@tool("h5dump")
@pytest.mark.parametrize("name", KINDS)
def test_h5dump_prints_all_of_it(folder, name):
    done = run_tool("h5dump", folder / f"{name}.h5")
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert "unable" not in done.stdout
    assert done.stdout.count('ATTRIBUTE "units"') >= (6 if name.startswith("run") else 1)


@tool("h5dump")
def test_h5dump_and_h5py_see_the_tokens_that_were_printed(folder, tmp_path):
    path = tmp_path / "run.h5"
    out = k3("run", SMALL, "--backend", "host", "--prompt", "1,2,3", "--steps", 5, "--output", path).out
    printed = [int(word) for word in out.splitlines()[0].split()]
    dumped = run_tool("h5dump", "-y", "-d", "/decode/token_ids", path).stdout
    data = re.search(r"DATA \{(.*?)\}", dumped, re.S)[1]
    assert [int(word) for word in re.findall(r"\d+", data)] == printed
    with h5py.File(path, "r") as file:
        assert file["decode/token_ids"][:].tolist() == printed
        assert np.isfinite(file["decode/logits"][:]).all()
        assert file["decode/logits"][:].argmax(axis=1).tolist() == printed


@tool("h5diff")
def test_h5diff_tells_equal_runs_from_different_ones(folder, tmp_path):
    again = tmp_path / "again.h5"
    k3("run", SMALL, "--backend", "host", "--prompt", "1,2,3", "--steps", 5, "--output", again)
    for path in ("/decode/token_ids", "/decode/logits", "/prompt", "/config"):
        same = run_tool("h5diff", folder / "run_all.h5", again, path, path)
        assert same.returncode == 0, (path, same)
    k3("run", SMALL, "--backend", "host", "--prompt", "1,2,4", "--steps", 5, "--output", again, "--overwrite")
    for path in ("/decode/logits", "/prompt"):
        other = run_tool("h5diff", folder / "run_all.h5", again, path, path)
        assert other.returncode == 1 and "differences found" in other.stdout, (path, other)


@tool("h5diff")
def test_h5diff_finds_two_synthetic_models_equal_and_one_of_another_seed_not(folder, tmp_path):
    k3("synth", "tiny:num_layers=4", "--output", tmp_path / "same.h5")
    k3("synth", "tiny:num_layers=4", "--seed", SEED + 7, "--output", tmp_path / "other.h5")
    show_seed()
    assert run_tool("h5diff", folder / "synth.h5", tmp_path / "same.h5").returncode == 0
    assert run_tool("h5diff", folder / "synth.h5", tmp_path / "other.h5").returncode == 1


# ---------------------------------------------------------------- layout

def test_chunks_are_as_documented(folder):
    """A row of the logits a chunk, at most 8 KiB of anything else, no filter."""
    with h5py.File(folder / "run_all.h5") as file:
        vocabulary = int(file["config"].attrs["vocab_size"])
        assert file["decode/logits"].chunks[1] == vocabulary
        for name in ("decode/token_ids", "timings/step_ms", "timings/rank_step_ms", "timings/phase_ms"):
            assert np.prod(file[name].chunks) * file[name].dtype.itemsize <= 8192
        file.visititems(lambda name, item: pytest.fail(name) if isinstance(item, h5py.Dataset) and
                        (item.compression or item.shuffle) else None)


def test_layout_table_can_be_made_again(folder):
    script = TESTS.parent / "jobs" / "run_file_layout.py"
    done = run_tool(sys.executable, script, folder / "run_all.h5", "--repeats", 1)
    assert done.returncode == 0, done
    rows = [re.split(r"  +", line) for line in done.stdout.splitlines() if not line.startswith("#")]
    kept = (TESTS.parent / "output" / "reference" / "run_file_layout.txt").read_text()
    assert rows[1][0] == "chosen" and len(rows) == 14
    assert all(row[0] in kept for row in rows)
    assert run_tool(sys.executable, script, folder / "run_none.h5").returncode == 3


# ---------------------------------------------------------------- what the documents say

def python_examples(path):
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.S)


def test_h5py_example_of_the_readme_runs(folder, tmp_path):
    """As printed, beside a run where the README's is."""
    examples = python_examples(TESTS.parent / "output" / "README.md")
    assert examples
    (tmp_path / "output").mkdir()
    shutil.copy(folder / "run_all.h5", tmp_path / "output" / "quickstart.h5")
    for example in examples:
        done = subprocess.run([sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done
        with h5py.File(folder / "run_all.h5", "r") as run:
            steps = int(run["decode/steps"][()])
            for token in run["decode/token_ids"][:steps]:
                assert str(token) in done.stdout
            assert f"{np.median(run['timings/step_ms'][:steps]):.3f} ms" in done.stdout
            assert f"{run['timings/phase_ms'][:steps].mean(axis=(0, 1)).max():.3f} ms" in done.stdout


def test_first_screen_quotes_the_run_that_is_kept():
    """Every line of the README's transcript stands in output/reference/quickstart.txt."""
    text = (TESTS.parent / "README.md").read_text()
    block = text[text.index("    $ mpirun --oversubscribe"):text.index("## The main job")]
    kept = (TESTS.parent / "output" / "reference" / "quickstart.txt").read_text().splitlines()
    quoted = [line[4:] for line in block.splitlines() if line.startswith("    ") and line.strip() != "…"]
    assert len(quoted) > 8 and [line for line in quoted if line not in kept] == []


@pytest.mark.parametrize("name", ("run_all", "run_top3", "run_resumed", "snapshot", "sweep"))
def test_readme_names_every_dataset(folder, name):
    text = (TESTS.parent / "output" / "README.md").read_text()
    missing = []
    with h5py.File(folder / f"{name}.h5", "r") as file:
        file.visititems(lambda path, item: missing.append(path) if isinstance(item, h5py.Dataset) and
                        f"/{path}`" not in text and path != "config/layer_types" else None)
        missing += [key for key in file.attrs if f"`{key}`" not in text]
    assert missing == []


def test_schema_file_is_readable_json():
    """Short lines, so that a change of it can be reviewed."""
    text = validate_h5.SCHEMA.read_text()
    assert json.loads(text) == SCHEMA and max(map(len, text.splitlines())) <= 600
