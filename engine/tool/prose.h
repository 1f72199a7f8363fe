/* English prose without a download: a grammar of sentence frames and word lists, with people, a place
 * and a topic that stay the same for a paragraph (reference/algorithms.md D.2). No digits, so that it
 * never collides with the numbers hidden in it; a seed gives the same text everywhere. It says
 * nothing, but a language model reads it as text: names come back, and attention looks for them. */
#ifndef ENGINE_TOOL_PROSE_H
#define ENGINE_TOOL_PROSE_H

#include "kernels/base.h"

enum { PROSE_PEOPLE = 3, PROSE_MAX_SENTENCE = 512 };

struct prose {
    uint64_t random;
    uint32_t topic, place, people[PROSE_PEOPLE], left; /* sentences left in the paragraph */
};

void prose_init(struct prose *p, uint64_t seed);
/* The next sentence with what stands before it (nothing, " " or an empty line): bytes written to
 * out[PROSE_MAX_SENTENCE], NUL-terminated. */
size_t prose_sentence(struct prose *p, char *out);
/* Whole sentences, at least `bytes` of them. The caller frees with mem_free. */
char *prose_text(uint64_t seed, size_t bytes, size_t *len);

#endif
