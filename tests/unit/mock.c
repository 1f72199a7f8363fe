/* The mock backend: what a test of the server or the scheduler may rely on. */
#include "kernels/backend.h"
#include "tests/tap.h"

#include <math.h>

enum { VOCAB = 1000, EOS = 2, FIRST = 100, CYCLE = 26 };

static struct backend *open_mock(struct mock_options o)
{
    struct backend *be = NULL;
    o.eos_token = EOS;
    o.first_token = FIRST;
    o.n_tokens = CYCLE;
    CHECK(mock_backend_open(&be, &o) == OK);
    return be;
}

static struct sample_row row_at(uint32_t position)
{
    return (struct sample_row){.position = position, .target = SAMPLE_DRAW, .n_top = -1};
}

static struct sample_row sampled(struct backend *be, struct sample_row r)
{
    be->ops->sample(be, &(struct sample_args){.vocab = VOCAB, .n_rows = 1, .rows = &r});
    return r;
}

static void tokens_cycle_through_the_range(void)
{
    struct backend *be = open_mock((struct mock_options){.eos_every = 5});
    int good = 1;
    for (uint32_t p = 0; p < 200; p++) {
        uint32_t want = p % 5 == 4 ? EOS : FIRST + p % CYCLE;
        good &= sampled(be, row_at(p)).token == want;
    }
    ok(good, "tokens cycle by position and every fifth is the end");
    struct sample_row r = row_at(3);
    r.params.choice = 1;
    is_int(sampled(be, r).token, FIRST + 4, "choices differ");
    be->ops->close(be);
}

static void bans_and_biases_are_honoured(void)
{
    struct backend *be = open_mock((struct mock_options){.eos_every = 1});
    uint32_t banned[2] = {EOS, FIRST}, id = 777;
    float bias = 100;
    struct sample_row r = row_at(0);
    r.banned = banned;
    r.n_banned = 2;
    is_int(sampled(be, r).token, FIRST + 1, "banned tokens are passed over");
    r.bias_ids = &id;
    r.bias = &bias;
    r.n_bias = 1;
    is_int(sampled(be, r).token, 777, "a bias of 100 decides");
    be->ops->close(be);
}

static void the_list_of_best_tokens_is_a_distribution(void)
{
    struct backend *be = open_mock((struct mock_options){.eos_every = 3});
    for (uint32_t p = 0; p < 3; p++) {
        struct sample_row r = row_at(p);
        r.n_top = SAMPLE_MAX_LOGPROBS;
        r = sampled(be, r);
        double sum = 0;
        int sorted = 1, ranks = 1;
        for (uint32_t i = 0; i < SAMPLE_MAX_LOGPROBS; i++) {
            sum += exp((double)r.top[i].logprob);
            sorted &= i == 0 || r.top[i].logprob < r.top[i - 1].logprob;
            struct sample_row t = row_at(p);
            t.target = r.top[i].token;
            t = sampled(be, t);
            ranks &= t.rank == i + 1 && t.logprob == r.top[i].logprob && t.token == t.target;
        }
        ok(r.top[0].token == r.token && r.rank == 1, "the sampled token leads the list");
        ok(sorted && sum <= 1, "the list is sorted and sums to at most 1");
        ok(ranks, "scoring each token of the list gives its place and logprob");
    }
    be->ops->close(be);
}

static void faults_come_when_asked(void)
{
    struct backend *be =
        open_mock((struct mock_options){.nan_every = 3, .fail_step = 2, .step_us = 3000});
    int bad[6];
    for (uint32_t i = 0; i < 6; i++)
        bad[i] = sampled(be, row_at(i)).bad;
    ok(!bad[0] && !bad[1] && bad[2] && !bad[3] && !bad[4] && bad[5], "every third row is bad");
    is_int(be->ops->sync(be), OK, "the first step passes");
    be->ops->embed(be, &(struct embed_args){0});
    uint64_t t = clock_us();
    is_int(be->ops->sync(be), ERR_DEVICE, "the second step fails");
    ok(clock_us() - t >= 2900, "a step takes as long as asked");
    is_int(be->ops->sync(be), OK, "a sync without operations is no step");
    be->ops->close(be);
}

static void rows_take_their_time(void)
{
    static const uint32_t tokens[40];
    struct backend *be = open_mock((struct mock_options){.row_ns = 100000});
    for (int step = 0; step < 2; step++) {
        be->ops->embed(be, &(struct embed_args){.tokens = tokens, .n_rows = 40});
        uint64_t t = clock_us();
        CHECK(be->ops->sync(be) == OK);
        t = clock_us() - t;
        ok(t >= 3900, "40 rows of 100 us took %llu us, in step %d", (unsigned long long)t,
           step + 1);
    }
    be->ops->close(be);
}

static void a_wrong_block_table_fails_the_step(void)
{
    struct backend *be = open_mock((struct mock_options){0});
    struct kv_geometry g = {.block_rows = 8, .layers = 2, .kv_heads = 2, .head_dim = 4};
    g.page_bytes = (size_t)8 * 4 * 4;
    g.block_bytes[LANE_SPARSE] = 4 * g.page_bytes;
    void *arena = be->ops->alloc(be, 8 * g.block_bytes[LANE_SPARSE]);
    block_id blocks[3] = {5, 1, 3}, wrong[3] = {5, 1, 2};
    struct batch_seq s = {.n_rows = 20, .blocks = {blocks}};
    struct kv_memory kv = {.geo = &g, .hbm = {arena}};
    struct append_args ap = {.kv = &kv, .layer = 0, .seqs = &s, .n_seqs = 1};
    struct attend_args at = {.kv = &kv, .layer = 0, .seqs = &s, .n_seqs = 1};
    be->ops->append(be, &ap);
    for (int i = 0; i < 50; i++)
        be->ops->attend(be, &at);
    is_int(be->ops->sync(be), OK, "a right block table passes");
    s.blocks[LANE_SPARSE] = wrong;
    be->ops->attend(be, &at);
    is_int(be->ops->sync(be), ERR_DEVICE, "a wrong block table is found");
    is_int(be->ops->sync(be), OK, "and reported once");
    be->ops->free(be, arena, 8 * g.block_bytes[LANE_SPARSE]);
    be->ops->close(be);
}

int main(void)
{
    tokens_cycle_through_the_range();
    bans_and_biases_are_honoured();
    the_list_of_best_tokens_is_a_distribution();
    faults_come_when_asked();
    rows_take_their_time();
    a_wrong_block_table_fails_the_step();
    return tap_done();
}
