/* `spind eval quality`: everything that docs/quality.md says, in one command. With --cache, pieces that
 * this very program has measured before (same file, text, model and seed) are not measured again.
 *
 * Beside our numbers stand those that reference/selection.md measured with `transformers` on another
 * novel: the same algorithm should be near. */
#include "engine/tool/eval.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

enum { MAX_LINES = 12, BUDGETS = 4, ROOM = 512 };

static const double budgets[BUDGETS] = {0.02, 0.05, 0.1, 0.25};

struct line {
    const char *plugin, *options;
    double known[BUDGETS]; /* what selection.md has; 0: nothing */
};

enum kind { KL, PASSKEY, RULER, TURNS, ROBUSTNESS, PLANTED };

struct piece {
    const char *name, *title, *text;
    enum kind kind;
    uint32_t block_rows, context, n_budgets, count; /* count: tokens, depths, samples or rows */
    struct line lines[MAX_LINES];
};

static const struct piece pieces[] = {
    {.name = "kl-8",
     .title = "KL to dense, pages of 8 rows",
     .text = "`wave` with its presets is the quality setting: a centroid and a few bits "
             "of every row's distance from it; `outliers=1` has the farthest row instead. "
             "`oracle` knows the true mass of each partition: on pages of consecutive rows, or on "
             "wave's clusters.",
     .kind = KL,
     .block_rows = 8,
     .context = 7232,
     .n_budgets = 4,
     .count = 192,
     .lines = {{"dense", "", {0}},
               {"wave", "", {0}},
               {"wave", "codes=off,outliers=0", {0.040, 0.0150}},
               {"wave", "outliers=1", {0.023, 0.0104}},
               {"wave", "outliers=2", {0.0165}},
               {"wave", "outliers=1,coarse_group=4,coarse_open=0.5", {0.0226}},
               {"wave", "outliers=1,coarse_group=4,coarse_open=0.25", {0.0242}},
               {"oracle", "layout=wave", {0.0126}},
               {"oracle", "", {0}},
               {"quest", "", {0}}}},
    {.name = "kl-16",
     .title = "KL to dense, pages of 16 rows",
     .text = "`wave` with its presets is the speed setting: a centroid alone. `balance=off` is the "
             "paper's free k-means in segments. selection.md clustered the whole context at once "
             "in its "
             "section 1; in segments of 1,024 rows it measured 0.019 for 5 %.",
     .kind = KL,
     .block_rows = 16,
     .context = 7232,
     .n_budgets = 4,
     .count = 192,
     .lines = {{"wave", "", {0.038, 0.016, 0.0066}},
               {"wave", "outliers=1", {0.060, 0.0194}},
               {"wave", "outliers=2", {0, 0.0179}},
               {"wave", "estimate=0", {0}},
               {"wave", "estimate=1", {0}},
               {"wave", "reduce=sum_prob", {0}},
               {"wave", "coarse_group=8,coarse_open=0.5", {0, 0.0168}},
               {"wave", "coarse_group=4,coarse_open=0.25", {0, 0.0183}},
               {"wave", "balance=off", {0.034, 0.015, 0.0070}},
               {"wave", "balance=off,estimate=0", {0.059, 0.023, 0.0095}},
               {"oracle", "", {0, 0.028, 0.012}},
               {"quest", "", {0.149, 0.075, 0.044}}}},
    {.name = "passkey-8",
     .title = "Pass keys, pages of 8 rows",
     .text =
         "A pass key in 7,200 tokens, the question in completion form through the sparse path, one "
         "prompt for each depth. Depths in the last 1,056 positions are in the tail: kept by every "
         "method. selection.md: six prompts, 7,360 tokens.",
     .kind = PASSKEY,
     .block_rows = 8,
     .context = 7200,
     .n_budgets = 2,
     .count = 32,
     .lines = {{"wave", "", {0}},
               {"wave", "outliers=0", {0}},
               {"wave", "outliers=2", {0}},
               {"wave", "coarse_group=4,coarse_open=0.5", {0}},
               {"oracle", "layout=wave", {0}},
               {"quest", "", {0}}}},
    {.name = "passkey-16",
     .title = "Pass keys, pages of 16 rows",
     .text = "The same with fewer depths.",
     .kind = PASSKEY,
     .block_rows = 16,
     .context = 7200,
     .n_budgets = 2,
     .count = 16,
     .lines = {{"wave", "", {0}},
               {"wave", "outliers=1", {0}},
               {"wave", "outliers=2", {0}},
               {"wave", "balance=off", {0}},
               {"oracle", "", {0}},
               {"quest", "", {0}}}},
    {.name = "ruler-8",
     .title = "RULER's tasks in completion form, pages of 8 rows",
     .text =
         "What dense gets right, and what of that is kept; log p is of the true answer, per token. "
         "A task that dense cannot do at this size says nothing but its log-probabilities.",
     .kind = RULER,
     .block_rows = 8,
     .context = 7200,
     .n_budgets = 2,
     .count = 2,
     .lines = {{"wave", "", {0}}, {"quest", "", {0}}}},
    {.name = "turns-8",
     .title = "Five questions in a row, pages of 8 rows",
     .text = "One context of 7,200 tokens with five pass keys; the answers stay in the history.",
     .kind = TURNS,
     .block_rows = 8,
     .context = 7200,
     .n_budgets = 3,
     .count = 4,
     .lines = {{"wave", "", {0}}, {"oracle", "layout=wave", {0}}, {"quest", "", {0}}}},
    {.name = "robustness-8",
     .title = "Robustness of the selection, pages of 8 rows",
     .text =
         "A query is (row, layer, KV head). recall@K: the share of its K heaviest rows that is "
         "attended exactly; R-0.9@64: the share of the queries with a recall of 0.9 at least; "
         "mass: "
         "the share of the candidates' attention. Rows of a page come along, so recall@256 cannot "
         "be 1 at 2 %.",
     .kind = ROBUSTNESS,
     .block_rows = 8,
     .context = 7232,
     .n_budgets = 3,
     .count = 32,
     .lines = {{"wave", "", {0}},
               {"oracle", "layout=wave", {0}},
               {"oracle", "", {0}},
               {"quest", "", {0}}}},
    {.name = "planted-8",
     .title = "Planted traces, 2 % budget, pages of 8 rows",
     .text =
         "Keys and queries without a model: 16 planted tokens hold 80 % of each query's attention. "
         "Each trace is made to break one kind of algorithm (engine/tool/planted.h).",
     .kind = PLANTED,
     .block_rows = 8,
     .count = 32},
};

/* ---- measuring a piece ---- */

static status settings_of(struct eval *e, const struct piece *p)
{
    e->n_settings = 0;
    for (uint32_t i = 0; i < MAX_LINES && p->lines[i].plugin; i++)
        for (uint32_t b = 0; b < p->n_budgets; b++)
            if (strcmp(p->lines[i].plugin, "dense") != 0 || b == 0)
                TRY(eval_add_setting(e, NULL, p->lines[i].plugin, p->lines[i].options, budgets[b]));
    return OK;
}

static void words_of(struct eval *e, const struct piece *p)
{
    static const char *const traces[] = {"8192", "131072"}, *const compared[] = {"wave", "quest"};
    e->block_rows = p->block_rows;
    e->context = p->context;
    e->tokens = e->depths = e->samples = e->rows = p->count;
    e->lengths.n = e->tasks.n = e->plugins.n = e->options.n = e->budgets.n = 0;
    if (p->kind == RULER) {
        e->lengths.v[e->lengths.n++] = "2048";
        e->lengths.v[e->lengths.n++] = "7200";
        for (uint32_t i = 0; i < tasks_count(); i++) /* the others are pieces of their own */
            if (strcmp(tasks_name(i), "passkey") != 0 && strcmp(tasks_name(i), "turns") != 0)
                e->tasks.v[e->tasks.n++] = tasks_name(i);
    }
    for (uint32_t i = 0; i < 2 && p->kind == PLANTED; i++) {
        e->lengths.v[e->lengths.n++] = traces[i];
        e->plugins.v[e->plugins.n++] = compared[i];
    }
    e->budgets.v[e->budgets.n++] = "0.02";
}

static status measure(struct eval *e, const struct piece *p, cJSON *rows)
{
    words_of(e, p);
    if (p->kind == PLANTED)
        return eval_planted_rows(e, rows);
    uint32_t room = p->context + ROOM;
    if (e->run == NULL || eval_run_memory(e->run)->geo->block_rows != p->block_rows) {
        TRY(eval_open(e, 7232 + ROOM));
        TRY(eval_read_text(e, room));
    }
    TRY(settings_of(e, p));
    switch (p->kind) {
    case KL: eval_expect(e, e->n_settings); return eval_kl_rows(e, rows);
    case PASSKEY: eval_expect(e, p->count); return eval_passkey_rows(e, rows);
    case RULER:
        eval_expect(e, e->lengths.n * e->tasks.n * p->count);
        return eval_ruler_rows(e, rows);
    case TURNS: eval_expect(e, p->count); return eval_turns_rows(e, rows);
    default: eval_expect(e, e->n_settings); return eval_robustness_rows(e, rows);
    }
}

/* ---- pieces already measured ---- */

/* What must be equal for a number to be the same. */
static void key_of(const struct eval *e, char *out, size_t room)
{
    struct stat self = {0}, text = {0};
    stat("/proc/self/exe", &self);
    if (e->text_file)
        stat(e->text_file, &text);
    snprintf(out, room,
             "program %lld.%09ld of %lld bytes, model %s, text %s of %lld bytes + %u, seed %u",
             (long long)self.st_mtim.tv_sec, self.st_mtim.tv_nsec, (long long)self.st_size,
             e->model, e->text_file ? e->text_file : "generated", (long long)text.st_size,
             e->offset, e->seed);
}

/* A sheet of the piece: from the cache, or measured now. */
static status piece_of(struct eval *e, const struct piece *p, cJSON **out)
{
    char file[4096], key[1024];
    key_of(e, key, sizeof key);
    snprintf(file, sizeof file, "%s/%s.json", e->cache ? e->cache : "", p->name);
    if (e->cache && sheet_load(out, file) == OK) {
        const cJSON *was = cJSON_GetObjectItem(*out, "key");
        if (cJSON_IsString(was) && strcmp(was->valuestring, key) == 0)
            return OK;
        cJSON_Delete(*out);
    }
    *out = sheet_create(p->name);
    cJSON_AddStringToObject(*out, "key", key);
    uint64_t start = clock_us();
    TRY(measure(e, p, cJSON_GetObjectItem(*out, "rows")));
    cJSON_AddNumberToObject(*out, "seconds", (double)(clock_us() - start) / 1e6);
    if (e->cache && mkdir(e->cache, 0777) != 0 && errno != EEXIST)
        return err(ERR_IO, "%s: %s", e->cache, strerror(errno));
    return sheet_save(*out, e->cache ? file : NULL);
}

/* ---- writing it down ---- */

static const struct sheet_column kl_columns[] = {
    {"plugin", "plug-in", SHEET_TEXT, 0},      {"budget", "budget", SHEET_PERCENT, 0},
    {"kl_mean", "KL", SHEET_FIXED, 5},         {"known", "selection.md", SHEET_FIXED, 4},
    {"kl_p99", "p99", SHEET_FIXED, 3},         {"top1", "same top-1", SHEET_PERCENT, 1},
    {"ppl", "perplexity", SHEET_FIXED, 3},     {"ppl_dense", "dense", SHEET_FIXED, 3},
    {"rows_attended", "rows", SHEET_COUNT, 0}, {"scan_bytes", "scanned bytes", SHEET_COUNT, 0},
};
static const struct sheet_column task_columns[] = {
    {"task", "task", SHEET_TEXT, 0},
    {"context", "context", SHEET_COUNT, 0},
    {"plugin", "plug-in", SHEET_TEXT, 0},
    {"budget", "budget", SHEET_PERCENT, 0},
    {"asked", "asked", SHEET_COUNT, 0},
    {"dense_right", "dense right", SHEET_COUNT, 0},
    {"kept", "kept", SHEET_COUNT, 0},
    {"kept_share", "share", SHEET_PERCENT, 0},
    {"kl", "KL of the answer", SHEET_FIXED, 3},
    {"logprob", "log p", SHEET_FIXED, 2},
    {"logprob_dense", "dense", SHEET_FIXED, 2},
};
static const struct sheet_column robust_columns[] = {
    {"plugin", "plug-in", SHEET_TEXT, 0},
    {"budget", "budget", SHEET_PERCENT, 0},
    {"recall_16", "recall@16", SHEET_FIXED, 3},
    {"recall_64", "@64", SHEET_FIXED, 3},
    {"recall_256", "@256", SHEET_FIXED, 3},
    {"recall_p5_64", "@64, worst 5 %", SHEET_FIXED, 3},
    {"robustness_0.5_64", "R-0.5@64", SHEET_FIXED, 3},
    {"robustness_0.9_64", "R-0.9@64", SHEET_FIXED, 3},
    {"mass", "mass", SHEET_FIXED, 3},
    {"mass_p5", "worst 5 %", SHEET_FIXED, 3},
};
static const struct sheet_column planted_columns[] = {
    {"mode", "trace", SHEET_TEXT, 0},
    {"context", "context", SHEET_COUNT, 0},
    {"plugin", "plug-in", SHEET_TEXT, 0},
    {"recall", "recall", SHEET_FIXED, 3},
    {"recall_p5", "p5", SHEET_FIXED, 3},
    {"found_all", "found all", SHEET_PERCENT, 0},
    {"error", "error of the output", SHEET_FIXED, 3},
};

static void write_table(FILE *f, const struct piece *p, const cJSON *rows)
{
    switch (p->kind) {
    case KL: sheet_markdown(f, rows, kl_columns, ARRAY_LEN(kl_columns)); break;
    case ROBUSTNESS: sheet_markdown(f, rows, robust_columns, ARRAY_LEN(robust_columns)); break;
    case PLANTED: sheet_markdown(f, rows, planted_columns, ARRAY_LEN(planted_columns)); break;
    default: sheet_markdown(f, rows, task_columns, ARRAY_LEN(task_columns)); break;
    }
}

/* What selection.md has for the same, beside ours. */
static void add_known(const struct piece *p, cJSON *rows)
{
    char label[48];
    cJSON *row;
    cJSON_ArrayForEach(row, rows) for (uint32_t i = 0; i < MAX_LINES && p->lines[i].plugin;
                                       i++) for (uint32_t b = 0; b < p->n_budgets; b++)
    {
        const struct line *l = &p->lines[i];
        snprintf(label, sizeof label, "%s%s%s", l->plugin, *l->options ? " " : "", l->options);
        if (l->known[b] > 0 && sheet_number(row, "budget") == budgets[b] &&
            strcmp(cJSON_GetObjectItem(row, "plugin")->valuestring, label) == 0)
            cJSON_AddNumberToObject(row, "known", l->known[b]);
    }
}

static void add_to_plot(struct plot *p, const cJSON *rows, const char *key, double times)
{
    char name[64];
    const cJSON *row;
    cJSON_ArrayForEach(row, rows)
    {
        const char *plugin = cJSON_GetObjectItem(row, "plugin")->valuestring;
        if (strstr(plugin, "coarse") || strstr(plugin, "estimate") || strstr(plugin, "reduce") ||
            strcmp(plugin, "dense") == 0)
            continue;
        snprintf(name, sizeof name, "%s, %g rows", plugin, sheet_number(row, "block_size"));
        plot_point(plot_series(p, name), 100 * sheet_number(row, "budget"),
                   times * sheet_number(row, key));
    }
}

static status save_plots(struct eval *e, cJSON *const *sheets)
{
    static struct plot kl = {.title = "KL of the sparse path to the dense one, 7,232 tokens",
                             .x_label = "budget, % of the context",
                             .y_label = "KL, nats per token",
                             .log_x = true,
                             .log_y = true};
    static struct plot kept = {.title = "Pass keys kept of those that dense finds, 7,200 tokens",
                               .x_label = "budget, % of the context",
                               .y_label = "kept, %"};
    char file[4096];
    for (size_t i = 0; i < ARRAY_LEN(pieces); i++) {
        const cJSON *rows = cJSON_GetObjectItem(sheets[i], "rows");
        if (pieces[i].kind == KL)
            add_to_plot(&kl, rows, "kl_mean", 1);
        if (pieces[i].kind == PASSKEY)
            add_to_plot(&kept, rows, "kept_share", 100);
    }
    snprintf(file, sizeof file, "%s/quality-kl.svg", e->out);
    TRY(plot_save(&kl, file));
    snprintf(file, sizeof file, "%s/quality-passkey.svg", e->out);
    return plot_save(&kept, file);
}

/* Rows are measured on a day and a machine; a cached piece keeps its own. */
static void write_head(const struct eval *e, FILE *f, cJSON *const *sheets)
{
    double seconds = 0;
    for (size_t i = 0; i < ARRAY_LEN(pieces); i++)
        seconds += sheet_number(sheets[i], "seconds");
    fprintf(
        f,
        "# Quality, measured\n\n"
        "Written by `spind eval quality` (`make quality`); do not edit. What it means and what "
        "follows from it: docs/decisions.md.\n\n"
        "Model: %s. Text: %s. Machine: %s. Date: %s. It took %.0f minutes there.\n\n"
        "The first %u layers are dense. A prefill is computed densely, then the tokens behind it "
        "go "
        "through the sparse path, teacher-forced, each row with a selection of its own. A budget "
        "is "
        "rows of sealed positions, a share of the context; beside it the 16 sinks and the tail are "
        "attended. KL is that of the dense output to the sparse one, in nats per token. "
        "*selection.md* is what reference/selection.md measured for the same setting with another "
        "program (float32 digests, whole-context clusters where it says so) on another text.\n\n"
        "![KL by budget](quality-kl.svg)\n\n![Pass keys kept](quality-passkey.svg)\n",
        strrchr(e->model, '/') ? strrchr(e->model, '/') + 1 : e->model,
        e->text_file ? (strrchr(e->text_file, '/') ? strrchr(e->text_file, '/') + 1 : e->text_file)
                     : "generated prose",
        cJSON_GetObjectItem(sheets[0], "machine")->valuestring,
        cJSON_GetObjectItem(sheets[0], "date")->valuestring, seconds / 60, e->exempt_layers);
}

static status write_report(struct eval *e, cJSON *const *sheets)
{
    char file[4096];
    snprintf(file, sizeof file, "%s/quality.md", e->out);
    FILE *f = fopen(file, "w");
    if (f == NULL)
        return err(ERR_IO, "%s: %s", file, strerror(errno));
    write_head(e, f, sheets);
    for (size_t i = 0; i < ARRAY_LEN(pieces); i++) {
        cJSON *rows = cJSON_GetObjectItem(sheets[i], "rows");
        fprintf(f, "\n## %s\n\n%s\n\n", pieces[i].title, pieces[i].text);
        add_known(&pieces[i], rows);
        write_table(f, &pieces[i], rows);
    }
    if (fclose(f) != 0)
        return err(ERR_IO, "%s: %s", file, strerror(errno));
    printf("written: %s\n", file);
    return save_plots(e, sheets);
}

static status run(struct eval *e)
{
    cJSON *sheets[ARRAY_LEN(pieces)] = {0}, *all = cJSON_AddObjectToObject(e->sheet, "pieces");
    status st = e->out ? OK : err(ERR_ARG, "--out FOLDER: where quality.md goes");
    for (size_t i = 0; i < ARRAY_LEN(pieces) && st == OK; i++) {
        st = piece_of(e, &pieces[i], &sheets[i]);
        if (sheets[i] != NULL) /* the document owns them */
            cJSON_AddItemToObject(all, pieces[i].name, sheets[i]);
    }
    return st == OK ? write_report(e, sheets) : st;
}

const struct eval_command eval_quality = {"quality", "everything for docs/quality.md, in --out",
                                          NULL, run};
