/* The KV substrate: block arenas in two tiers, block tables, reference counts, prefix cache.
 *
 * Both tiers are one arena each of block_bytes units; id -> address is a multiply. On the CPU
 * backend both are host memory and every copy is real. In this step every sequence is RESIDENT: all
 * its blocks are in the HBM arena. The DRAM arena holds prefix blocks that HBM had no room for; a
 * hit there is copied back.
 *
 * Prefix cache: full blocks are found by a keyed hash chain over (previous hash, token ids, salt,
 * layout id), and the token ids are compared on every hit, so a collision is a miss. A block whose
 * last reader leaves stays, evictable, LRU by leaf: HBM first (moved to DRAM if there is room, LRU
 * there too), then gone.
 *
 * Block states go through one function (block_move) and every illegal change dies there. The engine
 * thread owns everything here. Nothing allocates after kv_seq_open. */
#ifndef CACHE_KV_H
#define CACHE_KV_H

#include "kernels/backend.h"

struct kv;

struct kv_config {
    struct kv_geometry geo;
    uint32_t hbm_blocks, dram_blocks; /* dram_blocks may be 0 */
    bool prefix_caching;
    uint64_t layout_id; /* names plug-in and parameters when rows are permuted; 0: plain */
    uint64_t secret[2]; /* key of the hash */
    uint32_t hash_bits; /* 0: 128; tests set a few to see collisions */
};

struct kv_geometry kv_geometry_make(uint32_t block_rows, uint32_t layers, uint32_t kv_heads,
                                    uint32_t head_dim);

status kv_create(struct kv **out, struct backend *be, const struct kv_config *cfg);
void kv_destroy(struct kv *kv);
void *kv_arena(struct kv *kv); /* base of the HBM arena, for the backend's operations */
const struct kv_geometry *kv_geometry(const struct kv *kv);

/* A sequence's view of the substrate. Fields are read-only outside cache/. */
struct kv_seq {
    block_id *blocks; /* [n_blocks] block table, HBM ids */
    uint32_t n_blocks, max_blocks;
    uint32_t n_sealed; /* leading blocks whose content is final and offered to the prefix index */
    uint64_t salt[2];
    uint64_t tip[2]; /* hash chain over the first n_sealed blocks */
};

/* Opens a sequence that will hold at most max_rows positions. With prefix caching and may_hit, the
 * longest chain of full blocks that equals the start of tokens[n] is taken (referenced, copied up
 * from DRAM where needed); at least one token is always left to compute. *n_hit: positions found, a
 * multiple of R. ERR_FULL: max_rows does not fit the arena even when it is empty. ERR_MEMORY. */
status kv_seq_open(struct kv *kv, struct kv_seq *s, const uint64_t salt[2], const uint32_t *tokens,
                   uint32_t n, uint32_t max_rows, bool may_hit, uint32_t *n_hit);
/* Makes the table cover n_rows positions. ERR_FULL: not enough free or evictable blocks, and
 * nothing changed. */
status kv_seq_grow(struct kv *kv, struct kv_seq *s, uint32_t n_rows);
/* Positions 0 .. n_rows - 1 of the sequence now hold these tokens' K and V (tokens: all of the
 * sequence from position 0): full blocks become shareable. */
void kv_seq_seal(struct kv *kv, struct kv_seq *s, const uint32_t *tokens, uint32_t n_rows);
/* Gives every block back. The sequence may be opened again. */
void kv_seq_close(struct kv *kv, struct kv_seq *s);

/* Blocks that kv_seq_grow could hand out now: free or evictable, in HBM. */
uint32_t kv_available(const struct kv *kv);

enum kv_tier { KV_HBM, KV_DRAM };

struct kv_counts {
    uint32_t total[2], free[2];          /* by tier */
    uint32_t cached[2];                  /* held by the prefix index alone */
    uint32_t active;                     /* referenced by sequences (HBM) */
    uint64_t queried_tokens, hit_tokens; /* since start */
    uint64_t moved_down, moved_up;       /* blocks copied HBM -> DRAM, DRAM -> HBM */
    uint64_t table_bytes;                /* block tables, index and block records */
};
void kv_counts(const struct kv *kv, struct kv_counts *out);
/* Forgets every block that no sequence reads. */
void kv_drop_prefixes(struct kv *kv);
/* Walks everything and CHECKs every invariant: conservation, one owner, references equal holders,
 * index and records agree. For tests and the debug build. seqs: all open sequences. */
void kv_audit(const struct kv *kv, struct kv_seq *const *seqs, uint32_t n_seqs);

#endif
