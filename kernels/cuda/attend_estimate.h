/* Estimated partitions of a planned row: entries of the softmax whose logits are scores, and whose values
 * are mean V, int8 with a scale.
 *
 * The sum of weights times values is a matrix product in half precision: whole numbers up to 127 are exact
 * in it, and weights are made relative to the greatest scale, so that only what weighs nothing is lost. A
 * row of values is read by 8 lanes straight into the registers of the instruction, 16 bytes each: which
 * dimension a column is, is ours to say. Each warp has a quarter of a split's entries; their sums go
 * through shared memory. With row codes, what rows differ from the mean is added (attend_codes.h).
 * Bound by HBM, or without much to read by the way to it: list, record, values. Op: attend. */
#ifndef KERNELS_CUDA_ATTEND_ESTIMATE_H
#define KERNELS_CUDA_ATTEND_ESTIMATE_H

#include "kernels/cuda/attend_codes.h"

/* In the memory that the ring of tiles has else. */
template <int DP> struct estimate_memory {
    const uint8_t *values[CUDA_ESTIMATES];
    float scales[CUDA_ESTIMATES];
    float p[CUDA_FEW][CUDA_ESTIMATES];            /* logits in base 2, then weights */
    __half weights[CUDA_FEW][CUDA_ESTIMATES + 8]; /* times scales, relative to the greatest */
    union {
        float sums[4][CUDA_FEW]
                  [DP + 8]; /* of each warp, by column: of the tile, then tile by tile */
        uint32_t code_words[CODES_WORDS];  /* before that */
        uint16_t directions[DP * CODES_K]; /* and before that */
    };
    float2 ml[CUDA_FEW];
    float scale;
    struct codes_memory codes;
};

/* What there is of a split. */
struct estimates {
    const struct attend_set *s;
    const uint32_t *list, *records;
    const float *scores;    /* [group][stride] */
    const uint8_t *digests; /* the lane's part of record 0 */
    uint32_t n;             /* entries; there is one at least */
};

__device__ static inline float logit_of(float score)
{
    float x = score * 1.44269504089f;
    return x < LOWEST ? LOWEST : x; /* NaN passes */
}

/* Finds the digests of the entries, and their logits. Behind the last one come copies of it that weigh
 * nothing. */
template <int DP>
__device__ static inline void gather(const struct attend_call *c, const struct estimates *e,
                                     struct estimate_memory<DP> *m)
{
    const struct attend_set *s = e->s;
    for (uint32_t i = threadIdx.x; i < s->estimate_split; i += CUDA_THREADS) {
        const uint32_t number = e->list[min(i, e->n - 1)], segment = number / s->layout.parts;
        const uint32_t p = number - segment * s->layout.parts;
        for (uint32_t h = 0; h < c->group; h++)
            m->p[h][i] = i < e->n ? logit_of(e->scores[(size_t)h * s->stride + number]) : LOWEST;
        const uint8_t *lane = e->digests + (size_t)e->records[segment] * s->record_bytes;
        m->values[i] = lane + s->layout.values + (size_t)p * c->dim;
        m->scales[i] = ((const float *)(lane + s->layout.scales))[p];
        if (s->coded) {
            m->codes.of[i] = lane + s->layout.codes;
            m->codes.page[i] = (uint16_t)p;
        }
    }
    __syncthreads();
}

/* Softmax of the entries of each head, one warp a head. */
template <int DP>
__device__ static inline void soften(const struct attend_call *c, const struct estimates *e,
                                     struct estimate_memory<DP> *m)
{
    const uint32_t lane = threadIdx.x % 32, n = e->s->estimate_split;
    float scale = 0;
    for (uint32_t i = lane; i < n; i += 32)
        scale = fmaxf(scale, fabsf(m->scales[i]));
    scale = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(scale)));
    scale = scale > 0 ? scale : 1;
    const float inverse = 1 / scale;
    for (uint32_t h = threadIdx.x / 32; h < c->group; h += CUDA_THREADS / 32) {
        float top = LOWEST, l = 0;
        for (uint32_t i = lane; i < n; i += 32)
            top = fmaxf(top, m->p[h][i]);
#pragma unroll
        for (uint32_t i = 16; i > 0; i /= 2)
            top = fmaxf(top, __shfl_xor_sync(~0u, top, i));
        for (uint32_t i = lane; i < n; i += 32) {
            float x = m->p[h][i], p = x == LOWEST ? 0 : exp2_fast(x - top);
            l += p;
            m->p[h][i] = p;
            m->weights[h][i] = __float2half_rn(p * (m->scales[i] * inverse));
        }
#pragma unroll
        for (uint32_t i = 16; i > 0; i /= 2)
            l += __shfl_xor_sync(~0u, l, i);
        if (lane == 0)
            m->ml[h] = make_float2(top, l);
    }
    if (threadIdx.x == 0)
        m->scale = scale;
    __syncthreads();
}

/* This lane's part of a row of values: dimensions from lane / 4 * DP / 8 on. */
template <int DP, bool WHOLE>
__device__ static inline void load_row(const uint8_t *row, uint32_t dim, uint32_t to[DP / 32])
{
    const uint32_t x = threadIdx.x % 32 / 4 * (DP / 8);
    if (WHOLE && DP == 64) {
        uint2 v = *(const uint2 *)(row + x);
        to[0] = v.x;
        to[1] = v.y;
    } else if (WHOLE) {
#pragma unroll
        for (int i = 0; i < DP / 32; i += 4) {
            uint4 v = *(const uint4 *)(row + x + i * 4);
            to[i] = v.x;
            to[i + 1] = v.y;
            to[i + 2] = v.z;
            to[i + 3] = v.w;
        }
    } else {
#pragma unroll
        for (uint32_t i = 0; i < DP / 8; i++) {
            uint32_t byte = x + i < dim ? row[x + i] : 0;
            to[i / 4] = i % 4 == 0 ? byte : to[i / 4] | byte << i % 4 * 8;
        }
    }
}

/* Byte `i` of two rows as numbers. */
__device__ static inline uint32_t pair_of(uint32_t a, uint32_t b, uint32_t i)
{
    uint32_t x = __byte_perm(a ^ 0x80808080u, b ^ 0x80808080u, (i | (4 + i) << 8) * 0x11);
    x = (x & 0x00ff00ffu) | 0x64006400u; /* 1024 + byte; the byte is 128 too large */
    __half2 v = __hsub2(*reinterpret_cast<__half2 *>(&x), __float2half2_rn(1152));
    return *reinterpret_cast<uint32_t *>(&v);
}

/* Sums of weights times values of this warp's entries. */
template <int DP, bool WHOLE>
__device__ static inline void sum_means(const struct attend_call *c, const struct estimates *e,
                                        struct estimate_memory<DP> *m)
{
    constexpr int words = DP / 32, at_once = DP == 256 ? 1 : 4;
    const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const uint32_t per_warp = e->s->estimate_split / 4, first = threadIdx.x / 32 * per_warp;
    const uint32_t end = min(first + per_warp, e->n);
    float o[words * 4][4] = {};
    for (uint32_t i = first; i < end; i += 16 * at_once) {
        uint32_t raw[at_once][4][words];
#pragma unroll
        for (int k = 0; k < at_once; k++)
#pragma unroll
            for (uint32_t r = 0; r < 4; r++) {
                uint32_t at = i + (uint32_t)k * 16 + r / 2 * 8 + t * 2 + r % 2;
                if (i + (uint32_t)k * 16 < end)
                    load_row<DP, WHOLE>(m->values[at], c->dim, raw[k][r]);
            }
#pragma unroll
        for (int k = 0; k < at_once; k++) {
            const uint32_t at = i + (uint32_t)k * 16 + t * 2;
            if (i + (uint32_t)k * 16 >= end)
                continue;
            uint32_t a[4];
#pragma unroll
            for (uint32_t r = 0; r < 4; r++) {
                const __half *from = &m->weights[g + r % 2 * 8][at + r / 2 * 8];
                a[r] = g + r % 2 * 8 < c->group ? *(const uint32_t *)from : 0;
            }
#pragma unroll
            for (int j = 0; j < words * 4; j++) {
                uint32_t b[2] = {pair_of(raw[k][0][j / 4], raw[k][1][j / 4], (uint32_t)j % 4),
                                 pair_of(raw[k][2][j / 4], raw[k][3][j / 4], (uint32_t)j % 4)};
                multiply_halves(o[j], a, b);
            }
        }
    }
#pragma unroll
    for (int j = 0; j < words * 4; j++)
#pragma unroll
        for (uint32_t half = 0; half < 2; half++)
            if (g + half * 8 < c->group)
                *(float2 *)&m->sums[threadIdx.x / 32][g + half * 8][j * 8 + t * 2] =
                    make_float2(o[j][half * 2], o[j][half * 2 + 1]);
}

/* Adds up the warps and stores the split's partial result. */
template <int DP>
__device__ static inline void store_estimates(const struct attend_call *c,
                                              const struct estimates *e,
                                              const struct estimate_memory<DP> *m, float *o,
                                              float2 *ml)
{
    for (uint32_t x = threadIdx.x; x < DP; x += CUDA_THREADS) {
        const uint32_t column = x % (DP / 8) * 8 + x / (DP / 8);
        float f[CODES_V];
        if (e->s->coded)
            codes_directions(&m->codes, c->dim, x, f);
        for (uint32_t h = 0; h < c->group; h++) {
            float sum = m->sums[0][h][column];
#pragma unroll
            for (int warp = 1; warp < 4; warp++)
                sum += m->sums[warp][h][column];
            sum *= m->scale;
            if (e->s->coded)
                sum += codes_turned_back(&m->codes, h, f);
            o[(size_t)h * DP + x] = sum;
        }
    }
    for (uint32_t h = threadIdx.x; h < c->group; h += CUDA_THREADS)
        ml[h] = m->ml[h];
    __syncthreads(); /* the memory is free for the next split */
}

/* A split of e->n entries. basis: segment 0's part of the lane, for codes; q: of the row's group. */
template <int DP, bool WHOLE>
__device__ static inline void estimate_split(const struct attend_call *c, const struct estimates *e,
                                             uint8_t *memory, float *o, float2 *ml)
{
    struct estimate_memory<DP> *m = (struct estimate_memory<DP> *)memory;
    const uint32_t rows = e->s->part_rows, per_warp = e->s->estimate_split / 4;
    const uint32_t first = threadIdx.x / 32 * per_warp,
                   end = max(first, min(first + per_warp, e->n));
    gather<DP>(c, e, m);
    if (e->s->coded) /* pages of R = 8 are taken in twos */
        codes_fetch(&m->codes, rows, first, (end + 1) / 2 * 2, m->code_words);
    soften<DP>(c, e, m);
    if (e->s->coded) {
        copies_wait<0>();
        __syncwarp();
        codes_sum(&m->codes, m->code_words, rows, c->group, first, end, m->p[0], CUDA_ESTIMATES);
        __syncthreads();
    }
    sum_means<DP, WHOLE>(c, e, m);
    __syncthreads();
    store_estimates<DP>(c, e, m, o, ml);
}

#endif
