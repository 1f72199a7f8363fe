/* Head policies: the class of every lane (DESIGN 2, 5), chosen once per server. Any policy goes with
 * any plug-in: the plug-in sees the SPARSE lanes only.
 *
 *   none       every lane SPARSE, but for the exempt layers, which are DENSE
 *   streaming  every lane STREAM (StreamingLLM's window with positions kept; forgets the middle)
 *   duo        lanes whose gate in a DuoAttention pattern file is below the threshold are STREAM
 *   razor      as duo, from a file that `spind calibrate` measured on this model */
#ifndef SPARSE_HEAD_POLICY_H
#define SPARSE_HEAD_POLICY_H

#include "kernels/backend.h"

struct head_policy_config {
    const char *name; /* "none", "streaming", "duo", "razor"; NULL: none */
    const char *file; /* pattern or policy file; NULL where none is needed */
    float sparsity;   /* duo: share of lanes that become STREAM, by rank of their gate; < 0: the
                               file's own (or 0.5) */
    uint32_t exempt_layers; /* first layers whose SPARSE lanes become DENSE */
    uint32_t sinks, recent; /* rows of STREAM lanes; multiples of 16; 0: the file's or 64 and 256 */
};

/* Fills classes[layers][kv_heads] and the window. ERR_ARG, ERR_FORMAT (a file of another shape: the
 * text names both shapes), ERR_IO. */
status head_policy_make(const struct head_policy_config *c, uint32_t layers, uint32_t kv_heads,
                        uint8_t *classes, uint32_t *sinks, uint32_t *recent);

/* What `spind calibrate` found: per lane, greatest over the group's query heads. */
struct head_scores {
    uint32_t layers, kv_heads;
    const float *echo, *induction; /* [layers][kv_heads] */
};
/* Writes a razor policy file (JSON, human readable, with the model's name and shape, the scores and
 * which lanes are kept). */
status head_policy_write(const char *file, const char *model, const struct head_scores *s,
                         float induction_share, float echo_share);

#endif
