"""From input arguments to documents: which files, how each is unpacked, and where its documents are.

Everything is read in pieces. The largest thing in memory is one document, and a document of text longer than
DOCUMENT_BYTES_MAX is continued as the next one."""

import glob
import hashlib
import json
import os
import re
import shutil
import sys

from .common import die
from .tables import hf_dataset_files, rdb_documents, table_documents
from .unpack import PACKINGS, blocks

DOCUMENT_BYTES_MAX = 1 << 26
FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".parquet": "parquet", ".arrow": "arrow",
           ".rdb": "rdb"}


class Source:
    """An input file. walked: found in a folder, not named; spooled: what came from standard input."""

    def __init__(self, path, walked=False, format="auto", spooled=False):
        self.path, self.walked, self.spooled = path, walked, spooled
        stem, suffix = os.path.splitext(path.lower())
        self.packing = PACKINGS.get(suffix, "")
        if self.packing:
            suffix = os.path.splitext(stem)[1]
        self.format = FORMATS.get(suffix, "text") if format == "auto" else format
        self.size = os.stat(path).st_size
        self.read = 0  # bytes of the file read so far

    @property
    def name(self):
        return "standard input" if self.spooled else os.path.basename(self.path)

    def fingerprint(self):
        """Equal for a file that has not been changed. Standard input comes anew each time, so its content counts."""
        if self.spooled:
            digest = hashlib.sha256()
            for block in blocks(self):
                digest.update(block)
            return [self.name, self.size, digest.hexdigest()]
        status = os.stat(self.path)
        return [self.path, status.st_size, status.st_mtime_ns]


# ---- which files ----------------------------------------------------------------------------------------------------


def walk(folder, skip):
    """The files under a folder in sorted order, without hidden ones and without the folder `skip`."""
    for root, folders, files in os.walk(folder):
        dataset = hf_dataset_files(root)
        if dataset is not None:
            folders[:] = []
            yield from dataset
            continue
        folders[:] = sorted(f for f in folders if f[0] != "." and os.path.realpath(os.path.join(root, f)) != skip)
        for name in sorted(files):
            if name[0] != ".":
                yield os.path.join(root, name)


def spool_stdin(path):
    """Standard input is gone through more than once, so it is kept in a file meanwhile."""
    with open(path, "wb") as f:
        shutil.copyfileobj(sys.stdin.buffer, f, 1 << 20)
    return path


def find_sources(inputs, out, format="auto", spool=None):
    """The input files, each once. out: the folder of the shards, not to be walked into. spool: where standard input is
    kept."""
    seen, sources = set(), []
    for item in inputs:
        if item == "-":
            found = [(spool_stdin(spool), False)]
        elif os.path.isfile(item):
            found = [(item, False)]
        elif os.path.isdir(item):
            found = [(path, True) for path in walk(item, os.path.realpath(out))]
        else:
            found = [(path, False) for path in sorted(glob.glob(item, recursive=True)) if os.path.isfile(path)]
        if not found:
            die("%s: no such file" % item, "an input is a file, a folder, a glob, or - for standard input")
        for path, walked in found:
            if os.path.realpath(path) in seen:
                continue
            seen.add(os.path.realpath(path))
            if not os.path.isfile(path):
                die("%s: no such file" % path, "the folder's own list names it; is the download complete?")
            sources.append(Source(path, walked, format, item == "-"))
    return sources


# ---- text -----------------------------------------------------------------------------------------------------------


def split_at(text, size):
    """text cut after the last paragraph, else line, else character that ends in its first `size` bytes."""
    for border in (b"\n\n", b"\n"):
        end = text.rfind(border, size // 2, size)
        if end >= 0:
            return text[: end + len(border)], text[end + len(border) :]
    while text[size] & 0xC0 == 0x80:
        size -= 1
    return text[:size], text[size:]


def text_documents(source, separator):
    """What stands between separators (each with the line end behind it), without a byte order mark."""
    border = re.compile(re.escape(separator) + rb"\n?")
    rest, first = b"", True
    for block in blocks(source):
        if b"\0" in block:
            if first and source.walked:
                return
            hint = "UTF-16 text becomes UTF-8 with: iconv -f utf-16 -t utf-8"
            die("%s: not text: it has zero bytes in it" % source.path, hint)
        searched = max(len(rest) - len(separator), 0)
        rest += block
        if first and rest.startswith(b"\xef\xbb\xbf"):
            rest = rest[3:]
        first = False
        # The last separator stays with the rest: a line end may follow it in the next block.
        last = rest.rfind(separator, searched)
        if last > 0:
            yield from border.split(rest[:last])
            rest = rest[last:]
        while len(rest) > DOCUMENT_BYTES_MAX:
            head, rest = split_at(rest, DOCUMENT_BYTES_MAX)
            yield from border.split(head)
    yield from border.split(rest)


# ---- JSON lines -----------------------------------------------------------------------------------------------------


def lines(source):
    parts = []
    for block in blocks(source):
        *whole, last = block.split(b"\n")
        if whole:
            parts.append(whole[0])
            yield b"".join(parts)
            yield from whole[1:]
            parts = []
        if last:
            parts.append(last)
    if parts:
        yield b"".join(parts)


def row_text(value, where, key):
    if value is None:
        return b""
    if not isinstance(value, str):
        die("%s: \"%s\" is not a string" % (where, key), "--text-key NAME says which member holds the text")
    # A lone surrogate can be escaped in JSON but not encoded in UTF-8; it becomes bytes that are no UTF-8.
    return value.encode("utf-8", "surrogatepass")


def jsonl_documents(source, key):
    for number, line in enumerate(lines(source), 1):
        if not line.strip():
            continue
        where = "%s: line %d" % (source.path, number)
        try:
            row = json.loads(line)
        except ValueError as e:
            die("%s is not JSON: %s" % (where, e), "expected is one object a line; --format text reads it as text")
        if not isinstance(row, dict):
            die("%s is not an object" % where, "expected is one object a line; jq -c '.[]' makes lines of an array")
        if key not in row:
            die("%s has no \"%s\"" % (where, key), "--text-key NAME; there is: %s" % ", ".join(map(str, row)))
        yield row_text(row[key], where, key)


def is_json_lines(source, key):
    """Whether a .json file holds an object a line: otherwise it is some program's file, and as good a text as any."""
    first = next((line for line in lines(source) if line.strip()), b"")
    try:
        row = json.loads(first)
    except ValueError:
        return False
    return isinstance(row, dict) and (key in row or not source.walked)


# ---- all of them ----------------------------------------------------------------------------------------------------


def source_documents(source, key="text", separator=b"\f"):
    """The documents of a file that have text in them, in order."""
    source.read = 0
    kind = source.format
    if kind == "json":
        kind = "jsonl" if is_json_lines(source, key) else "text"
    if kind in ("parquet", "arrow"):
        found = table_documents(source, key)
    elif kind == "rdb":
        found = rdb_documents(source)
    elif kind == "jsonl":
        found = jsonl_documents(source, key)
    else:
        found = text_documents(source, separator)
    return (document for document in found if document.strip())
