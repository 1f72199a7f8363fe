/* Errors in OpenAI's shape: {"error":{"message","type","param","code"}}, all four keys always there,
 * code a string or null. One renderer; nothing else writes a 4xx or 5xx body. */
#ifndef API_ERROR_H
#define API_ERROR_H

#include "api/exchange.h"

struct api_error {
    int status;
    const char *type; /* static */
    const char *code; /* static; NULL: null */
    char param[64];   /* field path; "": null */
    char message[1024];
    const char *extra_header;        /* static: "Allow: POST\r\n", ... or NULL */
    uint32_t n_prompt_tokens, n_ctx; /* both > 0: added to the body (context errors) */
    uint32_t retry_after_s;          /* > 0: Retry-After */
    uint32_t retry_after_ms;         /* > 0: likewise, and retry-after-ms */
};

/* Fills *e from a status: the type and, where code is NULL, the usual code of that status. */
void error_set(struct api_error *e, int http_status, const char *code, const char *param,
               const char *fmt, ...) PRINTF_LIKE(5, 6);
/* JSON text into buf; the length. room >= 4096 always suffices. */
size_t error_render(const struct api_error *e, char *buf, size_t room);
/* Renders and replies. */
void error_reply(struct exchange *x, const struct api_error *e, bool close);

#endif
