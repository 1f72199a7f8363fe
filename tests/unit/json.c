/* The guard in front of cJSON: rows B1 to B7 of reference/reliability.md 1.2, and the readers. */
#include "api/json.h"
#include "tests/tap.h"

#include <cjson/cJSON.h>
#include <sys/resource.h>
#include <time.h>

static const char *const id_keys[] = {"prompt", "tokens", NULL};

/* The guard's verdict on a copy that ends where its memory ends. */
static status check_bytes(const char *text, size_t len)
{
    struct json_doc d;
    char *copy = mem_alloc(len + 1);
    memcpy(copy, text, len);
    status st = json_open(&d, copy, len, id_keys);
    if (st == OK)
        json_close(&d);
    mem_free(copy);
    return st;
}

static status check(const char *text)
{
    return check_bytes(text, strlen(text));
}

static void what_is_json_is_accepted(void)
{
    static const char *const good[] = {
        "{}",
        " \t\r\n{ } \n",
        "{\"a\":1}",
        "{\"a\":[],\"b\":{},\"c\":[[],{}],\"d\":\"\"}",
        "{\"a\":[1,2,[3]],\"b\":{\"a\":1,\"b\":{\"a\":2}}}",
        "{\"n\":[0,-0,1.5,-1e3,1E+2,0.1e-7,12345678901234567890123456789012]}",
        "{\"w\":[true,false,null]}",
        "{\"s\":\"\\\"\\\\\\/\\b\\f\\n\\r\\t\\u0041\\ud83d\\ude00\x7f\"}",
        "{\"\xc3\xa9\":\"\xe2\x82\xac \xf0\x9f\x98\x80\"}",
        "{\"\":0,\"a\":0,\"A\":0,\"\\u0062\":0}",
    };
    for (size_t i = 0; i < ARRAY_LEN(good); i++)
        if (!ok(check(good[i]) == OK, "accepted: %zu", i))
            printf("# %s: %s\n", good[i], err_text());
}

static void what_is_not_json_is_refused(void)
{
    static const char *const bad[] = {
        "",
        " ",
        "[]",
        "\"x\"",
        "null",
        "5",
        "{",
        "}",
        "{}}",
        "{} x",
        "{}{}",
        "\xef\xbb\xbf{}",
        "{\"a\"}",
        "{\"a\":}",
        "{\"a\":1,}",
        "{,}",
        "{\"a\":1 \"b\":2}",
        "{\"1\":1,",
        "{\"a\":[1,]}",
        "{\"a\":[,1]}",
        "{\"a\":[1 2]}",
        "{\"a\":[1}",
        "{\"a\":{1]}",
        "{a:1}",
        "{'a':1}",
        "{\"a\":tru}",
        "{\"a\":True}",
        "{\"a\":nul",
        "{\"a\":NaN}",
        "{\"a\":Infinity}",
        "{\"a\":-}",
        "{\"a\":01}",
        "{\"a\":-01}",
        "{\"a\":1.}",
        "{\"a\":.5}",
        "{\"a\":+1}",
        "{\"a\":1e}",
        "{\"a\":1e+}",
        "{\"a\":0x10}",
        "{\"a\":1e999}",
        "{\"a\":-1e999}",
        "{\"a\":123456789012345678901234567890123}",
        "{\"a\":\"",
        "{\"a\":\"\\",
        "{\"a\":\"\\u",
        "{\"a\":\"\\u12",
        "{\"a\":\"\\x41\"}",
        "{\"a\":\"\\u00g0\"}",
        "{\"a\":\"\\u0000\"}",
        "{\"a\\u0000\":1}",
        "{\"a\":\"\\ud800\"}",
        "{\"a\":\"\\udc00\"}",
        "{\"a\":\"\\ud800\\u0041\"}",
        "{\"a\":\"\\ud800\\ud800\"}",
        "{\"a\":\"\n\"}",
        "{\"a\":\"\x01\"}",
        "{\"a\":\"\xff\xfe\"}",
        "{\"a\":\"\xc0\xaf\"}",
        "{\"a\":\"\xed\xa0\x80\"}",
        "{\"a\":\"\xf4\x90\x80\x80\"}",
        "{\"a\":\"\xe2\x82\"}",
        "{\"a\":\"\x80\"}",
        "{\"\xff\":1}",
        "{\"a\":1}//",
        "{\"a\":1,\"a\":2}",
        "{\"a\":1,\"\\u0061\":2}",
        "{\"x\":{\"n\":1,\"m\":2,\"n\":3}}",
        "{\"x\":[{\"\":1,\"\":2}]}",
    };
    for (size_t i = 0; i < ARRAY_LEN(bad); i++)
        ok(check(bad[i]) == ERR_PROTO, "refused: %s", err_text());
    ok(check_bytes("{\"a\":\"x\0y\"}", 11) == ERR_PROTO, "a raw NUL in a string");
    ok(check_bytes("{\"a\":1}\0", 8) == ERR_PROTO, "a raw NUL after the object");
    ok(check_bytes("{\0}", 3) == ERR_PROTO, "a raw NUL between");
}

/* `open` n times, then `close` n times, inside {"a": }. */
static status nested(int n)
{
    char *text = mem_alloc((size_t)n * 2 + 16);
    size_t at = (size_t)sprintf(text, "{\"a\":");
    memset(text + at, '[', (size_t)n);
    memset(text + at + n, ']', (size_t)n);
    text[at + (size_t)n * 2] = '}';
    status st = check(text);
    mem_free(text);
    return st;
}

static void depth_ends_at_32(void)
{
    ok(nested(31) == OK, "an object and 31 arrays in it are accepted");
    ok(nested(32) == ERR_PROTO, "an object and 32 are not");
    ok(nested(100000) == ERR_PROTO, "100,000 are not, and cost no stack");
}

/* {"KEY":[item,item,...]} */
static char *repeat(const char *key, const char *item, size_t n)
{
    size_t len = strlen(item), at;
    char *text = mem_alloc(strlen(key) + (len + 1) * n + 16);
    at = (size_t)sprintf(text, "{\"%s\":[", key);
    for (size_t i = 0; i < n; i++) {
        memcpy(text + at, item, len);
        at += len;
        text[at++] = i + 1 < n ? ',' : ']';
    }
    strcpy(text + at, "}");
    return text;
}

static void values_end_at_65536(void)
{
    char *most = repeat("a", "1", JSON_MAX_VALUES - 1), *over = repeat("a", "1", JSON_MAX_VALUES);
    char *ids = repeat("prompt", "100", 1000000), *lists = repeat("prompt", "[1,2,3]", 60000);
    ok(check(most) == OK, "65,536 values with the array itself");
    ok(check(over) == ERR_PROTO, "one more is refused");
    ok(check(ids) == OK, "a million ids in `prompt` are not counted");
    ok(check(lists) == OK, "nor those in lists of ids");
    mem_free(most);
    mem_free(over);
    mem_free(ids);
    mem_free(lists);
    char *strings = repeat("prompt", "\"x\"", JSON_MAX_VALUES);
    ok(check(strings) == ERR_PROTO, "strings in `prompt` are");
    mem_free(strings);
}

/* Of processor time, best of three: the machine may be busy. */
static double seconds_for(const char *text, status want)
{
    clock_t best = 0;
    for (int i = 0; i < 3; i++) {
        clock_t start = clock();
        status st = check(text);
        clock_t took = clock() - start;
        if (st != want)
            printf("# %s\n", err_text());
        CHECK(st == want);
        best = i == 0 || took < best ? took : best;
    }
    return (double)best / CLOCKS_PER_SEC;
}

/* n different keys that share their first `shared` bytes. */
static char *many_keys(int n, int shared)
{
    char *text = mem_alloc((size_t)n * (size_t)(shared + 24) + 16);
    size_t at = (size_t)sprintf(text, "{");
    for (int i = 0; i < n; i++)
        at += (size_t)sprintf(text + at, "%s\"%0*d\":1", i ? "," : "", shared + 7, i);
    strcpy(text + at, "}");
    return text;
}

static void nothing_is_slow_or_large(void)
{
    char *values = repeat("messages", "1", 2000000);
    double t = seconds_for(values, ERR_PROTO);
    ok(t < 0.02 || TAP_SANITIZED, "4 MB of values are refused in %.2f ms, below 20", t * 1e3);
    mem_free(values);
    char *keys = many_keys(60000, 0), *wide = many_keys(6000, 600);
    t = seconds_for(keys, OK); /* by pairs: seconds */
    ok(t < 0.25, "60,000 keys take %.2f ms", t * 1e3);
    t = seconds_for(wide, OK);
    ok(t < 0.25, "6,000 keys that differ in their last bytes take %.2f ms", t * 1e3);
    mem_free(keys);
    mem_free(wide);
    char *objects = repeat("m", "{\"role\":\"user\",\"content\":\"x\"}", 20000);
    t = seconds_for(objects, OK);
    ok(t < 0.1, "20,000 messages take %.2f ms", t * 1e3);
    mem_free(objects);
    struct rusage use;
    getrusage(RUSAGE_SELF, &use);
    ok(use.ru_maxrss < 192 * 1024 || TAP_SANITIZED, "the process held at most %ld KiB",
       use.ru_maxrss);
}

/* ---- readers ---- */

static struct json_value first_value(struct json_doc *d, const char *text)
{
    CHECK(json_open(d, text, strlen(text), id_keys) == OK);
    return d->members[0].value;
}

static void whole_numbers_are_exact(void)
{
    static const struct {
        const char *text;
        enum json_verdict verdict;
        int64_t v;
    } cases[] = {
        {"0", INT_OK, 0},
        {"-0", INT_OK, 0},
        {"16", INT_OK, 16},
        {"16.0", INT_OK, 16},
        {"1.6e1", INT_OK, 16},
        {"1600e-2", INT_OK, 16},
        {"0.016E+3", INT_OK, 16},
        {"0.0", INT_OK, 0},
        {"0e99999999999999999999", INT_OK, 0},
        {"0.0e-99999999999999999999", INT_OK, 0},
        {"1.0e-99999999999999999999", INT_FRACTION, 0},
        {"1e18", INT_OK, 1000000000000000000},
        {"9223372036854775807", INT_OK, INT64_MAX},
        {"9223372036854775807.0", INT_OK, INT64_MAX},
        {"9223372036854775808", INT_ABOVE, 0},
        {"-9223372036854775808", INT_OK, INT64_MIN},
        {"-9223372036854775809", INT_BELOW, 0},
        {"18446744073709551616", INT_ABOVE, 0},
        {"4294967297", INT_OK, 4294967297},
        {"1e300", INT_ABOVE, 0},
        {"-1e300", INT_BELOW, 0},
        {"1.9", INT_FRACTION, 0},
        {"1e-1", INT_FRACTION, 0},
        {"9007199254740993", INT_OK, 9007199254740993},
        {"9007199254740993.0", INT_OK, 9007199254740993},
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        char text[64];
        struct json_doc d;
        int64_t v = 0;
        sprintf(text, "{\"a\":%s}", cases[i].text);
        struct json_value j = first_value(&d, text);
        enum json_verdict got = json_int(&j, &v);
        ok(got == cases[i].verdict && (got != INT_OK || v == cases[i].v), "%s is read exactly",
           cases[i].text);
        json_close(&d);
    }
}

static void strings_are_unescaped(void)
{
    struct json_doc d;
    struct arena mem;
    arena_init(&mem, 1024, 1 << 20);
    struct json_value v =
        first_value(&d, "{\"\\u0061b\":\"a\\n\\\"\\u00e9\\u20ac\\ud83d\\ude00\\/z\"}");
    struct text_view s = json_text(&v, &mem);
    ok(s.p != NULL && strcmp(s.p, "a\n\"\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80/z") == 0 &&
           s.len == strlen(s.p),
       "every escape");
    ok(d.members[0].key.len == 2 && memcmp(d.members[0].key.p, "ab", 2) == 0, "keys, too");
    ok(json_equals(&v, "a\n\"\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80/z"), "equality unescapes");
    ok(!json_equals(&v, "a\n") && !json_equals(&v, "") && !json_equals(&v, "a\n\"\xc3\xa9x"),
       "and sees differences");
    json_close(&d);
    arena_fini(&mem);
}

static void ids_are_walked_in_place(void)
{
    struct json_doc d;
    struct json_value list, v = first_value(&d, "{\"prompt\":[ [1, 2.0 ,3] , [] ,[4]]}");
    struct json_walk w = json_enter(&v);
    int64_t sum = 0, id;
    size_t n = 0, lists = 0;
    for (; json_peek(&w) == JSON_ARRAY; lists++) {
        CHECK(json_take_list(&w, &list));
        n += json_count_list(&list);
        struct json_walk in = json_enter(&list);
        while (json_peek(&in) == JSON_NUMBER) {
            struct json_value item = json_take_number(&in);
            CHECK(json_int(&item, &id) == INT_OK);
            sum = sum * 10 + id;
        }
    }
    ok(lists == 3 && n == 4 && sum == 1234 && json_peek(&w) == JSON_ABSENT, "lists of ids");
    json_close(&d);
    v = first_value(&d, "{\"prompt\":[[1,\"]\"],[[2]],[{}]]}");
    w = json_enter(&v);
    ok(json_peek(&w) == JSON_ARRAY && !json_take_list(&w, &list), "a list with a string is none");
    json_close(&d);
}

static void trees_hold_a_field_alone(void)
{
    struct json_doc d;
    struct json_value v = first_value(&d, "{\"a\" : {\"b\":[1,\"x\"]} , \"c\":2}");
    cJSON *tree = json_tree(&v);
    const cJSON *b = cJSON_GetObjectItemCaseSensitive(tree, "b");
    ok(cJSON_IsArray(b) && cJSON_IsString(b->child->next), "the tree of one member");
    ok(d.n_members == 2 && d.members[1].value.type == JSON_NUMBER && d.members[1].value.len == 1,
       "the other member is beside it");
    cJSON_Delete(tree);
    json_close(&d);
}

int main(void)
{
    what_is_json_is_accepted();
    what_is_not_json_is_refused();
    depth_ends_at_32();
    values_end_at_65536();
    nothing_is_slow_or_large();
    whole_numbers_are_exact();
    strings_are_unescaped();
    ids_are_walked_in_place();
    trees_hold_a_field_alone();
    return tap_done();
}
