/* RetroInfer's wave index (reference/wave-index.md) as selection.md measured it best: a partition is a
 * cluster of keys, and a cluster is a page. Sealing splits a segment into balanced clusters of one
 * page by recursive bisection and stores them in that order. Averages hide the one row that matters,
 * so the digest keeps more than the mean: with `codes` a few bits of every row (docs/selection.md), else
 * `outliers` rows, those farthest from the mean. The best clusters are attended row by row, the next
 * ones by their digest alone.
 *
 * `balance=false` is the paper's own: free k-means inside a segment, clusters of any size, selected
 * rows masked within the pages they lie in. */
#include "sparse/builtin.h"

enum { OUTLIERS, ESTIMATE, BALANCE, COARSE_GROUP, COARSE_OPEN, REDUCE, CODES, KNOWN, VALUES };

enum {
    KMEANS_PARTS = 64,    /* 16 rows on average, as in the paper */
    COARSE_GROUP_MIN = 4, /* what the backend keeps a coarse digest of */
    COARSE_GROUP_MAX = 32
};

static const struct sparse_option options[] = {
    [OUTLIERS] = {.name = "outliers",
                  .help = "rows farthest from the mean that a digest keeps beside it, without "
                          "codes; preset: 1 with blocks of 8 rows, else 0",
                  .type = SPARSE_COUNT,
                  .preset = SPARSE_PRESET_AUTO,
                  .max = 2},
    [ESTIMATE] = {.name = "estimate",
                  .help = "share of all partitions that are estimated after the selected ones; "
                          "preset: 0.12 with codes, which cost more and say more, else 0.25",
                  .type = SPARSE_NUMBER,
                  .preset = SPARSE_PRESET_AUTO,
                  .max = 1},
    [BALANCE] = {.name = "balance",
                 .help = "clusters of exactly one page; off: free k-means, as in the paper",
                 .type = SPARSE_BOOL,
                 .preset = 1},
    [COARSE_GROUP] = {.name = "coarse_group",
                      .help =
                          "clusters that share a coarse digest, which is scored first: 4, 8, 16 "
                          "or 32; 0: every cluster is scored",
                      .type = SPARSE_COUNT,
                      .max = COARSE_GROUP_MAX},
    [COARSE_OPEN] = {.name = "coarse_open",
                     .help = "share of the groups whose clusters are scored",
                     .type = SPARSE_NUMBER,
                     .preset = 0.5,
                     .min = 0.01,
                     .max = 1},
    [REDUCE] = {.name = "reduce",
                .help = "how the heads of a group agree on a score; preset: sum_prob with codes, "
                        "else max_prob",
                .type = SPARSE_CHOICE,
                .preset = SPARSE_PRESET_AUTO,
                .choices = BUILTIN_REDUCES},
    [CODES] = {.name = "codes",
               .help = "keep a few bits of every row beside the mean of its page; preset: on with "
                       "blocks of 8 rows and balance, else off",
               .type = SPARSE_BOOL,
               .preset = SPARSE_PRESET_AUTO},
    [KNOWN] = {.name = "known",
               .help = "a head's probabilities are shares of all it attends, sinks and tail too; "
                       "preset: as codes, where scores are probabilities",
               .type = SPARSE_BOOL,
               .preset = SPARSE_PRESET_AUTO},
    [VALUES] = {.name = "values",
                .help = "keep what every page holds on average, a third of a digest: estimate and "
                        "miss_threshold need it",
                .type = SPARSE_BOOL,
                .preset = 1},
};

/* Small pages get codes of their rows: the quality setting. Larger ones are the speed setting. */
static bool has_codes(const struct kv_geometry *geo, const double *values)
{
    if (values[CODES] >= 0)
        return values[CODES] != 0;
    return geo->block_rows == 8 && values[BALANCE] != 0 && values[OUTLIERS] <= 0;
}

static status check_codes(const struct kv_geometry *geo, const double *values)
{
    if (!has_codes(geo, values))
        return OK;
    if (values[BALANCE] == 0)
        return err(ERR_ARG, "codes must be off with balance off, got on: they are of whole pages");
    if (values[OUTLIERS] > 0)
        return err(ERR_ARG,
                   "outliers must be 0 with codes on, got %g: codes tell rows apart already",
                   values[OUTLIERS]);
    return OK;
}

static enum group_reduce reduction(const struct kv_geometry *geo, const double *values)
{
    if (values[REDUCE] >= 0)
        return (enum group_reduce)values[REDUCE];
    return has_codes(geo, values) ? REDUCE_SUM_PROB : REDUCE_MAX_PROB;
}

/* How much a head has to gain from pages at all: one that looks at the tail has no say. */
static status known_mass(const struct kv_geometry *geo, const double *values, bool *out)
{
    enum group_reduce reduce = reduction(geo, values);
    bool shares = reduce == REDUCE_MAX_PROB || reduce == REDUCE_SUM_PROB;
    if (values[KNOWN] > 0 && !shares)
        return err(ERR_ARG, "known must be off with a raw reduce, got on: there are no shares");
    *out = shares && (values[KNOWN] >= 0 ? values[KNOWN] != 0 : has_codes(geo, values));
    return OK;
}

static uint32_t outliers(const struct kv_geometry *geo, const double *values)
{
    if (values[OUTLIERS] >= 0)
        return (uint32_t)values[OUTLIERS];
    return geo->block_rows == 8 && values[BALANCE] != 0 && !has_codes(geo, values) ? 1 : 0;
}

static float estimated(const struct kv_geometry *geo, const double *values)
{
    if (values[ESTIMATE] >= 0)
        return (float)values[ESTIMATE];
    return has_codes(geo, values) ? 0.12f : 0.25f;
}

static status check_values(const struct kv_geometry *geo, const double *values)
{
    if (values[VALUES] == 0 && estimated(geo, values) > 0)
        return err(ERR_ARG, "estimate must be 0 with values off, got %g",
                   (double)estimated(geo, values));
    return OK;
}

/* Free clusters are of any size: the backend keeps their mean alone. */
static status check_outliers(const double *values)
{
    if (values[BALANCE] == 0 && values[OUTLIERS] > 0)
        return err(
            ERR_ARG,
            "outliers must be 0 with balance off, got %g: only clusters of one page have them",
            values[OUTLIERS]);
    return OK;
}

static status check_coarse(const double *values)
{
    uint32_t group = (uint32_t)values[COARSE_GROUP];
    if ((group & (group - 1)) != 0 || (group != 0 && group < COARSE_GROUP_MIN))
        return err(ERR_ARG, "coarse_group must be 0, 4, 8, 16 or 32, got %u", group);
    if (group != 0 && values[BALANCE] == 0)
        return err(ERR_ARG,
                   "coarse_group must be 0 with balance off, got %u: groups are subtrees "
                   "of the bisection",
                   group);
    return OK;
}

static status describe(const struct kv_geometry *geo, const double *values,
                       struct sparse_traits *out)
{
    bool balance = values[BALANCE] != 0, known = false;
    uint32_t parts = balance ? SEGMENT_ROWS / geo->block_rows : KMEANS_PARTS;
    TRY(check_coarse(values));
    TRY(check_codes(geo, values));
    TRY(check_outliers(values));
    TRY(known_mass(geo, values, &known));
    TRY(check_values(geo, values));
    *out = (struct sparse_traits){
        .map = balance ? MAP_PAGE : MAP_GATHER,
        .parts = parts,
        .reduce = reduction(geo, values),
        .known_mass = known,
        .sinks = builtin_sinks(geo),
        .estimate = estimated(geo, values),
        .permutes = true,
        .digest = {.order = balance ? ORDER_BISECT : ORDER_KMEANS,
                   .kind = has_codes(geo, values) ? DIGEST_CODES : DIGEST_CENTROID,
                   .parts = parts,
                   .outliers = outliers(geo, values),
                   .sinks = builtin_sinks(geo),
                   .values = values[VALUES] != 0},
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
    a.kind = SCORE_MASS;
    a.coarse_group = (uint32_t)values[COARSE_GROUP];
    a.coarse_open = (float)values[COARSE_OPEN];
    r->be->ops->score(r->be, &a);
}

const struct sparse_plugin wave_plugin = {
    .abi = SPARSE_ABI,
    .name = "wave",
    .help = "clusters of one page by their mean and a few bits of every row; the next best are "
            "estimated",
    .options = options,
    .n_options = ARRAY_LEN(options),
    .describe = describe,
    .seal = seal,
    .score = score,
};
