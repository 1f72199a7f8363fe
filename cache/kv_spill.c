/* Residence: RESIDENT, SPILLED, PAUSED, and writing behind (cache/kv.h, cache/kv_impl.h).
 *
 * Every change is the same walk: see that all places can be had, make them with their content, then
 * say that the blocks are needed there and no longer here; what nobody needs is free by that. The
 * slots of a hot set are places of HBM without blocks. */
#include "cache/kv_impl.h"

/* ---- hot sets ---- */

static void account(struct kv *kv, struct kv_seq *s)
{
    uint64_t bytes = 0;
    if (s->hot != NULL)
        bytes = hot_set_bytes(s->hot) + s->own->slot_capacity * sizeof(*s->own->slots);
    kv->hot_bytes += bytes - s->own->hot_bytes;
    s->own->hot_bytes = bytes;
}

/* Of a sequence whose hot set is open, or that closed it just now. */
static void collect(struct kv *kv, struct kv_seq *s)
{
    struct hot_counts c = {0};
    if (s->hot != NULL)
        hot_set_collect(s->hot, &c);
    else
        leaf_pool_collect(kv->leaves, &c);
    kv->counts.page_hits += c.hits;
    kv->counts.page_misses += c.misses;
    kv->counts.light_misses += c.light_misses;
    kv->counts.fetched_bytes += c.misses * kv->cfg.geo.page_bytes;
}

void kv_step(struct kv *kv, struct kv_seq *const *seqs, uint32_t n)
{
    enum { COLLECT_STEPS = 32, AT_ONCE = 64 };
    struct hot_set *sets[AT_ONCE];
    uint32_t n_sets = 0;
    for (uint32_t i = 0; i < n; i++) {
        if (seqs[i]->hot != NULL)
            sets[n_sets++] = seqs[i]->hot;
        if (n_sets == AT_ONCE || i + 1 == n) {
            hot_sets_step(sets, n_sets);
            n_sets = 0;
        }
    }
    for (uint32_t i = 0; i < n; i++)
        if (seqs[i]->hot != NULL && ++seqs[i]->own->n_steps % COLLECT_STEPS == 0)
            collect(kv, seqs[i]);
}

status kv_hot_cover(struct kv *kv, struct kv_seq *s, uint32_t n_segments)
{
    struct kv_seq_private *own = s->own;
    /* A seal that found no room was announced, and stays so. */
    uint32_t n = n_segments > own->n_covered ? n_segments : own->n_covered;
    uint32_t announced = n;
    n *= kv->segment_blocks;
    CHECK(n <= kv->ids_capacity || n == 0);
    for (uint32_t i = 0; i < n; i++) {
        block_id at = kv_block(kv, own->blocks[i])->at[LANE_SPARSE][KV_DRAM];
        kv->ids[i] =
            at != BLOCK_NONE ? at : 0; /* a segment that is being sealed: said again then */
    }
    TRY(hot_set_cover(s->hot, kv->leaves, kv->ids, n));
    own->n_covered = announced;
    own->cover_stale = false;
    return OK;
}

static status slots_reserve(struct kv_seq *s, uint32_t n)
{
    if (n <= s->own->slot_capacity)
        return OK;
    void *p = mem_try_grow(s->own->slots, s->own->slot_capacity * sizeof(*s->own->slots),
                           n * sizeof(*s->own->slots));
    if (p == NULL)
        return err(ERR_MEMORY, "no memory for %u slots", n);
    s->own->slots = p;
    s->own->slot_capacity = n;
    return OK;
}

/* ERR_MEMORY: nothing changed. The caller has seen that the places are there. */
static status slots_set(struct kv *kv, struct kv_seq *s, uint32_t n_slots)
{
    uint32_t before = s->n_slots;
    struct kv_seq_private *own = s->own;
    TRY(slots_reserve(s, n_slots));
    for (uint32_t i = before; i < n_slots; i++) {
        own->slots[i] = kv_place_take(kv, LANE_SPARSE, KV_HBM);
        CHECK(own->slots[i] != BLOCK_NONE);
    }
    status st = hot_set_resize(s->hot, kv->be, own->slots, n_slots);
    uint32_t keep = st == OK ? n_slots : before;
    for (uint32_t i = keep; i < (before > n_slots ? before : n_slots); i++)
        places_give(&kv->place[LANE_SPARSE][KV_HBM], own->slots[i]);
    s->n_slots = keep;
    account(kv, s);
    return st;
}

void kv_hot_close(struct kv *kv, struct kv_seq *s)
{
    if (s->hot == NULL)
        return;
    for (uint32_t i = s->n_slots; i-- > 0;)
        places_give(&kv->place[LANE_SPARSE][KV_HBM], s->own->slots[i]);
    hot_set_close(s->hot, kv->be, kv->leaves);
    mem_free(s->own->slots);
    s->own->slots = NULL;
    s->own->slot_capacity = s->own->n_covered = 0;
    s->hot = NULL;
    s->n_slots = 0;
    collect(kv, s);
    account(kv, s);
}

status kv_hot_open(struct kv *kv, struct kv_seq *s)
{
    TRY(hot_set_open(&s->hot, kv->be, kv->leaves, kv->cfg.geo.n_lanes[LANE_SPARSE], s->max_blocks));
    account(kv, s);
    return OK;
}

status kv_hot_fill(struct kv *kv, struct kv_seq *s, uint32_t n_slots)
{
    TRY(kv_hot_cover(kv, s, s->n_segments));
    return slots_set(kv, s, n_slots);
}

/* ---- the walk ---- */

/* Places that a change of residence takes and gives. */
struct change {
    uint32_t takes[LANE_CLASSES][TIERS], gives[LANE_CLASSES];
};

static void add_change(const struct kv *kv, const struct kv_seq *s, uint32_t i,
                       enum kv_residence to, struct change *d)
{
    const struct block *b = kv_block(kv, s->own->blocks[i]);
    part_mask was = kv_seq_needs(kv, s, i, s->residence), is = kv_seq_needs(kv, s, i, to);
    for (int c = 0; c < LANE_CLASSES; c++) {
        for (int t = 0; t < TIERS; t++)
            d->takes[c][t] += (is & PART(c, t)) && b->at[c][t] == BLOCK_NONE;
        /* A part that hits keep stays in HBM only while DRAM has not got it: it will. */
        d->gives[c] += (was & ~is & PART(c, KV_HBM)) && b->need[c][KV_HBM] == 1;
    }
}

/* The blocks that change are pinned: what they have already is not taken for others. */
static status check_change(const struct kv *kv, const struct kv_seq *s, enum kv_residence to,
                           uint32_t n_slots)
{
    static const char *const tier_names[] = {"HBM", "DRAM"};
    struct change d = {0};
    for (uint32_t i = 0; i < s->n_blocks; i++)
        add_change(kv, s, i, to, &d);
    d.takes[LANE_SPARSE][KV_HBM] += n_slots;
    d.gives[LANE_SPARSE] += s->n_slots;
    for (int c = 0; c < LANE_CLASSES; c++)
        for (int t = 0; t < TIERS; t++) {
            uint32_t there = kv_places_available(kv, (enum lane_class)c, (enum kv_tier)t);
            there += t == KV_HBM ? d.gives[c] : 0;
            if (d.takes[c][t] > there)
                return err(ERR_FULL, "%u blocks of %s asked, %u free or evictable", d.takes[c][t],
                           tier_names[t], there);
        }
    return OK;
}

static bool changes(const struct kv *kv, const struct kv_seq *s, uint32_t i, enum kv_residence to)
{
    return kv_seq_needs(kv, s, i, to) != kv_seq_needs(kv, s, i, s->residence);
}

static void pin_changing(struct kv *kv, struct kv_seq *s, enum kv_residence to)
{
    for (uint32_t i = 0; i < s->n_blocks; i++)
        if (changes(kv, s, i, to))
            kv_block_pin(kv, s->own->blocks[i]);
}

static void unpin_changing(struct kv *kv, struct kv_seq *s, enum kv_residence to)
{
    for (uint32_t i = s->n_blocks; i-- > 0;)
        if (changes(kv, s, i, to))
            kv_block_unpin(kv, s->own->blocks[i]);
}

static void make_parts(struct kv *kv, struct kv_seq *s, enum kv_residence to)
{
    for (uint32_t i = 0; i < s->n_blocks; i++) {
        uint32_t id = s->own->blocks[i];
        part_mask needs = kv_seq_needs(kv, s, i, to);
        for (int c = 0; c < LANE_CLASSES; c++)
            for (int t = 0; t < TIERS; t++)
                if ((needs & PART(c, t)) && kv_block(kv, id)->at[c][t] == BLOCK_NONE)
                    kv_part_make(kv, id, (enum lane_class)c, (enum kv_tier)t);
    }
}

/* Pinned blocks with all parts made: they are needed there now. Unpins. */
static void change_needs(struct kv *kv, struct kv_seq *s, enum kv_residence to)
{
    enum kv_residence from = s->residence;
    for (uint32_t i = s->n_blocks; i-- > 0;) {
        uint32_t id = s->own->blocks[i];
        if (!changes(kv, s, i, to))
            continue;
        kv_block_change(kv, id, kv_seq_needs(kv, s, i, from), kv_seq_needs(kv, s, i, to));
        kv_block_unpin(kv, id);
    }
    --*kv_residence_count(kv, from);
    ++*kv_residence_count(kv, to);
    s->residence = to;
    for (uint32_t i = 0; i < s->n_blocks; i++)
        kv_seq_entry(kv, s, i);
}

static status check_slots(uint32_t n_slots)
{
    if (n_slots > HOT_MAX_SLOTS)
        return err(ERR_FULL, "%u slots asked, a hot set has %u at most", n_slots, HOT_MAX_SLOTS);
    return OK;
}

/* RESIDENT or PAUSED. Memory, the rare reason, can fail at the end: then it goes back, for which there
 * is room, since nothing else happened. */
static status to_spilled(struct kv *kv, struct kv_seq *s, uint32_t n_slots)
{
    enum kv_residence from = s->residence;
    if (!s->layout.seals || !kv_uses(kv, LANE_SPARSE))
        return err(ERR_FULL, "a sequence without sealed blocks cannot be spilled");
    TRY(check_slots(n_slots));
    pin_changing(kv, s, KV_SPILLED);
    status st = check_change(kv, s, KV_SPILLED, n_slots);
    if (st == OK)
        st = kv_hot_open(kv, s);
    if (st != OK) {
        unpin_changing(kv, s, KV_SPILLED);
        return st;
    }
    make_parts(kv, s, KV_SPILLED);
    change_needs(kv, s, KV_SPILLED);
    st = kv_hot_fill(kv, s, n_slots);
    if (st == OK)
        return OK;
    kv_hot_close(kv, s);
    pin_changing(kv, s, from);
    make_parts(kv, s, from);
    change_needs(kv, s, from);
    return st;
}

static status to_whole(struct kv *kv, struct kv_seq *s, enum kv_residence to)
{
    pin_changing(kv, s, to);
    status st = check_change(kv, s, to, 0);
    if (st != OK) {
        unpin_changing(kv, s, to);
        return st;
    }
    kv_hot_close(kv, s);
    make_parts(kv, s, to);
    change_needs(kv, s, to);
    return OK;
}

status kv_seq_spill(struct kv *kv, struct kv_seq *s, uint32_t n_slots)
{
    CHECK(s->residence == KV_RESIDENT && kv->sealing == NULL);
    TRY(to_spilled(kv, s, n_slots));
    kv->counts.spills++;
    return OK;
}

status kv_seq_restore(struct kv *kv, struct kv_seq *s)
{
    CHECK(s->residence == KV_SPILLED && kv->sealing == NULL);
    TRY(to_whole(kv, s, KV_RESIDENT));
    kv->counts.restores++;
    return OK;
}

status kv_seq_resize(struct kv *kv, struct kv_seq *s, uint32_t n_slots)
{
    CHECK(s->residence == KV_SPILLED && kv->sealing == NULL);
    uint32_t there = kv_places_available(kv, LANE_SPARSE, KV_HBM);
    TRY(check_slots(n_slots));
    if (n_slots > s->n_slots && n_slots - s->n_slots > there)
        return err(ERR_FULL, "%u slots asked, %u free or evictable", n_slots - s->n_slots, there);
    return slots_set(kv, s, n_slots);
}

status kv_seq_pause(struct kv *kv, struct kv_seq *s)
{
    CHECK(s->residence != KV_PAUSED && kv->sealing == NULL);
    TRY(to_whole(kv, s, KV_PAUSED));
    s->own->step_end = s->own->step_begin; /* the step that was granted last may not have run */
    kv->counts.pauses++;
    return OK;
}

status kv_seq_resume(struct kv *kv, struct kv_seq *s, uint32_t n_slots)
{
    CHECK(s->residence == KV_PAUSED && kv->sealing == NULL);
    return n_slots == 0 ? to_whole(kv, s, KV_RESIDENT) : to_spilled(kv, s, n_slots);
}

/* ---- what it would bring ---- */

uint32_t kv_spill_gain(const struct kv *kv, const struct kv_seq *s, uint32_t n_slots)
{
    uint32_t frees = 0, missing = 0, twins = 0;
    if (s->residence != KV_RESIDENT || !s->layout.seals || !kv_uses(kv, LANE_SPARSE) ||
        n_slots > HOT_MAX_SLOTS)
        return 0;
    for (uint32_t i = 0; i < kv_sealed_blocks(kv, s); i++) {
        const struct block *b = kv_block(kv, s->own->blocks[i]);
        frees += b->need[LANE_SPARSE][KV_HBM] == 1;
        missing += b->at[LANE_SPARSE][KV_DRAM] == BLOCK_NONE;
        twins += kv_part_is_spare(b, LANE_SPARSE, KV_DRAM);
    }
    if (missing > kv_places_available(kv, LANE_SPARSE, KV_DRAM) - twins)
        return 0;
    return frees > n_slots ? frees - n_slots : 0;
}

uint32_t kv_write_behind(struct kv *kv, uint32_t max_blocks)
{
    struct blocks *bs = &kv->blocks;
    uint32_t n = 0;
    while (n < max_blocks && bs->behind.n > 0 && kv->place[LANE_SPARSE][KV_DRAM].n_free > 0) {
        kv_twin_make(kv, bs->behind.first);
        n++;
    }
    kv->counts.written_behind += n;
    return n;
}
