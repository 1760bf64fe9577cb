#!/usr/bin/env bash
# Several ranks save beside the run: what they write, whom it holds up, a disk that one of them finds full, ranks killed
# inside a save (KILLS=20 for 20 of them, SEED=N for others). Prints each check; exit 1 if one fails.
set -u
cd "$(dirname "$0")/.."
PYTHONPATH=tests PYTHONDONTWRITEBYTECODE=1 python3 - <<'PYTHON'
from trial_ranks import *

# Preloaded: what goes into an unfinished checkpoint takes SLOW_US a write; rank 2 finds the disk full for that of step
# FULL_AT.
SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
int fsync(int fd) { (void)fd; return 0; }
ssize_t write(int fd, const void *p, size_t n) {
    char link[64], path[4096], full[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    path[length < 0 ? 0 : length] = 0;
    if (strstr(path, ".tmp/state_")) usleep((useconds_t)atoi(getenv("SLOW_US")));
    snprintf(full, sizeof full, "%08d.tmp/state_00002", atoi(getenv("FULL_AT")));
    if (strstr(path, full)) return errno = ENOSPC, -1;
    return ((ssize_t (*)(int, const void *, size_t))dlsym(RTLD_NEXT, "write"))(fd, p, n);
}
"""
with open(path("shim.c"), "w") as f:
    f.write(SHIM)
subprocess.run([*os.environ.get("CC", "cc").split(), "-shared", "-fPIC", "-o", path("shim.so"), path("shim.c"), "-ldl"],
               check=True)


def slow(us=300, full_at=0):
    return [word for setting in ("LD_PRELOAD=" + path("shim.so"), "SLOW_US=%d" % us, "FULL_AT=%d" % full_at)
            for word in ("-x", setting)]


STEPS = 80
LAYOUT = ["parallel.ep=2"]
RUN = dict(train={**EVERYTHING["train"], "steps": STEPS}, eval={}, sample={"every_steps": 0},
           checkpoint={"every_steps": 20, "keep_last": 2})


def left_over(folder):
    return [n for n in os.listdir(path(folder)) if n.startswith("step_") and not re.fullmatch(r"step_\d+", n)]


def lines(folder):
    with open(path(folder, "log.jsonl")) as f:
        return [json.loads(line) for line in f]


# ---- beside the run, or waited for ----
r = train_on(4, part("beside", **RUN), *LAYOUT, options=slow(100))
waits = train_on(4, part("waits", **{**RUN, "checkpoint": {**RUN["checkpoint"], "background": False}}), *LAYOUT)
check("four ranks save beside the run", r.returncode == DONE and "host memory on each rank" in r.stdout and
      "the run waits for saves" in waits.stdout, (said(r), said(waits)))
check("as if they had waited: steps, hashes, every byte of every tensor", hashes("beside") == hashes("waits") and
      len(hashes("beside")) == STEPS and checkpoints("beside") == checkpoints("waits") == ["step_00000060",
      "step_00000080"] and all(saved_state("beside", c) == saved_state("waits", c) for c in checkpoints("beside")) and
      [s["hash"] for s in records("beside", "save")] == [s["hash"] for s in records("waits", "save")])
saves = [x for x in lines("beside") if x["kind"] == "save"]
check("the run waited less than the disks took", [s["step"] for s in saves] == [20, 40, 60, 80] and
      sum(s["waited_s"] for s in saves[:3]) < 0.9 * sum(s["on_disk_s"] for s in saves[:3]), saves)
order = [(x["kind"], x["step"]) for x in lines("beside") if x["kind"] in ("step", "save")]
check("and went on meanwhile", order.index(("save", 20)) > order.index(("step", 21)), order[18:30])
r = train_on(4, part("often", **{**RUN, "checkpoint": {"every_steps": 4, "keep_last": 1}}), *LAYOUT, options=slow())
check("a save that is due while one is written waits for it, and says so", r.returncode == DONE and
      [s["step"] for s in records("often", "save")] == list(range(4, STEPS + 1, 4)) and
      any("was still being written: the run waited" in w["text"] for w in records("often", "warn")) and
      hashes("often") == hashes("waits"), said(r))

# ---- a disk that one rank finds full ----
r = train_on(4, part("full_once", **RUN), *LAYOUT, options=slow(full_at=20))
failures = [w for w in records("full_once", "warn") if "save failed" in w["text"]]
check("one rank cannot write: rank and host are named, the run goes on", r.returncode == DONE and len(failures) == 1 and
      re.search(r"save failed, the run goes on: rank 2 on \S+: .*state_00002.safetensors: .*No space left",
                failures[0]["text"]), (failures, said(r)))
check("later saves are whole, and nothing is left of the other", checkpoints("full_once") == ["step_00000060",
      "step_00000080"] and not left_over("full_once") and last_hash("full_once") == last_hash("waits") and
      [s["step"] for s in records("full_once", "save")] == [40, 60, 80], os.listdir(path("full_once")))
train_on(4, part("full_end", **RUN), *LAYOUT, "train.steps=50")
r = train_on(4, path("full_end.json"), *LAYOUT, options=slow(full_at=80))
check("at the end: exit 1, and the last good checkpoint", r.returncode == FAILED and r.stderr.count("error: ") == 1 and
      re.search(r"the last save failed: rank 2 on \S+: ", r.stderr) and "last good checkpoint: " in r.stderr and
      checkpoints("full_end")[-1] == "step_00000060" and not left_over("full_end"), (said(r), checkpoints("full_end")))
r = train_on(4, path("full_end.json"), *LAYOUT)
check("with room again it ends as if nothing had been", r.returncode == DONE and hashes("full_end") == hashes("waits"),
      said(r))

# ---- ranks that are killed inside a save ----
kills, seed = int(os.environ.get("KILLS", 2)), int(os.environ.get("SEED", 1))
rng = random.Random(seed)
file, inside, wrong = part("killed", **RUN), 0, []
for _ in range(kills):
    shutil.rmtree(path("killed"), ignore_errors=True)
    at = rng.choice((20, 40, 60))
    p = start_on(4, file, *LAYOUT, options=slow(3000))
    until_step(p, at)
    end = time.time() + TIMEOUT_S
    while not left_over("killed") and p.poll() is None and time.time() < end:
        time.sleep(0.0005)
    time.sleep(rng.choice((0, rng.uniform(0, 0.05))))
    victim = rng.randrange(4)
    os.kill(pid_of(p, victim), signal.SIGKILL)
    p.communicate(timeout=TIMEOUT_S)
    inside += bool(left_over("killed"))
    had_saved = len(records("killed", "save")) > 0
    r = train_on(4, file, *LAYOUT)
    if (r.returncode != DONE or hashes("killed") != hashes("waits") or left_over("killed") or
            (had_saved and "fresh start" in r.stdout)):
        wrong.append((at, victim, said(r), os.listdir(path("killed"))))
check("%d times a rank killed (seed %d), %d times inside a save: as uninterrupted, and nothing is left" %
      (kills, seed, inside), inside >= kills / 2 and not wrong, wrong)
finish()
PYTHON
