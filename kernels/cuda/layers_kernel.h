/* All layers of a small model for a few rows, in one kernel.
 *
 * A layer of a small model is five products and attentions of 1 us each: as kernels of their own they cost
 * four times as much. Here a CTA stays on each multiprocessor, and results travel between them by mail: a
 * word of 8 bytes is a result and the number of the launch, so who waits for a result polls the word until
 * that number is there, and needs no barrier, no fence and no second trip for the data. Every
 * word is written once in a launch; nobody waits for a later phase, so all that is needed is that
 * all CTAs run at the same time.
 *
 * Products: a CTA has units of 8 outputs, each warp a slice of the inputs (m16n8k16, as in skinny.cu: a lane's
 * 16 bytes are its operands of two instructions; the columns are the rows of the batch, and with gate
 * and up the two halves of the tile are theirs). Weights of the next product are loaded into
 * registers before the inputs are waited for, and come from L2, where they were sent for a layer or two
 * before. A CTA has the same units of both products that add to the residual stream, and so keeps its part
 * of that.
 *
 * Attention: a CTA has a KV head and a split of the context, a warp 16 positions of it at a time, straight from
 * pages into registers. RoPE and what comes before it happens to q and k where they are read; who
 * has the last split appends. Results of splits are merged by those who read them.
 *
 * Bound by the latency of L2: five trips a layer, store to load. */
#ifndef KERNELS_CUDA_LAYERS_KERNEL_H
#define KERNELS_CUDA_LAYERS_KERNEL_H

#include "kernels/cuda/attend_mma.h"
#include "kernels/cuda/layers.h"

namespace layers
{

enum {
    WARPS = LAYERS_WARPS,
    THREADS = 32 * WARPS,
    UNIT = LAYERS_UNIT,
    STEP = 32, /* inputs of a step: a lane's 16 bytes, four lanes to a row */
    ROUND = 4, /* steps whose weights are loaded together */
    BATCH = 2, /* units between two barriers */
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

/* ---- mail ---- */

__device__ __forceinline__ void post(uint64_t *to, uint32_t value, uint32_t turn)
{
    asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1,%2};" ::"l"(to), "r"(value), "r"(turn)
                 : "memory");
}

__device__ __forceinline__ void post_two(uint64_t *to, float a, float b, uint32_t turn)
{
    asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to),
                 "r"(__float_as_uint(a)), "r"(turn), "r"(__float_as_uint(b)), "r"(turn)
                 : "memory");
}

__device__ __forceinline__ bool look(const uint64_t *from, uint32_t turn, uint32_t *value)
{
    uint32_t was;
    asm volatile("ld.relaxed.gpu.global.v2.u32 {%0,%1}, [%2];"
                 : "=r"(*value), "=r"(was)
                 : "l"(from)
                 : "memory");
    return was == turn;
}

/* Two words, at a multiple of 16 bytes. */
__device__ __forceinline__ bool look_two(const uint64_t *from, uint32_t turn, uint2 *value)
{
    uint32_t was[2];
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(value->x), "=r"(was[0]), "=r"(value->y), "=r"(was[1])
                 : "l"(from)
                 : "memory");
    return was[0] == turn && was[1] == turn;
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

__device__ __forceinline__ uint4 load_weights(const __nv_bfloat16 *p)
{
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
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
        if (round * ROUND + u >= t.steps)
            continue;
        s.w[TURN][u][0] = load_weights(from + u * STEP);
        if (PHASE == LAYERS_GATE_UP)
            s.w[TURN][u][1] = load_weights(from + c.phases[PHASE].up + u * STEP);
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
    for (uint32_t u = 0; u < ROUND; u++) {
        if (first + u >= t.steps)
            continue;
        uint4 b = make_uint4(0, 0, 0, 0);
        const uint4 lo = s.w[TURN][u][0], hi = PHASE == LAYERS_GATE_UP ? s.w[TURN][u][1] : b;
        if (lane / 4 < ROWS)
            b = *(const uint4 *)(x + (first + u) * STEP);
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
    enum { CHUNK = 64, AT_ONCE = ROWS > 4 ? 1 : 2, SKIP = CHUNK * WARPS };
    const uint32_t pitch = c.hidden_steps * STEP, stride = staged_stride(c.hidden_steps);
#pragma unroll
    for (uint32_t row = 0; row < ROWS; row++)
        squares[row] = 0;
#pragma unroll 1
    for (uint32_t k = threadIdx.x * 2; k < pitch; k += AT_ONCE * SKIP) {
        uint2 v[AT_ONCE][ROWS];
        float2 g[AT_ONCE];
#pragma unroll
        for (uint32_t i = 0; i < AT_ONCE; i++)
            g[i] = k + i * SKIP < c.hidden ? *(const float2 *)(gain + k + i * SKIP)
                                           : make_float2(0, 0);
        bool all;
        do {
            all = true;
#pragma unroll
            for (uint32_t j = 0; j < AT_ONCE * ROWS; j++) {
                const uint32_t row = j % ROWS, at = k + j / ROWS * SKIP;
                uint2 *to = &v[j / ROWS][row];
                *to = make_uint2(0, 0);
                if (row >= c.n_rows || at >= c.hidden)
                    continue;
                if (mail != NULL) {
                    all &= look_two(mail + (size_t)row * c.hidden + at, turn, to);
                } else {
                    const uint32_t two =
                        *(const uint32_t *)(c.embedding + (size_t)sh->token[row] * pitch + at);
                    *to = make_uint2(two << 16, two & 0xffff0000u);
                }
            }
        } while (!all);
#pragma unroll
        for (uint32_t j = 0; j < AT_ONCE * ROWS; j++) {
            const uint32_t row = j % ROWS, at = k + j / ROWS * SKIP;
            const float a = __uint_as_float(v[j / ROWS][row].x),
                        b = __uint_as_float(v[j / ROWS][row].y);
            const float2 of = g[j / ROWS];
            squares[row] += a * a + b * b;
            if (at < pitch)
                *(uint32_t *)(x + row * stride + at) = pack(a * of.x, b * of.y);
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
    enum { AT_ONCE = ROWS > 4 ? 1 : 2, SKIP = 4 * THREADS };
    const uint32_t pitch = c.ff_steps * STEP, stride = staged_stride(c.ff_steps);
#pragma unroll 1
    for (uint32_t k = threadIdx.x * 4; k < pitch; k += AT_ONCE * SKIP) {
        uint2 v[AT_ONCE * ROWS];
        bool all;
        do {
            all = true;
#pragma unroll
            for (uint32_t j = 0; j < AT_ONCE * ROWS; j++) {
                const uint32_t row = j % ROWS, at = k + j / ROWS * SKIP;
                v[j] = make_uint2(0, 0);
                if (row < c.n_rows && at < c.ff)
                    all &= look_two(mail + ((size_t)row * c.ff + at) / 2, turn, &v[j]);
            }
        } while (!all);
#pragma unroll
        for (uint32_t j = 0; j < AT_ONCE * ROWS; j++)
            if (k + j / ROWS * SKIP < pitch)
                *(uint2 *)(x + j % ROWS * stride + k + j / ROWS * SKIP) = v[j];
    }
}

/* ---- attention ---- */

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

/* Results of attention, merged over splits. A lane has four numbers, 16 lanes are within a head. */
template <int ROWS>
__device__ __forceinline__ void stage_attention(const struct layers_call &c,
                                                const struct shared *sh, const uint64_t *mail,
                                                const uint64_t *mass, __nv_bfloat16 *x,
                                                uint32_t turn)
{
    enum { GROUP = 16 };
    const uint32_t lane = threadIdx.x % GROUP, width = c.heads * c.dim;
    const uint32_t per_row = (width / 4 + 31) / 32 * 32; /* threads: whole warps */
    uint32_t row = 0, at = threadIdx.x;
#pragma unroll 1
    for (;; at += THREADS) {
        while (at >= per_row) {
            at -= per_row;
            row++;
        }
        if (row >= c.n_rows)
            break;
        const bool is = at * 4 < width;
        const uint32_t k = is ? at * 4 : 0, n = sh->n_splits[row];
        const uint64_t *from = mail + (size_t)row * c.splits * width + k;
        uint2 v[LAYERS_SPLITS][2];
        uint32_t lse = 0;
        bool all;
        do {
            all = true;
#pragma unroll
            for (uint32_t s = 0; s < LAYERS_SPLITS; s++)
                if (s < n)
                    all &= look_two(from + s * width, turn, &v[s][0]) &
                           look_two(from + s * width + 2, turn, &v[s][1]);
            if (n > 1 && lane < n)
                all &=
                    look(mass + ((size_t)row * c.heads + k / c.dim) * c.splits + lane, turn, &lse);
        } while (!all);
        float a[4] = {__uint_as_float(v[0][0].x), __uint_as_float(v[0][0].y),
                      __uint_as_float(v[0][1].x), __uint_as_float(v[0][1].y)};
        __syncwarp();
        if (n > 1) { /* the same in a warp */
            float w = __uint_as_float(lse), top = lane < n ? w : -INFINITY, sum;
#pragma unroll
            for (int d = LAYERS_SPLITS / 2; d > 0; d /= 2)
                top = fmaxf(top, __shfl_xor_sync(~0u, top, d, GROUP));
            sum = w = lane < n ? exp2_fast(w - top) : 0;
#pragma unroll
            for (int d = LAYERS_SPLITS / 2; d > 0; d /= 2)
                sum += __shfl_xor_sync(~0u, sum, d, GROUP);
            w /= sum;
            a[0] = a[1] = a[2] = a[3] = 0;
#pragma unroll
            for (uint32_t s = 0; s < LAYERS_SPLITS; s++) {
                const float of = __shfl_sync(~0u, w, s, GROUP);
                if (s >= n)
                    continue;
#pragma unroll
                for (uint32_t j = 0; j < 4; j++)
                    a[j] = __fmaf_rn(of, __uint_as_float((&v[s][j / 2].x)[j % 2]), a[j]);
            }
        }
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
template <int DIM>
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
    bool all;
    do {
        all = true;
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            all &= look(from + 32 * i, turn, &a_bits[i]);
            all &= look(from + HALF + 32 * i, turn, &b_bits[i]);
        }
    } while (!all);
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
    __nv_bfloat16 *to = is_v ? sh->v : is_k ? sh->k : sh->q[j];
    __nv_bfloat16 *page = NULL;
    if (is_v || is_k) {
        const uint32_t in_page = (1u << c.page_shift) - 1;
        page = (__nv_bfloat16 *)page_of(c, k, k.pos) +
               (size_t)((is_v << c.page_shift) + (k.pos & in_page)) * DIM;
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
template <int DIM>
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
        post_two(mail + ((size_t)k.row * c.splits + k.split) * c.heads * DIM + head * DIM + d,
                 a / l, b / l, turn);
        if (d == 0)
            post(mass + ((size_t)k.row * c.heads + head) * c.splits + k.split,
                 __float_as_uint(top + log2f(l)), turn);
    }
}

/* The task's attention. */
template <int DIM>
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
                take_head<DIM>(c, w, k, sh, mail + c.at.qkv, j, turn);
            __syncthreads();
#pragma unroll
            for (uint32_t i = 0; i < DIM / 32; i++)
                q[i] = *(const uint4 *)&sh->q[lane / 4][i * 32 + lane % 4 * 8];
        }
        if (base >= k.end)
            continue;
        patch_tile<DIM>(sh, k, base, in);
        attend_tile<DIM>(c, k, base, q, in, sum);
    }
    meet<DIM>(c, k, sh, sum, mail + c.at.att, mail + c.at.mass, turn);
}

/* ---- the kernel ---- */

/* What the rows and layers are, to shared memory; and this CTA's part of the residual stream. */
template <int ROWS>
__device__ __forceinline__ void begin(const struct layers_call &c, struct shared *sh)
{
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < 8 * (128 + 8); i += THREADS)
        sh->q[0][i] = __float2bfloat16_rn(0);
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < c.n_layers * (sizeof *c.layers / 8); i += THREADS)
        ((uint64_t *)sh->layers)[i] = ((const uint64_t *)c.layers)[i];
    if (threadIdx.x < c.n_rows) {
        const struct layers_row r = c.rows[threadIdx.x];
        sh->pos[threadIdx.x] = r.pos;
        sh->n_splits[threadIdx.x] = cut_of(c, r.pos).n;
        for (int i = 0; i < LANE_CLASSES; i++)
            sh->table[threadIdx.x][i] = r.tables[i];
        sh->token[threadIdx.x] = r.token & EMBED_DRAWN
                                     ? c.drawn[(r.token & ~EMBED_DRAWN) * (c.drawn_stride / 4)]
                                     : r.token;
    }
    __syncthreads();
#pragma unroll 1
    for (uint32_t e = threadIdx.x; e < LAYERS_KEEPS * ROWS * UNIT; e += THREADS) {
        const uint32_t i = e % UNIT, row = e / UNIT % ROWS, unit = e / (UNIT * ROWS);
        const uint32_t at = (blockIdx.x + unit * gridDim.x) * UNIT + i;
        if (row < c.n_rows && at < c.hidden)
            sh->kept[unit][row][i] =
                __bfloat162float(c.embedding[(size_t)sh->token[row] * c.hidden_steps * STEP + at]);
    }
}

/* What a phase does with an output: row `row`, number i of unit `unit` of this CTA. */
template <int PHASE>
__device__ __forceinline__ void put(const struct layers_call &c, struct shared *sh, bool is_last,
                                    uint64_t *mail, uint32_t unit, uint32_t in_batch, uint32_t row,
                                    uint32_t i, uint32_t turn)
{
    const uint32_t rows = c.phases[PHASE].rows, at = (blockIdx.x + unit * gridDim.x) * UNIT + i;
    const bool is = row < c.n_rows && at < rows;
    uint64_t *to = mail + c.phases[PHASE].mail;
    float v = add_warps(sh, in_batch, row, i);
    if (PHASE == LAYERS_QKV) {
        if (is)
            post(to + row * rows + at, __float_as_uint(v * scale_of(c, sh, row)), turn);
    } else if (PHASE == LAYERS_GATE_UP) {
        const float scale = scale_of(c, sh, row), up = add_warps(sh, in_batch, row, UNIT + i);
        v *= scale;
        v = __fdividef(v, 1 + __expf(-v)) * (up * scale);
        const float next = __shfl_down_sync(0xffu << (threadIdx.x & 24), v, 1);
        if (is && at % 2 == 0)
            post(to + (row * rows + at) / 2, pack(v, next), turn);
    } else if (is) {
        float *kept = &sh->kept[unit][row][i];
        v += *kept;
        *kept = v;
        if (is_last)
            c.out[row * rows + at] = v;
        else
            post(to + row * rows + at, __float_as_uint(v), turn);
    }
}

/* See the top. Op: layers. */
template <int DIM, int ROWS>
__global__ void __launch_bounds__(THREADS, 1)
    layers_kernel(const __grid_constant__ struct layers_call c)
{
    extern __shared__ uint4 memory[];
    struct shared *sh = (struct shared *)memory;
    __nv_bfloat16 *x = (__nv_bfloat16 *)(sh + 1);
    struct stream s = {};
    const struct part qkv = part_of(c.phases[LAYERS_QKV]), out = part_of(c.phases[LAYERS_OUT]),
                      gate_up = part_of(c.phases[LAYERS_GATE_UP]),
                      down = part_of(c.phases[LAYERS_DOWN]);
    wait_for_kernel_before();
    const uint32_t turn = *(volatile uint32_t *)c.turn + 1;
    begin<ROWS>(c, sh);
    const struct task k0 = find_task(c, sh);
    fetch_first<LAYERS_QKV>(c, sh, 0, qkv, s);
#pragma unroll 1
    for (uint32_t i = 0; i < c.ahead; i++) {
        call_for<LAYERS_QKV>(c, sh, i, qkv);
        call_for<LAYERS_OUT>(c, sh, i, out);
        call_for<LAYERS_GATE_UP>(c, sh, i, gate_up);
        call_for<LAYERS_DOWN>(c, sh, i, down);
        call_for_gains(c, sh, i);
    }
    uint64_t *mail = c.mail;
#pragma unroll 1
    for (uint32_t layer = 0; layer < c.n_layers; layer++, mail += c.at.words) {
        const struct layers_layer &l = sh->layers[layer];
        const bool is_last = layer + 1 == c.n_layers;
        const uint32_t ahead = layer + c.ahead;
        float squares[ROWS];

        if (qkv.mine > 0)
            stage_stream<ROWS>(c, sh, layer == 0 ? NULL : mail - c.at.words + c.at.x, l.attn_norm,
                               x, turn, squares);
        __syncthreads();
        product<LAYERS_QKV, ROWS>(
            c, qkv, l.w[LAYERS_QKV], s, sh, x, [&] { leave_squares<ROWS>(sh, squares); },
            [&](uint32_t unit, uint32_t in_batch, uint32_t row, uint32_t i) {
                put<LAYERS_QKV>(c, sh, false, mail, unit, in_batch, row, i, turn);
            });
        if (k0.is) {
            struct task k = k0;
            enter_layer(c, sh, k, layer);
            attend<DIM>(c, l, k, sh, mail, turn);
        }
        fetch_first<LAYERS_OUT>(c, sh, layer, out, s);
        call_for<LAYERS_QKV>(c, sh, ahead, qkv);
        call_for_gains(c, sh, ahead);
        call_for_pages<DIM>(c, sh, k0, layer + 1);

        if (out.mine > 0)
            stage_attention<ROWS>(c, sh, mail + c.at.att, mail + c.at.mass, x, turn);
        __syncthreads();
        product<LAYERS_OUT, ROWS>(
            c, out, l.w[LAYERS_OUT], s, sh, x, [] {},
            [&](uint32_t unit, uint32_t in_batch, uint32_t row, uint32_t i) {
                put<LAYERS_OUT>(c, sh, false, mail, unit, in_batch, row, i, turn);
            });
        fetch_first<LAYERS_GATE_UP>(c, sh, layer, gate_up, s);
        call_for<LAYERS_OUT>(c, sh, ahead, out);

        if (gate_up.mine > 0)
            stage_stream<ROWS>(c, sh, mail + c.at.mid, l.ffn_norm, x, turn, squares);
        __syncthreads();
        product<LAYERS_GATE_UP, ROWS>(
            c, gate_up, l.w[LAYERS_GATE_UP], s, sh, x, [&] { leave_squares<ROWS>(sh, squares); },
            [&](uint32_t unit, uint32_t in_batch, uint32_t row, uint32_t i) {
                put<LAYERS_GATE_UP>(c, sh, false, mail, unit, in_batch, row, i, turn);
            });
        fetch_first<LAYERS_DOWN>(c, sh, layer, down, s);
        call_for<LAYERS_GATE_UP>(c, sh, ahead, gate_up);

        if (down.mine > 0)
            stage_ff<ROWS>(c, mail + c.at.ff, x, turn);
        __syncthreads();
        product<LAYERS_DOWN, ROWS>(
            c, down, l.w[LAYERS_DOWN], s, sh, x, [] {},
            [&](uint32_t unit, uint32_t in_batch, uint32_t row, uint32_t i) {
                put<LAYERS_DOWN>(c, sh, is_last, mail, unit, in_batch, row, i, turn);
            });
        if (!is_last)
            fetch_first<LAYERS_QKV>(c, sh, layer + 1, qkv, s);
        call_for<LAYERS_DOWN>(c, sh, ahead, down);
    }
    /* Who has mail of the last layer knows that all have begun, and read the turn. */
    if (blockIdx.x == 0 && threadIdx.x == 0)
        *c.turn = turn;
}

} /* namespace layers */

#endif
