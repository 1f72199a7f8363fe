#include "engine/tool/tasks.h"

#include "engine/tool/tasks_build.h"

#include <stdio.h>
#include <string.h>

static const char NOISE[] =
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There "
    "and back again.\n";

enum { NIAH_KEYS = 4, PROSE_PLACES = 40, CHAIN = 5, COLOURS = 5, NEEDLE = 160 };

static double depth_of(struct maker *m)
{
    /* Not at the very end: what stands there is recent for every method. */
    return m->src->depth >= 0 ? m->src->depth : make_random(m, 1000) / 1000.0 * 0.9;
}

/* ---- passkey and its colours ---- */

static status passkey(struct maker *m)
{
    char key[8], needle[NEEDLE], answer[16];
    make_number(m, 5, key, sizeof key);
    snprintf(needle, sizeof needle, " The pass key is %s. Remember it. %s is the pass key.", key,
             key);
    snprintf(answer, sizeof answer, " %s", key);
    struct needle n = {needle, depth_of(m)};
    m->t->depth = n.at;
    TRY(make_context(m, "", m->src->text, m->src->text_len, false, &n, 1));
    make_turn(m, "\n\nThe pass key is", answer);
    return OK;
}

static status turns(struct maker *m)
{
    static const char *const colour[COLOURS] = {"red", "blue", "green", "black", "white"};
    char key[COLOURS][8], text[COLOURS][NEEDLE], question[64], answer[16];
    uint32_t order[COLOURS];
    struct needle n[COLOURS];
    for (uint32_t i = 0; i < COLOURS; i++) {
        make_number(m, 5, key[i], sizeof key[i]);
        snprintf(text[i], NEEDLE, " The %s pass key is %s. Remember it. %s is the %s pass key.",
                 colour[i], key[i], key[i], colour[i]);
        n[i] = (struct needle){text[i], (i + make_random(m, 1000) / 1000.0) / COLOURS * 0.9};
        order[i] = i;
    }
    m->t->depth = n[0].at;
    make_shuffle(m, order, COLOURS);
    TRY(make_context(m, "", m->src->text, m->src->text_len, false, n, COLOURS));
    for (uint32_t i = 0; i < COLOURS; i++) {
        snprintf(question, sizeof question, "%sThe %s pass key is", i == 0 ? "\n\n" : ". ",
                 colour[order[i]]);
        snprintf(answer, sizeof answer, " %s", key[order[i]]);
        make_turn(m, question, answer);
    }
    return OK;
}

/* ---- needles in a haystack ---- */

enum hay { HAY_NOISE, HAY_PROSE, HAY_NEEDLES };

struct niah {
    enum hay hay;
    uint32_t keys, values, queries;
    bool uuid_keys, uuid_values;
};

static void value_of(struct maker *m, bool uuid, char *out, size_t room)
{
    if (uuid)
        make_uuid(m, out, room);
    else
        make_number(m, 7, out, room);
}

static void needle_of(struct maker *m, const struct niah *k, char *text, char *key, char *value)
{
    if (k->uuid_keys)
        make_uuid(m, key, TASKS_REF_BYTES);
    else
        make_key(m, key, TASKS_REF_BYTES);
    value_of(m, k->uuid_values, value, TASKS_REF_BYTES);
    snprintf(text, NEEDLE, "%sOne of the special magic %s for %s is: %s.",
             k->hay == HAY_PROSE ? " " : "\n", k->uuid_values ? "uuids" : "numbers", key, value);
}

/* Lines of noise, or of needles that nobody asks for. At least as long as the context. */
static void haystack(struct maker *m, const struct niah *k, struct text_buf *out)
{
    char text[NEEDLE], key[TASKS_REF_BYTES], value[TASKS_REF_BYTES];
    size_t enough = (size_t)m->src->context * 8;
    while (out->n < enough) {
        if (k->hay == HAY_NOISE) {
            text_put(out, "%s", NOISE);
            continue;
        }
        needle_of(m, k, text, key, value);
        text_put(out, "%s\n", text + 1);
    }
}

static status niah_hide(struct maker *m, const struct niah *k, struct needle *n, uint32_t n_needles)
{
    struct text_buf hay = {0};
    if (k->hay == HAY_PROSE)
        return make_context(m, "", m->src->text, m->src->text_len, false, n, n_needles);
    haystack(m, k, &hay);
    status st = make_context(m, "", hay.p, hay.n, true, n, n_needles);
    text_free(&hay);
    return st;
}

static void niah_ask_values(struct maker *m, const char *key, char value[][TASKS_REF_BYTES])
{
    char question[256], answer[256];
    snprintf(question, sizeof question,
             "\n\nThe special magic numbers for %s mentioned in the provided text are", key);
    snprintf(answer, sizeof answer, " %s, %s, %s, and %s", value[0], value[1], value[2], value[3]);
    struct task_turn *t = make_turn(m, question, answer);
    t->generate = 48;
    for (uint32_t i = 0; i < NIAH_KEYS; i++)
        make_ref(t, value[i]);
}

static status niah(struct maker *m, const struct niah *k)
{
    char text[NIAH_KEYS][NEEDLE], key[NIAH_KEYS][TASKS_REF_BYTES],
        value[NIAH_KEYS][TASKS_REF_BYTES];
    char question[256], answer[TASKS_REF_BYTES + 2];
    struct needle n[NIAH_KEYS];
    uint32_t total = k->keys * k->values, order[NIAH_KEYS];
    const char *what = k->uuid_values ? "uuids" : "numbers";
    CHECK(total <= NIAH_KEYS);
    for (uint32_t i = 0; i < total; i++) {
        needle_of(m, k, text[i], key[i], value[i]);
        if (k->values > 1 && i > 0) { /* the same key again */
            snprintf(key[i], TASKS_REF_BYTES, "%s", key[0]);
            snprintf(text[i], NEEDLE, " One of the special magic %s for %s is: %s.", what, key[0],
                     value[i]);
        }
        n[i] = (struct needle){text[i], make_random(m, PROSE_PLACES) / (double)PROSE_PLACES};
        order[i] = i;
    }
    if (total == 1)
        n[0].at = depth_of(m);
    m->t->depth = n[0].at;
    TRY(niah_hide(m, k, n, total));
    if (k->values > 1) {
        niah_ask_values(m, key[0], value);
        return OK;
    }
    make_shuffle(m, order, total);
    for (uint32_t i = 0; i < k->queries; i++) {
        snprintf(question, sizeof question,
                 "%sOne of the special magic %s for %s is:", i == 0 ? "\n\n" : ".\n", what,
                 key[order[i]]);
        snprintf(answer, sizeof answer, " %s", value[order[i]]);
        make_turn(m, question, answer);
    }
    return OK;
}

/* ---- variable tracking ---- */

static status vt(struct maker *m)
{
    char name[CHAIN][8], value[8], text[CHAIN][NEEDLE], question[256], answer[64] = "";
    struct needle n[CHAIN];
    struct text_buf hay = {0};
    double at[CHAIN];
    make_number(m, 5, value, sizeof value);
    for (uint32_t i = 0; i < CHAIN; i++) {
        make_upper(m, 5, name[i], sizeof name[i]);
        if (i == 0)
            snprintf(text[i], NEEDLE, "\nVAR %s = %s", name[i], value);
        else
            snprintf(text[i], NEEDLE, "\nVAR %s = VAR %s", name[i], name[i - 1]);
        at[i] = (i + make_random(m, 1000) / 1000.0) / CHAIN; /* definitions before uses */
        n[i] = (struct needle){text[i], at[i]};
        size_t used = strlen(answer);
        snprintf(answer + used, sizeof answer - used, "%s%s", i ? ", " : " ", name[i]);
    }
    m->t->depth = at[0];
    haystack(m, &(struct niah){.hay = HAY_NOISE}, &hay);
    status st = make_context(m,
                             "Memorize and track the chain of variable assignment hidden in the "
                             "following text.\n\n",
                             hay.p, hay.n, true, n, CHAIN);
    text_free(&hay);
    TRY(st);
    snprintf(
        question, sizeof question,
        "\nAnswer: According to the chain of variable assignment in the text above, %d variables "
        "are assigned the value %s, they are:",
        (int)CHAIN, value);
    struct task_turn *t = make_turn(m, question, answer);
    t->generate = 30;
    for (uint32_t i = 0; i < CHAIN; i++)
        make_ref(t, name[i]);
    return OK;
}

/* ---- the table ---- */

static status make_niah(struct maker *m, uint32_t which)
{
    static const struct niah kind[] = {
        {HAY_NOISE, 1, 1, 1, false, false},   {HAY_PROSE, 1, 1, 1, false, false},
        {HAY_PROSE, 1, 1, 1, false, true},    {HAY_PROSE, 4, 1, 1, false, false},
        {HAY_NEEDLES, 1, 1, 1, false, false}, {HAY_NEEDLES, 1, 1, 1, true, true},
        {HAY_PROSE, 1, 4, 1, false, false},   {HAY_PROSE, 4, 1, 4, false, false},
    };
    return niah(m, &kind[which]);
}

static const char *const names[] = {"niah_single_1",
                                    "niah_single_2",
                                    "niah_single_3",
                                    "niah_multikey_1",
                                    "niah_multikey_2",
                                    "niah_multikey_3",
                                    "niah_multivalue",
                                    "niah_multiquery",
                                    "vt",
                                    "cwe",
                                    "fwe",
                                    "qa_syn_1",
                                    "qa_syn_2",
                                    "passkey",
                                    "kv",
                                    "turns"};

static status make_named(struct maker *m, uint32_t i)
{
    switch (i) {
    case 8: return vt(m);
    case 9: return make_cwe(m);
    case 10: return make_fwe(m);
    case 11: return make_qa(m, false);
    case 12: return make_qa(m, true);
    case 13: return passkey(m);
    case 14: return make_kv(m);
    case 15: return turns(m);
    default: return make_niah(m, i);
    }
}

uint32_t tasks_count(void)
{
    return ARRAY_LEN(names);
}

const char *tasks_name(uint32_t i)
{
    return names[i];
}

/* Real words without a download: what the tokenizer knows as one token. */
static void collect_words(struct maker *m)
{
    const struct tokenizer *t = m->src->tokenizer;
    m->words = mem_alloc(tokenizer_vocab(t) * sizeof *m->words);
    for (uint32_t id = 0; id < tokenizer_vocab(t); id++) {
        struct text_view v = tokenizer_bytes(t, id);
        bool good = v.len >= 5 && v.len <= 10 && v.p[0] == ' ';
        for (size_t i = 1; good && i < v.len; i++)
            good = v.p[i] >= 'a' && v.p[i] <= 'z';
        if (good)
            m->words[m->n_words++] = id;
    }
}

status task_make(struct task *t, const char *name, const struct task_source *src)
{
    char known[512] = "";
    struct maker m = {.src = src, .t = t, .random = src->seed * 0x9e3779b97f4a7c15u};
    *t = (struct task){0};
    for (uint32_t i = 0; i < ARRAY_LEN(names); i++) {
        size_t at = strlen(known);
        snprintf(known + at, sizeof known - at, "%s%s", i ? ", " : "", names[i]);
        if (strcmp(name, names[i]) != 0)
            continue;
        m.random += i + 1;
        collect_words(&m);
        status st = m.n_words < 1000 ? err(ERR_ARG, "the model's vocabulary has too few words")
                                     : make_named(&m, i);
        mem_free(m.words);
        if (st != OK)
            task_fini(t);
        return st;
    }
    return err(ERR_ARG, "unknown task \"%s\"; there are %s", name, known);
}

void task_fini(struct task *t)
{
    mem_free(t->context);
    for (uint32_t i = 0; i < t->n_turns; i++) {
        mem_free(t->turns[i].question);
        mem_free(t->turns[i].answer);
    }
    *t = (struct task){0};
}
