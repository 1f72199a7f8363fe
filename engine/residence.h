/* Who is where (DESIGN 4): the scheduler's rules for residence. Engine thread only.
 *
 * Resident first: while HBM holds everybody whole, nothing is spilled and no byte moves. When rows or
 * a waiting sequence need blocks that are not there, in this order and until it suffices:
 *
 *   1. shrink the largest hot set towards PRESET times what a plan names, by halves: it grew into
 *      what nobody had;
 *   2. spill the answer that frees most, with a hot set of PRESET times what a plan names (the
 *      youngest of equals; then with the least that it needs);
 *   3. shrink the largest hot set towards its minimum, by halves;
 *   4. spill a prompt that is being read, in the same way;
 *   5. pause the youngest: all of it to DRAM, nothing is computed again;
 *   6. where DRAM is full too, free the youngest of all, paused ones included: it computes its rows
 *      again later, with the same tokens.
 *
 * Between tenants "the youngest" is first of the one that has most blocks, in both tiers, by its weight, then of the
 * lowest priority. A tenant's bound on blocks is kept in the same way among its own: in HBM when a sequence grows
 * (what it has now is counted), in DRAM when one goes there (with all that it may become, for it grows there step
 * by step). What several sequences share counts for each.
 *
 * When pressure falls: hot sets grow by their miss curves, at once into what is nobody's and slowly into what
 * the prefix cache or other hot sets have; the oldest spilled sequence that would read more than it moves becomes
 * RESIDENT again, and what hot sets have beyond the least they need counts as room for it; paused ones come back
 * through the queue in their order. Before answers run short of blocks hot sets give way for their next rows.
 *
 * Nothing here changes a token: where a page lies is no part of what is computed. */
#ifndef ENGINE_RESIDENCE_H
#define ENGINE_RESIDENCE_H

#include "engine/sequence.h"

struct sched;

enum { RESIDENCE_ANYBODY = UINT32_MAX };
enum {
    RESIDENCE_PRESET = 5,     /* hot set of a fresh spill, times the selected set (locality.md) */
    RESIDENCE_EVERY = 32,     /* steps between two looks at budgets and restores */
    RESIDENCE_CALM = 64,      /* steps without a spill before anybody is restored */
    RESIDENCE_MARGIN = 8,     /* a restore leaves 1/MARGIN of HBM available */
    RESIDENCE_HORIZON = 4096, /* steps that a restore is reckoned to serve at most */
    RESIDENCE_MAX_EPOCH = 4,  /* steps of a hot set's epoch (locality.md) */
};

/* HBM blocks that a sequence will still take beside those it has, for `rows` positions in all, as it
 * stands: whole if RESIDENT, tail and minimum hot set if SPILLED. */
uint32_t residence_wanted(const struct sched *s, const struct sequence *q, uint32_t rows);
/* Those that all who run will still take for the next stretch of their answers. */
uint64_t residence_reserved(const struct sched *s);
/* Slots a hot set of the sequence must have to run on up to `rows` positions. */
uint32_t residence_min_slots(const struct sched *s, const struct sequence *q, uint32_t rows);
/* May it ever be SPILLED: it attends by plan, there is DRAM, and at its longest a plan names no more pages
 * than a hot set has slots (HOT_MAX_SLOTS). */
bool residence_can_spill(const struct sched *s, const struct sequence *q);
/* Would it fit, for `rows` positions, if everybody who can be spilled was down to the minimum, within
 * DRAM and the headroom for transfers; and spare blocks of HBM stayed free? */
bool residence_fits_under_pressure(const struct sched *s, const struct sequence *q, uint32_t rows,
                                   uint32_t spare);
/* Makes some HBM available without anybody having to go (1 to 4); false: nobody can give more. of: only a tenant's
 * own give, where it is its bound that is short; or RESIDENCE_ANYBODY. */
bool residence_squeeze(struct sched *s, uint32_t of);
/* Where nobody can: somebody goes (5 and 6), for rows of q. Who had to is in the queue, out of the plan; false: q
 * itself is. */
bool residence_send_away(struct sched *s, struct sequence *q, uint32_t of);
/* ---- tenants ---- */

/* Blocks that it has, by tier. */
uint32_t residence_holds(const struct sched *s, const struct sequence *q, int tier);
/* tenant.blocks of all that have sequences. */
void residence_weigh(struct sched *s);
/* It has become PAUSED, or is about to be something else. */
void residence_count_paused(struct sched *s, struct sequence *q, bool paused);
/* OK; ERR_ARG: at its longest it never fits what its tenant may have; text. */
status residence_check_bounds(const struct sched *s, const struct sequence *q);
/* Would it fit there now, for `rows` positions, if its tenant's others were down to the minimum? */
bool residence_fits_bounds(const struct sched *s, const struct sequence *q, uint32_t rows);
/* HBM blocks that its tenant's bound leaves it, with those that it has; TENANT_NO_BOUND. */
uint32_t residence_room(const struct sched *s, const struct sequence *q);
/* Do its tenant's bounds let it grow to so many positions, as it stands? */
bool residence_may_grow(const struct sched *s, const struct sequence *q, uint32_t n_rows);
/* min_slots for its opening (cache/kv.h): more than there can be where it must not lie in DRAM. */
uint32_t residence_open_slots(const struct sched *s, const struct sequence *q, uint32_t rows);
/* For q, of whose tenant nobody runs: another of its paused ones is freed; false: there is none. */
bool residence_take_back(struct sched *s, const struct sequence *q);

/* ---- hot sets ---- */

/* Slots for the row at n_rows - 1 of a SPILLED sequence: grows the hot set to its minimum. ERR_FULL. */
status residence_ensure_slots(struct sched *s, struct sequence *q, uint32_t n_rows);
/* Gives one that was opened SPILLED the hot set that a spill would give it, if there is room. */
void residence_widen(struct sched *s, struct sequence *q);
/* Before every step: looks after budgets and restores when it is time. */
void residence_balance(struct sched *s);
/* While a step runs: learns what that look saw, of few hot sets at a time. */
void residence_learn(struct sched *s);

#endif
