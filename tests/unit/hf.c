/* Descriptions of models (config.json): what is read from the ones we ship, what is refused and in which
 * words, and what the vocabulary of a model without one does. */
#include "engine/model/internal.h"
#include "kernels/log.h"
#include "tests/tap.h"

#include <math.h>
#include <unistd.h>

/* A small qwen3 with its keys as lines, so that a case can replace one. */
static const char *const lines[] = {
    "\"architectures\": [\"Qwen3ForCausalLM\"]",
    "\"hidden_size\": 64",
    "\"intermediate_size\": 96",
    "\"num_hidden_layers\": 2",
    "\"num_attention_heads\": 4",
    "\"num_key_value_heads\": 2",
    "\"head_dim\": 32",
    "\"max_position_embeddings\": 512",
    "\"vocab_size\": 1000",
    "\"eos_token_id\": [7, 999]",
};

/* change: a line that replaces the one with its key, or comes on top; "-key": leaves it out. */
static void write_config(char *out, size_t room, const char *change)
{
    size_t at = (size_t)snprintf(out, room, "{");
    const char *key = change[0] == '-' ? change + 1 : change;
    size_t len = change[0] == '-' ? strlen(key) : strcspn(change + 1, "\"") + 2;
    for (size_t i = 0; i < ARRAY_LEN(lines); i++) {
        bool same = change[0] == '-' ? strncmp(lines[i] + 1, key, len) == 0
                                     : len > 2 && strncmp(lines[i], key, len) == 0;
        if (!same)
            at += (size_t)snprintf(out + at, room - at, "%s%s", at > 1 ? ", " : "", lines[i]);
    }
    snprintf(out + at, room - at, "%s%s}", change[0] == '-' ? "" : ", ",
             change[0] == '-' ? "" : change);
}

static status read_text(const char *text, size_t len, struct plan *p, struct dictionary *d)
{
    /* A copy of exactly this size: reading beyond it is seen. */
    char *copy = mem_alloc(len + 1);
    memcpy(copy, text, len);
    status st = hf_plan_text(p, d, copy, len, "t.json");
    mem_free(copy);
    return st;
}

static void done(struct plan *p, struct dictionary *d)
{
    plan_fini(p);
    tokenizer_destroy(d->tokenizer);
}

static void refused_text(const char *text, size_t len, const char *want, const char *sentence)
{
    struct plan p;
    struct dictionary d;
    status st = read_text(text, len, &p, &d);
    bool good = st != OK && strncmp(err_text(), "t.json: ", 8) == 0 && strstr(err_text(), want);
    if (!ok(good, "%s", sentence))
        printf("#   got %s \"%s\"\n#   want \"%s\"\n", status_name(st), st ? err_text() : "", want);
    if (st == OK)
        done(&p, &d);
}

static void refused(const char *change, const char *want, const char *sentence)
{
    char text[4096];
    write_config(text, sizeof text, change);
    refused_text(text, strlen(text), want, sentence);
}

static bool taken(const char *change, struct plan *p, struct dictionary *d)
{
    char text[4096];
    write_config(text, sizeof text, change);
    status st = read_text(text, strlen(text), p, d);
    if (st != OK)
        printf("# %s\n", err_text());
    return st == OK;
}

static void numbers_out_of_range_are_refused(void)
{
    refused("\"num_hidden_layers\": 0",
            "\"num_hidden_layers\" is 0, must be a whole number from 1 to 1024", "no layers");
    refused("\"num_hidden_layers\": 1025", "is 1025, must be", "too many layers");
    refused("\"hidden_size\": -4096", "\"hidden_size\" is -4096, must be", "a negative width");
    refused("\"hidden_size\": 64.5", "\"hidden_size\" is 64.5, must be a whole number",
            "half a number");
    refused("\"hidden_size\": 1e300", "\"hidden_size\" is 1e+300, must be",
            "a width beyond integers");
    refused("\"hidden_size\": 1e999", "\"hidden_size\" is inf, must be", "an infinite width");
    refused("\"hidden_size\": \"64\"", "\"hidden_size\" must be a whole number from 1 to 65536",
            "a number as a string");
    refused("\"hidden_size\": null", "\"hidden_size\" is missing", "null is absent");
    refused("-intermediate_size", "\"intermediate_size\" is missing", "a number that is not there");
    refused("\"intermediate_size\": 1048577", "must be a whole number from 1 to 1048576",
            "a feed-forward layer beyond reason");
    refused("\"vocab_size\": 258", "must be a whole number from 259 to 2097152",
            "a vocabulary that cannot hold the bytes");
    refused("\"vocab_size\": 4294967296", "\"vocab_size\" is 4294967296", "2^32 tokens are not 0");
    refused("\"max_position_embeddings\": 16777217", "must be a whole number from 1 to 16777216",
            "too many positions");
    refused("\"num_key_value_heads\": 3", "4 heads cannot share 3 KV heads evenly",
            "uneven groups");
    refused("\"num_key_value_heads\": 0", "\"num_key_value_heads\" is 0", "no KV heads");
    refused("\"num_attention_heads\": 0", "\"num_attention_heads\" is 0", "no heads");
    refused("\"head_dim\": 33", "a head has 33 numbers, allowed are even ones", "an odd head");
    refused("\"head_dim\": 514", "\"head_dim\" is 514, must be", "a head that is too wide");
    refused("\"rms_norm_eps\": 0", "\"rms_norm_eps\" is 0, must be a number", "no epsilon");
    refused("\"rope_theta\": 1", "\"rope_theta\" is 1, must be", "a RoPE base of 1");
    refused("\"eos_token_id\": 1000", "\"eos_token_id\" must be a token, 0 to 999",
            "an end that is no token");
    refused("\"eos_token_id\": [1, -1]", "\"eos_token_id\" must be a token", "nor in a list");
    refused("\"eos_token_id\": [1,2,3,4,5,6,7,8,9]", "more than 8 \"eos_token_id\"",
            "too many ends");
    refused("\"tie_word_embeddings\": 1", "must be true or false", "a switch that is a number");
}

static void what_is_not_served_is_named(void)
{
    refused("\"architectures\": [\"GemmaForCausalLM\"]",
            "the architecture is \"GemmaForCausalLM\"; spind serves llama, qwen2 and qwen3",
            "another architecture");
    refused("\"architectures\": [\"Qwen3MoeForCausalLM\"]", "\"Qwen3MoeForCausalLM\"", "experts");
    refused("-architectures", "neither \"architectures\" nor \"model_type\"", "no architecture");
    refused("\"hidden_act\": \"gelu\"", "\"hidden_act\" is not served", "another activation");
    refused("\"attention_bias\": true", "\"attention_bias\" is not served", "biases");
    refused("\"mlp_bias\": true", "\"mlp_bias\" is not served", "more biases");
    refused("\"quantization_config\": {\"quant_method\": \"gptq\"}",
            "\"quantization_config\" is not served", "quantised weights");
    refused("\"sliding_window\": 4096", "\"sliding_window\" is not served", "a window");
    refused("\"layer_types\": [\"full_attention\", \"sliding_attention\"]",
            "\"layer_types\" other than full_attention", "a window in one layer");
    refused("\"partial_rotary_factor\": 0.5", "\"partial_rotary_factor\" is 0.5",
            "half a rotation");
    refused("\"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 4}",
            "rope_type \"yarn\" is not served; default, linear and llama3 are", "another scaling");
    refused("\"rope_scaling\": 8", "\"rope_scaling\" must be an object or null",
            "a scaling that is none");
    refused("\"rope_scaling\": {\"type\": \"llama3\", \"factor\": 8, \"low_freq_factor\": 4, "
            "\"high_freq_factor\": 4, \"original_max_position_embeddings\": 8192}",
            "\"high_freq_factor\" 4 must be above \"low_freq_factor\" 4", "a band of no width");
    refused("\"rope_scaling\": {\"type\": \"llama3\", \"factor\": 8, \"low_freq_factor\": 1, "
            "\"high_freq_factor\": 4}",
            "\"original_max_position_embeddings\" is missing", "half of a scaling");
}

static void texts_that_are_no_description_are_refused(void)
{
    char deep[200];
    memset(deep, '[', sizeof deep);
    refused_text("", 0, "line 1: not JSON", "an empty file");
    refused_text("GGUF\3\0\0\0", 8, "a GGUF file, whose weights are served without --load-format",
                 "a GGUF file");
    refused_text("{\"a\": 1,\n 2}", 12, "line 2: not JSON", "broken JSON, with its line");
    refused_text("[1]", 3, "must be a JSON object", "a list");
    refused_text("{} x", 4, "not JSON", "something after the end");
    refused_text("{\"a\0\": 1}", 9, "not a text", "a NUL");
    refused_text(deep, sizeof deep, "nested deeper than 32", "depth that would cost stack");
    refused_text("{\"vocab_size\": 1, \"vocab_size\": 2}", 34, "\"vocab_size\" is there twice",
                 "a key that is there twice");
    static const char quoted[] = "{\"a\": \"[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[\\\"[[[[\"}";
    refused_text(quoted, sizeof quoted - 1, "neither", "brackets in a text are no depth");
    char *large = mem_alloc((1 << 20) + 2);
    memset(large, ' ', (1 << 20) + 1);
    refused_text(large, (1 << 20) + 1, "larger than 1 MiB", "a file of megabytes");
    mem_free(large);
}

static void a_description_becomes_a_plan(void)
{
    struct plan p;
    struct dictionary d;
    if (!ok(taken("\"rms_norm_eps\": 1e-05", &p, &d), "a small qwen3 is read"))
        return;
    const struct plan_layer *l = &p.layers[1];
    ok(p.shape.layers == 2 && p.shape.hidden == 64 && p.shape.ff == 96 && p.shape.heads == 4 &&
           p.shape.kv_heads == 2 && p.shape.head_dim == 32 && p.shape.vocab == 1000 &&
           p.shape.max_positions == 512,
       "its shape");
    ok(p.shape.norm_eps == 1e-5f && p.shape.rope_base == 1e4f && p.attn_scale == 1 / sqrtf(32),
       "its constants");
    ok(l->q->ne[0] == 64 && l->q->ne[1] == 128 && l->out->ne[0] == 128 && l->out->ne[1] == 64 &&
           l->k->ne[1] == 64 && l->down->ne[0] == 96 && l->q_norm->ne[0] == 32,
       "tensors have the shapes that follow");
    ok(l->bias[0] == NULL && l->q->data == NULL && p.head != NULL, "no biases, no data, a head");
    ok(d.n_end_ids == 2 && d.end_ids[0] == 7 && d.end_ids[1] == 999, "its ends");
    done(&p, &d);
    ok(taken("\"tie_word_embeddings\": true", &p, &d) && p.head == NULL, "a tied head is none");
    done(&p, &d);
    ok(taken("\"architectures\": [\"Qwen2ForCausalLM\"]", &p, &d) && p.layers[0].bias[2] != NULL &&
           p.layers[0].bias[2]->ne[0] == 64 && p.layers[0].q_norm == NULL,
       "qwen2 has biases and no norms of heads");
    done(&p, &d);
    ok(taken("\"head_dim\": null", &p, &d) && p.shape.head_dim == 16, "head_dim has a default");
    done(&p, &d);
    ok(taken("\"rope_parameters\": {\"rope_theta\": 5e5, \"rope_type\": \"linear\", \"factor\": 4}",
             &p, &d) &&
           p.shape.rope_base == 5e5f && p.rope_divisor == 4,
       "the new spelling of RoPE");
    done(&p, &d);
    ok(taken("\"sliding_window\": 4096, \"use_sliding_window\": false", &p, &d),
       "a window that is not used is none");
    done(&p, &d);
}

/* bytes of a weight in numbers: what the published models have. */
static uint64_t count_params(const struct plan *p)
{
    uint64_t n = p->shape.hidden + (uint64_t)p->embedding->ne[0] * p->embedding->ne[1];
    n += p->head ? p->head->ne[0] * p->head->ne[1] : 0;
    for (uint32_t i = 0; i < p->shape.layers; i++) {
        const struct plan_layer *l = &p->layers[i];
        const struct gguf_tensor *all[] = {
            l->attn_norm, l->ffn_norm, l->q,      l->k,      l->v,       l->out,     l->gate,
            l->up,        l->down,     l->q_norm, l->k_norm, l->bias[0], l->bias[1], l->bias[2]};
        for (size_t j = 0; j < ARRAY_LEN(all); j++)
            n += all[j] != NULL ? all[j]->ne[0] * all[j]->ne[1] : 0;
    }
    return n;
}

static void our_descriptions_are_the_published_models(void)
{
    static const struct {
        const char *path;
        uint64_t n_params; /* as Hugging Face counts the safetensors */
    } models[] = {{"configs/models/llama-3.1-8b.json", 8030261248},
                  {"configs/models/qwen3-8b.json", 8190735360},
                  {"configs/models/qwen3-14b.json", 14768307200},
                  {"configs/models/smollm2-135m.json", 134515008}};
    for (size_t i = 0; i < ARRAY_LEN(models); i++) {
        struct plan p;
        struct dictionary d;
        status st = hf_plan(&p, &d, models[i].path);
        if (!ok(st == OK && count_params(&p) == models[i].n_params, "%s has %llu parameters",
                models[i].path, (unsigned long long)models[i].n_params))
            printf("#   got %s %llu\n", st == OK ? "" : err_text(),
                   st == OK ? (unsigned long long)count_params(&p) : 0);
        if (i == 0)
            ok(st == OK && p.llama3.factor == 8 && p.llama3.low == 1 && p.llama3.high == 4 &&
                   p.llama3.original == 8192,
               "and llama 3.1's RoPE");
        if (st == OK)
            done(&p, &d);
    }
    ok(hf_is_config(models[0].path) && !hf_is_config("Makefile") && !hf_is_config("no such file"),
       "a description is known by its first character");
    ok(!hf_is_config("tests"), "a folder without config.json is none");
}

static void bytes_and_numbers_are_the_vocabulary(void)
{
    struct tokenizer *t;
    const uint32_t ends[] = {7, 65, 999};
    struct token_scratch *s = token_scratch_create();
    uint32_t ids[32];
    size_t n;
    CHECK(tokenizer_create_numbered(&t, 1000, ends, 3) == OK);
    ok(tokenizer_vocab(t) == 1000, "as many tokens as asked for");
    CHECK(tokenize(t, s, "A\xc3\xa9<300>", 8, 0, ids, 32, &n) == OK);
    ok(n == 8 && ids[0] == 'A' && ids[1] == 0xc3 && ids[2] == 0xa9 && ids[4] == '3',
       "text becomes its bytes, whatever it looks like");
    struct text_view v = tokenizer_bytes(t, 300), last = tokenizer_bytes(t, 998);
    ok(v.len == 5 && memcmp(v.p, "<300>", 5) == 0 && last.len == 5 && !memcmp(last.p, "<998>", 5),
       "other tokens read as their number");
    ok(tokenizer_is_special(t, 999) && tokenizer_is_special(t, 7) && !tokenizer_is_special(t, 998),
       "ends are not shown");
    ok(!tokenizer_is_special(t, 65), "but for a letter");
    CHECK(tokenize(t, s, "<|im_start|>x", 13, TOKENIZE_SPECIAL, ids, 32, &n) == OK);
    ok(n == 2 && ids[0] == 257 && ids[1] == 'x', "turns of a chat are marked");
    tokenizer_destroy(t);
    token_scratch_destroy(s);
}

int main(void)
{
    log_set_level(LOG_ERROR);
    a_description_becomes_a_plan();
    numbers_out_of_range_are_refused();
    what_is_not_served_is_named();
    texts_that_are_no_description_are_refused();
    our_descriptions_are_the_published_models();
    bytes_and_numbers_are_the_vocabulary();
    return tap_done();
}
