/* Directions of row codes (codes.h): the leading eigenvectors of the covariance of a segment's
 * distances, by orthogonal iteration with a fixed start and a fixed number of rounds: near enough
 * (neighbours of almost equal weight may stay mixed, which costs a code nothing), and the same
 * operations in the same order on every instruction set (vec16.h).
 *
 * Bound by multiplications: head_dim^2 per row for the covariance, 32 head_dim^2 per round. */
#ifndef KERNELS_CPU_CODES_BASIS_VEC_H
#define KERNELS_CPU_CODES_BASIS_VEC_H

#include "kernels/cpu/codes.h"
#include "kernels/cpu/vec16.h"
#include "kernels/dtype.h"

enum {
    BASIS_ROUNDS = 16,
    BASIS_CHANNELS = 4 /* worked on together: 4 x 4 sums in registers */
};

/* out[c][j .. j + 16 nv) of channels c .. c + 3: sums over rows [first, SEGMENT_ROWS). */
V16_FN void covariance_tile(const float *x, uint32_t stride, uint32_t first, uint32_t c, uint32_t j,
                            const uint32_t nv, float *out)
{
    v16f acc[BASIS_CHANNELS][4];
    V16_UNROLL for (uint32_t k = 0; k < BASIS_CHANNELS; k++) for (uint32_t v = 0; v < nv; v++)
        acc[k][v] = v16_zero();
    for (uint32_t r = first; r < SEGMENT_ROWS; r++) {
        const float *row = x + (size_t)r * stride;
        V16_UNROLL for (uint32_t v = 0; v < nv; v++)
        {
            v16f y = v16_load(row + j + (size_t)v * V16);
            V16_UNROLL for (uint32_t k = 0; k < BASIS_CHANNELS; k++) acc[k][v] =
                v16_fma(y, v16_set1(row[c + k]), acc[k][v]);
        }
    }
    for (uint32_t k = 0; k < BASIS_CHANNELS; k++)
        for (uint32_t v = 0; v < nv; v++)
            v16_store(out + (size_t)(c + k) * stride + j + (size_t)v * V16, acc[k][v]);
}

static void covariance(const float *x, uint32_t stride, uint32_t first, float *out)
{
    for (uint32_t c = 0; c < stride; c += BASIS_CHANNELS)
        for (uint32_t j = 0; j < stride; j += 4 * V16) {
            if (stride - j >= 4 * V16)
                covariance_tile(x, stride, first, c, j, 4, out);
            else
                for (uint32_t i = j; i < stride; i += V16)
                    covariance_tile(x, stride, first, c, i, 1, out);
        }
}

V16_FN float dot(const float *a, const float *b, uint32_t stride)
{
    v16f acc = v16_zero();
    for (uint32_t j = 0; j < stride; j += V16)
        acc = v16_fma(v16_load(a + j), v16_load(b + j), acc);
    return v16_hsum(acc);
}

/* to = C from, for `dirs` vectors (a multiple of 4). */
static void multiply(const float *cov, uint32_t stride, const float *from, uint32_t dirs, float *to)
{
    for (uint32_t d = 0; d < dirs; d += 4)
        for (uint32_t j = 0; j < stride; j += V16) {
            v16f acc[4] = {v16_zero(), v16_zero(), v16_zero(), v16_zero()};
            const float *q = from + (size_t)d * stride;
            for (uint32_t i = 0; i < stride; i++) {
                v16f row = v16_load(cov + (size_t)i * stride + j);
                V16_UNROLL for (uint32_t k = 0; k < 4; k++) acc[k] =
                    v16_fma(row, v16_set1(q[k * stride + i]), acc[k]);
            }
            for (uint32_t k = 0; k < 4; k++)
                v16_store(to + (size_t)(d + k) * stride + j, acc[k]);
        }
}

/* Takes from q[d] what lies in q[0 .. d - 1], twice, as once leaves rounding errors. */
static void project_out(float *q, uint32_t stride, uint32_t d)
{
    float *x = q + (size_t)d * stride, part[CODES_K];
    for (uint32_t pass = 0; pass < 2; pass++) {
        for (uint32_t i = 0; i < d; i++)
            part[i] = dot(x, q + (size_t)i * stride, stride);
        for (uint32_t j = 0; j < stride; j += V16) {
            v16f acc = v16_load(x + j);
            for (uint32_t i = 0; i < d; i++)
                acc = v16_fma(v16_load(q + (size_t)i * stride + j), v16_set1(-part[i]), acc);
            v16_store(x + j, acc);
        }
    }
}

static void scale_by(float *x, uint32_t stride, float factor)
{
    for (uint32_t j = 0; j < stride; j += V16)
        v16_store(x + j, v16_mul(v16_load(x + j), v16_set1(factor)));
}

/* Gram-Schmidt, in order. Where nothing is left (fewer directions than asked for have any weight), the
 * first channel that adds enough of a direction: one of dim - d others must. */
static void orthonormalise(float *q, uint32_t dim, uint32_t stride, uint32_t dirs)
{
    for (uint32_t d = 0; d < dirs; d++) {
        float *x = q + (size_t)d * stride, before = dot(x, x, stride), left;
        project_out(q, stride, d);
        left = dot(x, x, stride);
        for (uint32_t c = 0; c < dim && !(left > 1e-8f * before && left > 1e-30f); c++) {
            memset(x, 0, stride * sizeof *x);
            x[c] = 1.0f;
            project_out(q, stride, d);
            left = dot(x, x, stride);
            before = 0;
            if (left < 0.5f * (float)(dim - d) / (float)dim)
                left = 0;
        }
        scale_by(x, stride, 1.0f / sqrtf(left));
    }
}

/* A start that no channel structure is blind to: signs of a hash. */
static void start_basis(float *q, uint32_t dim, uint32_t stride, uint32_t dirs)
{
    memset(q, 0, (size_t)CODES_K * stride * sizeof *q);
    for (uint32_t d = 0; d < dirs; d++)
        for (uint32_t c = 0; c < dim; c++) {
            uint32_t h = (d * 512 + c + 1) * 0x9e3779b1u;
            h = (h ^ h >> 15) * 0x85ebca6bu;
            q[(size_t)d * stride + c] = (h ^ h >> 13) & 1 ? 1.0f : -1.0f;
        }
}

/* Directions [n][stride] in the lane's scratch and their sd [n] (0: no direction) from distances x of
 * the rows behind the sinks. Without any weight, or with NaN in it: channels, sd 1. */
static const float *make_basis(const struct codes_lane *a, const float *x, uint32_t n, float *sd)
{
    uint32_t stride = a->stride, dirs = n < a->dim ? n : a->dim;
    float *cov = a->work + (size_t)SEGMENT_ROWS * stride, most = 0, weight[CODES_K] = {0}, top = 0;
    float *q = cov + (size_t)stride * stride, *image = q + (size_t)CODES_K * stride;
    bool sound = true;
    covariance(x, stride, a->sink_rows, cov);
    for (uint32_t c = 0; c < a->dim; c++) {
        float own = cov[(size_t)c * stride + c];
        sound = sound && own < 1e30f; /* false for NaN; and then no product is NaN */
        most = own > most ? own : most;
    }
    sound = sound && most > 1e-24f;
    for (uint32_t c = 0; c < stride; c++)
        scale_by(cov + (size_t)c * stride, stride, sound ? 1.0f / most : 0.0f);
    start_basis(q, a->dim, stride, dirs);
    if (!sound)
        memset(q, 0, (size_t)CODES_K * stride * sizeof *q);
    for (uint32_t c = 0; c < dirs && !sound; c++)
        q[(size_t)c * stride + c] = 1.0f;
    for (uint32_t i = 0; i < BASIS_ROUNDS && sound; i++) {
        multiply(cov, stride, q, dirs, image);
        memcpy(q, image, (size_t)dirs * stride * sizeof *q);
        orthonormalise(q, a->dim, stride, dirs);
    }
    multiply(cov, stride, q, dirs, image);
    for (uint32_t d = 0; d < dirs && sound; d++) {
        weight[d] = dot(q + (size_t)d * stride, image + (size_t)d * stride, stride);
        top = weight[d] > top ? weight[d] : top;
    }
    for (uint32_t d = 0; d < n; d++) {
        float w = d < dirs && sound ? weight[d] : 0;
        w = w > 1e-6f * top ? w : 1e-6f * top; /* a direction that may yet be used */
        w *= most / (float)(SEGMENT_ROWS - a->sink_rows);
        sd[d] = d >= dirs ? 0.0f : sound ? sqrtf(w) : 1.0f;
    }
    return q;
}

#endif
