#!/usr/bin/env python3
"""Writes engine/text/unicode_table.c by asking the `tokenizers` library about every code point.

The library is the reference, and it mixes three Unicode versions (its regular expressions, Rust's
char::is_numeric and its NFC tables each have their own). So nothing is read from a Unicode
database: each question is put to the library itself.

    python3 engine/text/make_unicode.py          writes the file
    python3 engine/text/make_unicode.py --check  exit 1: the file differs from what would be written
"""
import hashlib
import os
import sys
import unicodedata  # only for one representative of each combining class

import tokenizers
from tokenizers import Regex, normalizers, pre_tokenizers

LETTER, NUMBER, SPACE, NUMERIC, NFC_SLOW = 1, 2, 4, 8, 16
CODE_POINTS = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
nfd = normalizers.NFD().normalize_str
nfc = normalizers.NFC().normalize_str


def members(regex):
    """The code points that a one-character regex of the library matches."""
    text = "".join(map(chr, CODE_POINTS))
    rest = set()
    for _, (a, b) in pre_tokenizers.Split(Regex(regex), "removed").pre_tokenize_str(text):
        rest.update(CODE_POINTS[a:b])
    return set(CODE_POINTS) - rest


def numeric():
    """What the Digits pre-tokenizer cuts out: put between letters, each is a piece of its own."""
    pieces = pre_tokenizers.Digits(True).pre_tokenize_str("a".join(map(chr, CODE_POINTS)))
    return {ord(p) for p, (a, b) in pieces if b - a == 1 and a % 2 == 0}


def combining_classes(decomposed):
    """Canonical classes, found by watching which neighbours change places."""
    low, high = "\u0334", "\u0345"  # of the lowest class, 1, and of the highest, 240

    def is_starter(s):
        return s not in (low, high) and nfd(s + low) == s + low and nfd(high + s) == high + s

    # What has a decomposition is taken apart before anybody asks for its class.
    marks = [c for c in CODE_POINTS if decomposed[c] == chr(c) and not is_starter(chr(c))]
    representative = {}
    for c in marks:
        representative.setdefault(unicodedata.combining(chr(c)), chr(c))
    classes = {}
    for c in marks:
        s = chr(c)
        same = [k for k, r in representative.items() if nfd(s + r) == s + r and nfd(r + s) == r + s]
        assert len(same) == 1 and same[0], (hex(c), same)
        classes[c] = same[0]
    return classes


def compositions(decomposed):
    pairs = {}
    for c in CODE_POINTS:
        d = decomposed[c]
        if len(d) < 2 or nfc(chr(c)) != chr(c) or 0xAC00 <= c < 0xAC00 + 11172:
            continue
        first = nfc(d[:-1])
        assert len(first) == 1 and nfc(first + d[-1]) == chr(c), hex(c)
        pairs[(ord(first), ord(d[-1]))] = c
    return pairs


def two_stage(value):
    """256 code points per page, equal pages once."""
    pages, stage1 = [], []
    for at in range(0, 0x110000, 256):
        page = tuple(value.get(c, 0) for c in range(at, at + 256))
        if page not in pages:
            pages.append(page)
        stage1.append(pages.index(page))
    assert len(pages) <= 256
    return stage1, [v for page in pages for v in page]


def c_array(kind, name, values, per_line=24):
    lines = [", ".join(map(str, values[i : i + per_line])) for i in range(0, len(values), per_line)]
    return "const %s %s[%d] = {\n    %s};\n" % (kind, name, len(values), ",\n    ".join(lines))


def c_file():
    decomposed = {c: nfd(chr(c)) for c in CODE_POINTS}
    classes = combining_classes(decomposed)
    pairs = compositions(decomposed)
    jamo = set(range(0x1161, 0x1176)) | set(range(0x11A8, 0x11C3))
    slow = {c for c in CODE_POINTS if nfc(chr(c)) != chr(c)}
    slow |= set(classes) | {b for _, b in pairs} | jamo
    sets = {
        LETTER: members(r"\p{L}"),
        NUMBER: members(r"\p{N}"),
        SPACE: members(r"\s"),
        NUMERIC: numeric(),
        NFC_SLOW: slow,
    }
    bits = {}
    for bit, cps in sets.items():
        for c in cps:
            bits[c] = bits.get(c, 0) | bit
    pool, rows = [], []
    for c in CODE_POINTS:
        d = [ord(x) for x in decomposed[c]]
        if d != [c] and not 0xAC00 <= c < 0xAC00 + 11172:
            rows.append("{%d, %d, %d}" % (c, len(pool), len(d)))
            pool += d
    body = [c_array("uint8_t", "unicode_class_index", two_stage(bits)[0])]
    body += [c_array("uint8_t", "unicode_class_pages", two_stage(bits)[1])]
    body += [c_array("uint8_t", "unicode_combining_index", two_stage(classes)[0])]
    body += [c_array("uint8_t", "unicode_combining_pages", two_stage(classes)[1])]
    body += [c_array("uint32_t", "unicode_decomposed_pool", pool, 12)]
    body += [c_array("struct unicode_decomposition", "unicode_decompositions", rows, 6)]
    rows = ["{%d, %d, %d}" % (a, b, c) for (a, b), c in sorted(pairs.items())]
    body += [c_array("struct unicode_composition", "unicode_compositions", rows, 5)]
    body += ["const uint32_t unicode_n_decompositions = ARRAY_LEN(unicode_decompositions);\n"]
    body += ["const uint32_t unicode_n_compositions = ARRAY_LEN(unicode_compositions);\n"]
    text = "\n".join(body)
    counts = ", ".join(
        "%s %d" % (name, len(sets[bit]))
        for name, bit in (("L", LETTER), ("N", NUMBER), ("White_Space", SPACE), ("numeric", NUMERIC))
    )
    return (
        "/* Written by engine/text/make_unicode.py; do not edit. Measured on tokenizers %s:\n"
        " * code points %s;\n * %d with a combining class, %d compositions.\n"
        " * SHA-256 of what follows the include: %s */\n"
        "/* clang-format off */\n"
        '#include "engine/text/unicode.h"\n'
        % (tokenizers.__version__, counts, len(classes), len(pairs),
           hashlib.sha256(text.encode()).hexdigest())
        + text
    )


def main():
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "unicode_table.c")
    text = c_file()
    if "--check" in sys.argv:
        # The first line names the library's version, which may move without a table changing.
        with open(path) as f:
            same = f.read().split("\n", 1)[1] == text.split("\n", 1)[1]
        sys.exit(0 if same else "%s is not what this library answers" % path)
    with open(path, "w") as f:
        f.write(text)


main()
