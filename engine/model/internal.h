/* What the files of engine/model share, in the order of loading:
 *   gguf.c, gguf_get.c   the file's directory, checked
 *   llama.c              hyper-parameters and tensors: a plan, checked against each other
 *   dictionary.c              tokenizer, chat template, end tokens
 *   load.c               weights to the backend
 *   model.c, forward.c   the model's life; one pass over a batch
 * A new architecture of the llama family is another reader of a plan. */
#ifndef ENGINE_MODEL_INTERNAL_H
#define ENGINE_MODEL_INTERNAL_H

#include "engine/model/gguf.h"
#include "engine/model/model.h"

struct plan_layer {
    const struct gguf_tensor *attn_norm, *ffn_norm; /* [hidden] */
    const struct gguf_tensor *q, *k, *v;            /* [heads or kv_heads * head_dim][hidden] */
    const struct gguf_tensor *out;                  /* [hidden][heads * head_dim] */
    const struct gguf_tensor *gate, *up;            /* [ff][hidden] */
    const struct gguf_tensor *down;                 /* [hidden][ff] */
};

/* What will be loaded: every number in range, every tensor there with the right shape. */
struct plan {
    struct model_shape shape; /* vocab: rows of the vocabulary, at most those of the embedding */
    float attn_scale, rope_divisor;
    const struct gguf_tensor *embedding;  /* [>= vocab][hidden] */
    const struct gguf_tensor *head;       /* the same shape; NULL: the embedding serves */
    const struct gguf_tensor *final_norm; /* [hidden] */
    const struct gguf_tensor *rope_freqs; /* [head_dim / 2] divisors; NULL: none */
    struct plan_layer *layers;            /* [shape.layers] */
};

status llama_plan(struct plan *p, const struct gguf *g);
void plan_fini(struct plan *p);

struct dictionary {
    struct tokenizer *tokenizer;
    const struct chat_template *chat; /* NULL: none in the file */
    uint32_t end_ids[8], n_end_ids;
};

status dictionary_read(struct dictionary *v, struct gguf *g);
void dictionary_find_ends(struct dictionary *v); /* adds control tokens known to end a turn */

struct model_layer {
    struct weight *qkv, *out, *gate_up, *down;
    const float *attn_norm, *ffn_norm; /* inside model.norms */
};

struct model {
    struct model_info info;
    struct backend *be;
    struct tokenizer *tokenizer;
    const struct chat_template *chat;

    struct model_layer *layers;
    struct weight *embedding;
    struct weight *head; /* may be the embedding */
    float *norms;        /* backend memory [2 * layers + 1][hidden]; NULL: mock */
    const float *final_norm;
    float *rope; /* backend memory [2][max_positions][head_dim / 2]: cos, then sin */
    float attn_scale;

    /* activations of a step (model_reserve) */
    uint32_t max_rows, max_logits;
    void *x;      /* [max_rows][hidden] the residual stream */
    void *qkv;    /* [max_rows][(heads + 2 kv_heads) * head_dim] */
    void *att;    /* [max_rows][heads * head_dim] */
    void *ff;     /* [max_rows][ff] */
    void *last;   /* [max_logits][hidden] rows that want logits, after the last attention */
    void *logits; /* [max_logits][vocab] */
};

static inline size_t model_norms_bytes(const struct model_shape *s)
{
    return (2 * (size_t)s->layers + 1) * s->hidden * sizeof(float);
}

static inline size_t model_rope_bytes(const struct model_shape *s)
{
    return (size_t)s->max_positions * s->head_dim * sizeof(float);
}

/* Gives back the activations (forward.c). */
void model_release(struct model *m);

#endif
