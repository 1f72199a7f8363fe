/* Miss-ratio curves from distances, and shares from curves.
 *
 * The optimum of a sum of convex curves has one price: every sequence gets blocks as long as the next
 * one saves more bytes than the price (Stone, Turek and Wolf). So a bisection finds the price, without
 * memory and without an order; what is left of the total goes to the segments that cost just that. */
#include "cache/budget.h"

#include <math.h>

enum {
    PRICE_ROUNDS = 64, /* halvings of the logarithm of the price: beyond a float's precision */
    STEP_SHARE = 8, /* changes of less than now / 8 are not made, and of more only so much a call */
    STEP_MIN = 16,
    FREE_SHARE = 64, /* of what is nobody's, less than now / 64 is left where it is */
};

/* ---- curves ---- */

/* Drops points above the straight line between their neighbours. */
static void make_hull(struct miss_curve *c)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < c->n; i++) {
        while (n >= 2) {
            double dx = c->size[n - 1] - c->size[n - 2], dy = c->miss[n - 1] - c->miss[n - 2];
            double ex = c->size[i] - c->size[n - 2], ey = c->miss[i] - c->miss[n - 2];
            if (dy * ex < ey * dx)
                break;
            n--;
        }
        c->size[n] = c->size[i];
        c->miss[n++] = c->miss[i];
    }
    c->n = n;
}

static uint64_t touches_of(const uint32_t distance[HOT_AGES])
{
    uint64_t n = 0;
    for (uint32_t i = 0; i < HOT_AGES; i++)
        n += distance[i];
    return n;
}

/* The last bucket holds all that is longer: what a window of HOT_AGES - 1 misses is not known. */
enum { WINDOWS = HOT_AGES - 1 };

void miss_curve_make(struct miss_curve *c, const uint32_t distance[HOT_AGES],
                     double touches_per_epoch)
{
    double total = (double)touches_of(distance), later = total - distance[0], held = 0;
    c->n = 0;
    if (total <= 0 || touches_per_epoch <= 0)
        return;
    const double pages = touches_per_epoch / total, share = 1 / total;
    c->size[0] = 0;
    c->miss[0] = 1;
    c->n = 1;
    for (uint32_t window = 1; window < WINDOWS && later > 0; window++) {
        held += later;
        later -= distance[window];
        c->size[c->n] = (float)(pages * held);
        c->miss[c->n] = (float)(share * later);
        if (c->size[c->n] > c->size[c->n - 1])
            c->n++;
    }
    make_hull(c);
}

/* Pages that the longest window holds: each touch is held for as many windows as its distance is long. */
static double largest_size(const uint32_t distance[HOT_AGES], double epochs)
{
    uint64_t held = 0;
    for (uint32_t i = 0; i < HOT_AGES; i++)
        held += (uint64_t)distance[i] * (i < WINDOWS - 1 ? i : WINDOWS - 1);
    return (double)held / epochs;
}

/* Adds `weight` times a curve to misses at ascending sizes. */
static void add_curve(struct miss_curve *mean, const struct miss_curve *c, float weight)
{
    uint32_t k = 1;
    for (uint32_t i = 0; i < mean->n; i++) {
        float x = mean->size[i];
        while (k < c->n && c->size[k] <= x)
            k++;
        float miss = c->miss[k - 1];
        if (k < c->n)
            miss += (x - c->size[k - 1]) / (c->size[k] - c->size[k - 1]) * (c->miss[k] - miss);
        mean->miss[i] += weight * miss;
    }
}

void miss_curve_lanes(struct miss_curve *c, const struct hot_lane_stats *lanes, uint32_t n_lanes,
                      double epochs)
{
    struct miss_curve lane;
    uint64_t touches = 0;
    double largest = 0;
    c->n = 0;
    for (uint32_t i = 0; i < n_lanes; i++) {
        touches += touches_of(lanes[i].distance);
        largest = fmax(largest, largest_size(lanes[i].distance, epochs));
    }
    if (touches == 0 || largest <= 0)
        return;
    c->n = CURVE_POINTS;
    for (uint32_t i = 0; i < c->n; i++) { /* closer where curves are steep */
        float t = (float)i / (CURVE_POINTS - 1);
        c->size[i] = (float)largest * t * t;
        c->miss[i] = 0;
    }
    for (uint32_t i = 0; i < n_lanes; i++) {
        double n = (double)touches_of(lanes[i].distance);
        miss_curve_make(&lane, lanes[i].distance, n / epochs);
        if (lane.n > 0)
            add_curve(c, &lane, (float)(n / (double)touches));
    }
    make_hull(c);
}

float miss_curve_at(const struct miss_curve *c, float slots)
{
    if (c->n == 0)
        return 1;
    for (uint32_t i = 1; i < c->n; i++)
        if (slots < c->size[i]) {
            float t = (slots - c->size[i - 1]) / (c->size[i] - c->size[i - 1]);
            return c->miss[i - 1] + t * (c->miss[i] - c->miss[i - 1]);
        }
    return c->miss[c->n - 1];
}

/* ---- shares ---- */

static bool is_known(const struct budget_claim *c)
{
    return c->curve != NULL && c->curve->n > 1;
}

static uint32_t clamp(uint32_t x, uint32_t low, uint32_t high)
{
    return x < low ? low : x > high ? high : x;
}

/* Bytes a block saves on segment i - 1 .. i of the hull. */
static double segment_price(const struct budget_claim *c, uint32_t i)
{
    const struct miss_curve *m = c->curve;
    return (double)c->weight * c->bytes_per_miss_ratio * (m->miss[i - 1] - m->miss[i]) /
           (m->size[i] - m->size[i - 1]);
}

/* Slots of a known claim when a block costs `price` bytes: all that save more. */
static uint32_t demand(const struct budget_claim *c, double price)
{
    const struct miss_curve *m = c->curve;
    uint32_t i = 1;
    while (i < m->n && segment_price(c, i) > price)
        i++;
    return clamp((uint32_t)ceilf(m->size[i - 1]), c->min, c->max);
}

static uint64_t demand_of_all(const struct budget_claim *claims, uint32_t n, double price)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < n; i++)
        sum += is_known(&claims[i]) ? demand(&claims[i], price) : 0;
    return sum;
}

/* Gives known claims what a common price makes of `room` (at least the sum of their minima). */
static void share_by_price(struct budget_claim *claims, uint32_t n, uint64_t room)
{
    double low = 1e-30,
           high = 1e30; /* at high nobody buys, at low everybody all that saves a byte */
    if (demand_of_all(claims, n, low) <= room)
        high = low;
    for (uint32_t round = 0; round < PRICE_ROUNDS && low < high; round++) {
        double mid = sqrt(low * high);
        if (demand_of_all(claims, n, mid) <= room)
            high = mid;
        else
            low = mid;
    }
    uint64_t left = room - demand_of_all(claims, n, high);
    for (uint32_t i = 0; i < n; i++) {
        if (!is_known(&claims[i]))
            continue;
        uint32_t sure = demand(&claims[i], high), more = demand(&claims[i], low) - sure;
        more = more < left ? more : (uint32_t)left;
        claims[i].granted = sure + more;
        left -= more;
    }
}

/* Claims without a curve get their preset, or the part of it that fits when everybody wants theirs. */
static uint64_t share_by_preset(struct budget_claim *claims, uint32_t n, uint64_t total,
                                uint64_t minima)
{
    uint64_t wished = 0, given = 0;
    for (uint32_t i = 0; i < n; i++)
        wished += claims[i].preset - claims[i].min;
    uint64_t room = total - minima;
    for (uint32_t i = 0; i < n; i++) {
        struct budget_claim *c = &claims[i];
        if (is_known(c))
            continue;
        uint64_t extra = c->preset - c->min;
        if (wished > room)
            extra = extra * room / wished;
        c->granted = c->min + (uint32_t)extra;
        given += c->granted;
    }
    return given;
}

/* One step from `now` towards the target. */
static uint32_t approach(const struct budget_claim *c, uint32_t target)
{
    if (c->now == 0)
        return target;
    uint32_t change = target > c->now ? target - c->now : c->now - target;
    uint32_t most = c->now / STEP_SHARE > STEP_MIN ? c->now / STEP_SHARE : STEP_MIN;
    if ((uint64_t)change * STEP_SHARE < c->now)
        change = 0;
    change = change < most ? change : most;
    return clamp(target > c->now ? c->now + change : c->now - change, c->min, c->max);
}

/* Where steps do not fit the total, growth waits first; then whoever is above the target goes there
 * at once. Targets fit. */
static void fit(struct budget_claim *claims, uint32_t n, uint64_t total)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < n; i++)
        sum += claims[i].granted;
    for (uint32_t round = 0; round < 2; round++)
        for (uint32_t i = n; i-- > 0 && sum > total;) {
            struct budget_claim *c = &claims[i];
            uint32_t now = c->now > c->min ? c->now : c->min;
            uint32_t keep = round == 0 ? now : c->target;
            if (c->granted <= keep)
                continue;
            uint32_t back = c->granted - keep;
            back = back < sum - total ? back : (uint32_t)(sum - total);
            c->granted -= back;
            sum -= back;
        }
    CHECK(sum <= total);
}

/* What is still missing to the target, where it is worth a change. */
static uint32_t wants(const struct budget_claim *c)
{
    bool worth = (uint64_t)(c->target > c->now ? c->target - c->now : 0) * FREE_SHARE >= c->now;
    return worth && c->target > c->granted ? c->target - c->granted : 0;
}

/* Growth into what is nobody's; everybody gets the same part of what is wanted. */
static void grow_freely(struct budget_claim *claims, uint32_t n, uint64_t room)
{
    uint64_t wanted = 0;
    for (uint32_t i = 0; i < n; i++)
        wanted += wants(&claims[i]);
    for (uint32_t i = 0; i < n; i++) {
        uint64_t more = wants(&claims[i]);
        claims[i].granted += (uint32_t)(wanted > room ? more * room / wanted : more);
    }
}

status budget_share(struct budget_claim *claims, uint32_t n, uint32_t total_blocks, uint32_t n_free)
{
    uint64_t minima = 0;
    for (uint32_t i = 0; i < n; i++) {
        const struct budget_claim *c = &claims[i];
        CHECK(c->min <= c->preset && c->preset <= c->max && c->weight > 0);
        minima += c->min;
    }
    if (minima > total_blocks)
        return err(ERR_FULL, "hot sets: the least they need is %llu blocks of %u",
                   (unsigned long long)minima, total_blocks);
    uint64_t given = share_by_preset(claims, n, total_blocks, minima), now = 0, sum = 0;
    share_by_price(claims, n, total_blocks - given);
    for (uint32_t i = 0; i < n; i++) {
        claims[i].target = claims[i].granted;
        claims[i].granted = approach(&claims[i], claims[i].target);
    }
    fit(claims, n, total_blocks);
    for (uint32_t i = 0; i < n; i++) {
        now += claims[i].now;
        sum += claims[i].granted;
    }
    uint64_t taken = sum > now ? sum - now : 0, left = n_free > taken ? n_free - taken : 0;
    grow_freely(claims, n, left < total_blocks - sum ? left : total_blocks - sum);
    return OK;
}
