/* Row codes in an estimate (kernels/core/codes.h): what the rows of an estimated page differ from its
 * mean V, each by its share of the page's mass, in CODES_V directions.
 *
 * Logits of rows are whole numbers, as on the CPU; their exponentials are its rough ones. Shares times the
 * codes of V are a matrix product again: rows of storage are its inner dimension, 16 a step, directions
 * its columns; a lane computes the shares of just the rows and heads that the instruction wants of it. Bound by
 * arithmetic: 8 products of four bytes per row and head. */
#ifndef KERNELS_CUDA_ATTEND_CODES_H
#define KERNELS_CUDA_ATTEND_CODES_H

#include "kernels/cuda/attend_mma.h"

#include <cuda_fp16.h>

enum { CODES_HEAD_CHUNK = 4 }; /* heads that share a limit, as on the CPU */

struct codes_memory {
    const uint8_t *of[CUDA_CODED]; /* the codes of an entry's record */
    uint16_t page[CUDA_CODED];
    uint32_t k[CUDA_FEW][CODES_K / 4]; /* a head's query by direction, whole numbers of one byte */
    int32_t start[CUDA_FEW];
    float factor[CUDA_FEW], limit[CUDA_FEW];
    float sums[4][CUDA_FEW][CODES_V]; /* of each warp */
    const uint8_t *v_basis;           /* sd, F */
};

/* As multiply, of half precision. */
__device__ static inline void multiply_halves(float c[4], const uint32_t a[4], const uint32_t b[2])
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},"
                 "{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ static inline float codes_number(const uint8_t *bf16)
{
    return __uint_as_float((uint32_t) * (const uint16_t *)bf16 << 16);
}

__device__ static inline float codes_scale(uint32_t byte)
{
    return __uint_as_float((byte << 20) + ((127u - CODES_SCALE_EXP) << 23));
}

/* Queries of the group in the directions of K: a warp has a head, a lane a direction. q: [group][dim];
 * codes: of segment 0's record. All threads. */
__device__ static inline void codes_query(struct codes_memory *m, const float *q, uint32_t dim,
                                          uint32_t group, float scale, const uint8_t *codes)
{
    const uint32_t lane = threadIdx.x % 32;
    const uint8_t *sd = codes + codes_k_basis(true), *e = sd + CODES_K * sizeof(float);
    for (uint32_t h = threadIdx.x / 32; h < group; h += CUDA_THREADS / 32) {
        float sum = 0;
#pragma unroll 16
        for (uint32_t c = 0; c < dim; c++)
            sum =
                __fmaf_rn(codes_number(e + (c * CODES_K + lane) * 2), q[(size_t)h * dim + c], sum);
        sum = __fmul_rn(__fmul_rn(sum, ((const float *)sd)[lane]),
                        scale * 1.44269504089f * CODES_STEP);
        float top = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(fabsf(sum))));
        float inverse = top > 1e-30f ? 127.0f / top : 0;
        int32_t whole = __float2int_rn(fminf(fmaxf(sum * inverse, -127.0f), 127.0f));
        int32_t all = __reduce_add_sync(~0u, whole), most = __reduce_add_sync(~0u, abs(whole));
        ((int8_t *)m->k[h])[lane] = (int8_t)whole;
        if (lane != 0)
            continue;
        m->start[h] = -3 * all / 2;
        m->factor[h] = top > 1e-30f ? top / 127.0f : 0;
        float limit = 60.0f / (1.5f * m->factor[h] * (float)(most + 1) + 1e-30f);
        m->limit[h] = fminf(limit, 4096);
    }
    if (threadIdx.x == 0)
        m->v_basis = codes + codes_v_basis(dim);
    __syncthreads();
    float limit = 4096;
    if (threadIdx.x < group) {
        uint32_t first = threadIdx.x / CODES_HEAD_CHUNK * CODES_HEAD_CHUNK;
        for (uint32_t h = first; h < min(group, first + CODES_HEAD_CHUNK); h++)
            limit = fminf(limit, m->limit[h]);
    }
    __syncthreads();
    if (threadIdx.x < group)
        m->limit[threadIdx.x] = limit;
    __syncthreads();
}

/* e^(a row's logit above its centroid's), of a head. */
__device__ static inline float codes_mass(const struct codes_memory *m, uint32_t entry,
                                          uint32_t row, uint32_t rows, uint32_t head)
{
    const uint8_t *codes = m->of[entry];
    const uint32_t p = m->page[entry];
    const uint8_t *at = codes + codes_k_byte(p, row, 0, rows);
    const uint32_t words[2] = {*(const uint32_t *)at, *(const uint32_t *)(at + CODES_VECTOR)};
    const float alpha = fminf(codes_scale(codes[codes_k_scale(p, row, rows)]), m->limit[head]);
    int32_t sum = m->start[head];
#pragma unroll
    for (int x = 0; x < CODES_VECTORS; x++)
#pragma unroll
        for (int s = 0; s < CODES_FIELDS; s++)
            sum = __dp4a((int)(words[x] >> 2 * s & 0x03030303u),
                         (int)m->k[head][x * CODES_FIELDS + s], sum);
    float logit = __fmul_rn((float)sum, __fmul_rn(alpha, m->factor[head]));
    return __int_as_float(
        __float2int_rn(__fmaf_rn(logit, 8388608.0f, (127.0f - 0.0573f) * 8388608.0f)));
}

/* Masses of rows `row` and `row` + 1 of an entry, by head. */
__device__ static inline float2 codes_two(const struct codes_memory *m, uint32_t entry,
                                          uint32_t row, uint32_t rows, uint32_t head)
{
    return make_float2(codes_mass(m, entry, row, rows, head),
                       codes_mass(m, entry, row + 1, rows, head));
}

/* Over the four lanes of a query. */
__device__ static inline float codes_add_lanes(float x)
{
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

/* Weights of two rows: shares of the page's mass times scales of V, times the page's weight `f`. */
__device__ static inline uint32_t codes_weights(const struct codes_memory *m, uint32_t entry,
                                                uint32_t row, uint32_t rows, float2 mass, float f)
{
    const uint8_t *scale = m->of[entry] + codes_v_scales() + (size_t)m->page[entry] * rows + row;
    __half2 w =
        __floats2half2_rn(mass.x * f * codes_scale(scale[0]), mass.y * f * codes_scale(scale[1]));
    return *reinterpret_cast<uint32_t *>(&w);
}

/* Twice (level - 1.5) of rows `row` and `row` + 1 of an entry in direction j. */
__device__ static inline uint32_t codes_levels(const struct codes_memory *m, uint32_t entry,
                                               uint32_t row, uint32_t rows, uint32_t j)
{
    const uint32_t r = m->page[entry] * rows + row;
    const uint32_t word = *(const uint32_t *)(m->of[entry] + codes_v_byte(r & ~3u, j));
    const uint32_t x = word >> (codes_shift(r) + r % 4 * 8);
    uint32_t bits = (x & 3) << 1 | (x >> 8 & 3) << 17 | 0x64006400u; /* 1024 + 2 level */
    __half2 v = __hsub2(*reinterpret_cast<__half2 *>(&bits), __float2half2_rn(1027));
    return *reinterpret_cast<uint32_t *>(&v);
}

/* Sums of this warp's entries, `per_warp` of the split's n. p: [head][stride] weights of the pages. */
__device__ static inline void codes_sum(struct codes_memory *m, uint32_t rows, uint32_t group,
                                        uint32_t per_warp, uint32_t n, const float *p,
                                        uint32_t stride)
{
    const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const uint32_t first = threadIdx.x / 32 * per_warp, end = min(first + per_warp, n);
    const uint32_t pages = rows == 8 ? 2 : 1, steps = rows == 32 ? 2 : 1; /* at once */
    float y[2][4] = {};
    for (uint32_t i = first; i < end; i += pages) {
        float2 mass[2][2][2] = {}; /* [step][half of it][query g, g + 8] */
#pragma unroll
        for (uint32_t k = 0; k < 2; k++)
#pragma unroll
            for (uint32_t half = 0; half < 2; half++) {
                const uint32_t entry = i + (pages == 2 ? half : 0);
                const uint32_t row = k * 16 + (pages == 2 ? 0 : half * 8) + t * 2;
                if (k >= steps)
                    continue;
                if (group <= 4) { /* lanes of g >= 4 have the other half of query g - 4 */
                    if ((g < 4) == (half == 0))
                        mass[k][0][0] = codes_two(m, entry, row, rows, min(g % 4, group - 1));
                    continue;
                }
                mass[k][half][0] = codes_two(m, entry, row, rows, min(g, group - 1));
                if (group > 8)
                    mass[k][half][1] = codes_two(m, entry, row, rows, min(g + 8, group - 1));
            }
        if (group <= 4) {
#pragma unroll
            for (uint32_t k = 0; k < 2; k++) {
                mass[k][1][0].x = __shfl_xor_sync(~0u, mass[k][0][0].x, 16);
                mass[k][1][0].y = __shfl_xor_sync(~0u, mass[k][0][0].y, 16);
            }
        }
        float f[2][2]; /* [half][query] */
#pragma unroll
        for (uint32_t q = 0; q < 2; q++) {
            float sum[2];
#pragma unroll
            for (uint32_t half = 0; half < 2; half++)
                sum[half] = codes_add_lanes(mass[0][half][q].x + mass[0][half][q].y +
                                            mass[1][half][q].x + mass[1][half][q].y);
            const uint32_t head = g + q * 8;
#pragma unroll
            for (uint32_t half = 0; half < 2; half++) {
                float all = pages == 2 ? sum[half] : sum[0] + sum[1];
                uint32_t entry = i + (pages == 2 ? half : 0);
                f[half][q] = head < group ? p[(size_t)head * stride + entry] / all : 0;
            }
        }
#pragma unroll
        for (uint32_t k = 0; k < 2; k++) {
            if (k >= steps)
                continue;
            uint32_t a[4], b[2][2];
#pragma unroll
            for (uint32_t half = 0; half < 2; half++) {
                const uint32_t entry = i + (pages == 2 ? half : 0);
                const uint32_t row = k * 16 + (pages == 2 ? 0 : half * 8) + t * 2;
#pragma unroll
                for (uint32_t q = 0; q < 2; q++)
                    a[half * 2 + q] =
                        g + q * 8 < group
                            ? codes_weights(m, entry, row, rows, mass[k][half][q], f[half][q])
                            : 0;
#pragma unroll
                for (uint32_t j = 0; j < 2; j++)
                    b[j][half] = codes_levels(m, entry, row, rows, g + j * 8);
            }
            multiply_halves(y[0], a, b[0]);
            multiply_halves(y[1], a, b[1]);
        }
    }
#pragma unroll
    for (uint32_t j = 0; j < 2; j++)
#pragma unroll
        for (uint32_t x = 0; x < 4; x++)
            if (g + x / 2 * 8 < group)
                m->sums[threadIdx.x / 32][g + x / 2 * 8][j * 8 + t * 2 + x % 2] = y[j][x];
}

/* Directions of V at dimension x, with what turns a sum of codes into numbers. */
__device__ static inline void codes_directions(const struct codes_memory *m, uint32_t dim,
                                               uint32_t x, float f[CODES_V])
{
    const uint8_t *rows = m->v_basis + CODES_V * sizeof(float);
#pragma unroll
    for (uint32_t j = 0; j < CODES_V; j++)
        f[j] = x < dim ? codes_number(rows + ((size_t)j * dim + x) * 2) *
                             (((const float *)m->v_basis)[j] * (0.5f * CODES_STEP))
                       : 0;
}

__device__ static inline float codes_turned_back(const struct codes_memory *m, uint32_t head,
                                                 const float f[CODES_V])
{
    float sum = 0;
#pragma unroll
    for (uint32_t j = 0; j < CODES_V; j++) {
        float y = m->sums[0][head][j];
#pragma unroll
        for (int warp = 1; warp < 4; warp++)
            y += m->sums[warp][head][j];
        sum = __fmaf_rn(y, f[j], sum);
    }
    return sum;
}

#endif
