#!/usr/bin/env python3
"""Trains one configuration twice, with one setting changed, and compares the losses step by step.

    scripts/ab_runs.py CONFIG A B [--set KEY=VALUE]... [--seeds 1,2,3] [--out DIR] [--ema W]
    scripts/ab_runs.py --runs NAME A_DIR B_DIR [--runs ...] [--out DIR] [--ema W]

The second form trains nothing: it compares folders of runs. In the first, A and B are settings, as after --set; several are joined by commas: precision.compute=bf16 precision.compute=fp8 asks what
FP8 costs. Both runs see the same data from the same initial weights. Each seed trains one pair, in DIR/a_SEED and
DIR/b_SEED; what is there already goes on, or is read if it is finished. Standard library only.

Printed, and drawn in OUT/ab.html: (loss of B - loss of A) / loss of A in percent, both smoothed by a moving average of
weight W (0.9, as in DeepSeek-V3's report), its mean over the second half and the last quarter, and the difference of the
plain means of the last quarter.
"""

import argparse
import json
import os
import subprocess
import sys

import log_page
import run_log
from log_page import Chart, Series

BINARY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "train_moe")
DONE, USER = 0, 2


def train(config, settings, folder):
    """Runs or goes on; a run that was finished before says so with exit code 2, and is left as it is."""
    command = [BINARY, "train", "--quiet", "--config", config]
    for setting in settings + ["run.dir=%s" % json.dumps(folder)]:
        command += ["--set", setting]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode != DONE and not (done.returncode == USER and "is finished" in done.stderr):
        raise run_log.UserError("%s ended with %d: %s" % (" ".join(command), done.returncode, done.stderr.strip()))
    return run_log.Run(folder)


def mean(values):
    return sum(values) / len(values)


class Pair:
    """Losses of A and B at the steps that both have, and their difference in percent of A."""

    def __init__(self, a, b, ema):
        in_b = {step["step"]: step["loss"] for step in b.steps}
        both = [(s["step"], s["loss"], in_b[s["step"]]) for s in a.steps if in_b.get(s["step"]) and s.get("loss")]
        if len(both) < 4:
            raise run_log.UserError("%s and %s have %d steps in common" % (a.path, b.path, len(both)))
        self.step, self.a, self.b = (list(column) for column in zip(*both))
        smooth_a, smooth_b = run_log.smoothed(self.a, ema), run_log.smoothed(self.b, ema)
        self.percent = [100 * (y - x) / x for x, y in zip(smooth_a, smooth_b)]

    def second_half(self):
        return mean(self.percent[len(self.percent) // 2:])

    def last_quarter(self):
        return mean(self.percent[len(self.percent) * 3 // 4:])

    def plain(self):
        quarter = len(self.a) * 3 // 4
        return 100 * (mean(self.b[quarter:]) / mean(self.a[quarter:]) - 1)


HEAD = ["", "steps", "second half", "last quarter", "last quarter, not smoothed"]


def row(name, pair):
    return [name, "%d" % len(pair.step)] + ["%+.3f %%" % x for x in (pair.second_half(), pair.last_quarter(), pair.plain())]


def page(arguments, pairs):
    a, b = arguments.a or "A", arguments.b or "B"
    losses, percent = [], []
    for i, (name, pair) in enumerate(pairs):
        losses += [Series(i, "%s, %s" % (a, name), pair.step, pair.a),
                   Series(i, "%s, %s" % (b, name), pair.step, pair.b, "dashed")]
        percent.append(Series(i, name, pair.step, pair.percent))
    charts = [Chart("Difference of the losses, %% (weight %g)" % arguments.ema, percent, "step", settled=True),
              Chart("Loss, nats a token", losses, "step", settled=True, note="dashed: %s" % b)]
    table = log_page.table_html(HEAD, [row(name, pair) for name, pair in pairs])
    title = "%s against %s" % (b, a)
    return log_page.page_html(title, os.path.basename(arguments.config or ""), table, charts, "")


def trained_pairs(arguments):
    """Trains what is not there yet; yields (name, Pair)."""
    for seed in arguments.seeds.split(","):
        common = arguments.sets + ["run.seed=%s" % seed]
        runs = [train(arguments.config, common + choice.split(","), os.path.join(arguments.out, "%s_%s" % (side, seed)))
                for side, choice in (("a", arguments.a), ("b", arguments.b))]
        yield "seed %s" % seed, Pair(runs[0], runs[1], arguments.ema)


def compared_pairs(arguments):
    for name, a, b in arguments.runs:
        yield name, Pair(run_log.Run(a), run_log.Run(b), arguments.ema)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?")
    parser.add_argument("a", metavar="A", nargs="?")
    parser.add_argument("b", metavar="B", nargs="?")
    parser.add_argument("--runs", nargs=3, metavar=("NAME", "A_DIR", "B_DIR"), action="append")
    parser.add_argument("--set", dest="sets", metavar="KEY=VALUE", action="append", default=[])
    parser.add_argument("--seeds", default="1337")
    parser.add_argument("--out", metavar="DIR", default="runs/ab")
    parser.add_argument("--ema", type=float, default=0.9)
    arguments = parser.parse_args()
    if bool(arguments.runs) == bool(arguments.b):
        parser.error("give CONFIG A B, or --runs")
    try:
        pairs = []
        for pair in compared_pairs(arguments) if arguments.runs else trained_pairs(arguments):
            pairs.append(pair)
            print("  ".join(("%s %s" % item).strip() for item in zip(HEAD, row(*pair))), flush=True)
        if len(pairs) > 1 and not arguments.runs:
            print("mean  second half %+.3f %%  last quarter, not smoothed %+.3f %%" %
                  (mean([pair.second_half() for _, pair in pairs]), mean([pair.plain() for _, pair in pairs])))
        os.makedirs(arguments.out, exist_ok=True)
        out = os.path.join(arguments.out, "ab.html")
        with open(out, "w", encoding="utf-8") as file:
            file.write(page(arguments, pairs))
        print(out)
    except (run_log.UserError, OSError) as error:
        sys.exit("error: %s" % error)


if __name__ == "__main__":
    main()
