/* A server with an API of a page: the connection code and the process around it can be tested
 * without a model, and at every edge. tests/e2e/framing.py and server_*.py drive it.
 *
 *   GET  /health              503 while "loading" (--mock-fail-step ms), then 200
 *   GET  /v1/models           a small answer; with keys configured, 401 without one
 *   GET  /v1/models/NAME      NAME as decoded
 *   GET  /calls               counters: heads, bodies, gone, active
 *   POST /echo                the body back
 *   POST /big?N               N bytes back
 *   POST /stream?N,SIZE,EVERY N events of SIZE bytes, one each EVERY ms (0: as fast as allowed)
 *   POST /wait                answers when drained or aborted
 *   POST /work                answers from a helper thread
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "server/serve.h"

enum { SOFT_BYTES = 64 * 1024, CALLS_MAX = 4096 };

struct call {
    struct exchange *x; /* NULL: free */
    unsigned long left, size, every_ms;
    uint64_t next_us;
    bool waits;
};

struct api {
    struct api_config cfg;
    bool ready, draining;
    unsigned long heads, bodies, gone;
    uint32_t n_active;
    struct call calls[CALLS_MAX];
};

struct engine {
    struct engine_info info;
};

status engine_create(struct engine **out, const struct engine_config *cfg, void (*wake)(void *),
                     void *arg)
{
    usleep(1000 * cfg->mock.fail_step);
    if (cfg->mock.nan_every == 13)
        return err(ERR_FORMAT, "the fake was told to fail");
    *out = mem_alloc(sizeof **out);
    wake(arg);
    return OK;
}

const struct engine_info *engine_info(const struct engine *e)
{
    return &e->info;
}

struct mailbox *engine_mailbox(struct engine *e)
{
    (void)e;
    return NULL;
}

status engine_start(struct engine *e)
{
    (void)e;
    return OK;
}

void engine_destroy(struct engine *e)
{
    mem_free(e);
}

status api_create(struct api **out, const struct api_config *cfg)
{
    *out = mem_alloc(sizeof **out);
    (*out)->cfg = *cfg;
    return OK;
}

void api_destroy(struct api *a)
{
    CHECK(a->n_active == 0);
    mem_free(a);
}

void api_reload(struct api *a)
{
    (void)a;
}

void api_engine_ready(struct api *a, const struct engine_info *info, struct mailbox *mail)
{
    (void)info, (void)mail;
    a->ready = true;
}

uint64_t api_max_body(const struct api *a)
{
    return a->cfg.max_body_bytes != 0 ? a->cfg.max_body_bytes : 4 << 20;
}

size_t api_error_body(char *buf, size_t room, int http_status, const char *code,
                      const char *message)
{
    CHECK(room >= 1024); /* as error_render wants it */
    int n =
        snprintf(buf, room,
                 "{\"error\":{\"message\":\"%s\",\"type\":\"%s\",\"param\":null,"
                 "\"code\":\"%s\"}}",
                 message, http_status >= 500 ? "unavailable_error" : "invalid_request_error", code);
    return (size_t)n < room ? (size_t)n : room - 1;
}

static enum head_verdict fail(struct exchange *x, int http_status, const char *code,
                              const char *extra)
{
    char body[1024];
    struct reply r = {.status = http_status,
                      .content_type = "application/json",
                      .extra = extra,
                      .body = body,
                      .close = http_status == 401};
    r.len = api_error_body(body, sizeof body, http_status, code, code);
    exchange_reply(x, &r);
    return HEAD_ANSWERED;
}

static enum head_verdict say(struct exchange *x, const char *text, size_t len)
{
    struct reply r = {.status = 200, .content_type = "text/plain", .body = text, .len = len};
    exchange_reply(x, &r);
    return HEAD_ANSWERED;
}

static bool is(struct text_view v, const char *s)
{
    return v.p != NULL && v.len == strlen(s) && memcmp(v.p, s, v.len) == 0;
}

static bool authentic(const struct api *a, struct exchange *x)
{
    struct text_view v = exchange_header(x, "authorization");
    for (uint32_t i = 0; i < a->cfg.n_keys; i++)
        if (v.p != NULL && v.len > 7 && is((struct text_view){v.p + 7, v.len - 7}, a->cfg.keys[i]))
            return true;
    return a->cfg.n_keys == 0;
}

static enum head_verdict get(struct api *a, struct exchange *x, struct text_view path)
{
    char text[256];
    if (is(path, "/calls")) {
        int n = snprintf(text, sizeof text, "heads=%lu bodies=%lu gone=%lu active=%u\n", a->heads,
                         a->bodies, a->gone, a->n_active);
        return say(x, text, (size_t)n);
    }
    if (path.len >= 10 && memcmp(path.p, "/v1/models", 10) == 0)
        return say(x, path.p, path.len);
    return fail(x, 404, "unknown_url", NULL);
}

enum head_verdict api_head(struct api *a, struct exchange *x, uint64_t declared)
{
    struct text_view path = exchange_path(x);
    a->heads++;
    if (is(path, "/health"))
        return !a->ready || a->draining ? fail(x, 503, "loading_model", "Retry-After: 2\r\n")
                                        : say(x, "", 0);
    if (!authentic(a, x))
        return fail(x, 401, "invalid_api_key", "WWW-Authenticate: Bearer\r\n");
    if (a->draining)
        return fail(x, 503, "shutting_down", "Retry-After: 1\r\n");
    if (exchange_method(x) != HTTP_M_POST)
        return exchange_method(x) == HTTP_M_OTHER
                   ? fail(x, 405, "method_not_allowed", "Allow: GET, POST\r\n")
                   : get(a, x, path);
    if (declared != UINT64_MAX && declared > api_max_body(a))
        return fail(x, 413, "request_too_large", NULL);
    return HEAD_READ_BODY;
}

static struct call *call_open(struct api *a, struct exchange *x)
{
    struct call *c = a->calls;
    while (c->x != NULL)
        c++;
    CHECK(c < a->calls + CALLS_MAX);
    *c = (struct call){.x = x};
    exchange_set_user(x, c);
    a->n_active++;
    return c;
}

static void call_close(struct api *a, struct call *c)
{
    c->x = NULL;
    a->n_active--;
}

static void start_stream(struct api *a, struct exchange *x)
{
    char query[64] = "";
    struct text_view q = exchange_query(x);
    memcpy(query, q.p, q.len < 63 ? q.len : 63);
    struct call *c = call_open(a, x);
    if (sscanf(query, "%lu,%lu,%lu", &c->left, &c->size, &c->every_ms) < 1)
        c->left = 1;
    c->size = c->size < 16 ? 16 : c->size > 60000 ? 60000 : c->size;
    exchange_stream_begin(x, "X-Fake: yes\r\n");
}

struct job {
    struct api *a;
    struct call *c;
    struct exchange *x;
};

static void job_work(void *arg)
{
    (void)arg;
    usleep(50000);
}

static void job_done(void *arg)
{
    struct job *j = arg;
    if (j->c->x == j->x) { /* still there; a slot is not reused while its job runs: left != 0 */
        call_close(j->a, j->c);
        say(j->x, "worked", 6);
    }
    mem_free(j);
}

static void big(struct exchange *x)
{
    struct text_view q = exchange_query(x);
    size_t n = q.len > 0 ? strtoul(q.p, NULL, 10) : 0;
    char *text = mem_alloc(n + 1);
    memset(text, 'b', n);
    say(x, text, n);
    mem_free(text);
}

void api_body(struct api *a, struct exchange *x)
{
    struct text_view path = exchange_path(x), body = exchange_body(x);
    a->bodies++;
    CHECK(body.p[body.len] == '\0');
    if (is(path, "/echo")) {
        say(x, body.p, body.len);
    } else if (is(path, "/big")) {
        big(x);
    } else if (is(path, "/stream")) {
        start_stream(a, x);
    } else if (is(path, "/wait")) {
        call_open(a, x)->waits = true;
    } else if (is(path, "/work")) {
        struct job *j = mem_alloc(sizeof *j);
        *j = (struct job){a, call_open(a, x), x};
        j->c->waits = true;
        CHECK(exchange_work(job_work, job_done, j) == OK);
    } else {
        fail(x, 404, "unknown_url", NULL);
    }
}

void api_gone(struct api *a, struct exchange *x)
{
    a->gone++;
    if (exchange_user(x) != NULL)
        call_close(a, exchange_user(x));
}

/* As the real one: one event per token, stopping at the soft limit. */
static void pump(struct api *a, struct call *c, uint64_t now_us)
{
    static char event[60000];
    memset(event, 'x', sizeof event);
    memcpy(event, "data: ", 6);
    memcpy(event + c->size - 2, "\n\n", 2);
    while (c->left > 0 && now_us >= c->next_us && exchange_stream_unsent(c->x) < SOFT_BYTES) {
        if (exchange_stream_write(c->x, event, c->size) != OK)
            return;
        c->left--;
        if (c->every_ms > 0)
            c->next_us = now_us + c->every_ms * 1000;
    }
    if (c->left > 0)
        return;
    struct exchange *x = c->x;
    if (exchange_stream_write(x, "data: [DONE]\n\n", 14) != OK)
        return;
    call_close(a, c);
    exchange_stream_end(x, true);
}

bool api_engine_dead(const struct api *a)
{
    (void)a;
    return false;
}

void api_writable(struct api *a)
{
    (void)a;
}

void api_events(struct api *a)
{
    (void)a;
}

void api_tick(struct api *a, uint64_t now_us)
{
    for (struct call *c = a->calls; c < a->calls + CALLS_MAX; c++)
        if (c->x != NULL && !c->waits)
            pump(a, c, now_us);
}

void api_drain(struct api *a)
{
    a->draining = true;
}

uint32_t api_n_active(const struct api *a)
{
    return a->n_active;
}

void api_abort_all(struct api *a, const char *code, const char *message)
{
    char body[1024];
    for (struct call *c = a->calls; c < a->calls + CALLS_MAX; c++) {
        struct exchange *x = c->x;
        if (x == NULL)
            continue;
        bool stream = !c->waits;
        call_close(a, c);
        api_error_body(body, sizeof body, 503, code, message);
        if (!stream) {
            fail(x, 503, code, NULL);
        } else if (exchange_stream_write(x, "data: ", 6) == OK) {
            exchange_stream_write(x, body, strlen(body));
            exchange_stream_end(x, false);
        }
    }
}

void api_set_server_stats(struct api *a, const struct server_stats *s)
{
    (void)a, (void)s;
}

int main(int argc, char **argv)
{
    const struct outside out = {getenv, "fake"};
    int skip = argc > 1 && strcmp(argv[1], "serve") == 0 ? 2 : 1; /* as the real one is called */
    return serve_run(argc - skip, argv + skip, &out);
}
