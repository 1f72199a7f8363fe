/* The tenants file: who may ask, with which keys, and what each is entitled to.
 *
 *   {"tenants": [{"name": "research", "keys": [{"id": "k1", "sha256": "<64 hex>", "expires": "2027-01-31"}],
 *                 "weight": 2, "priority": [0, 10], "requests_per_minute": 600, ...}]}
 *
 * It holds digests, no keys, and is still nobody's business: a file that others than its owner may read
 * is refused. A file is taken whole or not at all; an error names the file, the tenant and the field.
 * The result never changes. Any thread. */
#ifndef API_TENANTS_H
#define API_TENANTS_H

#include "api/quota.h"
#include "kernels/base.h"
#include "kernels/core/sha256.h"

enum {
    TENANT_NAME_MAX = 32, /* [a-z0-9_-]: a label of metrics, a word of log lines */
    TENANT_KEY_ID_MAX = 32,
    TENANTS_MAX = 1000,     /* below engine/message.h's MAX_TENANTS: removed ones may linger */
    TENANT_KEYS_MAX = 4096, /* of all: each request is compared with every one */
};

struct tenant {
    char name[TENANT_NAME_MAX + 1];
    double weight;                       /* over 0 to 1000; 1 unless given */
    int32_t priority_low, priority_high; /* what a request may ask for; both 0 unless given */
    struct quota_limits limits;
    uint32_t max_tokens;      /* a request's max_tokens at most; 0: the model's context */
    uint64_t max_kv_bytes[2]; /* by tier, HBM and DRAM; 0: no bound */
};

struct tenant_key {
    char id[TENANT_KEY_ID_MAX + 1]; /* for the log; never secret */
    unsigned char sha256[SHA256_BYTES];
    uint64_t expires_unix_s; /* from then on it is refused; 0: never */
    uint32_t tenant;         /* index into tenants.v */
};

struct tenants {
    struct tenant *v;        /* [n] */
    struct tenant_key *keys; /* [n_keys], in the order of their digests */
    uint32_t n, n_keys;
};

/* ERR_IO: it cannot be read, or others may read it; ERR_ARG: what it says is wrong. */
status tenants_load(struct tenants **out, const char *path);
/* The text of such a file; `path` names it in errors. text[len] must be 0. */
status tenants_parse(struct tenants **out, const char *path, const char *text, size_t len);
void tenants_free(struct tenants *t); /* NULL is allowed */

bool tenants_is_name(const char *s);

#endif
