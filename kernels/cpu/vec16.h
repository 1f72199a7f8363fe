/* Vectors of 16 floats with the same results on every instruction set: one zmm register, two ymm, or
 * a loop. What is written with them once (seal_vec.h, score_vec.h, select_vec.h: bodies that a file
 * per instruction set includes) gives the same bits everywhere, so a sealed segment and a selection
 * (of the same queries and known mass) do not depend on the machine. Sums across a vector are trees of fixed shape: halves first.
 *
 * Masks are 16 bits, lane 0 lowest. Included by files compiled with their own flags; elsewhere it is
 * the portable version. */
#ifndef KERNELS_CPU_VEC16_H
#define KERNELS_CPU_VEC16_H

#include "kernels/base.h"

#include <math.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

enum { V16 = 16 };
typedef uint32_t v16_mask;

/* In registers everything is inlined, and loops over vectors are unrolled: -O2 alone leaves them in
 * memory. The portable version is calls, or compiling it takes minutes with sanitizers. */
#if defined(__AVX2__)
#define V16_FN     static inline __attribute__((always_inline, unused))
#define V16_UNROLL _Pragma("GCC unroll 16")
#else
#define V16_FN static __attribute__((noinline, unused))
#define V16_UNROLL
#endif

#if defined(__AVX512F__)

typedef __m512 v16f;
typedef __m512i v16i;

#define v16_set1(x)      _mm512_set1_ps(x)
#define v16_load(p)      _mm512_loadu_ps(p)
#define v16_store(p, x)  _mm512_storeu_ps((p), (x))
#define v16_add(a, b)    _mm512_add_ps((a), (b))
#define v16_sub(a, b)    _mm512_sub_ps((a), (b))
#define v16_mul(a, b)    _mm512_mul_ps((a), (b))
#define v16_div(a, b)    _mm512_div_ps((a), (b))
#define v16_sqrt(a)      _mm512_sqrt_ps(a)
#define v16_fma(a, b, c) _mm512_fmadd_ps((a), (b), (c))
#define v16_max(a, b)    _mm512_max_ps((a), (b)) /* b if one is NaN */
#define v16_min(a, b)    _mm512_min_ps((a), (b))
#define v16_gt(a, b)     ((v16_mask)_mm512_cmp_ps_mask((a), (b), _CMP_GT_OQ))
/* Lanes of a where the mask is set, else of b. */
#define v16_pick(m, a, b) _mm512_mask_blend_ps((__mmask16)(m), (b), (a))
#define v16_to_int(a)     _mm512_cvtps_epi32(a) /* to nearest, ties to even */
#define v16_from_int(a)   _mm512_cvtepi32_ps(a)
#define v16_bits(a)       _mm512_castps_si512(a)
#define v16_of_bits(a)    _mm512_castsi512_ps(a)
#define v16i_set1(x)      _mm512_set1_epi32(x)
#define v16i_load(p)      _mm512_loadu_si512(p)
#define v16i_store(p, x)  _mm512_storeu_si512((p), (x))
#define v16i_add(a, b)    _mm512_add_epi32((a), (b))
#define v16i_sub(a, b)    _mm512_sub_epi32((a), (b))
#define v16i_and(a, b)    _mm512_and_si512((a), (b))
#define v16i_xor(a, b)    _mm512_xor_si512((a), (b))
#define v16i_shl(a, n)    _mm512_slli_epi32((a), (n))
#define v16i_sar(a, n)    _mm512_srai_epi32((a), (n))
#define v16i_shr(a, n)    _mm512_srli_epi32((a), (n))
#define v16i_gt(a, b)     ((v16_mask)_mm512_cmpgt_epi32_mask((a), (b)))
#define v16i_eq(a, b)     ((v16_mask)_mm512_cmpeq_epi32_mask((a), (b)))
/* n + 1 in the lanes where a > b. */
#define v16i_count_gt(n, a, b) \
    _mm512_mask_sub_epi32((n), _mm512_cmpgt_epi32_mask((a), (b)), (n), _mm512_set1_epi32(-1))
/* Stores the chosen lanes densely. Writes up to 16 numbers. */
#define v16i_compress(p, m, a) _mm512_mask_compressstoreu_epi32((p), (__mmask16)(m), (a))
#define v16i_load_halves(p, q)                                                          \
    _mm512_inserti64x4(                                                                 \
        _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)(const void *)(p))), \
        _mm256_loadu_si256((const __m256i *)(const void *)(q)), 1)
#define v16i_or(a, b) _mm512_or_si512((a), (b))
/* sum + the dot products of 4 unsigned bytes of each lane of u[0 .. n) with w[4 i .. 4 i + 3]; n <= 8,
 * u <= 3: what AVX2 has room for. */
V16_FN v16i v16i_dot4(v16i sum, const v16i *u, const int8_t *w, const uint32_t n)
{
    V16_UNROLL for (uint32_t i = 0; i < n; i++)
    {
        int32_t four;
        memcpy(&four, w + (size_t)i * 4, sizeof four);
        sum = _mm512_dpbusd_epi32(sum, u[i], _mm512_set1_epi32(four));
    }
    return sum;
}
/* The low halves of the lanes; of no lane more than 65,535 where it matters. */
#define v16i_store_u16(p, a) _mm256_storeu_si256((__m256i *)(void *)(p), _mm512_cvtepi32_epi16(a))
#define v16i_load_u16(p) \
    _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)(p)))

V16_FN float v16_hsum(v16f a)
{
    __m256 x = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}

V16_FN float v16_hmax(v16f a)
{
    __m256 x = _mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}

/* Lane i: v16_hsum(a[i]). */
V16_FN v16f v16_hsums(const v16f *a)
{
    v16f q[4], d[2];
    V16_UNROLL for (int e = 0; e < 4; e++)
    { /* q[e]: of a[e], a[4 + e], a[8 + e], a[12 + e], by quarters */
        v16f lo = v16_add(_mm512_shuffle_f32x4(a[e], a[4 + e], 0x44),
                          _mm512_shuffle_f32x4(a[e], a[4 + e], 0xee));
        v16f hi = v16_add(_mm512_shuffle_f32x4(a[8 + e], a[12 + e], 0x44),
                          _mm512_shuffle_f32x4(a[8 + e], a[12 + e], 0xee));
        q[e] = v16_add(_mm512_shuffle_f32x4(lo, hi, 0x88), _mm512_shuffle_f32x4(lo, hi, 0xdd));
    }
    V16_UNROLL for (int e = 0; e < 2; e++) d[e] =
        v16_add(_mm512_shuffle_ps(q[2 * e], q[2 * e + 1], 0x44),
                _mm512_shuffle_ps(q[2 * e], q[2 * e + 1], 0xee));
    return v16_add(_mm512_shuffle_ps(d[0], d[1], 0x88), _mm512_shuffle_ps(d[0], d[1], 0xdd));
}

#else

#if defined(__AVX2__)

typedef struct {
    __m256 a, b;
} v16f;
typedef struct {
    __m256i a, b;
} v16i;

/* Applies an operation to both halves. */
#define V16_F1(name, op)                 \
    V16_FN v16f name(v16f x)             \
    {                                    \
        return (v16f){op(x.a), op(x.b)}; \
    }
#define V16_F2(name, op)                           \
    V16_FN v16f name(v16f x, v16f y)               \
    {                                              \
        return (v16f){op(x.a, y.a), op(x.b, y.b)}; \
    }
#define V16_I2(name, op)                           \
    V16_FN v16i name(v16i x, v16i y)               \
    {                                              \
        return (v16i){op(x.a, y.a), op(x.b, y.b)}; \
    }
#define V16_IS(name, op)                       \
    V16_FN v16i name(v16i x, int n)            \
    {                                          \
        return (v16i){op(x.a, n), op(x.b, n)}; \
    }
V16_F1(v16_sqrt, _mm256_sqrt_ps)
V16_F2(v16_add, _mm256_add_ps)
V16_F2(v16_sub, _mm256_sub_ps)
V16_F2(v16_mul, _mm256_mul_ps)
V16_F2(v16_div, _mm256_div_ps)
V16_F2(v16_max, _mm256_max_ps)
V16_F2(v16_min, _mm256_min_ps)
V16_I2(v16i_add, _mm256_add_epi32)
V16_I2(v16i_sub, _mm256_sub_epi32)
V16_I2(v16i_and, _mm256_and_si256)
V16_I2(v16i_xor, _mm256_xor_si256)
V16_I2(v16i_or, _mm256_or_si256)
V16_IS(v16i_shl, _mm256_slli_epi32)
V16_IS(v16i_sar, _mm256_srai_epi32)
V16_IS(v16i_shr, _mm256_srli_epi32)

V16_FN v16f v16_set1(float x)
{
    return (v16f){_mm256_set1_ps(x), _mm256_set1_ps(x)};
}
V16_FN v16f v16_load(const float *p)
{
    return (v16f){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}
V16_FN void v16_store(float *p, v16f x)
{
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
V16_FN v16f v16_fma(v16f x, v16f y, v16f z)
{
    return (v16f){_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
V16_FN v16_mask v16_bits_of(__m256 a, __m256 b)
{
    return (v16_mask)_mm256_movemask_ps(a) | (v16_mask)_mm256_movemask_ps(b) << 8;
}
V16_FN v16_mask v16_gt(v16f x, v16f y)
{
    return v16_bits_of(_mm256_cmp_ps(x.a, y.a, _CMP_GT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_GT_OQ));
}
V16_FN __m256 v16_half_mask(v16_mask m)
{
    __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    __m256i kept = _mm256_and_si256(_mm256_set1_epi32((int)(m & 0xff)), lane);
    return _mm256_castsi256_ps(_mm256_cmpeq_epi32(kept, lane));
}
V16_FN v16f v16_pick(v16_mask m, v16f x, v16f y)
{
    return (v16f){_mm256_blendv_ps(y.a, x.a, v16_half_mask(m)),
                  _mm256_blendv_ps(y.b, x.b, v16_half_mask(m >> 8))};
}
V16_FN v16i v16_to_int(v16f x)
{
    return (v16i){_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)};
}
V16_FN v16f v16_from_int(v16i x)
{
    return (v16f){_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)};
}
V16_FN v16i v16_bits(v16f x)
{
    return (v16i){_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)};
}
V16_FN v16f v16_of_bits(v16i x)
{
    return (v16f){_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)};
}
V16_FN v16i v16i_set1(int32_t x)
{
    return (v16i){_mm256_set1_epi32(x), _mm256_set1_epi32(x)};
}
V16_FN v16i v16i_load(const void *p)
{
    const __m256i *q = p;
    return (v16i){_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
V16_FN v16i v16i_load_halves(const void *p, const void *q)
{
    return (v16i){_mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)q)};
}
V16_FN void v16i_store(void *p, v16i x)
{
    __m256i *q = p;
    _mm256_storeu_si256(q, x.a);
    _mm256_storeu_si256(q + 1, x.b);
}
V16_FN v16_mask v16i_gt(v16i x, v16i y)
{
    return v16_bits_of(_mm256_castsi256_ps(_mm256_cmpgt_epi32(x.a, y.a)),
                       _mm256_castsi256_ps(_mm256_cmpgt_epi32(x.b, y.b)));
}
V16_FN v16i v16i_count_gt(v16i n, v16i x, v16i y)
{
    return (v16i){_mm256_sub_epi32(n.a, _mm256_cmpgt_epi32(x.a, y.a)),
                  _mm256_sub_epi32(n.b, _mm256_cmpgt_epi32(x.b, y.b))};
}
V16_FN v16_mask v16i_eq(v16i x, v16i y)
{
    return v16_bits_of(_mm256_castsi256_ps(_mm256_cmpeq_epi32(x.a, y.a)),
                       _mm256_castsi256_ps(_mm256_cmpeq_epi32(x.b, y.b)));
}
V16_FN void v16i_store_u16(void *p, v16i x)
{
    __m256i low = _mm256_set1_epi32(0xffff);
    __m256i all = _mm256_packus_epi32(_mm256_and_si256(x.a, low), _mm256_and_si256(x.b, low));
    _mm256_storeu_si256((__m256i *)p, _mm256_permute4x64_epi64(all, 0xd8));
}
V16_FN v16i v16i_dot4(v16i sum, const v16i *u, const int8_t *w, const uint32_t n)
{
    __m256i a = _mm256_setzero_si256(), b = a, one = _mm256_set1_epi16(1);
    V16_UNROLL for (uint32_t i = 0; i < n; i++)
    {
        int32_t four;
        memcpy(&four, w + (size_t)i * 4, sizeof four);
        a = _mm256_add_epi16(a, _mm256_maddubs_epi16(u[i].a, _mm256_set1_epi32(four)));
        b = _mm256_add_epi16(b, _mm256_maddubs_epi16(u[i].b, _mm256_set1_epi32(four)));
    }
    return (v16i){_mm256_add_epi32(sum.a, _mm256_madd_epi16(a, one)),
                  _mm256_add_epi32(sum.b, _mm256_madd_epi16(b, one))};
}
V16_FN v16i v16i_load_u16(const void *p)
{
    const __m128i *q = p;
    return (v16i){_mm256_cvtepu16_epi32(_mm_loadu_si128(q)),
                  _mm256_cvtepu16_epi32(_mm_loadu_si128(q + 1))};
}

#else

typedef struct {
    float x[V16];
} v16f;
typedef struct {
    int32_t x[V16];
} v16i;

#define V16_EACH(type, expr)          \
    do {                              \
        type r_;                      \
        for (int i = 0; i < V16; i++) \
            r_.x[i] = (expr);         \
        return r_;                    \
    } while (0)
#define V16_F2(name, expr)           \
    V16_FN v16f name(v16f a, v16f b) \
    {                                \
        V16_EACH(v16f, expr);        \
    }
#define V16_I2(name, expr)           \
    V16_FN v16i name(v16i a, v16i b) \
    {                                \
        V16_EACH(v16i, expr);        \
    }
#define V16_IS(name, expr)          \
    V16_FN v16i name(v16i a, int n) \
    {                               \
        V16_EACH(v16i, expr);       \
    }
V16_F2(v16_add, a.x[i] + b.x[i])
V16_F2(v16_sub, a.x[i] - b.x[i])
V16_F2(v16_mul, a.x[i] * b.x[i])
V16_F2(v16_div, a.x[i] / b.x[i])
V16_F2(v16_max, a.x[i] > b.x[i] ? a.x[i] : b.x[i])
V16_F2(v16_min, a.x[i] < b.x[i] ? a.x[i] : b.x[i])
V16_I2(v16i_add, (int32_t)((uint32_t)a.x[i] + (uint32_t)b.x[i]))
V16_I2(v16i_sub, (int32_t)((uint32_t)a.x[i] - (uint32_t)b.x[i]))
V16_I2(v16i_and, a.x[i] & b.x[i])
V16_I2(v16i_xor, a.x[i] ^ b.x[i])
V16_I2(v16i_or, a.x[i] | b.x[i])
V16_IS(v16i_shl, (int32_t)((uint32_t)a.x[i] << n))
/* as shifts of negative numbers are up to the compiler */
V16_IS(v16i_sar, (int32_t)(a.x[i] < 0 ? ~(~(uint32_t)a.x[i] >> n) : (uint32_t)a.x[i] >> n))
V16_IS(v16i_shr, (int32_t)((uint32_t)a.x[i] >> n))

V16_FN v16f v16_set1(float x)
{
    V16_EACH(v16f, x);
}
V16_FN v16f v16_sqrt(v16f a)
{
    V16_EACH(v16f, sqrtf(a.x[i]));
}
V16_FN v16f v16_load(const float *p)
{
    V16_EACH(v16f, p[i]);
}
V16_FN void v16_store(float *p, v16f a)
{
    memcpy(p, a.x, sizeof a.x);
}
V16_FN v16f v16_fma(v16f a, v16f b, v16f c)
{
    V16_EACH(v16f, fmaf(a.x[i], b.x[i], c.x[i]));
}
V16_FN v16_mask v16_gt(v16f a, v16f b)
{
    v16_mask m = 0;
    for (int i = 0; i < V16; i++)
        m |= (v16_mask)(a.x[i] > b.x[i]) << i;
    return m;
}
V16_FN v16f v16_pick(v16_mask m, v16f a, v16f b)
{
    V16_EACH(v16f, m >> i & 1 ? a.x[i] : b.x[i]);
}
/* Out of range gives what x86 gives; no result depends on it. */
V16_FN v16i v16_to_int(v16f a)
{
    V16_EACH(v16i, fabsf(a.x[i]) < 2147483648.0f ? (int32_t)lrintf(a.x[i]) : INT32_MIN);
}
V16_FN v16f v16_from_int(v16i a)
{
    V16_EACH(v16f, (float)a.x[i]);
}
V16_FN v16i v16_bits(v16f a)
{
    v16i r;
    memcpy(&r, &a, sizeof r);
    return r;
}
V16_FN v16f v16_of_bits(v16i a)
{
    v16f r;
    memcpy(&r, &a, sizeof r);
    return r;
}
V16_FN v16i v16i_set1(int32_t x)
{
    V16_EACH(v16i, x);
}
V16_FN v16i v16i_load(const void *p)
{
    v16i r;
    memcpy(&r, p, sizeof r);
    return r;
}
V16_FN v16i v16i_load_halves(const void *p, const void *q)
{
    v16i r;
    memcpy(r.x, p, sizeof r / 2);
    memcpy(r.x + V16 / 2, q, sizeof r / 2);
    return r;
}
V16_FN void v16i_store(void *p, v16i a)
{
    memcpy(p, &a, sizeof a);
}
V16_FN v16_mask v16i_gt(v16i a, v16i b)
{
    v16_mask m = 0;
    for (int i = 0; i < V16; i++)
        m |= (v16_mask)(a.x[i] > b.x[i]) << i;
    return m;
}
V16_FN v16i v16i_count_gt(v16i n, v16i a, v16i b)
{
    V16_EACH(v16i, n.x[i] + (a.x[i] > b.x[i]));
}
V16_FN v16_mask v16i_eq(v16i a, v16i b)
{
    v16_mask m = 0;
    for (int i = 0; i < V16; i++)
        m |= (v16_mask)(a.x[i] == b.x[i]) << i;
    return m;
}
V16_FN void v16i_store_u16(void *p, v16i a)
{
    uint16_t *q = p;
    for (int i = 0; i < V16; i++)
        q[i] = (uint16_t)a.x[i];
}
V16_FN v16i v16i_dot4(v16i sum, const v16i *u, const int8_t *w, const uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t l = 0; l < V16; l++)
            for (uint32_t b = 0; b < 4; b++)
                sum.x[l] += (int32_t)((uint32_t)u[i].x[l] >> 8 * b & 0xff) * w[i * 4 + b];
    return sum;
}
V16_FN v16i v16i_load_u16(const void *p)
{
    const uint16_t *q = p;
    V16_EACH(v16i, q[i]);
}

#endif

/* Stores the chosen lanes densely. Writes up to 16 numbers. */
V16_FN void v16i_compress(void *p, v16_mask m, v16i a)
{
    int32_t x[V16], *out = p;
    v16i_store(x, a);
    for (; m != 0; m &= m - 1)
        *out++ = x[__builtin_ctz(m)];
}

V16_FN float v16_hsum(v16f a)
{
    float x[V16];
    v16_store(x, a);
    for (int n = V16 / 2; n > 0; n /= 2)
        for (int i = 0; i < n; i++)
            x[i] += x[i + n];
    return x[0];
}

V16_FN float v16_hmax(v16f a)
{
    float x[V16];
    v16_store(x, a);
    for (int n = V16 / 2; n > 0; n /= 2)
        for (int i = 0; i < n; i++)
            x[i] = x[i] > x[i + n] ? x[i] : x[i + n];
    return x[0];
}

/* Lane i: v16_hsum(a[i]). */
V16_FN v16f v16_hsums(const v16f *a)
{
    float x[V16];
    for (int i = 0; i < V16; i++)
        x[i] = v16_hsum(a[i]);
    return v16_load(x);
}

#endif

V16_FN v16f v16_zero(void)
{
    return v16_set1(0.0f);
}

/* Sum of the lanes; exact. */
V16_FN uint32_t v16i_total(v16i a)
{
    uint32_t x[V16], sum = 0;
    v16i_store(x, a);
    V16_UNROLL for (int i = 0; i < V16; i++) sum += x[i];
    return sum;
}

/* 16 numbers of bf16. */
V16_FN v16f v16_load_bf16(const void *p)
{
    return v16_of_bits(v16i_shl(v16i_load_u16(p), 16));
}

/* 16 pairs of a page's numbers, 8 at p and 8 at q if those are apart: lanes for v16_first_of. */
V16_FN v16i v16i_load_pairs(const uint8_t *p, const uint8_t *q, bool apart, bool fp8)
{
    uint8_t both[32];
    if (!fp8)
        return apart ? v16i_load_halves(p, q) : v16i_load(p);
    memcpy(both, p, 16);
    memcpy(both + 16, apart ? q : p + 16, 16);
    return v16i_load_u16(both);
}

/* First and second number of 16 pairs of bf16. */
V16_FN v16f v16_first(v16i pairs)
{
    return v16_of_bits(v16i_shl(pairs, 16));
}
V16_FN v16f v16_second(v16i pairs)
{
    return v16_of_bits(v16i_and(pairs, v16i_set1(-0x10000)));
}

/* 16 numbers of e4m3, a byte each, in the lanes. */
V16_FN v16f v16_e4m3(v16i bytes)
{
    v16i mag = v16i_and(bytes, v16i_set1(0x7f)), sign = v16i_and(bytes, v16i_set1(0x80));
    v16f x = v16_of_bits(v16i_add(v16i_shl(mag, 20), v16i_set1(120 << 23)));
    v16f small = v16_mul(v16_from_int(mag), v16_set1(0x1p-9f));
    x = v16_pick(v16i_gt(v16i_set1(8), mag), small, x);
    x = v16_pick(v16i_eq(mag, v16i_set1(0x7f)), v16_set1(NAN), x);
    return v16_of_bits(v16i_or(v16_bits(x), v16i_shl(sign, 24)));
}

/* First and second number of 16 pairs, as loaded. */
V16_FN v16f v16_first_of(v16i pairs, bool fp8)
{
    return fp8 ? v16_e4m3(v16i_and(pairs, v16i_set1(0xff))) : v16_first(pairs);
}
V16_FN v16f v16_second_of(v16i pairs, bool fp8)
{
    return fp8 ? v16_e4m3(v16i_shr(pairs, 8)) : v16_second(pairs);
}

V16_FN v16_mask v16_first_lanes(uint32_t n)
{
    return n >= V16 ? 0xffffu : (1u << n) - 1;
}

/* e^x, within 2 ulp for x in [-87, 88]; 0 below, e^88 above (nothing here asks for more). NaN gives
 * some number. Cephes' expf. */
V16_FN v16f v16_exp(v16f x)
{
    v16_mask tiny = v16_gt(v16_set1(-87.0f), x);
    x = v16_min(v16_max(x, v16_set1(-87.0f)), v16_set1(88.0f));
    v16i n = v16_to_int(v16_mul(x, v16_set1(1.44269504f)));
    v16f f = v16_from_int(n);
    x = v16_fma(f, v16_set1(-0.693359375f), x);
    x = v16_fma(f, v16_set1(2.12194440e-4f), x);
    v16f y = v16_set1(1.9875691500e-4f);
    y = v16_fma(y, x, v16_set1(1.3981999507e-3f));
    y = v16_fma(y, x, v16_set1(8.3334519073e-3f));
    y = v16_fma(y, x, v16_set1(4.1665795894e-2f));
    y = v16_fma(y, x, v16_set1(1.6666665459e-1f));
    y = v16_fma(y, x, v16_set1(5.0000001201e-1f));
    y = v16_fma(v16_mul(x, x), y, v16_add(x, v16_set1(1.0f)));
    y = v16_mul(y, v16_of_bits(v16i_shl(v16i_add(n, v16i_set1(127)), 23)));
    return v16_pick(tiny, v16_zero(), y);
}

/* ln x for normal x > 0, within 2 ulp. Cephes' logf. */
V16_FN v16f v16_log(v16f x)
{
    v16i bits = v16_bits(x), e = v16i_sar(v16i_sub(bits, v16i_set1(0x3f3504f3)), 23);
    v16f f = v16_sub(v16_of_bits(v16i_sub(bits, v16i_shl(e, 23))), v16_set1(1.0f));
    v16f n = v16_from_int(e), z = v16_mul(f, f), y = v16_set1(7.0376836292e-2f);
    y = v16_fma(y, f, v16_set1(-1.1514610310e-1f));
    y = v16_fma(y, f, v16_set1(1.1676998740e-1f));
    y = v16_fma(y, f, v16_set1(-1.2420140846e-1f));
    y = v16_fma(y, f, v16_set1(1.4249322787e-1f));
    y = v16_fma(y, f, v16_set1(-1.6668057665e-1f));
    y = v16_fma(y, f, v16_set1(2.0000714765e-1f));
    y = v16_fma(y, f, v16_set1(-2.4999993993e-1f));
    y = v16_fma(y, f, v16_set1(3.3333331174e-1f));
    y = v16_mul(v16_mul(y, f), z);
    y = v16_fma(n, v16_set1(-2.12194440e-4f), y);
    y = v16_fma(z, v16_set1(-0.5f), y);
    return v16_fma(n, v16_set1(0.693359375f), v16_add(f, y));
}

/* 2^x for x in [-100, 100], within 2 ulp; x below gives 2^-100: a product with it is still normal, and
 * those are fast. NaN gives 2^-100. */
V16_FN v16f v16_exp2(v16f x)
{
    x = v16_max(x, v16_set1(-100.0f));
    v16i n = v16_to_int(x);
    v16f f = v16_sub(x, v16_from_int(n)), y = v16_set1(1.535336188319500e-4f);
    y = v16_fma(y, f, v16_set1(1.339887440266574e-3f));
    y = v16_fma(y, f, v16_set1(9.618437357674640e-3f));
    y = v16_fma(y, f, v16_set1(5.550332471162809e-2f));
    y = v16_fma(y, f, v16_set1(2.402264791363012e-1f));
    y = v16_fma(y, f, v16_set1(6.931472028550421e-1f));
    y = v16_fma(y, f, v16_set1(1.0f));
    return v16_of_bits(v16i_add(v16_bits(y), v16i_shl(n, 23)));
}

/* ln(1 + x) for x in [0, 1], within 1e-6: degree 6 through the Chebyshev nodes of ln(1 + x) / x. */
V16_FN v16f v16_log1p(v16f x)
{
    v16f y = v16_set1(1.387448451e-02f);
    y = v16_fma(y, x, v16_set1(-6.559030637e-02f));
    y = v16_fma(y, x, v16_set1(1.482941343e-01f));
    y = v16_fma(y, x, v16_set1(-2.345452005e-01f));
    y = v16_fma(y, x, v16_set1(3.309752582e-01f));
    y = v16_fma(y, x, v16_set1(-4.998589943e-01f));
    y = v16_fma(y, x, v16_set1(9.999985737e-01f));
    return v16_mul(y, x);
}

#endif
