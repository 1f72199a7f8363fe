#!/usr/bin/env python3
"""Makes the golden file of tests/contract/families.c: what Hugging Face transformers says in float32 about
small random models of every architecture that spind serves.

    python3 -m venv v && v/bin/pip install torch transformers gguf numpy
    v/bin/python tests/golden/make_families.py

Two kinds of models:

    made up    a config.json; both sides make the same weights up (kernels/core/dummy.h, again below), so that
               the file need not hold them. Norms are 1 there.
    GGUF       a whole file, written by the gguf package as llama.cpp's converter does it (rows of q and k of
               a llama are permuted, frequency factors are a tensor), with biases and gains of any size.

File (little-endian): char magic[8] "SPFAMLY1"; u32 models; then for each

    u32 blob_bytes, n, k, vocab; char name[32];
    u8 blob[blob_bytes, padded to 4];     config.json or GGUF
    u32 tokens[n]; u16 top_ids[n][k]; f32 top_logp[n][k]; f32 rest_logp[n];     as in make_golden.py
"""
import json
import math
import os
import struct
import tempfile

import numpy as np
import torch
import transformers

HERE = os.path.dirname(os.path.abspath(__file__))
N, K = 96, 16
MASK = (1 << 64) - 1

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}


def config(arch, **more):
    base = {"architectures": [arch], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "hidden_act": "silu",
            "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 500.0,
            "tie_word_embeddings": False, "vocab_size": 800, "torch_dtype": "bfloat16"}
    base.update(more)
    return base


def build(c):
    """The model of transformers, in float32."""
    family = {"LlamaForCausalLM": transformers.LlamaConfig, "Qwen2ForCausalLM": transformers.Qwen2Config,
              "Qwen3ForCausalLM": transformers.Qwen3Config}[c["architectures"][0]]
    fields = {k: v for k, v in c.items() if k not in ("architectures", "torch_dtype")}
    made = family(**fields, attn_implementation="eager")
    return getattr(transformers, c["architectures"][0])(made).float().eval()


# ---- tensors under both names ----

def tensors(c):
    """Hugging Face's name, GGUF's name."""
    yield "model.embed_tokens.weight", "token_embd.weight"
    yield "model.norm.weight", "output_norm.weight"
    if not c["tie_word_embeddings"]:
        yield "lm_head.weight", "output.weight"
    for i in range(c["num_hidden_layers"]):
        hf, gg = f"model.layers.{i}.", f"blk.{i}."
        yield hf + "input_layernorm.weight", gg + "attn_norm.weight"
        yield hf + "post_attention_layernorm.weight", gg + "ffn_norm.weight"
        for x in "qkv":
            yield hf + f"self_attn.{x}_proj.weight", gg + f"attn_{x}.weight"
            if "Qwen2" in c["architectures"][0]:
                yield hf + f"self_attn.{x}_proj.bias", gg + f"attn_{x}.bias"
        if "Qwen3" in c["architectures"][0]:
            for x in "qk":
                yield hf + f"self_attn.{x}_norm.weight", gg + f"attn_{x}_norm.weight"
        yield hf + "self_attn.o_proj.weight", gg + "attn_output.weight"
        for x in ("gate", "up", "down"):
            yield hf + f"mlp.{x}_proj.weight", gg + f"ffn_{x}.weight"


def load(model, values):
    state = model.state_dict()
    assert set(values) == set(state) - ({"lm_head.weight"} - set(values)), set(values) ^ set(state)
    model.load_state_dict({k: torch.from_numpy(np.ascontiguousarray(v)) for k, v in values.items()},
                          strict=False)
    model.tie_weights()


# ---- made-up weights ----

def fnv1a(text):
    h = 0xCBF29CE484222325
    for b in text.encode():
        h = (h ^ b) * 0x100000001B3 & MASK
    return h


def words(seed, n):
    with np.errstate(over="ignore"):
        z = np.uint64(seed) + (np.arange(n, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def bf16(x):
    u = x.astype(np.float32).view(np.uint32)
    return ((u + 0x7FFF + ((u >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def dummy(name, shape, hidden):
    if name.endswith("norm.weight"):
        return np.ones(shape, np.float32)
    rows, cols = (1, shape[0]) if len(shape) == 1 else shape
    per_row = (cols + 3) // 4
    w = words(fnv1a(name), rows * per_row)
    bits = np.stack([(w >> np.uint64(16 * j)) & np.uint64(0xFFFF) for j in range(4)], axis=1)
    bits = bits.reshape(rows, per_row * 4)[:, :cols].astype(np.float32)
    scale = np.float32(np.sqrt(np.float32(3) / np.float32(hidden if len(shape) == 1 else cols)))
    x = (bits - np.float32(32767.5)) * (scale * np.float32(1 / 32768))
    return x.reshape(shape) if len(shape) == 1 else bf16(x).reshape(shape)


def made_up(c):
    model = build(c)
    shapes = {k: tuple(v.shape) for k, v in model.state_dict().items()}
    load(model, {hf: dummy(gg, shapes[hf], c["hidden_size"]) for hf, gg in tensors(c)})
    return model, json.dumps(c).encode()


# ---- GGUF ----

def byte_tokens():
    keep = [b for b in range(256) if 0x21 <= b <= 0x7E or 0xA1 <= b <= 0xFF and b != 0xAD]
    rest = [b for b in range(256) if b not in keep]
    return [chr(b) if b in keep else chr(0x100 + rest.index(b)) for b in range(256)]


def permute(w, heads):
    return w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def llama3_factors(c):
    r, d = c["rope_scaling"], c["head_dim"]
    out = []
    for i in range(d // 2):
        wave = 2 * math.pi * c["rope_theta"] ** (2 * i / d)
        low = r["original_max_position_embeddings"] / r["low_freq_factor"]
        high = r["original_max_position_embeddings"] / r["high_freq_factor"]
        if wave < high:
            out.append(1.0)
        elif wave > low:
            out.append(r["factor"])
        else:
            s = ((r["original_max_position_embeddings"] / wave - r["low_freq_factor"])
                 / (r["high_freq_factor"] - r["low_freq_factor"]))
            out.append(1 / ((1 - s) / r["factor"] + s))
    return np.array(out, np.float32)


def gguf_file(c, seed):
    import gguf

    arch = c["architectures"][0].removesuffix("ForCausalLM").lower()
    rng = np.random.default_rng(seed)
    model = build(c)
    shapes = {k: tuple(v.shape) for k, v in model.state_dict().items()}
    path = tempfile.mktemp(suffix=".gguf")
    w = gguf.GGUFWriter(path, arch)
    w.add_block_count(c["num_hidden_layers"])
    w.add_context_length(c["max_position_embeddings"])
    w.add_embedding_length(c["hidden_size"])
    w.add_feed_forward_length(c["intermediate_size"])
    w.add_head_count(c["num_attention_heads"])
    w.add_head_count_kv(c["num_key_value_heads"])
    w.add_key_length(c["head_dim"])
    w.add_value_length(c["head_dim"])
    w.add_layer_norm_rms_eps(c["rms_norm_eps"])
    w.add_rope_freq_base(c["rope_theta"])
    w.add_vocab_size(c["vocab_size"])
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("qwen2")
    w.add_token_list(byte_tokens() + ["<|endoftext|>"] * 0 + [f"t{i}" for i in range(256, c["vocab_size"])])
    values = {}
    for hf, gg in tensors(c):
        shape = shapes[hf]
        if len(shape) == 1:
            center = 1.0 if gg.endswith("norm.weight") else 0.0
            x = (center + rng.uniform(-0.5, 0.5, shape)).astype(np.float32)
            values[hf] = x
            w.add_tensor(gg, permute(x, 1) if False else x)
            continue
        x = (rng.standard_normal(shape) * 1.5 / math.sqrt(shape[1])).astype(np.float32)
        q = gguf.quants.quantize(x, gguf.GGMLQuantizationType.Q8_0)
        x = gguf.quants.dequantize(q, gguf.GGMLQuantizationType.Q8_0)
        values[hf] = x
        if arch == "llama" and ".attn_q." in gg:
            q = permute(q, c["num_attention_heads"])
        if arch == "llama" and ".attn_k." in gg:
            q = permute(q, c["num_key_value_heads"])
        w.add_tensor(gg, q, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    if c.get("rope_scaling"):
        w.add_tensor("rope_freqs.weight", llama3_factors(c))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    load(model, values)
    blob = open(path, "rb").read()
    os.unlink(path)
    return model, blob


def entry(f, name, model, blob, vocab):
    tokens = np.random.default_rng(len(blob)).integers(0, vocab, N).astype("<u4")
    with torch.inference_mode():
        x = model(torch.tensor([tokens.tolist()])).logits[0].double().numpy()
    x -= x.max(axis=-1, keepdims=True)
    logp = x - np.log(np.exp(x).sum(axis=-1, keepdims=True))
    ids = np.argsort(-logp, axis=-1, kind="stable")[:, :K]
    rest = np.exp(logp)
    np.put_along_axis(rest, ids, 0.0, axis=-1)
    f.write(struct.pack("<4I32s", len(blob), N, K, vocab, name.encode()))
    f.write(blob + b"\0" * (-len(blob) % 4))
    f.write(tokens.tobytes())
    f.write(ids.astype("<u2").tobytes())
    f.write(np.take_along_axis(logp, ids, axis=-1).astype("<f4").tobytes())
    f.write(np.log(rest.sum(axis=-1)).astype("<f4").tobytes())
    print(f"{name}: {len(blob)} bytes, logits deviate by {x.std():.2f}")


def main():
    small = dict(hidden_size=32, intermediate_size=64, head_dim=16, num_hidden_layers=2, vocab_size=260,
                 tie_word_embeddings=True)
    models = [
        ("made-up llama 3.1", made_up, config("LlamaForCausalLM", rope_scaling=LLAMA3)),
        ("made-up qwen2", made_up, config("Qwen2ForCausalLM", head_dim=16, rms_norm_eps=1e-6)),
        ("made-up qwen3", made_up, config("Qwen3ForCausalLM", tie_word_embeddings=True)),
        ("GGUF llama 3.1", lambda c: gguf_file(c, 1), config("LlamaForCausalLM", rope_scaling=LLAMA3, **small)),
        ("GGUF qwen2", lambda c: gguf_file(c, 2),
         config("Qwen2ForCausalLM", **{**small, "head_dim": 8, "tie_word_embeddings": False})),
        ("GGUF qwen3", lambda c: gguf_file(c, 3), config("Qwen3ForCausalLM", **small)),
    ]
    path = os.path.join(HERE, "families.bin")
    with open(path, "wb") as f:
        f.write(b"SPFAMLY1" + struct.pack("<I", len(models)))
        for name, make, c in models:
            entry(f, name, *make(c), c["vocab_size"])
    print(f"{path}: {os.path.getsize(path)} bytes")


if __name__ == "__main__":
    main()
