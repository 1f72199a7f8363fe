/* RoPE on q and k, and k and v into their pages; before it biases and norms of heads, where the
 * architecture has them.
 *
 * Rows carry their position and their block of every class (attend_list.cu), so the kernel knows nothing
 * of sequences. */
#include "kernels/cuda/attend_mma.h"
#include "kernels/cuda/fp8.h"
#include "kernels/cuda/prefill.h"

#include <string.h>

namespace
{

enum {
    APPEND_THREADS = 512,
    APPEND_HEADS = APPEND_THREADS / 32,
    MAX_LANE_PAIRS = 8,
    WIDE_THREADS = 256,
    WIDE_ROWS = 64, /* so many are worth four pairs a thread */
};

struct append_call {
    const struct append_place *places;
    uint32_t lanes[CUDA_MAX_KV_HEADS]; /* as of attend_call */
    uint8_t *hbm[LANE_CLASSES];
    size_t block_bytes[LANE_CLASSES], page_bytes;
    uint32_t n_rows, block_rows, dim, heads, kv_heads;
    const float *cos, *sin;
    float *qkv;
    __nv_bfloat16 *q; /* [n_rows][heads][dim] of the rows that go to cuda_prefill; NULL: none do */
    const float *bias, *q_norm, *k_norm; /* NULL: none */
    float norm_eps;
    uint32_t fp8; /* pages are KV_E4M3 */
};

/* Where a head goes as numbers N: to its page, or q, which is always bf16, to cuda_prefill. */
template <typename N>
__device__ __forceinline__ N *narrow_place(const struct append_call &c,
                                           const struct append_place &at, uint32_t head)
{
    if (head < c.heads)
        return (N *)c.q + ((size_t)at.row * c.heads + head) * c.dim;
    uint32_t kv = head - c.heads, is_v = kv >= c.kv_heads;
    uint32_t lane = c.lanes[kv - is_v * c.kv_heads], class_ = lane >> LANE_CLASS_SHIFT;
    uint32_t index = lane & ((1u << LANE_CLASS_SHIFT) - 1);
    return (N *)(c.hbm[class_] + at.blocks[class_] * c.block_bytes[class_] + index * c.page_bytes) +
           (size_t)(is_v * c.block_rows + at.pos % c.block_rows) * c.dim;
}

__device__ __forceinline__ void put(__nv_bfloat16 *to, float x)
{
    *to = __float2bfloat16_rn(x);
}

__device__ __forceinline__ void put(uint8_t *to, float x)
{
    *to = fp8_round(x);
}

__device__ __forceinline__ void put(__nv_bfloat16 *to, float4 v)
{
    __nv_bfloat162 low = __floats2bfloat162_rn(v.x, v.y), high = __floats2bfloat162_rn(v.z, v.w);
    *(uint2 *)to = make_uint2(*(const uint32_t *)&low, *(const uint32_t *)&high);
}

__device__ __forceinline__ void put(uint8_t *to, float4 v)
{
    *(uint32_t *)to = fp8_round4(v);
}

/* X: float, or float4 of neighbouring pairs. */
template <typename N, typename X>
__device__ __forceinline__ void put_narrow(const struct append_call &c,
                                           const struct append_place &at, uint32_t head, uint32_t x,
                                           X a, X b)
{
    const uint32_t half = c.dim / 2;
    if (sizeof(N) == 1 && head < c.heads) {
        __nv_bfloat16 *q = narrow_place<__nv_bfloat16>(c, at, head) + x;
        put(q, a);
        put(q + half, b);
        return;
    }
    N *to = narrow_place<N>(c, at, head) + x;
    put(to, a);
    put(to + half, b);
}

/* Rotates pair x of a head and puts it where it belongs. Products and sums round apart, as on the CPU. */
template <typename N>
__device__ __forceinline__ void put_pair(const struct append_call &c, const struct append_place &at,
                                         uint32_t head, uint32_t x, float a, float b)
{
    const uint32_t half = c.dim / 2;
    if (head < c.heads + c.kv_heads) {
        float cos = c.cos[(size_t)at.pos * half + x], sin = c.sin[(size_t)at.pos * half + x];
        float p = __fsub_rn(__fmul_rn(a, cos), __fmul_rn(b, sin));
        b = __fadd_rn(__fmul_rn(b, cos), __fmul_rn(a, sin));
        a = p;
    }
    if (head < c.heads && !(c.q != NULL && at.to_prefill)) {
        float *q = c.qkv + ((size_t)at.row * (c.heads + 2 * c.kv_heads) + head) * c.dim + x;
        q[0] = a;
        q[half] = b;
        return;
    }
    put_narrow<N>(c, at, head, x, a, b);
}

/* A thread has a pair (i, i + dim / 2) of a head of a row. Bound by HBM in prefill (12 bytes
 * per number of q, 6 per number of k and v), by its launch in decode. Op: append. */
template <typename N>
__global__ void __launch_bounds__(APPEND_THREADS)
    append_kernel(const __grid_constant__ struct append_call c)
{
    const struct append_place at = c.places[blockIdx.x];
    const uint32_t half = c.dim / 2, n = (c.heads + 2 * c.kv_heads) * half;
    const uint32_t i = blockIdx.y * APPEND_THREADS + threadIdx.x, head = i / half, x = i % half;
    allow_next_kernel();
    wait_for_kernel_before();
    if (at.row == ~0u || i >= n)
        return;
    const float *from = c.qkv + (size_t)at.row * n * 2 + (size_t)head * c.dim + x;
    put_pair<N>(c, at, head, x, from[0], from[half]);
}

__device__ __forceinline__ float4 rotated(float4 a, float4 b, float4 cos, float4 sin, float sign)
{
    return make_float4(__fadd_rn(__fmul_rn(a.x, cos.x), sign * __fmul_rn(b.x, sin.x)),
                       __fadd_rn(__fmul_rn(a.y, cos.y), sign * __fmul_rn(b.y, sin.y)),
                       __fadd_rn(__fmul_rn(a.z, cos.z), sign * __fmul_rn(b.z, sin.z)),
                       __fadd_rn(__fmul_rn(a.w, cos.w), sign * __fmul_rn(b.w, sin.w)));
}

/* A CTA has a row, a thread four neighbouring pairs of every so many heads, whose angles are the same. Bound by
 * HBM: 4 bytes in per number, and 2 or (q that nobody wants as bf16) 4 out. Assumes dim % 8 == 0. Op: append, of
 * many rows, with the bits of append_kernel. */
template <typename N>
__global__ void __launch_bounds__(WIDE_THREADS)
    append_wide_kernel(const __grid_constant__ struct append_call c)
{
    const struct append_place at = c.places[blockIdx.x];
    const uint32_t half = c.dim / 2, fours = half / 4, all = c.heads + 2 * c.kv_heads;
    const uint32_t at_once = WIDE_THREADS / fours, x = threadIdx.x % fours * 4;
    const uint32_t first = threadIdx.x / fours;
    allow_next_kernel();
    wait_for_kernel_before();
    if (at.row == ~0u || first >= at_once)
        return;
    float *row = c.qkv + (size_t)at.row * all * c.dim + x;
    const float4 cos = *(const float4 *)(c.cos + (size_t)at.pos * half + x);
    const float4 sin = *(const float4 *)(c.sin + (size_t)at.pos * half + x);
    const uint32_t floats = c.q != NULL && at.to_prefill ? 0 : c.heads; /* heads that stay so */
#pragma unroll 4
    for (uint32_t head = first; head < all; head += at_once) {
        float4 *from = (float4 *)(row + head * c.dim),
               *above = (float4 *)(row + head * c.dim + half);
        float4 a = *from, b = *above;
        if (head < c.heads + c.kv_heads) {
            float4 low = rotated(a, b, cos, sin, -1);
            b = rotated(b, a, cos, sin, 1);
            a = low;
        }
        if (head < floats) {
            *from = a;
            *above = b;
            continue;
        }
        put_narrow<N>(c, at, head, x, a, b);
    }
}

/* A warp has a head of a row, a lane the pairs lane, lane + 32, ... Bound as append_kernel. Assumes
 * dim <= 64 * MAX_LANE_PAIRS. Op: append, of architectures with biases or norms of heads. */
template <typename N>
__global__ void __launch_bounds__(APPEND_THREADS)
    append_heads_kernel(const __grid_constant__ struct append_call c)
{
    const struct append_place at = c.places[blockIdx.x];
    const uint32_t half = c.dim / 2, n_heads = c.heads + 2 * c.kv_heads, lane = threadIdx.x % 32;
    const uint32_t head = blockIdx.y * APPEND_HEADS + threadIdx.x / 32;
    float a[MAX_LANE_PAIRS], b[MAX_LANE_PAIRS], sum = 0;
    allow_next_kernel();
    wait_for_kernel_before();
    if (at.row == ~0u || head >= n_heads)
        return;
    const float *from = c.qkv + ((size_t)at.row * n_heads + head) * c.dim;
    const float *bias = c.bias == NULL ? NULL : c.bias + (size_t)head * c.dim;
    const float *gain = head < c.heads ? c.q_norm : head < c.heads + c.kv_heads ? c.k_norm : NULL;
#pragma unroll
    for (uint32_t j = 0; j < MAX_LANE_PAIRS; j++) {
        const uint32_t x = lane + 32 * j;
        a[j] = x < half ? from[x] : 0;
        b[j] = x < half ? from[x + half] : 0;
        if (bias != NULL && x < half) {
            a[j] += bias[x];
            b[j] += bias[x + half];
        }
        sum += a[j] * a[j] + b[j] * b[j];
    }
    for (uint32_t d = 16; d > 0; d /= 2)
        sum += __shfl_xor_sync(~0u, sum, d);
    const float scale = 1.0f / sqrtf(sum / (float)c.dim + c.norm_eps);
#pragma unroll
    for (uint32_t j = 0; j < MAX_LANE_PAIRS; j++) {
        const uint32_t x = lane + 32 * j;
        if (x >= half)
            break;
        if (gain != NULL) {
            a[j] *= scale * gain[x];
            b[j] *= scale * gain[x + half];
        }
        put_pair<N>(c, at, head, x, a[j], b[j]);
    }
}

/* Launched while the kernel before it still runs, as far as the device knows how. */
template <typename N> void launch(struct cuda_backend *b, const struct append_call *c)
{
    bool by_head = c->bias != NULL || c->q_norm != NULL;
    bool wide = !by_head && c->n_rows >= WIDE_ROWS && c->dim % 8 == 0 && c->dim <= 8 * WIDE_THREADS;
    uint32_t heads = c->heads + 2 * c->kv_heads;
    uint32_t n = by_head ? heads : heads * c->dim / 2,
             per_block = by_head ? APPEND_HEADS : APPEND_THREADS;
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t how = {};
    how.gridDim = dim3(c->n_rows, wide ? 1 : (n + per_block - 1) / per_block);
    how.blockDim = dim3(wide ? WIDE_THREADS : APPEND_THREADS);
    how.stream = b->stream;
    how.attrs = &early;
    how.numAttrs = b->overlaps ? 1 : 0;
    cuda_ok(b,
            cudaLaunchKernelEx(&how,
                               by_head ? append_heads_kernel<N>
                               : wide  ? append_wide_kernel<N>
                                       : append_kernel<N>,
                               *c),
            "append");
}

void run_append(struct cuda_backend *b, const void *params)
{
    const struct append_call *c = (const struct append_call *)params;
    if (c->fp8)
        launch<uint8_t>(b, c);
    else
        launch<__nv_bfloat16>(b, c);
}

} /* namespace */

void cuda_append(struct backend *be, const struct append_args *a)
{
    struct cuda_backend *b = (struct cuda_backend *)be;
    const struct kv_geometry *g = a->kv->geo;
    static_assert(64 * MAX_LANE_PAIRS >= CUDA_MAX_DIM, "append_heads_kernel");
    CHECK((a->q_norm == NULL) == (a->k_norm == NULL));
    if (!attend_fits(b, g, a->heads)) /* the first operation that sees heads */
        return;
    struct append_call c;
    memset(&c, 0, sizeof c);
    c.q = cuda_prefill_accept(b, a);
    attend_accept(b, a);
    c.places = append_places(b, a, c.q != NULL, &c.n_rows);
    if (c.places == NULL)
        return;
    for (uint32_t h = 0; h < g->kv_heads; h++) {
        struct lane_place place = kv_lane(g, a->layer, h);
        c.lanes[h] = place.index | (uint32_t)place.class_ << LANE_CLASS_SHIFT;
    }
    for (int i = 0; i < LANE_CLASSES; i++) {
        c.hbm[i] = (uint8_t *)a->kv->hbm[i];
        c.block_bytes[i] = g->block_bytes[i];
    }
    c.page_bytes = g->page_bytes;
    c.block_rows = g->block_rows;
    c.dim = g->head_dim;
    c.heads = a->heads;
    c.kv_heads = g->kv_heads;
    c.cos = a->rope_cos;
    c.sin = a->rope_sin;
    c.qkv = (float *)a->qkv;
    c.bias = a->bias;
    c.q_norm = a->q_norm;
    c.k_norm = a->k_norm;
    c.norm_eps = a->norm_eps;
    c.fp8 = g->type == KV_E4M3;
    cuda_do(b, run_append, &c, sizeof c);
}
