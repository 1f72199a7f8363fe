/* The end of a task in the kernel that ran its splits: the last of its CTAs folds all partial results, from the
 * first split to the last, with the operations of the merge. A warp has a query, a lane some of its
 * dimensions; loads of many splits are under way at once, so it costs a trip to L2 or two. */
#ifndef KERNELS_CUDA_ATTEND_LAST_H
#define KERNELS_CUDA_ATTEND_LAST_H

#include "kernels/cuda/attend_mma.h"

/* Where the partial results of a task lie: of its first stretch, of the table, of estimates. */
struct attend_parts {
    const float *o; /* by slot, [n][padded head_dim] each */
    const float2 *ml;
    const float *tail_o; /* what `known` left of the table's splits; NULL: they have slots */
    const float2 *tail_ml;
    uint32_t n_first, n_table, n_estimates; /* splits */
    uint32_t table_slot, estimate_slot;
    uint32_t n; /* queries */
};

__device__ static inline uint32_t parts_total(const struct attend_parts *p)
{
    return p->n_first + p->n_table + p->n_estimates;
}

/* Number of query `query` of split i in o and ml; *tail: in those of the tail. */
__device__ static inline size_t part_at(const struct attend_parts *p, uint32_t i, uint32_t query,
                                        bool *tail)
{
    uint32_t slot = i;
    *tail = false;
    if (i >= p->n_first + p->n_table) {
        slot = i - p->n_first - p->n_table + p->estimate_slot;
    } else if (i >= p->n_first) {
        *tail = p->tail_o != NULL;
        slot = i - p->n_first + (*tail ? 0 : p->table_slot);
    }
    return (size_t)slot * p->n + query;
}

__device__ static inline float2 part_ml(const struct attend_parts *p, uint32_t i, uint32_t query)
{
    bool tail;
    size_t at = part_at(p, i, query, &tail);
    return __ldcg((tail ? p->tail_ml : p->ml) + at);
}

/* Whether this CTA, which did `own` units of a task of n, is the last of it; the others' results are there
 * then. All threads. */
__device__ static inline bool arrived_last(uint32_t *counter, uint32_t own, uint32_t n)
{
    __threadfence();
    __syncthreads();
    int last = 0;
    if (threadIdx.x == 0) {
        last = atomicAdd(counter, own) + own == n;
        if (last)
            *counter = 0; /* for the next kernel */
        __threadfence();
    }
    return __syncthreads_or(last) != 0;
}

template <int DP> struct last {
    enum { NUMBERS = DP / 32, AT_ONCE = DP == 256 ? 8 : 16 };
};

template <int DP>
__device__ static inline void load_parts(const struct attend_parts *p, uint32_t i, uint32_t n,
                                         uint32_t query,
                                         float v[last<DP>::AT_ONCE][last<DP>::NUMBERS])
{
    constexpr int numbers = last<DP>::NUMBERS;
#pragma unroll
    for (uint32_t j = 0; j < last<DP>::AT_ONCE; j++) {
        if (j >= n)
            continue;
        bool tail;
        size_t at = part_at(p, i + j, query, &tail);
        const float *from = (tail ? p->tail_o : p->o) + at * DP + threadIdx.x % 32 * numbers;
#pragma unroll
        for (int x = 0; x < numbers; x += 2) {
            float2 two = __ldcg((const float2 *)(from + x));
            v[j][x] = two.x;
            v[j][x + 1] = two.y;
        }
    }
}

/* Weights of 32 splits, one in each lane, from what was folded so far (greatest score m) on. */
__device__ static inline struct fold fold_32(float next_m, float *m)
{
    const uint32_t lane = threadIdx.x % 32;
    float top = next_m; /* greatest up to this lane's split */
#pragma unroll
    for (uint32_t i = 1; i < 32; i *= 2) {
        float x = __shfl_up_sync(~0u, top, i);
        top = lane >= i ? fmaxf(top, x) : top;
    }
    top = fmaxf(top, *m);
    float before = __shfl_up_sync(~0u, top, 1);
    struct fold f = fold_of(lane == 0 ? *m : before, next_m);
    *m = __shfl_sync(~0u, top, 31);
    return f;
}

/* Folds and writes one query; its result is number `result` of all. A warp. */
template <int DP>
__device__ static inline void fold_query(const struct attend_call *c, const struct attend_parts *p,
                                         uint32_t query, size_t result)
{
    constexpr uint32_t at_once = last<DP>::AT_ONCE;
    constexpr int numbers = last<DP>::NUMBERS;
    const uint32_t lane = threadIdx.x % 32, total = parts_total(p);
    float m = LOWEST, l = 0, o[numbers] = {}, v[at_once][numbers] = {};
    for (uint32_t i = 0; i < total; i += 32) {
        const uint32_t left = min(total - i, 32u);
        load_parts<DP>(p, i, left, query, v);
        float2 own = lane < left ? part_ml(p, i + lane, query) : make_float2(LOWEST, 0);
        struct fold f = fold_32(own.x, &m);
        for (uint32_t j = 0; j < left; j += at_once) {
            if (j > 0)
                load_parts<DP>(p, i + j, left - j, query, v);
#pragma unroll
            for (uint32_t k = 0; k < at_once; k++) {
                struct fold g = {0, __shfl_sync(~0u, f.so_far, j + k),
                                 __shfl_sync(~0u, f.next, j + k)};
                float next_l = __shfl_sync(~0u, own.y, j + k);
                if (j + k >= left)
                    continue;
                bool begins = i + j + k == 0;
                l = begins ? next_l : fold_sum(g, l, next_l);
#pragma unroll
                for (int x = 0; x < numbers; x++)
                    o[x] = begins ? v[k][x] : fold_sum(g, o[x], v[k][x]);
            }
        }
    }
#pragma unroll
    for (int x = 0; x < numbers; x += 2)
        if (lane * numbers + x < c->dim)
            put_result(c, result, lane * numbers + x, finish(o[x], l), finish(o[x + 1], l));
    if (lane == 0 && c->lse != NULL)
        c->lse[result] = log_sum(m, l);
}

/* Natural logarithm of the mass of all splits of one query. A warp. */
__device__ static inline float mass_of(const struct attend_parts *p, uint32_t query)
{
    const uint32_t total = parts_total(p);
    float m = LOWEST, l = 0;
    for (uint32_t i = threadIdx.x % 32; i < total; i += 32) {
        float2 ml = part_ml(p, i, query);
        struct fold f = fold_of(m, ml.x);
        l = fold_sum(f, l, ml.y);
        m = f.m;
    }
#pragma unroll
    for (uint32_t i = 16; i > 0;
         i /= 2) { /* lanes do not differ: a sum of two is the same both ways */
        float other_m = __shfl_xor_sync(~0u, m, i), other_l = __shfl_xor_sync(~0u, l, i);
        float top = fmaxf(m, other_m);
        float x = __fmul_rn(l, exp2_fast(m - top)),
              y = __fmul_rn(other_l, exp2_fast(other_m - top));
        l = __fadd_rn(x, y);
        m = top;
    }
    return log_sum(m, l);
}

#endif
