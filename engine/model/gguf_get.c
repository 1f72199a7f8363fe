/* Typed access to GGUF values. Writers disagree about widths (u32, u64, i32; f32, f64), so any integer
 * is taken for an integer and any float for a float, if it is in range. */
#include "engine/model/gguf.h"

#include <math.h>
#include <string.h>

static const char *type_name(enum gguf_type type)
{
    static const char *const names[] = {"u8",   "i8",     "u16",   "i16", "u32", "i32", "f32",
                                        "bool", "string", "array", "u64", "i64", "f64"};
    return names[type];
}

static size_t integer_bytes(enum gguf_type type) /* 0: not an integer */
{
    switch (type) {
    case GGUF_U8:
    case GGUF_I8: return 1;
    case GGUF_U16:
    case GGUF_I16: return 2;
    case GGUF_U32:
    case GGUF_I32: return 4;
    case GGUF_U64:
    case GGUF_I64: return 8;
    default: return 0;
    }
}

/* Little-endian bytes to a number; above i64 it saturates, as no range here reaches so far. */
static int64_t integer_at(enum gguf_type type, const unsigned char *p)
{
    bool is_signed = type == GGUF_I8 || type == GGUF_I16 || type == GGUF_I32 || type == GGUF_I64;
    size_t bytes = integer_bytes(type);
    uint64_t v = is_signed && p[bytes - 1] >= 0x80 ? UINT64_MAX : 0;
    for (size_t i = bytes; i-- > 0;)
        v = v << 8 | p[i];
    return !is_signed && v > INT64_MAX ? INT64_MAX : (int64_t)v;
}

static status missing(const struct gguf *g, const char *key)
{
    return err(ERR_FORMAT, "%s: key %s is missing", gguf_path(g), key);
}

static status get_u32(const struct gguf *g, const char *key, enum gguf_type type,
                      const unsigned char *p, uint32_t lo, uint32_t hi, uint32_t *out)
{
    if (integer_bytes(type) == 0)
        return gguf_refuse(g, p, "%s is of type %s, not an integer", key, type_name(type));
    int64_t v = integer_at(type, p);
    if (v < (int64_t)lo || v > (int64_t)hi)
        return gguf_refuse(g, p, "%s is %lld, allowed are %u to %u", key, (long long)v, lo, hi);
    *out = (uint32_t)v;
    return OK;
}

status gguf_u32(const struct gguf *g, const char *key, uint32_t lo, uint32_t hi, uint32_t *out)
{
    const struct gguf_value *v = gguf_find(g, key);
    return v == NULL ? missing(g, key) : get_u32(g, key, v->type, v->p, lo, hi, out);
}

status gguf_u32_or(const struct gguf *g, const char *key, uint32_t lo, uint32_t hi,
                   uint32_t fallback, uint32_t *out)
{
    *out = fallback;
    return gguf_find(g, key) == NULL ? OK : gguf_u32(g, key, lo, hi, out);
}

status gguf_u32_uniform(const struct gguf *g, const char *key, uint32_t n, uint32_t lo, uint32_t hi,
                        uint32_t *out)
{
    const struct gguf_value *v = gguf_find(g, key);
    if (v == NULL || v->type != GGUF_ARRAY)
        return gguf_u32(g, key, lo, hi, out);
    if (v->count != n || n == 0)
        return gguf_refuse(g, v->p, "%s has %llu elements, not %u", key,
                           (unsigned long long)v->count, n);
    TRY(get_u32(g, key, v->elem, v->p, lo, hi, out));
    for (uint32_t i = 1; i < n; i++) {
        uint32_t other = 0;
        const unsigned char *p = v->p + i * integer_bytes(v->elem);
        TRY(get_u32(g, key, v->elem, p, lo, hi, &other));
        if (other != *out)
            return gguf_refuse(g, p,
                               "%s differs between layers (%u and %u), which spind does not serve",
                               key, *out, other);
    }
    return OK;
}

status gguf_f32(const struct gguf *g, const char *key, double lo, double hi, float *out)
{
    const struct gguf_value *v = gguf_find(g, key);
    double x;
    if (v == NULL)
        return missing(g, key);
    if (v->type == GGUF_F32) {
        float f;
        memcpy(&f, v->p, sizeof f);
        x = (double)f;
    } else if (v->type == GGUF_F64) {
        memcpy(&x, v->p, sizeof x);
    } else {
        return gguf_refuse(g, v->p, "%s is of type %s, not a float", key, type_name(v->type));
    }
    if (!isfinite(x) || x < lo || x > hi)
        return gguf_refuse(g, v->p, "%s is %g, allowed are %g to %g", key, x, lo, hi);
    *out = (float)x;
    return OK;
}

status gguf_f32_or(const struct gguf *g, const char *key, double lo, double hi, float fallback,
                   float *out)
{
    *out = fallback;
    return gguf_find(g, key) == NULL ? OK : gguf_f32(g, key, lo, hi, out);
}

status gguf_bool_or(const struct gguf *g, const char *key, bool fallback, bool *out)
{
    const struct gguf_value *v = gguf_find(g, key);
    *out = fallback;
    if (v == NULL)
        return OK;
    if (v->type != GGUF_BOOL)
        return gguf_refuse(g, v->p, "%s is of type %s, not a boolean", key, type_name(v->type));
    *out = *v->p == 1;
    return OK;
}

status gguf_string(const struct gguf *g, const char *key, struct text_view *out)
{
    const struct gguf_value *v = gguf_find(g, key);
    if (v == NULL)
        return missing(g, key);
    if (v->type != GGUF_STRING)
        return gguf_refuse(g, v->p, "%s is of type %s, not a string", key, type_name(v->type));
    *out = (struct text_view){(const char *)v->p + sizeof(uint64_t), v->bytes - sizeof(uint64_t)};
    return OK;
}

status gguf_i32_array(const struct gguf *g, const char *key, const unsigned char **p,
                      uint64_t *count)
{
    const struct gguf_value *v = gguf_find(g, key);
    if (v == NULL)
        return missing(g, key);
    if (v->type != GGUF_ARRAY || (v->elem != GGUF_I32 && v->elem != GGUF_U32))
        return gguf_refuse(g, v->p, "%s is not an array of 32-bit integers", key);
    *p = v->p;
    *count = v->count;
    return OK;
}

int32_t gguf_i32_at(const unsigned char *p, uint64_t i)
{
    int32_t v;
    memcpy(&v, p + i * sizeof v, sizeof v);
    return v;
}

/* Length of the UTF-8 character at p, 0 if it is none. *code: its code point. */
static size_t utf8_char(const unsigned char *p, size_t len, uint32_t *code)
{
    static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    size_t n = p[0] < 0x80 ? 1 : p[0] >> 5 == 6 ? 2 : p[0] >> 4 == 14 ? 3 : p[0] >> 3 == 30 ? 4 : 0;
    if (n == 0 || n > len)
        return 0;
    *code = n == 1 ? p[0] : p[0] & (0x7fu >> n);
    for (size_t i = 1; i < n; i++) {
        if ((p[i] & 0xc0) != 0x80)
            return 0;
        *code = *code << 6 | (p[i] & 0x3f);
    }
    bool surrogate = *code >= 0xd800 && *code < 0xe000;
    return *code < least[n] || *code > 0x10ffff || surrogate ? 0 : n;
}

bool gguf_text_ok(struct text_view v, bool controls)
{
    const unsigned char *p = (const unsigned char *)v.p;
    for (size_t i = 0, n; i < v.len; i += n) {
        uint32_t code = 0;
        if ((n = utf8_char(p + i, v.len - i, &code)) == 0)
            return false;
        if (code == 0 || (!controls && (code < 0x20 || (code >= 0x7f && code < 0xa0))))
            return false;
    }
    return true;
}

void gguf_text_copy(char *dst, size_t room, struct text_view v)
{
    size_t n = v.len < room - 1 ? v.len : room - 1;
    while (n > 0 && n < v.len && ((unsigned char)v.p[n] & 0xc0) == 0x80)
        n--; /* not half a character */
    memcpy(dst, v.p, n);
    dst[n] = 0;
    if (!gguf_text_ok((struct text_view){dst, n}, false))
        for (size_t i = 0; i < n; i++)
            if ((unsigned char)dst[i] < 0x20 || (unsigned char)dst[i] >= 0x7f)
                dst[i] = '?';
}
