/* Launches that overlap: where the device knows how (b->overlaps), a kernel is launched while the one before it
 * still runs, and waits for that by itself (griddepcontrol). */
#ifndef KERNELS_CUDA_LAUNCH_H
#define KERNELS_CUDA_LAUNCH_H

#include "kernels/cuda/cuda.h"

struct cuda_launch {
    cudaLaunchConfig_t config; /* knows the address of attrs */
    cudaLaunchAttribute attrs[2];
};

/* A part of a command. */
static inline void cuda_launch_early(const struct cuda_backend *b, struct cuda_launch *l, dim3 grid,
                                     uint32_t threads, size_t shared)
{
    *l = (struct cuda_launch){};
    l->config.gridDim = grid;
    l->config.blockDim = dim3(threads);
    l->config.dynamicSmemBytes = shared;
    l->config.stream = b->stream;
    l->config.attrs = l->attrs;
    l->config.numAttrs = b->overlaps ? 1 : 0;
    l->attrs[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    l->attrs[0].val.programmaticStreamSerializationAllowed = 1;
}

/* All blocks run at the same time, or the launch fails. */
static inline void cuda_launch_together(struct cuda_launch *l)
{
    cudaLaunchAttribute *a = &l->attrs[l->config.numAttrs++];
    a->id = cudaLaunchAttributeCooperative;
    a->val.cooperative = 1;
}

#endif
