/* Most characters are "quick": NFC leaves them alone and they never join with what is before them,
 * so text falls apart into independent regions, each a quick character and the slow ones after it.
 * Only regions that hold a slow character are taken apart, sorted and composed; the rest is copied,
 * and a text without slow characters is not even copied.
 *
 * A region can be as long as the text (a million accents in a row, from someone who wants to see
 * what happens), so the sort by combining class is linear for long runs. */
#include "engine/text/normalize.h"

#include "engine/text/unicode.h"
#include "engine/text/utf8.h"

#include <string.h>

enum {
    HANGUL_S = 0xac00,
    HANGUL_L = 0x1100,
    HANGUL_V = 0x1161,
    HANGUL_T = 0x11a7, /* one before the first trailing jamo: index 0 is "none" */
    HANGUL_LS = 19,
    HANGUL_VS = 21,
    HANGUL_TS = 28,
    HANGUL_SS = HANGUL_LS * HANGUL_VS * HANGUL_TS,
    EXPANSION = 4,           /* the longest decomposition, in code points */
    KEEP_BYTES = 256 * 1024, /* per buffer, between calls */
    CP_MASK = 0xffffff
};

static bool is_slow(const char *p, const char *end, unsigned *len)
{
    *len = 1;
    if ((unsigned char)*p < 0x80)
        return false;
    uint32_t cp = utf8_decode(p, end, len);
    return cp != UTF8_BAD && (unicode_class_of(cp) & UNICODE_NFC_SLOW);
}

static uint32_t *decompose_hangul(uint32_t cp, uint32_t *to)
{
    uint32_t s = cp - HANGUL_S, t = s % HANGUL_TS;
    *to++ = HANGUL_L + s / (HANGUL_VS * HANGUL_TS);
    *to++ = HANGUL_V + s % (HANGUL_VS * HANGUL_TS) / HANGUL_TS;
    if (t != 0)
        *to++ = HANGUL_T + t;
    return to;
}

/* Appends the full decomposition of cp, with combining classes. */
static uint32_t *decompose(uint32_t cp, uint32_t *to)
{
    if (cp - HANGUL_S < HANGUL_SS)
        return decompose_hangul(cp, to);
    uint32_t low = 0, high = unicode_n_decompositions;
    while (low < high) {
        uint32_t mid = (low + high) / 2;
        if (unicode_decompositions[mid].cp < cp)
            low = mid + 1;
        else
            high = mid;
    }
    const struct unicode_decomposition *d = &unicode_decompositions[low];
    if (low == unicode_n_decompositions || d->cp != cp) {
        *to++ = cp | unicode_combining_of(cp) << 24;
        return to;
    }
    for (unsigned i = 0; i < d->len; i++) {
        uint32_t part = unicode_decomposed_pool[d->at + i];
        *to++ = part | unicode_combining_of(part) << 24;
    }
    return to;
}

/* The composition of two code points, or 0. */
static uint32_t compose(uint32_t first, uint32_t second)
{
    if (first - HANGUL_L < HANGUL_LS && second - HANGUL_V < HANGUL_VS)
        return HANGUL_S + ((first - HANGUL_L) * HANGUL_VS + second - HANGUL_V) * HANGUL_TS;
    if (first - HANGUL_S < HANGUL_SS && (first - HANGUL_S) % HANGUL_TS == 0 &&
        second - (HANGUL_T + 1) < HANGUL_TS - 1)
        return first + second - HANGUL_T;
    uint32_t low = 0, high = unicode_n_compositions;
    while (low < high) {
        uint32_t mid = (low + high) / 2;
        const struct unicode_composition *c = &unicode_compositions[mid];
        if (c->first < first || (c->first == first && c->second < second))
            low = mid + 1;
        else
            high = mid;
    }
    const struct unicode_composition *c = &unicode_compositions[low];
    bool found = low < unicode_n_compositions && c->first == first && c->second == second;
    return found ? c->result : 0;
}

/* Sorts one run of marks by class, keeping equals in order. */
static void sort_marks(uint32_t *run, size_t n, uint32_t *temp)
{
    if (n <= 32) {
        for (size_t i = 1; i < n; i++) {
            uint32_t x = run[i];
            size_t at = i;
            for (; at > 0 && run[at - 1] >> 24 > x >> 24; at--)
                run[at] = run[at - 1];
            run[at] = x;
        }
        return;
    }
    size_t start[257] = {0};
    for (size_t i = 0; i < n; i++)
        start[(run[i] >> 24) + 1]++;
    for (size_t k = 1; k < 257; k++)
        start[k] += start[k - 1];
    for (size_t i = 0; i < n; i++)
        temp[start[run[i] >> 24]++] = run[i];
    memcpy(run, temp, n * sizeof *run);
}

static void sort_region(uint32_t *cps, size_t n, uint32_t *temp)
{
    for (size_t i = 0; i < n;) {
        size_t first = i;
        while (i < n && cps[i] >> 24 != 0)
            i++;
        if (i - first > 1)
            sort_marks(cps + first, i - first, temp);
        if (i == first)
            i++;
    }
}

/* UAX #15 D117: a mark joins the last starter unless something between them has the same class or a
 * higher one. Works in place and returns the new length. */
static size_t compose_region(uint32_t *cps, size_t n)
{
    size_t to = 0, starter = SIZE_MAX;
    uint32_t last_ccc = 0; /* of the last code point kept after the starter */
    for (size_t i = 0; i < n; i++) {
        uint32_t ccc = cps[i] >> 24;
        bool blocked = starter == SIZE_MAX || (to > starter + 1 && last_ccc >= ccc);
        uint32_t joined = blocked ? 0 : compose(cps[starter], cps[i] & CP_MASK);
        if (joined != 0) {
            cps[starter] = joined;
            continue;
        }
        if (ccc == 0)
            starter = to;
        last_ccc = ccc;
        cps[to++] = cps[i];
    }
    return to;
}

static status reserve(struct normalize_scratch *s, size_t text_bytes, size_t n_cps)
{
    if (s->text_room < text_bytes) {
        mem_free(s->text);
        s->text = mem_try_alloc(text_bytes);
        s->text_room = s->text == NULL ? 0 : text_bytes;
    }
    if (s->cps_room < n_cps) {
        mem_free(s->cps);
        mem_free(s->sorted);
        s->cps = mem_try_alloc(n_cps * sizeof *s->cps);
        s->sorted = mem_try_alloc(n_cps * sizeof *s->sorted);
        s->cps_room = s->cps == NULL || s->sorted == NULL ? 0 : n_cps;
    }
    if (s->text_room < text_bytes || s->cps_room < n_cps)
        return err(ERR_MEMORY, "no memory to normalise %zu bytes of text", text_bytes);
    return OK;
}

/* One region, p to end, of valid characters; writes its NFC to `to`. */
static char *normalize_region(struct normalize_scratch *s, const char *p, const char *end, char *to)
{
    uint32_t *at = s->cps;
    while (p < end) {
        unsigned len;
        at = decompose(utf8_decode(p, end, &len), at);
        p += len;
    }
    size_t n = (size_t)(at - s->cps);
    sort_region(s->cps, n, s->sorted);
    n = compose_region(s->cps, n);
    for (size_t i = 0; i < n; i++)
        to += utf8_encode(s->cps[i] & CP_MASK, to);
    return to;
}

/* The first slow character at or after p, or end. *before: the start of the character before it,
 * if that is at or after p, else the slow character itself. */
static const char *next_slow(const char *p, const char *end, const char **before)
{
    unsigned len;
    *before = p;
    for (; p < end; p += len) {
        if (is_slow(p, end, &len)) {
            if (utf8_decode(*before, end, &len) == UTF8_BAD)
                *before = p; /* not a character: nothing joins it */
            return p;
        }
        *before = p;
    }
    return end;
}

status normalize_nfc(struct normalize_scratch *s, struct text_view text, struct text_view *out)
{
    const char *p = text.p, *end = p + text.len, *region;
    *out = text;
    const char *slow = next_slow(p, end, &region);
    if (slow == end)
        return OK;
    /* NFC is at most three times as long in UTF-8 (U+1D160); a region holds a quick character and
     * the slow ones, of two bytes or more. */
    TRY(reserve(s, text.len * 3, (text.len / 2 + 1) * EXPANSION));
    char *to = s->text;
    while (slow < end) {
        memcpy(to, p, (size_t)(region - p));
        to += region - p;
        unsigned len;
        for (p = slow; p < end && is_slow(p, end, &len);)
            p += len;
        to = normalize_region(s, region, p, to);
        slow = next_slow(p, end, &region);
    }
    memcpy(to, p, (size_t)(end - p));
    to += end - p;
    *out = (struct text_view){s->text, (size_t)(to - s->text)};
    return OK;
}

void normalize_fini(struct normalize_scratch *s)
{
    mem_free(s->text);
    mem_free(s->cps);
    mem_free(s->sorted);
    *s = (struct normalize_scratch){0};
}

void normalize_trim(struct normalize_scratch *s)
{
    if (s->text_room > KEEP_BYTES || s->cps_room * sizeof *s->cps > KEEP_BYTES)
        normalize_fini(s);
}
