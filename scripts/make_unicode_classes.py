#!/usr/bin/env python3
"""Writes data/unicode_classes.c: which characters are letters, numbers, marks, punctuation, symbols and white space.

    python3 scripts/make_unicode_classes.py > data/unicode_classes.c

Tokenizers cut text by these classes, so the table is committed: the ids of a text must not depend on the machine.
scripts/prepare_data.py reads the same file. The Unicode version is the one of the Python that runs this script (3.14
has 16.0), or of the package unicodedata2 where that is installed.
"""

try:
    import unicodedata2 as unicodedata
except ImportError:
    import unicodedata

# The property White_Space; three of its members (tab to return, U+0085) are of the category "control".
WHITE_SPACE = {*range(0x09, 0x0E), 0x20, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F,
               0x3000}
CLASSES = {"L": "LETTER", "N": "NUMBER", "M": "MARK", "P": "PUNCT", "S": "SYMBOL"}

HEAD = """/* See unicode_classes.h. Written by scripts/make_unicode_classes.py from Unicode %s; do not edit. */
#include "unicode_classes.h"

typedef struct {
    uint32_t first, last; /* inclusive */
    int class;            /* one of the names below */
} Range;

enum {
    LETTER = UNICODE_LETTER,
    NUMBER = UNICODE_NUMBER,
    MARK = UNICODE_MARK,
    PUNCT = UNICODE_PUNCT,
    SYMBOL = UNICODE_SYMBOL,
    SPACE = UNICODE_SPACE
};

/* clang-format off */
static const Range ranges[] = {
"""

TAIL = """};
/* clang-format on */

UnicodeClass unicode_class(uint32_t code_point) {
    int low = 0, high = (int)(sizeof ranges / sizeof ranges[0]) - 1;
    while (low <= high) {
        int middle = (low + high) / 2;
        if (code_point < ranges[middle].first)
            high = middle - 1;
        else if (code_point > ranges[middle].last)
            low = middle + 1;
        else
            return (UnicodeClass)ranges[middle].class;
    }
    return UNICODE_OTHER;
}
"""


def class_of(code_point):
    if code_point in WHITE_SPACE:
        return "SPACE"
    return CLASSES.get(unicodedata.category(chr(code_point))[0])


def main():
    ranges = []
    for code_point in range(0x110000):
        name = class_of(code_point)
        if name and ranges and ranges[-1][1] == code_point - 1 and ranges[-1][2] == name:
            ranges[-1][1] = code_point
        elif name:
            ranges.append([code_point, code_point, name])
    print(HEAD % unicodedata.unidata_version, end="")
    items = ["{0x%04X, 0x%04X, %s}," % tuple(r) for r in ranges]
    line = "   "
    for item in items:
        if len(line) + 1 + len(item) > 120:
            print(line)
            line = "   "
        line += " " + item
    print(line)
    print(TAIL, end="")


if __name__ == "__main__":
    main()
