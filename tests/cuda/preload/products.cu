/* What the CUDA backend calls of cuBLASLt, as one plain kernel, for a tool that cannot live with the library's own.
 *
 * racecheck dies in linear, spare, replay and families, which multiply by cuBLASLt, and in no program that does not
 * ("Internal Sanitizer Error: The Sanitizer failed to handle a hardware exception", CUDA 13.0), though it is told not to
 * look at that library's kernels. This one comes first (tests/cuda/sanitize, PLAIN=1) and takes the calls: our kernels
 * run as always, products are slow and right. That this lets racecheck live nobody has seen yet.
 *
 * Descriptions are opaque and lie on the caller's stack, so they hold what is wanted here: of a product
 * out^T = W x^T all is in the layouts. Only what kernels/cuda/gemm.cu asks for is there: W turned, bf16 times bf16. */
#pragma GCC visibility push(default)
#include <cublasLt.h>
#pragma GCC visibility pop

#include <cstdint>
#include <cstring>
#include <cuda_bf16.h>

struct layout {
    uint64_t rows, cols;
    int64_t ld, stride; /* stride: between matrices of a batch */
    cudaDataType type;
    int32_t batch;
};
static_assert(sizeof(layout) <= sizeof(cublasLtMatrixLayoutOpaque_t), "it lies in there");

/* One thread a result, a grid's row a product of a batch: sums in one order. Bound by memory that is read again and
 * again. */
__global__ static void product_kernel(const __nv_bfloat16 *w, layout lw, const __nv_bfloat16 *x,
                                      layout lx, float alpha, float beta, const void *c, void *out,
                                      layout lo)
{
    const uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x, row = i % lo.rows;
    const uint64_t col = i / lo.rows;
    if (col >= lo.cols)
        return;
    const __nv_bfloat16 *a = w + blockIdx.y * lw.stride + row * lw.ld;
    const __nv_bfloat16 *b = x + blockIdx.y * lx.stride + col * lx.ld;
    const size_t at = blockIdx.y * lo.stride + col * lo.ld + row;
    float sum = 0;
    for (uint64_t k = 0; k < lw.rows; k++)
        sum += __bfloat162float(a[k]) * __bfloat162float(b[k]);
    sum *= alpha;
    if (lo.type == CUDA_R_16BF) {
        if (beta != 0)
            sum += beta * __bfloat162float(((const __nv_bfloat16 *)c)[at]);
        ((__nv_bfloat16 *)out)[at] = __float2bfloat16(sum);
    } else {
        if (beta != 0)
            sum += beta * ((const float *)c)[at];
        ((float *)out)[at] = sum;
    }
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t, const void *alpha,
                              const void *a, cublasLtMatrixLayout_t a_layout, const void *b,
                              cublasLtMatrixLayout_t b_layout, const void *beta, const void *c,
                              cublasLtMatrixLayout_t, void *d, cublasLtMatrixLayout_t d_layout,
                              const cublasLtMatmulAlgo_t *, void *, size_t, cudaStream_t stream)
{
    layout w, x, out;
    memcpy(&w, a_layout, sizeof w);
    memcpy(&x, b_layout, sizeof x);
    memcpy(&out, d_layout, sizeof out);
    const uint64_t n = out.rows * out.cols;
    product_kernel<<<dim3((unsigned)((n + 255) / 256), (unsigned)out.batch), 256, 0, stream>>>(
        (const __nv_bfloat16 *)a, w, (const __nv_bfloat16 *)b, x, *(const float *)alpha,
        *(const float *)beta, c, d, out);
    return cudaGetLastError() == cudaSuccess ? CUBLAS_STATUS_SUCCESS
                                             : CUBLAS_STATUS_EXECUTION_FAILED;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t,
                                              cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                              cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                              cublasLtMatmulPreference_t, int,
                                              cublasLtMatmulHeuristicResult_t *all, int *n)
{
    memset(all, 0, sizeof *all);
    *n = 1;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutInit_internal(cublasLtMatrixLayout_t to, size_t,
                                                 cudaDataType type, uint64_t rows, uint64_t cols,
                                                 int64_t ld)
{
    const layout l = {rows, cols, ld, 0, type, 1};
    memcpy(to, &l, sizeof l);
    return CUBLAS_STATUS_SUCCESS;
}

/* The two that make a batch. */
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t to,
                                                cublasLtMatrixLayoutAttribute_t attr,
                                                const void *value, size_t)
{
    layout l;
    memcpy(&l, to, sizeof l);
    if (attr == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT)
        memcpy(&l.batch, value, sizeof l.batch);
    else if (attr == CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET)
        memcpy(&l.stride, value, sizeof l.stride);
    else
        return CUBLAS_STATUS_NOT_SUPPORTED;
    memcpy(to, &l, sizeof l);
    return CUBLAS_STATUS_SUCCESS;
}

/* ---- what needs nothing ---- */

cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle)
{
    static char somewhere;
    *handle = (cublasLtHandle_t)(void *)&somewhere;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t)
{
    return CUBLAS_STATUS_SUCCESS;
}

const char *cublasLtGetStatusString(cublasStatus_t)
{
    return "plain products";
}

cublasStatus_t cublasLtMatmulDescInit_internal(cublasLtMatmulDesc_t, size_t, cublasComputeType_t,
                                               cudaDataType_t)
{
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t, cublasLtMatmulDescAttributes_t,
                                              const void *, size_t)
{
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceInit_internal(cublasLtMatmulPreference_t, size_t)
{
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t,
                                                    cublasLtMatmulPreferenceAttributes_t,
                                                    const void *, size_t)
{
    return CUBLAS_STATUS_SUCCESS;
}
