/* The four regular expressions, first alternative that matches wins, as in the originals:
 *
 *   gpt-2   's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
 *   smollm  every numeric character is a piece; gpt-2 on each stretch between them, alone
 *   llama-3 (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}
 *           | ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+
 *   qwen2   llama-3 with \p{N} in place of \p{N}{1,3}
 *
 * They look at characters only through their class, so a scanner reads one class per character:
 * ASCII from a table of 128, the rest from the Unicode tables. For smollm a numeric character has
 * class EDGE, the same as the end of the segment: no run crosses it and no look-ahead sees it. */
#include "engine/text/pretokenize.h"

#include "engine/text/unicode.h"
#include "engine/text/utf8.h"

#include <string.h>

enum kind { OTHER, LETTER, NUMBER, SPACE, NEWLINE, EDGE };

/* A character under the scanner: where it ends and what it is. EDGE with next = p: no more. */
struct look {
    const char *next;
    enum kind kind;
};

static const char ascii_classes[128] = {
    ['\t'] = SPACE,         ['\n'] = NEWLINE,       ['\v'] = SPACE,
    ['\f'] = SPACE,         ['\r'] = NEWLINE,       [' '] = SPACE,
    ['0' ... '9'] = NUMBER, ['A' ... 'Z'] = LETTER, ['a' ... 'z'] = LETTER,
};

static enum kind class_beyond_ascii(uint32_t cp, bool cut_numeric)
{
    if (cp == UTF8_BAD)
        return OTHER;
    unsigned bits = unicode_class_of(cp);
    if (cut_numeric && (bits & UNICODE_NUMERIC))
        return EDGE;
    if (bits & UNICODE_LETTER)
        return LETTER;
    if (bits & UNICODE_NUMBER)
        return NUMBER;
    return bits & UNICODE_SPACE ? SPACE : OTHER;
}

static inline struct look look_at(const char *p, const char *end, bool cut_numeric)
{
    if (p == end)
        return (struct look){p, EDGE};
    unsigned char byte = (unsigned char)*p;
    if (byte < 0x80) {
        enum kind kind = (enum kind)ascii_classes[byte];
        return (struct look){p + 1, cut_numeric && kind == NUMBER ? EDGE : kind};
    }
    unsigned len;
    uint32_t cp = utf8_decode(p, end, &len);
    return (struct look){p + len, class_beyond_ascii(cp, cut_numeric)};
}

/* The end of the run of `class` that starts at p (p itself: empty). */
static inline const char *run_of(enum kind kind, const char *p, const char *end, bool cut_numeric)
{
    for (;;) {
        struct look at = look_at(p, end, cut_numeric);
        if (at.kind != kind)
            return p;
        p = at.next;
    }
}

/* \s+(?!\S)|\s+ from p, where white space is: all of it at the edge, else all but the last one
 * (which may lead the next piece), but at least one. */
static const char *space_run(const char *p, const char *end, bool cut_numeric)
{
    const char *last = p;
    for (const char *at = p;;) {
        struct look l = look_at(at, end, cut_numeric);
        if (l.kind == EDGE)
            return at;
        if (l.kind != SPACE && l.kind != NEWLINE)
            return last == p ? at : last;
        last = at;
        at = l.next;
    }
}

/* 's|'t|'re|'ve|'m|'ll|'d at p, where an apostrophe is: bytes, or 0. */
static size_t contraction(const char *p, const char *end)
{
    static const char single[] = {'s', 't', 'm', 'd'};
    if (end - p >= 2 && memchr(single, p[1], sizeof single) != NULL)
        return 2;
    if (end - p < 3)
        return 0;
    return !memcmp(p + 1, "re", 2) || !memcmp(p + 1, "ve", 2) || !memcmp(p + 1, "ll", 2) ? 3 : 0;
}

/* The same ignoring case. Case folding makes U+017F, the long s, an s. */
static size_t contraction_any_case(const char *p, const char *end)
{
    char lower[3] = {'\''};
    size_t n = (size_t)(end - p) < 3 ? (size_t)(end - p) : 3;
    for (size_t i = 1; i < n; i++) {
        lower[i] = p[i];
        if (p[i] >= 'A' && p[i] <= 'Z')
            lower[i] = (char)(p[i] | 0x20);
    }
    if (n == 3 && !memcmp(p + 1, "\xc5\xbf", 2))
        return 3;
    return contraction(lower, lower + n);
}

static const char *next_gpt2(const char *p, const char *end, bool cut_numeric)
{
    if (*p == '\'') {
        size_t n = contraction(p, end);
        if (n > 0)
            return p + n;
    }
    struct look first = look_at(p, end, cut_numeric);
    if (first.kind == EDGE)
        return first.next; /* numeric: a piece of its own */
    if (first.kind != SPACE && first.kind != NEWLINE)
        return run_of(first.kind, first.next, end, cut_numeric);
    if (*p == ' ') {
        struct look second = look_at(p + 1, end, cut_numeric);
        if (second.kind == LETTER || second.kind == NUMBER || second.kind == OTHER)
            return run_of(second.kind, second.next, end, cut_numeric);
    }
    return space_run(p, end, cut_numeric);
}

/* \s*[\r\n]+ from p: up to and with the last newline of the white space, or NULL: it has none. */
static const char *last_newline(const char *p, const char *end)
{
    const char *found = NULL;
    for (;;) {
        struct look l = look_at(p, end, false);
        if (l.kind == NEWLINE)
            found = l.next;
        else if (l.kind != SPACE)
            return found;
        p = l.next;
    }
}

static const char *next_llama3(const char *p, const char *end, int max_digits)
{
    if (*p == '\'') {
        size_t n = contraction_any_case(p, end);
        if (n > 0)
            return p + n;
    }
    struct look first = look_at(p, end, false);
    if (first.kind == LETTER)
        return run_of(LETTER, first.next, end, false);
    if (first.kind == NUMBER) {
        for (int n = 1; n < max_digits; n++) {
            struct look more = look_at(first.next, end, false);
            if (more.kind != NUMBER)
                break;
            first = more;
        }
        return first.next;
    }
    struct look second = look_at(first.next, end, false);
    if (first.kind != NEWLINE && second.kind == LETTER)
        return run_of(LETTER, second.next, end, false);
    if (first.kind == OTHER || (*p == ' ' && second.kind == OTHER))
        return run_of(NEWLINE, run_of(OTHER, first.next, end, false), end, false);
    const char *newline = last_newline(p, end);
    return newline != NULL ? newline : space_run(p, end, false);
}

size_t pretokenize_next(enum pretokenizer which, const char *p, const char *end)
{
    const char *stop = NULL;
    switch (which) {
    case PRETOKENIZE_GPT2: stop = next_gpt2(p, end, false); break;
    case PRETOKENIZE_SMOLLM: stop = next_gpt2(p, end, true); break;
    case PRETOKENIZE_LLAMA3: stop = next_llama3(p, end, 3); break;
    case PRETOKENIZE_QWEN2: stop = next_llama3(p, end, 1); break;
    }
    CHECK(stop > p);
    return (size_t)(stop - p);
}

bool pretokenize_find(const char *name, enum pretokenizer *out)
{
    static const struct {
        const char *name;
        enum pretokenizer which;
    } names[] = {
        {"smollm", PRETOKENIZE_SMOLLM}, {"gpt-2", PRETOKENIZE_GPT2},
        {"gpt2", PRETOKENIZE_GPT2},     {"llama-bpe", PRETOKENIZE_LLAMA3},
        {"llama3", PRETOKENIZE_LLAMA3}, {"llama-v3", PRETOKENIZE_LLAMA3},
        {"qwen2", PRETOKENIZE_QWEN2},
    };
    for (size_t i = 0; i < ARRAY_LEN(names); i++) {
        if (strcmp(names[i].name, name) == 0) {
            *out = names[i].which;
            return true;
        }
    }
    return false;
}
