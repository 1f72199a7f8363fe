/* Python's random.Random(seed), number for number (MT19937, Matsumoto and Nishimura 1998, seeded by
 * init_by_array as CPython does): so a workload of shared/peer/vllm_longctx.py has here the arrivals and
 * the prompts that it has there. */
#ifndef API_LOAD_RANDOM_H
#define API_LOAD_RANDOM_H

#include "kernels/base.h"

enum { RANDOM_WORDS = 624 };

struct random {
    uint32_t state[RANDOM_WORDS];
    uint32_t at; /* RANDOM_WORDS: all of the state is used up */
};

void random_init(struct random *r, uint32_t seed);
uint32_t random_bits(struct random *r);                   /* 32 of them */
double random_unit(struct random *r);                     /* random(): [0, 1) */
uint32_t random_below(struct random *r, uint32_t n);      /* randrange(n), n > 0 */
double random_exponential(struct random *r, double rate); /* expovariate(rate) */

#endif
