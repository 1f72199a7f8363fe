/* What resolve.cu and gather.cu share: from the pages of plans to blocks in HBM, and the copies of what
 * was not there. */
#ifndef KERNELS_CUDA_RESOLVE_H
#define KERNELS_CUDA_RESOLVE_H

#include "kernels/cuda/cuda.h"

/* The copies of one layer. Jobs are appended by a kernel and copied by the next. */
struct gather_call {
    const struct hot_fetch *jobs;
    uint32_t *
        n_jobs; /* device memory: [0] how many, [1] CTAs that have ended; the last one clears both */
    const uint8_t *dram;
    uint8_t *hbm;
    size_t block_bytes, page_bytes;
};

/* Queues the kernel on b->stream: a part of a command. */
void gather_launch(struct cuda_backend *b, const struct gather_call *c);

/* In a command: a kernel that begins with resolve_wait() and may be launched while the one before it ends. */
struct cuda_launch {
    cudaLaunchConfig_t config;
    cudaLaunchAttribute early;
};
static inline void resolve_config(struct cuda_backend *b, struct cuda_launch *l, dim3 grid,
                                  uint32_t threads, size_t shared)
{
    *l = (struct cuda_launch){};
    l->config.gridDim = grid;
    l->config.blockDim = dim3(threads);
    l->config.dynamicSmemBytes = shared;
    l->config.stream = b->stream;
    l->config.attrs = &l->early;
    l->early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    l->early.val.programmaticStreamSerializationAllowed = 1;
    l->config.numAttrs = b->overlaps ? 1 : 0;
}

#ifdef __CUDACC__
static __device__ inline void resolve_wait(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
#endif

#endif
