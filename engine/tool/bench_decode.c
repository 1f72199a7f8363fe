/* `spind bench decode`: so many sequences behind contexts of such a length, all of them decoding; tokens a
 * second and milliseconds per step, by the engine's own clock, from one step's end to another's.
 *
 * A context costs its prefill, or nothing: --fill synthetic gives a prompt random K and V and computes its
 * last row only. Steps take as long behind it; what is selected, and so what a hot set hits, is not a
 * real model's: hit rates are told as reached, and are swept (--hot-set, --feed), never claimed. */
#include "engine/attention.h"
#include "engine/tool/bench.h"
#include "engine/tool/measure.h"
#include "engine/tool/plot.h"
#include "kernels/log.h"

#include <stdio.h>
#include <string.h>

static const struct sheet_column columns[] = {
    {"plugin", "plug-in", SHEET_TEXT, 0},
    {"batch", "batch", SHEET_COUNT, 0},
    {"context", "context", SHEET_COUNT, 0},
    {"selected_rows", "selected", SHEET_COUNT, 0},
    {"feed", "feed", SHEET_TEXT, 0},
    {"tok_s", "tok/s", SHEET_FIXED, 1},
    {"ms", "ms/step", SHEET_FIXED, 3},
    {"ms_p50", "p50", SHEET_FIXED, 3},
    {"ms_p99", "p99", SHEET_FIXED, 3},
    {"host_us_p50", "host us", SHEET_FIXED, 0},
    {"host_us_p99", "p99", SHEET_FIXED, 0},
    {"idle_us_p50", "idle us", SHEET_FIXED, 0},
    {"idle_us_p99", "p99", SHEET_FIXED, 0},
    {"replayed", "replayed", SHEET_PERCENT, 1},
    {"running", "running", SHEET_FIXED, 1},
    {"spilled", "spilled", SHEET_COUNT, 0},
    {"hot", "hot set x", SHEET_FIXED, 2},
    {"hit", "hit", SHEET_PERCENT, 2},
    {"fetch_gb_s", "fetch GB/s", SHEET_FIXED, 2},
    {"fill_s", "fill s", SHEET_FIXED, 2},
    {"error", "error", SHEET_TEXT, 0},
};

struct cell {
    const struct bench_setting *setting;
    uint32_t batch, context, feed, max_tokens;
    double hot; /* 0: RESIDENT */
    bool computed;
};

/* Where a cell is. */
enum phase { FILLING, WARMING, MEASURING, DRAINING };

struct watch {
    const struct bench *b;
    const struct cell *cell;
    uint64_t first_id; /* of batch ids in a row */
    bool *has_token;   /* [batch] */
    uint32_t n_first, n_done, n_steps;
    enum phase phase;
    uint64_t tokens, tokens_begin, tokens_end, decodes;
    struct msg_step begin, end;
    uint64_t last_us;
    struct measure_sample gaps; /* us between ends of steps */
    struct measure_sample host,
        idle; /* us of a step: of the engine's own work; of the device's rest before it */
    struct bench_run *run;
    uint32_t n_asked, n_ended; /* submitted; cancelled, the oldest first */
    char fault[256];
};

/* ---- listening ---- */

static const char *reason_text(const struct msg_done *d)
{
    switch (d->reason) {
    case DONE_REFUSED: return d->text[0] ? d->text : "refused: no room";
    case DONE_DEVICE: return "the step failed";
    case DONE_NUMERIC: return "a logit was not finite";
    case DONE_LENGTH: return "an answer ended before all were measured";
    default: return "a sequence ended";
    }
}

static void hear_token(struct watch *w, const struct msg_token *t)
{
    uint64_t i = t->id - w->first_id;
    CHECK(i < w->n_asked);
    w->tokens++;
    if (i >= w->cell->batch) /* with --churn */
        return;
    w->n_first += !w->has_token[i];
    w->has_token[i] = true;
}

static void submit_one(struct watch *w)
{
    const struct cell *c = w->cell;
    const struct bench_ask a = {.n_prompt = c->context,
                                .n_filled = c->computed ? 0 : c->context - 1,
                                .max_tokens = c->max_tokens,
                                .feed = c->feed,
                                .seed = w->b->seed + ++w->n_asked,
                                .sparse = c->setting->choice};
    uint64_t id = bench_run_submit(w->run, &a);
    w->first_id = w->n_asked == 1 ? id : w->first_id;
}

static void end_one(struct watch *w)
{
    bench_run_cancel(w->run, w->first_id + w->n_ended++);
}

/* --churn: answers end one by one, the oldest first, until half are left; then others begin until all are there;
 * and again. */
static void churn(struct watch *w)
{
    uint32_t half = (w->cell->batch + 1) / 2;
    if (w->b->churn == 0 || w->n_steps % w->b->churn != 0)
        return;
    if (w->n_steps / w->b->churn % (2 * half) < half)
        end_one(w);
    else
        submit_one(w);
}

/* True: enough was measured. Tokens of a step come before its MSG_STEP. */
static bool hear_step(struct watch *w, const struct msg_step *s)
{
    uint64_t gap = s->now_us - w->last_us;
    w->last_us = s->now_us;
    if (w->phase == FILLING) {
        w->phase = w->n_first == w->cell->batch ? WARMING : FILLING;
        return false;
    }
    if (s->step_decodes == 0)
        return false;
    w->n_steps++;
    if (w->phase == WARMING && w->n_steps == w->b->warm) {
        w->phase = MEASURING;
        w->begin = *s;
        w->tokens_begin = w->tokens;
        w->n_steps = 0;
        return false;
    }
    if (w->phase != MEASURING)
        return false;
    measure_add(&w->gaps, (double)gap);
    measure_add(&w->host, (double)s->host_us);
    measure_add(&w->idle, (double)s->counts.idle_us);
    w->decodes += s->step_decodes;
    if (w->n_steps < w->b->steps) {
        churn(w);
        return false;
    }
    w->end = *s;
    w->tokens_end = w->tokens;
    return true;
}

static bool hear(void *arg, const struct msg_head *h)
{
    struct watch *w = arg;
    const void *m = h;
    if (h->kind == MSG_TOKEN)
        hear_token(w, m);
    if (h->kind == MSG_DONE) {
        const struct msg_done *d = m;
        w->n_done++;
        if (w->phase == DRAINING || d->reason == DONE_CANCELLED)
            return false;
        if (d->reason == DONE_LENGTH && w->n_first < w->cell->batch)
            snprintf(w->fault, sizeof w->fault,
                     "no room for all: %u of %u had begun when one ended", w->n_first,
                     w->cell->batch);
        else
            snprintf(w->fault, sizeof w->fault, "%s", reason_text(d));
        return true;
    }
    if (h->kind != MSG_STEP)
        return false;
    if (w->phase == DRAINING) {
        const struct msg_step *s = m;
        return w->n_done == w->n_asked && s->running + s->waiting == 0;
    }
    return hear_step(w, m);
}

/* ---- one cell ---- */

static uint32_t ceil_div(uint64_t a, uint64_t b)
{
    return (uint32_t)((a + b - 1) / b);
}

/* Enough for the last to begin while the first are decoding: a chunk at a time where prompts are
 * computed, a row at a time where sequences wait for room. */
static uint32_t tokens_needed(const struct bench *b, const struct cell *c)
{
    uint32_t chunk = c->setting->budget > 0 && b->chunk > SEGMENT_ROWS ? SEGMENT_ROWS : b->chunk;
    uint32_t each = c->computed ? ceil_div(c->context, chunk) + 2 : 2;
    return b->warm + b->steps + 16 + c->batch * each;
}

static status measure(struct bench_run *r, struct watch *w)
{
    uint32_t patience = w->b->patience_s;
    w->has_token = mem_alloc(w->cell->batch * sizeof *w->has_token);
    w->run = r;
    while (w->n_asked < w->cell->batch)
        submit_one(w);
    status st = bench_run_listen(r, hear, w, patience);
    w->phase = DRAINING;
    while (w->n_ended < w->n_asked && st == OK)
        end_one(w);
    if (st == OK && w->n_done < w->n_asked)
        st = bench_run_listen(r, hear, w, patience);
    mem_free(w->has_token);
    return st;
}

/* Why the engine cannot have it; "": it can. */
static void find_obstacle(const struct bench_run *r, const struct cell *c, char *to, size_t room)
{
    const struct engine_info *in = r->info;
    uint64_t len = (uint64_t)c->context + c->max_tokens;
    uint64_t blocks = (uint64_t)c->batch * ceil_div(len, in->block_rows);
    to[0] = '\0';
    if (len > in->max_model_len)
        snprintf(to, room, "needs %llu positions with its answers, there are %u",
                 (unsigned long long)len, in->max_model_len);
    else if (c->batch > in->max_num_seqs)
        snprintf(to, room, "more than %u sequences", in->max_num_seqs);
    else if (c->hot <= 0 && in->kv_blocks[1] == 0 && blocks > in->kv_blocks[0])
        snprintf(to, room, "needs %.2f GiB of KV, there are %.2f",
                 (double)blocks * (double)in->kv_block_bytes / 1073741824.0,
                 (double)in->kv_blocks[0] * (double)in->kv_block_bytes / 1073741824.0);
}

/* ---- results ---- */

static struct sparse_instance instance_of(const struct bench_setting *s,
                                          const struct kv_geometry *geo)
{
    struct sparse_instance in = {.plugin = sparse_at(s->choice.plugin), .choice = s->choice};
    if (sparse_choice_check(&s->choice, geo, &in.traits) != OK)
        in.traits.attends_all = true;
    return in;
}

/* Sequences hand in their counts in every 32nd step (cache/kv_spill.c): a window of whole 32 has as many of
 * each. */
static void add_hits(cJSON *row, const struct watch *w, const struct kv_geometry *geo)
{
    const struct msg_residence *a = &w->begin.residence, *z = &w->end.residence;
    double hits = (double)(z->page_hits - a->page_hits);
    double misses = (double)(z->page_misses - a->page_misses);
    const struct sparse_instance in = instance_of(w->cell->setting, geo);
    cJSON_AddNumberToObject(row, "spilled", (double)z->spilled);
    if (z->spilled == 0)
        return;
    double selected = attention_min_slots(&in, geo, w->cell->context);
    cJSON_AddNumberToObject(row, "hot", (double)z->hot_slots / (double)z->spilled / selected);
    if (hits + misses > 0)
        cJSON_AddNumberToObject(row, "hit", hits / (hits + misses));
    cJSON_AddNumberToObject(row, "fetch_gb_s",
                            (double)(z->fetched_bytes - a->fetched_bytes) / 1e3 /
                                (double)(w->end.now_us - w->begin.now_us));
}

static void add_times(cJSON *row, struct watch *w, uint64_t started_us)
{
    double us = (double)(w->end.now_us - w->begin.now_us), n = (double)w->gaps.n;
    cJSON_AddNumberToObject(row, "tok_s", (double)(w->tokens_end - w->tokens_begin) / us * 1e6);
    cJSON_AddNumberToObject(row, "ms", us / n / 1e3);
    cJSON_AddNumberToObject(row, "ms_p50", measure_percentile(&w->gaps, 50) / 1e3);
    cJSON_AddNumberToObject(row, "ms_p99", measure_percentile(&w->gaps, 99) / 1e3);
    cJSON_AddNumberToObject(row, "host_us_p50", measure_percentile(&w->host, 50));
    cJSON_AddNumberToObject(row, "host_us_p99", measure_percentile(&w->host, 99));
    cJSON_AddNumberToObject(row, "running", (double)w->decodes / n);
    cJSON_AddNumberToObject(row, "steps", n);
    cJSON_AddNumberToObject(
        row, "planned_rows",
        (double)(w->end.residence.planned_rows - w->begin.residence.planned_rows));
    cJSON_AddNumberToObject(row, "fill_s", (double)(w->begin.now_us - started_us) / 1e6);
}

/* How the backend ran the steps, where it says so. */
static void add_counts(cJSON *row, struct watch *w)
{
    const struct step_counts *a = &w->begin.counts, *z = &w->end.counts;
    double replayed = (double)(z->replayed - a->replayed);
    double captured = (double)(z->captured - a->captured), listed = (double)(z->listed - a->listed);
    if (replayed + captured + listed <= 0)
        return;
    cJSON_AddNumberToObject(row, "idle_us_p50", measure_percentile(&w->idle, 50));
    cJSON_AddNumberToObject(row, "idle_us_p99", measure_percentile(&w->idle, 99));
    cJSON_AddNumberToObject(row, "replayed", replayed / (replayed + captured + listed));
    cJSON_AddNumberToObject(row, "captured", captured);
    cJSON_AddNumberToObject(row, "listed", listed);
    cJSON_AddNumberToObject(row, "graphs", (double)z->graphs);
    cJSON_AddNumberToObject(row, "graph_bytes", (double)z->graph_bytes);
}

static cJSON *add_row(struct bench *b, const struct cell *c)
{
    cJSON *row = sheet_row(b->sheet);
    char feed[16] = "greedy";
    if (c->feed > 0)
        snprintf(feed, sizeof feed, "%u", c->feed);
    cJSON_AddStringToObject(row, "plugin", c->setting->label);
    cJSON_AddNumberToObject(row, "batch", c->batch);
    cJSON_AddNumberToObject(row, "context", c->context);
    cJSON_AddNumberToObject(row, "hot_asked", c->hot);
    cJSON_AddStringToObject(row, "feed", feed);
    return row;
}

static void tell(const struct cell *c, const cJSON *row)
{
    char tiers[64] = "";
    if (sheet_number(row, "spilled") > 0)
        snprintf(tiers, sizeof tiers, ", %.0f SPILLED that hit %.2f %%",
                 sheet_number(row, "spilled"), 100 * sheet_number(row, "hit"));
    if (sheet_text(row, "error")[0] != '\0')
        log_line(LOG_WARN, "%s, %u x %u: %s", c->setting->label, c->batch, c->context,
                 sheet_text(row, "error"));
    else
        log_line(LOG_INFO, "%s, %u x %u: %.1f tok/s, %.3f ms per step%s", c->setting->label,
                 c->batch, c->context, sheet_number(row, "tok_s"), sheet_number(row, "ms"), tiers);
}

static status run_cell(struct bench *b, struct bench_run *r, const struct cell *c)
{
    struct watch w = {.b = b, .cell = c};
    cJSON *row = add_row(b, c);
    const struct kv_geometry *geo = &r->info->catalog->geo;
    const struct sparse_instance in = instance_of(c->setting, geo);
    uint64_t started_us = clock_us();
    status st = OK;
    if (!in.traits.attends_all)
        cJSON_AddNumberToObject(row, "selected_rows", attention_budget(&in, geo, c->context));
    find_obstacle(r, c, w.fault, sizeof w.fault);
    if (w.fault[0] == '\0')
        st = measure(r, &w);
    if (st == OK && w.fault[0] != '\0') {
        cJSON_AddStringToObject(row, "error", w.fault);
    } else if (st == OK) {
        add_times(row, &w, started_us);
        add_counts(row, &w);
        add_hits(row, &w, geo);
    }
    tell(c, row);
    measure_fini(&w.gaps);
    measure_fini(&w.host);
    measure_fini(&w.idle);
    return st;
}

/* ---- engines ---- */

static uint32_t largest(const struct bench_numbers *n)
{
    double x = 0;
    for (uint32_t i = 0; i < n->n; i++)
        x = n->v[i] > x ? n->v[i] : x;
    return (uint32_t)x;
}

/* One for all cells that stay RESIDENT. Its contexts are the model's, or what memory holds. */
static struct engine_config config_resident(const struct bench *b, uint32_t max_batch)
{
    struct engine_config c = b->config;
    c.max_num_seqs = max_batch;
    if (c.max_batched_tokens < max_batch)
        c.max_batched_tokens = max_batch;
    return c;
}

/* HBM for hot sets of c->hot times what a row selects, or for what else cannot be done without: the prompt
 * that is being read beside the least of the others. DRAM for all. */
static struct engine_config config_spilled(const struct bench *b, const struct cell *c,
                                           const struct kv_geometry *geo)
{
    struct engine_config cfg = config_resident(b, c->batch);
    const struct sparse_instance in = instance_of(c->setting, geo);
    uint32_t r = geo->block_rows, len = c->context + c->max_tokens;
    uint64_t whole = ceil_div(len, r), tail = ceil_div(2 * SEGMENT_ROWS + TAIL_ROWS, r) + 2;
    uint64_t selected = attention_min_slots(&in, geo, len);
    uint64_t each = (uint64_t)(c->hot * (double)selected) + tail, least = selected + tail;
    each = each < whole ? each : whole;
    least = least < whole ? least : whole;
    uint64_t asked = c->batch * each, needed = whole + (c->batch - 1) * least;
    uint64_t blocks = asked > needed ? asked : needed;
    cfg.sparse = c->setting->choice;
    cfg.max_model_len = len;
    cfg.kv_hbm_bytes =
        blocks * geo->block_bytes[LANE_SPARSE] + c->batch * whole * geo->block_bytes[LANE_DENSE];
    cfg.kv_dram_bytes =
        (c->batch * whole + tail) * (geo->block_bytes[LANE_SPARSE] + geo->block_bytes[LANE_DENSE]);
    return cfg;
}

static void note_backend(struct bench *b, const struct bench_run *r)
{
    if (cJSON_GetObjectItem(b->sheet, "backend") == NULL)
        cJSON_AddStringToObject(b->sheet, "backend", r->info->backend);
}

/* Of an engine that holds next to nothing. */
static status learn_geometry(struct bench *b, struct kv_geometry *geo)
{
    struct engine_config c = b->config;
    struct bench_run r;
    c.max_num_seqs = 1;
    c.max_model_len = 1024;
    c.max_batched_tokens = 64;
    c.kv_hbm_bytes = c.kv_dram_bytes = 0;
    c.sparse = (struct sparse_choice){0};
    TRY(bench_run_open(&r, &c));
    *geo = r.info->catalog->geo;
    note_backend(b, &r);
    bench_run_close(&r);
    return OK;
}

/* ---- the grid ---- */

struct grid {
    struct bench_numbers batches, contexts, hot, feeds;
    bool computed;
};

static status read_grid(struct bench *b, struct grid *g)
{
    TRY(bench_numbers(&g->batches, &b->batches, "batch", "1", 1, 4096));
    TRY(bench_numbers(&g->contexts, &b->contexts, "context", "4096", 2, 1 << 24));
    TRY(bench_numbers(&g->hot, &b->hot, "hot-set", "0", 0, 1000));
    TRY(bench_numbers(&g->feeds, &b->feeds, "feed", "0", 0, 1024));
    g->computed = strcmp(b->fill, "prefill") == 0;
    if (!g->computed && strcmp(b->fill, "synthetic") != 0)
        return err(ERR_ARG, "--fill %s: there are synthetic and prefill", b->fill);
    return OK;
}

typedef status cell_runner(void *arg, struct bench *b, const struct cell *c);

static status each_cell(struct bench *b, const struct grid *g, double hot, cell_runner *run,
                        void *arg)
{
    for (uint32_t s = 0; s < b->n_settings; s++)
        for (uint32_t x = 0; x < g->contexts.n; x++)
            for (uint32_t y = 0; y < g->batches.n; y++)
                for (uint32_t f = 0; f < g->feeds.n; f++) {
                    struct cell c = {.setting = &b->settings[s],
                                     .batch = (uint32_t)g->batches.v[y],
                                     .context = (uint32_t)g->contexts.v[x],
                                     .feed = (uint32_t)g->feeds.v[f],
                                     .hot = hot,
                                     .computed = g->computed};
                    c.max_tokens = tokens_needed(b, &c);
                    TRY(run(arg, b, &c));
                }
    return OK;
}

static status run_resident(void *arg, struct bench *b, const struct cell *c)
{
    return run_cell(b, arg, c);
}

/* One engine after the other; cells that differ in what they feed share one. */
struct spilled {
    struct kv_geometry geo;
    struct engine_config cfg;
    struct bench_run run;
    bool open;
};

static void close_spilled(struct spilled *s)
{
    if (s->open)
        bench_run_close(&s->run);
    s->open = false;
}

static bool same_engine(const struct engine_config *a, const struct engine_config *b)
{
    return a->max_num_seqs == b->max_num_seqs && a->max_model_len == b->max_model_len &&
           a->kv_hbm_bytes == b->kv_hbm_bytes && a->kv_dram_bytes == b->kv_dram_bytes &&
           sparse_choice_equal(&a->sparse, &b->sparse);
}

/* dense has no hot set: it is measured RESIDENT, once. */
static status run_spilled(void *arg, struct bench *b, const struct cell *c)
{
    struct spilled *s = arg;
    if (c->setting->budget <= 0)
        return OK;
    const struct engine_config cfg = config_spilled(b, c, &s->geo);
    if (!s->open || !same_engine(&s->cfg, &cfg)) {
        close_spilled(s);
        s->cfg = cfg;
        s->open = bench_run_open(&s->run, &cfg) == OK;
    }
    if (s->open)
        return run_cell(b, &s->run, c);
    cJSON *row = add_row(b, c); /* the others may still fit */
    cJSON_AddStringToObject(row, "error", err_text());
    tell(c, row);
    return OK;
}

static status run_hot_set(struct bench *b, const struct grid *g, double hot)
{
    struct spilled *s = mem_alloc(sizeof *s);
    status st = learn_geometry(b, &s->geo);
    if (st == OK)
        st = each_cell(b, g, hot, run_spilled, s);
    close_spilled(s);
    mem_free(s);
    return st;
}

static status run_all_resident(struct bench *b, const struct grid *g)
{
    struct bench_run r;
    const struct engine_config cfg = config_resident(b, largest(&g->batches));
    TRY(bench_run_open(&r, &cfg));
    note_backend(b, &r);
    status st = each_cell(b, g, 0, run_resident, &r);
    bench_run_close(&r);
    return st;
}

static status run_grid(struct bench *b, const struct grid *g)
{
    for (uint32_t h = 0; h < g->hot.n; h++)
        TRY(g->hot.v[h] > 0 ? run_hot_set(b, g, g->hot.v[h]) : run_all_resident(b, g));
    return OK;
}

static bool has_errors(const cJSON *rows)
{
    const cJSON *row;
    cJSON_ArrayForEach(row, rows)
    {
        if (sheet_text(row, "error")[0] != '\0')
            return true;
    }
    return false;
}

static status draw(const struct bench *b)
{
    struct plot *p = mem_alloc(sizeof *p);
    char name[48];
    const cJSON *row;
    p->title = "decode";
    p->x_label = "tokens of context";
    p->y_label = "tokens per second, all sequences together";
    p->log_x = p->log_y = true;
    cJSON_ArrayForEach(row, cJSON_GetObjectItem(b->sheet, "rows"))
    {
        double hot = sheet_number(row, "hot_asked");
        snprintf(name, sizeof name, "%s, %g together%s", sheet_text(row, "plugin"),
                 sheet_number(row, "batch"), hot > 0 ? ", SPILLED" : "");
        plot_point(plot_series(p, name), sheet_number(row, "context"), sheet_number(row, "tok_s"));
    }
    status st = plot_save(p, b->svg);
    mem_free(p);
    return st;
}

status bench_decode(struct bench *b)
{
    struct grid g;
    TRY(read_grid(b, &g));
    cJSON_AddStringToObject(b->sheet, "model", b->model ? b->model : b->device);
    cJSON_AddStringToObject(b->sheet, "load_format", b->load_format);
    cJSON_AddStringToObject(b->sheet, "fill", b->fill);
    cJSON_AddNumberToObject(b->sheet, "block_size", b->block_rows);
    cJSON_AddStringToObject(b->sheet, "kv_cache_dtype", kv_type_name(b->config.kv_type));
    cJSON_AddNumberToObject(b->sheet, "exempt_layers", b->exempt_layers);
    cJSON_AddNumberToObject(b->sheet, "min_rows", b->min_rows);
    TRY(run_grid(b, &g));
    printf("%s, blocks of %u%s, %u exempt layers, %u steps behind %u\n%s\n\n",
           sheet_text(b->sheet, "backend"), b->block_rows,
           b->config.kv_type == KV_E4M3 ? " in fp8" : "", b->exempt_layers, b->steps, b->warm,
           g.computed
               ? "KV of the prompts: computed"
               : "synthetic KV: a prompt's K and V are random rows, its last row is computed");
    const cJSON *rows = cJSON_GetObjectItem(b->sheet, "rows");
    sheet_print(stdout, rows, columns, ARRAY_LEN(columns) - !has_errors(rows));
    printf(
        "\nhot set x: slots of a spilled sequence over what a row selects; hit: as reached in this "
        "run, not a real model's\n");
    return draw(b);
}
