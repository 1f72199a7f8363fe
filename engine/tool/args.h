/* Words behind a verb: a table of options of the tools. (The server's own table lives above us, in
 * server/; where a tool has the server's option it has the server's name.) */
#ifndef ENGINE_TOOL_ARGS_H
#define ENGINE_TOOL_ARGS_H

#include "kernels/base.h"

enum args_type {
    ARGS_FLAG,   /* bool */
    ARGS_COUNT,  /* uint32_t in [min, max] */
    ARGS_NUMBER, /* double in [min, max] */
    ARGS_TEXT,   /* const char * */
    ARGS_LIST,   /* struct args_list: repeated, or separated by commas */
};

enum { ARGS_LIST_MAX = 64 };

struct args_list {
    const char *v[ARGS_LIST_MAX];
    uint32_t n;
};

struct args_option {
    const char *name; /* without dashes */
    enum args_type type;
    void *to;
    double min, max;
    const char *help;
};

/* Takes --name value, --name=value and, for flags, --name and --no-name. Words without dashes go to
 * `words` (NULL: refused). *help: --help was there, and nothing else matters. Texts are borrowed from
 * argv, whose list values are cut at commas in place. ERR_ARG names the word and what is allowed. */
status args_parse(const struct args_option *options, uint32_t n, int argc, char **argv,
                  struct args_list *words, bool *help);
void args_print(const struct args_option *options, uint32_t n); /* on stdout */

#endif
