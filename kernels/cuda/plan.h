/* Score, select and resolve of a layer in one kernel (plan.cu), where the three follow one another and
 * digests are centroids of pages of 16; else select and resolve. Both ask; a "no" changes nothing. */
#ifndef KERNELS_CUDA_PLAN_H
#define KERNELS_CUDA_PLAN_H

#include "kernels/cuda/cuda.h"

/* Queues the kernel; takes back the score that was queued last, if these are its scores and it can do that too. */
bool cuda_plan_select(struct cuda_backend *b, const struct select_args *a);
/* What was queued last is the kernel that selects these pages: it also puts blocks in their place where a
 * row is RESIDENT. */
bool cuda_plan_resolve(struct cuda_backend *b, const struct resolve_args *a);
status cuda_plan_open(struct cuda_backend *b);

/* score_mass.cu: the call that was queued last, if it writes these scores; NULL: it does not. */
const struct score_call *cuda_score_queued(struct cuda_backend *b, const float *scores);

#endif
