/* What the files of sealing share: a call as kernels see it, and how they find rows.
 *
 * Sealing is four kernels, each over all SPARSE lanes: order (seal_order.cu, seal_bisect.cu) writes the
 * permutation into the record; move (seal.cu) brings rows to where they are stored; digest
 * (seal_digest.cu) and codes (seal_codes.cu) read rows from there. So only move knows of two places, and
 * only order of positions. Where partitions are pages without outliers, move, which has all rows at hand,
 * leaves their means, and digest reads no rows.
 *
 * Numbers of fp8 pages are bf16 numbers too, and read as such. A bf16 of K is an exact float; all sums are
 * floats. Where a sum's order is that of the rows, it is the CPU's too, bit for bit: means, bounds. Sums over
 * channels and of whole nodes have other orders. */
#ifndef KERNELS_CUDA_SEAL_H
#define KERNELS_CUDA_SEAL_H

#include "kernels/core/digest.h"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/fp8.h"

enum {
    SEAL_ROUNDS = 4,             /* of 2-means, per bisection: as on the CPU */
    SEAL_KMEANS_ITERATIONS = 10, /* assignments */
    SEAL_MAX_PAGES = SEGMENT_ROWS / 8,
    SEAL_MAX_DIM = 256,
};

/* What differs between calls of one shape: staged. */
struct seal_job {
    uint32_t record, first_record,
        sink_rows;  /* sink_rows: rows of the sinks' pages in this segment */
    uint32_t moves; /* some block of `to` is not that of `from` */
    block_id from[SEAL_MAX_PAGES], to[SEAL_MAX_PAGES];
};

struct seal_call {
    const struct seal_job *job;
    const struct cuda_lane *lanes;    /* [n_lanes]: of all classes */
    uint32_t n_lanes, dim, row_shift; /* R = 1 << row_shift */
    uint32_t number;                  /* bytes of one in a page: 1 is fp8 */
    uint32_t first_segment;           /* this is segment 0: it makes the directions of codes */
    uint8_t *pages, *records;
    size_t block_bytes, page_bytes, record_bytes, lane_bytes;
    struct digest_desc desc;
    struct digest_layout layout;
    uint32_t means;     /* move leaves the means of pages in vectors and mean_values */
    float *vectors;     /* scratch: [n_lanes][parts][dim] centroids */
    float *mean_values; /* [n_lanes][parts][dim] where means is set */
    float *coarse;      /* [n_lanes][parts / DIGEST_COARSE][dim] */
    uint32_t *far;      /* [n_lanes][parts] two rows of the partition, 16 bits each */
    float *matrix;      /* [n_lanes][2][dim][dim], where shared memory does not hold one */
};

/* The lane's part of a record. */
__device__ inline uint8_t *seal_record(const struct seal_call *c, uint32_t lane, uint32_t record)
{
    return c->records + record * c->record_bytes + c->lanes[lane].index * c->lane_bytes;
}

/* The lane's page of block 0. A loop that writes takes it before it begins: the table of lanes might be what
 * it writes, as far as a compiler knows. */
__device__ inline uint8_t *seal_pages(const struct seal_call *c, uint32_t lane)
{
    return c->pages + c->lanes[lane].index * c->page_bytes;
}

/* Row r of K (half 0) or V (half 1) of such pages, which lies in this block. */
__device__ inline uint8_t *seal_row_of(const struct seal_call *c, uint8_t *pages, block_id block,
                                       uint32_t half, uint32_t r)
{
    uint32_t rows = 1u << c->row_shift;
    return pages + block * c->block_bytes +
           (size_t)(half * rows + (r & (rows - 1))) * c->dim * c->number;
}

/* Row r of K (half 0) or V (half 1) in the pages that `blocks` name. */
__device__ inline uint8_t *seal_row(const struct seal_call *c, const block_id *blocks,
                                    uint32_t lane, uint32_t half, uint32_t r)
{
    return seal_row_of(c, seal_pages(c, lane), blocks[r >> c->row_shift], half, r);
}

/* Channels from `at` on of a row of such numbers, as bf16: 2, 4 or 8, and `at` a multiple of that. */
__device__ inline uint32_t seal_two(uint32_t number, const uint8_t *row, uint32_t at)
{
    return number == 1 ? fp8_widen2(*(const uint16_t *)(row + at))
                       : *(const uint32_t *)(row + (size_t)at * 2);
}
__device__ inline uint2 seal_four(uint32_t number, const uint8_t *row, uint32_t at)
{
    return number == 1 ? fp8_widen4(*(const uint32_t *)(row + at))
                       : *(const uint2 *)(row + (size_t)at * 2);
}
__device__ inline uint4 seal_eight(uint32_t number, const uint8_t *row, uint32_t at)
{
    return number == 1 ? fp8_widen8(*(const uint2 *)(row + at))
                       : *(const uint4 *)(row + (size_t)at * 2);
}

/* The two bf16 of a word. */
__device__ inline float seal_low(uint32_t w)
{
    return __uint_as_float(w << 16);
}
__device__ inline float seal_high(uint32_t w)
{
    return __uint_as_float(w & 0xffff0000u);
}

__device__ inline float seal_warp_sum(float x)
{
    for (int i = 16; i > 0; i /= 2)
        x += __shfl_xor_sync(~0u, x, i);
    return x;
}

/* A float as a whole number of the same order. */
__device__ inline int seal_sortable(float x)
{
    int bits = __float_as_int(x);
    return bits ^ (bits >> 31 & 0x7fffffff);
}
__device__ inline float seal_unsortable(int bits)
{
    return __int_as_float(bits ^ (bits >> 31 & 0x7fffffff));
}

/* seal_order.cu, seal_bisect.cu, seal_digest.cu, seal_codes.cu: launch; errors stick to b. */
status seal_bisect_open(struct cuda_backend *b);
bool seal_bisect_fits(const struct cuda_backend *b, const struct seal_call *c);
void seal_bisect(struct cuda_backend *b, const struct seal_call *c);
void seal_order(struct cuda_backend *b, const struct seal_call *c);
void seal_digest(struct cuda_backend *b, const struct seal_call *c);
status seal_codes_open(struct cuda_backend *b);
bool seal_codes_in_shared(uint32_t dim);
void seal_codes(struct cuda_backend *b, const struct seal_call *c);

#endif
