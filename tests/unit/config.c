/* server/config.c: one table, four sources, and messages that help. */
#include <math.h>
#include <unistd.h>

#include "api/call.h"
#include "api/json.h"
#include "server/config.h"
#include "tests/tap.h"

static const char *env_name, *env_value;

static char *fake_env(const char *name)
{
    return env_name != NULL && strcmp(name, env_name) == 0 ? (char *)env_value : NULL;
}

#define LOAD(cfg, ...)                                    \
    load((cfg), (const char *const[]){"", ##__VA_ARGS__}, \
         (int)(sizeof((const char *const[]){"", ##__VA_ARGS__}) / sizeof(char *)))

static status load(struct config *cfg, const char *const *words, int n)
{
    char *argv[32];
    for (int i = 1; i < n; i++)
        argv[i - 1] = (char *)words[i];
    return config_load(cfg, n - 1, argv, fake_env);
}

static void loads(const char *name, bool good)
{
    ok(good, "%s%s%s", name, good ? "" : ": ", good ? "" : err_text());
}

static void fails_saying(status st, const char *words, const char *name)
{
    ok(st != OK && strstr(err_text(), words) != NULL, "%s", name);
    if (st == OK || strstr(err_text(), words) == NULL)
        printf("#   got: %s\n", st == OK ? "OK" : err_text());
}

static void numbers_have_suffixes(void)
{
    static const struct {
        const char *text;
        uint64_t want;
    } good[] = {{"0", 0},
                {"32000", 32000},
                {"32k", 32000},
                {"32K", 32768},
                {"25.6k", 25600},
                {"1M", 1048576},
                {"1m", 1000000},
                {"1.5G", 1610612736},
                {"4GiB", 4294967296},
                {"0.5K", 512},
                {"18446744073709551615", UINT64_MAX}};
    for (size_t i = 0; i < ARRAY_LEN(good); i++) {
        uint64_t got = 7;
        ok(options_number(good[i].text, &got) == OK && got == good[i].want, "%s is %llu",
           good[i].text, (unsigned long long)good[i].want);
    }
    static const char *const bad[] = {
        "",   "k",  "-1",  "1x", "1 k", "0x10", "1e3",   "1.0001k",     "18446744073709551616",
        " 1", "+1", "1.5", ".",  "1KB", "nan",  "1,000", "99999999999T"};
    for (size_t i = 0; i < ARRAY_LEN(bad); i++) {
        uint64_t got;
        ok(options_number(bad[i], &got) != OK, "\"%s\" is not a number", bad[i]);
    }
}

static void defaults_are_the_limits_promised(void)
{
    struct config c;
    loads("no arguments are fine", LOAD(&c) == OK);
    is_int(c.net.port, 8000, "port 8000");
    ok(strcmp(c.net.host, "127.0.0.1") == 0, "on loopback");
    is_int(c.net.max_connections, 1024, "1024 connections");
    is_int(c.net.max_per_address, 128, "128 per address");
    ok(!c.net.cap_loopback, "except from loopback");
    is_int(c.limits.header_us, 10000000, "10 s for headers");
    is_int(c.limits.body_us, 30000000, "30 s for a body");
    is_int(c.limits.body_min_rate, 8192, "8 KiB/s at least");
    is_int(CONN_BODY_GRACE_US, 5000000, "after 5 s");
    is_int(c.limits.idle_us, 60000000, "60 s between requests");
    is_int(c.limits.stall_us, 30000000, "30 s without a byte taken");
    is_int(c.limits.max_requests, 1000, "1000 requests per connection");
    is_int(HTTP_HEAD_MAX, 16384, "16 KiB of request line and headers");
    is_int(HTTP_FIELDS_MAX, 64, "64 header fields");
    is_int(HTTP_TARGET_MAX, 2048, "2 KiB of target");
    is_int(c.api.max_body_bytes, 0, "a body of 4 MiB or 20 bytes per token of context");
    is_int(JSON_MAX_DEPTH, 32, "JSON 32 deep");
    is_int(JSON_MAX_VALUES, 65536, "of 65,536 values");
    is_int(c.limits.stream_hard_bytes, 262144, "256 KiB of a stream unsent");
    is_int(SOFT_UNSENT, 65536, "from 64 KiB on its events are joined");
    is_int(c.api.max_n, 8, "n up to 8");
    is_int(c.api.max_logprobs, 20, "20 log-probabilities");
    is_int(MAX_STOPS, 16, "16 stops");
    is_int(MAX_STOP_BYTES, 256, "of 256 bytes");
    is_int(MAX_BIAS, 300, "300 entries of logit_bias");
    is_int(c.api.max_queued_requests, 256, "256 requests may wait");
    is_int(c.api.max_queued_tokens, 1048576, "with 1 Mi tokens");
    is_int(c.api.queue_timeout_s, 30, "for 30 s");
    is_int(c.drain_us, 30000000, "30 s to drain");
    ok(c.engine.prefix_caching && c.api.prompt_tokens_details, "switches that are on are on");
    ok(isnan(c.api.default_temperature), "no default temperature");
    ok(c.engine.seed != 0, "the cache's secret is random");
    ok(!config_is_open(&c), "loopback without a key is not open");
    config_fini(&c);
}

static void flags_have_many_spellings(void)
{
    struct config c;
    loads("value after a blank", LOAD(&c, "--max-model-len", "32k") == OK);
    is_int(c.engine.max_model_len, 32000, "  is read");
    config_fini(&c);
    loads("value after =", LOAD(&c, "--max_model_len=32K") == OK);
    is_int(c.engine.max_model_len, 32768, "  with underscores too");
    config_fini(&c);
    loads("llama.cpp's names", LOAD(&c, "-c", "4096", "-np", "4", "-m", "x.gguf", "-t", "3") == OK);
    ok(c.engine.max_model_len == 4096 && c.engine.max_num_seqs == 4 &&
           c.engine.cpu.n_threads == 3 && strcmp(c.engine.model, "x.gguf") == 0,
       "  mean the same");
    config_fini(&c);
    loads("-1 and auto", LOAD(&c, "--max-model-len", "-1", "--threads", "auto") == OK);
    is_int(c.engine.max_model_len + c.engine.cpu.n_threads, 0, "  leave the choice");
    config_fini(&c);
    loads("twins", LOAD(&c, "--no-enable-prefix-caching", "--no-prompt-tokens-details",
                        "--strict_fields", "--accept-any-model=true") == OK);
    ok(!c.engine.prefix_caching && !c.api.prompt_tokens_details && c.api.strict_fields &&
           c.api.accept_any_model,
       "  switch off and on");
    config_fini(&c);
    loads("lists", LOAD(&c, "x.gguf", "--served-model-name", "a", "b", "--api-key", "k1", "k2",
                        "--api-key=k3", "-a", "c,d") == OK);
    ok(c.api.n_names == 4 && strcmp(c.api.served_names[3], "d") == 0, "  grow");
    ok(c.api.n_keys == 3 && strcmp(c.api.keys[2], "k3") == 0, "  with each flag");
    config_fini(&c);
    loads("a path", LOAD(&c, "/models/some.model-Q4.gguf") == OK);
    ok(c.api.n_names == 1 && strcmp(c.api.served_names[0], "some.model-Q4") == 0,
       "  names the model after its file");
    config_fini(&c);
    loads("vLLM flags without meaning here",
          LOAD(&c, "--dtype", "auto", "--tensor_parallel_size=1", "--no-enable-chunked-prefill",
               "--trust-remote-code", "x.gguf") == OK);
    ok(c.engine.model != NULL && strcmp(c.engine.model, "x.gguf") == 0,
       "  take their values along");
    config_fini(&c);
    loads("vLLM's name of fp8 pages", LOAD(&c, "--kv-cache-dtype", "fp8", "x.gguf") == OK);
    ok(c.engine.kv_type == KV_E4M3, "  reaches the engine");
    config_fini(&c);
    loads("none", LOAD(&c, "x.gguf") == OK);
    ok(c.engine.kv_type == KV_BF16, "  means bf16");
    config_fini(&c);
    loads("vLLM flags of the GPU",
          LOAD(&c, "--enforce-eager", "--gpu-memory-utilization", "0.5", "x.gguf") == OK);
    ok(c.engine.cuda.eager && fabs(c.engine.device_share - 0.5) < 1e-9, "  reach the engine");
    config_fini(&c);
}

/* One option, one value: in the field's unit, seconds as their text is written. */
static bool takes(const struct option *o, uint64_t n)
{
    struct config c;
    char word[128];
    if (o->type == OPTION_SECONDS)
        snprintf(word, sizeof word, "--%s=%llu.%03u", o->name, (unsigned long long)n / 1000,
                 (unsigned)(n % 1000));
    else
        snprintf(word, sizeof word, "--%s=%llu", o->name, (unsigned long long)n);
    bool good = LOAD(&c, word) == OK;
    if (!good && strstr(err_text(), o->name) == NULL) /* the message must say which */
        printf("# %s\n", err_text());
    config_fini(&c);
    return good;
}

static void every_range_has_two_edges(void)
{
    for (uint32_t i = 0; i < options_count; i++) {
        const struct option *o = &options_table[i];
        if (o->type != OPTION_COUNT && o->type != OPTION_BYTES && o->type != OPTION_SECONDS)
            continue;
        ok(takes(o, o->min) && takes(o, o->max), "--%s may be %llu and %llu", o->name,
           (unsigned long long)o->min, (unsigned long long)o->max);
        bool below = o->min == 0 || !takes(o, o->min - 1);
        ok(below && (o->max == UINT64_MAX || !takes(o, o->max + 1)), "  but nothing beyond");
    }
    const struct option *n = &options_table[options_find("max-n", 5)];
    ok(takes(n, 128) && !takes(n, 129), "--max-n 128 is the largest there is");
}

static const char *in_file(const char *text)
{
    static char path[64];
    snprintf(path, sizeof path, "/tmp/spind-config-%d.json", (int)getpid());
    FILE *f = fopen(path, "w");
    fputs(text, f);
    fclose(f);
    return path;
}

static void numbers_have_two_edges(void)
{
    static const struct {
        const char *good[4], *bad[4];
    } flags[] = {
        {{"--sparse-budget=1e-6", "--sparse-budget=1", "--sparse-budget=300",
          "--sparse-budget=1073741824"},
         {"--sparse-budget=0", "--sparse-budget=-1", "--sparse-budget=1073741825",
          "--sparse-budget=5%"}},
        {{"--sparse-top-p=1", "--sparse-top-p=0.001", "--sparse-top-p=.5", "--sparse-top-p=1e-3"},
         {"--sparse-top-p=0", "--sparse-top-p=1.01", "--sparse-top-p=nan", "--sparse-top-p= 1"}},
        {{"--miss-threshold=0", "--miss-threshold=1", "--miss-threshold=0.05",
          "--miss-threshold=5e-2"},
         {"--miss-threshold=-0.1", "--miss-threshold=1.1", "--miss-threshold=inf",
          "--miss-threshold=0x1"}},
        {{"--head-policy-sparsity=0", "--head-policy-sparsity=1", "--head-policy-sparsity=auto",
          "--head-policy-sparsity=-1"},
         {"--head-policy-sparsity=-0.5", "--head-policy-sparsity=2",
          "--head-policy-sparsity=", "--head-policy-sparsity=half"}},
        {{"--transfer-headroom=0", "--transfer-headroom=100", "--transfer-headroom=0.5",
          "--transfer-headroom=1.5"},
         {"--transfer-headroom=-1", "--transfer-headroom=101", "--transfer-headroom=auto",
          "--transfer-headroom=1e9"}},
    };
    struct config c;
    for (size_t i = 0; i < ARRAY_LEN(flags); i++)
        for (int k = 0; k < 4; k++) {
            ok(LOAD(&c, flags[i].good[k], "--head-policy=duo", "--head-policy-file=f") == OK, "%s",
               flags[i].good[k]);
            config_fini(&c);
            fails_saying(LOAD(&c, flags[i].bad[k]), "must be a number", flags[i].bad[k]);
            config_fini(&c);
        }
    fails_saying(LOAD(&c, "--sparse-budget=0"), "must be a number, above 0 to 1073741824",
                 "the range is told");
    config_fini(&c);
}

static void sparse_attention_is_chosen(void)
{
    struct config c;
    loads("no flags", LOAD(&c) == OK);
    const struct sparse_choice *s = &c.engine.sparse;
    ok(s->plugin == 0 && s->budget == 0.05f && s->interval == 1 && s->min_rows == 0 &&
           s->top_p == 1 && s->miss_threshold == 0 && c.engine.sparse_min_context == 0,
       "  dense, a budget of 5 %% for who asks");
    ok(strcmp(c.engine.heads.name, "none") == 0 && c.engine.heads.exempt_layers == 1 &&
           c.engine.heads.sparsity == -1 && c.engine.heads.file == NULL &&
           c.engine.heads.sinks == 0 && c.engine.heads.recent == 0,
       "  no head policy, one layer exempt");
    ok(c.engine.transfer_headroom == 1 && c.engine.write_behind &&
           c.engine.record_selection == NULL,
       "  transfers hide behind steps");
    config_fini(&c);
    loads("everything",
          LOAD(&c, "--sparse", "wave", "--sparse-budget", "0.02", "--sparse-option", "estimate=0.5",
               "--sparse-option", "outliers=2", "x.gguf", "--sparse-interval=2",
               "--sparse-min-rows=1k", "--sparse-top-p=0.9", "--miss-threshold", "0.05",
               "--sparse-min-context", "4k", "--head-policy", "DUO", "--head-policy-file", "f",
               "--head-policy-sparsity", "0.25", "--head-policy-sinks=32",
               "--head-policy-recent=512", "--sparse-exempt-layers=0", "--no-write-behind") == OK);
    ok(strcmp(sparse_at(s->plugin)->name, "wave") == 0 && s->budget == 0.02f &&
           s->values[1] == 0.5 && s->values[0] == 2 && s->interval == 2 && s->min_rows == 1000 &&
           s->top_p == 0.9f && s->miss_threshold == 0.05f && c.engine.sparse_min_context == 4000,
       "  arrives");
    ok(strcmp(c.engine.heads.name, "duo") == 0 && strcmp(c.engine.heads.file, "f") == 0 &&
           c.engine.heads.sparsity == 0.25f && c.engine.heads.sinks == 32 &&
           c.engine.heads.recent == 512 && c.engine.heads.exempt_layers == 0 &&
           !c.engine.write_behind,
       "  the policy of heads too");
    ok(strcmp(c.engine.model, "x.gguf") == 0, "  an option takes one word, not the model's");
    config_fini(&c);
    char *path = (char *)in_file("{\"sparse\": \"wave\", \"sparse-budget\": 0.1, "
                                 "\"sparse-option\": [\"estimate=0\", \"balance=off\"]}");
    loads("from a file", LOAD(&c, "--config", path) == OK);
    ok(s->budget == 0.1f && s->values[1] == 0 && s->values[2] == 0, "  the same");
    config_fini(&c);
    unlink(path);
}

static void sparse_mistakes_are_exact(void)
{
    static const struct {
        const char *a, *b, *text;
    } bad[] = {
        {"--sparse=wawe", "--port=1",
         "--sparse: unknown plug-in \"wawe\"; there are dense, oracle, quest, wave"},
        {"--sparse=wave", "--sparse-option=estimate",
         "--sparse-option: estimate: must be name=value"},
        {"--sparse=wave", "--sparse-option==1", "--sparse-option: =1: must be name=value"},
        {"--sparse=wave", "--sparse-option=estimate=2",
         "--sparse-option: estimate must be a number, 0 to 1, got 2"},
        {"--sparse=quest", "--sparse-option=estimate=1",
         "--sparse-option: unknown option \"estimate\" of plug-in quest, which has reduce"},
        {"--sparse=dense", "--sparse-option=estimate=1",
         "--sparse-option: unknown option \"estimate\" of plug-in dense, which has none"},
        {"--sparse=wave", "--sparse-option=budget=1",
         "--sparse-option: budget is no option of a plug-in; it has a flag of its own"},
        {"--plugin=/nonexistent.so", "--port=1",
         "--plugin: /nonexistent.so: cannot open shared object file: No such file or directory"},
        {"--head-policy=duo", "--port=1", "--head-policy duo needs --head-policy-file"},
        {"--head-policy=razor", "--port=1", "--head-policy razor needs --head-policy-file"},
        {"--head-policy=streaming", "--head-policy-file=x",
         "--head-policy-file: --head-policy streaming reads no file"},
        {"--head-policy=duet", "--port=1",
         "--head-policy: duet: must be one of none|streaming|duo|razor"},
        {"--head-policy=razor", "--head-policy-sparsity=0.5",
         "--head-policy-sparsity: --head-policy duo alone has one"},
        {"--head-policy-sinks=17", "--port=1", "--head-policy-sinks: 17: must be a multiple of 16"},
        {"--head-policy-recent=100", "--port=1",
         "--head-policy-recent: 100: must be a multiple of 16"},
    };
    for (size_t i = 0; i < ARRAY_LEN(bad); i++) {
        struct config c;
        status st = LOAD(&c, bad[i].a, bad[i].b);
        if (!ok(st == ERR_ARG && strcmp(err_text(), bad[i].text) == 0, "%s", bad[i].text))
            printf("#   got %s\n", st == OK ? "OK" : err_text());
        config_fini(&c);
    }
}

static void mistakes_are_explained(void)
{
    struct config c;
    fails_saying(LOAD(&c, "--prot", "1"), "did you mean --port?",
                 "a typing error gets a suggestion");
    config_fini(&c);
    fails_saying(LOAD(&c, "--max-model-length", "1"), "did you mean --max-model-len?", "another");
    config_fini(&c);
    fails_saying(LOAD(&c, "--xyzzy-plugh"), "--help", "nothing near: where to look");
    config_fini(&c);
    fails_saying(LOAD(&c, "--port"), "--port needs a value", "a value is missing");
    config_fini(&c);
    fails_saying(LOAD(&c, "--port", "--host"), "--port needs a value", "a flag is no value");
    config_fini(&c);
    fails_saying(LOAD(&c, "--port=70000"), "0 to 65535", "out of range");
    config_fini(&c);
    fails_saying(LOAD(&c, "--block-size", "12"), "8|16", "not a choice");
    config_fini(&c);
    fails_saying(LOAD(&c, "--kv-cache-dtype", "fp8_e5m2"), "fp8_e4m3", "nor is e5m2");
    config_fini(&c);
    fails_saying(LOAD(&c, "--no-port"), "unknown option", "only switches have twins");
    config_fini(&c);
    fails_saying(LOAD(&c, "--strict-fields=maybe"), "true or false", "switches are true or false");
    config_fini(&c);
    fails_saying(LOAD(&c, "--drain-timeout", "-3"), "seconds", "negative seconds");
    config_fini(&c);
    fails_saying(LOAD(&c, "--override-generation-config", "{\"temperature\":3}"), "temperature",
                 "a default out of range");
    config_fini(&c);
}

static void sources_have_an_order(void)
{
    struct config c;
    char *path =
        (char *)in_file("{\"//\": \"mine\", \"port\": 1111, \"//port\": \"why\", \"host\": "
                        "\"::1\", \"max_num_seqs\": \"1k\", \"api-key\": [\"f1\", \"f2\"], "
                        "\"strict-fields\": true, \"seed\": null, \"idle-timeout\": 1.5}");
    loads("a file is read", LOAD(&c, "--config", path) == OK);
    ok(c.port == 1111 && strcmp(c.host, "::1") == 0 && c.engine.max_num_seqs == 1000 &&
           c.api.n_keys == 2 && c.api.strict_fields && c.limits.idle_us == 1500000,
       "with every type of value, - or _");
    config_fini(&c);
    env_name = "PORT", env_value = "2222";
    loads("environment", LOAD(&c, "--config", path) == OK);
    is_int(c.port, 2222, "  wins over the file");
    config_fini(&c);
    loads("flag", LOAD(&c, "--port", "3333", "--config", path, "--api-key", "g") == OK);
    is_int(c.port, 3333, "  wins over the environment");
    ok(c.api.n_keys == 1 && strcmp(c.api.keys[0], "g") == 0, "  and replaces a list");
    config_fini(&c);
    env_name = "HOST", env_value = "x86_64-conda-linux-gnu";
    loads("conda's HOST", LOAD(&c) == OK);
    ok(strcmp(c.host, "127.0.0.1") == 0, "  is not an address");
    config_fini(&c);
    env_name = "VLLM_LOGGING_LEVEL", env_value = "DEBUG";
    loads("VLLM_LOGGING_LEVEL", LOAD(&c) == OK);
    ok(strcmp(c.log_level, "debug") == 0, "  may be in capitals");
    config_fini(&c);
    env_name = NULL;
    unlink(path);
}

static void files_are_checked(void)
{
    static const struct {
        const char *text, *words, *name;
    } bad[] = {
        {"{\"prot\": 1}", "did you mean \"port\"?", "an unknown key gets a suggestion"},
        {"{\"//prot\": \"x\"}", "did you mean \"port\"?", "so does an unknown key's note"},
        {"{\"//port\": 1}", "must be a string", "a note is text"},
        {"{\"port\": 1, \"port\": 2}", "there twice", "a key is there once"},
        {"{\"max-num-seqs\": 1, \"parallel\": 2}", "there twice", "under any of its names"},
        {"{\"port\": [1]}", "one value", "a list where one value belongs"},
        {"{\"port\": {}}", "must be a string", "an object nowhere"},
        {"{\"port\": 1.5}", "whole", "half a port"},
        {"{\"port\": true}", "must be", "a switch for a number"},
        {"{\"config\": \"x\"}", "only be given as a flag", "a file that names a file"},
        {"{\n\"port\": 1,\n}", "line 3", "broken JSON, by line"},
        {"[1]", "object", "not an object"},
        {"", "not JSON", "nothing"},
        {"{} x", "not JSON", "something after it"},
    };
    for (size_t i = 0; i < ARRAY_LEN(bad); i++) {
        struct config c;
        char *path = (char *)in_file(bad[i].text);
        fails_saying(LOAD(&c, "--config", path), bad[i].words, bad[i].name);
        config_fini(&c);
        unlink(path);
    }
}

static void secrets_stay_secret(void)
{
    struct config c;
    char text[2048];
    loads("a key", LOAD(&c, "--api-key", "S3CRET", "--port", "9") == OK);
    config_describe(&c, text, sizeof text);
    ok(strstr(text, "S3CRET") == NULL && strstr(text, "api-key=***") && strstr(text, "port=9"),
       "  is not described, other flags are");
    config_fini(&c);
    loads("a host with a key", LOAD(&c, "--host", "0.0.0.0", "--api-key", "k") == OK);
    ok(!config_is_open(&c), "  is not open");
    config_fini(&c);
    loads("a host without", LOAD(&c, "--host", "0.0.0.0") == OK);
    ok(config_is_open(&c), "  is");
    config_fini(&c);
}

/* The file in the tree is what --print-config prints, so it explains every key and is up to date. */
static void the_explained_file_is_complete(void)
{
    static char want[1 << 16], got[1 << 16];
    struct config c;
    char path[64];
    FILE *f = fopen("configs/default.json", "r");
    size_t n = f == NULL ? 0 : fread(want, 1, sizeof want - 1, f);
    if (f != NULL)
        fclose(f);
    loads("defaults", LOAD(&c, "--print-config") == OK && c.action == CONFIG_PRINT);
    snprintf(path, sizeof path, "/tmp/spind-print-%d.json", (int)getpid());
    fflush(stdout);
    int saved = dup(STDOUT_FILENO);
    f = freopen(path, "w", stdout);
    config_print(&c);
    fflush(stdout);
    dup2(saved, STDOUT_FILENO);
    close(saved);
    config_fini(&c);
    f = fopen(path, "r");
    size_t m = fread(got, 1, sizeof got - 1, f);
    fclose(f);
    unlink(path);
    ok(n > 0 && n == m && memcmp(want, got, n) == 0,
       "configs/default.json is what spind serve --print-config prints");
    loads("and is read back", LOAD(&c, "--config", "configs/default.json") == OK);
    is_int(c.port, 8000, "as the defaults");
    config_fini(&c);
    for (uint32_t i = 0; i < options_count; i++)
        if (strlen(options_table[i].help) < 20)
            ok(0, "%s is explained", options_table[i].name);
}

static void models_have_defaults_of_their_own(void)
{
    struct config c;
    loads("configs/serve/smollm2-135m-instruct.json",
          LOAD(&c, "--config", "configs/serve/smollm2-135m-instruct.json") == OK);
    ok(strcmp(sparse_at(c.engine.sparse.plugin)->name, "wave") == 0 && c.block_rows == 8 &&
           c.engine.sparse.budget > 0 && c.engine.sparse.budget <= 1,
       "chooses a plug-in, a page and a budget");
    config_fini(&c);
}

static void no_name_is_taken_twice(void)
{
    uint32_t bad = 0;
    for (uint32_t i = 0; i < options_count; i++) {
        const char *name = options_table[i].name;
        bad += options_find(name, strlen(name)) != (int)i ||
               options_find_ignored(name, strlen(name)) >= 0;
        char list[128];
        snprintf(list, sizeof list, "%s",
                 options_table[i].aliases == NULL ? "" : options_table[i].aliases);
        for (char *rest = NULL, *a = strtok_r(list, ", ", &rest); a != NULL;
             a = strtok_r(NULL, ", ", &rest))
            if (options_find(a, strlen(a)) != (int)i || options_find_ignored(a, strlen(a)) >= 0) {
                printf("# %s\n", a);
                bad++;
            }
    }
    is_int(bad, 0, "every name and alias finds its own row");
}

int main(void)
{
    numbers_have_suffixes();
    defaults_are_the_limits_promised();
    flags_have_many_spellings();
    every_range_has_two_edges();
    numbers_have_two_edges();
    sparse_attention_is_chosen();
    sparse_mistakes_are_exact();
    mistakes_are_explained();
    sources_have_an_order();
    files_are_checked();
    secrets_stay_secret();
    the_explained_file_is_complete();
    models_have_defaults_of_their_own();
    no_name_is_taken_twice();
    return tap_done();
}
