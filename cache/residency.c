/* The memory behind hot sets.
 *
 * A leaf serves 512 pages of every lane of one sequence: 2 bytes a page, 0.1 % of the KV it describes
 * at R = 8 and d = 64. Leaves come from a pool in chunks; a chunk goes back to the backend with its
 * last leaf, so that what is held follows what is covered and not what might ever be. So do the lists
 * of leaves and of DRAM blocks. The slots'
 * arrays are one allocation, made anew when a budget outgrows it or falls below half of it. */
#include "cache/residency.h"

#include <string.h>

enum {
    CHUNK_BYTES = 128 * 1024,   /* small leaves share an allocation of about this size */
    CHUNK_LEAVES = 32,          /* at most: a mask has so many bits */
    SLOT_UNIT = 16,             /* budgets change by steps of this: arrays hold a multiple */
    SLOTS_TURN = HOT_SWEEP - 2, /* when slots are swept; it comes up before epochs wrap, too */
};

/* ---- leaf pool ---- */

struct leaf_chunk {
    struct leaf_chunk *next;
    uint16_t *leaves; /* backend memory */
    uint32_t used;    /* bit i: leaf i is out */
};

struct leaf_pool {
    struct backend *be;
    struct leaf_chunk *chunks; /* newest first */
    uint64_t max_bytes, held_bytes;
    size_t leaf_bytes;
    uint32_t per_chunk, n_out;
};

status leaf_pool_create(struct leaf_pool **out, struct backend *be, uint32_t n_lanes,
                        uint64_t max_bytes)
{
    CHECK(n_lanes > 0);
    struct leaf_pool *p = mem_try_alloc(sizeof *p);
    if (p == NULL)
        return err(ERR_MEMORY, "leaf pool: no memory");
    p->be = be;
    p->max_bytes = max_bytes;
    p->leaf_bytes = (size_t)n_lanes * HOT_LEAF_PAGES * sizeof(uint16_t);
    size_t n = CHUNK_BYTES / p->leaf_bytes;
    p->per_chunk = n < 1 ? 1 : n > CHUNK_LEAVES ? CHUNK_LEAVES : (uint32_t)n;
    *out = p;
    return OK;
}

void leaf_pool_destroy(struct leaf_pool *p)
{
    if (p == NULL)
        return;
    CHECK(p->n_out == 0 && p->chunks == NULL && p->held_bytes == 0);
    mem_free(p);
}

uint64_t leaf_pool_bytes(const struct leaf_pool *p)
{
    return p->held_bytes;
}

uint64_t leaf_pool_leaf_bytes(const struct leaf_pool *p)
{
    return p->leaf_bytes;
}

static uint32_t chunk_full(const struct leaf_pool *p)
{
    return (uint32_t)((1ull << p->per_chunk) - 1);
}

static status add_chunk(struct leaf_pool *p, struct leaf_chunk **out)
{
    size_t bytes = p->leaf_bytes * p->per_chunk;
    if (p->held_bytes + bytes > p->max_bytes)
        return err(ERR_FULL, "leaf pool: %llu of %llu bytes are in use",
                   (unsigned long long)p->held_bytes, (unsigned long long)p->max_bytes);
    struct leaf_chunk *c = mem_try_alloc(sizeof *c);
    if (c == NULL)
        return err(ERR_MEMORY, "leaf pool: no memory");
    c->leaves = p->be->ops->alloc(p->be, bytes);
    if (c->leaves == NULL) {
        mem_free(c);
        return ERR_MEMORY; /* the backend said why */
    }
    c->next = p->chunks;
    p->chunks = c;
    p->held_bytes += bytes;
    *out = c;
    return OK;
}

status leaf_pool_get(struct leaf_pool *p, uint16_t **out)
{
    struct leaf_chunk *c = p->chunks;
    while (c != NULL && c->used == chunk_full(p))
        c = c->next;
    if (c == NULL)
        TRY(add_chunk(p, &c));
    CHECK(c != NULL);
    uint32_t i = (uint32_t)__builtin_ctz(~c->used);
    c->used |= 1u << i;
    p->n_out++;
    *out = c->leaves + i * (p->leaf_bytes / sizeof(uint16_t));
    memset(*out, 0xff, p->leaf_bytes); /* HOT_NEVER */
    return OK;
}

void leaf_pool_put(struct leaf_pool *p, uint16_t *leaf)
{
    size_t numbers = p->leaf_bytes / sizeof(uint16_t);
    struct leaf_chunk **at = &p->chunks;
    while (*at != NULL && (leaf < (*at)->leaves || leaf >= (*at)->leaves + numbers * p->per_chunk))
        at = &(*at)->next;
    struct leaf_chunk *c = *at;
    CHECK(c != NULL);
    uint32_t bit = 1u << ((size_t)(leaf - c->leaves) / numbers);
    CHECK((c->used & bit) != 0);
    c->used &= ~bit;
    p->n_out--;
    if (c->used != 0)
        return;
    *at = c->next;
    size_t bytes = p->leaf_bytes * p->per_chunk;
    p->be->ops->free(p->be, c->leaves, bytes);
    p->held_bytes -= bytes;
    mem_free(c);
}

/* ---- a hot set ---- */

/* What the host keeps beside a hot set, in the same allocation. */
struct hot_home {
    struct hot_set set; /* first: a struct hot_set * is one of these */
    size_t bytes;       /* of this allocation: this, then stats */
    void *pages;        /* leaves, dram_blocks: grow with what is covered */
    size_t pages_bytes;
    uint16_t **leaves;
    uint32_t *dram_blocks;
    uint32_t page_capacity;
    uint32_t max_pages, n_pages; /* n_pages: covered */
    double epochs;               /* that distances were counted in, decayed as they are */
    uint32_t n_decays;
    void *slots; /* slot_page, slot_blocks, slot_epoch, slot_flags */
    size_t slots_bytes;
};

static struct hot_home *home_of(const struct hot_set *h)
{
    return (struct hot_home *)(uintptr_t)h;
}

static size_t round_up(size_t n, size_t unit)
{
    return (n + unit - 1) / unit * unit;
}

status hot_set_open(struct hot_set **out, struct backend *be, struct leaf_pool *pool,
                    uint32_t n_lanes, uint32_t max_pages)
{
    CHECK(n_lanes * (size_t)HOT_LEAF_PAGES * sizeof(uint16_t) == pool->leaf_bytes);
    /* Each leaf has a sweep of its own, and the slots have one: hot_set_step. */
    CHECK((max_pages + HOT_LEAF_PAGES - 1) / HOT_LEAF_PAGES <= SLOTS_TURN / 2);
    size_t stats_at = round_up(sizeof(struct hot_home), 64);
    size_t bytes = stats_at + n_lanes * sizeof(struct hot_lane_stats);
    char *base = be->ops->alloc(be, bytes);
    if (base == NULL)
        return ERR_MEMORY; /* the backend said why */
    memset(base, 0, bytes);
    struct hot_home *home = (struct hot_home *)(void *)base;
    home->bytes = bytes;
    home->max_pages = max_pages;
    home->set = (struct hot_set){
        .n_lanes = n_lanes,
        .epoch_steps = 1,
        .stats = (struct hot_lane_stats *)(void *)(base + stats_at),
    };
    *out = &home->set;
    return OK;
}

void hot_set_close(struct hot_set *h, struct backend *be, struct leaf_pool *pool)
{
    if (h == NULL)
        return;
    struct hot_home *home = home_of(h);
    for (uint32_t i = 0; i < h->n_leaves; i++)
        if (home->leaves[i] != NULL)
            leaf_pool_put(pool, home->leaves[i]);
    if (home->slots != NULL)
        be->ops->free(be, home->slots, home->slots_bytes);
    if (home->pages != NULL)
        be->ops->free(be, home->pages, home->pages_bytes);
    be->ops->free(be, home, home->bytes);
}

uint64_t hot_set_bytes(const struct hot_set *h)
{
    return home_of(h)->bytes + home_of(h)->slots_bytes + home_of(h)->pages_bytes;
}

/* Points the set's arrays into memory for max_slots slots. */
static void place_slots(struct hot_set *h, char *base, uint32_t max_slots)
{
    size_t n = (size_t)h->n_lanes * max_slots;
    h->max_slots = max_slots;
    h->slot_page = (uint32_t *)(void *)base;
    h->slot_blocks = (uint32_t *)(void *)base + n;
    h->slot_epoch = (uint16_t *)((uint32_t *)(void *)base + n + max_slots);
    h->slot_flags = (uint8_t *)(h->slot_epoch + n);
}

static size_t slots_size(uint32_t n_lanes, uint32_t max_slots)
{
    size_t per_slot = sizeof(uint32_t) + sizeof(uint16_t) + sizeof(uint8_t);
    return n_lanes * (size_t)max_slots * per_slot + max_slots * sizeof(uint32_t);
}

/* Moves what is in the slots, n_slots of each lane, to arrays for max_slots. */
static status move_slots(struct hot_set *h, struct backend *be, uint32_t max_slots)
{
    struct hot_home *home = home_of(h);
    struct hot_set old = *h;
    size_t bytes = slots_size(h->n_lanes, max_slots);
    char *base = be->ops->alloc(be, bytes);
    if (base == NULL)
        return ERR_MEMORY; /* the backend said why */
    place_slots(h, base, max_slots);
    for (uint32_t lane = 0; lane < h->n_lanes && h->n_slots > 0; lane++) {
        size_t to = (size_t)lane * max_slots, from = (size_t)lane * old.max_slots, n = h->n_slots;
        memcpy(h->slot_page + to, old.slot_page + from, n * sizeof *h->slot_page);
        memcpy(h->slot_epoch + to, old.slot_epoch + from, n * sizeof *h->slot_epoch);
        memcpy(h->slot_flags + to, old.slot_flags + from, n * sizeof *h->slot_flags);
    }
    if (home->slots != NULL)
        be->ops->free(be, home->slots, home->slots_bytes);
    home->slots = base;
    home->slots_bytes = bytes;
    return OK;
}

static void clear_slots(struct hot_set *h, uint32_t begin, uint32_t end)
{
    for (uint32_t lane = 0; lane < h->n_lanes; lane++)
        for (uint32_t slot = begin; slot < end; slot++) {
            size_t at = (size_t)lane * h->max_slots + slot;
            h->slot_page[at] = HOT_NO_PAGE;
            h->slot_epoch[at] = 0;
            h->slot_flags[at] = 0;
        }
}

static status grow_slots(struct hot_set *h, struct backend *be, uint32_t n_slots)
{
    CHECK(n_slots <= HOT_MAX_SLOTS);
    uint32_t before = h->n_slots;
    if (n_slots > h->max_slots)
        TRY(move_slots(h, be, (uint32_t)round_up(n_slots, SLOT_UNIT)));
    clear_slots(h, before, n_slots);
    h->n_slots = n_slots;
    return OK;
}

static void shrink_slots(struct hot_set *h, struct backend *be, uint32_t n_slots)
{
    for (uint32_t lane = 0; lane < h->n_lanes; lane++)
        hot_forget(h, lane, n_slots);
    h->n_slots = n_slots;
    uint32_t want = (uint32_t)round_up(n_slots + (n_slots == 0), SLOT_UNIT);
    if (want <= h->max_slots / 2)
        (void)move_slots(h, be, want); /* without memory the larger arrays serve as well */
}

status hot_set_resize(struct hot_set *h, struct backend *be, const uint32_t *slot_blocks,
                      uint32_t n_slots)
{
    uint32_t same = n_slots < h->n_slots ? n_slots : h->n_slots;
    CHECK(same == 0 || memcmp(h->slot_blocks, slot_blocks, same * sizeof *slot_blocks) == 0);
    if (n_slots > h->n_slots)
        TRY(grow_slots(h, be, n_slots));
    else if (n_slots < h->n_slots)
        shrink_slots(h, be, n_slots);
    if (n_slots > 0)
        memcpy((uint32_t *)(uintptr_t)h->slot_blocks, slot_blocks, n_slots * sizeof *slot_blocks);
    return OK;
}

/* Room to say where n_pages lie, by doubling: what is held follows what is covered. */
static status reserve_pages(struct hot_set *h, struct backend *be, uint32_t n_pages)
{
    struct hot_home *home = home_of(h);
    uint32_t capacity = home->page_capacity > 0 ? home->page_capacity : HOT_LEAF_PAGES;
    if (n_pages <= home->page_capacity)
        return OK;
    while (capacity < n_pages)
        capacity *= 2;
    uint32_t n_leaves = (capacity + HOT_LEAF_PAGES - 1) / HOT_LEAF_PAGES;
    size_t dram_at = round_up(n_leaves * sizeof(uint16_t *), 64);
    size_t bytes = dram_at + capacity * sizeof(uint32_t);
    char *base = be->ops->alloc(be, bytes);
    if (base == NULL)
        return ERR_MEMORY; /* the backend said why */
    memset(base, 0, bytes);
    if (home->pages != NULL) {
        memcpy(base, home->leaves, h->n_leaves * sizeof *home->leaves);
        memcpy(base + dram_at, home->dram_blocks, home->n_pages * sizeof *home->dram_blocks);
        be->ops->free(be, home->pages, home->pages_bytes);
    }
    home->pages = base;
    home->pages_bytes = bytes;
    home->page_capacity = capacity;
    h->leaves = home->leaves = (uint16_t **)(void *)base;
    h->dram_blocks = home->dram_blocks = (uint32_t *)(void *)(base + dram_at);
    h->n_leaves = n_leaves;
    return OK;
}

status hot_set_cover(struct hot_set *h, struct leaf_pool *pool, const uint32_t *dram_blocks,
                     uint32_t n_pages)
{
    struct hot_home *home = home_of(h);
    CHECK(n_pages >= home->n_pages && n_pages <= home->max_pages);
    TRY(reserve_pages(h, pool->be, n_pages));
    uint32_t before = (home->n_pages + HOT_LEAF_PAGES - 1) / HOT_LEAF_PAGES, now = before;
    uint32_t want = (n_pages + HOT_LEAF_PAGES - 1) / HOT_LEAF_PAGES;
    status st = OK;
    while (st == OK && now < want)
        if ((st = leaf_pool_get(pool, &home->leaves[now])) == OK)
            now++;
    if (st != OK) {
        while (now > before) {
            leaf_pool_put(pool, home->leaves[--now]);
            home->leaves[now] = NULL;
        }
        return st;
    }
    if (n_pages > 0)
        memcpy(home->dram_blocks, dram_blocks, n_pages * sizeof *dram_blocks);
    home->n_pages = n_pages;
    return OK;
}

/* Each leaf is swept once in HOT_SWEEP epochs, at an epoch of its own; the slots after them all. */
static void sweep(struct hot_set *h)
{
    uint32_t turn = h->epoch % HOT_SWEEP;
    for (uint32_t lane = 0; lane < h->n_lanes; lane++)
        if (turn < h->n_leaves)
            hot_sweep_leaf(h, lane, turn);
        else if (turn == SLOTS_TURN)
            hot_sweep_slots(h, lane);
}

void hot_set_step(struct hot_set *h)
{
    for (uint32_t lane = 0; lane < h->n_lanes; lane++)
        hot_release(h, lane);
    if (++h->step < h->epoch_steps)
        return;
    h->step = 0;
    home_of(h)->epochs++;
    if (++h->epoch == HOT_EPOCHS)
        h->epoch = 0;
    sweep(h);
}

void hot_set_collect(struct hot_set *h, struct hot_counts *counts)
{
    for (uint32_t lane = 0; lane < h->n_lanes; lane++) {
        struct hot_lane_stats *s = &h->stats[lane];
        counts->hits += s->hits;
        counts->misses += s->misses;
        counts->light_misses += s->light_misses;
        s->hits = s->misses = s->light_misses = 0;
    }
}

void hot_set_curve(const struct hot_set *h, struct miss_curve *out)
{
    double steps = (double)h->step / h->epoch_steps; /* of the epoch that is not over */
    miss_curve_lanes(out, h->stats, h->n_lanes, home_of(h)->epochs + steps);
}

void hot_set_decay(struct hot_set *h)
{
    uint32_t turn = home_of(h)->n_decays++; /* halves go up and down in turn: no bucket fades */
    for (uint32_t lane = 0; lane < h->n_lanes; lane++)
        for (uint32_t i = 0; i < HOT_AGES; i++)
            h->stats[lane].distance[i] = (h->stats[lane].distance[i] + (i + turn) % 2) / 2;
    home_of(h)->epochs /= 2;
}

static void audit_lane(const struct hot_set *h, uint32_t lane)
{
    uint32_t n_pages = home_of(h)->n_pages, n_resident = 0, n_entries = 0;
    for (uint32_t slot = 0; slot < h->n_slots; slot++) {
        size_t at = (size_t)lane * h->max_slots + slot;
        uint32_t page = h->slot_page[at];
        CHECK(h->slot_epoch[at] < HOT_EPOCHS);
        CHECK((h->slot_flags[at] & ~(HOT_IN_USE | HOT_FRESH)) == 0);
        if (page == HOT_NO_PAGE)
            continue;
        CHECK(page < n_pages && *hot_entry(h, lane, page) == slot);
        n_resident++;
    }
    for (uint32_t page = 0; page < h->n_leaves * HOT_LEAF_PAGES; page++) {
        const uint16_t *entry = hot_entry(h, lane, page);
        CHECK((entry == NULL) == (page / HOT_LEAF_PAGES * HOT_LEAF_PAGES >= n_pages));
        if (entry == NULL || *entry == HOT_NEVER)
            continue;
        CHECK(page < n_pages);
        if (*entry & HOT_GHOST)
            continue;
        CHECK(*entry < h->n_slots && h->slot_page[(size_t)lane * h->max_slots + *entry] == page);
        n_entries++;
    }
    CHECK(n_entries == n_resident);
}

void hot_set_audit(const struct hot_set *h)
{
    CHECK(h->epoch < HOT_EPOCHS && h->step < h->epoch_steps && h->n_slots <= h->max_slots);
    for (uint32_t lane = 0; lane < h->n_lanes; lane++)
        audit_lane(h, lane);
}
