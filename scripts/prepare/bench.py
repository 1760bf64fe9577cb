"""How fast text becomes shards, beside what the tokenizer's library does when it has the text in memory."""

import array
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time

from .common import NEEDS_VENV, comma, die
from .encode import chunks
from .engines import is_there, library_encode, library_tokenizer
from .files import Source, source_documents
from .tokenizer import given_tokenizer, learnt_size

GROUP_BYTES = 1 << 24


def cpu_seconds():
    """Of this process and of the children that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def library_seconds(tokenizer, texts, workers):
    """The tokenizers library on all texts, with its own threads, ids taken. Returns seconds and tokens."""
    os.environ.update(TOKENIZERS_PARALLELISM="true", RAYON_NUM_THREADS=str(workers))
    library = library_tokenizer(tokenizer.tree)
    library_encode(library, ["warm up " * 100] * 64)
    start, n, group, size = time.time(), 0, [], 0
    for i, text in enumerate(texts):
        group.append(text)
        size += len(text)
        if size >= GROUP_BYTES or i == len(texts) - 1:
            n += sum(len(array.array("I", ids)) for ids in library_encode(library, group))
            group, size = [], 0
    return time.time() - start, n


def benchmark(args, script):
    if learnt_size(args.tokenizer):
        die("--benchmark needs a tokenizer's file", "--tokenizer FILE: a tokenizer.json or a .tiktoken file")
    if not is_there("tokenizers"):
        die("--benchmark needs the tokenizers library to compare with", NEEDS_VENV)
    tokenizer = given_tokenizer(args.tokenizer, False)
    documents = [d for path in args.inputs for d in source_documents(Source(path), args.text_key)]
    texts = [chunk.decode("utf-8", "replace") for document in documents for chunk in chunks(document)]
    megabytes = sum(map(len, documents)) / 1e6
    folder = tempfile.mkdtemp()
    rows = []
    try:
        for _ in range(args.rounds):
            cpu = cpu_seconds()
            seconds, n = library_seconds(tokenizer, texts, args.workers)
            rows.append(("library", seconds, cpu_seconds() - cpu, n))
            command = [sys.executable, script, "--tokenizer", args.tokenizer, "--val", "0", "--workers",
                       str(args.workers), "--engine", args.engine, "--out", os.path.join(folder, "out"), "--no-ngram",
                       "--text-key", args.text_key, *args.inputs]
            start, cpu = time.time(), cpu_seconds()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            seconds = time.time() - start
            size = sum(os.path.getsize(os.path.join(folder, "out", name)) - 1024
                       for name in os.listdir(os.path.join(folder, "out")) if name.endswith(".bin"))
            n = size // (4 if tokenizer.typecode == "I" else 2) - len(documents)
            rows.append(("shards", seconds, cpu_seconds() - cpu, n))
    finally:
        shutil.rmtree(folder)
    best = {}
    for name, seconds, cpu, n in rows:
        print("%-8s %7.2f s  %6.2f MB/s  %7.2f s of CPU  %s tokens" % (
            name, seconds, megabytes / seconds, cpu, comma(n)))
        best[name] = min(best.get(name, seconds), seconds)
    print("%s, %.1f MB, %d workers: text to shards at %.2f of the library's speed (best of %d)" % (
        tokenizer.label, megabytes, args.workers, best["library"] / best["shards"], args.rounds))
