#include "engine/tool/trace.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

enum {
    HEADER_BYTES = 192,
    BUFFER_BYTES = 1 << 20,
    MAX_PAGES = 1 << 24, /* of a record; a longer list is no trace of ours */
};

static const char magic[8] = {'S', 'P', 'I', 'N', 'D', 'T', 'R', '1'};

/* ---- writing ---- */

struct trace_writer {
    FILE *file;
    char *name;
    char *buffer; /* stdio's */
    int error;    /* errno of the first failure */
};

static void put_u32(uint8_t *at, uint32_t v)
{
    for (uint32_t i = 0; i < 4; i++)
        at[i] = (uint8_t)(v >> 8 * i);
}

static uint32_t get_u32(const uint8_t *at)
{
    return at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

static void pack_header(uint8_t *to, const struct trace_header *h)
{
    uint32_t budget;
    memset(to, 0, HEADER_BYTES);
    memcpy(to, magic, sizeof magic);
    put_u32(to + 8, h->layers);
    put_u32(to + 12, h->kv_heads);
    put_u32(to + 16, h->block_rows);
    put_u32(to + 20, h->interval);
    memcpy(&budget, &h->budget, sizeof budget);
    put_u32(to + 24, budget);
    memcpy(to + 28, h->model, strnlen(h->model, sizeof h->model - 1));
    memcpy(to + 156, h->plugin, strnlen(h->plugin, sizeof h->plugin - 1));
}

/* An old trace may be written over; no other file may. */
static status refuse_others(const char *file)
{
    char begin[sizeof magic];
    struct stat st;
    if (stat(file, &st) != 0 || !S_ISREG(st.st_mode))
        return OK;
    FILE *f = fopen(file, "rbe");
    if (f == NULL)
        return OK;
    size_t n = fread(begin, 1, sizeof begin, f);
    fclose(f);
    if (n == 0 || (n == sizeof begin && memcmp(begin, magic, n) == 0))
        return OK;
    return err(ERR_ARG, "%s: exists and is not a trace; it is left as it is", file);
}

status trace_create(struct trace_writer **out, const char *file, const struct trace_header *h)
{
    uint8_t header[HEADER_BYTES];
    TRY(refuse_others(file));
    FILE *f = fopen(file, "wbe");
    if (f == NULL)
        return err(ERR_IO, "%s: %s", file, strerror(errno));
    struct trace_writer *w = mem_alloc(sizeof *w);
    w->file = f;
    w->name = mem_alloc(strlen(file) + 1);
    memcpy(w->name, file, strlen(file) + 1);
    w->buffer = mem_alloc(BUFFER_BYTES);
    setvbuf(f, w->buffer, _IOFBF, BUFFER_BYTES);
    pack_header(header, h);
    if (fwrite(header, 1, sizeof header, f) != sizeof header)
        w->error = errno;
    *out = w;
    return OK;
}

static void put_number(struct trace_writer *w, uint64_t v)
{
    do {
        uint8_t byte = (uint8_t)((v & 0x7f) | (v > 0x7f ? 0x80 : 0));
        if (putc_unlocked(byte, w->file) == EOF && w->error == 0)
            w->error = errno;
        v >>= 7;
    } while (v != 0);
}

void trace_write(struct trace_writer *w, const struct trace_record *r)
{
    if (w->error != 0)
        return;
    put_number(w, r->sequence);
    put_number(w, r->pos);
    put_number(w, r->layer);
    put_number(w, r->head);
    put_number(w, r->n_pages);
    for (uint32_t i = 0; i < r->n_pages; i++) {
        CHECK(i == 0 || r->pages[i] > r->pages[i - 1]);
        put_number(w, i == 0 ? r->pages[0] : r->pages[i] - r->pages[i - 1]);
    }
}

status trace_finish(struct trace_writer *w)
{
    status st = OK;
    if (fclose(w->file) != 0 && w->error == 0)
        w->error = errno;
    if (w->error != 0)
        st = err(ERR_IO, "%s: %s", w->name, strerror(w->error));
    mem_free(w->buffer);
    mem_free(w->name);
    mem_free(w);
    return st;
}

/* ---- reading ---- */

struct trace_reader {
    FILE *file;
    struct trace_header header;
    uint32_t *pages;
    size_t max_pages;
    uint64_t n_read;
    bool cut;
};

static bool unpack_header(struct trace_header *h, const uint8_t *from)
{
    uint32_t budget = get_u32(from + 24);
    h->layers = get_u32(from + 8);
    h->kv_heads = get_u32(from + 12);
    h->block_rows = get_u32(from + 16);
    h->interval = get_u32(from + 20);
    memcpy(&h->budget, &budget, sizeof budget);
    memcpy(h->model, from + 28, sizeof h->model - 1);
    memcpy(h->plugin, from + 156, sizeof h->plugin - 1);
    return memcmp(from, magic, sizeof magic) == 0 && h->layers > 0 && h->layers <= 4096 &&
           h->kv_heads > 0 && h->kv_heads <= 4096 && h->block_rows > 0 && h->block_rows <= 1024;
}

status trace_open(struct trace_reader **out, const char *file)
{
    uint8_t header[HEADER_BYTES];
    FILE *f = fopen(file, "rbe");
    if (f == NULL)
        return err(ERR_IO, "%s: %s", file, strerror(errno));
    struct trace_reader *r = mem_alloc(sizeof *r);
    r->file = f;
    if (fread(header, 1, sizeof header, f) != sizeof header || !unpack_header(&r->header, header)) {
        trace_close(r);
        return err(ERR_FORMAT, "%s: not a trace of selections", file);
    }
    *out = r;
    return OK;
}

const struct trace_header *trace_header(const struct trace_reader *r)
{
    return &r->header;
}

enum number { NUMBER_OK, NUMBER_END, NUMBER_BAD };

static enum number get_number(struct trace_reader *r, uint64_t *v)
{
    *v = 0;
    for (uint32_t shift = 0; shift < 64; shift += 7) {
        int byte = getc_unlocked(r->file);
        if (byte == EOF)
            return NUMBER_END;
        *v |= (uint64_t)(byte & 0x7f) << shift;
        if (byte < 0x80)
            return NUMBER_OK;
    }
    return NUMBER_BAD;
}

static enum number get_below(struct trace_reader *r, uint64_t bound, uint32_t *v)
{
    uint64_t x;
    enum number got = get_number(r, &x);
    *v = (uint32_t)x;
    return got == NUMBER_OK && x >= bound ? NUMBER_BAD : got;
}

static enum number get_pages(struct trace_reader *r, uint32_t n)
{
    uint64_t page = 0;
    if (n > r->max_pages) {
        r->pages = mem_grow(r->pages, r->max_pages * sizeof *r->pages, n * sizeof *r->pages);
        r->max_pages = n;
    }
    for (uint32_t i = 0; i < n; i++) {
        uint32_t step;
        enum number got = get_below(r, MAX_PAGES, &step);
        if (got != NUMBER_OK)
            return got;
        if (i > 0 && step == 0)
            return NUMBER_BAD;
        page += step;
        if (page >= MAX_PAGES)
            return NUMBER_BAD;
        r->pages[i] = (uint32_t)page;
    }
    return NUMBER_OK;
}

static enum number get_record(struct trace_reader *r, struct trace_record *out)
{
    enum number got;
    if ((got = get_below(r, UINT32_MAX, &out->pos)) != NUMBER_OK ||
        (got = get_below(r, r->header.layers, &out->layer)) != NUMBER_OK ||
        (got = get_below(r, r->header.kv_heads, &out->head)) != NUMBER_OK ||
        (got = get_below(r, MAX_PAGES, &out->n_pages)) != NUMBER_OK)
        return got;
    return get_pages(r, out->n_pages);
}

status trace_next(struct trace_reader *r, struct trace_record *out, bool *more)
{
    *more = false;
    enum number got = get_number(r, &out->sequence);
    if (got == NUMBER_END && !ferror(r->file))
        return OK; /* whether cut inside this first number is not told apart */
    if (got == NUMBER_OK)
        got = get_record(r, out);
    if (ferror(r->file))
        return err(ERR_IO, "a trace: %s", strerror(errno));
    if (got == NUMBER_BAD)
        return err(ERR_FORMAT, "a trace: record %llu is none", (unsigned long long)r->n_read + 1);
    r->cut = got == NUMBER_END;
    *more = got == NUMBER_OK;
    r->n_read += *more;
    out->pages = r->pages;
    return OK;
}

bool trace_cut(const struct trace_reader *r)
{
    return r->cut;
}

void trace_close(struct trace_reader *r)
{
    if (r == NULL)
        return;
    fclose(r->file);
    mem_free(r->pages);
    mem_free(r);
}
