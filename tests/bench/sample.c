/* How long does one row of sampling take? 49,152 logits, one thread, best of many, in its own CPU
 * time: right even on a busy machine. Aims: greedy 10 us, temperature 100, top_p 300. */
#include "kernels/cpu/cpu.h"

#include <stdio.h>
#include <time.h>

enum { VOCAB = 49152, RUNS = 300 };

static double best_us(struct cpu_backend *b, const float *logits, struct sample_row r)
{
    double best = 1e30;
    for (uint32_t i = 0; i < RUNS; i++) {
        struct timespec t0, t1;
        r.position = i;
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t0);
        cpu_sample(&b->base, &(struct sample_args){logits, VOCAB, 1, &r});
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t1);
        double us = (double)(t1.tv_sec - t0.tv_sec) * 1e6 + (double)(t1.tv_nsec - t0.tv_nsec) / 1e3;
        best = us < best ? us : best;
    }
    return best;
}

int main(int argc, char **argv)
{
    (void)argv;
    static float logits[2][VOCAB]; /* peaked as a model's, and flat */
    static const char *const names[] = {
        "greedy",   "greedy, 20 logprobs", "temperature",  "top_p 0.9",
        "top_k 50", "min_p 0.05",          "all of these", "repetition over 2,000"};
    struct cpu_backend b = {.isa = argc > 1 ? ISA_SCALAR : ISA_AVX512};
    uint32_t seed = 1, history[2000];
    CHECK(pool_create(&b.pool, 1, false) == OK && cpu_sample_open(&b) == OK);
    for (uint32_t i = 0; i < VOCAB; i++) {
        float x = 0;
        for (int k = 0; k < 6; k++)
            x += (float)((seed = seed * 1664525u + 1013904223u) >> 8) / 8388608.0f - 1;
        logits[0][i] = x * 2.5f;
        logits[1][i] = x * 0.05f;
    }
    for (uint32_t i = 0; i < ARRAY_LEN(history); i++)
        history[i] = i * 17 % VOCAB;
    printf("%-24s %10s %10s   us per row of %d\n", "", "peaked", "flat", VOCAB);
    for (uint32_t c = 0; c < ARRAY_LEN(names); c++) {
        struct sample_row r = {.target = SAMPLE_DRAW, .n_top = c == 1 ? 20 : -1};
        r.params = (struct sample_params){.temperature = c < 2 ? 0 : 0.8f,
                                          .top_p = c == 3 || c == 6 ? 0.9f : 1,
                                          .top_k = c == 4 || c == 6 ? 50 : 0,
                                          .min_p = c == 5 || c == 6 ? 0.05f : 0,
                                          .repetition_penalty = c == 7 ? 1.1f : 1,
                                          .seed = 3};
        r.history = history;
        r.n_history = ARRAY_LEN(history);
        printf("%-24s %10.1f %10.1f\n", names[c], best_us(&b, logits[0], r),
               best_us(&b, logits[1], r));
    }
    cpu_sample_close(&b);
    pool_destroy(b.pool);
    return 0;
}
