#include "engine/tool/eval_run.h"

#include "engine/model/internal.h"
#include "kernels/log.h"
#include "sparse/head_policy.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* Operations of the backend with append replaced, so that a watcher sees q and k. First: be->ops
 * points here, and the backend's own functions never look at it. */
struct watched {
    struct backend_ops ops;
    const struct backend_ops *real;
    eval_watcher *watch;
    void *arg;
    float *k; /* [EVAL_CHUNK_ROWS][kv_heads][head_dim] */
};

struct eval_run {
    struct watched watched;
    struct backend *be;
    struct model *model;
    struct kv_geometry geo;
    struct lane_place *lanes;
    struct kv_memory kv;
    struct attention *at;
    uint32_t max_positions, n_blocks, n_segments; /* of the longest sequence */

    /* Blocks j of the sequence: `home` in position order, and n_blocks further on their sealed copy.
     * `mixed` names the copy where a segment is sealed. */
    block_id *home, *mixed;
    uint32_t *records; /* [n_segments]: r, for segment r */
    size_t arena_bytes[LANE_CLASSES], records_bytes;

    uint32_t *tokens;    /* [max_positions] */
    uint32_t n, n_dense; /* positions held; leading ones that a prefill computed */
    uint32_t n_sealed;   /* segments whose sealed form is in use */
    uint32_t n_copied;   /* >= n_sealed: whose sealed form is right, for: */
    uint64_t layout_id, digest_id;
    struct sparse_choice sealed_for;  /* plug-ins with digests of their own have no digest id */
    const struct sparse_instance *in; /* of the rows that ran last, with their attention_seq */
    struct attention_seq *seq;
    uint32_t next_id;
};

/* ---- the watcher ---- */

static void rotate_half(float *v, const float *cos, const float *sin, uint32_t half)
{
    for (uint32_t i = 0; i < half; i++) {
        float a = v[i], b = v[half + i];
        v[i] = a * cos[i] - b * sin[i];
        v[half + i] = a * sin[i] + b * cos[i];
    }
}

static void take_keys(struct watched *w, const struct append_args *a, uint32_t n_rows)
{
    const struct kv_geometry *g = a->kv->geo;
    uint32_t d = g->head_dim, first = a->seqs[0].first_pos;
    size_t width = (size_t)(a->heads + 2 * g->kv_heads) * d, row_k = (size_t)g->kv_heads * d;
    for (uint32_t i = 0; i < n_rows; i++) {
        float *k = w->k + i * row_k;
        size_t angle = (size_t)(first + i) * (d / 2);
        memcpy(k, (const float *)a->qkv + i * width + (size_t)a->heads * d, row_k * sizeof *k);
        for (uint32_t h = 0; h < g->kv_heads; h++)
            rotate_half(k + (size_t)h * d, a->rope_cos + angle, a->rope_sin + angle, d / 2);
        for (size_t j = 0; j < row_k; j++)
            k[j] = g->type == KV_E4M3 ? e4m3_to_f32(f32_to_e4m3(k[j]))
                                      : bf16_to_f32(f32_to_bf16(k[j]));
    }
}

static void watched_append(struct backend *be, const struct append_args *a)
{
    struct watched *w = (struct watched *)be->ops;
    CHECK(a->n_seqs == 1 && a->seqs[0].n_rows <= EVAL_CHUNK_ROWS);
    take_keys(w, a, a->seqs[0].n_rows);
    w->real->append(be, a);
    const struct eval_layer l = {.layer = a->layer,
                                 .first_pos = a->seqs[0].first_pos,
                                 .n_rows = a->seqs[0].n_rows,
                                 .qkv = a->qkv,
                                 .k = w->k};
    w->watch(w->arg, &l);
}

void eval_run_watch(struct eval_run *r, eval_watcher *watch, void *arg)
{
    struct watched *w = &r->watched;
    if (w->real == NULL)
        w->real = r->be->ops;
    if (w->k == NULL)
        w->k =
            mem_alloc((size_t)EVAL_CHUNK_ROWS * r->geo.kv_heads * r->geo.head_dim * sizeof *w->k);
    w->ops = *w->real;
    w->ops.append = watched_append;
    w->watch = watch;
    w->arg = arg;
    r->be->ops = watch ? &w->ops : w->real;
}

void eval_run_record(struct eval_run *r, attention_recorder *record, void *arg)
{
    attention_record(r->at, record, arg);
}

/* ---- life ---- */

static void drop_selection(struct eval_run *r)
{
    attention_seq_destroy(r->at, r->seq);
    r->seq = NULL;
    if (r->in != NULL)
        attention_release(r->at, r->in);
    r->in = NULL;
}

/* NTK-aware: the base grows so that the slowest pair turns `scale` times slower and the fastest stays. */
static status stretch_rope(struct eval_run *r, double scale)
{
    struct model *m = r->model;
    uint32_t half = r->geo.head_dim / 2, n = r->max_positions;
    double base = (double)m->info.shape.rope_base * pow(scale, (double)half / (half - 1.0));
    if (m->rope != NULL)
        r->be->ops->free(r->be, m->rope, model_rope_bytes(&m->info.shape));
    m->info.shape.max_positions = n;
    m->rope = r->be->ops->alloc(r->be, model_rope_bytes(&m->info.shape));
    if (m->rope == NULL)
        return ERR_MEMORY;
    for (uint32_t pos = 0; pos < n; pos++)
        for (uint32_t i = 0; i < half; i++) {
            double angle = pos * pow(base, -(double)i / half);
            m->rope[(size_t)pos * half + i] = (float)cos(angle);
            m->rope[((size_t)n + pos) * half + i] = (float)sin(angle);
        }
    return OK;
}

static status classify(struct eval_run *r, const struct eval_run_config *cfg)
{
    struct kv_geometry *g = &r->geo;
    uint32_t n = g->layers * g->kv_heads;
    uint8_t *classes = mem_alloc(n);
    const struct head_policy_config policy = {.name = cfg->policy ? cfg->policy : "none",
                                              .file = cfg->policy_file,
                                              .sparsity = -1,
                                              .exempt_layers = cfg->exempt_layers};
    status st = head_policy_make(&policy, g->layers, g->kv_heads, classes, &g->stream_sinks,
                                 &g->stream_recent);
    r->lanes = mem_alloc(n * sizeof *r->lanes);
    for (uint32_t i = 0; i < n && st == OK; i++)
        r->lanes[i] = (struct lane_place){classes[i], (uint16_t)g->n_lanes[classes[i]]++};
    for (int c = 0; c < LANE_CLASSES; c++)
        g->block_bytes[c] = g->n_lanes[c] * g->page_bytes;
    g->lanes = r->lanes;
    mem_free(classes);
    return st;
}

static status make_memory(struct eval_run *r)
{
    r->kv.geo = &r->geo;
    for (int c = 0; c < LANE_CLASSES; c++) {
        size_t copies = c == LANE_SPARSE ? 2 : 1;
        r->arena_bytes[c] = copies * r->n_blocks * r->geo.block_bytes[c];
        if (r->arena_bytes[c] == 0)
            continue;
        if ((r->kv.hbm[c] = r->be->ops->alloc(r->be, r->arena_bytes[c])) == NULL)
            return ERR_MEMORY;
    }
    r->home = mem_alloc(r->n_blocks * sizeof *r->home);
    r->mixed = mem_alloc(r->n_blocks * sizeof *r->mixed);
    r->records = mem_alloc((r->n_segments + 1) * sizeof *r->records);
    r->tokens = mem_alloc(r->max_positions * sizeof *r->tokens);
    for (uint32_t i = 0; i < r->n_blocks; i++)
        r->home[i] = r->mixed[i] = i;
    for (uint32_t i = 0; i < r->n_segments; i++)
        r->records[i] = i;
    return OK;
}

static status open_all(struct eval_run *r, const struct eval_run_config *cfg)
{
    const struct cpu_options cpu = {.isa = cfg->isa ? cfg->isa : "auto",
                                    .n_threads = cfg->n_threads};
    TRY(cpu_backend_open(&r->be, &cpu));
    TRY(model_load(&r->model, r->be, cfg->model, cfg->rope_scale > 1 ? 0 : cfg->max_positions));
    const struct model_info *info = model_info(r->model);
    const struct model_shape *s = &info->shape;
    r->max_positions = (cfg->max_positions + SEGMENT_ROWS - 1) / SEGMENT_ROWS * SEGMENT_ROWS;
    r->n_blocks = r->max_positions / cfg->block_rows;
    r->n_segments = r->max_positions / SEGMENT_ROWS;
    r->geo = (struct kv_geometry){.block_rows = cfg->block_rows,
                                  .layers = s->layers,
                                  .kv_heads = s->kv_heads,
                                  .head_dim = s->head_dim,
                                  .type = cfg->kv_type};
    r->geo.page_bytes = kv_page_bytes(&r->geo);
    TRY(classify(r, cfg));
    if (cfg->rope_scale > 1)
        TRY(stretch_rope(r, cfg->rope_scale));
    TRY(make_memory(r));
    TRY(model_reserve(r->model, EVAL_CHUNK_ROWS, EVAL_STEP_ROWS));
    return attention_create(&r->at, r->be, &r->kv, s->heads, info->attn_scale, EVAL_STEP_ROWS,
                            r->max_positions);
}

status eval_run_open(struct eval_run **out, const struct eval_run_config *cfg)
{
    struct eval_run *r = mem_alloc(sizeof *r);
    status st = open_all(r, cfg);
    if (st != OK) {
        eval_run_close(r);
        r = NULL;
    }
    *out = r;
    return st;
}

void eval_run_close(struct eval_run *r)
{
    if (r == NULL)
        return;
    if (r->watched.real != NULL)
        r->be->ops = r->watched.real;
    if (r->at != NULL) {
        drop_selection(r);
        attention_destroy(r->at);
    }
    for (int c = 0; c < LANE_CLASSES; c++)
        if (r->kv.hbm[c] != NULL)
            r->be->ops->free(r->be, r->kv.hbm[c], r->arena_bytes[c]);
    if (r->kv.records != NULL)
        r->be->ops->free(r->be, r->kv.records, r->records_bytes);
    if (r->model != NULL)
        model_destroy(r->model);
    if (r->be != NULL)
        r->be->ops->close(r->be);
    mem_free(r->lanes);
    mem_free(r->home);
    mem_free(r->mixed);
    mem_free(r->records);
    mem_free(r->tokens);
    mem_free(r->watched.k);
    mem_free(r);
}

const struct model_info *eval_run_info(const struct eval_run *r)
{
    return model_info(r->model);
}

const struct tokenizer *eval_run_tokenizer(const struct eval_run *r)
{
    return model_tokenizer(r->model);
}

const struct kv_memory *eval_run_memory(const struct eval_run *r)
{
    return &r->kv;
}

/* ---- the sequence ---- */

/* Back to n positions: sealed forms of segments that reach behind them are no longer right, and those
 * that are not due there are not in use. */
static void unseal(struct eval_run *r, uint32_t n)
{
    uint32_t per = SEGMENT_ROWS / r->geo.block_rows, due = kv_segments_due(n);
    for (uint32_t b = due * per; b < r->n_sealed * per; b++)
        r->mixed[b] = r->home[b];
    if (r->n_sealed > due)
        r->n_sealed = due;
    if (r->n_copied > n / SEGMENT_ROWS)
        r->n_copied = n / SEGMENT_ROWS;
}

void eval_run_rewind(struct eval_run *r, uint32_t n)
{
    CHECK(n <= r->n && n >= r->n_dense);
    r->n = n;
    unseal(r, n);
    drop_selection(r);
}

void eval_run_forget(struct eval_run *r)
{
    r->n = r->n_dense = 0;
    unseal(r, 0);
    drop_selection(r);
}

/* A step of rows that attend everything. */
static status dense_step(struct eval_run *r, const uint32_t *tokens, uint32_t n, bool want_logits,
                         const float **logits)
{
    static uint32_t rows[EVAL_STEP_ROWS];
    const struct batch_seq seq = {
        .n_rows = n, .first_pos = r->n, .blocks = {r->home, r->home, r->home}};
    for (uint32_t i = 0; want_logits && i < n; i++)
        rows[i] = i;
    const struct batch b = {.kv = &r->kv,
                            .n_rows = n,
                            .n_seqs = 1,
                            .n_logits = want_logits ? n : 0,
                            .tokens = tokens,
                            .seqs = &seq,
                            .logit_rows = rows};
    *logits = model_forward(r->model, &b);
    TRY(r->be->ops->sync(r->be));
    memcpy(r->tokens + r->n, tokens, n * sizeof *tokens);
    r->n += n;
    return OK;
}

status eval_run_prefill(struct eval_run *r, const uint32_t *tokens, uint32_t n)
{
    const float *none;
    uint32_t same = 0;
    CHECK(n <= r->max_positions);
    while (same < n && same < r->n_dense && r->tokens[same] == tokens[same])
        same++;
    /* Rows of a run overwrote what lay behind the last prefill; in front of it all is well. */
    r->n = r->n_dense = same;
    unseal(r, same);
    drop_selection(r);
    uint64_t start = clock_us();
    while (r->n < n) {
        uint32_t left = n - r->n;
        TRY(dense_step(r, tokens + r->n, left < EVAL_CHUNK_ROWS ? left : EVAL_CHUNK_ROWS, false,
                       &none));
    }
    r->n_dense = n;
    if (n - same >= SEGMENT_ROWS)
        log_line(LOG_INFO, "prefilled %u tokens (%u computed) in %.1f s", n, n - same,
                 (double)(clock_us() - start) / 1e6);
    return OK;
}

/* ---- sealing ---- */

static status make_records(struct eval_run *r, size_t lane_bytes)
{
    if (lane_bytes <= r->kv.record_lane_bytes)
        return OK;
    if (r->kv.records != NULL)
        r->be->ops->free(r->be, r->kv.records, r->records_bytes);
    unseal(r, 0);
    r->kv.record_lane_bytes = lane_bytes;
    r->kv.record_bytes = lane_bytes * r->geo.n_lanes[LANE_SPARSE];
    r->records_bytes = r->kv.record_bytes * r->n_segments;
    r->kv.records = r->be->ops->alloc(r->be, r->records_bytes);
    return r->kv.records ? OK : ERR_MEMORY;
}

/* Would the segments sealed for this choice be the ones that are there? */
static bool sealed_alike(const struct eval_run *r, const struct sparse_instance *in)
{
    if (r->layout_id != in->layout_id || r->digest_id != in->digest_id)
        return false;
    return in->digest_id != 0 || sparse_choice_equal(&r->sealed_for, &in->choice);
}

static void seal_due(struct eval_run *r, const struct sparse_instance *in)
{
    uint32_t per = SEGMENT_ROWS / r->geo.block_rows, due = kv_segments_due(r->n);
    if (!sealed_alike(r, in)) {
        unseal(r, 0);
        r->layout_id = in->layout_id;
        r->digest_id = in->digest_id;
        r->sealed_for = in->choice;
    }
    for (; r->n_sealed < due; r->n_sealed++) {
        uint32_t s = r->n_sealed;
        for (uint32_t b = s * per; b < (s + 1) * per && in->layout_id != 0; b++)
            r->mixed[b] = r->home[b] + r->n_blocks;
        if (s < r->n_copied)
            continue;
        attention_seal(r->at, in, s, s, 0, r->home + (size_t)s * per, r->mixed + (size_t)s * per);
        r->n_copied = s + 1;
    }
}

/* ---- rows by plan ---- */

static status sparse_step(struct eval_run *r, const struct sparse_instance *in,
                          const uint32_t *tokens, uint32_t n, const float **logits)
{
    static uint32_t rows[EVAL_STEP_ROWS];
    seal_due(r, in);
    /* The first segment may not be due yet: then there is nothing to select from. */
    bool planned = r->n_sealed > 0;
    const struct batch_seq seq = {
        .n_rows = n, .first_pos = r->n, .blocks = {r->mixed, r->home, r->home}, .planned = planned};
    attention_begin(r->at);
    for (uint32_t i = 0; i < n; i++) {
        const struct plan_row row = {.row = i,
                                     .pos = r->n + i,
                                     .n_segments = r->n_sealed,
                                     .records = r->records,
                                     .blocks = r->mixed};
        rows[i] = i;
        if (planned)
            attention_add(r->at, in, r->seq, &row);
    }
    const struct batch b = {.kv = &r->kv,
                            .n_rows = n,
                            .n_seqs = 1,
                            .n_logits = n,
                            .tokens = tokens,
                            .seqs = &seq,
                            .logit_rows = rows,
                            .attention = r->at};
    *logits = model_forward(r->model, &b);
    TRY(r->be->ops->sync(r->be));
    memcpy(r->tokens + r->n, tokens, n * sizeof *tokens);
    r->n += n;
    return OK;
}

/* Rows of the next step: no more than a batch, and not across a border where a segment is sealed. */
static uint32_t step_rows(const struct eval_run *r, uint32_t left)
{
    uint32_t n = left < EVAL_STEP_ROWS ? left : EVAL_STEP_ROWS, border = kv_next_border(r->n);
    return r->n + n > border ? border - r->n : n;
}

static status run_steps(struct eval_run *r, const struct sparse_instance *in,
                        const uint32_t *tokens, uint32_t n, float *logits)
{
    size_t vocab = model_info(r->model)->shape.vocab;
    for (uint32_t at = 0, k; at < n; at += k) {
        const float *got;
        k = step_rows(r, n - at);
        if (in == NULL)
            TRY(dense_step(r, tokens + at, k, true, &got));
        else
            TRY(sparse_step(r, in, tokens + at, k, &got));
        if (logits != NULL)
            memcpy(logits + at * vocab, got, k * vocab * sizeof *logits);
    }
    return OK;
}

/* The instance for a choice and what its sequence keeps from step to step. */
static status hold_selection(struct eval_run *r, const struct sparse_choice *c)
{
    if (r->in != NULL && sparse_choice_equal(&r->in->choice, c))
        return OK;
    drop_selection(r);
    if ((r->in = attention_instance(r->at, c)) == NULL)
        return ERR_ARG;
    r->seq = attention_seq_create(r->at, r->in, r->next_id++, r->max_positions);
    return r->seq ? OK : ERR_MEMORY;
}

status eval_run_rows(struct eval_run *r, const struct sparse_choice *c, const uint32_t *tokens,
                     uint32_t n, float *logits)
{
    struct sparse_traits t;
    CHECK(r->n + n <= r->max_positions);
    if (c == NULL)
        return run_steps(r, NULL, tokens, n, logits);
    TRY(sparse_choice_check(c, &r->geo, &t));
    if (t.attends_all)
        return run_steps(r, NULL, tokens, n, logits);
    TRY(make_records(r, sparse_digest_bytes(&t, &r->geo, r->be->ops->digest_bytes)));
    TRY(hold_selection(r, c));
    return run_steps(r, r->in, tokens, n, logits);
}

status eval_run_cost(struct eval_run *r, const struct sparse_choice *c, uint32_t context,
                     struct eval_cost *out)
{
    struct sparse_instance in = {.choice = *c};
    TRY(sparse_choice_check(c, &r->geo, &in.traits));
    *out = (struct eval_cost){.budget = context, .rows = context, .share = 1};
    if (in.traits.attends_all)
        return OK;
    uint32_t segments = kv_segments_due(context), rows = r->geo.block_rows;
    uint32_t sinks = (in.traits.sinks + rows - 1) / rows * rows;
    out->budget = attention_budget(&in, &r->geo, context);
    out->rows = out->budget + sinks + context - segments * SEGMENT_ROWS;
    out->share = (double)out->budget / context;
    size_t digest = sparse_digest_bytes(&in.traits, &r->geo, r->be->ops->digest_bytes);
    if (in.traits.digest.kind != DIGEST_NONE) { /* mean V is read for what is estimated alone */
        in.traits.digest.values = false;
        digest = sparse_digest_bytes(&in.traits, &r->geo, r->be->ops->digest_bytes) -
                 digest_offset(&in.traits.digest);
    }
    out->scan_bytes = (double)digest * segments * r->geo.n_lanes[LANE_SPARSE];
    return OK;
}

void eval_run_page_positions(const struct eval_run *r, const struct sparse_traits *t,
                             uint32_t layer, uint32_t head, uint32_t page, uint32_t *out)
{
    uint32_t rows = r->geo.block_rows, first = page * rows, segment = first / SEGMENT_ROWS;
    const uint16_t *map = t->permutes ? sparse_digest(&r->kv, segment, layer, head) : NULL;
    for (uint32_t i = 0; i < rows; i++) {
        uint32_t row = first % SEGMENT_ROWS + i;
        out[i] = segment * SEGMENT_ROWS + (map ? map[row] : row);
    }
}
