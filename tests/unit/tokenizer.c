/* Text to ids and back, on vocabularies small enough to follow. That ids are the library's is shown
 * by tests/e2e/tokenizer_oracle.py on the real one. */
#include "engine/text/tokenizer.h"
#include "tests/tap.h"
#include "tests/tiny_vocabulary.h"

static struct tiny_vocabulary vocabulary; /* too large for a stack */
static struct token_scratch *scratch;

static struct tokenizer *make(const char *pre)
{
    struct tokenizer *t;
    struct tokenizer_source src = tiny_source(&vocabulary, pre);
    if (!ok(tokenizer_create(&t, &src) == OK, "%s: a vocabulary of %u tokens is read", pre,
            src.n_tokens))
        exit(1);
    return t;
}

/* Ids in decimal, with spaces. */
static void gives(const struct tokenizer *t, const char *text, unsigned flags, const char *want)
{
    uint32_t ids[256];
    char got[1024] = "";
    size_t n, k = 0;
    status st = tokenize(t, scratch, text, strlen(text), flags, ids, ARRAY_LEN(ids), &n);
    for (size_t i = 0; i < n; i++)
        k += (size_t)snprintf(got + k, sizeof got - k, "%s%u", i ? " " : "", ids[i]);
    if (!ok(st == OK && strcmp(got, want) == 0, "\"%s\" is %s", text, want))
        printf("#   got %s\n", got);
}

static void pairs_merge_by_rank_leftmost_first(void)
{
    tiny_init(&vocabulary);
    tiny_add_merge(&vocabulary, "b", "c");        /* 256 */
    tiny_add_merge(&vocabulary, "a", "b");        /* 257 */
    tiny_add_merge(&vocabulary, "a", "a");        /* 258 */
    tiny_add_merge(&vocabulary, "aa", "aa");      /* 259 */
    tiny_add_merge(&vocabulary, "\xc4\xa0", "a"); /* 260: " a" */
    struct tokenizer *t = make("gpt-2");
    gives(t, "abc", 0, "97 256");
    gives(t, "aaa", 0, "258 97");
    gives(t, "aaaaaaa", 0, "259 258 97");
    gives(t, "x a", 0, "120 260");
    gives(t, "", 0, "");
    tokenizer_destroy(t);
}

static void a_whole_token_wins_over_merges_in_llama3_only(void)
{
    tiny_init(&vocabulary);
    tiny_add_merge(&vocabulary, "b", "c");        /* 256 */
    tiny_add(&vocabulary, "abc", TOKEN_NORMAL);   /* 257: no merge leads to it */
    tiny_add(&vocabulary, "abcd", TOKEN_CONTROL); /* 258 */
    struct tokenizer *t = make("llama-bpe");
    gives(t, "abc", 0, "257");
    gives(t, "abcd", 0, "97 256 100"); /* text never becomes a control token */
    gives(t, "abcd", TOKENIZE_SPECIAL, "258");
    tokenizer_destroy(t);
    t = make("gpt-2");
    gives(t, "abc", 0, "97 256");
    tokenizer_destroy(t);
}

static void special_tokens_are_found_leftmost_and_longest(void)
{
    tiny_init(&vocabulary);
    tiny_add(&vocabulary, "<e>", TOKEN_CONTROL);         /* 256 */
    tiny_add(&vocabulary, "<e><e>", TOKEN_CONTROL);      /* 257 */
    tiny_add(&vocabulary, "<t", TOKEN_USER_DEFINED);     /* 258 */
    tiny_add(&vocabulary, "<tool>", TOKEN_USER_DEFINED); /* 259 */
    tiny_add(&vocabulary, "\xc3\xa9", TOKEN_CONTROL);    /* 260, the name of byte e9 too */
    struct tokenizer *t = make("smollm");
    gives(t, "a<e>b", TOKENIZE_SPECIAL, "97 256 98");
    gives(t, "a<e>", 0, "97 60 101 62");
    gives(t, "<e><e><e>", TOKENIZE_SPECIAL, "257 256");
    gives(t, "<tool><to<e", 0, "259 258 111 60 101");
    gives(t, "\xc3\xa9", TOKENIZE_SPECIAL, "260");
    ok(tokenizer_is_special(t, 257) && !tokenizer_is_special(t, 259), "control ones are special");
    is_int(tokenizer_find(t, "<tool>", 6), 259, "a token is found by its text");
    is_int(tokenizer_find(t, " ", 1), 32, "a byte too");
    is_int(tokenizer_find(t, "nope", 4), TOKEN_NONE, "and what is none is not");
    ok(tokenizer_bytes(t, 32).p[0] == ' ' && tokenizer_bytes(t, 32).len == 1, "bytes are raw");
    ok(memcmp(tokenizer_name(t, 32).p, "\xc4\xa0", 2) == 0, "names are as in the file");
    tokenizer_destroy(t);
}

static void bos_is_put_in_front_where_the_model_wants_it(void)
{
    tiny_init(&vocabulary);
    struct tokenizer_source src = tiny_source(&vocabulary, "gpt2");
    struct tokenizer *t;
    src.bos = 7;
    src.add_bos = true;
    ok(tokenizer_create(&t, &src) == OK, "a model that wants BOS");
    gives(t, "a", TOKENIZE_BOS, "7 97");
    gives(t, "a", 0, "97");
    tokenizer_destroy(t);
}

static void one_scratch_serves_several_vocabularies(void)
{
    tiny_init(&vocabulary);
    struct tokenizer *plain = make("gpt-2");
    tiny_add_merge(&vocabulary, "a", "b");
    struct tokenizer *merging = make("gpt-2");
    gives(plain, "ab", 0, "97 98");
    gives(merging, "ab", 0, "256");
    gives(plain, "ab", 0, "97 98");
    tokenizer_destroy(plain);
    tokenizer_destroy(merging);
}

static void the_byte_vocabulary_is_its_bytes(void)
{
    struct tokenizer *t;
    uint32_t ids[8];
    size_t n;
    ok(tokenizer_create_bytes(&t) == OK, "the byte vocabulary is made");
    is_int(tokenizer_vocab(t), 259, "it has 256 bytes and three specials");
    status st = tokenize(t, scratch, "\0a\xc3\xa9", 4, 0, ids, 8, &n);
    ok(st == OK && n == 4 && ids[0] == 0 && ids[1] == 'a' && ids[3] == 0xa9, "bytes are ids");
    gives(t, "<|im_start|>x<|im_end|>", TOKENIZE_SPECIAL, "257 120 258");
    is_int(tokenizer_eos(t), 258, "<|im_end|> ends a turn");
    is_int(tokenizer_unknown(t), 256, "<|endoftext|> is what it does not know");
    st = tokenize(t, scratch, "abc", 3, 0, ids, 2, &n);
    ok(st == ERR_FULL && n <= 2, "too little room is said, not overrun: %s", err_text());
    tokenizer_destroy(t);
}

static void bytes_without_a_token_are_dropped(void)
{
    tiny_init(&vocabulary);
    tiny_add_merge(&vocabulary, "!", "!");  /* 256 */
    memmove(vocabulary.tokens[4], "zz", 3); /* byte 04 has none, as in SmolLM2 */
    struct tokenizer *t = make("gpt-2");
    gives(t, "a\004b", 0, "97 98");
    gives(t, "!\004!", 0, "256"); /* as in the reference: the neighbours meet */
    tokenizer_destroy(t);
}

/* Merges as the definition says: the lowest rank of all, leftmost, again and again. */
static size_t merge_by_definition(const struct tokenizer *t, uint32_t *ids, size_t n)
{
    for (;;) {
        uint32_t best_rank = UINT32_MAX, best_id = 0;
        size_t best = 0;
        for (size_t i = 0; i + 1 < n; i++) {
            char pair[2 * TINY_NAME + 2];
            snprintf(pair, sizeof pair, "%s %s", vocabulary.tokens[ids[i]],
                     vocabulary.tokens[ids[i + 1]]);
            for (uint32_t r = 0; r < vocabulary.n_merges && r < best_rank; r++) {
                if (strcmp(vocabulary.merges[r], pair) != 0)
                    continue;
                *strchr(pair, ' ') = '\0';
                memmove(pair + strlen(pair), pair + strlen(pair) + 1, TINY_NAME);
                best_rank = r;
                best = i;
                best_id = tokenizer_find(t, pair, strlen(pair));
                break;
            }
        }
        if (best_rank == UINT32_MAX)
            return n;
        ids[best] = best_id;
        n--;
        memmove(ids + best + 1, ids + best + 2, (n - best - 1) * sizeof *ids);
    }
}

static uint64_t next_random(uint64_t *seed)
{
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    return *seed;
}

static void long_and_short_pieces_merge_as_defined(void)
{
    uint64_t seed = 20240602;
    unsigned bad = 0;
    tiny_init(&vocabulary);
    while (vocabulary.n_merges < 60) { /* random tokens over three letters */
        uint32_t n = vocabulary.n_tokens, pick[2];
        for (int i = 0; i < 2; i++)
            pick[i] = n > 256 && next_random(&seed) % 3
                          ? 256 + (uint32_t)(next_random(&seed) % (n - 256))
                          : 'a' + (uint32_t)(next_random(&seed) % 3);
        char name[2 * TINY_NAME];
        snprintf(name, sizeof name, "%s%s", vocabulary.tokens[pick[0]], vocabulary.tokens[pick[1]]);
        bool fresh = strlen(name) < 12;
        for (uint32_t i = 256; i < n; i++)
            fresh = fresh && strcmp(vocabulary.tokens[i], name) != 0;
        if (fresh)
            tiny_add_merge(&vocabulary, vocabulary.tokens[pick[0]], vocabulary.tokens[pick[1]]);
    }
    struct tokenizer *t = make("gpt-2");
    for (int round = 0; round < 400; round++) {
        char text[128];
        uint32_t want[128], got[128];
        size_t len = 1 + next_random(&seed) % 100, n;
        for (size_t i = 0; i < len; i++)
            want[i] = (unsigned char)(text[i] = (char)('a' + next_random(&seed) % 3));
        size_t n_want = merge_by_definition(t, want, len);
        status st = tokenize(t, scratch, text, len, 0, got, 128, &n);
        bad += st != OK || n != n_want || memcmp(want, got, n * sizeof *got) != 0;
    }
    is_int(bad, 0, "400 random words of 1 to 100 letters, by definition and by us");
    tokenizer_destroy(t);
}

static void a_very_long_piece_takes_no_quadratic_time(void)
{
    enum { LETTERS = 200000 };
    tiny_init(&vocabulary);
    tiny_add_merge(&vocabulary, "a", "a");
    tiny_add_merge(&vocabulary, "aa", "aa");
    tiny_add_merge(&vocabulary, "aaaa", "aaaa");
    struct tokenizer *t = make("gpt-2");
    char *text = mem_alloc(LETTERS);
    uint32_t *ids = mem_alloc(LETTERS * sizeof *ids);
    size_t n;
    memset(text, 'a', LETTERS);
    uint64_t start = clock_us();
    status st = tokenize(t, scratch, text, LETTERS, 0, ids, LETTERS, &n);
    double ms = (double)(clock_us() - start) / 1000;
    ok(st == OK && n == LETTERS / 8, "200,000 equal letters are 25,000 tokens");
    ok(ms < 2000, "in %.1f ms (bar 100; a busy machine and sanitizers get 2,000)", ms);
    mem_free(text);
    mem_free(ids);
    tokenizer_destroy(t);
}

static void refused(const struct tokenizer_source *src, const char *why)
{
    struct tokenizer *t = NULL;
    status st = tokenizer_create(&t, src);
    ok(st == ERR_FORMAT && t == NULL && strstr(err_text(), why) != NULL, "refused: %s",
       st == OK ? "no!" : err_text());
    tokenizer_destroy(t);
}

static void broken_vocabularies_are_refused_by_the_rule_they_break(void)
{
    static const struct {
        const char *merge, *why;
    } merges[] = {
        {"ab", "merge 0 is not two tokens"},  {"a  b", "merge 0 is not two tokens"},
        {"a ", "merge 0 is not two tokens"},  {" a", "merge 0 is not two tokens"},
        {"", "merge 0 is not two tokens"},    {"a b c", "merge 0 is not two tokens"},
        {"xy a", "left half is not a token"}, {"a xy", "right half is not a token"},
        {"a b", "its result is not a token"},
    };
    for (size_t i = 0; i < ARRAY_LEN(merges); i++) {
        tiny_init(&vocabulary);
        vocabulary.n_merges = 1;
        snprintf(vocabulary.merges[0], sizeof vocabulary.merges[0], "%s", merges[i].merge);
        struct tokenizer_source src = tiny_source(&vocabulary, "gpt-2");
        refused(&src, merges[i].why);
    }
    tiny_init(&vocabulary);
    tiny_add_merge(&vocabulary, "a", "b");
    vocabulary.n_merges = 2;
    strcpy(vocabulary.merges[1], "a b");
    struct tokenizer_source src = tiny_source(&vocabulary, "gpt-2");
    refused(&src, "merges 0 and 1 are the same");
    vocabulary.types[256] = TOKEN_CONTROL;
    src.n_merges = 1;
    refused(&src, "its result is not a token"); /* or plain text could forge it */
}

static void broken_tokens_are_refused(void)
{
    tiny_init(&vocabulary);
    tiny_add(&vocabulary, "a", TOKEN_NORMAL);
    struct tokenizer_source src = tiny_source(&vocabulary, "gpt-2");
    refused(&src, "tokens 97 and 256 are the same");
    strcpy(vocabulary.tokens[256], "");
    refused(&src, "token 256 is empty");
    strcpy(vocabulary.tokens[256], "x1");
    vocabulary.types[256] = 9;
    refused(&src, "unknown token type 9");
    strcpy(vocabulary.tokens['b'], "x2");
    vocabulary.types[256] = TOKEN_NORMAL;
    refused(&src, "no token for byte 0x62");
    tiny_init(&vocabulary);
    tiny_add(&vocabulary, "<e>", TOKEN_CONTROL);
    tiny_add(&vocabulary, "<e>", TOKEN_USER_DEFINED);
    src = tiny_source(&vocabulary, "gpt-2");
    refused(&src, "special tokens 25");
    src.n_tokens = 0;
    refused(&src, "0 tokens");
}

static void broken_keys_are_refused(void)
{
    tiny_init(&vocabulary);
    struct tokenizer_source src = tiny_source(&vocabulary, "tekken");
    refused(&src, "pre-tokenizer \"tekken\"");
    src.pre = "gpt-2";
    src.model = "llama";
    refused(&src, "tokenizer model \"llama\"");
    src.model = "gpt2";
    src.eos = 256;
    refused(&src, "the eos token is 256, but there are 256 tokens");
    src.eos = TOKEN_NONE;
    src.add_bos = true;
    refused(&src, "names none");
}

int main(void)
{
    scratch = token_scratch_create();
    pairs_merge_by_rank_leftmost_first();
    a_whole_token_wins_over_merges_in_llama3_only();
    special_tokens_are_found_leftmost_and_longest();
    bos_is_put_in_front_where_the_model_wants_it();
    one_scratch_serves_several_vocabularies();
    the_byte_vocabulary_is_its_bytes();
    bytes_without_a_token_are_dropped();
    long_and_short_pieces_merge_as_defined();
    a_very_long_piece_takes_no_quadratic_time();
    broken_vocabularies_are_refused_by_the_rule_they_break();
    broken_tokens_are_refused();
    broken_keys_are_refused();
    token_scratch_destroy(scratch);
    return tap_done();
}
