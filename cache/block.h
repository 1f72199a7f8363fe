/* One tier's blocks: an arena of equal units, a record for each, a list of the free ones and a list
 * of the cached ones, oldest first.
 *
 * block_move is the only door between states; it keeps the lists, so a block that is on the wrong
 * list, or changes state behind somebody's back, dies there. All operations are O(1). The engine
 * thread owns everything here. */
#ifndef CACHE_BLOCK_H
#define CACHE_BLOCK_H

#include "kernels/backend.h"

enum { BLOCK_NONE = UINT32_MAX }; /* no block, no prefix node */

enum block_state {
    BLOCK_FREE,
    BLOCK_ACTIVE, /* in HBM, referenced by at least one sequence */
    BLOCK_CACHED, /* held by the prefix index alone: may be evicted */
    BLOCK_PINNED, /* in DRAM, about to be copied up: not a victim */
};

struct block {
    uint32_t state;      /* enum block_state */
    uint32_t refs;       /* sequences that name it; 0 unless ACTIVE */
    uint32_t node;       /* its entry in the prefix index, or BLOCK_NONE */
    uint32_t prev, next; /* neighbours on the list of its state */
};

struct block_list {
    uint32_t first, last, n;
};

struct block_tier {
    struct backend *be;
    unsigned char *arena; /* [n][block_bytes]; NULL if n == 0 */
    size_t block_bytes;
    struct block *all; /* [n] */
    uint32_t n;
    struct block_list free;
    struct block_list cached; /* least recently released first */
};

/* ERR_MEMORY: the arena or the records do not fit this machine; nothing is held then. */
status block_tier_init(struct block_tier *t, struct backend *be, uint32_t n, size_t block_bytes);
void block_tier_fini(struct block_tier *t); /* also of a zeroed struct */

void block_move(struct block_tier *t, block_id id, enum block_state from, enum block_state to);

static inline void *block_address(const struct block_tier *t, block_id id)
{
    return t->arena + (size_t)id * t->block_bytes;
}

/* CHECKs that lists, states and records agree. */
void block_audit(const struct block_tier *t);

#endif
