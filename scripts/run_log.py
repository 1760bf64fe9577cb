"""Reads log.jsonl of train_moe, whole or as it grows. The format: model/train/log_file.h. Standard library only."""

import json
import os
import time

LOG_VERSION = 1


class UserError(Exception):
    """Something the user can put right; shown without a traceback."""


def log_path(run):
    """The log of a run's folder, or the file itself."""
    path = os.path.join(run, "log.jsonl") if os.path.isdir(run) else run
    if not os.path.isfile(path):
        raise UserError("%s: no log.jsonl there" % run if os.path.isdir(run) else "%s: no such file" % run)
    return path


def parse(line, path):
    """The record of a line, or None if it is not whole: the writer may be at it."""
    try:
        record = json.loads(line.decode("utf-8", "replace") if isinstance(line, bytes) else line)
    except ValueError:
        return None
    if not isinstance(record, dict) or "kind" not in record:
        return None
    if record["kind"] == "run" and record.get("version", LOG_VERSION) > LOG_VERSION:
        raise UserError("%s: version %s of the log; this script knows %d" % (path, record["version"], LOG_VERSION))
    return record


class Run:
    """What a log says: `steps`, `vals`, `samples`, `warnings`, `fp8s` in order, `end` (done or stop, or None), `config`."""

    def __init__(self, path, name=None):
        self.path = log_path(path)
        self.steps, self.vals, self.samples, self.warnings, self.config, self.end = [], [], [], [], {}, None
        self.fp8s = []
        lists = {"step": self.steps, "val": self.vals, "sample": self.samples, "warn": self.warnings, "fp8": self.fp8s}
        with open(self.path, encoding="utf-8", errors="replace") as file:
            for line in file:
                record = parse(line, self.path)
                if record is None:
                    continue
                if record["kind"] == "run":
                    self.config = record.get("config") or {}
                elif record["kind"] in ("done", "stop"):
                    self.end = record
                elif record["kind"] in lists:
                    lists[record["kind"]].append(record)
        folder = os.path.basename(os.path.dirname(os.path.abspath(self.path)))
        self.name = name or folder
        self.hours = []
        hours = 0.0
        for step in self.steps:
            hours += (step.get("ms") or 0) / 3.6e6
            self.hours.append(hours)

    def x(self, unit):
        """Positions of the steps: "step", "tokens" or "hours" of training."""
        return self.hours if unit == "hours" else [step[unit] for step in self.steps]

    def x_of(self, step, unit):
        """Position of a record between steps, such as a validation."""
        if unit == "step" or not self.steps:
            return step
        low, high = 0, len(self.steps) - 1
        while low < high:
            middle = (low + high) // 2
            if self.steps[middle]["step"] < step:
                low = middle + 1
            else:
                high = middle
        return self.x(unit)[low]


def open_runs(arguments):
    """Runs of "FOLDER", "log.jsonl" or "NAME=FOLDER", with names that differ."""
    runs = []
    for argument in arguments:
        name, separator, path = argument.partition("=")
        named = separator and not os.path.exists(argument)
        runs.append(Run(path if named else argument, name if named else None))
    names = [run.name for run in runs]
    for run in runs:
        if names.count(run.name) > 1:
            run.name = os.path.dirname(os.path.relpath(run.path)) or run.path
    return runs


def fp8_kind(name):
    """Of a tensor of the record "fp8" (model/observe.c): weights are w_..., gradients d..."""
    return "weights" if name.startswith("w_") else "gradients" if name.startswith("d") else "inputs"


def fp8_worst(record, member, kind):
    """The largest of a member over the layers and tensors of this kind; None without any."""
    values = (tensor[member] for layer in record["layers"] for name, tensor in layer.items() if fp8_kind(name) == kind)
    return max((value for value in values if value is not None), default=None)


def smoothed(values, weight):
    """Exponential moving average that starts right: s_i = sum w^(i-j) v_j / sum w^(i-j). Gaps (None) stay gaps."""
    out, total, norm = [], 0.0, 0.0
    for value in values:
        if value is not None:
            total = weight * total + (1 - weight) * value
            norm = weight * norm + (1 - weight)
        out.append(None if value is None else total / norm)
    return out


class Tail:
    """The lines of a file, also of one that is written, replaced or cut."""

    def __init__(self, path):
        self.path, self.file, self.rest, self.position = path, None, b"", 0

    def line(self):
        """The next whole line and where it starts, or None if there is none yet."""
        if self.file is None:
            try:
                self.file = open(self.path, "rb")
            except FileNotFoundError:
                return None
            self.rest, self.position = b"", 0
        self.rest += self.file.readline()
        if not self.rest.endswith(b"\n"):
            return None
        line, at = self.rest, self.position
        self.rest, self.position = b"", at + len(line)
        return line, at

    def renew(self):
        """Starts over if the path is another file by now, or a shorter one."""
        try:
            now = os.stat(self.path)
            same = self.file and now.st_ino == os.fstat(self.file.fileno()).st_ino
            if self.file is None or (same and now.st_size >= self.file.tell()):
                return
        except FileNotFoundError:
            pass
        self.close()

    def close(self):
        if self.file:
            self.file.close()
        self.file = None


def follow(path, wait, poll_s=1.0):
    """Yields the records of a log, with `wait` also those still to come, until the run is done. A resume cuts the file
    back and writes steps again: each step is yielded once, for it comes out the same. A new run in the same folder
    starts with the record {"kind": "new"}."""
    tail, first_line, last_step = Tail(path), None, {}
    try:
        while True:
            found = tail.line()
            if found is None:
                if not wait:
                    return
                time.sleep(poll_s)
                tail.renew()
                continue
            line, at = found
            if at == 0 and line != first_line:
                if first_line is not None:
                    last_step = {}
                    yield {"kind": "new"}
                first_line = line
            record = parse(line, path)
            if record is None:
                continue
            kind, step = record["kind"], record.get("step", 0)
            if kind in ("step", "val", "sample", "fp8"):
                # Samples of one step are several records; those of a step that was passed are repeats.
                if step < last_step.get(kind, -1) or (step == last_step.get(kind) and kind != "sample"):
                    continue
                last_step[kind] = step
            yield record
            if kind == "done" and wait:
                return
    finally:
        tail.close()


def scalars(record):
    """(name, value) of everything in a record that is one number over time."""
    kind = record["kind"]
    if kind == "step":
        pairs = [("train/" + key, record.get(key)) for key in ("loss", "balance", "gnorm", "lr", "maxvio", "maxvio_mean",
                                                               "rank_load", "rank_load_mean", "tokens", "tokens_per_s", "tflops", "mfu")]
        pairs += [("gpu/" + key, (record.get("gpu") or {}).get(key)) for key in ("temperature_c", "sm_clock_mhz",
                                                                                 "power_w", "ecc_uncorrected")]
        pairs += [("train/mtp_%d" % (i + 1), loss) for i, loss in enumerate(record.get("mtp") or [])]
        for i, (least, mean, largest) in enumerate(record.get("bias") or []):
            pairs += [("bias/%02d_least" % (i + 1), least), ("bias/%02d_mean" % (i + 1), mean),
                      ("bias/%02d_largest" % (i + 1), largest)]
        pairs.append(("train/skipped", 1.0 if record.get("skip") else 0.0))
    elif kind == "val":
        pairs = [("val/%s/%s" % (s["name"], key), s.get(key)) for s in record.get("sets", [])
                 for key in ("loss", "perplexity", "bpb")]
        pairs += [("choice/%s/%s" % (c["name"], key), c.get(key)) for c in record.get("choices", [])
                  for key in ("accuracy", "accuracy_by_sum", "label_nats")]
    elif kind == "fp8":
        pairs = [("fp8/%s/%s" % (which, key), fp8_worst(record, key, which)) for which in ("inputs", "weights", "gradients")
                 for key in ("amax", "zero", "subnormal", "saturated", "nan")]
    else:
        pairs = []
    return [(name, float(value)) for name, value in pairs if value is not None]
