/* The thread that makes plans for prompts (kernels/cuda/prefill_plan.cu), with a stand-in for cuDNN that takes as
 * long, and refuses, what it is told to: needs no GPU. */
#include "kernels/cuda/prefill_plan.cu"
#include "tests/tap.h"

static struct {
    int slow_ms, refuses; /* from the next plan on; atomic */
    int n_made;
} fake;

struct cudnn_plan {
    struct cudnn_shape shape;
};

struct cudnn *cudnn_open(const char **)
{
    return (struct cudnn *)&fake;
}

void cudnn_close(struct cudnn *)
{
}

struct cudnn_plan *cudnn_plan_create(struct cudnn *, const struct cudnn_shape *s)
{
    const int ms = __atomic_load_n(&fake.slow_ms, __ATOMIC_ACQUIRE);
    const struct timespec t = {ms / 1000, ms % 1000 * 1000000};
    nanosleep(&t, NULL);
    if (__atomic_load_n(&fake.refuses, __ATOMIC_ACQUIRE))
        return NULL;
    struct cudnn_plan *p = (struct cudnn_plan *)mem_alloc(sizeof *p);
    p->shape = *s;
    __atomic_fetch_add(&fake.n_made, 1, __ATOMIC_RELEASE);
    return p;
}

void cudnn_plan_destroy(struct cudnn_plan *p)
{
    mem_free(p);
}

size_t cudnn_workspace(const struct cudnn_plan *)
{
    return 0;
}

static struct plan_key key(uint32_t heads, uint32_t rows, uint32_t first)
{
    struct plan_key k;
    memset(&k, 0, sizeof k);
    k.heads = k.all_heads = heads;
    k.kv_heads = 1;
    k.dim = 64;
    k.rows = rows;
    k.first = first;
    return k;
}

static struct prefill_progress look(const struct prefill_plans *p)
{
    struct prefill_progress at;
    prefill_plans_look(p, &at);
    return at;
}

static bool tells(const struct prefill_plans *p, const char *word)
{
    const char *trouble = look(p).trouble;
    printf("# %s\n", trouble != NULL ? trouble : "nothing");
    return trouble != NULL && strstr(trouble, word) != NULL;
}

static struct prefill_plans *open_ready(void)
{
    const struct plan_key like = key(4, PLAN_MOST_ROWS, PLAN_ANYWHERE);
    memset(&fake, 0, sizeof fake);
    struct prefill_plans *p = prefill_plans_create(0, &like);
    while (!look(p).ready)
        wait_a_little();
    return p;
}

/* Until the thread has looked at what was wished for. */
static void settle(const struct prefill_plans *p)
{
    while (__atomic_load_n(&p->wished, __ATOMIC_ACQUIRE))
        wait_a_little();
}

static bool wish(struct prefill_plans *p, const struct plan_key *k)
{
    settle(p);
    (void)prefill_plans_find(p, k, ~0u, true);
    settle(p);
    return prefill_plans_find(p, k, ~0u, false) != NULL;
}

static void a_step_finds_what_was_made_before_it(void)
{
    struct prefill_plans *p = open_ready();
    const struct plan_key k = key(4, 1024, 3 * PLAN_MOST_ROWS);
    const uint32_t before = look(p).n_made;
    ok(wish(p, &k), "an exact plan is made when it was wished for");
    ok(prefill_plans_find(p, &k, before, false) == NULL &&
           prefill_plans_find(p, &k, look(p).n_made, false) != NULL,
       "a step that began before does not find it, the next one does");
    prefill_plans_destroy(p);
}

static void wishes_leave_room(void)
{
    struct prefill_plans *p = open_ready();
    uint32_t n = 0;
    for (uint32_t i = 0; i < 2 * MAX_PLANS; i++) {
        const struct plan_key k = key(4, 1024 + 128 * (i % 8), (1 + i / 8) * PLAN_MOST_ROWS);
        n += wish(p, &k);
    }
    ok(n == MAX_GRANTED, "of exact plans for last chunks of many lengths some are made (%u)", n);
    uint32_t heads = 5;
    const uint32_t room = MAX_PLANS - look(p).n_made;
    struct plan_key k = key(heads, 1024, PLAN_ANYWHERE);
    ok(room > 50 && prefill_plans_get(p, &k, ~0u, 5) != NULL && look(p).trouble == NULL,
       "and there is room for plans that are waited for (%u)", room);
    do
        k = key(++heads, 1024, PLAN_ANYWHERE);
    while (prefill_plans_get(p, &k, ~0u, 5) != NULL);
    ok(heads == 5 + room && tells(p, "no room"),
       "when there is none left nobody waits, and it is said");
    prefill_plans_destroy(p);
}

/* Each layer of a step wishes for what the step did not find, and the thread may be quick. */
static void one_wish_is_granted_once(void)
{
    struct prefill_plans *p = open_ready();
    const struct plan_key k = key(4, 1024, 3 * PLAN_MOST_ROWS);
    const struct plan_key other = key(4, 1024, 5 * PLAN_MOST_ROWS);
    const uint32_t before = look(p).n_made;
    for (uint32_t i = 0; i < 2 * MAX_GRANTED; i++) {
        (void)prefill_plans_find(p, &k, before, true);
        settle(p);
    }
    ok(look(p).n_made == before + 1, "a plan that is wished for many times is made once");
    ok(wish(p, &other), "and counts once");
    prefill_plans_destroy(p);
}

static void nobody_waits_for_ever(void)
{
    struct prefill_plans *p = open_ready();
    const struct plan_key early = key(7, 2048, PLAN_ANYWHERE), k = key(8, 2048, PLAN_ANYWHERE);
    const uint32_t step = look(p).n_made;
    const struct cudnn_plan *plan = prefill_plans_get(p, &early, step, 5);
    __atomic_store_n(&fake.slow_ms, 400, __ATOMIC_RELEASE);
    double begin = now();
    ok(prefill_plans_get(p, &k, step, 0.05) == NULL && now() - begin < 0.3 && tells(p, "in time"),
       "a plan that is not made in time is not there, and it is said");
    begin = now();
    ok(prefill_plans_get(p, &k, step, 5) == NULL && now() - begin < 0.3,
       "the next layer does not wait for it again");
    while (look(p).n_made == step + 1)
        wait_a_little();
    ok(prefill_plans_get(p, &k, step, 5) == NULL && prefill_plans_get(p, &early, step, 5) == plan &&
           plan != NULL,
       "all layers of a step get the same, also when it comes in between");
    ok(prefill_plans_get(p, &k, look(p).n_made, 0.05) != NULL, "the next step has it");
    const struct plan_key slow = key(9, 2048, PLAN_ANYWHERE);
    settle(p);
    begin = now();
    ok(prefill_plans_get(p, &slow, look(p).n_made, 0.05) == NULL && now() - begin < 0.04,
       "as long as plans come late nobody waits");
    settle(p);
    __atomic_store_n(&fake.slow_ms, 0, __ATOMIC_RELEASE);
    const struct plan_key quick = key(10, 2048, PLAN_ANYWHERE), next = key(11, 2048, PLAN_ANYWHERE);
    (void)wish(p, &quick);
    ok(prefill_plans_get(p, &next, look(p).n_made, 5) != NULL && look(p).trouble == NULL,
       "when one came in time they are waited for again, and no trouble is left");
    prefill_plans_destroy(p);
}

static void what_cudnn_refuses_is_told(void)
{
    struct prefill_plans *p = open_ready();
    const struct plan_key k = key(9, 2048, PLAN_ANYWHERE);
    __atomic_store_n(&fake.refuses, 1, __ATOMIC_RELEASE);
    ok(prefill_plans_get(p, &k, ~0u, 5) == NULL && tells(p, "no kernel"),
       "a shape that cuDNN does not take is told");
    prefill_plans_destroy(p);
}

int main(void)
{
    a_step_finds_what_was_made_before_it();
    wishes_leave_room();
    one_wish_is_granted_once();
    nobody_waits_for_ever();
    what_cudnn_refuses_is_told();
    return tap_done();
}
