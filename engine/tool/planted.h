/* Attention traces without a model (reference/algorithms.md D.5): keys of one layer and queries, with
 * tokens planted among them that hold most of the attention. Each mode is what breaks one family of
 * algorithms. Everything follows from the seed.
 *
 *   runs       planted tokens lie beside each other, as phrases do: the easy case
 *   scattered  one planted token in a page: breaks large pages
 *   hidden     its neighbours point the other way: breaks digests that are means
 *   wide       every page has two opposed extremes: loosens bounds
 *   disagree   each head of the group wants other tokens: breaks the reduction over a group
 *   ood        queries rotated away from the keys: breaks clustering by key alone
 *   uneven     clusters of very different size, the planted ones in the small ones
 *   flat       nothing planted: breaks top-k, suits estimation
 */
#ifndef ENGINE_TOOL_PLANTED_H
#define ENGINE_TOOL_PLANTED_H

#include "kernels/base.h"

enum {
    PLANTED_KV_HEADS = 2,
    PLANTED_GROUP = 3,
    PLANTED_DIM = 64,
    PLANTED_TARGETS = 8,
    PLANTED_TOKENS = 16
};

struct planted {
    uint32_t n;   /* positions */
    float *k;     /* [kv_heads][n][dim], as pages hold them */
    float *axis;  /* [kv_heads][targets][group][dim] queries, of unit temperature */
    uint32_t *at; /* [kv_heads][targets][group][tokens] planted positions, ascending; flat: none */
    uint32_t n_tokens; /* planted for each target: 0 with flat */
};

uint32_t planted_count(void);
const char *planted_name(uint32_t i);
/* share: of each query's attention that its planted tokens hold. Queries are scaled so that
 * scores are axis.k / sqrt(dim). ERR_ARG: unknown mode; ERR_MEMORY. */
status planted_make(struct planted *p, const char *mode, uint32_t n, double share, uint64_t seed);
void planted_fini(struct planted *p);

static inline size_t planted_target(uint32_t kv_head, uint32_t target, uint32_t h)
{
    return ((size_t)kv_head * PLANTED_TARGETS + target) * PLANTED_GROUP + h;
}

/* A standard normal number from a splitmix state. */
float planted_normal(uint64_t *random);

#endif
