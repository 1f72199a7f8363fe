/* What sample.cu (lists, rows, results) and sample_draw.cu (one row) share. */
#ifndef KERNELS_CUDA_SAMPLE_H
#define KERNELS_CUDA_SAMPLE_H

#include "kernels/cuda/launch.h"

enum {
    SAMPLE_THREADS = 1024, /* of a block, which has a row */
    SAMPLE_PARTS = 32,     /* of a row of logits, whose greatest are found apart: a lane each */
};

/* A sample_row, as kernels read it: pointers are device memory. */
struct draw_row {
    struct sample_params params;
    uint32_t logits_row, target, position;
    int32_t n_top;
    uint32_t changed, penalized; /* x is not the logits; history counts */
    uint32_t n_banned, n_bias, n_prompt, n_history;
    const uint32_t *banned, *bias_ids, *history;
    const float *bias;
    struct drawn *host; /* pinned; NULL: a row beyond the last, nothing to do */
};

struct drawn {
    uint32_t token, rank, bad;
    float logprob;
    struct sample_top top[SAMPLE_MAX_LOGPROBS];
};

/* The greatest of some logits. */
struct peak {
    float max;
    uint32_t id; /* the smallest with it; ~0: there is none */
    uint32_t nan;
};

/* Parameters of the kernels, by value. Row i of x, seen and ids belongs to rows[i]. */
struct sample_call {
    const float *logits;
    uint32_t vocab, n_rows; /* n_rows: as cuda_bucket has it */
    const struct draw_row *rows;
    float *x;
    uint32_t *seen, *ids;
    struct peak *peaks; /* [n_rows][SAMPLE_PARTS] of the logits */
    struct drawn *out;
};

__device__ static inline bool peak_better(float x, uint32_t id, float y, uint32_t other)
{
    return x > y || (x == y && id < other);
}

/* The best of what the lanes of a warp have, in all of them. */
__device__ static inline void peak_of_warp(struct peak *p)
{
    for (int d = 16; d > 0; d /= 2) {
        float y = __shfl_xor_sync(~0u, p->max, d);
        uint32_t other = __shfl_xor_sync(~0u, p->id, d);
        p->nan |= __shfl_xor_sync(~0u, p->nan, d);
        if (peak_better(y, other, p->max, p->id)) {
            p->max = y;
            p->id = other;
        }
    }
}

/* Launched while the kernel before still runs, where the device knows how: both kinds wait by themselves. */
__device__ static inline void sample_wait(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* Does the row need ids? */
bool sample_needs_ids(const struct draw_row *r, uint32_t vocab);
/* Draws and scores all rows. */
void sample_launch(struct cuda_backend *b, const struct sample_call *c);

#endif
