/* Requests from bodies: the vectors of reference/api.md Appendix A that concern fields, and what comes
 * out. Prompts are in request_prompt.c, limits in request_limits.c, "sparse" in request_sparse.c. */
#include "tests/request_rig.h"

/* The table is searched by halves. */
static void the_table_is_sorted(void)
{
    bool sorted = true;
    for (size_t i = 1; request_fields_name(i) != NULL; i++)
        sorted = sorted && strcmp(request_fields_name(i - 1), request_fields_name(i)) <= 0;
    ok(sorted, "every field can be found");
}

static void ranges_have_two_sides(void)
{
    static const struct {
        unsigned kinds;
        const char *name;
        const char *good[4], *bad[4];
    } fields[] = {
        {BOTH, "temperature", {"0", "2", "0.7", "1e-300"}, {"-0.1", "2.1", "-1e-9", "2.0001"}},
        {BOTH, "top_p", {"0.5", "1", "1e-9", "1.0"}, {"0", "1.01", "-0.5", "0.0"}},
        {BOTH, "top_k", {"-1", "0", "1", "1e6"}, {"-2", "1.5", "1e300", "-1e300"}},
        {BOTH, "min_p", {"0", "1", "0.05", "0.0"}, {"-0.1", "1.1", "2", "-1"}},
        {BOTH, "repetition_penalty", {"0.5", "1", "2", "1.1"}, {"0", "-1", "-0.5", "1e30"}},
        {BOTH, "presence_penalty", {"-2", "2", "0", "1.5"}, {"-2.1", "2.1", "3", "-1e9"}},
        {BOTH, "frequency_penalty", {"-2", "2", "0", "1.5"}, {"-2.1", "2.1", "3", "-1e9"}},
        {BOTH, "n", {"1", "8", "2.0", "2"}, {"0", "9", "-1", "1.5"}},
        {BOTH, "min_tokens", {"0", "1", "16", "2.0"}, {"-1", "201", "1.5", "1e300"}},
        {BOTH, "prompt_logprobs", {"0", "20", "5", "1"}, {"-1", "21", "-2", "1.5"}},
        {BOTH,
         "seed",
         {"9223372036854775807", "-9223372036854775808", "0", "-1"},
         {"9223372036854775808", "-9223372036854775809", "1.5", "1e300"}},
        {C, "max_tokens", {"1", "16.0", "200", "16"}, {"0", "-1", "1.5", "1e300"}},
        {H, "max_tokens", {"1", "16.0", "200", "16"}, {"0", "-1", "1.5", "1e300"}},
        {H, "max_completion_tokens", {"1", "16.0", "200", "16"}, {"0", "-1", "1.5", "201"}},
        {C, "logprobs", {"0", "5", "20", "2.0"}, {"21", "-1", "-2", "1.5"}},
    };
    for (size_t i = 0; i < ARRAY_LEN(fields); i++)
        for (int k = 0; k < 12; k++) {
            static const char *const never[] = {"\"5\"", "true", "[]", "{}"};
            char members[128];
            const char *value = k < 4   ? fields[i].good[k]
                                : k < 8 ? fields[i].bad[k - 4]
                                        : never[k - 8];
            snprintf(members, sizeof members, "\"%s\":%s", fields[i].name, value);
            run_all(&(struct vector){fields[i].kinds, members, k < 4 ? NULL : fields[i].name, NULL,
                                     fields[i].name},
                    1);
        }
}

static void booleans_are_boolean(void)
{
    static const char *const flags[] = {"stream",
                                        "echo",
                                        "ignore_eos",
                                        "skip_special_tokens",
                                        "include_stop_str_in_output",
                                        "add_special_tokens",
                                        "return_token_ids",
                                        "return_tokens_as_token_ids",
                                        "spaces_between_special_tokens"};
    for (size_t i = 0; i < ARRAY_LEN(flags); i++) {
        char members[4][64];
        snprintf(members[0], 64, "\"%s\":true", flags[i]);
        snprintf(members[1], 64, "\"%s\":\"true\"", flags[i]);
        snprintf(members[2], 64, "\"%s\":1", flags[i]);
        snprintf(members[3], 64, "\"%s\":null", flags[i]);
        const struct vector v[] = {{BOTH, members[0], NULL, NULL, NULL},
                                   {BOTH, members[1], flags[i], "invalid_type", "a boolean"},
                                   {BOTH, members[2], flags[i], "invalid_type", "a boolean"},
                                   {BOTH, members[3], NULL, NULL, NULL}};
        run_all(v, 4);
    }
}

static void fields_of_many_kinds(void)
{
    static const struct vector v[] = {
        {BOTH, "", NULL, NULL, NULL},
        {BOTH,
         "\"max_tokens\":null,\"temperature\":null,\"stop\":null,\"n\":null,\"logprobs\":null,"
         "\"stream_options\":null,\"seed\":null,\"logit_bias\":null,\"model\":null,\"tools\":null,"
         "\"user\":null,\"response_format\":null,\"suffix\":null,\"best_of\":null",
         NULL, NULL, NULL},
        {BOTH, "\"foo\":1,\"N\":99", NULL, NULL, NULL},
        {BOTH,
         "\"user\":\"u\",\"metadata\":{\"a\":1},\"store\":false,\"service_tier\":\"auto\","
         "\"safety_identifier\":\"x\",\"prompt_cache_key\":\"k\",\"verbosity\":\"low\"",
         NULL, NULL, NULL},
        /* model */
        {BOTH, "\"model\":\"m\"", NULL, NULL, NULL},
        {BOTH, "\"model\":\"org\\/alias\"", NULL, NULL, NULL},
        {BOTH, "\"model\":\"M\"", "model", "model_not_found", "The model `M` does not exist."},
        {BOTH, "\"model\":\"\"", "model", "model_not_found", NULL},
        {BOTH, "\"model\":5", "model", "invalid_type", NULL},
        /* stream options */
        {BOTH, "\"stream\":true,\"stream_options\":{\"include_usage\":true}", NULL, NULL, NULL},
        {BOTH, "\"stream\":true,\"stream_options\":{\"include_usage\":null,\"x\":1}", NULL, NULL,
         NULL},
        {BOTH, "\"stream\":true,\"stream_options\":{\"include_usage\":1}",
         "stream_options.include_usage", "invalid_type", NULL},
        {BOTH, "\"stream\":true,\"stream_options\":5", "stream_options", "invalid_type", NULL},
        {BOTH, "\"stream_options\":{\"include_usage\":null}", "stream_options", NULL,
         "Stream options can only be defined when `stream=True`."},
        {BOTH, "\"stream\":false,\"stream_options\":{}", "stream_options", NULL, "stream=True"},
        /* stops */
        {BOTH, "\"stop\":\"\"", "stop", NULL, "stop cannot contain an empty string."},
        {BOTH, "\"stop\":[\"a\",\"\"]", "stop", NULL, "stop cannot contain an empty string."},
        {BOTH, "\"stop\":[]", NULL, NULL, NULL},
        {BOTH, "\"stop\":\"x\"", NULL, NULL, NULL},
        {BOTH, "\"stop\":[1]", "stop", "invalid_type", NULL},
        {BOTH, "\"stop\":[null]", "stop", "invalid_type", NULL},
        {BOTH, "\"stop\":{}", "stop", "invalid_type", NULL},
        {BOTH,
         "\"stop\":[\"1\",\"2\",\"3\",\"4\",\"5\",\"6\",\"7\",\"8\",\"9\",\"10\",\"11\",\"12\","
         "\"13\",\"14\",\"15\",\"16\"]",
         NULL, NULL, NULL},
        {BOTH,
         "\"stop\":[\"1\",\"2\",\"3\",\"4\",\"5\",\"6\",\"7\",\"8\",\"9\",\"10\",\"11\",\"12\","
         "\"13\",\"14\",\"15\",\"16\",\"17\"]",
         "stop", "invalid_value", "16"},
        {BOTH, "\"stop_token_ids\":[0,258]", NULL, NULL, NULL},
        {BOTH, "\"stop_token_ids\":[]", NULL, NULL, NULL},
        {BOTH, "\"stop_token_ids\":[-1]", "stop_token_ids", NULL, "-1"},
        {BOTH, "\"stop_token_ids\":[259]", "stop_token_ids", NULL, "259 is not a token id"},
        {BOTH, "\"stop_token_ids\":[4294967296]", "stop_token_ids", NULL, "4294967296"},
        {BOTH, "\"stop_token_ids\":[5279552648203111001]", "stop_token_ids", NULL, NULL},
        {BOTH, "\"stop_token_ids\":[1.5]", "stop_token_ids", "invalid_type", NULL},
        {BOTH, "\"stop_token_ids\":[\"1\"]", "stop_token_ids", "invalid_type", NULL},
        {BOTH, "\"stop_token_ids\":[[1]]", "stop_token_ids", "invalid_type", NULL},
        {BOTH, "\"stop_token_ids\":5", "stop_token_ids", "invalid_type", NULL},
        /* logit_bias */
        {BOTH, "\"logit_bias\":{\"5\":100,\"258\":-100,\"0\":0.5}", NULL, NULL, NULL},
        {BOTH, "\"logit_bias\":{\"1\":200}", NULL, NULL, NULL},
        {BOTH, "\"logit_bias\":{}", NULL, NULL, NULL},
        {BOTH, "\"logit_bias\":{\"bad1\":1,\"bad2\":1}", "logit_bias", NULL, "`bad1`, `bad2`"},
        {BOTH, "\"logit_bias\":{\"foo\":0}", "logit_bias", NULL, "logit_bias"},
        {BOTH, "\"logit_bias\":{\"1\":\"x\"}", "logit_bias", NULL, "value of token 1"},
        {BOTH, "\"logit_bias\":{\"1\":false}", "logit_bias", NULL, "value of token 1"},
        {BOTH, "\"logit_bias\":{\"259\":1}", "logit_bias", NULL, "259 entries"},
        {BOTH, "\"logit_bias\":{\"-1\":1}", "logit_bias", NULL, "`-1`"},
        {BOTH, "\"logit_bias\":{\"01\":1}", "logit_bias", NULL, "`01`"},
        {BOTH, "\"logit_bias\":{\" 1\":1}", "logit_bias", NULL, NULL},
        {BOTH, "\"logit_bias\":{\"\":1}", "logit_bias", NULL, NULL},
        {BOTH, "\"logit_bias\":{\"99999999999999999999\":1}", "logit_bias", NULL, NULL},
        {BOTH, "\"logit_bias\":[[1,5]]", "logit_bias", "invalid_type", NULL},
        /* logprobs */
        {C, "\"logprobs\":-1", "logprobs", NULL, "`logprobs` must be a positive value or -1."},
        {H, "\"logprobs\":true", NULL, NULL, NULL},
        {H, "\"logprobs\":5", "logprobs", "invalid_type", "a boolean"},
        {H, "\"logprobs\":true,\"top_logprobs\":20", NULL, NULL, NULL},
        {H, "\"logprobs\":true,\"top_logprobs\":21", "top_logprobs", NULL, NULL},
        {H, "\"logprobs\":true,\"top_logprobs\":-1", "top_logprobs", NULL, NULL},
        {H, "\"top_logprobs\":1", "top_logprobs", NULL,
         "when using `top_logprobs`, `logprobs` must be set to true."},
        {H, "\"top_logprobs\":1,\"logprobs\":false", "top_logprobs", NULL, NULL},
        {H, "\"top_logprobs\":0", NULL, NULL, NULL},
        {BOTH, "\"prompt_logprobs\":1,\"stream\":true", "prompt_logprobs", NULL,
         "`prompt_logprobs` are not available when `stream=True`."},
        /* seeds, lengths */
        {BOTH, "\"seed\":9223372036854775808", "seed", NULL, "less_than_equal"},
        {BOTH, "\"seed\":-9223372036854775809", "seed", NULL, "greater_than_equal"},
        {C, "\"max_tokens\":0", "max_tokens", NULL, "max_tokens must be at least 1, got 0."},
        {H, "\"max_tokens\":0", "max_tokens", NULL, "max_tokens must be at least 1, got 0."},
        {C, "\"max_tokens\":0,\"echo\":true", NULL, NULL, NULL},
        {H, "\"max_tokens\":0,\"echo\":true", "max_tokens", NULL, NULL},
        {BOTH, "\"max_tokens\":\"5\"", "max_tokens", NULL, "`max_tokens` must be an integer."},
        {BOTH, "\"min_tokens\":6,\"max_tokens\":5", "min_tokens", NULL, "min_tokens"},
        {BOTH, "\"max_tokens\":5,\"min_tokens\":5", NULL, NULL, NULL},
        {BOTH, "\"n\":9", "n", NULL, "n must be at most 8, got 9."},
        {BOTH, "\"n\":2,\"temperature\":0", NULL, NULL, NULL},
        {C, "\"best_of\":0", NULL, NULL, NULL},
        {C, "\"best_of\":1,\"n\":3", NULL, NULL, NULL},
        {C, "\"best_of\":3,\"n\":3", NULL, NULL, NULL},
        {C, "\"best_of\":4,\"n\":3", "best_of", "unsupported_parameter", NULL},
        /* known and not built */
        {C, "\"suffix\":\"x\"", "suffix", "unsupported_parameter",
         "suffix is not currently supported"},
        {C, "\"suffix\":\"\"", NULL, NULL, NULL},
        {BOTH, "\"prompt_embeds\":\"x\"", "prompt_embeds", "unsupported_parameter", NULL},
        {BOTH, "\"guided_regex\":\"(a+)+b\"", "guided_regex", "unsupported_parameter", NULL},
        {BOTH, "\"guided_json\":{}", "guided_json", "unsupported_parameter", NULL},
        {BOTH, "\"structured_outputs\":{}", "structured_outputs", "unsupported_parameter", NULL},
        {BOTH, "\"allowed_token_ids\":[1]", "allowed_token_ids", "unsupported_parameter", NULL},
        {BOTH, "\"bad_words\":[\"a\"]", "bad_words", "unsupported_parameter", NULL},
        {BOTH, "\"bad_words\":[ ]", NULL, NULL, NULL},
        {BOTH, "\"truncate_prompt_tokens\":5", "truncate_prompt_tokens", "unsupported_parameter",
         NULL},
        {BOTH, "\"priority\":1", "priority", "unsupported_parameter", NULL},
        {BOTH, "\"priority\":0", NULL, NULL, NULL},
        {BOTH, "\"use_beam_search\":true", "use_beam_search", "unsupported_parameter", NULL},
        {BOTH, "\"use_beam_search\":false,\"length_penalty\":1.0", NULL, NULL, NULL},
        {BOTH, "\"length_penalty\":1.1", "length_penalty", "unsupported_parameter", NULL},
        {BOTH, "\"kv_transfer_params\":{}", "kv_transfer_params", "unsupported_parameter", NULL},
        {BOTH, "\"vllm_xargs\":{\"a\":1}", "vllm_xargs", "unsupported_parameter", NULL},
        {BOTH, "\"thinking_token_budget\":5", "thinking_token_budget", "unsupported_parameter",
         NULL},
        {BOTH, "\"response_format\":{\"type\":\"text\"}", NULL, NULL, NULL},
        {BOTH, "\"response_format\":{\"type\":\"json_object\"}", "response_format",
         "unsupported_parameter", NULL},
        {BOTH, "\"response_format\":{\"type\":\"json_schema\"}", "response_format",
         "unsupported_parameter", NULL},
        {BOTH, "\"response_format\":\"json\"", "response_format", "invalid_type", NULL},
        {BOTH, "\"response_format\":{\"type\":\"xml\"}", "response_format.type", NULL, NULL},
        {BOTH, "\"response_format\":{}", "response_format.type", NULL, NULL},
        {H, "\"tools\":[]", NULL, NULL, NULL},
        {H, "\"tools\":[{\"type\":\"function\"}],\"tool_choice\":\"none\"", NULL, NULL, NULL},
        {H, "\"tools\":[{\"type\":\"function\"}]", "tools", "unsupported_parameter", NULL},
        {H, "\"tools\":[{\"type\":\"function\"}],\"tool_choice\":\"auto\"", "tools",
         "unsupported_parameter", NULL},
        {H, "\"tools\":[{\"type\":\"function\"}],\"tool_choice\":\"required\"", "tool_choice",
         "unsupported_parameter", NULL},
        {H, "\"tools\":[{}],\"tool_choice\":{\"type\":\"function\"}", "tool_choice",
         "unsupported_parameter", NULL},
        {H, "\"tool_choice\":\"required\"", "tool_choice", NULL,
         "`tool_choice` can only be set when `tools` are set"},
        {H, "\"tool_choice\":\"auto\"", NULL, NULL, NULL},
        {H, "\"tool_choice\":5", "tool_choice", "invalid_type", NULL},
        {H, "\"tools\":{}", "tools", "invalid_type", NULL},
        {H, "\"functions\":[{}]", "functions", "unsupported_parameter", NULL},
        {H, "\"function_call\":\"none\"", NULL, NULL, NULL},
        {H, "\"function_call\":{\"name\":\"f\"}", "function_call", "unsupported_parameter", NULL},
        {H, "\"modalities\":[\"text\"]", NULL, NULL, NULL},
        {H, "\"modalities\":[\"text\",\"audio\"]", "modalities", "unsupported_parameter", NULL},
        {H, "\"audio\":{}", "audio", "unsupported_parameter", NULL},
        {H, "\"chat_template\":\"{{x}}\"", "chat_template", "unsupported_parameter", NULL},
        {H, "\"chat_template_kwargs\":{\"enable_thinking\":false,\"a\":\"b\",\"c\":1}", NULL, NULL,
         NULL},
        {H, "\"chat_template_kwargs\":{\"a\":[1]}", "chat_template_kwargs", "invalid_type", NULL},
        {H, "\"chat_template_kwargs\":[]", "chat_template_kwargs", "invalid_type", NULL},
        {H, "\"add_generation_prompt\":true,\"continue_final_message\":true",
         "continue_final_message", NULL, "Cannot set both"},
        {H, "\"continue_final_message\":true", NULL, NULL, NULL},
        {H, "\"reasoning_effort\":\"low\",\"parallel_tool_calls\":false", NULL, NULL, NULL},
        /* alphabets */
        {BOTH, "\"cache_salt\":\"Az09_-\"", NULL, NULL, NULL},
        {BOTH, "\"cache_salt\":\"\"", "cache_salt", NULL, NULL},
        {BOTH, "\"cache_salt\":\"a/b\"", "cache_salt", NULL, NULL},
        {BOTH, "\"cache_salt\":\"\xf0\x9f\x98\x80\"", "cache_salt", NULL, NULL},
        {BOTH, "\"cache_salt\":5", "cache_salt", "invalid_type", NULL},
        {BOTH, "\"request_id\":\"a.b-c\"", NULL, NULL, NULL},
        {BOTH, "\"request_id\":5", "request_id", "invalid_type", NULL},
    };
    run_all(v, ARRAY_LEN(v));
}

static void defaults_are_those_of_the_table(void)
{
    struct request *r = parse_with(C, "");
    const struct sample_params *p = &r->params;
    ok(p->temperature == 1 && p->top_p == 1 && p->min_p == 0 && p->top_k == 0 &&
           p->repetition_penalty == 1 && p->presence_penalty == 0 && p->frequency_penalty == 0,
       "sampling is off");
    ok(r->max_tokens == 16 && !r->max_tokens_given && r->n == 1 && p->seed == 77, "16 tokens");
    ok(r->skip_special && !r->echo && !r->stream && !r->logprobs && r->top_logprobs == -1 &&
           r->prompt_logprobs == -1 && r->salt[0] == 0 && r->salt[1] == 0,
       "nothing else is asked");
    ok(r->model == names[0], "the default model");
    request_free(r);
    rules.default_temperature = 0.6;
    rules.default_top_k = 20;
    r = parse_with(H, "");
    ok(r->params.temperature == 0.6f && r->params.top_k == 20, "the model's own defaults");
    ok(request_room(r, &rules, 0) == CONTEXT - r->prompts[0].n_ids, "chat: to the end");
    request_free(r);
    rules.default_max_tokens = 10;
    r = parse_with(H, "\"temperature\":0");
    ok(r->params.temperature == 0 && request_room(r, &rules, 0) == 10, "the operator's cap");
    request_free(r);
    rules.default_max_tokens = 0;
    r = parse_with(H, "");
    info.max_dense_len = r->prompts[0].n_ids + 7;
    ok(request_room(r, &rules, 0) == 7,
       "chat, where all is attended: to the end of what HBM holds");
    info.max_dense_len = r->prompts[0].n_ids;
    ok(request_room(r, &rules, 0) == 1, "or to be refused for its prompt alone");
    request_free(r);
    info.max_dense_len = CONTEXT / 2;
    r = parse_with(H, "\"max_tokens\":100000");
    ok(r == NULL || request_room(r, &rules, 0) > CONTEXT / 2, "what was asked is not cut");
    request_free(r);
    info.max_dense_len = 0;
    rules.default_top_k = 0;
    rules.default_temperature = (double)NAN;
}

static void values_arrive(void)
{
    struct request *r = parse_with(
        C, "\"temperature\":0.5,\"top_p\":0.9,\"top_k\":40,\"min_p\":0.1,\"seed\":"
           "9223372036854775807,\"stop\":[\"ab\",\"\\u00e9\"],\"stop_token_ids\":[7],"
           "\"logit_bias\":{\"1\":200,\"2\":-3.5},\"logprobs\":3,\"stream\":true,"
           "\"stream_options\":{\"include_usage\":true,\"continuous_usage_stats\":true},"
           "\"cache_salt\":\"s\",\"model\":\"org/alias\",\"skip_special_tokens\":false,"
           "\"min_tokens\":2,\"max_tokens\":300000000000,\"request_id\":\"abc\",\"echo\":true");
    ok(r == NULL && strcmp(e.code, "context_length_exceeded") == 0, "too much is too much");
    r = parse_with(C, "\"temperature\":0.5,\"top_p\":0.9,\"top_k\":40,\"min_p\":0.1,\"seed\":"
                      "9223372036854775807,\"stop\":[\"ab\",\"\\u00e9\"],\"stop_token_ids\":[7],"
                      "\"logit_bias\":{\"1\":200,\"2\":-3.5},\"logprobs\":3,\"stream\":true,"
                      "\"stream_options\":{\"include_usage\":true,\"continuous_usage_stats\":true},"
                      "\"cache_salt\":\"s\",\"model\":\"org/alias\",\"skip_special_tokens\":false,"
                      "\"min_tokens\":2,\"max_tokens\":30,\"request_id\":\"abc\",\"echo\":true");
    CHECK(r != NULL);
    ok(r->params.temperature == 0.5f && r->params.top_p == 0.9f && r->params.top_k == 40 &&
           r->params.min_p == 0.1f && r->params.seed == INT64_MAX,
       "sampling");
    ok(r->n_stops == 2 && strcmp(r->stops[1].p, "\xc3\xa9") == 0 && r->stops[1].len == 2 &&
           r->n_stop_ids == 1 && r->stop_ids[0] == 7,
       "stops");
    ok(r->n_bias == 2 && r->bias[0] == 100 && r->bias[1] == -3.5f && r->bias_ids[1] == 2,
       "bias, clamped");
    ok(r->logprobs && r->top_logprobs == 3 && r->stream && r->include_usage &&
           r->continuous_usage && !r->skip_special && r->echo,
       "the answer's form");
    ok(r->max_tokens == 30 && r->min_tokens == 2 && r->model == names[1] &&
           strcmp(r->client_request_id, "abc") == 0,
       "lengths and names");
    ok(r->salt[0] != 0 && r->salt[1] != 0, "a salt");
    request_free(r);
    r = parse_with(C, "\"seed\":-1,\"top_k\":300");
    ok(r->params.seed == 77 && r->params.top_k == 0, "seed -1 is random, top_k over all is off");
    request_free(r);
    r = parse_with(H, "\"max_tokens\":5,\"max_completion_tokens\":3");
    ok(r->max_tokens == 3, "max_completion_tokens wins");
    request_free(r);
    r = parse_with(H, "\"logprobs\":true");
    ok(r->logprobs && r->top_logprobs == 0, "logprobs alone have no alternatives");
    request_free(r);
    info.vocab = 10;
    r = parse_with(C, "\"logprobs\":20,\"prompt_logprobs\":20");
    ok(r && r->top_logprobs == 10 && r->prompt_logprobs == 10,
       "of ten tokens there are ten alternatives");
    request_free(r);
    info.vocab = VOCAB;
    rules.accept_any_model = true;
    r = parse_with(C, "\"model\":\"gpt-x\"");
    ok(r && strcmp(r->model, "gpt-x") == 0, "any model, if the operator says so");
    request_free(r);
    rules.accept_any_model = false;
}

static void strict_servers_name_the_unknown_key(void)
{
    rules.strict_fields = true;
    const struct vector v[] = {
        {BOTH, "\"foo\":1", "foo", "unknown_parameter", "foo"},
        {C, "\"messages\":[]", "messages", NULL, NULL},
        {BOTH, "\"Temperature\":1", "Temperature", NULL, NULL},
        {BOTH, "\"user\":\"x\",\"temperature\":1", NULL, NULL, NULL},
        {BOTH, "\"\":1", "", NULL, NULL},
    };
    run_all(v, ARRAY_LEN(v) - 1);
    rules.strict_fields = false;
}

static void bodies_that_are_no_objects(void)
{
    static const char *const bad[] = {"[]",
                                      "\"x\"",
                                      "null",
                                      "",
                                      "{",
                                      "\xef\xbb\xbf{}",
                                      "{}x",
                                      "{\"prompt\":\"a\",\"prompt\":\"b\"}",
                                      "{\"prompt\":\"a\\u0000b\"}",
                                      "{\"prompt\":\"\xff\"}"};
    for (size_t i = 0; i < ARRAY_LEN(bad); i++)
        is_refused(C, bad[i], "", "JSON");
}

static void a_message_echoes_little(void)
{
    char members[512];
    snprintf(members, sizeof members, "\"model\":\"%0300d\"", 0);
    request_free(parse_with(C, members));
    ok(e.status == 404 && strlen(e.message) < 80, "32 bytes of a name");
    request_free(parse_with(C, "\"model\":\"\xf0\x9f\x98\x80\xf0\x9f\x98\x80\xf0\x9f\x98\x80\xf0"
                               "\x9f\x98\x80\xf0\x9f\x98\x80\xf0\x9f\x98\x80\xf0\x9f\x98\x80x\xf0"
                               "\x9f\x98\x80\""));
    ok(strstr(e.message, "x...`") != NULL, "cut between characters");
    snprintf(members, sizeof members, "\"stop\":\"%0257d\"", 0);
    request_free(parse_with(C, members));
    ok(strcmp(e.param, "stop") == 0 && strstr(e.message, "256") != NULL, "a stop of 257 bytes");
}

static void every_bad_key_is_named_as_far_as_it_fits(void)
{
    char body[65536];
    size_t at = (size_t)sprintf(body, "{\"prompt\":\"x\",\"logit_bias\":{");
    for (int i = 0; i < 2000; i++)
        at += (size_t)sprintf(body + at, "%s\"bad%d\":1", i ? "," : "", i);
    strcpy(body + at, "}}");
    request_free(parse(C, body));
    ok(strcmp(e.param, "logit_bias") == 0 && strstr(e.message, "2000 keys") != NULL &&
           strstr(e.message, "`bad40`") != NULL && strlen(e.message) < sizeof e.message - 1,
       "2,000 bad keys");
    at = (size_t)sprintf(body, "{\"prompt\":\"x\",\"logit_bias\":{");
    info.vocab = 1000;
    for (int i = 0; i < 301; i++)
        at += (size_t)sprintf(body + at, "%s\"%d\":1", i ? "," : "", i);
    strcpy(body + at, "}}");
    request_free(parse(C, body));
    ok(strcmp(e.param, "logit_bias") == 0 && strstr(e.message, "300") != NULL, "301 good keys");
    info.vocab = VOCAB;
}

int main(void)
{
    set_up();
    the_table_is_sorted();
    ranges_have_two_sides();
    booleans_are_boolean();
    fields_of_many_kinds();
    defaults_are_those_of_the_table();
    values_arrive();
    strict_servers_name_the_unknown_key();
    bodies_that_are_no_objects();
    a_message_echoes_little();
    every_bad_key_is_named_as_far_as_it_fits();
    return tap_done();
}
