/* Every plug-in of the registry, unasked, and the one that somebody else built, on the CPU backend
 * through engine/attention.c: with a budget of all there is it attends what dense does; what it
 * attends depends neither on its neighbours in the step nor on their order; and it never selects more
 * than it may. */
#include "engine/attention.h"
#include "kernels/core/splitmix.h"
#include "tests/tap.h"

#include <math.h>

enum {
    LAYERS = 2,
    KV_HEADS = 2,
    GROUP = 3,
    HEADS = KV_HEADS * GROUP,
    DIM = 64,
    WIDTH = (HEADS + 2 * KV_HEADS) * DIM,
    SEQS = 3,
    SEGMENTS = 2,
    POS = SEGMENTS * SEGMENT_ROWS + 200, /* of the row that attends by plan */
    ROWS = POS + 1,
    RECORD_BYTES = 128 << 10, /* of a lane: more than any plug-in's */
};

struct world {
    struct backend *be;
    struct kv_geometry geo;
    struct kv_memory kv;
    size_t arena_bytes;
    uint32_t n_blocks; /* of a sequence */
    block_id *blocks[SEQS];
    uint32_t records[SEQS][SEGMENTS];
    float *kv_rows[SEQS]; /* [LAYERS][ROWS][2 * KV_HEADS][DIM] as stored */
    float *qkv;           /* [LAYERS][SEQS][WIDTH] of the rows at POS */
    struct attention *at;
};

static char folder[1024]; /* of shared objects */

static float noise(uint64_t *x)
{
    return (float)((int64_t)splitmix_next(x) >> 40) / (float)(1 << 23);
}

/* Keys lie around a few directions, so that some pages matter much more than others. */
static void fill_row(float *row, uint64_t *x, uint32_t pos)
{
    uint64_t direction = 1000 + splitmix_next(x) % 12 + pos / 512;
    for (uint32_t i = 0; i < WIDTH; i++)
        row[i] = noise(x) * 0.5f;
    for (uint32_t h = 0; h < HEADS + KV_HEADS; h++)
        for (uint32_t c = 0; c < DIM; c++)
            row[h * DIM + c] += noise(&direction) * (h < HEADS ? 3.0f : 1.5f);
}

static void append(struct world *w, uint32_t seq, uint32_t layer, float *qkv)
{
    static float ones[ROWS * DIM / 2], zeros[ROWS * DIM / 2];
    for (size_t i = 0; i < ARRAY_LEN(ones); i++)
        ones[i] = 1;
    struct batch_seq s = {.n_rows = ROWS, .blocks = {w->blocks[seq]}};
    struct append_args a = {.kv = &w->kv,
                            .layer = layer,
                            .heads = HEADS,
                            .seqs = &s,
                            .n_seqs = 1,
                            .rope_cos = ones,
                            .rope_sin = zeros,
                            .qkv = qkv};
    w->be->ops->append(w->be, &a);
}

static void fill(struct world *w, uint32_t seq)
{
    uint64_t x = 77 + seq;
    float *qkv = mem_alloc((size_t)ROWS * WIDTH * sizeof *qkv);
    w->kv_rows[seq] = mem_alloc((size_t)LAYERS * ROWS * 2 * KV_HEADS * DIM * sizeof(float));
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        for (uint32_t p = 0; p < ROWS; p++) {
            float *row = qkv + (size_t)p * WIDTH;
            fill_row(row, &x, p);
            for (uint32_t i = 0; i < 2 * KV_HEADS * DIM; i++)
                w->kv_rows[seq][((size_t)layer * ROWS + p) * 2 * KV_HEADS * DIM + i] =
                    bf16_to_f32(f32_to_bf16(row[HEADS * DIM + i]));
        }
        memcpy(w->qkv + ((size_t)layer * SEQS + seq) * WIDTH, qkv + (size_t)POS * WIDTH,
               WIDTH * sizeof *qkv);
        append(w, seq, layer, qkv);
    }
    mem_free(qkv);
}

static void world_open(struct world *w, uint32_t r)
{
    size_t page = (size_t)r * DIM * 4;
    *w = (struct world){.n_blocks = (ROWS + r - 1) / r};
    CHECK(cpu_backend_open(&w->be, &(struct cpu_options){.isa = "auto", .n_threads = 2}) == OK);
    w->geo = (struct kv_geometry){.block_rows = r,
                                  .layers = LAYERS,
                                  .kv_heads = KV_HEADS,
                                  .head_dim = DIM,
                                  .page_bytes = page,
                                  .n_lanes = {LAYERS * KV_HEADS},
                                  .block_bytes = {LAYERS * KV_HEADS * page}};
    w->arena_bytes = w->geo.block_bytes[LANE_SPARSE] * w->n_blocks * SEQS;
    w->kv = (struct kv_memory){.geo = &w->geo,
                               .hbm = {w->be->ops->alloc(w->be, w->arena_bytes)},
                               .record_lane_bytes = RECORD_BYTES,
                               .record_bytes = (size_t)RECORD_BYTES * LAYERS * KV_HEADS};
    w->kv.records = w->be->ops->alloc(w->be, w->kv.record_bytes * SEQS * SEGMENTS);
    w->qkv = mem_alloc(sizeof(float) * LAYERS * SEQS * WIDTH);
    for (uint32_t s = 0; s < SEQS; s++) {
        w->blocks[s] = mem_alloc(w->n_blocks * sizeof(block_id));
        for (uint32_t i = 0; i < w->n_blocks; i++)
            w->blocks[s][i] = (w->n_blocks - 1 - i) * SEQS + s; /* scattered */
        for (uint32_t i = 0; i < SEGMENTS; i++)
            w->records[s][i] = (SEGMENTS - 1 - i) * SEQS + s;
        fill(w, s);
    }
    CHECK(attention_create(&w->at, w->be, &w->kv, HEADS, 0.125f, 64, 4096) == OK);
}

static void world_close(struct world *w)
{
    attention_destroy(w->at);
    for (uint32_t s = 0; s < SEQS; s++) {
        mem_free(w->blocks[s]);
        mem_free(w->kv_rows[s]);
    }
    mem_free(w->qkv);
    w->be->ops->free(w->be, w->kv.hbm[0], w->arena_bytes);
    w->be->ops->free(w->be, w->kv.records, w->kv.record_bytes * SEQS * SEGMENTS);
    w->be->ops->close(w->be);
}

/* Dense attention of query head h of a sequence's row at POS, in double. */
static void reference(const struct world *w, uint32_t seq, uint32_t layer, uint32_t h, double *out)
{
    static double p[ROWS];
    const float *q = w->qkv + ((size_t)layer * SEQS + seq) * WIDTH + (size_t)h * DIM;
    const float *rows = w->kv_rows[seq] + (size_t)layer * ROWS * 2 * KV_HEADS * DIM;
    double most = -INFINITY, sum = 0;
    for (uint32_t i = 0; i < ROWS; i++) {
        const float *k = rows + ((size_t)i * 2 * KV_HEADS + h / GROUP) * DIM;
        p[i] = 0;
        for (uint32_t c = 0; c < DIM; c++)
            p[i] += (double)q[c] * (double)k[c] * 0.125;
        most = p[i] > most ? p[i] : most;
    }
    memset(out, 0, DIM * sizeof *out);
    for (uint32_t i = 0; i < ROWS; i++) {
        const float *v = rows + ((size_t)i * 2 * KV_HEADS + KV_HEADS + h / GROUP) * DIM;
        p[i] = exp(p[i] - most);
        sum += p[i];
        for (uint32_t c = 0; c < DIM; c++)
            out[c] += p[i] * (double)v[c];
    }
    for (uint32_t c = 0; c < DIM; c++)
        out[c] /= sum;
}

static void seal_all(struct world *w, const struct sparse_instance *in)
{
    uint32_t per_segment = SEGMENT_ROWS / w->geo.block_rows;
    for (uint32_t s = 0; s < SEQS && !in->traits.attends_all; s++)
        for (uint32_t i = 0; i < SEGMENTS; i++) {
            const block_id *b = w->blocks[s] + (size_t)i * per_segment;
            attention_seal(w->at, in, i, w->records[s][i], w->records[s][0], b, b);
        }
}

/* One step of a row of each of order[n]; out[layer][i-th of order][HEADS * DIM]. */
static void step(struct world *w, const struct sparse_instance *in, const uint32_t *order,
                 uint32_t n, float *out)
{
    struct batch_seq seqs[SEQS];
    float qkv[SEQS * WIDTH];
    bool planned = !in->traits.attends_all;
    attention_begin(w->at);
    for (uint32_t i = 0; i < n; i++) {
        uint32_t s = order[i];
        seqs[i] = (struct batch_seq){.first_row = i,
                                     .n_rows = 1,
                                     .first_pos = POS,
                                     .blocks = {w->blocks[s]},
                                     .first_plan = attention_rows(w->at),
                                     .planned = planned};
        const struct plan_row row = {.row = i,
                                     .pos = POS,
                                     .n_segments = SEGMENTS,
                                     .records = w->records[s],
                                     .blocks = w->blocks[s]};
        if (planned)
            attention_add(w->at, in, NULL, &row);
    }
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        for (uint32_t i = 0; i < n; i++)
            memcpy(qkv + (size_t)i * WIDTH, w->qkv + ((size_t)layer * SEQS + order[i]) * WIDTH,
                   WIDTH * sizeof *qkv);
        attention_layer(w->at, layer, seqs, n, qkv, out + (size_t)layer * SEQS * HEADS * DIM);
    }
    CHECK(w->be->ops->sync(w->be) == OK);
}

static double distance(const struct world *w, const float *out, uint32_t seq, uint32_t at)
{
    double worst = 0, want[DIM];
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        for (uint32_t h = 0; h < HEADS; h++) {
            const float *got = out + (((size_t)layer * SEQS + at) * HEADS + h) * DIM;
            reference(w, seq, layer, h, want);
            for (uint32_t c = 0; c < DIM; c++)
                worst = fmax(worst, fabs(want[c] - (double)got[c]));
        }
    return worst;
}

/* ---- what a plan may hold ---- */

struct watch {
    const struct world *w;
    uint32_t n, bad, most; /* most: pages of a plan */
};

static void watch_selection(void *arg, const struct attention_selection *s)
{
    struct watch *t = arg;
    uint32_t r = t->w->geo.block_rows, sinks = s->in->traits.sinks / r;
    uint32_t rows = attention_budget(s->in, &t->w->geo, s->pos + 1);
    t->n++;
    t->most = s->n_pages > t->most ? s->n_pages : t->most;
    for (uint32_t i = 0; i < s->n_pages; i++)
        t->bad += (i > 0 && s->pages[i] <= s->pages[i - 1]) || (i < sinks && s->pages[i] != i) ||
                  s->pages[i] >= SEGMENTS * SEGMENT_ROWS / r;
    t->bad += s->n_pages < sinks || s->n_pages > attention_min_slots(s->in, &t->w->geo, s->pos + 1);
    /* Of a PAGE map the budget is whole pages, one at least. */
    if (s->in->traits.map == MAP_PAGE)
        t->bad += s->n_pages - sinks > (rows / r > 0 ? rows / r : 1);
}

static bool has_option(uint32_t plugin, const char *name)
{
    const struct sparse_plugin *p = sparse_at(plugin);
    for (uint32_t i = 0; i < p->n_options; i++)
        if (strcmp(p->options[i].name, name) == 0)
            return true;
    return false;
}

struct outputs {
    float together[LAYERS * SEQS * HEADS * DIM], swapped[LAYERS * SEQS * HEADS * DIM],
        alone[LAYERS * SEQS * HEADS * DIM];
};

static bool same_row(const float *a, uint32_t at, const float *b, uint32_t bt)
{
    bool same = true;
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        same = same && memcmp(a + ((size_t)layer * SEQS + at) * HEADS * DIM,
                              b + ((size_t)layer * SEQS + bt) * HEADS * DIM,
                              sizeof(float) * HEADS * DIM) == 0;
    return same;
}

static void neighbours_change_nothing(struct world *w, const struct sparse_instance *in,
                                      const char *name)
{
    static const uint32_t order[] = {0, 1, 2}, swapped[] = {2, 0, 1}, at[] = {1, 2, 0};
    struct outputs *o = mem_alloc(sizeof *o);
    bool same = true;
    step(w, in, order, SEQS, o->together);
    step(w, in, swapped, SEQS, o->swapped);
    for (uint32_t s = 0; s < SEQS; s++) {
        step(w, in, &s, 1, o->alone);
        same = same && same_row(o->together, s, o->swapped, at[s]) &&
               same_row(o->together, s, o->alone, 0);
    }
    ok(same, "%s: alone, together and in another order: the same bits", name);
    mem_free(o);
}

static const struct sparse_instance *instance(struct world *w, struct sparse_choice c)
{
    const struct sparse_instance *in = attention_instance(w->at, &c);
    if (in == NULL)
        printf("Bail out! %s\n", err_text());
    CHECK(in != NULL);
    return in;
}

/* A world of its own per variant: sealing permutes pages. */
static void holds(uint32_t plugin, const char *option, const char *value, uint32_t r)
{
    static const uint32_t order[] = {0, 1, 2};
    struct world w;
    struct watch t = {.w = &w};
    char name[96];
    struct sparse_choice c = sparse_choice_make(plugin, 1);
    if (option != NULL)
        CHECK(sparse_choice_set(&c, option, value) == OK);
    snprintf(name, sizeof name, "%s%s%s%s%s, R = %u", sparse_at(plugin)->name, option ? " " : "",
             option ? option : "", option ? "=" : "", option ? value : "", r);
    world_open(&w, r);
    float *out = mem_alloc(sizeof(float) * LAYERS * SEQS * HEADS * DIM);
    const struct sparse_instance *all = instance(&w, c);
    c.budget = 0.1f;
    const struct sparse_instance *some = instance(&w, c);
    seal_all(&w, all);

    double worst = 0;
    step(&w, all, order, SEQS, out);
    for (uint32_t s = 0; s < SEQS; s++)
        worst = fmax(worst, distance(&w, out, s, s));
    ok(worst < 1e-3, "%s: a budget of all there is attends what dense does (off by %.1e)", name,
       worst);

    double tenth = 0;
    step(&w, some, order, SEQS, out);
    for (uint32_t s = 0; s < SEQS; s++)
        tenth = fmax(tenth, distance(&w, out, s, s));
    ok(all->traits.attends_all ? tenth < 1e-3 : tenth > 10 * worst && tenth < 1,
       "%s: a tenth of it does not, quite (off by %.1e)", name, tenth);

    attention_record(w.at, watch_selection, &t);
    neighbours_change_nothing(&w, some, name);
    attention_record(w.at, NULL, NULL);
    bool dense = all->traits.attends_all;
    ok(t.bad == 0 && t.n == (dense ? 0 : LAYERS * KV_HEADS * SEQS * 3),
       "%s: a tenth selects what it may, sinks first (%u plans, at most %u pages)", name, t.n,
       t.most);
    attention_release(w.at, all);
    attention_release(w.at, some);
    mem_free(out);
    world_close(&w);
}

/* Scores that are no numbers: the first pages, and somebody is told. */
static void no_scores_are_counted(void)
{
    static const uint32_t order[] = {0, 1, 2};
    struct world w;
    struct watch t = {.w = &w};
    char object[1100];
    uint32_t odd, quest;
    float *out = mem_alloc(sizeof(float) * LAYERS * SEQS * HEADS * DIM);
    snprintf(object, sizeof object, "%s/odd.so", folder);
    CHECK(sparse_load(object) == OK && sparse_find("odd", &odd) == OK &&
          sparse_find("quest", &quest) == OK);
    world_open(&w, 16);
    const struct sparse_instance *good = instance(&w, sparse_choice_make(quest, 0.1f));
    const struct sparse_instance *bad = instance(&w, sparse_choice_make(odd, 0.1f));
    seal_all(&w, good);
    step(&w, good, order, SEQS, out);
    is_int(attention_unscored(w.at), 0, "a plug-in that scores is not counted");
    attention_record(w.at, watch_selection, &t);
    step(&w, bad, order, SEQS, out);
    step(&w, bad, order, 1, out);
    attention_record(w.at, NULL, NULL);
    is_int(attention_unscored(w.at), LAYERS * KV_HEADS * (SEQS + 1),
           "one whose scores are NaN is, for every row, layer and head");
    ok(t.bad == 0 && t.most > 0, "it is served all the same (%u pages)", t.most);
    attention_release(w.at, good);
    attention_release(w.at, bad);
    mem_free(out);
    world_close(&w);
}

int main(int argc, char **argv)
{
    const char *slash = argc > 0 ? strrchr(argv[0], '/') : NULL;
    int len = slash == NULL ? 1 : (int)(slash - argv[0]);
    char object[1100];
    snprintf(folder, sizeof folder, "%.*s/../plugin", len, slash == NULL ? "." : argv[0]);
    snprintf(object, sizeof object, "%s/signs.so", folder);
    status st = sparse_load(object);
    ok(st == OK, "the third party's is loaded%s%s", st == OK ? "" : ": ",
       st == OK ? "" : err_text());
    for (uint32_t r = 8; r <= 32; r *= 2)
        for (uint32_t i = 0; i < sparse_count(); i++) {
            holds(i, NULL, NULL, r);
            if (has_option(i, "balance"))
                holds(i, "balance", "off", r);
            if (has_option(i, "layout"))
                holds(i, "layout", "wave", r);
        }
    no_scores_are_counted(); /* last: its plug-in stays loaded */
    return tap_done();
}
