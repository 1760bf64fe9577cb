"""Documents in tables: parquet and arrow files, folders of the datasets library, data bases of R packages."""

import bz2
import json
import lzma
import os
import struct
import zlib

from .common import NEEDS_VENV, die
from .unpack import blocks

# ---- folders of the datasets library --------------------------------------------------------------------------------


def hf_dataset_files(folder):
    """The arrow files of a folder of the `datasets` library in their order; None if it is no such folder."""

    def read(name):
        path = os.path.join(folder, name)
        if not os.path.isfile(path):
            return None
        try:
            with open(path, encoding="utf-8") as f:
                return json.load(f)
        except (OSError, ValueError) as e:
            die("%s: not what the datasets library writes: %s" % (path, e), "is the folder a whole save_to_disk one?")

    splits = read("dataset_dict.json")
    if splits is not None:
        names = splits.get("splits", [])
        if "train" not in names:
            die("%s: a DatasetDict without a split train" % folder, "name the folder of a split: %s" % ", ".join(names))
        return hf_dataset_files(os.path.join(folder, "train"))
    state = read("state.json")
    if state is not None and "_data_files" in state:
        if state.get("_indices_data_files"):
            die("%s: the rows are in an order of their own" % folder, "save it again after flatten_indices()")
        return [os.path.join(folder, item["filename"]) for item in state["_data_files"]]
    if read("dataset_info.json") is None:
        return None
    names = sorted(name for name in os.listdir(folder) if name.endswith(".arrow") and not name.startswith("cache-"))
    train = [name for name in names if "-train" in name]
    return [os.path.join(folder, name) for name in train or names]


# ---- parquet and arrow -----------------------------------------------------------------------------------------------


def table_batches(source, key):
    """(pyarrow array of the text column, share of the file read) one after the other."""
    import pyarrow

    def column_of(schema):
        if key not in schema.names:
            die("%s: no column \"%s\"" % (source.path, key), "--text-key NAME; there is: %s" % ", ".join(schema.names))

    if source.format == "parquet":
        import pyarrow.parquet

        with pyarrow.parquet.ParquetFile(source.path) as f:
            column_of(f.schema_arrow)
            rows = 0
            for batch in f.iter_batches(batch_size=1024, columns=[key]):
                rows += batch.num_rows
                yield batch.column(0), rows / max(f.metadata.num_rows, 1)
        return
    with pyarrow.OSFile(source.path) as raw:
        if raw.read(6) == b"ARROW1":
            reader = pyarrow.ipc.open_file(raw)
            column_of(reader.schema)
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
        else:
            raw.seek(0)
            batches = reader = pyarrow.ipc.open_stream(raw)
            column_of(reader.schema)
        for batch in batches:
            yield batch.column(batch.schema.get_field_index(key)), raw.tell() / max(source.size, 1)


def table_documents(source, key):
    try:
        import pyarrow
    except ImportError:
        die("%s: reading it needs pyarrow" % source.path, NEEDS_VENV)
    texts = (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view(), pyarrow.binary(), pyarrow.large_binary())
    try:
        for column, share in table_batches(source, key):
            if pyarrow.types.is_dictionary(column.type):
                column = column.dictionary_decode()
            if column.type not in texts and not pyarrow.types.is_null(column.type):
                die("%s: column \"%s\" holds %s, not text" % (source.path, key, column.type), "--text-key NAME")
            source.read = int(share * source.size)
            for text in column.cast(pyarrow.large_binary()).to_pylist():
                yield text or b""
    except (pyarrow.ArrowException, OSError, ValueError) as e:
        reason = str(e).splitlines()[0]
        die("%s: cannot read: %s" % (source.path, reason), "is it a readable, undamaged %s file?" % source.format)


# ---- R data bases ---------------------------------------------------------------------------------------------------


def rdb_records(data):
    """The objects of an R lazy-load data base: for each its unpacked length, big-endian, and the packed bytes, with a
    letter before them unless they are zlib's."""
    at = 0
    while at < len(data):
        length = int.from_bytes(data[at : at + 4], "big")
        kind = data[at + 4 : at + 5]
        if kind == b"2":
            packed, unpacker = data[at + 5 :], bz2.BZ2Decompressor()
        elif kind == b"Z":
            packed, unpacker = data[at + 5 :], lzma.LZMADecompressor()
        else:
            packed, unpacker = data[at + 4 :], zlib.decompressobj()
        record = unpacker.decompress(packed)
        if len(record) != length or not unpacker.eof:
            raise ValueError("%d bytes instead of %d in the record at byte %d" % (len(record), length, at))
        yield record
        at = len(data) - len(unpacker.unused_data)


def rdb_text(record):
    """The strings of a serialised R object joined by line ends; None if it is anything but a character vector.

    The format is XDR: "X\\n", three version words (from 3 on, the name of an encoding), then the object. The low
    byte of its first word is its type: 16 is a vector of strings, each of which is flags, length (-1: NA) and bytes."""

    def word(at):
        return struct.unpack_from(">i", record, at)[0]

    at = 14
    if record[:2] != b"X\n":
        return None
    if word(2) >= 3:
        at += 4 + word(at)
    if word(at) & 0xFF != 16:
        return None
    texts = []
    count, at = word(at + 4), at + 8
    for _ in range(count):
        length = max(word(at + 4), 0)
        texts.append(record[at + 8 : at + 8 + length])
        at += 8 + length
    return b"\n".join(texts) + b"\n"


def rdb_documents(source):
    try:
        texts = [rdb_text(record) for record in rdb_records(b"".join(blocks(source)))]
    except (zlib.error, lzma.LZMAError, OSError, ValueError, EOFError, struct.error) as e:
        die("%s: not a whole R data base: %s" % (source.path, e), "expected is the Rdata.rdb of an installed R package")
    return [text for text in texts if text is not None]
