/* The log ring: nobody waits for a reader, nothing is lost silently. */
#include "kernels/log.h"
#include "tests/tap.h"

#include <signal.h>
#include <sys/types.h>
#include <unistd.h>

static int saved_stderr;

/* stderr becomes a pipe that nobody reads yet; returns its other end. */
static int stop_reading(void)
{
    int ends[2];
    CHECK(pipe(ends) == 0);
    saved_stderr = dup(STDERR_FILENO);
    dup2(ends[1], STDERR_FILENO);
    close(ends[1]);
    return ends[0];
}

static void restore_stderr(void)
{
    dup2(saved_stderr, STDERR_FILENO);
    close(saved_stderr);
}

struct heard {
    unsigned long long lines, dropped;
    bool in_order;
};

/* Reads to the end of the pipe. */
static struct heard listen(int fd)
{
    struct heard h = {.in_order = true};
    FILE *f = fdopen(fd, "r");
    char line[4096];
    long long last = -1;
    while (fgets(line, sizeof line, f) != NULL) {
        const char *number = strstr(line, "number ");
        const char *lost = strstr(line, " W ");
        if (number != NULL) {
            long long n = atoll(number + 7);
            h.in_order = h.in_order && n > last;
            last = n;
            h.lines++;
        } else if (lost != NULL && strstr(line, "log lines dropped") != NULL) {
            h.dropped += strtoull(lost + 3, NULL, 10);
        }
    }
    fclose(f);
    return h;
}

static void a_stalled_reader_stalls_nobody(void)
{
    enum { LINES = 100000 };
    static char filler[200];
    memset(filler, 'x', sizeof filler - 1);
    int fd = stop_reading();
    CHECK(log_start() == OK);
    uint64_t start = clock_us();
    for (int i = 0; i < LINES; i++)
        log_line(LOG_INFO, "number %d %s", i, filler);
    uint64_t took = clock_us() - start;
    struct heard h;
    /* The reader wakes up: log_stop flushes while a child reads. */
    int result[2];
    CHECK(pipe(result) == 0);
    pid_t child = fork();
    if (child == 0) {
        close(STDERR_FILENO); /* the end of the pipe must come */
        h = listen(fd);
        _exit(write(result[1], &h, sizeof h) == sizeof h ? 0 : 1);
    }
    log_stop();
    restore_stderr();
    close(fd);
    CHECK(read(result[0], &h, sizeof h) == sizeof h);
    ok(took < 5000000, "100,000 lines to a pipe that nobody reads do not wait for it");
    ok(h.lines + h.dropped == LINES && h.dropped > 0,
       "what did not fit is counted: %llu written, %llu dropped", h.lines, h.dropped);
    ok(h.lines * 230 > LOG_RING_BYTES / 2, "the ring holds megabytes before that");
    ok(h.in_order, "and what was written is in order");
}

static void stopping_does_not_wait_for_ever(void)
{
    int fd = stop_reading();
    CHECK(log_start() == OK);
    for (int i = 0; i < 5000; i++)
        log_line(LOG_INFO, "number %d and some more text to fill the pipe with", i);
    uint64_t start = clock_us();
    log_stop();
    ok(clock_us() - start < 2500000, "log_stop gives up on a stuck reader after a second");
    (void)fd; /* stays open, and stderr its writer: the log thread is still in write */
}

int main(void)
{
    signal(SIGPIPE, SIG_IGN); /* as the daemon does */
    a_stalled_reader_stalls_nobody();
    stopping_does_not_wait_for_ever();
    fflush(stdout);
    return tap_done();
}
