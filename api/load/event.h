/* One event of an answer's stream: the JSON behind `data:`, as any OpenAI server writes it. Read in one
 * pass without a tree, since a client that measures must not be what is measured: at 100,000 tokens a
 * second an event may take 10 us in all. Values borrow the text. */
#ifndef API_LOAD_EVENT_H
#define API_LOAD_EVENT_H

#include "kernels/base.h"

struct event_text {
    const char *p; /* as in the JSON, between the quotes: escapes are still escapes */
    size_t len;
};

struct event {
    bool has_choice;                /* "choices" has a first one; others are not looked at */
    bool finished;                  /* its finish_reason is a string */
    struct event_text text, reason; /* text, or delta's content (or reasoning_content) */
    const char *ids;                /* its token_ids: behind the bracket; NULL: none */
    uint32_t n_ids;
    bool has_usage;
    uint32_t prompt_tokens, completion_tokens, cached_tokens; /* of usage */
    bool is_error;
    struct event_text error; /* its message, or the whole value */
};

/* false: no JSON object. p[len] need not be 0. */
bool event_read(struct event *e, const char *p, size_t len);
void event_ids(const struct event *e, uint32_t *out); /* [n_ids] */

#endif
