"""From inputs to a folder of shards, and how a stopped run goes on.

The state of a run is: up to which document of which file all is written, how far each split's shards are, and counts.
It is saved in progress.json after shards end and every few seconds; a later run with the same command reads the inputs
up to there again, without encoding them, cuts the shards back to the saved lengths and goes on. A chain of hashes over
the documents of the file in work, and size and time of the files before it, tell whether the inputs are still the
same."""

import contextlib
import json
import signal
import sys
import time

from . import common
from .common import Progress, comma, die, plural, say
from .encode import encode_batches
from .engines import choose_engine, version_of
from .files import find_sources
from .ngrams import ngram_ladder
from .reading import NAMES_MAX, OTHER_COMMAND, Position, Reader, refuse_changed
from .shards import SPLITS, ShardWriter
from .shuffle import Bucket, scatter
from .tokenizer import given_tokenizer, learn_tokenizer, learnt_size, learnt_tokenizer

VERSION = 1
SAVE_SECONDS, SAVE_SECONDS_MIN = 10, 0.25  # at the latest; at the earliest, where shards are small
NGRAM_BYTES_MAX = 8_000_000
ONE_PROCESS_BYTES = {"built-in": 1 << 21, "tokenizers": 1 << 23, "tiktoken": 1 << 24}
NO_DIFFERENCE = ("out", "workers", "engine", "restart")  # options that do not change what is written


class Run:
    def __init__(self, args, output):
        self.args, self.output = args, output
        self.command = {key: value for key, value in vars(args).items() if key not in NO_DIFFERENCE}
        self.saved_at, self.snapshot, self.shuffled = common.START, None, None
        self.stop, self.encoding, self.shard_ended = 0, False, False

    # ---- what a stopped run has left ----

    def check_progress(self, saved):
        if saved["version"] != VERSION:
            die("%s: a stopped run of another version of this script" % self.args.out, "--restart begins anew")
        differing = [key for key in self.command if self.command[key] != saved["command"].get(key)]
        if differing:
            key = differing[0]
            die("%s holds a stopped run of another command: %s was %s, is %s" % (
                self.args.out, key.replace("_", "-"), saved["command"].get(key), self.command[key]), OTHER_COMMAND)
        self.shuffled = saved["shuffled"]

    def check_sources(self, saved):
        for source, was in zip(self.reader.sources, saved["files"]):
            if source.fingerprint() != was:
                refuse_changed(was[0])
        if len(self.reader.sources) < len(saved["files"]):
            refuse_changed(saved["files"][len(self.reader.sources)][0])

    def save(self):
        """Saves the last position at which all before it was written."""
        snapshot = self.snapshot
        for writer in self.writers.values():
            writer.sync()
        files = [] if self.shuffled else self.fingerprints(snapshot["position"]["file"])
        self.output.write_progress({
            "version": VERSION, "command": self.command, "tokenizer_sha256": self.tokenizer.sha256,
            "few": self.reader.few, "shuffled": self.shuffled, "files": files, **snapshot})
        self.saved_at = time.time()

    def fingerprints(self, n):
        while len(self.known_fingerprints) < n:
            self.known_fingerprints.append(self.reader.sources[len(self.known_fingerprints)].fingerprint())
        return self.known_fingerprints[:n]

    def on_signal(self, number, _):
        if not self.encoding or self.stop:
            sys.exit(128 + number)
        self.stop = number

    # ---- the steps ----

    def shuffle(self):
        """Replaces the sources by buckets."""
        if self.shuffled is None:
            position = Position()
            seen = set()

            def noted():
                for found in self.reader.documents():
                    if id(found[1]) not in seen:
                        seen.add(id(found[1]))
                        position.enter(found[1])
                    yield found

            n_buckets, n_documents = scatter(noted(), self.output, self.args.seed, self.reader.size)
            self.shuffled = {"buckets": n_buckets, "documents": n_documents, "names": position.names,
                             "files": position.counts["files"], "without_text": len(self.reader.sources) - len(seen)}
            say("shuffle", "%s in %s" % (plural(n_documents, "document"), plural(n_buckets, "bucket")))
        self.reader.sources = [Bucket(self.output, i) for i in range(self.shuffled["buckets"])]

    def make_tokenizer(self, given, saved):
        size = learnt_size(self.args.tokenizer)
        fim = self.args.fim > 0
        if given:
            self.tokenizer = given
        elif saved:
            with open(self.output.path("tokenizer.json.tmp"), "rb") as f:
                self.tokenizer = learnt_tokenizer(f.read(), size)
        else:
            self.tokenizer = learn_tokenizer(self.reader.part(0), size, fim)
        if saved and self.tokenizer.sha256 != saved["tokenizer_sha256"]:
            refuse_changed("the tokenizer")
        self.output.write_bytes("tokenizer.json", self.tokenizer.raw)

    def check_tokenizer(self, tokenizer):
        """Finds the tokens that are put between texts."""
        name = self.args.document_token
        self.document_token = tokenizer.document_token if name is None else tokenizer.id_of(name)
        if self.document_token is None:
            what = "none of its added tokens can stand before a document" if name is None else "no token %s" % name
            die("%s: %s" % (tokenizer.label, what), "--document-token NAME names one of its tokens")
        names = tuple(self.args.fim_tokens.split(",")) if self.args.fim_tokens else None
        self.fim_ids = tokenizer.fim_tokens(names) if self.args.fim > 0 else None
        self.engine = choose_engine(tokenizer, self.args.engine)

    # ---- encoding ----

    def encode(self, saved):
        wide = self.tokenizer.typecode == "I"
        states = saved["splits"] if saved and saved["splits"] else {}
        self.writers = {split: ShardWriter(self.output, split, wide, self.args.shard_tokens, states.get(split))
                        for split in SPLITS}
        self.known_fingerprints = list(saved["files"]) if saved else []
        position = Position(saved["position"] if saved else None)
        size = self.reader.size
        progress = Progress("encode", size, sum(source.size for source in self.reader.sources[: position.file]))
        workers = 1 if size < ONE_PROCESS_BYTES[self.engine] or self.args.tokenizer == "bytes" else self.args.workers
        arguments = self.engine, self.document_token, self.fim_ids
        self.take_snapshot(position.copy())
        say("encode", "%s, by %s%s" % (self.tokenizer.label, version_of(self.engine), " in %d processes" % workers if
                                       workers > 1 else ""))
        self.encoding = True
        batches = self.reader.batches(position, self.tokenizer.may_be_cut)
        batches = encode_batches(batches, self.tokenizer, arguments, workers)
        with contextlib.closing(batches):
            for batch, packed in batches:
                self.write(batch, packed)
                progress.update(batch.done, batch.n_bytes)
                if self.stop:
                    n = self.snapshot["position"]["counts"]["documents"]
                    say("stopped", "after %s; the same command goes on from there" % plural(n, "document"))
                    sys.exit(128 + self.stop)
        self.encoding = False
        for split, writer in self.writers.items():
            writer.end_shard()
            n = self.snapshot["position"]["counts"][split + "_documents"]
            if n:
                say("encode", "%s: %s, %s tokens in %s" % (
                    split, plural(n, "document"), comma(writer.n_tokens), plural(writer.n_shards, "shard")))

    def write(self, batch, packed):
        for writer, ids in zip(self.writers.values(), packed):
            n_shards = writer.n_shards
            writer.add(ids)
            self.shard_ended |= writer.n_shards > n_shards
        if batch.after:
            self.take_snapshot(batch.after)
        since = time.time() - self.saved_at
        if self.stop or since > SAVE_SECONDS or self.shard_ended and since > SAVE_SECONDS_MIN:
            self.save()
            self.shard_ended = False

    def take_snapshot(self, position):
        splits = {split: writer.state() for split, writer in self.writers.items()}
        self.snapshot = {"position": position, "splits": splits}

    # ---- the end ----

    def data_json(self, ladder):
        position = self.snapshot["position"]
        counts, names, files = position["counts"], position["names"], position["counts"]["files"]
        if self.shuffled:
            names, files = self.shuffled["names"], self.shuffled["files"]
        tokens = {split: writer.n_tokens for split, writer in self.writers.items()}
        data = {
            "version": 1,
            "tokenizer": "tokenizer.json",
            "tokenizer_sha256": self.tokenizer.sha256,
            "vocab_size": self.tokenizer.vocab_size,
            "document_token": self.document_token,
            "bytes_per_token": round((counts["train_bytes"] + counts["val_bytes"]) / sum(tokens.values()), 4),
            "train_tokens": tokens["train"],
            "val_tokens": tokens["val"],
            **{key: counts[key] for key in ("train_bytes", "val_bytes", "documents", "train_documents",
                                            "val_documents")},
            "source": names if files <= NAMES_MAX else [*names, "and %d more" % (files - NAMES_MAX)],
        }
        if self.args.fim:
            data["fim"] = {"rate": self.args.fim, "tokens": self.fim_ids}
        if self.args.shuffle:
            data["shuffle_seed"] = self.args.seed
        if ladder:
            data["ngram"] = ladder
        return data

    def finish(self, data):
        names = [name for writer in self.writers.values() for name in writer.names()]
        if self.args.zst:
            names = self.output.pack(names)
            say("pack", plural(len(names), "shard"))
        self.output.write_json("data.json", data)
        self.output.commit([*names, "tokenizer.json", "data.json"], self.command)

    def summary(self, data, label):
        print("%s: train %s tokens, val %s; %s, vocabulary %s, %.2f bytes a token; %s" % (
            self.args.out, comma(data["train_tokens"]), comma(data["val_tokens"]), label, comma(data["vocab_size"]),
            data["bytes_per_token"], plural(data["documents"], "document")))

    def ladder(self):
        if self.args.val == 0 or self.args.no_ngram:
            return None
        ladder = ngram_ladder(self.reader.head(0, NGRAM_BYTES_MAX), self.reader.head(1, NGRAM_BYTES_MAX // 8))
        say("n-grams", ", ".join("%s %.3f" % item for item in ladder.items()) + " nats a byte, held out")
        return ladder

    def go(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.on_signal)
        args, saved = self.args, self.output.progress
        if saved:
            self.check_progress(saved)
        if self.output.finished and self.output.finished["command"] == self.command:
            with open(self.output.path("data.json"), encoding="utf-8") as f:
                self.summary(json.load(f), "tokenizer %s" % args.tokenizer)
            return
        given = None if learnt_size(args.tokenizer) else given_tokenizer(args.tokenizer, args.fim > 0)
        if given:
            self.check_tokenizer(given)
        self.reader = Reader(args, find_sources(args.inputs, args.out, args.format, self.output.path("stdin.tmp")))
        if saved:
            self.check_sources(saved)
        if args.shuffle:
            self.shuffle()
        self.reader.count()
        if saved and saved["few"] != self.reader.few:
            refuse_changed("the number of documents")
        self.make_tokenizer(given, saved)
        self.check_tokenizer(self.tokenizer)
        if saved:
            say("resume", "after %s" % plural(saved["position"]["counts"]["documents"], "document"))
        self.encode(saved)
        counts = self.snapshot["position"]["counts"]
        without = counts["without_text"] if not self.shuffled else self.shuffled["without_text"]
        if without:
            say("note", "%s without text skipped" % plural(without, "file"))
        if args.val and not counts["val_documents"]:
            say("note", "no document's hash is below --val %g: there is no validation part" % args.val)
        data = self.data_json(self.ladder() if counts["val_documents"] else None)
        self.finish(data)
        self.summary(data, self.tokenizer.label)
