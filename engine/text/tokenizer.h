/* Byte-level BPE: text -> token ids and back, equal to the `tokenizers` library.
 *
 * Constant after tokenizer_create, so any thread may read it. What a call needs beside it (piece
 * cache, merge scratch) is in a struct token_scratch, one per thread. */
#ifndef ENGINE_TEXT_TOKENIZER_H
#define ENGINE_TEXT_TOKENIZER_H

#include "kernels/base.h"

struct tokenizer;
struct token_scratch;

enum token_type { /* GGUF's tokenizer.ggml.token_type */
                  TOKEN_NORMAL = 1,
                  TOKEN_UNKNOWN,
                  TOKEN_CONTROL,
                  TOKEN_USER_DEFINED,
                  TOKEN_UNUSED,
                  TOKEN_BYTE
};

struct text_view {
    const char *p;
    size_t len;
};

enum { TOKEN_NONE = 0xffffffffu };

/* Everything is borrowed for the call only. Strings are as in the file (byte-mapped). */
struct tokenizer_source {
    const char *model; /* "gpt2" */
    const char *pre;   /* "smollm", "gpt-2", "llama-bpe", "qwen2" */
    uint32_t n_tokens, n_merges;
    struct text_view (*token)(const void *ctx, uint32_t i);
    struct text_view (*merge)(const void *ctx, uint32_t i); /* "left right" */
    int32_t (*type)(const void *ctx, uint32_t i);           /* enum token_type */
    const void *ctx;
    uint32_t bos, eos, unknown, pad; /* TOKEN_NONE: none */
    bool add_bos;
};

/* ERR_FORMAT names the rule that the file breaks (unknown pre-tokenizer, missing byte token, merge
 * of unknown tokens, duplicate token, id out of range). */
status tokenizer_create(struct tokenizer **out, const struct tokenizer_source *src);
void tokenizer_destroy(struct tokenizer *t);
/* 256 byte tokens and <|endoftext|>, <|im_start|>, <|im_end|>: for the mock backend and tests. */
status tokenizer_create_bytes(struct tokenizer **out);
/* The same, with more tokens up to n_tokens, which no text becomes and whose own text is their number,
 * "<300>": for models without a vocabulary. ends: ids of it that end a text; their text is not shown. */
status tokenizer_create_numbered(struct tokenizer **out, uint32_t n_tokens, const uint32_t *ends,
                                 uint32_t n_ends);
enum { TOKENIZER_NUMBERED_MIN = 256 + 3 }; /* n_tokens at least */

struct token_scratch *token_scratch_create(void);
void token_scratch_destroy(struct token_scratch *s);

enum tokenize_flags {
    TOKENIZE_SPECIAL =
        1, /* control tokens in the text are recognised (templates); user-defined always are */
    TOKENIZE_BOS = 2, /* put the BOS token in front if the model wants one (add_special_tokens) */
};

/* Appends the ids of text[len] (valid UTF-8; may hold NUL) to out, which has room for `room` ids.
 * At most len + 1 ids come out. ERR_FULL: more than room. *n: ids written. */
status tokenize(const struct tokenizer *t, struct token_scratch *s, const char *text, size_t len,
                unsigned flags, uint32_t *out, size_t room, size_t *n);

uint32_t tokenizer_vocab(const struct tokenizer *t);                      /* ids are < this */
struct text_view tokenizer_bytes(const struct tokenizer *t, uint32_t id); /* raw bytes of a token */
struct text_view tokenizer_name(const struct tokenizer *t,
                                uint32_t id); /* as in the vocabulary: "Ġthe" */
bool tokenizer_is_special(const struct tokenizer *t,
                          uint32_t id); /* skipped by skip_special_tokens */
uint32_t tokenizer_find(const struct tokenizer *t, const char *text,
                        size_t len); /* exact special or token; or TOKEN_NONE */
uint32_t tokenizer_bos(const struct tokenizer *t);
uint32_t tokenizer_eos(const struct tokenizer *t);
uint32_t tokenizer_unknown(const struct tokenizer *t);
uint32_t tokenizer_pad(const struct tokenizer *t);
bool tokenizer_adds_bos(const struct tokenizer *t);

/* Streaming decode: bytes of tokens -> whole UTF-8 characters. Holds back at most three bytes of an
 * unfinished character; what can no longer become one turns into U+FFFD (maximal-subpart rule), so
 * the chunks joined equal the decoding of the whole. */
struct utf8_stream {
    unsigned char held[4];
    uint8_t n_held;
};

/* Writes the complete characters of held + in[len] to out and returns their bytes. out has room for
 * 3 * (len + 3) bytes. */
size_t utf8_stream_push(struct utf8_stream *u, const char *in, size_t len, char *out);
/* End of text: an unfinished character becomes one U+FFFD (3 bytes) or nothing. */
size_t utf8_stream_flush(struct utf8_stream *u, char *out);

#endif
