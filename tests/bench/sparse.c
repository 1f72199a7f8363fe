/* What does sparse attention cost before it attends? Scores and selection of a decode step by setting,
 * and sealing of a segment; whole-model numbers: 84 sparse lanes (28 layers, 3 KV heads, group of 3,
 * head_dim 64: the default model without its exempt ones), one row.
 *
 * A run walks all layers, and between runs a large buffer is read: digests are as cold as in a model,
 * whose weights pass through the caches in every step. Best of several runs. The ceiling is
 * memory: digest bytes per second, against about 10 GB/s per core from DRAM.
 * Usage: sparse [isa: scalar, avx2, avx512, auto] [threads] [segments] [warm: 1] [setting, from 1] */
#include "kernels/core/digest.h"
#include "kernels/cpu/cpu.h"
#include "kernels/dtype.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { LAYERS = 28, KV_HEADS = 3, GROUP = 3, DIM = 64, TAIL = 512, FLUSH_BYTES = 128 << 20 };

struct setting {
    const char *name;
    uint32_t rows; /* R */
    struct digest_desc desc;
    enum score_kind kind;
    uint32_t coarse_group;
    float coarse_open;
    uint32_t budget;
    float estimate;
};

struct bench {
    struct backend *be;
    struct kv_geometry geo;
    struct kv_memory kv;
    const struct setting *s;
    uint32_t segments;
    block_id *blocks;
    uint32_t *numbers, *pages, *masks, *n_pages, *estimates, *n_estimates;
    uint32_t stride, page_cap, estimate_cap;
    float *qkv, *scores, *share, lse[KV_HEADS * GROUP];
    void *tail;
    uint8_t *arena;
    struct plan_row row;
};

static clockid_t timer = CLOCK_MONOTONIC;
static uint8_t *flush; /* NULL: caches stay warm */

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(timer, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void forget_caches(void)
{
    volatile uint64_t sink = 0;
    uint64_t sum = 0;
    for (size_t i = 0; i < FLUSH_BYTES && flush != NULL; i += 64)
        sum += flush[i];
    sink += sum;
    (void)sink;
}

static float noise(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (float)((z ^ z >> 31) >> 40) / 8388608.0f - 1.0f;
}

/* Keys in clusters of about 20 rows: pages are blocks of one segment, re-filled for every seal. */
static void fill(struct bench *b)
{
    uint64_t state = 1;
    uint16_t *p = (uint16_t *)(void *)b->arena;
    size_t n = SEGMENT_ROWS / b->geo.block_rows * b->geo.block_bytes[LANE_SPARSE] / 2;
    float level = 0;
    for (size_t i = 0; i < n; i++) {
        if (i % 160 == 0)
            level = 2 * noise(&state);
        p[i] = f32_to_bf16(level + noise(&state));
    }
}

static void setup(struct bench *b, const struct setting *s)
{
    uint32_t per_segment = SEGMENT_ROWS / s->rows, lanes = LAYERS * KV_HEADS;
    uint32_t n_parts = b->segments * s->desc.parts;
    b->s = s;
    b->geo = (struct kv_geometry){.block_rows = s->rows,
                                  .layers = LAYERS,
                                  .kv_heads = KV_HEADS,
                                  .head_dim = DIM,
                                  .page_bytes = (size_t)s->rows * DIM * 4};
    b->geo.block_bytes[LANE_SPARSE] = lanes * b->geo.page_bytes;
    size_t bytes = per_segment * b->geo.block_bytes[LANE_SPARSE];
    b->arena = b->be->ops->alloc(b->be, bytes);
    b->kv = (struct kv_memory){.geo = &b->geo, .hbm = {b->arena}};
    b->kv.record_lane_bytes = b->be->ops->digest_bytes(&b->geo, &s->desc);
    b->kv.record_bytes = lanes * b->kv.record_lane_bytes;
    b->kv.records = b->be->ops->alloc(b->be, b->segments * b->kv.record_bytes);
    b->blocks = mem_alloc((size_t)per_segment * (b->segments + 1) * sizeof *b->blocks);
    b->numbers = mem_alloc(b->segments * sizeof *b->numbers);
    for (uint32_t i = 0; i < per_segment * (b->segments + 1); i++)
        b->blocks[i] = i % per_segment;
    for (uint32_t i = 0; i < b->segments; i++)
        b->numbers[i] = i;
    b->stride = n_parts;
    b->page_cap = b->segments * per_segment;
    b->estimate_cap = n_parts;
    b->pages = mem_alloc(KV_HEADS * b->page_cap * sizeof *b->pages);
    b->masks = mem_alloc(KV_HEADS * b->page_cap * sizeof *b->masks);
    b->share = mem_alloc(KV_HEADS * b->page_cap * sizeof *b->share);
    b->tail = mem_alloc(KV_HEADS * b->be->ops->known_bytes(&b->geo, GROUP * KV_HEADS));
    b->estimates = mem_alloc(KV_HEADS * b->estimate_cap * sizeof *b->estimates);
    b->n_pages = mem_alloc(KV_HEADS * sizeof *b->n_pages);
    b->n_estimates = mem_alloc(KV_HEADS * sizeof *b->n_estimates);
    b->scores = mem_alloc((size_t)KV_HEADS * GROUP * b->stride * sizeof *b->scores);
    b->qkv = mem_alloc((size_t)LAYERS * (GROUP + 2) * KV_HEADS * DIM * sizeof *b->qkv);
    uint64_t state = 7;
    for (uint32_t i = 0; i < LAYERS * (GROUP + 2) * KV_HEADS * DIM; i++)
        b->qkv[i] = 3 * noise(&state);
    b->row = (struct plan_row){.pos = b->segments * SEGMENT_ROWS + TAIL - 1,
                               .n_segments = b->segments,
                               .records = b->numbers,
                               .blocks = b->blocks,
                               .budget = s->budget,
                               .estimate = (uint32_t)(s->estimate * (float)n_parts),
                               .top_p = 1};
}

static void teardown(struct bench *b)
{
    size_t bytes = SEGMENT_ROWS / b->geo.block_rows * b->geo.block_bytes[LANE_SPARSE];
    b->be->ops->free(b->be, b->arena, bytes);
    b->be->ops->free(b->be, b->kv.records, b->segments * b->kv.record_bytes);
    void *held[] = {b->tail,      b->blocks,  b->numbers,     b->pages,  b->masks, b->share,
                    b->estimates, b->n_pages, b->n_estimates, b->scores, b->qkv};
    for (uint32_t i = 0; i < ARRAY_LEN(held); i++)
        mem_free(held[i]);
}

/* Milliseconds of the fastest of the segments, all lanes; and of segment 0. */
static double time_seal(struct bench *b, double *first)
{
    uint64_t least = UINT64_MAX;
    for (uint32_t i = 0; i < b->segments; i++) {
        struct seal_args a = {.kv = &b->kv,
                              .desc = b->s->desc,
                              .from = b->blocks,
                              .to = b->blocks,
                              .segment = i,
                              .record = i};
        fill(b);
        uint64_t t = now_ns();
        b->be->ops->seal(b->be, &a);
        t = now_ns() - t;
        if (i == 0)
            *first = (double)t / 1e6;
        least = t < least ? t : least;
    }
    return (double)least / 1e6;
}

enum { SCORE = 1, SELECT = 2, KNOWN = 4 };

static void one_layer(struct bench *b, uint32_t layer, int what)
{
    size_t width = (size_t)(GROUP + 2) * KV_HEADS * DIM;
    struct score_args x = {.kv = &b->kv,
                           .kind = b->s->kind,
                           .desc = b->s->desc,
                           .layer = layer,
                           .heads = GROUP * KV_HEADS,
                           .rows = &b->row,
                           .n_rows = 1,
                           .scale = 0.125f,
                           .qkv = b->qkv + layer * width,
                           .scores = b->scores,
                           .stride = b->stride,
                           .coarse_group = b->s->coarse_group,
                           .coarse_open = b->s->coarse_open};
    struct select_args y = {.kv = &b->kv,
                            .desc = b->s->desc,
                            .map = b->s->desc.order == ORDER_KMEANS ? MAP_GATHER : MAP_PAGE,
                            .reduce = REDUCE_SUM_PROB,
                            .layer = layer,
                            .group = GROUP,
                            .rows = &b->row,
                            .n_rows = 1,
                            .scores = b->scores,
                            .stride = b->stride,
                            .known = what & KNOWN ? b->lse : NULL,
                            .page_cap = b->page_cap,
                            .estimate_cap = b->estimate_cap,
                            .pages = b->pages,
                            .masks = b->s->desc.order == ORDER_KMEANS ? b->masks : NULL,
                            .share = b->share,
                            .n_pages = b->n_pages,
                            .estimates = b->estimates,
                            .n_estimates = b->n_estimates};
    struct known_args z = {.kv = &b->kv,
                           .layer = layer,
                           .heads = GROUP * KV_HEADS,
                           .sinks = 16,
                           .rows = &b->row,
                           .n_rows = 1,
                           .scale = 0.125f,
                           .qkv = b->qkv + layer * width,
                           .lse = b->lse,
                           .tail = b->tail};
    if (what & SCORE)
        b->be->ops->score(b->be, &x);
    if (what & KNOWN)
        b->be->ops->known(b->be, &z);
    if (what & SELECT)
        b->be->ops->select(b->be, &y);
    CHECK(b->be->ops->sync(b->be) == OK);
}

/* Microseconds of the fastest of `runs` steps over all layers. Not by layer: asking for the time
 * costs as much as a tenth of one. */
static double time_step(struct bench *b, int runs, int what)
{
    uint64_t least = UINT64_MAX;
    for (int r = 0; r < runs; r++) {
        forget_caches();
        uint64_t t = now_ns();
        for (uint32_t layer = 0; layer < LAYERS; layer++)
            one_layer(b, layer, what);
        t = now_ns() - t;
        least = t < least ? t : least;
    }
    return (double)least / 1e3;
}

static void measure(struct bench *b, const struct setting *s, int runs)
{
    setup(b, s);
    bool codes = s->desc.kind == DIGEST_CODES;
    double first = 0, seal = time_seal(b, &first), score = time_step(b, runs, SCORE);
    double known = codes ? time_step(b, runs, KNOWN) : 0;
    double select = time_step(b, runs, SELECT);
    double all = time_step(b, runs, SCORE | SELECT | (codes ? KNOWN : 0));
    struct digest_layout l = digest_layout_of(DIM, &s->desc);
    double keys = s->kind == SCORE_EXACT ? SEGMENT_ROWS * DIM * 2.0
                  : s->kind == SCORE_BOUND
                      ? (double)digest_bounds_bytes(DIM, s->desc.parts)
                      : (double)(l.kinds * l.vector_bytes + (codes ? codes_v_vectors() : 0));
    double read = keys * b->segments * LAYERS * KV_HEADS;
    printf("%-28s %8.1f %8.1f %8.1f %8.0f %8.0f %8.0f %8.0f %8.1f\n", s->name, first, seal,
           (double)l.bytes / (SEGMENT_ROWS * DIM * 4.0) * 100, score, known, select, all,
           read / score / 1e3);
    teardown(b);
}

static const struct setting settings[] = {
    {.name = "wave, R = 8, codes",
     .rows = 8,
     .desc = {ORDER_BISECT, DIGEST_CODES, 128, 0, 16, true},
     .kind = SCORE_MASS,
     .budget = 384,
     .estimate = 0.12f},
    {.name = "wave, R = 16, codes",
     .rows = 16,
     .desc = {ORDER_BISECT, DIGEST_CODES, 64, 0, 16, true},
     .kind = SCORE_MASS,
     .budget = 384,
     .estimate = 0.25f},
    {.name = "wave, R = 8, 1 outlier",
     .rows = 8,
     .desc = {ORDER_BISECT, DIGEST_CENTROID, 128, 1, 16, true},
     .kind = SCORE_MASS,
     .budget = 384,
     .estimate = 0.25f},
    {.name = "same, groups of 16, half",
     .rows = 8,
     .desc = {ORDER_BISECT, DIGEST_CENTROID, 128, 1, 16, true},
     .kind = SCORE_MASS,
     .coarse_group = 16,
     .coarse_open = 0.5f,
     .budget = 384,
     .estimate = 0.25f},
    {.name = "wave, R = 8, 2 outliers",
     .rows = 8,
     .desc = {ORDER_BISECT, DIGEST_CENTROID, 128, 2, 16, true},
     .kind = SCORE_MASS,
     .budget = 384,
     .estimate = 0.25f},
    {.name = "wave, R = 16, centroids",
     .rows = 16,
     .desc = {ORDER_BISECT, DIGEST_CENTROID, 64, 0, 16, true},
     .kind = SCORE_MASS,
     .budget = 384,
     .estimate = 0.25f},
    {.name = "wave, k-means of 16",
     .rows = 8,
     .desc = {ORDER_KMEANS, DIGEST_CENTROID, 64, 0, 16, true},
     .kind = SCORE_MASS,
     .budget = 384,
     .estimate = 0.25f},
    {.name = "quest, R = 16",
     .rows = 16,
     .desc = {ORDER_KEEP, DIGEST_BOUNDS, 64, 0, 16, false},
     .kind = SCORE_BOUND,
     .budget = 384},
    {.name = "quest, R = 8",
     .rows = 8,
     .desc = {ORDER_KEEP, DIGEST_BOUNDS, 128, 0, 16, false},
     .kind = SCORE_BOUND,
     .budget = 384},
    {.name = "oracle, R = 8",
     .rows = 8,
     .desc = {ORDER_KEEP, DIGEST_NONE, 128, 0, 16, false},
     .kind = SCORE_EXACT,
     .budget = 384}};

int main(int argc, char **argv)
{
    struct cpu_options o = {.isa = argc > 1 ? argv[1] : "auto",
                            .n_threads = argc > 2 ? (uint32_t)atoi(argv[2]) : 1};
    struct bench *b = mem_alloc(sizeof *b);
    CHECK(cpu_backend_open(&b->be, &o) == OK);
    b->segments = argc > 3 ? (uint32_t)atoi(argv[3]) : 7;
    if (o.n_threads == 1)
        timer = CLOCK_THREAD_CPUTIME_ID; /* right even on a busy machine */
    if (argc <= 4 || atoi(argv[4]) == 0) {
        flush = mem_alloc(FLUSH_BYTES);
        memset(flush, 1, FLUSH_BYTES);
    }
    printf("%s; %u segments, %d lanes, group of %d\n", b->be->ops->describe(b->be), b->segments,
           LAYERS * KV_HEADS, GROUP);
    printf("%-28s %8s %8s %8s %8s %8s %8s %8s %8s\n", "", "seal 0", "seal ms", "% of KV",
           "score us", "known", "select", "all", "GB/s");
    for (uint32_t i = 0; i < ARRAY_LEN(settings); i++)
        if (argc <= 5 || atoi(argv[5]) == (int)i + 1)
            measure(b, &settings[i], argc <= 5 ? 12 : 40);
    b->be->ops->close(b->be);
    mem_free(flush);
    mem_free(b);
    return 0;
}
