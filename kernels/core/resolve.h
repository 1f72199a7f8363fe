/* From the pages a lane selected to the blocks where attention reads them: the part of `resolve` that
 * every backend shares. The caller copies what is fetched, and fails if it is told to. */
#ifndef KERNELS_CORE_RESOLVE_H
#define KERNELS_CORE_RESOLVE_H

#include "kernels/backend.h"
#include "kernels/core/hot_set.h"

/* Whether a page of this plan may be estimated instead: its partition is the page, and what the
 * estimate needs is in the digest. */
CORE_FN bool resolve_may_estimate(const struct resolve_args *a)
{
    return a->masks == NULL && a->desc.values &&
           a->desc.parts == SEGMENT_ROWS / a->kv->geo->block_rows;
}

/* Adds n partitions, ascending, to an ascending list of n_old that has room for them. */
CORE_FN void resolve_merge(uint32_t *list, uint32_t n_old, const uint32_t *more, uint32_t n)
{
    while (n > 0) {
        bool last = n_old == 0 || list[n_old - 1] < more[n - 1];
        uint32_t to = n_old + n - 1;
        list[to] = last ? more[--n] : list[--n_old];
    }
}

/* Pages whose slots are known become blocks; light misses become estimates, and stay in the slot they
 * just got. fetches: in the order of pages, as hot_touch left them. Overwrites slots. */
CORE_FN void resolve_place(const struct resolve_args *a, size_t at, const struct plan_row *r,
                           uint32_t lane, uint32_t *slots, const struct hot_fetch *fetches,
                           uint32_t n_fetches)
{
    uint32_t *pages = a->pages + at * a->page_cap, n = a->n_pages[at];
    const float *share = a->share + at * a->page_cap;
    uint32_t n_kept = 0, n_light = 0, f = 0, room = 0;
    if (r->miss_threshold > 0 && resolve_may_estimate(a))
        room = a->estimate_cap - a->n_estimates[at];
    for (uint32_t i = 0; i < n; i++) {
        uint32_t block = r->hot->slot_blocks[slots[i]];
        bool missed = f < n_fetches && fetches[f].to == block;
        f += missed;
        if (missed && n_light < room && share[i] < r->miss_threshold)
            slots[n_light++] = pages[i]; /* n_light <= i: that slot was read */
        else
            pages[n_kept++] = block;
    }
    a->n_pages[at] = n_kept;
    if (n_light == 0)
        return;
    resolve_merge(a->estimates + at * a->estimate_cap, a->n_estimates[at], slots, n_light);
    a->n_estimates[at] += n_light;
    r->hot->stats[lane].light_misses += n_light;
}

/* One lane of one plan row: `lane` is its index among the SPARSE lanes. slots, fetches: [page_cap]
 * scratch; *n_fetches pages are to be copied. False: the plan names more pages than there are slots, or
 * one that is not covered; nothing of the lane may be attended, and its list is empty. */
CORE_FN bool resolve_lane(const struct resolve_args *a, uint32_t row, uint32_t head, uint32_t lane,
                          uint32_t *slots, struct hot_fetch *fetches, uint32_t *n_fetches)
{
    const struct plan_row *r = &a->rows[row];
    size_t at = (size_t)row * a->kv->geo->kv_heads + head;
    uint32_t *pages = a->pages + at * a->page_cap, n = a->n_pages[at];
    *n_fetches = 0;
    if (r->hot == NULL) {
        for (uint32_t i = 0; i < n; i++)
            pages[i] = r->blocks[pages[i]];
        return true;
    }
    *n_fetches = hot_touch(r->hot, lane, pages, n, slots, fetches);
    for (uint32_t i = 0; i < n; i++)
        if (slots[i] == HOT_NO_PAGE) {
            a->n_pages[at] = 0;
            return false;
        }
    resolve_place(a, at, r, lane, slots, fetches, *n_fetches);
    return true;
}

#endif
