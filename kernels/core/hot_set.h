/* The hot set of a SPILLED sequence: which pages are in its HBM slots, per lane, and who leaves when
 * something must come in. Bucketed LRU with ghosts (DESIGN 4; reference/peers.md 1.5, technique B1).
 *
 * Compiled as C and as CUDA: no allocation, no calls out, one lane at a time; on a GPU a warp or a
 * block runs a lane. cache/residency.c owns the memory and the policy above it.
 *
 * Slot j of every lane is its page of HBM block slot_blocks[j]. The table has an entry of 16 bits per
 * (lane, page of the sequence): the slot, or HOT_GHOST | epoch of the last touch (HOT_NEVER: none). */
#ifndef KERNELS_CORE_HOT_SET_H
#define KERNELS_CORE_HOT_SET_H

#include "kernels/core/core.h"

enum {
    HOT_LEAF_PAGES = 512,   /* DESIGN: a leaf for 512 blocks */
    HOT_AGES = 64,          /* buckets of the LRU and of the histogram */
    HOT_GHOST = 0x8000,     /* not resident; low 15 bits: epoch of the last touch */
    HOT_NEVER = 0xffff,     /* not resident, never touched */
    HOT_MAX_SLOTS = 0x7fff, /* a slot fits 15 bits */
    HOT_FRESH_AGE = 2,      /* a fetched page enters this old: one-off misses leave first */
    HOT_NO_PAGE = 0xffffffff,
};

struct hot_lane_stats {
    /* Re-use distance in epochs of every touch: [0, 63], the last bucket holds all longer ones and
     * first touches. Decayed by the host. */
    uint32_t distance[HOT_AGES];
    uint32_t hits, misses, light_misses; /* since it was opened */
};

/* The header: the host's. What it points to is backend memory, which the host changes through the backend
 * alone (op `hot`, kernels/core/hot_run.h; `copy`). A step's kernels get the header by value. */
struct hot_set {
    uint32_t n_lanes, n_slots; /* n_slots: B, may change between steps */
    uint32_t max_slots;
    uint32_t epoch; /* of this sequence; advances every epoch_steps steps */
    uint32_t epoch_steps, step;
    const uint32_t *slot_blocks; /* [max_slots] SPARSE block in HBM behind each slot */
    uint16_t *const *leaves;     /* [n_leaves] -> [n_lanes][HOT_LEAF_PAGES]; NULL: never touched */
    uint32_t n_leaves;
    uint32_t *slot_page;          /* [n_lanes][max_slots] page in the slot, or HOT_NO_PAGE */
    uint16_t *slot_epoch;         /* [n_lanes][max_slots] epoch of the last touch (saturating age =
                                     min(63, epoch - it)) */
    uint8_t *slot_flags;          /* [n_lanes][max_slots] in use in this step; fresh */
    struct hot_lane_stats *stats; /* [n_lanes] */
    const uint32_t *dram_blocks;  /* [pages] SPARSE block in DRAM of each sealed page */
};

/* A page to bring in: DRAM block `from`, into HBM block `to`, the page of this lane. */
struct hot_fetch {
    uint32_t lane, from, to;
};

enum {
    HOT_EPOCHS = 0x7fff, /* stamps count modulo this: HOT_GHOST | stamp is never HOT_NEVER */
    HOT_SWEEP = 8192,    /* epochs between two sweeps of a table: far less than HOT_EPOCHS */
    HOT_SLOTS_TURN = HOT_SWEEP - 2, /* when slots are swept; it comes up before epochs wrap, too */
    HOT_IN_USE = 1,                 /* slot_flags: touched in this step, not a victim */
    HOT_FRESH = 2, /* fetched and not touched since: its stamp is HOT_FRESH_AGE too old */
};

/* Epochs from `then` to `now`, exact as long as sweeps keep every stamp younger than HOT_EPOCHS. */
CORE_FN uint32_t hot_distance(uint32_t now, uint32_t then)
{
    return now >= then ? now - then : now + HOT_EPOCHS - then;
}

/* The stamp `age` epochs before `now`. */
CORE_FN uint16_t hot_before(uint32_t now, uint32_t age)
{
    return (uint16_t)(now >= age ? now - age : now + HOT_EPOCHS - age);
}

CORE_FN uint32_t hot_age(uint32_t distance)
{
    return distance < HOT_AGES - 1 ? distance : HOT_AGES - 1;
}

/* The table's entry for a page of a lane; NULL: the page is not covered. */
CORE_FN uint16_t *hot_entry(const struct hot_set *h, uint32_t lane, uint32_t page)
{
    uint32_t leaf = page / HOT_LEAF_PAGES;
    if (leaf >= h->n_leaves || h->leaves[leaf] == NULL)
        return NULL;
    return h->leaves[leaf] + (size_t)lane * HOT_LEAF_PAGES + page % HOT_LEAF_PAGES;
}

/* When the page in a slot was really touched last. */
CORE_FN uint16_t hot_last_touch(const struct hot_set *h, size_t at)
{
    uint32_t stamp = h->slot_epoch[at];
    if (h->slot_flags[at] & HOT_FRESH)
        stamp = stamp + HOT_FRESH_AGE < HOT_EPOCHS ? stamp + HOT_FRESH_AGE
                                                   : stamp + HOT_FRESH_AGE - HOT_EPOCHS;
    return (uint16_t)stamp;
}

/* Looks the pages up: hits get their slot and the present epoch, misses get HOT_NO_PAGE. Every touch
 * is counted by its distance. Returns the misses. */
CORE_FN uint32_t hot_probe(struct hot_set *h, uint32_t lane, const uint32_t *pages, uint32_t n,
                           uint32_t *slots)
{
    struct hot_lane_stats *stats = &h->stats[lane];
    size_t first = (size_t)lane * h->max_slots;
    uint32_t now = h->epoch, n_missing = 0;
    for (uint32_t i = 0; i < n; i++) {
        const uint16_t *entry = hot_entry(h, lane, pages[i]);
        uint32_t e = entry != NULL ? *entry : (uint32_t)HOT_NEVER, age = HOT_AGES - 1;
        if (e & HOT_GHOST) {
            if (e != HOT_NEVER)
                age = hot_age(hot_distance(now, e & ~(uint32_t)HOT_GHOST));
            slots[i] = HOT_NO_PAGE;
            n_missing++;
        } else {
            age = hot_age(hot_distance(now, hot_last_touch(h, first + e)));
            h->slot_epoch[first + e] = (uint16_t)now;
            h->slot_flags[first + e] = HOT_IN_USE;
            slots[i] = e;
        }
        stats->distance[age]++;
    }
    stats->hits += n - n_missing;
    stats->misses += n_missing;
    return n_missing;
}

/* Who leaves: slots that are older than `age`, and the first `n_of_age` of just that age, in the order
 * of slots. An empty slot is older than any page; a slot in use is none of these. */
struct hot_cut {
    uint32_t age, n_of_age;
};

CORE_FN uint32_t hot_slot_age(const struct hot_set *h, size_t at)
{
    return h->slot_page[at] == HOT_NO_PAGE ? (uint32_t)HOT_AGES
                                           : hot_age(hot_distance(h->epoch, h->slot_epoch[at]));
}

/* Histogram of ages, then from the oldest down until `want` are found (or none are left). */
CORE_FN struct hot_cut hot_find_cut(const struct hot_set *h, uint32_t lane, uint32_t want)
{
    uint32_t count[HOT_AGES + 1];
    size_t first = (size_t)lane * h->max_slots;
    for (uint32_t age = 0; age <= HOT_AGES; age++)
        count[age] = 0;
    for (uint32_t slot = 0; slot < h->n_slots; slot++)
        if (!(h->slot_flags[first + slot] & HOT_IN_USE))
            count[hot_slot_age(h, first + slot)]++;
    struct hot_cut cut;
    cut.age = HOT_AGES;
    while (count[cut.age] < want && cut.age > 0)
        want -= count[cut.age--];
    cut.n_of_age = want < count[cut.age] ? want : count[cut.age];
    return cut;
}

/* Whether a slot is a victim of the cut; to be asked once per slot, in ascending order. */
CORE_FN bool hot_leaves(const struct hot_set *h, size_t at, struct hot_cut *cut)
{
    if (h->slot_flags[at] & HOT_IN_USE)
        return false;
    uint32_t age = hot_slot_age(h, at);
    if (age != cut->age || cut->n_of_age == 0)
        return age > cut->age;
    cut->n_of_age--;
    return true;
}

/* Puts a page into a slot; who was there becomes a ghost that knows its last touch. */
CORE_FN void hot_replace(struct hot_set *h, uint32_t lane, uint32_t slot, uint32_t page,
                         uint16_t *entry)
{
    size_t at = (size_t)lane * h->max_slots + slot;
    if (h->slot_page[at] != HOT_NO_PAGE)
        *hot_entry(h, lane, h->slot_page[at]) = (uint16_t)(HOT_GHOST | hot_last_touch(h, at));
    h->slot_page[at] = page;
    h->slot_epoch[at] = hot_before(h->epoch, HOT_FRESH_AGE);
    h->slot_flags[at] = HOT_IN_USE | HOT_FRESH;
    *entry = (uint16_t)slot;
}

/* Touches `n` pages (distinct, any order) of a lane for this step. slots[i]: where page i is or will
 * be; misses are appended to fetches (at most n; the caller has room), in the order of pages. Every
 * page of this step stays: a step may touch at most n_slots pages of a lane (the host saw to it at
 * admission); what has no slot, or is not covered, gets HOT_NO_PAGE, and the caller must fail.
 * Deterministic: victims in ascending order of slots take the misses in order of pages. Returns the
 * fetches added. */
CORE_FN uint32_t hot_touch(struct hot_set *h, uint32_t lane, const uint32_t *pages, uint32_t n,
                           uint32_t *slots, struct hot_fetch *fetches)
{
    uint32_t n_missing = hot_probe(h, lane, pages, n, slots), n_fetches = 0, slot = 0;
    if (n_missing == 0)
        return 0;
    struct hot_cut cut = hot_find_cut(h, lane, n_missing);
    size_t first = (size_t)lane * h->max_slots;
    for (uint32_t i = 0; i < n; i++) {
        uint16_t *entry = slots[i] == HOT_NO_PAGE ? hot_entry(h, lane, pages[i]) : NULL;
        if (entry == NULL)
            continue;
        while (slot < h->n_slots && !hot_leaves(h, first + slot, &cut))
            slot++;
        if (slot == h->n_slots)
            break;
        hot_replace(h, lane, slot, pages[i], entry);
        fetches[n_fetches].lane = lane;
        fetches[n_fetches].from = h->dram_blocks[pages[i]];
        fetches[n_fetches++].to = h->slot_blocks[slot];
        slots[i] = slot++;
    }
    return n_fetches;
}

/* ---- what the host has done between steps ----
 *
 * A lane by n workers, of which this is number i: slots and entries i, i + n, ... One worker: 0, 1. */

/* Empties the slots [begin, end) of a lane: their pages are in DRAM anyway. */
CORE_FN void hot_forget(const struct hot_set *h, uint32_t lane, uint32_t begin, uint32_t end,
                        uint32_t i, uint32_t n)
{
    for (uint32_t slot = begin + i; slot < end; slot += n) {
        size_t at = (size_t)lane * h->max_slots + slot;
        if (h->slot_page[at] == HOT_NO_PAGE)
            continue;
        *hot_entry(h, lane, h->slot_page[at]) = (uint16_t)(HOT_GHOST | hot_last_touch(h, at));
        h->slot_page[at] = HOT_NO_PAGE;
        h->slot_flags[at] = 0;
    }
}

/* Whatever slots [begin, end) held: nothing knows of it. */
CORE_FN void hot_clear(const struct hot_set *h, uint32_t lane, uint32_t begin, uint32_t end,
                       uint32_t i, uint32_t n)
{
    for (uint32_t slot = begin + i; slot < end; slot += n) {
        size_t at = (size_t)lane * h->max_slots + slot;
        h->slot_page[at] = HOT_NO_PAGE;
        h->slot_epoch[at] = 0;
        h->slot_flags[at] = 0;
    }
}

/* Slots [0, n_slots) from the arrays of another header of the same set. */
CORE_FN void hot_move(const struct hot_set *h, const struct hot_set *old, uint32_t lane, uint32_t i,
                      uint32_t n)
{
    for (uint32_t slot = i; slot < h->n_slots; slot += n) {
        size_t to = (size_t)lane * h->max_slots + slot, at = (size_t)lane * old->max_slots + slot;
        h->slot_page[to] = old->slot_page[at];
        h->slot_epoch[to] = old->slot_epoch[at];
        h->slot_flags[to] = old->slot_flags[at];
    }
}

/* Ends the step of a lane: nothing is in use. */
CORE_FN void hot_release(const struct hot_set *h, uint32_t lane, uint32_t i, uint32_t n)
{
    uint8_t *flags = h->slot_flags + (size_t)lane * h->max_slots;
    for (uint32_t slot = i; slot < h->n_slots; slot += n)
        if (flags[slot] & HOT_IN_USE)
            flags[slot] = (uint8_t)(flags[slot] & ~HOT_IN_USE);
}

/* Sweeps keep stamps from coming round again. They change nothing that is ever read: all ages from
 * HOT_AGES - 1 on are one. Each must run at least every HOT_EPOCHS / 2 epochs. */
CORE_FN void hot_sweep_leaf(const struct hot_set *h, uint32_t lane, uint32_t leaf, uint32_t i,
                            uint32_t n)
{
    if (h->leaves[leaf] == NULL)
        return;
    uint16_t *entries = h->leaves[leaf] + (size_t)lane * HOT_LEAF_PAGES;
    for (; i < HOT_LEAF_PAGES; i += n) {
        uint32_t e = entries[i];
        if ((e & HOT_GHOST) && e != HOT_NEVER &&
            hot_distance(h->epoch, e & ~(uint32_t)HOT_GHOST) >= HOT_AGES - 1)
            entries[i] = HOT_NEVER;
    }
}

CORE_FN void hot_sweep_slots(const struct hot_set *h, uint32_t lane, uint32_t i, uint32_t n)
{
    uint16_t *stamps = h->slot_epoch + (size_t)lane * h->max_slots;
    for (uint32_t slot = i; slot < h->n_slots; slot += n)
        if (hot_distance(h->epoch, stamps[slot]) > 2 * HOT_AGES)
            stamps[slot] = hot_before(h->epoch, 2 * HOT_AGES);
}

/* Behind the host's step of a header: each leaf is swept once in HOT_SWEEP epochs, at an epoch of its own;
 * the slots after them all. */
CORE_FN void hot_step(const struct hot_set *h, uint32_t lane, uint32_t i, uint32_t n)
{
    uint32_t turn = h->epoch % HOT_SWEEP;
    hot_release(h, lane, i, n);
    if (h->step != 0)
        return; /* the same epoch as before */
    if (turn < h->n_leaves)
        hot_sweep_leaf(h, lane, turn, i, n);
    else if (turn == HOT_SLOTS_TURN)
        hot_sweep_slots(h, lane, i, n);
}

/* Halves what was counted. turn: of odd numbers, those in odd or those in even buckets are rounded up. */
CORE_FN void hot_decay(const struct hot_set *h, uint32_t lane, uint32_t turn, uint32_t i,
                       uint32_t n)
{
    uint32_t *distance = h->stats[lane].distance;
    for (; i < HOT_AGES; i += n)
        distance[i] = (distance[i] + (i + turn) % 2) / 2;
}

#endif
