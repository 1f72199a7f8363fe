/* The GGUF reader and the plan of a llama: what is right is read, and every line of the hostile-file
 * checklist (reference/models.md 1.8) is refused with the offset and the rule. Cases of item n of the
 * list are in item_n. `--seeds DIR` writes the seeds of tests/fuzz/gguf instead. */
#include "tests/fuzz/gguf.c"
#include "tests/gguf_writer.h"
#include "tests/tap.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

enum { HEADER = 24 };

/* Where the value of the next key will lie. */
static size_t next_value(const struct gguf_writer *w, const char *key)
{
    return HEADER + w->keys.len + 8 + strlen(key) + 4;
}

static status read_file(struct bytes f, bool deep)
{
    struct gguf *g;
    struct plan p;
    struct dictionary v;
    status st = gguf_open_memory(&g, f.p, f.len, "t.gguf");
    if (st != OK)
        return st;
    if (deep && (st = llama_plan(&p, g)) == OK) {
        plan_fini(&p);
        if ((st = dictionary_read(&v, g)) == OK)
            tokenizer_destroy(v.tokenizer);
    }
    gguf_close(g);
    return st;
}

static void refused_bytes(struct bytes f, long offset, const char *rule, const char *sentence)
{
    char want[64];
    status st = read_file(f, true);
    snprintf(want, sizeof want, offset < 0 ? "t.gguf: " : "t.gguf: offset %ld: ", offset);
    bool good = st == ERR_FORMAT && strncmp(err_text(), want, strlen(want)) == 0 &&
                strstr(err_text(), rule) != NULL;
    if (!ok(good, "%s", sentence))
        printf("#   got %s \"%s\"\n#   want \"%s... %s\"\n", status_name(st), st ? err_text() : "",
               want, rule);
    bytes_free(&f);
}

/* offset -1: a thing that is missing has none. */
static void refused(struct gguf_writer *w, long offset, const char *rule, const char *sentence)
{
    refused_bytes(gw_finish(w), offset, rule, sentence);
}

static struct bytes tiny_file(void)
{
    struct gguf_writer w = {0};
    tiny_model(&w,
               &(struct tiny_spec){.hidden = 32, .ff = 32, .heads = 2, .kv_heads = 1, .layers = 1});
    return gw_finish(&w);
}

static void patched(size_t at, uint64_t v, size_t n, const char *rule, const char *sentence)
{
    struct bytes f = tiny_file();
    memcpy(f.p + at, &v, n);
    refused_bytes(f, (long)at, rule, sentence);
}

static void what_is_written_is_read(void)
{
    struct gguf_writer w = {.align = 64};
    struct gguf *g;
    struct gguf_strings s;
    uint32_t u = 0;
    float f32 = 0;
    tiny_model(
        &w, &(struct tiny_spec){.type = DTYPE_Q4_1, .embed_type = DTYPE_Q8_0, .templated = true});
    struct bytes f = gw_finish(&w);
    ok(gguf_open_memory(&g, f.p, f.len, "t.gguf") == OK, "a tiny model opens");
    ok(gguf_u32(g, "llama.block_count", 1, 9, &u) == OK && u == 2, "an integer is read");
    ok(gguf_f32(g, "llama.rope.freq_base", 1, 1e9, &f32) == OK && f32 == 10000.0f,
       "a float is read");
    ok(gguf_string_array(g, "tokenizer.ggml.tokens", &s) == OK && s.count == TINY_VOCAB &&
           gguf_string_at(&s, 2).len == 10 &&
           memcmp(gguf_string_at(&s, 2).p, "<|im_end|>", 10) == 0,
       "a string of an array is found by its index");
    const struct gguf_tensor *t = gguf_tensor_find(g, "blk.1.ffn_down.weight");
    ok(t != NULL && t->type == DTYPE_Q4_1 && t->ne[0] == 256 && t->ne[1] == 256 &&
           t->bytes == 40960,
       "a tensor is found by name with type, shape and size");
    ok(t != NULL && ((size_t)((const unsigned char *)t->data - f.p) % 64) == 0,
       "its data is aligned as the file says");
    ok(gguf_find(g, "llama.block_coun") == NULL &&
           gguf_tensor_find(g, "blk.1.ffn_down.weight ") == NULL,
       "a name that is a prefix or longer finds nothing");
    gguf_close(g);
    ok(read_file(f, true) == OK, "plan and vocabulary accept it");
    bytes_free(&f);
}

static void numbers_of_any_width_are_taken(void)
{
    struct gguf_writer w = {0};
    struct gguf *g;
    uint32_t u = 0;
    float v = 0;
    double d = 0.25;
    gw_key(&w, "u64", GGUF_U64), put_u64(&w.keys, 7);
    gw_key(&w, "i8", GGUF_I8), put(&w.keys, "\xff", 1);
    gw_key(&w, "huge", GGUF_U64), put_u64(&w.keys, UINT64_MAX);
    gw_key(&w, "f64", GGUF_F64), put(&w.keys, &d, 8);
    gw_array(&w, "same", GGUF_U16, 3), put(&w.keys, "\5\0\5\0\5\0", 6);
    struct bytes f = gw_finish(&w);
    ok(gguf_open_memory(&g, f.p, f.len, "t.gguf") == OK, "a file without tensors opens");
    ok(gguf_u32(g, "u64", 0, 9, &u) == OK && u == 7, "u64 counts as an integer");
    ok(gguf_u32(g, "i8", 0, 9, &u) == ERR_FORMAT &&
           strstr(err_text(), "i8 is -1, allowed are 0 to 9"),
       "a negative number is out of range, not huge");
    ok(gguf_u32(g, "huge", 0, UINT32_MAX, &u) == ERR_FORMAT, "a number above 2^63 is out of range");
    ok(gguf_f32(g, "f64", 0, 1, &v) == OK && v == 0.25f, "f64 counts as a float");
    ok(gguf_u32_uniform(g, "same", 3, 0, 9, &u) == OK && u == 5,
       "an array of equal numbers is one number");
    ok(gguf_u32_uniform(g, "same", 2, 0, 9, &u) == ERR_FORMAT, "but only for as many layers");
    ok(gguf_f32(g, "u64", 0, 9, &v) == ERR_FORMAT &&
           strstr(err_text(), "is of type u64, not a float"),
       "an integer is not taken for a float");
    gguf_close(g);
    bytes_free(&f);
}

static void item_1_the_file(const char *dir)
{
    char path[512];
    struct gguf *g;
    ok(gguf_open(&g, "/nonexistent/m.gguf") == ERR_IO &&
           strstr(err_text(), "/nonexistent/m.gguf: No such"),
       "a missing file is named");
    ok(gguf_open(&g, dir) == ERR_FORMAT && strstr(err_text(), "not a regular file"),
       "a directory is not a model");
    snprintf(path, sizeof path, "%s/fifo", dir);
    ok(mkfifo(path, 0600) == 0 && gguf_open(&g, path) == ERR_FORMAT,
       "a FIFO is refused without waiting");
    unlink(path);
    snprintf(path, sizeof path, "%s/short", dir);
    bytes_save(&(struct bytes){(unsigned char *)"GGUF\3\0\0\0", 8, 0}, path);
    ok(gguf_open(&g, path) == ERR_FORMAT && strstr(err_text(), "offset 0: the file has 8 bytes"),
       "a file shorter than its header is refused");
    unlink(path);
    patched(0, 0x6e6f736au, 4, "not a GGUF file", "another magic is named");
    patched(4, 0x03000000u, 4, "big-endian", "a big-endian file is named");
    patched(4, 1, 4, "version 1 is obsolete", "version 1 is named");
    patched(4, 4, 4, "GGUF version 4; spind reads 2 and 3", "a version to come is refused");
}

static void item_2_every_prefix_of_a_file_is_refused(void)
{
    struct bytes f = tiny_file();
    size_t bad = 0;
    for (size_t n = 0; n < f.len; n++) {
        struct bytes cut = {malloc(n + 1), n,
                            0}; /* its own allocation: sanitizers see one byte more */
        memcpy(cut.p, f.p, n);
        cut.p = realloc(cut.p, n ? n : 1);
        status st = read_file(cut, true);
        if (st != ERR_FORMAT || strncmp(err_text(), "t.gguf: offset ", 15) != 0)
            bad = n;
        bytes_free(&cut);
    }
    is_int(bad, 0, "every prefix of a file is refused with an offset");
    bytes_free(&f);
}

static void item_3_counts(void)
{
    patched(8, UINT64_MAX, 8, "number of tensors is 18446744073709551615",
            "a huge tensor count is refused");
    patched(8, 65537, 8, "number of tensors is 65537", "more than 65,536 tensors are refused");
    patched(16, 1u << 20, 8, "number of keys is 1048576", "more keys than have room are refused");
    struct gguf_writer w = {0};
    gw_u32(&w, "a", 1);
    struct bytes f = gw_finish(&w);
    f.p[16] = 2;
    refused_bytes(f, 16, "the file has room for 1", "a count is compared with the bytes left");
}

static void item_4_strings(void)
{
    struct gguf_writer w = {0};
    put_u64(&w.keys, UINT64_MAX), put(&w.keys, "abcdefgh", 8), w.n_keys = 1;
    refused(&w, 32, "a key of 18446744073709551615 bytes", "a length that wraps around is refused");
    put_u64(&w.keys, 0), put(&w.keys, "abcdefgh", 8), w.n_keys = 1;
    refused(&w, 24, "a key of 0 bytes", "an empty key is refused");
    put_u64(&w.keys, 65536), put(&w.keys, NULL, 65536 + 8), w.n_keys = 1;
    refused(&w, 24, "a key of 65536 bytes", "a key above 65,535 bytes is refused");
    put_u64(&w.keys, 3), put(&w.keys, "a\0b........", 11), w.n_keys = 1;
    refused(&w, 24, "not UTF-8 without control", "a key with a NUL is refused");
    gw_u32(&w, "a\xc0\x80", 1);
    refused(&w, 24, "not UTF-8", "a key that is not UTF-8 is refused");
    gw_u32(&w, "a\x1b[31m", 1);
    refused(&w, 24, "not UTF-8 without control", "a key that speaks to the terminal is refused");
    const uint64_t one = 1;
    char name[65] = "";
    memset(name, 'n', 64);
    gw_tensor(&w, name, DTYPE_F32, 1, &one, NULL, 4);
    refused(&w, 24, "a tensor name of 64 bytes", "a tensor name above 63 bytes is refused");
    size_t at = next_value(&w, "tokenizer.chat_template") + 8;
    char *big = malloc((1 << 20) + 2);
    memset(big, 'x', (1 << 20) + 1), big[(1 << 20) + 1] = 0;
    gw_string(&w, "tokenizer.chat_template", big);
    tiny_model(&w, &(struct tiny_spec){0});
    refused(&w, (long)at, "not UTF-8 of up to 1048576 bytes", "a template above 1 MiB is refused");
    free(big);
    at = next_value(&w, "tokenizer.chat_template") + 8;
    gw_string(&w, "tokenizer.chat_template", "\xff");
    tiny_model(&w, &(struct tiny_spec){0});
    refused(&w, (long)at, "not UTF-8", "a template that is not UTF-8 is refused");
    at = next_value(&w, "tokenizer.chat_template") + 8;
    gw_string(&w, "tokenizer.chat_template", "{{ messages[0].content }}");
    tiny_model(&w, &(struct tiny_spec){0});
    refused(&w, (long)at, "", "a template that nobody verified is refused");
}

static void item_5_arrays(void)
{
    struct gguf_writer w = {0};
    size_t at = next_value(&w, "a");
    gw_array(&w, "a", GGUF_F64, 9), put(&w.keys, NULL, 12);
    refused(&w, (long)at, "array of 9 elements of 8 bytes does not fit the 12 bytes left",
            "an array longer than the file is refused");
    gw_array(&w, "a", GGUF_STRING, UINT64_MAX / 8 + 2), put(&w.keys, NULL, 24);
    refused(&w, (long)at, "elements of 8 bytes does not fit",
            "a count that wraps around is refused");
    gw_array(&w, "a", GGUF_ARRAY, 1), put(&w.keys, NULL, 24);
    refused(&w, (long)at, "an array of arrays", "a nested array is refused");
    gw_array(&w, "a", 13, 1), put(&w.keys, NULL, 24);
    refused(&w, (long)at, "array of value type 13", "an unknown element type is refused");
    gw_array(&w, "a", UINT32_MAX, 1), put(&w.keys, NULL, 24);
    refused(&w, (long)at, "array of value type 4294967295",
            "an element type is never an index unchecked");
    gw_key(&w, "a", 13), put(&w.keys, NULL, 24);
    refused(&w, (long)at - 4, "a has value type 13", "an unknown value type is refused");
    gw_bool(&w, "a", 2);
    refused(&w, (long)at, "a boolean is 0 or 1, not 2", "a boolean that is neither is refused");
    gw_array(&w, "a", GGUF_BOOL, 3), put(&w.keys, "\0\1\2", 3);
    refused(&w, (long)at + 14, "a boolean is 0 or 1, not 2", "also inside an array");
}

static void item_6_duplicates(void)
{
    struct gguf_writer w = {0};
    const uint64_t one = 1;
    gw_u32(&w, "a", 1), gw_u32(&w, "b", 1);
    size_t at = next_value(&w, "a") - 5;
    gw_u32(&w, "a", 1);
    refused(&w, (long)at, "key a is there twice", "a duplicate key is refused");
    gw_tensor(&w, "t", DTYPE_F32, 1, &one, NULL, 4);
    at = HEADER + w.infos.len;
    gw_tensor(&w, "t", DTYPE_F32, 1, &one, NULL, 4);
    refused(&w, (long)at, "tensor t is there twice", "a duplicate tensor is refused");
    uint64_t start = clock_us();
    for (uint32_t i = 0; i < 65536; i++) {
        char key[16];
        snprintf(key, sizeof key, "%u", i);
        put_string(&w.keys, key), put_u32(&w.keys, GGUF_U8), put(&w.keys, NULL, 1);
    }
    w.n_keys = 65536;
    struct bytes f = gw_finish(&w);
    ok(read_file(f, false) == OK && clock_us() - start < 20000000,
       "65,536 keys are no denial of service");
    bytes_free(&f);
}

/* A tiny model whose key is written wrongly by the caller, who left it at the front. */
static void wrong_key(struct gguf_writer *w, const char *key, const char *rule,
                      const char *sentence)
{
    size_t at = HEADER + 8 + strlen(key) + 4;
    w->leave_out = key;
    tiny_model(w, &(struct tiny_spec){0});
    refused(w, (long)at, rule, sentence);
}

static void wrong_u32(const char *key, uint32_t v, const char *rule, const char *sentence)
{
    struct gguf_writer w = {0};
    gw_u32(&w, key, v);
    wrong_key(&w, key, rule, sentence);
}

static void wrong_f32(const char *key, float v, const char *rule, const char *sentence)
{
    struct gguf_writer w = {0};
    gw_f32(&w, key, v);
    wrong_key(&w, key, rule, sentence);
}

static void wrong_string(const char *key, const char *v, const char *sentence, const char *rule)
{
    struct gguf_writer w = {0};
    gw_string(&w, key, v);
    size_t at = HEADER + 8 + strlen(key) + 4 + 8; /* the text, after its length */
    w.leave_out = key;
    tiny_model(&w, &(struct tiny_spec){0});
    refused(&w, (long)at, rule, sentence);
}

static void item_7_types_of_known_keys(void)
{
    struct gguf_writer w = {0};
    gw_string(&w, "llama.block_count", "2");
    wrong_key(&w, "llama.block_count", "is of type string, not an integer",
              "a number must be a number");
    gw_u32(&w, "tokenizer.ggml.add_bos_token", 1);
    wrong_key(&w, "tokenizer.ggml.add_bos_token", "not a boolean", "a boolean must be one");
    gw_u32(&w, "general.architecture", 1);
    wrong_key(&w, "general.architecture", "not a string", "a string must be one");
    gw_array(&w, "tokenizer.ggml.tokens", GGUF_U8, TINY_VOCAB), put(&w.keys, NULL, TINY_VOCAB);
    size_t at = HEADER + 8 + strlen("tokenizer.ggml.tokens") + 4 + 12;
    w.leave_out = "tokenizer.ggml.tokens";
    tiny_model(&w, &(struct tiny_spec){0});
    refused(&w, (long)at, "is not an array of strings", "tokens of bytes are refused");
    gw_array(&w, "tokenizer.ggml.token_type", GGUF_U8, TINY_VOCAB), put(&w.keys, NULL, TINY_VOCAB);
    at = HEADER + 8 + strlen("tokenizer.ggml.token_type") + 4 + 12;
    w.leave_out = "tokenizer.ggml.token_type";
    tiny_model(&w, &(struct tiny_spec){0});
    refused(&w, (long)at, "is not an array of 32-bit integers", "token types of bytes are refused");
    gw_string(&w, "unknown.key", "of any kind");
    tiny_model(&w, &(struct tiny_spec){0});
    struct bytes f = gw_finish(&w);
    ok(read_file(f, true) == OK, "an unknown key is passed over");
    bytes_free(&f);
}

static void bad_tensor(uint32_t type, uint32_t n_dims, const uint64_t *ne, long skip,
                       const char *rule, const char *sentence)
{
    struct gguf_writer w = {0};
    gw_tensor(&w, "t", type, n_dims, ne, NULL, 64);
    refused(&w, HEADER + 9 + skip, rule, sentence);
}

static void item_8_tensors(void)
{
    const uint64_t none[] = {0}, huge[] = {INT32_MAX, INT32_MAX, INT32_MAX};
    const uint64_t negative[] = {32, UINT64_MAX}, odd[] = {33}, many[] = {1 << 20, 1 << 20};
    const uint64_t small[] = {32}, five[5] = {1, 1, 1, 1, 1};
    bad_tensor(DTYPE_F32, 5, five, 0, "has 5 dimensions", "five dimensions are refused");
    bad_tensor(DTYPE_F32, 1, none, 4, "dimension 0 is 0", "an empty dimension is refused");
    bad_tensor(DTYPE_F32, 2, negative, 12, "dimension 1 is 18446744073709551615",
               "a negative dimension is refused");
    bad_tensor(DTYPE_F32, 3, huge, 20, "a product below 2^64",
               "a product that overflows is refused");
    bad_tensor(DTYPE_Q4_0, 1, odd, 12, "not whole Q4_0 blocks of 32",
               "a broken last block is refused");
    bad_tensor(13, 1, small, 12, "unsupported tensor type Q5_K (13)",
               "a type we do not read is named");
    bad_tensor(4, 1, small, 12, "unsupported tensor type Q4_2 (4)", "a removed type is named");
    bad_tensor(39, 1, small, 12, "unsupported tensor type MXFP4 (39)", "a newer type is named");
    bad_tensor(0x80000000u, 1, small, 12, "tensor type unknown (2147483648)",
               "a type is never an index unchecked");
    bad_tensor(DTYPE_F32, 2, many, -9, "do not fit the 64 bytes of data",
               "a shape larger than the file is refused");
    struct gguf_writer w = {0};
    gw_tensor(&w, "t", DTYPE_F32, 1, small, NULL, 128);
    gw_tensor(&w, "u", DTYPE_F32, 1, small, NULL, 128);
    size_t at = HEADER + w.infos.len - 8;
    memset(w.infos.p + w.infos.len - 8, 0, 8);
    refused(&w, (long)at, "so it must be at 128", "overlapping tensors are refused");
    put_padding(&w.data, 4096), w.data.len = 4096;
    gw_tensor(&w, "t", DTYPE_F32, 1, small, NULL, 128);
    refused(&w, HEADER + 9 + 4 + 8 + 4, w.n_tensors ? "so it must be at 0" : "",
            "a hole is refused");
    w.align = 24;
    gw_tensor(&w, "t", DTYPE_F32, 1, small, NULL, 128);
    refused(&w, (long)next_value(&w, "general.alignment"), "24, not a power of two",
            "an alignment is a power of two");
    w.align = 1u << 20;
    gw_tensor(&w, "t", DTYPE_F32, 1, small, NULL, 128);
    refused(&w, (long)next_value(&w, "general.alignment"), "allowed are 8 to 65536",
            "a huge alignment is refused");
    gw_tensor(&w, "t", DTYPE_F32, 1, odd, NULL, 132);
    struct bytes f = gw_finish(&w);
    ok(read_file(f, false) == OK, "the padding after the last tensor may be missing");
    bytes_free(&f);
}

static void item_9_ranges(void)
{
    wrong_u32("llama.block_count", 0, "is 0, allowed are 1 to 1024", "no layers are refused");
    wrong_u32("llama.block_count", 1025, "allowed are 1 to 1024", "too many layers are refused");
    wrong_u32("llama.embedding_length", 0, "allowed are 1 to 65536", "no width is refused");
    wrong_u32("llama.attention.head_count", 6, "does not divide into 6 heads",
              "heads divide the width");
    wrong_u32("llama.attention.head_count", 0, "allowed are 1 to 1024", "no heads are refused");
    wrong_u32("llama.attention.head_count_kv", 0, "allowed are 1 to 1024",
              "no KV heads are refused");
    wrong_u32("llama.attention.head_count_kv", 3, "cannot share 3 KV heads",
              "KV heads divide the heads");
    wrong_u32("llama.attention.key_length", 1024, "allowed are 2 to 512", "a huge head is refused");
    wrong_u32("llama.attention.key_length", 63, "even ones up to 512", "an odd head is refused");
    wrong_u32("llama.attention.value_length", 32, "allowed are 64 to 64", "K and V have one width");
    wrong_u32("llama.rope.dimension_count", 32, "allowed are 64 to 64",
              "a partial RoPE is refused");
    wrong_u32("llama.feed_forward_length", (1 << 20) + 1, "allowed are 1 to 1048576",
              "a huge FFN is refused");
    wrong_u32("llama.context_length", (1 << 24) + 1, "allowed are 1 to 16777216",
              "so is a huge context");
    wrong_u32("llama.vocab_size", 999, "allowed are 263 to 263",
              "the vocabulary has the embedding's rows");
    wrong_u32("llama.expert_count", 8, "is 8, allowed are 0 to 0", "experts are refused");
    wrong_u32("general.quantization_version", 3, "allowed are 2 to 2",
              "so are quantisations to come");
    wrong_f32("llama.attention.layer_norm_rms_epsilon", 0, "allowed are 1e-12 to 0.1",
              "epsilon is above 0");
    wrong_f32("llama.attention.layer_norm_rms_epsilon", NAN, "is nan", "epsilon is a number");
    wrong_f32("llama.rope.freq_base", INFINITY, "is inf", "the RoPE base is finite");
    wrong_f32("llama.rope.freq_base", 1, "allowed are 1 to 1e+12", "and above 1");
    wrong_f32("llama.rope.scaling.factor", 0, "allowed are 0.001 to 1e+06", "a scaling is not 0");
    wrong_string("llama.rope.scaling.type", "yarn", "a scaling we do not serve is named",
                 "RoPE scaling \"yarn\" is not served");
    wrong_string("general.architecture", "gemma\x1b", "an architecture we do not serve is named",
                 "the architecture is \"gemma?\"; spind serves llama, qwen2 and qwen3");
    struct gguf_writer w = {0};
    size_t at = next_value(&w, "split.count");
    gw_u32(&w, "split.count", 3);
    tiny_model(&w, &(struct tiny_spec){0});
    refused(&w, (long)at, "one of 3 parts of a split model", "a part of a split model is named");
}

static void tensors_must_be_there(void)
{
    static const char *const names[] = {"token_embd.weight", "output_norm.weight",
                                        "blk.1.attn_q.weight", "blk.0.ffn_norm.weight"};
    for (size_t i = 0; i < ARRAY_LEN(names); i++) {
        struct gguf_writer w = {.leave_out = names[i]};
        tiny_model(&w, &(struct tiny_spec){0});
        refused(&w, -1, names[i], "a missing tensor is named");
    }
    struct gguf_writer w = {.leave_out = "blk.1.attn_k.weight"};
    const uint64_t ne[] = {256, 64};
    gw_tensor(&w, "blk.1.attn_k.bias", DTYPE_F32, 1, ne, NULL, 1024);
    w.leave_out = NULL;
    tiny_model(&w, &(struct tiny_spec){0});
    struct bytes f = gw_finish(&w);
    ok(read_file(f, true) == ERR_FORMAT && strstr(err_text(), "biases are not served"),
       "a bias is refused");
    bytes_free(&f);
    w.leave_out = "blk.1.attn_k.weight";
    tiny_model(&w, &(struct tiny_spec){0});
    w.leave_out = NULL;
    gw_tensor(&w, "blk.1.attn_k.weight", DTYPE_F32, 2, ne, NULL, 65536);
    f = gw_finish(&w);
    ok(read_file(f, true) == ERR_FORMAT && strstr(err_text(), "is [256, 64, 1, 1]") &&
           strstr(err_text(), "[256, 128]"),
       "a tensor of another shape is refused with both shapes");
    bytes_free(&f);
}

/* A family's own tensors must be there, and no other family's. */
static void families_have_what_they_have(void)
{
    static const struct {
        const char *arch, *leave_out, *add, *want;
    } cases[] = {
        {"qwen2", "blk.1.attn_v.bias", NULL, "tensor blk.1.attn_v.bias is missing"},
        {"qwen3", "blk.0.attn_k_norm.weight", NULL, "tensor blk.0.attn_k_norm.weight is missing"},
        {"qwen2", NULL, "blk.0.attn_output.bias", "such biases are not served for qwen2"},
        {"qwen3", NULL, "blk.0.attn_q.bias", "biases are not served for qwen3"},
        {"llama", NULL, "blk.0.attn_q_norm.weight", "norms of heads are not served for llama"},
        {"qwen3", "qwen3.block_count", NULL, "key qwen3.block_count is missing"},
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct gguf_writer w = {.leave_out = cases[i].leave_out};
        const uint64_t ne = 64;
        tiny_model(&w, &(struct tiny_spec){.arch = cases[i].arch});
        if (cases[i].add != NULL)
            gw_tensor(&w, cases[i].add, DTYPE_F32, 1, &ne, NULL, 256);
        struct bytes f = gw_finish(&w);
        if (!ok(read_file(f, true) == ERR_FORMAT && strstr(err_text(), cases[i].want), "%s",
                cases[i].want))
            printf("#   got %s\n", err_text());
        bytes_free(&f);
    }
}

static void item_10_the_vocabulary(void)
{
    wrong_u32("tokenizer.ggml.eos_token_id", TINY_VOCAB, "allowed are 0 to 262",
              "token ids are in range");
    wrong_u32("tokenizer.ggml.bos_token_id", UINT32_MAX, "allowed are 0 to 262",
              "also the first one");
    struct gguf_writer w = {0};
    const char *key = "tokenizer.ggml.token_type";
    gw_array(&w, key, GGUF_I32, 2), put_u64(&w.keys, 0x100000001u);
    size_t at = HEADER + 8 + strlen(key) + 4 + 12;
    w.leave_out = key;
    tiny_model(&w, &(struct tiny_spec){0});
    refused(&w, (long)at, "has 2 elements for 263 tokens", "every token has a type");
    gw_array(&w, key, GGUF_I32, TINY_VOCAB), put_u32(&w.keys, 9),
        put(&w.keys, NULL, 4 * (TINY_VOCAB - 1));
    w.leave_out = key;
    tiny_model(&w, &(struct tiny_spec){0});
    refused(&w, (long)at, "token 0 has type 9", "a type is one of six");
    key = "tokenizer.ggml.scores";
    at = HEADER + 8 + strlen(key) + 4 + 12;
    gw_array(&w, key, GGUF_U8, TINY_VOCAB), put(&w.keys, NULL, TINY_VOCAB);
    tiny_model(&w, &(struct tiny_spec){0});
    refused(&w, (long)at, "is not an array of 263 floats", "scores of bytes are refused");
    key = "tokenizer.ggml.merges";
    gw_array(&w, key, GGUF_STRING, 1), put_string(&w.keys, "t zz");
    w.leave_out = key;
    tiny_model(&w, &(struct tiny_spec){0});
    refused(&w, -1, "", "a merge of unknown tokens is refused");
    key = "tokenizer.ggml.tokens";
    gw_array(&w, key, GGUF_STRING, 0);
    w.leave_out = key;
    tiny_model(&w, &(struct tiny_spec){0});
    refused(&w, HEADER + 8 + (long)strlen(key) + 4 + 12, "a vocabulary of 0 tokens",
            "no tokens are refused");
}

static void a_file_cut_short_while_open_is_survived(const char *dir)
{
    char path[512];
    struct gguf *g;
    struct bytes f = tiny_file();
    snprintf(path, sizeof path, "%s/cut.gguf", dir);
    put(&f, NULL, 1 << 16); /* several pages */
    bytes_save(&f, path);
    bool opened = gguf_open(&g, path) == OK;
    ok(opened && gguf_whole(g) == OK, "a whole file is whole");
    if (opened && truncate(path, 100) == 0) {
        touch_tensors(g);
        ok(gguf_whole(g) == ERR_IO && strstr(err_text(), "cut short"),
           "reading a cut file is noticed later");
        gguf_close(g);
    }
    unlink(path);
    bytes_free(&f);
}

/* From a file the directory is a copy and tensors are not: offsets must not show it. */
static void a_file_is_read_like_memory(const char *dir)
{
    char path[512];
    struct gguf *g, *m;
    struct bytes f = tiny_file();
    snprintf(path, sizeof path, "%s/t.gguf", dir);
    bytes_save(&f, path);
    if (gguf_open(&g, path) != OK || gguf_open_memory(&m, f.p, f.len, path) != OK) {
        ok(false, "%s", err_text());
        return;
    }
    const char *last = "output_norm.weight";
    const struct gguf_tensor *a = gguf_tensor_find(g, last), *b = gguf_tensor_find(m, last);
    ok(a->bytes == b->bytes && memcmp(a->data, b->data, a->bytes) == 0,
       "a file has the same tensors");
    char want[sizeof path + 64];
    const struct gguf_value *key = gguf_find(g, "llama.block_count");
    for (int i = 0; i < 3; i++) {
        const void *in_file[] = {a->data, a->info, key->p};
        const void *in_memory[] = {b->data, b->info, gguf_find(m, "llama.block_count")->p};
        snprintf(want, sizeof want, "%s: offset %zu: x", path,
                 (size_t)((const unsigned char *)in_memory[i] - f.p));
        gguf_refuse(g, in_file[i], "x");
        ok(strcmp(err_text(), want) == 0, "refusals point to the same place");
    }
    gguf_close(g);
    gguf_close(m);
    unlink(path);
    bytes_free(&f);
}

static void files_with_random_damage_are_survived(void)
{
    struct bytes f = tiny_file();
    uint64_t rng = 1;
    size_t head = f.len < 8000 ? f.len : 8000;
    unsigned char *copy = malloc(f.len);
    for (int i = 0; i < 3000; i++) {
        memcpy(copy, f.p, f.len);
        for (uint64_t n = 1 + tiny_random(&rng) % 3; n > 0; n--)
            copy[tiny_random(&rng) % head] = (unsigned char)tiny_random(&rng);
        LLVMFuzzerTestOneInput(copy, f.len);
    }
    ok(true, "3,000 files with random damage are survived");
    free(copy);
    bytes_free(&f);
}

static void corpus_is_survived(void)
{
    const char *dir = "tests/fuzz/corpus/gguf";
    DIR *d = opendir(dir);
    int n = 0;
    for (struct dirent *e; d != NULL && (e = readdir(d)) != NULL;) {
        char path[512];
        snprintf(path, sizeof path, "%s/%s", dir, e->d_name);
        FILE *f = e->d_name[0] == '.' ? NULL : fopen(path, "rb");
        if (f == NULL)
            continue;
        static uint8_t data[1 << 20];
        LLVMFuzzerTestOneInput(data, fread(data, 1, sizeof data, f));
        fclose(f);
        n++;
    }
    if (d != NULL)
        closedir(d);
    ok(n >= 8, "the %d files of the fuzz corpus are survived", n);
}

static void save_seed(struct gguf_writer *w, const char *dir, const char *name)
{
    char path[512];
    struct bytes f = gw_finish(w);
    snprintf(path, sizeof path, "%s/%s", dir, name);
    bytes_save(&f, path);
    bytes_free(&f);
}

/* Small, so that mutations meet structure and not weights. */
static int write_seeds(const char *dir)
{
    static const enum dtype types[] = {DTYPE_F32,  DTYPE_F16,  DTYPE_BF16, DTYPE_Q4_0,
                                       DTYPE_Q4_1, DTYPE_Q5_0, DTYPE_Q5_1, DTYPE_Q8_0};
    for (size_t i = 0; i < ARRAY_LEN(types); i++) {
        struct gguf_writer w = {.align = i % 2 ? 8 : 0};
        tiny_model(&w, &(struct tiny_spec){.layers = 1,
                                           .hidden = 32,
                                           .ff = 32,
                                           .heads = 2,
                                           .kv_heads = 1,
                                           .type = types[i],
                                           .embed_type = DTYPE_Q4_0,
                                           .untied = i % 3 == 0,
                                           .rope_freqs = i % 2,
                                           .templated = i % 2});
        save_seed(&w, dir, dtype_find(types[i])->name);
    }
    struct gguf_writer w = {0};
    const uint64_t ne[] = {256, 2};
    gw_array(&w, "a", GGUF_BOOL, 2), put(&w.keys, "\0\1", 2);
    gw_array(&w, "b", GGUF_STRING, 1), put_string(&w.keys, "x");
    gw_key(&w, "c", GGUF_F64), put_u64(&w.keys, 0);
    gw_tensor(&w, "k", DTYPE_Q4_K, 2, ne, NULL, 288);
    gw_tensor(&w, "l", DTYPE_Q6_K, 1, ne, NULL, 210);
    save_seed(&w, dir, "values");
    return 0;
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "--seeds") == 0)
        return write_seeds(argv[2]);
    char dir[] = "/tmp/spind-gguf-XXXXXX";
    if (mkdtemp(dir) == NULL)
        return 1;
    log_set_level(LOG_ERROR);
    what_is_written_is_read();
    numbers_of_any_width_are_taken();
    item_1_the_file(dir);
    item_2_every_prefix_of_a_file_is_refused();
    item_3_counts();
    item_4_strings();
    item_5_arrays();
    item_6_duplicates();
    item_7_types_of_known_keys();
    item_8_tensors();
    item_9_ranges();
    families_have_what_they_have();
    item_10_the_vocabulary();
    tensors_must_be_there();
    a_file_cut_short_while_open_is_survived(dir);
    a_file_is_read_like_memory(dir);
    files_with_random_damage_are_survived();
    corpus_is_survived();
    rmdir(dir);
    return tap_done();
}
