/* Robustness-delta@K of a selection (reference/algorithms.md D.4, after arXiv 2507.00379): of all
 * queries, the share whose K heaviest candidates were retrieved to at least delta. A mean hides the
 * queries that lost everything; this does not. */
#ifndef ENGINE_TOOL_ROBUST_H
#define ENGINE_TOOL_ROBUST_H

#include "engine/tool/measure.h"

enum { ROBUST_KS = 3, ROBUST_DELTAS = 8 };
extern const uint32_t robust_k[ROBUST_KS];       /* 16, 64, 256 */
extern const double robust_delta[ROBUST_DELTAS]; /* 0.3 .. 1 */

/* One query: its candidates (sealed rows that are not always attended). */
struct robust_query {
    const float *score; /* [n] what the true order is by */
    const float *mass;  /* [n] share of the dense attention */
    const uint8_t *got; /* [n] attended exactly */
    uint32_t n;
};

struct robust {
    struct measure_sample
        recall[ROBUST_KS];      /* of the K heaviest; queries with at least K candidates */
    struct measure_sample mass; /* share of the candidates' mass; dropped where that is < 1 % */
    uint32_t dropped;
};

void robust_add(struct robust *r, const struct robust_query *q);
void robust_fini(struct robust *r);

#endif
