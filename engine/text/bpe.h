/* Merging inside one piece: the adjacent pair of lowest rank first, leftmost on ties. */
#ifndef ENGINE_TEXT_BPE_H
#define ENGINE_TEXT_BPE_H

#include "engine/text/tokens.h"

struct bpe_merge {
    uint64_t pair; /* left << 32 | right; all ones: empty */
    uint32_t rank, result;
};

/* (left, right) -> rank and result, open addressing at half load. Constant after bpe_init. */
struct bpe {
    struct bpe_merge *merges; /* [mask + 1] */
    uint32_t mask;
    uint32_t *results;  /* [n_merges] by rank */
    bool ignore_merges; /* a piece that is a token is that token (Llama-3) */
};

/* Where ids go. */
struct id_sink {
    uint32_t *ids;
    size_t room, n;
};

/* Of one thread. The cache maps pieces to their ids; it belongs to one vocabulary at a time. */
struct bpe_scratch {
    struct bpe_piece *cache; /* [BPE_CACHE_SLOTS] */
    struct bpe_symbol *symbols;
    uint64_t *heap;
};

enum { BPE_CACHE_SLOTS = 8192 }; /* x 64 bytes: half a megabyte, inside the L2 of one core */

/* ERR_FORMAT: a merge of what is not a token, or to what is none. On failure nothing is held. */
status bpe_init(struct bpe *b, const struct tokens *v, const struct tokenizer_source *src);
void bpe_fini(struct bpe *b);

void bpe_scratch_init(struct bpe_scratch *s);
void bpe_scratch_fini(struct bpe_scratch *s);
void bpe_scratch_forget(struct bpe_scratch *s); /* before it is used with another vocabulary */

/* Appends the ids of one piece, len >= 1. Bytes without a token are dropped, as in the reference.
 * ERR_FULL: no room. ERR_MEMORY: a piece too long for the machine. */
status bpe_encode(const struct bpe *b, const struct tokens *v, struct bpe_scratch *s,
                  struct text_view piece, struct id_sink *sink);

#endif
