/* The lives of calls: from a parsed request to the last byte of its answer (call.h).
 *
 * Engine events come in batches: calls_event changes state and marks choices, calls_flush then tells
 * clients, posts what the mailbox had no room for, and frees what is over. So nothing is freed while
 * events are being handled, and each choice is written once per batch.
 *
 * When a choice ends:
 *   - by a token (a stop id, or the last of max_tokens): the token is held until the MSG_DONE of the
 *     same step, so that text and reason leave in one event and the counts are the engine's;
 *   - by a stop string: at once, and the sequence is cancelled; what the engine still says about it
 *     is ignored until its MSG_DONE frees the id.
 * Any failure of one choice fails the call. */
#include "api/call.h"

#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

status calls_create(struct calls **out, struct api *a)
{
    struct calls *c = mem_try_alloc(sizeof *c);
    if (c == NULL)
        return err(ERR_MEMORY, "calls: no memory");
    c->api = a;
    c->dirty_end = &c->dirty;
    if (getrandom(&c->random, sizeof c->random, GRND_NONBLOCK) != sizeof c->random)
        c->random = clock_us();
    writer_init(&c->out);
    *out = c;
    return OK;
}

static void call_free(struct call *call)
{
    call->all->answer_bytes -= call->answer_bytes;
    for (uint32_t i = 0; i < call->n_choices; i++) {
        text_out_fini(&call->choices[i].out);
        text_out_tokens_fini(&call->choices[i].scores);
    }
    render_fini(&call->render);
    request_free(call->r);
    mem_free(call);
}

void calls_destroy(struct calls *c)
{
    if (c == NULL)
        return;
    for (struct call *call = c->first, *next; call != NULL; call = next) {
        next = call->next;
        call_free(call);
    }
    writer_fini(&c->out);
    mem_free(c->slots);
    mem_free(c);
}

uint32_t calls_active(const struct calls *c)
{
    return c->n_active;
}

/* --- states ------------------------------------------------------------------------------------- */

static bool is_queued(enum choice_state s)
{
    return s == CHOICE_WAITING || s == CHOICE_SUBMITTED;
}

static void count_choice(struct calls *c, const struct choice *ch, int sign)
{
    struct roster_slot *slot = ch->call->slot;
    if (is_queued(ch->state)) {
        uint64_t tokens = (uint64_t)(sign * (int64_t)ch->call->r->prompts[ch->prompt].n_ids);
        c->n_queued += (uint32_t)sign;
        c->queued_tokens += tokens;
        if (slot != NULL) {
            slot->quota.n_queued += (uint32_t)sign;
            slot->quota.queued_tokens += tokens;
        }
    }
    if (ch->state == CHOICE_RUNNING) {
        c->n_running += (uint32_t)sign;
        if (slot != NULL)
            slot->quota.n_running += (uint32_t)sign;
    }
    if (ch->state == CHOICE_DONE)
        ch->call->n_done += (uint32_t)sign;
}

void choice_move(struct choice *ch, enum choice_state to)
{
    CHECK(to > ch->state);
    count_choice(ch->call->all, ch, -1);
    ch->state = to;
    count_choice(ch->call->all, ch, 1);
}

void choice_mark(struct choice *ch)
{
    struct calls *c = ch->call->all;
    if (ch->dirty)
        return;
    ch->dirty = true;
    ch->call->n_dirty++;
    ch->next_dirty = NULL;
    *c->dirty_end = ch;
    c->dirty_end = &ch->next_dirty;
}

void call_settle(struct call *call)
{
    struct calls *c = call->all;
    bool listed = call->waiting || call->n_dirty > 0 || call->dead;
    if (call->x != NULL || call->n_done < call->n_choices || listed)
        return;
    call->dead = true;
    call->next_dead = c->dead;
    c->dead = call;
}

static void bury(struct calls *c)
{
    for (struct call *call = c->dead, *next; call != NULL; call = next) {
        next = call->next_dead;
        if (call->prev != NULL)
            call->prev->next = call->next;
        else
            c->first = call->next;
        if (call->next != NULL)
            call->next->prev = call->prev;
        admit_settle(c->api, call);
        call_free(call);
    }
    c->dead = NULL;
}

static const char *handler_of(const struct call *call)
{
    return call->r->kind == REQUEST_CHAT ? "/v1/chat/completions" : "/v1/completions";
}

static double seconds_since(struct calls *c, uint64_t then_us)
{
    uint64_t now = calls_now(c);
    return now > then_us ? (double)(now - then_us) * 1e-6 : 0;
}

static void call_answered(struct call *call, int http_status)
{
    struct calls *c = call->all;
    struct access l = {.method = "POST",
                       .handler = handler_of(call),
                       .http_status = http_status,
                       .seconds = seconds_since(c, call->arrival_us),
                       .prompt_tokens = call->n_prompt_tokens};
    for (uint32_t i = 0; i < call->n_choices; i++)
        l.output_tokens += call->choices[i].n_tokens;
    access_note(c->api, call->x, &l);
    call->x = NULL;
    c->n_active--;
    call_settle(call);
}

struct exchange *call_detach(struct call *call, int http_status)
{
    struct exchange *x = call->x;
    exchange_set_user(x, NULL);
    call_answered(call, http_status);
    return x;
}

/* --- the start ---------------------------------------------------------------------------------- */

static const char *fingerprint(struct calls *c)
{
    const struct engine_info *info = c->api->info;
    if (c->fingerprint[0] == '\0') { /* the model is not known earlier */
        char text[512];
        snprintf(text, sizeof text, "%s|%s|%s|%llu|%u|%u", info->name, info->architecture,
                 info->backend, (unsigned long long)info->weight_bytes, info->block_rows,
                 info->vocab);
        uint32_t h = 2166136261u; /* FNV-1a */
        for (const char *p = text; *p != '\0'; p++)
            h = (h ^ (unsigned char)*p) * 16777619u;
        snprintf(c->fingerprint, sizeof c->fingerprint, "b%.40s-%08x", c->api->cfg.version, h);
    }
    return c->fingerprint;
}

static void name_answer(struct call *call)
{
    struct calls *c = call->all;
    struct request *r = call->r;
    uint64_t id[2];
    char suffix[33];
    if (getrandom(id, sizeof id, GRND_NONBLOCK) != sizeof id)
        memcpy(id, (uint64_t[2]){clock_us(), c->random++}, sizeof id);
    snprintf(suffix, sizeof suffix, "%016llx%016llx", (unsigned long long)id[0],
             (unsigned long long)id[1]);
    if (c->api->cfg.force_include_usage)
        r->include_usage = true;
    render_init(&call->render, r, c->api->info->tokenizer, suffix, (uint64_t)time(NULL),
                fingerprint(c));
}

static bool client_stops_at(const struct request *r, uint32_t id)
{
    for (uint32_t i = 0; i < r->n_stop_ids; i++)
        if (r->stop_ids[i] == id)
            return true;
    return false;
}

static void gather_stop_ids(struct call *call)
{
    const struct request *r = call->r;
    const struct engine_info *info = call->all->api->info;
    memcpy(call->stop_ids, r->stop_ids, r->n_stop_ids * sizeof *r->stop_ids);
    call->n_stop_ids = r->n_stop_ids;
    for (uint32_t i = 0; i < info->n_end_ids && !r->ignore_eos; i++)
        if (!client_stops_at(r, info->end_ids[i]))
            call->stop_ids[call->n_stop_ids++] = info->end_ids[i];
}

static struct text_piece piece_of(const struct call *call, uint32_t id)
{
    const struct tokenizer *tok = call->render.tok;
    struct text_piece p = {.id = id, .bytes = render_token_bytes(tok, id)};
    p.hidden = call->r->skip_special && tokenizer_is_special(tok, id);
    return p;
}

/* Text of a prompt that came as ids. */
static void decode_prompt(const struct call *call, const struct request_prompt *p, struct writer *w)
{
    struct text_out t;
    text_out_init(&t, NULL, false, false);
    for (uint32_t i = 0; i < p->n_ids; i++) {
        struct text_piece piece = piece_of(call, p->ids[i]);
        text_out_push(&t, &piece);
    }
    text_out_end(&t);
    writer_reset(w);
    if (t.ready > 0)
        write_bytes(w, t.text, t.ready);
    w->failed = w->failed || t.failed;
    text_out_fini(&t);
}

static void echo(struct choice *ch)
{
    const struct call *call = ch->call;
    const struct request *r = call->r;
    const struct request_prompt *p = &r->prompts[ch->prompt];
    struct writer *w = &call->all->out;
    if (r->kind == REQUEST_CHAT) {
        if (p->echo_prefix != NULL)
            text_out_echo(&ch->out, p->echo_prefix, p->echo_prefix_len);
        return;
    }
    if (p->text != NULL) {
        text_out_echo(&ch->out, p->text, p->text_len);
    } else {
        decode_prompt(call, p, w);
        text_out_echo(&ch->out, w->p, w->len);
        ch->out.failed = ch->out.failed || w->failed;
    }
    if (ch->echo_scores && p->n_ids > 0) { /* the first token has no probability: no event for it */
        struct text_piece piece = piece_of(call, p->ids[0]);
        text_out_echo_token(&ch->out, &piece);
    }
}

static void choice_init(struct choice *ch, struct call *call, uint32_t index)
{
    const struct request *r = call->r;
    *ch = (struct choice){.call = call, .index = index, .prompt = index / r->n};
    ch->max_tokens = request_room(r, &call->all->api->rules, ch->prompt);
    ch->echo_scores = r->kind == REQUEST_COMPLETION && r->echo && r->logprobs;
    ch->wants_scores = ch->echo_scores || (r->prompt_logprobs >= 0 && index % r->n == 0);
    text_out_init(&ch->out, &call->stops, r->include_stop, r->logprobs || r->return_token_ids);
    if (r->echo)
        echo(ch);
    count_choice(call->all, ch, 1);
}

/* NULL: no memory. Takes r only if it succeeds. */
static struct call *call_create(struct calls *c, struct exchange *x, struct request *r,
                                struct roster_slot *slot)
{
    uint32_t n = r->n_prompts * r->n;
    struct call *call = mem_try_alloc(sizeof *call + n * sizeof *call->choices);
    if (call == NULL)
        return NULL;
    *call = (struct call){.all = c, .x = x, .r = r, .slot = slot, .n_choices = n};
    if (text_out_stops(&call->stops, &r->mem, r->stops, r->n_stops) != OK) {
        mem_free(call);
        return NULL;
    }
    call->arrival_us = exchange_arrival_us(x);
    call->submitted_us = call->written_us = calls_now(c);
    memcpy(call->salt, r->salt, sizeof call->salt);
    auth_salt(c->api->auth, slot != NULL ? slot->rules.name : "default", call->salt);
    gather_stop_ids(call);
    name_answer(call);
    for (uint32_t p = 0; p < r->n_prompts; p++)
        call->n_prompt_tokens += r->prompts[p].n_ids;
    bool failed = call->render.head.failed;
    for (uint32_t i = 0; i < n; i++) {
        choice_init(&call->choices[i], call, i);
        failed = failed || call->choices[i].out.failed;
    }
    if (failed) {
        for (uint32_t i = 0; i < n; i++)
            count_choice(c, &call->choices[i], -1);
        call->r = NULL; /* stays the caller's */
        call_free(call);
        return NULL;
    }
    call->answer_bytes = submit_answer_bytes(c, r);
    c->answer_bytes += call->answer_bytes;
    call->next = c->first;
    if (c->first != NULL)
        c->first->prev = call;
    c->first = call;
    c->n_active++;
    return call;
}

static bool serves(const struct api *a, struct api_error *e)
{
    if (a->draining)
        error_set(e, 503, "shutting_down", NULL, "The server is shutting down.");
    else if (a->engine_dead)
        error_set(e, 503, "engine_dead", NULL, "The engine has stopped.");
    else if (a->info == NULL || a->mail == NULL)
        error_set(e, 503, "loading_model", NULL, "Loading model");
    else
        return true;
    e->retry_after_s = 2;
    return false;
}

void call_start(struct api *a, struct exchange *x, struct request *r)
{
    struct calls *c = a->calls;
    struct api_error e;
    struct call *call = NULL;
    struct roster_slot *slot = NULL;
    if (serves(a, &e) && admit_request(a, x, r, &slot, &e) && submit_admit(c, r, &e)) {
        call = call_create(c, x, r, slot);
        if (call == NULL)
            error_set(&e, 503, "server_overloaded", NULL, "No memory for this request now.");
    }
    if (call == NULL) {
        bool chat = r->kind == REQUEST_CHAT;
        metrics_rejected(a->metrics, e.code);
        admit_refused(a, x, &e);
        access_note(a, x,
                    &(struct access){.method = "POST",
                                     .handler = chat ? "/v1/chat/completions" : "/v1/completions",
                                     .http_status = e.status,
                                     .seconds = seconds_since(c, exchange_arrival_us(x))});
        request_free(r);
        exchange_set_user(x, NULL);
        error_reply(x, &e, false);
    } else {
        exchange_set_user(x, call);
        admit_charge(a, x, call);
        submit_enqueue(call);
    }
    c->now_us = 0;
}

/* --- ends --------------------------------------------------------------------------------------- */

static void observe_end(struct choice *ch, const char *reason)
{
    if (ch->counted)
        return;
    ch->counted = true;
    const struct call *call = ch->call;
    struct metrics *m = call->all->api->metrics;
    struct metric_choice mc = {.reason = reason,
                               .prompt_tokens = call->r->prompts[ch->prompt].n_ids,
                               .output_tokens = ch->n_tokens,
                               .max_tokens = ch->max_tokens};
    metrics_choice(m, &mc);
    if (ch->finish.kind == FINISH_NONE)
        return;
    metrics_time(m, METRIC_E2E, seconds_since(call->all, call->arrival_us));
    if (ch->n_tokens > 1)
        metrics_time(m, METRIC_TPOT,
                     (double)(ch->last_us - ch->first_us) * 1e-6 / (ch->n_tokens - 1));
    uint32_t longest = 0, n = call->r->n;
    for (uint32_t i = 0; i < n; i++) {
        const struct choice *sibling = &call->choices[ch->prompt * n + i];
        if (sibling->finish.kind == FINISH_NONE)
            return;
        longest = sibling->n_tokens > longest ? sibling->n_tokens : longest;
    }
    metrics_prompt(m, n, longest);
}

static void choice_finish(struct choice *ch, const struct finish *f)
{
    ch->finish = *f;
    text_out_end(&ch->out);
    ch->call->n_finished++;
    observe_end(ch, f->kind == FINISH_STOP ? "stop" : "length");
    choice_mark(ch);
}

/* Cancels what runs and counts what did not finish. The exchange is somebody else's business. */
static void call_stop(struct call *call, const char *reason)
{
    for (uint32_t i = 0; i < call->n_choices; i++) {
        struct choice *ch = &call->choices[i];
        observe_end(ch, reason);
        submit_cancel(ch);
    }
}

void call_fail(struct call *call, const struct api_error *e, const char *reason)
{
    CHECK(call->x != NULL);
    call_stop(call, reason);
    answer_error(call, e);
}

void call_no_memory(struct call *call)
{
    struct api_error e;
    error_set(&e, 503, "server_overloaded", NULL, "No memory for this answer now.");
    e.retry_after_s = submit_retry_after(call->all);
    call_fail(call, &e, "error");
}

void call_gone(struct api *a, struct exchange *x)
{
    struct call *call = exchange_user(x);
    if (call == NULL || call->x != x)
        return;
    call->left = true;
    call_stop(call, "abort");
    call_answered(call, 499);
    a->calls->now_us = 0;
}

/* --- events ------------------------------------------------------------------------------------- */

static void scheduled(struct choice *ch)
{
    if (ch->state == CHOICE_SUBMITTED)
        choice_move(ch, CHOICE_RUNNING);
    ch->call->scheduled = true;
}

static void on_scheduled(struct choice *ch, const struct msg_scheduled *m)
{
    struct call *call = ch->call;
    scheduled(ch);
    if (ch->index % call->r->n == 0)
        call->n_cached += m->n_cached; /* siblings find the prompt that the first computed */
}

static void observe_token(struct calls *c, struct choice *ch)
{
    uint64_t now = calls_now(c);
    if (ch->n_tokens == 1) {
        ch->first_us = now;
        double waited = seconds_since(c, ch->call->arrival_us);
        metrics_time(c->api->metrics, METRIC_TTFT, waited);
        if (ch->call->slot != NULL)
            histogram_add(&ch->call->slot->counts.ttft, waited);
    } else {
        metrics_time(c->api->metrics, METRIC_ITL, (double)(now - ch->last_us) * 1e-6);
    }
    ch->last_us = now;
}

/* What the engine has made, whether or not somebody still wants it. */
static void count_token(struct calls *c, const struct choice *ch, bool first)
{
    struct call *call = ch->call;
    uint64_t prompt = first ? call->r->prompts[ch->prompt].n_ids : 0;
    c->generated_tokens++;
    c->prompt_tokens += prompt;
    call->n_generated++;
    if (call->slot == NULL)
        return;
    call->slot->counts.output_tokens++;
    call->slot->counts.prompt_tokens += prompt;
}

static bool ends_at(const struct call *call, uint32_t id)
{
    for (uint32_t i = 0; i < call->n_stop_ids; i++)
        if (call->stop_ids[i] == id)
            return true;
    return false;
}

static void on_token(struct calls *c, struct choice *ch, const struct msg_token *m)
{
    struct call *call = ch->call;
    scheduled(ch);
    count_token(c, ch, m->index == 0);
    if (call->x == NULL || ch->ending || ch->finish.kind != FINISH_NONE)
        return;
    ch->n_tokens++;
    call->n_light_misses += m->n_light_misses;
    call->planned |= m->planned;
    observe_token(c, ch);
    bool ends = ends_at(call, m->token);
    struct text_piece p = piece_of(call, m->token);
    p.hidden |= ends && !call->r->include_stop;
    p.unstoppable = ch->n_tokens <= call->r->min_tokens;
    p.scored = true;
    p.rank = m->rank;
    p.logprob = m->logprob;
    p.n_top = call->r->logprobs ? m->n_top : 0;
    p.top = (const struct sample_top *)(m + 1);
    if (text_out_push(&ch->out, &p)) {
        struct finish f = {.kind = FINISH_STOP, .stop_text = call->r->stops[ch->out.stop]};
        choice_finish(ch, &f);
        submit_cancel(ch);
        return;
    }
    if (ch->out.failed) {
        call_no_memory(call);
        return;
    }
    ch->ending = ends || ch->n_tokens == ch->max_tokens;
    choice_mark(ch);
}

static void on_prompt(struct choice *ch, const struct msg_prompt *m)
{
    struct call *call = ch->call;
    scheduled(ch);
    if (call->x == NULL)
        return;
    struct text_piece p = piece_of(call, m->token);
    p.scored = true;
    p.rank = m->rank;
    p.logprob = m->logprob;
    p.n_top = m->n_top;
    p.top = (const struct sample_top *)(m + 1);
    if (call->r->prompt_logprobs >= 0)
        text_out_tokens_add(&ch->scores, &p);
    uint32_t top = call->r->top_logprobs > 0 ? (uint32_t)call->r->top_logprobs : 0;
    p.n_top = p.n_top < top ? p.n_top : top; /* the larger of two wishes was asked */
    if (ch->echo_scores)
        text_out_echo_token(&ch->out, &p);
    if (ch->scores.failed || ch->out.failed)
        call_no_memory(call);
}

/* The engine could not do it. */
static void failed(struct call *call, const struct msg_done *m)
{
    uint32_t reason = m->reason;
    struct api_error e;
    struct api *a = call->all->api;
    if (reason == DONE_NUMERIC) {
        metrics_corrupted(a->metrics);
        error_set(&e, 500, NULL, NULL, "The model produced a number that is not finite.");
        e.extra_header = "x-should-retry: false\r\n"; /* it would happen again */
    } else if (reason == DONE_DEVICE) {
        error_set(&e, 500, NULL, NULL, "The device failed while it computed this answer.");
    } else if (reason == DONE_REFUSED && m->text[0] != '\0') { /* this process never can */
        error_set(&e, 400, "invalid_value", NULL, "This server cannot hold the request: %.*s",
                  (int)sizeof m->text, m->text);
    } else if (a->draining || reason == DONE_CANCELLED) {
        error_set(&e, 503, "shutting_down", NULL, "The server is shutting down.");
        e.retry_after_s = submit_retry_after(call->all);
    } else {
        error_set(&e, 503, "server_overloaded", NULL, "The engine cannot take this request now.");
        e.retry_after_s = submit_retry_after(call->all);
    }
    call_fail(call, &e, "error");
}

static void on_done(struct calls *c, struct choice *ch, const struct msg_done *m)
{
    struct call *call = ch->call;
    bool natural = m->reason == DONE_STOP || m->reason == DONE_LENGTH;
    metrics_done(c->api->metrics, m);
    if (call->slot != NULL && m->n_output > 0)
        quota_learn(&call->slot->quota, m->n_output);
    submit_forget(ch);
    choice_move(ch, CHOICE_DONE);
    if (natural && m->n_output == 0) /* a prompt that was only scored */
        c->prompt_tokens += m->n_prompt;
    if (call->x != NULL && ch->finish.kind == FINISH_NONE) {
        struct finish f = {.kind = FINISH_LENGTH, .stop_id = TOKEN_NONE};
        if (m->reason == DONE_STOP) {
            f.kind = FINISH_STOP;
            f.stop_id = client_stops_at(call->r, m->stop_token) ? m->stop_token : TOKEN_NONE;
        }
        if (natural)
            choice_finish(ch, &f);
        else
            failed(call, m);
    }
    call_settle(call);
}

static uint64_t id_of(const struct msg_head *m)
{
    uint64_t id; /* the first field after the head in every event about a sequence */
    memcpy(&id, m + 1, sizeof id);
    return id;
}

void calls_event(struct api *a, const struct msg_head *m)
{
    struct calls *c = a->calls;
    if (m->kind != MSG_SCHEDULED && m->kind != MSG_TOKEN && m->kind != MSG_PROMPT &&
        m->kind != MSG_DONE)
        return; /* about the engine, not about a sequence */
    struct choice *ch = submit_find(c, id_of(m));
    if (ch == NULL)
        return;
    if (m->kind == MSG_TOKEN)
        on_token(c, ch, (const struct msg_token *)m);
    else if (m->kind == MSG_PROMPT)
        on_prompt(ch, (const struct msg_prompt *)m);
    else if (m->kind == MSG_DONE)
        on_done(c, ch, (const struct msg_done *)m);
    else
        on_scheduled(ch, (const struct msg_scheduled *)m);
}

static void tell(struct choice *ch)
{
    struct call *call = ch->call;
    if (call->x == NULL)
        return;
    if (call->r->stream)
        answer_event(ch);
    uint32_t n = call->r->stream ? call->n_ended : call->n_finished;
    if (call->x != NULL && n == call->n_choices)
        answer_end(call);
}

void calls_flush(struct api *a)
{
    struct calls *c = a->calls;
    struct choice *ch = c->dirty;
    c->dirty = NULL;
    c->dirty_end = &c->dirty;
    c->flushed = 0;
    c->unfinished = false;
    for (struct choice *next; ch != NULL; ch = next) {
        next = ch->next_dirty;
        ch->dirty = false;
        ch->call->n_dirty--;
        tell(ch); /* may mark it again: its client is slow, or this flush is long enough */
        call_settle(ch->call);
    }
    if (c->unfinished && a->mail != NULL)
        mailbox_wake_loop(a->mail);
    writer_shrink(&c->out, SCRATCH_BYTES);
    if (c->prompt_tokens > 0 || c->generated_tokens > 0)
        metrics_tokens(a->metrics, c->prompt_tokens, c->generated_tokens);
    c->prompt_tokens = c->generated_tokens = 0;
    submit_pending(c);
    bury(c);
    c->now_us = 0;
}

/* --- time --------------------------------------------------------------------------------------- */

/* A call waits in vain if none of its sequences was scheduled in time. The siblings of one that runs
 * wait for their own, and a queue that the engine calls empty holds nobody. */
static bool waits_too_long(const struct call *call, uint64_t now_us)
{
    const struct api *a = call->all->api;
    uint64_t limit = (uint64_t)a->cfg.queue_timeout_s * 1000000;
    bool none_waits = a->engine.waiting == 0 && a->engine_heard_us > call->submitted_us &&
                      call->n_submitted == call->n_choices;
    return limit > 0 && !call->scheduled && !none_waits && now_us > call->submitted_us + limit;
}

static void tick_call(struct call *call, uint64_t now_us)
{
    struct calls *c = call->all;
    if (!call->scheduled && now_us > call->submitted_us + c->oldest_us)
        c->oldest_us = now_us - call->submitted_us;
    if (waits_too_long(call, now_us)) {
        struct api_error e;
        error_set(&e, 503, "queue_timeout", NULL,
                  "The request waited %u s in the queue without being scheduled.",
                  c->api->cfg.queue_timeout_s);
        e.retry_after_s = submit_retry_after(c);
        metrics_rejected(c->api->metrics, e.code);
        call_fail(call, &e, "error");
    } else if (call->r->stream && !call->head_sent && now_us > call->arrival_us + HEAD_DELAY_US) {
        answer_head(call);
    } else if (call->r->stream && call->head_sent && now_us > call->written_us + PING_US) {
        answer_ping(call);
    }
}

void calls_tick(struct api *a, uint64_t now_us)
{
    struct calls *c = a->calls;
    c->now_us = now_us;
    c->oldest_us = 0;
    for (struct call *call = c->first; call != NULL; call = call->next)
        if (call->x != NULL)
            tick_call(call, now_us);
    calls_flush(a);
}

/* The engine thread has ended: no MSG_DONE will come. */
static void forget_sequences(struct calls *c)
{
    for (struct call *call = c->first; call != NULL; call = call->next) {
        for (uint32_t i = 0; i < call->n_choices; i++) {
            struct choice *ch = &call->choices[i];
            if (ch->id != 0)
                submit_forget(ch);
            if (ch->state != CHOICE_DONE)
                choice_move(ch, CHOICE_DONE);
        }
        call->waiting = false;
        call->next_waiting = NULL;
        call_settle(call);
    }
    c->waiting = c->waiting_last = NULL;
}

void calls_abort_all(struct api *a, const char *code, const char *message)
{
    struct calls *c = a->calls;
    struct api_error e;
    error_set(&e, 503, code, NULL, "%s", message);
    e.retry_after_s = submit_retry_after(c);
    for (struct call *call = c->first; call != NULL; call = call->next)
        if (call->x != NULL)
            call_fail(call, &e, "error");
    if (a->engine_dead)
        forget_sequences(c);
    calls_flush(a);
}
