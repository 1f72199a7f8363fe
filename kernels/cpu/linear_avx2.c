/* AVX2 kernels: the same tiles, 8 rows a register, sums of a token block kept in memory (L1).
 *
 * What one call does: 16 output rows times n tokens. Bound by vpmaddubsw on two ports: 32 per tile and
 * token, a quarter of what AVX-512 VNNI does per cycle. Its 16-bit sums saturate, so: nibbles times
 * a plane, 15 * 127 * 2 * 8 = 30480, may be added up over a whole tile; bytes are split into sign
 * and size, 128 * 127 * 2 = 32512, and widened at once. */
#include "kernels/cpu/linear.h"

#include <immintrin.h>
#include <math.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

enum { LANES = 8 };

INLINE __m256 halves_at(const void *p)
{
    return _mm256_cvtph_ps(_mm_loadu_si128(p));
}

INLINE __m256i bytes_at(const void *p)
{
    return _mm256_loadu_si256(p);
}

/* A tile as 8 x 64 bytes; bytes become signed. */
INLINE void load_tile(bool nibbles, const uint8_t *values, uint8_t *w)
{
    const __m256i low = _mm256_set1_epi8(15), sign = _mm256_set1_epi8(-128);
    for (ptrdiff_t i = 0; i < (nibbles ? 256 : 512); i += 32) {
        __m256i v = bytes_at(values + i);
        if (nibbles) {
            __m256i high = _mm256_and_si256(_mm256_srli_epi16(v, 4), low);
            _mm256_storeu_si256((void *)(w + i), _mm256_and_si256(v, low));
            _mm256_storeu_si256((void *)(w + 256 + i), high);
        } else {
            _mm256_storeu_si256((void *)(w + i), _mm256_xor_si256(v, sign));
        }
    }
}

/* Sum over registers g0 .. g1 of one plane for 8 rows. */
INLINE __m256i plane_dot(bool nibbles, const uint8_t *w, const int8_t *q, int g0, int g1)
{
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i sum = _mm256_setzero_si256();
    for (ptrdiff_t g = g0; g < g1; g++) {
        int32_t four;
        memcpy(&four, q + 4 * g, sizeof four);
        __m256i x = _mm256_set1_epi32(four), v = bytes_at(w + 64 * g);
        if (nibbles) {
            sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(v, x));
        } else {
            __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(v), _mm256_sign_epi8(x, v));
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, ones));
        }
    }
    return nibbles ? _mm256_madd_epi16(sum, ones) : sum;
}

INLINE __m256 planes_dot(bool nibbles, const uint8_t *w, const int8_t *q, float d, int g0, int g1)
{
    __m256i hi = plane_dot(nibbles, w, q, g0, g1);
    __m256i lo = plane_dot(nibbles, w, q + TILE_COLS, g0, g1);
    __m256i sum = _mm256_add_epi32(_mm256_slli_epi32(hi, 7), lo);
    return _mm256_mul_ps(_mm256_cvtepi32_ps(sum), _mm256_set1_ps(d));
}

/* One tile, one token, rows 8 half .. 8 half + 7, added to y. */
INLINE void add_tile(enum tile_form form, const uint8_t *scales, const uint8_t *w, int half,
                     const int8_t *q, const struct act_scale *sc, float *y)
{
    const bool nibbles = form == TILE_Q4 || form == TILE_Q4_WIDE;
    const bool wide = form == TILE_Q4_WIDE || form == TILE_Q8_HALF;
    const ptrdiff_t lane = (ptrdiff_t)half * LANES;
    __m256 acc = _mm256_loadu_ps(y + lane), m = _mm256_setzero_ps();
    __m256 d = wide ? _mm256_loadu_ps((const float *)(const void *)scales + lane)
                    : halves_at(scales + 2 * lane);
    if (form != TILE_Q8)
        m = wide ? _mm256_loadu_ps((const float *)(const void *)scales + 16 + lane)
                 : halves_at(scales + 32 + 2 * lane);
    w += 4 * lane;
    if (form == TILE_Q8_HALF) { /* m: the scales of the second half */
        acc = _mm256_fmadd_ps(planes_dot(nibbles, w, q, sc->d, 0, 4), d, acc);
        acc = _mm256_fmadd_ps(planes_dot(nibbles, w, q, sc->d, 4, 8), m, acc);
    } else {
        if (form != TILE_Q8)
            acc = _mm256_fmadd_ps(m, _mm256_set1_ps(sc->sum), acc);
        acc = _mm256_fmadd_ps(planes_dot(nibbles, w, q, sc->d, 0, 8), d, acc);
    }
    _mm256_storeu_ps(y + lane, acc);
}

INLINE void dot_int(enum tile_form form, int value_bytes, int scale_bytes, const uint8_t *group,
                    uint32_t n_blocks, const struct act_block *a, out_tile y)
{
    const bool apart = form == TILE_Q8;
    const int scale_step = apart ? scale_bytes : scale_bytes + value_bytes;
    const int value_step = apart ? value_bytes : scale_bytes + value_bytes;
    const uint8_t *scales = apart ? group + (size_t)n_blocks * (size_t)value_bytes : group;
    const uint8_t *values = apart ? group : group + scale_bytes;
    const int8_t *q = a->q;
    const struct act_scale *sc = a->sc;
    _Alignas(32) uint8_t w[512];
    memset(y, 0, sizeof(out_tile));
    for (uint32_t b = 0; b < n_blocks; b++, scales += scale_step, values += value_step) {
        load_tile(value_bytes == 256, values, w);
        for (uint32_t t = 0; t < a->n; t++, q += 64, sc++) {
            add_tile(form, scales, w, 0, q, sc, y[t]);
            add_tile(form, scales, w, 1, q, sc, y[t]);
        }
    }
}

INLINE __m256 float_weights(enum tile_form form, const uint8_t *p)
{
    if (form == TILE_F32)
        return _mm256_loadu_ps((const float *)(const void *)p);
    if (form == TILE_F16)
        return halves_at(p);
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)p)), 16));
}

/* Even and odd inputs apart, so that one token has four chains. */
INLINE void dot_float(enum tile_form form, const uint8_t *group, uint32_t n_blocks,
                      const struct act_block *a, out_tile y)
{
    const ptrdiff_t bytes = form == TILE_F32 ? 4 : 2, step = TILE_ROWS * bytes;
    for (uint32_t t = 0; t < a->n; t++) {
        __m256 s0 = _mm256_setzero_ps(), s1 = s0, s2 = s0, s3 = s0;
        const uint8_t *w = group;
        for (uint32_t b = 0; b < n_blocks; b++) {
            const float *x = a->x + ((size_t)b * a->n + t) * TILE_COLS;
            for (ptrdiff_t k = 0; k < TILE_COLS; k += 2, w += 2 * step) {
                __m256 even = _mm256_set1_ps(x[k]), odd = _mm256_set1_ps(x[k + 1]);
                s0 = _mm256_fmadd_ps(float_weights(form, w), even, s0);
                s1 = _mm256_fmadd_ps(float_weights(form, w + LANES * bytes), even, s1);
                s2 = _mm256_fmadd_ps(float_weights(form, w + step), odd, s2);
                s3 = _mm256_fmadd_ps(float_weights(form, w + step + LANES * bytes), odd, s3);
            }
        }
        _mm256_storeu_ps(y[t], _mm256_add_ps(s0, s2));
        _mm256_storeu_ps(y[t] + LANES, _mm256_add_ps(s1, s3));
    }
}

#define DOT_INT(form)                                                                          \
    static void dot_##form(const uint8_t *group, uint32_t n_blocks, const struct act_block *a, \
                           out_tile y)                                                         \
    {                                                                                          \
        dot_int(form, form##_VALUES, form##_SCALES, group, n_blocks, a, y);                    \
    }
#define DOT_FLOAT(form)                                                                        \
    static void dot_##form(const uint8_t *group, uint32_t n_blocks, const struct act_block *a, \
                           out_tile y)                                                         \
    {                                                                                          \
        dot_float(form, group, n_blocks, a, y);                                                \
    }
DOT_INT(TILE_Q4)
DOT_INT(TILE_Q4_WIDE)
DOT_INT(TILE_Q8)
DOT_INT(TILE_Q8_MIN)
DOT_INT(TILE_Q8_HALF)
DOT_FLOAT(TILE_F16)
DOT_FLOAT(TILE_BF16)
DOT_FLOAT(TILE_F32)

/* Lanes i with first + i < n. */
INLINE __m256i lanes_below(uint32_t first, uint32_t n)
{
    const __m256i iota = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)(n - first)), iota);
}

INLINE float reduce_add(__m256 v)
{
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

/* Four sums of squares by position, joined in a fixed order. */
static void norm(const float *x, const float *gain, float eps, uint32_t n, float *y)
{
    __m256 sum[4];
    for (ptrdiff_t i = 0; i < 4; i++)
        sum[i] = _mm256_setzero_ps();
    for (uint32_t i = 0; i < n; i += LANES) {
        __m256 v = _mm256_maskload_ps(x + i, lanes_below(i, n));
        sum[i / LANES & 3] = _mm256_fmadd_ps(v, v, sum[i / LANES & 3]);
    }
    float mean =
        reduce_add(_mm256_add_ps(_mm256_add_ps(sum[0], sum[1]), _mm256_add_ps(sum[2], sum[3]))) /
        (float)n;
    __m256 scale = _mm256_set1_ps(1.0f / sqrtf(mean + eps));
    for (uint32_t i = 0; i < n; i += LANES) {
        __m256i lanes = lanes_below(i, n);
        __m256 v = _mm256_mul_ps(_mm256_maskload_ps(x + i, lanes), scale);
        _mm256_maskstore_ps(y + i, lanes, _mm256_mul_ps(v, _mm256_maskload_ps(gain + i, lanes)));
    }
}

/* 16 numbers into both planes; their sum. */
INLINE int32_t put_planes(const float *x, __m256 inverse, int8_t *q)
{
    __m256i hi[2], lo[2], sum = _mm256_setzero_si256();
    for (ptrdiff_t i = 0; i < 2; i++) {
        __m256i v = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + LANES * i), inverse));
        hi[i] = _mm256_srai_epi32(_mm256_add_epi32(v, _mm256_set1_epi32(64)), 7);
        lo[i] = _mm256_sub_epi32(v, _mm256_slli_epi32(hi[i], 7));
        sum = _mm256_add_epi32(sum, v);
    }
    __m256i hi16 = _mm256_permute4x64_epi64(_mm256_packs_epi32(hi[0], hi[1]), 0xd8);
    __m256i lo16 = _mm256_permute4x64_epi64(_mm256_packs_epi32(lo[0], lo[1]), 0xd8);
    __m256i both = _mm256_permute4x64_epi64(_mm256_packs_epi16(hi16, lo16), 0xd8);
    _mm_storeu_si128((void *)q, _mm256_castsi256_si128(both));
    _mm_storeu_si128((void *)(q + TILE_COLS), _mm256_extracti128_si256(both, 1));
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}

/* The bits of |x| order floats as integers, infinity and NaN last: one maximum finds both. */
INLINE int32_t max_magnitude(const float *x)
{
    __m256i max = _mm256_setzero_si256();
    for (ptrdiff_t i = 0; i < TILE_COLS; i += LANES)
        max =
            _mm256_max_epi32(max, _mm256_and_si256(bytes_at(x + i), _mm256_set1_epi32(0x7fffffff)));
    __m128i m = _mm_max_epi32(_mm256_castsi256_si128(max), _mm256_extracti128_si256(max, 1));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1)));
}

static void quantize(const float *x, uint32_t n_blocks, uint32_t step, int8_t *q,
                     struct act_scale *sc)
{
    for (uint32_t b = 0; b < n_blocks; b++, x += TILE_COLS, q += 64 * (size_t)step, sc += step) {
        union {
            int32_t i;
            float f;
        } max = {max_magnitude(x)};
        bool finite = max.i < 0x7f800000;
        if (!finite || max.f < 1e-30f) { /* ACT_MAX / max would overflow */
            memset(q, 0, 2 * (size_t)TILE_COLS);
            *sc = (struct act_scale){.d = finite ? 0 : NAN, .sum = finite ? 0 : NAN};
            continue;
        }
        __m256 inverse = _mm256_set1_ps((float)ACT_MAX / max.f);
        int32_t half = put_planes(x, inverse, q);
        int32_t sum = half + put_planes(x + 16, inverse, q + 16);
        sc->d = max.f * (1.0f / (float)ACT_MAX);
        sc->sum = sc->d * (float)sum;
        sc->neg_sum = -sum;
        sc->neg_sum_half = -half;
    }
}

/* e^x to about 1 ulp for |x| <= 87.3; beyond, the value there. NaN stays NaN. */
INLINE __m256 exp_ps(__m256 x)
{
    x = _mm256_min_ps(_mm256_set1_ps(87.3f), _mm256_max_ps(_mm256_set1_ps(-87.3f), x));
    __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)), 8);
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
    __m256 p = _mm256_set1_ps(1.9875691500e-4f); /* Cephes' expf */
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.3981999507e-3f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(8.3334519073e-3f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(4.1665795894e-2f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.6666665459e-1f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(5.0000001201e-1f));
    p = _mm256_fmadd_ps(p, _mm256_mul_ps(r, r), _mm256_add_ps(r, _mm256_set1_ps(1.0f)));
    __m256i power =
        _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(p, _mm256_castsi256_ps(power));
}

static void store(const struct out_args *a, out_tile y, out_tile up)
{
    for (uint32_t t = 0; t < a->n; t++) {
        for (uint32_t r = 0; r < a->n_rows; r += LANES) {
            float *out = a->out + t * a->stride + r;
            __m256i lanes = lanes_below(r, a->n_rows);
            __m256 v = _mm256_loadu_ps(y[t] + r);
            if (a->mode == LINEAR_ADD) {
                v = _mm256_add_ps(_mm256_maskload_ps(out, lanes), v);
            } else if (a->mode == LINEAR_SWIGLU) {
                __m256 e = exp_ps(_mm256_sub_ps(_mm256_setzero_ps(), v));
                v = _mm256_div_ps(v, _mm256_add_ps(e, _mm256_set1_ps(1.0f)));
                v = _mm256_mul_ps(v, _mm256_loadu_ps(up[t] + r));
            }
            _mm256_maskstore_ps(out, lanes, v);
        }
    }
}

const struct linear_kernels linear_avx2 = {
    .dot =
        {
            [TILE_Q4] = dot_TILE_Q4,
            [TILE_Q4_WIDE] = dot_TILE_Q4_WIDE,
            [TILE_Q8] = dot_TILE_Q8,
            [TILE_Q8_MIN] = dot_TILE_Q8_MIN,
            [TILE_Q8_HALF] = dot_TILE_Q8_HALF,
            [TILE_F16] = dot_TILE_F16,
            [TILE_BF16] = dot_TILE_BF16,
            [TILE_F32] = dot_TILE_F32,
        },
    .norm = norm,
    .quantize = quantize,
    .store = store,
};
