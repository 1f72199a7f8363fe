/* A new API key: sk-<id>-<43 characters of base64url>, from random bytes that the caller brings. Its
 * text is a secret; the tenants file (tenants.h) gets the id and the SHA-256 alone. */
#ifndef API_NEW_KEY_H
#define API_NEW_KEY_H

#include "kernels/base.h"

enum { NEW_KEY_ID = 8, NEW_KEY_SECRET = 32, NEW_KEY_RANDOM = NEW_KEY_ID + NEW_KEY_SECRET };

struct new_key {
    char id[NEW_KEY_ID + 1];        /* a-z, 2-7 */
    char text[3 + NEW_KEY_ID + 45]; /* "sk-", id, "-", secret */
    char sha256[65];                /* of text, in hexadecimal */
};

void new_key_make(struct new_key *k, const unsigned char random[NEW_KEY_RANDOM]);

#endif
