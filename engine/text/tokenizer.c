/* The pipeline: special tokens are cut out of the text first; what is between them is normalised
 * (Qwen2), cut into pieces by the pre-tokenizer, and each piece is merged by BPE. The order is the
 * `tokenizers` library's, and so is every border case: tests/e2e/tokenizer_oracle.py compares.
 *
 * A struct tokenizer is constant once made. Ids are the positions of tokens in the file. */
#include "engine/text/tokenizer.h"

#include "engine/text/bpe.h"
#include "engine/text/internal.h"
#include "engine/text/normalize.h"
#include "engine/text/pretokenize.h"
#include "engine/text/special.h"
#include "engine/text/tokens.h"

#include <stdatomic.h>
#include <stdio.h>

enum { NUMBER_BYTES = 12 }; /* "<2097151>" */

struct tokenizer {
    struct tokens tokens;
    struct bpe bpe;
    struct special_set special;
    enum pretokenizer pre;
    uint64_t serial; /* tells a scratch whose pieces its cache holds */
    uint32_t bos, eos, unknown, pad;
    bool add_bos;
};

struct token_scratch {
    struct bpe_scratch bpe;
    struct normalize_scratch normalize;
    struct special_span *spans; /* of a conversation */
    size_t spans_room;
    uint64_t serial; /* of the tokenizer that filled the cache */
};

/* An address can be used again after tokenizer_destroy, a number is not. */
static _Atomic uint64_t last_serial;

static status check_ids(const struct tokenizer_source *src)
{
    const struct {
        const char *name;
        uint32_t id;
    } ids[] = {{"bos", src->bos}, {"eos", src->eos}, {"unknown", src->unknown}, {"pad", src->pad}};
    for (size_t i = 0; i < ARRAY_LEN(ids); i++) {
        if (ids[i].id != TOKEN_NONE && ids[i].id >= src->n_tokens)
            return err(ERR_FORMAT, "the %s token is %u, but there are %u tokens", ids[i].name,
                       ids[i].id, src->n_tokens);
    }
    if (src->add_bos && src->bos == TOKEN_NONE)
        return err(ERR_FORMAT, "the file asks for a BOS token in front and names none");
    return OK;
}

status tokenizer_create(struct tokenizer **out, const struct tokenizer_source *src)
{
    enum pretokenizer pre;
    *out = NULL;
    if (strcmp(src->model, "gpt2") != 0)
        return err(ERR_FORMAT, "tokenizer model \"%.40s\"; only \"gpt2\" (byte-level BPE) is known",
                   src->model);
    if (!pretokenize_find(src->pre, &pre))
        return err(ERR_FORMAT, "pre-tokenizer \"%.40s\"; known are smollm, gpt-2, llama-bpe, qwen2",
                   src->pre);
    TRY(check_ids(src));
    struct tokenizer *t = mem_alloc(sizeof *t);
    t->pre = pre;
    t->serial = atomic_fetch_add(&last_serial, 1) + 1;
    t->bos = src->bos;
    t->eos = src->eos;
    t->unknown = src->unknown;
    t->pad = src->pad;
    t->add_bos = src->add_bos;
    status st = tokens_init(&t->tokens, src);
    if (st == OK)
        st = bpe_init(&t->bpe, &t->tokens, src);
    if (st == OK)
        st = special_init(&t->special, &t->tokens);
    if (st != OK) {
        tokenizer_destroy(t);
        return st;
    }
    t->bpe.ignore_merges = pre == PRETOKENIZE_LLAMA3;
    *out = t;
    return OK;
}

void tokenizer_destroy(struct tokenizer *t)
{
    if (t == NULL)
        return;
    special_fini(&t->special);
    bpe_fini(&t->bpe);
    tokens_fini(&t->tokens);
    mem_free(t);
}

/* The source behind tokenizer_create_bytes and _numbered: names as a file would write them. */
struct byte_names {
    char utf8[256][2];
    uint8_t len[256];
    const uint32_t *ends; /* [n_ends] */
    uint32_t n_ends;
    char (*numbers)[NUMBER_BYTES]; /* of tokens from TOKENIZER_NUMBERED_MIN on */
};

static struct text_view byte_token(const void *ctx, uint32_t i)
{
    static const struct text_view specials[] = {
        {"<|endoftext|>", 13}, {"<|im_start|>", 12}, {"<|im_end|>", 10}};
    const struct byte_names *names = ctx;
    if (i >= TOKENIZER_NUMBERED_MIN) {
        const char *name = names->numbers[i - TOKENIZER_NUMBERED_MIN];
        return (struct text_view){name, strlen(name)};
    }
    if (i >= 256)
        return specials[i - 256];
    return (struct text_view){names->utf8[i], names->len[i]};
}

/* An end that is a printable byte stays one. */
static int32_t byte_type(const void *ctx, uint32_t i)
{
    const struct byte_names *names = ctx;
    bool control = i >= 256 && i < TOKENIZER_NUMBERED_MIN;
    for (uint32_t j = 0; j < names->n_ends; j++)
        control |= names->ends[j] == i && (i >= 256 || (i < 0x20 && (i < '\t' || i > '\r')));
    return control ? TOKEN_CONTROL : TOKEN_NORMAL;
}

static void name_bytes(struct byte_names *names)
{
    for (uint32_t cp = 0x21; cp < 0x144; cp++) {
        char name[2] = {(char)cp}, raw[2];
        uint8_t len = cp < 0x80 ? 1 : 2;
        if (len == 2) {
            name[0] = (char)(0xc0 | cp >> 6);
            name[1] = (char)(0x80 | (cp & 0x3f));
        }
        if (tokens_unmap((struct text_view){name, len}, raw) != 1 || cp == 0x7f)
            continue; /* stands for no byte */
        memcpy(names->utf8[(unsigned char)raw[0]], name, len);
        names->len[(unsigned char)raw[0]] = len;
    }
}

static status create_bytes(struct tokenizer **out, uint32_t n_tokens, struct byte_names *names)
{
    struct tokenizer_source src = {.model = "gpt2", .pre = "gpt-2", .n_tokens = n_tokens};
    name_bytes(names);
    src.token = byte_token;
    src.type = byte_type;
    src.ctx = names;
    src.unknown = 256;
    src.bos = 257;
    src.eos = src.pad = 258;
    return tokenizer_create(out, &src);
}

status tokenizer_create_bytes(struct tokenizer **out)
{
    struct byte_names names = {0};
    return create_bytes(out, TOKENIZER_NUMBERED_MIN, &names);
}

status tokenizer_create_numbered(struct tokenizer **out, uint32_t n_tokens, const uint32_t *ends,
                                 uint32_t n_ends)
{
    struct byte_names names = {.ends = ends, .n_ends = n_ends};
    CHECK(n_tokens >= TOKENIZER_NUMBERED_MIN);
    uint32_t n = n_tokens - TOKENIZER_NUMBERED_MIN;
    names.numbers = mem_alloc(((size_t)n + 1) * sizeof *names.numbers);
    for (uint32_t i = 0; i < n; i++)
        snprintf(names.numbers[i], sizeof *names.numbers, "<%u>", TOKENIZER_NUMBERED_MIN + i);
    status st = create_bytes(out, n_tokens, &names);
    mem_free(names.numbers);
    return st;
}

struct token_scratch *token_scratch_create(void)
{
    struct token_scratch *s = mem_alloc(sizeof *s);
    bpe_scratch_init(&s->bpe);
    return s;
}

void token_scratch_destroy(struct token_scratch *s)
{
    if (s == NULL)
        return;
    bpe_scratch_fini(&s->bpe);
    normalize_fini(&s->normalize);
    mem_free(s->spans);
    mem_free(s);
}

struct special_span *token_scratch_spans(struct token_scratch *s, size_t n)
{
    if (n > s->spans_room) {
        mem_free(s->spans);
        s->spans = mem_try_alloc(n * sizeof *s->spans);
        s->spans_room = s->spans == NULL ? 0 : n;
    }
    return s->spans;
}

/* Text without special tokens. */
static status tokenize_segment(const struct tokenizer *t, struct token_scratch *s,
                               struct text_view text, struct id_sink *sink)
{
    if (t->pre == PRETOKENIZE_QWEN2)
        TRY(normalize_nfc(&s->normalize, text, &text));
    const char *p = text.p, *end = p + text.len;
    while (p < end) {
        size_t len = pretokenize_next(t->pre, p, end);
        TRY(bpe_encode(&t->bpe, &t->tokens, &s->bpe, (struct text_view){p, len}, sink));
        p += len;
    }
    return OK;
}

static status put_id(struct id_sink *sink, uint32_t id)
{
    if (sink->n == sink->room)
        return err(ERR_FULL, "the text has more than %zu tokens", sink->room);
    sink->ids[sink->n++] = id;
    return OK;
}

status tokenize_spans(const struct tokenizer *t, struct token_scratch *s, struct text_view text,
                      const struct special_span *spans, size_t n_spans, struct id_sink *sink)
{
    if (s->serial != t->serial) {
        bpe_scratch_forget(&s->bpe);
        s->serial = t->serial;
    }
    status st = OK;
    for (size_t at = 0; at < text.len && st == OK;) {
        while (n_spans > 0 && spans->to <= at) {
            spans++;
            n_spans--;
        }
        struct special_match m = special_next(&t->special, text, at, spans, n_spans);
        st = tokenize_segment(t, s, (struct text_view){text.p + at, m.at - at}, sink);
        if (st == OK && m.id != TOKEN_NONE)
            st = put_id(sink, m.id);
        at = m.at + m.len;
    }
    normalize_trim(&s->normalize);
    return st;
}

status tokenize(const struct tokenizer *t, struct token_scratch *s, const char *text, size_t len,
                unsigned flags, uint32_t *out, size_t room, size_t *n)
{
    struct id_sink sink = {.ids = out, .room = room};
    struct special_span all = {0, len};
    status st = OK;
    if ((flags & TOKENIZE_BOS) && t->add_bos)
        st = put_id(&sink, t->bos);
    if (st == OK)
        st = tokenize_spans(t, s, (struct text_view){text, len}, &all,
                            flags & TOKENIZE_SPECIAL ? 1 : 0, &sink);
    *n = sink.n;
    return st;
}

uint32_t tokenizer_vocab(const struct tokenizer *t)
{
    return t->tokens.n;
}

struct text_view tokenizer_bytes(const struct tokenizer *t, uint32_t id)
{
    CHECK(id < t->tokens.n);
    return tokens_bytes(&t->tokens, id);
}

struct text_view tokenizer_name(const struct tokenizer *t, uint32_t id)
{
    CHECK(id < t->tokens.n);
    return tokens_name(&t->tokens, id);
}

bool tokenizer_is_special(const struct tokenizer *t, uint32_t id)
{
    CHECK(id < t->tokens.n);
    return tokens_is_control(&t->tokens, id);
}

uint32_t tokenizer_find(const struct tokenizer *t, const char *text, size_t len)
{
    struct text_view view = {text, len};
    uint32_t id = special_find(&t->special, view);
    return id != TOKEN_NONE ? id : tokens_find(&t->tokens, view);
}

uint32_t tokenizer_bos(const struct tokenizer *t)
{
    return t->bos;
}

uint32_t tokenizer_eos(const struct tokenizer *t)
{
    return t->eos;
}

uint32_t tokenizer_unknown(const struct tokenizer *t)
{
    return t->unknown;
}

uint32_t tokenizer_pad(const struct tokenizer *t)
{
    return t->pad;
}

bool tokenizer_adds_bos(const struct tokenizer *t)
{
    return t->add_bos;
}
