/* Rows of pages as numbers, one by one: what plug-ins that digest on the host and tests see of the
 * inner order of a page (page.h), and all they need to know. */
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/page.h"

static const uint8_t *page_at(const struct read_args *a, uint32_t row)
{
    const struct kv_geometry *g = a->kv->geo;
    struct lane_place p = kv_lane(g, a->layer, a->head);
    block_id id = a->blocks[row / g->block_rows];
    const uint8_t *base = (id & BLOCK_IN_DRAM) != 0 ? a->kv->dram[p.class_] : a->kv->hbm[p.class_];
    return base + (size_t)(id & ~BLOCK_IN_DRAM) * g->block_bytes[p.class_] +
           p.index * g->page_bytes;
}

void cpu_read(struct backend *be, const struct read_args *a)
{
    const struct kv_geometry *g = a->kv->geo;
    uint32_t dim = g->head_dim;
    cpu_plan_flush((struct cpu_backend *)(void *)be);
    for (uint32_t i = 0; i < a->n_rows; i++) {
        uint32_t r = (a->first_row + i) % g->block_rows;
        const uint8_t *page = page_at(a, a->first_row + i);
        for (uint32_t c = 0; c < dim; c++) {
            if (a->k != NULL)
                a->k[(size_t)i * dim + c] = page_get(page, g->type, page_key(g, r, c));
            if (a->v != NULL)
                a->v[(size_t)i * dim + c] = page_get(page, g->type, page_value(g, r, c));
        }
    }
}
