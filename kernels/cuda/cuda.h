/* What the files of the CUDA backend share. Compiled by nvcc as CUDA C++17, written as C.
 *
 * The engine thread alone calls operations; they queue on one stream. Arrays that an operation's
 * arguments point to on the host (tokens, batch_seq, block tables, row lists) are copied to the device
 * through cuda_stage() before the call returns: they need not outlive it. Activations are float. */
#ifndef KERNELS_CUDA_CUDA_H
#define KERNELS_CUDA_CUDA_H

#include "kernels/backend.h"

#include <cublas_v2.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

struct cuda_backend {
    struct backend base;  /* first */
    struct backend *host; /* a CPU backend, owned: samples from logits that were copied down */
    int device, sms;
    cudaStream_t stream;
    cublasHandle_t blas; /* on `stream`, bf16 inputs, float sums and outputs */
    status error;        /* sticks until sync; its text is in `text` */
    char text[256], description[160];
    struct cuda_staging *staging; /* backend.cu */
    struct cuda_linear *linear;   /* linear.cu */
    struct cuda_attend *attend;   /* attend.cu */
    struct cuda_sampler *sampler; /* sample.cu */
};

/* True if e is success; else notes it as the backend's first error ("what: cudaErrorName"). */
bool cuda_ok(struct cuda_backend *b, cudaError_t e, const char *what);
/* After a launch: its error. */
static inline bool cuda_launched(struct cuda_backend *b, const char *what)
{
    return cuda_ok(b, cudaGetLastError(), what);
}
/* Copies a host array to the device, in stream order; the result is aligned to 256 and lives until the
 * next sync. NULL after an error. */
void *cuda_stage(struct cuda_backend *b, const void *host, size_t bytes);
/* Device scratch of one file: grows, keeps nothing, freed with cudaFree. *p may be in use by what is
 * queued: waits for the stream before it frees. false after an error. */
bool cuda_reserve(struct cuda_backend *b, void **p, size_t *have, size_t need);

/* linear.cu */
status cuda_linear_open(struct cuda_backend *b);
void cuda_linear_close(struct cuda_backend *b);
status cuda_weight_create(struct backend *be, const struct weight_desc *d, struct weight **out);
void cuda_weight_destroy(struct backend *be, struct weight *w);
size_t cuda_weight_bytes(const struct weight *w);
void cuda_embed(struct backend *be, const struct embed_args *a);
void cuda_linear(struct backend *be, const struct linear_args *a);

/* append.cu, attend.cu */
status cuda_attend_open(struct cuda_backend *b);
void cuda_attend_close(struct cuda_backend *b);
void cuda_append(struct backend *be, const struct append_args *a);
void cuda_attend(struct backend *be, const struct attend_args *a);

/* sample.cu */
status cuda_sample_open(struct cuda_backend *b);
void cuda_sample_close(struct cuda_backend *b);
void cuda_sample(struct backend *be, const struct sample_args *a);
/* Draws what cuda_sample queued: for sync, once the stream is done. good: its results count. */
void cuda_sample_settle(struct cuda_backend *b, bool good);

#endif
