/* The tenants of this process: what the file says (api/tenants.h) and what each has used.
 *
 * A tenant has a number, by which the engine knows it. Numbers begin at 1 (0 is everybody, without
 * --tenants) and stay with a name across reloads. A tenant that the file no longer names is gone for
 * callers at once; its number and its counts stay until its last call is over. Loop thread. */
#ifndef API_ROSTER_H
#define API_ROSTER_H

#include "api/metrics_tenants.h"
#include "api/quota.h"
#include "api/tenants.h"
#include "engine/mailbox.h"

struct auth;

struct roster_slot {
    struct tenant rules; /* as the file has it, or had it */
    struct quota quota;
    struct tenant_counts counts;
    struct msg_tenant_state engine; /* what the engine last said of it */
    uint32_t number;
    uint64_t life;    /* no two tenants of a process have the same */
    uint32_t n_calls; /* that are not over */
    bool listed;      /* in the file */
    bool due;         /* the engine is to be told */
};

struct roster {
    char *path;
    struct tenants *file;                     /* as it was read last */
    struct roster_slot *of_file[TENANTS_MAX]; /* by place in the file */
    struct roster_slot *slots[MAX_TENANTS];   /* by number; NULL: free */
    uint64_t lives;
    uint32_t n_due;
};

/* Reads the file; its keys take the place of those in *auth. */
status roster_create(struct roster **out, const char *path, struct auth **auth, uint64_t now_us);
void roster_destroy(struct roster *ro); /* NULL is allowed */
/* Reads it again: all of it counts from now on, or nothing of it does. Logs what has changed, or why
 * nothing has. */
void roster_reload(struct roster *ro, struct auth **auth, uint64_t now_us);

/* Whose key has this place; `key` is its id. */
struct roster_slot *roster_of_key(struct roster *ro, uint32_t place, const char **key);
/* NULL: the tenant was removed meanwhile. */
struct roster_slot *roster_find(struct roster *ro, uint32_t number, uint64_t life);
/* It was answered. Of a tenant that was removed meanwhile nobody counts any more. */
void roster_count(struct roster *ro, uint32_t number, uint64_t life, int http_status);
/* The engine has spoken of a tenant. */
void roster_hear(struct roster *ro, const struct msg_tenant_state *m);
/* Tells the engine what it must know; false: the mailbox is full now. */
bool roster_post(struct roster *ro, struct mailbox *mail);

#endif
