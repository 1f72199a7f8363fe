/* Quest (arXiv 2406.10774; reference/algorithms.md A.1): a partition is a page of consecutive rows,
 * its digest the channel-wise minimum and maximum of its keys, its score an upper bound of q.k over
 * the page. Nothing is estimated: bounds say what a page may weigh, not what it holds. */
#include "sparse/builtin.h"

enum { REDUCE };

static const struct sparse_option options[] = {
    [REDUCE] = {.name = "reduce",
                .help = "how the heads of a group agree on a score",
                .type = SPARSE_CHOICE,
                .preset = REDUCE_MAX_PROB,
                .choices = BUILTIN_REDUCES},
};

static status describe(const struct kv_geometry *geo, const double *values,
                       struct sparse_traits *out)
{
    uint32_t parts = SEGMENT_ROWS / geo->block_rows;
    *out = (struct sparse_traits){
        .map = MAP_PAGE,
        .parts = parts,
        .reduce = (enum group_reduce)values[REDUCE],
        .sinks = builtin_sinks(geo),
        .digest = {.order = ORDER_KEEP,
                   .kind = DIGEST_BOUNDS,
                   .parts = parts,
                   .sinks = builtin_sinks(geo)},
    };
    return OK;
}

static void seal(struct backend *be, const struct sparse_traits *t, const double *values,
                 const struct seal_args *a)
{
    (void)t, (void)values;
    be->ops->seal(be, a);
}

static void score(const struct sparse_rows *r, const struct sparse_traits *t, const double *values,
                  float *scores, uint32_t stride)
{
    struct score_args a = builtin_score(r, t, scores, stride);
    (void)values;
    a.kind = SCORE_BOUND;
    r->be->ops->score(r->be, &a);
}

const struct sparse_plugin quest_plugin = {
    .abi = SPARSE_ABI,
    .name = "quest",
    .help = "pages of consecutive rows by the upper bound of their scores",
    .options = options,
    .n_options = ARRAY_LEN(options),
    .describe = describe,
    .seal = seal,
    .score = score,
};
