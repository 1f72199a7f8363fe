/* Bytes of tokens -> whole characters. A token may end in the middle of a character, so what is not
 * finished waits here; what can no longer be finished becomes one U+FFFD for the longest part that
 * was valid (the maximal-subpart rule of Unicode 3.9 and of every browser). */
#include "engine/text/utf8.h"

#include "engine/text/tokenizer.h"

#include <string.h>

static size_t put_replacement(char *out)
{
    static const char replacement[] = {'\xef', '\xbf', '\xbd'}; /* U+FFFD */
    memcpy(out, replacement, sizeof replacement);
    return sizeof replacement;
}

/* Can `next` follow what is held? */
static bool goes_on(const struct utf8_stream *u, unsigned char next)
{
    return u->n_held == 1 ? utf8_second_ok(u->held[0], next) : utf8_is_tail((char)next);
}

size_t utf8_stream_push(struct utf8_stream *u, const char *in, size_t len, char *out)
{
    char *to = out;
    for (size_t i = 0; i < len; i++) {
        unsigned char byte = (unsigned char)in[i];
        if (u->n_held > 0 && !goes_on(u, byte)) {
            to += put_replacement(to);
            u->n_held = 0; /* and the byte starts anew */
        }
        if (u->n_held == 0 && byte < 0x80) {
            *to++ = (char)byte;
            continue;
        }
        if (u->n_held == 0 && utf8_promised(byte) == 0) {
            to += put_replacement(to);
            continue;
        }
        u->held[u->n_held++] = byte;
        if (u->n_held < utf8_promised(u->held[0]))
            continue;
        memcpy(to, u->held, u->n_held);
        to += u->n_held;
        u->n_held = 0;
    }
    return (size_t)(to - out);
}

size_t utf8_stream_flush(struct utf8_stream *u, char *out)
{
    if (u->n_held == 0)
        return 0;
    u->n_held = 0;
    return put_replacement(out);
}
