/* What engine.c and engine_open.c share. */
#ifndef ENGINE_ENGINE_INTERNAL_H
#define ENGINE_ENGINE_INTERNAL_H

#include "engine/engine.h"
#include "engine/model/model.h"
#include "engine/step.h"
#include "engine/tool/trace.h"

#include <pthread.h>

struct engine {
    struct engine_config cfg;
    uint32_t whole; /* the scheduler's */
    struct engine_info info;
    struct catalog catalog;
    struct backend *be;
    struct model *model;
    struct kv *kv;
    struct lane_place *lanes;   /* [layers * kv_heads] of the geometry */
    struct attention *at;       /* NULL: the device cannot attend by plan */
    struct trace_writer *trace; /* --record-selection; NULL: off */
    struct mailbox *mail;
    struct sched sched;
    struct step step;
    struct report report;
    struct msg_step stats;
    uint64_t n_submitted;
    uint32_t n_failed; /* steps in a row */
    char failure[200]; /* of the last of them */
    bool quit;
    uint64_t
        step_from; /* when the step to settle next was launched, or the one before it settled */
    bool changed;  /* the numbers of MSG_STEP moved outside a step */
    bool dram_growing;
    bool unscored_due;    /* selections without a score are to be read */
    uint64_t host_from;   /* since when the thread has been at work */
    uint64_t layers_told; /* when the log last said how far a prompt read layer by layer is */
    uint64_t dram_ready, dram_told,
        dram_since; /* bytes at the last poll and in the log; when it began */
    bool has_thread;
    pthread_t thread;
    char backend_text[200];
};

/* Gives back what engine_create got, and e; the thread has ended. */
void engine_close(struct engine *e);

#endif
