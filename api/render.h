/* The JSON of generations: whole answers and stream events of both endpoints (reference/api.md 2.6,
 * 2.9, 2.10).
 *
 * What is the same in every event of an answer is written once, by render_init; per event only the
 * index, the escaped text and the reason are new. Whole answers and events share the code of their
 * parts, so joined chunks equal the whole by construction.
 *
 * Everything is appended to the caller's writer. Loop thread only. */
#ifndef API_RENDER_H
#define API_RENDER_H

#include "api/text_out.h"
#include "api/writer.h"

struct render {
    const struct request *r;
    const struct tokenizer *tok;
    const char *fingerprint; /* borrowed */
    bool usage, usage_each;  /* streams: a usage chunk at the end, and running usage before it */
    char id[48];
    uint64_t created;
    struct writer head; /* "data: {...,"choices":[{"index":" of every event */
    size_t json_at;     /* the head's JSON begins here, after "data: " */
    struct writer key;  /* scratch: texts of tokens */
};

enum finish_kind { FINISH_NONE, FINISH_STOP, FINISH_LENGTH };

/* Why a choice ended. stop_text.p: the stop string; else stop_id, unless it is TOKEN_NONE. */
struct finish {
    enum finish_kind kind;
    struct text_view stop_text;
    uint32_t stop_id;
};

/* cached: prompt tokens that the prefix cache had; 0: not told to the client. plugin, budget: the sparse
 * attention that tokens were decoded with, as asked; NULL: all of them attended everything, and nothing
 * is told. light_misses: pages estimated for being absent (--miss-threshold); told when there are any. */
struct usage {
    uint64_t prompt, completion, cached, light_misses;
    const char *plugin;
    float budget;
};

/* What one event or one element of "choices" shows. */
struct render_choice {
    uint32_t index;
    struct text_part part;
    struct finish finish;
    const struct request_prompt *prompt; /* its ids are shown if asked; NULL: not here */
    const struct text_tokens *scores;    /* prompt_logprobs; NULL: not asked */
};

/* Bytes of a token; none for an id beyond the vocabulary (logits may be wider). */
static inline struct text_view render_token_bytes(const struct tokenizer *tok, uint32_t id)
{
    return id < tokenizer_vocab(tok) ? tokenizer_bytes(tok, id) : (struct text_view){"", 0};
}

/* suffix: random hexadecimal digits of the answer's id. */
void render_init(struct render *v, const struct request *r, const struct tokenizer *tok,
                 const char *suffix, uint64_t created, const char *fingerprint);
void render_fini(struct render *v);

/* Chat: the first event of a choice. */
void render_role(struct render *v, struct writer *w, const struct render_choice *c,
                 const struct usage *u);
/* Text, or its end, or both. */
void render_chunk(struct render *v, struct writer *w, const struct render_choice *c,
                  const struct usage *u);
/* The usage event, if asked, and [DONE]. */
void render_last(struct render *v, struct writer *w, const struct usage *u);
void render_error_event(struct writer *w, const struct api_error *e);

/* How far a choice, or the end, of a whole answer is written; zero: not begun. */
struct render_at {
    size_t key, item;
};

/* A whole answer: begin, then each choice in order of index, then the end. These two go on at *at
 * until the writer holds `most` bytes, or one item more; true: all of it is written. False too if
 * the writer failed. */
void render_answer_begin(struct render *v, struct writer *w);
bool render_answer_choice(struct render *v, struct writer *w, const struct render_choice *c,
                          struct render_at *at, size_t most);
/* first: the first choice, for what chat shows once per answer. */
bool render_answer_end(struct render *v, struct writer *w, const struct render_choice *first,
                       const struct usage *u, struct render_at *at, size_t most);

#endif
