"""Snapshots: a decode goes on from its file as if it had never stopped, on any number of ranks; what is damaged is refused.

    /usr/bin/python3 -m pytest tests/test_snapshot.py      (environment: see tests/harness.py)
"""
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time

import h5py
import numpy as np
import pytest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import harness          # noqa: E402
from harness import K3DECODE, K3DECODE_BREAKABLE, SEED, decode, ending, ids, k3, needs_mpirun, read_run, refused, start  # noqa: E402

pytestmark = needs_mpirun
MODEL = f"synth:tiny:seed={SEED},num_layers=5"
PROMPT = (1, 2, 3, 4, 5)
DEEP = ("--context", 700)       # pages of 64 positions: two rounds over five ranks and more
STEPS = 10
random = np.random.default_rng(SEED)


@pytest.fixture(scope="module", autouse=True)
def show_seed():
    harness.show_seed()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("snapshot")


@pytest.fixture(scope="module")
def whole(folder):
    """A run that nobody interrupts, one rank, deep."""
    return decode(MODEL, folder / "whole.h5", *DEEP, prompt=PROMPT, steps=STEPS)


@pytest.fixture(scope="module")
def snapshot(folder):
    """Its state after four steps."""
    path = folder / "four.h5"
    k3("run", MODEL, "--prompt", ids(PROMPT), "--steps", 4, *DEEP, "--snapshot", path)
    return path


def resume(snapshot, output, steps, *words, **more):
    return decode(MODEL, output, "--resume", snapshot, *words, prompt=None, steps=steps, **more)


def kl(got, want):
    def log_softmax(x):
        x = x - x.max(axis=1, keepdims=True)
        return x - np.log(np.exp(x).sum(axis=1, keepdims=True))
    p, q = log_softmax(want), log_softmax(got)
    return float((np.exp(p) * (p - q)).sum(axis=1).mean())


# ---------------------------------------------------------------- going on

@pytest.mark.parametrize("ranks, band", ((1, "context"), (2, "context"), (3, "none"), (8, "context")))
def test_same_world_is_bit_identical(tmp_path, ranks, band):
    words = (*DEEP, "--cache-band", band)
    tokens, logits = decode(MODEL, tmp_path / "whole.h5", *words, prompt=PROMPT, steps=7, ranks=ranks)
    k3("run", MODEL, "--prompt", ids(PROMPT), "--steps", 3, *words, "--snapshot", tmp_path / "s.h5", ranks=ranks)
    got = resume(tmp_path / "s.h5", tmp_path / "b.h5", 4, "--cache-band", band, ranks=ranks)
    harness.same(got, (tokens[3:], logits[3:]), 0.0)


def test_across_worlds(tmp_path, whole, snapshot):
    """1 -> 8 -> 2 ranks, banded, then every rank with all of the cache."""
    parts = [(whole[0][:4], whole[1][:4])]
    parts.append(resume(snapshot, tmp_path / "8.h5", 3, "--snapshot", tmp_path / "seven.h5", ranks=8))
    parts.append(resume(tmp_path / "seven.h5", tmp_path / "2.h5", 3, "--cache-band", "none", ranks=2))
    tokens, logits = (np.concatenate(column) for column in zip(*parts))
    assert np.array_equal(tokens, whole[0])
    divergence = kl(logits, whole[1])
    print(f"mean KL {divergence:.3g}")
    assert divergence < 1e-9


def test_cache_of_many_windows(tmp_path):
    """16 MB of the cache are on their way at once (src/decode/snapshot.c): here three times that, the last not full."""
    model, words = f"synth:tiny:seed={SEED},num_layers=4,kv_lora_rank=448", ("--context", 23000)
    tokens, logits = decode(model, tmp_path / "whole.h5", *words, prompt=(1,), steps=3, ranks=2)
    k3("run", model, "--prompt", 1, "--steps", 1, *words, "--snapshot", tmp_path / "s.h5", ranks=2)
    with h5py.File(tmp_path / "s.h5", "r") as file:
        assert file["state/cache"].size * 4 > 2.5 * 2**24
    for ranks, band in ((2, "context"), (3, "context"), (1, "none")):
        got = decode(model, tmp_path / "b.h5", "--resume", tmp_path / "s.h5", "--cache-band", band, prompt=None, steps=2, ranks=ranks)
        assert np.array_equal(got[0], tokens[1:]) and kl(got[1], logits[1:]) < 1e-9
        if ranks == 2:
            assert np.array_equal(got[1], logits[1:])


def test_state_does_not_depend_on_the_ranks(tmp_path, snapshot):
    k3("run", MODEL, "--prompt", ids(PROMPT), "--steps", 4, *DEEP, "--snapshot", tmp_path / "s.h5", ranks=3)
    with h5py.File(snapshot, "r") as a, h5py.File(tmp_path / "s.h5", "r") as b:
        for name in ("token_ids", "state/cache", "state/kda", "state/conv"):
            assert a[name].shape == b[name].shape
            assert np.abs(a[name][...] - b[name][...]).max() < 1e-4, name


def test_prompt_read_once_decoded_twice(tmp_path):
    """--steps 0 keeps the prompt; --prompt adds to it."""
    k3("run", MODEL, "--prompt", ids(PROMPT), "--steps", 0, "--snapshot", tmp_path / "p.h5", ranks=2)
    first = resume(tmp_path / "p.h5", tmp_path / "a.h5", 4, ranks=2)
    harness.same(first, decode(MODEL, tmp_path / "b.h5", prompt=PROMPT, steps=4, ranks=2), 0.0)
    longer = decode(MODEL, tmp_path / "c.h5", "--resume", tmp_path / "p.h5", prompt=(7, 8), steps=4, ranks=2)
    harness.same(longer, decode(MODEL, tmp_path / "d.h5", prompt=(*PROMPT, 7, 8), steps=4, ranks=2), 0.0)
    k3("compare", tmp_path / "d.h5", tmp_path / "c.h5", "--max-logit-error", 0)      # the prompt that the file tells is the same
    with h5py.File(tmp_path / "c.h5", "r") as run:
        assert run.attrs["resumed_position"] == 4 and str(tmp_path / "p.h5") in harness_text(run.attrs["resumed_from"])


def harness_text(value):
    return value.decode() if isinstance(value, bytes) else str(value)


def test_prompt_of_one_token(tmp_path):
    k3("run", MODEL, "--prompt", 9, "--steps", 0, "--snapshot", tmp_path / "p.h5")
    harness.same(resume(tmp_path / "p.h5", tmp_path / "a.h5", 3),
                 decode(MODEL, tmp_path / "b.h5", prompt=(9,), steps=3), 0.0)


@pytest.mark.parametrize("fault", ("restore_no_kda", "restore_no_conv", "snapshot_page_twice"))
def test_control(tmp_path, whole, fault):
    """What the comparisons above are for: a state that comes back wrong shows."""
    env = {"K3_BREAK": fault}
    k3("run", MODEL, "--prompt", ids(PROMPT), "--steps", 4, *DEEP, "--snapshot", tmp_path / "s.h5", ranks=2,
       program=K3DECODE_BREAKABLE, env=env)
    got = resume(tmp_path / "s.h5", tmp_path / "b.h5", 3, ranks=2, program=K3DECODE_BREAKABLE, env=env)
    divergence = kl(got[1], whole[1][4:7])
    print(f"mean KL {divergence:.3g}")
    assert divergence > 1e-9


def test_info_and_other_tools(snapshot):
    page = k3("info", snapshot).out
    assert "position         708" in page and "5 given, 4 decoded; 1 still to feed" in page
    with h5py.File(snapshot, "r") as file:
        assert file.attrs["format"] in (b"k3decode-snapshot", "k3decode-snapshot")
        assert len(file["token_ids"]) == 9 and file["state/cache"].shape[1] == 708
        assert np.isfinite(file["state/cache"][...]).all() and np.abs(file["state/kda"][...]).max() > 0
    if shutil.which("h5dump"):
        subprocess.run(["h5dump", "-d", "/token_ids", snapshot], check=True, stdout=subprocess.DEVNULL)


# ---------------------------------------------------------------- jobs that are stopped

def wait_for(condition, job, within=60.0):
    end = time.monotonic() + within
    while not condition():
        if time.monotonic() > end or job.process.poll() is not None:
            job.kill_all()
            pytest.fail(f"waited in vain: {job.finish()}")
        time.sleep(0.01)


def steps_of(path):
    try:
        with h5py.File(path, "r", swmr=True) as run:
            return int(run["decode/steps"][()])
    except (OSError, KeyError):
        return 0


@pytest.mark.parametrize("ranks, number", ((1, signal.SIGTERM), (1, signal.SIGINT), (2, signal.SIGUSR1)))
def test_stopped_and_continued(tmp_path, ranks, number):
    """The tokens of a job that was stopped twice and started three times are those of one that was not."""
    steps, run, state = 300, tmp_path / "run.h5", tmp_path / "state.h5"
    want = decode(MODEL, tmp_path / "whole.h5", prompt=PROMPT, steps=steps, ranks=ranks)
    words = ("run", MODEL, "--prompt", ids(PROMPT), "--steps", steps, "--output", run, "--continue", state)
    parts = [run, tmp_path / "run.2.h5", tmp_path / "run.3.h5"]
    for part in parts[:2]:
        job = start(*words, ranks=ranks)
        wait_for(lambda: steps_of(part) >= 3, job)
        job.process.send_signal(number)
        result = job.finish()
        assert result.status == 128 + number, result
        assert "stopped by signal" in ending(part) and state.exists()
    k3(*words, ranks=ranks)
    assert "done before" in k3(*words, ranks=ranks).out
    assert not (tmp_path / "run.4.h5").exists()
    got = [read_run(part) for part in parts]
    first = 0
    for part, (tokens, _) in zip(parts, got):
        with h5py.File(part, "r") as file:
            assert file.attrs["first_step"] == first
        first += len(tokens)
    harness.same(tuple(np.concatenate(column) for column in zip(*got)), want, 0.0)
    with h5py.File(state, "r") as file:
        assert np.array_equal(file["token_ids"][len(PROMPT):], want[0])


def test_stopped_while_reading_the_prompt(tmp_path):
    prompt = [int(token) for token in random.integers(0, 1000, 400)]
    state = tmp_path / "state.h5"
    (tmp_path / "prompt.txt").write_text(ids(prompt))
    words = ("run", MODEL, "--prompt-file", tmp_path / "prompt.txt", "--steps", 3, "--continue", state,
             "--snapshot-every", 20)
    job = start(*words)
    wait_for(state.exists, job)
    job.process.terminate()
    result = job.finish()
    assert result.status == 128 + signal.SIGTERM, result
    with h5py.File(state, "r") as file:
        assert 20 <= file.attrs["fed"] < 400 and len(file["token_ids"]) == 400
    k3(*words, "--output", tmp_path / "run.h5")
    harness.same(read_run(tmp_path / "run.h5"), decode(MODEL, tmp_path / "whole.h5", prompt=prompt, steps=3), 0.0)


def test_continue_begins_from_a_snapshot(tmp_path):
    """A prompt read once, and many jobs that may be requeued."""
    k3("run", MODEL, "--prompt", ids(PROMPT), "--steps", 0, "--snapshot", tmp_path / "p.h5")
    words = ("run", MODEL, "--resume", tmp_path / "p.h5", "--prompt", "7,8", "--continue", tmp_path / "job.h5")
    k3(*words, "--steps", 2, "--output", tmp_path / "a.h5")
    k3(*words, "--steps", 5, "--output", tmp_path / "a.h5")
    want = decode(MODEL, tmp_path / "whole.h5", prompt=(*PROMPT, 7, 8), steps=5)
    tokens = np.concatenate([read_run(tmp_path / name)[0] for name in ("a.h5", "a.2.h5")])
    assert np.array_equal(tokens, want[0])


def test_snapshot_every(tmp_path):
    """A killed job goes on from its last snapshot."""
    state, run = tmp_path / "state.h5", tmp_path / "run.h5"
    words = ("run", MODEL, "--prompt", ids(PROMPT), "--continue", state, "--snapshot-every", 5, "--output", run)
    job = start(*words, "--steps", 100000)
    wait_for(lambda: steps_of(run) >= 12, job)
    job.process.kill()
    job.finish()
    with h5py.File(state, "r") as file:
        known = len(file["token_ids"])
        assert known >= 10 and file.attrs["fed"] % 5 == 0
    k3(*words, "--steps", 40)
    want = decode(MODEL, tmp_path / "whole.h5", prompt=PROMPT, steps=40)
    with h5py.File(tmp_path / "run.2.h5", "r") as file:
        first = int(file.attrs["first_step"])
    assert first == known - len(PROMPT)
    harness.same(read_run(tmp_path / "run.2.h5"), (want[0][first:], want[1][first:]), 0.0)


def test_stop_waits_for_the_snapshot(tmp_path):
    """A signal while a snapshot is written: the file becomes whole all the same."""
    state = tmp_path / "state.h5"
    job = start("run", MODEL, "--prompt", ids(PROMPT), "--steps", 100000,
                "--snapshot", state, "--snapshot-every", 1)
    wait_for(state.exists, job)
    job.process.terminate()
    assert job.finish().status == 128 + signal.SIGTERM
    k3("info", state)
    assert not (tmp_path / "state.h5.partial").exists()


# ---------------------------------------------------------------- damage

def flip(source, target, bit):
    data = bytearray(source.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    target.write_bytes(data)


def test_flipped_bit(tmp_path, snapshot):
    """Anywhere: the seal, HDF5's own structures, attributes, tokens, states."""
    size, target = snapshot.stat().st_size * 8, tmp_path / "flipped.h5"
    bits = [*random.integers(0, size, 150), *random.integers(0, 512 * 8, 25), *random.integers(512 * 8, 40000 * 8, 25)]
    for bit in bits:
        flip(snapshot, target, int(bit))
        refused("info", target, phrases=[target])
    for bit in (bits[0], bits[150], bits[175]):
        flip(snapshot, target, int(bit))
        for ranks in (1, 3):
            refused("run", MODEL, "--resume", target, "--steps", 2, phrases=[target], ranks=ranks)


def test_flipped_bit_control(tmp_path, snapshot):
    """Without the seal's digest, flipped numbers pass."""
    target = tmp_path / "flipped.h5"
    with h5py.File(snapshot, "r") as file:
        offset = file["state/kda"].id.get_offset() + 512      # HDF5 counts from the end of the user block
    flip(snapshot, target, 8 * offset + 22)
    refused("info", target)
    k3("info", target, program=K3DECODE_BREAKABLE, env={"K3_BREAK": "seal_unchecked"})


@pytest.mark.parametrize("length", (0, 100, 511, 512, 2048, 0.5, -4096, -1))
def test_truncated(tmp_path, snapshot, length):
    data = snapshot.read_bytes()
    target = tmp_path / "cut.h5"
    target.write_bytes(data[:int(length * len(data)) if isinstance(length, float) else length])
    refused("run", MODEL, "--resume", target, "--steps", 2, phrases=[target], ranks=2)


def test_bytes_added(tmp_path, snapshot):
    target = tmp_path / "long.h5"
    target.write_bytes(snapshot.read_bytes() + b"\0")
    refused("run", MODEL, "--resume", target, "--steps", 2, phrases=["bytes were added"])


def test_of_another_model(tmp_path, snapshot):
    refused("run", f"synth:tiny:seed={SEED + 1},num_layers=5", "--resume", snapshot, "--steps", 2, ranks=2,
            phrases=["is of another model", "digest"])
    refused("run", f"synth:tiny:seed={SEED},num_layers=6", "--resume", snapshot, "--steps", 2,
            phrases=["is of another model", "num_layers is 5 there and 6 here"])


def test_not_a_snapshot(tmp_path, folder, whole):
    refused("run", MODEL, "--resume", folder / "whole.h5", "--steps", 2, phrases=["no k3decode-snapshot"])
    refused("run", MODEL, "--resume", tmp_path / "none.h5", "--steps", 2, phrases=["none.h5", "cannot open"])
    refused("run", MODEL, "--resume", tmp_path, "--steps", 2, phrases=["no plain file"])


def test_longer_than_the_context(tmp_path):
    model = f"{MODEL},max_context=12"
    k3("run", model, "--prompt", ids(PROMPT), "--steps", 6, "--snapshot", tmp_path / "s.h5")
    refused("run", model, "--resume", tmp_path / "s.h5", "--steps", 4, phrases=["10 positions cached", "max_context is 12"])
    k3("run", model, "--resume", tmp_path / "s.h5", "--steps", 2)


def digest_words(state, data):
    """As k3_digest_words of src/store/digest.c, for whole words and a rest."""
    mask = (1 << 64) - 1
    whole = len(data) // 8 * 8
    for (word,) in struct.iter_unpack("<Q", data[:whole]):
        state = ((state ^ word) * 0x9E3779B97F4A7C15) & mask
        state ^= state >> 32
    for byte in data[whole:]:
        state = ((state ^ byte) * 0x100000001B3) & mask
    return state


def seal(path):
    """Seals a file that was written by other means (src/store/seal.h)."""
    data, mask, block = path.read_bytes(), (1 << 64) - 1, 4 << 20
    total = 0
    for index, at in enumerate(range(512, len(data), block)):
        state = 0xCBF29CE484222325
        for byte in struct.pack("<Q", index):
            state = ((state ^ byte) * 0x100000001B3) & mask
        total = (total + digest_words(state, data[at:at + block])) & mask
    text = f"k3decode-snapshot 1\nbytes {len(data)}\ndigest {total:016x}\n".encode()
    path.write_bytes(text.ljust(512, b"\0") + data[512:])


def with_cache(snapshot, target, name, values):
    """The snapshot with another cache; written by h5py, so that nothing hangs on one writer."""
    with h5py.File(snapshot, "r") as a, h5py.File(target, "w", userblock_size=512) as b:
        for key, value in a.attrs.items():
            b.attrs[key] = value
        b.attrs["cache_type"] = name
        a.copy("config", b)
        a.copy("token_ids", b)
        group = b.create_group("state")
        a.copy("state/kda", group)
        a.copy("state/conv", group)
        group.create_dataset("cache", data=values)
    seal(target)
    return target


def test_narrow_cache_is_widened_exactly(tmp_path, snapshot):
    with h5py.File(snapshot, "r") as file:
        cache = file["state/cache"][...]
    half = cache.astype(np.float16)
    brain = cache.view(np.uint32) >> 16
    for name, narrow, wide in (("f16", half.view(np.uint16), half.astype(np.float32)),
                               ("bf16", brain.astype(np.uint16), (brain << 16).astype(np.uint32).view(np.float32))):
        a = with_cache(snapshot, tmp_path / f"{name}.h5", name, narrow)
        b = with_cache(snapshot, tmp_path / f"{name}-wide.h5", "f32", wide)
        harness.same(resume(a, tmp_path / "a.h5", 3, ranks=2), resume(b, tmp_path / "b.h5", 3, ranks=2), 0.0)
    broken = with_cache(snapshot, tmp_path / "x.h5", "f16", half)
    refused("run", MODEL, "--resume", broken, "--steps", 2, phrases=["/state/cache", "another type"])
    short = with_cache(snapshot, tmp_path / "y.h5", "f32", cache[:, 1:])
    refused("run", MODEL, "--resume", short, "--steps", 2, phrases=["/state/cache has 707 along axis 1, wanted 708"])


# ---------------------------------------------------------------- places that cannot be written

def snapshot_refused(path, *words, phrases=(), ranks=1, status=3, **more):
    return refused("run", MODEL, "--prompt", "1,2", "--steps", 2, "--snapshot", path, *words, phrases=phrases, ranks=ranks,
                   status=status, **more)


def test_places(tmp_path, folder, whole):
    snapshot_refused(tmp_path / "no" / "s.h5", phrases=["no such directory"], ranks=2)
    snapshot_refused(tmp_path, phrases=["is a directory"])
    too_long = snapshot_refused(tmp_path / ("s" * 250), phrases=["File name too long"])
    assert not too_long.out                                  # before a token was decoded
    (tmp_path / "text").write_text("mine")
    snapshot_refused(tmp_path / "text", phrases=["exists"])
    snapshot_refused(tmp_path / "text", "--overwrite", phrases=["is not a snapshot"])
    shutil.copy(folder / "whole.h5", tmp_path / "run.h5")
    snapshot_refused(tmp_path / "run.h5", "--overwrite", phrases=["is not a snapshot"])
    snapshot_refused(tmp_path / "s.h5", "--output", tmp_path / "s.h5", status=2, phrases=["two names"])
    snapshot_refused(tmp_path / "s.h5", "--output", f"{tmp_path}/./s.h5", status=2, phrases=["two names"], ranks=2)
    assert (tmp_path / "text").read_text() == "mine" and not (tmp_path / "s.h5").exists()
    k3("run", MODEL, "--prompt", "1,2", "--steps", 2, "--snapshot", tmp_path / "s.h5")
    snapshot_refused(tmp_path / "s.h5", phrases=["exists"])
    k3("run", MODEL, "--prompt", "1,2", "--steps", 2, "--snapshot", tmp_path / "s.h5", "--overwrite")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_unwritable_folder(tmp_path):
    tmp_path.chmod(0o500)
    snapshot_refused(tmp_path / "s.h5", phrases=["cannot be written"])


def test_disk_full(tmp_path):
    """The state will not fit: refused before the decode. The disk fills up meanwhile: the steps are kept, and the snapshot that was there."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", disk], capture_output=True).returncode:
        pytest.skip("needs root and mount, for a small tmpfs")
    try:
        path = disk / "s.h5"
        k3("run", MODEL, "--prompt", "1,2", "--steps", 2, "--snapshot", path)
        before = path.read_bytes()
        run = tmp_path / "run.h5"
        result = snapshot_refused(path, "--overwrite", "--context", 9000, "--output", run, phrases=["too full: the snapshot has up to"], ranks=2)
        assert path.read_bytes() == before and os.listdir(disk) == ["s.h5"] and not run.exists() and not result.out, result
        job = start("run", MODEL, "--prompt", "1,2", "--steps", 300, "--snapshot", path, "--overwrite", "--output", run, ranks=2)
        while not run.exists():
            assert job.process.poll() is None
            time.sleep(0.01)
        (disk / "filler").write_bytes(bytes(os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize - 16384))
        result = job.finish()
        assert result.status == 3 and "no room for" in result.err, result
        assert path.read_bytes() == before and sorted(os.listdir(disk)) == ["filler", "s.h5"], result
        assert ending(run) == "done"                             # the steps are kept
    finally:
        subprocess.run(["umount", disk], check=True)


def test_limit_on_file_size(tmp_path):
    job = subprocess.run([K3DECODE, "run", MODEL, "--prompt", "1,2", "--steps", "2", "--context", "60000",
                          "--snapshot", tmp_path / "s.h5"], capture_output=True,     # 38 MB; MPI's own files take some MB
                         preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 24, 1 << 24)),
                         text=True, env={**harness.SETTINGS, **os.environ})
    assert job.returncode == 3 and "the snapshot has up to" in job.stderr and "ulimit -f" in job.stderr, job.stderr
    assert not os.listdir(tmp_path)


def test_two_writers(tmp_path):
    """A leftover of a killed run is replaced; one that a living process holds is not."""
    import fcntl
    partial = tmp_path / "s.h5.partial"
    partial.write_bytes(bytes(100))
    with open(partial, "r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        snapshot_refused(tmp_path / "s.h5", phrases=["another process is writing"])
    k3("run", MODEL, "--prompt", "1,2", "--steps", 2, "--snapshot", tmp_path / "s.h5")
    assert not partial.exists()


# ---------------------------------------------------------------- usage

@pytest.mark.parametrize("words, status, phrase", (
    (("--prompt", "1", "--steps", "0"), 2, "it goes with --snapshot"),
    (("--prompt", "1", "--steps", "0", "--snapshot", "s.h5", "--output", "r.h5"), 2, "leave --output out"),
    (("--prompt", "1", "--snapshot", "s.h5", "--continue", "s.h5"), 2, "leave --snapshot out"),
    (("--prompt", "1", "--snapshot-every", "5"), 2, "goes with --snapshot"),
    (("--prompt", "1", "--snapshot", "s.h5", "--slice", "0/2"), 2, "no whole state"),
    (("--resume", "s.h5", "--context", "5"), 2, "leave --context out"),
    (("--continue", "none.h5"), 2, "a prompt is missing"),
))
def test_usage(tmp_path, words, status, phrase):
    refused("run", MODEL, *words, status=status, phrases=[phrase], cwd=tmp_path)
    assert not os.listdir(tmp_path)


def test_continue_wants_the_same_job(tmp_path):
    state = tmp_path / "s.h5"
    k3("run", MODEL, "--prompt", "1,2,3", "--steps", 2, "--continue", state)
    for prompt in ("1,2,4", "2,3", "1,2,3,4"):
        refused("run", MODEL, "--prompt", prompt, "--steps", 4, "--continue", state, phrases=["continues another prompt"], ranks=2)
    refused("run", MODEL, "--prompt", "1,2,3", "--context", 9, "--steps", 4, "--continue", state, phrases=["--context 0"])
    flip(state, state, 8 * 3000)
    refused("run", MODEL, "--prompt", "1,2,3", "--steps", 4, "--continue", state, phrases=["damaged"])


@pytest.mark.parametrize("lacks", (0, 1))
def test_continue_wants_the_snapshot_on_all_ranks(tmp_path, lacks):
    """Two ranks that look in two folders, as on two hosts without a shared disk."""
    folders = [tmp_path / "0", tmp_path / "1"]
    words = ("run", MODEL, "--prompt", "1,2", "--steps", 2, "--continue", "s.h5")
    for folder in folders:
        folder.mkdir()
    k3(*words, cwd=folders[1 - lacks])
    refused(*words, mpi=("-n", 1, "--wdir", folders[0], K3DECODE, *words, ":", "--wdir", folders[1]),
            phrases=["s.h5", "missing where rank 0 looks" if lacks == 0 else "rank 1 of 2"])
    assert not os.listdir(folders[lacks])
