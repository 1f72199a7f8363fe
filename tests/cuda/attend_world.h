/* Sequences whose K and V lie in arenas of the CPU backend and of the GPU at once, for tests and the
 * bench of append and attend.
 *
 * Arenas begin as NaN, block ids are shuffled, and entries of STREAM tables that nobody may read
 * lead far outside. Rows of q, k and v depend on (stream, position) alone. Both backends append all
 * of every sequence, in chunks; what q becomes stays in one buffer per backend, so any rows can be
 * attended in any order and company. */
#ifndef TESTS_CUDA_ATTEND_WORLD_H
#define TESTS_CUDA_ATTEND_WORLD_H

#include "kernels/cuda_api.h"
#include "tests/tap.h"

#include <math.h>

enum { LAYERS = 2, LAYER = 1, MAX_SEQS = 8, MAX_HEADS = 8, NOWHERE = 0x7ffffff0 };

struct shape {
    uint32_t rows, dim, kv_heads, group; /* rows: R */
    uint32_t sinks, recent;
    bool classes; /* all of them, in turn; else SPARSE only */
    float q_size;
};

struct seq {
    uint32_t stream, len, first_row; /* of the buffers */
    block_id *blocks[LANE_CLASSES];
    bool spilled; /* some of its blocks are in DRAM */
};

/* What pages of the next world keep. */
static enum kv_type kept;

/* One backend's part of a world. */
struct side {
    struct backend *be;
    struct kv_memory kv;
    float *cos, *sin, *qkv, *out, *lse; /* its memory */
};

struct world {
    struct shape s;
    struct kv_geometry geo;
    struct lane_place lanes[LAYERS * MAX_HEADS];
    struct side cpu, gpu;
    struct seq seqs[MAX_SEQS];
    uint32_t n_seqs, n_rows, n_blocks, heads;
    size_t width, out_width; /* numbers of a row */
};

static uint32_t hash(uint32_t a, uint32_t b, uint32_t c)
{
    uint32_t x = a * 0x9e3779b1u ^ b * 0x85ebca6bu ^ c * 0xc2b2ae35u;
    x ^= x >> 15;
    x *= 0x2c1b3c6du;
    x ^= x >> 12;
    x *= 0x297a2d39u;
    return x ^ x >> 15;
}

static float noise(uint32_t a, uint32_t b, uint32_t c)
{
    return (float)hash(a, b, c) / 2147483648.0f - 1.0f;
}

static void make_lanes(struct world *w)
{
    for (uint32_t l = 0; l < LAYERS; l++)
        for (uint32_t h = 0; h < w->s.kv_heads; h++) {
            uint32_t c = w->s.classes ? (l + h) % LANE_CLASSES : LANE_SPARSE;
            w->lanes[l * w->s.kv_heads + h] =
                (struct lane_place){(uint16_t)c, (uint16_t)w->geo.n_lanes[c]++};
        }
    w->geo.lanes = w->lanes;
    for (int c = 0; c < LANE_CLASSES; c++)
        w->geo.block_bytes[c] = w->geo.n_lanes[c] * w->geo.page_bytes;
}

static struct seq make_seq(struct world *w, uint32_t stream, uint32_t len, uint32_t *next_block)
{
    struct seq q = {.stream = stream, .len = len, .first_row = w->n_rows};
    uint32_t n = (len + w->s.rows - 1) / w->s.rows;
    for (int c = 0; c < LANE_CLASSES; c++) {
        q.blocks[c] = mem_alloc(n * sizeof(block_id));
        for (uint32_t i = 0; i < n; i++) /* an odd step visits every block: n_blocks is 2^k */
            q.blocks[c][i] = (*next_block + i) * 2654435761u % w->n_blocks;
    }
    *next_block += n;
    w->n_rows += len;
    return q;
}

/* ---- memory of a side ---- */

static void *put(struct backend *be, const void *from, size_t bytes)
{
    void *p = be->ops->alloc(be, bytes);
    CHECK(p != NULL);
    be->ops->copy(be, p, from, bytes);
    CHECK(be->ops->sync(be) == OK);
    return p;
}

static void *put_nan(struct backend *be, size_t bytes)
{
    void *nan = mem_alloc(bytes), *p;
    memset(nan, 0xff, bytes);
    p = put(be, nan, bytes);
    mem_free(nan);
    return p;
}

static size_t longest(const struct world *w)
{
    size_t max = 1;
    for (uint32_t i = 0; i < w->n_seqs; i++)
        max = w->seqs[i].len > max ? w->seqs[i].len : max;
    return max;
}

static void open_side(struct world *w, struct side *d, struct backend *be)
{
    size_t half = w->s.dim / 2, max = longest(w);
    float *cos_table = mem_alloc(max * half * 4), *sin_table = mem_alloc(max * half * 4);
    for (size_t p = 0; p < max; p++)
        for (size_t i = 0; i < half; i++) {
            double angle = (double)p * pow(10000.0, -(double)i / (double)half);
            cos_table[p * half + i] = (float)cos(angle);
            sin_table[p * half + i] = (float)sin(angle);
        }
    float *rows = mem_alloc(w->n_rows * w->width * 4);
    for (uint32_t s = 0; s < w->n_seqs; s++)
        for (uint32_t p = 0; p < w->seqs[s].len; p++)
            for (size_t i = 0; i < w->width; i++)
                rows[(w->seqs[s].first_row + p) * w->width + i] =
                    noise(w->seqs[s].stream, p, (uint32_t)i) *
                    (i < w->out_width ? w->s.q_size : 1.5f);
    d->be = be;
    d->kv.geo = &w->geo;
    for (int c = 0; c < LANE_CLASSES; c++)
        if (w->geo.n_lanes[c] > 0)
            d->kv.hbm[c] = put_nan(be, w->n_blocks * w->geo.block_bytes[c]);
    d->cos = put(be, cos_table, max * half * 4);
    d->sin = put(be, sin_table, max * half * 4);
    d->qkv = put(be, rows, w->n_rows * w->width * 4);
    d->out = put_nan(be, w->n_rows * w->out_width * 4);
    d->lse = put_nan(be, (size_t)w->n_rows * w->heads * 4);
    mem_free(rows);
    mem_free(cos_table);
    mem_free(sin_table);
}

static void close_side(struct world *w, struct side *d, size_t max)
{
    size_t table = max * (w->s.dim / 2) * 4;
    d->be->ops->free(d->be, d->cos, table);
    d->be->ops->free(d->be, d->sin, table);
    d->be->ops->free(d->be, d->qkv, w->n_rows * w->width * 4);
    d->be->ops->free(d->be, d->out, w->n_rows * w->out_width * 4);
    d->be->ops->free(d->be, d->lse, (size_t)w->n_rows * w->heads * 4);
    if (d->kv.dram[LANE_SPARSE] != NULL)
        d->be->ops->free(d->be, d->kv.dram[LANE_SPARSE],
                         w->n_blocks * w->geo.block_bytes[LANE_SPARSE]);
    for (int c = 0; c < LANE_CLASSES; c++)
        if (d->kv.hbm[c] != NULL)
            d->be->ops->free(d->be, d->kv.hbm[c], w->n_blocks * w->geo.block_bytes[c]);
}

static struct world *open_world(struct backend *cpu, struct backend *gpu, struct shape s,
                                const uint32_t *lens, uint32_t n)
{
    struct world *w = mem_alloc(sizeof *w);
    uint32_t blocks = 0, next = 5;
    w->s = s;
    w->heads = s.kv_heads * s.group;
    w->out_width = (size_t)w->heads * s.dim;
    w->width = (size_t)(w->heads + 2 * s.kv_heads) * s.dim;
    w->geo = (struct kv_geometry){.block_rows = s.rows,
                                  .layers = LAYERS,
                                  .kv_heads = s.kv_heads,
                                  .head_dim = s.dim,
                                  .type = kept,
                                  .stream_sinks = s.sinks,
                                  .stream_recent = s.recent};
    w->geo.page_bytes = kv_page_bytes(&w->geo);
    make_lanes(w);
    for (uint32_t i = 0; i < n; i++)
        blocks += lens[i] / s.rows + 1;
    for (w->n_blocks = 8; w->n_blocks < blocks; w->n_blocks *= 2)
        ;
    for (uint32_t i = 0; i < n; i++)
        w->seqs[w->n_seqs++] = make_seq(w, 10 + i, lens[i], &next);
    open_side(w, &w->cpu, cpu);
    open_side(w, &w->gpu, gpu);
    return w;
}

static void close_world(struct world *w)
{
    close_side(w, &w->cpu, longest(w));
    close_side(w, &w->gpu, longest(w));
    for (uint32_t i = 0; i < w->n_seqs; i++)
        for (int c = 0; c < LANE_CLASSES; c++)
            mem_free(w->seqs[i].blocks[c]);
    mem_free(w);
}

/* ---- operations ---- */

/* Some rows of one sequence. */
struct piece {
    uint32_t seq, from, n;
};

static struct batch_seq batch_of(const struct world *w, struct piece p)
{
    const struct seq *q = &w->seqs[p.seq];
    struct batch_seq b = {.first_row = q->first_row + p.from,
                          .n_rows = p.n,
                          .first_pos = p.from,
                          .spilled = q->spilled};
    for (int c = 0; c < LANE_CLASSES; c++)
        b.blocks[c] = w->geo.n_lanes[c] > 0 ? q->blocks[c] : NULL;
    return b;
}

/* A STREAM table where only what rows from..from + n - 1 attend leads somewhere. */
static block_id *stream_table(const struct world *w, struct piece p)
{
    uint32_t n = (p.from + p.n + w->s.rows - 1) / w->s.rows, R = w->s.rows;
    uint32_t begin = p.from + 1 < w->s.recent ? 0 : (p.from + 1 - w->s.recent) / 64 * 64;
    block_id *t = mem_alloc(n * sizeof *t);
    for (uint32_t i = 0; i < n; i++)
        t[i] = i * R < w->s.sinks || i >= begin / R || begin <= w->s.sinks
                   ? w->seqs[p.seq].blocks[LANE_STREAM][i]
                   : NOWHERE;
    return t;
}

static void append_all(struct world *w, struct side *d, uint32_t chunk)
{
    uint32_t from[MAX_SEQS] = {0};
    for (bool more = true; more;) {
        struct batch_seq b[MAX_SEQS];
        uint32_t n = 0;
        more = false;
        for (uint32_t i = 0; i < w->n_seqs; i++) {
            uint32_t left = w->seqs[i].len - from[i], take = left < chunk + i ? left : chunk + i;
            if (take > 0)
                b[n++] = batch_of(w, (struct piece){i, from[i], take});
            from[i] += take;
            more = more || from[i] < w->seqs[i].len;
        }
        d->be->ops->append(d->be, &(struct append_args){.kv = &d->kv,
                                                        .layer = LAYER,
                                                        .heads = w->heads,
                                                        .seqs = b,
                                                        .n_seqs = n,
                                                        .rope_cos = d->cos,
                                                        .rope_sin = d->sin,
                                                        .qkv = d->qkv});
        CHECK(d->be->ops->sync(d->be) == OK); /* b was read once, by its address */
    }
}

/* Every third SPARSE block of a sequence moves to the other arena; NaN stays in its place. */
static void spill(struct world *w, struct seq *q)
{
    size_t bytes = w->geo.block_bytes[LANE_SPARSE];
    struct side *sides[] = {&w->cpu, &w->gpu};
    uint8_t *nan = mem_alloc(bytes);
    memset(nan, 0xff, bytes);
    for (size_t i = 0; i < ARRAY_LEN(sides); i++) {
        struct side *d = sides[i];
        uint8_t *hbm = d->kv.hbm[LANE_SPARSE], *dram = d->kv.dram[LANE_SPARSE];
        if (dram == NULL)
            d->kv.dram[LANE_SPARSE] = dram = put_nan(d->be, w->n_blocks * bytes);
        for (uint32_t k = 1; k < q->len / w->s.rows; k += 3) {
            size_t at = (q->blocks[LANE_SPARSE][k] & ~BLOCK_IN_DRAM) * bytes;
            d->be->ops->copy(d->be, dram + at, hbm + at, bytes);
            d->be->ops->copy(d->be, hbm + at, nan, bytes);
        }
        CHECK(d->be->ops->sync(d->be) == OK);
    }
    for (uint32_t k = 1; k < q->len / w->s.rows; k += 3)
        q->blocks[LANE_SPARSE][k] |= BLOCK_IN_DRAM;
    q->spilled = true;
    mem_free(nan);
}

static void attend(struct world *w, struct side *d, const struct piece *p, uint32_t n, bool lse)
{
    struct batch_seq b[64];
    block_id *tables[64];
    CHECK(n <= 64);
    for (uint32_t i = 0; i < n; i++) {
        b[i] = batch_of(w, p[i]);
        tables[i] = stream_table(w, p[i]);
        if (b[i].blocks[LANE_STREAM] != NULL)
            b[i].blocks[LANE_STREAM] = tables[i];
    }
    d->be->ops->attend(d->be, &(struct attend_args){.kv = &d->kv,
                                                    .layer = LAYER,
                                                    .heads = w->heads,
                                                    .seqs = b,
                                                    .n_seqs = n,
                                                    .scale = 1.0f / sqrtf((float)w->s.dim),
                                                    .qkv = d->qkv,
                                                    .out = d->out,
                                                    .lse = lse ? d->lse : NULL});
    CHECK(d->be->ops->sync(d->be) == OK);
    for (uint32_t i = 0; i < n; i++)
        mem_free(tables[i]);
}

/* Rows [first, first + n) of a buffer of `width` numbers a row, on the host. */
static float *fetch(struct side *d, const float *p, size_t width, uint32_t first, uint32_t n)
{
    float *to = mem_alloc(n * width * 4);
    d->be->ops->copy(d->be, to, p + first * width, n * width * 4);
    status st = d->be->ops->sync(d->be);
    if (st != OK)
        printf("# %s\n", err_text());
    CHECK(st == OK);
    return to;
}

static void poison_results(struct world *w, struct side *d)
{
    d->be->ops->free(d->be, d->out, w->n_rows * w->out_width * 4);
    d->be->ops->free(d->be, d->lse, (size_t)w->n_rows * w->heads * 4);
    d->out = put_nan(d->be, w->n_rows * w->out_width * 4);
    d->lse = put_nan(d->be, (size_t)w->n_rows * w->heads * 4);
}

/* ||a - b|| / ||b||; NaN if there is one. */
static double distance(const float *a, const float *b, size_t n)
{
    double d = 0, s = 0;
    for (size_t i = 0; i < n; i++) {
        d += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
        s += (double)b[i] * (double)b[i];
    }
    return sqrt(d / s);
}

#endif
