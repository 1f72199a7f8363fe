/* The prefix index: which tokens a block holds, and after which other block.
 *
 * A node is one full block of tokens whose predecessor is its parent node, so the nodes form a tree
 * per salt. A node is looked up by a keyed hash chained over (salt, layout id, tokens so far), and
 * found only if its own tokens, its parent and, at a root, its salt are the ones asked for: by
 * induction the whole prefix is equal. A collision of hashes is therefore a miss, never a wrong
 * page, and costs one more step along a bucket.
 *
 * Nodes name a block (tier and id) and do not care what is in it; cache/kv.c keeps the two records
 * pointing at each other. Every operation is O(1) in the number of nodes. */
#ifndef CACHE_PREFIX_H
#define CACHE_PREFIX_H

#include "cache/block.h"

struct prefix_node {
    uint64_t hash[2]; /* of the chain that ends here */
    uint64_t salt[2];
    uint32_t parent; /* node, or BLOCK_NONE at a root */
    uint32_t n_children;
    uint32_t tier; /* enum kv_tier; valid while in use */
    block_id block;
    uint32_t next; /* in its bucket, or on the list of free nodes */
    bool used;
};

struct prefix {
    struct prefix_node *nodes; /* [n_nodes] */
    uint32_t *tokens;          /* [n_nodes][block_rows] */
    uint32_t *buckets;         /* [n_buckets], first node or BLOCK_NONE */
    uint32_t n_nodes, n_buckets, n_used, free;
    uint32_t block_rows;
    uint64_t secret[2], layout_id;
    uint64_t hash_mask[2]; /* all ones, but for tests that want collisions */
};

struct prefix_config {
    uint32_t n_nodes, block_rows;
    uint64_t secret[2], layout_id;
    uint32_t hash_bits; /* 0: all 128 */
};

/* What a block is looked up by. */
struct prefix_key {
    uint64_t hash[2];
    uint64_t salt[2];
    uint32_t parent;
    const uint32_t *tokens; /* [block_rows] */
};

status prefix_init(struct prefix *p, const struct prefix_config *cfg); /* ERR_MEMORY */
void prefix_fini(struct prefix *p);                                    /* also of a zeroed struct */
size_t prefix_bytes(const struct prefix *p);

/* The hash before any token, and the hash after block_rows more. */
void prefix_root(const struct prefix *p, const uint64_t salt[2], uint64_t out[2]);
void prefix_next(const struct prefix *p, const uint64_t before[2], const uint32_t *tokens,
                 uint64_t out[2]);

uint32_t prefix_find(const struct prefix *p, const struct prefix_key *key); /* or BLOCK_NONE */
/* The key must not be there yet. Room is promised: there are as many nodes as blocks. */
uint32_t prefix_add(struct prefix *p, const struct prefix_key *key, uint32_t tier, block_id block);
void prefix_remove(struct prefix *p, uint32_t node); /* which must have no children */

/* CHECKs that the tree, the buckets and the stored hashes agree. */
void prefix_audit(const struct prefix *p);

#endif
