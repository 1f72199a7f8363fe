/* Prompts, messages and token ids of a request, and the end of the context. */
#include "tests/request_rig.h"

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

int main(void)
{
    set_up();
    prompts_that_are_none();
    prompts_of_every_form();
    messages_that_are_none();
    messages_of_every_form();
    echo_of_a_chat_needs_the_same_role();
    contexts_have_an_end();
    tokens_alone();
    a_million_ids_cost_four_bytes_each();
    return tap_done();
}
