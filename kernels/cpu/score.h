/* What score.c and its kernels per instruction set agree on: a stretch of segments of one row and
 * one KV head, all heads of the group. */
#ifndef KERNELS_CPU_SCORE_H
#define KERNELS_CPU_SCORE_H

#include "kernels/core/digest.h"
#include "kernels/cpu/codes.h"

enum {
    SCORE_Q_MAX = 127 * 128, /* greatest whole number of a rounded query: two planes of int8 */
    SCORE_HEADS = 4,         /* heads of the group that share a load of keys */
};

struct score_part {
    const struct score_args *a;
    const struct plan_row *row;
    const struct digest_layout *layout;
    const float *q; /* [group][head_dim] */
    uint32_t head, group;
    uint32_t sink_rows;  /* rows of the sinks' pages: partitions inside them get -inf */
    uint32_t begin, end; /* segments */
    float *out;          /* [group][stride], of the whole row */
    uint32_t stride;
    bool coarse;         /* a score per coarse digest: parts / DIGEST_COARSE of a segment */
    const uint8_t *open; /* [segments * parts / coarse_group] of the row; NULL: all are open */
    void *work;          /* score_work_bytes() of the calling worker */
    const struct codes_kernels *codes; /* DIGEST_CODES */
    struct codes_query *codes_query;   /* of the calling worker */
};

struct score_kernels {
    void (*part)(const struct score_part *p);
    /* Which groups of partitions are worth their own scores: the best `n_open` of n by their share of
     * the mass, summed over the heads. coarse: [group][stride], per_group of them make one. */
    void (*choose)(const float *coarse, uint32_t stride, uint32_t group, uint32_t per_group,
                   uint32_t n, uint32_t n_open, uint8_t *open, float *work);
};

extern const struct score_kernels score_scalar, score_avx2, score_avx512;

/* A query against one kind of digest vectors of one segment: logit = dot * factor + offset. */
struct score_query {
    float factor, offset;
    union { /* whole numbers, as the instruction set wants them */
        int16_t x[DIGEST_MAX_DIM];
        int8_t plane[2][DIGEST_MAX_DIM]; /* x = 128 * plane[0] + plane[1] */
    };
};

/* Queries of all kinds and heads of a chunk; or logits of a segment's rows; or queries by sign. */
static inline size_t score_work_bytes(uint32_t dim)
{
    size_t queries = DIGEST_KINDS * SCORE_HEADS * sizeof(struct score_query);
    size_t exact = (SEGMENT_ROWS + 64) * sizeof(float);
    size_t bounds = (size_t)SCORE_HEADS * 2 * (dim + 16) * sizeof(float);
    return digest_round(queries > bounds ? queries : bounds) + digest_round(exact);
}

/* The lane's part of segment s's record; NULL if the row has none (SCORE_EXACT without digests). */
static inline const uint8_t *score_record(const struct score_part *p, uint32_t segment)
{
    const struct kv_memory *kv = p->a->kv;
    if (p->row->records == NULL || kv->records == NULL)
        return NULL;
    return digest_lane(kv, p->row->records[segment], p->a->layer, p->head);
}

#endif
