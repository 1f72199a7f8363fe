/* GGUF: the directory of a model file, checked once.
 *
 * The reader walks the file front to back with one cursor. Every read asks first whether the bytes are
 * left; no address is computed before its check. The directory (keys and tensor entries, 2 MB of the
 * default model) is copied before it is read, so that what was checked cannot change; values are kept
 * as views into the copy, tensors as views into the mapping. Keys and tensor names are found, and
 * duplicates refused, through lists of indices sorted by name: no hash that a file could be written
 * against, no quadratic search.
 *
 * The rules and the incidents behind them: reference/models.md 1.1 and 1.8. Typed access to values is
 * in gguf_get.c; what a model needs from them in llama.c and dictionary.c. */
#include "engine/model/gguf.h"
#include "engine/model/map.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    HEADER_BYTES = 24,
    MIN_PAIR = 8 + 1 + 4 + 1,     /* key length, a byte of key, type, a byte of value */
    MIN_INFO = 8 + 1 + 4 + 4 + 8, /* name length, a byte of name, dims, type, offset */
    MAX_ENTRIES = 65536,          /* of each kind; the largest models have a few thousand */
    MAX_KEY = 65535,              /* spec */
    MAX_NAME = 63,                /* spec: GGML_MAX_NAME less the NUL */
    MIN_ALIGN = 8,
    MAX_ALIGN = 1 << 16, /* spec: a multiple of 8 */
    SHOWN = 80,          /* bytes of a key in a message */
};

struct string_index {
    struct string_index *next;
    uint64_t offsets[];
};

struct gguf {
    struct map map; /* p NULL: over the caller's memory */
    const unsigned char *base;
    size_t len;
    unsigned char *copy;       /* of the directory; NULL: over the caller's memory */
    const unsigned char *head; /* the directory, as it is read: copy or base */
    size_t head_len;
    char *path;
    size_t n_values, n_tensors;
    struct gguf_value *values;   /* file order */
    struct gguf_tensor *tensors; /* file order */
    uint32_t *values_by_key;     /* indices, sorted */
    uint32_t *tensors_by_name;   /* indices, sorted */
    struct string_index *indices;
};

struct cursor {
    struct gguf *g;
    const unsigned char *p, *end;
};

static const uint8_t scalar_bytes[] = {
    [GGUF_U8] = 1,  [GGUF_I8] = 1,   [GGUF_U16] = 2, [GGUF_I16] = 2, [GGUF_U32] = 4, [GGUF_I32] = 4,
    [GGUF_F32] = 4, [GGUF_BOOL] = 1, [GGUF_U64] = 8, [GGUF_I64] = 8, [GGUF_F64] = 8,
};

status gguf_refuse(const struct gguf *g, const void *at, const char *fmt, ...)
{
    char text[512];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    size_t offset = (uintptr_t)at - (uintptr_t)g->head; /* wraps around if at is before head */
    if (offset > g->head_len)
        offset = (uintptr_t)at - (uintptr_t)g->base;
    return err(ERR_FORMAT, "%s: offset %zu: %s", g->path, offset, text);
}

static int shown(struct text_view v)
{
    return v.len < SHOWN ? (int)v.len : SHOWN;
}

static size_t left(const struct cursor *c)
{
    return (size_t)(c->end - c->p);
}

static status need(const struct cursor *c, uint64_t bytes, const char *what)
{
    if (bytes > left(c))
        return gguf_refuse(c->g, c->p, "%s of %llu bytes does not fit the %zu bytes left", what,
                           (unsigned long long)bytes, left(c));
    return OK;
}

static status take_u32(struct cursor *c, const char *what, uint32_t *out)
{
    TRY(need(c, sizeof *out, what));
    memcpy(out, c->p, sizeof *out);
    c->p += sizeof *out;
    return OK;
}

static status take_u64(struct cursor *c, const char *what, uint64_t *out)
{
    TRY(need(c, sizeof *out, what));
    memcpy(out, c->p, sizeof *out);
    c->p += sizeof *out;
    return OK;
}

static status take_string(struct cursor *c, const char *what, struct text_view *out)
{
    uint64_t len;
    TRY(take_u64(c, "the length of a string", &len));
    TRY(need(c, len, what));
    *out = (struct text_view){(const char *)c->p, (size_t)len};
    c->p += len;
    return OK;
}

/* Names end up in messages and logs: UTF-8 without control characters, so that no file can speak to
 * the terminal of whoever loads it. */
static status take_name(struct cursor *c, const char *what, size_t max, struct text_view *out)
{
    const unsigned char *at = c->p;
    TRY(take_string(c, what, out));
    if (out->len < 1 || out->len > max)
        return gguf_refuse(c->g, at, "%s of %zu bytes, allowed are 1 to %zu", what, out->len, max);
    if (!gguf_text_ok(*out, false))
        return gguf_refuse(c->g, at, "%s is not UTF-8 without control characters", what);
    return OK;
}

static status check_bools(const struct gguf *g, const unsigned char *p, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++)
        if (p[i] > 1)
            return gguf_refuse(g, p + i, "a boolean is 0 or 1, not %u", p[i]);
    return OK;
}

static status read_array(struct cursor *c, struct gguf_value *v)
{
    const unsigned char *at = c->p;
    uint32_t elem;
    TRY(take_u32(c, "the element type of an array", &elem));
    if (elem == GGUF_ARRAY)
        return gguf_refuse(c->g, at, "an array of arrays, which no model needs");
    if (elem > GGUF_F64)
        return gguf_refuse(c->g, at, "array of value type %u; 0 to 12 exist", elem);
    v->elem = (enum gguf_type)elem;
    TRY(take_u64(c, "the count of an array", &v->count));
    /* An empty string still has its length. */
    size_t least = elem == GGUF_STRING ? 8 : scalar_bytes[elem];
    if (v->count > left(c) / least)
        return gguf_refuse(c->g, at,
                           "array of %llu elements of %zu bytes does not fit the %zu bytes left",
                           (unsigned long long)v->count, least, left(c));
    v->p = c->p;
    if (elem != GGUF_STRING) {
        c->p += (size_t)v->count * least;
        return elem == GGUF_BOOL ? check_bools(c->g, v->p, v->count) : OK;
    }
    struct text_view element;
    for (uint64_t i = 0; i < v->count; i++)
        TRY(take_string(c, "a string of an array", &element));
    return OK;
}

static status read_pair(struct cursor *c, struct gguf_value *v)
{
    uint32_t type;
    struct text_view text;
    TRY(take_name(c, "a key", MAX_KEY, &v->key));
    const unsigned char *at = c->p;
    TRY(take_u32(c, "a value type", &type));
    if (type > GGUF_F64)
        return gguf_refuse(c->g, at, "%.*s has value type %u; 0 to 12 exist", shown(v->key),
                           v->key.p, type);
    v->type = (enum gguf_type)type;
    v->p = c->p;
    if (type == GGUF_ARRAY) {
        TRY(read_array(c, v));
    } else if (type == GGUF_STRING) {
        TRY(take_string(c, "a string", &text));
    } else {
        TRY(need(c, scalar_bytes[type], "a value"));
        c->p += scalar_bytes[type];
        if (type == GGUF_BOOL)
            TRY(check_bools(c->g, v->p, 1));
    }
    v->bytes = (size_t)(c->p - v->p);
    return OK;
}

static int compare_text(struct text_view a, struct text_view b)
{
    int order = memcmp(a.p, b.p, a.len < b.len ? a.len : b.len);
    return order != 0 ? order : (a.len > b.len) - (a.len < b.len);
}

/* Equal names stay in file order, so that the second one is blamed. */
static int compare_values(const void *a, const void *b, void *gguf)
{
    const struct gguf *g = gguf;
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    int order = compare_text(g->values[x].key, g->values[y].key);
    return order != 0 ? order : (x > y) - (x < y);
}

static int compare_tensors(const void *a, const void *b, void *gguf)
{
    const struct gguf *g = gguf;
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    int order = compare_text(g->tensors[x].name, g->tensors[y].name);
    return order != 0 ? order : (x > y) - (x < y);
}

static struct text_view nth_key(const struct gguf *g, size_t i)
{
    return g->values[g->values_by_key[i]].key;
}

static struct text_view nth_name(const struct gguf *g, size_t i)
{
    return g->tensors[g->tensors_by_name[i]].name;
}

static status read_pairs(struct cursor *c)
{
    struct gguf *g = c->g;
    g->values = mem_alloc(g->n_values * sizeof *g->values);
    g->values_by_key = mem_alloc(g->n_values * sizeof *g->values_by_key);
    for (size_t i = 0; i < g->n_values; i++) {
        TRY(read_pair(c, &g->values[i]));
        g->values_by_key[i] = (uint32_t)i;
    }
    qsort_r(g->values_by_key, g->n_values, sizeof *g->values_by_key, compare_values, g);
    for (size_t i = 1; i < g->n_values; i++) {
        struct text_view key = nth_key(g, i);
        if (compare_text(key, nth_key(g, i - 1)) == 0)
            return gguf_refuse(g, key.p, "key %.*s is there twice", shown(key), key.p);
    }
    return OK;
}

static const char *foreign_type(uint32_t id)
{
    static const char *const names[] = {
        [4] = "Q4_2",        [5] = "Q4_3",      [9] = "Q8_1",        [10] = "Q2_K",
        [11] = "Q3_K",       [13] = "Q5_K",     [15] = "Q8_K",       [16] = "IQ2_XXS",
        [17] = "IQ2_XS",     [18] = "IQ3_XXS",  [19] = "IQ1_S",      [20] = "IQ4_NL",
        [21] = "IQ3_S",      [22] = "IQ2_S",    [23] = "IQ4_XS",     [24] = "I8",
        [25] = "I16",        [26] = "I32",      [27] = "I64",        [28] = "F64",
        [29] = "IQ1_M",      [31] = "Q4_0_4_4", [32] = "Q4_0_4_8",   [33] = "Q4_0_8_8",
        [34] = "TQ1_0",      [35] = "TQ2_0",    [36] = "IQ4_NL_4_4", [37] = "IQ4_NL_4_8",
        [38] = "IQ4_NL_8_8", [39] = "MXFP4",    [40] = "NVFP4",      [41] = "Q1_0",
    };
    return id < ARRAY_LEN(names) && names[id] != NULL ? names[id] : "unknown";
}

/* Dimensions, type and size: nothing is multiplied unchecked. */
static status read_shape(struct cursor *c, struct gguf_tensor *t)
{
    const unsigned char *at = c->p;
    uint64_t n = 1, blocks;
    TRY(take_u32(c, "the number of dimensions", &t->n_dims));
    if (t->n_dims > ARRAY_LEN(t->ne))
        return gguf_refuse(c->g, at, "tensor %.*s has %u dimensions, allowed are 0 to 4",
                           (int)t->name.len, t->name.p, t->n_dims);
    for (uint32_t i = 0; i < ARRAY_LEN(t->ne); i++) {
        at = c->p;
        t->ne[i] = 1;
        if (i < t->n_dims)
            TRY(take_u64(c, "a dimension", &t->ne[i]));
        if (t->ne[i] < 1 || t->ne[i] > INT32_MAX || __builtin_mul_overflow(n, t->ne[i], &n))
            return gguf_refuse(c->g, at,
                               "tensor %.*s: dimension %u is %llu, allowed are 1 to 2^31 - 1 "
                               "and a product below 2^64",
                               (int)t->name.len, t->name.p, i, (unsigned long long)t->ne[i]);
    }
    at = c->p;
    uint32_t id;
    TRY(take_u32(c, "a tensor type", &id));
    const struct dtype_info *type = dtype_find(id);
    if (type == NULL)
        return gguf_refuse(c->g, at, "tensor %.*s has the unsupported tensor type %s (%u)",
                           (int)t->name.len, t->name.p, foreign_type(id), id);
    t->type = type->type;
    if (t->ne[0] % type->block != 0)
        return gguf_refuse(
            c->g, at, "tensor %.*s: rows of %llu numbers are not whole %s blocks of %u",
            (int)t->name.len, t->name.p, (unsigned long long)t->ne[0], type->name, type->block);
    blocks = n / type->block;
    if (__builtin_mul_overflow(blocks, (size_t)type->bytes, &t->bytes))
        return gguf_refuse(c->g, at, "tensor %.*s has more bytes than there are addresses",
                           (int)t->name.len, t->name.p);
    return OK;
}

/* Tensors lie in the order of the directory without holes: that alone rules out overlaps, aliases and
 * files with two readings. *next: where this one must start; then where the next one must. */
static status read_info(struct cursor *c, struct gguf_tensor *t, size_t align, size_t *next)
{
    t->info = c->p;
    TRY(take_name(c, "a tensor name", MAX_NAME, &t->name));
    TRY(read_shape(c, t));
    const unsigned char *at = c->p;
    uint64_t offset;
    TRY(take_u64(c, "a tensor offset", &offset));
    if (offset != *next)
        return gguf_refuse(c->g, at,
                           "tensor %.*s is at data offset %llu, but tensors follow each other "
                           "aligned to %zu, so it must be at %zu",
                           (int)t->name.len, t->name.p, (unsigned long long)offset, align, *next);
    size_t end;
    if (__builtin_add_overflow(*next, t->bytes, &end) ||
        __builtin_add_overflow(end, align - 1, next))
        return gguf_refuse(c->g, at, "tensor %.*s ends beyond 2^64", (int)t->name.len, t->name.p);
    *next &= ~(align - 1);
    return OK;
}

/* Offsets in the directory count from the first aligned byte after it, known only now. */
static status place_tensors(struct cursor *c, size_t align)
{
    struct gguf *g = c->g;
    size_t start = ((size_t)(c->p - g->head) + align - 1) & ~(align - 1), offset = 0;
    size_t data_bytes = start <= g->len ? g->len - start : 0;
    for (size_t i = 0; i < g->n_tensors; i++) {
        struct gguf_tensor *t = &g->tensors[i];
        /* The padding after the last tensor is missing in some files. */
        if (offset > data_bytes || t->bytes > data_bytes - offset)
            return gguf_refuse(g, t->info,
                               "tensor %.*s: its %zu bytes at data offset %zu do not fit the "
                               "%zu bytes of data: the file is not whole",
                               (int)t->name.len, t->name.p, t->bytes, offset, data_bytes);
        t->data = g->base + start + offset;
        offset = (offset + t->bytes + align - 1) & ~(align - 1); /* read_info checked the sum */
    }
    return OK;
}

static status read_tensors(struct cursor *c)
{
    struct gguf *g = c->g;
    uint32_t align;
    TRY(gguf_u32_or(g, "general.alignment", MIN_ALIGN, MAX_ALIGN, 32, &align));
    if ((align & (align - 1)) != 0)
        return gguf_refuse(g, gguf_find(g, "general.alignment")->p,
                           "general.alignment is %u, not a power of two", align);
    g->tensors = mem_alloc(g->n_tensors * sizeof *g->tensors);
    g->tensors_by_name = mem_alloc(g->n_tensors * sizeof *g->tensors_by_name);
    size_t next = 0;
    for (size_t i = 0; i < g->n_tensors; i++) {
        TRY(read_info(c, &g->tensors[i], align, &next));
        g->tensors_by_name[i] = (uint32_t)i;
    }
    qsort_r(g->tensors_by_name, g->n_tensors, sizeof *g->tensors_by_name, compare_tensors, g);
    for (size_t i = 1; i < g->n_tensors; i++) {
        const struct gguf_tensor *t = &g->tensors[g->tensors_by_name[i]];
        if (compare_text(t->name, nth_name(g, i - 1)) == 0)
            return gguf_refuse(g, t->info, "tensor %.*s is there twice", (int)t->name.len,
                               t->name.p);
    }
    return place_tensors(c, align);
}

static status read_count(struct cursor *c, const char *what, size_t least, size_t *out)
{
    const unsigned char *at = c->p;
    uint64_t n;
    TRY(take_u64(c, what, &n));
    size_t room = (size_t)(c->end - (c->g->head + HEADER_BYTES)) / least;
    if (n > MAX_ENTRIES || n > room)
        return gguf_refuse(c->g, at,
                           "%s is %llu, but the file has room for %zu and spind reads up to %d",
                           what, (unsigned long long)n, room, (int)MAX_ENTRIES);
    *out = (size_t)n;
    return OK;
}

static status read_header(struct cursor *c)
{
    static const unsigned char magic[4] = {'G', 'G', 'U', 'F'};
    TRY(need(c, HEADER_BYTES, "the header"));
    if (memcmp(c->p, magic, sizeof magic) != 0)
        return gguf_refuse(c->g, c->p,
                           "not a GGUF file: it starts with the bytes %02x %02x %02x %02x, "
                           "not with \"GGUF\"",
                           c->p[0], c->p[1], c->p[2], c->p[3]);
    c->p += sizeof magic;
    const unsigned char *at = c->p;
    uint32_t version;
    TRY(take_u32(c, "the version", &version));
    if ((version & 0xffff) == 0 && version != 0)
        return gguf_refuse(c->g, at,
                           "a big-endian file (version reads 0x%08x); spind reads little-endian "
                           "ones",
                           version);
    if (version == 1)
        return gguf_refuse(c->g, at,
                           "GGUF version 1 is obsolete; convert the model again to version 3");
    if (version != 2 && version != 3)
        return gguf_refuse(c->g, at, "GGUF version %u; spind reads 2 and 3", version);
    TRY(read_count(c, "the number of tensors", MIN_INFO, &c->g->n_tensors));
    return read_count(c, "the number of keys", MIN_PAIR, &c->g->n_values);
}

static status refuse_split(const struct gguf *g)
{
    uint32_t count;
    TRY(gguf_u32_or(g, "split.count", 0, UINT32_MAX, 1, &count));
    if (count > 1)
        return gguf_refuse(g, gguf_find(g, "split.count")->p,
                           "this is one of %u parts of a split model; join them into one file "
                           "(llama-gguf-split --merge)",
                           count);
    return OK;
}

static status read_all(struct gguf *g)
{
    struct cursor c = {.g = g, .p = g->head, .end = g->head + g->head_len};
    TRY(read_header(&c));
    TRY(read_pairs(&c));
    TRY(refuse_split(g));
    return read_tensors(&c);
}

/* How far the directory reaches, from one walk that keeps nothing. */
static status measure(struct gguf *g, size_t *bytes)
{
    struct cursor c = {.g = g, .p = g->head, .end = g->head + g->head_len};
    TRY(read_header(&c));
    for (size_t i = 0; i < g->n_values; i++) {
        struct gguf_value passing;
        TRY(read_pair(&c, &passing));
    }
    for (size_t i = 0; i < g->n_tensors; i++) {
        struct gguf_tensor passing = {.info = c.p};
        uint64_t offset;
        TRY(take_name(&c, "a tensor name", MAX_NAME, &passing.name));
        TRY(read_shape(&c, &passing));
        TRY(take_u64(&c, "a tensor offset", &offset));
    }
    *bytes = (size_t)(c.p - g->head);
    return OK;
}

/* What is checked once must stay as it was checked, whoever writes to the file meanwhile; so the
 * directory is read from a copy. Tensors stay in the mapping: any bytes are numbers. */
static status copy_directory(struct gguf *g)
{
    size_t bytes;
    TRY(measure(g, &bytes));
    if ((g->copy = mem_try_alloc(bytes)) == NULL)
        return err(ERR_MEMORY, "%s: no memory for a directory of %zu bytes", g->path, bytes);
    memcpy(g->copy, g->base, bytes);
    g->head = g->copy;
    g->head_len = bytes;
    return OK;
}

static status open_over(struct gguf **out, const struct map *map, const unsigned char *p,
                        size_t len, const char *name)
{
    CHECK(p != NULL);
    struct gguf *g = mem_alloc(sizeof *g);
    size_t room = strlen(name) + 1;
    g->map = *map;
    g->base = g->head = p;
    g->len = g->head_len = len;
    g->path = memcpy(mem_alloc(room), name, room);
    status st = map->p != NULL ? copy_directory(g) : OK;
    if (st == OK)
        st = read_all(g);
    if (map_torn(&g->map))
        st = gguf_whole(g); /* the better explanation */
    if (st != OK) {
        gguf_close(g);
        return st;
    }
    *out = g;
    return OK;
}

status gguf_open(struct gguf **out, const char *path)
{
    struct map map;
    TRY(map_open(&map, path, HEADER_BYTES));
    return open_over(out, &map, map.p, map.len, path);
}

status gguf_open_memory(struct gguf **out, const void *data, size_t len, const char *name)
{
    CHECK(((uintptr_t)data & 7) == 0);
    const struct map none = {0};
    return open_over(out, &none, data, len, name);
}

void gguf_close(struct gguf *g)
{
    if (g == NULL)
        return;
    for (struct string_index *i = g->indices, *next; i != NULL; i = next) {
        next = i->next;
        mem_free(i);
    }
    map_close(&g->map);
    mem_free(g->copy);
    mem_free(g->values);
    mem_free(g->tensors);
    mem_free(g->values_by_key);
    mem_free(g->tensors_by_name);
    mem_free(g->path);
    mem_free(g);
}

status gguf_whole(const struct gguf *g)
{
    if (map_torn(&g->map))
        return err(ERR_IO, "%s: the file was cut short while it was read (it had %zu bytes)",
                   g->path, g->len);
    return OK;
}

const char *gguf_path(const struct gguf *g)
{
    return g->path;
}

size_t gguf_file_bytes(const struct gguf *g)
{
    return g->len;
}

/* Place of a name in a sorted list, or SIZE_MAX. */
static size_t search(const struct gguf *g, const char *name, size_t n,
                     struct text_view (*nth)(const struct gguf *, size_t))
{
    struct text_view want = {name, strlen(name)};
    for (size_t lo = 0, hi = n; lo < hi;) {
        size_t mid = lo + (hi - lo) / 2;
        int order = compare_text(want, nth(g, mid));
        if (order == 0)
            return mid;
        if (order < 0)
            hi = mid;
        else
            lo = mid + 1;
    }
    return SIZE_MAX;
}

const struct gguf_value *gguf_find(const struct gguf *g, const char *key)
{
    size_t at = search(g, key, g->n_values, nth_key);
    return at == SIZE_MAX ? NULL : &g->values[g->values_by_key[at]];
}

const struct gguf_tensor *gguf_tensor_find(const struct gguf *g, const char *name)
{
    size_t at = search(g, name, g->n_tensors, nth_name);
    return at == SIZE_MAX ? NULL : &g->tensors[g->tensors_by_name[at]];
}

size_t gguf_n_tensors(const struct gguf *g)
{
    return g->n_tensors;
}

const struct gguf_tensor *gguf_tensor_at(const struct gguf *g, size_t i)
{
    CHECK(i < g->n_tensors);
    return &g->tensors[i];
}

status gguf_string_array(struct gguf *g, const char *key, struct gguf_strings *out)
{
    const struct gguf_value *v = gguf_find(g, key);
    if (v == NULL)
        return err(ERR_FORMAT, "%s: key %s is missing", g->path, key);
    if (v->type != GGUF_ARRAY || v->elem != GGUF_STRING)
        return gguf_refuse(g, v->p, "%s is not an array of strings", key);
    struct string_index *index =
        mem_try_alloc(sizeof *index + (v->count + 1) * sizeof index->offsets[0]);
    if (index == NULL)
        return err(ERR_MEMORY, "%s: no memory for the %llu strings of %s", g->path,
                   (unsigned long long)v->count, key);
    index->next = g->indices;
    g->indices = index;
    uint64_t at = 0, len;
    for (uint64_t i = 0; i < v->count; i++) { /* the lengths were checked by read_array */
        index->offsets[i] = at;
        memcpy(&len, v->p + at, sizeof len);
        at += sizeof len + len;
    }
    index->offsets[v->count] = at;
    *out = (struct gguf_strings){.count = v->count, .offsets = index->offsets, .p = v->p};
    return OK;
}

struct text_view gguf_string_at(const struct gguf_strings *s, uint64_t i)
{
    CHECK(i < s->count);
    size_t from = (size_t)s->offsets[i] + sizeof(uint64_t);
    return (struct text_view){(const char *)s->p + from, (size_t)s->offsets[i + 1] - from};
}
