/* Sparse attention inside a step: introduces the plug-ins (sparse/) to the pages (cache/).
 *
 * Per layer, for the rows that attend by plan: the plug-in scores its digests, the backend reduces
 * over the group and picks, pages are resolved to blocks (and fetched where a sequence is SPILLED),
 * and one attend call sums exact rows, tails and estimates for the whole batch. Rows that attend
 * everything (prefill, the `dense` plug-in) go straight to that call. */
#ifndef ENGINE_ATTENTION_H
#define ENGINE_ATTENTION_H

#include "cache/kv.h"
#include "sparse/plugin.h"

/* A plug-in with values, on this model; shared by all sequences that chose the same. */
struct sparse_instance {
    const struct sparse_plugin *plugin;
    struct sparse_choice choice;
    struct sparse_traits traits;
    uint64_t layout_id, digest_id;
};

struct attention;

/* max_rows: plan rows of a step. max_positions: longest sequence. */
status attention_create(struct attention **out, struct backend *be, const struct kv_memory *kv,
                        uint32_t heads, float scale, uint32_t max_rows, uint32_t max_positions);
void attention_destroy(struct attention *at);

/* The instance for a choice that sparse_choice_check accepted; made at its first use. NULL: no memory
 * or too many different ones (the text in err_text()). */
const struct sparse_instance *attention_instance(struct attention *at,
                                                 const struct sparse_choice *c);

/* Rows selected for a sequence of `length` positions: budget in rows, whole pages, at least one. */
uint32_t attention_budget(const struct sparse_instance *in, const struct kv_geometry *geo,
                          uint32_t length);
/* The most pages a plan row may name: what a hot set must hold at least (slots per lane). */
uint32_t attention_min_slots(const struct sparse_instance *in, const struct kv_geometry *geo,
                             uint32_t length);

/* ---- a step ---- */

void attention_begin(struct attention *at);
/* One row of the step that attends by plan; rows must be added in the order of the batch. */
void attention_add(struct attention *at, const struct sparse_instance *in, const struct plan_row *row);
/* Called by model_forward after append, layer by layer (struct batch's hook). */
void attention_layer(struct attention *at, uint32_t layer, const struct batch_seq *seqs,
                     uint32_t n_seqs, const void *qkv, void *out);

/* Recorder of selections (--record-selection FILE): every (step, sequence, layer, head) with the
 * pages picked. Format in engine/tool/trace.h. NULL: off. */
struct trace_writer;
void attention_record(struct attention *at, struct trace_writer *w);

#endif
