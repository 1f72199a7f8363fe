/* Attention of a prompt's chunk by cuDNN: what attend.cu asks. */
#ifndef KERNELS_CUDA_PREFILL_H
#define KERNELS_CUDA_PREFILL_H

#include "kernels/cuda/cuda.h"

/* Whether the rows of this sequence, in the lanes that are not STREAM, go to cuda_prefill: there are many,
 * they attend everything, and cuDNN has a kernel for the shape. The first call, of whatever rows, begins to
 * open cuDNN in the background; the first that has rows for it waits until that is done. Answers depend on
 * shapes alone from then on, so equal calls give equal bits. */
bool cuda_prefill_takes(struct cuda_backend *b, const struct attend_args *a,
                        const struct batch_seq *q);
/* Queues attention of the rows of a sequence that cuda_prefill_takes, in those lanes. */
void cuda_prefill(struct cuda_backend *b, const struct attend_args *a, const struct batch_seq *q);

/* Fewest rows that are taken: for tests and benches; ~0u: never. */
void cuda_prefill_least(struct cuda_backend *b, uint32_t rows);

#endif
