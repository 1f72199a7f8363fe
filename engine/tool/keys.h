/* Keys of a sequence as pages hold them (rotated, rounded), kept in position order beside the cache:
 * what exact attention weights are computed from, without a page's opaque layout. Filled by a watcher
 * of the run (eval_run.h). */
#ifndef ENGINE_TOOL_KEYS_H
#define ENGINE_TOOL_KEYS_H

#include "engine/tool/eval_run.h"

struct keys {
    struct kv_geometry geo; /* copied; lanes borrowed */
    uint32_t room;          /* positions, a multiple of 16 */
    float *k;               /* [layer][kv_head][head_dim][room]: a score is a sum of columns */
};

/* ERR_MEMORY. */
status keys_init(struct keys *ks, const struct kv_geometry *geo, uint32_t positions);
void keys_fini(struct keys *ks);
void keys_take(struct keys *ks, const struct eval_layer *l);
/* out[p] = scale * q.k of position p, p < n; out has room for n rounded up to 16. */
void keys_scores(const struct keys *ks, uint32_t layer, uint32_t kv_head, const float *q,
                 float scale, uint32_t n, float *out);
/* log sum exp. */
double keys_lse(const float *scores, uint32_t n);

#endif
