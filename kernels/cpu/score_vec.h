/* Scores of partitions, once for every instruction set. A file that includes this defines what
 * differs: store_query() and tile_dots(). Those are whole numbers, everything else is written with
 * vec16.h: all give the same bits.
 *
 * SCORE_MASS is bound by memory: head_dim bytes per partition and kind, 9.6 MB per step at 7 segments
 * of the default model with 1 outlier. SCORE_BOUND reads four times as much per vector. */
#include "kernels/cpu/score.h"
#include "kernels/cpu/vec16.h"
#include "kernels/dtype.h"

enum { DOT_TILES = 2 };

/* Numbers [j, j + 16) of a query. */
V16_FN void store_query(struct score_query *q, uint32_t j, v16i x);

/* Dot products of n <= SCORE_HEADS queries with two tiles: out[h][0 .. 15] for the first, [16 .. 31]
 * for the second. ahead: as many bytes as two tiles have, which are read soon. */
static void tile_dots(const uint8_t *first, const uint8_t *second, const uint8_t *ahead,
                      uint32_t dim, const struct score_query *q, uint32_t n,
                      int32_t (*out)[DOT_TILES * V16]);

/* Folds the step of each channel into q and rounds to whole numbers. */
static void round_query(struct score_query *out, const float *q, const struct digest_vectors *v,
                        uint32_t dim, float scale)
{
    float folded[DIGEST_MAX_DIM];
    v16f top = v16_zero(), offset = v16_zero();
    uint32_t j = 0;
    for (; j + V16 <= dim; j += V16) {
        v16f x = v16_load(q + j), y = v16_mul(x, v16_load(v->step + j));
        offset = v16_fma(x, v16_load(v->base + j), offset);
        top = v16_max(v16_max(y, v16_sub(v16_zero(), y)), top);
        v16_store(folded + j, y);
    }
    float most = v16_hmax(top), sum = v16_hsum(offset);
    for (; j < dim; j++) {
        folded[j] = q[j] * v->step[j];
        sum = fmaf(q[j], v->base[j], sum);
        most = fabsf(folded[j]) > most ? fabsf(folded[j]) : most;
    }
    for (; j % V16 != 0; j++)
        folded[j] = 0;
    float inverse = most > 1e-30f ? SCORE_Q_MAX / most : 0.0f;
    out->factor = most > 1e-30f ? most / SCORE_Q_MAX * scale : 0.0f;
    out->offset = sum * scale;
    v16f least = v16_set1(-SCORE_Q_MAX), greatest = v16_set1(SCORE_Q_MAX);
    for (j = 0; j < dim; j += V16) {
        v16f y = v16_mul(v16_load(folded + j), v16_set1(inverse));
        store_query(out, j, v16_to_int(v16_min(v16_max(y, least), greatest)));
    }
}

/* ---- which partitions -------------------------------------------------------------------------- */

/* Of the 16 partitions (or coarse digests) from p0 on, of `parts`: those that have a score. */
static v16_mask alive(const struct score_part *p, uint32_t segment, uint32_t p0, uint32_t parts)
{
    v16_mask m = v16_first_lanes(parts - p0);
    uint32_t group = p->a->coarse_group;
    if (segment == 0 && p->sink_rows > 0) {
        uint32_t rows = SEGMENT_ROWS / parts, sinks = p->sink_rows / rows;
        if (p->a->desc.order != ORDER_KMEANS && p0 < sinks)
            m &= ~v16_first_lanes(sinks - p0);
    }
    if (p->open == NULL)
        return m;
    const uint8_t *open = p->open + (size_t)segment * (parts / group);
    for (uint32_t i = 0; i < V16 && p0 + i < parts; i++)
        if (!open[(p0 + i) / group])
            m &= ~(1u << i);
    return m;
}

/* Of the 16 partitions from p0 on: those with rows. */
static v16_mask with_rows(const struct score_part *p, const uint8_t *record, uint32_t p0)
{
    const struct digest_desc *d = &p->a->desc;
    v16_mask m = 0;
    uint32_t first;
    if (d->order != ORDER_KMEANS)
        return 0xffffu;
    for (uint32_t i = 0; i < V16 && p0 + i < d->parts; i++)
        m |= (v16_mask)(digest_rows(record, d, p0 + i, &first) > 0) << i;
    return m;
}

/* Writes 16 scores, -inf where the mask is clear, less at the end of a segment. */
V16_FN void put(const struct score_part *p, uint32_t h, uint32_t segment, uint32_t parts,
                uint32_t p0, v16_mask m, v16f x)
{
    float *out = p->out + (size_t)h * p->stride + (size_t)segment * parts + p0;
    if (m != 0xffffu)
        x = v16_pick(m, x, v16_set1(-INFINITY));
    if (parts - p0 >= V16) {
        v16_store(out, x);
        return;
    }
    float some[V16];
    v16_store(some, x);
    memcpy(out, some, (parts - p0) * sizeof *out);
}

/* ---- SCORE_MASS --------------------------------------------------------------------------------- */

/* ln of the rows that a partition's centroid stands for; -inf for none. */
static v16f log_rows(const struct score_part *p, const uint8_t *record, uint32_t p0)
{
    const struct digest_desc *d = &p->a->desc;
    float n[V16];
    if (d->order != ORDER_KMEANS)
        return v16_log(v16_set1((float)(SEGMENT_ROWS / d->parts - d->outliers)));
    for (uint32_t i = 0; i < V16; i++) {
        uint32_t first;
        n[i] = p0 + i < d->parts ? (float)digest_rows(record, d, p0 + i, &first) : 0;
    }
    v16f x = v16_load(n);
    return v16_pick(v16_gt(x, v16_zero()), v16_log(v16_max(x, v16_set1(1))), v16_set1(-INFINITY));
}

/* ln of the sum of exponentials of the kinds' logits. */
V16_FN v16f log_sum(const v16f *t, uint32_t kinds)
{
    if (kinds == 1)
        return t[0];
    if (kinds == 2) {
        v16f most = v16_max(t[0], t[1]), d = v16_sub(v16_min(t[0], t[1]), most);
        return v16_add(most, v16_log1p(v16_exp2(v16_mul(d, v16_set1(1.44269504f)))));
    }
    v16f most = v16_max(v16_max(t[0], t[1]), t[2]), sum = v16_zero();
    V16_UNROLL for (uint32_t k = 0; k < 3; k++) sum = v16_add(sum, v16_exp(v16_sub(t[k], most)));
    return v16_add(most, v16_log(sum));
}

/* What one call of mass_segment works on. */
struct mass {
    struct digest_vectors vectors[DIGEST_KINDS];
    uint32_t kinds, parts;
    struct score_query (*q)[SCORE_HEADS]; /* [kinds] */
    const uint8_t *next_record;           /* that this or another worker reads next */
    const uint8_t *next[DIGEST_KINDS];    /* its vectors */
};

typedef int32_t mass_dots[DIGEST_KINDS][SCORE_HEADS][DOT_TILES * V16];

V16_FN v16f mass_of(const struct mass *s, const uint32_t kinds, uint32_t h, uint32_t tile,
                    mass_dots dots, v16f log_n)
{
    v16f x[DIGEST_KINDS] = {v16_zero(), v16_zero(), v16_zero()};
    V16_UNROLL for (uint32_t k = 0; k < kinds; k++) x[k] =
        v16_fma(v16_from_int(v16i_load(dots[k][h] + (size_t)tile * V16)),
                v16_set1(s->q[k][h].factor), v16_set1(s->q[k][h].offset));
    x[0] = v16_add(x[0], log_n);
    return log_sum(x, kinds);
}

/* The tiles behind t, or those of the next segment. */
V16_FN const uint8_t *tiles_ahead(const struct mass *s, uint32_t k, uint32_t t, uint32_t dim)
{
    if (t + 2 * DOT_TILES > digest_tiles(s->parts))
        return s->next[k];
    return s->vectors[k].tiles + (size_t)(t + DOT_TILES) * V16 * dim;
}

static const uint8_t *codes_at(const struct score_part *p, const uint8_t *record, uint32_t tile)
{
    uint32_t rows = SEGMENT_ROWS / p->layout->parts;
    return record + p->layout->codes + codes_tile(tile * V16, rows);
}

/* Two tiles on: what one takes to compute is less than memory takes to answer. */
static const uint8_t *codes_ahead(const struct score_part *p, const struct mass *s,
                                  const uint8_t *record, uint32_t tile)
{
    uint32_t tiles = digest_tiles(s->parts);
    return tile + 2 < tiles ? codes_at(p, record, tile + 2)
                            : codes_at(p, s->next_record, tile + 2 - tiles);
}

V16_FN void mass_tiles(const struct score_part *p, const struct mass *s, const uint32_t kinds,
                       const uint8_t *record, uint32_t segment, uint32_t h0, uint32_t n)
{
    uint32_t dim = p->layout->dim, tiles = digest_tiles(s->parts);
    v16f rows = p->coarse ? v16_zero() : log_rows(p, record, 0);
    for (uint32_t t = 0; t < tiles; t += DOT_TILES) {
        mass_dots dots;
        uint32_t last = t + 1 < tiles ? t + 1 : t;
        v16_mask m[DOT_TILES];
        for (uint32_t i = 0; i < DOT_TILES; i++)
            m[i] = t + i < tiles ? alive(p, segment, (t + i) * V16, s->parts) : 0;
        for (uint32_t k = 0; k < kinds && (m[0] | m[1]) != 0; k++)
            tile_dots(s->vectors[k].tiles + (size_t)t * V16 * dim,
                      s->vectors[k].tiles + (size_t)last * V16 * dim, tiles_ahead(s, k, t, dim),
                      dim, s->q[k], n, dots[k]);
        for (uint32_t i = 0; i < DOT_TILES && t + i < tiles; i++) {
            if (!p->coarse && p->a->desc.order == ORDER_KMEANS)
                rows = log_rows(p, record, (t + i) * V16);
            float of_rows[SCORE_HEADS][V16]; /* in place of `rows`, by head */
            bool coded = p->a->desc.kind == DIGEST_CODES && !p->coarse && m[i] != 0;
            if (coded)
                p->codes->masses(codes_at(p, record, t + i), codes_ahead(p, s, record, t + i),
                                 SEGMENT_ROWS / s->parts, p->codes_query, n, of_rows);
            for (uint32_t h = 0; h < n; h++) {
                v16f above = coded ? v16_load(of_rows[h]) : rows;
                put(p, h0 + h, segment, s->parts, (t + i) * V16, m[i],
                    m[i] != 0 ? mass_of(s, kinds, h, i, dots, above) : v16_zero());
            }
        }
    }
}

/* What this or another worker reads after this segment: to prefetch. */
static const uint8_t *next_record(const struct score_part *p, uint32_t segment)
{
    const struct kv_memory *kv = p->a->kv;
    uint32_t head = p->head + 1;
    if (segment + 1 < p->row->n_segments)
        return score_record(p, segment + 1);
    if (head == kv->geo->kv_heads || kv_lane(kv->geo, p->a->layer, head).class_ != LANE_SPARSE)
        head = p->head;
    return digest_lane(kv, p->row->records[0], p->a->layer, head);
}

static void mass_segment(const struct score_part *p, uint32_t segment)
{
    const struct digest_layout *l = p->layout;
    const uint8_t *record = score_record(p, segment);
    struct mass s = {.kinds = l->kinds, .parts = l->parts, .q = p->work};
    if (p->coarse) {
        s.kinds = 1;
        s.parts = l->parts / DIGEST_COARSE;
        s.vectors[0] = digest_vectors_at(record + l->coarse, l->dim);
    }
    const uint8_t *next = s.next_record = next_record(p, segment);
    for (uint32_t k = 0; k < s.kinds; k++) {
        if (!p->coarse)
            s.vectors[k] = digest_vectors_of(record, l, k);
        s.next[k] = next + (p->coarse ? l->coarse : l->vectors + k * l->vector_bytes);
    }
    for (uint32_t h = 0, n; h < p->group; h += n) {
        n = p->group - h < SCORE_HEADS ? p->group - h : SCORE_HEADS;
        for (uint32_t k = 0; k < s.kinds; k++)
            for (uint32_t i = 0; i < n; i++)
                round_query(&s.q[k][i], p->q + (size_t)(h + i) * l->dim, &s.vectors[k], l->dim,
                            p->a->scale);
        if (p->a->desc.kind == DIGEST_CODES && !p->coarse &&
            (segment == p->begin || p->group > SCORE_HEADS))
            p->codes->query(p->codes_query, p->q + (size_t)h * l->dim, n, l->dim, p->a->scale,
                            score_record(p, 0) + l->codes + codes_k_basis(l->values != 0));
        if (s.kinds == 1)
            mass_tiles(p, &s, 1, record, segment, h, n);
        else if (s.kinds == 2)
            mass_tiles(p, &s, 2, record, segment, h, n);
        else
            mass_tiles(p, &s, 3, record, segment, h, n);
    }
}

/* ---- SCORE_BOUND ----------------------------------------------------------------------------- */

/* The greatest of q_c * min_c and q_c * max_c is q_c+ * max_c + q_c- * min_c. Sums are rounded, so
 * what a chain of 2 * dim of them may lose is added, then the bound holds for the exact product. */
static void bound_segment(const struct score_part *p, uint32_t segment)
{
    const struct digest_layout *l = p->layout;
    const uint8_t *record = score_record(p, segment);
    const uint16_t *tiles = digest_bounds(record, l);
    const float *magnitude = digest_magnitude(record, l);
    uint32_t dim = l->dim;
    float *plus = p->work, *minus = plus + (size_t)SCORE_HEADS * dim, slack[SCORE_HEADS];
    for (uint32_t h0 = 0, n; h0 < p->group; h0 += n) {
        n = p->group - h0 < SCORE_HEADS ? p->group - h0 : SCORE_HEADS;
        for (uint32_t h = 0; h < n; h++) {
            const float *q = p->q + (size_t)(h0 + h) * dim;
            float sum = 0;
            for (uint32_t c = 0; c < dim; c++) {
                plus[h * dim + c] = q[c] > 0 ? q[c] : 0;
                minus[h * dim + c] = q[c] > 0 ? 0 : q[c];
                sum += fabsf(q[c]) * magnitude[c];
            }
            slack[h] = sum * (float)(4 * dim + 16) * 0x1p-24f;
        }
        for (uint32_t p0 = 0; p0 < l->parts; p0 += V16) {
            v16f acc[SCORE_HEADS];
            const uint16_t *at = tiles + (size_t)p0 * dim * 2;
            v16_mask m = alive(p, segment, p0, l->parts) & with_rows(p, record, p0);
            for (uint32_t h = 0; h < SCORE_HEADS; h++)
                acc[h] = v16_zero();
            for (uint32_t c = 0; c < dim; c += 2, at += 4 * (size_t)V16) {
                v16i low = v16i_load(at), high = v16i_load(at + 2 * (size_t)V16);
                v16f low0 = v16_first(low), low1 = v16_second(low);
                v16f high0 = v16_first(high), high1 = v16_second(high);
                for (uint32_t h = 0; h < n; h++) {
                    const float *u = plus + h * dim + c, *v = minus + h * dim + c;
                    acc[h] = v16_fma(high0, v16_set1(u[0]), acc[h]);
                    acc[h] = v16_fma(low0, v16_set1(v[0]), acc[h]);
                    acc[h] = v16_fma(high1, v16_set1(u[1]), acc[h]);
                    acc[h] = v16_fma(low1, v16_set1(v[1]), acc[h]);
                }
            }
            for (uint32_t h = 0; h < n; h++)
                put(p, h0 + h, segment, l->parts, p0, m,
                    v16_mul(v16_add(acc[h], v16_set1(slack[h])), v16_set1(p->a->scale)));
        }
    }
}

/* ---- SCORE_EXACT ----------------------------------------------------------------------------- */

static const uint8_t *page_at(const struct score_part *p, uint32_t page)
{
    const struct kv_memory *kv = p->a->kv;
    block_id b = p->row->blocks[page];
    const uint8_t *base = b & BLOCK_IN_DRAM ? kv->dram[LANE_SPARSE] : kv->hbm[LANE_SPARSE];
    return base + (b & ~BLOCK_IN_DRAM) * kv->geo->block_bytes[LANE_SPARSE] +
           kv_page_offset(kv->geo, p->a->layer, p->head);
}

/* Logits of all rows of a segment, in the order of storage: a chain over the channels for each. */
static void row_logits(const struct score_part *p, uint32_t segment, const float *q, float *out)
{
    const struct kv_geometry *g = p->a->kv->geo;
    uint32_t rows = g->block_rows, page = segment * (SEGMENT_ROWS / rows);
    const bool fp8 = g->type == KV_E4M3;
    const uint32_t pair = 2 * kv_number_bytes(g->type);
    v16f scale = v16_set1(p->a->scale);
    for (uint32_t r = 0; r < SEGMENT_ROWS; r += V16) {
        const uint8_t *a = page_at(p, page + r / rows) + (size_t)(r % rows) * pair, *b = a;
        v16f acc = v16_zero();
        if (rows < V16)
            b = page_at(p, page + r / rows + 1);
        for (uint32_t c = 0; c < g->head_dim;
             c += 2, a += (size_t)rows * pair, b += (size_t)rows * pair) {
            v16i pairs = v16i_load_pairs(a, b, rows < V16, fp8);
            acc = v16_fma(v16_first_of(pairs, fp8), v16_set1(q[c]), acc);
            acc = v16_fma(v16_second_of(pairs, fp8), v16_set1(q[c + 1]), acc);
        }
        v16_store(out + r, v16_mul(acc, scale));
    }
}

/* The greatest of n logits, and the sum of exponentials relative to it. */
static float exp_sum(const float *x, uint32_t n, float *most)
{
    v16f top = v16_set1(-INFINITY), sum = v16_zero(), none = top;
    for (uint32_t i = 0; i < n; i += V16)
        top = v16_max(v16_pick(v16_first_lanes(n - i), v16_load(x + i), none), top);
    *most = v16_hmax(top);
    top = v16_set1(*most);
    for (uint32_t i = 0; i < n; i += V16) {
        v16f e = v16_exp(v16_sub(v16_load(x + i), top));
        sum = v16_add(sum, v16_pick(v16_first_lanes(n - i), e, v16_zero()));
    }
    return v16_hsum(sum);
}

static void exact_segment(const struct score_part *p, uint32_t segment)
{
    const struct digest_desc *d = &p->a->desc;
    const uint8_t *record = score_record(p, segment);
    float *logits = p->work;
    memset(logits + SEGMENT_ROWS, 0, V16 * sizeof *logits); /* read, not used */
    for (uint32_t h = 0; h < p->group; h++) {
        row_logits(p, segment, p->q + (size_t)h * p->a->kv->geo->head_dim, logits);
        for (uint32_t p0 = 0; p0 < d->parts; p0 += V16) {
            v16_mask m = alive(p, segment, p0, d->parts);
            float most[V16] = {0}, sum[V16];
            for (uint32_t i = 0; i < V16; i++) {
                uint32_t first, n = 0;
                sum[i] = 1;
                if (p0 + i < d->parts)
                    n = digest_rows(record, d, p0 + i, &first);
                if (n > 0)
                    sum[i] = exp_sum(logits + first, n, &most[i]);
                else
                    m &= ~(1u << i);
            }
            put(p, h, segment, d->parts, p0, m, v16_add(v16_load(most), v16_log(v16_load(sum))));
        }
    }
}

static void part(const struct score_part *p)
{
    for (uint32_t s = p->begin; s < p->end; s++)
        if (p->a->kind == SCORE_MASS)
            mass_segment(p, s);
        else if (p->a->kind == SCORE_BOUND)
            bound_segment(p, s);
        else
            exact_segment(p, s);
}

/* ---- coarse to fine ------------------------------------------------------------------------------ */

/* Logits are linear in the key: the mean of the logits of coarse digests is the logit of their mean.
 * Those inside the sinks' pages are -inf and do not count. */
static float group_logit(const float *coarse, uint32_t n)
{
    float sum = 0;
    uint32_t count = 0;
    for (uint32_t i = 0; i < n; i++)
        if (coarse[i] > -INFINITY) {
            sum += coarse[i];
            count++;
        }
    return count > 0 ? sum / (float)count : -INFINITY;
}

static void choose(const float *coarse, uint32_t stride, uint32_t group, uint32_t per_group,
                   uint32_t n, uint32_t n_open, uint8_t *open, float *work)
{
    float *share = work, *x = work + n + V16;
    memset(share, 0, (n + V16) * sizeof *share);
    for (uint32_t h = 0; h < group; h++) {
        float most = -INFINITY;
        v16f sum = v16_zero();
        for (uint32_t i = 0; i < n; i++) {
            x[i] = group_logit(coarse + (size_t)h * stride + (size_t)i * per_group, per_group);
            most = x[i] > most ? x[i] : most;
        }
        for (uint32_t i = n; i % V16 != 0; i++)
            x[i] = -INFINITY;
        for (uint32_t i = 0; i < n; i += V16) {
            v16f e = v16_exp(v16_sub(v16_load(x + i), v16_set1(most)));
            sum = v16_add(sum, e);
            v16_store(x + i, e);
        }
        v16f factor = v16_set1(1.0f / v16_hsum(sum));
        for (uint32_t i = 0; i < n; i += V16)
            v16_store(share + i, v16_fma(v16_load(x + i), factor, v16_load(share + i)));
    }
    memset(open, 0, n);
    for (uint32_t k = 0; k < n_open; k++) {
        uint32_t best = n;
        for (uint32_t i = 0; i < n; i++)
            if (!open[i] && (best == n || share[i] > share[best]))
                best = i;
        open[best] = 1;
    }
}
