/* Replays the selections of a lane against caches of other sizes and policies: what a hot set would
 * have hit. Exact LRU and Belady's optimum are what the bucketed LRU (kernels/core/hot_set.h, run as it
 * is) is compared with. */
#ifndef ENGINE_TOOL_REPLAY_H
#define ENGINE_TOOL_REPLAY_H

#include "kernels/base.h"

/* Selections of one lane, step by step; borrowed. */
struct replay_lane {
    uint32_t n_steps;
    const uint32_t *first; /* [n_steps + 1]: step i picked pages[first[i]] .. pages[first[i + 1]] */
    const uint32_t *pages; /* distinct within a step */
};

enum replay_policy {
    REPLAY_LRU,    /* exact: by step, then by place in the step */
    REPLAY_BELADY, /* who leaves is used again last, or never */
    REPLAY_BUCKETED,
};

struct replay_args {
    enum replay_policy policy;
    uint32_t slots;       /* at least replay_largest() */
    uint32_t warm_up;     /* first steps, not counted */
    uint32_t epoch_steps; /* REPLAY_BUCKETED */
};

struct replay_count {
    uint64_t touches, misses;
};

/* In every step all hits are found before anybody leaves, and nobody who was picked leaves: as
 * hot_touch does. ERR_ARG: fewer slots than the largest step picks, or too many for a hot set.
 * histogram: [HOT_AGES], REPLAY_BUCKETED adds the distances of the counted touches; or NULL. */
status replay_run(const struct replay_lane *lane, const struct replay_args *a,
                  struct replay_count *out, uint32_t *histogram);

uint32_t replay_largest(const struct replay_lane *lane); /* pages of the largest step */
/* Pages of steps [warm_up, ..) that were picked `lag` steps before, too; and all of them. */
struct replay_count replay_reuse(const struct replay_lane *lane, uint32_t lag, uint32_t warm_up);

#endif
