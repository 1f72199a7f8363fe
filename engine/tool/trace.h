/* Traces of selections (--record-selection FILE): which pages every lane picked, step by step, for
 * `spind locality` and for tests of the hot set on real text.
 *
 * A file is a header of 192 bytes (little endian: "SPINDTR1", u32 layers, kv_heads, block_rows,
 * interval, f32 budget, then model and plug-in as text with NULs behind), then records, one per (row,
 * layer, SPARSE head): the numbers sequence, position, layer, head, pages, then the pages, the first as
 * it is and each other as its distance from the one before. Numbers are LEB128. A file may end anywhere,
 * since a server may be killed: complete records count. */
#ifndef ENGINE_TOOL_TRACE_H
#define ENGINE_TOOL_TRACE_H

#include "kernels/base.h"

struct trace_header {
    uint32_t layers, kv_heads, block_rows, interval;
    float budget; /* as in sparse_choice */
    char model[128], plugin[32];
};

struct trace_record {
    uint64_t sequence;         /* any name that stays */
    uint32_t pos, layer, head; /* pos: of the row that selected; its sequence's clock */
    uint32_t n_pages;
    const uint32_t *pages; /* [n_pages] ascending, the sinks' included */
};

/* ---- writing (the engine thread) ---- */

struct trace_writer;
/* ERR_IO, ERR_ARG (the file is there and no trace: it is not overwritten). */
status trace_create(struct trace_writer **out, const char *file, const struct trace_header *h);
/* Buffered. The first error sticks and is told by trace_finish. */
void trace_write(struct trace_writer *w, const struct trace_record *r);
/* Writes what is left and frees the writer. ERR_IO. */
status trace_finish(struct trace_writer *w);

/* ---- reading ---- */

struct trace_reader;
/* ERR_IO; ERR_FORMAT: not a trace. */
status trace_open(struct trace_reader **out, const char *file);
const struct trace_header *trace_header(const struct trace_reader *r);
/* The next record, whose pages are valid until the next call. *more false: there are no more, and
 * trace_cut says whether the last one was incomplete. ERR_FORMAT: what no writer writes. */
status trace_next(struct trace_reader *r, struct trace_record *out, bool *more);
bool trace_cut(const struct trace_reader *r);
void trace_close(struct trace_reader *r); /* NULL is allowed */

#endif
