/* The mock's KV: everything right passes, and each kind of wrong page fails the step. */
#include "cache/residency.h"
#include "tests/tap.h"

#include <math.h>

enum {
    LAYERS = 3,
    KV_HEADS = 2,
    HEADS = 4,
    LANES = LAYERS * KV_HEADS,
    R = 8,
    DIM = 4,
    SEGMENTS = 3,
    PAGES = SEGMENTS * SEGMENT_ROWS / R,
    ROWS = SEGMENTS * SEGMENT_ROWS + TAIL_ROWS + 40,
    BLOCKS = (ROWS + R - 1) / R,
    SLOTS = 60,
    HBM = 2 * BLOCKS + SLOTS,
    PAGE_CAP = 120,
    ESTIMATE_CAP = 120,
    STRIDE = SEGMENTS * SEGMENT_ROWS,
};

/* One sequence, RESIDENT in blocks 0, 1, ... and, when spilled, with slots behind the last blocks. */
struct world {
    struct backend *be;
    struct kv_geometry geo;
    struct kv_memory kv;
    struct digest_desc desc;
    block_id blocks[BLOCKS];
    uint32_t records[SEGMENTS], dram_blocks[PAGES];
    struct leaf_pool *pool;
    struct plan_row row;
    float scores[KV_HEADS * HEADS / KV_HEADS * STRIDE];
    uint32_t pages[KV_HEADS * PAGE_CAP], masks[KV_HEADS * PAGE_CAP], n_pages[KV_HEADS];
    float share[KV_HEADS * PAGE_CAP];
    uint32_t estimates[KV_HEADS * ESTIMATE_CAP], n_estimates[KV_HEADS];
};

static struct world w;

static void open_world(enum digest_order order)
{
    memset(&w, 0, sizeof w);
    CHECK(mock_backend_open(&w.be, &(struct mock_options){.n_tokens = 1}) == OK);
    w.geo = (struct kv_geometry){.block_rows = R,
                                 .layers = LAYERS,
                                 .kv_heads = KV_HEADS,
                                 .head_dim = DIM,
                                 .page_bytes = (size_t)R * DIM * 4,
                                 .n_lanes = {LANES},
                                 .block_bytes = {LANES * (size_t)R * DIM * 4}};
    w.desc = (struct digest_desc){.order = order,
                                  .kind = DIGEST_CENTROID,
                                  .parts = SEGMENT_ROWS / (order == ORDER_KMEANS ? 16 : R),
                                  .sinks = 16,
                                  .values = true};
    w.kv = (struct kv_memory){.geo = &w.geo,
                              .hbm = {mem_alloc(HBM * w.geo.block_bytes[0])},
                              .dram = {mem_alloc(PAGES * w.geo.block_bytes[0])}};
    w.kv.record_lane_bytes = w.be->ops->digest_bytes(&w.geo, &w.desc);
    w.kv.record_bytes = LANES * w.kv.record_lane_bytes;
    w.kv.records = mem_alloc(2 * SEGMENTS * w.kv.record_bytes);
    for (uint32_t i = 0; i < BLOCKS; i++)
        w.blocks[i] = i * 7 % BLOCKS;
    w.row = (struct plan_row){.n_segments = SEGMENTS,
                              .records = w.records,
                              .blocks = w.blocks,
                              .budget = 200,
                              .estimate = 20,
                              .top_p = 1};
    CHECK(leaf_pool_create(&w.pool, w.be, LANES, 1 << 24) == OK);
}

static void close_world(void)
{
    hot_set_close(w.row.hot, w.be, w.pool);
    leaf_pool_destroy(w.pool);
    mem_free(w.kv.hbm[0]);
    mem_free(w.kv.dram[0]);
    mem_free(w.kv.records);
    w.be->ops->close(w.be);
}

static void append(uint32_t first, uint32_t n)
{
    struct batch_seq s = {.first_pos = first, .n_rows = n, .blocks = {w.blocks}};
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        w.be->ops->append(
            w.be, &(struct append_args){.kv = &w.kv, .layer = layer, .seqs = &s, .n_seqs = 1});
}

/* In place, but for segment 1, whose blocks others are supposed to read. */
static void seal_all(void)
{
    for (uint32_t s = 0; s < SEGMENTS; s++) {
        block_id to[SEGMENT_ROWS / R], *from = w.blocks + s * (SEGMENT_ROWS / R);
        w.records[s] = (2 * s + 1) % 5;
        for (uint32_t i = 0; i < SEGMENT_ROWS / R; i++)
            to[i] = s == 1 ? BLOCKS + i : from[i];
        w.be->ops->seal(w.be, &(struct seal_args){.kv = &w.kv,
                                                  .desc = w.desc,
                                                  .from = from,
                                                  .to = to,
                                                  .segment = s,
                                                  .record = w.records[s]});
        memcpy(from, to, sizeof to);
    }
}

static void spill(void)
{
    uint32_t slots[SLOTS];
    for (uint32_t i = 0; i < SLOTS; i++)
        slots[i] = 2 * BLOCKS + (i * 7 + 3) % SLOTS;
    size_t bytes = w.geo.block_bytes[0];
    for (uint32_t i = 0; i < PAGES; i++) {
        w.dram_blocks[i] = (i * 5 + 1) % PAGES;
        char *from = (char *)w.kv.hbm[0] + w.blocks[i] * bytes;
        w.be->ops->copy(w.be, (char *)w.kv.dram[0] + w.dram_blocks[i] * bytes, from, bytes);
        memset(from, 0xee, bytes);
    }
    CHECK(hot_set_open(&w.row.hot, w.be, w.pool, LANES, PAGES) == OK);
    CHECK(hot_set_resize(w.row.hot, w.be, slots, SLOTS) == OK);
    CHECK(hot_set_cover(w.row.hot, w.pool, w.dram_blocks, PAGES) == OK);
}

static void score_and_select(uint32_t layer)
{
    struct score_args sc = {.kv = &w.kv,
                            .desc = w.desc,
                            .layer = layer,
                            .heads = HEADS,
                            .rows = &w.row,
                            .n_rows = 1,
                            .scores = w.scores,
                            .stride = STRIDE};
    struct select_args se = {.kv = &w.kv,
                             .desc = w.desc,
                             .layer = layer,
                             .group = HEADS / KV_HEADS,
                             .rows = &w.row,
                             .n_rows = 1,
                             .scores = w.scores,
                             .stride = STRIDE,
                             .page_cap = PAGE_CAP,
                             .estimate_cap = ESTIMATE_CAP,
                             .pages = w.pages,
                             .masks = w.desc.order == ORDER_KMEANS ? w.masks : NULL,
                             .share = w.share,
                             .n_pages = w.n_pages,
                             .estimates = w.estimates,
                             .n_estimates = w.n_estimates};
    w.be->ops->score(w.be, &sc);
    w.be->ops->select(w.be, &se);
}

static void resolve(uint32_t layer)
{
    struct resolve_args a = {.kv = &w.kv,
                             .desc = w.desc,
                             .layer = layer,
                             .rows = &w.row,
                             .n_rows = 1,
                             .page_cap = PAGE_CAP,
                             .estimate_cap = ESTIMATE_CAP,
                             .pages = w.pages,
                             .masks = w.desc.order == ORDER_KMEANS ? w.masks : NULL,
                             .share = w.share,
                             .n_pages = w.n_pages,
                             .estimates = w.estimates,
                             .n_estimates = w.n_estimates};
    w.be->ops->resolve(w.be, &a);
}

static void attend(uint32_t layer, bool planned)
{
    struct attend_plans p = {.desc = w.desc,
                             .rows = &w.row,
                             .n_rows = 1,
                             .page_cap = PAGE_CAP,
                             .estimate_cap = ESTIMATE_CAP,
                             .stride = STRIDE,
                             .pages = w.pages,
                             .n_pages = w.n_pages,
                             .estimates = w.estimates,
                             .n_estimates = w.n_estimates,
                             .scores = w.scores};
    struct batch_seq s = {
        .first_pos = w.row.pos, .n_rows = 1, .blocks = {w.blocks}, .planned = planned};
    struct attend_args a = {.kv = &w.kv,
                            .layer = layer,
                            .heads = HEADS,
                            .seqs = &s,
                            .n_seqs = 1,
                            .plans = &p,
                            .n_plans = planned};
    w.be->ops->attend(w.be, &a);
}

static void decode(uint32_t n_steps)
{
    for (uint32_t i = 0; i < n_steps; i++) {
        w.row.pos = SEGMENTS * SEGMENT_ROWS + TAIL_ROWS + i % 40;
        for (uint32_t layer = 0; layer < LAYERS; layer++) {
            score_and_select(layer);
            resolve(layer);
            attend(layer, true);
        }
        if (w.row.hot != NULL)
            hot_set_step(w.row.hot);
    }
}

static status look_everywhere(void)
{
    for (uint32_t i = 0; i < 3000; i++) {
        w.row.pos = i % ROWS;
        attend(i % LAYERS, false);
    }
    return w.be->ops->sync(w.be);
}

static void a_right_sequence_passes(enum digest_order order, const char *name)
{
    open_world(order);
    append(0, ROWS);
    ok(look_everywhere() == OK, "%s: before sealing every position is where it belongs", name);
    seal_all();
    ok(look_everywhere() == OK, "%s: and after it, for rows that attend everything", name);
    decode(100);
    ok(w.be->ops->sync(w.be) == OK, "%s: RESIDENT by plan", name);
    spill();
    decode(200);
    status st = w.be->ops->sync(w.be);
    ok(st == OK, "%s: SPILLED by plan %s", name, st == OK ? "" : err_text());
    hot_set_audit(w.row.hot);
    w.row.miss_threshold = 0.5f;
    decode(100);
    st = w.be->ops->sync(w.be);
    ok(st == OK, "%s: with light misses %s", name, st == OK ? "" : err_text());
    struct hot_counts n = {0};
    hot_set_collect(w.row.hot, &n);
    ok((n.light_misses > 0) == (order == ORDER_BISECT || order == ORDER_KEEP),
       "%s: %llu hits, %llu misses, %llu light", name, (unsigned long long)n.hits,
       (unsigned long long)n.misses, (unsigned long long)n.light_misses);
    close_world();
}

static void begin_fault(bool spilled)
{
    open_world(ORDER_BISECT);
    append(0, ROWS);
    seal_all();
    if (spilled)
        spill();
    decode(10);
    CHECK(w.be->ops->sync(w.be) == OK);
}

static void end_fault(const char *name)
{
    decode(60);
    is_int(w.be->ops->sync(w.be), ERR_DEVICE, name);
    close_world();
}

static void every_wrong_page_is_seen(void)
{
    begin_fault(false);
    memcpy(w.blocks + 10, w.blocks + 200, 20 * sizeof *w.blocks);
    end_fault("a wrong entry of the block table");

    begin_fault(false);
    uint32_t r = w.records[0];
    w.records[0] = w.records[1];
    w.records[1] = r;
    end_fault("records in the wrong order");

    begin_fault(false);
    w.blocks[BLOCKS - 6] = w.blocks[BLOCKS - 10];
    end_fault("a wrong block in the tail");

    begin_fault(false);
    append(0, SEGMENT_ROWS); /* somebody else's rows, in order */
    end_fault("a sealed segment that was written again");

    begin_fault(true);
    uint32_t *dram = (uint32_t *)(uintptr_t)w.row.hot->dram_blocks;
    for (uint32_t i = 40; i < 80; i++)
        dram[i] = dram[i + 100];
    end_fault("fetches from wrong DRAM blocks");

    begin_fault(true);
    uint32_t *slots = (uint32_t *)(uintptr_t)w.row.hot->slot_blocks, s = slots[0];
    memmove(slots, slots + 1, (SLOTS - 1) * sizeof s);
    slots[SLOTS - 1] = s;
    end_fault("slots that changed their blocks");

    begin_fault(true);
    memset((char *)w.kv.hbm[0] + 2 * BLOCKS * w.geo.block_bytes[0], 0,
           SLOTS * w.geo.block_bytes[0]);
    end_fault("slots that somebody else wrote to");

    begin_fault(true);
    for (uint32_t i = 0; i < PAGES; i++) { /* an entry that says another slot */
        uint16_t *e = hot_entry(w.row.hot, 2, i);
        *e = *e & HOT_GHOST ? *e : (uint16_t)((*e + 1) % SLOTS);
    }
    end_fault("a table that says other slots");

    begin_fault(true);
    score_and_select(1);
    resolve(1);
    w.n_pages[0]--;
    attend(1, true);
    is_int(w.be->ops->sync(w.be), ERR_DEVICE, "a page that was resolved and then dropped");
    close_world();

    begin_fault(true);
    bool seen = false;
    for (uint32_t i = 0; i < 20; i++) {
        score_and_select(i % LAYERS);
        resolve(i % LAYERS);
        uint32_t first = w.pages[2];
        w.pages[2] = w.pages[3];
        w.pages[3] = first;
        attend(i % LAYERS, true);
        seen |= w.be->ops->sync(w.be) == ERR_DEVICE;
        hot_set_step(w.row.hot);
    }
    ok(seen, "pages in another order than resolved");
    close_world();
}

static void a_prefix_may_end_inside_a_sealed_segment(void)
{
    open_world(ORDER_BISECT);
    append(0, ROWS);
    seal_all();
    block_id to[SEGMENT_ROWS / R];
    uint32_t s = 2, n = 500;
    for (uint32_t i = 0; i < ARRAY_LEN(to); i++)
        to[i] = BLOCKS + SEGMENT_ROWS / R + i;
    struct unpermute_args a = {.kv = &w.kv,
                               .from = w.blocks + s * (SEGMENT_ROWS / R),
                               .to = to,
                               .record = w.records[s],
                               .n_rows = n};
    w.be->ops->unpermute(w.be, &a);
    memcpy(w.blocks + s * (SEGMENT_ROWS / R), to, (n + R - 1) / R * sizeof *to);
    append(s * SEGMENT_ROWS + n, 300); /* another continuation */
    bool good = w.be->ops->sync(w.be) == OK;
    for (uint32_t i = 0; i < 3000; i++) {
        w.row.pos = s * SEGMENT_ROWS + n + 299 - i % 300;
        attend(i % LAYERS, false);
    }
    ok(good && w.be->ops->sync(w.be) == OK, "its rows lie in position order in new blocks");
    a.record = w.records[1];
    w.be->ops->unpermute(w.be, &a);
    is_int(w.be->ops->sync(w.be), ERR_DEVICE, "another segment's record does not fit");
    close_world();
}

/* Rows of a storage range that the lane's plan attends, beside the sinks. */
static uint32_t rows_picked(uint32_t head)
{
    uint32_t rows = 0;
    for (uint32_t i = 2; i < w.n_pages[head]; i++) /* after the two pages of sinks */
        rows += w.desc.order == ORDER_KMEANS
                    ? (uint32_t)__builtin_popcount(w.masks[head * PAGE_CAP + i])
                    : R;
    return rows;
}

static void selections_obey_the_contract(enum digest_order order, const char *name)
{
    open_world(order);
    append(0, ROWS);
    seal_all();
    bool sorted = true, within = true, apart = true, near_full = true;
    uint64_t same = 0, all = 0;
    for (uint32_t step = 0; step < 200; step++) {
        static bool had[PAGES];
        bool has[PAGES] = {0};
        w.row.pos = SEGMENTS * SEGMENT_ROWS + TAIL_ROWS + step;
        score_and_select(2);
        for (uint32_t h = 0; h < KV_HEADS; h++) {
            uint32_t *pages = w.pages + h * PAGE_CAP, *est = w.estimates + h * ESTIMATE_CAP;
            for (uint32_t i = 1; i < w.n_pages[h]; i++)
                sorted &= pages[i] > pages[i - 1] && pages[i] < PAGES;
            sorted &= pages[0] == 0 && pages[1] == 1 && w.share[h * PAGE_CAP] == 1;
            within &= rows_picked(h) <= w.row.budget;
            near_full &= rows_picked(h) + 32 > w.row.budget;
            for (uint32_t i = 1; i < w.n_estimates[h]; i++)
                sorted &= est[i] > est[i - 1];
            for (uint32_t i = 0; i < w.n_estimates[h] && order != ORDER_KMEANS; i++)
                for (uint32_t k = 0; k < w.n_pages[h]; k++)
                    apart &= est[i] != pages[k];
            apart &= w.n_estimates[h] == w.row.estimate;
        }
        for (uint32_t i = 2; i < w.n_pages[0]; i++)
            has[w.pages[i]] = true;
        for (uint32_t i = 0; i < PAGES; i++) {
            same += step > 0 && has[i] && had[i];
            all += step > 0 && has[i];
        }
        memcpy(had, has, sizeof had);
    }
    double share = (double)same / (double)all;
    ok(sorted, "%s: sinks first, pages and estimates ascend", name);
    ok(within && near_full, "%s: the budget is used and not exceeded", name);
    ok(apart, "%s: what is picked is not estimated", name);
    ok(share > 0.5 && share < 0.8, "%s: %.2f of a selection is in the next one", name, share);
    w.row.budget = 1;
    score_and_select(2);
    is_int(w.n_pages[0] - 2 >= 1, 1, "at least one partition");
    w.row.budget = 2000;
    w.row.top_p = 0.1f;
    score_and_select(2);
    double mass = 0, total = 0;
    for (uint32_t p = 2; p < PAGES; p++)
        total += exp((double)w.scores[p]);
    for (uint32_t i = 2; i < w.n_pages[0]; i++)
        mass += exp((double)w.scores[w.pages[i]]);
    if (order == ORDER_BISECT)
        ok(mass >= 0.1 * total && mass < 0.12 * total, "top_p stops when the mass is there");
    close_world();
}

int main(void)
{
    a_right_sequence_passes(ORDER_KEEP, "rows in order");
    a_right_sequence_passes(ORDER_BISECT, "rows permuted");
    a_right_sequence_passes(ORDER_KMEANS, "clusters of any size");
    every_wrong_page_is_seen();
    a_prefix_may_end_inside_a_sealed_segment();
    selections_obey_the_contract(ORDER_BISECT, "pages");
    selections_obey_the_contract(ORDER_KMEANS, "clusters");
    return tap_done();
}
