/* What weight.cu, linear.cu, skinny.cu and narrow.cu share: the form of a weight and the ways to multiply.
 *
 * A weight is bf16, row-major, its rows padded with zeros to a multiple of 32 numbers: 16-byte loads
 * are aligned, both operands of a tensor core instruction come from rows, and a stored embedding can be
 * read row by row. Decoding to bf16 loses what the stored form had beyond 8 bits of mantissa. */
#ifndef KERNELS_CUDA_LINEAR_H
#define KERNELS_CUDA_LINEAR_H

#include "kernels/cuda/cuda.h"

#include <cublasLt.h>

enum {
    WEIGHT_PAD = 32,
    WEIGHT_SPARE = 8, /* rows behind the last */
    SKINNY_ROWS = 8,
    NARROW_ROWS = 8
};

struct weight {
    uint32_t rows, cols, pitch; /* pitch: cols rounded up to WEIGHT_PAD */
    size_t bytes;
    __nv_bfloat16 *values; /* [rows][pitch], on the device */
};

/* c[4] += A B, 16 rows of weights by 8 of the input, 16 columns of each (skinny.cu, narrow.cu). */
__device__ static inline void mma(float *c, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                  uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/* How skinny.cu cuts a matrix. A warp takes 16 * tiles rows and one of the slices along the inputs;
 * a block is 8 warps; `split` blocks (a cluster) share the slices of their rows. Sums depend on the slices
 * alone, and those on the shape alone: so on neither `split` nor the number of rows. */
struct skinny_plan {
    uint8_t tiles;  /* 1 or 2; 2 for LINEAR_SWIGLU: gate rows, and the up rows that go with them */
    uint8_t slices; /* 1, 2, 4 or 8 */
    uint8_t split;  /* 1, 2, 4 or 8, at most slices */
    uint8_t per_sm; /* blocks per multiprocessor: 1 or 2 */
};

/* linear.cu */
struct cuda_linear {
    void *x, *wide; /* scratch, bf16: [rows][pitch]; [rows][gate and up] */
    void *parts;    /* scratch: sums of a product's parts, gemm_shape.parts */
    cublasLtHandle_t lt;
    struct gemm_entry *gemms; /* gemm.cu: what was chosen */
    uint32_t n_gemms;
    void *workspace; /* cuBLAS's */
    size_t x_bytes, wide_bytes, parts_bytes, workspace_bytes;
    void *pinned[2];         /* weight.cu: UPLOAD_BYTES each, allocated at the first upload */
    cudaEvent_t uploaded[2]; /* the copy out of pinned[i] */
    /* skinny.cu: clusters of 1, 2, 4 and 8 blocks that run at once, a block per multiprocessor; 0: the
     * device has no clusters (before sm_90), nor launches that overlap */
    uint32_t clusters[4];
    /* narrow.cu */
    uint32_t *counters; /* 0 between launches; NULL: not on this device */
    void *sums;         /* scratch */
    size_t sums_bytes;
};
/* Any number of rows, through cuBLASLt. rows: a->rows on the device, or NULL where they are 0 and on. */
void cuda_linear_wide(struct cuda_backend *b, const struct linear_args *a, const uint32_t *rows);
/* Whether numbers that go to a linear of so many columns are better bf16. */
bool cuda_linear_is_half(uint32_t n_rows, uint32_t cols);

enum { GEMM_SPLIT_ROWS = 64 }; /* up to here sums may be split */
/* gemm.cu: out[n][w_rows] = x[n][pitch] W^T, plus out itself with add. Or, for who adds them up: the products of
 * each of so many equal parts of the columns, [parts][n][w_rows] floats. */
struct gemm_shape {
    uint32_t w_rows, pitch, n, align; /* align: bytes of which out's address is a multiple */
    uint32_t parts;                   /* 0: all in one, the product itself */
    bool add, half;                   /* half: out is bf16, else float */
};
struct gemm_call {
    struct gemm_shape shape;
    cublasLtMatmulAlgo_t algo;
    const __nv_bfloat16 *w, *x;
    void *out;
};
/* Fills in algo; the rest is valid, and x may hold anything. For the host part of an operation: may run
 * and wait. false after an error. */
bool cuda_gemm_prepare(struct cuda_backend *b, struct gemm_call *c);
/* The same for a product whose parts the caller adds up: chooses how many, GEMM_PARTS at most; out has room for
 * those. */
enum { GEMM_PARTS = 4 /* a power of two */ };
bool cuda_gemm_prepare_parts(struct cuda_backend *b, struct gemm_call *c);
/* Chooses for shapes like this one of 16 to `most` rows (with parts: up to there in parts, beyond to be added); x has
 * room for those. is_known: of one. */
void cuda_gemm_warm(struct cuda_backend *b, const struct gemm_call *like, uint32_t most);
bool cuda_gemm_is_known(struct cuda_backend *b, const struct gemm_shape *s);
/* For a command. */
bool cuda_gemm_run(struct cuda_backend *b, const struct gemm_call *c);

/* weight.cu */
void cuda_upload_close(struct cuda_backend *b);

/* skinny.cu: at most SKINNY_ROWS rows. */
status cuda_skinny_open(struct cuda_backend *b);
struct skinny_plan cuda_skinny_plan(const struct cuda_backend *b, const struct linear_args *a);
size_t cuda_skinny_shared(const struct linear_args *a, struct skinny_plan p); /* bytes per block */
void cuda_skinny_run(struct cuda_backend *b, const struct linear_args *a, const uint32_t *rows,
                     struct skinny_plan p);

/* narrow.cu: at most NARROW_ROWS rows of a large weight. Opens behind skinny. */
status cuda_narrow_open(struct cuda_backend *b);
bool cuda_narrow_takes(const struct cuda_backend *b, const struct linear_args *a);
void cuda_narrow_run(struct cuda_backend *b, const struct linear_args *a, const uint32_t *rows);

#endif
