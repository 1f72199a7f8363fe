/* What the files of tasks share: text that grows, tokens that grow, random words and values, and the
 * placing of needles in a haystack. Used by tasks.c and tasks_list.c alone. */
#ifndef ENGINE_TOOL_TASKS_BUILD_H
#define ENGINE_TOOL_TASKS_BUILD_H

#include "engine/tool/tasks.h"

struct text_buf {
    char *p;
    size_t n, room;
};
void text_put(struct text_buf *b, const char *fmt, ...) PRINTF_LIKE(2, 3);
void text_free(struct text_buf *b);

/* Random things of one task; everything comes from one seed. */
struct maker {
    const struct task_source *src;
    struct task *t;
    uint64_t random;
    uint32_t *words, n_words; /* token ids of " word", 4 to 9 lower-case letters */
};

uint32_t make_random(struct maker *m, uint32_t n);       /* 0..n-1 */
void make_word(struct maker *m, char *out, size_t room); /* a word of the vocabulary */
void make_key(struct maker *m, char *out, size_t room);  /* word-word */
void make_number(struct maker *m, uint32_t digits, char *out, size_t room);
void make_uuid(struct maker *m, char *out, size_t room);
void make_upper(struct maker *m, uint32_t letters, char *out, size_t room);
void make_shuffle(struct maker *m, uint32_t *v, uint32_t n);
uint32_t make_count_tokens(struct maker *m, const char *text, size_t len);

/* A sentence or line to hide: with what stands before it (" " or "\n"). */
struct needle {
    const char *text;
    double at; /* 0..1 of the haystack; rounded down to the end of a sentence or line */
};

/* context := head, then the haystack with the needles in order of `at`, src->context tokens in all.
 * ERR_ARG: the haystack is too short. lines: needles go between lines, else between sentences. */
status make_context(struct maker *m, const char *head, const char *hay, size_t hay_len, bool lines,
                    struct needle *needles, uint32_t n);
/* context := this text, which may be shorter than asked for. ERR_ARG: it is longer. */
status make_whole(struct maker *m, const struct text_buf *text);
/* Another turn. answer: with its leading space. */
struct task_turn *make_turn(struct maker *m, const char *question, const char *answer);
void make_ref(struct task_turn *t, const char *ref); /* turns it into TASKS_ALL */

/* tasks_list.c: tasks whose context is a list of its own. */
status make_cwe(struct maker *m);
status make_fwe(struct maker *m);
status make_qa(struct maker *m, bool two_hops);
status make_kv(struct maker *m);

#endif
