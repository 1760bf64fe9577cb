#!/usr/bin/env python3
"""Draws the log of one or several runs: an HTML page, and a PNG where matplotlib is installed.

    scripts/plot_log.py [NAME=]RUN... [--x step|tokens|hours] [--smooth W] [--out FILE.html] [--no-png]

RUN is a run's folder or its log.jsonl. Loss, MTP loss, validation, learning rate, gradient norm, throughput, balance,
router biases, multiple choice, FP8's largest values; several runs share each chart, one colour each. The load of every
expert is a heat map of its own for each run. --smooth W draws the exponential moving average of weight W over the raw
values (0 = off); without it the weight grows with the number of steps.

The page is one file without any link to another, readable in light and dark; it needs no package. Default:
plot.html in the run's folder, or in the folder that the runs have in common; the PNG lies beside it.
"""

import argparse
import html
import os
import sys

import log_page
import run_log
from log_page import Chart, Series

FP8_KINDS = (("inputs", "line"), ("weights", "dashed"), ("gradients", "dots"))
LOADS_AT_MOST = 4000 # steps of a heat map that are read: more than its columns


# ---- what is drawn --------------------------------------------------------------------------------------------------


class Plot:
    def __init__(self, runs, unit, smooth):
        self.runs, self.unit, self.smooth = runs, unit, smooth
        self.x_name = {"step": "step", "tokens": "tokens", "hours": "hours of training"}[unit]

    def name(self, run, what):
        return "%s %s" % (run.name, what) if len(self.runs) > 1 else what

    def lines(self, what, value, style="line"):
        """A series a run of value(step record); smoothed over its raw values if so asked."""
        out = []
        for i, run in enumerate(self.runs):
            x, y = run.x(self.unit), [value(step) for step in run.steps]
            if self.smooth > 0 and sum(v is not None for v in y) > 2:
                out.append(Series(i, self.name(run, what + " (raw)"), x, y, "faint"))
                y = run_log.smoothed(y, self.smooth)
            out.append(Series(i, self.name(run, what), x, y, style))
        return out

    def raw(self, what, value, style="line"):
        return [Series(i, self.name(run, what), run.x(self.unit), [value(step) for step in run.steps], style)
                for i, run in enumerate(self.runs)]

    def between(self, what, member, list_name, style="dots"):
        """A series for each run and each set of its validation records."""
        out = []
        for i, run in enumerate(self.runs):
            names = list(dict.fromkeys(s["name"] for val in run.vals for s in val.get(list_name, [])))
            for name in names:
                points = [(run.x_of(val["step"], self.unit), s.get(member))
                          for val in run.vals for s in val.get(list_name, []) if s["name"] == name]
                label = name if len(names) > 1 and style == "dots" else ""
                out.append(Series(i, self.name(run, what % name), *zip(*points), style, label))
        return out

    def fp8(self, kind, style):
        """A series for each run that has counted its FP8 tensors: the largest amax of this kind over layers."""
        out = []
        for i, run in enumerate(self.runs):
            points = [(run.x_of(record["step"], self.unit), run_log.fp8_worst(record, "amax", kind)) for record in run.fp8s]
            if points:
                out.append(Series(i, self.name(run, kind), *zip(*points), style))
        return out

    def chart(self, title, series, **options):
        return Chart(title, series, self.x_name, **options)

    def charts(self):
        note = "thin: as logged; thick: moving average, weight %g" % self.smooth if self.smooth > 0 else ""
        depths = max((len(step.get("mtp") or []) for run in self.runs for step in run.steps[:1]), default=0)
        mtp = [s for k in range(depths) for s in self.lines("depth %d" % (k + 1), item("mtp", k), "dashed" if k else "line")]
        bits = self.between("%s", "bpb", "sets")
        charts = [
            self.chart("Loss, nats a token", self.lines("train", member("loss")) + self.between("val %s", "loss", "sets"),
                       settled=True, note=join(note, "dots: validation")),
            self.chart("MTP loss, nats a token", mtp, settled=True,
                       note=join(note, "dashed: depth 2 and more" if depths > 1 else "")),
            self.chart("Validation, bits a byte", bits),
            self.chart("Multiple choice, share right", self.between("%s", "accuracy", "choices") +
                       self.between("%s, chance", "chance", "choices", "dashed"), note="dashed: chance"),
            self.chart("Learning rate", self.raw("lr", member("lr")), zero=True),
            self.chart("Gradient norm before clipping", self.lines("gnorm", member("gnorm")), log=True, note=note),
            self.chart("Throughput, tokens a second", self.lines("tokens/s", member("tokens_per_s")), zero=True, note=note),
            self.chart("Balance: largest load over mean, less 1", self.lines("worst layer", member("maxvio")) +
                       self.raw("mean of layers", member("maxvio_mean"), "dashed"), zero=True,
                       note=join(note, "solid: worst layer; dashed: mean of layers")),
            self.chart("Router bias", self.raw("all layers", bias_range, "band") + self.raw("least", bias_end(0, min)) +
                       self.raw("largest", bias_end(2, max)), note="least to largest of all experts of all layers"),
        ]
        charts.append(self.chart("FP8: largest value in any layer", [s for kind, style in FP8_KINDS for s in
                                                                     self.fp8(kind, style)], log=True,
                                 note="solid: inputs of Linears; dashed: weights; dots: gradients"))
        return [chart for chart in charts if chart.series]

    def loads(self):
        """(run, loads of its steps, their positions, names of the layers) of each run that has experts."""
        out = []
        for i, run in enumerate(self.runs):
            steps = [k for k, step in enumerate(run.steps) if step.get("load")]
            steps = steps[::max(1, len(steps) // LOADS_AT_MOST)]
            if steps:
                x = run.x(self.unit)
                out.append((i, [run.steps[k]["load"] for k in steps], [x[k] for k in steps], layer_names(run, steps[0])))
        return out

    def heat_maps(self):
        return [log_page.heat_html("%s: load of the experts" % self.runs[i].name, loads, x, self.x_name, names, i)
                for i, loads, x, names in self.loads()]


def join(*parts):
    return "; ".join(part for part in parts if part)


def member(name):
    return lambda step: step.get(name)


def item(name, k):
    return lambda step: step[name][k] if len(step.get(name) or []) > k else None


def bias_end(column, choose):
    return lambda step: choose(layer[column] for layer in step["bias"]) if step.get("bias") else None


def bias_range(step):
    return (bias_end(0, min)(step), bias_end(2, max)(step))


def layer_names(run, step):
    """Of the rows of `load`: main layers with experts, then MTP's."""
    n = len(run.steps[step]["load"])
    model = run.config.get("model") or {}
    n_mtp = min(n, model.get("num_nextn_predict_layers") or 0)
    first = model.get("first_k_dense_replace") or 0
    return ["layer %d" % (first + i + 1) for i in range(n - n_mtp)] + ["MTP %d" % (k + 1) for k in range(n_mtp)]


# ---- beside the charts ----------------------------------------------------------------------------------------------

HEAD = ["run", "steps", "tokens", "train loss", "validation", "bits/byte", "tokens/s", "hours", "skipped", "state"]


def summary(run):
    """What HEAD names, as texts; the loss is the mean of the last 20 steps."""
    last = [step["loss"] for step in run.steps[-20:] if step.get("loss") is not None]
    sets = next((val["sets"] for val in reversed(run.vals) if val.get("sets")), [])
    shown = sets[0] if sets else {}
    tokens = run.steps[-1]["tokens"]
    return [run.name, "%d" % run.steps[-1]["step"], log_page.short(tokens), number("%.4f", sum(last) / len(last) if last else None),
            number("%.4f", shown.get("loss")), number("%.3f", shown.get("bpb")),
            number("%.0f", tokens / run.hours[-1] / 3600 if run.hours[-1] > 0 else None), "%.3g" % run.hours[-1],
            "%d" % sum(1 for step in run.steps if step.get("skip")),
            {"done": "finished", "stop": "stopped, saved"}.get((run.end or {}).get("kind"), "not ended")]


def number(text, x):
    return text % x if x is not None else "-"


def samples_html(runs):
    out = []
    for i, run in enumerate(runs):
        last = [s for s in run.samples if s["step"] == run.samples[-1]["step"]]
        for s in last:
            out.append('<pre data-run="%d"><b>%s, step %d</b>\n<b>%s</b>%s</pre>' %
                       (i, html.escape(run.name), s["step"], html.escape(s.get("prompt") or ""), html.escape(s.get("text") or "")))
    return "<h2>Last samples</h2>" + "".join(out) if out else ""


def page(plot):
    runs = plot.runs
    title = runs[0].name if len(runs) == 1 else "%d runs: %s" % (len(runs), ", ".join(run.name for run in runs))
    subtitle = "train_moe, up to %s" % max((run.steps[-1].get("time") or "" for run in runs))
    heat = plot.heat_maps()
    extra = '<h2>Experts</h2><div class="grid-of">%s</div>' % "".join(heat) if heat else ""
    return log_page.page_html(title, subtitle, log_page.table_html(HEAD, [summary(run) for run in runs]), plot.charts(),
                              extra + samples_html(runs))


def write_png(plot, path):
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    charts, maps = plot.charts(), plot.loads()
    rows = (len(charts) + len(maps) + 1) // 2
    figure, grid = pyplot.subplots(rows, 2, figsize=(14, 3.6 * rows), squeeze=False)
    for cell in grid.flat[len(charts) + len(maps):]:
        cell.axis("off")
    for cell, (run, loads, x, names) in zip(grid.flat[len(charts):], maps):
        heat, _ = log_page.heat_rows(loads)
        cell.imshow([[log_page.heat_level(ratio) for ratio in row] for row in heat], aspect="auto", cmap="coolwarm", vmin=-1,
                    vmax=1, interpolation="nearest", extent=(x[0], x[-1], len(names), 0))
        cell.set_yticks([i + 0.5 for i in range(len(names))], names, fontsize=7)
        cell.set_title("%s: load of the experts (blue 1/4, red 4 times the mean)" % plot.runs[run].name, fontsize=10)
        cell.set_xlabel(plot.x_name, fontsize=8)
    styles = {"faint": dict(linewidth=0.7, alpha=0.3), "dashed": dict(linestyle="--"), "dots": dict(marker="o", markersize=3)}
    for cell, chart in zip(grid.flat, charts):
        for s in chart.series:
            colour = "C%d" % s.run
            if s.style == "band":
                cell.fill_between(s.x, [y[0] for y in s.y], [y[1] for y in s.y], color=colour, alpha=0.2)
            else:
                label = s.name if s.style != "faint" else None
                cell.plot(s.x, s.y, color=colour, label=label, **styles.get(s.style, {}))
        cell.set_title(chart.title, fontsize=10)
        cell.set_xlabel(chart.x_name, fontsize=8)
        cell.grid(alpha=0.3)
        if chart.log:
            cell.set_yscale("log")
        if chart.zero:
            cell.set_ylim(bottom=min(0, cell.get_ylim()[0]))
        cell.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


# ---- command line ---------------------------------------------------------------------------------------------------


def smoothing(text):
    weight = float(text)
    if not 0 <= weight < 1:
        raise argparse.ArgumentTypeError("must be in [0, 1)")
    return weight


def usual_smoothing(runs):
    """Averages over about a fortieth of the longest run: more would lag behind a falling loss."""
    n = max(len(run.steps) for run in runs) / 40
    return round(min(0.98, 1 - 1 / n), 2) if n > 1 else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", metavar="[NAME=]RUN", nargs="+")
    parser.add_argument("--x", choices=("step", "tokens", "hours"), default="step")
    parser.add_argument("--smooth", type=smoothing, metavar="W")
    parser.add_argument("--out", metavar="FILE.html")
    parser.add_argument("--no-png", action="store_true")
    arguments = parser.parse_args()
    try:
        runs = run_log.open_runs(arguments.runs)
        for run in runs:
            if not run.steps:
                raise run_log.UserError("%s: no step in it yet" % run.path)
        out = arguments.out or os.path.join(common_folder(runs), "plot.html")
        smooth = usual_smoothing(runs) if arguments.smooth is None else arguments.smooth
        plot = Plot(runs, arguments.x, smooth)
        text = page(plot)
        with open(out, "w", encoding="utf-8") as file:
            file.write(text)
        print(out)
        if not arguments.no_png:
            png = os.path.splitext(out)[0] + ".png"
            write_png(plot, png)
            print(png)
    except (run_log.UserError, OSError) as error:
        sys.exit("error: %s" % error)
    except ImportError:
        print("no PNG: matplotlib is not installed (pip install matplotlib, or --no-png)", file=sys.stderr)


def common_folder(runs):
    return os.path.commonpath([os.path.dirname(os.path.abspath(run.path)) for run in runs])


if __name__ == "__main__":
    main()
