/* Tokens that are found in the text itself, before it is cut into pieces: control tokens (where the
 * text is trusted) and user-defined ones (anywhere). */
#ifndef ENGINE_TEXT_SPECIAL_H
#define ENGINE_TEXT_SPECIAL_H

#include "engine/text/tokens.h"

struct special {
    struct text_view text; /* in the vocabulary's blob */
    uint32_t id;
    bool control;
};

/* Sorted by bytes, so that all tokens with a common beginning are neighbours and the shortest of
 * them is first. Constant after special_init. */
struct special_set {
    struct special *all;
    uint32_t n;
    bool starts[2][256]; /* [is the text trusted?][byte]: may a token begin so? */
};

/* A stretch of text in which control tokens count; of several, ascending and apart. */
struct special_span {
    size_t from, to;
};

struct special_match {
    size_t at, len; /* at = len of the text: none */
    uint32_t id;
};

status special_init(struct special_set *set, const struct tokens *v);
void special_fini(struct special_set *set);
/* The exact token, or TOKEN_NONE. */
uint32_t special_find(const struct special_set *set, struct text_view text);
/* The next match at or after `from`: leftmost, there the longest. A control token counts only when
 * it lies in one span altogether. */
struct special_match special_next(const struct special_set *set, struct text_view text, size_t from,
                                  const struct special_span *spans, size_t n_spans);

#endif
