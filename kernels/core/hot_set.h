/* The hot set of a SPILLED sequence: which pages are in its HBM slots, per lane, and who leaves when
 * something must come in. Bucketed LRU with ghosts (DESIGN 4; reference/peers.md 1.5, technique B1).
 *
 * Compiled as C and as CUDA: no allocation, no calls out, one lane at a time; on a GPU a warp or a
 * block runs a lane. cache/residency.c owns the memory and the policy above it.
 *
 * Slot j of every lane is its page of HBM block slot_blocks[j]. The table has an entry of 16 bits per
 * (lane, page of the sequence): the slot, or HOT_GHOST | epoch of the last touch (HOT_NEVER: none). */
#ifndef KERNELS_CORE_HOT_SET_H
#define KERNELS_CORE_HOT_SET_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __CUDACC__
#define CORE_FN static __device__ __host__ inline
#else
#define CORE_FN static inline
#endif

enum {
    HOT_LEAF_PAGES = 512,   /* DESIGN: a leaf for 512 blocks */
    HOT_AGES = 64,          /* buckets of the LRU and of the histogram */
    HOT_GHOST = 0x8000,     /* not resident; low 15 bits: epoch of the last touch */
    HOT_NEVER = 0xffff,     /* not resident, never touched */
    HOT_MAX_SLOTS = 0x7fff, /* a slot fits 15 bits */
    HOT_FRESH_AGE = 2,      /* a fetched page enters this old: one-off misses leave first */
    HOT_NO_PAGE = 0xffffffff,
};

struct hot_lane_stats {
    /* Re-use distance in epochs of every touch: [0, 63], the last bucket holds all longer ones and
     * first touches. Decayed by the host. */
    uint32_t distance[HOT_AGES];
    uint32_t hits, misses, light_misses; /* since the host last read them */
};

struct hot_set {
    uint32_t n_lanes, n_slots; /* n_slots: B, a device integer, may change between steps */
    uint32_t max_slots;
    uint32_t epoch;          /* of this sequence; advances every epoch_steps steps */
    uint32_t epoch_steps, step;
    const uint32_t *slot_blocks;  /* [max_slots] SPARSE block in HBM behind each slot */
    uint16_t *const *leaves;      /* [n_leaves] -> [n_lanes][HOT_LEAF_PAGES]; NULL: never touched */
    uint32_t n_leaves;
    uint32_t *slot_page;          /* [n_lanes][max_slots] page in the slot, or HOT_NO_PAGE */
    uint16_t *slot_epoch;         /* [n_lanes][max_slots] epoch of the last touch (saturating age =
                                     min(63, epoch - it)) */
    uint8_t *slot_flags;          /* [n_lanes][max_slots] in use in this step; fresh */
    struct hot_lane_stats *stats; /* [n_lanes] */
    const uint32_t *dram_blocks;  /* [pages] SPARSE block in DRAM of each sealed page */
};

/* A page to bring in: DRAM block `from`, into HBM block `to`, the page of this lane. */
struct hot_fetch {
    uint32_t lane, from, to;
};

/* Touches `n` pages (distinct, any order) of a lane for this step. slots[i]: where page i is or will
 * be; misses are appended to fetches (at most n; the caller has room). Every page of this call stays:
 * n must be <= n_slots (the host saw to it at admission). Deterministic. Returns the fetches added. */
/* (implemented below by its owner) */

#endif
