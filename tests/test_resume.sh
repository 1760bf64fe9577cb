#!/usr/bin/env bash
# A run that is stopped and started again, in every way there is, equals one that was not: all digits of every step.
# Prints each check; exit 1 if one fails.
set -u
cd "$(dirname "$0")/.."
PYTHONPATH=tests PYTHONDONTWRITEBYTECODE=1 python3 - <<'PYTHON'
import random
from trial import *

STEPS = 24
rng = random.Random(4)
words = ["".join(rng.choice("aeiounrstlkm") for _ in range(rng.randrange(2, 8))) for _ in range(60)]
with open(path("text"), "w") as text: # not a source of ours: those change
    text.write("\n\n".join(" ".join(rng.choice(words) for _ in range(20)) for _ in range(36)))
DATA = prepare("shards", path("text"))
# What a resume could get wrong is all on: accumulation, a batch ramp (2 sequences, then 3, then 4), more than one
# epoch, a document mask, validation, samples, spikes by a window, hashes.
EVERYTHING = dict(
    data={**DATA, "document_mask": True},
    train={"steps": STEPS, "seq_len": 64, "micro_batch_size": 1,
           "global_batch_size": [[0, 2], [512, 3], [1600, 4]], "global_batch_size_shape": "linear",
           "lr": 3e-3, "lr_warmup_steps": 4, "lr_shape": "cosine", "skip_if_z": 3, "z_window": 8,
           "bias_update_speed": [[0, 0.01], [2000, 0.001]], "mtp_loss_weight": [[0, 0.3], [2000, 0.1]]},
    eval={"every_steps": 5, "tokens": 300},
    sample={"every_steps": 7, "prompts": ["static "], "tokens": 8},
    checkpoint={"every_steps": 2},
    log={"hash_every_steps": 3},
)
PRECISIONS = {"fp32": {"compute": "fp32", "moments": "fp32"}, "bf16": {"compute": "bf16", "moments": "bf16"}}


def same(a, b):
    """Steps, validation and samples of two runs are equal, and so are the weights at the end."""
    for kind in ("step", "val", "sample"):
        x, y = records(a, kind), records(b, kind)
        if x != y:
            return "%s: %s" % (kind, next((pair for pair in zip(x, y) if pair[0] != pair[1]), (len(x), len(y))))
    if [r["step"] for r in records(b, "step")] != list(range(1, STEPS + 1)):
        return "steps %s" % [r["step"] for r in records(b, "step")]
    return last_hash(a) != last_hash(b) and "hash"


def equal(name, a, b):
    difference = same(a, b)
    check(name, not difference, difference)


def kill_soon(p, rng):
    for _ in range(rng.randrange(6)):
        p.stdout.readline()
    time.sleep(rng.uniform(0, 0.01))
    p.kill()


for precision, numbers in PRECISIONS.items():
    whole, stopped, killed = (precision + end for end in ("", "_stopped", "_killed"))
    r = train(config(whole, precision=numbers, **EVERYTHING))
    check(precision + ": a run to its end", r.returncode == DONE and "done" in r.stdout.splitlines()[-1], said(r))
    steps = records(whole, "step")
    check(precision + ": more than one epoch", 1 < float(re.search(r"= (\S+) epochs", r.stdout)[1]) < 3, said(r))
    check(precision + ": the batch ramp went through 2, 3 and 4 sequences",
          {b["tokens"] - a["tokens"] for a, b in zip(steps, steps[1:])} == {128, 192, 256}, steps)
    check(precision + ": validation every 5 steps and at the end", [v["step"] for v in records(whole, "val")] ==
          [5, 10, 15, 20, 24] and all(v["tokens_evaluated"] == 300 for v in records(whole, "val")))
    check(precision + ": it learns", steps[-1]["loss"] < steps[0]["loss"] - 0.5, losses(whole))

    file = config(stopped, precision=numbers, **EVERYTHING)
    for _ in range(10):
        code, out, err = act_at_step(file, 9, lambda p: p.send_signal(signal.SIGTERM))
        if code != DONE: # else this process was too slow to stop the other
            break
        shutil.rmtree(path(stopped))
    at = records(stopped, "step")[-1]["step"]
    check(precision + ": SIGTERM: exit 3, saved", code == STOPPED and 9 <= at < STEPS and "SIGTERM" in out and
          checkpoints(stopped)[-1] == "step_%08d" % at, (code, at, out, err))
    r = train(file)
    check(precision + ": the same command goes on", r.returncode == DONE and "resume     auto: " in r.stdout and
          "step_%08d, bit for bit" % at in r.stdout, said(r))
    equal(precision + ": stopped by SIGTERM = uninterrupted", whole, stopped)

    # At random moments, a few step lines after each start, until it is done.
    file, rng = config(killed, precision=numbers, **EVERYTHING), random.Random(1)
    kills = resumed = 0
    code = -signal.SIGKILL
    while code == -signal.SIGKILL and kills < 100:
        code, out, err = act_at_step(file, r"\d+", lambda p: kill_soon(p, rng))
        kills += code == -signal.SIGKILL
        resumed += "bit for bit" in out
    check(precision + ": killed several times, resumed several times", kills >= 3 and resumed >= 2, (kills, resumed))
    check(precision + ": and done in the end", code in (DONE, USER) and checkpoints(killed)[-1] ==
          "step_%08d" % STEPS, (code, out, err))
    equal(precision + ": killed %d times = uninterrupted" % kills, whole, killed)
    left = [n for n in os.listdir(path(killed)) if re.match(r"step_\d+\.", n)]
    check(precision + ": unless the kill came after the last save, none is left unfinished", code == USER or not left,
          left)

# A finished run.
before = snapshot("fp32")
r = train(path("fp32.json"))
check("finished again: refused, with how to go on", is_refusal(r, "finished: step 24 of 24", "train.steps",
      "--resume never"),
      said(r))
check("and nothing of it changed", snapshot("fp32") == before)
r = train(path("fp32.json"), "train.steps=26")
check("raised train.steps: goes on, and says what changed", r.returncode == DONE and
      "step_00000024, bit for bit" in r.stdout
      and "changed: train.steps 24 -> 26" in r.stdout, said(r))
check("two more steps in the log", [x["step"] for x in records("fp32", "step")] == list(range(1, 27)))

# Other numbers of threads, other places to stand: the same bits.
file = config("threads", precision=PRECISIONS["fp32"], **EVERYTHING)
train(file, "run.threads=2")
equal("two threads = one thread", "fp32_stopped", "threads")
config("no_val", precision=PRECISIONS["fp32"], **{**EVERYTHING, "eval": {}, "sample": {}, "checkpoint": {}})
train(path("no_val.json"), "data.val=[]")
check("validation, samples and saves do not move training", records("no_val", "step") == records("threads", "step"))

# --resume DIR: an older step of the same folder, and a checkpoint of another one.
older = checkpoints("threads")[0]
r = train(file, "--resume", path("threads", older))
check("--resume of an older step", r.returncode == DONE and "asked: " + path("threads", older) in r.stdout, said(r))
equal("goes the same way again", "fp32_stopped", "threads")
check("what came after it was put aside", [n for n in os.listdir(path("threads")) if n.endswith(".aside")] and
      len(checkpoints("threads")) == 2, os.listdir(path("threads")))
r = train(config("elsewhere", precision=PRECISIONS["fp32"], **EVERYTHING), "--resume", path("threads", "step_00000022"))
check("--resume of another folder", r.returncode == DONE and [x["step"] for x in records("elsewhere", "step")] == [23,
      24] and
      last_hash("elsewhere") == last_hash("threads"), said(r))

# --resume that cannot be honoured never starts anew.
os.mkdir(path("empty"))
file = config("explicit", **EVERYTHING)
for name, folder, part in (("a folder that is not there", path("nowhere"), "no such folder"),
                           ("an empty folder", path("empty"), "no checkpoint"),
                           ("a file", path("fp32.json"), "fp32.json"),
                           ("a misspelt word", "newest", "newest")):
    r = train(file, "--resume", folder)
    check("--resume of " + name, is_refusal(r, part), said(r))
check("nothing was started", not os.path.exists(path("explicit")) or os.listdir(path("explicit")) in ([], ["lock"]))
r = train(path("fp32.json"), "--resume", "never", "train.steps=2", "train.lr_warmup_steps=1")
check("--resume never starts anew and keeps the old", r.returncode == DONE and checkpoints("fp32") ==
      ["step_00000002"] and
      os.path.exists(path("fp32", "log.jsonl.1")) and os.path.isdir(path("fp32", "step_00000026.aside")), said(r))
check("from the same weights", losses("fp32")[0] == losses("threads")[0])

# A damaged newest checkpoint is named and passed over; the run arrives all the same.
file = config("damaged", precision=PRECISIONS["fp32"], **EVERYTHING)
act_at_step(file, 11, lambda p: p.send_signal(signal.SIGTERM))
newest = checkpoints("damaged")[-1]
name = path("damaged", newest, "state_00000.safetensors")
with open(name, "r+b") as f:
    f.seek(-1000, os.SEEK_END)
    byte = f.read(1)
    f.seek(-1000, os.SEEK_END)
    f.write(bytes([byte[0] ^ 1]))
r = train(file)
check("a flipped bit: named, the one before is taken", r.returncode == DONE and newest in r.stderr and
      "bit for bit" in r.stdout and newest + ", bit" not in r.stdout, said(r))
equal("a damaged checkpoint = uninterrupted", "threads", "damaged")

# ---- checkpoints of other machines, other versions, other times ----
OTHERS = dict(data=DATA, train={"steps": 6}, checkpoint={"every_steps": 2})
file = config("others", **OTHERS)
r = train(file)
check("an empty folder: says that it starts", r.returncode == DONE and "resume     auto: nothing there, fresh start" in
      r.stdout, said(r))
expected, hash = losses("others"), last_hash("others")
r = train(file, "run.dir=a/b", cwd=FOLDER)
check("a relative run.dir that is not there yet", r.returncode == DONE and last_hash("a/b") == hash, said(r))
config("again", **OTHERS)


def again(old, new):
    """Step 4 of that run with another text in its manifest, and the run that goes on from it."""
    shutil.rmtree(path("again"), ignore_errors=True)
    shutil.copytree(path("others", "step_00000004"), path("again", "step_00000004"))
    edit_manifest(path("again", "step_00000004"), old, new)
    return train(path("again.json"))


r = again('"device": "cpu"', '"device": "sm_90, 132 SMs, cuBLASLt 13.1.0"')
check("saved on another GPU or library: goes on, and says that bits differ from here", r.returncode == DONE and
      "step_00000004, saved on sm_90, 132 SMs, cuBLASLt 13.1.0, this is cpu: bits differ from here on" in r.stdout and
      "bit for bit" not in r.stdout, said(r))
r = again(',\n    "keep_best": false,\n    "background": true', "")
check("saved before checkpoint.background was: goes on to the bit", r.returncode == DONE and "bit for bit" in r.stdout
      and "changed: checkpoint.background" not in r.stdout and losses("again") == expected[4:] and
      last_hash("again") == hash, said(r))
r = again('    "best_step": 0,\n', "")
check("saved before the best step was state: goes on to the bit", r.returncode == DONE and last_hash("again") == hash,
      said(r))
r = again('"format": 1', '"format": 2')
check("a newer format: refused, not taken for damaged", is_refusal(r, "step_00000004", "newer train_moe, format 2") and
      checkpoints("again") == ["step_00000004"], said(r))
shutil.copytree(path("others", "step_00000006"), path("again", "step_00000006"))
edit_manifest(path("again", "step_00000006"), '"format": 1', '"format": 2')
check("a newer format on top of one that is known: refused as well", is_refusal(train(path("again.json")), "format 2"))
finish()
PYTHON
