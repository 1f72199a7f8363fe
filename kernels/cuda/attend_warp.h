/* Planned rows: each warp attends its 16 positions of every tile by itself, with a softmax and sums of its own
 * over all dimensions, and the four meet at the end of a split. So warps wait for their own pages alone, and no
 * barrier stands between two tiles: splits are short and CTAs few when a single sequence decodes.
 *
 * Scores of 16 queries by 16 positions leave the matrix instruction as it wants the weights of the
 * next product, so nothing goes through shared memory on the way. Bound by HBM. */
#ifndef KERNELS_CUDA_ATTEND_WARP_H
#define KERNELS_CUDA_ATTEND_WARP_H

#include "kernels/cuda/attend_mma.h"

template <int DP> struct warp_sums {
    float o[DP / 8][4];
    float l[4], m[2]; /* of queries g and g + 8; l: columns are alike */
};

template <int DP> __device__ static inline void warp_clear(struct warp_sums<DP> *s)
{
#pragma unroll
    for (int j = 0; j < DP / 8 * 4; j++)
        s->o[j / 4][j % 4] = 0;
    s->l[0] = s->l[1] = s->l[2] = s->l[3] = 0;
    s->m[0] = s->m[1] = LOWEST;
}

/* Scores s of this warp's 16 positions to weights; sums so far are scaled to the new greatest score. */
template <int DP>
__device__ static inline void warp_weigh(float scale, float s[2][4], struct warp_sums<DP> *sum,
                                         uint32_t p[4])
{
    float alpha[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float top = fmaxf(fmaxf(s[0][i * 2], s[0][i * 2 + 1]), fmaxf(s[1][i * 2], s[1][i * 2 + 1]));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        top = fmaxf(sum->m[i], __fmul_rn(top, scale));
        alpha[i] = exp2_fast(sum->m[i] - top);
        sum->m[i] = top;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float *v = &s[j / 2][i * 2 + j % 2];
            *v = exp2_fast(__fmaf_rn(*v, scale, -top));
        }
    }
#pragma unroll
    for (int j = 0; j < 4; j++)
        p[j] = pack(s[j / 2][j % 2 * 2], s[j / 2][j % 2 * 2 + 1]);
    if (!__any_sync(~0u, alpha[0] != 1 || alpha[1] != 1))
        return; /* times 1 */
#pragma unroll
    for (int j = 0; j < DP / 8 * 4; j++)
        sum->o[j / 4][j % 4] *= alpha[j / 2 % 2];
#pragma unroll
    for (int j = 0; j < 4; j++)
        sum->l[j] *= alpha[j / 2];
}

/* Adds weights times this warp's 16 rows of V. */
template <int DP, int ROWS>
__device__ static inline void warp_add(const uint32_t p[4], uint32_t v_at, struct warp_sums<DP> *s)
{
    const uint32_t ones[2] = {0x3f803f80, 0x3f803f80};
    multiply(s->l, p, ones);
#pragma unroll
    for (int j = 0; j < DP / 8; j += 2) {
        uint32_t b[4];
        load_values<DP, ROWS>(b, v_at, threadIdx.x / 32 * 16, j);
        multiply(s->o[j], p, b);
        multiply(s->o[j + 1], p, b + 2);
    }
}

/* What the warps tell each other at the end of a split. */
template <int DP> struct warp_meeting {
    float m[4][CUDA_FEW], l[4][CUDA_FEW];
    float o[2][CUDA_FEW][DP + 8];
};

/* Sums of the four warps to a partial result o [n][DP], ml [n], through memory that nobody uses. All threads;
 * the memory is free again behind it. */
template <int DP, int ROWS>
__device__ static inline void warp_meet(struct warp_sums<DP> *s, uint32_t n,
                                        struct warp_meeting<DP> *x, float *o, float2 *ml)
{
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    pair_sums<ROWS, DP / 8>(s->o);
    __syncthreads(); /* all warps are done with the tile in this memory */
#pragma unroll
    for (uint32_t i = 0; i < 2; i++)
        if (t == 0) {
            x->m[warp][g + i * 8] = s->m[i];
            x->l[warp][g + i * 8] = s->l[i * 2];
        }
    __syncthreads();
    float f[2];
#pragma unroll
    for (uint32_t i = 0; i < 2; i++) {
        const uint32_t q = g + i * 8;
        float top = fmaxf(fmaxf(x->m[0][q], x->m[1][q]), fmaxf(x->m[2][q], x->m[3][q]));
        f[i] = exp2_fast(s->m[i] - top);
    }
    for (uint32_t turn = 0; turn < 2; turn++) {
        if (warp / 2 == turn) {
#pragma unroll
            for (uint32_t j = 0; j < DP / 8 * 2; j++) {
                const uint32_t q = g + j % 2 * 8;
                float2 *at = (float2 *)&x->o[warp % 2][q][pair_dim<ROWS>(j / 2)];
                if (q >= n)
                    continue;
                float2 two = turn == 0 ? make_float2(0, 0) : *at;
                two.x = __fmaf_rn(s->o[j / 2][j % 2 * 2], f[j % 2], two.x);
                two.y = __fmaf_rn(s->o[j / 2][j % 2 * 2 + 1], f[j % 2], two.y);
                *at = two;
            }
        }
        __syncthreads();
    }
    for (uint32_t i = threadIdx.x; i < n * (DP / 4); i += CUDA_THREADS) {
        const uint32_t q = i / (DP / 4), d = i % (DP / 4) * 4;
        const float4 a = *(const float4 *)&x->o[0][q][d], b = *(const float4 *)&x->o[1][q][d];
        *(float4 *)(o + (size_t)q * DP + d) =
            make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
    }
    if (threadIdx.x < n) {
        const uint32_t q = threadIdx.x;
        float top = fmaxf(fmaxf(x->m[0][q], x->m[1][q]), fmaxf(x->m[2][q], x->m[3][q])), l = 0;
#pragma unroll
        for (int w = 0; w < 4; w++)
            l = __fmaf_rn(x->l[w][q], exp2_fast(x->m[w][q] - top), l);
        ml[q] = make_float2(top, l);
    }
    __syncthreads();
}

#endif
