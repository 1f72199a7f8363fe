/* A model on a backend with a KV arena of its own, for tests of the numbers: no scheduler, no cache.
 * Sequence s of n owns blocks s, s + n, s + 2n, ...: neighbours in a table are not neighbours in
 * memory, so a kernel that confused the two would be seen. */
#ifndef TESTS_MODEL_RIG_H
#define TESTS_MODEL_RIG_H

#include "engine/model/model.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct rig {
    struct backend *be; /* borrowed */
    struct model *m;    /* borrowed */
    struct kv_geometry geo;
    void *arena;
    struct kv_memory kv;
    size_t arena_bytes;
    uint32_t n_seqs, blocks_per_seq;
    block_id *tables; /* [n_seqs][blocks_per_seq] */
    uint32_t
        n_spare; /* rows of a step that belong to no sequence; only where all logits are wanted */
};

/* Some consecutive tokens of one sequence in a step. */
struct rig_part {
    uint32_t seq, first_pos, n;
    const uint32_t *tokens; /* [n] */
};

enum { RIG_MAX_PARTS = 64, RIG_MAX_ROWS = 2048 };

static inline void rig_must(status st)
{
    if (st == OK)
        return;
    printf("Bail out! %s: %s\n", status_name(st), err_text());
    exit(1);
}

/* What pages of the next rig keep. */
static enum kv_type rig_kept;

static inline void rig_open(struct rig *r, struct backend *be, struct model *m, uint32_t block_rows,
                            uint32_t n_seqs, uint32_t positions)
{
    const struct model_shape *s = &model_info(m)->shape;
    *r = (struct rig){.be = be, .m = m, .n_seqs = n_seqs};
    r->geo = (struct kv_geometry){.block_rows = block_rows,
                                  .layers = s->layers,
                                  .kv_heads = s->kv_heads,
                                  .head_dim = s->head_dim,
                                  .type = rig_kept};
    r->geo.page_bytes = kv_page_bytes(&r->geo);
    r->geo.n_lanes[LANE_SPARSE] = s->layers * s->kv_heads;
    r->geo.block_bytes[LANE_SPARSE] = r->geo.page_bytes * s->layers * s->kv_heads;
    r->blocks_per_seq = (positions + block_rows - 1) / block_rows;
    r->arena_bytes = r->geo.block_bytes[LANE_SPARSE] * r->blocks_per_seq * n_seqs;
    r->arena = be->ops->alloc(be, r->arena_bytes);
    r->kv = (struct kv_memory){.geo = &r->geo, .hbm = {r->arena}};
    if (r->arena == NULL)
        rig_must(ERR_MEMORY);
    r->tables = mem_alloc((size_t)n_seqs * r->blocks_per_seq * sizeof *r->tables);
    for (uint32_t i = 0; i < n_seqs; i++)
        for (uint32_t j = 0; j < r->blocks_per_seq; j++)
            r->tables[(size_t)i * r->blocks_per_seq + j] = j * n_seqs + i;
}

static inline void rig_close(struct rig *r)
{
    r->be->ops->free(r->be, r->arena, r->arena_bytes);
    mem_free(r->tables);
}

/* One step. logit_rows NULL: of every row. Returns [n_logits][vocab], valid until the next step. */
static inline const float *rig_step(struct rig *r, const struct rig_part *parts, uint32_t n_parts,
                                    const uint32_t *logit_rows, uint32_t n_logits)
{
    static uint32_t tokens[RIG_MAX_ROWS], every[RIG_MAX_ROWS];
    struct batch_seq seqs[RIG_MAX_PARTS];
    uint32_t n = 0;
    CHECK(n_parts <= RIG_MAX_PARTS);
    for (uint32_t i = 0; i < n_parts; i++) {
        const struct rig_part *p = &parts[i];
        CHECK(p->seq < r->n_seqs && n + p->n <= RIG_MAX_ROWS);
        CHECK(p->first_pos + p->n <= r->blocks_per_seq * r->geo.block_rows);
        seqs[i] = (struct batch_seq){.first_row = n,
                                     .n_rows = p->n,
                                     .first_pos = p->first_pos,
                                     .blocks = {r->tables + (size_t)p->seq * r->blocks_per_seq}};
        memcpy(tokens + n, p->tokens, p->n * sizeof *tokens);
        n += p->n;
    }
    CHECK(n + r->n_spare <= RIG_MAX_ROWS && (r->n_spare == 0 || logit_rows == NULL));
    for (uint32_t i = 0; i < n + r->n_spare; i++)
        every[i] = i;
    memset(tokens + n, 0, r->n_spare * sizeof *tokens);
    struct batch b = {.kv = &r->kv,
                      .n_rows = n,
                      .n_seqs = n_parts,
                      .n_logits = logit_rows ? n_logits : n,
                      .tokens = tokens,
                      .seqs = seqs,
                      .logit_rows = logit_rows ? logit_rows : every,
                      .n_spare = r->n_spare};
    const float *logits = model_forward(r->m, &b);
    rig_must(r->be->ops->sync(r->be));
    return logits;
}

/* Where the default model lies; exits with what to do if it is not there. */
static inline const char *rig_model_path(void)
{
    static char path[1024];
    const char *set = getenv("SPIND_MODEL"), *cache = getenv("SPIND_CACHE");
    const char *xdg = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    const char *name = "SmolLM2-135M-Instruct.Q4_1.gguf";
    if (set != NULL)
        snprintf(path, sizeof path, "%s", set);
    else if (cache != NULL)
        snprintf(path, sizeof path, "%s/%s", cache, name);
    else if (xdg != NULL)
        snprintf(path, sizeof path, "%s/spind/%s", xdg, name);
    else
        snprintf(path, sizeof path, "%s/.cache/spind/%s", home ? home : "", name);
    FILE *f = fopen(path, "rb");
    if (f == NULL) {
        printf("Bail out! no model at %s: `make test` fetches it (configs/setup/model.sh), or name "
               "the "
               "file in SPIND_MODEL\n",
               path);
        exit(1);
    }
    fclose(f);
    return path;
}

static inline uint32_t rig_best(const float *logits, uint32_t vocab)
{
    uint32_t at = 0;
    for (uint32_t i = 1; i < vocab; i++)
        if (logits[i] > logits[at])
            at = i;
    return at;
}

/* KL(golden || ours) in nats, over the k best of a golden row and the rest of it. */
static inline double rig_kl(uint32_t k, const uint16_t *ids, const float *logp, float rest_logp,
                            const float *logits, uint32_t vocab)
{
    double max = (double)logits[rig_best(logits, vocab)], all = 0, top = 0, kl = 0;
    for (uint32_t i = 0; i < vocab; i++)
        all += exp((double)logits[i] - max);
    for (uint32_t i = 0; i < k; i++) {
        double q = exp((double)logits[ids[i]] - max) / all;
        top += q;
        kl += exp((double)logp[i]) * ((double)logp[i] - log(q));
    }
    double rest = (double)rest_logp;
    return kl + exp(rest) * (rest - log(1.0 - top));
}

#endif
