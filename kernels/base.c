/* Status texts, checked allocation, arenas, the clock. No state but the thread's last error text. */
#include "kernels/base.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static _Thread_local char last_text[1024];

const char *status_name(status st)
{
    static const char *const texts[] = {
#define X(name, text) [name] = text,
        STATUS_LIST(X)
#undef X
    };
    CHECK((size_t)st < ARRAY_LEN(texts));
    return texts[st];
}

status err(status st, const char *fmt, ...)
{
    /* The arguments may point into last_text: one error wraps another. */
    char text[sizeof last_text];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    memcpy(last_text, text, sizeof text);
    return st;
}

const char *err_text(void)
{
    return last_text;
}

void check_failed(const char *file, int line, const char *what)
{
    fprintf(stderr, "spind: %s:%d: this must never happen: %s\n", file, line, what);
    abort();
}

void *mem_alloc(size_t bytes)
{
    void *p = mem_try_alloc(bytes);
    if (p == NULL) {
        fprintf(stderr, "spind: out of memory (%zu bytes asked)\n", bytes);
        abort();
    }
    return p;
}

void *mem_try_alloc(size_t bytes)
{
    return calloc(1, bytes ? bytes : 1);
}

void *mem_grow(void *p, size_t old_bytes, size_t new_bytes)
{
    char *q = mem_try_grow(p, old_bytes, new_bytes);
    if (q == NULL) {
        fprintf(stderr, "spind: out of memory (%zu bytes asked)\n", new_bytes);
        abort();
    }
    return q;
}

void *mem_try_grow(void *p, size_t old_bytes, size_t new_bytes)
{
    CHECK(new_bytes >= old_bytes);
    char *q = realloc(p, new_bytes ? new_bytes : 1);
    if (q != NULL)
        memset(q + old_bytes, 0, new_bytes - old_bytes);
    return q;
}

void mem_free(const void *p)
{
    free((void *)(uintptr_t)p);
}

struct arena_chunk {
    struct arena_chunk *next;
    size_t used, size; /* of data */
    _Alignas(64) char data[];
};

void arena_init(struct arena *a, size_t chunk_bytes, size_t max_bytes)
{
    *a = (struct arena){.chunk_bytes = chunk_bytes, .max_bytes = max_bytes};
}

static struct arena_chunk *arena_add_chunk(struct arena *a, size_t need)
{
    size_t size = need > a->chunk_bytes ? need : a->chunk_bytes;
    if (size > a->max_bytes || a->total_bytes > a->max_bytes - size)
        size = need; /* the last stretch may be smaller than a chunk */
    if (size > a->max_bytes || a->total_bytes > a->max_bytes - size)
        return NULL;
    struct arena_chunk *c = aligned_alloc(64, (sizeof *c + size + 63) / 64 * 64);
    if (c == NULL)
        return NULL;
    *c = (struct arena_chunk){.next = a->head, .size = size};
    a->head = c;
    a->total_bytes += size;
    return c;
}

void arena_fini(struct arena *a)
{
    for (struct arena_chunk *c = a->head, *next; c != NULL; c = next) {
        next = c->next;
        free(c);
    }
    *a = (struct arena){0};
}

void *arena_alloc(struct arena *a, size_t count, size_t size, size_t align)
{
    size_t bytes;
    CHECK(align > 0 && align <= 64 && (align & (align - 1)) == 0);
    if (__builtin_mul_overflow(count, size, &bytes) || bytes > SIZE_MAX / 2)
        return NULL;
    struct arena_chunk *c = a->head;
    size_t at = c == NULL ? 0 : (c->used + align - 1) & ~(align - 1);
    if (c == NULL || at > c->size || bytes > c->size - at) {
        c = arena_add_chunk(a, bytes);
        if (c == NULL)
            return NULL;
        at = 0;
    }
    c->used = at + bytes;
    return memset(c->data + at, 0, bytes);
}

char *arena_strdup(struct arena *a, const char *s, size_t len)
{
    char *p = arena_alloc(a, len + 1, 1, 1);
    if (p != NULL && len > 0)
        memcpy(p, s, len);
    return p;
}

uint64_t clock_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000u + (uint64_t)t.tv_nsec / 1000u;
}
