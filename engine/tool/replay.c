#include "engine/tool/replay.h"

#include "cache/residency.h"
#include "kernels/core/hot_run.h"

#include <string.h>

static const uint32_t NEVER = UINT32_MAX; /* a next use */

static uint32_t page_bound(const struct replay_lane *lane)
{
    uint32_t bound = 0;
    for (uint32_t i = lane->first[0]; i < lane->first[lane->n_steps]; i++)
        bound = lane->pages[i] >= bound ? lane->pages[i] + 1 : bound;
    return bound;
}

uint32_t replay_largest(const struct replay_lane *lane)
{
    uint32_t largest = 0;
    for (uint32_t i = 0; i < lane->n_steps; i++)
        if (lane->first[i + 1] - lane->first[i] > largest)
            largest = lane->first[i + 1] - lane->first[i];
    return largest;
}

struct replay_count replay_reuse(const struct replay_lane *lane, uint32_t lag, uint32_t warm_up)
{
    struct replay_count n = {0};
    uint32_t bound = page_bound(lane);
    uint32_t *seen = mem_alloc((bound + (size_t)1) * sizeof *seen); /* the step that asks, + 1 */
    for (uint32_t i = 0; i < lane->n_steps; i++) {
        if (i < lag)
            continue;
        for (uint32_t k = lane->first[i - lag]; k < lane->first[i - lag + 1]; k++)
            seen[lane->pages[k]] = i + 1;
        for (uint32_t k = lane->first[i]; k < lane->first[i + 1] && i >= warm_up; k++) {
            n.touches++;
            n.misses += seen[lane->pages[k]] != i + 1;
        }
    }
    mem_free(seen);
    return n;
}

/* ---- exact LRU ---- */

/* A list through all pages by last use; pages that are not in a slot are not in the list. */
struct lru {
    uint32_t *newer, *older; /* [bound + 1]; index `bound` is the end on both sides */
    bool *held;
    uint32_t bound, n;
};

static void lru_unlink(struct lru *l, uint32_t p)
{
    l->newer[l->older[p]] = l->newer[p];
    l->older[l->newer[p]] = l->older[p];
    l->held[p] = false;
    l->n--;
}

static void lru_push(struct lru *l, uint32_t p)
{
    uint32_t end = l->bound, newest = l->older[end];
    l->older[p] = newest;
    l->newer[p] = end;
    l->newer[newest] = l->older[end] = p;
    l->held[p] = true;
    l->n++;
}

static struct replay_count run_lru(const struct replay_lane *lane, const struct replay_args *a)
{
    struct replay_count n = {0};
    struct lru l = {.bound = page_bound(lane)};
    l.newer = mem_alloc((l.bound + (size_t)1) * sizeof *l.newer);
    l.older = mem_alloc((l.bound + (size_t)1) * sizeof *l.older);
    l.held = mem_alloc(l.bound + (size_t)1);
    l.newer[l.bound] = l.older[l.bound] = l.bound;
    for (uint32_t i = 0; i < lane->n_steps; i++) {
        const uint32_t *begin = lane->pages + lane->first[i],
                       *end = lane->pages + lane->first[i + 1];
        uint32_t missed = 0;
        for (const uint32_t *p = begin; p < end; p++)
            if (l.held[*p])
                lru_unlink(&l, *p);
            else
                missed++;
        for (const uint32_t *p = begin; p < end; p++)
            lru_push(&l, *p);
        while (l.n > a->slots)
            lru_unlink(&l, l.newer[l.bound]);
        n.touches += i >= a->warm_up ? (uint64_t)(end - begin) : 0;
        n.misses += i >= a->warm_up ? missed : 0;
    }
    mem_free(l.newer);
    mem_free(l.older);
    mem_free(l.held);
    return n;
}

/* ---- Belady ---- */

/* A heap of (next use, page), latest on top. Entries are not taken out when a page is used: one is
 * stale if it does not name the page's present next use. */
struct use {
    uint32_t next, page;
};

struct belady {
    struct use *heap;
    size_t n_heap;
    uint32_t *next; /* [bound] present next use of a page that is held */
    bool *held;
    uint32_t n_held;
};

static bool is_later(struct use a, struct use b)
{
    return a.next != b.next ? a.next > b.next : a.page > b.page;
}

static void use_push(struct belady *b, struct use u)
{
    size_t i = b->n_heap++;
    for (; i > 0 && is_later(u, b->heap[(i - 1) / 2]); i = (i - 1) / 2)
        b->heap[i] = b->heap[(i - 1) / 2];
    b->heap[i] = u;
}

static struct use use_pop(struct belady *b)
{
    struct use top = b->heap[0], last = b->heap[--b->n_heap];
    size_t i = 0;
    for (size_t c; (c = 2 * i + 1) < b->n_heap; i = c) {
        c += c + 1 < b->n_heap && is_later(b->heap[c + 1], b->heap[c]);
        if (!is_later(b->heap[c], last))
            break;
        b->heap[i] = b->heap[c];
    }
    b->heap[i] = last;
    return top;
}

/* [touch]: the step in which its page is touched next; NEVER. */
static uint32_t *next_uses(const struct replay_lane *lane, uint32_t bound)
{
    uint32_t *next = mem_alloc((lane->first[lane->n_steps] + (size_t)1) * sizeof *next);
    uint32_t *seen = mem_alloc((bound + (size_t)1) * sizeof *seen);
    for (uint32_t p = 0; p < bound; p++)
        seen[p] = NEVER;
    for (uint32_t i = lane->n_steps; i-- > 0;)
        for (uint32_t k = lane->first[i]; k < lane->first[i + 1]; k++) {
            next[k] = seen[lane->pages[k]];
            seen[lane->pages[k]] = i;
        }
    mem_free(seen);
    return next;
}

/* One step: hits, then who leaves (never one of this step: those have no fresh entry yet), then the
 * step's own entries. Returns the misses. */
static uint32_t belady_step(struct belady *b, const struct replay_lane *lane, uint32_t step,
                            const uint32_t *next, uint32_t slots)
{
    uint32_t missed = 0;
    for (uint32_t k = lane->first[step]; k < lane->first[step + 1]; k++) {
        uint32_t p = lane->pages[k];
        missed += !b->held[p];
        b->n_held += !b->held[p];
        b->held[p] = true;
        b->next[p] = step; /* its entry says this step: nobody leaves by that */
    }
    while (b->n_held > slots) {
        struct use u = use_pop(b);
        if (!b->held[u.page] || b->next[u.page] != u.next || u.next == step)
            continue;
        b->held[u.page] = false;
        b->n_held--;
    }
    for (uint32_t k = lane->first[step]; k < lane->first[step + 1]; k++) {
        b->next[lane->pages[k]] = next[k];
        use_push(b, (struct use){next[k], lane->pages[k]});
    }
    return missed;
}

static struct replay_count run_belady(const struct replay_lane *lane, const struct replay_args *a)
{
    struct replay_count n = {0};
    uint32_t bound = page_bound(lane), n_touches = lane->first[lane->n_steps];
    uint32_t *next = next_uses(lane, bound);
    struct belady b = {.heap = mem_alloc((n_touches + (size_t)1) * sizeof *b.heap),
                       .next = mem_alloc((bound + (size_t)1) * sizeof *b.next),
                       .held = mem_alloc(bound + (size_t)1)};
    for (uint32_t i = 0; i < lane->n_steps; i++) {
        uint32_t missed = belady_step(&b, lane, i, next, a->slots);
        n.touches += i >= a->warm_up ? lane->first[i + 1] - lane->first[i] : 0;
        n.misses += i >= a->warm_up ? missed : 0;
    }
    mem_free(b.heap);
    mem_free(b.next);
    mem_free(b.held);
    mem_free(next);
    return n;
}

/* ---- bucketed: the real thing, with one lane ---- */

static void *plain_alloc(struct backend *be, size_t bytes)
{
    (void)be;
    void *p = mem_try_alloc(bytes);
    if (p == NULL)
        (void)err(ERR_MEMORY, "replay: no memory for %zu bytes", bytes);
    return p;
}

static void plain_free(struct backend *be, void *p, size_t bytes)
{
    (void)be, (void)bytes;
    mem_free(p);
}

static void plain_copy(struct backend *be, void *dst, const void *src, size_t bytes)
{
    (void)be;
    memcpy(dst, src, bytes);
}

static void plain_hot(struct backend *be, const struct hot_args *a)
{
    (void)be;
    hot_run(a);
}

static const struct backend_ops plain_ops = {.name = "replay",
                                             .alloc = plain_alloc,
                                             .free = plain_free,
                                             .copy = plain_copy,
                                             .hot = plain_hot};

struct bucketed {
    struct backend be;
    struct leaf_pool *pool;
    struct hot_set *hot;
    uint32_t *slots;
    struct hot_fetch *fetches;
};

static status bucketed_open(struct bucketed *b, const struct replay_lane *lane,
                            const struct replay_args *a)
{
    uint32_t bound = page_bound(lane), largest = replay_largest(lane);
    uint32_t most = bound > a->slots ? bound : a->slots;
    uint32_t *blocks = mem_alloc((most + (size_t)1) * sizeof *blocks);
    b->be = (struct backend){&plain_ops};
    b->slots = mem_alloc((largest + (size_t)1) * sizeof *b->slots);
    b->fetches = mem_alloc((largest + (size_t)1) * sizeof *b->fetches);
    status st = leaf_pool_create(&b->pool, &b->be, 1, UINT64_MAX);
    if (st == OK)
        st = hot_set_open(&b->hot, &b->be, b->pool, 1, bound);
    if (st == OK)
        st = hot_set_resize(b->hot, &b->be, blocks, a->slots);
    if (st == OK)
        st = hot_set_cover(b->hot, b->pool, blocks, bound);
    if (st == OK)
        b->hot->epoch_steps = a->epoch_steps;
    mem_free(blocks);
    return st;
}

static void bucketed_close(struct bucketed *b)
{
    hot_set_close(b->hot, &b->be, b->pool);
    leaf_pool_destroy(b->pool);
    mem_free(b->slots);
    mem_free(b->fetches);
}

static status run_bucketed(const struct replay_lane *lane, const struct replay_args *a,
                           struct replay_count *out, uint32_t *histogram)
{
    struct bucketed b = {0};
    struct hot_counts n = {0};
    status st = bucketed_open(&b, lane, a);
    for (uint32_t i = 0; st == OK && i < lane->n_steps; i++) {
        if (i == a->warm_up)
            memset(b.hot->stats, 0, sizeof *b.hot->stats); /* the one lane's */
        (void)hot_touch(b.hot, 0, lane->pages + lane->first[i], lane->first[i + 1] - lane->first[i],
                        b.slots, b.fetches);
        hot_set_step(b.hot);
    }
    if (st == OK && a->warm_up < lane->n_steps)
        hot_set_collect(b.hot, &n);
    for (uint32_t i = 0; st == OK && histogram != NULL && i < HOT_AGES; i++)
        histogram[i] += b.hot->stats->distance[i];
    *out = (struct replay_count){n.hits + n.misses, n.misses};
    bucketed_close(&b);
    return st;
}

status replay_run(const struct replay_lane *lane, const struct replay_args *a,
                  struct replay_count *out, uint32_t *histogram)
{
    if (a->slots < replay_largest(lane) || a->slots > HOT_MAX_SLOTS)
        return err(ERR_ARG, "%u slots: a step picks up to %u pages, and a hot set has at most %u",
                   a->slots, replay_largest(lane), (unsigned)HOT_MAX_SLOTS);
    if (a->policy == REPLAY_BUCKETED)
        return run_bucketed(lane, a, out, histogram);
    *out = a->policy == REPLAY_LRU ? run_lru(lane, a) : run_belady(lane, a);
    return OK;
}
