/* Tenants below the wire: what their file may say, what a minute holds, whose key is whose, and numbers
 * that stay across reloads. The clock is made up. */
#include "api/internal.h"
#include "api/new_key.h"
#include "tests/tap.h"

#include <sys/stat.h>
#include <unistd.h>

struct exchange {
    const char *key; /* X-Api-Key */
};

struct text_view exchange_header(const struct exchange *x, const char *name)
{
    const char *v = strcmp(name, "x-api-key") == 0 ? x->key : NULL;
    return (struct text_view){v, v ? strlen(v) : 0};
}

#define MINUTE     60000000ull
#define TIMES_8(c) c c c c c c c c
#define SHA(c)     TIMES_8(TIMES_8(c))

/* ---- the file ---- */

static const char *file_error(const char *text)
{
    static char why[512];
    struct tenants *t;
    if (tenants_parse(&t, "f.json", text, strlen(text)) == OK) {
        tenants_free(t);
        return "";
    }
    snprintf(why, sizeof why, "%s", err_text());
    return why;
}

/* One tenant named "a" with these members more. */
static const char *member_error(const char *members)
{
    char text[2048];
    snprintf(text, sizeof text, "{\"tenants\": [{\"name\": \"a\", %s}]}", members);
    return file_error(text);
}

static void what_is_wrong_is_said_exactly(void)
{
    static const struct {
        const char *members, *why;
    } cases[] = {
        {"\"colour\": 1", "f.json: tenant \"a\": unknown key \"colour\""},
        {"\"weight\": 0", "f.json: tenant \"a\": weight: must be a number over 0 and at most 1000"},
        {"\"weight\": 1000.5",
         "f.json: tenant \"a\": weight: must be a number over 0 and at most 1000"},
        {"\"weight\": 1e-60",
         "f.json: tenant \"a\": weight: must be a number over 0 and at most 1000"},
        {"\"weight\": \"2\"",
         "f.json: tenant \"a\": weight: must be a number over 0 and at most 1000"},
        {"\"priority\": 3",
         "f.json: tenant \"a\": priority: must be two whole numbers, the smaller first: [0, 10]"},
        {"\"priority\": [2, 1]",
         "f.json: tenant \"a\": priority: must be two whole numbers, the smaller first: [0, 10]"},
        {"\"priority\": [0, 1, 2]",
         "f.json: tenant \"a\": priority: must be two whole numbers, the smaller first: [0, 10]"},
        {"\"max_running\": 0",
         "f.json: tenant \"a\": max_running: must be a whole number from 1 to 1073741823"},
        {"\"max_queued\": 1.5",
         "f.json: tenant \"a\": max_queued: must be a whole number from 1 to 1073741823"},
        {"\"requests_per_minute\": -1",
         "f.json: tenant \"a\": requests_per_minute: must be a whole "
         "number from 1 to 1125899906842624"},
        {"\"max_kv_hbm\": \"20GB\"",
         "f.json: tenant \"a\": max_kv_hbm: must be a number of bytes, 1 "
         "or more, such as \"20GiB\""},
        {"\"max_kv_dram\": \"99999999999999999999TiB\"",
         "f.json: tenant \"a\": max_kv_dram: must be a number of bytes, 1 or more, such as "
         "\"20GiB\""},
        {"\"keys\": {}", "f.json: tenant \"a\": keys: must be a list"},
        {"\"keys\": [5]", "f.json: tenant \"a\": keys[0]: must be an object with id and sha256"},
        {"\"keys\": [{\"id\": \"k 1\"}]",
         "f.json: tenant \"a\": keys[0]: id: must be 1 to 32 of A-Z, a-z, 0-9, _ and -"},
        {"\"keys\": [{\"id\": \"k\", \"key\": \"sk-x\"}]",
         "f.json: tenant \"a\": keys[0]: unknown key \"key\""},
        {"\"keys\": [{\"id\": \"k\", \"sha256\": \"12\"}]",
         "f.json: tenant \"a\": key \"k\": sha256: must be 64 hexadecimal digits, the SHA-256 of "
         "the "
         "key"},
        {"\"keys\": [{\"id\": \"k\", \"sha256\": \"" SHA("g") "\"}]",
         "f.json: tenant \"a\": key \"k\": sha256: must be 64 hexadecimal digits, the SHA-256 of "
         "the "
         "key"},
        {"\"keys\": [{\"id\": \"k\", \"sha256\": \"" SHA("0") "\", \"expires\": \"2027-02-30\"}]",
         "f.json: tenant \"a\": key \"k\": expires: must be YYYY-MM-DD or YYYY-MM-DDThh:mm:ssZ"},
        {"\"keys\": [{\"id\": \"k\", \"sha256\": \"" SHA("0") "\", \"expires\": 2027}]",
         "f.json: tenant \"a\": key \"k\": expires: must be YYYY-MM-DD or YYYY-MM-DDThh:mm:ssZ"},
        {"\"keys\": [{\"id\": \"k\", \"sha256\": \"" SHA("0") "\"}, {\"id\": \"k\", \"sha256\": "
                                                              "\"" SHA("1") "\"}]",
         "f.json: tenant \"a\": key id \"k\" is there twice"},
        {"\"keys\": [{\"id\": \"k\", \"sha256\": \"" SHA("a") "\"}, {\"id\": \"l\", \"sha256\": "
                                                              "\"" SHA("A") "\"}]",
         NULL},
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        const char *got = member_error(cases[i].members);
        bool good = cases[i].why != NULL ? strcmp(got, cases[i].why) == 0
                                         : strstr(got, "its sha256 is another key's, too") != NULL;
        if (!ok(good, "refused: %.60s", cases[i].members))
            printf("# got: %s\n", got);
    }
}

static void a_file_is_tenants_and_nothing_else(void)
{
    static const struct {
        const char *text, *why;
    } cases[] = {
        {"", "f.json: cannot be read as JSON: "},
        {"{\"tenants\": [}", "f.json: cannot be read as JSON: "},
        {"{\"tenants\": [{\"name\": \"a\", \"name\": \"b\"}]}", "f.json: cannot be read as JSON: "},
        {"{}", "f.json: tenants: must be there, a list"},
        {"{\"tenants\": []}", "f.json: tenants: there is none"},
        {"{\"tenants\": {}}", "f.json: tenants: must be a list"},
        {"{\"tenants\": [], \"x\": 1}", "f.json: unknown key \"x\""},
        {"{\"tenants\": [7]}", "f.json: tenant 1: must be an object"},
        {"{\"tenants\": [{\"name\": \"a\"}, {}]}",
         "f.json: tenant 2: name: must be 1 to 32 of a-z, 0-9, _ and -"},
        {"{\"tenants\": [{\"name\": \"A\"}]}",
         "f.json: tenant 1: name: must be 1 to 32 of a-z, 0-9, _ and -"},
        {"{\"tenants\": [{\"name\": \"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\"}]}",
         "f.json: tenant 1: name: must be 1 to 32 of a-z, 0-9, _ and -"},
        {"{\"tenants\": [{\"name\": \"a\"}, {\"name\": \"a\"}]}",
         "f.json: tenant \"a\" is there twice"},
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        const char *got = file_error(cases[i].text);
        if (!ok(strncmp(got, cases[i].why, strlen(cases[i].why)) == 0, "refused: %.60s",
                cases[i].text))
            printf("# got: %s\n", got);
    }
    char *many = mem_alloc(64 << 10), *p = many + sprintf(many, "{\"tenants\": [");
    for (int i = 0; i <= TENANTS_MAX; i++)
        p += sprintf(p, "%s{\"name\": \"t%d\"}", i > 0 ? "," : "", i);
    strcpy(p, "]}");
    ok(strcmp(file_error(many), "f.json: tenants: 1001 are too many: at most 1000") == 0,
       "a thousand and one tenants are refused");
    strcpy(strrchr(many, ','), "]}");
    ok(file_error(many)[0] == '\0', "a thousand are not");
    mem_free(many);
}

static void a_full_file_is_read_as_it_stands(void)
{
    static const char text[] =
        "{\"tenants\": [{\"name\": \"research\", \"keys\": [{\"id\": \"k1\", \"sha256\": "
        "\"" SHA("b") "\", \"expires\": \"2027-01-31\"}, {\"id\": \"K-2\", \"sha256\": \"" SHA(
            "a") "\", \"expires\": \"2027-01-31T12:00:01Z\"}], \"weight\": 2.5, \"priority\": "
                 "[-1, "
                 "10], \"max_running\": 16, \"max_queued\": 64, \"max_queued_tokens\": 400000, "
                 "\"requests_per_minute\": 600, \"input_tokens_per_minute\": 2000000, "
                 "\"output_tokens_per_minute\": 200000, \"max_tokens\": 8192, \"max_kv_hbm\": "
                 "\"20GiB\", \"max_kv_dram\": 4096}, {\"name\": \"b\"}]}";
    struct tenants *t;
    CHECK(tenants_parse(&t, "f", text, sizeof text - 1) == OK);
    const struct tenant *a = &t->v[0], *b = &t->v[1];
    ok(t->n == 2 && strcmp(a->name, "research") == 0 && strcmp(b->name, "b") == 0, "two tenants");
    ok(a->weight == 2.5 && a->priority_low == -1 && a->priority_high == 10, "weight, priorities");
    ok(a->limits.max_running == 16 && a->limits.max_queued == 64 &&
           a->limits.max_queued_tokens == 400000 && a->limits.per_minute[QUOTA_REQUESTS] == 600 &&
           a->limits.per_minute[QUOTA_INPUT] == 2000000 &&
           a->limits.per_minute[QUOTA_OUTPUT] == 200000 && a->max_tokens == 8192,
       "its limits");
    ok(a->max_kv_bytes[0] == 20ull << 30 && a->max_kv_bytes[1] == 4096,
       "bytes, with a unit or not");
    ok(t->n_keys == 2 && strcmp(t->keys[0].id, "K-2") == 0 && t->keys[0].sha256[31] == 0xaa &&
           t->keys[0].expires_unix_s == 1801396801 && t->keys[1].expires_unix_s == 1801353600,
       "keys, in the order of their digests, and when they end");
    ok(b->weight == 1 && b->priority_low == 0 && b->priority_high == 0 &&
           b->limits.max_running == 0 && b->max_kv_bytes[0] == 0,
       "what is left out is no limit");
    tenants_free(t);
}

/* ---- the disk ---- */

static char path[64];

static void write_file(const char *text)
{
    FILE *f = fopen(path, "w");
    CHECK(f != NULL && fputs(text, f) >= 0 && fclose(f) == 0 && chmod(path, 0600) == 0);
}

static void the_file_is_its_owners_alone(void)
{
    struct tenants *t;
    char want[256];
    write_file("{\"tenants\": [{\"name\": \"a\"}]}");
    ok(tenants_load(&t, path) == OK, "a file of mode 0600 is read");
    tenants_free(t);
    for (unsigned mode = 0604; mode <= 0640; mode += 034) {
        CHECK(chmod(path, mode) == 0);
        snprintf(want, sizeof want,
                 "%s: others than its owner may use it (mode %04o); do: chmod 600 %s", path, mode,
                 path);
        ok(tenants_load(&t, path) == ERR_IO && strcmp(err_text(), want) == 0,
           "one of mode %04o is refused, and what to do is said", mode);
    }
    ok(tenants_load(&t, "/tmp") == ERR_IO && strstr(err_text(), "is not a plain file") != NULL,
       "so is a folder");
    ok(tenants_load(&t, "/nowhere/x") == ERR_IO, "and a file that is not there");
}

/* ---- a minute ---- */

static struct quota_limits limits_of(uint64_t requests, uint64_t input, uint64_t output)
{
    return (struct quota_limits){.per_minute = {requests, input, output}};
}

static bool may(struct quota *q, uint64_t requests, uint64_t input, uint64_t output, uint64_t now,
                struct quota_refusal *why)
{
    struct quota_need n = {.amount = {requests, input, output}, .sequences = 1};
    return quota_admits(q, &n, 4, now, why);
}

static void a_bucket_holds_a_minute_and_refills_all_the_time(void)
{
    struct quota_limits l = limits_of(60, 0, 0);
    struct quota_refusal why;
    struct quota q;
    int n = 0;
    quota_init(&q, &l, MINUTE);
    for (; may(&q, 1, 0, 0, MINUTE, &why); n++)
        quota_take(&q, QUOTA_REQUESTS, 1, MINUTE);
    is_int(n, 60, "a full one passes a minute's worth at once");
    ok(why.which == QUOTA_REQUESTS && why.limit == 60 && why.used == 60 && why.requested == 1 &&
           why.wait_us == 1000000 && !why.never,
       "then it says how long until the next");
    ok(!may(&q, 1, 0, 0, MINUTE + 999999, &why) && why.wait_us == 1,
       "a microsecond early is early");
    ok(may(&q, 1, 0, 0, MINUTE + 1000000, &why), "and then it passes");
    quota_take(&q, QUOTA_REQUESTS, 1, MINUTE + 1000000);
    ok(!may(&q, 31, 0, 0, MINUTE + 31000000, &why) && may(&q, 30, 0, 0, MINUTE + 31000000, &why),
       "half a minute brings half of it");
    ok(may(&q, 60, 0, 0, 9 * MINUTE, &why) && !may(&q, 61, 0, 0, 99 * MINUTE, &why) && why.never,
       "more than a minute's worth is never saved up");
    ok(may(&q, 0, 1 << 30, 1 << 30, MINUTE, &why), "what has no limit has none");
}

static void the_longest_wait_is_named(void)
{
    struct quota_limits l = limits_of(60, 600, 6000);
    struct quota_refusal why;
    struct quota q;
    quota_init(&q, &l, 0);
    quota_take(&q, QUOTA_REQUESTS, 60, 0);
    quota_take(&q, QUOTA_INPUT, 600, 0);
    quota_take(&q, QUOTA_OUTPUT, 5987, 0);
    ok(!may(&q, 1, 100, 512, 0, &why) && why.which == QUOTA_INPUT && why.wait_us == 10000000,
       "1 s for a request, 10 s for its prompt, 5 s for its answer: 10 s");
    ok(!may(&q, 0, 0, 512, 0, &why) && why.which == QUOTA_OUTPUT && why.limit == 6000 &&
           why.used == 5987 && why.requested == 512 && why.wait_us == 4990000,
       "the numbers are those of the limit named");
    ok(!may(&q, 1, 601, 0, 0, &why) && why.which == QUOTA_INPUT && why.never,
       "what can never pass comes first");
}

static void estimates_are_put_right(void)
{
    struct quota_limits l = limits_of(0, 1000, 1000);
    struct quota_refusal why;
    struct quota q;
    quota_init(&q, &l, 0);
    is_int(quota_estimate(&q, 16), 16, "an answer is charged what it may have");
    is_int(quota_estimate(&q, 4000), 512, "but no more than twice the mean");
    for (int i = 0; i < 200; i++)
        quota_learn(&q, 50);
    ok(quota_estimate(&q, 4000) == 101 && quota_estimate(&q, 100) == 100,
       "which is that of recent answers");
    quota_take(&q, QUOTA_OUTPUT, 900, 0);
    ok(!may(&q, 0, 0, 200, 0, &why), "900 of 1000 taken leave no 200");
    quota_settle(&q, 900, 100, 0);
    ok(may(&q, 0, 0, 900, 0, &why) && !may(&q, 0, 0, 901, 0, &why),
       "800 that were never made come back");
    quota_take(&q, QUOTA_OUTPUT, 900, 0);
    quota_settle(&q, 900, 1900, 0);
    ok(!may(&q, 0, 0, 1, 0, &why) && why.used == 2000 && why.wait_us == 60060000,
       "1000 made beyond the estimate are a debt of a minute");
    quota_take(&q, QUOTA_INPUT, 400, 0);
    quota_give_back(&q, QUOTA_INPUT, 400, 0);
    quota_give_back(&q, QUOTA_INPUT, 400, 0);
    ok(may(&q, 0, 1000, 0, 0, &why) && !may(&q, 0, 1001, 0, 0, &why),
       "given back is given back, and no bucket runs over");
}

static void what_waits_is_bounded(void)
{
    struct quota_limits l = {.max_running = 2, .max_queued = 3, .max_queued_tokens = 100};
    struct quota_need n = {.sequences = 2, .queued_tokens = 500};
    struct quota_refusal why;
    struct quota q;
    quota_init(&q, &l, 0);
    ok(quota_admits(&q, &n, 64, 0, &why), "an empty queue takes a prompt of any length");
    q.n_queued = 1;
    q.queued_tokens = 60;
    n.queued_tokens = 40;
    ok(quota_admits(&q, &n, 64, 0, &why), "100 tokens may wait");
    n.queued_tokens = 41;
    ok(!quota_admits(&q, &n, 64, 0, &why) && why.which == QUOTA_QUEUED_TOKENS && why.limit == 100 &&
           why.used == 60 && why.requested == 41 && why.wait_us == 0,
       "101 may not");
    n.queued_tokens = 1;
    q.n_running = 2;
    q.n_queued = 2;
    ok(!quota_admits(&q, &n, 64, 0, &why) && why.which == QUOTA_SEQUENCES && why.limit == 5 &&
           why.used == 4 && !why.never,
       "2 running and 3 waiting are all");
    n.sequences = 6;
    ok(!quota_admits(&q, &n, 64, 0, &why) && why.never, "6 at a time never pass");
    q.limits.max_running = 0;
    ok(quota_admits(&q, &n, 64, 0, &why), "without max_running the engine's seats count");
}

static void new_limits_give_nothing_away(void)
{
    struct quota_limits l = limits_of(100, 0, 100), more = limits_of(200, 50, 10);
    struct quota_refusal why;
    struct quota q;
    quota_init(&q, &l, 0);
    quota_take(&q, QUOTA_REQUESTS, 90, 0);
    quota_change(&q, &more, 0);
    ok(may(&q, 10, 0, 0, 0, &why) && !may(&q, 11, 0, 0, 0, &why), "what was used stays used");
    ok(may(&q, 0, 50, 0, 0, &why) && !may(&q, 0, 51, 0, 0, &why), "a limit that is new is full");
    ok(may(&q, 0, 0, 10, 0, &why) && !may(&q, 0, 0, 11, 0, &why), "a smaller one is no fuller");
}

static void headers_say_what_is_left(void)
{
    struct quota_limits l = limits_of(600, 2000, 1000);
    char lines[QUOTA_HEADER_BYTES];
    struct quota q;
    quota_init(&q, &l, 0);
    quota_take(&q, QUOTA_REQUESTS, 2, 0);
    quota_take(&q, QUOTA_OUTPUT, 100, 0);
    quota_headers(&q, 100000, lines);
    ok(strcmp(lines,
              "x-ratelimit-limit-requests: 600\r\nx-ratelimit-remaining-requests: 599\r\n"
              "x-ratelimit-reset-requests: 100ms\r\nx-ratelimit-limit-tokens: 1000\r\n"
              "x-ratelimit-remaining-tokens: 901\r\nx-ratelimit-reset-tokens: 5.9s\r\n") == 0,
       "of tokens the tighter limit");
    quota_take(&q, QUOTA_INPUT, 1500, 100000);
    quota_headers(&q, 100000, lines);
    ok(strstr(lines, "limit-tokens: 2000\r\nx-ratelimit-remaining-tokens: 500\r\n") != NULL,
       "whichever that is");
    quota_init(&q, &(struct quota_limits){.max_running = 1}, 0);
    quota_headers(&q, 0, lines);
    ok(lines[0] == '\0', "and nothing where nothing is limited by the minute");
}

static void durations_are_gos(void)
{
    static const struct {
        uint64_t us;
        const char *text;
    } cases[] = {{0, "0s"},
                 {1, "1ms"},
                 {120000, "120ms"},
                 {1000000, "1s"},
                 {1500000, "1.5s"},
                 {59999000, "59.999s"},
                 {MINUTE, "1m0s"},
                 {6 * MINUTE, "6m0s"},
                 {61250000, "1m1.25s"},
                 {999999999, "16m40s"}};
    char out[QUOTA_DURATION_BYTES];
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        quota_duration(cases[i].us, out);
        ok(strcmp(out, cases[i].text) == 0, "%llu us is %s", (unsigned long long)cases[i].us,
           cases[i].text);
    }
}

/* ---- keys ---- */

static struct new_key keys[3];

static void make_keys(void)
{
    unsigned char random[NEW_KEY_RANDOM];
    for (int i = 0; i < 3; i++) {
        for (int k = 0; k < NEW_KEY_RANDOM; k++)
            random[k] = (unsigned char)(i * 7 + k * 13);
        new_key_make(&keys[i], random);
    }
}

static void a_new_key_is_an_id_and_a_secret(void)
{
    unsigned char ones[NEW_KEY_RANDOM];
    struct new_key k;
    memset(ones, 0xff, sizeof ones);
    new_key_make(&k, ones);
    ok(strcmp(k.text, "sk-77777777-__________________________________________8") == 0,
       "sk-, the id, 43 characters of base64url");
    new_key_make(&k, (const unsigned char[NEW_KEY_RANDOM]){0});
    ok(strcmp(k.text, "sk-aaaaaaaa-AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA") == 0 &&
           strcmp(k.sha256, "08da8b2e8c043635bbd3ffffb3d06c34ad7535b452b3b6f4053578b8df0e93f0") ==
               0,
       "and the SHA-256 of all of it");
}

static const char *two_tenants(const char *second_key, const char *more)
{
    static char text[2048];
    snprintf(text, sizeof text,
             "{\"tenants\": [{\"name\": \"a\", \"keys\": [{\"id\": \"a1\", \"sha256\": \"%s\"}, "
             "{\"id\": \"a2\", \"sha256\": \"%s\", \"expires\": \"2027-01-31\"}]}, {\"name\": "
             "\"b\", \"keys\": [%s]%s}]}",
             keys[0].sha256, keys[1].sha256, second_key, more);
    return text;
}

static const char *key_of_b(void)
{
    static char text[160];
    snprintf(text, sizeof text, "{\"id\": \"b1\", \"sha256\": \"%s\"}", keys[2].sha256);
    return text;
}

/* "b b1", "-": nobody's. */
static const char *whose(struct roster *ro, struct auth *au, const char *key, uint64_t unix_s)
{
    static char text[80];
    const char *id;
    uint32_t place = auth_find(au, &(struct exchange){key}, unix_s);
    if (place == 0)
        return "-";
    const struct roster_slot *s = roster_of_key(ro, place - 1, &id);
    snprintf(text, sizeof text, "%s %s", s->rules.name, id);
    return text;
}

static void a_key_is_one_tenants(void)
{
    struct auth *au;
    struct roster *ro;
    const uint64_t end = 1801353600;
    CHECK(auth_create(&au, NULL, 0) == OK);
    write_file(two_tenants(key_of_b(), ""));
    CHECK(roster_create(&ro, path, &au, 0) == OK);
    ok(!auth_open(au), "with tenants nobody comes in without a key");
    ok(strcmp(whose(ro, au, keys[0].text, end), "a a1") == 0 &&
           strcmp(whose(ro, au, keys[2].text, end), "b b1") == 0,
       "every key leads to its tenant");
    ok(strcmp(whose(ro, au, keys[1].text, end - 1), "a a2") == 0 &&
           strcmp(whose(ro, au, keys[1].text, end), "-") == 0,
       "until the first second of the day on which it expires");
    ok(strcmp(whose(ro, au, keys[0].sha256, end), "-") == 0, "the digest of a key is no key");
    ok(strcmp(whose(ro, au, "", end), "-") == 0 && strcmp(whose(ro, au, "sk-x", end), "-") == 0,
       "nor is anything else");
    write_file("{\"tenants\": [{\"name\": \"a\"}]}");
    roster_reload(ro, &au, 0);
    ok(!auth_open(au) && auth_find(au, &(struct exchange){keys[0].text}, 0) == 0,
       "a file without keys lets nobody in");
    roster_destroy(ro);
    auth_destroy(au);
}

static void caches_are_apart(void)
{
    struct auth *au, *other;
    uint64_t a[2] = {1, 2}, again[2] = {1, 2}, b[2] = {1, 2}, c[2] = {1, 3}, later[2] = {1, 2};
    CHECK(auth_create(&au, NULL, 0) == OK && auth_create(&other, NULL, 0) == OK);
    auth_salt(au, "a", a);
    auth_salt(au, "a", again);
    auth_salt(au, "b", b);
    auth_salt(au, "a", c);
    ok(memcmp(a, again, sizeof a) == 0, "one tenant's salt is always the same");
    ok(memcmp(a, b, sizeof a) != 0 && memcmp(a, c, sizeof a) != 0,
       "another tenant's, or with another cache_salt, is another");
    auth_salt(other, "a", again);
    ok(memcmp(a, again, sizeof a) != 0, "nobody can compute it who does not know the secret");
    struct tenants none = {0};
    au = auth_replace(au, &none);
    auth_salt(au, "a", later);
    ok(memcmp(a, later, sizeof a) == 0, "a reload keeps it: what was cached is found again");
    auth_destroy(au);
    auth_destroy(other);
}

/* ---- reloads ---- */

static uint32_t number_of(struct roster *ro, const char *name)
{
    for (uint32_t i = 1; i < MAX_TENANTS; i++)
        if (ro->slots[i] != NULL && ro->slots[i]->listed &&
            strcmp(ro->slots[i]->rules.name, name) == 0)
            return i;
    return 0;
}

static void numbers_stay_with_names(void)
{
    struct auth *au;
    struct roster *ro;
    CHECK(auth_create(&au, NULL, 0) == OK);
    write_file("{\"tenants\": [{\"name\": \"a\"}, {\"name\": \"b\"}, {\"name\": \"c\"}]}");
    CHECK(roster_create(&ro, path, &au, 0) == OK);
    uint32_t a = number_of(ro, "a"), b = number_of(ro, "b"), c = number_of(ro, "c");
    uint64_t life = ro->slots[b]->life;
    ok(a > 0 && b > 0 && c > 0 && a != b && b != c && a != c, "each has its own, and none has 0");
    ro->slots[b]->n_calls = 1;
    write_file("{\"tenants\": [{\"name\": \"d\"}, {\"name\": \"c\"}, {\"name\": \"a\"}]}");
    roster_reload(ro, &au, 0);
    ok(number_of(ro, "a") == a && number_of(ro, "c") == c, "another order changes no number");
    ok(roster_find(ro, b, life) == NULL && ro->slots[b] != NULL && number_of(ro, "d") != b,
       "a removed tenant is gone, but its number is not free while it has a call");
    write_file("{\"tenants\": [{\"name\": \"a\"}, {\"name\": \"b\"}]}");
    roster_reload(ro, &au, 0);
    ok(number_of(ro, "b") == b && roster_find(ro, b, life) != NULL,
       "if it comes back, it is the same");
    ro->slots[b]->n_calls = 0;
    write_file("{\"tenants\": [{\"name\": \"a\"}]}");
    roster_reload(ro, &au, 0);
    write_file("{\"tenants\": [{\"name\": \"a\"}, {\"name\": \"e\"}]}");
    roster_reload(ro, &au, 0);
    ok(ro->slots[number_of(ro, "e")]->life != life && roster_find(ro, b, life) == NULL,
       "who has its number later is somebody else");
    write_file("{\"tenants\": [{\"name\": \"a\"}, {\"name\": \"e\", \"weight\": 0}]}");
    roster_reload(ro, &au, 0);
    ok(number_of(ro, "e") != 0 && ro->slots[number_of(ro, "e")]->rules.weight == 1,
       "a bad file changes nothing");
    roster_destroy(ro);
    auth_destroy(au);
}

static uint32_t posted(struct mailbox *m, uint32_t *tenant, float *weight)
{
    const struct msg_head *h;
    uint32_t n = 0;
    for (; (h = mailbox_peek(m, TO_ENGINE)) != NULL; n++) {
        CHECK(h->kind == MSG_TENANT);
        *tenant = ((const struct msg_tenant *)h)->tenant;
        *weight = ((const struct msg_tenant *)h)->weight;
        mailbox_release(m, TO_ENGINE);
    }
    return n;
}

static void the_engine_hears_of_every_change_once(void)
{
    struct auth *au;
    struct roster *ro;
    struct mailbox *m;
    uint32_t tenant = 0;
    float weight = 0;
    CHECK(auth_create(&au, NULL, 0) == OK && mailbox_create(&m, 4096, 4096, NULL, NULL) == OK);
    char *many = mem_alloc(64 << 10), *p = many + sprintf(many, "{\"tenants\": [");
    for (int i = 0; i < 500; i++)
        p += sprintf(p, "%s{\"name\": \"t%d\"}", i > 0 ? "," : "", i);
    strcpy(p, "]}");
    write_file(many);
    CHECK(roster_create(&ro, path, &au, 0) == OK);
    ok(!roster_post(ro, m), "a full mailbox is told to come again");
    uint32_t n = posted(m, &tenant, &weight);
    for (int i = 0; i < 500 && !roster_post(ro, m); i++)
        n += posted(m, &tenant, &weight);
    n += posted(m, &tenant, &weight);
    is_int(n, 500, "every tenant is told of exactly once");
    ok(roster_post(ro, m) && posted(m, &tenant, &weight) == 0, "and not again");
    sprintf(p, ",{\"name\": \"x\", \"weight\": 2.5}]}");
    write_file(many);
    roster_reload(ro, &au, 0);
    ok(roster_post(ro, m) && posted(m, &tenant, &weight) == 1 && tenant == number_of(ro, "x") &&
           weight == 2.5f,
       "after a reload only what has changed");
    mem_free(many);
    roster_destroy(ro);
    auth_destroy(au);
    mailbox_destroy(m);
}

int main(void)
{
    snprintf(path, sizeof path, "/tmp/spind-tenants-%d.json", (int)getpid());
    make_keys();
    what_is_wrong_is_said_exactly();
    a_file_is_tenants_and_nothing_else();
    a_full_file_is_read_as_it_stands();
    the_file_is_its_owners_alone();
    a_bucket_holds_a_minute_and_refills_all_the_time();
    the_longest_wait_is_named();
    estimates_are_put_right();
    what_waits_is_bounded();
    new_limits_give_nothing_away();
    headers_say_what_is_left();
    durations_are_gos();
    a_new_key_is_an_id_and_a_secret();
    a_key_is_one_tenants();
    caches_are_apart();
    numbers_stay_with_names();
    the_engine_hears_of_every_change_once();
    unlink(path);
    return tap_done();
}
