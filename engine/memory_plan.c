/* Sizes of the arenas (memory_plan.h).
 *
 * Defaults: enough for every sequence at full length, but at most what the room says for the first
 * tier, and no second. On a CPU pages of an arena that nobody touched cost nothing, so a generous arena
 * does not slow the start. On a device digests are in the first tier's memory, those of the second
 * too: what they leave is the first tier's, so small digests are more blocks. */
#include "engine/memory_plan.h"
#include "engine/attention.h"

#include "kernels/log.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint64_t read_number(const char *path)
{
    char text[64] = "";
    FILE *f = fopen(path, "re");
    if (f == NULL)
        return 0;
    bool got = fgets(text, sizeof text, f) != NULL;
    fclose(f);
    return got && text[0] >= '0' && text[0] <= '9' ? strtoull(text, NULL, 10) : 0;
}

uint64_t memory_available(void)
{
    char line[128];
    uint64_t available = 0;
    FILE *f = fopen("/proc/meminfo", "re");
    if (f == NULL)
        return 0;
    while (fgets(line, sizeof line, f) != NULL)
        if (strncmp(line, "MemAvailable:", 13) == 0)
            available = strtoull(line + 13, NULL, 10) * 1024;
    fclose(f);
    uint64_t limit = read_number("/sys/fs/cgroup/memory.max");
    uint64_t used = read_number("/sys/fs/cgroup/memory.current");
    if (limit > 0 && limit - (used < limit ? used : limit) < available)
        available = limit - (used < limit ? used : limit);
    return available;
}

static uint64_t min_u64(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static uint64_t max_u64(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

static double gib(uint64_t bytes)
{
    return (double)bytes / 1073741824.0;
}

/* ---- rings of STREAM lanes ---- */

/* Blocks that a sequence has in its ring: always, and for the rows of the step that it is in. */
struct ring {
    uint64_t window, chunk; /* together never more than a sequence has */
};

static struct ring ring_of(const struct engine_config *cfg, const struct kv_geometry *geo,
                           uint64_t per_seq)
{
    enum { WINDOW_STEP = 64 };
    uint32_t r = geo->block_rows;
    uint64_t window = ((uint64_t)geo->stream_sinks + r - 1) / r +
                      ((uint64_t)geo->stream_recent + WINDOW_STEP) / r + 2;
    window = min_u64(window, per_seq);
    return (struct ring){window, min_u64(cfg->max_batched_tokens / r + 1, per_seq - window)};
}

/* Two chunks: who is passed over in a step still has the rows of the one before. And as much again for
 * what hits need, and for copies of segments that others read. */
static uint64_t ring_blocks(const struct engine_config *cfg, const struct kv_geometry *geo,
                            uint64_t per_seq)
{
    struct ring ring = ring_of(cfg, geo, per_seq);
    uint64_t n = 2 * (ring.window * cfg->max_num_seqs + 2 * ring.chunk);
    uint64_t all = per_seq * cfg->max_num_seqs;
    if (geo->block_bytes[LANE_SPARSE] + geo->block_bytes[LANE_DENSE] == 0)
        n = n > all / KV_STREAM_REACH ? n : all / KV_STREAM_REACH + 1;
    return min_u64(n, all);
}

/* How many rings so many blocks are: one at least, which may then run alone. */
static uint32_t rings_in(const struct engine_config *cfg, const struct kv_geometry *geo,
                         uint64_t per_seq, uint64_t blocks)
{
    struct ring ring = ring_of(cfg, geo, per_seq);
    uint64_t n = blocks > 2 * ring.chunk ? (blocks - 2 * ring.chunk) / ring.window : 0;
    if (blocks >= per_seq * cfg->max_num_seqs)
        n = cfg->max_num_seqs;
    return (uint32_t)min_u64(n > 1 ? n : 1, cfg->max_num_seqs);
}

/* Bytes of each tier as asked, or chosen. */
struct wish {
    uint64_t hbm, dram;
};

/* What every sequence at full length would take: of STREAM lanes, its ring. */
static struct wish choose_bytes(const struct engine_config *cfg, const struct kv_geometry *geo,
                                uint64_t per_seq, const struct memory_room *room)
{
    const size_t *unit = geo->block_bytes;
    uint64_t all = per_seq * cfg->max_num_seqs * (unit[LANE_SPARSE] + unit[LANE_DENSE]);
    if (unit[LANE_STREAM] > 0)
        all += ring_blocks(cfg, geo, per_seq) * unit[LANE_STREAM];
    struct wish w = {cfg->kv_hbm_bytes, cfg->kv_dram_bytes};
    if (w.hbm == 0)
        w.hbm = room->bytes == 0 ? all : min_u64(all, room->most);
    return w;
}

/* HBM blocks of SPARSE lanes that a long sequence cannot do without: tail and selected pages. */
static double floor_blocks(const struct engine_config *cfg, const struct kv_geometry *geo,
                           double blocks)
{
    static const double USUAL_BUDGET = 0.05; /* where every request chooses for itself */
    double share = cfg->sparse.plugin != 0 ? (double)cfg->sparse.budget : USUAL_BUDGET;
    double selected = share > 1 ? share / geo->block_rows : share * blocks;
    double least = (double)(SEGMENT_ROWS + TAIL_ROWS) / geo->block_rows + selected + 3;
    return least < blocks ? least : blocks;
}

/* DENSE lanes need HBM for every position of a sequence that runs, wherever its SPARSE lanes are. Where
 * HBM cannot have all sequences at full length, it is divided so that both classes end with the same
 * number of them; but there is never more DENSE than both tiers have of SPARSE. */
static void divide_hbm(struct memory_plan *p, const struct engine_config *cfg, uint64_t rest,
                       uint64_t per_seq)
{
    const uint64_t unit = p->geo.block_bytes[LANE_SPARSE],
                   unit_dense = p->geo.block_bytes[LANE_DENSE];
    const uint64_t dram = p->blocks[LANE_SPARSE][KV_DRAM], all = per_seq * cfg->max_num_seqs;
    const bool holds_all = rest >= all * (unit + unit_dense);
    uint64_t sparse = 0, dense = 0;
    if (unit == 0) {
        dense = unit_dense > 0 ? rest / unit_dense : 0;
    } else {
        uint64_t beyond = holds_all ? 0 : min_u64(dram, all) * unit_dense; /* what lies in DRAM */
        sparse = rest > beyond ? (rest - beyond) / (unit + unit_dense) : 0;
        double per = (double)per_seq * (double)unit_dense +
                     floor_blocks(cfg, &p->geo, (double)per_seq) * (double)unit;
        double n = (double)rest / per; /* sequences that can run with DRAM behind them */
        if (unit_dense > 0 && dram > 0 && n < cfg->max_num_seqs) {
            n = n < 1 ? 1 : n;
            dense = min_u64((uint64_t)(n * (double)per_seq), rest / 2 / unit_dense);
            sparse = max_u64(sparse, (rest - dense * unit_dense) / unit);
        }
        dense = unit_dense > 0 ? (rest - sparse * unit) / unit_dense : 0;
        dense = min_u64(dense, sparse + dram);
    }
    p->blocks[LANE_SPARSE][KV_HBM] = (uint32_t)min_u64(sparse, UINT32_MAX / 4);
    p->blocks[LANE_DENSE][KV_HBM] = (uint32_t)min_u64(dense, UINT32_MAX / 4);
}

static void divide(struct memory_plan *p, const struct engine_config *cfg, const struct wish *w,
                   uint64_t per_seq)
{
    const size_t *unit = p->geo.block_bytes;
    uint64_t hbm = w->hbm, ring = 0;
    p->max_num_seqs = cfg->max_num_seqs;
    if (unit[LANE_STREAM] > 0) {
        struct ring one = ring_of(cfg, &p->geo, per_seq);
        uint64_t others = per_seq * cfg->max_num_seqs * (unit[LANE_SPARSE] + unit[LANE_DENSE]);
        uint64_t most = hbm / 4 + others < hbm ? hbm - others : hbm / 4;
        ring = min_u64(ring_blocks(cfg, &p->geo, per_seq), most / unit[LANE_STREAM]);
        /* With less not even one sequence can run. */
        ring = ring > one.window + one.chunk ? ring : one.window + one.chunk;
        ring = min_u64(ring, hbm / unit[LANE_STREAM]);
        hbm -= ring * unit[LANE_STREAM];
        p->blocks[LANE_STREAM][KV_HBM] = (uint32_t)ring;
        p->max_num_seqs = rings_in(cfg, &p->geo, per_seq, ring);
    }
    /* What is paused takes its parts of every class along. */
    size_t down = unit[LANE_SPARSE] + unit[LANE_DENSE];
    size_t stream_share = unit[LANE_STREAM] / 4; /* of a long sequence few blocks are in the ring */
    uint32_t dram =
        (uint32_t)min_u64(down > 0 ? w->dram / (down + stream_share) : 0, UINT32_MAX / 4);
    p->blocks[LANE_SPARSE][KV_DRAM] = unit[LANE_SPARSE] > 0 ? dram : 0;
    p->blocks[LANE_DENSE][KV_DRAM] = unit[LANE_DENSE] > 0 ? dram : 0;
    if (unit[LANE_STREAM] > 0)
        p->blocks[LANE_STREAM][KV_DRAM] =
            (uint32_t)min_u64((w->dram - (uint64_t)dram * down) / unit[LANE_STREAM], ring);
    divide_hbm(p, cfg, hbm, per_seq);
}

static void add_up(struct memory_plan *p)
{
    uint64_t sparse = (uint64_t)p->blocks[LANE_SPARSE][KV_HBM] + p->blocks[LANE_SPARSE][KV_DRAM];
    uint64_t per = SEGMENT_ROWS / p->geo.block_rows;
    for (int c = 0; c < LANE_CLASSES; c++) {
        p->hbm_bytes += (uint64_t)p->blocks[c][KV_HBM] * p->geo.block_bytes[c];
        p->dram_bytes += (uint64_t)p->blocks[c][KV_DRAM] * p->geo.block_bytes[c];
    }
    if (p->record_lane_bytes == 0 || p->geo.n_lanes[LANE_SPARSE] == 0)
        return;
    p->n_records = (uint32_t)(sparse / per + 1);
    p->record_bytes = (uint64_t)p->n_records * p->geo.n_lanes[LANE_SPARSE] * p->record_lane_bytes;
}

/* The longest sequence: whole in HBM, or, where it attends by plan, in DRAM. */
static uint64_t longest_blocks(const struct memory_plan *p)
{
    const size_t *unit = p->geo.block_bytes;
    uint64_t n = UINT32_MAX;
    if (unit[LANE_SPARSE] > 0) {
        uint64_t dram = p->spills ? p->blocks[LANE_SPARSE][KV_DRAM] : 0;
        n = p->blocks[LANE_SPARSE][KV_HBM] > dram ? p->blocks[LANE_SPARSE][KV_HBM] : dram;
    }
    if (unit[LANE_DENSE] > 0)
        n = min_u64(n, p->blocks[LANE_DENSE][KV_HBM]);
    if (unit[LANE_SPARSE] + unit[LANE_DENSE] == 0)
        n = (uint64_t)KV_STREAM_REACH *
            ((uint64_t)p->blocks[LANE_STREAM][KV_HBM] + p->blocks[LANE_STREAM][KV_DRAM]);
    return n;
}

/* Bytes of digests for each block that SPARSE lanes have. */
static double digest_per_block(const struct memory_plan *p)
{
    double lanes = (double)p->record_lane_bytes * p->geo.n_lanes[LANE_SPARSE];
    return lanes * p->geo.block_rows / SEGMENT_ROWS;
}

/* The largest first tier that leaves room for the digests of both and for what requests keep. */
static double fitting_hbm(const struct memory_plan *p, double available)
{
    const size_t *bytes = p->geo.block_bytes;
    double digest = digest_per_block(p), unit = (double)(bytes[LANE_SPARSE] + bytes[LANE_DENSE]);
    unit = unit > 0 ? unit : (double)bytes[LANE_STREAM];
    available -= digest * (p->blocks[LANE_SPARSE][KV_DRAM] + (double)SEGMENT_ROWS / 8);
    available -= digest > 0 ? (double)ATTENTION_KEPT_BYTES : 0;
    return available > 0 ? available / (unit + digest) * unit : 0;
}

static status check_bytes(const struct memory_plan *p, const struct wish *w,
                          const struct memory_room *room)
{
    /* Any request may name a plug-in that seals, whatever the server's own choice is, and with it an
     * interval. */
    uint64_t beside = p->record_bytes, all;
    if (p->record_bytes > 0)
        beside += ATTENTION_KEPT_BYTES;
    all = p->hbm_bytes + beside + (room->apart ? 0 : p->dram_bytes);
    if (room->bytes != 0 && all > room->bytes) {
        uint64_t others = room->apart ? min_u64(room->steps, room->bytes / 2) : p->dram_bytes;
        double fits = fitting_hbm(p, (double)room->bytes - (double)others);
        return err(ERR_MEMORY,
                   "the KV arenas and digests (%.1f GiB) are larger than the memory available "
                   "(%.1f GiB): lower --kv-hbm or --kv-dram; --kv-hbm %.0fM would fit",
                   gib(all), gib(room->bytes), fits / 1048576);
    }
    if (room->apart && room->host_bytes != 0 && p->dram_bytes > room->host_bytes)
        return err(ERR_MEMORY,
                   "--kv-dram (%.1f GiB) is larger than the memory of the host that is available: "
                   "lower it to %.0fM",
                   gib(p->dram_bytes), (double)room->host_bytes / 1048576);
    for (int c = 0; c < LANE_CLASSES; c++)
        if (p->geo.block_bytes[c] > 0 && p->blocks[c][KV_HBM] == 0)
            return err(ERR_MEMORY, "--kv-hbm (%llu bytes) is smaller than one block (%llu bytes)",
                       (unsigned long long)w->hbm,
                       (unsigned long long)p->geo.block_bytes[LANE_SPARSE] +
                           p->geo.block_bytes[LANE_DENSE] + p->geo.block_bytes[LANE_STREAM]);
    return OK;
}

/* What the operator asked for is not made smaller; but a step that finds no memory ends its requests. */
static void warn_of_steps(const struct memory_plan *p, const struct engine_config *cfg,
                          const struct memory_room *room)
{
    uint64_t taken = p->hbm_bytes + p->record_bytes;
    uint64_t left = taken < room->bytes ? room->bytes - taken : 0;
    if (room->bytes != 0 && left < room->steps)
        log_line(
            LOG_WARN,
            "KV and digests leave %.1f GiB of the device's memory to steps; with %u tokens each "
            "these may want %.1f: lower --kv-hbm, --gpu-memory-utilization or "
            "--max-num-batched-tokens",
            gib(left), cfg->max_batched_tokens, gib(room->steps));
}

/* Rings beside nothing are cheap; but one must be there whole. */
static status check_rings(const struct memory_plan *p, const struct engine_config *cfg,
                          uint64_t per_seq)
{
    size_t unit = p->geo.block_bytes[LANE_STREAM];
    struct ring one = ring_of(cfg, &p->geo, per_seq);
    if (unit > 0 && p->blocks[LANE_STREAM][KV_HBM] < one.window + one.chunk)
        return err(ERR_MEMORY,
                   "one sequence needs %llu bytes of STREAM lanes, --kv-hbm gives %llu: raise "
                   "--kv-hbm or lower --max-num-batched-tokens or --head-policy-recent",
                   (unsigned long long)(one.window + one.chunk) * unit,
                   (unsigned long long)p->blocks[LANE_STREAM][KV_HBM] * unit);
    if (p->max_num_seqs < cfg->max_num_seqs)
        log_line(LOG_WARN, "max_num_seqs cut from %u to %u: the STREAM lanes have room for no more",
                 cfg->max_num_seqs, p->max_num_seqs);
    return OK;
}

static status check_length(struct memory_plan *p, const struct engine_config *cfg,
                           uint32_t model_len)
{
    uint32_t r = p->geo.block_rows;
    uint64_t blocks = ((uint64_t)model_len + r - 1) / r;
    p->max_model_len = (uint32_t)min_u64(model_len, longest_blocks(p) * r);
    if (p->max_model_len == model_len)
        return OK;
    uint64_t per_block = p->geo.block_bytes[LANE_SPARSE] + p->geo.block_bytes[LANE_DENSE];
    per_block = per_block > 0 ? per_block : p->geo.block_bytes[LANE_STREAM] / KV_STREAM_REACH;
    if (cfg->max_model_len != 0)
        return err(ERR_MEMORY,
                   "--max-model-len %u needs %.2f GiB of KV, --kv-hbm gives %.2f GiB: raise "
                   "--kv-hbm%s or lower --max-model-len to %u",
                   model_len, gib(blocks * per_block), gib(p->hbm_bytes),
                   p->spills ? " or --kv-dram" : "", p->max_model_len);
    log_line(LOG_WARN, "max_model_len cut from %u to %u: %s no more", model_len, p->max_model_len,
             p->spills ? "--kv-hbm and --kv-dram hold" : "--kv-hbm holds");
    return OK;
}

status memory_plan_make(struct memory_plan *p, const struct engine_config *cfg,
                        const struct kv_geometry *geo, size_t record_lane_bytes, uint32_t model_len,
                        const struct memory_room *room)
{
    uint64_t per_seq = ((uint64_t)model_len + geo->block_rows - 1) / geo->block_rows;
    struct wish w = choose_bytes(cfg, geo, per_seq, room);
    *p = (struct memory_plan){
        .geo = *geo, .record_lane_bytes = record_lane_bytes, .spills = cfg->sparse.plugin != 0};
    divide(p, cfg, &w, per_seq);
    if (cfg->kv_hbm_bytes == 0 && room->apart && room->bytes != 0) {
        w.hbm = min_u64(w.hbm, (uint64_t)fitting_hbm(p, (double)room->most));
        divide(p, cfg, &w, per_seq);
    }
    add_up(p);
    TRY(check_rings(p, cfg, per_seq));
    TRY(check_bytes(p, &w, room));
    warn_of_steps(p, cfg, room);
    return check_length(p, cfg, model_len);
}

/* ---- telling ---- */

static void tell_class(const struct memory_plan *p, enum lane_class c, const char *name,
                       void (*line)(void *arg, const char *text), void *arg)
{
    char text[256];
    const uint32_t *n = p->blocks[c];
    uint64_t unit = p->geo.block_bytes[c];
    if (unit == 0)
        return;
    snprintf(text, sizeof text,
             "%s: %u lanes, blocks of %u positions, %.1f KiB; HBM tier %u blocks, %.2f GiB, %.0f "
             "tokens; DRAM tier %u blocks, %.2f GiB",
             name, p->geo.n_lanes[c], p->geo.block_rows, (double)unit / 1024, n[KV_HBM],
             gib(n[KV_HBM] * unit), (double)n[KV_HBM] * p->geo.block_rows, n[KV_DRAM],
             gib(n[KV_DRAM] * unit));
    line(arg, text);
}

/* What a head policy saves: its lanes keep so many rows of a sequence at full length. */
static void tell_saving(const struct memory_plan *p, void (*line)(void *arg, const char *text),
                        void *arg)
{
    char text[256];
    const struct kv_geometry *g = &p->geo;
    uint64_t rows = p->max_model_len, row = g->page_bytes / g->block_rows;
    uint64_t kept = min_u64((uint64_t)g->stream_sinks + g->stream_recent + 64, rows);
    uint64_t others = (uint64_t)g->n_lanes[LANE_SPARSE] + g->n_lanes[LANE_DENSE];
    uint64_t all = (others + g->n_lanes[LANE_STREAM]) * rows * row;
    uint64_t now = (others * rows + g->n_lanes[LANE_STREAM] * kept) * row;
    snprintf(
        text, sizeof text,
        "a sequence of %u tokens takes %.1f MiB of KV; %.1f MiB if all its lanes kept every row",
        p->max_model_len, (double)now / 1048576, (double)all / 1048576);
    line(arg, text);
}

void memory_plan_tell(const struct memory_plan *p, void (*line)(void *arg, const char *text),
                      void *arg)
{
    char text[256];
    const struct kv_geometry *g = &p->geo;
    bool split = g->block_bytes[LANE_DENSE] + g->block_bytes[LANE_STREAM] > 0;
    tell_class(p, LANE_SPARSE, split ? "KV cache, SPARSE lanes" : "KV cache", line, arg);
    tell_class(p, LANE_DENSE, "KV cache, DENSE lanes (exempt from selection)", line, arg);
    tell_class(p, LANE_STREAM, "KV cache, STREAM lanes (sinks and recent rows)", line, arg);
    if (g->type != KV_BF16) {
        snprintf(text, sizeof text, "K and V are kept as %s: half the bytes of %s",
                 kv_type_name(g->type), kv_type_name(KV_BF16));
        line(arg, text);
    }
    if (g->block_bytes[LANE_STREAM] > 0)
        tell_saving(p, line, arg);
    if (p->n_records > 0) {
        snprintf(text, sizeof text,
                 "digests: room for %u segments of %u positions, %.1f KiB each, %.2f GiB (touched "
                 "when a segment is sealed)",
                 p->n_records, (unsigned)SEGMENT_ROWS,
                 (double)p->record_lane_bytes * g->n_lanes[LANE_SPARSE] / 1024,
                 gib(p->record_bytes));
        line(arg, text);
    }
    enum lane_class main = g->block_bytes[LANE_SPARSE] > 0 ? LANE_SPARSE : LANE_DENSE;
    double blocks = p->blocks[main][KV_HBM] + (p->spills ? p->blocks[main][KV_DRAM] : 0.0);
    double tokens = blocks * g->block_rows;
    if (g->block_bytes[main] == 0)
        return;
    snprintf(text, sizeof text, "Maximum concurrency for %u tokens per request: %.2fx",
             p->max_model_len, tokens / p->max_model_len);
    line(arg, text);
}
