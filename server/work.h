/* Helper threads for what is too long for the loop: libuv's pool, with a bound on the queue. */
#ifndef SERVER_WORK_H
#define SERVER_WORK_H

#include <uv.h>

#include "api/exchange.h" /* exchange_work, which work.c implements */

enum { WORK_QUEUE_MAX = 256 };

void work_init(uv_loop_t *loop);

#endif
