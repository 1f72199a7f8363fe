/* The first half of the plan kernel (plan.cu): scores of a CTA's pieces, and the keys of its partitions. */
#ifndef KERNELS_CUDA_PLAN_SCAN_H
#define KERNELS_CUDA_PLAN_SCAN_H

#include "kernels/cuda/plan_talk.h"

/* ---- scores ---- */

template <int W> __device__ struct plan_lane lane_of(const struct plan_call *c)
{
    struct plan_lane l;
    l.ranks = c->ranks;
    l.lane = blockIdx.x / c->ranks;
    l.rank = blockIdx.x % c->ranks;
    const uint32_t head = l.lane % c->kv_heads;
    const struct cuda_row *row = &c->rows[l.lane / c->kv_heads];
    const struct cuda_lane place = c->lanes[head];
    l.n_pieces = row->n_segments * c->pieces;
    l.selected = row->budget >> c->rows_log2;
    l.estimated = min(row->estimate, c->estimate_cap);
    l.records = row->records;
    l.blocks = c->resolves != 0 && !row->spilled ? row->blocks : NULL;
    l.vectors = c->vectors + place.index * c->record_lane_bytes;
    l.query = c->q + row->row * c->q_stride + (size_t)head * c->group * DIM;
    l.exists = row->row != ~0u && place.class_ == LANE_SPARSE;
    const uint32_t per = (l.n_pieces + l.ranks - 1) / l.ranks, per_warp = (per + W - 1) / W;
    const uint32_t end = min(l.n_pieces, (l.rank + 1) * per);
    l.first_piece = min(end, l.rank * per + threadIdx.x / 32 * per_warp);
    l.n_warp = min(per_warp, end - l.first_piece);
    return l;
}

/* Scores of a warp's pieces from where the score kernel put them; what is none is -inf. */
template <int P>
__device__ static void load(const struct plan_call *c, const struct plan_lane *l, float x[P][2][4])
{
    const uint32_t lane = threadIdx.x % 32, t = lane % 4;
    const float *from = c->scores + ((size_t)l->lane * c->group + t) * c->stride;
    wait_for_kernel_before();
#pragma unroll
    for (uint32_t k = 0; k < P * 2; k++) {
        const uint32_t i = (l->first_piece + k / 2) * PARTS + k % 2 * 32 + lane / 4 * 4;
        float4 v = make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY);
        if (k / 2 < l->n_warp && t < c->group)
            v = *(const float4 *)(from + i);
        float *to = x[k / 2][k % 2];
        to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
    }
#pragma unroll
    for (uint32_t k = 0; k < P * 8; k++) {
        const uint32_t i = (l->first_piece + k / 8) * PARTS + k / 4 % 2 * 32 + lane / 4 * 4 + k % 4;
        float *v = &x[k / 8][k / 4 % 2][k % 4];
        *v = i < c->first ? -INFINITY : fmaxf(*v, -INFINITY); /* NaN is none */
    }
}

/* Half of a piece, 9 KiB in a row: base, step and 32 vectors, then 32 more. */
template <int HALF> __device__ static inline void copy_half(const uint8_t *from, uint32_t to)
{
    const uint32_t lane = threadIdx.x % 32;
    if (HALF == 0)
#pragma unroll
        for (uint32_t i = 0; i < HEAD_BYTES / 512; i++)
            copy_16(to + (i * 32 + lane) * 16, from + (i * 32 + lane) * 16, true);
    from += HEAD_BYTES + HALF * HALF_BYTES;
    to += HEAD_BYTES + HALF * HALF_BYTES;
#pragma unroll
    for (uint32_t i = 0; i < HALF_BYTES / 512; i++)
        copy_16(to + swizzled(i * 32 + lane) * 16, from + (i * 32 + lane) * 16, true);
}

/* A query folded into a piece's steps. */
struct folded {
    uint32_t b[DIM / 32][2];
    float factor, offset;
};

/* Scores of half a piece as they stay in registers, and to where attention finds those of estimates. */
__device__ static inline void score_half(const struct plan_call *c, const struct plan_lane *l,
                                         uint32_t piece, uint32_t half, const uint8_t *stage,
                                         const struct folded *q, float y[4])
{
    const uint32_t lane = threadIdx.x % 32, t = lane % 4, p = half * 32 + lane / 4 * 4;
    tile_dots<DIM, true>(shared_address(stage) + HEAD_BYTES + half * HALF_BYTES, DIM, q->b, y);
#pragma unroll
    for (uint32_t e = 0; e < 4; e++) {
        y[e] = fmaf(y[e], q->factor, q->offset) + c->log_rows;
        if (t >= c->group || (piece == 0 && p + e < c->first))
            y[e] = -INFINITY;
    }
    if (t < c->group)
        *(float4 *)(c->scores + ((size_t)l->lane * c->group + t) * c->stride + piece * PARTS + p) =
            make_float4(y[0], y[1], y[2], y[3]);
}

/* All pieces of a warp; what it has not is -inf. D of them are in shared memory at a time; the place of a half is
 * filled again as soon as it has been read. Digests depend on no query: the first are on their way before the
 * kernel in front has ended. */
template <int P, int D>
__device__ static void scan(const struct plan_call *c, const struct plan_lane *l, uint8_t *ring,
                            float x[P][2][4])
{
    const uint32_t lane = threadIdx.x % 32, g = lane / 4, n = l->n_warp;
    const uint8_t *own = ring + threadIdx.x / 32 * (D * PIECE_BYTES);
    const uint32_t record = lane < n ? l->records[l->first_piece + lane] : 0;
    const uint32_t to = shared_address(own);
    auto from = [&](uint32_t i) {
        return l->vectors + __shfl_sync(~0u, record, i % 32) * c->record_bytes;
    };
#pragma unroll
    for (uint32_t i = 0; i < D; i++) {
        const uint8_t *next = from(i);
        if (i < n)
            copy_half<0>(next, to + i * PIECE_BYTES);
        copies_end_group();
        if (i < n)
            copy_half<1>(next, to + i * PIECE_BYTES);
        copies_end_group();
    }
    wait_for_kernel_before();
    half_query<DIM> q;
    load_query<DIM, true>(&q, l->query + g / 2 * DIM, g / 2 < c->group, DIM);
#pragma unroll
    for (int j = 0; j < P * 8; j++)
        x[j / 8][j / 4 % 2][j % 4] = -INFINITY;
#pragma unroll 1
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t place = i % D * PIECE_BYTES;
        const bool more = P > D && i + D < n;
        const uint8_t *stage = own + place, *next = from(i + D);
        struct folded f;
        float y[2][4];
        copies_wait<2 * D - 1>();
        __syncwarp();
        fold_query<DIM, true>(q, (const float *)stage, DIM, c->scale, f.b, &f.factor, &f.offset);
        score_half(c, l, l->first_piece + i, 0, stage, &f, y[0]);
        __syncwarp(); /* all have read it */
        if (more)
            copy_half<0>(next, to + place);
        copies_end_group();
        copies_wait<2 * D - 1>();
        __syncwarp();
        score_half(c, l, l->first_piece + i, 1, stage, &f, y[1]);
        __syncwarp();
        if (more)
            copy_half<1>(next, to + place);
        copies_end_group();
#pragma unroll
        for (uint32_t k = 0; k < P; k++)
#pragma unroll
            for (int j = 0; j < 8; j++)
                if (k == i)
                    x[k][j / 4][j % 4] = y[j / 4][j % 4];
    }
    copies_wait<0>();
}

/* ---- shares ---- */

/* The greatest score of this lane's head, over the cluster. */
template <int W, int P>
__device__ static uint32_t head_top(struct plan_shared *s, const struct plan_lane *l,
                                    const float x[P][2][4])
{
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float top = -INFINITY;
#pragma unroll
    for (int j = 0; j < P * 8; j++)
        top = fmaxf(top, x[j / 8][j / 4 % 2][j % 4]);
#pragma unroll
    for (int d = 4; d < 32; d *= 2)
        top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
    if (lane < 4)
        s->warp_top[warp][lane] = top > -INFINITY ? key_of(top) : 0;
    __syncthreads();
    await_ranks(l->ranks);
    if (threadIdx.x < 4 * l->ranks) {
        uint32_t most = 0;
#pragma unroll
        for (int w = 0; w < W; w++)
            most = max(most, s->warp_top[w][threadIdx.x % 4]);
        tell(s, TOLD_TOP, &s->top[l->rank][threadIdx.x % 4], most, threadIdx.x / 4, l->ranks);
    }
    hear(s, TOLD_TOP, l->ranks);
    uint32_t most = 0;
#pragma unroll
    for (uint32_t r = lane / 4; r < RANKS; r += 8)
        most = max(most, r < l->ranks ? s->top[r][lane % 4] : 0);
#pragma unroll
    for (int d = 4; d < 32; d *= 2)
        most = max(most, __shfl_xor_sync(~0u, most, d));
    return most;
}

/* The sum of its exponentials, which take the place of scores. */
template <int W, int P>
__device__ static unsigned long long head_sum(struct plan_shared *s, const struct plan_lane *l,
                                              float shift, float x[P][2][4])
{
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    unsigned long long sum = 0;
#pragma unroll
    for (int j = 0; j < P * 8; j++) {
        float *v = &x[j / 8][j / 4 % 2][j % 4];
        *v = exponential(*v, shift);
        sum += __float2uint_rn(*v * SUM_UNIT);
    }
#pragma unroll
    for (int d = 4; d < 32; d *= 2)
        sum += __shfl_xor_sync(~0u, sum, d);
    if (lane < 4)
        s->warp_sum[warp][lane] = sum;
    __syncthreads();
    if (threadIdx.x < 4 * l->ranks) {
        unsigned long long all = 0;
#pragma unroll
        for (int w = 0; w < W; w++)
            all += s->warp_sum[w][threadIdx.x % 4];
        tell(s, TOLD_SUM, &s->sum[l->rank][threadIdx.x % 4], all, threadIdx.x / 4, l->ranks);
    }
    hear(s, TOLD_SUM, l->ranks);
    sum = 0;
#pragma unroll
    for (uint32_t r = lane / 4; r < RANKS; r += 8)
        sum += r < l->ranks ? s->sum[r][lane % 4] : 0;
#pragma unroll
    for (int d = 4; d < 32; d *= 2)
        sum += __shfl_xor_sync(~0u, sum, d);
    return sum;
}

/* What exponentials become shares by, and the limit of a share of the group as a key: select.cu's head_sums. */
__device__ static float share_factor(const struct plan_call *c, const struct plan_lane *l,
                                     uint32_t top, unsigned long long sum, float known,
                                     uint32_t *most)
{
    const uint32_t t = threadIdx.x % 4;
    float z = (float)sum * (1.0f / SUM_UNIT), factor, limit, all = 0;
    if (top == 0) { /* a head without scores has no say, or all are alike to it */
        factor = c->known != NULL ? 0.0f : 0x1p100f / (float)(l->n_pieces * PARTS);
        limit = c->known != NULL ? 0.0f : 1.0f / (float)(l->n_pieces * PARTS);
    } else {
        if (c->known != NULL) {
            float x = known - rank_of(top);
            z += x < -87.0f ? 0.0f : expf(fminf(x, 88.0f));
        }
        factor = limit = z > 0 ? 1.0f / z : 0.0f;
    }
    if (t >= c->group)
        factor = limit = 0.0f;
#pragma unroll
    for (uint32_t h = 0; h < 4; h++) {
        float of = __shfl_sync(~0u, limit, h, 4);
        all = c->sum ? all + of : fmaxf(all, of);
    }
    *most = key_of(all) + (1u << 20); /* for what is rounded up */
    return factor;
}

/* Of lanes 4g .. 4g + 3, lane t has number t of each, in order. */
__device__ static inline void turn(float v[4])
{
    const uint32_t t = threadIdx.x % 4;
    const bool odd = t % 2, high = t / 2;
    float a = __shfl_xor_sync(~0u, odd ? v[0] : v[1], 1);
    float b = __shfl_xor_sync(~0u, odd ? v[2] : v[3], 1);
    /* of partition `odd` and 2 + odd: heads t & ~1 and t | 1 */
    float p0 = odd ? a : v[0], p1 = odd ? v[1] : a, q0 = odd ? b : v[2], q1 = odd ? v[3] : b;
    float x = __shfl_xor_sync(~0u, high ? p0 : q0, 2), y = __shfl_xor_sync(~0u, high ? p1 : q1, 2);
    v[0] = high ? x : p0;
    v[1] = high ? y : p1;
    v[2] = high ? q0 : x;
    v[3] = high ? q1 : y;
}

/* Of lanes 4g .. 4g + 3, each with a head's shares of four partitions: lane t gets the sum of number t over heads, in
 * the order of heads ... */
__device__ static inline float sum_of_heads(float v[4])
{
    turn(v);
    return __fadd_rn(__fadd_rn(__fadd_rn(v[0], v[1]), v[2]), v[3]);
}

/* ... or the greatest, in any. */
__device__ static inline float most_of_heads(const float v[4])
{
    const bool odd = threadIdx.x % 2, high = threadIdx.x / 2 % 2;
    const float a = __shfl_xor_sync(~0u, odd ? v[0] : v[1], 1);
    const float b = __shfl_xor_sync(~0u, odd ? v[2] : v[3], 1);
    const float low = fmaxf(odd ? v[1] : v[0], a), up = fmaxf(odd ? v[3] : v[2], b);
    return fmaxf(high ? up : low, __shfl_xor_sync(~0u, high ? low : up, 2));
}

/* Partitions of this lane's that have a score from some head: a bit each, in the order of x. */
template <int P> struct marks {
    uint32_t of[(P + 3) / 4];
};

template <int P> __device__ void mark(struct marks<P> *m, const float x[P][2][4])
{
#pragma unroll
    for (int w = 0; w < (P + 3) / 4; w++) {
        uint32_t some = 0;
#pragma unroll
        for (int j = 0; j < 32; j++)
            if (w * 4 + j / 8 < P)
                some |= (uint32_t)(x[w * 4 + j / 8][j / 4 % 2][j % 4] > -INFINITY) << j;
        some |= __shfl_xor_sync(~0u, some, 1);
        some |= __shfl_xor_sync(~0u, some, 2);
        m->of[w] = some;
    }
}

/* Bins of distances from a limit: 16 an octave for 16 octaves, then 4 for 32, then 2. By `shift` 18 instead
 * of 19: twice as fine. */
enum { FINE = 256, COARSE = 128 };

__device__ static inline uint32_t bin_of(uint32_t distance, uint32_t shift)
{
    const uint32_t fine = min(distance, (uint32_t)FINE << shift);
    const uint32_t coarse = min(distance - fine, (uint32_t)COARSE << (shift + 2));
    const uint32_t rest = distance - fine - coarse;
    return min((fine >> shift) + (coarse >> (shift + 2)) + (rest >> (shift + 3)),
               (uint32_t)BINS - 1);
}

/* The least distance behind a bin. */
__device__ static inline uint32_t end_of_bin(uint32_t bin, uint32_t shift)
{
    const uint32_t n = bin + 1, fine = min(n, (uint32_t)FINE);
    const uint32_t coarse = min(n - fine, (uint32_t)COARSE);
    return (fine << shift) + (coarse << (shift + 2)) + ((n - fine - coarse) << (shift + 3));
}

/* Keys of partitions j * 32 + lane; 0: no candidate. Counts them in bins. */
template <int P>
__device__ static void make_keys(struct plan_shared *s, const struct plan_call *c,
                                 const struct marks<P> *m, float factor, uint32_t most,
                                 float x[P][2][4], uint32_t key[P * 2])
{
    uint32_t best = 0;
#pragma unroll
    for (int j = 0; j < P * 2; j++) {
        float *v = x[j / 2][j % 2];
#pragma unroll
        for (int e = 0; e < 4; e++)
            v[e] = __fmul_rn(v[e], factor); /* 0 of heads that there are not */
        const float r = c->sum ? sum_of_heads(v) : most_of_heads(v);
        bool has = m->of[j / 8] >> (j % 8 * 4 + threadIdx.x % 4) & 1;
        key[j] = has ? key_of(r) : 0;
        best = max(best, key[j]);
        if (has) {
            uint32_t bin = bin_of(most - key[j], c->shift);
            atomicAdd(&s->hist[bin / 2], 1u << bin % 2 * 16);
        }
    }
    best = __reduce_max_sync(~0u, best);
    if (threadIdx.x % 32 == 0)
        atomicMax(&s->own_best, best);
}

#endif
