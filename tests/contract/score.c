/* Scores against float64: the estimate of the mass, the bound, the exact mass; the same bits on every
 * instruction set, for any number of threads and whatever else is in the batch. */
#include "tests/digest_rig.h"
#include "tests/tap.h"

#include <float.h>
#include <stdio.h>

enum { MAX_GROUP = 8 };

static struct digest_desc desc_of(enum digest_order order, enum digest_kind kind, uint32_t parts,
                                  uint32_t outliers)
{
    return (struct digest_desc){
        .order = order, .kind = kind, .parts = parts, .outliers = outliers, .sinks = 16};
}

static struct digest_desc wave(uint32_t rows, uint32_t outliers)
{
    return desc_of(ORDER_BISECT, DIGEST_CENTROID, SEGMENT_ROWS / rows, outliers);
}

static struct rig *sealed(const char *isa, uint32_t threads, struct rig_shape s,
                          struct digest_desc d)
{
    struct rig *r = rig_open(isa, threads, s, d);
    if (r == NULL)
        return NULL;
    rig_fill(r);
    rig_seal_all(r);
    return r;
}

/* A step's queries and what came out. */
struct run {
    const struct rig *r;
    uint32_t group, n_rows, stride;
    struct plan_row rows[8];
    float *qkv, *scores;
    enum score_kind kind;
    float scale, coarse_open;
    uint32_t coarse_group;
    float loud; /* queries are this large */
};

static const float *query(const struct run *x, uint32_t row, uint32_t head, uint32_t h)
{
    size_t width = (size_t)(x->group + 2) * x->r->s.kv_heads * x->r->s.dim;
    return x->qkv + x->rows[row].row * width + (size_t)(head * x->group + h) * x->r->s.dim;
}

static const float *scores_of(const struct run *x, uint32_t row, uint32_t head, uint32_t h)
{
    return x->scores + (((size_t)row * x->r->s.kv_heads + head) * x->group + h) * (size_t)x->stride;
}

/* Rows of one sequence: row i of the batch is i * 2 + 1 and sees segments[i]. */
static void run(struct run *x, const uint32_t *segments, uint32_t layer)
{
    const struct rig_shape *s = &x->r->s;
    size_t width = (size_t)(x->group + 2) * s->kv_heads * s->dim;
    uint32_t most = 0;
    x->scale = 1.0f / sqrtf((float)s->dim);
    x->qkv = mem_alloc(20 * width * sizeof *x->qkv);
    for (uint32_t row = 0; row < 20; row++)
        for (size_t i = 0; i < width; i++)
            x->qkv[row * width + i] = x->loud * rig_noise(row / 2, 3, (uint32_t)i);
    for (uint32_t i = 0; i < x->n_rows; i++) {
        x->rows[i] = (struct plan_row){.row = i * 2 + 1,
                                       .n_segments = segments[i],
                                       .records = x->r->numbers,
                                       .blocks = x->r->blocks,
                                       .top_p = 1};
        most = segments[i] > most ? segments[i] : most;
    }
    x->stride = most * x->r->desc.parts + 3;
    size_t n = (size_t)x->n_rows * s->kv_heads * x->group * x->stride;
    x->scores = mem_alloc(n * sizeof *x->scores);
    for (size_t i = 0; i < n; i++)
        x->scores[i] = NAN;
    struct score_args a = {.kv = &x->r->kv,
                           .kind = x->kind,
                           .desc = x->r->desc,
                           .layer = layer,
                           .heads = x->group * s->kv_heads,
                           .rows = x->rows,
                           .n_rows = x->n_rows,
                           .scale = x->scale,
                           .qkv = x->qkv,
                           .scores = x->scores,
                           .stride = x->stride,
                           .coarse_group = x->coarse_group,
                           .coarse_open = x->coarse_open};
    x->r->be->ops->score(x->r->be, &a);
    CHECK(x->r->be->ops->sync(x->r->be) == OK);
}

static void done(struct run *x)
{
    mem_free(x->qkv);
    mem_free(x->scores);
}

static bool in_sinks(const struct rig *r, uint32_t seg, uint32_t first, uint32_t n)
{
    return seg == 0 && first + n <= rig_sink_rows(r);
}

/* ---- SCORE_MASS ---------------------------------------------------------------------------------- */

/* From digests as decoded, in double. */
static double mass_of_digest(const struct run *x, uint32_t seg, uint32_t lane, uint32_t p,
                             const float *q, uint32_t n)
{
    const struct rig *r = x->r;
    struct digest_layout l = digest_layout_of(r->s.dim, &r->desc);
    double sum = 0;
    for (uint32_t k = 0; k < l.kinds; k++) {
        struct digest_vectors v = digest_vectors_of(rig_record(r, seg, lane), &l, k);
        double dot = 0;
        for (uint32_t c = 0; c < r->s.dim; c++)
            dot += (double)q[c] *
                   ((double)v.base[c] + (double)v.step[c] * v.tiles[digest_byte(r->s.dim, p, c)]);
        sum += (k == 0 ? n - r->desc.outliers : 1) * exp(dot * (double)x->scale);
    }
    return log(sum);
}

static double mass_of_rows(const struct run *x, const double *keys, uint32_t seg, uint32_t first,
                           uint32_t n, const float *q)
{
    double logits[SEGMENT_ROWS], most = -INFINITY, sum = 0;
    uint32_t dim = x->r->s.dim;
    for (uint32_t i = 0; i < n; i++) {
        logits[i] = 0;
        for (uint32_t c = 0; c < dim; c++)
            logits[i] += q[c] * keys[((size_t)seg * SEGMENT_ROWS + first + i) * dim + c];
        logits[i] *= (double)x->scale;
        most = logits[i] > most ? logits[i] : most;
    }
    for (uint32_t i = 0; i < n; i++)
        sum += exp(logits[i] - most);
    return most + log(sum);
}

static void mass_is_the_sum_over_the_digest(void)
{
    struct {
        const char *name;
        struct rig_shape s;
        struct digest_desc d;
        uint32_t group;
    } cases[] = {
        {"R = 8, one outlier, group 3", {8, 2, 2, 64, 3}, wave(8, 1), 3},
        {"R = 16, none, group 1", {16, 1, 1, 128, 2}, wave(16, 0), 1},
        {"R = 16, two outliers, group 7", {16, 1, 1, 64, 2}, wave(16, 2), 7},
        {"R = 32, head_dim 36, group 4", {32, 1, 1, 36, 2}, wave(32, 1), 4},
        {"k-means, group 5", {8, 1, 1, 64, 2}, desc_of(ORDER_KMEANS, DIGEST_CENTROID, 64, 0), 5},
        {"8 ranges in order", {16, 1, 1, 64, 2}, desc_of(ORDER_KEEP, DIGEST_CENTROID, 8, 1), 2}};
    for (uint32_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct rig *r = sealed("auto", 2, cases[i].s, cases[i].d);
        struct run x = {
            .r = r, .group = cases[i].group, .n_rows = 2, .loud = 3, .kind = SCORE_MASS};
        uint32_t segments[] = {r->s.segments, 1}, layer = r->s.layers - 1;
        double worst = 0, real = 0, above = 0;
        uint32_t n_real = 0;
        bool sinks = true;
        run(&x, segments, layer);
        for (uint32_t row = 0; row < 2; row++)
            for (uint32_t head = 0; head < r->s.kv_heads; head++) {
                uint32_t lane = layer * r->s.kv_heads + head;
                double *keys = rig_keys(r, r->blocks, lane, false);
                for (uint32_t at = 0; at < segments[row] * r->desc.parts * x.group; at++) {
                    uint32_t h = at % x.group, p = at / x.group % r->desc.parts, first;
                    uint32_t seg = at / x.group / r->desc.parts;
                    uint32_t n = digest_rows(rig_record(r, seg, lane), &r->desc, p, &first);
                    float got = scores_of(&x, row, head, h)[seg * r->desc.parts + p];
                    const float *q = query(&x, row, head, h);
                    if (in_sinks(r, seg, first, n) || n == 0) {
                        sinks &= got == -INFINITY;
                        continue;
                    }
                    double d = fabs((double)got - mass_of_digest(&x, seg, lane, p, q, n));
                    double e = (double)got - mass_of_rows(&x, keys, seg, first, n, q);
                    worst = d > worst || isnan(d) ? d : worst;
                    real += e * e;
                    above = e > above ? e : above;
                    n_real++;
                }
                mem_free(keys);
            }
        ok(worst < 2e-3, "mass is within 0.002 of the digest's in float64: %s", cases[i].name);
        ok(sinks, "the sinks' partitions and empty ones have no score: %s", cases[i].name);
        ok(above < 0.1, "the estimate is never above the true mass but for rounding (Jensen): %s",
           cases[i].name);
        printf("#   off the digest by %.1e; off the truth by %.3f rms, above it by %.4f at most\n",
               worst, sqrt(real / n_real), above);
        done(&x);
        rig_close(r);
    }
}

/* ---- SCORE_BOUND --------------------------------------------------------------------------------- */

static bool bounds_hold(struct run *x, uint32_t segments, double *loose)
{
    const struct rig *r = x->r;
    struct digest_layout l = digest_layout_of(r->s.dim, &r->desc);
    bool good = true;
    uint32_t n = SEGMENT_ROWS / r->desc.parts;
    run(x, &segments, 0);
    for (uint32_t head = 0; head < r->s.kv_heads; head++) {
        double *keys = rig_keys(r, r->blocks, head, false);
        for (uint32_t h = 0; h < x->group; h++) {
            const float *q = query(x, 0, head, h), *got = scores_of(x, 0, head, h);
            for (uint32_t p = rig_sink_rows(r) / n; p < segments * r->desc.parts; p++) {
                const float *magnitude =
                    digest_magnitude(rig_record(r, p / r->desc.parts, head), &l);
                double most = -INFINITY, bound = 0, weight = 0;
                double low[DIGEST_MAX_DIM], high[DIGEST_MAX_DIM];
                for (uint32_t i = 0; i < n; i++) {
                    const double *k = keys + ((size_t)p * n + i) * r->s.dim;
                    double dot = 0;
                    for (uint32_t c = 0; c < r->s.dim; c++) {
                        dot += (double)q[c] * k[c];
                        low[c] = i == 0 || k[c] < low[c] ? k[c] : low[c];
                        high[c] = i == 0 || k[c] > high[c] ? k[c] : high[c];
                    }
                    most = dot > most ? dot : most;
                }
                for (uint32_t c = 0; c < r->s.dim; c++) {
                    bound += q[c] > 0 ? q[c] * high[c] : q[c] * low[c];
                    weight += fabs((double)q[c]) * (double)magnitude[c];
                }
                good &= (double)got[p] >= most * (double)x->scale;
                double d = fabs((double)got[p] / (double)x->scale - bound) / weight;
                *loose = d > *loose ? d : *loose;
            }
        }
        mem_free(keys);
    }
    done(x);
    return good;
}

static void quest_never_bounds_from_below(void)
{
    struct rig_shape s = {16, 1, 2, 64, 2};
    for (uint32_t isa = 0; isa < ARRAY_LEN(rig_isas); isa++) {
        struct rig *r = rig_open(rig_isas[isa], 1, s, desc_of(ORDER_KEEP, DIGEST_BOUNDS, 64, 0));
        if (r == NULL) {
            tap_skip("Quest's bound", rig_isas[isa]);
            continue;
        }
        struct run x = {.r = r, .group = 3, .n_rows = 1, .kind = SCORE_BOUND};
        double loose = 0;
        rig_fill(r);
        rig_seal_all(r);
        x.loud = 3;
        ok(bounds_hold(&x, 2, &loose), "%s: the bound is never below the true maximum",
           rig_isas[isa]);
        /* all rows of a page equal: the bound is the product itself, and rounding decides */
        for (uint32_t lane = 0; lane < 2; lane++)
            for (uint32_t row = 0; row < 2 * SEGMENT_ROWS; row++)
                for (uint32_t c = 0; c < 64; c++)
                    *rig_at(r, r->blocks, lane, row, c, false) =
                        f32_to_bf16(ldexpf(rig_noise(lane, row / 16, c), (int)(c % 13)));
        rig_seal_all(r);
        x.loud = 1000;
        ok(bounds_hold(&x, 2, &loose), "%s: not where every row of a page is the same",
           rig_isas[isa]);
        ok(loose < 2e-5, "%s: and it is Quest's bound", rig_isas[isa]);
        printf("#   off by %.1e of what its terms weigh\n", loose);
        rig_close(r);
    }
}

/* ---- SCORE_EXACT --------------------------------------------------------------------------------- */

static void exact_is_the_true_mass(void)
{
    struct {
        const char *name;
        struct rig_shape s;
        struct digest_desc d;
    } cases[] = {{"pages of 8", {8, 1, 1, 64, 2}, desc_of(ORDER_KEEP, DIGEST_NONE, 128, 0)},
                 {"pages of 32", {32, 1, 1, 128, 1}, desc_of(ORDER_KEEP, DIGEST_NONE, 32, 0)},
                 {"single rows", {16, 1, 1, 36, 1}, desc_of(ORDER_KEEP, DIGEST_NONE, 1024, 0)},
                 {"bisected pages", {16, 1, 1, 64, 2}, wave(16, 0)},
                 {"k-means", {8, 1, 1, 64, 1}, desc_of(ORDER_KMEANS, DIGEST_CENTROID, 64, 0)}};
    for (uint32_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct rig *r = sealed("auto", 2, cases[i].s, cases[i].d);
        struct run x = {.r = r, .group = 2, .n_rows = 1, .loud = 3, .kind = SCORE_EXACT};
        double worst = 0;
        /* half of the blocks are read from DRAM, in place */
        uint32_t n_blocks = r->s.segments * SEGMENT_ROWS / r->s.rows;
        double *keys = rig_keys(r, r->blocks, 0, false);
        r->dram = mem_alloc(r->arena_bytes);
        memcpy(r->dram, r->arena, r->arena_bytes);
        r->kv.dram[LANE_SPARSE] = r->dram;
        for (uint32_t b = 1; b < n_blocks; b += 2) {
            memset(rig_page(r, r->blocks[b], 0), 0xff, r->geo.page_bytes);
            r->blocks[b] |= BLOCK_IN_DRAM;
        }
        run(&x, &r->s.segments, 0);
        for (uint32_t h = 0; h < 2; h++)
            for (uint32_t p = 0; p < r->s.segments * r->desc.parts; p++) {
                uint32_t seg = p / r->desc.parts, first;
                uint32_t n =
                    digest_rows(rig_record(r, seg, 0), &r->desc, p % r->desc.parts, &first);
                float got = scores_of(&x, 0, 0, h)[p];
                if (n == 0 || in_sinks(r, seg, first, n))
                    continue;
                double d =
                    fabs((double)got - mass_of_rows(&x, keys, seg, first, n, query(&x, 0, 0, h)));
                worst = d > worst || isnan(d) ? d : worst;
            }
        ok(worst < 1e-5, "exact mass within 1e-5 of float64, from both tiers: %s", cases[i].name);
        printf("#   off by %.1e\n", worst);
        done(&x);
        mem_free(keys);
        mem_free(r->dram);
        rig_close(r);
    }
}

/* ---- coarse to fine ------------------------------------------------------------------------------ */

static void coarse_scores_open_the_best_groups(void)
{
    struct rig_shape s = {8, 1, 2, 64, 3};
    uint32_t segments = 3;
    for (uint32_t group = 4; group <= 16; group *= 4) {
        struct rig *r = sealed("auto", 2, s, wave(8, 1));
        struct run all = {.r = r, .group = 3, .n_rows = 1, .loud = 3, .kind = SCORE_MASS};
        struct run some = all;
        some.coarse_group = group;
        some.coarse_open = 0.25f;
        run(&all, &segments, 0);
        run(&some, &segments, 0);
        uint32_t parts = 3 * 128, n = parts / group;
        bool equal = true, whole = true, best = true;
        for (uint32_t head = 0; head < 2; head++) {
            double share[96] = {0}, worst_open = INFINITY, best_closed = 0;
            uint32_t n_open = 0;
            for (uint32_t h = 0; h < 3; h++) { /* groups by the mean of their centroids */
                struct digest_layout l = digest_layout_of(64, &r->desc);
                double x[96], sum = 0;
                for (uint32_t g = 0; g < n; g++) {
                    uint32_t seg = g * group / 128, count = 0;
                    struct digest_vectors v = digest_vectors_of(rig_record(r, seg, head), &l, 0);
                    x[g] = 0;
                    for (uint32_t p = g * group; p < (g + 1) * group; p++)
                        for (uint32_t c = 0; c < 64 && p >= 2; c++) {
                            x[g] += (double)query(&all, 0, head, h)[c] *
                                    (double)digest_vector_get(&v, 64, p % 128, c);
                            count += c == 0;
                        }
                    /* a coarse digest of four pages that are half sinks weighs as much as another */
                    x[g] *= (double)all.scale / count;
                    sum += exp(x[g]);
                }
                for (uint32_t g = 0; g < n; g++)
                    share[g] += exp(x[g]) / sum;
            }
            for (uint32_t g = 0; g < n; g++) {
                bool open = scores_of(&some, 0, head, 0)[g * group + 2] > -INFINITY;
                n_open += open;
                if (open)
                    worst_open = share[g] < worst_open ? share[g] : worst_open;
                else
                    best_closed = share[g] > best_closed ? share[g] : best_closed;
                for (uint32_t h = 0; h < 3; h++)
                    for (uint32_t p = g * group; p < (g + 1) * group; p++) {
                        float got = scores_of(&some, 0, head, h)[p];
                        whole &= p < 2 || (got > -INFINITY) == open;
                        equal &= got == -INFINITY || got == scores_of(&all, 0, head, h)[p];
                    }
            }
            best &= best_closed < worst_open * 1.05;
            whole &= n_open == (n + 3) / 4;
        }
        ok(equal, "what is opened has the scores it would have anyway, groups of %u", group);
        ok(whole, "a quarter of the groups is opened, whole groups of %u", group);
        ok(best, "and those are the ones whose mean centroids weigh most, groups of %u", group);
        done(&all);
        done(&some);
        rig_close(r);
    }
}

/* ---- the same everywhere -------------------------------------------------------------------------- */

static void scores_depend_on_their_row_alone(void)
{
    struct {
        enum score_kind kind;
        struct digest_desc d;
        uint32_t coarse;
    } cases[] = {{SCORE_MASS, wave(8, 1), 0},
                 {SCORE_MASS, wave(8, 2), 8},
                 {SCORE_MASS, desc_of(ORDER_KMEANS, DIGEST_CENTROID, 64, 0), 0},
                 {SCORE_BOUND, desc_of(ORDER_KEEP, DIGEST_BOUNDS, 128, 0), 0},
                 {SCORE_EXACT, desc_of(ORDER_KEEP, DIGEST_NONE, 128, 0), 0}};
    static const char *const names[] = {"mass", "coarse to fine", "k-means", "bound", "exact"};
    struct rig_shape s = {8, 1, 2, 64, 3};
    for (uint32_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct rig *one = sealed("scalar", 1, s, cases[i].d);
        struct run alone = {.r = one,
                            .group = 5,
                            .n_rows = 1,
                            .loud = 3,
                            .kind = cases[i].kind,
                            .coarse_group = cases[i].coarse,
                            .coarse_open = 0.3f};
        uint32_t three = 3;
        run(&alone, &three, 0);
        for (uint32_t isa = 0; isa < ARRAY_LEN(rig_isas); isa++) {
            struct rig *r = sealed(rig_isas[isa], 3, s, cases[i].d);
            if (r == NULL) {
                tap_skip("the same scores", rig_isas[isa]);
                continue;
            }
            struct run many = alone;
            uint32_t segments[] = {3, 1, 0, 2, 3};
            bool same = true;
            many.r = r;
            many.n_rows = 5;
            run(&many, segments, 0);
            for (uint32_t head = 0; head < 2; head++)
                for (uint32_t h = 0; h < 5; h++)
                    same &= memcmp(scores_of(&alone, 0, head, h), scores_of(&many, 0, head, h),
                                   3 * cases[i].d.parts * sizeof(float)) == 0;
            ok(same, "%s, 3 threads, in a batch: the bits of one scalar thread alone, %s",
               rig_isas[isa], names[i]);
            done(&many);
            rig_close(r);
        }
        done(&alone);
        rig_close(one);
    }
}

static void large_and_zero_queries_have_scores(void)
{
    static const float loudness[] = {0, 1e-20f, 300, 1e6f};
    struct rig_shape s = {8, 1, 1, 64, 1};
    struct rig *r = sealed("auto", 1, s, wave(8, 1));
    uint32_t one = 1;
    for (uint32_t i = 0; i < ARRAY_LEN(loudness); i++) {
        struct run x = {.r = r, .group = 3, .n_rows = 1, .loud = loudness[i], .kind = SCORE_MASS};
        bool finite = true;
        run(&x, &one, 0);
        for (uint32_t p = 2; p < 128; p++)
            finite &= isfinite(scores_of(&x, 0, 0, 1)[p]) != 0;
        ok(finite, "queries of size %g have finite scores", (double)loudness[i]);
        if (loudness[i] < 1e-10f)
            ok(fabsf(scores_of(&x, 0, 0, 0)[5] - logf(8)) < 1e-5f,
               "and without a query a page weighs its rows");
        done(&x);
    }
    rig_close(r);
}

int main(void)
{
    mass_is_the_sum_over_the_digest();
    quest_never_bounds_from_below();
    exact_is_the_true_mass();
    coarse_scores_open_the_best_groups();
    scores_depend_on_their_row_alone();
    large_and_zero_queries_have_scores();
    return tap_done();
}
