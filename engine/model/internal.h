/* What the files of engine/model share, in the order of loading:
 *   gguf.c, gguf_get.c   the file's directory, checked
 *   family.c             the architectures, by their differences
 *   llama.c              a GGUF's hyper-parameters and tensors: a plan, checked against each other
 *   hf.c                 the same plan from a config.json, its tensors made up
 *   dictionary.c         tokenizer, chat template, end tokens
 *   load.c               weights to the backend
 *   model.c, forward.c   the model's life; one pass over a batch */
#ifndef ENGINE_MODEL_INTERNAL_H
#define ENGINE_MODEL_INTERNAL_H

#include "engine/model/gguf.h"
#include "engine/model/model.h"

/* Limits of reference/models.md 1.8 item 9, for files of every kind. */
enum {
    MAX_LAYERS = 1024,
    MAX_HEADS = 1024,
    MAX_HEAD_DIM = 512,
    MAX_HIDDEN = 65536,
    MAX_FF = 1 << 20,
    MAX_VOCAB = 1 << 21,
    MAX_POSITIONS = 1 << 24,
};

/* What tells the architectures of the llama family apart. */
struct family {
    const char *name; /* general.architecture; also model_type of config.json */
    const char *hf_class,
        *hf_alias[2]; /* architectures[0], then another class and its model_type */
    bool halves;   /* a GGUF has the rows of q and k as Hugging Face has them: pairs (i, i + d/2) */
    bool qkv_bias; /* q, k and v have biases */
    bool qk_norm;  /* heads of q and of k pass an RMSNorm before RoPE */
};

const struct family *family_find(struct text_view name); /* by `name`; NULL: none */
/* By class or model_type of a config.json; NULL: none. */
const struct family *family_of_class(const char *hf_class);
const struct family *family_of_type(const char *model_type);
#define FAMILY_NAMES "llama, qwen2 and qwen3" /* for error texts */

struct plan_layer {
    const struct gguf_tensor *attn_norm, *ffn_norm; /* [hidden] */
    const struct gguf_tensor *q, *k, *v;            /* [heads or kv_heads * head_dim][hidden] */
    const struct gguf_tensor *bias[3];              /* of q, k and v; NULL: the family has none */
    const struct gguf_tensor *q_norm, *k_norm;      /* [head_dim]; NULL: the family has none */
    const struct gguf_tensor *out;                  /* [hidden][heads * head_dim] */
    const struct gguf_tensor *gate, *up;            /* [ff][hidden] */
    const struct gguf_tensor *down;                 /* [hidden][ff] */
};

/* Llama 3's RoPE scaling (reference/models.md 2.5); factor 0: none. */
struct rope_llama3 {
    double factor, low, high, original;
};

struct dictionary {
    struct tokenizer *tokenizer;
    const struct chat_template *chat; /* NULL: none in the file */
    uint32_t end_ids[8], n_end_ids;
};

/* What will be loaded: every number in range, every tensor there with the right shape. */
struct plan {
    const struct family *family;
    struct model_shape shape; /* vocab: rows of the vocabulary, at most those of the embedding */
    float attn_scale, rope_divisor;
    const struct gguf_tensor *embedding;  /* [>= vocab][hidden] */
    const struct gguf_tensor *head;       /* the same shape; NULL: the embedding serves */
    const struct gguf_tensor *final_norm; /* [hidden] */
    const struct gguf_tensor *rope_freqs; /* [head_dim / 2] divisors; NULL: none */
    struct rope_llama3 llama3;            /* where no tensor says it */
    struct plan_layer *layers;            /* [shape.layers] */
    struct gguf_tensor *made; /* owned: tensors without data, to be made up; NULL: none */
    char *names;              /* of these, owned */
};

status llama_plan(struct plan *p, const struct gguf *g);
/* From a config.json, or the folder it is in: tensors have names and shapes and no data. */
status hf_plan(struct plan *p, struct dictionary *d, const char *path);
/* The same from a text of len bytes with a NUL behind it; name: for errors. */
status hf_plan_text(struct plan *p, struct dictionary *d, const char *text, size_t len,
                    const char *name);
bool hf_is_config(const char *path); /* the file begins as a JSON object does */
void plan_fini(struct plan *p);

status dictionary_read(struct dictionary *v, struct gguf *g);
void dictionary_find_ends(struct dictionary *v); /* adds control tokens known to end a turn */

struct model {
    struct model_info info;
    struct backend *be;
    struct tokenizer *tokenizer;
    const struct chat_template *chat;

    struct layer_weights *layers; /* norms and biases: inside `vectors` */
    struct weight *embedding;
    struct weight *head; /* may be the embedding */
    float *vectors;      /* backend memory: norms and biases; NULL: mock */
    size_t vectors_bytes;
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
    struct batch_seq *last_seqs; /* [max_logits] what of a batch the last layer attends */

    /* fill.c; NULL: nothing was filled yet */
    void *noise; /* like qkv, of some more rows */
    size_t noise_bytes;
};

static inline size_t model_rope_bytes(const struct model_shape *s)
{
    return (size_t)s->max_positions * s->head_dim * sizeof(float);
}

/* Gives back the activations (forward.c). */
void model_release(struct model *m);
void model_fill_release(struct model *m);

#endif
