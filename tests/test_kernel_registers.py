"""Every kernel against tests/kernel_limits.txt, from the compiler's reports: no spills, no stack frame that is not
allowed, no more registers than its occupancy wants. Layer: tests.

`make check` sets K3_KERNEL_REPORTS to the reports' paths (empty without nvcc); by hand, in a build directory:

    K3_KERNEL_REPORTS="$(echo kernels/*.ptxas)" /usr/bin/python3 -m pytest -s ../tests/test_kernel_registers.py
"""
import fnmatch
import os
import pathlib
import re
import shutil
import subprocess

import pytest

TABLE = pathlib.Path(__file__).resolve().parent / "kernel_limits.txt"
REPORTS = os.environ.get("K3_KERNEL_REPORTS", "").split()
FILTER = shutil.which("c++filt") or shutil.which("llvm-cxxfilt")
SM_REGISTERS, MOST_REGISTERS, UNIT = 65536, 255, 8
WARP = 32


class Limit:
    def __init__(self, line):
        words = line.split(maxsplit=5)
        assert len(words) == 6, f"{TABLE.name}: a line has six columns: {line}"
        self.pattern, self.why = words[0], words[5]
        self.registers, self.threads, self.blocks, self.stack = map(int, words[1:5])


def limits_of(text):
    return [Limit(line) for line in text.splitlines() if line.strip() and not line.startswith("#")]


def short_name(demangled):
    """void (anonymous namespace)::kda_kernel<8, 8>(K3CudaKda) -> kda_kernel<8,8>"""
    name = re.sub("^void ", "", demangled.replace("(anonymous namespace)::", "")).replace(" ", "")
    depth = 0
    for at, letter in enumerate(name):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0:
            name = name[:at]
            break
    return re.sub(r"\b\w+::", "", name)


class Function:
    def __init__(self, name, report):
        self.name, self.report = short_name(name), report
        self.kernel = False
        self.registers = self.stack = self.spills = None

    def __repr__(self):
        return f"{self.name} ({self.report})"


def functions_of(text, report):
    """Kernels, and device functions that were not inlined, of one report of ptxas -v, demangled. The properties come
    before or after the line that says the function is a kernel, by version of the compiler."""
    found, current, kernel = {}, None, None
    for line in text.splitlines():
        if match := re.search(r"Compiling entry function '(.*)' for '(\w+)'", line):
            kernel = found.setdefault(match[1], Function(match[1], report))
            kernel.kernel = True
        elif match := re.search(r"Function properties for (.*)$", line):
            current = found.setdefault(match[1].strip("'"), Function(match[1].strip("'"), report))
        elif match := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            assert current, f"{report}: a stack frame of no function: {line}"
            current.stack = int(match[1])
            current.spills = int(match[2]) + int(match[3])
        elif match := re.search(r"Used (\d+) registers", line):
            assert kernel, f"{report}: registers of no kernel: {line}"
            kernel.registers = int(match[1])
            if deeper := re.search(r"(\d+) bytes cumulative stack size", line):
                kernel.stack = max(kernel.stack or 0, int(deeper[1]))
    return list(found.values())


def limit_of(function, limits):
    return next((limit for limit in limits if fnmatch.fnmatchcase(function.name, limit.pattern)), None)


def faults_of(functions, limits):
    """What is wrong, one line each."""
    faults = []
    for function in functions:
        if function.spills is None or function.stack is None or (function.kernel and function.registers is None):
            faults.append(f"{function}: the report does not say what it uses; is ptxas -v gone from the rule?")
            continue
        if function.spills:
            faults.append(f"{function}: spills, {function.spills} bytes of stores and loads")
        limit = limit_of(function, limits) if function.kernel else None
        if function.kernel and not limit:
            faults.append(f"{function}: no line of {TABLE.name} matches; it uses {function.registers} registers")
        allowed = limit.stack if limit else 0
        if function.stack > allowed:
            faults.append(f"{function}: a stack frame of {function.stack} bytes, {allowed} allowed")
        if limit and function.registers > limit.registers:
            faults.append(f"{function}: {function.registers} registers, {limit.registers} allowed: {limit.blocks} blocks of "
                          f"{limit.threads} threads would not fit an SM ({limit.why})")
    return faults


# ---------------------------------------------------------------- the table itself

def test_limits_follow_from_threads_and_blocks():
    """A line's registers let its blocks fit, and allow no fewer than they could."""
    for limit in limits_of(TABLE.read_text(encoding="utf-8")):
        threads = -(-limit.threads // WARP) * WARP
        fit = min(MOST_REGISTERS, SM_REGISTERS // (threads * limit.blocks) // UNIT * UNIT)
        assert limit.registers == fit, f"{limit.pattern}: {limit.blocks} blocks of {limit.threads} threads allow {fit}"


# ---------------------------------------------------------------- the kernels

@pytest.fixture(scope="module")
def functions():
    if not REPORTS:
        pytest.skip("no kernels in this build: configure found no nvcc (CUDA Toolkit)")
    if not FILTER:
        pytest.skip("needs c++filt (Debian: binutils)")
    found = []
    for path in map(pathlib.Path, REPORTS):
        assert path.exists(), f"{path}: no report beside the object; remove the object and run make kernels"
        text = subprocess.run([FILTER], input=path.read_text(), capture_output=True, text=True, check=True).stdout
        assert "serialized" not in text, f"{path}: the compiler serialises wgmma: " + text[text.index("serialized") - 200:][:400]
        found += functions_of(text, path.name)
    return found


def test_kernels_stay_within_limits(functions, capsys):
    limits = limits_of(TABLE.read_text(encoding="utf-8"))
    kernels = [function for function in functions if function.kernel]
    with capsys.disabled():
        print(f"\n{'kernel':<34} {'registers':>9} {'allowed':>8} {'used':>6}  threads x blocks")
        for kernel in sorted(kernels, key=lambda kernel: kernel.name):
            if (limit := limit_of(kernel, limits)) and kernel.registers is not None:
                print(f"{kernel.name:<34} {kernel.registers:>9} {limit.registers:>8} {kernel.registers / limit.registers:>6.0%}"
                      f"  {limit.threads} x {limit.blocks}")
    faults = faults_of(functions, limits)
    assert kernels, "the reports name no kernel"
    assert not faults, "\n".join(["", *faults])


def test_no_limit_is_left_over(functions):
    """A line whose kernel is gone would hide that its successor has none. Kernels that this build leaves out (those of
    NCCL's device API) still stand in the sources."""
    limits = limits_of(TABLE.read_text(encoding="utf-8"))
    used = {limit_of(function, limits) for function in functions}
    compiled = {function.name.split("<")[0] for function in functions}
    sources = "".join(path.read_text(encoding="utf-8") for path in TABLE.parent.parent.glob("kernels/*.cu"))
    left = []
    for limit in limits:
        name = limit.pattern.split("<")[0]
        if limit not in used and (name in compiled or not re.search(rf"\b{re.escape(name)}\(", sources)):
            left.append(limit.pattern)
    assert not left, f"{TABLE.name}: no kernel matches {', '.join(left)}"


# ---------------------------------------------------------------- negative controls: made-up reports

LIMITS = limits_of("good_kernel<*> 64 512 2 0 for the control\nframe_kernel 64 512 2 128 an array\n")


def report(name="void (anonymous namespace)::good_kernel<k3::Q8, 3>(Arguments)", registers=64, stack=0, stores=0, loads=0):
    return (f"ptxas info    : 0 bytes gmem\n"
            f"ptxas info    : Compiling entry function '{name}' for 'sm_90a'\n"
            f"ptxas info    : Function properties for {name}\n"
            f"    {stack} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads\n"
            f"ptxas info    : Used {registers} registers, used 1 barriers, 640 bytes smem\n"
            f"ptxas info    : Compile time = 683.033 ms\n")


@pytest.mark.parametrize("text, phrase", [
    (report(), None),
    (report("frame_kernel(int)", stack=128), None),
    (report(stores=8, loads=16, stack=16), "spills, 24 bytes"),
    (report(registers=65), "65 registers, 64 allowed: 2 blocks of 512 threads would not fit"),
    (report(stack=4), "a stack frame of 4 bytes, 0 allowed"),
    (report("frame_kernel(int)", stack=136), "a stack frame of 136 bytes, 128 allowed"),
    (report("unknown_kernel(int)"), "no line of kernel_limits.txt matches; it uses 64 registers"),
    (report() + "ptxas info    : Function properties for k3::helper(int)\n"
     "    8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads\n", "helper (made-up): spills, 8 bytes"),
    ("ptxas info    : Compiling entry function 'good_kernel<1>(int)' for 'sm_90a'\n", "does not say what it uses"),
], ids=["good", "frame-allowed", "spill", "over-limit", "stack", "stack-over-allowed", "unlisted", "helper-spills", "silent"])
def test_made_up_report_control(text, phrase):
    faults = faults_of(functions_of(text, "made-up"), LIMITS)
    assert (not faults) if phrase is None else any(phrase in fault for fault in faults), faults


def test_broken_real_report_control(functions):
    """One kernel of the build with a spill and with a register too many: named."""
    limits = limits_of(TABLE.read_text(encoding="utf-8"))
    kernel = next(function for function in functions if function.kernel and limit_of(function, limits))
    before = kernel.spills, kernel.registers
    kernel.spills, kernel.registers = 4, limit_of(kernel, limits).registers + 1
    faults = faults_of(functions, limits)
    kernel.spills, kernel.registers = before
    assert sum(kernel.name in fault for fault in faults) >= 2, faults
