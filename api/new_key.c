/* Writing down random bytes as a key (new_key.h). */
#include "api/new_key.h"
#include "kernels/core/sha256.h"

#include <stdio.h>
#include <string.h>

/* 43 characters for 32 bytes, without padding. */
static void base64url(const unsigned char *p, size_t n, char *out)
{
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    uint32_t bits = 0, held = 0;
    for (size_t i = 0; i < n; i++) {
        bits = bits << 8 | p[i];
        for (held += 8; held >= 6; held -= 6)
            *out++ = digits[bits >> (held - 6) & 63];
    }
    if (held > 0)
        *out++ = digits[bits << (6 - held) & 63];
    *out = '\0';
}

void new_key_make(struct new_key *k, const unsigned char random[NEW_KEY_RANDOM])
{
    unsigned char digest[SHA256_BYTES];
    struct sha256 c;
    memset(k, 0, sizeof *k);
    for (int i = 0; i < NEW_KEY_ID; i++)
        k->id[i] = "abcdefghijklmnopqrstuvwxyz234567"[random[i] & 31];
    int n = snprintf(k->text, sizeof k->text, "sk-%s-", k->id);
    base64url(random + NEW_KEY_ID, NEW_KEY_SECRET, k->text + n);
    sha256_init(&c);
    sha256_add(&c, k->text, strlen(k->text));
    sha256_done(&c, digest);
    for (size_t i = 0; i < SHA256_BYTES; i++)
        snprintf(k->sha256 + 2 * i, 3, "%02x", digest[i]);
}
