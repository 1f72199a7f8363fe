/* Text out of tokens, with stop strings (text_out.h). */
#include "api/text_out.h"

#include <string.h>

enum { FIRST_TEXT = 256, FIRST_TOKENS = 8 };

status text_out_stops(struct text_stops *s, struct arena *mem, const struct text_view *stop,
                      uint32_t n)
{
    CHECK(n <= MAX_STOPS);
    *s = (struct text_stops){.n = n, .stop = stop};
    for (uint32_t i = 0; i < n; i++) {
        CHECK(stop[i].len > 0 && stop[i].len <= MAX_STOP_BYTES);
        uint16_t *border = ARENA_NEW(mem, uint16_t, stop[i].len + 1);
        if (border == NULL)
            return err(ERR_FULL, "request memory: no room for stop strings");
        for (size_t at = 1; at < stop[i].len; at++) {
            uint16_t k = border[at];
            while (k > 0 && stop[i].p[k] != stop[i].p[at])
                k = border[k];
            border[at + 1] = (uint16_t)(k + (stop[i].p[k] == stop[i].p[at]));
        }
        s->border[i] = border;
    }
    return OK;
}

void text_out_init(struct text_out *t, const struct text_stops *stops, bool include_stop,
                   bool keep_tokens)
{
    *t = (struct text_out){.stops = stops != NULL && stops->n > 0 ? stops : NULL,
                           .include_stop = include_stop,
                           .keep_tokens = keep_tokens};
}

void text_out_tokens_fini(struct text_tokens *l)
{
    mem_free(l->v);
    mem_free(l->tops);
    *l = (struct text_tokens){0};
}

void text_out_fini(struct text_out *t)
{
    mem_free(t->text);
    text_out_tokens_fini(&t->tokens);
    *t = (struct text_out){0};
}

/* Twice what is there, and at least what is needed. */
static void *grown(void *p, size_t *room, size_t need, size_t first, size_t size)
{
    if (need <= *room)
        return p;
    size_t want = *room * 2 > first ? *room * 2 : first;
    if (want < need)
        want = need;
    p = mem_grow(p, *room * size, want * size);
    *room = want;
    return p;
}

struct text_token *text_out_tokens_add(struct text_tokens *l, const struct text_piece *p)
{
    l->v = grown(l->v, &l->room, l->n + 1, FIRST_TOKENS, sizeof *l->v);
    l->tops = grown(l->tops, &l->top_room, l->n_tops + p->n_top, FIRST_TOKENS, sizeof *l->tops);
    struct text_token *t = &l->v[l->n++];
    *t = (struct text_token){.id = p->id,
                             .rank = p->rank,
                             .logprob = p->logprob,
                             .scored = p->scored,
                             .n_top = p->n_top,
                             .top_at = l->n_tops};
    if (p->n_top > 0)
        memcpy(l->tops + l->n_tops, p->top, p->n_top * sizeof *p->top);
    l->n_tops += p->n_top;
    return t;
}

static char *text_room(struct text_out *t, size_t more)
{
    t->text = grown(t->text, &t->room, t->len + more, FIRST_TEXT, 1);
    return t->text + t->len;
}

static bool begins_character(char c)
{
    return ((unsigned char)c & 0xc0) != 0x80;
}

static void text_added(struct text_out *t, size_t bytes)
{
    if (t->keep_tokens) /* only their offsets need it */
        for (size_t i = 0; i < bytes; i++)
            t->chars += begins_character(t->text[t->len + i]);
    t->len += bytes;
}

static void update_ready(struct text_out *t, size_t ready)
{
    t->ready = ready;
    while (t->n_ready_tokens < t->tokens.n && t->tokens.v[t->n_ready_tokens].end <= ready)
        t->n_ready_tokens++;
}

void text_out_echo(struct text_out *t, const char *p, size_t len)
{
    CHECK(t->len == 0 && t->tokens.n == 0);
    if (len > 0)
        memcpy(text_room(t, len), p, len);
    text_added(t, len);
    t->echo_len = len;
    update_ready(t, len);
}

void text_out_echo_token(struct text_out *t, const struct text_piece *p)
{
    const char *echo = t->text;
    size_t left = t->echo_len - t->echo_at, len = p->bytes.len;
    bool stands = len <= left && (len == 0 || memcmp(echo + t->echo_at, p->bytes.p, len) == 0);
    if (!stands)
        len = p->hidden ? 0 : len < left ? len : left;
    /* Inside a character, the characters before it are those that end before it. */
    bool inside = left > 0 && !begins_character(echo[t->echo_at]);
    if (t->keep_tokens) {
        struct text_token *e = text_out_tokens_add(&t->tokens, p);
        e->prompt = true;
        e->offset = t->echo_chars - inside;
    }
    for (size_t i = 0; i < len; i++)
        t->echo_chars += begins_character(echo[t->echo_at + i]);
    t->echo_at += len;
    update_ready(t, t->ready);
}

/* What the automata found in text[from .. len). */
struct match {
    size_t start, end; /* start SIZE_MAX: nothing */
    uint32_t stop;
    size_t held; /* longest prefix of a stop that ends the text */
};

/* The first match of a stop that completes at or after `from`; its later ones start later. */
static void run_stop(struct text_out *t, uint32_t i, size_t from, bool count, struct match *m)
{
    const struct text_view *stop = &t->stops->stop[i];
    const uint16_t *border = t->stops->border[i];
    size_t k = t->state[i];
    for (size_t at = from; at < t->len; at++) {
        while (k > 0 && stop->p[k] != t->text[at])
            k = border[k];
        k += stop->p[k] == t->text[at];
        if (k < stop->len)
            continue;
        CHECK(at + 1 >= k); /* held text was never taken */
        if (count && at + 1 - k < m->start) {
            m->start = at + 1 - k;
            m->end = at + 1;
            m->stop = i;
        }
        k = border[k];
    }
    t->state[i] = (uint16_t)k;
    m->held = k > m->held ? k : m->held;
}

static void cut(struct text_out *t, const struct match *m)
{
    t->stopped = true;
    t->stop = m->stop;
    t->len = t->include_stop ? m->end : m->start;
    t->utf8.n_held = 0;
    for (size_t i = t->tokens.n; i > 0 && t->tokens.v[i - 1].end > t->len; i--)
        t->tokens.v[i - 1].end = t->len;
    update_ready(t, t->len);
}

bool text_out_push(struct text_out *t, const struct text_piece *p)
{
    CHECK(!t->stopped);
    size_t from = t->len;
    uint64_t offset = t->chars;
    if (!p->hidden) {
        char *at = text_room(t, 3 * (p->bytes.len + 3));
        text_added(t, utf8_stream_push(&t->utf8, p->bytes.p, p->bytes.len, at));
    }
    if (t->keep_tokens) {
        struct text_token *e = text_out_tokens_add(&t->tokens, p);
        e->offset = (uint32_t)offset;
        e->end = t->len;
    }
    struct match m = {.start = SIZE_MAX};
    if (t->stops != NULL)
        for (uint32_t i = 0; i < t->stops->n; i++)
            run_stop(t, i, from, !p->unstoppable, &m);
    if (m.start != SIZE_MAX)
        cut(t, &m);
    else
        update_ready(t, t->len - m.held);
    return t->stopped;
}

void text_out_end(struct text_out *t)
{
    if (!t->stopped)
        text_added(t, utf8_stream_flush(&t->utf8, text_room(t, 3)));
    update_ready(t, t->len);
}

static void tokens_take(struct text_tokens *l, size_t n, size_t bytes)
{
    size_t tops = n < l->n ? l->v[n].top_at : l->n_tops;
    l->n -= n;
    l->n_tops -= tops;
    if (l->n == 0)
        return;
    memmove(l->v, l->v + n, l->n * sizeof *l->v);
    if (l->n_tops > 0)
        memmove(l->tops, l->tops + tops, l->n_tops * sizeof *l->tops);
    for (size_t i = 0; i < l->n; i++) {
        l->v[i].end -= bytes;
        l->v[i].top_at -= tops;
    }
}

void text_out_take(struct text_out *t)
{
    tokens_take(&t->tokens, t->n_ready_tokens, t->ready);
    t->n_ready_tokens = 0;
    t->len -= t->ready;
    if (t->len > 0)
        memmove(t->text, t->text + t->ready, t->len);
    t->ready = 0;
    t->echo_len = t->echo_at = 0; /* taken with the rest */
}
