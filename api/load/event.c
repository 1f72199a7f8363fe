#include "api/load/event.h"

#include <string.h>

enum { MAX_DEPTH = 64 };

/* Where we are; p NULL: it was no JSON. */
struct cursor {
    const char *p, *end;
};

static char peek(struct cursor *c)
{
    while (c->p != NULL && c->p < c->end &&
           (*c->p == ' ' || *c->p == '\n' || *c->p == '\r' || *c->p == '\t'))
        c->p++;
    return c->p != NULL && c->p < c->end ? *c->p : '\0';
}

static bool take(struct cursor *c, char what)
{
    if (peek(c) != what)
        return false;
    c->p++;
    return true;
}

static void fail(struct cursor *c)
{
    c->p = NULL;
}

static struct event_text string(struct cursor *c)
{
    struct event_text t = {"", 0};
    if (!take(c, '"')) {
        fail(c);
        return t;
    }
    const char *start = c->p;
    for (; c->p < c->end && *c->p != '"'; c->p++)
        if (*c->p == '\\' && ++c->p == c->end)
            break;
    if (c->p >= c->end) {
        fail(c);
        return t;
    }
    t = (struct event_text){start, (size_t)(c->p - start)};
    c->p++;
    return t;
}

/* Over a value of any kind; brackets are counted, not matched. */
static struct event_text skip(struct cursor *c)
{
    int depth = 0;
    char first = peek(c);
    const char *start = c->p;
    do {
        char ch = peek(c);
        if (ch == '"') {
            (void)string(c);
        } else if (ch == '{' || ch == '[') {
            c->p++;
            if (++depth > MAX_DEPTH)
                fail(c);
        } else if ((ch == '}' || ch == ']' || ch == ',' || ch == ':') && depth > 0) {
            c->p++;
            depth -= ch == '}' || ch == ']';
        } else if (ch != '\0' && strchr("}],:", ch) == NULL) {
            while (c->p < c->end && strchr("{}[],:\" \n\r\t", *c->p) == NULL)
                c->p++;
        } else {
            fail(c);
        }
    } while (c->p != NULL && depth > 0);
    if (c->p == NULL || first == '\0')
        return (struct event_text){"", 0};
    return (struct event_text){start, (size_t)(c->p - start)};
}

static bool is(const struct event_text *t, const char *word)
{
    return t->len == strlen(word) && memcmp(t->p, word, t->len) == 0;
}

/* Calls member(e, c, key) for each member of the object at c, which must take its value. */
typedef void member_reader(struct event *e, struct cursor *c, const struct event_text *key);

static void object(struct event *e, struct cursor *c, member_reader *member)
{
    if (!take(c, '{')) {
        fail(c);
        return;
    }
    if (take(c, '}'))
        return;
    do {
        struct event_text key = string(c);
        if (c->p == NULL || !take(c, ':')) {
            fail(c);
            return;
        }
        member(e, c, &key);
    } while (c->p != NULL && take(c, ','));
    if (c->p != NULL && !take(c, '}'))
        fail(c);
}

static uint32_t whole(struct cursor *c)
{
    struct event_text t = skip(c);
    uint64_t n = 0;
    for (size_t i = 0; i < t.len && t.p[i] >= '0' && t.p[i] <= '9' && n < UINT32_MAX; i++)
        n = n * 10 + (uint64_t)(t.p[i] - '0');
    return n < UINT32_MAX ? (uint32_t)n : UINT32_MAX;
}

static void read_ids(struct event *e, struct cursor *c)
{
    if (peek(c) != '[') {
        (void)skip(c); /* null */
        return;
    }
    struct event_text all = skip(c);
    bool in_number = false;
    e->ids = all.p + 1;
    e->n_ids = 0; /* the last of several counts */
    for (size_t i = 0; i < all.len; i++) {
        bool digit = all.p[i] >= '0' && all.p[i] <= '9';
        e->n_ids += digit && !in_number;
        in_number = digit;
    }
}

static void read_text(struct event *e, struct cursor *c)
{
    if (peek(c) != '"') {
        (void)skip(c);
        return;
    }
    struct event_text t = string(c);
    if (t.len > 0)
        e->text = t;
}

static void delta_member(struct event *e, struct cursor *c, const struct event_text *key)
{
    if (is(key, "content") || is(key, "reasoning_content") || is(key, "reasoning"))
        read_text(e, c);
    else
        (void)skip(c);
}

static void choice_member(struct event *e, struct cursor *c, const struct event_text *key)
{
    if (is(key, "text")) {
        read_text(e, c);
    } else if (is(key, "delta") && peek(c) == '{') {
        object(e, c, delta_member);
    } else if (is(key, "token_ids")) {
        read_ids(e, c);
    } else if (is(key, "finish_reason") && peek(c) == '"') {
        e->finished = true;
        e->reason = string(c);
    } else {
        (void)skip(c);
    }
}

static void read_choices(struct event *e, struct cursor *c)
{
    if (!take(c, '[')) {
        (void)skip(c);
        return;
    }
    if (take(c, ']'))
        return;
    e->has_choice = true;
    object(e, c, choice_member);
    while (c->p != NULL && take(c, ','))
        (void)skip(c);
    if (c->p != NULL && !take(c, ']'))
        fail(c);
}

static void details_member(struct event *e, struct cursor *c, const struct event_text *key)
{
    if (is(key, "cached_tokens"))
        e->cached_tokens = whole(c);
    else
        (void)skip(c);
}

static void usage_member(struct event *e, struct cursor *c, const struct event_text *key)
{
    if (is(key, "prompt_tokens"))
        e->prompt_tokens = whole(c);
    else if (is(key, "completion_tokens"))
        e->completion_tokens = whole(c);
    else if (is(key, "prompt_tokens_details") && peek(c) == '{')
        object(e, c, details_member);
    else
        (void)skip(c);
}

static void error_member(struct event *e, struct cursor *c, const struct event_text *key)
{
    if (is(key, "message") && peek(c) == '"')
        e->error = string(c);
    else
        (void)skip(c);
}

static void read_error(struct event *e, struct cursor *c)
{
    struct cursor at = *c;
    struct event_text all = skip(c);
    if (is(&all, "null"))
        return;
    e->is_error = true;
    e->error = all;
    if (all.len > 0 && all.p[0] == '{')
        object(e, &at, error_member);
}

static void top_member(struct event *e, struct cursor *c, const struct event_text *key)
{
    if (is(key, "choices")) {
        read_choices(e, c);
    } else if (is(key, "usage") && peek(c) == '{') {
        e->has_usage = true;
        object(e, c, usage_member);
    } else if (is(key, "error")) {
        read_error(e, c);
    } else {
        (void)skip(c);
    }
}

bool event_read(struct event *e, const char *p, size_t len)
{
    struct cursor c = {p, p + len};
    *e = (struct event){.text = {"", 0}, .reason = {"", 0}, .error = {"", 0}};
    object(e, &c, top_member);
    return c.p != NULL && peek(&c) == '\0' && c.p == c.end;
}

void event_ids(const struct event *e, uint32_t *out)
{
    const char *p = e->ids;
    for (uint32_t i = 0; i < e->n_ids; i++) {
        while (*p < '0' || *p > '9')
            p++;
        for (out[i] = 0; *p >= '0' && *p <= '9'; p++)
            out[i] = out[i] * 10 + (uint32_t)(*p - '0');
    }
}
