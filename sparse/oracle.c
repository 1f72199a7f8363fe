/* The best that choosing partitions can be: scores every partition by the attention mass that its rows
 * really have, from the keys themselves. Reads all of them, so it is for tests and for recall. On
 * pages of consecutive rows, or on the clusters that `wave` stores (whose digests it shares). */
#include "sparse/builtin.h"

enum { LAYOUT, ESTIMATE, REDUCE };
enum { LAYOUT_PLAIN, LAYOUT_WAVE };

static const struct sparse_option options[] = {
    [LAYOUT] = {.name = "layout",
                .help = "whose partitions: pages of consecutive rows, or wave's clusters",
                .type = SPARSE_CHOICE,
                .preset = LAYOUT_PLAIN,
                .choices = "plain|wave"},
    [ESTIMATE] = {.name = "estimate",
                  .help = "share of all partitions that are estimated after the selected ones; "
                          "needs wave's layout",
                  .type = SPARSE_NUMBER,
                  .max = 1},
    [REDUCE] = {.name = "reduce",
                .help = "how the heads of a group agree on a score",
                .type = SPARSE_CHOICE,
                .preset = REDUCE_SUM_PROB,
                .choices = BUILTIN_REDUCES},
};

static status describe(const struct kv_geometry *geo, const double *values,
                       struct sparse_traits *out)
{
    uint32_t parts = SEGMENT_ROWS / geo->block_rows;
    if (values[LAYOUT] == LAYOUT_PLAIN && values[ESTIMATE] > 0)
        return err(ERR_ARG, "estimate must be 0 with layout plain, got %g: there are no digests",
                   values[ESTIMATE]);
    *out = (struct sparse_traits){
        .map = MAP_PAGE,
        .parts = parts,
        .reduce = (enum group_reduce)values[REDUCE],
        .sinks = builtin_sinks(geo),
        .estimate = (float)values[ESTIMATE],
        .digest = {.parts = parts, .sinks = builtin_sinks(geo)},
    };
    if (values[LAYOUT] == LAYOUT_WAVE) {
        out->permutes = true;
        out->digest.order = ORDER_BISECT;
        out->digest.kind = geo->block_rows == 8 ? DIGEST_CODES : DIGEST_CENTROID;
        out->digest.values = true;
    }
    return OK;
}

static void seal(struct backend *be, const struct sparse_traits *t, const double *values,
                 const struct seal_args *a)
{
    (void)values;
    if (t->permutes)
        be->ops->seal(be, a);
}

static void score(const struct sparse_rows *r, const struct sparse_traits *t, const double *values,
                  float *scores, uint32_t stride)
{
    struct score_args a = builtin_score(r, t, scores, stride);
    (void)values;
    a.kind = SCORE_EXACT;
    r->be->ops->score(r->be, &a);
}

const struct sparse_plugin oracle_plugin = {
    .abi = SPARSE_ABI,
    .name = "oracle",
    .help = "partitions by their true attention mass; slow, to compare with",
    .options = options,
    .n_options = ARRAY_LEN(options),
    .describe = describe,
    .seal = seal,
    .score = score,
};
