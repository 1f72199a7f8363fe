/* A sparse-attention algorithm by somebody else: built as a shared object against sparse/plugin.h alone
 * and loaded with --plugin. Rows are partitions (TOKEN map); the digest of a row is the signs of its
 * key, the score how many of the query's signs agree, weighted by the query's own sizes. Selection is
 * by row, so pages are attended through row masks. Runs where pages can be read on the host. */
#include "sparse/plugin.h"

enum { SINKS, REDUCE };
enum { MAX_DIM = 256, WORDS = MAX_DIM / 64 };

static const struct sparse_option options[] = {
    [SINKS] = {.name = "sinks",
               .help = "rows at the start that are always attended, rounded up to pages",
               .type = SPARSE_COUNT,
               .preset = 16,
               .max = SEGMENT_ROWS},
    [REDUCE] = {.name = "reduce",
                .help = "how the heads of a group agree on a score",
                .type = SPARSE_CHOICE,
                .preset = REDUCE_MAX_PROB,
                .choices = "max_prob|sum_prob"},
};

static size_t words(const struct kv_geometry *g)
{
    return (g->head_dim + 63) / 64;
}

static status describe(const struct kv_geometry *geo, const double *values,
                       struct sparse_traits *out)
{
    uint32_t r = geo->block_rows, sinks = ((uint32_t)values[SINKS] + r - 1) / r * r;
    if (geo->head_dim > MAX_DIM)
        return err(ERR_ARG, "signs: a head of %u numbers; at most %d are possible", geo->head_dim,
                   MAX_DIM);
    *out = (struct sparse_traits){
        .map = MAP_TOKEN,
        .parts = SEGMENT_ROWS,
        .reduce = (enum group_reduce)values[REDUCE],
        .sinks = sinks,
        .on_host = true,
        .digest = {.parts = SEGMENT_ROWS, .sinks = sinks},
        .digest_bytes = SEGMENT_ROWS * words(geo) * sizeof(uint64_t),
    };
    return OK;
}

/* signs[row][words] of a lane's keys. */
static void seal(struct backend *be, const struct sparse_traits *t, const double *values,
                 const struct seal_args *a)
{
    const struct kv_geometry *g = a->kv->geo;
    float k[MAX_DIM];
    (void)t, (void)values;
    for (uint32_t layer = 0; layer < g->layers; layer++)
        for (uint32_t head = 0; head < g->kv_heads; head++) {
            uint64_t *signs = (uint64_t *)sparse_digest(a->kv, a->record, layer, head);
            for (uint32_t row = 0; signs != NULL && row < SEGMENT_ROWS; row++) {
                struct read_args r = {.kv = a->kv,
                                      .layer = layer,
                                      .head = head,
                                      .blocks = a->to,
                                      .first_row = row,
                                      .n_rows = 1,
                                      .k = k};
                be->ops->read(be, &r);
                for (size_t w = 0; w < words(g); w++, signs++) {
                    *signs = 0;
                    for (uint32_t i = 0; i < 64 && w * 64 + i < g->head_dim; i++)
                        *signs |= (uint64_t)(k[w * 64 + i] > 0) << i;
                }
            }
        }
}

static float agreement(const float *q, const uint64_t *signs, uint32_t dim)
{
    float sum = 0;
    for (uint32_t i = 0; i < dim; i++)
        sum += (signs[i / 64] >> (i % 64) & 1) != 0 ? q[i] : -q[i];
    return sum;
}

static void score(const struct sparse_rows *r, const struct sparse_traits *t, const double *values,
                  float *scores, uint32_t stride)
{
    const struct kv_geometry *g = r->kv->geo;
    (void)t, (void)values;
    for (uint32_t i = 0; i < r->n_rows; i++)
        for (uint32_t head = 0; head < g->kv_heads; head++)
            for (uint32_t s = 0; s < r->rows[i].n_segments; s++) {
                const uint64_t *signs =
                    (const uint64_t *)sparse_digest(r->kv, r->rows[i].records[s], r->layer, head);
                for (uint32_t h = 0; signs != NULL && h < r->group; h++) {
                    const float *q = sparse_query(r, i, head * r->group + h);
                    float *out =
                        scores + (((size_t)i * g->kv_heads + head) * r->group + h) * stride;
                    for (uint32_t row = 0; row < SEGMENT_ROWS; row++)
                        out[s * SEGMENT_ROWS + row] =
                            r->scale * agreement(q, signs + row * words(g), g->head_dim);
                }
            }
}

const struct sparse_plugin spind_sparse_plugin = {
    .abi = SPARSE_ABI,
    .name = "signs",
    .help = "rows by how many signs of their keys agree with the query's",
    .options = options,
    .n_options = ARRAY_LEN(options),
    .describe = describe,
    .seal = seal,
    .score = score,
};
