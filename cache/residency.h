/* Memory and policy of hot sets (kernels/core/hot_set.h): the leaf pool, the slots, their statistics.
 *
 * Used by cache/kv.c alone; the engine thread owns everything here. The header of a set is the host's;
 * its arrays are backend memory, since the device reads and writes them in a step, and the host changes
 * them between steps through the backend's queue. Statistics are as they were at a sync or wait: on the CPU now,
 * on a device a step or more ago. */
#ifndef CACHE_RESIDENCY_H
#define CACHE_RESIDENCY_H

#include "cache/budget.h"
#include "kernels/backend.h"
#include "kernels/core/hot_set.h"

/* What lanes counted. */
struct hot_counts {
    uint64_t hits, misses, light_misses;
};

/* ---- leaf pool ---- */

struct leaf_pool; /* leaves of [n_lanes][HOT_LEAF_PAGES] u16, in chunks, given back when unused */
/* max_bytes: bound of the memory it holds. ERR_MEMORY. */
status leaf_pool_create(struct leaf_pool **out, struct backend *be, uint32_t n_lanes,
                        uint64_t max_bytes);
/* Every leaf was given back. NULL is allowed. */
void leaf_pool_destroy(struct leaf_pool *p);
uint64_t leaf_pool_bytes(const struct leaf_pool *p);      /* held now */
uint64_t leaf_pool_leaf_bytes(const struct leaf_pool *p); /* of one leaf */
/* A leaf of HOT_NEVER. ERR_FULL: max_bytes are held; ERR_MEMORY. */
status leaf_pool_get(struct leaf_pool *p, uint16_t **out);
void leaf_pool_put(struct leaf_pool *p, uint16_t *leaf);
/* Adds what sets that have closed counted since they were last asked; starts anew. */
void leaf_pool_collect(struct leaf_pool *p, struct hot_counts *counts);

/* ---- a hot set ---- */

/* Opens without slots and without covered pages. max_pages: of the sequence at its longest.
 * ERR_MEMORY. */
status hot_set_open(struct hot_set **out, struct backend *be, struct leaf_pool *pool,
                    uint32_t n_lanes, uint32_t max_pages);
/* NULL is allowed. */
void hot_set_close(struct hot_set *h, struct backend *be, struct leaf_pool *pool);
uint64_t hot_set_bytes(const struct hot_set *h); /* without leaves */

/* Gives it n_slots slots behind these HBM blocks (copied; the first ones stay as they were when it
 * grows; when it shrinks, pages in slots >= n_slots are forgotten: they are in DRAM). ERR_MEMORY:
 * nothing changed; never when it shrinks. */
status hot_set_resize(struct hot_set *h, struct backend *be, const uint32_t *slot_blocks,
                      uint32_t n_slots);
/* Pages [0, n_pages) are sealed and lie in these DRAM blocks (copied); makes leaves for them. Never
 * fewer than before. ERR_FULL, ERR_MEMORY: no leaf, and nothing changed. */
status hot_set_cover(struct hot_set *h, struct leaf_pool *pool, const uint32_t *dram_blocks,
                     uint32_t n_pages);
/* Ends a step of sets of one backend: advances their epochs, clears in-use marks. */
void hot_sets_step(struct hot_set *const *sets, uint32_t n);
void hot_set_step(struct hot_set *h);

/* Adds to *counts what its lanes counted since the last call. */
void hot_set_collect(struct hot_set *h, struct hot_counts *counts);
/* Since it was opened, by all lanes. */
uint64_t hot_set_light_misses(const struct hot_set *h);

/* The miss-ratio curve of what was touched since it was opened, recent epochs counting more. In three strokes, so
 * that no step has all of the work, and none waits for the device:
 *   look   asks for what was touched until now; and halves that, as each look does
 *   learn  makes the curve of it: 1 us a lane. false: there is nothing new, or it is still on the way
 *   curve  lends what was made last. Without touches n = 0 */
void hot_set_look(struct hot_set *h);
bool hot_set_learn(struct hot_set *h);
const struct miss_curve *hot_set_curve(const struct hot_set *h);

/* Epochs of so many steps from now on. Ages are HOT_AGES epochs at most: with short ones pages that were used last
 * 70 and 700 steps ago leave in the order of their slots, and no curve tells them apart. */
void hot_set_pace(struct hot_set *h, uint32_t epoch_steps);

/* A copy whose arrays are host memory, to look at; waits for the device. mem_free gives it back. */
struct hot_set *hot_set_snapshot(const struct hot_set *h);
/* CHECKs that slots and tables are inverse to each other. */
void hot_set_audit(const struct hot_set *h);

#endif
