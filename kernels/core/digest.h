/* What a backend keeps of a sealed segment: the layout of a lane's part of a record behind
 * digest_offset(). seal writes it, score and attend read it.
 *
 *   DIGEST_CENTROID  1 + outliers kinds of vectors: the centroid, then the outlier rows, farthest
 *                    first. Then, in the same form, the means of DIGEST_COARSE neighbouring
 *                    partitions' centroids, for coarse-to-fine scores (not with ORDER_KMEANS).
 *   DIGEST_CODES     the same without outliers; then codes of rows (codes.h)
 *   DIGEST_BOUNDS    channel-wise min and max
 *   values           mean V of each partition: a row of int8 and its scale
 *
 * A kind of vectors is a `struct digest_vectors`: channel c of partition p is base[c] + step[c] * u8.
 * Keys have means far from zero in some channels; an offset per channel and segment leaves all 8 bits
 * to the spread. A score folds step into q, rounds that to 15 bits and multiplies whole numbers: the
 * order of such sums cannot be seen, so every instruction set gives the same bits. Measured on
 * SmolLM2-135M (layers 3, 10, 18, 27, one novel, bisected pages of 8): logits
 * are off by 0.011 to 0.021 rms for centroids and 0.015 to 0.031 for outlier rows, half to a third of
 * what symmetric int8 costs; mean V by 0.9 % rms, where rows differ from it by 100 to 170 %.
 *
 * Bytes lie in tiles of 16 partitions: u8 [tiles][head_dim / 4][16][4], what vpdpbusd multiplies.
 * Bounds are bf16 [tiles][head_dim / 2][min, max][16][2]: exact, as keys are bf16.
 *
 * Partitions in the sinks' pages have undefined digests. Every part starts at a multiple of 64 bytes. */
#ifndef KERNELS_CORE_DIGEST_H
#define KERNELS_CORE_DIGEST_H

#include "kernels/core/codes.h"

enum {
    DIGEST_TILE = 16,    /* partitions of a tile */
    DIGEST_COARSE = 4,   /* partitions of a coarse digest; score's coarse_group is a multiple */
    DIGEST_KINDS = 3,    /* centroid and at most 2 outliers */
    DIGEST_MAX_DIM = 512 /* 2^31 / (255 * 2^14), rounded down: sums of whole numbers fit */
};

/* Where the parts lie, in bytes from the beginning of the lane's part of a record. */
struct digest_layout {
    uint32_t dim, parts;
    uint32_t kinds;        /* of vectors; 0 unless DIGEST_CENTROID or _CODES */
    size_t first_row;      /* ORDER_KMEANS: uint16_t [parts + 1] */
    size_t vectors;        /* [kinds] digest_vectors of `parts` */
    size_t vector_bytes;   /* of one kind */
    size_t coarse;         /* digest_vectors of parts / DIGEST_COARSE; 0: none */
    size_t bounds;         /* float magnitude[dim]: greatest |k| of the segment; then the tiles */
    size_t values, scales; /* int8 [parts][dim]; float [parts]; 0: none */
    size_t codes;          /* codes.h; 0: none */
    size_t bytes;          /* in all, a multiple of 64 */
};

CORE_FN size_t digest_round(size_t bytes)
{
    return (bytes + 63) / 64 * 64;
}

CORE_FN uint32_t digest_tiles(uint32_t parts)
{
    return (parts + DIGEST_TILE - 1) / DIGEST_TILE;
}

/* float base[dim], step[dim], then tiles. */
CORE_FN size_t digest_vectors_bytes(uint32_t dim, uint32_t parts)
{
    return digest_round((size_t)dim * 2 * sizeof(float)) +
           digest_round((size_t)digest_tiles(parts) * DIGEST_TILE * dim);
}

CORE_FN size_t digest_bounds_bytes(uint32_t dim, uint32_t parts)
{
    return digest_round((size_t)dim * sizeof(float)) +
           (size_t)digest_tiles(parts) * DIGEST_TILE * dim * 2 * sizeof(uint16_t);
}

CORE_FN struct digest_layout digest_layout_of(uint32_t dim, const struct digest_desc *d)
{
    struct digest_layout l;
    size_t at = digest_offset(d);
    l.dim = dim;
    l.parts = d->parts;
    l.kinds = 0;
    l.first_row = l.vectors = l.vector_bytes = l.coarse = 0;
    l.bounds = l.values = l.scales = l.codes = 0;
    if (d->order == ORDER_KMEANS)
        l.first_row = SEGMENT_ROWS * sizeof(uint16_t);
    if (d->kind == DIGEST_CENTROID || d->kind == DIGEST_CODES) {
        l.kinds = 1 + d->outliers;
        l.vectors = at;
        l.vector_bytes = digest_vectors_bytes(dim, d->parts);
        at += l.kinds * l.vector_bytes;
        if (d->order != ORDER_KMEANS && d->parts % DIGEST_COARSE == 0) {
            l.coarse = at;
            at += digest_vectors_bytes(dim, d->parts / DIGEST_COARSE);
        }
    } else if (d->kind == DIGEST_BOUNDS) {
        l.bounds = at;
        at += digest_bounds_bytes(dim, d->parts);
    }
    if (d->values) {
        l.values = at;
        at += digest_round((size_t)d->parts * dim);
        l.scales = at;
        at += digest_round((size_t)d->parts * sizeof(float));
    }
    if (d->kind == DIGEST_CODES) {
        l.codes = at;
        at += codes_bytes(dim, d->values);
    }
    l.bytes = digest_round(at);
    return l;
}

/* Can a segment of this geometry be digested so, with heads of at most max_dim numbers? */
CORE_FN bool digest_takes(const struct kv_geometry *g, const struct digest_desc *d,
                          uint32_t max_dim)
{
    uint32_t pages = SEGMENT_ROWS / g->block_rows;
    bool shape = g->head_dim % 4 == 0 && g->head_dim <= max_dim &&
                 (g->block_rows == 8 || g->block_rows == 16 || g->block_rows == 32);
    bool parts = d->parts >= 1 && d->parts <= SEGMENT_ROWS && d->outliers < DIGEST_KINDS;
    if (!shape || !parts)
        return false;
    if (d->order == ORDER_KMEANS
            ? d->outliers != 0
            : SEGMENT_ROWS % d->parts != 0 || SEGMENT_ROWS / d->parts <= d->outliers)
        return false;
    if (d->order == ORDER_BISECT && d->parts != pages)
        return false;
    return d->kind != DIGEST_CODES ||
           (d->order != ORDER_KMEANS && d->outliers == 0 && d->parts == pages);
}

/* ---- the lane's part of a record ---- */

CORE_FN uint8_t *digest_lane(const struct kv_memory *kv, uint32_t record, uint32_t layer,
                             uint32_t head)
{
    return (uint8_t *)kv->records + (size_t)record * kv->record_bytes +
           kv_lane(kv->geo, layer, head).index * kv->record_lane_bytes;
}

/* Rows of storage [*first, *first + n) of partition p of this lane; returns n. */
CORE_FN uint32_t digest_rows(const uint8_t *lane, const struct digest_desc *d, uint32_t p,
                             uint32_t *first)
{
    if (d->order == ORDER_KMEANS) {
        const uint16_t *f = (const uint16_t *)(const void *)(lane + SEGMENT_ROWS * sizeof *f);
        *first = f[p];
        return (uint32_t)f[p + 1] - f[p];
    }
    uint32_t n = SEGMENT_ROWS / d->parts;
    *first = p * n;
    return n;
}

/* Channel c of partition p's mean V is scale * row[c]. */
CORE_FN const int8_t *digest_value(const uint8_t *lane, const struct digest_layout *l, uint32_t p)
{
    return (const int8_t *)(lane + l->values) + (size_t)p * l->dim;
}

CORE_FN float digest_value_scale(const uint8_t *lane, const struct digest_layout *l, uint32_t p)
{
    return ((const float *)(const void *)(lane + l->scales))[p];
}

/* One kind of vectors, or the coarse ones. */
struct digest_vectors {
    float *base, *step; /* [dim] */
    uint8_t *tiles;
};

CORE_FN struct digest_vectors digest_vectors_at(const uint8_t *p, uint32_t dim)
{
    struct digest_vectors v;
    v.base = (float *)(void *)(uintptr_t)p;
    v.step = v.base + dim;
    v.tiles = (uint8_t *)(uintptr_t)p + digest_round((size_t)dim * 2 * sizeof(float));
    return v;
}

CORE_FN struct digest_vectors digest_vectors_of(const uint8_t *lane, const struct digest_layout *l,
                                                uint32_t kind)
{
    return digest_vectors_at(lane + l->vectors + kind * l->vector_bytes, l->dim);
}

/* Of channel c, partition p, from the beginning of the tiles. */
CORE_FN size_t digest_byte(uint32_t dim, uint32_t p, uint32_t c)
{
    return (size_t)(p / DIGEST_TILE) * DIGEST_TILE * dim + (size_t)(c / 4) * DIGEST_TILE * 4 +
           p % DIGEST_TILE * 4 + c % 4;
}

/* As float numbers, for tests and tools. */
CORE_FN float digest_vector_get(const struct digest_vectors *v, uint32_t dim, uint32_t p,
                                uint32_t c)
{
    return v->base[c] + v->step[c] * (float)v->tiles[digest_byte(dim, p, c)];
}

/* uint16_t number of the min of channel c, partition p, from the beginning of the tiles; the max
 * lies DIGEST_TILE * 2 numbers behind it. */
CORE_FN size_t digest_bound(uint32_t dim, uint32_t p, uint32_t c)
{
    return ((size_t)(p / DIGEST_TILE) * dim + c / 2 * 2) * DIGEST_TILE * 2 + p % DIGEST_TILE * 2 +
           c % 2;
}

CORE_FN float *digest_magnitude(const uint8_t *lane, const struct digest_layout *l)
{
    return (float *)(void *)(uintptr_t)(lane + l->bounds);
}

CORE_FN uint16_t *digest_bounds(const uint8_t *lane, const struct digest_layout *l)
{
    return (uint16_t *)(void *)((uintptr_t)(lane + l->bounds) +
                                digest_round((size_t)l->dim * sizeof(float)));
}

#endif
