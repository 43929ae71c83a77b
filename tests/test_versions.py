"""Versions built with and found, and the refusal of other libraries than the headers' (known fault F35): stub libraries
in LD_LIBRARY_PATH that answer another version. Layer: tests."""
import os
import re
import shutil
import subprocess

import pytest

import harness
from harness import k3, needs_mpirun

CC = os.environ.get("CC", "").split() or ["cc"]           # "ccache gcc" is two words
NM, READELF = shutil.which("nm"), shutil.which("readelf")
ROW = re.compile(r"^  (HDF5|MPI|CUDA|NCCL) +(none: .*|.*?  +(.*))$", re.M)

# What each stub answers. The names that only the answer needs are functions; all others of the library that the program
# was linked with are there as bytes, so that the program starts.
HDF5 = ("libhdf5", r"^H5", "int H5get_libversion(unsigned *a, unsigned *b, unsigned *c) { *a = %d, *b = %d, *c = %d; return 0; }")
NCCL = ("libnccl", r"^p?nccl", "int ncclGetVersion(int *code) { *code = 10000 * %d + 100 * %d + %d; return 0; }")
MPI = ("libmpi", r"^(P?MPI_|[ho]?ompi_|mca_|opal_)",
       "#include <stdio.h>\nint MPI_Get_library_version(char *text, int *length)\n"
       "{ return *length = sprintf(text, \"Open MPI v%d.%d.%d, stub\"), 0; }")


def output_of(*words):
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout


def versions():
    """library -> (built, found) as --version prints them; found None: the build has none."""
    return {match[1]: (match[2], match[3]) for match in ROW.finditer(k3("--version").out)}


def numbers(text):
    return tuple(int(part) for part in re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", text).groups(default="0"))


@pytest.fixture(scope="module")
def tools():
    if not (shutil.which(CC[0]) and NM and READELF):
        pytest.skip("needs a C compiler, nm and readelf (Debian: gcc, binutils), to make stub libraries")
    if "libasan" in output_of(READELF, "-d", harness.K3DECODE):
        pytest.skip("a build with sanitizers wants their library first, and all of HDF5's functions")


@pytest.fixture
def stub(tools, tmp_path):
    """stub(LIBRARY, version): the environment with a stub of the library that the program looks for."""
    def make(library, version):
        name, pattern, code = library
        needed = re.findall(r"NEEDED.*\[(.*?)\]", output_of(READELF, "-d", harness.K3DECODE))
        sonames = [soname for soname in needed if soname.startswith(name)]
        if not sonames:
            pytest.skip(f"the program is not linked with a shared {name}")
        words = [line.split()[-1] for line in output_of(NM, "-D", harness.K3DECODE).splitlines()]
        symbols = dict(re.split("@+", word + "@")[:2] for word in words if re.match(pattern, word))    # name -> its version
        body = code % version
        source, script = tmp_path / "stub.c", tmp_path / "stub.map"
        source.write_text("\n".join([body, *(f"char {symbol}[512];" for symbol in symbols if f" {symbol}(" not in body), ""]))
        script.write_text("".join(f"{node} {{ global: {' '.join(s + ';' for s in symbols if symbols[s] == node)} }};\n"
                                  for node in set(symbols.values()) - {""}) or "{ global: *; };\n")
        subprocess.run([*CC, "-shared", "-fPIC", "-w", f"-Wl,-soname,{sonames[0]}", f"-Wl,--version-script={script}",
                        "-o", tmp_path / sonames[0], source], check=True, timeout=60)
        path = os.environ.get("LD_LIBRARY_PATH")
        return {"LD_LIBRARY_PATH": f"{tmp_path}:{path}" if path else str(tmp_path)}
    return make


def test_version_names_built_and_found():
    rows = versions()
    assert set(rows) >= {"HDF5", "MPI", "CUDA", "NCCL"} or rows["CUDA"][1] is None, rows
    for library in ("HDF5", "NCCL"):
        if library in rows and rows[library][1] is not None:
            assert numbers(rows[library][0])[:2] == numbers(rows[library][1])[:2], rows
    if rows["CUDA"][1] is not None:
        assert re.fullmatch(r"\d+\.\d+, (no driver|driver for up to \d+\.\d+)", rows["CUDA"][1]), rows


def test_version_with_no_gpu_visible():
    """--version starts no GPU, so none needs to be there."""
    assert k3("--version", env={"CUDA_VISIBLE_DEVICES": ""}).out == k3("--version").out


@pytest.mark.parametrize("library, row", [(HDF5, "HDF5"), (NCCL, "NCCL")], ids=["hdf5", "nccl"])
def test_version_shows_the_found_library(stub, library, row):
    built = numbers(versions()[row][0]) if row in versions() and versions()[row][1] else (1, 0, 0)
    other = (built[0], built[1] + 1, 7)
    out = k3("--version", env=stub(library, other)).out
    assert re.search(rf"^  {row} .* {other[0]}\.{other[1]}\.{other[2]}$", out, re.M), out
    assert re.search(rf"^  {row} +{built[0]}\.{built[1]}\.{built[2]} ", out, re.M), out


def refused(result, *phrases):
    """Exit status 4 and one sentence, in seconds."""
    assert result.status == 4, result
    assert len(result.errors()) == 1 and all(phrase in result.errors()[0] for phrase in phrases), result
    assert result.seconds < 20, result


@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=needs_mpirun)])
@pytest.mark.parametrize("library, row", [(HDF5, "HDF5"), (NCCL, "NCCL")], ids=["hdf5", "nccl"])
def test_run_refuses_another_library(stub, library, row, ranks):
    """From all ranks one sentence with both versions and the mend."""
    env = stub(library, (1, 2, 3))
    result = k3("run", "synth:tiny", "--prompt", "1,2", "--steps", "1", "--backend", "host", ranks=ranks, env=env, status=None)
    refused(result, f"built with {row} ", "found at run time is 1.2.3", "LD_LIBRARY_PATH")


@needs_mpirun
def test_run_refuses_a_library_of_one_rank(stub):
    """Another library on one host alone: that rank speaks, all end."""
    env = stub(HDF5, (1, 2, 3))
    words = [harness.MPIRUN, "-n", "2", harness.K3DECODE, "run", "synth:tiny", "--prompt", "1,2", "--steps", "1", "--backend", "host",
             ":", "-n", "1", "-x", f"LD_LIBRARY_PATH={env['LD_LIBRARY_PATH']}", harness.K3DECODE, "run", "synth:tiny", "--prompt",
             "1,2", "--steps", "1", "--backend", "host"]
    result = harness.Job(words).finish(60)
    refused(result, "rank 2", "built with HDF5 ", "found at run time is 1.2.3")


def test_run_takes_another_patch_of_nccl(stub):
    """The control: major and minor alike, another patch."""
    rows = versions()
    if rows.get("NCCL", ("", None))[1] is None:
        pytest.skip("a build without NCCL")
    built = numbers(rows["NCCL"][0])
    env = stub(NCCL, (built[0], built[1], 99))
    k3("run", "synth:tiny", "--prompt", "1,2", "--steps", "1", "--backend", "host", env=env)


def test_other_commands_refuse_another_hdf5_control(stub, tmp_path):
    result = k3("synth", "tiny", "--output", tmp_path / "m.h5", env=stub(HDF5, (1, 2, 3)), status=None)
    refused(result, "built with HDF5 ", "found at run time is 1.2.3")
    assert not (tmp_path / "m.h5").exists()


def test_other_commands_do_not_ask_nccl(stub, tmp_path):
    k3("synth", "tiny", "--output", tmp_path / "m.h5", env=stub(NCCL, (1, 2, 3)))


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=needs_mpirun)])
def test_run_refuses_another_mpi(stub, ranks):
    """Before MPI starts, so each process for itself; never with a bare abort."""
    env = stub(MPI, (99, 8, 7))
    if ranks > 1:       # mpirun itself keeps its own library
        words = [harness.MPIRUN, "-x", f"LD_LIBRARY_PATH={env['LD_LIBRARY_PATH']}", "-n", str(ranks), harness.K3DECODE]
        result = harness.Job([*words, "run", "synth:tiny", "--prompt", "1"]).finish(60)
    else:
        result = k3("run", "synth:tiny", "--prompt", "1", env=env, status=None)
    assert result.status == 4, result
    assert result.errors() and all("built with Open MPI" in error and "Open MPI v99.8.7" in error for error in result.errors()), result
