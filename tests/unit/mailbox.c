/* The two rings of engine/mailbox.c: order, bounds, wrapping, sleeping. */
#include "engine/mailbox.h"
#include "tests/tap.h"

#include <pthread.h>
#include <stdatomic.h>

static struct mailbox *make(size_t bytes)
{
    struct mailbox *m = NULL;
    CHECK(mailbox_create(&m, bytes, bytes, NULL, NULL) == OK);
    return m;
}

static bool send_cancel(struct mailbox *m, uint64_t id, size_t bytes)
{
    struct msg_cancel *c = mailbox_reserve(m, TO_ENGINE, bytes);
    if (c == NULL)
        return false;
    c->head.kind = MSG_CANCEL;
    c->id = id;
    mailbox_post(m, TO_ENGINE);
    return true;
}

static uint64_t take(struct mailbox *m)
{
    const struct msg_head *h = mailbox_peek(m, TO_ENGINE);
    if (h == NULL)
        return 0;
    uint64_t id = ((const struct msg_cancel *)(const void *)h)->id;
    mailbox_release(m, TO_ENGINE);
    return id;
}

static void messages_come_out_in_order(void)
{
    struct mailbox *m = make(4096);
    ok(mailbox_peek(m, TO_ENGINE) == NULL, "an empty ring has nothing to show");
    for (uint64_t i = 1; i <= 10; i++)
        send_cancel(m, i, 16 + i);
    bool ordered = true;
    for (uint64_t i = 1; i <= 10; i++)
        ordered = ordered && take(m) == i;
    ok(ordered && take(m) == 0, "messages come out in order, then nothing");
    mailbox_destroy(m);
}

static void a_full_ring_refuses_and_recovers(void)
{
    struct mailbox *m = make(4096);
    uint64_t n = 0;
    while (send_cancel(m, n + 1, 256))
        n++;
    ok(n == 16, "a ring of 4096 bytes takes 16 messages of 256 bytes");
    ok(mailbox_room(m, TO_ENGINE) == 0, "then it says it has no room");
    ok(take(m) == 1 && send_cancel(m, 99, 256), "one taken makes room for one");
    ok(mailbox_reserve(m, TO_ENGINE, 1025) == NULL,
       "a message above a quarter of the ring is refused");
    mailbox_destroy(m);
}

static void a_message_that_would_wrap_starts_over(void)
{
    struct mailbox *m = make(4096);
    bool good = true;
    uint64_t sent = 0, got = 0;
    for (int round = 0; round < 1000; round++) {
        while (send_cancel(m, sent + 1, 16 + (sent * 37) % 1000))
            sent++;
        for (int i = 0; i < 3 && got < sent; i++)
            good = good && take(m) == ++got;
    }
    while (got < sent)
        good = good && take(m) == ++got;
    ok(good && take(m) == 0, "sizes that do not divide the ring wrap without loss (%llu messages)",
       (unsigned long long)sent);
    mailbox_destroy(m);
}

static _Atomic int wakes;
static void count_wake(void *arg)
{
    (void)arg;
    atomic_fetch_add(&wakes, 1);
}

struct echo {
    struct mailbox *m;
    uint64_t n, sum;
};

/* Plays the engine: reads until it has seen n messages, sleeping in between, and echoes each. */
static void *echo_thread(void *arg)
{
    struct echo *e = arg;
    for (uint64_t seen = 0; seen < e->n;) {
        const struct msg_head *h = mailbox_peek(e->m, TO_ENGINE);
        if (h == NULL) {
            mailbox_wait_engine(e->m, 10000000);
            continue;
        }
        uint64_t id = ((const struct msg_cancel *)(const void *)h)->id;
        e->sum += id;
        mailbox_release(e->m, TO_ENGINE);
        struct msg_done *d;
        while ((d = mailbox_reserve(e->m, TO_LOOP, sizeof *d)) == NULL)
            mailbox_wait_room(e->m, sizeof *d, 10000000);
        d->head.kind = MSG_DONE;
        d->id = id;
        mailbox_post(e->m, TO_LOOP);
        mailbox_wake_loop(e->m);
        seen++;
    }
    return NULL;
}

static void two_threads_lose_nothing_and_wake_each_other(void)
{
    enum { N = 200000 };
    struct mailbox *m = NULL;
    CHECK(mailbox_create(&m, 4096, 4096, count_wake, NULL) == OK);
    struct echo e = {.m = m, .n = N};
    pthread_t t;
    uint64_t start = clock_us(), next = 1, want = 1;
    bool ordered = true;
    CHECK(pthread_create(&t, NULL, echo_thread, &e) == 0);
    while (want <= N) {
        if (next <= N && send_cancel(m, next, sizeof(struct msg_cancel))) {
            next++;
            mailbox_wake_engine(m);
        }
        const struct msg_head *h = mailbox_peek(m, TO_LOOP);
        if (h == NULL)
            continue;
        ordered = ordered && ((const struct msg_done *)(const void *)h)->id == want++;
        mailbox_release(m, TO_LOOP);
    }
    pthread_join(t, NULL);
    ok(ordered, "200,000 round trips between two threads keep their order");
    ok(e.sum == (uint64_t)N * (N + 1) / 2, "and none is lost");
    ok(atomic_load(&wakes) == N, "every wake reached the loop");
    ok(clock_us() - start < 60000000, "nobody slept through a message");
    mailbox_destroy(m);
}

int main(void)
{
    messages_come_out_in_order();
    a_full_ring_refuses_and_recovers();
    a_message_that_would_wrap_starts_over();
    two_threads_lose_nothing_and_wake_each_other();
    return tap_done();
}
