/* What plan.c asks of score.c, known.c and select.c: items of work of their calls, by (row, KV head). */
#ifndef KERNELS_CPU_PLAN_H
#define KERNELS_CPU_PLAN_H

#include "kernels/core/digest.h"
#include "kernels/cpu/cpu.h"

/* ---- score.c ---- */

struct score_call {
    struct cpu_backend *b;
    const struct score_args *a;
    struct digest_layout layout;
    uint32_t group, stretch, stretches; /* segments of an item; items of the longest row */
    size_t worker_bytes;
    /* coarse to fine; rows of [row][KV head] */
    bool coarse;
    float *coarse_scores; /* [..][group][coarse_stride] */
    uint32_t coarse_stride;
    uint8_t *open;        /* [..][open_stride] */
    uint32_t open_stride; /* groups of the longest row */
};

/* Sizes the scratch and runs the coarse passes; what remains are stretches of every lane. */
void score_prepare(struct score_call *c, struct cpu_backend *b, const struct score_args *a);
/* Items of a lane: 0 if it is not SPARSE or has no segment. */
uint32_t score_items(const struct score_call *c, uint32_t lane);
void score_item(const struct score_call *c, uint32_t lane, uint32_t stretch, uint32_t worker);

/* ---- known.c ---- */

struct known_call {
    struct cpu_backend *b;
    const struct known_args *a;
    uint32_t sink_rows, group, o_stride;
    size_t partial_floats, worker_floats;
};

void known_prepare(struct known_call *c, struct cpu_backend *b, const struct known_args *a);
uint32_t known_items(const struct known_call *c, uint32_t lane);
/* Attends a split of the lane's tail. */
void known_item(const struct known_call *c, uint32_t lane, uint32_t split, uint32_t worker);
/* Once all splits are: the lane's mass. */
void known_finish(const struct known_call *c, uint32_t lane, uint32_t worker);

/* ---- select.c ---- */

void select_prepare(struct cpu_backend *b, const struct select_args *a);
void select_item(struct cpu_backend *b, const struct select_args *a, uint32_t lane,
                 uint32_t worker);

#endif
