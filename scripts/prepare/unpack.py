"""The content of packed files, in pieces."""

import bz2
import gzip
import lzma
import shutil
import subprocess
import zlib

from .common import NEEDS_VENV, die

BLOCK = 1 << 20
PACKINGS = {".gz": "gz", ".bz2": "bz2", ".xz": "xz", ".zst": "zst", ".zstd": "zst"}


def unpack_zst(raw):
    """The blocks of a Zstandard file of one or more frames. A file that ends inside a frame raises EOFError."""
    try:
        from compression.zstd import ZstdFile  # from Python 3.14 on
    except ImportError:
        pass
    else:
        with ZstdFile(raw) as f:
            while block := f.read(BLOCK):
                yield block
        return
    try:
        import zstandard
    except ImportError:
        yield from unpack_zst_by_program(raw)
        return
    frame = None
    try:
        while data := raw.read(1 << 17):
            while data:
                frame = frame or zstandard.ZstdDecompressor().decompressobj()
                block = frame.decompress(data)
                if block:
                    yield block
                data = frame.unused_data if frame.eof else b""
                frame = None if frame.eof else frame
    except zstandard.ZstdError as e:
        raise ValueError(e) from None
    if frame:
        raise EOFError("it ends in the middle, after %d bytes" % raw.tell())


def unpack_zst_by_program(raw):
    if not shutil.which("zstd"):
        die("%s: nothing here unpacks Zstandard" % raw.name, NEEDS_VENV + "; or install the program zstd")
    with subprocess.Popen(["zstd", "-dcq"], stdin=raw, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        while block := process.stdout.read(BLOCK):
            yield block
        complaint = process.stderr.read().decode("utf-8", "replace").strip()
    if process.returncode:
        raise ValueError(complaint or "zstd fails")


def blocks(source):
    """The unpacked content of a file in pieces; source.read follows."""
    try:
        with open(source.path, "rb") as raw:
            if source.packing == "zst":
                unpacked = unpack_zst(raw)
            else:
                openers = {"gz": gzip.open, "bz2": bz2.open, "xz": lzma.open}
                f = openers[source.packing](raw) if source.packing else raw
                unpacked = iter(lambda: f.read(BLOCK), b"")
            for block in unpacked:
                source.read = raw.tell()
                yield block
    except (OSError, EOFError, ValueError, lzma.LZMAError, zlib.error) as e:
        reason = getattr(e, "strerror", None) or str(e)
        die("%s: cannot read: %s" % (source.path, reason), "is it a readable, undamaged file?")
