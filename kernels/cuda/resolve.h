/* What resolve.cu and gather.cu share: from the pages of plans to blocks in HBM, and the copies of what
 * was not there. */
#ifndef KERNELS_CUDA_RESOLVE_H
#define KERNELS_CUDA_RESOLVE_H

#include "kernels/cuda/launch.h"

/* The copies of one layer. Jobs are appended by a kernel and copied by the next. */
struct gather_call {
    const struct hot_fetch *jobs;
    uint32_t *
        n_jobs; /* device memory: [0] how many, [1] CTAs that have ended; the last one clears both */
    const uint8_t *dram;
    uint8_t *hbm;
    size_t block_bytes, page_bytes;
};

/* Queues the kernel on b->stream: a part of a command. The one behind it may run as soon as that of `resolve` has
 * ended, which it can rely on before it waits. */
void gather_launch(struct cuda_backend *b, const struct gather_call *c);
/* SMs that it leaves alone. On the others a kernel with much shared memory would begin when it has ended: they must
 * be set up for that. */
uint32_t gather_leaves(const struct cuda_backend *b);

/* Were these lists resolved just now, and are pages of theirs being copied by the kernel that was queued last? */
bool resolve_copies(const struct cuda_backend *b, const uint32_t *pages);

/* Kernels that begin with resolve_wait() are launched early. */
#ifdef __CUDACC__
static __device__ inline void resolve_wait(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
/* The kernel behind this one begins when the one before has ended. */
static __device__ inline void resolve_wait_first(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
#endif

#endif
