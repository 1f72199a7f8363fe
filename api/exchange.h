/* One HTTP request and its answer, as the API sees it. server/ implements it over libuv and llhttp;
 * api/ never sees a socket. Everything here runs on the loop thread.
 *
 * Life: api_head (headers are there, body not yet) -> api_body (whole body) -> exchange_reply or
 * exchange_stream_* -> done. If the client leaves first, api_gone is called once and the exchange
 * must not be used again. After reply or stream_end it must not be used again either. */
#ifndef API_EXCHANGE_H
#define API_EXCHANGE_H

#include "engine/text/tokenizer.h" /* text_view */
#include "kernels/base.h"

struct exchange;

enum http_method { HTTP_M_GET, HTTP_M_POST, HTTP_M_HEAD, HTTP_M_OPTIONS, HTTP_M_OTHER };

enum http_method exchange_method(const struct exchange *x);
struct text_view exchange_path(const struct exchange *x);  /* percent-decoded, without the query */
struct text_view exchange_query(const struct exchange *x); /* raw */
/* First header of that name (lower case), surrounding blanks cut; p == NULL: absent. */
struct text_view exchange_header(const struct exchange *x, const char *lower_name);
struct text_view exchange_body(
    const struct exchange *x); /* in api_body only; NUL-terminated beyond len */
uint64_t exchange_arrival_us(const struct exchange *x); /* clock_us() at the request's first byte */
const char *exchange_request_id(
    const struct exchange *x); /* the client's if it is clean, else ours */

/* The API's own pointer for this exchange; NULL at first. */
void exchange_set_user(struct exchange *x, void *user);
void *exchange_user(const struct exchange *x);

/* Who asks, as api_head found out; zeros before that, and without tenants. */
enum { CALLER_WORD_BYTES = 33, CALLER_LINES_BYTES = 400 };
struct caller {
    uint32_t tenant; /* its number: api/roster.h */
    uint64_t life;   /* of that number */
    bool counted;    /* as a request of this minute */
    char tenant_name[CALLER_WORD_BYTES], key_id[CALLER_WORD_BYTES];
    char lines[CALLER_LINES_BYTES]; /* of the head of any answer, each "Name: value\r\n" */
};
struct caller *exchange_caller(struct exchange *x);

/* A whole answer. extra: further header lines, each "Name: value\r\n", or NULL. Content-Length, Date,
 * X-Request-Id and Connection are added. The body is copied. close: end the connection after it. */
struct reply {
    int status;
    const char *content_type; /* NULL: none */
    const char *extra;
    const char *body;
    size_t len;
    bool close;
};
void exchange_reply(struct exchange *x, const struct reply *r);

/* A streamed answer (server-sent events). Pieces written between two returns to the loop leave in
 * one write. stream_write copies; ERR_FULL: the hard limit of unsent bytes was passed before: the
 * exchange is being cut and api_gone will come. Whoever writes when there is room for it, and waits
 * for api_writable when there is none, never sees that. */
void exchange_stream_begin(struct exchange *x, const char *extra);
status exchange_stream_write(struct exchange *x, const char *p, size_t len);
size_t exchange_stream_unsent(const struct exchange *x); /* bytes the client has not taken */
/* A whole answer whose length is not known: chunks, with stream_write and stream_end as above. */
void exchange_chunks_begin(struct exchange *x, const char *content_type);
/* clean: false leaves out the terminating chunk and closes. */
void exchange_stream_end(struct exchange *x, bool clean);

/* Runs work(arg) on a helper thread, then done(arg) on the loop. The exchange may be gone by then:
 * arg must know. ERR_FULL: too many queued. */
status exchange_work(void (*work)(void *arg), void (*done)(void *arg), void *arg);

/* What the API tells the server about a request whose headers are there. */
enum head_verdict {
    HEAD_READ_BODY, /* go on; api_body will be called */
    HEAD_ANSWERED,  /* the API has replied; discard the body */
};

#endif
