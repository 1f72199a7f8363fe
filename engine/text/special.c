/* Few tokens, rare first bytes: a table of 256 says where to look closer, then the sorted list is
 * narrowed one byte at a time. No automaton to build, and the rule "longest" falls out of the order.
 * The length of a token is bounded so that a hostile file cannot make every position expensive. */
#include "engine/text/special.h"

#include <stdlib.h>

enum { SPECIAL_BYTES_MAX = 1024 };

static int compare(const void *a, const void *b)
{
    const struct special *x = a, *y = b;
    size_t n = x->text.len < y->text.len ? x->text.len : y->text.len;
    int c = memcmp(x->text.p, y->text.p, n);
    return c != 0 ? c : (x->text.len > y->text.len) - (x->text.len < y->text.len);
}

status special_init(struct special_set *set, const struct tokens *v)
{
    *set = (struct special_set){0};
    for (uint32_t i = 0; i < v->n; i++)
        set->n += tokens_is_control(v, i) || v->types[i] == TOKEN_USER_DEFINED;
    set->all = mem_alloc(set->n * sizeof *set->all);
    struct special *to = set->all;
    for (uint32_t i = 0; i < v->n; i++) {
        bool control = tokens_is_control(v, i);
        if (!control && v->types[i] != TOKEN_USER_DEFINED)
            continue;
        *to = (struct special){tokens_bytes(v, i), i, control};
        set->starts[1][(unsigned char)to->text.p[0]] = true;
        set->starts[0][(unsigned char)to->text.p[0]] |= !control;
        to++;
    }
    if (set->n > 0)
        qsort(set->all, set->n, sizeof *set->all, compare);
    status st = OK;
    for (uint32_t i = 0; i < set->n && st == OK; i++) {
        if (set->all[i].text.len > SPECIAL_BYTES_MAX)
            st = err(ERR_FORMAT, "token %u: a special token of more than %d bytes", set->all[i].id,
                     SPECIAL_BYTES_MAX);
        else if (i > 0 && compare(&set->all[i - 1], &set->all[i]) == 0)
            st = err(ERR_FORMAT, "special tokens %u and %u are the same", set->all[i - 1].id,
                     set->all[i].id);
    }
    if (st != OK)
        special_fini(set);
    return st;
}

void special_fini(struct special_set *set)
{
    mem_free(set->all);
    *set = (struct special_set){0};
}

/* The first of all[low..high) whose byte number k is at least `byte`; every one has k bytes. */
static uint32_t lower_bound(const struct special_set *set, uint32_t low, uint32_t high, size_t k,
                            unsigned byte)
{
    while (low < high) {
        uint32_t mid = low + (high - low) / 2;
        const struct text_view *t = &set->all[mid].text;
        if (t->len <= k || (unsigned char)t->p[k] < byte)
            low = mid + 1;
        else
            high = mid;
    }
    return low;
}

/* The longest token at text; control tokens of at most `trusted` bytes count. */
static const struct special *match_here(const struct special_set *set, struct text_view text,
                                        size_t trusted)
{
    const struct special *best = NULL;
    uint32_t low = 0, high = set->n;
    for (size_t k = 0; k < text.len; k++) {
        unsigned byte = (unsigned char)text.p[k];
        low = lower_bound(set, low, high, k, byte);
        high = lower_bound(set, low, high, k, byte + 1);
        if (low == high)
            break;
        const struct special *s = &set->all[low];
        if (s->text.len == k + 1 && (!s->control || k + 1 <= trusted))
            best = s;
    }
    return best;
}

struct special_match special_next(const struct special_set *set, struct text_view text, size_t from,
                                  const struct special_span *spans, size_t n_spans)
{
    for (size_t at = from; at < text.len; at++) {
        while (n_spans > 0 && spans->to <= at) {
            spans++;
            n_spans--;
        }
        bool trusted = n_spans > 0 && spans->from <= at;
        if (!set->starts[trusted][(unsigned char)text.p[at]])
            continue;
        const struct special *s = match_here(set, (struct text_view){text.p + at, text.len - at},
                                             trusted ? spans->to - at : 0);
        if (s != NULL)
            return (struct special_match){at, s->text.len, s->id};
    }
    return (struct special_match){text.len, 0, TOKEN_NONE};
}

uint32_t special_find(const struct special_set *set, struct text_view text)
{
    struct special key = {.text = text};
    const struct special *s =
        set->n == 0 ? NULL : bsearch(&key, set->all, set->n, sizeof key, compare);
    return s == NULL ? TOKEN_NONE : s->id;
}
