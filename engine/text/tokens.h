/* The tokens of a vocabulary: their bytes, their names in the file, and the way back from bytes. */
#ifndef ENGINE_TEXT_TOKENS_H
#define ENGINE_TEXT_TOKENS_H

#include "engine/text/tokenizer.h"

#include <string.h>

struct tokens_slot {
    uint32_t hash, id; /* id TOKEN_NONE: empty */
};

/* Two strings per token in one blob. `at` has an entry more than there are tokens: a token's bytes
 * end where the next one's begin. */
struct tokens {
    uint32_t n;
    char *blob;
    uint32_t *bytes_at, *name_at; /* [n + 1] */
    uint8_t *types;               /* [n] enum token_type */
    struct tokens_slot *slots;    /* [mask + 1]: what text can become; no control tokens */
    uint32_t mask;
    uint32_t byte_ids[256]; /* TOKEN_NONE: the vocabulary has none */
};

/* ERR_FORMAT: a rule broken, named. On failure nothing is held. */
status tokens_init(struct tokens *v, const struct tokenizer_source *src);
void tokens_fini(struct tokens *v);

/* The token of exactly these bytes, not looking at control tokens; or TOKEN_NONE. */
uint32_t tokens_find(const struct tokens *v, struct text_view bytes);

/* Byte-mapped name (UTF-8 of U+0000..U+0143) -> raw bytes at out, which has room for name.len.
 * A name with a character outside the map stands for itself. Returns the bytes written. */
size_t tokens_unmap(struct text_view name, char *out);

/* Names a token type that is never produced by ordinary text. */
static inline bool tokens_is_control(const struct tokens *v, uint32_t id)
{
    return v->types[id] == TOKEN_CONTROL || v->types[id] == TOKEN_UNKNOWN;
}

static inline struct text_view tokens_bytes(const struct tokens *v, uint32_t id)
{
    return (struct text_view){v->blob + v->bytes_at[id], v->bytes_at[id + 1] - v->bytes_at[id]};
}

static inline struct text_view tokens_name(const struct tokens *v, uint32_t id)
{
    return (struct text_view){v->blob + v->name_at[id], v->name_at[id + 1] - v->name_at[id]};
}

/* Mixes 8 bytes at a time by a folded 128-bit product. Not secret: what is found through it is
 * compared byte by byte, and no chain grows with what users send. */
static inline uint64_t tokens_hash(const char *p, size_t len)
{
    uint64_t h = 0x9e3779b97f4a7c15u ^ len, word = 0;
    for (; len > 8; p += 8, len -= 8) {
        memcpy(&word, p, 8);
        __extension__ unsigned __int128 m = (unsigned __int128)(h ^ word) * 0xd6e8feb86659fd93u;
        h = (uint64_t)m ^ (uint64_t)(m >> 64);
    }
    word = 0;
    for (size_t i = 0; i < len; i++)
        word = word << 8 | (unsigned char)p[i];
    __extension__ unsigned __int128 m = (unsigned __int128)(h ^ word) * 0xa0761d6478bd642fu;
    return (uint64_t)m ^ (uint64_t)(m >> 64);
}

#endif
