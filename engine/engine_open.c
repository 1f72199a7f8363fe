/* Opening an engine (engine.h): the device, the model, what lies where, and a first step. All of it is done
 * before the engine thread is there, or without one (engine_inspect). */
#include "engine/engine_internal.h"
#include "engine/memory_plan.h"
#include "kernels/cuda_api.h"
#include "kernels/log.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    DEFAULT_EVENT_BYTES = 4 << 20,
    MIN_SUBMIT_BYTES = 4 << 20,
};

/* Of the memory that is free, for KV at most where nobody says how much; of a device's, which has no other
 * user, for KV and digests. */
static const double MACHINE_SHARE = 0.25, DEVICE_SHARE = 0.95;

/* What was asked for that the device cannot do; NULL: nothing. For auto, which has another device
 * then; --device cuda is refused where that shows. */
static const char *beyond(const struct backend_ops *ops, const struct engine_config *c)
{
    return c->sparse.plugin != 0 && !backend_plans(ops)                              ? "--sparse"
           : c->kv_dram_bytes != 0 && ops->memory != NULL && ops->alloc_host == NULL ? "--kv-dram"
           : c->record_selection != NULL && ops->read == NULL ? "--record-selection"
           : c->kv_type == KV_E4M3 && !ops->keeps_fp8         ? "--kv-cache-dtype fp8"
                                                              : NULL;
}

/* A GPU if one answers and can do all that was asked for; else the CPU, and the log says why. */
static status open_any(struct engine *e)
{
    struct backend *gpu;
    const char *lacks;
    if (cuda_load(&gpu, &e->cfg.cuda) != OK) {
        log_line(LOG_INFO, "device auto: cpu (%s)", err_text());
    } else if ((lacks = beyond(gpu->ops, &e->cfg)) != NULL) {
        log_line(LOG_INFO, "device auto: cpu, because device cuda has no %s", lacks);
        gpu->ops->close(gpu);
    } else {
        e->be = gpu;
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

static status no_model(const struct engine_config *c)
{
    return err(ERR_ARG, "no model given: spind serve MODEL.gguf%s",
               c->dummy ? ", or a config.json with --load-format dummy" : "");
}

static status open_model(struct engine *e)
{
    if (e->cfg.model != NULL && e->cfg.dummy)
        return model_load_dummy(&e->model, e->be, e->cfg.model, e->cfg.max_model_len);
    if (e->cfg.model != NULL)
        return model_load(&e->model, e->be, e->cfg.model, e->cfg.max_model_len);
    if (strcmp(e->cfg.device, "mock") == 0)
        return model_create_mock(&e->model, e->be, e->cfg.max_model_len);
    return no_model(&e->cfg);
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

/* What steps need of a device's memory beside KV and digests: the model's activations, as much again for the
 * backend's own forms of them, a layer's K and V of the longest prompt side by side (kernels/cuda/prefill.cu), and
 * OTHERS: lists, workspaces of libraries, graphs, tables of hot sets. */
static uint64_t step_bytes(const struct engine *e, uint32_t len)
{
    enum { OTHERS = 1 << 30, LAID_BYTES = 2 * 2 /* K and V, bf16 */ };
    const struct model_shape *sh = &model_info(e->model)->shape;
    const struct engine_config *c = &e->cfg;
    uint64_t laid = (uint64_t)len * sh->kv_heads * sh->head_dim * LAID_BYTES;
    size_t rows = model_reserve_bytes(e->model, c->max_batched_tokens, c->max_num_seqs);
    return 2 * rows + laid + OTHERS;
}

/* What there is for KV, and how much of it may be taken where nobody says: of a device half at least, since what
 * steps need is reckoned, and where they lack it they say so. */
static struct memory_room room_of(struct engine *e, uint32_t len)
{
    if (e->be->ops->memory == NULL) {
        uint64_t bytes = memory_available();
        return (struct memory_room){.bytes = bytes,
                                    .most = (uint64_t)((double)bytes * MACHINE_SHARE)};
    }
    uint64_t bytes = e->be->ops->memory(e->be); /* the weights are in it already */
    uint64_t needs = step_bytes(e, len), left = needs < bytes / 2 ? bytes - needs : bytes / 2;
    bool said = e->cfg.device_share > 0;
    uint64_t most = (uint64_t)((double)bytes * (said ? e->cfg.device_share : DEVICE_SHARE));
    return (struct memory_room){.bytes = bytes,
                                .most = said || most < left ? most : left,
                                .steps = needs,
                                .apart = true,
                                .host_bytes = memory_available()};
}

/* What will lie where; nothing is allocated yet. */
static status make_plan(struct engine *e, struct memory_plan *plan)
{
    const struct model_shape *sh = &model_info(e->model)->shape;
    struct kv_geometry geo =
        kv_geometry_make(e->cfg.block_rows, sh->layers, sh->kv_heads, sh->head_dim);
    kv_geometry_keep(&geo, e->cfg.kv_type);
    uint32_t len = e->cfg.max_model_len != 0 ? e->cfg.max_model_len : sh->max_positions;
    if (len > sh->max_positions)
        return err(ERR_ARG, "--max-model-len %u: the model has %u positions", len,
                   sh->max_positions);
    const struct memory_room room = room_of(e, len);
    if (room.apart && e->cfg.kv_dram_bytes != 0 && e->be->ops->alloc_host == NULL)
        return err(ERR_ARG,
                   "--kv-dram: device %s has no second tier: leave it 0, or choose --device cpu",
                   e->be->ops->name);
    TRY(classify(e, &geo));
    TRY(catalog_make(&e->catalog, e->be, &geo, &e->cfg.sparse, e->cfg.sparse_min_context,
                     e->cfg.sparse_offered));
    TRY(memory_plan_make(plan, &e->cfg, &geo, e->catalog.record_lane_bytes, len, &room));
    return check_choice(e, plan);
}

static status open_cache(struct engine *e, struct memory_plan *plan)
{
    TRY(make_plan(e, plan));
    memory_plan_tell(plan, to_log, NULL);
    catalog_tell(&e->catalog, to_log, NULL);
    struct kv_config kc = {.geo = plan->geo,
                           .n_records = plan->n_records,
                           .record_lane_bytes = plan->record_lane_bytes,
                           .prefix_caching = e->cfg.prefix_caching,
                           .secret = {e->cfg.seed, ~e->cfg.seed}};
    memcpy(kc.blocks, plan->blocks, sizeof kc.blocks);
    e->dram_growing = plan->dram_bytes > 0 && e->be->ops->alloc_host != NULL;
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
        .kv_type = e->cfg.kv_type,
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

/* Some real rows through the whole model; draws: and a token. */
static status warm_rows(struct engine *e, uint32_t n_rows, bool draws)
{
    const uint32_t last = n_rows - 1;
    uint32_t *tokens = mem_alloc(n_rows * sizeof *tokens);
    const struct kv_open o = {.tokens = tokens, .n = n_rows, .max_rows = n_rows};
    struct sample_row drawn = {
        .target = SAMPLE_DRAW, .n_top = -1, .params = {.top_p = 1, .repetition_penalty = 1}};
    struct kv_seq seq = {0};
    uint32_t n_hit;
    status st = kv_seq_open(e->kv, &seq, &o, 0, &n_hit);
    if (st != OK)
        goto out;
    if ((st = kv_seq_grow(e->kv, &seq, n_rows)) == OK) {
        struct batch_seq bs = {.n_rows = n_rows};
        for (int c = 0; c < LANE_CLASSES; c++)
            bs.blocks[c] = seq.table[c];
        const struct batch b = {.kv = kv_memory(e->kv),
                                .n_rows = n_rows,
                                .n_seqs = 1,
                                .n_logits = 1,
                                .tokens = tokens,
                                .seqs = &bs,
                                .logit_rows = &last};
        const void *logits = model_forward(e->model, &b);
        const struct sample_args sample = {.logits = logits,
                                           .vocab = model_info(e->model)->shape.vocab,
                                           .n_rows = 1,
                                           .rows = &drawn};
        if (draws)
            e->be->ops->sample(e->be, &sample);
        st = e->be->ops->sync(e->be);
    }
    kv_seq_close(e->kv, &seq);
out:
    mem_free(tokens);
    return st;
}

/* One row touches every weight and finds a broken device before the first client does. A device with memory of its
 * own also loads kernels when they are first used: more rows, for those of prompts. */
static status warm_up(struct engine *e)
{
    static const uint32_t more[] = {2, 8, 16, 128};
    const bool loads = e->be->ops->memory != NULL;
    TRY(warm_rows(e, 1, loads));
    for (size_t i = 0; i < ARRAY_LEN(more) && loads; i++)
        if (more[i] <= e->cfg.max_batched_tokens && more[i] <= e->info.max_model_len)
            TRY(warm_rows(e, more[i], true));
    return OK;
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

static status check_device(const struct engine_config *c, const struct backend_ops *ops)
{
    if (c->kv_type == KV_E4M3 && !ops->keeps_fp8)
        return err(ERR_ARG, "--kv-cache-dtype fp8: device %s has no fp8 pages: leave it out",
                   ops->name);
    return OK;
}

/* What nobody said is the device's. Where nobody said how many rows a step has, prompts may have whole chunks. */
static status size_steps(struct engine *e)
{
    struct engine_config *c = &e->cfg;
    const struct backend_ops *ops = e->be->ops;
    e->whole = c->max_batched_tokens == 0 && ops->loose ? ops->step_rows : 0;
    if (c->max_num_seqs == 0)
        c->max_num_seqs = c->max_batched_tokens > 0 && c->max_batched_tokens < ops->step_seqs
                              ? c->max_batched_tokens
                              : ops->step_seqs;
    if (e->whole > 0)
        c->max_batched_tokens = e->whole + c->max_num_seqs;
    else if (c->max_batched_tokens == 0)
        c->max_batched_tokens = c->max_num_seqs > ops->step_rows ? c->max_num_seqs : ops->step_rows;
    if (c->max_batched_tokens < c->max_num_seqs)
        return err(ERR_ARG, "--max-num-batched-tokens (%u) must be at least --max-num-seqs (%u)",
                   c->max_batched_tokens, c->max_num_seqs);
    return OK;
}

/* Append, attend and seal must take a geometry of one layer beside the cache's; the mock's pages know which layer
 * they are of. SPIND_LAYER_MAJOR=0: nowhere, to compare. */
static bool reads_by_layers(const struct backend_ops *ops)
{
    const char *asked = getenv("SPIND_LAYER_MAJOR");
    return asked != NULL ? strcmp(asked, "1") == 0 : strcmp(ops->name, "mock") != 0;
}

static status open_all(struct engine *e, void (*wake)(void *), void *arg)
{
    struct memory_plan plan = {0};
    uint64_t t0 = clock_us();
    TRY(open_backend(e));
    TRY(check_device(&e->cfg, e->be->ops));
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
    e->sched.whole = e->whole;
    e->sched.headroom = e->cfg.transfer_headroom;
    e->sched.loose = e->be->ops->loose;
    if (reads_by_layers(e->be->ops))
        e->sched.row_bytes = (size_t)e->be->ops->act_bytes * model_info(e->model)->shape.hidden;
    e->sched.fetch_us = plan.blocks[LANE_SPARSE][KV_DRAM] > 0 ? fetch_us : 0;
    TRY(step_init(&e->step, e->be, e->model, e->kv, &e->sched, &e->report));
    fill_info(e, &plan);
    uint64_t t2 = clock_us();
    TRY(warm_up(e));
    log_line(LOG_INFO, "model %.0f ms, KV cache and buffers %.0f ms, warm-up step %.1f ms",
             (double)(t1 - t0) / 1e3, (double)(t2 - t1) / 1e3, (double)(clock_us() - t2) / 1e3);
    return OK;
}

void engine_close(struct engine *e)
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
        engine_close(e);
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
        st = check_device(&e->cfg, e->be->ops);
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
        catalog_tell(&e->catalog, line, arg);
        tell_tables(&plan, line, arg);
        st = tell_choice(e, &plan, line, arg);
    }
    engine_close(e);
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

/* What only the model's shape can tell of the flags: whether head policy and plug-in suit it. */
static status check_shape(struct engine *e, const struct model_shape *sh)
{
    struct kv_geometry geo =
        kv_geometry_make(e->cfg.block_rows, sh->layers, sh->kv_heads, sh->head_dim);
    struct sparse_instance in = {.plugin = sparse_at(e->cfg.sparse.plugin),
                                 .choice = e->cfg.sparse};
    kv_geometry_keep(&geo, e->cfg.kv_type);
    TRY(classify(e, &geo));
    return e->cfg.sparse.plugin == 0 ? OK : sparse_choice_check(&in.choice, &geo, &in.traits);
}

status engine_check(const struct engine_config *cfg, engine_line *line, void *arg)
{
    struct model_info mi;
    char text[256];
    TRY(check_config(cfg));
    if (cfg->model == NULL)
        return strcmp(cfg->device, "mock") == 0 ? OK : no_model(cfg);
    TRY(model_check(&mi, cfg->model, cfg->dummy, cfg->max_model_len));
    struct engine *e = mem_alloc(sizeof *e);
    e->cfg = *cfg;
    status st = check_shape(e, &mi.shape);
    engine_close(e);
    TRY(st);
    snprintf(text, sizeof text, "%s (%s): %u layers, %u positions, %.2f GiB%s", mi.name,
             mi.architecture, mi.shape.layers, mi.shape.max_positions,
             (double)mi.weight_bytes / 1073741824.0, cfg->dummy ? " of weights to be made up" : "");
    line(arg, text);
    return OK;
}
