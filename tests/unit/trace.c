/* Traces of selections: what was written is read, wherever the file ends, and no file does harm. */
#include "engine/tool/trace.h"
#include "kernels/core/splitmix.h"
#include "tests/tap.h"

#include <unistd.h>

enum { RECORDS = 500, MOST = 300 };

static uint64_t seed = 3;

static uint32_t below(uint32_t n)
{
    return (uint32_t)((splitmix_next(&seed) >> 32) * n >> 32);
}

static const struct trace_header header = {.layers = 30,
                                           .kv_heads = 3,
                                           .block_rows = 8,
                                           .interval = 2,
                                           .budget = 0.05f,
                                           .model = "SmolLM2 135M",
                                           .plugin = "wave"};

static uint32_t pages[RECORDS][MOST];
static struct trace_record records[RECORDS];
static char file[64];

static void make_records(void)
{
    for (uint32_t i = 0; i < RECORDS; i++) {
        uint32_t n = below(MOST), page = below(1000);
        for (uint32_t k = 0; k < n; k++) {
            pages[i][k] = page;
            page += 1 + (below(5) ? below(3) : below(100000) % 50000);
        }
        records[i] = (struct trace_record){.sequence = below(3) == 0 ? UINT64_MAX - i : i,
                                           .pos = 7000 + i,
                                           .layer = below(30),
                                           .head = below(3),
                                           .n_pages = n,
                                           .pages = pages[i]};
    }
}

static void write_all(void)
{
    struct trace_writer *w;
    CHECK(trace_create(&w, file, &header) == OK);
    for (uint32_t i = 0; i < RECORDS; i++)
        trace_write(w, &records[i]);
    CHECK(trace_finish(w) == OK);
}

static bool same(const struct trace_record *a, const struct trace_record *b)
{
    return a->sequence == b->sequence && a->pos == b->pos && a->layer == b->layer &&
           a->head == b->head && a->n_pages == b->n_pages &&
           memcmp(a->pages, b->pages, a->n_pages * sizeof *a->pages) == 0;
}

/* Records that were read and were right, in order. */
static uint32_t read_all(status *st, bool *cut)
{
    struct trace_reader *r;
    struct trace_record got;
    bool more = true;
    uint32_t n = 0;
    *cut = false;
    if ((*st = trace_open(&r, file)) != OK)
        return 0;
    while ((*st = trace_next(r, &got, &more)) == OK && more)
        n += n < RECORDS && same(&got, &records[n]);
    *cut = trace_cut(r);
    trace_close(r);
    return n;
}

static void what_was_written_is_read(void)
{
    struct trace_reader *r;
    status st;
    bool cut;
    write_all();
    CHECK(trace_open(&r, file) == OK);
    ok(memcmp(trace_header(r), &header, sizeof header) == 0, "the header");
    trace_close(r);
    is_int(read_all(&st, &cut), RECORDS, "every record");
    ok(st == OK && !cut, "and no more");
    write_all();
    is_int(read_all(&st, &cut), RECORDS, "a trace may be written over");
}

static void a_file_may_end_anywhere(void)
{
    FILE *f = fopen(file, "rb");
    fseek(f, 0, SEEK_END);
    long size = ftell(f);
    fclose(f);
    uint32_t before = RECORDS;
    bool good = true;
    for (long end = size - 1; end >= 192; end -= 1 + (long)below(2000)) {
        status st;
        bool cut;
        CHECK(truncate(file, end) == 0);
        uint32_t n = read_all(&st, &cut);
        good &= st == OK && n <= before;
        before = n;
    }
    ok(good && before < RECORDS / 10, "what is complete is read");
    CHECK(truncate(file, 100) == 0);
    status st;
    bool cut;
    (void)read_all(&st, &cut);
    is_int(st, ERR_FORMAT, "half a header is no trace");
}

static void other_files_are_refused(void)
{
    struct trace_writer *w;
    struct trace_reader *r;
    FILE *f = fopen(file, "wb");
    fputs("a letter to my aunt", f);
    fclose(f);
    is_int(trace_create(&w, file, &header), ERR_ARG, "a file that is no trace is not written over");
    is_int(trace_open(&r, file), ERR_FORMAT, "nor read");
    is_int(trace_open(&r, "/nonexistent/trace"), ERR_IO, "no file");
    is_int(trace_create(&w, "/nonexistent/trace", &header), ERR_IO, "no folder");
    CHECK(unlink(file) == 0);
}

static void a_full_disk_is_told_at_the_end(void)
{
    struct trace_writer *w;
    if (access("/dev/full", W_OK) != 0) {
        tap_skip("a full disk is told", "no /dev/full");
        return;
    }
    CHECK(trace_create(&w, "/dev/full", &header) == OK);
    for (uint32_t i = 0; i < RECORDS; i++)
        trace_write(w, &records[i]);
    is_int(trace_finish(w), ERR_IO, "a full disk is told");
}

static void damage_does_no_harm(void)
{
    bool good = true;
    for (uint32_t round = 0; round < 300; round++) {
        write_all();
        FILE *f = fopen(file, "r+b");
        for (uint32_t i = 0; i < 20; i++) {
            fseek(f, 192 + (long)below(40000), SEEK_SET);
            fputc((int)below(256), f);
        }
        fclose(f);
        status st;
        bool cut;
        (void)read_all(&st, &cut);
        good &= st == OK || st == ERR_FORMAT;
    }
    ok(good, "300 damaged traces: read or refused");
}

int main(void)
{
    snprintf(file, sizeof file, "/tmp/spind-trace-%d", (int)getpid());
    make_records();
    what_was_written_is_read();
    a_file_may_end_anywhere();
    other_files_are_refused();
    a_full_disk_is_told_at_the_end();
    damage_does_no_harm();
    unlink(file);
    return tap_done();
}
