#!/usr/bin/env bash
# Stopping, starting again with something changed, and what ends a run: exit codes, what is said, what is kept.
# Prints each check; exit 1 if one fails.
set -u
cd "$(dirname "$0")/.."
PYTHONPATH=tests PYTHONDONTWRITEBYTECODE=1 python3 - <<'PYTHON'
import resource
from trial import *

DATA = prepare("shards", "model/model.c", "model/mla.c")
LONG = dict(data=DATA, train={"steps": 100000, "seq_len": 64}, log={"every_steps": 1})


def saved_and_goes_on(name, why, code, out, err):
    """After a stop: exit 3, a checkpoint of the last step in the log, and the same command goes on from it."""
    last = records(name, "step")[-1]["step"]
    ok = (code == STOPPED and "stopped by " + why in out and checkpoints(name)[-1] == "step_%08d" % last and
          records(name, "stop")[-1]["step"] == last)
    check("%s: exit 3, saved at the step" % why, ok, (code, last, os.listdir(path(name)), out[-500:], err))
    r = train(path(name + ".json"), "train.steps=%d" % (last + 2))
    check("%s: goes on" % why, r.returncode == DONE and "step_%08d, bit for bit" % last in r.stdout, said(r))


# ---- ways to stop ----
for number in (signal.SIGINT, signal.SIGUSR1):
    name = number.name
    saved_and_goes_on(name, name, *act_at_step(config(name, **LONG), 3, lambda p: p.send_signal(number)))
file = config("file", **LONG)
saved_and_goes_on("file", "the STOP file", *act_at_step(file, 3, lambda p: open(path("file", "STOP"), "w").close()))
check("the STOP file is gone", not os.path.exists(path("file", "STOP")))
r = train(config("minutes", run={"stop_after_minutes": 0.005}, **LONG))
saved_and_goes_on("minutes", "run.stop_after_minutes", *said(r))
r = train(config("slurm", **LONG), env={"SLURM_JOB_END_TIME": str(int(time.time()) + 60)})
saved_and_goes_on("slurm", "SLURM_JOB_END_TIME", *said(r))

p = start("--config", config("pipe", **LONG))
p.stdout.readline()
time.sleep(0.2)
p.stdout.close()
time.sleep(0.1)
p.send_signal(signal.SIGINT)
check("Ctrl-C that ends the reader of the output too: saved all the same", p.wait(TIMEOUT_S) == STOPPED and
      len(checkpoints("pipe")) == 1, p.returncode)
p.stderr.close()

# ---- two runs in one folder ----
seen = []
code, out, err = act_at_step(file, 5, lambda p: (seen.append(train(file)), p.send_signal(signal.SIGTERM)), "--resume",
      "never")
check("a second run in the folder is refused", is_refusal(seen[0], "another run is working in this folder"),
      said(seen[0]))
check("the first one does not notice", code == STOPPED and [x["step"] for x in records("file", "step")] ==
      list(range(1, len(records("file", "step")) + 1)), (code, err))

# ---- something changed ----
CHANGES = dict(data=DATA, train={"steps": 6, "lr": 1e-3}, checkpoint={"every_steps": 2})
file = config("changes", **CHANGES)
train(file, "train.steps=4")
before, before_rates = snapshot("changes"), [x["lr"] for x in records("changes", "step")]
other = prepare("other", "model/model.c", "model/moe.c")
for name, change, parts in (
        ("hidden_size", ["model.hidden_size=64"], ["model.hidden_size", "64", "32"]),
        ("fewer experts per token", ["model.num_experts_per_tok=3"], ["num_experts_per_tok"]),
        ("no MTP", ["model.num_nextn_predict_layers=0"], ["num_nextn_predict_layers"]),
        ("moments", ["precision.moments=bf16"], ["precision.moments"]),
        ("seed", ["run.seed=8"], ["run.seed"]),
        ("seq_len", ["train.seq_len=16"], ["train.seq_len"]),
        ("other shards", ["data.train=" + other["train"], "data.val=[]"], ["data"]),
        ("synthetic data", ["data.train=synthetic", "data.val=[]"], ["data.train"])):
    r = train(file, *change)
    check("changed %s: refused" % name, is_refusal(r, *parts, "--init-from"), said(r))
shard = path("shards", "train_000.bin")
kept = open(shard, "rb").read()
at = 1024 + 20
with open(shard, "wb") as f:
    f.write(kept[:at] + bytes([kept[at] ^ 1]) + kept[at + 1:])
r = train(file)
check("other content under the same name: refused", is_refusal(r, "not what this run was trained on"), said(r))
with open(shard, "wb") as f:
    f.write(kept)
check("all that left the folder as it was", snapshot("changes") == before)
r = train(file, "train.lr=5e-4", "train.grad_clip=0.5", "train.z_window=16", "run.threads=2")
check("changed lr: goes on and says it", r.returncode == DONE and "step_00000004, bit for bit" in r.stdout and
      "train.lr 0.001 -> 0.0005" in r.stdout and "train.grad_clip 1 -> 0.5" in r.stdout, said(r))
rates = [x["lr"] for x in records("changes", "step")]
check("the new lr is used", rates[:4] == before_rates and rates[4:] == [rates[4]] * 2 and rates[4] == 5e-4, rates)
with open(path("changes", "step_00000006", "manifest.json")) as f:
    state = json.load(f)["state"]
window = state["loss_z"]
check("the new window keeps the values; the last one waits to enter it", (window["size"], window["n"]) == (16, 5) and
      window["value"][:5] + [state["pending_loss"]] == losses("changes") and state["pending"] == 1, state)

# The lowest validation loss is part of the state: after a resume a worse one is not the best.
file = config("best", data=DATA, train={"steps": 40, "lr": 3e-3}, eval={"every_steps": 10, "tokens": 256},
              checkpoint={"keep_best": True, "keep_last": 1})
train(file)
check("keep_best saves at each best validation", [s["step"] for s in records("best", "save")] == [10, 20, 30, 40] and
      checkpoints("best") == ["step_00000040"], os.listdir(path("best")))
r = train(file, "train.steps=42", "train.lr=0.5", "train.lr_final=0.5", "eval.every_steps=1")
vals = [(v["step"], v["best"]) for v in records("best", "val")]
check("what was the best before a resume is known after it", vals[:4] == [(s, True) for s in (10, 20, 30, 40)] and
      vals[4:] == [(41, False), (42, False)], (vals, said(r)))
check("best and newest both stay", checkpoints("best") == ["step_00000040", "step_00000042"], os.listdir(path("best")))

# ---- divergence: every update is skipped ----
DIVERGES = dict(data=DATA, train={"steps": 200, "lr": 1e-3, "max_skipped_in_a_row": 4, "grad_clip": 0},
                checkpoint={"every_steps": 2, "keep_last": 1})
file = config("diverges", **DIVERGES)
train(file, "train.steps=4")
before = snapshot("diverges")
r = train(file, "train.lr=1e9")
skips = [x["skip"] for x in records("diverges", "step")]
kept = checkpoints("diverges")[-1]
check("lr 1e9 ends with exit 1 after 4 skipped updates", r.returncode == FAILED and skips[-5] is None and None not in
      skips[-4:] and len(skips) < 200, (r.returncode, skips, r.stderr))
lines = r.stderr.splitlines()
check("names the last good checkpoint", lines[-2].startswith("error: ") and
      "4 updates skipped in a row" in lines[-2] and
      lines[-1].startswith("hint: ") and path("diverges", kept) in lines[-1], r.stderr)
check("each skip is a warning, also in the log", len([x for x in records("diverges",
      "warn") if "skipped" in x["text"]]) ==
      4 == len([x for x in lines if "update skipped" in x]), r.stderr)
check("the last good one is older than the first skip, and kept", int(kept[5:]) <= len(skips) - 4 and
      checkpoints("diverges") == [kept], (kept, len(skips)))
first = len(records("diverges", "step"))
r = train(file, "train.lr=1e9")
check("the same command fails the same way", r.returncode == FAILED and len(records("diverges", "step")) == first and
      checkpoints("diverges") == [kept], said(r))
r = train(config("skips", **DIVERGES), "train.lr=1e9", "log.hash_every_steps=1", "train.max_skipped_in_a_row=3")
rows = records("skips", "step")
check("skipped updates leave the weights alone", len({x["hash"] for x in rows[-4:]}) == 1 and
      len({x["hash"] for x in rows[:-3]}) == len(rows) - 3, rows[-5:])

# ---- a save that fails ----
file = config("full", data=DATA, train={"steps": 4}, checkpoint={"every_steps": 1, "keep_last": 1})
train(file, "train.steps=2")
before = checkpoints("full")


def small_files():
    resource.setrlimit(resource.RLIMIT_FSIZE, (300000, 300000))


r = train(file, preexec_fn=small_files, restore_signals=False)
check("a save that fails is a warning, the last one exit 1", r.returncode == FAILED and
      "save failed, the run goes on" in
      r.stderr and "last good checkpoint: " + path("full", "step_00000002") in r.stderr, said(r))
check("what was there before is kept, and nothing half written", checkpoints("full") == before and not
      [n for n in os.listdir(path("full")) if n.endswith((".tmp", ".old"))], os.listdir(path("full")))
r = train(file)
check("with room again the same command finishes", r.returncode == DONE, said(r))

# ---- data that goes bad under a run ----
shard = write_shard("shrinking/train.bin", [i % 250 for i in range(20000)])
file = config("shrinking_run", data={"train": shard}, train={"steps": 100000}, checkpoint={"every_steps": 2})
code, out, err = act_at_step(file, 5, lambda p: os.truncate(shard, 2000))
check("a shard that shrinks: exit 1, the last good checkpoint is named", code == FAILED and "has shrunk" in err and
      "last good checkpoint: " + path("shrinking_run", checkpoints("shrinking_run")[-1]) in err, (code, err))
shard = write_shard("bad/train.bin", [i % 250 for i in range(1000)] + [300] + [1] * 1000)
r = train(config("bad_id", data={"train": shard}, train={"steps": 100}))
check("an id outside the vocabulary: exit 2", r.returncode == USER and "id 300" in r.stderr and "nothing of this run" in
      r.stderr, said(r))

# ---- folders that cannot be written ----
open(path("plain"), "w").close()
os.makedirs(path("occupied", "lock"))
os.makedirs(path("logged", "log.jsonl"))
for name, folder in (("a plain file", "plain"), ("below a plain file", "plain/below"), ("lock is a folder", "occupied"),
                     ("log.jsonl is a folder", "logged")):
    r = train(config("unwritable", data=DATA), "run.dir=" + path(folder))
    check("run.dir: %s: exit 2" % name, is_refusal(r, path(folder)) and "is working" not in r.stderr, said(r))
r = train(config("unwritable", data=DATA), "run.dir=/proc/none")
check("run.dir where nobody can write: exit 2", is_refusal(r, "/proc/none"), said(r))
finish()
PYTHON
