/* Bisection in shared memory: what lies there, who works on a node, and what a warp does with its rows
 * (seal_bisect.cu). */
#ifndef KERNELS_CUDA_SEAL_BISECT_H
#define KERNELS_CUDA_SEAL_BISECT_H

#include "kernels/cuda/seal.h"

#include <cooperative_groups.h>

namespace cg = cooperative_groups;

namespace
{

enum {
    THREADS = 512,
    WARPS = THREADS / 32,
    CTAS = 2,
    HALF = SEGMENT_ROWS / CTAS, /* rows of a CTA, 32 of a warp */
    WARP_NODE = 32,             /* rows: from here down a warp works alone */
    DIGIT = 4                   /* bits of a key that are found at a time */
};

/* PD: head_dim, padded to 64 or 128. */
template <int PD> struct bisect_shared {
    uint4 rows[HALF * PD / 8]; /* [slot][PD] bf16 */
    float part[WARPS * PD];    /* sums of a warp's rows */
    float total[WARPS * PD],
        axis[WARPS * PD];        /* [first warp of a node][PD]: warps that are a level ahead
                                                  write to their own */
    float exchange[2][CTAS][PD]; /* sums of both CTAs */
    float mean[PD];
    float inverse[HALF], all_inverse[SEGMENT_ROWS]; /* by slot; by position */
    int keys[SEGMENT_ROWS]; /* projections in the order of storage, sortable; the first HALF: own */
    unsigned long long best[2][WARPS], exchange_best[2][CTAS];
    float weight[WARPS], threshold[WARPS], offset[WARPS], exchange_weight[2][CTAS];
    uint32_t count[WARPS], exchange_count[2][CTAS];
    uint32_t histogram[2][WARPS][1 << DIGIT], sides[2][WARPS];
    uint16_t slot[2][HALF];  /* in the order of storage, old and new */
    uint16_t position[HALF]; /* of a slot */
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

/* A thread's channels: 64 c + 8 (thread of eight) + 0 .. 7. */
template <int PD> struct vec {
    float x[PD / 8];
};

/* The warps that work on a node, and its rows, counted from the CTA's first. */
template <int PD> struct team {
    struct bisect_shared<PD> *s;
    uint32_t warp, lane, group, eighth; /* group: of four rows; eighth: of a row */
    uint32_t first_warp, warps, node;   /* node: of its level */
    uint32_t low, middle, end, n;       /* rows [low, end) are split at middle */
    uint32_t at;                        /* which of slot[2] is old */
    uint32_t rank;                      /* of this CTA */
    uint32_t turn;                      /* of the exchange between CTAs */
};

/* ---- rows and vectors ---- */

__device__ inline float eight_sum(float x)
{
    x += __shfl_xor_sync(~0u, x, 1);
    x += __shfl_xor_sync(~0u, x, 2);
    return x + __shfl_xor_sync(~0u, x, 4);
}

template <int PD>
__device__ inline struct vec<PD> load_row(const uint4 *rows, uint32_t slot, uint32_t eighth) {
    struct vec<PD> k;
#pragma unroll
    for (int c = 0; c < PD / 64; c++) {
        uint4 w = rows[slot * (PD / 8) + c * 8 + eighth];
        const uint32_t word[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            k.x[c * 8 + 2 * i] = seal_low(word[i]);
            k.x[c * 8 + 2 * i + 1] = seal_high(word[i]);
        }
    }
    return k;
}

template <int PD>
__device__ inline struct vec<PD> load_vector(const float *from, uint32_t eighth) {
    struct vec<PD> v;
#pragma unroll
    for (int c = 0; c < PD / 64; c++)
#pragma unroll
        for (int i = 0; i < 8; i += 4) {
            float4 f = *(const float4 *)(from + c * 64 + eighth * 8 + i);
            v.x[c * 8 + i] = f.x;
            v.x[c * 8 + i + 1] = f.y;
            v.x[c * 8 + i + 2] = f.z;
            v.x[c * 8 + i + 3] = f.w;
        }
    return v;
}

/* This thread's part of a product. Two chains. */
template <int PD>
__device__ inline float part_dot(const struct vec<PD> &a, const struct vec<PD> &b)
{
    float x = 0, y = 0;
#pragma unroll
    for (int i = 0; i < PD / 8; i += 2) {
        x = fmaf(a.x[i], b.x[i], x);
        y = fmaf(a.x[i + 1], b.x[i + 1], y);
    }
    return x + y;
}

template <int PD> __device__ inline float dot(const struct vec<PD> &a, const struct vec<PD> &b)
{
    return eight_sum(part_dot(a, b));
}

/* What rows are projected on. */
template <int PD> struct direction {
    struct vec<PD> v;
    float offset, threshold; /* mean . v */
};

template <int PD>
__device__ inline void point(const struct bisect_shared<PD> *s, uint32_t eighth,
                             struct direction<PD> *d)
{
    d->offset = dot(load_vector<PD>(s->mean, eighth), d->v);
}

/* From the row a to the row b, and what lies in the middle. */
template <int PD>
__device__ inline void point_between(const struct bisect_shared<PD> *s, uint32_t eighth,
                                     const struct vec<PD> &a, const struct vec<PD> &b,
                                     struct direction<PD> *d)
{
    d->threshold = 0.5f * eight_sum(part_dot(a, a) - part_dot(b, b));
#pragma unroll
    for (int i = 0; i < PD / 8; i++)
        d->v.x[i] = a.x[i] - b.x[i];
    point(s, eighth, d);
}

/* x of a row in shared memory of this or the other CTA. */
template <int PD>
__device__ inline struct vec<PD> unit_row(const struct bisect_shared<PD> *s, const uint4 *rows,
                                          uint32_t slot, float inverse, uint32_t eighth) {
    struct vec<PD> x = load_row<PD>(rows, slot, eighth);
    struct vec<PD> mean = load_vector<PD>(s->mean, eighth);
#pragma unroll
    for (int i = 0; i < PD / 8; i++)
        x.x[i] = (x.x[i] - mean.x[i]) * inverse;
    return x;
}

/* A key that a smaller number sorts first, then its row. */
__device__ inline unsigned long long
ranked(float x, uint32_t row)
{
    return (unsigned long long)((uint32_t)seal_sortable(x) ^ 0x80000000u) << 32 | row;
}

__device__ inline unsigned long long lesser(unsigned long long a, int mask)
{
    unsigned long long b = __shfl_xor_sync(~0u, a, mask);
    return b < a ? b : a;
}

/* ---- sums and projections of a warp's rows ---- */

enum weigh {
    COUNT_ALL,
    WEIGH_ALL,
    WEIGH_ABOVE
}; /* weight 1; inverse; inverse where above the threshold */

/* Sums by thread; `count` and `weight` are the same in all eight threads of a row. Rows follow each other by
 * `step` from `row` on. */
template <int PD> struct sums {
    struct vec<PD> k;
    float weight;
    uint32_t count;
};

template <int PD, enum weigh W>
__device__ inline struct sums<PD> sum_rows(const struct bisect_shared<PD> *s, uint32_t at,
                                           uint32_t eighth, uint32_t row, uint32_t step,
                                           uint32_t low, const struct direction<PD> *d)
{
    struct sums<PD> sum = {
        {{0}}, 0, 0
    };
#pragma unroll 4
    for (uint32_t it = 0; it < 8; it++, row += step) {
        const uint32_t slot = s->slot[at][row];
        const float inverse = W == COUNT_ALL ? 1.0f : s->inverse[slot];
        struct vec<PD> k = load_row<PD>(s->rows, slot, eighth);
        float above = 1;
        if (W == WEIGH_ABOVE) /* all threads: they exchange parts of the product */
            above = inverse * (dot(k, d->v) - d->offset) - d->threshold;
        const bool in = row >= low && above > 0;
        const float weight = in ? inverse : 0.0f;
#pragma unroll
        for (int i = 0; i < PD / 8; i++)
            sum.k.x[i] = fmaf(k.x[i], weight, sum.k.x[i]);
        sum.weight += weight;
        sum.count += in;
    }
    return sum;
}

/* keys = projections; returns the least, and its row. */
template <int PD>
__device__ inline unsigned long long project_rows(struct bisect_shared<PD> *s, uint32_t at,
                                                  uint32_t eighth, uint32_t row, uint32_t step,
                                                  uint32_t low, const struct direction<PD> *d)
{
    unsigned long long best = ~0ull;
#pragma unroll 4
    for (uint32_t it = 0; it < 8; it++, row += step) {
        const uint32_t slot = s->slot[at][row];
        struct vec<PD> k = load_row<PD>(s->rows, slot, eighth);
        float x = s->inverse[slot] * (dot(k, d->v) - d->offset);
        unsigned long long key = ranked(x, row);
        best = row >= low && key < best ? key : best;
        if (eighth == 0)
            s->keys[row] = seal_sortable(x);
    }
    return best;
}

#endif

} /* namespace */

#endif
