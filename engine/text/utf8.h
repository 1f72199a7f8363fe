/* One UTF-8 character at a time. Text that reaches the tokenizer has been checked at the API's
 * border, but a tokenizer that reads past its input is not worth that trust: a byte that starts no
 * character is taken as a character of its own (UTF8_BAD), whatever follows. */
#ifndef ENGINE_TEXT_UTF8_H
#define ENGINE_TEXT_UTF8_H

#include "kernels/base.h"

enum { UTF8_BAD = 0x110000 };

static inline bool utf8_is_tail(char c)
{
    return ((unsigned char)c & 0xc0) == 0x80;
}

/* Bytes that the lead byte promises: 1 for ASCII, 2 to 4, or 0: never starts a character. */
static inline unsigned utf8_promised(unsigned char lead)
{
    if (lead < 0x80)
        return 1;
    if (lead < 0xc2 || lead > 0xf4)
        return 0;
    return lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
}

/* May `second` follow `lead` (0xc2 to 0xf4)? Rules out overlong forms, surrogates and what is
 * beyond U+10FFFF, so that after it any two tails make a character. */
static inline bool utf8_second_ok(unsigned char lead, unsigned char second)
{
    unsigned char low = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
    unsigned char high = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
    return second >= low && second <= high;
}

/* The character at p < end; *len: its bytes. UTF8_BAD with *len = 1: none starts here. */
static inline uint32_t utf8_decode(const char *p, const char *end, unsigned *len)
{
    const unsigned char *u = (const unsigned char *)p;
    unsigned n = utf8_promised(u[0]);
    *len = 1;
    if (n == 1)
        return u[0];
    if (n == 0 || (size_t)(end - p) < n || !utf8_second_ok(u[0], u[1]))
        return UTF8_BAD;
    uint32_t cp = ((u[0] & (0x7fu >> n)) << 6) | (u[1] & 0x3f);
    for (unsigned i = 2; i < n; i++) {
        if (!utf8_is_tail(p[i]))
            return UTF8_BAD;
        cp = (cp << 6) | (u[i] & 0x3f);
    }
    *len = n;
    return cp;
}

/* Writes cp <= 0x10ffff and returns its bytes, 1 to 4. */
static inline unsigned utf8_encode(uint32_t cp, char *out)
{
    if (cp < 0x80) {
        out[0] = (char)cp;
        return 1;
    }
    unsigned n = cp < 0x800 ? 2 : cp < 0x10000 ? 3 : 4;
    for (unsigned i = n; --i > 0; cp >>= 6)
        out[i] = (char)(0x80 | (cp & 0x3f));
    out[0] = (char)((0xf00u >> n) | cp);
    return n;
}

#endif
