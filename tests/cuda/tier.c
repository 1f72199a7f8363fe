/* The pinned DRAM arena: it grows by itself, copies cross its seams, and the cache uses what is there. */
#include "cache/kv.h"
#include "kernels/core/splitmix.h"
#include "kernels/cuda_api.h"
#include "tests/tap.h"

#include <unistd.h>

static struct backend *be;

static struct host_progress wait_for(const void *p, uint64_t bytes)
{
    struct host_progress h = {0};
    for (uint32_t i = 0; i < 20000 && !h.ended && h.ready < bytes; i++) {
        be->ops->host_progress(be, p, &h);
        usleep(1000);
    }
    return h;
}

static void write_words(uint64_t *to, size_t n, uint64_t name)
{
    for (size_t i = 0; i < n; i++)
        to[i] = splitmix_next(&name);
}

static void an_arena_is_pinned_behind_the_start(void)
{
    const size_t bytes = ((size_t)5 << 30) / 2 + 12345 * 16;
    uint64_t t0 = clock_us();
    uint8_t *p = be->ops->alloc_host(be, bytes);
    uint64_t t1 = clock_us();
    ok(p != NULL && t1 - t0 < 100000, "2.5 GiB are given in %.1f ms", (double)(t1 - t0) / 1e3);
    struct host_progress h = wait_for(p, (uint64_t)1 << 30);
    uint64_t t2 = clock_us();
    ok(h.ready >= (uint64_t)1 << 30, "the first GiB is there after %.2f s",
       (double)(t2 - t0) / 1e6);
    h = wait_for(p, UINT64_MAX);
    ok(h.ended && h.ready == bytes && h.why == NULL, "all of it after %.2f s: %.2f s per GiB",
       (double)(clock_us() - t0) / 1e6, (double)(clock_us() - t0) / 1e6 / 2.5);

    enum { WORDS = 1 << 18 };
    uint64_t *dev = be->ops->alloc(be, WORDS * 8), *want = mem_alloc(WORDS * 8);
    uint64_t *seam = (uint64_t *)(void *)(p + ((size_t)1 << 30) - 8 * 1000);
    write_words(want, WORDS, 7);
    memcpy(seam, want, WORDS * 8);
    be->ops->copy(be, dev, seam, WORDS * 8);
    be->ops->copy(be, seam + WORDS, dev, WORDS * 8); /* within one registration */
    CHECK(be->ops->sync(be) == OK); /* pinned memory is read when the copy's turn comes */
    memset(seam, 0, WORDS * 8);
    be->ops->copy(be, seam, dev, WORDS * 8);
    ok(be->ops->sync(be) == OK && memcmp(seam, want, WORDS * 8) == 0 &&
           memcmp(seam + WORDS, want, WORDS * 8) == 0,
       "copies cross the seam between two registrations");
    be->ops->free(be, dev, WORDS * 8);
    be->ops->free_host(be, p, bytes);
    is_int(be->ops->sync(be), OK, "and it can be given back");
    mem_free(want);
    p = be->ops->alloc_host(be, bytes);
    be->ops->host_progress(be, p, &h);
    be->ops->free_host(be, p, bytes);
    is_int(be->ops->sync(be), OK, "also while it is being pinned");
    p = be->ops->alloc_host(be, bytes);
    be->ops->free_host(be, p, bytes);
    is_int(be->ops->sync(be), OK, "and before anybody asked for it");
}

/* ---- the cache over it ---- */

enum { R = 16, BLOCKS = 160, ROWS = 2 * SEGMENT_ROWS + TAIL_ROWS };

static struct kv *kv;

static uint8_t *block_at(block_id id)
{
    const struct kv_memory *m = kv_memory(kv);
    uint8_t *base = id & BLOCK_IN_DRAM ? m->dram[LANE_SPARSE] : m->hbm[LANE_SPARSE];
    return base + (size_t)(id & ~BLOCK_IN_DRAM) * m->geo->block_bytes[LANE_SPARSE];
}

static bool holds(const struct kv_seq *s)
{
    size_t bytes = kv_geometry(kv)->block_bytes[LANE_SPARSE];
    uint64_t *want = mem_alloc(bytes), *got = mem_alloc(bytes);
    bool same = true;
    for (uint32_t i = 0; i < s->n_blocks; i++) {
        write_words(want, bytes / 8, 1000 + i);
        be->ops->copy(be, got, block_at(s->table[LANE_SPARSE][i]), bytes);
        CHECK(be->ops->sync(be) == OK);
        same &= memcmp(want, got, bytes) == 0;
    }
    mem_free(want);
    mem_free(got);
    return same;
}

static void fill(const struct kv_seq *s)
{
    size_t bytes = kv_geometry(kv)->block_bytes[LANE_SPARSE];
    uint64_t *words = mem_alloc(bytes);
    for (uint32_t i = 0; i < s->n_blocks; i++) {
        write_words(words, bytes / 8, 1000 + i);
        be->ops->copy(be, block_at(s->table[LANE_SPARSE][i]), words, bytes);
        CHECK(be->ops->sync(be) == OK);
    }
    mem_free(words);
}

static void seal_all(struct kv_seq *s)
{
    struct kv_seal seal;
    while (s->n_segments < 2) {
        CHECK(kv_seq_seal_begin(kv, s, NULL, &seal) == OK);
        kv_seq_seal_end(kv, s, &seal);
    }
}

static void the_cache_spills_and_restores(void)
{
    struct kv_config cfg = {.geo = kv_geometry_make(R, 4, 8, 128)};
    cfg.blocks[LANE_SPARSE][KV_HBM] = BLOCKS;
    cfg.blocks[LANE_SPARSE][KV_DRAM] = BLOCKS;
    const struct kv_open o = {.max_rows = ROWS, .layout = {.seals = true}};
    struct kv_seq s = {0};
    struct kv_counts c;
    uint32_t n_hit;
    CHECK(kv_create(&kv, be, &cfg) == OK);
    for (uint32_t i = 0; i < 5000 && (kv_poll(kv), kv_counts(kv, &c), c.dram_ready < c.dram_bytes);
         i++)
        usleep(1000);
    ok(c.dram_ready == c.dram_bytes && c.dram_bytes == cfg.geo.block_bytes[0] * BLOCKS &&
           c.free[KV_DRAM] == BLOCKS,
       "the cache has all of its DRAM once it is pinned");
    CHECK(kv_seq_open(kv, &s, &o, 0, &n_hit) == OK && kv_seq_grow(kv, &s, ROWS) == OK);
    fill(&s);
    seal_all(&s);
    struct kv_seq *open[] = {&s};
    is_int(kv_seq_spill(kv, &s, 32), OK, "it spills");
    kv_audit(kv, open, 1);
    ok(holds(&s), "and DRAM holds every byte");
    is_int(kv_seq_resize(kv, &s, 50), OK, "slots are added");
    kv_step(kv, open, 1);
    kv_audit(kv, open, 1);
    is_int(kv_seq_resize(kv, &s, 16), OK, "and taken");
    kv_audit(kv, open, 1);
    is_int(kv_seq_restore(kv, &s), OK, "it comes back");
    kv_audit(kv, open, 1);
    ok(holds(&s), "whole");
    is_int(kv_seq_pause(kv, &s), OK, "it pauses");
    ok(holds(&s), "in DRAM");
    is_int(kv_seq_resume(kv, &s, 32), OK, "and goes on, SPILLED");
    kv_audit(kv, open, 1);
    ok(holds(&s), "with every byte");
    kv_seq_close(kv, &s);
    kv_counts(kv, &c);
    ok(c.free[0] == BLOCKS && c.free[1] == BLOCKS, "and everything is given back");
    kv_destroy(kv);
    is_int(be->ops->sync(be), OK, "without an error");
}

int main(void)
{
    if (spind_cuda_open(&be, 0) != OK)
        tap_skip_all(err_text());
    an_arena_is_pinned_behind_the_start();
    the_cache_spills_and_restores();
    be->ops->close(be);
    return tap_done();
}
