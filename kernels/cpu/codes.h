/* Row codes (kernels/core/codes.h): what the kernels per instruction set take and give. */
#ifndef KERNELS_CPU_CODES_H
#define KERNELS_CPU_CODES_H

#include "kernels/core/codes.h"

/* One lane of one segment, at its seal, once rows are ordered and means are digested. */
struct codes_lane {
    uint32_t dim, stride, parts, part_rows;
    uint32_t sink_rows;    /* rows of the sinks' pages in this segment: not coded, not counted */
    const uint16_t *order; /* [SEGMENT_ROWS] storage row r is row order[r] of ... */
    const uint16_t *keys, *values; /* bf16 [SEGMENT_ROWS][stride], padded with zeros */
    const float *means;            /* [parts][stride] centroids of K as kept */
    const float *v_means;          /* [parts][stride] of V as kept; NULL: V is not coded */
    uint8_t *codes;                /* of this record */
    const uint8_t *basis;          /* codes of segment 0's record; == codes: this is segment 0 */
    float *work;                   /* codes_work_floats() */
};

/* Distances of rows; covariance; directions and their images; directions by channel. */
static inline size_t codes_work_floats(uint32_t dim)
{
    size_t stride = (dim + 15) / 16 * 16;
    return (SEGMENT_ROWS + stride + 3 * (size_t)CODES_K) * stride + 64;
}

/* Queries of n <= CODES_HEADS heads against the codes of a sequence: the logit of a row, in base 2, is
 * alpha * factor * (start + sum over directions of k * n). */
struct codes_query {
    int8_t k[CODES_HEADS][CODES_K]; /* by vector, field and byte: as directions are ordered */
    int32_t start[CODES_HEADS];     /* levels count from 0, their middle is 1.5 */
    float factor[CODES_HEADS];
    float limit; /* of alpha: keeps the logits of all heads within CODES_MOST */
};

#define CODES_MOST 60.0f

/* Pages of a list, for the estimate of their V. */
struct codes_estimates {
    const uint8_t *const *codes; /* [n] the codes of each page's record */
    const uint16_t *parts;       /* [n] */
    uint32_t n, dim, part_rows, group;
    const float *q; /* [group][dim] */
    float scale;
    const uint8_t *basis; /* the codes of segment 0's record */
    const float *logits;  /* [group][stride] of the pages, natural log */
    size_t stride;
    const float *m; /* [group] base 2: what weights are relative to */
    float *o;       /* [group][o_stride] to add to */
    uint32_t o_stride;
};

struct codes_kernels {
    void (*seal)(const struct codes_lane *a);
    /* q: [n][dim], n <= CODES_HEADS */
    void (*query)(struct codes_query *out, const float *q, uint32_t n, uint32_t dim, float scale,
                  const uint8_t *basis);
    /* out[h][page]: ln of the sum over a page's rows of e^r, r: what a row's logit is above its
     * centroid's; within 0.04. ahead: a tile that is read soon, to prefetch. */
    void (*masses)(const uint8_t *tile, const uint8_t *ahead, uint32_t part_rows,
                   const struct codes_query *q, uint32_t n, float (*out)[CODES_PAGES]);
    void (*estimate)(const struct codes_estimates *a);
};

extern const struct codes_kernels codes_scalar, codes_avx2, codes_avx512;

#endif
