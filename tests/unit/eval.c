/* The parts of `spind eval` that need no model: distances, percentiles, recall, words, tables, plots,
 * generated prose and tasks. */
#include "engine/tool/args.h"
#include "engine/tool/measure.h"
#include "engine/tool/plot.h"
#include "engine/tool/prose.h"
#include "engine/tool/robust.h"
#include "engine/tool/sheet.h"
#include "engine/tool/tasks.h"
#include "kernels/core/splitmix.h"
#include "tests/tap.h"

#include <ctype.h>
#include <math.h>
#include <unistd.h>

static bool near(double got, double want, double far)
{
    if (fabs(got - want) <= far)
        return true;
    printf("# got %.12g, want %.12g\n", got, want);
    return false;
}

/* ---- measures ---- */

static void kl_is_that_of_the_two_softmaxes(void)
{
    /* p = (1/2, 1/4, 1/4), q = (1/4, 1/2, 1/4): KL = 1/4 ln 2 */
    const float dense[] = {logf(2) + 3, 3, 3}, sparse[] = {-7, logf(2) - 7, -7};
    struct measure_token t = measure_token(dense, sparse, 3, 1);
    ok(near(t.kl, log(2) / 4, 1e-6), "KL of two known distributions");
    ok(near(t.nll, log(2), 1e-6) && near(t.nll_dense, log(4), 1e-6),
       "the likelihood of the target under both");
    ok(!t.top1 && t.right && !t.right_dense, "who puts what first");
    t = measure_token(dense, dense, 3, 0);
    ok(t.kl == 0 && t.top1 && t.right, "KL of a distribution to itself is 0");
    const float far[] = {80, -80, 0};
    ok(near(measure_token(dense, far, 3, 0).kl,
            0.5 * log(0.5) + 0.25 * (log(0.25) + 160) + 0.25 * (log(0.25) + 80), 1e-4),
       "large logits do not overflow");
    ok(near(measure_logprob(dense, 3, 0), log(0.5), 1e-6), "a log-probability");
    const float tie[] = {1, 5, 5};
    is_int(measure_argmax(tie, 3), 1, "of equal logits the smaller id is first");
}

static void percentiles_are_of_the_nearest_rank(void)
{
    struct measure_sample s = {0};
    ok(measure_mean(&s) == 0 && measure_percentile(&s, 50) == 0, "an empty sample is 0");
    for (int i = 1000; i >= 1; i--)
        measure_add(&s, i);
    ok(measure_percentile(&s, 99) == 990 && measure_percentile(&s, 1) == 10, "1 and 99 of 1..1000");
    ok(measure_percentile(&s, 0) == 1 && measure_percentile(&s, 100) == 1000, "both ends");
    ok(measure_mean(&s) == 500.5, "mean");
    ok(measure_at_least(&s, 901) == 0.1, "share at or above");
    measure_add(&s, 0);
    ok(measure_percentile(&s, 0) == 0, "what comes after a percentile counts, too");
    measure_fini(&s);
}

static void sums_become_perplexity(void)
{
    struct measure m = {0};
    struct measure_token t = {.kl = 0.5, .nll = log(8), .nll_dense = log(2), .top1 = true};
    measure_take(&m, &t);
    t.nll = log(2);
    measure_take(&m, &t);
    ok(near(measure_ppl(&m), 4, 1e-9) && near(measure_ppl_dense(&m), 2, 1e-9), "geometric means");
    ok(m.n == 2 && m.top1 == 2 && measure_mean(&m.kl) == 0.5, "and counts");
    measure_fini(&m.kl);
}

/* ---- recall ---- */

enum { CANDIDATES = 3000 };

static void make_scores(uint64_t seed, float *score, float *mass)
{
    for (int i = 0; i < CANDIDATES; i++) {
        score[i] = (float)(splitmix_next(&seed) % 100000) / 1000;
        mass[i] = 1.0f / CANDIDATES;
    }
}

/* Rank by counting who is before: slow and plain. */
static uint32_t rank_of(const float *score, uint32_t i)
{
    uint32_t rank = 0;
    for (uint32_t j = 0; j < CANDIDATES; j++)
        rank += score[j] > score[i] || (score[j] == score[i] && j < i);
    return rank;
}

static void an_oracle_is_robust_at_every_delta(void)
{
    static float score[CANDIDATES], mass[CANDIDATES];
    static uint8_t got[CANDIDATES];
    struct robust r = {0};
    bool partly = true;
    for (uint64_t seed = 1; seed <= 8; seed++) {
        make_scores(seed, score, mass);
        for (uint32_t i = 0; i < CANDIDATES; i++)
            got[i] = rank_of(score, i) < 256;
        robust_add(&r, &(struct robust_query){score, mass, got, CANDIDATES});
    }
    for (int k = 0; k < ROBUST_KS; k++)
        for (int d = 0; d < ROBUST_DELTAS; d++)
            partly = partly && measure_at_least(&r.recall[k], robust_delta[d]) == 1;
    ok(partly, "an exact top 256 has Robustness 1 at each K and delta");
    ok(near(measure_mean(&r.mass), 256.0 / CANDIDATES, 1e-6), "and covers the mass of 256 rows");
    robust_fini(&r);
    r = (struct robust){0};
    make_scores(9, score, mass);
    for (uint32_t i = 0; i < CANDIDATES; i++)
        got[i] = rank_of(score, i) < 48;
    robust_add(&r, &(struct robust_query){score, mass, got, CANDIDATES});
    ok(measure_mean(&r.recall[0]) == 1 && measure_mean(&r.recall[1]) == 0.75 &&
           measure_mean(&r.recall[2]) == 48.0 / 256,
       "the best 48 are all of 16, three quarters of 64 and 48 of 256");
    robust_fini(&r);
}

static void a_random_selector_recalls_its_share(void)
{
    static float score[CANDIDATES], mass[CANDIDATES];
    static uint8_t got[CANDIDATES];
    struct robust r = {0};
    uint64_t random = 5;
    for (uint64_t seed = 1; seed <= 60; seed++) {
        make_scores(seed, score, mass);
        for (uint32_t i = 0; i < CANDIDATES; i++)
            got[i] = splitmix_next(&random) % 10 < 3;
        robust_add(&r, &(struct robust_query){score, mass, got, CANDIDATES});
    }
    ok(near(measure_mean(&r.recall[2]), 0.3, 0.02), "recall of three tenths is 0.3");
    ok(measure_at_least(&r.recall[2], 0.5) == 0 && measure_at_least(&r.recall[2], 0.2) == 1,
       "and robustness falls from 1 to 0 around it");
    robust_fini(&r);
}

static void queries_with_nothing_to_find_are_dropped(void)
{
    static float score[CANDIDATES], mass[CANDIDATES];
    static uint8_t got[CANDIDATES];
    struct robust r = {0};
    make_scores(3, score, mass);
    for (int i = 0; i < CANDIDATES; i++)
        mass[i] = 0.0099f / CANDIDATES;
    robust_add(&r, &(struct robust_query){score, mass, got, CANDIDATES});
    ok(r.dropped == 1 && r.mass.n == 0, "less than a hundredth of the mass: no mass to cover");
    robust_add(&r, &(struct robust_query){score, mass, got, 20});
    ok(r.recall[0].n == 2 && r.recall[1].n == 1, "fewer candidates than K: no recall at that K");
    robust_fini(&r);
}

/* ---- words ---- */

static status parse(const char *line, uint32_t *count, double *number, struct args_list *list,
                    bool *flag)
{
    static char copy[256];
    char *argv[16], *save;
    int argc = 0;
    bool help;
    const struct args_option o[] = {{"count", ARGS_COUNT, count, 1, 10, ""},
                                    {"share", ARGS_NUMBER, number, 0, 1, ""},
                                    {"list", ARGS_LIST, list, 0, 0, ""},
                                    {"flag", ARGS_FLAG, flag, 0, 0, ""}};
    snprintf(copy, sizeof copy, "%s", line);
    for (char *w = strtok_r(copy, " ", &save); w; w = strtok_r(NULL, " ", &save))
        argv[argc++] = w;
    return args_parse(o, ARRAY_LEN(o), argc, argv, NULL, &help);
}

static void words_are_read_or_refused_by_name(void)
{
    static const struct {
        const char *line, *says;
    } bad[] = {{"--count 11", "from 1 to 10"},
               {"--count 2.5", "whole number"},
               {"--count", "missing"},
               {"--share nan", "from 0 to 1"},
               {"--share 0.5x", "wanted"},
               {"--flag=yes", "takes no value"},
               {"--colour red", "--count, --share, --list, --flag"},
               {"word", "unknown option word"},
               {"--no-count", "unknown"}};
    uint32_t count = 0;
    double share = 0;
    bool flag = false;
    struct args_list list = {0};
    ok(parse("--count=7 --share 0.25 --list a,b --list c --flag", &count, &share, &list, &flag) ==
           OK,
       "values behind = or a space, lists by commas or repeated");
    ok(count == 7 && share == 0.25 && flag && list.n == 3 && strcmp(list.v[2], "c") == 0,
       "and they arrive");
    ok(parse("--no-flag", &count, &share, &list, &flag) == OK && !flag, "--no-flag");
    for (size_t i = 0; i < ARRAY_LEN(bad); i++)
        ok(parse(bad[i].line, &count, &share, &list, &flag) == ERR_ARG &&
               strstr(err_text(), bad[i].says) != NULL,
           "'%s' is refused: %s", bad[i].line, err_text());
}

/* ---- tables and plots ---- */

static char *file_text(const char *path)
{
    static char text[65536];
    FILE *f = fopen(path, "r");
    size_t n = f ? fread(text, 1, sizeof text - 1, f) : 0;
    if (f)
        fclose(f);
    text[n] = '\0';
    return text;
}

static void a_sheet_survives_its_file_and_prints(void)
{
    static const struct sheet_column columns[] = {{"name", "who", SHEET_TEXT, 0},
                                                  {"kl", "KL", SHEET_FIXED, 3},
                                                  {"share", "share", SHEET_PERCENT, 1}};
    char path[] = "/tmp/spind-sheet-XXXXXX";
    close(mkstemp(path));
    cJSON *s = sheet_create("test"), *back, *row = sheet_row(s);
    cJSON_AddStringToObject(row, "name", "wave");
    cJSON_AddNumberToObject(row, "kl", 0.0123456);
    row = sheet_row(s);
    cJSON_AddStringToObject(row, "name", "quest");
    cJSON_AddNumberToObject(row, "share", 0.5);
    ok(sheet_save(s, path) == OK && sheet_load(&back, path) == OK, "saved and loaded");
    ok(cJSON_Compare(s, back, true), "and nothing changed");
    FILE *f = fopen(path, "w");
    sheet_print(f, cJSON_GetObjectItem(s, "rows"), columns, ARRAY_LEN(columns));
    fclose(f);
    ok(strcmp(file_text(path),
              "who       KL   share\nwave   0.012       -\nquest      -  50.0 %\n") == 0,
       "a table, with a dash where there is nothing");
    f = fopen(path, "w");
    sheet_markdown(f, cJSON_GetObjectItem(s, "rows"), columns, ARRAY_LEN(columns));
    fclose(f);
    ok(strcmp(file_text(path), "| who | KL | share |\n|---|---:|---:|\n| wave | 0.012 | - |\n"
                               "| quest | - | 50.0 % |\n") == 0,
       "the same in Markdown");
    cJSON_Delete(s);
    cJSON_Delete(back);
    unlink(path);
    ok(sheet_load(&back, path) == ERR_IO, "a file that is not there");
}

static void a_plot_is_whole_svg_with_every_point(void)
{
    static struct plot p = {.title = "a < b & c",
                            .x_label = "x",
                            .y_label = "y",
                            .log_x = true,
                            .log_y = true,
                            .line_at = 0.01};
    char path[] = "/tmp/spind-plot-XXXXXX";
    close(mkstemp(path));
    for (int i = 1; i <= 5; i++) {
        plot_point(plot_series(&p, "one"), i, 0.1 / i);
        plot_point(plot_series(&p, "two"), i, i == 3 ? 0 : 0.02 * i);
    }
    for (int i = 0; i < PLOT_MAX_SERIES; i++) {
        char name[8];
        snprintf(name, sizeof name, "s%d", i);
        plot_point(plot_series(&p, name), 1, 1); /* more than there is room for: ignored */
    }
    ok(p.n_series == PLOT_MAX_SERIES && plot_save(&p, path) == OK, "saved");
    const char *text = file_text(path);
    int circles = 0;
    for (const char *c = text; (c = strstr(c, "<circle")) != NULL; c++)
        circles++;
    is_int(circles, 5 + 4 + (PLOT_MAX_SERIES - 2),
           "a point each, but none for 0 on a logarithmic axis");
    ok(strstr(text, "a &lt; b &amp; c") && !strstr(text, "nan") && !strstr(text, "inf") &&
           strcmp(text + strlen(text) - 7, "</svg>\n") == 0,
       "escaped, finite and closed");
    unlink(path);
}

/* ---- prose and tasks ---- */

static void prose_repeats_from_its_seed_and_has_no_digits(void)
{
    size_t n, m, k;
    char *a = prose_text(1, 200000, &n), *b = prose_text(1, 200000, &m),
         *c = prose_text(2, 9000, &k);
    ok(n == m && memcmp(a, b, n) == 0, "one seed, one text");
    ok(memcmp(a, c, 1000) != 0, "another seed, another text");
    size_t digits = 0, braces = 0;
    for (size_t i = 0; i < n; i++) {
        digits += isdigit((unsigned char)a[i]) != 0;
        braces += a[i] == '{' || a[i] == '}';
    }
    ok(digits == 0 && braces == 0, "no digit and no unfilled slot in 200,000 bytes");
    ok(strstr(a, "  ") == NULL && a[0] != ' ' && a[n - 1] != ' ', "no double spaces");
    ok(strstr(a, " a old ") == NULL && strstr(a, " an old ") != NULL, "articles fit");
    /* Sentences come again now and then; stretches of text must not. */
    int again = 0;
    for (size_t i = 0; i + 400 < n; i += 400) {
        char part[201];
        memcpy(part, a + i, 200);
        part[200] = '\0';
        again += strstr(a + i + 1, part) != NULL;
    }
    is_int(again, 0, "no stretch of 200 bytes comes twice");
    mem_free(a);
    mem_free(b);
    mem_free(c);
}

/* A byte tokenizer has no words; tasks take theirs from a vocabulary. So: 256 bytes and some words. */
enum { WORDS = 1500, VOCAB = 256 + WORDS };
static char vocabulary[VOCAB][16];

static struct text_view token_of(const void *ctx, uint32_t i)
{
    (void)ctx;
    return (struct text_view){vocabulary[i], strlen(vocabulary[i])};
}
static struct text_view no_merge(const void *ctx, uint32_t i)
{
    (void)ctx, (void)i;
    return (struct text_view){"", 0};
}
static int32_t normal(const void *ctx, uint32_t i)
{
    (void)ctx, (void)i;
    return TOKEN_NORMAL;
}

/* GPT-2's map of bytes to letters, in UTF-8. */
static void byte_name(unsigned b, char *out)
{
    unsigned next = 256, cp = b;
    for (unsigned i = 0; i <= b; i++) {
        bool plain = (i >= 33 && i <= 126) || (i >= 161 && i <= 172) || i >= 174;
        cp = plain ? i : next++;
    }
    if (cp < 128)
        out[0] = (char)cp, out[1] = '\0';
    else
        out[0] = (char)(0xc0 | cp >> 6), out[1] = (char)(0x80 | (cp & 63)), out[2] = '\0';
}

static struct tokenizer *make_tokenizer(void)
{
    static const char letters[] = "bcdfghklmnprstvw", vowels[] = "aeiou";
    struct tokenizer *t;
    for (unsigned b = 0; b < 256; b++)
        byte_name(b, vocabulary[b]);
    for (unsigned i = 0; i < WORDS; i++)
        snprintf(vocabulary[256 + i], 16, "\xc4\xa0%c%c%c%c%c", letters[i % 16], vowels[i / 16 % 5],
                 letters[i / 80 % 16], vowels[i / 1280], 'n');
    const struct tokenizer_source src = {.model = "gpt2",
                                         .pre = "smollm",
                                         .n_tokens = VOCAB,
                                         .token = token_of,
                                         .merge = no_merge,
                                         .type = normal,
                                         .bos = TOKEN_NONE,
                                         .eos = TOKEN_NONE,
                                         .unknown = TOKEN_NONE,
                                         .pad = TOKEN_NONE};
    if (tokenizer_create(&t, &src) != OK) {
        printf("Bail out! %s\n", err_text());
        exit(1);
    }
    return t;
}

static char *decode(const struct tokenizer *t, const uint32_t *tokens, uint32_t n)
{
    static char text[200000];
    size_t at = 0;
    for (uint32_t i = 0; i < n; i++) {
        struct text_view v = tokenizer_bytes(t, tokens[i]);
        memcpy(text + at, v.p, v.len);
        at += v.len;
    }
    text[at] = '\0';
    return text;
}

/* The last digit string or word of the answer must be in the context: what is asked for is there. */
static bool answer_is_hidden(const struct tokenizer *t, const struct task *task)
{
    char answer[512];
    for (uint32_t i = 0; i < task->n_turns; i++) {
        const struct task_turn *turn = &task->turns[i];
        snprintf(answer, sizeof answer, "%s", decode(t, turn->answer, turn->n_answer));
        char *context = decode(t, task->context, task->n_context), *save;
        for (char *w = strtok_r(answer, " ,\"", &save); w; w = strtok_r(NULL, " ,\"", &save)) {
            size_t len = strlen(w);
            bool counter = len < 4 && w[len - 1] == '.'; /* "1." of an enumeration */
            if (!counter && strcmp(w, "and") != 0 && strstr(context, w) == NULL)
                return false;
        }
    }
    return true;
}

static void tasks_hide_what_they_ask_for(void)
{
    size_t len;
    struct tokenizer *t = make_tokenizer();
    struct task_source src = {.tokenizer = t,
                              .scratch = token_scratch_create(),
                              .text = prose_text(3, 60000, &len),
                              .context = 9000,
                              .depth = -1};
    src.text_len = len;
    for (uint32_t i = 0; i < tasks_count(); i++) {
        struct task a, b;
        const char *name = tasks_name(i);
        src.seed = 11;
        if (!ok(task_make(&a, name, &src) == OK, "%s is made", name)) {
            printf("# %s\n", err_text());
            continue;
        }
        ok(a.n_context <= src.context && a.n_context > src.context - 400 && a.n_turns > 0,
           "%s fills its context: %u of %u", name, a.n_context, src.context);
        ok(answer_is_hidden(t, &a), "%s: every answer is in the context", name);
        bool refs = true;
        for (uint32_t k = 0; k < a.turns[0].n_refs; k++)
            refs = refs && strstr(decode(t, a.turns[0].answer, a.turns[0].n_answer),
                                  a.turns[0].refs[k]) != NULL;
        ok(refs && (a.turns[0].score == TASKS_EXACT) == (a.turns[0].n_refs == 0),
           "%s: the canonical answer has every reference", name);
        task_make(&b, name, &src);
        ok(a.n_context == b.n_context &&
               memcmp(a.context, b.context, a.n_context * sizeof *a.context) == 0,
           "%s: one seed, one task", name);
        task_fini(&b);
        src.seed = 12;
        task_make(&b, name, &src);
        ok(a.turns[0].n_answer != b.turns[0].n_answer ||
               memcmp(a.turns[0].answer, b.turns[0].answer, a.turns[0].n_answer * 4) != 0,
           "%s: another seed, another answer", name);
        task_fini(&a);
        task_fini(&b);
    }
    struct task none;
    ok(task_make(&none, "tea", &src) == ERR_ARG && strstr(err_text(), "niah_multiquery"),
       "an unknown task: %s", err_text());
    src.context = 70000;
    ok(task_make(&none, "passkey", &src) == ERR_ARG && strstr(err_text(), "too short"),
       "a haystack that is too small: %s", err_text());
    mem_free(src.text);
    token_scratch_destroy(src.scratch);
    tokenizer_destroy(t);
}

static void short_contexts_are_filled_too(void)
{
    size_t len;
    struct tokenizer *t = make_tokenizer();
    struct task_source src = {.tokenizer = t,
                              .scratch = token_scratch_create(),
                              .text = prose_text(3, 20000, &len),
                              .context = 3000, /* bytes: some 700 tokens of a real vocabulary */
                              .depth = -1,
                              .seed = 1};
    src.text_len = len;
    for (uint32_t i = 0; i < tasks_count(); i++) {
        struct task a;
        bool made = task_make(&a, tasks_name(i), &src) == OK;
        ok(made && a.n_context <= 3000, "%s of a short context", tasks_name(i));
        task_fini(&a);
    }
    mem_free(src.text);
    token_scratch_destroy(src.scratch);
    tokenizer_destroy(t);
}

static void needles_lie_where_they_should_and_share_what_is_before(void)
{
    size_t len;
    struct tokenizer *t = make_tokenizer();
    struct task_source src = {.tokenizer = t,
                              .scratch = token_scratch_create(),
                              .text = prose_text(4, 60000, &len),
                              .context = 8000};
    struct task a, b;
    src.text_len = len;
    for (int depth = 1; depth <= 9; depth += 4) {
        src.depth = depth / 10.0;
        CHECK(task_make(&a, "passkey", &src) == OK);
        ok(fabs(a.shared / 8000.0 - src.depth) < 0.03, "depth 0.%d: %u of 8000 tokens before it",
           depth, a.shared);
        src.depth = 0.95;
        src.seed++;
        CHECK(task_make(&b, "passkey", &src) == OK);
        uint32_t same = 0;
        while (same < a.n_context && a.context[same] == b.context[same])
            same++;
        ok(same >= a.shared, "another task has the same %u tokens before them", a.shared);
        task_fini(&a);
        task_fini(&b);
    }
    mem_free(src.text);
    token_scratch_destroy(src.scratch);
    tokenizer_destroy(t);
}

int main(void)
{
    kl_is_that_of_the_two_softmaxes();
    percentiles_are_of_the_nearest_rank();
    sums_become_perplexity();
    an_oracle_is_robust_at_every_delta();
    a_random_selector_recalls_its_share();
    queries_with_nothing_to_find_are_dropped();
    words_are_read_or_refused_by_name();
    a_sheet_survives_its_file_and_prints();
    a_plot_is_whole_svg_with_every_point();
    prose_repeats_from_its_seed_and_has_no_digits();
    tasks_hide_what_they_ask_for();
    short_contexts_are_filled_too();
    needles_lie_where_they_should_and_share_what_is_before();
    return tap_done();
}
