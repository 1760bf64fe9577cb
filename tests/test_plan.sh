#!/usr/bin/env bash
# train_moe plan: every configuration plans at once, its header's figures are what the plan computes, --json has the
# members that help lists, and what cannot be is refused. Prints each check; exit 1 if one fails.
set -u
cd "$(dirname "$0")/.."
PYTHONPATH=tests PYTHONDONTWRITEBYTECODE=1 python3 - <<'PYTHON'
from trial import *
import ast, shlex

UNITS = {"k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12, "MiB": 2**20, "GiB": 2**30, "": 1}
LADDER = ("bytes_debug deepseek_v3 moe_150m moe_1b moe_3b moonlight_16b moonlight_half tiny tiny_fp8 v2_lite "
          "v3_slice").split()


def plan(*arguments):
    """The plan of --json."""
    r = run("plan", *arguments, "--json")
    if r.returncode != DONE or r.stderr:
        check("plan %s" % (arguments,), False, said(r))
        finish()
    return json.loads(r.stdout)


def is_rounded(text, unit, exact):
    """Is text, like 8.92, exact in these units to its last digit?"""
    digits = len(text.partition(".")[2])
    return abs(float(text) - exact / UNITS[unit]) <= 0.5000001 * 10**-digits


# ---- the ladder ----
check("all configurations are there, and no other", sorted(os.listdir("configs")) == [name + ".json" for name in LADDER],
      os.listdir("configs"))
for name in LADDER:
    file = "configs/%s.json" % name
    start = time.monotonic()
    r = run("plan", "--config", file, "--gpu", "h200")
    seconds = time.monotonic() - start
    check(name + ": plans, with nothing on stderr", r.returncode == DONE and not r.stderr and
          ("forecast" in r.stdout or "refused" in r.stdout), said(r))
    check(name + ": in less than 2 s", seconds < 2, seconds)
    p = plan("--config", file)
    with open(file) as f:
        header = json.load(f)["//"]
    figures = (("parameters", r"([\d.]+)([KMB]?) parameters", p["parameters"]["total"]),
               ("MTP", r"\+ ([\d.]+)([KMB]) MTP", p["parameters"]["mtp"]),
               ("active", r"([\d.]+)([KMB]) active with the head", p["parameters"]["active_with_head"]),
               ("FLOPs", r"([\d.]+) ([kMG])FLOP a token", p["flops_per_token"]["total"]),
               ("state", r"([\d.]+) ([MG]iB) of state",
                sum(i["bytes"] for i in p["memory"]["items"] if i["arena"] == "state")))
    for figure, pattern, exact in figures:
        found = re.findall(pattern, header)
        check("%s: its header's %s" % (name, figure), len(found) == (exact > 0) and
              all(is_rounded(text, unit, exact) for text, unit in found), (header, exact))
    check(name + ": parts add up", p["parameters"]["total"] == sum(n for part, n in p["parameters"]["by_part"].items() if
          part != "mtp") and abs(sum(p["flops_per_token"]["by_part"].values()) / p["flops_per_token"]["total"] - 1) < 1e-9)

with open("scripts/peers/torch_peer.py") as f:
    models = next(node.value for node in ast.parse(f.read()).body if isinstance(node, ast.Assign) and
                  node.targets[0].id == "MODELS")
for key, value in zip(models.keys, models.values):
    peer = {k.arg: ast.literal_eval(k.value) for k in value.keywords}
    with open("configs/%s.json" % key.value.replace("-", "_")) as f:
        ours = json.load(f)
    ours["model"]["seq_len"] = ours["train"]["seq_len"]
    check("%s has the dimensions of the PyTorch peer" % key.value, len(peer) > 10 and all((ours["model"][k] or 0) == v
          for k, v in peer.items()), peer)
copies = [next(i["bytes"] for i in plan("--config", "configs/tiny.json", *sets)["memory"]["host_items"]
               if i["name"] == "copy of the state for saves")
          for sets in ([], ["precision.moments=bf16"], ["checkpoint.background=false"], ["checkpoint.every_steps=0"])]
elements = copies[0] // 12
check("the copy of the state for saves, where there will be one", elements > 2.4e6 and
      copies == [12 * elements, 8 * elements, 0, 0], copies)
check("golden counts", plan("--config", "configs/moonlight_16b.json")["parameters"]["total"] == 15960108544)

# FP8 trains wherever its widths fit.
file = "configs/tiny_fp8.json"
for compute in ("fp8", "bf16"):
    r = run("--config", file, "run.device=cpu", "data.train=synthetic", "data.val=[]", "run.dir=" + path(compute),
            "train.steps=2", "train.lr_warmup_steps=1", "precision.compute=" + compute, "train.micro_batch_size=1",
            "train.global_batch_size=1", "eval.every_steps=0", "sample.every_steps=0")
    check("tiny_fp8 trains in " + compute, r.returncode == DONE and "compute " + compute in r.stdout, said(r))
arguments = ("--config", file, "run.device=cpu", "data.train=synthetic", "data.val=[]", "run.dir=" + path("again"),
             "train.steps=4", "train.lr_warmup_steps=1", "train.micro_batch_size=1", "train.global_batch_size=1",
             "eval.every_steps=0", "sample.every_steps=0", "checkpoint.every_steps=2")
hashes = []
for attempt in range(2): # the second goes on from step 2
    r = run(*arguments)
    hashes.append(re.findall(r"step_00000004, .*hash (\w+)", r.stdout))
    shutil.rmtree(path("again") + "/step_00000004")
check("an FP8 run goes on to the same weights", len(hashes[0]) == 1 and hashes[0] == hashes[1], hashes)
r = run("--config", file, "data.train=synthetic", "train.micro_batch_size=1", "train.seq_len=192")
check("tokens that FP8 tiles do not divide are refused", is_refusal(r, "micro_batch_size x seq_len", "128"), said(r))
r = run("plan", "--config", file, "model.moe_intermediate_size=64")
check("a width that FP8 blocks do not divide is refused", is_refusal(r, "moe_intermediate_size"), said(r))

# ---- data ----
ids = list(range(256)) * 5
write_shard("shards/train_000.bin", ids)
write_shard("shards/train_001.bin", ids)
write_shard("shards/val_000.bin", ids)
file = config("there", data={"train": path("shards", "train_*.bin"), "val": [{"name": "held_out", "path":
              path("shards", "val_*.bin")}, {"name": "lost", "path": path("shards", "lost_*.bin")}]})
train, held_out, lost = plan("--config", file)["data"]
check("tokens on disk", (train["there"], train["shards"], train["tokens"]) == (True, 2, 2560) and held_out["there"] and
      held_out["tokens"] == 1280, (train, held_out))
check("asked, in epochs", train["asked"] == 2 * 4 * 32 and train["epochs"] == 256 / 2560, train)
check("not there", not lost["there"] and lost["tokens"] == 0 and lost["problem"] is None, lost)
r = run("plan", "--config", file)
check("the same in words", "train 2.56K tokens in 2 shards: asked 256 = 0.10 epochs" in r.stdout and
      "val lost %s: not there" % path("shards", "lost_*.bin") in r.stdout, said(r))
with open(path("shards", "train_001.bin"), "wb") as f:
    f.write(b"no shard")
train = plan("--config", file)["data"][0]
check("a broken shard is named, and planned on", train["there"] and "train_001.bin" in train["problem"], train)
train = plan("--config", file, "data.train=synthetic")["data"][0]
check("synthetic data", train["there"] and train["path"] is None and train["epochs"] is None, train)
check("a plan leaves no trace", not os.path.exists(path("there")))

# ---- --json and its help ----
def keys_of(value, prefix=""):
    if isinstance(value, dict) and prefix.endswith("by_part"):
        return {prefix + ".PART"}
    if isinstance(value, dict):
        return set().union(*(keys_of(v, prefix + "." + k if prefix else k) for k, v in value.items()))
    if isinstance(value, list):
        return set().union(*(keys_of(v, prefix + "[]") for v in value), set() if value else {prefix + "[]"})
    return {prefix}


p = plan("--config", "configs/deepseek_v3.json", "--world", "2048", "--gpu", "h200", "run.price_per_gpu_hour=1")
listed = {line.split()[0] for line in run("help", "json").stdout.splitlines() if line.startswith("  ") and
          not line.startswith("   ")}
file = config("weighed")
check("without a checkpoint nothing weighs on the ranks", p["experts"] is None and
      plan("--config", file, "--world", "2")["experts"] is None)
run("--config", file)
p["experts"] = plan("--config", file, "--world", "2")["experts"]
check("by the run's checkpoint, experts do", p["experts"] and p["experts"]["checkpoint"] == path("weighed", "step_00000002") and
      1 <= p["experts"]["balanced"]["mean"] <= p["experts"]["consecutive"]["mean"], p["experts"])
check("--json has the members that help lists", keys_of(p) | {"gpu", "cluster", "experts"} == listed,
      keys_of(p) ^ listed)
one = plan("--config", "configs/tiny.json")
check("without --gpu it is null, without --world too", one["gpu"] is None and one["cluster"] is None)
check("the whole and its parts", p["memory"]["device_bytes"] >= sum(i["bytes"] for i in p["memory"]["items"] if
      i["arena"] == "state") and p["flops_per_token"]["forward"] * 3 == p["flops_per_token"]["total"])
check("batches of a schedule", p["run"]["tokens_per_step"] == 3072 * 4096 and p["run"]["tokens_per_step_at_end"] ==
      15360 * 4096, p["run"])

# ---- GPUs ----
for gpu in ("h200", "h100-80", "a100-80", "rtx4090", "h800"):
    for name in LADDER:
        g = plan("--config", "configs/%s.json" % name, "--gpu", gpu, "run.price_per_gpu_hour=2")["gpu"]
        fitting = [c for c in g["choices"] if c["micro_batch"] > 0]
        check("%s on %s: choices fit" % (name, gpu), len(g["choices"]) == 8 and all(c["bytes"] <= g["memory_bytes"] for c in
              fitting) and g["fits"] == (g["needs_bytes"] <= g["memory_bytes"]), g)
        if g["step_seconds"] is not None:
            check("%s on %s: a forecast below the peak" % (name, gpu), (g["mfu"] is None or 0 < g["mfu"] < 1) and
                  abs(g["price"] / g["gpu_hours"] - 2) < 1e-9 and abs(g["gpu_hours"] / 24 / g["days"] - 1) < 1e-9, g)
        if not g["fits"] and fitting:
            sets = shlex.split(g["set"])
            check("%s on %s: the settings make it fit" % (name, gpu), sets and plan("--config", "configs/%s.json" % name,
                  "--gpu", gpu, *sets)["gpu"]["fits"], sets)
r = run("plan", "--config", "configs/moe_3b.json", "--gpu", "h100-80", "--set", "train.micro_batch_size=32")
launch = [line for line in r.stdout.splitlines() if line.startswith("launch")]
check("the launch line has the settings", "refused" in r.stdout and len(launch) == 1 and
      "--set train.micro_batch_size=32 --set train.micro_batch_size=" in launch[0], said(r))
r = run(*shlex.split(launch[0])[2:], "--print-config")
check("and is one that train_moe understands", r.returncode == DONE and
      json.loads(r.stdout)["train"]["micro_batch_size"] < 32, said(r))

rates = {"version": 1, "name": "mine", "source": "a bench", "measured": True, "memory_gib": 4, "peak_bf16": 100,
         "gemm_bf16": 50, "grouped_bf16": 50, "attention_forward": 50, "attention_backward": 50, "hbm": 1000, "op_us": 1}
with open(path("rates.json"), "w") as f:
    json.dump(rates, f)
g = plan("--config", "configs/moe_150m.json", "--gpu", path("rates.json"))["gpu"]
check("a file of rates", g["name"] == "mine" and g["memory_bytes"] == 4 << 30 and g["measured"] and not g["fits"] and
      g["set"], g)
with open(path("rates.json"), "w") as f:
    json.dump(dict(rates, gemm_bf16=101), f)
for name, arguments, parts in (
        ("an unknown GPU", ["--gpu", "h900"], ["h900", "h100-80", "rtx4090"]),
        ("a rate above its peak", ["--gpu", path("rates.json")], ["gemm_bf16 = 101", "peak 100"]),
        ("a file that is no JSON", ["--gpu", "README.md"], ["README.md"]),
        ("a folder of rates", ["--gpu", FOLDER], [FOLDER]),
        ("a world that the batch does not divide", ["--world", "3"], ["global_batch_size"]),
        ("a world of none", ["--world", "0"], ["--world 0"]),
        ("a world that pp x ep do not divide", ["--world", "8", "parallel.ep=16"], ["--world 8", "ep 16"])):
    r = run("plan", "--config", "configs/moe_150m.json", *arguments)
    check(name + ": exit 2, one line and a hint", r.returncode == USER and r.stderr.count("error: ") == 1 and
          all(part in r.stderr for part in parts) and not r.stdout, said(r))
r = run("--config", "configs/tiny.json", "--gpu", "h200")
check("--gpu is for plan", is_refusal(r, "--gpu"), said(r))

# ---- many GPUs ----
start = time.monotonic()
r = run("plan", "--config", "configs/deepseek_v3.json", "--world", "2048", "--gpu", "h800", "run.price_per_gpu_hour=2")
seconds = time.monotonic() - start
check("2,048 GPUs in less than 2 s", r.returncode == DONE and not r.stderr and seconds < 2, (seconds, said(r)))
check("a mesh, nodes, the published step", "2048 ranks = pp 16 x dp 2 x ep 64" in r.stdout and "2,048 GPUs on 256 nodes" in
      r.stdout and "published: 19.93 s" in r.stdout and "refused" not in r.stdout, said(r))
h800 = plan("--config", "configs/deepseek_v3.json", "--world", "2048", "--gpu", "h800", "run.price_per_gpu_hour=2")["cluster"]
check("DeepSeek-V3's step by H800 rates is within 15 % of DeepSeek's", abs(h800["step_seconds"] / 19.926 - 1) < 0.15,
      h800["step_seconds"])
check("and so are its GPU-hours for a trillion tokens", abs(h800["gpu_hours_per_trillion_tokens"] / 180e3 - 1) < 0.15 and
      abs(h800["price_per_trillion_tokens"] / h800["gpu_hours_per_trillion_tokens"] - 2) < 1e-9, h800)
default = plan("--config", "configs/deepseek_v3.json", "--world", "2048")["cluster"]
check("without --gpu it is for H200s", default["name"] == "NVIDIA H200" and "measured" in default["source"] and
      default["price_per_trillion_tokens"] is None, default["name"])
check("16 ranks, 16 stages, 61 layers", len(default["ranks"]) == len(default["stages"]) == 16 and
      sum(stage["layers"] for stage in default["stages"]) == 61 and all(stage["pair_seconds"] < stage["forward_seconds"] +
      stage["backward_seconds"] + 0.1 for stage in default["stages"]), default["stages"])
check("items of the fullest rank", sum(i["bytes"] for i in default["items"]) == max(r["bytes"] for r in default["ranks"]) ==
      default["ranks"][default["fullest_rank"]]["bytes"] and default["fits"] == (max(r["bytes"] for r in default["ranks"]) <=
      default["memory_bytes"]), default["items"])
for name, world, sets in (("moe_3b", 2, []), ("moe_3b", 8, ["parallel.ep=8"]), ("moonlight_16b", 16, ["parallel.ep=16"]),
                          ("v3_slice", 8, ["parallel.pp=2", "parallel.ep=4", "parallel.schedule=1f1b",
                                           "train.global_batch_size=64"]),
                          ("deepseek_v3", 1024, ["parallel.pp=8", "parallel.schedule=zb1p"])):
    p = plan("--config", "configs/%s.json" % name, "--world", str(world), *sets)
    c = p["cluster"]
    check("%s on %d: times and memory" % (name, world), c and 0 < c["mfu"] < 1 and c["pipeline_seconds"] > c["bubble_seconds"]
          >= 0 and abs(c["pipeline_seconds"] + c["update_seconds"] - c["step_seconds"]) < 1e-9 and len(c["ranks"]) ==
          p["world"]["pp"] and (c["exchange_hidden"] is None) == (p["world"]["ep"] == 1), c)
    check("%s on %d: InfiniBand where there are two nodes" % (name, world), (sum(link["ib_bytes"] for link in
          c["links"].values()) > 0) == (world > 8), c["links"])
pairs, alone = (plan("--config", "configs/moe_3b.json", "--world", "8", "parallel.ep=8", "parallel.schedule=" + kind)["cluster"]
                for kind in ("paired", "1f1b"))
check("one stage, forwards beside backwards: more of the exchange is hidden, in more memory", pairs["exchange_hidden"] >
      alone["exchange_hidden"] and pairs["ranks"][0]["bytes"] > alone["ranks"][0]["bytes"], (pairs, alone))
r = run("plan", "--config", "configs/moe_3b.json", "--world", "16", "--gpu", "rtx4090")
check("links that the rates do not know", r.returncode == DONE and "no forecast: the rates of NVIDIA GeForce RTX 4090 do not "
      "say ib" in r.stdout, said(r))
r = run("help", "flops")
check("help flops says the rule", r.returncode == DONE and all(word in r.stdout for word in ("causal", "MTP", "packed",
      "train.seq_len")), said(r))
r = run("help", "gpu")
check("help gpu shows a file that reads back", r.returncode == DONE)
with open(path("shown.json"), "w") as f:
    f.write(re.search(r"\{.*?\}", r.stdout, re.S).group(0))
check("and it does", plan("--config", "configs/tiny.json", "--gpu", path("shown.json"))["gpu"]["name"] == "my GPU")
finish()
PYTHON
