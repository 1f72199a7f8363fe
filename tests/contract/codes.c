/* Row codes against float64: what they keep of rows, the mass they give to pages, the V they add to
 * estimates; the same bits on every instruction set and for any number of threads. */
#include "tests/digest_rig.h"
#include "tests/tap.h"

#include <float.h>
#include <stdio.h>

enum { MAX_DIM = 128, GROUP = 3 };

static struct digest_desc codes_of(uint32_t rows)
{
    return (struct digest_desc){.order = ORDER_BISECT,
                                .kind = DIGEST_CODES,
                                .parts = SEGMENT_ROWS / rows,
                                .sinks = rows > 16 ? rows : 16,
                                .values = true};
}

static struct rig *sealed(const char *isa, uint32_t threads, struct rig_shape s)
{
    struct rig *r = rig_open(isa, threads, s, codes_of(s.rows));
    if (r == NULL)
        return NULL;
    rig_fill(r);
    rig_seal_all(r);
    return r;
}

/* ---- reading codes as the header says, in double ---- */

struct reader {
    const struct rig *r;
    struct digest_layout l;
    const uint8_t *record, *codes, *basis; /* of the segment; of segment 0 */
};

static struct reader reader_of(const struct rig *r, uint32_t seg, uint32_t lane)
{
    struct reader d = {.r = r, .l = digest_layout_of(r->s.dim, &r->desc)};
    d.record = rig_record(r, seg, lane);
    d.codes = d.record + d.l.codes;
    d.basis = rig_record(r, 0, lane) + d.l.codes;
    return d;
}

static double scale_of(uint8_t code)
{
    return ldexp(1.0 + code % 8 / 8.0, code / 8 - CODES_SCALE_EXP);
}

static double bf16_at(const uint8_t *p, size_t i)
{
    uint16_t x;
    memcpy(&x, p + i * 2, 2);
    return (double)bf16_to_f32(x);
}

static double sd_at(const uint8_t *basis, uint32_t j)
{
    float x;
    memcpy(&x, basis + j * sizeof x, sizeof x);
    return (double)x;
}

static double k_direction(const struct reader *d, uint32_t j, uint32_t c)
{
    const uint8_t *b = d->basis + codes_k_basis(true);
    return bf16_at(b + CODES_K * sizeof(float), (size_t)c * CODES_K + j);
}

static double v_direction(const struct reader *d, uint32_t j, uint32_t c)
{
    const uint8_t *b = d->basis + codes_v_basis(d->l.dim);
    return bf16_at(b + CODES_V * sizeof(float), (size_t)j * d->l.dim + c);
}

/* What the code adds to the centroid. */
static void k_offset(const struct reader *d, uint32_t row, double *out)
{
    uint32_t rows = d->r->s.rows, p = row / rows, i = row % rows;
    double scale = scale_of(d->codes[codes_k_scale(p, i, rows)]);
    memset(out, 0, d->l.dim * sizeof *out);
    for (uint32_t j = 0; j < CODES_K; j++) {
        uint32_t n = d->codes[codes_k_byte(p, i, j, rows)] >> codes_shift(j) & 3;
        double y =
            scale * sd_at(d->basis + codes_k_basis(true), j) * (double)CODES_STEP * (n - 1.5);
        for (uint32_t c = 0; c < d->l.dim; c++)
            out[c] += y * k_direction(d, j, c);
    }
}

static void v_offset(const struct reader *d, uint32_t row, double *out)
{
    double scale = scale_of(d->codes[codes_v_scales() + row]);
    memset(out, 0, d->l.dim * sizeof *out);
    for (uint32_t j = 0; j < CODES_V; j++) {
        uint32_t n = d->codes[codes_v_byte(row, j)] >> codes_shift(row) & 3;
        double y =
            scale * sd_at(d->basis + codes_v_basis(d->l.dim), j) * (double)CODES_STEP * (n - 1.5);
        for (uint32_t c = 0; c < d->l.dim; c++)
            out[c] += y * v_direction(d, j, c);
    }
}

static double k_mean(const struct reader *d, uint32_t p, uint32_t c)
{
    struct digest_vectors v = digest_vectors_of(d->record, &d->l, 0);
    return (double)digest_vector_get(&v, d->l.dim, p, c);
}

static double v_mean(const struct reader *d, uint32_t p, uint32_t c)
{
    return (double)digest_value_scale(d->record, &d->l, p) * digest_value(d->record, &d->l, p)[c];
}

/* ---- what a seal keeps ---- */

/* Greatest eigenvalues of a symmetric matrix, in order: Jacobi's rotations. */
static void eigenvalues(double *a, uint32_t n, double *out)
{
    for (uint32_t sweep = 0; sweep < 12; sweep++)
        for (uint32_t p = 0; p < n; p++)
            for (uint32_t q = p + 1; q < n; q++) {
                double off = a[p * n + q];
                if (fabs(off) < 1e-300)
                    continue;
                double t = (a[q * n + q] - a[p * n + p]) / (2 * off);
                t = (t >= 0 ? 1 : -1) / (fabs(t) + sqrt(t * t + 1));
                double c = 1 / sqrt(t * t + 1), s = t * c;
                for (uint32_t i = 0; i < n; i++) {
                    double x = a[i * n + p], y = a[i * n + q];
                    a[i * n + p] = c * x - s * y;
                    a[i * n + q] = s * x + c * y;
                }
                for (uint32_t i = 0; i < n; i++) {
                    double x = a[p * n + i], y = a[q * n + i];
                    a[p * n + i] = c * x - s * y;
                    a[q * n + i] = s * x + c * y;
                }
            }
    for (uint32_t i = 0; i < n; i++) {
        uint32_t at = i;
        for (; at > 0 && out[at - 1] < a[i * n + i]; at--)
            out[at] = out[at - 1];
        out[at] = a[i * n + i];
    }
}

struct kept {
    double share;           /* of the variance of distances that a perfect basis has, ours has */
    double skew, sd;        /* worst product of two directions; worst sd against its variance */
    double coded, possible; /* variance that codes leave, and what is not in the directions */
};

static struct kept kept_of(const struct rig *r, uint32_t lane, bool value)
{
    static double cov[MAX_DIM * MAX_DIM], x[MAX_DIM], at[MAX_DIM];
    struct reader d = reader_of(r, 0, lane);
    struct kept k = {0};
    uint32_t dim = r->s.dim, dirs = value ? CODES_V : CODES_K, sinks = rig_sink_rows(r);
    double *rows = rig_keys(r, r->blocks, lane, value), values[MAX_DIM], all = 0, best = 0;
    double var[CODES_K] = {0}, n = SEGMENT_ROWS - sinks;
    memset(cov, 0, sizeof cov);
    for (uint32_t row = sinks; row < SEGMENT_ROWS; row++) {
        double inside = 0, own = 0, left = 0;
        for (uint32_t c = 0; c < dim; c++) {
            uint32_t p = row / r->s.rows;
            x[c] = rows[(size_t)row * dim + c] - (value ? v_mean(&d, p, c) : k_mean(&d, p, c));
            own += x[c] * x[c];
        }
        for (uint32_t a = 0; a < dim; a++)
            for (uint32_t b = 0; b < dim; b++)
                cov[a * dim + b] += x[a] * x[b];
        for (uint32_t j = 0; j < dirs; j++) {
            double y = 0;
            for (uint32_t c = 0; c < dim; c++)
                y += x[c] * (value ? v_direction(&d, j, c) : k_direction(&d, j, c));
            var[j] += y * y / n;
            inside += y * y;
        }
        if (value)
            v_offset(&d, row, at);
        else
            k_offset(&d, row, at);
        for (uint32_t c = 0; c < dim; c++)
            left += (x[c] - at[c]) * (x[c] - at[c]);
        all += own;
        best += inside;
        k.coded += left;
    }
    k.possible = (all - best) / all;
    k.coded /= all;
    eigenvalues(cov, dim, values);
    double most = 0;
    for (uint32_t j = 0; j < dirs && j < dim; j++)
        most += values[j];
    k.share = best / most;
    for (uint32_t i = 0; i < dirs && i < dim; i++) {
        const uint8_t *b = d.basis + (value ? codes_v_basis(dim) : codes_k_basis(true));
        double off = fabs(sd_at(b, i) / sqrt(var[i]) - 1);
        k.sd = off > k.sd ? off : k.sd;
        for (uint32_t j = 0; j <= i; j++) {
            double dot = i == j ? -1 : 0;
            for (uint32_t c = 0; c < dim; c++)
                dot += value ? v_direction(&d, i, c) * v_direction(&d, j, c)
                             : k_direction(&d, i, c) * k_direction(&d, j, c);
            k.skew = fabs(dot) > k.skew ? fabs(dot) : k.skew;
        }
    }
    mem_free(rows);
    return k;
}

static void codes_keep_what_matters_of_rows(void)
{
    static const struct rig_shape shapes[] = {{8, 1, 2, 64, 1},
                                              {16, 1, 1, 128, 1},
                                              {32, 1, 1, 64, 1},
                                              {8, 1, 1, 20, 1},
                                              {8, 1, 1, 40, 1}};
    for (uint32_t i = 0; i < ARRAY_LEN(shapes); i++)
        for (int value = 0; value < 2; value++) {
            struct rig *r = sealed("auto", 1, shapes[i]);
            struct kept k = kept_of(r, shapes[i].kv_heads - 1, value != 0);
            ok(k.share > 0.99, "R = %u, %u numbers, %s: directions have 99 %% of what can be had",
               shapes[i].rows, shapes[i].dim, value ? "V" : "K");
            ok(k.skew < 0.01 && k.sd < 0.01, "they are orthonormal, and sd is theirs");
            ok(k.coded < k.possible + 0.16 * (1 - k.possible),
               "2 bits leave a seventh of what lies in them");
            printf("#   share %.4f, skew %.4f, sd %.4f; left %.3f of %.3f outside\n", k.share,
                   k.skew, k.sd, k.coded, k.possible);
            rig_close(r);
        }
}

/* ---- scores ---- */

struct run {
    float *qkv, *scores;
    uint32_t stride;
    double scale;
};

static struct run score(const struct rig *r, float loud, uint32_t coarse_group)
{
    size_t width = (size_t)(GROUP + 2) * r->s.kv_heads * r->s.dim;
    struct run x = {.scale = 1 / sqrt(r->s.dim), .stride = r->s.segments * r->desc.parts};
    struct plan_row row = {
        .n_segments = r->s.segments, .records = r->numbers, .blocks = r->blocks, .top_p = 1};
    size_t n = (size_t)r->s.kv_heads * GROUP * x.stride;
    x.qkv = mem_alloc(width * sizeof *x.qkv);
    x.scores = mem_alloc(n * sizeof *x.scores);
    for (size_t i = 0; i < width; i++)
        x.qkv[i] = loud * rig_noise(5, 3, (uint32_t)i);
    for (size_t i = 0; i < n; i++)
        x.scores[i] = NAN;
    struct score_args a = {.kv = &r->kv,
                           .kind = SCORE_MASS,
                           .desc = r->desc,
                           .layer = r->s.layers - 1,
                           .heads = GROUP * r->s.kv_heads,
                           .rows = &row,
                           .n_rows = 1,
                           .scale = (float)x.scale,
                           .qkv = x.qkv,
                           .scores = x.scores,
                           .stride = x.stride,
                           .coarse_group = coarse_group,
                           .coarse_open = 0.5f};
    r->be->ops->score(r->be, &a);
    CHECK(r->be->ops->sync(r->be) == OK);
    return x;
}

static void done(struct run *x)
{
    mem_free(x->qkv);
    mem_free(x->scores);
}

static double log_sum(const double *x, uint32_t n)
{
    double top = -INFINITY, sum = 0;
    for (uint32_t i = 0; i < n; i++)
        top = x[i] > top ? x[i] : top;
    for (uint32_t i = 0; i < n; i++)
        sum += exp(x[i] - top);
    return top + log(sum);
}

static void mass_is_the_sum_over_the_codes(void)
{
    static const struct rig_shape shapes[] = {
        {8, 1, 2, 64, 3}, {16, 1, 1, 128, 2}, {32, 1, 1, 64, 1}, {8, 1, 1, 20, 1}};
    for (uint32_t s = 0; s < ARRAY_LEN(shapes); s++) {
        struct rig *r = sealed("auto", 1, shapes[s]);
        struct run x = score(r, 1.5f, 0);
        uint32_t dim = r->s.dim, rows = r->s.rows, lane = r->s.kv_heads - 1;
        double *keys = rig_keys(r, r->blocks, lane, false), worst = 0, off = 0, mean_off = 0, n = 0;
        for (uint32_t p = rig_sink_rows(r) / rows; p < x.stride; p++) {
            struct reader d = reader_of(r, p / r->desc.parts, lane);
            for (uint32_t h = 0; h < GROUP; h++) {
                const float *q = x.qkv + (size_t)(lane * GROUP + h) * dim;
                double coded[32], exact[32], mean = 0, delta[MAX_DIM];
                for (uint32_t c = 0; c < dim; c++)
                    mean += (double)q[c] * k_mean(&d, p % r->desc.parts, c) * x.scale;
                for (uint32_t i = 0; i < rows; i++) {
                    k_offset(&d, p % r->desc.parts * rows + i, delta);
                    coded[i] = mean;
                    exact[i] = 0;
                    for (uint32_t c = 0; c < dim; c++) {
                        coded[i] += (double)q[c] * delta[c] * x.scale;
                        exact[i] += (double)q[c] * keys[((size_t)p * rows + i) * dim + c] * x.scale;
                    }
                }
                double got = (double)x.scores[(size_t)(lane * GROUP + h) * x.stride + p];
                double want = log_sum(coded, rows), truth = log_sum(exact, rows);
                worst = fabs(got - want) > worst ? fabs(got - want) : worst;
                off += (got - truth) * (got - truth);
                mean_off += (mean + log(rows) - truth) * (mean + log(rows) - truth);
                n++;
            }
        }
        ok(worst < 0.05, "R = %u, %u numbers: scores within 0.05 of the codes' in float64", rows,
           dim);
        ok(off < 0.5 * mean_off, "and their squared error is half of the centroid's, at most");
        printf("#   off the codes by %.4f at most; off the truth by %.3f rms, centroids by %.3f\n",
               worst, sqrt(off / n), sqrt(mean_off / n));
        done(&x);
        mem_free(keys);
        rig_close(r);
    }
}

static void every_machine_has_the_same_bits(void)
{
    static const struct rig_shape shapes[] = {
        {8, 2, 3, 64, 2}, {16, 1, 2, 36, 2}, {32, 1, 1, 128, 1}};
    for (uint32_t s = 0; s < ARRAY_LEN(shapes); s++) {
        struct rig *one = sealed("scalar", 1, shapes[s]);
        struct run want = score(one, 1, 0), coarse = score(one, 1, shapes[s].rows == 8 ? 16 : 4);
        size_t n = (size_t)one->s.kv_heads * GROUP * want.stride * sizeof(float);
        for (uint32_t isa = 0; isa < ARRAY_LEN(rig_isas); isa++) {
            struct rig *r = sealed(rig_isas[isa], 3, shapes[s]);
            if (r == NULL) {
                tap_skip("the same bits", rig_isas[isa]);
                continue;
            }
            struct run got = score(r, 1, 0), half = score(r, 1, shapes[s].rows == 8 ? 16 : 4);
            ok(memcmp(r->records, one->records, r->record_total) == 0,
               "%s, 3 threads: the records of one scalar thread, R = %u", rig_isas[isa],
               shapes[s].rows);
            ok(memcmp(got.scores, want.scores, n) == 0 &&
                   memcmp(half.scores, coarse.scores, n) == 0,
               "and its scores, coarse to fine too");
            done(&got);
            done(&half);
            rig_close(r);
        }
        uint32_t open = 0, equal = 0;
        for (size_t i = 0; i < n / sizeof(float); i++)
            if (coarse.scores[i] > -INFINITY) {
                open++;
                equal += memcmp(&coarse.scores[i], &want.scores[i], sizeof(float)) == 0;
            }
        ok(open > 0 && open == equal && open < n / sizeof(float) * 6 / 10,
           "what a coarse pass opens has the scores it would have anyway");
        done(&want);
        done(&coarse);
        rig_close(one);
    }
}

/* A row that lies where no other of its page does, and a query for it. */
static void a_needle_is_found_among_its_page(void)
{
    struct rig_shape shape = {8, 1, 1, 64, 2};
    uint32_t found = 0, by_mean = 0, tried = 0;
    for (uint32_t row = SEGMENT_ROWS + 5; row < 2 * SEGMENT_ROWS; row += 97) {
        struct rig *r = rig_open("auto", 1, shape, codes_of(8));
        float at[64];
        rig_fill(r);
        for (uint32_t c = 0; c < 64; c++) { /* to the row's own key, a direction of the others */
            float y = rig_key(0, row + 200 < 2 * SEGMENT_ROWS ? row + 200 : row - 200, c);
            at[c] = rig_key(0, row, c) + 1.5f * (y - rig_key(0, row, c));
            *rig_at(r, r->blocks, 0, row, c, false) = f32_to_bf16(at[c]);
        }
        rig_seal_all(r);
        struct run x = score(r, 0, 0);
        for (uint32_t c = 0; c < 64; c++)
            x.qkv[c] = 1.2f * (at[c] - (c % 16 == 3 ? 6.0f * rig_noise(0, 9, c) : 0));
        struct plan_row plan = {
            .n_segments = 2, .records = r->numbers, .blocks = r->blocks, .top_p = 1};
        struct score_args a = {.kv = &r->kv,
                               .kind = SCORE_MASS,
                               .desc = r->desc,
                               .heads = GROUP,
                               .rows = &plan,
                               .n_rows = 1,
                               .scale = 0.125f,
                               .qkv = x.qkv,
                               .scores = x.scores,
                               .stride = x.stride};
        r->be->ops->score(r->be, &a);
        CHECK(r->be->ops->sync(r->be) == OK);
        const uint16_t *map = (const void *)rig_record(r, 1, 0);
        uint32_t page = 0, above = 0, above_mean = 0;
        for (uint32_t i = 0; i < SEGMENT_ROWS; i++)
            page = map[i] == row - SEGMENT_ROWS ? 128 + i / 8 : page;
        double mean[256];
        for (uint32_t p = 2; p < 256; p++) {
            struct reader d = reader_of(r, p / 128, 0);
            mean[p] = 0;
            for (uint32_t c = 0; c < 64; c++)
                mean[p] += (double)x.qkv[c] * k_mean(&d, p % 128, c);
            above += x.scores[p] > x.scores[page];
        }
        for (uint32_t p = 2; p < 256; p++)
            above_mean += mean[p] > mean[page];
        tried++;
        found += above < 3;
        by_mean += above_mean < 3;
        done(&x);
        rig_close(r);
    }
    ok(found == tried && by_mean < tried,
       "a row's query finds its page among the best three of 254 (%u of %u)", found, tried);
    printf("#   centroids alone: %u\n", by_mean);
}

static void segments_without_shape_are_safe(void)
{
    static const char *const names[] = {
        "one key everywhere",    "zeros",       "two keys", "huge keys",
        "only the sinks differ", "NaN in a row"};
    for (uint32_t kind = 0; kind < ARRAY_LEN(names); kind++) {
        struct rig *one = NULL;
        bool finite = true, same = true;
        for (uint32_t isa = 0; isa < ARRAY_LEN(rig_isas); isa++) {
            struct rig *r =
                rig_open(rig_isas[isa], 1, (struct rig_shape){8, 1, 1, 64, 2}, codes_of(8));
            if (r == NULL)
                continue;
            rig_fill(r); /* segment 1 is as ever: it must do with what segment 0 is */
            for (uint32_t row = 0; row < SEGMENT_ROWS; row++)
                for (uint32_t c = 0; c < 64; c++)
                    for (int v = 0; v < 2; v++) {
                        float x = kind == 0   ? rig_noise(1, 1, c)
                                  : kind == 1 ? 0
                                  : kind == 2 ? rig_noise(row % 3 == 0, 2, c)
                                  : kind == 3 ? 1e15f * rig_noise(row, 3, c)
                                              : rig_noise(row < 16 ? row : 16, 4, c);
                        if (kind == 5)
                            x = row == 700 && c == 9 ? NAN : rig_noise(row, 4, c);
                        *rig_at(r, r->blocks, 0, row, c, v != 0) = f32_to_bf16(x);
                    }
            rig_seal_all(r);
            struct run x = score(r, 1, 0);
            for (uint32_t p = kind == 5 ? 128 : 2; p < 256; p++)
                finite &= isfinite(x.scores[p]) != 0;
            struct reader d = reader_of(r, 0, 0);
            for (uint32_t j = 0; j < CODES_K; j++) {
                finite &= isfinite(sd_at(d.basis + codes_k_basis(true), j)) != 0;
                for (uint32_t c = 0; c < 64; c++)
                    finite &= isfinite(k_direction(&d, j, c)) != 0;
            }
            done(&x);
            if (one == NULL)
                one = r;
            else
                same &= memcmp(r->records, one->records, r->record_total) == 0;
            if (r != one)
                rig_close(r);
        }
        ok(finite, "%s in segment 0: every direction and score is a number", names[kind]);
        if (kind != 5) /* what NaN rounds to is the machine's */
            ok(same, "and the same on every machine");
        rig_close(one);
    }
}

/* Records of later segments hang on segment 0 alone. */
static void a_prefix_fixes_its_directions(void)
{
    struct rig *a = sealed("auto", 1, (struct rig_shape){8, 1, 2, 64, 3});
    struct rig *b = rig_open("auto", 1, (struct rig_shape){8, 1, 2, 64, 3}, codes_of(8));
    rig_fill(b);
    for (uint32_t c = 0; c < 64; c++)
        *rig_at(b, b->blocks, 1, SEGMENT_ROWS + 77, c, false) = f32_to_bf16(rig_noise(3, 3, c));
    rig_seal_all(b);
    size_t n = a->kv.record_bytes;
    ok(memcmp(rig_record(a, 0, 0), rig_record(b, 0, 0), n) == 0 &&
           memcmp(rig_record(a, 1, 0), rig_record(b, 1, 0), n) != 0 &&
           memcmp(rig_record(a, 2, 0), rig_record(b, 2, 0), n) == 0,
       "a row of segment 1 changes the record of segment 1 and of no other");
    rig_close(a);
    rig_close(b);
}

/* ---- estimates ---- */

/* One row by plan: the sinks, every third page behind them estimated, and a tail. */
struct plan {
    const struct rig *r;
    struct run x;
    struct plan_row row;
    uint32_t *pages, *n_pages, *estimates, *n_estimates, n;
    float *out;
};

static struct plan attend(const struct rig *r)
{
    uint32_t heads = r->s.kv_heads, n_segments = r->s.segments - 1;
    struct plan p = {.r = r, .x = score(r, 1.5f, 0)};
    p.row = (struct plan_row){.pos = n_segments * SEGMENT_ROWS + 69,
                              .n_segments = n_segments,
                              .records = r->numbers,
                              .blocks = r->blocks,
                              .top_p = 1};
    uint32_t sinks = rig_sink_rows(r) / r->s.rows, cap = n_segments * r->desc.parts;
    p.pages = mem_alloc(heads * sinks * sizeof *p.pages);
    p.n_pages = mem_alloc(heads * sizeof *p.n_pages);
    p.estimates = mem_alloc((size_t)heads * cap * sizeof *p.estimates);
    p.n_estimates = mem_alloc(heads * sizeof *p.n_estimates);
    p.out = mem_alloc((size_t)heads * GROUP * r->s.dim * sizeof *p.out);
    for (uint32_t h = 0; h < heads; h++) {
        p.n_pages[h] = sinks;
        for (uint32_t i = 0; i < sinks; i++)
            p.pages[h * sinks + i] = r->blocks[i];
        for (p.n = 0; sinks + p.n * 3 < cap; p.n++)
            p.estimates[h * cap + p.n] = sinks + p.n * 3;
        p.n_estimates[h] = p.n;
    }
    struct attend_plans plans = {.desc = r->desc,
                                 .rows = &p.row,
                                 .n_rows = 1,
                                 .page_cap = sinks,
                                 .estimate_cap = cap,
                                 .stride = p.x.stride,
                                 .pages = p.pages,
                                 .n_pages = p.n_pages,
                                 .estimates = p.estimates,
                                 .n_estimates = p.n_estimates,
                                 .scores = p.x.scores};
    struct batch_seq seq = {
        .n_rows = 1, .first_pos = p.row.pos, .blocks = {r->blocks}, .planned = true};
    struct attend_args a = {.kv = &r->kv,
                            .layer = r->s.layers - 1,
                            .heads = GROUP * heads,
                            .seqs = &seq,
                            .n_seqs = 1,
                            .scale = (float)p.x.scale,
                            .qkv = p.x.qkv,
                            .plans = &plans,
                            .n_plans = 1,
                            .out = p.out};
    r->be->ops->attend(r->be, &a);
    return p;
}

static void drop(struct plan *p)
{
    done(&p->x);
    mem_free(p->pages);
    mem_free(p->n_pages);
    mem_free(p->estimates);
    mem_free(p->n_estimates);
    mem_free(p->out);
}

/* What one query head must get, with codes of V and with its mean alone. */
static void refer(const struct plan *p, uint32_t lane, uint32_t h, double *want, double *plain)
{
    const struct rig *r = p->r;
    uint32_t dim = r->s.dim, rows = r->s.rows, head = lane % r->s.kv_heads * GROUP + h;
    const float *q = p->x.qkv + (size_t)head * dim,
                *scores = p->x.scores + (size_t)head * p->x.stride;
    double *keys = rig_keys(r, r->blocks, lane, false),
           *values = rig_keys(r, r->blocks, lane, true);
    double total = 0, delta[MAX_DIM];
    memset(want, 0, dim * sizeof *want);
    memset(plain, 0, dim * sizeof *plain);
    for (uint32_t pos = 0; pos <= p->row.pos; pos++) {
        if (pos >= rig_sink_rows(r) && pos < p->row.n_segments * SEGMENT_ROWS)
            continue;
        double x = 0;
        for (uint32_t c = 0; c < dim; c++)
            x += (double)q[c] * keys[(size_t)pos * dim + c] * p->x.scale;
        total += exp(x);
        for (uint32_t c = 0; c < dim; c++) {
            want[c] += exp(x) * values[(size_t)pos * dim + c];
            plain[c] += exp(x) * values[(size_t)pos * dim + c];
        }
    }
    for (uint32_t e = 0; e < p->n; e++) {
        uint32_t part = p->estimates[e];
        struct reader d = reader_of(r, part / r->desc.parts, lane);
        double w = exp((double)scores[part]), x[32], all;
        part %= r->desc.parts;
        for (uint32_t i = 0; i < rows; i++) {
            k_offset(&d, part * rows + i, delta);
            x[i] = 0;
            for (uint32_t c = 0; c < dim; c++)
                x[i] += (double)q[c] * delta[c] * p->x.scale;
        }
        all = log_sum(x, rows);
        total += w;
        for (uint32_t c = 0; c < dim; c++) {
            want[c] += w * v_mean(&d, part, c);
            plain[c] += w * v_mean(&d, part, c);
        }
        for (uint32_t i = 0; i < rows; i++) {
            v_offset(&d, part * rows + i, delta);
            for (uint32_t c = 0; c < dim; c++)
                want[c] += w * exp(x[i] - all) * delta[c];
        }
    }
    for (uint32_t c = 0; c < dim; c++) {
        want[c] /= total;
        plain[c] /= total;
    }
    mem_free(keys);
    mem_free(values);
}

static void estimates_add_what_rows_are_beside_the_mean(void)
{
    static const struct rig_shape shapes[] = {
        {8, 1, 2, 64, 3}, {16, 1, 1, 128, 2}, {8, 1, 1, 20, 2}};
    for (uint32_t s = 0; s < ARRAY_LEN(shapes); s++)
        for (uint32_t isa = 0; isa < ARRAY_LEN(rig_isas); isa++) {
            struct rig *r = sealed(rig_isas[isa], 1, shapes[s]);
            struct rig *three = sealed(rig_isas[isa], 3, shapes[s]);
            if (r == NULL) {
                tap_skip("estimates", rig_isas[isa]);
                continue;
            }
            struct plan p = attend(r), q = attend(three);
            uint32_t dim = r->s.dim, lane = r->s.kv_heads - 1;
            double off = 0, effect = 0, want[MAX_DIM], plain[MAX_DIM];
            for (uint32_t h = 0; h < GROUP; h++) {
                refer(&p, lane, h, want, plain);
                for (uint32_t c = 0; c < dim; c++) {
                    double d = (double)p.out[(lane * GROUP + h) * dim + c] - want[c];
                    off += d * d;
                    effect += (want[c] - plain[c]) * (want[c] - plain[c]);
                }
            }
            ok(off < 0.05 * 0.05 * effect,
               "%s, R = %u, %u numbers: what codes of V add is that of float64 within 5 %%",
               rig_isas[isa], r->s.rows, dim);
            ok(memcmp(p.out, q.out, (size_t)r->s.kv_heads * GROUP * dim * sizeof(float)) == 0,
               "and the same for 3 threads");
            printf("#   off by %.4f of it\n", sqrt(off / effect));
            drop(&p);
            drop(&q);
            rig_close(r);
            rig_close(three);
        }
}

int main(void)
{
    codes_keep_what_matters_of_rows();
    mass_is_the_sum_over_the_codes();
    every_machine_has_the_same_bits();
    a_needle_is_found_among_its_page();
    segments_without_shape_are_safe();
    a_prefix_fixes_its_directions();
    estimates_add_what_rows_are_beside_the_mean();
    return tap_done();
}
