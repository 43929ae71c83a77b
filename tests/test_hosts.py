"""Two hosts, made of two network namespaces of this machine with names of their own: mpirun starts ranks on both, the ranks talk over
TCP, and hosts with different programs or models are found out before decoding. Needs root (namespaces) and Open MPI.

    /usr/bin/python3 -m pytest tests/test_hosts.py      (environment: see tests/harness.py)
"""
import os
import shutil
import subprocess
import sys
import uuid

import h5py
import pytest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import harness          # noqa: E402
from harness import K3DECODE, MPIRUN, SEED, k3, needs_mpirun   # noqa: E402

pytestmark = needs_mpirun
PROMPT = ("--prompt", "1,2,3", "--steps", "4")

# What mpirun calls in the place of ssh: AGENT ADDRESS COMMAND…
AGENT = """#!/bin/sh
name=%s${1##*.}
shift
exec unshare --uts sh -c 'hostname "$0"; exec ip netns exec "$0" sh -c "$*"' "$name" "$@"
"""


class Hosts:
    def __init__(self, folder):
        self.prefix = f"k3{uuid.uuid4().hex[:6]}n"
        self.agent = folder / "agent"
        self.agent.write_text(AGENT % self.prefix)
        self.agent.chmod(0o755)

    def ip(self, *words, host=None):
        name = () if host is None else ("-n", f"{self.prefix}{host}")
        subprocess.run(["ip", *name, *words], check=True, capture_output=True, text=True, timeout=20)

    def start(self):
        for host in (1, 2):
            self.ip("netns", "add", f"{self.prefix}{host}")
        self.ip("link", "add", "k3a", "netns", f"{self.prefix}1", "type", "veth", "peer", "name", "k3b", "netns", f"{self.prefix}2")
        for host, device in ((1, "k3a"), (2, "k3b")):
            self.ip("link", "set", "lo", "up", host=host)
            self.ip("addr", "add", f"10.77.0.{host}/24", "dev", device, host=host)
            self.ip("link", "set", device, "up", host=host)

    def stop(self):
        for host in (1, 2):
            subprocess.run(["ip", "netns", "del", f"{self.prefix}{host}"], capture_output=True, timeout=20)

    def run(self, *contexts, timeout=90.0):
        """Each context: the words of two ranks on host 1, 2 … in turn."""
        words = [self.agent, "10.77.0.1", "exec", MPIRUN, "--mca", "plm_rsh_agent", self.agent]
        for kind in ("oob", "btl"):
            words += ["--mca", f"{kind}_tcp_if_include", "10.77.0.0/24"]
        for host, context in enumerate(contexts, 1):
            words += [":"] * (host > 1) + ["--host", f"10.77.0.{host}:2", "-n", "2", *context]
        job = harness.Job(words)
        return job.finish(timeout)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("needs root, ip (Debian: iproute2) and unshare to make two hosts")
    made = Hosts(tmp_path_factory.mktemp("hosts"))
    try:
        try:
            made.start()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
        yield made
    finally:
        made.stop()


def test_ranks_on_two_hosts(hosts, tmp_path):
    model = f"synth:tiny:seed={SEED}"
    whole = harness.decode(model, tmp_path / "one.h5", steps=4, ranks=1)
    words = (K3DECODE, "run", model, *PROMPT, "--output", tmp_path / "two.h5")
    result = hosts.run(words, words)
    assert result.status == 0, result
    with h5py.File(tmp_path / "two.h5") as run:
        assert run.attrs["ranks"] == 4
        assert list(run["decode/token_ids"]) == list(whole[0])
    page = k3("info", tmp_path / "two.h5").out
    assert f"{hosts.prefix}1" in page and f"{hosts.prefix}2" in page       # the hosts' own names


def test_another_program_is_found_out(hosts, tmp_path):
    other = tmp_path / "k3decode"
    shutil.copy(K3DECODE, other)
    with open(other, "ab") as file:
        file.write(b"another build")
    words = ("run", "synth:tiny", *PROMPT, "--output", tmp_path / "run.h5")
    result = hosts.run((K3DECODE, *words), (other, *words))
    assert result.status == 3 and "is not the k3decode that rank 0 runs" in result.err, result
    assert "rank 2 of 4" in result.err and f"{hosts.prefix}2" in result.err and "same build on all hosts" in result.err
    assert not (tmp_path / "run.h5").exists()


def test_another_model_is_found_out(hosts, tmp_path):
    for seed in (1, 2):
        assert k3("synth", f"tiny:seed={seed}", "--output", tmp_path / f"{seed}.h5").status == 0
    contexts = [(K3DECODE, "run", tmp_path / f"{seed}.h5", *PROMPT, "--output", tmp_path / "run.h5") for seed in (1, 2)]
    result = hosts.run(*contexts)
    assert result.status == 3 and "is not the model that rank 0 opened" in result.err, result
    assert not (tmp_path / "run.h5").exists()
