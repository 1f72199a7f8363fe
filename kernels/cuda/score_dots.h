/* Products of a query with the vectors of a digest (core/digest.h): what mass of partitions begins with.
 *
 * A vector's channels are whole numbers, and so is the query once the step of each channel is folded into
 * it: 15 bits, as two planes of int8 that are two columns of a matrix instruction. So products are
 * exact. */
#ifndef KERNELS_CUDA_SCORE_DOTS_H
#define KERNELS_CUDA_SCORE_DOTS_H

#include "kernels/cuda/score.h"

enum { PLANE = 127 * 128 /* greatest whole number of a rounded query */ };

/* c[16][8] += a[16][32] b[32][8] of bytes; a unsigned, b signed. */
__device__ static inline void multiply_bytes(int32_t c[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                             uint32_t a3, const uint32_t b[2])
{
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3},"
                 "{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                 : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b[0]), "r"(b[1]));
}

/* ---- the query against one kind of vectors ---- */

/* Lane 4g + t serves head g / 2, plane g % 2, and channels of quads t and t + 4 of each eight. Of the
 * two lanes of a head, each holds half of the channels and folds those. */
template <int DP> struct half_query {
    enum { STEPS = DP / 32, HALF = STEPS / 2 };
    float x[HALF][2][4];
};

template <int DP, bool WHOLE>
__device__ static inline void load_query(half_query<DP> *q, const float *from, bool exists,
                                         uint32_t dim)
{
    const uint32_t lane = threadIdx.x % 32, t = lane % 4, odd = lane / 4 % 2;
#pragma unroll
    for (int s = 0; s < q->HALF; s++)
#pragma unroll
        for (int k = 0; k < 2; k++) {
            uint32_t c = ((s + odd * q->HALF) * 8 + k * 4 + t) * 4;
            float4 v = make_float4(0, 0, 0, 0);
            if (exists && (WHOLE || c < dim))
                v = *(const float4 *)(from + c);
            q->x[s][k][0] = v.x, q->x[s][k][1] = v.y, q->x[s][k][2] = v.z, q->x[s][k][3] = v.w;
        }
}

/* Four bytes of the planes of four numbers. */
__device__ static inline void planes_of(const int32_t x[4], uint32_t *high, uint32_t *low)
{
    uint32_t h[4], l[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int32_t of = (x[i] + 64) >> 7;
        h[i] = (uint32_t)of;
        l[i] = (uint32_t)(x[i] - of * 128);
    }
    *high = __byte_perm(__byte_perm(h[0], h[1], 0x0040), __byte_perm(h[2], h[3], 0x0040), 0x5410);
    *low = __byte_perm(__byte_perm(l[0], l[1], 0x0040), __byte_perm(l[2], l[3], 0x0040), 0x5410);
}

/* Folds the steps into the query and rounds it: operands b, and for head t (in lanes with that t) the
 * logit as dot * factor + offset. at: base and step in shared memory. */
template <int DP, bool WHOLE>
__device__ static inline void fold_query(const half_query<DP> &q, const float *base, uint32_t dim,
                                         float scale, uint32_t b[DP / 32][2], float *factor,
                                         float *offset)
{
    constexpr int HALF = half_query<DP>::HALF;
    const uint32_t lane = threadIdx.x % 32, t = lane % 4, odd = lane / 4 % 2;
    const float *step = base + dim;
    float y[HALF][2][4], top = 0, sum = 0;
#pragma unroll
    for (int s = 0; s < HALF; s++)
#pragma unroll
        for (int k = 0; k < 2; k++) {
            uint32_t c = ((s + odd * HALF) * 8 + k * 4 + t) * 4;
            float4 u = make_float4(0, 0, 0, 0), v = u;
            if (WHOLE || c < dim) {
                u = *(const float4 *)(base + c);
                v = *(const float4 *)(step + c);
            }
            const float bases[4] = {u.x, u.y, u.z, u.w}, steps[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                y[s][k][i] = q.x[s][k][i] * steps[i];
                sum = fmaf(q.x[s][k][i], bases[i], sum);
                top = fmaxf(top, fabsf(y[s][k][i]));
            }
        }
#pragma unroll
    for (int i = 1; i <= 4; i *= 2) {
        top = fmaxf(top, __shfl_xor_sync(~0u, top, i));
        sum += __shfl_xor_sync(~0u, sum, i);
    }
    float inverse = top > 1e-30f ? __fdividef((float)PLANE, top) : 0.0f;
#pragma unroll
    for (int s = 0; s < HALF; s++)
#pragma unroll
        for (int k = 0; k < 2; k++) {
            int32_t x[4];
            uint32_t high, low;
#pragma unroll
            for (int i = 0; i < 4; i++)
                x[i] = __float2int_rn(fminf(fmaxf(y[s][k][i] * inverse, -PLANE), PLANE));
            planes_of(x, &high, &low);
            uint32_t own = odd ? low : high;
            uint32_t other = __shfl_xor_sync(~0u, odd ? high : low, 4);
            b[s][k] = odd ? other : own;
            b[s + HALF][k] = odd ? own : other;
        }
    float f = top > 1e-30f ? top * (1.0f / PLANE) * scale : 0.0f;
    *factor = __shfl_sync(~0u, f, t * 8);
    *offset = __shfl_sync(~0u, sum * scale, t * 8);
}

/* ---- vectors ---- */

/* Of 16 bytes (4 partitions) of a quad: conflicts of banks are between neighbouring pairs of quads. */
__device__ static inline uint32_t swizzled(uint32_t chunk)
{
    return chunk ^ (chunk >> 2 & 2);
}

/* Dots of 32 partitions of two tiles with 4 heads: lane 4g + t gets those of partitions 4 (g % 4) .. + 3
 * of tile g / 4 and head t. */
template <int DP, bool WHOLE>
__device__ static inline void tile_dots(uint32_t at, uint32_t dim, const uint32_t b[DP / 32][2],
                                        float dot[4])
{
    const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const uint32_t tile = at + g / 4 * (dim * DIGEST_TILE);
    int32_t c[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
#pragma unroll
    for (int s = 0; s < DP / 32; s++) {
        uint32_t a[2][4];
#pragma unroll
        for (int k = 0; k < 2; k++) {
            uint32_t quad = s * 8 + k * 4 + t;
            a[k][0] = a[k][1] = a[k][2] = a[k][3] = 0;
            if (WHOLE || quad * 4 < dim)
                asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3},[%4];"
                             : "=r"(a[k][0]), "=r"(a[k][1]), "=r"(a[k][2]), "=r"(a[k][3])
                             : "r"(tile + swizzled(quad * 4 + g % 4) * 16)
                             : "memory");
        }
        multiply_bytes(c[0], a[0][0], a[0][1], a[1][0], a[1][1], b[s]);
        multiply_bytes(c[1], a[0][2], a[0][3], a[1][2], a[1][3], b[s]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
        dot[i] = (float)(c[i / 2][i % 2 * 2] * 128 + c[i / 2][i % 2 * 2 + 1]);
}

#endif
