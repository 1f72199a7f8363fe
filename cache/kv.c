/* Sequences over the two tiers and the prefix index (cache/kv.h).
 *
 * Three rules keep every operation O(1) per block and make the audit short:
 *
 *   1. A sealed block of a sequence is always the one that the index knows. Where another sequence
 *      has sealed the same tokens first, ours is given back and the table names theirs: on one
 *      backend the content is equal bit for bit. So who holds a block holds its ancestors too.
 *   2. A sequence gives its blocks back from its end to its start. So on the list of cached blocks,
 *      oldest first, a child always stands before its parent, and taking the first is LRU by leaf.
 *   3. A cached block whose parent is in DRAM is in DRAM too: parents go down last and come up
 *      first. So the oldest block of DRAM has no children anywhere, and dropping it orphans none.
 *
 * Copies go through the backend's queue, in order: a block may be reused as soon as its copy is
 * queued, because whatever overwrites it is queued behind. */
#include "cache/kv.h"

#include "cache/prefix.h"

#include <string.h>

struct kv {
    struct backend *be;
    struct kv_config cfg;
    struct block_tier tier[2]; /* by enum kv_tier */
    struct prefix prefix;
    uint64_t queried_tokens, hit_tokens, moved_down, moved_up;
    uint64_t seq_table_bytes; /* of open sequences */
};

struct kv_geometry kv_geometry_make(uint32_t block_rows, uint32_t layers, uint32_t kv_heads,
                                    uint32_t head_dim)
{
    enum { HALVES = 2, BF16_BYTES = 2 }; /* K and V */
    struct kv_geometry g = {
        .block_rows = block_rows, .layers = layers, .kv_heads = kv_heads, .head_dim = head_dim};
    g.page_bytes = (size_t)block_rows * head_dim * HALVES * BF16_BYTES;
    g.n_lanes[LANE_SPARSE] = layers * kv_heads;
    g.block_bytes[LANE_SPARSE] = (size_t)layers * kv_heads * g.page_bytes;
    return g;
}

static status check_config(const struct kv_config *cfg)
{
    uint32_t rows = cfg->geo.block_rows;
    if (rows != 8 && rows != 16 && rows != 32)
        return err(ERR_ARG, "block size %u: must be 8, 16 or 32", rows);
    if (cfg->geo.block_bytes[LANE_SPARSE] == 0)
        return err(ERR_ARG, "a block of no bytes: layers, KV heads and head size must not be 0");
    if (cfg->hbm_blocks == 0)
        return err(ERR_ARG, "the KV arena has no room for one block of %zu bytes",
                   cfg->geo.block_bytes[LANE_SPARSE]);
    if ((uint64_t)cfg->hbm_blocks + cfg->dram_blocks >= BLOCK_NONE)
        return err(ERR_ARG, "%u + %u blocks: more than 32 bits can name", cfg->hbm_blocks,
                   cfg->dram_blocks);
    return OK;
}

status kv_create(struct kv **out, struct backend *be, const struct kv_config *cfg)
{
    *out = NULL;
    TRY(check_config(cfg));
    struct kv *kv = mem_alloc(sizeof(*kv));
    struct prefix_config prefix = {.n_nodes = cfg->hbm_blocks + cfg->dram_blocks,
                                   .block_rows = cfg->geo.block_rows,
                                   .secret = {cfg->secret[0], cfg->secret[1]},
                                   .layout_id = cfg->layout_id,
                                   .hash_bits = cfg->hash_bits};
    kv->be = be;
    kv->cfg = *cfg;
    status st =
        block_tier_init(&kv->tier[KV_HBM], be, cfg->hbm_blocks, cfg->geo.block_bytes[LANE_SPARSE]);
    if (st == OK)
        st = block_tier_init(&kv->tier[KV_DRAM], be, cfg->dram_blocks,
                             cfg->geo.block_bytes[LANE_SPARSE]);
    if (st == OK)
        st = prefix_init(&kv->prefix, &prefix);
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
    prefix_fini(&kv->prefix);
    block_tier_fini(&kv->tier[KV_DRAM]);
    block_tier_fini(&kv->tier[KV_HBM]);
    mem_free(kv);
}

void *kv_arena(struct kv *kv)
{
    return kv->tier[KV_HBM].arena;
}

const struct kv_geometry *kv_geometry(const struct kv *kv)
{
    return &kv->cfg.geo;
}

static struct block *hbm_block(struct kv *kv, block_id id)
{
    return &kv->tier[KV_HBM].all[id];
}

static struct prefix_node *node_at(struct kv *kv, uint32_t node)
{
    return &kv->prefix.nodes[node];
}

static uint32_t blocks_for(const struct kv *kv, uint32_t n_rows)
{
    uint32_t rows = kv->cfg.geo.block_rows;
    return n_rows / rows + (n_rows % rows != 0);
}

/* References. */

static void block_hold(struct kv *kv, block_id id)
{
    struct block *b = hbm_block(kv, id);
    if (b->refs == 0)
        block_move(&kv->tier[KV_HBM], id, (enum block_state)b->state, BLOCK_ACTIVE);
    b->refs++;
}

static void block_release(struct kv *kv, block_id id)
{
    struct block *b = hbm_block(kv, id);
    CHECK(b->refs > 0);
    if (--b->refs == 0)
        block_move(&kv->tier[KV_HBM], id, BLOCK_ACTIVE,
                   b->node == BLOCK_NONE ? BLOCK_FREE : BLOCK_CACHED);
}

/* Moving and dropping cached blocks. */

/* The content of `from` is, or will be, where `node` now points. */
static void node_repoint(struct kv *kv, uint32_t node, enum kv_tier tier, block_id to)
{
    struct prefix_node *nd = node_at(kv, node);
    kv->tier[nd->tier].all[nd->block].node = BLOCK_NONE;
    nd->tier = tier;
    nd->block = to;
    kv->tier[tier].all[to].node = node;
}

static void cached_drop(struct kv *kv, enum kv_tier tier)
{
    struct block_tier *t = &kv->tier[tier];
    block_id id = t->cached.first;
    prefix_remove(&kv->prefix, t->all[id].node);
    t->all[id].node = BLOCK_NONE;
    block_move(t, id, BLOCK_CACHED, BLOCK_FREE);
}

static void cached_move_down(struct kv *kv)
{
    struct block_tier *hbm = &kv->tier[KV_HBM], *dram = &kv->tier[KV_DRAM];
    block_id from = hbm->cached.first, to = dram->free.first;
    kv->be->ops->copy(kv->be, block_address(dram, to), block_address(hbm, from), hbm->block_bytes);
    node_repoint(kv, hbm->all[from].node, KV_DRAM, to);
    block_move(dram, to, BLOCK_FREE, BLOCK_CACHED);
    block_move(hbm, from, BLOCK_CACHED, BLOCK_FREE);
    kv->moved_down++;
}

/* Makes the oldest cached block of HBM a free one. If DRAM has neither a free nor a cached block,
 * none of the victim's children is there either (rule 3), so it may be dropped. */
static void hbm_evict(struct kv *kv)
{
    struct block_tier *dram = &kv->tier[KV_DRAM];
    if (dram->free.n == 0 && dram->cached.n > 0)
        cached_drop(kv, KV_DRAM);
    if (dram->free.n > 0)
        cached_move_down(kv);
    else
        cached_drop(kv, KV_HBM);
}

/* A block of HBM with one reference, or BLOCK_NONE. */
static block_id hbm_take(struct kv *kv)
{
    struct block_tier *hbm = &kv->tier[KV_HBM];
    if (hbm->free.n == 0 && hbm->cached.n > 0)
        hbm_evict(kv);
    block_id id = hbm->free.first;
    if (id != BLOCK_NONE)
        block_hold(kv, id);
    return id;
}

/* Opening: find the chain, hold it, bring it up. */

/* Holds the node's block, wherever it is, so that making room for others does not evict it. */
static void node_pin(struct kv *kv, uint32_t node)
{
    struct prefix_node *nd = node_at(kv, node);
    if (nd->tier == KV_HBM)
        block_hold(kv, nd->block);
    else
        block_move(&kv->tier[KV_DRAM], nd->block, BLOCK_CACHED, BLOCK_PINNED);
}

/* Pins the longest known chain of at most `limit` blocks. Until chain_lift has run, s->blocks holds
 * its node numbers instead of block ids. */
static uint32_t chain_find(struct kv *kv, struct kv_seq *s, const uint32_t *tokens, uint32_t limit)
{
    struct prefix_key key = {.salt = {s->salt[0], s->salt[1]}, .parent = BLOCK_NONE};
    uint64_t before[2] = {s->tip[0], s->tip[1]};
    uint32_t n = 0;
    for (; n < limit; n++) {
        key.tokens = tokens + (size_t)n * kv->cfg.geo.block_rows;
        prefix_next(&kv->prefix, before, key.tokens, key.hash);
        uint32_t node = prefix_find(&kv->prefix, &key);
        if (node == BLOCK_NONE)
            break;
        node_pin(kv, node);
        s->blocks[n] = key.parent = node;
        memcpy(before, key.hash, sizeof(before));
    }
    return n;
}

static bool node_lift(struct kv *kv, uint32_t node)
{
    struct block_tier *hbm = &kv->tier[KV_HBM], *dram = &kv->tier[KV_DRAM];
    block_id from = node_at(kv, node)->block, to = hbm_take(kv);
    if (to == BLOCK_NONE)
        return false;
    kv->be->ops->copy(kv->be, block_address(hbm, to), block_address(dram, from), hbm->block_bytes);
    node_repoint(kv, node, KV_HBM, to);
    block_move(dram, from, BLOCK_PINNED, BLOCK_FREE);
    kv->moved_up++;
    return true;
}

/* Turns the first nodes of s->blocks into blocks of HBM; where HBM has no room left, the rest goes
 * back to where it was, its end first (rule 2). */
static void chain_lift(struct kv *kv, struct kv_seq *s, uint32_t n_chain)
{
    uint32_t n = 0;
    for (; n < n_chain; n++) {
        uint32_t node = s->blocks[n];
        if (node_at(kv, node)->tier == KV_DRAM && !node_lift(kv, node))
            break;
        s->blocks[n] = node_at(kv, node)->block;
        memcpy(s->tip, node_at(kv, node)->hash, sizeof(s->tip));
    }
    for (uint32_t i = n_chain; i-- > n;) {
        const struct prefix_node *nd = node_at(kv, s->blocks[i]);
        CHECK(nd->tier == KV_DRAM); /* rule 3 */
        block_move(&kv->tier[KV_DRAM], nd->block, BLOCK_PINNED, BLOCK_CACHED);
    }
    s->n_blocks = s->n_sealed = n;
}

status kv_seq_open(struct kv *kv, struct kv_seq *s, const uint64_t salt[2], const uint32_t *tokens,
                   uint32_t n, uint32_t max_rows, bool may_hit, uint32_t *n_hit)
{
    uint32_t rows = kv->cfg.geo.block_rows, max_blocks = blocks_for(kv, max_rows);
    *n_hit = 0;
    *s = (struct kv_seq){.salt = {salt[0], salt[1]}};
    if (max_blocks > kv->cfg.hbm_blocks)
        return err(ERR_FULL, "%u positions need %u blocks, the KV arena has %u", max_rows,
                   max_blocks, kv->cfg.hbm_blocks);
    s->blocks = mem_try_alloc((size_t)max_blocks * sizeof(*s->blocks));
    if (s->blocks == NULL)
        return err(ERR_MEMORY, "no memory for a table of %u blocks", max_blocks);
    s->max_blocks = max_blocks;
    kv->seq_table_bytes += (size_t)max_blocks * sizeof(*s->blocks);
    prefix_root(&kv->prefix, salt, s->tip);
    if (!kv->cfg.prefix_caching || !may_hit || n == 0)
        return OK;

    uint32_t limit = (n - 1) / rows; /* a step needs at least one row to give logits */
    chain_lift(kv, s, chain_find(kv, s, tokens, limit < max_blocks ? limit : max_blocks));
    *n_hit = s->n_sealed * rows;
    kv->queried_tokens += n;
    kv->hit_tokens += *n_hit;
    return OK;
}

status kv_seq_grow(struct kv *kv, struct kv_seq *s, uint32_t n_rows)
{
    uint32_t want = blocks_for(kv, n_rows);
    CHECK(want <= s->max_blocks);
    if (want <= s->n_blocks)
        return OK;
    if (want - s->n_blocks > kv_available(kv))
        return err(ERR_FULL, "%u blocks asked, %u free or evictable", want - s->n_blocks,
                   kv_available(kv));
    while (s->n_blocks < want) {
        block_id id = hbm_take(kv);
        CHECK(id != BLOCK_NONE);
        s->blocks[s->n_blocks++] = id;
    }
    return OK;
}

/* Makes the table name the index's block instead of our copy of it, or the index ours. */
static void block_adopt(struct kv *kv, block_id *own, uint32_t node)
{
    struct prefix_node *nd = node_at(kv, node);
    block_id known = nd->block;
    if (nd->tier == KV_HBM) {
        block_hold(kv, known);
        block_release(kv, *own);
        *own = known;
        return;
    }
    node_repoint(kv, node, KV_HBM, *own);
    block_move(&kv->tier[KV_DRAM], known, BLOCK_CACHED, BLOCK_FREE);
}

static void block_seal(struct kv *kv, struct kv_seq *s, const uint32_t *tokens)
{
    uint32_t i = s->n_sealed;
    struct prefix_key key = {.salt = {s->salt[0], s->salt[1]}, .tokens = tokens};
    key.parent = i == 0 ? BLOCK_NONE : hbm_block(kv, s->blocks[i - 1])->node;
    CHECK(i == 0 || key.parent != BLOCK_NONE); /* rule 1 */
    prefix_next(&kv->prefix, s->tip, tokens, key.hash);
    uint32_t node = prefix_find(&kv->prefix, &key);
    if (node != BLOCK_NONE)
        block_adopt(kv, &s->blocks[i], node);
    else
        hbm_block(kv, s->blocks[i])->node = prefix_add(&kv->prefix, &key, KV_HBM, s->blocks[i]);
    memcpy(s->tip, key.hash, sizeof(s->tip));
}

void kv_seq_seal(struct kv *kv, struct kv_seq *s, const uint32_t *tokens, uint32_t n_rows)
{
    uint32_t rows = kv->cfg.geo.block_rows, full = n_rows / rows;
    CHECK(full <= s->n_blocks);
    for (; s->n_sealed < full; s->n_sealed++)
        if (kv->cfg.prefix_caching)
            block_seal(kv, s, tokens + (size_t)s->n_sealed * rows);
}

void kv_seq_close(struct kv *kv, struct kv_seq *s)
{
    for (uint32_t i = s->n_blocks; i-- > 0;) /* from the end: rule 2 */
        block_release(kv, s->blocks[i]);
    if (s->blocks != NULL)
        kv->seq_table_bytes -= (size_t)s->max_blocks * sizeof(*s->blocks);
    mem_free(s->blocks);
    *s = (struct kv_seq){0};
}

uint32_t kv_available(const struct kv *kv)
{
    return kv->tier[KV_HBM].free.n + kv->tier[KV_HBM].cached.n;
}

void kv_counts(const struct kv *kv, struct kv_counts *out)
{
    *out = (struct kv_counts){.queried_tokens = kv->queried_tokens,
                              .hit_tokens = kv->hit_tokens,
                              .moved_down = kv->moved_down,
                              .moved_up = kv->moved_up};
    out->table_bytes = kv->seq_table_bytes + prefix_bytes(&kv->prefix);
    for (int t = KV_HBM; t <= KV_DRAM; t++) {
        out->total[t] = kv->tier[t].n;
        out->free[t] = kv->tier[t].free.n;
        out->cached[t] = kv->tier[t].cached.n;
        out->table_bytes += kv->tier[t].n * sizeof(struct block);
    }
    out->active = out->total[KV_HBM] - out->free[KV_HBM] - out->cached[KV_HBM];
}

void kv_drop_prefixes(struct kv *kv)
{
    /* DRAM first: its blocks may be children of HBM's, never parents. */
    while (kv->tier[KV_DRAM].cached.n > 0)
        cached_drop(kv, KV_DRAM);
    while (kv->tier[KV_HBM].cached.n > 0)
        cached_drop(kv, KV_HBM);
}

/* The audit. */

/* Nodes and blocks name each other, one to one. */
static void audit_links(const struct kv *kv)
{
    uint32_t n_linked = 0;
    for (int t = KV_HBM; t <= KV_DRAM; t++)
        for (block_id id = 0; id < kv->tier[t].n; id++) {
            uint32_t node = kv->tier[t].all[id].node;
            if (node == BLOCK_NONE)
                continue;
            CHECK(node < kv->prefix.n_nodes);
            const struct prefix_node *nd = &kv->prefix.nodes[node];
            CHECK(nd->used && nd->tier == (uint32_t)t && nd->block == id);
            n_linked++;
        }
    CHECK(n_linked == kv->prefix.n_used);
}

/* Rules 1 and 3: a parent is never below its child, nor less used. */
static void audit_tree(const struct kv *kv)
{
    for (uint32_t i = 0; i < kv->prefix.n_nodes; i++) {
        const struct prefix_node *nd = &kv->prefix.nodes[i];
        if (!nd->used || nd->parent == BLOCK_NONE)
            continue;
        const struct prefix_node *up = &kv->prefix.nodes[nd->parent];
        CHECK(nd->tier == KV_DRAM || up->tier == KV_HBM);
        CHECK(kv->tier[nd->tier].all[nd->block].refs <= kv->tier[up->tier].all[up->block].refs);
    }
}

/* Rule 2: no cached block stands behind its parent. */
static void audit_order(const struct kv *kv, const struct block_tier *t, bool *seen)
{
    for (block_id id = t->cached.first; id != BLOCK_NONE; id = t->all[id].next) {
        uint32_t node = t->all[id].node, parent = kv->prefix.nodes[node].parent;
        CHECK(parent == BLOCK_NONE || !seen[parent]);
        seen[node] = true;
    }
}

static void audit_seq(const struct kv *kv, const struct kv_seq *s, uint32_t *holders)
{
    const struct block *all = kv->tier[KV_HBM].all;
    uint32_t parent = BLOCK_NONE;
    CHECK(s->n_sealed <= s->n_blocks && s->n_blocks <= s->max_blocks);
    for (uint32_t i = 0; i < s->n_blocks; i++) {
        CHECK(s->blocks[i] < kv->tier[KV_HBM].n);
        const struct block *b = &all[s->blocks[i]];
        holders[s->blocks[i]]++;
        CHECK(b->state == BLOCK_ACTIVE);
        if (i >= s->n_sealed || !kv->cfg.prefix_caching) {
            CHECK(b->node == BLOCK_NONE && b->refs == 1); /* what is being written has one owner */
            continue;
        }
        CHECK(b->node != BLOCK_NONE);
        const struct prefix_node *nd = &kv->prefix.nodes[b->node];
        CHECK(nd->parent == parent);
        CHECK(memcmp(nd->salt, s->salt, sizeof(s->salt)) == 0);
        CHECK(i + 1 < s->n_sealed || memcmp(nd->hash, s->tip, sizeof(s->tip)) == 0);
        parent = b->node;
    }
}

void kv_audit(const struct kv *kv, struct kv_seq *const *seqs, uint32_t n_seqs)
{
    const struct block_tier *hbm = &kv->tier[KV_HBM];
    uint32_t *holders = mem_alloc(hbm->n * sizeof(*holders)); /* [hbm->n] */
    bool *seen = mem_alloc(kv->prefix.n_nodes * sizeof(*seen));
    uint64_t table_bytes = 0;

    block_audit(hbm);
    block_audit(&kv->tier[KV_DRAM]);
    prefix_audit(&kv->prefix);
    audit_links(kv);
    audit_tree(kv);
    audit_order(kv, &kv->tier[KV_DRAM], seen); /* first: its parents may be in HBM */
    audit_order(kv, hbm, seen);
    for (uint32_t i = 0; i < n_seqs; i++) {
        audit_seq(kv, seqs[i], holders);
        table_bytes += (size_t)seqs[i]->max_blocks * sizeof(*seqs[i]->blocks);
    }
    for (block_id id = 0; id < hbm->n; id++)
        CHECK(hbm->all[id].refs == holders[id]);
    CHECK(table_bytes == kv->seq_table_bytes);
    mem_free(holders);
    mem_free(seen);
}
