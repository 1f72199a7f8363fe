/* Text that api/writer.c makes, and that it is what JSON readers read back. */
#include "api/writer.h"
#include "tests/tap.h"

#include <cjson/cJSON.h>
#include <math.h>

#define is_text(w, want, name)                                   \
    do {                                                         \
        if (!ok(strcmp((w)->p, (want)) == 0, "%s", name))        \
            printf("#   got %s\n#   want %s\n", (w)->p, (want)); \
    } while (0)

static void strings_are_escaped(void)
{
    struct writer w;
    writer_init(&w);
    write_string(&w, "a\"b\\c\b\f\n\r\t\0\x01\x1f\x7f/\xc3\xa9\xe2\x80\xa8", 20);
    is_text(&w, "\"a\\\"b\\\\c\\b\\f\\n\\r\\t\\u0000\\u0001\\u001f\x7f/\xc3\xa9\xe2\x80\xa8\"",
            "quotes, backslashes and controls, and nothing else");
    writer_reset(&w);
    write_string(&w, "", 0);
    is_text(&w, "\"\"", "an empty string");
    writer_fini(&w);
}

static void it_grows_without_bound_known_before(void)
{
    struct writer w;
    bool good = true;
    writer_init(&w);
    for (int i = 0; i < 20000; i++)
        write_format(&w, "%d,", i % 10);
    for (size_t i = 0; i < 40000; i += 2)
        good = good && w.p[i] == (char)('0' + i / 2 % 10) && w.p[i + 1] == ',';
    ok(good && w.len == 40000 && w.p[w.len] == '\0', "20,000 pieces in order");
    writer_reset(&w);
    write_format(&w, "%*d", 100000, 7);
    ok(w.len == 100000 && w.p[99999] == '7', "one piece larger than all before");
    writer_fini(&w);
}

static void numbers_are_exact(void)
{
    struct writer w;
    writer_init(&w);
    write_u64(&w, 0);
    write_bytes(&w, " ", 1);
    write_u64(&w, UINT64_MAX);
    is_text(&w, "0 18446744073709551615", "unsigned integers");
    uint32_t state = 1;
    int bad = 0;
    for (int i = 0; i < 200000; i++) {
        state = state * 1664525 + 1013904223;
        float v;
        uint32_t bits = state & 0xbfffffff; /* any but the hugest */
        memcpy(&v, &bits, sizeof v);
        if (!(v >= -9999.0f) || !isfinite(v))
            continue;
        writer_reset(&w);
        write_logprob(&w, v);
        bad += strtof(w.p, NULL) != v || strpbrk(w.p, ".e") == NULL;
    }
    ok(bad == 0, "log-probabilities read back as the same float32");
    writer_fini(&w);
}

static void log_probabilities_are_always_json(void)
{
    static const struct {
        float v;
        const char *text;
    } cases[] = {{-INFINITY, "-9999.0"}, {NAN, "-9999.0"},   {INFINITY, "-9999.0"},
                 {-1e30f, "-9999.0"},    {-9999, "-9999.0"}, {0, "0.0"},
                 {-1, "-1.0"},           {-1.25f, "-1.25"},  {-0.1f, "-0.100000001"}};
    struct writer w;
    writer_init(&w);
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        writer_reset(&w);
        write_logprob(&w, cases[i].v);
        is_text(&w, cases[i].text, cases[i].text);
    }
    writer_fini(&w);
}

static void cjson_reads_every_byte_back(void)
{
    struct writer w;
    char all[128];
    writer_init(&w);
    for (int i = 1; i < 128; i++)
        all[i - 1] = (char)i;
    write_string(&w, all, 127);
    cJSON *tree = cJSON_Parse(w.p);
    ok(cJSON_IsString(tree) && memcmp(tree->valuestring, all, 127) == 0, "all of ASCII");
    cJSON_Delete(tree);
    writer_fini(&w);
}

int main(void)
{
    strings_are_escaped();
    it_grows_without_bound_known_before();
    numbers_are_exact();
    log_probabilities_are_always_json();
    cjson_reads_every_byte_back();
    return tap_done();
}
