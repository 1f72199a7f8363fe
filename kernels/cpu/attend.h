/* What attend.c and its kernels per instruction set agree on.
 *
 * The order of every sum is fixed by position, so that a row's result depends on nothing else:
 *   - scores: one chain of fused multiply-adds over the dimensions, from 0 up;
 *   - online softmax over groups of ATTEND_GROUP positions, aligned to the position;
 *   - values: one chain over the positions of a group, in order;
 *   - splits of ATTEND_SPLIT positions, aligned too: each has its own partial result (O, m, l),
 *     and partial results are folded from the first to the last.
 * One row or sixteen, one thread or many, R = 8 or 32: the same operations in the same order.
 *
 * What a row attends is up to three stretches, one after the other, each in groups and splits of its
 * own: pages of a list (a plan) or the sinks of a STREAM lane; then positions of the block table;
 * then estimated partitions. A list counts as a table of n_pages * R positions.
 *
 * A page is K[head_dim / 2][R][2] then V[R / 2][head_dim][2]: a vector load brings pairs of bf16
 * numbers, which a shift and a mask turn into two vectors of floats; scores need no sums across
 * a vector, and rows of a group of heads share every load.
 *
 * Pairs of e4m3 numbers become pairs of f16 numbers by a shift and a mask, subnormals too, and those the
 * machine converts; all are 2^-8 of what they should be then, which the scale of scores and one
 * multiplication of a partial result put right, exactly. NaN alone would read as 480. So a row with a NaN
 * in K or V has one as its key's first number (append sees to it), and vector kernels look there. */
#ifndef KERNELS_CPU_ATTEND_H
#define KERNELS_CPU_ATTEND_H

#include "kernels/backend.h"

enum {
    ATTEND_GROUP = 64,
    ATTEND_SPLIT = 256,
    ATTEND_ROWS = 16, /* rows of one call of `part` at most */
    ATTEND_PAGES = 8, /* pages of a group at most: R >= 8 */
    ATTEND_PAD = 16,  /* partial results have rows of whole vectors */
};

/* Stands for -infinity as a score in base 2: differences stay finite, so exp2 needs no guard. */
static const float ATTEND_LOWEST = -1e30f;

/* Pages of one lane by their index in a block table or in a plan's list. */
struct attend_table {
    const uint8_t *lane[2]; /* in HBM, in DRAM: the lane's page of block 0 */
    size_t block_bytes;
    const block_id *blocks;
};

static inline const uint8_t *attend_page(const struct attend_table *t, uint32_t i)
{
    block_id b = t->blocks[i];
    return t->lane[b / BLOCK_IN_DRAM] + (b & ~BLOCK_IN_DRAM) * t->block_bytes;
}

/* Rows of one sequence against positions [begin, end) of one KV head: end - begin <= ATTEND_SPLIT,
 * begin is a multiple of R. A query is (row, head of the group): number row * group + head. Row r
 * sees positions up to first_pos + r. */
struct attend_part {
    const struct kv_geometry *geo;
    struct attend_table table;
    const uint32_t *masks; /* [page of the table] rows to attend; NULL: all. One row only */
    /* What this worker reads next, to prefetch: the first n_ahead pages (0: unknown). */
    struct attend_table ahead;
    uint32_t n_ahead;
    const float *q;  /* [n_rows][q_stride]: `group` heads of head_dim each */
    size_t q_stride; /* numbers */
    uint32_t group, n_rows, first_pos, begin, end;
    float scale;
    uint32_t o_stride; /* head_dim rounded up to ATTEND_PAD */
    float *o;          /* [n_rows * group][o_stride] sum of p * v */
    float *m, *l;      /* [n_rows * group] greatest score (base 2), sum of p */
    float *work;       /* attend_work_floats() of the calling worker */
};

/* Estimated partitions against the heads of one row: the same sums over n <= ATTEND_SPLIT entries. */
struct attend_estimates {
    const int8_t *const *values; /* [n] mean V: factor * [head_dim] */
    const float *factors;        /* [n] */
    float
        *logits; /* [group][ATTEND_SPLIT] natural log, may be -inf; padded with -inf to ATTEND_PAD.
                      Spoilt */
    uint32_t n, dim, group, o_stride;
    float *o, *m, *l; /* as of attend_part */
};

/* One row of a batch: rotate q and k, round k and v into row `page_row` of their pages. */
struct append_row {
    const struct kv_memory *kv;
    float *qkv;             /* [heads + 2 kv_heads][head_dim] */
    const float *cos, *sin; /* [head_dim / 2] at this position */
    uint32_t layer, heads, page_row;
    block_id blocks[LANE_CLASSES]; /* this row's block; where the class is used */
};

static inline uint8_t *append_page(const struct append_row *a, uint32_t head)
{
    const struct kv_geometry *g = a->kv->geo;
    struct lane_place p = kv_lane(g, a->layer, head);
    return (uint8_t *)a->kv->hbm[p.class_] + a->blocks[p.class_] * g->block_bytes[p.class_] +
           p.index * g->page_bytes;
}

static inline uint32_t attend_o_stride(uint32_t head_dim)
{
    return (head_dim + ATTEND_PAD - 1) / ATTEND_PAD * ATTEND_PAD;
}

/* Numbers of a partial result: o, then m, then l; a multiple of a cache line. */
static inline size_t attend_partial_size(uint32_t group, uint32_t o_stride, uint32_t n_rows)
{
    size_t n = (size_t)n_rows * group * (o_stride + 2);
    return (n + 15) / 16 * 16;
}
struct attend_partial {
    float *o, *m, *l;
};
static inline struct attend_partial attend_partial_at(float *at, uint32_t group, uint32_t o_stride,
                                                      uint32_t n_rows)
{
    size_t n = (size_t)n_rows * group;
    return (struct attend_partial){at, at + n * o_stride, at + n * o_stride + n};
}

/* Splits of [begin, end), which begin where the stretch does. */
static inline uint32_t attend_splits(uint32_t begin, uint32_t end)
{
    return (end - begin + ATTEND_SPLIT - 1) / ATTEND_SPLIT;
}

/* `known` leaves the partial results of a tail's splits, one after the other, for attend. */
enum { ATTEND_TAIL_SPLITS = (SEGMENT_ROWS + TAIL_ROWS + ATTEND_SPLIT - 1) / ATTEND_SPLIT };
static inline size_t attend_tail_floats(uint32_t group, uint32_t o_stride)
{
    return ATTEND_TAIL_SPLITS * attend_partial_size(group, o_stride, 1);
}

struct attend_kernels {
    void (*part)(const struct attend_part *a);
    void (*estimate)(const struct attend_estimates *a);
    /* Folds a later partial result of n queries into an earlier one. */
    void (*fold)(float *o, float *m, float *l, const float *part_o, const float *part_m,
                 const float *part_l, uint32_t n, uint32_t o_stride);
    /* out = o / l, one query. */
    void (*finish)(const float *o, float l, float *out, uint32_t dim);
    void (*append)(const struct append_row *a);
};

extern const struct attend_kernels attend_scalar, attend_avx2, attend_avx512;

/* Scratch of one `part` call: a group of K or V as floats; scores; sums and factors of queries. */
static inline size_t attend_work_floats(uint32_t o_stride, uint32_t group)
{
    size_t n = (size_t)ATTEND_ROWS * group;
    return (size_t)ATTEND_GROUP * o_stride + n * (ATTEND_GROUP + ATTEND_PAD + 1);
}

#endif
