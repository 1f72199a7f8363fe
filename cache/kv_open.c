/* The prefix hit of a sequence that opens: how long it may be, what it costs, taking it
 * (cache/kv.h, cache/kv_impl.h).
 *
 * A hit of n rows must look like the same sequence that computed them: the segments that would be
 * sealed by now are taken as groups, the rest in position order, as blocks that lie so already or
 * unpermuted from a group into fresh ones, which the index gets too. Nothing is taken before it is
 * known that all of it fits. */
#include "cache/kv_impl.h"

struct hit {
    uint32_t n;            /* blocks */
    uint32_t groups;       /* leading segments that are taken as groups */
    uint32_t fresh_end[3]; /* segment groups + i: blocks before this one are copied back into
                              position order; 0: none */
    uint32_t *nodes;       /* [n at first] the chain */
    uint32_t *sources;     /* [n] what each gives: to be taken or, where fresh, copied */
};

static status chain_find(struct kv *kv, struct kv_seq *s, const struct kv_open *o, struct hit *h)
{
    struct prefix_root root = kv_root(kv, s);
    uint32_t rows = kv->cfg.geo.block_rows, most = o->max_hit < o->n ? o->max_hit : o->n;
    uint32_t limit = (most < o->max_rows ? most : o->max_rows) / rows;
    uint32_t last = BLOCK_NONE, n = 0, next;
    while (n < limit && (next = prefix_find(&kv->prefix, &root, last,
                                            o->tokens + (size_t)n * rows)) != BLOCK_NONE) {
        last = next;
        n++;
    }
    if (n == 0)
        return OK;
    h->nodes = mem_try_alloc(2 * (size_t)n * sizeof(*h->nodes));
    if (h->nodes == NULL)
        return err(ERR_MEMORY, "no memory for a prefix of %u blocks", n);
    h->sources = h->nodes + n;
    h->n = n;
    for (; n > 0; last = kv->prefix.nodes[last].parent)
        h->nodes[--n] = last;
    return OK;
}

/* ---- how long it may be ---- */

/* Last block of some group that has the tokens up to node, the chain's i-th; all have them alike. */
static uint32_t group_through(const struct kv *kv, uint32_t node, uint32_t i)
{
    const struct prefix_node *nodes = kv->prefix.nodes;
    for (; (i + 1) % kv->segment_blocks != 0; i++) {
        node = nodes[node].first_child;
        while (nodes[node].n_groups == 0)
            node = nodes[node].next_sibling;
    }
    CHECK(nodes[node].group != BLOCK_NONE);
    return nodes[node].group;
}

/* Blocks [first, first + n) come from the group. */
static void from_group(const struct kv *kv, struct hit *h, uint32_t last, uint32_t first,
                       uint32_t n)
{
    uint32_t members[MAX_SEGMENT_BLOCKS];
    kv_group_blocks(kv, last, members);
    for (uint32_t i = 0; i < n; i++)
        h->sources[first + i] = members[i];
}

static void choose_sources(const struct kv *kv, struct hit *h)
{
    uint32_t per = kv->segment_blocks;
    for (uint32_t g = 0; g < h->groups; g++)
        from_group(kv, h, kv->prefix.nodes[h->nodes[(g + 1) * per - 1]].group, g * per, per);
    for (uint32_t i = h->groups * per; i < h->n; i++)
        h->sources[i] = kv->prefix.nodes[h->nodes[i]].plain;
    for (uint32_t g = 0; g < ARRAY_LEN(h->fresh_end); g++) {
        uint32_t first = (h->groups + g) * per, end = first + per < h->n ? first + per : h->n;
        h->fresh_end[g] = 0;
        for (uint32_t i = first; i < end; i++)
            if (h->sources[i] == BLOCK_NONE)
                h->fresh_end[g] = i + 1;
        if ((end = h->fresh_end[g]) > 0)
            from_group(kv, h, group_through(kv, h->nodes[end - 1], end - 1), first, end - first);
    }
}

/* A segment that is due must be there as a group: a hit ends before it would be. */
static void limit_by_groups(const struct kv *kv, const struct kv_seq *s, struct hit *h)
{
    uint32_t rows = kv->cfg.geo.block_rows, per = kv->segment_blocks;
    h->groups = 0;
    while (kv_permutes(s) && h->groups < kv_segments_due(h->n * rows)) {
        if (kv->prefix.nodes[h->nodes[(h->groups + 1) * per - 1]].group == BLOCK_NONE)
            h->n = ((h->groups + 1) * SEGMENT_ROWS + TAIL_ROWS) / rows - 1;
        else
            h->groups++;
    }
    choose_sources(kv, h);
}

static bool is_fresh(const struct kv *kv, const struct kv_seq *s, const struct hit *h, uint32_t i)
{
    uint32_t segment = i / kv->segment_blocks;
    return kv_permutes(s) && segment >= h->groups && i < h->fresh_end[segment - h->groups];
}

static bool has_stream(const struct kv *kv, const struct hit *h)
{
    uint32_t start = kv_ring_start(kv, h->n * kv->cfg.geo.block_rows);
    for (uint32_t i = 0; i < h->n; i++) {
        if (i == kv->stream_sink_blocks && i < start)
            i = start;
        if (i >= h->n)
            break;
        const struct block *b = kv_block(kv, h->sources[i]);
        if (b->at[LANE_STREAM][KV_HBM] == BLOCK_NONE && b->at[LANE_STREAM][KV_DRAM] == BLOCK_NONE)
            return false;
    }
    return true;
}

/* STREAM rings can be taken up at segment ends only, where the index kept them. */
static void limit_by_stream(const struct kv *kv, const struct kv_seq *s, struct hit *h)
{
    uint32_t per = kv->segment_blocks;
    if (!kv_uses(kv, LANE_STREAM))
        return;
    if (h->n % per != 0) {
        h->n -= h->n % per;
        limit_by_groups(kv, s, h);
    }
    while (h->n > 0 && (h->n % per != 0 || !has_stream(kv, h))) {
        h->n = (h->n - 1) / per * per;
        limit_by_groups(kv, s, h);
    }
}

/* Records of a layout that keeps positions: as far as they are there, the segments count as sealed;
 * the others are sealed again. */
static uint32_t sealed_segments(const struct kv *kv, const struct kv_seq *s, const struct hit *h)
{
    uint32_t due = kv_segments_due(h->n * kv->cfg.geo.block_rows), n = 0;
    if (kv_permutes(s))
        return h->groups;
    if (!s->layout.seals)
        return 0;
    CHECK(due == 0 || h->sources != NULL);
    while (n < due && (s->layout.digest_id == 0 ||
                       kv_record_find(kv, h->sources[(n + 1) * kv->segment_blocks - 1],
                                      s->layout.digest_id) != BLOCK_NONE))
        n++;
    return n;
}

/* ---- what it costs ---- */

/* Places that taking the hit leaves fewer for others, by (class, tier). */
struct cost {
    uint32_t n[LANE_CLASSES][TIERS];
};

static void add_cost(const struct kv *kv, const struct kv_seq *s, const struct hit *h, uint32_t i,
                     struct cost *k)
{
    const struct block *b = kv_block(kv, h->sources[i]);
    part_mask needs = kv_seq_needs(kv, s, i, s->residence);
    bool fresh = is_fresh(kv, s, h, i);
    for (int c = 0; c < LANE_CLASSES; c++)
        for (int t = 0; t < TIERS; t++) {
            bool needed = needs & PART(c, t);
            bool spare = kv_part_is_spare(b, (enum lane_class)c, (enum kv_tier)t);
            /* Sources stay as they are until all is taken; a fresh block is beside its source. */
            k->n[c][t] += spare;
            k->n[c][t] += needed && (fresh || b->at[c][t] == BLOCK_NONE);
        }
}

/* The rest of a group that is copied from in part: it must stay as well. */
static void add_rest(const struct kv *kv, const struct hit *h, struct cost *k)
{
    uint32_t members[MAX_SEGMENT_BLOCKS], per = kv->segment_blocks;
    for (uint32_t g = 0; g < ARRAY_LEN(h->fresh_end); g++) {
        if (h->fresh_end[g] == 0)
            continue;
        kv_group_blocks(kv, kv_block(kv, h->sources[(size_t)(h->groups + g) * per])->group,
                        members);
        for (uint32_t i = h->fresh_end[g] - (h->groups + g) * per; i < per; i++)
            for (int c = 0; c < LANE_CLASSES; c++)
                for (int t = 0; t < TIERS; t++)
                    k->n[c][t] += kv_part_is_spare(kv_block(kv, members[i]), (enum lane_class)c,
                                                   (enum kv_tier)t);
    }
}

/* By how many blocks it does not fit; 0: it does. */
static uint32_t excess(const struct kv *kv, const struct kv_seq *s, const struct hit *h,
                       uint32_t n_slots)
{
    struct cost k = {0};
    uint32_t most = 0;
    for (uint32_t i = 0; i < h->n; i++)
        add_cost(kv, s, h, i, &k);
    k.n[LANE_SPARSE][KV_HBM] += s->residence == KV_SPILLED ? n_slots : 0;
    add_rest(kv, h, &k);
    for (int c = 0; c < LANE_CLASSES; c++)
        for (int t = 0; t < TIERS; t++) {
            uint32_t there = kv_places_available(kv, (enum lane_class)c, (enum kv_tier)t);
            uint32_t over = k.n[c][t] > there ? k.n[c][t] - there : 0;
            most = over > most ? over : most;
        }
    return most;
}

/* Sets what kv_seq_needs asks about. */
static void stand_at(const struct kv *kv, struct kv_seq *s, const struct hit *h)
{
    s->own->ring_first =
        kv_uses(kv, LANE_STREAM) ? kv_ring_start(kv, h->n * kv->cfg.geo.block_rows) : 0;
    s->n_segments = sealed_segments(kv, s, h);
}

static void shorten_to_fit(const struct kv *kv, struct kv_seq *s, struct hit *h, uint32_t n_slots)
{
    uint32_t over;
    stand_at(kv, s, h);
    while (h->n > 0 && (over = excess(kv, s, h, n_slots)) > 0) {
        h->n -= over < h->n ? over : h->n;
        limit_by_groups(kv, s, h);
        limit_by_stream(kv, s, h);
        stand_at(kv, s, h);
    }
}

/* ---- taking it ---- */

static void take_block(struct kv *kv, struct kv_seq *s, uint32_t i, uint32_t id)
{
    part_mask needs = kv_seq_needs(kv, s, i, s->residence);
    for (int c = 0; c < LANE_CLASSES; c++)
        for (int t = 0; t < TIERS; t++)
            if ((needs & PART(c, t)) && kv_block(kv, id)->at[c][t] == BLOCK_NONE)
                kv_part_make(kv, id, (enum lane_class)c, (enum kv_tier)t);
    kv_block_hold(kv, id, needs);
    s->own->blocks[i] = id;
    s->n_blocks = i + 1;
    kv_seq_entry(kv, s, i);
}

/* Fresh blocks for [first, end) of one segment, its rows in position order, from a pinned group. */
static void take_unpermuted(struct kv *kv, struct kv_seq *s, const struct hit *h, uint32_t first,
                            uint32_t end)
{
    block_id from[MAX_SEGMENT_BLOCKS], to[MAX_SEGMENT_BLOCKS];
    uint32_t members[MAX_SEGMENT_BLOCKS], n = end - first;
    uint32_t last = kv_block(kv, h->sources[first])->group;
    kv_group_blocks(kv, last, members);
    for (uint32_t i = 0; i < kv->segment_blocks; i++) {
        const struct block *b = kv_block(kv, members[i]);
        block_id up = b->at[LANE_SPARSE][KV_HBM];
        from[i] = up != BLOCK_NONE ? up : b->at[LANE_SPARSE][KV_DRAM] | BLOCK_IN_DRAM;
    }
    for (uint32_t i = 0; i < n; i++) {
        part_mask needs = kv_seq_needs(kv, s, first + i, s->residence);
        uint32_t id = kv_block_take(kv, needs);
        kv_block(kv, id)->keeps_stream = kv_keeps_stream(kv, first + i);
        for (int c = 0; c < LANE_CLASSES; c++)
            if (c != LANE_SPARSE && (needs & PART(c, KV_HBM)))
                kv_part_copy(kv, (enum lane_class)c, members[i], id);
        to[i] = kv_block(kv, id)->at[LANE_SPARSE][KV_HBM];
        s->own->blocks[first + i] = id;
        s->n_blocks = first + i + 1;
        kv_seq_entry(kv, s, first + i);
    }
    const struct unpermute_args a = {.kv = &kv->memory,
                                     .from = from,
                                     .to = to,
                                     .record = kv_block(kv, last)->record,
                                     .n_rows = n * kv->cfg.geo.block_rows};
    if (kv_uses(kv, LANE_SPARSE))
        kv->be->ops->unpermute(kv->be, &a);
    for (uint32_t i = first; i < end; i++) {
        uint32_t known = kv->prefix.nodes[h->nodes[i]].plain;
        if (known != BLOCK_NONE)
            kv_seq_adopt(kv, s, i, known);
        else
            kv_index_attach_plain(kv, h->nodes[i], s->own->blocks[i]);
    }
}

/* Everything that the hit is made from, while room is made for it. */
static void pin_sources(struct kv *kv, const struct hit *h, void (*pin)(struct kv *kv, uint32_t id))
{
    uint32_t members[MAX_SEGMENT_BLOCKS], per = kv->segment_blocks;
    for (uint32_t g = 0; g < ARRAY_LEN(h->fresh_end); g++) {
        if (h->fresh_end[g] == 0)
            continue;
        kv_group_blocks(kv, kv_block(kv, h->sources[(size_t)(h->groups + g) * per])->group,
                        members);
        for (uint32_t i = per; i-- > h->fresh_end[g] - (h->groups + g) * per;)
            pin(kv, members[i]);
    }
    for (uint32_t i = h->n; i-- > 0;) /* from the end: LRU by leaf, and ancestors last */
        pin(kv, h->sources[i]);
}

static void take_all(struct kv *kv, struct kv_seq *s, const struct hit *h)
{
    uint32_t per = kv->segment_blocks;
    pin_sources(kv, h, kv_block_pin);
    for (uint32_t i = 0; i < h->n;) {
        if (is_fresh(kv, s, h, i)) {
            uint32_t end = h->fresh_end[i / per - h->groups];
            take_unpermuted(kv, s, h, i, end);
            i = end;
            continue;
        }
        take_block(kv, s, i, h->sources[i]);
        i++;
    }
    pin_sources(kv, h, kv_block_unpin);
    for (uint32_t g = 0; g < s->n_segments; g++) {
        uint32_t last = s->own->blocks[(g + 1) * per - 1];
        uint32_t r = kv_permutes(s) ? kv_block(kv, last)->record
                                    : kv_record_find(kv, last, s->layout.digest_id);
        s->own->records[g] = r;
        kv_record_hold(kv, r);
    }
    for (uint32_t i = 0; i < kv_sealed_blocks(kv, s); i++)
        kv_block_sealed(kv, s->own->blocks[i]);
    s->n_shared = h->n;
}

/* Whether fewer sealed blocks cross the bus until all given rows have attended the hit if it stays in DRAM: RESIDENT,
 * what is not in HBM goes up, and once HBM is full something goes down for it; SPILLED, what DRAM has not
 * got goes down, and all of it is read by every chunk. So conversations that come back do not push each other
 * out, and long prompts behind a hit do not read it again and again. */
static bool is_nearer_below(const struct kv *kv, const struct kv_seq *s, const struct kv_open *o,
                            const struct hit *h)
{
    uint32_t sealed = kv_sealed_blocks(kv, s), up = 0, down = 0;
    for (uint32_t i = 0; i < sealed; i++) {
        const block_id *at = kv_block(kv, h->sources[i])->at[LANE_SPARSE];
        up += at[KV_HBM] == BLOCK_NONE;
        down += at[KV_DRAM] == BLOCK_NONE;
    }
    uint32_t left = o->n - h->n * kv->cfg.geo.block_rows, chunk = o->chunk > 0 ? o->chunk : left;
    uint64_t reads = (left + (uint64_t)chunk - 1) / chunk;
    uint32_t room = kv->place[LANE_SPARSE][KV_HBM].n_free;
    return up + (up > room ? up - room : 0) > sealed * reads + down;
}

/* RESIDENT, unless more of the hit fits SPILLED, or it is better left where it is. */
static void choose_residence(const struct kv *kv, struct kv_seq *s, const struct kv_open *o,
                             struct hit *h, uint32_t min_slots)
{
    uint32_t all = h->n;
    shorten_to_fit(kv, s, h, 0);
    uint32_t resident = h->n;
    if (!s->layout.seals || !kv_uses(kv, LANE_SPARSE) || min_slots > HOT_MAX_SLOTS ||
        (resident == all && (o->up || !is_nearer_below(kv, s, o, h))))
        return;
    for (int spilled = 1; spilled >= 0; spilled--) {
        s->residence = spilled ? KV_SPILLED : KV_RESIDENT;
        h->n = spilled ? all : resident;
        limit_by_groups(kv, s, h);
        shorten_to_fit(kv, s, h, min_slots);
        if (spilled && (h->n > resident || h->n == all) && s->n_segments > 0)
            return;
    }
}

static status open_spilled(struct kv *kv, struct kv_seq *s, uint32_t min_slots)
{
    kv->counts.n_resident--;
    kv->counts.n_spilled++;
    TRY(kv_hot_open(kv, s));
    return kv_hot_fill(kv, s, min_slots);
}

status kv_open_hit(struct kv *kv, struct kv_seq *s, const struct kv_open *o, uint32_t min_slots,
                   uint32_t *n_hit)
{
    struct hit h = {0};
    TRY(chain_find(kv, s, o, &h));
    limit_by_groups(kv, s, &h);
    limit_by_stream(kv, s, &h);
    uint32_t found = h.n;
    choose_residence(kv, s, o, &h, min_slots);
    s->n_cut = found - h.n;
    status st = kv_seq_reserve(kv, s, h.n);
    if (st != OK) {
        s->n_segments = 0;
        s->residence = KV_RESIDENT;
    } else {
        take_all(kv, s, &h);
        *n_hit = h.n * kv->cfg.geo.block_rows;
    }
    mem_free(h.nodes);
    if (st == OK && s->residence == KV_SPILLED)
        st = open_spilled(kv, s, min_slots);
    return st;
}

void kv_seq_keep_cut(struct kv *kv, struct kv_seq *s, const struct kv_open *o)
{
    struct hit h = {0};
    if (chain_find(kv, s, o, &h) != OK) /* no memory to name it: then it may be dropped */
        return;
    limit_by_groups(kv, s, &h);
    limit_by_stream(kv, s, &h);
    for (uint32_t i = s->n_shared; i < h.n; i++)
        kv_block_pin(kv, h.sources[i]);
    for (uint32_t i = h.n; i-- > s->n_shared;) /* from the end: LRU by leaf */
        kv_block_unpin(kv, h.sources[i]);
    mem_free(h.nodes);
}
