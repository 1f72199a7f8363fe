/* The engine through its mailbox, with the mock backend: real scheduler, real blocks, no arithmetic.
 * Whatever happens to a request, it gets exactly one MSG_DONE and its blocks come home. */
#include "engine/engine.h"
#include "cache/kv.h"
#include "tests/tap.h"

#include <time.h>

enum { MAX_IDS = 4096, TENANTS = 4 };

/* What the loop thread heard. */
struct ear {
    uint32_t tokens[MAX_IDS], done[MAX_IDS], scheduled[MAX_IDS], prompts[MAX_IDS];
    struct msg_done last[MAX_IDS];
    uint64_t token_hash[MAX_IDS];
    struct msg_step step;
    struct msg_tenant_state tenants[TENANTS]; /* the last of each */
    uint32_t n_states[TENANTS], most_running[TENANTS];
    uint32_t n_done, failed;
    bool after_done; /* an id was mentioned after its last event */
};

static struct engine_config config(void)
{
    return (struct engine_config){.device = "mock",
                                  .mock = {.first_token = 32, .n_tokens = 90, .eos_token = 257},
                                  .block_rows = 8,
                                  .kv_hbm_bytes = 64 << 20,
                                  .max_model_len = 1024,
                                  .max_num_seqs = 16,
                                  .max_batched_tokens = 64,
                                  .prefix_caching = true,
                                  .seed = 7};
}

static struct engine *start(const struct engine_config *cfg)
{
    struct engine *e = NULL;
    if (engine_create(&e, cfg, NULL, NULL) != OK || engine_start(e) != OK) {
        printf("Bail out! %s\n", err_text());
        exit(1);
    }
    return e;
}

struct ask {
    uint32_t n_prompt, max_tokens, min_tokens, stop, first;
    uint64_t leader;
    int32_t logprobs, prompt_logprobs;
    uint32_t tenant;
    float presence; /* a penalty: steps of such an answer are not launched ahead */
};

static void submit(struct engine *e, uint64_t id, const struct ask *a)
{
    struct mailbox *m = engine_mailbox(e);
    uint32_t n_stop = a->stop != 0;
    size_t bytes = sizeof(struct msg_submit) + (a->n_prompt + n_stop) * 4;
    struct msg_submit *s;
    while ((s = mailbox_reserve(m, TO_ENGINE, bytes)) == NULL)
        mailbox_wake_engine(m);
    struct msg_head head = s->head;
    *s = (struct msg_submit){
        .head = head,
        .id = id,
        .leader = a->leader,
        .params = {.top_p = 1, .repetition_penalty = 1, .presence_penalty = a->presence, .seed = 1},
        .n_prompt = a->n_prompt,
        .n_stop = n_stop,
        .max_tokens = a->max_tokens,
        .min_tokens = a->min_tokens,
        .logprobs = a->logprobs - 1,
        .prompt_logprobs = a->prompt_logprobs - 1,
        .tenant = a->tenant};
    s->head.kind = MSG_SUBMIT;
    uint32_t *arrays = (uint32_t *)(s + 1);
    for (uint32_t i = 0; i < a->n_prompt; i++)
        arrays[i] = (a->first + i) % 256;
    if (n_stop)
        arrays[a->n_prompt] = a->stop;
    mailbox_post(m, TO_ENGINE);
    mailbox_wake_engine(m);
}

static void cancel(struct engine *e, uint64_t id)
{
    struct mailbox *m = engine_mailbox(e);
    struct msg_cancel *c = mailbox_reserve(m, TO_ENGINE, sizeof *c);
    CHECK(c != NULL);
    c->head.kind = MSG_CANCEL;
    c->id = id;
    mailbox_post(m, TO_ENGINE);
    mailbox_wake_engine(m);
}

static void tell_of_tenant(struct engine *e, const struct msg_tenant *what)
{
    struct mailbox *m = engine_mailbox(e);
    struct msg_tenant *t = mailbox_reserve(m, TO_ENGINE, sizeof *t);
    CHECK(t != NULL);
    struct msg_head head = t->head;
    *t = *what;
    t->head = head;
    t->head.kind = MSG_TENANT;
    mailbox_post(m, TO_ENGINE);
    mailbox_wake_engine(m);
}

static void hear_tenant(struct ear *ear, const struct msg_tenant_state *s)
{
    CHECK(s->tenant < TENANTS);
    ear->tenants[s->tenant] = *s;
    ear->n_states[s->tenant]++;
    if (s->running > ear->most_running[s->tenant])
        ear->most_running[s->tenant] = s->running;
}

static void hear(struct ear *ear, const struct msg_head *h)
{
    if (h->kind == MSG_TENANT_STATE) {
        hear_tenant(ear, (const struct msg_tenant_state *)(const void *)h);
        return;
    }
    if (h->kind == MSG_STEP) {
        ear->step = *(const struct msg_step *)(const void *)h;
        return;
    }
    if (h->kind == MSG_FAILED) {
        ear->failed++;
        ear->n_done++;
        return;
    }
    uint64_t id = ((const struct msg_cancel *)(const void *)h)->id; /* all have it in one place */
    CHECK(id < MAX_IDS);
    ear->after_done = ear->after_done || ear->done[id] > 0;
    if (h->kind == MSG_SCHEDULED)
        ear->scheduled[id]++;
    if (h->kind == MSG_PROMPT)
        ear->prompts[id]++;
    if (h->kind == MSG_TOKEN) {
        const struct msg_token *t = (const struct msg_token *)(const void *)h;
        CHECK(t->index == ear->tokens[id]);
        ear->tokens[id]++;
        ear->token_hash[id] = (ear->token_hash[id] ^ t->token) * 1099511628211u;
    }
    if (h->kind == MSG_DONE) {
        ear->last[id] = *(const struct msg_done *)(const void *)h;
        ear->done[id]++;
        ear->n_done++;
    }
}

/* Listens until n_done requests have ended (or a deadline). */
static void listen_until(struct engine *e, struct ear *ear, uint32_t n_done)
{
    struct mailbox *m = engine_mailbox(e);
    uint64_t start_us = clock_us();
    while (ear->n_done < n_done && clock_us() - start_us < 20000000) {
        const struct msg_head *h = mailbox_peek(m, TO_LOOP);
        if (h == NULL) {
            nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
            continue;
        }
        hear(ear, h);
        mailbox_release(m, TO_LOOP);
    }
}

/* After the last request: takes what is still queued, then compares free blocks. */
static bool all_home(struct engine *e, struct ear *ear)
{
    struct mailbox *m = engine_mailbox(e);
    uint64_t start_us = clock_us();
    while (clock_us() - start_us < 2000000) {
        const struct msg_head *h;
        while ((h = mailbox_peek(m, TO_LOOP)) != NULL) {
            hear(ear, h);
            mailbox_release(m, TO_LOOP);
        }
        const struct msg_step *s = &ear->step;
        if (s->running == 0 && s->waiting == 0 &&
            s->blocks_free[0] + s->blocks_cached[0] == s->blocks_total[0])
            return true;
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    return false;
}

static void a_request_gets_its_tokens_and_one_last_event(void)
{
    static struct ear ear;
    struct engine_config cfg = config();
    struct engine *e = start(&cfg);
    memset(&ear, 0, sizeof ear);
    submit(e, 1, &(struct ask){.n_prompt = 100, .max_tokens = 50});
    listen_until(e, &ear, 1);
    ok(ear.scheduled[1] == 1 && ear.tokens[1] == 50 && ear.done[1] == 1,
       "a request is scheduled once, gets 50 tokens and one last event");
    ok(ear.last[1].reason == DONE_LENGTH && ear.last[1].n_output == 50 &&
           ear.last[1].n_prompt == 100 && ear.last[1].first_us >= ear.last[1].scheduled_us,
       "which says why and how much");
    submit(e, 2, &(struct ask){.n_prompt = 100, .max_tokens = 50});
    listen_until(e, &ear, 2);
    ok(ear.last[2].n_cached == 96 && ear.token_hash[2] == ear.token_hash[1],
       "the same prompt again finds 96 of its 100 tokens and gets the same answer");
    submit(e, 3, &(struct ask){.n_prompt = 30, .max_tokens = 0});
    submit(e, 4, &(struct ask){.n_prompt = 30, .max_tokens = 0, .prompt_logprobs = 3});
    listen_until(e, &ear, 4);
    ok(ear.tokens[3] == 0 && ear.last[3].reason == DONE_LENGTH, "max_tokens 0 ends at once");
    ok(ear.prompts[4] == 29 && ear.last[4].n_output == 0,
       "prompt_logprobs scores every prompt token but the first");
    submit(e, 5,
           &(struct ask){.n_prompt = 300, .max_tokens = 2, .prompt_logprobs = 1, .logprobs = 6});
    listen_until(e, &ear, 5);
    ok(ear.prompts[5] == 299 && ear.tokens[5] == 2, "also in several chunks, with tokens after it");
    ok(all_home(e, &ear) && !ear.after_done, "every block is home and no id is mentioned again");
    engine_destroy(e);
}

static void many_requests_on_few_blocks_all_finish(void)
{
    static struct ear ear;
    struct engine_config cfg = config();
    /* 150 blocks of 8 rows for 40 requests of up to 600 rows: they outgrow the arena. */
    cfg.kv_hbm_bytes = 150 * kv_geometry_make(8, 30, 3, 64).block_bytes[LANE_SPARSE];
    cfg.kv_dram_bytes = 50 * kv_geometry_make(8, 30, 3, 64).block_bytes[LANE_SPARSE];
    struct engine *e = start(&cfg);
    memset(&ear, 0, sizeof ear);
    enum { N = 40 };
    for (uint64_t id = 1; id <= N; id++)
        submit(
            e, id,
            &(struct ask){.n_prompt = 20 + (uint32_t)id, .max_tokens = 500, .first = (uint32_t)id});
    listen_until(e, &ear, N);
    bool all = true;
    uint32_t preempted = 0;
    for (uint64_t id = 1; id <= N; id++) {
        all =
            all && ear.done[id] == 1 && ear.tokens[id] == 500 && ear.last[id].reason == DONE_LENGTH;
        preempted += ear.last[id].n_preempted;
    }
    ok(all, "40 requests that outgrow the arena together all get their 500 tokens");
    ok(preempted > 0 && ear.step.preemptions == preempted, "by preemption, which is counted (%u)",
       preempted);
    ok(all_home(e, &ear), "every block is home");
    uint64_t hash[N + 1];
    memcpy(hash, ear.token_hash, sizeof hash);
    engine_destroy(e);
    cfg = config();
    e = start(&cfg);
    memset(&ear, 0, sizeof ear);
    for (uint64_t id = 1; id <= N; id++) {
        submit(
            e, id,
            &(struct ask){.n_prompt = 20 + (uint32_t)id, .max_tokens = 500, .first = (uint32_t)id});
        listen_until(e, &ear, (uint32_t)id);
    }
    ok(memcmp(hash + 1, ear.token_hash + 1, N * sizeof hash[0]) == 0,
       "and the same tokens as alone on a large arena");
    engine_destroy(e);
}

static void a_cancel_works_in_every_state(void)
{
    static struct ear ear;
    struct engine_config cfg = config();
    cfg.mock.step_us = 2000;
    cfg.max_num_seqs = 2;
    struct engine *e = start(&cfg);
    memset(&ear, 0, sizeof ear);
    submit(e, 1, &(struct ask){.n_prompt = 10, .max_tokens = 1000});
    submit(e, 2, &(struct ask){.n_prompt = 900, .max_tokens = 100, .first = 5});
    submit(e, 3, &(struct ask){.n_prompt = 10, .max_tokens = 10, .first = 9});
    nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    cancel(e, 3);
    cancel(e, 2);
    cancel(e, 1);
    cancel(e, 77);
    uint64_t t = clock_us();
    listen_until(e, &ear, 3);
    ok(clock_us() - t < 500000, "decoding, prefilling and waiting requests end at once");
    ok(ear.last[1].reason == DONE_CANCELLED && ear.last[2].reason == DONE_CANCELLED &&
           ear.last[3].reason == DONE_CANCELLED && ear.scheduled[3] == 0,
       "each as cancelled; the one in the queue was never scheduled");
    ok(all_home(e, &ear) && !ear.after_done,
       "every block is home and nothing more is said of them");
    engine_destroy(e);
}

static void bad_numbers_cost_only_their_own_request(void)
{
    static struct ear ear;
    struct engine_config cfg = config();
    cfg.mock.nan_every = 97;
    struct engine *e = start(&cfg);
    memset(&ear, 0, sizeof ear);
    for (uint64_t id = 1; id <= 8; id++)
        submit(e, id, &(struct ask){.n_prompt = 10, .max_tokens = 40, .first = (uint32_t)id});
    listen_until(e, &ear, 8);
    uint32_t bad = 0, good = 0;
    for (uint64_t id = 1; id <= 8; id++) {
        bad += ear.last[id].reason == DONE_NUMERIC;
        good += ear.last[id].reason == DONE_LENGTH && ear.tokens[id] == 40;
    }
    ok(bad >= 1 && bad + good == 8, "a non-finite logit ends its request and no other (%u of 8)",
       bad);
    ok(all_home(e, &ear), "every block is home");
    engine_destroy(e);
}

static void a_failed_step_ends_its_requests_and_the_engine_goes_on(void)
{
    static struct ear ear;
    struct engine_config cfg = config();
    cfg.mock.fail_step = 5;
    struct engine *e = start(&cfg);
    memset(&ear, 0, sizeof ear);
    submit(e, 1, &(struct ask){.n_prompt = 10, .max_tokens = 40});
    listen_until(e, &ear, 1);
    ok(ear.last[1].reason == DONE_DEVICE, "a failed step ends its request with a device error");
    submit(e, 2, &(struct ask){.n_prompt = 10, .max_tokens = 40});
    listen_until(e, &ear, 2);
    ok(ear.last[2].reason == DONE_LENGTH && ear.tokens[2] == 40, "the next request is served");
    ok(all_home(e, &ear), "every block is home");
    engine_destroy(e);
}

static void an_engine_whose_device_is_gone_says_so_and_ends(void)
{
    static struct ear ear;
    struct engine_config cfg = config();
    cfg.mock.fail_step = 4;
    cfg.mock.fail_count = 100;
    struct engine *e = start(&cfg);
    memset(&ear, 0, sizeof ear);
    for (uint64_t id = 1; id <= 3; id++) {
        submit(e, id, &(struct ask){.n_prompt = 10, .max_tokens = 40});
        listen_until(e, &ear, (uint32_t)id);
    }
    ok(ear.last[1].reason == DONE_DEVICE && ear.last[3].reason == DONE_DEVICE,
       "three failed steps in a row end their requests");
    listen_until(e, &ear, 4);
    ok(ear.failed == 1, "and the engine says that it is over");
    uint64_t t = clock_us();
    engine_destroy(e);
    ok(clock_us() - t < 1000000, "and can be destroyed");
}

static void end_tokens_and_min_tokens(void)
{
    static struct ear ear;
    struct engine_config cfg = config();
    cfg.mock.eos_every = 10;
    struct engine *e = start(&cfg);
    memset(&ear, 0, sizeof ear);
    submit(e, 1, &(struct ask){.n_prompt = 10, .max_tokens = 100, .stop = 257});
    submit(e, 2, &(struct ask){.n_prompt = 10, .max_tokens = 100, .stop = 257, .min_tokens = 35});
    listen_until(e, &ear, 2);
    ok(ear.last[1].reason == DONE_STOP && ear.last[1].stop_token == 257 &&
           ear.last[1].n_output <= 10,
       "a stop token ends the request and is named");
    ok(ear.last[2].reason == DONE_STOP && ear.last[2].n_output > 35, "but not before min_tokens");
    engine_destroy(e);
}

/* Whoever cannot go ahead holds the others' next step back after they were prepared for it. */
static void stream_lanes_beside_an_answer_that_waits(void)
{
    struct engine_config cfg = config();
    struct ear ear = {0};
    cfg.heads = (struct head_policy_config){.name = "streaming", .sinks = 16, .recent = 128};
    struct engine *e = start(&cfg);
    submit(e, 1, &(struct ask){.n_prompt = 40, .max_tokens = 700});
    submit(e, 2, &(struct ask){.n_prompt = 70, .max_tokens = 700, .presence = 1});
    submit(e, 3, &(struct ask){.n_prompt = 10, .max_tokens = 500});
    listen_until(e, &ear, 3);
    ok(ear.tokens[1] == 700 && ear.tokens[2] == 700 && ear.tokens[3] == 500 && ear.failed == 0,
       "answers with STREAM lanes and a penalty end whole");
    engine_destroy(e);
}

static void quitting_with_work_left_does_not_hang(void)
{
    struct engine_config cfg = config();
    cfg.to_loop_bytes = 8192; /* nobody reads: the ring fills */
    struct engine *e = start(&cfg);
    for (uint64_t id = 1; id <= 16; id++)
        submit(e, id, &(struct ask){.n_prompt = 10, .max_tokens = 1000, .logprobs = 6});
    nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
    uint64_t t = clock_us();
    engine_destroy(e);
    ok(clock_us() - t < 1000000, "an engine with a full event ring ends within a second");
}

static bool tenant_is_idle(const struct ear *ear, uint32_t tenant)
{
    const struct msg_tenant_state *s = &ear->tenants[tenant];
    return ear->n_states[tenant] > 0 && s->running + s->waiting + s->paused == 0 &&
           s->kv_bytes[0] + s->kv_bytes[1] == 0;
}

/* All blocks home, and behind the step that said so that the tenant is idle. */
static bool all_told(struct engine *e, struct ear *ear, uint32_t tenant)
{
    bool home = all_home(e, ear);
    for (int i = 0; i < 2000 && !tenant_is_idle(ear, tenant); i++) {
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
        home = all_home(e, ear);
    }
    return home && tenant_is_idle(ear, tenant);
}

static void tenants_are_heard_and_told_of(void)
{
    static struct ear ear;
    struct engine_config cfg = config();
    struct engine *e = start(&cfg);
    bool one_by_one = true;
    memset(&ear, 0, sizeof ear);
    submit(e, 1, &(struct ask){.n_prompt = 30, .max_tokens = 20});
    listen_until(e, &ear, 1);
    ok(all_home(e, &ear) && ear.n_states[0] == 0,
       "before anybody tells of tenants nothing is told of them");
    tell_of_tenant(e, &(struct msg_tenant){.tenant = 1, .weight = 2, .max_running = 1});
    tell_of_tenant(e, &(struct msg_tenant){.tenant = 2, .weight = 1});
    for (uint32_t id = 2; id <= 5; id++)
        submit(e, id,
               &(struct ask){.n_prompt = 30, .max_tokens = 20, .tenant = 1, .first = 7 * id});
    submit(e, 6, &(struct ask){.n_prompt = 40, .max_tokens = 10, .tenant = 2});
    listen_until(e, &ear, 6);
    ok(all_told(e, &ear, 1) && all_told(e, &ear, 2), "when a tenant is idle its gauges are 0");
    for (uint32_t id = 3; id <= 5; id++)
        one_by_one &= ear.last[id].scheduled_us >= ear.last[id - 1].last_us;
    ok(one_by_one && ear.most_running[1] <= 1, "one of a tenant's four requests runs at a time");
    ok(ear.tenants[1].prompt_tokens + ear.tenants[1].cached_tokens == 120 &&
           ear.tenants[1].output_tokens == 80,
       "its tokens are told");
    ok(ear.tenants[2].prompt_tokens + ear.tenants[2].cached_tokens == 40 &&
           ear.tenants[2].output_tokens == 10,
       "and the other's");
    engine_destroy(e);
}

static void what_a_tenant_may_never_have_is_refused(void)
{
    static struct ear ear;
    struct engine_config cfg = config();
    struct engine *e = start(&cfg);
    uint64_t block = engine_info(e)->kv_block_bytes;
    memset(&ear, 0, sizeof ear);
    tell_of_tenant(
        e, &(struct msg_tenant){.tenant = 3, .weight = 1, .max_kv_bytes = {10 * block + 1}});
    submit(e, 1, &(struct ask){.n_prompt = 61, .max_tokens = 20, .tenant = 3});
    submit(e, 2, &(struct ask){.n_prompt = 60, .max_tokens = 20, .tenant = 3});
    submit(e, 3, &(struct ask){.n_prompt = 60, .max_tokens = 20, .tenant = 3, .first = 50});
    submit(e, 4, &(struct ask){.n_prompt = 61, .max_tokens = 20});
    listen_until(e, &ear, 4);
    ok(ear.last[1].reason == DONE_REFUSED &&
           strcmp(ear.last[1].text,
                  "81 positions need 11 KV blocks in HBM, and this tenant may have 10: "
                  "lower max_tokens, or raise its bound") == 0,
       "what never fits a tenant's bound is refused, and told why: %s", ear.last[1].text);
    ok(ear.tokens[2] == 20 && ear.tokens[3] == 20 && ear.tokens[4] == 20 &&
           ear.last[3].scheduled_us >= ear.last[2].last_us,
       "what fits is served, one after the other, and what is another's at once");
    ok(all_home(e, &ear), "every block is home");
    engine_destroy(e);
}

static void a_failed_step_is_not_charged(void)
{
    static struct ear ear;
    struct engine_config cfg = config();
    cfg.mock.fail_step = 5;
    struct engine *e = start(&cfg);
    memset(&ear, 0, sizeof ear);
    tell_of_tenant(e, &(struct msg_tenant){.tenant = 1, .weight = 1});
    submit(e, 1, &(struct ask){.n_prompt = 500, .max_tokens = 40, .tenant = 1});
    listen_until(e, &ear, 1);
    ok(all_told(e, &ear, 1) && ear.last[1].reason == DONE_DEVICE && ear.tenants[1].served > 0 &&
           ear.tenants[1].served < 500 && ear.tenants[1].prompt_tokens == ear.step.prompt_tokens,
       "a tenant is charged for the steps before the one that failed: %.0f rows of 500",
       ear.tenants[1].served);
    engine_destroy(e);
}

int main(void)
{
    a_request_gets_its_tokens_and_one_last_event();
    many_requests_on_few_blocks_all_finish();
    a_cancel_works_in_every_state();
    bad_numbers_cost_only_their_own_request();
    a_failed_step_ends_its_requests_and_the_engine_goes_on();
    an_engine_whose_device_is_gone_says_so_and_ends();
    end_tokens_and_min_tokens();
    stream_lanes_beside_an_answer_that_waits();
    quitting_with_work_left_does_not_hang();
    tenants_are_heard_and_told_of();
    what_a_tenant_may_never_have_is_refused();
    a_failed_step_is_not_charged();
    return tap_done();
}
