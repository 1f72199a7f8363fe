/* The limits of one connection, with the shipped defaults and a clock of our own: at each limit all
 * is well, one microsecond or one byte beyond it is not. tests/e2e/server_limits.py sees the same
 * through sockets, where edges are blurred. */
#include "server/config.h"
#include "tests/tap.h"

enum { SECOND = 1000000 };

struct api {
    struct exchange *open; /* the request that waits for its answer */
    uint32_t n_gone;
    bool refuses; /* from the head, before the body */
};

static struct api api;
static struct config cfg;
static struct conn_env env;

uint64_t api_max_body(const struct api *a)
{
    (void)a;
    return 4 << 20;
}

size_t api_error_body(char *buf, size_t room, int http_status, const char *code,
                      const char *message)
{
    (void)message;
    CHECK(room >= 1024); /* as error_render wants it */
    return (size_t)snprintf(buf, room, "{\"%d\":\"%s\"}", http_status, code);
}

enum head_verdict api_head(struct api *a, struct exchange *x, uint64_t declared_len)
{
    (void)declared_len;
    if (!a->refuses)
        return HEAD_READ_BODY;
    exchange_reply(x, &(struct reply){.status = 404, .body = ""});
    return HEAD_ANSWERED;
}

void api_body(struct api *a, struct exchange *x)
{
    a->open = x;
}

void api_gone(struct api *a, struct exchange *x)
{
    (void)x;
    a->open = NULL;
    a->n_gone++;
}

static void nothing(struct conn *c)
{
    (void)c;
}

static void not_random(uint8_t *p, size_t n)
{
    memset(p, 7, n);
}

static struct conn *open_conn(void)
{
    struct conn *c = mem_alloc(sizeof *c);
    api = (struct api){0};
    conn_init(c, &env);
    return c;
}

static void close_conn(struct conn *c)
{
    conn_lost(c);
    conn_fini(c);
    mem_free(c);
}

static void feed(struct conn *c, const char *text)
{
    conn_input(c, text, strlen(text));
}

/* The socket takes everything; what it was. */
static const char *taken(struct conn *c)
{
    static char text[64 * 1024];
    conn_resume(c);
    conn_close_chunk(c);
    CHECK(c->out.len < sizeof text);
    memcpy(text, c->out.p == NULL ? "" : c->out.p, c->out.len);
    text[c->out.len] = '\0';
    conn_bytes_clear(&c->out);
    c->progress_us = env.now_us;
    return text;
}

static void answer(void)
{
    struct exchange *x = api.open;
    api.open = NULL;
    exchange_reply(x, &(struct reply){.status = 200, .body = "fine", .len = 4});
}

static bool open_after(struct conn *c, uint64_t us)
{
    env.now_us += us;
    conn_tick(c);
    return c->state != CONN_CLOSED && c->state != CONN_LINGER;
}

#define GET  "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
#define POST "POST / HTTP/1.1\r\nHost: localhost\r\n"

static void a_head_has_10_s(void)
{
    struct conn *c = open_conn();
    ok(open_after(c, 10 * SECOND), "a connection may say nothing for 10 s");
    ok(!open_after(c, 1) && taken(c)[0] == '\0', "then it is closed without a word");
    close_conn(c);
    c = open_conn();
    feed(c, "GET / HT");
    ok(open_after(c, 10 * SECOND), "half a head may be 10 s old");
    ok(!open_after(c, 1) && strncmp(taken(c), "HTTP/1.1 408 ", 13) == 0, "not older: 408");
    close_conn(c);
}

static void a_body_has_30_s_and_a_least_rate(void)
{
    static char bytes[200 * 1024];
    struct conn *c = open_conn();
    memset(bytes, 'x', sizeof bytes);
    feed(c, POST "Content-Length: 300000\r\n\r\n");
    ok(open_after(c, 5 * SECOND), "a body may be silent for 5 s");
    conn_input(c, bytes, 8);
    ok(open_after(c, 1000), "from then on 8,192 bytes a second are enough");
    ok(!open_after(c, 1000) && strncmp(taken(c), "HTTP/1.1 408 ", 13) == 0, "less is a 408");
    close_conn(c);
    c = open_conn();
    feed(c, POST "Content-Length: 300000\r\n\r\n");
    conn_input(c, bytes, 25 * 8192 - 1);
    ok(!open_after(c, 30 * SECOND), "25 s at that rate, less a byte, are too few after 30 s");
    close_conn(c);
    c = open_conn();
    feed(c, POST "Content-Length: 300000\r\n\r\n");
    conn_input(c, bytes, 25 * 8192);
    ok(open_after(c, 30 * SECOND), "with that byte a body may take 30 s");
    conn_input(c, bytes, 90000);
    ok(!open_after(c, 1) && strncmp(taken(c), "HTTP/1.1 408 ", 13) == 0,
       "but no longer, however fast it comes");
    close_conn(c);
}

static void between_requests_are_60_s(void)
{
    struct conn *c = open_conn();
    feed(c, GET);
    ok(open_after(c, 3600ull * SECOND), "the engine may take its time");
    answer();
    taken(c);
    ok(open_after(c, 60 * SECOND), "a connection may be idle for 60 s");
    ok(!open_after(c, 1) && c->state == CONN_CLOSED, "not longer");
    close_conn(c);
    c = open_conn();
    feed(c, GET);
    answer();
    taken(c);
    open_after(c, 59 * SECOND);
    feed(c, "GET /");
    ok(open_after(c, 10 * SECOND), "its next head has 10 s from its first byte");
    ok(!open_after(c, 1), "not more");
    close_conn(c);
}

static void a_connection_serves_1000_requests(void)
{
    struct conn *c = open_conn();
    uint32_t n_kept = 0;
    for (int i = 0; i < 999; i++) {
        feed(c, GET);
        answer();
        n_kept += strstr(taken(c), "Connection: close") == NULL && c->state == CONN_HEAD;
    }
    is_int(n_kept, 999, "999 requests keep their connection");
    feed(c, GET);
    answer();
    const char *last = taken(c);
    ok(strncmp(last, "HTTP/1.1 200 ", 13) == 0 && strstr(last, "Connection: close") != NULL,
       "the 1000th is answered and is the last");
    ok(c->state == CONN_LINGER && conn_wants_shutdown(c), "then the server hangs up");
    close_conn(c);
}

static void a_reader_may_stall_for_30_s(void)
{
    struct conn *c = open_conn();
    feed(c, GET);
    exchange_stream_begin(api.open, NULL);
    ok(exchange_stream_write(api.open, "data: x\n\n", 9) == OK, "a stream has begun");
    ok(open_after(c, 30 * SECOND) && api.n_gone == 0, "nobody need take a byte for 30 s");
    conn_tick(c);
    c->progress_us = env.now_us; /* the socket took one */
    ok(open_after(c, 30 * SECOND) && api.n_gone == 0, "one byte, and there are 30 s more");
    ok(!open_after(c, 1) && api.n_gone == 1, "not more: the API hears that the client is gone");
    close_conn(c);
}

static void a_stream_keeps_256_kib(void)
{
    static char bytes[256 * 1024];
    const size_t most = sizeof bytes;
    memset(bytes, 'x', most);
    struct conn *c = open_conn();
    feed(c, GET);
    exchange_stream_begin(api.open, NULL);
    c->in_flight = 100 * 1024; /* what the socket's queue holds counts, too */
    /* The first write also opens a chunk, whose size line comes on top. */
    ok(exchange_stream_write(api.open, bytes, 1) == OK, "a stream whose reader is slow goes on");
    size_t room = most - exchange_stream_unsent(api.open);
    ok(exchange_stream_write(api.open, bytes, room) == OK &&
           exchange_stream_unsent(api.open) == most && !c->broken,
       "until 256 KiB are unsent");
    ok(exchange_stream_write(api.open, bytes, 1) == ERR_FULL && c->broken,
       "one byte more is refused");
    is_int(exchange_stream_unsent(api.open), most, "and not kept");
    ok(exchange_stream_write(api.open, bytes, 0) == ERR_FULL, "nor is anything after it");
    c->in_flight = 0;
    conn_resume(c);
    ok(c->state == CONN_CLOSED && api.n_gone == 1, "the connection is closed, the API hears it");
    close_conn(c);
}

static void what_nobody_asked_for_is_bounded(void)
{
    static char bytes[64 * 1024];
    struct conn *c = open_conn();
    memset(bytes, 'x', sizeof bytes);
    feed(c, GET);
    conn_input(c, bytes, 16 * 1024 - 1);
    is_int(conn_read_room(c), 1, "behind a request 16 KiB are kept");
    conn_input(c, bytes, 1);
    is_int(conn_read_room(c), 0, "then reading stops");
    close_conn(c);
    for (int over = 0; over < 2; over++) {
        char head[128];
        c = open_conn();
        api.refuses = true;
        snprintf(head, sizeof head, POST "Content-Length: %d\r\n\r\n", 64 * 1024 + over);
        feed(c, head);
        bool kept = strstr(taken(c), "Connection: close") == NULL;
        ok(kept == (over == 0), over ? "for a larger one it is not"
                                     : "for an unwanted body of 64 KiB a connection is kept");
        if (!over) {
            conn_input(c, bytes, 64 * 1024);
            ok(c->state == CONN_HEAD, "and serves the next request");
        }
        close_conn(c);
    }
    c = open_conn();
    feed(c, "rubbish\r\n\r\n");
    taken(c);
    conn_shut(c);
    env.now_us += SECOND;
    conn_tick(c);
    ok(c->state == CONN_LINGER, "after a refusal the client has 1 s to hang up");
    env.now_us += 1;
    conn_tick(c);
    ok(c->state == CONN_CLOSED, "not more");
    close_conn(c);
}

static char *no_env(const char *name)
{
    (void)name;
    return NULL;
}

int main(void)
{
    CHECK(config_load(&cfg, 0, NULL, no_env) == OK);
    env = (struct conn_env){.api = &api,
                            .limits = cfg.limits,
                            .now_us = 1000ull * SECOND,
                            .wake = nothing,
                            .push = nothing,
                            .random = not_random};
    a_head_has_10_s();
    a_body_has_30_s_and_a_least_rate();
    between_requests_are_60_s();
    a_connection_serves_1000_requests();
    a_reader_may_stall_for_30_s();
    a_stream_keeps_256_kib();
    what_nobody_asked_for_is_bounded();
    config_fini(&cfg);
    return tap_done();
}
