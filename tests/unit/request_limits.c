/* Limits of a request from both sides: the largest list, text and number, and one more. */
#include "tests/request_rig.h"

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

int main(void)
{
    set_up();
    lists_end_where_they_should();
    texts_end_where_they_should();
    numbers_end_where_they_should();
    return tap_done();
}
