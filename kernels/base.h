/* The vocabulary every folder shares: how we fail, how we allocate.
 *
 * Three ways to fail, and only three:
 *   - the caller or the outside world did something wrong: return a status, text in err_text();
 *   - we did something wrong: CHECK() aborts with a message, in every build;
 *   - the machine is out of ordinary memory: mem_alloc() aborts. What is bounded by design
 *     (blocks, queue slots, mailbox bytes) never takes this road: it returns ERR_FULL, and is
 *     tested. Large or request-sized memory goes through mem_try_alloc() and mem_try_grow(), which may
 *     return NULL.
 *
 * This header is read by C11 and by CUDA C++17, so it keeps to what both accept. */
#ifndef KERNELS_BASE_H
#define KERNELS_BASE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define STATUS_LIST(X)                                  \
    X(OK, "ok")                                         \
    X(ERR_ARG, "invalid argument")                      \
    X(ERR_FULL, "a bounded resource is used up")        \
    X(ERR_IO, "input or output failed")                 \
    X(ERR_PROTO, "the peer broke the protocol")         \
    X(ERR_FORMAT, "a file is not what it claims to be") \
    X(ERR_MEMORY, "the machine has too little memory")  \
    X(ERR_DEVICE, "the device failed")                  \
    X(ERR_GONE, "the request was cancelled")

typedef enum status {
#define X(name, text) name,
    STATUS_LIST(X)
#undef X
} status;

#define MUST_USE                __attribute__((warn_unused_result))
#define PRINTF_LIKE(fmt, first) __attribute__((format(printf, fmt, first)))

const char *status_name(status st);

/* Records why, for this thread, and hands the status back: `return err(ERR_FULL, "...");` */
status err(status st, const char *fmt, ...) PRINTF_LIKE(2, 3);
/* The text of this thread's last err(); valid until its next one. Never NULL. */
const char *err_text(void);

#define TRY(call)                \
    do {                         \
        status try_st_ = (call); \
        if (try_st_ != OK)       \
            return try_st_;      \
    } while (0)

#define CHECK(cond)                                  \
    do {                                             \
        if (!(cond))                                 \
            check_failed(__FILE__, __LINE__, #cond); \
    } while (0)

__attribute__((noreturn)) void check_failed(const char *file, int line, const char *what);

void *mem_alloc(size_t bytes);     /* zeroed; never NULL */
void *mem_try_alloc(size_t bytes); /* zeroed; NULL: no memory */
void *mem_grow(void *p, size_t old_bytes,
               size_t new_bytes); /* realloc, new part zeroed; never NULL */
/* The same for what a request makes large; NULL: no memory, and p is as it was. */
void *mem_try_grow(void *p, size_t old_bytes, size_t new_bytes);
void mem_free(const void *p); /* NULL is allowed */

/* A bump allocator with one owner and one moment of death. Nothing in it is freed alone.
 * It grows by chaining chunks, up to `max_bytes` in all: beyond that arena_alloc returns NULL. */
struct arena_chunk;
struct arena {
    struct arena_chunk *head; /* newest chunk */
    size_t chunk_bytes;       /* size of an ordinary chunk */
    size_t max_bytes;         /* bound over all chunks */
    size_t total_bytes;       /* held now */
};

void arena_init(struct arena *a, size_t chunk_bytes, size_t max_bytes); /* allocates nothing yet */
void arena_fini(struct arena *a);
void *arena_alloc(struct arena *a, size_t count, size_t size,
                  size_t align);                                /* zeroed; NULL: full */
char *arena_strdup(struct arena *a, const char *s, size_t len); /* NUL-terminated; NULL: full */

#define ARENA_NEW(a, T, n) ((T *)arena_alloc((a), (n), sizeof(T), __alignof__(T)))

#define ARRAY_LEN(x) (sizeof(x) / sizeof((x)[0]))

uint64_t clock_us(void); /* monotonic, microseconds; only main, loop and engine read clocks */

#ifdef __cplusplus
}
#endif
#endif
