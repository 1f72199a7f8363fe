/* Keys: which headers open the door, and that no branch or address depends on a key: the program
 * runs itself under valgrind with the presented key marked undefined, and valgrind reports any. */
#include "api/internal.h"
#include "tests/tap.h"

#include <sys/wait.h>
#if defined(__has_include) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#if __has_include(<valgrind/memcheck.h>)
#include <valgrind/memcheck.h>
#endif
#endif

struct exchange {
    const char *authorization, *x_api_key, *api_key;
    size_t secret_len; /* of x_api_key, whose bytes may not even be looked at */
};

struct text_view exchange_header(const struct exchange *x, const char *name)
{
    const char *v = strcmp(name, "authorization") == 0 ? x->authorization
                    : strcmp(name, "x-api-key") == 0   ? x->x_api_key
                    : strcmp(name, "api-key") == 0     ? x->api_key
                                                       : NULL;
    if (x->secret_len > 0 && v != NULL)
        return (struct text_view){v, x->secret_len};
    return (struct text_view){v, v ? strlen(v) : 0};
}

static const char *const keys[] = {"sk-one", "sk-two", "sk-three"};

static void only_a_known_key_opens(void)
{
    static const struct {
        struct exchange x;
        bool good;
        const char *name;
    } cases[] = {
        {{0}, false, "no key"},
        {{.authorization = "Bearer sk-one"}, true, "the first key"},
        {{.authorization = "Bearer sk-three"}, true, "the last key"},
        {{.authorization = "bearer sk-two"}, true, "a scheme in lower case"},
        {{.authorization = "BEARER sk-two"}, true, "a scheme in upper case"},
        {{.authorization = "Bearer  sk-two"}, false, "two spaces"},
        {{.authorization = "Bearer\tsk-two"}, false, "a tab"},
        {{.authorization = "Bearer "}, false, "an empty key"},
        {{.authorization = "Bearer"}, false, "a scheme alone"},
        {{.authorization = "sk-one"}, false, "no scheme"},
        {{.authorization = "Basic sk-one"}, false, "another scheme"},
        {{.authorization = "Bearer sk-one "}, false, "a key and more"},
        {{.authorization = "Bearer sk-on"}, false, "a part of a key"},
        {{.authorization = "Bearer SK-ONE"}, false, "a key in another case"},
        {{.x_api_key = "sk-one"}, true, "X-Api-Key"},
        {{.api_key = "sk-one"}, true, "api-key"},
        {{.x_api_key = ""}, false, "an empty X-Api-Key"},
        {{.x_api_key = "Bearer sk-one"}, false, "X-Api-Key has no scheme"},
        {{.authorization = "Bearer sk-one", .x_api_key = "sk-one"}, true, "headers that agree"},
        {{.authorization = "Bearer sk-one", .x_api_key = "sk-two"}, false, "two good keys"},
        {{.authorization = "Bearer sk-one", .x_api_key = "x"}, false, "a good and a bad key"},
        {{.authorization = "Bearer x", .x_api_key = "sk-one"}, false, "a bad and a good key"},
        {{.x_api_key = "sk-one", .api_key = "sk-two"}, false, "the two that need no scheme"},
        {{.authorization = "Basic x", .x_api_key = "sk-one"}, false, "a foreign scheme beside it"},
    };
    struct auth *au;
    CHECK(auth_create(&au, keys, 3) == OK);
    ok(!auth_open(au), "keys are configured");
    for (size_t i = 0; i < ARRAY_LEN(cases); i++)
        ok((auth_find(au, &cases[i].x, 0) > 0) == cases[i].good, "%s", cases[i].name);
    auth_destroy(au);
}

static void without_keys_everybody_may(void)
{
    struct auth *au;
    CHECK(auth_create(&au, NULL, 0) == OK);
    ok(auth_open(au), "whatever they send");
    auth_destroy(au);
}

static void an_empty_key_is_a_mistake(void)
{
    struct auth *au;
    const char *const bad[] = {"sk", ""};
    ok(auth_create(&au, bad, 2) == ERR_ARG, "it would let everybody in");
}

/* "sk-twx" is the first of three keys, and has expired; none of the others is it. */
static struct auth *keys_of_tenants(void)
{
    struct tenant_key of[3] = {{.expires_unix_s = 1000}, {.tenant = 0}, {.tenant = 1}};
    const struct tenants t = {.keys = of, .n_keys = 3};
    struct sha256 c;
    struct auth *au;
    sha256_init(&c);
    sha256_add(&c, "sk-twx", 6);
    sha256_done(&c, of[0].sha256);
    of[1].sha256[0] = of[2].sha256[31] = 1;
    CHECK(auth_create(&au, keys, 3) == OK);
    return auth_replace(au, &t);
}

static void tenants_have_places(void)
{
    struct auth *au = keys_of_tenants();
    is_int(auth_find(au, &(struct exchange){.x_api_key = "sk-twx"}, 999), 1, "a key has its place");
    is_int(auth_find(au, &(struct exchange){.x_api_key = "sk-twx"}, 1000), 0, "until it expires");
    is_int(auth_find(au, &(struct exchange){.x_api_key = "sk-one"}, 999), 0,
           "the keys of before are gone");
    auth_destroy(au);
}

/* Under valgrind: 9 is its answer to a decision that depends on the key. leaky: make one. */
static int check_in_secret(bool leaky, bool tenants)
{
    (void)leaky, (void)tenants; /* without valgrind there is nothing to do */
#ifdef VALGRIND_MAKE_MEM_UNDEFINED
    struct auth *au;
    char key[] = "sk-twx"; /* of the tenants', one that has expired: nearly good is no different */
    if (tenants)
        au = keys_of_tenants();
    else
        CHECK(auth_create(&au, keys, 3) == OK);
    VALGRIND_MAKE_MEM_UNDEFINED(key, 6);
    uint32_t place = auth_find(au, &(struct exchange){.x_api_key = key, .secret_len = 6}, 2000);
    if (leaky && place > 0)
        puts("a decision");
    VALGRIND_MAKE_MEM_DEFINED(&place, sizeof place);
    CHECK(place == 0 || leaky);
    auth_destroy(au);
#endif
    return 0;
}

static void time_says_nothing_about_a_key(const char *self)
{
    static const char name[] = "valgrind sees no decision that depends on the key";
#ifdef VALGRIND_MAKE_MEM_UNDEFINED
    static const char *const modes[] = {"secret", "tenants", "leaky"};
    int rc[3];
    if (system("valgrind --version > /dev/null 2>&1") != 0) {
        tap_skip(name, "valgrind is not installed");
        return;
    }
    for (int i = 0; i < 3; i++) {
        char line[4200];
        snprintf(line, sizeof line, "valgrind -q --error-exitcode=9 '%s' %s > /dev/null 2>&1", self,
                 modes[i]);
        rc[i] = WEXITSTATUS(system(line));
    }
    ok(rc[0] == 0, "%s", name);
    ok(rc[1] == 0, "nor on whether it has expired");
    ok(rc[2] == 9, "and would have seen one");
#else
    (void)self;
    tap_skip(name, "under a sanitizer, or built without valgrind's header");
#endif
}

int main(int argc, char **argv)
{
    if (argc > 1)
        return check_in_secret(strcmp(argv[1], "leaky") == 0, strcmp(argv[1], "tenants") == 0);
    only_a_known_key_opens();
    without_keys_everybody_may();
    an_empty_key_is_a_mistake();
    tenants_have_places();
    time_says_nothing_about_a_key(argv[0]);
    return tap_done();
}
