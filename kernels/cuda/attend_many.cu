/* Attention of tasks with many queries (prefill): a CTA runs one or more splits of one task.
 *
 * Each of 4 warps has 32 queries (16 where head_dim > 128) against every position, so scores and
 * probabilities stay in its registers; queries, K and V are in shared memory, the next tile is on its
 * way. Bound by the tensor cores as mma.sync reaches them, and by reading shared memory. At the end of
 * a split its sums are folded into those of the splits before it, which lie in memory (in L2): the
 * same operations as the merge's, so a row's result does not tell who did them. Op: attend. */
#include "kernels/cuda/attend_mma.h"
#include "kernels/cuda/attend_shape.h"

namespace
{

template <int DP> struct many {
    enum {
        M = DP == 256 ? 1 : 2, /* 16 queries each, per warp */
        QUERIES = M * 16 * 4,
        QUERY_BYTES = QUERIES * DP * 2,
        CTAS = DP == 256 ? 1 : 2,
    };
};

template <int DP, int ROWS> static constexpr int memory_bytes()
{
    return many<DP>::QUERY_BYTES + 4 * tile<DP, ROWS>::BYTES;
}

template <int DP> struct sums {
    float o[many<DP>::M][DP / 8][4];
    float l[many<DP>::M][4], m[many<DP>::M][2];
};

template <int DP> __device__ void clear(struct sums<DP> *s)
{
#pragma unroll
    for (int i = 0; i < many<DP>::M; i++) {
#pragma unroll
        for (int j = 0; j < DP / 8 * 4; j++)
            s->o[i][j / 4][j % 4] = 0;
        s->l[i][0] = s->l[i][1] = s->l[i][2] = s->l[i][3] = 0;
        s->m[i][0] = s->m[i][1] = LOWEST;
    }
}

/* This lane's query of rows i * 16 + g and + 8 of the warp. */
template <int DP> __device__ uint32_t query_of(int i, int half)
{
    return (threadIdx.x / 32 * many<DP>::M + i) * 16 + half * 8 + threadIdx.x % 32 / 4;
}

/* Each warp brings its own queries, their dimensions in the order of load_keys; what is missing is zero. */
template <int DP, int ROWS>
__device__ void copy_queries(const struct attend_call *c, const struct attend_task *k, uint8_t *to)
{
    const uint32_t lane = threadIdx.x % 32, n = k->n_rows * c->group;
    for (uint32_t i = 0; i < many<DP>::M * 16; i++) {
        uint32_t query = threadIdx.x / 32 * many<DP>::M * 16 + i;
        const float *q = query_at(c, k, min(query, n - 1));
#pragma unroll
        for (uint32_t x = lane * 2; x < DP; x += 64) {
            uint32_t v = query < n && x < c->dim ? pack(q[x], q[x + 1]) : 0;
            const uint32_t at = ROWS & ROWS_FP8 ? x / 16 * 16 + x % 16 / 4 * 2 + x % 4 / 2 * 8 : x;
            *(uint32_t *)(to + chunk_at<DP>(query, at / 8) + at % 8 * 2) = v;
        }
    }
}

template <int DP, int ROWS>
__device__ void score(uint32_t q_at, uint32_t k_at, float s[many<DP>::M][8][4])
{
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t query = threadIdx.x / 32 * many<DP>::M * 16 + lane % 16;
#pragma unroll
    for (int i = 0; i < many<DP>::M * 32; i++)
        s[i / 32][i / 4 % 8][i % 4] = 0;
#pragma unroll
    for (int d = 0; d < DP / 16; d++) {
        uint32_t a[many<DP>::M][4];
#pragma unroll
        for (int i = 0; i < many<DP>::M; i++)
            load_matrices(a[i], q_at + chunk_at<DP>(query + i * 16, 2 * d + lane / 16));
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint32_t b[4];
            load_keys<DP, ROWS>(b, k_at, j * 16, d);
#pragma unroll
            for (int i = 0; i < many<DP>::M; i++) {
                multiply(s[i][2 * j], a[i], b);
                multiply(s[i][2 * j + 1], a[i], b + 2);
            }
        }
    }
}

template <int DP>
__device__ void hide(const struct attend_call *c, const struct attend_task *k, uint32_t pos,
                     bool first, float s[many<DP>::M][8][4])
{
#pragma unroll
    for (int i = 0; i < many<DP>::M * 2; i++) {
        uint32_t limit = query_limit(c, k, query_of<DP>(i / 2, i % 2), first);
#pragma unroll
        for (int j = 0; j < 16; j++)
            if (pos + j / 2 * 8 + threadIdx.x % 4 * 2 + j % 2 >= limit)
                s[i / 2][j / 2][i % 2 * 2 + j % 2] = -INFINITY;
    }
}

/* Scores to probabilities of 16 queries; sums so far are scaled to the new greatest score. */
template <int DP>
__device__ void weigh(float scale, float s[8][4], float o[DP / 8][4], float l[4], float m[2])
{
    float alpha[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float top = fmaxf(s[0][i * 2], s[0][i * 2 + 1]);
#pragma unroll
        for (int j = 1; j < 8; j++)
            top = fmaxf(top, fmaxf(s[j][i * 2], s[j][i * 2 + 1]));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        top = fmaxf(m[i], __fmul_rn(top, scale));
        alpha[i] = exp2_fast(m[i] - top);
        m[i] = top;
#pragma unroll
        for (int j = 0; j < 16; j++) {
            float *v = &s[j / 2][i * 2 + j % 2];
            *v = exp2_fast(__fmaf_rn(*v, scale, -top));
        }
    }
    if (!__any_sync(~0u, alpha[0] != 1 || alpha[1] != 1))
        return; /* times 1 */
#pragma unroll
    for (int j = 0; j < DP / 8 * 4; j++)
        o[j / 4][j % 4] *= alpha[j / 2 % 2];
#pragma unroll
    for (int j = 0; j < 4; j++)
        l[j] *= alpha[j / 2];
}

template <int DP, int ROWS>
__device__ void sum_values(uint32_t v_at, float s[many<DP>::M][8][4], struct sums<DP> *sum)
{
    const uint32_t ones[2] = {0x3f803f80, 0x3f803f80};
#pragma unroll
    for (int p = 0; p < 4; p++) {
        uint32_t a[many<DP>::M][4];
#pragma unroll
        for (int i = 0; i < many<DP>::M; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++)
                a[i][j] = pack(s[i][2 * p + j / 2][j % 2 * 2], s[i][2 * p + j / 2][j % 2 * 2 + 1]);
            multiply(sum->l[i], a[i], ones);
        }
#pragma unroll
        for (int j = 0; j < DP / 8; j += 2) {
            uint32_t b[4];
            load_values<DP, ROWS>(b, v_at, p * 16, j);
#pragma unroll
            for (int i = 0; i < many<DP>::M; i++) {
                multiply(sum->o[i][j], a[i], b);
                multiply(sum->o[i][j + 1], a[i], b + 2);
            }
        }
    }
}

enum split_end {
    SPLIT_FINAL = 1, /* the result goes to out */
    SPLIT_FOLD = 2,  /* into the partial result, first */
};

/* Folds the sums of 16 queries' halves into their partial result so far. */
template <int DP, int ROWS>
__device__ void fold_into(const float *po, float2 ml, float o[DP / 8][4], int h, float *m, float *l)
{
    struct fold f = fold_of(ml.x, *m);
    *m = f.m;
    *l = fold_sum(f, ml.y, *l);
#pragma unroll
    for (int j = 0; j < DP / 8; j++) {
        float2 so_far = *(const float2 *)(po + pair_dim<ROWS>(j));
        o[j][h] = fold_sum(f, so_far.x, o[j][h]);
        o[j][h + 1] = fold_sum(f, so_far.y, o[j][h + 1]);
    }
}

/* What happens to a split's sums; `part` is the partial result of the task's first query. */
template <int DP, int ROWS>
__device__ void end_split(const struct attend_call *c, const struct attend_task *k, size_t part,
                          int how, struct sums<DP> *s)
{
    const uint32_t t = threadIdx.x % 4, n = k->n_rows * c->group;
#pragma unroll
    for (int i = 0; i < many<DP>::M; i++)
        pair_sums<ROWS, DP / 8>(s->o[i]);
#pragma unroll
    for (int i = 0; i < many<DP>::M * 2; i++) {
        const uint32_t query = query_of<DP>(i / 2, i % 2);
        const int h = i % 2 * 2;
        float2 *ml = c->part_ml + part + query;
        float *po = c->part_o + (part + query) * DP;
        float m = s->m[i / 2][i % 2], l = s->l[i / 2][h];
        if (query < n && (how & SPLIT_FOLD))
            fold_into<DP, ROWS>(po, *ml, s->o[i / 2], h, &m, &l);
        __syncwarp(); /* four lanes have read ml, which one of them writes */
        if (query < n) {
            const size_t at = result_at(c, k, query);
#pragma unroll
            for (int j = 0; j < DP / 8; j++) {
                const float *o = s->o[i / 2][j] + h;
                const uint32_t x = pair_dim<ROWS>(j);
                if (!(how & SPLIT_FINAL))
                    *(float2 *)(po + x) = make_float2(o[0], o[1]);
                else if (x < c->dim)
                    put_result(c, at, x, finish(o[0], l), finish(o[1], l));
            }
            if (t == 0 && !(how & SPLIT_FINAL))
                *ml = make_float2(m, l);
            else if (t == 0 && c->lse != NULL)
                c->lse[at] = log_sum(m, l);
        }
        __syncwarp(); /* and which all four read at the next split's end */
    }
}

/* Sums that see a value that was taken out are no numbers. */
template <int DP, int ROWS>
__device__ void spoil(const struct attend_call *c, const struct attend_task *k,
                      const uint32_t first_bad[DP], bool first, struct sums<DP> *sum)
{
#pragma unroll
    for (int i = 0; i < many<DP>::M * 2; i++) {
        uint32_t limit = query_limit(c, k, query_of<DP>(i / 2, i % 2), first);
#pragma unroll
        for (int j = 0; j < DP / 8 * 2; j++)
            if (first_bad[sum_dim<ROWS>(j / 2, j % 2)] < limit)
                sum->o[i / 2][j / 2][i % 2 * 2 + j % 2] = NAN;
    }
}

template <int DP, int ROWS>
__global__ void __launch_bounds__(CUDA_THREADS, many<DP>::CTAS)
    many_kernel(const __grid_constant__ struct attend_call c)
{
    extern __shared__ __align__(128) uint8_t memory[];
    constexpr int tile_bytes = tile<DP, ROWS>::BYTES;
    __shared__ struct attend_task task; /* registers are short */
    __shared__ uint32_t first_bad[DP];
    const struct attend_task *k = &task;
    allow_next_kernel();
    if (threadIdx.x == 0)
        task = c.tasks[blockIdx.x];
    wait_for_kernel_before();
    __syncthreads();
    if (task.table == NULL)
        return;
    struct lane_pages pages = lane_pages_of(&c, k->head, k->class_);
    pages.first = pages.table = k->table;
    const uint32_t q_at = shared_address(memory), ring = q_at + many<DP>::QUERY_BYTES;
    struct cursor u = {k->split, 0, 0};
    const uint32_t first_split = u.split, end_of_item = k->end_split;
    const bool alone = k->fold == FOLD_NONE; /* no other CTA has splits of the task */
    struct tile_pages ids;
    cursor_enter(&u, k);
    struct cursor ahead = u;
    find_pages<false>(&pages, &u, &ids);
    copy_tile<DP, ROWS>(&pages, &ids, u.pos, u.end, ring, ring + tile_bytes);
    copies_end_group();
    cursor_step(&ahead, k);
    if (ahead.split < end_of_item)
        find_pages<false>(&pages, &ahead, &ids);
    copy_queries<DP, ROWS>(&c, k, memory);
    struct sums<DP> sum;
    clear(&sum);

    for (uint32_t turn = 0; u.split < end_of_item; turn ^= 1) {
        uint32_t k_at = ring + turn * tile_bytes * 2, to = ring + (turn ^ 1) * tile_bytes * 2;
        copies_wait<0>();
        __syncthreads(); /* the tile is there, and nobody reads the one before it any more */
        if (ahead.split < end_of_item) {
            copy_tile<DP, ROWS>(&pages, &ids, ahead.pos, ahead.end, to, to + tile_bytes);
            cursor_step(&ahead, k);
            if (ahead.split < end_of_item)
                find_pages<false>(&pages, &ahead, &ids);
        }
        copies_end_group();
        bool first = u.split < k->n_first;
        const bool mixed = u.pos + CUDA_TILE > query_limit(&c, k, 0, first);
        uint8_t *v = memory + many<DP>::QUERY_BYTES + (turn * 2 + 1) * tile_bytes;
        const bool bad = mixed && has_bad<DP, ROWS>(v);
        if (bad)
            clear_bad<DP, ROWS>(v, u.pos, first_bad);
        float s[many<DP>::M][8][4];
        score<DP, ROWS>(q_at, k_at, s);
        if (mixed)
            hide<DP>(&c, k, u.pos, first, s);
#pragma unroll
        for (int i = 0; i < many<DP>::M; i++)
            weigh<DP>(c.scale, s[i], sum.o[i], sum.l[i], sum.m[i]);
        sum_values<DP, ROWS>(k_at + tile_bytes, s, &sum);
        if (bad)
            spoil<DP, ROWS>(&c, k, first_bad, first, &sum);
        uint32_t split = u.split;
        cursor_step(&u, k);
        if (u.split == split)
            continue;
        size_t part = k->partial + (alone ? 0 : (size_t)split * k->n_rows * c.group);
        end_split<DP, ROWS>(&c, k, part,
                            (alone && split > first_split ? SPLIT_FOLD : 0) |
                                (alone && u.split == end_of_item ? SPLIT_FINAL : 0),
                            &sum);
        clear(&sum);
    }
}

template <int DP, int ROWS> void launch(struct cuda_backend *b, const struct attend_call *c)
{
    static_assert((int)many<DP>::QUERIES == (DP == 256 ? CUDA_MANY_256 : CUDA_MANY), "tasks fit");
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t how = {};
    how.gridDim = dim3(c->n_tasks);
    how.blockDim = dim3(CUDA_THREADS);
    how.dynamicSmemBytes = memory_bytes<DP, ROWS>();
    how.stream = b->stream;
    how.attrs = &early;
    how.numAttrs = b->overlaps ? 1 : 0;
    cuda_ok(b, cudaLaunchKernelEx(&how, many_kernel<DP, ROWS>, *c), "attend (many rows)");
}

} /* namespace */

void attend_run_many(struct cuda_backend *b, const void *params)
{
    const struct attend_call *c = (const struct attend_call *)params;
    attend_by_shape(c->dim, c->fp8, [=](auto s) { launch<s.DP, s.ROWS>(b, c); });
}

void attend_prepare_many(void)
{
    attend_each_shape([](auto s) {
        (void)cudaFuncSetAttribute(many_kernel<s.DP, s.ROWS>,
                                   cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   memory_bytes<s.DP, s.ROWS>());
        (void)cudaGetLastError(); /* attend_fits() says what the device cannot run */
    });
}

size_t attend_many_bytes(uint32_t dim, bool fp8)
{
    size_t bytes = 0;
    attend_by_shape(
        dim, fp8, [&](auto s) { bytes = memory_bytes<s.DP, s.ROWS>() + s.DP * sizeof(uint32_t); });
    return bytes + sizeof(struct attend_task);
}
