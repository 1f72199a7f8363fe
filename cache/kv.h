/* The KV substrate: block arenas by lane class in two tiers, block tables, reference counts, prefix
 * cache, residency.
 *
 * A *block* here is logical: R positions of a sequence, counted once however many sequences read it.
 * Its SPARSE part has a place in HBM, in DRAM, or in both (a twin: written behind, so that leaving HBM
 * costs nothing); its DENSE part has one in HBM, or in DRAM while nobody runs. STREAM lanes have a ring
 * per sequence. Every arena is block_bytes units of its class; id -> address is a multiply. On the CPU
 * backend all are host memory and every copy is real.
 *
 * Residence of a sequence:
 *   RESIDENT  everything in HBM. No table is touched, no byte moves.
 *   SPILLED   DRAM holds every sealed block's SPARSE part; HBM holds the tail and a hot set of
 *             n_slots blocks (DESIGN 4: B). DENSE and STREAM parts stay in HBM.
 *   PAUSED    (preempted) nothing in HBM; all of it in DRAM: goes on without recomputation.
 *
 * Sealing: kv_seq_seal_* turns a segment's rows into partitions (engine calls the plug-in between
 * begin and end). Sealed segments of a permuting layout are groups: found, shared and evicted whole,
 * with their digest record. Rows of other layouts are shared block by block, and a digest record is
 * found by (last block of the segment, digest id).
 *
 * Prefix cache: a keyed hash chain over (salt, layout id, token ids); tokens are compared on every
 * hit, so a collision is a miss. Only rows computed densely are offered (the caller says how many), so
 * a hit changes no token. Where a prefix ends inside a group, or within TAIL_ROWS behind its end, its
 * rows are copied back into position order (backend op `unpermute`) in blocks of the new sequence. A
 * sequence therefore sees the same bytes with and without hits. Evicted blocks leave HBM first, then
 * DRAM, LRU by leaf.
 *
 * The engine thread owns everything here. What allocates after kv_seq_open: tables, which double as a
 * sequence grows; leaves, from a pool, as SPILLED segments are sealed; and hot sets, at a spill and
 * when they get more slots. Without memory all of these fail with ERR_MEMORY and nothing has changed;
 * what shrinks, pauses or closes never fails for it. The prefix index doubles as it fills; that alone
 * ends the process. */
#ifndef CACHE_KV_H
#define CACHE_KV_H

#include "kernels/backend.h"
#include "kernels/core/hot_set.h"

struct kv;

enum kv_tier { KV_HBM, KV_DRAM };

/* In STREAM lanes alone most blocks of a sequence have no place: there are so many for each. */
enum { KV_STREAM_REACH = 64 };

struct kv_config {
    struct kv_geometry geo;           /* geo.lanes is copied */
    uint32_t blocks[LANE_CLASSES][2]; /* units of each arena, by class and tier */
    uint32_t n_records;               /* digest records; 0 with a dense-only process */
    size_t record_lane_bytes;         /* of the largest digest that may be asked for; * 64 */
    uint64_t leaf_bytes;              /* bound of the leaf pool; 0: enough for every sequence */
    bool prefix_caching;
    uint64_t secret[2]; /* key of the hash */
    uint32_t hash_bits; /* 0: 128; tests set a few to see collisions */
};

/* n_layers * kv_heads classes; NULL: all SPARSE. The lanes array is owned by the geometry's user. Pages
 * are bf16 until kv_geometry_keep says otherwise. */
struct kv_geometry kv_geometry_make(uint32_t block_rows, uint32_t layers, uint32_t kv_heads,
                                    uint32_t head_dim);
void kv_geometry_keep(struct kv_geometry *geo, enum kv_type type);
/* Fills lanes[layers * kv_heads], n_lanes, block_bytes from classes. */
void kv_geometry_classify(struct kv_geometry *geo, const uint8_t *classes, struct lane_place *lanes,
                          uint32_t stream_sinks, uint32_t stream_recent);

status kv_create(struct kv **out, struct backend *be, const struct kv_config *cfg);
void kv_destroy(struct kv *kv);
const struct kv_memory *kv_memory(const struct kv *kv); /* for the backend's operations */
const struct kv_geometry *kv_geometry(const struct kv *kv);

enum kv_residence { KV_RESIDENT, KV_SPILLED, KV_PAUSED };

/* How a sequence's sealed rows are laid out and digested (sparse_layout_id, sparse_digest_id). */
struct kv_layout {
    uint64_t layout_id; /* 0: position order */
    uint64_t digest_id; /* 0: no records */
    bool seals;         /* false: `dense`; nothing is ever sealed */
};

/* A sequence's view of the substrate. Fields are read-only outside cache/. */
struct kv_seq {
    enum kv_residence residence;
    struct kv_layout layout;
    const block_id *table[LANE_CLASSES]; /* [n_blocks] physical ids for the kernels (batch_seq) */
    uint32_t n_blocks, max_blocks;
    uint32_t n_segments;     /* sealed */
    const uint32_t *records; /* [n_segments] */
    struct hot_set *hot;     /* SPILLED only */
    uint32_t n_slots;        /* B: HBM blocks of the hot set */
    uint32_t n_shared;       /* leading blocks that are offered to the prefix index */
    uint32_t n_cut;          /* blocks of the hit at its opening for which there was no room */
    uint64_t salt[2];
    struct kv_seq_private *own;
};

struct kv_open {
    uint64_t salt[2];
    const uint32_t *tokens; /* [n] */
    uint32_t n;
    uint32_t max_rows; /* positions it will hold at most */
    uint32_t max_hit;  /* rows a hit may cover at most (prompt - 1, or 0: none) */
    uint32_t
        chunk; /* the rest is computed by so many rows, each of which attends the hit; 0: at once */
    bool up;   /* RESIDENT if it fits, though less would be moved SPILLED */
    struct kv_layout layout;
};

/* Opens a sequence, RESIDENT, and takes the longest hit. Blocks of the hit that are in DRAM only are
 * copied up where HBM has room; where the layout seals and it has none, or only at the price of copying
 * other prefixes down, the sequence opens SPILLED with min_slots instead; where it has no room for those either, the hit is cut (n_cut). *n_hit: positions
 * taken, a multiple of R (of SEGMENT_ROWS where STREAM lanes are in use). ERR_FULL: max_rows can never fit this process (in HBM whole, or in DRAM with min_slots and
 * tail in HBM), or needs more than HOT_MAX_SLOTS to lie in DRAM. ERR_MEMORY. */
status kv_seq_open(struct kv *kv, struct kv_seq *s, const struct kv_open *o, uint32_t min_slots,
                   uint32_t *n_hit);
/* What was cut of the hit, at the opening by o that came last, becomes the youngest of what may be dropped: whoever
 * makes room for it must not do so by dropping it. */
void kv_seq_keep_cut(struct kv *kv, struct kv_seq *s, const struct kv_open *o);
/* Makes the tables cover n_rows positions: those that the coming step computes end there. ERR_FULL:
 * not enough HBM, and nothing changed. A STREAM ring drops what no row of that step or later attends;
 * so a step that was granted and did not run must be followed by one that ends no later, or by
 * kv_seq_pause, or by kv_seq_close. */
status kv_seq_grow(struct kv *kv, struct kv_seq *s, uint32_t n_rows);
/* Rows up to n_rows have been computed and will not be again: if that is all that was granted, a STREAM
 * ring drops now what no later row attends, so that who is passed over for a while holds no more than its
 * window. RESIDENT or SPILLED. */
void kv_seq_settle(struct kv *kv, struct kv_seq *s, uint32_t n_rows);
/* The first n_rows positions hold these tokens' K and V, computed densely: full blocks (and sealed
 * groups) become shareable. tokens: all of the sequence from position 0. */
void kv_seq_share(struct kv *kv, struct kv_seq *s, const uint32_t *tokens, uint32_t n_rows);

/* Segments that must be sealed before row n_rows is computed: those that end at or before
 * n_rows - TAIL_ROWS. The scheduler lets no step cross such a border (engine/sched.h: one exception). */
static inline uint32_t kv_segments_due(uint32_t n_rows)
{
    return n_rows < SEGMENT_ROWS + TAIL_ROWS ? 0 : (n_rows - TAIL_ROWS) / SEGMENT_ROWS;
}
/* The first row after which a step must end, for a sequence that stands at n_rows. */
static inline uint32_t kv_next_border(uint32_t n_rows)
{
    return (kv_segments_due(n_rows) + 1) * SEGMENT_ROWS + TAIL_ROWS;
}

struct kv_seal {
    bool found; /* the prefix index had the segment sealed: nothing to compute */
    uint32_t segment, record;
    const block_id *from, *to; /* [SEGMENT_ROWS / R] HBM, valid until the end call */
};
/* Next segment (number n_segments). tokens as in share, or NULL where the rows may not be shared.
 * The segment is offered at once, before the seal has run: whoever finds it reads it behind the seal in
 * the backend's queue. After a step that failed it may be wrong: kv_drop_prefixes.
 * ERR_FULL: no room for the copy (permuting a block that others read), and nothing changed. */
status kv_seq_seal_begin(struct kv *kv, struct kv_seq *s, const uint32_t *tokens,
                         struct kv_seal *out);
/* After the plug-in has queued its work (or at once if found), and before any other call. SPILLED: the
 * segment goes to DRAM. */
void kv_seq_seal_end(struct kv *kv, struct kv_seq *s, struct kv_seal *seal);

/* ---- residence. All: ERR_FULL when a tier lacks room or n_slots is above HOT_MAX_SLOTS, ERR_MEMORY; and
 * nothing changed. ---- */

/* RESIDENT -> SPILLED with n_slots. Frees (sealed blocks - n_slots) of HBM where nobody else reads
 * them; copies what was not written behind. */
status kv_seq_spill(struct kv *kv, struct kv_seq *s, uint32_t n_slots);
status kv_seq_restore(struct kv *kv, struct kv_seq *s);                  /* SPILLED -> RESIDENT */
status kv_seq_resize(struct kv *kv, struct kv_seq *s, uint32_t n_slots); /* SPILLED: change B */
status kv_seq_pause(struct kv *kv, struct kv_seq *s);                    /* -> PAUSED */
/* PAUSED -> RESIDENT (n_slots 0) or SPILLED. */
status kv_seq_resume(struct kv *kv, struct kv_seq *s, uint32_t n_slots);
/* After a step in which these attended by plan: nothing of their hot sets is in use any more. Who is not
 * SPILLED is passed over. Curves for budgets: hot_set_curve(s->hot) (cache/residency.h). */
void kv_step(struct kv *kv, struct kv_seq *const *seqs, uint32_t n);
/* Gives everything back. The struct may be opened again. */
void kv_seq_close(struct kv *kv, struct kv_seq *s);

/* ---- prompts that are computed layer by layer (engine/layer_major.h) ---- */

/* Makes a sequence that was opened without a hit, and has no blocks, SPILLED with n_slots, n_rows positions long
 * and sealed as it will be then. Nothing is in its pages and records: the caller writes them, where table[] and
 * records[] say, before a row attends them. Without STREAM lanes. ERR_FULL, ERR_MEMORY: only kv_seq_close may
 * follow. */
status kv_seq_lay(struct kv *kv, struct kv_seq *s, uint32_t n_rows, uint32_t n_slots);
/* The caller has written all of it: for the counts. */
void kv_seq_laid(struct kv *kv, const struct kv_seq *s);

/* Places of the SPARSE arena in HBM (ascending), and digest records, that are nobody's blocks. */
struct kv_loan {
    block_id *places; /* [n_places], owned by the substrate */
    uint32_t n_places, n_records;
    uint32_t records[2]; /* [n_records] */
};
/* One at a time. ERR_FULL, ERR_MEMORY: nothing changed. */
status kv_loan_take(struct kv *kv, uint32_t n_places, uint32_t n_records, struct kv_loan *out);
void kv_loan_end(struct kv *kv);

/* Copies at most max_blocks sealed blocks of RESIDENT sequences (or cached ones) into spare DRAM, so
 * that spilling them later is free. Returns how many; 0: nothing to do. */
uint32_t kv_write_behind(struct kv *kv, uint32_t max_blocks);

/* ---- what the scheduler asks ---- */

/* Takes note of how much of the DRAM tier is there by now. Now and then, until counts say that it ended. */
void kv_poll(struct kv *kv);

/* HBM blocks (of the scarcest class, in positions / R) that grow could hand out now. */
uint32_t kv_available(const struct kv *kv);
/* HBM blocks that spilling s to n_slots would free; 0 if it cannot be spilled (RESIDENT only, layout
 * seals, DRAM has room for what is missing). */
uint32_t kv_spill_gain(const struct kv *kv, const struct kv_seq *s, uint32_t n_slots);
/* There is a second tier, or will be: it may come behind the start (kv_poll). */
bool kv_has_dram(const struct kv *kv);
/* DRAM blocks free or evictable. */
uint32_t kv_dram_available(const struct kv *kv);

struct kv_counts {
    uint32_t total[2], free[2]; /* SPARSE arenas, by tier */
    uint32_t cached[2];         /* held by the prefix index alone */
    uint32_t active;            /* referenced by sequences */
    uint32_t n_resident, n_spilled, n_paused;
    uint64_t queried_tokens, hit_tokens; /* since start */
    uint64_t moved_down, moved_up;       /* blocks copied HBM -> DRAM, DRAM -> HBM */
    uint64_t written_behind, spills, restores, pauses;
    uint64_t page_hits, page_misses, light_misses, fetched_bytes; /* of hot sets */
    uint64_t dram_ready,
        dram_bytes;       /* of the DRAM tier: there at the last poll, and to come in all */
    bool dram_ended;      /* no more will come */
    const char *dram_why; /* why it ended before its time, and what to do; else NULL */
    uint64_t table_bytes; /* block tables, directories, leaves, slot records */
    uint64_t leaf_bytes;  /* of these, leaves */
    uint64_t index_bytes; /* prefix index and block records */
    uint64_t record_bytes_used, map_bytes_used; /* digests in use; row -> position maps in them */
};
void kv_counts(const struct kv *kv, struct kv_counts *out);
/* Forgets every block that no sequence reads. */
void kv_drop_prefixes(struct kv *kv);
/* Walks everything and CHECKs every invariant. For tests and the debug build. seqs: all open. */
void kv_audit(const struct kv *kv, struct kv_seq *const *seqs, uint32_t n_seqs);

#endif
