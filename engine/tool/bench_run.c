#include "engine/tool/bench_run.h"

#include <errno.h>
#include <string.h>
#include <time.h>

enum { PINNING_S = 60 }; /* for a piece of the second tier, at most */

static void wake(void *arg)
{
    struct bench_run *r = arg;
    sem_post(&r->woken);
}

static bool dram_is_there(void *arg, const struct msg_head *h)
{
    (void)arg;
    return h->kind == MSG_STEP && !((const struct msg_step *)(const void *)h)->residence.dram_grows;
}

status bench_run_open(struct bench_run *r, const struct engine_config *cfg)
{
    *r = (struct bench_run){0};
    CHECK(sem_init(&r->woken, 0, 0) == 0);
    status st = engine_create(&r->engine, cfg, wake, r);
    if (st == OK)
        st = engine_start(r->engine);
    if (st == OK) {
        r->info = engine_info(r->engine);
        r->mail = engine_mailbox(r->engine);
        /* A second tier that is pinned behind the start: who measures what fits waits for it. */
        if (cfg->kv_dram_bytes > 0)
            st = bench_run_listen(r, dram_is_there, NULL, PINNING_S);
    }
    if (st != OK)
        bench_run_close(r);
    return st;
}

void bench_run_close(struct bench_run *r)
{
    engine_destroy(r->engine);
    r->engine = NULL;
    sem_destroy(&r->woken);
}

/* So much, so that other tokens do not count beside it. */
static const float BIAS = 100, HEAT = 2;

static size_t ask_bytes(const struct bench_ask *a)
{
    return sizeof(struct msg_submit) + ((size_t)a->n_prompt + 2 * (size_t)a->feed) * 4;
}

uint64_t bench_run_submit(struct bench_run *r, const struct bench_ask *a)
{
    struct msg_submit *s;
    while ((s = mailbox_reserve(r->mail, TO_ENGINE, ask_bytes(a))) == NULL) {
        mailbox_wake_engine(r->mail);
        nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
    }
    struct msg_head head = s->head;
    *s = (struct msg_submit){.head = head,
                             .id = ++r->last_id,
                             .arrival_us = clock_us(),
                             .params = {.temperature = a->feed > 0 ? HEAT : 0,
                                        .top_p = 1,
                                        .repetition_penalty = 1,
                                        .seed = a->seed},
                             .n_prompt = a->n_prompt,
                             .n_filled = a->n_filled,
                             .n_bias = a->feed,
                             .max_tokens = a->max_tokens,
                             .logprobs = -1,
                             .prompt_logprobs = -1,
                             .sparse = a->sparse};
    s->head.kind = MSG_SUBMIT;
    uint32_t *prompt = (uint32_t *)(s + 1), *ids = prompt + a->n_prompt;
    float *bias = (float *)(void *)(ids + a->feed);
    uint64_t x = a->seed * 2862933555777941757u + 3037000493u;
    for (uint32_t i = 0; i < a->n_prompt + a->feed; i++) {
        x = x * 6364136223846793005u + 1442695040888963407u;
        prompt[i] = (uint32_t)(x >> 33) % r->info->vocab;
    }
    for (uint32_t i = 0; i < a->feed; i++)
        bias[i] = BIAS;
    mailbox_post(r->mail, TO_ENGINE);
    mailbox_wake_engine(r->mail);
    return r->last_id;
}

void bench_run_cancel(struct bench_run *r, uint64_t id)
{
    struct msg_cancel *m;
    while ((m = mailbox_reserve(r->mail, TO_ENGINE, sizeof *m)) == NULL)
        nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
    m->head.kind = MSG_CANCEL;
    m->id = id;
    mailbox_post(r->mail, TO_ENGINE);
    mailbox_wake_engine(r->mail);
}

/* Until the engine wrote something, or a moment passed. */
static void rest(struct bench_run *r)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += 10000000;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    (void)sem_timedwait(&r->woken, &until);
}

status bench_run_listen(struct bench_run *r, bench_hearer *hear, void *arg, uint32_t patience_s)
{
    uint64_t heard_us = clock_us();
    for (bool enough = false; !enough;) {
        const struct msg_head *h = mailbox_peek(r->mail, TO_LOOP);
        if (h == NULL) {
            if (clock_us() - heard_us > (uint64_t)patience_s * 1000000)
                return err(ERR_GONE, "nothing happened for %u s", patience_s);
            rest(r);
            continue;
        }
        heard_us = clock_us();
        if (h->kind == MSG_FAILED)
            return err(ERR_DEVICE, "the engine failed: %s",
                       ((const struct msg_failed *)(const void *)h)->text);
        enough = hear(arg, h);
        mailbox_release(r->mail, TO_LOOP);
    }
    return OK;
}
