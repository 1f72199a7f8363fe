/* Two bounded single-producer, single-consumer byte rings between the loop thread and the engine
 * thread. Messages are copied in and out whole; nothing is shared but the rings. No locks: one
 * atomic head and one atomic tail per ring, and a futex word on which the engine sleeps.
 *
 * A ring holds messages contiguously: one that would wrap is placed at the start and the gap is
 * marked, so a consumer can look at a message in place (mailbox_peek) until it releases it. */
#ifndef ENGINE_MAILBOX_H
#define ENGINE_MAILBOX_H

#include "engine/message.h"

struct mailbox;

enum mailbox_side {
    TO_ENGINE, /* written by the loop thread, read by the engine thread */
    TO_LOOP,   /* written by the engine thread, read by the loop thread */
};

/* wake(arg) is called by the engine thread after it has written events and the loop may sleep
 * (uv_async_send); it must be safe to call from any thread. Sizes are rounded up to a power of 2. */
status mailbox_create(struct mailbox **out, size_t to_engine_bytes, size_t to_loop_bytes,
                      void (*wake)(void *arg), void *arg);
void mailbox_destroy(struct mailbox *m);

/* Largest message a side can ever take: a quarter of its ring. */
size_t mailbox_max_message(const struct mailbox *m, enum mailbox_side side);

/* Reserves room for a message of `bytes` (rounded up to 8); NULL: full now, or larger than
 * mailbox_max_message. The caller fills it, sets head.kind, and posts it. One at a time per side. */
void *mailbox_reserve(struct mailbox *m, enum mailbox_side side, size_t bytes);
void mailbox_post(struct mailbox *m, enum mailbox_side side);
/* Bytes that could be reserved now in one piece. */
size_t mailbox_room(const struct mailbox *m, enum mailbox_side side);

/* The oldest message, or NULL; valid until mailbox_release, which removes it. */
const struct msg_head *mailbox_peek(struct mailbox *m, enum mailbox_side side);
void mailbox_release(struct mailbox *m, enum mailbox_side side);

/* Wakes the other side if it sleeps. The engine calls it once per step, not per message. */
void mailbox_wake_loop(struct mailbox *m);
void mailbox_wake_engine(struct mailbox *m);
/* Engine thread: sleeps until TO_ENGINE has a message or timeout_us passed. */
void mailbox_wait_engine(struct mailbox *m, uint64_t timeout_us);
/* Engine thread: sleeps until TO_LOOP has `bytes` of room or timeout_us passed. */
void mailbox_wait_room(struct mailbox *m, size_t bytes, uint64_t timeout_us);

#endif
