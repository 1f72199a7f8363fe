/* Attention of tasks with at most 16 queries (decode): a CTA runs some splits of one task.
 *
 * Each of 4 warps copies 16 positions of a tile, scores them (16 queries by 16 positions), and sums a
 * quarter of the dimensions over all 64 positions; greatest scores and probabilities go through shared
 * memory. Bound by HBM: K and V are read once; a few tiles per CTA are in flight, and two CTAs
 * or more live on an SM. What was there before this step is asked for while the kernel before still runs.
 * A split of a task that has others too leaves a partial result; where there are not many, the CTA that
 * comes last folds them. Op: attend. */
#include "kernels/cuda/attend_last.h"
#include "kernels/cuda/attend_shape.h"

namespace
{

template <int DP, int ROWS> struct few {
    enum {
        TILE_BYTES = tile<DP, ROWS>::BYTES,
        STAGES = (DP == 64 ? 5 : 3) * (ROWS & ROWS_FP8 ? 2 : 1),
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
template <int DP, int ROWS>
__device__ void sum_values(const struct exchange *x, uint32_t v_at, float o[DP / 32][4], float l[4])
{
    const uint32_t lane = threadIdx.x % 32, ones[2] = {0x3f803f80, 0x3f803f80};
    const uint32_t first = threadIdx.x / 32 * (DP / 32); /* block of 8 */
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint4 v = x->p[i][lane];
        uint32_t a[4] = {v.x, v.y, v.z, v.w};
        multiply(l, a, ones);
#pragma unroll
        for (int j = 0; j < DP / 32; j += 2) {
            uint32_t b[4];
            load_values<DP, ROWS>(b, v_at, i * 16, first + j);
            multiply(o[j], a, b);
            multiply(o[j + 1], a, b + 2);
        }
    }
}

/* The split's result: the final one where there is no other. */
template <int DP, int ROWS>
__device__ void store(const struct attend_call *c, const struct attend_task *k, uint32_t split,
                      const struct few_state *st, float o[DP / 32][4])
{
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, n = k->n_rows * c->group;
    const bool whole = k->fold == FOLD_NONE;
    const size_t part = k->partial + (size_t)split * n;
    pair_sums<ROWS, DP / 32>(o);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        uint32_t query = lane / 4 + i * 8;
        if (query >= n)
            continue;
        size_t at = result_at(c, k, query);
        float m = st->m[i], l = st->l[i * 2];
#pragma unroll
        for (int j = 0; j < DP / 32; j++) {
            uint32_t x = warp * (DP / 4) + pair_dim<ROWS>(j);
            float a = o[j][i * 2], b = o[j][i * 2 + 1];
            if (!whole)
                *(float2 *)(c->part_o + (part + query) * DP + x) = make_float2(a, b);
            else if (x < c->dim)
                put_result(c, at, x, finish(a, l), finish(b, l));
        }
        if (warp != 0 || lane % 4 != 0)
            continue;
        if (!whole)
            c->part_ml[part + query] = make_float2(m, l);
        else if (c->lse != NULL)
            c->lse[at] = log_sum(m, l);
    }
}

/* Copies of tiles to come: of splits up to end_split. */
struct copies {
    struct cursor ahead;
    uint32_t end_split;
    struct tile_pages at; /* of the tile at `ahead` */
};

template <int DP, int ROWS>
__device__ void copy_next(const struct attend_task *k, const struct lane_pages *pages,
                          struct copies *n, uint32_t to)
{
    if (n->ahead.split < n->end_split) {
        copy_tile<DP, ROWS>(pages, &n->at, n->ahead.pos, n->ahead.end, to,
                            to + few<DP, ROWS>::TILE_BYTES);
        cursor_step(&n->ahead, k);
        if (n->ahead.split < n->end_split)
            find_pages<false>(pages, &n->ahead, &n->at);
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

/* Whether the pages of a CTA's splits may be read while kernels before this one still run. */
__device__ bool is_old(const struct attend_task *k)
{
    struct cursor last = {k->end_split - 1, 0, 0};
    cursor_enter(&last, k);
    return last.end <= k->fresh && (k->n_first == 0 || k->first_end <= k->fresh);
}

/* What the warps of a CTA share beside the ring. */
template <int DP> struct few_memory {
    struct attend_task task;
    struct exchange x;
    struct query_rows<DP> queries;
    uint32_t first_bad[DP];
};

/* Runs the splits of a CTA. */
template <int DP, int ROWS>
__device__ void run_splits(const struct attend_call *c, uint8_t *ring, struct few_memory<DP> *m)
{
    constexpr int stages = few<DP, ROWS>::STAGES, stage_bytes = few<DP, ROWS>::TILE_BYTES * 2;
    const struct attend_task *k = &m->task;
    const uint32_t at = shared_address(ring);
    const bool early = is_old(k);
    struct lane_pages pages = lane_pages_of(c, k->head, k->class_);
    pages.first = pages.table = k->table;
    pages.n_first = k->n_first;
    struct cursor u = {k->split, 0, 0};
    cursor_enter(&u, k);
    struct copies next;
    next.ahead = u;
    next.end_split = k->end_split;
    find_pages<false>(&pages, &u, &next.at);
    if (!early) {
        wait_for_kernel_before();
        copy_queries<DP, ROWS>(c, k, &m->queries);
        copies_end_group();
    }
#pragma unroll 1
    for (uint32_t i = 0; i < stages - 1; i++)
        copy_next<DP, ROWS>(k, &pages, &next, at + i * stage_bytes);
    if (early) {
        wait_for_kernel_before();
        copy_queries<DP, ROWS>(c, k, &m->queries);
        copies_end_group();
        copies_wait<0>();
    } else {
        copies_wait<stages - 1>();
    }
    __syncthreads();
    uint32_t q[DP / 16][4], causal[2];
    load_queries<DP, ROWS>(&m->queries, k->n_rows * c->group, q);
    for (int i = 0; i < 2; i++)
        causal[i] = query_limit(c, k, threadIdx.x % 32 / 4 + i * 8, false);
    float o[DP / 32][4] = {};
    struct few_state st = {{LOWEST, LOWEST}, {}};

    for (uint32_t i = 0; u.split < next.end_split; i++) {
        const uint32_t stage = i % stages, k_at = at + stage * stage_bytes;
        const bool first = u.split < k->n_first;
        uint32_t limit[2] = {first ? k->first_end : causal[0], first ? k->first_end : causal[1]};
        copies_wait<stages - 2>();
        __syncthreads(); /* the tile is there, and nobody reads the one before it any more */
        copy_next<DP, ROWS>(k, &pages, &next, at + (i + stages - 1) % stages * stage_bytes);
        uint8_t *v = ring + stage * stage_bytes + few<DP, ROWS>::TILE_BYTES;
        const bool mixed = !first && k->n_rows > 1 && u.pos + CUDA_TILE > k->pos + 1;
        const bool bad = mixed && has_bad<DP, ROWS>(v);
        if (bad)
            clear_bad<DP, ROWS>(v, u.pos, m->first_bad);
        float s[2][4], alpha[2];
        warp_score<DP, ROWS>(q, k_at, s);
        if (u.pos + CUDA_TILE > min(limit[0], limit[1]))
            hide(u.pos, limit, s);
        weigh(c, &m->x, s, &st, alpha);
#pragma unroll
        for (int j = 0; j < DP / 32 * 4; j++)
            o[j / 4][j % 4] *= alpha[j / 2 % 2];
#pragma unroll
        for (int j = 0; j < 4; j++)
            st.l[j] *= alpha[j / 2];
        sum_values<DP, ROWS>(&m->x, k_at + few<DP, ROWS>::TILE_BYTES, o, st.l);
        if (bad) {
#pragma unroll
            for (int j = 0; j < DP / 32 * 4; j++)
                if (m->first_bad[threadIdx.x / 32 * (DP / 4) + sum_dim<ROWS>(j / 4, j % 2)] <
                    limit[j / 2 % 2])
                    o[j / 4][j % 4] = NAN;
        }
        uint32_t split = u.split;
        cursor_step(&u, k);
        if (u.split == split)
            continue;
        store<DP, ROWS>(c, k, split, &st, o);
#pragma unroll
        for (int j = 0; j < DP / 32 * 4; j++)
            o[j / 4][j % 4] = 0;
        st = {{LOWEST, LOWEST}, {}};
    }
}

/* The last CTA of a task ends it. */
template <int DP> __device__ void end_task(const struct attend_call *c, const struct attend_task *k)
{
    if (!arrived_last(c->arrived + k->counter, 1, k->n_items))
        return;
    struct attend_parts p = {};
    p.o = c->part_o + (size_t)k->partial * DP;
    p.ml = c->part_ml + k->partial;
    p.n = k->n_rows * c->group;
    p.n_first = k->n_first;
    p.n_table = k->n_splits - k->n_first;
    p.table_slot = k->n_first;
    for (uint32_t query = threadIdx.x / 32; query < p.n; query += CUDA_THREADS / 32)
        fold_query<DP>(c, &p, query, result_at(c, k, query));
}

template <int DP, int ROWS>
__global__ void __launch_bounds__(CUDA_THREADS, few<DP, ROWS>::CTAS)
    few_kernel(const __grid_constant__ struct attend_call c)
{
    extern __shared__ __align__(128) uint8_t memory[];
    __shared__ struct few_memory<DP> m;
    allow_next_kernel();
    if (threadIdx.x < sizeof m.task / 4)
        ((uint32_t *)&m.task)[threadIdx.x] = ((const uint32_t *)&c.tasks[blockIdx.x])[threadIdx.x];
    __syncthreads();
    if (m.task.table == NULL) {
        wait_for_kernel_before(); /* a later kernel relies on it */
        return;
    }
    run_splits<DP, ROWS>(&c, memory, &m);
    if (m.task.fold == FOLD_LAST)
        end_task<DP>(&c, &m.task);
}

/* Launched while the kernel before it still runs, as far as the device knows how. */
template <int DP, int ROWS> void launch(struct cuda_backend *b, const struct attend_call *c)
{
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t how = {};
    how.gridDim = dim3(c->n_tasks);
    how.blockDim = dim3(CUDA_THREADS);
    how.dynamicSmemBytes = few<DP, ROWS>::BYTES;
    how.stream = b->stream;
    how.attrs = &early;
    how.numAttrs = b->overlaps ? 1 : 0;
    cuda_ok(b, cudaLaunchKernelEx(&how, few_kernel<DP, ROWS>, *c), "attend (few rows)");
}

} /* namespace */

void attend_run_few(struct cuda_backend *b, const void *params)
{
    const struct attend_call *c = (const struct attend_call *)params;
    attend_by_shape(c->dim, c->fp8, [=](auto s) { launch<s.DP, s.ROWS>(b, c); });
}

void attend_prepare_few(void)
{
    attend_each_shape([](auto s) {
        (void)cudaFuncSetAttribute(few_kernel<s.DP, s.ROWS>,
                                   cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   few<s.DP, s.ROWS>::BYTES);
        (void)cudaGetLastError(); /* attend_fits() says what the device cannot run */
    });
}

size_t attend_few_bytes(uint32_t dim, bool fp8)
{
    size_t bytes = 0;
    attend_by_shape(dim, fp8,
                    [&](auto s) { bytes = few<s.DP, s.ROWS>::BYTES + s.DP * sizeof(uint32_t); });
    return bytes + sizeof(struct few_memory<CUDA_MAX_DIM>);
}
