#!/usr/bin/env python3
"""Draws run and sweep files: what `k3decode report` starts.

    report.py RUN.h5 SWEEP.h5 … --output page.html|.svg|.png|.pdf [--bandwidth TB/s] [--overwrite]

Reading is report_data.py, drawing report_figures.py, the page report_page.py.
Exit status: 0 done, 2 wrong usage, 3 bad input or a library that is missing.
"""
import argparse
import os
import pathlib
import sys


def fail(message):
    print(message, file=sys.stderr)
    sys.exit(3)


try:
    import report_data
    import report_figures
    import report_page
except ImportError as error:
    package = (error.name or "").split(".")[0]
    fail(f"report needs Python's {package}, which {sys.executable} lacks: apt install python3-{package}, or set K3_PYTHON to a "
         f"Python 3 that has h5py and matplotlib")

HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"


def check_output(output, files, overwrite):
    """Refuses what must not be replaced."""
    if not output.parent.is_dir():
        fail(f"output {output}: no such directory; make it first")
    if not output.exists():
        return
    if not output.is_file():
        fail(f"output {output} is not a regular file; give another path")
    if any(os.path.exists(file) and os.path.samefile(file, output) for file in files):
        fail(f"output {output} is one of the files to report on; give another path")
    if not overwrite:
        fail(f"output {output} exists; give another path, or --overwrite")
    with open(output, "rb") as file:
        if file.read(8) == HDF5_SIGNATURE:
            fail(f"output {output} is an HDF5 file, which a report does not replace; give another path")


def write(output, content):
    """`content(path)` writes a file beside `output`, which then takes its name."""
    partial = output.with_name(f".{output.name}.partial{output.suffix}")
    try:
        content(partial)
        os.replace(partial, output)
    except (OSError, ValueError) as error:
        fail(f"output {output} cannot be written: {error}")
    finally:
        partial.unlink(missing_ok=True)


def main():
    parser = argparse.ArgumentParser(prog="report", description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="+", metavar="FILE.h5")
    parser.add_argument("--output", required=True, type=pathlib.Path)
    parser.add_argument("--bandwidth", type=float, default=4.5, help="TB/s")
    parser.add_argument("--overwrite", action="store_true")
    options = parser.parse_args()
    try:
        check_output(options.output, options.files, options.overwrite)
        parts = [report_data.read(path) for path in options.files]
    except report_data.BadFile as error:
        fail(str(error))
    except OSError as error:
        fail(f"output {options.output}: {error}")
    report_data.name_apart(parts)
    html = options.output.suffix == ".html"
    try:
        figures = report_figures.make(parts, options.bandwidth)
        page = report_page.page(parts, figures, options.bandwidth) if html else ""
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        fail(f"{' '.join(options.files)}: a value that cannot be drawn: {error!r}")
    if html:
        write(options.output, lambda path: path.write_text(page, encoding="utf-8"))
    else:
        write(options.output, lambda path: report_figures.save_all(figures, path))
    print(f"report: {options.output}")


if __name__ == "__main__":
    main()
