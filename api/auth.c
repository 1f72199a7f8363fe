/* Who may speak: API keys.
 *
 * Keys are kept only as SHA-256 digests under a secret of this process. A key that was presented is
 * digested the same way and compared with every known digest, all 32 bytes of each: the time says
 * nothing about where a difference was or which key matched, and the digests, which an attacker
 * cannot compute, leave nothing to guess byte by byte.
 *
 * Loop thread; constant after auth_create. */
#include "api/internal.h"
#include "kernels/core/sha256.h"

#include <errno.h>
#include <string.h>
#include <strings.h>
#include <sys/random.h>

struct auth {
    unsigned char secret[SHA256_BYTES];
    uint32_t n;
    unsigned char digests[][SHA256_BYTES]; /* [n] */
};

static void digest(const struct auth *au, const char *key, size_t len,
                   unsigned char out[SHA256_BYTES])
{
    struct sha256 c;
    sha256_init(&c);
    sha256_add(&c, au->secret, sizeof au->secret);
    sha256_add(&c, key, len);
    sha256_done(&c, out);
}

status auth_create(struct auth **out, const char *const *keys, uint32_t n)
{
    struct auth *au = mem_alloc(sizeof *au + (size_t)n * SHA256_BYTES);
    if (getrandom(au->secret, sizeof au->secret, 0) != (ssize_t)sizeof au->secret) {
        mem_free(au);
        return err(ERR_IO, "no randomness from the system: %s", strerror(errno));
    }
    for (uint32_t i = 0; i < n; i++) {
        if (keys[i][0] == '\0') {
            mem_free(au);
            return err(ERR_ARG, "an API key is empty");
        }
        digest(au, keys[i], strlen(keys[i]), au->digests[i]);
    }
    au->n = n;
    *out = au;
    return OK;
}

void auth_destroy(struct auth *au)
{
    if (au != NULL)
        explicit_bzero(au, sizeof *au + (size_t)au->n * SHA256_BYTES);
    mem_free(au);
}

bool auth_open(const struct auth *au)
{
    return au->n == 0;
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

bool auth_check(const struct auth *au, const struct exchange *x)
{
    static const char *const names[] = {"authorization", "x-api-key", "api-key"};
    unsigned char first[SHA256_BYTES], next[SHA256_BYTES];
    unsigned good = 1, n_seen = 0, found = 0;
    if (auth_open(au))
        return true;
    for (size_t i = 0; i < ARRAY_LEN(names); i++) {
        struct text_view key = exchange_header(x, names[i]);
        if (key.p == NULL)
            continue;
        if (i == 0)
            key = bearer(key);
        if (key.p == NULL)
            return false;
        digest(au, key.p, key.len, n_seen == 0 ? first : next);
        if (n_seen++ > 0) /* a proxy and we might believe different ones */
            good &= same(first, next);
    }
    if (n_seen == 0)
        return false;
    for (uint32_t i = 0; i < au->n; i++)
        found |= same(first, au->digests[i]);
    return (found & good) != 0;
}
