/* The engine's half of the conversation: one function per message to the loop (engine/message.h).
 * Each waits while the ring is full; after report_abandon they drop what they are given, so that an
 * engine can end although nobody listens any more. */
#ifndef ENGINE_REPORT_H
#define ENGINE_REPORT_H

#include "engine/mailbox.h"
#include "engine/sched.h"

struct report {
    struct mailbox *mail;
    _Atomic bool abandoned;
};

void report_scheduled(struct report *r, const struct sequence *q);
void report_prompt(struct report *r, const struct sequence *q, uint32_t index,
                   const struct sample_row *row);
void report_token(struct report *r, const struct sequence *q, const struct sample_row *row);
/* why: of DONE_REFUSED, where the process can never hold it; else NULL. */
void report_done(struct report *r, const struct sequence *q, enum done_reason reason,
                 uint32_t stop_token, const char *why);
/* For a submission that never became a sequence. */
void report_refused(struct report *r, const struct msg_submit *submission);
void report_step(struct report *r, const struct msg_step *s); /* head is filled in here */
/* What it has now; block_bytes: of one of its blocks. */
void report_tenant(struct report *r, uint32_t tenant, const struct tenant *t, uint64_t block_bytes);
void report_failed(struct report *r, const char *why); /* the thread ends: nothing more comes */
void report_abandon(struct report *r);

#endif
