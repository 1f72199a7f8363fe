/* What `spind eval` stands on: one sequence on the sparse path without scheduler and cache
 * (engine/tool/eval_run.h), on a tiny random model, with every built-in plug-in. */
#include "engine/tool/eval.h"
#include "engine/tool/keys.h"
#include "engine/tool/planted.h"
#include "engine/tool/sheet.h"
#include "engine/tool/tool.h"
#include "tests/gguf_writer.h"
#include "tests/model_rig.h"
#include "tests/tap.h"

#include <math.h>
#include <stdlib.h>
#include <unistd.h>

enum { POSITIONS = 2560, CONTEXT = 2200, ROWS = 40, LAYERS = 3, HEADS = 4, KV_HEADS = 2, DIM = 64 };

static char model_path[] = "/tmp/spind-eval-XXXXXX";
static uint32_t tokens[POSITIONS];
static float a[ROWS * TINY_VOCAB], b[ROWS * TINY_VOCAB];

static void make_model(void)
{
    uint64_t rng = 3;
    struct gguf_writer w = {0};
    close(mkstemp(model_path));
    tiny_model(&w, &(struct tiny_spec){.type = DTYPE_Q8_0,
                                       .hidden = HEADS * DIM,
                                       .ff = 256,
                                       .heads = HEADS,
                                       .kv_heads = KV_HEADS,
                                       .layers = LAYERS,
                                       .positions = POSITIONS});
    struct bytes f = gw_finish(&w);
    bytes_save(&f, model_path);
    bytes_free(&f);
    for (uint32_t i = 0; i < POSITIONS; i++)
        tokens[i] = (uint32_t)(tiny_random(&rng) % TINY_VOCAB);
}

static struct eval_run *open_run(uint32_t block_rows, uint32_t exempt)
{
    struct eval_run *r;
    const struct eval_run_config cfg = {.model = model_path,
                                        .n_threads = 2,
                                        .block_rows = block_rows,
                                        .exempt_layers = exempt,
                                        .max_positions = POSITIONS};
    rig_must(eval_run_open(&r, &cfg));
    return r;
}

static struct sparse_choice choose(const char *plugin, float budget)
{
    uint32_t i;
    rig_must(sparse_find(plugin, &i));
    return sparse_choice_make(i, budget);
}

static bool same_logits(uint32_t rows)
{
    return memcmp(a, b, rows * TINY_VOCAB * sizeof *a) == 0;
}

/* Largest difference, in deviations of the logits. */
static double apart(uint32_t rows)
{
    double most = 0, square = 0;
    for (uint32_t i = 0; i < rows * TINY_VOCAB; i++) {
        square += (double)a[i] * (double)a[i];
        most = fmax(most, fabs((double)a[i] - (double)b[i]));
    }
    return most / sqrt(square / (rows * TINY_VOCAB));
}

static void a_prefill_is_used_again_and_changes_nothing(void)
{
    struct eval_run *r = open_run(8, 1), *fresh = open_run(8, 1);
    uint32_t other[POSITIONS];
    struct sparse_choice c = choose("wave", 0.05f);
    memcpy(other, tokens, sizeof other);
    other[1500] ^= 1;
    rig_must(eval_run_prefill(r, other, CONTEXT));
    rig_must(
        eval_run_rows(r, &c, other + CONTEXT, ROWS, a)); /* seals, and writes behind the prefill */
    rig_must(eval_run_prefill(r, tokens, CONTEXT));      /* same up to 1500 */
    rig_must(eval_run_rows(r, NULL, tokens + CONTEXT, ROWS, a));
    rig_must(eval_run_prefill(fresh, tokens, CONTEXT));
    rig_must(eval_run_rows(fresh, NULL, tokens + CONTEXT, ROWS, b));
    ok(same_logits(ROWS), "dense rows behind a prefill that re-used 1500 positions");
    eval_run_rewind(r, CONTEXT);
    eval_run_rewind(fresh, CONTEXT);
    rig_must(eval_run_rows(r, &c, tokens + CONTEXT, ROWS, a));
    rig_must(eval_run_rows(fresh, &c, tokens + CONTEXT, ROWS, b));
    ok(same_logits(ROWS), "and rows by plan: a segment that changed was sealed again");
    eval_run_close(r);
    eval_run_close(fresh);
}

static void rows_of_a_step_are_single_steps(const char *plugin, uint32_t block_rows)
{
    struct eval_run *r = open_run(block_rows, 1);
    struct sparse_choice c = choose(plugin, 0.04f);
    /* From 2090 on: the border at 2 * 1024 + 64 = 2112 lies inside. */
    rig_must(eval_run_prefill(r, tokens, 2090));
    rig_must(eval_run_rows(r, &c, tokens + 2090, ROWS, a));
    eval_run_rewind(r, 2090);
    for (uint32_t i = 0; i < ROWS; i++)
        rig_must(eval_run_rows(r, &c, tokens + 2090 + i, 1, b + (size_t)i * TINY_VOCAB));
    ok(same_logits(ROWS),
       "%s, pages of %u: rows of a step are those of single steps, across a border", plugin,
       block_rows);
    eval_run_rewind(r, 2090);
    rig_must(eval_run_rows(r, &c, tokens + 5, ROWS / 2, b));
    eval_run_rewind(r, 2090);
    rig_must(eval_run_rows(r, &c, tokens + 2090, ROWS, b));
    ok(same_logits(ROWS), "%s: appended and rewound is never appended", plugin);
    eval_run_close(r);
}

static void a_whole_budget_is_dense(const char *plugin, uint32_t block_rows, uint32_t exempt)
{
    struct eval_run *r = open_run(block_rows, exempt);
    struct sparse_choice all = choose(plugin, 1), few = choose(plugin, 0.02f);
    rig_must(eval_run_prefill(r, tokens, CONTEXT));
    rig_must(eval_run_rows(r, NULL, tokens + CONTEXT, ROWS, a));
    eval_run_rewind(r, CONTEXT);
    rig_must(eval_run_rows(r, &all, tokens + CONTEXT, ROWS, b));
    double d = apart(ROWS);
    ok(d < 1e-3, "%s, pages of %u, %u dense layers: a budget of everything is dense (%.1e apart)",
       plugin, block_rows, exempt, d);
    eval_run_rewind(r, CONTEXT);
    rig_must(eval_run_rows(r, &few, tokens + CONTEXT, ROWS, b));
    d = apart(ROWS);
    ok(d > 1e-3, "%s: a budget of 2 in 100 is not (%.1e apart)", plugin, d);
    eval_run_close(r);
}

/* ---- the oracle picks what the kept keys say ---- */

struct watcher {
    struct keys keys;
    struct eval_run *r;
    struct eval_layer now;
    uint32_t n, agreed;
};

static void see_layer(void *arg, const struct eval_layer *l)
{
    struct watcher *w = arg;
    w->now = *l;
    keys_take(&w->keys, l);
}

/* Of one page selected beside the sinks': is it the one with the largest share, summed over heads? */
static void see_selection(void *arg, const struct attention_selection *s)
{
    enum { R = 8, GROUP = HEADS / KV_HEADS, SINK_PAGES = 2 };
    struct watcher *w = arg;
    static float score[POSITIONS + 16];
    static double mass[POSITIONS / R];
    uint32_t pages = s->n_segments * SEGMENT_ROWS / R, best = SINK_PAGES;
    size_t width = (size_t)(HEADS + 2 * KV_HEADS) * DIM;
    memset(mass, 0, sizeof mass);
    for (uint32_t h = 0; h < GROUP; h++) {
        keys_scores(&w->keys, s->layer, s->head,
                    w->now.qkv + (s->pos - w->now.first_pos) * width +
                        (size_t)(s->head * GROUP + h) * DIM,
                    1 / sqrtf(DIM), s->n_segments * SEGMENT_ROWS, score);
        /* Over partitions, beside the sinks: what the reduction normalises by. */
        double lse = keys_lse(score + SINK_PAGES * R, (pages - SINK_PAGES) * R);
        for (uint32_t p = SINK_PAGES * R; p < pages * R; p++)
            mass[p / R] += exp((double)score[p] - lse);
    }
    for (uint32_t p = SINK_PAGES; p < pages; p++)
        best = mass[p] > mass[best] ? p : best;
    uint32_t at[R];
    eval_run_page_positions(w->r, &s->in->traits, s->layer, s->head, s->pages[s->n_pages - 1], at);
    w->n++;
    w->agreed += s->n_pages == SINK_PAGES + 1 && at[0] == best * R;
}

static void an_oracle_picks_what_the_keys_say(void)
{
    struct watcher w = {0};
    struct sparse_choice c = choose("oracle", 8); /* rows: one page */
    w.r = open_run(8, 1);
    rig_must(keys_init(&w.keys, eval_run_memory(w.r)->geo, POSITIONS));
    eval_run_watch(w.r, see_layer, &w);
    rig_must(eval_run_prefill(w.r, tokens, CONTEXT));
    eval_run_record(w.r, see_selection, &w);
    rig_must(eval_run_rows(w.r, &c, tokens + CONTEXT, ROWS, a));
    is_int(w.n, ROWS * (LAYERS - 1) * KV_HEADS, "every row, sparse layer and head was recorded");
    ok(w.agreed >= w.n - 2, "the page is the heaviest by the keys that were kept: %u of %u",
       w.agreed, w.n); /* near ties may fall to either side of a rounding */
    eval_run_record(w.r, NULL, NULL);
    eval_run_watch(w.r, NULL, NULL);
    eval_run_rewind(w.r, CONTEXT);
    rig_must(eval_run_rows(w.r, &c, tokens + CONTEXT, ROWS, b));
    ok(same_logits(ROWS), "and watching changed nothing");
    eval_run_close(w.r);
    keys_fini(&w.keys);
}

static void a_permuted_page_says_whose_rows_it_holds(void)
{
    struct eval_run *r = open_run(8, 0);
    struct sparse_choice c = choose("wave", 0.05f);
    struct sparse_traits t;
    uint32_t at[8], wrong = 0;
    static uint8_t seen[2 * SEGMENT_ROWS];
    rig_must(eval_run_prefill(r, tokens, CONTEXT));
    rig_must(eval_run_rows(r, &c, tokens + CONTEXT, 1, a));
    rig_must(sparse_choice_check(&c, eval_run_memory(r)->geo, &t));
    for (uint32_t page = 0; page < 2 * SEGMENT_ROWS / 8; page++) {
        eval_run_page_positions(r, &t, 1, 1, page, at);
        for (uint32_t i = 0; i < 8; i++) {
            wrong += at[i] / SEGMENT_ROWS != page * 8 / SEGMENT_ROWS || seen[at[i]]++;
            wrong += page < 2 && at[i] != page * 8 + i;
        }
    }
    is_int(wrong, 0,
           "pages of two segments hold each position once, in its segment, sinks in place");
    eval_run_close(r);
}

static void costs_are_those_of_the_plan(void)
{
    struct eval_run *r = open_run(8, 1);
    struct sparse_choice c = choose("wave", 0.05f), dense = choose("dense", 0.05f);
    struct eval_cost cost;
    rig_must(eval_run_cost(r, &c, CONTEXT, &cost));
    is_int(cost.budget, CONTEXT / 20 / 8 * 8, "whole pages of 5 in 100");
    is_int(cost.rows, cost.budget + 16 + CONTEXT - 2 * SEGMENT_ROWS, "beside it sinks and tail");
    ok(cost.scan_bytes >= 2.0 * 128 * 2 * DIM * 2 * KV_HEADS,
       "two rows of digest for 128 pages of two segments, %u lanes: %.0f bytes", 2 * KV_HEADS,
       cost.scan_bytes);
    rig_must(eval_run_cost(r, &dense, CONTEXT, &cost));
    ok(cost.rows == CONTEXT && cost.scan_bytes == 0, "dense attends all and scans nothing");
    eval_run_close(r);
}

static void planted_tokens_hold_their_share(void)
{
    for (uint32_t m = 0; m < planted_count(); m++) {
        struct planted p, again;
        double least = 1, most = 0;
        rig_must(planted_make(&p, planted_name(m), 4096, 0.8, 5));
        rig_must(planted_make(&again, planted_name(m), 4096, 0.8, 5));
        bool same = memcmp(p.k, again.k, (size_t)PLANTED_KV_HEADS * 4096 * PLANTED_DIM * 4) == 0;
        for (size_t t = 0; t < planted_target(PLANTED_KV_HEADS, 0, 0); t++) {
            const float *k = p.k + t / (PLANTED_TARGETS * PLANTED_GROUP) * 4096 * PLANTED_DIM;
            double all = 0, planted = 0;
            for (uint32_t i = 0; i < 4096; i++) {
                double s = 0;
                for (int d = 0; d < PLANTED_DIM; d++)
                    s += (double)p.axis[t * PLANTED_DIM + (size_t)d] *
                         (double)k[(size_t)i * PLANTED_DIM + (size_t)d];
                double w = exp(s / sqrt(PLANTED_DIM));
                all += w;
                for (uint32_t j = 0; j < p.n_tokens; j++)
                    planted += p.at[t * PLANTED_TOKENS + j] == i ? w : 0;
            }
            least = fmin(least, planted / all);
            most = fmax(most, planted / all);
        }
        /* Targets planted later take from those before, most where queries have much in common. */
        ok(same && (p.n_tokens == 0 ? most == 0 : least > 0.3 && most < 0.95),
           "%s: one seed, one trace; planted tokens hold %.2f to %.2f", planted_name(m), least,
           most);
        planted_fini(&p);
        planted_fini(&again);
    }
}

/* ---- tasks whose answer is generated ---- */

enum { GENERATED = 24, LAST = 6 };

static uint32_t greedy(const float *logits)
{
    uint32_t best = 0;
    for (uint32_t i = 1; i < TINY_VOCAB; i++)
        best = logits[i] > logits[best] ? i : best;
    return best;
}

/* Plain decoding, a row at a time; the text of its last tokens. */
static void decode_plainly(struct eval_run *r, const struct sparse_choice *c,
                           const uint32_t *question, uint32_t n, char *text)
{
    uint32_t next[GENERATED];
    size_t at = 0;
    eval_run_rewind(r, CONTEXT);
    rig_must(eval_run_rows(r, c, question, n, a));
    next[0] = greedy(a + (size_t)(n - 1) * TINY_VOCAB);
    for (uint32_t i = 1; i < GENERATED; i++) {
        rig_must(eval_run_rows(r, c, &next[i - 1], 1, a));
        next[i] = greedy(a);
    }
    for (uint32_t i = GENERATED - LAST; i < GENERATED; i++) {
        struct text_view v = tokenizer_bytes(eval_run_tokenizer(r), next[i]);
        for (size_t k = 0; k < v.len && at + 1 < TASKS_REF_BYTES; k++)
            text[at++] = v.p[k] ? v.p[k] : ' ';
    }
    text[at] = '\0';
}

static void a_draft_changes_nothing_that_is_generated(void)
{
    static struct eval e = {.interval = 1, .top_p = 1, .block_rows = 8};
    struct eval_outcome o[2] = {{0}};
    struct task t = {.context = tokens, .n_context = CONTEXT, .n_turns = 1};
    struct task_turn *turn = &t.turns[0];
    char dense[TASKS_REF_BYTES], sparse[TASKS_REF_BYTES];
    e.run = open_run(8, 0);
    e.geo = eval_run_memory(e.run)->geo;
    rig_must(eval_add_setting(&e, NULL, "wave", "estimate=0", 0.02));
    rig_must(eval_add_setting(&e, NULL, "dense", "", 1));
    turn->question = turn->answer = tokens + CONTEXT;
    turn->n_question = 7;
    turn->n_answer = 3;
    turn->score = TASKS_ALL;
    turn->generate = GENERATED;
    rig_must(eval_run_prefill(e.run, tokens, CONTEXT));
    decode_plainly(e.run, &e.settings[0].choice, turn->question, 7, sparse);
    decode_plainly(e.run, NULL, turn->question, 7, dense);
    if (!ok(strcmp(dense, sparse) != 0, "on a random model the two texts part"))
        printf("# both: %s\n", dense);
    snprintf(turn->refs[turn->n_refs++], TASKS_REF_BYTES, "%s", dense);
    snprintf(turn->refs[turn->n_refs++], TASKS_REF_BYTES, "%s", sparse);
    rig_must(eval_task(&e, &t, o));
    ok(o[0].asked == 2 && o[0].right_dense == 1 && o[0].right == 1 && o[0].kept == 0,
       "each finds the end of its own text: %u, %u, both %u", o[0].right_dense, o[0].right,
       o[0].kept);
    ok(o[1].right == 1 && o[1].kept == 1 && o[1].kl == 0 && o[1].logprob == o[1].logprob_dense,
       "dense keeps what dense finds");
    ok(o[0].n_answer == 3 && o[0].kl > 0, "the canonical answer is scored, too");
    eval_run_close(e.run);
}

/* ---- the verb ---- */

static int verb(const char *line)
{
    static char copy[512];
    char *argv[24], *save;
    int argc = 0;
    snprintf(copy, sizeof copy, "%s", line);
    for (char *w = strtok_r(copy, " ", &save); w; w = strtok_r(NULL, " ", &save))
        argv[argc++] = w;
    return eval_verb(argc, argv, model_path);
}

static void the_verb_writes_what_scripts_read(void)
{
    static const char *const keys[] = {
        "kl_mean",   "kl_p99",        "top1",           "ppl",
        "ppl_dense", "rows_attended", "selected_share", "scan_bytes"};
    cJSON *sheet;
    bool all = true;
    is_int(verb("kl --plugin wave --budget 0.05 --context 1200 --tokens 20 --exempt-layers 1 "
                "--json /tmp/spind-eval.json --svg /tmp/spind-eval.svg"),
           0, "eval kl, over generated prose");
    rig_must(sheet_load(&sheet, "/tmp/spind-eval.json"));
    for (size_t i = 0; i < ARRAY_LEN(keys); i++)
        all = all && isfinite(sheet_number(sheet, keys[i]));
    ok(all && sheet_number(sheet, "kl_mean") > 0 && sheet_number(sheet, "ppl_dense") > 1,
       "its keys are at the top of the document");
    cJSON_Delete(sheet);
    is_int(verb("robustness --plugin oracle,wave --budget 0.1,0.5 --context 1200 --rows 8 "
                "--json /tmp/spind-eval.json"),
           0, "eval robustness");
    rig_must(sheet_load(&sheet, "/tmp/spind-eval.json"));
    const cJSON *rows = cJSON_GetObjectItem(sheet, "rows");
    ok(cJSON_GetArraySize(rows) == 4 &&
           sheet_number(cJSON_GetArrayItem(rows, 1), "mass") >
               sheet_number(cJSON_GetArrayItem(rows, 0), "mass") &&
           sheet_number(cJSON_GetArrayItem(rows, 0), "queries") == 8 * (LAYERS - 1) * KV_HEADS,
       "more budget, more mass; every query counted");
    cJSON_Delete(sheet);
    is_int(
        verb("planted --mode scattered --length 2048 --plugin oracle --budget 0.1 --rows 8 --json "
             "/tmp/spind-eval.json"),
        0, "eval planted");
    rig_must(sheet_load(&sheet, "/tmp/spind-eval.json"));
    ok(sheet_number(cJSON_GetArrayItem(cJSON_GetObjectItem(sheet, "rows"), 0), "recall") == 1,
       "an oracle finds all that was planted");
    cJSON_Delete(sheet);
    is_int(verb("kl --context 3000 --tokens 8 --budget 0.05 --rope-scale 2"), 0,
           "positions beyond the model's own, by scaling");
    unlink("/tmp/spind-eval.json");
    unlink("/tmp/spind-eval.svg");
}

static char *read_page(const char *path)
{
    static char text[1 << 17];
    FILE *f = fopen(path, "r");
    size_t n = f ? fread(text, 1, sizeof text - 1, f) : 0;
    if (f)
        fclose(f);
    text[n] = '\0';
    return text;
}

/* Puts a number that nobody measured into a piece of the cache. */
static void spoil(const char *file, double v)
{
    cJSON *sheet;
    rig_must(sheet_load(&sheet, file));
    cJSON *row = cJSON_GetArrayItem(cJSON_GetObjectItem(sheet, "rows"), 1);
    cJSON_ReplaceItemInObject(row, "kl_mean", cJSON_CreateNumber(v));
    rig_must(sheet_save(sheet, file));
    cJSON_Delete(sheet);
}

static void the_page_has_every_piece_and_keeps_what_it_measured(void)
{
    static const char *const heads[] = {"# Quality",
                                        "## The bars",
                                        "## KL to dense, pages of 8",
                                        "## KL to dense, pages of 16",
                                        "## KL at",
                                        "## KL by length",
                                        "## Head policies",
                                        "## Pass keys, pages of 8",
                                        "## RULER",
                                        "## Five questions",
                                        "## Robustness",
                                        "## Planted",
                                        "## Where",
                                        "| scattered |",
                                        "\nNot measured.\n",
                                        "| 1600 | 2 |"};
    /* The tiny model has no words for tasks. Sanitized, one piece of each kind. */
    const char *pieces = TAP_SANITIZED ? "kl-8,planted-8"
                                       : "kl-8,kl-16,kl-places,kl-contexts,robustness-8,planted-8";
    char dir[] = "/tmp/spind-quality-XXXXXX", line[256], path[64];
    ok(mkdtemp(dir) != NULL, "a folder");
    snprintf(line, sizeof line, "quality --quick --exempt-layers 1 --out %s --cache %s --piece %s",
             dir, dir, pieces);
    is_int(verb(line), 0, "eval quality --quick");
    snprintf(path, sizeof path, "%s/quality.md", dir);
    const char *page = read_page(path);
    for (size_t i = 0; i + TAP_SANITIZED < ARRAY_LEN(heads);
         i++) /* the last is of a piece left out */
        ok(strstr(page, heads[i]) != NULL, "the page has \"%s\"", heads[i]);
    ok(strstr(page, "nan") == NULL, "and a number wherever one is written");
    snprintf(path, sizeof path, "%s/kl-8.json", dir);
    spoil(path, 0.4321);
    is_int(verb(line), 0, "once more");
    snprintf(path, sizeof path, "%s/quality.md", dir);
    ok(strstr(read_page(path), "0.4321") != NULL, "what was measured is not measured again");
    if (!TAP_SANITIZED) {
        snprintf(line + strlen(line), sizeof line - strlen(line), " --seed 43");
        is_int(verb(line), 0, "with another seed");
        ok(strstr(read_page(path), "0.4321") == NULL, "but a piece of another seed is");
    }
    snprintf(line, sizeof line, "rm -r %s", dir);
    ok(system(line) == 0, "removed");
}

static void wrong_words_are_refused(void)
{
    static const struct {
        const char *line, *says;
    } bad[] = {
        {"tea", NULL},
        {"kl --plugin tea --context 1200 --tokens 8", "there are dense, oracle, quest, wave"},
        {"kl --budget tea --context 1200 --tokens 8", "share of the context"},
        {"kl --budget 0 --context 1200 --tokens 8", "share of the context"},
        {"kl --option tea=1 --context 1200 --tokens 8", "wave, which has outliers"},
        {"kl --option outliers=3 --context 1200 --tokens 8", "0 to 2"},
        {"kl --option outliers --context 1200 --tokens 8", "name=value"},
        {"kl --block-size 9", "8 or 16"},
        {"kl --context 2500 --tokens 100", "has 2560 positions"},
        {"kl --text /nowhere --context 1200 --tokens 8", "/nowhere"},
        {"kl --head-policy tea --context 1200 --tokens 8", "tea"},
        {"ruler --task tea --length 1024", "niah_single_1"},
        {"ruler --length 5", "512 to 1048576"},
        {"planted --mode tea", "scattered"},
        {"robustness --plugin dense --context 1200 --rows 2", "whole pages"},
        {"quality", "--out FOLDER"},
        {"quality --out /tmp --piece tea", "there are kl-8"},
    };
    for (size_t i = 0; i < ARRAY_LEN(bad); i++) {
        int rc = verb(bad[i].line);
        ok(rc > 0 && (bad[i].says == NULL || strstr(err_text(), bad[i].says)), "'eval %s': %s",
           bad[i].line, bad[i].says ? err_text() : "there is no such command");
    }
}

int main(void)
{
    make_model();
    planted_tokens_hold_their_share();
    a_prefill_is_used_again_and_changes_nothing();
    rows_of_a_step_are_single_steps("wave", 8);
    a_whole_budget_is_dense("quest", 16, 2);
    if (!TAP_SANITIZED) {
        rows_of_a_step_are_single_steps("wave", 16);
        rows_of_a_step_are_single_steps("quest", 8);
        rows_of_a_step_are_single_steps("oracle", 8);
        a_whole_budget_is_dense("wave", 8, 1);
        a_whole_budget_is_dense("wave", 16, 0);
        a_whole_budget_is_dense("oracle", 8, 0);
    }
    an_oracle_picks_what_the_keys_say();
    a_permuted_page_says_whose_rows_it_holds();
    costs_are_those_of_the_plan();
    a_draft_changes_nothing_that_is_generated();
    the_verb_writes_what_scripts_read();
    the_page_has_every_piece_and_keeps_what_it_measured();
    wrong_words_are_refused();
    unlink(model_path);
    return tap_done();
}
