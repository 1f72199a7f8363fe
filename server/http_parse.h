/* Bytes -> one HTTP request at a time: the glue around llhttp, without sockets.
 *
 * llhttp 9 is strict about framing and has no size limit at all, and lets several things pass that
 * a daemon must decide (reliability.md 0.3). So this file counts what llhttp does not count: bytes
 * of line and headers, fields, the target, chunk extensions, chunks, the body. What it cannot judge
 * from bytes alone (Host, Origin, ...) is in rules.c. No lenient setter is called, ever.
 *
 * The verdict never depends on how the bytes were cut into reads: every counter is compared at a
 * point of the stream, not at the end of a read. */
#ifndef SERVER_HTTP_PARSE_H
#define SERVER_HTTP_PARSE_H

#include <llhttp.h>

#include "api/exchange.h" /* text_view */
#include "kernels/base.h"

_Static_assert(LLHTTP_VERSION_MAJOR >= 9, "older ones allow request smuggling");

enum {
    HTTP_HEAD_MAX = 16 * 1024, /* request line and headers, with their line ends */
    HTTP_FIELDS_MAX = 64,
    HTTP_TARGET_MAX = 2 * 1024,
    HTTP_EXTENSION_MAX = 256,  /* chunk extensions of a whole message */
    HTTP_CHUNK_FREE = 256,     /* chunks before the mean size counts: 4 KiB at the least mean */
    HTTP_CHUNK_MEAN_MIN = 16,  /* bytes of data per chunk */
    HTTP_BODY_STEP = 64 * 1024 /* first allocation for a body; doubles */
};

struct http_field {
    uint16_t name, name_len; /* offsets into text; the name is lower-cased */
    uint16_t value, value_len;
};

/* Why a request is refused: ready to be rendered by api_error_body. Static strings. */
struct http_refusal {
    int status; /* 0: not refused */
    const char *code, *message;
};

enum http_result {
    HTTP_MORE,     /* all bytes used, nothing complete */
    HTTP_GOT_HEAD, /* headers are there: decide, set the body's fate, feed on (even with 0 bytes) */
    HTTP_GOT_ALL,  /* the message is complete: http_parse_next before the next one */
    HTTP_BAD,      /* refused: see `bad`; never feed again */
};

struct http_parse {
    llhttp_t ll;
    bool head_done, message_done, started; /* started: a byte of this request has come */
    uint8_t leading;                       /* bytes of a tolerated CRLF before the request */
    uint16_t n_fields, text_len;
    uint16_t target_len;
    uint32_t head_bytes, extension_bytes;
    struct http_field fields[HTTP_FIELDS_MAX];
    struct http_refusal bad;

    bool keep_body;      /* false: count and drop */
    uint64_t body_limit; /* data bytes; more: 413 */
    uint64_t body_bytes; /* data bytes so far */
    uint32_t n_chunks;
    char *body; /* [body_bytes] if kept, NUL-terminated; NULL: nothing yet */
    size_t body_room;

    /* Target at 0, then names and values, each with a NUL: never more than the raw bytes were. */
    char text[HTTP_HEAD_MAX + 8];
};

void http_parse_init(struct http_parse *p);
void http_parse_next(struct http_parse *p); /* forgets the request, frees its body */
void http_parse_drop_body(struct http_parse *p);
void http_parse_fini(struct http_parse *p);

/* Takes bytes until something is complete; *used says how many. */
enum http_result http_parse_feed(struct http_parse *p, const char *data, size_t len, size_t *used);

/* Valid from HTTP_GOT_HEAD on. */
uint64_t http_parse_declared(const struct http_parse *p); /* UINT64_MAX: chunked; 0: no body */
bool http_parse_is_1_0(const struct http_parse *p);
bool http_parse_keep_alive(const struct http_parse *p);
struct text_view http_parse_field(const struct http_parse *p, const char *lower_name);
uint32_t http_parse_count(const struct http_parse *p, const char *lower_name);

#endif
