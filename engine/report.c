/* Writing events into the mailbox (report.h). Engine thread, but for report_abandon. */
#include "engine/report.h"

#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

enum { ROOM_WAIT_US = 100000 };

/* NULL: abandoned. */
static void *begin(struct report *r, uint32_t kind, size_t bytes)
{
    struct msg_head *h;
    while ((h = mailbox_reserve(r->mail, TO_LOOP, bytes)) == NULL) {
        if (atomic_load(&r->abandoned))
            return NULL;
        mailbox_wake_loop(r->mail);
        mailbox_wait_room(r->mail, bytes, ROOM_WAIT_US);
    }
    h->kind = kind;
    return h;
}

static void end(struct report *r)
{
    mailbox_post(r->mail, TO_LOOP);
}

void report_scheduled(struct report *r, const struct sequence *q)
{
    struct msg_scheduled *m = begin(r, MSG_SCHEDULED, sizeof *m);
    if (m == NULL)
        return;
    m->id = q->id;
    m->n_cached = q->n_cached;
    m->pad = 0;
    end(r);
}

static uint32_t n_tops(const struct sample_row *row)
{
    return row->n_top > 0 ? (uint32_t)row->n_top : 0;
}

void report_prompt(struct report *r, const struct sequence *q, uint32_t index,
                   const struct sample_row *row)
{
    size_t top_bytes = n_tops(row) * sizeof row->top[0];
    struct msg_prompt *m = begin(r, MSG_PROMPT, sizeof *m + top_bytes);
    if (m == NULL)
        return;
    *m = (struct msg_prompt){.head = m->head,
                             .id = q->id,
                             .token = q->tokens[index],
                             .index = index,
                             .rank = row->rank,
                             .logprob = row->logprob,
                             .n_top = n_tops(row)};
    memcpy(m + 1, row->top, top_bytes);
    end(r);
}

void report_token(struct report *r, const struct sequence *q, const struct sample_row *row)
{
    size_t top_bytes = n_tops(row) * sizeof row->top[0];
    struct msg_token *m = begin(r, MSG_TOKEN, sizeof *m + top_bytes);
    if (m == NULL)
        return;
    *m = (struct msg_token){.head = m->head,
                            .id = q->id,
                            .token = row->token,
                            .index = sequence_n_output(q) - 1,
                            .rank = row->rank,
                            .logprob = row->logprob,
                            .n_top = n_tops(row),
                            .n_light_misses = q->n_light_misses,
                            .planned = q->planned};
    memcpy(m + 1, row->top, top_bytes);
    end(r);
}

void report_done(struct report *r, const struct sequence *q, enum done_reason reason,
                 uint32_t stop_token, const char *why)
{
    struct msg_done *m = begin(r, MSG_DONE, sizeof *m);
    if (m == NULL)
        return;
    *m = (struct msg_done){.head = m->head,
                           .id = q->id,
                           .reason = reason,
                           .stop_token = stop_token,
                           .n_prompt = q->n_prompt,
                           .n_output = sequence_n_output(q),
                           .n_cached = q->n_cached,
                           .n_preempted = q->n_preempted,
                           .submitted_us = q->submitted_us,
                           .scheduled_us = q->scheduled_us,
                           .first_us = q->first_us,
                           .last_us = q->last_us};
    if (why != NULL)
        snprintf(m->text, sizeof m->text, "%s", why);
    end(r);
}

void report_refused(struct report *r, const struct msg_submit *submission)
{
    struct msg_done *m = begin(r, MSG_DONE, sizeof *m);
    if (m == NULL)
        return;
    *m = (struct msg_done){.head = m->head,
                           .id = submission->id,
                           .reason = DONE_REFUSED,
                           .n_prompt = submission->n_prompt};
    end(r);
}

void report_step(struct report *r, const struct msg_step *s)
{
    struct msg_step *m = begin(r, MSG_STEP, sizeof *m);
    if (m == NULL)
        return;
    struct msg_head head = m->head;
    *m = *s;
    m->head = head;
    end(r);
    mailbox_wake_loop(r->mail);
}

void report_tenant(struct report *r, uint32_t tenant, const struct tenant *t, uint64_t block_bytes)
{
    struct msg_tenant_state *m = begin(r, MSG_TENANT_STATE, sizeof *m);
    if (m == NULL)
        return;
    *m = (struct msg_tenant_state){.head = m->head,
                                   .tenant = tenant,
                                   .running = t->n_running,
                                   .waiting = t->n_waiting,
                                   .paused = t->n_paused,
                                   .prompt_tokens = t->prompt_tokens,
                                   .output_tokens = t->output_tokens,
                                   .cached_tokens = t->cached_tokens,
                                   .preemptions = t->preemptions,
                                   .served = t->served};
    for (int tier = 0; tier < 2; tier++)
        m->kv_bytes[tier] = t->blocks[tier] * block_bytes;
    end(r);
    mailbox_wake_loop(r->mail);
}

void report_failed(struct report *r, const char *why)
{
    struct msg_failed *m = begin(r, MSG_FAILED, sizeof *m);
    if (m == NULL)
        return;
    snprintf(m->text, sizeof m->text, "%s", why);
    end(r);
    mailbox_wake_loop(r->mail);
}

void report_abandon(struct report *r)
{
    atomic_store(&r->abandoned, true);
}
