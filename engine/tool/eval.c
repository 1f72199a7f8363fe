/* `spind eval COMMAND`: how good each algorithm's answers are, on a real model.
 *
 * Every command compares the sparse path to the dense one behind the same prefill (eval_run.h), prints
 * progress on stderr and a table on stdout, and writes JSON and a plot where asked. */
#include "engine/tool/eval.h"

#include "engine/tool/prose.h"
#include "engine/tool/tool.h"
#include "kernels/log.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_TEXT = 256 << 20, PROSE_BYTES_PER_TOKEN = 6 };

static const struct eval_command *const commands[] = {&eval_kl,     &eval_passkey,    &eval_ruler,
                                                      &eval_turns,  &eval_robustness, &eval_planted,
                                                      &eval_quality};

/* ---- opening ---- */

status eval_open(struct eval *e, uint32_t max_positions)
{
    const struct eval_run_config cfg = {.model = e->model,
                                        .isa = e->isa,
                                        .n_threads = e->threads,
                                        .block_rows = e->block_rows,
                                        .exempt_layers = e->exempt_layers,
                                        .max_positions = max_positions,
                                        .rope_scale = e->rope_scale,
                                        .policy = e->policy,
                                        .policy_file = e->policy_file,
                                        .kv_type = e->kv_type};
    eval_run_close(e->run);
    e->run = NULL;
    if (e->model == NULL)
        return err(ERR_ARG, "no model given and the default one is not there: --model FILE.gguf "
                            "('make serve' gets a default one)");
    if (e->block_rows != 8 && e->block_rows != 16)
        return err(ERR_ARG, "--block-size %u: must be 8 or 16", e->block_rows);
    if (e->scratch == NULL)
        e->scratch = token_scratch_create();
    TRY(eval_run_open(&e->run, &cfg));
    e->geo = eval_run_memory(e->run)->geo;
    return OK;
}

void eval_shut(struct eval *e)
{
    eval_run_close(e->run);
    token_scratch_destroy(e->scratch);
    mem_free(e->text);
    mem_free(e->text_tokens);
    cJSON_Delete(e->sheet);
}

static status read_file(const char *path, char **out, size_t *len)
{
    status st = OK;
    FILE *f = fopen(path, "rb");
    if (f == NULL)
        return err(ERR_IO, "%s: %s", path, strerror(errno));
    long size = fseek(f, 0, SEEK_END) == 0 ? ftell(f) : -1;
    rewind(f);
    if (size <= 0 || size > MAX_TEXT) {
        st = err(ERR_ARG, "%s: must have 1 byte to 256 MiB", path);
    } else {
        *out = mem_alloc((size_t)size + 1);
        *len = fread(*out, 1, (size_t)size, f);
    }
    fclose(f);
    return st;
}

status eval_read_text(struct eval *e, uint32_t tokens)
{
    uint64_t wanted = (uint64_t)e->offset + tokens;
    size_t n;
    mem_free(e->text);
    mem_free(e->text_tokens);
    e->text = NULL;
    e->text_tokens = NULL;
    if (e->text_file != NULL)
        TRY(read_file(e->text_file, &e->text, &e->text_len));
    else
        e->text = prose_text(e->seed, wanted * PROSE_BYTES_PER_TOKEN, &e->text_len);
    e->text_tokens = mem_alloc((e->text_len + 1) * sizeof *e->text_tokens);
    TRY(tokenize(eval_run_tokenizer(e->run), e->scratch, e->text, e->text_len, 0, e->text_tokens,
                 e->text_len + 1, &n));
    e->n_text_tokens = (uint32_t)n;
    if (n < wanted)
        return err(ERR_ARG, "%s has %zu tokens, %llu are needed",
                   e->text_file ? e->text_file : "the generated text", n,
                   (unsigned long long)wanted);
    cJSON_DeleteItemFromObject(e->sheet, "text");
    cJSON_AddStringToObject(e->sheet, "text", e->text_file ? e->text_file : "generated prose");
    return OK;
}

/* ---- settings ---- */

double eval_list_number(const char *text, double *out)
{
    char *end;
    double v = strtod(text, &end);
    *out = end != text && *end == '\0' ? v : (double)NAN;
    return *out;
}

/* What every plug-in has; the budget is a word of its own. */
static bool is_common(const char *name)
{
    return strcmp(name, "interval") == 0 || strcmp(name, "min_rows") == 0 ||
           strcmp(name, "top_p") == 0;
}

static status set_option(struct sparse_choice *c, const char *name, const char *value)
{
    double v;
    if (!is_common(name))
        return sparse_choice_set(c, name, value);
    if (isnan(eval_list_number(value, &v)))
        return err(ERR_ARG, "%s must be a number, got %s", name, value);
    return sparse_choice_set_number(c, name, v);
}

static status set_options(struct sparse_choice *c, const char *options)
{
    char copy[256], *save;
    snprintf(copy, sizeof copy, "%s", options ? options : "");
    for (char *o = strtok_r(copy, ",", &save); o; o = strtok_r(NULL, ",", &save)) {
        char *value = strchr(o, '=');
        if (value == NULL)
            return err(ERR_ARG, "--option %s: wanted is name=value", o);
        *value++ = '\0';
        TRY(set_option(c, o, value));
    }
    return OK;
}

/* A name, or a file to load one from. */
static status find_plugin(const char *name, uint32_t *out)
{
    size_t len = strlen(name);
    if (strchr(name, '/') == NULL && (len < 3 || strcmp(name + len - 3, ".so") != 0))
        return sparse_find(name, out);
    TRY(sparse_load(name));
    *out = sparse_count() - 1;
    return OK;
}

static status add_choice(struct eval *e, const char *label, uint32_t plugin, const char *options,
                         double budget)
{
    struct sparse_traits t;
    if (e->n_settings == EVAL_MAX_SETTINGS)
        return err(ERR_ARG, "more than %d combinations of plug-ins and budgets",
                   (int)EVAL_MAX_SETTINGS);
    if (!(budget > 0))
        return err(ERR_ARG, "a budget must be a share of the context (0.05) or rows (512)");
    struct eval_setting *s = &e->settings[e->n_settings];
    s->choice = sparse_choice_make(plugin, (float)budget);
    s->choice.interval = e->interval;
    s->choice.top_p = (float)e->top_p;
    s->budget = budget;
    snprintf(s->label, sizeof s->label, "%s%s%s", label, options && *options ? " " : "",
             options ? options : "");
    TRY(set_options(&s->choice, options));
    TRY(sparse_choice_check(&s->choice, e->geo, &t));
    e->n_settings++;
    return OK;
}

status eval_add_setting(struct eval *e, const char *label, const char *plugin, const char *options,
                        double budget)
{
    uint32_t i;
    TRY(find_plugin(plugin, &i));
    return add_choice(e, label ? label : sparse_at(i)->name, i, options, budget);
}

status eval_make_settings(struct eval *e)
{
    char options[256] = "";
    e->n_settings = 0;
    for (uint32_t i = 0; i < e->options.n; i++) {
        size_t at = strlen(options);
        snprintf(options + at, sizeof options - at, "%s%s", i ? "," : "", e->options.v[i]);
    }
    for (uint32_t p = 0; p < e->plugins.n; p++) {
        uint32_t plugin;
        TRY(find_plugin(e->plugins.v[p], &plugin));
        for (uint32_t b = 0; b < e->budgets.n; b++) {
            double budget;
            eval_list_number(e->budgets.v[b], &budget);
            TRY(add_choice(e, sparse_at(plugin)->name, plugin, options, budget));
        }
    }
    return OK;
}

status eval_setting_row(struct eval *e, cJSON *row, const struct eval_setting *s, uint32_t context)
{
    struct eval_cost cost;
    TRY(eval_run_cost(e->run, &s->choice, context, &cost));
    cJSON_AddStringToObject(row, "plugin", s->label);
    cJSON_AddNumberToObject(row, "budget", s->budget);
    cJSON_AddNumberToObject(row, "block_size", e->block_rows);
    cJSON_AddNumberToObject(row, "context", context);
    cJSON_AddNumberToObject(row, "selected_rows", cost.budget);
    cJSON_AddNumberToObject(row, "rows_attended", cost.rows);
    cJSON_AddNumberToObject(row, "selected_share", cost.share);
    cJSON_AddNumberToObject(row, "scan_bytes", cost.scan_bytes);
    return OK;
}

/* ---- progress ---- */

void eval_expect(struct eval *e, uint32_t pieces)
{
    e->n_todo += pieces;
}

void eval_progress(struct eval *e, const char *fmt, ...)
{
    char text[256];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    e->n_done++;
    double spent = (double)(clock_us() - e->start_us) / 1e6;
    log_line(LOG_INFO, "[%u/%u, %.0f s, about %.0f s left] %s", e->n_done, e->n_todo, spent,
             spent / e->n_done * (e->n_todo > e->n_done ? e->n_todo - e->n_done : 0), text);
}

/* ---- the verb ---- */

static int usage(const struct args_option *o, uint32_t n)
{
    printf("spind eval COMMAND [options]\n\n");
    for (size_t i = 0; i < ARRAY_LEN(commands); i++)
        printf("  %-12s %s\n", commands[i]->name, commands[i]->help);
    printf("\n");
    args_print(o, n);
    return 0;
}

static const struct eval_command *find_command(const char *name)
{
    for (size_t i = 0; i < ARRAY_LEN(commands); i++)
        if (strcmp(commands[i]->name, name) == 0)
            return commands[i];
    return NULL;
}

static void preset(struct eval *e)
{
    e->block_rows = 8;
    e->kv_cache_dtype = "auto";
    e->exempt_layers = 1;
    e->context = 7232;
    e->tokens = 192;
    e->depths = 32;
    e->samples = 4;
    e->rows = 32;
    e->interval = 1;
    e->seed = 42;
    e->top_p = 1;
    e->rope_scale = 1;
    e->start_us = clock_us();
}

static void default_lists(struct eval *e)
{
    static const char *const budgets[] = {"0.02", "0.05", "0.1", "0.25"};
    if (e->plugins.n == 0)
        e->plugins.v[e->plugins.n++] = "wave";
    if (e->budgets.n == 0)
        for (size_t i = 0; i < ARRAY_LEN(budgets); i++)
            e->budgets.v[e->budgets.n++] = budgets[i];
}

static int run_command(struct eval *e, const struct eval_command *c)
{
    e->sheet = sheet_create(c->name);
    cJSON_AddStringToObject(e->sheet, "model", e->model ? e->model : "");
    cJSON_AddNumberToObject(e->sheet, "exempt_layers", e->exempt_layers);
    default_lists(e);
    status st = kv_type_find(e->kv_cache_dtype, &e->kv_type);
    cJSON_AddStringToObject(e->sheet, "kv_cache_dtype", kv_type_name(e->kv_type));
    if (st == OK)
        st = c->run(e);
    if (st == OK)
        st = sheet_save(e->sheet, e->json);
    if (st != OK)
        fprintf(stderr, "spind eval %s: %s\n", c->name, err_text());
    return st == OK ? 0 : st == ERR_ARG ? 2 : 1;
}

static void say_unknown(const char *command)
{
    fprintf(stderr,
            "spind eval: unknown command \"%s\"; there are kl, passkey, ruler, turns, robustness, "
            "planted, quality\n",
            command);
}

int eval_verb(int argc, char **argv, const char *model)
{
    struct eval *e = mem_alloc(sizeof *e); /* zeroed */
    const struct args_option options[] = {
        {"model", ARGS_TEXT, &e->model, 0, 0, "GGUF file; the default model if it is there"},
        {"plugin", ARGS_LIST, &e->plugins, 0, 0, "algorithms: dense, oracle, quest, wave, FILE.so"},
        {"option", ARGS_LIST, &e->options, 0, 0, "name=value of the plug-in's options"},
        {"budget", ARGS_LIST, &e->budgets, 0, 0, "shares of the context, or rows if above 1"},
        {"text", ARGS_TEXT, &e->text_file, 0, 0, "any text; without it prose is generated"},
        {"offset", ARGS_COUNT, &e->offset, 0, 1 << 28, "first token of the text to use"},
        {"context", ARGS_COUNT, &e->context, 128, 1 << 20, "tokens that are prefilled"},
        {"tokens", ARGS_COUNT, &e->tokens, 1, 8192, "kl: teacher-forced tokens behind them"},
        {"depths", ARGS_COUNT, &e->depths, 1, 1024, "passkey: prompts, at so many depths"},
        {"task", ARGS_LIST, &e->tasks, 0, 0, "ruler: tasks; all without it"},
        {"length", ARGS_LIST, &e->lengths, 0, 0, "ruler: contexts (2048,4096,7200)"},
        {"samples", ARGS_COUNT, &e->samples, 1, 1000, "ruler, turns: prompts for each"},
        {"rows", ARGS_COUNT, &e->rows, 1, 1024, "robustness, planted: queries"},
        {"mode", ARGS_LIST, &e->modes, 0, 0, "planted: kinds of traces; all without it"},
        {"block-size", ARGS_COUNT, &e->block_rows, 8, 32, "positions per block: 8 or 16"},
        {"kv-cache-dtype", ARGS_TEXT, &e->kv_cache_dtype, 0, 0, "of pages: auto, bf16, fp8"},
        {"exempt-layers", ARGS_COUNT, &e->exempt_layers, 0, 1024, "first layers that stay dense"},
        {"head-policy", ARGS_TEXT, &e->policy, 0, 0, "none, streaming, duo, razor"},
        {"head-policy-file", ARGS_TEXT, &e->policy_file, 0, 0, "of duo and razor"},
        {"interval", ARGS_COUNT, &e->interval, 1, 1024, "select in every n-th step"},
        {"top-p", ARGS_NUMBER, &e->top_p, 0, 1, "stop selecting at this share of the mass"},
        {"rope-scale", ARGS_NUMBER, &e->rope_scale, 1, 64, "longer contexts by NTK-aware RoPE"},
        {"threads", ARGS_COUNT, &e->threads, 0, 1024, "that compute; 0: all cores"},
        {"cpu-isa", ARGS_TEXT, &e->isa, 0, 0, "auto, avx512, avx2, scalar"},
        {"seed", ARGS_COUNT, &e->seed, 0, 1e9, "of generated texts and tasks"},
        {"json", ARGS_TEXT, &e->json, 0, 0, "file for the results"},
        {"svg", ARGS_TEXT, &e->svg, 0, 0, "file for a plot"},
        {"out", ARGS_TEXT, &e->out, 0, 0, "quality: folder for quality.md and its plots"},
        {"piece", ARGS_LIST, &e->pieces, 0, 0, "quality: measure these; others are as in --cache"},
        {"quick", ARGS_FLAG, &e->quick, 0, 0, "quality: short and few, to see that all works"},
        {"cache", ARGS_TEXT, &e->cache, 0, 0, "quality: folder of pieces already measured"},
    };
    struct args_list words = {0};
    bool help = argc == 0;
    int rc = 2;
    preset(e);
    e->model = model;
    const struct eval_command *c = argc > 0 ? find_command(argv[0]) : NULL;
    if (c != NULL && c->preset != NULL)
        c->preset(e);
    status st = argc == 0 ? OK
                          : args_parse(options, ARRAY_LEN(options), argc - (c != NULL),
                                       argv + (c != NULL), c ? NULL : &words, &help);
    if (help) {
        rc = usage(options, ARRAY_LEN(options));
    } else if (c == NULL) {
        say_unknown(argv[0]);
    } else if (st != OK) {
        fprintf(stderr, "spind eval %s: %s\n", c->name, err_text());
    } else {
        rc = run_command(e, c);
    }
    eval_shut(e);
    mem_free(e);
    return rc;
}
