/* Texts of HTTP, in and out (http_text.h): reasons, dates, request ids, paths, host names.
 *
 * Pure functions over bytes, so that the fuzzer and unit tests reach them without a connection. What
 * comes from outside has a length and may hold NUL; nothing here trusts a terminator. Dates are made
 * by hand: strftime would follow the locale. */
#include "server/http_text.h"

#include <arpa/inet.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <time.h>

const char *http_text_reason(int code)
{
    switch (code) {
    case 200: return "OK";
    case 204: return "No Content";
    case 400: return "Bad Request";
    case 401: return "Unauthorized";
    case 403: return "Forbidden";
    case 404: return "Not Found";
    case 405: return "Method Not Allowed";
    case 408: return "Request Timeout";
    case 413: return "Content Too Large";
    case 414: return "URI Too Long";
    case 415: return "Unsupported Media Type";
    case 417: return "Expectation Failed";
    case 421: return "Misdirected Request";
    case 429: return "Too Many Requests";
    case 431: return "Request Header Fields Too Large";
    case 500: return "Internal Server Error";
    case 501: return "Not Implemented";
    case 503: return "Service Unavailable";
    default: return "Status";
    }
}

void http_text_date(char out[HTTP_DATE_BYTES], uint64_t unix_s)
{
    static const char days[][4] = {"Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat"};
    static const char months[][4] = {"Jan", "Feb", "Mar", "Apr", "May", "Jun",
                                     "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"};
    time_t t = (time_t)unix_s;
    struct tm tm;
    gmtime_r(&t, &tm);
    /* Not strftime: its names follow the locale. The casts bound the width for the compiler. */
    snprintf(out, HTTP_DATE_BYTES, "%s, %02u %s %04u %02u:%02u:%02u GMT", days[tm.tm_wday % 7],
             (unsigned)tm.tm_mday % 100, months[tm.tm_mon % 12],
             ((unsigned)tm.tm_year + 1900) % 10000, (unsigned)tm.tm_hour % 100,
             (unsigned)tm.tm_min % 100, (unsigned)tm.tm_sec % 100);
}

static int hex(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    if (c >= 'a' && c <= 'f')
        return c - 'a' + 10;
    if (c >= 'A' && c <= 'F')
        return c - 'A' + 10;
    return -1;
}

bool http_text_decode_path(char *path, size_t len, size_t *out_len)
{
    static const char models[] = "/v1/models/";
    size_t n = 0;
    for (size_t i = 0; i < len; i++) {
        if (path[i] != '%') {
            path[n++] = path[i];
            continue;
        }
        if (len - i < 3 || hex(path[i + 1]) < 0 || hex(path[i + 2]) < 0)
            return false;
        int c = hex(path[i + 1]) * 16 + hex(path[i + 2]);
        bool in_name = n >= sizeof models - 1 && memcmp(path, models, sizeof models - 1) == 0;
        if (c < 0x20 || c == 0x7f || (c == '/' && !in_name))
            return false;
        path[n++] = (char)c;
        i += 2;
    }
    *out_len = n;
    return true;
}

bool http_text_clean_id(struct text_view id)
{
    if (id.p == NULL || id.len == 0 || id.len > 64)
        return false;
    for (size_t i = 0; i < id.len; i++) {
        char c = id.p[i];
        bool good = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
                    c == '.' || c == '_' || c == '-';
        if (!good)
            return false;
    }
    return true;
}

void http_text_make_id(char out[HTTP_ID_BYTES], const uint8_t r[16])
{
    for (size_t i = 0; i < 16; i++) {
        out[2 * i] = "0123456789abcdef"[r[i] >> 4];
        out[2 * i + 1] = "0123456789abcdef"[r[i] & 15];
    }
    out[32] = '\0';
}

bool http_text_equal(struct text_view v, const char *s)
{
    return v.p != NULL && strlen(s) == v.len && memcmp(v.p, s, v.len) == 0;
}

bool http_text_equal_nocase(struct text_view v, const char *s)
{
    return v.p != NULL && strlen(s) == v.len && strncasecmp(v.p, s, v.len) == 0;
}

static bool is_port(const char *p, size_t len)
{
    if (len > 5)
        return false;
    for (size_t i = 0; i < len; i++)
        if (p[i] < '0' || p[i] > '9')
            return false;
    return true;
}

bool http_text_host_name(struct text_view host, struct text_view *name)
{
    if (host.p == NULL || host.len == 0 || host.len > 255 + 6)
        return false;
    if (host.p[0] == '[') {
        const char *end = memchr(host.p, ']', host.len);
        if (end == NULL)
            return false;
        *name = (struct text_view){host.p + 1, (size_t)(end - host.p) - 1};
        size_t rest = host.len - name->len - 2;
        return http_text_is_ip(*name) &&
               (rest == 0 || (end[1] == ':' && is_port(end + 2, rest - 1)));
    }
    const char *colon = memchr(host.p, ':', host.len);
    *name = (struct text_view){host.p, colon == NULL ? host.len : (size_t)(colon - host.p)};
    if (colon != NULL && !is_port(colon + 1, host.len - name->len - 1))
        return false;
    for (size_t i = 0; i < name->len; i++) {
        char c = name->p[i];
        bool good = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
                    c == '.' || c == '-' || c == '_';
        if (!good)
            return false;
    }
    return name->len > 0;
}

static bool parse_ip(struct text_view name, unsigned char out[16], int *family)
{
    char text[64];
    if (name.p == NULL || name.len == 0 || name.len >= sizeof text)
        return false;
    memcpy(text, name.p, name.len);
    text[name.len] = '\0';
    *family = AF_INET;
    if (inet_pton(AF_INET, text, out) == 1)
        return true;
    *family = AF_INET6;
    return inet_pton(AF_INET6, text, out) == 1;
}

bool http_text_is_ip(struct text_view name)
{
    unsigned char a[16];
    int family;
    return parse_ip(name, a, &family);
}

bool http_text_is_loopback(struct text_view name)
{
    static const unsigned char one[16] = {[15] = 1};
    static const unsigned char mapped[13] = {[10] = 0xff, [11] = 0xff, [12] = 127};
    static const char tail[] = ".localhost"; /* RFC 6761: such names never leave the machine */
    unsigned char a[16];
    int family;
    if (parse_ip(name, a, &family))
        return family == AF_INET ? a[0] == 127
                                 : memcmp(a, one, 16) == 0 || memcmp(a, mapped, 13) == 0;
    if (http_text_equal_nocase(name, "localhost"))
        return true;
    size_t n = sizeof tail - 1;
    return name.len > n && strncasecmp(name.p + name.len - n, tail, n) == 0;
}
