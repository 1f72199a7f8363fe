/* Fuzzing text -> ids -> text. The first byte chooses the vocabulary and the flags, the rest is the
 * text, any bytes at all. What must hold, whatever they are: the ids' bytes joined are the text
 * (except where NFC changed it), there are at most as many ids as promised, streaming decode does
 * not depend on the cut, and a conversation gives control tokens only where the template wrote them. */
#include "engine/text/chat.h"
#include "tests/tiny_vocabulary.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len);

static struct tiny_vocabulary vocabulary;
static struct tokenizer *tokenizers[4];
static struct token_scratch *scratch;

/* Some merges of English and of UTF-8's bytes, and special tokens that are beginnings of others. */
static void make_tokenizers(void)
{
    static const char *const pres[] = {"gpt-2", "smollm", "llama-bpe", "qwen2"};
    static const char *const merges[][2] = {{"a", "a"},
                                            {"aa", "aa"},
                                            {"\xc4\xa0", "\xc4\xa0"},
                                            {"\xc4\xa0", "a"},
                                            {"t", "h"},
                                            {"th", "e"},
                                            {"\xc4\x8a", "\xc4\x8a"},
                                            {"'", "s"},
                                            {"\xc3\x8c", "\xc4\xa3"},
                                            {"e", "r"},
                                            {"1", "2"},
                                            {"12", "3"},
                                            {"!", "!"},
                                            {"aaaa", "aaaa"},
                                            {"h", "e"}};
    static const char *const specials[] = {"<|im_start|>", "<|im_end|>", "<|im_end|><|im_end|>"};
    tiny_init(&vocabulary);
    for (size_t i = 0; i < ARRAY_LEN(merges); i++)
        tiny_add_merge(&vocabulary, merges[i][0], merges[i][1]);
    for (size_t i = 0; i < ARRAY_LEN(specials); i++)
        tiny_add(&vocabulary, specials[i], TOKEN_CONTROL);
    tiny_add(&vocabulary, "<t", TOKEN_USER_DEFINED);
    tiny_add(&vocabulary, "<tool>", TOKEN_USER_DEFINED);
    for (size_t i = 0; i < ARRAY_LEN(pres); i++) {
        struct tokenizer_source src = tiny_source(&vocabulary, pres[i]);
        CHECK(tokenizer_create(&tokenizers[i], &src) == OK);
    }
    scratch = token_scratch_create();
}

static void check_ids(const struct tokenizer *t, const uint32_t *ids, size_t n, const char *text,
                      size_t len)
{
    size_t at = 0;
    for (size_t i = 0; i < n; i++) {
        struct text_view b = tokenizer_bytes(t, ids[i]);
        CHECK(b.len <= len - at && memcmp(b.p, text + at, b.len) == 0);
        at += b.len;
    }
    CHECK(at == len);
}

static void check_decode(const char *text, size_t len, size_t cut)
{
    char *whole = mem_alloc(3 * (len + 3)), *parts = mem_alloc(3 * (len + 3));
    struct utf8_stream u = {0}, v = {0};
    size_t n = utf8_stream_push(&u, text, len, whole);
    n += utf8_stream_flush(&u, whole + n);
    size_t k = utf8_stream_push(&v, text, cut, parts);
    k += utf8_stream_push(&v, text + cut, len - cut, parts + k);
    k += utf8_stream_flush(&v, parts + k);
    CHECK(n == k && memcmp(whole, parts, n) == 0);
    mem_free(whole);
    mem_free(parts);
}

static void check_chat(const struct tokenizer *t, const char *text, size_t len, uint32_t *ids,
                       size_t room)
{
    struct chat_message m = {{"user", 4}, {text, len}};
    struct chat_args a = {.messages = &m, .n_messages = 1, .add_generation_prompt = true};
    struct chat_text out;
    struct arena mem;
    size_t n, control = 0;
    arena_init(&mem, 4096, 1 << 24);
    CHECK(chat_render(chat_template_chatml(), &a, &mem, &out) == OK);
    CHECK(chat_tokenize(t, scratch, &out, false, ids, room, &n) == OK);
    for (size_t i = 0; i < n; i++)
        control += tokenizer_is_special(t, ids[i]);
    CHECK(control == 3);
    arena_fini(&mem);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len)
{
    if (scratch == NULL)
        make_tokenizers();
    if (len == 0)
        return 0;
    const struct tokenizer *t = tokenizers[data[0] & 3];
    bool normalises = (data[0] & 3) == 3;
    size_t text_len = len - 1, room = 3 * text_len + 64, n;
    char *text = mem_alloc(text_len); /* of exactly this size: a byte too far is seen */
    uint32_t *ids = mem_alloc(room * sizeof *ids);
    memcpy(text, data + 1, text_len);
    size_t promised = normalises ? 3 * text_len + 1 : text_len + 1;
    CHECK(tokenize(t, scratch, text, text_len, data[0] >> 2 & 1, ids, promised, &n) == OK);
    if (!normalises)
        check_ids(t, ids, n, text, text_len);
    check_decode(text, text_len, text_len == 0 ? 0 : data[0] % text_len);
    check_chat(t, text, text_len, ids, room);
    mem_free(text);
    mem_free(ids);
    return 0;
}
