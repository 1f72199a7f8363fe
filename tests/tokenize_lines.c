/* The tokenizer on a pipe, for tests that compare it with another one.
 *
 *   tokenize_lines VOCABULARY PRE FLAGS < strings > ids
 *
 * VOCABULARY is what tests/e2e/tokenizer_oracle.py writes: numbers are 32 bits, little endian, a
 * string is its length and its bytes. "n_tokens n_merges", then each token's type and name, then
 * the merges. Input: strings; output: for each a count and the ids. Every answer is also decoded,
 * and must give the string back (without the bytes that the vocabulary has no token for). */
#include "engine/text/tokenizer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct file {
    char *bytes;
    size_t len, at;
};

struct vocabulary {
    uint32_t n_tokens, n_merges;
    int32_t *types;
    struct text_view *tokens, *merges;
};

static struct file read_all(FILE *in)
{
    struct file f = {0};
    size_t room = 0, got;
    do {
        if (room - f.len < 1 << 20) {
            f.bytes = mem_grow(f.bytes, room, room * 2 + (1 << 20));
            room = room * 2 + (1 << 20);
        }
        got = fread(f.bytes + f.len, 1, room - f.len, in);
        f.len += got;
    } while (got > 0);
    return f;
}

static uint32_t take_u32(struct file *f)
{
    uint32_t x;
    CHECK(f->len - f->at >= sizeof x);
    memcpy(&x, f->bytes + f->at, sizeof x);
    f->at += sizeof x;
    return x;
}

static struct text_view take_string(struct file *f)
{
    uint32_t len = take_u32(f);
    CHECK(f->len - f->at >= len);
    f->at += len;
    return (struct text_view){f->bytes + f->at - len, len};
}

static struct text_view token_of(const void *ctx, uint32_t i)
{
    return ((const struct vocabulary *)ctx)->tokens[i];
}

static struct text_view merge_of(const void *ctx, uint32_t i)
{
    return ((const struct vocabulary *)ctx)->merges[i];
}

static int32_t type_of(const void *ctx, uint32_t i)
{
    return ((const struct vocabulary *)ctx)->types[i];
}

static struct vocabulary take_vocabulary(struct file *f)
{
    struct vocabulary v = {.n_tokens = take_u32(f), .n_merges = take_u32(f)};
    v.types = mem_alloc(v.n_tokens * sizeof *v.types);
    v.tokens = mem_alloc(v.n_tokens * sizeof *v.tokens);
    v.merges = mem_alloc(v.n_merges * sizeof *v.merges);
    for (uint32_t i = 0; i < v.n_tokens; i++) {
        v.types[i] = (int32_t)take_u32(f);
        v.tokens[i] = take_string(f);
    }
    for (uint32_t i = 0; i < v.n_merges; i++)
        v.merges[i] = take_string(f);
    return v;
}

static struct tokenizer *open_tokenizer(const char *path, const char *pre)
{
    FILE *in = fopen(path, "rb");
    if (in == NULL) {
        perror(path);
        exit(2);
    }
    struct file f = read_all(in);
    fclose(in);
    struct vocabulary v = take_vocabulary(&f);
    struct tokenizer_source src = {.model = "gpt2", .pre = pre, .ctx = &v};
    src.n_tokens = v.n_tokens;
    src.n_merges = v.n_merges;
    src.token = token_of;
    src.merge = merge_of;
    src.type = type_of;
    src.bos = src.eos = src.unknown = src.pad = TOKEN_NONE;
    struct tokenizer *t;
    uint64_t start = clock_us();
    if (tokenizer_create(&t, &src) != OK) {
        fprintf(stderr, "tokenize_lines: %s\n", err_text());
        exit(2);
    }
    fprintf(stderr, "# vocabulary read in %.1f ms\n", (double)(clock_us() - start) / 1000);
    mem_free(v.types);
    mem_free(v.tokens);
    mem_free(v.merges);
    mem_free(f.bytes);
    return t;
}

/* Do the tokens' bytes, one after the other, make up the text? */
static bool gives_back(const struct tokenizer *t, const uint32_t *ids, size_t n,
                       struct text_view text)
{
    size_t at = 0;
    for (size_t i = 0; i < n; i++) {
        struct text_view b = tokenizer_bytes(t, ids[i]);
        for (size_t k = 0; k < b.len; k++, at++) {
            while (at < text.len && text.p[at] != b.p[k] &&
                   tokenizer_find(t, text.p + at, 1) == TOKEN_NONE)
                at++;
            if (at == text.len || text.p[at] != b.p[k])
                return false;
        }
    }
    while (at < text.len && tokenizer_find(t, text.p + at, 1) == TOKEN_NONE)
        at++;
    return at == text.len;
}

int main(int argc, char **argv)
{
    if (argc != 4) {
        fprintf(stderr, "usage: tokenize_lines VOCABULARY PRE FLAGS\n");
        return 2;
    }
    struct tokenizer *t = open_tokenizer(argv[1], argv[2]);
    struct token_scratch *s = token_scratch_create();
    bool normalises = strcmp(argv[2], "qwen2") == 0;
    unsigned flags = (unsigned)atoi(argv[3]);
    struct file in = read_all(stdin);
    uint32_t *ids = mem_alloc((in.len * 3 + 1) * sizeof *ids);
    int rc = 0;
    while (in.at < in.len) {
        struct text_view text = take_string(&in);
        size_t n;
        if (tokenize(t, s, text.p, text.len, flags, ids + 1, text.len * 3 + 1, &n) != OK ||
            (!normalises && !gives_back(t, ids + 1, n, text))) {
            fprintf(stderr, "tokenize_lines: a string of %zu bytes: %s\n", text.len, err_text());
            rc = 1;
        }
        ids[0] = (uint32_t)n;
        fwrite(ids, sizeof *ids, n + 1, stdout);
    }
    mem_free(ids);
    mem_free(in.bytes);
    token_scratch_destroy(s);
    tokenizer_destroy(t);
    return rc;
}
