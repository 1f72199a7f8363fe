/* What docs/quality.md is made of: pieces that are measured one by one (quality_pieces.c lists them,
 * eval_quality.c runs them) and written down together (quality_report.c). */
#ifndef ENGINE_TOOL_QUALITY_H
#define ENGINE_TOOL_QUALITY_H

#include "engine/tool/eval.h"

enum { QUALITY_LINES = 18, QUALITY_BUDGETS = 4 };

/* A plug-in with options: a line of a table, measured at the piece's budgets. */
struct quality_line {
    const char *plugin, *options;
    double known[QUALITY_BUDGETS]; /* what selection.md has: KL, or keys kept of six; 0: nothing */
    const char *curve;             /* its name in the plot; NULL: not drawn */
};

enum quality_kind {
    QUALITY_KL,
    QUALITY_CONTEXTS, /* KL by length */
    QUALITY_PLACES,   /* KL elsewhere in the text */
    QUALITY_POLICIES, /* KL and pass keys by head policy */
    QUALITY_PASSKEY,
    QUALITY_RULER,
    QUALITY_TURNS,
    QUALITY_ROBUSTNESS,
    QUALITY_PLANTED,
};

struct quality_piece {
    const char *name, *title, *text;
    enum quality_kind kind;
    enum kv_type kv_type; /* of pages; KL is to dense rows over pages of bf16 in any case */
    uint32_t block_rows, context, n_budgets, count; /* count: tokens, depths, samples or rows */
    struct quality_line lines[QUALITY_LINES];       /* up to the first without a plug-in */
};

extern const double quality_budgets[QUALITY_BUDGETS];
extern const struct quality_piece quality_pieces[];
extern const uint32_t quality_n_pieces;

/* "wave outliers=1": what a row of this line has as "plugin". */
void quality_label(const struct quality_line *l, char *out, size_t room);

/* Writes quality.md and its plots into e->out. sheets: one for each piece, with "rows"; NULL: not
 * measured. ERR_IO. */
status quality_report(const struct eval *e, cJSON *const *sheets);

#endif
