/* Every refusal has OpenAI's shape: four keys, a code that is a string or null. */
#include "api/error.h"
#include "tests/tap.h"

#include <cjson/cJSON.h>

struct exchange {
    struct reply r;
    char body[8192], extra[512];
};

void exchange_reply(struct exchange *x, const struct reply *r)
{
    x->r = *r;
    memcpy(x->body, r->body, r->len);
    x->body[r->len] = '\0';
    strcpy(x->extra, r->extra ? r->extra : "");
}

static cJSON *render(const struct api_error *e)
{
    char buf[4096];
    size_t len = error_render(e, buf, sizeof buf);
    CHECK(len < sizeof buf);
    buf[len] = '\0';
    return cJSON_Parse(buf);
}

static const cJSON *key(const cJSON *tree, const char *name)
{
    return cJSON_GetObjectItemCaseSensitive(cJSON_GetObjectItemCaseSensitive(tree, "error"), name);
}

static bool is(const cJSON *item, const char *want)
{
    return want ? cJSON_IsString(item) && strcmp(item->valuestring, want) == 0 : cJSON_IsNull(item);
}

static void every_status_has_its_type_and_code(void)
{
    static const struct {
        int http_status;
        const char *type, *code;
    } cases[] = {
        {400, "invalid_request_error", NULL},
        {401, "authentication_error", "invalid_api_key"},
        {403, "permission_error", "insufficient_permissions"},
        {404, "not_found_error", "unknown_url"},
        {405, "invalid_request_error", "method_not_allowed"},
        {408, "invalid_request_error", "request_timeout"},
        {413, "invalid_request_error", "request_too_large"},
        {415, "invalid_request_error", "unsupported_media_type"},
        {429, "rate_limit_error", "rate_limit_exceeded"},
        {431, "invalid_request_error", "request_too_large"},
        {500, "server_error", "internal_error"},
        {503, "unavailable_error", "server_overloaded"},
        {421, "invalid_request_error", NULL},
        {599, "server_error", "internal_error"},
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct api_error e;
        error_set(&e, cases[i].http_status, NULL, NULL, "text %d", 5);
        cJSON *t = render(&e);
        ok(is(key(t, "message"), "text 5") && is(key(t, "type"), cases[i].type) &&
               is(key(t, "code"), cases[i].code) && is(key(t, "param"), NULL),
           "status %d", cases[i].http_status);
        cJSON_Delete(t);
    }
}

static void what_is_given_wins(void)
{
    struct api_error e;
    error_set(&e, 503, "loading_model", "x[2].y", "Loading model");
    e.n_prompt_tokens = 9;
    e.n_ctx = 8;
    cJSON *t = render(&e);
    ok(is(key(t, "code"), "loading_model") && is(key(t, "param"), "x[2].y"), "code and param");
    ok(key(t, "n_prompt_tokens")->valuedouble == 9 && key(t, "n_ctx")->valuedouble == 8,
       "the two numbers of a context error");
    cJSON_Delete(t);
}

static void hostile_text_is_made_harmless(void)
{
    struct api_error e;
    char text[2048];
    memset(text, '"', sizeof text - 1);
    text[sizeof text - 1] = '\0';
    error_set(&e, 400, NULL, text, "%s", text);
    cJSON *t = render(&e);
    ok(t != NULL && strlen(key(t, "message")->valuestring) == sizeof e.message - 1,
       "the longest message, all quotes");
    cJSON_Delete(t);
    error_set(&e, 400, NULL, "p\n", "a\x01\x1f\x7f\xff\xc0\xaf\xe2\x82z\xed\xa0\x80\xc3\xa9\r\n");
    t = render(&e);
    ok(is(key(t, "message"), "a????\?\?\?\?z???\xc3\xa9??") && is(key(t, "param"), "p?"),
       "controls and broken UTF-8 become question marks");
    cJSON_Delete(t);
    for (size_t cut = 1018; cut <= 1024; cut++) {
        memset(text, 'a', cut);
        strcpy(text + cut, "\xf0\x9f\x98\x80");
        error_set(&e, 400, NULL, NULL, "%s", text);
        t = render(&e);
        ok(t != NULL && (unsigned char)e.message[1022] < 0xf0, "a cut at %zu is no half character",
           cut);
        cJSON_Delete(t);
    }
}

static void headers_go_with_it(void)
{
    struct exchange x;
    struct api_error e;
    error_set(&e, 401, NULL, NULL, "no");
    error_reply(&x, &e, false);
    ok(strcmp(x.extra, "WWW-Authenticate: Bearer\r\n") == 0, "401 says how to do it");
    ok(x.r.status == 401 && strcmp(x.r.content_type, "application/json") == 0 && !x.r.close,
       "status and type");
    error_set(&e, 503, NULL, NULL, "no");
    e.retry_after_s = 500;
    error_reply(&x, &e, true);
    ok(strcmp(x.extra, "Retry-After: 120\r\n") == 0 && x.r.close, "Retry-After is at most 120 s");
    error_set(&e, 405, NULL, NULL, "no");
    e.extra_header = "Allow: POST\r\n";
    error_reply(&x, &e, false);
    ok(strcmp(x.extra, "Allow: POST\r\n") == 0, "405 says what is allowed");
}

int main(void)
{
    every_status_has_its_type_and_code();
    what_is_given_wins();
    hostile_text_is_made_harmless();
    headers_go_with_it();
    return tap_done();
}
