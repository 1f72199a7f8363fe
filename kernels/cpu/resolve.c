/* Resolve: pages become blocks in HBM. A RESIDENT row is a look-up per page; a SPILLED one goes
 * through its hot set, and what misses is copied from the DRAM arena before the call returns.
 *
 * An item is one lane of one row. Lanes share nothing (tables, slots and statistics are per lane), so
 * which thread takes which changes no bit. A lane of 50 pages of which 4 % miss costs three
 * microseconds, and what one core fetched is slow to read for another: the pool is worth waking for
 * three lanes already (measured behind 7,680 tokens: attend after it became 10 to 30 % shorter). Scratch
 * belongs to the engine thread. */
#include "kernels/core/resolve.h"
#include "kernels/core/hot_run.h"
#include "kernels/cpu/cpu.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum {
    RESOLVE_ALONE = 2, /* SPILLED lanes up to here: the engine thread by itself */
};

struct resolve_scratch {
    uint32_t *slots; /* [threads][cap] */
    struct hot_fetch *fetches;
    size_t cap, n;
};

struct resolve_call {
    struct cpu_backend *b;
    const struct resolve_args *a;
    struct resolve_scratch *s;
    atomic_uint n_bad; /* lanes whose plan does not fit their hot set */
};

static void reserve(struct cpu_backend *b, struct resolve_scratch *s, uint32_t page_cap)
{
    size_t n = (size_t)pool_threads(b->pool) * page_cap;
    s->cap = page_cap;
    if (n <= s->n)
        return;
    s->slots = mem_grow(s->slots, s->n * sizeof *s->slots, n * sizeof *s->slots);
    s->fetches = mem_grow(s->fetches, s->n * sizeof *s->fetches, n * sizeof *s->fetches);
    s->n = n;
}

static void fetch(const struct kv_memory *kv, const struct hot_fetch *f)
{
    size_t block = kv->geo->block_bytes[LANE_SPARSE], page = kv->geo->page_bytes;
    const char *from = (const char *)kv->dram[LANE_SPARSE] + (f->from & ~BLOCK_IN_DRAM) * block;
    char *to = (char *)kv->hbm[LANE_SPARSE] + f->to * block;
    memcpy(to + f->lane * page, from + f->lane * page, page);
}

static void resolve_item(struct resolve_call *c, uint32_t row, uint32_t head, uint32_t worker)
{
    const struct kv_memory *kv = c->a->kv;
    struct lane_place place = kv_lane(kv->geo, c->a->layer, head);
    if (place.class_ != LANE_SPARSE)
        return;
    uint32_t *slots = c->s->slots + worker * c->s->cap, n_fetches;
    struct hot_fetch *fetches = c->s->fetches + worker * c->s->cap;
    if (!resolve_lane(c->a, row, head, place.index, slots, fetches, &n_fetches))
        atomic_fetch_add_explicit(&c->n_bad, 1, memory_order_relaxed);
    for (uint32_t i = 0; i < n_fetches; i++)
        fetch(kv, &fetches[i]);
}

static void resolve_worker(void *arg, uint32_t worker)
{
    struct resolve_call *c = arg;
    uint32_t kv_heads = c->a->kv->geo->kv_heads, n = c->a->n_rows * kv_heads;
    for (uint32_t i; (i = pool_next(c->b->pool, n)) < n;)
        resolve_item(c, i / kv_heads, i % kv_heads, worker);
}

void cpu_resolve(struct backend *be, const struct resolve_args *a)
{
    struct cpu_backend *b = (struct cpu_backend *)(void *)be;
    struct resolve_call c = {.b = b, .a = a, .s = b->resolve_scratch};
    uint32_t kv_heads = a->kv->geo->kv_heads, n_spilled = 0;
    cpu_plan_flush(b);
    reserve(b, c.s, a->page_cap);
    for (uint32_t i = 0; i < a->n_rows; i++)
        n_spilled += a->rows[i].hot != NULL ? kv_heads : 0;
    if (n_spilled > RESOLVE_ALONE)
        pool_run(b->pool, resolve_worker, &c);
    else
        for (uint32_t i = 0; i < a->n_rows * kv_heads; i++)
            resolve_item(&c, i / kv_heads, i % kv_heads, 0);
    if (c.n_bad > 0 && b->error == OK)
        b->error = err(ERR_DEVICE, "layer %u: %u plans name more pages than their hot sets hold",
                       a->layer, (unsigned)c.n_bad);
}

/* Nothing that waits (plan.c) touches hot sets. */
void cpu_hot(struct backend *be, const struct hot_args *a)
{
    (void)be;
    hot_run(a);
}

status cpu_resolve_open(struct cpu_backend *b)
{
    b->resolve_scratch = mem_alloc(sizeof(struct resolve_scratch));
    return OK;
}

void cpu_resolve_close(struct cpu_backend *b)
{
    struct resolve_scratch *s = b->resolve_scratch;
    if (s == NULL)
        return;
    mem_free(s->slots);
    mem_free(s->fetches);
    mem_free(s);
    b->resolve_scratch = NULL;
}
