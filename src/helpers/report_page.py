"""The page of `k3decode report`: figures as embedded SVG, numbers as tables. It needs no other file."""
import html

import numpy as np

import report_figures
from report_data import Run

STYLE = """
body { font: 15px/1.45 sans-serif; max-width: 62em; margin: 2em auto; padding: 0 1em; color: #222; background: #fff; }
h1 { font-size: 1.5em; } h2 { font-size: 1.2em; margin-top: 2em; border-top: 1px solid #ccc; padding-top: .6em; }
table { border-collapse: collapse; margin: .8em 0; }
td, th { padding: .15em .7em; border-bottom: 1px solid #ddd; text-align: right; }
td:first-child, th:first-child { text-align: left; } th { font-weight: 600; }
pre { background: #f4f4f4; padding: .6em .8em; overflow-x: auto; white-space: pre-wrap; } svg { max-width: 100%; height: auto; }
"""


def table(head, rows, name):
    """Cells are escaped here; the class names the table for whoever reads the page by program."""
    def line(tag, cells):
        return "<tr>" + "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"
    return f'<table class="{name}">\n' + "\n".join([line("th", head)] + [line("td", row) for row in rows]) + "\n</table>\n"


def about(part):
    """What ran, with the exact command."""
    attributes = part.attributes
    rows = [("program", f"k3decode {attributes['program_version']}"), ("started", attributes["start_time"]),
            ("model", f"{attributes['model']} (digest {int(attributes['model_digest']):016x})"),
            ("kind", attributes["kind"]), ("ranks", attributes["ranks"]), ("backend", attributes["backend"])]
    if isinstance(part, Run):
        rows += [("context", attributes["first_context"]), ("whole steps", len(part.step_ms)), ("ending", part.ending)]
    devices = html.escape("\n".join(part.devices))
    return (f"<h2>{html.escape(part.label)}</h2>\n<pre class=\"command\">{html.escape(attributes['command'])}</pre>\n"
            + table(("", ""), rows, "about") + f"<pre>{devices}</pre>\n")


def run_tables(run, bandwidth):
    quantiles = [("median", 0.5), ("p10", 0.1), ("p90", 0.9), ("min", 0.0), ("max", 1.0)]
    page = table(("step", "ms", "tokens/s"),
                 [(name, f"{run.quantile(q):.4f}", f"{1e3 / run.quantile(q):.2f}" if run.quantile(q) > 0 else "-")
                  for name, q in quantiles], "steps")
    if run.phases_timed:
        of_rank = run.phase_ms.mean(axis=0)                             # [ranks, phases]
        mean = of_rank.mean(axis=0)
        page += table(("phase", "mean ms", "share", "slowest ms", "of rank"),
                      [(name, f"{mean[k]:.4f}", f"{mean[k] / mean.sum():.1%}", f"{of_rank[:, k].max():.4f}",
                        of_rank[:, k].argmax()) for k, name in enumerate(run.phase_names)], "phases")
    else:
        page += "<p>Phases were not timed: a captured step is timed whole.</p>\n"
    if run.step_bytes is not None:
        rank = int(np.argmax(run.step_bytes.sum(axis=1)))
        rows = [(name, f"{value * 1e-9:.6g}") for name, value in zip(run.byte_names, run.step_bytes[rank])]
        limit = run.busiest_bytes * 1e-9 / bandwidth
        rows += [(f"all, on rank {rank}", f"{run.busiest_bytes * 1e-9:.6g}"), (f"ms at {bandwidth:g} TB/s", f"{limit:.4f}"),
                 ("share of that rate", f"{report_figures.bandwidth_share(run, bandwidth):.2%}")]
        page += table(("must move in a step, by the plan", "GB"), rows, "bytes")
    if run.plan:
        page += f"<pre>{html.escape(run.plan)}</pre>\n"
    return page


def sweep_tables(sweep, bandwidth):
    names = list(sweep.statistics)
    rows = [(context, f"{'AB'[arm]} {sweep.arms[arm]}", *(f"{sweep.statistics[name][c, arm]:.4f}" for name in names),
             sweep.attention[c, arm])
            for c, context in enumerate(sweep.contexts) for arm in (0, 1) if not sweep.missing[arm]]
    page = table(("positions", "arm", *(f"{name} ms" for name in names), "attention"), rows, "curve")
    page += "".join(f"<p>{'AB'[arm]} {html.escape(sweep.arms[arm])}: {html.escape(why)}</p>\n"
                    for arm, why in enumerate(sweep.missing) if why)
    if not any(sweep.missing):
        page += table(("positions", "B - A ms", "noise floor ms", ""),
                      [(context, f"{difference:+.4f}", f"{floor:.4f}", "" if above else "no difference") for
                       context, difference, floor, above in zip(sweep.contexts, sweep.difference, sweep.floor, sweep.above)],
                      "differences")
    if sweep.step_bytes is not None:
        median = sweep.statistics["median"]
        page += table(("positions", "arm", "must move, GB", f"ms at {bandwidth:g} TB/s", "share of that rate"),
                      [(context, "AB"[arm], f"{moved * 1e-9:.6g}", f"{moved * 1e-9 / bandwidth:.4f}",
                        f"{moved * 1e-9 / bandwidth / median[c, arm]:.2%}")
                       for c, context in enumerate(sweep.contexts) for arm, moved in enumerate(sweep.step_bytes[c])
                       if not sweep.missing[arm]], "bytes")
    return page


def page(parts, figures, bandwidth):
    body = "".join(f"<h2>{html.escape(figure.title)}</h2>\n{report_figures.svg(figure)}\n" for figure in figures)
    for part in parts:
        body += about(part) + (run_tables(part, bandwidth) if isinstance(part, Run) else sweep_tables(part, bandwidth))
    title = "k3decode: " + ", ".join(part.label for part in parts)
    return (f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{html.escape(title)}</title>\n'
            f"<style>{STYLE}</style>\n</head>\n<body>\n<h1>{html.escape(title)}</h1>\n{body}</body>\n</html>\n")
