/* Requests from bodies: the vectors of reference/api.md Appendix A that concern parsing, and both
 * edges of every range. The model is made of bytes: 256 of them and three control tokens. */
#include "api/request.h"
#include "api/request_fields.h"
#include "tests/tap.h"

#include <math.h>

enum { VOCAB = 259, CONTEXT = 200 };

static struct engine_info info;
static struct request_rules rules;
static struct token_scratch *scratch;
static const char *const names[] = {"m", "org/alias"};

/* error.c can answer, too; nothing here does. */
void exchange_reply(struct exchange *x, const struct reply *r)
{
    (void)x;
    (void)r;
}

static void set_up(void)
{
    struct tokenizer *t;
    CHECK(tokenizer_create_bytes(&t) == OK);
    info = (struct engine_info){
        .tokenizer = t, .chat = chat_template_chatml(), .vocab = VOCAB, .max_model_len = CONTEXT};
    rules = (struct request_rules){.info = &info,
                                   .names = names,
                                   .n_names = 2,
                                   .max_n = 8,
                                   .max_logprobs = 20,
                                   .default_temperature = (double)NAN,
                                   .default_top_p = (double)NAN};
    scratch = token_scratch_create();
}

static struct api_error e;

static struct request *parse_bytes(enum body_kind kind, const char *body, size_t len)
{
    struct request *r = NULL;
    char *copy = mem_alloc(len + 1);
    memcpy(copy, body, len);
    memset(&e, 0, sizeof e);
    status st = request_parse_as(&r, kind, &rules, scratch, (struct text_view){copy, len}, 77, &e);
    CHECK((st == OK) == (r != NULL));
    CHECK(st == OK || (e.status >= 400 && e.type != NULL && e.message[0] != '\0'));
    mem_free(copy);
    return r;
}

static struct request *parse(enum body_kind kind, const char *body)
{
    return parse_bytes(kind, body, strlen(body));
}

/* A minimal valid body with more members. */
static struct request *parse_with(enum body_kind kind, const char *members)
{
    char body[4096];
    snprintf(body, sizeof body, "{%s%s%s}",
             kind == BODY_CHAT ? "\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]"
                               : "\"prompt\":\"hi\"",
             members[0] ? "," : "", members);
    return parse(kind, body);
}

enum { BOTH = BODY_COMPLETION | BODY_CHAT };

/* param NULL: accepted. code: exactly (NULL: any). text: somewhere in the message. */
struct vector {
    unsigned kinds;
    const char *members, *param, *code, *text;
};

static void run(const struct vector *v, enum body_kind kind)
{
    struct request *r = parse_with(kind, v->members);
    bool good = v->param == NULL
                    ? r != NULL
                    : r == NULL && strcmp(e.param, v->param) == 0 &&
                          (v->code == NULL || (e.code && strcmp(e.code, v->code) == 0)) &&
                          (v->text == NULL || strstr(e.message, v->text) != NULL) &&
                          (e.status == 400 || e.status == 404);
    if (!ok(good, "%s %.60s", kind == BODY_CHAT ? "chat" : "completion", v->members))
        printf("#   %d %s %s: %s\n", r ? 200 : e.status, e.param, e.code ? e.code : "null",
               e.message);
    request_free(r);
}

static void run_all(const struct vector *v, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (v[i].kinds & BODY_COMPLETION)
            run(&v[i], BODY_COMPLETION);
        if (v[i].kinds & BODY_CHAT)
            run(&v[i], BODY_CHAT);
    }
}

#define C BODY_COMPLETION
#define H BODY_CHAT

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

/* ---- prompts and messages ---- */

static void is_refused(enum body_kind kind, const char *body, const char *param, const char *text)
{
    struct request *r = parse(kind, body);
    if (!ok(r == NULL && e.status == 400 && strcmp(e.param, param) == 0 &&
                (text == NULL || strstr(e.message, text) != NULL),
            "refused: %.70s", body))
        printf("#   %s: %s\n", e.param, r ? "accepted" : e.message);
    request_free(r);
}

static void prompts_that_are_none(void)
{
    static const char *const empty[] = {"[]",     "\"\"",         "[[]]",    "null",
                                        "[\"\"]", "[\"a\",\"\"]", "[[1],[]]"};
    static const char *const wrong[] = {
        "{}",      "5",     "true",   "[1,\"a\"]", "[\"a\",1]", "[[1],\"a\"]", "[[1],2]",
        "[1,[2]]", "[1.5]", "[null]", "[[\"a\"]]", "[[[1]]]",   "[{}]",        "[true]"};
    static const char *const outside[] = {
        "[-1]",     "[259]",  "[0,4294967296]", "[[1],[1,259]]", "[5279552648203111001]",
        "[-1e300]", "[1e300]"};
    char body[128];
    for (size_t i = 0; i < ARRAY_LEN(empty); i++) {
        snprintf(body, sizeof body, "{\"prompt\":%s}", empty[i]);
        is_refused(C, body, "prompt",
                   "Either prompt or prompt_embeds must be provided and non-empty.");
    }
    is_refused(C, "{}", "prompt", "must be provided and non-empty.");
    for (size_t i = 0; i < ARRAY_LEN(wrong); i++) {
        snprintf(body, sizeof body, "{\"prompt\":%s}", wrong[i]);
        is_refused(C, body, "prompt", NULL);
    }
    for (size_t i = 0; i < ARRAY_LEN(outside); i++) {
        snprintf(body, sizeof body, "{\"prompt\":%s}", outside[i]);
        is_refused(C, body, "prompt", "out of vocabulary");
    }
}

static void prompts_of_every_form(void)
{
    struct request *r = parse(C, "{\"prompt\":\"a\\u00e9\"}");
    ok(r && r->n_prompts == 1 && r->prompts[0].n_ids == 3 && r->prompts[0].ids[0] == 'a' &&
           strcmp(r->prompts[0].text, "a\xc3\xa9") == 0 && r->prompts[0].text_len == 3,
       "text");
    request_free(r);
    r = parse(C, "{\"prompt\":[\"a\",\"bc\"],\"n\":2}");
    ok(r && r->n_prompts == 2 && r->n == 2 && r->prompts[1].n_ids == 2 &&
           r->prompts[1].ids[1] == 'c',
       "texts");
    request_free(r);
    r = parse(C, "{\"prompt\":[ 97 , 98.0, 258]}");
    ok(r && r->n_prompts == 1 && r->prompts[0].n_ids == 3 && r->prompts[0].ids[2] == 258 &&
           r->prompts[0].text == NULL,
       "ids");
    request_free(r);
    r = parse(C, "{\"prompt\":[[97],[98,99]]}");
    ok(r && r->n_prompts == 2 && r->prompts[1].n_ids == 2 && r->prompts[1].ids[0] == 98,
       "lists of ids");
    request_free(r);
    r = parse(C, "{\"prompt\":\"<|im_start|>x\"}");
    ok(r && r->prompts[0].n_ids == 2, "control tokens in a plain prompt are tokens");
    request_free(r);
    char body[4096] = "{\"prompt\":[";
    for (int i = 0; i < 256; i++)
        strcat(body, i ? ",\"x\"" : "\"x\"");
    strcat(body, "]}");
    r = parse(C, body);
    ok(r && r->n_prompts == 256, "256 prompts");
    request_free(r);
    body[strlen(body) - 2] = '\0';
    strcat(body, ",\"x\"]}");
    is_refused(C, body, "prompt", "256");
}

static void messages_that_are_none(void)
{
    is_refused(H, "{}", "messages", "required");
    is_refused(H, "{\"messages\":null}", "messages", "required");
    is_refused(H, "{\"messages\":[]}", "messages", NULL);
    is_refused(H, "{\"messages\":\"x\"}", "messages", NULL);
    is_refused(H, "{\"messages\":{}}", "messages", NULL);
    is_refused(H, "{\"messages\":[5]}", "messages[0]", NULL);
    is_refused(H, "{\"messages\":[{\"content\":\"x\"}]}", "messages[0].role", "required");
    is_refused(H, "{\"messages\":[{\"role\":\"\",\"content\":\"x\"}]}", "messages[0].role", NULL);
    is_refused(H, "{\"messages\":[{\"role\":5,\"content\":\"x\"}]}", "messages[0].role", NULL);
    is_refused(H, "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"},{\"role\":\"user\"}]}",
               "messages[1].content", "required");
    is_refused(H, "{\"messages\":[{\"role\":\"user\",\"content\":null}]}", "messages[0].content",
               NULL);
    is_refused(H, "{\"messages\":[{\"role\":\"user\",\"content\":5}]}", "messages[0].content",
               NULL);
    is_refused(H, "{\"messages\":[{\"role\":\"user\",\"content\":\"x\",\"name\":5}]}",
               "messages[0].name", NULL);
    is_refused(H,
               "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"a\"},"
               "{\"type\":\"image_url\",\"image_url\":{}}]}]}",
               "messages[0].content[1]", "image_url");
    is_refused(H, "{\"messages\":[{\"role\":\"user\",\"content\":[{\"text\":\"a\"}]}]}",
               "messages[0].content[0]", NULL);
    is_refused(H, "{\"messages\":[{\"role\":\"user\",\"content\":[5]}]}", "messages[0].content[0]",
               NULL);
}

/* The rendered conversation; control tokens as {, | and }. */
static void renders(const char *name, const char *body, const char *want)
{
    struct request *r = parse(H, body);
    char text[512] = "";
    size_t at = 0;
    for (uint32_t i = 0; r && i < r->prompts[0].n_ids && at < sizeof text - 1; i++) {
        uint32_t id = r->prompts[0].ids[i];
        struct text_view name_of = tokenizer_name(info.tokenizer, id);
        text[at++] = id < 256                                     ? (char)id
                     : memcmp(name_of.p, "<|im_start|>", 10) == 0 ? '{'
                     : memcmp(name_of.p, "<|im_end|>", 8) == 0    ? '}'
                                                                  : '|';
    }
    if (!ok(r != NULL && strcmp(text, want) == 0, "%s", name))
        printf("#   got %s (%s)\n#   want %s\n", text, r ? "" : e.message, want);
    request_free(r);
}

static void messages_of_every_form(void)
{
    renders("one message", "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]}",
            "{user\nhi}\n{assistant\n");
    renders("parts are joined by newlines",
            "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"a\"},"
            "{\"type\":\"input_text\",\"text\":\"b\"},{\"type\":\"refusal\",\"refusal\":\"c\"}]}]}",
            "{user\na\nb\nc}\n{assistant\n");
    renders("developer is system, roles are free, content of an assistant may be null",
            "{\"messages\":[{\"role\":\"developer\",\"content\":\"d\"},{\"role\":\"boss\","
            "\"content\":\"b\",\"name\":\"n\"},{\"role\":\"assistant\",\"content\":null,"
            "\"tool_calls\":[]},{\"role\":\"assistant\"}]}",
            "{system\nd}\n{boss\nb}\n{assistant\n}\n{assistant\n}\n{assistant\n");
    renders("no generation prompt",
            "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}],\"add_generation_prompt\":"
            "false}",
            "{user\nhi}\n");
    renders("the last message goes on",
            "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"},{\"role\":\"assistant\","
            "\"content\":\"I\"}],\"continue_final_message\":true}",
            "{user\nhi}\n{assistant\nI");
    renders("control tokens of users are text",
            "{\"messages\":[{\"role\":\"user\",\"content\":\"<|im_end|>\"}]}",
            "{user\n<|im_end|>}\n{assistant\n");
    rules.trust_chat_input = true;
    renders("unless the server trusts them",
            "{\"messages\":[{\"role\":\"user\",\"content\":\"<|im_end|>\"}]}",
            "{user\n}}\n{assistant\n");
    rules.trust_chat_input = false;
    const struct chat_template *chat = info.chat;
    info.chat = NULL;
    struct request *r = parse_with(H, "");
    ok(r == NULL && strcmp(e.code, "unsupported_parameter") == 0, "no template, no chat");
    info.chat = chat;
}

static void echo_of_a_chat_needs_the_same_role(void)
{
    struct request *r =
        parse(H, "{\"echo\":true,\"messages\":[{\"role\":\"assistant\",\"content\":\"I\"}]}");
    ok(r && r->prompts[0].echo_prefix && strcmp(r->prompts[0].echo_prefix, "I") == 0,
       "an assistant's message is put in front");
    request_free(r);
    r = parse_with(H, "\"echo\":true");
    ok(r && r->prompts[0].echo_prefix == NULL, "a user's is not");
    request_free(r);
}

/* ---- what comes out ---- */

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

static struct request *parse_long(enum body_kind kind, int n, const char *members)
{
    char body[2048];
    snprintf(body, sizeof body, "{\"prompt\":\"%0*d\"%s}", n, 0, members);
    return parse(kind, body);
}

static void contexts_have_an_end(void)
{
    struct request *r = parse_long(C, CONTEXT - 1, "");
    ok(r && request_room(r, &rules, 0) == 1, "one token less than the context: room for one");
    request_free(r);
    r = parse_long(C, CONTEXT, "");
    ok(r == NULL && strcmp(e.code, "context_length_exceeded") == 0 &&
           strcmp(e.param, "prompt") == 0 && e.n_prompt_tokens == CONTEXT && e.n_ctx == CONTEXT,
       "as many as the context: refused");
    ok(strcmp(e.message,
              "The input (200 tokens) is longer than the model's context length (200 tokens). This "
              "model's maximum context length is 200 tokens. However, you requested 16 output "
              "tokens and your prompt contains 200 input tokens, for a total of 216 tokens. Please "
              "reduce the length of the input prompt or the number of requested output tokens.") ==
           0,
       "with all the words that clients look for");
    r = parse_long(C, 10, ",\"max_tokens\":201");
    ok(r == NULL && strcmp(e.param, "max_tokens") == 0 &&
           strncmp(e.message, "max_tokens is too large: 201.", 29) == 0 &&
           strcmp(e.code, "context_length_exceeded") == 0,
       "more output than a context");
    r = parse_with(H, "\"max_completion_tokens\":200000");
    ok(r == NULL && strncmp(e.message, "max_completion_tokens is too large: 200000.", 43) == 0,
       "by the name the client used");
    r = parse_long(C, 190, ",\"max_tokens\":20");
    ok(r && request_room(r, &rules, 0) == 10, "what does not fit beside the prompt is clamped");
    request_free(r);
    rules.reject_overflow = true;
    r = parse_long(C, 190, ",\"max_tokens\":20");
    ok(r == NULL && strcmp(e.param, "max_tokens") == 0, "or refused");
    r = parse_long(C, 190, ",\"max_tokens\":10");
    ok(r != NULL, "unless it fits exactly");
    request_free(r);
    rules.reject_overflow = false;
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

static void tokens_alone(void)
{
    struct request *r = parse(BODY_TOKENIZE, "{\"prompt\":\"ab\",\"return_token_strs\":true}");
    ok(r && r->prompts[0].n_ids == 2 && r->return_token_ids, "/tokenize of a prompt");
    request_free(r);
    r = parse(BODY_TOKENIZE, "{\"content\":\"\",\"add_special\":false}");
    ok(r && r->prompts[0].n_ids == 0, "llama.cpp's names; of nothing: nothing");
    request_free(r);
    r = parse(BODY_TOKENIZE, "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]}");
    struct request *chat = parse_with(H, "");
    ok(r && r->prompts[0].n_ids == chat->prompts[0].n_ids &&
           memcmp(r->prompts[0].ids, chat->prompts[0].ids, r->prompts[0].n_ids * 4) == 0,
       "/tokenize of messages equals a chat");
    request_free(r);
    request_free(chat);
    r = parse(BODY_DETOKENIZE, "{\"tokens\":[97,98]}");
    ok(r && r->prompts[0].n_ids == 2, "/detokenize");
    request_free(r);
    r = parse(BODY_DETOKENIZE, "{\"tokens\":[]}");
    ok(r && r->prompts[0].n_ids == 0, "of nothing");
    request_free(r);
    is_refused(BODY_TOKENIZE, "{}", "prompt", NULL);
    is_refused(BODY_TOKENIZE, "{\"prompt\":[1]}", "prompt", NULL);
    is_refused(BODY_DETOKENIZE, "{}", "tokens", NULL);
    is_refused(BODY_DETOKENIZE, "{\"tokens\":[259]}", "tokens", "out of vocabulary");
    is_refused(BODY_DETOKENIZE, "{\"tokens\":\"x\"}", "tokens", NULL);
    is_refused(BODY_DETOKENIZE, "{\"tokens\":[\"x\"]}", "tokens", NULL);
}

/* A million ids: no tree, and memory of the order of the ids themselves. */
static void a_million_ids_cost_four_bytes_each(void)
{
    size_t n = 1000000, at;
    char *body = mem_alloc(n * 4 + 64);
    at = (size_t)sprintf(body, "{\"prompt\":[");
    for (size_t i = 0; i < n; i++)
        at += (size_t)sprintf(body + at, "%s%d", i ? "," : "", (int)(i % 100));
    strcpy(body + at, "]}");
    info.max_model_len = 2000000;
    uint64_t start = clock_us();
    struct request *r = parse_bytes(C, body, strlen(body));
    double ms = (double)(clock_us() - start) * 1e-3;
    ok(r && r->prompts[0].n_ids == n && r->mem.total_bytes < 5000000, "%.1f ms, %zu bytes", ms,
       r ? r->mem.total_bytes : 0);
    request_free(r);
    info.max_model_len = CONTEXT;
    mem_free(body);
}

/* ---- limits, from both sides ---- */

/* {"prompt":"hi",<name><brackets[0]>ITEM,ITEM,...<brackets[1]>}; an item is its number between
 * `before` and `after`. */
static struct request *parse_list(const char *name, const char *brackets, const char *before,
                                  const char *after, int n)
{
    static char body[1 << 16];
    size_t at = (size_t)sprintf(body, "{\"prompt\":\"hi\",\"%s\":%c", name, brackets[0]);
    for (int i = 0; i < n; i++)
        at += (size_t)sprintf(body + at, "%s%s%d%s", i > 0 ? "," : "", before, i, after);
    sprintf(body + at, "%c}", brackets[1]);
    return parse(C, body);
}

static void fits(struct request *r, const char *name)
{
    if (!ok(r != NULL, "%s", name))
        printf("#   %d %s: %s\n", e.status, e.param, e.message);
    request_free(r);
}

static void is_over(struct request *r, const char *param, const char *text, const char *name)
{
    if (!ok(r == NULL && e.status == 400 && strcmp(e.param, param) == 0 && strstr(e.message, text),
            "%s", name))
        printf("#   %s: %s\n", e.param, r ? "accepted" : e.message);
    request_free(r);
}

/* "<before>xx...x<after>", with n bytes of x. */
static struct request *parse_bytes_of(enum body_kind kind, const char *before, int n,
                                      const char *after)
{
    char members[1024], xs[512];
    CHECK(n < (int)sizeof xs);
    memset(xs, 'x', sizeof xs);
    snprintf(members, sizeof members, "%s%.*s%s", before, n, xs, after);
    return parse_with(kind, members);
}

static void lists_end_where_they_should(void)
{
    info.vocab = 1000;
    struct request *r = parse_list("logit_bias", "{}", "\"", "\":1", 300);
    ok(r != NULL && r->n_bias == 300 && r->bias_ids[299] == 299, "300 entries of logit_bias");
    request_free(r);
    is_over(parse_list("logit_bias", "{}", "\"", "\":1", 301), "logit_bias", "at most 300",
            "but not 301");
    r = parse_list("stop_token_ids", "[]", "", "", 64);
    ok(r != NULL && r->n_stop_ids == 64 && r->stop_ids[63] == 63, "64 stop_token_ids");
    request_free(r);
    is_over(parse_list("stop_token_ids", "[]", "", "", 65), "stop_token_ids", "at most 64",
            "but not 65");
    info.vocab = VOCAB;
    r = parse_list("stop", "[]", "\"s", "\"", 16);
    ok(r != NULL && r->n_stops == 16 && strcmp(r->stops[15].p, "s15") == 0, "16 strings of stop");
    request_free(r);
    is_over(parse_list("stop", "[]", "\"s", "\"", 17), "stop", "at most 16", "but not 17");
}

static void texts_end_where_they_should(void)
{
    struct request *r = parse_bytes_of(C, "\"stop\":\"", 256, "\"");
    ok(r != NULL && r->stops[0].len == 256, "a stop of 256 bytes");
    request_free(r);
    is_over(parse_bytes_of(C, "\"stop\":\"", 257, "\""), "stop", "256 bytes, got 257",
            "but not of 257");
    is_over(parse_bytes_of(C, "\"stop\":[\"\u00e9", 255, "\"]"), "stop", "got 257",
            "counted in bytes, not characters");
    fits(parse_bytes_of(C, "\"stop\":[\"\u00e9", 254, "\"]"), "two of which are an e acute");
    r = parse_bytes_of(C, "\"cache_salt\":\"", 64, "\"");
    ok(r != NULL && r->salt[0] != 0, "a salt of 64 bytes");
    request_free(r);
    is_over(parse_bytes_of(C, "\"cache_salt\":\"", 65, "\""), "cache_salt", "1 to 64",
            "but not of 65");
    fits(parse_bytes_of(H, "\"chat_template_kwargs\":{\"a\":\"", 256, "\"}"),
         "a template argument of 256 bytes");
    is_over(parse_bytes_of(H, "\"chat_template_kwargs\":{\"a\":\"", 257, "\"}"),
            "chat_template_kwargs", "", "but not of 257");
    char body[256];
    snprintf(body, sizeof body, "{\"messages\":[{\"role\":\"%064d\",\"content\":\"\"}]}", 0);
    fits(parse(H, body), "a role of 64 bytes");
    snprintf(body, sizeof body, "{\"messages\":[{\"role\":\"%065d\",\"content\":\"\"}]}", 0);
    is_over(parse(H, body), "messages[0].role", "", "but not of 65");
    r = parse_bytes_of(C, "\"request_id\":\"", 64, "\"");
    ok(r != NULL && r->client_request_id != NULL, "a request_id of 64 bytes is for the log");
    request_free(r);
    r = parse_bytes_of(C, "\"request_id\":\"", 65, "\"");
    ok(r != NULL && r->client_request_id == NULL, "one of 65 is dropped");
    request_free(r);
    rules.accept_any_model = true;
    r = parse_bytes_of(C, "\"model\":\"", 256, "\"");
    ok(r != NULL && strlen(r->model) == 256, "any model's name of 256 bytes");
    request_free(r);
    r = parse_bytes_of(C, "\"model\":\"", 257, "\"");
    ok(r == NULL && e.status == 404, "but not of 257");
    rules.accept_any_model = false;
}

static void numbers_end_where_they_should(void)
{
    char members[128];
    static const char *const names_of[] = {"seed", "temperature", "a key nobody knows"};
    for (size_t i = 0; i < ARRAY_LEN(names_of); i++) {
        snprintf(members, sizeof members, "\"%s\":1.%030d", names_of[i], 0);
        char name[64];
        snprintf(name, sizeof name, "%s of 32 bytes", names_of[i]);
        fits(parse_with(C, members), name);
        snprintf(members, sizeof members, "\"%s\":1.%031d", names_of[i], 0);
        is_over(parse_with(C, members), "", "too many digits", "but not of 33");
    }
    for (uint32_t most = 1; most <= 128; most = most == 1 ? 8 : most * 16) {
        char name[64];
        rules.max_n = most;
        snprintf(members, sizeof members, "\"temperature\":1,\"n\":%u", most);
        struct request *r = parse_with(C, members);
        ok(r != NULL && r->n == most, "n of %u where that is the configured limit", most);
        request_free(r);
        snprintf(members, sizeof members, "\"temperature\":1,\"n\":%u", most + 1);
        snprintf(name, sizeof name, "at most %u", most);
        is_over(parse_with(C, members), "n", name, "but not one more");
    }
    rules.max_n = 8;
}

/* The table is searched by halves. */
static void the_table_is_sorted(void)
{
    bool sorted = true;
    for (size_t i = 1; request_fields_name(i) != NULL; i++)
        sorted = sorted && strcmp(request_fields_name(i - 1), request_fields_name(i)) <= 0;
    ok(sorted, "every field can be found");
}

int main(void)
{
    set_up();
    the_table_is_sorted();
    ranges_have_two_sides();
    booleans_are_boolean();
    fields_of_many_kinds();
    prompts_that_are_none();
    prompts_of_every_form();
    messages_that_are_none();
    messages_of_every_form();
    echo_of_a_chat_needs_the_same_role();
    defaults_are_those_of_the_table();
    values_arrive();
    contexts_have_an_end();
    strict_servers_name_the_unknown_key();
    bodies_that_are_no_objects();
    a_message_echoes_little();
    every_bad_key_is_named_as_far_as_it_fits();
    tokens_alone();
    a_million_ids_cost_four_bytes_each();
    lists_end_where_they_should();
    texts_end_where_they_should();
    numbers_end_where_they_should();
    return tap_done();
}
