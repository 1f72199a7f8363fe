/* See conn.h. The order of a request's life is the order of this file: bytes in, head, body, the
 * answer (exchange.c), the end. */
#include "server/conn.h"

#include <string.h>

bool conn_bytes_put(struct conn_bytes *b, const char *p, size_t n)
{
    if (n > b->room - b->len) {
        size_t room = b->room == 0 ? 2048 : b->room;
        while (room < b->len + n)
            room *= 2;
        char *grown = mem_try_alloc(room);
        if (grown == NULL)
            return false;
        if (b->len > 0)
            memcpy(grown, b->p, b->len);
        mem_free(b->p);
        b->p = grown;
        b->room = room;
    }
    memcpy(b->p + b->len, p, n);
    b->len += n;
    return true;
}

void conn_bytes_clear(struct conn_bytes *b)
{
    b->len = 0;
    /* One long answer must not make an idle connection expensive. */
    if (b->room > 2 * (size_t)CONN_PUSH_BYTES) {
        mem_free(b->p);
        *b = (struct conn_bytes){0};
    }
}

struct conn *conn_of(struct exchange *x)
{
    return (struct conn *)(void *)((char *)x - offsetof(struct conn, x));
}

void conn_init(struct conn *c, struct conn_env *env)
{
    memset(c, 0, offsetof(struct conn, parse));
    c->env = env;
    c->chunk_at = SIZE_MAX;
    c->since_us = c->progress_us = c->last_used_us = env->now_us;
    http_parse_init(&c->parse);
}

void conn_fini(struct conn *c)
{
    CHECK(!c->with_api);
    mem_free(c->out.p);
    mem_free(c->pend.p);
    http_parse_fini(&c->parse);
}

size_t conn_unsent(const struct conn *c)
{
    return c->out.len + c->in_flight;
}

bool conn_is_idle(const struct conn *c)
{
    return c->state == CONN_HEAD && !c->parse.started && c->pend.len == 0 && conn_unsent(c) == 0;
}

size_t conn_read_room(const struct conn *c)
{
    if (c->state == CONN_CLOSED || c->peer_done)
        return 0;
    if (c->state == CONN_LINGER) /* then it waits: a reset now could eat our answer */
        return c->discarded < CONN_DISCARD_MAX ? CONN_PENDING_MAX : 0;
    if (c->state == CONN_CALL || c->pend.len > 0)
        return CONN_PENDING_MAX - c->pend.len;
    return c->state == CONN_BODY ? 64 * 1024 : 16 * 1024;
}

static void go(struct conn *c, enum conn_state to)
{
    c->state = to;
    c->since_us = c->env->now_us;
    c->env->wake(c);
}

/* The client is gone, or we stop caring: the API must hear it exactly once. */
static void tell_gone(struct conn *c)
{
    if (!c->with_api)
        return;
    c->with_api = false;
    api_gone(c->env->api, &c->x);
}

bool conn_put(struct conn *c, const char *p, size_t n)
{
    if (!c->broken && conn_unsent(c) == 0)
        c->progress_us = c->env->now_us; /* the stall clock starts with the first unsent byte */
    if (!c->broken && !conn_bytes_put(&c->out, p, n))
        c->broken = true;
    c->env->wake(c);
    return !c->broken;
}

/* A refusal of our own, in the API's error shape. It always ends the connection: after a framing
 * error nobody knows where the next request starts. */
static void refuse(struct conn *c, struct http_refusal why)
{
    char body[1024];
    tell_gone(c);
    if (c->answered || c->streaming) { /* one status per request, ever */
        c->close_after = true;
        go(c, CONN_LINGER);
        return;
    }
    struct reply r = {.status = why.status,
                      .content_type = "application/json",
                      .extra = why.status == 503 ? "Retry-After: 1\r\n" : NULL,
                      .body = body,
                      .close = true};
    r.len = api_error_body(body, sizeof body, why.status, why.code, why.message);
    conn_reply(c, &r);
    go(c, CONN_LINGER);
}

/* ---- head ---- */

static bool wants_continue(const struct conn *c)
{
    return http_parse_count(&c->parse, "expect") > 0 && !http_parse_is_1_0(&c->parse);
}

/* May the rest of this request be read and dropped, to keep the connection? */
static bool discardable(const struct conn *c)
{
    uint64_t declared = http_parse_declared(&c->parse);
    return declared == 0 || (declared <= CONN_DISCARD_MAX && !wants_continue(c));
}

bool conn_must_close(const struct conn *c)
{
    return c->env->draining || !c->parse.head_done || !http_parse_keep_alive(&c->parse) ||
           c->n_requests + 1 >= c->env->limits.max_requests ||
           (c->state == CONN_ASKING && !discardable(c));
}

static bool split_target(struct conn *c)
{
    char *t = c->parse.text;
    size_t len = c->parse.target_len;
    char *q = memchr(t, '?', len);
    size_t path_len = q == NULL ? len : (size_t)(q - t), decoded;
    c->x.query =
        q == NULL ? (struct text_view){t + len, 0} : (struct text_view){q + 1, len - path_len - 1};
    if (!http_text_decode_path(t, path_len, &decoded))
        return false;
    c->x.path = (struct text_view){t, decoded};
    return true;
}

static void name_request(struct conn *c)
{
    struct text_view id = http_parse_field(&c->parse, "x-request-id");
    if (http_text_clean_id(id)) {
        memcpy(c->x.id, id.p, id.len);
        c->x.id[id.len] = '\0';
        return;
    }
    uint8_t r[16];
    c->env->random(r, sizeof r);
    http_text_make_id(c->x.id, r);
}

/* A browser asks first; the answer needs nothing of the API. */
static bool answer_preflight(struct conn *c)
{
    if (c->parse.ll.method != HTTP_OPTIONS || c->x.origin.p == NULL ||
        http_parse_count(&c->parse, "access-control-request-method") == 0)
        return false;
    struct reply r = {.status = 204,
                      .extra = "Access-Control-Allow-Methods: GET, POST, OPTIONS\r\n"
                               "Access-Control-Allow-Headers: Authorization, Content-Type, "
                               "X-Api-Key, X-Request-Id\r\n"
                               "Access-Control-Max-Age: 600\r\n"};
    conn_reply(c, &r);
    return true;
}

static void start_body(struct conn *c)
{
    static const char go_on[] = "HTTP/1.1 100 Continue\r\n\r\n";
    uint64_t declared = http_parse_declared(&c->parse), most = api_max_body(c->env->api);
    c->with_api = true;
    if (declared != UINT64_MAX && declared > most) {
        refuse(c, (struct http_refusal){413, "request_too_large", "The request body is too large"});
        return;
    }
    c->parse.keep_body = true;
    c->parse.body_limit = most;
    if (declared > 0 && wants_continue(c) && !conn_put(c, go_on, sizeof go_on - 1))
        return;
    go(c, CONN_BODY);
}

static void take_head(struct conn *c)
{
    struct http_refusal bad = rules_check(&c->env->rules, &c->parse);
    name_request(c);
    if (bad.status == 0 && !split_target(c))
        bad = (struct http_refusal){400, "bad_request", "The request path is badly encoded"};
    if (bad.status != 0) {
        refuse(c, bad);
        return;
    }
    c->env->n_requests++;
    c->x.origin = rules_cors(&c->env->rules, &c->parse);
    c->state = CONN_ASKING;
    if (!answer_preflight(c) &&
        api_head(c->env->api, &c->x, http_parse_declared(&c->parse)) == HEAD_READ_BODY) {
        CHECK(!c->answered);
        start_body(c);
        return;
    }
    CHECK(c->answered);
    c->parse.keep_body = false;
    c->parse.body_limit = CONN_DISCARD_MAX;
    go(c, c->close_after ? CONN_LINGER : CONN_DISCARD);
}

/* ---- whole message, and from one to the next ---- */

static void next_request(struct conn *c)
{
    struct exchange none = {0};
    c->x = none;
    c->n_requests++;
    c->answered = c->streaming = c->chunked = false;
    c->last_used_us = c->env->now_us;
    http_parse_next(&c->parse);
    go(c, CONN_HEAD);
}

/* After the API has returned: what it answered takes effect. */
static void settle(struct conn *c)
{
    if (!c->answered || (c->state != CONN_CALL && c->state != CONN_DISCARD))
        return;
    if (c->state == CONN_DISCARD && !c->parse.message_done)
        return;
    if (c->close_after)
        go(c, CONN_LINGER);
    else
        next_request(c);
}

static void take_message(struct conn *c)
{
    if (c->state == CONN_BODY) {
        go(c, CONN_CALL);
        api_body(c->env->api, &c->x);
        http_parse_drop_body(&c->parse);
    }
    settle(c);
}

static bool parsing(const struct conn *c)
{
    return c->state == CONN_HEAD || c->state == CONN_BODY || c->state == CONN_DISCARD;
}

static void note_arrival(struct conn *c, size_t n)
{
    if (c->state != CONN_HEAD || c->parse.started || n == 0)
        return;
    c->x.arrival_us = c->env->now_us;
    if (c->n_requests > 0) /* the first request's clock runs since accept */
        c->since_us = c->env->now_us;
}

/* Parses until the bytes are used up or a request is with the API. What is left waits in pend. */
static void run(struct conn *c, const char *p, size_t n)
{
    bool more = true;
    c->running = true;
    while (more && parsing(c) && !c->broken) {
        size_t used = 0;
        note_arrival(c, n);
        switch (http_parse_feed(&c->parse, p, n, &used)) {
        case HTTP_MORE: more = false; break;
        case HTTP_GOT_HEAD: take_head(c); break;
        case HTTP_GOT_ALL:
            take_message(c);
            more = n > used;
            break;
        case HTTP_BAD: refuse(c, c->parse.bad); break;
        }
        p += used;
        n -= used;
    }
    c->running = false;
    if (c->state == CONN_LINGER)
        c->discarded += n;
    else if (n > 0 && c->state == CONN_CALL && !conn_bytes_put(&c->pend, p, n))
        c->broken = true;
}

void conn_input(struct conn *c, const char *p, size_t n)
{
    if (c->state == CONN_LINGER) {
        c->discarded += n;
    } else if (c->state == CONN_CALL || c->pend.len > 0) {
        c->broken = !conn_bytes_put(&c->pend, p, n) || c->broken;
        c->env->wake(c);
    } else if (c->state != CONN_CLOSED) {
        run(c, p, n);
    }
}

void conn_resume(struct conn *c)
{
    if (c->broken && c->state != CONN_CLOSED) {
        conn_lost(c);
        return;
    }
    settle(c);
    if (c->pend.len == 0 || !parsing(c))
        return;
    struct conn_bytes was = c->pend;
    c->pend = (struct conn_bytes){0};
    run(c, was.p, was.len);
    mem_free(was.p);
}

/* ---- the answer ---- */

/* Five digits always: the size is written when the chunk closes, into room left for it, and a
 * stream is cut long before it has 1 MiB unsent. */
void conn_close_chunk(struct conn *c)
{
    enum { SIZE_LINE = 7 };
    if (c->chunk_at == SIZE_MAX)
        return;
    size_t n = c->out.len - c->chunk_at - SIZE_LINE;
    for (int i = 0; i < 5; i++)
        c->out.p[c->chunk_at + (size_t)i] = "0123456789abcdef"[n >> (16 - 4 * i) & 15];
    c->chunk_at = SIZE_MAX;
    conn_put(c, "\r\n", 2);
}

void conn_answered(struct conn *c, bool close)
{
    c->answered = true;
    c->with_api = false;
    c->close_after = c->close_after || close;
    c->env->wake(c); /* settled when the API has returned */
}

/* ---- the end ---- */

void conn_lost(struct conn *c)
{
    if (c->state == CONN_CLOSED)
        return;
    tell_gone(c);
    conn_bytes_clear(&c->out);
    c->chunk_at = SIZE_MAX;
    go(c, CONN_CLOSED);
}

void conn_eof(struct conn *c)
{
    c->peer_done = true;
    settle(c);
    /* Mid-request, or with nothing left to say to it: a half-closed client counts as gone. */
    bool mid_request = c->with_api || c->state == CONN_BODY || c->parse.started;
    if (c->state == CONN_LINGER || c->state == CONN_DISCARD)
        mid_request = false;
    if (mid_request || conn_unsent(c) == 0) {
        conn_lost(c);
        return;
    }
    c->close_after = true;
    if (c->state != CONN_LINGER)
        go(c, CONN_LINGER);
}

bool conn_wants_shutdown(const struct conn *c)
{
    return c->state == CONN_LINGER && conn_unsent(c) == 0;
}

void conn_shut(struct conn *c)
{
    c->since_us = c->env->now_us;
    if (c->peer_done)
        go(c, CONN_CLOSED);
}

static void check_head_clock(struct conn *c, uint64_t waited)
{
    const struct conn_limits *l = &c->env->limits;
    if (!c->parse.started || c->parse.head_bytes == 0) {
        if (waited > (c->n_requests == 0 || c->parse.started ? l->header_us : l->idle_us))
            go(c, CONN_CLOSED);
    } else if (waited > l->header_us) {
        refuse(c, (struct http_refusal){408, "request_timeout", "The headers came too slowly"});
    }
}

static void check_body_clock(struct conn *c, uint64_t waited)
{
    const struct conn_limits *l = &c->env->limits;
    bool late = waited > l->body_us;
    if (waited > CONN_BODY_GRACE_US && l->body_min_rate > 0)
        late = late || c->parse.body_bytes <
                           l->body_min_rate * ((waited - CONN_BODY_GRACE_US) / 1000) / 1000;
    if (late)
        refuse(c, (struct http_refusal){408, "request_timeout", "The body came too slowly"});
}

void conn_tick(struct conn *c)
{
    uint64_t now = c->env->now_us, waited = now - c->since_us;
    if (conn_unsent(c) > 0 && now - c->progress_us > c->env->limits.stall_us) {
        c->broken = true; /* closed by a reset */
        conn_lost(c);
        return;
    }
    switch (c->state) {
    case CONN_HEAD: check_head_clock(c, waited); break;
    case CONN_BODY:
    case CONN_DISCARD: check_body_clock(c, waited); break;
    case CONN_LINGER:
        if (conn_unsent(c) == 0 && waited > CONN_LINGER_US)
            go(c, CONN_CLOSED);
        break;
    case CONN_ASKING:
    case CONN_CALL:
    case CONN_CLOSED: break;
    }
}
