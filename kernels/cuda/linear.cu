/* `linear`: which way to multiply, and the wide way, through cuBLASLt.
 *
 * Up to SKINNY_ROWS rows go to our own kernels (narrow.cu for large weights, else skinny.cu), where a row's bits
 * depend on nothing but the row and the weight. More rows are gathered, normalised and rounded to bf16 into scratch, then
 * multiplied with float sums (gemm.cu). Gate and up are rounded to bf16 on their way to SWIGLU; its result and
 * attention's, where a linear is all that reads them, are bf16 as well and need no preparation there.
 *
 * Of up to SUM_ROWS rows, where launches are what a step waits for, ADD leaves the products of parts of its inputs,
 * and a command that adds them up. A linear that begins with RMSNorm and finds that command queued, of its own input,
 * takes it back: its preparation adds up, normalises and rounds in one kernel. */
#include "kernels/cuda/attend.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/linear.h"
#include "kernels/cuda/prefill.h"

#include <algorithm>
#include <string.h>

enum {
    PREPARE_THREADS = 256,
    SCRATCH_BYTES = 256 << 20, /* gate and up of 4096 rows of Llama-3.1-8B */
    MAX_ROWS = 32768,          /* rows are a grid's y in swiglu_kernel */
    HALF_ROWS = SKINNY_ROWS,   /* up to here there may be another way than the wide one */
    SUM_ROWS = GEMM_SPLIT_ROWS,
    SUM_THREADS = 512,
    SUM_COLS = 8192, /* a thread has a row's numbers in registers, 16 at most */
    WARM_ROWS = 8192,
    WARM_BYTES = 512 << 10,     /* of a matrix; smaller ones are a test's */
    WORKSPACE_BYTES = 64 << 20, /* cuBLASLt's; 32 MiB are said to be enough for it on Hopper */
};

status cuda_linear_open(struct cuda_backend *b)
{
    struct cuda_linear *l = (struct cuda_linear *)mem_alloc(sizeof *l);
    b->linear = l;
    if (!cuda_reserve(b, &l->workspace, &l->workspace_bytes, WORKSPACE_BYTES))
        return err(b->error, "%s", b->text);
    cublasStatus_t st = cublasLtCreate(&l->lt);
    if (st != CUBLAS_STATUS_SUCCESS)
        return err(ERR_DEVICE, "cuda: cuBLASLt does not start: %s", cublasLtGetStatusString(st));
    TRY(cuda_skinny_open(b));
    return cuda_narrow_open(b);
}

void cuda_linear_close(struct cuda_backend *b)
{
    if (b->linear == NULL)
        return;
    cuda_upload_close(b);
    cudaFree(b->linear->x);
    cudaFree(b->linear->wide);
    cudaFree(b->linear->parts);
    cudaFree(b->linear->workspace);
    cudaFree(b->linear->counters);
    cudaFree(b->linear->sums);
    if (b->linear->lt != NULL)
        cublasLtDestroy(b->linear->lt);
    mem_free(b->linear->gemms);
    mem_free(b->linear);
    b->linear = NULL;
}

/* Sum over the block, the same in every thread; a fixed order. */
template <int THREADS> __device__ static float block_sum(float v)
{
    __shared__ float sums[THREADS / 32];
    for (int d = 16; d > 0; d /= 2)
        v += __shfl_xor_sync(0xffffffffu, v, d);
    if (threadIdx.x % 32 == 0)
        sums[threadIdx.x / 32] = v;
    __syncthreads();
    v = 0;
    for (int i = 0; i < THREADS / 32; i++)
        v += sums[i];
    return v;
}

__device__ static inline void wait_for_inputs(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ static inline uint32_t pack_pair(float a, float b)
{
    __nv_bfloat162 v = __floats2bfloat162_rn(a, b);
    return *(const uint32_t *)&v;
}

__device__ static inline float2 unpack_pair(uint32_t v)
{
    return __bfloat1622float2(*(const __nv_bfloat162 *)&v);
}

/* A block per row: gather, RMSNorm (gain not NULL), round to bf16, zeros up to the pitch. Bound by
 * HBM: reads 4 bytes per number (the second pass comes from L1), writes 2. Op: linear. */
__global__ static void __launch_bounds__(PREPARE_THREADS)
    prepare_kernel(const float *in, const uint32_t *rows, uint32_t first, const float *gain,
                   float eps, uint32_t cols, uint32_t pitch, __nv_bfloat16 *out)
{
    wait_for_inputs();
    uint32_t i = first + blockIdx.x, whole = cols % 4 == 0 ? cols : 0; /* in float4s */
    const float *x = in + (size_t)(rows != NULL ? rows[i] : i) * cols;
    __nv_bfloat16 *to = out + (size_t)blockIdx.x * pitch;
    float scale = 1;
    if (gain != NULL) {
        float squares = 0;
        for (uint32_t k = threadIdx.x * 4; k < whole; k += PREPARE_THREADS * 4) {
            float4 v = *(const float4 *)(x + k);
            squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
        }
        for (uint32_t k = whole + threadIdx.x; k < cols; k += PREPARE_THREADS)
            squares += x[k] * x[k];
        scale = rsqrtf(block_sum<PREPARE_THREADS>(squares) / (float)cols + eps);
    }
    for (uint32_t k = threadIdx.x * 4; k < whole; k += PREPARE_THREADS * 4) {
        float4 v = *(const float4 *)(x + k), g = make_float4(1, 1, 1, 1);
        if (gain != NULL)
            g = *(const float4 *)(gain + k);
        *(uint2 *)(to + k) = make_uint2(pack_pair(v.x * scale * g.x, v.y * scale * g.y),
                                        pack_pair(v.z * scale * g.z, v.w * scale * g.w));
    }
    for (uint32_t k = whole + threadIdx.x; k < pitch; k += PREPARE_THREADS)
        to[k] = __float2bfloat16(k >= cols ? 0 : gain != NULL ? x[k] * scale * gain[k] : x[k]);
}

/* Of rows that a product left in parts, or that are whole (n_parts 0). */
struct sum_args {
    float *x;           /* [n][cols]: the parts are added here */
    const float *parts; /* [n_parts][n][cols] */
    const float *gain;  /* NULL: there is nothing to do but add */
    __nv_bfloat16 *out; /* [n][pitch]: normalised */
    uint32_t n_parts, n, cols, pitch;
    float eps;
};

/* A block per row, FOURS groups of four numbers in a thread's registers: x += parts; then RMSNorm, rounded to bf16,
 * zeros up to the pitch. Bound by latency: the launch, a trip to L2, a barrier; gains come before the wait. Ops: linear,
 * ADD and the preparation of what follows it. */
template <int FOURS>
__global__ static void __launch_bounds__(SUM_THREADS, 1)
    sum_kernel(const __grid_constant__ struct sum_args a)
{
    const uint32_t first = threadIdx.x * 4;
    float *x = a.x + (size_t)blockIdx.x * a.cols;
    float4 v[FOURS], gain[FOURS], part[GEMM_PARTS][FOURS];
    auto load = [&](float4 *to, const float *from) {
#pragma unroll
        for (int i = 0; i < FOURS; i++)
            if (first + i * SUM_THREADS * 4 < a.cols)
                to[i] = __ldcg((const float4 *)(from + first + i * SUM_THREADS * 4));
    };
    if (a.gain != NULL)
        load(gain, a.gain);
    wait_for_inputs();
    load(v, x);
#pragma unroll
    for (uint32_t p = 0; p < GEMM_PARTS; p++)
        if (p < a.n_parts)
            load(part[p], a.parts + ((size_t)p * a.n + blockIdx.x) * a.cols);
    float squares = 0;
#pragma unroll
    for (int i = 0; i < FOURS; i++) {
        const uint32_t k = first + i * SUM_THREADS * 4;
        if (k >= a.cols)
            continue;
#pragma unroll
        for (uint32_t p = 0; p < GEMM_PARTS; p++)
            if (p < a.n_parts)
                v[i] = make_float4(v[i].x + part[p][i].x, v[i].y + part[p][i].y,
                                   v[i].z + part[p][i].z, v[i].w + part[p][i].w);
        if (a.n_parts > 0)
            *(float4 *)(x + k) = v[i];
        squares += v[i].x * v[i].x + v[i].y * v[i].y + v[i].z * v[i].z + v[i].w * v[i].w;
    }
    if (a.gain == NULL)
        return;
    const float scale = rsqrtf(block_sum<SUM_THREADS>(squares) / (float)a.cols + a.eps);
    __nv_bfloat16 *to = a.out + (size_t)blockIdx.x * a.pitch;
#pragma unroll
    for (int i = 0; i < FOURS; i++) {
        const uint32_t k = first + i * SUM_THREADS * 4;
        if (k < a.cols)
            *(uint2 *)(to + k) =
                make_uint2(pack_pair(v[i].x * scale * gain[i].x, v[i].y * scale * gain[i].y),
                           pack_pair(v[i].z * scale * gain[i].z, v[i].w * scale * gain[i].w));
    }
    if (threadIdx.x < a.pitch - a.cols)
        to[a.cols + threadIdx.x] = __float2bfloat16(0);
}

static void launch_sum(struct cuda_backend *b, const struct sum_args *a)
{
    struct cuda_launch how;
    cuda_launch_early(b, &how, dim3(a->n), SUM_THREADS, 0);
    (void)cuda_ok(b,
                  cudaLaunchKernelEx(&how.config,
                                     a->cols <= SUM_COLS / 2 ? sum_kernel<2> : sum_kernel<4>, *a),
                  "linear: sum");
}

/* As a command: adds, and that is all. */
static void run_sum(struct cuda_backend *b, const void *params)
{
    launch_sum(b, (const struct sum_args *)params);
}

static bool has_sum_kernel(uint32_t n_rows, uint32_t cols)
{
    return n_rows <= SUM_ROWS && cols % 4 == 0 && cols <= SUM_COLS;
}

/* out = silu(gate) * up of rows [gate | up], as float or as bf16; a thread has WIDTH columns. Bound by HBM: 4
 * bytes in and 4 or 2 out per result. Op: linear. */
template <int WIDTH>
__global__ static void __launch_bounds__(PREPARE_THREADS)
    swiglu_kernel(const __nv_bfloat16 *wide, uint32_t half, float *out, __nv_bfloat16 *half_out)
{
    wait_for_inputs();
    uint32_t k = (blockIdx.x * PREPARE_THREADS + threadIdx.x) * WIDTH;
    if (k >= half)
        return;
    const __nv_bfloat16 *row = wide + (size_t)blockIdx.y * 2 * half;
    size_t at = (size_t)blockIdx.y * half + k;
    if (WIDTH == 1) {
        float g = __bfloat162float(row[k]),
              v = g / (1 + expf(-g)) * __bfloat162float(row[half + k]);
        if (half_out != NULL)
            half_out[at] = __float2bfloat16(v);
        else
            out[at] = v;
        return;
    }
    uint4 gates = *(const uint4 *)(row + k), ups = *(const uint4 *)(row + half + k);
    const uint32_t gate[4] = {gates.x, gates.y, gates.z, gates.w};
    const uint32_t up[4] = {ups.x, ups.y, ups.z, ups.w};
    float v[8];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float2 g = unpack_pair(gate[i]), u = unpack_pair(up[i]);
        v[2 * i] = g.x / (1 + expf(-g.x)) * u.x;
        v[2 * i + 1] = g.y / (1 + expf(-g.y)) * u.y;
    }
    if (half_out != NULL) {
        *(uint4 *)(half_out + at) = make_uint4(pack_pair(v[0], v[1]), pack_pair(v[2], v[3]),
                                               pack_pair(v[4], v[5]), pack_pair(v[6], v[7]));
    } else {
        *(float4 *)(out + at) = make_float4(v[0], v[1], v[2], v[3]);
        *(float4 *)(out + at + 4) = make_float4(v[4], v[5], v[6], v[7]);
    }
}

/* The wide way as a command: rows [first, first + n) of a call, n being the product's. */
struct wide_call {
    struct gemm_call gemm;
    struct sum_args sum; /* prepares the input; n 0: not this */
    const float *in;     /* so does prepare_kernel; NULL: gemm.x is there already */
    const float *gain;
    const uint32_t *rows;    /* NULL: 0 and on */
    float *out;              /* of SWIGLU, or ... */
    __nv_bfloat16 *half_out; /* ... this */
    float eps;
    uint32_t first, cols;
    bool pair;
};

static void run_wide(struct cuda_backend *b, const void *params)
{
    const struct wide_call *c = (const struct wide_call *)params;
    const struct gemm_call *g = &c->gemm;
    struct cuda_launch how;
    if (c->sum.n > 0) {
        launch_sum(b, &c->sum);
    } else if (c->in != NULL) {
        cuda_launch_early(b, &how, dim3(g->shape.n), PREPARE_THREADS, 0);
        (void)cuda_ok(b,
                      cudaLaunchKernelEx(&how.config, prepare_kernel, c->in, c->rows, c->first,
                                         c->gain, c->eps, c->cols, g->shape.pitch,
                                         (__nv_bfloat16 *)g->x),
                      "linear: prepare");
    }
    if (!cuda_gemm_run(b, g))
        (void)cuda_ok(b, cudaErrorUnknown, "linear: cuBLASLt");
    if (!c->pair)
        return;
    uint32_t half = g->shape.w_rows / 2, width = half % 8 == 0 ? 8 : 1;
    uint32_t columns = width * PREPARE_THREADS;
    cuda_launch_early(b, &how, dim3((half + columns - 1) / columns, g->shape.n), PREPARE_THREADS,
                      0);
    (void)cuda_ok(b,
                  cudaLaunchKernelEx(&how.config, width == 8 ? swiglu_kernel<8> : swiglu_kernel<1>,
                                     (const __nv_bfloat16 *)g->out, half, c->out, c->half_out),
                  "linear: swiglu");
}

/* Rows of a product's input that attention has not left as bf16, beside those that it has. */
struct rest_call {
    const float *in;
    __nv_bfloat16 *out;
    uint32_t first, n, cols;
};

static void run_rest(struct cuda_backend *b, const void *params)
{
    const struct rest_call *c = (const struct rest_call *)params;
    struct cuda_launch how;
    cuda_launch_early(b, &how, dim3(c->n), PREPARE_THREADS, 0);
    (void)cuda_ok(b,
                  cudaLaunchKernelEx(&how.config, prepare_kernel, c->in, (const uint32_t *)NULL,
                                     c->first, (const float *)NULL, 0.0f, c->cols, c->cols,
                                     c->out + (size_t)c->first * c->cols),
                  "linear: prepare");
}

static void queue_rest(struct cuda_backend *b, const struct linear_args *a,
                       const struct prefill_passed *p)
{
    for (uint32_t i = 0, at = 0; i <= p->n; i++) {
        const uint32_t end = i < p->n ? p->first[i] : a->n_rows;
        struct rest_call c;
        memset(&c, 0, sizeof c);
        c.in = (const float *)a->in;
        c.out = p->o;
        c.first = at;
        c.n = end - at;
        c.cols = a->w->cols;
        if (end > at)
            cuda_do(b, run_rest, &c, sizeof c);
        at = i < p->n ? p->first[i] + p->rows[i] : end;
    }
}

/* Rows at a time, so that scratch stays small: many, for cuBLAS to be fast, and whole tiles of them. */
static uint32_t rows_at_a_time(const struct linear_args *a)
{
    size_t row = a->mode == LINEAR_SWIGLU ? a->w->rows : 0;
    row = std::max(row, (size_t)a->w->pitch) * sizeof(__nv_bfloat16);
    size_t most = std::min(std::max(SCRATCH_BYTES / row, (size_t)1), (size_t)MAX_ROWS);
    return (uint32_t)(most > 1024 ? most / 1024 * 1024 : most);
}

/* Only where both that leave and read such numbers take the wide way. */
bool cuda_linear_is_half(uint32_t n_rows, uint32_t cols)
{
    return n_rows > HALF_ROWS && cols % WEIGHT_PAD == 0;
}

static bool leaves_parts(const struct linear_args *a, uint32_t n)
{
    return a->mode == LINEAR_ADD && a->norm_gain == NULL && has_sum_kernel(n, a->w->rows);
}

/* RMSNorm of rows in order, with the sum that the last command would make of them. */
static void find_sum(struct cuda_backend *b, const struct linear_args *a, uint32_t at,
                     struct wide_call *c)
{
    const struct weight *w = a->w;
    const uint32_t n = c->gemm.shape.n;
    float *x = (float *)(uintptr_t)a->in + (size_t)at * w->cols;
    const struct sum_args *last = (const struct sum_args *)cuda_queued(b, run_sum);
    if (last != NULL && last->x == x && last->n == n && last->cols == w->cols) {
        memcpy(&c->sum, last, sizeof c->sum);
        cuda_unqueue(b);
    }
    c->sum.x = x;
    c->sum.gain = (const float *)a->norm_gain;
    c->sum.out = (__nv_bfloat16 *)b->linear->x;
    c->sum.n = n;
    c->sum.cols = w->cols;
    c->sum.pitch = w->pitch;
    c->sum.eps = a->norm_eps;
}

/* Where the product's input is, or what makes it there. half: in as bf16; NULL: it is floats, or what a linear
 * left. */
static void find_input(struct cuda_backend *b, const struct linear_args *a, const uint32_t *rows,
                       const __nv_bfloat16 *half, uint32_t at, struct wide_call *c)
{
    const struct weight *w = a->w;
    c->gemm.x = (const __nv_bfloat16 *)b->linear->x;
    if (half != NULL)
        c->gemm.x = half + (size_t)at * w->cols;
    else if (a->from_linear && cuda_linear_is_half(a->n_rows, w->cols))
        c->gemm.x = (const __nv_bfloat16 *)a->in + (size_t)at * w->cols;
    else if (a->norm_gain != NULL && rows == NULL && has_sum_kernel(c->gemm.shape.n, w->cols))
        find_sum(b, a, at, c);
    else
        c->in = (const float *)a->in;
}

/* The product of rows [at, at + n) in parts, and their sum. */
static bool queue_parts(struct cuda_backend *b, const struct linear_args *a, struct wide_call *c)
{
    struct cuda_linear *l = b->linear;
    struct gemm_call *g = &c->gemm;
    const size_t room = cuda_bucket(g->shape.n) * g->shape.w_rows * GEMM_PARTS * sizeof(float);
    struct sum_args sum;
    if (!cuda_reserve(b, &l->parts, &l->parts_bytes, room))
        return false;
    g->shape.add = false;
    g->shape.align = 16;
    g->out = l->parts;
    if (!cuda_gemm_prepare_parts(b, g))
        return false;
    cuda_do(b, run_wide, c, sizeof *c);
    memset(&sum, 0, sizeof sum);
    sum.x = (float *)a->out + (size_t)c->first * g->shape.w_rows;
    sum.parts = (const float *)l->parts;
    sum.n_parts = g->shape.parts;
    sum.n = g->shape.n;
    sum.cols = g->shape.w_rows;
    cuda_do(b, run_sum, &sum, sizeof sum);
    return true;
}

static bool queue_piece(struct cuda_backend *b, const struct linear_args *a, const uint32_t *rows,
                        const __nv_bfloat16 *half, uint32_t at, uint32_t n)
{
    const struct weight *w = a->w;
    struct cuda_linear *l = b->linear;
    bool pair = a->mode == LINEAR_SWIGLU;
    uint32_t out_cols = pair ? w->rows / 2 : w->rows;
    struct wide_call c;
    memset(&c, 0, sizeof c);
    struct gemm_call *g = &c.gemm;
    g->shape.w_rows = w->rows;
    g->shape.pitch = w->pitch;
    g->shape.n = n;
    g->shape.add = a->mode == LINEAR_ADD;
    g->shape.half = pair;
    g->w = w->values;
    find_input(b, a, rows, half, at, &c);
    c.out = (float *)a->out + (size_t)at * out_cols;
    if (a->to_linear && cuda_linear_is_half(a->n_rows, out_cols))
        c.half_out = (__nv_bfloat16 *)a->out + (size_t)at * out_cols;
    g->out = pair ? l->wide : c.out;
    g->shape.align = (uintptr_t)g->out % 16 == 0 ? 16 : 4;
    c.gain = (const float *)a->norm_gain;
    c.rows = rows;
    c.eps = a->norm_eps;
    c.first = at;
    c.cols = w->cols;
    c.pair = pair;
    if (leaves_parts(a, n) && (uintptr_t)c.out % 16 == 0)
        return queue_parts(b, a, &c);
    if (!cuda_gemm_prepare(b, g))
        return false;
    cuda_do(b, run_wide, &c, sizeof c);
    return true;
}

void cuda_linear_wide(struct cuda_backend *b, const struct linear_args *a, const uint32_t *rows)
{
    const struct weight *w = a->w;
    struct cuda_linear *l = b->linear;
    uint32_t step = std::min(a->n_rows, rows_at_a_time(a)), room = (uint32_t)cuda_bucket(step);
    CHECK(!a->from_linear || (a->rows == NULL && a->norm_gain == NULL));
    CHECK(!a->to_linear || a->mode == LINEAR_SWIGLU);
    if (!cuda_reserve(b, &l->x, &l->x_bytes, (size_t)room * w->pitch * sizeof(__nv_bfloat16)) ||
        (a->mode == LINEAR_SWIGLU && !cuda_reserve(b, &l->wide, &l->wide_bytes,
                                                   (size_t)room * w->rows * sizeof(__nv_bfloat16))))
        return;
    const struct prefill_passed *p = a->from_attend ? cuda_prefill_passed(b, a->in) : NULL;
    const __nv_bfloat16 *half = NULL;
    if (p != NULL) {
        queue_rest(b, a, p);
        half = p->o;
    } else if (a->from_attend) {
        half = attend_passed(b, a->in, a->n_rows);
    }
    CHECK(half == NULL || (rows == NULL && a->norm_gain == NULL && w->pitch == w->cols));
    for (uint32_t at = 0; at < a->n_rows; at += step)
        if (!queue_piece(b, a, rows, half, at, std::min(step, a->n_rows - at)))
            return;
}

/* The first call of a matrix of some size, in the engine's warm-up, chooses cuBLASLt's kernels for all numbers of
 * rows: later it would delay somebody's answer. */
static void warm_up(struct cuda_backend *b, const struct linear_args *a)
{
    const struct weight *w = a->w;
    uint32_t most = std::min(rows_at_a_time(a), (uint32_t)WARM_ROWS);
    struct gemm_call c;
    memset(&c, 0, sizeof c);
    c.shape.w_rows = w->rows;
    c.shape.pitch = w->pitch;
    c.shape.n = std::min(most, 16u); /* if this is known, the others are */
    c.shape.align = 16;
    c.shape.parts = leaves_parts(a, c.shape.n);
    c.shape.add = a->mode == LINEAR_ADD && c.shape.parts == 0;
    c.shape.half = a->mode == LINEAR_SWIGLU;
    if (w->bytes < WARM_BYTES || cuda_gemm_is_known(b, &c.shape))
        return;
    if (!cuda_reserve(b, &b->linear->x, &b->linear->x_bytes,
                      cuda_bucket(most) * w->pitch * sizeof(__nv_bfloat16)))
        return;
    c.w = w->values;
    c.x = (const __nv_bfloat16 *)b->linear->x;
    cuda_gemm_warm(b, &c, most);
}

/* True if the list says nothing: then it need not be staged, nor read. */
static bool in_order(const uint32_t *rows, uint32_t n)
{
    for (uint32_t i = 0; rows != NULL && i < n; i++)
        if (rows[i] != i)
            return false;
    return true;
}

void cuda_linear(struct backend *be, const struct linear_args *a)
{
    struct cuda_backend *b = (struct cuda_backend *)be;
    const uint32_t *rows = NULL;
    if (a->n_rows == 0 || a->w->rows == 0)
        return;
    if (!in_order(a->rows, a->n_rows) &&
        (rows = (const uint32_t *)cuda_stage(b, a->rows, a->n_rows * sizeof *rows)) == NULL)
        return;
    warm_up(b, a);
    CHECK(!a->from_attend || a->n_rows > HALF_ROWS || attend_passed(b, a->in, a->n_rows) == NULL);
    if (cuda_narrow_takes(b, a)) {
        cuda_narrow_run(b, a, rows);
        return;
    }
    struct skinny_plan p = {};
    if (a->n_rows <= SKINNY_ROWS)
        p = cuda_skinny_plan(b, a);
    if (p.tiles != 0)
        cuda_skinny_run(b, a, rows, p);
    else
        cuda_linear_wide(b, a, rows);
}
