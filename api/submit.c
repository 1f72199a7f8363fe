/* From the API to the engine: admission, sequence ids, MSG_SUBMIT and MSG_CANCEL.
 *
 * Admission bounds what waits, not what runs: `max_queued_requests` sequences beyond those the
 * engine can run at once, and `max_queued_tokens` prompt tokens. When nothing is queued a single
 * call may be larger than the token bound, or it could never be served. What answers hold besides
 * text, tokens with their alternatives, is bounded by ANSWER_BYTES over all calls. (Text is not
 * counted: of each token it is a ten-thousandth of what the KV cache holds.)
 *
 * A call with many sequences may be larger than the ring to the engine. So calls wait in a list and
 * are posted as room appears; memory is bounded by admission, and the ring's size changes nothing
 * but pace. Cancels that find the ring full are marked and posted later too: none is lost. */
#include "api/call.h"

#include <string.h>

#include "kernels/core/splitmix.h"

enum { ANSWER_BYTES = 1 << 30 };

uint32_t submit_retry_after(struct calls *c)
{
    /* As long as the oldest has waited, 20 % more or less: equal answers would come back together. */
    uint64_t ms = c->oldest_us / 1000 + 2000;
    ms = ms * (80 + splitmix_next(&c->random) % 41) / 100;
    uint64_t s = (ms + 999) / 1000;
    return s < 1 ? 1 : s > 120 ? 120 : (uint32_t)s;
}

static size_t submit_bytes(const struct request *r, uint32_t n_prompt, uint32_t n_stop)
{
    return sizeof(struct msg_submit) + ((size_t)n_prompt + n_stop + 2 * (size_t)r->n_bias) * 4;
}

uint64_t submit_answer_bytes(const struct calls *c, const struct request *r)
{
    enum { TOKEN_BYTES = 48, TOP_BYTES = 8 }; /* as text_out.h keeps them */
    uint64_t bytes = 0, top = r->top_logprobs > 0 ? (uint64_t)r->top_logprobs : 0;
    uint64_t prompt_top = r->prompt_logprobs > 0 ? (uint64_t)r->prompt_logprobs : 0;
    bool keep = r->logprobs || r->return_token_ids;
    for (uint32_t p = 0; p < r->n_prompts; p++) {
        uint64_t n_prompt = r->prompts[p].n_ids, n = 0;
        if (keep)
            n = request_room(r, &c->api->rules, p);
        if (r->echo && r->logprobs)
            n += n_prompt;
        bytes += n * r->n * (TOKEN_BYTES + TOP_BYTES * top);
        if (r->echo)
            bytes += r->n * (uint64_t)r->prompts[p].text_len;
        if (r->prompt_logprobs >= 0)
            bytes += n_prompt * (TOKEN_BYTES + TOP_BYTES * prompt_top);
    }
    return bytes;
}

/* The field that makes an answer so large. */
static const char *large_field(const struct request *r)
{
    if (r->logprobs)
        return r->kind == REQUEST_CHAT ? "top_logprobs" : "logprobs";
    return r->prompt_logprobs >= 0 ? "prompt_logprobs" : r->echo ? "echo" : "return_token_ids";
}

static bool answer_fits(struct calls *c, const struct request *r, struct api_error *e)
{
    uint64_t bytes = submit_answer_bytes(c, r);
    if (bytes > ANSWER_BYTES) {
        error_set(e, 400, "invalid_value", large_field(r),
                  "The answer could hold %llu MiB of tokens and alternatives; this server holds %u "
                  "MiB for all. Ask for fewer sequences, a smaller max_tokens or fewer "
                  "alternatives.",
                  (unsigned long long)(bytes >> 20), ANSWER_BYTES >> 20);
        return false;
    }
    if (c->answer_bytes + bytes > ANSWER_BYTES) {
        error_set(e, 503, "server_overloaded", NULL,
                  "The server is full: other answers hold the memory for log-probabilities.");
        e->retry_after_s = submit_retry_after(c);
        return false;
    }
    return true;
}

bool submit_admit(struct calls *c, const struct request *r, struct api_error *e)
{
    const struct api_config *cfg = &c->api->cfg;
    uint64_t sequences = (uint64_t)r->n_prompts * r->n, tokens = 0;
    uint64_t slots = c->api->info->max_num_seqs, queue = cfg->max_queued_requests;
    uint64_t idle = slots > c->n_running ? slots - c->n_running : 0;
    for (uint32_t p = 0; p < r->n_prompts; p++)
        tokens += (uint64_t)r->prompts[p].n_ids * r->n;
    if (sequences > queue + slots) {
        error_set(
            e, 400, "invalid_value", r->n_prompts > 1 ? "prompt" : "n",
            "%u prompts with n = %u are %llu sequences; this server runs %llu and queues %llu",
            r->n_prompts, r->n, (unsigned long long)sequences, (unsigned long long)slots,
            (unsigned long long)queue);
        return false;
    }
    bool full = c->n_queued + sequences > queue + idle;
    bool heavy = c->n_queued > 0 && c->queued_tokens + tokens > cfg->max_queued_tokens;
    if (full || heavy) {
        error_set(e, 503, "server_overloaded", NULL,
                  "The server is full: %u requests with %llu prompt tokens are waiting.",
                  c->n_queued, (unsigned long long)c->queued_tokens);
        e->retry_after_s = submit_retry_after(c);
        return false;
    }
    return answer_fits(c, r, e);
}

/* --- ids ---------------------------------------------------------------------------------------- */

static void grow_slots(struct calls *c)
{
    uint32_t old = c->n_slots, n = old > 0 ? old * 2 : 256;
    CHECK(n <= MAX_SLOTS); /* admission bounds the sequences in flight far below this */
    c->slots = mem_grow(c->slots, old * sizeof *c->slots, n * sizeof *c->slots);
    for (uint32_t i = n; i-- > old;) {
        c->slots[i].next_free = c->free_slot;
        c->free_slot = i + 1;
    }
    c->n_slots = n;
}

static void take_id(struct calls *c, struct choice *ch)
{
    if (c->free_slot == 0)
        grow_slots(c);
    uint32_t slot = c->free_slot - 1;
    struct call_slot *s = &c->slots[slot];
    c->free_slot = s->next_free;
    s->choice = ch;
    s->generation++;
    ch->id = s->generation << SLOT_BITS | slot;
}

struct choice *submit_find(struct calls *c, uint64_t id)
{
    uint64_t slot = id & (MAX_SLOTS - 1);
    if (slot >= c->n_slots || c->slots[slot].generation != id >> SLOT_BITS)
        return NULL;
    return c->slots[slot].choice;
}

void submit_forget(struct choice *ch)
{
    struct calls *c = ch->call->all;
    CHECK(ch->id != 0 && submit_find(c, ch->id) == ch);
    uint32_t slot = (uint32_t)(ch->id & (MAX_SLOTS - 1));
    c->slots[slot].choice = NULL;
    c->slots[slot].next_free = c->free_slot;
    c->free_slot = slot + 1;
    if (ch->cancel_due)
        c->n_cancel_due--;
    ch->cancel_due = false;
    ch->id = 0;
}

/* --- messages ----------------------------------------------------------------------------------- */

static void fill_submit(struct msg_submit *m, struct choice *ch)
{
    const struct call *call = ch->call;
    const struct request *r = call->r;
    const struct request_prompt *p = &r->prompts[ch->prompt];
    uint32_t i = ch->index % r->n;
    int32_t top = r->top_logprobs > 0 ? r->top_logprobs : 0;
    /* All of it at once: the ring's memory holds what an older message left there. */
    *m = (struct msg_submit){
        .head = {.kind = MSG_SUBMIT, .bytes = m->head.bytes},
        .id = ch->id,
        .leader = i > 0 ? call->choices[ch->index - i].id : 0,
        .salt = {call->salt[0], call->salt[1]},
        .arrival_us = call->arrival_us,
        .params = r->params,
        .n_prompt = p->n_ids,
        .n_stop = call->n_stop_ids,
        .n_bias = r->n_bias,
        .max_tokens = ch->max_tokens,
        .min_tokens = r->min_tokens,
        .logprobs = r->logprobs ? top : -1,
        .prompt_logprobs = ch->wants_scores ? r->prompt_logprobs : -1,
        .tenant = call->slot != NULL ? call->slot->number : 0,
        .priority = r->priority,
        .sparse = p->n_ids < r->sparse_min_context ? catalog_dense() : r->sparse,
    };
    m->params.choice = i; /* the seed is common: choices differ by this */
    if (ch->echo_scores && m->logprobs > m->prompt_logprobs)
        m->prompt_logprobs = m->logprobs;
    uint32_t *ids = (uint32_t *)(m + 1);
    memcpy(ids, p->ids, (size_t)p->n_ids * 4);
    memcpy(ids += p->n_ids, call->stop_ids, (size_t)call->n_stop_ids * 4);
    memcpy(ids += call->n_stop_ids, r->bias_ids, (size_t)r->n_bias * 4);
    memcpy(ids + r->n_bias, r->bias, (size_t)r->n_bias * 4);
}

static bool post(struct choice *ch)
{
    struct calls *c = ch->call->all;
    const struct request *r = ch->call->r;
    size_t bytes = submit_bytes(r, r->prompts[ch->prompt].n_ids, ch->call->n_stop_ids);
    struct msg_submit *m = mailbox_reserve(c->api->mail, TO_ENGINE, bytes);
    if (m == NULL)
        return false;
    take_id(c, ch);
    fill_submit(m, ch);
    mailbox_post(c->api->mail, TO_ENGINE);
    choice_move(ch, CHOICE_SUBMITTED);
    return true;
}

void submit_enqueue(struct call *call)
{
    struct calls *c = call->all;
    call->waiting = true;
    if (c->waiting == NULL)
        c->waiting = call;
    else
        c->waiting_last->next_waiting = call;
    c->waiting_last = call;
    submit_pending(c);
}

/* Posts what it can of one call; true: nothing of it is left to post. */
static bool post_call(struct call *call, bool *posted)
{
    while (call->n_submitted < call->n_choices) {
        struct choice *ch = &call->choices[call->n_submitted];
        if (ch->state == CHOICE_WAITING) {
            if (!post(ch))
                return false;
            *posted = true;
        }
        call->n_submitted++;
    }
    return true;
}

static bool post_cancel(struct choice *ch)
{
    struct calls *c = ch->call->all;
    struct msg_cancel *m = mailbox_reserve(c->api->mail, TO_ENGINE, sizeof *m);
    if (m == NULL)
        return false;
    m->head.kind = MSG_CANCEL;
    m->id = ch->id;
    mailbox_post(c->api->mail, TO_ENGINE);
    return true;
}

static bool post_due_cancels(struct calls *c)
{
    bool posted = false;
    for (struct call *call = c->first; call != NULL && c->n_cancel_due > 0; call = call->next)
        for (uint32_t i = 0; i < call->n_choices; i++) {
            struct choice *ch = &call->choices[i];
            if (!ch->cancel_due)
                continue;
            if (!post_cancel(ch))
                return posted;
            ch->cancel_due = false;
            c->n_cancel_due--;
            posted = true;
        }
    return posted;
}

void submit_pending(struct calls *c)
{
    bool posted = false;
    if (c->api->mail == NULL || c->api->engine_dead)
        return;
    if (c->api->roster != NULL && !roster_post(c->api->roster, c->api->mail))
        return;              /* the engine must know a tenant before its sequences */
    if (c->n_cancel_due > 0) /* first: they make room */
        posted = post_due_cancels(c);
    while (c->waiting != NULL && post_call(c->waiting, &posted)) {
        struct call *call = c->waiting;
        c->waiting = call->next_waiting;
        call->next_waiting = NULL;
        call->waiting = false;
        call_settle(call);
    }
    if (posted)
        mailbox_wake_engine(c->api->mail);
}

void submit_cancel(struct choice *ch)
{
    struct calls *c = ch->call->all;
    if (ch->state == CHOICE_DONE || ch->cancelled)
        return;
    ch->cancelled = true;
    if (ch->state == CHOICE_WAITING) { /* the engine never heard of it */
        choice_move(ch, CHOICE_DONE);
        return;
    }
    if (c->api->engine_dead)
        return;
    if (post_cancel(ch)) {
        mailbox_wake_engine(c->api->mail);
    } else {
        ch->cancel_due = true;
        c->n_cancel_due++;
    }
}
