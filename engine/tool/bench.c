/* `spind bench decode|prefill`: how fast is a step of the engine, by batch, context and plug-in; how fast
 * is a prompt? (`spind bench serve` asks a server over HTTP: api/load/.) */
#include "engine/tool/bench.h"

#include "engine/tool/tool.h"
#include "kernels/log.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct bench_command {
    const char *name, *help;
    status (*run)(struct bench *b);
} commands[] = {
    {"decode", "tokens a second of a step: batch x context x plug-in x budget x hot set",
     bench_decode},
    {"prefill", "seconds from a prompt to its first token", bench_prefill},
};

/* ---- words ---- */

status bench_numbers(struct bench_numbers *out, const struct args_list *words, const char *name,
                     const char *preset, double min, double max)
{
    out->n = 0;
    for (uint32_t i = 0; i < words->n || (words->n == 0 && i == 0); i++) {
        const char *text = words->n > 0 ? words->v[i] : preset;
        char *end;
        double x = strtod(text, &end);
        if (end == text || *end != '\0' || !(x >= min && x <= max))
            return err(ERR_ARG, "--%s %s: wanted are numbers from %g to %g", name, text, min, max);
        out->v[out->n++] = x;
    }
    return OK;
}

/* "8GiB", "512M", or bytes; NULL: 0. */
static status read_bytes(const char *name, const char *text, uint64_t *out)
{
    static const char *const units[] = {"", "K", "M", "G", "T"};
    char *end;
    *out = 0;
    if (text == NULL)
        return OK;
    double x = strtod(text, &end);
    for (size_t i = 0; i < ARRAY_LEN(units); i++) {
        char forms[3][8];
        snprintf(forms[0], sizeof forms[0], "%s", units[i]);
        snprintf(forms[1], sizeof forms[1], "%sB", units[i]);
        snprintf(forms[2], sizeof forms[2], "%siB", units[i]);
        for (int k = 0; k < 3; k++)
            if (end != text && x >= 0 && x < 1e15 && strcmp(end, forms[k]) == 0) {
                *out = (uint64_t)ldexp(x, 10 * (int)i);
                return OK;
            }
    }
    return err(ERR_ARG, "--%s %s: wanted is a size such as 8GiB", name, text);
}

/* ---- settings ---- */

static bool has_option(uint32_t plugin, const char *name, size_t len)
{
    const struct sparse_plugin *p = sparse_at(plugin);
    for (uint32_t i = 0; i < p->n_options; i++)
        if (strlen(p->options[i].name) == len && memcmp(p->options[i].name, name, len) == 0)
            return true;
    return false;
}

/* Those of --sparse-option that the plug-in has; used counts who was taken by anybody. */
static status set_options(struct bench *b, struct sparse_choice *c, bool *used)
{
    char name[32];
    for (uint32_t i = 0; i < b->options.n; i++) {
        const char *o = b->options.v[i];
        size_t len = strcspn(o, "=");
        if (o[len] != '=' || len >= sizeof name)
            return err(ERR_ARG, "--sparse-option %s: wanted is name=value", o);
        if (!has_option(c->plugin, o, len))
            continue;
        snprintf(name, sizeof name, "%.*s", (int)len, o);
        TRY(sparse_choice_set(c, name, o + len + 1));
        used[i] = true;
    }
    return OK;
}

static status add_setting(struct bench *b, uint32_t plugin, double budget, bool *used)
{
    if (b->n_settings == BENCH_MAX_SETTINGS)
        return err(ERR_ARG, "more than %d plug-ins and budgets", (int)BENCH_MAX_SETTINGS);
    struct bench_setting *s = &b->settings[b->n_settings++];
    s->budget = budget;
    s->choice = sparse_choice_make(plugin, budget > 0 ? (float)budget : 1);
    if (budget > 0)
        snprintf(s->label, sizeof s->label, "%s %g", sparse_at(plugin)->name, budget);
    else
        snprintf(s->label, sizeof s->label, "%s", sparse_at(plugin)->name);
    if (budget <= 0)
        return OK;
    s->choice.min_rows = b->min_rows;
    s->choice.top_p = (float)b->top_p;
    return set_options(b, &s->choice, used);
}

static status make_settings(struct bench *b)
{
    struct bench_numbers budgets;
    bool used[ARGS_LIST_MAX] = {false};
    uint32_t plugin;
    if (b->plugins.n == 0)
        b->plugins.v[b->plugins.n++] = "dense";
    TRY(bench_numbers(&budgets, &b->budgets, "sparse-budget", "0.02", 1e-9, 1 << 30));
    for (uint32_t i = 0; i < b->plugins.n; i++) {
        TRY(sparse_find(b->plugins.v[i], &plugin));
        bool dense = sparse_at(plugin)->score == NULL;
        for (uint32_t k = 0; k < (dense ? 1 : budgets.n); k++)
            TRY(add_setting(b, plugin, dense ? 0 : budgets.v[k], used));
    }
    for (uint32_t i = 0; i < b->options.n; i++)
        if (!used[i])
            return err(ERR_ARG, "--sparse-option %s: none of these plug-ins has it",
                       b->options.v[i]);
    return OK;
}

static status make_config(struct bench *b)
{
    struct engine_config *c = &b->config;
    *c = (struct engine_config){
        .model = b->model,
        .dummy = strcmp(b->load_format, "dummy") == 0,
        .device = b->device,
        .cpu = {.isa = b->isa, .n_threads = b->threads},
        .mock = {.step_us = b->mock_step_us},
        .block_rows = b->block_rows,
        .max_batched_tokens = b->chunk,
        .max_model_len = b->max_model_len,
        .heads = {.name = "none", .sparsity = -1, .exempt_layers = b->exempt_layers},
        .write_behind = true,
        .seed = b->seed + 1};
    if (!c->dummy && strcmp(b->load_format, "auto") != 0)
        return err(ERR_ARG, "--load-format %s: there are auto and dummy", b->load_format);
    TRY(kv_type_find(b->kv_cache_dtype, &c->kv_type));
    TRY(read_bytes("kv-hbm", b->kv_hbm, &c->kv_hbm_bytes));
    TRY(read_bytes("kv-dram", b->kv_dram, &c->kv_dram_bytes));
    for (uint32_t i = 0; i < b->n_settings; i++)
        if (b->settings[i].budget > 0 && c->sparse.plugin == 0)
            c->sparse = b->settings[i].choice; /* digests have room for what it asks */
    return OK;
}

/* ---- the verb ---- */

static int usage(const struct args_option *o, uint32_t n)
{
    printf("spind bench COMMAND [MODEL] [options]\n\n");
    for (size_t i = 0; i < ARRAY_LEN(commands); i++)
        printf("  %-10s %s\n", commands[i].name, commands[i].help);
    printf("  %-10s %s\n\n", "serve",
           "a load on an OpenAI server, ours or another's: see its --help");
    args_print(o, n);
    return 0;
}

static const struct bench_command *find_command(const char *name)
{
    for (size_t i = 0; i < ARRAY_LEN(commands); i++)
        if (strcmp(commands[i].name, name) == 0)
            return &commands[i];
    return NULL;
}

static int run_command(struct bench *b, const struct bench_command *c)
{
    char what[32];
    snprintf(what, sizeof what, "bench %s", c->name);
    b->sheet = sheet_create(what);
    status st = make_settings(b);
    if (st == OK)
        st = make_config(b);
    if (st == OK)
        st = c->run(b);
    if (st == OK)
        st = sheet_save(b->sheet, b->json);
    if (st != OK)
        fprintf(stderr, "spind bench %s: %s\n", c->name, err_text());
    cJSON_Delete(b->sheet);
    return st == OK ? 0 : st == ERR_ARG ? 2 : 1;
}

static void preset(struct bench *b, const char *model)
{
    b->model = model;
    b->device = "auto";
    b->isa = "auto";
    b->load_format = "auto";
    b->fill = "synthetic";
    b->block_rows = 16;
    b->kv_cache_dtype = "auto";
    b->steps = 64;
    b->warm = 8;
    b->chunk = 8192;
    b->exempt_layers = 1;
    b->repeat = 1;
    b->patience_s = 600;
    b->top_p = 1;
}

enum { GO_ON = -1 };

/* GO_ON, or an exit status: everything is said. */
static int check_words(struct bench *b, const struct bench_command *c, const char *name, status st,
                       const struct args_list *words)
{
    if (c == NULL) {
        fprintf(stderr, "spind bench: unknown command \"%s\"; there are decode, prefill, serve\n",
                name);
        return 2;
    }
    if (st == OK && words->n > 1)
        st = err(ERR_ARG, "%s: one model is enough", words->v[1]);
    if (st != OK) {
        fprintf(stderr, "spind bench %s: %s\n", c->name, err_text());
        return 2;
    }
    if (words->n == 1)
        b->model = words->v[0];
    return GO_ON;
}

static int read_words(struct bench *b, int argc, char **argv, const struct bench_command **c)
{
    const struct args_option options[] = {
        {"batch", ARGS_LIST, &b->batches, 0, 0, "decode: sequences that run together (1)"},
        {"context", ARGS_LIST, &b->contexts, 0, 0, "decode: tokens of each prompt (4096)"},
        {"sparse", ARGS_LIST, &b->plugins, 0, 0, "decode: dense, wave, quest, ... (dense)"},
        {"sparse-budget", ARGS_LIST, &b->budgets, 0, 0, "shares of the context, or rows (0.02)"},
        {"sparse-min-rows", ARGS_COUNT, &b->min_rows, 0, 1 << 30, "the budget is no fewer rows"},
        {"sparse-option", ARGS_LIST, &b->options, 0, 0, "name=value of the plug-ins' options"},
        {"sparse-top-p", ARGS_NUMBER, &b->top_p, 0, 1, "stop selecting at this share"},
        {"sparse-exempt-layers", ARGS_COUNT, &b->exempt_layers, 0, 1024, "first layers stay dense"},
        {"hot-set", ARGS_LIST, &b->hot, 0, 0,
         "decode: 0: all RESIDENT; x: HBM for hot sets of x "
         "times the selected rows, the rest SPILLED (0)"},
        {"feed", ARGS_LIST, &b->feeds, 0, 0,
         "decode: answers are drawn from so many tokens: few "
         "hit more; 0: greedy (0)"},
        {"fill", ARGS_TEXT, &b->fill, 0, 0,
         "decode: prompts' K and V: synthetic (random rows) or "
         "prefill (computed)"},
        {"steps", ARGS_COUNT, &b->steps, 1, 100000,
         "decode: measured steps (64); a whole number of 32 for hit rates"},
        {"churn", ARGS_COUNT, &b->churn, 0, 100000,
         "decode: every so many steps an answer ends and another begins (0: never)"},
        {"warm-up", ARGS_COUNT, &b->warm, 1, 100000, "decode: steps before them"},
        {"tokens", ARGS_LIST, &b->tokens, 0, 0, "prefill: lengths of prompts (4096)"},
        {"repeat", ARGS_COUNT, &b->repeat, 1, 100, "prefill: so often each; the median counts"},
        {"max-num-batched-tokens", ARGS_COUNT, &b->chunk, 1, 1 << 20, "rows of a step"},
        {"chunk", ARGS_COUNT, &b->chunk, 1, 1 << 20, "the same"},
        {"model", ARGS_TEXT, &b->model, 0, 0, "GGUF file, or config.json with dummy weights"},
        {"max-model-len", ARGS_COUNT, &b->max_model_len, 0, 1 << 24,
         "longest context; 0: the model's. Dummy weights take any"},
        {"load-format", ARGS_TEXT, &b->load_format, 0, 0, "auto, or dummy: random weights"},
        {"device", ARGS_TEXT, &b->device, 0, 0, "auto, cpu, cuda, mock"},
        {"threads", ARGS_COUNT, &b->threads, 0, 1024, "of the CPU; 0: all cores"},
        {"cpu-isa", ARGS_TEXT, &b->isa, 0, 0, "auto, avx512, avx2, scalar"},
        {"block-size", ARGS_COUNT, &b->block_rows, 8, 32, "positions per block: 8, 16 or 32"},
        {"kv-cache-dtype", ARGS_TEXT, &b->kv_cache_dtype, 0, 0, "of pages: auto, bf16, fp8"},
        {"kv-hbm", ARGS_TEXT, &b->kv_hbm, 0, 0, "of the first tier, e.g. 8GiB; else what is there"},
        {"kv-dram", ARGS_TEXT, &b->kv_dram, 0, 0, "of the second, without --hot-set"},
        {"mock-step-us", ARGS_COUNT, &b->mock_step_us, 0, 1e9,
         "a step of device mock takes so long"},
        {"debug", ARGS_FLAG, &b->debug, 0, 0, "a line for every step, and for every graph"},
        {"seed", ARGS_COUNT, &b->seed, 0, 1e9, "of prompts and draws"},
        {"patience", ARGS_COUNT, &b->patience_s, 1, 1e6, "seconds without a step: given up"},
        {"json", ARGS_TEXT, &b->json, 0, 0, "file for the results"},
        {"svg", ARGS_TEXT, &b->svg, 0, 0, "file for a plot"},
    };
    struct args_list words = {0};
    bool help = argc == 0;
    *c = argc > 0 ? find_command(argv[0]) : NULL;
    int skip = *c != NULL;
    status st = argc == 0 ? OK
                          : args_parse(options, ARRAY_LEN(options), argc - skip, argv + skip,
                                       &words, &help);
    if (help)
        return usage(options, ARRAY_LEN(options));
    return check_words(b, *c, argv[0], st, &words);
}

int bench_verb(int argc, char **argv, const char *model)
{
    struct bench *b = mem_alloc(sizeof *b); /* zeroed */
    const struct bench_command *c;
    preset(b, model);
    int code = read_words(b, argc, argv, &c);
    if (strcmp(b->device, "mock") == 0)
        b->model = NULL;
    if (b->debug)
        log_set_level(LOG_DEBUG);
    if (code == GO_ON)
        code = run_command(b, c);
    mem_free(b);
    return code;
}
