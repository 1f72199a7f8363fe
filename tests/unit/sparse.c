/* sparse/: the registry, what a choice may be, what the built-ins say of themselves, and a plug-in that
 * somebody else built. The shared objects are beside this program, in ../plugin. */
#include "sparse/plugin.h"
#include "tests/tap.h"

#include <math.h>

enum { LAYERS = 2, KV_HEADS = 3, DIM = 64 };

static char folder[1024]; /* of the shared objects */

static struct kv_geometry geometry(uint32_t block_rows)
{
    size_t page = (size_t)block_rows * DIM * 4;
    return (struct kv_geometry){.block_rows = block_rows,
                                .layers = LAYERS,
                                .kv_heads = KV_HEADS,
                                .head_dim = DIM,
                                .page_bytes = page,
                                .n_lanes = {LAYERS * KV_HEADS},
                                .block_bytes = {LAYERS * KV_HEADS * page}};
}

static uint32_t plugin(const char *name)
{
    uint32_t i = 99;
    CHECK(sparse_find(name, &i) == OK);
    return i;
}

static struct sparse_choice choice(const char *name)
{
    return sparse_choice_make(plugin(name), 0.05f);
}

static void says(status st, const char *text)
{
    bool good = st == ERR_ARG && strcmp(err_text(), text) == 0;
    if (!ok(good, "%.110s", text))
        printf("#   got %s: %s\n", status_name(st), st == OK ? "" : err_text());
}

static status check(const struct sparse_choice *c, uint32_t block_rows, struct sparse_traits *t)
{
    struct kv_geometry g = geometry(block_rows);
    return sparse_choice_check(c, &g, t);
}

/* ---- registry ---- */

static void four_are_compiled_in(void)
{
    static const char *const want[] = {"dense", "oracle", "quest", "wave"};
    uint32_t i;
    is_int(sparse_count(), 4, "four plug-ins");
    for (i = 0; i < 4; i++)
        ok(strcmp(sparse_at(i)->name, want[i]) == 0 && plugin(want[i]) == i &&
               sparse_at(i)->abi == SPARSE_ABI && strlen(sparse_at(i)->help) > 10,
           "%s is number %u", want[i], i);
    says(sparse_find("wawe", &i), "unknown plug-in \"wawe\"; there are dense, oracle, quest, wave");
    says(sparse_find("", &i), "unknown plug-in \"\"; there are dense, oracle, quest, wave");
}

static void presets_are_in_range(void)
{
    for (uint32_t i = 0; i < sparse_count(); i++) {
        const struct sparse_plugin *p = sparse_at(i);
        for (uint32_t j = 0; j < p->n_options; j++) {
            const struct sparse_option *o = &p->options[j];
            ok((o->preset == SPARSE_PRESET_AUTO || sparse_option_takes(o, o->preset)) &&
                   !sparse_option_takes(o, SPARSE_PRESET_AUTO) && !sparse_is_common(o->name) &&
                   strlen(o->help) > 20,
               "%s.%s: its preset is in range", p->name, o->name);
        }
        struct sparse_choice c = sparse_choice_make(i, 0.1f);
        struct sparse_traits t;
        for (uint32_t r = 8; r <= 32; r *= 2)
            ok(check(&c, r, &t) == OK, "%s with its presets, R = %u", p->name, r);
    }
}

/* ---- choices ---- */

static void values_are_read_from_text(void)
{
    static const struct {
        const char *name, *text;
        int at;
        double want;
    } good[] = {{"outliers", "2", 0, 2},
                {"outliers", "0", 0, 0},
                {"estimate", "0.5", 1, 0.5},
                {"estimate", "1e-2", 1, 0.01},
                {"balance", "off", 2, 0},
                {"balance", "true", 2, 1},
                {"balance", "1", 2, 1},
                {"coarse_group", "8", 3, 8},
                {"coarse_open", "0.25", 4, .25},
                {"reduce", "max_raw", 5, REDUCE_MAX_RAW},
                {"reduce", "sum_prob", 5, REDUCE_SUM_PROB}};
    for (size_t i = 0; i < ARRAY_LEN(good); i++) {
        struct sparse_choice c = choice("wave");
        ok(sparse_choice_set(&c, good[i].name, good[i].text) == OK &&
               c.values[good[i].at] == good[i].want,
           "wave.%s = %s", good[i].name, good[i].text);
    }
    struct sparse_choice c = choice("wave"), before = c;
    says(sparse_choice_set(&c, "outlier", "1"),
         "unknown option \"outlier\" of plug-in wave, which has outliers, estimate, balance, "
         "coarse_group, coarse_open, reduce, codes, known, values");
    says(sparse_choice_set(&c, "outliers", "3"), "outliers must be a whole number, 0 to 2, got 3");
    says(sparse_choice_set(&c, "outliers", "-1"),
         "outliers must be a whole number, 0 to 2, got -1");
    says(sparse_choice_set(&c, "outliers", "0.5"),
         "outliers must be a whole number, 0 to 2, got 0.5");
    says(sparse_choice_set(&c, "estimate", "1.01"), "estimate must be a number, 0 to 1, got 1.01");
    says(sparse_choice_set(&c, "estimate", ""), "estimate must be a number, 0 to 1, got ");
    says(sparse_choice_set(&c, "estimate", "nan"), "estimate must be a number, 0 to 1, got nan");
    says(sparse_choice_set(&c, "estimate", "0x1"), "estimate must be a number, 0 to 1, got 0x1");
    says(sparse_choice_set(&c, "estimate", " 1"), "estimate must be a number, 0 to 1, got  1");
    says(sparse_choice_set(&c, "estimate", "1-"), "estimate must be a number, 0 to 1, got 1-");
    says(sparse_choice_set(&c, "balance", "maybe"), "balance must be on or off, got maybe");
    says(sparse_choice_set(&c, "reduce", "max"),
         "reduce must be one of max_prob|sum_prob|mean_raw|max_raw, got max");
    ok(memcmp(&c, &before, sizeof c) == 0, "what was refused changed nothing");
    c = choice("dense");
    says(sparse_choice_set(&c, "estimate", "0"),
         "unknown option \"estimate\" of plug-in dense, which has none");
}

static void values_are_read_from_numbers(void)
{
    struct sparse_choice c = choice("wave");
    ok(sparse_choice_set_number(&c, "estimate", 0.125) == OK && c.values[1] == 0.125 &&
           sparse_choice_set_number(&c, "balance", 0) == OK && c.values[2] == 0,
       "numbers arrive");
    says(sparse_choice_set_number(&c, "estimate", -0.5),
         "estimate must be a number, 0 to 1, got -0.5");
    says(sparse_choice_set_number(&c, "estimate", NAN),
         "estimate must be a number, 0 to 1, got nan");
    says(sparse_choice_set_number(&c, "coarse_group", 1.5),
         "coarse_group must be a whole number, 0 to 32, got 1.5");
    says(sparse_choice_set_number(&c, "balance", 2), "balance must be on or off, got 2");
    says(sparse_choice_set_number(&c, "reduce", 1),
         "reduce must be one of max_prob|sum_prob|mean_raw|max_raw, got 1");
}

static void common_fields_have_ranges(void)
{
    struct sparse_traits t;
    static const float budgets[] = {0, -1, NAN, INFINITY, 2e9f};
    static const char *const shown[] = {"0", "-1", "nan", "inf", "2e+09"};
    struct sparse_choice c = choice("wave");
    for (size_t i = 0; i < ARRAY_LEN(budgets); i++) {
        char text[200];
        c.budget = budgets[i];
        snprintf(text, sizeof text,
                 "budget must be a share of the context, above 0 to 1, or more than 1: a number of "
                 "rows, at most 1073741824; got %s",
                 shown[i]);
        says(check(&c, 8, &t), text);
    }
    c = choice("wave"), c.budget = 1, c.interval = 1024, c.top_p = 0.01f, c.miss_threshold = 1;
    c.min_rows = 1 << 30;
    ok(check(&c, 8, &t) == OK, "the edges are good");
    c.interval = 0;
    says(check(&c, 8, &t), "interval must be a whole number, 1 to 1024, got 0");
    c.interval = 1025;
    says(check(&c, 8, &t), "interval must be a whole number, 1 to 1024, got 1025");
    c = choice("wave"), c.min_rows = (1 << 30) + 1;
    says(check(&c, 8, &t), "min_rows must be a whole number, 0 to 1073741824, got 1073741825");
    c = choice("wave"), c.min_rows = 5;
    says(sparse_choice_set_number(&c, "min_rows", 0.5),
         "min_rows must be a whole number, 0 to 1073741824, got 0.5");
    says(sparse_choice_set_number(&c, "min_rows", NAN),
         "min_rows must be a whole number, 0 to 1073741824, got nan");
    ok(c.min_rows == 5 && sparse_choice_set_number(&c, "min_rows", 1024) == OK &&
           c.min_rows == 1024 && sparse_choice_set_number(&c, "min_rows", 0) == OK &&
           c.min_rows == 0 && sparse_is_common("min_rows"),
       "a good minimum of rows is taken, a bad one changes nothing");
    c = choice("wave"), c.top_p = 0;
    says(check(&c, 8, &t), "top_p must be a number above 0, at most 1, got 0");
    c.top_p = 1.5f;
    says(check(&c, 8, &t), "top_p must be a number above 0, at most 1, got 1.5");
    c = choice("wave"), c.miss_threshold = -0.5f;
    says(check(&c, 8, &t), "miss_threshold must be a number, 0 to 1, got -0.5");
    c = choice("quest"), c.miss_threshold = 0.5f;
    says(check(&c, 8, &t), "miss_threshold must be 0 with plug-in quest, got 0.5: it keeps nothing "
                           "from which a page could be estimated");
    c = choice("wave"), c.values[1] = 7;
    says(check(&c, 8, &t), "estimate must be a number, 0 to 1, got 7");
    c.plugin = 77;
    says(check(&c, 8, &t), "there is no plug-in number 77");
}

/* ---- what the built-ins say ---- */

static void dense_selects_nothing(void)
{
    struct sparse_traits t;
    struct sparse_choice c = choice("dense");
    ok(check(&c, 16, &t) == OK && t.attends_all && sparse_layout_id(&c, &t) == 0 &&
           sparse_digest_id(&c, &t) == 0,
       "dense attends all and keeps nothing");
}

static void wave_is_what_was_measured_best(void)
{
    struct sparse_traits t;
    for (uint32_t r = 8; r <= 32; r *= 2) {
        struct sparse_choice c = choice("wave");
        ok(check(&c, r, &t) == OK && t.map == MAP_PAGE && t.parts == 1024 / r && t.permutes &&
               t.digest.order == ORDER_BISECT &&
               t.digest.kind == (r == 8 ? DIGEST_CODES : DIGEST_CENTROID) &&
               t.digest.outliers == 0 && t.digest.values && t.digest.parts == t.parts &&
               t.estimate == (r == 8 ? 0.12f : 0.25f) &&
               t.reduce == (r == 8 ? REDUCE_SUM_PROB : REDUCE_MAX_PROB) &&
               t.known_mass == (r == 8) && t.sinks == (r < 16 ? 16 : r) &&
               t.digest.sinks == t.sinks,
           "R = %u: clusters of a page, %s codes, an eighth or a quarter estimated", r,
           r == 8 ? "with" : "no");
    }
    struct sparse_choice c = choice("wave");
    ok(sparse_choice_set(&c, "outliers", "2") == OK && check(&c, 16, &t) == OK &&
           t.digest.outliers == 2,
       "outliers as asked");
    ok(check(&c, 8, &t) == OK && t.digest.outliers == 2 && t.digest.kind == DIGEST_CENTROID,
       "who asks for outliers gets no codes");
    ok(sparse_choice_set(&c, "codes", "on") == OK, "codes beside them");
    says(check(&c, 8, &t),
         "outliers must be 0 with codes on, got 2: codes tell rows apart already");
    c = choice("wave");
    ok(sparse_choice_set(&c, "codes", "on") == OK && check(&c, 32, &t) == OK &&
           t.digest.kind == DIGEST_CODES && t.digest.outliers == 0,
       "codes with larger pages, as asked");
    ok(sparse_choice_set(&c, "balance", "off") == OK, "codes of free clusters");
    says(check(&c, 8, &t), "codes must be off with balance off, got on: they are of whole pages");
    c = choice("wave");
    ok(sparse_choice_set(&c, "codes", "off") == OK && check(&c, 8, &t) == OK &&
           t.digest.kind == DIGEST_CENTROID && t.digest.outliers == 1,
       "without codes an outlier tells the rows of a small page apart");
    c = choice("wave");
    ok(sparse_choice_set(&c, "reduce", "mean_raw") == OK && check(&c, 8, &t) == OK &&
           !t.known_mass && t.reduce == REDUCE_MEAN_RAW,
       "raw scores know no mass");
    ok(sparse_choice_set(&c, "known", "on") == OK, "known beside them");
    says(check(&c, 8, &t), "known must be off with a raw reduce, got on: there are no shares");
    c = choice("wave");
    ok(sparse_choice_set(&c, "balance", "off") == OK && check(&c, 8, &t) == OK &&
           t.map == MAP_GATHER && t.parts == 64 && t.digest.order == ORDER_KMEANS && t.permutes &&
           t.digest.outliers == 0,
       "balance=off: 64 clusters of any size");
    ok(sparse_choice_set(&c, "outliers", "1") == OK, "outliers of free clusters");
    says(check(&c, 8, &t), "outliers must be 0 with balance off, got 1: only clusters of one page "
                           "have them");
    c.values[0] = 0;
    ok(check(&c, 8, &t) == OK && t.digest.outliers == 0, "none, as asked");
    ok(sparse_choice_set(&c, "coarse_group", "4") == OK, "a coarse group");
    says(check(&c, 8, &t), "coarse_group must be 0 with balance off, got 4: groups are subtrees of "
                           "the bisection");
    c = choice("wave");
    ok(sparse_choice_set(&c, "values", "off") == OK, "no mean values");
    says(check(&c, 16, &t), "estimate must be 0 with values off, got 0.25");
    c.values[1] = 0;
    ok(check(&c, 16, &t) == OK && !t.digest.values && t.estimate == 0,
       "where nothing is estimated");
    c.miss_threshold = 0.5f;
    says(check(&c, 16, &t), "miss_threshold must be 0 with plug-in wave, got 0.5: it keeps nothing "
                            "from which a page could be estimated");
    c = choice("wave");
    for (int n = 0; n <= 32; n++) {
        c.values[3] = n;
        bool good = n == 0 || n == 4 || n == 8 || n == 16 || n == 32;
        if ((check(&c, 8, &t) == OK) != good)
            ok(0, "coarse_group %d", n);
    }
    c.values[3] = 6;
    says(check(&c, 8, &t), "coarse_group must be 0, 4, 8, 16 or 32, got 6");
}

static void quest_and_oracle_keep_the_order(void)
{
    struct sparse_traits t;
    struct sparse_choice c = choice("quest");
    ok(check(&c, 16, &t) == OK && t.map == MAP_PAGE && t.parts == 64 && !t.permutes &&
           t.digest.order == ORDER_KEEP && t.digest.kind == DIGEST_BOUNDS && t.estimate == 0 &&
           t.reduce == REDUCE_MAX_PROB && sparse_layout_id(&c, &t) == 0 &&
           sparse_digest_id(&c, &t) != 0,
       "quest: bounds of pages in order");
    c = choice("oracle");
    ok(check(&c, 8, &t) == OK && t.map == MAP_PAGE && t.parts == 128 && !t.permutes &&
           t.digest.kind == DIGEST_NONE && sparse_layout_id(&c, &t) == 0 &&
           sparse_digest_id(&c, &t) == 0,
       "oracle: pages in order, no digests");
    c.values[1] = 0.5;
    says(check(&c, 8, &t), "estimate must be 0 with layout plain, got 0.5: there are no digests");
}

static uint64_t digest_of(struct sparse_choice c, uint32_t r, uint64_t *layout)
{
    struct sparse_traits t;
    CHECK(check(&c, r, &t) == OK);
    *layout = sparse_layout_id(&c, &t);
    return sparse_digest_id(&c, &t);
}

static void ids_name_what_is_stored(void)
{
    uint64_t layout, other, digest = digest_of(choice("wave"), 8, &layout);
    struct sparse_choice c = choice("wave");
    ok(layout != 0 && layout == digest, "permuted segments are shared with their records");
    c.budget = 0.1f, c.interval = 4, c.top_p = 0.5f, c.miss_threshold = 0.5f, c.values[1] = 0;
    c.values[3] = 4, c.values[4] = 0.25, c.values[5] = REDUCE_SUM_PROB;
    ok(digest_of(c, 8, &other) == digest && other == layout,
       "how they are used changes neither id");
    c = choice("wave"), c.values[6] = 1;
    ok(digest_of(c, 8, &other) == digest, "the same codes, said or preset");
    c = choice("wave"), c.values[0] = 1;
    ok(digest_of(c, 8, &other) != digest && other != layout,
       "outliers instead of codes change both");
    c.values[0] = 2;
    ok(digest_of(c, 8, &other) != digest && other != layout, "other outliers, another id");
    c = choice("wave"), c.values[1] = c.values[8] = 0;
    ok(digest_of(c, 8, &other) != digest && other != layout, "and so do digests without values");
    c = choice("wave"), c.values[2] = 0;
    ok(digest_of(c, 8, &other) != digest && other != layout, "another order, another id");
    c = choice("oracle"), c.values[0] = 1;
    ok(digest_of(c, 8, &other) == digest && other == layout,
       "an oracle on wave's clusters shares them");
    ok(digest_of(choice("quest"), 8, &other) != digest && other == 0,
       "digests in position order do not change the layout");
    ok(digest_of(choice("wave"), 16, &other) != digest && other != layout, "nor do sizes agree");
}

/* ---- shared objects ---- */

static status load(const char *name)
{
    char path[1100];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return sparse_load(path);
}

static void refuses(const char *name, const char *text)
{
    char full[1400];
    snprintf(full, sizeof full, "%s/%s: %s", folder, name, text);
    status st = load(name);
    if (!ok(st == ERR_ARG && strcmp(err_text(), full) == 0, "%s: %s", name, text))
        printf("#   got %s: %s\n", status_name(st), err_text());
}

static void bad_objects_are_refused(void)
{
    uint32_t n = sparse_count();
    refuses("none.so", "cannot open shared object file: No such file or directory");
    refuses("bad-symbol.so", "no symbol spind_sparse_plugin: not a plug-in of spind");
    refuses("bad-abi.so", "made for plug-in ABI 7; this spind has 2");
    refuses("bad-name.so", "its name must be of the form [a-z][a-z0-9_]*, at most 15 characters");
    refuses("bad-taken.so", "there is a plug-in quest already");
    refuses("bad-score.so", "plug-in bad lacks score");
    refuses("bad-count.so", "plug-in bad has 99 options; at most 12 are possible");
    refuses("bad-common.so", "option budget is the name of a field that every plug-in has");
    refuses("bad-preset.so", "option width: its preset, 9, is out of its range");
    refuses("bad-twice.so", "option x is there twice");
    ok(sparse_load("/dev/null") == ERR_ARG, "a file that is no shared object: %s", err_text());
    ok(sparse_load("libm.so.6") == ERR_ARG, "no search in the system's folders: %s", err_text());
    is_int(sparse_count(), n, "none of them is there");
}

static void a_good_one_is_one_more(void)
{
    uint32_t i;
    struct sparse_traits t;
    ok(load("signs.so") == OK, "signs.so is loaded");
    is_int(sparse_count(), 5, "as the fifth");
    ok(sparse_find("signs", &i) == OK && i == 4, "found by name");
    refuses("signs.so", "there is a plug-in signs already");
    struct sparse_choice c = choice("signs");
    ok(check(&c, 16, &t) == OK && t.map == MAP_TOKEN && t.parts == 1024 && t.sinks == 16 &&
           t.digest_bytes == 8192,
       "says what it is");
    ok(sparse_choice_set(&c, "sinks", "50") == OK && check(&c, 16, &t) == OK && t.sinks == 64,
       "has options");
    struct kv_geometry wide = geometry(16);
    wide.head_dim = 512;
    says(sparse_choice_check(&c, &wide, &t),
         "signs: a head of 512 numbers; at most 256 are possible");
    uint64_t layout, a = digest_of(choice("signs"), 16, &layout);
    ok(a != 0 && layout == 0 && digest_of(c, 16, &layout) != a,
       "its records are known by its name and values");
}

/* What seal, score and select would abort on, or read past: describe() of a third party. */
static void what_no_backend_can_do_is_refused(void)
{
    static const struct {
        double order, kind, parts, outliers, sinks, values, estimate, map;
        const char *text; /* after "plug-in odd: describe() gave "; NULL: good */
    } says_so[] = {
        {ORDER_KEEP, DIGEST_CENTROID, 64, 2, 16, 1, 1, MAP_PAGE, NULL},
        {ORDER_BISECT, DIGEST_CODES, 64, 0, 1008, 1, 1, MAP_PAGE, NULL},
        {ORDER_KMEANS, DIGEST_CENTROID, 100, 0, 16, 1, 0, MAP_GATHER, NULL},
        {ORDER_KEEP, DIGEST_CENTROID, 512, 1, 16, 0, 0, MAP_RANGE, NULL},
        {ORDER_KEEP, DIGEST_NONE, 32, 0, 0, 1, 0, MAP_RANGE, NULL},
        {ORDER_KEEP, DIGEST_CENTROID, 64, 3, 16, 1, 0, MAP_PAGE,
         "3 outliers; here it may be at most 2"},
        {ORDER_KEEP, DIGEST_CENTROID, 512, 2, 16, 1, 0, MAP_RANGE,
         "2 outliers; here it may be at most 1"},
        {ORDER_KEEP, DIGEST_CENTROID, 1024, 1, 16, 1, 0, MAP_TOKEN,
         "1 outliers; here it may be at most 0"},
        {ORDER_KMEANS, DIGEST_CENTROID, 100, 1, 16, 1, 0, MAP_GATHER,
         "1 outliers; here it may be at most 0"},
        {ORDER_BISECT, DIGEST_CODES, 64, 1, 16, 1, 0, MAP_PAGE,
         "1 outliers; here it may be at most 0"},
        {ORDER_BISECT, DIGEST_CENTROID, 32, 0, 16, 1, 0, MAP_GATHER,
         "32 partitions; clusters by bisection and codes are of whole pages, 64"},
        {ORDER_KEEP, DIGEST_CODES, 128, 0, 16, 1, 0, MAP_RANGE,
         "128 partitions; clusters by bisection and codes are of whole pages, 64"},
        {ORDER_KMEANS, DIGEST_CODES, 64, 0, 16, 1, 0, MAP_GATHER,
         "64 partitions by k-means; clusters by bisection and codes are of whole pages, 64"},
        {ORDER_KEEP, DIGEST_CENTROID, 100, 0, 16, 1, 0, MAP_RANGE,
         "100 partitions, which 1024 rows cannot be cut into evenly"},
        {ORDER_KEEP, DIGEST_CENTROID, 64, 0, 1024, 1, 0, MAP_PAGE,
         "1024 sinks (digest: 1024); they must be whole pages of 16 rows, and less than a "
         "segment of 1024"},
        {ORDER_KEEP, DIGEST_NONE, 64, 0, 16, 1, 1, MAP_PAGE,
         "estimate 1; above 0 it needs built-in digests with values"},
        {ORDER_KEEP, DIGEST_CENTROID, 64, 0, 16, 0, 1, MAP_PAGE,
         "estimate 1; above 0 it needs built-in digests with values"},
        {ORDER_KEEP, 5, 64, 0, 16, 0, 0, MAP_PAGE, "an unknown order or kind of digest"},
        {3, DIGEST_CENTROID, 64, 0, 16, 0, 0, MAP_PAGE, "an unknown order or kind of digest"},
    };
    struct sparse_traits t;
    CHECK(load("odd.so") == OK);
    for (size_t i = 0; i < ARRAY_LEN(says_so); i++) {
        struct sparse_choice c = choice("odd");
        char text[256];
        memcpy(c.values, &says_so[i].order, 8 * sizeof *c.values);
        if (says_so[i].text == NULL) {
            if (!ok(check(&c, 16, &t) == OK, "describe() number %zu is good", i))
                printf("#   %s\n", err_text());
            continue;
        }
        snprintf(text, sizeof text, "plug-in odd: describe() gave %s", says_so[i].text);
        says(check(&c, 16, &t), text);
    }
    struct sparse_choice c = choice("odd");
    c.values[5] = 1, c.miss_threshold = 0.5f;
    says(check(&c, 16, &t), "miss_threshold must be 0 with plug-in odd, got 0.5: it keeps nothing "
                            "from which a page could be estimated");
}

static void equal_choices_are_equal(void)
{
    struct sparse_choice a = choice("wave"), b = a;
    b.values[SPARSE_MAX_OPTIONS - 1] = 3; /* beyond wave's options */
    ok(sparse_choice_equal(&a, &b), "what is no option of the plug-in does not count");
    b.values[1] = 0.5;
    ok(!sparse_choice_equal(&a, &b), "an option does");
    b = a, b.budget = 0.5f;
    ok(!sparse_choice_equal(&a, &b), "and so does the budget");
    b = a, b.interval = 2;
    ok(!sparse_choice_equal(&a, &b), "and the interval");
    b = a, b.min_rows = 1024;
    ok(!sparse_choice_equal(&a, &b), "and the minimum of rows");
}

/* ---- the third party's numbers ---- */

struct world {
    struct backend *be;
    struct kv_geometry geo;
    struct kv_memory kv;
    block_id blocks[SEGMENT_ROWS / 8];
    float *keys; /* [layer][SEGMENT_ROWS][head][DIM] as stored */
};

static float noise(uint64_t *x)
{
    *x = *x * 6364136223846793005u + 1442695040888963407u;
    return (float)((int64_t)*x >> 40) / (float)(1 << 23);
}

/* Rows go in by append, without rotation (cos 1, sin 0), so that pages are the backend's own work. */
static void world_open(struct world *w, uint32_t r)
{
    enum { WIDTH = (1 + 2 * KV_HEADS) * DIM };
    static float cosines[SEGMENT_ROWS * DIM / 2], sines[SEGMENT_ROWS * DIM / 2];
    uint32_t n = SEGMENT_ROWS / r;
    uint64_t x = 7;
    CHECK(cpu_backend_open(&w->be, &(struct cpu_options){.isa = "auto", .n_threads = 1}) == OK);
    w->geo = geometry(r);
    w->kv = (struct kv_memory){.geo = &w->geo,
                               .hbm = {w->be->ops->alloc(w->be, n * w->geo.block_bytes[0])},
                               .record_lane_bytes = 8192,
                               .record_bytes = (size_t)8192 * LAYERS * KV_HEADS};
    w->kv.records = w->be->ops->alloc(w->be, w->kv.record_bytes);
    w->keys = mem_alloc(sizeof(float) * LAYERS * SEGMENT_ROWS * KV_HEADS * DIM);
    for (uint32_t i = 0; i < n; i++)
        w->blocks[i] = n - 1 - i; /* anywhere */
    for (size_t i = 0; i < ARRAY_LEN(cosines); i++)
        cosines[i] = 1;
    float *qkv = mem_alloc(sizeof(float) * SEGMENT_ROWS * WIDTH);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        for (size_t i = 0; i < (size_t)SEGMENT_ROWS * WIDTH; i++)
            qkv[i] = noise(&x);
        /* q has heads * DIM first: with one query head per layer k begins at DIM. */
        for (uint32_t row = 0; row < SEGMENT_ROWS; row++)
            for (uint32_t h = 0; h < KV_HEADS * DIM; h++) {
                float k = qkv[(size_t)row * WIDTH + DIM + h];
                w->keys[((size_t)layer * SEGMENT_ROWS + row) * KV_HEADS * DIM + h] =
                    bf16_to_f32(f32_to_bf16(k));
            }
        struct batch_seq seq = {.n_rows = SEGMENT_ROWS, .blocks = {w->blocks}};
        struct append_args a = {.kv = &w->kv,
                                .layer = layer,
                                .heads = 1,
                                .seqs = &seq,
                                .n_seqs = 1,
                                .rope_cos = cosines,
                                .rope_sin = sines,
                                .qkv = qkv};
        w->be->ops->append(w->be, &a);
    }
    CHECK(w->be->ops->sync(w->be) == OK);
    mem_free(qkv);
}

static void world_close(struct world *w)
{
    w->be->ops->free(w->be, w->kv.hbm[0], SEGMENT_ROWS / w->geo.block_rows * w->geo.block_bytes[0]);
    w->be->ops->free(w->be, w->kv.records, w->kv.record_bytes);
    mem_free(w->keys);
    w->be->ops->close(w->be);
}

static const float *key_of(const struct world *w, uint32_t layer, uint32_t head, uint32_t row)
{
    return w->keys + (((size_t)layer * SEGMENT_ROWS + row) * KV_HEADS + head) * DIM;
}

static void rows_can_be_read(uint32_t r)
{
    struct world w;
    float k[5 * DIM], v[DIM];
    bool good = true;
    world_open(&w, r);
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        for (uint32_t head = 0; head < KV_HEADS; head++)
            for (uint32_t row = 0; row + 5 <= SEGMENT_ROWS; row += 5) {
                struct read_args a = {.kv = &w.kv,
                                      .layer = layer,
                                      .head = head,
                                      .blocks = w.blocks,
                                      .first_row = row,
                                      .n_rows = 5,
                                      .k = k};
                w.be->ops->read(w.be, &a);
                for (uint32_t i = 0; i < 5; i++)
                    good = good && memcmp(k + (size_t)i * DIM, key_of(&w, layer, head, row + i),
                                          sizeof v) == 0;
            }
    ok(good, "R = %u: every row of K is read as it was written", r);
    world_close(&w);
}

static void signs_agree_with_a_naive_count(uint32_t r)
{
    struct world w;
    struct sparse_traits t;
    struct sparse_choice c = choice("signs");
    const struct sparse_plugin *p = sparse_at(c.plugin);
    static float q[2 * KV_HEADS * DIM + 2 * KV_HEADS * DIM];
    static float scores[KV_HEADS * 2 * SEGMENT_ROWS];
    uint64_t x = 99;
    uint32_t record = 0, bad = 0;
    world_open(&w, r);
    CHECK(sparse_choice_check(&c, &w.geo, &t) == OK);
    for (size_t i = 0; i < ARRAY_LEN(q); i++)
        q[i] = noise(&x);
    struct seal_args seal = {.kv = &w.kv, .desc = t.digest, .from = w.blocks, .to = w.blocks};
    p->seal(w.be, &t, c.values, &seal);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        struct plan_row row = {.pos = 1100, .n_segments = 1, .records = &record};
        struct sparse_rows rows = {.kv = &w.kv,
                                   .be = w.be,
                                   .layer = layer,
                                   .heads = 2 * KV_HEADS,
                                   .group = 2,
                                   .rows = &row,
                                   .n_rows = 1,
                                   .qkv = q,
                                   .scale = 0.125f};
        p->score(&rows, &t, c.values, scores, SEGMENT_ROWS);
        for (uint32_t h = 0; h < 2 * KV_HEADS; h++)
            for (uint32_t i = 0; i < SEGMENT_ROWS; i++) {
                const float *k = key_of(&w, layer, h / 2, i);
                double want = 0;
                for (uint32_t d = 0; d < DIM; d++)
                    want += (double)(k[d] > 0 ? q[h * DIM + d] : -q[h * DIM + d]) * 0.125;
                bad += fabs(want - (double)scores[(size_t)h * SEGMENT_ROWS + i]) > 1e-5;
            }
    }
    ok(bad == 0, "R = %u: signs scores what a naive count says (%u do not)", r, bad);
    world_close(&w);
}

int main(int argc, char **argv)
{
    const char *slash = argc > 0 ? strrchr(argv[0], '/') : NULL;
    int len = slash == NULL ? 1 : (int)(slash - argv[0]);
    snprintf(folder, sizeof folder, "%.*s/../plugin", len, slash == NULL ? "." : argv[0]);
    four_are_compiled_in();
    presets_are_in_range();
    values_are_read_from_text();
    values_are_read_from_numbers();
    common_fields_have_ranges();
    dense_selects_nothing();
    wave_is_what_was_measured_best();
    quest_and_oracle_keep_the_order();
    ids_name_what_is_stored();
    bad_objects_are_refused();
    a_good_one_is_one_more();
    what_no_backend_can_do_is_refused();
    equal_choices_are_equal();
    for (uint32_t r = 8; r <= 32; r *= 2) {
        rows_can_be_read(r);
        signs_agree_with_a_naive_count(r);
    }
    return tap_done();
}
