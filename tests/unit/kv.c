/* cache/kv.h, case by case, at R = 8 and R = 16. The long random comparison with a model is
 * tests/contract/kv.c. */
#include "tests/kv_rig.h"
#include "tests/tap.h"

enum { HBM = 8, DRAM = 4, MAX_TOKENS = HBM * 32 };

static uint32_t R;
static struct kv *kv;
static uint32_t toks[MAX_TOKENS];
static const uint64_t salt_a[2] = {1, 2}, salt_b[2] = {1, 3}, salt_c[2] = {1, 4};

static void start_with(uint32_t hbm, uint32_t dram, bool caching, uint32_t hash_bits)
{
    struct kv_config cfg = {.geo = kv_geometry_make(R, 2, 3, 8),
                            .blocks = {{hbm, dram}},
                            .prefix_caching = caching,
                            .secret = {11, 12},
                            .hash_bits = hash_bits};
    CHECK(kv_create(&kv, &rig_backend, &cfg) == OK);
    for (uint32_t i = 0; i < MAX_TOKENS; i++)
        toks[i] = 1000 + i;
}

static void start(void)
{
    start_with(HBM, DRAM, true, 0);
}

static void stop(void)
{
    struct kv_counts c;
    kv_audit(kv, NULL, 0);
    kv_drop_prefixes(kv);
    kv_audit(kv, NULL, 0);
    kv_counts(kv, &c);
    ok(c.free[KV_HBM] == c.total[KV_HBM] && c.free[KV_DRAM] == c.total[KV_DRAM],
       "R=%u: at the end every block is free again", R);
    kv_destroy(kv);
    ok(rig_held_bytes == 0, "R=%u: and the arenas are given back", R);
}

static status open_with(struct kv_seq *s, const uint64_t salt[2], uint32_t n, uint32_t max_rows,
                        uint32_t max_hit, uint32_t *n_hit)
{
    const struct kv_open o = {.salt = {salt[0], salt[1]},
                              .tokens = toks,
                              .n = n,
                              .max_rows = max_rows,
                              .max_hit = max_hit};
    return kv_seq_open(kv, s, &o, 0, n_hit);
}

static uint32_t open_seq(struct kv_seq *s, const uint64_t salt[2], uint32_t n, uint32_t max_rows)
{
    uint32_t n_hit = 0;
    CHECK(open_with(s, salt, n, max_rows, n - 1, &n_hit) == OK);
    return n_hit;
}

/* A sequence of n blocks, computed and sealed where the cache did not have them. */
static void run_seq(struct kv_seq *s, const uint64_t salt[2], uint32_t n)
{
    uint32_t first = open_seq(s, salt, n * R, n * R) / R;
    CHECK(kv_seq_grow(kv, s, n * R) == OK);
    for (uint32_t i = first; i < n; i++)
        rig_write(kv, s->table[LANE_SPARSE][i], toks[i * R]);
    kv_seq_share(kv, s, toks, n * R);
}

static void fill_cache(const uint64_t salt[2], uint32_t n)
{
    struct kv_seq s;
    run_seq(&s, salt, n);
    kv_seq_close(kv, &s);
}

static struct kv_counts counts(void)
{
    struct kv_counts c;
    kv_counts(kv, &c);
    return c;
}

static void geometry_is_that_of_the_design(void)
{
    struct kv_geometry g = kv_geometry_make(16, 32, 8, 128);
    is_int(g.page_bytes, 8192, "a page of R = 16 and d = 128 has 8 KiB");
    is_int(g.block_bytes[LANE_SPARSE], 8192 * 256,
           "a block has a page for every layer and KV head");
    is_int(kv_page_offset(&g, 2, 3), (2 * 8 + 3) * 8192, "lanes lie layer by layer");
}

static void a_bad_configuration_is_refused(void)
{
    struct kv_config cfg = {.geo = kv_geometry_make(12, 2, 3, 8), .blocks = {{4}}};
    struct kv *none;
    is_int(kv_create(&none, &rig_backend, &cfg), ERR_ARG, "R = 12 is refused");
    cfg.geo = kv_geometry_make(8, 2, 3, 8);
    cfg.blocks[LANE_SPARSE][KV_HBM] = 0;
    is_int(kv_create(&none, &rig_backend, &cfg), ERR_ARG, "an arena of no blocks is refused");
    cfg.blocks[LANE_SPARSE][KV_HBM] = cfg.blocks[LANE_SPARSE][KV_DRAM] = 0x7ffffff0u;
    is_int(kv_create(&none, &rig_backend, &cfg), ERR_ARG, "more than 2^31 blocks are refused");
    ok(none == NULL, "and nothing is left behind");
}

static void a_prefix_is_found_again(void)
{
    struct kv_seq s;
    start();
    fill_cache(salt_a, 3);
    is_int(counts().cached[KV_HBM], 3, "a closed sequence leaves its full blocks cached");
    is_int(open_seq(&s, salt_a, 3 * R + 1, 4 * R), 3 * R, "a longer prompt hits all of them");
    ok(rig_holds(kv, s.table[LANE_SPARSE][0], toks[0]) &&
           rig_holds(kv, s.table[LANE_SPARSE][2], toks[2 * R]),
       "and finds what was written");
    is_int(counts().active, 3, "hit blocks are active");
    kv_seq_close(kv, &s);
    is_int(open_seq(&s, salt_a, 3 * R, 4 * R), 2 * R, "one token is always left to compute");
    kv_seq_close(kv, &s);
    is_int(open_seq(&s, salt_b, 3 * R, 4 * R), 0, "another salt hits nothing");
    kv_seq_close(kv, &s);
    toks[0]++;
    is_int(open_seq(&s, salt_a, 3 * R, 4 * R), 0, "another first token hits nothing");
    toks[0]--;
    kv_seq_close(kv, &s);
    stop();
}

static void caching_can_be_off(void)
{
    struct kv_seq s;
    uint32_t n_hit = 1;
    start_with(HBM, DRAM, false, 0);
    fill_cache(salt_a, 3);
    is_int(counts().free[KV_HBM], HBM, "without caching a closed sequence leaves nothing");
    is_int(open_seq(&s, salt_a, 3 * R, 4 * R), 0, "and nothing is hit");
    kv_seq_close(kv, &s);
    stop();
    start();
    fill_cache(salt_a, 3);
    CHECK(open_with(&s, salt_a, 3 * R, 3 * R, 0, &n_hit) == OK);
    is_int(n_hit, 0, "a sequence that may not hit does not");
    CHECK(kv_seq_grow(kv, &s, 3 * R) == OK);
    kv_seq_share(kv, &s, toks, 3 * R);
    is_int(counts().active, 3, "and once sealed shares the blocks that are there");
    is_int(counts().cached[KV_HBM], 0, "instead of keeping a second copy");
    kv_seq_close(kv, &s);
    stop();
}

static void growth_is_all_or_nothing(void)
{
    struct kv_seq a, b;
    uint32_t n_hit;
    start();
    is_int(open_with(&a, salt_a, R, HBM * R + 1, R - 1, &n_hit), ERR_FULL,
           "what could never fit is refused at the start");
    kv_seq_close(kv, &a);
    open_seq(&a, salt_a, R, HBM * R);
    open_seq(&b, salt_b, R, HBM * R);
    is_int(kv_seq_grow(kv, &a, 5 * R), OK, "five blocks of eight are given");
    is_int(kv_available(kv), 3, "three are left");
    is_int(kv_seq_grow(kv, &b, 4 * R), ERR_FULL, "four more are refused");
    is_int(b.n_blocks, 0, "and none was taken");
    is_int(kv_seq_grow(kv, &b, 2 * R + 1), OK, "a partial block counts as one");
    is_int(b.n_blocks, 3, "so three");
    kv_seq_close(kv, &a);
    is_int(kv_available(kv), 5, "closing gives them back");
    kv_seq_close(kv, &b);
    stop();
}

static void pressure_moves_prefixes_down_and_hits_bring_them_up(void)
{
    struct kv_seq s, big;
    start();
    fill_cache(salt_a, 4);
    open_seq(&big, salt_b, R, HBM * R);
    CHECK(kv_seq_grow(kv, &big, 6 * R) == OK);
    is_int(counts().moved_down, 2, "growth moves just the blocks that it needs to DRAM");
    is_int(open_seq(&s, salt_a, 4 * R + 1, 5 * R), 2 * R, "the start of the chain stayed in HBM");
    is_int(s.n_cut, 2, "and two blocks of it were left for want of room");
    kv_seq_close(kv, &s);
    CHECK(kv_seq_grow(kv, &big, 8 * R) == OK);
    is_int(counts().cached[KV_DRAM], 4, "a full HBM leaves them all in DRAM");
    is_int(open_seq(&s, salt_a, 4 * R + 1, 5 * R), 0, "where no room above means no hit");
    kv_seq_close(kv, &s);
    is_int(counts().cached[KV_DRAM], 4, "and nothing lost");
    kv_seq_close(kv, &big);
    is_int(open_seq(&s, salt_a, 4 * R + 1, 5 * R), 4 * R, "with room they come up again");
    is_int(s.n_cut, 0, "and none is left");
    is_int(counts().moved_up, 4, "by four copies");
    ok(rig_holds(kv, s.table[LANE_SPARSE][0], toks[0]) &&
           rig_holds(kv, s.table[LANE_SPARSE][3], toks[3 * R]),
       "with the content they went with");
    is_int(kv_dram_available(kv), DRAM, "and leave DRAM for the taking");
    kv_seq_close(kv, &s);
    stop();
}

/* DRAM is full of two prefixes when one more block comes down: how much of each is left, of the older one in *old. HBM
 * had no room for the older one, which was looked for. */
static uint32_t left_behind_looks(bool keeps, uint32_t *old)
{
    struct kv_seq s, big;
    const struct kv_open o = {.salt = {salt_a[0], salt_a[1]},
                              .tokens = toks,
                              .n = 2 * R + 1,
                              .max_rows = 3 * R,
                              .max_hit = 2 * R};
    uint32_t n_hit, young;
    start();
    fill_cache(salt_a, 2);
    fill_cache(salt_b, 2);
    open_seq(&big, salt_c, R, HBM * R);
    CHECK(kv_seq_grow(kv, &big, HBM * R) == OK && counts().cached[KV_DRAM] == DRAM);
    for (int i = 0; i < 3; i++) {
        CHECK(kv_seq_open(kv, &s, &o, 0, &n_hit) == OK && n_hit == 0 && s.n_cut == 2);
        if (keeps)
            kv_seq_keep_cut(kv, &s, &o);
        kv_seq_close(kv, &s);
    }
    kv_seq_close(kv, &big);
    fill_cache(salt_c, 1);
    open_seq(&big, salt_c, 1, HBM * R);
    CHECK(kv_seq_grow(kv, &big, HBM * R) == OK);
    kv_seq_close(kv, &big);
    *old = open_seq(&s, salt_a, 2 * R + 1, 3 * R);
    kv_seq_close(kv, &s);
    young = open_seq(&s, salt_b, 2 * R + 1, 3 * R);
    kv_seq_close(kv, &s);
    stop();
    return young / R;
}

static void looks_are_no_use(void)
{
    uint32_t old, young = left_behind_looks(false, &old);
    ok(old == R && young == 2, "a hit that was looked for and cut is no younger for it");
    young = left_behind_looks(true, &old);
    ok(old == 2 * R && young == 1, "unless room is to be made for it");
}

static void the_end_of_the_oldest_chain_goes_first(void)
{
    struct kv_seq s;
    start_with(HBM, 0, true, 0);
    fill_cache(salt_a, 4);
    fill_cache(salt_b, 4);
    open_seq(&s, salt_a, 3 * R, 3 * R); /* uses the first two of a again */
    kv_seq_close(kv, &s);
    toks[0] = 7;
    open_seq(&s, salt_a, R, HBM * R);
    CHECK(kv_seq_grow(kv, &s, 4 * R) == OK);
    kv_seq_close(kv, &s);
    toks[0] = 1000;
    is_int(open_seq(&s, salt_a, 4 * R + 1, 5 * R), 2 * R, "what was used again is still there");
    kv_seq_close(kv, &s);
    is_int(open_seq(&s, salt_b, 4 * R + 1, 5 * R), 2 * R, "of the older chain its start is");
    kv_seq_close(kv, &s);
    stop();
}

static void a_block_in_use_is_never_the_victim(void)
{
    struct kv_seq a, b;
    start_with(HBM, 0, true, 0);
    run_seq(&a, salt_a, 4);
    open_seq(&b, salt_b, R, HBM * R);
    is_int(kv_seq_grow(kv, &b, 5 * R), ERR_FULL, "blocks in use are not handed out");
    is_int(kv_seq_grow(kv, &b, 4 * R), OK, "the others are");
    for (uint32_t i = 0; i < 4; i++)
        rig_write(kv, b.table[LANE_SPARSE][i], 99);
    ok(rig_holds(kv, a.table[LANE_SPARSE][0], toks[0]),
       "and writing them does not touch the first sequence");
    kv_seq_close(kv, &a);
    kv_seq_close(kv, &b);
    stop();
}

static void two_writers_of_one_text_end_up_sharing(void)
{
    struct kv_seq a, b;
    struct kv_seq *both[] = {&a, &b};
    start();
    open_seq(&a, salt_a, 3 * R, 3 * R);
    open_seq(&b, salt_a, 3 * R, 3 * R);
    CHECK(kv_seq_grow(kv, &a, 3 * R) == OK && kv_seq_grow(kv, &b, 3 * R) == OK);
    is_int(counts().active, 6, "two that start together write two copies");
    kv_seq_share(kv, &a, toks, 3 * R - 1);
    is_int(a.n_shared, 2, "only full blocks are sealed");
    kv_seq_share(kv, &b, toks, 3 * R);
    kv_audit(kv, both, 2);
    is_int(counts().active, 4, "the second to seal gives its copies back");
    ok(a.table[LANE_SPARSE][1] == b.table[LANE_SPARSE][1], "and names those of the first");
    kv_seq_close(kv, &a);
    is_int(counts().active, 3, "each reader holds them by itself");
    kv_seq_close(kv, &b);
    stop();
}

static void colliding_hashes_are_misses(void)
{
    struct kv_seq s;
    start_with(HBM, DRAM, true, 1);
    for (uint32_t first = 0; first < 8; first++) {
        toks[0] = first;
        fill_cache(first % 2 == 0 ? salt_a : salt_b, 1);
    }
    for (uint32_t first = 0; first < 8; first++) {
        toks[0] = first;
        uint32_t n_hit = open_seq(&s, first % 2 == 0 ? salt_a : salt_b, R + 1, 2 * R);
        ok(n_hit == R && rig_holds(kv, s.table[LANE_SPARSE][0], first),
           "R=%u: with one bit of hash, prefix %u is found and is itself", R, first);
        kv_seq_close(kv, &s);
        n_hit = open_seq(&s, first % 2 == 0 ? salt_b : salt_a, R + 1, 2 * R);
        ok(n_hit == 0, "R=%u: and not under the other salt", R);
        kv_seq_close(kv, &s);
    }
    stop();
}

static void counters_tell_the_hit_rate(void)
{
    struct kv_seq s;
    start();
    fill_cache(salt_a, 2);
    open_seq(&s, salt_a, 2 * R + 3, 3 * R);
    is_int(counts().queried_tokens, 4 * R + 3, "every prompt token of an open is a query");
    is_int(counts().hit_tokens, 2 * R, "every position taken is a hit");
    uint64_t with = counts().table_bytes;
    kv_seq_close(kv, &s);
    is_int(with - counts().table_bytes, (2 * 3 + 1) * sizeof(block_id),
           "an open table is counted in bytes");
    stop();
}

/* ---- a second tier that is made behind the start ---- */

static struct host_progress growing;
static uint32_t n_looks;

static void *grow_alloc(struct backend *be, size_t bytes)
{
    growing = (struct host_progress){.bytes = bytes};
    n_looks = 0;
    return rig_alloc(be, bytes);
}

static void grow_progress(struct backend *be, const void *p, struct host_progress *out)
{
    (void)be, (void)p;
    n_looks++;
    *out = growing;
}

static uint32_t dram_now(void)
{
    struct kv_counts c;
    kv_poll(kv);
    kv_audit(kv, NULL, 0);
    kv_counts(kv, &c);
    CHECK(c.dram_ready == growing.ready && c.dram_bytes == growing.bytes);
    return c.total[KV_DRAM] == c.free[KV_DRAM] && c.free[KV_DRAM] == kv_dram_available(kv)
               ? c.free[KV_DRAM]
               : UINT32_MAX;
}

static void dram_is_used_as_it_comes(void)
{
    struct backend_ops ops = rig_ops;
    struct backend be = {&ops};
    struct kv_config cfg = {.geo = kv_geometry_make(R, 2, 3, 8), .blocks = {{HBM, DRAM}}};
    struct kv_counts c;
    ops.alloc_host = grow_alloc;
    ops.free_host = rig_free;
    ops.host_progress = grow_progress;
    size_t block = cfg.geo.block_bytes[LANE_SPARSE];
    CHECK(kv_create(&kv, &be, &cfg) == OK);
    is_int(n_looks, 0, "making a cache does not look at a tier that grows, which would begin it");
    is_int(dram_now(), 0, "at the start there is no block of DRAM");
    ok(kv_has_dram(kv), "though there is a tier of it");
    growing.ready = 2 * block - 1;
    is_int(dram_now(), 1, "one that is not there whole does not count");
    growing.ready = 3 * block;
    is_int(dram_now(), 3, "what has come is free");
    growing.ended = true;
    growing.why = "ulimit";
    is_int(dram_now(), 3, "and when no more comes, the cache goes on with that");
    kv_counts(kv, &c);
    ok(c.dram_ended && strcmp(c.dram_why, "ulimit") == 0, "it says why: %s", c.dram_why);
    uint32_t n_hit;
    struct kv_seq s = {0};
    const struct kv_open o = {
        .tokens = toks, .n = 1, .max_rows = (HBM + 1) * R, .layout = {.seals = true}};
    is_int(kv_seq_open(kv, &s, &o, 1, &n_hit), ERR_FULL,
           "what would have fitted all of it is refused");
    kv_destroy(kv);
    ok(rig_held_bytes == 0, "and the arenas are given back");
}

/* A step that was prepared ahead and then not run: its sequence grows again, by the same row. */
static void a_ring_keeps_what_the_next_row_attends(void)
{
    enum { SINKS = 16, RECENT = 128, FIRST = 300, LAST = 900 };
    const uint8_t classes[2] = {LANE_DENSE, LANE_STREAM};
    struct lane_place lanes[2];
    struct kv_config cfg = {.geo = kv_geometry_make(R, 1, 2, 4)};
    struct kv_seq s;
    uint32_t n_bad = 0, n_hit;
    kv_geometry_classify(&cfg.geo, classes, lanes, SINKS, RECENT);
    cfg.blocks[LANE_DENSE][KV_HBM] = 1000 / R + 1;
    cfg.blocks[LANE_STREAM][KV_HBM] = 400 / R;
    CHECK(kv_create(&kv, &rig_backend, &cfg) == OK);
    const struct kv_open o = {.tokens = toks, .n = 1, .max_rows = LAST + 2};
    CHECK(kv_seq_open(kv, &s, &o, 0, &n_hit) == OK && kv_seq_grow(kv, &s, FIRST) == OK);
    for (uint32_t row = FIRST; row < LAST; row++) {
        CHECK(kv_seq_grow(kv, &s, row + 1) == OK); /* ahead: refused for somebody else's sake */
        kv_seq_settle(kv, &s, row);
        CHECK(kv_seq_grow(kv, &s, row + 1) == OK); /* planned */
        for (uint32_t b = (row + 1 - RECENT) / 64 * 64 / R; b <= row / R; b++)
            n_bad += s.table[LANE_STREAM][b] >= cfg.blocks[LANE_STREAM][KV_HBM];
    }
    ok(n_bad == 0, "R=%u: a row grown for twice finds its window", R);
    kv_seq_close(kv, &s);
    kv_destroy(kv);
}

int main(void)
{
    static const uint32_t rows[] = {8, 16};
    geometry_is_that_of_the_design();
    a_bad_configuration_is_refused();
    for (size_t i = 0; i < ARRAY_LEN(rows); i++) {
        R = rows[i];
        a_prefix_is_found_again();
        caching_can_be_off();
        growth_is_all_or_nothing();
        pressure_moves_prefixes_down_and_hits_bring_them_up();
        looks_are_no_use();
        the_end_of_the_oldest_chain_goes_first();
        a_block_in_use_is_never_the_victim();
        two_writers_of_one_text_end_up_sharing();
        a_ring_keeps_what_the_next_row_attends();
        colliding_hashes_are_misses();
        counters_tell_the_hit_rate();
        dram_is_used_as_it_comes();
    }
    return tap_done();
}
