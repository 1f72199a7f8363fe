/* spind: one binary, a table of verbs. The only place that reads the environment. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/serve.h"

static int version_run(int argc, char **argv, const struct outside *out)
{
    (void)argc, (void)argv;
    printf("spind %s\n", out->version);
    return EXIT_OK;
}

static int help_run(int argc, char **argv, const struct outside *out);

static const struct verb {
    const char *name, *help;
    int (*run)(int argc, char **argv, const struct outside *out); /* argv: what follows the verb */
} verbs[] = {
    {"serve", "serve a model over the OpenAI API; 'spind MODEL' is the same", serve_run},
    {"version", "print the version", version_run},
    {"help", "this text", help_run},
};

static int help_run(int argc, char **argv, const struct outside *out)
{
    (void)argc, (void)argv;
    printf("spind %s: a serving daemon for large language models with long contexts\n\n",
           out->version);
    for (size_t i = 0; i < ARRAY_LEN(verbs); i++)
        printf("  spind %-8s  %s\n", verbs[i].name, verbs[i].help);
    printf("\nspind serve --help lists the options, --help=GROUP some of them.\n");
    return EXIT_OK;
}

int main(int argc, char **argv)
{
    const struct outside out = {getenv, SPIND_VERSION};
    if (argc < 2 || strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0)
        return help_run(0, NULL, &out), argc < 2 ? EXIT_USAGE : EXIT_OK;
    if (strcmp(argv[1], "--version") == 0 || strcmp(argv[1], "-V") == 0)
        return version_run(0, NULL, &out);
    for (size_t i = 0; i < ARRAY_LEN(verbs); i++)
        if (strcmp(argv[1], verbs[i].name) == 0)
            return verbs[i].run(argc - 2, argv + 2, &out);
    return serve_run(argc - 1, argv + 1, &out); /* spind MODEL, spind --port 80 ... */
}
