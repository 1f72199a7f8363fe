/* What a measurement found, as one JSON document with rows that also print as a table.
 *
 * The document is cJSON's: {"what", "machine", "date", ..., "rows": [{...}, ...]}. A column names a
 * key of the rows; a row without it shows a dash. */
#ifndef ENGINE_TOOL_SHEET_H
#define ENGINE_TOOL_SHEET_H

#include "kernels/base.h"

#include <cjson/cJSON.h>
#include <stdio.h>

enum sheet_format {
    SHEET_TEXT,
    SHEET_COUNT,   /* 1234 */
    SHEET_FIXED,   /* 0.0123 */
    SHEET_PERCENT, /* of a share: 12.3 % */
};

struct sheet_column {
    const char *key, *title;
    enum sheet_format format;
    int digits; /* behind the point */
};

/* A document with the machine, the date and an empty "rows". The caller deletes it (cJSON_Delete). */
cJSON *sheet_create(const char *what);
cJSON *sheet_row(cJSON *sheet); /* a new row, owned by the sheet */
/* Aligned, for a terminal. */
void sheet_print(FILE *to, const cJSON *rows, const struct sheet_column *columns, uint32_t n);
enum { SHEET_CELL = 64 };
void sheet_cell(char out[SHEET_CELL], const cJSON *row, const struct sheet_column *c);
/* The same rows as a Markdown table. */
void sheet_markdown(FILE *to, const cJSON *rows, const struct sheet_column *columns, uint32_t n);
/* NULL file: does nothing. Written beside and renamed, so a reader never sees half. ERR_IO. */
status sheet_save(const cJSON *sheet, const char *file);
/* ERR_IO: not there; ERR_FORMAT: not JSON. */
status sheet_load(cJSON **out, const char *file);

double sheet_number(const cJSON *row, const char *key);    /* NAN: not there */
const char *sheet_text(const cJSON *row, const char *key); /* "": not there */
const char *sheet_machine(void);                           /* "Intel Xeon ..., 2 cores" */

#endif
