"""`k3decode report`: what is drawn and tabled is what the files hold; what it refuses; how it finds its helper."""
import html.parser
import os
import re
import shutil
import signal
import sys

import h5py
import numpy as np
import pytest

import harness
from harness import K3DECODE, TESTS, k3, refused, start

matplotlib = pytest.importorskip("matplotlib", reason="needs matplotlib (Debian: python3-matplotlib)")
HELPERS = TESTS.parent / "src" / "helpers"
sys.path.insert(0, str(HELPERS))
import report_data                                                  # noqa: E402
import report_figures                                               # noqa: E402

MODEL = "synth:tiny:num_layers=4"
ENV = {"K3_PYTHON": sys.executable}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    at = tmp_path_factory.mktemp("report")
    k3("run", MODEL, "--backend", "host", "--prompt", "1,2,3", "--steps", 20, "--output", at / "run.h5")
    k3("run", MODEL, "--backend", "host", "--slice", "1/2", "--context", 70, "--steps", 6, "--output", at / "slice.h5")
    k3("sweep", MODEL, "--backend", "host", "--contexts", "8,70", "--steps", 3, "--repeats", 2, "--output", at / "sweep.h5")
    return at


def report(*words, **more):
    return k3("report", *words, env=ENV, **more)


class Page(html.parser.HTMLParser):
    """Tables by class, commands, figures, and every reference to something outside the page."""

    def __init__(self, path):
        super().__init__()
        self.tables, self.commands, self.headings, self.figures, self.outside = {}, [], [], 0, []
        self.cell = None
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if tag == "table":
            self.rows = self.tables.setdefault(attributes["class"], [])
        elif tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th", "h2") or (tag == "pre" and attributes.get("class") == "command"):
            self.cell = ""
        elif tag == "svg":
            self.figures += 1
        self.outside += [value for name, value in attributes.items() if name in ("src", "href", "xlink:href", "data") and
                         not value.startswith("#") and not value.startswith("data:")]
        self.outside += [tag] * (tag in ("script", "link", "iframe", "img"))

    def handle_data(self, data):
        if self.cell is not None:
            self.cell += data

    def handle_endtag(self, tag):
        if self.cell is None:
            return
        if tag in ("td", "th"):
            self.rows[-1].append(self.cell)
        elif tag == "pre":
            self.commands.append(self.cell)
        elif tag == "h2":
            self.headings.append(self.cell)
        if tag in ("td", "th", "pre", "h2"):
            self.cell = None

    def column(self, name, head):
        at = self.tables[name][0].index(head)
        return {row[0]: row[at] for row in self.tables[name][1:]}


# ---------------------------------------------------------------- the page

def test_page_stands_alone_and_names_the_commands(folder, tmp_path):
    out = tmp_path / "page.html"
    assert str(out) in report(folder / "run.h5", folder / "slice.h5", folder / "sweep.h5", "--output", out).out
    page = Page(out)
    assert page.outside == []
    wanted = []
    for name in ("run", "slice", "sweep"):
        with h5py.File(folder / f"{name}.h5") as file:
            wanted.append(file.attrs["command"].decode())
    assert page.commands == wanted
    assert page.figures == 5            # depth curve, two histograms, phases, roofline
    assert [heading.split(":")[0] for heading in page.headings[:5]] == ["Depth curve", "Step times", "Step times", "Phases",
                                                                        "Roofline position"]
    assert os.listdir(tmp_path) == ["page.html"]


def test_tables_hold_the_numbers_of_the_run(folder, tmp_path):
    report(folder / "run.h5", "--output", tmp_path / "page.html", "--bandwidth", 2)
    page = Page(tmp_path / "page.html")
    run = h5py.File(folder / "run.h5")
    step, phases, moved = (run["timings"][name][:] for name in ("step_ms", "phase_ms", "step_bytes"))
    steps = page.column("steps", "ms")
    for name, value in (("median", np.median(step)), ("p10", np.quantile(step, .1)), ("p90", np.quantile(step, .9)),
                        ("min", step.min()), ("max", step.max())):
        assert float(steps[name]) == pytest.approx(value, abs=6e-5)
    assert float(page.column("steps", "tokens/s")["median"]) == pytest.approx(1e3 / np.median(step), abs=6e-3)
    for name, mean in zip(run["timings/phase_names"].asstr(), phases.mean(axis=(0, 1))):
        assert float(page.column("phases", "mean ms")[name]) == pytest.approx(mean, abs=6e-5)
    gigabytes = page.column("bytes", "GB")
    assert float(gigabytes["all, on rank 0"]) == pytest.approx(moved.sum() / 1e9, rel=1e-5)
    assert float(gigabytes["ms at 2 TB/s"]) == pytest.approx(moved.sum() / 2e9, abs=6e-5)
    share = moved.sum() / (np.median(step) * 1e-3) / 2e12
    assert float(gigabytes["share of that rate"].rstrip("%")) == pytest.approx(100 * share, abs=6e-3)


def test_tables_hold_the_numbers_of_the_sweep(folder, tmp_path):
    report(folder / "sweep.h5", "--output", tmp_path / "page.html")
    page = Page(tmp_path / "page.html")
    with h5py.File(folder / "sweep.h5") as sweep:
        curve, contexts = sweep["curve/step_ms"][:], sweep["contexts"][:]
        difference, above = sweep["curve/difference_ms"][:], sweep["curve/above_floor"][:]
        moved = sweep["curve/step_bytes"][:].sum(axis=2)
    rows = page.tables["curve"][1:]
    assert [int(row[0]) for row in rows] == [context for context in contexts for _ in range(2)]
    assert np.array([[float(cell) for cell in row[2:7]] for row in rows]) == pytest.approx(curve.reshape(-1, 5), abs=6e-5)
    for row, value, real in zip(page.tables["differences"][1:], difference, above):
        assert float(row[1]) == pytest.approx(value, abs=6e-5) and (row[3] == "no difference") == (not real)


    for row, gigabytes, median in zip(page.tables["bytes"][1:], moved.ravel() / 1e9, curve[:, :, 0].ravel()):
        assert float(row[2]) == pytest.approx(gigabytes, rel=1e-5) and float(row[3]) == pytest.approx(gigabytes / 4.5, abs=6e-5)
        assert float(row[4].rstrip("%")) == pytest.approx(100 * gigabytes / 4.5 / median, abs=6e-3)


# ---------------------------------------------------------------- the figures

def drawn(draw, *arguments):
    figure = matplotlib.pyplot.figure()
    draw(figure, *arguments)
    return figure.axes


def test_histogram_counts_every_step_once(folder):
    run = report_data.read(str(folder / "run.h5"))
    left, right = drawn(report_figures.draw_steps, run)
    assert sum(patch.get_height() for patch in left.patches) == 20
    assert right.lines[0].get_ydata().tolist() == run.step_ms.tolist()
    run.step_ms = np.append(run.step_ms, 1e6)           # an outlier must not make a million bins
    assert len(drawn(report_figures.draw_steps, run)[0].patches) <= 80


def test_phase_bars_are_the_means(folder):
    run = report_data.read(str(folder / "run.h5"))
    (axes,) = drawn(report_figures.draw_phases, [run])
    assert [patch.get_width() for patch in axes.patches] == pytest.approx(run.phase_ms.mean(axis=(0, 1)).tolist())


def test_roofline_point_and_line(folder):
    run = report_data.read(str(folder / "run.h5"))
    (axes,) = drawn(report_figures.draw_roofline, [run], 4.5)
    line = axes.lines[0]
    assert line.get_ydata() == pytest.approx(line.get_xdata() / 4.5)            # GB / (TB/s) = ms
    point = axes.containers[0].lines[0]
    assert point.get_xdata()[0] == pytest.approx(run.step_bytes.sum() * 1e-9)
    assert point.get_ydata()[0] == pytest.approx(np.median(run.step_ms))


def test_depth_curve_draws_both_arms_and_marks_what_is_no_difference(folder):
    sweep = report_data.read(str(folder / "sweep.h5"))
    sweep.above = np.array([True, False])
    upper, lower = drawn(report_figures.draw_depth, sweep, 4.5)
    curves = [container.lines[0].get_ydata().tolist() for container in upper.containers]
    assert curves == [sweep.statistics["median"][:, arm].tolist() for arm in (0, 1)]
    (floor,) = [line for line in upper.lines if "TB/s" in line.get_label()]
    assert floor.get_ydata() == pytest.approx(sweep.step_bytes[:, 0] / 4.5e9)
    filled, hollow = lower.lines[:2]
    assert filled.get_xdata().tolist() == [8] and hollow.get_xdata().tolist() == [70] and hollow.get_fillstyle() == "none"


@pytest.mark.parametrize("ending, signature", [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_figures_alone(folder, tmp_path, ending, signature):
    out = tmp_path / f"page.{ending}"
    report(folder / "run.h5", folder / "sweep.h5", "--output", out)
    assert out.read_bytes().startswith(signature) and out.stat().st_size > 5000


def test_same_input_gives_the_same_page(folder, tmp_path):
    for name in ("a", "b"):
        report(folder / "run.h5", folder / "sweep.h5", "--output", tmp_path / f"{name}.html")
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


# ---------------------------------------------------------------- strange files

def test_run_that_was_killed_is_reported(tmp_path):
    path = tmp_path / "killed.h5"
    job = start("run", "synth:tiny", "--backend", "host", "--prompt", "1", "--steps", 100000, "--output", path)
    for _ in range(200):
        harness.time.sleep(0.05)
        if path.exists() and path.stat().st_size > 60000:
            break
    harness.time.sleep(0.5)
    job.process.send_signal(signal.SIGKILL)
    job.finish()
    report(path, "--output", tmp_path / "page.html")
    page = Page(tmp_path / "page.html")
    about = dict(page.tables["about"])
    assert about["ending"] == "running" and int(about["whole steps"]) > 0


def changed(source, target, change):
    shutil.copy(source, target)
    with h5py.File(target, "r+") as file:
        change(file)
    return target


def test_run_of_an_older_version_and_untimed_phases(folder, tmp_path):
    def change(file):
        del file["timings/step_bytes"], file["timings/step_bytes_names"]
        file["timings/phase_ms"][:] = 0
    report(changed(folder / "run.h5", tmp_path / "old.h5", change), "--output", tmp_path / "page.html")
    page = Page(tmp_path / "page.html")
    assert page.figures == 1 and "phases" not in page.tables and "bytes" not in page.tables


def test_sweep_with_a_missing_arm_and_names_with_markup(folder, tmp_path):
    def change(file):
        kind = h5py.string_dtype("utf-8", 40)
        text = file["arms/missing_because"][0]
        del file["arms/missing_because"]
        file.create_dataset("arms/missing_because", data=np.array([text, b"<b>no</b> such & arm"], kind), dtype=kind)
        file["curve/step_ms"][:, 1, :] = np.nan
        file["curve/difference_ms"][:] = np.nan
        file.attrs["command"] = np.bytes_("k3decode sweep '<script>alert(1)</script>'")
    report(changed(folder / "sweep.h5", tmp_path / "one.h5", change), "--output", tmp_path / "page.html")
    page = Page(tmp_path / "page.html")
    assert page.outside == [] and page.commands == ["k3decode sweep '<script>alert(1)</script>'"]
    assert len(page.tables["curve"]) == 3 and "differences" not in page.tables


def test_two_files_of_one_name_are_told_apart(folder, tmp_path):
    (tmp_path / "a").mkdir()
    shutil.copy(folder / "run.h5", tmp_path / "a" / "run.h5")
    report(folder / "run.h5", tmp_path / "a" / "run.h5", "--output", tmp_path / "page.html")
    assert len(set(Page(tmp_path / "page.html").headings)) == len(Page(tmp_path / "page.html").headings)


# ---------------------------------------------------------------- refusals

def test_bad_input_is_refused(folder, tmp_path):
    page = tmp_path / "page.html"
    (tmp_path / "text.h5").write_text("no HDF5\n")
    (tmp_path / "folder.h5").mkdir()
    os.mkfifo(tmp_path / "fifo.h5")
    k3("synth", "tiny:num_layers=4", "--output", tmp_path / "model.h5")

    def empty(file):
        file["decode/steps"][()] = 0

    def damaged(file):
        del file["timings/step_ms"]

    def endless(file):
        file["timings/step_ms"][:] = np.nan
    for path, phrase in ((changed(folder / "run.h5", tmp_path / "endless.h5", endless), "cannot be drawn"), (tmp_path / "absent.h5", "No such file"), (tmp_path / "text.h5", "neither a run file nor a sweep file"),
                         (tmp_path / "folder.h5", "not a directory"), (tmp_path / "fifo.h5", "neither a run file"), ("", "name of a file is empty"),
                         (tmp_path / "model.h5", "neither a run file nor a sweep file"),
                         (changed(folder / "run.h5", tmp_path / "empty.h5", empty), "no whole step"),
                         (changed(folder / "run.h5", tmp_path / "damaged.h5", damaged), "step_ms")):
        refused("report", folder / "run.h5", path, "--output", page, env=ENV, phrases=[os.path.basename(path), phrase])
        assert not page.exists()


def test_output_is_not_replaced_unasked(folder, tmp_path):
    page = tmp_path / "page.html"
    page.write_text("mine")
    refused("report", folder / "run.h5", "--output", page, env=ENV, phrases=["exists", "--overwrite"])
    assert page.read_text() == "mine"
    report(folder / "run.h5", "--output", page, "--overwrite")
    assert page.read_text().startswith("<!DOCTYPE html>")
    run = tmp_path / "run.svg"                          # HDF5 behind another name
    shutil.copy(folder / "run.h5", run)
    for file in (run, folder / "run.h5"):
        refused("report", file, "--output", run, "--overwrite", env=ENV, phrases=["another path"])
    assert h5py.is_hdf5(run)
    refused("report", folder / "run.h5", "--output", tmp_path / "no" / "page.html", env=ENV, phrases=["no such directory"])
    (tmp_path / "folder.html").mkdir()
    refused("report", folder / "run.h5", "--output", tmp_path / "folder.html", env=ENV, phrases=["not a regular file"])


def test_wrong_usage(folder, tmp_path):
    run, page = folder / "run.h5", tmp_path / "page.html"
    for words, phrase in (((run,), "--output PAGE.html is missing"), (("--output", page), "wants one run or sweep file"),
                          ((run, "--output", tmp_path / "page.txt"), "ends in .html"),
                          ((run, "--output", page, "--bandwidth", "0"), "--bandwidth 0"),
                          ((run, "--output", page, "--bandwidth", "nan"), "--bandwidth nan"),
                          ((run, "--output", page, "--colour"), "unknown option")):
        refused("report", *words, status=2, env=ENV, phrases=[phrase])
    assert "usage: k3decode report" in k3("report", "--help").out
    if harness.MPIRUN:
        refused("report", run, "--output", page, status=2, ranks=2, env=ENV, phrases=["without mpirun"])


@pytest.mark.parametrize("module", ["matplotlib", "h5py"])
def test_missing_library_is_named_with_its_package(folder, tmp_path, module):
    (tmp_path / f"{module}.py").write_text(f"raise ImportError('hidden', name='{module}')\n")
    refused("report", folder / "run.h5", "--output", tmp_path / "page.html", env={**ENV, "PYTHONPATH": str(tmp_path)},
            phrases=[f"apt install python3-{module}"])


def test_missing_python_or_helper_is_named(folder, tmp_path):
    words = ("report", folder / "run.h5", "--output", tmp_path / "page.html")
    refused(*words, env={"K3_PYTHON": str(tmp_path / "python")}, phrases=["cannot start", "K3_PYTHON"])
    refused(*words, env={**ENV, "K3_HELPERS": str(tmp_path)}, phrases=["report.py", "K3_HELPERS"])


def test_installed_program_finds_the_helpers_beside_it(folder, tmp_path):
    """bin/k3decode and libexec/k3decode/report.py, wherever they were moved to."""
    (tmp_path / "bin").mkdir()
    shutil.copy(K3DECODE, tmp_path / "bin" / "k3decode")
    program = tmp_path / "bin" / "k3decode"
    shutil.copytree(HELPERS, tmp_path / "libexec" / "k3decode", ignore=shutil.ignore_patterns("__pycache__"))
    report(folder / "run.h5", "--output", tmp_path / "page.html", program=program)
    assert Page(tmp_path / "page.html").figures == 3
    assert not list((tmp_path / "libexec").rglob("__pycache__"))
    (tmp_path / "libexec" / "k3decode" / "report.py").write_text("raise SystemExit('found')\n")
    assert re.search("found", refused("report", folder / "run.h5", "--output", tmp_path / "b.html", program=program, env=ENV).err)
