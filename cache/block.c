/* Block records and their two lists (cache/block.h). Free blocks are used again last in, first
 * out, so that a small working set stays small; cached ones queue up oldest first. */
#include "cache/block.h"

static void list_append(struct block_tier *t, struct block_list *l, block_id id)
{
    struct block *b = &t->all[id];
    b->prev = l->last;
    b->next = BLOCK_NONE;
    if (l->last == BLOCK_NONE)
        l->first = id;
    else
        t->all[l->last].next = id;
    l->last = id;
    l->n++;
}

static void list_prepend(struct block_tier *t, struct block_list *l, block_id id)
{
    struct block *b = &t->all[id];
    b->prev = BLOCK_NONE;
    b->next = l->first;
    if (l->first == BLOCK_NONE)
        l->last = id;
    else
        t->all[l->first].prev = id;
    l->first = id;
    l->n++;
}

static void list_remove(struct block_tier *t, struct block_list *l, block_id id)
{
    struct block *b = &t->all[id];
    CHECK(l->n > 0);
    if (b->prev == BLOCK_NONE)
        l->first = b->next;
    else
        t->all[b->prev].next = b->next;
    if (b->next == BLOCK_NONE)
        l->last = b->prev;
    else
        t->all[b->next].prev = b->prev;
    b->prev = b->next = BLOCK_NONE;
    l->n--;
}

status block_tier_init(struct block_tier *t, struct backend *be, uint32_t n, size_t block_bytes)
{
    size_t bytes;
    *t = (struct block_tier){.be = be,
                             .block_bytes = block_bytes,
                             .n = n,
                             .free = {BLOCK_NONE, BLOCK_NONE, 0},
                             .cached = {BLOCK_NONE, BLOCK_NONE, 0}};
    if (n == 0)
        return OK;
    if (__builtin_mul_overflow((size_t)n, block_bytes, &bytes))
        return err(ERR_MEMORY, "%u blocks of %zu bytes are more than an address can name", n,
                   block_bytes);
    t->all = mem_try_alloc((size_t)n * sizeof(*t->all));
    if (t->all == NULL)
        return err(ERR_MEMORY, "no memory for the records of %u blocks", n);
    t->arena = be->ops->alloc(be, bytes);
    if (t->arena == NULL) {
        block_tier_fini(t);
        return ERR_MEMORY; /* the backend has said why */
    }
    for (block_id id = 0; id < n; id++) {
        t->all[id].node = BLOCK_NONE;
        list_append(t, &t->free, id);
    }
    return OK;
}

void block_tier_fini(struct block_tier *t)
{
    if (t->arena != NULL)
        t->be->ops->free(t->be, t->arena, (size_t)t->n * t->block_bytes);
    mem_free(t->all);
    *t = (struct block_tier){0};
}

static bool move_is_legal(enum block_state from, enum block_state to)
{
    static const unsigned char to_of[] = {
        [BLOCK_FREE] = 1 << BLOCK_ACTIVE | 1 << BLOCK_CACHED, /* taken; copied down into */
        [BLOCK_ACTIVE] = 1 << BLOCK_FREE | 1 << BLOCK_CACHED, /* last reader left */
        [BLOCK_CACHED] = 1 << BLOCK_FREE | 1 << BLOCK_ACTIVE  /* evicted; hit */
                         | 1 << BLOCK_PINNED,                 /* hit in DRAM */
        [BLOCK_PINNED] = 1 << BLOCK_FREE | 1 << BLOCK_CACHED, /* copied up; no room above */
    };
    return (to_of[from] >> to & 1) != 0;
}

void block_move(struct block_tier *t, block_id id, enum block_state from, enum block_state to)
{
    CHECK(id < t->n);
    struct block *b = &t->all[id];
    CHECK(b->state == from);
    CHECK(move_is_legal(from, to));
    CHECK(b->refs == 0);
    CHECK(to != BLOCK_FREE || b->node == BLOCK_NONE);

    if (from == BLOCK_FREE)
        list_remove(t, &t->free, id);
    if (from == BLOCK_CACHED)
        list_remove(t, &t->cached, id);
    b->state = to;
    if (to == BLOCK_FREE)
        list_prepend(t, &t->free, id);
    if (to == BLOCK_CACHED)
        list_append(t, &t->cached, id);
}

static void audit_list(const struct block_tier *t, const struct block_list *l,
                       enum block_state state)
{
    uint32_t n = 0, prev = BLOCK_NONE;
    for (block_id id = l->first; id != BLOCK_NONE; id = t->all[id].next) {
        CHECK(n++ < t->n); /* or the list is a ring */
        CHECK(t->all[id].state == state);
        CHECK(t->all[id].prev == prev);
        prev = id;
    }
    CHECK(l->last == prev);
    CHECK(l->n == n);
}

void block_audit(const struct block_tier *t)
{
    uint32_t n_in[4] = {0};
    for (block_id id = 0; id < t->n; id++) {
        const struct block *b = &t->all[id];
        CHECK(b->state <= BLOCK_PINNED);
        n_in[b->state]++;
        CHECK((b->refs > 0) == (b->state == BLOCK_ACTIVE));
        CHECK(b->state != BLOCK_FREE || b->node == BLOCK_NONE);
        CHECK(b->state != BLOCK_CACHED || b->node != BLOCK_NONE);
    }
    CHECK(n_in[BLOCK_FREE] == t->free.n);
    CHECK(n_in[BLOCK_CACHED] == t->cached.n);
    CHECK(n_in[BLOCK_PINNED] == 0); /* only inside kv_seq_open */
    audit_list(t, &t->free, BLOCK_FREE);
    audit_list(t, &t->cached, BLOCK_CACHED);
}
