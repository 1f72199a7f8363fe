/* Row codes: what DIGEST_CODES keeps beside centroids and mean V. Every row's distance from its
 * page's centroid, in 32 directions of 2 bits (V: 16 directions, from the mean V), and a scale.
 *
 * A page's centroid says how far its rows are on average; which of them a query means, it does not
 * say, and the softmax inside a page is where selection errs (Jensen). On SmolLM2-135M, pages of 8,
 * budget 2 %, codes leave a quarter of the KL of a centroid and one outlier row, at the same bytes.
 *
 * Directions are the leading eigenvectors of the covariance of those distances in segment 0: a
 * function of the prefix alone, so who shares a prefix shares its directions, and no calibration is
 * read from anywhere. They lie in every record's place for them, but only segment 0's are written;
 * later segments are coded in, and scored with, segment 0's.
 *
 *   y = E^T (k - c)                   c as quantised; E and F are kept in bf16 and used as kept
 *   n = number of -T, 0, T below z    z = y / sd, scaled to rms 1; T = CODES_STEP
 *   k ~ c + alpha sum_j E_j sd_j L_j  L = T (n - 1.5): the least squares of a normal distribution
 *   alpha                             least squares; a float with 5 bits of exponent, 3 of mantissa
 *
 * The steps of such a scale are 1/8 to 1/16: its error is a tenth of the code's own, and a shift and
 * an addition decode it on any machine.
 *
 * Order of K codes. 16 neighbouring pages are a tile, in R / 4 blocks: block k has rows 4 k .. 4 k + 3
 * of each page. In a block, nibble plane j (directions j and j + 16: the strong beside the weak, so
 * that tables of bytes have small steps) is 32 bytes: row 0 of page l is the low nibble of byte 2 l,
 * row 1 of byte 2 l + 1, rows 2 and 3 the high ones. So sums of 16 bits over even and odd bytes come
 * out as vectors of one row of 16 pages, and the sum over a page's rows is vertical. Scales follow:
 * u8 [row][page]. V codes lie by row of storage. */
#ifndef KERNELS_CPU_CODES_H
#define KERNELS_CPU_CODES_H

#include "kernels/backend.h"

enum {
    CODES_K = 32, /* directions; fewer numbers of a head: the rest has sd 0 */
    CODES_V = 16,
    CODES_PAGES = 16,                    /* of a tile */
    CODES_PLANES = CODES_K / 2,          /* nibbles of a row */
    CODES_PLANE_BYTES = 2 * CODES_PAGES, /* four rows of each page */
    CODES_BLOCK_ROWS = 4 * CODES_PAGES,  /* 64 rows, as vectors: [4][16 pages] */
    CODES_BLOCK_SCALES = CODES_PLANES * CODES_PLANE_BYTES,
    CODES_BLOCK_BYTES = CODES_BLOCK_SCALES + CODES_BLOCK_ROWS,
    CODES_HEADS = 4,     /* heads of one call at most */
    CODES_BIAS = 128,    /* of a table's bytes */
    CODES_MAX_ROWS = 32, /* R at most */
    CODES_SCALE_EXP = 20 /* the least scale is 2^-20, the greatest below 2^12 */
};

#define CODES_STEP 0.9957f /* between levels: the best for 2 bits of a normal distribution (Max) */

/* ---- layout, from the beginning of the codes in a lane's part of a record ---- */

static inline size_t codes_round(size_t bytes)
{
    return (bytes + 63) / 64 * 64;
}

/* uint32_t [SEGMENT_ROWS]: bit j is the low bit of direction j, bit 16 + j the high one. */
static inline size_t codes_v_words(void)
{
    return (size_t)SEGMENT_ROWS / CODES_BLOCK_ROWS * CODES_BLOCK_BYTES;
}

/* uint8_t [SEGMENT_ROWS] */
static inline size_t codes_v_scales(void)
{
    return codes_v_words() + SEGMENT_ROWS * sizeof(uint32_t);
}

/* float sd[CODES_K], then bf16 E [dim][CODES_K]: only of segment 0. */
static inline size_t codes_k_basis(bool values)
{
    return values ? codes_v_scales() + SEGMENT_ROWS : codes_v_words();
}

/* float sd[CODES_V], then bf16 F [CODES_V][dim] */
static inline size_t codes_v_basis(uint32_t dim)
{
    return codes_k_basis(true) + codes_round(CODES_K * sizeof(float) + (size_t)dim * CODES_K * 2);
}

static inline size_t codes_bytes(uint32_t dim, bool values)
{
    size_t k =
        codes_k_basis(values) + codes_round(CODES_K * sizeof(float) + (size_t)dim * CODES_K * 2);
    return values ? k + codes_round(CODES_V * sizeof(float) + (size_t)dim * CODES_V * 2) : k;
}

/* Block of row `i` of page `p`. */
static inline size_t codes_block(uint32_t p, uint32_t i, uint32_t part_rows)
{
    return (size_t)(p / CODES_PAGES * (part_rows / 4) + i / 4) * CODES_BLOCK_BYTES;
}

/* Of that row, inside its block: byte of a plane and shift of the nibble; the scale. */
static inline uint32_t codes_byte(uint32_t p, uint32_t i)
{
    return p % CODES_PAGES * 2 + i % 2;
}
static inline uint32_t codes_shift(uint32_t i)
{
    return i % 4 / 2 * 4;
}
static inline uint32_t codes_scale(uint32_t p, uint32_t i)
{
    return CODES_BLOCK_SCALES + i % 4 * CODES_PAGES + p % CODES_PAGES;
}

/* ---- kernels ---- */

/* One lane of one segment, at its seal, once rows are ordered and means are digested. */
struct codes_lane {
    uint32_t dim, stride, parts, part_rows;
    uint32_t sink_rows;    /* rows of the sinks' pages in this segment: not coded, not counted */
    const uint16_t *order; /* [SEGMENT_ROWS] storage row r is row order[r] of ... */
    const uint16_t *keys, *values; /* bf16 [SEGMENT_ROWS][stride], padded with zeros */
    const float *means;            /* [parts][stride] centroids of K as kept */
    const float *v_means;          /* [parts][stride] of V as kept; NULL: V is not coded */
    uint8_t *codes;                /* of this record */
    const uint8_t *basis;          /* codes of segment 0's record; == codes: this is segment 0 */
    float *work;                   /* codes_work_floats() */
};

/* Distances of rows; covariance; directions and their images; directions by channel. */
static inline size_t codes_work_floats(uint32_t dim)
{
    size_t stride = (dim + 15) / 16 * 16;
    return (SEGMENT_ROWS + stride + 3 * (size_t)CODES_K) * stride + 64;
}

/* A query against the codes of a sequence, as tables: the logit of a row, in base 2, is
 * alpha * factor * sum over planes of (table[plane][nibble] - CODES_BIAS). Every table is there
 * twice, for registers of 32 bytes. */
struct codes_query {
    uint8_t table[CODES_PLANES][2][16];
    float factor;
    float pad[15];
};

/* Pages of a list, for the estimate of their V. */
struct codes_estimates {
    const uint8_t *const *codes; /* [n] the codes of each page's record */
    const uint16_t *parts;       /* [n] */
    uint32_t n, dim, part_rows, group;
    const float *q; /* [group][dim] */
    float scale;
    const uint8_t *basis; /* the codes of segment 0's record */
    const float *logits;  /* [group][stride] of the pages, natural log */
    size_t stride;
    const float *m; /* [group] base 2: what weights are relative to */
    float *o;       /* [group][o_stride] to add to */
    uint32_t o_stride;
};

struct codes_kernels {
    void (*seal)(const struct codes_lane *a);
    /* Tables of n <= CODES_HEADS queries, [n][dim]. */
    void (*query)(struct codes_query *out, const float *q, uint32_t n, uint32_t dim, float scale,
                  const uint8_t *basis);
    /* out[h][page]: ln of the sum over a page's rows of e^r, r: what a row's logit is above its
     * centroid's; `blocks` are those of a tile. */
    void (*masses)(const uint8_t *blocks, uint32_t part_rows, const struct codes_query *q,
                   uint32_t n, float (*out)[CODES_PAGES]);
    void (*estimate)(const struct codes_estimates *a);
};

extern const struct codes_kernels codes_scalar, codes_avx2, codes_avx512;

#endif
