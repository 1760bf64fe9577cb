"""Byte-level BPE in plain Python: cutting text into pieces, learning merges, applying them."""

import collections
import heapq
import os
import re

from .common import die

UNICODE_TABLE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "data", "unicode_classes.c")

GPT2_REGEX = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DEEPSEEK_V3_REGEXES = [
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^""" "\r\n" r"""\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
    r" ?[\p{P}\p{S}]+[" "\r\n" r"]*|\s*[" "\r\n" r"]+|\s+(?!\S)|\s+",
]

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


class Encoder:
    """Text to ids with the merges of a tokenizer.json; vocab: spelling -> id. Takes any bytes."""

    def __init__(self, vocab, merges, splitter):
        spell = alphabet()
        self.splitter = splitter
        self.byte_ids = [vocab[spell[byte]] for byte in range(256)]
        self.merges = {}
        for rank, merge in enumerate(merges):
            left, right = merge.split(" ") if isinstance(merge, str) else merge
            self.merges[vocab[left], vocab[right]] = rank, vocab[left + right]
        self.cache = {}

    def encode_piece(self, piece):
        ids = merge_ids([self.byte_ids[byte] for byte in piece_bytes(piece)], self.merges)
        if len(self.cache) > 1_000_000:
            self.cache.clear()
        self.cache[piece] = ids
        return ids

    def encode(self, text):
        if not self.merges:
            return [self.byte_ids[byte] for byte in text]
        ids = []
        for pieces in self.splitter.pieces(text):
            for piece in pieces:
                ids += self.cache.get(piece) or self.encode_piece(piece)
        return ids
