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

#include "kernels/cuda/layers_attend.h"

namespace layers
{

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
template <int PHASE, int ROWS>
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
            post<ROWS>(to + row * rows + at, __float_as_uint(v * scale_of(c, sh, row)), turn);
    } else if (PHASE == LAYERS_GATE_UP) {
        const float scale = scale_of(c, sh, row), up = add_warps(sh, in_batch, row, UNIT + i);
        v *= scale;
        v = __fdividef(v, 1 + __expf(-v)) * (up * scale);
        const float next = __shfl_down_sync(0xffu << (threadIdx.x & 24), v, 1);
        if (is && at % 2 == 0)
            post<ROWS>(to + (row * rows + at) / 2, pack(v, next), turn);
    } else if (is) {
        float *kept = &sh->kept[unit][row][i];
        v += *kept;
        *kept = v;
        if (is_last)
            c.out[row * rows + at] = v;
        else
            post<ROWS>(to + row * rows + at, __float_as_uint(v), turn);
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
                put<LAYERS_QKV, ROWS>(c, sh, false, mail, unit, in_batch, row, i, turn);
            });
        if (k0.is) {
            struct task k = k0;
            enter_layer(c, sh, k, layer);
            attend<DIM, ROWS>(c, l, k, sh, mail, turn);
        }
        fetch_first<LAYERS_OUT>(c, sh, layer, out, s);
        call_for<LAYERS_QKV>(c, sh, ahead, qkv);
        call_for_gains(c, sh, ahead);
        call_for_pages<DIM>(c, sh, k0, layer + 1);

        if (out.mine > 0)
            stage_attention<DIM, ROWS>(c, sh, mail + c.at.att, mail + c.at.mass, x, turn);
        __syncthreads();
        product<LAYERS_OUT, ROWS>(
            c, out, l.w[LAYERS_OUT], s, sh, x, [] {},
            [&](uint32_t unit, uint32_t in_batch, uint32_t row, uint32_t i) {
                put<LAYERS_OUT, ROWS>(c, sh, false, mail, unit, in_batch, row, i, turn);
            });
        fetch_first<LAYERS_GATE_UP>(c, sh, layer, gate_up, s);
        call_for<LAYERS_OUT>(c, sh, ahead, out);

        if (gate_up.mine > 0)
            stage_stream<ROWS>(c, sh, mail + c.at.mid, l.ffn_norm, x, turn, squares);
        __syncthreads();
        product<LAYERS_GATE_UP, ROWS>(
            c, gate_up, l.w[LAYERS_GATE_UP], s, sh, x, [&] { leave_squares<ROWS>(sh, squares); },
            [&](uint32_t unit, uint32_t in_batch, uint32_t row, uint32_t i) {
                put<LAYERS_GATE_UP, ROWS>(c, sh, false, mail, unit, in_batch, row, i, turn);
            });
        fetch_first<LAYERS_DOWN>(c, sh, layer, down, s);
        call_for<LAYERS_GATE_UP>(c, sh, ahead, gate_up);

        if (down.mine > 0)
            stage_ff<ROWS>(c, mail + c.at.ff, x, turn);
        __syncthreads();
        product<LAYERS_DOWN, ROWS>(
            c, down, l.w[LAYERS_DOWN], s, sh, x, [] {},
            [&](uint32_t unit, uint32_t in_batch, uint32_t row, uint32_t i) {
                put<LAYERS_DOWN, ROWS>(c, sh, is_last, mail, unit, in_batch, row, i, turn);
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
