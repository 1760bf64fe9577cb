#!/usr/bin/env python3
"""Turns multiple-choice questions into the evaluation file that train_moe reads (eval.choice), in llm.c's format.

    scripts/prepare_choice.py --tokenizer shards/NAME --out shards/eval/hellaswag_val.bin hellaswag_val.jsonl

INPUT has a JSON object a line (also .gz), with the members of one of these sets:
  ctx, endings, label        as HellaSwag's files
  question, choices, answer  as MMLU's; the answer is a number from 0 or a letter
  context, choices, label

A choice is joined to its context by a blank, unless one of the two has white space there already.

--tokenizer       bytes, a tokenizer.json, its folder, or a rank file of tiktoken: that of the training data
--document-token  puts the document token in front of each context, as in training; llm.c's own files have none

The file is llm.c's (20240522, version 1, 16-bit ids), or, for vocabularies above 65535 ids, the same in 32 bits (version
7); data/choice_file.h describes it. Questions are kept in their order.
"""

import argparse
import array
import gzip
import json
import os
import struct
import sys

from prepare.common import die, say
from prepare.engines import Engine, choose_engine
from prepare.tokenizer import given_tokenizer

MAGIC = 20240522
CHOICES_MAX = 32
MEMBERS = (("ctx", "endings", "label"), ("question", "choices", "answer"), ("context", "choices", "label"))


def questions(path):
    """(context, choices, label) of each line."""
    opened = gzip.open(path, "rt", encoding="utf-8") if path.endswith(".gz") else open(path, encoding="utf-8")
    with opened as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield question(line, "%s:%d" % (path, number))


def question(line, where):
    try:
        item = json.loads(line)
        names = next(names for names in MEMBERS if all(name in item for name in names))
    except ValueError as error:
        die("%s: no JSON: %s" % (where, error), "one object a line")
    except (StopIteration, TypeError):
        die("%s: has none of the known sets of members" % where, "; ".join(", ".join(names) for names in MEMBERS))
    context, choices, label = (item[name] for name in names)
    if isinstance(label, str):
        label = int(label) if label.isdigit() else ord(label.upper()) - ord("A") if len(label) == 1 else -1
    if not isinstance(context, str) or not isinstance(choices, list) or not all(isinstance(c, str) for c in choices):
        die("%s: %s must be a text and %s a list of texts" % (where, *names[:2]), "see --help")
    if not 2 <= len(choices) <= CHOICES_MAX or not isinstance(label, int) or not 0 <= label < len(choices):
        die("%s: %s %r of %d choices" % (where, names[2], item[names[2]], len(choices)),
            "2 to %d choices; the right one counts from 0" % CHOICES_MAX)
    if not context or not all(choices):
        die("%s: an empty context or choice" % where, "the first id of a choice is predicted from the context")
    return context, choices, label


def joined(context, choice):
    return choice if context[-1].isspace() or choice[0].isspace() else " " + choice


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", metavar="INPUT")
    parser.add_argument("--tokenizer", required=True, metavar="FILE")
    parser.add_argument("--out", required=True, metavar="FILE.bin")
    parser.add_argument("--document-token", action="store_true")
    arguments = parser.parse_args()
    tokenizer = given_tokenizer(arguments.tokenizer, False)
    engine = Engine(tokenizer, choose_engine(tokenizer))
    if arguments.document_token and tokenizer.document_token is None:
        die("%s has no document token" % tokenizer.label, "leave --document-token out")
    start = [tokenizer.document_token] if arguments.document_token else []
    # The mark of an example is the largest number, so it is no id.
    wide = tokenizer.vocab_size > 65535
    mark, width = (0xFFFFFFFF, 4) if wide else (0xFFFF, 2)
    body, longest, n = array.array("I" if wide else "H"), 0, 0
    try:
        for context, choices, label in questions(arguments.input):
            ids = [list(x) for x in engine.encode([t.encode() for t in [context, *(joined(context, c) for c in choices)]])]
            ids[0] = start + ids[0]
            example = [mark, 0, n, label, len(choices)]
            for part in ids:
                example += [len(part), *part]
            example[1] = width * len(example)
            if max(example[1], n) >= mark:
                die("%s: question %d does not fit the numbers of the format" % (arguments.input, n), "make two files of it")
            body.extend(example)
            longest, n = max(longest, example[1]), n + 1
        if n == 0:
            die("%s: no question in it" % arguments.input, "one JSON object a line")
        header = struct.pack("<256i", MAGIC, 7 if wide else 1, n, longest, *[0] * 252)
        os.makedirs(os.path.dirname(os.path.abspath(arguments.out)), exist_ok=True)
        with open(arguments.out + ".tmp", "wb") as file:
            file.write(header + body.tobytes())
        os.replace(arguments.out + ".tmp", arguments.out)
    except (OSError, UnicodeDecodeError) as error:
        die(str(error), "is it a text file, and is there room for the other?")
    say("choice", "%d questions, %d ids of %d bits: %s" % (n, len(body), 8 * width, arguments.out))


if __name__ == "__main__":
    main()
