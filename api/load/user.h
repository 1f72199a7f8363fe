/* Users of a load: each arrives, asks over a connection of its own, reads, pauses and asks again. */
#ifndef API_LOAD_USER_H
#define API_LOAD_USER_H

#include "api/load/random.h"
#include "api/load/spec.h"
#include "api/load/tally.h"
#include "api/load/wire.h"

struct user;

/* What the users of a run share. */
struct crowd {
    uv_loop_t *loop;
    const struct load_spec *spec;
    const struct wire_target *target;
    uint32_t prompts;     /* which ones: those of the seed, or others that come at the same times */
    struct random random; /* arrivals first, then documents, then turns as they begin */
    struct tally *tally;
    struct user *users;   /* [spec->users] */
    uint32_t n_left;      /* users that have not ended */
    struct crowd *beside; /* stops when nobody is left here; NULL: nobody is beside */
    uint32_t n_asking;
    uint32_t *shared; /* [spec->shared] ids */
};

/* Draws arrivals and documents; nothing runs yet. */
void user_crowd_init(struct crowd *c);
/* Second 0 is after_us from now. */
void user_crowd_start(struct crowd *c, uint64_t after_us);
void user_crowd_stop(struct crowd *c); /* forgets open requests: they are counted as such */
void user_crowd_fini(struct crowd *c); /* after the loop has ended */

#endif
