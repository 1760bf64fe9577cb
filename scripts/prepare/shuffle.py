"""Documents in a drawn order with bounded memory. Each gets a key, a hash of seed, place and document; the order is the
keys'. A first pass writes the documents to files, each for a range of keys; then one file at a time is sorted."""

import hashlib
import os
import struct

from .common import Progress
from .files import Source
from .shards import sync
from .split import document_hash

BUCKET_BYTES = 1 << 26
BUCKETS_MAX = 512
HEAD = struct.Struct(">8sQI")


def bucket_name(i):
    return "shuffle_%03d" % i


def scatter(documents, output, seed, size):
    """Writes the buckets; returns their number and that of the documents. documents: (document, source, bytes of all
    sources read so far); size: of all sources. Packed ones hold more text than their size says, hence the factor."""
    n_buckets = min(max(4 * size // BUCKET_BYTES, 1), BUCKETS_MAX)
    files = [open(output.path(bucket_name(i) + ".tmp"), "wb") for i in range(n_buckets)]
    progress = Progress("shuffle", size)
    n = 0
    for document, _, done in documents:
        place = struct.pack(">qQ", seed, n) + document_hash(document)
        key = hashlib.blake2b(place, digest_size=8, person=b"shuffle").digest()
        f = files[int.from_bytes(key, "big") * n_buckets >> 64]
        f.write(HEAD.pack(key, n, len(document)))
        f.write(document)
        n += 1
        progress.update(done, len(document))
    for f in files:
        sync(f)
        f.close()
    return n_buckets, n


class Bucket(Source):
    def __init__(self, output, i):
        self.path, self.walked, self.read = output.path(bucket_name(i) + ".tmp"), False, 0
        self.size = os.stat(self.path).st_size

    def documents(self):
        found = []
        with open(self.path, "rb") as f:
            while head := f.read(HEAD.size):
                key, n, length = HEAD.unpack(head)
                found.append((key, n, f.read(length)))
        found.sort()
        self.read = 0
        for _, _, document in found:
            self.read += HEAD.size + len(document)
            yield document
