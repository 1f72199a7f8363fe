/* The plug-ins that are compiled in: one file each, one line in registry.c each. */
#ifndef SPARSE_BUILTIN_H
#define SPARSE_BUILTIN_H

#include "sparse/plugin.h"

extern const struct sparse_plugin dense_plugin, oracle_plugin, quest_plugin, wave_plugin;

enum { BUILTIN_SINKS = 16 }; /* rows; selection.md 2 */

/* The reductions over the heads of a group, in the order of enum group_reduce. */
#define BUILTIN_REDUCES "max_prob|sum_prob|mean_raw|max_raw"

/* Sinks are whole pages: with R = 32 there are 32 of them. */
static inline uint32_t builtin_sinks(const struct kv_geometry *g)
{
    return BUILTIN_SINKS > g->block_rows ? BUILTIN_SINKS : g->block_rows;
}

/* What the backend must know to score these rows; the caller adds kind and coarse scoring. */
static inline struct score_args builtin_score(const struct sparse_rows *r,
                                              const struct sparse_traits *t, float *scores,
                                              uint32_t stride)
{
    return (struct score_args){.kv = r->kv,
                               .desc = t->digest,
                               .layer = r->layer,
                               .heads = r->heads,
                               .rows = r->rows,
                               .n_rows = r->n_rows,
                               .scale = r->scale,
                               .qkv = r->qkv,
                               .scores = scores,
                               .stride = stride};
}

#endif
