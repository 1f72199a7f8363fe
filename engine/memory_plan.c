/* Sizes of the arenas (memory_plan.h).
 *
 * Defaults on a CPU: enough for every sequence at full length, but at most a quarter of the memory
 * that is available now for the first tier and an eighth for the second. Pages of an arena that
 * nobody touched cost nothing, so a generous arena does not slow the start. */
#include "engine/memory_plan.h"

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

status memory_plan_make(struct memory_plan *p, const struct engine_config *cfg,
                        const struct kv_geometry *geo, uint32_t model_len, uint64_t available_bytes)
{
    uint64_t per_seq = ((uint64_t)model_len + geo->block_rows - 1) / geo->block_rows;
    uint64_t all = per_seq * cfg->max_num_seqs, unit = geo->block_bytes[LANE_SPARSE];
    uint64_t hbm = cfg->kv_hbm_bytes / unit, dram = cfg->kv_dram_bytes / unit;
    if (cfg->kv_hbm_bytes == 0)
        hbm = available_bytes == 0 ? all : min_u64(all, available_bytes / 4 / unit);
    if (cfg->kv_dram_bytes == ENGINE_KV_AUTO)
        dram = available_bytes == 0 ? 0 : min_u64(all, available_bytes / 8 / unit);
    hbm = min_u64(hbm, UINT32_MAX / 2);
    dram = min_u64(dram, UINT32_MAX / 2);
    if (available_bytes != 0 && (hbm + dram) * unit > available_bytes)
        return err(
            ERR_MEMORY,
            "the KV arenas (%.1f GiB) are larger than the memory available (%.1f GiB): lower "
            "--kv-hbm or --kv-dram",
            (double)((hbm + dram) * unit) / 1073741824.0, (double)available_bytes / 1073741824.0);
    if (hbm == 0)
        return err(ERR_MEMORY, "--kv-hbm is smaller than one block (%llu bytes)",
                   (unsigned long long)unit);
    *p = (struct memory_plan){.geo = *geo, .blocks = {(uint32_t)hbm, (uint32_t)dram}};
    p->max_model_len = (uint32_t)min_u64(model_len, hbm * geo->block_rows);
    if (p->max_model_len < model_len && cfg->max_model_len != 0)
        return err(
            ERR_MEMORY,
            "--max-model-len %u needs %.2f GiB of KV, --kv-hbm gives %.2f GiB: raise --kv-hbm "
            "or lower --max-model-len to %u",
            model_len, (double)(per_seq * unit) / 1073741824.0, (double)(hbm * unit) / 1073741824.0,
            p->max_model_len);
    if (p->max_model_len < model_len)
        log_line(LOG_WARN, "max_model_len cut from %u to %u: --kv-hbm holds no more", model_len,
                 p->max_model_len);
    double tokens = (double)hbm * geo->block_rows;
    log_line(
        LOG_INFO,
        "KV cache: blocks of %u positions, %.1f KiB; HBM tier %u blocks, %.2f GiB, %.0f tokens; "
        "DRAM tier %u blocks, %.2f GiB",
        geo->block_rows, (double)unit / 1024, p->blocks[0], (double)(hbm * unit) / 1073741824.0,
        tokens, p->blocks[1], (double)(dram * unit) / 1073741824.0);
    log_line(LOG_INFO, "Maximum concurrency for %u tokens per request: %.2fx", p->max_model_len,
             tokens / p->max_model_len);
    return OK;
}
