/* Long-context tasks made from nothing, in completion form (reference/algorithms.md D.3,
 * reference/selection.md 5): a context with facts hidden in it, then one or more turns. A turn is a
 * question that a plain language model would complete with the answer ("... The pass key is"), so a
 * model of 135M parameters can do it without knowing how to chat.
 *
 * The context is prefilled; questions and answers go through the sparse path. A task whose head is
 * `shared` positions long equals the same base (haystack, seed) up to there: a prefill of that can be
 * used again.
 *
 *   passkey          one pass key in prose, at a depth
 *   niah_single_1..3 noise and a number, prose and a number, prose and a UUID
 *   niah_multikey_1..3  four keys in prose; lines of needles; lines of needles with UUIDs
 *   niah_multivalue  one key with four values; all are asked for
 *   niah_multiquery  four keys, asked one after the other, answers kept
 *   vt               a chain of variable assignments in noise; all names are asked for
 *   cwe, fwe         the ten most common words of a list; the three of a coded text
 *   qa_syn_1, qa_syn_2  invented documents: one fact; two hops
 *   kv               a JSON object of UUIDs; one key is asked for
 *   turns            five pass keys of different colours in prose, asked one after the other, answers kept
 */
#ifndef ENGINE_TOOL_TASKS_H
#define ENGINE_TOOL_TASKS_H

#include "engine/text/tokenizer.h"

enum { TASKS_MAX_TURNS = 8, TASKS_MAX_REFS = 10, TASKS_REF_BYTES = 64 };

enum tasks_score {
    TASKS_EXACT, /* right if greedy decoding gives the answer, token by token */
    TASKS_ALL,   /* share of the references found in `generate` greedy tokens */
};

struct task_turn {
    uint32_t *question, n_question; /* tokens */
    uint32_t *answer, n_answer;     /* the canonical answer, for its log-probability */
    enum tasks_score score;
    uint32_t generate; /* TASKS_ALL: greedy tokens to look through */
    char refs[TASKS_MAX_REFS][TASKS_REF_BYTES];
    uint32_t n_refs;
};

struct task {
    uint32_t *context, n_context; /* tokens */
    uint32_t shared;              /* leading tokens that equal the haystack's */
    struct task_turn turns[TASKS_MAX_TURNS];
    uint32_t n_turns;
    double depth; /* where the (first) asked fact is, 0..1 of the context */
};

/* What tasks are made from. */
struct task_source {
    const struct tokenizer *tokenizer;
    struct token_scratch *scratch;
    const char *text; /* haystack for the tasks in prose: any text without what they hide */
    size_t text_len;
    uint32_t context; /* tokens, exactly, of the context with needles */
    uint64_t seed;    /* of keys and values */
    double depth;     /* passkey, niah_single, kv: 0..1; < 0: from the seed */
};

uint32_t tasks_count(void);
const char *tasks_name(uint32_t i);
/* ERR_ARG: unknown name (the text lists them), or the text is too short for that context. */
status task_make(struct task *t, const char *name, const struct task_source *src);
void task_fini(struct task *t);

#endif
