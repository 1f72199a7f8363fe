/* What append.cu and the files of attention share.
 *
 * A task is some rows of one sequence for one KV head: its queries are (row, head of the group), number
 * row * group + head, and they meet the same keys. What a task attends is cut into splits of CUDA_SPLIT
 * positions, and each split into tiles of CUDA_TILE positions. The order of sums is fixed by position:
 *   - scores: 16 dimensions per matrix instruction, from 0 up;
 *   - online softmax and values: tile by tile; a split begins with nothing;
 *   - splits are folded from the first to the last.
 * Queries are always the rows of the matrix instructions, positions or dimensions the columns, so a
 * row's result is the same bit for bit whether its task is FEW or MANY, alone or in a batch, and
 * whether its splits were folded on the way or by the merge. */
#ifndef KERNELS_CUDA_ATTEND_H
#define KERNELS_CUDA_ATTEND_H

#include "kernels/cuda/cuda.h"

enum {
    CUDA_TILE = 64,     /* positions of a step of the online softmax */
    CUDA_SPLIT = 1024,  /* a multiple of CUDA_TILE */
    CUDA_THREADS = 128, /* of a CTA: 4 warps */
    CUDA_FEW = 16,      /* queries of a FEW task at most: rows of one matrix instruction */
    CUDA_MANY = 128,    /* of a MANY task, head_dim <= 128 */
    CUDA_MANY_256 = 64, /* of a MANY task, head_dim > 128 */
    CUDA_MAX_DIM = 256,
};

/* One row of an append. */
struct append_place {
    uint32_t row, pos;             /* of the batch; position in its sequence */
    block_id blocks[LANE_CLASSES]; /* its blocks, where the class is used */
};

struct attend_task {
    uint32_t table;                 /* its block table begins at this entry of all tables */
    uint32_t head;                  /* KV head */
    uint32_t row, n_rows, pos;      /* first row of the batch, position of that row */
    uint32_t first_end, begin, end; /* attends [0, first_end), then [begin, end) causally */
    uint32_t n_first, n_splits;     /* splits of [0, first_end); of both */
    uint32_t item, per_item;        /* number of its first CTA; splits of a CTA */
    uint32_t partial; /* where its partial results begin, in rows of padded head_dim numbers: one
                         per split, n_rows * group queries each; where one CTA folds all splits,
                         one in all */
    uint32_t merged;  /* the merge folds its splits */
};

/* Arguments of the kernels, by value. */
struct attend_call {
    const struct attend_task *tasks;
    uint32_t n_tasks;
    const block_id *tables;
    const struct cuda_lane *lanes; /* [kv_heads] of the layer */
    const uint8_t *hbm[LANE_CLASSES], *dram[LANE_CLASSES];
    size_t block_bytes[LANE_CLASSES], page_bytes;
    uint32_t page_shift; /* 1 << page_shift == R */
    uint32_t dim, group, heads;
    size_t q_stride; /* numbers of a row of q */
    float scale;     /* times log2(e): scores are in base 2 */
    const float *q;
    float *out, *lse;
    float *part_o;   /* [partial][padded head_dim] */
    float2 *part_ml; /* [partial] greatest score, sum */
};

/* A host array whose copy on the device stays while its contents do: block tables and work lists are
 * the same for most layers of a step. */
struct kept {
    void *host, *device;
    size_t bytes, host_bytes, device_bytes;
};
const void *kept_copy(struct cuda_backend *b, struct kept *k, const void *now, size_t bytes);

struct cuda_attend {
    struct kept places, tables, few, many;
    /* Host arrays of the call that is being built. */
    void *place_list, *table_list, *few_list, *many_list;
    size_t place_bytes, table_bytes, few_bytes, many_bytes;
    void *part_o, *part_ml;
    size_t part_o_bytes, part_ml_bytes;
};

/* Grows a host array that keeps its contents; sizes double. */
void *attend_grow(void **p, size_t *have, size_t need);

/* attend_few.cu, attend_many.cu, attend_merge.cu. prepare: once for the current device. */
void attend_prepare_few(void);
void attend_prepare_many(void);
void attend_run_few(struct cuda_backend *b, const struct attend_call *c, uint32_t n_items);
void attend_run_many(struct cuda_backend *b, const struct attend_call *c, uint32_t n_items);
void attend_run_merge(struct cuda_backend *b, const struct attend_call *c, uint32_t max_queries);

static inline uint32_t attend_padded_dim(uint32_t dim)
{
    return dim <= 64 ? 64 : dim <= 128 ? 128 : 256;
}

#endif
