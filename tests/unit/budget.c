/* Budgets: curves predict what a replay at another size then misses, and shares are the best there
 * are, within what hysteresis allows. */
#include "cache/budget.h"

#include "kernels/core/hot_set.h"
#include "tests/tap.h"
#include "tests/trace_rig.h"

enum { WARM_UP = 32 };

static uint64_t seed = 4;

static uint32_t below(uint32_t n)
{
    return (uint32_t)((splitmix_next(&seed) >> 32) * n >> 32);
}

/* ---- curves ---- */

static double bucketed(const struct replay_lane *l, uint32_t slots, uint32_t epoch_steps,
                       uint32_t *histogram)
{
    struct replay_args a = {REPLAY_BUCKETED, slots, WARM_UP, epoch_steps};
    struct replay_count n;
    CHECK(replay_run(l, &a, &n, histogram) == OK);
    return (double)n.misses / (double)n.touches;
}

/* Greatest error of the curve made at `at` times the selected set, over 1x .. 6x, in points. */
static double curve_error(const struct trace_shape *s, uint32_t at, uint32_t epoch_steps)
{
    uint32_t begin =
        epoch_steps < 3 ? epoch_steps : 3; /* below an epoch's pages a curve is a straight line */
    uint32_t histogram[HOT_AGES] = {0};
    double worst = 0;
    struct replay_lane l = rig_trace(s);
    struct miss_curve c;
    (void)bucketed(&l, at * s->n_pick, epoch_steps, histogram);
    miss_curve_make(&c, histogram, (double)s->n_pick * epoch_steps);
    printf("# %u of %u pages, epochs of %u, seen at %ux: predicted / replayed", s->n_pick,
           s->n_pages, epoch_steps, at);
    for (uint32_t m = begin; m <= 6; m++) {
        double want = bucketed(&l, m * s->n_pick, epoch_steps, NULL);
        double got = (double)miss_curve_at(&c, (float)(m * s->n_pick));
        printf("  %.1f / %.1f", 100 * got, 100 * want);
        worst = fabs(got - want) > worst ? fabs(got - want) : worst;
    }
    printf("\n");
    rig_trace_free(&l);
    return 100 * worst;
}

static void curves_predict(void)
{
    static const struct trace_shape shapes[] = {{896, 45, 256, 1.0, 0.7, 0.8, 0.97, 0.3, 1},
                                                {896, 18, 256, 1.0, 0.7, 0.8, 0.97, 0.3, 2},
                                                {896, 90, 256, 1.0, 0.7, 0.7, 0.97, 0.3, 3},
                                                {896, 45, 256, 0.5, 1.0, 0.5, 0.99, 0.3, 4},
                                                {4096, 102, 256, 1.0, 0.7, 0.8, 0.97, 0.3, 5}};
    double worst = 0;
    for (uint32_t i = 0; i < ARRAY_LEN(shapes); i++)
        for (uint32_t at = 1; at <= 5; at += 2) {
            double e = curve_error(&shapes[i], at, 1);
            worst = e > worst ? e : worst;
        }
    ok(worst < 2, "predicted from one size and replayed at others: at most %.2f points apart",
       worst);
    for (uint32_t steps = 2; steps <= 4; steps *= 2) {
        double wide = curve_error(&shapes[0], 3, steps);
        ok(wide < 2, "with epochs of %u steps: %.2f points", steps, wide);
    }
}

/* A sequence has one curve for lanes that differ: two calm ones, a usual one and a restless one. */
static void one_curve_serves_different_lanes(void)
{
    static const struct trace_shape lanes[] = {{896, 45, 256, 0.5, 1.0, 0.5, 0.99, 0.3, 11},
                                               {896, 45, 256, 1.0, 0.7, 0.8, 0.97, 0.3, 12},
                                               {896, 45, 256, 1.0, 0.7, 0.4, 0.97, 0.3, 13},
                                               {896, 45, 256, 0.5, 0.8, 1.0, 0.95, 0.0, 14}};
    struct hot_lane_stats stats[4] = {0};
    double miss[6] = {0}, worst = 0;
    struct miss_curve c;
    for (uint32_t i = 0; i < ARRAY_LEN(lanes); i++) {
        struct replay_lane l = rig_trace(&lanes[i]);
        for (uint32_t m = 1; m <= 6; m++)
            miss[m - 1] +=
                bucketed(&l, m * 45, 1, m == 3 ? stats[i].distance : NULL) / ARRAY_LEN(lanes);
        rig_trace_free(&l);
    }
    miss_curve_lanes(&c, stats, 4, 256 - WARM_UP);
    printf("# four unlike lanes: predicted / replayed");
    for (uint32_t m = 1; m <= 6; m++) {
        double got = (double)miss_curve_at(&c, (float)(m * 45));
        printf("  %.1f / %.1f", 100 * got, 100 * miss[m - 1]);
        worst = fabs(got - miss[m - 1]) > worst ? fabs(got - miss[m - 1]) : worst;
    }
    printf("\n");
    ok(worst < 0.02, "lanes that differ share a curve: at most %.2f points apart", 100 * worst);
}

static void curves_are_hulls(void)
{
    bool good = true;
    for (uint32_t round = 0; round < 500; round++) {
        uint32_t h[HOT_AGES];
        struct miss_curve c;
        for (uint32_t i = 0; i < HOT_AGES; i++)
            h[i] = below(4) ? below(100) : 1000 * below(10);
        h[1 + below(63)] += 1;
        miss_curve_make(&c, h, 1 + below(200));
        good &= c.n >= 2 && c.n <= CURVE_POINTS && c.size[0] == 0 && c.miss[0] == 1;
        for (uint32_t i = 1; i < c.n; i++)
            good &= c.size[i] > c.size[i - 1] && c.miss[i] <= c.miss[i - 1];
        for (uint32_t i = 2; i < c.n; i++)
            good &= (c.miss[i - 1] - c.miss[i - 2]) * (c.size[i] - c.size[i - 1]) <=
                    (c.miss[i] - c.miss[i - 1]) * (c.size[i - 1] - c.size[i - 2]) + 1e-5f;
    }
    ok(good, "sizes ascend, misses fall, by less and less");
    uint32_t none[HOT_AGES] = {0}, h[HOT_AGES] = {0};
    struct miss_curve c;
    miss_curve_make(&c, none, 10);
    ok(c.n == 0 && miss_curve_at(&c, 100) == 1, "nothing seen: no curve, everything misses");
    h[1] = 8;
    h[63] = 2;
    miss_curve_make(&c, h, 10);
    ok(fabsf(miss_curve_at(&c, 10) - 0.2f) < 1e-6f && fabsf(miss_curve_at(&c, 5) - 0.6f) < 1e-6f &&
           fabsf(miss_curve_at(&c, 1e6f) - 0.2f) < 1e-6f,
       "eight of ten pages come back at once: ten slots save them all, five half of them");
}

/* ---- shares ---- */

enum { CLAIMS = 12 };

static struct miss_curve curves[CLAIMS];

static void random_curve(struct miss_curve *c)
{
    uint32_t h[HOT_AGES];
    double fall = 0.3 + 0.01 * below(60);
    for (uint32_t i = 0; i < HOT_AGES; i++)
        h[i] = i == 0 ? 0 : (uint32_t)(pow(fall, i) * 1000) + below(5);
    h[63] += below(30);
    miss_curve_make(c, h, 10 + below(90));
}

static struct budget_claim random_claim(struct miss_curve *c)
{
    random_curve(c);
    uint32_t min = 10 + below(60), preset = min + below(200), max = preset + below(600);
    return (struct budget_claim){.curve = below(4) ? c : NULL,
                                 .min = min,
                                 .preset = preset,
                                 .max = max,
                                 .now = below(3) ? min + below(max - min + 1) : 0,
                                 .weight = (float)(1 + below(8)) / 2,
                                 .bytes_per_miss_ratio = (float)(1000 + below(100000))};
}

static uint32_t random_claims(struct budget_claim *claims)
{
    uint32_t n = 1 + below(CLAIMS), minima = 0, most = 0;
    for (uint32_t i = 0; i < n; i++) {
        claims[i] = random_claim(&curves[i]);
        minima += claims[i].min;
        most += claims[i].max;
    }
    return minima + below(most - minima + 100);
}

static uint32_t count_of(const struct budget_claim *claims)
{
    uint32_t n = 0;
    while (n < CLAIMS && claims[n].weight > 0)
        n++;
    return n;
}

static void shares_keep_their_bounds(void)
{
    bool fits = true, least = true, most = true, steps = true, held = true;
    for (uint32_t round = 0; round < 5000; round++) {
        struct budget_claim c[CLAIMS] = {0};
        uint32_t total = random_claims(c), n = count_of(c);
        uint64_t sum = 0, before = 0, targets = 0;
        CHECK(budget_share(c, n, total, 0) == OK);
        for (uint32_t i = 0; i < n; i++) {
            sum += c[i].granted;
            targets += c[i].target;
            before += c[i].now;
        }
        fits &= sum <= total && targets <= total;
        for (uint32_t i = 0; i < n; i++) {
            uint32_t g = c[i].granted, now = c[i].now, step = now / 8 > 16 ? now / 8 : 16;
            least &= g >= c[i].min && c[i].target >= c[i].min;
            most &= g <= c[i].max && c[i].target <= c[i].max;
            if (now == 0 || now < c[i].min || now > c[i].max || before > total)
                continue;
            steps &= g <= now + step && (g + step >= now || sum == total || g == c[i].target);
            held &= g <= now || c[i].target > now;
        }
    }
    ok(fits, "the sum never exceeds the total");
    ok(least && most, "nobody gets less than the minimum or more than the maximum");
    ok(steps, "a change is at most an eighth, or 16");
    ok(held, "nobody moves away from the target");
}

static void what_is_free_is_given_at_once(void)
{
    bool bounded = true, no_less = true, all = true;
    uint32_t jumps = 0;
    for (uint32_t round = 0; round < 5000; round++) {
        struct budget_claim a[CLAIMS] = {0}, b[CLAIMS];
        uint32_t total = random_claims(a), n = count_of(a);
        uint64_t now = 0, sum[2] = {0}, wanted = 0;
        for (uint32_t i = 0; i < n; i++)
            now += a[i].now;
        uint32_t free = now < total ? below((uint32_t)(total - now) + 1) : 0;
        memcpy(b, a, sizeof b);
        CHECK(budget_share(a, n, total, 0) == OK && budget_share(b, n, total, free) == OK);
        for (uint32_t i = 0; i < n; i++) {
            sum[0] += a[i].granted;
            sum[1] += b[i].granted;
            no_less &= b[i].granted >= a[i].granted;
            bounded &= b[i].granted == a[i].granted || b[i].granted <= b[i].target;
            jumps += b[i].granted > a[i].granted;
            if (a[i].target >= a[i].now + a[i].now / 8 + 1 && a[i].target > a[i].granted)
                wanted += a[i].target - a[i].granted;
        }
        uint64_t steps = sum[0] > now ? sum[0] - now : 0, left = free > steps ? free - steps : 0;
        bounded &= sum[1] <= total && sum[1] - sum[0] <= left;
        all &= sum[1] - sum[0] + CLAIMS >= (wanted < left ? wanted : left);
    }
    ok(bounded, "what is free goes to who is below the target, and no more than there is");
    ok(no_less && jumps > 1000, "beside the steps that all make (%u times)", jumps);
    ok(all, "and none of it stays where it is wanted");
}

/* Between hot sets an eighth is the least that moves: seven of a hundred would lie idle for ever. */
static void little_that_is_free_is_given_too(void)
{
    uint32_t h[HOT_AGES] = {[1] = 100, [20] = 100, [40] = 100, [HOT_AGES - 1] = 10};
    struct miss_curve curve;
    miss_curve_make(&curve, h, 100);
    struct budget_claim c = {.curve = &curve,
                             .min = 100,
                             .preset = 500,
                             .max = 8000,
                             .now = 1000,
                             .weight = 1,
                             .bytes_per_miss_ratio = 1e6f};
    CHECK(miss_curve_at(&curve, 1070) < miss_curve_at(&curve, 1000));
    CHECK(budget_share(&c, 1, 1070, 0) == OK);
    is_int(c.granted, 1000, "a hot set does not take 70 blocks of others for 1,000 of its own");
    CHECK(budget_share(&c, 1, 1070, 70) == OK);
    is_int(c.granted, 1070, "but 70 that are nobody's");
    CHECK(budget_share(&c, 1, 1010, 10) == OK);
    is_int(c.granted, 1000, "and not for a hundredth");
}

static void minima_that_do_not_fit_are_refused(void)
{
    struct budget_claim c[2] = {{.min = 60, .preset = 80, .max = 100, .weight = 1},
                                {.min = 41, .preset = 80, .max = 100, .weight = 1}};
    is_int(budget_share(c, 2, 100, 0), ERR_FULL, "60 and 41 of 100");
    ok(c[0].granted == 0 && c[1].granted == 0, "nothing is granted");
    is_int(budget_share(c, 2, 101, 0), OK, "60 and 41 of 101");
    ok(c[0].granted == 60 && c[1].granted == 41, "just the minima");
}

static void more_weight_never_gets_less(void)
{
    bool good = true;
    for (uint32_t round = 0; round < 3000; round++) {
        struct budget_claim a[CLAIMS] = {0}, b[CLAIMS];
        uint32_t total = random_claims(a), n = count_of(a), who = below(n);
        memcpy(b, a, sizeof b);
        b[who].weight *= 1.0f + 0.25f * (float)(1 + below(8));
        CHECK(budget_share(a, n, total, 0) == OK && budget_share(b, n, total, 0) == OK);
        good &= b[who].target >= a[who].target && b[who].granted >= a[who].granted;
    }
    ok(good, "a larger weight gets at least as much");
}

static void repeated_calls_settle(void)
{
    bool settled = true, still = true;
    for (uint32_t round = 0; round < 500; round++) {
        struct budget_claim c[CLAIMS] = {0};
        uint32_t total = random_claims(c), n = count_of(c), calls = 0;
        for (bool moved = true; moved && calls < 300; calls++) {
            CHECK(budget_share(c, n, total, 0) == OK);
            moved = false;
            for (uint32_t i = 0; i < n; i++) {
                moved |= c[i].granted != c[i].now;
                c[i].now = c[i].granted;
            }
        }
        settled &= calls < 300;
        for (uint32_t i = 0; i < n; i++)
            c[i].now = c[i].target;
        CHECK(budget_share(c, n, total, 0) == OK);
        for (uint32_t i = 0; i < n; i++)
            still &= c[i].granted == c[i].now;
    }
    ok(settled, "repeated calls come to rest");
    ok(still, "whoever has just what it should keeps it");
}

static double cost(const struct budget_claim *c, uint32_t n, const uint32_t *slots)
{
    double sum = 0;
    for (uint32_t i = 0; i < n; i++)
        sum += (double)c[i].weight * c[i].bytes_per_miss_ratio *
               miss_curve_at(c[i].curve, (float)slots[i]);
    return sum;
}

/* One block at a time to whoever saves most by it: the optimum for convex curves. */
static void greedy(const struct budget_claim *c, uint32_t n, uint32_t total, uint32_t *slots)
{
    for (uint32_t i = 0; i < n; i++) {
        slots[i] = c[i].min;
        total -= c[i].min;
    }
    for (; total > 0; total--) {
        double best = 0;
        uint32_t who = n;
        for (uint32_t i = 0; i < n; i++) {
            double saves = (double)c[i].weight * c[i].bytes_per_miss_ratio *
                           ((double)miss_curve_at(c[i].curve, (float)slots[i]) -
                            miss_curve_at(c[i].curve, (float)slots[i] + 1));
            if (slots[i] < c[i].max && saves > best) {
                best = saves;
                who = i;
            }
        }
        if (who == n)
            return;
        slots[who]++;
    }
}

static void shares_are_the_best(void)
{
    double worst = 0;
    for (uint32_t round = 0; round < 300; round++) {
        struct budget_claim c[CLAIMS] = {0};
        uint32_t total = random_claims(c), n = count_of(c), got[CLAIMS], want[CLAIMS];
        for (uint32_t i = 0; i < n; i++) {
            c[i].curve = &curves[i];
            c[i].now = 0;
        }
        CHECK(budget_share(c, n, total, 0) == OK);
        for (uint32_t i = 0; i < n; i++)
            got[i] = c[i].target;
        greedy(c, n, total, want);
        double excess = cost(c, n, got) / cost(c, n, want) - 1;
        worst = excess > worst ? excess : worst;
    }
    ok(worst < 0.01, "no other share moves fewer bytes: at most %.3f %% above block by block",
       100 * worst);
}

static void the_unknown_get_their_preset(void)
{
    struct budget_claim c[3] = {{.min = 10, .preset = 50, .max = 100, .weight = 1},
                                {.min = 10, .preset = 90, .max = 100, .weight = 1},
                                {.curve = &curves[0],
                                 .min = 10,
                                 .preset = 30,
                                 .max = 500,
                                 .weight = 1,
                                 .bytes_per_miss_ratio = 1e6f}};
    random_curve(&curves[0]);
    CHECK(budget_share(c, 3, 400, 0) == OK);
    ok(c[0].granted == 50 && c[1].granted == 90, "what fits is given");
    ok(c[2].granted > 30, "the known one takes what is left");
    CHECK(budget_share(c, 3, 100, 0) == OK);
    ok(c[0].granted == 10 + 40 * 70 / 140 && c[1].granted == 10 + 80 * 70 / 140,
       "and where not everybody's fits, the same part of it");
}

int main(void)
{
    curves_predict();
    one_curve_serves_different_lanes();
    curves_are_hulls();
    shares_keep_their_bounds();
    what_is_free_is_given_at_once();
    little_that_is_free_is_given_too();
    minima_that_do_not_fit_are_refused();
    more_weight_never_gets_less();
    repeated_calls_settle();
    shares_are_the_best();
    the_unknown_get_their_preset();
    return tap_done();
}
