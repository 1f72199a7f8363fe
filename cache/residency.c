/* The memory behind hot sets.
 *
 * The header of a set is host memory; leaves, slots' arrays, the lists of leaves and of DRAM blocks and the
 * statistics are the backend's: they are written by its ops `hot` and `copy`, and what is read comes by
 * HOT_READ, one at a time, maybe late.
 *
 * A leaf serves 512 pages of every lane of one sequence: 2 bytes a page, 0.1 % of the KV it describes
 * at R = 8 and d = 64. Leaves come from a pool in chunks; a chunk goes back to the backend with its
 * last leaf, so that what is held follows what is covered and not what might ever be. So do the lists
 * of leaves and of DRAM blocks. The slots'
 * arrays are one allocation, made anew when a budget outgrows it or falls below half of it. */
#include "cache/residency.h"

#include <string.h>

enum {
    CHUNK_BYTES = 128 * 1024, /* small leaves share an allocation of about this size */
    CHUNK_LEAVES = 32,        /* at most: a mask has so many bits */
    SLOT_UNIT = 16,           /* arrays hold a multiple, ... */
    SLOT_SPARE = 4,           /* ... and more by a quarter: sets grow by little, again and again */
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
    struct hot_counts late; /* of sets that closed with numbers on the way */
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

void leaf_pool_collect(struct leaf_pool *p, struct hot_counts *counts)
{
    counts->hits += p->late.hits;
    counts->misses += p->late.misses;
    counts->light_misses += p->late.light_misses;
    p->late = (struct hot_counts){0};
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
    const struct hot_args fill = {.kind = HOT_FILL, .leaf = *out, .leaf_bytes = p->leaf_bytes};
    p->be->ops->hot(p->be, &fill);
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

/* What the host keeps beside a hot set. */
struct hot_home {
    struct hot_set set; /* first: a struct hot_set * is one of these */
    struct backend *be;
    size_t bytes, stats_bytes; /* of this allocation; of the backend's for stats */
    size_t leaf_bytes;
    void *pages; /* leaves, dram_blocks: grow with what is covered */
    size_t pages_bytes;
    uint16_t **leaves;        /* [n_leaves] of the host, for what set.leaves points to */
    uint16_t **device_leaves; /* set.leaves */
    uint32_t *dram_blocks;
    uint32_t page_capacity;
    uint32_t max_pages, n_pages; /* n_pages: covered */
    double epochs;               /* that distances were counted in, decayed as they are */
    uint32_t n_looks, n_learnt;
    uint32_t looked_for; /* n_asked of what the last look asked for */
    struct miss_curve curve;
    void *slots; /* slot_page, slot_blocks, slot_epoch, slot_flags */
    size_t slots_bytes;
    /* Statistics as they were read last. */
    uint32_t n_asked, n_arrived, n_taken;
    double asked_epochs, read_epochs; /* epochs, as they were when it was asked for */
    struct hot_counts read, collected;
    struct hot_lane_stats lanes[]; /* [n_lanes] where they arrive */
};

static struct hot_home *home_of(const struct hot_set *h)
{
    return (struct hot_home *)(uintptr_t)h;
}

static size_t round_up(size_t n, size_t unit)
{
    return (n + unit - 1) / unit * unit;
}

static void run(const struct hot_set *h, struct hot_args a)
{
    struct backend *be = home_of(h)->be;
    a.sets = &h;
    a.n_sets = 1;
    be->ops->hot(be, &a);
}

status hot_set_open(struct hot_set **out, struct backend *be, struct leaf_pool *pool,
                    uint32_t n_lanes, uint32_t max_pages)
{
    CHECK(n_lanes * (size_t)HOT_LEAF_PAGES * sizeof(uint16_t) == pool->leaf_bytes);
    /* Each leaf has a sweep of its own, and the slots have one: hot_step. */
    CHECK((max_pages + HOT_LEAF_PAGES - 1) / HOT_LEAF_PAGES <= HOT_SLOTS_TURN / 2);
    size_t stats_bytes = n_lanes * sizeof(struct hot_lane_stats);
    size_t bytes = sizeof(struct hot_home) + stats_bytes;
    struct hot_home *home = mem_try_alloc(bytes);
    if (home == NULL)
        return err(ERR_MEMORY, "hot set: no memory");
    *home = (struct hot_home){
        .set = {.n_lanes = n_lanes, .epoch_steps = 1},
        .be = be,
        .bytes = bytes,
        .stats_bytes = stats_bytes,
        .leaf_bytes = pool->leaf_bytes,
        .max_pages = max_pages,
    };
    home->set.stats = be->ops->alloc(be, stats_bytes);
    if (home->set.stats == NULL) {
        mem_free(home);
        return ERR_MEMORY; /* the backend said why */
    }
    *out = &home->set;
    return OK;
}

uint64_t hot_set_bytes(const struct hot_set *h)
{
    const struct hot_home *home = home_of(h);
    return home->bytes + home->stats_bytes + home->slots_bytes + home->pages_bytes +
           h->n_leaves * sizeof *home->leaves;
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
    if (h->n_slots > 0)
        run(h, (struct hot_args){.kind = HOT_MOVE, .old = &old});
    if (home->slots != NULL)
        be->ops->free(be, home->slots, home->slots_bytes);
    home->slots = base;
    home->slots_bytes = bytes;
    return OK;
}

static uint32_t capacity_for(uint32_t n_slots)
{
    return (uint32_t)round_up(n_slots + n_slots / SLOT_SPARE + 1, SLOT_UNIT);
}

static status grow_slots(struct hot_set *h, struct backend *be, uint32_t n_slots)
{
    CHECK(n_slots <= HOT_MAX_SLOTS);
    if (n_slots > h->max_slots)
        TRY(move_slots(h, be, capacity_for(n_slots)));
    run(h, (struct hot_args){.kind = HOT_CLEAR, .begin = h->n_slots, .end = n_slots});
    h->n_slots = n_slots;
    return OK;
}

static void shrink_slots(struct hot_set *h, struct backend *be, uint32_t n_slots)
{
    run(h, (struct hot_args){.kind = HOT_FORGET, .begin = n_slots, .end = h->n_slots});
    h->n_slots = n_slots;
    uint32_t want = capacity_for(n_slots);
    if (want <= h->max_slots / 2)
        (void)move_slots(h, be, want); /* without memory the larger arrays serve as well */
}

status hot_set_resize(struct hot_set *h, struct backend *be, const uint32_t *slot_blocks,
                      uint32_t n_slots)
{
    if (n_slots > h->n_slots)
        TRY(grow_slots(h, be, n_slots));
    else if (n_slots < h->n_slots)
        shrink_slots(h, be, n_slots);
    if (n_slots > 0)
        be->ops->copy(be, (uint32_t *)(uintptr_t)h->slot_blocks, slot_blocks,
                      n_slots * sizeof *slot_blocks);
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
    uint16_t **leaves =
        mem_try_grow(home->leaves, h->n_leaves * sizeof *leaves, n_leaves * sizeof *leaves);
    if (leaves == NULL)
        return err(ERR_MEMORY, "hot set: no memory for %u leaves", n_leaves);
    home->leaves = leaves;
    char *base = be->ops->alloc(be, bytes);
    if (base == NULL)
        return ERR_MEMORY; /* the backend said why */
    if (home->pages != NULL) {
        be->ops->copy(be, base, leaves, h->n_leaves * sizeof *leaves);
        be->ops->copy(be, base + dram_at, home->dram_blocks,
                      home->n_pages * sizeof *home->dram_blocks);
        be->ops->free(be, home->pages, home->pages_bytes);
    }
    home->pages = base;
    home->pages_bytes = bytes;
    home->page_capacity = capacity;
    h->leaves = home->device_leaves = (uint16_t **)(void *)base;
    h->dram_blocks = home->dram_blocks = (uint32_t *)(void *)(base + dram_at);
    h->n_leaves = n_leaves;
    return OK;
}

status hot_set_cover(struct hot_set *h, struct leaf_pool *pool, const uint32_t *dram_blocks,
                     uint32_t n_pages)
{
    struct hot_home *home = home_of(h);
    struct backend *be = pool->be;
    CHECK(n_pages >= home->n_pages && n_pages <= home->max_pages);
    TRY(reserve_pages(h, be, n_pages));
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
    if (want > before)
        be->ops->copy(be, home->device_leaves + before, home->leaves + before,
                      (want - before) * sizeof *home->leaves);
    if (n_pages > 0)
        be->ops->copy(be, home->dram_blocks, dram_blocks, n_pages * sizeof *dram_blocks);
    home->n_pages = n_pages;
    return OK;
}

void hot_sets_step(struct hot_set *const *sets, uint32_t n)
{
    if (n == 0)
        return;
    for (uint32_t i = 0; i < n; i++) {
        struct hot_set *h = sets[i];
        if (++h->step < h->epoch_steps)
            continue;
        h->step = 0;
        home_of(h)->epochs++;
        if (++h->epoch == HOT_EPOCHS)
            h->epoch = 0;
    }
    struct backend *be = home_of(sets[0])->be;
    const struct hot_args a = {
        .kind = HOT_STEP, .sets = (const struct hot_set *const *)sets, .n_sets = n};
    be->ops->hot(be, &a);
}

void hot_set_step(struct hot_set *h)
{
    hot_sets_step(&h, 1);
}

/* ---- statistics ---- */

static void ask_again(struct hot_home *home)
{
    home->n_asked++;
    home->asked_epochs = home->epochs + (double)home->set.step / home->set.epoch_steps;
    run(&home->set,
        (struct hot_args){.kind = HOT_READ, .to = home->lanes, .arrived = &home->n_arrived});
}

/* Unless they are on the way. */
static void ask(struct hot_home *home)
{
    if (home->n_asked == home->n_arrived)
        ask_again(home);
}

/* What has arrived is looked at once. */
static void take(struct hot_home *home)
{
    if (home->n_taken == home->n_arrived)
        return;
    home->n_taken = home->n_arrived;
    home->read_epochs = home->asked_epochs;
    home->read = (struct hot_counts){0};
    for (uint32_t lane = 0; lane < home->set.n_lanes; lane++) {
        home->read.hits += home->lanes[lane].hits;
        home->read.misses += home->lanes[lane].misses;
        home->read.light_misses += home->lanes[lane].light_misses;
    }
}

static void add_new(struct hot_home *home, struct hot_counts *counts)
{
    counts->hits += home->read.hits - home->collected.hits;
    counts->misses += home->read.misses - home->collected.misses;
    counts->light_misses += home->read.light_misses - home->collected.light_misses;
    home->collected = home->read;
}

/* To free them is to wait for what is on the way. */
static void free_stats(struct hot_home *home, struct leaf_pool *pool)
{
    ask_again(home);
    home->be->ops->free(home->be, home->set.stats, home->stats_bytes);
    take(home);
    add_new(home, &pool->late);
}

void hot_set_close(struct hot_set *h, struct backend *be, struct leaf_pool *pool)
{
    if (h == NULL)
        return;
    struct hot_home *home = home_of(h);
    free_stats(home, pool);
    for (uint32_t i = 0; i < h->n_leaves; i++)
        if (home->leaves[i] != NULL)
            leaf_pool_put(pool, home->leaves[i]);
    if (home->slots != NULL)
        be->ops->free(be, home->slots, home->slots_bytes);
    if (home->pages != NULL)
        be->ops->free(be, home->pages, home->pages_bytes);
    mem_free(home->leaves);
    mem_free(home);
}

void hot_set_collect(struct hot_set *h, struct hot_counts *counts)
{
    ask(home_of(h));
    take(home_of(h));
    add_new(home_of(h), counts);
}

uint64_t hot_set_light_misses(const struct hot_set *h)
{
    ask(home_of(h));
    take(home_of(h));
    return home_of(h)->read.light_misses;
}

void hot_set_look(struct hot_set *h)
{
    struct hot_home *home = home_of(h); /* halves go up and down in turn: no bucket fades */
    ask(home);
    home->looked_for = home->n_asked;
    run(h, (struct hot_args){.kind = HOT_DECAY, .begin = home->n_looks++});
    home->epochs /= 2;
}

bool hot_set_learn(struct hot_set *h)
{
    struct hot_home *home = home_of(h);
    bool on_the_way = home->n_asked == home->looked_for && home->n_asked != home->n_arrived;
    if (home->n_learnt == home->n_looks || on_the_way)
        return false;
    home->n_learnt = home->n_looks;
    take(home);
    miss_curve_lanes(&home->curve, home->lanes, h->n_lanes, home->read_epochs);
    return true;
}

const struct miss_curve *hot_set_curve(const struct hot_set *h)
{
    return &home_of(h)->curve;
}

void hot_set_pace(struct hot_set *h, uint32_t epoch_steps)
{
    CHECK(epoch_steps > 0);
    h->epoch_steps = epoch_steps;
    if (h->step >= epoch_steps)
        h->step = epoch_steps - 1; /* this step is its last one */
}

/* ---- audit ---- */

struct hot_set *hot_set_snapshot(const struct hot_set *h)
{
    const struct hot_home *home = home_of(h);
    struct backend *be = home->be;
    size_t slots = slots_size(h->n_lanes, h->max_slots), leaf = home->leaf_bytes;
    size_t stats_at = round_up(sizeof *home, 64), leaves_at = stats_at + home->stats_bytes;
    size_t dram_at = leaves_at + h->n_leaves * sizeof *h->leaves;
    size_t slots_at = dram_at + home->n_pages * sizeof *h->dram_blocks;
    size_t leaf_at = round_up(slots_at + slots, 64);
    char *base = mem_alloc(leaf_at + h->n_leaves * leaf);
    struct hot_home *to = (struct hot_home *)(void *)base;
    uint16_t **leaves = (uint16_t **)(void *)(base + leaves_at);
    to->set = *h;
    to->be = be;
    to->max_pages = home->max_pages;
    to->n_pages = home->n_pages;
    to->set.stats = (struct hot_lane_stats *)(void *)(base + stats_at);
    be->ops->copy(be, to->set.stats, h->stats, home->stats_bytes);
    to->set.leaves = leaves;
    for (uint32_t i = 0; i < h->n_leaves; i++)
        if (home->leaves[i] != NULL) {
            leaves[i] = (uint16_t *)(void *)(base + leaf_at + i * leaf);
            be->ops->copy(be, leaves[i], home->leaves[i], leaf);
        }
    to->set.dram_blocks = (uint32_t *)(void *)(base + dram_at);
    be->ops->copy(be, base + dram_at, home->dram_blocks, home->n_pages * sizeof *h->dram_blocks);
    place_slots(&to->set, base + slots_at, h->max_slots);
    be->ops->copy(be, base + slots_at, home->slots, slots);
    CHECK(be->ops->sync == NULL || be->ops->sync(be) == OK);
    return &to->set;
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

static void audit_tables(const struct hot_set *h)
{
    CHECK(h->epoch < HOT_EPOCHS && h->step < h->epoch_steps && h->n_slots <= h->max_slots);
    for (uint32_t lane = 0; lane < h->n_lanes; lane++)
        audit_lane(h, lane);
}

void hot_set_audit(const struct hot_set *h)
{
    if (home_of(h)->be->ops->memory == NULL) { /* alloc gives the machine's own memory */
        audit_tables(h);
        return;
    }
    struct hot_set *copy = hot_set_snapshot(h);
    audit_tables(copy);
    mem_free(copy);
}
