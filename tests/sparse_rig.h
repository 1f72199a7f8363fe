/* A sequence that attends by plan, without scheduler and cache: RESIDENT on an arena of its own, with
 * digest records. Driven as the engine drives: chunks are cut at the borders of sealing, a segment is
 * sealed through its plug-in before the first row behind its border, rows of the prompt attend
 * everything, rows behind it by plan.
 *
 * Blocks of a sequence are scattered over the arena, records over their memory: whoever took a
 * position for an address would be seen. */
#ifndef TESTS_SPARSE_RIG_H
#define TESTS_SPARSE_RIG_H

#include "engine/attention.h"
#include "tests/model_rig.h"

enum { SPARSE_RIG_MAX_ROWS = 512, SPARSE_RIG_MAX_SEQS = 8 };

struct sparse_rig {
    struct backend *be; /* borrowed */
    struct model *m;    /* borrowed */
    struct kv_geometry geo;
    struct lane_place *lanes; /* NULL: all SPARSE */
    struct kv_memory kv;
    size_t arena_bytes[LANE_CLASSES], records_total;
    struct attention *at;
    uint32_t n_seqs, max_positions, blocks_per_seq, records_per_seq;
};

struct sparse_rig_seq {
    struct sparse_rig *rig;
    const struct sparse_instance *in; /* NULL: dense */
    struct attention_seq *keeps;
    uint32_t n_prompt, n_rows; /* rows computed */
    uint32_t n_segments;
    block_id *blocks;  /* [blocks_per_seq] */
    uint32_t *records; /* [records_per_seq] */
};

/* Rows of one sequence in a step; n must not cross a border (sparse_rig_room). */
struct sparse_rig_part {
    struct sparse_rig_seq *seq;
    uint32_t n;
    const uint32_t *tokens; /* [n] */
};

/* classes: [layers * kv_heads] enum lane_class, SPARSE and DENSE only; NULL: all SPARSE. */
static inline void sparse_rig_open(struct sparse_rig *r, struct backend *be, struct model *m,
                                   uint32_t block_rows, uint32_t n_seqs, uint32_t max_positions,
                                   const uint8_t *classes, size_t record_lane_bytes)
{
    const struct model_shape *s = &model_info(m)->shape;
    uint32_t n_lanes = s->layers * s->kv_heads;
    *r = (struct sparse_rig){.be = be, .m = m, .n_seqs = n_seqs, .max_positions = max_positions};
    r->geo = (struct kv_geometry){.block_rows = block_rows,
                                  .layers = s->layers,
                                  .kv_heads = s->kv_heads,
                                  .head_dim = s->head_dim,
                                  .page_bytes = (size_t)block_rows * s->head_dim * 4};
    r->lanes = mem_alloc(n_lanes * sizeof *r->lanes);
    for (uint32_t i = 0; i < n_lanes; i++) {
        uint32_t class_ = classes != NULL ? classes[i] : (uint32_t)LANE_SPARSE;
        r->lanes[i] = (struct lane_place){(uint16_t)class_, (uint16_t)r->geo.n_lanes[class_]++};
    }
    r->geo.lanes = r->lanes;
    r->kv = (struct kv_memory){.geo = &r->geo};
    r->blocks_per_seq = (max_positions + block_rows - 1) / block_rows;
    r->records_per_seq = max_positions / SEGMENT_ROWS + 1;
    for (uint32_t c = 0; c < LANE_CLASSES; c++) {
        r->geo.block_bytes[c] = r->geo.n_lanes[c] * r->geo.page_bytes;
        r->arena_bytes[c] = r->geo.block_bytes[c] * r->blocks_per_seq * n_seqs;
        if (r->arena_bytes[c] > 0 && (r->kv.hbm[c] = be->ops->alloc(be, r->arena_bytes[c])) == NULL)
            rig_must(ERR_MEMORY);
    }
    r->kv.record_lane_bytes = record_lane_bytes;
    r->kv.record_bytes = record_lane_bytes * r->geo.n_lanes[LANE_SPARSE];
    r->records_total = r->kv.record_bytes * r->records_per_seq * n_seqs;
    if (r->records_total > 0 && (r->kv.records = be->ops->alloc(be, r->records_total)) == NULL)
        rig_must(ERR_MEMORY);
    rig_must(attention_create(&r->at, be, &r->kv, s->heads, model_info(m)->attn_scale,
                              SPARSE_RIG_MAX_ROWS, max_positions));
}

static inline void sparse_rig_close(struct sparse_rig *r)
{
    attention_destroy(r->at);
    for (uint32_t c = 0; c < LANE_CLASSES; c++)
        if (r->kv.hbm[c] != NULL)
            r->be->ops->free(r->be, r->kv.hbm[c], r->arena_bytes[c]);
    if (r->kv.records != NULL)
        r->be->ops->free(r->be, r->kv.records, r->records_total);
    mem_free(r->lanes);
}

/* The instance of a plug-in by name, with options as text ("estimate", "0.5", ..., NULL). */
static inline const struct sparse_instance *sparse_rig_instance(struct sparse_rig *r,
                                                                const char *plugin, float budget,
                                                                const char *const *options)
{
    uint32_t i;
    rig_must(sparse_find(plugin, &i));
    struct sparse_choice c = sparse_choice_make(i, budget);
    for (; options != NULL && options[0] != NULL; options += 2)
        rig_must(sparse_choice_set(&c, options[0], options[1]));
    const struct sparse_instance *in = attention_instance(r->at, &c);
    if (in == NULL)
        rig_must(ERR_ARG);
    return in;
}

/* Sequence `index` of the rig, from nothing. */
static inline void sparse_rig_begin(struct sparse_rig *r, struct sparse_rig_seq *s, uint32_t index,
                                    const struct sparse_instance *in, uint32_t n_prompt)
{
    CHECK(index < r->n_seqs);
    *s = (struct sparse_rig_seq){.rig = r, .in = in, .n_prompt = n_prompt};
    s->blocks = mem_alloc(r->blocks_per_seq * sizeof *s->blocks);
    s->records = mem_alloc(r->records_per_seq * sizeof *s->records);
    for (uint32_t i = 0; i < r->blocks_per_seq; i++)
        s->blocks[i] = i * r->n_seqs + index;
    for (uint32_t i = 0; i < r->records_per_seq; i++)
        s->records[i] = (r->records_per_seq - 1 - i) * r->n_seqs + index;
    if (in != NULL)
        s->keeps = attention_seq_create(r->at, in, index + 1, r->max_positions);
}

static inline void sparse_rig_end(struct sparse_rig_seq *s)
{
    attention_seq_destroy(s->rig->at, s->keeps);
    mem_free(s->blocks);
    mem_free(s->records);
}

/* Rows it may compute in its next step: up to the next border, and a prompt's end is one too. */
static inline uint32_t sparse_rig_room(const struct sparse_rig_seq *s)
{
    if (s->in == NULL)
        return SPARSE_RIG_MAX_ROWS;
    uint32_t border = kv_next_border(s->n_rows);
    if (s->n_rows < s->n_prompt && s->n_prompt < border)
        border = s->n_prompt;
    return border - s->n_rows;
}

static inline void sparse_rig_seal(struct sparse_rig_seq *s)
{
    if (s->in == NULL || s->in->traits.attends_all)
        return;
    for (; s->n_segments < kv_segments_due(s->n_rows); s->n_segments++) {
        const block_id *blocks =
            s->blocks + (size_t)s->n_segments * (SEGMENT_ROWS / s->rig->geo.block_rows);
        attention_seal(s->rig->at, s->in, s->n_segments, s->records[s->n_segments], s->records[0],
                       blocks, blocks);
    }
}

/* One step. Logits of the last row of each part: [n_parts][vocab], valid until the next step. */
static inline const float *sparse_rig_step(struct sparse_rig *r,
                                           const struct sparse_rig_part *parts, uint32_t n_parts)
{
    static uint32_t tokens[SPARSE_RIG_MAX_ROWS], last[SPARSE_RIG_MAX_SEQS];
    struct batch_seq seqs[SPARSE_RIG_MAX_SEQS];
    uint32_t n = 0;
    CHECK(n_parts <= SPARSE_RIG_MAX_SEQS);
    attention_begin(r->at);
    for (uint32_t i = 0; i < n_parts; i++) {
        struct sparse_rig_seq *s = parts[i].seq;
        CHECK(parts[i].n > 0 && parts[i].n <= sparse_rig_room(s) &&
              n + parts[i].n <= SPARSE_RIG_MAX_ROWS && s->n_rows + parts[i].n <= r->max_positions);
        sparse_rig_seal(s);
        seqs[i] = (struct batch_seq){.first_row = n,
                                     .n_rows = parts[i].n,
                                     .first_pos = s->n_rows,
                                     .first_plan = attention_rows(r->at),
                                     .planned = s->n_segments > 0 && s->n_rows >= s->n_prompt};
        for (uint32_t c = 0; c < LANE_CLASSES; c++)
            seqs[i].blocks[c] = r->kv.hbm[c] != NULL ? s->blocks : NULL;
        for (uint32_t k = 0; k < parts[i].n && seqs[i].planned; k++) {
            const struct plan_row row = {.row = n + k,
                                         .pos = s->n_rows + k,
                                         .n_segments = s->n_segments,
                                         .records = s->records,
                                         .blocks = s->blocks};
            attention_add(r->at, s->in, s->keeps, &row);
        }
        memcpy(tokens + n, parts[i].tokens, parts[i].n * sizeof *tokens);
        n += parts[i].n;
        last[i] = n - 1;
        s->n_rows += parts[i].n;
    }
    const struct batch b = {.kv = &r->kv,
                            .n_rows = n,
                            .n_seqs = n_parts,
                            .n_logits = n_parts,
                            .tokens = tokens,
                            .seqs = seqs,
                            .logit_rows = last,
                            .attention = r->at};
    const float *logits = model_forward(r->m, &b);
    rig_must(r->be->ops->sync(r->be));
    return logits;
}

/* Feeds tokens[n_rows, to) in chunks of at most `chunk`; logits of the last row. */
static inline const float *sparse_rig_feed(struct sparse_rig_seq *s, const uint32_t *tokens,
                                           uint32_t to, uint32_t chunk)
{
    const float *logits = NULL;
    while (s->n_rows < to) {
        uint32_t n = sparse_rig_room(s);
        n = n < chunk ? n : chunk;
        n = n < to - s->n_rows ? n : to - s->n_rows;
        const struct sparse_rig_part p = {.seq = s, .n = n, .tokens = tokens + s->n_rows};
        logits = sparse_rig_step(s->rig, &p, 1);
    }
    return logits;
}

#endif
