/* A growing byte buffer and the JSON forms we write.
 *
 * Streams escape one short string per token and frame it, so the escaper copies runs of ordinary
 * bytes. A writer holds what clients can make large, so running out of memory is not our
 * mistake: `failed` sticks, and whoever sends the bytes looks at it once, at the end.
 *
 * A writer belongs to whoever made it; nothing here is shared between threads. */
#include "api/writer.h"

#include <float.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { WRITER_FIRST = 256 };

void writer_init(struct writer *w)
{
    *w = (struct writer){.p = mem_alloc(WRITER_FIRST), .room = WRITER_FIRST};
}

void writer_fini(struct writer *w)
{
    mem_free(w->p);
    *w = (struct writer){0};
}

void writer_reset(struct writer *w)
{
    w->len = 0;
    w->failed = false;
    w->p[0] = '\0';
}

void writer_shrink(struct writer *w, size_t most)
{
    if (w->room > most) {
        writer_fini(w);
        writer_init(w);
    }
    writer_reset(w);
}

/* Room for more bytes and the final NUL; NULL: failed, now or before. */
static char *reserve(struct writer *w, size_t more)
{
    size_t need;
    if (w->failed)
        return NULL;
    CHECK(!__builtin_add_overflow(w->len, more, &need) && need < SIZE_MAX / 4);
    if (need + 1 > w->room) {
        size_t room = w->room * 2 > need + 1 ? w->room * 2 : need + 1;
        char *p = mem_try_grow(w->p, w->room, room);
        if (p == NULL) {
            w->failed = true;
            return NULL;
        }
        w->p = p;
        w->room = room;
    }
    return w->p + w->len;
}

void write_bytes(struct writer *w, const char *p, size_t len)
{
    char *at = reserve(w, len);
    if (at == NULL)
        return;
    if (len > 0)
        memcpy(at, p, len);
    at[len] = '\0';
    w->len += len;
}

void write_text(struct writer *w, const char *s)
{
    write_bytes(w, s, strlen(s));
}

void write_format(struct writer *w, const char *fmt, ...)
{
    va_list ap, again;
    va_start(ap, fmt);
    va_copy(again, ap);
    int need = vsnprintf(NULL, 0, fmt, ap);
    va_end(ap);
    CHECK(need >= 0);
    char *at = reserve(w, (size_t)need);
    if (at != NULL) {
        vsnprintf(at, (size_t)need + 1, fmt, again);
        w->len += (size_t)need;
    }
    va_end(again);
}

/* What follows the backslash; 'u': six characters; 0: the byte stands for itself. */
static char escape_of(unsigned char c)
{
    if (c >= 0x20 && c != '"' && c != '\\')
        return 0;
    switch (c) {
    case '"':
    case '\\': return (char)c;
    case '\b': return 'b';
    case '\f': return 'f';
    case '\n': return 'n';
    case '\r': return 'r';
    case '\t': return 't';
    default: return 'u';
    }
}

void write_string_body(struct writer *w, const char *p, size_t len)
{
    size_t done = 0;
    for (size_t i = 0; i < len; i++) {
        unsigned char c = (unsigned char)p[i];
        char escape = escape_of(c);
        if (escape == 0)
            continue;
        write_bytes(w, p + done, i - done);
        done = i + 1;
        if (escape == 'u')
            write_format(w, "\\u%04x", c);
        else
            write_bytes(w, (const char[]){'\\', escape}, 2);
    }
    write_bytes(w, p + done, len - done);
}

void write_string(struct writer *w, const char *p, size_t len)
{
    write_bytes(w, "\"", 1);
    write_string_body(w, p, len);
    write_bytes(w, "\"", 1);
}

void write_u64(struct writer *w, uint64_t v)
{
    char digits[20];
    size_t at = sizeof digits;
    do {
        digits[--at] = (char)('0' + v % 10);
        v /= 10;
    } while (v != 0);
    write_bytes(w, digits + at, sizeof digits - at);
}

void write_logprob(struct writer *w, float v)
{
    if (!(v >= -9999.0f) || v > FLT_MAX) { /* NaN, too; JSON has neither it nor infinities */
        write_text(w, "-9999.0");
        return;
    }
    char text[32];
    int len = snprintf(text, sizeof text, "%.9g", (double)v);
    write_bytes(w, text, (size_t)len);
    if (strpbrk(text, ".e") == NULL)
        write_text(w, ".0");
}
