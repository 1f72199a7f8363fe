/* A vocabulary to break in tests: a token per byte, and what a test adds. */
#ifndef TESTS_TINY_VOCABULARY_H
#define TESTS_TINY_VOCABULARY_H

#include "engine/text/tokenizer.h"

#include <stdio.h>
#include <string.h>

enum { TINY_TOKENS = 1024, TINY_MERGES = 1024, TINY_NAME = 128 };

struct tiny_vocabulary {
    uint32_t n_tokens, n_merges;
    int32_t types[TINY_TOKENS];
    char tokens[TINY_TOKENS][TINY_NAME], merges[TINY_MERGES][2 * TINY_NAME + 2];
};

static inline struct text_view tiny_token(const void *ctx, uint32_t i)
{
    const struct tiny_vocabulary *v = ctx;
    return (struct text_view){v->tokens[i], strlen(v->tokens[i])};
}

static inline struct text_view tiny_merge(const void *ctx, uint32_t i)
{
    const struct tiny_vocabulary *v = ctx;
    return (struct text_view){v->merges[i], strlen(v->merges[i])};
}

static inline int32_t tiny_type(const void *ctx, uint32_t i)
{
    return ((const struct tiny_vocabulary *)ctx)->types[i];
}

static inline uint32_t tiny_add(struct tiny_vocabulary *v, const char *name, enum token_type type)
{
    CHECK(v->n_tokens < TINY_TOKENS && strlen(name) < TINY_NAME);
    v->types[v->n_tokens] = type;
    snprintf(v->tokens[v->n_tokens], TINY_NAME, "%s", name);
    return v->n_tokens++;
}

/* Adds the merge, and the token it makes. */
static inline uint32_t tiny_add_merge(struct tiny_vocabulary *v, const char *left,
                                      const char *right)
{
    char name[2 * TINY_NAME];
    CHECK(v->n_merges < TINY_MERGES);
    char merge[sizeof v->merges[0]]; /* left and right may lie in v */
    snprintf(merge, sizeof merge, "%s %s", left, right);
    memcpy(v->merges[v->n_merges++], merge, sizeof merge);
    snprintf(name, sizeof name, "%s%s", left, right);
    return tiny_add(v, name, TOKEN_NORMAL);
}

/* The token of byte b is b, named as in files: printable Latin-1 by itself, others from U+0100. */
static inline void tiny_init(struct tiny_vocabulary *v)
{
    *v = (struct tiny_vocabulary){0};
    for (uint32_t b = 0, next = 0x100; b < 256; b++) {
        bool plain = (b > 0x20 && b < 0x7f) || (b > 0xa0 && b != 0xad);
        uint32_t cp = plain ? b : next++;
        char name[3] = {(char)cp};
        if (cp >= 0x80) {
            name[0] = (char)(0xc0 | cp >> 6);
            name[1] = (char)(0x80 | (cp & 0x3f));
        }
        tiny_add(v, name, TOKEN_NORMAL);
    }
}

static inline struct tokenizer_source tiny_source(const struct tiny_vocabulary *v, const char *pre)
{
    return (struct tokenizer_source){.model = "gpt2",
                                     .pre = pre,
                                     .n_tokens = v->n_tokens,
                                     .n_merges = v->n_merges,
                                     .token = tiny_token,
                                     .merge = tiny_merge,
                                     .type = tiny_type,
                                     .ctx = v,
                                     .bos = TOKEN_NONE,
                                     .eos = TOKEN_NONE,
                                     .unknown = TOKEN_NONE,
                                     .pad = TOKEN_NONE};
}

#endif
