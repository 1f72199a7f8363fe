/* Rows of pages as numbers, one by one: what plug-ins that digest on the host and tests see of the
 * inner order of a page (attend.h), and all they need to know. */
#include "kernels/cpu/attend.h"
#include "kernels/cpu/cpu.h"
#include "kernels/dtype.h"

static const uint16_t *page_at(const struct read_args *a, uint32_t row)
{
    const struct kv_geometry *g = a->kv->geo;
    struct lane_place p = kv_lane(g, a->layer, a->head);
    block_id id = a->blocks[row / g->block_rows];
    const void *base = (id & BLOCK_IN_DRAM) != 0 ? a->kv->dram[p.class_] : a->kv->hbm[p.class_];
    size_t at = (size_t)(id & ~BLOCK_IN_DRAM) * g->block_bytes[p.class_] + p.index * g->page_bytes;
    return (const uint16_t *)(const void *)((const char *)base + at);
}

void cpu_read(struct backend *be, const struct read_args *a)
{
    const struct kv_geometry *g = a->kv->geo;
    uint32_t rows = g->block_rows, dim = g->head_dim;
    cpu_plan_flush((struct cpu_backend *)(void *)be);
    for (uint32_t i = 0; i < a->n_rows; i++) {
        uint32_t r = (a->first_row + i) % rows;
        const uint16_t *k = page_at(a, a->first_row + i), *v = k + (size_t)rows * dim;
        for (uint32_t c = 0; c < dim; c++) {
            if (a->k != NULL)
                a->k[(size_t)i * dim + c] =
                    bf16_to_f32(k[((size_t)(c / 2) * rows + r) * 2 + c % 2]);
            if (a->v != NULL)
                a->v[(size_t)i * dim + c] = bf16_to_f32(v[((size_t)(r / 2) * dim + c) * 2 + r % 2]);
        }
    }
}
