/* What select.c and its kernels per instruction set agree on: one row and one KV head. */
#ifndef KERNELS_CPU_SELECT_H
#define KERNELS_CPU_SELECT_H

#include "kernels/core/digest.h"

struct select_lane {
    const struct select_args *a;
    const struct plan_row *row;
    uint32_t head;
    const float *scores; /* [group][stride] */
    const float *known;  /* [group] or NULL */
    uint32_t *pages, *masks, *n_pages, *estimates, *n_estimates;
    float *share;
    uint32_t *work; /* select_work_words() of the calling worker */
};

struct select_kernels {
    void (*lane)(const struct select_lane *s);
};

extern const struct select_kernels select_scalar, select_avx2, select_avx512;

/* Ranks, keys, candidates by rank (twice, 2 words each), exponentials of the group. */
static inline size_t select_work_words(uint32_t parts, uint32_t group)
{
    return ((size_t)parts + 64) * (8 + (size_t)group);
}

#endif
