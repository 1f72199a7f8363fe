#include "engine/tool/tasks_build.h"

#include "kernels/core/splitmix.h"

#include <ctype.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

void text_put(struct text_buf *b, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    int len = vsnprintf(NULL, 0, fmt, ap);
    va_end(ap);
    CHECK(len >= 0);
    size_t need = b->n + (size_t)len + 1;
    if (need > b->room) {
        size_t room = 2 * need;
        b->p = mem_grow(b->p, b->room, room);
        b->room = room;
    }
    va_start(ap, fmt);
    vsnprintf(b->p + b->n, b->room - b->n, fmt, ap);
    va_end(ap);
    b->n += (size_t)len;
}

void text_free(struct text_buf *b)
{
    mem_free(b->p);
    *b = (struct text_buf){0};
}

/* ---- random things ---- */

uint32_t make_random(struct maker *m, uint32_t n)
{
    return (uint32_t)((splitmix_next(&m->random) >> 32) * n >> 32);
}

void make_word(struct maker *m, char *out, size_t room)
{
    struct text_view v = tokenizer_bytes(m->src->tokenizer, m->words[make_random(m, m->n_words)]);
    snprintf(out, room, "%.*s", (int)v.len - 1, v.p + 1);
}

void make_key(struct maker *m, char *out, size_t room)
{
    char a[16], b[16];
    make_word(m, a, sizeof a);
    make_word(m, b, sizeof b);
    snprintf(out, room, "%s-%s", a, b);
}

void make_number(struct maker *m, uint32_t digits, char *out, size_t room)
{
    for (uint32_t i = 0; i < digits && i + 1 < room; i++) {
        out[i] = (char)('0' + (i == 0 ? 1 + make_random(m, 9) : make_random(m, 10)));
        out[i + 1] = '\0';
    }
}

void make_uuid(struct maker *m, char *out, size_t room)
{
    uint32_t r[8];
    for (int i = 0; i < 8; i++)
        r[i] = make_random(m, 1 << 16);
    snprintf(out, room, "%04x%04x-%04x-4%03x-%04x-%04x%04x%04x", r[0], r[1], r[2], r[3] & 0xfff,
             (r[4] & 0x3fff) | 0x8000, r[5], r[6], r[7]);
}

void make_upper(struct maker *m, uint32_t letters, char *out, size_t room)
{
    for (uint32_t i = 0; i < letters && i + 1 < room; i++) {
        out[i] = (char)('A' + make_random(m, 26));
        out[i + 1] = '\0';
    }
}

void make_shuffle(struct maker *m, uint32_t *v, uint32_t n)
{
    for (uint32_t i = n; i > 1; i--) {
        uint32_t j = make_random(m, i), x = v[i - 1];
        v[i - 1] = v[j];
        v[j] = x;
    }
}

/* ---- tokens ---- */

/* Appends the tokens of a text; at most `limit` tokens in all are kept. */
static status append(struct maker *m, uint32_t **tokens, uint32_t *n, const char *text, size_t len,
                     uint32_t limit)
{
    size_t got;
    uint32_t *out = mem_alloc((len + 1) * sizeof *out);
    status st = tokenize(m->src->tokenizer, m->src->scratch, text, len, 0, out, len + 1, &got);
    if (st == OK) {
        if (*n + got > limit)
            got = limit > *n ? limit - *n : 0;
        *tokens = mem_grow(*tokens, *n * sizeof **tokens, (*n + got) * sizeof **tokens);
        memcpy(*tokens + *n, out, got * sizeof *out);
        *n += (uint32_t)got;
    }
    mem_free(out);
    return st;
}

uint32_t make_count_tokens(struct maker *m, const char *text, size_t len)
{
    uint32_t *tokens = NULL, n = 0;
    CHECK(append(m, &tokens, &n, text, len, UINT32_MAX) == OK);
    mem_free(tokens);
    return n;
}

/* Bytes of the haystack that n tokens cover; 0: it has fewer. */
static size_t bytes_of_tokens(struct maker *m, const char *hay, size_t len, uint32_t n)
{
    uint32_t *tokens = NULL, got = 0;
    size_t bytes = 0, enough = (size_t)n * 12 + 64; /* a token of prose is 4 to 5 bytes */
    CHECK(append(m, &tokens, &got, hay, len < enough ? len : enough, n) == OK);
    for (uint32_t i = 0; i < got; i++)
        bytes += tokenizer_bytes(m->src->tokenizer, tokens[i]).len;
    mem_free(tokens);
    return got == n ? bytes : 0;
}

static bool is_border(const char *hay, size_t i, bool lines)
{
    if (lines)
        return hay[i] == '\n';
    return isspace((unsigned char)hay[i]) && strchr(".!?\"", hay[i - 1]) != NULL;
}

/* The last border in (from, at]; the first one behind `from` if there is none; `end` at worst. A
 * border is before white space, so that the tokens of both sides are those of the whole. */
static size_t border(const char *hay, size_t from, size_t at, size_t end, bool lines)
{
    for (size_t i = at < end ? at : end - 1; i > from; i--)
        if (is_border(hay, i, lines))
            return i;
    for (size_t i = from + 1; i < end; i++)
        if (is_border(hay, i, lines))
            return i;
    return end;
}

static status lay_out(struct maker *m, const char *head, const char *hay, size_t bytes, size_t len,
                      bool lines, const struct needle *needles, uint32_t n)
{
    struct task *t = m->t;
    uint32_t limit = m->src->context;
    size_t from = 0;
    TRY(append(m, &t->context, &t->n_context, head, strlen(head), limit));
    for (uint32_t i = 0; i < n; i++) {
        size_t at = (size_t)(needles[i].at * (double)bytes);
        size_t to = from > 0 && at <= from ? from : border(hay, from, at, bytes, lines);
        TRY(append(m, &t->context, &t->n_context, hay + from, to - from, limit));
        if (i == 0)
            t->shared = t->n_context;
        TRY(append(m, &t->context, &t->n_context, needles[i].text, strlen(needles[i].text), limit));
        from = to;
    }
    size_t rest = bytes + 64 < len ? bytes + 64 : len; /* so that the cut is between tokens */
    TRY(append(m, &t->context, &t->n_context, hay + from, rest - from, limit));
    return OK;
}

status make_context(struct maker *m, const char *head, const char *hay, size_t hay_len, bool lines,
                    struct needle *needles, uint32_t n)
{
    for (uint32_t i = 1; i < n; i++) /* few: insertion sort */
        for (uint32_t j = i; j > 0 && needles[j].at < needles[j - 1].at; j--) {
            struct needle x = needles[j];
            needles[j] = needles[j - 1];
            needles[j - 1] = x;
        }
    uint32_t taken = make_count_tokens(m, head, strlen(head));
    for (uint32_t i = 0; i < n; i++)
        taken += make_count_tokens(m, needles[i].text, strlen(needles[i].text));
    if (taken >= m->src->context)
        return err(ERR_ARG, "a context of %u tokens has no room for %u tokens of needles",
                   m->src->context, taken);
    size_t bytes = bytes_of_tokens(m, hay, hay_len, m->src->context - taken);
    if (bytes == 0)
        return err(ERR_ARG, "the text is too short for a context of %u tokens", m->src->context);
    return lay_out(m, head, hay, bytes, hay_len, lines, needles, n);
}

status make_whole(struct maker *m, const struct text_buf *text)
{
    struct task *t = m->t;
    TRY(append(m, &t->context, &t->n_context, text->p, text->n, UINT32_MAX));
    if (t->n_context > m->src->context)
        return err(ERR_ARG, "a list of %u tokens came out of a context of %u", t->n_context,
                   m->src->context);
    return OK;
}

struct task_turn *make_turn(struct maker *m, const char *question, const char *answer)
{
    CHECK(m->t->n_turns < TASKS_MAX_TURNS);
    struct task_turn *t = &m->t->turns[m->t->n_turns++];
    CHECK(append(m, &t->question, &t->n_question, question, strlen(question), UINT32_MAX) == OK);
    CHECK(append(m, &t->answer, &t->n_answer, answer, strlen(answer), UINT32_MAX) == OK);
    t->score = TASKS_EXACT;
    return t;
}

void make_ref(struct task_turn *t, const char *ref)
{
    CHECK(t->n_refs < TASKS_MAX_REFS && strlen(ref) < TASKS_REF_BYTES);
    t->score = TASKS_ALL;
    snprintf(t->refs[t->n_refs++], TASKS_REF_BYTES, "%s", ref);
}
