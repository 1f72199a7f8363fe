/* The pieces of `spind bench serve` that need no socket: Python's random numbers, and events of any
 * server. */
#include "api/load/event.h"
#include "api/load/random.h"
#include "tests/tap.h"

#include <math.h>
#include <string.h>

/* CPython 3.11: random.Random(seed), then random() three times, randrange(1000, 120000) four times,
 * expovariate(0.15) three times. */
static void draws_are_pythons(void)
{
    static const struct {
        uint32_t seed;
        double unit[3];
        uint32_t ids[4];
        double gaps[3];
    } want[] = {
        {3,
         {0.23796462709189137, 0.5442292252959519, 0.36995516654807925},
         {80157, 63135, 83014, 77133},
         {0.4518302304996645, 0.08836972163089774, 12.112580208589756}},
        {2,
         {0.9560342718892494, 0.9478274870593494, 0.05655136772680869},
         {12124, 48324, 110510, 23162},
         {8.877950030172693, 7.385639951489863, 2.455776905716461}},
    };
    struct random r;
    for (size_t i = 0; i < ARRAY_LEN(want); i++) {
        bool same = true;
        random_init(&r, want[i].seed);
        for (int k = 0; k < 3; k++)
            same = same && random_unit(&r) == want[i].unit[k];
        for (int k = 0; k < 4; k++)
            same = same && 1000 + random_below(&r, 119000) == want[i].ids[k];
        for (int k = 0; k < 3; k++)
            same = same && fabs(random_exponential(&r, 0.15) - want[i].gaps[k]) < 1e-12;
        ok(same, "seed %u draws what Python draws", want[i].seed);
    }
    random_init(&r, 3);
    for (int i = 0; i < 700; i++)
        (void)random_unit(&r);
    ok(random_unit(&r) == 0.07205680902929257, "and still does after a state is used up");
    bool all[5] = {false}, below = true;
    for (int i = 0; i < 200; i++) {
        uint32_t x = random_below(&r, 5);
        below = below && x < 5;
        all[x < 5 ? x : 0] = true;
    }
    ok(below && all[0] && all[1] && all[2] && all[3] && all[4] && random_below(&r, 1) == 0,
       "every number below n comes, and no other");
}

static bool reads(struct event *e, const char *json)
{
    size_t n = strlen(json);
    char *tight = mem_alloc(n > 0 ? n : 1); /* so that ASan sees a byte too far */
    memcpy(tight, json, n);
    bool good = event_read(e, tight, n);
    static char kept[1024];
    /* The texts are borrowed: let them point into what stays. */
    if (n < sizeof kept) {
        memcpy(kept, tight, n);
        (void)event_read(e, kept, n);
    }
    mem_free(tight);
    return good;
}

static bool says(const struct event_text *t, const char *want)
{
    return t->len == strlen(want) && memcmp(t->p, want, t->len) == 0;
}

static void events_of_any_server_are_read(void)
{
    struct event e;
    ok(reads(&e, "{\"id\":\"c\",\"choices\":[{\"index\":0,\"text\":\" a\\\"}]\",\"logprobs\":null,"
                 "\"finish_reason\":null}],\"usage\":null}") &&
           e.has_choice && says(&e.text, " a\\\"}]") && !e.finished && !e.has_usage && !e.is_error,
       "a completion's chunk, with brackets in its text");
    ok(reads(&e, "{ \"choices\" : [ { \"delta\" : { \"role\" : \"assistant\" , \"content\" : \"\" "
                 "} , \"finish_reason\" : null } ] }") &&
           e.has_choice && e.text.len == 0,
       "a chat's first chunk, with spaces");
    ok(reads(&e, "{\"choices\":[{\"delta\":{\"reasoning_content\":\"hm\"}}]}") &&
           says(&e.text, "hm"),
       "reasoning is text");
    ok(reads(&e, "{\"choices\":[{\"text\":\"\",\"finish_reason\":\"length\",\"token_ids\":[7, "
                 "12,99]},{\"text\":\"other\"}]}") &&
           e.finished && says(&e.reason, "length") && e.n_ids == 3 && e.text.len == 0,
       "a last chunk with ids; the second choice is not looked at");
    uint32_t ids[3] = {0};
    event_ids(&e, ids);
    ok(ids[0] == 7 && ids[1] == 12 && ids[2] == 99, "  the ids");
    ok(reads(&e, "{\"choices\":[{\"token_ids\":[]}]}") && e.n_ids == 0, "no ids are none");
    ok(reads(&e, "{\"choices\":[],\"usage\":{\"prompt_tokens\":64000,\"completion_tokens\":1024,"
                 "\"prompt_tokens_details\":{\"cached_tokens\":63984}}}") &&
           !e.has_choice && e.has_usage && e.prompt_tokens == 64000 &&
           e.completion_tokens == 1024 && e.cached_tokens == 63984,
       "usage");
    ok(reads(&e, "{\"error\":{\"message\":\"out of memory\",\"code\":500}}") && e.is_error &&
           says(&e.error, "out of memory"),
       "an error event");
    ok(reads(&e, "{\"error\":\"no\"}") && e.is_error && says(&e.error, "\"no\""),
       "an error that is no object");
    ok(reads(&e, "{\"error\":null}") && !e.is_error, "an error that is none");
    ok(reads(&e, "{}"), "nothing in it");
}

static void what_is_no_object_is_refused(void)
{
    static const char *const bad[] = {"",
                                      "[]",
                                      "{",
                                      "{\"a\":1",
                                      "{\"a\"}",
                                      "{\"a\":}",
                                      "{\"a\":1}x",
                                      "{\"choices\":[{]}",
                                      "{\"choices\":[{\"text\":\"a",
                                      "nonsense",
                                      "{\"a\":\"\\",
                                      "{\"usage\":{\"prompt_tokens\":}}",
                                      "{\"choices\":[{\"token_ids\":[1,2}"};
    struct event e;
    for (size_t i = 0; i < ARRAY_LEN(bad); i++)
        ok(!reads(&e, bad[i]), "refused: %s", bad[i]);
    static char deep[300];
    memset(deep, '[', sizeof deep - 1);
    memcpy(deep, "{\"a\":", 5);
    ok(!reads(&e, deep), "and what is 290 brackets deep");
}

int main(void)
{
    draws_are_pythons();
    events_of_any_server_are_read();
    what_is_no_object_is_refused();
    return tap_done();
}
