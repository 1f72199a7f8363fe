/* Small texts of HTTP: reason phrases, dates, percent-decoding, request ids, host names. Pure
 * functions: no clock, no state. */
#ifndef SERVER_HTTP_TEXT_H
#define SERVER_HTTP_TEXT_H

#include "api/exchange.h" /* text_view */
#include "kernels/base.h"

enum { HTTP_DATE_BYTES = 30, HTTP_ID_BYTES = 65 };

const char *http_text_reason(int code);
/* "Sun, 06 Nov 1994 08:49:37 GMT" and a NUL. */
void http_text_date(char out[HTTP_DATE_BYTES], uint64_t unix_s);

/* Decodes %XX of path[len] in place; *out_len is the new length. False: an incomplete escape, an
 * encoded NUL or control, or an encoded slash where it could hide a path from whoever reads only
 * the raw one (it is welcome in a model's name: /v1/models/org%2Fname). */
bool http_text_decode_path(char *path, size_t len, size_t *out_len);

bool http_text_clean_id(struct text_view id);                         /* [A-Za-z0-9._-]{1,64} */
void http_text_make_id(char out[HTTP_ID_BYTES], const uint8_t r[16]); /* 32 hex digits */

bool http_text_equal(struct text_view v, const char *s);        /* bytes */
bool http_text_equal_nocase(struct text_view v, const char *s); /* ASCII case ignored */

/* The name part of a Host header, without port and brackets. False: not a host. */
bool http_text_host_name(struct text_view host, struct text_view *name);
bool http_text_is_ip(struct text_view name);       /* an IPv4 or IPv6 literal */
bool http_text_is_loopback(struct text_view name); /* localhost, *.localhost, 127/8, ::1 */

#endif
