"""nanoGPT's files: uint16 ids without a header, train.bin and val.bin, become shards."""

import array
import collections
import os
import sys

from .common import comma, die, plural, say
from .files import find_sources
from .shards import SPLITS, ShardWriter
from .tokenizer import given_tokenizer, learnt_size
from .unpack import BLOCK

MAGICS = {(20240520).to_bytes(4, "little"), (20240801).to_bytes(4, "little")}


def check_file(source):
    with open(source.path, "rb") as f:
        if f.read(4) in MAGICS:
            die("%s is a token shard already" % source.path, "train_moe reads it as it is")
    if source.packing or source.size % 2:
        die("%s: not a file of 16-bit ids" % source.path, "expected is what nanoGPT's prepare.py writes")


def id_blocks(source, first, n):
    """The ids first .. first + n of a file, in pieces."""
    with open(source.path, "rb") as f:
        f.seek(2 * first)
        while n > 0:
            block = array.array("H", f.read(min(BLOCK, 2 * n)))
            if sys.byteorder == "big":
                block.byteswap()
            if not block:
                die("%s has become shorter" % source.path, "is something writing it?")
            yield block
            n -= len(block)


def check_ids(source, first, block, vocab_size):
    if max(block) >= vocab_size:
        at = next(i for i, x in enumerate(block) if x >= vocab_size)
        die("%s: token %s is %d, the vocabulary has %d" % (source.path, comma(first + at), block[at], vocab_size),
            "--nanogpt VOCAB; GPT-2's is 50257")


def parts_of(sources, share):
    """{split: [(source, first, n)]}: files with val in their names are for validation, else the last `share`."""
    whole = {split: [(s, 0, s.size // 2) for s in sources if ("val" in s.name) == (split == "val")] for split in SPLITS}
    if whole["val"] or share == 0:
        return whole
    n_val = round(share * sum(n for _, _, n in whole["train"]))
    while n_val and whole["train"]:
        source, first, n = whole["train"].pop()
        take = min(n, n_val)
        whole["val"].insert(0, (source, first + n - take, take))
        if take < n:
            whole["train"].append((source, first, n - take))
        n_val -= take
    return whole


def convert(args, output):
    if output.progress:
        die("%s holds a stopped run of another command" % args.out, "--restart drops it; --out DIR writes elsewhere")
    if learnt_size(args.tokenizer or "bytes"):
        die("--tokenizer %s: the ids are there already" % args.tokenizer, "give the file of the tokenizer they are of")
    tokenizer = given_tokenizer(args.tokenizer, False) if args.tokenizer else None
    sources = [source for source in find_sources(args.inputs, args.out, "text") if not source.walked or
               source.path.endswith(".bin")]
    for source in sources:
        check_file(source)
    if not any(source.size for source in sources):
        die("no ids in the input", "expected is what nanoGPT's prepare.py writes, for example train.bin")
    if tokenizer and tokenizer.vocab_size > args.nanogpt:
        die("%s has %s tokens, --nanogpt %d is less" % (tokenizer.label, comma(tokenizer.vocab_size), args.nanogpt),
            "is it the tokenizer that made these ids?")
    data = {"version": 1, "vocab_size": args.nanogpt}
    if tokenizer:
        data.update(tokenizer="tokenizer.json", tokenizer_sha256=tokenizer.sha256)
        name = args.document_token
        token = tokenizer.document_token if name is None else tokenizer.id_of(name)
        if token is not None:
            data["document_token"] = token
        output.write_bytes("tokenizer.json", tokenizer.raw)
    names = []
    for split, parts in parts_of(sources, args.val).items():
        writer, counts = ShardWriter(output, split, False, args.shard_tokens), collections.Counter()
        for source, first, n in parts:
            for block in id_blocks(source, first, n):
                check_ids(source, first, block, args.nanogpt)
                first += len(block)
                counts.update(block)
                writer.add(block.tobytes())
        writer.end_shard()
        names += writer.names()
        data[split + "_tokens"] = writer.n_tokens
        if tokenizer:
            lengths = tokenizer.token_bytes()
            data[split + "_bytes"] = sum(n * lengths.get(token, 0) for token, n in counts.items())
        say("convert", "%s: %s tokens in %s" % (split, comma(writer.n_tokens), plural(writer.n_shards, "shard")))
    n_tokens = data["train_tokens"] + data["val_tokens"]
    if tokenizer and data["train_bytes"]:
        data["bytes_per_token"] = round((data["train_bytes"] + data["val_bytes"]) / n_tokens, 4)
    data["source"] = [os.path.basename(source.path) for source in sources]
    if args.zst:
        names = output.pack(names)
    output.write_json("data.json", data)
    output.commit([*names, *(["tokenizer.json"] if tokenizer else []), "data.json"], vars(args))
    print("%s: train %s tokens, val %s; vocabulary %s" % (
        args.out, comma(data["train_tokens"]), comma(data["val_tokens"]), comma(args.nanogpt)))
