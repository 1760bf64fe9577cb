#!/usr/bin/env bash
# kill -9 before every single call that changes the disk, one after the other, and at random moments while saves are
# written beside the steps (KILLS=20 for 20 of them, SEED=N for others): after each, the run goes on from a whole
# checkpoint and ends as if nothing had been. Prints each check; exit 1 if one fails.
set -u
cd "$(dirname "$0")/.."
PYTHONPATH=tests PYTHONDONTWRITEBYTECODE=1 python3 - <<'PYTHON'
import random
from trial import *

# Preloaded, it ends the process before call number KILL_AT. Of a thread's writes in a row every hundredth counts: a save
# has hundreds. fsync does nothing, since a killed process needs none. SLOW_US is what a write of a save takes.
SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/types.h>
#include <unistd.h>
static _Thread_local int writes;
static int number(const char *name) {
    return getenv(name) ? atoi(getenv(name)) : 0;
}
static void count(void) {
    static _Atomic int calls;
    if (++calls == number("KILL_AT")) kill(getpid(), SIGKILL);
    writes = 0;
}
#define NEXT(type, name, ...) count(); return ((type)dlsym(RTLD_NEXT, name))(__VA_ARGS__)
int fsync(int fd) { (void)fd; count(); return 0; }
int rename(const char *a, const char *b) { NEXT(int (*)(const char *, const char *), "rename", a, b); }
int unlink(const char *a) { NEXT(int (*)(const char *), "unlink", a); }
int rmdir(const char *a) { NEXT(int (*)(const char *), "rmdir", a); }
int mkdir(const char *a, mode_t m) { NEXT(int (*)(const char *, mode_t), "mkdir", a, m); }
FILE *fopen(const char *a, const char *m) {
    if (*m != 'r') count();
    return ((FILE *(*)(const char *, const char *))dlsym(RTLD_NEXT, "fopen"))(a, m);
}
ssize_t write(int fd, const void *p, size_t n) {
    int nth = writes++;
    if (nth % 100 == 0) count(), writes = nth + 1;
    if (gettid() != getpid()) usleep((useconds_t)number("SLOW_US"));
    return ((ssize_t (*)(int, const void *, size_t))dlsym(RTLD_NEXT, "write"))(fd, p, n);
}
"""
with open(path("shim.c"), "w") as f:
    f.write(SHIM)
subprocess.run([*os.environ.get("CC", "cc").split(), "-shared", "-fPIC", "-o", path("shim.so"), path("shim.c"), "-ldl"],
      check=True)


def trained(file, kill_at):
    return train(file, env={"LD_PRELOAD": path("shim.so"), "KILL_AT": str(kill_at)})


def to_the_end(file):
    """The same command until the run is done, as a scheduler gives it again after exit code 3."""
    for _ in range(20):
        r = trained(file, 0)
        if r.returncode != STOPPED:
            return r
    return r


def every_call(name, **sections):
    """A run for every call: killed before it, then to the end. Returns the number of calls, and what went wrong."""
    wrong, alive = [], 0
    to_the_end(config(name, **sections))
    for kill_at in range(1, 1000):
        again = "%s_%d" % (name, kill_at)
        file = config(again, **sections)
        killed = trained(file, kill_at)
        if killed.returncode == STOPPED:
            killed = trained(file, kill_at)
        # Two threads do not make the same number of calls each time.
        alive = 0 if killed.returncode == -signal.SIGKILL else alive + 1
        if alive == 3:
            return kill_at - 3, wrong
        if alive:
            shutil.rmtree(path(again))
            continue
        had_saved = os.path.exists(path(again, "log.jsonl")) and records(again, "save")
        r = trained(file, 0)
        if had_saved and "fresh start" in r.stdout:
            wrong.append((kill_at, "a saved run started anew"))
        if r.returncode == STOPPED:
            r = to_the_end(file)
        finished = r.returncode == USER and "is finished" in r.stderr
        if r.returncode != DONE and not finished:
            wrong.append((kill_at, said(r)))
        elif records(again, "step") != records(name, "step"):
            wrong.append((kill_at, "other steps", losses(name), losses(again)))
        elif last_hash(again) != last_hash(name):
            wrong.append((kill_at, "other weights"))
        elif not finished and set(os.listdir(path(again))) - {"log.jsonl.1"} != set(os.listdir(path(name))):
            wrong.append((kill_at, "something is left", os.listdir(path(again))))
        shutil.rmtree(path(again))


SMALL = dict(data=prepare("shards", "model/model.c"),
             train={"steps": 5, "global_batch_size": 2, "micro_batch_size": 1, "lr_warmup_steps": 0})
calls, wrong = every_call("rotating", checkpoint={"every_steps": 2, "keep_last": 1}, **SMALL)
check("killed before each call of a run with three saves", calls > 40 and not wrong, (calls, wrong[:3]))
calls, wrong = every_call("stepwise", run={"stop_after_minutes": 1e-9},
                          checkpoint={"every_steps": 1, "keep_last": 1, "background": False}, **SMALL)
check("killed before each call of a run that stops and saves at every step", calls > 20 and not wrong, (calls,
      wrong[:3]))

# ---- at random moments, most of them inside a save ----
STEPS = 40
SLOW = {"LD_PRELOAD": path("shim.so"), "SLOW_US": "300"}
BESIDE = dict(data=SMALL["data"], train={"steps": STEPS, "seq_len": 64, "lr_warmup_steps": 0},
              checkpoint={"every_steps": 5, "keep_last": 2})
kills, seed = int(os.environ.get("KILLS", 6)), int(os.environ.get("SEED", 1))
rng = random.Random(seed)
train(config("beside", **BESIDE), env=SLOW)
waits = train(config("waits", **{**BESIDE, "checkpoint": {**BESIDE["checkpoint"], "background": False}}))
check("saved beside the run or waited for: the same steps and the same hash", waits.returncode == DONE and
      losses("beside") == losses("waits") and last_hash("beside") == last_hash("waits") and
      [r["hash"] for r in records("beside", "save")] == [r["hash"] for r in records("waits", "save")], said(waits))


def is_writing(folder):
    return any(n.endswith(".tmp") for n in os.listdir(path(folder)))


def kill_at_random(p):
    time.sleep(rng.choice((0, rng.uniform(0, 0.02), rng.uniform(0, 0.3))))
    p.kill()


wrong, n_killed, inside = [], 0, 0
for k in range(kills):
    name = "random_%d" % k
    file = config(name, **BESIDE)
    for _ in range(rng.choice((1, 1, 2))):
        code, out, err = act_at_step(file, rng.randrange(1, STEPS), kill_at_random, env=SLOW)
        n_killed += code == -signal.SIGKILL
        inside += code == -signal.SIGKILL and is_writing(name)
    r = train(file)
    if r.returncode != DONE and not (r.returncode == USER and "is finished" in r.stderr):
        wrong.append((k, said(r)))
    elif records(name, "step") != records("beside", "step") or last_hash(name) != last_hash("beside"):
        wrong.append((k, "other steps or weights", losses(name)))
    elif r.returncode == DONE and is_writing(name):
        wrong.append((k, "something is left", os.listdir(path(name))))
check("%d runs killed at random (seed %d), %d times, %d of them inside a save: as uninterrupted" %
      (kills, seed, n_killed, inside), inside >= kills // 2 and not wrong, wrong[:3])

# A stop that falls into a save: both end up whole.
def terminate_inside(p):
    end = time.time() + TIMEOUT_S
    while not is_writing("term") and p.poll() is None and time.time() < end:
        time.sleep(0.0002)
    writing.append(is_writing("term"))
    p.send_signal(signal.SIGTERM)


file, writing = config("term", **BESIDE), []
code, out, err = act_at_step(file, 1, terminate_inside, env=SLOW)
at = records("term", "step")[-1]["step"]
check("SIGTERM inside a save: both checkpoints are whole", code == STOPPED and writing == [True] and at < STEPS and
      checkpoints("term")[-1] == "step_%08d" % at and [r["step"] for r in records("term", "save")][0] == 5 and
      not is_writing("term"), (code, writing, at, os.listdir(path("term")), err))
train(file)
check("and the run goes on to the same end", records("term", "step") == records("beside", "step") and
      last_hash("term") == last_hash("beside"))
r = train(config("waiting", **{**BESIDE, "checkpoint": {"every_steps": 1, "keep_last": 1}}), env=SLOW)
said_so = [w for w in records("waiting", "warn") if "was still being written: the run waited" in w["text"]]
check("a save that is due while one is written waits for it, and says so", r.returncode == DONE and said_so and
      len(records("waiting", "save")) == STEPS, said(r))
r = train(config("apart", **{**BESIDE, "train": {**BESIDE["train"], "steps": 300}, "checkpoint": {"every_steps": 200}}),
          env=SLOW)
with open(path("apart", "log.jsonl")) as f:
    saves = [x for x in map(json.loads, f) if x["kind"] == "save"]
check("a save that nothing waits for: the run waited less than the disk took", r.returncode == DONE and
      [x["step"] for x in saves] == [200, 300] and 0 <= saves[0]["waited_s"] < saves[0]["on_disk_s"] and
      "run waited" in r.stdout and "on disk after" in r.stdout, (saves, said(r)))
finish()
PYTHON
