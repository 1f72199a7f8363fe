/* Request bodies under test: a model made of bytes (256 of them and three control tokens) with a short
 * context, and vectors of members that are accepted or refused. */
#ifndef TESTS_REQUEST_RIG_H
#define TESTS_REQUEST_RIG_H

#include "api/request.h"
#include "api/request_fields.h"
#include "tests/tap.h"

#include <math.h>

enum { VOCAB = 259, CONTEXT = 200 };

static struct engine_info info;
static struct request_rules rules;
static struct token_scratch *scratch;
static const char *const names[] = {"m", "org/alias"};
static struct api_error e;

/* error.c can answer, too; nothing here does. */
void exchange_reply(struct exchange *x, const struct reply *r)
{
    (void)x;
    (void)r;
}

static inline void set_up(void)
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

static inline struct request *parse_bytes(enum body_kind kind, const char *body, size_t len)
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

static inline struct request *parse(enum body_kind kind, const char *body)
{
    return parse_bytes(kind, body, strlen(body));
}

/* A minimal valid body with more members. */
static inline struct request *parse_with(enum body_kind kind, const char *members)
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

static inline void run(const struct vector *v, enum body_kind kind)
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

static inline void run_all(const struct vector *v, size_t n)
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

static inline void is_refused(enum body_kind kind, const char *body, const char *param,
                              const char *text)
{
    struct request *r = parse(kind, body);
    if (!ok(r == NULL && e.status == 400 && strcmp(e.param, param) == 0 &&
                (text == NULL || strstr(e.message, text) != NULL),
            "refused: %.70s", body))
        printf("#   %s: %s\n", e.param, r ? "accepted" : e.message);
    request_free(r);
}

#endif
