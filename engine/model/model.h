/* A language model: its shape, its weights on the device, and one forward pass over a batch.
 *
 * The pass is written once over the backend's operations; a new architecture of the llama family
 * is a row of differences in family.c. */
#ifndef ENGINE_MODEL_MODEL_H
#define ENGINE_MODEL_MODEL_H

#include "kernels/backend.h"

struct tokenizer;
struct chat_template;
struct attention;
struct model;

struct model_shape {
    uint32_t layers, hidden, ff, heads, kv_heads, head_dim, vocab, max_positions;
    float norm_eps, rope_base;
};

struct model_info {
    struct model_shape shape;
    float attn_scale; /* of q.k */
    char architecture[32], name[128];
    uint64_t n_params, weight_bytes;
    uint32_t end_ids[8], n_end_ids;
};

/* Opens the file, checks it, packs the weights (with progress on the log) and closes it again.
 * max_positions: longest context wanted, 0 for the model's own. */
status model_load(struct model **out, struct backend *be, const char *path, uint32_t max_positions);
/* The same for a config.json of Hugging Face, or the folder it is in: its shape, weights made up
 * (kernels/core/dummy.h), always the same ones, and a vocabulary of bytes (tokenizer_create_numbered). For
 * measurements; so max_positions may be more than the description says. */
status model_load_dummy(struct model **out, struct backend *be, const char *path,
                        uint32_t max_positions);
/* Everything that loading checks before it packs a weight, without a device: the header, the vocabulary, the
 * template. weight_bytes: of the file, or as much as is to be made up; n_params: 0, nobody counted. */
status model_check(struct model_info *out, const char *path, bool dummy, uint32_t max_positions);
/* A model without weights for the mock backend: shape of the default model, byte tokenizer. */
status model_create_mock(struct model **out, struct backend *be, uint32_t max_positions);
void model_destroy(struct model *m);

const struct model_info *model_info(const struct model *m);
const struct tokenizer *model_tokenizer(const struct model *m);
const struct chat_template *model_chat(const struct model *m); /* NULL: none in the file */

/* Activation memory for steps of at most max_rows rows, max_logits of which want logits. */
status model_reserve(struct model *m, uint32_t max_rows, uint32_t max_logits);
size_t model_reserve_bytes(struct model *m, uint32_t max_rows, uint32_t max_logits); /* of it */

struct batch {
    const struct kv_memory *kv;
    uint32_t n_rows, n_seqs, n_logits;
    const uint32_t *tokens;       /* [n_rows] */
    const struct batch_seq *seqs; /* [n_seqs], rows in order without gaps */
    const uint32_t *logit_rows;   /* [n_logits] rows whose logits are wanted, ascending */
    /* Rows [n_rows, + n_spare) belong to no sequence, logits [n_logits, + n_spare) to nobody: they make the
     * step as large as steps before it were (backend's bucket). Their tokens and logit_rows are there. */
    uint32_t n_spare;
    /* What attends, with the plans of this step's rows (engine/attention.h); NULL: every row attends
     * everything before it. */
    struct attention *attention;
};

/* Runs the batch: appends K and V of every row, returns act [n_logits][vocab] of the last norm and
 * head (owned by the model, valid until the next call). Queues; errors come out of sync. */
const void *model_forward(struct model *m, const struct batch *b);

/* One layer of the batch, whose rows come from model_rows (layer 0: from its tokens) and go there again. The last
 * layer ends as model_forward does, with the same result. kv_layer: the layer's number in b->kv. */
const void *model_layer(struct model *m, const struct batch *b, uint32_t layer, uint32_t kv_layer);
/* Of a batch, between two layers: act [n_rows][hidden], without gaps. The model's, until the next call. */
void *model_rows(const struct model *m, size_t *row_bytes);

/* Appends random K and V for every row of the batch, and computes nothing: a context of any length in
 * the time of writing it, for measurements. The numbers' spread is about that of a real model's.
 * ERR_MEMORY. Queues. */
status model_fill(struct model *m, const struct batch *b);

#endif
