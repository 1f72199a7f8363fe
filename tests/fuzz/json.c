/* Any bytes as a body. What the guard accepts, cJSON must accept too, member by member and whole;
 * the readers must stay inside the text; and reading what our writer wrote must give it back. */
#include "api/json.h"

#include "api/writer.h"

#include <cjson/cJSON.h>
#include <string.h>

static const char *const id_keys[] = {"prompt", "tokens", NULL};

static void read_string(const struct json_value *v, const cJSON *tree)
{
    struct arena mem;
    struct writer w;
    arena_init(&mem, 256, SIZE_MAX / 2);
    struct text_view s = json_text(v, &mem);
    CHECK(s.p != NULL && strlen(s.p) == s.len && strcmp(s.p, tree->valuestring) == 0);
    CHECK(json_equals(v, s.p));
    writer_init(&w);
    write_string(&w, s.p, s.len);
    struct json_value again = {JSON_STRING, w.p, w.len};
    CHECK(json_equals(&again, s.p));
    writer_fini(&w);
    arena_fini(&mem);
}

static void read_list(const struct json_value *v)
{
    struct json_walk w = json_enter(v);
    size_t n = 0, most = json_count_list(v);
    for (enum json_type type; (type = json_peek(&w)) == JSON_NUMBER; n++) {
        int64_t id;
        struct json_value item = json_take_number(&w);
        CHECK(item.len > 0 && n < most);
        json_int(&item, &id);
    }
}

static void read_array(const struct json_value *v)
{
    struct json_walk w = json_enter(v);
    struct json_value list;
    while (json_peek(&w) == JSON_ARRAY && json_take_list(&w, &list))
        read_list(&list);
    read_list(v);
}

static void read_value(const struct json_value *v)
{
    int64_t n;
    if (v->type == JSON_ARRAY && v->len > 65536) /* ids: no tree of them is ever made */
        return;
    cJSON *tree = json_tree(v);
    CHECK(tree != NULL);
    switch (v->type) {
    case JSON_STRING: read_string(v, tree); break;
    case JSON_ARRAY: read_array(v); break;
    case JSON_NUMBER:
        CHECK(json_double(v) == tree->valuedouble);
        if (json_int(v, &n) == INT_OK && n < 1 << 30 && n > -(1 << 30))
            CHECK((double)n == tree->valuedouble);
        break;
    default: break;
    }
    cJSON_Delete(tree);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len)
{
    struct json_doc d;
    char *copy = mem_alloc(len + 1); /* ends where its memory ends */
    memcpy(copy, data, len);
    if (json_open(&d, copy, len, id_keys) == OK) {
        cJSON *whole = cJSON_ParseWithLengthOpts(copy, len + 1, NULL, 1);
        CHECK(whole != NULL);
        CHECK((size_t)cJSON_GetArraySize(whole) == d.n_members);
        cJSON_Delete(whole);
        for (size_t i = 0; i < d.n_members; i++)
            read_value(&d.members[i].value);
        json_close(&d);
    }
    mem_free(copy);
    return 0;
}
