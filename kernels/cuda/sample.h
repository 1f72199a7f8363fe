/* What sample.cu (lists, rows, results) and sample_draw.cu (one row) share. */
#ifndef KERNELS_CUDA_SAMPLE_H
#define KERNELS_CUDA_SAMPLE_H

#include "kernels/cuda/cuda.h"

enum { SAMPLE_THREADS = 1024 }; /* of a block, which has a row */

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

/* Parameters of the kernels, by value. Row i of x, seen and ids belongs to rows[i]. */
struct sample_call {
    const float *logits;
    uint32_t vocab, n_rows; /* n_rows: as cuda_bucket has it */
    const struct draw_row *rows;
    float *x;
    uint32_t *seen, *ids;
    struct drawn *out;
};

/* Does the row need ids? */
bool sample_needs_ids(const struct draw_row *r, uint32_t vocab);
/* Draws and scores all rows. */
void sample_launch(struct cuda_backend *b, const struct sample_call *c);

#endif
