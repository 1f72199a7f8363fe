/* The front of the API: who is let in, what is answered without the engine, health, and bodies on
 * their way through helper threads. Below it are the real files of api/ and a real mailbox. */
#include "api/front.h"
#include "tests/tap.h"

#include <cjson/cJSON.h>
#include <math.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- a connection that remembers ---- */

struct exchange {
    enum http_method method;
    const char *path, *key, *type, *body;
    void *user;
    int status; /* 0: no answer yet */
    bool close, stream;
    char content_type[64], extra[256];
    struct writer answer;
    struct caller caller;
};

enum http_method exchange_method(const struct exchange *x)
{
    return x->method;
}
struct text_view exchange_path(const struct exchange *x)
{
    return (struct text_view){x->path, strlen(x->path)};
}
struct text_view exchange_query(const struct exchange *x)
{
    (void)x;
    return (struct text_view){"", 0};
}
struct text_view exchange_header(const struct exchange *x, const char *name)
{
    const char *v = strcmp(name, "authorization") == 0  ? x->key
                    : strcmp(name, "content-type") == 0 ? x->type
                                                        : NULL;
    return (struct text_view){v, v ? strlen(v) : 0};
}
struct text_view exchange_body(const struct exchange *x)
{
    return (struct text_view){x->body ? x->body : "", x->body ? strlen(x->body) : 0};
}
uint64_t exchange_arrival_us(const struct exchange *x)
{
    (void)x;
    return clock_us();
}
const char *exchange_request_id(const struct exchange *x)
{
    (void)x;
    return "id";
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
    CHECK(x->status == 0);
    x->status = r->status;
    x->close = r->close;
    snprintf(x->content_type, sizeof x->content_type, "%s", r->content_type ? r->content_type : "");
    snprintf(x->extra, sizeof x->extra, "%s", r->extra ? r->extra : "");
    write_bytes(&x->answer, r->body, r->len);
}
void exchange_stream_begin(struct exchange *x, const char *extra)
{
    (void)extra;
    x->stream = true;
    x->status = 200;
}
status exchange_stream_write(struct exchange *x, const char *p, size_t len)
{
    write_bytes(&x->answer, p, len);
    return OK;
}
size_t exchange_stream_unsent(const struct exchange *x)
{
    (void)x;
    return 0;
}
void exchange_chunks_begin(struct exchange *x, const char *content_type)
{
    (void)content_type;
    exchange_stream_begin(x, NULL);
}
void exchange_stream_end(struct exchange *x, bool clean)
{
    (void)x;
    (void)clean;
}

/* Helper threads that start when the test says so. */
static struct {
    void (*work)(void *), (*done)(void *);
    void *arg;
} pool[64];
static int n_pool, pool_room = 64;

status exchange_work(void (*work)(void *arg), void (*done)(void *arg), void *arg)
{
    if (n_pool == pool_room)
        return err(ERR_FULL, "too many");
    pool[n_pool].work = work;
    pool[n_pool].done = done;
    pool[n_pool++].arg = arg;
    return OK;
}

static void run_pool(void)
{
    while (n_pool > 0) {
        void (*work)(void *) = pool[0].work, (*done)(void *) = pool[0].done;
        void *arg = pool[0].arg;
        memmove(pool, pool + 1, sizeof pool[0] * (size_t)--n_pool);
        work(arg);
        done(arg);
    }
}

/* ---- an API with a model of bytes ---- */

static struct mailbox *mail;
static struct engine_info info;
static int n_wakes;

static void wake(void *arg)
{
    (void)arg;
    n_wakes++;
}

static struct api *make(const struct api_config *with, bool ready)
{
    struct api *a;
    struct api_config cfg = *with;
    cfg.max_n = 8;
    cfg.max_logprobs = 20;
    cfg.max_queued_requests = 256;
    cfg.max_queued_tokens = 1 << 20;
    cfg.queue_timeout_s = 30;
    cfg.version = "1.2.3";
    cfg.default_temperature = cfg.default_top_p = (double)NAN;
    CHECK(api_create(&a, &cfg) == OK);
    if (info.tokenizer == NULL) {
        struct tokenizer *t;
        CHECK(tokenizer_create_bytes(&t) == OK);
        info = (struct engine_info){.name = "the model",
                                    .architecture = "bytes",
                                    .backend = "none",
                                    .tokenizer = t,
                                    .chat = chat_template_chatml(),
                                    .vocab = 259,
                                    .max_model_len = 1 << 20,
                                    .block_rows = 16,
                                    .max_num_seqs = 16,
                                    .kv_blocks = {1 << 20, 0}};
    }
    CHECK(mailbox_create(&mail, 64 << 20, 1 << 22, wake, NULL) == OK);
    if (ready)
        api_engine_ready(a, &info, mail);
    return a;
}

static void unmake(struct api *a)
{
    api_destroy(a);
    mailbox_destroy(mail);
}

static void open_exchange(struct exchange *x)
{
    writer_init(&x->answer);
    x->status = 0;
    x->user = NULL;
    memset(&x->caller, 0, sizeof x->caller);
}

/* As the server does it. */
static void ask(struct api *a, struct exchange *x)
{
    open_exchange(x);
    if (api_head(a, x, x->body ? strlen(x->body) : 0) == HEAD_READ_BODY) {
        CHECK(x->status == 0);
        api_body(a, x);
    } else {
        CHECK(x->status != 0);
    }
}

static cJSON *tree_of(const struct exchange *x)
{
    return cJSON_Parse(x->answer.p);
}

static bool has_error(const struct exchange *x, int http_status, const char *code)
{
    cJSON *t = tree_of(x);
    const cJSON *e = cJSON_GetObjectItemCaseSensitive(t, "error");
    const cJSON *c = cJSON_GetObjectItemCaseSensitive(e, "code");
    bool good = x->status == http_status && cJSON_GetArraySize(e) == 4 &&
                strcmp(x->content_type, "application/json") == 0 &&
                (code ? cJSON_IsString(c) && strcmp(c->valuestring, code) == 0 : cJSON_IsNull(c));
    cJSON_Delete(t);
    return good;
}

static void close_exchange(struct exchange *x)
{
    writer_fini(&x->answer);
}

/* ---- doors ---- */

struct door {
    enum http_method method;
    const char *path, *key, *type;
    int http_status;
    const char *code, *extra;
};

static void knock(struct api *a, const struct door *d, const char *when)
{
    struct exchange x = {.method = d->method, .path = d->path, .key = d->key, .type = d->type};
    x.body = d->method == HTTP_M_POST ? "{}" : NULL;
    ask(a, &x);
    bool good =
        d->http_status >= 400 ? has_error(&x, d->http_status, d->code) : x.status == d->http_status;
    good = good && (d->extra == NULL || strstr(x.extra, d->extra) != NULL);
    if (!ok(good, "%s: %d %s", when, d->method, d->path))
        printf("#   %d %s %s\n", x.status, x.extra, x.answer.p);
    close_exchange(&x);
}

#define KNOCK(a, doors, when)                        \
    for (size_t i_ = 0; i_ < ARRAY_LEN(doors); i_++) \
    knock((a), &(doors)[i_], (when))

#define G    HTTP_M_GET
#define P    HTTP_M_POST
#define GOOD "Bearer sk-1"
#define JSON "application/json"

static void a_key_is_asked_for_first(void)
{
    static const struct door doors[] = {
        {G, "/v1/models", NULL, NULL, 401, "invalid_api_key", "WWW-Authenticate: Bearer"},
        {G, "/v1/models", "Bearer x", NULL, 401, "invalid_api_key", NULL},
        {G, "/v1/models", GOOD, NULL, 200, NULL, NULL},
        {G, "/metrics", NULL, NULL, 401, "invalid_api_key", NULL},
        {G, "/version", NULL, NULL, 401, "invalid_api_key", NULL},
        {P, "/tokenize", NULL, JSON, 401, "invalid_api_key", NULL},
        {G, "/nowhere", NULL, NULL, 401, "invalid_api_key", NULL},
        {G, "/nowhere", GOOD, NULL, 404, "unknown_url", NULL},
        {P, "/v1/completions", NULL, "text/plain", 401, "invalid_api_key", NULL},
        {P, "/v1/completions", GOOD, "text/plain", 415, "unsupported_media_type", NULL},
        {G, "//v1/models", NULL, NULL, 401, "invalid_api_key", NULL},
        {G, "/health", NULL, NULL, 200, NULL, NULL},
        {P, "/ping", NULL, NULL, 200, NULL, NULL},
        {G, "/livez", "Bearer x", NULL, 200, NULL, NULL},
        {G, "/readyz", NULL, NULL, 200, NULL, NULL},
        {G, "/Health", NULL, NULL, 401, "invalid_api_key", NULL},
        {HTTP_M_OPTIONS, "/v1/models", NULL, NULL, 204, NULL, "Allow: GET"},
    };
    const char *const keys[] = {"sk-1", "sk-2"};
    struct api *a = make(&(struct api_config){.keys = keys, .n_keys = 2}, true);
    KNOCK(a, doors, "with keys");
    unmake(a);
}

static void paths_methods_and_types(void)
{
    static const struct door doors[] = {
        {G, "/v1/chat/completions", NULL, NULL, 405, "method_not_allowed", "Allow: POST"},
        {P, "/v1/models", NULL, JSON, 405, "method_not_allowed", "Allow: GET"},
        {HTTP_M_OTHER, "/health", NULL, NULL, 405, "method_not_allowed", "Allow: GET"},
        {HTTP_M_HEAD, "/health", NULL, NULL, 200, NULL, NULL},
        {G, "/", NULL, NULL, 404, "unknown_url", NULL},
        {G, "/v1/modelsx", NULL, NULL, 404, "unknown_url", NULL},
        {G, "/v1/models/", NULL, NULL, 404, "unknown_url", NULL},
        {P, "/v1/completions", NULL, NULL, 415, "unsupported_media_type", NULL},
        {P, "/v1/completions", NULL, "application/jsonx", 415, "unsupported_media_type", NULL},
        {P, "/v1/completions", NULL, JSON, 400, "missing_required_parameter", NULL},
        {P, "/v1/completions", NULL, "Application/JSON", 400, "missing_required_parameter", NULL},
        {P, "/v1/completions", NULL, "application/json; charset=utf-8", 400,
         "missing_required_parameter", NULL},
        {G, "/v1/models/the model", NULL, NULL, 200, NULL, NULL},
        {G, "/v1/models/x/y", NULL, NULL, 404, "model_not_found", NULL},
    };
    struct api *a = make(&(struct api_config){0}, true);
    KNOCK(a, doors, "open");
    struct exchange x = {.method = P, .path = "/v1/completions", .type = JSON};
    open_exchange(&x);
    ok(api_head(a, &x, (4 << 20) * 6) == HEAD_ANSWERED && has_error(&x, 413, "request_too_large") &&
           x.close,
       "too much is refused from the number alone");
    close_exchange(&x);
    open_exchange(&x);
    ok(api_head(a, &x, UINT64_MAX) == HEAD_READ_BODY, "a chunked body is counted by the server");
    ok(api_max_body(a) == 20u << 20, "a million ids may come");
    close_exchange(&x);
    unmake(a);
}

static void health_follows_the_model(void)
{
    static const struct door loading[] = {
        {G, "/health", NULL, NULL, 503, "loading_model", "Retry-After: 2"},
        {G, "/readyz", NULL, NULL, 503, "loading_model", NULL},
        {G, "/livez", NULL, NULL, 200, NULL, NULL},
        {G, "/version", NULL, NULL, 200, NULL, NULL},
        {G, "/metrics", NULL, NULL, 200, NULL, NULL},
        {G, "/v1/models", NULL, NULL, 503, "loading_model", "Retry-After: 2"},
        {P, "/v1/completions", NULL, NULL, 503, "loading_model", NULL},
        {G, "/v1/nothing", NULL, NULL, 503, "loading_model", NULL},
        {G, "/tokenizer_info", NULL, NULL, 503, "loading_model", NULL},
        {G, "/nothing", NULL, NULL, 404, "unknown_url", NULL},
    };
    static const struct door draining[] = {
        {G, "/health", NULL, NULL, 503, "shutting_down", NULL},
        {P, "/v1/completions", NULL, JSON, 503, "shutting_down", "Retry-After"},
        {G, "/livez", NULL, NULL, 200, NULL, NULL},
    };
    struct api *a = make(&(struct api_config){0}, false);
    KNOCK(a, loading, "loading");
    api_engine_ready(a, &info, mail);
    knock(a, &(struct door){G, "/health", NULL, NULL, 200, NULL, NULL}, "ready");
    api_drain(a);
    KNOCK(a, draining, "draining");
    unmake(a);
}

static void say_step(uint32_t running, uint64_t step_us)
{
    struct msg_step *s = mailbox_reserve(mail, TO_LOOP, sizeof *s);
    s->head.kind = MSG_STEP;
    s->running = running;
    s->step_us = step_us;
    mailbox_post(mail, TO_LOOP);
}

static void a_silent_engine_is_ill_only_with_work(void)
{
    struct door well = {G, "/health", NULL, NULL, 200, NULL, NULL};
    struct door ill = {G, "/health", NULL, NULL, 503, "engine_stalled", "Retry-After"};
    struct api *a = make(&(struct api_config){0}, true);
    uint64_t now = clock_us(), s = 1000000;
    say_step(0, 1000);
    api_events(a);
    api_tick(a, now + 100 * s);
    knock(a, &well, "idle for 100 s");
    say_step(1, 1000);
    api_events(a);
    api_tick(a, now + 109 * s);
    knock(a, &well, "9 s of work, silent");
    api_tick(a, now + 111 * s);
    knock(a, &ill, "11 s of work, silent");
    a->engine_heard_us = now + 111 * s; /* a step; its clock is not ours to turn */
    api_tick(a, now + 120 * s);
    knock(a, &well, "after a step");
    for (int i = 0; i < 200; i++)
        say_step(1, 2 * s);
    api_events(a);
    a->engine_heard_us = now + 120 * s;
    api_tick(a, now + 150 * s);
    knock(a, &well, "30 s are little where a step takes 2");
    api_tick(a, now + 170 * s);
    knock(a, &ill, "50 s are not");
    unmake(a);
}

static void a_dead_engine_is_told_of(void)
{
    struct api *a = make(&(struct api_config){0}, true);
    struct msg_failed *f = mailbox_reserve(mail, TO_LOOP, sizeof *f);
    f->head.kind = MSG_FAILED;
    memset(f->text, 'x', sizeof f->text);
    mailbox_post(mail, TO_LOOP);
    api_events(a);
    ok(a->engine_dead && strlen(a->engine_error) == sizeof f->text, "its last words are kept");
    knock(a, &(struct door){G, "/health", NULL, NULL, 503, "engine_dead", NULL}, "dead");
    struct exchange x = {
        .method = P, .path = "/v1/completions", .type = JSON, .body = "{\"prompt\":\"x\"}"};
    ask(a, &x);
    ok(x.status == 503, "and no request goes to it");
    close_exchange(&x);
    unmake(a);
}

static void events_come_in_bounded_parts(void)
{
    struct api *a = make(&(struct api_config){0}, true);
    for (int i = 0; i < 5000; i++)
        say_step(0, 1);
    n_wakes = 0;
    api_events(a);
    ok(n_wakes == 1 && mailbox_peek(mail, TO_LOOP) != NULL, "4,096 of 5,000, and a reminder");
    api_events(a);
    ok(n_wakes == 1 && mailbox_peek(mail, TO_LOOP) == NULL, "then the rest");
    unmake(a);
}

/* ---- answers ---- */

static void answers(struct api *a, struct exchange x, const char *want)
{
    ask(a, &x);
    if (!ok(x.status == 200 && strstr(x.answer.p, want) != NULL, "%s", x.path))
        printf("#   %d %s\n", x.status, x.answer.p);
    cJSON *t = tree_of(&x);
    CHECK(t != NULL);
    cJSON_Delete(t);
    close_exchange(&x);
}

static void small_endpoints_have_vllms_shapes(void)
{
    const char *const names[] = {"alias", "org/second"};
    struct api *a = make(&(struct api_config){.served_names = names, .n_names = 2}, true);
    answers(a, (struct exchange){.path = "/version"}, "{\"version\":\"1.2.3\"}");
    answers(a, (struct exchange){.path = "/load"}, "{\"server_load\":0}");
    answers(a, (struct exchange){.path = "/v1/models"},
            "{\"object\":\"list\",\"data\":[{\"id\":\"alias\",\"object\":\"model\",\"created\":");
    answers(a, (struct exchange){.path = "/v1/models"},
            "\"root\":\"the model\",\"parent\":null,\"max_model_len\":1048576");
    answers(a, (struct exchange){.path = "/v1/models/org/second"}, "{\"id\":\"org/second\"");
    answers(a, (struct exchange){.path = "/tokenizer_info"}, "\"eos_token\":\"<|im_end|>\"");
    struct exchange x = {.method = P, .path = "/tokenize", .type = JSON};
    x.body = "{\"prompt\":\"ab\",\"return_token_strs\":true}";
    answers(
        a, x,
        "{\"count\":2,\"max_model_len\":1048576,\"tokens\":[97,98],\"token_strs\":[\"a\",\"b\"]}");
    x.body = "{\"prompt\":\"a\\u20ac\"}";
    answers(a, x, "\"tokens\":[97,226,130,172],\"token_strs\":null}");
    x.path = "/detokenize";
    x.body = "{\"tokens\":[97,226,130,172,34,255,226]}";
    answers(
        a, x,
        "{\"prompt\":\"a\xe2\x82\xac\\\"\xef\xbf\xbd\xef\xbf\xbd\",\"content\":\"a\xe2\x82\xac\\\""
        "\xef\xbf\xbd\xef\xbf\xbd\"}");
    unmake(a);
    a = make(&(struct api_config){.disable_metrics = true}, true);
    knock(a, &(struct door){G, "/metrics", NULL, NULL, 404, "unknown_url", NULL}, "switched off");
    unmake(a);
}

static bool submitted(void)
{
    const struct msg_head *m = mailbox_peek(mail, TO_ENGINE);
    bool yes = m != NULL && m->kind == MSG_SUBMIT;
    if (m != NULL)
        mailbox_release(mail, TO_ENGINE);
    return yes;
}

/* {"prompt":"xxx..."} of about n bytes. */
static char *long_body(size_t n)
{
    char *body = mem_alloc(n + 64);
    size_t at = (size_t)sprintf(body, "{\"prompt\":\"");
    memset(body + at, 'x', n);
    strcpy(body + at + n, "\"}");
    return body;
}

static void large_bodies_go_to_helpers(void)
{
    struct api *a = make(&(struct api_config){0}, true);
    struct exchange x[8];
    char *body = long_body(100000);
    for (int i = 0; i < 8; i++) {
        x[i] =
            (struct exchange){.method = P, .path = "/v1/completions", .type = JSON, .body = body};
        ask(a, &x[i]);
    }
    ok(n_pool == 4 && api_n_active(a) == 8, "four at once, the others wait");
    api_gone(a, &x[0]);
    api_gone(a, &x[7]);
    ok(api_n_active(a) == 6, "two clients leave");
    run_pool();
    int n = 0;
    while (submitted())
        n++;
    ok(n == 6 && api_n_active(a) == 6, "the other six became requests (%d, %u)", n,
       api_n_active(a));
    for (int i = 1; i < 7; i++)
        api_gone(a, &x[i]);
    for (int i = 0; i < 8; i++)
        close_exchange(&x[i]);
    unmake(a);
    mem_free(body);
}

static void a_large_text_is_tokenised_there_too(void)
{
    struct api *a = make(&(struct api_config){0}, true);
    char *body = long_body(70000);
    struct exchange x = {.method = P, .path = "/tokenize", .type = JSON, .body = body};
    ask(a, &x);
    ok(x.status == 0 && n_pool == 1, "/tokenize waits");
    run_pool();
    ok(x.status == 200 && strncmp(x.answer.p, "{\"count\":70000,", 15) == 0, "and answers");
    close_exchange(&x);
    body[70000] = '\x01';
    ask(a, &x);
    run_pool();
    ok(has_error(&x, 400, NULL), "a bad body is refused from there as well");
    close_exchange(&x);
    body[70000] = 'x';
    pool_room = 0;
    ask(a, &x);
    ok(has_error(&x, 503, "server_overloaded") && strstr(x.extra, "Retry-After: 1") != NULL,
       "no helper: 503");
    pool_room = 64;
    close_exchange(&x);
    ask(a, &x);
    api_abort_all(a, "shutting_down", "bye");
    ok(has_error(&x, 503, "shutting_down") && api_n_active(a) == 0, "the end comes first");
    run_pool();
    close_exchange(&x);
    unmake(a);
    mem_free(body);
}

static void errors_of_the_server_have_our_shape(void)
{
    char buf[4096];
    size_t len = api_error_body(buf, sizeof buf, 431, NULL, "Too \"many\" headers");
    buf[len] = '\0';
    ok(strcmp(buf,
              "{\"error\":{\"message\":\"Too \\\"many\\\" headers\",\"type\":"
              "\"invalid_request_error\",\"param\":null,\"code\":\"request_too_large\"}}") == 0,
       "431");
}

/* ---- tenants ---- */

static const char *tenants_file(void)
{
    static char path[64];
    snprintf(path, sizeof path, "/tmp/spind-api-%d.json", (int)getpid());
    FILE *f = fopen(path, "w");
    CHECK(f != NULL && fchmod(fileno(f), 0600) == 0);
    fputs(
        "{\"tenants\": [{\"name\": \"a\", \"keys\": [{\"id\": \"1\", \"sha256\": "
        "\"a4a6d307ad00fa67176e1099fdbc4f4a09bb527a7f24718a5030f2f173d11f7f\"}], \"priority\": [0, "
        "9], \"requests_per_minute\": 2}, {\"name\": \"b\", \"keys\": [{\"id\": \"2\", \"sha256\": "
        "\"18519d64d0d18b0e84e43301547425933dc0394576666e8da1ef1790fb64ca9f\"}], \"weight\": 3}]}",
        f);
    CHECK(fclose(f) == 0);
    return path;
}

/* The next message of this kind to the engine, and nothing else before it. */
static const void *next_message(enum message_kind kind)
{
    const struct msg_head *m = mailbox_peek(mail, TO_ENGINE);
    return m != NULL && m->kind == kind ? m : NULL;
}

/* What the engine is told of one completion: its tenant, its salt. */
static struct msg_submit submit_of(struct api *a, const char *key, const char *body)
{
    struct exchange x = {
        .method = P, .path = "/v1/completions", .key = key, .type = JSON, .body = body};
    struct msg_submit got = {0};
    ask(a, &x);
    const struct msg_submit *m = next_message(MSG_SUBMIT);
    if (m != NULL) {
        got = *m;
        mailbox_release(mail, TO_ENGINE);
    }
    if (x.status == 0)
        api_gone(a, &x);
    close_exchange(&x);
    api_events(a);
    while (mailbox_peek(mail, TO_ENGINE) != NULL) /* its cancel */
        mailbox_release(mail, TO_ENGINE);
    return got;
}

static void the_engine_knows_whose_a_sequence_is(void)
{
    const char *path = tenants_file();
    const char body[] = "{\"prompt\":\"a\",\"max_tokens\":4}";
    struct api *a = make(&(struct api_config){.tenants_file = path}, true);
    const struct msg_tenant *t = next_message(MSG_TENANT);
    ok(t != NULL && t->tenant > 0 && t->weight == 1, "the engine first hears of a tenant");
    uint32_t first = t != NULL ? t->tenant : 0;
    mailbox_release(mail, TO_ENGINE);
    t = next_message(MSG_TENANT);
    ok(t != NULL && t->tenant > 0 && t->tenant != first && t->weight == 3, "and of every other");
    uint32_t second = t != NULL ? t->tenant : 0;
    mailbox_release(mail, TO_ENGINE);
    struct msg_submit of_a =
        submit_of(a, "Bearer sk-a", "{\"prompt\":\"a\",\"max_tokens\":4,\"priority\":7}");
    struct msg_submit of_b = submit_of(a, "Bearer sk-b", body);
    struct msg_submit again = submit_of(a, "Bearer sk-a", body);
    ok(of_a.tenant == first && of_b.tenant == second && again.tenant == first,
       "then of each sequence whose it is");
    ok(of_a.priority == 7 && of_b.priority == 0, "and its priority");
    ok(memcmp(of_a.salt, again.salt, sizeof of_a.salt) == 0 &&
           memcmp(of_a.salt, of_b.salt, sizeof of_a.salt) != 0,
       "and under which salt it is cached: its tenant's");
    static const struct door doors[] = {
        {P, "/v1/completions", "Bearer sk-a", JSON, 429, "rate_limit_exceeded", "Retry-After: "},
        {P, "/v1/completions", "Bearer sk-b", JSON, 400, "missing_required_parameter", NULL},
        {P, "/v1/completions", "Bearer sk-c", JSON, 401, "invalid_api_key", NULL},
        {G, "/v1/models", "Bearer sk-a", NULL, 200, NULL, NULL},
    };
    KNOCK(a, doors, "with tenants, one of which has had its two requests");
    unmake(a);
    unlink(path);
}

static void without_tenants_there_is_one(void)
{
    const char body[] = "{\"prompt\":\"a\",\"max_tokens\":4,\"priority\":0}";
    struct api *a = make(&(struct api_config){0}, true);
    ok(mailbox_peek(mail, TO_ENGINE) == NULL, "the engine is told of none");
    struct msg_submit one = submit_of(a, NULL, body), two = submit_of(a, NULL, body);
    ok(one.id != 0 && one.tenant == 0 && one.priority == 0, "sequences are number 0's");
    ok((one.salt[0] != 0 || one.salt[1] != 0) && memcmp(one.salt, two.salt, sizeof one.salt) == 0,
       "under a secret salt all the same");
    unmake(a);
}

int main(void)
{
    the_engine_knows_whose_a_sequence_is();
    without_tenants_there_is_one();
    a_key_is_asked_for_first();
    paths_methods_and_types();
    health_follows_the_model();
    a_silent_engine_is_ill_only_with_work();
    a_dead_engine_is_told_of();
    events_come_in_bounded_parts();
    small_endpoints_have_vllms_shapes();
    large_bodies_go_to_helpers();
    a_large_text_is_tokenised_there_too();
    errors_of_the_server_have_our_shape();
    return tap_done();
}
