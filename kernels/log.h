/* Log lines on stderr: `2026-11-21 10:11:12.345 I text`. Any thread may log and none ever waits for
 * whoever reads stderr: once log_start was called, lines go through a ring to a thread that writes
 * them, and what does not fit the ring is dropped and counted. Before that, and after log_stop, a
 * line is one write(2). Content of requests and keys is never passed here (reliability P14). */
#ifndef KERNELS_LOG_H
#define KERNELS_LOG_H

#include "kernels/base.h"

#ifdef __cplusplus
extern "C" {
#endif

enum log_level { LOG_DEBUG, LOG_INFO, LOG_WARN, LOG_ERROR };

enum { LOG_RING_BYTES = 8 << 20 };

void log_set_level(enum log_level least);
status log_start(void); /* once, before other threads log */
void log_stop(void); /* writes what is left, but waits for a stuck reader no longer than a second */
void log_line(enum log_level level, const char *fmt, ...) PRINTF_LIKE(2, 3);

/* Progress of long work. On a terminal one line is redrawn; elsewhere a line every 10 %.
 * Not for concurrent use: one progress at a time, by the thread that does the work. */
struct log_progress {
    const char *what;
    uint64_t total, start_us;
    int shown; /* last tenth printed */
};
void log_progress_start(struct log_progress *p, const char *what, uint64_t total_bytes);
void log_progress_step(struct log_progress *p, uint64_t done_bytes);
void log_progress_done(struct log_progress *p);

#ifdef __cplusplus
}
#endif
#endif
