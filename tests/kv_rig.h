/* What the KV tests stand on: a backend that can only allocate, copy, seal and unpermute, a random
 * number generator, and content that can be recognised again.
 *
 * Sealing here permutes rows by a rule that depends on the lane and on the segment's first row, and
 * writes the map and a checksum of the rows into the record, as a real plug-in would. */
#ifndef TESTS_KV_RIG_H
#define TESTS_KV_RIG_H

#include "cache/kv.h"
#include "kernels/core/hot_run.h"

#include <string.h>

static size_t rig_held_bytes; /* by arenas that live */

static inline void *rig_alloc(struct backend *be, size_t bytes)
{
    (void)be;
    rig_held_bytes += bytes;
    return mem_try_alloc(bytes);
}

static inline void rig_free(struct backend *be, void *p, size_t bytes)
{
    (void)be;
    rig_held_bytes -= bytes;
    mem_free(p);
}

static inline void rig_copy(struct backend *be, void *dst, const void *src, size_t bytes)
{
    (void)be;
    memcpy(dst, src, bytes);
}

static inline void rig_hot(struct backend *be, const struct hot_args *a)
{
    (void)be;
    hot_run(a);
}

/* splitmix64 */
static inline uint64_t rig_mix(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* ---- rows: head_dim is 4, so K and V of a row are one word each ---- */

enum { RIG_HEAD_DIM = 4 };

struct rig_row {
    uint64_t k, v;
};

static inline unsigned char *rig_page(const struct kv_memory *m, int c, block_id id, uint32_t lane)
{
    const struct kv_geometry *g = m->geo;
    unsigned char *base = id & BLOCK_IN_DRAM ? m->dram[c] : m->hbm[c];
    return base + (size_t)(id & ~BLOCK_IN_DRAM) * g->block_bytes[c] + lane * g->page_bytes;
}

static inline struct rig_row rig_get(const struct kv_memory *m, int c, block_id id, uint32_t lane,
                                     uint32_t row)
{
    const unsigned char *page = rig_page(m, c, id, lane);
    struct rig_row r;
    memcpy(&r.k, page + row * sizeof r.k, sizeof r.k);
    memcpy(&r.v, page + (m->geo->block_rows + row) * sizeof r.v, sizeof r.v);
    return r;
}

static inline void rig_put(const struct kv_memory *m, int c, block_id id, uint32_t lane,
                           uint32_t row, struct rig_row r)
{
    unsigned char *page = rig_page(m, c, id, lane);
    memcpy(page + row * sizeof r.k, &r.k, sizeof r.k);
    memcpy(page + (m->geo->block_rows + row) * sizeof r.v, &r.v, sizeof r.v);
}

/* What the row of this name holds in this lane. */
static inline struct rig_row rig_row_of(uint64_t name, int c, uint32_t lane)
{
    uint64_t k = (name + (uint64_t)c * 1000003 + lane) * 0xbf58476d1ce4e5b9u;
    return (struct rig_row){k ^ k >> 29, ~k * 0x94d049bb133111ebu};
}

/* ---- sealing ---- */

struct rig_digest { /* at the beginning of a lane's record, after the map if rows are permuted */
    uint64_t checksum, segment;
};

static inline unsigned char *rig_record(const struct kv_memory *m, uint32_t record, uint32_t lane)
{
    return (unsigned char *)m->records + record * m->record_bytes + lane * m->record_lane_bytes;
}

static inline uint64_t rig_checksum(uint64_t sum, struct rig_row r)
{
    return (sum ^ r.k ^ r.v << 1) * 0x100000001b3u;
}

/* Storage row i of a permuted segment has position rig_position(i, seed). */
static inline uint32_t rig_position(uint32_t i, uint64_t seed)
{
    uint32_t odd = (uint32_t)(seed >> 20) | 1;
    return (i * odd + (uint32_t)seed) % SEGMENT_ROWS;
}

static inline void rig_seal(struct backend *be, const struct seal_args *a)
{
    static struct rig_row rows[SEGMENT_ROWS];
    uint32_t per = a->kv->geo->block_rows;
    (void)be;
    for (uint32_t lane = 0; lane < a->kv->geo->n_lanes[LANE_SPARSE]; lane++) {
        unsigned char *rec = rig_record(a->kv, a->record, lane);
        struct rig_digest d = {.checksum = 1, .segment = a->segment};
        for (uint32_t i = 0; i < SEGMENT_ROWS; i++) {
            rows[i] = rig_get(a->kv, LANE_SPARSE, a->from[i / per], lane, i % per);
            d.checksum = rig_checksum(d.checksum, rows[i]);
        }
        memcpy(rec + digest_offset(&a->desc), &d, sizeof d);
        for (uint32_t i = 0; i < SEGMENT_ROWS && a->desc.order != ORDER_KEEP; i++) {
            uint16_t pos = (uint16_t)rig_position(i, rows[0].k + lane);
            memcpy(rec + 2 * i, &pos, sizeof pos);
            rig_put(a->kv, LANE_SPARSE, a->to[i / per], lane, i % per, rows[pos]);
        }
    }
}

static inline void rig_unpermute(struct backend *be, const struct unpermute_args *a)
{
    uint32_t per = a->kv->geo->block_rows;
    (void)be;
    for (uint32_t lane = 0; lane < a->kv->geo->n_lanes[LANE_SPARSE]; lane++)
        for (uint32_t i = 0; i < SEGMENT_ROWS; i++) {
            uint16_t pos;
            memcpy(&pos, rig_record(a->kv, a->record, lane) + 2 * i, sizeof pos);
            if (pos < a->n_rows)
                rig_put(a->kv, LANE_SPARSE, a->to[pos / per], lane, pos % per,
                        rig_get(a->kv, LANE_SPARSE, a->from[i / per], lane, i % per));
        }
}

static const struct backend_ops rig_ops = {.name = "rig",
                                           .act_bytes = 4,
                                           .alloc = rig_alloc,
                                           .free = rig_free,
                                           .copy = rig_copy,
                                           .hot = rig_hot,
                                           .seal = rig_seal,
                                           .unpermute = rig_unpermute};
static struct backend rig_backend = {&rig_ops};

/* ---- whole blocks of SPARSE lanes, for the unit test ---- */

/* Every byte of the block depends on `name` and on where it lies. */
static inline void rig_write(struct kv *kv, block_id id, uint64_t name)
{
    unsigned char *at = rig_page(kv_memory(kv), LANE_SPARSE, id, 0);
    for (size_t i = 0; i < kv_geometry(kv)->block_bytes[LANE_SPARSE]; i += sizeof(name)) {
        uint64_t word = rig_mix(&name);
        memcpy(at + i, &word, sizeof(word));
    }
}

static inline bool rig_holds(struct kv *kv, block_id id, uint64_t name)
{
    const unsigned char *at = rig_page(kv_memory(kv), LANE_SPARSE, id, 0);
    for (size_t i = 0; i < kv_geometry(kv)->block_bytes[LANE_SPARSE]; i += sizeof(name)) {
        uint64_t word = rig_mix(&name);
        if (memcmp(at + i, &word, sizeof(word)) != 0)
            return false;
    }
    return true;
}

#endif
