/* GGUF v3: metadata and tensor directory, checked once, then lent as views; tensors lie in a read-only
 * mapping of the file.
 *
 * A file is a stranger: every length is compared with what is left before it is used, and every
 * refusal names the file, the offset and the rule (reference/models.md 1.1, 1.8). Nothing is
 * allocated per element. Constant after gguf_open, except for gguf_string_array. */
#ifndef ENGINE_MODEL_GGUF_H
#define ENGINE_MODEL_GGUF_H

#include "engine/text/tokenizer.h"
#include "kernels/dtype.h"

enum gguf_type {
    GGUF_U8,
    GGUF_I8,
    GGUF_U16,
    GGUF_I16,
    GGUF_U32,
    GGUF_I32,
    GGUF_F32,
    GGUF_BOOL,
    GGUF_STRING,
    GGUF_ARRAY,
    GGUF_U64,
    GGUF_I64,
    GGUF_F64
};

struct gguf_value {
    struct text_view key;
    enum gguf_type type; /* GGUF_ARRAY: elem and count are valid */
    enum gguf_type elem;
    uint64_t count; /* elements of an array */
    const unsigned char
        *p;       /* first byte of the value (a string's length; an array's first element) */
    size_t bytes; /* of the value from p on */
};

struct gguf_tensor {
    struct text_view name;
    enum dtype type;
    uint32_t n_dims;
    uint64_t ne[4]; /* fastest first: ne[0] input features */
    size_t bytes;
    const unsigned char *info; /* its directory entry: where refusals point */
    const void *data;          /* aligned to 8 bytes or more */
};

struct gguf;

status gguf_open(struct gguf **out, const char *path);
/* The same over memory (aligned to 8 bytes) that the caller keeps: tests and fuzzing. */
status gguf_open_memory(struct gguf **out, const void *data, size_t len, const char *name);
void gguf_close(struct gguf *g);
/* To be asked after the last byte was read: ERR_IO if the file was cut short meanwhile. */
status gguf_whole(const struct gguf *g);
/* "path: offset N: text" with ERR_FORMAT; at: inside the file. */
status gguf_refuse(const struct gguf *g, const void *at, const char *fmt, ...) PRINTF_LIKE(3, 4);
const char *gguf_path(const struct gguf *g);
size_t gguf_file_bytes(const struct gguf *g);

const struct gguf_value *gguf_find(const struct gguf *g, const char *key); /* NULL: absent */
const struct gguf_tensor *gguf_tensor_find(const struct gguf *g, const char *name);
size_t gguf_n_tensors(const struct gguf *g);
const struct gguf_tensor *gguf_tensor_at(const struct gguf *g, size_t i);

/* Typed getters. ERR_FORMAT with key and rule if the key is absent (and no fallback), of the wrong
 * type or out of [lo, hi]. Any integer type is taken for an integer, f32 and f64 for a float. */
status gguf_u32(const struct gguf *g, const char *key, uint32_t lo, uint32_t hi, uint32_t *out);
status gguf_u32_or(const struct gguf *g, const char *key, uint32_t lo, uint32_t hi,
                   uint32_t fallback, uint32_t *out);
/* Also takes an array of n equal integers: what some writers make of a per-layer number. */
status gguf_u32_uniform(const struct gguf *g, const char *key, uint32_t n, uint32_t lo, uint32_t hi,
                        uint32_t *out);
status gguf_f32(const struct gguf *g, const char *key, double lo, double hi, float *out);
status gguf_f32_or(const struct gguf *g, const char *key, double lo, double hi, float fallback,
                   float *out);
status gguf_bool_or(const struct gguf *g, const char *key, bool fallback, bool *out);
status gguf_string(const struct gguf *g, const char *key, struct text_view *out);
/* Element i of an array of strings: O(1) through an index made by gguf_string_array. */
struct gguf_strings {
    uint64_t count;
    const uint64_t
        *offsets; /* [count + 1], from p to each string's length field; owned by the gguf */
    const unsigned char *p;
};
status gguf_string_array(struct gguf *g, const char *key, struct gguf_strings *out);
struct text_view gguf_string_at(const struct gguf_strings *s, uint64_t i);
/* Array of i32 (or u32); elements lie anywhere, so they are fetched by gguf_i32_at. */
status gguf_i32_array(const struct gguf *g, const char *key, const unsigned char **p,
                      uint64_t *count);
int32_t gguf_i32_at(const unsigned char *p, uint64_t i);

/* Valid UTF-8 without NUL; controls: other control characters are allowed. */
bool gguf_text_ok(struct text_view v, bool controls);
/* A string of the file, for people: NUL-terminated, cut to room, what is not text shown as '?'. */
void gguf_text_copy(char *dst, size_t room, struct text_view v);

#endif
