/* The substrate as a whole: geometry, arenas, what is counted (cache/kv.h, cache/kv_impl.h). */
#include "cache/kv_impl.h"

#include <string.h>

struct kv_geometry kv_geometry_make(uint32_t block_rows, uint32_t layers, uint32_t kv_heads,
                                    uint32_t head_dim)
{
    struct kv_geometry g = {
        .block_rows = block_rows, .layers = layers, .kv_heads = kv_heads, .head_dim = head_dim};
    g.page_bytes = kv_page_bytes(&g);
    g.n_lanes[LANE_SPARSE] = layers * kv_heads;
    g.block_bytes[LANE_SPARSE] = (size_t)layers * kv_heads * g.page_bytes;
    return g;
}

void kv_geometry_keep(struct kv_geometry *geo, enum kv_type type)
{
    geo->type = type;
    geo->page_bytes = kv_page_bytes(geo);
    for (int c = 0; c < LANE_CLASSES; c++)
        geo->block_bytes[c] = geo->n_lanes[c] * geo->page_bytes;
}

void kv_geometry_classify(struct kv_geometry *geo, const uint8_t *classes, struct lane_place *lanes,
                          uint32_t stream_sinks, uint32_t stream_recent)
{
    uint32_t n = geo->layers * geo->kv_heads;
    memset(geo->n_lanes, 0, sizeof(geo->n_lanes));
    for (uint32_t i = 0; i < n; i++) {
        uint16_t c = classes != NULL ? classes[i] : LANE_SPARSE;
        CHECK(c < LANE_CLASSES);
        lanes[i] = (struct lane_place){.class_ = c, .index = (uint16_t)geo->n_lanes[c]++};
    }
    for (int c = 0; c < LANE_CLASSES; c++)
        geo->block_bytes[c] = geo->n_lanes[c] * geo->page_bytes;
    geo->stream_sinks = stream_sinks;
    geo->stream_recent = stream_recent;
    geo->lanes = lanes;
}

static enum lane_class main_class(const struct kv_geometry *g)
{
    if (g->block_bytes[LANE_SPARSE] > 0)
        return LANE_SPARSE;
    return g->block_bytes[LANE_DENSE] > 0 ? LANE_DENSE : LANE_STREAM;
}

static status check_config(const struct kv_config *cfg)
{
    const struct kv_geometry *g = &cfg->geo;
    enum lane_class main = main_class(g);
    if (g->block_rows != 8 && g->block_rows != 16 && g->block_rows != 32)
        return err(ERR_ARG, "block size %u: must be 8, 16 or 32", g->block_rows);
    if (g->block_bytes[main] == 0)
        return err(ERR_ARG, "a block of no bytes: layers, KV heads and head size must not be 0");
    if (g->block_bytes[LANE_STREAM] > 0 && g->stream_recent == 0)
        return err(ERR_ARG, "STREAM lanes need a window of recent rows");
    for (int c = 0; c < LANE_CLASSES; c++) {
        if (g->block_bytes[c] > 0 && cfg->blocks[c][KV_HBM] == 0)
            return err(ERR_ARG, "the KV arena has no room for one block of %zu bytes",
                       g->block_bytes[c]);
        if ((uint64_t)cfg->blocks[c][KV_HBM] + cfg->blocks[c][KV_DRAM] >= BLOCK_IN_DRAM)
            return err(ERR_ARG, "%u + %u blocks: more than 31 bits can name",
                       cfg->blocks[c][KV_HBM], cfg->blocks[c][KV_DRAM]);
    }
    return OK;
}

/* Every block has a place of the main class, so there are as many of both. STREAM lanes alone are the
 * exception: there most blocks of a sequence have no place. */
static uint32_t count_blocks(const struct kv *kv)
{
    enum { MOST = 1 << 22 };
    uint64_t n = (uint64_t)kv->cfg.blocks[kv->main][KV_HBM] + kv->cfg.blocks[kv->main][KV_DRAM];
    if (kv->main == LANE_STREAM)
        n = n * KV_STREAM_REACH < MOST ? n * KV_STREAM_REACH : MOST;
    return (uint32_t)n;
}

static status copy_lanes(struct kv *kv)
{
    const struct kv_geometry *g = &kv->cfg.geo;
    size_t bytes = (size_t)g->layers * g->kv_heads * sizeof(*kv->lanes);
    if (g->lanes == NULL)
        return OK;
    kv->lanes = mem_try_alloc(bytes);
    if (kv->lanes == NULL)
        return err(ERR_MEMORY, "no memory for the places of %u lanes", g->layers * g->kv_heads);
    memcpy(kv->lanes, g->lanes, bytes);
    kv->cfg.geo.lanes = kv->lanes;
    return OK;
}

static status create_records(struct kv *kv)
{
    const struct kv_geometry *g = &kv->cfg.geo;
    struct kv_memory *m = &kv->memory;
    kv->free_record = BLOCK_NONE;
    if (kv->cfg.n_records == 0)
        return OK;
    m->record_lane_bytes = kv->cfg.record_lane_bytes;
    m->record_bytes = m->record_lane_bytes * g->n_lanes[LANE_SPARSE];
    kv->records = mem_try_alloc((size_t)kv->cfg.n_records * sizeof(*kv->records));
    if (kv->records == NULL)
        return err(ERR_MEMORY, "no memory for %u digest records", kv->cfg.n_records);
    for (uint32_t i = kv->cfg.n_records; i-- > 0;) {
        kv->records[i] = (struct record){.block = BLOCK_NONE, .next = kv->free_record};
        kv->free_record = i;
    }
    if (m->record_bytes == 0)
        return OK; /* oracle, which keeps no digest: the record is a name */
    m->records = kv->be->ops->alloc(kv->be, (size_t)kv->cfg.n_records * m->record_bytes);
    return m->records != NULL ? OK : ERR_MEMORY; /* the backend has said why */
}

static status create_arenas(struct kv *kv)
{
    for (int c = 0; c < LANE_CLASSES; c++)
        for (int t = 0; t < TIERS && kv_uses(kv, (enum lane_class)c); t++)
            TRY(places_init(&kv->place[c][t], kv->be, (enum block_tier)t, kv->cfg.blocks[c][t],
                            kv->cfg.geo.block_bytes[c]));
    kv->memory.geo = &kv->cfg.geo;
    for (int c = 0; c < LANE_CLASSES; c++) {
        kv->memory.hbm[c] = kv->place[c][KV_HBM].arena;
        kv->memory.dram[c] = kv->place[c][KV_DRAM].arena;
    }
    /* The first look makes a tier that grows begin, and the owner says when that is. */
    if (kv->be->ops->alloc_host == NULL)
        kv_poll(kv);
    return OK;
}

static status create_all(struct kv *kv)
{
    uint32_t n = count_blocks(kv);
    struct prefix_config prefix = {.n_nodes = n,
                                   .block_rows = kv->cfg.geo.block_rows,
                                   .secret = {kv->cfg.secret[0], kv->cfg.secret[1]},
                                   .hash_bits = kv->cfg.hash_bits};
    TRY(copy_lanes(kv));
    TRY(create_arenas(kv));
    TRY(create_records(kv));
    TRY(blocks_init(&kv->blocks, n));
    if (kv_uses(kv, LANE_SPARSE))
        TRY(leaf_pool_create(&kv->leaves, kv->be, kv->cfg.geo.n_lanes[LANE_SPARSE],
                             kv->cfg.leaf_bytes > 0 ? kv->cfg.leaf_bytes : UINT64_MAX));
    return prefix_init(&kv->prefix, &prefix);
}

status kv_create(struct kv **out, struct backend *be, const struct kv_config *cfg)
{
    *out = NULL;
    TRY(check_config(cfg));
    struct kv *kv = mem_alloc(sizeof(*kv));
    kv->be = be;
    kv->cfg = *cfg;
    kv->doomed = BLOCK_NONE;
    kv->main = main_class(&cfg->geo);
    kv->segment_blocks = SEGMENT_ROWS / cfg->geo.block_rows;
    kv->stream_sink_blocks = kv_blocks_for(kv, cfg->geo.stream_sinks);
    status st = create_all(kv);
    if (st == OK)
        *out = kv;
    else
        kv_destroy(kv);
    return st;
}

void kv_destroy(struct kv *kv)
{
    if (kv == NULL)
        return;
    kv_loan_end(kv);
    prefix_fini(&kv->prefix);
    blocks_fini(&kv->blocks);
    if (kv->memory.records != NULL)
        kv->be->ops->free(kv->be, kv->memory.records,
                          (size_t)kv->cfg.n_records * kv->memory.record_bytes);
    mem_free(kv->records);
    mem_free(kv->ids);
    leaf_pool_destroy(kv->leaves);
    for (int c = 0; c < LANE_CLASSES; c++)
        for (int t = 0; t < TIERS; t++)
            places_fini(&kv->place[c][t]);
    mem_free(kv->lanes);
    mem_free(kv);
}

const struct kv_memory *kv_memory(const struct kv *kv)
{
    return &kv->memory;
}

const struct kv_geometry *kv_geometry(const struct kv *kv)
{
    return &kv->cfg.geo;
}

void kv_poll(struct kv *kv)
{
    struct kv_counts *n = &kv->counts;
    n->dram_ready = n->dram_bytes = 0;
    n->dram_ended = true;
    for (int c = 0; c < LANE_CLASSES; c++) {
        struct host_progress p;
        places_poll(&kv->place[c][KV_DRAM], &p);
        n->dram_ready += p.ready;
        n->dram_bytes += p.bytes;
        n->dram_ended &= p.ended;
        n->dram_why = p.why != NULL ? p.why : n->dram_why;
    }
}

/* ---- counts ---- */

uint32_t kv_available(const struct kv *kv)
{
    uint32_t least = kv_places_available(kv, kv->main, KV_HBM);
    if (kv->main == LANE_STREAM) /* what is short there is records of blocks */
        return kv->blocks.in[BLOCK_FREE].n + kv->blocks.in[BLOCK_CACHED_HBM].n +
               kv->blocks.in[BLOCK_CACHED_DRAM].n;
    if (kv->main == LANE_SPARSE && kv_uses(kv, LANE_DENSE)) {
        uint32_t dense = kv_places_available(kv, LANE_DENSE, KV_HBM);
        least = dense < least ? dense : least;
    }
    return least;
}

bool kv_has_dram(const struct kv *kv)
{
    return kv->place[kv->main][KV_DRAM].n > 0;
}

uint32_t kv_dram_available(const struct kv *kv)
{
    return kv_places_available(kv, kv->main, KV_DRAM);
}

void kv_counts(const struct kv *kv, struct kv_counts *out)
{
    const struct blocks *bs = &kv->blocks;
    *out = kv->counts;
    for (int t = 0; t < TIERS; t++) {
        out->total[t] = kv->place[kv->main][t].n_ready;
        out->free[t] = kv->place[kv->main][t].n_free;
    }
    out->cached[KV_HBM] = kv_places_available(kv, kv->main, KV_HBM) - out->free[KV_HBM];
    out->cached[KV_DRAM] = kv_places_available(kv, kv->main, KV_DRAM) - out->free[KV_DRAM];
    out->active = out->total[KV_HBM] - out->free[KV_HBM] - out->cached[KV_HBM];
    out->index_bytes = prefix_bytes(&kv->prefix) + bs->n * sizeof(*bs->all) +
                       kv->cfg.n_records * sizeof(*kv->records);
    for (int c = 0; c < LANE_CLASSES; c++)
        for (int t = 0; t < TIERS; t++)
            out->index_bytes += kv->place[c][t].n * sizeof(*kv->place[c][t].free);
    out->record_bytes_used = kv->n_records_used * kv->memory.record_bytes;
    out->map_bytes_used = (uint64_t)kv->n_maps_used * kv->cfg.geo.n_lanes[LANE_SPARSE] *
                          SEGMENT_ROWS * sizeof(uint16_t);
    out->leaf_bytes = kv->leaves != NULL ? leaf_pool_bytes(kv->leaves) : 0;
    out->table_bytes += kv->hot_bytes + out->leaf_bytes;
}

void kv_drop_prefixes(struct kv *kv)
{
    while (kv_drop_oldest(kv))
        ;
}
