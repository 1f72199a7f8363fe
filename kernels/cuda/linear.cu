/* `linear`: which way to multiply, and the wide way, through cuBLAS.
 *
 * Up to SKINNY_ROWS rows go to our own kernel (skinny.cu), where a row's bits depend on nothing but
 * the row and the weight. More rows are gathered, normalised and rounded to bf16 into scratch, then
 * multiplied by cuBLAS with float sums. Every step of ours there treats rows one by one too, but cuBLAS
 * chooses its tiles and its order of sums by the number of rows of the call: the same row may differ in
 * its last bits between calls of different size, and between the two ways. Equal calls give equal bits. */
#include "kernels/cuda/linear.h"

#include <algorithm>
#include <string.h>

enum {
    PREPARE_THREADS = 256,
    WIDE_BYTES = 256 << 20, /* gate and up of so many bytes at a time: 2,340 rows of Llama-3.1-8B */
    WORKSPACE_BYTES =
        64 << 20, /* cuBLAS asks for 32 MiB on Hopper; its own could not be captured */
};

status cuda_linear_open(struct cuda_backend *b)
{
    struct cuda_linear *l = (struct cuda_linear *)mem_alloc(sizeof *l);
    b->linear = l;
    if (!cuda_reserve(b, &l->workspace, &l->workspace_bytes, WORKSPACE_BYTES))
        return err(b->error, "%s", b->text);
    cublasStatus_t st = cublasSetWorkspace(b->blas, l->workspace, l->workspace_bytes);
    if (st != CUBLAS_STATUS_SUCCESS)
        return err(ERR_DEVICE, "cuda: cuBLAS: workspace: %s", cublasGetStatusName(st));
    return cuda_skinny_open(b);
}

void cuda_linear_close(struct cuda_backend *b)
{
    if (b->linear == NULL)
        return;
    cuda_upload_close(b);
    cudaFree(b->linear->x);
    cudaFree(b->linear->wide);
    cudaFree(b->linear->workspace);
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

/* A block per row: gather, RMSNorm (gain not NULL), round to bf16, zeros up to the pitch. Bound by
 * HBM: reads 4 bytes per number (the second pass comes from L1), writes 2. Op: linear. */
__global__ static void prepare_kernel(const float *in, const uint32_t *rows, uint32_t first,
                                      const float *gain, float eps, uint32_t cols, uint32_t pitch,
                                      __nv_bfloat16 *out)
{
    uint32_t i = first + blockIdx.x;
    const float *x = in + (size_t)(rows != NULL ? rows[i] : i) * cols;
    __nv_bfloat16 *to = out + (size_t)blockIdx.x * pitch;
    float scale = 1;
    if (gain != NULL) {
        float squares = 0;
        for (uint32_t k = threadIdx.x; k < cols; k += PREPARE_THREADS)
            squares += x[k] * x[k];
        scale = rsqrtf(block_sum(squares) / (float)cols + eps);
    }
    for (uint32_t k = threadIdx.x; k < pitch; k += PREPARE_THREADS)
        to[k] = __float2bfloat16(k >= cols ? 0 : gain != NULL ? x[k] * scale * gain[k] : x[k]);
}

/* out = silu(gate) * up, rows of [gate | up]. Bound by HBM: 12 bytes per result. Op: linear. */
__global__ static void swiglu_kernel(const float *wide, uint32_t half, float *out)
{
    uint32_t k = blockIdx.x * blockDim.x + threadIdx.x;
    if (k >= half)
        return;
    const float *row = wide + (size_t)blockIdx.y * 2 * half;
    float g = row[k];
    out[(size_t)blockIdx.y * half + k] = g / (1 + expf(-g)) * row[half + k];
}

/* The wide way as a command: rows [first, first + n) of a call. */
struct wide_call {
    const __nv_bfloat16 *w;
    const float *in, *gain;
    const uint32_t *rows; /* NULL: 0 and on */
    float *out, *wide;    /* wide: gate and up of SWIGLU, else NULL */
    __nv_bfloat16 *x;
    float eps;
    uint32_t first, n, w_rows, cols, pitch, add;
};

/* out[n][rows] = x[n][cols] W^T, plus out itself with ADD. cuBLAS thinks in columns: out^T = W x^T. */
static void multiply(struct cuda_backend *b, const struct wide_call *c, float *out)
{
    float one = 1, beta = c->add ? 1.0f : 0.0f;
    cublasStatus_t st = cublasGemmEx(b->blas, CUBLAS_OP_T, CUBLAS_OP_N, (int)c->w_rows, (int)c->n,
                                     (int)c->pitch, &one, c->w, CUDA_R_16BF, (int)c->pitch, c->x,
                                     CUDA_R_16BF, (int)c->pitch, &beta, out, CUDA_R_32F,
                                     (int)c->w_rows, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
    if (st != CUBLAS_STATUS_SUCCESS)
        (void)cuda_ok(b, cudaErrorUnknown, cublasGetStatusName(st));
}

static void run_wide(struct cuda_backend *b, const void *params)
{
    const struct wide_call *c = (const struct wide_call *)params;
    prepare_kernel<<<c->n, PREPARE_THREADS, 0, b->stream>>>(c->in, c->rows, c->first, c->gain,
                                                            c->eps, c->cols, c->pitch, c->x);
    (void)cuda_launched(b, "linear: prepare");
    multiply(b, c, c->wide != NULL ? c->wide : c->out);
    if (c->wide == NULL)
        return;
    uint32_t half = c->w_rows / 2;
    swiglu_kernel<<<dim3((half + 255) / 256, c->n), 256, 0, b->stream>>>(c->wide, half, c->out);
    (void)cuda_launched(b, "linear: swiglu");
}

void cuda_linear_wide(struct cuda_backend *b, const struct linear_args *a, const uint32_t *rows)
{
    const struct weight *w = a->w;
    struct cuda_linear *l = b->linear;
    bool pair = a->mode == LINEAR_SWIGLU;
    size_t wide_row = (size_t)w->rows * sizeof(float), x_row = w->pitch * sizeof(__nv_bfloat16);
    uint32_t out_cols = pair ? w->rows / 2 : w->rows;
    uint32_t step = std::min(a->n_rows, 65535u); /* rows are a grid's y in swiglu_kernel */
    if (pair)
        step = std::min(step, (uint32_t)std::max((size_t)1, WIDE_BYTES / wide_row));
    if (!cuda_reserve(b, &l->x, &l->x_bytes, cuda_bucket(step) * x_row) ||
        (pair && !cuda_reserve(b, &l->wide, &l->wide_bytes, cuda_bucket(step) * wide_row)))
        return;
    for (uint32_t at = 0; at < a->n_rows; at += step) {
        struct wide_call c;
        memset(&c, 0, sizeof c);
        c.w = w->values;
        c.in = (const float *)a->in;
        c.gain = (const float *)a->norm_gain;
        c.rows = rows;
        c.out = (float *)a->out + (size_t)at * out_cols;
        c.wide = pair ? (float *)l->wide : NULL;
        c.x = (__nv_bfloat16 *)l->x;
        c.eps = a->norm_eps;
        c.first = at;
        c.n = std::min(step, a->n_rows - at);
        c.w_rows = w->rows;
        c.cols = w->cols;
        c.pitch = w->pitch;
        c.add = a->mode == LINEAR_ADD;
        cuda_do(b, run_wide, &c, sizeof c);
    }
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
    struct skinny_plan p = {};
    if (a->n_rows <= SKINNY_ROWS)
        p = cuda_skinny_plan(b, a);
    if (p.tiles != 0)
        cuda_skinny_run(b, a, rows, p);
    else
        cuda_linear_wide(b, a, rows);
}
