/* Tasks whose context is a list or a set of documents: nothing is hidden in a haystack, everything
 * matters a little (cwe, fwe), or every item looks like the one that is asked for (qa_syn, kv). */
#include "engine/tool/tasks_build.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { COMMON = 10, WORD = 16, MAX_ITEMS = 20000, SHORT_CONTEXT = 4096 };

/* A list that fits the context when it has n items, as many as possible: by bisection. */
typedef void list_writer(struct maker *m, uint32_t n, struct text_buf *out);

static uint32_t fit(struct maker *m, list_writer *write, uint32_t least, uint32_t most)
{
    uint64_t random = m->random;
    while (least < most) {
        struct text_buf text = {0};
        uint32_t mid = (least + most + 1) / 2;
        m->random = random; /* the same list as will be written in the end */
        write(m, mid, &text);
        if (make_count_tokens(m, text.p, text.n) <= m->src->context)
            least = mid;
        else
            most = mid - 1;
        text_free(&text);
    }
    m->random = random;
    return least;
}

/* ---- most common words of a list ---- */

/* How often a common word and how often any other is in the list; RULER's, less in short ones. */
static uint32_t common_times(const struct maker *m)
{
    return m->src->context < SHORT_CONTEXT ? 6 : 30;
}

static uint32_t rare_times(const struct maker *m)
{
    return m->src->context < SHORT_CONTEXT ? 1 : 3;
}

static void write_cwe(struct maker *m, uint32_t n_rare, struct text_buf *out)
{
    uint32_t common = common_times(m), rare = rare_times(m), at = 0;
    uint32_t n = COMMON + n_rare, total = COMMON * common + n_rare * rare;
    uint32_t *order = mem_alloc(total * sizeof *order);
    char(*word)[WORD] = mem_alloc(n * sizeof *word);
    for (uint32_t i = 0; i < n; i++) {
        make_word(m, word[i], WORD);
        for (uint32_t k = 0; k < (i < COMMON ? common : rare); k++)
            order[at++] = i;
    }
    make_shuffle(m, order, total);
    text_put(out, "Below is a numbered list of words. In these words, some appear more often than "
                  "others. Memorize the ones that appear most often.\n");
    for (uint32_t i = 0; i < total; i++)
        text_put(out, "%u. %s ", i + 1, word[order[i]]);
    mem_free(order);
    mem_free(word);
}

status make_cwe(struct maker *m)
{
    char answer[COMMON * WORD + 8] = "", word[WORD];
    struct text_buf text = {0};
    uint64_t random = m->random;
    uint32_t n = fit(m, write_cwe, 1, MAX_ITEMS / rare_times(m));
    write_cwe(m, n, &text);
    status st = make_whole(m, &text);
    text_free(&text);
    TRY(st);
    struct task_turn *t = NULL;
    m->random = random; /* the common words are drawn first */
    for (int pass = 0; pass < 2; pass++) {
        for (uint32_t i = 0; i < COMMON; i++) {
            make_word(m, word, sizeof word);
            size_t at = strlen(answer);
            if (pass == 0)
                snprintf(answer + at, sizeof answer - at, " %u. %s", i + 1, word);
            else
                make_ref(t, word);
        }
        m->random = random;
        if (pass == 0)
            t = make_turn(
                m,
                "\nQuestion: What are the 10 most common words in the above list?\nAnswer: "
                "The top 10 words that appear most often in the list are:",
                answer);
    }
    CHECK(t != NULL); /* the first pass made it */
    t->generate = 60;
    return OK;
}

/* ---- most frequent words of a coded text ---- */

enum { CODED = 6, FWE_ANSWERS = 3 };

static void write_fwe(struct maker *m, uint32_t n, struct text_buf *out)
{
    const double zeta = 1.6449340668482264; /* of 2 */
    uint32_t vocabulary = n / 50 + FWE_ANSWERS + 1, total = 0;
    char(*word)[CODED + 1] = mem_alloc(vocabulary * sizeof *word);
    uint32_t *order = mem_alloc((n + vocabulary) * sizeof *order);
    for (uint32_t k = 0; k < vocabulary; k++) {
        for (int i = 0; i < CODED; i++)
            word[k][i] = (char)('a' + make_random(m, 26));
        uint32_t times = (uint32_t)(n / ((k + 1.0) * (k + 1.0) * zeta));
        for (uint32_t i = 0; i < (times ? times : 1) && total < n + vocabulary; i++)
            order[total++] = k;
    }
    make_shuffle(m, order, total);
    text_put(out, "Read the following coded text and track the frequency of each coded word. Find "
                  "the three most frequently appeared coded words.");
    for (uint32_t i = 0; i < total; i++)
        text_put(out, " %s", order[i] == 0 ? "..." : word[order[i]]);
    mem_free(word);
    mem_free(order);
}

status make_fwe(struct maker *m)
{
    char answer[64] = "", word[FWE_ANSWERS + 1][CODED + 1] = {{0}};
    struct text_buf text = {0};
    uint64_t random = m->random;
    uint32_t n = fit(m, write_fwe, 50, MAX_ITEMS);
    write_fwe(m, n, &text);
    status st = make_whole(m, &text);
    text_free(&text);
    TRY(st);
    m->random = random;
    for (uint32_t k = 0; k <= FWE_ANSWERS; k++)
        for (int i = 0; i < CODED; i++)
            word[k][i] = (char)('a' + make_random(m, 26));
    snprintf(answer, sizeof answer, " %s, %s, %s", word[1], word[2], word[3]);
    struct task_turn *t = make_turn(m,
                                    "\nQuestion: Do not provide any explanation. Please ignore the "
                                    "dots '....'. What are the three "
                                    "most frequently appeared words in the above coded "
                                    "text?\nAnswer: According to the coded text "
                                    "above, the three most frequently appeared words are:",
                                    answer);
    t->generate = 32;
    for (uint32_t k = 1; k <= FWE_ANSWERS; k++)
        make_ref(t, word[k]);
    return OK;
}

/* ---- documents about invented entities ---- */

static const char *const first[] = {"Adele", "Boris",  "Celia", "Darius", "Edith", "Fabian",
                                    "Greta", "Hector", "Irene", "Jasper", "Karin", "Lucas",
                                    "Mona",  "Nestor", "Odile", "Pavel"};
static const char *const last[] = {"Almond", "Barlow",   "Crane",  "Dexter", "Ellery", "Foster",
                                   "Garner", "Holloway", "Irwin",  "Jarvis", "Keller", "Lambert",
                                   "Mercer", "Norwood",  "Osborn", "Pruitt"};
static const char *const city[] = {"Lisbon", "Vienna", "Dublin", "Prague", "Oslo",  "Madrid",
                                   "Warsaw", "Athens", "Turin",  "Geneva", "Kyoto", "Lima"};
static const char *const trade[] = {"Museum", "Foundry", "Orchestra",   "Academy",
                                    "Bank",   "Brewery", "Observatory", "Theatre"};

/* Document i of a task: names follow from i, so that each is there once; who and where are drawn. */
struct document {
    char entity[48], founder[32], town[16], birth[16];
};

static void draw_document(struct maker *m, uint32_t i, struct document *d)
{
    char word[WORD];
    make_word(m, word, sizeof word);
    word[0] = (char)(word[0] - 'a' + 'A');
    snprintf(d->entity, sizeof d->entity, "%s %s", word, trade[i % ARRAY_LEN(trade)]);
    snprintf(d->founder, sizeof d->founder, "%s %s", first[i % ARRAY_LEN(first)],
             last[i / ARRAY_LEN(first) % ARRAY_LEN(last)]);
    snprintf(d->town, sizeof d->town, "%s", city[make_random(m, ARRAY_LEN(city))]);
    snprintf(d->birth, sizeof d->birth, "%s", city[make_random(m, ARRAY_LEN(city))]);
}

static void write_qa(struct maker *m, uint32_t n, struct text_buf *out)
{
    struct document d;
    char year[8];
    uint32_t *order = mem_alloc(n * sizeof *order);
    struct document *all = mem_alloc(n * sizeof *all);
    for (uint32_t i = 0; i < n; i++) {
        draw_document(m, i, &all[i]);
        order[i] = i;
    }
    text_put(out, "The following are given documents.\n");
    /* Two kinds, each in an order of its own: the founding, and the founder's life. */
    for (int kind = 0; kind < 2; kind++) {
        make_shuffle(m, order, n);
        for (uint32_t i = 0; i < n; i++) {
            d = all[order[i]];
            make_number(m, 2, year, sizeof year);
            if (kind == 0)
                text_put(
                    out,
                    "\nDocument %u:\nThe %s was founded in 18%s by %s in %s. It has %u rooms and "
                    "is open to visitors.\n",
                    i + 1, d.entity, year, d.founder, d.town, 10 + make_random(m, 90));
            else
                text_put(out,
                         "\nDocument %u:\n%s was born in %s and studied there for %u years before "
                         "moving away.\n",
                         n + i + 1, d.founder, d.birth, 2 + make_random(m, 8));
        }
    }
    mem_free(order);
    mem_free(all);
}

status make_qa(struct maker *m, bool two_hops)
{
    struct text_buf text = {0};
    struct document d = {0};
    char question[192], answer[48];
    uint64_t random = m->random;
    uint32_t n = fit(m, write_qa, 1, ARRAY_LEN(first) * ARRAY_LEN(last));
    write_qa(m, n, &text);
    status st = make_whole(m, &text);
    text_free(&text);
    TRY(st);
    uint32_t asked = make_random(m, n);
    m->random = random;
    for (uint32_t i = 0; i <= asked; i++)
        draw_document(m, i, &d);
    if (two_hops)
        snprintf(question, sizeof question,
                 "\nAccording to the documents, the founder of the %s was born in", d.entity);
    else
        snprintf(question, sizeof question, "\nAccording to the documents, the %s was founded by",
                 d.entity);
    snprintf(answer, sizeof answer, " %s", two_hops ? d.birth : d.founder);
    make_turn(m, question, answer);
    return OK;
}

/* ---- a JSON object ---- */

static void write_kv(struct maker *m, uint32_t n, struct text_buf *out)
{
    char key[40], value[40];
    text_put(out, "JSON data:\n{");
    for (uint32_t i = 0; i < n; i++) {
        make_uuid(m, key, sizeof key);
        make_uuid(m, value, sizeof value);
        text_put(out, "%s\"%s\": \"%s\"", i ? ",\n" : "", key, value);
    }
    text_put(out, "}\n");
}

status make_kv(struct maker *m)
{
    struct text_buf text = {0};
    char key[40] = "", value[40] = "", question[64], answer[48];
    uint64_t random = m->random;
    uint32_t n = fit(m, write_kv, 1, MAX_ITEMS);
    write_kv(m, n, &text);
    status st = make_whole(m, &text);
    text_free(&text);
    TRY(st);
    uint32_t asked = m->src->depth >= 0 ? (uint32_t)(m->src->depth * (n - 1)) : make_random(m, n);
    m->t->depth = (double)asked / n;
    m->random = random;
    for (uint32_t i = 0; i <= asked; i++) {
        make_uuid(m, key, sizeof key);
        make_uuid(m, value, sizeof value);
    }
    snprintf(question, sizeof question, "\nThe value of \"%s\" is \"", key);
    snprintf(answer, sizeof answer, "%s\"", value);
    make_turn(m, question, answer);
    return OK;
}
