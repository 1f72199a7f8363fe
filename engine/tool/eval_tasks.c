/* `spind eval passkey | ruler | turns`: tasks with an answer, in completion form (tasks.h). What dense
 * gets right, what of that the sparse path keeps, and how much it believes in the answer.
 *
 * Questions and answers go through the sparse path, teacher-forced: decoding greedily would give the
 * answer exactly if each of its tokens comes first given the ones before it. Where several answers in
 * any order are right, tokens are really generated; what dense generated is tried as a draft, so that
 * rows are computed many to a step as long as both agree. */
#include "engine/tool/eval.h"
#include "engine/tool/measure.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_GENERATE = 128, MAX_SAMPLES = 1024 };

/* ---- one task ---- */

/* Everything of a task behind its context, in a row; answers end at `end`. */
struct script {
    uint32_t *tokens, n;
    uint32_t answer[TASKS_MAX_TURNS], end[TASKS_MAX_TURNS];
};

static struct script script_make(const struct task *t)
{
    struct script s = {0};
    for (uint32_t i = 0; i < t->n_turns; i++)
        s.n += t->turns[i].n_question + t->turns[i].n_answer;
    s.tokens = mem_alloc(s.n * sizeof *s.tokens);
    s.n = 0;
    for (uint32_t i = 0; i < t->n_turns; i++) {
        const struct task_turn *turn = &t->turns[i];
        memcpy(s.tokens + s.n, turn->question, turn->n_question * sizeof *s.tokens);
        s.answer[i] = s.n += turn->n_question;
        memcpy(s.tokens + s.n, turn->answer, turn->n_answer * sizeof *s.tokens);
        s.end[i] = s.n += turn->n_answer;
    }
    return s;
}

/* What was generated behind a question. */
struct draft {
    uint32_t tokens[MAX_GENERATE], n;
};

/* Greedy decoding: question, then `want` tokens, at the cost of few steps where `guess` is right. */
static status generate(struct eval *e, const struct sparse_choice *c, const struct task *t,
                       const struct task_turn *turn, const struct draft *guess, struct draft *out)
{
    uint32_t vocab = eval_run_info(e->run)->shape.vocab, want = turn->generate;
    uint32_t rows = turn->n_question > want ? turn->n_question : want;
    float *logits = mem_alloc((size_t)rows * vocab * sizeof *logits);
    uint32_t agreed = 0;
    eval_run_rewind(e->run, t->n_context);
    status st = eval_run_rows(e->run, c, turn->question, turn->n_question, logits);
    out->n = 0;
    if (st == OK)
        out->tokens[out->n++] =
            measure_argmax(logits + (size_t)(turn->n_question - 1) * vocab, vocab);
    if (st == OK && guess != NULL && guess->tokens[0] == out->tokens[0]) {
        st = eval_run_rows(e->run, c, guess->tokens, want - 1, logits);
        while (st == OK && out->n < want) {
            uint32_t next = measure_argmax(logits + (size_t)agreed++ * vocab, vocab);
            out->tokens[out->n++] = next;
            if (out->n < want && next != guess->tokens[out->n - 1])
                break;
        }
        if (st == OK)
            eval_run_rewind(e->run, t->n_context + turn->n_question + agreed);
    }
    while (st == OK && out->n < want) {
        st = eval_run_rows(e->run, c, &out->tokens[out->n - 1], 1, logits);
        uint32_t next = measure_argmax(logits, vocab);
        out->tokens[out->n++] = next;
    }
    mem_free(logits);
    return st;
}

/* Which references are in the generated text, case-insensitively: a bit each. */
static uint32_t find_refs(const struct eval *e, const struct task_turn *turn, const struct draft *d)
{
    char text[MAX_GENERATE * 16];
    size_t n = 0;
    uint32_t found = 0;
    for (uint32_t i = 0; i < d->n; i++) {
        struct text_view v = tokenizer_bytes(eval_run_tokenizer(e->run), d->tokens[i]);
        for (size_t k = 0; k < v.len && n + 1 < sizeof text; k++)
            text[n++] = v.p[k] ? v.p[k] : ' ';
    }
    text[n] = '\0';
    for (uint32_t i = 0; i < turn->n_refs; i++)
        if (strcasestr(text, turn->refs[i]) != NULL)
            found |= 1u << i;
    return found;
}

static uint32_t bits(uint32_t x)
{
    return (uint32_t)__builtin_popcount(x);
}

/* One turn of a teacher-forced script. */
static void score_turn(const struct script *s, uint32_t turn, bool exact, const float *dense,
                       const float *logits, uint32_t vocab, struct eval_outcome *o)
{
    bool right = true, right_dense = true;
    for (uint32_t i = s->answer[turn]; i < s->end[turn]; i++) {
        size_t row = (size_t)(i - 1) * vocab; /* the row before predicts it */
        struct measure_token t = measure_token(dense + row, logits + row, vocab, s->tokens[i]);
        o->kl += t.kl;
        o->logprob -= t.nll;
        o->logprob_dense -= t.nll_dense;
        o->n_answer++;
        right = right && t.right;
        right_dense = right_dense && t.right_dense;
    }
    if (!exact)
        return;
    o->asked++;
    o->right += right;
    o->right_dense += right_dense;
    o->kept += right && right_dense;
}

static status generated(struct eval *e, const struct task *t, struct eval_outcome *outcomes)
{
    static struct draft dense, sparse;
    const struct task_turn *turn = &t->turns[0];
    CHECK(t->n_turns == 1 && turn->generate <= MAX_GENERATE);
    TRY(generate(e, NULL, t, turn, NULL, &dense));
    uint32_t found_dense = find_refs(e, turn, &dense);
    for (uint32_t i = 0; i < e->n_settings; i++) {
        TRY(generate(e, &e->settings[i].choice, t, turn, &dense, &sparse));
        uint32_t found = find_refs(e, turn, &sparse);
        outcomes[i].asked += turn->n_refs;
        outcomes[i].right_dense += bits(found_dense);
        outcomes[i].right += bits(found);
        outcomes[i].kept += bits(found & found_dense);
    }
    return OK;
}

status eval_task(struct eval *e, const struct task *t, struct eval_outcome *outcomes)
{
    struct script s = script_make(t);
    uint32_t vocab = eval_run_info(e->run)->shape.vocab;
    size_t n = (size_t)s.n * vocab;
    float *dense = mem_alloc(n * sizeof *dense), *logits = mem_alloc(n * sizeof *logits);
    bool exact = t->turns[0].score == TASKS_EXACT;
    status st = eval_run_prefill(e->run, t->context, t->n_context);
    if (st == OK)
        st = eval_run_rows(e->run, NULL, s.tokens, s.n - 1, dense);
    for (uint32_t i = 0; i < e->n_settings && st == OK; i++) {
        eval_run_rewind(e->run, t->n_context);
        st = eval_run_rows(e->run, &e->settings[i].choice, s.tokens, s.n - 1, logits);
        for (uint32_t k = 0; k < t->n_turns && st == OK; k++)
            score_turn(&s, k, exact, dense, logits, vocab, &outcomes[i]);
    }
    if (st == OK && !exact)
        st = generated(e, t, outcomes);
    mem_free(s.tokens);
    mem_free(dense);
    mem_free(logits);
    return st;
}

void eval_outcome_row(cJSON *row, const struct eval_outcome *o)
{
    uint32_t n = o->n_answer ? o->n_answer : 1;
    cJSON_AddNumberToObject(row, "asked", o->asked);
    cJSON_AddNumberToObject(row, "dense_right", o->right_dense);
    cJSON_AddNumberToObject(row, "right", o->right);
    cJSON_AddNumberToObject(row, "kept", o->kept);
    if (o->right_dense > 0)
        cJSON_AddNumberToObject(row, "kept_share", (double)o->kept / o->right_dense);
    cJSON_AddNumberToObject(row, "kl", o->kl / n);
    cJSON_AddNumberToObject(row, "logprob", o->logprob / n);
    cJSON_AddNumberToObject(row, "logprob_dense", o->logprob_dense / n);
}

/* ---- many tasks ---- */

/* Deepest first: what stands in front of a needle is then prefilled already. */
static int deepest_first(const void *a, const void *b)
{
    uint32_t x = ((const struct task *)a)->shared, y = ((const struct task *)b)->shared;
    return (x < y) - (x > y);
}

static status make_samples(struct eval *e, const char *name, uint32_t context, uint32_t n,
                           bool depths, struct task *tasks)
{
    size_t skip = 0;
    for (uint32_t i = 0; i < e->offset && i < e->n_text_tokens; i++)
        skip += tokenizer_bytes(eval_run_tokenizer(e->run), e->text_tokens[i]).len;
    for (uint32_t i = 0; i < n; i++) {
        const struct task_source src = {.tokenizer = eval_run_tokenizer(e->run),
                                        .scratch = e->scratch,
                                        .text = e->text + skip,
                                        .text_len = e->text_len - skip,
                                        .context = context,
                                        .seed = e->seed + i,
                                        .depth = depths ? (i + 0.5) / n : -1};
        TRY(task_make(&tasks[i], name, &src));
    }
    qsort(tasks, n, sizeof *tasks, deepest_first);
    return OK;
}

/* Runs n samples of a task; a row for each setting. */
static status run_samples(struct eval *e, const char *name, uint32_t context, uint32_t n,
                          bool depths, cJSON *rows)
{
    struct task *tasks = mem_alloc(n * sizeof *tasks);
    struct eval_outcome *o = mem_alloc(e->n_settings * sizeof *o);
    status st = make_samples(e, name, context, n, depths, tasks);
    for (uint32_t i = 0; i < n && st == OK; i++) {
        st = eval_task(e, &tasks[i], o);
        if (st == OK)
            eval_progress(
                e, "%s of %u tokens, depth %.2f: dense %u of %u right so far, %s %g keeps %u", name,
                tasks[i].n_context, tasks[i].depth, o[0].right_dense, o[0].asked,
                e->settings[0].label, e->settings[0].budget, o[0].kept);
    }
    for (uint32_t i = 0; i < e->n_settings && st == OK; i++) {
        cJSON *row = cJSON_CreateObject();
        cJSON_AddItemToArray(rows, row);
        cJSON_AddStringToObject(row, "task", name);
        if ((st = eval_setting_row(e, row, &e->settings[i], context)) == OK)
            eval_outcome_row(row, &o[i]);
    }
    for (uint32_t i = 0; i < n; i++)
        task_fini(&tasks[i]);
    mem_free(tasks);
    mem_free(o);
    return st;
}

static const struct sheet_column columns[] = {
    {"task", "task", SHEET_TEXT, 0},
    {"context", "context", SHEET_COUNT, 0},
    {"plugin", "plug-in", SHEET_TEXT, 0},
    {"block_size", "block", SHEET_COUNT, 0},
    {"budget", "budget", SHEET_FIXED, 3},
    {"asked", "asked", SHEET_COUNT, 0},
    {"dense_right", "dense right", SHEET_COUNT, 0},
    {"right", "right", SHEET_COUNT, 0},
    {"kept", "kept", SHEET_COUNT, 0},
    {"kept_share", "kept of dense's", SHEET_PERCENT, 1},
    {"kl", "KL of answer", SHEET_FIXED, 4},
    {"logprob", "log p", SHEET_FIXED, 3},
    {"logprob_dense", "dense", SHEET_FIXED, 3},
};

enum { QUESTION_ROOM = 512 };

/* Opens for contexts of at most `context` tokens. */
static status prepare(struct eval *e, uint32_t context)
{
    TRY(eval_open(e, context + QUESTION_ROOM));
    TRY(eval_read_text(e, context + QUESTION_ROOM));
    return eval_make_settings(e);
}

status eval_passkey_rows(struct eval *e, cJSON *rows)
{
    return run_samples(e, "passkey", e->context, e->depths, true, rows);
}

static void plot_kept(const struct eval *e, const cJSON *rows, struct plot *p)
{
    const cJSON *row;
    (void)e;
    cJSON_ArrayForEach(row, rows)
        plot_point(plot_series(p, cJSON_GetObjectItem(row, "plugin")->valuestring),
                   100 * sheet_number(row, "budget"), 100 * sheet_number(row, "kept_share"));
}

static status finish(struct eval *e, const char *title)
{
    static struct plot p = {.x_label = "budget, % of the context",
                            .y_label = "kept of what dense gets right, %",
                            .log_x = true};
    cJSON *rows = cJSON_GetObjectItem(e->sheet, "rows");
    sheet_print(stdout, rows, columns, ARRAY_LEN(columns));
    for (const cJSON *v = cJSON_GetArraySize(rows) == 1 ? cJSON_GetArrayItem(rows, 0)->child : NULL;
         v; v = v->next)
        if (!cJSON_HasObjectItem(e->sheet, v->string))
            cJSON_AddItemToObject(e->sheet, v->string, cJSON_Duplicate(v, 1));
    p.title = title;
    p.n_series = 0;
    plot_kept(e, rows, &p);
    return plot_save(&p, e->svg);
}

static status run_passkey(struct eval *e)
{
    TRY(prepare(e, e->context));
    eval_expect(e, e->depths);
    TRY(eval_passkey_rows(e, cJSON_GetObjectItem(e->sheet, "rows")));
    return finish(e, "Pass keys kept");
}

static void preset_passkey(struct eval *e)
{
    e->context = 7200;
}

status eval_turns_rows(struct eval *e, cJSON *rows)
{
    return run_samples(e, "turns", e->context, e->samples, false, rows);
}

static status run_turns(struct eval *e)
{
    TRY(prepare(e, e->context));
    eval_expect(e, e->samples);
    TRY(eval_turns_rows(e, cJSON_GetObjectItem(e->sheet, "rows")));
    return finish(e, "Answers kept over five turns");
}

static void list_defaults(struct eval *e)
{
    static const char *const lengths[] = {"2048", "4096", "7200"};
    if (e->lengths.n == 0)
        for (size_t i = 0; i < ARRAY_LEN(lengths); i++)
            e->lengths.v[e->lengths.n++] = lengths[i];
    if (e->tasks.n == 0)
        for (uint32_t i = 0; i < tasks_count(); i++)
            e->tasks.v[e->tasks.n++] = tasks_name(i);
}

status eval_ruler_rows(struct eval *e, cJSON *rows)
{
    double length;
    for (uint32_t i = 0; i < e->lengths.n; i++) {
        eval_list_number(e->lengths.v[i], &length);
        for (uint32_t k = 0; k < e->tasks.n; k++)
            TRY(run_samples(e, e->tasks.v[k], (uint32_t)length, e->samples, false, rows));
    }
    return OK;
}

static status run_ruler(struct eval *e)
{
    double length, longest = 0;
    list_defaults(e);
    for (uint32_t i = 0; i < e->lengths.n; i++) {
        if (!(eval_list_number(e->lengths.v[i], &length) >= 512 && length <= 1 << 20))
            return err(ERR_ARG, "--length %s: wanted are tokens, 512 to 1048576", e->lengths.v[i]);
        longest = length > longest ? length : longest;
    }
    TRY(prepare(e, (uint32_t)longest));
    eval_expect(e, e->lengths.n * e->tasks.n * e->samples);
    TRY(eval_ruler_rows(e, cJSON_GetObjectItem(e->sheet, "rows")));
    return finish(e, "Answers kept");
}

const struct eval_command eval_passkey = {
    "passkey", "pass keys at many depths: what dense gets right and sparse keeps", preset_passkey,
    run_passkey};
const struct eval_command eval_ruler = {"ruler", "RULER's tasks in completion form, by length",
                                        preset_passkey, run_ruler};
const struct eval_command eval_turns = {
    "turns", "one context, five questions in a row, answers kept", preset_passkey, run_turns};
