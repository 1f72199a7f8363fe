/* Resolve on every backend with real pages: whatever was selected lies behind the block that comes
 * out, byte for byte, step after step, whoever was pushed out for it. */
#include "cache/residency.h"
#include "kernels/core/splitmix.h"
#include "tests/tap.h"

enum {
    LAYERS = 2,
    KV_HEADS = 5, /* the last of layer 1 is DENSE */
    LANES = LAYERS * KV_HEADS - 1,
    HEAD_DIM = 8,
    R = 8,
    SEGMENTS = 5,
    PAGES = SEGMENTS * SEGMENT_ROWS / R,
    SLOTS = 48,
    SEQS = 4, /* the last is RESIDENT */
    PAGE_CAP = 48,
    ESTIMATE_CAP = 64,
    HEADS_ALL = SEQS * KV_HEADS,
    HBM_BLOCKS = (SEQS - 1) * SLOTS + PAGES,
    DRAM_BLOCKS = (SEQS - 1) * PAGES,
};

static uint64_t seed = 7;

static uint32_t below(uint32_t n)
{
    return (uint32_t)((splitmix_next(&seed) >> 32) * n >> 32);
}

struct bench {
    struct backend *be;
    struct lane_place places[LAYERS * KV_HEADS];
    struct kv_geometry geo;
    struct kv_memory kv;
    struct leaf_pool *pool;
    struct hot_set *hot[SEQS];
    block_id resident[PAGES];
    struct plan_row rows[SEQS];
    uint32_t asked[HEADS_ALL][PAGE_CAP], pages[HEADS_ALL][PAGE_CAP], masks[HEADS_ALL][PAGE_CAP];
    uint32_t n_asked[HEADS_ALL], n_pages[HEADS_ALL];
    float share[HEADS_ALL][PAGE_CAP];
    uint32_t estimates[HEADS_ALL][ESTIMATE_CAP], n_estimates[HEADS_ALL];
};

static struct bench x;

static size_t arena_bytes(uint32_t blocks)
{
    return blocks * x.geo.block_bytes[LANE_SPARSE];
}

static char *page_at(void *arena, uint32_t block, uint32_t lane)
{
    return (char *)arena + block * x.geo.block_bytes[LANE_SPARSE] + lane * x.geo.page_bytes;
}

/* The content of a page: the same wherever it lies. */
static void write_page(void *at, uint32_t seq, uint32_t page, uint32_t lane)
{
    uint64_t state = ((uint64_t)seq << 40) + ((uint64_t)page << 8) + lane;
    for (size_t i = 0; i < x.geo.page_bytes / 8; i++) {
        uint64_t word = splitmix_next(&state);
        memcpy((char *)at + 8 * i, &word, 8);
    }
}

static bool holds_page(uint32_t block, uint32_t seq, uint32_t page, uint32_t lane)
{
    char want[R * HEAD_DIM * 4];
    if (block >= HBM_BLOCKS)
        return false;
    write_page(want, seq, page, lane);
    return memcmp(want, page_at(x.kv.hbm[LANE_SPARSE], block, lane), sizeof want) == 0;
}

static void place_lanes(void)
{
    for (uint32_t i = 0; i < LAYERS * KV_HEADS; i++)
        x.places[i] = (struct lane_place){LANE_SPARSE, (uint16_t)i};
    x.places[LAYERS * KV_HEADS - 1] = (struct lane_place){LANE_DENSE, 0};
    x.geo = (struct kv_geometry){.block_rows = R,
                                 .layers = LAYERS,
                                 .kv_heads = KV_HEADS,
                                 .head_dim = HEAD_DIM,
                                 .page_bytes = (size_t)R * HEAD_DIM * 4,
                                 .n_lanes = {LANES, 1},
                                 .lanes = x.places};
    x.geo.block_bytes[LANE_SPARSE] = LANES * x.geo.page_bytes;
    x.geo.block_bytes[LANE_DENSE] = x.geo.page_bytes;
}

/* Slots of a sequence are neither in a row nor in order, and nor are its DRAM blocks. */
static uint32_t slot_block(uint32_t seq, uint32_t slot)
{
    return slot * (SEQS - 1) + (seq * 7 + slot) % (SEQS - 1);
}

static uint32_t dram_block(uint32_t seq, uint32_t page)
{
    return (page * 3 % PAGES) * (SEQS - 1) + (seq + page) % (SEQS - 1);
}

static void open_hot(uint32_t seq)
{
    uint32_t slots[SLOTS], dram[PAGES];
    for (uint32_t i = 0; i < SLOTS; i++)
        slots[i] = slot_block(seq, i);
    for (uint32_t i = 0; i < PAGES; i++) {
        dram[i] = dram_block(seq, i);
        for (uint32_t lane = 0; lane < LANES; lane++)
            write_page(page_at(x.kv.dram[LANE_SPARSE], dram[i], lane), seq, i, lane);
    }
    CHECK(hot_set_open(&x.hot[seq], x.be, x.pool, LANES, PAGES) == OK);
    CHECK(hot_set_resize(x.hot[seq], x.be, slots, SLOTS) == OK);
    CHECK(hot_set_cover(x.hot[seq], x.pool, dram, PAGES) == OK);
}

static void open_bench(struct backend *be)
{
    memset(&x, 0, sizeof x);
    x.be = be;
    place_lanes();
    x.kv = (struct kv_memory){.geo = &x.geo,
                              .hbm = {be->ops->alloc(be, arena_bytes(HBM_BLOCKS))},
                              .dram = {be->ops->alloc(be, arena_bytes(DRAM_BLOCKS))}};
    CHECK(x.kv.hbm[LANE_SPARSE] != NULL && x.kv.dram[LANE_SPARSE] != NULL);
    CHECK(leaf_pool_create(&x.pool, be, LANES, 1 << 24) == OK);
    for (uint32_t seq = 0; seq < SEQS - 1; seq++)
        open_hot(seq);
    for (uint32_t i = 0; i < PAGES; i++) {
        x.resident[i] = HBM_BLOCKS - 1 - i;
        for (uint32_t lane = 0; lane < LANES; lane++)
            write_page(page_at(x.kv.hbm[LANE_SPARSE], x.resident[i], lane), SEQS - 1, i, lane);
    }
    for (uint32_t seq = 0; seq < SEQS; seq++)
        x.rows[seq] = (struct plan_row){.row = seq,
                                        .pos = SEGMENTS * SEGMENT_ROWS + TAIL_ROWS,
                                        .n_segments = SEGMENTS,
                                        .blocks = x.resident,
                                        .hot = x.hot[seq]};
}

static void close_bench(void)
{
    for (uint32_t seq = 0; seq < SEQS - 1; seq++) {
        hot_set_audit(x.hot[seq]);
        hot_set_close(x.hot[seq], x.be, x.pool);
    }
    leaf_pool_destroy(x.pool);
    x.be->ops->free(x.be, x.kv.hbm[LANE_SPARSE], arena_bytes(HBM_BLOCKS));
    x.be->ops->free(x.be, x.kv.dram[LANE_SPARSE], arena_bytes(DRAM_BLOCKS));
}

/* Ascending pages, each with the chance n / PAGES; shares and a few estimates between them. */
static void make_plan(uint32_t at, uint32_t n)
{
    uint32_t got = 0, n_estimates = 0;
    for (uint32_t p = 0; p < PAGES; p++) {
        if (below(PAGES) < n && got < PAGE_CAP) {
            x.share[at][got] = p == 0 ? 1 : (float)below(1000) / 1000;
            x.masks[at][got] = 1 + below(255);
            x.asked[at][got++] = p;
        } else if (below(20) == 0 && n_estimates < ESTIMATE_CAP / 2) {
            x.estimates[at][n_estimates++] = p;
        }
    }
    memcpy(x.pages[at], x.asked[at], sizeof x.pages[at]);
    x.n_asked[at] = x.n_pages[at] = got;
    x.n_estimates[at] = n_estimates;
}

static struct resolve_args resolve_of(uint32_t layer)
{
    return (struct resolve_args){.kv = &x.kv,
                                 .desc = {.order = ORDER_BISECT,
                                          .kind = DIGEST_CENTROID,
                                          .parts = SEGMENT_ROWS / R,
                                          .values = true},
                                 .layer = layer,
                                 .rows = x.rows,
                                 .n_rows = SEQS,
                                 .page_cap = PAGE_CAP,
                                 .estimate_cap = ESTIMATE_CAP,
                                 .pages = x.pages[0],
                                 .share = x.share[0],
                                 .n_pages = x.n_pages,
                                 .estimates = x.estimates[0],
                                 .n_estimates = x.n_estimates};
}

static bool is_sparse(uint32_t layer, uint32_t head)
{
    return kv_lane(&x.geo, layer, head).class_ == LANE_SPARSE;
}

static bool all_pages_are_there(uint32_t layer)
{
    bool good = true;
    for (uint32_t at = 0; at < HEADS_ALL; at++) {
        if (!is_sparse(layer, at % KV_HEADS))
            continue;
        uint32_t lane = layer * KV_HEADS + at % KV_HEADS;
        good &= x.n_pages[at] == x.n_asked[at];
        for (uint32_t i = 0; i < x.n_pages[at]; i++)
            good &= holds_page(x.pages[at][i], at / KV_HEADS, x.asked[at][i], lane);
    }
    return good;
}

static void plan_all(uint32_t n)
{
    for (uint32_t at = 0; at < HEADS_ALL; at++)
        make_plan(at, n);
}

static void end_step(void)
{
    for (uint32_t seq = 0; seq < SEQS - 1; seq++)
        hot_set_step(x.hot[seq]);
}

static void every_page_lies_where_resolve_says(const char *name)
{
    bool good = true, kept = true;
    for (uint32_t step = 0; step < 200; step++) {
        for (uint32_t layer = 0; layer < LAYERS; layer++) {
            uint32_t masks[HEADS_ALL][PAGE_CAP];
            plan_all(1 + below(30));
            memcpy(masks, x.masks, sizeof masks);
            struct resolve_args a = resolve_of(layer);
            a.masks = step % 2 ? x.masks[0] : NULL;
            x.be->ops->resolve(x.be, &a);
            good &= all_pages_are_there(layer);
            kept &= memcmp(masks, x.masks, sizeof masks) == 0;
        }
        end_step();
    }
    good &= x.be->ops->sync(x.be) == OK;
    struct hot_counts n = {0};
    for (uint32_t seq = 0; seq < SEQS - 1; seq++)
        hot_set_collect(x.hot[seq], &n);
    ok(good, "%s: 200 steps, %u lanes, SPILLED and RESIDENT: each page is where its block says",
       name, LANES);
    ok(kept, "%s: masks stay with their pages", name);
    ok(n.hits > 0 && n.misses > 1000 && n.light_misses == 0, "%s: %llu hits, %llu misses", name,
       (unsigned long long)n.hits, (unsigned long long)n.misses);
}

static void a_dense_lane_is_left_alone(const char *name)
{
    plan_all(20);
    struct resolve_args a = resolve_of(1);
    x.be->ops->resolve(x.be, &a);
    bool same = true;
    for (uint32_t at = KV_HEADS - 1; at < HEADS_ALL; at += KV_HEADS)
        same &= memcmp(x.pages[at], x.asked[at], x.n_asked[at] * sizeof(uint32_t)) == 0;
    ok(same, "%s: the entries of a DENSE lane are not touched", name);
    end_step();
}

/* Which pages of a plan are not in the slots before the call. */
static bool is_missing(uint32_t seq, uint32_t lane, uint32_t page)
{
    return x.hot[seq] != NULL && (*hot_entry(x.hot[seq], lane, page) & HOT_GHOST) != 0;
}

static bool light_misses_became_estimates(uint32_t layer, float threshold)
{
    static uint32_t before[HEADS_ALL][ESTIMATE_CAP], n_before[HEADS_ALL];
    static bool missing[HEADS_ALL][PAGE_CAP];
    bool good = true;
    plan_all(24);
    memcpy(before, x.estimates, sizeof before);
    memcpy(n_before, x.n_estimates, sizeof n_before);
    for (uint32_t at = 0; at < HEADS_ALL; at++)
        for (uint32_t i = 0; i < x.n_asked[at]; i++)
            missing[at][i] =
                is_sparse(layer, at % KV_HEADS) &&
                is_missing(at / KV_HEADS, layer * KV_HEADS + at % KV_HEADS, x.asked[at][i]);
    struct resolve_args a = resolve_of(layer);
    x.be->ops->resolve(x.be, &a);
    for (uint32_t at = 0; at < HEADS_ALL; at++) {
        if (!is_sparse(layer, at % KV_HEADS))
            continue;
        uint32_t lane = layer * KV_HEADS + at % KV_HEADS, kept = 0, old = 0, estimated = 0;
        for (uint32_t i = 0; i < x.n_asked[at]; i++)
            if (!missing[at][i] || x.share[at][i] >= threshold) {
                good &= kept < x.n_pages[at] &&
                        holds_page(x.pages[at][kept], at / KV_HEADS, x.asked[at][i], lane);
                kept++;
            } else {
                while (old < n_before[at] && before[at][old] < x.asked[at][i])
                    good &= x.estimates[at][estimated++] == before[at][old++];
                good &= x.estimates[at][estimated++] == x.asked[at][i];
                good &=
                    !is_missing(at / KV_HEADS, lane, x.asked[at][i]); /* next time it is there */
            }
        while (old < n_before[at])
            good &= x.estimates[at][estimated++] == before[at][old++];
        good &= kept == x.n_pages[at] && estimated == x.n_estimates[at];
    }
    end_step();
    return good;
}

static void light_misses_are_estimated(const char *name)
{
    bool good = true;
    struct hot_counts n = {0};
    for (uint32_t seq = 0; seq < SEQS; seq++)
        x.rows[seq].miss_threshold = 0.4f;
    for (uint32_t step = 0; step < 60; step++)
        good &= light_misses_became_estimates(step % LAYERS, 0.4f);
    for (uint32_t seq = 0; seq < SEQS - 1; seq++)
        hot_set_collect(x.hot[seq], &n);
    ok(good, "%s: misses below the threshold become estimates, in order, and are there next time",
       name);
    ok(n.light_misses > 100 && n.light_misses < n.misses, "%s: %llu of %llu misses", name,
       (unsigned long long)n.light_misses, (unsigned long long)n.misses);

    plan_all(24);
    struct resolve_args a = resolve_of(0);
    a.masks = x.masks[0];
    x.be->ops->resolve(x.be, &a);
    ok(all_pages_are_there(0), "%s: with row masks a page is no partition: all are exact", name);
    end_step();
    plan_all(24);
    a = resolve_of(0);
    a.desc.values = false;
    x.be->ops->resolve(x.be, &a);
    ok(all_pages_are_there(0), "%s: without mean values all are exact", name);
    end_step();
    plan_all(24);
    for (uint32_t at = 0; at < HEADS_ALL; at++) /* [at][ESTIMATE_CAP] filled up to the end */
        for (x.n_estimates[at] = 0; x.n_estimates[at] < ESTIMATE_CAP; x.n_estimates[at]++)
            x.estimates[at][x.n_estimates[at]] = PAGES + x.n_estimates[at];
    a = resolve_of(0);
    x.be->ops->resolve(x.be, &a);
    ok(all_pages_are_there(0), "%s: where estimates have no room all are exact", name);
    end_step();
    for (uint32_t seq = 0; seq < SEQS; seq++)
        x.rows[seq].miss_threshold = 0;
}

static void a_plan_larger_than_the_slots_fails_loudly(const char *name)
{
    uint32_t few[4];
    for (uint32_t i = 0; i < 4; i++)
        few[i] = slot_block(0, i);
    CHECK(hot_set_resize(x.hot[0], x.be, few, 4) == OK);
    plan_all(20);
    struct resolve_args a = resolve_of(0);
    x.be->ops->resolve(x.be, &a);
    bool empty = true;
    for (uint32_t h = 0; h < KV_HEADS; h++)
        empty &= x.n_asked[h] <= 4 || x.n_pages[h] == 0;
    is_int(x.be->ops->sync(x.be), ERR_DEVICE, "more pages than slots: the step fails");
    ok(empty, "%s: and nothing of such a lane is attended", name);
    end_step();
}

static void run(struct backend *be, const char *name)
{
    open_bench(be);
    every_page_lies_where_resolve_says(name);
    a_dense_lane_is_left_alone(name);
    light_misses_are_estimated(name);
    a_plan_larger_than_the_slots_fails_loudly(name);
    close_bench();
    be->ops->close(be);
}

int main(void)
{
    static const struct {
        const char *name;
        uint32_t threads;
    } cpus[] = {{"cpu, one thread", 1}, {"cpu, four threads", 4}};
    struct backend *be;
    for (uint32_t i = 0; i < ARRAY_LEN(cpus); i++) {
        CHECK(cpu_backend_open(&be, &(struct cpu_options){.n_threads = cpus[i].threads}) == OK);
        run(be, cpus[i].name);
    }
    CHECK(mock_backend_open(&be, &(struct mock_options){.n_tokens = 1}) == OK);
    run(be, "mock");
    return tap_done();
}
