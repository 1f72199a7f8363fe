/* What the files of the KV substrate (cache/kv*.c) share. Nobody else includes this.
 *
 *   block.c       places, block records, lists
 *   prefix.c      the index: tokens -> blocks
 *   kv_blocks.c   what holds a block where, what may be taken, what is copied
 *   kv.c          process: create, counts
 *   kv_seq.c      sequences: grow, share, close
 *   kv_open.c     the hit: find, lift, unpermute
 *   kv_seal.c     segments and digest records
 *   kv_spill.c    residence
 *   kv_lay.c      what prompts computed layer by layer ask for
 *   kv_audit.c    every invariant
 *
 * The rules that the audit checks:
 *
 *   1. A place is named by one block, or is a slot of one hot set, or is lent, or is free.
 *   2. A block has a place wherever a sequence needs it, and each of its parts (SPARSE, DENSE) has one
 *      somewhere. What nobody needs is on a list from which it may be taken, or is given back.
 *   3. The leading n_shared blocks of a sequence are the index's own: block i is content of a node
 *      whose parent has block i - 1 as content. So who holds a block holds its ancestors too, and
 *      nothing of what hangs below a block that nobody holds is held.
 *   4. Blocks behind n_shared have one owner and are not in the index.
 *
 * A sequence gives its blocks back from its end to its start, so on the lists of cached blocks, oldest
 * first, children stand before parents, and taking the first is LRU by leaf. Where tiers or forms mix
 * so that a parent comes first, what hangs below it is dropped with it.
 *
 * Copies go through the backend's queue, in order: a place may be used again as soon as its copy is
 * queued, because whatever overwrites it is queued behind. */
#ifndef CACHE_KV_IMPL_H
#define CACHE_KV_IMPL_H

#include "cache/kv.h"
#include "cache/prefix.h"
#include "cache/residency.h"

enum { MAX_SEGMENT_BLOCKS = SEGMENT_ROWS / 8 }; /* R is 8 at least */

/* A set of (class, tier): where a sequence needs a block. */
typedef uint32_t part_mask;
#define PART(c, t) (1u << ((c)*TIERS + (t)))

/* A digest record: of the segment whose last block is `block`. */
struct record {
    uint64_t digest_id;
    bool has_map;   /* of a permuting layout */
    uint32_t block; /* BLOCK_NONE: free */
    uint32_t refs;  /* sequences that use it */
    uint32_t next;  /* of the same block; on the free list */
};

struct kv {
    struct backend *be;
    struct kv_config cfg; /* cfg.geo.lanes is ours */
    struct lane_place *lanes;
    struct kv_memory memory;
    struct places place[LANE_CLASSES][TIERS];
    struct blocks blocks;
    struct prefix prefix;
    struct record *records; /* [cfg.n_records] */
    uint32_t free_record, n_records_used, n_maps_used;
    uint32_t doomed;      /* nodes without content, to be dropped with what hangs below */
    enum lane_class main; /* what blocks are counted in: SPARSE, or DENSE, or STREAM */
    uint32_t segment_blocks, stream_sink_blocks;
    /* The seal that is open: its arrays and the new blocks. */
    struct kv_seq *sealing;
    block_id seal_from[MAX_SEGMENT_BLOCKS], seal_to[MAX_SEGMENT_BLOCKS];
    uint32_t seal_fresh[MAX_SEGMENT_BLOCKS];
    bool seal_in_place;
    struct kv_loan loan; /* zeros: none */
    struct leaf_pool *leaves;
    uint64_t hot_bytes; /* of hot sets and their slots */
    uint32_t *ids;      /* [ids_capacity] scratch: as long as the longest table */
    uint32_t ids_capacity;
    struct kv_counts counts; /* what is counted as it happens; the rest is filled in kv_counts */
};

struct kv_seq_private {
    uint32_t *blocks;              /* [capacity], n_blocks in use: records */
    block_id *table[LANE_CLASSES]; /* [capacity]; NULL: the class is not used */
    uint32_t *records;             /* [capacity / segment_blocks + 1] */
    uint32_t capacity;
    uint32_t ring_first;           /* blocks from here on, and the sinks', are in the STREAM ring */
    uint32_t step_begin, step_end; /* rows of the step that the last grow was for */
    /* SPILLED only. */
    block_id *slots; /* [slot_capacity], n_slots in use: places of HBM */
    uint32_t slot_capacity, n_steps;
    uint32_t n_covered; /* segments that the hot set has leaves for */
    bool cover_stale;   /* a sealed block has another place in DRAM than the hot set knows */
    uint64_t hot_bytes;
};

/* ---- kv_blocks.c ---- */

static inline struct block *kv_block(const struct kv *kv, uint32_t id)
{
    return &kv->blocks.all[id];
}

static inline bool kv_uses(const struct kv *kv, enum lane_class c)
{
    return kv->cfg.geo.block_bytes[c] > 0;
}

/* Places of a class that kv_part_make can have: free, or taken from who does not need them. */
uint32_t kv_places_available(const struct kv *kv, enum lane_class c, enum kv_tier t);
/* The block's place there is among them. */
bool kv_part_is_spare(const struct block *b, enum lane_class c, enum kv_tier t);
/* A place of the arena, made free if it must be; BLOCK_NONE: everything is needed. */
block_id kv_place_take(struct kv *kv, enum lane_class c, enum kv_tier t);
/* Gives the block a place there, with the content it has elsewhere, if any. The caller has seen that
 * one is available, and holds or pins the block. */
void kv_part_make(struct kv *kv, uint32_t id, enum lane_class c, enum kv_tier t);
/* A block with one reference and a place wherever the mask says. */
uint32_t kv_block_take(struct kv *kv, part_mask needs);
/* One more sequence names it and needs it there; all places must be there already. */
void kv_block_hold(struct kv *kv, uint32_t id, part_mask needs);
void kv_block_release(struct kv *kv, uint32_t id, part_mask needs);
/* The same sequence needs it elsewhere. */
void kv_block_change(struct kv *kv, uint32_t id, part_mask from, part_mask to);
/* All other sequences that name it have it in DRAM (they are paused). */
bool kv_block_can_split(const struct kv *kv, uint32_t id);
/* Then: what one sequence needs in HBM becomes a block of its own, with the same content. */
uint32_t kv_block_split(struct kv *kv, uint32_t id, part_mask needs);
/* Keeps every place of it where it is. */
void kv_block_pin(struct kv *kv, uint32_t id);
void kv_block_unpin(struct kv *kv, uint32_t id);
/* `id` takes over the places that it lacks from `own`, whose content is the same. own keeps its
 * references: the caller releases them with no needs left. */
void kv_block_absorb(struct kv *kv, uint32_t id, uint32_t own, part_mask needs);
/* Its rows will not change any more. */
void kv_block_sealed(struct kv *kv, uint32_t id);
/* Writes it behind; a place of DRAM is free. */
void kv_twin_make(struct kv *kv, uint32_t id);
/* What is in DRAM is about to be out of date: nobody may need it. */
void kv_twin_forget(struct kv *kv, uint32_t id);
/* Copies one block's parts of a class to another block. */
void kv_part_copy(struct kv *kv, enum lane_class c, uint32_t from, uint32_t to);
/* Drops the oldest cached block, with what hangs below; false: there is none. */
bool kv_drop_oldest(struct kv *kv);
/* Puts it where it belongs after its references, needs or node changed. */
void kv_block_settle(struct kv *kv, uint32_t id);
void kv_index_attach_plain(struct kv *kv, uint32_t node, uint32_t id);
/* blocks[segment_blocks] become a group whose last node this is. */
void kv_index_attach_group(struct kv *kv, uint32_t last, const uint32_t *blocks);
void kv_index_detach(struct kv *kv, uint32_t id); /* alone; its node must not stay empty */
/* Out of the index, with what hangs below (nobody's): it has one reader, who will write it again. */
void kv_index_withdraw(struct kv *kv, uint32_t id);
/* A group's blocks, by its last one, first to last. */
void kv_group_blocks(const struct kv *kv, uint32_t last, uint32_t *out);

/* ---- kv_seq.c ---- */

static inline uint32_t kv_blocks_for(const struct kv *kv, uint32_t n_rows)
{
    uint32_t rows = kv->cfg.geo.block_rows;
    return n_rows / rows + (n_rows % rows != 0);
}

static inline uint32_t kv_sealed_blocks(const struct kv *kv, const struct kv_seq *s)
{
    return s->n_segments * kv->segment_blocks;
}

static inline bool kv_permutes(const struct kv_seq *s)
{
    return s->layout.layout_id != 0;
}

/* The layout of a prefix also names what its pages keep. */
static inline struct prefix_root kv_root(const struct kv *kv, const struct kv_seq *s)
{
    const uint64_t type = (uint64_t)kv->cfg.geo.type << 62;
    return (struct prefix_root){.salt = {s->salt[0], s->salt[1]},
                                .layout = s->layout.layout_id ^ type};
}

/* Where s, in this residence and with so many sealed blocks, needs its block i. */
part_mask kv_seq_needs(const struct kv *kv, const struct kv_seq *s, uint32_t i,
                       enum kv_residence residence);
/* Makes the tables name block i's places. */
void kv_seq_entry(struct kv *kv, struct kv_seq *s, uint32_t i);
uint64_t kv_table_bytes(const struct kv *kv, const struct kv_seq *s);
status kv_seq_reserve(struct kv *kv, struct kv_seq *s, uint32_t n_blocks); /* ERR_MEMORY */
/* First block that rows from `row` on attend in STREAM lanes, beside the sinks. */
uint32_t kv_ring_start(const struct kv *kv, uint32_t row);
bool kv_keeps_stream(const struct kv *kv, uint32_t i);
uint32_t *kv_residence_count(struct kv *kv, enum kv_residence r);
/* Block i becomes `id`, which is equal and the index's; ours is given back. */
void kv_seq_adopt(struct kv *kv, struct kv_seq *s, uint32_t i, uint32_t id);

/* ---- kv_open.c ---- */
status kv_open_hit(struct kv *kv, struct kv_seq *s, const struct kv_open *o, uint32_t min_slots,
                   uint32_t *n_hit);

/* ---- kv_spill.c ---- */
status kv_hot_open(struct kv *kv, struct kv_seq *s);
void kv_hot_close(struct kv *kv, struct kv_seq *s); /* gives its slots back too */
/* Says where the sealed pages lie, and takes the slots. ERR_MEMORY, ERR_FULL: no leaves. */
status kv_hot_fill(struct kv *kv, struct kv_seq *s, uint32_t n_slots);
/* Only the first; segments that are sealed already are said again without failing. */
status kv_hot_cover(struct kv *kv, struct kv_seq *s, uint32_t n_segments);

/* ---- kv_seal.c ---- */
uint32_t kv_record_find(const struct kv *kv, uint32_t block, uint64_t digest_id);
/* Without a block yet, and with one reference. */
status kv_record_take(struct kv *kv, const struct kv_seq *s, uint32_t *out);
void kv_record_attach(struct kv *kv, uint32_t record, uint32_t block);
void kv_record_give_back(struct kv *kv, uint32_t record); /* one that has no block */
void kv_record_hold(struct kv *kv, uint32_t record);
void kv_record_release(struct kv *kv, uint32_t record);
void kv_records_free(struct kv *kv, uint32_t block); /* all of a block's */
/* Offers the sealed segment. */
void kv_group_share(struct kv *kv, struct kv_seq *s, uint32_t segment, const uint32_t *tokens);

#endif
