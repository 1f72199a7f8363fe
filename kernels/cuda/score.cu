/* Score on the device: which kernel scores what.
 *
 * Coarse to fine is three commands: scores of the coarse digests into scratch, a choice of groups per lane
 * (select's machinery: the best by their share of the mass), and scores of what is open. */
#include "kernels/cuda/score.h"
#include "kernels/cuda/select.h"

#include <string.h>

struct cuda_score {
    void *scratch; /* coarse scores, open groups */
    size_t scratch_bytes;
};

uint32_t cuda_score_depth; /* for the bench, which tries others; 0: as score_cut chooses */

/* A wave of CTAs takes as long as its deepest warp, and about a piece and a half to start: the best is
 * mostly one wave that fills the device. */
void score_cut(struct score_call *c, uint32_t lanes, uint32_t slots)
{
    uint32_t of_lane = c->stretches * c->pieces, best = 1;
    float least = INFINITY;
    for (uint32_t depth = 1; depth <= SCORE_MAX_DEPTH; depth++) {
        uint32_t per = SCORE_WARPS * depth;
        size_t ctas = (size_t)lanes * c->chunks * ((of_lane + per - 1) / per);
        float cost = (float)((ctas + slots - 1) / slots) * ((float)depth + 1.5f);
        if (cost < least) {
            least = cost;
            best = depth;
        }
    }
    c->depth = cuda_score_depth != 0 ? cuda_score_depth : best;
    c->stretches = (of_lane + SCORE_WARPS * c->depth - 1) / (SCORE_WARPS * c->depth);
}

/* What all kinds of scores have in common; stretches: segments as a bucket. false: nothing to do. */
static bool call_of(struct cuda_backend *b, const struct score_args *a, struct score_call *c,
                    uint32_t *lanes)
{
    const struct kv_memory *kv = a->kv;
    const struct kv_geometry *g = kv->geo;
    struct digest_layout l = digest_layout_of(g->head_dim, &a->desc);
    uint32_t rows = 0, segments = 0;
    memset(c, 0, sizeof *c);
    c->rows = cuda_rows(b, g, a->rows, a->n_rows, &rows, &segments);
    c->lanes = cuda_lanes(b, g);
    if (c->rows == NULL || c->lanes == NULL || segments == 0)
        return false;
    *lanes = rows * g->kv_heads;
    c->lanes += (size_t)a->layer * g->kv_heads;
    c->records = (const uint8_t *)kv->records;
    c->record_bytes = kv->record_bytes;
    c->record_lane_bytes = kv->record_lane_bytes;
    c->q = (const float *)a->qkv;
    c->q_stride = (size_t)(a->heads + 2 * g->kv_heads) * g->head_dim;
    c->out = a->scores;
    c->stride = a->stride;
    c->kv_heads = g->kv_heads;
    c->group = a->heads / g->kv_heads;
    c->dim = g->head_dim;
    c->parts = a->desc.parts;
    uint32_t sinks = (a->desc.sinks + g->block_rows - 1) / g->block_rows * g->block_rows;
    c->part_rows = a->desc.order == ORDER_KMEANS ? 0 : SEGMENT_ROWS / a->desc.parts;
    c->sinks = c->part_rows > 0 ? sinks / c->part_rows : 0;
    c->kinds = l.kinds;
    c->vectors = l.vectors;
    c->vector_bytes = l.vector_bytes;
    c->codes = l.codes;
    c->basis = l.codes + codes_k_basis(l.values != 0);
    c->bounds = l.bounds;
    c->first_row = l.first_row;
    c->scale = a->scale;
    c->log_rows =
        c->part_rows > 0 && l.codes == 0 ? logf((float)(c->part_rows - a->desc.outliers)) : 0;
    c->stretches = segments;
    c->four = c->parts % 4 == 0 && c->stride % 4 == 0 && (uintptr_t)c->out % 16 == 0;
    c->hbm = (const uint8_t *)kv->hbm[LANE_SPARSE];
    c->dram = (const uint8_t *)kv->dram[LANE_SPARSE];
    c->block_bytes = g->block_bytes[LANE_SPARSE];
    c->page_bytes = g->page_bytes;
    c->number = kv_number_bytes(g->type);
    c->block_rows = g->block_rows;
    return true;
}

/* The coarse digests as if they were all there is. */
static struct score_call coarse_of(const struct score_call *c, const struct digest_layout *l,
                                   float *scores)
{
    struct score_call x = *c;
    x.parts = c->parts / DIGEST_COARSE;
    x.part_rows = c->part_rows * DIGEST_COARSE;
    x.sinks = c->sinks / DIGEST_COARSE;
    x.vectors = l->coarse;
    x.kinds = 1;
    x.codes = 0;
    x.log_rows = 0;
    x.out = scores;
    x.stride = c->stretches * x.parts;
    x.four = x.parts % 4 == 0;
    return x;
}

static void coarse_to_fine(struct cuda_backend *b, const struct score_args *a, struct score_call *c,
                           uint32_t lanes)
{
    struct digest_layout l = digest_layout_of(c->dim, &a->desc);
    uint32_t coarse = c->parts / DIGEST_COARSE, groups = c->parts / a->coarse_group;
    CHECK(l.coarse != 0 && a->coarse_group % DIGEST_COARSE == 0 && c->parts % a->coarse_group == 0);
    size_t scores = digest_round((size_t)lanes * c->group * c->stretches * coarse * sizeof(float));
    size_t shares = digest_round((size_t)lanes * c->stretches * groups * sizeof(uint32_t));
    size_t open = (size_t)lanes * c->stretches * groups;
    struct cuda_score *s = b->score;
    if (!cuda_reserve(b, &s->scratch, &s->scratch_bytes, scores + shares + open))
        return;
    struct score_call x = coarse_of(c, &l, (float *)s->scratch);
    cuda_score_mass(b, &x, lanes);
    struct cuda_choice o;
    memset(&o, 0, sizeof o);
    o.rows = c->rows;
    o.lanes = c->lanes;
    o.kv_heads = c->kv_heads;
    o.group = c->group;
    o.scores = x.out;
    o.stride = x.stride;
    o.per_group = a->coarse_group / DIGEST_COARSE;
    o.groups = groups;
    o.share = a->coarse_open;
    o.keys = (uint32_t *)((uint8_t *)s->scratch + scores);
    o.open = (uint8_t *)s->scratch + scores + shares;
    o.open_stride = c->stretches * groups;
    cuda_choose(b, &o, lanes);
    c->open = o.open;
    c->open_stride = o.open_stride;
    c->open_group = a->coarse_group;
}

void cuda_score(struct backend *be, const struct score_args *a)
{
    struct cuda_backend *b = (struct cuda_backend *)be;
    struct score_call c;
    uint32_t lanes;
    CHECK(a->kv->geo->head_dim % 4 == 0 && a->kv->geo->head_dim <= SCORE_MAX_DIM);
    CHECK(a->kind != SCORE_MASS || a->desc.kind == DIGEST_CENTROID || a->desc.kind == DIGEST_CODES);
    CHECK(a->kind != SCORE_BOUND || a->desc.kind == DIGEST_BOUNDS);
    for (uint32_t i = 0; i < a->n_rows; i++)
        CHECK(a->stride >= a->rows[i].n_segments * a->desc.parts);
    if (!call_of(b, a, &c, &lanes))
        return;
    if (a->kind == SCORE_EXACT) {
        cuda_score_exact(b, &c, lanes);
    } else if (a->kind == SCORE_BOUND) {
        cuda_score_bounds(b, &c, lanes);
    } else {
        if (a->coarse_group > 0)
            coarse_to_fine(b, a, &c, lanes);
        cuda_score_mass(b, &c, lanes);
    }
}

status cuda_score_open(struct cuda_backend *b)
{
    b->score = (struct cuda_score *)mem_alloc(sizeof *b->score);
    return cuda_score_mass_open(b);
}

void cuda_score_close(struct cuda_backend *b)
{
    if (b->score == NULL)
        return;
    cudaFree(b->score->scratch);
    mem_free(b->score);
    b->score = NULL;
}
