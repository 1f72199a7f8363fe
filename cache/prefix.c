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

void prefix_root(const struct prefix *p, const uint64_t salt[2], uint64_t out[2])
{
    struct sip s = sip_start(p->secret);
    sip_word(&s, salt[0]);
    sip_word(&s, salt[1]);
    sip_word(&s, p->layout_id);
    sip_finish(&s, out);
    out[0] &= p->hash_mask[0];
    out[1] &= p->hash_mask[1];
}

void prefix_next(const struct prefix *p, const uint64_t before[2], const uint32_t *tokens,
                 uint64_t out[2])
{
    struct sip s = sip_start(p->secret);
    sip_word(&s, before[0]);
    sip_word(&s, before[1]);
    /* Every message of one process has the same length, so none is a prefix of another. */
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
                         .secret = {cfg->secret[0], cfg->secret[1]},
                         .layout_id = cfg->layout_id};
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

static bool matches(const struct prefix *p, uint32_t node, const struct prefix_key *key)
{
    const struct prefix_node *nd = &p->nodes[node];
    return nd->hash[0] == key->hash[0] && nd->hash[1] == key->hash[1] &&
           nd->parent == key->parent && nd->salt[0] == key->salt[0] &&
           nd->salt[1] == key->salt[1] &&
           memcmp(tokens_of(p, node), key->tokens, p->block_rows * sizeof(*key->tokens)) == 0;
}

uint32_t prefix_find(const struct prefix *p, const struct prefix_key *key)
{
    uint32_t node = *bucket_of(p, key->hash);
    while (node != BLOCK_NONE && !matches(p, node, key))
        node = p->nodes[node].next;
    return node;
}

uint32_t prefix_add(struct prefix *p, const struct prefix_key *key, uint32_t tier, block_id block)
{
    uint32_t node = p->free;
    CHECK(node != BLOCK_NONE); /* a node holds a block, and there are as many of both */
    struct prefix_node *nd = &p->nodes[node];
    CHECK(!nd->used);
    p->free = nd->next;
    p->n_used++;

    uint32_t *bucket = bucket_of(p, key->hash);
    *nd = (struct prefix_node){.hash = {key->hash[0], key->hash[1]},
                               .salt = {key->salt[0], key->salt[1]},
                               .parent = key->parent,
                               .tier = tier,
                               .block = block,
                               .next = *bucket,
                               .used = true};
    *bucket = node;
    memcpy(p->tokens + (size_t)node * p->block_rows, key->tokens,
           p->block_rows * sizeof(*key->tokens));
    if (key->parent != BLOCK_NONE)
        p->nodes[key->parent].n_children++;
    return node;
}

void prefix_remove(struct prefix *p, uint32_t node)
{
    struct prefix_node *nd = &p->nodes[node];
    CHECK(nd->used);
    CHECK(nd->n_children == 0); /* or the children could never be found again */
    if (nd->parent != BLOCK_NONE) {
        CHECK(p->nodes[nd->parent].n_children > 0);
        p->nodes[nd->parent].n_children--;
    }
    uint32_t *link = bucket_of(p, nd->hash);
    while (*link != node) {
        CHECK(*link != BLOCK_NONE);
        link = &p->nodes[*link].next;
    }
    *link = nd->next;
    nd->used = false;
    nd->next = p->free;
    p->free = node;
    p->n_used--;
}

static void audit_node(const struct prefix *p, uint32_t node)
{
    const struct prefix_node *nd = &p->nodes[node];
    uint64_t before[2], hash[2];
    if (nd->parent == BLOCK_NONE) {
        prefix_root(p, nd->salt, before);
    } else {
        const struct prefix_node *parent = &p->nodes[nd->parent];
        CHECK(parent->used);
        CHECK(parent->salt[0] == nd->salt[0] && parent->salt[1] == nd->salt[1]);
        memcpy(before, parent->hash, sizeof(before));
    }
    prefix_next(p, before, tokens_of(p, node), hash);
    CHECK(memcmp(hash, nd->hash, sizeof(hash)) == 0);

    struct prefix_key key = {.hash = {nd->hash[0], nd->hash[1]},
                             .salt = {nd->salt[0], nd->salt[1]},
                             .parent = nd->parent,
                             .tokens = tokens_of(p, node)};
    CHECK(prefix_find(p, &key) == node); /* reachable, and the only one of its kind */
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
        n_children += p->nodes[i].n_children;
    }
    for (uint32_t i = p->free; i != BLOCK_NONE; i = p->nodes[i].next) {
        CHECK(!p->nodes[i].used);
        CHECK(n_free++ < p->n_nodes);
    }
    CHECK(n_used == p->n_used);
    CHECK(n_used + n_free == p->n_nodes);
    CHECK(n_with_parent == n_children);
}
