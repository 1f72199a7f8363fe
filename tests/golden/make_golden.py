#!/usr/bin/env python3
"""Makes and checks the golden file of tests/contract/parity.c.

Golden: what Hugging Face transformers says in float32 about two chunks of 1,024 tokens of real text
(Jane Austen, "Pride and Prejudice", public domain), given the very GGUF file that spind serves.

    python3 -m venv v && v/bin/pip install torch transformers gguf tokenizers accelerate numpy
    apt-get install r-cran-janeaustenr
    Rscript -e 'writeLines(janeaustenr::prideprejudice, "austen.txt")'
    v/bin/python tests/golden/make_golden.py --model SmolLM2-135M-Instruct.Q4_1.gguf --text austen.txt

File (little-endian):

    char magic[8] "SPGOLD1\\n"; u32 chunks, len, k, vocab;
    u32 tokens[chunks][len];
    u16 top_ids[chunks][len][k];      the k most likely next tokens, best first
    f32 top_logp[chunks][len][k];     their log-probabilities
    f32 rest_logp[chunks][len];       log of the probability of all others together

All 49,152 logits of 2,048 positions would be 400 MB. With the k best and the rest, the Kullback-Leibler
divergence is computed over a partition into k + 1 outcomes:

    KL_k = sum_i p_i (log p_i - log q_i) + p_rest (log p_rest - log q_rest)

By the log-sum inequality KL_k <= KL: merging outcomes only loses information. How much is lost is
measured, not assumed: `--check` takes the logits that the test dumped (SPIND_DUMP_LOGITS=file) and
computes both, from the complete distributions in float64:

    SPIND_DUMP_LOGITS=/tmp/logits build/tests/contract/parity
    v/bin/python tests/golden/make_golden.py --model ... --check /tmp/logits

Measured with transformers 5.23 and torch 2.15 on the AVX-512 path: KL over all outcomes 4.5e-5, over the
top 32 and the rest 3.9e-5: the bound sees 86 % of it, and the bar of 1e-3 is 20 times further away.
"""
import argparse
import os
import struct

import numpy as np

MAGIC = b"SPGOLD1\n"
LEN, K = 1024, 32
STARTS = (0, 100_000)  # the first page, and a place in the middle
HERE = os.path.dirname(os.path.abspath(__file__))


def tokenizer_of(path):
    """The GGUF's vocabulary in the tokenizers library: `smollm` is single digits, then GPT-2's rule."""
    from gguf import GGUFReader
    from tokenizers import Tokenizer, models, pre_tokenizers

    fields = GGUFReader(path).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(m.split(" ")) for m in fields["tokenizer.ggml.merges"].contents()]
    assert fields["tokenizer.ggml.pre"].contents() == "smollm"
    tok = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True),
         pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    return tok


def load_model(path):
    import torch
    from transformers import AutoModelForCausalLM

    folder, name = os.path.split(os.path.abspath(path))
    return AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=torch.float32, attn_implementation="eager").eval()


def reference_logits(model, tokens):
    import torch

    with torch.inference_mode():
        return model(torch.tensor([tokens.tolist()])).logits[0].float().numpy()


def log_softmax(logits):
    x = logits.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def top_and_rest(logp):
    ids = np.argsort(-logp, axis=-1, kind="stable")[:, :K]
    rest = np.exp(logp)
    np.put_along_axis(rest, ids, 0.0, axis=-1)
    return ids, np.take_along_axis(logp, ids, axis=-1), np.log(rest.sum(axis=-1))


def make(args):
    text = open(args.text, encoding="utf-8").read()
    ids = np.array(tokenizer_of(args.model).encode(text).ids, dtype=np.uint32)
    tokens = np.stack([ids[s:s + LEN] for s in STARTS])
    model = load_model(args.model)
    tops, logps, rests, vocab = [], [], [], 0
    for chunk in tokens:
        logits = reference_logits(model, chunk)
        vocab = logits.shape[1]
        top, logp, rest = top_and_rest(log_softmax(logits))
        tops.append(top), logps.append(logp), rests.append(rest)
    with open(args.golden, "wb") as f:
        f.write(MAGIC + struct.pack("<4I", len(tokens), LEN, K, vocab))
        f.write(tokens.astype("<u4").tobytes())
        f.write(np.array(tops).astype("<u2").tobytes())
        f.write(np.array(logps).astype("<f4").tobytes())
        f.write(np.array(rests).astype("<f4").tobytes())
    rest = np.exp(np.array(rests))
    print(f"{args.golden}: {os.path.getsize(args.golden)} bytes; probability outside the top {K}: "
          f"mean {rest.mean():.4f}, largest {rest.max():.4f}")


def read_tokens(path):
    with open(path, "rb") as f:
        assert f.read(8) == MAGIC, f"{path} is not a golden file"
        chunks, length, _, vocab = struct.unpack("<4I", f.read(16))
        return np.frombuffer(f.read(4 * chunks * length), "<u4").reshape(chunks, length), vocab


def check(args):
    tokens, vocab = read_tokens(args.golden)
    ours = np.memmap(args.check, "<f4", mode="r").reshape(tokens.shape[0], LEN, vocab)
    model = load_model(args.model)
    full, bound, same = [], [], []
    for c, chunk in enumerate(tokens):
        p, q = log_softmax(reference_logits(model, chunk)), log_softmax(np.array(ours[c]))
        full.append((np.exp(p) * (p - q)).sum(axis=-1))
        ids, top, rest = top_and_rest(p)
        q_top = np.take_along_axis(q, ids, axis=-1)
        q_rest = np.exp(q)
        np.put_along_axis(q_rest, ids, 0.0, axis=-1)
        q_rest = np.log(q_rest.sum(axis=-1))
        bound.append((np.exp(top) * (top - q_top)).sum(axis=-1) + np.exp(rest) * (rest - q_rest))
        same.append(p.argmax(axis=-1) == q.argmax(axis=-1))
    full, bound, same = np.concatenate(full), np.concatenate(bound), np.concatenate(same)
    print(f"positions {full.size}, top-1 agreement {100 * same.mean():.3f} %")
    for name, kl in (("KL, all outcomes", full), (f"KL, top {K} and rest", bound)):
        print(f"{name:24} mean {kl.mean():.3e}  p99 {np.quantile(kl, .99):.3e}  max {kl.max():.3e}")
    print(f"share of the full KL that the bound sees: {100 * bound.sum() / full.sum():.2f} %")


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    ap.add_argument("--model", required=True)
    ap.add_argument("--text")
    ap.add_argument("--golden", default=os.path.join(HERE, "smollm2-austen.bin"))
    ap.add_argument("--check", metavar="LOGITS")
    args = ap.parse_args()
    if args.check:
        check(args)
    elif args.text:
        make(args)
    else:
        ap.error("give --text to make the file or --check to check logits against it")


if __name__ == "__main__":
    main()
