"""`k3decode tune` and --tuning as far as they go without a GPU: the file's page, refusals. The choice and the plan that takes it:
tests/test_tuning.c; the measuring itself: jobs/attention_check.sh.

    /usr/bin/python3 -m pytest tests/test_tune.py      (environment: see tests/harness.py)
"""
import os
import re
import subprocess

import h5py
import numpy as np
import pytest

from harness import k3, needs_mpirun, refused

WHOLE = ("kernel", "heads", "rows", "heads_per_pass", "tile_rows", "passes", "slices", "blocks", "registers", "shared_bytes",
         "blocks_per_sm", "planned", "step", "chosen", "rows_from", "rows_to")
REAL = ("slice_ms", "slice_p10", "slice_p90", "ms", "p10", "p90", "gbs")
GPU = subprocess.run(["sh", "-c", "nvidia-smi -L 2>/dev/null | grep -q '^GPU '"]).returncode == 0


def write_tuning(path, device="NVIDIA H200"):
    """Two trials: the planner's own, and a faster one that is chosen."""
    rows = [dict(kernel=1, heads=96, rows=16384, heads_per_pass=48, tile_rows=64, passes=2, slices=66, blocks=132, registers=125,
                 shared_bytes=218120, blocks_per_sm=1, planned=1, slice_ms=0.021, ms=0.025),
            dict(kernel=1, heads=96, rows=16384, heads_per_pass=24, tile_rows=64, passes=4, slices=33, blocks=132, registers=77,
                 shared_bytes=207960, blocks_per_sm=1, step=1, chosen=1, rows_from=8193, rows_to=32768, slice_ms=0.018, ms=0.020)]
    with h5py.File(path, "w") as file:
        for name, value in dict(format="k3decode-tuning", program_version="0.1.0", command="k3decode tune synth:k3",
                                start_time="2026-01-01T00:00:00Z", versions="some", model="synth:k3", device_line="a GPU",
                                device=device, kernels="sources 1, CUDA 13.0", cache="f16").items():
            file.attrs[name] = value
        for name, value in dict(format_version=1, multiprocessors=132, num_heads=96, kv_lora_rank=512, qk_rope_head_dim=64).items():
            file.attrs[name] = np.int64(value)
        file.attrs["model_digest"] = np.uint64(2**64 - 1)
        for name in WHOLE:
            file[f"trials/{name}"] = np.array([row.get(name, 0) for row in rows], np.int64)
        for name in REAL:
            file[f"trials/{name}"] = np.array([row.get(name, 0.5) for row in rows])


@pytest.fixture
def tuning(tmp_path):
    path = tmp_path / "tune.h5"
    write_tuning(path)
    return path


def test_info_of_a_tuning_file(tuning):
    out = k3("info", tuning).out
    assert "# k3decode tune synth:k3\n" in out and "kernels sources 1, CUDA 13.0" in out and "cache in f16" in out
    table, choices = out.split("# chosen:")
    trials = re.findall(r"^  tensor +96 +16384 +(\d+) +64 +(\d+) +(\d+) +132 .* (\d+) +(\d+) +(\d+) +1  (.*)$", table, re.M)
    assert [row[:6] for row in trials] == [("48", "2", "66", "0", "125", "218120"), ("24", "4", "33", "0", "77", "207960")]
    assert trials[0][6].strip() == "planner's" and trials[1][6].strip() == "chosen occupancy step"
    assert re.search(r"tensor +96 +8193 +32768 +24 +33 +0\.02000 +0\.02500 +1\.25", choices)
    assert "1 trials stand behind a step" in choices


def test_info_refuses_damaged_files(tuning):
    refused("info", tuning, "--plan", "--ranks", 2, status=2, phrases=["--check and --plan are for model files"])
    with h5py.File(tuning, "r+") as file:
        file["trials/heads_per_pass"][1] = 0
    refused("info", tuning, phrases=["trial 1", "no trial is like that"])
    with h5py.File(tuning, "r+") as file:
        file.attrs["format_version"] = np.int64(2)
    refused("info", tuning, phrases=["format_version 2", "this program reads 1"])


@needs_mpirun
def test_the_host_backend_takes_no_tuning(tuning, tmp_path):
    for command in (("run", "synth:tiny", "--prompt", 1), ("sweep", "synth:tiny", "--contexts", 8)):
        refused(*command, "--backend", "host", "--tuning", tuning, "--output", tmp_path / "out.h5",
                phrases=["was tuned on another device: NVIDIA H200", "host backend"])
    refused("run", "synth:tiny", "--prompt", 1, "--backend", "host", "--tuning", tuning, ranks=2, phrases=["NVIDIA H200"])
    for name in ("none.h5", "notes.txt"):
        if name == "notes.txt":
            (tmp_path / name).write_text("mine")
        refused("run", "synth:tiny", "--prompt", 1, "--backend", "host", "--tuning", tmp_path / name, phrases=[name, "cannot open"])
    k3("synth", "tiny:num_layers=1", "--output", tmp_path / "model.h5")
    refused("run", "synth:tiny", "--prompt", 1, "--tuning", tmp_path / "model.h5", phrases=["is no tuning file"])
    assert sorted(os.listdir(tmp_path)) == ["model.h5", "notes.txt", "tune.h5"]


@pytest.mark.parametrize("words, status, phrase", [
    ((), 2, "a model is missing"),
    (("synth:tiny", "synth:k3"), 2, "more than one model"),
    (("synth:tiny", "--ranks", 2, "--slice", "0/2"), 2, "exclude each other"),
    (("synth:tiny", "--ranks", 0), 2, "--ranks 0"),
    (("synth:tiny", "--contexts", "64,8"), 2, "wanted ascending"),
    (("synth:tiny", "--contexts", "200000"), 3, "max_context is 131072"),
    (("synth:tiny", "--cache", "f8"), 2, "--cache f8"),
    (("synth:tiny:layer_types=000"), 3, "no MLA layer"),
    (("synth:tiny", "--ranks", 9), 3, ""),
    (("synth:tiny", "--steps", 1), 2, "unknown option"),
])
def test_bad_input_is_refused(tmp_path, words, status, phrase):
    words = (words,) if isinstance(words, str) else words
    refused("tune", *words, "--output", tmp_path / "tune.h5", status=status, phrases=[phrase])
    assert os.listdir(tmp_path) == []


def test_output_is_refused_before_anything_is_measured(tuning, tmp_path):
    refused("tune", "synth:tiny", "--output", tuning, phrases=["exists; give another path, or --overwrite"])
    (tmp_path / "notes.txt").write_text("mine")
    refused("tune", "synth:tiny", "--output", tmp_path / "notes.txt", "--overwrite", phrases=["is not a tuning file"])
    refused("tune", "synth:tiny", "--output", tmp_path / "none" / "tune.h5", phrases=["no such directory"])
    assert (tmp_path / "notes.txt").read_text() == "mine"


@needs_mpirun
def test_several_ranks_are_refused():
    refused("tune", "synth:tiny", ranks=2, status=2, phrases=["one process on one GPU"])


@pytest.mark.skipif(GPU, reason="needs a machine without a GPU")
def test_without_a_gpu(tmp_path):
    refused("tune", "synth:tiny", "--output", tmp_path / "tune.h5", status=4, phrases=[""])
    message = k3("tune", "synth:tiny", status=4).err
    assert re.search("no GPU is visible|driver cannot serve|no CUDA backend", message), message
    assert os.listdir(tmp_path) == []
