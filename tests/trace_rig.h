/* Made-up selections with the locality that was measured on the default model (reference/selection.md 4,
 * balanced pages at 5 %): 0.63 of a step's pages are in the next step, and exact LRU hits 0.62, 0.83,
 * 0.90, 0.94 and 0.955 at one to five times the selected set. A page's score has a part that lasts, one
 * that drifts and one that jumps; a step picks the highest. */
#ifndef TESTS_TRACE_RIG_H
#define TESTS_TRACE_RIG_H

#include "engine/tool/replay.h"
#include "kernels/core/splitmix.h"

#include <math.h>
#include <stdlib.h>

struct trace_shape {
    uint32_t n_pages, n_pick, n_steps;
    double lasting, drifting, jumping; /* weights */
    double drift;                      /* correlation from step to step */
    double jump;
    uint64_t seed;
};

static const struct trace_shape trace_text = {896, 45, 256, 1.0, 0.7, 0.8, 0.97, 0.3, 1};

static double rig_uniform(uint64_t *seed)
{
    return ((double)(splitmix_next(seed) >> 11) + 0.5) * 0x1p-53;
}

static double rig_normal(uint64_t *seed)
{
    return sqrt(-2 * log(rig_uniform(seed))) * cos(6.283185307179586 * rig_uniform(seed));
}

static inline int rig_descending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? 1 : x > y ? -1 : 0;
}

/* The caller frees first and pages. */
static inline struct replay_lane rig_trace(const struct trace_shape *s)
{
    uint64_t seed = s->seed * 0x9e3779b97f4a7c15u;
    uint32_t *first = mem_alloc((s->n_steps + 1) * sizeof *first), n = 0;
    uint32_t *pages = mem_alloc(s->n_steps * s->n_pick * sizeof *pages);
    double *lasting = mem_alloc(5 * s->n_pages * sizeof *lasting), *drifting = lasting + s->n_pages;
    double *jumping = drifting + s->n_pages, *score = jumping + s->n_pages,
           *sorted = score + s->n_pages;
    for (uint32_t p = 0; p < s->n_pages; p++) {
        lasting[p] = -log(rig_uniform(&seed));
        drifting[p] = rig_normal(&seed);
        jumping[p] = rig_normal(&seed);
    }
    for (uint32_t i = 0; i < s->n_steps; i++) {
        for (uint32_t p = 0; p < s->n_pages; p++) {
            drifting[p] =
                s->drift * drifting[p] + sqrt(1 - s->drift * s->drift) * rig_normal(&seed);
            jumping[p] = s->jump * jumping[p] + sqrt(1 - s->jump * s->jump) * rig_normal(&seed);
            sorted[p] = score[p] =
                s->lasting * lasting[p] + s->drifting * drifting[p] + s->jumping * jumping[p];
        }
        qsort(sorted, s->n_pages, sizeof *sorted, rig_descending);
        for (uint32_t p = 0; p < s->n_pages; p++)
            if (score[p] >= sorted[s->n_pick - 1])
                pages[n++] = p;
        first[i + 1] = n;
    }
    mem_free(lasting);
    return (struct replay_lane){s->n_steps, first, pages};
}

static inline void rig_trace_free(struct replay_lane *lane)
{
    mem_free(lane->first);
    mem_free(lane->pages);
}

#endif
