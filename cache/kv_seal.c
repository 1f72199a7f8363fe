/* Sealing: segments become partitions, with a digest record (cache/kv.h, cache/kv_impl.h).
 *
 * A layout that keeps positions leaves the blocks where they are. A permuting one writes over them
 * where nobody else reads them, and then the index, which knew them as plain, knows them as a group;
 * else it writes into fresh blocks, and the plain ones stay for whoever reads them. Without room for
 * that, only a reader that needs them in HBM stands in the way: so a sequence that runs alone can
 * always go on. */
#include "cache/kv_impl.h"

/* ---- digest records ---- */

uint32_t kv_record_find(const struct kv *kv, uint32_t block, uint64_t digest_id)
{
    uint32_t r = kv_block(kv, block)->record;
    while (r != BLOCK_NONE && kv->records[r].digest_id != digest_id)
        r = kv->records[r].next;
    return r;
}

void kv_record_hold(struct kv *kv, uint32_t record)
{
    if (record != BLOCK_NONE)
        kv->records[record].refs++;
}

/* It stays with its block: whoever seals the same segment finds it. */
void kv_record_release(struct kv *kv, uint32_t record)
{
    if (record == BLOCK_NONE)
        return;
    CHECK(kv->records[record].refs > 0);
    kv->records[record].refs--;
}

void kv_record_give_back(struct kv *kv, uint32_t r)
{
    kv->n_maps_used -= kv->records[r].has_map;
    kv->records[r] = (struct record){.block = BLOCK_NONE, .next = kv->free_record};
    kv->free_record = r;
    kv->n_records_used--;
}

static void record_free(struct kv *kv, uint32_t r)
{
    struct block *b = kv_block(kv, kv->records[r].block);
    uint32_t *link = &b->record;
    CHECK(kv->records[r].refs == 0);
    while (*link != r) {
        CHECK(*link != BLOCK_NONE);
        link = &kv->records[*link].next;
    }
    *link = kv->records[r].next;
    kv_record_give_back(kv, r);
}

void kv_records_free(struct kv *kv, uint32_t block)
{
    while (kv_block(kv, block)->record != BLOCK_NONE)
        record_free(kv, kv_block(kv, block)->record);
}

/* A digest of rows in position order that nobody uses can be made again; one of a group cannot. */
static bool free_unused_record(struct kv *kv)
{
    for (uint32_t r = 0; r < kv->cfg.n_records; r++) {
        const struct record *rec = &kv->records[r];
        if (rec->block == BLOCK_NONE || rec->refs > 0 ||
            kv_block(kv, rec->block)->group != BLOCK_NONE)
            continue;
        record_free(kv, r);
        return true;
    }
    return false;
}

status kv_record_take(struct kv *kv, const struct kv_seq *s, uint32_t *out)
{
    while (kv->free_record == BLOCK_NONE && (free_unused_record(kv) || kv_drop_oldest(kv)))
        ;
    uint32_t r = kv->free_record;
    if (r == BLOCK_NONE)
        return err(ERR_FULL, "all %u digest records are in use", kv->cfg.n_records);
    kv->free_record = kv->records[r].next;
    kv->n_records_used++;
    kv->records[r] = (struct record){.digest_id = s->layout.digest_id,
                                     .has_map = kv_permutes(s),
                                     .block = BLOCK_NONE,
                                     .refs = 1};
    kv->n_maps_used += kv_permutes(s);
    *out = r;
    return OK;
}

void kv_record_attach(struct kv *kv, uint32_t r, uint32_t block)
{
    struct block *b = kv_block(kv, block);
    kv->records[r].block = block;
    kv->records[r].next = b->record;
    b->record = r;
}

/* ---- groups in the index ---- */

static uint32_t first_of(const struct kv *kv, uint32_t segment)
{
    return segment * kv->segment_blocks;
}

/* The last block of the group that has this segment's tokens; BLOCK_NONE: there is none. tokens may be
 * NULL where the segment's blocks are the index's already. */
static uint32_t group_find(const struct kv *kv, const struct kv_seq *s, uint32_t segment,
                           const uint32_t *tokens)
{
    struct prefix_root root = kv_root(kv, s);
    uint32_t first = first_of(kv, segment), end = first + kv->segment_blocks;
    uint32_t at = first == 0 ? BLOCK_NONE : kv_block(kv, s->own->blocks[first - 1])->node;
    for (uint32_t i = first; i < end; i++) {
        if (i < s->n_shared)
            at = kv_block(kv, s->own->blocks[i])->node;
        else
            at = prefix_find(&kv->prefix, &root, at, tokens + (size_t)i * kv->cfg.geo.block_rows);
        if (at == BLOCK_NONE)
            return BLOCK_NONE;
    }
    return kv->prefix.nodes[at].group;
}

/* The last node of a segment whose predecessors are the index's, made as far as it is not there. */
static uint32_t group_node(struct kv *kv, const struct kv_seq *s, uint32_t segment,
                           const uint32_t *tokens)
{
    struct prefix_root root = kv_root(kv, s);
    uint32_t first = first_of(kv, segment), end = first + kv->segment_blocks;
    uint32_t at = first == 0 ? BLOCK_NONE : kv_block(kv, s->own->blocks[first - 1])->node;
    for (uint32_t i = first; i < end; i++) {
        if (i < s->n_shared)
            at = kv_block(kv, s->own->blocks[i])->node;
        else
            at = prefix_make(&kv->prefix, &root, at, tokens + (size_t)i * kv->cfg.geo.block_rows);
    }
    return at;
}

/* blocks[] become the group that ends at the node. Those that the index knows as plain change their
 * form. */
static void group_attach(struct kv *kv, uint32_t node, const uint32_t *blocks)
{
    for (uint32_t i = 0; i < kv->segment_blocks; i++)
        if (kv_block(kv, blocks[i])->node != BLOCK_NONE)
            kv_index_detach(kv, blocks[i]);
    kv_index_attach_group(kv, node, blocks);
}

void kv_group_share(struct kv *kv, struct kv_seq *s, uint32_t segment, const uint32_t *tokens)
{
    uint32_t first = first_of(kv, segment), known[MAX_SEGMENT_BLOCKS];
    uint32_t last = group_find(kv, s, segment, tokens);
    if (last == BLOCK_NONE) {
        group_attach(kv, group_node(kv, s, segment, tokens), s->own->blocks + first);
        return;
    }
    /* Theirs is equal; ours goes, with its record. */
    uint32_t own = s->own->records[segment], theirs = kv_block(kv, last)->record;
    kv_group_blocks(kv, last, known);
    kv_record_hold(kv, theirs);
    kv_record_release(kv, own);
    s->own->records[segment] = theirs;
    for (uint32_t i = 0; i < kv->segment_blocks; i++)
        kv_seq_adopt(kv, s, first + i, known[i]);
}

/* ---- begin ---- */

/* The segment may be in the index as a group: what precedes it is there, and its tokens are known. */
static bool may_share(const struct kv *kv, const struct kv_seq *s, const uint32_t *tokens)
{
    uint32_t first = first_of(kv, s->n_segments);
    return kv->cfg.prefix_caching && s->n_shared >= first &&
           (s->n_shared >= first + kv->segment_blocks || tokens != NULL);
}

static bool nobody_else_reads(const struct kv *kv, const struct kv_seq *s, bool shares)
{
    uint32_t first = first_of(kv, s->n_segments);
    for (uint32_t i = first; i < first + kv->segment_blocks; i++) {
        const struct block *b = kv_block(kv, s->own->blocks[i]);
        if (b->refs > 1 || b->pins > 0 || (b->node != BLOCK_NONE && !shares))
            return false;
    }
    return true;
}

/* Rows that only we read in HBM can be written over: who else names them has them in DRAM, and what
 * only the index names may be forgotten. */
static bool may_write_over(const struct kv *kv, const struct kv_seq *s)
{
    uint32_t first = first_of(kv, s->n_segments);
    for (uint32_t i = first; i < first + kv->segment_blocks; i++)
        if (kv_block(kv, s->own->blocks[i])->refs > 1 && !kv_block_can_split(kv, s->own->blocks[i]))
            return false;
    return true;
}

static void make_ours(struct kv *kv, struct kv_seq *s, bool shares)
{
    uint32_t first = first_of(kv, s->n_segments);
    for (uint32_t i = first + kv->segment_blocks; i-- > first;) {
        uint32_t *id = &s->own->blocks[i];
        if (kv_block(kv, *id)->refs > 1)
            *id = kv_block_split(kv, *id, kv_seq_needs(kv, s, i, s->residence));
        else if (kv_block(kv, *id)->node != BLOCK_NONE && !shares)
            kv_index_withdraw(kv, *id);
    }
}

static bool fits(const struct kv *kv, const struct kv_seq *s)
{
    /* The copy of a block that was in the ring needs a place there too. */
    uint32_t n[LANE_CLASSES] = {0}, first = first_of(kv, s->n_segments);
    for (uint32_t i = first; i < first + kv->segment_blocks; i++)
        for (int c = 0; c < LANE_CLASSES; c++)
            n[c] += (kv_seq_needs(kv, s, i, s->residence) & PART(c, KV_HBM)) != 0;
    for (int c = 0; c < LANE_CLASSES; c++)
        if (n[c] > kv_places_available(kv, (enum lane_class)c, KV_HBM))
            return false;
    return true;
}

/* The sealed segment of a SPILLED sequence goes to DRAM. rewritten: what is there is out of date. */
static bool dram_fits(const struct kv *kv, const struct kv_seq *s, const uint32_t *blocks,
                      bool rewritten)
{
    uint32_t missing = 0, twins = 0;
    for (uint32_t i = 0; i < kv->segment_blocks && s->residence == KV_SPILLED; i++) {
        const struct block *b = kv_block(kv, blocks[i]);
        missing += rewritten || b->at[LANE_SPARSE][KV_DRAM] == BLOCK_NONE;
        twins += !rewritten && kv_part_is_spare(b, LANE_SPARSE, KV_DRAM);
    }
    return missing + twins <= kv_places_available(kv, LANE_SPARSE, KV_DRAM);
}

static status no_dram(const struct kv *kv)
{
    return err(ERR_FULL, "a sealed segment needs %u blocks of DRAM, %u are free or evictable",
               kv->segment_blocks, kv_places_available(kv, LANE_SPARSE, KV_DRAM));
}

static void take_fresh(struct kv *kv, struct kv_seq *s)
{
    uint32_t first = first_of(kv, s->n_segments);
    for (uint32_t i = 0; i < kv->segment_blocks; i++) {
        uint32_t old = s->own->blocks[first + i];
        part_mask needs = kv_seq_needs(kv, s, first + i, s->residence);
        uint32_t id = kv_block_take(kv, needs);
        kv_block(kv, id)->keeps_stream = kv_keeps_stream(kv, first + i);
        for (int c = 0; c < LANE_CLASSES; c++)
            if (c != LANE_SPARSE && (needs & PART(c, KV_HBM)))
                kv_part_copy(kv, (enum lane_class)c, old, id);
        kv->seal_fresh[i] = id;
    }
}

/* By how many places of a class taking the group's blocks for ours would be short. */
static bool group_fits(const struct kv *kv, const struct kv_seq *s, const uint32_t *known)
{
    uint32_t first = first_of(kv, s->n_segments), n[LANE_CLASSES] = {0}, ours[LANE_CLASSES] = {0};
    for (uint32_t i = 0; i < kv->segment_blocks; i++) {
        part_mask needs = kv_seq_needs(kv, s, first + i, s->residence);
        const struct block *own = kv_block(kv, s->own->blocks[first + i]);
        for (int c = 0; c < LANE_CLASSES; c++)
            if (needs & PART(c, KV_HBM)) {
                n[c] += kv_block(kv, known[i])->at[c][KV_HBM] == BLOCK_NONE;
                /* Free when we let go: kept by the index at most, or by who has it in DRAM. */
                ours[c] += c != LANE_STREAM && own->need[c][KV_HBM] == 1 &&
                           (own->refs == 1 || own->at[c][KV_DRAM] != BLOCK_NONE);
            }
    }
    for (int c = 0; c < LANE_CLASSES; c++)
        if (n[c] > kv_places_available(kv, (enum lane_class)c, KV_HBM) + ours[c])
            return false;
    return true;
}

/* The group's STREAM parts may be gone; ours say the same. */
static void lend_stream(struct kv *kv, const struct kv_seq *s, const uint32_t *known)
{
    uint32_t first = first_of(kv, s->n_segments);
    for (uint32_t i = 0; i < kv->segment_blocks; i++) {
        const struct block *b = kv_block(kv, known[i]);
        bool needed = kv_seq_needs(kv, s, first + i, s->residence) & PART(LANE_STREAM, KV_HBM);
        if (!needed || b->at[LANE_STREAM][KV_HBM] != BLOCK_NONE)
            continue;
        bool has_content = b->at[LANE_STREAM][KV_DRAM] != BLOCK_NONE;
        kv_part_make(kv, known[i], LANE_STREAM, KV_HBM);
        if (!has_content)
            kv_part_copy(kv, LANE_STREAM, s->own->blocks[first + i], known[i]);
    }
}

/* The group of the index instead of our blocks; what is in DRAM only comes up into our places, if it
 * must. */
static status take_group(struct kv *kv, struct kv_seq *s, uint32_t last)
{
    uint32_t known[MAX_SEGMENT_BLOCKS], first = first_of(kv, s->n_segments);
    uint32_t per = kv->segment_blocks;
    kv_group_blocks(kv, last, known);
    for (uint32_t i = per; i-- > 0;)
        kv_block_pin(kv, known[i]);
    bool can = group_fits(kv, s, known) && dram_fits(kv, s, known, false);
    if (can) {
        lend_stream(kv, s, known);
        for (uint32_t i = per; i-- > 0;)
            kv_block_release(kv, s->own->blocks[first + i],
                             kv_seq_needs(kv, s, first + i, s->residence));
    }
    for (uint32_t i = 0; i < per && can; i++) {
        part_mask needs = kv_seq_needs(kv, s, first + i, s->residence);
        for (int c = 0; c < LANE_CLASSES; c++)
            if ((needs & PART(c, KV_HBM)) && kv_block(kv, known[i])->at[c][KV_HBM] == BLOCK_NONE)
                kv_part_make(kv, known[i], (enum lane_class)c, KV_HBM);
        kv_block_hold(kv, known[i], needs);
        s->own->blocks[first + i] = known[i];
        kv_seq_entry(kv, s, first + i);
    }
    for (uint32_t i = per; i-- > 0;)
        kv_block_unpin(kv, known[i]);
    return can ? OK : err(ERR_FULL, "no room for a segment that was sealed before");
}

static void name_blocks(struct kv *kv, const struct kv_seq *s, struct kv_seal *out)
{
    uint32_t first = first_of(kv, s->n_segments);
    for (uint32_t i = 0; i < kv->segment_blocks; i++) {
        uint32_t old = s->own->blocks[first + i];
        uint32_t id = kv->seal_in_place ? old : kv->seal_fresh[i];
        kv->seal_from[i] = kv_block(kv, old)->at[LANE_SPARSE][KV_HBM];
        kv->seal_to[i] = kv_block(kv, id)->at[LANE_SPARSE][KV_HBM];
    }
    out->from = kv->seal_from;
    out->to = kv->seal_to;
}

/* Rows stay where they are: only the record is asked for. */
static status begin_in_order(struct kv *kv, struct kv_seq *s, struct kv_seal *out)
{
    uint32_t last = s->own->blocks[first_of(kv, s->n_segments) + kv->segment_blocks - 1];
    kv->seal_in_place = true;
    out->record = BLOCK_NONE;
    if (!dram_fits(kv, s, s->own->blocks + first_of(kv, s->n_segments), false))
        return no_dram(kv);
    if (s->layout.digest_id == 0) {
        out->found = true; /* nothing to keep */
        return OK;
    }
    out->record = kv_record_find(kv, last, s->layout.digest_id);
    out->found = out->record != BLOCK_NONE;
    if (out->found) {
        kv_record_hold(kv, out->record);
        return OK;
    }
    TRY(kv_record_take(kv, s, &out->record));
    kv_record_attach(kv, out->record, last);
    return OK;
}

static status begin_permuted(struct kv *kv, struct kv_seq *s, const uint32_t *tokens,
                             struct kv_seal *out)
{
    bool shares = may_share(kv, s, tokens);
    uint32_t first = first_of(kv, s->n_segments), per = kv->segment_blocks;
    uint32_t last = shares ? group_find(kv, s, s->n_segments, tokens) : BLOCK_NONE;
    kv->seal_in_place = true;
    if (last != BLOCK_NONE) {
        TRY(take_group(kv, s, last));
        out->found = true;
        out->record = kv_block(kv, last)->record;
        kv_record_hold(kv, out->record);
        return OK;
    }
    if (!dram_fits(kv, s, s->own->blocks + first, true))
        return no_dram(kv);
    TRY(kv_record_take(kv, s, &out->record));
    bool alone = nobody_else_reads(kv, s, shares), room = alone || fits(kv, s);
    if (!room && !may_write_over(kv, s)) {
        kv_record_give_back(kv, out->record);
        return err(ERR_FULL, "no %u blocks to permute a segment that others read", per);
    }
    kv->seal_in_place = alone || !room;
    if (!kv->seal_in_place)
        take_fresh(kv, s);
    /* Between taking, which may drop nodes, and ours, which takes them from our blocks. */
    uint32_t node = shares ? group_node(kv, s, s->n_segments, tokens) : BLOCK_NONE;
    if (!room)
        make_ours(kv, s, shares);
    for (uint32_t i = first; i < first + per && kv->seal_in_place && kv_uses(kv, LANE_SPARSE); i++)
        kv_twin_forget(kv, s->own->blocks[i]);
    uint32_t *to = kv->seal_in_place ? s->own->blocks + first : kv->seal_fresh;
    kv_record_attach(kv, out->record, to[per - 1]);
    if (shares)
        group_attach(kv, node, to);
    return OK;
}

status kv_seq_seal_begin(struct kv *kv, struct kv_seq *s, const uint32_t *tokens,
                         struct kv_seal *out)
{
    CHECK(s->layout.seals && kv->sealing == NULL && s->residence != KV_PAUSED);
    CHECK(first_of(kv, s->n_segments + 1) <= s->n_blocks);
    *out = (struct kv_seal){.segment = s->n_segments};
    if (s->hot != NULL) /* leaves are asked for while nothing has changed */
        TRY(kv_hot_cover(kv, s, s->n_segments + 1));
    if (kv_permutes(s))
        TRY(begin_permuted(kv, s, tokens, out));
    else
        TRY(begin_in_order(kv, s, out));
    kv->sealing = s;
    name_blocks(kv, s, out);
    return OK;
}

/* ---- end ---- */

/* The table names the new blocks; the old ones go to whoever else reads them, or to the index. */
static void replace_blocks(struct kv *kv, struct kv_seq *s)
{
    uint32_t first = first_of(kv, s->n_segments);
    for (uint32_t i = kv->segment_blocks; i-- > 0;) {
        uint32_t old = s->own->blocks[first + i];
        s->own->blocks[first + i] = kv->seal_fresh[i];
        kv_block_release(kv, old, kv_seq_needs(kv, s, first + i, s->residence));
        kv_seq_entry(kv, s, first + i);
    }
}

/* SPILLED: the segment is needed in DRAM now. */
static void move_to_dram(struct kv *kv, struct kv_seq *s, uint32_t first, uint32_t end)
{
    const part_mask from = PART(LANE_SPARSE, KV_HBM), to = PART(LANE_SPARSE, KV_DRAM);
    for (uint32_t i = first; i < end; i++)
        kv_block_pin(kv, s->own->blocks[i]);
    for (uint32_t i = first; i < end; i++) {
        uint32_t id = s->own->blocks[i];
        if (kv_block(kv, id)->at[LANE_SPARSE][KV_DRAM] == BLOCK_NONE)
            kv_part_make(kv, id, LANE_SPARSE, KV_DRAM);
        kv_block_change(kv, id, from, to);
        kv_block_unpin(kv, id);
        kv_seq_entry(kv, s, i);
    }
    CHECK(kv_hot_cover(kv, s, s->n_segments) == OK); /* begin has seen to it */
}

void kv_seq_seal_end(struct kv *kv, struct kv_seq *s, struct kv_seal *seal)
{
    uint32_t first = first_of(kv, s->n_segments), end = first + kv->segment_blocks;
    CHECK(kv->sealing == s && seal->segment == s->n_segments);
    if (kv_permutes(s)) {
        if (!kv->seal_in_place)
            replace_blocks(kv, s);
        if (kv_block(kv, s->own->blocks[end - 1])->node == BLOCK_NONE)
            s->n_shared = s->n_shared < first ? s->n_shared : first;
        else
            s->n_shared = s->n_shared > end ? s->n_shared : end;
    }
    for (uint32_t i = first; i < end; i++)
        kv_block_sealed(kv, s->own->blocks[i]);
    s->own->records[s->n_segments++] = seal->record;
    if (s->residence == KV_SPILLED)
        move_to_dram(kv, s, first, end);
    kv->sealing = NULL;
    seal->from = seal->to = NULL;
}
