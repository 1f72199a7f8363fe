/* Linear layers of at most 8 rows: decode's time is the time to stream the weights once.
 *
 * Tensor cores do the sums (m16n8k16): 16 rows of W on the M side, the up to 8 input rows on the N
 * side; missing ones are zeros, and cost nothing, since the multiplications are hidden behind memory.
 * A product does not care in which order it takes its inputs as long as both operands agree: so lane
 * (g, t) of a warp reads 16 bytes, inputs 8 t to 8 t + 7 of a step of 32, of rows g and g + 8 of W and of
 * input row g, and these are its operands of two instructions: no shared memory and no transposition
 * for W.
 *
 * Blocks are 8 warps and stay: each walks over its share of the rows, and its loads for the next rows go
 * out before it finishes these. The inputs are cut into slices, so that also a matrix of few rows
 * fills the machine; warps of a block share slices and rows (plan in linear.h), and up to 8 blocks of a
 * cluster share the slices of their rows, because a block must stage what it multiplies of all input rows:
 * 8 rows are 32 bytes per input, as many as 16 rows of W. Partial sums meet in (distributed) shared memory
 * and are added in the order of slices.
 *
 * RMSNorm: x * gain is staged, 1 / rms multiplies the result, and the sum of squares is a by-product of
 * staging. Weights do not depend on the operation before: the first loads, 64 KiB per multiprocessor, go
 * out before the wait for it (programmatic dependent launch); that is why a block takes no more than half
 * of a multiprocessor's registers: the next operation's blocks must find room beside it. */
#include "kernels/cuda/linear.h"

#include <algorithm>
#include <cooperative_groups.h>
#include <string.h>

namespace cg = cooperative_groups;

enum {
    WARPS = 8,
    THREADS = 32 * WARPS,
    STEP = 32,             /* inputs of a step: a lane's 16 bytes, four lanes to a row */
    CHUNK = 128,           /* inputs that a warp stages at a time: 16 bytes a lane */
    MAX_SHARED = 110 << 10 /* of a block: two on a multiprocessor */
};

struct skinny_args {
    const __nv_bfloat16 *w;
    const float *in, *gain; /* gain: NULL: no norm */
    float *out;
    const uint32_t *rows;    /* of in; NULL: 0 and on */
    uint32_t n, cols, steps; /* steps: the pitch in STEPs */
    uint32_t out_rows;       /* numbers of a row of out */
    uint32_t slices_log2, split_log2;
    uint32_t groups; /* of as many rows as a cluster takes at a time */
    float eps;
    bool add;
};

/* Shared memory before the staged inputs. */
template <int TILES> struct partials {
    /* Of this turn and the one before. + 4: the lanes that store an accumulator hit different banks. */
    float sum[2][WARPS][SKINNY_ROWS][16 * TILES + 4];
    float squares[WARPS][SKINNY_ROWS]; /* by slice of the block */
    float scale[SKINNY_ROWS];
};

/* Streamed: each byte of W is used once, by one lane. */
__device__ static inline uint4 load_weights(const __nv_bfloat16 *p)
{
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

/* First step of a slice. */
__host__ __device__ static inline uint32_t slice_start(uint32_t steps, uint32_t slices_log2,
                                                       uint32_t slice)
{
    return (uint32_t)((uint64_t)steps * slice >> slices_log2);
}

/* Steps between staged rows: room for the longest slice, and odd, so that the two rows that a quarter
 * of a warp reads lie in different banks. */
__host__ __device__ static inline uint32_t staged_steps(uint32_t steps, uint32_t slices_log2)
{
    return (steps + (1u << slices_log2) - 1) >> slices_log2 | 1;
}

/* Four inputs from k on; zeros behind the end. */
__device__ static inline float4 load4(const float *x, uint32_t k, uint32_t cols)
{
    if (cols % 4 == 0 && k < cols)
        return *(const float4 *)(x + k);
    return make_float4(k < cols ? x[k] : 0, k + 1 < cols ? x[k + 1] : 0,
                       k + 2 < cols ? x[k + 2] : 0, k + 3 < cols ? x[k + 3] : 0);
}

/* Where things of this thread lie. */
struct place {
    uint32_t warp, lane, rank; /* rank: of the block in its cluster */
    uint32_t block_log2, slice,
        wr;              /* log2 of slices per block; this warp's, and its group of rows */
    uint32_t begin, end; /* steps of the slice */
};

__device__ static inline struct place find_place(const struct skinny_args &a)
{
    struct place at;
    at.warp = threadIdx.x / 32;
    at.lane = threadIdx.x % 32;
    at.rank = blockIdx.x & ((1u << a.split_log2) - 1);
    at.block_log2 = a.slices_log2 - a.split_log2;
    at.slice = at.warp & ((1u << at.block_log2) - 1);
    at.wr = at.warp >> at.block_log2;
    uint32_t slice = (at.rank << at.block_log2) + at.slice;
    at.begin = slice_start(a.steps, a.slices_log2, slice);
    at.end = slice_start(a.steps, a.slices_log2, slice + 1);
    return at;
}

/* Staging goes by pieces of CHUNK inputs of one row: a warp's 16-byte loads. */
__host__ __device__ static inline uint32_t slice_chunks(uint32_t steps, uint32_t slices_log2)
{
    uint32_t longest = (steps + (1u << slices_log2) - 1) >> slices_log2;
    return (longest * STEP + CHUNK - 1) / CHUNK;
}

/* Job `job` of a block: chunk job / n of input row job % n. This lane's four inputs begin at k, and
 * are staged at `to`; k >= end: there are none. */
struct chunk {
    uint32_t row, k, end, to;
};

__device__ static inline struct chunk find_chunk(const struct skinny_args &a,
                                                 const struct place &at, uint32_t job)
{
    struct chunk c;
    uint32_t per_slice = slice_chunks(a.steps, a.slices_log2), of = job / a.n;
    uint32_t mine = of / per_slice, slice = (at.rank << at.block_log2) + mine;
    uint32_t begin = slice_start(a.steps, a.slices_log2, slice) * STEP;
    c.row = job % a.n;
    c.k = begin + of % per_slice * CHUNK + at.lane * 4;
    c.end = slice_start(a.steps, a.slices_log2, slice + 1) * STEP;
    c.to = (mine * a.n + c.row) * staged_steps(a.steps, a.slices_log2) * STEP + (c.k - begin);
    return c;
}

__device__ static inline void load_chunk(const struct skinny_args &a, const struct place &at,
                                         uint32_t job, float4 *x, float4 *gain)
{
    struct chunk c = find_chunk(a, at, job);
    *x = *gain = make_float4(0, 0, 0, 0);
    if (c.k >= c.end)
        return;
    uint32_t row = a.rows != NULL ? a.rows[c.row] : c.row;
    *x = load4(a.in + (size_t)row * a.cols, c.k, a.cols);
    if (a.gain != NULL)
        *gain = load4(a.gain, c.k, a.cols);
}

/* x * gain as bf16 to its place; the sum of squares to *squares. */
__device__ static inline void put_chunk(const struct skinny_args &a, const struct place &at,
                                        uint32_t job, float4 v, float4 g, __nv_bfloat16 *to,
                                        float *squares)
{
    struct chunk c = find_chunk(a, at, job);
    if (a.gain != NULL) {
        float sum = v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
        for (int d = 16; d > 0; d /= 2)
            sum += __shfl_xor_sync(0xffffffffu, sum, d);
        if (at.lane == 0)
            *squares = sum;
        v = make_float4(v.x * g.x, v.y * g.y, v.z * g.z, v.w * g.w);
    }
    __nv_bfloat162 half[2] = {__floats2bfloat162_rn(v.x, v.y), __floats2bfloat162_rn(v.z, v.w)};
    if (c.k < c.end)
        *(uint2 *)(to + c.to) = *(const uint2 *)half;
}

/* The slices of this block of all input rows. pieces: scratch, a float per chunk. */
template <int TILES>
__device__ static void stage(const struct skinny_args &a, const struct place &at,
                             struct partials<TILES> *p, __nv_bfloat16 *x, float *pieces)
{
    enum { AT_ONCE = 4 };
    uint32_t per_slice = slice_chunks(a.steps, a.slices_log2);
    uint32_t n = a.n * (per_slice << at.block_log2);
    for (uint32_t first = at.warp; first < n; first += AT_ONCE * WARPS) {
        float4 v[AT_ONCE], g[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (first + i * WARPS < n)
                load_chunk(a, at, first + i * WARPS, &v[i], &g[i]);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (first + i * WARPS < n)
                put_chunk(a, at, first + i * WARPS, v[i], g[i], x, pieces + first + i * WARPS);
    }
    __syncthreads();
    uint32_t row = threadIdx.x % SKINNY_ROWS, slice = threadIdx.x / SKINNY_ROWS;
    if (a.gain == NULL || row >= a.n || slice >= 1u << at.block_log2)
        return;
    float sum = 0;
    for (uint32_t i = 0; i < per_slice; i++)
        sum += pieces[(slice * per_slice + i) * a.n + row];
    p->squares[slice][row] = sum;
}

/* A warp's rows of W, group after group: loads run two rounds of UNROLL steps ahead of the sums. Rounds
 * come in pairs, one for each half of the buffer; a group's last may be empty. */
template <int TILES> struct stream {
    enum { UNROLL = 4 / TILES };
    const __nv_bfloat16 *w[TILES][2]; /* this lane's 16 bytes of step 0, of rows g and g + 8 */
    uint32_t group, at;               /* of the next round to load */
    uint4 buffer[2][UNROLL][TILES][2];
    float sum[TILES][4];
};

/* PAIR: the second tile of a warp is up, half a matrix behind gate; else it is the next 16 rows. */
template <int TILES, bool PAIR>
__device__ static inline void find_rows(const struct skinny_args &a, const struct place &at,
                                        struct stream<TILES> &s)
{
    enum { GROUP = PAIR ? 16 : 16 * TILES };
    uint32_t row = (s.group * (WARPS >> at.block_log2) + at.wr) * GROUP + at.lane / 4;
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            uint32_t of = min(row + 8 * r + (PAIR ? 0 : 16 * i), a.out_rows - 1);
            s.w[i][r] =
                a.w + (of + (PAIR ? (size_t)i * a.out_rows : 0)) * a.steps * STEP + at.lane % 4 * 8;
        }
}

template <int TILES, bool PAIR, int TURN>
__device__ static inline void fetch(const struct skinny_args &a, const struct place &at,
                                    struct stream<TILES> &s)
{
    if (s.group >= a.groups)
        return;
#pragma unroll
    for (int u = 0; u < s.UNROLL; u++)
        if (s.at + u < at.end)
#pragma unroll
            for (int i = 0; i < TILES; i++)
#pragma unroll
                for (int r = 0; r < 2; r++)
                    s.buffer[TURN][u][i][r] = load_weights(s.w[i][r] + (size_t)(s.at + u) * STEP);
    s.at += s.UNROLL;
    if (TURN == 1 && s.at >= at.end) {
        s.at = at.begin;
        s.group += gridDim.x >> a.split_log2;
        find_rows<TILES, PAIR>(a, at, s);
    }
}

/* x: this lane's 16 bytes of input row g at step 0. */
template <int TILES, int TURN>
__device__ static inline void multiply(struct stream<TILES> &s, uint32_t at, uint32_t end,
                                       const __nv_bfloat16 *x, bool used)
{
#pragma unroll
    for (int u = 0; u < s.UNROLL; u++) {
        if (at + u >= end)
            break;
        uint4 b = make_uint4(0, 0, 0, 0);
        if (used)
            b = *(const uint4 *)(x + (size_t)(at + u) * STEP);
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            uint4 lo = s.buffer[TURN][u][i][0], hi = s.buffer[TURN][u][i][1];
            mma(s.sum[i], lo.x, hi.x, lo.y, hi.y, b.x, b.y);
            mma(s.sum[i], lo.z, hi.z, lo.w, hi.w, b.z, b.w);
        }
    }
}

/* Adds up and leaves the sums of one group, then forgets them. */
template <int TILES, bool PAIR>
__device__ static inline void run_group(const struct skinny_args &a, const struct place &at,
                                        struct stream<TILES> &s, const __nv_bfloat16 *x,
                                        float (*sum)[16 * TILES + 4])
{
    uint32_t g = at.lane / 4, t = at.lane % 4;
    for (uint32_t step = at.begin; step < at.end; step += 2 * s.UNROLL) {
        multiply<TILES, 0>(s, step, at.end, x, g < a.n);
        fetch<TILES, PAIR, 0>(a, at, s);
        multiply<TILES, 1>(s, step + s.UNROLL, at.end, x, g < a.n);
        fetch<TILES, PAIR, 1>(a, at, s);
    }
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
        for (int c = 0; c < 4; c++) {
            sum[2 * t + c % 2][16 * i + g + c / 2 * 8] = s.sum[i][c];
            s.sum[i][c] = 0;
        }
}

/* The operation before has ended; the one behind may start, and wait in its turn. */
__device__ static inline void wait_for_inputs(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

__device__ static inline void sync_split(const struct skinny_args &a)
{
#if __CUDA_ARCH__ >= 900
    if (a.split_log2 != 0) {
        cg::this_cluster().sync();
        return;
    }
#endif
    (void)a;
    __syncthreads();
}

/* What another block of the cluster has. */
template <class T> __device__ static inline T *of_block(T *mine, uint32_t rank)
{
#if __CUDA_ARCH__ >= 900
    return cg::this_cluster().map_shared_rank(mine, rank);
#else
    (void)rank;
    return mine;
#endif
}

/* Element (row i of 16 * TILES, input row) of row group wr, added over all slices in order. */
template <int TILES>
__device__ static inline float add_slices(const struct skinny_args &a, const struct place &at,
                                          struct partials<TILES> *p, uint32_t turn, uint32_t wr,
                                          uint32_t row, uint32_t i)
{
    uint32_t n = 1u << a.slices_log2, mask = (1u << at.block_log2) - 1;
    float sum = 0;
#pragma unroll
    for (uint32_t s = 0; s < WARPS; s++)
        if (s < n)
            sum += of_block(p, s >> at.block_log2)
                       ->sum[turn][(wr << at.block_log2) + (s & mask)][row][i];
    return sum;
}

/* 1 / rms of every input row; 1 without a norm. */
template <int TILES>
__device__ static void find_scales(const struct skinny_args &a, const struct place &at,
                                   struct partials<TILES> *p)
{
    uint32_t row = threadIdx.x, mask = (1u << at.block_log2) - 1;
    if (row < a.n) {
        float sum = 0;
        for (uint32_t s = 0; a.gain != NULL && s < 1u << a.slices_log2; s++)
            sum += of_block(p, s >> at.block_log2)->squares[s & mask][row];
        p->scale[row] = a.gain != NULL ? rsqrtf(sum / (float)a.cols + a.eps) : 1.0f;
    }
    __syncthreads();
}

/* The results of a group's rows, shared among the blocks of the cluster. */
template <int TILES, bool PAIR>
__device__ static void finish(const struct skinny_args &a, const struct place &at,
                              struct partials<TILES> *p, uint32_t turn, uint32_t group)
{
    enum { GROUP = PAIR ? 16 : 16 * TILES };
    uint32_t n_rows = (WARPS >> at.block_log2) * GROUP, first_row = group * n_rows;
    for (uint32_t e = at.rank * THREADS + threadIdx.x; e < n_rows * a.n;
         e += THREADS << a.split_log2) {
        uint32_t row = e / n_rows, r = e % n_rows, wr = r / GROUP, i = r % GROUP;
        if (first_row + r >= a.out_rows)
            continue;
        float v = add_slices(a, at, p, turn, wr, row, i) * p->scale[row];
        if (PAIR)
            v = v / (1 + expf(-v)) * (add_slices(a, at, p, turn, wr, row, 16 + i) * p->scale[row]);
        float *to = a.out + (size_t)row * a.out_rows + first_row + r;
        *to = a.add ? *to + v : v;
    }
}

/* See the top. Bound by HBM: reads W once. Ops: linear, all modes. */
template <int TILES, bool PAIR>
__global__ static void __launch_bounds__(THREADS, 2)
    skinny_kernel(const __grid_constant__ struct skinny_args a)
{
    extern __shared__ uint4 shared[];
    struct partials<TILES> *p = (struct partials<TILES> *)shared;
    __nv_bfloat16 *x = (__nv_bfloat16 *)(p + 1);
    struct place at = find_place(a);
    uint32_t stride = staged_steps(a.steps, a.slices_log2) * STEP;
    float *pieces = (float *)(x + (size_t)(a.n << at.block_log2) * stride);

    struct stream<TILES> s;
    s.group = blockIdx.x >> a.split_log2;
    s.at = at.begin;
#pragma unroll
    for (int i = 0; i < TILES; i++)
        s.sum[i][0] = s.sum[i][1] = s.sum[i][2] = s.sum[i][3] = 0;
    find_rows<TILES, PAIR>(a, at, s);
    fetch<TILES, PAIR, 0>(a, at, s);
    fetch<TILES, PAIR, 1>(a, at, s);
    wait_for_inputs();
    stage(a, at, p, x, pieces);

    const __nv_bfloat16 *mine = x + (size_t)(at.slice * a.n + at.lane / 4) * stride +
                                at.lane % 4 * 8 - (size_t)at.begin * STEP;
    uint32_t turn = 0, first = blockIdx.x >> a.split_log2;
    for (uint32_t group = first; group < a.groups; group += gridDim.x >> a.split_log2, turn ^= 1) {
        run_group<TILES, PAIR>(a, at, s, mine, p->sum[turn][at.warp]);
        sync_split(a); /* sums are there, and those of the turn before have been read */
        if (group == first)
            find_scales(a, at, p);
        finish<TILES, PAIR>(a, at, p, turn, group);
    }
    if (a.split_log2 != 0)
        sync_split(a); /* nobody leaves while others read its shared memory */
}

static uint32_t log2_of(uint32_t n)
{
    return (uint32_t)__builtin_ctz(n);
}

/* As a command. */
struct skinny_call {
    struct skinny_args args;
    struct skinny_plan plan;
    size_t shared;
    bool pair, early;
};

template <int TILES, bool PAIR>
static bool launch(struct cuda_backend *b, const struct skinny_call *call)
{
    struct skinny_plan p = call->plan;
    uint32_t most = b->linear->clusters[log2_of(p.split)] * p.per_sm;
    cudaLaunchAttribute attrs[2] = {};
    attrs[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attrs[0].val.programmaticStreamSerializationAllowed = call->early;
    attrs[1].id = cudaLaunchAttributeClusterDimension;
    attrs[1].val.clusterDim.x = p.split;
    attrs[1].val.clusterDim.y = attrs[1].val.clusterDim.z = 1;
    cudaLaunchConfig_t c = {};
    c.gridDim = dim3(std::min(call->args.groups, most) * p.split);
    c.blockDim = dim3(THREADS);
    c.dynamicSmemBytes = call->shared;
    c.stream = b->stream;
    c.attrs = attrs;
    c.numAttrs = b->linear->clusters[1] == 0 ? 0 : p.split > 1 ? 2 : 1;
    return cuda_ok(b, cudaLaunchKernelEx(&c, skinny_kernel<TILES, PAIR>, call->args),
                   "linear: skinny");
}

static void run_skinny(struct cuda_backend *b, const void *params)
{
    const struct skinny_call *call = (const struct skinny_call *)params;
    if (call->pair)
        (void)launch<2, true>(b, call);
    else if (call->plan.tiles == 2)
        (void)launch<2, false>(b, call);
    else
        (void)launch<1, false>(b, call);
}

template <int TILES, bool PAIR> static bool allow_shared(struct cuda_backend *b)
{
    return cuda_ok(b,
                   cudaFuncSetAttribute(skinny_kernel<TILES, PAIR>,
                                        cudaFuncAttributeMaxDynamicSharedMemorySize, MAX_SHARED),
                   "linear: shared memory");
}

/* How many clusters of n blocks run at once, a block per multiprocessor: some are left over where
 * their number in a GPC is no multiple of n. More would run as a second wave. */
static bool count_clusters(struct cuda_backend *b, uint32_t n, uint32_t *count)
{
    cudaLaunchAttribute attr = {};
    attr.id = cudaLaunchAttributeClusterDimension;
    attr.val.clusterDim.x = n;
    attr.val.clusterDim.y = attr.val.clusterDim.z = 1;
    cudaLaunchConfig_t c = {};
    c.gridDim = dim3((uint32_t)b->sms * n);
    c.blockDim = dim3(THREADS);
    c.dynamicSmemBytes = MAX_SHARED;
    c.attrs = &attr;
    c.numAttrs = 1;
    int most = 0;
    bool good = cuda_ok(b, cudaOccupancyMaxActiveClusters(&most, skinny_kernel<2, true>, &c),
                        "linear: clusters");
    *count = std::min((uint32_t)most / 2, (uint32_t)b->sms / n); /* two blocks fit */
    return good;
}

status cuda_skinny_open(struct cuda_backend *b)
{
    int clusters = 0;
    bool good = allow_shared<1, false>(b) && allow_shared<2, false>(b) &&
                allow_shared<2, true>(b) &&
                cuda_ok(b, cudaDeviceGetAttribute(&clusters, cudaDevAttrClusterLaunch, b->device),
                        "linear: clusters");
    b->linear->clusters[0] = (uint32_t)b->sms;
    for (uint32_t i = 1; good && clusters && i < 4; i++)
        good = count_clusters(b, 1u << i, &b->linear->clusters[i]);
    return good ? OK : err(ERR_DEVICE, "%s", b->text);
}

size_t cuda_skinny_shared(const struct linear_args *a, struct skinny_plan p)
{
    uint32_t steps = a->w->pitch / STEP, slices_log2 = log2_of(p.slices);
    size_t rows = (size_t)a->n_rows * (p.slices / p.split);
    return rows * staged_steps(steps, slices_log2) * STEP * sizeof(__nv_bfloat16) +
           rows * slice_chunks(steps, slices_log2) * sizeof(float) +
           (p.tiles == 1 ? sizeof(struct partials<1>) : sizeof(struct partials<2>));
}

void cuda_skinny_run(struct cuda_backend *b, const struct linear_args *a, const uint32_t *rows,
                     struct skinny_plan p)
{
    struct skinny_call c;
    memset(&c, 0, sizeof c);
    c.pair = a->mode == LINEAR_SWIGLU;
    /* Blocks that come before the operation in front has ended crowd on the multiprocessors that have
     * room, and stay there: a start that is 1 us earlier, for small weights; for large ones half of the
     * bandwidth (8B, one row: 5.9 ms a step with it, 4.45 ms without). */
    c.early = a->w->bytes < (8 << 20);
    c.plan = p;
    c.shared = cuda_skinny_shared(a, p);
    struct skinny_args *s = &c.args;
    s->w = a->w->values;
    s->in = (const float *)a->in;
    s->gain = (const float *)a->norm_gain;
    s->out = (float *)a->out;
    s->rows = rows;
    s->n = a->n_rows;
    s->cols = a->w->cols;
    s->steps = a->w->pitch / STEP;
    s->out_rows = c.pair ? a->w->rows / 2 : a->w->rows;
    s->slices_log2 = log2_of(p.slices);
    s->split_log2 = log2_of(p.split);
    uint32_t group_rows = WARPS * p.split / p.slices * (c.pair ? 16 : 16 * p.tiles);
    s->groups = (s->out_rows + group_rows - 1) / group_rows;
    s->eps = a->norm_eps;
    s->add = a->mode == LINEAR_ADD;
    cuda_do(b, run_skinny, &c, sizeof c);
}

/* tiles == 0: not for this kernel. Chosen from tests/cuda/bench_linear's measurements of all plans on an
 * H200: what counts is how much a block must stage (inputs times rows) beside how much it streams. */
struct skinny_plan cuda_skinny_plan(const struct cuda_backend *b, const struct linear_args *a)
{
    bool pair = a->mode == LINEAR_SWIGLU, clusters = b->linear->clusters[1] != 0;
    uint32_t cols = a->w->pitch, inputs = a->n_rows * cols;
    struct skinny_plan p = {.tiles = 1, .slices = 8, .split = 1, .per_sm = 2};
    if (cols < 1024 && a->w->rows > 4096) { /* a slice should be a few rounds of loads */
        p.slices = 4;
    } else if (a->w->bytes < 8 << 20) { /* a block per multiprocessor at most: staging is all */
        p.split = inputs > 4096 ? 8 : inputs > 2048 ? 4 : 1;
    } else if (a->w->rows > 65536) { /* so long that also the start counts for little */
        p.split = inputs > 16384 ? 2 : 1;
    } else if (inputs > 28672 || (inputs > 14336 && cols < 8192)) {
        p.tiles = 2;
        p.split = 8;
    } else if (inputs > 4096) {
        p.split = pair ? 4 : 2;
    } else {
        p.per_sm = pair ? 1 : 2;
    }
    p.tiles = pair ? 2 : p.tiles;
    while (clusters && p.split < p.slices && cuda_skinny_shared(a, p) > MAX_SHARED)
        p.split *= 2;
    p.split = clusters ? p.split : 1;
    if (cuda_skinny_shared(a, p) > MAX_SHARED)
        p.tiles = 0;
    return p;
}
