"""Which document is for training and which for validation, and its hash, from which every draw about it comes."""

import hashlib
import re

from .common import die

FEW_DOCUMENTS = 100


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


def document_hash(document):
    return hashlib.blake2b(document, digest_size=8).digest()


def draws(document_hash, purpose, n):
    """n numbers in [0, 1) of a document, independent for different purposes."""
    data = hashlib.blake2b(document_hash, digest_size=8 * n, person=purpose).digest()
    return [int.from_bytes(data[8 * i : 8 * i + 8], "big") / 2**64 for i in range(n)]


def split_document(document, share, few, hashed=None):
    """(training part, validation part); either may be None. few: there are less than FEW_DOCUMENTS."""
    if share == 0:
        return document, None
    if not few:
        draw = int.from_bytes(hashed or document_hash(document), "big") / 2**64
        return (None, document) if draw < share else (document, None)
    cut = cut_point(document, share)
    parts = document[:cut], document[cut:]
    return parts if all(part.strip() for part in parts) else (document, None)


def refuse_empty(n_train, n_val, share):
    for name, n in (("training", n_train), ("validation", n_val)):
        if n == 0 and (name == "training" or share > 0):
            hint = "the text is too short for --val %g; --val 0 writes none" % share
            die("nothing is left for the %s part" % name, hint)


def split_documents(documents, share):
    """(training documents, validation documents) of a list."""
    few = len(documents) < FEW_DOCUMENTS
    parts = [split_document(document, share, few) for document in documents]
    train, val = ([part[i] for part in parts if part[i] is not None] for i in (0, 1))
    refuse_empty(len(train), len(val), share)
    return train, val
