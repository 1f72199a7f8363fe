/* What the files of sampling share: passes over a row of logits per instruction set (sample_scalar.c,
 * sample_avx512.c), the scratch of one worker, and the filters (sample_filter.c). */
#ifndef KERNELS_CPU_SAMPLE_H
#define KERNELS_CPU_SAMPLE_H

#include "kernels/backend.h"

enum { SAMPLE_BLOCK = 512 }; /* tokens per partial sum of probabilities: where a draw looks first */

struct sample_peak {
    float max;
    uint32_t id; /* the smallest id with it */
    bool nan;    /* there is a NaN: max and id mean nothing */
};

/* Passes over n numbers. Sums run in a fixed order. */
struct sample_passes {
    struct sample_peak (*peak)(const float *x, uint32_t n);
    /* y = x / t; e = exp(y - max); sums[b]: of e per SAMPLE_BLOCK; returns the total. y and e may
     * be NULL: not wanted; y may be x. Infinities of x give e = 0. */
    double (*soften)(const float *x, uint32_t n, float t, float max, float *y, float *e,
                     double *sums);
    uint32_t (*count_above)(const float *x, uint32_t n, float bound);
    /* Ids with x >= least, ascending; returns how many. ids has room for n + 16. */
    uint32_t (*collect)(const float *x, uint32_t n, float least, uint32_t *ids);
};

extern const struct sample_passes sample_scalar, sample_avx512;

/* Of one worker: a row is worked on by one. All arrays have room for a vocabulary. */
struct sample_worker {
    float *x;       /* logits as changed by biases, penalties, temperature */
    float *e;       /* exp(x - max) */
    double *sums;   /* of e, per SAMPLE_BLOCK */
    uint32_t *ids;  /* candidates, ascending */
    uint32_t *seen; /* occurrences in the output; all 0 between rows */
};

/* Draws from the tokens that min_p, top_k and top_p leave, given y = logits / temperature in w->x,
 * exp(y - max) in w->e and its total. */
uint32_t sample_filtered(struct sample_worker *w, const struct sample_passes *k,
                         const struct sample_params *p, uint32_t vocab, float max, double total,
                         double uniform);
/* The token at which the running sum of e over ids passes uniform times their sum. */
uint32_t sample_pick(const float *e, const uint32_t *ids, uint32_t n, double uniform);

#endif
