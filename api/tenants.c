/* Reading the tenants file (tenants.h): api/json.c's guard first, then one table of fields.
 *
 * Duplicates are looked for in sorted lists of pointers: a file of a thousand tenants is read between two
 * turns of the loop. */
#include "api/tenants.h"
#include "api/json.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { FILE_BYTES = 4 << 20 };
#define COUNT_MAX (1ull << 50) /* exact in a double, and as good as no bound */

enum field_kind {
    TENANT_NAME,
    TENANT_KEYS,
    TENANT_WEIGHT,
    TENANT_RANGE,
    TENANT_COUNT,
    TENANT_BYTES
};

static const struct tenant_field {
    const char *name;
    enum field_kind kind;
    size_t at, size; /* COUNT, BYTES: in struct tenant */
} fields[] = {
#define AT(f) offsetof(struct tenant, f), sizeof(((struct tenant *)0)->f)
    {"name", TENANT_NAME, 0, 0},
    {"keys", TENANT_KEYS, 0, 0},
    {"weight", TENANT_WEIGHT, 0, 0},
    {"priority", TENANT_RANGE, 0, 0},
    {"max_running", TENANT_COUNT, AT(limits.max_running)},
    {"max_queued", TENANT_COUNT, AT(limits.max_queued)},
    {"max_queued_tokens", TENANT_COUNT, AT(limits.max_queued_tokens)},
    {"requests_per_minute", TENANT_COUNT, AT(limits.per_minute[QUOTA_REQUESTS])},
    {"input_tokens_per_minute", TENANT_COUNT, AT(limits.per_minute[QUOTA_INPUT])},
    {"output_tokens_per_minute", TENANT_COUNT, AT(limits.per_minute[QUOTA_OUTPUT])},
    {"max_tokens", TENANT_COUNT, AT(max_tokens)},
    {"max_kv_hbm", TENANT_BYTES, AT(max_kv_bytes[0])},
    {"max_kv_dram", TENANT_BYTES, AT(max_kv_bytes[1])},
#undef AT
};

/* What is being read, for the words of errors. */
struct reader {
    struct tenants *t;
    const char *path;
    char whose[96]; /* `tenant "research"`, or `tenant 3` until it has a name */
};

#define BAD(r, field, ...) bad_field((r), (field), __VA_ARGS__)

PRINTF_LIKE(3, 4)
static status bad_field(const struct reader *r, const char *field, const char *fmt, ...)
{
    char why[256];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(why, sizeof why, fmt, ap);
    va_end(ap);
    return err(ERR_ARG, "%s: %s: %s: %s", r->path, r->whose, field, why);
}

/* ---- single values ---- */

static bool is_word(const char *s, size_t most, const char *also)
{
    size_t len = strlen(s);
    for (size_t i = 0; i < len; i++)
        if (!(s[i] >= 'a' && s[i] <= 'z') && !(s[i] >= '0' && s[i] <= '9') &&
            strchr(also, s[i]) == NULL)
            return false;
    return len > 0 && len <= most;
}

bool tenants_is_name(const char *s)
{
    return is_word(s, TENANT_NAME_MAX, "_-");
}

static bool is_key_id(const char *s)
{
    return is_word(s, TENANT_KEY_ID_MAX, "_-ABCDEFGHIJKLMNOPQRSTUVWXYZ");
}

static int hex_value(char c)
{
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                  : -1;
}

static bool read_digest(const char *s, unsigned char out[SHA256_BYTES])
{
    if (strlen(s) != (size_t)2 * SHA256_BYTES)
        return false;
    for (size_t i = 0; i < SHA256_BYTES; i++) {
        int high = hex_value(s[2 * i]), low = hex_value(s[2 * i + 1]);
        if (high < 0 || low < 0)
            return false;
        out[i] = (unsigned char)(high << 4 | low);
    }
    return true;
}

/* "2027-01-31", the first second of that day in UTC, or "2027-01-31T12:00:00Z". */
static bool read_time(const char *s, uint64_t *out)
{
    struct tm tm = {0}, back;
    char again[80];
    bool day = strlen(s) == 10;
    if (sscanf(s, "%4d-%2d-%2dT%2d:%2d:%2dZ", &tm.tm_year, &tm.tm_mon, &tm.tm_mday, &tm.tm_hour,
               &tm.tm_min, &tm.tm_sec) != (day ? 3 : 6))
        return false;
    tm.tm_year -= 1900;
    tm.tm_mon -= 1;
    time_t t = timegm(&tm);
    if (t <= 0 || gmtime_r(&t, &back) == NULL)
        return false;
    snprintf(again, sizeof again, "%04d-%02d-%02dT%02d:%02d:%02dZ", back.tm_year + 1900,
             back.tm_mon + 1, back.tm_mday, back.tm_hour, back.tm_min, back.tm_sec);
    if (day)
        again[10] = '\0';
    *out = (uint64_t)t;
    return strcmp(again, s) == 0; /* there is no 31 February, and no sign or blank */
}

static bool is_whole(const cJSON *v, double low, double high)
{
    return cJSON_IsNumber(v) && v->valuedouble >= low && v->valuedouble <= high &&
           v->valuedouble == (double)(int64_t)v->valuedouble;
}

/* A whole number of bytes, or a text with a unit: "20GiB". */
static bool read_bytes(const cJSON *v, uint64_t *out)
{
    static const char *const units[] = {"", "KiB", "MiB", "GiB", "TiB"};
    char *end;
    if (is_whole(v, 1, (double)COUNT_MAX)) {
        *out = (uint64_t)v->valuedouble;
        return true;
    }
    if (!cJSON_IsString(v) || v->valuestring[0] < '0' || v->valuestring[0] > '9')
        return false;
    uint64_t n = strtoull(v->valuestring, &end, 10);
    for (unsigned i = 0; i < ARRAY_LEN(units); i++) {
        *out = n << 10 * i;
        if (strcmp(end, units[i]) == 0)
            return n > 0 && n <= COUNT_MAX >> 10 * i;
    }
    return false;
}

/* ---- fields ---- */

/* The key of an object that nobody knows, or NULL. `known`: its names, NULL at the end. */
static const char *foreign_key(const cJSON *o, const char *const *known)
{
    for (const cJSON *v = o->child; v != NULL; v = v->next) {
        const char *const *k = known;
        while (*k != NULL && strcmp(*k, v->string) != 0)
            k++;
        if (*k == NULL)
            return v->string;
    }
    return NULL;
}

static const char *text_of(const cJSON *o, const char *name)
{
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(o, name);
    return cJSON_IsString(v) ? v->valuestring : NULL;
}

static status read_key(struct reader *r, const cJSON *o, uint32_t tenant, int at)
{
    static const char *const known[] = {"id", "sha256", "expires", NULL};
    struct tenants *t = r->t;
    char where[64];
    snprintf(where, sizeof where, "keys[%d]", at);
    if (!cJSON_IsObject(o))
        return BAD(r, where, "must be an object with id and sha256");
    const char *stranger = foreign_key(o, known), *id = text_of(o, "id");
    const char *digest = text_of(o, "sha256"), *expires = text_of(o, "expires");
    struct tenant_key k = {.tenant = tenant};
    if (stranger != NULL)
        return BAD(r, where, "unknown key \"%.32s\"", stranger);
    if (id == NULL || !is_key_id(id))
        return BAD(r, where, "id: must be 1 to %d of A-Z, a-z, 0-9, _ and -", TENANT_KEY_ID_MAX);
    snprintf(k.id, sizeof k.id, "%s", id);
    snprintf(where, sizeof where, "key \"%s\"", id);
    if (digest == NULL || !read_digest(digest, k.sha256))
        return BAD(r, where, "sha256: must be 64 hexadecimal digits, the SHA-256 of the key");
    if (cJSON_HasObjectItem(o, "expires") &&
        (expires == NULL || !read_time(expires, &k.expires_unix_s)))
        return BAD(r, where, "expires: must be YYYY-MM-DD or YYYY-MM-DDThh:mm:ssZ");
    if (t->n_keys == TENANT_KEYS_MAX)
        return BAD(r, where, "is one too many: the file may hold %d", TENANT_KEYS_MAX);
    t->keys[t->n_keys++] = k;
    return OK;
}

static status read_keys(struct reader *r, const cJSON *v, uint32_t tenant)
{
    int i = 0;
    if (!cJSON_IsArray(v))
        return BAD(r, "keys", "must be a list");
    for (const cJSON *k = v->child; k != NULL; k = k->next)
        TRY(read_key(r, k, tenant, i++));
    return OK;
}

static status read_range(struct reader *r, const cJSON *v, struct tenant *to)
{
    const cJSON *low = cJSON_IsArray(v) ? v->child : NULL;
    const cJSON *high = low != NULL ? low->next : NULL;
    if (high == NULL || high->next != NULL || !is_whole(low, INT32_MIN, INT32_MAX) ||
        !is_whole(high, INT32_MIN, INT32_MAX) || low->valuedouble > high->valuedouble)
        return BAD(r, "priority", "must be two whole numbers, the smaller first: [0, 10]");
    to->priority_low = (int32_t)low->valuedouble;
    to->priority_high = (int32_t)high->valuedouble;
    return OK;
}

static status read_count(struct reader *r, const struct tenant_field *f, const cJSON *v,
                         struct tenant *to)
{
    uint64_t most = f->size == 4 ? UINT32_MAX / 4 : COUNT_MAX, n;
    char *at = (char *)to + f->at;
    if (f->kind == TENANT_BYTES && !read_bytes(v, &n))
        return BAD(r, f->name, "must be a number of bytes, 1 or more, such as \"20GiB\"");
    if (f->kind == TENANT_COUNT && !is_whole(v, 1, (double)most))
        return BAD(r, f->name, "must be a whole number from 1 to %llu", (unsigned long long)most);
    if (f->kind == TENANT_COUNT)
        n = (uint64_t)v->valuedouble;
    if (f->size == 4)
        *(uint32_t *)at = (uint32_t)n;
    else
        *(uint64_t *)at = n;
    return OK;
}

static status read_field(struct reader *r, const struct tenant_field *f, const cJSON *v,
                         struct tenant *to)
{
    switch (f->kind) {
    case TENANT_NAME: return OK; /* first of all: read_tenant */
    case TENANT_KEYS: return read_keys(r, v, r->t->n);
    case TENANT_RANGE: return read_range(r, v, to);
    case TENANT_WEIGHT: break;
    case TENANT_COUNT:
    case TENANT_BYTES: return read_count(r, f, v, to);
    }
    if (!cJSON_IsNumber(v) || !((float)v->valuedouble > 0) || v->valuedouble > 1000)
        return BAD(r, "weight", "must be a number over 0 and at most 1000");
    to->weight = v->valuedouble;
    return OK;
}

static status read_tenant(struct reader *r, const cJSON *o)
{
    struct tenant *to = &r->t->v[r->t->n];
    const char *name = text_of(o, "name");
    snprintf(r->whose, sizeof r->whose, "tenant %u", r->t->n + 1);
    if (!cJSON_IsObject(o))
        return err(ERR_ARG, "%s: %s: must be an object", r->path, r->whose);
    if (name == NULL || !tenants_is_name(name))
        return BAD(r, "name", "must be 1 to %d of a-z, 0-9, _ and -", TENANT_NAME_MAX);
    snprintf(r->whose, sizeof r->whose, "tenant \"%s\"", name);
    snprintf(to->name, sizeof to->name, "%s", name);
    to->weight = 1;
    for (const cJSON *v = o->child; v != NULL; v = v->next) {
        size_t i = 0;
        while (i < ARRAY_LEN(fields) && strcmp(fields[i].name, v->string) != 0)
            i++;
        if (i == ARRAY_LEN(fields))
            return err(ERR_ARG, "%s: %s: unknown key \"%.32s\"", r->path, r->whose, v->string);
        TRY(read_field(r, &fields[i], v, to));
    }
    r->t->n++;
    return OK;
}

/* ---- what may stand there once only ---- */

static int by_name(const void *a, const void *b)
{
    return strcmp((*(struct tenant *const *)a)->name, (*(struct tenant *const *)b)->name);
}

static int by_id(const void *a, const void *b)
{
    return strcmp((*(struct tenant_key *const *)a)->id, (*(struct tenant_key *const *)b)->id);
}

static int by_digest(const void *a, const void *b)
{
    return memcmp(((const struct tenant_key *)a)->sha256, ((const struct tenant_key *)b)->sha256,
                  SHA256_BYTES);
}

/* The first of two equal neighbours once list[n] is sorted, or NULL. */
static const void *find_twins(const void **list, size_t n,
                              int (*compare)(const void *, const void *))
{
    qsort(list, n, sizeof *list, compare);
    for (size_t i = 0; i + 1 < n; i++)
        if (compare(&list[i], &list[i + 1]) == 0)
            return list[i];
    return NULL;
}

static status check_twins(const struct reader *r, const void **list)
{
    const struct tenants *t = r->t;
    for (uint32_t i = 0; i < t->n; i++)
        list[i] = &t->v[i];
    const struct tenant *tenant = find_twins(list, t->n, by_name);
    if (tenant != NULL)
        return err(ERR_ARG, "%s: tenant \"%s\" is there twice", r->path, tenant->name);
    for (uint32_t i = 0; i < t->n_keys; i++)
        list[i] = &t->keys[i];
    const struct tenant_key *k = find_twins(list, t->n_keys, by_id);
    if (k != NULL)
        return err(ERR_ARG, "%s: tenant \"%s\": key id \"%s\" is there twice", r->path,
                   t->v[k->tenant].name, k->id);
    qsort(t->keys, t->n_keys, sizeof *t->keys, by_digest);
    for (k = t->keys; k + 1 < t->keys + t->n_keys; k++)
        if (by_digest(k, k + 1) == 0)
            return err(ERR_ARG, "%s: tenant \"%s\": key \"%s\": its sha256 is another key's, too",
                       r->path, t->v[k->tenant].name, k->id);
    return OK;
}

/* ---- the whole ---- */

static status read_list(struct reader *r, const cJSON *list)
{
    int n = cJSON_IsArray(list) ? cJSON_GetArraySize(list) : 0;
    if (!cJSON_IsArray(list))
        return err(ERR_ARG, "%s: tenants: must be a list", r->path);
    if (n == 0)
        return err(ERR_ARG, "%s: tenants: there is none", r->path);
    if (n > TENANTS_MAX)
        return err(ERR_ARG, "%s: tenants: %d are too many: at most %d", r->path, n, TENANTS_MAX);
    r->t->v = mem_alloc((size_t)n * sizeof *r->t->v);
    r->t->keys = mem_alloc(TENANT_KEYS_MAX * sizeof *r->t->keys);
    for (const cJSON *v = list->child; v != NULL; v = v->next)
        TRY(read_tenant(r, v));
    const void **room = mem_alloc((TENANTS_MAX + TENANT_KEYS_MAX) * sizeof *room);
    status st = check_twins(r, room);
    mem_free(room);
    return st;
}

static status read_document(struct reader *r, const struct json_doc *doc)
{
    const struct json_value *list = NULL;
    for (size_t i = 0; i < doc->n_members; i++) {
        const struct json_member *m = &doc->members[i];
        if (m->key.len != 7 || memcmp(m->key.p, "tenants", 7) != 0)
            return err(ERR_ARG, "%s: unknown key \"%.*s\"", r->path,
                       (int)(m->key.len < 32 ? m->key.len : 32), m->key.p);
        list = &m->value;
    }
    if (list == NULL)
        return err(ERR_ARG, "%s: tenants: must be there, a list", r->path);
    cJSON *tree = json_tree(list);
    if (tree == NULL)
        return err(ERR_MEMORY, "%s: no memory", r->path);
    status st = read_list(r, tree);
    cJSON_Delete(tree);
    return st;
}

status tenants_parse(struct tenants **out, const char *path, const char *text, size_t len)
{
    static const char *const no_ids[] = {NULL};
    struct json_doc doc;
    if (json_open(&doc, text, len, no_ids) != OK) {
        char why[256];
        snprintf(why, sizeof why, "%s", err_text());
        return err(ERR_ARG, "%s: cannot be read as JSON: %s", path, why);
    }
    struct reader r = {.t = mem_alloc(sizeof *r.t), .path = path};
    status st = read_document(&r, &doc);
    json_close(&doc);
    if (st == OK)
        *out = r.t;
    else
        tenants_free(r.t);
    return st;
}

/* Nothing but a plain file, and nobody's but its owner's. */
static status check_file(int fd, const char *path, size_t *bytes)
{
    struct stat s;
    if (fstat(fd, &s) != 0)
        return err(ERR_IO, "%s: %s", path, strerror(errno));
    if (!S_ISREG(s.st_mode))
        return err(ERR_IO, "%s: is not a plain file", path);
    if (s.st_mode & (S_IRWXG | S_IRWXO))
        return err(ERR_IO, "%s: others than its owner may use it (mode %04o); do: chmod 600 %s",
                   path, (unsigned)s.st_mode & 07777, path);
    if (s.st_size > FILE_BYTES)
        return err(ERR_IO, "%s: larger than %d MiB", path, FILE_BYTES >> 20);
    *bytes = (size_t)s.st_size;
    return OK;
}

/* The file's text, NUL-terminated, or as much of it as there is when it is cut meanwhile. */
static status read_text(int fd, const char *path, char **text, size_t *len)
{
    size_t bytes = 0;
    ssize_t n = 1;
    TRY(check_file(fd, path, &bytes));
    char *p = mem_alloc(bytes + 1);
    for (*len = 0; n > 0 && *len < bytes;) {
        n = read(fd, p + *len, bytes - *len);
        *len += n > 0 ? (size_t)n : 0;
    }
    *text = p;
    if (n >= 0)
        return OK;
    status st = err(ERR_IO, "%s: %s", path, strerror(errno));
    mem_free(p);
    return st;
}

status tenants_load(struct tenants **out, const char *path)
{
    char *text;
    size_t len;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a FIFO would block the loop */
    if (fd < 0)
        return err(ERR_IO, "%s: %s", path, strerror(errno));
    status st = read_text(fd, path, &text, &len);
    close(fd);
    if (st != OK)
        return st;
    st = tenants_parse(out, path, text, len);
    mem_free(text);
    return st;
}

void tenants_free(struct tenants *t)
{
    if (t == NULL)
        return;
    mem_free(t->v);
    mem_free(t->keys);
    mem_free(t);
}
