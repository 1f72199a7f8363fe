/* Traces of selections (trace.h) sorted into lanes: one list of steps per (sequence, layer, head). */
#ifndef ENGINE_TOOL_LANES_H
#define ENGINE_TOOL_LANES_H

#include "engine/tool/replay.h"
#include "engine/tool/trace.h"

/* A sequence's lanes are [layers][kv_heads]; those without a selection (DENSE, STREAM) have no steps. */
struct lanes_sequence {
    uint64_t id;
    uint32_t file; /* which of the files */
    struct lanes_list *lists;
};

struct lanes {
    struct trace_header header; /* of the first file */
    struct lanes_sequence *sequences;
    uint32_t n_sequences, n_cut; /* n_cut: files that end in the middle of a record */
};

/* ERR_IO, ERR_FORMAT; ERR_ARG: files of different shapes. */
status lanes_load(struct lanes **out, const char *const *files, uint32_t n);
void lanes_free(struct lanes *l); /* NULL is allowed */
/* Borrowed; n_steps 0: nothing was selected. */
struct replay_lane lanes_get(const struct lanes *l, uint32_t sequence, uint32_t layer,
                             uint32_t head);

#endif
