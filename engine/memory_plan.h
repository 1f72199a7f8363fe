/* How many blocks each tier gets, and what that means in tokens: decided once, before anything is
 * allocated, and refused with numbers that would work. */
#ifndef ENGINE_MEMORY_PLAN_H
#define ENGINE_MEMORY_PLAN_H

#include "cache/kv.h"
#include "engine/engine.h"

struct memory_plan {
    struct kv_geometry geo;
    uint32_t blocks[2];     /* HBM, DRAM */
    uint32_t max_model_len; /* what was asked, cut to what the HBM arena holds */
};

/* model_len: the longest context asked for (the model's own or --max-model-len). ERR_MEMORY: not even
 * one block row per sequence fits. available_bytes: what the machine can give (0: unknown). */
status memory_plan_make(struct memory_plan *p, const struct engine_config *cfg,
                        const struct kv_geometry *geo, uint32_t model_len,
                        uint64_t available_bytes);
/* MemAvailable of this machine, bounded by its memory cgroup; 0: unknown. */
uint64_t memory_available(void);

#endif
