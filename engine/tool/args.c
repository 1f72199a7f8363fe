#include "engine/tool/args.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct args_option *find(const struct args_option *options, uint32_t n,
                                      const char *name, size_t len)
{
    for (uint32_t i = 0; i < n; i++)
        if (strlen(options[i].name) == len && memcmp(options[i].name, name, len) == 0)
            return &options[i];
    return NULL;
}

static status unknown(const struct args_option *options, uint32_t n, const char *word)
{
    char known[1024] = "";
    for (uint32_t i = 0; i < n; i++) {
        size_t at = strlen(known);
        snprintf(known + at, sizeof known - at, "%s--%s", i ? ", " : "", options[i].name);
    }
    return err(ERR_ARG, "unknown option %s; there are %s", word, known);
}

static status add_items(const struct args_option *o, char *value)
{
    struct args_list *l = o->to;
    for (char *save, *item = strtok_r(value, ",", &save); item; item = strtok_r(NULL, ",", &save)) {
        if (l->n == ARGS_LIST_MAX)
            return err(ERR_ARG, "--%s: more than %d values", o->name, (int)ARGS_LIST_MAX);
        l->v[l->n++] = item;
    }
    return OK;
}

static status set_number(const struct args_option *o, const char *value)
{
    char *end;
    errno = 0;
    double x = strtod(value, &end);
    bool whole = o->type != ARGS_COUNT || x == floor(x);
    if (end == value || *end != '\0' || errno != 0 || !whole || !(x >= o->min && x <= o->max))
        return err(ERR_ARG, "--%s %s: wanted is a %s from %g to %g", o->name, value,
                   o->type == ARGS_COUNT ? "whole number" : "number", o->min, o->max);
    if (o->type == ARGS_COUNT)
        *(uint32_t *)o->to = (uint32_t)x;
    else
        *(double *)o->to = x;
    return OK;
}

static status set(const struct args_option *o, char *value)
{
    switch (o->type) {
    case ARGS_TEXT: *(const char **)o->to = value; return OK;
    case ARGS_LIST: return add_items(o, value);
    case ARGS_COUNT:
    case ARGS_NUMBER: return set_number(o, value);
    case ARGS_FLAG: break;
    }
    return err(ERR_ARG, "--%s takes no value", o->name);
}

/* One option at argv[*i]; moves on over its value. */
static status take(const struct args_option *options, uint32_t n, int argc, char **argv, int *i)
{
    char *name = argv[*i] + 2, *equals = strchr(name, '=');
    size_t len = equals ? (size_t)(equals - name) : strlen(name);
    const struct args_option *o = find(options, n, name, len);
    if (o == NULL && strncmp(name, "no-", 3) == 0) {
        o = find(options, n, name + 3, len - 3);
        if (o == NULL || o->type != ARGS_FLAG || equals)
            return unknown(options, n, argv[*i]);
        *(bool *)o->to = false;
        return OK;
    }
    if (o == NULL)
        return unknown(options, n, argv[*i]);
    if (o->type == ARGS_FLAG && !equals) {
        *(bool *)o->to = true;
        return OK;
    }
    if (equals)
        return set(o, equals + 1);
    if (*i + 1 == argc)
        return err(ERR_ARG, "--%s: its value is missing", o->name);
    return set(o, argv[++*i]);
}

status args_parse(const struct args_option *options, uint32_t n, int argc, char **argv,
                  struct args_list *words, bool *help)
{
    *help = false;
    for (int i = 0; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            *help = true;
            return OK;
        }
        if (strncmp(argv[i], "--", 2) == 0) {
            TRY(take(options, n, argc, argv, &i));
            continue;
        }
        if (words == NULL || argv[i][0] == '-')
            return unknown(options, n, argv[i]);
        if (words->n == ARGS_LIST_MAX)
            return err(ERR_ARG, "more than %d words", (int)ARGS_LIST_MAX);
        words->v[words->n++] = argv[i];
    }
    return OK;
}

void args_print(const struct args_option *options, uint32_t n)
{
    static const char *const value[] = {"", " N", " X", " TEXT", " A,B,.."};
    for (uint32_t i = 0; i < n; i++) {
        char left[64];
        snprintf(left, sizeof left, "--%s%s", options[i].name, value[options[i].type]);
        printf("  %-24s %s\n", left, options[i].help);
    }
}
