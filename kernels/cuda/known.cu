/* Known mass of planned rows: their tails, whose partial results attend folds in later, and the sinks' pages.
 * It is the kernel of attend_planned.cu with the sinks in the place of a list: they are found through the block
 * table, so they may be in DRAM, and who comes last adds masses up instead of folding values. Splits and
 * tiles of the tail are attend's, so what attend folds has the bits it would compute itself. */
#include "kernels/cuda/attend.h"

size_t cuda_known_bytes(const struct kv_geometry *g, uint32_t heads)
{
    return attend_tail_floats(heads / g->kv_heads, attend_padded_dim(g->head_dim)) * sizeof(float);
}

void cuda_known(struct backend *be, const struct known_args *a)
{
    struct cuda_backend *b = (struct cuda_backend *)be;
    const struct kv_geometry *g = a->kv->geo;
    CHECK(a->scale > 0);
    if (a->n_rows == 0 || !attend_fits(b, g, a->heads))
        return;
    for (uint32_t i = 0; i < a->n_rows; i++)
        CHECK(a->rows[i].pos + 1 - a->rows[i].n_segments * SEGMENT_ROWS <=
              SEGMENT_ROWS + TAIL_ROWS);
    struct attend_call c;
    attend_fill(&c, a->kv, a->layer, a->heads, a->qkv, a->scale);
    struct attend_set *s = &c.set;
    s->rows = cuda_rows(b, g, a->rows, a->n_rows, &s->n_rows, NULL);
    if (s->rows == NULL)
        return;
    s->sink_rows = (a->sinks + g->block_rows - 1) / g->block_rows * g->block_rows;
    s->tail = (float *)a->tail;
    s->lse = a->lse;
    attend_cut_set(&c, s);
    size_t entries = attend_set_entries(&c, s);
    if (attend_reserve(b, &c, entries * s->n_slots * c.group, entries))
        cuda_do(b, attend_run_planned, &c, sizeof c);
}
