#!/usr/bin/env bash
# train --overfit: one micro-batch learnt by heart, or not. Prints each check; exit 1 if one fails.
set -u
cd "$(dirname "$0")/.."
PYTHONPATH=tests PYTHONDONTWRITEBYTECODE=1 python3 - <<'PYTHON'
from trial import *

DATA = prepare("shards", "model/model.c", "model/mla.c")
file = config("run", data=DATA, train={"seq_len": 32, "lr": 1e-2, "global_batch_size": 8, "micro_batch_size": 2})
VERDICT = re.compile(r"overfit +loss (\d+\.\d+) -> (\d+\.\d+|nan) in (\d+) steps(?: \(no model could do better than "
                     r"(\d+\.\d+)\))?: (.*)")


def overfit(n, *arguments):
    r = run("train", "--config", file, "--overfit", str(n), *arguments)
    found = VERDICT.search(r.stdout.splitlines()[-1]) if r.stdout else None
    return r, found.groups() if found else (None,) * 5


r, (first, last, steps, least, verdict) = overfit(150)
check("a batch is learnt by heart: exit 0", r.returncode == DONE and verdict == "learnt by heart, all is well" and
      steps == "150", said(r))
check("from ln 257 to almost nothing", abs(float(first) - math.log(257)) < 0.3 and float(last) < 0.15, (first, last))
check("what is possible is said where two sequences begin alike", least is None or float(least) < float(last) + 1e-4,
      (least, last))
check("steps are shown", r.stdout.count("step ") > 10, said(r))
check("nothing is written", not os.path.exists(path("run")), os.path.exists(path("run")) and os.listdir(path("run")))
again, (_, same, _, _, _) = overfit(150)
check("the same numbers again", same == last, (same, last))
r, (_, last, _, _, verdict) = overfit(5)
check("too few steps: exit 1 and what to do", r.returncode == FAILED and verdict.startswith("not learnt by heart; try"),
      said(r))
r, (_, _, _, _, verdict) = overfit(150, "train.lr=0")
check("a rate of zero: exit 1", r.returncode == FAILED and verdict.startswith("not learnt"), said(r))
r, (_, last, _, _, _) = overfit(150, "train.lr=[[0, 1e-4], [1e6, 1e-2]]", "train.lr_final=null",
                                "train.global_batch_size=[[0, 2], [1e6, 8]]", "-q")
check("schedules: their peak rate, one micro-batch; quiet: the verdict alone", r.returncode == DONE and
      last == same and r.stdout.count("\n") == 1, said(r))
for option in (("--init-from", path("x")), ("--resume", "never")):
    r, _ = overfit(5, *option)
    check("%s: exit 2" % option[0], is_refusal(r, "--overfit starts from fresh weights"), said(r))

# A batch whose sequences begin alike and end differently: the entropy of that choice is the least loss, and enough.
common = [256] + [(7 * i) % 50 for i in range(30)]
ids = common + [100] + common + [200]
alike = write_shard("alike.bin", ids * 4)
r = run("train", "--config", file, "--overfit", "150", "data.train=" + alike, "data.val=[]", "data.shuffle=false",
        "data.document_token=256")
found = VERDICT.search(r.stdout)
check("sequences that begin alike", r.returncode == DONE and found and
      found.group(4) == "%.4f" % (2 * math.log(2) / 64), said(r))
finish()
PYTHON
