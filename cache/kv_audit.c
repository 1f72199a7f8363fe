/* Walks everything and CHECKs the rules of cache/kv_impl.h. */
#include "cache/kv_impl.h"

#include <string.h>

/* What the walk counts by itself, to be compared with what the records say. */
struct tally {
    uint32_t *refs;                        /* [blocks] */
    uint32_t (*need)[LANE_CLASSES][TIERS]; /* [blocks] */
    uint32_t *record_refs;                 /* [records] */
    uint8_t *taken[LANE_CLASSES][TIERS];   /* [places] */
};

static void name_place(const struct kv *kv, struct tally *t, int c, int tier, block_id at)
{
    CHECK(at < kv->place[c][tier].n_ready);
    CHECK(t->taken[c][tier][at]++ == 0);
}

/* Rule 2. */
static void audit_block(const struct kv *kv, struct tally *t, uint32_t id)
{
    const struct block *b = kv_block(kv, id);
    if (b->state == BLOCK_FREE)
        return;
    CHECK(b->pins == 0 && (b->state == BLOCK_ACTIVE) == (b->refs > 0));
    for (int c = 0; c < LANE_CLASSES; c++) {
        bool somewhere = false;
        for (int tier = 0; tier < TIERS; tier++) {
            bool there = b->at[c][tier] != BLOCK_NONE;
            CHECK(there || b->need[c][tier] == 0);
            somewhere |= there;
            if (there)
                name_place(kv, t, c, tier, b->at[c][tier]);
            bool behind = b->on >> LINK_BEHIND & 1;
            bool up_only = b->at[LANE_SPARSE][KV_HBM] != BLOCK_NONE &&
                           b->at[LANE_SPARSE][KV_DRAM] == BLOCK_NONE;
            CHECK(behind == (up_only && (b->sealed || b->state == BLOCK_CACHED_HBM)));
            if (!there || b->need[c][tier] > 0)
                continue;
            /* Nobody needs it: so it is on a list from which it may be taken. */
            CHECK(kv_part_is_spare(b, (enum lane_class)c, (enum kv_tier)tier));
        }
        CHECK(somewhere || c == LANE_STREAM || !kv_uses(kv, (enum lane_class)c));
    }
    if (b->state == BLOCK_CACHED_DRAM)
        for (int c = 0; c < LANE_CLASSES; c++)
            CHECK(b->at[c][KV_HBM] == BLOCK_NONE);
}

static void audit_group(const struct kv *kv, const struct block *last, uint32_t *n_groups)
{
    uint32_t node = last->node, id = last->group, before = id;
    CHECK(last->record != BLOCK_NONE);
    for (uint32_t i = 0; i < kv->segment_blocks; i++) {
        const struct block *b = kv_block(kv, before);
        CHECK(b->group == id && b->node == node && b->form == FORM_GROUP);
        CHECK(b->refs == last->refs); /* held whole */
        n_groups[node]++;
        node = kv->prefix.nodes[node].parent;
        before = b->before;
    }
    CHECK(before == BLOCK_NONE);
    CHECK(last->held == (last->refs > 0 ? kv->segment_blocks : 0));
}

/* Nodes and blocks name each other. */
static void audit_index(const struct kv *kv)
{
    uint32_t n_grouped = 0, n_passed = 0;
    uint32_t *n_groups = mem_alloc(kv->prefix.n_nodes * sizeof(*n_groups));
    prefix_audit(&kv->prefix);
    CHECK(kv->doomed == BLOCK_NONE);
    for (uint32_t id = 0; id < kv->blocks.n; id++) {
        const struct block *b = kv_block(kv, id);
        CHECK((b->form == FORM_GROUP) == (b->group != BLOCK_NONE));
        if (b->node == BLOCK_NONE)
            continue;
        n_grouped += b->form == FORM_GROUP;
        if (b->form == FORM_PLAIN)
            CHECK(kv->prefix.nodes[b->node].plain == id);
        if (b->group == id) {
            CHECK(kv->prefix.nodes[b->node].group == id);
            audit_group(kv, b, n_groups);
        }
    }
    for (uint32_t i = 0; i < kv->prefix.n_nodes; i++) {
        const struct prefix_node *nd = &kv->prefix.nodes[i];
        if (!nd->used)
            continue;
        CHECK(nd->n_groups == n_groups[i]);
        CHECK(nd->plain == BLOCK_NONE || kv_block(kv, nd->plain)->node == i);
        CHECK(nd->group == BLOCK_NONE || kv_block(kv, nd->group)->node == i);
        n_passed += nd->n_groups;
    }
    CHECK(n_grouped == n_passed);
    mem_free(n_groups);
}

static void audit_records(const struct kv *kv, const struct tally *t)
{
    uint32_t n_used = 0, n_listed = 0, n_free = 0;
    for (uint32_t r = 0; r < kv->cfg.n_records; r++) {
        n_used += kv->records[r].block != BLOCK_NONE;
        CHECK(kv->records[r].refs == t->record_refs[r]);
    }
    for (uint32_t id = 0; id < kv->blocks.n; id++)
        for (uint32_t r = kv_block(kv, id)->record; r != BLOCK_NONE; r = kv->records[r].next) {
            CHECK(kv->records[r].block == id);
            CHECK(n_listed++ < kv->cfg.n_records);
        }
    for (uint32_t r = kv->free_record; r != BLOCK_NONE; r = kv->records[r].next)
        CHECK(n_free++ < kv->cfg.n_records);
    CHECK(n_used == n_listed && n_used + kv->loan.n_records == kv->n_records_used);
    CHECK(kv->n_records_used + n_free == kv->cfg.n_records);
}

/* The tables say what the records say. */
static void audit_entry(const struct kv *kv, const struct kv_seq *s, uint32_t i)
{
    const struct block *b = kv_block(kv, s->own->blocks[i]);
    part_mask m = kv_seq_needs(kv, s, i, s->residence);
    for (int c = 0; c < LANE_CLASSES; c++) {
        const block_id *table = s->table[c];
        CHECK((table != NULL) == kv_uses(kv, (enum lane_class)c));
        if (m & PART(c, KV_HBM))
            CHECK(table != NULL && table[i] == b->at[c][KV_HBM]);
        if (m & PART(c, KV_DRAM))
            CHECK(table != NULL && table[i] == (b->at[c][KV_DRAM] | BLOCK_IN_DRAM));
    }
}

static void audit_hot(const struct kv *kv, const struct kv_seq *s, struct tally *t)
{
    CHECK((s->hot != NULL) == (s->residence == KV_SPILLED));
    if (s->hot == NULL) {
        CHECK(s->n_slots == 0);
        return;
    }
    CHECK(s->hot->n_slots == s->n_slots);
    struct hot_set *seen = kv->be->ops->memory == NULL ? s->hot : hot_set_snapshot(s->hot);
    for (uint32_t i = 0; i < s->n_slots; i++) {
        CHECK(seen->slot_blocks[i] == s->own->slots[i]);
        name_place(kv, t, LANE_SPARSE, KV_HBM, s->own->slots[i]);
    }
    for (uint32_t i = 0; i < kv_sealed_blocks(kv, s); i++)
        CHECK(seen->dram_blocks[i] == kv_block(kv, s->own->blocks[i])->at[LANE_SPARSE][KV_DRAM]);
    if (seen != s->hot)
        mem_free(seen);
    hot_set_audit(s->hot);
}

/* Rules 3 and 4. */
static void audit_seq(const struct kv *kv, const struct kv_seq *s, struct tally *t)
{
    uint32_t parent = BLOCK_NONE, sealed = kv_sealed_blocks(kv, s);
    CHECK(s->n_shared <= s->n_blocks && s->n_blocks <= s->max_blocks && sealed <= s->n_blocks);
    CHECK(s->n_blocks <= s->own->capacity);
    for (uint32_t i = 0; i < s->n_blocks; i++) {
        uint32_t id = s->own->blocks[i];
        const struct block *b = kv_block(kv, id);
        part_mask m = kv_seq_needs(kv, s, i, s->residence);
        t->refs[id]++;
        for (int c = 0; c < LANE_CLASSES; c++)
            for (int tier = 0; tier < TIERS; tier++)
                t->need[id][c][tier] += (m & PART(c, tier)) != 0;
        CHECK(b->state == BLOCK_ACTIVE);
        audit_entry(kv, s, i);
        if (i >= s->n_shared) {
            CHECK(b->node == BLOCK_NONE && b->refs == 1); /* what is being written has one owner */
            continue;
        }
        CHECK(b->node != BLOCK_NONE);
        const struct prefix_node *nd = &kv->prefix.nodes[b->node];
        CHECK(nd->parent == parent && nd->root.layout == kv_root(kv, s).layout);
        CHECK(memcmp(nd->root.salt, s->salt, sizeof(s->salt)) == 0);
        CHECK((b->form == FORM_GROUP) == (kv_permutes(s) && i < sealed));
        parent = b->node;
    }
    for (uint32_t g = 0; g < s->n_segments; g++) {
        uint32_t r = s->records[g];
        if (r == BLOCK_NONE) {
            CHECK(s->layout.digest_id == 0);
            continue;
        }
        CHECK(kv->records[r].block == s->own->blocks[(g + 1) * kv->segment_blocks - 1]);
        CHECK(kv->records[r].digest_id == s->layout.digest_id);
        t->record_refs[r]++;
    }
}

/* Rule 1: what is not named is free. */
static void audit_places(const struct kv *kv, struct tally *t)
{
    for (uint32_t i = 0; i < kv->loan.n_places; i++)
        name_place(kv, t, LANE_SPARSE, KV_HBM, kv->loan.places[i]);
    for (int c = 0; c < LANE_CLASSES; c++)
        for (int tier = 0; tier < TIERS; tier++) {
            const struct places *p = &kv->place[c][tier];
            for (uint32_t i = 0; i < p->n_free; i++)
                name_place(kv, t, c, tier, p->free[i]);
            for (uint32_t i = 0; i < p->n_ready; i++)
                CHECK(t->taken[c][tier][i] == 1);
        }
}

static void tally_init(const struct kv *kv, struct tally *t)
{
    t->refs = mem_alloc(kv->blocks.n * sizeof(*t->refs));
    t->need = mem_alloc(kv->blocks.n * sizeof(*t->need));
    t->record_refs = mem_alloc((kv->cfg.n_records + 1) * sizeof(*t->record_refs));
    for (int c = 0; c < LANE_CLASSES; c++)
        for (int tier = 0; tier < TIERS; tier++)
            t->taken[c][tier] = mem_alloc(kv->place[c][tier].n + 1);
}

static void tally_fini(struct tally *t)
{
    mem_free(t->refs);
    mem_free(t->need);
    mem_free(t->record_refs);
    for (int c = 0; c < LANE_CLASSES; c++)
        for (int tier = 0; tier < TIERS; tier++)
            mem_free(t->taken[c][tier]);
}

void kv_audit(const struct kv *kv, struct kv_seq *const *seqs, uint32_t n_seqs)
{
    struct tally t;
    uint64_t bytes = 0;
    uint32_t n_in[3] = {0};
    CHECK(kv->sealing == NULL);
    tally_init(kv, &t);
    blocks_audit(&kv->blocks);
    audit_index(kv);
    for (uint32_t i = 0; i < n_seqs; i++) {
        audit_seq(kv, seqs[i], &t);
        audit_hot(kv, seqs[i], &t);
        bytes += kv_table_bytes(kv, seqs[i]);
        n_in[seqs[i]->residence]++;
    }
    for (uint32_t id = 0; id < kv->blocks.n; id++) {
        CHECK(kv_block(kv, id)->refs == t.refs[id]);
        CHECK(memcmp(kv_block(kv, id)->need, t.need[id], sizeof(t.need[id])) == 0);
        audit_block(kv, &t, id);
    }
    audit_records(kv, &t);
    audit_places(kv, &t);
    CHECK(bytes == kv->counts.table_bytes);
    CHECK(n_in[KV_RESIDENT] == kv->counts.n_resident && n_in[KV_SPILLED] == kv->counts.n_spilled &&
          n_in[KV_PAUSED] == kv->counts.n_paused);
    tally_fini(&t);
}
