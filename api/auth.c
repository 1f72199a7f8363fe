/* Who may speak: API keys.
 *
 * Keys are kept only as digests of their SHA-256 under a secret of this process. A key that was
 * presented is digested the same way and compared with every known digest, all 32 bytes of each: the
 * time says nothing about where a difference was or which key matched, and the digests, which an
 * attacker cannot compute, leave nothing to guess byte by byte. Which key it was is gathered by masks,
 * too, and so is whether it has expired.
 *
 * The same secret keeps the prefix caches of tenants apart. Loop thread; constant once made. */
#include "api/internal.h"
#include "kernels/core/sha256.h"

#include <errno.h>
#include <string.h>
#include <strings.h>
#include <sys/random.h>

struct auth_key {
    unsigned char digest[SHA256_BYTES];
    uint64_t expires_unix_s; /* 0: never */
};

struct auth {
    unsigned char secret[SHA256_BYTES];
    bool open; /* no key is asked for */
    uint32_t n;
    struct auth_key keys[]; /* [n] */
};

static void sha256(const void *p, size_t len, unsigned char out[SHA256_BYTES])
{
    struct sha256 c;
    sha256_init(&c);
    sha256_add(&c, p, len);
    sha256_done(&c, out);
}

/* Of a key's SHA-256, under the secret. */
static void digest(const struct auth *au, const unsigned char key[SHA256_BYTES],
                   unsigned char out[SHA256_BYTES])
{
    struct sha256 c;
    sha256_init(&c);
    sha256_add(&c, au->secret, sizeof au->secret);
    sha256_add(&c, key, SHA256_BYTES);
    sha256_done(&c, out);
}

static void digest_text(const struct auth *au, struct text_view key,
                        unsigned char out[SHA256_BYTES])
{
    unsigned char whole[SHA256_BYTES];
    sha256(key.p, key.len, whole);
    digest(au, whole, out);
}

status auth_create(struct auth **out, const char *const *keys, uint32_t n)
{
    struct auth *au = mem_alloc(sizeof *au + n * sizeof *au->keys);
    if (getrandom(au->secret, sizeof au->secret, 0) != (ssize_t)sizeof au->secret) {
        mem_free(au);
        return err(ERR_IO, "no randomness from the system: %s", strerror(errno));
    }
    for (uint32_t i = 0; i < n; i++) {
        if (keys[i][0] == '\0') {
            mem_free(au);
            return err(ERR_ARG, "an API key is empty");
        }
        digest_text(au, (struct text_view){keys[i], strlen(keys[i])}, au->keys[i].digest);
    }
    au->n = n;
    au->open = n == 0;
    *out = au;
    return OK;
}

struct auth *auth_replace(struct auth *before, const struct tenants *t)
{
    struct auth *au = mem_alloc(sizeof *au + t->n_keys * sizeof *au->keys);
    memcpy(au->secret, before->secret, sizeof au->secret);
    au->n = t->n_keys;
    for (uint32_t i = 0; i < au->n; i++) {
        digest(au, t->keys[i].sha256, au->keys[i].digest);
        au->keys[i].expires_unix_s = t->keys[i].expires_unix_s;
    }
    auth_destroy(before);
    return au;
}

void auth_destroy(struct auth *au)
{
    if (au != NULL)
        explicit_bzero(au, sizeof *au + au->n * sizeof *au->keys);
    mem_free(au);
}

bool auth_open(const struct auth *au)
{
    return au->open;
}

/* 1: equal. No branch on the bytes. */
static unsigned same(const unsigned char *a, const unsigned char *b)
{
    unsigned char differ = 0;
    for (int i = 0; i < SHA256_BYTES; i++)
        differ |= a[i] ^ b[i];
    return (differ - 1u) >> 8 & 1u;
}

/* The key of a Bearer header; p == NULL: another scheme, no key, or more than one space. */
static struct text_view bearer(struct text_view header)
{
    static const char scheme[] = "Bearer ";
    const size_t n = sizeof scheme - 1;
    if (header.len <= n || strncasecmp(header.p, scheme, n) != 0 || header.p[n] == ' ')
        return (struct text_view){0};
    return (struct text_view){header.p + n, header.len - n};
}

/* 1 + the place of the key with this digest, 0: none. */
static uint32_t find(const struct auth *au, const unsigned char wanted[SHA256_BYTES],
                     uint64_t unix_s)
{
    uint32_t place = 0, found = 0;
    for (uint32_t i = 0; i < au->n; i++) {
        const struct auth_key *k = &au->keys[i];
        uint32_t alive = k->expires_unix_s == 0 || unix_s < k->expires_unix_s;
        uint32_t hit = same(wanted, k->digest) & alive & ~found;
        place |= -hit & (i + 1);
        found |= hit;
    }
    return place;
}

uint32_t auth_find(const struct auth *au, const struct exchange *x, uint64_t unix_s)
{
    static const char *const names[] = {"authorization", "x-api-key", "api-key"};
    unsigned char first[SHA256_BYTES], next[SHA256_BYTES];
    uint32_t good = 1, n_seen = 0;
    for (size_t i = 0; i < ARRAY_LEN(names); i++) {
        struct text_view key = exchange_header(x, names[i]);
        if (key.p == NULL)
            continue;
        if (i == 0)
            key = bearer(key);
        if (key.p == NULL)
            return 0;
        digest_text(au, key, n_seen == 0 ? first : next);
        if (n_seen++ > 0) /* a proxy and we might believe different ones */
            good &= same(first, next);
    }
    return n_seen == 0 ? 0 : find(au, first, unix_s) & -good;
}

void auth_salt(const struct auth *au, const char *tenant, uint64_t salt[2])
{
    unsigned char out[SHA256_BYTES];
    struct sha256 c;
    sha256_init(&c);
    sha256_add(&c, au->secret, sizeof au->secret);
    sha256_add(&c, tenant, strlen(tenant) + 1); /* with its end: what follows has a fixed length */
    sha256_add(&c, salt, 2 * sizeof *salt);
    sha256_done(&c, out);
    memcpy(salt, out, 2 * sizeof *salt);
}
