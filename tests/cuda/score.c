/* Scores of the CUDA backend on records that the CPU sealed, against the CPU's and against float64; a row's
 * scores are the same bits alone and in any batch. */
#include "kernels/cuda_api.h"
#include "tests/digest_rig.h"
#include "tests/tap.h"

#include <stdio.h>

enum { MAX_ROWS = 8, BATCH = 20 };

static struct backend *gpu;

/* ---- both backends ---- */

/* A rig's memory on the device: records as they are, pages row by row. */
struct twin {
    struct kv_memory kv;
    size_t arena_bytes, record_bytes;
};

static void *put(const void *from, size_t bytes)
{
    void *p = gpu->ops->alloc(gpu, bytes);
    CHECK(p != NULL);
    gpu->ops->copy(gpu, p, from, bytes);
    CHECK(gpu->ops->sync(gpu) == OK);
    return p;
}

static void *put_pages(const struct rig *r)
{
    const struct rig_shape *s = &r->s;
    uint32_t n_blocks = (uint32_t)(r->arena_bytes / r->geo.block_bytes[LANE_SPARSE]);
    uint16_t *to = mem_alloc(r->arena_bytes), *at = to;
    for (uint32_t b = 0; b < n_blocks; b++)
        for (uint32_t lane = 0; lane < s->layers * s->kv_heads; lane++)
            for (uint32_t value = 0; value < 2; value++)
                for (uint32_t row = 0; row < s->rows; row++)
                    for (uint32_t c = 0; c < s->dim; c++)
                        *at++ = *rig_number(r, rig_page(r, b, lane), row, c, value != 0);
    void *p = put(to, r->arena_bytes);
    mem_free(to);
    return p;
}

/* The backend knows a geometry by its address: none is used twice. */
static struct kv_geometry geometries[64];
static uint32_t n_geometries;

static struct twin twin_of(const struct rig *r, bool pages)
{
    CHECK(n_geometries < ARRAY_LEN(geometries));
    geometries[n_geometries] = r->geo;
    struct twin t = {.kv = r->kv, .record_bytes = r->record_total, .arena_bytes = r->arena_bytes};
    t.kv.geo = &geometries[n_geometries++];
    t.kv.records = put(r->records, r->record_total);
    t.kv.hbm[LANE_SPARSE] = pages ? put_pages(r) : NULL;
    return t;
}

static void drop_twin(struct twin *t)
{
    gpu->ops->free(gpu, t->kv.records, t->record_bytes);
    gpu->ops->free(gpu, t->kv.hbm[LANE_SPARSE], t->arena_bytes);
    gpu->ops->free(gpu, t->kv.dram[LANE_SPARSE], t->arena_bytes);
}

struct run {
    const struct rig *r;
    const struct twin *t;
    enum score_kind kind;
    uint32_t group, n_rows, stride, layer, coarse_group;
    float loud, coarse_open, scale;
    struct plan_row rows[MAX_ROWS];
    float *qkv, *cpu, *gpu; /* host memory */
    size_t n_scores;
};

static void prepare(struct run *x, const uint32_t *segments)
{
    const struct rig_shape *s = &x->r->s;
    size_t width = (size_t)(x->group + 2) * s->kv_heads * s->dim;
    uint32_t most = 0;
    x->scale = 1.0f / sqrtf((float)s->dim);
    x->qkv = mem_alloc(BATCH * width * sizeof *x->qkv);
    for (uint32_t row = 0; row < BATCH; row++)
        for (size_t i = 0; i < width; i++)
            x->qkv[row * width + i] = x->loud * rig_noise(row / 2, 3, (uint32_t)i);
    for (uint32_t i = 0; i < x->n_rows; i++) {
        x->rows[i] = (struct plan_row){.row = i * 2 + 1,
                                       .pos = segments[i] * SEGMENT_ROWS - (segments[i] > 0),
                                       .n_segments = segments[i],
                                       .records = x->r->numbers,
                                       .blocks = x->r->blocks,
                                       .top_p = 1};
        most = segments[i] > most ? segments[i] : most;
    }
    if (x->stride == 0)
        x->stride = most * x->r->desc.parts;
    x->n_scores = (size_t)x->n_rows * s->kv_heads * x->group * x->stride;
    x->cpu = mem_alloc(x->n_scores * sizeof *x->cpu);
    x->gpu = mem_alloc(x->n_scores * sizeof *x->gpu);
    memset(x->cpu, 0xff, x->n_scores * sizeof *x->cpu);
    memset(x->gpu, 0xff, x->n_scores * sizeof *x->gpu);
}

static struct score_args args_of(const struct run *x)
{
    return (struct score_args){.kv = &x->r->kv,
                               .kind = x->kind,
                               .desc = x->r->desc,
                               .layer = x->layer,
                               .heads = x->group * x->r->s.kv_heads,
                               .rows = x->rows,
                               .n_rows = x->n_rows,
                               .scale = x->scale,
                               .qkv = x->qkv,
                               .scores = x->cpu,
                               .stride = x->stride,
                               .coarse_group = x->coarse_group,
                               .coarse_open = x->coarse_open};
}

static void run_gpu(struct run *x)
{
    struct score_args a = args_of(x);
    size_t width = (size_t)(x->group + 2) * x->r->s.kv_heads * x->r->s.dim * sizeof(float);
    void *qkv = put(x->qkv, BATCH * width), *scores = put(x->gpu, x->n_scores * sizeof(float));
    a.kv = &x->t->kv;
    a.qkv = qkv;
    a.scores = scores;
    gpu->ops->score(gpu, &a);
    gpu->ops->copy(gpu, x->gpu, scores, x->n_scores * sizeof(float));
    status st = gpu->ops->sync(gpu);
    if (st != OK)
        printf("# %s\n", err_text());
    CHECK(st == OK);
    gpu->ops->free(gpu, qkv, BATCH * width);
    gpu->ops->free(gpu, scores, x->n_scores * sizeof(float));
}

static void run_both(struct run *x, const uint32_t *segments)
{
    prepare(x, segments);
    struct score_args a = args_of(x);
    x->r->be->ops->score(x->r->be, &a);
    CHECK(x->r->be->ops->sync(x->r->be) == OK);
    run_gpu(x);
}

static void done(struct run *x)
{
    mem_free(x->qkv);
    mem_free(x->cpu);
    mem_free(x->gpu);
}

static const float *query(const struct run *x, uint32_t row, uint32_t head, uint32_t h)
{
    size_t width = (size_t)(x->group + 2) * x->r->s.kv_heads * x->r->s.dim;
    return x->qkv + x->rows[row].row * width + (size_t)(head * x->group + h) * x->r->s.dim;
}

static size_t scores_at(const struct run *x, uint32_t row, uint32_t head, uint32_t h)
{
    return (((size_t)row * x->r->s.kv_heads + head) * x->group + h) * (size_t)x->stride;
}

/* ---- against the CPU ---- */

/* What scores are rounded in proportion to: 1, or what the terms of a bound weigh. */
static double unit_of(const struct run *x, uint32_t row, uint32_t head, uint32_t h, uint32_t seg)
{
    if (x->kind != SCORE_BOUND)
        return 1;
    struct digest_layout l = digest_layout_of(x->r->s.dim, &x->r->desc);
    const uint8_t *record = rig_record(x->r, seg, x->layer * x->r->s.kv_heads + head);
    const float *magnitude = digest_magnitude(record, &l), *q = query(x, row, head, h);
    double sum = 0;
    for (uint32_t c = 0; c < x->r->s.dim; c++)
        sum += fabs((double)q[c]) * (double)magnitude[c];
    return sum * (double)x->scale;
}

struct difference {
    double worst;
    bool same_holes, kept; /* -inf in the same places; what lies behind a row is left alone */
};

static struct difference compare(const struct run *x)
{
    struct difference d = {0, true, true};
    for (uint32_t row = 0; row < x->n_rows; row++)
        for (uint32_t head = 0; head < x->r->s.kv_heads; head++)
            for (uint32_t h = 0; h < x->group; h++) {
                const float *a = x->gpu + scores_at(x, row, head, h);
                const float *b = x->cpu + scores_at(x, row, head, h);
                uint32_t n = x->rows[row].n_segments * x->r->desc.parts;
                for (uint32_t p = 0; p < n; p++) {
                    if (a[p] == -INFINITY || b[p] == -INFINITY) {
                        d.same_holes &= a[p] == b[p];
                        continue;
                    }
                    double unit = unit_of(x, row, head, h, p / x->r->desc.parts);
                    double off = fabs((double)a[p] - (double)b[p]) / unit;
                    d.worst = off <= d.worst ? d.worst : off; /* NaN stays */
                }
                for (uint32_t p = n; p < x->stride; p++)
                    d.kept &= isnan(a[p]) != 0;
            }
    return d;
}

static struct rig *sealed(struct rig_shape s, struct digest_desc d)
{
    struct rig *r = rig_open("auto", 2, s, d);
    CHECK(r != NULL);
    rig_fill(r);
    if (d.kind != DIGEST_NONE)
        rig_seal_all(r);
    return r;
}

static const struct {
    const char *name;
    struct rig_shape s;
    enum score_kind kind;
    struct digest_desc d;
    uint32_t group, odd; /* odd: added to the stride */
    double limit;
} cases[] = {
#define WAVE(rows, outliers)                                                      \
    {                                                                             \
        ORDER_BISECT, DIGEST_CENTROID, SEGMENT_ROWS / (rows), outliers, 16, false \
    }
#define CODED(rows)                                                                           \
    {                                                                                         \
        ORDER_BISECT, DIGEST_CODES, SEGMENT_ROWS / (rows), 0, (rows) > 16 ? (rows) : 16, true \
    }
#define QUEST(rows)                                                    \
    {                                                                  \
        ORDER_KEEP, DIGEST_BOUNDS, SEGMENT_ROWS / (rows), 0, 16, false \
    }
#define KEYS(n)                                  \
    {                                            \
        ORDER_KEEP, DIGEST_NONE, n, 0, 16, false \
    }
    {"centroid, R 16 d 128 group 4", {16, 2, 2, 128, 3}, SCORE_MASS, WAVE(16, 0), 4, 0, 5e-4},
    {"centroid, R 8 d 128 group 8", {8, 1, 2, 128, 3}, SCORE_MASS, WAVE(8, 0), 8, 0, 5e-4},
    {"one outlier, R 8 d 128 group 4", {8, 2, 1, 128, 2}, SCORE_MASS, WAVE(8, 1), 4, 3, 5e-4},
    {"two outliers, R 16 d 64 group 7", {16, 1, 3, 64, 3}, SCORE_MASS, WAVE(16, 2), 7, 0, 5e-4},
    {"one outlier, R 32 d 36 group 5", {32, 1, 1, 36, 2}, SCORE_MASS, WAVE(32, 1), 5, 0, 5e-4},
    {"one outlier, R 8 d 200 group 3", {8, 1, 1, 200, 2}, SCORE_MASS, WAVE(8, 1), 3, 0, 5e-4},
    {"centroid, R 32 d 128 group 16", {32, 1, 1, 128, 3}, SCORE_MASS, WAVE(32, 0), 16, 0, 5e-4},
    {"k-means, d 64 group 5",
     {8, 1, 1, 64, 2},
     SCORE_MASS,
     {ORDER_KMEANS, DIGEST_CENTROID, 64, 0, 16, false},
     5,
     0,
     5e-4},
    {"100 clusters, d 128 group 2",
     {8, 1, 1, 128, 2},
     SCORE_MASS,
     {ORDER_KMEANS, DIGEST_CENTROID, 100, 0, 16, false},
     2,
     1,
     5e-4},
    {"8 ranges, d 64 group 2",
     {16, 1, 1, 64, 2},
     SCORE_MASS,
     {ORDER_KEEP, DIGEST_CENTROID, 8, 1, 16, false},
     2,
     0,
     5e-4},
    {"codes, R 8 d 128 group 4", {8, 2, 2, 128, 3}, SCORE_MASS, CODED(8), 4, 0, 0.06},
    {"codes, R 16 d 128 group 8", {16, 1, 1, 128, 2}, SCORE_MASS, CODED(16), 8, 0, 0.06},
    {"codes, R 32 d 64 group 3", {32, 1, 2, 64, 2}, SCORE_MASS, CODED(32), 3, 0, 0.06},
    {"codes, R 8 d 20 group 1", {8, 1, 1, 20, 2}, SCORE_MASS, CODED(8), 1, 0, 0.06},
    {"codes, R 8 d 64 group 12", {8, 1, 1, 64, 3}, SCORE_MASS, CODED(8), 12, 5, 0.06},
    {"bounds, R 16 d 128 group 4", {16, 2, 2, 128, 3}, SCORE_BOUND, QUEST(16), 4, 0, 1e-4},
    {"bounds, R 8 d 64 group 8", {8, 1, 1, 64, 2}, SCORE_BOUND, QUEST(8), 8, 0, 1e-4},
    {"bounds, R 32 d 36 group 3", {32, 1, 2, 36, 3}, SCORE_BOUND, QUEST(32), 3, 7, 1e-4},
    {"exact, pages of 8, d 128 group 4", {8, 1, 2, 128, 2}, SCORE_EXACT, KEYS(128), 4, 0, 1e-5},
    {"exact, single rows, d 36 group 6", {16, 1, 1, 36, 1}, SCORE_EXACT, KEYS(1024), 6, 0, 1e-5},
    {"exact, bisected pages of 16", {16, 1, 1, 64, 2}, SCORE_EXACT, WAVE(16, 0), 2, 0, 1e-5},
    {"exact, k-means",
     {8, 1, 1, 64, 1},
     SCORE_EXACT,
     {ORDER_KMEANS, DIGEST_CENTROID, 64, 0, 16, false},
     2,
     0,
     1e-5},
};

/* Half of the blocks are read from DRAM, in place. */
static void spill_half(struct rig *r, struct twin *t)
{
    uint32_t n = r->s.segments * SEGMENT_ROWS / r->s.rows;
    size_t block = r->geo.block_bytes[LANE_SPARSE];
    uint8_t *nan = mem_alloc(block);
    memset(nan, 0xff, block);
    r->dram = mem_alloc(r->arena_bytes);
    memcpy(r->dram, r->arena, r->arena_bytes);
    r->kv.dram[LANE_SPARSE] = r->dram;
    t->kv.dram[LANE_SPARSE] = put_pages(r);
    for (uint32_t b = 1; b < n; b += 2) {
        memset(r->arena + r->blocks[b] * block, 0xff, block);
        gpu->ops->copy(gpu, (uint8_t *)t->kv.hbm[LANE_SPARSE] + r->blocks[b] * block, nan, block);
        r->blocks[b] |= BLOCK_IN_DRAM;
    }
    CHECK(gpu->ops->sync(gpu) == OK);
    mem_free(nan);
}

static void scores_are_the_cpus(void)
{
    for (uint32_t i = 0; i < (tap_small() ? 4 : ARRAY_LEN(cases)); i++) {
        struct rig *r = sealed(cases[i].s, cases[i].d);
        struct twin t = twin_of(r, cases[i].kind == SCORE_EXACT);
        const uint32_t all = r->s.segments, segments[] = {all, 1, 0, all, 1};
        struct run x = {.r = r,
                        .t = &t,
                        .kind = cases[i].kind,
                        .group = cases[i].group,
                        .n_rows = ARRAY_LEN(segments),
                        .layer = r->s.layers - 1,
                        .loud = 3,
                        .stride = cases[i].odd > 0 ? all * r->desc.parts + cases[i].odd : 0};
        if (cases[i].kind == SCORE_EXACT)
            spill_half(r, &t);
        run_both(&x, segments);
        struct difference d = compare(&x);
        ok(d.worst <= cases[i].limit, "%s: as on the CPU (%.2g)", cases[i].name, d.worst);
        ok(d.same_holes && d.kept, "%s: -inf in the same places, nothing else is written",
           cases[i].name);
        struct run one = x;
        one.n_rows = 1;
        prepare(&one, segments);
        run_gpu(&one);
        ok(memcmp(one.gpu, x.gpu, one.n_scores * sizeof(float)) == 0 || one.stride != x.stride,
           "%s: a row alone has the same bits", cases[i].name);
        done(&one);
        done(&x);
        drop_twin(&t);
        mem_free(r->dram);
        rig_close(r);
    }
}

/* ---- against float64 ---- */

static double code_scale(uint8_t code)
{
    return ldexp(1.0 + code % 8 / 8.0, code / 8 - CODES_SCALE_EXP);
}

/* ln of the sum over a page's rows of e^logit, of centroid and codes as they are kept. */
static double coded_mass(const struct run *x, uint32_t seg, uint32_t lane, uint32_t p,
                         const float *q)
{
    const struct rig *r = x->r;
    uint32_t dim = r->s.dim, rows = r->s.rows;
    struct digest_layout l = digest_layout_of(dim, &r->desc);
    struct digest_vectors v = digest_vectors_of(rig_record(r, seg, lane), &l, 0);
    const uint8_t *codes = rig_record(r, seg, lane) + l.codes;
    const uint8_t *basis = rig_record(r, 0, lane) + l.codes + codes_k_basis(true);
    double mean = 0, g[CODES_K], sum = 0;
    for (uint32_t c = 0; c < dim; c++)
        mean += (double)q[c] * (double)digest_vector_get(&v, dim, p, c);
    for (uint32_t j = 0; j < CODES_K; j++) {
        float sd;
        memcpy(&sd, basis + j * sizeof sd, sizeof sd);
        g[j] = 0;
        for (uint32_t c = 0; c < dim; c++) {
            uint16_t e;
            memcpy(&e, basis + CODES_K * sizeof sd + ((size_t)c * CODES_K + j) * 2, 2);
            g[j] += (double)q[c] * (double)bf16_to_f32(e);
        }
        g[j] *= (double)sd * (double)CODES_STEP;
    }
    for (uint32_t i = 0; i < rows; i++) {
        double y = 0;
        for (uint32_t j = 0; j < CODES_K; j++)
            y += g[j] * ((codes[codes_k_byte(p, i, j, rows)] >> codes_shift(j) & 3) - 1.5);
        sum += exp(y * code_scale(codes[codes_k_scale(p, i, rows)]) * (double)x->scale);
    }
    return mean * (double)x->scale + log(sum);
}

static void codes_are_those_of_float64(void)
{
    static const struct rig_shape shapes[] = {
        {8, 1, 2, 128, 3}, {16, 1, 1, 128, 2}, {32, 1, 1, 64, 1}};
    for (uint32_t i = 0; i < ARRAY_LEN(shapes); i++) {
        struct digest_desc coded = CODED(shapes[i].rows);
        struct rig *r = sealed(shapes[i], coded);
        struct twin t = twin_of(r, false);
        struct run x = {.r = r, .t = &t, .kind = SCORE_MASS, .group = 4, .n_rows = 1, .loud = 1.5f};
        double worst = 0;
        run_both(&x, &r->s.segments);
        for (uint32_t head = 0; head < r->s.kv_heads; head++)
            for (uint32_t h = 0; h < 4; h++)
                for (uint32_t p = rig_sink_rows(r) / r->s.rows; p < x.stride; p++) {
                    double want = coded_mass(&x, p / r->desc.parts, head, p % r->desc.parts,
                                             query(&x, 0, head, h));
                    double d = fabs((double)x.gpu[scores_at(&x, 0, head, h) + p] - want);
                    worst = d <= worst ? worst : d;
                }
        ok(worst < 0.03, "codes of R = %u, %u numbers: within 0.03 of float64 (%.2g)", r->s.rows,
           r->s.dim, worst);
        done(&x);
        drop_twin(&t);
        rig_close(r);
    }
}

static void bounds_are_never_below(void)
{
    struct rig_shape s = {16, 1, 2, 128, 2};
    struct digest_desc d = QUEST(16);
    struct rig *r = sealed(s, d);
    uint32_t segments = 2;
    /* all rows of a page equal: the bound is the product itself, and rounding decides */
    for (uint32_t lane = 0; lane < 2; lane++)
        for (uint32_t row = 0; row < 2 * SEGMENT_ROWS; row++)
            for (uint32_t c = 0; c < s.dim; c++)
                *rig_at(r, r->blocks, lane, row, c, false) =
                    f32_to_bf16(ldexpf(rig_noise(lane, row / 16, c), (int)(c % 13)));
    rig_seal_all(r);
    struct twin t = twin_of(r, false);
    for (uint32_t loud = 0; loud < 2; loud++) {
        struct run x = {.r = r, .t = &t, .kind = SCORE_BOUND, .group = 3, .n_rows = 1};
        bool above = true;
        x.loud = loud ? 1000 : 2;
        run_both(&x, &segments);
        for (uint32_t head = 0; head < 2; head++) {
            double *keys = rig_keys(r, r->blocks, head, false);
            for (uint32_t h = 0; h < 3; h++)
                for (uint32_t p = 1; p < 128; p++) {
                    double dot = 0;
                    for (uint32_t c = 0; c < s.dim; c++)
                        dot += (double)query(&x, 0, head, h)[c] * keys[(size_t)p * 16 * s.dim + c];
                    above &= (double)x.gpu[scores_at(&x, 0, head, h) + p] >= dot * (double)x.scale;
                }
            mem_free(keys);
        }
        ok(above, "bounds are never below the product they bound, queries of %g", (double)x.loud);
        done(&x);
    }
    drop_twin(&t);
    rig_close(r);
}

static void queries_of_any_size_have_scores(void)
{
    static const float loudness[] = {0, 1e-20f, 300, 1e6f};
    struct rig_shape s = {8, 1, 1, 64, 1};
    struct digest_desc descs[] = {WAVE(8, 1), CODED(8)};
    uint32_t one = 1;
    for (uint32_t k = 0; k < 2; k++) {
        struct rig *r = sealed(s, descs[k]);
        struct twin t = twin_of(r, false);
        for (uint32_t i = 0; i < ARRAY_LEN(loudness); i++) {
            struct run x = {.r = r, .t = &t, .group = 3, .n_rows = 1, .loud = loudness[i]};
            bool finite = true;
            run_both(&x, &one);
            for (uint32_t p = 2; p < 128; p++)
                finite &= isfinite(x.gpu[scores_at(&x, 0, 0, 1) + p]) != 0;
            ok(finite, "queries of size %g have finite scores", (double)loudness[i]);
            if (loudness[i] < 1e-10f)
                ok(fabsf(x.gpu[5] - logf(8)) < 1e-5f, "without a query a page weighs its rows");
            done(&x);
        }
        drop_twin(&t);
        rig_close(r);
    }
}

/* ---- coarse to fine ---- */

static void coarse_scores_open_what_the_cpu_opens(void)
{
    static const struct {
        struct rig_shape s;
        struct digest_desc d;
        uint32_t coarse;
        float open;
    } shapes[] = {{{8, 1, 2, 128, 3}, WAVE(8, 1), 4, 0.25f},
                  {{8, 1, 1, 64, 3}, CODED(8), 16, 0.5f},
                  {{16, 1, 2, 128, 2}, WAVE(16, 0), 8, 0.1f},
                  {{16, 1, 1, 128, 2}, WAVE(16, 0), 32, 0.01f}};
    for (uint32_t i = 0; i < ARRAY_LEN(shapes); i++) {
        struct rig *r = sealed(shapes[i].s, shapes[i].d);
        struct twin t = twin_of(r, false);
        const uint32_t all = r->s.segments, segments[] = {all, 0, 1};
        struct run x = {.r = r,
                        .t = &t,
                        .kind = SCORE_MASS,
                        .group = 4,
                        .n_rows = 3,
                        .loud = 3,
                        .coarse_group = shapes[i].coarse,
                        .coarse_open = shapes[i].open};
        run_both(&x, segments);
        uint32_t open_cpu = 0, open_gpu = 0, both = 0;
        double worst = 0;
        bool holes = true;
        for (size_t k = 0; k < x.n_scores; k++) {
            bool a = x.gpu[k] > -INFINITY, b = x.cpu[k] > -INFINITY;
            holes &= isnan(x.gpu[k]) == isnan(x.cpu[k]);
            open_cpu += b;
            open_gpu += a;
            both += a && b;
            double d = a && b ? fabs((double)x.gpu[k] - (double)x.cpu[k]) : 0;
            worst = d <= worst ? worst : d;
        }
        ok(open_gpu == open_cpu && both >= open_cpu - open_cpu / 50 && holes,
           "groups of %u, %g open: the CPU's, but for near ties (%u, %u, %u)", shapes[i].coarse,
           (double)shapes[i].open, open_gpu, open_cpu, both);
        ok(worst <= (shapes[i].d.kind == DIGEST_CODES ? 0.06 : 5e-4),
           "and what is open has its scores");
        done(&x);
        drop_twin(&t);
        rig_close(r);
    }
}

int main(void)
{
    if (spind_cuda_open(&gpu, 0) != OK)
        tap_skip_all(err_text());
    scores_are_the_cpus();
    if (tap_small())
        return tap_done();
    codes_are_those_of_float64();
    bounds_are_never_below();
    queries_of_any_size_have_scores();
    coarse_scores_open_what_the_cpu_opens();
    gpu->ops->close(gpu);
    return tap_done();
}
