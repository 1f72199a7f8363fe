/* Selection: every (row, KV head) is an item of work of its own (select_vec.h), which plan.c runs. */
#include "kernels/cpu/select.h"
#include "kernels/cpu/plan.h"

#include <stdlib.h>

struct select_scratch {
    uint32_t *words; /* [threads][worker_words] */
    size_t max_words, worker_words;
};

void select_item(struct cpu_backend *b, const struct select_args *a, uint32_t lane, uint32_t worker)
{
    const struct kv_geometry *g = a->kv->geo;
    struct select_scratch *s = b->select_scratch;
    if (kv_lane(g, a->layer, lane % g->kv_heads).class_ != LANE_SPARSE)
        return;
    struct select_lane l = {
        .a = a,
        .row = &a->rows[lane / g->kv_heads],
        .head = lane % g->kv_heads,
        .scores = a->scores + (size_t)lane * a->group * a->stride,
        .known = a->known != NULL ? a->known + (size_t)lane * a->group : NULL,
        .pages = a->pages + (size_t)lane * a->page_cap,
        .masks = a->masks != NULL ? a->masks + (size_t)lane * a->page_cap : NULL,
        .share = a->share + (size_t)lane * a->page_cap,
        .n_pages = &a->n_pages[lane],
        .estimates = a->estimates + (size_t)lane * a->estimate_cap,
        .n_estimates = &a->n_estimates[lane],
        .work = s->words + worker * s->worker_words,
    };
    b->select->lane(&l);
}

void select_prepare(struct cpu_backend *b, const struct select_args *a)
{
    struct select_scratch *s = b->select_scratch;
    uint32_t segments = 0;
    for (uint32_t i = 0; i < a->n_rows; i++)
        segments = a->rows[i].n_segments > segments ? a->rows[i].n_segments : segments;
    CHECK(a->map != MAP_PAGE || a->desc.parts == SEGMENT_ROWS / a->kv->geo->block_rows);
    CHECK(a->map == MAP_PAGE || a->masks != NULL);
    CHECK(a->desc.order == ORDER_KMEANS || SEGMENT_ROWS % a->desc.parts == 0);
    s->worker_words = (select_work_words(segments * a->desc.parts, a->group) + 15) / 16 * 16;
    size_t need = s->worker_words * pool_threads(b->pool);
    if (need > s->max_words) {
        free(s->words);
        s->max_words = (need + need / 2 + 15) / 16 * 16;
        s->words = aligned_alloc(64, s->max_words * sizeof *s->words);
        CHECK(s->words != NULL); /* as mem_alloc: no ordinary memory left */
    }
}

status cpu_select_open(struct cpu_backend *b)
{
    b->select = &select_scalar;
#if defined(__x86_64__)
    if (b->isa == ISA_AVX512)
        b->select = &select_avx512;
    else if (b->isa == ISA_AVX2)
        b->select = &select_avx2;
#endif
    b->select_scratch = mem_alloc(sizeof *b->select_scratch);
    return OK;
}

void cpu_select_close(struct cpu_backend *b)
{
    if (b->select_scratch == NULL)
        return;
    free(b->select_scratch->words);
    mem_free(b->select_scratch);
    b->select_scratch = NULL;
}
