/* api/text_out.c against a naive model, driven by bytes: the unit test feeds random ones, the fuzzer
 * chosen ones.
 *
 * The model decodes everything from the start after each token and searches the whole text for each
 * stop string. From the same tokens it says what the text must be, which part of it must be held
 * back, and where each token stands. */
#ifndef TESTS_TEXT_OUT_RIG_H
#define TESTS_TEXT_OUT_RIG_H

#include "api/text_out.h"

#include <stdio.h>
#include <string.h>

enum { RIG_TOKENS = 64, RIG_TEXT = RIG_TOKENS * 32 };

struct rig_token {
    char bytes[16];
    size_t len;
    bool hidden, take; /* take: the stream writes after it */
};

struct rig_case {
    struct text_view stops[4];
    char stop_bytes[4][16];
    uint32_t n_stops, min_tokens;
    bool include_stop;
    char echo[16];
    size_t echo_len;
    struct rig_token tokens[RIG_TOKENS];
    uint32_t n_tokens;
};

/* Bytes of an input; zeros when it is used up. */
struct rig_input {
    const uint8_t *p;
    size_t len, at;
};

static inline uint8_t rig_byte(struct rig_input *in)
{
    return in->at < in->len ? in->p[in->at++] : 0;
}

/* Few letters, so that stops occur; the three bytes of a character, so that it is cut everywhere. */
static inline char rig_letter(struct rig_input *in, bool raw)
{
    static const char letters[8] = {'a', 'b', 'a', 'c', '\xe6', '\x97', '\xa5', 'b'};
    uint8_t b = rig_byte(in);
    return raw ? (char)b : letters[b % 8];
}

static inline void rig_read(struct rig_case *c, const uint8_t *p, size_t len)
{
    struct rig_input in = {p, len, 0};
    uint8_t flags = rig_byte(&in);
    bool raw = flags & 1;
    *c = (struct rig_case){.include_stop = flags & 2,
                           .n_stops = (flags >> 2) % 5,
                           .min_tokens = flags & 64 ? rig_byte(&in) % 8 : 0};
    for (uint32_t i = 0; i < c->n_stops; i++) {
        size_t n = rig_byte(&in) % 6 + 1;
        for (size_t k = 0; k < n; k++)
            c->stop_bytes[i][k] = rig_letter(&in, raw);
        c->stops[i] = (struct text_view){c->stop_bytes[i], n};
    }
    if (flags & 128)
        for (c->echo_len = rig_byte(&in) % 8; in.at < in.len && c->echo[0] == 0;)
            memset(c->echo, 'a' + rig_byte(&in) % 2, c->echo_len ? c->echo_len : 1);
    while (in.at < in.len && c->n_tokens < RIG_TOKENS) {
        struct rig_token *t = &c->tokens[c->n_tokens++];
        uint8_t shape = rig_byte(&in);
        t->len = shape % 6;
        t->take = shape & 64;
        t->hidden = (shape & 0x30) == 0x30;
        for (size_t k = 0; k < t->len; k++)
            t->bytes[k] = rig_letter(&in, raw);
    }
}

/* --- the model ---------------------------------------------------------------------------------- */

struct rig_model {
    char bytes[RIG_TEXT];          /* of visible tokens */
    char text[3 * RIG_TEXT + 64];  /* with the echo in front */
    size_t n_bytes, len, echo_len; /* of bytes, of text */
    size_t held;                   /* end of the text that must be held back */
    uint32_t offset[RIG_TOKENS];   /* per token */
    uint32_t n_tokens;
    bool stopped;
    uint32_t stop;
};

static inline uint32_t rig_chars(const char *p, size_t len)
{
    uint32_t n = 0;
    for (size_t i = 0; i < len; i++)
        n += ((unsigned char)p[i] & 0xc0) != 0x80;
    return n;
}

static inline void rig_decode(struct rig_model *m, const struct rig_case *c, bool end)
{
    struct utf8_stream u = {0};
    memcpy(m->text, c->echo, c->echo_len);
    m->len = m->echo_len = c->echo_len;
    m->len += utf8_stream_push(&u, m->bytes, m->n_bytes, m->text + m->len);
    if (end)
        m->len += utf8_stream_flush(&u, m->text + m->len);
}

static inline bool rig_at(const struct rig_model *m, const struct text_view *s, size_t at)
{
    return at + s->len <= m->len && memcmp(m->text + at, s->p, s->len) == 0;
}

/* Matches that end in text[before .. len). */
static inline void rig_search(struct rig_model *m, const struct rig_case *c, size_t before)
{
    for (size_t at = m->echo_len; at < m->len; at++)
        for (uint32_t i = 0; i < c->n_stops; i++) {
            if (!rig_at(m, &c->stops[i], at) || at + c->stops[i].len <= before)
                continue;
            m->stopped = true;
            m->stop = i;
            m->len = c->include_stop ? at + c->stops[i].len : at;
            m->held = 0;
            return;
        }
}

static inline void rig_hold(struct rig_model *m, const struct rig_case *c)
{
    m->held = 0;
    for (uint32_t i = 0; i < c->n_stops; i++)
        for (size_t k = 1; k < c->stops[i].len && k <= m->len - m->echo_len; k++)
            if (memcmp(m->text + m->len - k, c->stops[i].p, k) == 0 && k > m->held)
                m->held = k;
}

static inline void rig_push(struct rig_model *m, const struct rig_case *c, uint32_t i)
{
    const struct rig_token *t = &c->tokens[i];
    size_t before = m->len;
    m->offset[m->n_tokens++] = rig_chars(m->text, m->len);
    if (!t->hidden) {
        memcpy(m->bytes + m->n_bytes, t->bytes, t->len);
        m->n_bytes += t->len;
    }
    rig_decode(m, c, false);
    if (i + 1 > c->min_tokens)
        rig_search(m, c, before);
    if (!m->stopped)
        rig_hold(m, c);
}

/* --- the comparison ----------------------------------------------------------------------------- */

struct rig_stream {
    char text[3 * RIG_TEXT + 64];
    size_t len;
    uint32_t ids[RIG_TOKENS], offset[RIG_TOKENS];
    struct sample_top top[RIG_TOKENS];
    uint32_t n;
};

static inline void rig_take(struct rig_stream *s, struct text_out *t)
{
    if (t->ready > 0)
        memcpy(s->text + s->len, t->text, t->ready);
    s->len += t->ready;
    for (size_t i = 0; i < t->n_ready_tokens; i++) {
        const struct text_token *e = &t->tokens.v[i];
        s->ids[s->n] = e->id;
        s->offset[s->n] = e->offset;
        s->top[s->n++] = t->tokens.tops[e->top_at];
    }
    text_out_take(t);
}

#define RIG_SAY(cond)                                                     \
    do {                                                                  \
        if (!(cond)) {                                                    \
            printf("# text_out_rig.h:%d: not so: %s\n", __LINE__, #cond); \
            return false;                                                 \
        }                                                                 \
    } while (0)

static inline bool rig_same_tokens(const struct rig_stream *s, const struct rig_model *m)
{
    RIG_SAY(s->n == m->n_tokens);
    for (uint32_t i = 0; i < s->n; i++) {
        RIG_SAY(s->ids[i] == i);
        RIG_SAY(s->top[i].token == i + 1000);
        RIG_SAY(s->offset[i] == m->offset[i]);
    }
    return true;
}

/* Runs one case; every token may be a batch of its own or share one. */
static inline bool rig_run(const struct rig_case *c, struct text_out *t, struct rig_stream *s,
                           struct rig_model *m)
{
    if (c->echo_len > 0)
        text_out_echo(t, c->echo, c->echo_len);
    rig_decode(m, c, false);
    for (uint32_t i = 0; i < c->n_tokens && !m->stopped; i++) {
        struct sample_top top = {.token = i + 1000};
        struct text_piece p = {.bytes = {c->tokens[i].bytes, c->tokens[i].len},
                               .hidden = c->tokens[i].hidden,
                               .unstoppable = i + 1 <= c->min_tokens,
                               .id = i,
                               .n_top = 1,
                               .top = &top};
        bool stopped = text_out_push(t, &p);
        rig_push(m, c, i);
        RIG_SAY(stopped == m->stopped);
        RIG_SAY(!stopped || t->stop == m->stop);
        RIG_SAY(s->len + t->len == m->len);
        RIG_SAY(s->len + t->ready == m->len - m->held);
        if (c->tokens[i].take)
            rig_take(s, t);
        RIG_SAY(memcmp(s->text, m->text, s->len) == 0);
    }
    text_out_end(t);
    if (!m->stopped)
        rig_decode(m, c, true);
    rig_take(s, t);
    RIG_SAY(s->len == m->len && memcmp(s->text, m->text, m->len) == 0);
    return rig_same_tokens(s, m);
}

static inline bool rig_check(const uint8_t *p, size_t len)
{
    static struct rig_case c;
    static struct rig_stream s;
    static struct rig_model m;
    struct arena mem;
    struct text_stops stops;
    struct text_out t;
    rig_read(&c, p, len);
    memset(&s, 0, sizeof s);
    memset(&m, 0, sizeof m);
    arena_init(&mem, 4096, 65536);
    CHECK(text_out_stops(&stops, &mem, c.stops, c.n_stops) == OK);
    text_out_init(&t, &stops, c.include_stop, true);
    bool good = rig_run(&c, &t, &s, &m);
    text_out_fini(&t);
    arena_fini(&mem);
    return good;
}

#endif
