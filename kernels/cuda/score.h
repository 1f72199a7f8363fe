/* What the files of scoring share: the call as kernels read it, where an item of work lies, and how a
 * score is written.
 *
 * A lane is a (plan row, KV head). Its partitions are scored in pieces: some tiles (core/digest.h) of one
 * segment. Every score is a function of its digest and query alone, so neither the batch nor the cut into
 * CTAs can be seen in it. */
#ifndef KERNELS_CUDA_SCORE_H
#define KERNELS_CUDA_SCORE_H

#include "kernels/core/digest.h"
#include "kernels/cuda/attend_mma.h"

enum {
    SCORE_THREADS = 128,
    SCORE_WARPS = SCORE_THREADS / 32,
    SCORE_HEADS =
        4, /* of the group to an n-tile: a matrix instruction has 8 columns, a head has 2 */
    SCORE_MAX_DEPTH = 16, /* pieces of a warp at most */
    SCORE_MAX_DIM = CUDA_MAX_DIM,
};

/* By value. Shapes and addresses only: what changes with every step is in `rows`. */
struct score_call {
    const struct cuda_row *rows;
    const struct cuda_lane *lanes; /* [kv_heads] of the layer */
    const uint8_t *records;        /* NULL: there are none (SCORE_EXACT without digests) */
    size_t record_bytes, record_lane_bytes;
    const float *q;
    size_t q_stride; /* numbers of a row of q */
    float *out;      /* [lane][group][stride] */
    uint32_t stride; /* a multiple of 4 where `vectors_of_4`, and out is aligned to 16 */
    uint32_t kv_heads, group, dim;
    uint32_t parts;               /* scores of a segment */
    uint32_t sinks;               /* partitions of segment 0 inside the sinks' pages: -inf */
    uint32_t kinds;               /* of vectors */
    size_t vectors, vector_bytes; /* from the lane's part of a record */
    size_t codes, basis, bounds;  /* basis: of K */
    uint32_t part_rows;           /* 0: they differ, and the record has first_row */
    size_t first_row;
    float scale, log_rows;      /* log_rows: what a centroid stands for, where part_rows > 0 */
    uint32_t tiles, pieces;     /* of a piece; of a segment */
    uint32_t depth;             /* pieces of a warp */
    uint32_t stretches, chunks; /* CTAs of a lane: by pieces, by heads */
    uint32_t stage_bytes;
    uint32_t four;       /* scores are stored four at a time */
    const uint8_t *open; /* [lane][open_stride] groups of partitions; NULL: all are scored */
    uint32_t open_stride, open_group;
    /* SCORE_EXACT */
    const uint8_t *hbm, *dram;
    size_t block_bytes, page_bytes;
    uint32_t block_rows, number; /* number: bytes of one in a page */
};

/* Pieces of a warp, and CTAs of a lane, for a device that holds `slots` CTAs; c->stretches: segments so
 * far. */
void score_cut(struct score_call *c, uint32_t lanes, uint32_t slots);
status cuda_score_mass_open(struct cuda_backend *b);
/* Runs the mass of `c`: vectors of all kinds, and codes if there are. */
void cuda_score_mass(struct cuda_backend *b, const struct score_call *c, uint32_t lanes);
void cuda_score_bounds(struct cuda_backend *b, const struct score_call *c, uint32_t lanes);
void cuda_score_exact(struct cuda_backend *b, const struct score_call *c, uint32_t lanes);

/* ---- where a CTA works ---- */

struct score_place {
    uint32_t lane, head, stretch, chunk;
    uint32_t n_segments;
    const uint32_t *records;
    const uint8_t *base; /* of the lane's part of record 0 */
    const struct cuda_row *row;
    bool none; /* nothing to do */
};

/* per: segments or pieces of a CTA, of which a segment has `pieces`. */
__device__ static inline struct score_place score_place_of(const struct score_call *c, uint32_t per)
{
    struct score_place p;
    uint32_t i = blockIdx.x / c->stretches;
    p.stretch = blockIdx.x % c->stretches;
    p.chunk = i % c->chunks;
    p.lane = i / c->chunks;
    p.head = p.lane % c->kv_heads;
    p.row = &c->rows[p.lane / c->kv_heads];
    p.n_segments = p.row->n_segments;
    p.records = p.row->records;
    struct cuda_lane place = c->lanes[p.head];
    p.base = c->records + place.index * c->record_lane_bytes;
    p.none = place.class_ != LANE_SPARSE || p.stretch * per >= p.n_segments * c->pieces;
    return p;
}

__device__ static inline const float *score_query(const struct score_call *c,
                                                  const struct score_place *p, uint32_t h)
{
    return c->q + p->row->row * c->q_stride + (size_t)(p->head * c->group + h) * c->dim;
}

/* ---- writing ---- */

/* Whether partition p of a segment has a score at all. */
__device__ static inline bool score_alive(const struct score_call *c, uint32_t lane,
                                          uint32_t segment, uint32_t p)
{
    if (segment == 0 && p < c->sinks)
        return false;
    return c->open == NULL ||
           c->open[(size_t)lane * c->open_stride + (segment * c->parts + p) / c->open_group] != 0;
}

/* Four neighbours from partition p of the segment on; what lies behind the segment's end is dropped. */
__device__ static inline void score_put(const struct score_call *c, uint32_t lane, uint32_t h,
                                        uint32_t segment, uint32_t p, float x[4])
{
    float *to = c->out + ((size_t)lane * c->group + h) * c->stride + (size_t)segment * c->parts + p;
    if ((segment == 0 && p < c->sinks) || c->open != NULL)
#pragma unroll
        for (uint32_t i = 0; i < 4; i++)
            if (!score_alive(c, lane, segment, p + i < c->parts ? p + i : p))
                x[i] = -INFINITY;
    if (c->four && p + 4 <= c->parts) {
        *(float4 *)to = make_float4(x[0], x[1], x[2], x[3]);
        return;
    }
#pragma unroll
    for (uint32_t i = 0; i < 4; i++)
        if (p + i < c->parts)
            to[i] = x[i];
}

/* Launches a kernel that waits for the one before it by itself. */
template <typename Params>
static inline void score_launch(struct cuda_backend *b, void (*kernel)(Params),
                                const Params *params, uint32_t grid, uint32_t threads,
                                size_t shared, const char *what)
{
    cudaLaunchConfig_t config = {};
    cudaLaunchAttribute overlap = {};
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = dim3(grid);
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared;
    config.stream = b->stream;
    config.attrs = &overlap;
    config.numAttrs = b->overlaps;
    cuda_ok(b, cudaLaunchKernelEx(&config, kernel, *params), what);
}

#endif
