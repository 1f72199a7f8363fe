/* See http_parse.h. llhttp is paused twice per request: when the headers are complete, so that the
 * daemon can answer 401 or 413 before it reads a byte of the body, and when the message is complete,
 * so that a pipelined second request waits its turn. */
#include "server/http_parse.h"

#include <string.h>

static int refuse(struct http_parse *p, int http_status, const char *code, const char *message)
{
    p->bad = (struct http_refusal){http_status, code, message};
    return HPE_USER;
}

static int head_too_large(struct http_parse *p)
{
    return refuse(p, 431, "headers_too_large",
                  "Request line and headers are limited to 16384 bytes and 64 fields");
}

static int keep_text(struct http_parse *p, const char *at, size_t len)
{
    if (len > sizeof p->text - 1 - p->text_len) /* cannot be: head_bytes is counted first */
        return head_too_large(p);
    memcpy(p->text + p->text_len, at, len);
    p->text_len = (uint16_t)(p->text_len + len);
    return 0;
}

static int end_text(struct http_parse *p)
{
    if (p->text_len >= sizeof p->text)
        return head_too_large(p);
    p->text[p->text_len++] = '\0';
    return 0;
}

static int on_url(llhttp_t *ll, const char *at, size_t len)
{
    struct http_parse *p = ll->data;
    if (len > (size_t)(HTTP_TARGET_MAX - p->target_len))
        return refuse(p, 414, "uri_too_long", "The request target is limited to 2048 bytes");
    p->target_len = (uint16_t)(p->target_len + len);
    return keep_text(p, at, len);
}

static int on_url_complete(llhttp_t *ll)
{
    return end_text(ll->data);
}

static int on_field(llhttp_t *ll, const char *at, size_t len)
{
    struct http_parse *p = ll->data;
    if (p->head_done) /* after the last chunk: authentication has already run without it */
        return refuse(p, 400, "bad_request", "Trailer fields are not accepted");
    if (p->n_fields == HTTP_FIELDS_MAX)
        return head_too_large(p);
    struct http_field *f = &p->fields[p->n_fields];
    if (f->name_len == 0)
        f->name = p->text_len;
    f->name_len = (uint16_t)(f->name_len + len);
    return keep_text(p, at, len);
}

static int on_field_complete(llhttp_t *ll)
{
    struct http_parse *p = ll->data;
    if (p->n_fields == HTTP_FIELDS_MAX)
        return head_too_large(p);
    struct http_field *f = &p->fields[p->n_fields];
    for (char *c = p->text + f->name; c < p->text + f->name + f->name_len; c++)
        if (*c >= 'A' && *c <= 'Z')
            *c = (char)(*c - 'A' + 'a');
    int rc = end_text(p);
    f->value = p->text_len;
    return rc;
}

static int on_value(llhttp_t *ll, const char *at, size_t len)
{
    struct http_parse *p = ll->data;
    if (p->n_fields == HTTP_FIELDS_MAX)
        return head_too_large(p);
    for (size_t i = 0; i < len; i++)
        if ((unsigned char)at[i] >= 0x80)
            return refuse(p, 400, "bad_request", "Header values must be ASCII");
    p->fields[p->n_fields].value_len = (uint16_t)(p->fields[p->n_fields].value_len + len);
    return keep_text(p, at, len);
}

static int on_value_complete(llhttp_t *ll)
{
    struct http_parse *p = ll->data;
    if (p->n_fields == HTTP_FIELDS_MAX)
        return head_too_large(p);
    struct http_field *f = &p->fields[p->n_fields++];
    while (f->value_len > 0 && strchr(" \t", p->text[f->value + f->value_len - 1]) != NULL)
        f->value_len--;
    p->text[f->value + f->value_len] = '\0';
    if (p->n_fields < HTTP_FIELDS_MAX)
        p->fields[p->n_fields] = (struct http_field){0};
    return end_text(p);
}

static int on_headers_complete(llhttp_t *ll)
{
    struct http_parse *p = ll->data;
    p->head_done = true;
    return HPE_PAUSED;
}

static int too_large(struct http_parse *p)
{
    return refuse(p, 413, "request_too_large", "The request body is larger than this server takes");
}

static int on_chunk_header(llhttp_t *ll)
{
    struct http_parse *p = ll->data;
    if (ll->content_length == 0) /* the last chunk */
        return 0;
    if (p->n_chunks >= HTTP_CHUNK_FREE &&
        p->body_bytes < (uint64_t)p->n_chunks * HTTP_CHUNK_MEAN_MIN)
        return refuse(p, 400, "bad_request", "Chunks of less than 16 bytes on average");
    p->n_chunks++;
    if (ll->content_length > p->body_limit - p->body_bytes)
        return too_large(p);
    return 0;
}

static int on_extension(llhttp_t *ll, const char *at, size_t len)
{
    struct http_parse *p = ll->data;
    (void)at;
    if (len > HTTP_EXTENSION_MAX - p->extension_bytes)
        return refuse(p, 400, "bad_request", "Chunk extensions are limited to 256 bytes");
    p->extension_bytes += (uint32_t)len;
    return 0;
}

/* Grows as bytes come, so a declared length costs nothing by itself. */
static bool body_reserve(struct http_parse *p, size_t need)
{
    if (need <= p->body_room)
        return true;
    size_t room = p->body_room == 0 ? HTTP_BODY_STEP : p->body_room * 2;
    uint64_t declared = http_parse_declared(p);
    if (room > declared)
        room = (size_t)declared;
    if (room < need)
        room = need;
    char *body = mem_try_alloc(room + 1);
    if (body == NULL)
        return false;
    if (p->body != NULL)
        memcpy(body, p->body, (size_t)p->body_bytes);
    mem_free(p->body);
    p->body = body;
    p->body_room = room;
    return true;
}

static int on_body(llhttp_t *ll, const char *at, size_t len)
{
    struct http_parse *p = ll->data;
    if (len > p->body_limit - p->body_bytes)
        return too_large(p);
    if (p->keep_body) {
        if (!body_reserve(p, (size_t)p->body_bytes + len))
            return refuse(p, 503, "server_overloaded", "No memory for the request body");
        memcpy(p->body + p->body_bytes, at, len);
        p->body[p->body_bytes + len] = '\0';
    }
    p->body_bytes += len;
    return 0;
}

static int on_message_complete(llhttp_t *ll)
{
    struct http_parse *p = ll->data;
    p->message_done = true;
    return HPE_PAUSED;
}

static const llhttp_settings_t settings = {
    .on_url = on_url,
    .on_url_complete = on_url_complete,
    .on_header_field = on_field,
    .on_header_field_complete = on_field_complete,
    .on_header_value = on_value,
    .on_header_value_complete = on_value_complete,
    .on_headers_complete = on_headers_complete,
    .on_chunk_header = on_chunk_header,
    .on_chunk_extension_name = on_extension,
    .on_chunk_extension_value = on_extension,
    .on_body = on_body,
    .on_message_complete = on_message_complete,
};

void http_parse_init(struct http_parse *p)
{
    p->body = NULL;
    http_parse_next(p);
}

void http_parse_next(struct http_parse *p)
{
    http_parse_drop_body(p);
    memset(p, 0, offsetof(struct http_parse, text));
    llhttp_init(&p->ll, HTTP_REQUEST, &settings);
    p->ll.data = p;
}

void http_parse_drop_body(struct http_parse *p)
{
    mem_free(p->body);
    p->body = NULL;
    p->body_room = 0;
}

void http_parse_fini(struct http_parse *p)
{
    http_parse_drop_body(p);
}

/* One CRLF before a request is tolerated (old clients send it after a body); llhttp would take any
 * number. Returns bytes eaten. */
static size_t eat_leading(struct http_parse *p, const char *data, size_t len)
{
    size_t i = 0;
    while (i < len && p->head_bytes == 0) {
        bool expected =
            (p->leading == 0 && data[i] == '\r') || (p->leading == 1 && data[i] == '\n');
        if (expected) {
            p->leading++;
            i++;
            continue;
        }
        if (p->leading == 1 || data[i] == '\r' || data[i] == '\n')
            refuse(p, 400, "bad_request", "Empty lines before the request line");
        break;
    }
    return i;
}

static enum http_result parser_says(struct http_parse *p, llhttp_errno_t rc)
{
    if (rc == HPE_OK)
        return HTTP_MORE;
    if (rc == HPE_PAUSED && p->message_done)
        return HTTP_GOT_ALL;
    if (rc == HPE_PAUSED && p->head_done)
        return HTTP_GOT_HEAD;
    if (p->bad.status == 0)
        refuse(p, 400, "bad_request",
               rc == HPE_PAUSED_UPGRADE || rc == HPE_PAUSED_H2_UPGRADE || rc == HPE_INVALID_VERSION
                   ? "This server speaks HTTP/1.1 and HTTP/1.0 only"
                   : "The request is not well-formed HTTP");
    return HTTP_BAD;
}

static enum http_result feed_head(struct http_parse *p, const char *data, size_t len, size_t *used)
{
    size_t lead = eat_leading(p, data, len);
    *used = lead;
    p->started = p->started || len > 0;
    if (p->bad.status != 0)
        return HTTP_BAD;
    if (lead == len)
        return HTTP_MORE;
    size_t room = HTTP_HEAD_MAX - p->head_bytes;
    size_t n = len - lead < room ? len - lead : room;
    llhttp_errno_t rc = llhttp_execute(&p->ll, data + lead, n);
    size_t taken = rc == HPE_OK ? n : (size_t)(llhttp_get_error_pos(&p->ll) - (data + lead));
    p->head_bytes += (uint32_t)taken;
    *used += taken;
    if (rc == HPE_OK && p->head_bytes == HTTP_HEAD_MAX) {
        head_too_large(p);
        return HTTP_BAD;
    }
    return parser_says(p, rc);
}

enum http_result http_parse_feed(struct http_parse *p, const char *data, size_t len, size_t *used)
{
    CHECK(p->bad.status == 0 && !p->message_done);
    if (!p->head_done)
        return feed_head(p, data, len, used);
    if (llhttp_get_errno(&p->ll) == HPE_PAUSED)
        llhttp_resume(&p->ll);
    llhttp_errno_t rc = llhttp_execute(&p->ll, data, len);
    *used = rc == HPE_OK ? len : (size_t)(llhttp_get_error_pos(&p->ll) - data);
    return parser_says(p, rc);
}

uint64_t http_parse_declared(const struct http_parse *p)
{
    if (p->ll.flags & F_CHUNKED)
        return UINT64_MAX;
    /* One below: UINT64_MAX means chunked. Nobody can send either. */
    if (!(p->ll.flags & F_CONTENT_LENGTH))
        return 0;
    struct text_view v = http_parse_field(p, "content-length");
    uint64_t n = 0;
    for (size_t i = 0; i < v.len; i++)
        if (__builtin_mul_overflow(n, (uint64_t)10, &n) ||
            __builtin_add_overflow(n, (uint64_t)(v.p[i] - '0'), &n))
            return UINT64_MAX - 1;
    return n == UINT64_MAX ? UINT64_MAX - 1 : n;
}

bool http_parse_is_1_0(const struct http_parse *p)
{
    return p->ll.http_major == 1 && p->ll.http_minor == 0;
}

bool http_parse_keep_alive(const struct http_parse *p)
{
    return llhttp_should_keep_alive(&p->ll) != 0;
}

struct text_view http_parse_field(const struct http_parse *p, const char *lower_name)
{
    size_t len = strlen(lower_name);
    for (uint32_t i = 0; i < p->n_fields; i++) {
        const struct http_field *f = &p->fields[i];
        if (f->name_len == len && memcmp(p->text + f->name, lower_name, len) == 0)
            return (struct text_view){p->text + f->value, f->value_len};
    }
    return (struct text_view){NULL, 0};
}

uint32_t http_parse_count(const struct http_parse *p, const char *lower_name)
{
    size_t len = strlen(lower_name);
    uint32_t n = 0;
    for (uint32_t i = 0; i < p->n_fields; i++)
        n += p->fields[i].name_len == len &&
             memcmp(p->text + p->fields[i].name, lower_name, len) == 0;
    return n;
}
