/* JSON that came from outside.
 *
 * json_open checks every byte of the text before anybody interprets it, and remembers where the
 * members of the outermost object are. Scalars are then read from their literal text, so that a
 * 64-bit seed keeps its bits; arrays of token ids are walked in place, so that a million ids need
 * no tree; whatever else has structure becomes a cJSON tree, one field at a time.
 *
 * Values borrow the text. Everything here may run on any thread. */
#ifndef API_JSON_H
#define API_JSON_H

#include "engine/text/tokenizer.h" /* text_view */
#include "kernels/base.h"

enum {
    JSON_MAX_DEPTH = 32,        /* arrays and objects inside each other */
    JSON_MAX_VALUES = 65536,    /* of any kind, numbers of id arrays not counted */
    JSON_MAX_NUMBER_BYTES = 32, /* a double needs 24 */
};

enum json_type {
    JSON_ABSENT,
    JSON_NULL,
    JSON_FALSE,
    JSON_TRUE,
    JSON_NUMBER,
    JSON_STRING,
    JSON_ARRAY,
    JSON_OBJECT
};

struct json_value {
    enum json_type type;
    const char *p; /* literal text, quotes and brackets included */
    size_t len;
};

struct json_member {
    struct text_view key; /* unescaped */
    struct json_value value;
};

struct json_doc {
    struct json_member *members; /* [n_members] of the outermost object, in the text's order */
    size_t n_members;
    struct arena keys; /* those whose spelling had escapes */
};

/* text[len] must be 0 and text outlives the doc. id_keys: NULL-terminated names of outermost
 * members whose arrays of numbers are not counted as values. ERR_PROTO: not what we accept, reason
 * in err_text; ERR_MEMORY. On failure nothing is held. */
status json_open(struct json_doc *d, const char *text, size_t len, const char *const *id_keys);
void json_close(struct json_doc *d);

enum json_verdict { INT_OK, INT_FRACTION, INT_BELOW, INT_ABOVE };
/* Exact value of a JSON_NUMBER that is a whole number in any spelling (16, 16.0, 1.6e1). BELOW and
 * ABOVE: outside int64. */
enum json_verdict json_int(const struct json_value *v, int64_t *out);
double json_double(const struct json_value *v); /* of a JSON_NUMBER; finite */
/* Unescaped text of a JSON_STRING, NUL-terminated, in the arena; p == NULL: arena full. */
struct text_view json_text(const struct json_value *v, struct arena *mem);
/* Unescaped equality with a literal. */
bool json_equals(const struct json_value *v, const char *s);

/* A walk through an array, in place. */
struct json_walk {
    const char *at;
};
struct json_walk json_enter(const struct json_value *array);
enum json_type json_peek(struct json_walk *w); /* of the next item; JSON_ABSENT: the end */
struct json_value json_take_number(struct json_walk *w); /* after JSON_NUMBER was seen */
/* After JSON_ARRAY was seen: an array without strings, arrays and objects in it; else false. */
bool json_take_list(struct json_walk *w, struct json_value *list);
size_t json_count_list(const struct json_value *list); /* items of such an array */

/* A tree of the value, to be freed with cJSON_Delete; NULL: no memory. */
struct cJSON;
struct cJSON *json_tree(const struct json_value *v);

#endif
