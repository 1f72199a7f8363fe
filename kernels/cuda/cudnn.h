/* Causal attention by cuDNN, through its C backend API; the library is looked for at run time.
 *
 * A plan is a kernel that cuDNN chose and compiled for a shape (0.5 to 1 s; another shape of a kernel that is
 * there: 0.04 s), and serves every length up to the shape's: true lengths are read from device memory. Row i
 * of n attends positions 0 to n_positions - n + i. A plan of an exact shape serves that alone, and is 5 % faster:
 * its kernel looks for the edge of what exists in the tiles along the diagonal only. Needs cuDNN 9.7 or newer,
 * and knows 9.10.0 and 9.10.1 to be wrong. */
#ifndef KERNELS_CUDA_CUDNN_H
#define KERNELS_CUDA_CUDNN_H

#include "kernels/cuda/cuda.h"

/* All strides in numbers. q and o are alike. */
struct cudnn_shape {
    uint32_t batch, heads, kv_heads, dim; /* heads: of q; batch: with lengths of their own */
    uint32_t rows, positions;             /* at most, or ... */
    bool exact;                           /* ... so many. Without pages */
    size_t q_batch, q_head, q_row;
    size_t kv_batch, kv_head, kv_row; /* without pages */
    /* Pages of so many positions, at page_stride from each other in one container for k and another for v;
     * a table [batch][positions / page_rows] says which. kv_heads is 1 then. 0: no pages. */
    uint32_t page_rows, n_pages;
    size_t page_stride;
};

/* Device memory, but for scale. */
struct cudnn_data {
    const void *q, *k, *v;
    void *o;
    float *lse; /* [batch][heads][shape rows], natural log. Not to be left out: 9.14 would write it
                   to some address or other */
    const int32_t *n_rows, *n_positions; /* [batch]; not read where the shape is exact */
    const int32_t *pages;
    void *workspace; /* cudnn_workspace() bytes */
    float scale;
};

struct cudnn;
struct cudnn_plan;

/* NULL: not to be had on this machine; *why says what is missing. For one thread at a time, on the current
 * device. */
struct cudnn *cudnn_open(const char **why);
void cudnn_close(struct cudnn *c);
/* NULL: cuDNN does not take the shape; cudnn_text() says why. */
struct cudnn_plan *cudnn_plan_create(struct cudnn *c, const struct cudnn_shape *s);
void cudnn_plan_destroy(struct cudnn_plan *p);
size_t cudnn_workspace(const struct cudnn_plan *p);
const char *cudnn_text(const struct cudnn *c);
/* Queues it, by the library as this thread opened it: a plan may have been made by another's. NULL if all is
 * well, else what went wrong. */
const char *cudnn_run(struct cudnn *c, struct cudnn_plan *p, const struct cudnn_data *d,
                      cudaStream_t stream);

#endif
