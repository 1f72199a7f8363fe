/* What holds a block where, what may be taken from it, and what is copied (cache/kv_impl.h).
 *
 * kv_block_settle is the one place that decides: after every change of who needs a block where, it
 * gives back the places that nobody needs and stands the block on the lists from which it may be
 * taken. Room in HBM comes from the oldest cached block, which goes to DRAM, or is dropped where
 * DRAM is full of what is needed; room in DRAM comes from twins first, which costs nothing, then from
 * the oldest cached block there. */
#include "cache/kv_impl.h"

#include <string.h>

static const enum lane_class whole[] = {LANE_SPARSE, LANE_DENSE}; /* parts that every block has */

/* ---- the index side of a block ---- */

void kv_index_attach_plain(struct kv *kv, uint32_t node, uint32_t id)
{
    struct block *b = kv_block(kv, id);
    CHECK(b->node == BLOCK_NONE && kv->prefix.nodes[node].plain == BLOCK_NONE);
    kv->prefix.nodes[node].plain = id;
    b->node = node;
    b->form = FORM_PLAIN;
}

/* blocks[segment_blocks] end at node `last`. */
void kv_index_attach_group(struct kv *kv, uint32_t last, const uint32_t *blocks)
{
    uint32_t node = last, n = kv->segment_blocks;
    CHECK(kv->prefix.nodes[last].group == BLOCK_NONE);
    kv->prefix.nodes[last].group = blocks[n - 1];
    for (uint32_t i = n; i-- > 0; node = kv->prefix.nodes[node].parent) {
        struct block *b = kv_block(kv, blocks[i]);
        CHECK(b->node == BLOCK_NONE);
        b->node = node;
        b->form = FORM_GROUP;
        b->group = blocks[n - 1];
        b->before = i > 0 ? blocks[i - 1] : BLOCK_NONE;
        kv->prefix.nodes[node].n_groups++;
        kv_block(kv, blocks[n - 1])->held += b->refs > 0 || b->pins > 0;
    }
}

void kv_index_detach(struct kv *kv, uint32_t id)
{
    struct block *b = kv_block(kv, id);
    struct prefix_node *nd = &kv->prefix.nodes[b->node];
    if (b->form == FORM_PLAIN) {
        CHECK(nd->plain == id);
        nd->plain = BLOCK_NONE;
    } else {
        CHECK(nd->n_groups > 0);
        nd->n_groups--;
        if (b->group == id)
            nd->group = BLOCK_NONE;
    }
    b->node = b->group = b->before = BLOCK_NONE;
    b->form = FORM_PLAIN;
}

void kv_group_blocks(const struct kv *kv, uint32_t last, uint32_t *out)
{
    uint32_t id = last;
    for (uint32_t i = kv->segment_blocks; i-- > 0; id = kv_block(kv, id)->before)
        out[i] = id;
    CHECK(id == BLOCK_NONE);
}

static void detach_and_free(struct kv *kv, uint32_t id)
{
    uint32_t node = kv_block(kv, id)->node;
    struct prefix_node *nd = &kv->prefix.nodes[node];
    CHECK(kv_block(kv, id)->refs == 0 && kv_block(kv, id)->pins == 0);
    kv_index_detach(kv, id);
    kv_block_settle(kv, id);
    if (nd->plain == BLOCK_NONE && nd->n_groups == 0) {
        nd->next_doomed = kv->doomed;
        kv->doomed = node;
    }
}

/* A group goes whole. */
static void content_free(struct kv *kv, uint32_t id)
{
    uint32_t n = kv->segment_blocks, members[MAX_SEGMENT_BLOCKS];
    if (kv_block(kv, id)->form == FORM_PLAIN) {
        detach_and_free(kv, id);
        return;
    }
    kv_group_blocks(kv, kv_block(kv, id)->group, members);
    while (n-- > 0)
        detach_and_free(kv, members[n]);
}

/* Everything below `top` goes, leaves first; who is doomed itself is only unlinked here. */
static void doomed_empty(struct kv *kv, uint32_t top)
{
    struct prefix_node *nodes = kv->prefix.nodes;
    for (uint32_t at = top;;) {
        uint32_t child = nodes[at].first_child;
        if (child != BLOCK_NONE) {
            if (nodes[child].plain != BLOCK_NONE)
                content_free(kv, nodes[child].plain);
            if (nodes[child].group != BLOCK_NONE)
                content_free(kv, nodes[child].group);
            at = child;
            continue;
        }
        uint32_t up = nodes[at].parent;
        if (nodes[at].linked)
            prefix_unlink(&kv->prefix, at);
        if (at == top)
            return;
        at = up;
    }
}

static void reap(struct kv *kv)
{
    while (kv->doomed != BLOCK_NONE) {
        uint32_t node = kv->doomed;
        kv->doomed = kv->prefix.nodes[node].next_doomed;
        doomed_empty(kv, node);
        prefix_free(&kv->prefix, node);
    }
}

/* Drops a cached block, its group, and what hangs below. */
static void block_drop(struct kv *kv, uint32_t id)
{
    content_free(kv, id);
    reap(kv);
}

void kv_index_withdraw(struct kv *kv, uint32_t id)
{
    uint32_t node = kv_block(kv, id)->node;
    struct prefix_node *nd = &kv->prefix.nodes[node];
    CHECK(kv_block(kv, id)->refs == 1 && nd->plain == id);
    kv_index_detach(kv, id);
    if (nd->n_groups > 0)
        return;
    nd->next_doomed = kv->doomed;
    kv->doomed = node;
    reap(kv);
}

bool kv_drop_oldest(struct kv *kv)
{
    const struct blocks *bs = &kv->blocks;
    /* DRAM first: what is there is older, by and large. */
    uint32_t id = bs->in[BLOCK_CACHED_DRAM].first;
    if (id == BLOCK_NONE)
        id = bs->in[BLOCK_CACHED_HBM].first;
    if (id == BLOCK_NONE)
        return false;
    block_drop(kv, id);
    return true;
}

/* ---- places ---- */

uint32_t kv_places_available(const struct kv *kv, enum lane_class c, enum kv_tier t)
{
    const struct blocks *bs = &kv->blocks;
    uint32_t n = kv->place[c][t].n_free;
    if (c == LANE_STREAM)
        return n + bs->streams[t].n;
    if (t == KV_HBM)
        return n + bs->in[BLOCK_CACHED_HBM].n;
    return n + bs->in[BLOCK_CACHED_DRAM].n + (c == LANE_SPARSE ? bs->twins.n : 0);
}

static void part_free(struct kv *kv, struct block *b, enum lane_class c, enum kv_tier t)
{
    if (b->at[c][t] == BLOCK_NONE)
        return;
    CHECK(b->need[c][t] == 0);
    places_give(&kv->place[c][t], b->at[c][t]);
    b->at[c][t] = BLOCK_NONE;
}

static bool has_all(const struct kv *kv, const struct block *b, enum kv_tier t)
{
    for (size_t i = 0; i < ARRAY_LEN(whole); i++)
        if (kv_uses(kv, whole[i]) && b->at[whole[i]][t] == BLOCK_NONE)
            return false;
    return true;
}

static void stand_on(struct blocks *bs, struct block_list *l, enum block_link kind, uint32_t id,
                     bool on)
{
    if (on == (bs->all[id].on >> kind & 1))
        return;
    if (on)
        block_list_append(bs, l, kind, id);
    else
        block_list_remove(bs, l, kind, id);
}

static void relist(struct kv *kv, uint32_t id)
{
    struct block *b = kv_block(kv, id);
    struct blocks *bs = &kv->blocks;
    const block_id *at = b->at[LANE_SPARSE];
    bool up = at[KV_HBM] != BLOCK_NONE, down = at[KV_DRAM] != BLOCK_NONE, loose = b->pins == 0;
    stand_on(bs, &bs->twins, LINK_TWIN, id,
             loose && up && down && b->need[LANE_SPARSE][KV_DRAM] == 0);
    stand_on(bs, &bs->behind, LINK_BEHIND, id,
             loose && up && !down && (b->sealed || b->state == BLOCK_CACHED_HBM));
    if (b->on >> LINK_STREAM & 1) /* it may have changed its tier */
        block_list_remove(bs, &bs->streams[b->stream_tier], LINK_STREAM, id);
    for (uint8_t t = 0; t < TIERS && loose; t++)
        if (b->at[LANE_STREAM][t] != BLOCK_NONE && b->need[LANE_STREAM][t] == 0) {
            block_list_append(bs, &bs->streams[t], LINK_STREAM, id);
            b->stream_tier = t;
            break;
        }
}

/* One place fewer that is taken in DRAM; false: all are needed. */
static bool dram_reclaim(struct kv *kv, enum lane_class c)
{
    struct blocks *bs = &kv->blocks;
    if (c == LANE_SPARSE && bs->twins.n > 0) {
        uint32_t id = bs->twins.first;
        part_free(kv, kv_block(kv, id), LANE_SPARSE, KV_DRAM);
        relist(kv, id);
        return true;
    }
    if (bs->in[BLOCK_CACHED_DRAM].n == 0)
        return false;
    block_drop(kv, bs->in[BLOCK_CACHED_DRAM].first);
    return true;
}

static void part_copy_down(struct kv *kv, struct block *b, enum lane_class c)
{
    struct places *hbm = &kv->place[c][KV_HBM], *dram = &kv->place[c][KV_DRAM];
    block_id to = places_take(dram);
    CHECK(to != BLOCK_NONE);
    kv->be->ops->copy(kv->be, places_address(dram, to), places_address(hbm, b->at[c][KV_HBM]),
                      hbm->unit_bytes);
    b->at[c][KV_DRAM] = to;
    kv->counts.moved_down += c == kv->main;
}

/* A step towards moving a cached block down: the room is there, or some was made (call again: the
 * block may be gone by that), or there is none. */
enum room { ROOM, ROOM_LATER, ROOM_NONE };
static enum room room_below(struct kv *kv, const struct block *b)
{
    for (size_t i = 0; i < ARRAY_LEN(whole); i++) {
        enum lane_class c = whole[i];
        if (!kv_uses(kv, c) || b->at[c][KV_DRAM] != BLOCK_NONE || kv->place[c][KV_DRAM].n_free > 0)
            continue;
        /* If the oldest there is of the same group, it goes with it: whole. */
        uint32_t oldest = kv->blocks.in[BLOCK_CACHED_DRAM].first;
        bool twins = c == LANE_SPARSE && kv->blocks.twins.n > 0;
        if (!twins && b->group != BLOCK_NONE && oldest != BLOCK_NONE &&
            kv_block(kv, oldest)->group == b->group)
            return ROOM_NONE;
        return dram_reclaim(kv, c) ? ROOM_LATER : ROOM_NONE;
    }
    return ROOM;
}

/* Leaves nothing in HBM; room_below has said ROOM. */
static void block_move_down(struct kv *kv, struct block *b)
{
    for (size_t i = 0; i < ARRAY_LEN(whole); i++)
        if (kv_uses(kv, whole[i]) && b->at[whole[i]][KV_DRAM] == BLOCK_NONE)
            part_copy_down(kv, b, whole[i]);
    if (b->at[LANE_STREAM][KV_HBM] != BLOCK_NONE && b->at[LANE_STREAM][KV_DRAM] == BLOCK_NONE &&
        kv->place[LANE_STREAM][KV_DRAM].n_free > 0)
        part_copy_down(kv, b, LANE_STREAM);
    for (int c = 0; c < LANE_CLASSES; c++)
        part_free(kv, b, (enum lane_class)c, KV_HBM);
}

/* Works on the oldest cached block of HBM: it is out of there, or nearer to it, after the call. */
static void hbm_evict(struct kv *kv)
{
    uint32_t id = kv->blocks.in[BLOCK_CACHED_HBM].first;
    switch (room_below(kv, kv_block(kv, id))) {
    case ROOM: block_move_down(kv, kv_block(kv, id)); break;
    case ROOM_LATER: return;
    case ROOM_NONE: block_drop(kv, id); return;
    }
    kv_block_settle(kv, id);
}

static bool place_reclaim(struct kv *kv, enum lane_class c, enum kv_tier t)
{
    struct blocks *bs = &kv->blocks;
    if (c == LANE_STREAM) { /* the block stays: only a hit at its segment's end is lost */
        uint32_t id = bs->streams[t].first;
        if (id == BLOCK_NONE)
            return false;
        part_free(kv, kv_block(kv, id), c, t);
        relist(kv, id);
        return true;
    }
    if (t == KV_DRAM)
        return dram_reclaim(kv, c);
    if (bs->in[BLOCK_CACHED_HBM].n == 0)
        return false;
    hbm_evict(kv);
    return true;
}

block_id kv_place_take(struct kv *kv, enum lane_class c, enum kv_tier t)
{
    while (kv->place[c][t].n_free == 0)
        if (!place_reclaim(kv, c, t))
            return BLOCK_NONE;
    return places_take(&kv->place[c][t]);
}

void kv_part_make(struct kv *kv, uint32_t id, enum lane_class c, enum kv_tier t)
{
    struct block *b = kv_block(kv, id);
    enum kv_tier other = t == KV_HBM ? KV_DRAM : KV_HBM;
    CHECK(b->state == BLOCK_ACTIVE && b->at[c][t] == BLOCK_NONE);
    block_id to = kv_place_take(kv, c, t), from = b->at[c][other];
    CHECK(to != BLOCK_NONE);
    b->at[c][t] = to;
    if (from == BLOCK_NONE)
        return;
    kv->be->ops->copy(kv->be, places_address(&kv->place[c][t], to),
                      places_address(&kv->place[c][other], from), kv->place[c][t].unit_bytes);
    if (c == kv->main)
        *(t == KV_HBM ? &kv->counts.moved_up : &kv->counts.moved_down) += 1;
}

bool kv_part_is_spare(const struct block *b, enum lane_class c, enum kv_tier t)
{
    if (b->at[c][t] == BLOCK_NONE || b->need[c][t] > 0 || b->pins > 0)
        return false;
    if (c == LANE_STREAM)
        return (b->on >> LINK_STREAM & 1) && b->stream_tier == (uint8_t)t;
    if (t == KV_DRAM && c == LANE_SPARSE && (b->on >> LINK_TWIN & 1))
        return true;
    return b->state == (t == KV_HBM ? BLOCK_CACHED_HBM : BLOCK_CACHED_DRAM);
}

void kv_part_copy(struct kv *kv, enum lane_class c, uint32_t from, uint32_t to)
{
    const struct block *src = kv_block(kv, from), *dst = kv_block(kv, to);
    enum kv_tier t = src->at[c][KV_HBM] != BLOCK_NONE ? KV_HBM : KV_DRAM;
    CHECK(src->at[c][t] != BLOCK_NONE && dst->at[c][KV_HBM] != BLOCK_NONE);
    kv->be->ops->copy(kv->be, places_address(&kv->place[c][KV_HBM], dst->at[c][KV_HBM]),
                      places_address(&kv->place[c][t], src->at[c][t]),
                      kv->place[c][KV_HBM].unit_bytes);
}

/* ---- settling ---- */

/* Only what is needed nowhere else may go. A twin stays until its place is wanted, but for that of
 * rows that are still being written. */
static void trim_active(struct kv *kv, struct block *b)
{
    for (int i = 0; i < LANE_CLASSES; i++) {
        enum lane_class c = (enum lane_class)i;
        bool up = b->at[c][KV_HBM] != BLOCK_NONE, down = b->at[c][KV_DRAM] != BLOCK_NONE;
        bool keeps = c == LANE_STREAM && b->keeps_stream;
        bool twin = c == LANE_SPARSE && (b->sealed || b->node != BLOCK_NONE);
        if (up && b->need[c][KV_HBM] == 0 && (down || (c == LANE_STREAM && !keeps)))
            part_free(kv, b, c, KV_HBM);
        up = b->at[c][KV_HBM] != BLOCK_NONE;
        if (down && b->need[c][KV_DRAM] == 0 && !twin && (up || (c == LANE_STREAM && !keeps)))
            part_free(kv, b, c, KV_DRAM);
    }
}

/* In HBM whole, or in DRAM whole. false: neither has room, it must be dropped. */
static bool settle_cached(struct kv *kv, struct block *b)
{
    if (has_all(kv, b, KV_HBM)) {
        part_free(kv, b, LANE_DENSE, KV_DRAM);
        if (b->at[LANE_STREAM][KV_HBM] != BLOCK_NONE)
            part_free(kv, b, LANE_STREAM, KV_DRAM);
        return true;
    }
    enum room room;
    while ((room = room_below(kv, b)) == ROOM_LATER)
        ;
    if (room == ROOM_NONE)
        return false;
    block_move_down(kv, b);
    return true;
}

void kv_block_sealed(struct kv *kv, uint32_t id)
{
    kv_block(kv, id)->sealed = true;
    relist(kv, id);
}

void kv_twin_make(struct kv *kv, uint32_t id)
{
    part_copy_down(kv, kv_block(kv, id), LANE_SPARSE);
    relist(kv, id);
}

void kv_twin_forget(struct kv *kv, uint32_t id)
{
    CHECK(kv_block(kv, id)->at[LANE_SPARSE][KV_HBM] != BLOCK_NONE);
    part_free(kv, kv_block(kv, id), LANE_SPARSE, KV_DRAM);
    relist(kv, id);
}

static void block_free(struct kv *kv, uint32_t id)
{
    struct block *b = kv_block(kv, id);
    kv_records_free(kv, id);
    for (int c = 0; c < LANE_CLASSES; c++)
        for (int t = 0; t < TIERS; t++)
            part_free(kv, b, (enum lane_class)c, (enum kv_tier)t);
    relist(kv, id);
    block_move(&kv->blocks, id, BLOCK_FREE);
}

static bool in_use(const struct block *b)
{
    return b->refs > 0 || b->pins > 0;
}

static void settle_unused(struct kv *kv, uint32_t id)
{
    struct block *b = kv_block(kv, id);
    b->pins = 1; /* not a victim of its own move */
    relist(kv, id);
    bool stays = settle_cached(kv, b);
    b->pins = 0;
    if (!stays) {
        block_drop(kv, id);
        return;
    }
    block_move(&kv->blocks, id, has_all(kv, b, KV_HBM) ? BLOCK_CACHED_HBM : BLOCK_CACHED_DRAM);
    relist(kv, id);
}

void kv_block_settle(struct kv *kv, uint32_t id)
{
    struct block *b = kv_block(kv, id);
    if (!in_use(b) && b->node == BLOCK_NONE) {
        block_free(kv, id);
    } else if (!in_use(b)) {
        settle_unused(kv, id);
    } else {
        if (b->pins == 0)
            trim_active(kv, b);
        block_move(&kv->blocks, id, BLOCK_ACTIVE);
        relist(kv, id);
    }
}

/* References or pins of the block changed. A group is used as long as one of its blocks is, and what
 * cannot be dropped whole is nobody's victim. */
static void use_changed(struct kv *kv, uint32_t id, bool was_in_use)
{
    const struct block *b = kv_block(kv, id);
    if (b->group == BLOCK_NONE || in_use(b) == was_in_use) {
        kv_block_settle(kv, id);
        return;
    }
    uint32_t last = b->group, members[MAX_SEGMENT_BLOCKS];
    if (in_use(b)) {
        bool first = kv_block(kv, last)->held++ == 0;
        kv_group_blocks(kv, last, members);
        for (uint32_t i = 0; i < kv->segment_blocks && first; i++)
            block_move(&kv->blocks, members[i], BLOCK_ACTIVE);
        kv_block_settle(kv, id);
        return;
    }
    CHECK(kv_block(kv, last)->held > 0);
    if (--kv_block(kv, last)->held > 0)
        return;
    kv_group_blocks(kv, last, members);
    for (uint32_t i = kv->segment_blocks; i-- > 0;)
        if (kv_block(kv, members[i])->group == last) /* or it was dropped on the way */
            kv_block_settle(kv, members[i]);
}

/* ---- references ---- */

static void need_add(struct block *b, part_mask needs)
{
    for (int c = 0; c < LANE_CLASSES; c++)
        for (int t = 0; t < TIERS; t++)
            if (needs & PART(c, t)) {
                CHECK(b->at[c][t] != BLOCK_NONE);
                b->need[c][t]++;
            }
}

static void need_take(struct block *b, part_mask needs)
{
    for (int c = 0; c < LANE_CLASSES; c++)
        for (int t = 0; t < TIERS; t++)
            if (needs & PART(c, t)) {
                CHECK(b->need[c][t] > 0);
                b->need[c][t]--;
            }
}

uint32_t kv_block_take(struct kv *kv, part_mask needs)
{
    block_id at[LANE_CLASSES][TIERS];
    for (int c = 0; c < LANE_CLASSES; c++)
        for (int t = 0; t < TIERS; t++) {
            at[c][t] = BLOCK_NONE;
            if (needs & PART(c, t))
                at[c][t] = kv_place_take(kv, (enum lane_class)c, (enum kv_tier)t);
        }
    /* Who has a place has a record; but in STREAM lanes alone a block may have none. */
    while (kv->blocks.in[BLOCK_FREE].n == 0)
        CHECK(kv->main == LANE_STREAM && kv_drop_oldest(kv));
    uint32_t id = block_next(&kv->blocks);
    struct block *b = kv_block(kv, id);
    memcpy(b->at, at, sizeof(b->at));
    b->refs = 1;
    block_move(&kv->blocks, id, BLOCK_ACTIVE);
    need_add(b, needs);
    return id;
}

void kv_block_hold(struct kv *kv, uint32_t id, part_mask needs)
{
    struct block *b = kv_block(kv, id);
    bool was = in_use(b);
    need_add(b, needs);
    b->refs++;
    use_changed(kv, id, was);
}

void kv_block_release(struct kv *kv, uint32_t id, part_mask needs)
{
    CHECK(kv_block(kv, id)->refs > 0);
    need_take(kv_block(kv, id), needs);
    kv_block(kv, id)->refs--;
    use_changed(kv, id, true);
}

bool kv_block_can_split(const struct kv *kv, uint32_t id)
{
    const struct block *b = kv_block(kv, id);
    for (int c = 0; c < LANE_CLASSES; c++)
        if (kv_uses(kv, (enum lane_class)c) &&
            (b->need[c][KV_HBM] > 1 || (c != LANE_STREAM && b->at[c][KV_DRAM] == BLOCK_NONE)))
            return false;
    return b->refs > 1;
}

uint32_t kv_block_split(struct kv *kv, uint32_t id, part_mask needs)
{
    uint32_t own = block_next(&kv->blocks); /* the old one has two places, so a record is free */
    struct block *b = kv_block(kv, id), *o = kv_block(kv, own);
    CHECK(kv_block_can_split(kv, id));
    need_take(b, needs);
    for (int c = 0; c < LANE_CLASSES; c++)
        if (needs & PART(c, KV_HBM)) {
            o->at[c][KV_HBM] = b->at[c][KV_HBM];
            b->at[c][KV_HBM] = BLOCK_NONE;
        }
    o->refs = 1;
    o->keeps_stream = b->keeps_stream;
    block_move(&kv->blocks, own, BLOCK_ACTIVE);
    need_add(o, needs);
    b->refs--;
    kv_block_settle(kv, id);
    kv_block_settle(kv, own);
    return own;
}

void kv_block_change(struct kv *kv, uint32_t id, part_mask from, part_mask to)
{
    need_add(kv_block(kv, id), to & ~from);
    need_take(kv_block(kv, id), from & ~to);
    kv_block_settle(kv, id);
}

void kv_block_pin(struct kv *kv, uint32_t id)
{
    bool was = in_use(kv_block(kv, id));
    kv_block(kv, id)->pins++;
    use_changed(kv, id, was);
}

void kv_block_unpin(struct kv *kv, uint32_t id)
{
    CHECK(kv_block(kv, id)->pins > 0);
    kv_block(kv, id)->pins--;
    use_changed(kv, id, true);
}

void kv_block_absorb(struct kv *kv, uint32_t id, uint32_t own, part_mask needs)
{
    struct block *b = kv_block(kv, id), *o = kv_block(kv, own);
    CHECK(o->refs == 1 && o->node == BLOCK_NONE && b->pins > 0);
    need_take(o, needs);
    for (int c = 0; c < LANE_CLASSES; c++)
        for (int t = 0; t < TIERS; t++)
            if (b->at[c][t] == BLOCK_NONE) {
                b->at[c][t] = o->at[c][t];
                o->at[c][t] = BLOCK_NONE;
            }
    relist(kv, own);
}
