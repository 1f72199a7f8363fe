/* Two rings, one writer and one reader each (mailbox.h).
 *
 * Positions only grow; a position modulo the size is an offset. The writer publishes with a release
 * store of `head`, the reader frees with a release store of `tail`; each keeps the other's last seen
 * value to leave the shared line alone most of the time. A gap at the end of the ring is a message
 * of kind 0, which the reader skips.
 *
 * Sleeping: the engine sleeps on a futex word that both "there is a message" and "there is room"
 * bump. The loop sleeps in epoll, so it is woken by the callback. */
#include "engine/mailbox.h"

#include <errno.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { CACHE_LINE = 64, MIN_RING = 4096 };

enum sleep { AWAKE, WAITS_FOR_MESSAGE, WAITS_FOR_ROOM };

struct ring {
    _Alignas(CACHE_LINE) _Atomic uint64_t head; /* bytes ever written; the writer's */
    uint64_t seen_tail;                         /* the writer's copy of tail */
    uint64_t reserved; /* bytes of the message being written, gap included */
    _Alignas(CACHE_LINE) _Atomic uint64_t tail; /* bytes ever released; the reader's */
    uint64_t seen_head;                         /* the reader's copy of head */
    _Alignas(CACHE_LINE) char *data;
    uint64_t size; /* power of two */
};

struct mailbox {
    struct ring ring[2];
    _Alignas(CACHE_LINE) _Atomic uint32_t engine_word; /* bumped to wake the engine */
    _Atomic uint32_t engine_sleeps;                    /* enum sleep */
    void (*wake)(void *arg);
    void *arg;
};

static uint64_t round_up_pow2(size_t n)
{
    uint64_t size = MIN_RING;
    while (size < n)
        size *= 2;
    return size;
}

status mailbox_create(struct mailbox **out, size_t to_engine_bytes, size_t to_loop_bytes,
                      void (*wake)(void *arg), void *arg)
{
    struct mailbox *m = aligned_alloc(CACHE_LINE, sizeof *m);
    if (m == NULL)
        return err(ERR_MEMORY, "mailbox: no memory");
    memset(m, 0, sizeof *m);
    m->wake = wake;
    m->arg = arg;
    const size_t want[2] = {to_engine_bytes, to_loop_bytes};
    for (int side = 0; side < 2; side++) {
        m->ring[side].size = round_up_pow2(want[side]);
        m->ring[side].data = mem_try_alloc(m->ring[side].size);
        if (m->ring[side].data == NULL) {
            uint64_t bytes = m->ring[side].size;
            mailbox_destroy(m);
            return err(ERR_MEMORY, "mailbox: no memory for a ring of %llu bytes",
                       (unsigned long long)bytes);
        }
    }
    *out = m;
    return OK;
}

void mailbox_destroy(struct mailbox *m)
{
    if (m == NULL)
        return;
    mem_free(m->ring[0].data);
    mem_free(m->ring[1].data);
    free(m);
}

size_t mailbox_max_message(const struct mailbox *m, enum mailbox_side side)
{
    return m->ring[side].size / 4;
}

static size_t round8(size_t bytes)
{
    return (bytes + 7) & ~(size_t)7;
}

/* Bytes from the writer's position to where `bytes` fit in one piece: 0, or the rest of the ring. */
static uint64_t gap_before(const struct ring *r, uint64_t head, size_t bytes)
{
    uint64_t left = r->size - (head & (r->size - 1));
    return bytes <= left ? 0 : left;
}

void *mailbox_reserve(struct mailbox *m, enum mailbox_side side, size_t bytes)
{
    struct ring *r = &m->ring[side];
    bytes = round8(bytes);
    CHECK(bytes >= sizeof(struct msg_head) && r->reserved == 0);
    if (bytes > mailbox_max_message(m, side))
        return NULL;
    uint64_t head = atomic_load_explicit(&r->head, memory_order_relaxed);
    uint64_t gap = gap_before(r, head, bytes), need = gap + bytes;
    if (head + need - r->seen_tail > r->size) {
        r->seen_tail = atomic_load_explicit(&r->tail, memory_order_acquire);
        if (head + need - r->seen_tail > r->size)
            return NULL;
    }
    if (gap > 0)
        *(struct msg_head *)(void *)(r->data + (head & (r->size - 1))) =
            (struct msg_head){.kind = 0, .bytes = (uint32_t)gap};
    struct msg_head *h = (struct msg_head *)(void *)(r->data + ((head + gap) & (r->size - 1)));
    h->bytes = (uint32_t)bytes;
    r->reserved = need;
    return h;
}

void mailbox_post(struct mailbox *m, enum mailbox_side side)
{
    struct ring *r = &m->ring[side];
    CHECK(r->reserved > 0);
    uint64_t head = atomic_load_explicit(&r->head, memory_order_relaxed);
    atomic_store_explicit(&r->head, head + r->reserved, memory_order_release);
    r->reserved = 0;
}

size_t mailbox_room(const struct mailbox *m, enum mailbox_side side)
{
    const struct ring *r = &m->ring[side];
    uint64_t head = atomic_load_explicit(&r->head, memory_order_relaxed);
    uint64_t tail = atomic_load_explicit(&r->tail, memory_order_acquire);
    uint64_t room = r->size - (head - tail);
    uint64_t left = r->size - (head & (r->size - 1));
    uint64_t wrapped = room > left ? room - left : 0; /* after a gap to the start */
    return left > room ? room : (left > wrapped ? left : wrapped);
}

const struct msg_head *mailbox_peek(struct mailbox *m, enum mailbox_side side)
{
    struct ring *r = &m->ring[side];
    uint64_t tail = atomic_load_explicit(&r->tail, memory_order_relaxed);
    for (;;) {
        if (tail == r->seen_head) {
            r->seen_head = atomic_load_explicit(&r->head, memory_order_acquire);
            if (tail == r->seen_head)
                return NULL;
        }
        struct msg_head *h = (struct msg_head *)(void *)(r->data + (tail & (r->size - 1)));
        if (h->kind != 0)
            return h;
        tail += h->bytes;
        atomic_store_explicit(&r->tail, tail, memory_order_release);
    }
}

/* seq_cst between "I sleep" and "there is something": one of the two sides sees the other. */
static void bump_engine(struct mailbox *m, enum sleep which)
{
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load(&m->engine_sleeps) != which)
        return;
    atomic_fetch_add(&m->engine_word, 1);
    syscall(SYS_futex, &m->engine_word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

void mailbox_release(struct mailbox *m, enum mailbox_side side)
{
    struct ring *r = &m->ring[side];
    uint64_t tail = atomic_load_explicit(&r->tail, memory_order_relaxed);
    CHECK(tail != r->seen_head);
    const struct msg_head *h = (const struct msg_head *)(void *)(r->data + (tail & (r->size - 1)));
    atomic_store_explicit(&r->tail, tail + h->bytes, memory_order_release);
    if (side == TO_LOOP)
        bump_engine(m, WAITS_FOR_ROOM);
}

void mailbox_wake_loop(struct mailbox *m)
{
    if (m->wake != NULL)
        m->wake(m->arg);
}

void mailbox_wake_engine(struct mailbox *m)
{
    bump_engine(m, WAITS_FOR_MESSAGE);
}

static void sleep_on(struct mailbox *m, uint32_t word, uint64_t timeout_us)
{
    struct timespec t = {.tv_sec = (time_t)(timeout_us / 1000000),
                         .tv_nsec = (long)(timeout_us % 1000000) * 1000};
    syscall(SYS_futex, &m->engine_word, FUTEX_WAIT_PRIVATE, word, &t, NULL, 0);
}

void mailbox_wait_engine(struct mailbox *m, uint64_t timeout_us)
{
    uint32_t word = atomic_load(&m->engine_word);
    atomic_store(&m->engine_sleeps, WAITS_FOR_MESSAGE);
    atomic_thread_fence(memory_order_seq_cst);
    if (mailbox_peek(m, TO_ENGINE) == NULL)
        sleep_on(m, word, timeout_us);
    atomic_store(&m->engine_sleeps, AWAKE);
}

void mailbox_wait_room(struct mailbox *m, size_t bytes, uint64_t timeout_us)
{
    uint32_t word = atomic_load(&m->engine_word);
    atomic_store(&m->engine_sleeps, WAITS_FOR_ROOM);
    atomic_thread_fence(memory_order_seq_cst);
    if (mailbox_room(m, TO_LOOP) < bytes)
        sleep_on(m, word, timeout_us);
    atomic_store(&m->engine_sleeps, AWAKE);
}
