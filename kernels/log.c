/* Log lines and progress on stderr. A line is built on the stack; the ring takes it whole or not at
 * all.
 *
 * The one lock of the daemon is here: any thread may log, so the ring has no single owner. It is held
 * for a copy of a line, never for a write. */
#include "kernels/log.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static _Atomic int least_level = LOG_INFO;

static struct log_ring {
    pthread_mutex_t lock;
    pthread_cond_t more;
    pthread_t thread;
    char *data;          /* [LOG_RING_BYTES]; NULL: not started */
    uint64_t head, tail; /* bytes ever put in, ever written */
    uint64_t dropped;    /* lines, since the last that said so */
    bool quit;
} ring = {.lock = PTHREAD_MUTEX_INITIALIZER, .more = PTHREAD_COND_INITIALIZER};

void log_set_level(enum log_level least)
{
    atomic_store(&least_level, (int)least);
}

/* Nobody is left to tell if stderr is gone. */
static void write_all(const char *p, size_t n)
{
    while (n > 0) {
        ssize_t k = write(STDERR_FILENO, p, n);
        if (k < 0 && errno == EAGAIN) /* somebody made it non-blocking */
            poll(&(struct pollfd){.fd = STDERR_FILENO, .events = POLLOUT}, 1, -1);
        else if (k < 0 && errno != EINTR)
            return;
        p += k < 0 ? 0 : k;
        n -= k < 0 ? 0 : (size_t)k;
    }
}

static size_t put_time(char *line, size_t room, enum log_level level)
{
    struct timespec t;
    struct tm tm;
    clock_gettime(CLOCK_REALTIME, &t);
    localtime_r(&t.tv_sec, &tm);
    size_t n = strftime(line, room, "%Y-%m-%d %H:%M:%S", &tm);
    return n + (size_t)snprintf(line + n, room - n, ".%03d %c ", (int)(t.tv_nsec / 1000000),
                                "DIWE"[level]);
}

/* Under the lock. false: it does not fit. */
static bool ring_put(const char *line, size_t n)
{
    if (n > LOG_RING_BYTES - (ring.head - ring.tail))
        return false;
    size_t at = ring.head % LOG_RING_BYTES, first = LOG_RING_BYTES - at;
    if (first > n)
        first = n;
    memcpy(ring.data + at, line, first);
    memcpy(ring.data, line + first, n - first);
    ring.head += n;
    return true;
}

/* Under the lock: says how much is missing, as soon as that fits. */
static void ring_confess(void)
{
    char line[160];
    if (ring.dropped == 0)
        return;
    size_t n = put_time(line, sizeof line, LOG_WARN);
    n += (size_t)snprintf(line + n, sizeof line - n,
                          "%llu log lines dropped: stderr was not read fast enough\n",
                          (unsigned long long)ring.dropped);
    if (ring_put(line, n))
        ring.dropped = 0;
}

static void emit(const char *line, size_t n)
{
    pthread_mutex_lock(&ring.lock);
    bool started = ring.data != NULL;
    if (started) {
        ring_confess();
        ring.dropped += !ring_put(line, n);
        pthread_cond_signal(&ring.more);
    }
    pthread_mutex_unlock(&ring.lock);
    if (!started)
        write_all(line, n);
}

static void *ring_thread(void *arg)
{
    (void)arg;
    pthread_setname_np(pthread_self(), "spind-log");
    pthread_mutex_lock(&ring.lock);
    while (!ring.quit || ring.head != ring.tail) {
        if (ring.head == ring.tail) {
            pthread_cond_wait(&ring.more, &ring.lock);
            continue;
        }
        size_t at = ring.tail % LOG_RING_BYTES, n = ring.head - ring.tail;
        if (n > LOG_RING_BYTES - at)
            n = LOG_RING_BYTES - at;
        pthread_mutex_unlock(&ring.lock);
        write_all(ring.data + at, n); /* writers only touch what lies beyond */
        pthread_mutex_lock(&ring.lock);
        ring.tail += n;
        ring_confess();
    }
    pthread_mutex_unlock(&ring.lock);
    return NULL;
}

status log_start(void)
{
    CHECK(ring.data == NULL);
    ring.data = mem_try_alloc(LOG_RING_BYTES);
    if (ring.data == NULL)
        return err(ERR_MEMORY, "no memory for the log");
    int rc = pthread_create(&ring.thread, NULL, ring_thread, NULL);
    if (rc == 0)
        return OK;
    mem_free(ring.data);
    ring.data = NULL;
    return err(ERR_MEMORY, "log thread: %s", strerror(rc));
}

void log_stop(void)
{
    struct timespec until;
    if (ring.data == NULL)
        return;
    pthread_mutex_lock(&ring.lock);
    ring.quit = true;
    pthread_cond_signal(&ring.more);
    pthread_mutex_unlock(&ring.lock);
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec++;
    if (pthread_timedjoin_np(ring.thread, NULL, &until) != 0)
        return; /* stuck in write; the process is about to end and the ring must stay */
    mem_free(ring.data);
    ring.data = NULL;
    ring.quit = false;
}

void log_line(enum log_level level, const char *fmt, ...)
{
    if ((int)level < atomic_load(&least_level))
        return;
    char line[2048];
    size_t n = put_time(line, sizeof line, level);
    va_list ap;
    va_start(ap, fmt);
    int m = vsnprintf(line + n, sizeof line - n - 1, fmt, ap);
    va_end(ap);
    if (m > 0)
        n += (size_t)m < sizeof line - n - 1 ? (size_t)m : sizeof line - n - 2;
    line[n++] = '\n';
    emit(line, n);
}

void log_progress_start(struct log_progress *p, const char *what, uint64_t total_bytes)
{
    *p = (struct log_progress){.what = what, .total = total_bytes, .start_us = clock_us()};
}

void log_progress_step(struct log_progress *p, uint64_t done_bytes)
{
    int tenth = p->total == 0 ? 10 : (int)(done_bytes * 10 / p->total);
    if (tenth <= p->shown || tenth >= 10)
        return;
    p->shown = tenth;
    double s = (double)(clock_us() - p->start_us) / 1e6;
    double gb = (double)done_bytes / 1e9;
    /* Short work needs no diary: the closing line says it all. */
    if (s < 0.5)
        return;
    char line[200];
    int n = snprintf(line, sizeof line, "\r%s: %d %%, %.1f GB/s, %.0f s to go ", p->what,
                     tenth * 10, gb / s, s * (10 - tenth) / tenth);
    if (isatty(STDERR_FILENO) && n > 0)
        emit(line, (size_t)n < sizeof line ? (size_t)n : sizeof line - 1);
    else
        log_line(LOG_INFO, "%s: %d %%, %.1f GB/s", p->what, tenth * 10, gb / s);
}

void log_progress_done(struct log_progress *p)
{
    double s = (double)(clock_us() - p->start_us) / 1e6;
    if (p->shown > 0 && isatty(STDERR_FILENO))
        emit("\r\033[K", 4);
    log_line(LOG_INFO, "%s: %.1f MB in %.2f s", p->what, (double)p->total / 1e6, s);
}
