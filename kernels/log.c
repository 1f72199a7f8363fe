/* Log lines and progress on stderr. A line is built on the stack and leaves in one write(2). */
#include "kernels/log.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static _Atomic int least_level = LOG_INFO;

void log_set_level(enum log_level least)
{
    atomic_store(&least_level, (int)least);
}

void log_line(enum log_level level, const char *fmt, ...)
{
    if ((int)level < atomic_load(&least_level))
        return;
    char line[2048];
    struct timespec t;
    struct tm tm;
    clock_gettime(CLOCK_REALTIME, &t);
    localtime_r(&t.tv_sec, &tm);
    size_t n = strftime(line, sizeof line, "%Y-%m-%d %H:%M:%S", &tm);
    n += (size_t)snprintf(line + n, sizeof line - n, ".%03d %c ", (int)(t.tv_nsec / 1000000),
                          "DIWE"[level]);
    va_list ap;
    va_start(ap, fmt);
    int m = vsnprintf(line + n, sizeof line - n - 1, fmt, ap);
    va_end(ap);
    if (m > 0)
        n += (size_t)m < sizeof line - n - 1 ? (size_t)m : sizeof line - n - 2;
    line[n++] = '\n';
    /* Nobody is left to tell if stderr is gone. */
    ssize_t ignored = write(STDERR_FILENO, line, n);
    (void)ignored;
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
    if (isatty(STDERR_FILENO))
        fprintf(stderr, "\r%s: %d %%, %.1f GB/s, %.0f s to go ", p->what, tenth * 10,
                s > 0 ? gb / s : 0.0, s * (10 - tenth) / tenth);
    else
        log_line(LOG_INFO, "%s: %d %%, %.1f GB/s", p->what, tenth * 10, s > 0 ? gb / s : 0.0);
}

void log_progress_done(struct log_progress *p)
{
    double s = (double)(clock_us() - p->start_us) / 1e6;
    if (p->shown > 0 && isatty(STDERR_FILENO))
        fprintf(stderr, "\r\033[K");
    log_line(LOG_INFO, "%s: %.1f MB in %.2f s", p->what, (double)p->total / 1e6, s);
}
