/* Worlds of the tests of sealing: a rig of the CPU (tests/digest_rig.h) and its twin on the device, whose
 * pages come back into the CPU's layout, so that the same functions read both. Pages nobody may touch are
 * poisoned. */
#ifndef TESTS_CUDA_SEAL_WORLD_H
#define TESTS_CUDA_SEAL_WORLD_H

#include "kernels/cuda_api.h"
#include "tests/seal_checks.h"
#include "tests/tap.h"

#include <stdio.h>

static struct backend *gpu;
static struct kv_geometry geometries[256]; /* backends know them by address: none is used twice */
static uint32_t n_geometries;

struct world {
    struct rig *cpu, *dev;   /* dev: what came back from the device */
    struct kv_memory kv;     /* the device's */
    struct kv_geometry *geo; /* of kv */
    uint16_t *pages;         /* host copy in the device's layout */
};

static void synced(void)
{
    if (gpu->ops->sync(gpu) == OK)
        return;
    printf("Bail out! %s\n", err_text());
    exit(1);
}

/* From (back: to) the device's page layout, K[R][dim], V[R][dim]. */
static void convert(struct world *w, bool back)
{
    const struct rig *r = w->dev;
    size_t n_blocks = r->arena_bytes / r->geo.block_bytes[LANE_SPARSE];
    uint32_t n_lanes = r->s.layers * r->s.kv_heads;
    for (size_t b = 0; b < n_blocks; b++)
        for (uint32_t lane = 0; lane < n_lanes; lane++) {
            uint16_t *at =
                w->pages + (b * r->geo.block_bytes[LANE_SPARSE] + lane * r->geo.page_bytes) / 2;
            uint8_t *page =
                r->arena + b * r->geo.block_bytes[LANE_SPARSE] + lane * r->geo.page_bytes;
            for (uint32_t v = 0; v < 2; v++)
                for (uint32_t row = 0; row < r->s.rows; row++)
                    for (uint32_t c = 0; c < r->s.dim; c++, at++) {
                        uint16_t *x = rig_number(r, page, row, c, v == 1);
                        if (back)
                            *at = *x;
                        else
                            *x = *at;
                    }
        }
}

static void upload(struct world *w)
{
    convert(w, true);
    gpu->ops->copy(gpu, w->kv.hbm[LANE_SPARSE], w->pages, w->dev->arena_bytes);
    gpu->ops->copy(gpu, w->kv.records, w->dev->records, w->dev->record_total);
    synced();
}

static void download(struct world *w)
{
    synced();
    gpu->ops->copy(gpu, w->pages, w->kv.hbm[LANE_SPARSE], w->dev->arena_bytes);
    gpu->ops->copy(gpu, w->dev->records, w->kv.records, w->dev->record_total);
    synced();
    convert(w, false);
}

static void fill(struct rig *r, row_function *key, row_function *value)
{
    uint32_t n_lanes = r->s.layers * r->s.kv_heads, n = r->s.segments * SEGMENT_ROWS;
    memset(r->arena, 0xff, r->arena_bytes);
    for (uint32_t lane = 0; lane < n_lanes; lane++)
        for (uint32_t row = 0; row < n; row++)
            for (uint32_t c = 0; c < r->s.dim; c++) {
                *rig_at(r, r->blocks, lane, row, c, false) = f32_to_bf16(key(lane, row, c));
                *rig_at(r, r->blocks, lane, row, c, true) = f32_to_bf16(value(lane, row, c));
            }
}

static struct world *open_world(struct rig_shape s, struct digest_desc d, row_function *key)
{
    struct world *w = mem_alloc(sizeof *w);
    w->cpu = rig_open("auto", 0, s, d);
    w->dev = rig_open("auto", 1, s, d);
    CHECK(n_geometries < ARRAY_LEN(geometries));
    w->geo = &geometries[n_geometries++];
    *w->geo = w->dev->geo;
    CHECK(gpu->ops->digest_bytes(w->geo, &d) == w->cpu->kv.record_lane_bytes);
    w->kv = w->dev->kv;
    w->kv.geo = w->geo;
    w->pages = mem_alloc(w->dev->arena_bytes);
    w->kv.hbm[LANE_SPARSE] = gpu->ops->alloc(gpu, w->dev->arena_bytes);
    w->kv.records = gpu->ops->alloc(gpu, w->dev->record_total);
    CHECK(w->kv.hbm[LANE_SPARSE] != NULL && w->kv.records != NULL);
    fill(w->cpu, key, rig_value);
    fill(w->dev, key, rig_value);
    upload(w);
    return w;
}

static void close_world(struct world *w)
{
    gpu->ops->free(gpu, w->kv.hbm[LANE_SPARSE], w->dev->arena_bytes);
    gpu->ops->free(gpu, w->kv.records, w->dev->record_total);
    rig_close(w->cpu);
    rig_close(w->dev);
    mem_free(w->pages);
    mem_free(w);
}

static void gpu_seal(struct world *w, uint32_t segment, const block_id *to)
{
    uint32_t first = segment * (SEGMENT_ROWS / w->geo->block_rows);
    struct seal_args a = {.kv = &w->kv,
                          .desc = w->dev->desc,
                          .from = w->dev->blocks + first,
                          .to = to + first,
                          .segment = segment,
                          .record = w->dev->numbers[segment],
                          .first_record = w->dev->numbers[0]};
    gpu->ops->seal(gpu, &a);
}

/* Both seal all segments in place. */
static void seal_both(struct world *w)
{
    rig_seal_all(w->cpu);
    for (uint32_t i = 0; i < w->dev->s.segments; i++)
        gpu_seal(w, i, w->dev->blocks);
    download(w);
}

#endif
