/* Counting for tenants (tenant.h). */
#include "engine/tenant.h"

#include <math.h>

void tenants_init(struct tenants *ts, double unit)
{
    *ts = (struct tenants){.unit = unit};
    ts->of = mem_alloc(MAX_TENANTS * sizeof *ts->of);
    ts->active = mem_alloc(MAX_TENANTS * sizeof *ts->active);
    ts->changed = mem_alloc(MAX_TENANTS * sizeof *ts->changed);
    for (uint32_t t = 0; t < MAX_TENANTS; t++)
        ts->of[t] = (struct tenant){.weight = 1,
                                    .max_running = TENANT_NO_BOUND,
                                    .max_blocks = {TENANT_NO_BOUND, TENANT_NO_BOUND}};
}

void tenants_fini(struct tenants *ts)
{
    mem_free(ts->of);
    mem_free(ts->active);
    mem_free(ts->changed);
}

static struct tenant *tenant_at(const struct tenants *ts, uint32_t t)
{
    CHECK(t < MAX_TENANTS);
    return &ts->of[t];
}

static void changed(struct tenants *ts, uint32_t t)
{
    struct tenant *n = tenant_at(ts, t);
    if (!n->changed)
        ts->changed[ts->n_changed++] = t;
    n->changed = true;
}

static void count_weight(struct tenants *ts, struct tenant *n)
{
    if (!n->counted)
        ts->total_weight += n->weight;
    n->counted = true;
}

void tenants_entitle(struct tenants *ts, uint32_t t, const struct tenant_bounds *b)
{
    struct tenant *n = tenant_at(ts, t);
    CHECK(b->weight > 0);
    if (n->counted)
        ts->total_weight += b->weight - n->weight;
    n->weight = b->weight;
    n->max_running = b->max_running;
    for (int tier = 0; tier < 2; tier++)
        n->max_blocks[tier] = b->max_blocks[tier];
    ts->n_told += !n->told;
    n->told = true;
    count_weight(ts, n);
}

/* ---- who has what ---- */

static bool is_idle(const struct tenant *n)
{
    return n->n_running + n->n_waiting == 0;
}

/* Before a sequence of n comes. */
static void lift(const struct tenants *ts, struct tenant *n)
{
    double least = INFINITY;
    for (uint32_t i = 0; i < ts->n_active; i++) {
        const struct tenant *o = &ts->of[ts->active[i]];
        double slack = is_idle(n) ? 0 : ts->unit / fmin(o->weight, n->weight);
        if (o != n)
            least = fmin(least, o->served - slack);
    }
    if (isinf(least) && is_idle(n))
        least = ts->of[ts->last].served;
    if (!isinf(least) && n->served < least)
        n->served = least;
}

static void end_active(struct tenants *ts, uint32_t t)
{
    uint32_t i = 0;
    while (i < ts->n_active && ts->active[i] != t)
        i++;
    CHECK(i < ts->n_active);
    ts->active[i] = ts->active[--ts->n_active];
    ts->last = t;
    for (int tier = 0; tier < 2; tier++)
        ts->of[t].blocks[tier] = 0;
}

void tenants_arrive(struct tenants *ts, uint32_t t)
{
    struct tenant *n = tenant_at(ts, t);
    count_weight(ts, n);
    lift(ts, n);
    if (is_idle(n))
        ts->active[ts->n_active++] = t;
    n->n_waiting++;
    changed(ts, t);
}

void tenants_move(struct tenants *ts, uint32_t t, enum sequence_state from, enum sequence_state to)
{
    struct tenant *n = tenant_at(ts, t);
    const bool waited = from != SEQUENCE_RUNNING,
               waits = to != SEQUENCE_RUNNING && to != SEQUENCE_DONE;
    n->n_waiting += waits && !waited;
    n->n_waiting -= waited && !waits;
    n->n_running -= from == SEQUENCE_RUNNING;
    n->n_paused -= from == SEQUENCE_PAUSED;
    n->n_running += to == SEQUENCE_RUNNING;
    n->n_paused += to == SEQUENCE_PAUSED;
    if (is_idle(n))
        end_active(ts, t);
    changed(ts, t);
}

/* ---- what it was served ---- */

void tenants_charge(struct tenants *ts, uint32_t t, uint32_t prompt_rows, uint32_t output_tokens)
{
    struct tenant *n = tenant_at(ts, t);
    n->prompt_tokens += prompt_rows;
    n->output_tokens += output_tokens;
    n->served +=
        ((double)TENANT_PROMPT_COST * prompt_rows + (double)TENANT_OUTPUT_COST * output_tokens) /
        n->weight;
    changed(ts, t);
}

void tenants_count_cached(struct tenants *ts, uint32_t t, uint32_t rows)
{
    tenant_at(ts, t)->cached_tokens += rows;
    changed(ts, t);
}

void tenants_count_preemption(struct tenants *ts, uint32_t t)
{
    tenant_at(ts, t)->preemptions++;
    changed(ts, t);
}

double tenants_reckoned(const struct tenants *ts, uint32_t t)
{
    const struct tenant *n = tenant_at(ts, t);
    return n->served + (double)TENANT_PROMPT_COST * (double)n->pending / n->weight;
}

double tenants_share(const struct tenants *ts, uint32_t t)
{
    return tenant_at(ts, t)->weight / ts->total_weight;
}

double tenants_share_now(const struct tenants *ts, uint32_t t)
{
    double sum = 0;
    for (uint32_t i = 0; i < ts->n_active; i++)
        sum += ts->of[ts->active[i]].weight;
    return tenant_at(ts, t)->weight / sum;
}

bool tenants_next_due(struct tenants *ts, uint64_t now_us, uint32_t *i, uint32_t *t)
{
    for (; *i < ts->n_changed; ++*i) {
        struct tenant *n = &ts->of[ts->changed[*i]];
        if (!is_idle(n) && n->told_us != 0 && now_us - n->told_us < TENANT_TELL_US)
            continue;
        *t = ts->changed[*i];
        n->told_us = now_us;
        n->changed = false;
        ts->changed[*i] = ts->changed[--ts->n_changed];
        return true;
    }
    return false;
}
