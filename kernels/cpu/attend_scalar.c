/* Attention in portable C: the reference for the kernels per instruction set. The order of sums is
 * that of attend.h; multiplication and addition round separately here. Bound by being scalar. */
#include "kernels/cpu/attend.h"
#include "kernels/cpu/page.h"

#include <math.h>
#include <string.h>

static const uint8_t *page_of(const struct attend_part *a, uint32_t pos)
{
    return attend_page(&a->table, pos / a->geo->block_rows);
}

static bool is_shown(const struct attend_part *a, uint32_t pos)
{
    uint32_t rows = a->geo->block_rows;
    return a->masks == NULL || (a->masks[pos / rows] >> pos % rows & 1) != 0;
}

/* One query over n positions from pos on: a group of the online softmax. */
static void attend_group(const struct attend_part *a, const float *q, uint32_t query, uint32_t pos,
                         uint32_t n)
{
    const struct kv_geometry *g = a->geo;
    uint32_t dim = g->head_dim, rows = g->block_rows;
    float p[ATTEND_GROUP] = {0}, max = a->m[query], *o = a->o + (size_t)query * a->o_stride;
    for (uint32_t t = 0; t < n; t++) {
        float sum = 0;
        if (!is_shown(a, pos + t))
            continue;
        for (uint32_t i = 0; i < dim; i++)
            sum += q[i] * page_get(page_of(a, pos + t), g->type, page_key(g, (pos + t) % rows, i));
        p[t] = sum * (a->scale * (float)M_LOG2E);
        max = p[t] > max ? p[t] : max;
    }
    float alpha = exp2f(a->m[query] - max);
    a->m[query] = max;
    a->l[query] *= alpha;
    for (uint32_t j = 0; j < dim; j++)
        o[j] *= alpha;
    for (uint32_t t = 0; t < n; t++) {
        if (!is_shown(a, pos + t))
            continue;
        p[t] = exp2f(p[t] - max);
        a->l[query] += p[t];
        for (uint32_t j = 0; j < dim; j++)
            o[j] +=
                p[t] * page_get(page_of(a, pos + t), g->type, page_value(g, (pos + t) % rows, j));
    }
}

static void part(const struct attend_part *a)
{
    for (uint32_t r = 0; r < a->n_rows; r++)
        for (uint32_t h = 0; h < a->group; h++) {
            uint32_t query = r * a->group + h, own = a->first_pos + r + 1;
            uint32_t end = own < a->end ? own : a->end;
            const float *q = a->q + r * a->q_stride + (size_t)h * a->geo->head_dim;
            a->m[query] = ATTEND_LOWEST;
            a->l[query] = 0;
            memset(a->o + (size_t)query * a->o_stride, 0, a->o_stride * sizeof *a->o);
            for (uint32_t pos = a->begin; pos < end; pos += ATTEND_GROUP)
                attend_group(a, q, query, pos, end - pos < ATTEND_GROUP ? end - pos : ATTEND_GROUP);
        }
}

static void estimate(const struct attend_estimates *a)
{
    memset(a->o, 0, (size_t)a->group * a->o_stride * sizeof *a->o);
    for (uint32_t h = 0; h < a->group; h++) {
        float *x = a->logits + (size_t)h * ATTEND_SPLIT, *o = a->o + (size_t)h * a->o_stride;
        float max = ATTEND_LOWEST, sum = 0;
        for (uint32_t i = 0; i < a->n; i++) {
            x[i] *= (float)M_LOG2E;
            max = x[i] > max ? x[i] : max;
        }
        for (uint32_t i = 0; i < a->n; i++) {
            float p = exp2f(x[i] - max); /* 0 where the logit is -inf */
            sum += p;
            for (uint32_t j = 0; j < a->dim; j++)
                o[j] += p * a->factors[i] * (float)a->values[i][j];
        }
        a->m[h] = max;
        a->l[h] = sum;
    }
}

static void fold(float *o, float *m, float *l, const float *part_o, const float *part_m,
                 const float *part_l, uint32_t n, uint32_t o_stride)
{
    for (uint32_t q = 0; q < n; q++, o += o_stride, part_o += o_stride) {
        float max = m[q] > part_m[q] ? m[q] : part_m[q];
        float a = exp2f(m[q] - max), b = exp2f(part_m[q] - max);
        for (uint32_t j = 0; j < o_stride; j++)
            o[j] = o[j] * a + part_o[j] * b;
        l[q] = l[q] * a + part_l[q] * b;
        m[q] = max;
    }
}

static void finish(const float *o, float l, float *out, uint32_t dim)
{
    for (uint32_t j = 0; j < dim; j++)
        out[j] = o[j] * (1.0f / l);
}

static void append(const struct append_row *a)
{
    const struct kv_geometry *g = a->kv->geo;
    uint32_t dim = g->head_dim, half = dim / 2;
    for (uint32_t h = 0; h < a->heads + g->kv_heads; h++) {
        float *x = a->qkv + (size_t)h * dim;
        for (uint32_t i = 0; i < half; i++) {
            float u = x[i], w = x[half + i];
            x[i] = u * a->cos[i] - w * a->sin[i];
            x[half + i] = w * a->cos[i] + u * a->sin[i];
        }
    }
    for (uint32_t h = 0; h < g->kv_heads; h++) {
        const float *k = a->qkv + (size_t)(a->heads + h) * dim;
        const float *v = k + (size_t)g->kv_heads * dim;
        uint8_t *page = append_page(a, h);
        bool nan = false;
        for (uint32_t i = 0; i < dim; i++) {
            page_put(page, g->type, page_key(g, a->page_row, i), k[i]);
            page_put(page, g->type, page_value(g, a->page_row, i), v[i]);
            nan |= isnan(k[i]) || isnan(v[i]);
        }
        if (nan && g->type == KV_E4M3)
            page_put(page, g->type, page_key(g, a->page_row, 0), NAN); /* attend.h */
    }
}

const struct attend_kernels attend_scalar = {part, estimate, fold, finish, append};
