#include "api/load/random.h"

#include <math.h>

enum { FAR = 397 }; /* the recurrence looks so many words ahead */

static void seed_plainly(struct random *r, uint32_t seed)
{
    r->state[0] = seed;
    for (uint32_t i = 1; i < RANDOM_WORDS; i++)
        r->state[i] = 1812433253u * (r->state[i - 1] ^ (r->state[i - 1] >> 30)) + i;
}

/* init_by_array with the one word that a seed below 2^32 is. */
void random_init(struct random *r, uint32_t seed)
{
    uint32_t *s = r->state, i = 1;
    seed_plainly(r, 19650218u);
    for (uint32_t k = 0; k < RANDOM_WORDS; k++) {
        s[i] = (s[i] ^ ((s[i - 1] ^ (s[i - 1] >> 30)) * 1664525u)) + seed;
        if (++i == RANDOM_WORDS) {
            s[0] = s[RANDOM_WORDS - 1];
            i = 1;
        }
    }
    for (uint32_t k = 1; k < RANDOM_WORDS; k++) {
        s[i] = (s[i] ^ ((s[i - 1] ^ (s[i - 1] >> 30)) * 1566083941u)) - i;
        if (++i == RANDOM_WORDS) {
            s[0] = s[RANDOM_WORDS - 1];
            i = 1;
        }
    }
    s[0] = 0x80000000u;
    r->at = RANDOM_WORDS;
}

static void next_state(struct random *r)
{
    uint32_t *s = r->state;
    for (uint32_t i = 0; i < RANDOM_WORDS; i++) {
        uint32_t y = (s[i] & 0x80000000u) | (s[(i + 1) % RANDOM_WORDS] & 0x7fffffffu);
        s[i] = s[(i + FAR) % RANDOM_WORDS] ^ (y >> 1) ^ (y & 1 ? 0x9908b0dfu : 0);
    }
    r->at = 0;
}

uint32_t random_bits(struct random *r)
{
    if (r->at == RANDOM_WORDS)
        next_state(r);
    uint32_t y = r->state[r->at++];
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c5680u;
    y ^= (y << 15) & 0xefc60000u;
    return y ^ (y >> 18);
}

double random_unit(struct random *r)
{
    uint32_t a = random_bits(r) >> 5, b = random_bits(r) >> 6;
    return (a * 67108864.0 + b) / 9007199254740992.0;
}

uint32_t random_below(struct random *r, uint32_t n)
{
    uint32_t bits = 0, x;
    CHECK(n > 0);
    while (bits < 32 && n >> bits != 0)
        bits++;
    do
        x = random_bits(r) >> (32 - bits);
    while (x >= n);
    return x;
}

double random_exponential(struct random *r, double rate)
{
    return -log(1.0 - random_unit(r)) / rate;
}
