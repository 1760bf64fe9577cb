#!/usr/bin/env bash
# scripts/restart.sh, slurm.sh and hosts.sh: when a run is started again, when that is given up, who is signalled and what
# is queued again. Launchers are made up here; one run is real. Prints each check; exit 1 if one fails.
set -u
cd "$(dirname "$0")/.."
PYTHONPATH=tests PYTHONDONTWRITEBYTECODE=1 python3 - <<'PYTHON'
from trial import *

os.mkdir(path("bin"))
RESTART = os.path.abspath("scripts/restart.sh")


def script(name, text):
    """A command of this name, first on the PATH. It notes its arguments in FOLDER/NAME.log."""
    with open(path("bin", name), "w") as f:
        f.write('#!/bin/bash\necho "$*" >>%s\n%s\n' % (path(name + ".log"), text))
    os.chmod(f.name, 0o755)
    return f.name


def calls(name):
    if not os.path.exists(path(name + ".log")):
        return []
    with open(path(name + ".log")) as f:
        lines = f.read().splitlines()
    os.remove(f.name)
    return lines


def env(**more):
    return {**environment({"PATH": path("bin") + ":" + os.environ["PATH"], "PAUSE": "0"}), **more}


def do(*command, **more):
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=env(**more))


def loop(name, text, **more):
    """restart.sh around a command that is started as `NAME RUN_DIR`; $n is how often it was."""
    os.makedirs(path(name + ".run"), exist_ok=True)
    command = script(name, "n=$(wc -l <%s)\n" % path(name + ".log") + text)
    r = do(RESTART, path(name + ".run"), command, path(name + ".run"), **more)
    return r, len(calls(name))


SAVE = 'mkdir -p $1/step_0000000$n && echo {} >$1/step_0000000$n/manifest.json\n'

# ---- when it starts again, and when not ----
for code in (DONE, USER):
    r, n = loop("ends%d" % code, "exit %d" % code)
    check("exit code %d ends it at once" % code, r.returncode == code and n == 1 and not r.stderr, (n, said(r)))
r, n = loop("fails", "exit 1")
check("three restarts without a checkpoint, then given up", r.returncode == FAILED and n == 4 and
      "no new checkpoint in 3 restarts: given up" in r.stderr, (n, said(r)))
r, n = loop("fails_twice", "exit 137", RESTARTS="2")
check("RESTARTS", r.returncode == FAILED and n == 3, (n, said(r)))
r, n = loop("goes_on", "[ $((n % 3)) = 0 ] && " + SAVE + "[ $n -ge 8 ] && exit 0\nexit 1")
check("a new checkpoint starts the count anew", r.returncode == DONE and n == 8 and "restart 3 of 3" in r.stderr,
      (n, said(r)))
r, n = loop("stuck", "[ $n = 2 ] && " + SAVE + "exit 1")
check("three restarts from the last checkpoint", r.returncode == FAILED and n == 5 and "step_00000002" in r.stderr,
      (n, said(r)))
r, n = loop("half", "mkdir -p $1/step_0000000$n\nexit 1")
check("half a checkpoint is none", r.returncode == FAILED and n == 4, (n, said(r)))
r, n = loop("stops", SAVE + "exit 3")
check("stopped early and saved: 3, and the caller decides", r.returncode == STOPPED and n == 1, (n, said(r)))
r, n = loop("stops_at_once", "exit 3")
check("stopped early without a checkpoint: 1, or it would be queued for ever", r.returncode == FAILED and n == 1 and
      "without a new checkpoint" in r.stderr, (n, said(r)))
r = do(RESTART, path("bin"))
check("a folder and a command: one line, a hint, exit 2", is_refusal(r, "a folder and a command"), said(r))

# ---- signals ----
WAITS = "trap '%s' USR1\ntrap '' TERM INT\necho waits >&2\nfor _ in {1..200}; do sleep 0.05; done\nexit 1"
for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
    for name, then, code in (("saves", SAVE.replace("\n", "; ") + "exit 3", STOPPED), ("breaks", "exit 1", FAILED)):
        name = "%s_%d" % (name, number)
        os.mkdir(path(name + ".run"))
        command = script(name, "n=1\n" + WAITS % then)
        p = subprocess.Popen([RESTART, path(name + ".run"), command, path(name + ".run")], stderr=subprocess.PIPE,
                             text=True, env=env(), preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
        p.stderr.readline()
        p.send_signal(number)
        err = p.communicate(timeout=TIMEOUT_S)[1]
        check("%s: USR1 to the command, which %s; not started again" % (signal.Signals(number).name, name.split("_")[0]),
              p.returncode == code and len(calls(name)) == 1, (p.returncode, err))

# ---- a real run, killed on its way ----
# A step takes a millisecond or two: a thousand, so that the run is not over before the script has looked.
SETS = ["train.steps=1000", "checkpoint.every_steps=100", "checkpoint.keep_last=10", "log.hash_every_steps=100"]
more = dict(data={"train": "synthetic", "val": []}, eval={}, sample={})
train(config("whole", **more), *SETS)
config("killed", **more)
script("once", 'if [ ! -e %s ]; then touch %s; "$@" log.every_steps=1 & pid=$!; until [ -e %s ]; do sleep 0.02; done; '
       'kill -9 $pid; wait $pid; exit 1; fi; exec "$@"' % (path("was"), path("was"),
       path("killed", "step_00000100", "manifest.json")))
r = do(RESTART, path("killed"), "once", BINARY, "--config", path("killed.json"), *SETS)
check("killed behind a checkpoint: goes on to the same bits", r.returncode == DONE and last_hash("killed") ==
      last_hash("whole") and len(calls("once")) == 2, said(r))

# ---- Slurm ----
script("scontrol", "")
script("mpirun", SAVE.replace("$1", path("batch")).replace("$n", "1") + 'exit ${CODE:-0}')
file = config("batch", **more)
JOB = dict(SLURM_SUBMIT_DIR=os.getcwd(), SLURM_JOB_ID="4711", SLURM_CPUS_PER_TASK="6")


def batch(*arguments, **more):
    shutil.rmtree(path("batch"), ignore_errors=True)
    return do("scripts/slurm.sh", "--config", file, *arguments, **{**JOB, **more})


script("srun", '[ "$1" = --mpi=list ] && { echo "MPI plugin types are... pmix pmi2"; exit 0; }\n' +
       SAVE.replace("$1", path("batch")).replace("$n", "1") + "exit ${CODE:-0}")
r = batch("train.steps=5")
lines = calls("srun")
check("srun where it speaks PMIx, bound to the task's cores", r.returncode == DONE and len(lines) == 2 and
      lines[1].startswith("--mpi=pmix --kill-on-bad-exit=1 --cpu-bind=cores --cpus-per-task=6 ./train_moe --config " +
                          file + " train.steps=5") and not calls("scontrol"), (lines, said(r)))
r = batch(CODE="3")
check("exit code 3: queued again", r.returncode == STOPPED and calls("scontrol") == ["requeue 4711"], said(r))
calls("srun")
r = batch(CODE="2")
check("your input: not queued again", r.returncode == USER and not calls("scontrol") and len(calls("srun")) == 2, said(r))
script("srun", "echo pmi2")
r = batch(CODE="3")
lines = calls("mpirun")
check("else mpirun, quiet and bound", r.returncode == STOPPED and len(lines) == 1 and
      lines[0].startswith("-q --map-by slot:PE=6 --bind-to core ./train_moe ") and calls("scontrol"), (lines, said(r)))
r = batch(LAUNCHER="prun")
check("another launcher: one line, a hint, exit 2", is_refusal(r, "LAUNCHER is prun"), said(r))
r = batch("train.lrr=1")
check("a wrong configuration is said once, before any rank is started", is_refusal(r, "train.lrr") and
      not calls("mpirun"), said(r))
script("mpirun", "trap '%s exit 3' USR1\necho waits >&2\nfor _ in {1..200}; do sleep 0.05; done" %
       SAVE.replace("$1", path("batch")).replace("$n", "1").replace("\n", "; "))
shutil.rmtree(path("batch"), ignore_errors=True)
p = subprocess.Popen(["scripts/slurm.sh", "--config", file], stderr=subprocess.PIPE, text=True, env=env(**JOB))
p.stderr.readline()
p.send_signal(signal.SIGUSR1)
err = p.communicate(timeout=TIMEOUT_S)[1]
check("Slurm's signal before the end: saved and queued again", p.returncode == STOPPED and
      calls("scontrol") == ["requeue 4711"] and len(calls("mpirun")) == 1, (p.returncode, err))

# ---- hosts ----
script("mpirun", SAVE.replace("$1", path("batch")).replace("$n", "1") + "exit ${CODE:-0}")
with open(path("hosts"), "w") as f:
    f.write("# rack 3\ngpu-17 slots=2\ngpu-18 slots=4\n")
r = do("scripts/hosts.sh", f.name, "--config", file, CORES="3", NCCL_SOCKET_IFNAME="eth7")
lines = calls("mpirun")
check("mpirun over hosts: quiet, bound, NCCL's variables handed on", r.returncode == DONE and lines ==
      ["-q --hostfile %s --map-by slot:PE=3 --bind-to core -x NCCL_SOCKET_IFNAME ./train_moe --config %s" % (f.name, file)],
      (lines, said(r)))
r = do("scripts/hosts.sh", f.name, "--config", file, CODE="3")
check("nobody queues it again", r.returncode in (STOPPED, FAILED) and re.search(r"PE=[1-9]", calls("mpirun")[0]), said(r))
with open(path("no_slots"), "w") as f:
    f.write("gpu-17\n")
check("hosts without slots: one line, a hint, exit 2", is_refusal(do("scripts/hosts.sh", f.name, "--config", file),
      "slots=N"))
check("no hosts: one line, a hint, exit 2", is_refusal(do("scripts/hosts.sh", "--config", file), "a file of hosts"))
finish()
PYTHON
