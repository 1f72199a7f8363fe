/* Prompts whose K and V are made up (msg_submit.n_filled), through bench_run, which `spind bench` drives the
 * engine with. */
#include "engine/tool/bench_run.h"
#include "tests/contract/engine_world.h"

struct seen {
    uint32_t want, n_done;
    uint64_t first_id;
    uint32_t n[8], tokens[8][64], reasons[8];
    struct msg_step last;
};

static bool watch(void *arg, const struct msg_head *h)
{
    struct seen *s = arg;
    const void *m = h;
    if (h->kind == MSG_STEP)
        s->last = *(const struct msg_step *)m;
    if (h->kind == MSG_TOKEN) {
        const struct msg_token *t = m;
        uint64_t i = t->id - s->first_id;
        s->tokens[i][s->n[i]++] = t->token;
    }
    if (h->kind == MSG_DONE) {
        const struct msg_done *d = m;
        s->reasons[d->id - s->first_id] = d->reason;
        s->n_done++;
    }
    return s->n_done == s->want && s->last.running + s->last.waiting == 0;
}

static struct bench_ask ask_of(uint32_t n_prompt, uint32_t n_filled, const char *plugin,
                               float budget)
{
    const struct ask a = {.plugin = plugin, .budget = budget};
    return (struct bench_ask){.n_prompt = n_prompt,
                              .n_filled = n_filled,
                              .max_tokens = 24,
                              .seed = 5,
                              .sparse = choice_of(&a)};
}

/* All of them together, from their submission to the last end. */
static void run_all(struct bench_run *r, const struct bench_ask *asks, uint32_t n, struct seen *s)
{
    *s = (struct seen){.want = n, .first_id = r->last_id + 1};
    for (uint32_t i = 0; i < n; i++)
        CHECK(bench_run_submit(r, &asks[i]) == s->first_id + i);
    CHECK(bench_run_listen(r, watch, s, 60) == OK);
}

static bool all_home(const struct seen *s)
{
    return s->last.blocks_free[0] == s->last.blocks_total[0] &&
           s->last.blocks_free[1] == s->last.blocks_total[1] && s->last.residence.digest_bytes == 0;
}

static void made_up_prompts_decode(struct bench_run *r)
{
    const struct bench_ask asks[] = {ask_of(2400, 2399, "dense", 1),
                                     ask_of(2400, 2399, "wave", 0.1f),
                                     ask_of(700, 300, "dense", 1) /* the rest is computed */};
    struct seen s;
    run_all(r, asks, 3, &s);
    bool whole = true;
    for (int i = 0; i < 3; i++)
        whole = whole && s.n[i] == 24 && s.reasons[i] == DONE_LENGTH;
    ok(whole, "they are answered at full length");
    ok(s.last.prompt_tokens == 1 + 1 + 400, "what is made up is not computed: %llu rows were",
       (unsigned long long)s.last.prompt_tokens);
    ok(s.last.residence.segments_sealed == 2 && s.last.residence.planned_rows == 23,
       "what is made up is sealed, and answers attend by plan");
    ok(all_home(&s), "and every block comes home");
}

static void who_computes_does_not_notice(struct bench_run *r)
{
    const struct bench_ask alone = ask_of(600, 0, "dense", 1);
    const struct bench_ask all[] = {ask_of(1500, 1499, "wave", 0.1f), alone,
                                    ask_of(2000, 1999, "dense", 1)};
    struct seen a, b;
    run_all(r, &alone, 1, &a);
    run_all(r, all, 3, &b);
    ok(a.n[0] == 24 && b.n[1] == 24 && memcmp(a.tokens[0], b.tokens[1], sizeof a.tokens[0]) == 0,
       "beside them the same answer as alone");
    run_all(r, &alone, 1, &b);
    ok(memcmp(a.tokens[0], b.tokens[0], sizeof a.tokens[0]) == 0, "and again");
    const struct bench_ask made_up = ask_of(600, 599, "dense", 1),
                           real = ask_of(600, 0, "dense", 1);
    run_all(r, &made_up, 1, &b);
    run_all(r, &real, 1, &b);
    ok(memcmp(a.tokens[0], b.tokens[0], sizeof a.tokens[0]) == 0,
       "what is made up is never found by whoever has the same prompt");
}

static void few_tokens_may_be_fed(struct bench_run *r)
{
    struct bench_ask a = ask_of(300, 299, "dense", 1);
    struct seen s;
    a.feed = 2;
    run_all(r, &a, 1, &s);
    uint32_t first = s.tokens[0][0], second = first;
    bool two = true;
    for (uint32_t i = 0; i < s.n[0]; i++) {
        second = second == first ? s.tokens[0][i] : second;
        two = two && (s.tokens[0][i] == first || s.tokens[0][i] == second);
    }
    ok(s.n[0] == 24 && two && first != second, "an answer of two tokens, in no order");
}

int main(void)
{
    struct bench_run r;
    struct engine_config cfg = config();
    make_model();
    if (bench_run_open(&r, &cfg) != OK) {
        printf("Bail out! %s\n", err_text());
        return 1;
    }
    made_up_prompts_decode(&r);
    who_computes_does_not_notice(&r);
    few_tokens_may_be_fed(&r);
    bench_run_close(&r);
    cfg.prefix_caching = true;
    if (bench_run_open(&r, &cfg) == OK)
        who_computes_does_not_notice(&r);
    bench_run_close(&r);
    unlink(model_path);
    return tap_done();
}
