"""The figures of `k3decode report`, by matplotlib."""
import dataclasses
import io

import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plot        # noqa: E402
import numpy as np                      # noqa: E402

from report_data import Run, Sweep      # noqa: E402

# The same input gives the same file; letters are drawn as paths, so that no font is needed.
matplotlib.rcParams.update({"svg.hashsalt": "k3decode", "svg.fonttype": "path", "font.size": 9})

FEWEST_BINS, MOST_BINS = 12, 80
MOST_MARKS = 2000       # more would make a vector file of megabytes: they become a picture in it


@dataclasses.dataclass
class Figure:
    title: str
    draw: object            # draw(figure or subfigure)
    size: tuple             # inches


# ---------------------------------------------------------------- sweeps

def draw_depth(figure, sweep, bandwidth):
    """Upper panel: median time of a step over cached positions, p10 to p90 as bars, the noise floor as a band, and what the
    bytes of arm A's step need at `bandwidth` TB/s. Lower panel: B - A with the same band around zero; filled marks lie outside
    it, hollow ones are no difference."""
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    contexts, floor = sweep.contexts, sweep.floor
    base = 0 if not sweep.missing[0] else 1
    middle = sweep.statistics["median"][:, base]
    upper.fill_between(contexts, middle - floor, middle + floor, color="0.85", label="noise floor (A/A)")
    for arm, colour in ((0, "tab:blue"), (1, "tab:orange")):
        if sweep.missing[arm]:
            continue
        median = sweep.statistics["median"][:, arm]
        spread = [np.maximum(median - sweep.statistics["p10"][:, arm], 0),
                  np.maximum(sweep.statistics["p90"][:, arm] - median, 0)]
        upper.errorbar(contexts, median, yerr=spread, color=colour, marker="o", markersize=4, capsize=3,
                       label=f"{'AB'[arm]} {sweep.arms[arm]}")
    if sweep.step_bytes is not None:
        upper.plot(contexts, sweep.step_bytes[:, base] * 1e-9 / bandwidth, "--", color="0.4", linewidth=1,
                   label=f"its bytes at {bandwidth:g} TB/s")
    upper.set_ylim(bottom=0)
    upper.set_ylabel("step, ms")
    upper.legend()
    attributes = sweep.attributes
    upper.set_title(f"{attributes['model']}, {attributes['kind']}, {attributes['backend']}\n{sweep.devices[0]}", fontsize=9)
    lower.fill_between(contexts, -floor, floor, color="0.85")
    lower.plot(contexts[sweep.above], sweep.difference[sweep.above], "o", color="tab:orange")
    lower.plot(contexts[~sweep.above], sweep.difference[~sweep.above], "o", color="tab:orange", fillstyle="none")
    lower.axhline(0, color="0.5", linewidth=0.8)
    lower.set_ylabel("B - A, ms")
    lower.set_xlabel("cached positions")
    lower.set_xscale("log", base=2)
    lower.set_xticks(contexts, [str(context) for context in contexts], rotation=30)
    lower.minorticks_off()


# ---------------------------------------------------------------- runs

def draw_steps(figure, run):
    """Left: how often a step took how long. Right: each step in order."""
    left, right = figure.subplots(1, 2, width_ratios=(1, 1))
    edges = np.histogram_bin_edges(run.step_ms, "fd")
    bins = min(max(len(edges) - 1, FEWEST_BINS), MOST_BINS)
    edges = np.histogram_bin_edges(run.step_ms, bins)
    left.hist(run.step_ms, bins=edges, color="tab:blue")
    for q, style in ((0.1, ":"), (0.5, "-"), (0.9, ":")):
        left.axvline(run.quantile(q), color="tab:orange", linestyle=style,
                     label="median" if q == 0.5 else "p10, p90" if q == 0.1 else None)
    left.set_xlabel("step, ms")
    left.set_ylabel("steps")
    left.legend()
    right.plot(np.arange(len(run.step_ms)), run.step_ms, ".", markersize=3, color="tab:blue",
               rasterized=len(run.step_ms) > MOST_MARKS)
    right.axhline(run.quantile(0.5), color="tab:orange", linewidth=0.8)
    right.set_ylim(0, 1.05 * run.step_ms.max())
    right.set_xlabel("step")
    right.set_ylabel("ms")
    figure.suptitle(f"{run.label}: {run.attributes['model']}, {run.attributes['kind']}, {run.attributes['backend']}\n"
                    f"{run.devices[0] if run.devices else ''}", fontsize=9)


def draw_phases(figure, runs):
    """A bar a run: mean time of each phase, over steps and ranks."""
    axes = figure.subplots()
    names = list(dict.fromkeys(name for run in runs for name in run.phase_names))
    colours = plot.get_cmap("tab10")
    for at, run in enumerate(runs):
        left = 0.0
        for name, mean in zip(run.phase_names, run.phase_ms.mean(axis=(0, 1))):
            axes.barh(at, mean, left=left, height=0.6, color=colours(names.index(name) % 10), label=name if at == 0 else None)
            left += mean
    axes.set_yticks(range(len(runs)), [run.label for run in runs])
    axes.invert_yaxis()
    axes.set_xlabel("mean of steps and ranks, ms")
    axes.margins(y=0.25)
    axes.legend(ncols=min(len(names), 7), loc="lower center", bbox_to_anchor=(0.4, 1.0), frameon=False, fontsize=8,
                handlelength=1, columnspacing=1)


def draw_roofline(figure, runs, bandwidth):
    """Time of a step over the bytes that it must move; the lines are what memory of `bandwidth` TB/s, or a share of it,
    would need: no point can lie below the lowest."""
    axes = figure.subplots()
    moved = np.array([run.busiest_bytes * 1e-9 for run in runs])
    line = np.array([moved.min() / 3, moved.max() * 3])
    for share, style in ((1.0, "-"), (0.5, "--"), (0.25, ":")):
        axes.plot(line, line / bandwidth / share, style, color="0.4", linewidth=1,
                  label=f"{bandwidth:g} TB/s" if share == 1 else f"{share:.0%} of it")
    for at, (run, gigabytes) in enumerate(zip(runs, moved)):
        median = run.quantile(0.5)
        axes.errorbar(gigabytes, median, yerr=[[median - run.quantile(0.1)], [run.quantile(0.9) - median]], marker="o",
                      color=plot.get_cmap("tab10")(at % 10), capsize=3, linestyle="none",
                      label=f"{run.label}: {100 * bandwidth_share(run, bandwidth):.3g} %")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(line)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.grid(color="0.92")
    axes.set_xlabel("GB that the busiest rank must move in a step, by the plan")
    axes.set_ylabel("step, ms (median, p10 to p90)")
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def bandwidth_share(run, bandwidth):
    """Of the rate `bandwidth` TB/s, what the run's median step makes."""
    return run.busiest_bytes / (run.quantile(0.5) * 1e-3) / (bandwidth * 1e12)


# ---------------------------------------------------------------- all of them

def make(parts, bandwidth):
    """The figures that these files give."""
    runs = [part for part in parts if isinstance(part, Run)]
    figures = [Figure(f"Depth curve: {sweep.label}", lambda at, sweep=sweep: draw_depth(at, sweep, bandwidth), (7.5, 6.5))
               for sweep in parts if isinstance(sweep, Sweep)]
    figures += [Figure(f"Step times: {run.label}", lambda at, run=run: draw_steps(at, run), (7.5, 3.2)) for run in runs]
    timed = [run for run in runs if run.phases_timed]
    if timed:
        figures.append(Figure("Phases", lambda at: draw_phases(at, timed), (7.5, 1.4 + 0.5 * len(timed))))
    counted = [run for run in runs if run.busiest_bytes]
    if counted:
        figures.append(Figure("Roofline position", lambda at: draw_roofline(at, counted, bandwidth), (7.5, 4.0)))
    return figures


def svg(figure):
    """One figure as an <svg> element."""
    made = plot.figure(figsize=figure.size, layout="constrained")
    figure.draw(made)
    text = io.StringIO()
    made.savefig(text, format="svg", metadata={"Date": None})
    plot.close(made)
    return text.getvalue()[text.getvalue().index("<svg"):]


def save_all(figures, path):
    """All figures, one below the other, in one file of the format that the name's ending says."""
    made = plot.figure(figsize=(max(figure.size[0] for figure in figures), sum(figure.size[1] for figure in figures)),
                       layout="constrained")
    if len(figures) == 1:
        figures[0].draw(made)
    else:
        rows = made.subfigures(len(figures), 1, height_ratios=[figure.size[1] for figure in figures])
        for figure, row in zip(figures, rows):
            figure.draw(row)
    made.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    plot.close(made)
