#!/usr/bin/env bash
# The commands eval and generate, and validation inside a run. Prints each check; exit 1 if one fails.
set -u
cd "$(dirname "$0")/.."
PYTHONPATH=tests PYTHONDONTWRITEBYTECODE=1 python3 - <<'PYTHON'
from trial import *

DATA = prepare("shards", "model/model.c", "model/mla.c", "model/moe.c")
HELD_OUT = DATA["val"][0]
MODEL = dict(data=DATA, train={"steps": 60, "seq_len": 64, "lr": 3e-3, "global_batch_size": 8, "micro_batch_size": 4})
file = config("run", eval={"every_steps": 25}, checkpoint={"every_steps": 20}, **MODEL)
r = train(file)
check("a run to evaluate", r.returncode == DONE and losses("run")[-1] < 4, said(r))
last = records("run", "val")[-1]
TARGETS = last["tokens_evaluated"]


def evaluate(*arguments):
    """Loss of each set and number of tokens, as the line of eval says."""
    r = run("eval", "--config", file, *arguments)
    line = r.stdout.splitlines()[-1] if r.returncode == DONE and r.stdout else ""
    return [(name, float(loss)) for name, loss in re.findall(r"\| (\w+) (\d+\.\d+)", line)], line, r


# ---- eval ----
sets, line, r = evaluate()
shown = "held_out %.4f" % last["sets"][0]["loss"]
check("eval of the last checkpoint = the run's last validation", shown in line and " val " in line and "60/60" in line,
      said(r))
check("the weights are named on stderr", r.stderr == "weights: %s\n" % path("run", "step_00000060"), said(r))
check("the number of tokens is said", "tokens" in line and TARGETS > 64, (line, TARGETS))
check("per byte too", "nats/byte" in line and abs(last["sets"][0]["nats_per_byte"] - last["sets"][0]["loss"]) <
      0.02 * last["sets"][0]["loss"], last)
for which, step in (("40", 40), ("latest", 60), (path("run", "step_00000040"), 40), (path("run"), 60)):
    _, line, r = evaluate("--checkpoint", which)
    check("eval --checkpoint %s" % which.replace(FOLDER, ""), r.returncode == DONE and
          "step_%08d\n" % step in r.stderr and
          "%d/60" % step in line, said(r))
_, line, r = evaluate("-q")
check("eval --quiet still prints its line", shown in line, said(r))
for which, part in (("41", "no checkpoint of step 41"), ("none", "none: no such folder"), (path("shards"),
      "no checkpoint")):
    r = run("eval", "--config", file, "--checkpoint", which)
    check("eval --checkpoint %s: exit 2" % which.replace(FOLDER, ""), is_refusal(r, part), said(r))
r = run("eval", "--config", file, "run.dir=" + path("nothing"))
check("eval without a checkpoint: exit 2", is_refusal(r, "no checkpoint in " + path("nothing")), said(r))
r = run("eval", "--config", file, "model.hidden_size=64")
check("eval of another model: exit 2", r.returncode == USER and not r.stdout and r.stderr.count("error: ") == 1 and
      ("hidden_size" in r.stderr or "embed_tokens" in r.stderr), said(r))

# ---- validation does not depend on how it is cut (J2, J5), nor on training shards (J1) ----
SHORT = {**MODEL["train"], "steps": 2, "global_batch_size": 10, "micro_batch_size": 5}
results = {}
for batch in (1, 2, 5, 10):
    name = "micro%d" % batch
    train(config(name, eval={"every_steps": 1, "tokens": 1001}, data=DATA, train={**SHORT, "micro_batch_size": batch}),
          "--init-from", path("run"))
    results[batch] = records(name, "val")[0]
counts = {v["tokens_evaluated"] for v in results.values()}
values = [v["sets"][0]["loss"] for v in results.values()]
check("1001 tokens whatever the micro-batch", counts == {1001}, counts)
check("and the same loss", max(values) - min(values) < 1e-5 * values[0], values)
first = [losses("micro%d" % batch)[0] for batch in (1, 2, 5, 10)]
check("training loss does not depend on accumulation (K5)", max(first) - min(first) < 1e-5 * first[0], first)
both = prepare("both", "model/model.c", "model/acts.c", "model/head.c")
r = train(config("more", eval={"every_steps": 1, "tokens": 1001}, data={"train": both["train"], "val": DATA["val"]},
                 train=SHORT), "--init-from", path("run"), "train.lr=0", "train.bias_update_speed=0")
check("nor validation on the training shards", abs(records("more", "val")[0]["sets"][0]["loss"] -
      evaluate("eval.tokens=1001")[0][0][1]) < 1e-4, records("more", "val"))
r = train(config("overlap", data={"train": DATA["train"], "val": [{"name": "same", "path": DATA["train"]}]}))
check("validation on training shards is refused", is_refusal(r, "data.val same and data.train both hold"), said(r))

# ---- several sets; none; never (J3) ----
second = prepare("second", "model/head.c")
r = train(config("two", eval={"every_steps": 1, "tokens": 256}, train=SHORT,
                 data={"train": DATA["train"], "val": [HELD_OUT, {"name": "second",
                 "path": second["val"][0]["path"]}]}))
sets = records("two", "val")[-1]["sets"]
check("two validation sets", r.returncode == DONE and [s["name"] for s in sets] == ["held_out", "second"] and
      sets[0]["loss"] != sets[1]["loss"] and " bpb " in r.stdout, said(r))
alone = [s["loss"] for v in records("two", "val") for s in v["sets"] if s["name"] == "held_out"]
train(config("one", eval={"every_steps": 1, "tokens": 256}, train=SHORT, data=DATA))
check("a set's loss does not depend on the others", alone == [v["sets"][0]["loss"] for v in records("one", "val")])
for name, change, n_val in (("never", {"every_steps": 0}, 0), ("beyond", {"every_steps": 1000}, 1)):
    r = train(config(name, eval=change, data=DATA, train=SHORT))
    check("eval.every_steps %d: runs to its end" % change["every_steps"], r.returncode == DONE and len(records(name,
          "val")) ==
          n_val and ("val" in r.stdout.splitlines()[-1]) == (n_val > 0), said(r))
r = train(config("no_sets", eval={"every_steps": 1}, data={**DATA, "val": []}, train=SHORT))
check("no validation set: runs to its end", r.returncode == DONE and not records("no_sets", "val"), said(r))
r = run("eval", "--config", path("no_sets.json"))
check("eval without a set: exit 2", is_refusal(r, "data.val"), said(r))


# ---- generate ----
def text(*arguments, **more):
    r = run("generate", "--config", file, *arguments, **more)
    return r.stdout if r.returncode == DONE else said(r)


PROMPT = ("--prompt", "static void ", "--tokens", "40")
greedy = text(*PROMPT, "--temperature", "0")
check("temperature 0: the prompt, then 40 bytes and a line end", str(greedy).startswith("static void ") and
      len(greedy) == 12 + 40 + 1 and greedy.isascii(), greedy)
check("repeatable", greedy == text(*PROMPT, "--temperature", "0", "--seed", "5"))
check("top-k 1 is greedy", greedy == text(*PROMPT, "--temperature", "2", "--top-k", "1"))
check("a tiny temperature is greedy", greedy == text(*PROMPT, "--temperature", "1e-9"))
check("a tiny top-p is greedy", greedy == text(*PROMPT, "--temperature", "1", "--top-p", "1e-9"))
drawn = [text(*PROMPT, "--temperature", "1", "--seed", seed) for seed in ("3", "3", "4")]
check("the same seed draws the same text, another one another", drawn[0] == drawn[1] != drawn[2], drawn)
check("threads do not matter", drawn[0] == text(*PROMPT, "--temperature", "1", "--seed", "3", "run.threads=2"))
same = {text(*PROMPT, "--temperature", "1", "--seed", "3", "--top-k", k) for k in ("0", "257", "258", "1000000000")}
check("top-k 0, the vocabulary and more: off", same == {drawn[0]}, same)
check("a prompt from standard input", greedy == text("--prompt", "-", "--tokens", "40", "--temperature", "0",
      input="static void "))
check("no prompt: begins at the document token", len(text("--tokens", "5", "--temperature", "0")) <= 6)
check("fewer tokens: the beginning of the same text", text("--prompt", "static void ", "--tokens", "7",
      "--temperature", "0")
      == greedy[:19] + "\n")
check("any text can be a prompt", text("--prompt", "h\u00e9\u20ac\U0001f600\n", "--tokens", "1", "--temperature",
      "0").startswith("h\u00e9\u20ac\U0001f600\n"))
check("the weights are asked for by step", text(*PROMPT, "--temperature", "0", "--checkpoint", "20") != greedy)
check("an empty prompt on standard input: the same", text("--prompt", "-", "--tokens", "5", "--temperature", "0",
      input="") == text("--prompt", "", "--tokens", "5", "--temperature", "0") == text("--tokens", "5",
      "--temperature", "0"))
cut = text(*PROMPT, "--temperature", "0", "--stop", greedy[20])
check("--stop: up to the first such token", greedy.startswith(cut[:-1]) and cut[-2] == greedy[20] and
      greedy[20] not in cut[12:-2], (cut, greedy))
check("--stop by id", cut == text(*PROMPT, "--temperature", "0", "--stop", str(ord(greedy[20])) if
      not greedy[20].isdigit() else greedy[20]), cut)
check("--stop none", len(text(*PROMPT, "--temperature", "100", "--seed", "1", "--stop", "none")) > 12)

# ---- generate --show-experts ----
ESCAPES = re.compile("\033\\[[0-9;]*m")


def experts(*arguments, **more):
    r = run("generate", "--config", file, *PROMPT, "--temperature", "0", "--show-experts", *arguments, **more)
    return r, r.stdout.split("\n")


r, plain = experts()
check("--show-experts in a file: legend, text, table; no colours", r.returncode == DONE and "\033" not in r.stdout and
      plain[0].startswith("experts of layer ") and greedy in r.stdout, said(r))
rows = [re.match(r"expert +(\d+) +(\d+) tokens +([0-9.]+) %  '", line) for line in plain]
rows = [[float(x) for x in row.groups()] for row in rows if row]
check("the table's counts descend, and sum to prompt, document token and new tokens", rows and
      [row[1] for row in rows] == sorted((row[1] for row in rows), reverse=True) and
      (len(rows) == 12 or sum(row[1] for row in rows) == 1 + 12 + 40), (rows, said(r)))
r, coloured = experts(env={"CLICOLOR_FORCE": "1"})
check("coloured: the same characters", r.returncode == DONE and "\033[38;5;" in r.stdout and
      ESCAPES.sub("", r.stdout).split("\n") == plain, said(r))
check("coloured: every colour ends", r.stdout.count("\033[38;5;") == r.stdout.count("\033[0m") >= 53, said(r))
r, _ = experts(env={"CLICOLOR_FORCE": "1", "NO_COLOR": "1"})
check("NO_COLOR wins", "\033" not in r.stdout, said(r))
layers = {tuple(experts("--layer", layer)[1]) for layer in ("1", "2")}
check("--layer: another layer, another table", len(layers) == 2, layers)
r = run("generate", "--config", file, *PROMPT, "--show-experts", "--tokens", "1000", "--temperature", "0")
check("up to the last position", r.returncode == DONE and r.stdout.count("\n") > 3, said(r))
for arguments, part in ((("--layer", "1"), "--layer alone"), (("--show-experts", "--layer", "0"),
                        "--layer 0 has no experts"), (("--show-experts", "--layer", "99"), "--layer 99"),
                        (("--stop", "two tokens"), "not one token"), (("--stop", ""), "not one token")):
    r = run("generate", "--config", file, *PROMPT, *arguments)
    check("generate %s: exit 2" % " ".join(arguments), r.returncode == USER and r.stderr.count("error: ") == 1 and
          part in r.stderr, said(r))

longest = 64 # model.max_position_embeddings
check("text ends where the positions end", len(text("--prompt", "x" * 40, "--tokens", "1000", "--temperature", "0")) <=
      longest + 2)
for name, arguments, part in (("temperature -1", ("--temperature", "-1"), "--temperature"),
                              ("temperature nan", ("--temperature", "nan"), "--temperature"),
                              ("top-k -1", ("--top-k", "-1"), "--top-k"), ("top-p 2", ("--top-p", "2"), "--top-p"),
                              ("tokens 0", ("--tokens", "0"), "--tokens"), ("seed x", ("--seed", "x"), "--seed"),
                              ("a prompt too long", ("--prompt", "x" * 65), "the prompt has 66 tokens"),
                              ("a missing checkpoint", ("--checkpoint", "7"), "no checkpoint of step 7")):
    r = run("generate", "--config", file, *arguments)
    check("generate: %s: exit 2" % name, is_refusal(r, part), said(r))
r = run("generate", "--config", config("synthetic"), "run.dir=" + path("run"))
check("generate without a tokenizer: exit 2", is_refusal(r, "data.tokenizer"), said(r))
r = run("generate", "--config", path("synthetic.json"), *PROMPT, "run.dir=" + path("run"), "--temperature", "0",
        "data.tokenizer=" + path("shards"))
check("generate with data.tokenizer", r.stdout == greedy, said(r))

# ---- generate in FP8: the cache says what forwards of the whole text say ----
with open(path("verse.txt"), "w") as f:
    f.write("the quick brown fox jumps over the lazy dog, and so on; " * 200)
WIDTHS = dict(hidden_size=128, kv_lora_rank=128, q_lora_rank=128, v_head_dim=64, qk_nope_head_dim=16,
              qk_rope_head_dim=16, intermediate_size=128, moe_intermediate_size=128, num_nextn_predict_layers=0)
file = config("narrow", model=WIDTHS, data=prepare("verse", path("verse.txt")), precision={"compute": "fp8"},
              train={"steps": 70, "seq_len": 64, "global_batch_size": 8, "micro_batch_size": 8, "lr": 5e-3},
              sample={"every_steps": 70, "prompts": ["the quick"], "tokens": 30, "temperature": 0})
r = train(file)
check("FP8: a verse is learnt", r.returncode == DONE and losses("narrow")[-1] < 0.5, said(r))
GREEDY = ("--temperature", "0", "--prompt")
cached = text(*GREEDY, "the quick", "--tokens", "30")
check("FP8: the sample of the last step", records("narrow", "sample")[-1]["text"] == cached[9:-1], cached)
whole = "the quick"
for _ in range(30):
    whole = text(*GREEDY, whole, "--tokens", "1")[:-1]
check("FP8: from the cache = a forward of the whole text for each token", cached == whole + "\n", (cached, whole))
finish()
PYTHON
