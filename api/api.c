/* The API as the server calls it: who may ask, what is asked, and who answers.
 *
 * Order for every request: the key, then whether there is a model, then the path, the method, the
 * media type, the size; all from the headers alone, so that a stranger's body is never read. The
 * engine's events come in through api_events, a bounded number at a time. Loop thread only. */
#include "api/api.h"
#include "api/call.h"
#include "api/front.h"
#include "kernels/log.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <time.h>

enum {
    EVENTS_AT_ONCE = 4096, /* some milliseconds of work; sockets come first again after it */
    LEAST_BODY = 4 << 20,
    BYTES_PER_TOKEN = 20, /* an id of a long prompt, its comma and some blanks */
    LOG_EVERY_US = 10000000,
    STALL_US = 10000000, /* a step may take this long, or STALL_STEPS mean steps */
    STALL_STEPS = 20,
    MEAN_STEPS = 16, /* window of the moving mean */
};

/* ---- life ---- */

status api_create(struct api **out, const struct api_config *cfg)
{
    struct api *a = mem_alloc(sizeof *a);
    status st;
    a->cfg = *cfg;
    a->start_unix_s = (uint64_t)time(NULL);
    a->front = mem_alloc(sizeof *a->front);
    a->scratch = token_scratch_create();
    const char *name = cfg->n_names > 0 ? cfg->served_names[0] : "";
    if ((st = job_init(a->front)) == OK &&
        (st = auth_create(&a->auth, cfg->keys, cfg->n_keys)) == OK &&
        (cfg->tenants_file == NULL ||
         (st = roster_create(&a->roster, cfg->tenants_file, &a->auth, clock_us())) == OK) &&
        (st = metrics_create(&a->metrics, name, NULL)) == OK)
        st = calls_create(&a->calls, a);
    if (st == OK)
        *out = a;
    else
        api_destroy(a);
    return st;
}

void api_engine_ready(struct api *a, const struct engine_info *info, struct mailbox *mail)
{
    const struct api_config *cfg = &a->cfg;
    struct metrics *m;
    a->front->model_name[0] = info->name;
    a->rules = (struct request_rules){
        .info = info,
        .names = cfg->n_names > 0 ? cfg->served_names : a->front->model_name,
        .n_names = cfg->n_names > 0 ? cfg->n_names : 1,
        .max_n = cfg->max_n,
        .max_logprobs = cfg->max_logprobs,
        .default_max_tokens = cfg->default_max_tokens,
        .accept_any_model = cfg->accept_any_model,
        .strict_fields = cfg->strict_fields,
        .reject_overflow = cfg->reject_overflow,
        .trust_chat_input = cfg->trust_chat_input,
        .default_temperature = cfg->default_temperature,
        .default_top_p = cfg->default_top_p,
        .default_top_k = cfg->default_top_k,
    };
    if (metrics_create(&m, a->rules.names[0], info) == OK) { /* bounds now known */
        metrics_destroy(a->metrics);
        a->metrics = m;
    }
    /* Whatever the context holds can be submitted: the engine sized the mailbox by it. */
    CHECK(info->max_model_len * (size_t)4 < mailbox_max_message(mail, TO_ENGINE));
    a->info = info;
    a->mail = mail;
    a->engine_heard_us = a->front->quiet_us = clock_us();
    submit_pending(a->calls); /* the engine learns of tenants before anything else */
    if (info->chat == NULL)
        log_line(LOG_WARN, "the model has no chat template: /v1/chat/completions answers 400");
}

void api_destroy(struct api *a)
{
    if (a == NULL)
        return;
    if (a->calls != NULL)
        calls_destroy(a->calls);
    if (a->metrics != NULL)
        metrics_destroy(a->metrics);
    auth_destroy(a->auth);
    roster_destroy(a->roster);
    job_fini(a->front);
    token_scratch_destroy(a->scratch);
    mem_free(a->front);
    mem_free(a);
}

/* ---- answers ---- */

static void count(struct api *a, struct exchange *x, int http_status)
{
    static const char *const methods[] = {[HTTP_M_GET] = "GET",
                                          [HTTP_M_POST] = "POST",
                                          [HTTP_M_HEAD] = "HEAD",
                                          [HTTP_M_OPTIONS] = "OPTIONS",
                                          [HTTP_M_OTHER] = "OTHER"};
    const struct route *rt = small_find(exchange_path(x));
    double seconds = (double)(clock_us() - exchange_arrival_us(x)) * 1e-6;
    access_note(a, x,
                &(struct access){.method = methods[exchange_method(x)],
                                 .handler = rt ? rt->path : "none",
                                 .http_status = http_status,
                                 .seconds = seconds});
}

void api_refuse(struct api *a, struct exchange *x, const struct api_error *e, bool close)
{
    admit_refused(a, x, e);
    count(a, x, e->status);
    error_reply(x, e, close);
}

void api_answer(struct api *a, struct exchange *x, const struct reply *r)
{
    count(a, x, r->status);
    exchange_reply(x, r);
}

size_t api_error_body(char *buf, size_t room, int http_status, const char *code,
                      const char *message)
{
    struct api_error e;
    error_set(&e, http_status, code, NULL, "%s", message);
    return error_render(&e, buf, room);
}

/* ---- health ---- */

/* Work is pending and no step was heard of for too long. An idle engine is healthy. */
bool api_stalled(const struct api *a)
{
    const struct front *f = a->front;
    uint64_t limit = f->mean_step_us * STALL_STEPS;
    uint64_t since = a->engine_heard_us > f->quiet_us ? a->engine_heard_us : f->quiet_us;
    if (limit < STALL_US)
        limit = STALL_US;
    return f->now_us > since && f->now_us - since > limit;
}

bool api_unready(const struct api *a, struct api_error *e)
{
    if (a->engine_dead) /* which is why it shuts down */
        error_set(e, 503, "engine_dead", NULL, "The engine has stopped: %.200s", a->engine_error);
    else if (a->draining)
        error_set(e, 503, "shutting_down", NULL, "The server is shutting down.");
    else if (a->info == NULL)
        error_set(e, 503, "loading_model", NULL, "Loading model");
    else if (api_stalled(a))
        error_set(e, 503, "engine_stalled", NULL, "The engine does not answer.");
    else
        return false;
    e->retry_after_s = 2;
    return true;
}

/* ---- requests ---- */

static bool starts_with(struct text_view s, const char *prefix)
{
    size_t n = strlen(prefix);
    return s.len >= n && memcmp(s.p, prefix, n) == 0;
}

static bool is_json(struct text_view type)
{
    static const char json[] = "application/json";
    size_t n = sizeof json - 1;
    if (type.p == NULL || type.len < n || strncasecmp(type.p, json, n) != 0)
        return false;
    while (n < type.len && (type.p[n] == ' ' || type.p[n] == '\t'))
        n++;
    return n == type.len || type.p[n] == ';';
}

uint64_t api_max_body(const struct api *a)
{
    if (a->cfg.max_body_bytes > 0)
        return a->cfg.max_body_bytes;
    uint64_t by_context = a->info ? (uint64_t)a->info->max_model_len * BYTES_PER_TOKEN : 0;
    return by_context > LEAST_BODY ? by_context : LEAST_BODY;
}

static bool makes_tokens(const struct route *rt)
{
    return rt->body == BODY_CHAT || rt->body == BODY_COMPLETION;
}

/* The first thing wrong with a request, from its headers; false: nothing. */
static bool find_fault(struct api *a, struct exchange *x, const struct route *rt,
                       uint64_t declared_len, struct api_error *e)
{
    struct text_view path = exchange_path(x);
    enum http_method method = exchange_method(x);
    bool for_model = rt ? rt->needs_engine : starts_with(path, "/v1/");
    if (method != HTTP_M_OPTIONS && !(rt && rt->open) &&
        !admit_caller(a, x, rt && makes_tokens(rt))) {
        error_set(e, 401, NULL, NULL, "The API key is missing or wrong.");
    } else if (for_model && method != HTTP_M_OPTIONS && (a->draining || a->info == NULL)) {
        api_unready(a, e);
    } else if (rt == NULL) {
        struct quoted q = request_fields_quote(path.p, path.len);
        error_set(e, 404, NULL, NULL, "There is no `%s` here.", q.text);
    } else if (method != HTTP_M_OPTIONS && !(rt->methods >> method & 1)) {
        error_set(e, 405, NULL, NULL, "The method is not allowed for `%s`.", rt->path);
        e->extra_header = rt->allow;
    } else if (method == HTTP_M_POST && rt->body != 0 &&
               !is_json(exchange_header(x, "content-type"))) {
        error_set(e, 415, NULL, NULL, "Unsupported Media Type: Only 'application/json' is allowed");
    } else if (declared_len != UINT64_MAX && declared_len > api_max_body(a)) {
        error_set(e, 413, NULL, NULL, "The body may have at most %llu bytes.",
                  (unsigned long long)api_max_body(a));
    } else {
        return makes_tokens(rt) && method == HTTP_M_POST && !admit_head(a, x, e);
    }
    return true;
}

enum head_verdict api_head(struct api *a, struct exchange *x, uint64_t declared_len)
{
    struct api_error e;
    const struct route *rt = small_find(exchange_path(x));
    if (find_fault(a, x, rt, declared_len, &e)) {
        bool leaving = e.status == 413 || (a->draining && e.status == 503);
        api_refuse(a, x, &e, leaving);
        return HEAD_ANSWERED;
    }
    if (exchange_method(x) == HTTP_M_OPTIONS) {
        api_answer(a, x, &(struct reply){.status = 204, .extra = rt->allow, .body = ""});
        return HEAD_ANSWERED;
    }
    return HEAD_READ_BODY;
}

void api_body(struct api *a, struct exchange *x)
{
    const struct route *rt = small_find(exchange_path(x));
    struct api_error e;
    CHECK(rt != NULL);                     /* api_head let it pass */
    if (rt->needs_engine && a->draining) { /* the drain began while the body came */
        api_unready(a, &e);
        api_refuse(a, x, &e, true);
    } else if (makes_tokens(rt) && !admit_body(a, x, &e)) {
        api_refuse(a, x, &e, false);
    } else if (rt->body != 0) {
        job_start(a, x, rt);
    } else {
        rt->answer(a, x);
    }
}

void api_gone(struct api *a, struct exchange *x)
{
    if (exchange_user(x) != NULL && !job_gone(a, x))
        call_gone(a, x);
}

/* ---- the engine's events ---- */

static void hear_step(struct api *a, const struct msg_step *s)
{
    struct front *f = a->front;
    a->engine = *s;
    a->engine_heard_us = clock_us();
    if (f->mean_step_us == 0)
        f->mean_step_us = s->step_us;
    f->mean_step_us += s->step_us / MEAN_STEPS;
    f->mean_step_us -= f->mean_step_us / MEAN_STEPS;
    metrics_step(a->metrics, s);
}

static void hear_failure(struct api *a, const struct msg_failed *m)
{
    snprintf(a->engine_error, sizeof a->engine_error, "%.*s", (int)sizeof m->text, m->text);
    a->engine_dead = true;
    log_line(LOG_ERROR, "the engine has stopped: %s", a->engine_error);
    calls_abort_all(a, "engine_dead", "The engine has stopped.");
}

static void hear(struct api *a, const struct msg_head *m)
{
    switch (m->kind) {
    case MSG_SCHEDULED:
    case MSG_TOKEN:
    case MSG_PROMPT:
    case MSG_DONE: calls_event(a, m); break;
    case MSG_TENANT_STATE:
        if (a->roster != NULL)
            roster_hear(a->roster, (const struct msg_tenant_state *)m);
        break;
    case MSG_STEP: hear_step(a, (const struct msg_step *)m); break;
    case MSG_FAILED: hear_failure(a, (const struct msg_failed *)m); break;
    default: CHECK(!"a message of a known kind");
    }
}

void api_events(struct api *a)
{
    const struct msg_head *m = NULL;
    int n = 0;
    if (a->mail == NULL) /* the engine was faster than the news of it */
        return;
    while (n < EVENTS_AT_ONCE && (m = mailbox_peek(a->mail, TO_LOOP)) != NULL) {
        hear(a, m);
        mailbox_release(a->mail, TO_LOOP);
        n++;
    }
    calls_flush(a);
    if (n == EVENTS_AT_ONCE)
        mailbox_wake_loop(a->mail);
}

/* The server is in the middle of its own work: what waited for this leaves in the next turn. */
void api_writable(struct api *a)
{
    if (a->mail != NULL)
        mailbox_wake_loop(a->mail);
}

/* ---- time ---- */

static bool is_quiet(const struct api *a)
{
    return calls_active(a->calls) == 0 && a->engine.running == 0 && a->engine.waiting == 0;
}

/* vLLM's words: log scrapers look for them. */
static void log_throughput(struct api *a, uint64_t now_us)
{
    struct front *f = a->front;
    const struct msg_step *s = &a->engine, *before = &f->logged;
    double seconds = (double)(now_us - f->logged_us) * 1e-6;
    uint64_t total = s->blocks_total[0], idle = s->blocks_free[0] + s->blocks_cached[0];
    if (s->steps != before->steps || !is_quiet(a))
        log_line(LOG_INFO,
                 "Avg prompt throughput: %.1f tokens/s, Avg generation throughput: %.1f tokens/s, "
                 "Running: %u reqs, Waiting: %u reqs, GPU KV cache usage: %.1f%%, Prefix cache hit "
                 "rate: %.1f%%",
                 (double)(s->prompt_tokens - before->prompt_tokens) / seconds,
                 (double)(s->output_tokens - before->output_tokens) / seconds, s->running,
                 s->waiting, total > idle ? 100.0 * (double)(total - idle) / (double)total : 0.0,
                 s->queried_tokens > 0
                     ? 100.0 * (double)s->cached_tokens / (double)s->queried_tokens
                     : 0.0);
    f->logged = *s;
    f->logged_us = now_us;
}

void api_tick(struct api *a, uint64_t now_us)
{
    struct front *f = a->front;
    bool was_stalled = a->info != NULL && api_stalled(a);
    f->now_us = now_us;
    if (is_quiet(a))
        f->quiet_us = now_us;
    if (a->info == NULL)
        return;
    api_events(a); /* a lost wake-up costs a tick, not a request */
    calls_tick(a, now_us);
    if (!was_stalled && api_stalled(a))
        log_line(LOG_ERROR, "the engine has work and is silent for %.1f s",
                 (double)(now_us - a->engine_heard_us) * 1e-6);
    if (f->logged_us == 0)
        f->logged_us = now_us;
    else if (now_us - f->logged_us >= LOG_EVERY_US)
        log_throughput(a, now_us);
}

/* ---- the end ---- */

bool api_engine_dead(const struct api *a)
{
    return a->engine_dead;
}

void api_drain(struct api *a)
{
    a->draining = true;
}

uint32_t api_n_active(const struct api *a)
{
    return calls_active(a->calls) + a->front->n_waited_for;
}

void api_abort_all(struct api *a, const char *code, const char *message)
{
    struct api_error e;
    error_set(&e, 503, code, NULL, "%s", message);
    e.retry_after_s = 2;
    job_abort_all(a, &e);
    calls_abort_all(a, code, message);
}

void api_reload(struct api *a)
{
    if (a->roster == NULL)
        return;
    roster_reload(a->roster, &a->auth, clock_us());
    submit_pending(a->calls);
}

void api_set_server_stats(struct api *a, const struct server_stats *s)
{
    a->server = *s;
}
