/* Hash chain, buckets and tree of the prefix index (cache/prefix.h).
 *
 * The hash is SipHash-2-4 with 128 bits of output (Aumasson and Bernstein, 2012) under the
 * process's secret: whoever chooses prompts can neither aim at one bucket nor at another tenant's
 * chain. A block of 16 tokens is ten words, far below the cost of computing one of its rows. */
#include "cache/prefix.h"

#include <string.h>

struct sip {
    uint64_t v0, v1, v2, v3;
};

static inline uint64_t rotl(uint64_t x, int n)
{
    return x << n | x >> (64 - n);
}

static void sip_rounds(struct sip *s, int n)
{
    while (n-- > 0) {
        s->v0 += s->v1;
        s->v1 = rotl(s->v1, 13) ^ s->v0;
        s->v0 = rotl(s->v0, 32);
        s->v2 += s->v3;
        s->v3 = rotl(s->v3, 16) ^ s->v2;
        s->v0 += s->v3;
        s->v3 = rotl(s->v3, 21) ^ s->v0;
        s->v2 += s->v1;
        s->v1 = rotl(s->v1, 17) ^ s->v2;
        s->v2 = rotl(s->v2, 32);
    }
}

static void sip_word(struct sip *s, uint64_t word)
{
    s->v3 ^= word;
    sip_rounds(s, 2);
    s->v0 ^= word;
}

static struct sip sip_start(const uint64_t key[2])
{
    return (struct sip){key[0] ^ 0x736f6d6570736575u, key[1] ^ 0x646f72616e646f6du ^ 0xee,
                        key[0] ^ 0x6c7967656e657261u, key[1] ^ 0x7465646279746573u};
}

static void sip_finish(struct sip *s, uint64_t out[2])
{
    s->v2 ^= 0xee;
    sip_rounds(s, 4);
    out[0] = s->v0 ^ s->v1 ^ s->v2 ^ s->v3;
    s->v1 ^= 0xdd;
    sip_rounds(s, 4);
    out[1] = s->v0 ^ s->v1 ^ s->v2 ^ s->v3;
}

/* The hash after block_rows more tokens. */
static void hash_next(const struct prefix *p, const struct prefix_root *root, uint32_t parent,
                      const uint32_t *tokens, uint64_t out[2])
{
    struct sip s = sip_start(p->secret);
    if (parent == BLOCK_NONE) {
        sip_word(&s, root->salt[0]);
        sip_word(&s, root->salt[1]);
        sip_word(&s, root->layout);
    } else {
        sip_word(&s, p->nodes[parent].hash[0]);
        sip_word(&s, p->nodes[parent].hash[1]);
    }
    /* Messages have one of two lengths, and the longer ones are those at a root, whose match
     * compares salt and layout: that neither is a prefix of the other costs at most a miss. */
    for (uint32_t i = 0; i < p->block_rows; i += 2)
        sip_word(&s, tokens[i] | (uint64_t)tokens[i + 1] << 32);
    sip_finish(&s, out);
    out[0] &= p->hash_mask[0];
    out[1] &= p->hash_mask[1];
}

static uint64_t low_bits(uint32_t n)
{
    return n >= 64 ? UINT64_MAX : ((uint64_t)1 << n) - 1;
}

static void set_hash_bits(struct prefix *p, uint32_t bits)
{
    if (bits == 0)
        bits = 128;
    p->hash_mask[0] = low_bits(bits);
    p->hash_mask[1] = bits > 64 ? low_bits(bits - 64) : 0;
}

/* Half full at most: chains of a bucket stay near one node. */
static uint32_t buckets_for(uint32_t n_nodes)
{
    uint32_t n = 2;
    while (n < n_nodes && n < 1u << 30)
        n *= 2;
    return n * 2;
}

status prefix_init(struct prefix *p, const struct prefix_config *cfg)
{
    *p = (struct prefix){.n_nodes = cfg->n_nodes,
                         .n_buckets = buckets_for(cfg->n_nodes),
                         .free = BLOCK_NONE,
                         .block_rows = cfg->block_rows,
                         .secret = {cfg->secret[0], cfg->secret[1]}};
    set_hash_bits(p, cfg->hash_bits);
    p->nodes = mem_try_alloc((size_t)p->n_nodes * sizeof(*p->nodes));
    p->tokens = mem_try_alloc((size_t)p->n_nodes * p->block_rows * sizeof(*p->tokens));
    p->buckets = mem_try_alloc((size_t)p->n_buckets * sizeof(*p->buckets));
    if (p->nodes == NULL || p->tokens == NULL || p->buckets == NULL) {
        prefix_fini(p);
        return err(ERR_MEMORY, "no memory for the prefix index of %u blocks", cfg->n_nodes);
    }
    for (uint32_t i = 0; i < p->n_buckets; i++)
        p->buckets[i] = BLOCK_NONE;
    for (uint32_t i = p->n_nodes; i-- > 0;) {
        p->nodes[i].next = p->free;
        p->free = i;
    }
    return OK;
}

void prefix_fini(struct prefix *p)
{
    mem_free(p->nodes);
    mem_free(p->tokens);
    mem_free(p->buckets);
    *p = (struct prefix){0};
}

size_t prefix_bytes(const struct prefix *p)
{
    return p->n_nodes * (sizeof(*p->nodes) + p->block_rows * sizeof(*p->tokens)) +
           p->n_buckets * sizeof(*p->buckets);
}

static uint32_t *bucket_of(const struct prefix *p, const uint64_t hash[2])
{
    return &p->buckets[hash[0] & (p->n_buckets - 1)];
}

static const uint32_t *tokens_of(const struct prefix *p, uint32_t node)
{
    return p->tokens + (size_t)node * p->block_rows;
}

static bool same_root(const struct prefix_root *a, const struct prefix_root *b)
{
    return a->salt[0] == b->salt[0] && a->salt[1] == b->salt[1] && a->layout == b->layout;
}

static uint32_t find_hashed(const struct prefix *p, const struct prefix_root *root, uint32_t parent,
                            const uint32_t *tokens, const uint64_t hash[2])
{
    for (uint32_t n = *bucket_of(p, hash); n != BLOCK_NONE; n = p->nodes[n].next) {
        const struct prefix_node *nd = &p->nodes[n];
        if (nd->hash[0] == hash[0] && nd->hash[1] == hash[1] && nd->parent == parent &&
            same_root(&nd->root, root) &&
            memcmp(tokens_of(p, n), tokens, p->block_rows * sizeof(*tokens)) == 0)
            return n;
    }
    return BLOCK_NONE;
}

uint32_t prefix_find(const struct prefix *p, const struct prefix_root *root, uint32_t parent,
                     const uint32_t *tokens)
{
    uint64_t hash[2];
    hash_next(p, root, parent, tokens, hash);
    return find_hashed(p, root, parent, tokens, hash);
}

static void link_child(struct prefix *p, uint32_t node)
{
    struct prefix_node *nd = &p->nodes[node];
    if (nd->parent == BLOCK_NONE)
        return;
    struct prefix_node *up = &p->nodes[nd->parent];
    nd->next_sibling = up->first_child;
    if (up->first_child != BLOCK_NONE)
        p->nodes[up->first_child].prev_sibling = node;
    up->first_child = node;
}

uint32_t prefix_make(struct prefix *p, const struct prefix_root *root, uint32_t parent,
                     const uint32_t *tokens)
{
    uint64_t hash[2];
    hash_next(p, root, parent, tokens, hash);
    uint32_t node = find_hashed(p, root, parent, tokens, hash);
    if (node != BLOCK_NONE)
        return node;
    node = p->free;
    CHECK(node != BLOCK_NONE);
    struct prefix_node *nd = &p->nodes[node];
    CHECK(!nd->used);
    p->free = nd->next;
    p->n_used++;

    uint32_t *bucket = bucket_of(p, hash);
    *nd = (struct prefix_node){.hash = {hash[0], hash[1]},
                               .root = *root,
                               .parent = parent,
                               .first_child = BLOCK_NONE,
                               .next_sibling = BLOCK_NONE,
                               .prev_sibling = BLOCK_NONE,
                               .plain = BLOCK_NONE,
                               .group = BLOCK_NONE,
                               .next = *bucket,
                               .used = true,
                               .linked = true};
    *bucket = node;
    memcpy(p->tokens + (size_t)node * p->block_rows, tokens, p->block_rows * sizeof(*tokens));
    link_child(p, node);
    return node;
}

static void unlink_child(struct prefix *p, uint32_t node)
{
    struct prefix_node *nd = &p->nodes[node];
    if (nd->parent == BLOCK_NONE)
        return;
    if (nd->prev_sibling != BLOCK_NONE)
        p->nodes[nd->prev_sibling].next_sibling = nd->next_sibling;
    else
        p->nodes[nd->parent].first_child = nd->next_sibling;
    if (nd->next_sibling != BLOCK_NONE)
        p->nodes[nd->next_sibling].prev_sibling = nd->prev_sibling;
}

void prefix_unlink(struct prefix *p, uint32_t node)
{
    struct prefix_node *nd = &p->nodes[node];
    CHECK(nd->used && nd->linked);
    CHECK(nd->first_child == BLOCK_NONE); /* or the children could never be found again */
    unlink_child(p, node);
    uint32_t *link = bucket_of(p, nd->hash);
    while (*link != node) {
        CHECK(*link != BLOCK_NONE);
        link = &p->nodes[*link].next;
    }
    *link = nd->next;
    nd->linked = false;
}

void prefix_free(struct prefix *p, uint32_t node)
{
    struct prefix_node *nd = &p->nodes[node];
    CHECK(nd->used && !nd->linked);
    CHECK(nd->plain == BLOCK_NONE && nd->group == BLOCK_NONE && nd->n_groups == 0);
    nd->used = false;
    nd->next = p->free;
    p->free = node;
    p->n_used--;
}

static uint32_t audit_children(const struct prefix *p, uint32_t node)
{
    uint32_t n = 0, prev = BLOCK_NONE;
    for (uint32_t c = p->nodes[node].first_child; c != BLOCK_NONE; c = p->nodes[c].next_sibling) {
        CHECK(n++ < p->n_nodes);
        CHECK(p->nodes[c].used && p->nodes[c].parent == node);
        CHECK(p->nodes[c].prev_sibling == prev);
        prev = c;
    }
    return n;
}

static void audit_node(const struct prefix *p, uint32_t node)
{
    const struct prefix_node *nd = &p->nodes[node];
    CHECK(nd->linked);
    CHECK(nd->plain != BLOCK_NONE || nd->n_groups > 0);
    if (nd->parent != BLOCK_NONE) {
        CHECK(p->nodes[nd->parent].used);
        CHECK(same_root(&p->nodes[nd->parent].root, &nd->root));
    }
    uint64_t hash[2];
    hash_next(p, &nd->root, nd->parent, tokens_of(p, node), hash);
    CHECK(memcmp(hash, nd->hash, sizeof(hash)) == 0);
    /* reachable, and the only one of its kind */
    CHECK(find_hashed(p, &nd->root, nd->parent, tokens_of(p, node), hash) == node);
}

void prefix_audit(const struct prefix *p)
{
    uint32_t n_used = 0, n_free = 0, n_with_parent = 0, n_children = 0;
    for (uint32_t i = 0; i < p->n_nodes; i++) {
        if (!p->nodes[i].used)
            continue;
        audit_node(p, i);
        n_used++;
        n_with_parent += p->nodes[i].parent != BLOCK_NONE;
        n_children += audit_children(p, i);
    }
    for (uint32_t i = p->free; i != BLOCK_NONE; i = p->nodes[i].next) {
        CHECK(!p->nodes[i].used);
        CHECK(n_free++ < p->n_nodes);
    }
    CHECK(n_used == p->n_used);
    CHECK(n_used + n_free == p->n_nodes);
    CHECK(n_with_parent == n_children);
}
