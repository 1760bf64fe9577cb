#!/usr/bin/env bash
# Several ranks under mpirun, on the CPU: what they compute together, and how they fail together. Prints each check; exit
# 1 if one fails.
set -u
cd "$(dirname "$0")/.."
PYTHONPATH=tests PYTHONDONTWRITEBYTECODE=1 python3 - <<'PYTHON'
from trial_ranks import *

os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # tests/test_gpu_ranks.sh has the others

# ---- the transfers, by themselves ----
for n in (2, 3, 4):
    r = ranks(n, binary="build/tests/run_ranks")
    check("transfers among %d ranks" % n, r.returncode == 0 and "%d ranks: " % n in r.stdout and
          ", 0 failures" in r.stdout, said(r))

# ---- data over ranks: a rank's micro-batch is a micro-batch ----
# Sums of several depths in one micro-batch round otherwise than those of one, so bits are compared without MTP.
for precision in NUMBERS:
    one = precision + "_one"
    train(part(one, precision, mtp=0))
    check(precision + ": one rank", len(losses(one)) == STEPS)
    r = train_on(4, part(precision + "_dp4", precision, mtp=0), "parallel.ep=1")
    check(precision + ": the mesh is printed", "mesh       4 ranks = pp 1 x dp 4 x ep 1 on 1 host; 8 experts a rank" in
          r.stdout and "4 ranks x micro-batch 1 x 1" in r.stdout, said(r))
    check(precision + ": four ranks = four micro-batches, bit for bit", hashes(one) == hashes(precision + "_dp4") and
          losses(one) == losses(precision + "_dp4"), said(r))
    norms = [[s["gnorm"] for s in records(f, "step")] for f in (one, precision + "_dp4")]
    check(precision + ": and so is the norm", len(norms[0]) == STEPS and norms[0] == norms[1], norms)
    r = train_on(4, part(precision + "_whole4", precision, mtp=0), "parallel.ep=1", "parallel.zero1=false")
    check(precision + ": also where every rank updates everything", "shards" not in r.stdout and
          hashes(one) == hashes(precision + "_whole4"), said(r))
    a, b = ([v["sets"][0]["loss"] for v in records(f, "val")] for f in (one, precision + "_dp4"))
    check(precision + ": validation and samples too", len(a) == len(b) == 2 and
          max(abs(x - y) for x, y in zip(a, b)) < 1e-9 and len(records(one, "sample")) == 2 and
          records(one, "sample") == records(precision + "_dp4", "sample"), (a, b))
    with open(path(precision + "_dp4", "log.jsonl")) as f:
        times = [s for s in map(json.loads, f) if s["kind"] == "step"]
    check(precision + ": times of the ranks", all(0 <= s["ranks_ms"][0] <= s["ranks_ms"][1] <= s["ranks_ms"][2] <=
          s["ms"] * 1.5 + 50 and s["slowest"] in range(4) and s["slowest_host"] for s in times), times[:1])
train(part("two", mtp=0), "train.global_batch_size=2")
train_on(2, part("dp2", mtp=0), "parallel.ep=1", "train.global_batch_size=2")
check("two ranks = two micro-batches, bit for bit", hashes("two") == hashes("dp2") and len(hashes("two")) == STEPS)
check("a file of each rank, and in them the same checkpoint, byte for byte", sorted(os.listdir(path("fp32_dp4",
      "step_00000010"))) == ["manifest.json"] + ["state_%05d.safetensors" % r for r in range(4)] and
      saved_state("fp32_one", "step_00000010") == saved_state("fp32_dp4", "step_00000010"))

# ---- experts over ranks ----
for precision, bounds in (("fp32", (1e-5, 1e-4)), ("bf16", (2e-3, 2e-3))):
    one = precision + "_whole"
    train(part(one, precision))
    for name, n, ep in (("ep2", 2, 2), ("ep4", 4, 4), ("ep2dp2", 4, 2))[0 if precision == "fp32" else 2:]:
        folder = precision + "_" + name
        r = train_on(n, part(folder, precision), "parallel.ep=%d" % ep)
        check("%s %s: as one rank" % (precision, name), r.returncode == DONE and not far(one, folder, *bounds),
              (far(one, folder, *bounds), said(r)))
        loads = [[s["load"] for s in records(f, "step")] for f in (one, folder)]
        check("%s %s: the same experts are chosen" % (precision, name), precision == "bf16" or loads[0] == loads[1],
              loads)
        train_on(n, part(folder + "_again", precision), "parallel.ep=%d" % ep)
        check("%s %s: twice the same bits" % (precision, name), hashes(folder) == hashes(folder + "_again") and
              [v["sets"] for v in records(folder, "val")] == [v["sets"] for v in records(folder + "_again", "val")])
r = train_on(4, part("auto"))
check("parallel.ep auto takes the largest that fits", "dp 1 x ep 4" in r.stdout and hashes("auto") ==
      hashes("fp32_ep4"), said(r))

# One token in a micro-batch, its experts on one rank: three ranks have no token for their experts.
for name, groups in (("lone", 2), ("one rank", 1)):
    few = dict(train={**EVERYTHING["train"], "seq_len": 1, "global_batch_size": 4}, data={"train": "synthetic"}, eval={},
               sample={})
    train(part(name + "1", **few), "model.topk_group=%d" % groups)
    r = train_on(4, part(name + "4", **few), "model.topk_group=%d" % groups, "parallel.ep=4")
    check("ranks without tokens (%s)" % name, r.returncode == DONE and not far(name + "1", name + "4", 1e-5, 1e-4),
          said(r))

# ---- rows of the experts ----
# A text of one id, and groups that are ranks: all tokens go to one of two ranks, whose rows are planned for less.
rng = random.Random(8)
write_shard("same/ids.bin", [7] * 6000)
write_shard("mixed/ids.bin", [rng.randrange(256) for _ in range(6000)])
TO_ONE = ["parallel.ep=2", "model.n_group=2", "model.topk_group=1", "model.max_position_embeddings=512"]
for where, train_on_ids, val_on_ids in (("step", "same", "mixed"), ("validation", "mixed", "same")):
    shards = {"train": path(train_on_ids, "ids.bin"), "val": [{"name": "v", "path": path(val_on_ids, "ids.bin")}]}
    few = dict(train={**EVERYTHING["train"], "steps": 4, "seq_len": 512, "global_batch_size": 2}, data=shards, sample={},
               eval={"every_steps": 2, "tokens": 2048}, checkpoint={"every_steps": 3})
    said_of = {}
    for capacity in ("1.4", "worst"):
        said_of[capacity] = train_on(2, part("%s_%s" % (where, capacity), **few), *TO_ONE, "moe.capacity=" + capacity)
    one, other = ("%s_%s" % (where, capacity) for capacity in said_of)
    check("rows run out in a %s: doubled once, and said" % where, said_of["1.4"].returncode == DONE and
          [("%s: expert rows did not fit" % where if where == "validation" else "step 1: expert rows did not fit") in
           line for line in said_of["1.4"].stderr.splitlines() if "did not fit" in line] == [True], said(said_of["1.4"]))
    check("with rows for all, nothing is", "did not fit" not in said_of["worst"].stderr, said(said_of["worst"]))
    check("and all comes out as with rows for all, bit for bit", len(hashes(one)) == 4 and hashes(one) == hashes(other) and
          losses(one) == losses(other) and [v["sets"] for v in records(one, "val")] ==
          [v["sets"] for v in records(other, "val")] and len(records(one, "val")) == 2, said(said_of["1.4"]))
small, worst = (ranks(2, "eval", "--config", path("validation_worst.json"), *TO_ONE, "moe.capacity=" + capacity)
                for capacity in ("1.4", "worst"))
check("eval makes room too", scores(small) == scores(worst) and len(scores(worst)) > 2 and
      small.stderr.count("validation: expert rows did not fit") == 1 and "did not fit" not in worst.stderr,
      (said(small), said(worst)))

# ---- layers over ranks ----
def values(folder, kind, key):
    return [r[key] for r in records(folder, kind)]


for name, mtp, batch in (("plain", 0, 8), ("deep", 1, 8), ("deep16", 1, 16)):
    train(staged(name, mtp, batch))
for pp, schedule in ((2, "1f1b"), (2, "zb1p"), (4, "1f1b"), (4, "zb1p")):
    name = "%s_pp%d" % (schedule, pp)
    r = pipeline(pp, staged(name), pp, schedule)
    check(name + ": one rank, bit for bit", r.returncode == DONE and losses(name) == losses("plain") and
          hashes(name) == hashes("plain") and len(hashes(name)) == STEPS, said(r))
    check(name + ": what the log says of all layers", all(values(name, "step", key) == values("plain", "step", key)
          for key in ("load", "bias")) and values(name, "val", "sets") == values("plain", "val", "sets"), said(r))
    check(name + ": samples too", records(name, "sample") == records("plain", "sample") and
          len(records(name, "sample")) == 2, records(name, "sample"))
for name, n, pp, schedule, arguments in (
        ("dualpipe_pp2", 2, 2, "dualpipe", []), ("dualpipe_pp4", 4, 4, "dualpipe", []),
        ("dualpipev_pp2", 2, 2, "dualpipev", []), ("dualpipev_pp4", 4, 4, "dualpipev", []),
        ("dualpipe_ep2pp2", 4, 2, "dualpipe", ["parallel.ep=2"]),
        ("dualpipe_ep2pp2dp2", 8, 2, "dualpipe", ["parallel.ep=2"]),
        ("zb1p_ep2pp2dp2", 8, 2, "zb1p", ["parallel.ep=2"])):
    one, batch = ("deep16", 16) if n == 8 else ("deep", 8)
    r = pipeline(n, staged(name, 1, batch), pp, schedule, *arguments)
    check(name + ": as one rank", r.returncode == DONE and not far(one, name, 1e-5, 1e-4),
          (far(one, name, 1e-5, 1e-4), said(r)))
    check(name + ": the same experts are chosen", values(one, "step", "load") == values(name, "step", "load"))
    a, b = ([sets[0]["loss"] for sets in values(f, "val", "sets")] for f in (one, name))
    check(name + ": validation", len(a) == len(b) == 2 and max(abs(x - y) for x, y in zip(a, b)) < 1e-4, (a, b))
for name, n, pp, schedule, arguments in (("dualpipe_pp4", 4, 4, "dualpipe", []),
                                         ("zb1p_ep2pp2dp2", 8, 2, "zb1p", ["parallel.ep=2"])):
    r = pipeline(n, staged(name + "_again", 1, 16 if n == 8 else 8), pp, schedule, *arguments)
    check(name + ": twice the same bits", hashes(name) == hashes(name + "_again") and len(hashes(name)) == STEPS,
          said(r))
SHORT = ["train.steps=2", "data.document_mask=false", "eval.every_steps=0"]
train(staged("unmasked", 0, 16), *SHORT)
for schedule in ("1f1b", "dualpipe"):
    name = schedule + "_pp8"
    r = pipeline(8, staged(name, 0, 16), 8, schedule, *SHORT)
    check(name + ": as one rank", r.returncode == DONE and "8 ranks = pp 8 x dp 1 x ep 1" in r.stdout and
          len(losses(name)) == 2 and all(abs(x - y) < 1e-5 for x, y in zip(losses(name), losses("unmasked"))), said(r))

# What one layout has saved, any other goes on with, to the same bits.
STILL = ["train.steps=6", "train.lr=0", "train.lr_warmup_steps=0", "train.bias_update_speed=0"]
r = pipeline(4, staged("layers", 1), 2, "dualpipe", "parallel.ep=2", "train.steps=5")
manifest = json.load(open(path("layers", "step_00000005", "manifest.json")))
check("EP2 x PP2 saves all layers", r.returncode == DONE and manifest["param_hash"] == hashes("layers")[4] and
      len([t for t in manifest["tensors"] if ".experts." in str(t)]) == 7 * 8 * 3 * 3, said(r))
losses_of_layouts = []
for n, pp, schedule, ep in ((1, 1, "paired", 1), (4, 1, "paired", 4), (2, 2, "zb1p", 1), (4, 4, "dualpipev", 1),
                            (4, 2, "dualpipe", 2)):
    shutil.copytree(path("layers"), path("still"))
    r = pipeline(n, path("layers.json"), pp, schedule, "run.dir=" + path("still"), "parallel.ep=%d" % ep, *STILL)
    losses_of_layouts.append(values("still", "val", "sets")[-1][0]["loss"])
    check("its weights on %d ranks, pp %d x ep %d: the same bits" % (n, pp, ep), r.returncode == DONE and
          "bit for bit" in r.stdout and hashes("still")[5:] == [hashes("layers")[4]], said(r))
    shutil.rmtree(path("still"))
    shutil.copytree(path("layers"), path("on"))
    r = pipeline(n, path("layers.json"), pp, schedule, "run.dir=" + path("on"), "parallel.ep=%d" % ep)
    check("and goes on", r.returncode == DONE and not far("deep", "on", 1e-5, 1e-4), (losses("on"), said(r)))
    if (n, pp, ep) == (4, 2, 2):
        check("as if it had not stopped", hashes("on") == hashes("dualpipe_ep2pp2"))
    shutil.rmtree(path("on"))

check("and the same validation loss", len(losses_of_layouts) == 5 and max(losses_of_layouts) - min(losses_of_layouts) <
      1e-6 * losses_of_layouts[0], losses_of_layouts)

# ---- a checkpoint goes forward over ranks ----
questions = [{"context": "static " + " ".join(rng.choice(words) for _ in range(3)), "label": i % 4, "choices":
              [" ".join(rng.choice(words) for _ in range(1 + (i + k) % 3)) for k in range(4)]} for i in range(23)]
with open(path("questions.jsonl"), "w") as f:
    f.writelines(json.dumps(q) + "\n" for q in questions)
subprocess.run([sys.executable, "scripts/prepare_choice.py", "--tokenizer", "bytes", "--out", path("questions.bin"),
                f.name], check=True, capture_output=True)
asked = {"choice": [{"name": "questions", "path": path("questions.bin")}]}
file = staged("deep", 1, eval=asked)
PROMPT = ["--prompt", "static v", "--tokens", "24", "--temperature", "0.8", "--seed", "3"]


evaluated, text = scores(run("eval", "--config", file)), run("generate", "--config", file, *PROMPT).stdout
check("eval and generate on one rank", len(evaluated) == 5 and "of 23" in evaluated[3] and len(text) > 24, evaluated)
for n, arguments in ((1, ["parallel.pp=2", "parallel.schedule=dualpipev", "parallel.ep=2"]), (3, ["parallel.ep=1"]),
                     (2, ["parallel.pp=2", "parallel.schedule=dualpipe"]), (4, ["parallel.pp=2", "parallel.ep=2"])):
    name = "%d rank%s, %s" % (n, "s" if n > 1 else "", " ".join(a.replace("parallel.", "") for a in arguments))
    r = ranks(n, "eval", "--config", file, *arguments)
    check("eval on %s: one line, the same numbers" % name, scores(r) == evaluated and r.stdout.count("\n") == 1 and
          r.stderr.count("weights: ") == 1, (evaluated, said(r)))
    r = ranks(n, "generate", "--config", file, "--prompt", "-", *PROMPT[2:], *arguments, input="static v")
    check("generate on %s: one text, the same" % name, r.returncode == DONE and r.stdout == text, (text, said(r)))
r = pipeline(2, staged("asked", 1, eval={**asked, "choice_every_steps": 5}), 2, "1f1b")
train(staged("asked_one", 1, eval={**asked, "choice_every_steps": 5}))
check("multiple choice through stages, while they train", r.returncode == DONE and len(records("asked", "val")) == 2 and
      [v["choices"][0]["accuracy"] for v in records("asked", "val")] ==
      [v["choices"][0]["accuracy"] for v in records("asked_one", "val")], said(r))

# ---- checkpoints ----
part("moved", train={**EVERYTHING["train"], "steps": 5})
r = train_on(2, path("moved.json"), "parallel.ep=2")
at_five = hashes("moved")[4]
manifest = json.load(open(path("moved", "step_00000005", "manifest.json")))
check("EP2 saves all experts", r.returncode == DONE and manifest["param_hash"] == at_five and
      len([t for t in manifest["tensors"] if ".experts." in str(t)]) == 2 * 8 * 3 * 3, said(r))
for n, ep in ((1, 1), (2, 2), (4, 4), (4, 2), (4, 1)):
    shutil.copytree(path("moved"), path("still"))
    config("still")
    r = train_on(n, path("moved.json"), "run.dir=" + path("still"), "parallel.ep=%d" % ep, *STILL)
    check("EP2's weights on %d ranks, ep %d: the same bits" % (n, ep), r.returncode == DONE and "bit for bit" in r.stdout
          and hashes("still")[5:] == [at_five], said(r))
    shutil.rmtree(path("still"))
    shutil.copytree(path("moved"), path("on"))
    r = train_on(n, path("moved.json"), "run.dir=" + path("on"), "parallel.ep=%d" % ep, "train.steps=10")
    check("and goes on", r.returncode == DONE and not far("fp32_whole", "on", 1e-5, 1e-4), (losses("on"), said(r)))
    if (n, ep) == (2, 2):
        check("as if it had not stopped", hashes("on") == hashes("fp32_ep2"))
    shutil.rmtree(path("on"))
# Shards of four ranks: what they have saved, any number goes on with, also without shards.
for precision, bounds in (("fp32", (1e-5, 1e-4)), ("bf16", (2e-3, 2e-3))):
    one, name = precision + "_one", precision + "_shards"
    part(name, precision, mtp=0, train={**EVERYTHING["train"], "steps": 5})
    r = train_on(4, path(name + ".json"), "parallel.ep=1")
    check(precision + ": four shards are saved as one state", r.returncode == DONE and "AdamW's state in 4 shards" in
          r.stdout and hashes(name) == hashes(one)[:5] and saved_state(name, "step_00000005") ==
          saved_state(one, "step_00000005"), said(r))
    for n, ep, zero1 in ((1, 1, "true"), (4, 1, "true"), (4, 1, "false"), (2, 2, "true"), (4, 2, "true")):
        shutil.copytree(path(name), path("joined"))
        r = train_on(n, path(name + ".json"), "run.dir=" + path("joined"), "parallel.ep=%d" % ep,
                     "parallel.zero1=" + zero1, "train.steps=10")
        same = hashes("joined") == hashes(one) if ep == 1 else not far(one, "joined", *bounds)
        check("%s: and gone on with on %d ranks, ep %d, zero1 %s" % (precision, n, ep, zero1), r.returncode == DONE and
              "bit for bit" in r.stdout and hashes("joined")[:5] == hashes(one)[:5] and same, (losses("joined"), said(r)))
        r = train(path(name + ".json"), "run.dir=" + path("joined"), *STILL[1:], "train.steps=11")
        check("  and from there on one", r.returncode == DONE and "step_00000010, bit for bit" in r.stdout and
              hashes("joined")[10:] == [hashes("joined")[9]], said(r))
        shutil.rmtree(path("joined"))
# FP8: a rank quantises its own blocks, and the others transpose them.
for name in ("fp8_one", "fp8_two"):
    config(name, **FP8)
train(path("fp8_one.json"))
train_on(2, path("fp8_two.json"), "parallel.ep=1", "train.steps=2")
r = train_on(2, path("fp8_two.json"), "parallel.ep=1")
check("FP8 on two ranks, stopped and resumed: one rank's bits", r.returncode == DONE and "bit for bit" in r.stdout and
      len(hashes("fp8_one")) == 4 and hashes("fp8_one") == hashes("fp8_two"), (hashes("fp8_one"), said(r)))
# Tiles travel to experts, also beside shards. Where a token's experts are on one rank, nothing is rounded otherwise than
# on one rank. Where they are not, each rank's sum is rounded to BF16, and E4M3 makes more of it.
for groups in (1, 2):
    train(config("fp8_whole%d" % groups, **FP8), "train.global_batch_size=4", "model.topk_group=%d" % groups)
for name, n, ep, groups, bounds in (("ep2", 2, 2, 1, (1e-9, 1e-6)), ("ep4", 4, 4, 1, (1e-9, 1e-6)),
                                    ("ep2dp2", 4, 2, 1, (1e-9, 1e-6)), ("ep4, apart", 4, 4, 2, (1e-4, 1e-2))):
    more = ["train.global_batch_size=4", "model.topk_group=%d" % groups]
    more_ranks = [*more, "parallel.ep=%d" % ep]
    r = train_on(n, config("fp8_" + name, **FP8), *more_ranks)
    apart = far("fp8_whole%d" % groups, "fp8_" + name, *bounds, steps=4)
    check("FP8 %s: as one rank" % name, r.returncode == DONE and not apart and
          (" dp 2 x ep 2 " in r.stdout and "AdamW's state in" in r.stdout) == (n > ep), (apart, said(r)))
    if name not in ("ep2", "ep2dp2"):
        continue
    again = config("fp8_again", **FP8)
    train_on(n, again, *more_ranks, "train.steps=2")
    r = train_on(n, again, *more_ranks)
    check("FP8 %s: stopped and resumed, the same bits" % name, r.returncode == DONE and "bit for bit" in r.stdout and
          len(hashes("fp8_again")) == 4 and hashes("fp8_again") == hashes("fp8_" + name), said(r))
    r = train(again, *more, *STILL[1:], "train.steps=5")
    check("FP8 %s: its checkpoint on one rank" % name, r.returncode == DONE and "step_00000004, bit for bit" in r.stdout
          and hashes("fp8_again")[4:] == hashes("fp8_again")[3:4], said(r))
    shutil.rmtree(path("fp8_again"))
# With everything at once: stages, experts on two ranks, a forward beside a backward.
train(config("fp8_deep", **FP8_DEEP))
r = pipeline(4, config("fp8_stages", **FP8_DEEP), 2, "dualpipe", "parallel.ep=2", "--check-streams")
apart = far("fp8_deep", "fp8_stages", 1e-9, 1e-3, steps=4)
check("FP8 over two stages, ep 2: as one rank", r.returncode == DONE and not apart, (apart, said(r)))
# ---- experts placed by their loads ----
# A router that nothing balances. What a run has counted, the next start packs to ranks; nothing else may change.
SKEWED = ["parallel.ep=4", "train.bias_update_speed=0", "train.balance_alpha=0"]
BALANCED = ["parallel.placement=balanced", *SKEWED]
file = part("skewed", train={**EVERYTHING["train"], "steps": 5})
r = train_on(4, file, *BALANCED)
check("balanced without loads: consecutive, and said", r.returncode == DONE and
      "experts    consecutive, as no loads are known yet" in r.stdout, said(r))
counted = [0] * 8
for s in records("skewed", "step"):
    counted = [a + n - a // 64 for a, n in zip(counted, s["load"][0])]
check("the checkpoint has the loads of the steps", json.load(open(path("skewed", "step_00000005", "manifest.json")))[
      "expert_load"][0] == counted, counted)
for name, arguments in (("in_order", SKEWED), ("packed", BALANCED), ("packed_again", BALANCED)):
    shutil.copytree(path("skewed"), path(name))
    r = train_on(4, file, "run.dir=" + path(name), "train.steps=10", *arguments)
    words = ["consecutive: the largest rank's load is ", "; with parallel.placement=balanced: "] if name == "in_order" else \
            ["balanced by load: the largest rank's is ", "; consecutive: "]
    check("%s goes on" % name, r.returncode == DONE and all(word in r.stdout for word in
          [*words, "equal up to rounding from here"]), said(r))


def rank_loads(folder):
    return [s["rank_load_mean"] for s in records(folder, "step")][5:]


check("balanced: the largest rank has less to do", all(a < b - 0.1 for a, b in zip(rank_loads("packed"),
      rank_loads("in_order"))) and len(rank_loads("packed")) == 5, (rank_loads("packed"), rank_loads("in_order")))
check("and the same tokens, norms and losses as in order", [s["load"] for s in records("packed", "step")] ==
      [s["load"] for s in records("in_order", "step")] and not far("in_order", "packed", 1e-5, 1e-5) and
      all(abs(a["gnorm"] - b["gnorm"]) < 1e-5 * a["gnorm"] for a, b in zip(records("in_order", "step"),
          records("packed", "step"))), (losses("packed"), losses("in_order")))
check("twice from one checkpoint: the same bits", hashes("packed") == hashes("packed_again") and
      [v["sets"] for v in records("packed", "val")] == [v["sets"] for v in records("packed_again", "val")])
# What was packed is saved by the experts' numbers: any layout loads it.
for n, arguments in ((1, ["parallel.ep=1"]), (2, ["parallel.ep=2"]), (4, ["parallel.ep=2", "parallel.placement=balanced"]),
                     (4, BALANCED)):
    shutil.copytree(path("packed"), path("still"))
    r = train_on(n, file, "run.dir=" + path("still"), *SKEWED[1:], *STILL[1:], "train.steps=11", *arguments)
    check("its weights on %d ranks, %s: the same bits" % (n, " ".join(arguments[:2])), r.returncode == DONE and
          hashes("still")[10:] == hashes("packed")[9:10], said(r))
    shutil.rmtree(path("still"))
r = run("plan", "--config", file, "--world", "4", "parallel.ep=4")
check("plan weighs the ranks by the run's last checkpoint", r.returncode == DONE and "step_00000005 the largest of 4 ranks"
      in r.stdout and "with parallel.placement=balanced" in r.stdout, said(r))
r = run("plan", "--config", file, "--world", "4", "parallel.ep=4", "--json")
plan = json.loads(r.stdout)["experts"]
check("also as JSON", 1 <= plan["balanced"]["mean"] < plan["consecutive"]["mean"] - 0.1, plan)
# With stages, whose ranks hold the experts twice.
file = staged("deep_skewed", 0, 8, train={**EVERYTHING["train"], "global_batch_size": 8, "steps": 5})
DEEP = ["parallel.ep=2", *SKEWED[1:]]
pipeline(4, file, 2, "dualpipe", *DEEP)
for name, arguments in (("deep_in_order", []), ("deep_packed", ["parallel.placement=balanced"])):
    shutil.copytree(path("deep_skewed"), path(name))
    r = pipeline(4, file, 2, "dualpipe", "run.dir=" + path(name), "train.steps=10", *DEEP, *arguments)
    check("%s: whether bits go on is said" % name, ("bit for bit from here" in r.stdout) == (not arguments), said(r))
check("balanced over two stages: less to do, the same losses", r.returncode == DONE and rank_loads("deep_packed")[0] <
      rank_loads("deep_in_order")[0] - 0.05 and not far("deep_in_order", "deep_packed", 1e-5, 1e-5),
      (rank_loads("deep_packed"), rank_loads("deep_in_order"), said(r)))

# A damaged expert of the last rank sends all ranks to the checkpoint before.
r = train_on(2, part("damaged"), "parallel.ep=2")
whole = hashes("damaged")
file, position = [slice[2:4] for slice in saved_slices("damaged", "step_00000010") if slice[0] ==
                  "model.layers.1.mlp.experts.7.down_proj.weight"][0]
with open(file, "r+b") as f:
    f.seek(position)
    byte = f.read(1)
    f.seek(-1, os.SEEK_CUR)
    f.write(bytes([byte[0] ^ 1]))
r = train_on(2, path("damaged.json"), "parallel.ep=2")
check("damage that one rank sees: all take the one before", r.returncode == DONE and "step_00000005, bit for bit" in
      r.stdout and hashes("damaged") == whole, said(r))

# ---- what all refuse, said once ----
file = part("refused")
for name, n, arguments, parts in (
        ("a world that does not divide", 3, ["parallel.ep=2", "train.global_batch_size=6"], ["3 processes",
         "parallel.ep = 2"]),
        ("a batch that does not divide", 3, ["parallel.ep=1"], ["global_batch_size 4", "3 ranks"]),
        ("a pipeline without its schedule", 2, ["parallel.pp=2"], ["schedule paired", "1f1b, zb1p"]),
        ("a pipeline with too few micro-batches", 2, ["parallel.pp=2", "parallel.schedule=dualpipe",
                                                      "train.global_batch_size=2"], ["at least 4 micro-batches"]),
        ("a world that the stages do not divide", 3, ["parallel.pp=2", "parallel.schedule=1f1b"],
         ["3 processes", "parallel.pp = 2"]),
        ("a GPU", 2, ["run.device=cuda"], ["run.device"]),
        ("--overfit", 2, ["--overfit", "5"], ["2 processes"]),
        ("an unknown field", 2, ["train.lrr=1"], ["train.lrr"]),
        ("shards that are not there", 2, ["data.train=" + path("none_*.bin")], ["none_*.bin"])):
    r = train_on(n, file, *arguments)
    check(name + ": one line from one rank, exit 2", r.returncode == USER and r.stderr.count("error: ") == 1 and
          all(p in r.stderr for p in parts), said(r))
for command, n, arguments, parts in (
        ("eval", 2, ["--dump-logits", path("x")], ["--dump-logits in 2 processes"]),
        ("generate", 3, ["parallel.ep=2", "--prompt", "a"], ["3 processes", "parallel.ep = 2"]),
        ("generate", 2, ["parallel.pp=2", "--prompt", "a", "--show-experts"], ["--show-experts", "parallel.pp"])):
    r = ranks(n, command, "--config", path("deep.json"), *arguments)
    check("%s %s: one line from one rank, exit 2" % (command, arguments[0]), r.returncode == USER and
          r.stderr.count("error: ") == 1 and all(p in r.stderr for p in parts) and not r.stdout, said(r))
r = ranks(2, "plan", "--config", path("deep.json"))
alone = run("plan", "--config", path("deep.json"))
check("a plan is printed once", r.returncode == DONE and r.stdout.count("\n") == alone.stdout.count("\n"), said(r))
r = ranks(1, "--config", file, "train.lr=0.5", ":", "-np", "2", BINARY, "--config", file)
check("configurations that differ: the field and the ranks", r.returncode == USER and r.stderr.count("error: ") == 1 and
      "ranks 1, 2: train.lr is 0.5 on rank 0, but 0.003 here" in r.stderr, said(r))
for folder, seed in (("here", 1), ("there", 2)):
    rng = random.Random(seed)
    write_shard(folder + "/own.bin", [rng.randrange(256) for _ in range(3000)])
own = part("unequal", data={"train": "own.bin", "val": []})
r = subprocess.run([*MPIRUN, "-np", "1", "-wdir", path("here"), BINARY, "--config", own, ":", "-np", "1", "-wdir",
                    path("there"), BINARY, "--config", own], capture_output=True, text=True, timeout=TIMEOUT_S,
                   env=environment(ENV))
check("data that differs: the ranks", r.returncode == USER and r.stderr.count("error: ") == 1 and
      "rank 1: other data than rank 0" in r.stderr, said(r))

own = part("apart", data={"train": "synthetic", "val": []}, sample={"every_steps": 0})
r = subprocess.run([*MPIRUN, "-np", "1", "-wdir", path("here"), BINARY, "--config", own, "run.dir=own_run", ":", "-np",
                    "1", "-wdir", path("there"), BINARY, "--config", own, "run.dir=own_run"], capture_output=True,
                   text=True, timeout=TIMEOUT_S, env=environment(ENV))
check("a folder that one rank alone sees: the ranks", r.returncode == USER and r.stderr.count("error: ") == 1 and
      "rank 1: own_run is not the folder that rank 0 has there" in r.stderr and "all hosts share" in r.stderr, said(r))

own = path("unequal.json")
os.mkdir(path("empty"))
begin = time.time()
r = subprocess.run([*MPIRUN, "-np", "2", "-wdir", path("here"), BINARY, "--config", own,
                    "train.global_batch_size=3", ":", "-np", "1", "-wdir", path("empty"), BINARY, "--config", own,
                    "train.global_batch_size=3"], capture_output=True, text=True, timeout=TIMEOUT_S,
                   env=environment(ENV))
check("what one rank refuses ends all of them", r.returncode == USER and r.stderr.count("error: ") == 1 and "own.bin" in
      r.stderr and time.time() - begin < 10, said(r))

# ---- stopping ----
LONG = ["train.steps=1000000", "checkpoint.every_steps=20", "eval.every_steps=0", "sample.every_steps=0"]
p = start_on(2, part("stopped"), "parallel.ep=2", *LONG)
until_step(p, 3)
open(path("stopped", "STOP"), "w").close()
out, err = p.communicate(timeout=TIMEOUT_S)
check("a STOP file: all save and leave with 3", p.returncode == STOPPED and "the STOP file" in out and
      records("stopped", "save")[-1]["step"] == len(losses("stopped")), (p.returncode, out, err))
p = start_on(2, part("signalled"), "parallel.ep=2", *LONG)
until_step(p, 3)
os.kill(pid_of(p, 1), signal.SIGUSR1)
out, err = p.communicate(timeout=TIMEOUT_S)
check("a signal to one rank: all save and leave with 3", p.returncode == STOPPED and "SIGUSR1" in out and
      records("signalled", "save")[-1]["step"] == len(losses("signalled")), (p.returncode, out, err))

# ---- where ranks run ----
r = train_on(2, part("places"), "train.global_batch_size=2", "parallel.ep=1", "train.steps=1", "train.lr_warmup_steps=0",
             "run.threads=%d" % (os.cpu_count() + 1))
check("hosts, ranks and cores; more threads than cores are told", r.returncode == DONE and ": ranks 0-1, " in r.stdout and
      re.search(r"warn .*rank 0 on .* has \d+ threads on \d+ cores?: .*--bind-to none", r.stderr), said(r))

# ---- a rank that dies, a rank that hangs ----
rng, kills = random.Random(int(os.environ.get("SEED", 3))), int(os.environ.get("KILLS", 2))
SHORT = ["parallel.ep=2", "train.steps=120", "checkpoint.every_steps=7", "eval.every_steps=0", "sample.every_steps=0"]
train_on(4, part("unkilled"), *SHORT)
file = part("killed")
for _ in range(kills):
    p, victim = start_on(4, file, *SHORT), rng.randrange(4)
    until_step(p, rng.randrange(20 // kills, 80 // kills) + (records("killed", "step")[-1]["step"] if os.path.exists(
        path("killed", "log.jsonl")) else 0))
    pid, begin = pid_of(p, victim), time.time()
    os.kill(pid, signal.SIGKILL)
    out, err = p.communicate(timeout=TIMEOUT_S)
    check("rank %d killed: the job ends, and says who" % victim, p.returncode not in (DONE, STOPPED) and
          time.time() - begin < 10 and err.count("error: ") == 1 and "rank %d of 4 (pid %d" % (victim, pid) in err,
          (time.time() - begin, p.returncode, err))
r = train_on(4, file, *SHORT)
check("%d times killed = uninterrupted" % kills, r.returncode == DONE and "bit for bit" in r.stdout and
      hashes("killed") == hashes("unkilled") and len(hashes("killed")) == 120, said(r))
check("nothing of the watch is left", "ranks" not in os.listdir(path("unkilled")), os.listdir(path("unkilled")))

p = start_on(3, part("hung"), "parallel.ep=1", "train.global_batch_size=3", "run.hang_timeout_s=2", *LONG)
until_step(p, 5)
begin = time.time()
os.kill(pid_of(p, 1), signal.SIGSTOP)
out, err = p.communicate(timeout=TIMEOUT_S)
check("rank 1 stopped: the table of ranks, exit 1", p.returncode == FAILED and time.time() - begin < 20 and
      err.count("no rank has moved for 2 s") == 1 and re.search(r"\n +1 .*stopped or gone", err) and
      len(re.findall(r"\n +[02] .*waits in ", err)) == 2, (p.returncode, err))

# A library that moves bytes (NCCL) knows of a lost rank while all wait.
os.mkdir(path("lost"))
begin = time.time()
r = ranks(3, "--lose", path("lost"), binary="build/tests/run_ranks")
check("a library that has lost the others: who and why, all let go, exit 1 in a bounded time", r.returncode == FAILED and
      r.stderr.count("error: ") == 1 and re.search(r"rank 1 of 3 on \S+ has lost the others .*remote process exited",
      r.stderr) and "rank 1 lets go" in r.stderr and time.time() - begin < 10, (time.time() - begin, said(r)))
finish()
PYTHON
