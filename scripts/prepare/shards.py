"""The folder that is written: shards under temporary names, what has been done so far, and the change of names at the
end. The names change when everything is complete, so a reader never sees half a data set, and what was in the folder
stays until then."""

import array
import fcntl
import json
import os
import re
import struct
import sys

from . import zst
from .common import die
from .files import Source
from .unpack import blocks

PROGRESS = "progress.json"
SPLITS = ("train", "val")


def sync(f):
    f.flush()
    os.fsync(f.fileno())


def sync_folder(folder):
    fd = os.open(folder, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def lock(folder):
    """Holds the folder for this process as long as the result is open; None if another one does."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except OSError:
        pass  # a file system without locks
    return fd


class Output:
    """keep: leave the unfinished work where it is when the script ends."""

    def __init__(self, folder, restart=False):
        self.folder, self.made, self.keep = folder, not os.path.isdir(folder), False
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as e:
            die("%s: cannot make the folder: %s" % (folder, e.strerror), "choose another with --out")
        self.lock = lock(folder)
        if self.lock is None:
            die("%s: another run is writing there" % folder, "wait for it, or choose another folder with --out")
        if restart:
            self.discard(folder_too=False)
        self.progress, self.finished = self.read_progress(), None
        self.keep = self.progress is not None
        if self.keep and self.progress.get("finished"):
            self.finished, self.progress = self.progress, None
            self.change_names(self.finished["finished"])
        if self.shards() and not self.keep and not os.path.exists(self.path("data.json")):
            die("%s has shards but no data.json: not this script's" % folder, "choose another folder with --out")

    def path(self, name):
        return os.path.join(self.folder, name)

    def shards(self):
        return [name for name in sorted(os.listdir(self.folder)) if re.fullmatch(r"(train|val)_\d+\.bin(\.zst)?", name)]

    def temporary(self):
        """The names, without .tmp, of the files that this script has not finished with."""
        pattern = r"((?:train|val)_\d+\.bin(?:\.zst)?|(?:tokenizer|data)\.json|shuffle_\d+|stdin)\.tmp"
        matches = (re.fullmatch(pattern, name) for name in sorted(os.listdir(self.folder)))
        return [match.group(1) for match in matches if match]

    def read_progress(self):
        """What a stopped run has left, or None."""
        try:
            with open(self.path(PROGRESS), encoding="utf-8") as f:
                return json.load(f)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as e:
            die("%s: %s" % (self.path(PROGRESS), e), "--restart begins anew")

    def write_bytes(self, name, data):
        with open(self.path(name + ".tmp"), "wb") as f:
            f.write(data)
            sync(f)

    def write_json(self, name, tree):
        self.write_bytes(name, (json.dumps(tree, ensure_ascii=False, indent=1) + "\n").encode("utf-8"))

    def write_progress(self, progress):
        self.write_json(PROGRESS, progress)
        os.replace(self.path(PROGRESS + ".tmp"), self.path(PROGRESS))
        sync_folder(self.folder)
        self.progress, self.keep = progress, True

    def pack(self, names):
        """Packs finished shards, which stay under their temporary names until the commit: a run that is stopped here
        does this again. Returns the new names."""
        for name in names:
            zst.pack(blocks(Source(self.path(name + ".tmp"))), self.path(name + ".zst.tmp"))
        return [name + ".zst" for name in names]

    def commit(self, names, command):
        """Gives the finished files their names. A stop in the middle is made good by the next run, which then finds
        the command in `finished`."""
        self.write_progress({"finished": names, "command": command})
        self.change_names(names)

    def change_names(self, names):
        """data.json goes first and comes last: while names change, the folder is seen not to be whole. What has its
        name already has no temporary file any more."""
        if os.path.exists(self.path("data.json")) and os.path.exists(self.path("data.json.tmp")):
            os.remove(self.path("data.json"))
        for name in self.shards():
            if name not in names:
                os.remove(self.path(name))
        for name in sorted(names, key=lambda name: name == "data.json"):
            if os.path.exists(self.path(name + ".tmp")):
                os.replace(self.path(name + ".tmp"), self.path(name))
        sync_folder(self.folder)
        self.keep, self.progress = False, None
        self.discard(folder_too=False)

    def discard(self, folder_too=True):
        """Removes what is unfinished, and the folder if this run made it and it is empty; nothing if it is to be kept.
        What comes from standard input comes anew."""
        for name in self.temporary():
            if not self.keep or name == "stdin":
                os.remove(self.path(name + ".tmp"))
        if self.keep:
            return
        for name in (PROGRESS, PROGRESS + ".tmp"):
            if os.path.exists(self.path(name)):
                os.remove(self.path(name))
        if folder_too and self.made and not os.listdir(self.folder):
            os.rmdir(self.folder)


class ShardWriter:
    """The shards of one split. The state says how far they are: it is enough to go on from."""

    def __init__(self, output, split, wide, shard_tokens, state=None):
        self.output, self.split, self.shard_tokens = output, split, shard_tokens
        self.magic, self.version, self.width = (20240801, 7, 4) if wide else (20240520, 1, 2)
        self.file, self.n_shards, self.in_shard, self.n_tokens = None, 0, 0, 0
        if state:
            self.n_shards, self.in_shard, self.n_tokens = state["shards"], state["in_shard"], state["tokens"]
        if self.in_shard:
            self.file = open(self.output.path(self.name(self.n_shards) + ".tmp"), "r+b")
            self.file.truncate(1024 + self.width * self.in_shard)
            self.file.seek(0, os.SEEK_END)
            if self.file.tell() != 1024 + self.width * self.in_shard:
                die("%s: shorter than it was" % self.file.name, "--restart begins anew")

    def name(self, i):
        return "%s_%03d.bin" % (self.split, i)

    def names(self):
        return [self.name(i) for i in range(self.n_shards + (self.file is not None))]

    def sync(self):
        if self.file:
            sync(self.file)

    def state(self):
        return {"shards": self.n_shards, "in_shard": self.in_shard, "tokens": self.n_tokens}

    def add(self, packed):
        """Adds ids in the machine's byte order."""
        if sys.byteorder == "big":
            swapped = array.array("H" if self.width == 2 else "I", packed)
            swapped.byteswap()
            packed = swapped.tobytes()
        packed, at = memoryview(packed), 0
        while at < len(packed):
            if self.file is None:
                self.file = open(self.output.path(self.name(self.n_shards) + ".tmp"), "wb")
                self.file.write(bytes(1024))
            part = packed[at : at + self.width * (self.shard_tokens - self.in_shard)]
            self.file.write(part)
            at += len(part)
            self.in_shard += len(part) // self.width
            self.n_tokens += len(part) // self.width
            if self.in_shard == self.shard_tokens:
                self.end_shard()

    def end_shard(self):
        if self.file:
            self.file.seek(0)
            self.file.write(struct.pack("<3i", self.magic, self.version, self.in_shard))
            sync(self.file)
            self.file.close()
            self.file, self.n_shards, self.in_shard = None, self.n_shards + 1, 0
