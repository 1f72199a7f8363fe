/* The engine thread (engine.h): hear, plan, run, tell; sleep when there is nothing to do.
 *
 * Everything below engine_start belongs to the thread; the loop thread touches only the mailbox and
 * the constant engine_info. */
#include "engine/engine.h"

#include "engine/memory_plan.h"
#include "engine/model/model.h"
#include "engine/step.h"
#include "engine/tool/trace.h"
#include "kernels/cuda_api.h"
#include "kernels/log.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

enum {
    IDLE_WAIT_US = 1000000,
    GROWING_WAIT_US = 50000, /* while the second tier is being pinned */
    DEFAULT_EVENT_BYTES = 4 << 20,
    MIN_SUBMIT_BYTES = 4 << 20,
    MAX_FAILED_STEPS = 3, /* in a row: the device is gone, not one step */
    UNSCORED_EVERY = 64,  /* steps between two looks at the count of selections without a score */
    WRITE_BEHIND_BLOCKS = 4, /* per step: 0.7 MB of the default model, 0.1 ms */
};

/* Of the memory that is free, for KV at most where nobody says how much. A device's has no other user: what
 * is left is for the activations of a step and the backend's scratch. */
static const double MACHINE_SHARE = 0.25, DEVICE_SHARE = 0.85;

static const double STEP_WEIGHT = 0.1; /* of the last step in the mean of step times */

struct engine {
    struct engine_config cfg;
    struct engine_info info;
    struct catalog catalog;
    struct backend *be;
    struct model *model;
    struct kv *kv;
    struct lane_place *lanes;   /* [layers * kv_heads] of the geometry */
    struct attention *at;       /* NULL: the device cannot attend by plan */
    struct trace_writer *trace; /* --record-selection; NULL: off */
    struct mailbox *mail;
    struct sched sched;
    struct step step;
    struct report report;
    struct msg_step stats;
    uint64_t n_submitted;
    uint32_t n_failed; /* steps in a row */
    char failure[200]; /* of the last of them */
    bool quit;
    uint64_t
        step_from; /* when the step to settle next was launched, or the one before it settled */
    bool changed;  /* the numbers of MSG_STEP moved outside a step */
    bool dram_growing;
    uint64_t dram_ready, dram_told,
        dram_since; /* bytes at the last poll and in the log; when it began */
    bool has_thread;
    pthread_t thread;
    char backend_text[200];
};

/* ---- opening ---- */

/* What was asked for that the device cannot do; NULL: nothing. For auto, which has another device
 * then; --device cuda is refused where that shows. */
static const char *beyond(const struct backend_ops *ops, const struct engine_config *c)
{
    return c->sparse.plugin != 0 && !backend_plans(ops)                              ? "--sparse"
           : c->kv_dram_bytes != 0 && ops->memory != NULL && ops->alloc_host == NULL ? "--kv-dram"
           : c->record_selection != NULL && ops->read == NULL ? "--record-selection"
                                                              : NULL;
}

/* A GPU if one answers and can do all that was asked for; else the CPU, and the log says why. */
static status open_any(struct engine *e)
{
    const char *lacks = NULL;
    if (cuda_load(&e->be, &e->cfg.cuda) != OK) {
        log_line(LOG_INFO, "device auto: cpu (%s)", err_text());
    } else if ((lacks = beyond(e->be->ops, &e->cfg)) != NULL) {
        log_line(LOG_INFO, "device auto: cpu, because device cuda has no %s", lacks);
        e->be->ops->close(e->be);
        e->be = NULL;
    } else {
        return OK;
    }
    return cpu_backend_open(&e->be, &e->cfg.cpu);
}

static status open_backend(struct engine *e)
{
    const char *device = e->cfg.device;
    if (strcmp(device, "mock") == 0)
        return mock_backend_open(&e->be, &e->cfg.mock);
    if (strcmp(device, "cpu") == 0)
        return cpu_backend_open(&e->be, &e->cfg.cpu);
    if (strcmp(device, "cuda") == 0)
        return cuda_load(&e->be, &e->cfg.cuda);
    if (strcmp(device, "auto") == 0)
        return open_any(e);
    return err(ERR_ARG, "--device %s: there are auto, cpu, cuda and mock", device);
}

static status open_model(struct engine *e)
{
    if (e->cfg.model != NULL && e->cfg.dummy)
        return model_load_dummy(&e->model, e->be, e->cfg.model, e->cfg.max_model_len);
    if (e->cfg.model != NULL)
        return model_load(&e->model, e->be, e->cfg.model, e->cfg.max_model_len);
    if (strcmp(e->cfg.device, "mock") == 0)
        return model_create_mock(&e->model, e->be, e->cfg.max_model_len);
    return err(ERR_ARG, "no model given: spind serve MODEL.gguf%s",
               e->cfg.dummy ? ", or a config.json with --load-format dummy" : "");
}

static void to_log(void *arg, const char *text)
{
    (void)arg;
    log_line(LOG_INFO, "%s", text);
}

/* The class of every lane. */
static status classify(struct engine *e, struct kv_geometry *geo)
{
    uint32_t n = geo->layers * geo->kv_heads, sinks = 0, recent = 0;
    uint8_t *classes = mem_alloc(n);
    status st = OK;
    if (e->cfg.heads.name != NULL)
        st = head_policy_make(&e->cfg.heads, geo->layers, geo->kv_heads, classes, &sinks, &recent);
    else
        memset(classes, LANE_SPARSE, n);
    if (st == OK) {
        e->lanes = mem_alloc(n * sizeof *e->lanes);
        kv_geometry_classify(geo, classes, e->lanes, sinks, recent);
    }
    mem_free(classes);
    return st;
}

/* Positions that HBM holds whole. */
static uint32_t dense_length(const struct memory_plan *plan)
{
    static const enum lane_class whole[] = {LANE_SPARSE, LANE_DENSE};
    uint64_t rows = plan->max_model_len;
    for (size_t i = 0; i < ARRAY_LEN(whole); i++) {
        uint64_t holds = (uint64_t)plan->blocks[whole[i]][KV_HBM] * plan->geo.block_rows;
        if (plan->geo.block_bytes[whole[i]] > 0 && holds < rows)
            rows = holds;
    }
    return (uint32_t)rows;
}

static uint32_t tail_blocks(const struct kv_geometry *g)
{
    return (SEGMENT_ROWS + TAIL_ROWS + g->block_rows - 1) / g->block_rows;
}

static bool spilled_fits(const struct memory_plan *plan, const struct sparse_instance *in,
                         uint32_t len)
{
    uint32_t slots = attention_min_slots(in, &plan->geo, len);
    return slots <= HOT_MAX_SLOTS &&
           slots + tail_blocks(&plan->geo) <= plan->blocks[LANE_SPARSE][KV_HBM];
}

/* A sequence of the full length that lies in DRAM must have its hot set and its tail in HBM. */
static status check_choice(struct engine *e, struct memory_plan *plan)
{
    struct sparse_instance in = {.plugin = sparse_at(e->cfg.sparse.plugin),
                                 .choice = e->cfg.sparse};
    uint32_t len = plan->max_model_len, fits = dense_length(plan);
    if (e->cfg.sparse.plugin == 0 || plan->geo.block_bytes[LANE_SPARSE] == 0 || fits == len)
        return OK;
    TRY(sparse_choice_check(&in.choice, &plan->geo, &in.traits));
    if (in.traits.attends_all || spilled_fits(plan, &in, len))
        return OK;
    for (uint32_t beyond = len; beyond - fits > 1;) { /* needs grow with the length */
        uint32_t middle = fits + (beyond - fits) / 2;
        if (spilled_fits(plan, &in, middle))
            fits = middle;
        else
            beyond = middle;
    }
    if (e->cfg.max_model_len != 0)
        return err(
            ERR_MEMORY,
            "--max-model-len %u: %s with --sparse-budget %g needs %u blocks of hot set and %u "
            "of tail in HBM (a hot set has %u at most), --kv-hbm gives %u: raise --kv-hbm, or "
            "lower --sparse-budget or --max-model-len to %u",
            len, in.plugin->name, (double)e->cfg.sparse.budget,
            attention_min_slots(&in, &plan->geo, len), tail_blocks(&plan->geo), HOT_MAX_SLOTS,
            plan->blocks[LANE_SPARSE][KV_HBM], fits);
    log_line(LOG_WARN, "max_model_len cut from %u to %u: --kv-hbm has no more room for hot sets",
             len, fits);
    plan->max_model_len = fits;
    return OK;
}

/* What will lie where; nothing is allocated yet. */
static status make_plan(struct engine *e, struct memory_plan *plan)
{
    const struct model_shape *sh = &model_info(e->model)->shape;
    struct kv_geometry geo =
        kv_geometry_make(e->cfg.block_rows, sh->layers, sh->kv_heads, sh->head_dim);
    uint32_t len = e->cfg.max_model_len != 0 ? e->cfg.max_model_len : sh->max_positions;
    if (len > sh->max_positions)
        return err(ERR_ARG, "--max-model-len %u: the model has %u positions", len,
                   sh->max_positions);
    bool own = e->be->ops->memory != NULL; /* memory; the weights are in it already */
    const struct memory_room room = {.bytes = own ? e->be->ops->memory(e->be) : memory_available(),
                                     .share = !own                      ? MACHINE_SHARE
                                              : e->cfg.device_share > 0 ? e->cfg.device_share
                                                                        : DEVICE_SHARE,
                                     .apart = own,
                                     .host_bytes = own ? memory_available() : 0};
    if (own && e->cfg.kv_dram_bytes != 0 && e->be->ops->alloc_host == NULL)
        return err(ERR_ARG,
                   "--kv-dram: device %s has no second tier: leave it 0, or choose --device cpu",
                   e->be->ops->name);
    TRY(classify(e, &geo));
    TRY(catalog_make(&e->catalog, e->be, &geo, &e->cfg.sparse, e->cfg.sparse_min_context));
    TRY(memory_plan_make(plan, &e->cfg, &geo, e->catalog.record_lane_bytes, len, &room));
    return check_choice(e, plan);
}

static status open_cache(struct engine *e, struct memory_plan *plan)
{
    TRY(make_plan(e, plan));
    memory_plan_tell(plan, to_log, NULL);
    struct kv_config kc = {.geo = plan->geo,
                           .n_records = plan->n_records,
                           .record_lane_bytes = plan->record_lane_bytes,
                           .prefix_caching = e->cfg.prefix_caching,
                           .secret = {e->cfg.seed, ~e->cfg.seed}};
    memcpy(kc.blocks, plan->blocks, sizeof kc.blocks);
    e->dram_growing = plan->dram_bytes > 0 && e->be->ops->alloc_host != NULL;
    e->dram_since = clock_us();
    return kv_create(&e->kv, e->be, &kc);
}

static void record_selection(void *arg, const struct attention_selection *s)
{
    struct engine *e = arg;
    const struct trace_record r = {.sequence = s->id,
                                   .pos = s->pos,
                                   .layer = s->layer,
                                   .head = s->head,
                                   .n_pages = s->n_pages,
                                   .pages = s->pages};
    trace_write(e->trace, &r);
}

static status open_trace(struct engine *e)
{
    const struct kv_geometry *g = kv_geometry(e->kv);
    struct trace_header h = {.layers = g->layers,
                             .kv_heads = g->kv_heads,
                             .block_rows = g->block_rows,
                             .interval = e->cfg.sparse.interval,
                             .budget = e->cfg.sparse.budget};
    if (e->cfg.record_selection == NULL)
        return OK;
    if (e->at == NULL || e->be->ops->read == NULL)
        return err(ERR_ARG, "--record-selection: device %s %s", e->be->ops->name,
                   e->at == NULL ? "selects nothing"
                                 : "selects in its own memory: record with --device cpu");
    snprintf(h.model, sizeof h.model, "%s", model_info(e->model)->name);
    snprintf(h.plugin, sizeof h.plugin, "%s", sparse_at(e->cfg.sparse.plugin)->name);
    TRY(trace_create(&e->trace, e->cfg.record_selection, &h));
    attention_record(e->at, record_selection, e);
    return OK;
}

static status open_attention(struct engine *e, const struct memory_plan *plan)
{
    const struct model_info *mi = model_info(e->model);
    if (!backend_plans(e->be->ops))
        return OK;
    return attention_create(&e->at, e->be, kv_memory(e->kv), mi->shape.heads, mi->attn_scale,
                            e->cfg.max_batched_tokens, plan->max_model_len);
}

static void fill_info(struct engine *e, const struct memory_plan *plan)
{
    const struct model_info *mi = model_info(e->model);
    const size_t *unit = plan->geo.block_bytes;
    enum lane_class main = unit[LANE_SPARSE] > 0  ? LANE_SPARSE
                           : unit[LANE_DENSE] > 0 ? LANE_DENSE
                                                  : LANE_STREAM;
    snprintf(e->backend_text, sizeof e->backend_text, "%s", e->be->ops->describe(e->be));
    e->info = (struct engine_info){
        .architecture = mi->architecture,
        .name = mi->name,
        .backend = e->backend_text,
        .tokenizer = model_tokenizer(e->model),
        .chat = model_chat(e->model),
        .n_params = mi->n_params,
        .weight_bytes = mi->weight_bytes,
        .vocab = mi->shape.vocab,
        .max_model_len = plan->max_model_len,
        .max_dense_len = dense_length(plan),
        .block_rows = e->cfg.block_rows,
        .max_num_seqs = plan->max_num_seqs,
        .max_batched_tokens = e->cfg.max_batched_tokens,
        .kv_blocks = {plan->blocks[main][KV_HBM], plan->blocks[main][KV_DRAM]},
        .kv_block_bytes = unit[LANE_SPARSE] + unit[LANE_DENSE] + unit[LANE_STREAM],
        .n_end_ids = mi->n_end_ids,
        .prefix_caching = e->cfg.prefix_caching,
        .catalog = &e->catalog,
    };
    memcpy(e->info.end_ids, mi->end_ids, sizeof e->info.end_ids);
}

/* One real row through the whole model: touches every weight and finds a broken device before the
 * first client does. */
static status warm_up(struct engine *e)
{
    const uint32_t token = 0, row = 0;
    const struct kv_open o = {.tokens = &token, .n = 1, .max_rows = 1};
    struct kv_seq seq = {0};
    uint32_t n_hit;
    TRY(kv_seq_open(e->kv, &seq, &o, 0, &n_hit));
    TRY(kv_seq_grow(e->kv, &seq, 1));
    struct batch_seq bs = {.n_rows = 1};
    for (int c = 0; c < LANE_CLASSES; c++)
        bs.blocks[c] = seq.table[c];
    const struct batch b = {.kv = kv_memory(e->kv),
                            .n_rows = 1,
                            .n_seqs = 1,
                            .n_logits = 1,
                            .tokens = &token,
                            .seqs = &bs,
                            .logit_rows = &row};
    model_forward(e->model, &b);
    status st = e->be->ops->sync(e->be);
    kv_seq_close(e->kv, &seq);
    return st;
}

static void *tier_alloc(struct backend *be, bool host, size_t bytes)
{
    struct host_progress p = {0};
    if (!host || be->ops->alloc_host == NULL)
        return be->ops->alloc(be, bytes);
    void *to = be->ops->alloc_host(be, bytes);
    while (to != NULL && !p.ended) { /* a few milliseconds, of a small piece */
        be->ops->host_progress(be, to, &p);
        nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
    }
    return to;
}

static void tier_free(struct backend *be, bool host, void *p, size_t bytes)
{
    if (p != NULL && host && be->ops->alloc_host != NULL)
        be->ops->free_host(be, p, bytes);
    else if (p != NULL)
        be->ops->free(be, p, bytes);
}

/* Microseconds to copy a byte from the second tier to the first: what predictions of transfer stand on.
 * Before the arenas are made: while they are, the bus is busy. */
static double time_copies(struct engine *e)
{
    enum { BYTES = 8 << 20 };
    char *from = tier_alloc(e->be, true, BYTES), *to = tier_alloc(e->be, false, BYTES);
    double us = 0;
    if (from != NULL && to != NULL) {
        e->be->ops->copy(e->be, from, to, BYTES); /* touches the pages */
        (void)e->be->ops->sync(e->be);
        uint64_t t0 = clock_us();
        e->be->ops->copy(e->be, to, from, BYTES);
        (void)e->be->ops->sync(e->be);
        us = (double)(clock_us() - t0) / BYTES;
    }
    tier_free(e->be, true, from, BYTES);
    tier_free(e->be, false, to, BYTES);
    return us;
}

static status check_config(const struct engine_config *c)
{
    if (c->block_rows != 8 && c->block_rows != 16 && c->block_rows != 32)
        return err(ERR_ARG, "--block-size %u: 8, 16 or 32", c->block_rows);
    return OK;
}

/* What nobody said is the device's. */
static status size_steps(struct engine *e)
{
    struct engine_config *c = &e->cfg;
    const struct backend_ops *ops = e->be->ops;
    if (c->max_batched_tokens == 0)
        c->max_batched_tokens = c->max_num_seqs > ops->step_rows ? c->max_num_seqs : ops->step_rows;
    if (c->max_num_seqs == 0)
        c->max_num_seqs =
            c->max_batched_tokens < ops->step_seqs ? c->max_batched_tokens : ops->step_seqs;
    if (c->max_batched_tokens < c->max_num_seqs)
        return err(ERR_ARG, "--max-num-batched-tokens (%u) must be at least --max-num-seqs (%u)",
                   c->max_batched_tokens, c->max_num_seqs);
    return OK;
}

static status open_all(struct engine *e, void (*wake)(void *), void *arg)
{
    struct memory_plan plan = {0};
    uint64_t t0 = clock_us();
    TRY(open_backend(e));
    log_line(LOG_INFO, "device: %s", e->be->ops->describe(e->be));
    TRY(size_steps(e));
    TRY(open_model(e));
    uint64_t t1 = clock_us();
    double fetch_us = e->cfg.kv_dram_bytes > 0 ? time_copies(e) : 0;
    TRY(open_cache(e, &plan));
    TRY(open_attention(e, &plan));
    TRY(open_trace(e));
    size_t events = e->cfg.to_loop_bytes != 0 ? e->cfg.to_loop_bytes : DEFAULT_EVENT_BYTES;
    size_t submit = (size_t)plan.max_model_len * 4 * 4 + MIN_SUBMIT_BYTES;
    TRY(mailbox_create(&e->mail, submit, events, wake, arg));
    e->report.mail = e->mail;
    sched_init(&e->sched, e->kv, e->at, plan.max_num_seqs, e->cfg.max_batched_tokens,
               e->cfg.prefix_caching);
    e->sched.headroom = e->cfg.transfer_headroom;
    e->sched.loose = e->be->ops->loose;
    e->sched.fetch_us = plan.blocks[LANE_SPARSE][KV_DRAM] > 0 ? fetch_us : 0;
    TRY(step_init(&e->step, e->be, e->model, e->kv, &e->sched, &e->report));
    fill_info(e, &plan);
    uint64_t t2 = clock_us();
    TRY(warm_up(e));
    log_line(LOG_INFO, "model %.0f ms, KV cache and buffers %.0f ms, warm-up step %.1f ms",
             (double)(t1 - t0) / 1e3, (double)(t2 - t1) / 1e3, (double)(clock_us() - t2) / 1e3);
    return OK;
}

static void close_all(struct engine *e)
{
    if (e->sched.running != NULL)
        sched_fini(&e->sched);
    step_fini(&e->step);
    attention_destroy(e->at);
    if (e->trace != NULL && trace_finish(e->trace) != OK)
        log_line(LOG_ERROR, "--record-selection: %s", err_text());
    kv_destroy(e->kv);
    mem_free(e->lanes);
    model_destroy(e->model);
    mailbox_destroy(e->mail);
    if (e->be != NULL)
        e->be->ops->close(e->be);
    mem_free(e);
}

status engine_create(struct engine **out, const struct engine_config *cfg, void (*wake)(void *),
                     void *arg)
{
    TRY(check_config(cfg));
    struct engine *e = mem_alloc(sizeof *e);
    e->cfg = *cfg;
    status st = open_all(e, wake, arg);
    if (st != OK) {
        close_all(e);
        return st;
    }
    *out = e;
    return OK;
}

/* What the server's own choice of sparse attention asks of a sequence at full length. */
static status tell_choice(struct engine *e, const struct memory_plan *plan, engine_line *line,
                          void *arg)
{
    const struct kv_geometry *g = &plan->geo;
    struct sparse_instance in = {.plugin = sparse_at(e->cfg.sparse.plugin),
                                 .choice = e->cfg.sparse};
    char text[256];
    if (e->cfg.sparse.plugin == 0)
        return OK;
    TRY(sparse_choice_check(&in.choice, g, &in.traits));
    uint32_t len = plan->max_model_len, slots = attention_min_slots(&in, g, len);
    uint32_t tail = tail_blocks(g);
    size_t digest = sparse_digest_bytes(&in.traits, g, e->be->ops->digest_bytes);
    double per_row = (double)g->page_bytes / g->block_rows;
    snprintf(
        text, sizeof text,
        "%s at %u tokens: %u rows selected per lane; spilled it needs %u HBM blocks of hot set "
        "and %u of tail, %.1f MiB",
        in.plugin->name, len, attention_budget(&in, g, len), slots, tail,
        (double)(slots + tail) * (double)g->block_bytes[LANE_SPARSE] / 1048576);
    line(arg, text);
    snprintf(text, sizeof text,
             "%s digests: %zu bytes per segment and lane, %.1f %% of its KV, row map included",
             in.plugin->name, digest, 100 * (double)digest / (per_row * SEGMENT_ROWS));
    line(arg, text);
    return OK;
}

static void tell_tables(const struct memory_plan *plan, engine_line *line, void *arg)
{
    char text[256];
    const struct kv_geometry *g = &plan->geo;
    uint32_t blocks = (plan->max_model_len + g->block_rows - 1) / g->block_rows, arrays = 1;
    for (int c = 0; c < LANE_CLASSES; c++)
        arrays += g->block_bytes[c] > 0;
    double kept = (double)g->stream_sinks + g->stream_recent + 64; /* rows of a ring */
    double ring = kept < plan->max_model_len ? kept / g->block_rows : blocks;
    double kv =
        (double)blocks * (double)(g->block_bytes[LANE_SPARSE] + g->block_bytes[LANE_DENSE]) +
        ring * (double)g->block_bytes[LANE_STREAM];
    double table = (double)arrays * blocks * sizeof(block_id);
    uint32_t n_leaves = (uint32_t)((blocks + HOT_LEAF_PAGES - 1) / HOT_LEAF_PAGES);
    double leaves = (double)n_leaves * HOT_LEAF_PAGES * g->n_lanes[LANE_SPARSE] * sizeof(uint16_t);
    snprintf(
        text, sizeof text,
        "tables of a sequence of %u tokens: %.1f KiB of blocks; if spilled, leaves of %.1f KiB: "
        "%.2f %% of its KV",
        plan->max_model_len, table / 1024, leaves / 1024, 100 * (table + leaves) / kv);
    line(arg, text);
}

status engine_inspect(const struct engine_config *cfg, engine_line *line, void *arg)
{
    TRY(check_config(cfg));
    struct engine *e = mem_alloc(sizeof *e);
    struct memory_plan plan = {0};
    char text[256];
    e->cfg = *cfg;
    status st = open_backend(e);
    if (st == OK)
        st = size_steps(e);
    if (st == OK)
        st = open_model(e);
    if (st == OK)
        st = make_plan(e, &plan);
    if (st == OK) {
        const struct model_info *mi = model_info(e->model);
        snprintf(text, sizeof text, "%s: %.1f M parameters, weights %.2f GiB on %s", mi->name,
                 (double)mi->n_params / 1e6, (double)mi->weight_bytes / 1073741824.0,
                 e->be->ops->describe(e->be));
        line(arg, text);
        memory_plan_tell(&plan, line, arg);
        tell_tables(&plan, line, arg);
        st = tell_choice(e, &plan, line, arg);
    }
    close_all(e);
    return st;
}

const struct engine_info *engine_info(const struct engine *e)
{
    return &e->info;
}

struct mailbox *engine_mailbox(struct engine *e)
{
    return e->mail;
}

/* ---- hearing ---- */

static void finish(struct engine *e, struct sequence *q, enum done_reason reason, const char *why)
{
    report_done(&e->report, q, reason, 0, why);
    step_forget(&e->step, q);
    sched_remove(&e->sched, q);
    sequence_destroy(q, e->at);
    e->changed = true;
}

/* Dense or by plan: from the request (the API looked at min_context) and its length, never from load. */
static status choose_attention(struct engine *e, struct sequence *q)
{
    uint32_t longest = q->n_prompt + q->max_tokens;
    if (q->sparse.plugin == 0 || kv_segments_due(longest) == 0)
        return OK;
    if (kv_geometry(e->kv)->n_lanes[LANE_SPARSE] == 0) /* a head policy has them all */
        return OK;
    if (e->at == NULL)
        return err(ERR_ARG, "device %s attends everything: sparse attention is not there",
                   e->be->ops->name);
    q->in = attention_instance(e->at, &q->sparse);
    if (q->in == NULL) /* the API checked the choice */
        return ERR_MEMORY;
    if (q->in->traits.attends_all) {
        attention_release(e->at, q->in);
        q->in = NULL;
        return OK;
    }
    size_t kept = attention_seq_bytes(q->in, kv_geometry(e->kv), longest);
    if (kept > ATTENTION_KEPT_BYTES)
        return err(
            ERR_ARG,
            "with an interval above 1, the last selection of %u tokens with this budget takes "
            "%zu MiB, and there is room for %d: lower the budget, or set the interval to 1",
            longest, kept >> 20, ATTENTION_KEPT_BYTES >> 20);
    q->keeps = attention_seq_create(e->at, q->in, q->id, longest);
    return q->keeps != NULL ? OK : err(ERR_MEMORY, "no memory for a sequence's selections");
}

static void hear_submit(struct engine *e, const struct msg_submit *m)
{
    struct sequence *q = sequence_create(m, ++e->n_submitted, clock_us());
    if (q == NULL) {
        report_refused(&e->report, m);
        return;
    }
    status st = choose_attention(e, q);
    if (st != OK) {
        report_done(&e->report, q, DONE_REFUSED, 0, st == ERR_ARG ? err_text() : NULL);
        sequence_destroy(q, e->at);
        return;
    }
    sched_submit(&e->sched, q);
    e->changed = true;
    /* Nothing to sample and nothing to score: done before it began. */
    if (q->max_tokens == 0 && !sequence_scores_prompt(q))
        finish(e, q, DONE_LENGTH, NULL);
}

static void hear_cancel(struct engine *e, const struct msg_cancel *m)
{
    struct sequence *q = sched_find(&e->sched, m->id);
    if (q != NULL) /* else its last event and the cancel crossed */
        finish(e, q, DONE_CANCELLED, NULL);
}

static void hear_all(struct engine *e)
{
    const struct msg_head *h;
    while ((h = mailbox_peek(e->mail, TO_ENGINE)) != NULL) {
        switch (h->kind) {
        case MSG_SUBMIT: hear_submit(e, (const struct msg_submit *)(const void *)h); break;
        case MSG_CANCEL: hear_cancel(e, (const struct msg_cancel *)(const void *)h); break;
        case MSG_QUIT: e->quit = true; break;
        default: CHECK(!"a message the engine knows");
        }
        mailbox_release(e->mail, TO_ENGINE);
    }
}

/* ---- telling ---- */

static struct msg_residence residence_now(const struct engine *e, const struct kv_counts *c)
{
    struct msg_residence r = {.resident = c->n_resident,
                              .spilled = c->n_spilled,
                              .paused = c->n_paused,
                              .spills = c->spills,
                              .restores = c->restores,
                              .pauses = c->pauses,
                              .moved_down = c->moved_down,
                              .moved_up = c->moved_up,
                              .written_behind = c->written_behind,
                              .page_hits = c->page_hits,
                              .page_misses = c->page_misses,
                              .light_misses = c->light_misses,
                              .fetched_bytes = c->fetched_bytes,
                              .leaf_bytes = c->leaf_bytes,
                              .index_bytes = c->index_bytes,
                              .digest_bytes = c->record_bytes_used,
                              .map_bytes = c->map_bytes_used,
                              .segments_sealed = e->sched.segments_sealed,
                              .segments_found = e->sched.segments_found,
                              .planned_rows = e->step.planned_rows,
                              .dram_ready = c->dram_ready,
                              .dram_grows = e->dram_growing};
    r.unscored_selections = e->stats.residence.unscored_selections;
    /* Reading it takes a wait for the device: now and then, and whenever somebody came or went. */
    if (e->at != NULL && (e->changed || e->stats.steps % UNSCORED_EVERY == 0))
        r.unscored_selections = attention_unscored(e->at);
    for (uint32_t i = 0; i < e->sched.n_running; i++)
        r.hot_slots += e->sched.running[i]->kv.n_slots;
    return r;
}

static void tell_step(struct engine *e)
{
    struct kv_counts c;
    kv_counts(e->kv, &c);
    struct msg_step *s = &e->stats;
    s->residence = residence_now(e, &c);
    s->now_us = clock_us();
    s->prompt_tokens = e->step.prompt_tokens;
    s->output_tokens = e->step.output_tokens;
    s->cached_tokens = e->sched.cached_tokens;
    s->queried_tokens = e->sched.queried_tokens;
    s->preemptions = e->sched.preemptions;
    s->table_bytes = c.table_bytes;
    s->running = e->sched.n_running;
    s->waiting = e->sched.n_waiting;
    for (int tier = 0; tier < 2; tier++) {
        s->blocks_total[tier] = c.total[tier];
        s->blocks_free[tier] = c.free[tier];
        s->blocks_cached[tier] = c.cached[tier];
    }
    report_step(&e->report, s);
    e->changed = false;
}

static void tell_admitted(void *arg, struct sequence *q)
{
    struct engine *e = arg;
    report_scheduled(&e->report, q);
}

static void tell_refused(void *arg, struct sequence *q, status why)
{
    struct engine *e = arg;
    char text[256];
    snprintf(text, sizeof text, "%s: lower max_tokens%s, or start the server with more --kv-hbm%s",
             err_text(), q->in != NULL ? " or the sparse budget" : "",
             q->in != NULL ? " or --kv-dram" : "");
    finish(e, q, DONE_REFUSED, why == ERR_FULL ? text : NULL);
}

/* ---- the thread ---- */

#ifdef AUDIT
/* DEBUG=1: every invariant of the cache after every step. */
static void audit(const struct engine *e)
{
    const struct sched *s = &e->sched;
    struct kv_seq **open = mem_alloc((s->n_sequences + 1) * sizeof(struct kv_seq *));
    uint32_t n = 0;
    for (uint32_t i = 0; i < s->n_running; i++)
        open[n++] = &s->running[i]->kv;
    for (const struct sequence *q = s->first; q != NULL; q = q->next)
        if (q->state == SEQUENCE_PAUSED)
            open[n++] = (struct kv_seq *)(uintptr_t)&q->kv;
    kv_audit(e->kv, open, n);
    mem_free(open);
}
#endif

/* Less than a quarter left, or somebody waits: spilling may be next. */
static bool hbm_is_short(const struct engine *e)
{
    return e->sched.n_waiting > 0 || kv_available(e->kv) < e->info.kv_blocks[KV_HBM] / 4;
}

/* A device that a step broke for good: nothing is queued, and it fails again. */
static bool device_is_gone(const struct engine *e)
{
    return e->be->ops->memory != NULL && e->be->ops->sync(e->be) != OK;
}

static void hear_failed_step(struct engine *e)
{
    snprintf(e->failure, sizeof e->failure, "%s", err_text());
    log_line(LOG_ERROR, "step failed, its requests end with an error: %s", e->failure);
    e->n_failed = device_is_gone(e) ? MAX_FAILED_STEPS : e->n_failed + 1;
}

/* Blocks to write behind after a step: so many as it costs a small share of the step, for a step of a large
 * prompt makes many. */
static uint32_t behind_blocks(const struct engine *e)
{
    static const double SHARE = 0.04;
    double block_us = (double)e->info.kv_block_bytes * e->sched.fetch_us;
    double n = block_us > 0 ? SHARE * e->sched.step_us / block_us : 0;
    if (e->be->ops->alloc_host == NULL || n < WRITE_BEHIND_BLOCKS)
        return WRITE_BEHIND_BLOCKS;
    return (uint32_t)n;
}

/* The oldest step in flight: with another one ahead of it, if that can be, so that the device does not wait
 * for what follows here. */
static void settle_step(struct engine *e)
{
    const struct flight *f = &e->step.flights[e->step.first];
    uint32_t rows = f->n_rows, decodes = f->n_decodes;
    (void)step_ahead(&e->step);
    status st = step_settle(&e->step);
    if (st == OK)
        e->n_failed = 0;
    else
        hear_failed_step(e);
    /* Between two steps, or behind the one ahead; only where HBM is getting short. */
    if (e->cfg.write_behind && st == OK && hbm_is_short(e))
        (void)kv_write_behind(e->kv, behind_blocks(e));
    uint64_t now = clock_us();
    e->stats.steps++;
    e->stats.step_us = now - e->step_from;
    e->step_from = now;
    double weight = e->sched.step_us > 0 ? STEP_WEIGHT : 1; /* the first one is all there is */
    e->sched.step_us += ((double)e->stats.step_us - e->sched.step_us) * weight;
    e->stats.step_tokens = rows;
    e->stats.step_decodes = decodes;
    log_line(LOG_DEBUG, "step %llu: %u rows, %u of them answers, %llu us, %llu of them waiting",
             (unsigned long long)e->stats.steps, rows, decodes,
             (unsigned long long)e->stats.step_us, (unsigned long long)e->step.wait_us);
    tell_step(e);
#ifdef AUDIT
    audit(e);
#endif
}

/* A second tier that is made behind the start: takes what has come, and says so now and then. */
static void watch_dram(struct engine *e)
{
    enum { TELL_PARTS = 8, IN_GIB = 1 << 30 };
    struct kv_counts c;
    if (!e->dram_growing)
        return;
    kv_poll(e->kv);
    kv_counts(e->kv, &c);
    e->changed |= c.dram_ready != e->dram_ready || c.dram_ended;
    e->dram_ready = c.dram_ready;
    e->dram_growing = !c.dram_ended;
    double seconds = (double)(clock_us() - e->dram_since) / 1e6;
    if (c.dram_why != NULL && c.dram_ended)
        log_line(LOG_WARN, "DRAM tier: %s; going on with %.2f GiB", c.dram_why,
                 (double)c.dram_ready / IN_GIB);
    else if (c.dram_ended || c.dram_ready - e->dram_told >= c.dram_bytes / TELL_PARTS)
        log_line(LOG_INFO, "DRAM tier: %.1f of %.1f GiB pinned after %.1f s",
                 (double)c.dram_ready / IN_GIB, (double)c.dram_bytes / IN_GIB, seconds);
    else
        return;
    e->dram_told = c.dram_ready;
}

static void *engine_thread(void *arg)
{
    struct engine *e = arg;
    pthread_setname_np(pthread_self(), "spind-engine");
    tell_step(e);
    while (!e->quit && e->n_failed < MAX_FAILED_STEPS) {
        hear_all(e);
        watch_dram(e);
        uint64_t now = clock_us();
        if (e->step.n_flights == 0 && sched_plan(&e->sched, now, tell_admitted, tell_refused, e)) {
            e->step_from = now;
            step_launch(&e->step);
        }
        if (e->step.n_flights > 0)
            settle_step(e);
        else if (e->changed)
            tell_step(e);
        else if (!e->quit)
            mailbox_wait_engine(e->mail, e->dram_growing ? GROWING_WAIT_US : IDLE_WAIT_US);
    }
    if (e->n_failed >= MAX_FAILED_STEPS)
        report_failed(&e->report, e->failure);
    return NULL;
}

status engine_start(struct engine *e)
{
    int rc = pthread_create(&e->thread, NULL, engine_thread, e);
    if (rc != 0)
        return err(ERR_MEMORY, "engine thread: %s", strerror(rc));
    e->has_thread = true;
    return OK;
}

void engine_destroy(struct engine *e)
{
    if (e == NULL)
        return;
    if (e->has_thread) {
        report_abandon(&e->report);
        struct msg_quit *m;
        while ((m = mailbox_reserve(e->mail, TO_ENGINE, sizeof *m)) == NULL)
            mailbox_wake_engine(e->mail);
        m->head.kind = MSG_QUIT;
        mailbox_post(e->mail, TO_ENGINE);
        mailbox_wake_engine(e->mail);
        pthread_join(e->thread, NULL);
    }
    close_all(e);
}
