/* Attention of tasks with at most 16 queries (decode): a CTA runs some splits of one task.
 *
 * Each of 4 warps copies 16 positions of a tile, scores them (16 queries by 16 positions), and sums a
 * quarter of the dimensions over all 64 positions; greatest scores and probabilities go through shared
 * memory. Bound by HBM: K and V are read once; a few tiles per CTA are in flight, and two CTAs
 * or more live on an SM. A split of a task that has others too leaves a partial result for the merge.
 * Op: attend. */
#include "kernels/cuda/attend_mma.h"

namespace
{

template <int DP> struct few {
    enum {
        TILE_BYTES = CUDA_TILE * DP * 2, /* of K or V */
        STAGES = DP == 64 ? 4 : 3,
        BYTES = STAGES * TILE_BYTES * 2,
        CTAS = DP == 256 ? 1 : 2, /* per SM at least */
    };
};

/* What the warps tell each other of a tile. */
struct exchange {
    float greatest[4][CUDA_FEW];
    uint4 p[4][32]; /* probabilities of 16 positions as a matrix operand */
};

struct few_state {
    float m[2], l[4]; /* of queries g and g + 8; l: columns are alike, rows as in a result */
};

template <int DP>
__device__ void load_queries(const struct attend_call *c, const struct attend_task *k,
                             uint32_t a[DP / 16][4])
{
    const uint32_t lane = threadIdx.x % 32, n = k->n_rows * c->group;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        uint32_t query = lane / 4 + i * 8;
        const float *q = query_at(c, k, min(query, n - 1));
#pragma unroll
        for (int s = 0; s < DP / 16; s++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                uint32_t x = s * 16 + half * 8 + lane % 4 * 2;
                bool is = query < n && x < c->dim;
                a[s][half * 2 + i] = is ? pack(q[x], q[x + 1]) : 0;
            }
    }
}

/* Scores of this warp's 16 positions. */
template <int DP> __device__ void score(const uint32_t a[DP / 16][4], uint32_t k_at, float s[2][4])
{
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t row = threadIdx.x / 32 * 16 + lane % 8 + lane / 16 * 8, odd = lane / 8 % 2;
#pragma unroll
    for (int i = 0; i < 2; i++)
        s[i][0] = s[i][1] = s[i][2] = s[i][3] = 0;
#pragma unroll
    for (int i = 0; i < DP / 16; i++) {
        uint32_t b[4];
        load_matrices(b, k_at + chunk_at<DP>(row, 2 * i + odd));
        multiply(s[0], a[i], b);
        multiply(s[1], a[i], b + 2);
    }
}

/* Turns scores of positions from `pos` on into probabilities, given all warps' greatest scores. */
__device__ void weigh(const struct attend_call *c, struct exchange *x, float s[2][4],
                      struct few_state *st, float alpha[2])
{
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float top = fmaxf(fmaxf(s[0][i * 2], s[0][i * 2 + 1]), fmaxf(s[1][i * 2], s[1][i * 2 + 1]));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        if (lane % 4 == 0)
            x->greatest[warp][lane / 4 + i * 8] = top;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; i++) {
        uint32_t query = lane / 4 + i * 8;
        float top = fmaxf(fmaxf(x->greatest[0][query], x->greatest[1][query]),
                          fmaxf(x->greatest[2][query], x->greatest[3][query]));
        float m = fmaxf(st->m[i], __fmul_rn(top, c->scale));
        alpha[i] = exp2_fast(st->m[i] - m);
        st->m[i] = m;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float *v = &s[j / 2][i * 2 + j % 2];
            *v = exp2_fast(__fmaf_rn(*v, c->scale, -m));
        }
    }
    x->p[warp][lane] = make_uint4(pack(s[0][0], s[0][1]), pack(s[0][2], s[0][3]),
                                  pack(s[1][0], s[1][1]), pack(s[1][2], s[1][3]));
    __syncthreads();
}

/* Adds probabilities times this warp's dimensions of V. */
template <int DP>
__device__ void sum_values(const struct exchange *x, uint32_t v_at, float o[DP / 32][4], float l[4])
{
    const uint32_t lane = threadIdx.x % 32, ones[2] = {0x3f803f80, 0x3f803f80};
    const uint32_t first = threadIdx.x / 32 * (DP / 32); /* chunk */
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint4 v = x->p[i][lane];
        uint32_t a[4] = {v.x, v.y, v.z, v.w}, row = i * 16 + lane % 16;
        multiply(l, a, ones);
#pragma unroll
        for (int j = 0; j < DP / 32; j += 2) {
            uint32_t b[4];
            load_matrices_turned(b, v_at + chunk_at<DP>(row, first + j + lane / 16));
            multiply(o[j], a, b);
            multiply(o[j + 1], a, b + 2);
        }
    }
}

/* The split's result: the final one where there is no other. */
template <int DP>
__device__ void store(const struct attend_call *c, const struct attend_task *k, uint32_t split,
                      const struct few_state *st, float o[DP / 32][4])
{
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, n = k->n_rows * c->group;
    const bool whole = !k->merged;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        uint32_t query = lane / 4 + i * 8;
        if (query >= n)
            continue;
        size_t part = k->partial + (size_t)split * n + query, at = result_at(c, k, query);
        float m = st->m[i], l = st->l[i * 2];
#pragma unroll
        for (int j = 0; j < DP / 32; j++) {
            uint32_t x = warp * (DP / 4) + j * 8 + lane % 4 * 2;
            float a = o[j][i * 2], b = o[j][i * 2 + 1];
            if (!whole)
                *(float2 *)(c->part_o + part * DP + x) = make_float2(a, b);
            else if (x < c->dim)
                *(float2 *)(c->out + at * c->dim + x) = make_float2(finish(a, l), finish(b, l));
        }
        if (warp != 0 || lane % 4 != 0)
            continue;
        if (!whole)
            c->part_ml[part] = make_float2(m, l);
        else if (c->lse != NULL)
            c->lse[at] = log_sum(m, l);
    }
}

/* Copies of tiles to come: of splits up to end_split. */
struct copies {
    struct cursor ahead;
    uint32_t end_split;
    block_id pages[2]; /* of the tile at `ahead` */
};

template <int DP, bool WHOLE>
__device__ void copy_next(const struct lane_pages *p, const struct attend_task *k, struct copies *n,
                          uint32_t to)
{
    if (n->ahead.split < n->end_split) {
        copy_tile<DP, WHOLE>(p, n->pages, n->ahead.pos, n->ahead.end, to, to + few<DP>::TILE_BYTES);
        cursor_step(&n->ahead, k);
        if (n->ahead.split < n->end_split)
            find_pages(p, n->ahead.pos, n->ahead.end, n->pages);
    }
    copies_end_group();
}

/* Hides from the scores of this warp's positions what lies behind a query's row. */
__device__ void hide(uint32_t pos, const uint32_t limit[2], float s[2][4])
{
#pragma unroll
    for (int j = 0; j < 8; j++)
        if (pos + threadIdx.x / 32 * 16 + j / 4 * 8 + threadIdx.x % 4 * 2 + j % 2 >=
            limit[j / 2 % 2])
            s[j / 4][j % 4] = -INFINITY;
}

template <int DP, bool WHOLE>
__global__ void __launch_bounds__(CUDA_THREADS, few<DP>::CTAS)
    few_kernel(const __grid_constant__ struct attend_call c)
{
    extern __shared__ __align__(128) uint8_t ring[];
    __shared__ struct exchange x;
    constexpr int stages = few<DP>::STAGES, stage_bytes = few<DP>::TILE_BYTES * 2;
    const struct attend_task task = *find_task(&c), *k = &task;
    const struct lane_pages pages = lane_pages_of(&c, k);
    struct cursor u = {(blockIdx.x - k->item) * k->per_item, 0, 0};
    cursor_enter(&u, k);
    const uint32_t at = shared_address(ring);
    struct copies next = {u, min(k->n_splits, u.split + k->per_item), {}};
    find_pages(&pages, u.pos, u.end, next.pages);
#pragma unroll
    for (uint32_t i = 0; i < stages - 1; i++)
        copy_next<DP, WHOLE>(&pages, k, &next, at + i * stage_bytes);
    uint32_t q[DP / 16][4], causal[2];
    load_queries<DP>(&c, k, q);
    for (int i = 0; i < 2; i++)
        causal[i] = query_limit(&c, k, threadIdx.x % 32 / 4 + i * 8, false);
    float o[DP / 32][4] = {};
    struct few_state st = {{LOWEST, LOWEST}, {}};

    allow_next_kernel();
    for (uint32_t i = 0; u.split < next.end_split; i++) {
        uint32_t k_at = at + i % stages * stage_bytes;
        bool first = u.split < k->n_first;
        uint32_t limit[2] = {first ? k->first_end : causal[0], first ? k->first_end : causal[1]};
        copies_wait<stages - 2>();
        __syncthreads(); /* the tile is there, and nobody reads the one before it any more */
        copy_next<DP, WHOLE>(&pages, k, &next, at + (i + stages - 1) % stages * stage_bytes);
        float s[2][4], alpha[2];
        score<DP>(q, k_at, s);
        if (u.pos + CUDA_TILE > min(limit[0], limit[1]))
            hide(u.pos, limit, s);
        weigh(&c, &x, s, &st, alpha);
#pragma unroll
        for (int j = 0; j < DP / 32 * 4; j++)
            o[j / 4][j % 4] *= alpha[j / 2 % 2];
#pragma unroll
        for (int j = 0; j < 4; j++)
            st.l[j] *= alpha[j / 2];
        sum_values<DP>(&x, k_at + few<DP>::TILE_BYTES, o, st.l);
        uint32_t split = u.split;
        cursor_step(&u, k);
        if (u.split == split)
            continue;
        store<DP>(&c, k, split, &st, o);
#pragma unroll
        for (int j = 0; j < DP / 32 * 4; j++)
            o[j / 4][j % 4] = 0;
        st = {{LOWEST, LOWEST}, {}};
    }
}

template <int DP, bool WHOLE>
void launch(struct cuda_backend *b, const struct attend_call *c, uint32_t n_items)
{
    few_kernel<DP, WHOLE><<<n_items, CUDA_THREADS, few<DP>::BYTES, b->stream>>>(*c);
    cuda_launched(b, "attend (few rows)");
}

/* Where a device has less shared memory, launches will say so. */
template <int DP, bool WHOLE> void prepare(void)
{
    (void)cudaFuncSetAttribute(few_kernel<DP, WHOLE>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               few<DP>::BYTES);
    (void)cudaGetLastError();
}

} /* namespace */

void attend_run_few(struct cuda_backend *b, const struct attend_call *c, uint32_t n_items)
{
    if (c->dim == 64)
        launch<64, true>(b, c, n_items);
    else if (c->dim == 128)
        launch<128, true>(b, c, n_items);
    else if (c->dim == 256)
        launch<256, true>(b, c, n_items);
    else if (c->dim < 64)
        launch<64, false>(b, c, n_items);
    else if (c->dim < 128)
        launch<128, false>(b, c, n_items);
    else
        launch<256, false>(b, c, n_items);
}

void attend_prepare_few(void)
{
    prepare<64, true>();
    prepare<128, true>();
    prepare<256, true>();
    prepare<64, false>();
    prepare<128, false>();
    prepare<256, false>();
}
