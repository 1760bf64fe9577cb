#!/usr/bin/env python3
"""Turns text into token shards that train_moe reads.

    scripts/prepare_data.py [--tokenizer bytes | train:N | FILE] [--out DIR] [--val SHARE] INPUT...

INPUT: text files (also .gz, .bz2, .xz), folders (walked in sorted order), globs, '-' for standard input, or .rdb files
of R packages, whose character vectors are texts by lines. A document is a file, or what stands between form feeds in
one. Empty documents are dropped.

--tokenizer  train:1024 (default) learns a byte-level BPE of 1024 tokens from the training part; bytes has one token a
             byte; FILE is a tokenizer.json of GPT-2's or DeepSeek-V3's kind. The document token comes on top.
--val 0.1    From 100 documents on, each is training or validation text as its hash says. Fewer are cut each: its last
             tenth, from the nearest paragraph border on, is for validation.

Written to DIR (default: shards/NAME), under temporary names until all is complete:
  train_000.bin ...  256 int32 (magic, version, tokens), then the ids: uint16 (20240520, 1) if the vocabulary has at
  val_000.bin ...    most 65536 tokens, else uint32 (20240801, 7). The document token stands before each document.
  tokenizer.json     in the format of Hugging Face's library
  data.json          what the ids mean, counts (tokens include document tokens, bytes_per_token is over both parts), and
                     what n-grams of bytes, counted in the training part, reach on the validation part (nats a byte)

Only the standard library is used. Text that spells a special token is text; ids never wrap.
"""

import argparse
import array
import bz2
import collections
import glob
import gzip
import hashlib
import heapq
import json
import lzma
import math
import os
import re
import signal
import struct
import sys
import time
import zlib

DOCUMENT_TOKEN = "<|document|>"
# Where a given tokenizer.json has no <|document|>; data/tokenizer_file.c has the same list.
DOCUMENT_TOKENS = [
    DOCUMENT_TOKEN, "<|endoftext|>", "<｜begin▁of▁sentence｜>", "<|begin_of_text|>", "[BOS]", "<s>",
]
FEW_DOCUMENTS = 100
NGRAM_BYTES_MAX = 8_000_000
UNICODE_TABLE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "data", "unicode_classes.c")

GPT2_REGEX = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DEEPSEEK_V3_REGEXES = [
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^""" "\r\n" r"""\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
    r" ?[\p{P}\p{S}]+[" "\r\n" r"]*|\s*[" "\r\n" r"]+|\s+(?!\S)|\s+",
]


def die(message, hint):
    print("error: %s\nhint:  %s" % (message, hint), file=sys.stderr)
    sys.exit(2)


START = time.time()


def say(word, message):
    print("%-8s %s  (%.1f s)" % (word, message, time.time() - START), file=sys.stderr, flush=True)


# ---- documents ------------------------------------------------------------------------------------------------------


def walk(folder, skip):
    """The files under a folder in sorted order, without hidden ones and without the folder `skip`."""
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(f for f in folders if f[0] != "." and os.path.realpath(os.path.join(root, f)) != skip)
        for name in sorted(files):
            if name[0] != ".":
                yield os.path.join(root, name)


def input_files(inputs, out):
    """(path, found by walking) of each input file, once."""
    seen = set()
    for item in inputs:
        if item == "-" or os.path.isfile(item):
            found = [(item, False)]
        elif os.path.isdir(item):
            found = [(path, True) for path in walk(item, os.path.realpath(out))]
        else:
            found = [(path, False) for path in sorted(glob.glob(item, recursive=True)) if os.path.isfile(path)]
        if not found:
            die("%s: no such file" % item, "an input is a text file, a folder, a glob, or - for standard input")
        for path, walked in found:
            if path == "-" or os.path.realpath(path) not in seen:
                seen.add(os.path.realpath(path))
                yield path, walked


def read_bytes(path):
    openers = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    try:
        if path == "-":
            return sys.stdin.buffer.read()
        with openers.get(os.path.splitext(path)[1], open)(path, "rb") as f:
            return f.read()
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as e:
        die("%s: cannot read: %s" % (path, getattr(e, "strerror", None) or e), "is it a readable, undamaged file?")


def rdb_records(data):
    """The objects of an R lazy-load data base: for each its unpacked length, big-endian, and the packed bytes, with a
    letter before them unless they are zlib's."""
    at = 0
    while at < len(data):
        length = int.from_bytes(data[at : at + 4], "big")
        kind = data[at + 4 : at + 5]
        if kind == b"2":
            packed, unpacker = data[at + 5 :], bz2.BZ2Decompressor()
        elif kind == b"Z":
            packed, unpacker = data[at + 5 :], lzma.LZMADecompressor()
        else:
            packed, unpacker = data[at + 4 :], zlib.decompressobj()
        record = unpacker.decompress(packed)
        if len(record) != length or not unpacker.eof:
            raise ValueError("%d bytes instead of %d in the record at byte %d" % (len(record), length, at))
        yield record
        at = len(data) - len(unpacker.unused_data)


def rdb_text(record):
    """The strings of a serialised R object joined by line ends; None if it is anything but a character vector.

    The format is XDR: "X\\n", three version words (from 3 on, the name of an encoding), then the object. The low
    byte of its first word is its type: 16 is a vector of strings, each of which is flags, length (-1: NA) and bytes."""

    def word(at):
        return struct.unpack_from(">i", record, at)[0]

    at = 14
    if record[:2] != b"X\n":
        return None
    if word(2) >= 3:
        at += 4 + word(at)
    if word(at) & 0xFF != 16:
        return None
    lines = []
    count, at = word(at + 4), at + 8
    for _ in range(count):
        length = max(word(at + 4), 0)
        lines.append(record[at + 8 : at + 8 + length])
        at += 8 + length
    return b"\n".join(lines) + b"\n"


def file_documents(path, data):
    """The documents of a file; None if it is not text."""
    if path.endswith(".rdb"):
        try:
            texts = [rdb_text(record) for record in rdb_records(data)]
        except (zlib.error, lzma.LZMAError, OSError, ValueError, EOFError, struct.error) as e:
            die("%s: not a whole R data base: %s" % (path, e), "expected is the Rdata.rdb of an installed R package")
        return [text for text in texts if text is not None]
    if b"\0" in data:
        return None
    if data.startswith(b"\xef\xbb\xbf"):
        data = data[3:]
    return re.split(rb"\f\n?", data)


def read_documents(inputs, out):
    """All documents with text in them, and the names of their files."""
    documents, names, skipped = [], [], 0
    for path, walked in input_files(inputs, out):
        found = file_documents(path, read_bytes(path))
        if found is None and not walked:
            hint = "UTF-16 text becomes UTF-8 with: iconv -f utf-16 -t utf-8"
            die("%s: not text: it has zero bytes in it" % path, hint)
        found = [document for document in found or [] if document.strip()]
        skipped += not found
        documents += found
        if found:
            names.append("standard input" if path == "-" else os.path.basename(path))
    if not documents:
        die("no text in the input", "the files are empty, or hold nothing but white space or binary data")
    note = ", %d files without text skipped" % skipped if skipped else ""
    say("read", "%s documents, %s bytes%s" % (comma(len(documents)), comma(sum(map(len, documents))), note))
    return documents, names


def cut_point(document, share):
    """Where the last `share` of a document begins: at the nearest paragraph, else line, else character border."""
    target = round(len(document) * (1 - share))
    slack = min(round(len(document) * share / 2), 1 << 16)
    for border in (rb"\n[ \t\r]*\n\s*", rb"\n"):
        ends = [target - slack + m.end() for m in re.finditer(border, document[target - slack : target + slack])]
        if ends:
            return min(ends, key=lambda end: abs(end - target))
    while target < len(document) and document[target] & 0xC0 == 0x80:
        target += 1
    return target


def split_documents(documents, share):
    """(training documents, validation documents)."""
    train, val = [], []
    for document in documents:
        if share == 0:
            train.append(document)
        elif len(documents) >= FEW_DOCUMENTS:
            draw = int.from_bytes(hashlib.blake2b(document, digest_size=8).digest(), "big") / 2**64
            (val if draw < share else train).append(document)
        else:
            cut = cut_point(document, share)
            parts = document[:cut], document[cut:]
            if all(part.strip() for part in parts):
                train.append(parts[0])
                val.append(parts[1])
            else:
                train.append(document)
    for name, part in (("training", train), ("validation", val)):
        if not part and (part is train or share > 0):
            hint = "the text is too short for --val %g; --val 0 writes none" % share
            die("nothing is left for the %s part" % name, hint)
    return train, val


# ---- cutting text into pieces ---------------------------------------------------------------------------------------


def read_classes():
    """Letter of a class -> its characters as they stand inside [...]; from the table that the binary is built with."""
    letters = {"LETTER": "L", "NUMBER": "N", "MARK": "M", "PUNCT": "P", "SYMBOL": "S", "SPACE": "s"}
    try:
        with open(UNICODE_TABLE) as f:
            rows = re.findall(r"\{0x(\w+), 0x(\w+), (\w+)\}", f.read())
    except OSError as e:
        die("%s: %s" % (UNICODE_TABLE, e.strerror), "run this script from a checkout of the repository")
    classes = collections.defaultdict(str)
    for first, last, name in rows:
        classes[letters[name]] += "\\U%08x-\\U%08x" % (int(first, 16), int(last, 16))
    return classes


def compile_regex(regex, classes):
    r"""Python's re knows no \p{L}, and its \s differs: both are spelt out. One group around the whole match."""
    out, inside = "", False
    for part in re.findall(r"\\p\{\w\}|\\.|.", regex, re.DOTALL):
        if part[:2] in ("\\p", "\\s", "\\S"):
            ranges = classes[part[3] if part[1] == "p" else "s"]
            part = ranges if inside else "[%s%s]" % ("^" if part == "\\S" else "", ranges)
        elif part in "[]":
            inside = part == "["
        out += part
    return re.compile("(" + out + ")")


class Splitter:
    """Cuts text by one regular expression after the other, each inside the pieces of the one before."""

    def __init__(self, regexes):
        classes = read_classes()
        self.regexes = [compile_regex(regex, classes) for regex in regexes]
        # White space after a letter begins a piece whatever follows, so long texts may be cut there.
        self.border = re.compile("(?<=[%s])(?=[%s])" % (classes["L"], classes["s"]))

    def chunks(self, text, size=1 << 20):
        start = 0
        while len(text) - start > size:
            border = self.border.search(text, start + size)
            if not border:
                break
            yield text[start : border.start()]
            start = border.start()
        yield text[start:]

    def pieces(self, document):
        """Lists of pieces, one list a chunk. A byte outside UTF-8 is a lone surrogate, a character of no class."""
        for chunk in self.chunks(document.decode("utf-8", "surrogateescape")):
            pieces = [chunk]
            for regex in self.regexes:
                pieces = [part for piece in pieces for part in regex.split(piece) if part]
            yield pieces


def piece_bytes(piece):
    return piece.encode("utf-8", "surrogateescape")


# ---- byte-pair encoding ---------------------------------------------------------------------------------------------


def merge_word(word, pair, merged):
    out, i = [], 0
    while i < len(word):
        if i + 1 < len(word) and word[i] == pair[0] and word[i + 1] == pair[1]:
            out.append(merged)
            i += 2
        else:
            out.append(word[i])
            i += 1
    return out


def learn_merges(piece_counts, vocab_size):
    """Merges the most frequent pair (of several, the one of the smallest ids) until there are vocab_size tokens.

    Returns the tokens' bytes and the merges in order. A heap holds (-count, pair); an entry whose count has changed
    since is passed over. Only the words that may hold the merged pair are looked at again."""
    vocab = [bytes([byte]) for byte in range(256)]
    ids = {token: i for i, token in enumerate(vocab)}
    words, counts = [list(piece) for piece in piece_counts], list(piece_counts.values())
    pair_counts, where = collections.defaultdict(int), collections.defaultdict(set)
    for i, word in enumerate(words):
        for pair in zip(word, word[1:]):
            pair_counts[pair] += counts[i]
            where[pair].add(i)
    heap = [(-count, pair) for pair, count in pair_counts.items()]
    heapq.heapify(heap)
    merges = {}
    while len(vocab) < vocab_size:
        if not heap:
            die("the text is too short to learn %d tokens from" % vocab_size, "try --tokenizer train:%d" % len(vocab))
        count, pair = heapq.heappop(heap)
        if -count != pair_counts[pair]:
            continue
        token = vocab[pair[0]] + vocab[pair[1]]
        merged = ids.setdefault(token, len(vocab))
        if merged == len(vocab):
            vocab.append(token)
        merges.setdefault(pair, merged)
        changed = set()
        for i in where.pop(pair):
            before, after = words[i], merge_word(words[i], pair, merged)
            if len(after) == len(before):
                continue
            words[i] = after
            for old in zip(before, before[1:]):
                pair_counts[old] -= counts[i]
                changed.add(old)
            for new in zip(after, after[1:]):
                pair_counts[new] += counts[i]
                where[new].add(i)
                changed.add(new)
        for pair in changed:
            if pair_counts[pair] > 0:
                heapq.heappush(heap, (-pair_counts[pair], pair))
    return vocab, list(merges)


def merge_ids(ids, merges):
    """Applies the merge of the lowest rank, the leftmost first, until there is none. merges: pair -> (rank, merged)."""
    n = len(ids)
    following, previous = list(range(1, n + 1)), list(range(-1, n - 1))
    heap = [(merges[pair][0], i) for i, pair in enumerate(zip(ids, ids[1:])) if pair in merges]
    heapq.heapify(heap)
    while heap:
        rank, left = heapq.heappop(heap)
        right = following[left]
        merge = merges.get((ids[left], ids[right])) if right < n else None
        if merge is None or merge[0] != rank:
            continue
        ids[left], ids[right] = merge[1], None
        after = following[left] = following[right]
        if after < n:
            previous[after] = left
        for a, b in ((previous[left], left), (left, after)):
            merge = merges.get((ids[a], ids[b])) if a >= 0 and b < n else None
            if merge:
                heapq.heappush(heap, (merge[0], a))
    return [i for i in ids if i is not None]


def alphabet():
    """GPT-2's spelling of the 256 bytes as printable characters."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{byte: chr(byte) for byte in printable}, **{byte: chr(0x100 + i) for i, byte in enumerate(others)}}


class Tokenizer:
    """label: for people; tree: the content of tokenizer.json; merges: pair of ids -> (rank, id)."""

    def __init__(self, label, tree, splitter):
        self.label, self.tree, self.splitter = label, tree, splitter
        vocab = tree["model"]["vocab"]
        added = {token["content"]: token["id"] for token in tree.get("added_tokens") or []}
        self.vocab_size = 1 + max([*vocab.values(), *added.values()])
        self.document_token = next((added[token] for token in DOCUMENT_TOKENS if token in added), None)
        self.byte_ids = [vocab[alphabet()[byte]] for byte in range(256)]
        self.merges = {}
        for rank, merge in enumerate(tree["model"]["merges"]):
            left, right = merge.split(" ") if isinstance(merge, str) else merge
            self.merges[vocab[left], vocab[right]] = rank, vocab[left + right]
        self.cache = {}

    def encode_piece(self, piece):
        ids = merge_ids([self.byte_ids[byte] for byte in piece_bytes(piece)], self.merges)
        if len(self.cache) > 1_000_000:
            self.cache.clear()
        self.cache[piece] = ids
        return ids

    def encode(self, document):
        """The ids of a document, in lists."""
        if not self.merges:
            for at in range(0, len(document), 1 << 20):
                yield [self.byte_ids[byte] for byte in document[at : at + (1 << 20)]]
            return
        for pieces in self.splitter.pieces(document):
            ids = []
            for piece in pieces:
                ids += self.cache.get(piece) or self.encode_piece(piece)
            yield ids


def tokenizer_tree(vocab, merges):
    spell = alphabet()
    spellings = ["".join(spell[byte] for byte in token) for token in vocab]
    document = {"id": len(vocab), "content": DOCUMENT_TOKEN, "single_word": False, "lstrip": False, "rstrip": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{**document, "normalized": False, "special": True}],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {spelling: i for i, spelling in enumerate(spellings)},
            "merges": ["%s %s" % (spellings[left], spellings[right]) for left, right in merges],
        },
    }


def learn_tokenizer(documents, vocab_size):
    splitter = Splitter([GPT2_REGEX])
    counts = collections.Counter()
    for document in documents:
        for pieces in splitter.pieces(document):
            counts.update(pieces)
    # A piece longer than any word of a language (a line of base64) would be gone through again at every merge.
    words = collections.Counter()
    for piece, count in counts.items():
        piece = piece_bytes(piece)
        for at in range(0, len(piece), 128):
            words[piece[at : at + 128]] += count
    vocab, merges = learn_merges(words, vocab_size)
    say("learn", "%s merges from %s different pieces" % (comma(len(merges)), comma(len(words))))
    return Tokenizer("%s-token BPE" % comma(vocab_size), tokenizer_tree(vocab, merges), splitter)


def splits_of(tree):
    """The regular expressions of a tokenizer.json that the binary supports too; None for any other."""
    pre = tree.get("pre_tokenizer") or {}
    parts = pre["pretokenizers"] if pre.get("type") == "Sequence" else [pre]
    last = parts[-1]
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space", True):
        return None
    regexes = [part["pattern"]["Regex"] for part in parts[:-1] if part.get("behavior") == "Isolated"]
    if last.get("use_regex", True):
        regexes.append(GPT2_REGEX)
    known = len(regexes) == len(parts) - (not last.get("use_regex", True))
    return regexes if known and regexes in ([GPT2_REGEX], DEEPSEEK_V3_REGEXES) else None


def load_tokenizer(path):
    if os.path.isdir(path):
        path = os.path.join(path, "tokenizer.json")
    try:
        tree = json.loads(read_bytes(path).decode("utf-8"))
        regexes = splits_of(tree)
        tokenizer = Tokenizer("tokenizer %s" % os.path.basename(path), tree, Splitter(regexes or [GPT2_REGEX]))
        normalizer = (tree.get("normalizer") or {}).get("normalizers", tree.get("normalizer"))
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        die("%s: not a byte-level BPE tokenizer.json: %r" % (path, e), "--tokenizer takes bytes, train:N or a file")
    if regexes is None or normalizer:
        what = "normalizer" if regexes else "pre_tokenizer"
        die("%s: its %s is not supported" % (path, what), "supported are GPT-2's kind and DeepSeek-V3's")
    if tokenizer.document_token is None:
        die("%s: none of its added tokens can stand before a document" % path, "known: " + ", ".join(DOCUMENT_TOKENS))
    return tokenizer


def make_tokenizer(name, train_documents):
    if name == "bytes":
        return Tokenizer("bytes", tokenizer_tree([bytes([byte]) for byte in range(256)], []), None)
    if not name.startswith("train:"):
        return load_tokenizer(name)
    size = name[len("train:") :]
    if not size.isdigit() or not 256 < int(size) <= 1_000_000:
        die("--tokenizer %s: N is from 257 to 1000000" % name, "train:1024 suits a small text, train:32000 a large one")
    return learn_tokenizer(train_documents, int(size))


# ---- writing --------------------------------------------------------------------------------------------------------


class Output:
    """Files that get their names when all of them are complete."""

    def __init__(self, folder):
        self.folder, self.names, self.made = folder, [], not os.path.isdir(folder)
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as e:
            die("%s: cannot make the folder: %s" % (folder, e.strerror), "choose another with --out")
        if self.shards() and not os.path.exists(os.path.join(folder, "data.json")):
            die("%s has shards but no data.json: not this script's" % folder, "choose another folder with --out")

    def shards(self):
        return [name for name in sorted(os.listdir(self.folder)) if re.fullmatch(r"(train|val)_\d+\.bin", name)]

    def path(self, name):
        return os.path.join(self.folder, name)

    def create(self, name):
        self.names.append(name)
        return open(self.path(name + ".tmp"), "wb")

    @staticmethod
    def finish(f):
        f.flush()
        os.fsync(f.fileno())
        f.close()

    def write_json(self, name, tree):
        f = self.create(name)
        f.write((json.dumps(tree, ensure_ascii=False, indent=1) + "\n").encode("utf-8"))
        self.finish(f)

    def commit(self):
        """data.json goes first and comes last: while names change, the folder is seen not to be whole."""
        if os.path.exists(self.path("data.json")):
            os.remove(self.path("data.json"))
        for name in self.shards():
            if name not in self.names:
                os.remove(self.path(name))
        for name in sorted(self.names, key=lambda name: name == "data.json"):
            os.replace(self.path(name + ".tmp"), self.path(name))
        self.names = []

    def discard(self):
        for name in self.names:
            if os.path.exists(self.path(name + ".tmp")):
                os.remove(self.path(name + ".tmp"))
        if self.made and not os.listdir(self.folder):
            os.rmdir(self.folder)


class ShardWriter:
    def __init__(self, output, split, vocab_size, shard_tokens):
        self.output, self.split, self.shard_tokens = output, split, shard_tokens
        wide = vocab_size > 65536
        self.magic, self.version, self.typecode = (20240801, 7, "I") if wide else (20240520, 1, "H")
        self.file, self.n_shards, self.n_tokens, self.in_shard = None, 0, 0, 0

    def add(self, ids):
        at = 0
        while at < len(ids):
            if self.file is None:
                self.file = self.output.create("%s_%03d.bin" % (self.split, self.n_shards))
                self.file.write(bytes(1024))
                self.in_shard = 0
            # An id that does not fit raises OverflowError: it is never cut to 16 bits.
            part = array.array(self.typecode, ids[at : at + self.shard_tokens - self.in_shard])
            at += len(part)
            self.in_shard += len(part)
            self.n_tokens += len(part)
            if sys.byteorder == "big":
                part.byteswap()
            self.file.write(part.tobytes())
            if self.in_shard == self.shard_tokens:
                self.end_shard()

    def end_shard(self):
        if self.file:
            self.file.seek(0)
            self.file.write(struct.pack("<3i", self.magic, self.version, self.in_shard))
            self.output.finish(self.file)
            self.file, self.n_shards = None, self.n_shards + 1


def write_split(output, split, documents, tokenizer, shard_tokens):
    writer = ShardWriter(output, split, tokenizer.vocab_size, shard_tokens)
    for document in documents:
        writer.add([tokenizer.document_token])
        for ids in tokenizer.encode(document):
            writer.add(ids)
    writer.end_shard()
    shards = "%d shard%s" % (writer.n_shards, "" if writer.n_shards == 1 else "s")
    say("encode", "%s: %s documents, %s tokens in %s" % (split, comma(len(documents)), comma(writer.n_tokens), shards))
    return writer.n_tokens


# ---- n-grams --------------------------------------------------------------------------------------------------------


def ngram_counts(data, n):
    return collections.Counter(zip(*(data[i:] for i in range(n))))


def ngram_ladder(train, val, orders=(2, 3, 4)):
    """Held-out nats a byte of n-grams with Witten-Bell smoothing. With N(h) and T(h) the occurrences of the context h
    and the kinds of bytes seen after it, p(c|h) = (count(hc) + T(h) p(c|h')) / (N(h) + T(h)), h' being h without its
    first byte, down to 1/256."""
    seen = [ngram_counts(train, n) for n in range(1, max(orders) + 1)]
    contexts = []
    for counts in seen:
        totals, kinds = collections.defaultdict(int), collections.defaultdict(int)
        for gram, count in counts.items():
            totals[gram[:-1]] += count
            kinds[gram[:-1]] += 1
        contexts.append((totals, kinds))

    def probability(gram):
        p = 1 / 256
        for n in range(1, len(gram) + 1):
            part = gram[-n:]
            totals, kinds = contexts[n - 1]
            n_kinds = kinds.get(part[:-1], 0)
            if n_kinds:
                p = (seen[n - 1].get(part, 0) + n_kinds * p) / (totals[part[:-1]] + n_kinds)
        return p

    ladder = {}
    for n in orders:
        counts = ngram_counts(val, n)
        nats = -sum(count * math.log(probability(gram)) for gram, count in counts.items())
        if counts:
            ladder["bigram" if n == 2 else "%d-gram" % n] = round(nats / sum(counts.values()), 4)
    return ladder


# ---- main -----------------------------------------------------------------------------------------------------------


def comma(n):
    return format(n, ",")


class ArgumentParser(argparse.ArgumentParser):
    def error(self, message):
        die(message, "scripts/prepare_data.py --help")


def parse_arguments():
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="+", metavar="INPUT")
    parser.add_argument("--tokenizer", default="train:1024", help="bytes, train:N or a tokenizer.json")
    parser.add_argument("--out", help="folder of the shards; default: shards/NAME, after the first input")
    parser.add_argument("--val", type=float, default=0.1, help="share for validation, 0 to 0.5; default 0.1")
    parser.add_argument("--shard-tokens", type=int, default=100_000_000, help="tokens a file; default 100000000")
    parser.add_argument("--no-ngram", action="store_true", help="leave out the n-grams")
    args = parser.parse_args()
    if not 0 <= args.val <= 0.5:
        die("--val %g: from 0 to 0.5" % args.val, "0.1 takes a tenth of the text for validation")
    if not 1 <= args.shard_tokens < 2**31:
        die("--shard-tokens %d: from 1 to 2147483647" % args.shard_tokens, "the default is 100000000")
    if args.out is None:
        name = os.path.basename(os.path.abspath(args.inputs[0])).split(".")[0] if args.inputs[0] != "-" else "stdin"
        args.out = os.path.join("shards", re.sub(r"[^\w-]+", "_", name) or "text")
    return args


def write_all(args, output, documents, names):
    train, val = split_documents(documents, args.val)
    tokenizer = make_tokenizer(args.tokenizer, train)
    parts = {"train": train, "val": val} if val else {"train": train}
    tokens = {split: write_split(output, split, parts[split], tokenizer, args.shard_tokens) for split in parts}
    n_bytes = {split: sum(map(len, parts[split])) for split in parts}
    data = {
        "version": 1,
        "tokenizer": "tokenizer.json",
        "vocab_size": tokenizer.vocab_size,
        "document_token": tokenizer.document_token,
        "bytes_per_token": round(sum(n_bytes.values()) / sum(tokens.values()), 4),
        "train_tokens": tokens["train"],
        "val_tokens": tokens.get("val", 0),
        "train_bytes": n_bytes["train"],
        "val_bytes": n_bytes.get("val", 0),
        "documents": len(documents),
        "train_documents": len(train),
        "val_documents": len(val),
        "source": names if len(names) <= 1000 else [*names[:1000], "and %d more" % (len(names) - 1000)],
    }
    if val and not args.no_ngram:
        data["ngram"] = ngram_ladder(b"".join(train)[:NGRAM_BYTES_MAX], b"".join(val)[: NGRAM_BYTES_MAX // 8])
        say("n-grams", ", ".join("%s %.3f" % item for item in data["ngram"].items()) + " nats a byte, held out")
    output.write_json("tokenizer.json", tokenizer.tree)
    output.write_json("data.json", data)
    output.commit()
    print("%s: train %s tokens, val %s; %s, vocabulary %s, %.2f bytes a token; %s documents" % (
        args.out, comma(data["train_tokens"]), comma(data["val_tokens"]), tokenizer.label, comma(tokenizer.vocab_size),
        data["bytes_per_token"], comma(len(documents))))


def main():
    args = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    output = Output(args.out)
    try:
        documents, names = read_documents(args.inputs, args.out)
        write_all(args, output, documents, names)
    except OSError as e:
        die("%s: %s" % (e.filename or args.out, e.strerror), "is there room, and may you write there? --out DIR")
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        output.discard()


if __name__ == "__main__":
    main()
