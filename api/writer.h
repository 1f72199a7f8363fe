/* A growing byte buffer and the few JSON forms we write. Our own because cJSON prints 17 digits and
 * builds a tree per answer, while a stream wants one escaped string per token. */
#ifndef API_WRITER_H
#define API_WRITER_H

#include "kernels/base.h"

struct writer {
    char *p; /* NUL-terminated */
    size_t len, room;
    bool failed; /* no memory: nothing is written any more, and what is there is not whole */
};

void writer_init(struct writer *w);
void writer_fini(struct writer *w);
void writer_reset(struct writer *w);               /* keeps the memory; forgets that it failed */
void writer_shrink(struct writer *w, size_t most); /* resets, and keeps at most so many bytes */
void write_bytes(struct writer *w, const char *p, size_t len);
void write_text(struct writer *w, const char *s);
void write_format(struct writer *w, const char *fmt, ...) PRINTF_LIKE(2, 3);
/* "..." with ", \, and controls escaped; p[len] must be valid UTF-8 and may hold NUL. */
void write_string(struct writer *w, const char *p, size_t len);
void write_string_body(struct writer *w, const char *p, size_t len); /* without the quotes */
void write_u64(struct writer *w, uint64_t v);
/* Exact for a float32 (%.9g, always with a digit before and after a point or an exponent);
 * -inf, NaN and anything below -9999 become -9999.0. The one formatter of log-probabilities. */
void write_logprob(struct writer *w, float v);

#endif
