#include "engine/tool/keys.h"

#include <math.h>
#include <string.h>

enum { STRIP = 16 }; /* positions at a time: a constant, so that the compiler uses vectors */

status keys_init(struct keys *ks, const struct kv_geometry *geo, uint32_t positions)
{
    *ks = (struct keys){.geo = *geo, .room = (positions + STRIP - 1) / STRIP * STRIP};
    size_t lanes = (size_t)geo->layers * geo->kv_heads;
    ks->k = mem_try_alloc(lanes * geo->head_dim * ks->room * sizeof *ks->k);
    return ks->k ? OK : err(ERR_MEMORY, "keys of %u positions", positions);
}

void keys_fini(struct keys *ks)
{
    mem_free(ks->k);
    ks->k = NULL;
}

static float *lane_of(const struct keys *ks, uint32_t layer, uint32_t kv_head)
{
    return ks->k + ((size_t)layer * ks->geo.kv_heads + kv_head) * ks->geo.head_dim * ks->room;
}

void keys_take(struct keys *ks, const struct eval_layer *l)
{
    uint32_t d = ks->geo.head_dim, heads = ks->geo.kv_heads;
    CHECK(l->first_pos + l->n_rows <= ks->room);
    for (uint32_t h = 0; h < heads; h++) {
        float *to = lane_of(ks, l->layer, h) + l->first_pos;
        for (uint32_t i = 0; i < l->n_rows; i++)
            for (uint32_t j = 0; j < d; j++)
                to[(size_t)j * ks->room + i] = l->k[((size_t)i * heads + h) * d + j];
    }
}

void keys_scores(const struct keys *ks, uint32_t layer, uint32_t kv_head, const float *q,
                 float scale, uint32_t n, float *out)
{
    const float *k = lane_of(ks, layer, kv_head);
    for (uint32_t p = 0; p < n; p += STRIP) {
        float sum[STRIP] = {0};
        for (uint32_t j = 0; j < ks->geo.head_dim; j++) {
            const float *column = k + (size_t)j * ks->room + p;
            for (int i = 0; i < STRIP; i++)
                sum[i] += q[j] * column[i];
        }
        for (int i = 0; i < STRIP; i++)
            out[p + (uint32_t)i] = sum[i] * scale;
    }
}

double keys_lse(const float *scores, uint32_t n)
{
    float max = -INFINITY;
    double sum = 0;
    for (uint32_t i = 0; i < n; i++)
        max = scores[i] > max ? scores[i] : max;
    for (uint32_t i = 0; i < n; i++)
        sum += (double)expf(scores[i] - max);
    return (double)max + log(sum);
}
