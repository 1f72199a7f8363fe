/* Prompts that are longer than HBM, computed layer by layer instead of chunk by chunk (docs/decisions.md).
 *
 * Chunk by chunk, every layer of every chunk needs the KV of all rows before it: of a prompt that HBM cannot hold
 * it would come back from DRAM for each chunk. Layer by layer only one layer's KV is needed at a time: all chunks
 * of a layer run, then all of the next one. The residual stream of the whole prompt waits between two layers.
 *
 * A *unit* is one chunk of one layer: the work between two steps of other sequences. The sequence is SPILLED and
 * has all its places from the beginning (kv_seq_lay); a layer's pages lie in a loan of HBM, are sealed there, and
 * go where they belong. The last unit is a step of the sequence's own: it draws. From there on it is
 * like any SPILLED sequence, and its tokens are those of a prompt that was read chunk by chunk.
 *
 * At most one sequence at a time is computed so. Engine thread only. */
#ifndef ENGINE_LAYER_MAJOR_H
#define ENGINE_LAYER_MAJOR_H

#include "kernels/backend.h"

struct model;
struct sched;
struct sequence;
struct layer_major;

enum {
    LAYER_MAJOR_AT_ONCE = 4, /* units in a step in which nobody else computes */
    LAYER_MAJOR_MOST_HIT =
        8, /* a hit of more than 1/MOST_HIT of the prompt is worth more than this */
};

/* Is the prompt of q, of which n_hit rows were found, to be read layer by layer? It is longer than HBM, shorter
 * than DRAM, attends by plan later, and wants no log-probabilities; its layers have lanes of one class each, none of
 * them STREAM; and a layer's KV, the residual stream, the least hot set and the tail fit in HBM, as do tail and hot set of
 * the first of its answer. */
bool layer_major_suits(const struct sched *s, const struct sequence *q, uint32_t n_hit);
/* Blocks of HBM for want of which a prompt that is longer than that does not suit; 0: it does, or there is another
 * reason. */
uint32_t layer_major_lacks(const struct sched *s, const struct sequence *q, uint32_t n_hit);
/* For q that is open without a hit, and suits. Spills others for room. ERR_FULL, ERR_MEMORY: q is to be closed. */
status layer_major_begin(struct sched *s, struct sequence *q);
/* Gives the loan back; nothing if there is none. */
void layer_major_end(struct sched *s, struct sequence *q);

/* Rows of the next unit. *last: it ends the prompt. */
uint32_t layer_major_next(const struct layer_major *lm, bool *last);
/* Queues the next unit; logits as of model_forward, of the last unit only. Until the backend has synced or
 * submitted, at most AT_ONCE units. */
const void *layer_major_run(struct layer_major *lm, struct backend *be, struct model *m,
                            const uint32_t *logit_rows, uint32_t n_logits);
/* Rows of all layers that are queued, and that there are. */
void layer_major_progress(const struct layer_major *lm, uint64_t *done, uint64_t *all);

#endif
