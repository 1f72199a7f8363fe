/* Records of logical blocks and the lists they stand on; arenas of places.
 *
 * A *place* is one unit of the arena of a lane class in a tier. A logical block names at most one
 * place per (class, tier), counts the sequences that need it there, and stands on a list for each
 * reason why one of its places may be taken from it. Nothing here decides anything: cache/kv_blocks.c
 * does, and block_move is the only door between states, so that a block that changes state behind
 * somebody's back dies there. All operations are O(1). The engine thread owns everything here. */
#ifndef CACHE_BLOCK_H
#define CACHE_BLOCK_H

#include "kernels/backend.h"

enum { BLOCK_NONE = UINT32_MAX }; /* no block, place, prefix node or record */

enum block_tier { TIER_HBM, TIER_DRAM, TIERS }; /* as enum kv_tier */

/* ---- places ---- */

struct places {
    struct backend *be;
    unsigned char *arena; /* [n][unit_bytes]; NULL if n == 0 */
    size_t unit_bytes, arena_bytes;
    uint32_t *free; /* [n_free], used last in first out, so that a small working set stays small */
    uint32_t n, n_free;
    uint32_t n_ready; /* places that there are by now: a DRAM arena may still be growing */
    bool host;        /* the arena is alloc_host's */
};

/* ERR_MEMORY: the arena or the list does not fit this machine; nothing is held then. */
status places_init(struct places *p, struct backend *be, enum block_tier tier, uint32_t n,
                   size_t unit_bytes);
/* Adds what has become ready to the free ones; n falls to that where no more will come. */
void places_poll(struct places *p, struct host_progress *out);
void places_fini(struct places *p);     /* also of a zeroed struct */
block_id places_take(struct places *p); /* BLOCK_NONE: none is free */
void places_give(struct places *p, block_id id);

static inline void *places_address(const struct places *p, block_id id)
{
    return p->arena + (size_t)id * p->unit_bytes;
}

/* ---- records ---- */

enum block_state {
    BLOCK_FREE,        /* the record names nothing */
    BLOCK_ACTIVE,      /* referenced by at least one sequence, or pinned */
    BLOCK_CACHED_HBM,  /* held by the prefix index alone, all of it in HBM (a twin is allowed) */
    BLOCK_CACHED_DRAM, /* held by the prefix index alone, nothing in HBM */
    BLOCK_STATES,
};

enum block_form {
    FORM_PLAIN, /* rows in position order */
    FORM_GROUP, /* one of the blocks of a permuted segment, in the index */
};

/* A block stands on at most one list of each kind. */
enum block_link {
    LINK_STATE,  /* free, or cached in HBM or DRAM */
    LINK_TWIN,   /* SPARSE part in both tiers, needed in HBM at most: DRAM's may be taken */
    LINK_STREAM, /* a STREAM part that no sequence needs, kept for hits: may be taken */
    LINK_BEHIND, /* rows that will not change, SPARSE part in HBM only: may be written behind */
    LINKS,
};

struct block_neighbours {
    uint32_t prev, next;
};

struct block {
    block_id at[LANE_CLASSES][TIERS];   /* place, or BLOCK_NONE */
    uint32_t need[LANE_CLASSES][TIERS]; /* sequences that need it there */
    uint32_t refs;                      /* sequences that name it */
    uint32_t pins;                      /* operations under way that must find all its places */
    uint32_t node;                      /* its entry in the prefix index, or BLOCK_NONE */
    uint32_t group;                     /* FORM_GROUP: the last block of its segment */
    uint32_t held;       /* of a group's last block: members with references or pins */
    uint32_t before;     /* FORM_GROUP: the block before it in its segment */
    uint32_t record;     /* first digest record; of a segment's last block only */
    uint8_t state, form; /* enum block_state, block_form */
    uint8_t on;          /* bit l: stands on a list of kind l */
    uint8_t stream_tier; /* of the list of kind LINK_STREAM that it stands on */
    bool sealed;         /* its rows will not be written again: a twin stays true */
    bool keeps_stream;   /* a hit at its segment's end needs its STREAM part */
    struct block_neighbours link[LINKS];
};

struct block_list {
    uint32_t first, last, n;
};

struct blocks {
    struct block *all; /* [n] */
    uint32_t n;
    struct block_list
        in[BLOCK_STATES];             /* ACTIVE: not used; cached: least recently released first */
    struct block_list twins, behind;  /* oldest first */
    struct block_list streams[TIERS]; /* oldest first */
};

status blocks_init(struct blocks *bs, uint32_t n); /* ERR_MEMORY */
void blocks_fini(struct blocks *bs);               /* also of a zeroed struct */

void block_list_append(struct blocks *bs, struct block_list *l, enum block_link kind, uint32_t id);
void block_list_remove(struct blocks *bs, struct block_list *l, enum block_link kind, uint32_t id);

/* A free record with nothing in it; CHECKs that there is one. It is FREE until it is moved. */
uint32_t block_next(const struct blocks *bs);
void block_move(struct blocks *bs, uint32_t id, enum block_state to);

/* CHECKs that lists, states and records agree. */
void blocks_audit(const struct blocks *bs);

#endif
