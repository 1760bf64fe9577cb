"""Tokenizers: the content of their tokenizer.json, and where it comes from: bytes, learning, a given file."""

import base64
import collections
import hashlib
import json
import os
import re

from .bpe import DEEPSEEK_V3_REGEXES, GPT2_REGEX, Encoder, Splitter, alphabet, learn_merges, merge_ids, piece_bytes
from .common import comma, die, say
from .files import Source
from .unpack import blocks

DOCUMENT_TOKEN = "<|document|>"
# Where a given tokenizer.json has no <|document|>; data/tokenizer_file.c has the same list.
DOCUMENT_TOKENS = [
    DOCUMENT_TOKEN, "<|endoftext|>", "<｜begin▁of▁sentence｜>", "<|begin_of_text|>", "[BOS]", "<s>",
]
FIM_TOKENS = [
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
]
# Rank files do not say how text is cut. Those of these numbers of tokens are known to be cut otherwise than GPT-2's.
RANKS_NOT_GPT2 = {100256: "cl100k_base", 199998: "o200k_base"}
LEARN_BYTES_MAX = 1 << 28
KINDS = "--tokenizer takes bytes, train:N, a tokenizer.json or a .tiktoken file"


class Tokenizer:
    """label: for people; raw: the bytes of tokenizer.json; ranked: from a rank file."""

    def __init__(self, label, raw, ranked=False):
        self.label, self.raw, self.ranked = label, raw, ranked
        self.tree = json.loads(raw)
        self.model = self.tree["model"]
        vocab = self.model["vocab"]
        # A Unigram model has a list of (token, score).
        vocab = vocab if isinstance(vocab, dict) else {token: i for i, (token, _) in enumerate(vocab)}
        self.added = {token["content"]: token["id"] for token in self.tree.get("added_tokens") or []}
        self.vocab = vocab
        self.vocab_size = 1 + max([*vocab.values(), *self.added.values()])
        self.document_token = next((self.added[token] for token in DOCUMENT_TOKENS if token in self.added), None)
        self.regexes = splits_of(self.tree)
        self.built_in = None

    @property
    def sha256(self):
        return hashlib.sha256(self.raw).hexdigest()

    @property
    def typecode(self):
        return "I" if self.vocab_size > 65536 else "H"

    @property
    def may_be_cut(self):
        """Whether ids stay the same if a long text is cut where a letter is followed by white space: so in byte-level
        BPE, where pieces are words, but not where a whole text is one piece."""
        pre = self.tree.get("pre_tokenizer") or {}
        last = (pre.get("pretokenizers") or [pre])[-1]
        return last.get("type") == "ByteLevel" and not last.get("add_prefix_space", True)

    def id_of(self, token):
        return self.added.get(token, self.vocab.get(token))

    def fim_tokens(self, names):
        """The ids of prefix, suffix, middle: of the three names, else of the first known three."""
        for three in [names] if names else FIM_TOKENS:
            ids = [self.id_of(name) for name in three]
            if None not in ids:
                return ids
        missing = "not all of " + ", ".join(names) if names else "no known fill-in-the-middle tokens"
        die("%s: it has %s" % (self.label, missing), "--fim-tokens PREFIX,SUFFIX,MIDDLE names three of its tokens")

    def token_bytes(self):
        """Id -> how many bytes of text it stands for; added tokens stand for none. Right for byte-level vocabularies,
        whose spellings have a character a byte."""
        return {i: len(token) for token, i in self.vocab.items() if token not in self.added}

    def encoder(self):
        """The built-in encoder; None if this is not of its kind."""
        if self.regexes is None:
            return None
        if self.built_in is None:
            self.built_in = Encoder(self.vocab, self.model["merges"], Splitter(self.regexes))
        return self.built_in

    def splitter(self):
        return Splitter(self.regexes) if self.regexes else None


# ---- tokenizer.json -------------------------------------------------------------------------------------------------


def tokenizer_json(vocab, merges, added):
    """The bytes of a tokenizer.json of GPT-2's kind. vocab: the tokens' bytes; added tokens get the ids after them."""
    spell = alphabet()
    spellings = ["".join(spell[byte] for byte in token) for token in vocab]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tree = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": len(vocab) + i, "content": token, **flags} for i, token in enumerate(added)],
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
    return (json.dumps(tree, ensure_ascii=False, indent=1) + "\n").encode("utf-8")


def splits_of(tree):
    """The regular expressions of a tokenizer.json that the trainer supports too; None for any other."""
    model, normalizer = tree["model"], tree.get("normalizer") or {}
    if model.get("type", "BPE") != "BPE" or normalizer.get("normalizers", normalizer):
        return None
    if any(model.get(key) for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback",
                                      "ignore_merges")):
        return None
    pre = tree.get("pre_tokenizer") or {}
    parts = pre["pretokenizers"] if pre.get("type") == "Sequence" else [pre]
    last = parts[-1]
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space", True):
        return None
    regexes = [part["pattern"].get("Regex") for part in parts[:-1] if part.get("behavior") == "Isolated"]
    if last.get("use_regex", True):
        regexes.append(GPT2_REGEX)
    known = len(regexes) == len(parts) - (not last.get("use_regex", True))
    return regexes if known and regexes in ([GPT2_REGEX], DEEPSEEK_V3_REGEXES) else None


def load_json(path, raw):
    try:
        tokenizer = Tokenizer("tokenizer %s" % os.path.basename(path), raw)
        if tokenizer.regexes is not None:
            tokenizer.encoder()
        return tokenizer
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        die("%s: not a tokenizer.json: %r" % (path, e), KINDS)


# ---- rank files -----------------------------------------------------------------------------------------------------


def ranks_to_merges(vocab):
    """The merges behind ranks: a token is made of the two parts that the merges before it leave of its bytes."""
    ids = {token: i for i, token in enumerate(vocab)}
    pairs, merges = {}, []
    for rank, token in enumerate(vocab):
        if len(token) == 1:
            continue
        parts = merge_ids([ids[token[i : i + 1]] for i in range(len(token))], pairs)
        if len(parts) != 2:
            raise ValueError("the token of rank %d is not made of two of lower ranks" % rank)
        pairs[tuple(parts)] = rank, rank
        merges.append(parts)
    return merges


def load_ranks(path, raw, fim):
    """A file of tiktoken: a line a token, its bytes in base64 and its rank, which is its id."""
    try:
        rows = [line.split() for line in raw.splitlines() if line.strip()]
        tokens = {int(rank): base64.b64decode(token, validate=True) for token, rank in rows}
        if sorted(tokens) != list(range(len(rows))) or len(set(tokens.values())) != len(rows):
            raise ValueError("the ranks are not 0, 1, 2, ... of different tokens")
        vocab = [tokens[rank] for rank in range(len(tokens))]
        if {token for token in vocab if len(token) == 1} != {bytes([byte]) for byte in range(256)}:
            raise ValueError("not every byte is a token")
        if len(vocab) in RANKS_NOT_GPT2:
            die("%s: %s cuts text otherwise than GPT-2" % (path, RANKS_NOT_GPT2[len(vocab)]),
                "give the tokenizer.json of a model that uses it")
        merges = ranks_to_merges(vocab)
    except ValueError as e:
        die("%s: not a rank file of tiktoken: %s" % (path, e), KINDS)
    added = ["<|endoftext|>", *(FIM_TOKENS[0] if fim else ())]
    return Tokenizer("tokenizer %s" % os.path.basename(path), tokenizer_json(vocab, merges, added), ranked=True)


# ---- which one ------------------------------------------------------------------------------------------------------


def learnt_size(name):
    """N of train:N, else None."""
    if not name.startswith("train:"):
        return None
    size = name[len("train:") :]
    if not size.isdigit() or not 256 < int(size) <= 1_000_000:
        die("--tokenizer %s: N is from 257 to 1000000" % name, "train:1024 suits a small text, train:32000 a large one")
    return int(size)


def given_tokenizer(name, fim):
    """The tokenizer of --tokenizer, unless it has to be learnt. fim: whether fill-in-the-middle tokens are wanted."""
    if name == "bytes":
        return byte_tokenizer(fim)
    path = os.path.join(name, "tokenizer.json") if os.path.isdir(name) else name
    if not os.path.isfile(path):
        die("--tokenizer %s: no such file" % name, KINDS)
    raw = b"".join(blocks(Source(path)))
    if re.match(rb"[A-Za-z0-9+/=]+ \d+\r?\n", raw):
        return load_ranks(path, raw, fim)
    return load_json(path, raw)


def added_tokens(fim):
    return [DOCUMENT_TOKEN, *(FIM_TOKENS[0] if fim else ())]


def byte_tokenizer(fim):
    return Tokenizer("bytes", tokenizer_json([bytes([byte]) for byte in range(256)], [], added_tokens(fim)))


def learn_tokenizer(documents, size, fim):
    """documents: the training part; its first LEARN_BYTES_MAX bytes are learnt from."""
    splitter = Splitter([GPT2_REGEX])
    counts, n_bytes = collections.Counter(), 0
    for document in documents:
        for pieces in splitter.pieces(document):
            counts.update(pieces)
        n_bytes += len(document)
        if n_bytes >= LEARN_BYTES_MAX:
            break
    # A piece longer than any word of a language (a line of base64) would be gone through again at every merge.
    words = collections.Counter()
    for piece, count in counts.items():
        piece = piece_bytes(piece)
        for at in range(0, len(piece), 128):
            words[piece[at : at + 128]] += count
    vocab, merges = learn_merges(words, size)
    say("learn", "%s merges from %s different pieces" % (comma(len(merges)), comma(len(words))))
    return learnt_tokenizer(tokenizer_json(vocab, merges, added_tokens(fim)), size)


def learnt_tokenizer(raw, size):
    return Tokenizer("%s-token BPE" % comma(size), raw)
