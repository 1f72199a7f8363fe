/* The table of options: one row per option generates the flags, the configuration file's keys, the
 * environment, --help, --print-config and the checks. Adding an option is adding a row and a field
 * of struct config. */
#ifndef SERVER_OPTIONS_H
#define SERVER_OPTIONS_H

#include "kernels/base.h"

struct config;

enum option_type {
    OPTION_FLAG,    /* bool; --name and --no-name */
    OPTION_COUNT,   /* unsigned; 32k = 32000, 32K = 32768, 25.6k, 1M */
    OPTION_BYTES,   /* likewise; also 4GiB */
    OPTION_SECONDS, /* decimal; stored in microseconds, uint64_t */
    OPTION_NUMBER,  /* decimal, double; "auto": -1 */
    OPTION_TEXT,
    OPTION_LIST, /* struct option_list */
};

enum {
    OPTION_SECRET = 1,    /* never printed */
    OPTION_AUTO = 2,      /* "auto" and -1 mean 0; of a NUMBER: -1 */
    OPTION_COMMA = 4,     /* a list's items may be separated by commas */
    OPTION_FLAG_ONLY = 8, /* not a key of the file */
    OPTION_OPEN = 16,     /* NUMBER: `from` itself is not allowed */
    OPTION_ONE = 32,      /* LIST: a flag takes one item; else all up to the next flag */
};

struct option_list {
    const char **v;
    uint32_t n, room;
};

struct option {
    const char *name;    /* with dashes */
    const char *aliases; /* "a, bb": one letter is -a, more is --bb; NULL: none */
    const char *group;
    enum option_type type;
    uint32_t flags;
    size_t offset;       /* in struct config */
    uint32_t size;       /* of the field: 4 or 8 for COUNT and BYTES */
    uint64_t min, max;   /* COUNT, BYTES; SECONDS in milliseconds */
    double from, to;     /* NUMBER */
    const char *choices; /* "a|b": the only values; NULL: any */
    const char *preset;  /* the default, as text; NULL: empty */
    const char *env;     /* "NAME, NAME": first one set wins; NULL: none */
    const char *help;
};

extern const struct option options_table[];
extern const uint32_t options_count;

/* vLLM flags that mean nothing here, so that existing start scripts work; a warning each. */
struct option_ignored {
    const char *name;
    bool takes_value;
};
extern const struct option_ignored options_ignored[];
extern const uint32_t options_ignored_count;

/* name[len] without its dashes; '_' counts as '-'. -1: unknown. */
int options_find(const char *name, size_t len);
int options_find_ignored(const char *name, size_t len);
bool options_same_name(const char *a, size_t a_len, const char *b);
/* The nearest known name, or NULL when none is near. */
const char *options_nearest(const char *name, size_t len);

/* Reads one value into its field; a list grows by one. Texts are borrowed. */
status options_set(const struct option *o, struct config *cfg, const char *text);
void options_clear(const struct option *o, struct config *cfg); /* empties a list */
/* The value as options_set would read it; lists joined by ','. Never prints a secret. */
void options_text(const struct option *o, const struct config *cfg, char *out, size_t room);

status options_number(const char *text, uint64_t *out); /* "25.6k" */

#endif
