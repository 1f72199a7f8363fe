/* Selection against a sort in float64: budgets, ties, top_p, every reduction and map; planted needles
 * through seal, score and select; the same lists everywhere. */
#include "tests/digest_rig.h"
#include "tests/tap.h"

#include <stdio.h>

/* A row's lists. */
struct pick {
    uint32_t n_pages, n_estimates;
    uint32_t *pages, *masks, *estimates;
    float *share;
};

struct run {
    const struct rig *r;
    enum partition_map map;
    enum group_reduce reduce;
    uint32_t group, n_rows, stride, page_cap, estimate_cap;
    struct plan_row rows[6];
    float *scores; /* [rows][KV heads][group][stride] */
    uint32_t *pages, *masks, *n_pages, *estimates, *n_estimates;
    float *share;
};

static size_t n_lanes(const struct run *x)
{
    return (size_t)x->n_rows * x->r->s.kv_heads;
}

/* Rows that see segments[i] each; scores are noise unless they are set later. */
static struct run begin(const struct rig *r, enum partition_map map, uint32_t group,
                        uint32_t n_rows, const uint32_t *segments)
{
    struct run x = {
        .r = r, .map = map, .group = group, .n_rows = n_rows, .reduce = REDUCE_SUM_PROB};
    uint32_t most = 0;
    for (uint32_t i = 0; i < n_rows; i++) {
        x.rows[i] = (struct plan_row){
            .n_segments = segments[i], .records = r->numbers, .blocks = r->blocks, .top_p = 1};
        most = segments[i] > most ? segments[i] : most;
    }
    x.stride = most * r->desc.parts + 5;
    x.page_cap = most * SEGMENT_ROWS / r->s.rows;
    x.estimate_cap = most * r->desc.parts;
    size_t lanes = n_lanes(&x), n = lanes * group * x.stride;
    x.scores = mem_alloc(n * sizeof *x.scores);
    x.pages = mem_alloc(lanes * x.page_cap * sizeof *x.pages);
    x.masks = mem_alloc(lanes * x.page_cap * sizeof *x.masks);
    x.share = mem_alloc(lanes * x.page_cap * sizeof *x.share);
    x.n_pages = mem_alloc(lanes * sizeof *x.n_pages);
    x.estimates = mem_alloc(lanes * x.estimate_cap * sizeof *x.estimates);
    x.n_estimates = mem_alloc(lanes * sizeof *x.n_estimates);
    for (size_t i = 0; i < n; i++)
        x.scores[i] = 4 * rig_noise(1, 2, (uint32_t)i) + 3 * rig_noise(4, 3, (uint32_t)i / 5);
    return x;
}

static void end(struct run *x)
{
    mem_free(x->scores);
    mem_free(x->pages);
    mem_free(x->masks);
    mem_free(x->share);
    mem_free(x->n_pages);
    mem_free(x->estimates);
    mem_free(x->n_estimates);
}

static void go(struct run *x)
{
    struct select_args a = {.kv = &x->r->kv,
                            .desc = x->r->desc,
                            .map = x->map,
                            .reduce = x->reduce,
                            .group = x->group,
                            .rows = x->rows,
                            .n_rows = x->n_rows,
                            .scores = x->scores,
                            .stride = x->stride,
                            .page_cap = x->page_cap,
                            .estimate_cap = x->estimate_cap,
                            .pages = x->pages,
                            .masks = x->map == MAP_PAGE ? NULL : x->masks,
                            .share = x->share,
                            .n_pages = x->n_pages,
                            .estimates = x->estimates,
                            .n_estimates = x->n_estimates};
    x->r->be->ops->select(x->r->be, &a);
}

static struct pick lists(const struct run *x, uint32_t row, uint32_t head)
{
    size_t lane = (size_t)row * x->r->s.kv_heads + head;
    return (struct pick){x->n_pages[lane],
                         x->n_estimates[lane],
                         x->pages + lane * x->page_cap,
                         x->masks + lane * x->page_cap,
                         x->estimates + lane * x->estimate_cap,
                         x->share + lane * x->page_cap};
}

static float *scores_of(const struct run *x, uint32_t row, uint32_t head, uint32_t h)
{
    return x->scores + (((size_t)row * x->r->s.kv_heads + head) * x->group + h) * (size_t)x->stride;
}

/* ---- the reference --------------------------------------------------------------------------------- */

struct reference {
    uint32_t n, n_selected, n_ranked;
    double *rank;    /* [n]; -inf: no candidate */
    uint32_t *order; /* [n_ranked], best first */
};

static uint32_t rows_of(const struct run *x, uint32_t head, uint32_t p, uint32_t *first)
{
    uint32_t parts = x->r->desc.parts;
    return digest_rows(rig_record(x->r, p / parts, head), &x->r->desc, p % parts, first);
}

static bool is_sink(const struct run *x, uint32_t head, uint32_t p)
{
    uint32_t first, n = rows_of(x, head, p, &first);
    return p < x->r->desc.parts && first + n <= rig_sink_rows(x->r);
}

static struct reference refer(const struct run *x, uint32_t row, uint32_t head)
{
    const struct plan_row *plan = &x->rows[row];
    struct reference f = {.n = plan->n_segments * x->r->desc.parts};
    f.rank = mem_alloc((f.n + 1) * sizeof *f.rank);
    f.order = mem_alloc((f.n + 1) * sizeof *f.order);
    bool prob = x->reduce == REDUCE_SUM_PROB || x->reduce == REDUCE_MAX_PROB;
    bool max = x->reduce == REDUCE_MAX_RAW || x->reduce == REDUCE_MAX_PROB;
    uint32_t heads = x->reduce == REDUCE_NATIVE ? 1 : x->group;
    for (uint32_t h = 0; h < heads; h++) {
        const float *s = scores_of(x, row, head, h);
        double sum = 0, most = -INFINITY;
        for (uint32_t p = 0; p < f.n; p++)
            if (!is_sink(x, head, p) && s[p] > (float)most)
                most = (double)s[p];
        for (uint32_t p = 0; p < f.n; p++)
            if (!is_sink(x, head, p) && s[p] > -INFINITY)
                sum += exp((double)s[p] - most);
        for (uint32_t p = 0; p < f.n; p++) {
            bool has = !is_sink(x, head, p) && s[p] > -INFINITY;
            double v = !has ? -INFINITY : prob ? exp((double)s[p] - most) / sum : (double)s[p];
            f.rank[p] = h == 0 ? v : max ? fmax(f.rank[p], v) : f.rank[p] + v;
        }
    }
    double total = 0, mass = 0, best = -INFINITY;
    for (uint32_t p = 0; p < f.n; p++)
        if (f.rank[p] > -INFINITY) {
            if (x->reduce == REDUCE_MEAN_RAW)
                f.rank[p] /= x->group;
            uint32_t at = f.n_ranked++;
            for (; at > 0 && f.rank[f.order[at - 1]] < f.rank[p]; at--)
                f.order[at] = f.order[at - 1];
            f.order[at] = p;
            best = fmax(best, f.rank[p]);
        }
    for (uint32_t i = 0; i < f.n_ranked; i++)
        total += prob ? f.rank[f.order[i]] : exp(f.rank[f.order[i]] - best);
    uint32_t rows = 0, first;
    for (uint32_t i = 0; i < f.n_ranked; i++) {
        rows += rows_of(x, head, f.order[i], &first);
        if (i > 0 && (rows > plan->budget || (plan->top_p < 1 && mass >= plan->top_p * total)))
            break;
        mass += prob ? f.rank[f.order[i]] : exp(f.rank[f.order[i]] - best);
        f.n_selected = i + 1;
    }
    return f;
}

static void drop(struct reference *f)
{
    mem_free(f->rank);
    mem_free(f->order);
}

/* The first n of the reference's order as marks. */
static uint8_t *marks(const struct reference *f, uint32_t from, uint32_t to)
{
    uint8_t *m = mem_alloc(f->n + 1);
    for (uint32_t i = from; i < to && i < f->n_ranked; i++)
        m[f->order[i]] = 1;
    return m;
}

/* Lists equal the reference's, rows for rows. Prints what differs. */
static bool matches(const struct run *x, uint32_t row, uint32_t head)
{
    struct reference f = refer(x, row, head);
    struct pick got = lists(x, row, head);
    uint32_t rows = x->r->s.rows, n_pages = x->rows[row].n_segments * SEGMENT_ROWS / rows;
    uint32_t *want = mem_alloc((n_pages + 1) * sizeof *want), n = 0, first;
    uint8_t *chosen = marks(&f, 0, f.n_selected);
    uint8_t *rest = marks(&f, f.n_selected, f.n_selected + x->rows[row].estimate);
    bool good = true;
    for (uint32_t p = 0; p < n_pages && p < rig_sink_rows(x->r) / rows; p++)
        want[p] = 0xffffffffu >> (32 - rows);
    for (uint32_t p = 0; p < f.n; p++) {
        uint32_t count = rows_of(x, head, p, &first);
        first += p / x->r->desc.parts * SEGMENT_ROWS;
        for (uint32_t i = first; i < first + count && chosen[p]; i++)
            want[i / rows] |= 1u << i % rows;
        if (!rest[p])
            continue;
        good &= n < got.n_estimates && got.estimates[n] == p;
        n++;
    }
    good &= n == got.n_estimates;
    n = 0;
    for (uint32_t p = 0; p < n_pages; p++) {
        if (want[p] == 0)
            continue;
        good &= n < got.n_pages && got.pages[n] == p;
        good &= x->map == MAP_PAGE || (n < got.n_pages && got.masks[n] == want[p]);
        n++;
    }
    good &= n == got.n_pages;
    mem_free(want);
    mem_free(chosen);
    mem_free(rest);
    drop(&f);
    return good;
}

static bool all_match(const struct run *x)
{
    bool good = true;
    for (uint32_t row = 0; row < x->n_rows; row++)
        for (uint32_t head = 0; head < x->r->s.kv_heads; head++)
            good &= matches(x, row, head);
    return good;
}

/* ---- pages ---------------------------------------------------------------------------------------- */

static struct rig *pages_rig(const char *isa, uint32_t threads, uint32_t rows, uint32_t segments)
{
    return rig_open(
        isa, threads, (struct rig_shape){rows, 1, 2, 64, segments},
        (struct digest_desc){.kind = DIGEST_NONE, .parts = SEGMENT_ROWS / rows, .sinks = 16});
}

static void the_best_pages_are_selected(void)
{
    static const char *const names[] = {"max of softmax", "sum of softmax", "mean of scores",
                                        "max of scores", "the plug-in's own"};
    static const uint32_t segments[] = {3, 1, 2, 3, 3, 3};
    static const uint32_t budgets[] = {64, 16, 700, 1, 100000, 333};
    static const uint32_t estimates[] = {40, 0, 30, 200, 10, 100000};
    for (uint32_t rows = 8; rows <= 32; rows *= 2) {
        struct rig *r = pages_rig("auto", 2, rows, 3);
        for (uint32_t reduce = REDUCE_MAX_PROB; reduce <= REDUCE_NATIVE; reduce++) {
            struct run x = begin(r, MAP_PAGE, 1 + reduce, 6, segments);
            x.reduce = (enum group_reduce)reduce;
            for (uint32_t i = 0; i < 6; i++) {
                x.rows[i].budget = budgets[i];
                x.rows[i].estimate = estimates[i];
            }
            go(&x);
            ok(all_match(&x), "pages and estimates are those of a sort: %s, R = %u", names[reduce],
               rows);
            for (uint32_t i = 0; i < 6; i++)
                x.rows[i].top_p = 0.1f + 0.15f * (float)i;
            go(&x);
            ok(all_match(&x), "also where top_p stops earlier: %s, R = %u", names[reduce], rows);
            end(&x);
        }
        rig_close(r);
    }
}

static void a_budget_of_everything_selects_everything(void)
{
    struct rig *r = pages_rig("auto", 1, 8, 2);
    uint32_t segments = 2;
    struct run x = begin(r, MAP_PAGE, 3, 1, &segments);
    bool all = true;
    x.rows[0].budget = 2 * SEGMENT_ROWS;
    x.rows[0].estimate = 50;
    go(&x);
    struct pick p = lists(&x, 0, 0);
    for (uint32_t i = 0; i < p.n_pages; i++)
        all &= p.pages[i] == i;
    ok(all && p.n_pages == 256 && p.n_estimates == 0, "every page once, ascending, no estimate");
    x.rows[0].n_segments = 0;
    go(&x);
    p = lists(&x, 0, 0);
    ok(p.n_pages == 0 && p.n_estimates == 0, "nothing is selected where nothing is sealed");
    end(&x);
    rig_close(r);
}

static void ties_go_to_the_smaller_partition(void)
{
    struct rig *r = pages_rig("auto", 1, 8, 2);
    uint32_t segments = 2;
    struct run x = begin(r, MAP_PAGE, 3, 1, &segments);
    for (uint32_t h = 0; h < 3; h++)
        for (uint32_t p = 0; p < 256; p++)
            scores_of(&x, 0, 0, h)[p] = p % 50 == 49 ? 2 : 1;
    x.rows[0].budget = 8 * 8; /* five better ones, then three of the equals */
    x.rows[0].estimate = 4;
    go(&x);
    static const uint32_t want[] = {0, 1, 2, 3, 4, 49, 99, 149, 199, 249}, rest[] = {5, 6, 7, 8};
    struct pick p = lists(&x, 0, 0);
    ok(p.n_pages == 10 && memcmp(p.pages, want, sizeof want) == 0, "the first of equal pages");
    ok(p.n_estimates == 4 && memcmp(p.estimates, rest, sizeof rest) == 0,
       "then the next of them are estimated");
    ok(p.share[0] == 1 && p.share[5] == 1 && fabsf(p.share[2] - expf(-1)) < 1e-6f,
       "shares are relative to the best, 1 for sinks");
    x.rows[0].top_p = 0.001f;
    go(&x);
    p = lists(&x, 0, 0);
    ok(p.n_pages == 3 && p.pages[2] == 49, "one page at least, however small top_p is");
    end(&x);
    rig_close(r);
}

static void what_has_no_score_is_never_selected(void)
{
    struct rig *r = pages_rig("auto", 1, 16, 2);
    uint32_t segments = 2;
    for (uint32_t reduce = REDUCE_MAX_PROB; reduce <= REDUCE_NATIVE; reduce++) {
        struct run x = begin(r, MAP_PAGE, 3, 1, &segments);
        bool good = true;
        x.reduce = (enum group_reduce)reduce;
        for (uint32_t h = 0; h < 3; h++)
            for (uint32_t p = 0; p < 128; p++)
                if (p % 4 != 1)
                    scores_of(&x, 0, 0, h)[p] = p % 4 == 2 ? NAN : -INFINITY;
        x.rows[0].budget = 100000;
        x.rows[0].estimate = 100;
        go(&x);
        struct pick p = lists(&x, 0, 0);
        for (uint32_t i = 1; i < p.n_pages; i++)
            good &= p.pages[i] % 4 == 1;
        ok(good && p.n_pages == 33 && p.n_estimates == 0, "only pages with a score, reduction %u",
           reduce);
        for (uint32_t h = 0; h < 3; h++)
            for (uint32_t i = 0; i < 128; i++)
                scores_of(&x, 0, 0, h)[i] = i % 2 ? NAN : -INFINITY;
        for (uint32_t pages = 1; pages <= 5; pages += 4) {
            x.rows[0].budget = pages == 1 ? 1 : pages * 16;
            go(&x);
            p = lists(&x, 0, 0);
            good = p.n_pages == 1 + pages && p.n_estimates == 0;
            for (uint32_t i = 0; i < p.n_pages; i++)
                good &= p.pages[i] == i && p.share[i] == 1.0f;
            ok(good, "without any the first %u beside the sinks, reduction %u", pages, reduce);
        }
        end(&x);
    }
    rig_close(r);
}

static void underflow_does_not_lose_pages(void)
{
    struct rig *r = pages_rig("auto", 1, 8, 1);
    uint32_t segments = 1;
    struct run x = begin(r, MAP_PAGE, 2, 1, &segments);
    for (uint32_t h = 0; h < 2; h++)
        for (uint32_t p = 0; p < 128; p++)
            scores_of(&x, 0, 0, h)[p] = p == 77 ? 5000 : -3000 - (float)p;
    x.rows[0].budget = 8 * 10;
    go(&x);
    struct pick p = lists(&x, 0, 0);
    static const uint32_t want[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 77};
    ok(p.n_pages == 12 && memcmp(p.pages, want, sizeof want) == 0,
       "pages whose share is zero still fill the budget, smaller ones first");
    end(&x);
    rig_close(r);
}

/* ---- other maps --------------------------------------------------------------------------------- */

static void other_maps_select_rows(void)
{
    struct digest_desc descs[] = {
        {.order = ORDER_KMEANS, .kind = DIGEST_CENTROID, .parts = 64, .sinks = 16},
        {.order = ORDER_KMEANS, .kind = DIGEST_CENTROID, .parts = 100, .sinks = 16},
        {.kind = DIGEST_NONE, .parts = SEGMENT_ROWS, .sinks = 16},
        {.kind = DIGEST_NONE, .parts = 256, .sinks = 16},
        {.kind = DIGEST_NONE, .parts = 16, .sinks = 16}};
    enum partition_map maps[] = {MAP_GATHER, MAP_RANGE, MAP_TOKEN, MAP_RANGE, MAP_RANGE};
    static const char *const names[] = {"clusters of 16 on average", "100 clusters", "single rows",
                                        "ranges of 4 rows", "ranges of 64 rows"};
    static const uint32_t segments[] = {3, 2, 3};
    for (uint32_t rows = 8; rows <= 32; rows *= 2)
        for (uint32_t i = 0; i < ARRAY_LEN(descs); i++) {
            struct rig *r = rig_open("auto", 2, (struct rig_shape){rows, 1, 2, 64, 3}, descs[i]);
            rig_fill(r);
            if (descs[i].order == ORDER_KMEANS)
                rig_seal_all(r);
            struct run x = begin(r, maps[i], 3, 3, segments);
            for (uint32_t lane = 0; lane < 2; lane++) /* empty clusters have no score */
                for (uint32_t k = 0; k < 9; k++)
                    for (uint32_t p = 0; p < x.rows[k / 3].n_segments * descs[i].parts; p++) {
                        uint32_t first;
                        if (rows_of(&x, lane, p, &first) == 0)
                            scores_of(&x, k / 3, lane, k % 3)[p] = -INFINITY;
                    }
            for (uint32_t k = 0; k < 3; k++) {
                x.rows[k].budget = 100 + 150 * k;
                x.rows[k].estimate = 20 * k;
            }
            go(&x);
            ok(all_match(&x), "pages with masks hold the rows of the best: %s, R = %u", names[i],
               rows);
            x.rows[0].top_p = 0.2f;
            x.rows[1].top_p = 0.5f;
            go(&x);
            ok(all_match(&x), "also with top_p: %s, R = %u", names[i], rows);
            end(&x);
            rig_close(r);
        }
}

/* ---- needles (O-27) ---------------------------------------------------------------------------- */

/* A key along the query whose logit exceeds every other by ln N + 10, at a random row. Returns whether
 * its page is selected with 2 % of the context. */
static bool needle_is_found(uint32_t trial, uint32_t rows, struct digest_desc d)
{
    enum { DIM = 64, SEGMENTS = 3 };
    struct rig_shape s = {rows, 1, 1, DIM, SEGMENTS};
    struct rig *r = rig_open("auto", 2, s, d);
    uint32_t n = SEGMENTS * SEGMENT_ROWS, segments = SEGMENTS, qkv_numbers = 3 * DIM;
    uint32_t at = 40 + (uint32_t)((rig_noise(trial, 1, 2) + 1) / 2 * (float)(n - 41));
    float qkv[3 * DIM] = {0}, most = -INFINITY, square = 0, key[DIM];
    rig_fill(r);
    for (uint32_t c = 0; c < DIM; c++) {
        qkv[c] = 2 * rig_noise(trial, 3, c);
        square += qkv[c] * qkv[c];
    }
    for (uint32_t row = 0; row < n; row++) {
        float dot = 0;
        for (uint32_t c = 0; c < DIM; c++)
            dot += qkv[c] * rig_key(0, row, c);
        most = dot > most ? dot : most;
    }
    float wanted = most + 8 * (logf((float)n) + 10);
    for (uint32_t c = 0; c < DIM; c++) {
        key[c] = qkv[c] * wanted / square;
        *rig_at(r, r->blocks, 0, at, c, false) = f32_to_bf16(key[c]);
    }
    if (d.kind != DIGEST_NONE)
        rig_seal_all(r);
    struct run x = begin(r, d.order == ORDER_KMEANS ? MAP_GATHER : MAP_PAGE, 1, 1, &segments);
    x.rows[0].budget = n / 50;
    struct score_args a = {.kv = &r->kv,
                           .kind = d.kind == DIGEST_CENTROID ? SCORE_MASS
                                   : d.kind == DIGEST_BOUNDS ? SCORE_BOUND
                                                             : SCORE_EXACT,
                           .desc = d,
                           .heads = 1,
                           .rows = x.rows,
                           .n_rows = 1,
                           .scale = 0.125f,
                           .qkv = qkv,
                           .scores = x.scores,
                           .stride = x.stride};
    CHECK(qkv_numbers == ARRAY_LEN(qkv));
    r->be->ops->score(r->be, &a);
    CHECK(r->be->ops->sync(r->be) == OK);
    go(&x);
    struct pick p = lists(&x, 0, 0);
    bool found = false;
    for (uint32_t i = rig_sink_rows(r) / rows; i < p.n_pages; i++)
        for (uint32_t k = 0; k < rows; k++)
            if (x.map == MAP_PAGE || (p.masks[i] >> k & 1))
                found |= *rig_at(r, r->blocks, 0, p.pages[i] * rows + k, 0, false) ==
                             f32_to_bf16(key[0]) &&
                         *rig_at(r, r->blocks, 0, p.pages[i] * rows + k, 1, false) ==
                             f32_to_bf16(key[1]);
    end(&x);
    rig_close(r);
    return found;
}

static void planted_needles_are_found(void)
{
    /* least: averages lose some needles (selection.md 5); that is what outliers are for */
    struct {
        const char *name;
        uint32_t rows, least;
        struct digest_desc d;
    } cases[] = {{"pages of 8, one outlier",
                  8,
                  10,
                  {.order = ORDER_BISECT,
                   .kind = DIGEST_CENTROID,
                   .parts = 128,
                   .outliers = 1,
                   .sinks = 16}},
                 {"pages of 16, centroids alone",
                  16,
                  5,
                  {.order = ORDER_BISECT, .kind = DIGEST_CENTROID, .parts = 64, .sinks = 16}},
                 {"k-means",
                  8,
                  7,
                  {.order = ORDER_KMEANS, .kind = DIGEST_CENTROID, .parts = 64, .sinks = 16}},
                 {"Quest", 16, 10, {.kind = DIGEST_BOUNDS, .parts = 64, .sinks = 16}},
                 {"the oracle", 8, 10, {.kind = DIGEST_NONE, .parts = 128, .sinks = 16}}};
    for (uint32_t i = 0; i < ARRAY_LEN(cases); i++) {
        uint32_t found = 0;
        for (uint32_t trial = 0; trial < 10; trial++)
            found += needle_is_found(trial, cases[i].rows, cases[i].d);
        ok(found >= cases[i].least,
           "%u of 10 needles at least are selected with 2 %% of the context: %s", cases[i].least,
           cases[i].name);
        printf("#   %u were\n", found);
    }
}

/* ---- the same everywhere -------------------------------------------------------------------------- */

static void lists_depend_on_their_row_alone(void)
{
    uint32_t three = 3;
    static const uint32_t segments[] = {3, 1, 2, 0, 3};
    for (uint32_t reduce = REDUCE_MAX_PROB; reduce <= REDUCE_NATIVE; reduce++) {
        struct rig *one = pages_rig("scalar", 1, 8, 3);
        struct run alone = begin(one, MAP_PAGE, 3, 1, &three);
        alone.reduce = (enum group_reduce)reduce;
        alone.rows[0].budget = 200;
        alone.rows[0].estimate = 99;
        alone.rows[0].top_p = reduce % 2 ? 0.7f : 1;
        go(&alone);
        for (uint32_t isa = 0; isa < ARRAY_LEN(rig_isas); isa++) {
            struct rig *r = pages_rig(rig_isas[isa], 3, 8, 3);
            if (r == NULL) {
                tap_skip("the same lists", rig_isas[isa]);
                continue;
            }
            struct run many = begin(r, MAP_PAGE, 3, 5, segments);
            bool same = true;
            many.reduce = alone.reduce;
            for (uint32_t i = 0; i < 5; i++) {
                many.rows[i].budget = 200;
                many.rows[i].estimate = 99;
                many.rows[i].top_p = alone.rows[0].top_p;
            }
            go(&many);
            for (uint32_t head = 0; head < 2; head++) {
                struct pick p = lists(&alone, 0, head), q = lists(&many, 0, head);
                same &= p.n_pages == q.n_pages && p.n_estimates == q.n_estimates;
                same &= memcmp(p.pages, q.pages, p.n_pages * sizeof *p.pages) == 0;
                same &= memcmp(p.share, q.share, p.n_pages * sizeof *p.share) == 0;
                same &= memcmp(p.estimates, q.estimates, p.n_estimates * sizeof *p.estimates) == 0;
            }
            ok(same,
               "%s, 3 threads, in a batch: the lists of one scalar thread alone, reduction %u",
               rig_isas[isa], reduce);
            end(&many);
            rig_close(r);
        }
        end(&alone);
        rig_close(one);
    }
}

static void heads_of_a_group_are_equal(void)
{
    struct rig *r = pages_rig("auto", 1, 8, 2);
    uint32_t segments = 2;
    struct run x = begin(r, MAP_PAGE, 3, 1, &segments);
    uint32_t before[256], n_pages, parts = 256;
    x.reduce = REDUCE_MAX_PROB;
    x.rows[0].budget = 160;
    go(&x);
    struct pick p = lists(&x, 0, 1);
    n_pages = p.n_pages;
    memcpy(before, p.pages, n_pages * sizeof *before);
    for (uint32_t i = 0; i < parts; i++) {
        float swap = scores_of(&x, 0, 1, 0)[i];
        scores_of(&x, 0, 1, 0)[i] = scores_of(&x, 0, 1, 2)[i];
        scores_of(&x, 0, 1, 2)[i] = swap;
    }
    go(&x);
    p = lists(&x, 0, 1);
    ok(p.n_pages == n_pages && memcmp(before, p.pages, n_pages * sizeof *before) == 0,
       "exchanging heads of a group changes nothing");
    end(&x);
    rig_close(r);
}

int main(void)
{
    the_best_pages_are_selected();
    a_budget_of_everything_selects_everything();
    ties_go_to_the_smaller_partition();
    what_has_no_score_is_never_selected();
    underflow_does_not_lose_pages();
    other_maps_select_rows();
    planted_needles_are_found();
    lists_depend_on_their_row_alone();
    heads_of_a_group_are_equal();
    return tap_done();
}
