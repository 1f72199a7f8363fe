/* Coarse to fine: which groups of partitions are worth their own scores. */
#include "kernels/cuda/select.h"

#include <string.h>

namespace
{

/* Mean of the logits of a group's coarse digests that have one. */
__device__ inline float group_logit(const struct cuda_choice *c, uint32_t lane, uint32_t h,
                                    uint32_t i)
{
    const float *p =
        c->scores + ((size_t)lane * c->group + h) * c->stride + (size_t)i * c->per_group;
    float sum = 0;
    uint32_t n = 0;
    for (uint32_t k = 0; k < c->per_group; k++)
        if (p[k] > -INFINITY) {
            sum += p[k];
            n++;
        }
    return n > 0 ? sum / (float)n : -INFINITY;
}

/* Greatest logit and sum of exponentials of every head. */
__device__ void choice_masses(struct select_shared *s, const struct cuda_choice *c, uint32_t lane,
                              uint32_t n)
{
    for (uint32_t h = 0; h < c->group; h++) {
        float top = -INFINITY;
        for (uint32_t i = threadIdx.x; i < n; i += SELECT_LOOP)
            top = fmaxf(top, group_logit(c, lane, h, i));
        uint32_t key = __reduce_max_sync(~0u, top > -INFINITY ? key_of(top) : 0);
        if (threadIdx.x % 32 == 0)
            atomicMax(&s->top[h], key);
    }
    __syncthreads();
    for (uint32_t h = 0; h < c->group; h++) {
        unsigned long long sum = 0;
        float most = s->top[h] > 0 ? rank_of(s->top[h]) : 0.0f;
        for (uint32_t i = threadIdx.x; i < n; i += SELECT_LOOP)
            sum += __float2uint_rn(expf(group_logit(c, lane, h, i) - most) * SUM_UNIT);
        atomicAdd(&s->sum[h], sum);
    }
    __syncthreads();
    if (threadIdx.x < c->group) {
        s->shift[threadIdx.x] = s->top[threadIdx.x] > 0 ? rank_of(s->top[threadIdx.x]) : 0.0f;
        s->factor[threadIdx.x] =
            s->sum[threadIdx.x] > 0 ? SUM_UNIT / (float)s->sum[threadIdx.x] : 0.0f;
    }
    __syncthreads();
}

/* One CTA: one lane. Few numbers, so bound by latency. Op: score, coarse to fine. */
__global__ void __launch_bounds__(SELECT_LOOP)
    choose_kernel(const __grid_constant__ struct cuda_choice c)
{
    __shared__ __align__(16) struct select_shared s;
    const uint32_t lane = blockIdx.x;
    const struct cuda_row *row = &c.rows[lane / c.kv_heads];
    const uint32_t n = row->n_segments * c.groups;
    uint32_t turn = 0;
    allow_next_kernel();
    wait_for_kernel_before();
    if (n == 0 || c.lanes[lane % c.kv_heads].class_ != LANE_SPARSE)
        return;
    select_clear<SELECT_LOOP>(&s);
    choice_masses(&s, &c, lane, n);
    select_keys<SELECT_LOOP, 0> keys;
    keys.begin = 0;
    keys.end = n;
    keys.rank = 0;
    keys.ranks = 1;
    keys.scratch = c.keys + (size_t)lane * c.open_stride;
    uint32_t best = 0;
    keys.make([&](uint32_t i, uint32_t *key) {
        for (uint32_t e = 0; e < 4; e++) {
            float share = 0;
            for (uint32_t h = 0; i + e < n && h < c.group; h++) {
                float x = group_logit(&c, lane, h, i + e) - s.shift[h];
                share += x < -87.0f ? 0.0f : expf(x) * s.factor[h];
            }
            key[e] = i + e < n ? key_of(share > 0 ? share : 0.0f) : 0;
            best = max(best, key[e]);
        }
    });
    best = __reduce_max_sync(~0u, best);
    if (threadIdx.x % 32 == 0)
        atomicMax(&s.best, best);
    __syncthreads();
    best = s.best;
    count_first<SELECT_LOOP, 0>(&s, &keys, best);
    __syncthreads();
    total_of<SELECT_LOOP>(&s, 0, 0, 1);
    __syncthreads();
    uint32_t n_open = (uint32_t)ceilf(__fmul_rn(c.share, (float)n));
    const uint32_t k[2] = {max(1u, min(n_open, n)), 0};
    struct border borders[2];
    find_borders<SELECT_LOOP, 0>(&s, &keys, best, k, n, borders, &turn);
    keys.each([&](uint32_t i, uint32_t *key) {
        for (uint32_t e = 0; e < 4; e++)
            if (i + e < n)
                c.open[(size_t)lane * c.open_stride + i + e] =
                    is_within(&borders[0], key[e], i + e);
    });
}

struct choose_command {
    struct cuda_choice c;
    uint32_t lanes;
};

void run_choose(struct cuda_backend *b, const void *params)
{
    const struct choose_command *m = (const struct choose_command *)params;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(m->lanes);
    config.blockDim = dim3(SELECT_LOOP);
    config.stream = b->stream;
    cuda_ok(b, cudaLaunchKernelEx(&config, choose_kernel, m->c), "choice of groups");
}

} /* namespace */

void cuda_choose(struct cuda_backend *b, const struct cuda_choice *c, uint32_t lanes)
{
    struct choose_command m;
    memset(&m, 0, sizeof m);
    m.c = *c;
    m.lanes = lanes;
    cuda_do(b, run_choose, &m, sizeof m);
}
