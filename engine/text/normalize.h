/* Canonical composition (NFC, UAX #15), which Qwen2's tokenizer applies before it cuts text. */
#ifndef ENGINE_TEXT_NORMALIZE_H
#define ENGINE_TEXT_NORMALIZE_H

#include "engine/text/tokenizer.h"

/* Working memory of one thread; zero is a good start. It grows with the text of a call, and what a
 * long text needed is returned by normalize_trim. */
struct normalize_scratch {
    char *text; /* the result */
    size_t text_room;
    uint32_t *cps, *sorted; /* one region: code point | combining class << 24 */
    size_t cps_room;
};

/* *out borrows `text` when that is NFC already (nearly always), else the scratch. ERR_MEMORY. */
status normalize_nfc(struct normalize_scratch *s, struct text_view text, struct text_view *out);
void normalize_trim(struct normalize_scratch *s);
void normalize_fini(struct normalize_scratch *s);

#endif
