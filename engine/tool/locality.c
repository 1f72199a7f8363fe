/* `spind locality`: how local selections are, from traces that --record-selection wrote.
 *
 * Three questions. How much of a step's selection was in an earlier one (and so, what does a longer
 * re-selection interval save)? What does a hot set of so many times the selection hit: by exact LRU, by
 * the bucketed LRU that runs in the server with epochs of one, two and four steps, and at best
 * (Belady)? And what would the curve of budgets (cache/budget.h), made at three times, have said? */
#include "cache/budget.h"
#include "engine/tool/args.h"
#include "engine/tool/lanes.h"
#include "engine/tool/sheet.h"
#include "engine/tool/tool.h"

#include <errno.h>
#include <math.h>
#include <string.h>

enum {
    MULTIPLES = 12, /* sizes: 1 .. 12 times the largest selection of the sequence */
    SEEN_AT = 3,    /* the size at which the curve's distances are seen */
    LAGS = 4,
    POLICIES = 5,
};

static const uint32_t lags[LAGS] = {1, 2, 4, 8};

static const struct {
    const char *key;
    enum replay_policy policy;
    uint32_t epoch_steps;
} policies[POLICIES] = {{"lru", REPLAY_LRU, 1},
                        {"bucketed_1", REPLAY_BUCKETED, 1},
                        {"bucketed_2", REPLAY_BUCKETED, 2},
                        {"bucketed_4", REPLAY_BUCKETED, 4},
                        {"belady", REPLAY_BELADY, 1}};

enum { LRU = 0, BUCKETED = 1 }; /* places in policies */

/* Sums over lanes; one for everything and one per (layer, head). */
struct sums {
    struct replay_count hit[POLICIES][MULTIPLES], again[LAGS];
    uint64_t lane_steps, largest;
};

struct locality {
    const char *json, *markdown;
    uint32_t warm_up;
    bool every_lane;

    struct lanes *lanes;
    struct sums all, *by_lane;                      /* [layers][kv_heads] */
    double predicted[MULTIPLES], predicted_touches; /* misses that curves said, by touches */
    double worst;                                   /* |said - replayed| of one sequence */
    uint32_t n_used, n_short;                       /* sequences */
};

static void add_count(struct replay_count *to, const struct replay_count *n)
{
    to->touches += n->touches;
    to->misses += n->misses;
}

static double hit_ratio(const struct replay_count *n)
{
    return n->touches > 0 ? 1 - (double)n->misses / (double)n->touches : (double)NAN;
}

static void add_sums(struct sums *to, const struct sums *s)
{
    for (uint32_t m = 0; m < MULTIPLES; m++)
        for (uint32_t p = 0; p < POLICIES; p++)
            add_count(&to->hit[p][m], &s->hit[p][m]);
    for (uint32_t i = 0; i < LAGS; i++)
        add_count(&to->again[i], &s->again[i]);
    to->lane_steps += s->lane_steps;
    to->largest = s->largest > to->largest ? s->largest : to->largest;
}

/* ---- measuring ---- */

static status measure_lane(const struct locality *c, const struct replay_lane *lane, uint32_t unit,
                           struct sums *s, struct hot_lane_stats *seen)
{
    *s = (struct sums){.lane_steps = lane->n_steps - c->warm_up, .largest = replay_largest(lane)};
    for (uint32_t i = 0; i < LAGS; i++)
        s->again[i] = replay_reuse(lane, lags[i], c->warm_up);
    for (uint32_t m = 0; m < MULTIPLES; m++)
        for (uint32_t p = 0; p < POLICIES; p++) {
            struct replay_args a = {policies[p].policy, (m + 1) * unit, c->warm_up,
                                    policies[p].epoch_steps};
            bool watch = p == BUCKETED && m + 1 == SEEN_AT;
            TRY(replay_run(lane, &a, &s->hit[p][m], watch ? seen->distance : NULL));
        }
    return OK;
}

/* What the sequence's curve says, beside what its bucketed replays missed. */
static void predict(struct locality *c, const struct hot_lane_stats *seen, uint32_t n_lanes,
                    double epochs, const struct sums *s, uint32_t unit)
{
    struct miss_curve curve;
    miss_curve_lanes(&curve, seen, n_lanes, epochs);
    double touches = (double)s->hit[BUCKETED][0].touches;
    c->predicted_touches += touches;
    for (uint32_t m = 0; m < MULTIPLES; m++) {
        double said = (double)miss_curve_at(&curve, (float)((m + 1) * unit));
        double off = fabs(said - (1 - hit_ratio(&s->hit[BUCKETED][m])));
        c->predicted[m] += said * touches;
        c->worst = off > c->worst ? off : c->worst;
    }
}

/* The largest selection of any lane (a hot set has one number of slots), and the fewest steps. */
static void look_over(const struct locality *c, uint32_t sequence, uint32_t *unit, uint32_t *steps)
{
    const struct trace_header *h = &c->lanes->header;
    *unit = 0;
    *steps = UINT32_MAX;
    for (uint32_t i = 0; i < h->layers * h->kv_heads; i++) {
        struct replay_lane lane = lanes_get(c->lanes, sequence, i / h->kv_heads, i % h->kv_heads);
        if (lane.n_steps == 0)
            continue;
        uint32_t largest = replay_largest(&lane);
        *unit = largest > *unit ? largest : *unit;
        *steps = lane.n_steps < *steps ? lane.n_steps : *steps;
    }
}

static status measure_sequence(struct locality *c, uint32_t sequence)
{
    const struct trace_header *h = &c->lanes->header;
    uint32_t unit, steps, n = h->layers * h->kv_heads, n_seen = 0;
    look_over(c, sequence, &unit, &steps);
    if (steps == UINT32_MAX || steps < 2 * c->warm_up + lags[LAGS - 1] || unit == 0) {
        c->n_short++;
        return OK;
    }
    struct hot_lane_stats *seen = mem_alloc(n * sizeof *seen);
    struct sums whole = {0}, one;
    status st = OK;
    for (uint32_t i = 0; i < n && st == OK; i++) {
        struct replay_lane lane = lanes_get(c->lanes, sequence, i / h->kv_heads, i % h->kv_heads);
        if (lane.n_steps == 0 || (st = measure_lane(c, &lane, unit, &one, &seen[n_seen++])) != OK)
            continue;
        add_sums(&whole, &one);
        add_sums(&c->by_lane[i], &one);
    }
    if (st == OK && n_seen > 0)
        predict(c, seen, n_seen, (double)whole.lane_steps / n_seen, &whole, unit);
    add_sums(&c->all, &whole);
    c->n_used++;
    mem_free(seen);
    return st;
}

/* ---- reporting ---- */

static const struct sheet_column size_columns[] = {
    {"size", "slots / selected", SHEET_TEXT, 0},
    {"lru", "exact LRU", SHEET_PERCENT, 2},
    {"bucketed_1", "bucketed, epoch 1", SHEET_PERCENT, 2},
    {"bucketed_2", "epoch 2", SHEET_PERCENT, 2},
    {"bucketed_4", "epoch 4", SHEET_PERCENT, 2},
    {"belady", "Belady", SHEET_PERCENT, 2},
    {"predicted", "curve says (epoch 1)", SHEET_PERCENT, 2},
};
static const struct sheet_column interval_columns[] = {
    {"interval", "steps", SHEET_COUNT, 0},
    {"again", "same page so many steps later", SHEET_PERCENT, 1},
    {"reuse", "re-use when selecting every so many", SHEET_PERCENT, 1},
};
static const struct sheet_column layer_columns[] = {
    {"layer", "layer", SHEET_COUNT, 0},
    {"again", "same page one step later", SHEET_PERCENT, 1},
    {"least", "least of its heads", SHEET_PERCENT, 1},
    {"most", "most", SHEET_PERCENT, 1},
    {"hit_2", "hits at 2x", SHEET_PERCENT, 1},
    {"hit_3", "3x", SHEET_PERCENT, 1},
    {"hit_5", "5x", SHEET_PERCENT, 1},
};
static const struct sheet_column lane_columns[] = {
    {"layer", "layer", SHEET_COUNT, 0},        {"head", "head", SHEET_COUNT, 0},
    {"again", "same page", SHEET_PERCENT, 1},  {"again_8", "8 steps later", SHEET_PERCENT, 1},
    {"hit_2", "hits at 2x", SHEET_PERCENT, 1}, {"hit_3", "3x", SHEET_PERCENT, 1},
    {"hit_5", "5x", SHEET_PERCENT, 1},
};

static void put(cJSON *row, const char *key, double v)
{
    if (isfinite(v))
        cJSON_AddNumberToObject(row, key, v);
}

static cJSON *new_row(cJSON *rows)
{
    cJSON *row = cJSON_CreateObject();
    cJSON_AddItemToArray(rows, row);
    return row;
}

static void put_sizes(const struct locality *c, cJSON *sheet)
{
    for (uint32_t m = 0; m < MULTIPLES; m++) {
        char size[8];
        cJSON *row = sheet_row(sheet);
        snprintf(size, sizeof size, "%ux", m + 1);
        cJSON_AddStringToObject(row, "size", size);
        for (uint32_t p = 0; p < POLICIES; p++)
            put(row, policies[p].key, hit_ratio(&c->all.hit[p][m]));
        put(row, "predicted", 1 - c->predicted[m] / c->predicted_touches);
    }
}

static void put_intervals(const struct locality *c, cJSON *rows)
{
    for (uint32_t i = 0; i < LAGS; i++) {
        cJSON *row = new_row(rows);
        double again = hit_ratio(&c->all.again[i]);
        put(row, "interval", lags[i]);
        put(row, "again", again);
        put(row, "reuse", (lags[i] - 1 + again) / lags[i]);
    }
}

static void put_hits(cJSON *row, const struct sums *s)
{
    put(row, "again", hit_ratio(&s->again[0]));
    put(row, "again_8", hit_ratio(&s->again[LAGS - 1]));
    put(row, "hit_2", hit_ratio(&s->hit[BUCKETED][1]));
    put(row, "hit_3", hit_ratio(&s->hit[BUCKETED][2]));
    put(row, "hit_5", hit_ratio(&s->hit[BUCKETED][4]));
}

static void put_layers(const struct locality *c, cJSON *layers, cJSON *lanes)
{
    const struct trace_header *h = &c->lanes->header;
    for (uint32_t layer = 0; layer < h->layers; layer++) {
        struct sums whole = {0};
        double least = 1, most = 0;
        for (uint32_t head = 0; head < h->kv_heads; head++) {
            const struct sums *s = &c->by_lane[layer * h->kv_heads + head];
            if (s->lane_steps == 0)
                continue;
            double again = hit_ratio(&s->again[0]);
            least = again < least ? again : least;
            most = again > most ? again : most;
            add_sums(&whole, s);
            cJSON *row = new_row(lanes);
            put(row, "layer", layer);
            put(row, "head", head);
            put_hits(row, s);
        }
        if (whole.lane_steps == 0)
            continue;
        cJSON *row = new_row(layers);
        put(row, "layer", layer);
        put_hits(row, &whole);
        put(row, "least", least);
        put(row, "most", most);
    }
}

static cJSON *make_sheet(const struct locality *c)
{
    const struct trace_header *h = &c->lanes->header;
    cJSON *sheet = sheet_create("locality");
    cJSON_AddStringToObject(sheet, "model", h->model);
    cJSON_AddStringToObject(sheet, "plugin", h->plugin);
    put(sheet, "budget", (double)h->budget);
    put(sheet, "block_rows", h->block_rows);
    put(sheet, "sequences", c->n_used);
    put(sheet, "too_short", c->n_short);
    put(sheet, "warm_up", c->warm_up);
    put(sheet, "lane_steps", (double)c->all.lane_steps);
    put(sheet, "pages_mean",
        (double)c->all.hit[LRU][0].touches / (double)(c->all.lane_steps + !c->all.lane_steps));
    put(sheet, "pages_largest", (double)c->all.largest);
    put(sheet, "curve_off_at_most", c->worst);
    put_sizes(c, sheet);
    put_intervals(c, cJSON_AddArrayToObject(sheet, "intervals"));
    cJSON *layers = cJSON_AddArrayToObject(sheet, "layers");
    put_layers(c, layers, cJSON_AddArrayToObject(sheet, "lanes"));
    return sheet;
}

typedef void table_writer(FILE *to, const cJSON *rows, const struct sheet_column *columns,
                          uint32_t n);

static void write_report(const struct locality *c, const cJSON *sheet, FILE *to,
                         table_writer *table)
{
    const struct trace_header *h = &c->lanes->header;
    fprintf(to,
            "%s, %s, budget %g, pages of %u rows: %u sequence%s, %.1f pages a step on average.\n",
            h->model, h->plugin, (double)h->budget, h->block_rows, c->n_used,
            c->n_used == 1 ? "" : "s", sheet_number(sheet, "pages_mean"));
    fprintf(to, "Hit ratio of a lane's hot set, after %u steps of warm-up:\n\n", c->warm_up);
    table(to, cJSON_GetObjectItem(sheet, "rows"), size_columns, ARRAY_LEN(size_columns));
    fprintf(to, "\nThe curve (seen at %dx) is off by at most %.2f points in one sequence.\n\n",
            SEEN_AT, 100 * c->worst);
    table(to, cJSON_GetObjectItem(sheet, "intervals"), interval_columns,
          ARRAY_LEN(interval_columns));
    fprintf(to, "\nBy layer:\n\n");
    table(to, cJSON_GetObjectItem(sheet, "layers"), layer_columns, ARRAY_LEN(layer_columns));
    if (!c->every_lane)
        return;
    fprintf(to, "\nBy lane:\n\n");
    table(to, cJSON_GetObjectItem(sheet, "lanes"), lane_columns, ARRAY_LEN(lane_columns));
}

static status save_markdown(const struct locality *c, const cJSON *sheet)
{
    if (c->markdown == NULL)
        return OK;
    FILE *f = fopen(c->markdown, "we");
    if (f == NULL)
        return err(ERR_IO, "%s: %s", c->markdown, strerror(errno));
    write_report(c, sheet, f, sheet_markdown);
    return fclose(f) == 0 ? OK : err(ERR_IO, "%s: %s", c->markdown, strerror(errno));
}

static status report(const struct locality *c)
{
    if (c->n_used == 0)
        return err(ERR_ARG, "no sequence has %u steps: record a longer answer, or lower --warm-up",
                   2 * c->warm_up + lags[LAGS - 1]);
    cJSON *sheet = make_sheet(c);
    write_report(c, sheet, stdout, sheet_print);
    if (c->n_short > 0 || c->lanes->n_cut > 0)
        printf("\n%u sequences were too short; %u files end inside a record.\n", c->n_short,
               c->lanes->n_cut);
    status st = sheet_save(sheet, c->json);
    if (st == OK)
        st = save_markdown(c, sheet);
    cJSON_Delete(sheet);
    return st;
}

static status run(struct locality *c, const struct args_list *files)
{
    TRY(lanes_load(&c->lanes, files->v, files->n));
    const struct trace_header *h = &c->lanes->header;
    c->by_lane = mem_alloc((size_t)h->layers * h->kv_heads * sizeof *c->by_lane);
    status st = OK;
    for (uint32_t i = 0; i < c->lanes->n_sequences && st == OK; i++)
        st = measure_sequence(c, i);
    if (st == OK)
        st = report(c);
    mem_free(c->by_lane);
    lanes_free(c->lanes);
    return st;
}

int locality_verb(int argc, char **argv)
{
    struct locality c = {.warm_up = 32};
    struct args_list files = {0};
    bool help = false;
    const struct args_option options[] = {
        {"warm-up", ARGS_COUNT, &c.warm_up, 0, 100000, "first steps of a sequence, not counted"},
        {"lanes", ARGS_FLAG, &c.every_lane, 0, 0, "print every lane, too"},
        {"json", ARGS_TEXT, &c.json, 0, 0, "write everything to this file"},
        {"markdown", ARGS_TEXT, &c.markdown, 0, 0, "write the tables to this file"},
    };
    status st = args_parse(options, ARRAY_LEN(options), argc, argv, &files, &help);
    if (help) {
        printf("spind locality [OPTIONS] TRACE...\n\nHow local selections are, from files that "
               "--record-selection wrote.\n\n");
        args_print(options, ARRAY_LEN(options));
        return 0;
    }
    if (st == OK && files.n == 0)
        st = err(ERR_ARG,
                 "name at least one trace (spind serve --record-selection FILE makes them)");
    if (st != OK) {
        fprintf(stderr, "spind locality: %s\n", err_text());
        return 2;
    }
    if ((st = run(&c, &files)) != OK)
        fprintf(stderr, "spind locality: %s\n", err_text());
    return st == OK ? 0 : 1;
}
