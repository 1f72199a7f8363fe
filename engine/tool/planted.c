#include "engine/tool/planted.h"

#include "kernels/core/splitmix.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { DIM = PLANTED_DIM, OUTLIER_CHANNELS = 3, SINKS = 16, PAGE = 16, CLUSTERS = 64 };
enum mode { RUNS, SCATTERED, HIDDEN, WIDE, DISAGREE, OOD, UNEVEN, FLAT, MODES };

static const char *const names[MODES] = {"runs",     "scattered", "hidden", "wide",
                                         "disagree", "ood",       "uneven", "flat"};

uint32_t planted_count(void)
{
    return MODES;
}

const char *planted_name(uint32_t i)
{
    return names[i];
}

float planted_normal(uint64_t *random)
{
    double a = (double)((splitmix_next(random) >> 11) + 1) * 0x1p-53;
    double b = (double)(splitmix_next(random) >> 11) * 0x1p-53;
    return (float)(sqrt(-2 * log(a)) * cos(6.283185307179586 * b));
}

static uint32_t draw(uint64_t *random, uint32_t n)
{
    return (uint32_t)((splitmix_next(random) >> 32) * n >> 32);
}

static float dot(const float *a, const float *b)
{
    double sum = 0;
    for (int i = 0; i < DIM; i++)
        sum += (double)a[i] * (double)b[i];
    return (float)sum;
}

static void add(float *to, const float *v, float by)
{
    for (int i = 0; i < DIM; i++)
        to[i] += by * v[i];
}

/* A topic that drifts over some hundred positions, channels with a large constant, and noise. */
static void background(float *k, uint32_t n, enum mode mode, uint64_t *random)
{
    float topic[DIM] = {0}, channel[DIM] = {0}, centre[CLUSTERS][DIM];
    for (int i = 0; i < OUTLIER_CHANNELS; i++)
        channel[draw(random, DIM)] = draw(random, 2) ? 8 : -8;
    for (int i = 0; i < CLUSTERS * DIM; i++)
        centre[i / DIM][i % DIM] = planted_normal(random);
    for (uint32_t p = 0; p < n; p++) {
        float *row = k + (size_t)p * DIM;
        /* Cluster c with a share of about 1 / 2^c of what is left, c < 64. */
        uint32_t c = (uint32_t)__builtin_clzll(splitmix_next(random) | 1);
        for (int i = 0; i < DIM; i++) {
            topic[i] = 0.995f * topic[i] + 0.1f * planted_normal(random);
            row[i] = (mode == UNEVEN ? 1.5f * centre[c % CLUSTERS][i] : topic[i]) + channel[i] +
                     0.5f * planted_normal(random);
        }
    }
}

static int ascending(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

/* Positions of one target; never two targets on one position. */
static void place(uint32_t *at, uint8_t *taken, uint32_t n, enum mode mode, uint64_t *random)
{
    for (uint32_t i = 0; i < PLANTED_TOKENS; i++) {
        uint32_t p =
            mode == RUNS && i % 4 != 0 ? at[i - 1] + 1 : SINKS + draw(random, n - 64 - SINKS);
        while (taken[p])
            p = SINKS + draw(random, n - 64 - SINKS);
        taken[p] = 1;
        at[i] = p;
    }
    qsort(at, PLANTED_TOKENS, sizeof *at, ascending);
}

/* log of the attention mass of everything that is there. */
static double log_mass(const float *k, uint32_t n, const float *q)
{
    double max = -HUGE_VAL, sum = 0;
    for (uint32_t p = 0; p < n; p++) {
        double s = (double)dot(q, k + (size_t)p * DIM) / sqrt(DIM);
        if (s > max) {
            sum = sum * exp(max - s) + 1;
            max = s;
        } else {
            sum += exp(s - max);
        }
    }
    return max + log(sum);
}

/* Two rows of every page far apart along an axis that this query does not look at. */
static void widen_pages(float *k, uint32_t n, uint64_t *random)
{
    for (uint32_t p = 0; p + PAGE <= n; p += PAGE) {
        float axis[DIM];
        for (int i = 0; i < DIM; i++)
            axis[i] = planted_normal(random);
        add(k + (size_t)(p + draw(random, PAGE / 2)) * DIM, axis, 3);
        add(k + (size_t)(p + PAGE / 2 + draw(random, PAGE / 2)) * DIM, axis, -3);
    }
}

static void make_axis(float *q, const float *k, enum mode mode, uint64_t *random)
{
    for (int i = 0; i < DIM; i++)
        q[i] = planted_normal(random) * 1.5f;
    if (mode != OOD)
        return;
    /* Away from where keys are: a softmax does not see what it subtracts from every score. */
    float unit[DIM], length = sqrtf(dot(k, k));
    for (int i = 0; i < DIM; i++)
        unit[i] = k[i] / length;
    add(q, unit, -dot(q, unit) - 12);
}

/* Moves the planted keys along the query until each holds its part of the attention. */
static void plant(struct planted *p, uint32_t head, uint32_t target, uint32_t h, double share,
                  enum mode mode)
{
    size_t which = planted_target(head, target, h);
    float *k = p->k + (size_t)head * p->n * DIM, *q = p->axis + which * DIM, square = dot(q, q);
    double all = log_mass(k, p->n, q);
    double wanted = all + log(share / (1 - share)) - log((double)PLANTED_TOKENS);
    for (uint32_t i = 0; i < PLANTED_TOKENS; i++) {
        uint32_t at = p->at[which * PLANTED_TOKENS + i];
        float *row = k + (size_t)at * DIM;
        float by = ((float)wanted * sqrtf(DIM) - dot(q, row)) / square;
        add(row, q, by);
        for (uint32_t j = at / PAGE * PAGE; mode == HIDDEN && j < at / PAGE * PAGE + PAGE; j++)
            if (j != at && j < p->n)
                add(k + (size_t)j * DIM, q, -by / (PAGE - 1));
    }
}

static void make_head(struct planted *p, uint32_t head, enum mode mode, double share,
                      uint64_t *random)
{
    float *k = p->k + (size_t)head * p->n * DIM;
    uint8_t *taken = mem_alloc(p->n);
    background(k, p->n, mode, random);
    if (mode == WIDE)
        widen_pages(k, p->n, random);
    for (uint32_t t = 0; t < PLANTED_TARGETS; t++)
        for (uint32_t h = 0; h < PLANTED_GROUP; h++) {
            size_t at = planted_target(head, t, h), first = planted_target(head, t, 0);
            if (h == 0 || mode == DISAGREE) {
                make_axis(p->axis + at * DIM, k, mode, random);
                place(p->at + at * PLANTED_TOKENS, taken, p->n, mode, random);
            } else {
                memcpy(p->axis + at * DIM, p->axis + first * DIM, DIM * sizeof(float));
                memcpy(p->at + at * PLANTED_TOKENS, p->at + first * PLANTED_TOKENS,
                       PLANTED_TOKENS * sizeof *p->at);
            }
        }
    for (uint32_t t = 0; t < PLANTED_TARGETS && mode != FLAT; t++)
        for (uint32_t h = 0; h < (mode == DISAGREE ? PLANTED_GROUP : 1); h++)
            plant(p, head, t, h, share, mode);
    mem_free(taken);
}

status planted_make(struct planted *p, const char *mode, uint32_t n, double share, uint64_t seed)
{
    enum mode m = 0;
    size_t targets = planted_target(PLANTED_KV_HEADS, 0, 0);
    while (m < MODES && strcmp(names[m], mode) != 0)
        m++;
    if (m == MODES)
        return err(ERR_ARG,
                   "unknown mode \"%s\"; there are runs, scattered, hidden, wide, disagree, "
                   "ood, uneven, flat",
                   mode);
    *p = (struct planted){.n = n, .n_tokens = m == FLAT ? 0 : PLANTED_TOKENS};
    p->k = mem_try_alloc((size_t)PLANTED_KV_HEADS * n * DIM * sizeof *p->k);
    if (p->k == NULL)
        return err(ERR_MEMORY, "a trace of %u positions", n);
    p->axis = mem_alloc(targets * DIM * sizeof *p->axis);
    p->at = mem_alloc(targets * PLANTED_TOKENS * sizeof *p->at);
    uint64_t random = seed * 0x9e3779b97f4a7c15u + m;
    for (uint32_t head = 0; head < PLANTED_KV_HEADS; head++)
        make_head(p, head, m, share, &random);
    return OK;
}

void planted_fini(struct planted *p)
{
    mem_free(p->k);
    mem_free(p->axis);
    mem_free(p->at);
    *p = (struct planted){0};
}
