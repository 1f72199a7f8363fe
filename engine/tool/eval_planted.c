/* `spind eval planted`: does the selection find tokens that were planted among others, at lengths no
 * small model reaches? Without a model, on the backend's own operations: append, seal, score, select,
 * attend, exactly as a step calls them (planted.h makes the traces). */
#include "engine/tool/eval.h"
#include "engine/tool/measure.h"
#include "engine/tool/planted.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { HEADS = PLANTED_KV_HEADS * PLANTED_GROUP, DIM = PLANTED_DIM, CHUNK = 256, STEP = 32 };
static const double SHARE = 0.8; /* of the attention on what was planted */

struct bench {
    struct eval *e;
    struct backend *be;
    struct kv_geometry geo;
    struct kv_memory kv;
    struct attention *at;
    const struct planted *trace;
    uint32_t n_blocks, n_segments, first_pos; /* of the rows that query */
    block_id *home, *mixed;
    uint32_t *records;
    size_t arena_bytes, records_bytes, qkv_bytes, rope_bytes, out_bytes;
    float *qkv, *rope, *dense, *sparse; /* rope: no rotation, the trace's keys are rotated */
    /* of the setting that runs */
    struct measure_sample recall, error;
};

static status bench_memory(struct bench *b, uint32_t positions)
{
    struct backend *be = b->be;
    uint32_t rows = b->e->block_rows;
    b->geo = (struct kv_geometry){.block_rows = rows,
                                  .layers = 1,
                                  .kv_heads = PLANTED_KV_HEADS,
                                  .head_dim = DIM,
                                  .type = b->e->kv_type};
    b->geo.page_bytes = kv_page_bytes(&b->geo);
    b->geo.n_lanes[LANE_SPARSE] = PLANTED_KV_HEADS;
    b->geo.block_bytes[LANE_SPARSE] = PLANTED_KV_HEADS * b->geo.page_bytes;
    b->n_segments = positions / SEGMENT_ROWS;
    b->n_blocks = (positions + b->e->rows + CHUNK) / rows + 1;
    b->kv.geo = &b->geo;
    b->arena_bytes = 2 * (size_t)b->n_blocks * b->geo.block_bytes[LANE_SPARSE];
    b->qkv_bytes = (size_t)CHUNK * (HEADS + 2 * PLANTED_KV_HEADS) * DIM * sizeof(float);
    b->rope_bytes = 2 * (size_t)b->n_blocks * rows * (DIM / 2) * sizeof(float);
    b->out_bytes = (size_t)b->e->rows * HEADS * DIM * sizeof(float);
    b->kv.hbm[LANE_SPARSE] = be->ops->alloc(be, b->arena_bytes);
    b->qkv = be->ops->alloc(be, b->qkv_bytes);
    b->rope = be->ops->alloc(be, b->rope_bytes);
    b->dense = be->ops->alloc(be, b->out_bytes);
    b->sparse = be->ops->alloc(be, b->out_bytes);
    b->home = mem_alloc(b->n_blocks * sizeof *b->home);
    b->mixed = mem_alloc(b->n_blocks * sizeof *b->mixed);
    b->records = mem_alloc((b->n_segments + 1) * sizeof *b->records);
    if (!b->kv.hbm[LANE_SPARSE] || !b->qkv || !b->rope || !b->dense || !b->sparse)
        return err(ERR_MEMORY, "a trace of %u positions", positions);
    for (uint32_t i = 0; i < b->n_blocks; i++)
        b->home[i] = i;
    for (uint32_t i = 0; i < b->n_segments; i++)
        b->records[i] = i;
    for (size_t i = 0; i < (size_t)b->n_blocks * rows * (DIM / 2); i++)
        b->rope[i] = 1; /* cosines; the sines behind them stay 0 */
    return OK;
}

static void bench_fini(struct bench *b)
{
    struct backend *be = b->be;
    attention_destroy(b->at);
    if (b->kv.hbm[LANE_SPARSE])
        be->ops->free(be, b->kv.hbm[LANE_SPARSE], b->arena_bytes);
    if (b->kv.records)
        be->ops->free(be, b->kv.records, b->records_bytes);
    if (b->qkv)
        be->ops->free(be, b->qkv, b->qkv_bytes);
    if (b->rope)
        be->ops->free(be, b->rope, b->rope_bytes);
    if (b->dense)
        be->ops->free(be, b->dense, b->out_bytes);
    if (b->sparse)
        be->ops->free(be, b->sparse, b->out_bytes);
    mem_free(b->home);
    mem_free(b->mixed);
    mem_free(b->records);
}

/* ---- rows ---- */

static float *qkv_row(struct bench *b, uint32_t i)
{
    return b->qkv + (size_t)i * (HEADS + 2 * PLANTED_KV_HEADS) * DIM;
}

static void append(struct bench *b, uint32_t first_pos, uint32_t n)
{
    const struct batch_seq seq = {.n_rows = n, .first_pos = first_pos, .blocks = {b->home}};
    const struct append_args a = {.kv = &b->kv,
                                  .heads = HEADS,
                                  .seqs = &seq,
                                  .n_seqs = 1,
                                  .rope_cos = b->rope,
                                  .rope_sin = b->rope + b->rope_bytes / sizeof(float) / 2,
                                  .qkv = b->qkv};
    b->be->ops->append(b->be, &a);
}

/* K of the trace, V at random. */
static void fill(struct bench *b, const struct planted *t)
{
    uint64_t random = 7;
    for (uint32_t from = 0, n; from < t->n; from += n) {
        n = t->n - from < CHUNK ? t->n - from : CHUNK;
        for (uint32_t i = 0; i < n; i++)
            for (uint32_t h = 0; h < PLANTED_KV_HEADS; h++) {
                float *k = qkv_row(b, i) + (size_t)(HEADS + h) * DIM;
                float *v = k + (size_t)PLANTED_KV_HEADS * DIM;
                memcpy(k, t->k + ((size_t)h * t->n + from + i) * DIM, DIM * sizeof *k);
                for (int d = 0; d < DIM; d++)
                    v[d] = planted_normal(&random);
            }
        append(b, from, n);
    }
}

/* Query rows [from, + n): row i asks for target i, with a little of its own. Their keys are nothing. */
static void ask(struct bench *b, uint32_t from, uint32_t n)
{
    uint64_t random = 99 + from;
    memset(b->qkv, 0, b->qkv_bytes);
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t h = 0; h < HEADS; h++) {
            size_t target =
                planted_target(h / PLANTED_GROUP, (from + i) % PLANTED_TARGETS, h % PLANTED_GROUP);
            float *q = qkv_row(b, i) + (size_t)h * DIM;
            for (int d = 0; d < DIM; d++)
                q[d] = b->trace->axis[target * DIM + (size_t)d] + 0.02f * planted_normal(&random);
        }
}

/* ---- a setting ---- */

static void see_selection(void *arg, const struct attention_selection *s)
{
    struct bench *b = arg;
    const struct planted *t = b->trace;
    uint32_t rows = b->geo.block_rows, hits = 0, all = 0;
    uint8_t *got = mem_alloc(t->n);
    for (uint32_t i = 0; i < s->n_pages; i++) {
        uint32_t first = s->pages[i] * rows, segment = first / SEGMENT_ROWS;
        const uint16_t *map =
            s->in->traits.permutes ? sparse_digest(&b->kv, segment, 0, s->head) : NULL;
        for (uint32_t r = first % SEGMENT_ROWS; r < first % SEGMENT_ROWS + rows; r++)
            got[segment * SEGMENT_ROWS + (map ? map[r] : r)] = 1;
    }
    uint32_t target = (s->pos - b->first_pos) % PLANTED_TARGETS;
    for (uint32_t h = 0; h < PLANTED_GROUP; h++)
        for (uint32_t i = 0; i < t->n_tokens; i++) {
            uint32_t at = t->at[planted_target(s->head, target, h) * PLANTED_TOKENS + i];
            if (at >= s->n_segments * SEGMENT_ROWS)
                continue; /* in the tail: always attended */
            all++;
            hits += got[at];
        }
    if (all > 0)
        measure_add(&b->recall, (double)hits / all);
    mem_free(got);
}

static status seal_all(struct bench *b, const struct sparse_instance *in)
{
    struct backend *be = b->be;
    uint32_t per = SEGMENT_ROWS / b->geo.block_rows;
    for (uint32_t i = 0; i < b->n_blocks; i++)
        b->mixed[i] = b->home[i];
    for (uint32_t s = 0; s < b->n_segments; s++) {
        for (uint32_t i = s * per; i < (s + 1) * per && in->layout_id != 0; i++)
            b->mixed[i] = b->home[i] + b->n_blocks;
        attention_seal(b->at, in, s, s, 0, b->home + (size_t)s * per, b->mixed + (size_t)s * per);
    }
    return be->ops->sync(be);
}

static status make_records(struct bench *b, const struct sparse_traits *t)
{
    size_t bytes = t->digest.kind == DIGEST_NONE ? t->digest_bytes
                                                 : b->be->ops->digest_bytes(&b->geo, &t->digest);
    if (b->kv.records)
        b->be->ops->free(b->be, b->kv.records, b->records_bytes);
    b->kv.record_lane_bytes = bytes;
    b->kv.record_bytes = bytes * PLANTED_KV_HEADS;
    b->records_bytes = b->kv.record_bytes * b->n_segments + 64;
    b->kv.records = b->be->ops->alloc(b->be, b->records_bytes);
    return b->kv.records ? OK : ERR_MEMORY;
}

/* in NULL: dense. */
static status query(struct bench *b, const struct sparse_instance *in, float *out)
{
    for (uint32_t from = 0, n; from < b->e->rows; from += n) {
        n = b->e->rows - from < STEP ? b->e->rows - from : STEP;
        const struct batch_seq seq = {.n_rows = n,
                                      .first_pos = b->first_pos + from,
                                      .blocks = {in ? b->mixed : b->home},
                                      .planned = in != NULL};
        ask(b, from, n);
        append(b, b->first_pos + from, n);
        attention_begin(b->at);
        for (uint32_t i = 0; in != NULL && i < n; i++) {
            const struct plan_row row = {.row = i,
                                         .pos = b->first_pos + from + i,
                                         .n_segments = b->n_segments,
                                         .records = b->records,
                                         .blocks = b->mixed};
            attention_add(b->at, in, NULL, &row);
        }
        attention_layer(b->at, 0, &seq, 1, b->qkv, out + (size_t)from * HEADS * DIM);
    }
    return b->be->ops->sync(b->be);
}

static void compare_outputs(struct bench *b)
{
    for (size_t i = 0; i < (size_t)b->e->rows * HEADS; i++) {
        double apart = 0, length = 0;
        for (size_t d = i * DIM; d < (i + 1) * DIM; d++) {
            double x = (double)b->dense[d], y = (double)b->sparse[d];
            apart += (x - y) * (x - y);
            length += x * x;
        }
        measure_add(&b->error, sqrt(apart / (length > 0 ? length : 1)));
    }
}

static status run_setting(struct bench *b, const struct eval_setting *s, cJSON *row)
{
    struct sparse_choice c = s->choice;
    struct sparse_traits t;
    c.interval = 1;
    TRY(sparse_choice_check(&c, &b->geo, &t));
    if (t.attends_all || t.map != MAP_PAGE)
        return err(ERR_ARG, "planted tokens are looked for in whole pages; %s does not select them",
                   s->label);
    TRY(make_records(b, &t));
    const struct sparse_instance *in = attention_instance(b->at, &c);
    if (in == NULL)
        return ERR_ARG;
    b->recall.n = b->error.n = 0;
    status st = seal_all(b, in);
    attention_record(b->at, see_selection, b);
    if (st == OK)
        st = query(b, in, b->sparse);
    attention_record(b->at, NULL, NULL);
    attention_release(b->at, in);
    TRY(st);
    compare_outputs(b);
    cJSON_AddStringToObject(row, "plugin", s->label);
    cJSON_AddNumberToObject(row, "block_size", b->geo.block_rows);
    cJSON_AddNumberToObject(row, "budget", s->budget);
    if (b->recall.n > 0) {
        cJSON_AddNumberToObject(row, "recall", measure_mean(&b->recall));
        cJSON_AddNumberToObject(row, "recall_p5", measure_percentile(&b->recall, 5));
        cJSON_AddNumberToObject(row, "found_all", measure_at_least(&b->recall, 1));
    }
    cJSON_AddNumberToObject(row, "error", measure_mean(&b->error));
    cJSON_AddNumberToObject(row, "error_p95", measure_percentile(&b->error, 95));
    return OK;
}

/* ---- a trace ---- */

static status run_trace(struct eval *e, struct backend *be, const char *mode, uint32_t segments,
                        cJSON *rows)
{
    struct bench b = {.e = e, .be = be, .first_pos = segments * SEGMENT_ROWS + TAIL_ROWS};
    struct planted t = {0};
    status st = planted_make(&t, mode, b.first_pos, SHARE, e->seed);
    b.trace = &t;
    if (st == OK)
        st = bench_memory(&b, b.first_pos);
    if (st == OK)
        st = attention_create(&b.at, be, &b.kv, HEADS, 1 / sqrtf(DIM), STEP,
                              b.first_pos + e->rows + CHUNK);
    if (st == OK) {
        fill(&b, &t);
        st = query(&b, NULL, b.dense);
    }
    for (uint32_t i = 0; i < e->n_settings && st == OK; i++) {
        cJSON *row = cJSON_CreateObject();
        cJSON_AddItemToArray(rows, row);
        cJSON_AddStringToObject(row, "mode", mode);
        cJSON_AddNumberToObject(row, "context", b.first_pos);
        st = run_setting(&b, &e->settings[i], row);
        eval_progress(e, "%s at %u, %s budget %g: recall %.3f", mode, b.first_pos,
                      e->settings[i].label, e->settings[i].budget, measure_mean(&b.recall));
    }
    measure_fini(&b.recall);
    measure_fini(&b.error);
    bench_fini(&b);
    planted_fini(&t);
    return st;
}

static const struct sheet_column columns[] = {
    {"mode", "trace", SHEET_TEXT, 0},          {"context", "context", SHEET_COUNT, 0},
    {"plugin", "plug-in", SHEET_TEXT, 0},      {"block_size", "block", SHEET_COUNT, 0},
    {"budget", "budget", SHEET_FIXED, 3},      {"recall", "recall", SHEET_FIXED, 3},
    {"recall_p5", "p5", SHEET_FIXED, 3},       {"found_all", "found all", SHEET_PERCENT, 1},
    {"error", "output error", SHEET_FIXED, 3}, {"error_p95", "p95", SHEET_FIXED, 3},
};

static void list_defaults(struct eval *e)
{
    static const char *const lengths[] = {"8192", "32768", "131072"};
    if (e->lengths.n == 0)
        for (size_t i = 0; i < ARRAY_LEN(lengths); i++)
            e->lengths.v[e->lengths.n++] = lengths[i];
    if (e->modes.n == 0)
        for (uint32_t i = 0; i < planted_count(); i++)
            e->modes.v[e->modes.n++] = planted_name(i);
}

static status run_all(struct eval *e, struct backend *be, cJSON *rows)
{
    struct kv_geometry geo = {
        .block_rows = e->block_rows, .layers = 1, .kv_heads = PLANTED_KV_HEADS, .head_dim = DIM};
    double length;
    /* the caller takes it back */
    /* cppcheck-suppress autoVariables */
    e->geo = &geo;
    TRY(eval_make_settings(e));
    eval_expect(e, e->lengths.n * e->modes.n * e->n_settings);
    for (uint32_t l = 0; l < e->lengths.n; l++) {
        if (!(eval_list_number(e->lengths.v[l], &length) >= SEGMENT_ROWS && length <= 1 << 20))
            return err(ERR_ARG, "--length %s: wanted are positions, 1024 to 1048576",
                       e->lengths.v[l]);
        for (uint32_t m = 0; m < e->modes.n; m++)
            TRY(run_trace(e, be, e->modes.v[m], (uint32_t)length / SEGMENT_ROWS, rows));
    }
    return OK;
}

status eval_planted_rows(struct eval *e, cJSON *rows)
{
    const struct cpu_options cpu = {.isa = e->isa ? e->isa : "auto", .n_threads = e->threads};
    struct backend *be;
    TRY(cpu_backend_open(&be, &cpu));
    list_defaults(e);
    status st = run_all(e, be, rows);
    be->ops->close(be);
    e->geo = NULL;
    return st;
}

static status run(struct eval *e)
{
    cJSON *rows = cJSON_GetObjectItem(e->sheet, "rows");
    TRY(eval_planted_rows(e, rows));
    sheet_print(stdout, rows, columns, ARRAY_LEN(columns));
    return OK;
}

const struct eval_command eval_planted = {
    "planted", "planted traces to 128K: recall without a model", NULL, run};
