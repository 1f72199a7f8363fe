/* engine/text on a pipe, for tests that compare it with other implementations.
 *
 *   text_pipe tokenize VOCABULARY PRE FLAGS     strings -> ids
 *   text_pipe chat VOCABULARY PRE               conversations -> text, ids
 *   text_pipe utf8                              bytes -> text
 *
 * Numbers are 32 bits in the machine's order; a string is its length and its bytes. VOCABULARY is
 * what tests/e2e/tokenizer_oracle.py writes: the numbers of tokens and of merges, each token's type
 * and name, then the merges. Each mode also checks what must hold without an oracle: tokens give the
 * text back, and chunks joined are the whole. */
#include "engine/text/chat.h"
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
        fprintf(stderr, "text_pipe: %s\n", err_text());
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

static int refuse(size_t len, const char *why)
{
    fprintf(stderr, "text_pipe: a string of %zu bytes: %s\n", len, why);
    return 1;
}

static void write_u32s(const uint32_t *ids, size_t n)
{
    uint32_t count = (uint32_t)n;
    fwrite(&count, sizeof count, 1, stdout);
    fwrite(ids, sizeof *ids, n, stdout);
}

static void write_bytes(const char *p, size_t n)
{
    uint32_t count = (uint32_t)n;
    fwrite(&count, sizeof count, 1, stdout);
    fwrite(p, 1, n, stdout);
}

static int pipe_tokenize(const struct tokenizer *t, const char *pre, unsigned flags)
{
    bool normalises = strcmp(pre, "qwen2") == 0; /* then the text does not come back as it was */
    struct token_scratch *s = token_scratch_create();
    struct file in = read_all(stdin);
    size_t room = in.len * 3 + 1, n;
    uint32_t *ids = mem_alloc(room * sizeof *ids);
    int rc = 0;
    while (in.at < in.len) {
        struct text_view text = take_string(&in);
        if (tokenize(t, s, text.p, text.len, flags, ids, room, &n) != OK)
            rc = refuse(text.len, err_text());
        else if (!normalises && !gives_back(t, ids, n, text))
            rc = refuse(text.len, "its tokens are not its bytes");
        write_u32s(ids, n);
    }
    mem_free(ids);
    mem_free(in.bytes);
    token_scratch_destroy(s);
    return rc;
}

/* One conversation: the template's source, two flags, a number of messages, roles and contents.
 * Answer: the text, the ids with input trusted and not. */
static int pipe_one_chat(const struct tokenizer *t, struct token_scratch *s, struct file *in)
{
    const struct chat_template *template;
    struct arena mem;
    struct chat_text text;
    struct text_view source = take_string(in);
    struct chat_args args = {.add_generation_prompt = take_u32(in)};
    args.continue_final_message = take_u32(in);
    args.n_messages = take_u32(in);
    struct chat_message *messages = mem_alloc(args.n_messages * sizeof *messages);
    for (size_t i = 0; i < args.n_messages; i++) {
        messages[i].role = take_string(in);
        messages[i].content = take_string(in);
    }
    args.messages = messages;
    arena_init(&mem, 4096, 1 << 26);
    int rc = 0;
    if (chat_template_find(&template, source.p, source.len) != OK ||
        chat_render(template, &args, &mem, &text) != OK) {
        rc = refuse(source.len, err_text());
    } else {
        size_t n, room = text.total_bytes + 1;
        uint32_t *ids = mem_alloc(room * sizeof *ids);
        write_bytes(text.n_runs > 0 ? text.runs[0].p : "", text.total_bytes);
        for (int trust = 1; trust >= 0; trust--) {
            if (chat_tokenize(t, s, &text, trust, ids, room, &n) != OK)
                rc = refuse(text.total_bytes, err_text());
            write_u32s(ids, n);
        }
        mem_free(ids);
    }
    arena_fini(&mem);
    mem_free(messages);
    return rc;
}

static int pipe_chat(const struct tokenizer *t)
{
    struct token_scratch *s = token_scratch_create();
    struct file in = read_all(stdin);
    int rc = 0;
    while (in.at < in.len && rc == 0)
        rc = pipe_one_chat(t, s, &in);
    mem_free(in.bytes);
    token_scratch_destroy(s);
    return rc;
}

/* Decodes text cut at two places; returns the bytes written. */
static size_t decode_cut(struct text_view text, size_t cut1, size_t cut2, char *out)
{
    struct utf8_stream u = {0};
    size_t n = utf8_stream_push(&u, text.p, cut1, out);
    n += utf8_stream_push(&u, text.p + cut1, cut2 - cut1, out + n);
    n += utf8_stream_push(&u, text.p + cut2, text.len - cut2, out + n);
    return n + utf8_stream_flush(&u, out + n);
}

static int pipe_utf8(void)
{
    struct file in = read_all(stdin);
    int rc = 0;
    while (in.at < in.len) {
        struct text_view text = take_string(&in);
        char *whole = mem_alloc(3 * (text.len + 3)), *cut = mem_alloc(3 * (text.len + 3));
        size_t n = decode_cut(text, text.len, text.len, whole);
        for (size_t a = 0; a <= text.len; a++) {
            for (size_t b = a; b <= text.len; b++) {
                if (decode_cut(text, a, b, cut) != n || memcmp(whole, cut, n) != 0)
                    rc = refuse(text.len, "its chunks joined are not the whole");
            }
        }
        write_bytes(whole, n);
        mem_free(whole);
        mem_free(cut);
    }
    mem_free(in.bytes);
    return rc;
}

int main(int argc, char **argv)
{
    if (argc == 2 && strcmp(argv[1], "utf8") == 0)
        return pipe_utf8();
    if (argc < 4) {
        fprintf(stderr, "usage: text_pipe tokenize|chat|utf8 [VOCABULARY PRE [FLAGS]]\n");
        return 2;
    }
    struct tokenizer *t = open_tokenizer(argv[2], argv[3]);
    int rc = strcmp(argv[1], "chat") == 0
                 ? pipe_chat(t)
                 : pipe_tokenize(t, argv[3], argc > 4 ? (unsigned)atoi(argv[4]) : 0);
    tokenizer_destroy(t);
    return rc;
}
