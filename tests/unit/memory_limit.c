/* engine/memory_plan.c: what is counted against the memory of the machine. */
#include "engine/attention.h"
#include "engine/memory_plan.h"
#include "tests/tap.h"

enum { HBM_BLOCKS = 400, DRAM_BLOCKS = 200, LEN = 4096, RECORD_LANE = 8192 };

static struct kv_geometry geo;

static status plan(struct memory_plan *p, uint32_t plugin, size_t record_lane, uint64_t available)
{
    const struct engine_config cfg = {.kv_hbm_bytes = HBM_BLOCKS * geo.block_bytes[LANE_SPARSE],
                                      .kv_dram_bytes = DRAM_BLOCKS * geo.block_bytes[LANE_SPARSE],
                                      .block_rows = geo.block_rows,
                                      .max_num_seqs = 4,
                                      .max_batched_tokens = 512,
                                      .sparse = sparse_choice_make(plugin, 0.05f)};
    return memory_plan_make(p, &cfg, &geo, record_lane, LEN,
                            &(struct memory_room){.bytes = available});
}

/* A request may name a plug-in that the server did not choose. */
static void digests_count_whatever_the_servers_choice(const char *name)
{
    struct memory_plan p;
    uint32_t plugin;
    CHECK(sparse_find(name, &plugin) == OK);
    uint64_t arenas = (HBM_BLOCKS + DRAM_BLOCKS) * (uint64_t)geo.block_bytes[LANE_SPARSE];
    uint64_t records = ((HBM_BLOCKS + DRAM_BLOCKS) / (SEGMENT_ROWS / geo.block_rows) + 1) *
                       (uint64_t)geo.n_lanes[LANE_SPARSE] * RECORD_LANE;
    ok(plan(&p, plugin, RECORD_LANE, 0) == OK && p.hbm_bytes + p.dram_bytes == arenas &&
           p.record_bytes == records,
       "%s: arenas as asked, a record for every segment", name);
    uint64_t all = arenas + records + ATTENTION_KEPT_BYTES;
    ok(plan(&p, plugin, RECORD_LANE, all) == OK, "%s: fits where all of it fits", name);
    ok(plan(&p, plugin, RECORD_LANE, all - 1) == ERR_MEMORY, "%s: but not in a byte less", name);
    ok(plan(&p, plugin, 0, arenas) == OK && p.record_bytes == 0 &&
           plan(&p, plugin, 0, arenas - 1) == ERR_MEMORY,
       "%s: without digests the arenas alone count", name);
}

/* A device: its own memory, and the host's for the second tier. */
static void a_device_has_memory_of_its_own(void)
{
    uint64_t block = geo.block_bytes[LANE_SPARSE], hbm = HBM_BLOCKS * block,
             dram = DRAM_BLOCKS * block;
    struct engine_config cfg = {.kv_hbm_bytes = hbm,
                                .kv_dram_bytes = dram,
                                .block_rows = geo.block_rows,
                                .max_num_seqs = 4,
                                .max_batched_tokens = 512,
                                .sparse = sparse_choice_make(0, 0.05f)};
    struct memory_room room = {.bytes = hbm, .apart = true, .host_bytes = dram};
    struct memory_plan p;
    double fits = 0;
    ok(memory_plan_make(&p, &cfg, &geo, 0, LEN, &room) == OK, "each tier fits its own memory");
    room.host_bytes--;
    ok(memory_plan_make(&p, &cfg, &geo, 0, LEN, &room) == ERR_MEMORY &&
           strstr(err_text(), "--kv-dram") != NULL,
       "the host's is short by a byte: %s", err_text());
    room = (struct memory_room){.bytes = hbm + ATTENTION_KEPT_BYTES, .apart = true};
    status st = memory_plan_make(&p, &cfg, &geo, RECORD_LANE, LEN, &room);
    const char *said = strstr(err_text(), "--kv-hbm ");
    said = said != NULL ? strstr(said + 1, "--kv-hbm ") : NULL;
    ok(st == ERR_MEMORY && said != NULL && sscanf(said, "--kv-hbm %lf", &fits) == 1 && fits > 0,
       "digests are in the device's memory, and do not fit: %s", err_text());
    cfg.kv_hbm_bytes = (uint64_t)(fits - 1) << 20;
    is_int(memory_plan_make(&p, &cfg, &geo, RECORD_LANE, LEN, &room), OK, "what was said fits");
    cfg.kv_hbm_bytes = 0;
    cfg.max_num_seqs = 1000;
    room.most = room.bytes;
    ok(memory_plan_make(&p, &cfg, &geo, RECORD_LANE, LEN, &room) == OK &&
           p.hbm_bytes > (room.bytes - ATTENTION_KEPT_BYTES) / 2,
       "and where nobody says how much, as much as fits is taken: %.1f of %.1f MiB",
       (double)p.hbm_bytes / 1048576, (double)room.bytes / 1048576);
}

/* The shape of Llama-3.1-8B with 90 GiB of DRAM on an H200, 123.9 GiB of which are free. */
static void what_digests_leave_is_pages(void)
{
    enum { LANES = 32 * 8, ROWS = 16, ROW_MAP = SEGMENT_ROWS * 2, MODEL_LEN = 131072 };
    const size_t bounds = 128 * 4 + 64 * 128 * 4;           /* of quest */
    const size_t centroids = ROW_MAP + (128 * 8 + 64 * 128) /* of wave: one for each page, */
                             + (128 * 8 + 16 * 128) + (64 * 128 + 256); /* for four, mean values */
    const struct kv_geometry g = kv_geometry_make(ROWS, 32, 8, 128);
    const struct engine_config cfg = {.kv_dram_bytes = (uint64_t)90 << 30,
                                      .block_rows = ROWS,
                                      .max_num_seqs = 64,
                                      .max_batched_tokens = 8192,
                                      .sparse = sparse_choice_make(1, 0.02f)};
    struct memory_room room = {.bytes = (uint64_t)(123.93 * 1073741824), .apart = true};
    struct memory_plan all, own;
    room.most = room.bytes / 20 * 19;
    CHECK(memory_plan_make(&all, &cfg, &g, bounds, MODEL_LEN, &room) == OK);
    CHECK(memory_plan_make(&own, &cfg, &g, centroids, MODEL_LEN, &room) == OK);
    uint64_t used[2] = {all.hbm_bytes + all.record_bytes, own.hbm_bytes + own.record_bytes};
    uint64_t full = room.most - ATTENTION_KEPT_BYTES;
    ok(used[0] <= full && used[1] <= full && full - used[0] < 40 << 20 && full - used[1] < 40 << 20,
       "KV and digests take what there is: %.2f and %.2f of %.2f GiB", (double)used[0] / (1 << 30),
       (double)used[1] / (1 << 30), (double)full / (1 << 30));
    ok(own.blocks[LANE_SPARSE][KV_HBM] > all.blocks[LANE_SPARSE][KV_HBM] + 1900,
       "digests of %zu bytes leave room for %u blocks, of %zu for %u", centroids,
       own.blocks[LANE_SPARSE][KV_HBM], bounds, all.blocks[LANE_SPARSE][KV_HBM]);
}

int main(void)
{
    geo = kv_geometry_make(8, 30, 3, 64);
    digests_count_whatever_the_servers_choice("dense");
    digests_count_whatever_the_servers_choice("wave");
    a_device_has_memory_of_its_own();
    what_digests_leave_is_pages();
    return tap_done();
}
