/* The KV cache against a model that copies everything: 100,000 random operations, and after each
 * one an audit, the same counts, the same hits, and in every page just what was written there.
 *
 * The model knows a block by the whole text before its end, looks for parents and children by
 * comparing texts, and finds victims by walking all entries for the oldest one without children.
 * It shares no idea of lists, hashes or node numbers with cache/. usage: kv [SEED] */
#include "tests/kv_rig.h"
#include "tests/tap.h"

#include <time.h>

enum {
    MAX_SEQS = 6,
    MAX_BLOCKS = 12,            /* of one sequence */
    MAX_ROWS = MAX_BLOCKS * 16, /* R is 8 or 16 */
    MAX_ENTRIES = 64,
    OPS = 25000, /* for each of four configurations */
};

/* A sealed block: the text from position 0 to its end. */
struct entry {
    bool used, pinned;
    uint32_t salt, n_blocks, refs;
    enum kv_tier tier;
    uint64_t released; /* when it became nobody's, or came to DRAM: order of eviction */
    uint32_t tokens[MAX_ROWS];
};

struct mirror {
    bool open;
    struct kv_seq seq;
    uint32_t salt, max_rows, n_sealed, n_blocks;
    uint64_t uid;
    uint32_t tokens[MAX_ROWS]; /* all it will ever have */
};

static struct kv *kv;
static struct kv_config cfg;
static struct entry entries[MAX_ENTRIES];
static struct mirror seqs[MAX_SEQS];
static uint64_t now, random_state, next_uid, n_checked;
static uint64_t n_hits, n_lifts;
static const uint64_t salts[3][2] = {{5, 6}, {5, 7}, {4, 6}};

static uint32_t below(uint32_t n)
{
    return (uint32_t)(rig_mix(&random_state) % n);
}

static uint64_t text_name(uint32_t salt, const uint32_t *tokens, uint32_t n_blocks)
{
    uint64_t h = salt + 1;
    for (uint32_t i = 0; i < n_blocks * cfg.geo.block_rows; i++) {
        h ^= tokens[i];
        h = rig_mix(&h);
    }
    return h;
}

static uint64_t private_name(const struct mirror *m, uint32_t block)
{
    return ~(m->uid * MAX_BLOCKS + block);
}

/* The model. */

static bool is_text(const struct entry *e, uint32_t salt, const uint32_t *tokens, uint32_t n_blocks)
{
    return e->used && e->salt == salt && e->n_blocks == n_blocks &&
           memcmp(e->tokens, tokens, n_blocks * cfg.geo.block_rows * sizeof(*tokens)) == 0;
}

static struct entry *model_find(uint32_t salt, const uint32_t *tokens, uint32_t n_blocks)
{
    for (int i = 0; i < MAX_ENTRIES; i++)
        if (is_text(&entries[i], salt, tokens, n_blocks))
            return &entries[i];
    return NULL;
}

static bool has_child(const struct entry *e, bool in_hbm_only)
{
    for (int i = 0; i < MAX_ENTRIES; i++) {
        const struct entry *c = &entries[i];
        if (c->used && c->n_blocks == e->n_blocks + 1 && (!in_hbm_only || c->tier == KV_HBM) &&
            is_text(e, c->salt, c->tokens, e->n_blocks))
            return true;
    }
    return false;
}

static struct entry *model_victim(enum kv_tier tier)
{
    struct entry *oldest = NULL;
    for (int i = 0; i < MAX_ENTRIES; i++) {
        struct entry *e = &entries[i];
        if (e->used && e->tier == tier && e->refs == 0 && !e->pinned &&
            !has_child(e, tier == KV_HBM) && (oldest == NULL || e->released < oldest->released))
            oldest = e;
    }
    return oldest;
}

static uint32_t model_used(enum kv_tier tier)
{
    uint32_t n = 0;
    for (int i = 0; i < MAX_ENTRIES; i++)
        n += entries[i].used && entries[i].tier == tier;
    for (int i = 0; i < MAX_SEQS && tier == KV_HBM; i++)
        if (seqs[i].open)
            n += seqs[i].n_blocks - (cfg.prefix_caching ? seqs[i].n_sealed : 0);
    return n;
}

static uint32_t model_cached(enum kv_tier tier)
{
    uint32_t n = 0;
    for (int i = 0; i < MAX_ENTRIES; i++)
        n += entries[i].used && entries[i].tier == tier && entries[i].refs == 0;
    return n;
}

static uint32_t model_available(void)
{
    return cfg.hbm_blocks - model_used(KV_HBM) + model_cached(KV_HBM);
}

/* Room for one block in HBM; false: there is none. */
static bool model_make_room(void)
{
    if (model_used(KV_HBM) < cfg.hbm_blocks)
        return true;
    struct entry *victim = model_victim(KV_HBM);
    if (victim == NULL)
        return false;
    if (model_used(KV_DRAM) == cfg.dram_blocks) {
        struct entry *gone = model_victim(KV_DRAM);
        if (gone != NULL)
            gone->used = false;
    }
    if (model_used(KV_DRAM) < cfg.dram_blocks) {
        victim->tier = KV_DRAM;
        victim->released = ++now;
    } else {
        CHECK(!has_child(victim, false));
        victim->used = false;
    }
    return true;
}

static uint32_t model_open(uint32_t salt, const uint32_t *tokens, uint32_t limit)
{
    struct entry *chain[MAX_BLOCKS];
    uint32_t n_chain = 0, n = 0;
    while (n_chain < limit && (chain[n_chain] = model_find(salt, tokens, n_chain + 1)) != NULL) {
        struct entry *e = chain[n_chain++];
        e->pinned = e->tier == KV_DRAM;
        e->refs += e->tier == KV_HBM;
    }
    for (; n < n_chain; n++) {
        if (chain[n]->tier == KV_HBM)
            continue;
        if (!model_make_room())
            break;
        chain[n]->tier = KV_HBM;
        chain[n]->refs = 1;
        chain[n]->pinned = false;
        n_lifts++;
    }
    for (uint32_t i = n_chain; i-- > n;) {
        chain[i]->pinned = false;
        chain[i]->released = ++now;
    }
    return n;
}

static void model_seal(struct mirror *m, uint32_t n_blocks)
{
    struct entry *e = model_find(m->salt, m->tokens, n_blocks);
    if (e != NULL) {
        e->tier = KV_HBM;
        e->refs++;
        return;
    }
    for (int i = 0; i < MAX_ENTRIES; i++)
        if (!entries[i].used) {
            entries[i] = (struct entry){
                .used = true, .salt = m->salt, .n_blocks = n_blocks, .refs = 1, .tier = KV_HBM};
            memcpy(entries[i].tokens, m->tokens, sizeof(m->tokens));
            return;
        }
    CHECK(!"the model has room for every block");
}

static void model_close(struct mirror *m)
{
    for (uint32_t i = cfg.prefix_caching ? m->n_sealed : 0; i > 0; i--) {
        struct entry *e = model_find(m->salt, m->tokens, i);
        CHECK(e != NULL && e->refs > 0);
        if (--e->refs == 0)
            e->released = ++now;
    }
    m->open = false;
}

/* Comparisons. */

static void check_content(struct mirror *m)
{
    for (uint32_t i = 0; i < m->n_blocks; i++) {
        uint64_t name = i < m->n_sealed ? text_name(m->salt, m->tokens, i + 1) : private_name(m, i);
        CHECK(rig_holds(kv, m->seq.blocks[i], name));
        n_checked++;
    }
}

static void check_all(void)
{
    struct kv_seq *open[MAX_SEQS];
    struct kv_counts c;
    uint32_t n_open = 0;
    for (int i = 0; i < MAX_SEQS; i++) {
        if (!seqs[i].open)
            continue;
        CHECK(seqs[i].seq.n_blocks == seqs[i].n_blocks);
        CHECK(seqs[i].seq.n_sealed == seqs[i].n_sealed);
        check_content(&seqs[i]);
        open[n_open++] = &seqs[i].seq;
    }
    kv_audit(kv, open, n_open);
    kv_counts(kv, &c);
    CHECK(c.free[KV_HBM] == cfg.hbm_blocks - model_used(KV_HBM));
    CHECK(c.free[KV_DRAM] == cfg.dram_blocks - model_used(KV_DRAM));
    CHECK(c.cached[KV_HBM] == model_cached(KV_HBM));
    CHECK(c.cached[KV_DRAM] == model_cached(KV_DRAM));
    CHECK(c.active + c.free[KV_HBM] + c.cached[KV_HBM] == cfg.hbm_blocks);
    CHECK(kv_available(kv) == model_available());
}

/* Operations. */

/* Texts branch in few ways, so that many begin alike. */
static void choose_text(struct mirror *m)
{
    for (uint32_t i = 0; i < MAX_BLOCKS; i++) {
        uint32_t way = below(4) == 0 ? below(3) : 0;
        for (uint32_t j = 0; j < cfg.geo.block_rows; j++)
            m->tokens[i * cfg.geo.block_rows + j] = way * 1000 + j;
    }
    m->salt = below(5) == 0 ? 1 + below(2) : 0;
}

static void op_open(struct mirror *m)
{
    uint32_t rows = cfg.geo.block_rows, n_hit;
    bool may_hit = below(8) != 0;
    choose_text(m);
    m->max_rows = 1 + below(MAX_BLOCKS * rows);
    uint32_t n = 1 + below(m->max_rows);
    bool too_big = (m->max_rows + rows - 1) / rows > cfg.hbm_blocks;
    status st =
        kv_seq_open(kv, &m->seq, salts[m->salt], m->tokens, n, m->max_rows, may_hit, &n_hit);
    CHECK(st == (too_big ? ERR_FULL : OK));
    if (too_big)
        return;
    uint32_t want =
        cfg.prefix_caching && may_hit ? model_open(m->salt, m->tokens, (n - 1) / rows) : 0;
    CHECK(n_hit == want * rows);
    n_hits += want;
    m->n_sealed = m->n_blocks = want;
    m->uid = next_uid++;
    m->open = true;
}

static void op_grow(struct mirror *m)
{
    uint32_t n_rows = below(m->max_rows + 1), rows = cfg.geo.block_rows;
    uint32_t want = (n_rows + rows - 1) / rows, more = want > m->n_blocks ? want - m->n_blocks : 0;
    bool fits = more <= model_available();
    CHECK(kv_seq_grow(kv, &m->seq, n_rows) == (fits ? OK : ERR_FULL));
    for (; fits && m->n_blocks < want; m->n_blocks++) {
        CHECK(model_make_room());
        rig_write(kv, m->seq.blocks[m->n_blocks], private_name(m, m->n_blocks));
    }
}

static void op_seal(struct mirror *m)
{
    uint32_t rows = cfg.geo.block_rows, room = m->n_blocks * rows;
    uint32_t n_rows = room < m->max_rows ? below(room + 1) : below(m->max_rows + 1);
    uint32_t full = n_rows / rows;
    for (uint32_t i = m->n_sealed; i < full; i++)
        rig_write(kv, m->seq.blocks[i], text_name(m->salt, m->tokens, i + 1));
    kv_seq_seal(kv, &m->seq, m->tokens, n_rows);
    for (; m->n_sealed < full; m->n_sealed++)
        if (cfg.prefix_caching)
            model_seal(m, m->n_sealed + 1);
}

static void op_drop(void)
{
    kv_drop_prefixes(kv);
    for (int i = 0; i < MAX_ENTRIES; i++)
        entries[i].used = entries[i].used && entries[i].refs > 0;
}

static void run_op(void)
{
    struct mirror *m = &seqs[below(MAX_SEQS)];
    if (below(500) == 0) {
        op_drop();
    } else if (!m->open) {
        op_open(m);
    } else if (below(4) == 0) {
        kv_seq_close(kv, &m->seq);
        model_close(m);
    } else if (below(2) == 0) {
        op_grow(m);
    } else {
        op_seal(m);
    }
    check_all();
}

static void run(const char *what, uint32_t rows, uint32_t hbm, uint32_t dram, bool caching,
                uint32_t hash_bits)
{
    struct kv_counts c;
    cfg = (struct kv_config){.geo = kv_geometry_make(rows, 1, 2, 4),
                             .hbm_blocks = hbm,
                             .dram_blocks = dram,
                             .prefix_caching = caching,
                             .secret = {rig_mix(&random_state), rig_mix(&random_state)},
                             .hash_bits = hash_bits};
    CHECK(hbm + dram <= MAX_ENTRIES);
    CHECK(kv_create(&kv, &rig_backend, &cfg) == OK);
    n_hits = n_lifts = n_checked = 0;
    for (int i = 0; i < OPS; i++)
        run_op();
    kv_counts(kv, &c);
    ok(c.moved_up == n_lifts && c.hit_tokens == n_hits * rows,
       "%s: %d operations do what the model does", what, OPS);
    printf("# R %u, blocks %u + %u: %llu blocks hit, %llu moved down, %llu up, %llu pages read\n",
           rows, hbm, dram, (unsigned long long)n_hits, (unsigned long long)c.moved_down,
           (unsigned long long)c.moved_up, (unsigned long long)n_checked);
    if (caching)
        ok(n_hits > OPS / 20, "%s: and there were hits", what);
    if (dram > 0)
        ok(c.moved_up > OPS / 100, "%s: and trips to DRAM and back", what);
    for (int i = 0; i < MAX_SEQS; i++)
        if (seqs[i].open) {
            kv_seq_close(kv, &seqs[i].seq);
            model_close(&seqs[i]);
            check_all();
        }
    op_drop();
    check_all();
    kv_counts(kv, &c);
    ok(c.free[KV_HBM] == hbm && c.free[KV_DRAM] == dram, "%s: and all blocks come home", what);
    kv_destroy(kv);
    ok(rig_held_bytes == 0, "%s: and all memory", what);
}

int main(int argc, char **argv)
{
    uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 0) : (uint64_t)time(NULL);
    printf("# seed %llu\n", (unsigned long long)seed);
    fflush(stdout); /* an abort must not lose it */
    random_state = seed;
    run("two tiers", 8, 24, 16, true, 0);
    run("a small arena with two bits of hash", 16, 14, 20, true, 2);
    run("no DRAM", 16, 20, 0, true, 0);
    run("no prefix caching, arena smaller than a long sequence", 8, 10, 0, false, 0);
    return tap_done();
}
