/* How many blocks each class of lanes gets (engine/memory_plan.h): that STREAM lanes really take less, and
 * that what is planned is enough for the rings of all that may run. */
#include "engine/memory_plan.h"
#include "kernels/log.h"
#include "tests/tap.h"

enum { LAYERS = 30, HEADS = 3, LANES = LAYERS * HEADS, ROWS = 16, SINKS = 64, RECENT = 256 };

static struct lane_place lanes[LANES];
static const struct memory_room room = {0}; /* not known how much there is */

/* The last n_stream lanes are STREAM, the first n_dense DENSE. */
static struct kv_geometry geometry(uint32_t n_dense, uint32_t n_stream)
{
    uint8_t classes[LANES];
    for (uint32_t i = 0; i < LANES; i++)
        classes[i] = i < n_dense ? LANE_DENSE : i >= LANES - n_stream ? LANE_STREAM : LANE_SPARSE;
    struct kv_geometry g = kv_geometry_make(ROWS, LAYERS, HEADS, 64);
    kv_geometry_classify(&g, classes, lanes, SINKS, RECENT);
    return g;
}

static struct engine_config config(uint64_t hbm, uint32_t seqs, uint32_t step_rows)
{
    return (struct engine_config){.block_rows = ROWS,
                                  .kv_hbm_bytes = hbm,
                                  .max_num_seqs = seqs,
                                  .max_batched_tokens = step_rows};
}

/* Blocks of one ring, written down anew: sinks, window, a step, one at each edge. */
static uint32_t ring(uint32_t step_rows)
{
    return SINKS / ROWS + (RECENT + 64) / ROWS + step_rows / ROWS + 3;
}

static void memory_falls(void)
{
    struct memory_plan none, some, all;
    struct kv_geometry g0 = geometry(0, 0), g1 = geometry(0, 63), g2 = geometry(0, LANES);
    struct engine_config cfg = config(0, 8, 512);
    CHECK(memory_plan_make(&none, &cfg, &g0, 0, 32768, &room) == OK);
    CHECK(memory_plan_make(&some, &cfg, &g1, 0, 32768, &room) == OK);
    CHECK(memory_plan_make(&all, &cfg, &g2, 0, 32768, &room) == OK);
    double share = (double)some.hbm_bytes / (double)none.hbm_bytes;
    ok(share > 27.0 / 90 && share < 27.0 / 90 + 0.03,
       "63 of 90 lanes STREAM: 32k contexts take %.3f of the memory", share);
    ok((double)all.hbm_bytes < 0.04 * (double)none.hbm_bytes, "all STREAM: %.3f",
       (double)all.hbm_bytes / (double)none.hbm_bytes);
    is_int(some.blocks[LANE_SPARSE][KV_HBM], none.blocks[LANE_SPARSE][KV_HBM],
           "and every sequence fits at full length, as before");
    ok(some.max_num_seqs == 8 && all.max_num_seqs == 8 && all.max_model_len == 32768 &&
           none.max_num_seqs == 8,
       "nothing is cut");
    cfg.kv_hbm_bytes = none.hbm_bytes;
    CHECK(memory_plan_make(&some, &cfg, &g1, 0, 32768, &room) == OK);
    ok(some.blocks[LANE_SPARSE][KV_HBM] > 3 * none.blocks[LANE_SPARSE][KV_HBM],
       "or the same memory holds %.1f times the tokens",
       (double)some.blocks[LANE_SPARSE][KV_HBM] / none.blocks[LANE_SPARSE][KV_HBM]);
}

static void there_are_rings_for_all_that_run(void)
{
    uint32_t bad = 0, refused = 0, cut = 0, n = 0;
    for (uint32_t stream = 9; stream <= LANES; stream += 27)
        for (uint32_t dense = 0; dense + stream <= LANES; dense += 9)
            for (uint32_t step = 16; step <= 2048; step *= 2)
                for (uint64_t hbm = 1 << 20; hbm < (uint64_t)4 << 30; hbm *= 3)
                    for (uint32_t seqs = 1; seqs <= 16 && seqs <= step; seqs *= 4) {
                        struct kv_geometry g = geometry(dense, stream);
                        struct engine_config cfg = config(hbm, seqs, step);
                        struct memory_plan p;
                        n++;
                        if (memory_plan_make(&p, &cfg, &g, 0, 8192, &room) != OK) {
                            refused++;
                            continue;
                        }
                        uint32_t places = p.blocks[LANE_STREAM][KV_HBM];
                        uint32_t blocks = (p.max_model_len + ROWS - 1) / ROWS;
                        uint32_t one = ring(step) < blocks ? ring(step) : blocks;
                        cut += p.max_num_seqs < seqs;
                        bad += p.max_num_seqs == 0 || p.max_num_seqs > seqs || places < one;
                        bad += p.max_num_seqs > 1 && places < p.max_num_seqs * blocks &&
                               places < p.max_num_seqs * (ring(step) - step / ROWS - 1) +
                                            2 * (step / ROWS);
                        bad += p.hbm_bytes > hbm;
                    }
    ok(bad == 0, "%u plans: the rings that may run have room (%u bad)", n, bad);
    ok(refused > 0 && refused < n / 2 && cut > 0, "%u refused, %u run fewer together", refused,
       cut);
}

/* Exempt layers beside a second tier: SPARSE lanes have all of HBM that DENSE ones have no use for. */
static void no_hbm_lies_idle(void)
{
    uint32_t idle = 0, more = 0, n = 0;
    const struct kv_geometry g = geometry(HEADS, 0);
    const uint64_t sparse = g.block_bytes[LANE_SPARSE], dense = g.block_bytes[LANE_DENSE];
    for (uint32_t seqs = 1; seqs <= 256; seqs *= 4)
        for (uint32_t length = 2048; length <= 131072; length *= 4)
            for (uint64_t hbm = (uint64_t)1 << 30; hbm < (uint64_t)128 << 30; hbm *= 3)
                for (uint64_t dram = (uint64_t)1 << 28; dram < (uint64_t)128 << 30; dram *= 5) {
                    struct engine_config cfg = config(hbm, seqs, 512);
                    struct memory_plan p;
                    cfg.kv_dram_bytes = dram;
                    cfg.sparse = (struct sparse_choice){.plugin = 1, .budget = 0.02f};
                    if (memory_plan_make(&p, &cfg, &g, 0, length, &room) != OK)
                        continue;
                    const uint32_t *s = p.blocks[LANE_SPARSE], *d = p.blocks[LANE_DENSE];
                    idle += p.hbm_bytes + sparse + dense <= hbm;
                    more += d[KV_HBM] > s[KV_HBM] + s[KV_DRAM];
                    n++;
                }
    ok(n > 100 && idle == 0, "%u plans of two tiers leave no block of HBM idle (%u do)", n, idle);
    ok(more == 0, "nor have DENSE lanes more than SPARSE ones have in both tiers (%u do)", more);
}

/* HBM for every sequence at full length is that, whatever lies in DRAM. */
static void what_holds_all_holds_all(void)
{
    const struct kv_geometry g = geometry(HEADS, 0);
    struct engine_config cfg = config(0, 1, 512);
    struct memory_plan p;
    cfg.kv_dram_bytes = (uint64_t)4 << 30;
    CHECK(memory_plan_make(&p, &cfg, &g, 0, 32768, &room) == OK);
    is_int(p.blocks[LANE_SPARSE][KV_HBM], 32768 / ROWS, "one sequence at full length fits HBM");
}

int main(void)
{
    struct memory_plan p;
    struct kv_geometry g = geometry(0, 63);
    struct engine_config cfg = config(4 << 20, 4, 512);
    log_set_level(LOG_ERROR);
    memory_falls();
    there_are_rings_for_all_that_run();
    no_hbm_lies_idle();
    what_holds_all_holds_all();
    ok(memory_plan_make(&p, &cfg, &g, 0, 8192, &room) == ERR_MEMORY &&
           strstr(err_text(), "one sequence needs") != NULL,
       "no room for one ring is refused (%s)", err_text());
    return tap_done();
}
