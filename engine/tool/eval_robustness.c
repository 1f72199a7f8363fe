/* `spind eval robustness`: does the selection contain the rows that matter, query by query?
 *
 * A query is (row, layer, KV head). Its candidates are the sealed rows beside the sinks; the truth is
 * their order by the greatest share of attention over the group's heads, from the keys themselves;
 * retrieved is what the plan attends exactly. Queries come from the sparse run itself, so they are
 * those that a user's answer is made of. */
#include "engine/tool/eval.h"
#include "engine/tool/keys.h"
#include "engine/tool/robust.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

struct watcher {
    struct eval *e;
    struct keys keys;

    struct eval_layer now;
    struct robust all, *layers; /* [layers] */
    uint32_t sinks, every, n_queries;
    float scale;
    float *score, *mass, *one; /* [room] */
    uint8_t *got;              /* [room] */
};

static void see_layer(void *arg, const struct eval_layer *l)
{
    struct watcher *w = arg;
    w->now = *l;
    keys_take(&w->keys, l);
}

/* score: greatest log share over the group; mass: mean share. */
static void truth(struct watcher *w, const struct attention_selection *s, uint32_t candidates)
{
    const struct model_shape *shape = &eval_run_info(w->e->run)->shape;
    uint32_t group = shape->heads / shape->kv_heads, d = shape->head_dim;
    size_t width = (size_t)(shape->heads + 2 * shape->kv_heads) * d;
    const float *row = w->now.qkv + (s->pos - w->now.first_pos) * width;
    for (uint32_t h = 0; h < group; h++) {
        keys_scores(&w->keys, s->layer, s->head, row + (size_t)(s->head * group + h) * d, w->scale,
                    s->pos + 1, w->one);
        float lse = (float)keys_lse(w->one, s->pos + 1);
        for (uint32_t p = 0; p < candidates; p++) {
            float log_share = w->one[w->sinks + p] - lse;
            float share = expf(log_share) / (float)group;
            w->score[p] = h == 0 || log_share > w->score[p] ? log_share : w->score[p];
            w->mass[p] = h == 0 ? share : w->mass[p] + share;
        }
    }
}

static void see_selection(void *arg, const struct attention_selection *s)
{
    struct watcher *w = arg;
    uint32_t rows = eval_run_memory(w->e->run)->geo->block_rows, at[64];
    uint32_t candidates = s->n_segments * SEGMENT_ROWS - w->sinks;
    if (s->pos % w->every != 0)
        return;
    truth(w, s, candidates);
    memset(w->got, 0, candidates);
    for (uint32_t i = 0; i < s->n_pages; i++) {
        eval_run_page_positions(w->e->run, &s->in->traits, s->layer, s->head, s->pages[i], at);
        for (uint32_t j = 0; j < rows; j++)
            if (at[j] >= w->sinks)
                w->got[at[j] - w->sinks] = 1;
    }
    const struct robust_query q = {w->score, w->mass, w->got, candidates};
    robust_add(&w->all, &q);
    robust_add(&w->layers[s->layer], &q);
    w->n_queries++;
}

static status watcher_init(struct watcher *w, struct eval *e, uint32_t positions)
{
    const struct model_info *info = eval_run_info(e->run);
    *w = (struct watcher){.e = e, .scale = info->attn_scale, .every = 1};
    TRY(keys_init(&w->keys, eval_run_memory(e->run)->geo, positions));
    size_t room = w->keys.room;
    w->score = mem_alloc(room * sizeof *w->score);
    w->mass = mem_alloc(room * sizeof *w->mass);
    w->one = mem_alloc(room * sizeof *w->one);
    w->got = mem_alloc(room);
    w->layers = mem_alloc(info->shape.layers * sizeof *w->layers);
    return OK;
}

static void watcher_clear(struct watcher *w)
{
    robust_fini(&w->all);
    for (uint32_t i = 0; i < w->keys.geo.layers; i++)
        robust_fini(&w->layers[i]);
    memset(w->layers, 0, w->keys.geo.layers * sizeof *w->layers);
    w->all = (struct robust){0};
    w->n_queries = 0;
}

static void watcher_fini(struct watcher *w)
{
    if (w->layers != NULL)
        watcher_clear(w);
    keys_fini(&w->keys);
    mem_free(w->score);
    mem_free(w->mass);
    mem_free(w->one);
    mem_free(w->got);
    mem_free(w->layers);
}

static void put(cJSON *row, const char *stem, uint32_t k, double v)
{
    char key[32];
    snprintf(key, sizeof key, "%s_%u", stem, k);
    cJSON_AddNumberToObject(row, key, v);
}

static void fill_row(cJSON *row, struct watcher *w)
{
    struct robust *r = &w->all;
    char key[32];
    cJSON_AddNumberToObject(row, "queries", w->n_queries);
    for (int i = 0; i < ROBUST_KS; i++) {
        put(row, "recall", robust_k[i], measure_mean(&r->recall[i]));
        put(row, "recall_p1", robust_k[i], measure_percentile(&r->recall[i], 1));
        put(row, "recall_p5", robust_k[i], measure_percentile(&r->recall[i], 5));
        for (int k = 0; k < ROBUST_DELTAS; k++) {
            snprintf(key, sizeof key, "robustness_%g", robust_delta[k]);
            put(row, key, robust_k[i], measure_at_least(&r->recall[i], robust_delta[k]));
        }
    }
    cJSON_AddNumberToObject(row, "mass", measure_mean(&r->mass));
    cJSON_AddNumberToObject(row, "mass_p1", measure_percentile(&r->mass, 1));
    cJSON_AddNumberToObject(row, "mass_p5", measure_percentile(&r->mass, 5));
    cJSON_AddNumberToObject(row, "dropped", r->dropped);
    cJSON *layers = cJSON_AddArrayToObject(row, "layers");
    for (uint32_t i = 0; i < w->keys.geo.layers; i++) {
        struct robust *l = &w->layers[i];
        if (l->mass.n + l->dropped == 0)
            continue;
        cJSON *one = cJSON_CreateObject();
        cJSON_AddItemToArray(layers, one);
        cJSON_AddNumberToObject(one, "layer", i);
        put(one, "recall", 64, measure_mean(&l->recall[1]));
        put(one, "robustness_0.9", 64, measure_at_least(&l->recall[1], 0.9));
        cJSON_AddNumberToObject(one, "mass", measure_mean(&l->mass));
        cJSON_AddNumberToObject(one, "mass_p5", measure_percentile(&l->mass, 5));
        cJSON_AddNumberToObject(one, "dropped", l->dropped);
    }
}

static status run_setting(struct eval *e, struct watcher *w, const struct eval_setting *s,
                          cJSON *row)
{
    struct sparse_traits t;
    TRY(sparse_choice_check(&s->choice, eval_run_memory(e->run)->geo, &t));
    if (t.attends_all || t.map != MAP_PAGE)
        return err(ERR_ARG,
                   "robustness is measured for plug-ins that select whole pages; %s does not",
                   s->label);
    TRY(eval_setting_row(e, row, s, e->context));
    uint32_t rows = eval_run_memory(e->run)->geo->block_rows;
    w->sinks = (t.sinks + rows - 1) / rows * rows;
    watcher_clear(w);
    eval_run_rewind(e->run, e->context);
    eval_run_record(e->run, see_selection, w);
    status st =
        eval_run_rows(e->run, &s->choice, e->text_tokens + e->offset + e->context, e->rows, NULL);
    eval_run_record(e->run, NULL, NULL);
    if (st == OK)
        fill_row(row, w);
    eval_progress(e, "%s, budget %g: recall@64 %.3f over %u queries", s->label, s->budget,
                  measure_mean(&w->all.recall[1]), w->n_queries);
    return st;
}

static const struct sheet_column columns[] = {
    {"plugin", "plug-in", SHEET_TEXT, 0},
    {"block_size", "block", SHEET_COUNT, 0},
    {"budget", "budget", SHEET_FIXED, 3},
    {"recall_16", "recall@16", SHEET_FIXED, 3},
    {"recall_64", "@64", SHEET_FIXED, 3},
    {"recall_256", "@256", SHEET_FIXED, 3},
    {"recall_p5_64", "p5@64", SHEET_FIXED, 3},
    {"robustness_0.9_64", "R-0.9@64", SHEET_FIXED, 3},
    {"robustness_0.5_64", "R-0.5@64", SHEET_FIXED, 3},
    {"mass", "mass", SHEET_FIXED, 3},
    {"mass_p5", "mass p5", SHEET_FIXED, 3},
    {"mass_p1", "p1", SHEET_FIXED, 3},
};

static status measure_all(struct eval *e, struct watcher *w, cJSON *rows)
{
    eval_run_forget(e->run); /* the watcher wants every key */
    eval_run_watch(e->run, see_layer, w);
    status st = eval_run_prefill(e->run, e->text_tokens + e->offset, e->context);
    for (uint32_t i = 0; i < e->n_settings && st == OK; i++) {
        cJSON *row = cJSON_CreateObject();
        cJSON_AddItemToArray(rows, row);
        st = run_setting(e, w, &e->settings[i], row);
    }
    eval_run_watch(e->run, NULL, NULL);
    return st;
}

status eval_robustness_rows(struct eval *e, cJSON *rows)
{
    struct watcher w;
    status st = watcher_init(&w, e, e->context + e->rows + 1);
    if (st == OK)
        st = measure_all(e, &w, rows);
    watcher_fini(&w);
    return st;
}

static status run(struct eval *e)
{
    static struct plot p = {.title = "Queries that find 90 % of their 64 heaviest rows",
                            .x_label = "budget, % of the context",
                            .y_label = "Robustness-0.9@64",
                            .log_x = true};
    cJSON *rows = cJSON_GetObjectItem(e->sheet, "rows"), *row;
    TRY(eval_open(e, e->context + e->rows + 1));
    TRY(eval_read_text(e, e->context + e->rows + 1));
    TRY(eval_make_settings(e));
    eval_expect(e, e->n_settings);
    TRY(eval_robustness_rows(e, rows));
    sheet_print(stdout, rows, columns, ARRAY_LEN(columns));
    cJSON_ArrayForEach(row, rows)
        plot_point(plot_series(&p, cJSON_GetObjectItem(row, "plugin")->valuestring),
                   100 * sheet_number(row, "budget"), sheet_number(row, "robustness_0.9_64"));
    return plot_save(&p, e->svg);
}

const struct eval_command eval_robustness = {
    "robustness", "recall of the heaviest rows by the selection, query by query", NULL, run};
