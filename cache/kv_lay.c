/* What a prompt that is computed layer by layer asks of the substrate (cache/kv.h): a sequence that has its places
 * before it has its rows, and HBM for a while. */
#include "cache/kv_impl.h"

#include <stdlib.h>

/* ---- a sequence ahead of its rows ---- */

static status check_room(const struct kv *kv, uint32_t blocks, uint32_t sealed, uint32_t n_slots)
{
    uint32_t up = kv_places_available(kv, LANE_SPARSE, KV_HBM);
    uint32_t down = kv_places_available(kv, LANE_SPARSE, KV_DRAM);
    if (blocks - sealed + n_slots > up || sealed > down)
        return err(ERR_FULL, "%u blocks of HBM and %u of DRAM asked, %u and %u free or evictable",
                   blocks - sealed + n_slots, sealed, up, down);
    if (kv_uses(kv, LANE_DENSE) && blocks > kv_places_available(kv, LANE_DENSE, KV_HBM))
        return err(ERR_FULL, "%u blocks of DENSE lanes asked, %u free or evictable", blocks,
                   kv_places_available(kv, LANE_DENSE, KV_HBM));
    return OK;
}

static void add_blocks(struct kv *kv, struct kv_seq *s, uint32_t n_blocks)
{
    while (s->n_blocks < n_blocks) {
        uint32_t i = s->n_blocks++;
        uint32_t id = kv_block_take(kv, kv_seq_needs(kv, s, i, s->residence));
        s->own->blocks[i] = id;
        kv_seq_entry(kv, s, i);
        if (i < kv_sealed_blocks(kv, s))
            kv_block_sealed(kv, id);
    }
}

/* Whole, or not at all. */
static status add_segment(struct kv *kv, struct kv_seq *s)
{
    uint32_t record = BLOCK_NONE, end = (s->n_segments + 1) * kv->segment_blocks;
    bool has_record = kv_permutes(s) || s->layout.digest_id != 0;
    if (has_record)
        TRY(kv_record_take(kv, s, &record));
    s->own->records[s->n_segments++] = record;
    add_blocks(kv, s, end);
    if (has_record)
        kv_record_attach(kv, record, s->own->blocks[end - 1]);
    return OK;
}

status kv_seq_lay(struct kv *kv, struct kv_seq *s, uint32_t n_rows, uint32_t n_slots)
{
    uint32_t n_segments = kv_segments_due(n_rows), sealed = n_segments * kv->segment_blocks;
    uint32_t n_blocks = kv_blocks_for(kv, n_rows);
    CHECK(s->residence == KV_RESIDENT && s->n_blocks == 0 && n_blocks <= s->max_blocks);
    CHECK(s->layout.seals && !kv_uses(kv, LANE_STREAM));
    TRY(check_room(kv, n_blocks, sealed, n_slots));
    TRY(kv_seq_reserve(kv, s, n_blocks));
    TRY(kv_seq_spill(kv, s, n_slots));
    kv->counts.spills--; /* nobody moved */
    while (s->n_segments < n_segments)
        TRY(add_segment(kv, s));
    add_blocks(kv, s, n_blocks);
    s->own->step_begin = s->own->step_end = n_rows;
    return kv_hot_cover(kv, s, n_segments);
}

void kv_seq_laid(struct kv *kv, const struct kv_seq *s)
{
    kv->counts.moved_down += kv_sealed_blocks(kv, s);
}

/* ---- loans ---- */

static int by_number(const void *a, const void *b)
{
    block_id x = *(const block_id *)a, y = *(const block_id *)b;
    return x < y ? -1 : x > y;
}

status kv_loan_take(struct kv *kv, uint32_t n_places, uint32_t n_records, struct kv_loan *out)
{
    struct kv_loan *l = &kv->loan;
    const struct kv_seq nobody = {0};
    uint32_t there = kv_places_available(kv, LANE_SPARSE, KV_HBM);
    CHECK(l->places == NULL && n_records <= ARRAY_LEN(l->records));
    if (n_places > there)
        return err(ERR_FULL, "%u blocks of HBM asked for a while, %u free or evictable", n_places,
                   there);
    l->places = mem_try_alloc(((size_t)n_places + 1) * sizeof *l->places);
    if (l->places == NULL)
        return err(ERR_MEMORY, "no memory for a loan of %u blocks", n_places);
    for (; l->n_records < n_records; l->n_records++) {
        status st = kv_record_take(kv, &nobody, &l->records[l->n_records]);
        if (st != OK) {
            kv_loan_end(kv);
            return st;
        }
        kv->records[l->records[l->n_records]].refs = 0; /* no sequence has it */
    }
    for (; l->n_places < n_places; l->n_places++)
        l->places[l->n_places] = kv_place_take(kv, LANE_SPARSE, KV_HBM);
    qsort(l->places, n_places, sizeof *l->places, by_number);
    *out = *l;
    return OK;
}

void kv_loan_end(struct kv *kv)
{
    struct kv_loan *l = &kv->loan;
    for (uint32_t i = l->n_places; i-- > 0;)
        places_give(&kv->place[LANE_SPARSE][KV_HBM], l->places[i]);
    for (uint32_t i = l->n_records; i-- > 0;)
        kv_record_give_back(kv, l->records[i]);
    mem_free(l->places);
    *l = (struct kv_loan){0};
}
