/* spind: one binary, a table of verbs. The only place that reads the environment. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "api/load/load.h"
#include "engine/tool/tool.h"
#include "server/key.h"
#include "server/serve.h"

#include <unistd.h>

/* Where `make serve` puts the default model (configs/setup/model.sh), if it is there. */
static const char *default_model(const struct outside *out)
{
    static char path[4096];
    const char *cache = out->env("SPIND_CACHE"), *xdg = out->env("XDG_CACHE_HOME");
    const char *home = out->env("HOME");
    const char *root = cache ? cache : xdg ? xdg : home ? home : "";
    snprintf(path, sizeof path, "%s%s/models/SmolLM2-135M-Instruct.Q4_1.gguf", root,
             cache ? ""
             : xdg ? "/spind"
                   : "/.cache/spind");
    return access(path, R_OK) == 0 ? path : NULL;
}

static int evaluate_run(int argc, char **argv, const struct outside *out)
{
    return eval_verb(argc, argv, default_model(out));
}

static int calibrate_run(int argc, char **argv, const struct outside *out)
{
    return calibrate_verb(argc, argv, default_model(out));
}

static int locality_run(int argc, char **argv, const struct outside *out)
{
    (void)out;
    return locality_verb(argc, argv);
}

/* A URL, or the flags of serve. */
static int inspect_run(int argc, char **argv, const struct outside *out)
{
    static struct config cfg;
    if (argc == 1 && strncmp(argv[0], "http", 4) == 0)
        return inspect_url(argv[0]);
    if (config_load(&cfg, argc, argv, out->env) != OK) {
        fprintf(stderr, "spind inspect: %s\n", err_text());
        return EXIT_USAGE;
    }
    if (cfg.engine.model == NULL && strcmp(cfg.engine.device, "mock") != 0)
        cfg.engine.model = default_model(out);
    int code = inspect_plan(&cfg.engine);
    config_fini(&cfg);
    return code;
}

/* serve: over HTTP, any server's; else the engine alone. */
static int bench_run(int argc, char **argv, const struct outside *out)
{
    if (argc > 0 && strcmp(argv[0], "serve") == 0)
        return load_verb(argc - 1, argv + 1);
    return bench_verb(argc, argv, default_model(out));
}

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
    {"check-config", "check the flags and files of serve, and say what it would use", check_run},
    {"eval", "measure the quality of sparse attention on a model", evaluate_run},
    {"calibrate", "measure which heads look far back, for --head-policy razor", calibrate_run},
    {"locality", "measure how local recorded selections are", locality_run},
    {"bench", "measure speed: of steps, of prompts, of a server under load", bench_run},
    {"inspect", "say where the bytes are: of the flags of serve, or of http://HOST:PORT",
     inspect_run},
    {"key", "make an API key for a tenant of --tenants", key_run},
    {"version", "print the version", version_run},
    {"help", "this text", help_run},
};

static int help_run(int argc, char **argv, const struct outside *out)
{
    (void)argc, (void)argv;
    printf("spind %s: a serving daemon for large language models with long contexts\n\n",
           out->version);
    for (size_t i = 0; i < ARRAY_LEN(verbs); i++)
        printf("  spind %-12s  %s\n", verbs[i].name, verbs[i].help);
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
