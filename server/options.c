/* Names and values of options: finding, reading, printing. The rows are in options_table.c. */
#include "server/options.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "server/config.h"

static char plain(char c)
{
    return (char)(c == '_' ? '-' : c);
}

bool options_same_name(const char *a, size_t a_len, const char *b)
{
    if (strlen(b) != a_len)
        return false;
    for (size_t i = 0; i < a_len; i++)
        if (plain(a[i]) != plain(b[i]))
            return false;
    return a_len > 0;
}

/* Calls for each item of "a, bb": returns the length, sets *item; 0 at the end. */
static size_t next_item(const char **at, const char **item)
{
    while (*at != NULL && (**at == ' ' || **at == ','))
        (*at)++;
    if (*at == NULL || **at == '\0')
        return 0;
    size_t n = strcspn(*at, ", ");
    *item = *at;
    *at += n;
    return n;
}

int options_find(const char *name, size_t len)
{
    for (uint32_t i = 0; i < options_count; i++) {
        const char *at = options_table[i].aliases, *item;
        if (options_same_name(name, len, options_table[i].name))
            return (int)i;
        for (size_t n; (n = next_item(&at, &item)) > 0;)
            if (n == len && options_same_name(item, n, name) && strlen(name) == len)
                return (int)i;
    }
    return -1;
}

int options_find_ignored(const char *name, size_t len)
{
    for (uint32_t i = 0; i < options_ignored_count; i++)
        if (options_same_name(name, len, options_ignored[i].name))
            return (int)i;
    return -1;
}

/* Levenshtein distance, two rows. Names are short; longer ones are cut. */
static size_t distance(const char *a, size_t n, const char *b)
{
    enum { LONGEST = 64 };
    size_t m = strlen(b), row[LONGEST + 1];
    if (n > LONGEST || m > LONGEST)
        return LONGEST;
    for (size_t j = 0; j <= m; j++)
        row[j] = j;
    for (size_t i = 1; i <= n; i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= m; j++) {
            size_t change = diagonal + (plain(a[i - 1]) != plain(b[j - 1]));
            size_t shorter = (row[j] < row[j - 1] ? row[j] : row[j - 1]) + 1;
            diagonal = row[j];
            row[j] = change < shorter ? change : shorter;
        }
    }
    return row[m];
}

static void consider(const char *name, size_t len, const char *known, const char **best,
                     size_t *best_distance)
{
    size_t d = distance(name, len, known);
    if (d < *best_distance) {
        *best = known;
        *best_distance = d;
    }
}

const char *options_nearest(const char *name, size_t len)
{
    const char *best = NULL;
    size_t best_distance = 2 + len / 4;
    for (uint32_t i = 0; i < options_count; i++)
        consider(name, len, options_table[i].name, &best, &best_distance);
    for (uint32_t i = 0; i < options_ignored_count; i++)
        consider(name, len, options_ignored[i].name, &best, &best_distance);
    return best;
}

/* ---- values ---- */

static bool scale_of(const char *suffix, uint64_t *scale)
{
    static const struct {
        const char *suffix;
        uint64_t scale;
    } known[] = {
        {"", 1},           {"k", 1000},       {"m", 1000000},    {"g", 1000000000},
        {"K", 1u << 10},   {"M", 1u << 20},   {"G", 1u << 30},   {"T", 1ull << 40},
        {"KiB", 1u << 10}, {"MiB", 1u << 20}, {"GiB", 1u << 30}, {"TiB", 1ull << 40},
    };
    for (size_t i = 0; i < ARRAY_LEN(known); i++)
        if (strcmp(suffix, known[i].suffix) == 0) {
            *scale = known[i].scale;
            return true;
        }
    return false;
}

status options_number(const char *text, uint64_t *out)
{
    uint64_t whole = 0, part = 0, parts = 1, scale, n;
    const char *p = text;
    size_t digits = 0;
    for (; *p >= '0' && *p <= '9'; p++, digits++)
        if (__builtin_mul_overflow(whole, (uint64_t)10, &whole) ||
            __builtin_add_overflow(whole, (uint64_t)(*p - '0'), &whole))
            return err(ERR_ARG, "too large");
    if (*p == '.')
        for (p++; *p >= '0' && *p <= '9' && parts < 1000000000; p++, digits++) {
            part = part * 10 + (uint64_t)(*p - '0');
            parts *= 10;
        }
    if (digits == 0 || !scale_of(p, &scale))
        return err(ERR_ARG, "not a number (32000, 32k = 32000, 32K = 32768, 1.5G)");
    if (part * scale % parts != 0)
        return err(ERR_ARG, "not a whole number");
    if (__builtin_mul_overflow(whole, scale, &n) ||
        __builtin_add_overflow(n, part * scale / parts, out))
        return err(ERR_ARG, "too large");
    return OK;
}

static status set_count(const struct option *o, void *field, const char *text)
{
    uint64_t n = 0;
    bool automatic =
        (o->flags & OPTION_AUTO) && (strcmp(text, "auto") == 0 || strcmp(text, "-1") == 0);
    if (!automatic) {
        TRY(options_number(text, &n));
        if (n < o->min || n > o->max)
            return err(ERR_ARG, "must be %llu to %llu", (unsigned long long)o->min,
                       (unsigned long long)o->max);
    }
    if (o->size == 4)
        memcpy(field, &(uint32_t){(uint32_t)n}, 4);
    else
        memcpy(field, &n, 8);
    return OK;
}

static status set_seconds(const struct option *o, void *field, const char *text)
{
    char *end;
    double s = strtod(text, &end), lo = (double)o->min / 1e3, hi = (double)o->max / 1e3;
    bool number = end != text && *end == '\0' && text[0] >= '0' && text[0] <= '9';
    if (!number || !(s >= lo) || !(s <= hi))
        return err(ERR_ARG, "must be seconds, %g to %g", lo, hi);
    uint64_t us = (uint64_t)(s * 1e6);
    memcpy(field, &us, sizeof us);
    return OK;
}

static status set_number(const struct option *o, double *field, const char *text)
{
    char *end;
    double x = strtod(text, &end);
    bool plain = *text != '\0' && strspn(text, "0123456789.e+-") == strlen(text) && *end == '\0';
    bool above = o->flags & OPTION_OPEN ? x > o->from : x >= o->from;
    if ((o->flags & OPTION_AUTO) && (strcmp(text, "auto") == 0 || strcmp(text, "-1") == 0))
        x = -1;
    else if (!plain || !above || !(x <= o->to))
        return err(ERR_ARG, "must be a number, %s%.15g to %.15g",
                   o->flags & OPTION_OPEN ? "above " : "", o->from, o->to);
    *field = x;
    return OK;
}

static status set_flag(void *field, const char *text)
{
    bool on = strcmp(text, "true") == 0 || strcmp(text, "1") == 0 || strcmp(text, "on") == 0;
    if (!on && strcmp(text, "false") != 0 && strcmp(text, "0") != 0 && strcmp(text, "off") != 0)
        return err(ERR_ARG, "must be true or false");
    *(bool *)field = on;
    return OK;
}

static status add_item(struct config *cfg, struct option_list *l, const char *p, size_t len)
{
    if (l->n == l->room) {
        uint32_t room = l->room == 0 ? 8 : l->room * 2;
        l->v = mem_grow(l->v, l->room * sizeof *l->v, room * sizeof *l->v);
        l->room = room;
    }
    char *item = arena_strdup(&cfg->memory, p, len);
    if (item == NULL)
        return err(ERR_ARG, "too much text");
    l->v[l->n++] = item;
    return OK;
}

static status set_list(const struct option *o, struct config *cfg, struct option_list *l,
                       const char *text)
{
    if (*text == '\0')
        return err(ERR_ARG, "must not be empty");
    if (!(o->flags & OPTION_COMMA))
        return add_item(cfg, l, text, strlen(text));
    for (const char *p = text; *p != '\0';) {
        size_t n = strcspn(p, ",");
        if (n > 0)
            TRY(add_item(cfg, l, p, n));
        p += n + (p[n] == ',');
    }
    return OK;
}

static bool is_choice(const char *choices, const char *text)
{
    size_t len = strlen(text);
    for (const char *p = choices; *p != '\0';) {
        size_t n = strcspn(p, "|");
        if (n == len && strncasecmp(p, text, n) == 0)
            return true;
        p += n + (p[n] == '|');
    }
    return false;
}

static status set_text(const struct option *o, struct config *cfg, void *field, const char *text)
{
    char *copy = arena_strdup(&cfg->memory, text, strlen(text));
    if (copy == NULL)
        return err(ERR_ARG, "too much text");
    if (o->choices != NULL) /* VLLM_LOGGING_LEVEL is written in capitals */
        for (char *c = copy; *c != '\0'; c++)
            if (*c >= 'A' && *c <= 'Z')
                *c = (char)(*c - 'A' + 'a');
    *(const char **)field = copy;
    return OK;
}

status options_set(const struct option *o, struct config *cfg, const char *text)
{
    void *field = (char *)cfg + o->offset;
    if (o->choices != NULL && !is_choice(o->choices, text))
        return err(ERR_ARG, "must be one of %s", o->choices);
    switch (o->type) {
    case OPTION_FLAG: return set_flag(field, text);
    case OPTION_COUNT:
    case OPTION_BYTES: return set_count(o, field, text);
    case OPTION_SECONDS: return set_seconds(o, field, text);
    case OPTION_NUMBER: return set_number(o, field, text);
    case OPTION_LIST: return set_list(o, cfg, field, text);
    case OPTION_TEXT: break;
    }
    return set_text(o, cfg, field, text);
}

void options_clear(const struct option *o, struct config *cfg)
{
    if (o->type == OPTION_LIST)
        ((struct option_list *)(void *)((char *)cfg + o->offset))->n = 0;
}

static void list_text(const struct option_list *l, char *out, size_t room)
{
    size_t at = 0;
    for (uint32_t i = 0; i < l->n && at < room; i++)
        at += (size_t)snprintf(out + at, room - at, "%s%s", i == 0 ? "" : ",", l->v[i]);
}

static void count_text(const struct option *o, const void *field, char *out, size_t room)
{
    uint64_t n = 0;
    uint32_t small = 0;
    memcpy(o->size == 4 ? (void *)&small : (void *)&n, field, o->size);
    n += small;
    if (n == 0 && (o->flags & OPTION_AUTO))
        snprintf(out, room, "auto");
    else
        snprintf(out, room, "%llu", (unsigned long long)n);
}

static void number_text(const struct option *o, const double *x, char *out, size_t room)
{
    if ((o->flags & OPTION_AUTO) && *x < 0)
        snprintf(out, room, "auto");
    else
        snprintf(out, room, "%.9g", *x);
}

void options_text(const struct option *o, const struct config *cfg, char *out, size_t room)
{
    const void *field = (const char *)cfg + o->offset;
    const char *text;
    uint64_t us;
    out[0] = '\0';
    if (o->flags & OPTION_SECRET) {
        snprintf(out, room, "***");
        return;
    }
    switch (o->type) {
    case OPTION_FLAG: snprintf(out, room, "%s", *(const bool *)field ? "true" : "false"); break;
    case OPTION_COUNT:
    case OPTION_BYTES: count_text(o, field, out, room); break;
    case OPTION_SECONDS:
        memcpy(&us, field, sizeof us);
        snprintf(out, room, "%g", (double)us / 1e6);
        break;
    case OPTION_NUMBER: number_text(o, field, out, room); break;
    case OPTION_LIST: list_text(field, out, room); break;
    case OPTION_TEXT:
        memcpy(&text, field, sizeof text);
        snprintf(out, room, "%s", text == NULL ? "" : text);
        break;
    }
}
