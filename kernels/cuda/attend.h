/* What append.cu, known.cu and the files of attention share.
 *
 * A task is some rows of one sequence for one KV head: its queries are (row, head of the group), number
 * row * group + head, and they meet the same keys. What a task attends is up to three stretches: pages of
 * a plan's list or the sinks of a STREAM lane; positions of the block table; estimated partitions.
 * A stretch is cut into splits, from its own beginning, and the first two further into tiles of CUDA_TILE
 * positions. The order of sums is fixed by position:
 *   - scores: 16 dimensions per matrix instruction, from 0 up;
 *   - online softmax and values: tile by tile; a split begins with nothing;
 *   - splits are folded from the first to the last.
 * Queries are always the rows of the matrix instructions, positions or dimensions the columns, so a
 * row's result is the same bit for bit whether its task is FEW or MANY, alone or in a batch, and
 * whether its splits were folded on the way, by the last CTA or by the merge.
 *
 * Tasks by position are listed on the host, once a step (attend_list.cu, attend_split.h), a CTA each or several; what a
 * CTA needs lies in its entry, so it reads nothing else before it asks for pages. Planned rows need no list:
 * the device counts what there is to do and shares it out (attend_planned.cu). */
#ifndef KERNELS_CUDA_ATTEND_H
#define KERNELS_CUDA_ATTEND_H

#include "kernels/core/digest.h"
#include "kernels/cuda/attend_split.h"
#include "kernels/cuda/cuda.h"

enum {
    CUDA_TILE = 64,        /* positions of a step of the online softmax */
    CUDA_PLAN_SPLIT = 192, /* of planned rows: as much as a CTA has in flight at once */
    CUDA_ESTIMATES = 256,  /* estimated partitions of a split; ... */
    CUDA_CODED = 128,      /* ... with row codes, which take longer */
    CUDA_TAIL_SPLITS = (SEGMENT_ROWS + TAIL_ROWS + CUDA_PLAN_SPLIT - 1) / CUDA_PLAN_SPLIT,
    CUDA_THREADS = 128, /* of a CTA: 4 warps */
    CUDA_FEW = 16,      /* queries of a FEW task at most: rows of one matrix instruction */
    CUDA_MANY = 128,    /* of a MANY task, head_dim <= 128 */
    CUDA_MANY_256 = 64, /* of a MANY task, head_dim > 128 */
    CUDA_MAX_DIM = 256,
    CUDA_MAX_KV_HEADS = 128,
};

/* Who folds the partial results of a task's splits. */
enum attend_fold {
    FOLD_NONE, /* there is one split, or (MANY) one CTA has them all */
    FOLD_LAST, /* the last CTA to arrive */
    FOLD_MERGE /* another kernel: there are many */
};

/* A CTA's part of a task by position. */
struct attend_task {
    const block_id *table; /* NULL: an entry beyond the last; nothing to do */
    uint32_t row, pos;     /* first row of the batch, position of that row */
    uint32_t fresh; /* positions from here on are of this step; those before may be read early */
    uint32_t first_end, begin, end; /* attends [0, first_end), then [begin, end) causally */
    uint32_t n_first, n_splits;     /* splits of [0, first_end); of both */
    uint32_t split, end_split;      /* what this CTA runs, ... */
    uint32_t positions;             /* ... and how many these have */
    uint32_t
        partial; /* where the task's partial results begin, in rows of padded head_dim numbers: one
                         per split, n_rows * group queries each; where one CTA folds all splits,
                         one in all */
    uint32_t counter; /* FOLD_LAST: of CTAs that arrived */
    uint16_t head, n_rows;
    uint16_t n_items; /* CTAs of the task */
    uint16_t planned; /* splits are of CUDA_PLAN_SPLIT */
    uint8_t class_, fold;
};

/* A task whose partial results the merge folds. */
struct attend_merge {
    uint32_t row, n_rows, head, n_splits, partial; /* n_rows 0: beyond the last */
};

/* Planned rows of one instance, all their SPARSE lanes; or, with `lse`, what `known` wants of them. A
 * (row, KV head) is entry row * kv_heads + head. Its partial results: `slots` splits of pages, tail and
 * estimates, as many as there can be. */
struct attend_set {
    const struct cuda_row *rows;
    const uint32_t *pages, *masks, *n_pages, *estimates, *n_estimates;
    const float *scores;
    float *
        tail; /* [entry][known_bytes]: of attend, what `known` left (or NULL); of known, to be left */
    float *lse; /* of known: [entry][group] */
    const uint8_t *records;
    size_t record_bytes, record_lane_bytes;
    struct digest_layout layout;
    uint32_t n_rows, page_cap, estimate_cap, stride;
    uint32_t sink_rows; /* of known: in whole pages, instead of a list */
    uint32_t coded, part_rows, estimate_split;
    struct {
        uint32_t pages, tail, estimates;
    } slots;
    uint32_t n_slots;          /* of an entry in all */
    uint32_t n_units;          /* of all entries: splits to be run, as many as there can be */
    uint32_t runs_tail;        /* the tail is to be attended here */
    uint32_t part;             /* enum attend_part */
    uint32_t partial, counter; /* of the first entry */
};

/* Rows of a set that a launch attends. While pages of SPILLED rows travel (resolve.h), RESIDENT ones have a launch of
 * their own, behind the copies' but waiting for them only to end. */
enum attend_part { SET_ALL, SET_RESIDENT, SET_SPILLED };

/* Arguments of the kernels, by value. */
struct attend_call {
    const struct attend_task *tasks; /* [n_tasks], rounded up with entries that do nothing */
    const struct attend_merge *merges;
    uint32_t n_tasks, n_merges, max_queries;
    uint32_t lanes[CUDA_MAX_KV_HEADS]; /* of the layer: index | class << LANE_CLASS_SHIFT */
    const uint8_t *hbm[LANE_CLASSES], *dram[LANE_CLASSES];
    size_t block_bytes[LANE_CLASSES], page_bytes;
    uint32_t page_shift; /* 1 << page_shift == R */
    uint32_t dim, group, heads, kv_heads;
    uint32_t fp8;    /* pages are KV_E4M3 */
    size_t q_stride; /* numbers of a row of q */
    float scale;     /* times log2(e): scores are in base 2 */
    float plain_scale;
    const float *q;
    float *out, *lse;
    /* Results go here, as bf16, where a product is all that reads them; else NULL. */
    __nv_bfloat16 *half;
    float *part_o;         /* [partial][padded head_dim] */
    float2 *part_ml;       /* [partial] greatest score, sum */
    uint32_t *arrived;     /* [counter], 0 between kernels */
    struct attend_set set; /* of attend_run_planned */
};

enum { LANE_CLASS_SHIFT = 24 };

struct cuda_attend {
    size_t shared_max; /* bytes of shared memory a CTA may have */
    struct attend_lists *lists;
    void *part_o, *part_ml, *arrived;
    size_t part_o_bytes, part_ml_bytes, arrived_bytes;
    void *half; /* [PASSED_ROWS][heads * head_dim] bf16 */
    size_t half_bytes;
    /* The append whose attend leaves its result there. */
    uint64_t passing_step; /* 1 + its step; 0: none */
    const void *passing_qkv;
    uint32_t passing_layer;
    const void *passed_as; /* `out` of that attend; NULL: it did not come yet */
};

/* ---- attend.cu ---- */

/* What calls have in common. */
void attend_fill(struct attend_call *c, const struct kv_memory *kv, uint32_t layer, uint32_t heads,
                 const void *qkv, float scale);
/* Room for so many partial results (rows of padded head_dim) and counters; false after an error. */
bool attend_reserve(struct cuda_backend *b, struct attend_call *c, size_t partials,
                    size_t counters);
/* How the entries of a set are cut into splits: once its capacities are known. */
void attend_cut_set(const struct attend_call *c, struct attend_set *s);
static inline size_t attend_set_entries(const struct attend_call *c, const struct attend_set *s)
{
    return (size_t)s->n_rows * c->kv_heads;
}
/* Whether the device can run these shapes; notes an error if not. */
bool attend_fits(struct cuda_backend *b, const struct kv_geometry *g, uint32_t heads);
/* For append, of rows that go nowhere else: their results may stay bf16, where the product behind attention
 * (append_args.to_attend) reads it. */
void attend_accept(struct cuda_backend *b, const struct append_args *a);
/* For that product: `out` of its attend as bf16, with room for n_rows; NULL: it is there as floats. */
const __nv_bfloat16 *attend_passed(const struct cuda_backend *b, const void *out, uint32_t n_rows);
/* Whether cuDNN attends these rows (prefill.h). It leaves floats: none where results stay bf16, though a plan for
 * them, which a thread makes, may have come since append. */
bool attend_is_elsewhere(struct cuda_backend *b, const struct attend_args *a,
                         const struct batch_seq *q);

/* ---- attend_list.cu: lists of a step ---- */

/* One row of an append; row ~0: beyond the last. */
struct append_place {
    uint32_t row, pos;             /* of the batch; position in its sequence */
    block_id blocks[LANE_CLASSES]; /* its blocks, where the class is used */
    uint32_t to_prefill;           /* cuda_prefill_takes it */
};

struct attend_list {
    const struct attend_task *few, *many;
    const struct attend_merge *few_merges, *many_merges;
    uint32_t n_few, n_many, n_few_merges, n_many_merges; /* by bucket */
    uint32_t few_queries, many_queries;                  /* of the largest task to merge */
    size_t few_partials, many_partials, counters;        /* by bucket */
};

struct attend_lists *attend_lists_create(void);
void attend_lists_destroy(struct attend_lists *l);
/* What the rows of these sequences attend by position in a layer: all but planned rows in SPARSE lanes.
 * Built by the first layer of a step with these lane classes. NULL after an error. */
const struct attend_list *attend_list_get(struct cuda_backend *b, const struct attend_args *a);
/* The places of the rows, by bucket; marks: to_prefill is wanted. NULL after an error, or with *n 0. */
const struct append_place *append_places(struct cuda_backend *b, const struct append_args *a,
                                         bool marks, uint32_t *n);

/* ---- attend_few.cu, attend_many.cu, attend_planned.cu, attend_merge.cu: commands; params: struct
 * attend_call ---- */

void attend_run_few(struct cuda_backend *b, const void *params);     /* tasks */
void attend_run_many(struct cuda_backend *b, const void *params);    /* tasks */
void attend_run_planned(struct cuda_backend *b, const void *params); /* set */
void attend_run_merge(struct cuda_backend *b, const void *params);
/* Once for the current device; what one CTA needs in bytes. */
void attend_prepare_few(void);
void attend_prepare_many(void);
void attend_prepare_planned(void);
size_t attend_few_bytes(uint32_t dim, bool fp8);
size_t attend_many_bytes(uint32_t dim, bool fp8);
size_t attend_planned_bytes(uint32_t dim, bool fp8);
uint32_t attend_planned_ctas(uint32_t dim); /* per SM */

static inline uint32_t attend_padded_dim(uint32_t dim)
{
    return dim <= 64 ? 64 : dim <= 128 ? 128 : 256;
}

/* What `known` leaves of an entry: o [CUDA_TAIL_SPLITS][group][padded head_dim], then float2 [..][group]
 * of greatest score and sum. In floats. */
static inline __host__ __device__ size_t attend_tail_floats(uint32_t group, uint32_t padded)
{
    size_t n = (size_t)CUDA_TAIL_SPLITS * group * (padded + 2);
    return (n + 15) / 16 * 16;
}

#endif
