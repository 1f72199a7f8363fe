/* Sequences: growing, sharing, closing (cache/kv.h, cache/kv_impl.h). */
#include "cache/kv_impl.h"

#include <string.h>

/* ---- where a sequence needs its blocks ---- */

bool kv_keeps_stream(const struct kv *kv, uint32_t i)
{
    if (!kv->cfg.prefix_caching || !kv_uses(kv, LANE_STREAM))
        return false;
    /* The window of the row after the segment that block i lies in. */
    uint32_t end = (i / kv->segment_blocks + 1) * kv->segment_blocks;
    return i < kv->stream_sink_blocks || i >= kv_ring_start(kv, end * kv->cfg.geo.block_rows);
}

uint32_t kv_ring_start(const struct kv *kv, uint32_t row)
{
    uint32_t recent = kv->cfg.geo.stream_recent;
    return row + 1 > recent ? (row + 1 - recent) / 64 * 64 / kv->cfg.geo.block_rows : 0;
}

static bool in_ring(const struct kv *kv, const struct kv_seq *s, uint32_t i)
{
    return i < kv->stream_sink_blocks || i >= s->own->ring_first;
}

part_mask kv_seq_needs(const struct kv *kv, const struct kv_seq *s, uint32_t i,
                       enum kv_residence residence)
{
    enum kv_tier tier = residence == KV_PAUSED ? KV_DRAM : KV_HBM, sparse = tier;
    if (residence == KV_SPILLED && i < kv_sealed_blocks(kv, s))
        sparse = KV_DRAM;
    part_mask m = 0;
    if (kv_uses(kv, LANE_SPARSE))
        m |= PART(LANE_SPARSE, sparse);
    if (kv_uses(kv, LANE_DENSE))
        m |= PART(LANE_DENSE, tier);
    if (kv_uses(kv, LANE_STREAM) && in_ring(kv, s, i))
        m |= PART(LANE_STREAM, tier);
    return m;
}

void kv_seq_entry(struct kv *kv, struct kv_seq *s, uint32_t i)
{
    const struct block *b = kv_block(kv, s->own->blocks[i]);
    part_mask m = kv_seq_needs(kv, s, i, s->residence);
    for (int c = 0; c < LANE_CLASSES; c++) {
        if (s->own->table[c] == NULL)
            continue;
        block_id at = BLOCK_NONE;
        if (m & PART(c, KV_HBM))
            at = b->at[c][KV_HBM];
        else if (m & PART(c, KV_DRAM))
            at = b->at[c][KV_DRAM] | BLOCK_IN_DRAM;
        s->own->table[c][i] = at;
    }
}

/* ---- tables ---- */

static size_t table_bytes(const struct kv *kv, uint32_t capacity)
{
    size_t arrays = 1; /* of the records */
    for (int c = 0; c < LANE_CLASSES; c++)
        arrays += kv_uses(kv, (enum lane_class)c);
    return capacity == 0
               ? 0
               : (arrays * capacity + capacity / kv->segment_blocks + 1) * sizeof(uint32_t);
}

uint64_t kv_table_bytes(const struct kv *kv, const struct kv_seq *s)
{
    return table_bytes(kv, s->own->capacity);
}

static bool grow_array(uint32_t **a, uint32_t old, uint32_t n)
{
    void *p = mem_try_grow(*a, old * sizeof(**a), n * sizeof(**a));
    if (p != NULL)
        *a = p;
    return p != NULL;
}

/* By doubling, so that tables follow what a sequence holds and not what it might. */
status kv_seq_reserve(struct kv *kv, struct kv_seq *s, uint32_t n_blocks)
{
    struct kv_seq_private *own = s->own;
    uint32_t capacity = own->capacity > 0 ? own->capacity : 32, per = kv->segment_blocks;
    if (n_blocks <= own->capacity)
        return OK;
    while (capacity < n_blocks)
        capacity *= 2;
    capacity = capacity < s->max_blocks ? capacity : s->max_blocks;
    bool good = grow_array(&own->blocks, own->capacity, capacity);
    for (int c = 0; c < LANE_CLASSES && good; c++)
        if (kv_uses(kv, (enum lane_class)c))
            good = grow_array(&own->table[c], own->capacity, capacity);
    uint32_t n_old = own->capacity > 0 ? own->capacity / per + 1 : 0;
    if (good && kv->ids_capacity < capacity &&
        (good = grow_array(&kv->ids, kv->ids_capacity, capacity)))
        kv->ids_capacity = capacity;
    if (!good || !grow_array(&own->records, n_old, capacity / per + 1))
        return err(ERR_MEMORY, "no memory for a table of %u blocks", capacity);
    for (int c = 0; c < LANE_CLASSES; c++)
        s->table[c] = own->table[c];
    s->records = own->records;
    kv->counts.table_bytes += table_bytes(kv, capacity) - table_bytes(kv, own->capacity);
    own->capacity = capacity;
    return OK;
}

/* ---- open and close ---- */

static status check_fits(const struct kv *kv, const struct kv_open *o, uint32_t min_slots)
{
    uint32_t need = kv_blocks_for(kv, o->max_rows), hbm = kv->place[kv->main][KV_HBM].n;
    uint32_t dense = kv->place[LANE_DENSE][KV_HBM].n, dram = kv->place[LANE_SPARSE][KV_DRAM].n;
    if (kv->main == LANE_STREAM)
        hbm = kv->blocks.n;
    if (kv_uses(kv, LANE_DENSE) && need > dense)
        return err(ERR_FULL, "%u positions need %u blocks of DENSE lanes, the KV arena has %u",
                   o->max_rows, need, dense);
    if (need <= hbm)
        return OK;
    if (!o->layout.seals || dram == 0)
        return err(ERR_FULL, "%u positions need %u blocks, the KV arena has %u", o->max_rows, need,
                   hbm);
    uint32_t tail = kv_blocks_for(kv, SEGMENT_ROWS + TAIL_ROWS);
    if (min_slots > HOT_MAX_SLOTS)
        return err(ERR_FULL,
                   "%u positions need %u blocks, the KV arena has %u in HBM; and in DRAM they need "
                   "a hot set of %u blocks, of at most %u",
                   o->max_rows, need, hbm, min_slots, HOT_MAX_SLOTS);
    if (need > dram || min_slots + tail > hbm)
        return err(ERR_FULL,
                   "%u positions need %u blocks in DRAM, which has %u, and %u in HBM, which has %u",
                   o->max_rows, need, dram, min_slots + tail, hbm);
    return OK;
}

status kv_seq_open(struct kv *kv, struct kv_seq *s, const struct kv_open *o, uint32_t min_slots,
                   uint32_t *n_hit)
{
    *n_hit = 0;
    *s = (struct kv_seq){.salt = {o->salt[0], o->salt[1]}, .layout = o->layout};
    TRY(check_fits(kv, o, min_slots));
    s->own = mem_try_alloc(sizeof(*s->own));
    if (s->own == NULL)
        return err(ERR_MEMORY, "no memory for a sequence");
    s->max_blocks = kv_blocks_for(kv, o->max_rows);
    kv->counts.n_resident++;
    if (!kv->cfg.prefix_caching || o->max_hit == 0 || o->n == 0)
        return OK;
    status st = kv_open_hit(kv, s, o, min_slots, n_hit);
    if (st != OK) {
        kv_seq_close(kv, s);
        return st;
    }
    s->own->step_begin = s->own->step_end = *n_hit;
    kv->counts.queried_tokens += o->n;
    kv->counts.hit_tokens += *n_hit;
    return OK;
}

uint32_t *kv_residence_count(struct kv *kv, enum kv_residence r)
{
    return r == KV_RESIDENT  ? &kv->counts.n_resident
           : r == KV_SPILLED ? &kv->counts.n_spilled
                             : &kv->counts.n_paused;
}

void kv_seq_close(struct kv *kv, struct kv_seq *s)
{
    if (s->own == NULL)
        return;
    CHECK(kv->sealing != s);
    for (uint32_t i = 0; i < s->n_segments; i++)
        kv_record_release(kv, s->own->records[i]);
    for (uint32_t i = s->n_blocks; i-- > 0;) /* from the end: LRU by leaf */
        kv_block_release(kv, s->own->blocks[i], kv_seq_needs(kv, s, i, s->residence));
    kv->counts.table_bytes -= table_bytes(kv, s->own->capacity);
    kv_hot_close(kv, s);
    --*kv_residence_count(kv, s->residence);
    mem_free(s->own->blocks);
    for (int c = 0; c < LANE_CLASSES; c++)
        mem_free(s->own->table[c]);
    mem_free(s->own->records);
    mem_free(s->own);
    *s = (struct kv_seq){0};
}

/* ---- growing ---- */

/* Blocks that leave the ring when the next step begins at `row`, from ring_first on. */
static uint32_t ring_leaving(const struct kv *kv, const struct kv_seq *s, uint32_t row)
{
    uint32_t start = kv_ring_start(kv, row);
    start = start < s->n_blocks ? start : s->n_blocks;
    return start > s->own->ring_first ? start - s->own->ring_first : 0;
}

static void ring_move(struct kv *kv, struct kv_seq *s, uint32_t n)
{
    for (; n > 0; n--) {
        uint32_t i = s->own->ring_first;
        part_mask before = kv_seq_needs(kv, s, i, s->residence);
        s->own->ring_first++;
        part_mask after = kv_seq_needs(kv, s, i, s->residence);
        if (before != after) {
            kv_block_change(kv, s->own->blocks[i], before, after);
            kv_seq_entry(kv, s, i);
        }
    }
}

static status check_room(const struct kv *kv, const struct kv_seq *s, uint32_t more,
                         uint32_t leaving)
{
    if (more > kv_available(kv))
        return err(ERR_FULL, "%u blocks asked, %u free or evictable", more, kv_available(kv));
    if (!kv_uses(kv, LANE_STREAM))
        return OK;
    uint32_t stream = kv_places_available(kv, LANE_STREAM, KV_HBM);
    for (uint32_t i = s->own->ring_first; leaving > 0; leaving--, i++)
        stream += i >= kv->stream_sink_blocks &&
                  kv_block(kv, s->own->blocks[i])->need[LANE_STREAM][KV_HBM] == 1;
    if (more > stream)
        return err(ERR_FULL, "%u blocks of STREAM lanes asked, %u free or evictable", more, stream);
    return OK;
}

status kv_seq_grow(struct kv *kv, struct kv_seq *s, uint32_t n_rows)
{
    uint32_t want = kv_blocks_for(kv, n_rows);
    CHECK(want <= s->max_blocks && s->residence != KV_PAUSED && kv->sealing == NULL);
    /* Grown before for rows that were not run then: they may still come first. */
    uint32_t from = n_rows > s->own->step_end ? s->own->step_end : s->own->step_begin;
    uint32_t leaving = kv_uses(kv, LANE_STREAM) ? ring_leaving(kv, s, from) : 0;
    if (want > s->n_blocks) {
        TRY(check_room(kv, s, want - s->n_blocks, leaving));
        TRY(kv_seq_reserve(kv, s, want));
    }
    ring_move(kv, s, leaving);
    if (n_rows > s->own->step_end)
        s->own->step_begin = s->own->step_end;
    s->own->step_end = n_rows;
    while (s->n_blocks < want) {
        uint32_t i = s->n_blocks;
        uint32_t id = kv_block_take(kv, kv_seq_needs(kv, s, i, s->residence));
        kv_block(kv, id)->keeps_stream = kv_keeps_stream(kv, i);
        s->own->blocks[i] = id;
        s->n_blocks++;
        kv_seq_entry(kv, s, i);
    }
    return OK;
}

void kv_seq_settle(struct kv *kv, struct kv_seq *s, uint32_t n_rows)
{
    if (!kv_uses(kv, LANE_STREAM) || n_rows != s->own->step_end)
        return;
    ring_move(kv, s, ring_leaving(kv, s, n_rows));
    s->own->step_begin = n_rows;
}

/* ---- sharing ---- */

/* The record of a segment that was sealed before its last block became the index's. */
static void move_record(struct kv *kv, struct kv_seq *s, uint32_t i, uint32_t id)
{
    uint32_t segment = i / kv->segment_blocks, r;
    if (segment >= s->n_segments || (i + 1) % kv->segment_blocks != 0 ||
        (r = s->own->records[segment]) == BLOCK_NONE)
        return;
    uint32_t known = kv_record_find(kv, id, kv->records[r].digest_id);
    if (known != BLOCK_NONE) {
        kv_record_hold(kv, known);
        kv_record_release(kv, r);
        s->own->records[segment] = known;
        return;
    }
    struct block *own = kv_block(kv, s->own->blocks[i]), *b = kv_block(kv, id);
    CHECK(own->record == r && kv->records[r].next == BLOCK_NONE); /* it has one owner */
    own->record = BLOCK_NONE;
    kv->records[r].next = b->record;
    kv->records[r].block = id;
    b->record = r;
}

void kv_seq_adopt(struct kv *kv, struct kv_seq *s, uint32_t i, uint32_t id)
{
    uint32_t own = s->own->blocks[i];
    part_mask needs = kv_seq_needs(kv, s, i, s->residence);
    kv_block_pin(kv, id);
    kv_block_absorb(kv, id, own, needs);
    move_record(kv, s, i, id);
    kv_block_hold(kv, id, needs);
    kv_block_unpin(kv, id);
    if (kv_block(kv, own)->sealed)
        kv_block_sealed(kv, id);
    kv_block_release(kv, own, 0);
    s->own->blocks[i] = id;
    s->own->cover_stale = true;
    kv_seq_entry(kv, s, i);
}

static uint32_t parent_of(const struct kv *kv, const struct kv_seq *s, uint32_t i)
{
    return i == 0 ? BLOCK_NONE : kv_block(kv, s->own->blocks[i - 1])->node;
}

static void plain_share(struct kv *kv, struct kv_seq *s, uint32_t i, const uint32_t *tokens)
{
    struct prefix_root root = kv_root(kv, s);
    uint32_t node = prefix_make(&kv->prefix, &root, parent_of(kv, s, i), tokens);
    uint32_t known = kv->prefix.nodes[node].plain;
    if (known != BLOCK_NONE) {
        kv_seq_adopt(kv, s, i, known);
        return;
    }
    kv_index_attach_plain(kv, node, s->own->blocks[i]);
    kv_block_settle(kv, s->own->blocks[i]);
}

void kv_seq_share(struct kv *kv, struct kv_seq *s, const uint32_t *tokens, uint32_t n_rows)
{
    uint32_t rows = kv->cfg.geo.block_rows, full = n_rows / rows;
    CHECK(full <= s->n_blocks && s->residence != KV_PAUSED);
    while (kv->cfg.prefix_caching && s->n_shared < full) {
        uint32_t i = s->n_shared;
        if (!kv_permutes(s) || i >= kv_sealed_blocks(kv, s)) {
            plain_share(kv, s, i, tokens + (size_t)i * rows);
            s->n_shared++;
            continue;
        }
        CHECK(i % kv->segment_blocks == 0);
        if (i + kv->segment_blocks > full)
            break;
        kv_group_share(kv, s, i / kv->segment_blocks, tokens);
        s->n_shared += kv->segment_blocks;
    }
    if (s->hot != NULL && s->own->cover_stale)
        CHECK(kv_hot_cover(kv, s, s->n_segments) == OK); /* the leaves are there */
}
