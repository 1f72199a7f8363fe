/* A plug-in whose describe() says whatever its options say, sense or not: what the host must refuse
 * before a backend would abort on it, and scores that are no numbers. */
#include "sparse/plugin.h"

#include <math.h>

enum { ORDER, KIND, PARTS, OUTLIERS, SINKS, VALUES, ESTIMATE, MAP };

#define NUMBER(n)                                                                               \
    {                                                                                           \
        .name = n, .help = "a field of what describe() says", .type = SPARSE_COUNT, .max = 2048 \
    }
static const struct sparse_option options[] = {
    [ORDER] = NUMBER("order"),       [KIND] = NUMBER("kind"),   [PARTS] = NUMBER("parts"),
    [OUTLIERS] = NUMBER("outliers"), [SINKS] = NUMBER("sinks"), [VALUES] = NUMBER("values"),
    [ESTIMATE] = NUMBER("estimate"), [MAP] = NUMBER("map"),
};

static status describe(const struct kv_geometry *geo, const double *values,
                       struct sparse_traits *out)
{
    uint32_t parts = (uint32_t)values[PARTS], sinks = (uint32_t)values[SINKS];
    if (parts == 0)
        parts = SEGMENT_ROWS / geo->block_rows;
    *out = (struct sparse_traits){.map = (enum partition_map)values[MAP],
                                  .parts = parts,
                                  .reduce = REDUCE_SUM_PROB,
                                  .sinks = sinks,
                                  .on_host = true,
                                  .estimate = (float)values[ESTIMATE],
                                  .permutes = values[ORDER] != ORDER_KEEP,
                                  .digest = {.order = (enum digest_order)values[ORDER],
                                             .kind = (enum digest_kind)values[KIND],
                                             .parts = parts,
                                             .outliers = (uint32_t)values[OUTLIERS],
                                             .sinks = sinks,
                                             .values = values[VALUES] != 0}};
    return OK;
}

static void score(const struct sparse_rows *r, const struct sparse_traits *t, const double *values,
                  float *scores, uint32_t stride)
{
    (void)t, (void)values;
    for (size_t i = 0; i < (size_t)r->n_rows * r->heads * stride; i++)
        scores[i] = NAN;
}

const struct sparse_plugin spind_sparse_plugin = {
    .abi = SPARSE_ABI,
    .name = "odd",
    .help = "says anything",
    .options = options,
    .n_options = ARRAY_LEN(options),
    .describe = describe,
    .score = score,
};
