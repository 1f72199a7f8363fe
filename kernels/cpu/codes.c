/* Row codes: which kernels this machine runs, and what attention adds to an estimate of means. */
#include "kernels/cpu/codes.h"
#include "kernels/core/digest.h"
#include "kernels/cpu/attend_plan.h"

void cpu_codes_open(struct cpu_backend *b)
{
    b->codes = &codes_scalar;
#if defined(__x86_64__)
    if (b->isa == ISA_AVX512)
        b->codes = &codes_avx512;
    else if (b->isa == ISA_AVX2)
        b->codes = &codes_avx2;
#endif
}

void codes_attend(const struct attend_call *c, const struct attend_task *k, struct split_place at,
                  float *o, const float *m, float *work)
{
    const struct attend_plans *p = k->plans;
    const struct kv_memory *kv = c->a->kv;
    const struct digest_layout l = digest_layout_of(kv->geo->head_dim, &p->desc);
    const struct plan_row *row = &p->rows[k->plan];
    size_t entry = (size_t)k->plan * kv->geo->kv_heads + k->head;
    const uint32_t *list = p->estimates + entry * p->estimate_cap + at.begin;
    const float *scores = p->scores + entry * c->group * p->stride;
    size_t width = (size_t)(c->a->heads + 2 * kv->geo->kv_heads) * l.dim;
    const uint8_t *codes[ATTEND_SPLIT];
    uint16_t parts[ATTEND_SPLIT];
    uint32_t n = at.end - at.begin;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t record = row->records[list[i] / l.parts];
        codes[i] = digest_lane(kv, record, c->a->layer, k->head) + l.codes;
        parts[i] = (uint16_t)(list[i] % l.parts);
    }
    for (uint32_t h = 0; h < c->group; h++)
        for (uint32_t i = 0; i < n; i++)
            work[(size_t)h * ATTEND_SPLIT + i] = scores[(size_t)h * p->stride + list[i]];
    c->b->codes->estimate(&(struct codes_estimates){
        .codes = codes,
        .parts = parts,
        .n = n,
        .dim = l.dim,
        .part_rows = SEGMENT_ROWS / l.parts,
        .group = c->group,
        .q = (const float *)c->a->qkv + row->row * width + (size_t)k->head * c->group * l.dim,
        .scale = c->a->scale,
        .basis = digest_lane(kv, row->records[0], c->a->layer, k->head) + l.codes,
        .logits = work,
        .stride = ATTEND_SPLIT,
        .m = m,
        .o = o,
        .o_stride = c->o_stride});
}
