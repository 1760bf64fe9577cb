#!/usr/bin/env python3
"""Writes a run's log.jsonl as TensorBoard event files.

    scripts/to_tensorboard.py RUN [--out DIR] [--follow]
    tensorboard --logdir RUN/tensorboard

RUN is a run's folder or its log.jsonl. Losses, MTP losses, lr, gradient norm, throughput, balance, router biases,
validation and multiple choice become scalars, samples become text. --follow goes on while the run does, over its
restarts, until it is done. A second call writes the file anew. Only the standard library is used.

An event file is a sequence of TFRecords: length, checksum of the length, data, checksum of the data. The data is the
protocol buffer `Event`, encoded here by hand: each field is (number << 3 | kind), then its value.
"""

import argparse
import calendar
import os
import struct
import sys
import time

import run_log

FILE_NAME = "events.out.tfevents.0.train_moe"


def make_crc_table():
    table = []
    for i in range(256):
        for _ in range(8):
            i = i >> 1 ^ (0x82F63B78 if i & 1 else 0)
        table.append(i)
    return table


CRC_TABLE = make_crc_table()


def masked_crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc = CRC_TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def tfrecord(data):
    length = struct.pack("<Q", len(data))
    return (length + struct.pack("<I", masked_crc32c(length)) + data + struct.pack("<I", masked_crc32c(data)))


# ---- protocol buffers -----------------------------------------------------------------------------------------------


def varint(n):
    n &= 0xFFFFFFFFFFFFFFFF
    out = bytearray()
    while n > 0x7F:
        out.append(n & 0x7F | 0x80)
        n >>= 7
    return bytes(out) + bytes([n])


def field_int(number, n):
    return varint(number << 3) + varint(n)


def field_double(number, x):
    return varint(number << 3 | 1) + struct.pack("<d", x)


def field_bytes(number, data):
    return varint(number << 3 | 2) + varint(len(data)) + data


def field_float(number, x):
    try:
        return varint(number << 3 | 5) + struct.pack("<f", x)
    except OverflowError:
        return varint(number << 3 | 5) + struct.pack("<f", float("inf") if x > 0 else float("-inf"))


def scalar_value(tag, x):
    """Summary.Value with tag = 1 and simple_value = 2."""
    return field_bytes(1, tag.encode()) + field_float(2, x)


def text_value(tag, text):
    """Summary.Value with tag = 1, tensor = 8 (dtype string, shape [1], string_val) and the text plugin in metadata = 9."""
    tensor = field_int(1, 7) + field_bytes(2, field_bytes(2, field_int(1, 1))) + field_bytes(8, text.encode())
    metadata = field_bytes(1, field_bytes(1, b"text"))
    return field_bytes(1, tag.encode()) + field_bytes(8, tensor) + field_bytes(9, metadata)


def event(wall_time, step, values):
    """Event with wall_time = 1, step = 2 and summary = 5, whose values are field 1."""
    summary = b"".join(field_bytes(1, value) for value in values)
    return field_double(1, wall_time) + field_int(2, step) + field_bytes(5, summary)


def first_event(wall_time):
    return field_double(1, wall_time) + field_bytes(3, b"brain.Event:2")


# ---- a log ----------------------------------------------------------------------------------------------------------


def unix_time(record):
    try:
        return float(calendar.timegm(time.strptime(record["time"], "%Y-%m-%dT%H:%M:%SZ")))
    except (KeyError, ValueError):
        return 0.0


def indented(text):
    """Markdown that shows the text as it is."""
    return "\n".join("    " + line for line in text.split("\n"))


def values_of(record):
    values = [scalar_value(name, value) for name, value in run_log.scalars(record)]
    if record["kind"] == "sample":
        prompt = record.get("prompt") or ""
        values.append(text_value("sample/" + (prompt[:40] or "empty prompt"), indented(prompt + (record.get("text") or ""))))
    return values


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--out", metavar="DIR", help="default: RUN/tensorboard")
    parser.add_argument("--follow", action="store_true")
    arguments = parser.parse_args()
    try:
        path = run_log.log_path(arguments.run)
        out = arguments.out or os.path.join(os.path.dirname(path), "tensorboard")
        n_events, file = write(path, out, arguments.follow)
    except (run_log.UserError, OSError) as error:
        sys.exit("error: %s" % error)
    except KeyboardInterrupt:
        return
    print("%s: %d events" % (file, n_events))


def write(path, out, wait):
    """Returns the number of events and the file's name."""
    os.makedirs(out, exist_ok=True)
    name = os.path.join(out, FILE_NAME)
    n_events, file = 0, None
    try:
        for record in run_log.follow(path, wait):
            if record["kind"] == "new" and file:
                file.close()
                file, n_events = None, 0
            if file is None:
                file = open(name, "wb")
                file.write(tfrecord(first_event(unix_time(record))))
            values = values_of(record)
            if values:
                file.write(tfrecord(event(unix_time(record), record.get("step", 0), values)))
                n_events += 1
            if wait:
                file.flush()
    finally:
        if file:
            file.close()
    return n_events, name


if __name__ == "__main__":
    main()
