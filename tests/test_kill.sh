#!/usr/bin/env bash
# kill -9 before every single call that changes the disk, one after the other: after each, the run goes on from a whole
# checkpoint and ends as if nothing had been. Prints each check; exit 1 if one fails.
set -u
cd "$(dirname "$0")/.."
PYTHONPATH=tests PYTHONDONTWRITEBYTECODE=1 python3 - <<'PYTHON'
from trial import *

# Preloaded, it ends the process before call number KILL_AT. Of writes in a row every hundredth counts: a save has
# hundreds. fsync does nothing, since a killed process needs none.
SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/types.h>
#include <unistd.h>
static int writes;
static void count(void) {
    static int calls, at;
    if (!at) at = getenv("KILL_AT") ? atoi(getenv("KILL_AT")) : -1;
    if (++calls == at) kill(getpid(), SIGKILL);
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
    wrong = []
    to_the_end(config(name, **sections))
    for kill_at in range(1, 1000):
        again = "%s_%d" % (name, kill_at)
        file = config(again, **sections)
        killed = trained(file, kill_at)
        if killed.returncode == STOPPED:
            killed = trained(file, kill_at)
        if killed.returncode != -signal.SIGKILL:
            return kill_at - 1, wrong
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
calls, wrong = every_call("stepwise", run={"stop_after_minutes": 1e-9}, checkpoint={"every_steps": 1, "keep_last": 1},
      **SMALL)
check("killed before each call of a run that stops and saves at every step", calls > 20 and not wrong, (calls,
      wrong[:3]))
finish()
PYTHON
