/* What known.c and its kernels per instruction set agree on: the mass of rows that are attended in any
 * case, of one row and one KV head. */
#ifndef KERNELS_CPU_KNOWN_H
#define KERNELS_CPU_KNOWN_H

#include "kernels/backend.h"

enum { KNOWN_HEADS = 4 }; /* heads that share a load of keys */

struct known_lane {
    const struct known_args *a;
    const struct plan_row *row;
    uint32_t head, group;
    uint32_t sink_rows; /* of whole pages */
    const float *q;     /* [group][head_dim] */
    float *out;         /* [group] */
    float *work;        /* known_work_floats() of the calling worker */
};

struct known_kernels {
    void (*lane)(const struct known_lane *l);
};

extern const struct known_kernels known_scalar, known_avx2, known_avx512;

/* Logits of up to KNOWN_HEADS heads, padded to whole vectors on both sides of the sinks' end. */
static inline size_t known_work_floats(uint32_t sink_rows, uint32_t tail_rows)
{
    return ((size_t)sink_rows + tail_rows + 48) / 16 * 16 * KNOWN_HEADS;
}

#endif
