#!/usr/bin/env bash
# scripts/prepare_data.py: what lands in the shards, and what a wrong input does. Prints each check; exit 1 if one
# fails.
set -u
cd "$(dirname "$0")/.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 - "$folder" <<'PYTHON'
import array, base64, bz2, collections, glob, gzip, json, lzma, math, os, random, re, shutil, signal, struct
import subprocess, sys, time, zlib

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

# Text in blocks of any size gives what the whole text gives; without separators it is cut where paragraphs end.
sys.path.insert(0, "scripts")
from prepare import files, unpack

draw = random.Random(1)
whole = b"\xef\xbb\xbf" + b"".join(draw.choice([b"a", b"\n", b"\f", b"\f\n", b"bc", b"\f\f", b" "]) for _ in range(300))
name = write("blocks.txt", whole)
want = [text for text in re.split(rb"\f\n?", whole[3:]) if text.strip()]
usual = unpack.BLOCK, files.DOCUMENT_BYTES_MAX
for size in (3, 4, 5, 7, 64, 1000):
    unpack.BLOCK = size
    check("documents in blocks of %d" % size, list(files.source_documents(files.Source(name))) == want)
name = write("long.txt", b"".join(b"paragraph %d\nof two lines\n\n" % i for i in range(1000)))
unpack.BLOCK, files.DOCUMENT_BYTES_MAX = 512, 2000
parts = list(files.source_documents(files.Source(name)))
check("a long text becomes several documents", b"".join(parts) == open(name, "rb").read() and len(parts) > 10 and
      all(len(part) <= 2000 and part.endswith(b"\n\n") for part in parts), [len(part) for part in parts])
unpack.BLOCK, files.DOCUMENT_BYTES_MAX = usual

# JSON lines, packed in every way that this machine can pack.
rows = [{"text": "one\n", "n": 1}, {"text": ""}, {"body": "two, été", "text": None},
        {"text": "lone \ud800", "body": "x"}]
json_lines = "\n".join(json.dumps(row) for row in rows).encode() + b"\n\n"
want = [b"one\n", b"lone \xed\xa0\x80"]
packers = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress}
if shutil.which("zstd"):
    packers[".zst"] = packers[".zstd"] = lambda data: subprocess.run(
        ["zstd", "-q"], input=data, capture_output=True, check=True).stdout
else:
    print("skipped  .zst: there is no program zstd")
for suffix, pack in packers.items():
    for stem in ("rows.jsonl", "rows.json"):
        r = run("--tokenizer", "bytes", "--val", "0", "--out", path("json"), write(stem + suffix, pack(json_lines)))
        check(stem + suffix, r.returncode == 0 and
              [bytes(x) for x in documents(stream("json", "train"), 256)] == want, r.stderr)
r = run("--tokenizer", "bytes", "--val", "0", "--text-key", "body", "--out", path("json"),
        write("body.jsonl", json.dumps(rows[2]).encode()))
check("--text-key", [bytes(x) for x in documents(stream("json", "train"), 256)] == ["two, été".encode()], r.stderr)
r = run("--tokenizer", "bytes", "--val", "0", "--format", "jsonl", "--out", path("json"), "-", stdin=json_lines)
check("JSON lines on standard input", [bytes(x) for x in documents(stream("json", "train"), 256)] == want, r.stderr)
check("standard input leaves nothing behind", sorted(os.listdir(path("json"))) ==
      ["data.json", "tokenizer.json", "train_000.bin"], os.listdir(path("json")))
write("tree/package.json", b'{\n "name": "x"\n}\n')
write("tree/one_line.json", b'{"name": "y"}\n')
write("tree/rows.json", json_lines)
r = run("--tokenizer", "bytes", "--val", "0", "--out", path("json"), path("tree"))
check("a folder with JSON of other kinds", [bytes(x) for x in documents(stream("json", "train"), 256)] ==
      [b'{"name": "y"}\n', b'{\n "name": "x"\n}\n', *want], r.stderr)
r = run("--tokenizer", "bytes", "--val", "0", "--separator", "<|endoftext|>", "--out", path("sep"),
        write("sep.txt", b"a\n<|endoftext|>\nb\f\n<|endoftext|>c"))
check("--separator", [bytes(x) for x in documents(stream("sep", "train"), 256)] == [b"a\n", b"b\f\n", b"c"], r.stderr)

# Fill in the middle: prefix, suffix, middle put together are the document; only training documents, as hashes say.
r = run("--tokenizer", "bytes", "--no-ngram", "--fim", "0.3", "--out", path("fim"), path("many.txt"))
d = data_json("fim")
check("three more tokens", (d["vocab_size"], d["document_token"], d["fim"]) ==
      (260, 256, {"rate": 0.3, "tokens": [257, 258, 259]}), r.stderr)
plain = documents(stream("many", "train"), 256)
n_fim, cuts, ok = 0, set(), True
for before, after in zip(plain, documents(stream("fim", "train"), 256)):
    if after != before:
        n_fim += 1
        a, b, c = after.index(257), after.index(258), after.index(259)
        ok = ok and a == 0 and a < b < c and after[1:b] + after[c + 1 :] + after[b + 1 : c] == before
        cuts.add((b, c))
check("they stand before prefix, suffix and middle of the same document", ok)
check("about that share, cut in different places", 0.2 < n_fim / len(plain) < 0.4 and len(cuts) > n_fim / 2, n_fim)
check("none in the validation part", stream("fim", "val") == stream("many", "val"))

# A drawn order of documents.
for out, more in (("drawn", []), ("drawn_again", ["--workers", "3"]), ("drawn_1", ["--seed", "1"])):
    r = run("--tokenizer", "bytes", "--no-ngram", "--shuffle", *more, "--out", path(out), path("many.txt"))
order = {out: [bytes(x) for x in documents(stream(out, "train"), 256)] for out in ("many", "drawn", "drawn_1")}
check("--shuffle keeps the documents", sorted(order["drawn"]) == sorted(order["many"]), r.stderr)
n_same = sum(a == b for a, b in zip(order["drawn"], order["many"]))
check("in another order", n_same < 20, n_same)
check("which the seed decides", snapshot("drawn") == snapshot("drawn_again") and order["drawn"] != order["drawn_1"])
check("on the same sides", sorted(stream("drawn", "val")) == sorted(stream("many", "val")))

# A rank file of tiktoken, made of the learnt vocabulary: the same ids.
tree = json.load(open(path("learnt", "tokenizer.json")))
from prepare.bpe import alphabet

letters = {letter: byte for byte, letter in alphabet().items()}
ranks = [bytes(letters[c] for c in token) for token in tree["model"]["vocab"]]
ranked = write("learnt.tiktoken", b"".join(base64.b64encode(token) + b" %d\n" % i for i, token in enumerate(ranks)))
r = run("--tokenizer", ranked, "--engine", "built-in", "--out", path("ranked"), path("novels"))
check("a rank file", all(snapshot("learnt")[n] == snapshot("ranked")[n] for n in ("train_000.bin", "val_000.bin")),
      r.stderr)
check("its tokenizer.json", json.load(open(path("ranked", "tokenizer.json")))["model"] == tree["model"])

# nanoGPT's files.
draw = random.Random(2)
texts_ids = {"train": [draw.randrange(400) for _ in range(5000)], "val": [draw.randrange(400) for _ in range(700)]}
for split, ids in texts_ids.items():
    write("nano/%s.bin" % split, array.array("H", ids).tobytes())
r = run("--nanogpt", "401", "--tokenizer", path("learnt"), "--shard-tokens", "2000", "--out", path("nano_out"),
        path("nano"))
check("nanoGPT's files", all(stream("nano_out", split) == ids for split, ids in texts_ids.items()), r.stderr)
d = data_json("nano_out")
lengths = [len(token) for token in ranks]
check("their counts", (d["vocab_size"], d["document_token"], d["train_tokens"], d["val_bytes"]) ==
      (401, 400, 5000, sum(lengths[i] for i in texts_ids["val"])), d)
r = run("--nanogpt", "400", "--val", "0.25", "--out", path("nano_out"), path("nano", "train.bin"))
check("one of them, its end for validation", (stream("nano_out", "train"), stream("nano_out", "val")) ==
      (texts_ids["train"][:3750], texts_ids["train"][3750:]), r.stderr)
check("no tokenizer, none named", "tokenizer" not in data_json("nano_out"))

# The number of processes changes nothing; a stopped run goes on and ends as if it had not been stopped.
draw = random.Random(3)
signs = "abcdefghijklmnopqrstuvwxyzé"
words = ["".join(draw.choice(signs) for _ in range(draw.randint(2, 12))) for _ in range(200_000)]
articles = [" ".join(draw.choice(words) for _ in range(draw.randint(20, 400))) for _ in range(3000)]
articles += [" ".join(words)]
json_articles = "\n".join(json.dumps({"text": text}) for text in articles[:2000])
large = write("large/1.jsonl.gz", gzip.compress(json_articles.encode()))
write("large/2.txt", "\f".join(articles[2000:]).encode())
# The shards are small, so that progress is saved often.
options = ["--tokenizer", path("learnt"), "--shard-tokens", "50000", "--no-ngram", path("large")]
for how, more in (("in the order of the files", []), ("shuffled", ["--shuffle"])):
    run(*options, *more, "--out", path("one"), "--workers", "1")
    command = [sys.executable, "scripts/prepare_data.py", *options, *more, "--out", path("stopped"), "--workers", "2"]
    for sign in (signal.SIGKILL, signal.SIGTERM):
        before = os.path.getmtime(path("stopped", "progress.json")) if os.path.exists(path("stopped")) else 0
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        while process.poll() is None:
            if os.path.exists(path("stopped", "progress.json")) and \
                    os.path.getmtime(path("stopped", "progress.json")) != before:
                process.send_signal(sign)
                break
            time.sleep(0.02)
        said = process.communicate()[1]
        check("stopped by %s, %s" % (sign.name, how), process.returncode in (-sign, 128 + sign) and
              os.path.exists(path("stopped", "progress.json")) and
              not os.path.exists(path("stopped", "data.json")), (process.returncode, said))
    check("it says that it goes on", b"resume" in said and b"stopped" in said, said)
    if not more:
        for name, other, part in (("another option", ["--val", "0.2"], "val"),
                                  ("another input", [path("many.txt")], "inputs")):
            r = run(*options, *other, "--out", path("stopped"))
            check("a stopped run refuses " + name, r.returncode == 2 and b"another command" in r.stderr and
                  part.encode() in r.stderr, r.stderr)
        changed = large
        stamp, content = os.stat(changed), open(changed, "rb").read()
        write(changed, gzip.compress(gzip.decompress(content).replace(b'"text": "', b'"text": "x')))
        r = run(*options, "--out", path("stopped"))
        check("a stopped run refuses another text", r.returncode == 2 and b"has changed" in r.stderr, r.stderr)
        write(changed, content)
        os.utime(changed, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    r = run(*options, *more, "--out", path("stopped"), "--workers", "2")
    check("it ends as one that was not stopped, " + how, b"resume" in r.stderr and
          snapshot("stopped") == snapshot("one"), (r.stderr, os.listdir(path("stopped"))))
    shutil.rmtree(path("stopped"))
decoded = [b"".join(ranks[i] for i in ids).decode() for split in ("train", "val")
           for ids in documents(stream("one", split), 400)]
check("every document once", sorted(decoded) == sorted(articles), data_json("one"))

process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
while not os.path.exists(path("stopped", "progress.json")):
    time.sleep(0.02)
r = run(*options, "--out", path("stopped"))
check("two runs do not write to one folder", r.returncode == 2 and b"another run" in r.stderr, r.stderr)
process.kill()
process.wait()
r = run("--tokenizer", "bytes", "--restart", "--out", path("stopped"), path("known.txt"))
check("--restart begins anew", r.returncode == 0 and sorted(os.listdir(path("stopped"))) ==
      ["data.json", "tokenizer.json", "train_000.bin", "val_000.bin"], (r.stderr, os.listdir(path("stopped"))))

# Packed shards, by the package or by the program: the same bytes, in frames of at most 32 KiB with a table of them.
def unpacked(name):
    """A packed shard's bytes, each frame by itself through zstd; its table must fit."""
    data = open(name, "rb").read()
    n, descriptor, magic = struct.unpack("<IBI", data[-9:])
    assert (descriptor, magic) == (0, 0x8F92EAB1), (descriptor, magic)
    table = len(data) - 9 - 8 * n - 8
    assert struct.unpack_from("<2I", data, table) == (0x184D2A5E, 8 * n + 9)
    sizes = struct.unpack_from("<%dI" % (2 * n), data, table + 8)
    assert sum(sizes[::2]) == table and all(0 < size <= 32768 for size in sizes[1::2]), sizes
    at, parts = 0, []
    for length, size in zip(sizes[::2], sizes[1::2]):
        parts.append(subprocess.run(["zstd", "-dqc"], input=data[at : at + length], capture_output=True).stdout)
        assert len(parts[-1]) == size, (len(parts[-1]), size)
        at += length
    assert b"".join(parts) == subprocess.run(["zstd", "-dqc", name], capture_output=True).stdout
    return b"".join(parts)


if shutil.which("zstd"):
    write("some/1.txt", "\f".join(articles[:300]).encode())
    options = ["--tokenizer", "bytes", "--shard-tokens", "50000", "--no-ngram", path("some")]
    run(*options, "--out", path("plain"))
    r = run(*options, "--zst", "--out", path("packed"))
    names = sorted(os.listdir(path("packed")))
    check("--zst packs the same shards", r.returncode == 0 and names == sorted(
        name + ".zst" if name.endswith(".bin") else name for name in snapshot("plain")), (r.stderr, names))
    check("frame by frame the same bytes", all(unpacked(path("packed", name)) == snapshot("plain")[name[:-4]]
          for name in names if name.endswith(".zst")), names)
    check("and the same data.json", snapshot("packed")["data.json"] == snapshot("plain")["data.json"])
    process = subprocess.Popen([sys.executable, "scripts/prepare_data.py", *options, "--zst", "--out", path("stopped")],
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not glob.glob(path("stopped", "*.zst.tmp")):
        time.sleep(0.001)
    process.kill()
    process.wait()
    left = os.listdir(path("stopped"))
    r = run(*options, "--zst", "--out", path("stopped"))
    check("killed while it packs, it ends as one that was not", r.returncode == 0 and snapshot("stopped") ==
          snapshot("packed"), (r.stderr, left, os.listdir(path("stopped"))))
    r = run(*options, "--out", path("stopped"))
    check("prepared again without --zst, the packed ones go", r.returncode == 0 and snapshot("stopped") ==
          snapshot("plain"), (r.stderr, os.listdir(path("stopped"))))
    shutil.rmtree(path("stopped"))
    some = sorted(glob.glob(path("plain", "*.bin")))[0]
    shutil.copy(some, path("some.bin"))
    r = run("--pack", path("some.bin"))
    check("--pack", r.returncode == 0 and unpacked(path("some.bin.zst")) == open(some, "rb").read() and
          open(path("some.bin"), "rb").read() == open(some, "rb").read(), r.stderr)
    subprocess.run(["zstd", "-qf", path("some.bin")], check=True)
    r = run("--pack", path("some.bin.zst"))
    check("--pack of what zstd has packed", r.returncode == 0 and unpacked(path("some.bin.zst")) ==
          open(some, "rb").read(), r.stderr)
    for name, content in (("text.bin", b"It is a truth"), ("empty.bin", b""), ("text.bin.zst", b"It is a truth")):
        r = run("--pack", write(name, content))
        check("--pack of no shard: " + name, r.returncode == 2 and r.stderr.count(b"error: ") == 1 and
              name.encode() in r.stderr and not os.path.exists(path("text.bin.zst.tmp")), r.stderr)

draw = random.Random(4)
mixed = b"".join(draw.choice([
    b"the ", b" of", b"don't", b"42", "été ".encode(), "中文".encode(), b"\n\n", b"  ", b"\t", b"?!", b"_x",
    b"<|document|>",
    "\U0001f44d".encode(), "\xa0".encode(), "½".encode(), "\ua7cb".encode(), b"\xff", b"\f"]) for _ in range(20000))

# A long document is cut for the workers; the pieces that are merged inside stay the same.
from prepare import bpe, encode

encode.BATCH_BYTES = 50
for name, regexes in (("GPT-2", [bpe.GPT2_REGEX]), ("DeepSeek-V3", bpe.DEEPSEEK_V3_REGEXES)):
    splitter = bpe.Splitter(regexes)
    whole, cut = ([piece for text in texts for pieces in splitter.pieces(text) for piece in pieces]
                  for texts in ([mixed], encode.chunks(mixed)))
    check("cuts where pieces of %s begin" % name, whole == cut and len(list(encode.chunks(mixed))) > 500)

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
    "a line that is not JSON": ([write("bad.jsonl", b'{"text": "a"}\n{"text"\n')], "line 2"),
    "a line without the key": ([write("key.jsonl", b'{"body": "a"}\n')], "line 1 has no \"text\""),
    "a number as text": ([write("number.jsonl", b'{"text": 5}\n')], "not a string"),
    "an array of JSON": ([write("array.jsonl", b'[{"text": "a"}]\n')], "not an object"),
    "a damaged .gz": ([write("cut.jsonl.gz", gzip.compress(json_lines)[:-9])], "cut.jsonl.gz"),
    "a rank file with a hole": (["--tokenizer", write("hole.tiktoken", b"YQ== 0\nYg== 2\n"), path("known.txt")],
                                "hole"),
    "--fim 2": (["--fim", "2", path("known.txt")], "--fim"),
    "--fim without tokens": (["--fim", "0.5", "--tokenizer", path("learnt"), path("known.txt")], "fill-in"),
    "--document-token unknown": (["--tokenizer", "bytes", "--document-token", "<x>", path("known.txt")], "<x>"),
    "nanoGPT ids above the vocabulary": (["--nanogpt", "300", path("nano", "train.bin")], "the vocabulary has 300"),
    "nanoGPT's odd file": (["--nanogpt", "300", write("odd.bin", b"abc")], "16-bit"),
    "a shard as nanoGPT's": (["--nanogpt", "300", path("known", "train_000.bin")], "shard already"),
    "--engine that is not for it": (["--engine", "tiktoken", "--tokenizer", path("learnt"), path("known.txt")],
                                    "engine"),
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

# ---- with the packages of scripts/requirements.txt: in .venv, or where this Python has them ----

python = ".venv/bin/python" if os.path.exists(".venv/bin/python") else sys.executable
have = {module: subprocess.run([python, "-c", "import " + module], capture_output=True).returncode == 0
        for module in ("pyarrow", "tokenizers", "tiktoken", "zstandard")}
for module in have:
    if not have[module]:
        print("skipped  what needs %s: make venv brings it" % module)


def run_with_packages(*arguments):
    return subprocess.run([python, "scripts/prepare_data.py", *arguments], capture_output=True)


def texts_of(*arguments):
    r = run_with_packages("--tokenizer", "bytes", "--val", "0", "--out", path("packages"), *arguments)
    return [bytes(x) for x in documents(stream("packages", "train"), 256)] if r.returncode == 0 else r.stderr


def refused(part, *arguments):
    r = run_with_packages("--out", path("refused"), *arguments)
    return r.returncode == 2 and part in r.stderr.decode() and b"Traceback" not in r.stderr, r.stderr


if have["pyarrow"]:
    make_tables = """if True:
        import json, os, sys
        import pyarrow as pa, pyarrow.parquet as pq
        folder = sys.argv[1]
        def table(*texts):
            return pa.table({"n": range(len(texts)), "text": pa.array(texts, pa.string())})
        a, b = table("one", None, "", "two \\u00e9"), table("three", "four")
        both = pa.concat_tables([a, b])
        pq.write_table(both, folder + "/t.parquet", row_group_size=2, compression="zstd")
        pq.write_table(both.rename_columns(["n", "content"]), folder + "/c.parquet")
        with pa.ipc.new_file(folder + "/file.arrow", both.schema) as f:
            f.write_table(both)
        def stream(path, table):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb") as raw, pa.ipc.new_stream(raw, table.schema) as f:
                f.write_table(table)
        for split in "train", "test":
            at = folder + "/saved/" + split
            stream(at + "/data-00000-of-00002.arrow", a if split == "train" else table("unseen"))
            stream(at + "/data-00001-of-00002.arrow", b)
            stream(at + "/cache-1f.arrow", b)
            names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
            json.dump({"_data_files": [{"filename": name} for name in names]}, open(at + "/state.json", "w"))
            features = {"text": {"dtype": "string", "_type": "Value"}}
            json.dump({"features": features}, open(at + "/dataset_info.json", "w"))
        json.dump({"splits": ["train", "test"]}, open(folder + "/saved/dataset_dict.json", "w"))
    """
    subprocess.run([python, "-c", make_tables, path()], check=True)
    want = [b"one", "two é".encode(), b"three", b"four"]
    for name in ("t.parquet", "file.arrow", "saved", "saved/train"):
        check(name, texts_of(path(name)) == want, texts_of(path(name)))
    check("saved/test", texts_of(path("saved/test")) == [b"unseen", b"three", b"four"])
    check("another column", texts_of("--text-key", "content", path("c.parquet")) == want)
    check("a missing column", *refused("there is: n, content", path("c.parquet")))
    check("a column of numbers", *refused("not text", "--text-key", "n", path("t.parquet")))
    content = open(path("t.parquet"), "rb").read()
    check("a damaged .parquet", *refused("cut.parquet", write("cut.parquet", content[:-20])))
    content = open(path("saved/train/data-00001-of-00002.arrow"), "rb").read()
    check("a damaged .arrow", *refused("cut.arrow", write("cut.arrow", content[: len(content) // 2])))

if have["zstandard"]:
    pack = """if True:
        import sys, zstandard
        data = sys.stdin.buffer.read()
        c = zstandard.ZstdCompressor(write_content_size=False)
        sys.stdout.buffer.write(c.compress(data[:20]) + c.compress(data[20:]))
    """
    packed = subprocess.run([python, "-c", pack], input=json_lines, capture_output=True, check=True).stdout
    check("two frames of no stated size", texts_of(write("frames.jsonl.zst", packed)) ==
          [b"one\n", b"lone \xed\xa0\x80"])
    for cut in (1, 10, len(packed) - 30):
        check("%d bytes cut off" % cut, *refused("middle", write("cut.jsonl.zst", packed[:-cut])))
    flipped = packed[:9] + bytes([packed[9] ^ 4]) + packed[10:]
    check("a bit flipped", *refused("flip.jsonl.zst", write("flip.jsonl.zst", flipped)))

mixed_name = write("mixed.txt", mixed)
for module, tokenizer in (("tokenizers", path("learnt")), ("tokenizers", ranked), ("tiktoken", ranked)):
    if have[module]:
        for engine in ("built-in", module):
            r = run_with_packages("--tokenizer", tokenizer, "--engine", engine, "--out", path("engine_" + engine),
                                  mixed_name, path("novels"))
        check("%s gives the built-in encoder's ids, %s" % (module, os.path.basename(tokenizer)),
              snapshot("engine_built-in") == snapshot("engine_" + module), r.stderr)

if have["tokenizers"]:
    # A kind that only the library knows: another normalizer, other pieces, another document token.
    tree = json.load(open(path("learnt", "tokenizer.json")))
    tree["normalizer"] = {"type": "NFC"}
    tree["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": r"\p{N}{1,2}|\s?\p{L}+|[^\p{N}\p{L}]"}, "behavior": "Isolated",
         "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]}
    tree["added_tokens"][0]["content"] = "<begin>"
    other = write("other.json", json.dumps(tree).encode())
    r = run_with_packages("--tokenizer", other, "--val", "0", "--document-token", "<begin>", "--out", path("other"),
                          path("novels", "0.txt"))
    ask = """if True:
        import sys, tokenizers
        print(tokenizers.Tokenizer.from_file(sys.argv[1]).encode(open(sys.argv[2]).read()).ids)"""
    ids = json.loads(subprocess.run([python, "-c", ask, other, path("novels", "0.txt")], capture_output=True).stdout)
    check("a tokenizer that only the library knows", stream("other", "train") == [400, *ids], r.stderr)
    check("its file is copied as it is", open(other, "rb").read() == snapshot("other")["tokenizer.json"])
    r = run("--tokenizer", other, "--document-token", "<begin>", "--out", path("refused"), path("known.txt"))
    check("without the library it is refused", r.returncode == 2 and b"tokenizers library" in r.stderr or
          python == sys.executable, r.stderr)
    r = run_with_packages("--benchmark", "--tokenizer", path("learnt"), "--workers", "1", path("novels", "0.txt"))
    out = r.stdout.decode().split("\n")
    check("--benchmark prints both", len(out) == 4 and out[0].startswith("library") and out[1].startswith("shards") and
          out[0].split()[-2] == out[1].split()[-2], r)

print("%d checks failed" % failed)
sys.exit(failed > 0)
PYTHON
