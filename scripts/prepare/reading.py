"""Documents in batches, and at which document the reading is."""

import hashlib

from .common import die
from .encode import BATCH_BYTES, BATCH_DOCUMENTS, Item, chunks, fim_cuts
from .files import source_documents
from .shards import SPLITS
from .shuffle import Bucket
from .split import FEW_DOCUMENTS, document_hash, refuse_empty, split_document

NAMES_MAX = 1000
OTHER_COMMAND = "give that command again to go on with it; --restart begins anew, --out DIR writes elsewhere"


def refuse_changed(path):
    die("%s has changed since the run was stopped" % path, OTHER_COMMAND)


class Batch:
    """items: to be encoded. after: the position behind them, None in the middle of a document; done: see Progress."""

    def __init__(self):
        self.items, self.n_bytes, self.after, self.done = [], 0, None, 0


class Position:
    """Where reading is, and what has been seen up to there."""

    def __init__(self, saved=None):
        self.file, self.document, self.chain = 0, 0, ""
        self.counts = {"documents": 0, "files": 0, "without_text": 0}
        for split in SPLITS:
            self.counts[split + "_documents"] = self.counts[split + "_bytes"] = 0
        self.names = []
        if saved:
            self.__dict__.update(saved)

    def copy(self):
        return {**self.__dict__, "counts": dict(self.counts), "names": list(self.names)}

    def enter(self, source):
        """source has text."""
        self.counts["files"] += 1
        if len(self.names) < NAMES_MAX:
            self.names.append(source.name)


class Reader:
    """The documents of sources. few: whether they are so few that each is split, see split.py; known after count()."""

    def __init__(self, args, sources):
        self.args, self.sources, self.few = args, sources, None

    @property
    def size(self):
        return sum(source.size for source in self.sources)

    def read(self, source):
        if isinstance(source, Bucket):
            return source.documents()
        return source_documents(source, self.args.text_key, self.args.separator.encode("utf-8"))

    def documents(self):
        """(document, source, bytes of all sources read so far), from the beginning."""
        before = 0
        for source in self.sources:
            for document in self.read(source):
                yield document, source, before + source.read
            before += source.size

    def part(self, val):
        """The documents of one split, from the beginning."""
        for document, _, _ in self.documents():
            text = split_document(document, self.args.val, self.few)[val]
            if text is not None:
                yield text

    def head(self, val, size):
        """The first `size` bytes of a split."""
        texts, n = [], 0
        for text in self.part(val):
            texts.append(text)
            n += len(text)
            if n >= size:
                break
        return b"".join(texts)[:size]

    def count(self):
        """Whether there are few documents, by which they are split."""
        n = 0
        for n, _ in enumerate(self.documents(), 1):
            if n == FEW_DOCUMENTS:
                break
        if n == 0:
            die("no text in the input", "the files are empty, or hold nothing but white space or binary data")
        self.few = n < FEW_DOCUMENTS
        if self.few:
            refuse_empty(*(any(True for _ in self.part(val)) for val in (0, 1)), self.args.val)

    def items(self, document, hashed, may_be_cut):
        for val, text in enumerate(split_document(document, self.args.val, self.few, hashed)):
            if text is None:
                continue
            fim = None if val else fim_cuts(text, hashed, self.args.fim)
            for i, chunk in enumerate(chunks(text) if may_be_cut and not fim else [text]):
                yield Item(chunk, val, i == 0, fim)

    def batches(self, position, may_be_cut):
        """All batches from a position on; position goes along. may_be_cut: see Tokenizer."""
        first, skip, chain = position.file, position.document, position.chain
        before = sum(source.size for source in self.sources[:first])
        batch = Batch()
        for number, source in enumerate(self.sources[first:], first):
            running, index = b"", 0
            for document in self.read(source):
                hashed = document_hash(document)
                running = hashlib.blake2b(running + hashed, digest_size=8).digest()
                index += 1
                if number == first and index <= skip:
                    if index == skip and running.hex() != chain:
                        refuse_changed(source.path)
                    continue
                if index == 1 and not isinstance(source, Bucket):
                    position.enter(source)
                position.file, position.document, position.chain = number, index, running.hex()
                position.counts["documents"] += 1
                for item in self.items(document, hashed, may_be_cut):
                    position.counts[SPLITS[item.val] + "_documents"] += item.first
                    position.counts[SPLITS[item.val] + "_bytes"] += len(item.text)
                    if batch.n_bytes + len(item.text) > BATCH_BYTES and batch.items and not item.first:
                        yield batch
                        batch = Batch()
                    batch.items.append(item)
                    batch.n_bytes += len(item.text)
                    batch.done = before + source.read
                if batch.n_bytes >= BATCH_BYTES or len(batch.items) >= BATCH_DOCUMENTS:
                    batch.after = position.copy()
                    yield batch
                    batch = Batch()
            if number == first and index < skip:
                refuse_changed(source.path)
            position.counts["without_text"] += index == 0 and not isinstance(source, Bucket)
            position.file, position.document, position.chain = number + 1, 0, ""
            before += source.size
        batch.after, batch.done = position.copy(), before
        yield batch
