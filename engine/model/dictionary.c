/* From GGUF's tokenizer.* keys to a tokenizer, a chat template and the tokens that end a text. */
#include "engine/model/internal.h"
#include "engine/text/chat.h"

#include <string.h>

enum { MAX_TOKEN_BYTES = 64 << 10, MAX_TEMPLATE_BYTES = 1 << 20 };

/* The arrays of the file, as tokenizer_create asks for them. */
struct lists {
    struct gguf_strings tokens, merges;
    const unsigned char *types; /* NULL: all normal */
};

static struct text_view token_at(const void *ctx, uint32_t i)
{
    return gguf_string_at(&((const struct lists *)ctx)->tokens, i);
}

static struct text_view merge_at(const void *ctx, uint32_t i)
{
    return gguf_string_at(&((const struct lists *)ctx)->merges, i);
}

static int32_t type_at(const void *ctx, uint32_t i)
{
    const struct lists *l = ctx;
    return l->types == NULL ? TOKEN_NORMAL : gguf_i32_at(l->types, i);
}

static status check_lengths(const struct gguf *g, const struct gguf_strings *s, const char *what)
{
    if (s->count > UINT32_MAX)
        return gguf_refuse(g, s->p, "%llu %s", (unsigned long long)s->count, what);
    for (uint64_t i = 0; i < s->count; i++) {
        struct text_view v = gguf_string_at(s, i);
        if (v.len > MAX_TOKEN_BYTES)
            return gguf_refuse(g, v.p, "%s %llu has %zu bytes, allowed are %d", what,
                               (unsigned long long)i, v.len, (int)MAX_TOKEN_BYTES);
    }
    return OK;
}

static status read_types(struct lists *l, const struct gguf *g)
{
    uint64_t n;
    const char *key = "tokenizer.ggml.token_type";
    if (gguf_find(g, key) == NULL)
        return OK;
    TRY(gguf_i32_array(g, key, &l->types, &n));
    if (n != l->tokens.count)
        return gguf_refuse(g, l->types, "%s has %llu elements for %llu tokens", key,
                           (unsigned long long)n, (unsigned long long)l->tokens.count);
    for (uint64_t i = 0; i < n; i++) {
        int32_t type = gguf_i32_at(l->types, i);
        if (type < TOKEN_NORMAL || type > TOKEN_BYTE)
            return gguf_refuse(g, l->types + 4 * i, "token %llu has type %d, allowed are 1 to 6",
                               (unsigned long long)i, type);
    }
    return OK;
}

static status read_lists(struct lists *l, struct gguf *g)
{
    TRY(gguf_string_array(g, "tokenizer.ggml.tokens", &l->tokens));
    TRY(check_lengths(g, &l->tokens, "token"));
    if (gguf_find(g, "tokenizer.ggml.merges") != NULL)
        TRY(gguf_string_array(g, "tokenizer.ggml.merges", &l->merges));
    TRY(check_lengths(g, &l->merges, "merge"));
    const struct gguf_value *scores = gguf_find(g, "tokenizer.ggml.scores");
    if (scores != NULL && (scores->type != GGUF_ARRAY || scores->elem != GGUF_F32 ||
                           scores->count != l->tokens.count))
        return gguf_refuse(g, scores->p, "tokenizer.ggml.scores is not an array of %llu floats",
                           (unsigned long long)l->tokens.count);
    return read_types(l, g);
}

static status read_id(const struct gguf *g, const char *key, uint32_t n_tokens, uint32_t *id)
{
    return gguf_u32_or(g, key, 0, n_tokens - 1, TOKEN_NONE, id);
}

static status read_tokenizer(struct dictionary *v, struct gguf *g)
{
    struct lists l = {0};
    struct text_view model, pre = {"default", 7};
    char model_name[32], pre_name[32];
    TRY(read_lists(&l, g));
    TRY(gguf_string(g, "tokenizer.ggml.model", &model));
    if (gguf_find(g, "tokenizer.ggml.pre") != NULL)
        TRY(gguf_string(g, "tokenizer.ggml.pre", &pre));
    gguf_text_copy(model_name, sizeof model_name, model);
    gguf_text_copy(pre_name, sizeof pre_name, pre);
    struct tokenizer_source src = {.model = model_name,
                                   .pre = pre_name,
                                   .token = token_at,
                                   .merge = merge_at,
                                   .type = type_at,
                                   .ctx = &l,
                                   .n_tokens = (uint32_t)l.tokens.count,
                                   .n_merges = (uint32_t)l.merges.count};
    if (src.n_tokens == 0)
        return gguf_refuse(g, l.tokens.p, "a vocabulary without tokens");
    TRY(read_id(g, "tokenizer.ggml.bos_token_id", src.n_tokens, &src.bos));
    TRY(read_id(g, "tokenizer.ggml.eos_token_id", src.n_tokens, &src.eos));
    TRY(read_id(g, "tokenizer.ggml.unknown_token_id", src.n_tokens, &src.unknown));
    TRY(read_id(g, "tokenizer.ggml.padding_token_id", src.n_tokens, &src.pad));
    /* Byte-level vocabularies have no BOS in front, except these two (llama.cpp). */
    bool bos = strcmp(pre_name, "llama-bpe") == 0 || strcmp(pre_name, "tekken") == 0;
    TRY(gguf_bool_or(g, "tokenizer.ggml.add_bos_token", bos, &src.add_bos));
    status st = tokenizer_create(&v->tokenizer, &src);
    if (st == ERR_FORMAT)
        return gguf_refuse(g, l.tokens.p, "%s", err_text());
    return st;
}

static status read_template(struct dictionary *v, const struct gguf *g)
{
    struct text_view text;
    const char *key = "tokenizer.chat_template";
    if (gguf_find(g, key) == NULL)
        return OK;
    TRY(gguf_string(g, key, &text));
    if (text.len > MAX_TEMPLATE_BYTES || !gguf_text_ok(text, true))
        return gguf_refuse(g, text.p, "%s is not UTF-8 of up to %d bytes", key,
                           (int)MAX_TEMPLATE_BYTES);
    status st = chat_template_find(&v->chat, text.p, text.len);
    if (st == ERR_FORMAT)
        return gguf_refuse(g, text.p, "%s", err_text());
    return st;
}

static void add_end(struct dictionary *v, uint32_t id)
{
    for (uint32_t i = 0; i < v->n_end_ids; i++)
        if (v->end_ids[i] == id)
            return;
    if (id != TOKEN_NONE && v->n_end_ids < ARRAY_LEN(v->end_ids))
        v->end_ids[v->n_end_ids++] = id;
}

void dictionary_find_ends(struct dictionary *v)
{
    static const char *const names[] = {"<|im_end|>", "<|eot_id|>", "<|end_of_text|>",
                                        "<|endoftext|>", "</s>"};
    add_end(v, tokenizer_eos(v->tokenizer));
    for (size_t i = 0; i < ARRAY_LEN(names); i++) {
        uint32_t id = tokenizer_find(v->tokenizer, names[i], strlen(names[i]));
        if (id != TOKEN_NONE && tokenizer_is_special(v->tokenizer, id))
            add_end(v, id);
    }
}

status dictionary_read(struct dictionary *v, struct gguf *g)
{
    uint32_t eot, eom;
    *v = (struct dictionary){0};
    TRY(read_template(v, g));
    TRY(read_tokenizer(v, g));
    uint32_t n = tokenizer_vocab(v->tokenizer);
    status st = read_id(g, "tokenizer.ggml.eot_token_id", n, &eot);
    if (st == OK)
        st = read_id(g, "tokenizer.ggml.eom_token_id", n, &eom);
    if (st != OK) {
        tokenizer_destroy(v->tokenizer);
        return st;
    }
    add_end(v, tokenizer_eos(v->tokenizer));
    add_end(v, eot);
    add_end(v, eom);
    dictionary_find_ends(v);
    return OK;
}
