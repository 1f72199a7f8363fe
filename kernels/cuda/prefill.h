/* Attention of a prompt's chunk by cuDNN: what attend.cu asks. */
#ifndef KERNELS_CUDA_PREFILL_H
#define KERNELS_CUDA_PREFILL_H

#include "kernels/cuda/cuda.h"

/* Whether the rows of this sequence, in the lanes that are not STREAM, go to cuda_prefill: there are many,
 * they attend everything, and cuDNN has a kernel for the shape. The first call, of whatever rows, begins to
 * open cuDNN and make plans in the background. In a step the answer is always the same; once plans are made
 * (cuda_prefill_news) it depends on shapes, and on whether the sequence is in DRAM, and a call may wait 0.04 s for
 * another plan. */
bool cuda_prefill_takes(struct cuda_backend *b, const struct attend_args *a,
                        const struct batch_seq *q);
/* Queues attention of the rows of a sequence that cuda_prefill_takes, in those lanes. */
void cuda_prefill(struct cuda_backend *b, const struct attend_args *a, const struct batch_seq *q);

/* For append, where q is read by attention alone (append_args.to_attend): where the rows that cuda_prefill_takes
 * put it as bf16, [row of the batch][heads * head_dim]. NULL: nowhere, q stays where it is. */
__nv_bfloat16 *cuda_prefill_accept(struct cuda_backend *b, const struct append_args *a);

/* For the product behind attention: rows of `out` that are not there, but here as bf16. */
enum { PREFILL_STRETCHES = 64 };
struct prefill_passed {
    __nv_bfloat16
        *o; /* [row of the batch][heads * head_dim], with room for all rows of the batch */
    uint32_t n, first[PREFILL_STRETCHES], rows[PREFILL_STRETCHES]; /* ascending */
};
/* NULL: all are there. */
const struct prefill_passed *cuda_prefill_passed(const struct cuda_backend *b, const void *out);

/* Something for the log, once: plans are made; cuDNN is not to be had, or not for everything. NULL: nothing new. */
const char *cuda_prefill_news(struct cuda_backend *b, bool *bad);
/* Steps in which our own kernel served what this is for. */
uint64_t cuda_prefill_slow(const struct cuda_backend *b);

/* Fewest rows that are taken: for tests and benches; ~0u: never. */
void cuda_prefill_least(struct cuda_backend *b, uint32_t rows);

#endif
