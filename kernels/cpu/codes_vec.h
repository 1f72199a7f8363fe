/* Row codes, once for every instruction set (vec16.h); what a row's logit is are whole numbers.
 *
 * masses is bound by arithmetic: for 16 rows 14 operations take their levels apart, then each head has 8
 * dot products and 5 operations of an exponential; 9 bytes per row come from memory. seal is bound by the
 * directions in segment 0 (codes_basis_vec.h), by the projections elsewhere: 48 head_dim products per
 * row. */
#ifndef KERNELS_CPU_CODES_VEC_H
#define KERNELS_CPU_CODES_VEC_H

#include "kernels/cpu/codes_basis_vec.h"

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

/* 2^x for x in [-100, 100], linear between powers of two: within -4 and +2 %, right on average. What
 * 2 bits leave out of a row's logit is ten times that. */
V16_FN v16f exp2_rough(v16f x)
{
    const float steps = 0x1p23f, middle = (127.0f - 0.0573f) * 0x1p23f;
    return v16_of_bits(v16_to_int(v16_fma(x, v16_set1(steps), v16_set1(middle))));
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
    uint32_t p = row / a->part_rows, i = row % a->part_rows;
    for (uint32_t j = 0; j < CODES_K; j++)
        a->codes[codes_k_byte(p, i, j, a->part_rows)] |=
            (uint8_t)(c->level[j / CODES_LANES][j % CODES_LANES] << codes_shift(j));
    a->codes[codes_k_scale(p, i, a->part_rows)] = c->scale;
}

static void put_v(const struct codes_lane *a, uint32_t row, const struct row_code *c)
{
    for (uint32_t j = 0; j < CODES_V; j++)
        a->codes[codes_v_byte(row, j)] |= (uint8_t)(c->level[0][j] << codes_shift(row));
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

static void query(struct codes_query *out, const float *q, uint32_t n, uint32_t dim, float scale,
                  const uint8_t *basis)
{
    const float *sd = (const float *)(const void *)basis;
    const uint8_t *e = basis + CODES_K * sizeof(float);
    v16f factor = v16_set1(scale * (float)M_LOG2E * CODES_STEP), zero = v16_zero();
    out->limit = 0x1p12f;
    for (uint32_t h = 0; h < n; h++, q += dim) {
        v16f g[CODES_VECTORS] = {zero, zero}, size;
        int32_t whole[CODES_K], sum = 0, most = 0;
        for (uint32_t c = 0; c < dim; c++)
            V16_UNROLL for (uint32_t x = 0; x < CODES_VECTORS; x++) g[x] = v16_fma(
                v16_load_bf16(e + ((size_t)c * CODES_K + x * V16) * 2), v16_set1(q[c]), g[x]);
        for (uint32_t x = 0; x < CODES_VECTORS; x++)
            g[x] = v16_mul(v16_mul(g[x], v16_load(sd + (size_t)x * V16)), factor);
        size = v16_max(v16_max(g[0], v16_sub(zero, g[0])), v16_max(g[1], v16_sub(zero, g[1])));
        float top = v16_hmax(size);
        v16f inverse = v16_set1(top > 1e-30f ? 127.0f / top : 0.0f);
        for (uint32_t x = 0; x < CODES_VECTORS; x++) {
            v16f y = v16_mul(g[x], inverse);
            y = v16_min(v16_max(y, v16_set1(-127.0f)), v16_set1(127.0f)); /* NaN too */
            v16i_store(whole + (size_t)x * V16, v16_to_int(y));
        }
        for (uint32_t j = 0; j < CODES_K; j++) {
            out->k[h][j] = (int8_t)whole[j];
            sum += whole[j];
            most += whole[j] < 0 ? -whole[j] : whole[j];
        }
        out->start[h] = -3 * sum / 2;
        out->factor[h] = top > 1e-30f ? top / 127.0f : 0.0f;
        float limit = CODES_MOST / (1.5f * out->factor[h] * (float)(most + 1) + 1e-30f);
        out->limit = limit < out->limit ? limit : out->limit;
    }
}

/* The levels of 16 rows, one of each page: vectors of bytes, as directions are ordered. */
V16_FN void take_apart(const uint8_t *row, const uint32_t vectors, v16i *levels)
{
    v16i three = v16i_set1(0x03030303);
    V16_UNROLL for (uint32_t x = 0; x < vectors; x++)
    {
        v16i all = v16i_load(row + (size_t)x * CODES_VECTOR);
        levels[4 * x] = v16i_and(all, three);
        levels[4 * x + 1] = v16i_and(v16i_shr(all, 2), three);
        levels[4 * x + 2] = v16i_and(v16i_shr(all, 4), three);
        levels[4 * x + 3] = v16i_and(v16i_shr(all, 6), three);
    }
}

/* e^r of row i of the pages of a tile, for n heads; r: its logit above the centroid's. */
V16_FN void row_masses(const uint8_t *tile, uint32_t rows, uint32_t i, const struct codes_query *q,
                       const uint32_t n, v16f *out)
{
    enum { BYTES = CODES_VECTORS * CODES_FIELDS };
    v16i levels[BYTES];
    take_apart(tile + (size_t)i * CODES_ROW_BYTES, CODES_VECTORS, levels);
    v16f alpha = scales_of(tile + (size_t)rows * CODES_ROW_BYTES + (size_t)i * CODES_PAGES);
    alpha = v16_min(alpha, v16_set1(q->limit));
    V16_UNROLL for (uint32_t h = 0; h < n; h++)
    {
        v16i sum = v16i_dot4(v16i_set1(q->start[h]), levels, q->k[h], BYTES);
        v16f factor = v16_mul(alpha, v16_set1(q->factor[h]));
        out[h] = exp2_rough(v16_mul(v16_from_int(sum), factor));
    }
}

V16_FN void masses_of(const uint8_t *tile, const uint8_t *ahead, uint32_t rows,
                      const struct codes_query *q, const uint32_t n, float (*out)[CODES_PAGES])
{
    v16f sum[CODES_HEADS], one[CODES_HEADS];
    V16_UNROLL for (uint32_t h = 0; h < n; h++) sum[h] = v16_zero();
    for (uint32_t i = 0; i < rows; i++, ahead += CODES_ROW_BYTES) {
        __builtin_prefetch(ahead);
        __builtin_prefetch(ahead + CODES_VECTOR);
        row_masses(tile, rows, i, q, n, one);
        V16_UNROLL for (uint32_t h = 0; h < n; h++) sum[h] = v16_add(sum[h], one[h]);
    }
    for (uint32_t i = 0; i < rows * CODES_PAGES; i += CODES_VECTOR)
        __builtin_prefetch(ahead + i); /* scales */
    for (uint32_t h = 0; h < n; h++)
        v16_store(out[h], v16_log(sum[h]));
}

static void masses(const uint8_t *tile, const uint8_t *ahead, uint32_t part_rows,
                   const struct codes_query *q, uint32_t n, float (*out)[CODES_PAGES])
{
    if (n == 4)
        masses_of(tile, ahead, part_rows, q, 4, out);
    else if (n == 3)
        masses_of(tile, ahead, part_rows, q, 3, out);
    else if (n == 2)
        masses_of(tile, ahead, part_rows, q, 2, out);
    else
        masses_of(tile, ahead, part_rows, q, 1, out);
}

/* ---- estimates ------------------------------------------------------------------------------ */

/* Up to 16 pages of a list as a tile of their own, and what their rows weigh. */
struct gathered {
    uint8_t tile[CODES_MAX_ROWS * (CODES_ROW_BYTES + CODES_PAGES)];
    uint8_t v_scale[CODES_MAX_ROWS * CODES_PAGES]; /* [row][page] */
    /* Weights of a page's rows relative to its heaviest, 0 .. 127: [four rows][page][row] */
    int8_t weight[CODES_HEADS][CODES_MAX_ROWS * CODES_PAGES];
    float factor[CODES_HEADS][CODES_PAGES]; /* what 1 of them stands for */
};

/* Codes of K and scales, one page after the other. */
static void gather(struct gathered *g, const struct codes_estimates *a, uint32_t first, uint32_t n)
{
    uint32_t rows = a->part_rows;
    if (n < CODES_PAGES) { /* what is not gathered is computed, and weighs nothing */
        memset(g->tile, 0, sizeof g->tile);
        memset(g->v_scale, 0, sizeof g->v_scale);
    }
    for (uint32_t e = 0; e < n; e++) {
        const uint8_t *codes = a->codes[first + e];
        uint32_t p = a->parts[first + e];
        const uint8_t *from = codes + codes_k_byte(p, 0, 0, rows);
        uint8_t *to = g->tile + codes_k_byte(e, 0, 0, rows);
        for (uint32_t i = 0; i < rows * CODES_VECTORS; i++)
            memcpy(to + (size_t)i * CODES_VECTOR, from + (size_t)i * CODES_VECTOR, 4);
        const uint8_t *k = codes + codes_k_scale(p, 0, rows);
        const uint8_t *v = codes + codes_v_scales() + (size_t)p * rows;
        for (uint32_t i = 0; i < rows; i++) {
            g->tile[codes_k_scale(e, i, rows)] = k[(size_t)i * CODES_PAGES];
            g->v_scale[i * CODES_PAGES + e] = v[i];
        }
    }
}

/* Weights of the pages [first, + n) relative to m; 0 elsewhere. */
static v16f page_weights(const struct codes_estimates *a, uint32_t h, uint32_t first, uint32_t n)
{
    float x[V16];
    for (uint32_t e = 0; e < V16; e++)
        x[e] = e < n ? a->logits[h * a->stride + first + e] : -INFINITY;
    v16f t = v16_sub(v16_mul(v16_load(x), v16_set1((float)M_LOG2E)), v16_set1(a->m[h]));
    return v16_pick(v16_gt(t, v16_set1(-99.0f)), v16_exp2(t), v16_zero());
}

/* Sums over the rows of levels times weights, by direction, and of the weights, by page: what codes
 * add is their sum less 1.5 of the weights'. */
struct v_sums {
    v16f level[CODES_HEADS], weight[CODES_HEADS];
};

/* Weights of rows: shares of their page's mass times their scales, times the page's weight. */
V16_FN void weigh_rows(struct v_sums *s, struct gathered *g, const struct codes_estimates *a,
                       const struct codes_query *q, uint32_t h0, const uint32_t heads,
                       uint32_t first, uint32_t n)
{
    v16f mass[CODES_HEADS], w[CODES_HEADS][CODES_MAX_ROWS], top[CODES_HEADS], one[CODES_HEADS];
    uint32_t rows = a->part_rows;
    for (uint32_t h = 0; h < heads; h++)
        mass[h] = top[h] = v16_zero();
    for (uint32_t i = 0; i < rows; i++) {
        v16f scale = scales_of(g->v_scale + (size_t)i * CODES_PAGES);
        row_masses(g->tile, rows, i, q, heads, one);
        for (uint32_t h = 0; h < heads; h++) {
            mass[h] = v16_add(mass[h], one[h]);
            w[h][i] = v16_mul(one[h], scale);
            top[h] = v16_max(top[h], w[h][i]);
        }
    }
    for (uint32_t h = 0; h < heads; h++) {
        v16f to_whole = v16_div(v16_set1(127.0f), top[h]), sum = v16_zero();
        for (uint32_t i = 0; i < rows; i += 4) {
            v16i four = v16i_set1(0);
            V16_UNROLL for (int k = 3; k >= 0; k--)
            {
                v16i x = v16_to_int(v16_mul(w[h][i + (uint32_t)k], to_whole));
                sum = v16_add(sum, v16_from_int(x));
                four = v16i_or(v16i_shl(four, 8), x);
            }
            v16i_store(g->weight[h] + (size_t)i * CODES_PAGES, four);
        }
        v16f page = v16_div(page_weights(a, h0 + h, first, n), v16_mul(mass[h], to_whole));
        v16_store(g->factor[h], page);
        s->weight[h] = v16_fma(page, sum, s->weight[h]);
    }
}

V16_FN void add_rows(struct v_sums *s, const struct gathered *g, const struct codes_estimates *a,
                     const uint32_t heads, uint32_t first, uint32_t n)
{
    v16i three = v16i_set1(0x03030303), none = v16i_set1(0);
    for (uint32_t e = 0; e < n; e++) {
        uint32_t row = a->parts[first + e] * a->part_rows;
        const uint8_t *vectors = a->codes[first + e] + codes_v_vectors();
        v16i sum[CODES_HEADS];
        V16_UNROLL for (uint32_t h = 0; h < heads; h++) sum[h] = none;
        for (uint32_t i = 0; i < a->part_rows; i += 4) {
            uint32_t r = row + i;
            v16i x = v16i_load(vectors + (size_t)(r / CODES_LANES) * CODES_VECTOR);
            x = v16i_and(v16i_shr(x, (int)codes_shift(r)), three);
            V16_UNROLL for (uint32_t h = 0; h < heads; h++) sum[h] =
                v16i_dot4(sum[h], &x, g->weight[h] + (size_t)(i * CODES_PAGES + e * 4), 1);
        }
        V16_UNROLL for (uint32_t h = 0; h < heads; h++) s->level[h] =
            v16_fma(v16_from_int(sum[h]), v16_set1(g->factor[h][e]), s->level[h]);
    }
}

V16_FN void estimate_pages(struct v_sums *s, struct gathered *g, const struct codes_estimates *a,
                           const struct codes_query *q, uint32_t h0, const uint32_t heads,
                           uint32_t first, uint32_t n)
{
    gather(g, a, first, n);
    weigh_rows(s, g, a, q, h0, heads, first, n);
    add_rows(s, g, a, heads, first, n);
}

/* o += F (sd T (level - 1.5)) */
static void rotate_back(const struct codes_estimates *a, const struct v_sums *s, uint32_t h,
                        float *o)
{
    const float *sd = (const float *)(const void *)(a->basis + codes_v_basis(a->dim));
    const uint8_t *f = (const uint8_t *)(sd + CODES_V);
    float y[CODES_V];
    v16f x = v16_sub(s->level[h], v16_set1(1.5f * v16_hsum(s->weight[h])));
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
    struct codes_query q;
    const uint8_t *k_basis = a->basis + codes_k_basis(true);
    for (uint32_t h = 0, n; h < a->group; h += n) {
        struct v_sums s;
        n = a->group - h < CODES_HEADS ? a->group - h : CODES_HEADS;
        query(&q, a->q + (size_t)h * a->dim, n, a->dim, a->scale, k_basis);
        for (uint32_t i = 0; i < CODES_HEADS; i++)
            s.level[i] = s.weight[i] = v16_zero();
        for (uint32_t e = 0; e < a->n; e += CODES_PAGES) {
            uint32_t pages = a->n - e < CODES_PAGES ? a->n - e : CODES_PAGES;
            if (n == 4)
                estimate_pages(&s, &g, a, &q, h, 4, e, pages);
            else if (n == 3)
                estimate_pages(&s, &g, a, &q, h, 3, e, pages);
            else if (n == 2)
                estimate_pages(&s, &g, a, &q, h, 2, e, pages);
            else
                estimate_pages(&s, &g, a, &q, h, 1, e, pages);
        }
        for (uint32_t i = 0; i < n; i++)
            rotate_back(a, &s, i, a->o + (size_t)(h + i) * a->o_stride);
    }
}

#endif
