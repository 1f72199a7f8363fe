/* What a load measured (tally.h), for people and for programs. */
#include "api/load/tally.h"
#include "engine/tool/plot.h"
#include "engine/tool/sheet.h"

#include <stdio.h>

static const struct sheet_column columns[] = {
    {"turn", "turn", SHEET_TEXT, 0},
    {"good", "good", SHEET_COUNT, 0},
    {"failed", "failed", SHEET_COUNT, 0},
    {"prompt_tokens", "prompt", SHEET_COUNT, 0},
    {"cached", "cached", SHEET_PERCENT, 1},
    {"ttft_p50_ms", "TTFT p50", SHEET_FIXED, 1},
    {"ttft_p90_ms", "p90", SHEET_FIXED, 1},
    {"ttft_p99_ms", "p99 ms", SHEET_FIXED, 1},
    {"tpot_p50_ms", "TPOT p50", SHEET_FIXED, 2},
    {"tpot_p90_ms", "p90", SHEET_FIXED, 2},
    {"tpot_p99_ms", "p99 ms", SHEET_FIXED, 2},
    {"itl_p50_ms", "ITL p50", SHEET_FIXED, 2},
    {"itl_p90_ms", "p90", SHEET_FIXED, 2},
    {"itl_p99_ms", "p99 ms", SHEET_FIXED, 2},
};

/* Milliseconds at place floor(q n), as vllm_longctx.py's pct. */
static double quantile_ms(struct measure_sample *s, double q)
{
    (void)measure_percentile(s, 50); /* puts them in order */
    uint32_t at = (uint32_t)(q * s->n);
    return s->v[at < s->n ? at : s->n - 1] / 1e3;
}

static void add_quantiles(cJSON *row, const char *what, struct measure_sample *s)
{
    static const int percents[] = {50, 90, 99};
    char key[32];
    if (s->n == 0)
        return;
    for (size_t i = 0; i < ARRAY_LEN(percents); i++) {
        snprintf(key, sizeof key, "%s_p%d_ms", what, percents[i]);
        cJSON_AddNumberToObject(row, key, quantile_ms(s, percents[i] / 100.0));
    }
    snprintf(key, sizeof key, "%s_mean_ms", what);
    cJSON_AddNumberToObject(row, key, measure_mean(s) / 1e3);
}

static void add_row(cJSON *sheet, const char *name, struct tally_row *r)
{
    cJSON *row = sheet_row(sheet);
    cJSON_AddStringToObject(row, "turn", name);
    cJSON_AddNumberToObject(row, "good", (double)r->n_good);
    cJSON_AddNumberToObject(row, "failed", (double)r->n_failed);
    if (r->n_good > 0) {
        double prompt = (double)r->prompt_tokens;
        cJSON_AddNumberToObject(row, "prompt_tokens", prompt / (double)r->n_good);
        cJSON_AddNumberToObject(row, "cached", prompt > 0 ? (double)r->cached_tokens / prompt : 0);
        cJSON_AddNumberToObject(row, "tokens_per_event",
                                (double)r->output_tokens / (double)r->events);
    }
    add_quantiles(row, "ttft", &r->ttft);
    add_quantiles(row, "tpot", &r->tpot);
    add_quantiles(row, "itl", &r->itl);
}

static void add_workload(cJSON *sheet, const struct load_spec *s)
{
    cJSON *w = cJSON_AddObjectToObject(sheet, "workload");
    cJSON_AddStringToObject(w, "name", s->name);
    const struct {
        const char *key;
        double value;
    } numbers[] = {{"users", s->users},
                   {"turns", s->turns},
                   {"keeps", s->keeps},
                   {"rate", s->rate},
                   {"stagger_s", s->stagger},
                   {"pause_s", s->pause},
                   {"shared", s->shared},
                   {"document", s->document},
                   {"in", s->in},
                   {"out", s->out},
                   {"seed", s->seed},
                   {"first_id", s->first_id},
                   {"last_id", s->last_id},
                   {"temperature", s->temperature}};
    for (size_t i = 0; i < ARRAY_LEN(numbers); i++)
        cJSON_AddNumberToObject(w, numbers[i].key, numbers[i].value);
    cJSON_AddStringToObject(w, "prompts", s->chat ? "chat" : s->text ? "text" : "ids");
    if (s->extra != NULL)
        cJSON_AddStringToObject(w, "extra", s->extra);
}

/* A conversation ends with an answer that failed. */
static uint64_t n_not_asked(const struct tally *t)
{
    uint64_t all = (uint64_t)t->spec->users * t->spec->turns;
    return all - t->all.n_good - t->all.n_failed - t->n_unfinished;
}

static void add_errors(cJSON *sheet, const struct tally *t)
{
    cJSON *list = cJSON_AddArrayToObject(sheet, "errors");
    for (uint32_t i = 0; i < t->n_errors; i++) {
        cJSON *e = cJSON_CreateObject();
        cJSON_AddStringToObject(e, "text", t->errors[i].text);
        cJSON_AddNumberToObject(e, "n", t->errors[i].n);
        cJSON_AddItemToArray(list, e);
    }
    cJSON_AddNumberToObject(sheet, "other_errors", t->n_other_errors);
    cJSON_AddNumberToObject(sheet, "unfinished", t->n_unfinished);
    cJSON_AddNumberToObject(sheet, "not_asked", (double)n_not_asked(t));
}

static double seconds(const struct tally *t)
{
    return (double)(t->ended_us - t->started_us) / 1e6;
}

/* How much slower the load was beside the flood than alone. */
static void add_flood(cJSON *sheet, struct tally *t, struct tally *alone, struct tally *flood)
{
    static const struct {
        const char *key;
        double q;
    } ratios[] = {{"ttft_p50_ratio", 0.5}, {"ttft_p99_ratio", 0.99}};
    cJSON *w = cJSON_AddObjectToObject(sheet, "flood");
    add_row(sheet, "alone", &alone->all);
    add_row(sheet, "flood", &flood->all);
    cJSON_AddNumberToObject(w, "users", flood->spec->users);
    cJSON_AddNumberToObject(w, "in", flood->spec->in);
    cJSON_AddNumberToObject(w, "out", flood->spec->out);
    cJSON_AddNumberToObject(w, "tokens_seen", (double)flood->tokens_seen);
    for (size_t i = 0; i < ARRAY_LEN(ratios) && t->all.n_good > 0 && alone->all.n_good > 0; i++)
        cJSON_AddNumberToObject(w, ratios[i].key,
                                quantile_ms(&t->all.ttft, ratios[i].q) /
                                    quantile_ms(&alone->all.ttft, ratios[i].q));
}

static cJSON *make_sheet(struct tally *t, const char *url)
{
    const struct load_spec *s = t->spec;
    cJSON *sheet = sheet_create("bench serve");
    char name[16];
    cJSON_AddStringToObject(sheet, "url", url);
    add_workload(sheet, s);
    for (uint32_t i = 0; s->keeps && i < s->turns && i < TALLY_MAX_TURNS; i++) {
        snprintf(name, sizeof name, "%u", i + 1);
        add_row(sheet, name, &t->turns[i]);
    }
    add_row(sheet, "all", &t->all);
    cJSON_AddNumberToObject(sheet, "seconds", seconds(t));
    cJSON_AddNumberToObject(sheet, "output_tokens", (double)t->all.output_tokens);
    cJSON_AddNumberToObject(sheet, "output_tokens_per_s",
                            (double)t->all.output_tokens / seconds(t));
    cJSON_AddNumberToObject(sheet, "tokens_per_s",
                            (double)(t->all.output_tokens + t->all.prompt_tokens) / seconds(t));
    cJSON_AddNumberToObject(sheet, "answers_per_s", (double)t->all.n_good / seconds(t));
    if (s->slo_ttft_us > 0 || s->slo_tpot_us > 0) {
        cJSON_AddNumberToObject(sheet, "slo_ttft_ms", s->slo_ttft_us / 1e3);
        cJSON_AddNumberToObject(sheet, "slo_tpot_ms", s->slo_tpot_us / 1e3);
        cJSON_AddNumberToObject(sheet, "in_time", (double)t->n_in_time);
        cJSON_AddNumberToObject(sheet, "goodput_per_s", (double)t->n_in_time / seconds(t));
    }
    add_errors(sheet, t);
    if (t->interrupted)
        cJSON_AddTrueToObject(sheet, "interrupted");
    return sheet;
}

static void print_goodput(const struct tally *t)
{
    const struct load_spec *s = t->spec;
    uint64_t asked = t->all.n_good + t->all.n_failed + t->n_unfinished;
    if (s->slo_ttft_us <= 0 && s->slo_tpot_us <= 0)
        return;
    printf("within");
    if (s->slo_ttft_us > 0)
        printf(" TTFT %g ms", s->slo_ttft_us / 1e3);
    if (s->slo_tpot_us > 0)
        printf(" TPOT %g ms", s->slo_tpot_us / 1e3);
    printf(": %llu of %llu answers, %.3f/s\n", (unsigned long long)t->n_in_time,
           (unsigned long long)asked, (double)t->n_in_time / seconds(t));
}

static void print_notes(const struct tally *t)
{
    const struct tally_row *a = &t->all;
    if (a->events > 0 && (double)a->output_tokens > 1.005 * (double)a->events)
        printf("%.2f tokens per event: an ITL is between events\n",
               (double)a->output_tokens / (double)a->events);
    if (t->no_usage)
        printf("the server sent no usage: tokens are counted by events\n");
    if (t->n_stand_ins > 0)
        printf("%u answers came without token_ids: other ids took their place in the next prompt\n",
               t->n_stand_ins);
    if (t->interrupted)
        printf("INTERRUPTED: not all that was to be asked was asked\n");
    if (n_not_asked(t) > 0)
        printf("NOT ASKED: %llu answers, of users who stopped\n",
               (unsigned long long)n_not_asked(t));
    if (t->n_unfinished > 0)
        printf("UNFINISHED: %u answers were still being written\n", t->n_unfinished);
    uint64_t over = a->n_good + a->n_failed;
    if (a->n_failed > 0)
        printf("FAILED: %llu of %llu answers\n", (unsigned long long)a->n_failed,
               (unsigned long long)over);
    for (uint32_t i = 0; i < t->n_errors; i++)
        printf("  %6u  %s\n", t->errors[i].n, t->errors[i].text);
    if (t->n_other_errors > 0)
        printf("  %6u  others\n", t->n_other_errors);
}

static void print_flood(const cJSON *sheet, const struct tally *flood)
{
    const cJSON *w = cJSON_GetObjectItem(sheet, "flood");
    printf("beside a flood of %u users (%u in, %u out; %llu answers, %llu refused or failed, %llu "
           "tokens): TTFT %.2fx at p50, %.2fx at p99 of alone\n",
           flood->spec->users, flood->spec->in, flood->spec->out,
           (unsigned long long)flood->all.n_good, (unsigned long long)flood->all.n_failed,
           (unsigned long long)flood->tokens_seen, sheet_number(w, "ttft_p50_ratio"),
           sheet_number(w, "ttft_p99_ratio"));
    for (uint32_t i = 0; i < flood->n_errors; i++)
        printf("  %6u  %s\n", flood->errors[i].n, flood->errors[i].text);
}

static void print_report(const struct tally *t, const cJSON *sheet)
{
    sheet_print(stdout, cJSON_GetObjectItem(sheet, "rows"), columns, ARRAY_LEN(columns));
    printf("\n%.1f s, %llu tokens out: %.1f tok/s out, %.1f in and out, %.3f answers/s\n",
           seconds(t), (unsigned long long)t->all.output_tokens,
           sheet_number(sheet, "output_tokens_per_s"), sheet_number(sheet, "tokens_per_s"),
           sheet_number(sheet, "answers_per_s"));
    print_goodput(t);
    print_notes(t);
    fflush(stdout);
}

static void draw(struct plot *p, const char *name, struct measure_sample *s)
{
    for (int percent = 2; percent < 100 && s->n > 0; percent += percent < 98 ? 2 : 1)
        plot_point(plot_series(p, name), percent, quantile_ms(s, percent / 100.0));
}

static status save_plot(struct tally *t, const char *file)
{
    char title[160], name[48];
    struct plot *p = mem_alloc(sizeof *p);
    snprintf(title, sizeof title, "%s: %llu answers, %.1f tok/s", t->spec->name,
             (unsigned long long)t->all.n_good, (double)t->all.output_tokens / seconds(t));
    p->title = title;
    p->x_label = "percent of the answers (ITL: of the events) are at least as fast";
    p->y_label = "ms";
    p->log_y = true;
    bool by_turn = t->spec->keeps && t->spec->turns > 1;
    for (uint32_t i = 0; by_turn && i < t->spec->turns && i < 6; i++) {
        snprintf(name, sizeof name, "TTFT, turn %u", i + 1);
        draw(p, name, &t->turns[i].ttft);
    }
    if (!by_turn)
        draw(p, "TTFT", &t->all.ttft);
    draw(p, "TPOT", &t->all.tpot);
    draw(p, "ITL", &t->all.itl);
    status st = plot_save(p, file);
    mem_free(p);
    return st;
}

status tally_report(struct tally *t, struct tally *alone, struct tally *flood, const char *url,
                    const char *json, const char *svg)
{
    cJSON *sheet = make_sheet(t, url);
    if (flood != NULL)
        add_flood(sheet, t, alone, flood);
    print_report(t, sheet);
    if (flood != NULL)
        print_flood(sheet, flood);
    status st = sheet_save(sheet, json);
    if (st == OK && svg != NULL)
        st = save_plot(t, svg);
    cJSON_Delete(sheet);
    return st;
}
