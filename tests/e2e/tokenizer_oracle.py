#!/usr/bin/env python3
"""Compares engine/text with the `tokenizers` library: the same ids for a million strings.

The vocabulary is the default model's, read from its GGUF file; the library gets it as a tokenizer
built here, once per pre-tokenizer, and tests/tokenize_lines gets it as a plain dump. The strings are
aimed at the borders of character classes, where implementations differ. Prints TAP.

    tests/e2e/tokenizer_oracle.py [--strings N] [--seed S] [--build build] [--model FILE]
"""
import argparse
import os
import random
import struct
import subprocess
import sys
import tempfile
import time
import unicodedata

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
MODEL = "~/.cache/spind/SmolLM2-135M-Instruct.Q4_1.gguf"
try:
    import gguf
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
    from tokenizers import pre_tokenizers as pt
except ImportError as e:
    print("1..0 # SKIP %s (pip install tokenizers gguf)" % e)
    sys.exit(0)

CONTROL, USER_DEFINED = 3, 4
SPECIAL_FLAG = 1
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
# Tokens that no vocabulary has, to see that the longest wins and that they are found anywhere.
USER_TOKENS = ["<tool", "<tool_call>", "<tool_call", "  \u00e9\u00e9", "'t ", "\u0301x", "12345"]
n_run = n_bad = 0


def ok(good, name):
    global n_run, n_bad
    n_run += 1
    n_bad += not good
    print("%sok %d - %s" % ("" if good else "not ", n_run, name), flush=True)


def split(regex):
    return pt.Sequence(
        [
            pt.Split(Regex(regex), behavior="isolated", invert=False),
            pt.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def pipelines():
    """name -> (normaliser, pre-tokenizer, ignore_merges), as the models' tokenizer.json have them"""
    plain = pt.ByteLevel(add_prefix_space=False, use_regex=True)
    return {
        "smollm": (None, pt.Sequence([pt.Digits(individual_digits=True), plain]), False),
        "gpt-2": (None, plain, False),
        "llama-bpe": (None, split(LLAMA3), True),
        "qwen2": (normalizers.NFC(), split(QWEN2), False),
    }


class Vocabulary:
    def __init__(self, path):
        fields = gguf.GGUFReader(path).fields
        get = lambda key: fields["tokenizer." + key].contents()
        self.tokens = get("ggml.tokens") + USER_TOKENS
        self.merges = get("ggml.merges")
        self.types = get("ggml.token_type") + [USER_DEFINED] * len(USER_TOKENS)
        self.specials = [t for t, k in zip(self.tokens, self.types) if k == CONTROL]
        self.template = fields["tokenizer.chat_template"].contents()

    def dump(self, path):
        with open(path, "wb") as f:
            f.write(struct.pack("<II", len(self.tokens), len(self.merges)))
            for token, kind in zip(self.tokens, self.types):
                b = token.encode()
                f.write(struct.pack("<iI", kind, len(b)) + b)
            for merge in self.merges:
                b = merge.encode()
                f.write(struct.pack("<I", len(b)) + b)

    def library(self, name, specials):
        normaliser, pre, ignore_merges = pipelines()[name]
        # Added tokens go in at the end, so that they get the ids that the dump gives them.
        vocab = {t: i for i, t in enumerate(self.tokens[: -len(USER_TOKENS)])}
        merges = [tuple(m.split(" ")) for m in self.merges]
        t = Tokenizer(models.BPE(vocab, merges, ignore_merges=ignore_merges))
        if normaliser:
            t.normalizer = normaliser
        t.pre_tokenizer = pre
        t.decoder = decoders.ByteLevel()
        t.add_tokens([AddedToken(x, normalized=False) for x in USER_TOKENS])
        if specials:
            t.add_special_tokens([AddedToken(x, normalized=False) for x in self.specials])
        assert all(t.token_to_id(x) == len(vocab) + i for i, x in enumerate(USER_TOKENS))
        return t


def borders():
    """First and last members of every range of a class, and what is just outside."""
    out = set()
    last = None
    for c in range(0x110000):
        if 0xD800 <= c < 0xE000:
            continue
        now = unicodedata.category(chr(c))
        if now != last:
            out.update(x for x in (c - 1, c) if x >= 0 and not 0xD800 <= x < 0xE000)
        last = now
    return [chr(c) for c in sorted(out)]


def asked_of_the_library():
    """Borders of the classes as the library sees them (its Unicode is newer than Python's)."""
    cps = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    text = "".join(map(chr, cps))
    out = set()
    for regex in (r"\p{L}+", r"\p{N}+", r"\s+"):
        for _, (a, b) in pt.Split(Regex(regex), "isolated").pre_tokenize_str(text):
            out.update((text[a], text[b - 1]))
    return sorted(out)


class Strings:
    def __init__(self, vocabulary, seed):
        self.r = random.Random(seed)
        white = [chr(c) for c in range(0x110000) if chr(c).isspace()]
        marks = [chr(c) for c in range(0x110000) if unicodedata.combining(chr(c))]
        decomposed = [chr(c) for c in range(0x110000) if unicodedata.decomposition(chr(c))]
        jamo = [chr(c) for a, b in ((0x1100, 0x1113), (0x1161, 0x1176), (0x11A7, 0x11C3),
                                    (0xAC00, 0xAC40)) for c in range(a, b)]
        specials = vocabulary.specials + USER_TOKENS
        specials += [s[:-1] for s in specials] + [s[1:] for s in specials]
        words = [t.replace("\u0120", " ").replace("\u010a", "\n")
                 for t in vocabulary.tokens if t.isascii() or "\u0120" in t][:20000]
        self.sources = [
            (3, list(" \t\n\r\v\f") + ["  ", "\r\n", "\n\n", " \n ", "   "]),
            (1, white + ["\u180e", "\ufeff", "\u200b", "\u2060"]),
            (2, ["'s", "'T", "'re", "'VE", "'m", "'Ll", "'d", "'\u017f", "'\u017fay", "'", "\u2019s",
                 "'ve", "'l", "'r", "'\u212a", "S", "s", "'\ufb06", "'\u00df"]),
            (4, borders()),
            (4, asked_of_the_library()),
            (1, marks),
            (1, decomposed),
            (1, jamo),
            (2, list("0123456789") + ["\u00b2", "\u00bd", "\u2167", "\uff11", "\u0661", "\u3007",
                                      "12345678", "\U0001d7d8", "\u4e00"]),
            (1, specials),
            (4, words),
            (2, list("!?.,;:-_/\\()[]{}<>|@#$%^&*+=~`\"'")),
        ]
        self.weights = [w for w, _ in self.sources]
        self.lists = [l for _, l in self.sources]

    def one(self):
        r = self.r
        n = r.randrange(65) if r.random() < 0.5 else r.randrange(12)
        if r.random() < 0.3:  # few kinds, many neighbours of the same kind
            lists = r.choices(self.lists, self.weights, k=2)
            parts = [r.choice(r.choice(lists)) for _ in range(n)]
        else:
            parts = [r.choice(l) for l in r.choices(self.lists, self.weights, k=n)]
        if r.random() < 0.2 and n:
            c = r.randrange(0x110000)
            parts[r.randrange(n)] = "\ufffd" if 0xD800 <= c < 0xE000 else chr(c)
        return "".join(parts)[:64]


def ours(args, dump, name, flags, texts):
    data = b"".join(struct.pack("<I", len(b)) + b for b in (t.encode() for t in texts))
    program = os.path.join(args.build, "tests", "tokenize_lines")
    p = subprocess.run([program, dump, name, str(flags)], input=data, stdout=subprocess.PIPE,
                       stderr=subprocess.PIPE)
    words = memoryview(p.stdout).cast("I")
    out, at = [], 0
    while at < len(words):
        n = words[at]
        out.append(list(words[at + 1 : at + 1 + n]))
        at += 1 + n
    errors = [l for l in p.stderr.decode().splitlines() if not l.startswith("#")]
    return out, p.returncode, errors


def compare(args, dump, vocabulary, name, flags, texts, what):
    library = vocabulary.library(name, flags & SPECIAL_FLAG)
    got, rc, errors = ours(args, dump, name, flags, texts)
    bad = len(got) != len(texts)
    for i in range(0, len(texts), 20000):
        batch = texts[i : i + 20000]
        for text, want, have in zip(batch, library.encode_batch_fast(batch, add_special_tokens=False),
                                    got[i : i + 20000]):
            if want.ids != have:
                bad += 1
                if bad <= 5:
                    print("# %s: %s\n#   want %s\n#   got  %s" % (name, ascii(text), want.ids, have))
    for line in errors[:5]:
        print("# " + line)
    ok(not bad and rc == 0, "%s: %s: %d strings, the library's ids, and their bytes the text"
       % (name, what, len(texts)))


FIXED = [
    "", "e\u0301", "\u212b", "'\u017fay", "don'T", "don't", "\u180e a", "  \n\n  x", "a\r\n\r\nb",
    "\uff11\uff12\uff13", "x\u00b2", "12345678", "\u00a0\u00a0hello", "hello   ", "\ufeffhi", "\0a",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467", "<|im_start|>user", "a  1", " 1", "a" * 200000,
    " " * 200000, "\n" * 100000, "ab" * 50000, "\u0301" * 50000, "\u0301\u0323" * 25000,
    "!\u0004!\u0006\U00100000", "\u1100\u1161\u11a8", "\u0958", "\U0001d160" * 5,
    "<|im_start|><|im_end|>x<|im_end|", "<|im_<|im_start|>", "<tool_call><tool_cal<tool_call",
]


def every_code_point():
    """Each code point alone, between letters and after a space: 4.4 million characters in 4,352
    strings."""
    cps = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    return ["".join("a%s %s%s" % (c, c, c) for c in cps[i : i + 256]) for i in range(0, len(cps), 256)]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--strings", type=int, default=1000000)
    ap.add_argument("--seed", type=int, default=20240601)
    ap.add_argument("--build", default=os.environ.get("B", os.path.join(ROOT, "build")))
    ap.add_argument("--model", default=os.environ.get("MODEL", MODEL))
    args = ap.parse_args()
    path = os.path.expanduser(args.model)
    program = os.path.join(args.build, "tests", "tokenize_lines")
    for needed in (path, program):
        if not os.path.exists(needed):
            print("1..0 # SKIP %s is not there" % needed)
            return 0
    vocabulary = Vocabulary(path)
    print("# --seed %d --strings %d" % (args.seed, args.strings))
    check = subprocess.run([sys.executable, os.path.join(ROOT, "engine/text/make_unicode.py"), "--check"])
    ok(check.returncode == 0, "the Unicode tables are what the library answers today")
    names = list(pipelines())
    with tempfile.TemporaryDirectory() as tmp:
        dump = os.path.join(tmp, "vocabulary")
        vocabulary.dump(dump)
        for k, name in enumerate(names):
            start = time.time()
            compare(args, dump, vocabulary, name, SPECIAL_FLAG, FIXED, "known traps")
            compare(args, dump, vocabulary, name, 0, FIXED, "known traps without specials")
            compare(args, dump, vocabulary, name, 0, every_code_point(), "every code point")
            strings = Strings(vocabulary, args.seed + k)
            n = args.strings // len(names)
            texts = [strings.one() for _ in range(n)]
            compare(args, dump, vocabulary, name, SPECIAL_FLAG, texts[: n // 2], "specials on")
            compare(args, dump, vocabulary, name, 0, texts[n // 2 :], "specials off")
            print("# %s: %.1f s" % (name, time.time() - start))
    print("1..%d" % n_run)
    return n_bad != 0


sys.exit(main())
