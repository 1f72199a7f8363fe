/* SCORE_BOUND: an upper bound of q.k in a partition, from channel-wise min and max (Quest).
 *
 * The greatest of q_c min_c and q_c max_c is q_c+ max_c + q_c- min_c: a matrix product. Keys are bf16 and
 * so are the bounds; the query is the sum of two bf16 numbers, two columns of a matrix instruction. What
 * that leaves out is 2^-18 of each term; sums inside an instruction are cut off, not rounded, so the slack is
 * twice the CPU's: (8 dim + 16) 2^-24 of what the terms weigh.
 *
 * Bound by HBM: 4 bytes per channel and partition, read once, 16 bytes a lane straight into operands; the
 * next eight loads are under way while the last are multiplied. */
#include "kernels/cuda/score.h"

#include <string.h>

namespace
{

enum { STEP_PAIRS = 4, STEPS_AHEAD = 4, BOUND_PARTS = 2 * DIGEST_TILE };

/* Operands for all warps of a CTA, and |q| for the slack. */
template <int NT> struct bound_query {
    uint2 b[NT][SCORE_MAX_DIM / 8][32]; /* [step][lane]: q-, q+ of a pair of channels */
    float size[NT * SCORE_HEADS][SCORE_MAX_DIM];
};

__device__ inline uint32_t plane_pair(float x, float y, bool low)
{
    __nv_bfloat162 high = __floats2bfloat162_rn(x, y);
    if (low)
        high = __floats2bfloat162_rn(x - __low2float(high), y - __high2float(high));
    return *reinterpret_cast<uint32_t *>(&high);
}

template <int NT>
__device__ void make_query(bound_query<NT> *out, const struct score_call *c,
                           const struct score_place *at, uint32_t h0, uint32_t steps)
{
    for (uint32_t i = threadIdx.x; i < NT * steps * 32; i += SCORE_THREADS) {
        uint32_t n = i / (steps * 32), s = i / 32 % steps, lane = i % 32, g = lane / 4,
                 t = lane % 4;
        uint32_t h = h0 + n * SCORE_HEADS + g / 2, x = (s * STEP_PAIRS + t) * 2;
        float2 q = make_float2(0, 0);
        if (h < c->group && x < c->dim)
            q = *(const float2 *)(score_query(c, at, h) + x);
        out->b[n][s][lane] = make_uint2(plane_pair(fminf(q.x, 0.0f), fminf(q.y, 0.0f), g % 2),
                                        plane_pair(fmaxf(q.x, 0.0f), fmaxf(q.y, 0.0f), g % 2));
        if (g % 2 == 0 && x < c->dim) {
            out->size[n * SCORE_HEADS + g / 2][x] = fabsf(q.x);
            out->size[n * SCORE_HEADS + g / 2][x + 1] = fabsf(q.y);
        }
    }
    __syncthreads();
}

/* What rounding may lose, for head t in lanes with that t. */
template <int NT>
__device__ void slack_of(const bound_query<NT> *q, const struct score_call *c,
                         const float *magnitude, float slack[NT])
{
    const uint32_t lane = threadIdx.x % 32, t = lane % 4;
    float sum[NT] = {};
    for (uint32_t x = lane / 4; x < c->dim; x += 8)
#pragma unroll
        for (int n = 0; n < NT; n++)
            sum[n] = fmaf(q->size[n * SCORE_HEADS + t][x], magnitude[x], sum[n]);
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
        for (int k = 4; k <= 16; k *= 2)
            sum[n] += __shfl_xor_sync(~0u, sum[n], k);
        slack[n] = sum[n] * ((float)(8 * max(c->dim, 12u) + 16) * 0x1p-24f);
    }
}

/* A warp: 32 partitions of a segment at a time, lane 4g + t those from 4 (g % 4) on of tile g / 4, two
 * channels of 8. Op: score. */
template <int DP, bool WHOLE, int NT>
__global__ void __launch_bounds__(SCORE_THREADS, 4)
    bound_kernel(const __grid_constant__ struct score_call c)
{
    extern __shared__ __align__(16) uint8_t shared[];
    bound_query<NT> *q = (bound_query<NT> *)shared;
    const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, dim = WHOLE ? DP : c.dim;
    const uint32_t steps = WHOLE ? DP / 8 : (dim + 7) / 8;
    allow_next_kernel();
    struct score_place at = score_place_of(&c, SCORE_WARPS * c.depth);
    wait_for_kernel_before();
    if (at.none)
        return;
    const uint32_t h0 = at.chunk * NT * SCORE_HEADS;
    make_query<NT>(q, &c, &at, h0, steps);
    const uint32_t first = (at.stretch * SCORE_WARPS + threadIdx.x / 32) * c.depth;
    const uint32_t end = min(first + c.depth, at.n_segments * c.pieces);
    const uint32_t tile_bytes = dim * DIGEST_TILE * 2 * sizeof(uint16_t);
    for (uint32_t i = first; i < end; i++) {
        uint32_t segment = i / c.pieces, p = i % c.pieces * BOUND_PARTS + lane / 4 * 4;
        bool exists = p < c.parts;
        const uint8_t *from = at.base + at.records[segment] * c.record_bytes + c.bounds;
        const float *magnitude = (const float *)from;
        from += digest_round(dim * sizeof(float)) + (size_t)(p / DIGEST_TILE) * tile_bytes +
                t * (4 * DIGEST_TILE * 2) + g % 4 * 16;
        uint4 low[2][STEPS_AHEAD], high[2][STEPS_AHEAD];
        auto load = [&](uint32_t s, int to) {
#pragma unroll
            for (int k = 0; k < STEPS_AHEAD; k++) {
                low[to][k] = high[to][k] = make_uint4(0, 0, 0, 0);
                if (exists && (WHOLE || ((s + k) * STEP_PAIRS + t) * 2 < dim)) {
                    const uint8_t *a = from + (s + k) * (STEP_PAIRS * 4 * DIGEST_TILE * 2);
                    low[to][k] = __ldcs((const uint4 *)a);
                    high[to][k] = __ldcs((const uint4 *)(a + 2 * DIGEST_TILE * 2));
                }
            }
        };
        float sum[NT][2][4] = {}, slack[NT];
        auto add = [&](uint32_t s, int of) {
#pragma unroll
            for (int k = 0; k < STEPS_AHEAD; k++)
                if (WHOLE || s + k < steps)
#pragma unroll
                    for (int n = 0; n < NT; n++) {
                        uint4 l = low[of][k], h = high[of][k];
                        uint2 v = q->b[n][s + k][lane];
                        const uint32_t b[2] = {v.x, v.y};
                        const uint32_t a0[4] = {l.x, l.y, h.x, h.y}, a1[4] = {l.z, l.w, h.z, h.w};
                        multiply(sum[n][0], a0, b);
                        multiply(sum[n][1], a1, b);
                    }
        };
        load(0, 0);
        slack_of<NT>(q, &c, magnitude, slack);
        if (WHOLE) {
#pragma unroll
            for (int s = 0; s < DP / 8; s += STEPS_AHEAD) {
                if (s + STEPS_AHEAD < DP / 8)
                    load(s + STEPS_AHEAD, s / STEPS_AHEAD % 2 ^ 1);
                add(s, s / STEPS_AHEAD % 2);
            }
        } else {
            for (uint32_t s = 0; s < steps; s += STEPS_AHEAD) {
                if (s > 0)
                    load(s, 0);
                add(s, 0);
            }
        }
        bool empty[4] = {false, false, false, false};
        if (c.part_rows == 0 && exists) {
            const uint16_t *rows =
                (const uint16_t *)((const uint8_t *)magnitude - c.bounds + c.first_row);
            for (uint32_t k = 0; k < 4 && p + k < c.parts; k++)
                empty[k] = rows[p + k + 1] == rows[p + k];
        }
#pragma unroll
        for (int n = 0; n < NT; n++) {
            uint32_t h = h0 + n * SCORE_HEADS + t;
            float x[4];
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const float *two = &sum[n][k / 2][k % 2 * 2];
                x[k] = empty[k] ? -INFINITY : (two[0] + two[1] + slack[n]) * c.scale;
            }
            if (exists && h < c.group)
                score_put(&c, at.lane, h, segment, p, x);
        }
    }
}

typedef void bound_fn(struct score_call);

bound_fn *kernel_of(const struct score_call *c)
{
    bool wide = c->group > SCORE_HEADS;
    if (c->dim == 128)
        return wide ? bound_kernel<128, true, 2> : bound_kernel<128, true, 1>;
    if (c->dim == 64)
        return wide ? bound_kernel<64, true, 2> : bound_kernel<64, true, 1>;
    return bound_kernel<256, false, 1>;
}

bool is_wide(const struct score_call *c)
{
    return (c->dim == 128 || c->dim == 64) && c->group > SCORE_HEADS;
}

struct bound_command {
    struct score_call c;
    uint32_t grid;
};

void run_bounds(struct cuda_backend *b, const void *params)
{
    const struct bound_command *m = (const struct bound_command *)params;
    size_t shared = is_wide(&m->c) ? sizeof(bound_query<2>) : sizeof(bound_query<1>);
    score_launch(b, kernel_of(&m->c), &m->c, m->grid, SCORE_THREADS, shared, "score of bounds");
}

} /* namespace */

void cuda_score_bounds(struct cuda_backend *b, const struct score_call *from, uint32_t lanes)
{
    struct bound_command m;
    memset(&m, 0, sizeof m);
    m.c = *from;
    struct score_call *c = &m.c;
    uint32_t heads = is_wide(c) ? 2u * SCORE_HEADS : 1u * SCORE_HEADS;
    c->pieces = (c->parts + BOUND_PARTS - 1) / BOUND_PARTS;
    c->chunks = (c->group + heads - 1) / heads;
    score_cut(c, lanes, (uint32_t)b->sms * 4);
    m.grid = lanes * c->chunks * c->stretches;
    cuda_do(b, run_bounds, &m, sizeof m);
}
