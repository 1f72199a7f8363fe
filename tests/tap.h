/* A test is a program that prints TAP; `prove` runs it. One file, one binary, one process. */
#ifndef TESTS_TAP_H
#define TESTS_TAP_H

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int tap_run, tap_bad;

__attribute__((format(printf, 4, 5))) static inline int tap_ok(int good, const char *file, int line,
                                                               const char *fmt, ...)
{
    va_list ap;
    printf("%sok %d - ", good ? "" : "not ", ++tap_run);
    va_start(ap, fmt);
    vprintf(fmt, ap);
    va_end(ap);
    putchar('\n');
    if (!good) {
        printf("#   at %s:%d\n", file, line);
        tap_bad++;
    }
    return good;
}

#define ok(cond, ...) tap_ok(!!(cond), __FILE__, __LINE__, __VA_ARGS__)

#define is_int(got, want, name)                                       \
    do {                                                              \
        long long got_ = (long long)(got), want_ = (long long)(want); \
        if (!ok(got_ == want_, "%s", name))                           \
            printf("#   got %lld, want %lld\n", got_, want_);         \
    } while (0)

/* Everything is some ten times slower then, and takes more memory. What a number proves it proves without as well;
 * here every piece of code is to be run, once. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define TAP_SANITIZED 1
#else
#define TAP_SANITIZED 0
#endif

/* Only what a slow tool (tests/cuda/sanitize) can do: each kernel, on small shapes. */
static inline int tap_small(void)
{
    return getenv("SPIND_SMALL") != NULL;
}

static inline int tap_done(void)
{
    printf("1..%d\n", tap_run);
    return tap_bad != 0;
}

/* One case that cannot run here; tests/run counts them. */
static inline void tap_skip(const char *name, const char *why)
{
    printf("ok %d - %s # SKIP %s\n", ++tap_run, name, why);
}

static inline void tap_skip_all(const char *why)
{
    printf("1..0 # SKIP %s\n", why);
    exit(0);
}

#endif
