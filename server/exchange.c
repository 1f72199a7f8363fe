/* api/exchange.h over a struct conn. Nothing here calls the API or frees anything the API can see:
 * bytes are gathered in c->out and leave when the loop gets control back. */
#include "api/exchange.h"

#include <stdio.h>
#include <string.h>

#include "server/conn.h"

enum http_method exchange_method(const struct exchange *x)
{
    switch (conn_of((struct exchange *)x)->parse.ll.method) {
    case HTTP_GET: return HTTP_M_GET;
    case HTTP_POST: return HTTP_M_POST;
    case HTTP_HEAD: return HTTP_M_HEAD;
    case HTTP_OPTIONS: return HTTP_M_OPTIONS;
    default: return HTTP_M_OTHER;
    }
}

struct text_view exchange_path(const struct exchange *x)
{
    return x->path;
}

struct text_view exchange_query(const struct exchange *x)
{
    return x->query;
}

struct text_view exchange_header(const struct exchange *x, const char *lower_name)
{
    return http_parse_field(&conn_of((struct exchange *)x)->parse, lower_name);
}

struct text_view exchange_body(const struct exchange *x)
{
    const struct http_parse *p = &conn_of((struct exchange *)x)->parse;
    if (p->body == NULL)
        return (struct text_view){"", 0};
    return (struct text_view){p->body, (size_t)p->body_bytes};
}

uint64_t exchange_arrival_us(const struct exchange *x)
{
    return x->arrival_us;
}

const char *exchange_request_id(const struct exchange *x)
{
    return x->id;
}

void exchange_set_user(struct exchange *x, void *user)
{
    x->user = user;
}

void *exchange_user(const struct exchange *x)
{
    return x->user;
}

struct caller *exchange_caller(struct exchange *x)
{
    return &x->caller;
}

static void put(struct conn *c, const char *s)
{
    conn_put(c, s, strlen(s));
}

/* Status line and the headers that every answer has. */
static void put_head(struct conn *c, int code, const char *content_type, const char *extra,
                     bool close)
{
    char line[160];
    uint8_t r[16];
    if (c->x.id[0] == '\0') { /* refused before it had a name */
        c->env->random(r, sizeof r);
        http_text_make_id(c->x.id, r);
    }
    snprintf(line, sizeof line, "HTTP/1.1 %d %s\r\n", code, http_text_reason(code));
    put(c, line);
    if (content_type != NULL) {
        put(c, "Content-Type: ");
        put(c, content_type);
        put(c, "\r\n");
    }
    snprintf(line, sizeof line, "Date: %s\r\nX-Request-Id: %s\r\n", c->env->date, c->x.id);
    put(c, line);
    if (close)
        put(c, "Connection: close\r\n");
    else if (http_parse_is_1_0(&c->parse))
        put(c, "Connection: keep-alive\r\n");
    if (c->x.origin.p != NULL) {
        put(c, "Access-Control-Allow-Origin: ");
        conn_put(c, c->x.origin.p, c->x.origin.len);
        put(c, "\r\nAccess-Control-Expose-Headers: X-Request-Id, Retry-After\r\nVary: Origin\r\n");
    }
    put(c, c->x.caller.lines);
    if (extra != NULL)
        put(c, extra);
}

void conn_reply(struct conn *c, const struct reply *r)
{
    CHECK(!c->answered && !c->streaming);
    bool close = r->close || conn_must_close(c);
    bool bodyless = r->status == 204 || r->status == 304;
    char line[48];
    put_head(c, r->status, r->content_type, r->extra, close);
    if (!bodyless) {
        snprintf(line, sizeof line, "Content-Length: %zu\r\n", r->len);
        put(c, line);
    }
    put(c, "\r\n");
    if (!bodyless && r->len > 0 && !(c->parse.head_done && c->parse.ll.method == HTTP_HEAD))
        conn_put(c, r->body, r->len);
    conn_answered(c, close);
}

void exchange_reply(struct exchange *x, const struct reply *r)
{
    conn_reply(conn_of(x), r);
}

static void begin_chunks(struct conn *c, const char *content_type, const char *extra)
{
    CHECK(!c->answered && !c->streaming && c->state == CONN_CALL);
    c->chunked = !http_parse_is_1_0(&c->parse);
    /* Without chunks only the end of the connection can mark the end of the stream. */
    c->close_after = c->close_after || !c->chunked || conn_must_close(c);
    put_head(c, 200, content_type, extra, c->close_after);
    put(c, c->chunked ? "Transfer-Encoding: chunked\r\n\r\n" : "\r\n");
    c->streaming = true;
}

void exchange_stream_begin(struct exchange *x, const char *extra)
{
    static const char fresh[] = "Cache-Control: no-cache\r\nX-Accel-Buffering: no\r\n";
    char lines[512];
    int n = snprintf(lines, sizeof lines, "%s%s", extra == NULL ? "" : extra, fresh);
    CHECK((size_t)n < sizeof lines); /* our own static text */
    begin_chunks(conn_of(x), "text/event-stream; charset=utf-8", lines);
}

void exchange_chunks_begin(struct exchange *x, const char *content_type)
{
    begin_chunks(conn_of(x), content_type, NULL);
}

/* Into the open chunk, which never outgrows its five digits. */
static bool put_chunked(struct conn *c, const char *p, size_t len)
{
    enum { CHUNK_MAX = 256 * 1024 };
    while (len > 0) {
        if (c->chunked && c->chunk_at != SIZE_MAX && c->out.len - c->chunk_at > CHUNK_MAX)
            conn_close_chunk(c);
        if (c->chunked && c->chunk_at == SIZE_MAX) {
            size_t at = c->out.len;
            if (!conn_put(c, "00000\r\n", 7))
                return false;
            c->chunk_at = at;
        }
        size_t n = len < CHUNK_MAX ? len : CHUNK_MAX;
        if (!conn_put(c, p, n))
            return false;
        p += n;
        len -= n;
    }
    return true;
}

/* The hot path: per token one bounds check and one copy. */
status exchange_stream_write(struct exchange *x, const char *p, size_t len)
{
    struct conn *c = conn_of(x);
    CHECK(c->streaming && !c->answered);
    if (c->broken)
        return err(ERR_FULL, "the client is gone");
    if (c->out.len >= CONN_PUSH_BYTES)
        c->env->push(c);
    /* One long piece (a prompt's ids, given back) is no sign of a slow client: it is looked at before the piece, and
     * what comes behind it does not count it either. */
    const size_t most = c->env->limits.stream_hard_bytes, unsent = conn_unsent(c);
    if (unsent == 0)
        c->long_bytes = 0;
    if (unsent >= most + c->long_bytes) {
        c->broken = true;
        c->env->wake(c);
        return err(ERR_FULL, "the client does not read: %zu bytes unsent", unsent);
    }
    if (len > most)
        c->long_bytes += len;
    return put_chunked(c, p, len) ? OK : err(ERR_FULL, "no memory for the stream");
}

size_t exchange_stream_unsent(const struct exchange *x)
{
    return conn_unsent(conn_of((struct exchange *)x));
}

void exchange_stream_end(struct exchange *x, bool clean)
{
    struct conn *c = conn_of(x);
    CHECK(c->streaming && !c->answered);
    conn_close_chunk(c);
    if (clean && c->chunked)
        put(c, "0\r\n\r\n");
    conn_answered(c, c->close_after || !clean);
}
