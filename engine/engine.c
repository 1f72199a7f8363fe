/* The engine thread (engine.h): hear, plan, run, tell; sleep when there is nothing to do.
 *
 * What engine_open.c has made is the thread's from engine_start to engine_destroy; the loop thread touches
 * only the mailbox and the constant engine_info. */
#include "engine/engine_internal.h"
#include "engine/layer_major.h"
#include "engine/residence.h"
#include "kernels/log.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

enum {
    IDLE_WAIT_US = 1000000,
    GROWING_WAIT_US = 50000, /* while the second tier is being pinned */
    MAX_FAILED_STEPS = 3,    /* in a row: the device is gone, not one step */
    UNSCORED_EVERY = 64, /* steps between two looks at the count of selections without a score */
    WRITE_BEHIND_BLOCKS = 4, /* per step: 0.7 MB of the default model, 0.1 ms */
};

static const double STEP_WEIGHT = 0.1; /* of the last step in the mean of step times */

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
    CHECK(m->tenant < MAX_TENANTS); /* the API gives them numbers */
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

/* Whole blocks; 0 bytes: no bound. */
static uint32_t blocks_of(const struct engine *e, uint64_t bytes)
{
    uint64_t n = bytes / e->info.kv_block_bytes;
    return bytes == 0 || n > TENANT_NO_BOUND ? TENANT_NO_BOUND : (uint32_t)n;
}

static void hear_tenant(struct engine *e, const struct msg_tenant *m)
{
    struct tenant_bounds b = {.weight = (double)m->weight,
                              .max_running = m->max_running > 0 ? m->max_running : TENANT_NO_BOUND};
    for (int tier = 0; tier < 2; tier++)
        b.max_blocks[tier] = blocks_of(e, m->max_kv_bytes[tier]);
    tenants_entitle(&e->sched.tenants, m->tenant, &b);
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
        case MSG_TENANT: hear_tenant(e, (const struct msg_tenant *)(const void *)h); break;
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
                              .by_layers = e->sched.n_deep,
                              .dram_ready = c->dram_ready,
                              .dram_grows = e->dram_growing};
    const struct sequence *deep = e->sched.deep;
    if (deep != NULL) {
        uint64_t done, all;
        layer_major_progress(deep->layers, &done, &all);
        r.layers_permille = 1 + 999 * done / all; /* 0 would say that there is none */
    }
    r.unscored_selections = e->stats.residence.unscored_selections;
    for (uint32_t i = 0; i < e->sched.n_running; i++)
        r.hot_slots += e->sched.running[i]->kv.n_slots;
    return r;
}

/* Reading it takes a wait for the device: now and then, and whenever somebody came or went; when nothing is in
 * flight, else it would wait for a step. */
static void read_unscored(struct engine *e)
{
    e->unscored_due |= e->changed || e->stats.steps % UNSCORED_EVERY == 0;
    if (e->at == NULL || !e->unscored_due || e->step.n_flights > 0)
        return;
    e->stats.residence.unscored_selections = attention_unscored(e->at);
    e->unscored_due = false;
}

/* Behind a step: what tenants have, of whom something changed. Where nobody told of tenants nobody asks. */
static void tell_tenants(struct engine *e)
{
    struct tenants *ts = &e->sched.tenants;
    uint32_t t, i = 0;
    uint64_t now = clock_us();
    for (bool weighed = false; ts->n_told > 0 && tenants_next_due(ts, now, &i, &t);
         weighed = true) {
        if (!weighed)
            residence_weigh(&e->sched);
        report_tenant(&e->report, t, &ts->of[t], e->info.kv_block_bytes);
    }
}

static void tell_step(struct engine *e)
{
    struct kv_counts c;
    kv_counts(e->kv, &c);
    struct msg_step *s = &e->stats;
    read_unscored(e);
    s->residence = residence_now(e, &c);
    s->now_us = clock_us();
    s->prompt_tokens = e->step.prompt_tokens;
    s->output_tokens = e->step.output_tokens;
    s->cached_tokens = e->sched.cached_tokens;
    s->queried_tokens = e->sched.queried_tokens;
    s->preemptions = e->sched.preemptions;
    s->table_bytes = c.table_bytes;
    s->running = e->sched.n_running;
    s->waiting = e->sched.queue.n_waiting;
    for (int tier = 0; tier < 2; tier++) {
        s->blocks_total[tier] = c.total[tier];
        s->blocks_free[tier] = c.free[tier];
        s->blocks_cached[tier] = c.cached[tier];
    }
    report_step(&e->report, s);
    tell_tenants(e);
    e->changed = false;
}

/* What would make a long prompt quicker is more HBM. */
static void tell_admitted(void *arg, struct sequence *q)
{
    struct engine *e = arg;
    uint32_t lacks = q->layers == NULL ? layer_major_lacks(&e->sched, q, q->n_cached) : 0;
    if (lacks > 0)
        log_line(LOG_INFO,
                 "prompt of %u tokens, longer than HBM, chunk by chunk: to read it layer by layer "
                 "--kv-hbm lacks %.0fM",
                 q->n_prompt, ceil((double)lacks * (double)e->info.kv_block_bytes / 1048576));
    report_scheduled(&e->report, q);
}

static void tell_refused(void *arg, struct sequence *q, status why)
{
    struct engine *e = arg;
    char text[256];
    snprintf(text, sizeof text, "%s: lower max_tokens%s, or start the server with more --kv-hbm%s",
             err_text(), q->in != NULL ? " or the sparse budget" : "",
             q->in != NULL ? " or --kv-dram" : "");
    /* ERR_ARG: its tenant's bounds, and the text says what to do. */
    finish(e, q, DONE_REFUSED, why == ERR_FULL ? text : why == ERR_ARG ? err_text() : NULL);
}

/* ---- the thread ---- */

#ifdef AUDIT
/* DEBUG=1: every invariant of the cache after every step. */
static void audit(const struct engine *e)
{
    const struct sched *s = &e->sched;
    struct kv_seq **open = mem_alloc((s->queue.n_sequences + 1) * sizeof(struct kv_seq *));
    uint32_t n = 0;
    for (uint32_t i = 0; i < s->n_running; i++)
        open[n++] = &s->running[i]->kv;
    for (uint32_t i = 0; i < s->tenants.n_active; i++)
        for (const struct sequence *q = s->queue.lines[s->tenants.active[i]].first; q != NULL;
             q = q->next)
            if (q->state == SEQUENCE_PAUSED)
                open[n++] = (struct kv_seq *)(uintptr_t)&q->kv;
    kv_audit(e->kv, open, n);
    mem_free(open);
}
#endif

/* Less than a quarter left, or somebody waits: spilling may be next. */
static bool hbm_is_short(const struct engine *e)
{
    return e->sched.queue.n_waiting > 0 || kv_available(e->kv) < e->info.kv_blocks[KV_HBM] / 4;
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
    residence_learn(&e->sched);
    status st = step_settle(&e->step);
    if (st == OK)
        e->n_failed = 0;
    else
        hear_failed_step(e);
    /* Between two steps, or behind the one ahead; only where HBM is getting short. */
    if (e->cfg.write_behind && st == OK && hbm_is_short(e))
        (void)kv_write_behind(e->kv, behind_blocks(e));
    uint64_t now = clock_us();
    e->stats.host_us = now - e->host_from - e->step.wait_us;
    e->host_from = now;
    if (e->be->ops->counts != NULL)
        e->be->ops->counts(e->be, &e->stats.counts);
    e->stats.steps++;
    e->stats.step_us = now - e->step_from;
    e->step_from = now;
    double weight = e->sched.step_us > 0 ? STEP_WEIGHT : 1; /* the first one is all there is */
    e->sched.step_us += ((double)e->stats.step_us - e->sched.step_us) * weight;
    e->stats.step_tokens = rows;
    e->stats.step_decodes = decodes;
    log_line(LOG_DEBUG,
             "step %llu: %u rows, %u of them answers, %llu us, %llu of them waiting; host %llu us, "
             "device %u us "
             "behind %u idle",
             (unsigned long long)e->stats.steps, rows, decodes,
             (unsigned long long)e->stats.step_us, (unsigned long long)e->step.wait_us,
             (unsigned long long)e->stats.host_us, e->stats.counts.busy_us,
             e->stats.counts.idle_us);
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

/* A prompt that is read layer by layer may take minutes. */
static void watch_layers(struct engine *e)
{
    enum { TELL_US = 5000000 };
    const struct sequence *deep = e->sched.deep;
    uint64_t now = clock_us(), done, all;
    if (deep == NULL || now - e->layers_told < TELL_US)
        return;
    layer_major_progress(deep->layers, &done, &all);
    const unsigned long long layer = done / deep->n_prompt + 1;
    log_line(LOG_INFO,
             "prompt of %u tokens, layer by layer: in layer %llu of %u, %.1f %% after %.0f s",
             deep->n_prompt, layer, kv_geometry(e->kv)->layers, 100 * (double)done / (double)all,
             (double)(now - deep->scheduled_us) / 1e6);
    e->layers_told = now;
}

/* What the device has to say. */
static void hear_device(const struct engine *e)
{
    const char *text;
    bool bad = false;
    while (e->be->ops->news != NULL && (text = e->be->ops->news(e->be, &bad)) != NULL)
        log_line(bad ? LOG_WARN : LOG_INFO, "device: %s", text);
}

static void *engine_thread(void *arg)
{
    struct engine *e = arg;
    pthread_setname_np(pthread_self(), "spind-engine");
    e->dram_since = clock_us(); /* it begins with the first look at it: not beside the warm-up */
    e->host_from = clock_us();
    tell_step(e);
    while (!e->quit && e->n_failed < MAX_FAILED_STEPS) {
        hear_all(e);
        watch_dram(e);
        watch_layers(e);
        hear_device(e);
        uint64_t now = clock_us();
        if (e->step.n_flights == 0 && sched_plan(&e->sched, now, tell_admitted, tell_refused, e)) {
            e->step_from = now;
            step_launch(&e->step);
        }
        if (e->step.n_flights > 0)
            settle_step(e);
        else if (e->changed)
            tell_step(e);
        else if (!e->quit) {
            mailbox_wait_engine(e->mail, e->dram_growing ? GROWING_WAIT_US : IDLE_WAIT_US);
            e->host_from = clock_us();
        }
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
    engine_close(e);
}
