/* Passes of sampling for AVX-512. A row of 49,152 logits is 192 KiB: it comes from L2 or L3, at 60 to
 * 100 GB/s per core, so peak takes 2 to 5 us and soften, bound by its exponentials, about 15. */
#if defined(__AVX512F__)
#include "kernels/cpu/sample.h"

#include <immintrin.h>
#include <math.h>

enum { VW = 16 };

static inline __mmask16 lanes(uint32_t left)
{
    return left >= VW ? (__mmask16)0xffff : (__mmask16)((1u << left) - 1);
}

/* Within a block: four accumulators, because max has a latency of four cycles. */
static float block_max(const float *x, uint32_t n, __mmask16 *nan)
{
    const __m512 low = _mm512_set1_ps(-INFINITY);
    __m512 a[4] = {low, low, low, low};
    uint32_t i = 0;
    for (; i + 4 * VW <= n; i += 4 * VW) {
        __m512 v[4];
        for (uint32_t k = 0; k < 4; k++) {
            v[k] = _mm512_loadu_ps(x + i + (size_t)k * VW);
            a[k] = _mm512_max_ps(a[k], v[k]);
        }
        *nan |= _mm512_cmp_ps_mask(v[0], v[1], _CMP_UNORD_Q);
        *nan |= _mm512_cmp_ps_mask(v[2], v[3], _CMP_UNORD_Q);
    }
    for (; i < n; i += VW) {
        __m512 v = _mm512_mask_loadu_ps(low, lanes(n - i), x + i);
        a[0] = _mm512_max_ps(a[0], v);
        *nan |= _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    }
    return _mm512_reduce_max_ps(
        _mm512_max_ps(_mm512_max_ps(a[0], a[1]), _mm512_max_ps(a[2], a[3])));
}

static struct sample_peak peak(const float *x, uint32_t n)
{
    struct sample_peak p = {-INFINITY, 0, false};
    uint32_t best = 0;
    __mmask16 nan = 0;
    for (uint32_t at = 0; at < n; at += SAMPLE_BLOCK) {
        float max = block_max(x + at, n - at < SAMPLE_BLOCK ? n - at : SAMPLE_BLOCK, &nan);
        if (max > p.max) {
            p.max = max;
            best = at;
        }
    }
    p.nan = nan != 0;
    for (p.id = best; p.id + 1 < n && x[p.id] != p.max;)
        p.id++;
    return p;
}

/* exp(x) for x <= 0 within 2 ulp: Cephes' expf with fused reduction. exp(-inf) = 0. */
static inline __m512 exp_ps(__m512 x)
{
    x = _mm512_max_ps(_mm512_set1_ps(-110.0f), x);
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps((float)M_LOG2E)),
                                    _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x); /* ln 2 in two parts */
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 y = _mm512_set1_ps(1.9875691500e-4f);
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.3981999507e-3f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(8.3334519073e-3f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(4.1665795894e-2f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.6666665459e-1f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(5.0000001201e-1f));
    y = _mm512_fmadd_ps(y, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_scalef_ps(y, n);
}

static double soften(const float *x, uint32_t n, float t, float max, float *y, float *e,
                     double *sums)
{
    const __m512 vt = _mm512_set1_ps(t), vmax = _mm512_set1_ps(max);
    double total = 0;
    for (uint32_t at = 0; at < n; at += SAMPLE_BLOCK) {
        uint32_t end = n - at < SAMPLE_BLOCK ? n : at + SAMPLE_BLOCK;
        __m512d lo = _mm512_setzero_pd(), hi = _mm512_setzero_pd();
        for (uint32_t i = at; i < end; i += VW) {
            __mmask16 m = lanes(end - i);
            __m512 v = _mm512_maskz_loadu_ps(m, x + i);
            if (t != 1.0f)
                v = _mm512_div_ps(v, vt);
            if (y != NULL)
                _mm512_mask_storeu_ps(y + i, m, v);
            v = _mm512_maskz_mov_ps(m, exp_ps(_mm512_sub_ps(v, vmax)));
            if (e != NULL)
                _mm512_mask_storeu_ps(e + i, m, v);
            lo = _mm512_add_pd(lo, _mm512_cvtps_pd(_mm512_castps512_ps256(v)));
            hi = _mm512_add_pd(hi, _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1)));
        }
        sums[at / SAMPLE_BLOCK] = _mm512_reduce_add_pd(_mm512_add_pd(lo, hi));
        total += sums[at / SAMPLE_BLOCK];
    }
    return total;
}

static uint32_t count_above(const float *x, uint32_t n, float bound)
{
    const __m512 b = _mm512_set1_ps(bound);
    uint32_t count = 0;
    for (uint32_t i = 0; i < n; i += VW) {
        __mmask16 m = lanes(n - i);
        m = _mm512_mask_cmp_ps_mask(m, _mm512_maskz_loadu_ps(m, x + i), b, _CMP_GT_OQ);
        count += (uint32_t)__builtin_popcount(m);
    }
    return count;
}

static uint32_t collect(const float *x, uint32_t n, float least, uint32_t *ids)
{
    const __m512 b = _mm512_set1_ps(least);
    const __m512i step = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    uint32_t count = 0;
    for (uint32_t i = 0; i < n; i += VW) {
        __mmask16 m = lanes(n - i);
        m = _mm512_mask_cmp_ps_mask(m, _mm512_maskz_loadu_ps(m, x + i), b, _CMP_GE_OQ);
        if (m == 0)
            continue;
        __m512i id = _mm512_add_epi32(_mm512_set1_epi32((int)i), step);
        _mm512_storeu_si512(ids + count, _mm512_maskz_compress_epi32(m, id));
        count += (uint32_t)__builtin_popcount(m);
    }
    return count;
}

const struct sample_passes sample_avx512 = {peak, soften, count_above, collect};
#else
typedef int sample_avx512_needs_x86;
#endif
