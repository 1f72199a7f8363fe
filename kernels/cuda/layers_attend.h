/* The attention of layers_kernel.h: a CTA has a KV head of a row and a split of its context. */
#ifndef KERNELS_CUDA_LAYERS_ATTEND_H
#define KERNELS_CUDA_LAYERS_ATTEND_H

#include "kernels/cuda/layers_product.h"

namespace layers
{

/* How the context of a row at `pos` is split. */
struct cut {
    uint32_t n, each; /* splits; positions of one, a multiple of LAYERS_SPLIT */
};

__device__ __forceinline__ struct cut cut_of(const struct layers_call &c, uint32_t pos)
{
    struct cut t;
    const uint32_t all = (pos + LAYERS_SPLIT) / LAYERS_SPLIT;
    uint32_t each = 1;
    if (all > c.splits)
        each = (all + c.splits - 1) / c.splits;
    t.each = each * LAYERS_SPLIT;
    t.n = each == 1 ? all : (all + each - 1) / each;
    return t;
}

/* Of n splits, at most N: their sum by mass. */
template <int ROWS, int N>
__device__ __forceinline__ void weigh(const struct layers_call &c, const uint4 v[2 * N],
                                      const uint64_t *mass, uint32_t n, uint32_t turn, float a[4])
{
    enum { GROUP = 16 };
    const uint32_t lane = threadIdx.x % GROUP;
    uint2 lse;
    uint32_t polls = 0;
    do
        lse = ask<ROWS>(mass + (lane < n ? lane : 0));
    while (asks_again(lse.y != turn, &polls));
    must_be_there(c, lse.y != turn);
    __syncwarp();
    float w = __uint_as_float(lse.x), top = w, sum;
#pragma unroll
    for (int d = LAYERS_SPLITS / 2; d > 0; d /= 2)
        top = fmaxf(top, __shfl_xor_sync(~0u, top, d, GROUP));
    sum = w = lane < n ? exp2_fast(w - top) : 0;
#pragma unroll
    for (int d = LAYERS_SPLITS / 2; d > 0; d /= 2)
        sum += __shfl_xor_sync(~0u, sum, d, GROUP);
    a[0] = a[1] = a[2] = a[3] = 0;
#pragma unroll
    for (uint32_t s = 0; s < N; s++) {
        const float of = __shfl_sync(~0u, __fdividef(w, sum), s, GROUP);
        if (s >= n)
            continue;
        a[0] = __fmaf_rn(of, __uint_as_float(v[2 * s].x), a[0]);
        a[1] = __fmaf_rn(of, __uint_as_float(v[2 * s].z), a[1]);
        a[2] = __fmaf_rn(of, __uint_as_float(v[2 * s + 1].x), a[2]);
        a[3] = __fmaf_rn(of, __uint_as_float(v[2 * s + 1].z), a[3]);
    }
}

/* Four numbers of a row's attention, merged over n <= N splits. mail: of the first split; mass: of all; 16 lanes are
 * within a head. */
template <int ROWS, int N>
__device__ __forceinline__ void merge(const struct layers_call &c, const uint64_t *mail,
                                      const uint64_t *mass, uint32_t n, uint32_t width,
                                      uint32_t turn, float a[4])
{
    const uint64_t *from[2 * N];
    uint4 v[2 * N];
#pragma unroll
    for (uint32_t s = 0; s < N; s++) {
        from[2 * s] = mail + (s < n ? s : 0) * width;
        from[2 * s + 1] = from[2 * s] + 2;
    }
    take_twos<ROWS, 2 * N>(c, from, turn, v);
    a[0] = __uint_as_float(v[0].x), a[1] = __uint_as_float(v[0].z);
    a[2] = __uint_as_float(v[1].x), a[3] = __uint_as_float(v[1].z);
    if constexpr (N > 1)
        weigh<ROWS, N>(c, v, mass, n, turn, a);
}

/* Results of attention, a thread has four numbers at a time. */
template <int DIM, int ROWS>
__device__ __forceinline__ void stage_attention(const struct layers_call &c,
                                                const struct shared *sh, const uint64_t *mail,
                                                const uint64_t *mass, __nv_bfloat16 *x,
                                                uint32_t turn)
{
    const uint32_t width = c.heads * DIM;
    const uint32_t per_row = (width / 4 + 31) / 32 * 32; /* threads: whole warps */
    uint32_t row = 0, at = threadIdx.x;
#pragma unroll 1
    for (;; at += THREADS) {
        for (; at >= per_row; at -= per_row)
            row++;
        if (row >= c.n_rows)
            break;
        const bool is = at * 4 < width;
        const uint32_t k = is ? at * 4 : 0, n = sh->n_splits[row]; /* the same in a warp */
        const uint64_t *from = mail + row * c.splits * width + k,
                       *masses = mass + (row * c.heads + k / DIM) * c.splits;
        float a[4];
        if (n == 1)
            merge<ROWS, 1>(c, from, masses, n, width, turn, a);
        else if (n <= LAYERS_SPLITS / 2)
            merge<ROWS, LAYERS_SPLITS / 2>(c, from, masses, n, width, turn, a);
        else
            merge<ROWS, LAYERS_SPLITS>(c, from, masses, n, width, turn, a);
        if (is)
            *(uint2 *)(x + row * staged_stride(c.att_steps) + k) =
                make_uint2(pack(a[0], a[1]), pack(a[2], a[3]));
    }
}

/* What a CTA attends. */
struct task {
    bool is;
    uint32_t row, head, split, pos, begin,
        end; /* positions [begin, end); end - 1 may be the row's own */
    const block_id *table;
    const uint8_t *dram; /* the lane's page of block 0, in a layer */
    uint8_t *hbm;
    size_t block_bytes;
};

/* But for the layer. */
__device__ __forceinline__ struct task find_task(const struct layers_call &c,
                                                 const struct shared *sh)
{
    struct task k = {};
    const uint32_t id = gridDim.x - 1 - blockIdx.x; /* the last CTAs have least to do */
    k.head = id % c.kv_heads;
    k.row = id / c.kv_heads % c.n_rows;
    k.split = id / (c.kv_heads * c.n_rows);
    if (k.split >= c.splits)
        return k;
    k.pos = sh->pos[k.row];
    const struct cut t = cut_of(c, k.pos);
    k.is = k.split < t.n;
    k.begin = k.split * t.each;
    k.end = min(k.pos + 1, k.begin + t.each);
    return k;
}

__device__ __forceinline__ void enter_layer(const struct layers_call &c, const struct shared *sh,
                                            struct task &k, uint32_t layer)
{
    const struct cuda_lane lane = c.lanes[layer * c.kv_heads + k.head];
    k.table = sh->table[k.row][lane.class_];
    k.block_bytes = c.block_bytes[lane.class_];
    k.hbm = c.hbm[lane.class_] + lane.index * c.page_bytes;
    k.dram = c.dram[lane.class_] + lane.index * c.page_bytes;
}

__device__ __forceinline__ uint8_t *page_of(const struct layers_call &c, const struct task &k,
                                            uint32_t pos)
{
    const block_id b = k.table[pos >> c.page_shift];
    return (b & BLOCK_IN_DRAM ? (uint8_t *)(uintptr_t)k.dram : k.hbm) +
           (size_t)(b & ~BLOCK_IN_DRAM) * k.block_bytes;
}

/* Asks for the pages of the task to come to L2: a lane has K or V of a position. */
template <int DIM>
__device__ __forceinline__ void call_for_pages(const struct layers_call &c, const struct shared *sh,
                                               struct task k, uint32_t layer)
{
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32_t in_page = (1u << c.page_shift) - 1;
    if (!k.is || layer >= c.n_layers)
        return;
    enter_layer(c, sh, k, layer);
#pragma unroll 1
    for (uint32_t p = k.begin + warp * 16 + lane % 16; p < min(k.end, k.pos); p += LAYERS_SPLIT) {
        const uint8_t *row =
            page_of(c, k, p) + ((size_t)((lane / 16) << c.page_shift) + (p & in_page)) * DIM * 2;
#pragma unroll
        for (uint32_t i = 0; i < DIM / 64; i++)
            asm volatile("prefetch.global.L2 [%0];" ::"l"(row + i * 128));
    }
}

/* Operands of a warp: K and V of 16 positions. k: of positions g and g + 8; v: of 2t, 2t + 1, 2t + 8, 2t + 9. */
template <int DIM> struct tile {
    uint4 k[2][DIM / 32], v[4][DIM / 64];
};

/* Of positions from `base` on; the row's own is not there yet. */
template <int DIM>
__device__ __forceinline__ void load_tile(const struct layers_call &c, const struct task &k,
                                          uint32_t base, struct tile<DIM> &to)
{
    const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const uint32_t in_page = (1u << c.page_shift) - 1, end = min(k.end, k.pos);
#pragma unroll
    for (uint32_t half = 0; half < 2; half++) {
        const uint32_t at = base + half * 8;
        const uint8_t *page = at < end ? page_of(c, k, at) : NULL;
        const uint8_t *key = page + (size_t)((at + g) & in_page) * DIM * 2 + t * 16;
#pragma unroll
        for (uint32_t i = 0; i < DIM / 32; i++)
            to.k[half][i] = at + g < end ? *(const uint4 *)(key + i * 64) : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (uint32_t odd = 0; odd < 2; odd++) {
            const uint32_t p = at + t * 2 + odd;
            const uint8_t *value =
                page + ((size_t)DIM * 2 << c.page_shift) + (size_t)(p & in_page) * DIM * 2 + g * 16;
#pragma unroll
            for (uint32_t i = 0; i < DIM / 64; i++)
                to.v[half * 2 + odd][i] =
                    p < end ? *(const uint4 *)(value + i * 128) : make_uint4(0, 0, 0, 0);
        }
    }
}

/* The row's own position, from shared memory. */
template <int DIM>
__device__ __forceinline__ void patch_tile(const struct shared *sh, const struct task &k,
                                           uint32_t base, struct tile<DIM> &to)
{
    const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (uint32_t half = 0; half < 2; half++) {
        if (base + half * 8 + g == k.pos)
#pragma unroll
            for (uint32_t i = 0; i < DIM / 32; i++)
                to.k[half][i] = *(const uint4 *)(sh->k + i * 32 + t * 8);
#pragma unroll
        for (uint32_t odd = 0; odd < 2; odd++)
            if (base + half * 8 + t * 2 + odd == k.pos)
#pragma unroll
                for (uint32_t i = 0; i < DIM / 64; i++)
                    to.v[half * 2 + odd][i] = *(const uint4 *)(sh->v + i * 64 + g * 8);
    }
}

/* A head of q, k or v from the mail to shared memory, with all that comes before attention; a warp. Products and
 * sums round as in append.cu. Head group is k, group + 1 is v, which go to their page too. */
template <int DIM, int ROWS>
__device__ __forceinline__ void take_head(const struct layers_call &c, const struct layers_layer &w,
                                          const struct task &k, struct shared *sh,
                                          const uint64_t *mail, uint32_t j, uint32_t turn)
{
    enum { PAIRS = DIM / 64, HALF = DIM / 2 };
    const uint32_t lane = threadIdx.x % 32, is_k = j == c.group, is_v = j == c.group + 1;
    const uint32_t head = is_v   ? c.heads + c.kv_heads + k.head
                          : is_k ? c.heads + k.head
                                 : k.head * c.group + j;
    const uint64_t *from = mail + ((size_t)k.row * (c.heads + 2 * c.kv_heads) + head) * DIM + lane;
    uint32_t a_bits[PAIRS], b_bits[PAIRS];
    float cos[PAIRS], sin[PAIRS], a[PAIRS], b[PAIRS], sum = 0;
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        cos[i] = is_v ? 1 : c.cos[(size_t)k.pos * HALF + lane + 32 * i];
        sin[i] = is_v ? 0 : c.sin[(size_t)k.pos * HALF + lane + 32 * i];
    }
    __nv_bfloat16 *to = is_v ? sh->v : is_k ? sh->k : sh->q[j];
    __nv_bfloat16 *page = NULL;
    if (is_v || is_k) {
        const uint32_t in_page = (1u << c.page_shift) - 1;
        page = (__nv_bfloat16 *)page_of(c, k, k.pos) +
               (size_t)((is_v << c.page_shift) + (k.pos & in_page)) * DIM;
    }
    bool late;
    uint32_t polls = 0;
    do {
        uint2 v[2 * PAIRS];
#pragma unroll
        for (int i = 0; i < 2 * PAIRS; i++)
            v[i] = ask<ROWS>(from + 32 * i);
        late = false;
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            a_bits[i] = v[i].x;
            b_bits[i] = v[PAIRS + i].x;
            late |= (v[i].y ^ turn) | (v[PAIRS + i].y ^ turn);
        }
    } while (asks_again(late, &polls));
    must_be_there(c, late);
    const float *bias = w.bias == NULL ? NULL : w.bias + head * DIM;
    const float *gain = is_v ? NULL : is_k ? w.k_norm : w.q_norm;
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        const uint32_t x = lane + 32 * i;
        a[i] = __uint_as_float(a_bits[i]) + (bias != NULL ? bias[x] : 0);
        b[i] = __uint_as_float(b_bits[i]) + (bias != NULL ? bias[x + HALF] : 0);
        sum += a[i] * a[i] + b[i] * b[i];
    }
    if (gain != NULL) {
#pragma unroll
        for (uint32_t d = 16; d > 0; d /= 2)
            sum += __shfl_xor_sync(~0u, sum, d);
        const float scale = 1.0f / sqrtf(sum / (float)DIM + c.eps);
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            a[i] *= scale * gain[lane + 32 * i];
            b[i] *= scale * gain[lane + 32 * i + HALF];
        }
    }
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        const uint32_t x = lane + 32 * i;
        float p = a[i], q = b[i];
        if (!is_v) {
            p = __fsub_rn(__fmul_rn(a[i], cos[i]), __fmul_rn(b[i], sin[i]));
            q = __fadd_rn(__fmul_rn(b[i], cos[i]), __fmul_rn(a[i], sin[i]));
        }
        to[x] = __float2bfloat16_rn(p);
        to[x + HALF] = __float2bfloat16_rn(q);
        if (page != NULL) {
            page[x] = __float2bfloat16_rn(p);
            page[x + HALF] = __float2bfloat16_rn(q);
        }
    }
}

/* Of query g. */
template <int DIM> struct sums {
    float m, l, o[DIM / 64][8][4]; /* o: of dimensions 64 i + 16 t + j and + 8 */
};

/* Adds 16 positions from `base` on. */
template <int DIM>
__device__ __forceinline__ void attend_tile(const struct layers_call &c, const struct task &k,
                                            uint32_t base, const uint4 q[DIM / 32],
                                            const struct tile<DIM> &in, struct sums<DIM> &sum)
{
    const uint32_t t = threadIdx.x % 4;
    float s[2][4] = {};
#pragma unroll
    for (uint32_t half = 0; half < 2; half++)
#pragma unroll
        for (uint32_t i = 0; i < DIM / 32; i++) {
            const uint4 b = in.k[half][i];
            tensor(s[half], q[i].x, 0, q[i].y, 0, b.x, b.y);
            tensor(s[half], q[i].z, 0, q[i].w, 0, b.z, b.w);
        }
    float top = sum.m;
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        float *v = &s[i / 2][i % 2];
        *v = base + i / 2 * 8 + t * 2 + i % 2 < k.end ? *v * c.scale : -INFINITY;
        top = fmaxf(top, *v);
    }
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    const float alpha = exp2_fast(sum.m - top);
    sum.m = top;
    sum.l *= alpha;
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        s[i / 2][i % 2] = exp2_fast(s[i / 2][i % 2] - top);
        sum.l += s[i / 2][i % 2];
    }
    const uint32_t p0 = pack(s[0][0], s[0][1]), p1 = pack(s[1][0], s[1][1]);
#pragma unroll
    for (uint32_t i = 0; i < DIM / 64; i++)
#pragma unroll
        for (uint32_t j = 0; j < 8; j++) {
            float *o = sum.o[i][j];
            o[0] *= alpha;
            o[1] *= alpha;
            const uint32_t which = j % 2 ? 0x7632 : 0x5410, at = j / 2;
            const uint32_t *v0 = &in.v[0][i].x, *v1 = &in.v[1][i].x, *v2 = &in.v[2][i].x,
                           *v3 = &in.v[3][i].x;
            tensor(o, p0, 0, p1, 0, __byte_perm(v0[at], v1[at], which),
                   __byte_perm(v2[at], v3[at], which));
        }
}

/* The warps' sums to one result, to the mail. */
template <int DIM, int ROWS>
__device__ __forceinline__ void meet(const struct layers_call &c, const struct task &k,
                                     struct shared *sh, struct sums<DIM> &sum, uint64_t *mail,
                                     uint64_t *mass, uint32_t turn)
{
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    sum.l += __shfl_xor_sync(~0u, sum.l, 1);
    sum.l += __shfl_xor_sync(~0u, sum.l, 2);
    if (t == 0) {
        sh->m[warp][g] = sum.m;
        sh->l[warp][g] = sum.l;
    }
    if (g < c.group)
#pragma unroll
        for (uint32_t i = 0; i < DIM / 64; i++)
#pragma unroll
            for (uint32_t j = 0; j < 16; j += 4) {
                const float(*o)[4] = &sum.o[i][j % 8];
                *(float4 *)&sh->o[warp][g][i * 64 + t * 16 + j] =
                    j < 8 ? make_float4(o[0][0], o[1][0], o[2][0], o[3][0])
                          : make_float4(o[0][1], o[1][1], o[2][1], o[3][1]);
            }
    __syncthreads();
#pragma unroll 1
    for (uint32_t e = threadIdx.x; e < c.group * DIM / 2; e += THREADS) {
        const uint32_t query = e / (DIM / 2), d = e % (DIM / 2) * 2;
        float top = LOWEST, l = 0, a = 0, b = 0;
#pragma unroll
        for (uint32_t w = 0; w < WARPS; w++)
            top = fmaxf(top, sh->m[w][query]);
#pragma unroll
        for (uint32_t w = 0; w < WARPS; w++) {
            const float f = exp2_fast(sh->m[w][query] - top);
            const float2 o = *(const float2 *)&sh->o[w][query][d];
            l = __fmaf_rn(sh->l[w][query], f, l);
            a = __fmaf_rn(o.x, f, a);
            b = __fmaf_rn(o.y, f, b);
        }
        const uint32_t head = k.head * c.group + query;
        post_two<ROWS>(mail + ((size_t)k.row * c.splits + k.split) * c.heads * DIM + head * DIM + d,
                       __fdividef(a, l), __fdividef(b, l), turn);
        if (d == 0)
            post<ROWS>(mass + ((size_t)k.row * c.heads + head) * c.splits + k.split,
                       __float_as_uint(top + __log2f(l)), turn);
    }
}

/* The task's attention. */
template <int DIM, int ROWS>
__device__ __forceinline__ void attend(const struct layers_call &c, const struct layers_layer &w,
                                       const struct task &k, struct shared *sh, uint64_t *mail,
                                       uint32_t turn)
{
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const bool last = k.end == k.pos + 1;
    struct tile<DIM> in;
    struct sums<DIM> sum = {
    };
    uint4 q[DIM / 32];
    sum.m = LOWEST;
    for (uint32_t first = k.begin; first < k.end; first += LAYERS_SPLIT) {
        const uint32_t base = first + warp * 16;
        if (base < k.end)
            load_tile<DIM>(c, k, base, in);
        if (first == k.begin) {
#pragma unroll 1
            for (uint32_t j = warp; j < c.group + (last ? 2 : 0); j += WARPS)
                take_head<DIM, ROWS>(c, w, k, sh, mail + c.at.qkv, j, turn);
            __syncthreads();
#pragma unroll
            for (uint32_t i = 0; i < DIM / 32; i++)
                q[i] = *(const uint4 *)&sh->q[lane / 4][i * 32 + lane % 4 * 8];
        }
        if (base >= k.end)
            continue;
        if (base + 16 > k.pos)
            patch_tile<DIM>(sh, k, base, in);
        attend_tile<DIM>(c, k, base, q, in, sum);
    }
    meet<DIM, ROWS>(c, k, sh, sum, mail + c.at.att, mail + c.at.mass, turn);
}

} /* namespace layers */

#endif
