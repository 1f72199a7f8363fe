/* The inner order of a page, number by number: what code says that need not be fast.
 *
 * K[head_dim / 2][R][2], then V[R / 2][head_dim][2], of numbers of the geometry's kv_type (attend.h says
 * why). Other backends have an order of their own. */
#ifndef KERNELS_CPU_PAGE_H
#define KERNELS_CPU_PAGE_H

#include "kernels/backend.h"
#include "kernels/dtype.h"

#include <string.h>

/* Which number of the page channel c of a row's key, or of its value, is. */
static inline size_t page_key(const struct kv_geometry *g, uint32_t row, uint32_t c)
{
    return ((size_t)(c / 2) * g->block_rows + row) * 2 + c % 2;
}

static inline size_t page_value(const struct kv_geometry *g, uint32_t row, uint32_t c)
{
    size_t half = (size_t)g->block_rows * g->head_dim;
    return half + ((size_t)(row / 2) * g->head_dim + c) * 2 + row % 2;
}

static inline float page_get(const uint8_t *page, enum kv_type type, size_t number)
{
    uint16_t x;
    if (type == KV_E4M3)
        return e4m3_to_f32(page[number]);
    memcpy(&x, page + number * 2, sizeof x);
    return bf16_to_f32(x);
}

static inline void page_put(uint8_t *page, enum kv_type type, size_t number, float value)
{
    uint16_t x = f32_to_bf16(value);
    if (type == KV_E4M3)
        page[number] = f32_to_e4m3(value);
    else
        memcpy(page + number * 2, &x, sizeof x);
}

#endif
