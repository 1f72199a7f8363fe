/* `spind calibrate`: which heads look far back (RazorAttention, arXiv 2407.15891; reference/algorithms.md
 * A.3). Random tokens, repeated: a head that attends the same token in an earlier round is an echo
 * head, one that attends the token behind it an induction head. Both need the whole context; the others
 * do with sinks and a window.
 *
 * Weights come from q and the keys, some rows at a time: no attention matrix is kept. Only a sample of
 * the rows of the later rounds is looked at, spread evenly. */
#include "engine/text/tokenizer.h"
#include "engine/tool/args.h"
#include "engine/tool/keys.h"
#include "engine/tool/sheet.h"
#include "engine/tool/tool.h"
#include "kernels/core/splitmix.h"
#include "kernels/log.h"
#include "sparse/head_policy.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { ROUNDS = 4 };

struct calibrate {
    const char *model, *isa, *out, *json;
    uint32_t threads, period, every, seed;
    double induction, echo; /* shares of heads to keep */

    struct eval_run *run;
    struct keys keys;
    float *weight;                       /* [room] */
    double *echo_sum, *induction_sum;    /* [layers][heads] */
    float *echo_score, *induction_score; /* [layers][kv_heads] */
    uint32_t n_rows;                     /* looked at, per layer */
};

/* One query row of one head: the share of attention on the same token in earlier rounds, and on the
 * tokens behind those. */
static void add_row(struct calibrate *c, const float *q, uint32_t layer, uint32_t head,
                    uint32_t pos)
{
    const struct model_info *info = eval_run_info(c->run);
    uint32_t group = info->shape.heads / info->shape.kv_heads;
    size_t at = (size_t)layer * info->shape.heads + head;
    keys_scores(&c->keys, layer, head / group, q, info->attn_scale, pos + 1, c->weight);
    double lse = keys_lse(c->weight, pos + 1);
    for (uint32_t back = c->period; back <= pos; back += c->period) {
        c->echo_sum[at] += exp((double)c->weight[pos - back] - lse);
        c->induction_sum[at] += exp((double)c->weight[pos - back + 1] - lse);
    }
}

static void see_layer(void *arg, const struct eval_layer *l)
{
    struct calibrate *c = arg;
    const struct model_shape *s = &eval_run_info(c->run)->shape;
    size_t width = (size_t)(s->heads + 2 * s->kv_heads) * s->head_dim;
    keys_take(&c->keys, l);
    for (uint32_t i = 0; i < l->n_rows; i++) {
        uint32_t pos = l->first_pos + i;
        if (pos < c->period || pos % c->every != 0)
            continue;
        c->n_rows += l->layer == 0;
        for (uint32_t h = 0; h < s->heads; h++)
            add_row(c, l->qkv + i * width + (size_t)h * s->head_dim, l->layer, h, pos);
    }
}

/* Random ordinary tokens; the same ones ROUNDS times. */
static uint32_t *make_tokens(const struct calibrate *c)
{
    const struct tokenizer *t = eval_run_tokenizer(c->run);
    uint32_t *tokens = mem_alloc((size_t)ROUNDS * c->period * sizeof *tokens);
    uint64_t random = c->seed;
    for (uint32_t i = 0; i < c->period; i++)
        do
            tokens[i] = (uint32_t)((splitmix_next(&random) >> 32) * tokenizer_vocab(t) >> 32);
        while (tokenizer_is_special(t, tokens[i]));
    for (uint32_t i = c->period; i < ROUNDS * c->period; i++)
        tokens[i] = tokens[i - c->period];
    return tokens;
}

/* Greatest over the group: one head that looks back is enough to keep its lane. */
static void fold_group(const struct calibrate *c, const double *sum, float *score)
{
    const struct model_shape *s = &eval_run_info(c->run)->shape;
    uint32_t group = s->heads / s->kv_heads;
    double n = c->n_rows ? c->n_rows : 1;
    for (uint32_t i = 0; i < s->layers * s->heads; i++) {
        float mean = (float)(sum[i] / n);
        float *to = &score[i / group];
        *to = i % group == 0 || mean > *to ? mean : *to;
    }
}

static cJSON *results(const struct calibrate *c)
{
    const struct model_shape *s = &eval_run_info(c->run)->shape;
    cJSON *sheet = sheet_create("calibrate"), *rows = cJSON_GetObjectItem(sheet, "rows");
    cJSON_AddStringToObject(sheet, "model", c->model);
    cJSON_AddNumberToObject(sheet, "period", c->period);
    cJSON_AddNumberToObject(sheet, "rows_sampled", c->n_rows);
    for (uint32_t i = 0; i < s->layers * s->kv_heads; i++) {
        uint32_t layer = i / s->kv_heads;
        cJSON *row = cJSON_CreateObject();
        cJSON_AddItemToArray(rows, row);
        cJSON_AddNumberToObject(row, "layer", layer);
        cJSON_AddNumberToObject(row, "head", i % s->kv_heads);
        cJSON_AddNumberToObject(row, "echo", (double)c->echo_score[i]);
        cJSON_AddNumberToObject(row, "induction", (double)c->induction_score[i]);
    }
    return sheet;
}

static status measure(struct calibrate *c)
{
    const struct model_shape *s = &eval_run_info(c->run)->shape;
    uint32_t n = ROUNDS * c->period;
    if (n > s->max_positions)
        return err(ERR_ARG, "--period %u: %d rounds are more than the model's %u positions",
                   c->period, (int)ROUNDS, s->max_positions);
    TRY(keys_init(&c->keys, eval_run_memory(c->run)->geo, n));
    c->weight = mem_alloc((n + 16) * sizeof *c->weight);
    c->echo_sum = mem_alloc((size_t)s->layers * s->heads * sizeof *c->echo_sum);
    c->induction_sum = mem_alloc((size_t)s->layers * s->heads * sizeof *c->induction_sum);
    c->echo_score = mem_alloc((size_t)s->layers * s->kv_heads * sizeof *c->echo_score);
    c->induction_score = mem_alloc((size_t)s->layers * s->kv_heads * sizeof *c->induction_score);
    uint32_t *tokens = make_tokens(c);
    log_line(LOG_INFO, "%u random tokens, %d times; this takes about a minute", c->period,
             (int)ROUNDS);
    eval_run_watch(c->run, see_layer, c);
    status st = eval_run_prefill(c->run, tokens, n);
    eval_run_watch(c->run, NULL, NULL);
    mem_free(tokens);
    TRY(st);
    fold_group(c, c->echo_sum, c->echo_score);
    fold_group(c, c->induction_sum, c->induction_score);
    return OK;
}

/* Opens, measures and writes the policy. */
static status find_policy(struct calibrate *c)
{
    const struct eval_run_config cfg = {.model = c->model,
                                        .isa = c->isa,
                                        .n_threads = c->threads,
                                        .block_rows = 16,
                                        .max_positions = ROUNDS * c->period};
    if (c->model == NULL)
        return err(ERR_ARG, "no model given and the default one is not there: --model FILE.gguf");
    if (c->out == NULL)
        return err(ERR_ARG, "--out FILE: where the policy goes");
    TRY(eval_run_open(&c->run, &cfg));
    TRY(measure(c));
    const struct model_info *info = eval_run_info(c->run);
    const struct head_scores scores = {.layers = info->shape.layers,
                                       .kv_heads = info->shape.kv_heads,
                                       .echo = c->echo_score,
                                       .induction = c->induction_score};
    return head_policy_write(c->out, info->name, &scores, (float)c->induction, (float)c->echo);
}

static status run(struct calibrate *c)
{
    static const struct sheet_column columns[] = {{"layer", "layer", SHEET_COUNT, 0},
                                                  {"head", "KV head", SHEET_COUNT, 0},
                                                  {"echo", "echo", SHEET_FIXED, 4},
                                                  {"induction", "induction", SHEET_FIXED, 4}};
    TRY(find_policy(c));
    cJSON *sheet = results(c);
    sheet_print(stdout, cJSON_GetObjectItem(sheet, "rows"), columns, ARRAY_LEN(columns));
    printf("written to %s: spind serve --head-policy razor --head-policy-file %s\n", c->out,
           c->out);
    status st = sheet_save(sheet, c->json);
    cJSON_Delete(sheet);
    return st;
}

static void fini(struct calibrate *c)
{
    eval_run_close(c->run);
    keys_fini(&c->keys);
    mem_free(c->weight);
    mem_free(c->echo_sum);
    mem_free(c->induction_sum);
    mem_free(c->echo_score);
    mem_free(c->induction_score);
}

/* RazorAttention keeps the best 14 % by induction and 1 % by echo of a model with one KV head per query
 * head; with groups of three a lane is kept for any of them, hence more. */
static struct calibrate preset(const char *model)
{
    return (struct calibrate){
        .model = model, .period = 1500, .every = 8, .seed = 42, .induction = 0.28, .echo = 0.02};
}

status calibrate_policy(const char *model, const char *isa, uint32_t threads, uint32_t period,
                        const char *out)
{
    struct calibrate c = preset(model);
    c.isa = isa;
    c.threads = threads;
    c.period = period ? period : c.period;
    c.out = out;
    status st = find_policy(&c);
    fini(&c);
    return st;
}

int calibrate_verb(int argc, char **argv, const char *model)
{
    struct calibrate c = preset(model);
    const struct args_option options[] = {
        {"model", ARGS_TEXT, &c.model, 0, 0, "GGUF file; the default model if it is there"},
        {"out", ARGS_TEXT, &c.out, 0, 0, "policy file to write"},
        {"json", ARGS_TEXT, &c.json, 0, 0, "file for the scores"},
        {"period", ARGS_COUNT, &c.period, 64, 1 << 20, "random tokens, repeated four times"},
        {"every", ARGS_COUNT, &c.every, 1, 4096, "look at every n-th row"},
        {"induction-share", ARGS_NUMBER, &c.induction, 0, 1, "lanes kept for induction"},
        {"echo-share", ARGS_NUMBER, &c.echo, 0, 1, "lanes kept for echo"},
        {"threads", ARGS_COUNT, &c.threads, 0, 1024, "that compute; 0: all cores"},
        {"cpu-isa", ARGS_TEXT, &c.isa, 0, 0, "auto, avx512, avx2, scalar"},
        {"seed", ARGS_COUNT, &c.seed, 0, 1e9, "of the tokens"},
    };
    bool help;
    status st = args_parse(options, ARRAY_LEN(options), argc, argv, NULL, &help);
    if (st == OK && help) {
        printf("spind calibrate --out FILE [options]\n\n");
        args_print(options, ARRAY_LEN(options));
        return 0;
    }
    if (st == OK)
        st = run(&c);
    if (st != OK)
        fprintf(stderr, "spind calibrate: %s\n", err_text());
    fini(&c);
    return st == OK ? 0 : st == ERR_ARG ? 2 : 1;
}
