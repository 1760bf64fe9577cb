#!/usr/bin/env bash
# The scripts that read log.jsonl: plots, TensorBoard event files; and what report.md and eval say. Prints each check; exit 1
# if one fails.
set -u
cd "$(dirname "$0")/.."
PYTHONPATH=tests:scripts PYTHONDONTWRITEBYTECODE=1 python3 - <<'PYTHON'
import collections, html.parser, zlib, xml.etree.ElementTree as tree
from trial import *
import log_page, run_log, to_tensorboard

DATA = prepare("shards", "model/model.c", "model/mla.c", "model/moe.c")


def choice_file(name, n):
    """Questions in bytes: the next letter of the alphabet, among others."""
    body = []
    for i in range(n):
        context, right = [97 + i % 20 + k for k in range(4)], 97 + i % 20 + 4
        choices = [[right, right + 1] if c == i % 4 else [65 + c] * (1 + c) for c in range(4)]
        example = [65535, 0, i, i % 4, 4, len(context), *context]
        for ids in choices:
            example += [len(ids), *ids]
        example[1] = 2 * len(example)
        body += example
    with open(path(name), "wb") as f:
        f.write(struct.pack("<256i", 20240522, 1, n, 60, *[0] * 252) + array.array("H", body).tobytes())
    return path(name)


CHOICE = [{"name": "letters", "path": choice_file("letters.bin", 12)}]
SECTIONS = dict(data=DATA, train={"steps": 30, "seq_len": 64, "lr": 3e-3, "global_batch_size": 4, "micro_batch_size": 2},
                model={"num_nextn_predict_layers": 1}, sample={"every_steps": 30, "prompts": ["<b>&"], "tokens": 8},
                checkpoint={"every_steps": 10})
file = config("one", eval={"every_steps": 10, "tokens": 640, "choice": CHOICE, "choice_every_steps": 15}, **SECTIONS)
r = train(file)
check("a run to plot", r.returncode == DONE and " letters 0." in r.stdout, said(r))
train(config("two", eval={"every_steps": 10, "tokens": 640}, **SECTIONS), "train.lr=1e-3")
steps, vals = records("one", "step"), records("one", "val")


# ---- multiple choice and report.md ----
check("choices are due by themselves, and at the end", [(v["step"], len(v["sets"]), len(v.get("choices", []))) for v in vals]
      == [(10, 1, 0), (15, 0, 1), (20, 1, 0), (30, 1, 1)], vals)
last = vals[-1]["choices"][0]
check("12 questions, chance a quarter", last["examples"] == 12 and last["chance"] == 0.25 and 0 <= last["accuracy"] <= 1, last)
lines = {run("eval", "--config", file, "train.micro_batch_size=%d" % b).stdout for b in (1, 2, 4)}
lines = {re.sub(r"^\S+Z |[0-9.]+ m?s\n", "", line) for line in lines} # neither the clock nor the time it took
check("eval gives loss, bits a byte, perplexity and choices; the micro-batch does not matter", len(lines) == 1 and
      all(part in next(iter(lines)) for part in ("held_out %.4f" % vals[-1]["sets"][0]["loss"], "bpb ", "perplexity ",
      "letters %.3f +- " % last["accuracy"], "of 12 (chance 0.250")), lines)
r = run("eval", "--config", file, "data.val=[]")
check("eval of choices alone", r.returncode == DONE and "| letters %.3f" % last["accuracy"] in r.stdout and "held_out" not in
      r.stdout, said(r))
r = train(file, "run.dir=" + path("broken"), 'eval.choice=' + path("shards", "train_000.bin"))
check("a shard as a choice file: exit 2", is_refusal(r, "but a token shard", "magic"), said(r))
with open(path("one", "report.md"), encoding="utf-8") as f:
    report = f.read()
check("report.md", all(part in report for part in ("Finished at step 30 of 30", "| held_out | loss %.4f" %
      vals[-1]["sets"][0]["loss"], "| letters | %.1f %% of 12" % (100 * last["accuracy"]), "\n    <b>&",
      "| weights | %s |" % path("one", "step_00000030"))), report)
r = train(file, "run.dir=" + path("stopped"), "eval.every_steps=0", "eval.choice_every_steps=0", "sample.every_steps=0",
          "run.stop_after_minutes=0.00001")
with open(path("stopped", "report.md"), encoding="utf-8") as f:
    report = f.read()
check("report.md of a run that stopped early, without validation", r.returncode == STOPPED and "Stopped early" in report and
      "| validation | none since the last start |" in report, report)


# ---- ab_runs.py, of runs that are there ----
r = subprocess.run([sys.executable, "scripts/ab_runs.py", "--runs", "lr", path("one"), path("two"), "--runs", "none", path("one"),
                    path("one"), "--out", path("ab")], capture_output=True, text=True)
a, b = ([s["loss"] for s in records(name, "step")] for name in ("one", "two"))
plain = 100 * (sum(b[len(b) * 3 // 4:]) / sum(a[len(a) * 3 // 4:]) - 1)
check("ab_runs.py compares two runs, and a run with itself", r.returncode == DONE and r.stdout.count("steps %d" % len(a)) == 2 and
      "not smoothed %+.3f %%" % plain in r.stdout and "second half +0.000 %" in r.stdout and
      os.path.getsize(path("ab", "ab.html")) > 2000, said(r))


# ---- prepare_choice.py ----
def prepare_choice(lines, *arguments):
    with open(path("questions.jsonl"), "w") as f:
        f.writelines(json.dumps(line) + "\n" for line in lines)
    return subprocess.run([sys.executable, "scripts/prepare_choice.py", "--out", path("questions.bin"), *arguments,
                           path("questions.jsonl")], capture_output=True, text=True)


def numbers(letter):
    with open(path("questions.bin"), "rb") as f:
        header = struct.unpack("<256i", f.read(1024))
        return header[:4], list(array.array(letter, f.read()))


ASKED = [{"ctx": "ab", "endings": ["c", "de"], "label": 1}, {"question": "x ", "choices": ["y", "z", "z"], "answer": "C"}]
NUMBERS = [65535, 30, 0, 1, 2, 2, 97, 98, 2, 32, 99, 3, 32, 100, 101]
SECOND = [65535, 28, 1, 2, 3, 2, 120, 32, 1, 121, 1, 122, 1, 122]
r = prepare_choice(ASKED, "--tokenizer", "bytes")
check("prepare_choice.py writes llm.c's format", r.returncode == 0 and numbers("H") ==
      ((20240522, 1, 2, 30), NUMBERS + SECOND), (said(r), numbers("H")))
r = run("eval", "--config", file, "data.val=[]", "eval.choice=" + path("questions.bin"))
check("and eval reads it", r.returncode == DONE and " of 2 (chance 0.417" in r.stdout, said(r))
with open(path("shards", "tokenizer.json")) as f:
    large = json.load(f)
large["added_tokens"].append({**large["added_tokens"][0], "id": 70000, "content": "<|large|>"})
with open(path("large.json"), "w") as f:
    json.dump(large, f)
r = prepare_choice(ASKED, "--tokenizer", path("large.json"), "--document-token")
check("in 32 bits for a large vocabulary, with the document token", r.returncode == 0 and numbers("I") == ((20240522, 7, 2, 64),
      [0xFFFFFFFF, 64, 0, 1, 2, 3, 256] + NUMBERS[6:] + [0xFFFFFFFF, 60, 1, 2, 3, 3, 256] + SECOND[6:]), (said(r), numbers("I")))
for line, part in (({"ctx": "a", "endings": ["x"], "label": 0}, "label 0 of 1 choices"), ({"ctx": "a"}, "known sets"),
                   ({"ctx": "a", "endings": ["x", "y"], "label": 2}, "label 2 of 2"), ({"ctx": "", "endings": ["x", "y"],
                   "label": 0}, "an empty context"), ({"ctx": "a", "endings": "xy", "label": 0}, "list of texts"), ([], "known sets")):
    r = prepare_choice([ASKED[0], line], "--tokenizer", "bytes")
    check("prepare_choice.py refuses: " + part, r.returncode == 2 and ":2: " in r.stderr and part in r.stderr, said(r))


# ---- the page ----
def plot(*arguments):
    return subprocess.run([sys.executable, "scripts/plot_log.py", *arguments], capture_output=True, text=True)


class Page(html.parser.HTMLParser):
    """Well-formed by tags; notes attributes and text."""
    VOID = {"meta", "link", "input", "br"}

    def __init__(self, text):
        super().__init__()
        self.open, self.problems, self.attributes, self.tags = [], [], [], collections.Counter()
        self.feed(text)
        self.close()
        self.problems += ["not closed: " + tag for tag in self.open]

    def handle_starttag(self, tag, attributes):
        self.tags[tag] += 1
        self.attributes += attributes
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags[tag] += 1
        self.attributes += attributes

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.problems.append("closed: " + tag)


r = plot(path("one"), "second=" + path("two"), "--smooth", "0", "--no-png")
check("two runs: plot.html in their common folder", r.returncode == 0 and r.stdout == path("plot.html") + "\n", said(r))
with open(path("plot.html"), encoding="utf-8") as f:
    text = f.read()
page = Page(text)
check("the page is well-formed", not page.problems, page.problems)
outside = [value for key, value in page.attributes if key in ("src", "href", "data", "action", "srcset") and
           not (value or "").startswith("data:")]
check("and refers to nothing outside", not outside and "http:" not in text and "https:" not in text and "@import" not in text and
      not re.search(r"url\((?!#plot)", text), outside)
for svg in re.findall(r"<svg.*?</svg>", text, re.S):
    tree.fromstring(svg)
titles = re.findall(r"<figcaption>(.*?)</figcaption>", text)
check("every chart is there", len(titles) == 9 + 2 and all(any(part in title for title in titles) for part in
      ("Loss", "MTP loss", "bits a byte", "Multiple choice", "Learning rate", "Gradient norm", "Throughput", "Balance",
       "Router bias", "one: load of the experts", "second: load")), titles)
data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.S).group(1).replace("\\u003c", "<"))
series = {s["name"]: s for chart in data for s in chart["series"]}


def same(values, expected):
    return len(values) == len(expected) and all(abs(a - b) <= 1e-5 * abs(b) for a, b in zip(values, expected))


check("its numbers are the log's: loss", same(series["one train"]["y"], [s["loss"] for s in steps]) and
      series["one train"]["x"] == [s["step"] for s in steps])
check("MTP loss", same(series["one depth 1"]["y"], [s["mtp"][0] for s in steps]))
check("learning rate", same(series["one lr"]["y"], [s["lr"] for s in steps]))
check("gradient norm", same(series["one gnorm"]["y"], [s["gnorm"] for s in steps]))
check("router bias", same(series["one largest"]["y"], [max(layer[2] for layer in s["bias"]) for s in steps]) and
      any(s["bias"][0][2] > 0 for s in steps))
check("validation", same(series["one val held_out"]["y"], [v["sets"][0]["loss"] for v in vals if v["sets"]]))
check("the other run", same(series["second train"]["y"], losses("two")) and losses("two") != losses("one"))
check("choices", same(series["one letters"]["y"], [v["choices"][0]["accuracy"] for v in vals if v.get("choices")]))
check("text of a sample is text", "<b>&amp;" not in text and "&lt;b&gt;&amp;" in text)
check("the number of the table", "<td>%.4f</td>" % (sum(s["loss"] for s in steps[-20:]) / 20) in text)
# Points of the loss line, read back from the drawing.
line = re.search(r'aria-label="Loss, nats a token".*?<polyline class="line" points="([^"]*)"', text, re.S).group(1)
drawn = [tuple(map(float, p.split(","))) for p in line.split()]
check("the line is drawn where its numbers say", len(drawn) == len(steps) and all(a[0] < b[0] for a, b in zip(drawn, drawn[1:]))
      and all((a[1] - b[1]) * (s["loss"] - t["loss"]) <= 0.001 for a, b, s, t in zip(drawn, drawn[1:], steps, steps[1:])))
rows, together = log_page.heat_rows([s["load"] for s in steps])
layers, experts = len(steps[0]["load"]), len(steps[0]["load"][0])
check("the heat map is the load", together == 1 and len(rows) == layers * experts and all(
      abs(rows[l * experts + e][k] - s["load"][l][e] * experts / sum(s["load"][l])) < 1e-9
      for k, s in enumerate(steps) for l in range(layers) for e in range(experts)))
image = log_page.png([[0, 1], [2, 1], [0, 0]], [(1, 2, 3, 4)] * 3)
pixels = zlib.decompress(image[image.index(b"IDAT") + 4:image.index(b"IEND") - 8])
check("a PNG", image[:8] == b"\x89PNG\r\n\x1a\n" and pixels == b"\0\0\1\0\2\1\0\0\0", pixels)
many = [[[1000 + 900 * (e == 77) for e in range(256)] for _ in range(58)] for _ in range(3)]
rows, together = log_page.heat_rows(many)
check("a large model: an overloaded expert among others in its row is seen", together > 1 and len(rows) <= 1450 and
      max(max(row) for row in rows) > 1.8, (together, len(rows)))

# ---- FP8 tensors, as a record has them ----
def tensor(amax, nan=0):
    return {"amax": amax, "zero": 0.25, "subnormal": 0, "saturated": 0, "nan": nan, "scales": [-9, 1]}


FP8 = [{"kind": "fp8", "step": step, "layers": [{"xn": tensor(step), "w_o": tensor(0.5)},
                                                {"xn": tensor(2), "dhs": tensor(0.125, 3)}]} for step in (1, 30)]
os.makedirs(path("eight"))
with open(path("one", "log.jsonl"), encoding="utf-8") as f, open(path("eight", "log.jsonl"), "w") as to:
    to.writelines([*f, *(json.dumps(record) + "\n" for record in FP8)])
r = plot(path("eight"), "--smooth", "0", "--no-png")
with open(path("eight", "plot.html"), encoding="utf-8") as f:
    data = json.loads(re.search(r'id="data">(.*?)</script>', f.read(), re.S).group(1).replace("\\u003c", "<"))
series = {s["name"]: s["y"] for chart in data for s in chart["series"]}
check("FP8's largest values by kind of tensor", r.returncode == 0 and [series.get(kind) for kind in
      ("inputs", "weights", "gradients")] == [[2, 30], [0.5, 0.5], [0.125, 0.125]], (said(r), list(series)))
scalars = dict(run_log.scalars(FP8[1]))
check("and for TensorBoard", scalars["fp8/inputs/amax"] == 30 and scalars["fp8/gradients/nan"] == 3 and
      scalars["fp8/inputs/nan"] == 0 and scalars["fp8/weights/zero"] == 0.25, scalars)

# ---- smoothing, long runs, damaged logs ----
check("the moving average starts right", run_log.smoothed([4, 4, None, 4], 0.9) == [4, 4, None, 4] and
      abs(run_log.smoothed([1, 2], 0.5)[1] - (0.5 * 1 + 2) / 1.5) < 1e-12)
x = list(range(50000))
y = [100.0 if i == 31234 else (-7.0 if i == 4321 else 1.0) for i in x]
thin_x, thin_y = log_page.thinned(x, y)
check("50,000 points are thinned, spikes stay", len(thin_x) <= log_page.POINTS_MAX + 2 and (31234, 100.0) in
      list(zip(thin_x, thin_y)) and (4321, -7.0) in list(zip(thin_x, thin_y)) and thin_x[0] == 0 and thin_x[-1] == 49999)
check("ticks are round and inside", log_page.ticks(0.13, 0.97) == [0.2 * i for i in range(1, 5)] and
      all(0.02 <= t <= 3 for t in log_page.log_ticks(0.02, 3)), log_page.ticks(0.13, 0.97))
os.makedirs(path("damaged"))
with open(path("one", "log.jsonl")) as f:
    lines = f.readlines()
bad = '{"kind":"step","step":31,"tokens":8000,"loss":null,"gnorm":null,"lr":0.001,"skip":"loss not finite","ms":1,"tokens_per_s":5}\n'
with open(path("damaged", "log.jsonl"), "w") as f:
    f.writelines([*lines, "garbage\n", bad, '{"kind":"step","st'])
r = plot(path("damaged"), "--no-png")
with open(path("damaged", "plot.html")) as f:
    text = f.read()
check("a skipped step, garbage and an unfinished line", r.returncode == 0 and "<td>31</td>" in text and "<td>1</td>" in text and
      "NaN" not in text and not Page(text).problems, said(r))
for x_name in ("tokens", "hours"):
    r = plot(path("one"), "--x", x_name, "--no-png", "--out", path("x.html"))
    check("--x " + x_name, r.returncode == 0 and not Page(open(path("x.html")).read()).problems, said(r))
with open(path("empty.jsonl"), "w") as f:
    f.write(lines[0])
with open(path("later.jsonl"), "w") as f:
    f.write(lines[0].replace('"version":1', '"version":2'))
for name, part in (("nothing", "no such file"), ("shards", "no log.jsonl"), ("empty.jsonl", "no step"),
                   ("later.jsonl", "version 2 of the log")):
    r = plot(path(name))
    check("plot of %s is refused" % name, r.returncode == 1 and r.stderr.startswith("error: ") and part in r.stderr and
          "Traceback" not in r.stderr, said(r))


# ---- TensorBoard ----
def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 & -(crc & 1))
    return crc ^ 0xFFFFFFFF


def fields(data):
    """Of a protocol buffer: [(number, value)]."""
    out, i = [], 0

    def varint():
        nonlocal i
        n = shift = 0
        while True:
            byte = data[i]
            i += 1
            n |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return n
    while i < len(data):
        key = varint()
        kind = key & 7
        size = varint() if kind in (0, 2) else 8 if kind == 1 else 4
        if kind == 0:
            out.append((key >> 3, size))
        else:
            out.append((key >> 3, data[i:i + size]))
            i += size
    return out


def events(name):
    """{(tag, step): value} of an event file; checks every checksum."""
    data, i, out = open(name, "rb").read(), 0, {}
    while i < len(data):
        size, = struct.unpack_from("<Q", data, i)
        record = data[i + 12:i + 12 + size]
        for part, at in ((data[i:i + 8], i + 8), (record, i + 12 + size)):
            crc = crc32c(part)
            assert struct.unpack_from("<I", data, at)[0] == ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
        event = dict(fields(record))
        for _, value in fields(event.get(5, b"")):
            parts = dict(fields(value))
            if 2 in parts:
                out[parts[1].decode(), event[2]] = struct.unpack("<f", parts[2])[0]
        i += 16 + size
    return out


check("CRC-32C of the standard's example", crc32c(b"123456789") == 0xE3069283 and to_tensorboard.masked_crc32c(b"123456789") ==
      ((0xE3069283 >> 15 | 0xE3069283 << 17) + 0xA282EAD8) & 0xFFFFFFFF)
EVENTS = path("one", "tensorboard", to_tensorboard.FILE_NAME)
for time_ in (1, 2):
    r = subprocess.run([sys.executable, "scripts/to_tensorboard.py", path("one")], capture_output=True, text=True)
    found = events(EVENTS)
    check("event file, call %d: losses of all steps" % time_, r.returncode == 0 and
          all(abs(found["train/loss", s["step"]] - s["loss"]) < 1e-6 for s in steps) and len(steps) == 30, said(r))
check("validation, bias and choices too", abs(found["val/held_out/loss", 30] - vals[-1]["sets"][0]["loss"]) < 1e-6 and
      ("choice/letters/accuracy", 15) in found and ("bias/01_largest", 30) in found and ("train/mtp_1", 1) in found, list(found)[:20])

# --follow, over a kill and a resume: begins before the run does anything more, ends with it.
file = config("followed", eval={"every_steps": 10}, **{**SECTIONS, "train": {**SECTIONS["train"], "steps": 500}})
code, _, _ = act_at_step(file, 25, lambda p: p.send_signal(signal.SIGKILL), "log.every_steps=1")
follower = subprocess.Popen([sys.executable, "scripts/to_tensorboard.py", path("followed"), "--follow"], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True)
time.sleep(1.5)
before = len(records("followed", "step"))
check("following a killed run", code == -signal.SIGKILL and follower.poll() is None and before >= 25, (code, before))
r = train(file)
try:
    out, err = follower.communicate(timeout=60)
except subprocess.TimeoutExpired:
    follower.kill()
    out, err = follower.communicate()
found = events(path("followed", "tensorboard", to_tensorboard.FILE_NAME))
check("--follow ends with the run and has each step once", r.returncode == DONE and follower.returncode == 0 and
      [s for t, s in found if t == "train/loss"] == list(range(1, 501)) and
      all(abs(found["train/loss", i + 1] - loss) < 1e-6 for i, loss in enumerate(losses("followed"))), (said(r), out, err))
finish()
PYTHON
