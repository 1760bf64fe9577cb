#!/usr/bin/env bash
# Disks that fill up, go over quota or turn read-only under a run: the checkpoint before stays, the run goes on, and with
# room again it ends as if nothing had been. Real file systems, mounted in a namespace that ends with the test; where
# mounting is not permitted, that part says so and is left out. Prints each check; exit 1 if one fails.
set -u
cd "$(dirname "$0")/.."
if [ -z "${MAY_MOUNT:-}" ]; then
    export MAY_MOUNT=no
    for alone in "unshare -m" "unshare -rm"; do
        if $alone mount -t tmpfs none /mnt 2>/dev/null; then
            MAY_MOUNT=yes exec $alone bash tests/test_disk.sh
        fi
    done
fi
PYTHONPATH=tests PYTHONDONTWRITEBYTECODE=1 python3 - <<'PYTHON'
from trial import *

MAY_MOUNT = os.environ["MAY_MOUNT"] == "yes"
DATA = prepare("shards", "model/model.c")
STEPS = 60
RUN = dict(data=DATA, train={"steps": STEPS, "lr_warmup_steps": 0}, checkpoint={"every_steps": 5, "keep_last": 2})


def mount(name, *options):
    """A file system for the run of this name, in the place of its folder. Returns whether it could be mounted."""
    os.makedirs(path(name), exist_ok=True)
    r = subprocess.run(["mount", *options, path(name)], capture_output=True, text=True)
    atexit.register(subprocess.run, ["umount", path(name)], stderr=subprocess.DEVNULL)
    return r.returncode == 0 or print("skipped: cannot mount %s: %s" % (name, r.stderr.strip()))


def left_over(name):
    return [n for n in os.listdir(path(name)) if n.startswith("step_") and not re.fullmatch(r"step_\d+", n)]


def ends_as(name, whole):
    """The hash at the end, and every step that could be logged."""
    expected = {r["step"]: r for r in records(whole, "step")}
    return last_hash(name) == last_hash(whole) and all(r == expected[r["step"]] for r in records(name, "step"))


train(config("whole", **RUN))

# ---- a disk that is full ----
# A checkpoint takes 0.8 MB: the first fits, a second beside it does not.
if MAY_MOUNT and mount("full", "-t", "tmpfs", "-o", "size=1500k", "none"):
    file = config("full", **RUN)
    r = train(file)
    check("full: every save after the first is a warning, the last one exit 1", r.returncode == FAILED and
          r.stderr.count("save failed, the run goes on: ") == STEPS // 5 - 2 and "No space left on device" in r.stderr
          and "last good checkpoint: " + path("full", "step_00000005") in r.stderr, said(r))
    check("full: the first is kept, and nothing half written", checkpoints("full") == ["step_00000005"] and not
          left_over("full"), os.listdir(path("full")))
    r = train(file)
    check("full: refused before the first step, with both sizes", is_refusal(r, "free, a checkpoint needs", "make room"),
          said(r))
    mount("full", "-o", "remount,size=8m")
    r = train(file)
    check("full: with room again it goes on and ends the same", r.returncode == DONE and
          "step_00000005, bit for bit" in r.stdout and ends_as("full", "whole"), said(r))
    subprocess.run(["mount", "-o", "remount,ro", path("full")], check=True)
    r = train(file, "train.steps=%d" % (STEPS + 1))
    check("read-only from the start: refused", is_refusal(r, "Read-only file system", "run.dir"), said(r))
    r = run("eval", "--config", file)
    check("a checkpoint on a read-only disk is evaluated", r.returncode == DONE and "held_out" in r.stdout, said(r))
    r = train(config("elsewhere", **RUN), "--init-from", path("full"), "train.steps=1")
    check("and starts another run", r.returncode == DONE, said(r))
if MAY_MOUNT and mount("small", "-t", "tmpfs", "-o", "size=1m", "none"):
    r = train(config("small", **RUN))
    check("too small: refused before the first step", is_refusal(r, "free, a checkpoint needs") and not
          checkpoints("small"), said(r))
for background in (True, False) if MAY_MOUNT else ():
    name = "room_%s" % background
    if mount(name, "-t", "tmpfs", "-o", "size=1500k", "none"):
        file = config(name, **{**RUN, "checkpoint": {**RUN["checkpoint"], "background": background}})
        code, out, err = act_at_step(file, 22, lambda p: mount(name, "-o", "remount,size=8m"))
        check("full, room is made under the run (background %s): later saves work" % background, code == DONE and
              "No space left on device" in err and len(checkpoints(name)) == 2 and not left_over(name) and
              ends_as(name, "whole"), (code, err, os.listdir(path(name))))

# ---- a quota that is noticed late ----
# fsync or close fail as they do on network file systems, while the file FLAG is there.
with open(path("shim.c"), "w") as f:
    f.write(r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
static int fails(const char *call) {
    const int before = errno;
    const int is_on = strcmp(getenv("CALL"), call) == 0 && access(getenv("FLAG"), F_OK) == 0;
    errno = is_on ? EDQUOT : before;
    return is_on;
}
int fsync(int fd) {
    (void)fd;
    return fails("fsync") ? -1 : 0;
}
int close(int fd) {
    struct stat st;
    const int is_written = fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && (fcntl(fd, F_GETFL) & O_ACCMODE) != O_RDONLY;
    const int rc = ((int (*)(int))dlsym(RTLD_NEXT, "close"))(fd);
    return is_written && fails("close") ? -1 : rc;
}
""")
subprocess.run([*os.environ.get("CC", "cc").split(), "-shared", "-fPIC", "-o", path("shim.so"), path("shim.c"), "-ldl"],
               check=True)
LONG = {**RUN, "train": {**RUN["train"], "steps": 400}}
train(config("long", **LONG))


def exceed(p, name):
    """Over quota until a save has failed."""
    open(path(name + ".flag"), "w").close()
    end = time.time() + TIMEOUT_S
    while time.time() < end and p.poll() is None and not any("save failed" in w["text"] for w in records(name, "warn")):
        time.sleep(0.001)
    os.remove(path(name + ".flag"))


for call in ("fsync", "close"):
    name = "quota_" + call
    file = config(name, **LONG)
    code, out, err = act_at_step(file, 12, lambda p: exceed(p, name),
                                 env={"LD_PRELOAD": path("shim.so"), "CALL": call, "FLAG": path(name + ".flag")})
    warned = [w["text"] for w in records(name, "warn")]
    check("over quota at %s: a warning; later saves work" % call, code == DONE and warned and
          any("save failed" in w and "quota exceeded" in w for w in warned) and not left_over(name) and
          len(checkpoints(name)) == 2 and ends_as(name, "long"), (code, err, os.listdir(path(name))))

# ---- a disk that turns read-only, as ext4 does after an error ----
image = path("image")
with open(image, "wb") as f:
    f.truncate(16 << 20)
made = MAY_MOUNT and shutil.which("mkfs.ext4") and subprocess.run(["mkfs.ext4", "-q", image]).returncode == 0
if made and mount("broken", "-o", "loop", image):
    file = config("broken", **LONG)
    code, out, err = act_at_step(file, 12, lambda p: mount("broken", "-o", "remount,abort"))
    # A save that the abort meets between its rename and the fsync behind it is no good one, though its folder can be seen.
    seen = checkpoints("broken")
    good = re.search("last good checkpoint: " + path("broken", "(step_[0-9]+)"), err)
    check("read-only under the run: warnings, exit 1 at the end", code == FAILED and good and good[1] in seen[-2:] and
          "save failed, the run goes on" in err and "Read-only file system" in err and
          "step 400/" in re.sub(" +", " ", out), (code, err, seen))
    subprocess.run(["umount", path("broken")], check=True)
    mount("broken", "-o", "loop", image)
    last = checkpoints("broken")[-1]
    r = train(file)
    check("read-only no more: goes on from there and ends the same", r.returncode == DONE and last >= good[1] and
          last + ", bit for bit" in r.stdout and ends_as("broken", "long"), said(r))
    subprocess.run(["umount", path("broken")], check=True)
if not MAY_MOUNT:
    print("skipped: full and read-only disks: mounting is not permitted here")
finish()
PYTHON
