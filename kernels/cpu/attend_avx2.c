/* Attention for AVX2: vectors of 8 floats, register tiles of 4 queries by 2 vectors. */
#if defined(__AVX2__)
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

enum { VW = 8, NV = 2 };
typedef __m256 vf;
typedef __m256i vp; /* 8 pairs of bf16 numbers */

#define vf_zero()              _mm256_setzero_ps()
#define vf_set1(x)             _mm256_set1_ps(x)
#define vf_load(p)             _mm256_loadu_ps(p)
#define vf_store(p, x)         _mm256_storeu_ps((p), (x))
#define vf_add(a, b)           _mm256_add_ps((a), (b))
#define vf_sub(a, b)           _mm256_sub_ps((a), (b))
#define vf_mul(a, b)           _mm256_mul_ps((a), (b))
#define vf_fma(a, b, c)        _mm256_fmadd_ps((a), (b), (c))
#define vf_max(a, b)           _mm256_max_ps((a), (b))
#define vf_lane0(a)            _mm256_cvtss_f32(a)
#define vp_load(p)             _mm256_loadu_si256((const __m256i *)(const void *)(p))
#define vp_first(x)            _mm256_castsi256_ps(_mm256_slli_epi32((x), 16))
#define vp_second(x)           _mm256_castsi256_ps(_mm256_and_si256((x), _mm256_set1_epi32(-0x10000)))
#define vp_load_halves(lo, hi) ((void)(hi), vp_load(lo)) /* never needed: R >= 8 */

static inline __m256i first_lanes(int n)
{
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

static inline vp vp_load_n(const uint8_t *p, uint32_t n)
{
    return _mm256_maskload_epi32((const int *)(const void *)p, first_lanes((int)n));
}

typedef __m128i vp8; /* 8 pairs of e4m3 numbers */

#define vp8_load(p)             _mm_loadu_si128((const __m128i *)(const void *)(p))
#define vp8_load_halves(lo, hi) ((void)(hi), vp8_load(lo)) /* never needed */
/* e4m3 in the upper byte: f16 of 2^-8 of it has the sign there and the rest one bit lower. */
#define vp8_widen(x)  _mm256_cvtph_ps(_mm_and_si128(_mm_srai_epi16((x), 1), _mm_set1_epi16(-0x4080)))
#define vp8_first(x)  vp8_widen(_mm_slli_epi16((x), 8))
#define vp8_second(x) vp8_widen(x)

static inline vp8 vp8_load_n(const uint8_t *p, uint32_t n)
{
    uint16_t some[VW] = {0};
    memcpy(some, p, (size_t)n * 2);
    return vp8_load(some);
}

/* As vf_load of numbers that are integers; what lies beyond n is not read. */
#define vf_load_i8(p) \
    _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)(p))))

static inline vf vf_load_i8_n(const int8_t *p, uint32_t n)
{
    int8_t some[VW] = {0};
    memcpy(some, p, n);
    return vf_load_i8(some);
}

static inline vf vf_keep(vf x, uint64_t bits, float fill)
{
    __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    __m256i kept = _mm256_and_si256(_mm256_set1_epi32((int)(bits & 0xff)), lane);
    return _mm256_blendv_ps(vf_set1(fill), x, _mm256_castsi256_ps(_mm256_cmpeq_epi32(kept, lane)));
}

/* The greatest number, in all lanes. */
static inline vf vf_hmax(vf a)
{
    a = vf_max(a, _mm256_permute2f128_ps(a, a, 1));
    a = vf_max(a, _mm256_permute_ps(a, 0x4e));
    return vf_max(a, _mm256_permute_ps(a, 0xb1));
}

static inline float vf_hsum(vf a)
{
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}

/* 2^x for x <= 0, within 1 ulp or so: Cephes' exp2f polynomial on [-1/2, 1/2]. Below 2^-126 the
 * result is 0; NaN passes the clamp and ends in the exponent's product. */
static inline vf vf_exp2(vf x)
{
    vf small = _mm256_cmp_ps(x, vf_set1(-126.0f), _CMP_LT_OQ);
    x = _mm256_max_ps(vf_set1(-126.0f), x);
    vf n = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    vf f = vf_sub(x, n), y = vf_set1(1.535336188319500e-4f);
    y = vf_fma(y, f, vf_set1(1.339887440266574e-3f));
    y = vf_fma(y, f, vf_set1(9.618437357674640e-3f));
    y = vf_fma(y, f, vf_set1(5.550332471162809e-2f));
    y = vf_fma(y, f, vf_set1(2.402264791363012e-1f));
    y = vf_fma(y, f, vf_set1(6.931472028550421e-1f));
    y = vf_fma(y, f, vf_set1(1.0f));
    __m256i e =
        _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_andnot_ps(small, vf_mul(y, _mm256_castsi256_ps(e)));
}

/* Rounds to nearest even, NaN stays NaN. */
static inline void vf_store_bf16(void *out, vf x)
{
    __m256i u = _mm256_castps_si256(x), half = _mm256_srli_epi32(u, 16);
    __m256i odd = _mm256_and_si256(half, _mm256_set1_epi32(1));
    __m256i r = _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd);
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    __m256i quiet = _mm256_or_si256(half, _mm256_set1_epi32(0x40));
    r = _mm256_blendv_epi8(_mm256_srli_epi32(r, 16), quiet, nan);
    r = _mm256_permute4x64_epi64(_mm256_packus_epi32(r, r), 0x08);
    _mm_storeu_si128((__m128i *)out, _mm256_castsi256_si128(r));
}

/* As f32_to_e4m3. */
static inline void vf_store_e4m3(void *out, vf x)
{
    __m256i u = _mm256_castps_si256(x), mag = _mm256_and_si256(u, _mm256_set1_epi32(0x7fffffff));
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(mag, 20), _mm256_set1_epi32(1));
    __m256i r = _mm256_add_epi32(_mm256_add_epi32(mag, _mm256_set1_epi32(0x7ffff)), odd);
    r = _mm256_sub_epi32(_mm256_srli_epi32(r, 20), _mm256_set1_epi32(120 << 3));
    r = _mm256_min_epi32(r, _mm256_set1_epi32(0x7e));
    __m256i small = _mm256_castps_si256(vf_add(_mm256_castsi256_ps(mag), vf_set1(0x1p14f)));
    __m256i low = _mm256_cmpgt_epi32(_mm256_set1_epi32(0x3c800000), mag);
    small = _mm256_sub_epi32(small, _mm256_set1_epi32(0x46800000));
    r = _mm256_blendv_epi8(r, small, low);
    r = _mm256_or_si256(r, _mm256_and_si256(_mm256_srli_epi32(u, 24), _mm256_set1_epi32(0x80)));
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    r = _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7f), nan);
    r = _mm256_permute4x64_epi64(_mm256_packus_epi32(r, r), 0x08);
    r = _mm256_packus_epi16(r, r);
    _mm_storel_epi64((__m128i *)out, _mm256_castsi256_si128(r));
}

#include "kernels/cpu/attend_vec.h"

const struct attend_kernels attend_avx2 = {part, estimate, fold, finish, append};
#else
typedef int attend_avx2_needs_x86;
#endif
