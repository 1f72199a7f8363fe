/* Mail, and the products of layers_kernel.h: weights on their way, inputs from the mail, sums over the warps. */
#ifndef KERNELS_CUDA_LAYERS_PRODUCT_H
#define KERNELS_CUDA_LAYERS_PRODUCT_H

#include "kernels/cuda/attend_mma.h"
#include "kernels/cuda/layers.h"

namespace layers
{

enum {
    WARPS = LAYERS_WARPS,
    THREADS = 32 * WARPS,
    UNIT = LAYERS_UNIT,
    STEP = 32,            /* inputs of a step: a lane's 16 bytes, four lanes to a row */
    ROUND = 3,            /* steps whose weights are loaded together */
    BATCH = 2,            /* units between two barriers */
    MOST_POLLS = 1 << 20, /* of a word: half a second of trips to L2 */
};

struct shared {
    struct layers_layer layers[LAYERS_MAX];
    uint32_t pos[LAYERS_ROWS], token[LAYERS_ROWS];
    uint32_t n_splits[LAYERS_ROWS];
    const block_id *table[LAYERS_ROWS][LANE_CLASSES];
    __align__(16) float squares[LAYERS_ROWS][WARPS]; /* of what the warps staged of a row */
    float part[WARPS][BATCH][LAYERS_ROWS][2 * UNIT + 4];
    float kept[LAYERS_KEEPS][LAYERS_ROWS][UNIT]; /* this CTA's part of the residual stream */
    /* attention */
    __align__(16) __nv_bfloat16 q[8][128 + 8], k[128], v[128];
    float m[WARPS][8], l[WARPS][8];
    __align__(16) float o[WARPS][8][128 + 4];
};

/* ---- mail ----
 *
 * Polls are counted: that a word never comes would be a fault of ours, and a step that fails (cuda_layers_settle) is
 * better than a device that hangs. A word is one access of 64 bits; but for one row, which that costs 2 % (H200; why
 * is not known), pairs of 32 bits, which the machine moves as one all the same (NCCL's LL relies on that, too). That
 * all CTAs run at the same time is the launch's promise. */

template <int ROWS>
__device__ __forceinline__ void post(uint64_t *to, uint32_t value, uint32_t turn)
{
    if (ROWS == 1)
        asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1,%2};" ::"l"(to), "r"(value), "r"(turn)
                     : "memory");
    else
        asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to),
                     "l"(value | (uint64_t)turn << 32)
                     : "memory");
}

template <int ROWS>
__device__ __forceinline__ void post_two(uint64_t *to, float a, float b, uint32_t turn)
{
    const uint32_t x = __float_as_uint(a), y = __float_as_uint(b);
    if (ROWS == 1)
        asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(x),
                     "r"(turn), "r"(y), "r"(turn)
                     : "memory");
    else
        asm volatile("st.relaxed.gpu.global.v2.u64 [%0], {%1,%2};" ::"l"(to),
                     "l"(x | (uint64_t)turn << 32), "l"(y | (uint64_t)turn << 32)
                     : "memory");
}

/* Looking: all words of a round are asked for before the first is looked at, or each would cost a trip of its
 * own. So nothing is asked for conditionally: who needs less asks for the same word again. */
template <int ROWS> __device__ __forceinline__ uint2 ask(const uint64_t *from)
{
    if constexpr (ROWS == 1) {
        uint2 v;
        asm volatile("ld.relaxed.gpu.global.v2.u32 {%0,%1}, [%2];"
                     : "=r"(v.x), "=r"(v.y)
                     : "l"(from)
                     : "memory");
        return v;
    } else {
        uint64_t v;
        asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(from) : "memory");
        return make_uint2((uint32_t)v, (uint32_t)(v >> 32));
    }
}

/* Two words, at a multiple of 16 bytes: values in x and z. */
template <int ROWS> __device__ __forceinline__ uint4 ask_two(const uint64_t *from)
{
    if constexpr (ROWS == 1) {
        uint4 v;
        asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "l"(from)
                     : "memory");
        return v;
    } else {
        uint64_t a, b;
        asm volatile("ld.relaxed.gpu.global.v2.u64 {%0,%1}, [%2];"
                     : "=l"(a), "=l"(b)
                     : "l"(from)
                     : "memory");
        return make_uint4((uint32_t)a, (uint32_t)(a >> 32), (uint32_t)b, (uint32_t)(b >> 32));
    }
}

/* Whether to ask again. */
__device__ __forceinline__ bool asks_again(bool late, uint32_t *polls)
{
    return late && ++*polls != MOST_POLLS;
}

/* Behind the loop, and no trap: to the compiler code goes on behind one, so a trap in the loop was a second way out
 * of it, and lanes of a warp joined far behind it. What is computed from here on is nobody's. */
__device__ __forceinline__ void must_be_there(const struct layers_call &c, bool late)
{
    if (late)
        *(volatile uint32_t *)c.lost = 1;
}

template <int ROWS, int N>
__device__ __forceinline__ void take_twos(const struct layers_call &c,
                                          const uint64_t *const from[N], uint32_t turn, uint4 v[N])
{
    bool late;
    uint32_t polls = 0;
    do {
#pragma unroll
        for (int i = 0; i < N; i++)
            v[i] = ask_two<ROWS>(from[i]);
        late = false;
#pragma unroll
        for (int i = 0; i < N; i++)
            late |= (v[i].y ^ turn) | (v[i].w ^ turn);
    } while (asks_again(late, &polls));
    must_be_there(c, late);
}

/* ---- weights ---- */

/* What a warp has of the matrix of a phase: alike in all layers. */
struct part {
    uint32_t at;           /* this lane's first number of unit 0 */
    uint32_t first, steps; /* of the inputs */
    uint32_t rounds, mine; /* rounds of a unit, at least 1; units of the CTA */
};

__device__ __forceinline__ struct part part_of(const struct layers_phase &p)
{
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    struct part t;
    t.first = p.steps * warp / WARPS;
    t.steps = p.steps * (warp + 1) / WARPS - t.first;
    t.rounds = max((t.steps + ROUND - 1) / ROUND, 1u);
    t.mine = p.units + (blockIdx.x < p.more);
    t.at = ((blockIdx.x * UNIT + lane / 4) * p.steps + t.first) * STEP + lane % 4 * 8;
    return t;
}

/* Two rounds of weights; the second of a pair: of up, or anything. */
struct stream {
    uint4 w[2][ROUND][2];
};

/* Zeros if not. */
__device__ __forceinline__ uint4 load_weights(const __nv_bfloat16 *p, bool is)
{
    uint4 v;
    asm volatile("{\n\t.reg .pred p;\n\t"
                 "setp.ne.u32 p, %5, 0;\n\t"
                 "mov.u32 %0, 0;\n\tmov.u32 %1, 0;\n\tmov.u32 %2, 0;\n\tmov.u32 %3, 0;\n\t"
                 "@p ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];\n\t}"
                 : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
                 : "l"(p), "r"((uint32_t)is));
    return v;
}

/* Rows of a unit beyond the last are read as well: there is memory (weight.cu). */
template <int PHASE, int TURN>
__device__ __forceinline__ void fetch(const struct layers_call &c, const __nv_bfloat16 *w,
                                      const struct part &t, uint32_t unit, uint32_t round,
                                      struct stream &s)
{
    if (unit >= t.mine)
        return;
    const __nv_bfloat16 *from = w + (t.at + unit * c.phases[PHASE].skip + round * (ROUND * STEP));
#pragma unroll
    for (uint32_t u = 0; u < ROUND; u++) {
        const bool is = round * ROUND + u < t.steps;
        s.w[TURN][u][0] = load_weights(from + u * STEP, is);
        if (PHASE == LAYERS_GATE_UP)
            s.w[TURN][u][1] = load_weights(from + c.phases[PHASE].up + u * STEP, is);
    }
}

template <int PHASE>
__device__ __forceinline__ void fetch_first(const struct layers_call &c, const struct shared *sh,
                                            uint32_t layer, const struct part &t, struct stream &s)
{
    const __nv_bfloat16 *w = sh->layers[layer].w[PHASE];
    fetch<PHASE, 0>(c, w, t, 0, 0, s);
    if (t.rounds == 1)
        fetch<PHASE, 1>(c, w, t, 1, 0, s);
    else
        fetch<PHASE, 1>(c, w, t, 0, 1, s);
}

/* Asks for this CTA's units of a phase to come to L2. */
template <int PHASE>
__device__ __forceinline__ void call_for(const struct layers_call &c, const struct shared *sh,
                                         uint32_t layer, const struct part &t)
{
    enum { LINE = 64 }; /* numbers of 128 bytes */
    const struct layers_phase &p = c.phases[PHASE];
    const uint32_t numbers = UNIT * STEP * p.steps;
    if (layer >= c.n_layers)
        return;
    const __nv_bfloat16 *w = sh->layers[layer].w[PHASE] + blockIdx.x * numbers;
#pragma unroll 1
    for (uint32_t unit = 0; unit < t.mine; unit++, w += p.skip)
#pragma unroll 1
        for (uint32_t k = threadIdx.x * LINE; k < numbers; k += THREADS * LINE) {
            asm volatile("prefetch.global.L2 [%0];" ::"l"(w + k));
            if (PHASE == LAYERS_GATE_UP)
                asm volatile("prefetch.global.L2 [%0];" ::"l"(w + p.up + k));
        }
}

/* And the gains, which all CTAs read. */
__device__ __forceinline__ void call_for_gains(const struct layers_call &c, const struct shared *sh,
                                               uint32_t layer)
{
    enum { LINE = 32 };
    if (layer >= c.n_layers || blockIdx.x >= 2)
        return;
    const float *gain = blockIdx.x == 0 ? sh->layers[layer].attn_norm : sh->layers[layer].ffn_norm;
    for (uint32_t k = threadIdx.x * LINE; k < c.hidden; k += THREADS * LINE)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(gain + k));
}

/* ---- products ---- */

__device__ __forceinline__ void tensor(float c[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                       uint32_t a3, uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/* Numbers of a staged row: an odd number of steps, so that two rows lie in different banks. */
__host__ __device__ __forceinline__ uint32_t staged_stride(uint32_t steps)
{
    return (steps | 1) * STEP;
}

/* Where a product is: the round at hand. */
struct walk {
    uint32_t unit, round;
};

__device__ __forceinline__ struct walk next_round(const struct part &t, struct walk at)
{
    at.round++;
    if (at.round == t.rounds) {
        at.round = 0;
        at.unit++;
    }
    return at;
}

/* Multiplies a round, and behind the last of a unit leaves this warp's sums. x: what this lane reads of the
 * warp's first step. */
template <int PHASE, int TURN, int ROWS>
__device__ __forceinline__ void run_round(const struct part &t, const struct stream &s,
                                          struct shared *sh, const __nv_bfloat16 *x,
                                          struct walk *at, float sum[2][4])
{
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, unit = at->unit;
    const uint32_t first = at->round * ROUND;
#pragma unroll
    for (uint32_t u = 0; u < ROUND; u++) { /* weights beyond the slice are zeros */
        const uint4 none = make_uint4(0, 0, 0, 0);
        const uint4 b = lane / 4 < ROWS
                            ? *(const uint4 *)(x + (first + u < t.steps ? first + u : 0) * STEP)
                            : none;
        const uint4 lo = s.w[TURN][u][0], hi = PHASE == LAYERS_GATE_UP ? s.w[TURN][u][1] : none;
        tensor(sum[0], lo.x, hi.x, lo.y, hi.y, b.x, b.y);
        tensor(sum[1], lo.z, hi.z, lo.w, hi.w, b.z, b.w);
    }
    *at = next_round(t, *at);
    if (at->unit == unit)
        return;
#pragma unroll
    for (uint32_t c = 0; c < 4; c++) {
        const uint32_t n = lane % 4 * 2 + c % 2;
        if (n < ROWS && (PHASE == LAYERS_GATE_UP || c < 2))
            sh->part[warp][unit % BATCH][n][lane / 4 + c / 2 * UNIT] = sum[0][c] + sum[1][c];
        sum[0][c] = sum[1][c] = 0;
    }
}

/* Output i (of 16 with gate and up) of a unit: all warps' sums. */
__device__ __forceinline__ float add_warps(const struct shared *sh, uint32_t unit, uint32_t row,
                                           uint32_t i)
{
    float v[WARPS];
#pragma unroll
    for (uint32_t w = 0; w < WARPS; w++)
        v[w] = sh->part[w][unit][row][i];
    return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
}

/* Multiplies what is staged at x by this CTA's units. between(): before the barrier behind the sums. put(unit,
 * in_batch, row, i): unit is which of this CTA's, i which of its outputs; groups of 8 threads call it
 * together. */
template <int PHASE, int ROWS, typename Between, typename Put>
__device__ __forceinline__ void product(const struct layers_call &c, const struct part &t,
                                        const __nv_bfloat16 *w, struct stream &s, struct shared *sh,
                                        const __nv_bfloat16 *x, Between between, Put put)
{
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t i = threadIdx.x % UNIT, row = threadIdx.x / UNIT % ROWS;
    const uint32_t in_batch = threadIdx.x / (UNIT * ROWS);
    const bool more = t.mine * t.rounds > 2;
    struct walk at = {0, 0};
    float sum[2][4] = {};
    x += lane / 4 * staged_stride(c.phases[PHASE].steps) + t.first * STEP + lane % 4 * 8;
#pragma unroll 1
    for (uint32_t first = 0; first < t.mine; first += BATCH) {
        const uint32_t end = min(t.mine, first + BATCH);
        if (first > 0)
            __syncthreads(); /* sums of the batch before have been read */
#pragma unroll 1
        do { /* rounds two behind those just multiplied are asked for */
            run_round<PHASE, 0, ROWS>(t, s, sh, x, &at, sum);
            const struct walk two = next_round(t, at);
            if (more)
                fetch<PHASE, 0>(c, w, t, two.unit, two.round, s);
            if (at.unit >= end)
                break;
            run_round<PHASE, 1, ROWS>(t, s, sh, x, &at, sum);
            const struct walk three = next_round(t, at);
            if (more)
                fetch<PHASE, 1>(c, w, t, three.unit, three.round, s);
        } while (at.unit < end);
        if (first == 0)
            between();
        __syncthreads();
        if (first + in_batch < end && in_batch < BATCH)
            put(first + in_batch, in_batch, row, i);
    }
}

/* ---- inputs of products ---- */

/* The residual stream times gain as bf16. mail NULL: from the embedding. squares: of what this thread staged. */
template <int ROWS>
__device__ __forceinline__ void stage_stream(const struct layers_call &c, const struct shared *sh,
                                             const uint64_t *mail, const float *gain,
                                             __nv_bfloat16 *x, uint32_t turn, float squares[ROWS])
{
    enum { AT_ONCE = 2, N = AT_ONCE * ROWS, SKIP = 2 * THREADS };
    const uint32_t pitch = c.hidden_steps * STEP, stride = staged_stride(c.hidden_steps);
#pragma unroll
    for (uint32_t row = 0; row < ROWS; row++)
        squares[row] = 0;
#pragma unroll 1
    for (uint32_t k = threadIdx.x * 2; k < pitch; k += AT_ONCE * SKIP) {
        const uint64_t *from[N];
        uint4 v[N];
        float2 g[AT_ONCE];
#pragma unroll
        for (uint32_t j = 0; j < N; j++) {
            const uint32_t row = min(j % ROWS, c.n_rows - 1), at = k + j / ROWS * SKIP;
            from[j] = mail + row * c.hidden + (at < c.hidden ? at : 0);
        }
#pragma unroll
        for (uint32_t i = 0; i < AT_ONCE; i++)
            g[i] = k + i * SKIP < c.hidden ? *(const float2 *)(gain + k + i * SKIP)
                                           : make_float2(0, 0);
        if (mail != NULL) {
            take_twos<ROWS, N>(c, from, turn, v);
        } else {
#pragma unroll
            for (uint32_t j = 0; j < N; j++) {
                const uint32_t row = min(j % ROWS, c.n_rows - 1), at = k + j / ROWS * SKIP;
                const uint32_t two =
                    *(const uint32_t *)(c.embedding + sh->token[row] * (size_t)pitch +
                                        (at < c.hidden ? at : 0));
                v[j].x = two << 16;
                v[j].z = two & 0xffff0000u;
            }
        }
#pragma unroll
        for (uint32_t j = 0; j < N; j++) {
            const uint32_t row = j % ROWS, at = k + j / ROWS * SKIP;
            const float a = __uint_as_float(v[j].x), b = __uint_as_float(v[j].z);
            const float2 of = g[j / ROWS];
            if (at < c.hidden)
                squares[row] += a * a + b * b;
            if (at < pitch)
                *(uint32_t *)(x + row * stride + at) = at < c.hidden ? pack(a * of.x, b * of.y) : 0;
        }
    }
}

/* The sums of squares of a warp, for scale_of. */
template <int ROWS>
__device__ __forceinline__ void leave_squares(struct shared *sh, float squares[ROWS])
{
#pragma unroll
    for (uint32_t row = 0; row < ROWS; row++) {
        float v = squares[row];
#pragma unroll
        for (int d = 16; d > 0; d /= 2)
            v += __shfl_xor_sync(~0u, v, d);
        if (threadIdx.x % 32 == 0)
            sh->squares[row][threadIdx.x / 32] = v;
    }
}

/* 1 / rms of a staged row. */
__device__ __forceinline__ float scale_of(const struct layers_call &c, const struct shared *sh,
                                          uint32_t row)
{
    const float4 a = *(const float4 *)&sh->squares[row][0],
                 b = *(const float4 *)&sh->squares[row][4];
    const float squares = ((a.x + a.y) + (a.z + a.w)) + ((b.x + b.y) + (b.z + b.w));
    return rsqrtf(__fmaf_rn(squares, c.over_hidden, c.eps));
}

/* What gate and up left: two numbers of bf16 in a word. */
template <int ROWS>
__device__ __forceinline__ void stage_ff(const struct layers_call &c, const uint64_t *mail,
                                         __nv_bfloat16 *x, uint32_t turn)
{
    enum { AT_ONCE = 2, N = AT_ONCE * ROWS, SKIP = 4 * THREADS };
    const uint32_t pitch = c.ff_steps * STEP, stride = staged_stride(c.ff_steps);
#pragma unroll 1
    for (uint32_t k = threadIdx.x * 4; k < pitch; k += AT_ONCE * SKIP) {
        const uint64_t *from[N];
        uint4 v[N];
#pragma unroll
        for (uint32_t j = 0; j < N; j++) {
            const uint32_t row = min(j % ROWS, c.n_rows - 1), at = k + j / ROWS * SKIP;
            from[j] = mail + (row * c.ff + (at < c.ff ? at : 0)) / 2;
        }
        take_twos<ROWS, N>(c, from, turn, v);
#pragma unroll
        for (uint32_t j = 0; j < N; j++) {
            const uint32_t at = k + j / ROWS * SKIP;
            if (at < pitch)
                *(uint2 *)(x + j % ROWS * stride + at) =
                    at < c.ff ? make_uint2(v[j].x, v[j].z) : make_uint2(0, 0);
        }
    }
}

} /* namespace layers */

#endif
