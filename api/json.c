/* The guard in front of cJSON, and readers of literal text.
 *
 * cJSON alone accepts bad UTF-8, raw control bytes, \u0000 (which cuts a C string), duplicate keys,
 * 01, 1e999 and trailing bytes, and spends 41 bytes of memory per byte of "[1,1,...]"
 * (reference/reliability.md 0.3). So one pass over the bytes checks the grammar of RFC 8259 strictly
 * and counts. It keeps an explicit stack, so depth costs no C stack; it holds the keys of the open
 * objects in one array and looks for duplicates when an object closes, by pairs when they are few,
 * sorted when they are many: O(n log n) whatever the input.
 *
 * What follows the guard may rely on the grammar: no reader below checks it again. */
#include "api/json.h"
#include "engine/text/utf8.h"

#include <cjson/cJSON.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { FEW_KEYS = 8, MAX_KEYS_BYTES = 64 << 20 };

struct frame {
    bool object, ids; /* ids: numbers in here are not counted */
    size_t first_key; /* index into guard.keys */
};

struct guard {
    const char *text, *at, *end;
    const char *const *id_keys;
    struct json_doc *doc;
    struct text_view *keys; /* of all open objects, outermost first */
    size_t n_keys, room_keys, room_members, n_values;
    struct frame stack[JSON_MAX_DEPTH];
    unsigned depth;
};

static status broken(const struct guard *g, const char *what)
{
    return err(ERR_PROTO, "%s at byte %zu", what, (size_t)(g->at - g->text));
}

static void skip_blanks(const char **at)
{
    while (**at == ' ' || **at == '\n' || **at == '\r' || **at == '\t')
        (*at)++;
}

/* ---- strings ---- */

/* Eight bytes of which none ends or changes a string: printable ASCII but quote and backslash. */
static bool eight_plain(const char *p)
{
    const uint64_t ones = 0x0101010101010101u, tops = 0x8080808080808080u;
    uint64_t v;
    memcpy(&v, p, 8);
    uint64_t quote = v ^ ones * '"', slash = v ^ ones * '\\';
    uint64_t hit = ((v - ones * 0x20) & ~v) | ((quote - ones) & ~quote) | ((slash - ones) & ~slash);
    return ((hit | v) & tops) == 0;
}

static int hex_digit(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    if (c >= 'a' && c <= 'f')
        return c - 'a' + 10;
    return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

/* Four hexadecimal digits at p (never past the text's final NUL), or -1. */
static int32_t hex4(const char *p)
{
    int32_t v = 0;
    for (int i = 0; i < 4; i++) {
        int d = hex_digit(p[i]);
        if (d < 0)
            return -1;
        v = v * 16 + d;
    }
    return v;
}

/* g->at is on a backslash. */
static status check_escape(struct guard *g)
{
    const char *p = g->at + 1;
    if (*p != 'u') {
        if (*p == '\0' || strchr("\"\\/bfnrt", *p) == NULL)
            return broken(g, "a string has an unknown escape");
        g->at = p + 1;
        return OK;
    }
    int32_t c = hex4(p + 1);
    if (c < 0)
        return broken(g, "a string has a broken \\u escape");
    if (c == 0)
        return broken(g, "a string has the character U+0000");
    if (c >= 0xdc00 && c <= 0xdfff)
        return broken(g, "a string has half of a surrogate pair");
    p += 5;
    if (c >= 0xd800 && c <= 0xdbff) {
        int32_t low = p[0] == '\\' && p[1] == 'u' ? hex4(p + 2) : -1;
        if (low < 0xdc00 || low > 0xdfff)
            return broken(g, "a string has half of a surrogate pair");
        p += 6;
    }
    g->at = p;
    return OK;
}

/* g->at is on the opening quote; leaves it behind the closing one. */
static status check_string(struct guard *g, bool *escaped)
{
    *escaped = false;
    for (g->at++;;) {
        while (g->end - g->at >= 8 && eight_plain(g->at))
            g->at += 8;
        unsigned char c = (unsigned char)*g->at;
        if (c == '"') {
            g->at++;
            return OK;
        }
        if (c == '\\') {
            *escaped = true;
            TRY(check_escape(g));
        } else if (c < 0x20) {
            return broken(g, g->at == g->end ? "the text ends inside a string"
                                             : "a string has a raw control byte");
        } else if (c < 0x80) {
            g->at++;
        } else {
            unsigned n;
            if (utf8_decode(g->at, g->end, &n) == UTF8_BAD)
                return broken(g, "the text is not UTF-8");
            g->at += n;
        }
    }
}

/* p is on a backslash of a checked string. Writes the character, at most 4 bytes, and returns
 * where the text goes on. */
static const char *unescape_one(const char *p, char *out, size_t *n)
{
    static const char from[] = "bfnrt", to[] = "\b\f\n\r\t";
    *n = 1;
    if (p[1] != 'u') {
        const char *known = strchr(from, p[1]);
        *out = p[1];
        if (known != NULL)
            *out = to[known - from];
        return p + 2;
    }
    uint32_t c = (uint32_t)hex4(p + 2);
    p += 6;
    if (c >= 0xd800 && c <= 0xdbff) {
        c = 0x10000 + ((c - 0xd800) << 10) + ((uint32_t)hex4(p + 2) - 0xdc00);
        p += 6;
    }
    *n = utf8_encode(c, out);
    return p;
}

/* A checked string with its quotes -> text; out has room for len bytes. */
static size_t unescape(const char *p, size_t len, char *out)
{
    const char *end = p + len - 1;
    size_t n = 0;
    for (p++; p < end;) {
        const char *slash = memchr(p, '\\', (size_t)(end - p));
        size_t plain = (size_t)((slash ? slash : end) - p);
        memcpy(out + n, p, plain);
        n += plain;
        p += plain;
        if (slash != NULL) {
            size_t wrote;
            p = unescape_one(p, out + n, &wrote);
            n += wrote;
        }
    }
    return n;
}

/* ---- the other values ---- */

static bool digit(char c)
{
    return c >= '0' && c <= '9';
}

static status check_number(struct guard *g)
{
    const char *p = g->at;
    bool exponent = false;
    if (*p == '-')
        p++;
    if (!digit(*p) || (*p == '0' && digit(p[1])))
        return broken(g, "a number is malformed");
    while (digit(*p))
        p++;
    if (*p == '.') {
        if (!digit(*++p))
            return broken(g, "a number is malformed");
        while (digit(*p))
            p++;
    }
    if (*p == 'e' || *p == 'E') {
        exponent = true;
        p += p[1] == '+' || p[1] == '-' ? 2 : 1;
        if (!digit(*p))
            return broken(g, "a number is malformed");
        while (digit(*p))
            p++;
    }
    if (p - g->at > JSON_MAX_NUMBER_BYTES)
        return broken(g, "a number has too many digits");
    /* Without an exponent, 32 digits are always finite. */
    if (exponent && !isfinite(strtod(g->at, NULL)))
        return broken(g, "a number is too large");
    g->at = p;
    return OK;
}

static status check_word(struct guard *g, const char *word)
{
    size_t n = strlen(word);
    if (strncmp(g->at, word, n) != 0)
        return broken(g, "a value is expected");
    g->at += n;
    return OK;
}

static enum json_type type_at(const char *p)
{
    switch (*p) {
    case '"': return JSON_STRING;
    case '[': return JSON_ARRAY;
    case '{': return JSON_OBJECT;
    case 'n': return JSON_NULL;
    case 't': return JSON_TRUE;
    case 'f': return JSON_FALSE;
    case ']': return JSON_ABSENT;
    default: return JSON_NUMBER;
    }
}

static status check_scalar(struct guard *g, enum json_type type)
{
    bool escaped;
    switch (type) {
    case JSON_STRING: return check_string(g, &escaped);
    case JSON_NULL: return check_word(g, "null");
    case JSON_TRUE: return check_word(g, "true");
    case JSON_FALSE: return check_word(g, "false");
    default: break;
    }
    if (*g->at != '-' && !digit(*g->at))
        return broken(g, g->at == g->end ? "the text ends early" : "a value is expected");
    return check_number(g);
}

/* ---- keys ---- */

static int compare_keys(const void *a, const void *b)
{
    const struct text_view *x = a, *y = b;
    if (x->len != y->len)
        return x->len < y->len ? -1 : 1;
    return memcmp(x->p, y->p, x->len);
}

static status check_duplicates(struct guard *g, size_t first)
{
    size_t n = g->n_keys - first;
    if (n < 2)
        return OK;
    struct text_view *k = g->keys + first;
    if (n > FEW_KEYS)
        qsort(k, n, sizeof *k, compare_keys);
    for (size_t i = 1; i < n; i++)
        for (size_t j = n > FEW_KEYS ? i - 1 : 0; j < i; j++)
            if (compare_keys(&k[i], &k[j]) == 0)
                return broken(g, "an object names a key twice");
    return OK;
}

/* old, or a larger copy of it, with room for one more; NULL: no memory, old is still there. */
static void *grow(void *old, size_t n, size_t *room, size_t size)
{
    if (n < *room)
        return old;
    size_t more = *room ? *room * 2 : 32;
    void *bigger = realloc(old, more * size);
    if (bigger != NULL)
        *room = more;
    return bigger;
}

static status add_key(struct guard *g, struct text_view key)
{
    struct text_view *keys = grow(g->keys, g->n_keys, &g->room_keys, sizeof *keys);
    if (keys == NULL)
        return err(ERR_MEMORY, "no memory for keys");
    g->keys = keys;
    g->keys[g->n_keys++] = key;
    return OK;
}

/* The value begins at g->at; its end is not known yet. */
static status add_member(struct guard *g, struct text_view key)
{
    struct json_doc *d = g->doc;
    struct json_member *members = grow(d->members, d->n_members, &g->room_members, sizeof *members);
    if (members == NULL)
        return err(ERR_MEMORY, "no memory for members");
    d->members = members;
    d->members[d->n_members++] = (struct json_member){key, {type_at(g->at), g->at, 0}};
    return OK;
}

/* A key, its colon and the blanks around it. */
static status check_key(struct guard *g)
{
    bool escaped;
    const char *start = g->at;
    if (*start != '"')
        return broken(g, g->at == g->end ? "the text ends early" : "a key is expected");
    TRY(check_string(g, &escaped));
    struct text_view key = {start + 1, (size_t)(g->at - start) - 2};
    if (escaped) {
        char *plain = arena_alloc(&g->doc->keys, key.len + 2, 1, 1);
        if (plain == NULL)
            return err(ERR_MEMORY, "no memory for keys");
        key = (struct text_view){plain, unescape(start, key.len + 2, plain)};
    }
    TRY(add_key(g, key));
    skip_blanks(&g->at);
    if (*g->at != ':')
        return broken(g, "a colon is expected");
    g->at++;
    skip_blanks(&g->at);
    return g->depth > 1 ? OK : add_member(g, key);
}

/* ---- the walk ---- */

static bool is_id_key(const struct guard *g, struct text_view key)
{
    for (const char *const *k = g->id_keys; k != NULL && *k != NULL; k++)
        if (strlen(*k) == key.len && memcmp(*k, key.p, key.len) == 0)
            return true;
    return false;
}

static status open_frame(struct guard *g, bool object)
{
    if (g->depth == JSON_MAX_DEPTH)
        return err(ERR_PROTO, "values are nested deeper than %d at byte %zu", JSON_MAX_DEPTH,
                   (size_t)(g->at - g->text));
    struct frame *f = &g->stack[g->depth];
    *f = (struct frame){.object = object, .first_key = g->n_keys};
    if (!object && g->depth == 1) {
        CHECK(g->keys != NULL); /* a member has a key */
        f->ids = is_id_key(g, g->keys[g->n_keys - 1]);
    } else if (!object && g->depth > 1) {
        f->ids = g->stack[g->depth - 1].ids;
    }
    g->depth++;
    g->at++;
    skip_blanks(&g->at);
    return OK;
}

static status close_frame(struct guard *g)
{
    struct frame *f = &g->stack[g->depth - 1];
    if (f->object) {
        TRY(check_duplicates(g, f->first_key));
        g->n_keys = f->first_key;
    }
    g->depth--;
    g->at++;
    return OK;
}

/* After a value: closes what ends here and stands on the next value; depth 0: all is read. */
static status to_next_value(struct guard *g)
{
    for (;;) {
        if (g->depth == 1) { /* a member of the outermost object is complete */
            struct json_value *v = &g->doc->members[g->doc->n_members - 1].value;
            v->len = (size_t)(g->at - v->p);
        }
        skip_blanks(&g->at);
        const struct frame *f = &g->stack[g->depth - 1];
        if (*g->at == ',') {
            g->at++;
            skip_blanks(&g->at);
            return f->object ? check_key(g) : OK;
        }
        if (*g->at != (f->object ? '}' : ']'))
            return broken(g, g->at == g->end ? "the text ends early" : "a comma is expected");
        TRY(close_frame(g));
        if (g->depth == 0)
            return OK;
    }
}

static status count_value(struct guard *g, enum json_type type)
{
    if (type == JSON_NUMBER && g->stack[g->depth - 1].ids)
        return OK;
    if (++g->n_values > JSON_MAX_VALUES)
        return err(ERR_PROTO, "more than %d values", JSON_MAX_VALUES);
    return OK;
}

static status check_object(struct guard *g)
{
    TRY(open_frame(g, true));
    if (*g->at == '}')
        return close_frame(g);
    TRY(check_key(g));
    while (g->depth > 0) {
        enum json_type type = type_at(g->at);
        TRY(count_value(g, type));
        if (type != JSON_ARRAY && type != JSON_OBJECT) {
            TRY(check_scalar(g, type));
            TRY(to_next_value(g));
            continue;
        }
        TRY(open_frame(g, type == JSON_OBJECT));
        if (*g->at == (type == JSON_OBJECT ? '}' : ']')) {
            TRY(close_frame(g));
            TRY(to_next_value(g));
        } else if (type == JSON_OBJECT) {
            TRY(check_key(g));
        }
    }
    return OK;
}

status json_open(struct json_doc *d, const char *text, size_t len, const char *const *id_keys)
{
    struct guard g = {.text = text, .at = text, .end = text + len, .id_keys = id_keys, .doc = d};
    CHECK(text[len] == '\0');
    *d = (struct json_doc){0};
    arena_init(&d->keys, 4096, MAX_KEYS_BYTES);
    skip_blanks(&g.at);
    status st = OK;
    if (*g.at != '{')
        st = broken(&g, g.at == g.end ? "the body is empty" : "the body is not a JSON object");
    if (st == OK)
        st = check_object(&g);
    if (st == OK) {
        skip_blanks(&g.at);
        if (g.at != g.end)
            st = broken(&g, "something follows the object");
    }
    free(g.keys);
    if (st != OK)
        json_close(d);
    return st;
}

void json_close(struct json_doc *d)
{
    free(d->members);
    arena_fini(&d->keys);
    *d = (struct json_doc){0};
}

/* ---- readers ---- */

/* Most numbers are token ids: a few digits and nothing else. */
static bool short_int(const struct json_value *v, int64_t *out)
{
    int64_t n = 0;
    if (v->len > 18)
        return false;
    for (size_t i = 0; i < v->len; i++) {
        if (!digit(v->p[i]))
            return false;
        n = n * 10 + (v->p[i] - '0');
    }
    *out = n;
    return true;
}

/* digits * 10^exponent, with trailing zeros moved into the exponent. */
enum json_verdict json_int(const struct json_value *v, int64_t *out)
{
    if (short_int(v, out))
        return INT_OK;
    char digits[JSON_MAX_NUMBER_BYTES];
    const char *p = v->p, *end = v->p + v->len;
    bool negative = *p == '-', fraction = false;
    int n = 0;
    long exponent = 0;
    for (p += negative; p < end && *p != 'e' && *p != 'E'; p++) {
        fraction = fraction || *p == '.';
        if (*p == '.' || (n == 0 && *p == '0' && !fraction))
            continue;
        digits[n++] = *p;
        exponent -= fraction;
    }
    if (p < end) {
        long e =
            strtol(p + 1, NULL, 10); /* saturates; no number of 32 bytes needs more than this */
        exponent += e > 1000 ? 1000 : e < -1000 ? -1000 : e;
    }
    while (n > 0 && digits[n - 1] == '0') {
        n--;
        exponent++;
    }
    if (n == 0) {
        *out = 0;
        return INT_OK;
    }
    if (exponent < 0)
        return INT_FRACTION;
    uint64_t u = 0, most = negative ? (uint64_t)INT64_MAX + 1 : INT64_MAX;
    for (long i = 0; i < n + exponent; i++) {
        unsigned next = i < n ? (unsigned)(digits[i] - '0') : 0;
        if (u > (most - next) / 10)
            return negative ? INT_BELOW : INT_ABOVE;
        u = u * 10 + next;
    }
    *out = negative ? (int64_t)(0 - u) : (int64_t)u;
    return INT_OK;
}

double json_double(const struct json_value *v)
{
    return strtod(v->p, NULL);
}

struct text_view json_text(const struct json_value *v, struct arena *mem)
{
    char *out = arena_alloc(mem, v->len, 1, 1); /* two quotes less, a NUL more */
    if (out == NULL)
        return (struct text_view){0};
    return (struct text_view){out, unescape(v->p, v->len, out)};
}

bool json_equals(const struct json_value *v, const char *s)
{
    if (v->type != JSON_STRING)
        return false;
    const char *p = v->p + 1, *end = v->p + v->len - 1;
    size_t len = strlen(s), at = 0;
    while (p < end) {
        char c[4];
        size_t n = 1;
        c[0] = *p;
        p = *p == '\\' ? unescape_one(p, c, &n) : p + 1;
        if (n > len - at || memcmp(c, s + at, n) != 0)
            return false;
        at += n;
    }
    return at == len;
}

struct json_walk json_enter(const struct json_value *array)
{
    return (struct json_walk){array->p + 1};
}

enum json_type json_peek(struct json_walk *w)
{
    while (*w->at == ',' || *w->at == ' ' || *w->at == '\n' || *w->at == '\r' || *w->at == '\t')
        w->at++;
    return type_at(w->at);
}

struct json_value json_take_number(struct json_walk *w)
{
    const char *start = w->at;
    while (digit(*w->at) || *w->at == '-' || *w->at == '+' || *w->at == '.' || *w->at == 'e' ||
           *w->at == 'E')
        w->at++;
    return (struct json_value){JSON_NUMBER, start, (size_t)(w->at - start)};
}

bool json_take_list(struct json_walk *w, struct json_value *list)
{
    size_t len = strcspn(w->at + 1, "[]{\"") + 1;
    if (w->at[len] != ']')
        return false;
    *list = (struct json_value){JSON_ARRAY, w->at, len + 1};
    w->at += len + 1;
    return true;
}

size_t json_count_list(const struct json_value *list)
{
    struct json_walk w = json_enter(list);
    if (json_peek(&w) == JSON_ABSENT)
        return 0;
    size_t n = 1;
    const char *end = list->p + list->len, *p = list->p;
    while ((p = memchr(p, ',', (size_t)(end - p))) != NULL) {
        n++;
        p++;
    }
    return n;
}

cJSON *json_tree(const struct json_value *v)
{
    return cJSON_ParseWithLengthOpts(v->p, v->len, NULL, 0);
}
