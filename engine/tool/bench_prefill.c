/* `spind bench prefill`: from a prompt's submission to its first token, alone on the engine. */
#include "engine/tool/bench.h"
#include "engine/tool/measure.h"
#include "engine/tool/plot.h"
#include "kernels/log.h"

#include <stdio.h>

static const struct sheet_column columns[] = {
    {"tokens", "tokens", SHEET_COUNT, 0}, {"s", "seconds", SHEET_FIXED, 3},
    {"tok_s", "tok/s", SHEET_FIXED, 0},   {"s_min", "fastest", SHEET_FIXED, 3},
    {"error", "error", SHEET_TEXT, 0},
};

struct reader {
    uint64_t first_us; /* when the token was there; 0: not yet */
    uint32_t n_prompt;
    uint64_t computed_before, told_us;
    bool has_before;
    const char *fault;
    char text[256];
};

/* Progress, every ten seconds. */
static void tell(struct reader *w, const struct msg_step *s)
{
    if (!w->has_before) {
        w->computed_before = s->prompt_tokens - s->step_tokens;
        w->has_before = true;
        w->told_us = s->now_us;
    }
    if (s->now_us - w->told_us < 10000000)
        return;
    w->told_us = s->now_us;
    log_line(LOG_INFO, "%llu of %u tokens",
             (unsigned long long)(s->prompt_tokens - w->computed_before), w->n_prompt);
}

static bool hear(void *arg, const struct msg_head *h)
{
    struct reader *w = arg;
    const void *m = h;
    if (h->kind == MSG_TOKEN && w->first_us == 0)
        w->first_us = clock_us();
    if (h->kind == MSG_STEP)
        tell(w, m);
    if (h->kind != MSG_DONE)
        return false;
    const struct msg_done *d = m;
    if (d->reason != DONE_LENGTH) {
        snprintf(w->text, sizeof w->text, "%s", d->text[0] ? d->text : "it ended without a token");
        w->fault = w->text;
    }
    return true;
}

static status read_one(struct bench *b, struct bench_run *r, uint32_t tokens, uint64_t seed,
                       double *seconds, cJSON *row)
{
    /* The prompt is read densely; who attends by plan later has it sealed, and it may be longer than HBM. */
    const struct bench_ask a = {
        .n_prompt = tokens, .max_tokens = 1, .seed = seed, .sparse = b->settings[0].choice};
    struct reader w = {.n_prompt = tokens};
    uint64_t begin_us = clock_us();
    bench_run_submit(r, &a);
    TRY(bench_run_listen(r, hear, &w, b->patience_s));
    *seconds = w.fault == NULL ? (double)(w.first_us - begin_us) / 1e6 : -1;
    if (w.fault != NULL && row != NULL)
        cJSON_AddStringToObject(row, "error", w.fault);
    return OK;
}

static status run_length(struct bench *b, struct bench_run *r, uint32_t tokens)
{
    struct measure_sample s = {0};
    cJSON *row = sheet_row(b->sheet);
    double one = 0;
    status st = OK;
    cJSON_AddNumberToObject(row, "tokens", tokens);
    if (tokens + 1 > r->info->max_model_len) {
        char text[96];
        snprintf(text, sizeof text, "there are %u positions", r->info->max_model_len);
        cJSON_AddStringToObject(row, "error", text);
        return OK;
    }
    for (uint32_t i = 0; i < b->repeat && st == OK && one >= 0; i++) {
        st = read_one(b, r, tokens, b->seed + i + 1, &one, row);
        if (st == OK && one >= 0)
            measure_add(&s, one);
    }
    if (s.n > 0) {
        double middle = measure_percentile(&s, 50);
        cJSON_AddNumberToObject(row, "s", middle);
        cJSON_AddNumberToObject(row, "s_min", measure_percentile(&s, 0));
        cJSON_AddNumberToObject(row, "tok_s", tokens / middle);
        log_line(LOG_INFO, "prefill of %u tokens: %.3f s", tokens, middle);
    }
    measure_fini(&s);
    return st;
}

static status draw(const struct bench *b)
{
    struct plot *p = mem_alloc(sizeof *p);
    const cJSON *row;
    p->title = "prefill of one prompt";
    p->x_label = "tokens";
    p->y_label = "seconds";
    p->log_x = p->log_y = true;
    cJSON_ArrayForEach(row, cJSON_GetObjectItem(b->sheet, "rows"))
        plot_point(plot_series(p, "prefill"), sheet_number(row, "tokens"), sheet_number(row, "s"));
    status st = plot_save(p, b->svg);
    mem_free(p);
    return st;
}

status bench_prefill(struct bench *b)
{
    struct bench_numbers lengths;
    struct engine_config cfg = b->config;
    struct bench_run r;
    uint32_t most = 0;
    double one;
    TRY(bench_numbers(&lengths, &b->tokens, "tokens", "4096", 1, 1 << 24));
    for (uint32_t i = 0; i < lengths.n; i++)
        most = lengths.v[i] > most ? (uint32_t)lengths.v[i] : most;
    cfg.max_num_seqs = 1;
    cJSON_AddStringToObject(b->sheet, "model", b->model ? b->model : b->device);
    cJSON_AddStringToObject(b->sheet, "load_format", b->load_format);
    cJSON_AddNumberToObject(b->sheet, "chunk", b->chunk);
    cJSON_AddNumberToObject(b->sheet, "block_size", b->block_rows);
    cJSON_AddStringToObject(b->sheet, "kv_cache_dtype", kv_type_name(b->config.kv_type));
    TRY(bench_run_open(&r, &cfg));
    cJSON_AddStringToObject(b->sheet, "backend", r.info->backend);
    /* What the first step of such a size sets up is no prompt's time. */
    uint32_t warm = most < b->chunk ? most : b->chunk;
    status st = read_one(b, &r, warm < r.info->max_model_len ? warm : 1, b->seed, &one, NULL);
    for (uint32_t i = 0; i < lengths.n && st == OK; i++)
        st = run_length(b, &r, (uint32_t)lengths.v[i]);
    printf("%s, blocks of %u, chunks of %u\n\n", r.info->backend, b->block_rows, b->chunk);
    bench_run_close(&r);
    TRY(st);
    sheet_print(stdout, cJSON_GetObjectItem(b->sheet, "rows"), columns, ARRAY_LEN(columns));
    return draw(b);
}
