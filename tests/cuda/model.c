/* The default model on both backends: the same logits but for the rounding of bf16, and the same text.
 *
 * A prompt of 300 random tokens, then 64 steps that both feed with the CPU's greedy choice, so that every
 * step compares like with like; once in pieces that fit no tile, with other sequences of other lengths
 * beside it. What one stream and 16 decode per second is told, not judged. */
#include "kernels/cuda_api.h"
#include "tests/model_rig.h"
#include "tests/tap.h"

#include <math.h>

enum { PROMPT = 300, DECODES = 64, SEQS = 16, R = 16, POSITIONS = 1024 };

/* Behind random tokens many likely ones are close together, so rounding may swap the first two. */
static const double MEAN_KL = 2e-3, SAME = 0.9;

struct side {
    struct backend *be;
    struct model *m;
    struct rig rig;
    float *logits; /* host, [RIG_MAX_PARTS][vocab]: of the last step */
};

static struct side cpu, gpu;
static uint32_t vocab;

static void side_open(struct side *s)
{
    rig_must(model_load(&s->m, s->be, rig_model_path(), POSITIONS));
    vocab = model_info(s->m)->shape.vocab;
    rig_must(model_reserve(s->m, RIG_MAX_ROWS, RIG_MAX_PARTS));
    rig_open(&s->rig, s->be, s->m, R, SEQS, POSITIONS);
    s->logits = mem_alloc((size_t)RIG_MAX_PARTS * vocab * sizeof *s->logits);
}

static void side_close(struct side *s)
{
    rig_close(&s->rig);
    model_destroy(s->m);
    s->be->ops->close(s->be);
    mem_free(s->logits);
}

/* A step whose parts want the logits of their last rows. */
static void step(struct side *s, const struct rig_part *parts, uint32_t n)
{
    uint32_t last[RIG_MAX_PARTS], rows = 0;
    for (uint32_t i = 0; i < n; i++) {
        rows += parts[i].n;
        last[i] = rows - 1;
    }
    const float *logits = rig_step(&s->rig, parts, n, last, n);
    s->be->ops->copy(s->be, s->logits, logits, (size_t)n * vocab * sizeof *logits);
    rig_must(s->be->ops->sync(s->be));
}

static uint32_t best(const float *logits)
{
    uint32_t at = 0;
    for (uint32_t i = 1; i < vocab; i++)
        if (logits[i] > logits[at])
            at = i;
    return at;
}

static double log_sum(const float *logits)
{
    double max = (double)logits[best(logits)], sum = 0;
    for (uint32_t i = 0; i < vocab; i++)
        sum += exp((double)logits[i] - max);
    return max + log(sum);
}

/* KL(cpu || gpu) in nats; NaN if either has one. */
static double kl(const float *p, const float *q)
{
    double zp = log_sum(p), zq = log_sum(q), sum = 0;
    for (uint32_t i = 0; i < vocab; i++) {
        double lp = (double)p[i] - zp, lq = (double)q[i] - zq;
        sum += exp(lp) * (lp - lq);
    }
    return sum;
}

struct tally {
    double sum, worst;
    uint32_t n, same;
};

static void compare(struct tally *t, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        const float *p = cpu.logits + (size_t)i * vocab, *q = gpu.logits + (size_t)i * vocab;
        double d = kl(p, q);
        t->sum += d;
        t->worst = d <= t->worst ? t->worst : d; /* NaN stays */
        t->same += best(p) == best(q);
        t->n++;
    }
}

static void judge(const struct tally *t, const char *what)
{
    double mean = t->sum / t->n, same = (double)t->same / t->n;
    printf("# %s: %u positions, mean KL %.2e, largest %.2e, same most likely token %.1f %%\n", what,
           t->n, mean, t->worst, 100 * same);
    ok(mean < MEAN_KL, "%s: the mean KL divergence from the CPU is below %g", what, MEAN_KL);
    ok(same > SAME, "%s: more than %g %% have the same most likely token", what, 100 * SAME);
}

static uint32_t tokens[SEQS][POSITIONS];
static uint32_t length[SEQS];

static void both(const struct rig_part *parts, uint32_t n)
{
    step(&cpu, parts, n);
    step(&gpu, parts, n);
}

static void take_tokens(uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        tokens[i][length[i]++] = best(cpu.logits + (size_t)i * vocab);
}

static void decode(struct tally *t, uint32_t n, uint32_t steps)
{
    for (uint32_t s = 0; s < steps; s++) {
        struct rig_part parts[SEQS];
        for (uint32_t i = 0; i < n; i++)
            parts[i] = (struct rig_part){
                .seq = i, .first_pos = length[i] - 1, .n = 1, .tokens = &tokens[i][length[i] - 1]};
        both(parts, n);
        compare(t, n);
        take_tokens(n);
    }
}

static void one_stream(void)
{
    struct tally t = {0};
    const struct rig_part prompt = {.n = PROMPT, .tokens = tokens[0]};
    length[0] = PROMPT;
    both(&prompt, 1);
    compare(&t, 1);
    take_tokens(1);
    decode(&t, 1, DECODES);
    judge(&t, "a prompt of 300 and 64 steps");
}

/* Sequence i has 1 + 19 i tokens of prompt, all of them in two steps of uneven pieces. */
static void many_streams(void)
{
    struct tally t = {0};
    struct rig_part parts[SEQS];
    for (int half = 0; half < 2; half++) {
        uint32_t n = 0;
        for (uint32_t i = 0; i < SEQS; i++) {
            uint32_t all = 1 + 19 * i, cut = all * 3 / 7;
            uint32_t from = half == 0 ? 0 : cut, to = half == 0 ? cut : all;
            length[i] = all;
            if (to > from)
                parts[n++] = (struct rig_part){
                    .seq = i, .first_pos = from, .n = to - from, .tokens = tokens[i] + from};
        }
        both(parts, n);
        compare(&t, n);
    }
    take_tokens(SEQS);
    decode(&t, SEQS, 4);
    judge(&t, "16 prompts of 1 to 286 in two pieces, and 4 steps");
}

/* Greedy, with sampling, as a step of the engine. */
static void speed(uint32_t n)
{
    enum { WARM = 8, STEPS = 64 };
    static struct sample_row rows[SEQS];
    struct rig_part parts[SEQS];
    uint64_t start = 0;
    for (uint32_t s = 0; s < WARM + STEPS; s++) {
        uint32_t last[SEQS];
        if (s == WARM)
            start = clock_us();
        for (uint32_t i = 0; i < n; i++) {
            uint32_t at = PROMPT + s;
            parts[i] =
                (struct rig_part){.seq = i, .first_pos = at, .n = 1, .tokens = &tokens[i][at]};
            last[i] = i;
            rows[i] = (struct sample_row){.params = {.top_p = 1, .repetition_penalty = 1},
                                          .logits_row = i,
                                          .target = SAMPLE_DRAW,
                                          .n_top = -1};
        }
        const float *logits = rig_step(&gpu.rig, parts, n, last, n);
        const struct sample_args a = {.logits = logits, .vocab = vocab, .n_rows = n, .rows = rows};
        gpu.be->ops->sample(gpu.be, &a);
        rig_must(gpu.be->ops->sync(gpu.be));
    }
    double us = (double)(clock_us() - start) / STEPS;
    printf("# %u stream%s behind %d positions: %.0f us a step, %.0f tokens/s\n", n,
           n == 1 ? "" : "s", PROMPT, us, n * 1e6 / us);
}

int main(void)
{
    const struct cpu_options usual = {.isa = "auto"};
    rig_must(cpu_backend_open(&cpu.be, &usual));
    rig_must(spind_cuda_open(&gpu.be, 0));
    printf("# %s\n# %s\n", cpu.be->ops->describe(cpu.be), gpu.be->ops->describe(gpu.be));
    side_open(&cpu);
    side_open(&gpu);
    srand(1);
    for (uint32_t i = 0; i < SEQS; i++)
        for (uint32_t j = 0; j < POSITIONS; j++)
            tokens[i][j] = 100 + (uint32_t)rand() % 39900;
    one_stream();
    many_streams();
    speed(1);
    speed(SEQS);
    side_close(&cpu);
    side_close(&gpu);
    return tap_done();
}
