/* How many blocks each class of lanes gets in each tier, and what that means in tokens: decided once,
 * before anything is allocated, and refused with numbers that would work.
 *
 *   SPARSE  HBM and DRAM; where DRAM holds sequences, HBM needs their tails and hot sets only
 *   DENSE   HBM for every position of whoever runs, since such lanes never spill; DRAM as well, for
 *           sequences that are paused
 *   STREAM  a ring per sequence that runs, and as much again for what the prefix cache keeps; room
 *           for one at least, and no more sequences run than have room: then none waits for a ring
 *   records beside --kv-hbm: digests and row -> position maps of every segment that can be stored */
#ifndef ENGINE_MEMORY_PLAN_H
#define ENGINE_MEMORY_PLAN_H

#include "cache/kv.h"
#include "engine/engine.h"

struct memory_plan {
    struct kv_geometry geo;
    uint32_t blocks[LANE_CLASSES][2]; /* units of each arena, by class and tier */
    uint32_t n_records;               /* digest records: of every segment that can be stored */
    size_t record_lane_bytes;
    bool spills;                                  /* sequences that do not choose attend by plan */
    uint32_t max_num_seqs;                        /* what was asked, cut to the rings there are */
    uint32_t max_model_len;                       /* what was asked, cut to what the tiers hold */
    uint64_t hbm_bytes, dram_bytes, record_bytes; /* of the arenas and records in all */
};

/* What the machine can give. */
struct memory_room {
    uint64_t bytes; /* 0: unknown */
    uint64_t
        most; /* of bytes: for the first tier where nobody says how much; apart: and for digests */
    uint64_t steps;      /* of bytes: what steps may want beside both */
    bool apart;          /* the second tier is other memory: the host's, of a device */
    uint64_t host_bytes; /* apart: of that; 0: unknown */
};

/* geo: with classes. model_len: the longest context asked for (the model's own or --max-model-len).
 * record_lane_bytes: of the largest digest that may be asked for; 0: none. ERR_MEMORY: not even one
 * block per class fits, or more is asked for than there is; the text says what would fit. */
status memory_plan_make(struct memory_plan *p, const struct engine_config *cfg,
                        const struct kv_geometry *geo, size_t record_lane_bytes, uint32_t model_len,
                        const struct memory_room *room);
/* A line for each part: for the log at start and for `spind inspect`. */
void memory_plan_tell(const struct memory_plan *p, void (*line)(void *arg, const char *text),
                      void *arg);
/* MemAvailable of this machine, bounded by its memory cgroup; 0: unknown. */
uint64_t memory_available(void);

#endif
