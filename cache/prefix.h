/* The prefix index: which tokens a block holds, and after which other blocks.
 *
 * A node is one full block of tokens whose predecessor is its parent node, so the nodes form a tree
 * per (salt, layout). A node is looked up by a keyed hash chained over (salt, layout, tokens so far),
 * and found only if its own tokens, its parent and, at a root, its salt and layout are the ones asked
 * for: by induction the whole prefix is equal. A collision of hashes is therefore a miss, never a
 * wrong page, and costs one more step along a bucket.
 *
 * What the text is does not depend on how its rows lie, so what follows hangs on the node and not on
 * a block. A node may have a block in position order; it may be on the way of permuted segments, of
 * several where texts part inside a segment, and each hangs on its own last node. A node with neither
 * lives only until cache/kv_blocks.c has dropped what follows it.
 * Every operation is O(1) in the number of nodes. */
#ifndef CACHE_PREFIX_H
#define CACHE_PREFIX_H

#include "cache/block.h"

/* What a tree is about. */
struct prefix_root {
    uint64_t salt[2];
    uint64_t layout; /* 0: rows of a sequence that never permutes */
};

struct prefix_node {
    uint64_t hash[2]; /* of the chain that ends here */
    struct prefix_root root;
    uint32_t parent;      /* node, or BLOCK_NONE at a root */
    uint32_t first_child; /* or BLOCK_NONE */
    uint32_t next_sibling, prev_sibling;
    uint32_t plain;       /* block with these rows in position order, or BLOCK_NONE */
    uint32_t group;       /* last block of the permuted segment that ends here, or BLOCK_NONE */
    uint32_t n_groups;    /* permuted segments that have these tokens: this node or below */
    uint32_t next;        /* in its bucket, or on the list of free nodes */
    uint32_t next_doomed; /* of those that lost their content (cache/kv_blocks.c) */
    bool used, linked;    /* linked: in bucket and tree */
};

struct prefix {
    struct prefix_node *nodes; /* [n_nodes] */
    uint32_t *tokens;          /* [n_nodes][block_rows] */
    uint32_t *buckets;         /* [n_buckets], first node or BLOCK_NONE */
    uint32_t n_nodes, n_buckets, n_used, free;
    uint32_t block_rows;
    uint64_t secret[2];
    uint64_t hash_mask[2]; /* all ones, but for tests that want collisions */
};

struct prefix_config {
    uint32_t n_nodes, block_rows;
    uint64_t secret[2];
    uint32_t hash_bits; /* 0: all 128 */
};

status prefix_init(struct prefix *p, const struct prefix_config *cfg); /* ERR_MEMORY */
void prefix_fini(struct prefix *p);                                    /* also of a zeroed struct */
size_t prefix_bytes(const struct prefix *p);

/* The node for block_rows more tokens after parent (BLOCK_NONE: at the start); BLOCK_NONE: unknown. */
uint32_t prefix_find(const struct prefix *p, const struct prefix_root *root, uint32_t parent,
                     const uint32_t *tokens);
/* The same, made if it is not there; without content then. Room is promised: every node has content
 * before the next one is made, and there are as many nodes as blocks. */
uint32_t prefix_make(struct prefix *p, const struct prefix_root *root, uint32_t parent,
                     const uint32_t *tokens);
/* Out of bucket and tree; it must have no children. Its record stays until it is freed. */
void prefix_unlink(struct prefix *p, uint32_t node);
void prefix_free(struct prefix *p, uint32_t node);

/* CHECKs that the tree, the buckets and the stored hashes agree, and that every node has content. */
void prefix_audit(const struct prefix *p);

#endif
