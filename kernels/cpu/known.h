/* What known.c and its kernels per instruction set agree on: the mass of the sinks' pages, of one row
 * and one KV head. The tail's falls out of attending it. */
#ifndef KERNELS_CPU_KNOWN_H
#define KERNELS_CPU_KNOWN_H

#include "kernels/cpu/attend.h"

enum { KNOWN_HEADS = 4 }; /* heads that share a load of keys */

struct known_lane {
    const struct known_args *a;
    const struct plan_row *row;
    uint32_t head, group;
    uint32_t sink_rows; /* of whole pages */
    const float *q;     /* [group][head_dim] */
    float *lse;         /* [group] */
    float *work;        /* known_work_floats() of the calling worker */
};

struct known_kernels {
    /* lse = that of the sinks' pages and of the tail's partial results, [n][partial_floats]. */
    void (*lane)(const struct known_lane *l, float *tail, uint32_t n, size_t partial_floats);
};

extern const struct known_kernels known_scalar, known_avx2, known_avx512;

/* Logits of up to KNOWN_HEADS heads, in whole vectors. */
static inline size_t known_work_floats(uint32_t sink_rows)
{
    return ((size_t)sink_rows + 15) / 16 * 16 * KNOWN_HEADS;
}

#endif
