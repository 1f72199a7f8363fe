/* The connection code without sockets: bytes in pieces, answers out. First byte: how the API
 * behaves; second: seed of the cuts. The rest is what the client sends.
 *
 * Checked beyond "no crash": cutting changes nothing (the same requests reach the API with the same
 * bodies, and the same statuses come back); never two requests at once; after a refusal nothing
 * more is answered; the API hears exactly one end of each request; memory stays within limits. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/conn.h"

enum { REQUESTS_MAX = 4096, STATUSES_MAX = 4096 };

enum behaviour {
    ANSWER_AT_ONCE = 0,
    ANSWER_LATER = 1,
    STREAM = 2,
    ANSWER_FROM_HEAD = 4,
    TIME_PASSES = 8,
    CLIENT_LEAVES = 16,
};

struct api {
    unsigned behaviour;
    struct exchange *open; /* the request in flight */
    uint64_t seen;         /* hash over all that reached the API */
    uint32_t n_heads, n_bodies, n_gone, n_answered;
};

static struct api fuzz_api;

static uint64_t mix(uint64_t h, const void *p, size_t n)
{
    const unsigned char *c = p;
    for (size_t i = 0; i < n; i++)
        h = (h ^ c[i]) * 0x100000001b3ull;
    return (h ^ n) * 0x100000001b3ull;
}

uint64_t api_max_body(const struct api *a)
{
    (void)a;
    return 5000;
}

size_t api_error_body(char *buf, size_t room, int http_status, const char *code,
                      const char *message)
{
    (void)message;
    CHECK(room >= 1024); /* as error_render wants it */
    return (size_t)snprintf(buf, room, "{\"%d\":\"%s\"}", http_status, code);
}

static void answer(struct api *a, struct exchange *x)
{
    struct reply r = {.status = 200, .content_type = "text/plain", .body = "fine", .len = 4};
    a->open = NULL;
    a->n_answered++;
    if (!(a->behaviour & STREAM)) {
        exchange_reply(x, &r);
        return;
    }
    exchange_stream_begin(x, NULL);
    for (int i = 0; i < 3; i++)
        CHECK(exchange_stream_write(x, "data: x\n\n", 9) == OK);
    exchange_stream_end(x, true);
}

enum head_verdict api_head(struct api *a, struct exchange *x, uint64_t declared)
{
    struct text_view path = exchange_path(x), query = exchange_query(x),
                     auth = exchange_header(x, "authorization");
    CHECK(a->open == NULL && path.len > 0 && path.p[0] == '/' && path.len <= HTTP_TARGET_MAX);
    CHECK(memchr(path.p, '\0', path.len) == NULL && strlen(exchange_request_id(x)) <= 64);
    a->n_heads++;
    a->seen = mix(a->seen, path.p, path.len);
    a->seen = mix(a->seen, query.p, query.len);
    a->seen = mix(a->seen, auth.p, auth.len);
    a->seen = mix(a->seen, &declared, sizeof declared);
    if (!(a->behaviour & ANSWER_FROM_HEAD)) {
        a->open = x;
        return HEAD_READ_BODY;
    }
    struct reply r = {.status = 404, .body = "no", .len = 2};
    exchange_reply(x, &r);
    return HEAD_ANSWERED;
}

void api_body(struct api *a, struct exchange *x)
{
    struct text_view body = exchange_body(x);
    CHECK(a->open == x && body.len <= 5000 && body.p[body.len] == '\0');
    a->n_bodies++;
    a->seen = mix(a->seen, body.p, body.len);
    if (!(a->behaviour & ANSWER_LATER))
        answer(a, x);
}

void api_gone(struct api *a, struct exchange *x)
{
    CHECK(a->open == x);
    a->open = NULL;
    a->n_gone++;
}

static bool awake;

static void wake(struct conn *c)
{
    (void)c;
    awake = true;
}

static void push(struct conn *c)
{
    (void)c;
}

static void not_random(uint8_t *p, size_t n)
{
    memset(p, 7, n);
}

struct outcome {
    uint64_t seen;
    uint32_t n_heads, n_bodies, n_statuses;
    int statuses[STATUSES_MAX];
    bool closed;
};

/* What net.c does between two polls. Statuses are read from what would be sent. */
static void turn(struct conn *c, struct outcome *o)
{
    static char text[1 << 20];
    do {
        awake = false;
        conn_resume(c);
        if (c->state == CONN_CALL && fuzz_api.open != NULL)
            answer(&fuzz_api, fuzz_api.open);
        conn_close_chunk(c);
        CHECK(c->out.len < sizeof text && c->pend.len <= 2 * (size_t)CONN_PENDING_MAX);
        if (c->out.len > 0)
            memcpy(text, c->out.p, c->out.len);
        text[c->out.len] = '\0';
        for (char *p = text; (p = strstr(p, "HTTP/1.1 ")) != NULL; p += 9)
            if (o->n_statuses < STATUSES_MAX)
                o->statuses[o->n_statuses++] = atoi(p + 9);
        conn_bytes_clear(&c->out);
        if (conn_wants_shutdown(c))
            conn_shut(c);
    } while (awake && c->state != CONN_CLOSED && c->state != CONN_LINGER);
}

static void drive(const uint8_t *data, size_t len, unsigned behaviour, uint32_t seed,
                  struct outcome *o)
{
    static struct conn c;
    static const char *const hosts[] = {"a"};
    struct conn_env env = {.api = &fuzz_api,
                           .rules = {.check_host = true, .hosts = hosts, .n_hosts = 1},
                           .limits = {10000000, 30000000, 60000000, 30000000, 8192, 1000, 262144},
                           .wake = wake,
                           .push = push,
                           .random = not_random};
    *o = (struct outcome){0};
    fuzz_api = (struct api){.behaviour = behaviour};
    conn_init(&c, &env);
    for (size_t at = 0; at < len && c.state != CONN_CLOSED;) {
        size_t room = conn_read_room(&c), n = seed == 0 ? len : 1 + seed % 13;
        if (room == 0)
            break;
        if (seed != 0)
            seed = seed * 1664525 + 1013904223;
        n = n < len - at ? n : len - at;
        n = n < room ? n : room;
        conn_input(&c, (const char *)data + at, n);
        at += n;
        if (behaviour & TIME_PASSES) {
            env.now_us += seed % 2000000;
            conn_tick(&c);
        }
        turn(&c, o);
    }
    o->seen = fuzz_api.seen;
    o->n_heads = fuzz_api.n_heads;
    o->n_bodies = fuzz_api.n_bodies;
    o->closed = c.state == CONN_CLOSED || c.state == CONN_LINGER;
    if (behaviour & CLIENT_LEAVES)
        conn_eof(&c);
    turn(&c, o);
    conn_lost(&c);
    CHECK(fuzz_api.open == NULL);
    conn_fini(&c);
}

static void compare(const struct outcome *a, const struct outcome *b)
{
    CHECK(a->seen == b->seen && a->n_heads == b->n_heads && a->n_bodies == b->n_bodies);
    CHECK(a->n_statuses == b->n_statuses && a->closed == b->closed);
    for (uint32_t i = 0; i < a->n_statuses; i++) {
        int x = a->statuses[i], y = b->statuses[i];
        /* Which limit a broken head meets first may depend on how far a read went. */
        CHECK(x == y || (x >= 400 && y >= 400 && i + 1 == a->n_statuses));
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len)
{
    static struct outcome whole, cut;
    if (len < 2)
        return 0;
    unsigned behaviour = data[0];
    drive(data + 2, len - 2, behaviour & ~(unsigned)TIME_PASSES, 0, &whole);
    drive(data + 2, len - 2, behaviour & ~(unsigned)TIME_PASSES, 1 + data[1], &cut);
    compare(&whole, &cut);
    if (behaviour & TIME_PASSES)
        drive(data + 2, len - 2, behaviour, 1 + data[1], &cut);
    for (uint32_t i = 0; i + 1 < whole.n_statuses; i++)
        CHECK(whole.statuses[i] < 400 || whole.statuses[i] == 404);
    return 0;
}
