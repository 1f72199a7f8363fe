/* What seal.c and its kernels per instruction set agree on: one lane of one segment.
 *
 * A lane is read whole into rows before anything is written, so source and target pages may be the
 * same. Lanes are independent: they are the items of work, and the result cannot depend on threads.
 * Everything is computed with vec16.h: neither on the instruction set. */
#ifndef KERNELS_CPU_SEAL_H
#define KERNELS_CPU_SEAL_H

#include "kernels/core/digest.h"
#include "kernels/cpu/codes.h"

enum {
    SEAL_ROUNDS = 4,             /* of 2-means, per bisection */
    SEAL_KMEANS_ITERATIONS = 10, /* assignments, as in RetroInfer */
};

/* Between e4m3 and bf16, which has all its numbers: rows are bf16 while they are sealed. The four lower bits
 * of a bf16 are 0 then. */
struct seal_tables {
    uint16_t bf16[256];    /* by e4m3 */
    uint8_t e4m3[1 << 12]; /* by the upper 12 bits of a bf16 */
};

struct seal_lane {
    const struct kv_geometry *geo;
    const struct digest_desc *desc;
    struct digest_layout layout;
    const uint8_t *from; /* page of block b: from + b * block_bytes */
    uint8_t *to;
    const block_id *from_blocks, *to_blocks; /* [SEGMENT_ROWS / R] */
    uint8_t *record;
    uint32_t sink_rows; /* rows of the sinks' pages in this segment */
    float *work;        /* seal_work_floats() of the calling worker, 64-byte aligned */
    const struct codes_kernels *codes; /* DIGEST_CODES */
    const struct seal_tables *tables;  /* KV_E4M3 */
    const uint8_t *first_record;       /* the lane's part of segment 0's */
};

struct seal_kernels {
    void (*lane)(const struct seal_lane *s);
};

extern const struct seal_kernels seal_scalar, seal_avx2, seal_avx512;

/* Rows of numbers are padded with zeros to whole vectors. */
static inline uint32_t seal_stride(uint32_t dim)
{
    return (dim + 15) / 16 * 16;
}

/* Rows of K and V as bf16, two buffers of rows as floats, digests as floats, and room for lists. */
static inline size_t seal_work_floats(uint32_t dim, const struct digest_desc *d)
{
    size_t stride = seal_stride(dim), parts = digest_tiles(d->parts) * (size_t)DIGEST_TILE;
    size_t vectors = parts * (DIGEST_KINDS + 2) + 64;
    size_t codes = d->kind == DIGEST_CODES ? codes_work_floats(dim) : 0;
    return (SEGMENT_ROWS * 3 + vectors) * stride + (size_t)SEGMENT_ROWS * 8 + codes;
}

#endif
