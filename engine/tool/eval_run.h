/* The smallest thing that runs a model on the sparse path: one RESIDENT sequence, its blocks in
 * order, no scheduler and no cache. What `spind eval` and `spind calibrate` measure on.
 *
 * A prefill is computed once, densely, in position order, and kept: segments are sealed into a second
 * copy of the blocks, so any number of plug-ins, layouts and budgets can be run behind one prefill,
 * and the dense reference too. (The daemon seals in place; dense rows then sum the same numbers in
 * another order.) Rows behind the prefill are teacher-forced many to a step: each is a row of a plan of
 * its own and selects for itself, so the result is that of single steps. Segments are sealed where the
 * daemon seals them: when complete and 64 younger positions exist.
 *
 * Everything aborts or returns a status; one thread owns it. */
#ifndef ENGINE_TOOL_EVAL_RUN_H
#define ENGINE_TOOL_EVAL_RUN_H

#include "engine/attention.h"
#include "engine/model/model.h"

enum { EVAL_STEP_ROWS = 32, EVAL_CHUNK_ROWS = 256 };

struct eval_run_config {
    const char *model; /* path of a GGUF file */
    const char *isa;   /* NULL: auto */
    uint32_t n_threads, block_rows, exempt_layers;
    uint32_t max_positions; /* of the longest sequence */
    double rope_scale; /* > 1: positions beyond the model's, by NTK-aware scaling of the base */
    const char *policy, *policy_file; /* head policy; NULL: none */
    enum kv_type kv_type;
};

struct eval_run; /* one model, one sequence */

/* Sees every layer of every step right after append: q is rotated, k is not. qkv: [n_rows][(heads + 2
 * kv_heads) * head_dim], rows at positions from first_pos on. k: [n_rows][kv_heads][head_dim], rotated
 * and rounded as pages hold it; only while a watcher is set. */
struct eval_layer {
    uint32_t layer, first_pos, n_rows;
    const float *qkv, *k;
};
typedef void eval_watcher(void *arg, const struct eval_layer *l);

status eval_run_open(struct eval_run **out, const struct eval_run_config *cfg);
void eval_run_close(struct eval_run *r); /* NULL is allowed */
const struct model_info *eval_run_info(const struct eval_run *r);
const struct tokenizer *eval_run_tokenizer(const struct eval_run *r);
const struct kv_memory *eval_run_memory(const struct eval_run *r);

/* The sequence becomes these n tokens, computed densely. What it begins with and was computed before
 * is not computed again. */
status eval_run_prefill(struct eval_run *r, const uint32_t *tokens, uint32_t n);
/* n more tokens behind what is held, attending by plan (NULL: everything). logits: [n][vocab], row i
 * predicts the token behind tokens[i]; NULL: not wanted. */
status eval_run_rows(struct eval_run *r, const struct sparse_choice *c, const uint32_t *tokens,
                     uint32_t n, float *logits);
/* Back to the first n positions, n >= what was prefilled. */
void eval_run_rewind(struct eval_run *r, uint32_t n);
/* Forgets what was prefilled: the next prefill starts at position 0 (a watcher wants to see it all). */
void eval_run_forget(struct eval_run *r);

/* What a choice selects and scans behind a context of this length; digests without the row map. */
struct eval_cost {
    uint32_t budget; /* selected rows of sealed positions, beside sinks and tail */
    uint32_t rows;   /* attended exactly, all in all */
    double share;    /* budget / context */
    double
        scan_bytes; /* of digests, all SPARSE lanes; a token reads them all if not coarse to fine */
};
status eval_run_cost(struct eval_run *r, const struct sparse_choice *c, uint32_t context,
                     struct eval_cost *out);

void eval_run_watch(struct eval_run *r, eval_watcher *watch, void *arg); /* NULL: none */
void eval_run_record(struct eval_run *r, attention_recorder *record, void *arg);
/* Position (of the sequence) of each row of a page, as sealed for the choice that ran last. */
void eval_run_page_positions(const struct eval_run *r, const struct sparse_traits *t,
                             uint32_t layer, uint32_t head, uint32_t page,
                             uint32_t *out /* [block_rows] */);

#endif
