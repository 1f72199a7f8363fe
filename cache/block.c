/* Places, block records and their lists (cache/block.h). */
#include "cache/block.h"

/* ---- places ---- */

/* Later ones below earlier ones: what is lower goes first. */
static void add_ready(struct places *p, uint32_t n_ready)
{
    for (uint32_t id = n_ready; id-- > p->n_ready;)
        p->free[p->n_free++] = id;
    p->n_ready = n_ready;
}

status places_init(struct places *p, struct backend *be, enum block_tier tier, uint32_t n,
                   size_t unit_bytes)
{
    size_t bytes;
    *p = (struct places){.be = be, .unit_bytes = unit_bytes, .n = n};
    p->host = tier == TIER_DRAM && be->ops->alloc_host != NULL;
    if (n == 0)
        return OK;
    if (__builtin_mul_overflow((size_t)n, unit_bytes, &bytes))
        return err(ERR_MEMORY, "%u blocks of %zu bytes are more than an address can name", n,
                   unit_bytes);
    p->free = mem_try_alloc((size_t)n * sizeof(*p->free));
    if (p->free == NULL)
        return err(ERR_MEMORY, "no memory for the list of %u blocks", n);
    p->arena = p->host ? be->ops->alloc_host(be, bytes) : be->ops->alloc(be, bytes);
    if (p->arena == NULL) {
        places_fini(p);
        return ERR_MEMORY; /* the backend has said why */
    }
    p->arena_bytes = bytes;
    if (!p->host)
        add_ready(p, n);
    return OK;
}

void places_poll(struct places *p, struct host_progress *out)
{
    uint64_t bytes = (uint64_t)p->n * p->unit_bytes;
    *out = (struct host_progress){.ready = bytes, .bytes = bytes, .ended = true};
    if (!p->host || p->arena == NULL)
        return;
    p->be->ops->host_progress(p->be, p->arena, out);
    uint64_t ready = out->ready / p->unit_bytes;
    if (ready > p->n_ready)
        add_ready(p, ready < p->n ? (uint32_t)ready : p->n);
    if (out->ended)
        p->n = p->n_ready;
}

void places_fini(struct places *p)
{
    if (p->arena != NULL && p->host)
        p->be->ops->free_host(p->be, p->arena, p->arena_bytes);
    else if (p->arena != NULL)
        p->be->ops->free(p->be, p->arena, p->arena_bytes);
    mem_free(p->free);
    *p = (struct places){0};
}

block_id places_take(struct places *p)
{
    return p->n_free > 0 ? p->free[--p->n_free] : BLOCK_NONE;
}

void places_give(struct places *p, block_id id)
{
    CHECK(id < p->n_ready && p->n_free < p->n_ready);
    p->free[p->n_free++] = id;
}

/* ---- lists ---- */

void block_list_append(struct blocks *bs, struct block_list *l, enum block_link kind, uint32_t id)
{
    struct block *b = &bs->all[id];
    CHECK((b->on >> kind & 1) == 0);
    b->on = (uint8_t)(b->on | 1u << kind);
    b->link[kind] = (struct block_neighbours){l->last, BLOCK_NONE};
    if (l->last == BLOCK_NONE)
        l->first = id;
    else
        bs->all[l->last].link[kind].next = id;
    l->last = id;
    l->n++;
}

static void list_prepend(struct blocks *bs, struct block_list *l, enum block_link kind, uint32_t id)
{
    struct block *b = &bs->all[id];
    CHECK((b->on >> kind & 1) == 0);
    b->on = (uint8_t)(b->on | 1u << kind);
    b->link[kind] = (struct block_neighbours){BLOCK_NONE, l->first};
    if (l->first == BLOCK_NONE)
        l->last = id;
    else
        bs->all[l->first].link[kind].prev = id;
    l->first = id;
    l->n++;
}

void block_list_remove(struct blocks *bs, struct block_list *l, enum block_link kind, uint32_t id)
{
    struct block *b = &bs->all[id];
    struct block_neighbours at = b->link[kind];
    CHECK((b->on >> kind & 1) == 1 && l->n > 0);
    *(at.prev == BLOCK_NONE ? &l->first : &bs->all[at.prev].link[kind].next) = at.next;
    *(at.next == BLOCK_NONE ? &l->last : &bs->all[at.next].link[kind].prev) = at.prev;
    b->on = (uint8_t)(b->on & ~(1u << kind));
    l->n--;
}

/* ---- records ---- */

status blocks_init(struct blocks *bs, uint32_t n)
{
    const struct block_list empty = {BLOCK_NONE, BLOCK_NONE, 0};
    *bs = (struct blocks){.n = n, .twins = empty, .behind = empty, .streams = {empty, empty}};
    for (int i = 0; i < BLOCK_STATES; i++)
        bs->in[i] = empty;
    bs->all = mem_try_alloc((size_t)n * sizeof(*bs->all));
    if (bs->all == NULL)
        return err(ERR_MEMORY, "no memory for the records of %u blocks", n);
    for (uint32_t id = 0; id < n; id++) {
        struct block *b = &bs->all[id];
        b->node = b->group = b->before = b->record = BLOCK_NONE;
        for (int c = 0; c < LANE_CLASSES; c++)
            b->at[c][TIER_HBM] = b->at[c][TIER_DRAM] = BLOCK_NONE;
        block_list_append(bs, &bs->in[BLOCK_FREE], LINK_STATE, id);
    }
    return OK;
}

void blocks_fini(struct blocks *bs)
{
    mem_free(bs->all);
    *bs = (struct blocks){0};
}

uint32_t block_next(const struct blocks *bs)
{
    CHECK(bs->in[BLOCK_FREE].n > 0);
    return bs->in[BLOCK_FREE].first;
}

static void check_empty(const struct block *b)
{
    CHECK(b->refs == 0 && b->pins == 0 && b->on == 0 && b->held == 0);
    CHECK(b->node == BLOCK_NONE && b->group == BLOCK_NONE && b->before == BLOCK_NONE &&
          b->record == BLOCK_NONE);
    for (int c = 0; c < LANE_CLASSES; c++)
        for (int t = 0; t < TIERS; t++)
            CHECK(b->at[c][t] == BLOCK_NONE && b->need[c][t] == 0);
}

void block_move(struct blocks *bs, uint32_t id, enum block_state to)
{
    CHECK(id < bs->n);
    struct block *b = &bs->all[id];
    enum block_state from = (enum block_state)b->state;
    if (from == to)
        return;
    CHECK(from != BLOCK_FREE || to == BLOCK_ACTIVE); /* what is taken has a reader first */
    if (from != BLOCK_ACTIVE)
        block_list_remove(bs, &bs->in[from], LINK_STATE, id);
    b->state = (uint8_t)to;
    if (to == BLOCK_FREE) {
        check_empty(b);
        b->form = FORM_PLAIN;
        b->keeps_stream = b->sealed = false;
        list_prepend(bs, &bs->in[to], LINK_STATE, id);
    } else if (to != BLOCK_ACTIVE) {
        CHECK(b->refs == 0 && b->pins == 0 && b->node != BLOCK_NONE);
        block_list_append(bs, &bs->in[to], LINK_STATE, id);
    }
}

/* Calls nothing: what stands on a list is counted, and must be what the list is for. */
static void audit_list(const struct blocks *bs, const struct block_list *l, enum block_link kind)
{
    uint32_t n = 0, prev = BLOCK_NONE;
    for (uint32_t id = l->first; id != BLOCK_NONE; id = bs->all[id].link[kind].next) {
        CHECK(n++ < bs->n); /* or the list is a ring */
        CHECK(bs->all[id].on >> kind & 1);
        CHECK(bs->all[id].link[kind].prev == prev);
        if (kind == LINK_STATE)
            CHECK(l == &bs->in[bs->all[id].state]);
        prev = id;
    }
    CHECK(l->last == prev);
    CHECK(l->n == n);
}

void blocks_audit(const struct blocks *bs)
{
    uint32_t n_in[BLOCK_STATES] = {0}, n_on[LINKS] = {0};
    for (uint32_t id = 0; id < bs->n; id++) {
        const struct block *b = &bs->all[id];
        CHECK(b->state < BLOCK_STATES);
        n_in[b->state]++;
        for (int k = 0; k < LINKS; k++)
            n_on[k] += b->on >> k & 1;
        CHECK(b->state == BLOCK_ACTIVE || (b->refs == 0 && b->pins == 0));
        if (b->state == BLOCK_FREE)
            CHECK(b->node == BLOCK_NONE && b->refs == 0);
    }
    for (int i = 0; i < BLOCK_STATES; i++) {
        CHECK(i == BLOCK_ACTIVE || n_in[i] == bs->in[i].n);
        audit_list(bs, &bs->in[i], LINK_STATE);
    }
    CHECK(n_on[LINK_STATE] + n_in[BLOCK_ACTIVE] == bs->n);
    CHECK(n_on[LINK_TWIN] == bs->twins.n);
    CHECK(n_on[LINK_STREAM] == bs->streams[TIER_HBM].n + bs->streams[TIER_DRAM].n);
    CHECK(n_on[LINK_BEHIND] == bs->behind.n);
    audit_list(bs, &bs->twins, LINK_TWIN);
    audit_list(bs, &bs->behind, LINK_BEHIND);
    audit_list(bs, &bs->streams[TIER_HBM], LINK_STREAM);
    audit_list(bs, &bs->streams[TIER_DRAM], LINK_STREAM);
}
