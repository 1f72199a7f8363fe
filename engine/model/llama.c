/* The llama family as GGUF writes it: which numbers and tensors there must be. Keys begin with the
 * architecture's name.
 *
 * Everything is checked before anything is multiplied, divided or allocated by it: ranges from
 * reference/models.md 1.8 item 9, shapes of tensors against the numbers. What the file has and this
 * reader does not serve (other biases, experts, other RoPE scalings) is refused by name; only tensors
 * without any known role are passed over, with a line on the log. */
#include "engine/model/internal.h"
#include "kernels/log.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { KEY_BYTES = 64 };

/* "block_count" of a qwen3 is "qwen3.block_count". */
static const char *name_key(const struct plan *p, const char *name, char buf[KEY_BYTES])
{
    snprintf(buf, KEY_BYTES, "%s.%s", p->family->name, name);
    return buf;
}

#define KEY(name) name_key(p, (name), (char[KEY_BYTES]){0})

static status find_family(struct plan *p, const struct gguf *g)
{
    struct text_view arch;
    char name[32];
    TRY(gguf_string(g, "general.architecture", &arch));
    p->family = family_find(arch);
    if (p->family != NULL)
        return OK;
    gguf_text_copy(name, sizeof name, arch);
    return gguf_refuse(g, arch.p, "the architecture is \"%s\"; spind serves " FAMILY_NAMES, name);
}

static status read_heads(struct plan *p, const struct gguf *g)
{
    struct model_shape *s = &p->shape;
    uint32_t value_dim, rope_dim;
    TRY(gguf_u32_uniform(g, KEY("attention.head_count"), s->layers, 1, MAX_HEADS, &s->heads));
    s->kv_heads = s->heads;
    if (gguf_find(g, KEY("attention.head_count_kv")) != NULL)
        TRY(gguf_u32_uniform(g, KEY("attention.head_count_kv"), s->layers, 1, MAX_HEADS,
                             &s->kv_heads));
    if (s->heads % s->kv_heads != 0)
        return gguf_refuse(g, gguf_find(g, KEY("attention.head_count_kv"))->p,
                           "%u heads cannot share %u KV heads evenly", s->heads, s->kv_heads);
    const struct gguf_value *key_length = gguf_find(g, KEY("attention.key_length"));
    if (key_length == NULL && s->hidden % s->heads != 0)
        return gguf_refuse(g, gguf_find(g, KEY("attention.head_count"))->p,
                           "an embedding of %u does not divide into %u heads", s->hidden, s->heads);
    TRY(gguf_u32_or(g, KEY("attention.key_length"), 2, MAX_HEAD_DIM, s->hidden / s->heads,
                    &s->head_dim));
    if (s->head_dim % 2 != 0 || s->head_dim < 2 || s->head_dim > MAX_HEAD_DIM)
        return gguf_refuse(g,
                           (key_length ? key_length : gguf_find(g, KEY("attention.head_count")))->p,
                           "a head has %u numbers, allowed are even ones up to %d", s->head_dim,
                           (int)MAX_HEAD_DIM);
    TRY(gguf_u32_or(g, KEY("attention.value_length"), s->head_dim, s->head_dim, s->head_dim,
                    &value_dim));
    TRY(gguf_u32_or(g, KEY("rope.dimension_count"), s->head_dim, s->head_dim, s->head_dim,
                    &rope_dim));
    return gguf_f32_or(g, KEY("attention.scale"), 1e-6, 1e3, 1.0f / sqrtf((float)s->head_dim),
                       &p->attn_scale);
}

/* Absent means linear, and its factor is 1 unless said otherwise (llama.cpp). */
static status read_rope(struct plan *p, const struct gguf *g)
{
    struct text_view type = {"linear", 6};
    char name[32];
    TRY(gguf_f32_or(g, KEY("rope.freq_base"), 1.0 + 1e-6, 1e12, 10000.0f, &p->shape.rope_base));
    if (gguf_find(g, KEY("rope.scaling.type")) != NULL)
        TRY(gguf_string(g, KEY("rope.scaling.type"), &type));
    TRY(gguf_f32_or(g, KEY("rope.scale_linear"), 1e-3, 1e6, 1.0f, &p->rope_divisor)); /* old name */
    TRY(gguf_f32_or(g, KEY("rope.scaling.factor"), 1e-3, 1e6, p->rope_divisor, &p->rope_divisor));
    if (type.len == 4 && memcmp(type.p, "none", 4) == 0)
        p->rope_divisor = 1.0f;
    else if (type.len != 6 || memcmp(type.p, "linear", 6) != 0) {
        gguf_text_copy(name, sizeof name, type);
        return gguf_refuse(g, type.p, "RoPE scaling \"%s\" is not served; none and linear are",
                           name);
    }
    return OK;
}

static status read_numbers(struct plan *p, const struct gguf *g)
{
    struct model_shape *s = &p->shape;
    uint32_t none, quantization;
    TRY(gguf_u32(g, KEY("block_count"), 1, MAX_LAYERS, &s->layers));
    TRY(gguf_u32(g, KEY("embedding_length"), 1, MAX_HIDDEN, &s->hidden));
    TRY(gguf_u32_uniform(g, KEY("feed_forward_length"), s->layers, 1, MAX_FF, &s->ff));
    TRY(gguf_u32(g, KEY("context_length"), 1, MAX_POSITIONS, &s->max_positions));
    TRY(gguf_f32(g, KEY("attention.layer_norm_rms_epsilon"), 1e-12, 0.1, &s->norm_eps));
    TRY(gguf_u32_or(g, KEY("expert_count"), 0, 0, 0, &none)); /* no mixtures of experts */
    TRY(gguf_u32_or(g, "general.quantization_version", 2, 2, 2, &quantization));
    TRY(read_heads(p, g));
    return read_rope(p, g);
}

/* A tensor and the shape it must have; rows 0: a vector. */
static status find_tensor(const struct gguf *g, const char *name, uint32_t cols, uint32_t rows,
                          const struct gguf_tensor **out)
{
    const struct gguf_tensor *t = gguf_tensor_find(g, name);
    if (t == NULL)
        return err(ERR_FORMAT, "%s: tensor %s is missing", gguf_path(g), name);
    uint32_t want_rows = rows == 0 ? 1 : rows;
    if (t->ne[0] != cols || t->ne[1] != want_rows || t->ne[2] != 1 || t->ne[3] != 1)
        return gguf_refuse(g, t->info,
                           "tensor %s is [%llu, %llu, %llu, %llu], the model's numbers ask for "
                           "[%u, %u]",
                           name, (unsigned long long)t->ne[0], (unsigned long long)t->ne[1],
                           (unsigned long long)t->ne[2], (unsigned long long)t->ne[3], cols,
                           want_rows);
    *out = t;
    return OK;
}

struct wanted {
    const char *name;
    uint32_t cols, rows;
    const struct gguf_tensor **to;
};

static status find_wanted(const struct gguf *g, uint32_t layer, const struct wanted *w, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        char name[64];
        snprintf(name, sizeof name, "blk.%u.%s", layer, w[i].name);
        TRY(find_tensor(g, name, w[i].cols, w[i].rows, w[i].to));
    }
    return OK;
}

static status find_layer(struct plan *p, const struct gguf *g, uint32_t i)
{
    const struct model_shape *s = &p->shape;
    struct plan_layer *l = &p->layers[i];
    uint32_t q_rows = s->heads * s->head_dim, kv_rows = s->kv_heads * s->head_dim;
    const struct wanted all[] = {
        {"attn_norm.weight", s->hidden, 0, &l->attn_norm},
        {"attn_q.weight", s->hidden, q_rows, &l->q},
        {"attn_k.weight", s->hidden, kv_rows, &l->k},
        {"attn_v.weight", s->hidden, kv_rows, &l->v},
        {"attn_output.weight", q_rows, s->hidden, &l->out},
        {"ffn_norm.weight", s->hidden, 0, &l->ffn_norm},
        {"ffn_gate.weight", s->hidden, s->ff, &l->gate},
        {"ffn_up.weight", s->hidden, s->ff, &l->up},
        {"ffn_down.weight", s->ff, s->hidden, &l->down},
    };
    const struct wanted biases[] = {
        {"attn_q.bias", q_rows, 0, &l->bias[0]},
        {"attn_k.bias", kv_rows, 0, &l->bias[1]},
        {"attn_v.bias", kv_rows, 0, &l->bias[2]},
    };
    const struct wanted norms[] = {
        {"attn_q_norm.weight", s->head_dim, 0, &l->q_norm},
        {"attn_k_norm.weight", s->head_dim, 0, &l->k_norm},
    };
    TRY(find_wanted(g, i, all, ARRAY_LEN(all)));
    if (p->family->qkv_bias)
        TRY(find_wanted(g, i, biases, ARRAY_LEN(biases)));
    return p->family->qk_norm ? find_wanted(g, i, norms, ARRAY_LEN(norms)) : OK;
}

/* Rows of the embedding beyond the vocabulary (padding of some trainers) are never used. */
static status find_embedding(struct plan *p, const struct gguf *g)
{
    struct model_shape *s = &p->shape;
    const struct gguf_value *tokens = gguf_find(g, "tokenizer.ggml.tokens");
    const struct gguf_tensor *t = gguf_tensor_find(g, "token_embd.weight");
    uint32_t declared;
    if (tokens == NULL || tokens->type != GGUF_ARRAY)
        return err(ERR_FORMAT, "%s: key tokenizer.ggml.tokens (an array) is missing", gguf_path(g));
    if (tokens->count < 1 || tokens->count > MAX_VOCAB)
        return gguf_refuse(g, tokens->p, "a vocabulary of %llu tokens, allowed are 1 to %d",
                           (unsigned long long)tokens->count, (int)MAX_VOCAB);
    s->vocab = (uint32_t)tokens->count;
    uint64_t rows = t == NULL ? s->vocab : t->ne[1];
    if (rows < s->vocab || rows > MAX_VOCAB)
        return gguf_refuse(g, t->info, "tensor token_embd.weight has %llu rows for %u tokens",
                           (unsigned long long)rows, s->vocab);
    TRY(find_tensor(g, "token_embd.weight", s->hidden, (uint32_t)rows, &p->embedding));
    TRY(gguf_u32_or(g, KEY("vocab_size"), (uint32_t)rows, (uint32_t)rows, (uint32_t)rows,
                    &declared));
    if (gguf_tensor_find(g, "output.weight") != NULL)
        TRY(find_tensor(g, "output.weight", s->hidden, (uint32_t)rows, &p->head));
    TRY(find_tensor(g, "output_norm.weight", s->hidden, 0, &p->final_norm));
    if (gguf_tensor_find(g, "rope_freqs.weight") != NULL)
        TRY(find_tensor(g, "rope_freqs.weight", s->head_dim / 2, 0, &p->rope_freqs));
    return OK;
}

/* Ends the name with `end`? */
static bool is_named(const struct gguf_tensor *t, const char *end)
{
    size_t n = strlen(end);
    return t->name.len > n && memcmp(t->name.p + t->name.len - n, end, n) == 0;
}

/* Which rule of a family forbids to pass the tensor over; NULL: none. */
static const char *must_not_ignore(const struct family *f, const struct gguf_tensor *t)
{
    static const char *const served[] = {".attn_q.bias", ".attn_k.bias", ".attn_v.bias"};
    if (is_named(t, ".attn_q_norm.weight") || is_named(t, ".attn_k_norm.weight"))
        return f->qk_norm ? NULL : "norms of heads";
    for (size_t i = 0; f->qkv_bias && i < ARRAY_LEN(served); i++)
        if (is_named(t, served[i]))
            return NULL;
    return is_named(t, ".bias") ? f->qkv_bias ? "such biases" : "biases" : NULL;
}

/* A bias or a norm that were passed over would make a model that babbles, so it is refused. */
static status check_strangers(const struct plan *p, const struct gguf *g)
{
    size_t of_layer = 9u + (p->family->qkv_bias ? 3u : 0u) + (p->family->qk_norm ? 2u : 0u);
    size_t n_used = 2 + of_layer * p->shape.layers + (p->head != NULL) + (p->rope_freqs != NULL);
    size_t n = gguf_n_tensors(g);
    for (size_t i = 0; i < n; i++) {
        const struct gguf_tensor *t = gguf_tensor_at(g, i);
        const char *what = must_not_ignore(p->family, t);
        if (what != NULL)
            return gguf_refuse(g, t->info, "tensor %.*s: %s are not served for %s",
                               (int)t->name.len, t->name.p, what, p->family->name);
    }
    if (n > n_used)
        log_line(LOG_WARN, "%s: %zu tensors without a known role are not used", gguf_path(g),
                 n - n_used);
    if (gguf_find(g, KEY("attention.sliding_window")) != NULL)
        log_line(LOG_WARN, "%s: %s.attention.sliding_window is not used, as in llama.cpp",
                 gguf_path(g), p->family->name);
    return OK;
}

status llama_plan(struct plan *p, const struct gguf *g)
{
    *p = (struct plan){0};
    TRY(find_family(p, g));
    TRY(read_numbers(p, g));
    p->layers = mem_alloc(p->shape.layers * sizeof *p->layers);
    status st = find_embedding(p, g);
    for (uint32_t i = 0; st == OK && i < p->shape.layers; i++)
        st = find_layer(p, g, i);
    if (st == OK)
        st = check_strangers(p, g);
    if (st != OK)
        plan_fini(p);
    return st;
}

void plan_fini(struct plan *p)
{
    mem_free(p->layers);
    mem_free(p->made);
    mem_free(p->names);
    *p = (struct plan){0};
}
