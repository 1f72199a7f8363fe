/* api/call.c, submit.c, answer.c: what the engine says becomes what the client reads. */
#include "tests/call_rig.h"
#include "tests/tap.h"

#define CHUNK                                                                                    \
    "data: "                                                                                     \
    "{\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"created\":0,\"model\":\"m\"," \
    "\"choices\":["
#define TEXT                                                                                       \
    "data: "                                                                                       \
    "{\"id\":\"cmpl-1\",\"object\":\"text_completion\",\"created\":0,\"model\":\"m\",\"choices\":" \
    "["
#define WHOLE                                                                                      \
    "{\"id\":\"cmpl-1\",\"object\":\"text_completion\",\"created\":0,\"model\":\"m\",\"choices\":" \
    "["

static void page_is(struct exchange *x, const char *want, const char *name)
{
    const char *page = rig_page(x);
    if (!ok(strcmp(page, want) == 0, "%s", name))
        printf("# got:\n%s\n# want:\n%s\n", page, want);
}

/* The fingerprint is of this build; the page up to it. */
static void page_begins(struct exchange *x, const char *want, const char *name)
{
    const char *page = rig_page(x);
    if (!ok(strncmp(page, want, strlen(want)) == 0, "%s", name))
        printf("# got:\n%s\n# want:\n%s\n", page, want);
}

static void a_chat_stream_is_byte_for_byte_what_clients_expect(void)
{
    struct rig g;
    struct exchange x;
    rig_init(&g, 1 << 20);
    rig_open(&x);
    rig_start(
        &g, &x, REQUEST_CHAT,
        "{\"prompt\":\"123456789\",\"stream\":true,\"stream_options\":{\"include_usage\":true}}");
    ok(x.status == 0, "nothing is sent before the first token");
    rig_scheduled(&g, g.ids[0]);
    rig_say(&g, g.ids[0], "Hel", 0);
    calls_flush(&g.a);
    rig_say(&g, g.ids[0], "lo", 3);
    calls_flush(&g.a);
    struct rig_event eos = {.id = g.ids[0], .token = RIG_EOS, .index = 5};
    rig_token(&g, &eos);
    calls_flush(&g.a);
    is_int(x.n_writes, 2, "one write per choice and batch; the end token waits for MSG_DONE");
    rig_done(&g, g.ids[0], DONE_STOP, RIG_EOS, 6);
    calls_flush(&g.a);
    page_is(
        &x,
        CHUNK "{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null,"
              "\"finish_reason\":null}],\"usage\":null}\n\n" //
        CHUNK "{\"index\":0,\"delta\":{\"content\":\"Hel\"},\"logprobs\":null,"
              "\"finish_reason\":null}],\"usage\":null}\n\n" //
        CHUNK "{\"index\":0,\"delta\":{\"content\":\"lo\"},\"logprobs\":null,"
              "\"finish_reason\":null}],\"usage\":null}\n\n" //
        CHUNK "{\"index\":0,\"delta\":{},\"logprobs\":null,\"finish_reason\":\"stop\","
              "\"stop_reason\":null}],\"usage\":null}\n\n" //
        CHUNK "],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":6,\"total_tokens\":15}}\n\n"
              "data: [DONE]\n\n",
        "role with the first token, text, reason on an empty delta, usage, [DONE]");
    ok(x.ended && x.clean && g.a.calls->first == NULL,
       "the stream ends cleanly and the call is freed");
    rig_close(&x);
    rig_fini(&g);
}

static void the_last_text_carries_the_reason(void)
{
    struct rig g;
    struct exchange x;
    rig_init(&g, 1 << 20);
    rig_open(&x);
    rig_start(&g, &x, REQUEST_COMPLETION, "{\"prompt\":\"a\",\"stream\":true,\"max_tokens\":2}");
    rig_say(&g, g.ids[0], "x", 0);
    calls_flush(&g.a);
    rig_say(&g, g.ids[0], "\"", 1);
    calls_flush(&g.a);
    rig_done(&g, g.ids[0], DONE_LENGTH, 0, 2);
    calls_flush(&g.a);
    page_is(&x,
            TEXT "{\"index\":0,\"text\":\"x\",\"logprobs\":null,\"finish_reason\":null}]}\n\n" //
            TEXT "{\"index\":0,\"text\":\"\\\"\",\"logprobs\":null,\"finish_reason\":\"length\","
                 "\"stop_reason\":null}]}\n\ndata: [DONE]\n\n",
            "without include_usage there is no usage key; length rides on the last text");
    rig_close(&x);
    rig_fini(&g);
}

static void a_stop_string_ends_it_at_once(void)
{
    struct rig g;
    struct exchange x;
    rig_init(&g, 1 << 20);
    rig_open(&x);
    rig_start(&g, &x, REQUEST_COMPLETION,
              "{\"prompt\":\"ab\",\"stop\":[\"END\"],\"max_tokens\":50}");
    rig_say(&g, g.ids[0], "so ENDING", 0);
    calls_flush(&g.a);
    rig_listen(&g);
    ok(x.ended, "the answer is out before the engine knows");
    page_begins(&x,
                WHOLE
                "{\"index\":0,\"text\":\"so \",\"logprobs\":null,\"finish_reason\":\"stop\","
                "\"stop_reason\":\"END\"}],\"usage\":{\"prompt_tokens\":2,\"completion_tokens\":6,"
                "\"total_tokens\":8},\"system_fingerprint\":\"b1.2-",
                "text is cut, the stop is named, tokens are counted up to the match");
    ok(g.n_cancels == 1 && g.cancelled[0] == g.ids[0], "the sequence is cancelled");
    ok(g.a.calls->first != NULL && calls_active(g.a.calls) == 0, "the call waits for MSG_DONE");
    rig_say(&g, g.ids[0], "late", 9);
    rig_done(&g, g.ids[0], DONE_CANCELLED, 0, 13);
    calls_flush(&g.a);
    ok(g.a.calls->first == NULL, "late tokens are ignored and MSG_DONE frees it");
    rig_say(&g, g.ids[0], "ghost", 14);
    rig_close(&x);
    rig_fini(&g);
}

static void what_the_cache_held_is_told_however_an_answer_ends(void)
{
    struct rig g;
    struct exchange x;
    rig_init(&g, 1 << 20);
    g.a.cfg.prompt_tokens_details = true;
    rig_open(&x);
    rig_start(&g, &x, REQUEST_COMPLETION,
              "{\"prompt\":[\"123456789\",\"abcd\"],\"n\":2,\"stop\":[\"END\"],"
              "\"max_tokens\":9}");
    for (uint32_t i = 0; i < 4; i++) {
        rig_scheduled_with(&g, g.ids[i], i < 2 ? 8 : 4);
        rig_say(&g, g.ids[i], "END", 0);
    }
    calls_flush(&g.a);
    ok(strstr(rig_page(&x), "\"prompt_tokens_details\":{\"cached_tokens\":12}") != NULL,
       "by a stop string too, and once per prompt");
    rig_close(&x);
    rig_fini(&g);
}

static void stop_ids_are_told_but_end_tokens_are_not(void)
{
    struct rig g;
    struct exchange x;
    rig_init(&g, 1 << 20);
    rig_open(&x);
    rig_start(&g, &x, REQUEST_COMPLETION,
              "{\"prompt\":\"ab\",\"stop_token_ids\":[33],\"max_tokens\":50}");
    is_int(g.last.n_stop, 2, "the engine stops at the client's id and at the model's");
    ok(g.last.n_filled == 0 && g.last.leader == 0 && g.last.pad == 0,
       "what it does not ask is not what an older message asked");
    rig_say(&g, g.ids[0], "hi!", 0);
    rig_done(&g, g.ids[0], DONE_STOP, 33, 3);
    calls_flush(&g.a);
    page_begins(&x,
                WHOLE
                "{\"index\":0,\"text\":\"hi\",\"logprobs\":null,\"finish_reason\":\"stop\","
                "\"stop_reason\":33}],\"usage\":{\"prompt_tokens\":2,\"completion_tokens\":3,",
                "a stop id is named; its text is not part of the answer");
    rig_close(&x);
    rig_fini(&g);
}

static void choices_are_numbered_prompt_by_prompt(void)
{
    struct rig g;
    struct exchange x;
    rig_init(&g, 1 << 20);
    rig_open(&x);
    rig_start(&g, &x, REQUEST_COMPLETION,
              "{\"prompt\":[\"ab\",\"cde\"],\"n\":2,\"max_tokens\":1,\"temperature\":1}");
    is_int(g.n_ids, 4, "two prompts with n = 2 are four sequences");
    ok(g.last.params.choice == 1 && g.last.leader == g.ids[2] && g.last.n_prompt == 3,
       "siblings name the first choice of their prompt and their own number");
    for (int i = 3; i >= 0; i--) {
        rig_say(&g, g.ids[i], (const char[]){(char)('0' + i), 0}, 0);
        rig_done(&g, g.ids[i], DONE_LENGTH, 0, 1);
    }
    calls_flush(&g.a);
    const char *page = rig_page(&x);
    ok(strstr(page, "{\"index\":0,\"text\":\"0\"") && strstr(page, "{\"index\":3,\"text\":\"3\"") &&
           strstr(page,
                  "\"usage\":{\"prompt_tokens\":5,\"completion_tokens\":4,\"total_tokens\":9}"),
       "answers come in order and each prompt is counted once");
    rig_close(&x);
    rig_fini(&g);
}

static void echo_with_logprobs_begins_with_the_prompt(void)
{
    struct rig g;
    struct exchange x;
    rig_init(&g, 1 << 20);
    rig_open(&x);
    rig_start(
        &g, &x, REQUEST_COMPLETION,
        "{\"prompt\":\"ab\",\"echo\":true,\"logprobs\":1,\"max_tokens\":1,\"temperature\":0}");
    ok(g.last.prompt_logprobs == 1 && g.last.logprobs == 1, "the prompt is scored");
    struct rig_event p = {.id = g.ids[0],
                          .token = 'b',
                          .index = 1,
                          .n_top = 1,
                          .logprob = -0.5f,
                          .top = {{'b', -0.5f}}};
    struct rig_event t = {.id = g.ids[0],
                          .token = 'c',
                          .index = 0,
                          .n_top = 1,
                          .logprob = -1.25f,
                          .top = {{'d', -1.0f}}};
    rig_prompt(&g, &p);
    rig_token(&g, &t);
    rig_done(&g, g.ids[0], DONE_LENGTH, 0, 1);
    calls_flush(&g.a);
    page_begins(&x,
                WHOLE "{\"index\":0,\"text\":\"abc\",\"logprobs\":{\"text_offset\":[0,1,2],"
                      "\"token_logprobs\":[null,-0.5,-1.25],\"tokens\":[\"a\",\"b\",\"c\"],"
                      "\"top_logprobs\":[null,{\"b\":-0.5},{\"d\":-1.0,\"c\":-1.25}]},"
                      "\"finish_reason\":\"length\",\"stop_reason\":null}],",
                "arrays start with the prompt; its first token has no probability");
    rig_close(&x);
    rig_open(&x);
    rig_start(&g, &x, REQUEST_COMPLETION, "{\"prompt\":[97,98],\"echo\":true,\"max_tokens\":0}");
    is_int(g.last.max_tokens, 0, "max_tokens 0 with echo only scores");
    rig_done(&g, g.ids[1], DONE_LENGTH, 0, 0);
    calls_flush(&g.a);
    page_begins(&x,
                WHOLE
                "{\"index\":0,\"text\":\"ab\",\"logprobs\":null,\"finish_reason\":\"length\","
                "\"stop_reason\":null}],\"usage\":{\"prompt_tokens\":2,\"completion_tokens\":0,",
                "ids are echoed as text and nothing is generated");
    rig_close(&x);
    rig_fini(&g);
}

static void failures_are_statuses_before_the_head_and_events_after(void)
{
    struct rig g;
    struct exchange x, y;
    rig_init(&g, 1 << 20);
    rig_open(&x);
    rig_open(&y);
    rig_start(&g, &x, REQUEST_COMPLETION, "{\"prompt\":\"ab\",\"stream\":true}");
    rig_done(&g, g.ids[0], DONE_NUMERIC, 0, 0);
    calls_flush(&g.a);
    ok(x.status == 500 && !x.stream && strstr(x.bytes.p, "\"type\":\"server_error\"") &&
           strstr(x.extra, "x-should-retry: false"),
       "a numeric failure before the head is a 500 that says not to retry");
    rig_start(&g, &y, REQUEST_COMPLETION,
              "{\"prompt\":\"ab\",\"stream\":true,\"n\":2,\"temperature\":1}");
    rig_say(&g, g.ids[1], "x", 0);
    calls_flush(&g.a);
    rig_done(&g, g.ids[2], DONE_DEVICE, 0, 0);
    calls_flush(&g.a);
    rig_listen(&g);
    ok(y.stream && y.ended && !y.clean && strstr(y.bytes.p, "data: {\"error\":{\"message\":") &&
           !strstr(y.bytes.p, "[DONE]"),
       "after the head it is an error event, no [DONE], and a connection that does not look whole");
    ok(g.n_cancels == 1 && g.cancelled[0] == g.ids[1], "the sibling is cancelled");
    rig_done(&g, g.ids[1], DONE_CANCELLED, 0, 1);
    calls_flush(&g.a);
    ok(g.a.calls->first == NULL, "and freed when its MSG_DONE comes");
    rig_close(&x);
    rig_close(&y);
    rig_fini(&g);
}

static void what_can_never_fit_is_a_400_that_says_why(void)
{
    struct rig g;
    struct exchange x, y;
    rig_init(&g, 1 << 20);
    rig_open(&x);
    rig_open(&y);
    rig_start(&g, &x, REQUEST_COMPLETION, "{\"prompt\":\"ab\"}");
    struct msg_done m = {.head = {MSG_DONE, sizeof m},
                         .id = g.ids[0],
                         .reason = DONE_REFUSED,
                         .text = "40 blocks; raise --kv-hbm"};
    calls_event(&g.a, &m.head);
    calls_flush(&g.a);
    ok(x.status == 400 &&
           strstr(x.bytes.p, "\"message\":\"This server cannot hold the request: 40 blocks; raise "
                             "--kv-hbm\",\"type\":\"invalid_request_error\""),
       "refused with a reason: 400");
    rig_start(&g, &y, REQUEST_COMPLETION, "{\"prompt\":\"ab\"}");
    rig_done(&g, g.ids[1], DONE_REFUSED, 0, 0);
    calls_flush(&g.a);
    ok(y.status == 503 && strstr(y.bytes.p, "server_overloaded"), "without one: 503, come again");
    rig_close(&x);
    rig_close(&y);
    rig_fini(&g);
}

/* The usage of an answer of 3 tokens, of which those from `from` on attended by plan. */
static void tells(const char *body, uint32_t from, uint32_t light, const char *want)
{
    struct rig g;
    struct exchange x;
    struct catalog offers = {.preset = sparse_choice_make(0, 0.05f)};
    CHECK(sparse_find("wave", &offers.preset.plugin) == OK);
    rig_init(&g, 1 << 20);
    g.info.catalog = &offers;
    rig_open(&x);
    rig_start(&g, &x, REQUEST_COMPLETION, body);
    for (uint32_t i = 0; i < 3; i++) {
        struct msg_token m = {.head = {MSG_TOKEN, sizeof m},
                              .id = g.ids[0],
                              .token = 'a' + i,
                              .index = i,
                              .n_light_misses = i * light,
                              .planned = i >= from};
        calls_event(&g.a, &m.head);
    }
    rig_done(&g, g.ids[0], DONE_LENGTH, 0, 3);
    calls_flush(&g.a);
    if (!ok(strstr(x.bytes.p, want) != NULL, "%.60s: %s", body, want))
        printf("#   %s\n", x.bytes.p);
    rig_close(&x);
    rig_fini(&g);
}

/* Nothing degrades silently: DESIGN 9, and P12 of reliability.md. */
static void sparse_attention_is_told_in_usage(void)
{
    static const char whole[] = "{\"prompt\":\"ab\",\"max_tokens\":3}";
    static const char stream[] = "{\"prompt\":\"ab\",\"max_tokens\":3,\"stream\":true,"
                                 "\"stream_options\":{\"include_usage\":true}}";
    tells(whole, 1, 5,
          "\"total_tokens\":5,\"sparse_details\":{\"plugin\":\"wave\",\"budget\":0.05,"
          "\"estimated_pages\":15}}");
    tells(whole, 2, 0,
          "\"total_tokens\":5,\"sparse_details\":{\"plugin\":\"wave\",\"budget\":0.05}}");
    tells(whole, 3, 0, "\"total_tokens\":5}"); /* all of it dense: too short, or so chosen */
    tells(stream, 1, 0,
          "\"total_tokens\":5,\"sparse_details\":{\"plugin\":\"wave\",\"budget\":0.05}}");
    tells(stream, 3, 0, "\"total_tokens\":5}");
}

static void a_client_that_leaves_is_never_touched_again(void)
{
    struct rig g;
    struct exchange x;
    rig_init(&g, 1 << 20);
    rig_open(&x);
    rig_start(&g, &x, REQUEST_COMPLETION, "{\"prompt\":\"ab\",\"n\":3,\"temperature\":1}");
    rig_say(&g, g.ids[0], "x", 0);
    call_gone(&g.a, &x);
    rig_close(&x);
    memset(&x, 0xa5, sizeof x);
    rig_listen(&g);
    is_int(g.n_cancels, 3, "every sequence is cancelled");
    rig_say(&g, g.ids[1], "late", 0);
    calls_flush(&g.a);
    calls_tick(&g.a, clock_us() + 60000000);
    for (int i = 0; i < 3; i++)
        rig_done(&g, g.ids[i], DONE_CANCELLED, 0, 1);
    calls_flush(&g.a);
    ok(g.a.calls->first == NULL && g.a.calls->n_queued == 0 && calls_active(g.a.calls) == 0,
       "its memory goes with the last MSG_DONE");
    rig_fini(&g);
}

static void the_queue_is_bounded(void)
{
    struct rig g;
    struct exchange x[16];
    int full = 0, i;
    rig_init(&g, 1 << 20);
    for (i = 0; i < 16; i++) {
        rig_open(&x[i]);
        rig_start(&g, &x[i], REQUEST_COMPLETION, "{\"prompt\":\"ab\"}");
        full += x[i].status == 503;
    }
    is_int(full, 16 - 8 - RIG_SEQS, "the queue takes its bound beyond what can run at once");
    ok(strstr(x[15].bytes.p, "\"code\":\"server_overloaded\"") &&
           strstr(x[15].extra, "Retry-After: "),
       "the others get 503 and when to come back");
    rig_scheduled(&g, g.ids[0]);
    is_int(g.a.calls->n_queued, 11, "a scheduled sequence is not queued");
    struct exchange big;
    rig_open(&big);
    rig_start(&g, &big, REQUEST_COMPLETION, "{\"prompt\":[\"a\",\"b\"],\"n\":8,\"temperature\":1}");
    ok(big.status == 400, "more sequences than could ever wait are a 400");
    rig_close(&big);
    for (i = 0; i < 16; i++) {
        if (x[i].status == 0)
            call_gone(&g.a, &x[i]);
        rig_close(&x[i]);
    }
    rig_fini(&g);
}

static void memory_for_answers_is_bounded(void)
{
    struct rig g;
    struct exchange x, y, z;
    rig_init(&g, 1 << 20);
    rig_open(&x);
    rig_open(&y);
    rig_open(&z);
    rig_start(&g, &x, REQUEST_COMPLETION, "{\"prompt\":\"ab\",\"logprobs\":5,\"max_tokens\":9}");
    is_int((int)g.a.calls->answer_bytes, 9 * (48 + 5 * 8), "tokens and alternatives are counted");
    g.a.calls->answer_bytes += (1 << 30) - 1000;
    rig_start(&g, &y, REQUEST_COMPLETION, "{\"prompt\":\"ab\",\"logprobs\":5,\"max_tokens\":9}");
    ok(y.status == 503 && strstr(y.extra, "Retry-After"), "what others hold is not given twice");
    rig_start(&g, &z, REQUEST_COMPLETION, "{\"prompt\":\"ab\",\"max_tokens\":9}");
    is_int(z.status, 0, "an answer of text only is served");
    call_gone(&g.a, &x);
    call_gone(&g.a, &z);
    rig_done(&g, g.ids[0], DONE_CANCELLED, 0, 0);
    rig_done(&g, g.ids[1], DONE_CANCELLED, 0, 0);
    calls_flush(&g.a);
    is_int((int)g.a.calls->answer_bytes, (1 << 30) - 1000, "a call gives its share back");
    rig_close(&x);
    rig_close(&y);
    rig_close(&z);
    rig_fini(&g);
}

static void time_passes(void)
{
    struct rig g;
    struct exchange x, y;
    rig_init(&g, 1 << 20);
    rig_open(&x);
    rig_open(&y);
    rig_start(&g, &x, REQUEST_COMPLETION, "{\"prompt\":\"ab\",\"stream\":true}");
    rig_start(&g, &y, REQUEST_COMPLETION, "{\"prompt\":\"ab\"}");
    uint64_t now = clock_us();
    rig_scheduled(&g, g.ids[0]);
    calls_tick(&g.a, now + 4000000);
    ok(!x.stream, "a stream without a token has no head for 5 s");
    calls_tick(&g.a, now + 6000000);
    page_is(&x, ": ping\n\n", "then it gets one, with a comment");
    calls_tick(&g.a, now + 20000000);
    is_int(x.n_writes, 1, "no comment while 15 s have not passed");
    calls_tick(&g.a, now + 22000000);
    is_int(x.n_writes, 2, "a comment every 15 s of silence");
    ok(y.status == 0, "a queued request waits for its timeout");
    calls_tick(&g.a, now + 31000000);
    rig_listen(&g);
    ok(y.status == 503 && strstr(y.bytes.p, "queue_timeout") && g.n_cancels == 1,
       "one that was not scheduled in time is a 503 and is cancelled");
    ok(!x.ended, "one that was scheduled may take its time");
    call_gone(&g.a, &x);
    rig_close(&x);
    rig_close(&y);
    rig_fini(&g);
}

static void a_slow_reader_gets_fewer_longer_events(void)
{
    struct rig g;
    struct exchange x;
    rig_init(&g, 1 << 20);
    rig_open(&x);
    rig_start(&g, &x, REQUEST_COMPLETION,
              "{\"prompt\":\"ab\",\"stream\":true,\"max_tokens\":2000}");
    x.unsent = SOFT_UNSENT + 1;
    rig_say(&g, g.ids[0], "abc", 0);
    calls_flush(&g.a);
    rig_say(&g, g.ids[0], "def", 3);
    calls_flush(&g.a);
    is_int(x.n_writes, 0, "above the soft limit tokens are gathered");
    x.unsent = 0;
    calls_flush(&g.a);
    page_is(&x,
            TEXT "{\"index\":0,\"text\":\"abcdef\",\"logprobs\":null,\"finish_reason\":null}]}\n\n",
            "and leave in one event when the client has read");
    x.limit = 1;
    rig_say(&g, g.ids[0], "ghi", 6);
    calls_flush(&g.a);
    rig_say(&g, g.ids[0], "jkl", 9);
    calls_flush(&g.a);
    calls_tick(&g.a, clock_us() + 50000000);
    ok(!x.ended && g.a.calls->first->cut, "after the hard limit nothing is written any more");
    call_gone(&g.a, &x);
    rig_done(&g, g.ids[0], DONE_CANCELLED, 0, 12);
    calls_flush(&g.a);
    ok(g.a.calls->first == NULL, "until the server says that the client is gone");
    rig_close(&x);
    rig_fini(&g);
}

enum { LONG = 2000 };

/* A prompt of LONG ids that is echoed with its probabilities, and one token behind it. */
static void echo_long(struct rig *g, struct exchange *x, const char *rest, uint32_t n)
{
    char json[LONG * 4 + 256] = "{\"prompt\":[98";
    size_t at = strlen(json);
    for (int i = 1; i < LONG; i++)
        at += (size_t)sprintf(json + at, ",97");
    sprintf(json + at, "],\"echo\":true,\"logprobs\":4,\"max_tokens\":1%s}", rest);
    CHECK(rig_start(g, x, REQUEST_COMPLETION, json));
    for (uint32_t k = 0; k < n; k++) {
        struct rig_event e = {.id = g->ids[k],
                              .token = 'a',
                              .n_top = 4,
                              .logprob = -0.5f,
                              .top = {{'a', -0.5f}, {'b', -1}, {'c', -2}, {'d', -3}}};
        for (e.index = 1; e.index < LONG; e.index++)
            rig_prompt(g, &e);
        e.index = 0;
        e.token = 'z';
        rig_token(g, &e);
        rig_done(g, g->ids[k], DONE_LENGTH, 0, 1);
    }
}

static void a_long_echo_leaves_in_bounded_events(void)
{
    struct rig g;
    struct exchange x;
    rig_init(&g, 1 << 20);
    rig_open(&x);
    echo_long(&g, &x, ",\"stream\":true", 1);
    x.unsent = SOFT_UNSENT + 1;
    calls_flush(&g.a);
    ok(x.n_writes == 0 && !g.a.calls->unfinished, "nothing while the client does not read");
    x.unsent = 0;
    calls_flush(&g.a);
    size_t longest = 0, n_tokens = 0;
    for (const char *p = x.bytes.p, *end; (end = strstr(p, "\n\n")) != NULL; p = end + 2) {
        longest = (size_t)(end - p) > longest ? (size_t)(end - p) : longest;
        cJSON *d = cJSON_Parse(p + 6);
        const cJSON *c = cJSON_GetArrayItem(cJSON_GetObjectItem(d, "choices"), 0);
        n_tokens += (size_t)cJSON_GetArraySize(
            cJSON_GetObjectItem(cJSON_GetObjectItem(c, "logprobs"), "tokens"));
        cJSON_Delete(d);
    }
    ok(longest > 1000 && longest < 2 * EVENT_BYTES && x.n_writes > 5,
       "%u events, the longest %zu bytes", x.n_writes, longest);
    is_int((int)n_tokens, LONG + 1, "with all tokens");
    ok(x.ended && x.clean && g.a.calls->first == NULL, "and the end");
    rig_close(&x);
    rig_fini(&g);
}

static void a_long_whole_answer_leaves_in_pieces(void)
{
    struct rig g;
    struct exchange x;
    uint32_t flushes = 1;
    rig_init(&g, 1 << 20);
    rig_open(&x);
    echo_long(&g, &x, ",\"n\":4,\"temperature\":1", 4);
    calls_flush(&g.a);
    ok(x.stream && !x.ended && g.a.calls->unfinished, "one turn of the loop writes not all of it");
    ok(x.bytes.len < WHOLE_BYTES + 2 * EVENT_BYTES, "%zu bytes", x.bytes.len);
    x.unsent = SOFT_UNSENT + 1;
    size_t before = x.bytes.len;
    calls_flush(&g.a);
    ok(x.bytes.len == before && !g.a.calls->unfinished, "it waits for the client");
    for (x.unsent = 0; !x.ended && flushes < 100; flushes++)
        calls_flush(&g.a);
    cJSON *d = cJSON_Parse(x.bytes.p), *c;
    int full = 0;
    cJSON_ArrayForEach(c, cJSON_GetObjectItem(d, "choices")) full +=
        cJSON_GetArraySize(
            cJSON_GetObjectItem(cJSON_GetObjectItem(c, "logprobs"), "top_logprobs")) == LONG + 1;
    ok(x.clean && full == 4 && cJSON_HasObjectItem(d, "usage"), "in the end it is whole");
    cJSON_Delete(d);
    ok(g.a.calls->out.room <= SCRATCH_BYTES && g.a.calls->answer_bytes == 0, "nothing is kept");
    rig_close(&x);
    rig_fini(&g);
}

static void a_full_mailbox_delays_and_loses_nothing(void)
{
    struct rig g;
    struct exchange x;
    char json[8192] = "{\"n\":8,\"temperature\":1,\"prompt\":\"", tail[] = "\"}";
    rig_init(&g, 4096);
    rig_open(&x);
    memset(json + strlen(json), 'a', 128);
    strcat(json, tail);
    struct request *r;
    struct api_error e;
    CHECK(request_parse(&r, REQUEST_COMPLETION, &g.a.rules, g.a.scratch, json, strlen(json), 1,
                        &e) == OK);
    call_start(&g.a, &x, r);
    ok(g.a.calls->waiting != NULL && x.status == 0, "what the ring cannot take now waits");
    is_int(g.a.calls->n_queued, 8, "and counts as queued");
    rig_listen(&g);
    while (g.a.calls->waiting != NULL) {
        calls_flush(&g.a);
        rig_listen(&g);
    }
    is_int(g.n_ids, 8, "it is posted as room appears");
    while (mailbox_room(g.a.mail, TO_ENGINE) >= sizeof(struct msg_cancel)) {
        struct msg_cancel *m = mailbox_reserve(g.a.mail, TO_ENGINE, sizeof *m);
        if (m == NULL)
            break;
        *m = (struct msg_cancel){.head = {MSG_CANCEL, sizeof *m}, .id = 1};
        mailbox_post(g.a.mail, TO_ENGINE);
    }
    call_gone(&g.a, &x);
    is_int(g.a.calls->n_cancel_due, 8, "cancels that find the ring full are remembered");
    rig_listen(&g);
    g.n_cancels = 0;
    calls_flush(&g.a);
    rig_listen(&g);
    is_int(g.n_cancels, 8, "and posted");
    for (int i = 0; i < 8; i++)
        rig_done(&g, g.ids[i], DONE_CANCELLED, 0, 0);
    calls_flush(&g.a);
    ok(g.a.calls->first == NULL, "then all is freed");
    rig_close(&x);
    rig_fini(&g);
}

static void usage_can_be_told_with_every_event(void)
{
    struct rig g;
    struct exchange x;
    rig_init(&g, 1 << 20);
    rig_open(&x);
    rig_start(
        &g, &x, REQUEST_CHAT,
        "{\"prompt\":\"ab\",\"stream\":true,\"max_tokens\":2,\"stream_options\":"
        "{\"include_usage\":true,\"continuous_usage_stats\":true},\"return_token_ids\":true}");
    rig_say(&g, g.ids[0], "x", 0);
    calls_flush(&g.a);
    rig_say(&g, g.ids[0], "y", 1);
    rig_done(&g, g.ids[0], DONE_LENGTH, 0, 2);
    calls_flush(&g.a);
#define USAGE(c, t) \
    "\"usage\":{\"prompt_tokens\":2,\"completion_tokens\":" c ",\"total_tokens\":" t "}}\n\n"
    page_is(&x,
            CHUNK
            "{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null,"
            "\"finish_reason\":null}],\"prompt_token_ids\":[97,98]," USAGE("0", "2") //
            CHUNK "{\"index\":0,\"delta\":{\"content\":\"x\"},\"logprobs\":null,"
                  "\"finish_reason\":null,\"token_ids\":[120]}]," USAGE("1", "3") //
            CHUNK "{\"index\":0,\"delta\":{\"content\":\"y\"},\"logprobs\":null,"
                  "\"finish_reason\":\"length\",\"stop_reason\":null,\"token_ids\":[121]}]," USAGE(
                      "2", "4") //
            CHUNK "]," USAGE("2", "4") "data: [DONE]\n\n",
            "running usage rises to the final one; prompt ids come first");
    rig_close(&x);
    rig_fini(&g);
}

static void everything_can_be_aborted(void)
{
    struct rig g;
    struct exchange x, y;
    rig_init(&g, 1 << 20);
    rig_open(&x);
    rig_open(&y);
    rig_start(&g, &x, REQUEST_COMPLETION, "{\"prompt\":\"ab\"}");
    rig_start(&g, &y, REQUEST_COMPLETION, "{\"prompt\":\"ab\",\"stream\":true}");
    rig_say(&g, g.ids[1], "x", 0);
    calls_flush(&g.a);
    g.a.engine_dead = true;
    calls_abort_all(&g.a, "engine_dead", "The engine has stopped.");
    ok(x.status == 503 && strstr(x.bytes.p, "\"code\":\"engine_dead\""),
       "whole answers become 503");
    ok(y.ended && !y.clean && strstr(y.bytes.p, "engine_dead"), "streams end with an error event");
    ok(g.a.calls->first == NULL, "a dead engine owes nothing");
    rig_close(&x);
    rig_close(&y);
    rig_fini(&g);
}

/* --- what a tenant is charged ------------------------------------------------------------------------ */

/* A tenant with the number 1, whose minute stands still. */
static struct roster_slot *rig_tenant(struct rig *g)
{
    struct roster *ro = mem_alloc(sizeof *ro);
    struct roster_slot *s = mem_alloc(sizeof *s);
    quota_init(&s->quota, &(struct quota_limits){.per_minute = {10, 1000, 1000}}, UINT64_MAX);
    metrics_tenants_init(&s->counts);
    snprintf(s->rules.name, sizeof s->rules.name, "a");
    s->number = s->life = 1;
    s->listed = true;
    ro->slots[1] = s;
    g->a.roster = ro;
    return s;
}

/* As api_body leaves it to call_start. */
static void ask_as_tenant(struct rig *g, struct exchange *x, struct roster_slot *s)
{
    rig_open(x);
    x->caller = (struct caller){.tenant = s->number, .life = s->life, .counted = true};
    quota_take(&s->quota, QUOTA_REQUESTS, 1, 0);
    rig_start(g, x, REQUEST_COMPLETION, "{\"prompt\":\"1234567890\",\"max_tokens\":100}");
}

static bool has_left(const struct roster_slot *s, double requests, double input, double output)
{
    const double *level = s->quota.level;
    bool good = level[QUOTA_REQUESTS] == requests && level[QUOTA_INPUT] == input &&
                level[QUOTA_OUTPUT] == output;
    if (!good)
        printf("# left: %g requests, %g input, %g output\n", level[QUOTA_REQUESTS],
               level[QUOTA_INPUT], level[QUOTA_OUTPUT]);
    return good;
}

static void a_tenant_pays_for_what_was_made(void)
{
    struct rig g;
    struct exchange x;
    rig_init(&g, 1 << 20);
    struct roster_slot *s = rig_tenant(&g);
    ask_as_tenant(&g, &x, s);
    ok(g.last.tenant == 1 && has_left(s, 9, 990, 900), "a call is charged when it is admitted");
    ok(s->quota.n_queued == 1 && s->quota.queued_tokens == 10 && s->n_calls == 1, "and counted");
    rig_scheduled(&g, g.ids[0]);
    ok(s->quota.n_queued == 0 && s->quota.queued_tokens == 0 && s->quota.n_running == 1,
       "in the queue, and where it runs");
    rig_say(&g, g.ids[0], "abc", 0);
    rig_done(&g, g.ids[0], DONE_STOP, RIG_EOS, 3);
    calls_flush(&g.a);
    ok(x.ended && has_left(s, 9, 990, 997), "of 100 tokens 3 were made: 97 come back");
    ok(s->quota.n_running == 0 && s->n_calls == 0, "and nothing of it is left");
    ok(s->counts.prompt_tokens == 10 && s->counts.output_tokens == 3 && s->counts.answers[2] == 1 &&
           s->counts.ttft.sum > 0,
       "but in the metrics");
    rig_close(&x);
    roster_destroy(g.a.roster);
    rig_fini(&g);
}

static void who_leaves_has_asked(void)
{
    struct rig g;
    struct exchange x;
    rig_init(&g, 1 << 20);
    struct roster_slot *s = rig_tenant(&g);
    ask_as_tenant(&g, &x, s);
    call_gone(&g.a, &x);
    rig_done(&g, g.ids[0], DONE_CANCELLED, 0, 0);
    calls_flush(&g.a);
    ok(has_left(s, 9, 1000, 1000), "a prompt that nobody read is paid back, the request is not");
    rig_close(&x);
    ask_as_tenant(&g, &x, s);
    calls_tick(&g.a, clock_us() + 31000000);
    rig_done(&g, g.ids[1], DONE_CANCELLED, 0, 0);
    calls_flush(&g.a);
    ok(x.status == 503 && has_left(s, 9, 1000, 1000), "that is, if the queue was too long: all is");
    rig_close(&x);
    ask_as_tenant(&g, &x, s);
    s->listed = false;
    rig_scheduled(&g, g.ids[2]);
    rig_say(&g, g.ids[2], "abc", 0);
    rig_done(&g, g.ids[2], DONE_STOP, RIG_EOS, 3);
    calls_flush(&g.a);
    ok(x.status == 200 && s->n_calls == 0, "a tenant that is removed keeps what it had running");
    rig_close(&x);
    ask_as_tenant(&g, &x, s);
    ok(x.status == 401 && s->n_calls == 0, "and gets nothing new");
    rig_close(&x);
    roster_destroy(g.a.roster);
    rig_fini(&g);
}

int main(void)
{
    a_tenant_pays_for_what_was_made();
    who_leaves_has_asked();
    a_chat_stream_is_byte_for_byte_what_clients_expect();
    the_last_text_carries_the_reason();
    a_stop_string_ends_it_at_once();
    what_the_cache_held_is_told_however_an_answer_ends();
    stop_ids_are_told_but_end_tokens_are_not();
    choices_are_numbered_prompt_by_prompt();
    echo_with_logprobs_begins_with_the_prompt();
    failures_are_statuses_before_the_head_and_events_after();
    what_can_never_fit_is_a_400_that_says_why();
    sparse_attention_is_told_in_usage();
    a_client_that_leaves_is_never_touched_again();
    the_queue_is_bounded();
    memory_for_answers_is_bounded();
    time_passes();
    a_slow_reader_gets_fewer_longer_events();
    a_long_echo_leaves_in_bounded_events();
    a_long_whole_answer_leaves_in_pieces();
    a_full_mailbox_delays_and_loses_nothing();
    usage_can_be_told_with_every_event();
    everything_can_be_aborted();
    return tap_done();
}
