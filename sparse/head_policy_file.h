/* What the files of head policies share: reading a small text whole, and the two formats. */
#ifndef SPARSE_HEAD_POLICY_FILE_H
#define SPARSE_HEAD_POLICY_FILE_H

#include "sparse/head_policy.h"

struct cJSON;

enum {
    POLICY_FILE_MAX = 4 << 20, /* bytes; a model with 128 layers of 128 heads needs a tenth */
    POLICY_SINKS = 64,         /* rows of a STREAM lane where nobody says */
    POLICY_RECENT = 256
};

/* The whole file, NUL-terminated, to be freed with mem_free; NULL: ERR_IO or ERR_FORMAT with a text. */
char *head_policy_text(const char *file, status *st);
/* An integer member in [0, 1 << 20], or `otherwise` where it is absent or null. ERR_FORMAT. */
status head_policy_rows(const char *file, const struct cJSON *o, const char *name,
                        uint32_t otherwise, uint32_t *out);
status head_policy_other_shape(const char *file, uint32_t their_layers, uint32_t their_heads,
                               uint32_t layers, uint32_t kv_heads);
/* Marks the n lanes of the largest scores, ties to the smaller index: marks[i] |= 1. */
void head_policy_best(const float *scores, uint32_t n_lanes, uint32_t n, uint8_t *marks);

/* Set classes (LANE_SPARSE or LANE_STREAM) and the file's window; as head_policy_make. */
status head_policy_duo(const struct head_policy_config *c, uint32_t layers, uint32_t kv_heads,
                       uint8_t *classes, uint32_t *sinks, uint32_t *recent);
status head_policy_razor(const struct head_policy_config *c, uint32_t layers, uint32_t kv_heads,
                         uint8_t *classes, uint32_t *sinks, uint32_t *recent);

#endif
