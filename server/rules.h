/* What a well-formed request may still not be: the right-hand column of reliability.md 0.3, and the
 * defences against pages of a browser (Host and Origin). Decided from the headers alone. */
#ifndef SERVER_RULES_H
#define SERVER_RULES_H

#include "server/http_parse.h"

struct rules {
    /* Without an API key the only wall against DNS rebinding is the Host header: then only these
     * names, loopback names and, off loopback, address literals are served. */
    bool check_host, allow_ip_hosts;
    const char *const *hosts; /* [n_hosts] */
    uint32_t n_hosts;
    const char *const *origins; /* [n_origins] allowed; "*": any */
    uint32_t n_origins;
};

/* Framing and header rules in the order they matter; OK: status 0. */
struct http_refusal rules_check(const struct rules *r, const struct http_parse *p);
/* The Origin to name in Access-Control-Allow-Origin; p NULL: none. */
struct text_view rules_cors(const struct rules *r, const struct http_parse *p);

#endif
