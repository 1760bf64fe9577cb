#!/usr/bin/env bash
# Several ranks under mpirun that share one GPU, staged through the host, and NCCL alone on it: what they compute is what
# one rank computes. Prints each check; exit 1 if one fails.
set -u
cd "$(dirname "$0")/.."
PYTHONPATH=tests PYTHONDONTWRITEBYTECODE=1 python3 - <<'PYTHON'
import ctypes
from trial_ranks import *

try:
    has_gpu = ctypes.CDLL("libcuda.so.1").cuInit(0) == 0
except OSError:
    has_gpu = False
if not has_gpu or "CPU only" in run("--version").stdout:
    print("skipped: no GPU here, or none for this binary")
    sys.exit(0)
GPU_STEPS = 20
BOUNDS = {"fp32": (1e-5, 1e-4), "bf16": (2e-3, 2e-3)}


# BF16's roundings push a few tokens to other experts; among a thousand tokens a step that is little.
TRAIN = {**EVERYTHING["train"], "steps": GPU_STEPS, "seq_len": 64, "micro_batch_size": 4, "global_batch_size": 16, "lr": 1e-3}


ON_GPU = {"run": {"device": "cuda"}}


def on_gpu(sections):
    return {**sections, **ON_GPU}


def gpu(name, precision, mtp=1):
    return part(name, precision, mtp, **ON_GPU, train=TRAIN, checkpoint={"every_steps": 10},
                eval={"every_steps": 10, "tokens": 300},
                sample={"every_steps": 10, "prompts": ["static "], "tokens": 5})


# ---- four ranks on one GPU ----
for precision, bounds in BOUNDS.items():
    one = precision + "_one"
    r = train(gpu(one, precision))
    check(precision + ": one rank", r.returncode == DONE and len(losses(one)) == GPU_STEPS, said(r))
    for name, ep in (("dp4", 1), ("ep4", 4), ("ep2dp2", 2))[:3 if precision == "fp32" else 2]:
        folder = precision + "_" + name
        begin = time.time()
        r = train_on(4, gpu(folder, precision), "parallel.ep=%d" % ep, "parallel.comm=mpi")
        apart = far(one, folder, *bounds, steps=GPU_STEPS)
        check("%s %s: as one rank" % (precision, name), r.returncode == DONE and not apart, (apart, said(r)))
        if r.returncode == DONE:
            most = max(abs(x - y) / abs(x) for x, y in zip(losses(one), losses(folder)))
            print("      step 1 differs by %.2g, at most %.2g over %d steps; %.1f s" % (
                abs(losses(one)[0] - losses(folder)[0]) / losses(one)[0], most, GPU_STEPS, time.time() - begin))
    train(gpu(one + "_main", precision, mtp=0))
    r = train_on(4, gpu(precision + "_dp4_main", precision, mtp=0), "parallel.ep=1")
    check(precision + ": four ranks = four micro-batches, bit for bit", hashes(one + "_main") ==
          hashes(precision + "_dp4_main") and len(hashes(one + "_main")) == GPU_STEPS, said(r))
    check(precision + ": what ranks share a GPU by is printed", "4 ranks share it" in r.stdout and
          "MPI through pinned memory, without CUDA graphs" in r.stdout, r.stdout)
r = train_on(4, gpu("again", "bf16"), "parallel.ep=4")
check("twice the same bits, and auto stages where ranks share a GPU", hashes("again") == hashes("bf16_ep4") and
      [v["sets"] for v in records("again", "val")] == [v["sets"] for v in records("bf16_ep4", "val")], said(r))
STILL = ["train.steps=22", "train.lr=0", "train.lr_warmup_steps=0", "train.bias_update_speed=0"]
r = train(path("again.json"), *STILL)
check("four ranks' checkpoint on one: the same bits", r.returncode == DONE and hashes("again")[20:] ==
      2 * [hashes("bf16_ep4")[-1]], said(r))

# ---- experts placed by their loads ----
skewed = ["parallel.ep=4", "train.bias_update_speed=0", "train.balance_alpha=0"]
train_on(4, gpu("skewed", "fp32"), *skewed, "train.steps=10")
for kind in ("consecutive", "balanced"):
    shutil.copytree(path("skewed"), path(kind))
    r = train_on(4, path("skewed.json"), "run.dir=" + path(kind), "parallel.placement=" + kind, *skewed)
apart = far("consecutive", "balanced", 1e-5, 1e-5, steps=GPU_STEPS)
before, after = ([s["rank_load_mean"] for s in records(f, "step")][10:] for f in ("consecutive", "balanced"))
check("balanced: the largest rank has less to do, and losses are the same", r.returncode == DONE and not apart and
      all(a > b for a, b in zip(before, after)) and len(after) == GPU_STEPS - 10, (apart, before, after, said(r)))

# ---- four stages on one GPU ----
for mtp in (0, 1):
    train(staged("layers%d" % mtp, mtp, **ON_GPU))
r = pipeline(4, staged("zb1p", **ON_GPU), 4, "zb1p")
check("zb1p on four stages: one rank, bit for bit", r.returncode == DONE and hashes("zb1p") == hashes("layers0") and
      losses("zb1p") == losses("layers0") and len(hashes("zb1p")) == STEPS, said(r))
for name, pp, ep in (("dualpipe", 4, 1), ("dualpipe_ep2", 2, 2)):
    r = pipeline(4, staged(name, 1, **ON_GPU), pp, "dualpipe", "parallel.ep=%d" % ep)
    check(name + ": as one rank", r.returncode == DONE and not far("layers1", name, 1e-5, 1e-4),
          (far("layers1", name, 1e-5, 1e-4), said(r)))

# What four ranks save beside the run, and how its checkpoint goes forward.
r = pipeline(4, staged("waits", 1, **ON_GPU), 2, "dualpipe", "parallel.ep=2", "checkpoint.background=false")
check("saved beside the run or waited for: the same bytes", r.returncode == DONE and hashes("waits") ==
      hashes("dualpipe_ep2") and checkpoints("waits") == checkpoints("dualpipe_ep2") != [] and
      all(saved_state("waits", c) == saved_state("dualpipe_ep2", c) for c in checkpoints("waits")), said(r))
file, prompt = path("dualpipe_ep2.json"), ["--prompt", "static v", "--tokens", "24", "--temperature", "0.8"]
evaluated, text = scores(run("eval", "--config", file)), run("generate", "--config", file, *prompt).stdout
for layout in (["parallel.pp=2", "parallel.ep=2"], ["parallel.pp=4"], ["parallel.ep=4"]):
    r = ranks(4, "eval", "--config", file, *layout)
    check("eval, %s: one rank's numbers" % " ".join(layout), scores(r) == evaluated and len(evaluated) > 2,
          (evaluated, said(r)))
    r = ranks(4, "generate", "--config", file, *prompt, *layout)
    check("generate, %s: one rank's text" % " ".join(layout), r.stdout == text != "", (text, said(r)))

# ---- FP8 ----
# Of four ranks' tokens together, tiles of an expert's rows hold others than of one rank's, and E4M3 makes more of it.
WHOLE = ["train.global_batch_size=4", "model.topk_group=1"]
r = train(config("fp8_whole", **on_gpu(FP8)), *WHOLE)
check("FP8: one rank", r.returncode == DONE and len(hashes("fp8_whole")) == 4, said(r))
r = train_on(4, config("fp8_ep4", **on_gpu(FP8)), *WHOLE, "parallel.ep=4")
apart = far("fp8_whole", "fp8_ep4", 1e-9, 1e-2, steps=4)
check("FP8 ep4: as one rank", r.returncode == DONE and not apart, (apart, said(r)))
TWO = "train.steps=2"
train(config("fp8_deep", **on_gpu(FP8_DEEP)), TWO)
r = pipeline(4, config("fp8_zb1p", **on_gpu(FP8_DEEP)), 4, "zb1p", TWO)
check("FP8 zb1p on four stages: one rank, bit for bit", r.returncode == DONE and hashes("fp8_zb1p") ==
      hashes("fp8_deep") and len(hashes("fp8_deep")) == 2, said(r))
r = pipeline(4, config("fp8_dualpipe", **on_gpu(FP8_DEEP)), 2, "dualpipe", "parallel.ep=2", TWO)
apart = far("fp8_deep", "fp8_dualpipe", 1e-9, 1e-2, steps=2)
check("FP8 dualpipe, ep 2: as one rank", r.returncode == DONE and not apart, (apart, said(r)))

# A text of one id: all tokens go to the experts of one rank, whose rows are planned for less.
write_shard("same/ids.bin", [7] * 6000)
same = {**on_gpu(FP8), "data": {"train": path("same", "ids.bin"), "val": None},
        "train": {**EVERYTHING["train"], "steps": 2, "seq_len": 128, "global_batch_size": 4}}
said_of = {}
for capacity in ("1.4", "worst"):
    said_of[capacity] = train_on(4, config("rows_" + capacity, **same), "parallel.ep=4", "model.n_group=4",
                                 "model.topk_group=1", "moe.capacity=" + capacity)
check("rows run out and are doubled, or are enough", "did not fit" in said_of["1.4"].stderr and
      "did not fit" not in said_of["worst"].stderr, [said(r) for r in said_of.values()])
check("to the same bits", len(hashes("rows_1.4")) == 2 and hashes("rows_1.4") == hashes("rows_worst") and
      losses("rows_1.4") == losses("rows_worst"), [said(r) for r in said_of.values()])

# ---- how they fail ----
r = train_on(4, gpu("nccl4", "bf16"), "parallel.comm=nccl")
has_nccl = "NCCL" in run("--version").stdout
check("NCCL on a shared GPU: one line with host and ranks, a hint, exit 2", r.returncode == USER and
      r.stderr.count("error: ") == 1 and (not has_nccl or "4 ranks share one" in r.stderr) and
      "parallel.comm" in r.stderr, said(r))
p = start_on(4, gpu("killed", "bf16"), "parallel.ep=4", "train.steps=100000")
until_step(p, 3)
pid, begin = pid_of(p, 2), time.time()
os.kill(pid, signal.SIGKILL)
out, err = p.communicate(timeout=TIMEOUT_S)
check("rank 2 killed: the job ends, and says who", p.returncode not in (DONE, STOPPED) and time.time() - begin < 30 and
      err.count("error: ") == 1 and "rank 2 of 4 (pid %d" % pid in err, (time.time() - begin, p.returncode, err))

# ---- NCCL, alone on the GPU ----
for precision in BOUNDS if has_nccl else ():
    for graphs in ("true", "false"):
        folder = "%s_nccl_%s" % (precision, graphs)
        r = train(gpu(folder, precision), "parallel.comm=nccl", "run.graphs=" + graphs)
        check("%s over NCCL, graphs %s: the bits of one rank without it" % (precision, graphs), r.returncode == DONE and
              re.search(r"NCCL \d.*, NVLS off", r.stdout) and hashes(folder) == hashes(precision + "_one") and
              len(hashes(folder)) == GPU_STEPS, said(r))
for graphs in ("true", "false") if has_nccl else ():
    folder = "stages_nccl_" + graphs
    r = train(staged(folder, **ON_GPU), "parallel.schedule=dualpipev", "parallel.comm=nccl", "run.graphs=" + graphs)
    check("two stages of one rank over NCCL, graphs %s: one rank, bit for bit" % graphs, r.returncode == DONE and
          hashes(folder) == hashes("layers0") and losses(folder) == losses("layers0") and
          len(hashes(folder)) == STEPS, said(r))
finish()
PYTHON
