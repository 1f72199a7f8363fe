/* `linear`: which way to multiply, and the wide way, through cuBLASLt.
 *
 * Up to SKINNY_ROWS rows go to our own kernels (narrow.cu for large weights, else skinny.cu), where a row's bits
 * depend on nothing but the row and the weight. More rows are gathered, normalised and rounded to bf16 into scratch, then
 * multiplied with float sums (gemm.cu). Gate and up are rounded to bf16 on their way to SWIGLU; its result, where
 * a linear is all that reads it, is bf16 as well and needs no preparation there. */
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
__device__ static float block_sum(float v)
{
    __shared__ float sums[PREPARE_THREADS / 32];
    for (int d = 16; d > 0; d /= 2)
        v += __shfl_xor_sync(0xffffffffu, v, d);
    if (threadIdx.x % 32 == 0)
        sums[threadIdx.x / 32] = v;
    __syncthreads();
    v = 0;
    for (int i = 0; i < PREPARE_THREADS / 32; i++)
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
        scale = rsqrtf(block_sum(squares) / (float)cols + eps);
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
    const float *in; /* NULL: gemm.x is there already */
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
    if (c->in != NULL) {
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

/* Whether the numbers between two linears are bf16: only where both take the wide way. */
static bool is_half(uint32_t n_rows, uint32_t cols)
{
    return n_rows > HALF_ROWS && cols % WEIGHT_PAD == 0;
}

/* half: in as bf16; NULL: it is floats, or what a linear left. */
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
    if (half != NULL) {
        g->x = half + (size_t)at * w->cols;
    } else if (a->from_linear && is_half(a->n_rows, w->cols)) {
        g->x = (const __nv_bfloat16 *)a->in + (size_t)at * w->cols;
    } else {
        g->x = (const __nv_bfloat16 *)l->x;
        c.in = (const float *)a->in;
    }
    c.out = (float *)a->out + (size_t)at * out_cols;
    if (a->to_linear && is_half(a->n_rows, out_cols))
        c.half_out = (__nv_bfloat16 *)a->out + (size_t)at * out_cols;
    g->out = pair ? l->wide : c.out;
    g->shape.align = (uintptr_t)g->out % 16 == 0 ? 16 : 4;
    c.gain = (const float *)a->norm_gain;
    c.rows = rows;
    c.eps = a->norm_eps;
    c.first = at;
    c.cols = w->cols;
    c.pair = pair;
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
    CHECK(p == NULL || (rows == NULL && a->norm_gain == NULL && w->pitch == w->cols));
    if (p != NULL)
        queue_rest(b, a, p);
    for (uint32_t at = 0; at < a->n_rows; at += step)
        if (!queue_piece(b, a, rows, p != NULL ? p->o : NULL, at, std::min(step, a->n_rows - at)))
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
    c.shape.add = a->mode == LINEAR_ADD;
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
