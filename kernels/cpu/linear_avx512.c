/* AVX-512 VNNI kernels. One function per tile form and token count, made from one inlined body, so
 * that accumulators and the unpacked tile stay in registers: 12 sums, 8 of weights, 2 x 6 integer
 * sums; scales come from memory where 32 registers end.
 *
 * What one call does: 16 output rows times n tokens, over all inputs. Bound for n >= 4 by the two
 * vector ports: 16 vpdpbusd + shift + add + convert + multiply + 2 fma = 22 per tile and token, 11
 * cycles, plus 16 per tile for unpacking (measured: 11.2 to 12.5, and 10.2 to 10.7 for the 8-bit head); for
 * n = 1 by memory. Broadcast operands come with the loads and are free. Assumes 64-byte aligned
 * groups. */
#include "kernels/cpu/linear.h"

#include <immintrin.h>
#include <math.h>

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

enum { CHAIN = 6 }; /* tokens whose integer sums grow together; more would spill registers */

INLINE __m512i bytes_at(const void *p)
{
    return _mm512_load_si512(p);
}

INLINE __m512 halves_at(const void *p)
{
    return _mm512_cvtph_ps(_mm256_load_si256(p));
}

/* The 8 registers of a tile: inputs 4 g .. 4 g + 3 of 16 rows. */
INLINE void load_tile(enum tile_form form, const uint8_t *values, __m512i w[8])
{
    if (form == TILE_Q4 || form == TILE_Q4_WIDE) {
        const __m512i nibble = _mm512_set1_epi8(15);
        UNROLL for (ptrdiff_t g = 0; g < 4; g++)
        {
            __m512i v = bytes_at(values + 64 * g);
            w[g] = _mm512_and_si512(v, nibble);
            w[g + 4] = _mm512_and_si512(_mm512_srli_epi16(v, 4), nibble);
        }
        return;
    }
    UNROLL for (ptrdiff_t g = 0; g < 8; g++) w[g] = bytes_at(values + 64 * g);
}

/* sum + 16 rows times inputs 4 g .. 4 g + 3 of a plane. As assembly, because the compiler loads the
 * broadcast apart, and twice the instructions fill the scheduler before the ports. */
INLINE __m512i dot4(__m512i sum, __m512i w, const int8_t *q, ptrdiff_t g)
{
    __asm__("vpdpbusd %2%{1to16%}, %1, %0"
            : "+v"(sum)
            : "v"(w), "m"(((const int32_t *)(const void *)q)[g]));
    return sum;
}

/* Integer sums of `n` tokens over registers g0 .. g1: 128 times the hi plane, plus the lo plane. The
 * planes grow apart and are joined at the end: 2 n chains instead of n hide the latency of 5 cycles,
 * which is worth the extra addition (measured for 12 tokens: 11.5 cycles a tile and token, not 14). */
INLINE void add_planes(const __m512i w[8], const int8_t *q, ptrdiff_t n, ptrdiff_t g0, ptrdiff_t g1,
                       __m512i *sum)
{
    __m512i lo[CHAIN];
    UNROLL for (ptrdiff_t t = 0; t < n; t++) lo[t] = _mm512_setzero_si512();
    UNROLL for (ptrdiff_t g = g0; g < g1; g++) UNROLL for (ptrdiff_t t = 0; t < n; t++)
    {
        sum[t] = dot4(sum[t], w[g], q + 64 * t, g);
        lo[t] = dot4(lo[t], w[g], q + 64 * t, 8 + g);
    }
    UNROLL for (ptrdiff_t t = 0; t < n; t++) sum[t] =
        _mm512_add_epi32(_mm512_slli_epi32(sum[t], 7), lo[t]);
}

INLINE __m512 scaled(__m512i sum, const struct act_scale *sc, __m512 d, __m512 acc)
{
    __m512 v = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(sc->d));
    return _mm512_fmadd_ps(v, d, acc);
}

/* One tile for n <= CHAIN tokens. */
INLINE void add_tile(enum tile_form form, const __m512i w[8], __m512 d, __m512 m, const int8_t *q,
                     const struct act_scale *sc, int n, __m512 *acc)
{
    __m512i sum[CHAIN];
    bool offset = form != TILE_Q4 && form != TILE_Q4_WIDE;
    if (form == TILE_Q8_HALF) { /* m: the scales of the second half */
        UNROLL for (ptrdiff_t t = 0; t < n; t++) sum[t] = _mm512_set1_epi32(sc[t].neg_sum_half);
        add_planes(w, q, n, 0, 4, sum);
        UNROLL for (ptrdiff_t t = 0; t < n; t++) acc[t] = scaled(sum[t], &sc[t], d, acc[t]);
        UNROLL for (ptrdiff_t t = 0; t < n; t++) sum[t] =
            _mm512_set1_epi32(sc[t].neg_sum - sc[t].neg_sum_half);
        add_planes(w, q, n, 4, 8, sum);
        UNROLL for (ptrdiff_t t = 0; t < n; t++) acc[t] = scaled(sum[t], &sc[t], m, acc[t]);
        return;
    }
    UNROLL for (ptrdiff_t t = 0; t < n; t++) sum[t] =
        offset ? _mm512_set1_epi32(sc[t].neg_sum) : _mm512_setzero_si512();
    add_planes(w, q, n, 0, 8, sum);
    if (form != TILE_Q8)
        UNROLL for (ptrdiff_t t = 0; t < n; t++) acc[t] =
            _mm512_fmadd_ps(m, _mm512_set1_ps(sc[t].sum), acc[t]);
    UNROLL for (ptrdiff_t t = 0; t < n; t++) acc[t] = scaled(sum[t], &sc[t], d, acc[t]);
}

INLINE void load_scales(enum tile_form form, const uint8_t *scales, __m512 *d, __m512 *m)
{
    bool wide = form == TILE_Q4_WIDE || form == TILE_Q8_HALF;
    *d = wide ? _mm512_load_ps(scales) : halves_at(scales);
    *m = wide              ? _mm512_load_ps(scales + 64)
         : form == TILE_Q8 ? _mm512_setzero_ps()
                           : halves_at(scales + 32);
}

INLINE void dot_int(enum tile_form form, int value_bytes, int scale_bytes, int n,
                    const uint8_t *group, uint32_t n_blocks, const struct act_block *a, out_tile y)
{
    const bool apart = form == TILE_Q8;
    const int scale_step = apart ? scale_bytes : scale_bytes + value_bytes;
    const int value_step = apart ? value_bytes : scale_bytes + value_bytes;
    const uint8_t *scales = apart ? group + (size_t)n_blocks * (size_t)value_bytes : group;
    const uint8_t *values = apart ? group : group + scale_bytes;
    const uint8_t *next = a->next; /* its TILE_Q8 scales are few: the hardware follows them */
    const int8_t *q = a->q;
    const struct act_scale *sc = a->sc;
    __m512 acc[TOKENS_MAX];
    UNROLL for (ptrdiff_t t = 0; t < n; t++) acc[t] = _mm512_setzero_ps();
    for (uint32_t b = 0; b < n_blocks; b++) {
        __m512i w[8];
        __m512 d, m;
        if (next != NULL) {
            UNROLL for (ptrdiff_t line = 0; line < value_step; line += 64)
                _mm_prefetch(next + line, _MM_HINT_T0);
            next += value_step;
        }
        load_tile(form, values, w);
        load_scales(form, scales, &d, &m);
        const ptrdiff_t first = n <= CHAIN ? n : n / 2;
        add_tile(form, w, d, m, q, sc, (int)first, acc);
        if (n > CHAIN)
            add_tile(form, w, d, m, q + 64 * first, sc + first, n - (int)first, acc + first);
        scales += scale_step;
        values += value_step;
        q += 64 * (ptrdiff_t)n;
        sc += n;
    }
    UNROLL for (ptrdiff_t t = 0; t < n; t++) _mm512_store_ps(y[t], acc[t]);
}

INLINE __m512 float_weights(enum tile_form form, const uint8_t *p)
{
    if (form == TILE_F32)
        return _mm512_load_ps(p);
    if (form == TILE_F16)
        return halves_at(p);
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_load_si256((const void *)p)), 16));
}

/* Even and odd inputs apart: two chains per token, the same for every n. */
INLINE void dot_float(enum tile_form form, int value_bytes, int n, const uint8_t *group,
                      uint32_t n_blocks, const struct act_block *a, out_tile y)
{
    const ptrdiff_t step = value_bytes / TILE_COLS;
    const float *x = a->x;
    __m512 even[TOKENS_MAX], odd[TOKENS_MAX];
    UNROLL for (ptrdiff_t t = 0; t < n; t++) even[t] = odd[t] = _mm512_setzero_ps();
    for (uint32_t b = 0; b < n_blocks; b++, x += (ptrdiff_t)TILE_COLS * n) {
        for (ptrdiff_t k = 0; k < TILE_COLS; k += 2, group += 2 * step) {
            __m512 w0 = float_weights(form, group), w1 = float_weights(form, group + step);
            UNROLL for (ptrdiff_t t = 0; t < n; t++)
            {
                even[t] = _mm512_fmadd_ps(w0, _mm512_set1_ps(x[t * TILE_COLS + k]), even[t]);
                odd[t] = _mm512_fmadd_ps(w1, _mm512_set1_ps(x[t * TILE_COLS + k + 1]), odd[t]);
            }
        }
    }
    UNROLL for (ptrdiff_t t = 0; t < n; t++) _mm512_store_ps(y[t], _mm512_add_ps(even[t], odd[t]));
}

#define ONE_INT(form, n)                                                                   \
    static void dot_##form##_##n(const uint8_t *g, uint32_t nb, const struct act_block *a, \
                                 out_tile y)                                               \
    {                                                                                      \
        dot_int(form, form##_VALUES, form##_SCALES, n, g, nb, a, y);                       \
    }
#define ONE_FLOAT(form, n)                                                                 \
    static void dot_##form##_##n(const uint8_t *g, uint32_t nb, const struct act_block *a, \
                                 out_tile y)                                               \
    {                                                                                      \
        dot_float(form, form##_VALUES, n, g, nb, a, y);                                    \
    }
#define EACH_N(X, form) \
    X(form, 1)          \
    X(form, 2)          \
    X(form, 3)          \
    X(form, 4)          \
    X(form, 5)          \
    X(form, 6) X(form, 7) X(form, 8) X(form, 9) X(form, 10) X(form, 11) X(form, 12)
#define NAME_N(form, n) dot_##form##_##n,
#define FORM(kind, form)                                                                       \
    EACH_N(ONE_##kind, form)                                                                   \
    static void dot_##form(const uint8_t *group, uint32_t n_blocks, const struct act_block *a, \
                           out_tile y)                                                         \
    {                                                                                          \
        static void (*const by_n[])(const uint8_t *, uint32_t, const struct act_block *,       \
                                    out_tile) = {EACH_N(NAME_N, form)};                        \
        by_n[a->n - 1](group, n_blocks, a, y);                                                 \
    }
FORM(INT, TILE_Q4)
FORM(INT, TILE_Q4_WIDE)
FORM(INT, TILE_Q8)
FORM(INT, TILE_Q8_MIN)
FORM(INT, TILE_Q8_HALF)
FORM(FLOAT, TILE_F16)
FORM(FLOAT, TILE_BF16)
FORM(FLOAT, TILE_F32)

INLINE __mmask16 first_lanes(uint32_t n)
{
    return n >= 16 ? 0xffff : (__mmask16)((1u << n) - 1);
}

/* Four sums of squares by position, joined in a fixed order. */
static void norm(const float *x, const float *gain, float eps, uint32_t n, float *y)
{
    __m512 sum[4];
    for (ptrdiff_t i = 0; i < 4; i++)
        sum[i] = _mm512_setzero_ps();
    for (uint32_t i = 0; i < n; i += 16) {
        __m512 v = _mm512_maskz_loadu_ps(first_lanes(n - i), x + i);
        sum[i / 16 & 3] = _mm512_fmadd_ps(v, v, sum[i / 16 & 3]);
    }
    float mean = _mm512_reduce_add_ps(
                     _mm512_add_ps(_mm512_add_ps(sum[0], sum[1]), _mm512_add_ps(sum[2], sum[3]))) /
                 (float)n;
    __m512 scale = _mm512_set1_ps(1.0f / sqrtf(mean + eps));
    for (uint32_t i = 0; i < n; i += 16) {
        __mmask16 lanes = first_lanes(n - i);
        __m512 v = _mm512_mul_ps(_mm512_maskz_loadu_ps(lanes, x + i), scale);
        _mm512_mask_storeu_ps(y + i, lanes,
                              _mm512_mul_ps(v, _mm512_maskz_loadu_ps(lanes, gain + i)));
    }
}

INLINE __m128i fold_max(__m512i v)
{
    __m256i h = _mm256_max_epi32(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1));
    return _mm_max_epi32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
}

INLINE __m128i fold_add(__m512i v)
{
    __m256i h = _mm256_add_epi32(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1));
    return _mm_add_epi32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
}

/* The largest |x| of 4 blocks. The bits of |x| order floats as integers, infinity and NaN last. */
INLINE __m128 max_of_4(__m512 x[4][2])
{
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    __m512i m[4];
    UNROLL for (ptrdiff_t i = 0; i < 4; i++) m[i] =
        _mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(x[i][0]), magnitude),
                         _mm512_and_si512(_mm512_castps_si512(x[i][1]), magnitude));
    __m512i a =
        _mm512_max_epi32(_mm512_unpacklo_epi32(m[0], m[1]), _mm512_unpackhi_epi32(m[0], m[1]));
    __m512i b =
        _mm512_max_epi32(_mm512_unpacklo_epi32(m[2], m[3]), _mm512_unpackhi_epi32(m[2], m[3]));
    return _mm_castsi128_ps(
        fold_max(_mm512_max_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b))));
}

/* Sums of 4 blocks: `first` of their first 16 numbers, `second` of the others. pairs: of each block,
 * per 128 bits, two sums of first numbers and two of second ones. */
INLINE void sums_of_4(const __m512i pairs[4], __m128i *first, __m128i *second)
{
    __m512 a = _mm512_castsi512_ps(_mm512_unpacklo_epi64(pairs[0], pairs[1]));
    __m512 b = _mm512_castsi512_ps(_mm512_unpacklo_epi64(pairs[2], pairs[3]));
    __m512 c = _mm512_castsi512_ps(_mm512_unpackhi_epi64(pairs[0], pairs[1]));
    __m512 d = _mm512_castsi512_ps(_mm512_unpackhi_epi64(pairs[2], pairs[3]));
    *first = fold_add(_mm512_add_epi32(_mm512_castps_si512(_mm512_shuffle_ps(a, b, 0x88)),
                                       _mm512_castps_si512(_mm512_shuffle_ps(a, b, 0xdd))));
    *second = fold_add(_mm512_add_epi32(_mm512_castps_si512(_mm512_shuffle_ps(c, d, 0x88)),
                                        _mm512_castps_si512(_mm512_shuffle_ps(c, d, 0xdd))));
}

/* Planes of one block; returns its sums in pairs. The packs leave dwords of one plane and half every
 * fourth place: the permutation at the end sorts them. */
INLINE __m512i put_planes(const __m512 x[2], float inverse, int8_t *q)
{
    const __m512i sort = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m512 f = _mm512_set1_ps(inverse);
    __m512i v = _mm512_packs_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(x[0], f)),
                                   _mm512_cvtps_epi32(_mm512_mul_ps(x[1], f)));
    __m512i hi = _mm512_srai_epi16(_mm512_add_epi16(v, _mm512_set1_epi16(64)), 7);
    __m512i lo = _mm512_sub_epi16(v, _mm512_slli_epi16(hi, 7));
    _mm512_store_si512(q, _mm512_permutexvar_epi32(sort, _mm512_packs_epi16(hi, lo)));
    return _mm512_madd_epi16(v, _mm512_set1_epi16(1));
}

/* Four blocks at a time share the sums across lanes: 14 cycles a block instead of 40. Numbers too
 * small for a scale become 0. A block that is not finite gets d = NaN; its planes do not matter. */
static void quantize(const float *x, uint32_t n_blocks, uint32_t step, int8_t *q,
                     struct act_scale *sc)
{
    for (uint32_t b = 0; b < n_blocks;
         b += 4, x += (size_t)4 * TILE_COLS, q += 256 * (size_t)step, sc += 4 * (size_t)step) {
        int count = n_blocks - b < 4 ? (int)(n_blocks - b) : 4;
        __m512 v[4][2];
        UNROLL for (ptrdiff_t i = 0; i < 4; i++)
        {
            v[i][0] = i < count ? _mm512_loadu_ps(x + i * TILE_COLS) : _mm512_setzero_ps();
            v[i][1] = i < count ? _mm512_loadu_ps(x + i * TILE_COLS + 16) : _mm512_setzero_ps();
        }
        __m128 max = max_of_4(v), top = _mm_set1_ps((float)ACT_MAX);
        __mmask8 scales = _mm_cmp_ps_mask(max, _mm_set1_ps(1e-30f), _CMP_GE_OQ);
        __m128 d = _mm_maskz_mul_ps(scales, max, _mm_set1_ps(1.0f / (float)ACT_MAX));
        d = _mm_add_ps(d, _mm_sub_ps(max, max)); /* not finite: NaN */
        float inverse[4];
        _mm_storeu_ps(inverse, _mm_maskz_div_ps(scales, top, max));
        int8_t unused[64] __attribute__((aligned(64))) = {0};
        __m512i pairs[4];
        UNROLL for (ptrdiff_t i = 0; i < 4; i++) pairs[i] =
            put_planes(v[i], inverse[i], i < count ? q + 64 * (ptrdiff_t)step * i : unused);
        __m128i first, second, zero = _mm_setzero_si128();
        sums_of_4(pairs, &first, &second);
        __m128i sum = _mm_add_epi32(first, second);
        __m128 row[4] = {d, _mm_mul_ps(d, _mm_cvtepi32_ps(sum)),
                         _mm_castsi128_ps(_mm_sub_epi32(zero, sum)),
                         _mm_castsi128_ps(_mm_sub_epi32(zero, first))};
        _MM_TRANSPOSE4_PS(row[0], row[1], row[2], row[3]);
        UNROLL for (ptrdiff_t i = 0; i < 4; i++) if (i < count)
            _mm_storeu_ps(&sc[(ptrdiff_t)step * i].d, row[i]);
    }
}

/* e^x to about 1 ulp for x <= 88.7; beyond, e^88.7. NaN stays NaN. */
INLINE __m512 exp_ps(__m512 x)
{
    x = _mm512_min_ps(_mm512_set1_ps(88.7f), _mm512_max_ps(_mm512_set1_ps(-104.0f), x));
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f); /* Cephes' expf */
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_scalef_ps(p, n);
}

static void store(const struct out_args *a, out_tile y, out_tile up)
{
    __mmask16 lanes = first_lanes(a->n_rows);
    for (uint32_t t = 0; t < a->n; t++) {
        float *out = a->out + t * a->stride;
        __m512 v = _mm512_load_ps(y[t]);
        if (a->mode == LINEAR_ADD) {
            v = _mm512_add_ps(_mm512_maskz_loadu_ps(lanes, out), v);
        } else if (a->mode == LINEAR_SWIGLU) {
            __m512 e = exp_ps(_mm512_sub_ps(_mm512_setzero_ps(), v));
            v = _mm512_div_ps(v, _mm512_add_ps(e, _mm512_set1_ps(1.0f)));
            v = _mm512_mul_ps(v, _mm512_load_ps(up[t]));
        }
        _mm512_mask_storeu_ps(out, lanes, v);
    }
}

const struct linear_kernels linear_avx512 = {
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
