#!/usr/bin/env python3
"""Turns text into token shards that train_moe reads.

    scripts/prepare_data.py [--tokenizer bytes | train:N | FILE] [--out DIR] [--val SHARE] INPUT...

    scripts/prepare_data.py novel.txt                                            # learns a vocabulary of 1024
    scripts/prepare_data.py --tokenizer gpt2.tiktoken --shuffle fineweb/*.parquet
    scripts/prepare_data.py --tokenizer DeepSeek-V3/tokenizer.json --fim 0.1 code/*.jsonl.zst
    scripts/prepare_data.py --nanogpt 50257 --tokenizer gpt2.tiktoken train.bin val.bin
    scripts/prepare_data.py --pack fineweb/*.bin

INPUT: files, folders (walked in sorted order, without hidden files), globs, or '-' for standard input.
  text           a document is a file, or what stands between form feeds (--separator) in one
  .jsonl .json   an object a line, its member "text" (--text-key) is a document
  .parquet       the column of that name
  .arrow         also folders of the datasets library: save_to_disk's, of several splits the one named train
  .rdb           of R packages: character vectors are texts by lines
All but tables also as .gz, .bz2, .xz, .zst and .zstd. Empty documents are dropped. Text longer than 64 MiB without a
separator becomes several documents.

--tokenizer  train:1024 (default) learns a byte-level BPE of 1024 tokens from the training part (its first 256 MiB);
             bytes has one token a byte; FILE is a tokenizer.json or a rank file of tiktoken cut as GPT-2's. Where the
             tokenizer has no document token, it comes on top.
--val 0.1    From 100 documents on, each is training or validation text as its hash says. Fewer are cut each: its last
             tenth, from the nearest paragraph border on, is for validation.
--fim 0.1    That share of the training documents, drawn by their hashes, is written for filling in the middle: document
             token, PREFIX, text, SUFFIX, text, MIDDLE, text. The three tokens are the tokenizer's (--fim-tokens).
--shuffle    Documents in an order drawn from --seed. Needs as much disk in DIR as the text, for a while, and memory for
             a 512th of it.

--zst        Shards packed by Zstandard, train_000.bin.zst: about half as large. Needs as much disk in DIR as plain
             shards, for a while, and the package zstandard or the program zstd.
--pack       Packs shards that are there, each FILE.bin to FILE.bin.zst beside it (then take one of the two away); a
             FILE.bin.zst in large frames, as the program zstd writes them, is replaced.

Written to DIR (default: shards/NAME), under temporary names until all is complete:
  train_000.bin ...  256 int32 (magic, version, tokens), then the ids: uint16 (20240520, 1) if the vocabulary has at
  val_000.bin ...    most 65536 tokens, else uint32 (20240801, 7). The document token stands before each document.
  tokenizer.json     in the format of Hugging Face's library; a given one as it is
  data.json          what the ids mean, counts (tokens include document tokens, bytes_per_token is over both parts), and
                     what n-grams of bytes, counted in the training part, reach on the validation part (nats a byte)

A run that was stopped goes on when the same command is given again; progress.json in DIR says where it is. What comes
out depends neither on that nor on --workers. Text that spells a special token is text; ids never wrap.

The standard library is enough for text, JSON lines, bytes, train:N and the tokenizers of GPT-2's and DeepSeek-V3's
kind. `make venv` brings the packages for the rest and for speed: .venv/bin/python scripts/prepare_data.py ...
"""

import argparse
import os
import re
import sys

from prepare import files
from prepare.common import die, say
from prepare.split import split_documents

__all__ = ["read_documents", "say", "split_documents"]


def read_documents(inputs, out):
    """All documents with text in them, in a list, and the names of their files."""
    documents, names = [], []
    for source in files.find_sources(inputs, out):
        found = list(files.source_documents(source))
        documents += found
        if found:
            names.append(source.name)
    return documents, names


class ArgumentParser(argparse.ArgumentParser):
    def error(self, message):
        die(message, "scripts/prepare_data.py --help")


def make_parser():
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("inputs", nargs="+", metavar="INPUT")
    add("--tokenizer", metavar="KIND", help="bytes, train:N, a tokenizer.json or a .tiktoken file; default train:1024")
    add("--out", metavar="DIR", help="folder of the shards; default: shards/NAME, after the first input")
    add("--val", type=float, default=0.1, metavar="SHARE", help="share for validation, 0 to 0.5; default 0.1")
    add("--shard-tokens", type=int, default=100_000_000, metavar="N", help="tokens a file; default 100000000")
    add("--format", default="auto", choices=["auto", "text", "jsonl", "parquet", "arrow"],
        help="of all inputs; default: as their names say")
    add("--text-key", default="text", metavar="NAME", help="member or column with the text; default text")
    add("--separator", default="\f", metavar="TEXT", help="between documents of a text; default: a form feed")
    add("--document-token", metavar="NAME", help="the token before each document, where it is not a known one")
    add("--fim", type=float, default=0.0, metavar="RATE", help="share of documents to fill in the middle; default 0")
    add("--fim-tokens", metavar="A,B,C", help="names of the prefix, suffix and middle tokens")
    add("--shuffle", action="store_true", help="documents in a drawn order")
    add("--seed", type=int, default=0, help="of the order; default 0")
    add("--no-ngram", action="store_true", help="leave out the n-grams")
    add("--workers", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="processes; default: the cores")
    add("--engine", default="auto", choices=["auto", "built-in", "tokenizers", "tiktoken"],
        help="what applies the tokenizer; the ids are the same; default: the fastest there is")
    add("--restart", action="store_true", help="drop what a stopped run has left in DIR")
    add("--zst", action="store_true", help="pack the shards by Zstandard")
    add("--pack", action="store_true", help="only pack: the inputs are token shards")
    add("--nanogpt", type=int, metavar="VOCAB", help="the inputs are nanoGPT's: 16-bit ids below VOCAB, no header")
    add("--benchmark", action="store_true", help="only measure, beside the tokenizers library on the same text")
    add("--rounds", type=int, default=1, metavar="N", help="of the benchmark; default 1")
    return parser


def parse_arguments():
    args = make_parser().parse_args()
    limits = {"val": (0, 0.5, "0.1 takes a tenth of the text for validation"), "fim": (0, 1, "0.1 is a tenth"),
              "shard_tokens": (1, 2**31 - 1, "the default is 100000000"), "workers": (1, 1024, "one a core"),
              "nanogpt": (1, 65536, "GPT-2's is 50257; nanoGPT's ids have 16 bits"), "rounds": (1, 100, "3"),
              "seed": (-(2**63), 2**63 - 1, "any whole number")}
    for name, (low, high, hint) in limits.items():
        value = getattr(args, name)
        if value is not None and not low <= value <= high:
            die("--%s %g: from %d to %g" % (name.replace("_", "-"), value, low, high), hint)
    if not args.separator:
        die("--separator: empty", "for example --separator '<|endoftext|>'")
    if args.fim_tokens and len(set(args.fim_tokens.split(","))) != 3:
        die("--fim-tokens %s: three names with commas between them" % args.fim_tokens, "in the order prefix, suffix, "
            "middle")
    if args.out is None:
        name = os.path.basename(os.path.abspath(args.inputs[0])).split(".")[0] if args.inputs[0] != "-" else "stdin"
        args.out = os.path.join("shards", re.sub(r"[^\w-]+", "_", name) or "text")
    if args.tokenizer is None and args.nanogpt is None:
        args.tokenizer = "train:1024"
    return args


def main():
    args = parse_arguments()
    # Imported here: what only reads documents needs none of it.
    from prepare import bench, nanogpt
    from prepare.run import Run
    from prepare.shards import Output
    from prepare.zst import pack_shards, packer

    if args.pack:
        try:
            pack_shards(args.inputs)
        except OSError as e:
            die("%s: %s" % (e.filename or args.inputs[0], e.strerror), "is there room, and may you write there?")
        return
    if args.zst:
        packer()  # or an error before the work
    if args.benchmark:
        bench.benchmark(args, os.path.abspath(__file__))
        return
    output = Output(args.out, args.restart)
    try:
        if args.nanogpt is not None:
            nanogpt.convert(args, output)
        else:
            Run(args, output).go()
    except OSError as e:
        die("%s: %s" % (e.filename or args.out, e.strerror), "is there room, and may you write there? --out DIR")
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        output.discard()


if __name__ == "__main__":
    main()
