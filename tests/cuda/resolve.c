/* Resolve and the changes of hot sets on the GPU against the CPU, lane by lane: the same blocks, estimates,
 * tables, slots, ages and counts, and in the slots the bytes of the pages. Attention behind resolve, which
 * runs beside the copies as far as it can, has the bits of attention that comes later. */
#include "cache/residency.h"
#include "kernels/core/splitmix.h"
#include "kernels/cuda_api.h"
#include "tests/tap.h"

#include <unistd.h>

enum { SEQS = 4, MAX_HEADS = 8, LAYERS = 2, MAX_LANES = LAYERS * MAX_HEADS, GROUP = 2 };

static uint64_t seed = 20261121;

static uint32_t below(uint32_t n)
{
    return (uint32_t)((splitmix_next(&seed) >> 32) * n >> 32);
}

struct shape {
    const char *name;
    uint32_t rows, dim, heads, segments, slots, page_cap, estimate_cap;
    float threshold;
    uint32_t epoch_steps, steps;
    enum kv_type type;
};

/* One backend's part. The arrays of a plan are in its memory. */
struct side {
    struct backend *be;
    struct kv_memory kv;
    struct leaf_pool *pool;
    struct hot_set *hot[SEQS];
    struct plan_row rows[SEQS];
    uint32_t *pages, *n_pages, *estimates, *n_estimates;
    float *share, *qkv, *out, *lse;
    void *spare;
};

static struct backend *cpu_be, *gpu_be;
static struct side cpu, gpu;
static struct shape s;
static struct kv_geometry geometries[32], *g; /* a backend knows one by its address */
static struct lane_place places[MAX_LANES];
static uint32_t n_lanes, n_all, n_pages_of, hbm_blocks, dram_blocks, n_at, most_slots;
static block_id *resident;
static uint32_t *records; /* of nothing: no row estimates */
static uint32_t *slot_blocks[SEQS], *in_dram[SEQS];
/* The plan as it is made here, and as it comes back. */
static uint32_t *plan_pages, *plan_estimates, *plan_n, *plan_n_estimates;
static float *plan_share;

static void *put(struct backend *be, const void *from, size_t bytes)
{
    void *p = be->ops->alloc(be, bytes);
    CHECK(p != NULL);
    if (from != NULL)
        be->ops->copy(be, p, from, bytes);
    return p;
}

static void *get(struct backend *be, const void *from, size_t bytes)
{
    void *p = mem_alloc(bytes + 1);
    be->ops->copy(be, p, from, bytes);
    status st = be->ops->sync(be);
    if (st != OK)
        printf("# %s: %s\n", be->ops->name, err_text());
    CHECK(st == OK);
    return p;
}

/* The second tier, all of it there. */
static void *put_host(struct backend *be, const void *from, size_t bytes)
{
    struct host_progress p = {0};
    if (be->ops->alloc_host == NULL)
        return put(be, from, bytes);
    void *to = be->ops->alloc_host(be, bytes);
    CHECK(to != NULL);
    for (uint32_t i = 0; i < 20000 && !p.ended; i++) {
        be->ops->host_progress(be, to, &p);
        usleep(1000);
    }
    CHECK(p.ended && p.ready == bytes);
    memcpy(to, from, bytes);
    return to;
}

static size_t arena(uint32_t blocks)
{
    return blocks * g->block_bytes[LANE_SPARSE];
}

/* The last lane of layer 1 is DENSE. */
static void make_geometry(void)
{
    n_all = LAYERS * s.heads;
    n_lanes = n_all - 1;
    for (uint32_t i = 0; i < n_all; i++)
        places[i] = (struct lane_place){LANE_SPARSE, (uint16_t)i};
    places[n_all - 1] = (struct lane_place){LANE_DENSE, 0};
    *g = (struct kv_geometry){.block_rows = s.rows,
                              .layers = LAYERS,
                              .kv_heads = s.heads,
                              .head_dim = s.dim,
                              .type = s.type,
                              .n_lanes = {n_lanes, 1},
                              .lanes = places};
    g->page_bytes = kv_page_bytes(g);
    g->block_bytes[LANE_SPARSE] = n_lanes * g->page_bytes;
    g->block_bytes[LANE_DENSE] = g->page_bytes;
}

static void shuffle(uint32_t *list, uint32_t n)
{
    for (uint32_t i = n; i > 1; i--) {
        uint32_t j = below(i), t = list[i - 1];
        list[i - 1] = list[j];
        list[j] = t;
    }
}

static void make_places(void)
{
    uint32_t *hbm = mem_alloc(hbm_blocks * 4), *dram = mem_alloc(dram_blocks * 4);
    for (uint32_t i = 0; i < hbm_blocks; i++)
        hbm[i] = i;
    for (uint32_t i = 0; i < dram_blocks; i++)
        dram[i] = i;
    shuffle(hbm, hbm_blocks);
    shuffle(dram, dram_blocks);
    for (uint32_t q = 0; q < SEQS - 1; q++) {
        slot_blocks[q] = mem_alloc(most_slots * 4);
        in_dram[q] = mem_alloc(n_pages_of * 4);
        memcpy(slot_blocks[q], hbm + q * most_slots, most_slots * 4);
        memcpy(in_dram[q], dram + q * n_pages_of, n_pages_of * 4);
    }
    resident = mem_alloc((n_pages_of + TAIL_ROWS / s.rows) * 4);
    records = mem_alloc(s.segments * 4);
    memcpy(resident, hbm + (SEQS - 1) * most_slots, (n_pages_of + TAIL_ROWS / s.rows) * 4);
    mem_free(hbm);
    mem_free(dram);
}

/* Numbers of less than 2. */
static void *make_arena(uint32_t blocks)
{
    uint64_t *words = mem_alloc(arena(blocks));
    const uint64_t mask = s.type == KV_E4M3 ? 0xbfbfbfbfbfbfbfbf : 0xbfffbfffbfffbfff;
    for (size_t i = 0; i < arena(blocks) / 8; i++)
        words[i] = splitmix_next(&seed) & mask;
    return words;
}

static size_t result_bytes(void)
{
    return (size_t)SEQS * s.heads * GROUP * s.dim * sizeof(float);
}

static size_t qkv_bytes(void)
{
    return (size_t)SEQS * (GROUP + 2) * s.heads * s.dim * sizeof(float);
}

static void open_side(struct side *d, struct backend *be, const void *hbm, const void *dram,
                      const float *qkv)
{
    memset(d, 0, sizeof *d);
    d->be = be;
    d->kv.geo = g;
    d->kv.hbm[LANE_SPARSE] = put(be, hbm, arena(hbm_blocks));
    d->kv.dram[LANE_SPARSE] = put_host(be, dram, arena(dram_blocks));
    d->pages = put(be, NULL, (size_t)n_at * s.page_cap * 4);
    d->share = put(be, NULL, (size_t)n_at * s.page_cap * 4);
    d->estimates = put(be, NULL, (size_t)n_at * s.estimate_cap * 4);
    d->n_pages = put(be, NULL, n_at * 4);
    d->n_estimates = put(be, NULL, n_at * 4);
    d->qkv = put(be, qkv, qkv_bytes());
    d->out = put(be, NULL, result_bytes());
    d->lse = put(be, NULL, result_bytes());
    d->spare = put(be, NULL, 128);
    CHECK(leaf_pool_create(&d->pool, be, n_lanes, 1 << 30) == OK);
    for (uint32_t q = 0; q < SEQS; q++) {
        d->rows[q] = (struct plan_row){.row = q,
                                       .pos = n_pages_of * s.rows + TAIL_ROWS - 1,
                                       .n_segments = s.segments,
                                       .records = records,
                                       .blocks = resident,
                                       .miss_threshold = s.threshold};
        if (q == SEQS - 1)
            break;
        CHECK(hot_set_open(&d->hot[q], be, d->pool, n_lanes, n_pages_of) == OK);
        CHECK(hot_set_resize(d->hot[q], be, slot_blocks[q], s.slots) == OK);
        CHECK(hot_set_cover(d->hot[q], d->pool, in_dram[q], n_pages_of) == OK);
        d->hot[q]->epoch_steps = s.epoch_steps;
        d->rows[q].hot = d->hot[q];
    }
}

static void close_side(struct side *d)
{
    struct backend *be = d->be;
    for (uint32_t q = 0; q < SEQS - 1; q++)
        hot_set_close(d->hot[q], be, d->pool);
    leaf_pool_destroy(d->pool);
    be->ops->free(be, d->kv.hbm[LANE_SPARSE], arena(hbm_blocks));
    if (be->ops->free_host != NULL)
        be->ops->free_host(be, d->kv.dram[LANE_SPARSE], arena(dram_blocks));
    else
        be->ops->free(be, d->kv.dram[LANE_SPARSE], arena(dram_blocks));
    be->ops->free(be, d->pages, (size_t)n_at * s.page_cap * 4);
    be->ops->free(be, d->share, (size_t)n_at * s.page_cap * 4);
    be->ops->free(be, d->estimates, (size_t)n_at * s.estimate_cap * 4);
    be->ops->free(be, d->n_pages, n_at * 4);
    be->ops->free(be, d->n_estimates, n_at * 4);
    be->ops->free(be, d->qkv, qkv_bytes());
    be->ops->free(be, d->out, result_bytes());
    be->ops->free(be, d->lse, result_bytes());
    be->ops->free(be, d->spare, 128);
    CHECK(be->ops->sync(be) == OK);
}

static void open_world(const struct shape *shape)
{
    g = g == NULL ? geometries : g + 1;
    s = *shape;
    make_geometry();
    n_at = SEQS * s.heads;
    n_pages_of = s.segments * SEGMENT_ROWS / s.rows;
    most_slots = s.slots + s.slots / 2;
    hbm_blocks = (SEQS - 1) * most_slots + n_pages_of + TAIL_ROWS / s.rows;
    dram_blocks = (SEQS - 1) * n_pages_of;
    make_places();
    plan_pages = mem_alloc((size_t)n_at * s.page_cap * 4);
    plan_share = mem_alloc((size_t)n_at * s.page_cap * 4);
    plan_estimates = mem_alloc((size_t)n_at * s.estimate_cap * 4);
    plan_n = mem_alloc(n_at * 4);
    plan_n_estimates = mem_alloc(n_at * 4);
    void *hbm = make_arena(hbm_blocks), *dram = make_arena(dram_blocks);
    float *qkv = mem_alloc(qkv_bytes());
    for (size_t i = 0; i < qkv_bytes() / sizeof *qkv; i++)
        qkv[i] = (float)below(2000) / 1000 - 1;
    open_side(&cpu, cpu_be, hbm, dram, qkv);
    open_side(&gpu, gpu_be, hbm, dram, qkv);
    mem_free(hbm);
    mem_free(dram);
    mem_free(qkv);
}

static void close_world(void)
{
    close_side(&cpu);
    close_side(&gpu);
    for (uint32_t q = 0; q < SEQS - 1; q++) {
        mem_free(slot_blocks[q]);
        mem_free(in_dram[q]);
    }
    mem_free(resident);
    mem_free(records);
    mem_free(plan_pages);
    mem_free(plan_share);
    mem_free(plan_estimates);
    mem_free(plan_n);
    mem_free(plan_n_estimates);
}

/* About n pages: three in four from a stretch that drifts, so that most are there from the step before. */
static void make_plan(uint32_t at, uint32_t n, uint32_t step)
{
    static bool taken[1 << 16];
    uint32_t window = n + n / 2 < n_pages_of ? n + n / 2 : n_pages_of;
    uint32_t drift = (at * 37 + step * (1 + n / 64)) % n_pages_of, got = 0, n_estimates = 0;
    memset(taken, 0, n_pages_of);
    for (uint32_t i = 0; i < n; i++)
        taken[(below(4) ? drift + below(window) : below(n_pages_of)) % n_pages_of] = true;
    for (uint32_t p = 0; p < n_pages_of; p++)
        if (taken[p] && got < s.page_cap) {
            plan_share[at * s.page_cap + got] = (float)below(1000) / 1000;
            plan_pages[at * s.page_cap + got++] = p;
        } else if (!taken[p] && below(4) == 0 && n_estimates < s.estimate_cap * 3 / 4) {
            plan_estimates[at * s.estimate_cap + n_estimates++] = p;
        }
    plan_n[at] = got;
    plan_n_estimates[at] = n_estimates;
}

/* Behind n copies on the device. */
static void resolve_behind(struct side *d, uint32_t layer, bool values, uint32_t n)
{
    struct backend *be = d->be;
    be->ops->copy(be, d->pages, plan_pages, (size_t)n_at * s.page_cap * 4);
    be->ops->copy(be, d->share, plan_share, (size_t)n_at * s.page_cap * 4);
    be->ops->copy(be, d->estimates, plan_estimates, (size_t)n_at * s.estimate_cap * 4);
    be->ops->copy(be, d->n_pages, plan_n, n_at * 4);
    be->ops->copy(be, d->n_estimates, plan_n_estimates, n_at * 4);
    const struct resolve_args a = {.kv = &d->kv,
                                   .desc = {.order = ORDER_BISECT,
                                            .kind = DIGEST_CENTROID,
                                            .parts = SEGMENT_ROWS / s.rows,
                                            .values = values},
                                   .layer = layer,
                                   .rows = d->rows,
                                   .n_rows = SEQS,
                                   .page_cap = s.page_cap,
                                   .estimate_cap = s.estimate_cap,
                                   .pages = d->pages,
                                   .share = d->share,
                                   .n_pages = d->n_pages,
                                   .estimates = d->estimates,
                                   .n_estimates = d->n_estimates};
    for (uint32_t i = 0; i < n; i++)
        be->ops->copy(be, d->spare, (char *)d->spare + 64, 64);
    be->ops->resolve(be, &a);
}

static void resolve(struct side *d, uint32_t layer, bool values)
{
    resolve_behind(d, layer, values, 0);
}

/* Of layer 0, all lanes of which are SPARSE; without estimates. */
static void attend(struct side *d)
{
    struct batch_seq seqs[SEQS];
    for (uint32_t q = 0; q < SEQS; q++)
        seqs[q] = (struct batch_seq){.first_row = q,
                                     .n_rows = 1,
                                     .first_pos = d->rows[q].pos,
                                     .blocks = {resident, resident},
                                     .first_plan = q,
                                     .planned = true};
    const struct attend_plans plans = {.rows = d->rows,
                                       .n_rows = SEQS,
                                       .page_cap = s.page_cap,
                                       .pages = d->pages,
                                       .n_pages = d->n_pages};
    d->be->ops->attend(d->be, &(struct attend_args){.kv = &d->kv,
                                                    .layer = 0,
                                                    .heads = s.heads * GROUP,
                                                    .seqs = seqs,
                                                    .n_seqs = SEQS,
                                                    .scale = 0.1f,
                                                    .qkv = d->qkv,
                                                    .plans = &plans,
                                                    .n_plans = 1,
                                                    .out = d->out,
                                                    .lse = d->lse});
}

static bool same_bytes(void *a, void *b, size_t bytes)
{
    bool same = memcmp(a, b, bytes) == 0;
    mem_free(a);
    mem_free(b);
    return same;
}

/* Right behind resolve, and again when all has come. With enough commands for a graph, from the second time on. */
static bool attends_the_same(void)
{
    resolve_behind(&gpu, 0, true, 8);
    attend(&gpu);
    float *out = get(gpu.be, gpu.out, result_bytes());
    float *lse = get(gpu.be, gpu.lse, (size_t)SEQS * s.heads * GROUP * 4);
    attend(&gpu);
    bool same = same_bytes(out, get(gpu.be, gpu.out, result_bytes()), result_bytes());
    return same_bytes(lse, get(gpu.be, gpu.lse, (size_t)SEQS * s.heads * GROUP * 4),
                      (size_t)SEQS * s.heads * GROUP * 4) &&
           same;
}

static bool same_memory(const void *a, const void *b, size_t bytes)
{
    void *x = get(cpu.be, a, bytes), *y = get(gpu.be, b, bytes);
    bool same = memcmp(x, y, bytes) == 0;
    mem_free(x);
    mem_free(y);
    return same;
}

/* Lists up to their counts: what lies behind is nobody's. */
static bool same_lists(const uint32_t *a, const uint32_t *b, uint32_t cap, const uint32_t *na,
                       const uint32_t *nb)
{
    uint32_t *x = get(cpu.be, a, (size_t)n_at * cap * 4),
             *y = get(gpu.be, b, (size_t)n_at * cap * 4);
    uint32_t *nx = get(cpu.be, na, n_at * 4), *ny = get(gpu.be, nb, n_at * 4);
    bool same = memcmp(nx, ny, n_at * 4) == 0;
    for (uint32_t at = 0; same && at < n_at; at++)
        same &= memcmp(x + (size_t)at * cap, y + (size_t)at * cap, nx[at] * 4) == 0;
    mem_free(x);
    mem_free(y);
    mem_free(nx);
    mem_free(ny);
    return same;
}

static bool same_result(void)
{
    return same_lists(cpu.pages, gpu.pages, s.page_cap, cpu.n_pages, gpu.n_pages) &&
           same_lists(cpu.estimates, gpu.estimates, s.estimate_cap, cpu.n_estimates,
                      gpu.n_estimates);
}

static bool same_lane(const struct hot_set *a, const struct hot_set *b, uint32_t lane)
{
    size_t x = (size_t)lane * a->max_slots, y = (size_t)lane * b->max_slots, n = a->n_slots;
    bool same = memcmp(a->slot_page + x, b->slot_page + y, n * 4) == 0;
    same &= memcmp(a->slot_epoch + x, b->slot_epoch + y, n * 2) == 0;
    same &= memcmp(a->slot_flags + x, b->slot_flags + y, n) == 0;
    same &= memcmp(&a->stats[lane], &b->stats[lane], sizeof *a->stats) == 0;
    for (uint32_t p = 0; p < n_pages_of; p++)
        same &= *hot_entry(a, lane, p) == *hot_entry(b, lane, p);
    return same;
}

static bool same_sets(void)
{
    bool same = true;
    for (uint32_t q = 0; q < SEQS - 1; q++) {
        struct hot_set *a = hot_set_snapshot(cpu.hot[q]), *b = hot_set_snapshot(gpu.hot[q]);
        same &= a->n_slots == b->n_slots && a->epoch == b->epoch;
        for (uint32_t lane = 0; same && lane < n_lanes; lane++)
            same &= same_lane(a, b, lane);
        mem_free(a);
        mem_free(b);
        hot_set_audit(gpu.hot[q]);
    }
    return same;
}

static void end_step(void)
{
    hot_sets_step(cpu.hot, SEQS - 1);
    hot_sets_step(gpu.hot, SEQS - 1);
}

static void resize_one(void)
{
    uint32_t q = below(SEQS - 1), least = s.page_cap < s.slots ? s.page_cap : s.slots;
    uint32_t n = least + below(most_slots - least + 1);
    CHECK(hot_set_resize(cpu.hot[q], cpu.be, slot_blocks[q], n) == OK);
    CHECK(hot_set_resize(gpu.hot[q], gpu.be, slot_blocks[q], n) == OK);
}

/* The plan of layer 0 once more, when all of it is there. What the CPU counted before goes to so_far. */
static bool hits_alone(struct hot_counts *so_far)
{
    struct hot_counts n = {0};
    for (uint32_t q = 0; q < SEQS - 1; q++)
        hot_set_collect(cpu.hot[q], &so_far[q]);
    resolve(&cpu, 0, true);
    bool same = attends_the_same() && same_result();
    for (uint32_t q = 0; q < SEQS - 1; q++) {
        struct hot_counts before = so_far[q];
        hot_set_collect(cpu.hot[q], &so_far[q]);
        n.hits += so_far[q].hits - before.hits;
        n.misses += so_far[q].misses - before.misses;
    }
    return same && n.hits > 0 && (n.misses == 0 || s.threshold > 0);
}

static uint64_t n_replayed(void)
{
    struct step_counts c = {0};
    if (gpu.be->ops->counts != NULL)
        gpu.be->ops->counts(gpu.be, &c);
    return c.replayed;
}

static void the_gpu_does_what_the_cpu_does(void)
{
    bool results = true, sets = true, bytes = true, sums = true, full = true;
    uint64_t hits = 0, misses = 0, light = 0, replayed = n_replayed();
    struct hot_counts of_cpu[SEQS] = {0};
    for (uint32_t step = 0; step < s.steps && results && sets; step++) {
        for (uint32_t layer = 0; layer < LAYERS; layer++) {
            uint32_t n = step % 7 == 3 ? 1 + below(4) : 1 + below(s.page_cap);
            for (uint32_t at = 0; at < n_at; at++)
                make_plan(at, n, step);
            bool values = below(8) != 0;
            resolve(&cpu, layer, values);
            if (layer == 0 && values)
                sums &= attends_the_same();
            else
                resolve(&gpu, layer, values);
            results &= same_result();
            if (layer == 0 && values && step % 4 == 1)
                full &= hits_alone(of_cpu);
        }
        if (step % 5 == 0)
            sets &= same_sets(); /* pages of this step are still in use */
        end_step();
        if (step % 3 == 2)
            resize_one();
        if (step % 16 == 15)
            for (uint32_t q = 0; q < SEQS - 1; q++) {
                uint32_t pace = s.epoch_steps + step / 16 % 4;
                hot_set_look(cpu.hot[q]);
                hot_set_look(gpu.hot[q]);
                hot_set_pace(cpu.hot[q], pace);
                hot_set_pace(gpu.hot[q], pace);
            }
        sets &= same_sets();
    }
    bytes = same_memory(cpu.kv.hbm[LANE_SPARSE], gpu.kv.hbm[LANE_SPARSE], arena(hbm_blocks));
    for (uint32_t q = 0; q < SEQS - 1; q++) {
        struct hot_counts a = of_cpu[q], b = {0};
        hot_set_collect(cpu.hot[q], &a);
        hot_set_collect(gpu.hot[q], &b);
        CHECK(gpu.be->ops->sync(gpu.be) == OK);
        hot_set_collect(gpu.hot[q], &b);
        results &= a.hits == b.hits && a.misses == b.misses && a.light_misses == b.light_misses;
        hits += b.hits;
        misses += b.misses;
        light += b.light_misses;
    }
    ok(results, "%s: the same blocks and estimates, step by step", s.name);
    ok(sets, "%s: the same tables, slots, ages and counts", s.name);
    ok(bytes, "%s: every byte of HBM as on the CPU", s.name);
    ok(sums, "%s: attention beside the copies is attention behind them", s.name);
    ok(full, "%s: also where nothing misses", s.name);
    ok(gpu.be->ops->counts == NULL || n_replayed() > replayed, "%s: and as a graph", s.name);
    ok(hits > 0 && misses > 0 && (s.threshold == 0 || light > 0),
       "%s: %llu hits, %llu misses, %llu of them light", s.name, (unsigned long long)hits,
       (unsigned long long)misses, (unsigned long long)light);
}

static void epochs_may_wrap(void)
{
    bool same = true;
    for (uint32_t q = 0; q < SEQS - 1; q++) {
        hot_set_pace(cpu.hot[q], 1);
        hot_set_pace(gpu.hot[q], 1);
    }
    for (uint32_t step = 0; step < 34000; step++) {
        if (step % 4001 == 7 || step % 32767 < 2)
            for (uint32_t layer = 0; layer < LAYERS; layer++) {
                for (uint32_t at = 0; at < n_at; at++)
                    make_plan(at, 20, step);
                resolve(&cpu, layer, true);
                resolve(&gpu, layer, true);
                same &= same_result();
            }
        end_step();
        if (step % 64 == 0)
            same &= gpu.be->ops->sync(gpu.be) == OK;
        if (step % 4096 == 0)
            same &= same_sets();
    }
    ok(same && same_sets(), "%s: 34,000 epochs, with a wrap and sweeps", s.name);
}

static void a_plan_larger_than_its_slots_fails(void)
{
    uint32_t few = 4, n_bad = 0;
    CHECK(hot_set_resize(cpu.hot[0], cpu.be, slot_blocks[0], few) == OK);
    CHECK(hot_set_resize(gpu.hot[0], gpu.be, slot_blocks[0], few) == OK);
    for (uint32_t at = 0; at < n_at; at++)
        make_plan(at, 20, at);
    resolve(&cpu, 0, true);
    resolve(&gpu, 0, true);
    is_int(cpu.be->ops->sync(cpu.be), ERR_DEVICE, "more pages than slots: the CPU's step fails");
    is_int(gpu.be->ops->sync(gpu.be), ERR_DEVICE, "and the GPU's");
    ok(strstr(err_text(), "layer 0") != NULL, "it says where: %s", err_text());
    is_int(gpu.be->ops->sync(gpu.be), OK, "the error is gone with that");
    ok(same_result() && same_sets(), "nothing of such a lane is attended, and tables are the same");
    uint32_t *n = get(gpu.be, gpu.n_pages, n_at * 4);
    for (uint32_t h = 0; h < s.heads; h++)
        n_bad += plan_n[h] > few && n[h] == 0;
    ok(n_bad > 0, "%u lanes of the sequence have empty plans", n_bad);
    mem_free(n);
    end_step();
}

static void statistics_come_late(void)
{
    const struct miss_curve *a = hot_set_curve(cpu.hot[1]), *b = hot_set_curve(gpu.hot[1]);
    struct hot_counts n = {0};
    hot_set_look(cpu.hot[1]);
    hot_set_look(gpu.hot[1]);
    CHECK(gpu.be->ops->sync(gpu.be) == OK);
    ok(hot_set_learn(cpu.hot[1]) && hot_set_learn(gpu.hot[1]) && b->n > 0 && a->n == b->n &&
           memcmp(a->size, b->size, a->n * sizeof *a->size) == 0 &&
           memcmp(a->miss, b->miss, a->n * sizeof *a->miss) == 0,
       "a curve arrives with a sync");
    hot_set_close(gpu.hot[1], gpu.be, gpu.pool);
    CHECK(hot_set_open(&gpu.hot[1], gpu.be, gpu.pool, n_lanes, n_pages_of) == OK);
    leaf_pool_collect(gpu.pool, &n);
    ok(n.hits + n.misses > 0, "what was counted last is not lost when a hot set closes");
}

int main(int argc, char **argv) /* how many of the shapes, for a sanitizer; all */
{
    static const struct shape shapes[] = {
        {"small pages", 8, 8, 5, 5, 48, 48, 64, 0, 1, 60, KV_BF16},
        {"light misses", 8, 8, 5, 5, 48, 48, 64, 0.4f, 1, 60, KV_BF16},
        {"light misses, little room", 8, 8, 5, 5, 48, 48, 12, 0.9f, 2, 40, KV_BF16},
        {"8 KiB pages", 16, 128, 4, 10, 200, 60, 64, 0, 1, 20, KV_BF16},
        {"4 KiB pages", 8, 128, 3, 8, 150, 33, 64, 0, 3, 20, KV_BF16},
        {"odd pages of 5 KiB", 8, 160, 3, 4, 100, 40, 64, 0, 1, 10, KV_BF16},
        {"pages of 576 bytes, as fp8 has them", 8, 18, 3, 4, 100, 40, 64, 0, 1, 10, KV_BF16},
        {"16 KiB pages", 32, 128, 2, 10, 100, 30, 64, 0, 1, 10, KV_BF16},
        {"fp8, 4 KiB pages", 16, 128, 4, 10, 200, 60, 64, 0, 1, 20, KV_E4M3},
        {"fp8, 2 KiB pages, light", 8, 128, 3, 8, 150, 33, 64, 0.4f, 1, 20, KV_E4M3},
        {"fp8, odd pages", 8, 36, 3, 4, 100, 40, 64, 0, 1, 10, KV_E4M3},
        {"long lists", 8, 8, 2, 80, 4000, 2600, 1024, 0, 1, 10, KV_BF16},
        {"long lists, light", 8, 8, 2, 80, 3000, 1900, 3000, 0.5f, 1, 10, KV_BF16},
        {"the longest lists in shared memory", 8, 8, 2, 80, 3000, 1920, 64, 0, 1, 6, KV_BF16},
        {"the most slots", 8, 8, 1, 200, 21844, 900, 64, 0, 1, 8, KV_BF16},
    };
    if (getenv("TEST_ITSELF") != NULL) /* against a second CPU backend */
        CHECK(cpu_backend_open(&gpu_be, &(struct cpu_options){.n_threads = 2}) == OK);
    else if (spind_cuda_open(&gpu_be, 0) != OK)
        tap_skip_all(err_text());
    CHECK(cpu_backend_open(&cpu_be, &(struct cpu_options){.n_threads = 1}) == OK);
    uint32_t n = argc > 1 ? (uint32_t)atoi(argv[1]) : tap_small() ? 2 : (uint32_t)ARRAY_LEN(shapes);
    for (uint32_t i = 0; i < n && i < ARRAY_LEN(shapes); i++) {
        open_world(&shapes[i]);
        the_gpu_does_what_the_cpu_does();
        if (i == 0 && argc == 1 && !tap_small())
            epochs_may_wrap();
        if (i == 0) {
            a_plan_larger_than_its_slots_fails();
            statistics_come_late();
        }
        close_world();
    }
    cpu_be->ops->close(cpu_be);
    gpu_be->ops->close(gpu_be);
    return tap_done();
}
