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

/* Twice what is there, and at least what is needed (> 0). NULL: no memory, and p is as it was. */
static void *grown(void *p, size_t *room, size_t need, size_t first, size_t size)
{
    if (need <= *room)
        return p;
    size_t want = *room * 2 > first ? *room * 2 : first;
    if (want < need)
        want = need;
    p = mem_try_grow(p, *room * size, want * size);
    if (p != NULL)
        *room = want;
    return p;
}

static bool tokens_room(struct text_tokens *l, uint32_t n_top)
{
    struct text_token *v = grown(l->v, &l->room, l->n + 1, FIRST_TOKENS, sizeof *v);
    if (v == NULL)
        return false;
    l->v = v;
    if (n_top == 0)
        return true;
    struct sample_top *tops =
        grown(l->tops, &l->top_room, l->n_tops + n_top, FIRST_TOKENS, sizeof *tops);
    if (tops == NULL)
        return false;
    l->tops = tops;
    return true;
}

struct text_token *text_out_tokens_add(struct text_tokens *l, const struct text_piece *p)
{
    l->failed = l->failed || !tokens_room(l, p->n_top);
    if (l->failed)
        return NULL;
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

/* NULL: failed, now or before. more > 0. */
static char *text_room(struct text_out *t, size_t more)
{
    char *text = t->failed ? NULL : grown(t->text, &t->room, t->len + more, FIRST_TEXT, 1);
    t->failed = text == NULL;
    if (text == NULL)
        return NULL;
    t->text = text;
    return text + t->len;
}

static struct text_token *add_token(struct text_out *t, const struct text_piece *p)
{
    struct text_token *e = text_out_tokens_add(&t->tokens, p);
    t->failed = t->failed || e == NULL;
    return e;
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
    if (len == 0 || text_room(t, len) == NULL)
        return;
    memcpy(t->text, p, len);
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
    struct text_token *e = t->keep_tokens ? add_token(t, p) : NULL;
    if (e != NULL) {
        e->prompt = true;
        e->offset = t->echo_chars - inside;
        e->end = t->echo_at + len;
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
    if (t->failed)
        return false;
    size_t from = t->len;
    uint64_t offset = t->chars;
    if (!p->hidden) {
        char *at = text_room(t, 3 * (p->bytes.len + 3));
        if (at == NULL)
            return false;
        text_added(t, utf8_stream_push(&t->utf8, p->bytes.p, p->bytes.len, at));
    }
    struct text_token *e = t->keep_tokens ? add_token(t, p) : NULL;
    if (e != NULL) {
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
    char *at = t->stopped ? NULL : text_room(t, 3);
    if (at != NULL)
        text_added(t, utf8_stream_flush(&t->utf8, at));
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

bool text_out_has_part(const struct text_out *t)
{
    return t->told < t->ready || t->n_told < t->n_ready_tokens;
}

/* Text leaves with the tokens it belongs to, so far as whole characters allow. */
struct text_part text_out_part(const struct text_out *t, size_t most)
{
    enum { TOKEN_JSON = 64 }; /* a token, or an alternative, written out: about so many bytes */
    size_t n = t->n_told, end = t->ready, bytes = 0;
    while (n < t->n_ready_tokens && bytes < most)
        bytes += TOKEN_JSON * (1 + (size_t)t->tokens.v[n++].n_top);
    if (n < t->n_ready_tokens)
        end = t->tokens.v[n - 1].end;
    if (end < t->told)
        end = t->told;
    if (end - t->told > most) {
        end = t->told + most;
        while (n > t->n_told + 1 && t->tokens.v[n - 1].end > end)
            n--;
    }
    while (end > t->told && end < t->ready && !begins_character(t->text[end]))
        end--;
    return (struct text_part){.text = t->text == NULL ? NULL : t->text + t->told,
                              .len = end - t->told,
                              .tokens = t->tokens.v == NULL ? NULL : t->tokens.v + t->n_told,
                              .n_tokens = n - t->n_told,
                              .tops = t->tokens.tops};
}

void text_out_take_part(struct text_out *t, const struct text_part *p)
{
    t->told += p->len;
    t->n_told += p->n_tokens;
    if (!text_out_has_part(t))
        text_out_take(t); /* only now: to move the rest each time would be quadratic */
}

void text_out_take(struct text_out *t)
{
    tokens_take(&t->tokens, t->n_ready_tokens, t->ready);
    t->n_ready_tokens = 0;
    t->len -= t->ready;
    if (t->len > 0)
        memmove(t->text, t->text + t->ready, t->len);
    t->ready = t->told = t->n_told = 0;
    t->echo_len = t->echo_at = 0; /* taken with the rest */
}
