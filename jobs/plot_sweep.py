#!/usr/bin/env python3
"""Draws the depth curve of a sweep file: both arms, their spread, and the noise band.

    jobs/plot_sweep.py SWEEP.h5 --output curve.svg        (or .png, .pdf: what matplotlib writes)

Upper panel: median time of a step over cached positions, p10 to p90 as bars, the noise floor as a band around A.
Lower panel: B - A with the same band around zero; filled marks lie outside it, hollow ones are no difference.
Needs python3-h5py and python3-matplotlib (Debian). Exit status: 0 done, 2 wrong usage, 3 bad input, 4 a module is missing.
"""
import argparse
import os
import sys


def fail(status, message):
    print(f"plot_sweep: {message}", file=sys.stderr)
    sys.exit(status)


try:
    import h5py
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plot
    import numpy as np
except ImportError as error:
    fail(4, f"{error.name} is missing; install it (Debian: python3-{error.name.split('.')[0]})")


def text(value):
    return value.decode() if isinstance(value, bytes) else str(value)


def read(path):
    """What the figure needs, as a dictionary."""
    try:
        with h5py.File(path, "r") as file:
            if text(file.attrs.get("format", "")) != "k3decode-sweep":
                fail(3, f"{path} is no sweep file: its root attribute format is not k3decode-sweep")
            names = [text(name) for name in file["curve/statistic_names"]]
            cells = file["curve/step_ms"][()]
            return dict(contexts=file["contexts"][()], arms=[text(name) for name in file["arms/names"]],
                        missing=[text(why) for why in file["arms/missing_because"]],
                        **{name: cells[:, :, k] for k, name in enumerate(names)},
                        floor=file["curve/floor_ms"][()], difference=file["curve/difference_ms"][()],
                        above=file["curve/above_floor"][()].astype(bool),
                        title=f"{text(file.attrs['model'])}, {text(file.attrs['kind'])}, {text(file.attrs['backend'])}",
                        device=text(file.attrs["devices"]).split("\n")[0])
    except (OSError, KeyError) as error:
        fail(3, f"{path} cannot be read: {error}")


def draw(sweep, output):
    figure, (upper, lower) = plot.subplots(2, 1, sharex=True, figsize=(7.5, 6.5), height_ratios=(3, 1),
                                           layout="constrained")
    contexts, floor = sweep["contexts"], sweep["floor"]
    base = 0 if not sweep["missing"][0] else 1
    middle = sweep["median"][:, base]
    upper.fill_between(contexts, middle - floor, middle + floor, color="0.85", label="noise floor (A/A)")
    for arm, colour in ((0, "tab:blue"), (1, "tab:orange")):
        if sweep["missing"][arm]:
            continue
        median = sweep["median"][:, arm]
        spread = [np.maximum(median - sweep["p10"][:, arm], 0), np.maximum(sweep["p90"][:, arm] - median, 0)]
        upper.errorbar(contexts, median, yerr=spread, color=colour, marker="o", markersize=4, capsize=3,
                       label=f"{'AB'[arm]} {sweep['arms'][arm]}")
    upper.set_ylim(bottom=0)
    upper.set_ylabel("step, ms")
    upper.legend()
    upper.set_title(f"{sweep['title']}\n{sweep['device']}", fontsize=9)
    lower.fill_between(contexts, -floor, floor, color="0.85")
    above = sweep["above"]
    lower.plot(contexts[above], sweep["difference"][above], "o", color="tab:orange")
    lower.plot(contexts[~above], sweep["difference"][~above], "o", color="tab:orange", fillstyle="none")
    lower.axhline(0, color="0.5", linewidth=0.8)
    lower.set_ylabel("B - A, ms")
    lower.set_xlabel("cached positions")
    lower.set_xscale("log", base=2)
    lower.set_xticks(contexts, [str(context) for context in contexts], rotation=30)
    lower.minorticks_off()
    try:
        figure.savefig(output)
    except (OSError, ValueError) as error:
        if os.path.exists(output) and os.path.getsize(output) == 0:
            os.unlink(output)
        fail(3, f"{output} cannot be written: {error}")


def main():
    parser = argparse.ArgumentParser(prog="plot_sweep", description=__doc__.split("\n")[0])
    parser.add_argument("sweep", metavar="SWEEP.h5")
    parser.add_argument("--output", required=True, metavar="curve.svg")
    options = parser.parse_args()
    draw(read(options.sweep), options.output)


if __name__ == "__main__":
    main()
