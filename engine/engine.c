/* The engine thread (engine.h): hear, plan, run, tell; sleep when there is nothing to do.
 *
 * Everything below engine_start belongs to the thread; the loop thread touches only the mailbox and
 * the constant engine_info. */
#include "engine/engine.h"

#include "engine/memory_plan.h"
#include "engine/model/model.h"
#include "engine/step.h"
#include "kernels/log.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

enum {
    IDLE_WAIT_US = 1000000,
    DEFAULT_EVENT_BYTES = 4 << 20,
    MIN_SUBMIT_BYTES = 4 << 20,
    MAX_FAILED_STEPS = 3, /* in a row: the device is gone, not one step */
};

struct engine {
    struct engine_config cfg;
    struct engine_info info;
    struct catalog catalog;
    struct backend *be;
    struct model *model;
    struct kv *kv;
    struct mailbox *mail;
    struct sched sched;
    struct step step;
    struct report report;
    struct msg_step stats;
    uint64_t n_submitted;
    uint32_t n_failed; /* steps in a row */
    char failure[200]; /* of the last of them */
    bool quit;
    bool changed; /* the numbers of MSG_STEP moved outside a step */
    bool has_thread;
    pthread_t thread;
    char backend_text[200];
};

/* ---- opening ---- */

static status open_backend(struct engine *e)
{
    const char *device = e->cfg.device;
    if (strcmp(device, "mock") == 0)
        return mock_backend_open(&e->be, &e->cfg.mock);
    if (strcmp(device, "cpu") == 0 || strcmp(device, "auto") == 0)
        return cpu_backend_open(&e->be, &e->cfg.cpu);
    return err(ERR_ARG, "--device %s: this build has \"cpu\" and \"mock\"", device);
}

static status open_model(struct engine *e)
{
    if (e->cfg.model != NULL)
        return model_load(&e->model, e->be, e->cfg.model, e->cfg.max_model_len);
    if (strcmp(e->cfg.device, "mock") == 0)
        return model_create_mock(&e->model, e->be, e->cfg.max_model_len);
    return err(ERR_ARG, "no model given: spind serve MODEL.gguf");
}

static status open_cache(struct engine *e, struct memory_plan *plan)
{
    const struct model_shape *sh = &model_info(e->model)->shape;
    struct kv_geometry geo =
        kv_geometry_make(e->cfg.block_rows, sh->layers, sh->kv_heads, sh->head_dim);
    uint32_t len = e->cfg.max_model_len != 0 ? e->cfg.max_model_len : sh->max_positions;
    if (len > sh->max_positions)
        return err(ERR_ARG, "--max-model-len %u: the model has %u positions", len,
                   sh->max_positions);
    TRY(catalog_make(&e->catalog, e->be, &geo, &e->cfg.sparse, e->cfg.sparse_min_context));
    TRY(memory_plan_make(plan, &e->cfg, &geo, len, memory_available()));
    const struct kv_config kc = {.geo = geo,
                                 .blocks = {{plan->blocks[KV_HBM], plan->blocks[KV_DRAM]}},
                                 .prefix_caching = e->cfg.prefix_caching,
                                 .secret = {e->cfg.seed, ~e->cfg.seed}};
    return kv_create(&e->kv, e->be, &kc);
}

static void fill_info(struct engine *e, const struct memory_plan *plan)
{
    const struct model_info *mi = model_info(e->model);
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
        .block_rows = e->cfg.block_rows,
        .max_num_seqs = e->cfg.max_num_seqs,
        .max_batched_tokens = e->cfg.max_batched_tokens,
        .kv_blocks = {plan->blocks[KV_HBM], plan->blocks[KV_DRAM]},
        .kv_block_bytes = plan->geo.block_bytes[LANE_SPARSE],
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
    const struct batch_seq bs = {.n_rows = 1, .blocks = {seq.table[LANE_SPARSE]}};
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

static status open_all(struct engine *e, void (*wake)(void *), void *arg)
{
    struct memory_plan plan = {0};
    uint64_t t0 = clock_us();
    TRY(open_backend(e));
    log_line(LOG_INFO, "device: %s", e->be->ops->describe(e->be));
    TRY(open_model(e));
    uint64_t t1 = clock_us();
    TRY(open_cache(e, &plan));
    size_t events = e->cfg.to_loop_bytes != 0 ? e->cfg.to_loop_bytes : DEFAULT_EVENT_BYTES;
    size_t submit = (size_t)plan.max_model_len * 4 * 4 + MIN_SUBMIT_BYTES;
    TRY(mailbox_create(&e->mail, submit, events, wake, arg));
    e->report.mail = e->mail;
    sched_init(&e->sched, e->kv, e->cfg.max_num_seqs, e->cfg.max_batched_tokens,
               e->cfg.prefix_caching);
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
    kv_destroy(e->kv);
    model_destroy(e->model);
    mailbox_destroy(e->mail);
    if (e->be != NULL)
        e->be->ops->close(e->be);
    mem_free(e);
}

static status check_config(const struct engine_config *c)
{
    if (c->block_rows != 8 && c->block_rows != 16)
        return err(ERR_ARG, "--block-size %u: 8 or 16", c->block_rows);
    if (c->max_num_seqs == 0 || c->max_batched_tokens < c->max_num_seqs)
        return err(ERR_ARG, "--max-num-batched-tokens (%u) must be at least --max-num-seqs (%u)",
                   c->max_batched_tokens, c->max_num_seqs);
    return OK;
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

const struct engine_info *engine_info(const struct engine *e)
{
    return &e->info;
}

struct mailbox *engine_mailbox(struct engine *e)
{
    return e->mail;
}

/* ---- hearing ---- */

static void finish(struct engine *e, struct sequence *q, enum done_reason reason)
{
    report_done(&e->report, q, reason, 0);
    sched_remove(&e->sched, q);
    sequence_destroy(q);
    e->changed = true;
}

static void hear_submit(struct engine *e, const struct msg_submit *m)
{
    struct sequence *q = sequence_create(m, ++e->n_submitted, clock_us());
    if (q == NULL) {
        report_refused(&e->report, m);
        return;
    }
    sched_submit(&e->sched, q);
    e->changed = true;
    /* Nothing to sample and nothing to score: done before it began. */
    if (q->max_tokens == 0 && !sequence_scores_prompt(q))
        finish(e, q, DONE_LENGTH);
}

static void hear_cancel(struct engine *e, const struct msg_cancel *m)
{
    struct sequence *q = sched_find(&e->sched, m->id);
    if (q != NULL) /* else its last event and the cancel crossed */
        finish(e, q, DONE_CANCELLED);
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

static void tell_step(struct engine *e)
{
    struct kv_counts c;
    kv_counts(e->kv, &c);
    struct msg_step *s = &e->stats;
    s->now_us = clock_us();
    s->prompt_tokens = e->step.prompt_tokens;
    s->output_tokens = e->step.output_tokens;
    s->cached_tokens = e->sched.cached_tokens;
    s->queried_tokens = e->sched.queried_tokens;
    s->preemptions = e->sched.preemptions;
    s->table_bytes = c.table_bytes + c.index_bytes;
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

static void tell_refused(void *arg, struct sequence *q)
{
    struct engine *e = arg;
    finish(e, q, DONE_REFUSED);
}

/* ---- the thread ---- */

#ifdef AUDIT
/* DEBUG=1: every invariant of the cache after every step. */
static void audit(const struct engine *e)
{
    const struct sched *s = &e->sched;
    struct kv_seq **open = mem_alloc((s->n_running + 1) * sizeof(struct kv_seq *));
    for (uint32_t i = 0; i < s->n_running; i++)
        open[i] = &s->running[i]->kv;
    kv_audit(e->kv, open, s->n_running);
    mem_free(open);
}
#endif

static void run_step(struct engine *e)
{
    uint64_t start = clock_us();
    uint32_t rows = e->sched.plan_rows, decodes = e->sched.plan_decodes;
    status st = step_run(&e->step);
    e->n_failed = st == OK ? 0 : e->n_failed + 1;
    if (st != OK) {
        snprintf(e->failure, sizeof e->failure, "%s", err_text());
        log_line(LOG_ERROR, "step failed, its requests end with an error: %s", e->failure);
    }
    e->stats.steps++;
    e->stats.step_us = clock_us() - start;
    e->stats.step_tokens = rows;
    e->stats.step_decodes = decodes;
    log_line(LOG_DEBUG, "step %llu: %u rows, %u of them answers, %llu us",
             (unsigned long long)e->stats.steps, rows, decodes,
             (unsigned long long)e->stats.step_us);
    tell_step(e);
#ifdef AUDIT
    audit(e);
#endif
}

static void *engine_thread(void *arg)
{
    struct engine *e = arg;
    pthread_setname_np(pthread_self(), "spind-engine");
    tell_step(e);
    while (!e->quit && e->n_failed < MAX_FAILED_STEPS) {
        hear_all(e);
        bool busy = sched_plan(&e->sched, clock_us(), tell_admitted, tell_refused, e);
        if (busy)
            run_step(e);
        else if (e->changed)
            tell_step(e);
        else if (!e->quit)
            mailbox_wait_engine(e->mail, IDLE_WAIT_US);
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
