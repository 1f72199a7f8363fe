/* From the tokens of one choice to the text that may leave: incremental detokenisation, search for
 * stop strings, and the bookkeeping that keeps text, log-probabilities and token ids together.
 *
 * Text goes through three stations in one buffer: bytes of tokens -> whole characters (utf8_stream)
 * -> `ready`, the part that no stop string can take back any more. What is held back is only the
 * longest suffix that is a proper prefix of some stop string. Each stop string has its own KMP
 * automaton: linear time, 2 bytes per character of a stop, and one compare per byte and stop on text
 * that matches nothing (an Aho-Corasick table would be 2 MB for 16 stops of 256 bytes).
 *
 * The unit of matching is a token: of all matches that a token completes, the one that starts
 * earliest wins, and among equal starts the one named first. So the answer does not depend on how
 * events are cut into batches, and it is what searching the full text after every token would give.
 *
 * Owned by the loop thread; nothing here reads a clock, a tokenizer or a connection. */
#ifndef API_TEXT_OUT_H
#define API_TEXT_OUT_H

#include "api/request.h"

/* The stop strings of a request with their KMP tables; shared by its choices. */
struct text_stops {
    uint32_t n;
    const struct text_view *stop;      /* [n], borrowed; lengths 1..MAX_STOP_BYTES */
    const uint16_t *border[MAX_STOPS]; /* [len + 1]: longest proper border of the first k bytes */
};

/* A token with what was reported about it; `end` and `top_at` are relative to their owner. */
struct text_token {
    uint32_t id, rank;
    float logprob;
    bool scored; /* logprob is known (not so for the first token of a prompt) */
    bool prompt; /* an echoed token of the prompt */
    uint32_t n_top;
    uint32_t offset; /* characters of text before it, echo counted */
    size_t end;      /* bytes of text up to where it is released */
    size_t top_at;   /* its alternatives: tops[top_at .. top_at + n_top) */
};

struct text_tokens {
    struct text_token *v;
    struct sample_top *tops;
    size_t n, room, n_tops, top_room;
    bool failed; /* no memory for one of them */
};

/* A stretch of text and tokens that may leave; borrowed from its text_out until that changes. */
struct text_part {
    const char *text; /* [len], whole characters */
    size_t len;
    const struct text_token *tokens; /* [n_tokens] */
    size_t n_tokens;
    const struct sample_top *tops; /* what top_at counts from; NULL: no token has any */
};

struct text_out {
    const struct text_stops *stops; /* NULL: none */
    bool include_stop, keep_tokens;
    bool stopped;  /* a stop string matched: text is cut, nothing may be pushed any more */
    uint32_t stop; /* which; valid if stopped */
    struct utf8_stream utf8;
    char *text; /* [len], not taken yet */
    size_t len, room, ready;
    struct text_tokens tokens; /* not taken yet; empty unless keep_tokens */
    size_t n_ready_tokens;     /* of tokens: those whose text is ready */
    size_t told, n_told;       /* of text and tokens: taken by parts, but still here */
    bool failed;               /* no memory: text is missing, the answer cannot be given */
    uint64_t chars;            /* characters of the whole text so far */
    size_t echo_len, echo_at;  /* bytes of echoed text, and of those that echo tokens cover */
    uint32_t echo_chars;       /* characters that begin before echo_at */
    uint16_t state[MAX_STOPS]; /* per stop: length of its prefix that ends the text */
};

/* One token as it comes from the engine. */
struct text_piece {
    struct text_view bytes;
    bool hidden; /* adds no text: a special token that is skipped, or the one that ended it all */
    bool unstoppable; /* min_tokens are not out: a match that this token completes does not count */
    bool scored;
    uint32_t id, rank, n_top;
    float logprob;
    const struct sample_top *top; /* [n_top], copied */
};

/* ERR_FULL: the arena is. The views are borrowed. */
status text_out_stops(struct text_stops *s, struct arena *mem, const struct text_view *stop,
                      uint32_t n);

/* keep_tokens: remember every token (log-probabilities or token ids were asked). */
void text_out_init(struct text_out *t, const struct text_stops *stops, bool include_stop,
                   bool keep_tokens);
void text_out_fini(struct text_out *t);
/* Text in front of the generated: valid UTF-8, ready at once, never searched. Before any push. */
void text_out_echo(struct text_out *t, const char *p, size_t len);
/* A token of the echoed text, in order. Its offset comes from walking the echoed text; a hidden one
 * that does not stand there (BOS) covers nothing. */
void text_out_echo_token(struct text_out *t, const struct text_piece *p);
/* True: a stop string matched. */
bool text_out_push(struct text_out *t, const struct text_piece *p);
/* No more tokens: all text is ready, an unfinished character becomes U+FFFD. */
void text_out_end(struct text_out *t);
/* What is ready and not taken, from its begin: about `most` bytes of it as JSON, and never nothing
 * if there is something. SIZE_MAX: all of it. */
struct text_part text_out_part(const struct text_out *t, size_t most);
/* Forgets this part, which was the last that text_out_part gave. */
void text_out_take_part(struct text_out *t, const struct text_part *p);
/* Forgets text[0 .. ready) and tokens.v[0 .. n_ready_tokens). */
void text_out_take(struct text_out *t);
bool text_out_has_part(const struct text_out *t); /* a part would not be empty */

/* The new token, to be completed; borrowed until the next call. NULL: no memory. */
struct text_token *text_out_tokens_add(struct text_tokens *l, const struct text_piece *p);
void text_out_tokens_fini(struct text_tokens *l);

#endif
