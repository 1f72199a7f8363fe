/* Attention for AVX-512: vectors of 16 floats, register tiles of 4 queries by 4 vectors. */
#if defined(__AVX512F__)
#include <immintrin.h>

enum { VW = 16, NV = 4 };
typedef __m512 vf;
typedef __m512i vp; /* 16 pairs of bf16 numbers */

#define vf_zero()              _mm512_setzero_ps()
#define vf_set1(x)             _mm512_set1_ps(x)
#define vf_load(p)             _mm512_loadu_ps(p)
#define vf_store(p, x)         _mm512_storeu_ps((p), (x))
#define vf_add(a, b)           _mm512_add_ps((a), (b))
#define vf_sub(a, b)           _mm512_sub_ps((a), (b))
#define vf_mul(a, b)           _mm512_mul_ps((a), (b))
#define vf_fma(a, b, c)        _mm512_fmadd_ps((a), (b), (c))
#define vf_max(a, b)           _mm512_max_ps((a), (b))
#define vf_hsum(a)             _mm512_reduce_add_ps(a)
#define vf_lane0(a)            _mm512_cvtss_f32(a)
#define vp_load(p)             _mm512_loadu_si512(p)
#define vp_first(x)            _mm512_castsi512_ps(_mm512_slli_epi32((x), 16))
#define vp_second(x)           _mm512_castsi512_ps(_mm512_and_si512((x), _mm512_set1_epi32(-0x10000)))
#define first_lanes(n)         (__mmask16)((n) >= 16 ? 0xffff : (n) <= 0 ? 0 : (1u << (n)) - 1)
#define vp_load_n(p, n)        _mm512_maskz_loadu_epi32(first_lanes((int)(n)), (p))
#define vf_keep(x, bits, fill) _mm512_mask_mov_ps(_mm512_set1_ps(fill), (__mmask16)(bits), (x))
#define vp_load_halves(lo, hi)                                                           \
    _mm512_inserti64x4(                                                                  \
        _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)(const void *)(lo))), \
        _mm256_loadu_si256((const __m256i *)(const void *)(hi)), 1)

typedef __m256i vp8; /* 16 pairs of e4m3 numbers */

#define vp8_load(p)      _mm256_loadu_si256((const __m256i *)(const void *)(p))
#define vp8_load_n(p, n) _mm256_maskz_loadu_epi16(first_lanes((int)(n)), (p))
#define vp8_load_halves(lo, hi)                                                       \
    _mm256_inserti128_si256(                                                          \
        _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)(lo))), \
        _mm_loadu_si128((const __m128i *)(const void *)(hi)), 1)
/* e4m3 in the upper byte: f16 of 2^-8 of it has the sign there and the rest one bit lower. */
#define vp8_widen(x) \
    _mm512_cvtph_ps(_mm256_and_si256(_mm256_srai_epi16((x), 1), _mm256_set1_epi16(-0x4080)))
#define vp8_first(x)  vp8_widen(_mm256_slli_epi16((x), 8))
#define vp8_second(x) vp8_widen(x)

/* As vf_load of numbers that are integers; what lies beyond n is not read. */
#define vf_load_i8(p) \
    _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(const void *)(p))))
#define vf_load_i8_n(p, n) \
    _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(first_lanes((int)(n)), (p))))

/* The greatest number, in all lanes. */
static inline vf vf_hmax(vf a)
{
    a = vf_max(a, _mm512_shuffle_f32x4(a, a, 0x4e));
    a = vf_max(a, _mm512_shuffle_f32x4(a, a, 0xb1));
    a = vf_max(a, _mm512_permute_ps(a, 0x4e));
    return vf_max(a, _mm512_permute_ps(a, 0xb1));
}

/* 2^x for finite x <= 0, within 1 ulp or so: Cephes' exp2f polynomial on [-1/2, 1/2]. Far below the
 * least number scalef gives 0; NaN passes. */
static inline vf vf_exp2(vf x)
{
    vf n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    vf f = vf_sub(x, n), y = vf_set1(1.535336188319500e-4f);
    y = vf_fma(y, f, vf_set1(1.339887440266574e-3f));
    y = vf_fma(y, f, vf_set1(9.618437357674640e-3f));
    y = vf_fma(y, f, vf_set1(5.550332471162809e-2f));
    y = vf_fma(y, f, vf_set1(2.402264791363012e-1f));
    y = vf_fma(y, f, vf_set1(6.931472028550421e-1f));
    y = vf_fma(y, f, vf_set1(1.0f));
    return _mm512_scalef_ps(y, n);
}

/* Rounds to nearest even, NaN stays NaN (vcvtneps2bf16 would flush small numbers to 0). */
static inline void vf_store_bf16(void *out, vf x)
{
    __m512i u = _mm512_castps_si512(x), half = _mm512_srli_epi32(u, 16);
    __m512i odd = _mm512_and_si512(half, _mm512_set1_epi32(1));
    __m512i r = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd);
    __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    r = _mm512_mask_or_epi32(_mm512_srli_epi32(r, 16), nan, half, _mm512_set1_epi32(0x40));
    _mm256_storeu_si256((__m256i *)out, _mm512_cvtepi32_epi16(r));
}

/* As f32_to_e4m3. */
static inline void vf_store_e4m3(void *out, vf x)
{
    __m512i u = _mm512_castps_si512(x), mag = _mm512_and_si512(u, _mm512_set1_epi32(0x7fffffff));
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(mag, 20), _mm512_set1_epi32(1));
    __m512i r = _mm512_add_epi32(_mm512_add_epi32(mag, _mm512_set1_epi32(0x7ffff)), odd);
    r = _mm512_sub_epi32(_mm512_srli_epi32(r, 20), _mm512_set1_epi32(120 << 3));
    r = _mm512_min_epi32(r, _mm512_set1_epi32(0x7e));
    vf small = _mm512_add_ps(_mm512_castsi512_ps(mag), _mm512_set1_ps(0x1p14f));
    __mmask16 low = _mm512_cmplt_epi32_mask(mag, _mm512_set1_epi32(0x3c800000));
    r = _mm512_mask_sub_epi32(r, low, _mm512_castps_si512(small), _mm512_set1_epi32(0x46800000));
    __m512i sign = _mm512_and_si512(_mm512_srli_epi32(u, 24), _mm512_set1_epi32(0x80));
    __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    r = _mm512_mask_mov_epi32(_mm512_or_si512(r, sign), nan, _mm512_set1_epi32(0x7f));
    _mm_storeu_si128((__m128i *)out, _mm512_cvtepi32_epi8(r));
}

#include "kernels/cpu/attend_vec.h"

const struct attend_kernels attend_avx512 = {part, estimate, fold, finish, append};
#else
typedef int attend_avx512_needs_x86;
#endif
