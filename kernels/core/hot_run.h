/* The op `hot` (kernels/backend.h): what is done to a lane, by one worker of n, and all of it by the host
 * where the arrays of hot sets are its own memory. */
#ifndef KERNELS_CORE_HOT_RUN_H
#define KERNELS_CORE_HOT_RUN_H

#include "kernels/backend.h"
#include "kernels/core/hot_set.h"

/* All kinds but HOT_FILL and HOT_READ. */
CORE_FN void hot_run_lane(enum hot_kind kind, const struct hot_set *h, const struct hot_set *old,
                          uint32_t begin, uint32_t end, uint32_t lane, uint32_t i, uint32_t n)
{
    switch (kind) {
    case HOT_STEP: hot_step(h, lane, i, n); break;
    case HOT_CLEAR: hot_clear(h, lane, begin, end, i, n); break;
    case HOT_FORGET: hot_forget(h, lane, begin, end, i, n); break;
    case HOT_MOVE: hot_move(h, old, lane, i, n); break;
    case HOT_DECAY: hot_decay(h, lane, begin, i, n); break;
    case HOT_FILL:
    case HOT_READ: break;
    }
}

/* At once. */
CORE_FN void hot_run(const struct hot_args *a)
{
    if (a->kind == HOT_FILL)
        for (size_t i = 0; i < a->leaf_bytes / sizeof *a->leaf; i++)
            a->leaf[i] = HOT_NEVER;
    for (uint32_t s = 0; s < a->n_sets; s++) {
        const struct hot_set *h = a->sets[s];
        for (uint32_t lane = 0; lane < h->n_lanes; lane++)
            if (a->kind == HOT_READ)
                a->to[lane] = h->stats[lane];
            else
                hot_run_lane(a->kind, h, a->old, a->begin, a->end, lane, 0, 1);
    }
    if (a->kind == HOT_READ)
        ++*a->arrived;
}

#endif
