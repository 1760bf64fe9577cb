"""Shards packed by Zstandard in many small frames and a table of them (zstd's seekable format): `zstd -d` unpacks them,
and train_moe reads any place by unpacking one frame."""

import itertools
import os
import shutil
import struct
import subprocess
import tempfile

from .common import NEEDS_VENV, die
from .files import Source
from .unpack import blocks

# A shuffled sample of 4096 tokens then takes 0.04 ms to unpack; larger frames save at most 3 % of the disk.
FRAME_BYTES, LEVEL, FRAMES_AT_ONCE = 1 << 15, 9, 512


def pack_by_program(frames):
    """Each frame becomes a file, and zstd packs many files in a call."""
    with tempfile.TemporaryDirectory() as folder:
        names = [os.path.join(folder, str(i)) for i in range(len(frames))]
        for name, frame in zip(names, frames):
            with open(name, "wb") as f:
                f.write(frame)
        done = subprocess.run(["zstd", "-q", "-%d" % LEVEL, "--check", *names], capture_output=True)
        if done.returncode:
            die("zstd fails: %s" % done.stderr.decode("utf-8", "replace").strip(), "is there room for temporary files?")
        packed = []
        for name in names:
            with open(name + ".zst", "rb") as f:
                packed.append(f.read())
        return packed


def packer():
    """A function from frames to packed frames."""
    try:
        import zstandard
    except ImportError:
        if not shutil.which("zstd"):
            die("nothing here packs Zstandard", NEEDS_VENV + "; or install the program zstd")
        return pack_by_program
    compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True, write_content_size=True)
    return lambda frames: [compressor.compress(frame) for frame in frames]


def frames_of(pieces):
    """Bytes in pieces of any size, in pieces of FRAME_BYTES."""
    rest = b""
    for piece in pieces:
        rest += piece
        whole = len(rest) - len(rest) % FRAME_BYTES
        for at in range(0, whole, FRAME_BYTES):
            yield rest[at : at + FRAME_BYTES]
        rest = rest[whole:]
    if rest:
        yield rest


def pack(pieces, path):
    """Writes the bytes to path."""
    pack_frames, table, waiting = packer(), [], []

    def put(out):
        for frame, packed in zip(waiting, pack_frames(waiting)):
            table.append((len(packed), len(frame)))
            out.write(packed)
        waiting.clear()

    with open(path, "wb") as out:
        for frame in frames_of(pieces):
            waiting.append(frame)
            if len(waiting) == FRAMES_AT_ONCE:
                put(out)
        put(out)
        entries = b"".join(struct.pack("<2I", *sizes) for sizes in table)
        out.write(struct.pack("<2I", 0x184D2A5E, len(entries) + 9) + entries)
        out.write(struct.pack("<IBI", len(table), 0, 0x8F92EAB1))
        out.flush()
        os.fsync(out.fileno())


def pack_shards(paths):
    """Beside FILE.bin comes FILE.bin.zst; a FILE.bin.zst packed otherwise is replaced."""
    for path in paths:
        if not os.path.isfile(path):
            die("%s: no such file" % path, "--pack takes token shards, FILE.bin or FILE.bin.zst")
        source = Source(path)
        if source.packing not in ("", "zst"):
            die("%s: packed by another program than zstd" % path, "unpack it first")
        pieces = blocks(source)
        first = next(pieces, b"")
        if first[:4] not in ((20240520).to_bytes(4, "little"), (20240801).to_bytes(4, "little")):
            die("%s: not a token shard" % path, "--pack takes what this script has written, or llm.c's scripts")
        target = path if source.packing else path + ".zst"
        try:
            pack(itertools.chain([first], pieces), target + ".tmp")
            os.replace(target + ".tmp", target)
        finally:
            if os.path.exists(target + ".tmp"):
                os.remove(target + ".tmp")
        print("%s: %.1f %% of the unpacked bytes" % (target, 100 * os.path.getsize(target) / unpacked_size(target)))


def unpacked_size(path):
    """As the table says."""
    with open(path, "rb") as f:
        f.seek(-9, os.SEEK_END)
        n = struct.unpack("<IBI", f.read())[0]
        f.seek(-9 - 8 * n, os.SEEK_END)
        sizes = struct.unpack("<%dI" % (2 * n), f.read(8 * n))
    return sum(sizes[1::2])
