/* Selection of the CUDA backend on the CPU's scores: raw reductions choose exactly what the CPU chooses;
 * with probabilities the two may differ where ranks are within 1e-5 of the border. Lists are the same
 * bits alone and in any batch. */
#include "kernels/core/digest.h"
#include "kernels/cuda_api.h"
#include "tests/cuda/noise.h"
#include "tests/tap.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_ROWS = 80, SINKS = 16 };

static struct backend *cpu, *gpu;

/* A geometry with records that say how many rows a cluster has, if partitions differ. */
/* The backend knows a geometry by its address: none is used twice. */
static struct kv_geometry geometries[128];
static uint32_t n_geometries;

struct world {
    struct kv_geometry *geo;
    struct kv_memory kv, gpu_kv;
    struct digest_desc desc;
    enum partition_map map;
    uint32_t segments;
    size_t record_total;
    uint32_t *numbers;
    block_id *blocks;
};

static void *put(const void *from, size_t bytes)
{
    void *p = gpu->ops->alloc(gpu, bytes);
    CHECK(p != NULL);
    gpu->ops->copy(gpu, p, from, bytes);
    CHECK(gpu->ops->sync(gpu) == OK);
    return p;
}

/* Clusters of 0 to about 60 rows; the first one is the sinks. */
static void make_clusters(struct world *w, uint8_t *lane, uint32_t seed)
{
    uint16_t *first = (uint16_t *)(void *)(lane + SEGMENT_ROWS * sizeof *first);
    uint32_t parts = w->desc.parts, at = 0;
    for (uint32_t p = 0; p < parts; p++) {
        first[p] = (uint16_t)at;
        uint32_t mean = (SEGMENT_ROWS - at) / (parts - p), n = hash(seed, p) % (2 * mean + 1);
        n = p == 0 ? SINKS : p % 13 == 5 ? 0 : n;
        at = at + n < SEGMENT_ROWS ? at + n : SEGMENT_ROWS;
    }
    first[parts] = SEGMENT_ROWS;
}

static struct world *open_world(uint32_t rows, uint32_t kv_heads, uint32_t segments,
                                enum partition_map map, struct digest_desc d)
{
    struct world *w = mem_alloc(sizeof *w);
    CHECK(n_geometries < ARRAY_LEN(geometries));
    w->geo = &geometries[n_geometries++];
    *w->geo = (struct kv_geometry){.block_rows = rows,
                                   .layers = 1,
                                   .kv_heads = kv_heads,
                                   .head_dim = 64,
                                   .page_bytes = (size_t)rows * 256};
    w->geo->n_lanes[LANE_SPARSE] = kv_heads;
    w->geo->block_bytes[LANE_SPARSE] = kv_heads * w->geo->page_bytes;
    w->desc = d;
    w->map = map;
    w->segments = segments;
    w->numbers = mem_alloc((segments + 1) * sizeof *w->numbers);
    w->blocks = mem_alloc((segments + 1) * (SEGMENT_ROWS / rows) * sizeof *w->blocks);
    for (uint32_t i = 0; i < segments; i++)
        w->numbers[i] = segments - 1 - i;
    w->kv.geo = w->gpu_kv.geo = w->geo;
    if (d.order != ORDER_KMEANS)
        return w;
    w->kv.record_lane_bytes = 4096 + digest_offset(&d);
    w->kv.record_bytes = kv_heads * w->kv.record_lane_bytes;
    w->record_total = segments * w->kv.record_bytes;
    uint8_t *records = mem_alloc(w->record_total);
    w->kv.records = records;
    for (uint32_t s = 0; s < segments; s++)
        for (uint32_t h = 0; h < kv_heads; h++)
            make_clusters(w, digest_lane(&w->kv, s, 0, h) + 0, s * 64 + h);
    w->gpu_kv = w->kv;
    w->gpu_kv.records = put(records, w->record_total);
    return w;
}

static void close_world(struct world *w)
{
    gpu->ops->free(gpu, w->gpu_kv.records, w->record_total);
    mem_free(w->kv.records);
    mem_free(w->numbers);
    mem_free(w->blocks);
    mem_free(w);
}

/* ---- a call ---- */

struct lists {
    uint32_t *pages, *masks, *n_pages, *estimates, *n_estimates, unscored;
    float *share;
};

struct run {
    const struct world *w;
    enum group_reduce reduce;
    uint32_t group, n_rows, stride, page_cap, estimate_cap;
    struct plan_row rows[MAX_ROWS];
    float *scores, *known;
    struct lists cpu, gpu;
    size_t lanes, n_scores;
};

static struct lists new_lists(const struct run *x)
{
    struct lists l = {.unscored = 0};
    uint32_t **of_pages[] = {&l.pages, &l.masks}, **of_lanes[] = {&l.n_pages, &l.n_estimates};
    for (uint32_t i = 0; i < 2; i++) {
        *of_pages[i] = mem_alloc(x->lanes * x->page_cap * 4);
        *of_lanes[i] = mem_alloc(x->lanes * 4);
        memset(*of_pages[i], 0xee, x->lanes * x->page_cap * 4);
        memset(*of_lanes[i], 0xee, x->lanes * 4);
    }
    l.share = mem_alloc(x->lanes * x->page_cap * 4);
    l.estimates = mem_alloc(x->lanes * x->estimate_cap * 4 + 4);
    memset(l.share, 0xee, x->lanes * x->page_cap * 4);
    memset(l.estimates, 0xee, x->lanes * x->estimate_cap * 4);
    return l;
}

static void drop_lists(struct lists *l);

/* Both sides' lists anew, as nobody may find them. */
static void renew_lists(struct run *x)
{
    drop_lists(&x->cpu);
    drop_lists(&x->gpu);
    x->cpu = new_lists(x);
    x->gpu = new_lists(x);
}

static void drop_lists(struct lists *l)
{
    mem_free(l->pages);
    mem_free(l->masks);
    mem_free(l->n_pages);
    mem_free(l->estimates);
    mem_free(l->n_estimates);
    mem_free(l->share);
}

static struct run begin(const struct world *w, uint32_t group, uint32_t n_rows,
                        const uint32_t *segments, uint32_t odd)
{
    struct run x = {.w = w, .group = group, .n_rows = n_rows};
    uint32_t most = 0;
    for (uint32_t i = 0; i < n_rows; i++) {
        x.rows[i] = (struct plan_row){.row = i,
                                      .pos = segments[i] * SEGMENT_ROWS,
                                      .n_segments = segments[i],
                                      .records = w->numbers,
                                      .blocks = w->blocks,
                                      .top_p = 1};
        most = segments[i] > most ? segments[i] : most;
    }
    x.stride = most * w->desc.parts + odd;
    x.page_cap = most * SEGMENT_ROWS / w->geo->block_rows;
    x.estimate_cap = most * w->desc.parts;
    x.lanes = (size_t)n_rows * w->geo->kv_heads;
    x.n_scores = x.lanes * group * x.stride;
    x.scores = mem_alloc(x.n_scores * sizeof *x.scores);
    x.known = mem_alloc(x.lanes * group * sizeof *x.known);
    for (size_t i = 0; i < x.n_scores; i++)
        x.scores[i] = 4 * noise(1, (uint32_t)i) + 3 * noise(4, (uint32_t)i / 5);
    for (size_t i = 0; i < x.lanes * group; i++)
        x.known[i] = 6 + 4 * noise(9, (uint32_t)i);
    x.cpu = new_lists(&x);
    x.gpu = new_lists(&x);
    return x;
}

static void end(struct run *x)
{
    mem_free(x->scores);
    mem_free(x->known);
    drop_lists(&x->cpu);
    drop_lists(&x->gpu);
}

static struct select_args args_of(const struct run *x, bool known)
{
    return (struct select_args){.kv = &x->w->kv,
                                .desc = x->w->desc,
                                .map = x->w->map,
                                .reduce = x->reduce,
                                .group = x->group,
                                .rows = x->rows,
                                .n_rows = x->n_rows,
                                .scores = x->scores,
                                .stride = x->stride,
                                .known = known ? x->known : NULL,
                                .page_cap = x->page_cap,
                                .estimate_cap = x->estimate_cap};
}

static void point_at(struct select_args *a, const struct lists *l, bool masks)
{
    a->pages = l->pages;
    a->masks = masks ? l->masks : NULL;
    a->n_pages = l->n_pages;
    a->estimates = l->estimates;
    a->n_estimates = l->n_estimates;
    a->share = l->share;
}

static void go_cpu(struct run *x, bool known)
{
    struct select_args a = args_of(x, known);
    point_at(&a, &x->cpu, x->w->map != MAP_PAGE);
    x->cpu.unscored = 0;
    a.unscored = &x->cpu.unscored;
    cpu->ops->select(cpu, &a);
    CHECK(cpu->ops->sync(cpu) == OK);
}

/* One piece of device memory for all calls: a test has hundreds. */
struct room {
    uint8_t *base;
    size_t used;
};
enum { ROOM = 96 << 20 };

static void *place(struct room *r, const void *from, size_t bytes)
{
    void *p = r->base + r->used;
    r->used += (bytes + 255) / 256 * 256;
    CHECK(r->used <= ROOM);
    gpu->ops->copy(gpu, p, from, bytes);
    return p;
}

static void go_gpu(struct run *x, bool known)
{
    static uint8_t *base;
    struct select_args a = args_of(x, known);
    size_t pages = x->lanes * x->page_cap * 4, estimates = x->lanes * x->estimate_cap * 4 + 4;
    size_t lanes = x->lanes * 4;
    if (base == NULL)
        base = gpu->ops->alloc(gpu, ROOM);
    CHECK(base != NULL);
    struct room r = {.base = base};
    struct lists d = {.pages = place(&r, x->gpu.pages, pages),
                      .masks = place(&r, x->gpu.masks, pages),
                      .share = place(&r, x->gpu.share, pages),
                      .n_pages = place(&r, x->gpu.n_pages, lanes),
                      .n_estimates = place(&r, x->gpu.n_estimates, lanes),
                      .estimates = place(&r, x->gpu.estimates, estimates)};
    float *known_at = place(&r, x->known, lanes * x->group);
    uint32_t zero = 0, *unscored = place(&r, &zero, 4);
    a.kv = &x->w->gpu_kv;
    a.scores = place(&r, x->scores, x->n_scores * 4);
    a.known = known ? known_at : NULL;
    a.unscored = unscored;
    point_at(&a, &d, x->w->map != MAP_PAGE);
    gpu->ops->select(gpu, &a);
    gpu->ops->copy(gpu, x->gpu.pages, d.pages, pages);
    gpu->ops->copy(gpu, x->gpu.masks, d.masks, pages);
    gpu->ops->copy(gpu, x->gpu.share, d.share, pages);
    gpu->ops->copy(gpu, x->gpu.n_pages, d.n_pages, lanes);
    gpu->ops->copy(gpu, x->gpu.n_estimates, d.n_estimates, lanes);
    gpu->ops->copy(gpu, x->gpu.estimates, d.estimates, estimates);
    gpu->ops->copy(gpu, &x->gpu.unscored, unscored, 4);
    status st = gpu->ops->sync(gpu);
    if (st != OK)
        printf("# %s\n", err_text());
    CHECK(st == OK);
}

/* ---- comparing ---- */

static bool is_prob(const struct run *x)
{
    return x->reduce == REDUCE_SUM_PROB || x->reduce == REDUCE_MAX_PROB;
}

/* Ranks of a lane in float64; -inf: none. */
static double *ranks_of(const struct run *x, size_t lane, bool known)
{
    uint32_t n = x->rows[lane / x->w->geo->kv_heads].n_segments * x->w->desc.parts;
    double *rank = mem_alloc((n + 1) * sizeof *rank);
    for (uint32_t h = 0; h < x->group; h++) {
        const float *s = x->scores + (lane * x->group + h) * x->stride;
        double most = -INFINITY, sum = 0;
        for (uint32_t p = 0; p < n; p++)
            most = (double)s[p] > most ? (double)s[p] : most;
        for (uint32_t p = 0; p < n; p++)
            sum += s[p] > -INFINITY ? exp((double)s[p] - most) : 0;
        if (known)
            sum += exp((double)x->known[lane * x->group + h] - most);
        for (uint32_t p = 0; p < n; p++) {
            double v = exp((double)s[p] - most) / sum;
            rank[p] = h == 0 ? v : x->reduce == REDUCE_SUM_PROB ? rank[p] + v : fmax(rank[p], v);
        }
    }
    return rank;
}

/* Elements of a that are not in b, both ascending: how many of them are not close to the border, the
 * least rank in b (or in a, where b is less). */
static uint32_t strangers(const uint32_t *a, uint32_t n_a, const uint32_t *b, uint32_t n_b,
                          const double *rank, double border)
{
    uint32_t n = 0;
    for (uint32_t i = 0, j = 0; i < n_a; i++) {
        while (j < n_b && b[j] < a[i])
            j++;
        if (j < n_b && b[j] == a[i])
            continue;
        n += rank == NULL || fabs(rank[a[i]] - border) > 1e-5 * border;
    }
    return n;
}

static double least_of(const uint32_t *list, uint32_t n, const double *rank, uint32_t first)
{
    double least = INFINITY;
    for (uint32_t i = 0; i < n; i++)
        if (list[i] >= first && rank[list[i]] < least)
            least = rank[list[i]];
    return least;
}

struct verdict {
    uint32_t wrong, near; /* lists that differ, and why they may */
    bool shares, quiet;   /* quiet: nothing behind the lists was written */
};

/* loose: the count may be off by one (top_p). */
static struct verdict compare(const struct run *x, bool known, bool loose)
{
    struct verdict v = {0, 0, true, true};
    uint32_t sinks = SINKS > x->w->geo->block_rows ? SINKS / x->w->geo->block_rows : 1;
    for (size_t lane = 0; lane < x->lanes; lane++) {
        const uint32_t *a = x->gpu.pages + lane * x->page_cap, n = x->gpu.n_pages[lane];
        const uint32_t *b = x->cpu.pages + lane * x->page_cap, m = x->cpu.n_pages[lane];
        const uint32_t *e = x->gpu.estimates + lane * x->estimate_cap;
        const uint32_t *f = x->cpu.estimates + lane * x->estimate_cap;
        uint32_t ne = x->gpu.n_estimates[lane], nf = x->cpu.n_estimates[lane];
        bool same = n == m && ne == nf && memcmp(a, b, n * 4) == 0 && memcmp(e, f, ne * 4) == 0;
        if (x->w->map != MAP_PAGE && same)
            same = memcmp(x->gpu.masks + lane * x->page_cap, x->cpu.masks + lane * x->page_cap,
                          n * 4) == 0;
        const float *p = x->gpu.share + lane * x->page_cap, *q = x->cpu.share + lane * x->page_cap;
        for (uint32_t i = 0; same && i < n; i++)
            v.shares &= fabsf(p[i] - q[i]) <= 3e-5f * q[i] + 1e-30f;
        for (uint32_t i = n; i < x->page_cap; i++)
            v.quiet &= a[i] == 0xeeeeeeee;
        if (same)
            continue;
        bool may = is_prob(x) && x->w->map == MAP_PAGE && n <= m + loose && m <= n + loose;
        if (may) {
            double *rank = ranks_of(x, lane, known);
            double border = least_of(b, m, rank, sinks), rest = least_of(f, nf, rank, sinks);
            rest = nf == 0 ? border : rest;
            uint32_t out =
                loose ? 0
                      : strangers(a, n, b, m, rank, border) + strangers(b, m, a, n, rank, border);
            may = out == 0; /* estimates meet both borders */
            for (uint32_t i = 0; may && !loose && i < ne; i++)
                may = rank[e[i]] >= rest * (1 - 1e-5) && rank[e[i]] <= border * (1 + 1e-5);
            mem_free(rank);
        }
        v.near += may;
        v.wrong += !may;
    }
    return v;
}

static void check(struct run *x, bool known, bool loose, const char *name)
{
    renew_lists(x);
    go_cpu(x, known);
    go_gpu(x, known);
    struct verdict v = compare(x, known, loose);
    ok(v.wrong == 0 && v.near <= 1 + x->lanes / 4 && v.shares && v.quiet &&
           x->cpu.unscored == x->gpu.unscored,
       "%s: the CPU's lists (%u wrong, %u near ties%s%s)", name, v.wrong, v.near,
       v.shares ? "" : ", shares differ", v.quiet ? "" : ", wrote behind");
}

static const char *const reduces[] = {"max of softmax", "sum of softmax", "mean of scores",
                                      "max of scores", "the plug-in's own"};

static struct digest_desc plain(uint32_t parts)
{
    return (struct digest_desc){.kind = DIGEST_NONE, .parts = parts, .sinks = SINKS};
}

static char *named(const char *what, const char *reduce, uint32_t rows)
{
    static char text[160];
    snprintf(text, sizeof text, "%s, %s, R %u", what, reduce, rows);
    return text;
}

/* ---- pages ---- */

static void pages_are_the_cpus(void)
{
    static const uint32_t segments[] = {3, 1, 2, 0, 3, 3}, budgets[] = {64, 16, 700, 9, 1, 100000};
    static const uint32_t estimates[] = {40, 0, 30, 9, 200, 10};
    for (uint32_t rows = 8; rows <= (tap_small() ? 8 : 32); rows *= 2) {
        struct world *w = open_world(rows, 2, 3, MAP_PAGE, plain(SEGMENT_ROWS / rows));
        for (uint32_t reduce = 0; reduce <= REDUCE_NATIVE; reduce++)
            for (uint32_t known = 0; known < 2; known++) {
                struct run x = begin(w, 1 + reduce * 2, 6, segments, reduce);
                x.reduce = (enum group_reduce)reduce;
                for (uint32_t i = 0; i < 6; i++) {
                    x.rows[i].budget = budgets[i];
                    x.rows[i].estimate = estimates[i];
                }
                check(&x, known, false, named(known ? "known" : "pages", reduces[reduce], rows));
                for (uint32_t i = 0; i < 6; i++)
                    x.rows[i].top_p = 0.1f + 0.15f * (float)i;
                check(&x, known, true, named("top_p", reduces[reduce], rows));
                end(&x);
            }
        close_world(w);
    }
}

/* Every shape of the kernel: threads, keys of a thread, CTAs of a lane, and the loop. */
static void long_contexts_are_the_cpus(void)
{
    static const struct {
        uint32_t rows, heads, n_rows, segments;
    } shapes[] = {{16, 8, 1, 127}, {8, 8, 1, 127},  {16, 8, 6, 100}, {8, 1, 1, 1023},
                  {16, 2, 1, 700}, {8, 2, 64, 31},  {8, 8, 64, 7},   {16, 8, 33, 7},
                  {8, 4, 40, 40},  {8, 1, 1, 2000}, {32, 8, 70, 60}};
    for (uint32_t i = 0; i < ARRAY_LEN(shapes); i++) {
        uint32_t segments[MAX_ROWS], rows = shapes[i].rows, n = shapes[i].n_rows;
        struct world *w = open_world(rows, shapes[i].heads, shapes[i].segments, MAP_PAGE,
                                     plain(SEGMENT_ROWS / rows));
        for (uint32_t k = 0; k < n; k++)
            segments[k] = k == 0 ? shapes[i].segments : 1 + hash(k, i) % shapes[i].segments;
        struct run x = begin(w, 2, n, segments, 0);
        for (uint32_t reduce = REDUCE_MAX_PROB; reduce <= REDUCE_MEAN_RAW; reduce++) {
            x.reduce = (enum group_reduce)reduce;
            for (uint32_t k = 0; k < n; k++) {
                x.rows[k].budget = segments[k] * SEGMENT_ROWS / 50 + 8;
                x.rows[k].estimate = segments[k] * w->desc.parts / 8;
                x.rows[k].top_p = 1;
            }
            char text[80];
            snprintf(text, sizeof text, "%u x %u x %u partitions, %s", n, shapes[i].heads,
                     shapes[i].segments * w->desc.parts, reduces[reduce]);
            check(&x, reduce == REDUCE_SUM_PROB, false, text);
        }
        x.rows[0].top_p = 0.2f;
        check(&x, false, true, "and with top_p");
        end(&x);
        close_world(w);
    }
}

static void ties_go_to_the_smaller_partition(void)
{
    static const uint32_t segments[] = {100, 3};
    struct world *w = open_world(8, 2, 100, MAP_PAGE, plain(128));
    for (uint32_t reduce = 0; reduce <= REDUCE_NATIVE; reduce++) {
        struct run x = begin(w, 3, 2, segments, 0);
        x.reduce = (enum group_reduce)reduce;
        for (size_t i = 0; i < x.n_scores; i++)
            x.scores[i] = i % x.stride % 50 == 49 ? 2 : i % x.stride % 7 ? 1 : -0.0f;
        static const uint32_t budgets[] = {8 * 8, 8 * 3000, 8 * 11800};
        for (uint32_t k = 0; k < 3; k++) {
            x.rows[0].budget = x.rows[1].budget = budgets[k];
            x.rows[0].estimate = x.rows[1].estimate = 1000;
            renew_lists(&x);
            go_cpu(&x, false);
            go_gpu(&x, false);
            struct verdict v = compare(&x, false, false);
            ok(v.wrong + v.near == 0, "the first of equal pages, budget %u, %s", budgets[k],
               reduces[reduce]);
        }
        end(&x);
    }
    close_world(w);
}

static void what_has_no_score_is_not_selected(void)
{
    static const uint32_t segments[] = {2, 60, 1};
    struct world *w = open_world(16, 2, 60, MAP_PAGE, plain(64));
    for (uint32_t reduce = 0; reduce <= REDUCE_NATIVE; reduce++) {
        struct run x = begin(w, 3, 3, segments, 0);
        x.reduce = (enum group_reduce)reduce;
        for (size_t i = 0; i < x.n_scores; i++)
            if (i % x.stride % 4 != 1)
                x.scores[i] = i % x.stride % 4 == 2 ? NAN : -INFINITY;
        for (uint32_t i = 0; i < 3; i++) {
            x.rows[i].budget = 100000;
            x.rows[i].estimate = 100;
        }
        check(&x, false, false, named("holes", reduces[reduce], 16));
        for (size_t i = 0; i < x.n_scores; i++)
            x.scores[i] = i % 2 ? NAN : -INFINITY;
        for (uint32_t i = 0; i < 3; i++)
            x.rows[i].budget = 16 * (1 + i * 4);
        check(&x, false, false, named("no score at all", reduces[reduce], 16));
        ok(x.gpu.unscored == 6, "and such lanes are counted");
        for (uint32_t h = 1; h < 3; h++) /* one head of a group has some */
            for (size_t i = 0; i < x.stride; i++)
                x.scores[h * x.stride + i] = 3 * noise(h, (uint32_t)i);
        check(&x, reduce == REDUCE_MAX_PROB, false, named("a head without", reduces[reduce], 16));
        for (size_t i = 0; i < x.n_scores; i++)
            x.scores[i] = i % x.stride == 77 ? 5000 : -3000 - (float)(i % x.stride);
        for (uint32_t i = 0; i < 3; i++)
            x.rows[i].budget = 160;
        check(&x, false, false, named("underflow", reduces[reduce], 16));
        end(&x);
    }
    close_world(w);
}

/* ---- other maps ---- */

static void other_maps_are_the_cpus(void)
{
    static const struct {
        const char *name;
        enum partition_map map;
        struct digest_desc d;
    } maps[] = {
        {"clusters",
         MAP_GATHER,
         {.order = ORDER_KMEANS, .kind = DIGEST_CENTROID, .parts = 64, .sinks = SINKS}},
        {"100 clusters",
         MAP_RANGE,
         {.order = ORDER_KMEANS, .kind = DIGEST_CENTROID, .parts = 100, .sinks = SINKS}},
        {"single rows", MAP_TOKEN, {.kind = DIGEST_NONE, .parts = SEGMENT_ROWS, .sinks = SINKS}},
        {"ranges of 4 rows", MAP_RANGE, {.kind = DIGEST_NONE, .parts = 256, .sinks = SINKS}},
        {"ranges of 64 rows", MAP_RANGE, {.kind = DIGEST_NONE, .parts = 16, .sinks = SINKS}}};
    static const uint32_t segments[] = {3, 2, 30};
    for (uint32_t rows = 8; rows <= 32; rows *= 2)
        for (uint32_t i = 0; i < ARRAY_LEN(maps); i++)
            for (uint32_t reduce = REDUCE_SUM_PROB; reduce <= REDUCE_MEAN_RAW; reduce++) {
                struct world *w = open_world(rows, 2, 30, maps[i].map, maps[i].d);
                struct run x = begin(w, 3, 3, segments, 1);
                x.reduce = (enum group_reduce)reduce;
                for (size_t lane = 0; lane < 6; lane++) /* empty clusters have no score */
                    for (uint32_t p = 0; p < segments[lane / 2] * maps[i].d.parts; p++) {
                        uint32_t first, seg = p / maps[i].d.parts;
                        const uint8_t *record = NULL;
                        if (maps[i].d.order == ORDER_KMEANS)
                            record = digest_lane(&w->kv, w->numbers[seg], 0, (uint32_t)lane % 2);
                        for (uint32_t h = 0; h < 3; h++)
                            if (digest_rows(record, &maps[i].d, p % maps[i].d.parts, &first) == 0)
                                x.scores[(lane * 3 + h) * x.stride + p] = -INFINITY;
                    }
                for (uint32_t k = 0; k < 3; k++) {
                    x.rows[k].budget = 100 + 150 * k;
                    x.rows[k].estimate = 20 * k;
                }
                check(&x, false, false, named(maps[i].name, reduces[reduce], rows));
                x.rows[0].top_p = 0.2f;
                x.rows[1].top_p = 0.5f;
                renew_lists(&x);
                go_cpu(&x, false);
                go_gpu(&x, false);
                struct verdict v = compare(&x, false, false);
                ok(v.wrong <= 1 && v.shares && v.quiet, "and with top_p (%u differ)", v.wrong);
                end(&x);
                close_world(w);
            }
}

/* ---- batches ---- */

static void lists_depend_on_their_row_alone(void)
{
    uint32_t many[64], one = 127;
    struct world *w = open_world(16, 2, 127, MAP_PAGE, plain(64));
    for (uint32_t i = 0; i < 64; i++)
        many[i] = i == 0 ? 127 : i % 9;
    for (uint32_t reduce = 0; reduce <= REDUCE_NATIVE; reduce++) {
        struct run x = begin(w, 3, 1, &one, 0), y = begin(w, 3, 64, many, 0);
        x.reduce = y.reduce = (enum group_reduce)reduce;
        for (uint32_t i = 0; i < 64; i++) {
            y.rows[i].budget = 2600;
            y.rows[i].estimate = 999;
            y.rows[i].top_p = reduce % 2 ? 0.7f : 1;
        }
        x.rows[0] = y.rows[0];
        go_gpu(&x, true);
        go_gpu(&y, true);
        bool same = true;
        for (uint32_t h = 0; h < 2; h++) {
            size_t n = x.gpu.n_pages[h], m = x.gpu.n_estimates[h];
            same &= n == y.gpu.n_pages[h] && m == y.gpu.n_estimates[h] && n > 1;
            same &= memcmp(x.gpu.pages + h * x.page_cap, y.gpu.pages + h * y.page_cap, n * 4) == 0;
            same &= memcmp(x.gpu.share + h * x.page_cap, y.gpu.share + h * y.page_cap, n * 4) == 0;
            same &= memcmp(x.gpu.estimates + h * x.estimate_cap,
                           y.gpu.estimates + h * y.estimate_cap, m * 4) == 0;
        }
        ok(same, "a row alone has the lists it has among 64, bit for bit, %s", reduces[reduce]);
        end(&x);
        end(&y);
    }
    close_world(w);
}

int main(void)
{
    struct cpu_options o = {.isa = "auto"};
    CHECK(cpu_backend_open(&cpu, &o) == OK);
    if (spind_cuda_open(&gpu, 0) != OK)
        tap_skip_all(err_text());
    pages_are_the_cpus();
    if (tap_small())
        return tap_done();
    ties_go_to_the_smaller_partition();
    what_has_no_score_is_not_selected();
    other_maps_are_the_cpus();
    lists_depend_on_their_row_alone();
    long_contexts_are_the_cpus();
    gpu->ops->close(gpu);
    cpu->ops->close(cpu);
    return tap_done();
}
