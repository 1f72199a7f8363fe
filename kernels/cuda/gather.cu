/* Pages from the DRAM arena into slots, by loads of the SMs: the list of what misses is made on the device,
 * and no engine that copies could read it there (reference/kernels.md K7). */
#include "kernels/cuda/resolve.h"

namespace
{

enum {
    CTAS = 16,
    THREADS = 512,
    WARPS = THREADS / 32,
    LOADS = 8, /* of 16 bytes, in flight per thread */
    PART_BYTES =
        LOADS * 32 * 16, /* of a warp: two share a page of 8 KiB, for one page must not be slow */
};

/* Past L1: nothing is read twice, and the host may write there between two kernels. */
__device__ uint4 load_far(const uint4 *p)
{
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

/* A warp takes 4 KiB of a page at a time. Bound by PCIe: 512 bytes x 8 x 256 warps are in flight, of which
 * a 55 GB/s bus with 2 us of latency needs 110 KB; more would take SMs from attention. Op: resolve. */
__global__ void __launch_bounds__(THREADS)
    gather_kernel(const __grid_constant__ struct gather_call c)
{
    resolve_wait_first();
    const uint32_t n_jobs = *(volatile const uint32_t *)c.n_jobs, lane = threadIdx.x % 32;
    const uint32_t parts = (uint32_t)((c.page_bytes + PART_BYTES - 1) / PART_BYTES);
    const uint32_t n = n_jobs * parts, vectors = (uint32_t)(c.page_bytes / 16);
    for (uint32_t w = blockIdx.x + threadIdx.x / 32 * gridDim.x; w < n; w += WARPS * gridDim.x) {
        struct hot_fetch f = c.jobs[w / parts];
        uint32_t first = w % parts * (PART_BYTES / 16) + lane;
        size_t at = f.lane * c.page_bytes;
        const uint4 *from =
            (const uint4 *)(c.dram + (f.from & ~BLOCK_IN_DRAM) * c.block_bytes + at);
        uint4 *to = (uint4 *)(c.hbm + f.to * c.block_bytes + at), v[LOADS];
#pragma unroll
        for (uint32_t i = 0; i < LOADS; i++)
            if (first + 32 * i < vectors)
                v[i] = load_far(from + first + 32 * i);
#pragma unroll
        for (uint32_t i = 0; i < LOADS; i++)
            if (first + 32 * i < vectors)
                to[first + 32 * i] = v[i];
    }
    __syncthreads(); /* all of the CTA have read the count */
    if (threadIdx.x == 0 && atomicInc(&c.n_jobs[1], gridDim.x - 1) == gridDim.x - 1)
        c.n_jobs[0] = 0;
}

} /* namespace */

void gather_launch(struct cuda_backend *b, const struct gather_call *c)
{
    struct cuda_launch l;
    cuda_launch_early(b, &l, dim3(CTAS), THREADS, 0);
    cuda_ok(b, cudaLaunchKernelEx(&l.config, gather_kernel, *c), "gather");
}

uint32_t gather_leaves(const struct cuda_backend *b)
{
    return b->sms > CTAS ? (uint32_t)b->sms - CTAS : 0;
}
