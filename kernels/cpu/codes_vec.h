/* Row codes, once for every instruction set (vec16.h). A file that includes this defines block_sums():
 * whole numbers, so all give the same bits.
 *
 * masses is bound by the look-ups: 16 per row and head, 64 of them an instruction in AVX-512, and by an
 * exponential per row and head; 9 bytes per row come from memory. seal is bound by the directions in
 * segment 0 (codes_basis_vec.h), by the projections elsewhere: 48 head_dim products per row. */
#ifndef KERNELS_CPU_CODES_VEC_H
#define KERNELS_CPU_CODES_VEC_H

#include "kernels/cpu/codes_basis_vec.h"

/* Sums of the tables of n <= CODES_HEADS queries over the planes of a block: out[h][row][page]. */
static void block_sums(const uint8_t *block, const struct codes_query *q, uint32_t n,
                       uint16_t (*out)[CODES_BLOCK_ROWS]);

/* 16 bytes as numbers. */
V16_FN v16i load_bytes(const uint8_t *p)
{
#if defined(__AVX512F__)
    return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)p));
#elif defined(__AVX2__)
    return (v16i){_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)p)),
                  _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)(p + 8)))};
#else
    v16i r;
    for (int i = 0; i < V16; i++)
        r.x[i] = p[i];
    return r;
#endif
}

/* ---- scales --------------------------------------------------------------------------------- */

enum { SCALE_SHIFT = 20, SCALE_BASE = (127 - CODES_SCALE_EXP) << 23 };

/* To nearest; what is smaller than the least, or no number, is the least. */
static uint8_t scale_code(float alpha)
{
    uint32_t bits, least = SCALE_BASE >> SCALE_SHIFT;
    if (!(alpha > 0x1p-20f))
        return 0;
    memcpy(&bits, &alpha, sizeof bits);
    bits = (bits + (1u << (SCALE_SHIFT - 1))) >> SCALE_SHIFT;
    return bits - least < 255 ? (uint8_t)(bits - least) : 255;
}

V16_FN v16f scales_of(const uint8_t *p)
{
    v16i bits = v16i_shl(load_bytes(p), SCALE_SHIFT);
    return v16_of_bits(v16i_add(bits, v16i_set1(SCALE_BASE)));
}

/* 2^x for x <= 0, within 3e-6 of it; 2^-100 below that and for NaN. */
V16_FN v16f exp2_below(v16f x)
{
    x = v16_max(x, v16_set1(-100.0f));
    v16i n = v16_to_int(x);
    v16f f = v16_sub(x, v16_from_int(n)), y = v16_set1(1.3333558e-3f);
    y = v16_fma(y, f, v16_set1(9.6181291e-3f));
    y = v16_fma(y, f, v16_set1(5.5504109e-2f));
    y = v16_fma(y, f, v16_set1(2.4022651e-1f));
    y = v16_fma(y, f, v16_set1(6.9314718e-1f));
    y = v16_fma(y, f, v16_set1(1.0f));
    return v16_of_bits(v16i_add(v16_bits(y), v16i_shl(n, 23)));
}

/* ---- encoding ------------------------------------------------------------------------------- */

/* The code of one row: projections y of two vectors of directions (or one). */
struct row_code {
    int32_t level[2][V16]; /* 0 .. 3 */
    uint8_t scale;
};

/* dirs: that there are; inverse: 1 / sd, 0 where there is no direction. */
V16_FN void encode(struct row_code *out, const v16f *y, const v16f *sd, const v16f *inverse,
                   const uint32_t vectors, uint32_t dirs)
{
    v16f sum = v16_zero(), z[2], one = v16_set1(1.0f), above = v16_zero(), below = v16_zero();
    for (uint32_t i = 0; i < vectors; i++) {
        z[i] = v16_mul(y[i], inverse[i]);
        sum = v16_fma(z[i], z[i], sum);
    }
    float square = v16_hsum(sum) / (float)dirs;
    v16f to_one = v16_set1(square > 1e-30f ? 1.0f / sqrtf(square) : 0.0f);
    v16f step = v16_set1(CODES_STEP), under = v16_set1(-CODES_STEP);
    for (uint32_t i = 0; i < vectors; i++) {
        v16f n = v16_pick(v16_gt(v16_mul(z[i], to_one), under), one, v16_zero());
        n = v16_add(n, v16_pick(v16_gt(z[i], v16_zero()), one, v16_zero()));
        n = v16_add(n, v16_pick(v16_gt(v16_mul(z[i], to_one), step), one, v16_zero()));
        v16i_store(out->level[i], v16_to_int(n));
        v16f level = v16_mul(v16_mul(v16_sub(n, v16_set1(1.5f)), step), sd[i]);
        above = v16_fma(y[i], level, above);
        below = v16_fma(level, level, below);
    }
    out->scale = scale_code(v16_hsum(above) / v16_hsum(below));
}

static void put_k(const struct codes_lane *a, uint32_t row, const struct row_code *c)
{
    uint32_t p = row / a->part_rows, i = row % a->part_rows, shift = codes_shift(i);
    uint8_t *block = a->codes + codes_block(p, i, a->part_rows);
    for (uint32_t j = 0; j < CODES_PLANES; j++)
        block[j * CODES_PLANE_BYTES + codes_byte(p, i)] |=
            (uint8_t)((c->level[0][j] | c->level[1][j] << 2) << shift);
    block[codes_scale(p, i)] = c->scale;
}

static void put_v(const struct codes_lane *a, uint32_t row, const struct row_code *c)
{
    uint32_t word = 0;
    for (uint32_t j = 0; j < CODES_V; j++)
        word |= ((uint32_t)c->level[0][j] & 1) << j | (uint32_t)c->level[0][j] >> 1 << (16 + j);
    memcpy(a->codes + codes_v_words() + row * sizeof word, &word, sizeof word);
    a->codes[codes_v_scales() + row] = c->scale;
}

/* Codes all rows behind the sinks. by_channel: [dim][vectors * V16] directions as kept. */
V16_FN void code_rows(const struct codes_lane *a, const float *x, const float *by_channel,
                      const float *sd, const uint32_t vectors, bool keys)
{
    enum { ROWS = 4 };
    uint32_t most = vectors * V16, dirs = a->dim < most ? a->dim : most;
    v16f sds[2], inverse[2];
    for (uint32_t i = 0; i < vectors; i++) {
        v16f s = v16_load(sd + (size_t)i * V16);
        sds[i] = s;
        inverse[i] = v16_pick(v16_gt(s, v16_zero()), v16_div(v16_set1(1.0f), s), v16_zero());
    }
    for (uint32_t r = a->sink_rows; r < SEGMENT_ROWS; r += ROWS) { /* R is a multiple of 4 */
        v16f y[ROWS][2];
        V16_UNROLL for (uint32_t k = 0; k < ROWS; k++) y[k][0] = y[k][1] = v16_zero();
        for (uint32_t c = 0; c < a->dim; c++) {
            const float *e = by_channel + (size_t)c * most;
            V16_UNROLL for (uint32_t k = 0; k < ROWS; k++)
            {
                v16f v = v16_set1(x[(size_t)(r + k) * a->stride + c]);
                for (uint32_t i = 0; i < vectors; i++)
                    y[k][i] = v16_fma(v16_load(e + (size_t)i * V16), v, y[k][i]);
            }
        }
        for (uint32_t k = 0; k < ROWS; k++) {
            struct row_code c;
            encode(&c, y[k], sds, inverse, vectors, dirs);
            if (keys)
                put_k(a, r + k, &c);
            else
                put_v(a, r + k, &c);
        }
    }
}

/* x[r] = row r of storage minus its page's mean. */
static void distances(const struct codes_lane *a, const uint16_t *rows, const float *means,
                      float *x)
{
    uint32_t stride = a->stride;
    for (uint32_t r = a->sink_rows; r < SEGMENT_ROWS; r++) {
        const uint16_t *row = rows + (size_t)a->order[r] * stride;
        const float *mean = means + (size_t)(r / a->part_rows) * stride;
        for (uint32_t j = 0; j < stride; j += V16)
            v16_store(x + (size_t)r * stride + j,
                      v16_sub(v16_load_bf16(row + j), v16_load(mean + j)));
    }
}

static void seal_keys(const struct codes_lane *a)
{
    float *x = a->work, *e = x + (size_t)SEGMENT_ROWS * a->stride, sd[CODES_K];
    const uint8_t *from = a->basis + codes_k_basis(a->v_means != NULL);
    distances(a, a->keys, a->means, x);
    if (a->basis == a->codes) {
        float *to = (float *)(void *)(a->codes + codes_k_basis(a->v_means != NULL));
        uint16_t *dirs = (uint16_t *)(void *)(to + CODES_K);
        const float *q = make_basis(a, x, CODES_K, to);
        for (uint32_t c = 0; c < a->dim; c++)
            for (uint32_t j = 0; j < CODES_K; j++)
                dirs[c * CODES_K + j] = f32_to_bf16(q[(size_t)j * a->stride + c]);
    }
    memcpy(sd, from, sizeof sd);
    for (uint32_t i = 0; i < a->dim * CODES_K; i += V16)
        v16_store(e + i, v16_load_bf16(from + sizeof sd + (size_t)i * 2));
    code_rows(a, x, e, sd, 2, true);
}

static void seal_values(const struct codes_lane *a)
{
    float *x = a->work, *f = x + (size_t)SEGMENT_ROWS * a->stride, sd[CODES_V];
    const uint8_t *from = a->basis + codes_v_basis(a->dim);
    distances(a, a->values, a->v_means, x);
    if (a->basis == a->codes) {
        float *to = (float *)(void *)(a->codes + codes_v_basis(a->dim));
        uint16_t *dirs = (uint16_t *)(void *)(to + CODES_V);
        const float *q = make_basis(a, x, CODES_V, to);
        for (uint32_t j = 0; j < CODES_V; j++)
            for (uint32_t c = 0; c < a->dim; c++)
                dirs[j * a->dim + c] = f32_to_bf16(q[(size_t)j * a->stride + c]);
    }
    memcpy(sd, from, sizeof sd);
    for (uint32_t j = 0; j < CODES_V; j++)
        for (uint32_t c = 0; c < a->dim; c++) {
            uint16_t bits;
            memcpy(&bits, from + sizeof sd + ((size_t)j * a->dim + c) * 2, sizeof bits);
            f[c * CODES_V + j] = bf16_to_f32(bits);
        }
    code_rows(a, x, f, sd, 1, false);
}

static void seal(const struct codes_lane *a)
{
    memset(a->codes, 0, codes_bytes(a->dim, a->v_means != NULL));
    seal_keys(a);
    if (a->v_means != NULL)
        seal_values(a);
}

/* ---- scores --------------------------------------------------------------------------------- */

static void fill_tables(struct codes_query *out, v16f strong, v16f weak)
{
    static const float low[V16] = {-1.5f, -0.5f, 0.5f, 1.5f, -1.5f, -0.5f, 0.5f, 1.5f,
                                   -1.5f, -0.5f, 0.5f, 1.5f, -1.5f, -0.5f, 0.5f, 1.5f};
    static const float high[V16] = {-1.5f, -1.5f, -1.5f, -1.5f, -0.5f, -0.5f, -0.5f, -0.5f,
                                    0.5f,  0.5f,  0.5f,  0.5f,  1.5f,  1.5f,  1.5f,  1.5f};
    float g[2][V16];
    v16f first = v16_load(low), second = v16_load(high), zero = v16_zero();
    v16f size = v16_add(v16_max(strong, v16_sub(zero, strong)), v16_max(weak, v16_sub(zero, weak)));
    float top = v16_hmax(size) * 1.5f;
    v16f inverse = v16_set1(top > 1e-30f ? 127.0f / top : 0.0f);
    out->factor = top > 1e-30f ? top / 127.0f * CODES_STEP : 0.0f;
    v16_store(g[0], v16_mul(strong, inverse));
    v16_store(g[1], v16_mul(weak, inverse));
    for (uint32_t j = 0; j < CODES_PLANES; j++) {
        int32_t whole[V16];
        v16f t = v16_fma(first, v16_set1(g[0][j]), v16_mul(second, v16_set1(g[1][j])));
        t = v16_min(v16_max(t, v16_set1(-127.0f)), v16_set1(127.0f));
        v16i_store(whole, v16i_add(v16_to_int(t), v16i_set1(CODES_BIAS)));
        for (uint32_t i = 0; i < V16; i++)
            out->table[j][0][i] = (uint8_t)whole[i];
        memcpy(out->table[j][1], out->table[j][0], V16);
    }
}

static void query(struct codes_query *out, const float *q, uint32_t n, uint32_t dim, float scale,
                  const uint8_t *basis)
{
    const float *sd = (const float *)(const void *)basis;
    const uint8_t *e = basis + CODES_K * sizeof(float);
    v16f factor = v16_set1(scale * (float)M_LOG2E);
    for (uint32_t h = 0; h < n; h++, q += dim) {
        v16f strong = v16_zero(), weak = strong;
        for (uint32_t c = 0; c < dim; c++) {
            v16f x = v16_set1(q[c]);
            strong = v16_fma(v16_load_bf16(e + (size_t)c * CODES_K * 2), x, strong);
            weak = v16_fma(v16_load_bf16(e + (size_t)c * CODES_K * 2 + 2 * V16), x, weak);
        }
        fill_tables(&out[h], v16_mul(v16_mul(strong, v16_load(sd)), factor),
                    v16_mul(v16_mul(weak, v16_load(sd + V16)), factor));
    }
}

/* Logits in base 2 of the rows of a tile's pages, relative to their centroids: t[row]; and the
 * greatest of each page. sums: [rows / 4][64] of one head. */
V16_FN v16f row_logits(const struct codes_query *q, const uint16_t *sums, uint32_t stride,
                       const float *alpha, const uint32_t rows, v16f *t)
{
    v16f factor = v16_set1(q->factor), top = v16_set1(-3e38f);
    v16i bias = v16i_set1(CODES_PLANES * CODES_BIAS);
    V16_UNROLL for (uint32_t i = 0; i < rows; i++)
    {
        const uint16_t *s = sums + (size_t)i / 4 * stride + i % 4 * (size_t)V16;
        v16f x = v16_from_int(v16i_sub(v16i_load_u16(s), bias));
        t[i] = v16_mul(v16_mul(x, factor), v16_load(alpha + (size_t)i * V16));
        top = v16_max(t[i], top);
    }
    return top;
}

struct tile_sums {
    uint16_t sums[CODES_MAX_ROWS / 4][CODES_HEADS][CODES_BLOCK_ROWS];
    float alpha[CODES_MAX_ROWS * V16]; /* [row][page] */
};

static void sum_tile(struct tile_sums *s, const uint8_t *blocks, uint32_t rows,
                     const struct codes_query *q, uint32_t n)
{
    for (uint32_t k = 0; k < rows / 4; k++, blocks += CODES_BLOCK_BYTES) {
        block_sums(blocks, q, n, s->sums[k]);
        for (uint32_t i = 0; i < 4; i++)
            v16_store(s->alpha + ((size_t)k * 4 + i) * V16,
                      scales_of(blocks + CODES_BLOCK_SCALES + (size_t)i * V16));
    }
}

V16_FN void masses_of(const struct tile_sums *s, const uint32_t rows, const struct codes_query *q,
                      uint32_t n, float (*out)[CODES_PAGES])
{
    const uint32_t stride = CODES_HEADS * CODES_BLOCK_ROWS;
    for (uint32_t h = 0; h < n; h++) {
        v16f t[CODES_MAX_ROWS], sum = v16_zero();
        v16f top = row_logits(&q[h], s->sums[0][h], stride, s->alpha, rows, t);
        V16_UNROLL for (uint32_t i = 0; i < rows; i++) sum =
            v16_add(sum, exp2_below(v16_sub(t[i], top)));
        v16_store(out[h], v16_fma(top, v16_set1((float)M_LN2), v16_log(sum)));
    }
}

static void masses(const uint8_t *blocks, uint32_t part_rows, const struct codes_query *q,
                   uint32_t n, float (*out)[CODES_PAGES])
{
    struct tile_sums s;
    sum_tile(&s, blocks, part_rows, q, n);
    if (part_rows == 8)
        masses_of(&s, 8, q, n, out);
    else if (part_rows == 16)
        masses_of(&s, 16, q, n, out);
    else
        masses_of(&s, part_rows, q, n, out);
}

/* ---- estimates ------------------------------------------------------------------------------ */

/* Up to 16 pages of a list as a tile of their own. */
struct gathered {
    uint8_t blocks[CODES_MAX_ROWS / 4 * CODES_BLOCK_BYTES];
    float scale[CODES_MAX_ROWS * V16];               /* [row][page] of V */
    uint32_t words[CODES_MAX_ROWS * V16];            /* [page][row] */
    float weight[CODES_HEADS][CODES_MAX_ROWS * V16]; /* [row][page] */
};

static void gather(struct gathered *g, const struct codes_estimates *a, uint32_t first, uint32_t n)
{
    uint32_t rows = a->part_rows;
    uint8_t scale[CODES_MAX_ROWS * V16];
    if (n < V16) { /* what is not gathered is computed, with weight 0 */
        memset(g->blocks, 0, sizeof g->blocks);
        memset(scale, 0, sizeof scale);
    }
    for (uint32_t e = 0; e < n; e++) {
        const uint8_t *codes = a->codes[first + e];
        uint32_t p = a->parts[first + e];
        for (uint32_t i = 0; i < rows; i += 4) {
            const uint8_t *from = codes + codes_block(p, i, rows) + codes_byte(p, 0);
            uint8_t *to = g->blocks + codes_block(0, i, rows) + codes_byte(e, 0);
            for (uint32_t j = 0; j < CODES_PLANES; j++)
                memcpy(to + j * CODES_PLANE_BYTES, from + j * CODES_PLANE_BYTES, 2);
            for (uint32_t k = 0; k < 4; k++)
                g->blocks[codes_block(0, i, rows) + codes_scale(e, k)] =
                    codes[codes_block(p, i, rows) + codes_scale(p, k)];
        }
        memcpy(g->words + (size_t)e * rows, codes + codes_v_words() + (size_t)p * rows * 4,
               rows * sizeof *g->words);
        const uint8_t *v = codes + codes_v_scales() + (size_t)p * rows;
        for (uint32_t i = 0; i < rows; i++)
            scale[i * V16 + e] = v[i];
    }
    for (uint32_t i = 0; i < rows; i++)
        v16_store(g->scale + (size_t)i * V16, scales_of(scale + (size_t)i * V16));
}

/* Weights of the pages [first, + n) relative to m; 0 elsewhere. */
static v16f page_weights(const struct codes_estimates *a, uint32_t h, uint32_t first, uint32_t n)
{
    float x[V16];
    for (uint32_t e = 0; e < V16; e++)
        x[e] = e < n ? a->logits[h * a->stride + first + e] : -INFINITY;
    v16f t = v16_sub(v16_mul(v16_load(x), v16_set1((float)M_LOG2E)), v16_set1(a->m[h]));
    return v16_pick(v16_gt(t, v16_set1(-99.0f)), exp2_below(t), v16_zero());
}

/* Sums over the rows of levels times weights, without step and middle, and of the weights. */
struct v_sums {
    v16f low[CODES_HEADS], high[CODES_HEADS], weight[CODES_HEADS];
};

V16_FN void add_rows(struct v_sums *s, const struct gathered *g, uint32_t n, uint32_t rows,
                     const uint32_t heads)
{
    for (uint32_t e = 0; e < n; e++)
        for (uint32_t i = 0; i < rows; i++) {
            uint32_t word = g->words[e * rows + i];
            V16_UNROLL for (uint32_t h = 0; h < heads; h++)
            {
                v16f w = v16_set1(g->weight[h][i * V16 + e]);
                s->low[h] = v16_add(s->low[h], v16_pick(word & 0xffff, w, v16_zero()));
                s->high[h] = v16_add(s->high[h], v16_pick(word >> 16, w, v16_zero()));
            }
        }
}

static void estimate_pages(struct v_sums *s, struct gathered *g, const struct codes_estimates *a,
                           const struct codes_query *q, uint32_t h0, uint32_t heads, uint32_t first,
                           uint32_t n)
{
    struct tile_sums t;
    uint32_t rows = a->part_rows;
    sum_tile(&t, g->blocks, rows, q, heads);
    for (uint32_t h = 0; h < heads; h++) {
        v16f x[CODES_MAX_ROWS], sum = v16_zero();
        v16f top =
            row_logits(&q[h], t.sums[0][h], CODES_HEADS * CODES_BLOCK_ROWS, t.alpha, rows, x);
        for (uint32_t i = 0; i < rows; i++) {
            x[i] = exp2_below(v16_sub(x[i], top));
            sum = v16_add(sum, x[i]);
        }
        v16f factor = v16_div(page_weights(a, h0 + h, first, n), sum);
        for (uint32_t i = 0; i < rows; i++) {
            v16f w = v16_mul(v16_mul(x[i], factor), v16_load(g->scale + (size_t)i * V16));
            s->weight[h] = v16_add(s->weight[h], w);
            v16_store(g->weight[h] + (size_t)i * V16, w);
        }
    }
    if (heads == 4)
        add_rows(s, g, n, rows, 4);
    else if (heads == 3)
        add_rows(s, g, n, rows, 3);
    else if (heads == 2)
        add_rows(s, g, n, rows, 2);
    else
        add_rows(s, g, n, rows, 1);
}

/* o += F (sd T (2 high + low - 1.5)) */
static void rotate_back(const struct codes_estimates *a, const struct v_sums *s, uint32_t h,
                        float *o)
{
    const float *sd = (const float *)(const void *)(a->basis + codes_v_basis(a->dim));
    const uint8_t *f = (const uint8_t *)(sd + CODES_V);
    float y[CODES_V];
    v16f x = v16_fma(v16_set1(2.0f), s->high[h], s->low[h]);
    x = v16_sub(x, v16_set1(1.5f * v16_hsum(s->weight[h])));
    v16_store(y, v16_mul(v16_mul(x, v16_set1(CODES_STEP)), v16_load(sd)));
    for (uint32_t c = 0; c < a->dim; c += V16) {
        uint16_t last[V16] = {0};
        v16f acc = v16_load(o + c);
        for (uint32_t j = 0; j < CODES_V; j++) {
            const uint8_t *row = f + ((size_t)j * a->dim + c) * 2;
            if (a->dim - c < V16)
                row = memcpy(last, row, (a->dim - c) * 2);
            acc = v16_fma(v16_load_bf16(row), v16_set1(y[j]), acc);
        }
        v16_store(o + c, acc);
    }
}

static void estimate(const struct codes_estimates *a)
{
    struct gathered g;
    struct codes_query q[CODES_HEADS];
    const uint8_t *k_basis = a->basis + codes_k_basis(true);
    for (uint32_t h = 0, n; h < a->group; h += n) {
        struct v_sums s;
        n = a->group - h < CODES_HEADS ? a->group - h : CODES_HEADS;
        query(q, a->q + (size_t)h * a->dim, n, a->dim, a->scale, k_basis);
        for (uint32_t i = 0; i < CODES_HEADS; i++)
            s.low[i] = s.high[i] = s.weight[i] = v16_zero();
        for (uint32_t e = 0; e < a->n; e += V16) {
            uint32_t pages = a->n - e < V16 ? a->n - e : V16;
            gather(&g, a, e, pages);
            estimate_pages(&s, &g, a, q, h, n, e, pages);
        }
        for (uint32_t i = 0; i < n; i++)
            rotate_back(a, &s, i, a->o + (size_t)(h + i) * a->o_stride);
    }
}

#endif
