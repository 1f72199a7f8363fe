/* A stream joined equals the whole answer: for random tokens, stops, options, and every way of
 * cutting the engine's events into batches. */
#include "tests/call_rig.h"
#include "tests/tap.h"

enum { MAX_TOKENS = 24, CHOICES = 2 };

static uint64_t seed = 88172645463325252u;

static uint32_t roll(uint32_t n)
{
    seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
    return (uint32_t)(seed >> 33) % n;
}

struct script {
    bool chat;
    char json[512]; /* the request but for "stream" */
    uint32_t n, len, n_top;
    uint32_t tokens[CHOICES][MAX_TOKENS];
    float logprob[CHOICES][MAX_TOKENS];
    uint32_t sizes[MAX_TOKENS]; /* events per batch */
};

static uint32_t any_token(void)
{
    static const unsigned char bytes[] = "abab\xe6\x97\xa5\xc3\xa9\"\n #\xf0\x9f";
    uint32_t r = roll(sizeof bytes + 1);
    return r < sizeof bytes - 1 ? bytes[r] : 256 + r - (sizeof bytes - 1); /* or a special one */
}

static void write_script(struct script *s)
{
    static const char *const stops[] = {"", ",\"stop\":[\"ab\"]",
                                        ",\"stop\":[\"ba#\",\"aa\",\"日\"]",
                                        ",\"stop\":\"é\",\"include_stop_str_in_output\":true"};
    *s = (struct script){.chat = roll(2), .n = 1 + roll(CHOICES), .len = 1 + roll(MAX_TOKENS)};
    char logprobs[32] = "";
    if (roll(2)) {
        s->n_top = roll(3);
        snprintf(logprobs, sizeof logprobs, ",\"logprobs\":%u", s->n_top);
    }
    snprintf(s->json, sizeof s->json,
             "{\"prompt\":\"a日\",\"temperature\":1,\"n\":%u,\"max_tokens\":%u%s%s%s%s%s", s->n,
             s->len, stops[roll(4)], logprobs, roll(2) ? ",\"return_token_ids\":true" : "",
             roll(2) ? ",\"skip_special_tokens\":false" : "",
             !s->chat && logprobs[0] == 0 && roll(2) ? ",\"echo\":true" : "");
    for (uint32_t i = 0; i < s->n; i++)
        for (uint32_t k = 0; k < s->len; k++) {
            s->tokens[i][k] = any_token();
            s->logprob[i][k] = -(float)roll(1000) / 7;
        }
    for (uint32_t k = 0; k < MAX_TOKENS; k++)
        s->sizes[k] = 1 + roll(4);
}

static void say(struct rig *g, const struct script *s, uint32_t i, uint32_t k)
{
    struct rig_event e = {.id = g->ids[i],
                          .token = s->tokens[i][k],
                          .index = k,
                          .n_top = s->n_top,
                          .logprob = s->logprob[i][k],
                          .top = {{'x', -0.5f}, {0xe6, -0.75f}}};
    rig_token(g, &e);
}

/* Plays the engine; batches of the script's sizes if the client streams, else one. */
static void play(struct rig *g, struct exchange *x, const struct script *s, bool stream)
{
    uint32_t left = s->sizes[0], batch = 0;
    bool over[CHOICES] = {false};
    for (uint32_t k = 0; k < s->len; k++)
        for (uint32_t i = 0; i < s->n; i++) {
            if (over[i])
                continue;
            say(g, s, i, k);
            bool eos = s->tokens[i][k] == RIG_EOS;
            over[i] = eos || k + 1 == s->len;
            if (over[i])
                rig_done(g, g->ids[i], eos ? DONE_STOP : DONE_LENGTH, RIG_EOS, k + 1);
            if (stream && --left == 0) {
                x->unsent = batch % 3 == 2 ? SOFT_UNSENT + 1 : 0;
                calls_flush(&g->a);
                left = s->sizes[++batch % MAX_TOKENS];
            }
        }
    x->unsent = 0;
    calls_flush(&g->a);
    calls_flush(&g->a);
    rig_listen(g);
}

/* What a client puts together. */
struct joined {
    struct writer text[CHOICES];
    cJSON *lists[CHOICES][6]; /* the arrays of log-probabilities, token ids */
    char end[CHOICES][64];
    uint32_t n_reasons[CHOICES], n_events, n_empty; /* n_empty: neither role, text nor reason */
};

static const char *const list_names[5] = {"text_offset", "token_logprobs", "tokens", "top_logprobs",
                                          "content"};

static void join_list(cJSON **to, cJSON *from)
{
    if (*to == NULL)
        *to = cJSON_CreateArray();
    for (cJSON *item; from != NULL && (item = cJSON_DetachItemFromArray(from, 0)) != NULL;)
        cJSON_AddItemToArray(*to, item);
}

static void join_choice(struct joined *j, cJSON *c, const char *part)
{
    int i = (int)cJSON_GetObjectItem(c, "index")->valuedouble;
    cJSON *body = cJSON_GetObjectItem(c, part);
    cJSON *text = body ? cJSON_GetObjectItem(body, "content") : cJSON_GetObjectItem(c, "text");
    cJSON *logprobs = cJSON_GetObjectItem(c, "logprobs");
    cJSON *reason = cJSON_GetObjectItem(c, "finish_reason");
    bool role = body != NULL && cJSON_GetObjectItem(body, "role") != NULL;
    j->n_empty += !role && !cJSON_IsString(reason) && (text == NULL || !text->valuestring[0]);
    if (text != NULL)
        write_text(&j->text[i], text->valuestring);
    for (int k = 0; k < 5; k++)
        join_list(&j->lists[i][k], cJSON_GetObjectItem(logprobs, list_names[k]));
    join_list(&j->lists[i][5], cJSON_GetObjectItem(c, "token_ids"));
    if (cJSON_IsString(reason)) {
        char *stop = cJSON_PrintUnformatted(cJSON_GetObjectItem(c, "stop_reason"));
        snprintf(j->end[i], sizeof j->end[i], "%s %s", reason->valuestring, stop);
        j->n_reasons[i]++;
        free(stop);
    }
}

static void join_document(struct joined *j, const char *text, const char *part)
{
    cJSON *d = cJSON_Parse(text), *c;
    CHECK(d != NULL);
    cJSON_ArrayForEach(c, cJSON_GetObjectItem(d, "choices")) join_choice(j, c, part);
    j->n_events++;
    cJSON_Delete(d);
}

static void join_stream(struct joined *j, const char *p)
{
    while (strncmp(p, "data: {", 7) == 0) {
        const char *end = strstr(p, "\n\n");
        CHECK(end != NULL);
        char *one = strndup(p + 6, (size_t)(end - p - 6));
        join_document(j, one, "delta");
        free(one);
        p = end + 2;
    }
    CHECK(strcmp(p, "data: [DONE]\n\n") == 0);
}

static void joined_init(struct joined *j)
{
    memset(j, 0, sizeof *j);
    for (int i = 0; i < CHOICES; i++)
        writer_init(&j->text[i]);
}

static void joined_fini(struct joined *j)
{
    for (int i = 0; i < CHOICES; i++) {
        writer_fini(&j->text[i]);
        for (int k = 0; k < 6; k++)
            cJSON_Delete(j->lists[i][k]);
    }
}

static bool same(const struct joined *a, const struct joined *b)
{
    bool good = true;
    for (int i = 0; i < CHOICES; i++) {
        good &= strcmp(a->text[i].p, b->text[i].p) == 0 && strcmp(a->end[i], b->end[i]) == 0;
        good &= a->n_reasons[i] == b->n_reasons[i];
        for (int k = 0; k < 6; k++)
            good &= cJSON_Compare(a->lists[i][k], b->lists[i][k], true) ||
                    (a->lists[i][k] == NULL && b->lists[i][k] == NULL);
    }
    return good;
}

static void run(const struct script *s, bool stream, struct joined *j)
{
    static struct rig g;
    struct exchange x;
    char json[600];
    rig_init(&g, 1 << 14);
    rig_open(&x);
    snprintf(json, sizeof json, "%s%s}", s->json, stream ? ",\"stream\":true" : "");
    CHECK(rig_start(&g, &x, s->chat ? REQUEST_CHAT : REQUEST_COMPLETION, json));
    play(&g, &x, s, stream);
    CHECK(x.ended && x.clean && g.a.calls->first == NULL);
    if (stream)
        join_stream(j, x.bytes.p);
    else
        join_document(j, x.bytes.p, "message");
    rig_close(&x);
    rig_fini(&g);
}

int main(void)
{
    int rounds = getenv("TEST_ROUNDS") ? atoi(getenv("TEST_ROUNDS")) : 4000, bad = 0;
    uint32_t events = 0, empty = 0;
    for (int round = 0; round < rounds && bad < 3; round++) {
        struct script s;
        struct joined whole, parts;
        write_script(&s);
        joined_init(&whole);
        joined_init(&parts);
        run(&s, false, &whole);
        run(&s, true, &parts);
        events += parts.n_events;
        empty += parts.n_empty;
        if (!same(&whole, &parts)) {
            printf("# round %d: %s\n# whole: %s | %s\n# parts: %s | %s\n", round, s.json,
                   whole.text[0].p, whole.end[0], parts.text[0].p, parts.end[0]);
            bad++;
        }
        joined_fini(&whole);
        joined_fini(&parts);
    }
    ok(bad == 0, "joined events equal the whole answer in %d random cases", rounds);
    ok(events > (uint32_t)rounds * 4, "and the streams had many events");
    is_int(empty, 0, "after the role every event has text or a reason");
    return tap_done();
}
