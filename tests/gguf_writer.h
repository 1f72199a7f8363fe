/* GGUF files in memory, for tests and fuzz seeds: piece by piece, so that a case can be wrong in one
 * place, or whole tiny models of the llama family with random weights of any type and a byte-level vocabulary, so
 * that most tests need no download.
 *
 *     struct gguf_writer w = {0};
 *     tiny_model(&w, &(struct tiny_spec){.type = DTYPE_Q4_1});
 *     struct bytes file = gw_finish(&w);       ... bytes_free(&file);
 */
#ifndef TESTS_GGUF_WRITER_H
#define TESTS_GGUF_WRITER_H

#include "engine/model/gguf.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct bytes {
    unsigned char *p;
    size_t len, room;
};

static inline void put(struct bytes *b, const void *src, size_t n)
{
    if (b->len + n >= b->room) {
        b->room = 2 * (b->len + n) + 64;
        b->p = realloc(b->p, b->room);
    }
    if (b->p == NULL)
        abort();
    if (n > 0 && src != NULL)
        memcpy(b->p + b->len, src, n);
    else
        memset(b->p + b->len, 0, n);
    b->len += n;
}

static inline void put_u32(struct bytes *b, uint32_t v)
{
    put(b, &v, sizeof v);
}

static inline void put_u64(struct bytes *b, uint64_t v)
{
    put(b, &v, sizeof v);
}

static inline void put_string(struct bytes *b, const char *s)
{
    put_u64(b, strlen(s));
    put(b, s, strlen(s));
}

static inline void put_padding(struct bytes *b, size_t align)
{
    put(b, NULL, (align - b->len % align) % align);
}

static inline void bytes_free(struct bytes *b)
{
    free(b->p);
    *b = (struct bytes){0};
}

struct gguf_writer {
    struct bytes keys, infos, data;
    uint64_t n_keys, n_tensors;
    uint32_t version;      /* 0: 3 */
    uint32_t align;        /* 0: 32, and no general.alignment is written */
    const char *leave_out; /* a key or tensor that is not written */
};

static inline bool gw_key(struct gguf_writer *w, const char *key, uint32_t type)
{
    if (w->leave_out != NULL && strcmp(w->leave_out, key) == 0)
        return false;
    w->n_keys++;
    put_string(&w->keys, key);
    put_u32(&w->keys, type);
    return true;
}

static inline void gw_u32(struct gguf_writer *w, const char *key, uint32_t v)
{
    if (gw_key(w, key, GGUF_U32))
        put_u32(&w->keys, v);
}

static inline void gw_f32(struct gguf_writer *w, const char *key, float v)
{
    if (gw_key(w, key, GGUF_F32))
        put(&w->keys, &v, sizeof v);
}

static inline void gw_bool(struct gguf_writer *w, const char *key, unsigned char v)
{
    if (gw_key(w, key, GGUF_BOOL))
        put(&w->keys, &v, 1);
}

static inline void gw_string(struct gguf_writer *w, const char *key, const char *v)
{
    if (gw_key(w, key, GGUF_STRING))
        put_string(&w->keys, v);
}

/* The head of an array; the caller puts the elements into w->keys. False: left out. */
static inline bool gw_array(struct gguf_writer *w, const char *key, uint32_t elem, uint64_t count)
{
    if (!gw_key(w, key, GGUF_ARRAY))
        return false;
    put_u32(&w->keys, elem);
    put_u64(&w->keys, count);
    return true;
}

/* data NULL: zeros. */
static inline void gw_tensor(struct gguf_writer *w, const char *name, uint32_t type,
                             uint32_t n_dims, const uint64_t *ne, const void *data, size_t bytes)
{
    if (w->leave_out != NULL && strcmp(w->leave_out, name) == 0)
        return;
    put_padding(&w->data, w->align ? w->align : 32);
    w->n_tensors++;
    put_string(&w->infos, name);
    put_u32(&w->infos, n_dims);
    for (uint32_t i = 0; i < n_dims; i++)
        put_u64(&w->infos, ne[i]);
    put_u32(&w->infos, type);
    put_u64(&w->infos, w->data.len);
    put(&w->data, data, bytes);
}

/* The file; the writer is empty afterwards. */
static inline struct bytes gw_finish(struct gguf_writer *w)
{
    struct bytes out = {0};
    if (w->align != 0)
        gw_u32(w, "general.alignment", w->align);
    put(&out, "GGUF", 4);
    put_u32(&out, w->version ? w->version : 3);
    put_u64(&out, w->n_tensors);
    put_u64(&out, w->n_keys);
    put(&out, w->keys.p, w->keys.len);
    put(&out, w->infos.p, w->infos.len);
    if (w->n_tensors > 0)
        put_padding(&out, w->align ? w->align : 32);
    put(&out, w->data.p, w->data.len);
    bytes_free(&w->keys);
    bytes_free(&w->infos);
    bytes_free(&w->data);
    *w = (struct gguf_writer){0};
    return out;
}

struct tiny_spec {
    uint32_t layers, hidden, ff, heads, kv_heads; /* 0: 2, 256, 256, 4, 2 */
    uint32_t head_dim;                            /* 0: hidden / heads, and no key says it */
    const char *arch;            /* NULL: llama; qwen2 and qwen3 have what these have */
    uint32_t positions;          /* 0: 256 */
    enum dtype type, embed_type; /* of the matrices, of the embedding and head */
    bool untied;                 /* with output.weight */
    bool rope_freqs;             /* with frequency divisors */
    bool templated;              /* with the default model's chat template */
    uint64_t seed;
};

static inline uint64_t tiny_random(uint64_t *state) /* splitmix64 */
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static inline float tiny_uniform(uint64_t *state) /* -1 .. 1 */
{
    return (float)((double)(tiny_random(state) >> 11) * 0x1p-52 - 1.0);
}

static inline void tiny_f16(unsigned char *at, float v)
{
    uint16_t h = f32_to_f16(v);
    memcpy(at, &h, sizeof h);
}

/* Random blocks: quants are random bits, scales such that numbers have mean 0 and deviation about s. */
static inline void tiny_block(enum dtype t, unsigned char *b, size_t bytes, float s, uint64_t *rng)
{
    float v = tiny_uniform(rng) * s * 1.732f, spread = 1.0f + 0.25f * tiny_uniform(rng);
    uint16_t h = t == DTYPE_BF16 ? f32_to_bf16(v) : f32_to_f16(v);
    for (size_t i = 0; i < bytes; i++)
        b[i] = (unsigned char)(tiny_random(rng) >> 32);
    s *= spread; /* blocks differ */
    switch (t) {
    case DTYPE_F32: memcpy(b, &v, 4); break;
    case DTYPE_F16:
    case DTYPE_BF16: memcpy(b, &h, 2); break;
    case DTYPE_Q4_0: tiny_f16(b, s / 4.6f); break;
    case DTYPE_Q4_1: tiny_f16(b, s / 4.6f), tiny_f16(b + 2, s / 4.6f * -7.5f); break;
    case DTYPE_Q5_0: tiny_f16(b, s / 9.2f); break;
    case DTYPE_Q5_1: tiny_f16(b, s / 9.2f), tiny_f16(b + 2, s / 9.2f * -15.5f); break;
    case DTYPE_Q8_0: tiny_f16(b, s / 74.0f); break;
    case DTYPE_Q4_K: tiny_f16(b, s / 215.0f), tiny_f16(b + 2, s / 215.0f * 7.5f); break;
    case DTYPE_Q6_K: tiny_f16(b + 208, s / 1360.0f); break;
    }
}

static inline void tiny_tensor(struct gguf_writer *w, const char *name, enum dtype type,
                               uint64_t cols, uint64_t rows, uint64_t *rng)
{
    const struct dtype_info *info = dtype_find(type);
    const uint64_t ne[2] = {cols, rows};
    size_t n_blocks = (size_t)(cols * rows / info->block);
    unsigned char *data = malloc(n_blocks * info->bytes);
    if (data == NULL)
        abort();
    float s = 1.0f / sqrtf((float)cols);
    for (size_t i = 0; i < n_blocks; i++)
        tiny_block(type, data + i * info->bytes, info->bytes, s, rng);
    gw_tensor(w, name, type, 2, ne, data, n_blocks * info->bytes);
    free(data);
}

/* Numbers around 1: norms and frequency divisors. */
static inline void tiny_vector(struct gguf_writer *w, const char *name, uint64_t n, uint64_t *rng)
{
    float *data = malloc((size_t)n * sizeof *data);
    if (data == NULL)
        abort();
    for (uint64_t i = 0; i < n; i++)
        data[i] = 1.0f + 0.5f * tiny_uniform(rng);
    gw_tensor(w, name, DTYPE_F32, 1, &n, data, (size_t)n * sizeof *data);
    free(data);
}

/* The byte's character in a byte-level vocabulary (reference/models.md 3.2). */
static inline void tiny_byte_token(unsigned byte, char out[4])
{
    unsigned code = byte;
    if (byte < 0x21 || (byte >= 0x7f && byte < 0xa1) || byte == 0xad) {
        code = 0x100;
        for (unsigned b = 0; b < byte; b++)
            code += b < 0x21 || (b >= 0x7f && b < 0xa1) || b == 0xad;
    }
    memset(out, 0, 4);
    if (code < 0x80) {
        out[0] = (char)code;
    } else {
        out[0] = (char)(0xc0 | code >> 6);
        out[1] = (char)(0x80 | (code & 0x3f));
    }
}

static const char *const tiny_special[] = {"<|endoftext|>", "<|im_start|>", "<|im_end|>"};
static const char *const tiny_merged[] = {"th", "the", "\xc4\xa0t", "\xc4\xa0the"};
static const char *const tiny_merges[] = {"t h", "th e", "\xc4\xa0 t", "\xc4\xa0 the"};
enum { TINY_VOCAB = 3 + 256 + 4 };

static inline void tiny_vocab(struct gguf_writer *w)
{
    gw_string(w, "tokenizer.ggml.model", "gpt2");
    gw_string(w, "tokenizer.ggml.pre", "smollm");
    if (gw_array(w, "tokenizer.ggml.tokens", GGUF_STRING, TINY_VOCAB)) {
        char text[4];
        for (size_t i = 0; i < 3; i++)
            put_string(&w->keys, tiny_special[i]);
        for (unsigned i = 0; i < 256; i++) {
            tiny_byte_token(i, text);
            put_string(&w->keys, text);
        }
        for (size_t i = 0; i < 4; i++)
            put_string(&w->keys, tiny_merged[i]);
    }
    if (gw_array(w, "tokenizer.ggml.token_type", GGUF_I32, TINY_VOCAB))
        for (uint32_t i = 0; i < TINY_VOCAB; i++)
            put_u32(&w->keys, i < 3 ? TOKEN_CONTROL : TOKEN_NORMAL);
    if (gw_array(w, "tokenizer.ggml.merges", GGUF_STRING, 4))
        for (size_t i = 0; i < 4; i++)
            put_string(&w->keys, tiny_merges[i]);
    gw_u32(w, "tokenizer.ggml.bos_token_id", 1);
    gw_u32(w, "tokenizer.ggml.eos_token_id", 2);
    gw_u32(w, "tokenizer.ggml.unknown_token_id", 0);
    gw_u32(w, "tokenizer.ggml.padding_token_id", 2);
    gw_bool(w, "tokenizer.ggml.add_bos_token", 0);
}

static const char tiny_template[] =
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ "
    "'<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
    "Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' "
    "}}{% endif %}";

/* "block_count" of a qwen3 is "qwen3.block_count". */
static inline const char *tiny_key(const struct tiny_spec *s, const char *name)
{
    static char key[64];
    snprintf(key, sizeof key, "%s.%s", s->arch ? s->arch : "llama", name);
    return key;
}

static inline bool tiny_is(const struct tiny_spec *s, const char *arch)
{
    return s->arch != NULL && strcmp(s->arch, arch) == 0;
}

static inline uint32_t tiny_head_dim(const struct tiny_spec *s)
{
    return s->head_dim ? s->head_dim : s->hidden / s->heads;
}

static inline void tiny_keys(struct gguf_writer *w, const struct tiny_spec *s)
{
    gw_string(w, "general.architecture", s->arch ? s->arch : "llama");
    gw_string(w, "general.name", "Tiny");
    gw_u32(w, "general.quantization_version", 2);
    gw_u32(w, tiny_key(s, "block_count"), s->layers);
    gw_u32(w, tiny_key(s, "context_length"), s->positions);
    gw_u32(w, tiny_key(s, "embedding_length"), s->hidden);
    gw_u32(w, tiny_key(s, "feed_forward_length"), s->ff);
    gw_u32(w, tiny_key(s, "attention.head_count"), s->heads);
    gw_u32(w, tiny_key(s, "attention.head_count_kv"), s->kv_heads);
    gw_f32(w, tiny_key(s, "rope.freq_base"), 10000.0f);
    gw_f32(w, tiny_key(s, "attention.layer_norm_rms_epsilon"), 1e-5f);
    gw_u32(w, tiny_key(s, "vocab_size"), TINY_VOCAB);
    gw_u32(w, tiny_key(s, "rope.dimension_count"), tiny_head_dim(s));
    if (s->head_dim != 0)
        gw_u32(w, tiny_key(s, "attention.key_length"), s->head_dim);
    tiny_vocab(w);
    if (s->templated)
        gw_string(w, "tokenizer.chat_template", tiny_template);
}

/* What one family has and others have not. */
static inline void tiny_extras(struct gguf_writer *w, const struct tiny_spec *s, uint32_t i,
                               uint64_t *rng)
{
    const struct {
        const char *arch, *name;
        uint32_t n;
    } list[] = {{"qwen2", "attn_q.bias", tiny_head_dim(s) * s->heads},
                {"qwen2", "attn_k.bias", tiny_head_dim(s) * s->kv_heads},
                {"qwen2", "attn_v.bias", tiny_head_dim(s) * s->kv_heads},
                {"qwen3", "attn_q_norm.weight", tiny_head_dim(s)},
                {"qwen3", "attn_k_norm.weight", tiny_head_dim(s)}};
    for (size_t j = 0; j < ARRAY_LEN(list); j++) {
        char name[64];
        snprintf(name, sizeof name, "blk.%u.%s", i, list[j].name);
        if (tiny_is(s, list[j].arch))
            tiny_vector(w, name, list[j].n, rng);
    }
}

static inline void tiny_layer(struct gguf_writer *w, const struct tiny_spec *s, uint32_t i,
                              uint64_t *rng)
{
    uint32_t q = tiny_head_dim(s) * s->heads, kv = tiny_head_dim(s) * s->kv_heads;
    const struct {
        const char *name;
        uint32_t cols, rows;
    } list[] = {{"attn_norm", s->hidden, 0},    {"ffn_down", s->ff, s->hidden},
                {"ffn_gate", s->hidden, s->ff}, {"ffn_up", s->hidden, s->ff},
                {"ffn_norm", s->hidden, 0},     {"attn_k", s->hidden, kv},
                {"attn_output", q, s->hidden},  {"attn_q", s->hidden, q},
                {"attn_v", s->hidden, kv}};
    for (size_t j = 0; j < ARRAY_LEN(list); j++) {
        char name[64];
        snprintf(name, sizeof name, "blk.%u.%s.weight", i, list[j].name);
        if (list[j].rows == 0)
            tiny_vector(w, name, list[j].cols, rng);
        else
            tiny_tensor(w, name, s->type, list[j].cols, list[j].rows, rng);
    }
    tiny_extras(w, s, i, rng);
}

static inline void tiny_model(struct gguf_writer *w, const struct tiny_spec *spec)
{
    struct tiny_spec s = *spec;
    uint64_t rng = s.seed + 1;
    s.layers = s.layers ? s.layers : 2;
    s.hidden = s.hidden ? s.hidden : 256;
    s.ff = s.ff ? s.ff : 256;
    s.heads = s.heads ? s.heads : 4;
    s.kv_heads = s.kv_heads ? s.kv_heads : 2;
    s.positions = s.positions ? s.positions : 256;
    tiny_keys(w, &s);
    tiny_tensor(w, "token_embd.weight", s.embed_type, s.hidden, TINY_VOCAB, &rng);
    for (uint32_t i = 0; i < s.layers; i++)
        tiny_layer(w, &s, i, &rng);
    tiny_vector(w, "output_norm.weight", s.hidden, &rng);
    if (s.untied)
        tiny_tensor(w, "output.weight", s.embed_type, s.hidden, TINY_VOCAB, &rng);
    if (s.rope_freqs)
        tiny_vector(w, "rope_freqs.weight", tiny_head_dim(&s) / 2, &rng);
}

/* Writes a file for tests that open by path. */
static inline void bytes_save(const struct bytes *b, const char *path)
{
    FILE *f = fopen(path, "wb");
    if (f == NULL || fwrite(b->p, 1, b->len, f) != b->len || fclose(f) != 0) {
        perror(path);
        exit(1);
    }
}

#endif
