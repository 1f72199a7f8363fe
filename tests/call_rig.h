/* A bench for api/call.c and what hangs on it: a fake connection that records what is written, a
 * hand-made engine at the other end of a real mailbox, and requests as JSON. */
#ifndef TESTS_CALL_RIG_H
#define TESTS_CALL_RIG_H

#include "api/call.h"

#include <cjson/cJSON.h>
#include <stdio.h>
#include <string.h>

/* --- the fake connection ------------------------------------------------------------------------ */

struct exchange {
    void *user;
    struct writer bytes; /* of the body */
    int status;          /* of the reply; 200: a stream began; 0: nothing yet */
    char extra[512];
    bool stream, ended, clean;
    size_t unsent, limit; /* limit: stream_write beyond it is refused; 0: none */
    uint32_t n_writes;
    uint64_t arrival_us;
    struct caller caller;
};

enum http_method exchange_method(const struct exchange *x)
{
    (void)x;
    return HTTP_M_POST;
}
struct text_view exchange_path(const struct exchange *x)
{
    (void)x;
    return (struct text_view){"/v1/completions", 15};
}
struct text_view exchange_query(const struct exchange *x)
{
    (void)x;
    return (struct text_view){"", 0};
}
struct text_view exchange_header(const struct exchange *x, const char *lower_name)
{
    (void)x;
    (void)lower_name;
    return (struct text_view){NULL, 0};
}
struct text_view exchange_body(const struct exchange *x)
{
    (void)x;
    return (struct text_view){"", 0};
}
uint64_t exchange_arrival_us(const struct exchange *x)
{
    return x->arrival_us;
}
const char *exchange_request_id(const struct exchange *x)
{
    (void)x;
    return "test";
}
struct caller *exchange_caller(struct exchange *x)
{
    return &x->caller;
}
void exchange_set_user(struct exchange *x, void *user)
{
    x->user = user;
}
void *exchange_user(const struct exchange *x)
{
    return x->user;
}
void exchange_reply(struct exchange *x, const struct reply *r)
{
    CHECK(!x->ended && x->status == 0);
    x->status = r->status;
    x->ended = x->clean = true;
    snprintf(x->extra, sizeof x->extra, "%s", r->extra ? r->extra : "");
    write_bytes(&x->bytes, r->body, r->len);
}
void exchange_stream_begin(struct exchange *x, const char *extra)
{
    CHECK(!x->ended && x->status == 0);
    (void)extra;
    x->status = 200;
    x->stream = true;
}
status exchange_stream_write(struct exchange *x, const char *p, size_t len)
{
    CHECK(x->stream && !x->ended);
    if (x->limit > 0 && x->bytes.len + len > x->limit)
        return err(ERR_FULL, "slow reader");
    write_bytes(&x->bytes, p, len);
    x->n_writes++;
    return OK;
}
size_t exchange_stream_unsent(const struct exchange *x)
{
    return x->unsent;
}
void exchange_chunks_begin(struct exchange *x, const char *content_type)
{
    (void)content_type;
    exchange_stream_begin(x, NULL);
}
void exchange_stream_end(struct exchange *x, bool clean)
{
    CHECK(x->stream && !x->ended);
    x->ended = true;
    x->clean = clean;
}
status exchange_work(void (*work)(void *arg), void (*done)(void *arg), void *arg)
{
    work(arg);
    done(arg);
    return OK;
}

static inline void rig_open(struct exchange *x)
{
    *x = (struct exchange){.arrival_us = clock_us()};
    writer_init(&x->bytes);
}

static inline void rig_close(struct exchange *x)
{
    writer_fini(&x->bytes);
}

/* --- the API over it ---------------------------------------------------------------------------- */

enum { RIG_VOCAB = 259, RIG_EOS = 258, RIG_SEQS = 4 };

struct rig {
    struct api a;
    struct engine_info info;
    struct tokenizer *tok;
    const char *name;
    uint64_t ids[256]; /* of submitted sequences, in order */
    uint32_t max_tokens[256], n_ids, n_cancels;
    struct msg_submit last; /* the head of the last one */
    uint64_t cancelled[256];
};

/* A ring that has been around once: what a message leaves out is not zero there, but what an older one
 * said. */
static inline void rig_use_ring(struct mailbox *m)
{
    size_t bytes = mailbox_max_message(m, TO_ENGINE);
    for (int quarter = 0; quarter < 4; quarter++) {
        struct msg_head *h = mailbox_reserve(m, TO_ENGINE, bytes);
        CHECK(h != NULL);
        memset(h + 1, 0xa5, bytes - sizeof *h);
        h->kind = MSG_CANCEL;
        mailbox_post(m, TO_ENGINE);
        CHECK(mailbox_peek(m, TO_ENGINE) == h);
        mailbox_release(m, TO_ENGINE);
    }
}

static inline void rig_init(struct rig *g, size_t ring)
{
    memset(g, 0, sizeof *g);
    CHECK(tokenizer_create_bytes(&g->tok) == OK);
    g->name = "m";
    g->info = (struct engine_info){.architecture = "llama",
                                   .name = "m",
                                   .backend = "mock",
                                   .tokenizer = g->tok,
                                   .vocab = RIG_VOCAB,
                                   .max_model_len = 4096,
                                   .block_rows = 16,
                                   .max_num_seqs = RIG_SEQS,
                                   .max_batched_tokens = 512,
                                   .kv_blocks = {512, 0},
                                   .end_ids = {RIG_EOS},
                                   .n_end_ids = 1};
    g->a.cfg = (struct api_config){.version = "1.2",
                                   .max_n = 8,
                                   .max_logprobs = 20,
                                   .max_queued_requests = 8,
                                   .max_queued_tokens = 1 << 20,
                                   .queue_timeout_s = 30,
                                   .prompt_tokens_details = true};
    g->a.info = &g->info;
    g->a.rules = (struct request_rules){.info = &g->info,
                                        .names = &g->name,
                                        .n_names = 1,
                                        .max_n = 8,
                                        .max_logprobs = 20,
                                        .default_temperature = (double)__builtin_nanf(""),
                                        .default_top_p = (double)__builtin_nanf("")};
    g->a.scratch = token_scratch_create();
    CHECK(mailbox_create(&g->a.mail, ring, 4096, NULL, NULL) == OK);
    rig_use_ring(g->a.mail);
    CHECK(metrics_create(&g->a.metrics, "m", &g->info) == OK);
    CHECK(auth_create(&g->a.auth, NULL, 0) == OK);
    CHECK(calls_create(&g->a.calls, &g->a) == OK);
}

static inline void rig_fini(struct rig *g)
{
    calls_destroy(g->a.calls);
    metrics_destroy(g->a.metrics);
    auth_destroy(g->a.auth);
    mailbox_destroy(g->a.mail);
    token_scratch_destroy(g->a.scratch);
    tokenizer_destroy(g->tok);
}

/* What the engine is told. */
static inline void rig_listen(struct rig *g)
{
    const struct msg_head *m;
    while ((m = mailbox_peek(g->a.mail, TO_ENGINE)) != NULL) {
        if (m->kind == MSG_SUBMIT) {
            g->last = *(const struct msg_submit *)m;
            g->max_tokens[g->n_ids % 256] = g->last.max_tokens;
            g->ids[g->n_ids++ % 256] = g->last.id;
        } else {
            CHECK(m->kind == MSG_CANCEL);
            g->cancelled[g->n_cancels++ % 256] = ((const struct msg_cancel *)m)->id;
        }
        mailbox_release(g->a.mail, TO_ENGINE);
    }
}

/* Parses and starts; false: the parser refused. Chat requests are written as completions: their text
 * needs no template here. */
static inline bool rig_start(struct rig *g, struct exchange *x, enum request_kind kind,
                             const char *json)
{
    struct request *r;
    struct api_error e;
    if (request_parse(&r, REQUEST_COMPLETION, &g->a.rules, g->a.scratch, json, strlen(json), 1,
                      &e) != OK) {
        printf("# refused: %s\n", e.message);
        return false;
    }
    r->kind = kind;
    call_start(&g->a, x, r);
    rig_listen(g);
    return true;
}

struct rig_event {
    uint64_t id;
    uint32_t token, index, n_top;
    float logprob;
    struct sample_top top[4];
};

static inline void rig_token(struct rig *g, const struct rig_event *e)
{
    struct {
        struct msg_token m;
        struct sample_top top[4];
    } buf = {.m = {.head = {MSG_TOKEN, sizeof buf},
                   .id = e->id,
                   .token = e->token,
                   .index = e->index,
                   .rank = 1,
                   .logprob = e->logprob,
                   .n_top = e->n_top}};
    memcpy(buf.top, e->top, sizeof buf.top);
    calls_event(&g->a, &buf.m.head);
}

static inline void rig_prompt(struct rig *g, const struct rig_event *e)
{
    struct {
        struct msg_prompt m;
        struct sample_top top[4];
    } buf = {.m = {.head = {MSG_PROMPT, sizeof buf},
                   .id = e->id,
                   .token = e->token,
                   .index = e->index,
                   .rank = 2,
                   .logprob = e->logprob,
                   .n_top = e->n_top}};
    memcpy(buf.top, e->top, sizeof buf.top);
    calls_event(&g->a, &buf.m.head);
}

static inline void rig_scheduled_with(struct rig *g, uint64_t id, uint32_t n_cached)
{
    struct msg_scheduled m = {.head = {MSG_SCHEDULED, sizeof m}, .id = id, .n_cached = n_cached};
    calls_event(&g->a, &m.head);
}

static inline void rig_scheduled(struct rig *g, uint64_t id)
{
    rig_scheduled_with(g, id, 0);
}

static inline void rig_done(struct rig *g, uint64_t id, enum done_reason reason, uint32_t stop,
                            uint32_t n_output)
{
    struct msg_done m = {.head = {MSG_DONE, sizeof m},
                         .id = id,
                         .reason = reason,
                         .stop_token = stop,
                         .n_output = n_output,
                         .submitted_us = 1000,
                         .scheduled_us = 2000,
                         .first_us = n_output ? 3000 : 0,
                         .last_us = n_output ? 4000 : 0};
    calls_event(&g->a, &m.head);
}

/* The bytes of text as tokens of one sequence, from output position `index` on. */
static inline void rig_say(struct rig *g, uint64_t id, const char *text, uint32_t index)
{
    for (; *text != '\0'; text++) {
        struct rig_event e = {.id = id, .token = (unsigned char)*text, .index = index++};
        rig_token(g, &e);
    }
}

/* --- reading answers ---------------------------------------------------------------------------- */

/* The page with the random id and the time replaced, so that it can be compared byte for byte. */
static inline const char *rig_page(struct exchange *x)
{
    static char page[1 << 20];
    const char *from = x->bytes.p;
    char *to = page;
    while (*from != '\0') {
        CHECK((size_t)(to - page) < sizeof page - 64);
        if (strncmp(from, "cmpl-", 5) == 0 && strspn(from + 5, "0123456789abcdef") == 32) {
            memcpy(to, "cmpl-1", 6);
            to += 6;
            from += 37;
        } else if (strncmp(from, "\"created\":", 10) == 0) {
            memcpy(to, "\"created\":0", 11);
            to += 11;
            from += 10 + strspn(from + 10, "0123456789");
        } else {
            *to++ = *from++;
        }
    }
    *to = '\0';
    return page;
}

#endif
