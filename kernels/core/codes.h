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
 * A level is 2 bits, four of them a byte. Order of K codes: 16 neighbouring pages are a tile; a row of
 * each page is two vectors of 64 bytes, for directions 0 .. 15 and 16 .. 31: lane p is page p, and field
 * s of its byte b is direction 4 s + b of the sixteen. So fields are dot products of bytes with the
 * query's four directions, and a sum over rows is vertical. Scales follow the rows: u8 [row][page]. Of V,
 * 16 rows of storage are a vector: lane j is direction j, field s of byte b is row 4 s + b.
 */
#ifndef KERNELS_CORE_CODES_H
#define KERNELS_CORE_CODES_H

#include "kernels/backend.h"
#include "kernels/core/core.h"

enum {
    CODES_K = 32, /* directions; fewer numbers of a head: the rest has sd 0 */
    CODES_V = 16,
    CODES_PAGES = 16,     /* of a tile */
    CODES_FIELDS = 4,     /* levels of a byte */
    CODES_LANES = 16,     /* of a vector, with four bytes each */
    CODES_VECTOR = 64,    /* bytes */
    CODES_VECTORS = 2,    /* of a row of a tile's pages */
    CODES_HEADS = 4,      /* heads of one call at most */
    CODES_MAX_ROWS = 32,  /* R at most */
    CODES_SCALE_EXP = 20, /* the least scale is 2^-20, the greatest below 2^12 */
    CODES_ROW_BYTES = CODES_VECTORS * CODES_VECTOR
};

#define CODES_STEP 0.9957f /* between levels: the best for 2 bits of a normal distribution (Max) */

/* ---- layout, from the beginning of the codes in a lane's part of a record ---- */

CORE_FN size_t codes_round(size_t bytes)
{
    return (bytes + 63) / 64 * 64;
}

/* Of the tile of page p. */
CORE_FN size_t codes_tile(uint32_t p, uint32_t part_rows)
{
    return (size_t)(p / CODES_PAGES) * part_rows * (CODES_ROW_BYTES + CODES_PAGES);
}

/* Byte and shift of direction j of row i of page p; the row's scale. */
CORE_FN size_t codes_k_byte(uint32_t p, uint32_t i, uint32_t j, uint32_t part_rows)
{
    return codes_tile(p, part_rows) + (size_t)i * CODES_ROW_BYTES +
           (size_t)(j / CODES_LANES) * CODES_VECTOR + p % CODES_PAGES * 4 + j % 4;
}
CORE_FN size_t codes_k_scale(uint32_t p, uint32_t i, uint32_t part_rows)
{
    return codes_tile(p, part_rows) + (size_t)part_rows * CODES_ROW_BYTES +
           (size_t)i * CODES_PAGES + p % CODES_PAGES;
}
CORE_FN uint32_t codes_shift(uint32_t i) /* direction of K, row of V */
{
    return i % CODES_LANES / 4 * 2;
}

CORE_FN size_t codes_v_vectors(void)
{
    return (size_t)SEGMENT_ROWS / CODES_PAGES * (CODES_ROW_BYTES + CODES_PAGES);
}

/* Byte of direction j of row r of storage; its shift is codes_shift(r). */
CORE_FN size_t codes_v_byte(uint32_t r, uint32_t j)
{
    return codes_v_vectors() + (size_t)(r / CODES_LANES) * CODES_VECTOR + (size_t)j * 4 + r % 4;
}

/* uint8_t [SEGMENT_ROWS] */
CORE_FN size_t codes_v_scales(void)
{
    return codes_v_vectors() + (size_t)SEGMENT_ROWS / CODES_LANES * CODES_VECTOR;
}

/* float sd[CODES_K], then bf16 E [dim][CODES_K]: only of segment 0. */
CORE_FN size_t codes_k_basis(bool values)
{
    return values ? codes_v_scales() + SEGMENT_ROWS : codes_v_vectors();
}

/* float sd[CODES_V], then bf16 F [CODES_V][dim] */
CORE_FN size_t codes_v_basis(uint32_t dim)
{
    return codes_k_basis(true) + codes_round(CODES_K * sizeof(float) + (size_t)dim * CODES_K * 2);
}

CORE_FN size_t codes_bytes(uint32_t dim, bool values)
{
    size_t k =
        codes_k_basis(values) + codes_round(CODES_K * sizeof(float) + (size_t)dim * CODES_K * 2);
    return values ? k + codes_round(CODES_V * sizeof(float) + (size_t)dim * CODES_V * 2) : k;
}

#endif
