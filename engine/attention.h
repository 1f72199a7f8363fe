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

/* max_rows: plan rows of a step. max_positions: longest sequence. Scores and page lists of a layer
 * live in one buffer of bounded size; a step that needs more is worked on in tiles of rows, which
 * changes no result. */
status attention_create(struct attention **out, struct backend *be, const struct kv_memory *kv,
                        uint32_t heads, float scale, uint32_t max_rows, uint32_t max_positions);
void attention_destroy(struct attention *at); /* every instance must have been released */

/* The instance for a choice that sparse_choice_check accepted, with a reference: one for each
 * different choice that somebody holds. NULL: no memory, or digests larger than the process was
 * started with (the text in err_text()). */
const struct sparse_instance *attention_instance(struct attention *at,
                                                 const struct sparse_choice *c);
void attention_release(struct attention *at, const struct sparse_instance *in);

/* Rows selected for a sequence of `length` positions: budget in rows, whole pages, at least one, and
 * no fewer than the choice's min_rows where the sequence has them. */
uint32_t attention_budget(const struct sparse_instance *in, const struct kv_geometry *geo,
                          uint32_t length);
/* The most pages a plan row may name: what a hot set must hold at least (slots per lane). */
uint32_t attention_min_slots(const struct sparse_instance *in, const struct kv_geometry *geo,
                             uint32_t length);

/* What a sequence keeps from step to step: its name for the recorder and, with a re-selection
 * interval above 1, its last selection. Its content follows from positions alone, so neither chunks
 * nor preemption change which rows select. NULL: no memory, or the sequences that there are keep too
 * much of ATTENTION_KEPT_BYTES. */
enum { ATTENTION_KEPT_BYTES = 64 << 20 }; /* of all sequences' last selections together */
struct attention_seq;
size_t attention_seq_bytes(const struct sparse_instance *in, const struct kv_geometry *geo,
                           uint32_t max_positions); /* of its last selection; 0 with interval 1 */
struct attention_seq *attention_seq_create(struct attention *at, const struct sparse_instance *in,
                                           uint64_t id, uint32_t max_positions);
void attention_seq_destroy(struct attention *at, struct attention_seq *s); /* NULL is allowed */

/* Seals a segment through the instance's plug-in, between kv_seq_seal_begin and its end. first_record:
 * segment 0's of the sequence; not read with segment 0. */
void attention_seal(struct attention *at, const struct sparse_instance *in, uint32_t segment,
                    uint32_t record, uint32_t first_record, const block_id *from,
                    const block_id *to);
/* The same in another memory with the same sizes of pages and records. */
void attention_seal_in(struct attention *at, const struct sparse_instance *in,
                       const struct kv_memory *kv, uint32_t segment, uint32_t record,
                       uint32_t first_record, const block_id *from, const block_id *to);

/* ---- a step ---- */

void attention_begin(struct attention *at);
/* One row of the step that attends by plan; rows must be added in the order of the batch, and the
 * batch_seq's first_plan counts them in the order they were added. row, pos, n_segments (at least 1),
 * records, blocks and hot are read; budget, estimate, top_p and miss_threshold come from the
 * instance. seq may be NULL with interval 1 and no recorder. */
void attention_add(struct attention *at, const struct sparse_instance *pub,
                   struct attention_seq *seq, const struct plan_row *row);
/* Rows added since attention_begin: with none, every row attends everything. */
uint32_t attention_rows(const struct attention *at);
/* Called by model_forward after append, layer by layer from 0 on (struct batch's hook). */
void attention_layer(struct attention *at, uint32_t layer, const struct batch_seq *seqs,
                     uint32_t n_seqs, const void *qkv, void *out);
/* Selections (of a row, layer and SPARSE head), since start, for which no score of the plug-in was more
 * than -inf: select took the first pages. Logged once per instance. After sync. */
uint64_t attention_unscored(struct attention *at);

/* Recorder of selections (--record-selection FILE): told of every (row, layer, SPARSE head) what was
 * picked, pages ascending with the sinks', before any residency. id: attention_seq_create's. For
 * backends whose operations run at once (the CPU's). NULL: off. */
struct attention_selection {
    uint64_t id;
    uint32_t pos, n_segments, layer, head;
    const uint32_t *pages; /* [n_pages] */
    uint32_t n_pages;
    const struct sparse_instance *in;
};
typedef void attention_recorder(void *arg, const struct attention_selection *s);
void attention_record(struct attention *at, attention_recorder *record, void *arg);

#endif
