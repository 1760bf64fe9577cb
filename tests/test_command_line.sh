#!/usr/bin/env bash
# What is typed wrongly is refused in a line and a hint, exit 2; what is asked for is printed. Prints each check;
# exit 1 if one fails.
set -u
cd "$(dirname "$0")/.."
PYTHONPATH=tests PYTHONDONTWRITEBYTECODE=1 python3 - <<'PYTHON'
from trial import *

file = config("run")
with open(path("cut.json"), "w") as f:
    f.write('{"version": 1, "run": ')
with open(path("misspelt.json"), "w") as f:
    json.dump({**BASE, "train": {**BASE["train"], "leraning_rate": 1e-3, "lr": 1e-3}}, f)
with open(path("section.json"), "w") as f:
    json.dump({**BASE, "trian": {}}, f)
for name, arguments, parts in (
        ("an unknown option", ["--confg", file], ["--confg", "did you mean --config?"]),
        ("an unknown option like none", ["--config", file, "--zzzzzzzzzzzz"], ["--zzzzzzzzzzzz", "train_moe help"]),
        ("an unknown command", ["trian", "--config", file], ["trian", "did you mean train?"]),
        ("a stray word", ["--config", file, "fast"], ["'fast'"]),
        ("no --config", ["train"], ["no --config", "--config configs/tiny.json"]),
        ("--config without a value", ["--config"], ["--config needs a value"]),
        ("a missing file", ["--config", path("none.json")], ["none.json"]),
        ("a folder as file", ["--config", FOLDER], [FOLDER]),
        ("an unfinished file", ["--config", path("cut.json")], ["cut.json"]),
        ("a misspelt key", ["--config", path("misspelt.json")], ["leraning_rate", "train."]),
        ("a misspelt section", ["--config", path("section.json")], ["trian", "train"]),
        ("a misspelt setting", ["--config", file, "train.stesp=3"], ["stesp", "train.steps"]),
        ("a setting out of range", ["--config", file, "--set", "train.lr=-1"], ["train.lr"]),
        ("a setting of the wrong type", ["--config", file, "--set", "train.steps=many"], ["train.steps"]),
        ("--set without =", ["--config", file, "--set", "train.steps"], ["train.steps"]),
        ("an option of another command", ["--config", file, "--temperature", "1"], ["--temperature", "train"]),
        ("a batch that does not divide", ["--config", file, "train.global_batch_size=3"], ["train.global_batch_size",
        "micro_batch_size"]),
        ("cuda without a GPU backend", ["--config", file, "run.device=cuda"], ["run.device"]),
        ("fp8 with a narrow model", ["--config", file, "precision.compute=fp8"], ["multiple of 128", "bf16"]),
        ("two pipeline stages in one process", ["--config", file, "parallel.pp=2"], ["parallel.pp"]),
        ("a model larger than the memory", ["--config", "configs/deepseek_v3.json", "run.dir=" + path("run"),
        "parallel.pp=1", "parallel.ep=1", "run.device=cpu", "precision.compute=bf16", "data.train=synthetic",
        "data.val=[]"], ["the memory plan needs at least", "this process can have",
        "weights (f32 master)", "train.seq_len"]),
        ("data that is not there", ["--config", file, "data.train=" + path("no_*.bin")], ["no_*.bin"]),
        ("--resume and --init-from", ["--config", file, "--resume", FOLDER, "--init-from", FOLDER], ["exclude"]),
        ("--init-from a missing folder", ["--config", file, "--init-from", path("none")], ["none"]),
        ("eval without a checkpoint", ["eval", "--config", file, "data.val=[]"], ["data.val"]),
        ("a drawing of a run", ["--config", file, "--draw", "x.svg"], ["--draw does not go with the command train"]),
        ("an unknown schedule", ["plan", "--config", file, "--schedule", "1f1c"], ["--schedule 1f1c", "1f1b"]),
        ("a schedule that does not fit", ["plan", "--config", file, "--schedule", "dualpipe", "--pp", "3"],
         ["dualpipe needs an even number of ranks, not 3", "dualpipev"]),
        ("help of an unknown word", ["help", "learnign"], ["learnign"])):
    r = run(*arguments)
    check(name + ": exit 2, one line and a hint", is_refusal(r, *parts), said(r))
check("none of these left a trace", not os.path.exists(path("run")) or os.listdir(path("run")) in ([], ["lock"]),
      os.path.exists(path("run")) and os.listdir(path("run")))

# ---- what is printed ----
for arguments in (["help"], ["--help"], ["-h"], [], ["train", "--help"]):
    r = run(*arguments)
    check("help by %s" % arguments, r.returncode == DONE and not r.stderr and all(word in r.stdout for word in
          ("commands", "--config", "exit codes", "train.lr ")), said(r))
r = run("help", "train.lr_shape")
check("help section.field", r.returncode == DONE and "one of constant, linear, cosine, wsd" in r.stdout and
      r.stdout.count("\n") < 9,
      said(r))
r = run("help", "checkpoint")
check("help section", r.returncode == DONE and "checkpoint.keep_last" in r.stdout and "--checkpoint" in r.stdout,
      said(r))
r = run("help", "temperature")
check("help word", r.returncode == DONE and "--temperature" in r.stdout and "sample.temperature" in r.stdout, said(r))
for word in ("--version", "-V"):
    r = run(word)
    check(word, r.returncode == DONE and re.fullmatch(r"train_moe \d+\.\d+\.\d+ \(commit .*\)\n", r.stdout) and
          not r.stderr,
          said(r))
for name in sorted(os.listdir("configs")):
    first = run("--config", "configs/" + name, "--print-config", "train.lr=0.00125")
    with open(path("printed.json"), "w") as f:
        f.write(first.stdout)
    again = run("--config", path("printed.json"), "--print-config")
    check("configs/%s: --print-config, read again, prints the same" % name, first.returncode == again.returncode ==
          DONE and
          first.stdout == again.stdout and json.loads(first.stdout)["train"]["lr"] == 0.00125, said(again))
    r = run("plan", "--config", "configs/" + name)
    check("configs/%s: plan" % name, r.returncode == DONE and "parameters" in r.stdout, said(r))
    r = run("--config", "configs/" + name, "--dry-run")
    check("configs/%s: --dry-run" % name, r.returncode == DONE and "parameters" in r.stdout, said(r))
drawing = path("schedule.svg")
r = run("plan", "--config", file, "--pp", "2", "--schedule", "dualpipe", "--micro-batches", "8", "--draw", drawing)
check("plan --draw: the table, and the file", r.returncode == DONE and "* dualpipe" in r.stdout and
      re.search("^stages ", r.stdout, re.M) and open(drawing).read().endswith("</svg>\n"), said(r))
import xml.dom.minidom
check("the drawing is XML", xml.dom.minidom.parse(drawing).documentElement.tagName == "svg")
r = run("train", "--config", file, "--quiet")
check("--quiet: the last line only", r.returncode == DONE and r.stdout.count("\n") == 1 and "done" in r.stdout and not
      r.stderr, said(r))
check("and the whole log.jsonl", len(records("run", "step")) == 2)
r = train(config("named", run={"dir": None}), "run.dir=" + path("other"), "--set=train.steps=3", "--set",
      "run.name=x y")
check("settings in all three spellings", r.returncode == DONE and len(records("other", "step")) == 3 and
      "3 overrides (run.dir, train.steps, run.name)" in r.stdout and "x y: " in r.stdout, said(r))
check("every line of a run has its kind", all(re.match(r"\S+Z (step|save|done) ", line) for
      line in r.stdout.splitlines()
      if line[:4].isdigit()) and sum(" step " in line for line in r.stdout.splitlines()) == 3, said(r))
check("the banner", all(re.search("^%-10s " % word, r.stdout, re.M) for word in ("model", "config", "data", "batch",
      "device",
      "memory", "files", "resume", "stop")) and "gnorm is before clipping" in r.stdout, said(r))
r = train(config("wide"), "log.fp8_every_steps=1")
check("a note where there is no FP8 to count", r.returncode == DONE and "log.fp8_every_steps counts nothing" in r.stdout and
      not records("wide", "fp8"), said(r))

# ---- launchers ----
for variable in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"):
    r = train(config("alone"), env={variable: "2"})
    check(variable + "=2 without a launcher: exit 2", is_refusal(r, variable + " says 2 tasks"), said(r))
    r = train(config("alone_" + variable), env={variable: "1"})
    check(variable + "=1: trains", r.returncode == DONE, said(r))
check("refused before anything was made", not os.path.exists(path("alone")))
built_with = run("--version").stdout
if "Open MPI" in built_with and shutil.which("mpirun"):
    r = subprocess.run(["mpirun", "-q", "--allow-run-as-root", "--oversubscribe", "-np", "2", BINARY, "--config",
                        config("pair", run={"device": "cpu"})], capture_output=True, text=True, timeout=TIMEOUT_S, env=environment())
    check("mpirun -np 2: one run of two ranks", r.returncode == DONE and "mesh       2 ranks" in r.stdout and
          len(records("pair", "step")) == 2 and r.stdout.count("done ") == 1, said(r))
    for word, code in (("--version", DONE), ("--verison", USER)):
        r = subprocess.run(["mpirun", "-q", "--allow-run-as-root", "--oversubscribe", "-np", "2", BINARY, word],
                           capture_output=True, text=True, timeout=TIMEOUT_S, env=environment())
        check("mpirun -np 2 train_moe %s: said once" % word, r.returncode == code and
              (r.stdout + r.stderr).count("train_moe 0." if code == DONE else "error: ") == 1, said(r))
    r = subprocess.run(["mpirun", "-q", "--allow-run-as-root", "-np", "1", BINARY, "--config", config("single")],
                       capture_output=True, text=True, timeout=TIMEOUT_S, env=environment())
    check("mpirun -np 1: trains", r.returncode == DONE and len(records("single", "step")) == 2, said(r))
finish()
PYTHON
