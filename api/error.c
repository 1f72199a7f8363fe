/* The one renderer of errors: a status, a type from a fixed list, a code (string or null), the field.
 *
 * Text that came from a client may stand in a message, so error_set cleans it: control bytes and
 * broken UTF-8 become '?'. What is rendered is therefore always one line of valid JSON, and its size
 * is bounded: only quotes and backslashes grow, to two bytes.
 *
 * Thread: any; the struct belongs to the caller. error_reply: loop thread. */
#include "api/error.h"
#include "engine/text/utf8.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static const struct usual {
    int status;
    const char *type, *code; /* code: where the caller names none */
} usuals[] = {
    {400, "invalid_request_error", NULL},
    {401, "authentication_error", "invalid_api_key"},
    {403, "permission_error", "insufficient_permissions"},
    {404, "not_found_error", "unknown_url"},
    {405, "invalid_request_error", "method_not_allowed"},
    {408, "invalid_request_error", "request_timeout"},
    {413, "invalid_request_error", "request_too_large"},
    {414, "invalid_request_error", "request_too_large"},
    {415, "invalid_request_error", "unsupported_media_type"},
    {429, "rate_limit_error", "rate_limit_exceeded"},
    {431, "invalid_request_error", "request_too_large"},
    {500, "server_error", "internal_error"},
    {503, "unavailable_error", "server_overloaded"},
};

static const struct usual *find_usual(int http_status)
{
    for (size_t i = 0; i < ARRAY_LEN(usuals); i++)
        if (usuals[i].status == http_status)
            return &usuals[i];
    return http_status >= 500 ? &usuals[ARRAY_LEN(usuals) - 2] : &usuals[0];
}

/* Length of the character at p, or 0: broken, or a control. */
static size_t character(const char *p, size_t len)
{
    unsigned n;
    uint32_t c = utf8_decode(p, p + len, &n);
    return c == UTF8_BAD || c < 0x20 || c == 0x7f ? 0 : n;
}

static void clean(char *s)
{
    size_t len = strlen(s);
    for (size_t i = 0; i < len;) {
        size_t n = character(s + i, len - i);
        if (n == 0)
            s[i] = '?';
        i += n == 0 ? 1 : n;
    }
}

void error_set(struct api_error *e, int http_status, const char *code, const char *param,
               const char *fmt, ...)
{
    const struct usual *u = find_usual(http_status);
    *e = (struct api_error){.status = http_status, .type = u->type, .code = code ? code : u->code};
    if (http_status == 401)
        e->extra_header = "WWW-Authenticate: Bearer\r\n";
    snprintf(e->param, sizeof e->param, "%s", param ? param : "");
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(e->message, sizeof e->message, fmt, ap);
    va_end(ap);
    clean(e->param);
    clean(e->message);
}

/* A JSON string or null at buf + at; never past room. What does not fit is left out. */
static size_t put_string(char *buf, size_t at, size_t room, const char *s)
{
    if (s == NULL)
        return at + (size_t)snprintf(buf + at, room - at, "null");
    buf[at++] = '"';
    while (*s != '\0' && at + 6 < room) {
        size_t n = character(s, strlen(s));
        if (*s == '"' || *s == '\\')
            buf[at++] = '\\';
        if (n == 0)
            buf[at++] = '?';
        else
            buf[at++] = *s;
        s++;
        for (size_t i = 1; i < n; i++)
            buf[at++] = *s++;
    }
    buf[at++] = '"';
    return at;
}

size_t error_render(const struct api_error *e, char *buf, size_t room)
{
    /* The message may fill what the other parts leave: keys, type, code, a param of at most twice
     * 64 bytes, two numbers. */
    enum { REST = 512 };
    CHECK(room >= (size_t)2 * REST);
    size_t at = (size_t)snprintf(buf, room, "{\"error\":{\"message\":");
    at = put_string(buf, at, room - REST, e->message);
    at += (size_t)snprintf(buf + at, room - at, ",\"type\":");
    at = put_string(buf, at, room, e->type);
    at += (size_t)snprintf(buf + at, room - at, ",\"param\":");
    at = put_string(buf, at, room, e->param[0] ? e->param : NULL);
    at += (size_t)snprintf(buf + at, room - at, ",\"code\":");
    at = put_string(buf, at, room, e->code);
    if (e->n_prompt_tokens > 0 && e->n_ctx > 0)
        at += (size_t)snprintf(buf + at, room - at, ",\"n_prompt_tokens\":%u,\"n_ctx\":%u",
                               e->n_prompt_tokens, e->n_ctx);
    at += (size_t)snprintf(buf + at, room - at, "}}");
    CHECK(at < room);
    return at;
}

void error_reply(struct exchange *x, const struct api_error *e, bool close)
{
    char body[4096], extra[256];
    int n = snprintf(extra, sizeof extra, "%s", e->extra_header ? e->extra_header : "");
    CHECK(n >= 0 && (size_t)n < sizeof extra - 64); /* our own static text */
    uint32_t s = e->retry_after_ms > 0 ? (e->retry_after_ms + 999) / 1000 : e->retry_after_s;
    if (s > 0) /* SDKs ignore longer waits than 120 s */
        n +=
            snprintf(extra + n, sizeof extra - (size_t)n, "Retry-After: %u\r\n", s < 120 ? s : 120);
    if (e->retry_after_ms > 0)
        snprintf(extra + n, sizeof extra - (size_t)n, "retry-after-ms: %u\r\n", e->retry_after_ms);
    struct reply r = {.status = e->status,
                      .content_type = "application/json",
                      .extra = extra[0] ? extra : NULL,
                      .body = body,
                      .close = close};
    r.len = error_render(e, body, sizeof body);
    exchange_reply(x, &r);
}
