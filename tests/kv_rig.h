/* What the KV tests stand on: a backend that can only allocate and copy, a random number generator,
 * and content that can be recognised again. */
#ifndef TESTS_KV_RIG_H
#define TESTS_KV_RIG_H

#include "cache/kv.h"

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

static const struct backend_ops rig_ops = {
    .name = "rig", .act_bytes = 4, .alloc = rig_alloc, .free = rig_free, .copy = rig_copy};
static struct backend rig_backend = {&rig_ops};

/* splitmix64 */
static inline uint64_t rig_mix(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static inline unsigned char *rig_block(struct kv *kv, block_id id)
{
    return (unsigned char *)kv_arena(kv) + (size_t)id * kv_geometry(kv)->block_bytes[LANE_SPARSE];
}

/* Every byte of the block depends on `name` and on where it lies. */
static inline void rig_write(struct kv *kv, block_id id, uint64_t name)
{
    unsigned char *at = rig_block(kv, id);
    for (size_t i = 0; i < kv_geometry(kv)->block_bytes[LANE_SPARSE]; i += sizeof(name)) {
        uint64_t word = rig_mix(&name);
        memcpy(at + i, &word, sizeof(word));
    }
}

static inline bool rig_holds(struct kv *kv, block_id id, uint64_t name)
{
    const unsigned char *at = rig_block(kv, id);
    for (size_t i = 0; i < kv_geometry(kv)->block_bytes[LANE_SPARSE]; i += sizeof(name)) {
        uint64_t word = rig_mix(&name);
        if (memcmp(at + i, &word, sizeof(word)) != 0)
            return false;
    }
    return true;
}

#endif
