/* `spind eval kl`: how far the next-token distribution of the sparse path is from the dense one's, on
 * teacher-forced text behind a long context. The most sensitive measure, and it needs no labels. */
#include "engine/tool/eval.h"
#include "engine/tool/measure.h"

#include <string.h>

static const struct sheet_column columns[] = {
    {"plugin", "plug-in", SHEET_TEXT, 0},
    {"block_size", "block", SHEET_COUNT, 0},
    {"budget", "budget", SHEET_FIXED, 3},
    {"kl_mean", "KL mean", SHEET_FIXED, 5},
    {"kl_p99", "KL p99", SHEET_FIXED, 4},
    {"top1", "same top-1", SHEET_PERCENT, 1},
    {"ppl", "ppl", SHEET_FIXED, 3},
    {"ppl_dense", "ppl dense", SHEET_FIXED, 3},
    {"rows_attended", "rows", SHEET_COUNT, 0},
    {"selected_share", "selected", SHEET_PERCENT, 2},
    {"scan_bytes", "scan bytes", SHEET_COUNT, 0},
};

static status kl_of(struct eval *e, const struct eval_setting *s, const float *dense, float *logits,
                    cJSON *row)
{
    const uint32_t *tokens = e->text_tokens + e->offset + e->context;
    uint32_t vocab = eval_run_info(e->run)->shape.vocab;
    struct measure m = {0};
    TRY(eval_setting_row(e, row, s, e->context));
    eval_run_rewind(e->run, e->context);
    TRY(eval_run_rows(e->run, &s->choice, tokens, e->tokens, logits));
    for (uint32_t i = 0; i < e->tokens; i++) {
        struct measure_token t = measure_token(dense + (size_t)i * vocab,
                                               logits + (size_t)i * vocab, vocab, tokens[i + 1]);
        measure_take(&m, &t);
    }
    double mean = measure_mean(&m.kl);
    cJSON_AddNumberToObject(row, "tokens", m.n);
    cJSON_AddNumberToObject(row, "kl_mean", mean);
    cJSON_AddNumberToObject(row, "kl_p50", measure_percentile(&m.kl, 50));
    cJSON_AddNumberToObject(row, "kl_p99", measure_percentile(&m.kl, 99));
    cJSON_AddNumberToObject(row, "kl_max", measure_percentile(&m.kl, 100));
    cJSON_AddNumberToObject(row, "top1", (double)m.top1 / m.n);
    cJSON_AddNumberToObject(row, "ppl", measure_ppl(&m));
    cJSON_AddNumberToObject(row, "ppl_dense", measure_ppl_dense(&m));
    eval_progress(e, "%s, budget %g: KL %.5f", s->label, s->budget, mean);
    measure_fini(&m.kl);
    return OK;
}

status eval_kl_dense(struct eval *e, float *logits)
{
    const uint32_t *tokens = e->text_tokens + e->offset;
    TRY(eval_run_prefill(e->run, tokens, e->context));
    return eval_run_rows(e->run, NULL, tokens + e->context, e->tokens, logits);
}

status eval_kl_rows(struct eval *e, cJSON *rows)
{
    size_t n = (size_t)e->tokens * eval_run_info(e->run)->shape.vocab;
    float *dense = mem_try_alloc(n * sizeof *dense), *logits = mem_try_alloc(n * sizeof *logits);
    status st = dense && logits ? OK : err(ERR_MEMORY, "logits of %u tokens", e->tokens);
    if (st == OK)
        st = eval_kl_dense(e, dense);
    for (uint32_t i = 0; i < e->n_settings && st == OK; i++) {
        cJSON *row = cJSON_CreateObject();
        cJSON_AddItemToArray(rows, row);
        st = kl_of(e, &e->settings[i], e->reference ? e->reference : dense, logits, row);
    }
    mem_free(dense);
    mem_free(logits);
    return st;
}

static void plot_rows(struct plot *p, const cJSON *rows)
{
    const cJSON *row;
    cJSON_ArrayForEach(row, rows)
        plot_point(plot_series(p, cJSON_GetObjectItem(row, "plugin")->valuestring),
                   100 * sheet_number(row, "budget"), sheet_number(row, "kl_mean"));
}

/* With one setting its numbers are at the top of the document, too: what a script reads. */
static void lift(cJSON *sheet, const cJSON *rows)
{
    if (cJSON_GetArraySize(rows) != 1)
        return;
    for (const cJSON *v = cJSON_GetArrayItem(rows, 0)->child; v; v = v->next)
        if (!cJSON_HasObjectItem(sheet, v->string))
            cJSON_AddItemToObject(sheet, v->string, cJSON_Duplicate(v, 1));
}

status eval_kl_reference(struct eval *e, float **out)
{
    const enum kv_type type = e->kv_type;
    if (type == KV_BF16)
        return OK;
    e->kv_type = KV_BF16;
    TRY(eval_open(e, e->context + e->tokens + 1));
    TRY(eval_read_text(e, e->context + e->tokens + 1));
    size_t n = (size_t)e->tokens * eval_run_info(e->run)->shape.vocab;
    *out = mem_try_alloc(n * sizeof **out);
    TRY(*out ? eval_kl_dense(e, *out) : err(ERR_MEMORY, "logits of %u tokens", e->tokens));
    e->reference = *out;
    e->kv_type = type;
    return OK;
}

static status run_all(struct eval *e)
{
    static struct plot p = {.title = "KL of the sparse path to the dense one",
                            .x_label = "budget, % of the context",
                            .y_label = "KL, nats per token",
                            .log_x = true,
                            .log_y = true};
    cJSON *rows = cJSON_GetObjectItem(e->sheet, "rows");
    TRY(eval_open(e, e->context + e->tokens + 1));
    TRY(eval_read_text(e, e->context + e->tokens + 1));
    TRY(eval_make_settings(e));
    eval_expect(e, e->n_settings);
    TRY(eval_kl_rows(e, rows));
    sheet_print(stdout, rows, columns, ARRAY_LEN(columns));
    lift(e->sheet, rows);
    plot_rows(&p, rows);
    return plot_save(&p, e->svg);
}

static status run(struct eval *e)
{
    float *reference = NULL;
    status st = eval_kl_reference(e, &reference);
    if (st == OK)
        st = run_all(e);
    mem_free(reference);
    e->reference = NULL;
    return st;
}

const struct eval_command eval_kl = {
    "kl", "KL to dense, top-1 and perplexity on teacher-forced text", NULL, run};
