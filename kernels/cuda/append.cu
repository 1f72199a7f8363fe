/* RoPE on q and k, and k and v into their pages; before it biases and norms of heads, where the
 * architecture has them.
 *
 * Rows carry their position and their block of every class (attend_list.cu), so the kernel knows nothing
 * of sequences. */
#include "kernels/cuda/attend_mma.h"

#include <string.h>

namespace
{

enum { APPEND_THREADS = 512, APPEND_HEADS = APPEND_THREADS / 32, MAX_LANE_PAIRS = 8 };

struct append_call {
    const struct append_place *places;
    uint32_t lanes[CUDA_MAX_KV_HEADS]; /* as of attend_call */
    uint8_t *hbm[LANE_CLASSES];
    size_t block_bytes[LANE_CLASSES], page_bytes;
    uint32_t n_rows, block_rows, dim, heads, kv_heads;
    const float *cos, *sin;
    float *qkv;
    const float *bias, *q_norm, *k_norm; /* NULL: none */
    float norm_eps;
};

/* Rotates pair x of a head and puts it where it belongs. Products and sums round apart, as on the CPU. */
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
    if (head < c.heads) {
        float *q = c.qkv + ((size_t)at.row * (c.heads + 2 * c.kv_heads) + head) * c.dim + x;
        q[0] = a;
        q[half] = b;
        return;
    }
    uint32_t kv = head - c.heads, is_v = kv >= c.kv_heads;
    uint32_t lane = c.lanes[kv - is_v * c.kv_heads], class_ = lane >> LANE_CLASS_SHIFT;
    uint32_t index = lane & ((1u << LANE_CLASS_SHIFT) - 1);
    __nv_bfloat16 *to =
        (__nv_bfloat16 *)(c.hbm[class_] + at.blocks[class_] * c.block_bytes[class_] +
                          index * c.page_bytes) +
        (size_t)(is_v * c.block_rows + at.pos % c.block_rows) * c.dim + x;
    to[0] = __float2bfloat16_rn(a);
    to[half] = __float2bfloat16_rn(b);
}

/* A thread has a pair (i, i + dim / 2) of a head of a row. Bound by HBM in prefill (12 bytes
 * per number of q, 6 per number of k and v), by its launch in decode. Op: append. */
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
    put_pair(c, at, head, x, from[0], from[half]);
}

/* A warp has a head of a row, a lane the pairs lane, lane + 32, ... Bound as append_kernel. Assumes
 * dim <= 64 * MAX_LANE_PAIRS. Op: append, of architectures with biases or norms of heads. */
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
        put_pair(c, at, head, x, a[j], b[j]);
    }
}

/* Launched while the kernel before it still runs, as far as the device knows how. */
void run_append(struct cuda_backend *b, const void *params)
{
    const struct append_call *c = (const struct append_call *)params;
    bool by_head = c->bias != NULL || c->q_norm != NULL;
    uint32_t heads = c->heads + 2 * c->kv_heads;
    uint32_t n = by_head ? heads : heads * c->dim / 2,
             per_block = by_head ? APPEND_HEADS : APPEND_THREADS;
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t how = {};
    how.gridDim = dim3(c->n_rows, (n + per_block - 1) / per_block);
    how.blockDim = dim3(APPEND_THREADS);
    how.stream = b->stream;
    how.attrs = &early;
    how.numAttrs = b->overlaps ? 1 : 0;
    cuda_ok(b, cudaLaunchKernelEx(&how, by_head ? append_heads_kernel : append_kernel, *c),
            "append");
}

} /* namespace */

void cuda_append(struct backend *be, const struct append_args *a)
{
    struct cuda_backend *b = (struct cuda_backend *)be;
    const struct kv_geometry *g = a->kv->geo;
    CHECK(g->head_dim % 2 == 0 && g->kv_heads <= CUDA_MAX_KV_HEADS);
    CHECK(g->head_dim <= 64 * MAX_LANE_PAIRS && (a->q_norm == NULL) == (a->k_norm == NULL));
    struct append_call c;
    memset(&c, 0, sizeof c);
    c.places = append_places(b, a, &c.n_rows);
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
    cuda_do(b, run_append, &c, sizeof c);
}
