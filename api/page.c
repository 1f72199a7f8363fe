/* The chat page at /ui: three files of api/page, which the linker made part of the program. They need no key: there is
 * nothing in them that a stranger could not read in the sources, and what the page then asks needs one. Nothing else
 * may be loaded by it or run in it. */
#include "api/page.h"

#include <string.h>

#define FILE_OF(name)  extern const char _binary_##name##_start[], _binary_##name##_end[]
#define BYTES_OF(name) _binary_##name##_start, _binary_##name##_end

FILE_OF(chat_html);
FILE_OF(chat_css);
FILE_OF(chat_js);

static const struct page {
    const char *path, *type;
    const char *from, *end;
} pages[] = {
    {"/ui", "text/html; charset=utf-8", BYTES_OF(chat_html)},
    {"/ui/chat.css", "text/css; charset=utf-8", BYTES_OF(chat_css)},
    {"/ui/chat.js", "text/javascript; charset=utf-8", BYTES_OF(chat_js)},
};

void page_answer(struct api *a, struct exchange *x)
{
    static const char guard[] =
        "Content-Security-Policy: default-src 'none'; script-src 'self'; style-src 'self'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'\r\n"
        "X-Content-Type-Options: nosniff\r\nReferrer-Policy: no-referrer\r\n"
        "Cache-Control: no-cache\r\n";
    const struct text_view path = exchange_path(x);
    for (size_t i = 0; i < ARRAY_LEN(pages); i++) {
        const struct page *p = &pages[i];
        if (path.len != strlen(p->path) || memcmp(path.p, p->path, path.len) != 0)
            continue;
        const struct reply r = {.status = 200,
                                .content_type = p->type,
                                .extra = guard,
                                .body = p->from,
                                .len = (size_t)(p->end - p->from)};
        api_answer(a, x, &r);
        return;
    }
    CHECK(!"a path of the route table");
}
