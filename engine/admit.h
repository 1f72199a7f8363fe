/* Who leaves the queue, for a seat and blocks: the first part of every plan (sched.h, which says by what rules).
 * Engine thread only.
 *
 * Two questions apart. Whose turn it is: of the tenant that was served least (tenant.h) its first, by priority and
 * order; a tenant that is at a bound of its own is passed over. And whether that one fits: it is opened with what
 * the prefix cache has of it, and weighed beside what those that run will still need (residence.h). The first
 * that does not fit holds back everybody behind it. */
#ifndef ENGINE_ADMIT_H
#define ENGINE_ADMIT_H

#include "engine/sched.h"

/* Arguments as sched_plan's. */
void admit_waiting(struct sched *s, uint64_t now_us,
                   void (*admitted)(void *arg, struct sequence *q),
                   void (*refuse)(void *arg, struct sequence *q, status why), void *arg);

#endif
