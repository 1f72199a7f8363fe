/* api/text_out.c: what leaves, what waits, what is cut. */
#include "tests/tap.h"
#include "tests/text_out_rig.h"

struct bench {
    struct arena mem;
    struct text_stops stops;
    struct text_view views[4];
    struct text_out t;
    bool stopped;
};

static void open_bench(struct bench *b, const char *const *stops, uint32_t n, bool include)
{
    arena_init(&b->mem, 4096, 65536);
    for (uint32_t i = 0; i < n; i++)
        b->views[i] = (struct text_view){stops[i], strlen(stops[i])};
    CHECK(text_out_stops(&b->stops, &b->mem, b->views, n) == OK);
    text_out_init(&b->t, &b->stops, include, true);
    b->stopped = false;
}

static void close_bench(struct bench *b)
{
    text_out_fini(&b->t);
    arena_fini(&b->mem);
}

static void push(struct bench *b, const char *bytes)
{
    struct text_piece p = {.bytes = {bytes, strlen(bytes)}};
    b->stopped = text_out_push(&b->t, &p);
}

static bool ready_is(const struct bench *b, const char *want)
{
    return b->t.ready == strlen(want) &&
           (b->t.ready == 0 || memcmp(b->t.text, want, b->t.ready) == 0);
}

static void only_what_a_stop_could_take_back_is_held(void)
{
    struct bench b;
    open_bench(&b, (const char *[]){"###", "\n\nUser"}, 2, false);
    push(&b, "Hello #");
    ok(ready_is(&b, "Hello "), "a prefix of a stop is held back, the text before it is not");
    push(&b, "1");
    ok(ready_is(&b, "Hello #1"), "it leaves as soon as it cannot become the stop");
    push(&b, "\n\nUs");
    ok(ready_is(&b, "Hello #1"), "the longest prefix of any stop is held");
    push(&b, "ers");
    ok(b.stopped && b.t.stop == 1, "a stop that spans tokens is found");
    ok(ready_is(&b, "Hello #1"), "the text ends before it");
    close_bench(&b);
}

static void the_stop_itself_is_given_if_asked(void)
{
    struct bench b;
    open_bench(&b, (const char *[]){"END"}, 1, true);
    push(&b, "so EN");
    push(&b, "DING");
    ok(b.stopped && ready_is(&b, "so END"), "include_stop keeps the stop, not what follows it");
    close_bench(&b);
}

static void the_earliest_match_wins(void)
{
    struct bench b;
    open_bench(&b, (const char *[]){"cd", "abcdef", "ab"}, 3, false);
    push(&b, "xabcdefg");
    ok(b.stopped && b.t.stop == 1 && ready_is(&b, "x"),
       "of the matches of one token the one that begins first, then the first in the list");
    close_bench(&b);
    open_bench(&b, (const char *[]){"aab"}, 1, false);
    push(&b, "aaaa");
    push(&b, "b");
    ok(b.stopped && ready_is(&b, "aa"), "a stop whose prefix repeats is found");
    close_bench(&b);
}

static void half_characters_wait(void)
{
    struct bench b;
    open_bench(&b, NULL, 0, false);
    push(&b, "a\xe6");
    ok(ready_is(&b, "a"), "the first byte of a character waits");
    push(&b, "\x97\xa5");
    ok(ready_is(&b, "a\xe6\x97\xa5"), "the whole character leaves");
    push(&b, "\xf0\x9f");
    text_out_end(&b.t);
    ok(ready_is(&b, "a\xe6\x97\xa5\xef\xbf\xbd"), "at the end one U+FFFD stands for the rest");
    close_bench(&b);
}

static void echoed_text_is_not_searched_but_counted(void)
{
    struct bench b;
    open_bench(&b, (const char *[]){"bc"}, 1, false);
    text_out_echo(&b.t, "abc \xe6\x97\xa5 ab", 10);
    struct text_piece bos = {.bytes = {"<s>", 3}, .hidden = true}, abc = {.bytes = {"abc ", 4}};
    struct text_piece half = {.bytes = {"\xe6\x97", 2}}, rest = {.bytes = {"\xa5 ab", 4}};
    text_out_echo_token(&b.t, &bos);
    text_out_echo_token(&b.t, &abc);
    text_out_echo_token(&b.t, &half);
    text_out_echo_token(&b.t, &rest);
    push(&b, "c");
    const struct text_token *v = b.t.tokens.v;
    ok(!b.stopped && ready_is(&b, "abc \xe6\x97\xa5 abc"), "a match may not begin in the prompt");
    ok(v[0].offset == 0 && v[1].offset == 0 && v[2].offset == 4 && v[3].offset == 4 &&
           v[4].offset == 8,
       "offsets count characters of the echoed text, and BOS covers none");
    ok(b.t.n_ready_tokens == 5 && v[3].prompt && !v[4].prompt, "prompt tokens are told apart");
    close_bench(&b);
}

static void the_naive_model_agrees(void)
{
    uint64_t x = 88172645463325252u;
    int bad = 0, rounds = getenv("TEST_ROUNDS") ? atoi(getenv("TEST_ROUNDS")) : 40000;
    for (int round = 0; round < rounds && bad < 3; round++) {
        uint8_t in[160];
        size_t len = 8 + (size_t)round % (sizeof in - 8);
        for (size_t i = 0; i < len; i++) {
            x ^= x << 13, x ^= x >> 7, x ^= x << 17;
            in[i] = (uint8_t)(x >> 32);
        }
        if (!rig_check(in, len)) {
            printf("# round %d\n", round);
            bad++;
        }
    }
    ok(bad == 0, "text, stops, held parts and tokens equal the naive model's in %d random cases",
       rounds);
}

int main(void)
{
    only_what_a_stop_could_take_back_is_held();
    the_stop_itself_is_given_if_asked();
    the_earliest_match_wins();
    half_characters_wait();
    echoed_text_is_not_searched_but_counted();
    the_naive_model_agrees();
    return tap_done();
}
