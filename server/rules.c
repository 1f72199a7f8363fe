/* Which requests this server takes at all, judged from the head alone (rules.h).
 *
 * Three concerns, in this order. Framing: whatever two parsers could read differently, such as two
 * lengths or two Hosts, is refused and ends the connection, since behind it nobody knows where the
 * next request starts. Host: a page whose name points to this machine must not reach a server that
 * trusts its network (DNS rebinding), so names are from a list. Origin: browsers of pages that are
 * neither from here nor listed are refused. No state; the lists belong to the configuration. Loop thread. */
#include "server/rules.h"

#include <string.h>

#include "server/http_text.h"

#define BAD(text) ((struct http_refusal){400, "bad_request", (text)})
#define GOOD      ((struct http_refusal){0})

static struct http_refusal check_line(const struct http_parse *p)
{
    if (p->ll.http_major != 1 || p->ll.http_minor > 1)
        return BAD("This server speaks HTTP/1.1 and HTTP/1.0 only");
    if (p->ll.method == HTTP_CONNECT)
        return BAD("CONNECT is not served");
    if (p->ll.upgrade || http_parse_count(p, "upgrade") > 0)
        return BAD("Protocol upgrades are not served");
    if (p->target_len == 0 || p->text[0] != '/')
        return BAD("The request target must be a path");
    if (memchr(p->text, '#', p->target_len) != NULL)
        return BAD("The request target must not have a fragment");
    return GOOD;
}

static struct http_refusal check_framing(const struct http_parse *p)
{
    struct text_view te = http_parse_field(p, "transfer-encoding");
    if (te.p != NULL) {
        if (http_parse_is_1_0(p))
            return BAD("HTTP/1.0 has no Transfer-Encoding");
        if (http_parse_count(p, "transfer-encoding") != 1 || !http_text_equal_nocase(te, "chunked"))
            return BAD("The only Transfer-Encoding accepted is chunked");
        if (http_parse_count(p, "content-length") > 0)
            return BAD("Content-Length and Transfer-Encoding exclude each other");
    }
    bool bodyless =
        p->ll.method == HTTP_GET || p->ll.method == HTTP_HEAD || p->ll.method == HTTP_OPTIONS;
    if (bodyless && http_parse_declared(p) > 0)
        return BAD("A request with this method must not have a body");
    return GOOD;
}

/* Two of these would leave it to luck which one is believed. */
static struct http_refusal check_single(const struct http_parse *p)
{
    static const char *const single[] = {"authorization", "x-api-key", "api-key",
                                         "content-type",  "origin",    "expect"};
    for (size_t i = 0; i < ARRAY_LEN(single); i++)
        if (http_parse_count(p, single[i]) > 1)
            return BAD("A header that must be single is repeated");
    uint32_t hosts = http_parse_count(p, "host");
    struct text_view name;
    if (hosts > 1 || (hosts == 0 && !http_parse_is_1_0(p)))
        return BAD("Exactly one Host header is required");
    if (hosts == 1 && !http_text_host_name(http_parse_field(p, "host"), &name))
        return BAD("The Host header is not a host name");
    return GOOD;
}

static bool host_allowed(const struct rules *r, const struct http_parse *p)
{
    struct text_view name;
    /* A browser, which is whom this is about, always sends Host. */
    if (!r->check_host || !http_text_host_name(http_parse_field(p, "host"), &name))
        return true;
    if (http_text_is_loopback(name) || (r->allow_ip_hosts && http_text_is_ip(name)))
        return true;
    for (uint32_t i = 0; i < r->n_hosts; i++)
        if (http_text_equal_nocase(name, r->hosts[i]))
            return true;
    return false;
}

struct text_view rules_cors(const struct rules *r, const struct http_parse *p)
{
    struct text_view origin = http_parse_field(p, "origin");
    for (uint32_t i = 0; origin.p != NULL && i < r->n_origins; i++)
        if (strcmp(r->origins[i], "*") == 0 || http_text_equal(origin, r->origins[i]))
            return origin;
    return (struct text_view){NULL, 0};
}

/* Of a page that came from here (/ui), maybe through a proxy that ends TLS. Whose name Host may be was looked at. */
static bool is_own_origin(const struct http_parse *p)
{
    struct text_view origin = http_parse_field(p, "origin"), host = http_parse_field(p, "host");
    const char *end = host.p != NULL ? memchr(origin.p, ':', origin.len) : NULL;
    size_t scheme = end != NULL ? (size_t)(end - origin.p) : 0;
    const struct text_view is = {origin.p, scheme};
    return (http_text_equal(is, "http") || http_text_equal(is, "https")) &&
           origin.len == scheme + 3 + host.len && memcmp(end, "://", 3) == 0 &&
           memcmp(end + 3, host.p, host.len) == 0;
}

struct http_refusal rules_check(const struct rules *r, const struct http_parse *p)
{
    struct http_refusal bad;
    if ((bad = check_line(p)).status != 0 || (bad = check_framing(p)).status != 0 ||
        (bad = check_single(p)).status != 0)
        return bad;
    if (!host_allowed(r, p))
        return (struct http_refusal){421, "misdirected_request",
                                     "This Host is not served here; see --allowed-hosts"};
    if (http_parse_field(p, "origin").p != NULL && rules_cors(r, p).p == NULL && !is_own_origin(p))
        return (struct http_refusal){403, "origin_not_allowed",
                                     "This Origin is not allowed; see --cors-origin"};
    struct text_view expect = http_parse_field(p, "expect");
    if (expect.p != NULL && !http_text_equal_nocase(expect, "100-continue"))
        return (struct http_refusal){417, "expectation_failed",
                                     "The only expectation known is 100-continue"};
    return GOOD;
}
