/* Names, numbers and reloads (roster.h). A reload first makes sure that all of it can be done, and only
 * then changes anything. */
#include "api/roster.h"
#include "api/internal.h"
#include "kernels/log.h"

#include <stdio.h>
#include <string.h>

enum { NAMES_TOLD = 8 }; /* in one log line */

/* ---- slots ---- */

static struct roster_slot *find_name(const struct roster *ro, const char *name)
{
    for (uint32_t i = 1; i < MAX_TENANTS; i++)
        if (ro->slots[i] != NULL && strcmp(ro->slots[i]->rules.name, name) == 0)
            return ro->slots[i];
    return NULL;
}

static void mark_due(struct roster *ro, struct roster_slot *s)
{
    ro->n_due += !s->due;
    s->due = true;
}

static void free_slot(struct roster *ro, uint32_t i)
{
    ro->n_due -= ro->slots[i]->due;
    mem_free(ro->slots[i]);
    ro->slots[i] = NULL;
}

/* Numbers of tenants that are in no file and have nothing left to do. */
static void sweep(struct roster *ro)
{
    for (uint32_t i = 1; i < MAX_TENANTS; i++)
        if (ro->slots[i] != NULL && !ro->slots[i]->listed && ro->slots[i]->n_calls == 0)
            free_slot(ro, i);
}

static struct roster_slot *add_slot(struct roster *ro, const struct tenant *t, uint64_t now_us)
{
    uint32_t i = 1;
    while (ro->slots[i] != NULL)
        CHECK(++i < MAX_TENANTS); /* check_room saw that there is one */
    struct roster_slot *s = ro->slots[i] = mem_alloc(sizeof *s);
    s->rules = *t;
    s->number = i;
    s->life = ++ro->lives;
    s->listed = true;
    quota_init(&s->quota, &t->limits, now_us);
    metrics_tenants_init(&s->counts);
    mark_due(ro, s);
    return s;
}

/* ---- what a file changes ---- */

/* A few names of many. */
struct names {
    char text[NAMES_TOLD * (TENANT_NAME_MAX + 2) + 32];
    uint32_t n;
};

static void note(struct names *l, const char *name)
{
    size_t len = strlen(l->text);
    if (l->n++ < NAMES_TOLD)
        snprintf(l->text + len, sizeof l->text - len, "%s%s", len > 0 ? ", " : "", name);
}

static const char *told(struct names *l)
{
    size_t len = strlen(l->text);
    if (l->n > NAMES_TOLD)
        snprintf(l->text + len, sizeof l->text - len, " and %u more", l->n - NAMES_TOLD);
    return l->n > 0 ? l->text : "none";
}

static bool differs(const struct tenant *a, const struct tenant *b)
{
    return a->weight != b->weight || a->priority_low != b->priority_low ||
           a->priority_high != b->priority_high || a->max_tokens != b->max_tokens ||
           memcmp(&a->limits, &b->limits, sizeof a->limits) != 0 ||
           memcmp(a->max_kv_bytes, b->max_kv_bytes, sizeof a->max_kv_bytes) != 0;
}

static bool is_named(const struct tenants *t, const char *name)
{
    for (uint32_t i = 0; i < t->n; i++)
        if (strcmp(t->v[i].name, name) == 0)
            return true;
    return false;
}

/* Tenants that are new need a number each, beside those in use. */
static status check_room(const struct roster *ro, const struct tenants *t)
{
    uint32_t used = 0, fresh = 0;
    for (uint32_t i = 1; i < MAX_TENANTS; i++)
        used += ro->slots[i] != NULL &&
                (ro->slots[i]->n_calls > 0 || is_named(t, ro->slots[i]->rules.name));
    for (uint32_t i = 0; i < t->n; i++)
        fresh += find_name(ro, t->v[i].name) == NULL;
    if (used + fresh < MAX_TENANTS)
        return OK;
    return err(ERR_FULL, "%s: %u tenants are new while %u have numbers, of %d: reload again later",
               ro->path, fresh, used, MAX_TENANTS - 1);
}

/* The slot of a tenant of the file. */
static struct roster_slot *take_tenant(struct roster *ro, const struct tenant *t, uint64_t now_us,
                                       struct names *added, struct names *changed)
{
    struct roster_slot *s = find_name(ro, t->name);
    if (s == NULL) {
        note(added, t->name);
        return add_slot(ro, t, now_us);
    }
    if (!s->listed) /* it was removed, and is back before its last call was over */
        note(added, t->name);
    else if (differs(&s->rules, t))
        note(changed, t->name);
    s->listed = true;
    if (differs(&s->rules, t)) {
        quota_change(&s->quota, &t->limits, now_us);
        s->rules = *t;
        mark_due(ro, s);
    }
    return s;
}

/* Keys of both, by their digests, in whose order both are. */
static uint32_t common_keys(const struct tenants *a, const struct tenants *b)
{
    uint32_t n = 0;
    for (uint32_t i = 0, k = 0; a != NULL && i < a->n_keys && k < b->n_keys;) {
        int c = memcmp(a->keys[i].sha256, b->keys[k].sha256, SHA256_BYTES);
        n += c == 0;
        i += c <= 0;
        k += c >= 0;
    }
    return n;
}

static void take_file(struct roster *ro, struct tenants *t, uint64_t now_us)
{
    struct names added = {0}, removed = {0}, changed = {0};
    for (uint32_t i = 1; i < MAX_TENANTS; i++) {
        struct roster_slot *s = ro->slots[i];
        if (s == NULL || !s->listed || is_named(t, s->rules.name))
            continue;
        s->listed = false;
        note(&removed, s->rules.name);
    }
    sweep(ro);
    for (uint32_t i = 0; i < t->n; i++)
        ro->of_file[i] = take_tenant(ro, &t->v[i], now_us, &added, &changed);
    uint32_t had = ro->file != NULL ? ro->file->n_keys : 0, kept = common_keys(ro->file, t);
    tenants_free(ro->file);
    ro->file = t;
    log_line(LOG_INFO,
             "tenants: %s: %u tenants, %u keys (%u new, %u gone); added: %s; removed: %s; "
             "changed: %s",
             ro->path, t->n, t->n_keys, t->n_keys - kept, had - kept, told(&added), told(&removed),
             told(&changed));
}

/* ---- life ---- */

static status read_file(struct roster *ro, struct auth **auth, uint64_t now_us)
{
    struct tenants *t;
    TRY(tenants_load(&t, ro->path));
    status st = check_room(ro, t);
    if (st != OK) {
        tenants_free(t);
        return st;
    }
    take_file(ro, t, now_us);
    *auth = auth_replace(*auth, t);
    return OK;
}

status roster_create(struct roster **out, const char *path, struct auth **auth, uint64_t now_us)
{
    struct roster *ro = mem_alloc(sizeof *ro);
    ro->path = mem_alloc(strlen(path) + 1);
    memcpy(ro->path, path, strlen(path) + 1);
    status st = read_file(ro, auth, now_us);
    if (st == OK)
        *out = ro;
    else
        roster_destroy(ro);
    return st;
}

void roster_reload(struct roster *ro, struct auth **auth, uint64_t now_us)
{
    if (read_file(ro, auth, now_us) != OK)
        log_line(LOG_WARN, "tenants: nothing has changed: %s", err_text());
}

void roster_destroy(struct roster *ro)
{
    if (ro == NULL)
        return;
    for (uint32_t i = 1; i < MAX_TENANTS; i++)
        mem_free(ro->slots[i]);
    tenants_free(ro->file);
    mem_free(ro->path);
    mem_free(ro);
}

/* ---- who is who ---- */

struct roster_slot *roster_of_key(struct roster *ro, uint32_t place, const char **key)
{
    CHECK(place < ro->file->n_keys);
    const struct tenant_key *k = &ro->file->keys[place];
    *key = k->id;
    return ro->of_file[k->tenant];
}

struct roster_slot *roster_find(struct roster *ro, uint32_t number, uint64_t life)
{
    struct roster_slot *s = number < MAX_TENANTS ? ro->slots[number] : NULL;
    return s != NULL && s->listed && s->life == life ? s : NULL;
}

void roster_count(struct roster *ro, uint32_t number, uint64_t life, int http_status)
{
    struct roster_slot *s = number < MAX_TENANTS ? ro->slots[number] : NULL;
    if (s != NULL && s->life == life && http_status / 100 < TENANT_CODES)
        s->counts.answers[http_status / 100]++;
}

/* ---- the engine ---- */

void roster_hear(struct roster *ro, const struct msg_tenant_state *m)
{
    if (m->tenant < MAX_TENANTS && ro->slots[m->tenant] != NULL)
        ro->slots[m->tenant]->engine = *m;
}

static bool post(const struct roster_slot *s, struct mailbox *mail)
{
    struct msg_tenant *m = mailbox_reserve(mail, TO_ENGINE, sizeof *m);
    if (m == NULL)
        return false;
    *m = (struct msg_tenant){
        .head = {.kind = MSG_TENANT, .bytes = m->head.bytes},
        .tenant = s->number,
        .weight = (float)s->rules.weight,
        .max_running = s->rules.limits.max_running,
        .max_kv_bytes = {s->rules.max_kv_bytes[0], s->rules.max_kv_bytes[1]},
    };
    mailbox_post(mail, TO_ENGINE);
    return true;
}

bool roster_post(struct roster *ro, struct mailbox *mail)
{
    bool posted = false;
    for (uint32_t i = 1; i < MAX_TENANTS && ro->n_due > 0; i++) {
        struct roster_slot *s = ro->slots[i];
        if (s == NULL || !s->due)
            continue;
        if (!post(s, mail))
            break;
        s->due = false;
        ro->n_due--;
        posted = true;
    }
    if (posted)
        mailbox_wake_engine(mail);
    return ro->n_due == 0;
}
