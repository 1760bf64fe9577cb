#!/usr/bin/env bash
# What training does with data, rates and weights, seen from outside. Prints each check; exit 1 if one fails.
set -u
cd "$(dirname "$0")/.."
PYTHONPATH=tests PYTHONDONTWRITEBYTECODE=1 python3 - <<'PYTHON'
import random
from trial import *

DATA = prepare("shards", "model/model.c", "model/mla.c", "model/moe.c")
# With these the weights stay: the loss of a step tells which samples it saw.
STILL = {"lr": 0, "bias_update_speed": 0, "lr_warmup_steps": 0}


def near(x, y, tolerance=1e-5):
    return len(x) == len(y) and all(abs(a - b) < tolerance * abs(b) for a, b in zip(x, y))


# ---- it learns ----
rng = random.Random(0)
one = write_shard("one/train.bin", [rng.randrange(256) for _ in range(2 * 32 + 8)])
r = train(config("overfit", data={"train": one}, precision={"compute": "bf16", "moments": "bf16"},
                 train={"steps": 250, "lr": 1e-2, "lr_warmup_steps": 10, "lr_shape": "cosine", "global_batch_size": 2}))
overfit = losses("overfit")
check("two random samples are learnt by heart", r.returncode == DONE and overfit[0] > 5 and overfit[-1] < 0.1,
      overfit[-5:])
mtp = records("overfit", "step")[-1]["mtp"][0]
check("by MTP too", mtp < 0.3, mtp)

# ---- every configuration of the tree starts; synthetic data stays at ln V ----
for name in ("tiny", "bytes_debug"):
    r = run("--config", "configs/%s.json" % name, "data.train=synthetic", "data.val=[]", "eval.every_steps=0",
            "sample.every_steps=0", "train.steps=2", "train.lr_warmup_steps=0", "train.global_batch_size=2",
            "train.micro_batch_size=2", "run.dir=" + path(name))
    with open("configs/%s.json" % name) as f:
        expected = math.log(json.load(f)["model"]["vocab_size"])
    check("configs/%s.json on synthetic data: ln V" % name, r.returncode == DONE and len(losses(name)) == 2 and
          all(abs(x - expected) < 0.1 for x in losses(name)), (expected, said(r)))
    check("configs/%s.json: the banner says ln V" % name, "= %.2f" % expected in r.stdout, said(r))
r = train(config("random"), "train.steps=100")
check("100 steps on random ids teach nothing", all(abs(x - math.log(257)) < 0.2 for x in losses("random")),
      losses("random"))
for name, change in (("dense", ["model.first_k_dense_replace=2", "model.num_nextn_predict_layers=0"]),
                     ("MTP depth 2", ["model.num_nextn_predict_layers=2"]),
                     ("no q_lora, softmax", ["model.q_lora_rank=null", "model.scoring_func=softmax",
                     "model.topk_method=greedy",
                                             "model.n_group=1", "model.topk_group=1"]),
                     ("document mask", ["data.document_mask=true"])):
    r = train(config("variant", data=DATA), *change, "train.steps=30", "run.dir=" + path(name))
    check("a variant of the model learns: " + name, r.returncode == DONE and losses(name)[-1] < losses(name)[0] - 0.3,
          said(r))
check("a dense model has no columns about balance", "maxvio" not in records("dense", "step")[0])
check("one loss per MTP depth", len(records("MTP depth 2", "step")[0]["mtp"]) == 2)

# ---- the logged loss is the mean over the step (K4); tokens are counted ----
ordered = {**DATA, "shuffle": False}
train(config("singly", data=ordered, train={**STILL, "steps": 8, "global_batch_size": 1, "micro_batch_size": 1}))
single = losses("singly")
train(config("fours", data=ordered, train={**STILL, "steps": 2, "global_batch_size": 4, "micro_batch_size": 1}))
check("loss of a step = mean over its samples", near(losses("fours"), [sum(single[:4]) / 4, sum(single[4:]) / 4]),
      (losses("fours"), single))
check("tokens", [x["tokens"] for x in records("fours", "step")] == [128, 256])
check("lr 0 changes nothing", max(single) - min(single) > 1e-3 and "nan" not in str(single))

# ---- data.skip ----
train(config("skipping", data={**ordered, "skip": [[1, 3], [5, 6]]}, train={**STILL, "steps": 5, "global_batch_size": 1,
             "micro_batch_size": 1}))
check("data.skip steps over its samples", losses("skipping") == [single[i] for i in (0, 3, 4, 6, 7)],
      (losses("skipping"), single))
for name, skip in (("plain", []), ("shuffled", [[2, 5]])):
    train(config(name, data={**DATA, "skip": skip}, train={**STILL, "steps": 9 - 3 * len(skip), "global_batch_size": 1,
                 "micro_batch_size": 1}))
plain = losses("plain")
check("shuffled, by their place in the order", plain != single + single[:1] and losses("shuffled") ==
      plain[:2] + plain[5:],
      (plain, losses("shuffled")))
ahead = {**STILL, "steps": 8, "global_batch_size": 1, "micro_batch_size": 1}
train(config("ahead", data=DATA, train=ahead), "train.steps=4")
r = train(path("ahead.json"), "train.steps=6", "data.skip=[[4,7]]")
check("a range ahead may be added when a run goes on", r.returncode == DONE and losses("ahead") ==
      plain[:4] + plain[7:9],
      (losses("ahead"), plain, said(r)))
r = train(config("badly", data={**DATA, "skip": [[5, 2]]}))
check("a range that ends before it begins: exit 2", is_refusal(r, "data.skip"), said(r))

# ---- train.skip_if_z ----
flat = [i % 32 for i in range(32 * 200)]
flat[32 * 81 : 32 * 82] = [rng.randrange(256) for _ in range(32)] # its first ids are targets of sample 80
spiky = dict(data={"train": write_shard("spiky/train.bin", flat), "shuffle": False},
             train={"steps": 60, "global_batch_size": 2, "lr": 1e-2, "z_window": 16}, log={"hash_every_steps": 1})
train(config("taken", **spiky))
train(config("refused", **spiky), "train.skip_if_z=6")
taken, refused = records("taken", "step"), records("refused", "step")
check("without skip_if_z no update is skipped", all(x["skip"] is None for x in taken) and max(x["loss_z"] for
      x in taken) > 6)
at = [i for i, x in enumerate(refused) if x["skip"]]
check("with it the spike is", at == [40] and "spike" in refused[40]["skip"] and refused[40]["loss_z"] > 6 and
      "gradient" not in refused[40]["skip"], [refused[i] for i in at])
check("the same up to there", [x["hash"] for x in taken[:40]] == [x["hash"] for x in refused[:40]])
check("a skipped update leaves the weights", refused[40]["hash"] == refused[39]["hash"] != refused[41]["hash"] and
      taken[40]["hash"] != taken[39]["hash"])
check("tokens and rate go on", [x["tokens"] for x in taken] == [x["tokens"] for x in refused] and
      [x["lr"] for x in taken] == [x["lr"] for x in refused])

# ---- rates (K1): the first update has lr / warmup, the last of the warm-up the full one ----
for warmup in (0, 1, 10):
    name = "warmup%d" % warmup
    train(config(name, data=DATA, train={"steps": 20, "lr": 1e-2, "lr_final": 1e-3, "lr_shape": "linear",
                 "lr_warmup_steps": warmup}), "log.hash_every_steps=1")
    rows = records(name, "step")
    first = max(warmup, 1)
    expected = [1e-2 * min(1, s / first) if s <= first else 1e-2 - 9e-3 * (s - first) / (20 - first) for s in range(1,
          21)]
    check("lr with %d steps of warm-up" % warmup, near([x["lr"] for x in rows], expected, 1e-12), [x["lr"] for
          x in rows])
    check("every update moves the weights", len({x["hash"] for x in rows}) == 20)
train(config("points", data=DATA, train={"steps": 6, "lr": [[0, 1e-3], [384, 4e-3]], "lr_shape": "linear",
             "lr_warmup_steps": 0, "global_batch_size": [[0, 2], [256, 4]], "global_batch_size_shape": "constant"}))
rows = records("points", "step")
check("a batch ramp in steps", [x["tokens"] for x in rows] == [64, 128, 192, 256, 384, 512], rows)
check("lr by points of tokens", near([x["lr"] for x in rows], [1e-3, 1.5e-3, 2e-3, 2.5e-3, 3e-3, 4e-3], 1e-12), rows)
r = train(config("tokens", data=DATA, train={"steps": None, "tokens": 1000}))
check("a run by tokens ends with the step that reaches them", r.returncode == DONE and records("tokens",
      "step")[-1]["tokens"]
      == 1024, said(r))

# ---- --init-from: the weights, and nothing else ----
r = train(config("fresh", data=DATA, train={"steps": 12, "lr": 1e-2, "lr_warmup_steps": 10}), "--init-from",
      path("overfit"))
rows = records("fresh", "step")
check("--init-from starts at step 1 with a fresh schedule", r.returncode == DONE and rows[0]["step"] == 1 and
      rows[0]["tokens"]
      == 128 and near([rows[0]["lr"]], [1e-3], 1e-12) and "weights from --init-from" in r.stdout, said(r))
r = train(config("weights", data={"train": one}, train={**STILL, "steps": 1, "global_batch_size": 2}), "--init-from",
          path("overfit", "step_00000250"))
check("with the weights it was given", last_hash("weights") == last_hash("overfit") and near(losses("weights"),
      overfit[-1:], 0.2), (losses("weights"), overfit[-1]))
r = train(path("fresh.json"), "train.steps=14", "--init-from", path("overfit"))
check("the same command later goes on with the run, not with --init-from", r.returncode == DONE and
      [x["step"] for x in records("fresh", "step")] == list(range(1, 15)), said(r))
r = train(config("misfit", model={"hidden_size": 64}), "--init-from", path("overfit"))
check("--init-from of another model: exit 2", is_refusal(r, "step_00000250"), said(r))

# ---- recompute and threads change nothing ----
for name, change in (("kept", []), ("recomputed", ["memory.recompute=[\"norms\",\"up_projections\",\"swiglu\"]"]),
                     ("threads", ["run.threads=2"]), ("chunked", ["memory.head_chunk_tokens=7"])):
    r = train(config(name, data=DATA), "train.steps=5", *change)
    check("5 steps, %s" % name, r.returncode == DONE, said(r))
check("recomputed activations: the same bits", last_hash("kept") == last_hash("recomputed"))
check("two threads: the same bits", last_hash("kept") == last_hash("threads"))
check("another chunk of the head: the same losses", near(losses("kept"), losses("chunked")))

# ---- speed (K10): a step's tokens over its own time; evaluation and saving are not in it, nor what a run before a resume
# did; the longest context plays no part ----
def timed(folder, kind):
    with open(path(folder, "log.jsonl")) as f:
        return [x for x in map(json.loads, f) if x["kind"] == kind]


file = config("speed", data=DATA, model={"max_position_embeddings": 4096}, eval={"every_steps": 1},
              checkpoint={"every_steps": 1, "keep_last": 1},
              train={"steps": 6, "seq_len": 16, "global_batch_size": [[0, 2], [64, 4]], "micro_batch_size": 1,
                     "global_batch_size_shape": "constant"})
start_s = time.time()
train(file, "train.steps=3")
r = train(file)
wall_s = time.time() - start_s
rows = timed("speed", "step")
tokens = [x["tokens"] for x in rows]
check("tokens/s = tokens of the step over its time, also right after a resume", tokens == [32, 64, 128, 192, 256, 320] and
      near([x["tokens_per_s"] * x["ms"] / 1000 for x in rows], [b - a for a, b in zip([0] + tokens, tokens)]),
      (tokens, rows[3]))
steps_s, val_s = sum(x["ms"] for x in rows) / 1000, sum(x["seconds"] for x in timed("speed", "val"))
saves_s = sum(x["waited_s"] for x in timed("speed", "save"))
check("evaluation and saving are timed apart", 0 < steps_s and 0 < val_s and 0 < saves_s and
      steps_s + val_s + saves_s < wall_s, (steps_s, val_s, saves_s, wall_s))
check("validation of thousands of tokens a step is not in the steps' time", steps_s < val_s, (steps_s, val_s))
with open(path("speed", checkpoints("speed")[-1], "manifest.json")) as f:
    total_s = json.load(f)["state"]["wall_s"]
check("the run's time is that of its steps, over both processes", near([total_s], [steps_s], 1e-9), (total_s, steps_s))
with open(path("speed", "report.md")) as f:
    rate = re.search(r"(\S+) tokens/s on", f.read())[1]
check("and so is the speed in report.md", abs(float(rate.rstrip("kM")) * {"k": 1e3, "M": 1e6}.get(rate[-1], 1) -
      tokens[-1] / steps_s) < 0.06 * tokens[-1] / steps_s, (rate, tokens[-1] / steps_s))
printed = re.findall(r"step +(\d)/6 .*? +(\S+) tok/s", r.stdout)
check("the first line after a resume has its own step's speed", printed and printed[0][0] == "4" and
      abs(float(printed[0][1].rstrip("kM")) * {"k": 1e3, "M": 1e6}.get(printed[0][1][-1], 1) - rows[3]["tokens_per_s"]) <
      0.06 * rows[3]["tokens_per_s"], (printed, rows[3]))
finish()
PYTHON
