#!/usr/bin/env bash
# Runs on packed shards and on several sources, and check-data, which reads all of them first. Prints each check; exit 1
# if one fails.
set -u
cd "$(dirname "$0")/.."
PYTHONPATH=tests:scripts PYTHONDONTWRITEBYTECODE=1 python3 - <<'PYTHON'
from trial import *

from prepare.zst import pack, packer

try:
    packer()
    can_pack = True
except SystemExit:
    can_pack = False
    print("skipped  what packs shards: the program zstd, or make venv, brings it")


def read(name):
    with open(name, "rb") as f:
        return f.read()


def write(name, data):
    with open(path(name), "wb") as f:
        f.write(data)
    return path(name)


def pack_file(name):
    if can_pack:
        pack([read(name)], name + ".zst")
        os.remove(name)


def check_data(*arguments):
    return run("check-data", *arguments)


# ---- runs ----
os.makedirs(path("texts"))
for i, name in enumerate(("model/model.c", "model/moe.c", "model/mla.c")):
    shutil.copy(name, path("texts", "%d.txt" % i))
subprocess.run([sys.executable, "scripts/prepare_data.py", "--tokenizer", "bytes", "--no-ngram", "--shard-tokens",
                "9000", "--out", path("web"), path("texts")], check=True, capture_output=True)
prepare("code", "data/json.c")
for name in ("web", "code"):
    shutil.copytree(path(name), path("packed_" + name))
    for file in os.listdir(path("packed_" + name)):
        if file.endswith("0.bin"):
            pack_file(path("packed_" + name, file))


def sources(front, end=".bin*", weights=(3, 1)):
    return {"train": [{"name": name, "path": path(front + name, "train_*" + end), "weight": weight}
                      for name, weight in zip(("web", "code"), weights)],
            "val": [{"name": name, "path": path(front + name, "val_*.bin*")} for name in ("web", "code")]}


MORE = dict(train={"steps": 8}, eval={"every_steps": 4, "tokens": 500}, checkpoint={"every_steps": 2})
r = train(config("plain", data=sources(""), **MORE))
check("two sources train", r.returncode == DONE, said(r))
epochs = re.search(r"data +train (\S+) tokens in (\d+) shards \(web (\S+) x 0.75, code (\S+) x 0.25\): asked \S+ = "
                   r"(\S+) / (\S+) epochs", r.stdout)
n = {name: json.loads(read(path(name, "data.json")))["train_tokens"] for name in ("web", "code")}
samples = {name: sum((os.path.getsize(path(name, file)) - 1024) // 2 - 2 >= 0 and
                     ((os.path.getsize(path(name, file)) - 1024) // 2 - 2) // 32
                     for file in os.listdir(path(name)) if file.startswith("train_")) for name in n}
check("the banner tells each source's epochs", epochs and int(epochs[2]) > 2 and
      (epochs[5], epochs[6]) == ("%.2f" % (24 / samples["web"]), "%.2f" % (8 / samples["code"])),
      (epochs and epochs[0], samples))
check("so does the report", "web: 768 of " in (text := read(path("plain", "report.md")).decode()) and
      "code: 256 of " in text, text)
waits = [json.loads(line)["data_wait_ms"] for line in open(path("plain", "log.jsonl")) if '"kind":"step"' in line]
check("log.jsonl has the time waited for data", len(waits) == 8 and all(wait >= 0 for wait in waits) and waits[0] > 0,
      waits)
r = train(config("packed", data=sources("packed_"), **MORE))
check("packed and plain shards mixed: the same run", r.returncode == DONE and
      records("packed", "step") == records("plain", "step") and records("packed", "val") == records("plain", "val") and
      last_hash("packed") == last_hash("plain"), said(r))
file = config("moved", data=sources("", ".bin*"), **MORE)
r = train(file, "train.steps=4")
change = "data.train=" + json.dumps(sources("packed_")["train"])
r = train(file, change)
check("resumed on other folders with packed shards: bit for bit", r.returncode == DONE and
      "step_00000004, bit for bit" in r.stdout and records("moved", "step") == records("plain", "step") and
      last_hash("moved") == last_hash("plain"),
      said(r))
train(config("other", data=sources(""), **MORE), "train.steps=4")
for name, other in (("weights", sources("", weights=(3, 2))), ("order", {"train": sources("")["train"][::-1]}),
                    ("one source", {"train": sources("")["train"][:1]})):
    r = train(path("other.json"), "data.train=" + json.dumps(other["train"]))
    check("resumed with other %s: refused" % name, is_refusal(r, "data.train", "--init-from"), said(r))
swapped = [{**s, "path": t["path"]} for s, t in zip(sources("")["train"], sources("")["train"][::-1])]
r = train(path("other.json"), "data.train=" + json.dumps(swapped))
check("resumed with the names exchanged: refused", is_refusal(r, "not what this run was trained on"), said(r))

# A frame too large to enter is unpacked at the start, and said.
if shutil.which("zstd"):
    os.makedirs(path("large"))
    ids = [i * 7919 % 257 for i in range(2200000)]
    plain = write_shard("large/train_0.bin", ids)
    subprocess.run(["zstd", "-q", "-1", plain], check=True)
    r = train(config("from_plain", data={"train": plain, "val": []}))
    q = train(config("from_large", data={"train": plain + ".zst", "val": []}))
    check("one large frame: the same run, and a warning", q.returncode == DONE and "--pack" in q.stderr and
          records("from_large", "step") == records("from_plain", "step"), said(q))
    whole = read(plain)
    q = subprocess.run([sys.executable, "scripts/prepare_data.py", "--pack", plain + ".zst"], capture_output=True)
    out = subprocess.run(["zstd", "-dqc", plain + ".zst"], capture_output=True).stdout
    check("--pack repacks it, and zstd -d reads that", q.returncode == 0 and out == whole, q.stderr)
    q = train(config("from_small", data={"train": plain + ".zst", "val": []}))
    check("then without a warning", q.returncode == DONE and not q.stderr and records("from_small", "step") ==
          records("from_plain", "step"), said(q))
    q = subprocess.run("zstd -q <%s >%s" % (plain, path("large", "piped.bin.zst")), shell=True)
    r = check_data(path("large", "piped.bin.zst"))
    check("without a size in the frame", r.returncode == DONE and "2,200,000" in r.stdout, said(r))

# Damage: told with file and place, by the run and by check-data.
if can_pack:
    packed = path("packed_web", "train_000.bin.zst")
    good = read(packed)
    for name, data in (("one byte flipped", good[:len(good) // 2] + bytes([good[len(good) // 2] ^ 8]) +
                        good[len(good) // 2 + 1:]),
                       *(("the last %d bytes cut" % n, good[:-n]) for n in (1, 10, 1000))):
        write(packed, data)
        r = train(config("damaged", data=sources("packed_"), train={"steps": 200}), "run.dir=" + path("damaged_run"))
        check(name + ": the run names file and byte", r.returncode in (USER, FAILED) and
              "train_000.bin.zst" in r.stderr and
              re.search(r"byte|bytes", r.stderr) and "Traceback" not in r.stderr, said(r))
        r = check_data(path("packed_web", "train_*"))
        check(name + ": check-data names it, once", r.returncode == USER and
              r.stderr.count("train_000.bin.zst") == 1 and
              r.stderr.count("\n") == 1 and "byte" in r.stderr and "hint: " in r.stderr and
              r.stdout.splitlines()[-1].endswith("1 error, see above"), said(r))
    write(packed, good)

# ---- check-data ----
r = check_data(path("web", "*.bin"))
lines = r.stdout.splitlines()
check("all fine", r.returncode == DONE and not r.stderr and lines[-1].startswith("checked") and
      lines[-1].endswith("all fine"), said(r))
d = json.loads(read(path("web", "data.json")))
check("tokens, documents and bytes as data.json has them", re.search(
    r"web/train_\* +%d +%s +%d +" % (sum(f.startswith("train_") for f in os.listdir(path("web"))),
                                    format(d["train_tokens"], ","), d["train_documents"]), r.stdout), said(r))
check("the excerpt is the text", "excerpt    " + " ".join(open("model/model.c").read(60).split()) in r.stdout, said(r))
check("the document token is named", "document token 256" in r.stdout, said(r))
r = check_data(path("web", "*.bin"), "-q")
check("--quiet: the last line", r.returncode == DONE and r.stdout.count("\n") == 1 and
      r.stdout.startswith("checked"), said(r))
r = check_data(path("web", "train_*.bin"), path("web", "train_000.bin"), path("packed_web", "*.bin*"))
check("several patterns, each file once", r.returncode == DONE and r.stdout.count("web/train_*") == 2, said(r))
check("documents of both folders are duplicates", "duplicates 3 of 9 documents" in r.stdout and
      r.stdout.count("was there before") == 3, said(r))

# Lengths and duplicates that are known: 100 documents of 5 tokens, 3 of them twice, and 2 empty ones.
documents = [[1 + i % 7, 2, i % 250, 3, 9] for i in range(97)] + [[1, 2, 0, 3, 9], [2, 2, 1, 3, 9], [3, 2, 2, 3, 9], [],
                                                                   []]
stream = [x for document in documents for x in (256, *document)]
os.makedirs(path("known"))
write_shard("known/a_0.bin", stream[:200])
write_shard("known/a_1.bin", stream[200:])
with open(path("known", "data.json"), "w") as f:
    json.dump({"version": 1, "vocab_size": 257, "document_token": 256}, f)
r = check_data(path("known", "a_*"))
check("the table of lengths", r.returncode == DONE and
      "documents  102, mean 4 tokens, longest 5, 2 empty" in r.stdout and
      re.search(r"\n +0 +2 +1.96 % +0 +0.00 %\n +4-7 +100 +98.04 % +500 +100.00 %\n", r.stdout), said(r))
check("and of duplicates", "duplicates 3 of 100 documents (3.00 %), 15 tokens (3.00 %)" in r.stdout and
      "a_1.bin token %s, 5 tokens long, was there before" % (6 * 97 - 200) in r.stdout, said(r))
check("without a tokenizer the excerpt is ids", "excerpt    1 2 0 3 9" in r.stdout, said(r))
r = check_data(path("known", "a_*"), "--tokenizer", path("web", "tokenizer.json"))
check("--tokenizer", r.returncode == DONE and "web/tokenizer.json" in r.stdout and "excerpt    1 2 0" not in r.stdout,
      said(r))
os.remove(path("known", "data.json"))
r = check_data(path("known", "a_*"))
check("no document token is known", r.returncode == DONE and "documents  not counted" in r.stdout, said(r))

shutil.copytree(path("web"), path("bad"))
ids = array.array("H", read(path("bad", "train_001.bin"))[1024:])
ids[4321] = 257
write_shard("bad/train_001.bin", ids)
write("bad/train_000.bin", read(path("bad", "train_000.bin"))[:-2])
write("bad/val_000.bin", b"It is a truth")
r = check_data(path("bad", "*.bin"))
errors = r.stderr.splitlines()
check("damaged files: a line each, exit 2", r.returncode == USER and len(errors) == 3 and all(
    part in line for line, parts in zip(errors, (
        ("bad/train_000.bin", "truncated", "bytes found", "hint: "),
        ("bad/train_001.bin", "token 4321 is id 257, outside the vocabulary of 257, at byte 9666", "hint: "),
        ("bad/val_000.bin", "text", "hint: "))) for part in parts), said(r))
check("the summary comes last", r.stdout.splitlines()[-1].endswith("3 errors, see above"), said(r))
for key, value in (("train_tokens", 5), ("val_tokens", 5), ("train_bytes", 7), ("train_documents", 9)):
    shutil.rmtree(path("bad"))
    shutil.copytree(path("web"), path("bad"))
    with open(path("bad", "data.json"), "w") as f:
        json.dump({**d, key: value}, f)
    r = check_data(path("bad", "*.bin"))
    check("data.json with other %s" % key, r.returncode == USER and r.stderr.count("\n") == 1 and
          '"%s" is %d, the shards hold %d' % (key, value, d[key]) in r.stderr, said(r))
    r = check_data(path("bad", "train_000.bin"))
    check("which a part of the shards cannot tell", r.returncode == DONE, said(r))
with open(path("bad", "data.json"), "w") as f:
    f.write("{")
r = check_data(path("bad", "*.bin"))
check("data.json that is none", r.returncode == USER and "data.json:1:2: the text ends" in r.stderr, said(r))
for name, arguments, parts in (("nothing named", [], ["check-data what?"]),
                               ("no match", [path("no_*.bin")], ["no_*.bin"]),
                               ("a tokenizer that is none", [path("web", "*.bin"), "--tokenizer", path("none")],
                                ["none"]),
                               ("an option of another command", [path("web", "*.bin"), "--out", "x"], ["--out"])):
    r = check_data(*arguments)
    check(name + ": exit 2, one line and a hint", is_refusal(r, *parts), said(r))
finish()
PYTHON
