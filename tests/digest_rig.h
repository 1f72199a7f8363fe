/* What the tests of seal, score and select stand on: a backend, pages of chosen rows, and rows read
 * back from pages without the code under test. */
#ifndef TESTS_DIGEST_RIG_H
#define TESTS_DIGEST_RIG_H

#include "kernels/core/digest.h"
#include "kernels/cpu/cpu.h"
#include "kernels/dtype.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct rig_shape {
    uint32_t rows, layers, kv_heads, dim, segments; /* rows: R */
};

struct rig {
    struct rig_shape s;
    struct backend *be;
    struct kv_geometry geo;
    struct kv_memory kv;
    struct lane_place lanes[64];
    struct digest_desc desc;
    uint8_t *arena, *dram, *records;
    size_t arena_bytes, record_total;
    block_id *blocks;  /* [segments * SEGMENT_ROWS / R], scattered */
    block_id *spare;   /* the same number of other blocks */
    uint32_t *numbers; /* [segments] records, descending */
};

/* What pages of the next rig keep. */
static enum kv_type rig_kept;

static const char *const rig_isas[] = {"scalar", "avx2", "avx512"};

static inline float rig_noise(uint32_t a, uint32_t b, uint32_t c)
{
    uint32_t x = a * 0x9e3779b1u ^ b * 0x85ebca6bu ^ c * 0xc2b2ae35u;
    x ^= x >> 15;
    x *= 0x2c1b3c6du;
    x ^= x >> 12;
    x *= 0x297a2d39u;
    x ^= x >> 15;
    return (float)x / 2147483648.0f - 1.0f;
}

/* NULL: this machine has no such instruction set. */
static inline struct rig *rig_open(const char *isa, uint32_t threads, struct rig_shape s,
                                   struct digest_desc d)
{
    struct rig *r = mem_alloc(sizeof *r);
    struct cpu_options o = {.isa = isa, .n_threads = threads};
    if (cpu_backend_open(&r->be, &o) != OK) {
        mem_free(r);
        return NULL;
    }
    uint32_t per_segment = SEGMENT_ROWS / s.rows, n = per_segment * s.segments;
    uint32_t n_lanes = s.layers * s.kv_heads;
    r->s = s;
    r->desc = d;
    r->geo = (struct kv_geometry){.block_rows = s.rows,
                                  .layers = s.layers,
                                  .kv_heads = s.kv_heads,
                                  .head_dim = s.dim,
                                  .type = rig_kept};
    r->geo.page_bytes = kv_page_bytes(&r->geo);
    r->geo.n_lanes[LANE_SPARSE] = n_lanes;
    r->geo.block_bytes[LANE_SPARSE] = n_lanes * r->geo.page_bytes;
    r->arena_bytes = 2 * (size_t)n * r->geo.block_bytes[LANE_SPARSE];
    r->arena = mem_alloc(r->arena_bytes);
    r->blocks = mem_alloc(n * sizeof *r->blocks);
    r->spare = mem_alloc(n * sizeof *r->spare);
    r->numbers = mem_alloc(s.segments * sizeof *r->numbers);
    for (uint32_t i = 0; i < n; i++) { /* n is a power of two times segments: 5 and 2n are coprime
                                          unless segments is a multiple of 5 */
        CHECK(n % 5 != 0);
        r->blocks[i] = (uint32_t)((uint64_t)i * 5 % n) * 2;
        r->spare[i] = r->blocks[i] + 1;
    }
    r->kv = (struct kv_memory){.geo = &r->geo, .hbm = {r->arena}};
    r->kv.record_lane_bytes = r->be->ops->digest_bytes(&r->geo, &d);
    r->kv.record_bytes = n_lanes * r->kv.record_lane_bytes;
    r->record_total = s.segments * r->kv.record_bytes;
    r->records = aligned_alloc(64, r->record_total + 64);
    CHECK(r->records != NULL);
    memset(r->records, 0xa5, r->record_total);
    r->kv.records = r->records;
    for (uint32_t i = 0; i < s.segments; i++)
        r->numbers[i] = s.segments - 1 - i;
    return r;
}

static inline void rig_close(struct rig *r)
{
    r->be->ops->close(r->be);
    mem_free(r->arena);
    mem_free(r->blocks);
    mem_free(r->spare);
    mem_free(r->numbers);
    free(r->records);
    mem_free(r);
}

static inline uint8_t *rig_page(const struct rig *r, block_id b, uint32_t lane)
{
    return (b & BLOCK_IN_DRAM ? r->dram : r->arena) +
           (b & ~BLOCK_IN_DRAM) * r->geo.block_bytes[LANE_SPARSE] +
           kv_page_offset(&r->geo, lane / r->s.kv_heads, lane % r->s.kv_heads);
}

/* Which number of a page number c of row `row` is: K, or V. */
static inline size_t rig_index(const struct rig *r, uint32_t row, uint32_t c, bool value)
{
    uint32_t rows = r->s.rows, dim = r->s.dim;
    if (value)
        return (size_t)rows * dim + ((size_t)(row / 2) * dim + c) * 2 + row % 2;
    return ((size_t)(c / 2) * rows + row) * 2 + c % 2;
}

/* Of a page of bf16. */
static inline uint16_t *rig_number(const struct rig *r, uint8_t *page, uint32_t row, uint32_t c,
                                   bool value)
{
    return (uint16_t *)(void *)page + rig_index(r, row, c, value);
}

static inline uint16_t *rig_at(const struct rig *r, const block_id *blocks, uint32_t lane,
                               uint32_t row, uint32_t c, bool value)
{
    return rig_number(r, rig_page(r, blocks[row / r->s.rows], lane), row % r->s.rows, c, value);
}

/* The same of a page of either kind, as a number. */
static inline float rig_get(const struct rig *r, const block_id *blocks, uint32_t lane,
                            uint32_t row, uint32_t c, bool value)
{
    const uint8_t *page = rig_page(r, blocks[row / r->s.rows], lane);
    size_t at = rig_index(r, row % r->s.rows, c, value);
    return r->geo.type == KV_E4M3 ? e4m3_to_f32(page[at])
                                  : bf16_to_f32(((const uint16_t *)(const void *)page)[at]);
}

static inline void rig_put(const struct rig *r, const block_id *blocks, uint32_t lane, uint32_t row,
                           uint32_t c, bool value, float x)
{
    uint8_t *page = rig_page(r, blocks[row / r->s.rows], lane);
    size_t at = rig_index(r, row % r->s.rows, c, value);
    if (r->geo.type == KV_E4M3)
        page[at] = f32_to_e4m3(x);
    else
        ((uint16_t *)(void *)page)[at] = f32_to_bf16(x);
}

/* Rows like those of a model: clusters with a common offset, a few channels far from zero, some rows
 * alone. */
static inline float rig_key(uint32_t lane, uint32_t row, uint32_t c)
{
    uint32_t cluster = (uint32_t)((rig_noise(lane, row / 3, 77) + 1) * 20);
    float x =
        rig_noise(lane * 64 + cluster, 5, c) * 1.5f + rig_noise(lane * 4096 + row, 6, c) * 0.7f;
    if (row % 61 == 17)
        x += 3 * rig_noise(lane * 4096 + row, 8, c);
    return x + (c % 16 == 3 ? 6.0f * rig_noise(lane, 9, c) : 0);
}

static inline float rig_value(uint32_t lane, uint32_t row, uint32_t c)
{
    return rig_noise(lane * 8192 + row, 10, c) + rig_noise(lane, row / 40, c);
}

static inline void rig_fill(struct rig *r)
{
    uint32_t n_lanes = r->s.layers * r->s.kv_heads, n = r->s.segments * SEGMENT_ROWS;
    memset(r->arena, 0xff, r->arena_bytes);
    for (uint32_t lane = 0; lane < n_lanes; lane++)
        for (uint32_t row = 0; row < n; row++)
            for (uint32_t c = 0; c < r->s.dim; c++) {
                rig_put(r, r->blocks, lane, row, c, false, rig_key(lane, row, c));
                rig_put(r, r->blocks, lane, row, c, true, rig_value(lane, row, c));
            }
}

static inline void rig_seal(struct rig *r, uint32_t segment, const block_id *from,
                            const block_id *to)
{
    uint32_t first = segment * (SEGMENT_ROWS / r->s.rows);
    struct seal_args a = {.kv = &r->kv,
                          .desc = r->desc,
                          .from = from + first,
                          .to = to + first,
                          .segment = segment,
                          .record = r->numbers[segment],
                          .first_record = r->numbers[0]};
    r->be->ops->seal(r->be, &a);
}

static inline void rig_seal_all(struct rig *r)
{
    for (uint32_t i = 0; i < r->s.segments; i++)
        rig_seal(r, i, r->blocks, r->blocks);
}

static inline const uint8_t *rig_record(const struct rig *r, uint32_t segment, uint32_t lane)
{
    return digest_lane(&r->kv, r->numbers[segment], lane / r->s.kv_heads, lane % r->s.kv_heads);
}

/* All keys of a lane in the order of storage now: [segments * SEGMENT_ROWS][dim]. */
static inline double *rig_keys(const struct rig *r, const block_id *blocks, uint32_t lane,
                               bool value)
{
    uint32_t n = r->s.segments * SEGMENT_ROWS;
    double *k = mem_alloc((size_t)n * r->s.dim * sizeof *k);
    for (uint32_t row = 0; row < n; row++)
        for (uint32_t c = 0; c < r->s.dim; c++)
            k[(size_t)row * r->s.dim + c] = (double)rig_get(r, blocks, lane, row, c, value);
    return k;
}

/* Rows of the sinks' pages. */
static inline uint32_t rig_sink_rows(const struct rig *r)
{
    return (r->desc.sinks + r->s.rows - 1) / r->s.rows * r->s.rows;
}

#endif
