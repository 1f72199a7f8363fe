/* Score, select and resolve, queued one after the other, are one kernel where digests allow it, or two: plans are
 * those of the three on their own, bit for bit. A sync between two operations keeps them apart; whoever wants masks of
 * whole pages gets select's own kernel. */
#include "cache/residency.h"
#include "kernels/core/digest.h"
#include "kernels/cuda_api.h"
#include "tests/cuda/noise.h"
#include "tests/tap.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { DIM = 128, SINKS = 16, MAX_ROWS = 64, MAX_SEGMENTS = 1024, MAX_PAGES = MAX_SEGMENTS * 64 };

static struct backend *gpu;

static void *put(const void *from, size_t bytes)
{
    void *p = gpu->ops->alloc(gpu, bytes);
    CHECK(p != NULL);
    gpu->ops->copy(gpu, p, from, bytes);
    CHECK(gpu->ops->sync(gpu) == OK);
    return p;
}

/* ---- a layer's digests ---- */

struct world {
    struct kv_geometry *geo;
    struct kv_memory kv;
    struct digest_desc desc;
    size_t record_total;
    uint32_t n_records;
    bool spills; /* every other row */
};

/* The backend knows a geometry by its address: none is used twice. */
static struct kv_geometry geometries[32];
static uint32_t n_geometries;
static struct lane_place places[32][2 * 8];

/* The last layer of two is used; rows: of a page; `dense`: a head that is attended whole. */
static struct world open_world(uint32_t kv_heads, uint32_t n_records, uint32_t rows, int dense)
{
    struct world w = {.n_records = n_records,
                      .desc = {.order = ORDER_BISECT,
                               .kind = DIGEST_CENTROID,
                               .parts = SEGMENT_ROWS / rows,
                               .sinks = SINKS,
                               .values = true}};
    struct digest_layout l = digest_layout_of(DIM, &w.desc);
    CHECK(n_geometries < ARRAY_LEN(geometries));
    w.geo = &geometries[n_geometries];
    *w.geo = (struct kv_geometry){.block_rows = rows,
                                  .layers = 2,
                                  .kv_heads = kv_heads,
                                  .head_dim = DIM,
                                  .page_bytes = (size_t)rows * DIM * 4};
    for (uint32_t i = 0; i < 2 * kv_heads; i++) {
        bool is = dense >= 0 && i % kv_heads == (uint32_t)dense;
        uint32_t class_ = is ? LANE_DENSE : LANE_SPARSE;
        places[n_geometries][i] =
            (struct lane_place){(uint16_t)class_, (uint16_t)w.geo->n_lanes[class_]++};
    }
    w.geo->lanes = places[n_geometries++];
    w.geo->block_bytes[LANE_SPARSE] = w.geo->n_lanes[LANE_SPARSE] * w.geo->page_bytes;
    w.kv.geo = w.geo;
    w.kv.record_lane_bytes = l.bytes;
    w.kv.record_bytes = w.geo->n_lanes[LANE_SPARSE] * l.bytes;
    w.record_total = n_records * w.kv.record_bytes;
    uint8_t *records = mem_alloc(w.record_total);
    for (size_t lane = 0; lane < w.record_total / l.bytes; lane++) {
        uint8_t *to = records + lane * l.bytes + l.vectors;
        float *base = (float *)(void *)to;
        for (uint32_t c = 0; c < DIM; c++) {
            base[c] = noise(1, (uint32_t)lane * DIM + c) - 1;
            base[DIM + c] = (1.5f + noise(2, (uint32_t)lane * DIM + c)) / 128;
        }
        for (uint32_t i = 0; i < w.desc.parts * DIM / 4; i++)
            ((uint32_t *)(void *)(base + 2 * DIM))[i] = hash((uint32_t)lane, i);
    }
    w.kv.records = put(records, w.record_total);
    mem_free(records);
    return w;
}

/* ---- a call ---- */

struct buffer {
    void *device, *host;
    size_t bytes;
};

enum { SCORES, PAGES, SHARE, N_PAGES, ESTIMATES, N_ESTIMATES, UNSCORED, MASKS, BUFFERS };

/* What is kept apart: all three, with masks; all three; score alone; nothing. */
enum { OWN, APART, SCORED, ONE, SIDES };
static const char *const sides[] = {[APART] = "apart", [SCORED] = "scored", [ONE] = "one"};

struct call {
    const char *name;
    uint32_t group, n_rows, budget, estimate;
    uint32_t segments[MAX_ROWS]; /* the first repeated where 0 rows are named */
    enum group_reduce reduce;
    bool known;
    float loud;         /* of queries; 0: all scores of a segment are alike */
    bool nothing;       /* no score is a number */
    uint32_t page_room; /* what page_cap is less than needed */
};

static struct buffer buffers[SIDES][BUFFERS];

static void make_buffers(const size_t bytes[BUFFERS], uint32_t side)
{
    for (uint32_t i = 0; i < BUFFERS; i++) {
        struct buffer *b = &buffers[side][i];
        b->bytes = bytes[i];
        b->host = mem_alloc(bytes[i]);
        memset(b->host, i == UNSCORED ? 0 : 0xee, bytes[i]);
        b->device = put(b->host, bytes[i]);
    }
}

static struct plan_row plan[MAX_ROWS];
static uint32_t records[MAX_ROWS][MAX_SEGMENTS];
static block_id blocks[MAX_ROWS][MAX_PAGES + 1];

static void make_rows(const struct world *w, const struct call *x, uint32_t *most)
{
    *most = 0;
    for (uint32_t i = 0; i < x->n_rows; i++) {
        uint32_t n = x->segments[i];
        CHECK(n * w->desc.parts <= MAX_PAGES);
        for (uint32_t s = 0; s < n; s++)
            records[i][s] = hash(i, s) % w->n_records;
        for (uint32_t p = 0; p <= n * w->desc.parts; p++)
            blocks[i][p] = hash(i + 77, p) % 1000000;
        plan[i] = (struct plan_row){.row = x->n_rows - 1 - i,
                                    .pos = n * SEGMENT_ROWS + 5,
                                    .n_segments = n,
                                    .records = records[i],
                                    .blocks = blocks[i],
                                    .budget = x->budget + i,
                                    .estimate = x->estimate,
                                    .top_p = 1};
        *most = n > *most ? n : *most;
    }
}

static void must_sync(void)
{
    status st = gpu->ops->sync(gpu);
    if (st != OK)
        printf("# %s\n", err_text());
    CHECK(st == OK);
}

/* Rows that are SPILLED have a hot set of their own with room for all pages; in each run a new one. */
struct hot_rows {
    struct leaf_pool *pool;
    struct hot_set *sets[MAX_ROWS];
    size_t bytes;
};

static struct hot_rows open_hot(struct world *w, const struct call *x)
{
    struct hot_rows h = {0};
    static uint32_t numbers[MAX_PAGES];
    const uint32_t n_lanes = w->geo->n_lanes[LANE_SPARSE];
    uint32_t next = 0;
    CHECK(leaf_pool_create(&h.pool, gpu, n_lanes, 1 << 30) == OK);
    for (uint32_t i = 0; i < x->n_rows; i += 2) {
        const uint32_t n = x->segments[i] * w->desc.parts;
        for (uint32_t p = 0; p < n; p++)
            numbers[p] = next++;
        CHECK(hot_set_open(&h.sets[i], gpu, h.pool, n_lanes, n) == OK);
        CHECK(hot_set_resize(h.sets[i], gpu, numbers, n) == OK);
        CHECK(hot_set_cover(h.sets[i], h.pool, numbers, n) == OK);
        plan[i].hot = h.sets[i];
    }
    h.bytes = next * w->geo->block_bytes[LANE_SPARSE];
    w->kv.hbm[LANE_SPARSE] = gpu->ops->alloc(gpu, h.bytes);
    w->kv.dram[LANE_SPARSE] = gpu->ops->alloc(gpu, h.bytes); /* it is read like any memory */
    CHECK(w->kv.hbm[LANE_SPARSE] != NULL && w->kv.dram[LANE_SPARSE] != NULL);
    return h;
}

static void close_hot(struct world *w, struct hot_rows *h)
{
    for (uint32_t i = 0; i < MAX_ROWS; i++) {
        if (h->sets[i] != NULL)
            hot_set_close(h->sets[i], gpu, h->pool);
        plan[i].hot = NULL;
    }
    leaf_pool_destroy(h->pool);
    gpu->ops->free(gpu, w->kv.hbm[LANE_SPARSE], h->bytes);
    gpu->ops->free(gpu, w->kv.dram[LANE_SPARSE], h->bytes);
    must_sync();
}

static void run(const struct world *w, const struct call *x, const void *qkv, const void *known,
                uint32_t stride, uint32_t page_cap, uint32_t side)
{
    struct buffer *b = buffers[side];
    const uint32_t heads = x->group * w->geo->kv_heads;
    const struct score_args score = {.kv = &w->kv,
                                     .kind = SCORE_MASS,
                                     .desc = w->desc,
                                     .layer = 1,
                                     .heads = heads,
                                     .rows = plan,
                                     .n_rows = x->n_rows,
                                     .scale = 0.0884f,
                                     .qkv = qkv,
                                     .scores = b[SCORES].device,
                                     .stride = stride};
    const struct select_args select = {.kv = &w->kv,
                                       .desc = w->desc,
                                       .map = MAP_PAGE,
                                       .reduce = x->reduce,
                                       .layer = 1,
                                       .group = x->group,
                                       .rows = plan,
                                       .n_rows = x->n_rows,
                                       .scores = b[SCORES].device,
                                       .stride = stride,
                                       .known = x->known ? known : NULL,
                                       .page_cap = page_cap,
                                       .estimate_cap = stride,
                                       .pages = b[PAGES].device,
                                       .masks = side == OWN ? b[MASKS].device : NULL,
                                       .share = b[SHARE].device,
                                       .n_pages = b[N_PAGES].device,
                                       .estimates = b[ESTIMATES].device,
                                       .n_estimates = b[N_ESTIMATES].device,
                                       .unscored = b[UNSCORED].device};
    const struct resolve_args resolve = {.kv = &w->kv,
                                         .desc = w->desc,
                                         .layer = 1,
                                         .rows = plan,
                                         .n_rows = x->n_rows,
                                         .page_cap = page_cap,
                                         .estimate_cap = stride,
                                         .pages = b[PAGES].device,
                                         .share = b[SHARE].device,
                                         .n_pages = b[N_PAGES].device,
                                         .estimates = b[ESTIMATES].device,
                                         .n_estimates = b[N_ESTIMATES].device};
    gpu->ops->score(gpu, &score);
    if (side != ONE)
        must_sync();
    gpu->ops->select(gpu, &select);
    if (side == OWN || side == APART)
        must_sync();
    gpu->ops->resolve(gpu, &resolve);
    for (uint32_t i = 0; i < BUFFERS; i++)
        gpu->ops->copy(gpu, b[i].host, b[i].device, b[i].bytes);
    must_sync();
}

static void plans_are_those_of_three_kernels(struct world *w, const struct call *from)
{
    struct call x = *from;
    uint32_t most, kv_heads = w->geo->kv_heads;
    for (uint32_t i = 1; i < x.n_rows; i++)
        if (x.segments[i] == 0 && from->segments[1] == 0)
            x.segments[i] = x.segments[0];
    for (uint32_t i = 0; i < x.n_rows; i++)
        x.segments[i] = x.segments[i] == ~0u ? 0 : x.segments[i];
    make_rows(w, &x, &most);
    const size_t lanes = (size_t)x.n_rows * kv_heads, heads = lanes * x.group;
    const size_t width = (size_t)(x.group + 2) * kv_heads * DIM, n_q = x.n_rows * width;
    const uint32_t stride = (most > 0 ? most : 1) * w->desc.parts;
    const uint32_t cap = (x.budget + x.n_rows) / w->geo->block_rows + 4 - x.page_room;
    float *q = mem_alloc(n_q * sizeof *q), *known = mem_alloc(heads * sizeof *known);
    for (size_t i = 0; i < n_q; i++)
        q[i] = x.nothing ? NAN : x.loud * noise(5, (uint32_t)i);
    for (size_t i = 0; i < heads; i++)
        known[i] = 3 * noise(6, (uint32_t)i) + x.loud;
    void *qkv = put(q, n_q * sizeof *q), *mass = put(known, heads * sizeof *known);
    const size_t bytes[BUFFERS] = {heads * stride * 4,
                                   lanes * cap * 4,
                                   lanes * cap * 4,
                                   lanes * 4,
                                   lanes * stride * 4,
                                   lanes * 4,
                                   4,
                                   lanes * cap * 4};
    for (uint32_t side = 0; side < SIDES; side++) {
        struct hot_rows hot;
        make_buffers(bytes, side);
        if (w->spills)
            hot = open_hot(w, &x);
        run(w, &x, qkv, mass, stride, cap, side);
        if (w->spills)
            close_hot(w, &hot);
    }
    const uint32_t *n = buffers[0][N_PAGES].host, *e = buffers[0][N_ESTIMATES].host;
    for (uint32_t side = APART; side < SIDES; side++) {
        bool same[BUFFERS], all = n[0] <= cap; /* or nothing ran */
        for (uint32_t i = 0; i < MASKS; i++) {
            same[i] = memcmp(buffers[0][i].host, buffers[side][i].host, bytes[i]) == 0;
            all &= same[i];
        }
        ok(all, "%s, %s: the same plans (%u pages, %u estimates)%s%s%s%s%s", x.name, sides[side],
           n[0], e[0], same[SCORES] ? "" : ", scores differ", same[PAGES] ? "" : ", pages differ",
           same[SHARE] ? "" : ", shares differ", same[ESTIMATES] ? "" : ", estimates differ",
           same[N_PAGES] && same[N_ESTIMATES] && same[UNSCORED] ? "" : ", counts differ");
    }
    for (uint32_t side = 0; side < SIDES; side++)
        for (uint32_t i = 0; i < BUFFERS; i++) {
            gpu->ops->free(gpu, buffers[side][i].device, bytes[i]);
            mem_free(buffers[side][i].host);
        }
    gpu->ops->free(gpu, qkv, n_q * sizeof *q);
    gpu->ops->free(gpu, mass, heads * sizeof *known);
    mem_free(q);
    mem_free(known);
}

/* Of one kernel: who hears of whom when is another order each time. */
static void runs_are_alike(const struct world *w, const struct call *x)
{
    enum { RUNS = 200 };
    uint32_t most, kv_heads = w->geo->kv_heads, wrong = 0;
    make_rows(w, x, &most);
    const size_t lanes = (size_t)x->n_rows * kv_heads;
    const size_t n_q = x->n_rows * (size_t)(x->group + 2) * kv_heads * DIM;
    const uint32_t stride = most * w->desc.parts;
    const uint32_t cap = (x->budget + x->n_rows) / w->geo->block_rows + 4;
    const size_t bytes[BUFFERS] = {lanes * x->group * stride * 4,
                                   lanes * cap * 4,
                                   lanes * cap * 4,
                                   lanes * 4,
                                   lanes * stride * 4,
                                   lanes * 4,
                                   4,
                                   4};
    float *q = mem_alloc(n_q * sizeof *q);
    for (size_t i = 0; i < n_q; i++)
        q[i] = x->loud * noise(9, (uint32_t)i);
    void *qkv = put(q, n_q * sizeof *q);
    for (uint32_t side = SCORED; side < SIDES; side++)
        make_buffers(bytes, side);
    run(w, x, qkv, NULL, stride, cap, SCORED);
    for (uint32_t i = 0; i < RUNS; i++) {
        bool same = true;
        run(w, x, qkv, NULL, stride, cap, ONE);
        for (uint32_t k = PAGES; k <= N_ESTIMATES; k++)
            same &= memcmp(buffers[SCORED][k].host, buffers[ONE][k].host, bytes[k]) == 0;
        wrong += !same;
    }
    ok(wrong == 0, "%s: %u of %u runs were different", x->name, wrong, RUNS);
    for (uint32_t side = SCORED; side < SIDES; side++)
        for (uint32_t i = 0; i < BUFFERS; i++) {
            gpu->ops->free(gpu, buffers[side][i].device, bytes[i]);
            mem_free(buffers[side][i].host);
        }
    gpu->ops->free(gpu, qkv, n_q * sizeof *q);
    mem_free(q);
}

static void close_world(struct world *w)
{
    gpu->ops->free(gpu, w->kv.records, w->record_total);
}

#define NONE ~0u

static void of_eight_heads(void)
{
    static const struct call calls[] = {
        {"one row of 130K", 4, 1, 2600, 2016, {126}, REDUCE_MAX_PROB, false, 2, false, 0},
        {"with known mass", 4, 1, 2600, 2016, {126}, REDUCE_MAX_PROB, true, 2, false, 0},
        {"sums of shares", 4, 1, 2600, 968, {126}, REDUCE_SUM_PROB, true, 2, false, 0},
        {"a group of three", 3, 1, 1024, 100, {41}, REDUCE_SUM_PROB, false, 3, false, 0},
        {"one head", 1, 2, 1024, 500, {33, 90}, REDUCE_MAX_PROB, false, 1, false, 0},
        {"two heads", 2, 3, 512, 3, {127, 65, 5}, REDUCE_SUM_PROB, true, 1, false, 0},
        {"loud queries", 4, 1, 2600, 2016, {126}, REDUCE_MAX_PROB, false, 40, false, 0},
        {"louder ones", 4, 2, 2600, 6000, {126, 50}, REDUCE_SUM_PROB, false, 300, false, 0},
        {"quiet queries", 4, 1, 2600, 2016, {126}, REDUCE_MAX_PROB, false, 0.001f, false, 0},
        {"queries of zero", 4, 2, 2600, 2016, {126, 3}, REDUCE_MAX_PROB, true, 0, false, 0},
        {"no numbers", 4, 2, 2600, 2016, {126, 3}, REDUCE_SUM_PROB, false, 1, true, 0},
        {"no numbers, known", 4, 1, 100, 2016, {30}, REDUCE_MAX_PROB, true, 1, true, 0},
        {"as the bars have it", 4, 1, 2600, 0, {127}, REDUCE_MAX_PROB, false, 0.3f, false, 0},
        {"six such rows", 4, 6, 2600, 0, {127}, REDUCE_MAX_PROB, false, 0.3f, false, 0},
        {"twelve of 130K", 4, 12, 2600, 0, {127}, REDUCE_MAX_PROB, false, 0.3f, false, 0},
        {"nothing to estimate", 4, 1, 2600, 0, {126}, REDUCE_MAX_PROB, false, 2, false, 0},
        {"no budget", 4, 1, 0, 7, {126}, REDUCE_MAX_PROB, false, 2, false, 0},
        {"all of it", 4, 1, 200000, 9, {126}, REDUCE_MAX_PROB, false, 2, false, 0},
        {"all is estimated", 4, 1, 1600, 9000, {126}, REDUCE_MAX_PROB, false, 2, false, 0},
        {"a short list", 4, 1, 1600, 100, {60}, REDUCE_MAX_PROB, false, 2, false, 30},
        {"one segment", 4, 1, 300, 10, {1}, REDUCE_MAX_PROB, false, 2, false, 0},
        {"none", 4, 1, 300, 10, {NONE}, REDUCE_MAX_PROB, false, 2, false, 0},
        {"six rows",
         4,
         6,
         2600,
         2016,
         {126, 125, 64, 1, NONE, 127},
         REDUCE_MAX_PROB,
         false,
         2,
         false,
         0},
        {"six loud rows",
         4,
         6,
         2600,
         900,
         {126, 125, 3, 1, 2, 127},
         REDUCE_SUM_PROB,
         true,
         90,
         false,
         0},
        {"twelve rows", 4, 12, 1280, 992, {62}, REDUCE_MAX_PROB, false, 2, false, 0},
        {"sixteen rows", 4, 16, 1280, 992, {120}, REDUCE_MAX_PROB, false, 2, false, 0},
        {"thirty rows", 4, 30, 1280, 992, {62}, REDUCE_MAX_PROB, true, 2, false, 0},
        {"64 rows of 8K", 4, 64, 1024, 112, {7}, REDUCE_MAX_PROB, false, 2, false, 0},
        {"64 quiet rows", 2, 64, 1024, 112, {7}, REDUCE_SUM_PROB, false, 0.01f, false, 0},
        {"64 rows of 40K", 4, 64, 1024, 612, {39}, REDUCE_MAX_PROB, false, 2, false, 0},
        {"64 rows without numbers", 4, 64, 1024, 112, {7}, REDUCE_MAX_PROB, false, 2, true, 0},
    };
    struct world w = open_world(8, 200, 16, -1);
    for (uint32_t i = 0; i < ARRAY_LEN(calls); i++)
        plans_are_those_of_three_kernels(&w, &calls[i]);
    close_world(&w);
    w = open_world(8, 200, 16, 3);
    struct call x = calls[1];
    x.name = "beside a dense head";
    plans_are_those_of_three_kernels(&w, &x);
    close_world(&w);
}

static void again_and_again(void)
{
    static const struct call calls[] = {
        {"sixteen CTAs of a lane", 4, 1, 2600, 0, {127}, REDUCE_MAX_PROB, false, 0.3f, false, 0},
        {"sixteen, with estimates", 4, 1, 2600, 2016, {127}, REDUCE_SUM_PROB, false, 1, false, 0},
        {"eight", 4, 2, 2600, 2016, {126, 127}, REDUCE_MAX_PROB, false, 0.02f, false, 0},
        {"four", 4, 3, 1280, 0, {62, 60, 61}, REDUCE_MAX_PROB, false, 0.3f, false, 0},
    };
    struct world w = open_world(8, 200, 16, -1);
    for (uint32_t i = 0; i < ARRAY_LEN(calls); i++)
        runs_are_alike(&w, &calls[i]);
    close_world(&w);
}

static void of_one_head(void)
{
    static const struct call calls[] = {
        {"one row of 1M", 4, 1, 20000, 16000, {1023}, REDUCE_MAX_PROB, false, 2, false, 0},
        {"a quiet row of 1M", 4, 1, 20000, 16000, {1024}, REDUCE_SUM_PROB, true, 0.05f, false, 0},
        {"of 500K", 4, 1, 10000, 8000, {500}, REDUCE_MAX_PROB, false, 2, false, 0},
        {"of 250K", 4, 2, 10000, 8000, {250, 17}, REDUCE_MAX_PROB, false, 2, false, 0},
        {"of 250K, no query", 4, 2, 10000, 8000, {250, 17}, REDUCE_MAX_PROB, false, 0, false, 0},
    };
    struct world w = open_world(1, 300, 16, -1);
    for (uint32_t i = 0; i < ARRAY_LEN(calls); i++)
        plans_are_those_of_three_kernels(&w, &calls[i]);
    close_world(&w);
}

/* Select and resolve alone are one kernel: a segment is two pieces. */
static void of_pages_of_eight(void)
{
    static const struct call calls[] = {
        {.name = "pages of 8",
         .group = 4,
         .n_rows = 1,
         .budget = 2600,
         .estimate = 2016,
         .segments = {126},
         .reduce = REDUCE_MAX_PROB,
         .loud = 2},
        {.name = "pages of 8, 9 rows",
         .group = 2,
         .n_rows = 9,
         .budget = 1000,
         .estimate = 300,
         .segments = {20, 3, NONE, 1, 17, 40, 2, 9, 1},
         .reduce = REDUCE_SUM_PROB,
         .known = true,
         .loud = 1},
        {.name = "pages of 8, one budget",
         .group = 4,
         .n_rows = 2,
         .budget = 8,
         .segments = {1, 5},
         .reduce = REDUCE_MAX_PROB,
         .loud = 2},
        {.name = "pages of 8, no numbers",
         .group = 4,
         .n_rows = 2,
         .budget = 600,
         .estimate = 40,
         .segments = {30, 2},
         .reduce = REDUCE_MAX_PROB,
         .loud = 1,
         .nothing = true},
    };
    struct world w = open_world(3, 60, 8, -1);
    for (uint32_t i = 0; i < ARRAY_LEN(calls); i++)
        plans_are_those_of_three_kernels(&w, &calls[i]);
    close_world(&w);
}

/* Of RESIDENT rows the plan kernel writes blocks, of SPILLED ones resolve does: each of its own only. */
static void of_spilled_rows_beside_resident_ones(void)
{
    static const struct call calls[] = {
        {.name = "every other row SPILLED",
         .group = 4,
         .n_rows = 5,
         .budget = 640,
         .estimate = 100,
         .segments = {3, 4, 2, 7, 1},
         .reduce = REDUCE_MAX_PROB,
         .loud = 2},
        {.name = "one row, SPILLED",
         .group = 4,
         .n_rows = 1,
         .budget = 640,
         .estimate = 100,
         .segments = {6},
         .reduce = REDUCE_SUM_PROB,
         .known = true,
         .loud = 1},
    };
    struct world w = open_world(3, 40, 16, 1);
    w.spills = true;
    for (uint32_t i = 0; i < ARRAY_LEN(calls); i++)
        plans_are_those_of_three_kernels(&w, &calls[i]);
    close_world(&w);
}

/* CTAs of a lane: sixteen; eight, with a crowded border; one. As little as there is of each, for a sanitizer. */
static void each_form_once(void)
{
    static const struct call calls[] = {
        {"sixteen CTAs of a lane", 4, 1, 300, 100, {70}, REDUCE_MAX_PROB, false, 2, false, 0},
        {"eight, crowded", 4, 2, 300, 200, {20, 5}, REDUCE_SUM_PROB, true, 300, false, 0},
        {"one", 4, 1, 100, 10, {3}, REDUCE_MAX_PROB, false, 2, false, 0},
    };
    struct world w = open_world(1, 80, 16, -1);
    for (uint32_t i = 0; i < ARRAY_LEN(calls); i++)
        plans_are_those_of_three_kernels(&w, &calls[i]);
    close_world(&w);
    of_spilled_rows_beside_resident_ones();
}

int main(void)
{
    if (spind_cuda_open(&gpu, 0) != OK)
        tap_skip_all(err_text());
    if (tap_small()) {
        each_form_once();
        gpu->ops->close(gpu);
        return tap_done();
    }
    of_eight_heads();
    of_one_head();
    of_pages_of_eight();
    of_spilled_rows_beside_resident_ones();
    again_and_again();
    gpu->ops->close(gpu);
    return tap_done();
}
