/* See wire.h. The parser is llhttp's for responses; what it gives of the body goes through a line
 * splitter (server-sent events: WHATWG HTML 9.2.6, of which only `data` matters here). */
#include "api/load/wire.h"

#include <errno.h>
#include <llhttp.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

enum {
    READ_BYTES = 256 << 10,
    MAX_EVENT = 64 << 20, /* a line, or an event: a prompt's ids come back in one */
    MAX_TEXT = 300,       /* of a body that says what is wrong */
    CHECK_MS = 250,       /* how often a silence is looked at */
};

struct bytes {
    char *p;
    size_t len, room;
};

enum wire_state { SHUT, CONNECTING, IDLE, ASKING };

struct wire {
    uv_tcp_t tcp;
    uv_timer_t silence;
    uv_connect_t connect;
    uv_write_t write;
    const struct wire_target *target;
    struct wire_handler handler;
    enum wire_state state;
    bool asked;       /* wire_post was called and done was not */
    bool reused;      /* this request went out on a connection that had served another */
    bool answered;    /* a byte of the answer came */
    bool all;         /* the message is complete */
    bool seen_done;   /* [DONE] came */
    bool keeps;       /* the connection may serve another */
    bool is_stream;   /* Content-Type is text/event-stream */
    bool dead;        /* wire_destroy was called */
    bool reopen;      /* connect again once the handle is closed */
    bool lost;        /* the connection ended early; text says how */
    int n_handles;    /* not closed yet, of two */
    const char *body; /* of the request */
    size_t body_len;
    char head[1700];
    llhttp_t parser;
    uint64_t heard_us;
    bool in_type; /* the header field being read is Content-Type */
    struct bytes field, line, data;
    char text[MAX_TEXT + 64];
    size_t n_text;
};

static void add(struct bytes *b, const char *p, size_t len)
{
    if (b->len + len > b->room) {
        size_t room = b->room ? b->room : 512;
        while (room < b->len + len)
            room *= 2;
        b->p = mem_grow(b->p, b->room, room);
        b->room = room;
    }
    memcpy(b->p + b->len, p, len);
    b->len += len;
}

/* ---- address ---- */

struct pieces {
    char host[200], port[8], prefix[400];
};

static status cut_url(const char *url, struct pieces *out)
{
    if (strncmp(url, "http://", 7) != 0)
        return err(ERR_ARG, "%.100s: wanted is http://HOST[:PORT][/v1] (no TLS here)", url);
    const char *host = url + 7, *path = host + strcspn(host, "/");
    const char *end = path, *port = NULL;
    if (*host == '[') { /* IPv6 */
        const char *close = memchr(host, ']', (size_t)(path - host));
        if (close == NULL)
            return err(ERR_ARG, "%.100s: [ without ]", url);
        port = close[1] == ':' ? close + 2 : NULL;
        host++;
        end = close;
    } else if ((port = memchr(host, ':', (size_t)(path - host))) != NULL) {
        end = port++;
    }
    size_t n = (size_t)(end - host), n_port = port ? (size_t)(path - port) : 0;
    size_t n_path = strlen(path);
    while (n_path > 0 && path[n_path - 1] == '/')
        n_path--;
    if (n == 0 || n >= sizeof out->host || n_port >= sizeof out->port ||
        n_path >= sizeof out->prefix)
        return err(ERR_ARG, "%.100s: wanted is http://HOST[:PORT][/v1]", url);
    snprintf(out->host, sizeof out->host, "%.*s", (int)n, host);
    snprintf(out->port, sizeof out->port, "%.*s", n_port ? (int)n_port : 2, n_port ? port : "80");
    snprintf(out->prefix, sizeof out->prefix, "%.*s", n_path ? (int)n_path : 3,
             n_path ? path : "/v1");
    return OK;
}

/* The first address of the name that takes a connection. */
static status find_address(struct wire_target *t, const struct pieces *u)
{
    const struct addrinfo hints = {.ai_socktype = SOCK_STREAM};
    struct addrinfo *list, *at;
    int rc = getaddrinfo(u->host, u->port, &hints, &list), failed = 0;
    if (rc != 0)
        return err(ERR_IO, "%s: %s", u->host, gai_strerror(rc));
    for (at = list; at != NULL; at = at->ai_next) {
        int fd = socket(at->ai_family, at->ai_socktype | SOCK_CLOEXEC, at->ai_protocol);
        if (fd < 0)
            continue;
        rc = connect(fd, at->ai_addr, at->ai_addrlen);
        failed = rc == 0 ? failed : errno;
        close(fd);
        if (rc == 0)
            break;
    }
    if (at != NULL)
        memcpy(&t->address, at->ai_addr, at->ai_addrlen);
    freeaddrinfo(list);
    return at != NULL ? OK : err(ERR_IO, "%s:%s: %s", u->host, u->port, strerror(failed));
}

static bool is_plain(const char *s)
{
    for (; *s; s++)
        if (*s <= ' ' || *s == 127)
            return false;
    return true;
}

status wire_resolve(struct wire_target *t, const char *url, const char *endpoint, const char *key)
{
    struct pieces u;
    bool v6;
    TRY(cut_url(url, &u));
    if (!is_plain(url) || (key != NULL && (!is_plain(key) || strlen(key) >= sizeof t->key)))
        return err(ERR_ARG, "a URL and a key are of visible characters, and short");
    v6 = strchr(u.host, ':') != NULL;
    snprintf(t->host, sizeof t->host, "%s%s%s:%s", v6 ? "[" : "", u.host, v6 ? "]" : "", u.port);
    snprintf(t->path, sizeof t->path, "%s/%s", u.prefix, endpoint);
    snprintf(t->key, sizeof t->key, "%s", key ? key : "");
    return find_address(t, &u);
}

/* ---- the end of a request ---- */

static void try_again(struct wire *w);

static void finish(struct wire *w, enum wire_end end, const char *text)
{
    if (!w->asked)
        return;
    const struct wire_result r = {end, w->parser.status_code, text};
    w->asked = false;
    uv_timer_stop(&w->silence);
    if (!w->dead)
        w->handler.done(w->handler.arg, &r, clock_us());
}

/* What came, at the end of the message or of the connection. */
static void conclude(struct wire *w, const char *why_cut)
{
    int http = w->answered ? w->parser.status_code : 0;
    if (http != 0 && http != 200)
        finish(w, WIRE_STATUS, w->text);
    else if (w->all && !w->is_stream)
        finish(w, WIRE_MALFORMED, "the answer is no event stream");
    else if (w->all && w->seen_done)
        finish(w, WIRE_DONE, "");
    else
        finish(w, WIRE_CUT, w->all ? "the stream ended without [DONE]" : why_cut);
}

/* ---- server-sent events ---- */

static void end_event(struct wire *w)
{
    struct bytes *d = &w->data;
    if (d->len == 6 && memcmp(d->p, "[DONE]", 6) == 0)
        w->seen_done = true;
    else if (d->len > 0 && !w->dead)
        w->handler.event(w->handler.arg, d->p, d->len, w->heard_us);
    d->len = 0;
}

static void end_line(struct wire *w)
{
    const char *p = w->line.p;
    size_t n = w->line.len;
    w->line.len = 0;
    if (n > 0 && p[n - 1] == '\r')
        n--;
    if (n == 0) {
        end_event(w);
        return;
    }
    if (n < 5 || memcmp(p, "data:", 5) != 0)
        return; /* comments, and fields that say nothing to us */
    p += 5, n -= 5;
    if (n > 0 && *p == ' ')
        p++, n--;
    if (w->data.len > 0)
        add(&w->data, "\n", 1);
    add(&w->data, p, n);
}

static int on_body(llhttp_t *ll, const char *p, size_t len)
{
    struct wire *w = ll->data;
    if (ll->status_code != 200) {
        size_t room = MAX_TEXT - w->n_text, n = len < room ? len : room;
        memcpy(w->text + w->n_text, p, n);
        w->n_text += n;
        w->text[w->n_text] = '\0';
        return 0;
    }
    for (const char *end = p + len, *nl; p < end && w->is_stream; p = nl + 1) {
        nl = memchr(p, '\n', (size_t)(end - p));
        if (w->line.len + w->data.len + (size_t)(end - p) > MAX_EVENT)
            return -1;
        add(&w->line, p, nl != NULL ? (size_t)(nl - p) : (size_t)(end - p));
        if (nl == NULL)
            break;
        end_line(w);
    }
    return 0;
}

/* ---- HTTP ---- */

static int on_field(llhttp_t *ll, const char *p, size_t len)
{
    struct wire *w = ll->data;
    if (w->field.len + len < 64)
        add(&w->field, p, len);
    return 0;
}

static int on_field_end(llhttp_t *ll)
{
    struct wire *w = ll->data;
    w->in_type = w->field.len == 12 && strncasecmp(w->field.p, "content-type", 12) == 0;
    w->field.len = 0;
    return 0;
}

static int on_value_end(llhttp_t *ll)
{
    struct wire *w = ll->data;
    if (w->in_type)
        w->is_stream = w->field.len >= 17 && strncasecmp(w->field.p, "text/event-stream", 17) == 0;
    w->field.len = 0;
    return 0;
}

static int on_complete(llhttp_t *ll)
{
    struct wire *w = ll->data;
    w->all = true;
    w->keeps = llhttp_should_keep_alive(ll) != 0;
    return HPE_PAUSED;
}

static const llhttp_settings_t *settings(void)
{
    static llhttp_settings_t s;
    if (s.on_body == NULL) {
        llhttp_settings_init(&s);
        s.on_header_field = on_field;
        s.on_header_field_complete = on_field_end;
        s.on_header_value = on_field;
        s.on_header_value_complete = on_value_end;
        s.on_message_complete = on_complete;
        s.on_body = on_body;
    }
    return &s;
}

/* ---- the connection ---- */

static void on_closed(uv_handle_t *h)
{
    struct wire *w = h->data;
    w->n_handles--;
    if (!w->dead) {
        if (w->reopen)
            try_again(w);
        return;
    }
    if (w->n_handles > 0)
        return;
    mem_free(w->field.p);
    mem_free(w->line.p);
    mem_free(w->data.p);
    mem_free(w);
}

static void shut(struct wire *w)
{
    if (w->state != SHUT)
        uv_close((uv_handle_t *)&w->tcp, on_closed);
    w->state = SHUT;
}

static void give_room(uv_handle_t *h, size_t wanted, uv_buf_t *out)
{
    static char room[READ_BYTES]; /* one loop, and every read is used up at once */
    (void)h, (void)wanted;
    *out = uv_buf_init(room, sizeof room);
}

static void lose(struct wire *w, const char *why)
{
    bool stale = w->asked && w->reused && !w->answered;
    w->reopen = stale;
    shut(w);
    if (stale || !w->asked)
        return;
    if (w->answered)
        (void)llhttp_finish(&w->parser); /* a body without a length ends here */
    conclude(w, why);
}

static void on_read(uv_stream_t *s, ssize_t n, const uv_buf_t *buf)
{
    struct wire *w = s->data;
    char why[96];
    if (n == 0)
        return;
    if (n < 0) {
        snprintf(why, sizeof why, "the connection ended early (%s)", uv_strerror((int)n));
        lose(w, why);
        return;
    }
    if (!w->asked) { /* bytes that nobody asked for */
        shut(w);
        return;
    }
    w->heard_us = clock_us();
    w->answered = true;
    llhttp_errno_t rc = llhttp_execute(&w->parser, buf->base, (size_t)n);
    if (w->all) {
        if (!w->keeps)
            shut(w);
        else
            w->state = IDLE;
        conclude(w, "");
    } else if (rc != HPE_OK) {
        shut(w);
        finish(w, WIRE_MALFORMED, "what came is no HTTP answer");
    }
}

static void on_written(uv_write_t *req, int rc)
{
    struct wire *w = req->data;
    if (rc < 0 && rc != UV_ECANCELED && w->state == ASKING)
        lose(w, uv_strerror(rc));
}

static void send_request(struct wire *w)
{
    uv_buf_t parts[2] = {uv_buf_init(w->head, (unsigned)strlen(w->head)),
                         uv_buf_init((char *)(uintptr_t)w->body, (unsigned)w->body_len)};
    llhttp_init(&w->parser, HTTP_RESPONSE, settings());
    w->parser.data = w;
    w->answered = w->all = w->seen_done = w->is_stream = w->keeps = false;
    w->line.len = w->data.len = w->field.len = w->n_text = 0;
    w->text[0] = '\0';
    w->heard_us = clock_us();
    w->state = ASKING;
    w->write.data = w;
    int rc = uv_write(&w->write, (uv_stream_t *)&w->tcp, parts, 2, on_written);
    if (rc < 0)
        lose(w, uv_strerror(rc));
}

static void on_connected(uv_connect_t *req, int rc)
{
    struct wire *w = req->data;
    if (rc == UV_ECANCELED || w->dead)
        return;
    if (rc == 0)
        rc = uv_read_start((uv_stream_t *)&w->tcp, give_room, on_read);
    if (rc < 0) {
        shut(w);
        finish(w, WIRE_CONNECT, uv_strerror(rc));
        return;
    }
    uv_tcp_nodelay(&w->tcp, 1);
    send_request(w);
}

/* On a connection of its own. */
static void try_again(struct wire *w)
{
    w->reopen = w->reused = false;
    CHECK(uv_tcp_init(w->silence.loop, &w->tcp) == 0);
    w->n_handles++;
    w->tcp.data = w->connect.data = w;
    w->state = CONNECTING;
    int rc = uv_tcp_connect(&w->connect, &w->tcp, (const struct sockaddr *)&w->target->address,
                            on_connected);
    if (rc < 0) {
        shut(w);
        finish(w, WIRE_CONNECT, uv_strerror(rc));
    }
}

static void on_silence(uv_timer_t *timer)
{
    struct wire *w = timer->data;
    char why[64];
    if (!w->asked || clock_us() - w->heard_us < (uint64_t)w->target->timeout_s * 1000000)
        return;
    shut(w);
    snprintf(why, sizeof why, "nothing came for %u s", w->target->timeout_s);
    finish(w, WIRE_TIMEOUT, why);
}

struct wire *wire_create(uv_loop_t *loop, const struct wire_target *t, const struct wire_handler *h)
{
    struct wire *w = mem_alloc(sizeof *w);
    w->target = t;
    w->handler = *h;
    CHECK(uv_timer_init(loop, &w->silence) == 0);
    w->silence.data = w;
    w->n_handles = 1;
    return w;
}

void wire_post(struct wire *w, const char *body, size_t len)
{
    const struct wire_target *t = w->target;
    CHECK(!w->asked);
    snprintf(w->head, sizeof w->head,
             "POST %s HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\n"
             "Accept: text/event-stream\r\n%s%s%sContent-Length: %zu\r\n\r\n",
             t->path, t->host, t->key[0] ? "Authorization: Bearer " : "", t->key,
             t->key[0] ? "\r\n" : "", len);
    w->body = body;
    w->body_len = len;
    w->asked = true;
    w->parser.status_code = 0;
    w->heard_us = clock_us();
    uv_timer_start(&w->silence, on_silence, CHECK_MS, CHECK_MS);
    if (w->state == IDLE) {
        w->reused = true;
        send_request(w);
    } else if (w->n_handles > 1) {
        w->reopen = true; /* the old handle is on its way out */
    } else {
        try_again(w);
    }
}

void wire_destroy(struct wire *w)
{
    w->dead = true;
    w->asked = false;
    shut(w);
    uv_close((uv_handle_t *)&w->silence, on_closed);
}
