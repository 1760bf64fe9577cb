#!/usr/bin/env bash
# scripts/prepare_data.py: what lands in the shards, and what a wrong input does. Prints each check; exit 1 if one
# fails.
set -u
cd "$(dirname "$0")/.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 - "$folder" <<'PYTHON'
import array, bz2, collections, glob, json, lzma, math, os, struct, subprocess, sys, zlib

FOLDER = sys.argv[1]
failed = 0


def check(name, ok, detail=""):
    global failed
    failed += not ok
    print("%s  %s%s" % ("ok  " if ok else "FAIL", name, "" if ok else ": %s" % (detail,)), flush=True)


def path(*names):
    return os.path.join(FOLDER, *names)


def write(name, data):
    os.makedirs(os.path.dirname(path(name)), exist_ok=True)
    with open(path(name), "wb") as f:
        f.write(data)
    return path(name)


def run(*arguments, stdin=b""):
    return subprocess.run([sys.executable, "scripts/prepare_data.py", *arguments], input=stdin, capture_output=True)


def shard(name):
    with open(name, "rb") as f:
        header, body = f.read(1024), f.read()
    magic, version, n = struct.unpack_from("<3i", header)
    assert (magic, version) in ((20240520, 1), (20240801, 7)), (magic, version)
    ids = array.array("H" if version == 1 else "I", body)
    assert len(ids) == n and header[12:] == bytes(1012), (len(ids), n)
    return list(ids), version


def stream(out, split):
    return [i for name in sorted(glob.glob(path(out, split + "_*.bin"))) for i in shard(name)[0]]


def documents(ids, token):
    """The documents of a stream: what follows each document token. The stream must begin with one."""
    assert ids[:1] == [token], ids[:1]
    starts = [i for i, x in enumerate(ids) if x == token]
    return [ids[a + 1 : b] for a, b in zip(starts, [*starts[1:], len(ids)])]


def data_json(out):
    with open(path(out, "data.json")) as f:
        return json.load(f)


def snapshot(out):
    return {name: open(path(out, name), "rb").read() for name in sorted(os.listdir(path(out)))}


# Documents: form feeds, empty ones anywhere, the document token before each (cases C8 and C9).
known = [b"one\n", b"two <|document|> two\n", b"three"]
write("known.txt", b"\f\n\f" + known[0] + b"\f\f\n  \n\f\n" + known[1] + b"\f\n" + known[2] + b"\f\n\n")
r = run("--tokenizer", "bytes", "--val", "0", "--out", path("known"), path("known.txt"))
want = [x for document in known for x in (256, *document)]
check("three documents between empty ones", r.returncode == 0 and stream("known", "train") == want, r.stderr)
d = data_json("known")
check("counts agree with the stream", (d["train_tokens"], d["val_tokens"], d["documents"], d["train_bytes"]) ==
      (len(want), 0, 3, len(want) - 3), d)
check("--val 0 writes no validation shard", sorted(os.listdir(path("known"))) ==
      ["data.json", "tokenizer.json", "train_000.bin"], os.listdir(path("known")))
check("data.json names tokenizer, vocabulary, sources", (d["version"], d["tokenizer"], d["vocab_size"],
      d["document_token"], d["source"]) == (1, "tokenizer.json", 257, 256, ["known.txt"]), d)
check("one summary line on stdout", r.stdout.count(b"\n") == 1 and b"3 documents" in r.stdout, r.stdout)

# Few documents are cut each at a paragraph border, the last tenth for validation.
texts = [b"".join(b"%s %d line %d of it.\n%s" % (name, i, i, b"\n" if i % 5 == 4 else b"") for i in range(1000))
         for name in (b"Alpha", b"Beta", b"Gamma")]
for i, text in enumerate(texts):
    write("novels/%d.txt" % i, text)
write("novels/.hidden", b"not text to train on")
write("novels/picture.bin", b"\x89PNG\0\0\0")
r = run("--tokenizer", "bytes", "--out", path("cut"), path("novels"))
parts = [[bytes(x) for x in documents(stream("cut", split), 256)] for split in ("train", "val")]
check("a folder is read in order, without hidden and binary files",
      [a + b for a, b in zip(*parts)] == texts, r.stderr)
check("each document gives its last tenth", all(0.09 < len(b) / len(a + b) < 0.11 for a, b in zip(*parts)))
check("cut at a paragraph border", all(a.endswith(b"\n\n") and not b.startswith(b"\n") for a, b in zip(*parts)))
d = data_json("cut")
check("counts of both parts", (d["train_tokens"], d["val_tokens"], d["train_bytes"] + d["val_bytes"], d["documents"]) ==
      (len(stream("cut", "train")), len(stream("cut", "val")), sum(map(len, texts)), 3), d)


# The ladder of n-grams against the formula written as a recursion over the text.
def witten_bell(train, val, n):
    def p(context, c):
        follow = collections.Counter(train[i + len(context)] for i in range(len(train) - len(context))
                                     if train[i : i + len(context)] == context)
        lower = p(context[1:], c) if context else 1 / 256
        if not follow:
            return lower
        return (follow[c] + len(follow) * lower) / (sum(follow.values()) + len(follow))

    memo = {}
    grams = [val[i : i + n] for i in range(len(val) - n + 1)]
    for gram in grams:
        memo.setdefault(gram, -math.log(p(gram[:-1], gram[-1])))
    return sum(memo[gram] for gram in grams) / len(grams)


write("short.txt", texts[0][:3000])
run("--tokenizer", "bytes", "--out", path("short"), path("short.txt"))
train, val = (bytes(x for x in stream("short", split) if x < 256) for split in ("train", "val"))
ladder = data_json("short")["ngram"]
check("n-grams equal the formula", set(ladder) == {"bigram", "3-gram", "4-gram"} and all(
      abs(ladder[name] - witten_bell(train, val, n)) < 1e-3 for name, n in (("bigram", 2), ("3-gram", 3))), ladder)

# From 100 documents on, whole documents by hash: the same side in any order.
many = [b"document number %d\n" % i * 5 for i in range(300)]
run("--tokenizer", "bytes", "--no-ngram", "--out", path("many"), write("many.txt", b"\f".join(many)))
run("--tokenizer", "bytes", "--no-ngram", "--out", path("back"), write("back.txt", b"\f".join(many[::-1])))
sides = [[[bytes(x) for x in documents(stream(out, split), 256)] for split in ("train", "val")]
         for out in ("many", "back")]
check("many documents are split whole", sorted(sides[0][0] + sides[0][1]) == sorted(many))
check("about a tenth for validation", 15 <= len(sides[0][1]) <= 50, len(sides[0][1]))
check("the side does not depend on the order", set(sides[0][1]) == set(sides[1][1]))
check("--no-ngram leaves them out", "ngram" not in data_json("many"))

# Shards of a size, and the same tokens in them; a rerun removes what is no longer part of the output.
run("--tokenizer", "bytes", "--no-ngram", "--shard-tokens", "1000", "--out", path("small"), path("many.txt"))
names = sorted(glob.glob(path("small", "train_*.bin")))
sizes = [len(shard(name)[0]) for name in names]
check("shards of 1000 tokens", len(names) > 10 and set(sizes[:-1]) == {1000} and 0 < sizes[-1] <= 1000, sizes)
check("no token lost between shards", stream("small", "train") == stream("many", "train"))
run("--tokenizer", "bytes", "--no-ngram", "--out", path("small"), path("many.txt"))
check("a rerun removes old shards", snapshot("small") == snapshot("many"), os.listdir(path("small")))

# A learnt vocabulary, and the file it is saved in, read again.
r = run("--tokenizer", "train:400", "--out", path("learnt"), path("novels"))
d = data_json("learnt")
check("train:400 has 400 tokens and the document token", (d["vocab_size"], d["document_token"]) == (401, 400), r.stderr)
check("as many document tokens as documents", [stream("learnt", s).count(400) for s in ("train", "val")] == [3, 3])
check("bytes per token", abs(d["bytes_per_token"] - (d["train_bytes"] + d["val_bytes"]) /
      (d["train_tokens"] + d["val_tokens"])) < 1e-3 and d["bytes_per_token"] > 2, d)
run("--tokenizer", path("learnt"), "--out", path("again"), path("novels"))
check("its tokenizer.json gives the same shards", all(snapshot("learnt")[n] == snapshot("again")[n]
      for n in ("train_000.bin", "val_000.bin", "data.json")))

# Ids that 16 bits cannot hold are never cut (case C4).
for token, version in ((65535, 1), (65536, 7), (70000, 7)):
    tree = json.load(open(path("known", "tokenizer.json")))
    tree["added_tokens"][0]["id"] = token
    name = write("wide.json", json.dumps(tree).encode())
    run("--tokenizer", name, "--val", "0", "--out", path("wide"), path("known.txt"))
    got = shard(path("wide", "train_000.bin"))
    check("document token %d in a shard of version %d" % (token, version),
          got == ([token if x == 256 else x for x in want], version), got[0][:8])

# Ways in: standard input, compressed, a glob, one file twice.
run("--tokenizer", "bytes", "--val", "0", "--out", path("in"), "-", stdin=open(path("known.txt"), "rb").read())
check("standard input", stream("in", "train") == want)
write("packed.txt.xz", lzma.compress(open(path("known.txt"), "rb").read()))
run("--tokenizer", "bytes", "--val", "0", "--out", path("in"), path("packed.txt.xz"))
check("a compressed file", stream("in", "train") == want)
run("--tokenizer", "bytes", "--val", "0", "--out", path("in"), path("novels", "*.txt"), path("novels", "1.txt"))
check("a glob, each file once", [bytes(x) for x in documents(stream("in", "train"), 256)] == texts)


# R's data base: character vectors of both versions, packed three ways; other objects are passed over.
def r_strings(lines, version):
    head = b"X\n" + struct.pack(">3i", version, 0x30601, 0x20300)
    if version == 3:
        head += struct.pack(">i", 5) + b"UTF-8"
    return head + struct.pack(">2i", 16, len(lines)) + b"".join(
        struct.pack(">2i", 0x40009, len(line)) + line for line in lines)


records = [r_strings([b"EMMA", b"", b"by me"], 2), r_strings([b"two", b"lines"], 3),
           b"X\n" + struct.pack(">5i", 2, 0, 0, 13, 0), r_strings([b"third"], 3)]
packed = [zlib.compress(records[0]), b"2" + bz2.compress(records[1]), zlib.compress(records[2]),
          b"Z" + lzma.compress(records[3])]
rdb = b"".join(struct.pack(">I", len(record)) + data for record, data in zip(records, packed))
r = run("--tokenizer", "bytes", "--val", "0", "--out", path("rdb"), write("Rdata.rdb", rdb))
check("an .rdb file", r.returncode == 0 and [bytes(x) for x in documents(stream("rdb", "train"), 256)] ==
      [b"EMMA\n\nby me\n", b"two\nlines\n", b"third\n"], r.stderr)

# Mistakes: two lines, exit 2, and what was there stays as it was.
before = snapshot("learnt")
foreign = write("foreign/train_000.bin", b"somebody's")
mistakes = {
    "a missing file": (["no/such.txt"], "no/such.txt"),
    "an empty file": ([write("empty.txt", b"")], "no text"),
    "nothing but form feeds": ([write("feeds.txt", b"\f\n\f\n")], "no text"),
    "a binary file": ([path("novels", "picture.bin")], "zero bytes"),
    "a damaged .xz": ([write("cut.xz", lzma.compress(texts[0])[:-40])], "cut.xz"),
    "a damaged .rdb": ([write("cut.rdb", rdb[:-9])], "cut.rdb"),
    "another tokenizer": (["--tokenizer", "spm", path("known.txt")], "spm"),
    "train without a number": (["--tokenizer", "train:x", path("known.txt")], "train:x"),
    "train:256": (["--tokenizer", "train:256", path("known.txt")], "257"),
    "too little text to learn from": (["--tokenizer", "train:5000", path("short.txt")], "too short"),
    "a text too short for validation": ([write("tiny.txt", b"hi")], "validation"),
    "a tokenizer.json that is none": (["--tokenizer", path("learnt", "data.json"), path("known.txt")], "data.json"),
    "--val 0.9": (["--val", "0.9", path("known.txt")], "--val"),
    "--val x": (["--val", "x", path("known.txt")], "--val"),
    "--shard-tokens 0": (["--shard-tokens", "0", path("known.txt")], "--shard-tokens"),
    "no input": ([], "INPUT"),
}
for name, (arguments, part) in mistakes.items():
    r = run("--out", path("learnt"), *arguments)
    lines = r.stderr.decode().splitlines()
    said = [line for line in lines if line.startswith(("error: ", "hint:  "))]
    ok = r.returncode == 2 and len(said) == 2 and lines[-2:] == said and part in said[0] and not r.stdout
    check(name, ok and snapshot("learnt") == before, (r.returncode, lines))
r = run("--out", path("known.txt", "sub"), path("known.txt"))
check("an unwritable folder", r.returncode == 2 and b"cannot make the folder" in r.stderr, r.stderr)
r = run("--out", os.path.dirname(foreign), path("known.txt"))
check("somebody else's shards are left alone", r.returncode == 2 and b"data.json" in r.stderr and
      open(foreign, "rb").read() == b"somebody's", r.stderr)
r = run("--out", path("none"), path("empty.txt"))
check("a failed run leaves no folder", r.returncode == 2 and not os.path.exists(path("none")))

print("%d checks failed" % failed)
sys.exit(failed > 0)
PYTHON
