/* What a load is: who asks when, how much. Every workload is a row of these numbers. */
#ifndef API_LOAD_SPEC_H
#define API_LOAD_SPEC_H

#include "kernels/base.h"

struct load_spec {
    const char *name;
    uint32_t users; /* each asks `turns` times, one after the other */
    uint32_t turns;
    bool insists;      /* for ever: what fails or is refused is asked again after a second */
    bool keeps;        /* a prompt holds the user's document and all that was said before */
    double rate;       /* > 0: users arrive so many a second, with exponential gaps (Poisson) */
    double stagger;    /* rate 0: seconds between two users' arrivals */
    double pause;      /* seconds after an answer, the last one too */
    uint32_t shared;   /* tokens at the start of every prompt, the same for all users */
    uint32_t document; /* of each user's own, behind them */
    uint32_t in, out;  /* new tokens of a turn; tokens of its answer */
    uint32_t seed;
    uint32_t first_id, last_id; /* ids are drawn from [first_id, last_id) */

    bool text, chat;           /* prompts as text, not ids; to /v1/chat/completions */
    const char *model, *extra; /* of the body: a name, members as in {...}; NULL: none */
    double temperature;
    double slo_ttft_us, slo_tpot_us; /* goodput; 0: none */
};

#endif
