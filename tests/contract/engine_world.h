/* The engine through its mailbox, on the CPU backend, with a tiny model of random weights: what tests of
 * whole answers share. A `run` is an engine that answers some asks, all together or one after the
 * other, and is gone afterwards; its answers are compared bit for bit. */
#ifndef TESTS_CONTRACT_ENGINE_WORLD_H
#define TESTS_CONTRACT_ENGINE_WORLD_H

#include "engine/engine.h"
#include "tests/gguf_writer.h"
#include "tests/tap.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

enum {
    MAX_ASKS = 8,
    MAX_OUTPUT = 320,
    MAX_PROMPT = 2400,
    POSITIONS = 4096,
    PATIENCE_US = 60000000
};

static char model_path[] = "/tmp/spind-world-XXXXXX";

struct ask {
    uint32_t n_prompt, max_tokens;
    uint32_t text;     /* which text the prompt begins with */
    uint32_t parts_at; /* from here on it is a text of its own; 0: never */
    const char *plugin;
    float budget;
    uint32_t interval;
    bool exact, bare; /* wave: nothing is estimated; nor kept to be */
};

struct answer {
    uint32_t n;
    uint32_t tokens[MAX_OUTPUT];
    float logprobs[MAX_OUTPUT];
    struct msg_done done;
};

struct run {
    struct answer answers[MAX_ASKS];
    struct msg_step last;
    uint64_t leaf_bytes_max;
};

static enum kv_type kept; /* by engines of the next config() */

static struct engine_config config(void)
{
    return (struct engine_config){.model = model_path,
                                  .device = "cpu",
                                  .cpu = {.isa = "auto", .n_threads = 2},
                                  .block_rows = 8,
                                  .kv_type = kept,
                                  .kv_hbm_bytes = 64 << 20,
                                  .max_model_len = POSITIONS,
                                  .max_num_seqs = MAX_ASKS,
                                  .max_batched_tokens = 256,
                                  .seed = 7};
}

__attribute__((unused)) static void make_model(void)
{
    struct gguf_writer w = {0};
    tiny_model(&w, &(struct tiny_spec){.type = DTYPE_Q8_0,
                                       .embed_type = DTYPE_Q8_0,
                                       .layers = 3,
                                       .hidden = 128,
                                       .ff = 128,
                                       .heads = 4,
                                       .kv_heads = 2,
                                       .positions = POSITIONS,
                                       .seed = 3});
    struct bytes f = gw_finish(&w);
    bytes_save(&f, model_path);
    bytes_free(&f);
}

/* One block of positions, all lanes: 3 layers x 2 heads x 8 rows x 32 numbers of K and V in bf16. */
#define BLOCK (3 * 2 * 8 * 32 * 2 * (uint64_t)kv_number_bytes(kept))

static struct sparse_choice choice_of(const struct ask *a)
{
    uint32_t plugin;
    CHECK(sparse_find(a->plugin, &plugin) == OK);
    struct sparse_choice c = sparse_choice_make(plugin, a->budget);
    if (a->interval > 1)
        c.interval = a->interval;
    if (a->exact || a->bare)
        CHECK(sparse_choice_set_number(&c, "estimate", 0) == OK);
    if (a->bare)
        CHECK(sparse_choice_set_number(&c, "values", 0) == OK);
    return c;
}

static uint32_t word(uint32_t text, uint32_t i)
{
    uint32_t x = (i + 1) * 2654435761u ^ text * 40503u;
    return 3 + (x >> 13) % 256;
}

static void submit(struct engine *e, uint64_t id, const struct ask *a)
{
    struct mailbox *m = engine_mailbox(e);
    struct msg_submit *s;
    while ((s = mailbox_reserve(m, TO_ENGINE, sizeof *s + a->n_prompt * sizeof(uint32_t))) == NULL)
        mailbox_wake_engine(m);
    struct msg_head head = s->head;
    *s = (struct msg_submit){.head = head,
                             .id = id,
                             .params = {.top_p = 1, .repetition_penalty = 1, .seed = 1},
                             .n_prompt = a->n_prompt,
                             .max_tokens = a->max_tokens,
                             .logprobs = 0,
                             .prompt_logprobs = -1,
                             .sparse = choice_of(a)};
    s->head.kind = MSG_SUBMIT;
    uint32_t *prompt = (uint32_t *)(s + 1);
    for (uint32_t i = 0; i < a->n_prompt; i++)
        prompt[i] = word(a->parts_at != 0 && i >= a->parts_at ? a->text + 100 : a->text, i);
    mailbox_post(m, TO_ENGINE);
    mailbox_wake_engine(m);
}

static void hear(struct run *r, const struct msg_head *h, uint32_t *n_done)
{
    if (h->kind == MSG_STEP) {
        r->last = *(const struct msg_step *)(const void *)h;
        uint64_t leaves = r->last.residence.leaf_bytes;
        r->leaf_bytes_max = leaves > r->leaf_bytes_max ? leaves : r->leaf_bytes_max;
    } else if (h->kind == MSG_TOKEN) {
        const struct msg_token *t = (const struct msg_token *)(const void *)h;
        struct answer *a = &r->answers[t->id - 1];
        CHECK(t->index == a->n && a->n < MAX_OUTPUT);
        a->tokens[a->n] = t->token;
        a->logprobs[a->n++] = t->logprob;
    } else if (h->kind == MSG_DONE) {
        const struct msg_done *d = (const struct msg_done *)(const void *)h;
        r->answers[d->id - 1].done = *d;
        ++*n_done;
    } else if (h->kind == MSG_FAILED) {
        printf("Bail out! the engine failed: %s\n",
               ((const struct msg_failed *)(const void *)h)->text);
        exit(1);
    }
}

static void listen(struct engine *e, struct run *r, uint32_t until)
{
    uint32_t n_done = 0;
    struct mailbox *m = engine_mailbox(e);
    uint64_t start_us = clock_us();
    while (n_done < until || r->last.running + r->last.waiting > 0) {
        const struct msg_head *h = mailbox_peek(m, TO_LOOP);
        if (h == NULL) {
            if (clock_us() - start_us > PATIENCE_US) {
                printf("Bail out! no end after %d s\n", PATIENCE_US / 1000000);
                exit(1);
            }
            nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
            continue;
        }
        hear(r, h, &n_done);
        mailbox_release(m, TO_LOOP);
    }
}

/* All at once, or one after the other. Every block must come home. */
__attribute__((unused)) static void run(const struct engine_config *cfg, const struct ask *asks,
                                        uint32_t n, bool together, struct run *r)
{
    struct engine *e = NULL;
    memset(r, 0, sizeof *r);
    if (engine_create(&e, cfg, NULL, NULL) != OK || engine_start(e) != OK) {
        printf("Bail out! %s\n", err_text());
        exit(1);
    }
    for (uint32_t i = 0; i < n; i++) {
        submit(e, i + 1, &asks[i]);
        if (!together)
            listen(e, r, 1);
    }
    if (together)
        listen(e, r, n);
    for (int t = 0; t < 2; t++)
        CHECK(r->last.blocks_free[t] + r->last.blocks_cached[t] == r->last.blocks_total[t]);
    engine_destroy(e);
}

static bool same_answer(const struct answer *a, const struct answer *b)
{
    return a->done.reason == DONE_LENGTH && b->done.reason == DONE_LENGTH && a->n == b->n &&
           a->n > 0 && memcmp(a->tokens, b->tokens, a->n * sizeof a->tokens[0]) == 0 &&
           memcmp(a->logprobs, b->logprobs, a->n * sizeof a->logprobs[0]) == 0;
}

__attribute__((unused)) static uint32_t n_same(const struct run *a, const struct run *b, uint32_t n)
{
    uint32_t same = 0;
    for (uint32_t i = 0; i < n; i++)
        same += same_answer(&a->answers[i], &b->answers[i]);
    return same;
}

#endif
