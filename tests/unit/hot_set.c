/* Hot sets against a model that keeps lists, sorts them and knows every touch since the beginning: the
 * same slots, the same victims, the same distances, step by step. */
#include "cache/residency.h"
#include "kernels/core/splitmix.h"
#include "tests/kv_rig.h"
#include "tests/tap.h"

enum { LANES = 3, MAX_PAGES = 1400, MAX_SLOTS = 256, PICK = 64 };

static uint64_t seed = 20261121;

static uint32_t below(uint32_t n)
{
    return (uint32_t)((splitmix_next(&seed) >> 32) * n >> 32);
}

/* ---- the model ---- */

struct model_slot {
    uint32_t page; /* HOT_NO_PAGE: empty */
    int64_t stamp; /* epoch it is treated as touched in */
    bool in_use;
};

struct model_lane {
    struct model_slot slots[MAX_SLOTS];
    int64_t touched[MAX_PAGES]; /* epoch of the last touch; INT64_MIN: never */
    uint64_t distance[HOT_AGES], hits, misses;
};

struct model {
    struct model_lane lanes[LANES];
    uint32_t n_slots;
    int64_t epoch;
};

static void model_init(struct model *m)
{
    memset(m, 0, sizeof *m);
    for (uint32_t l = 0; l < LANES; l++) {
        for (uint32_t i = 0; i < MAX_SLOTS; i++)
            m->lanes[l].slots[i].page = HOT_NO_PAGE;
        for (uint32_t i = 0; i < MAX_PAGES; i++)
            m->lanes[l].touched[i] = INT64_MIN;
    }
}

struct candidate {
    int64_t age; /* capped; empty: older than the cap */
    uint32_t slot;
};

static int oldest_first(const void *a, const void *b)
{
    const struct candidate *x = a, *y = b;
    if (x->age != y->age)
        return x->age > y->age ? -1 : 1;
    return x->slot < y->slot ? -1 : 1;
}

static int by_slot(const void *a, const void *b)
{
    const struct candidate *x = a, *y = b;
    return x->slot < y->slot ? -1 : x->slot > y->slot;
}

static uint32_t model_find(const struct model *m, uint32_t lane, uint32_t page)
{
    for (uint32_t i = 0; i < m->n_slots; i++)
        if (m->lanes[lane].slots[i].page == page)
            return i;
    return HOT_NO_PAGE;
}

/* The n oldest slots not in use, in ascending order of slots. */
static uint32_t model_victims(const struct model *m, uint32_t lane, struct candidate *c, uint32_t n)
{
    uint32_t n_all = 0;
    for (uint32_t i = 0; i < m->n_slots; i++) {
        const struct model_slot *s = &m->lanes[lane].slots[i];
        int64_t age = m->epoch - s->stamp;
        if (!s->in_use)
            c[n_all++] = (struct candidate){s->page == HOT_NO_PAGE ? 1000 : age > 63 ? 63 : age, i};
    }
    qsort(c, n_all, sizeof *c, oldest_first);
    n = n < n_all ? n : n_all;
    qsort(c, n, sizeof *c, by_slot);
    return n;
}

/* Touches pages; slots[i] as hot_touch says; missed[i]: whether it had to be fetched. */
static void model_touch(struct model *m, uint32_t lane, const uint32_t *pages, uint32_t n,
                        uint32_t *slots, bool *missed)
{
    struct model_lane *l = &m->lanes[lane];
    struct candidate victims[MAX_SLOTS];
    uint32_t n_missed = 0, next = 0;
    for (uint32_t i = 0; i < n; i++) {
        int64_t last = l->touched[pages[i]];
        l->distance[last == INT64_MIN || m->epoch - last > 63 ? 63 : m->epoch - last]++;
        l->touched[pages[i]] = m->epoch;
        slots[i] = model_find(m, lane, pages[i]);
        missed[i] = slots[i] == HOT_NO_PAGE;
        n_missed += missed[i];
        if (!missed[i])
            l->slots[slots[i]] = (struct model_slot){pages[i], m->epoch, true};
    }
    l->misses += n_missed;
    l->hits += n - n_missed;
    n_missed = model_victims(m, lane, victims, n_missed);
    for (uint32_t i = 0; i < n; i++)
        if (missed[i] && next < n_missed) {
            slots[i] = victims[next++].slot;
            l->slots[slots[i]] = (struct model_slot){pages[i], m->epoch - HOT_FRESH_AGE, true};
        }
}

static void model_step(struct model *m, bool new_epoch)
{
    m->epoch += new_epoch;
    for (uint32_t l = 0; l < LANES; l++)
        for (uint32_t i = 0; i < m->n_slots; i++)
            m->lanes[l].slots[i].in_use = false;
}

static void model_resize(struct model *m, uint32_t n_slots)
{
    for (uint32_t l = 0; l < LANES; l++)
        for (uint32_t i = n_slots; i < m->n_slots; i++)
            m->lanes[l].slots[i].page = HOT_NO_PAGE;
    m->n_slots = n_slots;
}

/* ---- the comparison ---- */

struct pair {
    struct backend *be;
    struct leaf_pool *pool;
    struct hot_set *h;
    struct model m;
    uint32_t slot_blocks[MAX_SLOTS], dram_blocks[MAX_PAGES];
    uint32_t n_pages, drift; /* pages are picked around a place that drifts */
};

static struct pair pair; /* too large for a stack */

static void open_pair(uint32_t n_slots, uint32_t n_pages)
{
    memset(&pair, 0, sizeof pair);
    model_init(&pair.m);
    pair.be = &rig_backend;
    for (uint32_t i = 0; i < MAX_SLOTS; i++)
        pair.slot_blocks[i] = 5000 + 7 * i;
    for (uint32_t i = 0; i < MAX_PAGES; i++)
        pair.dram_blocks[i] = 90000 - 3 * i;
    CHECK(leaf_pool_create(&pair.pool, pair.be, LANES, 1 << 20) == OK);
    CHECK(hot_set_open(&pair.h, pair.be, pair.pool, LANES, MAX_PAGES) == OK);
    CHECK(hot_set_resize(pair.h, pair.be, pair.slot_blocks, n_slots) == OK);
    CHECK(hot_set_cover(pair.h, pair.pool, pair.dram_blocks, n_pages) == OK);
    pair.m.n_slots = n_slots;
    pair.n_pages = n_pages;
}

static void close_pair(void)
{
    hot_set_close(pair.h, pair.be, pair.pool);
    leaf_pool_destroy(pair.pool);
}

/* Distinct pages: most near a drifting place, some anywhere. */
static uint32_t pick(uint32_t *pages, uint32_t n)
{
    static bool taken[MAX_PAGES];
    uint32_t got = 0;
    pair.drift += below(8) == 0 ? below(40) : 0;
    while (got < n) {
        uint32_t p = (below(4) ? pair.drift + below(2 * n) : below(pair.n_pages)) % pair.n_pages;
        if (!taken[p])
            taken[pages[got++] = p] = true;
    }
    for (uint32_t i = 0; i < n; i++)
        taken[pages[i]] = false;
    return n;
}

/* One touch of one lane in both; whether they agree on everything that can be seen. */
static bool touch_both(uint32_t lane, const uint32_t *pages, uint32_t n)
{
    uint32_t slots[PICK], want[PICK];
    struct hot_fetch fetches[PICK];
    bool missed[PICK], same = true;
    uint32_t n_fetches = hot_touch(pair.h, lane, pages, n, slots, fetches), f = 0;
    model_touch(&pair.m, lane, pages, n, want, missed);
    for (uint32_t i = 0; i < n; i++) {
        same &= slots[i] == want[i];
        if (!missed[i] || want[i] == HOT_NO_PAGE)
            continue;
        same &= f < n_fetches && fetches[f].lane == lane &&
                fetches[f].from == pair.dram_blocks[pages[i]] &&
                fetches[f].to == pair.slot_blocks[want[i]];
        f++;
    }
    return same && f == n_fetches;
}

static bool same_counts(void)
{
    bool same = true;
    for (uint32_t l = 0; l < LANES; l++) {
        const struct hot_lane_stats *s = &pair.h->stats[l];
        const struct model_lane *w = &pair.m.lanes[l];
        same &= s->hits == w->hits && s->misses == w->misses;
        for (uint32_t i = 0; i < HOT_AGES; i++)
            same &= s->distance[i] == w->distance[i];
    }
    return same;
}

static void end_step(void)
{
    uint32_t before = pair.h->epoch;
    hot_set_step(pair.h);
    model_step(&pair.m, pair.h->epoch != before);
}

static bool run_steps(uint32_t n_steps, uint32_t n_pick, uint32_t audit_every)
{
    uint32_t pages[PICK];
    bool same = true;
    for (uint32_t step = 0; step < n_steps && same; step++) {
        for (uint32_t lane = 0; lane < LANES; lane++)
            same &= touch_both(lane, pages, pick(pages, 1 + below(n_pick)));
        end_step();
        if (step % audit_every == 0)
            hot_set_audit(pair.h);
    }
    return same;
}

static void it_does_what_the_model_does(void)
{
    static const struct {
        uint32_t n_slots, n_pages, n_pick, epoch_steps;
    } cases[] = {{32, 600, 32, 1}, {64, 600, 32, 1},   {200, 1400, 40, 1}, {17, 100, 17, 1},
                 {64, 600, 32, 2}, {128, 1400, 32, 4}, {1, 40, 1, 1},      {40, 30, 20, 1}};
    for (uint32_t i = 0; i < ARRAY_LEN(cases); i++) {
        open_pair(cases[i].n_slots, cases[i].n_pages);
        pair.h->epoch_steps = cases[i].epoch_steps;
        bool same = run_steps(3000, cases[i].n_pick, 50);
        ok(same, "%u slots, up to %u of %u pages a step, epochs of %u: slots and fetches",
           cases[i].n_slots, cases[i].n_pick, cases[i].n_pages, cases[i].epoch_steps);
        ok(same_counts(), "the same distances, hits and misses");
        close_pair();
    }
}

/* Old ghosts must not look young again when the epoch's 15 bits come round. */
static void epochs_may_wrap(void)
{
    open_pair(12, 520);
    bool same = true;
    uint32_t pages[PICK], wraps = 0;
    for (uint32_t step = 0; step < 100000 && same; step++) {
        uint32_t before = pair.h->epoch;
        if (step % 997 == 0 || step % 32767 < 3 || step % 8192 < 3)
            for (uint32_t lane = 0; lane < LANES; lane++)
                same &= touch_both(lane, pages, pick(pages, 1 + below(12)));
        else if (step % 13 == 0)
            same &= touch_both(0, pages, pick(pages, 3));
        end_step();
        wraps += pair.h->epoch < before;
        if (step % 1000 == 0)
            hot_set_audit(pair.h);
    }
    ok(same && same_counts(),
       "100,000 epochs with long pauses: as the model, whose epochs never wrap");
    is_int(wraps, 3, "epochs came round three times");
    close_pair();
}

/* What a sweep is for: a page touched once, then again just HOT_EPOCHS later, is not "touched now". */
static void a_ghost_of_a_whole_turn_ago_is_old(void)
{
    open_pair(2, 100);
    uint32_t a = 7, others[2] = {1, 2};
    bool same = touch_both(0, &a, 1);
    end_step();
    same &= touch_both(0, others, 2);
    for (uint32_t i = 1; i < HOT_EPOCHS; i++)
        end_step();
    is_int(pair.h->epoch, 0, "a whole turn later");
    same &= touch_both(0, &a, 1);
    ok(same && same_counts() && pair.h->stats[0].distance[0] == 0, "the distance is long, not 0");
    close_pair();
}

static void slots_grow_and_shrink(void)
{
    open_pair(64, 600);
    bool same = true, grew = true;
    for (uint32_t i = 0; i < 300 && same; i++) {
        uint32_t n = 32 + below(MAX_SLOTS - 32 + 1);
        grew &= hot_set_resize(pair.h, pair.be, pair.slot_blocks, n) == OK;
        model_resize(&pair.m, n);
        hot_set_audit(pair.h);
        same &= run_steps(1 + below(20), 32, 1);
    }
    ok(same && grew && same_counts(), "300 changes of the budget: as the model");
    uint64_t large = hot_set_bytes(pair.h);
    CHECK(hot_set_resize(pair.h, pair.be, pair.slot_blocks, 0) == OK);
    model_resize(&pair.m, 0);
    hot_set_audit(pair.h);
    ok(hot_set_bytes(pair.h) < large, "slots that are gone take no memory");
    CHECK(hot_set_resize(pair.h, pair.be, pair.slot_blocks, 40) == OK);
    model_resize(&pair.m, 40);
    ok(run_steps(50, 32, 1) && same_counts(), "from no slots to some: distances were kept");
    close_pair();
}

static void cover_grows_leaf_by_leaf(void)
{
    open_pair(32, 128);
    uint64_t one = leaf_pool_leaf_bytes(pair.pool);
    bool same = true;
    for (uint32_t n = 128; n <= 1280; n += 128) {
        CHECK(hot_set_cover(pair.h, pair.pool, pair.dram_blocks, n) == OK);
        pair.n_pages = n;
        same &= run_steps(20, 32, 5);
        uint32_t leaves = 0;
        for (uint32_t i = 0; i < pair.h->n_leaves; i++)
            leaves += pair.h->leaves[i] != NULL;
        same &= leaves == (n + 511) / 512;
    }
    ok(same, "one leaf per 512 covered pages, none beyond");
    ok(leaf_pool_bytes(pair.pool) >= 3 * one, "the pool holds them");
    uint32_t page = 1399, slot;
    struct hot_fetch f;
    is_int(hot_touch(pair.h, 0, &page, 1, &slot, &f), 1,
           "a page of a leaf that is there is fetched");
    close_pair();
}

static void misuse_is_seen(void)
{
    open_pair(4, 600);
    uint32_t pages[6] = {1, 2, 3, 4, 5, 6}, slots[6], far = 1100;
    struct hot_fetch f[6];
    is_int(hot_touch(pair.h, 1, pages, 6, slots, f), 4, "only as many fetches as slots");
    ok(slots[3] != HOT_NO_PAGE && slots[4] == HOT_NO_PAGE && slots[5] == HOT_NO_PAGE,
       "pages without a slot say so");
    is_int(hot_touch(pair.h, 1, &far, 1, slots, f), 0, "a page beyond the leaves is not fetched");
    is_int(slots[0], HOT_NO_PAGE, "and has no slot");
    hot_set_audit(pair.h);
    close_pair();
}

static struct miss_curve learn(void)
{
    hot_set_look(pair.h);
    CHECK(hot_set_learn(pair.h));
    return *hot_set_curve(pair.h);
}

static void a_hot_set_knows_its_curve(void)
{
    struct hot_counts n = {0};
    uint32_t pages[PICK];
    open_pair(100, 600);
    ok(hot_set_curve(pair.h)->n == 0 && learn().n == 0, "nothing touched: no curve");
    for (uint32_t step = 0; step < 600; step++) {
        for (uint32_t lane = 0; lane < LANES; lane++)
            (void)touch_both(lane, pages, pick(pages, 20));
        end_step();
        if (step == 199) { /* from here on the slots are full */
            hot_set_collect(pair.h, &n);
            n = (struct hot_counts){0};
        }
    }
    hot_set_collect(pair.h, &n);
    const struct miss_curve c = learn();
    double missed = (double)n.misses / (double)(n.hits + n.misses);
    double said = (double)miss_curve_at(&c, 100);
    ok(said > missed - 0.02 && said < missed + 0.02, "its curve says %.3f at its size, seen %.3f",
       said, missed);
    hot_set_look(pair.h);
    hot_set_look(pair.h);
    const struct miss_curve later = learn();
    bool same = later.n > 2;
    for (uint32_t slots = 10; slots < 300; slots += 10) {
        float d = miss_curve_at(&later, (float)slots) - miss_curve_at(&c, (float)slots);
        same &= d < 0.01f && d > -0.01f;
    }
    ok(same, "looks forget how much, not what");
    close_pair();
}

/* A backend whose statistics come later, as a device's do. */
static struct hot_args on_the_way;

static void late_hot(struct backend *be, const struct hot_args *a)
{
    if (a->kind == HOT_READ) {
        on_the_way = *a;
        memcpy(a->to, a->sets[0]->stats, a->sets[0]->n_lanes * sizeof *a->to);
    } else {
        rig_hot(be, a);
    }
}

static void a_curve_waits_for_nobody(void)
{
    static const struct backend_ops late_ops = {
        .alloc = rig_alloc, .free = rig_free, .copy = rig_copy, .hot = late_hot};
    struct backend late = {&late_ops};
    struct hot_counts n = {0};
    struct leaf_pool *pool;
    struct hot_set *h;
    uint32_t pages[] = {1, 2, 3, 4}, slots[4];
    struct hot_fetch f[4];
    static const uint32_t blocks[64];
    CHECK(leaf_pool_create(&pool, &late, 1, 1 << 20) == OK &&
          hot_set_open(&h, &late, pool, 1, 64) == OK && hot_set_resize(h, &late, blocks, 8) == OK &&
          hot_set_cover(h, pool, blocks, 64) == OK);
    for (uint32_t step = 0; step < 8; step++) {
        (void)hot_touch(h, 0, pages, 4, slots, f);
        hot_set_step(h);
    }
    ok(!hot_set_learn(h), "who was not looked at has nothing to learn");
    hot_set_look(h);
    ok(!hot_set_learn(h) && hot_set_curve(h)->n == 0, "nor what is still on the way");
    ++*on_the_way.arrived;
    ok(hot_set_learn(h) && hot_set_curve(h)->n > 1, "what has arrived is a curve");
    ok(!hot_set_learn(h), "which is made once");
    hot_set_collect(h, &n); /* asks, too: what a look then wants is on the way already */
    hot_set_look(h);
    ok(!hot_set_learn(h), "a look while something is on the way waits for that");
    ++*on_the_way.arrived;
    hot_set_collect(h, &n);
    ok(hot_set_learn(h) && n.hits == 28 && n.misses == 4,
       "and learns although somebody asks again");
    ++*on_the_way.arrived;
    hot_set_close(h, &late, pool);
    leaf_pool_destroy(pool);
}

/* Slots and fetches are the model's whatever an epoch is, and however often that changes. */
static void epochs_change_their_pace(void)
{
    open_pair(100, 1400);
    bool same = true;
    for (uint32_t i = 0; i < 200 && same; i++) {
        hot_set_pace(pair.h, 1 + below(5));
        same &= run_steps(1 + below(30), 32, 1);
    }
    ok(same && same_counts(), "200 changes of the pace: as the model");
    close_pair();
}

static uint32_t n_allocs;

static void *counting_alloc(struct backend *be, size_t bytes)
{
    n_allocs++;
    return rig_alloc(be, bytes);
}

/* To free memory of a device is to wait for what runs. */
static void to_grow_by_little_takes_no_memory(void)
{
    static const struct backend_ops ops = {
        .alloc = counting_alloc, .free = rig_free, .copy = rig_copy, .hot = rig_hot};
    struct backend counting = {&ops};
    static const uint32_t blocks[1200];
    struct leaf_pool *pool;
    struct hot_set *h;
    CHECK(leaf_pool_create(&pool, &counting, 1, 1 << 20) == OK &&
          hot_set_open(&h, &counting, pool, 1, 64) == OK &&
          hot_set_resize(h, &counting, blocks, 800) == OK);
    n_allocs = 0;
    for (uint32_t n = 800; n <= 1000; n += 20)
        CHECK(hot_set_resize(h, &counting, blocks, n) == OK);
    is_int(n_allocs, 0, "a hot set grows by a quarter without memory");
    CHECK(hot_set_resize(h, &counting, blocks, 1100) == OK);
    is_int(n_allocs, 1, "and then takes some once");
    hot_set_close(h, &counting, pool);
    leaf_pool_destroy(pool);
}

/* A page that was fetched once and not used again leaves before one that was used twice as long ago
 * as HOT_FRESH_AGE allows. */
static void a_one_off_leaves_first(void)
{
    open_pair(2, 100);
    uint32_t a = 1, b = 2, c = 3, slots[1];
    struct hot_fetch f[1];
    (void)hot_touch(pair.h, 0, &a, 1, slots, f);
    hot_set_step(pair.h);
    (void)hot_touch(pair.h, 0, &a, 1, slots, f); /* a: used twice */
    hot_set_step(pair.h);
    (void)hot_touch(pair.h, 0, &b, 1, slots, f); /* b: once, later */
    hot_set_step(pair.h);
    (void)hot_touch(pair.h, 0, &c, 1, slots, f);
    ok(*hot_entry(pair.h, 0, b) & HOT_GHOST, "the one-off is gone");
    ok(!(*hot_entry(pair.h, 0, a) & HOT_GHOST), "what was used again is not");
    is_int(*hot_entry(pair.h, 0, b), HOT_GHOST | 2, "its ghost knows the true epoch");
    close_pair();
}

static void the_pool_gives_memory_back(void)
{
    size_t before = rig_held_bytes;
    struct leaf_pool *pool;
    struct hot_set *h[40];
    uint32_t dram[MAX_PAGES] = {0};
    CHECK(leaf_pool_create(&pool, &rig_backend, LANES, 40 * 4096) == OK);
    uint32_t n = 0;
    status st = OK;
    for (; n < 40; n++) {
        CHECK(hot_set_open(&h[n], &rig_backend, pool, LANES, MAX_PAGES) == OK);
        if ((st = hot_set_cover(h[n], pool, dram, MAX_PAGES)) != OK)
            break;
    }
    is_int(st, ERR_FULL, "a pool that is full says so");
    ok(leaf_pool_bytes(pool) <= 40 * 4096, "and holds no more than it may");
    hot_set_audit(h[n]);
    uint64_t full = leaf_pool_bytes(pool);
    hot_set_close(h[n], &rig_backend, pool);
    for (uint32_t i = 0; i < n; i += 2)
        hot_set_close(h[i], &rig_backend, pool);
    for (uint32_t i = 1; i < n; i += 2)
        hot_set_close(h[i], &rig_backend, pool);
    ok(full > 0 && leaf_pool_bytes(pool) == 0, "after the last leaf it holds nothing");
    leaf_pool_destroy(pool);
    ok(rig_held_bytes == before, "and the backend has every byte back");
}

static void *no_memory(struct backend *be, size_t bytes)
{
    (void)be;
    return (void *)(uintptr_t)(err(ERR_MEMORY, "none of %zu bytes", bytes) == OK);
}

static void without_memory_nothing_changes(void)
{
    static const struct backend_ops poor_ops = {
        .alloc = no_memory, .free = rig_free, .copy = rig_copy, .hot = rig_hot};
    struct backend poor = {&poor_ops};
    struct hot_set *h;
    open_pair(16, 600);
    run_steps(20, 10, 5);
    is_int(hot_set_open(&h, &poor, pair.pool, LANES, 100), ERR_MEMORY, "no memory: not opened");
    is_int(hot_set_resize(pair.h, &poor, pair.slot_blocks, 200), ERR_MEMORY,
           "no memory: not grown");
    is_int(pair.h->n_slots, 16, "it has its slots");
    is_int(hot_set_resize(pair.h, &poor, pair.slot_blocks, 2), OK, "shrinking needs none");
    model_resize(&pair.m, 2);
    hot_set_audit(pair.h);
    ok(run_steps(20, 2, 1) && same_counts(), "and it works on");
    close_pair();
}

/* SmolLM2 at 32K with 5 % selected and a hot set of five times that; Llama-3.1-8B at 128K. */
static void tables_are_small(void)
{
    static const struct {
        const char *name;
        uint32_t lanes, dim, positions;
    } models[] = {{"30 x 3 lanes, d 64, 7,168 positions", 90, 64, 7168},
                  {"30 x 3 lanes, d 64, 32,768 positions", 90, 64, 32768},
                  {"32 x 8 lanes, d 128, 131,072 positions", 256, 128, 131072}};
    static uint32_t blocks[131072 / 8];
    for (uint32_t i = 0; i < ARRAY_LEN(models); i++)
        for (uint32_t rows = 8; rows <= 16; rows *= 2) {
            uint32_t n_pages = models[i].positions / rows, n_slots = n_pages / 4;
            struct leaf_pool *pool;
            struct hot_set *h;
            CHECK(leaf_pool_create(&pool, &rig_backend, models[i].lanes, 1 << 30) == OK);
            CHECK(hot_set_open(&h, &rig_backend, pool, models[i].lanes, n_pages) == OK);
            CHECK(hot_set_resize(h, &rig_backend, blocks, n_slots) == OK);
            CHECK(hot_set_cover(h, pool, blocks, n_pages) == OK);
            double table = (double)(leaf_pool_bytes(pool) + hot_set_bytes(h)) + 4.0 * n_pages;
            double kv = 4.0 * rows * models[i].dim * models[i].lanes * n_pages;
            ok(table / kv < 0.005, "R = %u, %s: tables are %.3f %% of KV", rows, models[i].name,
               100 * table / kv);
            hot_set_close(h, &rig_backend, pool);
            leaf_pool_destroy(pool);
        }
}

int main(void)
{
    it_does_what_the_model_does();
    epochs_may_wrap();
    a_ghost_of_a_whole_turn_ago_is_old();
    slots_grow_and_shrink();
    cover_grows_leaf_by_leaf();
    misuse_is_seen();
    a_one_off_leaves_first();
    a_hot_set_knows_its_curve();
    a_curve_waits_for_nobody();
    epochs_change_their_pace();
    to_grow_by_little_takes_no_memory();
    the_pool_gives_memory_back();
    without_memory_nothing_changes();
    tables_are_small();
    return tap_done();
}
