/* How fast is text turned into tokens, and how long does a vocabulary take to read?
 *
 * Aim: 10 MB/s of English prose on one core (the reference: about 1.4), 200,000 equal letters under
 * 100 ms, a vocabulary of 49,152 tokens under 40 ms. Best of several runs. The ceiling is what the
 * pre-tokenizer alone reaches; cold is a scratch that has seen nothing yet.
 *
 * Usage: tokenizer MODEL.gguf [TEXT] */
#include "engine/model/internal.h"
#include "engine/text/pretokenize.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROUNDS = 7, PROSE = 1 << 20, HARD = 200000 };

static double best_of(double best, uint64_t start, int round)
{
    double ms = (double)(clock_us() - start) / 1000;
    return round == 0 || ms < best ? ms : best;
}

/* A file, or when there is none sentences of words of the vocabulary. */
static char *read_text(const char *path, size_t *len)
{
    char *text = mem_alloc(PROSE);
    FILE *f = path == NULL ? NULL : fopen(path, "rb");
    if (f != NULL) {
        *len = fread(text, 1, PROSE, f);
        fclose(f);
        return text;
    }
    static const char *const words[] = {"the ", "afternoon ", "was ",      "quiet, ",
                                        "and ", "nobody ",    "expected ", "visitors",
                                        ".\n",  "She ",       "looked ",   "at "};
    uint64_t seed = 1;
    for (*len = 0; *len + 16 < PROSE;) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        const char *word = words[(seed >> 33) % ARRAY_LEN(words)];
        memcpy(text + *len, word, strlen(word));
        *len += strlen(word);
    }
    return text;
}

static void time_pieces(const char *text, size_t len)
{
    double best = 0;
    size_t pieces = 0;
    for (int round = 0; round < ROUNDS; round++) {
        uint64_t start = clock_us();
        pieces = 0;
        for (const char *p = text; p < text + len; pieces++)
            p += pretokenize_next(PRETOKENIZE_SMOLLM, p, text + len);
        best = best_of(best, start, round);
    }
    printf("%-34s %8.2f ms  %7.1f MB/s  %zu pieces\n", "pre-tokenizer alone", best,
           (double)len / best / 1e3, pieces);
}

static void time_text(const struct tokenizer *t, const char *name, const char *text, size_t len,
                      bool cold)
{
    uint32_t *ids = mem_alloc((len + 1) * sizeof *ids);
    struct token_scratch *s = token_scratch_create();
    double best = 0;
    size_t n = 0;
    for (int round = 0; round < ROUNDS; round++) {
        if (cold) {
            token_scratch_destroy(s);
            s = token_scratch_create();
        }
        uint64_t start = clock_us();
        CHECK(tokenize(t, s, text, len, TOKENIZE_SPECIAL, ids, len + 1, &n) == OK);
        best = best_of(best, start, round);
    }
    printf("%-34s %8.2f ms  %7.1f MB/s  %zu tokens\n", name, best, (double)len / best / 1e3, n);
    token_scratch_destroy(s);
    mem_free(ids);
}

static void time_reading(struct gguf *g, struct dictionary *d)
{
    double best = 0;
    for (int round = 0; round < ROUNDS; round++) {
        if (round > 0)
            tokenizer_destroy(d->tokenizer);
        uint64_t start = clock_us();
        if (dictionary_read(d, g) != OK) {
            fprintf(stderr, "%s\n", err_text());
            exit(1);
        }
        best = best_of(best, start, round);
    }
    printf("%-34s %8.2f ms  %u tokens\n", "vocabulary and template", best,
           tokenizer_vocab(d->tokenizer));
}

int main(int argc, char **argv)
{
    struct gguf *g;
    struct dictionary d;
    if (argc < 2 || gguf_open(&g, argv[1]) != OK) {
        fprintf(stderr, "usage: tokenizer MODEL.gguf [TEXT]; %s\n", err_text());
        return 1;
    }
    time_reading(g, &d);
    size_t len;
    char *text = read_text(argc > 2 ? argv[2] : NULL, &len);
    time_pieces(text, len);
    time_text(d.tokenizer, "prose", text, len, false);
    time_text(d.tokenizer, "prose, cold cache", text, len, true);
    memset(text, 'a', HARD);
    time_text(d.tokenizer, "200,000 equal letters", text, HARD, false);
    for (size_t i = 0; i < HARD; i++)
        text[i] = (char)("<|im_start"[i % 10]);
    time_text(d.tokenizer, "beginnings of special tokens", text, HARD, false);
    uint64_t seed = 1;
    for (size_t i = 0; i < HARD; i++) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        text[i] = (char)("etaoinshrdlu etaoinshrdlu \n.,!?"[(seed >> 33) % 31]);
    }
    time_text(d.tokenizer, "random letters", text, HARD, false);
    mem_free(text);
    tokenizer_destroy(d.tokenizer);
    gguf_close(g);
    return 0;
}
