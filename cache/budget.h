/* Budgets of SPILLED sequences: how many HBM blocks each gets for its hot set (DESIGN 4;
 * reference/peers.md 1.5, B2).
 *
 * Every touch of a page tells its re-use distance, so a sequence's histogram of distances is its
 * miss-ratio curve, beyond its present budget too. Blocks go where they save most bytes; what was
 * decided is changed only when it pays, and in small steps. Pure functions; the engine thread calls
 * them every few tens of steps. */
#ifndef CACHE_BUDGET_H
#define CACHE_BUDGET_H

#include "kernels/base.h"
#include "kernels/core/hot_set.h"

enum { CURVE_POINTS = 64 };

/* With size[i] slots per lane, miss[i] of the touches miss. From (0, 1) on, sizes ascend; a convex
 * hull: misses fall, and by less and less. */
struct miss_curve {
    uint32_t n;
    float size[CURVE_POINTS], miss[CURVE_POINTS];
};

/* Of one lane, from its re-use distances in epochs (hot_lane_stats.distance), by Denning's working set:
 * a window of w epochs misses what is re-used later than that, and holds one epoch's misses of every
 * shorter window. touches_per_epoch counts each touch. Exact for sizes of at least the pages of an
 * epoch; below, a straight line. An empty histogram makes n = 0. */
void miss_curve_make(struct miss_curve *c, const uint32_t distance[HOT_AGES],
                     double touches_per_epoch);
/* Of a sequence, whose lanes all have the same slots but differ in how restless they are: the mean of
 * their curves (not the curve of their sum, which is points off), weighted by touches. epochs: how many
 * the distances were counted in. */
void miss_curve_lanes(struct miss_curve *c, const struct hot_lane_stats *lanes, uint32_t n_lanes,
                      double epochs);
/* Between points on a straight line; beyond the last as the last. Without points: 1. */
float miss_curve_at(const struct miss_curve *c, float slots);

struct budget_claim {
    const struct miss_curve *curve; /* NULL or empty: nothing known yet: gets `preset` */
    uint32_t min, preset, max;      /* slots; min <= preset <= max */
    uint32_t now;                   /* 0: has none yet and takes what it is given */
    float weight;                   /* tenant; > 0 */
    float bytes_per_miss_ratio;     /* bytes a step moves if everything missed */
    uint32_t target;                /* out: what it would get without hysteresis */
    uint32_t granted;               /* out */
};

/* Shares total_blocks by marginal benefit (bytes saved per block) over the hulls, at least min each.
 * Blocks that would save nothing stay unused. Hysteresis: a change of less than 1/8 is not made; a
 * change is at most max(now / 8, 16) per call, unless the total demands more. n_free blocks of the total
 * are nobody's: those cost nobody anything and are given at once, from 1/64 on. The sum of what is granted
 * never exceeds the total. Repeated calls settle. ERR_FULL: the minima do not fit, and nothing is
 * granted. */
status budget_share(struct budget_claim *claims, uint32_t n, uint32_t total_blocks,
                    uint32_t n_free);

#endif
