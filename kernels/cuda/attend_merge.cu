/* Folds the partial results of tasks whose splits ran in several CTAs, from the first split to the
 * last: one warp per query and 32 dimensions of it. Lanes hold the greatest scores and sums of 32 splits
 * and make their weights together; the chain over splits is one multiply-add each, and its loads do
 * not wait for it. Bound by L2 latency; reads a few percent of what the splits read. Op: attend. */
#include "kernels/cuda/attend_last.h"
#include "kernels/cuda/attend_shape.h"

namespace
{

enum { AT_ONCE = 32 };

/* What a thread reads of 32 splits: one dimension of each, and the weights of its lane's. */
struct batch {
    float values[AT_ONCE];
    float2 ml;
};

template <int DP>
__device__ void load_batch(struct batch *r, const float *part, const float2 *ml, uint32_t split,
                           uint32_t n_splits, uint32_t n)
{
    uint32_t lane = threadIdx.x % 32;
    r->ml = split + lane < n_splits ? ml[(size_t)(split + lane) * n] : make_float2(LOWEST, 0);
#pragma unroll
    for (uint32_t i = 0; i < AT_ONCE; i++)
        r->values[i] = split + i < n_splits ? part[(size_t)(split + i) * n * DP] : 0;
}

template <int DP>
__global__ void __launch_bounds__(DP) merge_kernel(const __grid_constant__ struct attend_call c)
{
    const struct attend_merge *k = &c.merges[blockIdx.y];
    const uint32_t query = blockIdx.x, n = k->n_rows * c.group;
    const float *part = c.part_o + ((size_t)k->partial + query) * DP + threadIdx.x;
    const float2 *ml = c.part_ml + k->partial + query;
    float m = LOWEST, l = 0, o = 0;
    struct batch now, later;
    allow_next_kernel();
    wait_for_kernel_before();
    if (query >= n)
        return;
    load_batch<DP>(&now, part, ml, 0, k->n_splits, n);
    for (uint32_t split = 0; split < k->n_splits; split += AT_ONCE, now = later) {
        uint32_t left = min(k->n_splits - split, (uint32_t)AT_ONCE);
        const float2 own = now.ml;
        load_batch<DP>(&later, part, ml, split + AT_ONCE, k->n_splits, n);
        struct fold f = fold_32(own.x, &m);
#pragma unroll
        for (uint32_t i = 0; i < AT_ONCE; i++) {
            struct fold g = {0, __shfl_sync(~0u, f.so_far, i), __shfl_sync(~0u, f.next, i)};
            float next_l = __shfl_sync(~0u, own.y, i);
            if (i >= left)
                continue;
            bool first = split + i == 0;
            o = first ? now.values[i] : fold_sum(g, o, now.values[i]);
            l = first ? next_l : fold_sum(g, l, next_l);
        }
    }
    size_t at = (size_t)(k->row + query / c.group) * c.heads + k->head * c.group + query % c.group;
    if (threadIdx.x < c.dim && c.half != NULL)
        c.half[at * c.dim + threadIdx.x] = __float2bfloat16_rn(finish(o, l));
    else if (threadIdx.x < c.dim)
        c.out[at * c.dim + threadIdx.x] = finish(o, l);
    if (threadIdx.x == 0 && c.lse != NULL)
        c.lse[at] = log_sum(m, l);
}

/* Launched while the kernel before it still runs, as far as the device knows how. */
template <int DP>
void launch(struct cuda_backend *b, const struct attend_call *c, const struct attend_merge *merges,
            uint32_t n)
{
    struct attend_call part = *c;
    part.merges = merges;
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t how = {};
    how.gridDim = dim3(c->max_queries, n);
    how.blockDim = dim3(DP);
    how.stream = b->stream;
    how.attrs = &early;
    how.numAttrs = b->overlaps ? 1 : 0;
    cuda_ok(b, cudaLaunchKernelEx(&how, merge_kernel<DP>, part), "attend (merge)");
}

} /* namespace */

void attend_run_merge(struct cuda_backend *b, const void *params)
{
    const struct attend_call *c = (const struct attend_call *)params;
    for (uint32_t done = 0, n; done < c->n_merges; done += n) {
        n = c->n_merges - done < 65535 ? c->n_merges - done : 65535; /* grids are no higher */
        attend_by_shape(c->dim, false, [=](auto s) { launch<s.DP>(b, c, c->merges + done, n); });
    }
}
