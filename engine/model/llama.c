/* The llama architecture as GGUF writes it: which numbers and tensors there must be.
 *
 * Everything is checked before anything is multiplied, divided or allocated by it: ranges from
 * reference/models.md 1.8 item 9, shapes of tensors against the numbers. What the file has and this
 * reader does not serve (biases, experts, other RoPE scalings) is refused by name; only tensors
 * without any known role are passed over, with a line on the log. */
#include "engine/model/internal.h"
#include "kernels/log.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum {
    MAX_LAYERS = 1024,
    MAX_HEADS = 1024,
    MAX_HEAD_DIM = 512,
    MAX_HIDDEN = 65536,
    MAX_FF = 1 << 20,
    MAX_VOCAB = 1 << 21,
    MAX_POSITIONS = 1 << 24,
};

static status check_architecture(const struct gguf *g)
{
    struct text_view arch;
    char name[32];
    TRY(gguf_string(g, "general.architecture", &arch));
    if (arch.len == 5 && memcmp(arch.p, "llama", 5) == 0)
        return OK;
    gguf_text_copy(name, sizeof name, arch);
    return gguf_refuse(g, arch.p, "the architecture is \"%s\"; spind serves \"llama\"", name);
}

static status read_heads(struct plan *p, const struct gguf *g)
{
    struct model_shape *s = &p->shape;
    uint32_t value_dim, rope_dim;
    TRY(gguf_u32_uniform(g, "llama.attention.head_count", s->layers, 1, MAX_HEADS, &s->heads));
    s->kv_heads = s->heads;
    if (gguf_find(g, "llama.attention.head_count_kv") != NULL)
        TRY(gguf_u32_uniform(g, "llama.attention.head_count_kv", s->layers, 1, MAX_HEADS,
                             &s->kv_heads));
    if (s->heads % s->kv_heads != 0)
        return gguf_refuse(g, gguf_find(g, "llama.attention.head_count_kv")->p,
                           "%u heads cannot share %u KV heads evenly", s->heads, s->kv_heads);
    const struct gguf_value *key_length = gguf_find(g, "llama.attention.key_length");
    if (key_length == NULL && s->hidden % s->heads != 0)
        return gguf_refuse(g, gguf_find(g, "llama.attention.head_count")->p,
                           "an embedding of %u does not divide into %u heads", s->hidden, s->heads);
    TRY(gguf_u32_or(g, "llama.attention.key_length", 2, MAX_HEAD_DIM, s->hidden / s->heads,
                    &s->head_dim));
    if (s->head_dim % 2 != 0 || s->head_dim < 2 || s->head_dim > MAX_HEAD_DIM)
        return gguf_refuse(
            g, (key_length ? key_length : gguf_find(g, "llama.attention.head_count"))->p,
            "a head has %u numbers, allowed are even ones up to %d", s->head_dim,
            (int)MAX_HEAD_DIM);
    TRY(gguf_u32_or(g, "llama.attention.value_length", s->head_dim, s->head_dim, s->head_dim,
                    &value_dim));
    TRY(gguf_u32_or(g, "llama.rope.dimension_count", s->head_dim, s->head_dim, s->head_dim,
                    &rope_dim));
    return gguf_f32_or(g, "llama.attention.scale", 1e-6, 1e3, 1.0f / sqrtf((float)s->head_dim),
                       &p->attn_scale);
}

/* Absent means linear, and its factor is 1 unless said otherwise (llama.cpp). */
static status read_rope(struct plan *p, const struct gguf *g)
{
    struct text_view type = {"linear", 6};
    char name[32];
    TRY(gguf_f32_or(g, "llama.rope.freq_base", 1.0 + 1e-6, 1e12, 10000.0f, &p->shape.rope_base));
    if (gguf_find(g, "llama.rope.scaling.type") != NULL)
        TRY(gguf_string(g, "llama.rope.scaling.type", &type));
    TRY(gguf_f32_or(g, "llama.rope.scale_linear", 1e-3, 1e6, 1.0f,
                    &p->rope_divisor)); /* old name */
    TRY(gguf_f32_or(g, "llama.rope.scaling.factor", 1e-3, 1e6, p->rope_divisor, &p->rope_divisor));
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
    TRY(gguf_u32(g, "llama.block_count", 1, MAX_LAYERS, &s->layers));
    TRY(gguf_u32(g, "llama.embedding_length", 1, MAX_HIDDEN, &s->hidden));
    TRY(gguf_u32_uniform(g, "llama.feed_forward_length", s->layers, 1, MAX_FF, &s->ff));
    TRY(gguf_u32(g, "llama.context_length", 1, MAX_POSITIONS, &s->max_positions));
    TRY(gguf_f32(g, "llama.attention.layer_norm_rms_epsilon", 1e-12, 0.1, &s->norm_eps));
    TRY(gguf_u32_or(g, "llama.expert_count", 0, 0, 0, &none)); /* no mixtures of experts */
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

static status find_layer(struct plan *p, const struct gguf *g, uint32_t i)
{
    const struct model_shape *s = &p->shape;
    struct plan_layer *l = &p->layers[i];
    uint32_t q_rows = s->heads * s->head_dim, kv_rows = s->kv_heads * s->head_dim;
    const struct {
        const char *name;
        uint32_t cols, rows;
        const struct gguf_tensor **to;
    } wanted[] = {
        {"attn_norm", s->hidden, 0, &l->attn_norm},  {"attn_q", s->hidden, q_rows, &l->q},
        {"attn_k", s->hidden, kv_rows, &l->k},       {"attn_v", s->hidden, kv_rows, &l->v},
        {"attn_output", q_rows, s->hidden, &l->out}, {"ffn_norm", s->hidden, 0, &l->ffn_norm},
        {"ffn_gate", s->hidden, s->ff, &l->gate},    {"ffn_up", s->hidden, s->ff, &l->up},
        {"ffn_down", s->ff, s->hidden, &l->down},
    };
    for (size_t j = 0; j < ARRAY_LEN(wanted); j++) {
        char name[64];
        snprintf(name, sizeof name, "blk.%u.%s.weight", i, wanted[j].name);
        TRY(find_tensor(g, name, wanted[j].cols, wanted[j].rows, wanted[j].to));
    }
    return OK;
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
    TRY(gguf_u32_or(g, "llama.vocab_size", (uint32_t)rows, (uint32_t)rows, (uint32_t)rows,
                    &declared));
    if (gguf_tensor_find(g, "output.weight") != NULL)
        TRY(find_tensor(g, "output.weight", s->hidden, (uint32_t)rows, &p->head));
    TRY(find_tensor(g, "output_norm.weight", s->hidden, 0, &p->final_norm));
    if (gguf_tensor_find(g, "rope_freqs.weight") != NULL)
        TRY(find_tensor(g, "rope_freqs.weight", s->head_dim / 2, 0, &p->rope_freqs));
    return OK;
}

/* A bias that were passed over would make a model that babbles, so it is refused. */
static status check_strangers(const struct plan *p, const struct gguf *g)
{
    size_t n_used = 2 + 9 * (size_t)p->shape.layers + (p->head != NULL) + (p->rope_freqs != NULL);
    size_t n = gguf_n_tensors(g);
    for (size_t i = 0; i < n; i++) {
        const struct gguf_tensor *t = gguf_tensor_at(g, i);
        if (t->name.len > 5 && memcmp(t->name.p + t->name.len - 5, ".bias", 5) == 0)
            return gguf_refuse(g, t->info, "tensor %.*s: biases are not served for llama",
                               (int)t->name.len, t->name.p);
    }
    if (n > n_used)
        log_line(LOG_WARN, "%s: %zu tensors without a known role are not used", gguf_path(g),
                 n - n_used);
    if (gguf_find(g, "llama.attention.sliding_window") != NULL)
        log_line(LOG_WARN, "%s: llama.attention.sliding_window is not used, as in llama.cpp",
                 gguf_path(g));
    return OK;
}

status llama_plan(struct plan *p, const struct gguf *g)
{
    *p = (struct plan){0};
    TRY(check_architecture(g));
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
    *p = (struct plan){0};
}
