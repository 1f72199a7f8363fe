/* The KV substrate against a model that copies everything: 100,000 random operations, and after each
 * an audit of every invariant, and in every row that may be read just what was computed there.
 *
 * The model is a name per row: of the whole text up to it where the row was computed densely, so that
 * equal prefixes have equal bytes whoever computed them; of the sequence where it was not. A row is
 * looked for where the tables, the maps of permuted segments and the window of STREAM lanes say. The
 * model knows nothing of lists, hashes, groups or tiers. usage: kv [SEED [OPERATIONS]] */
#include "tests/kv_rig.h"
#include "tests/tap.h"

#include <time.h>

enum { MAX_SEQS = 6, MAX_ROWS = 3000, RECORD_LANE_BYTES = 2176 };

struct mirror {
    bool open;
    struct kv_seq seq;
    uint32_t salt, layout, max_rows, n_prompt, n_computed;
    uint32_t tokens[MAX_ROWS]; /* all it will ever have */
    uint64_t names[MAX_ROWS];
};

/* How sequences are sealed, as engine/attention.c would say. */
static const struct {
    struct kv_layout kv;
    struct digest_desc desc;
} layouts[] = {
    {{.seals = false}, {0}},                                                    /* dense */
    {{.digest_id = 77, .seals = true}, {.kind = DIGEST_BOUNDS}},                /* quest */
    {{.digest_id = 78, .seals = true}, {.kind = DIGEST_BOUNDS}},                /* another */
    {{.seals = true}, {0}},                                                     /* oracle */
    {{.layout_id = 5, .digest_id = 5, .seals = true}, {.order = ORDER_BISECT}}, /* wave */
    {{.layout_id = 6, .digest_id = 6, .seals = true}, {.order = ORDER_KMEANS}}, /* another */
};

struct setting {
    const char *what;
    uint32_t rows;
    uint8_t classes[4]; /* of four lanes */
    uint32_t blocks[LANE_CLASSES][2], n_records, hash_bits;
    bool caching;
    uint32_t only;       /* layout + 1; 0: any */
    uint64_t leaf_bytes; /* 0: enough */
};

static const struct setting *set;
static struct kv *kv;
static struct mirror seqs[MAX_SEQS];
static uint64_t random_state, next_uid;
static uint64_t n_rows_read, n_hits, n_unaligned_hits, n_seals, n_found, n_full, n_spills,
    n_fetched;
static const uint64_t salts[3][2] = {{5, 6}, {5, 7}, {4, 6}};

static uint32_t below(uint32_t n)
{
    return (uint32_t)(rig_mix(&random_state) % n);
}

static uint32_t min_u32(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

/* ---- the model ---- */

/* Texts branch in few ways, at places that are no borders of anything, so that many begin alike. */
static void choose_text(struct mirror *m)
{
    static const uint32_t cuts[] = {0, 40, 700, 1030, 1100, 1500, 2047, 2090, 2600};
    uint32_t way = 0;
    m->salt = below(8) == 0 ? 1 + below(2) : 0;
    for (uint32_t i = 0, cut = 0; i < MAX_ROWS; i++) {
        if (cut < ARRAY_LEN(cuts) && i == cuts[cut]) {
            way = below(8) == 0 ? 1 + below(2) : 0;
            cut++;
        }
        m->tokens[i] = way * 10000 + i;
    }
}

static void name_rows(struct mirror *m)
{
    uint64_t text = salts[m->salt][0] * 31 + salts[m->salt][1];
    uint64_t uid = next_uid++;
    text = text * 31 + layouts[m->layout].kv.layout_id;
    for (uint32_t i = 0; i < m->max_rows; i++) {
        uint64_t own = ~(uid * MAX_ROWS + i);
        text ^= m->tokens[i];
        text = rig_mix(&text);
        m->names[i] = i < m->n_prompt ? text : rig_mix(&own);
    }
}

/* ---- reading ---- */

static bool row_is(const struct mirror *m, int c, uint32_t lane, block_id id, uint32_t row,
                   uint32_t pos)
{
    struct rig_row want = rig_row_of(m->names[pos], c, lane);
    struct rig_row got = rig_get(kv_memory(kv), c, id, lane, row);
    n_rows_read++;
    return got.k == want.k && got.v == want.v;
}

/* Storage row i of the sequence, in every lane of the class; row_step > 1 looks at some only. */
static void check_class(const struct mirror *m, int c, uint32_t first, uint32_t end, uint32_t step)
{
    uint32_t sealed = m->seq.n_segments * SEGMENT_ROWS;
    bool permuted = c == LANE_SPARSE && m->seq.layout.layout_id != 0;
    for (uint32_t i = first; i < end; i += step)
        for (uint32_t lane = 0; lane < kv_geometry(kv)->n_lanes[c]; lane++) {
            uint32_t pos = i, base = i / SEGMENT_ROWS * SEGMENT_ROWS;
            if (permuted && i < sealed) {
                uint16_t p;
                uint32_t record = m->seq.records[i / SEGMENT_ROWS];
                memcpy(&p, rig_record(kv_memory(kv), record, lane) + 2 * (i - base), sizeof p);
                struct rig_row at_0 = rig_row_of(m->names[base], c, lane);
                CHECK(p == rig_position(i - base, at_0.k + lane));
                pos = base + p;
            }
            CHECK(row_is(m, c, lane, m->seq.table[c][i / set->rows], i % set->rows, pos));
        }
}

static void check_digests(const struct mirror *m)
{
    for (uint32_t g = 0; g < m->seq.n_segments && m->seq.layout.digest_id != 0; g++)
        for (uint32_t lane = 0; lane < kv_geometry(kv)->n_lanes[LANE_SPARSE]; lane++) {
            struct rig_digest want = {.checksum = 1, .segment = g}, got;
            for (uint32_t i = 0; i < SEGMENT_ROWS; i++)
                want.checksum = rig_checksum(
                    want.checksum, rig_row_of(m->names[g * SEGMENT_ROWS + i], LANE_SPARSE, lane));
            memcpy(&got,
                   rig_record(kv_memory(kv), m->seq.records[g], lane) +
                       digest_offset(&layouts[m->layout].desc),
                   sizeof got);
            CHECK(got.checksum == want.checksum && got.segment == g);
        }
}

/* Rows that the next row attends in STREAM lanes. */
static void check_stream(const struct mirror *m, uint32_t step)
{
    const struct kv_geometry *g = kv_geometry(kv);
    uint32_t p = m->n_computed, start = 0;
    if (p + 1 > g->stream_recent)
        start = (p + 1 - g->stream_recent) / 64 * 64;
    check_class(m, LANE_STREAM, 0, min_u32(g->stream_sinks, p), step);
    check_class(m, LANE_STREAM, start, p, step);
}

static void check_seq(const struct mirror *m, uint32_t step)
{
    uint32_t first = below(step);
    if (set->blocks[LANE_SPARSE][0] > 0)
        check_class(m, LANE_SPARSE, first, m->n_computed, step);
    if (set->blocks[LANE_DENSE][0] > 0)
        check_class(m, LANE_DENSE, first, m->n_computed, step);
    if (set->blocks[LANE_STREAM][0] > 0)
        check_stream(m, step);
    if (step == 1)
        check_digests(m);
}

static void check_all(const struct mirror *touched)
{
    struct kv_seq *open[MAX_SEQS];
    struct kv_counts c;
    uint32_t n_open = 0;
    for (int i = 0; i < MAX_SEQS; i++) {
        if (!seqs[i].open)
            continue;
        check_seq(&seqs[i], &seqs[i] == touched && below(4) == 0 ? 1 : 37);
        open[n_open++] = &seqs[i].seq;
    }
    kv_audit(kv, open, n_open);
    kv_counts(kv, &c);
    CHECK(c.active + c.free[KV_HBM] + c.cached[KV_HBM] == c.total[KV_HBM]);
    CHECK(c.free[KV_DRAM] + c.cached[KV_DRAM] == kv_dram_available(kv));
}

/* ---- operations ---- */

/* Rows of m that an open sequence holds in HBM, computed and shared: a hit must find them. */
static uint32_t known_rows(const struct mirror *m)
{
    uint32_t most = 0;
    for (int i = 0; i < MAX_SEQS; i++) {
        const struct mirror *o = &seqs[i];
        if (!o->open || o == m || o->salt != m->salt || o->seq.residence != KV_RESIDENT ||
            o->seq.layout.layout_id != m->seq.layout.layout_id)
            continue;
        uint32_t n = 0, shared = o->seq.n_shared * set->rows;
        while (n < shared && n < m->n_prompt && o->tokens[n] == m->tokens[n])
            n++;
        if (m->seq.layout.layout_id != 0 && kv_segments_due(n) > o->seq.n_segments)
            n = (o->seq.n_segments + 1) * SEGMENT_ROWS + TAIL_ROWS - set->rows;
        most = n > most ? n : most;
    }
    return most;
}

static void op_open(struct mirror *m)
{
    uint32_t room = (SEGMENT_ROWS + TAIL_ROWS) / set->rows, n_hit;
    choose_text(m);
    m->layout = set->only > 0 ? set->only - 1 : below(ARRAY_LEN(layouts));
    m->max_rows = 1 + below(below(5) == 0 ? 200 : MAX_ROWS);
    m->n_prompt = 1 + below(m->max_rows);
    name_rows(m);
    struct kv_open o = {.salt = {salts[m->salt][0], salts[m->salt][1]},
                        .tokens = m->tokens,
                        .n = m->n_prompt,
                        .max_rows = m->max_rows,
                        .max_hit = below(8) == 0 ? below(m->n_prompt) : m->n_prompt - 1,
                        .chunk = below(2) * SEGMENT_ROWS,
                        .up = below(4) == 0,
                        .layout = layouts[m->layout].kv};
    m->seq.layout = o.layout;
    uint32_t known = min_u32(known_rows(m), o.max_hit) / set->rows * set->rows;
    bool roomy = kv_available(kv) >= 2 * room && set->blocks[LANE_STREAM][0] == 0;
    status st = kv_seq_open(kv, &m->seq, &o, 4, &n_hit);
    if (st != OK) {
        CHECK(st == ERR_FULL);
        n_full++;
        return;
    }
    CHECK(n_hit <= o.max_hit && n_hit % set->rows == 0);
    CHECK(set->blocks[LANE_STREAM][0] == 0 || n_hit % SEGMENT_ROWS == 0);
    CHECK(!set->caching || !roomy || n_hit >= known);
    CHECK(m->seq.n_segments <= kv_segments_due(n_hit));
    CHECK(o.layout.layout_id == 0 || m->seq.n_segments == kv_segments_due(n_hit));
    n_hits += n_hit > 0;
    n_unaligned_hits += n_hit % SEGMENT_ROWS != 0;
    m->n_computed = n_hit;
    m->open = true;
}

/* Nobody else needs HBM: then sealing always finds room. */
static bool runs_alone(const struct mirror *m)
{
    for (int i = 0; i < MAX_SEQS; i++)
        if (seqs[i].open && &seqs[i] != m && seqs[i].seq.residence != KV_PAUSED)
            return false;
    return true;
}

/* Seals what must be before the next row; false: no room. */
static bool seal_due(struct mirror *m)
{
    while (m->seq.layout.seals && m->seq.n_segments < kv_segments_due(m->n_computed)) {
        struct kv_seal seal;
        bool dense = (m->seq.n_segments + 1) * SEGMENT_ROWS <= m->n_prompt && below(4) > 0;
        uint32_t before = kv_available(kv);
        if (kv_seq_seal_begin(kv, &m->seq, dense ? m->tokens : NULL, &seal) != OK) {
            CHECK(kv_available(kv) == before);
            CHECK(!runs_alone(m) || m->seq.residence == KV_SPILLED || set->n_records < MAX_SEQS);
            n_full++;
            return false;
        }
        const struct seal_args a = {.kv = kv_memory(kv),
                                    .desc = layouts[m->layout].desc,
                                    .from = seal.from,
                                    .to = seal.to,
                                    .segment = seal.segment,
                                    .record = seal.record};
        if (!seal.found && set->blocks[LANE_SPARSE][0] > 0)
            rig_seal(&rig_backend, &a);
        kv_seq_seal_end(kv, &m->seq, &seal);
        n_seals++;
        n_found += seal.found;
    }
    return true;
}

static void write_rows(struct mirror *m, uint32_t end)
{
    for (int c = 0; c < LANE_CLASSES; c++)
        for (uint32_t i = m->n_computed; i < end && set->blocks[c][0] > 0; i++)
            for (uint32_t lane = 0; lane < kv_geometry(kv)->n_lanes[c]; lane++) {
                block_id id = m->seq.table[c][i / set->rows];
                CHECK((id & BLOCK_IN_DRAM) == 0);
                rig_put(kv_memory(kv), c, id, lane, i % set->rows,
                        rig_row_of(m->names[i], c, lane));
            }
    m->n_computed = end;
}

/* A step: seal, grow, compute. */
static void op_step(struct mirror *m)
{
    if (!seal_due(m))
        return;
    uint32_t end = m->n_computed + 1 + below(below(3) == 0 ? 4 : 700);
    end = min_u32(min_u32(end, m->max_rows), kv_next_border(m->n_computed));
    uint32_t blocks = (end + set->rows - 1) / set->rows;
    bool fits = blocks <= m->seq.n_blocks || blocks - m->seq.n_blocks <= kv_available(kv);
    status st = kv_seq_grow(kv, &m->seq, end);
    CHECK(st == OK || st == ERR_FULL);
    CHECK(set->blocks[LANE_STREAM][0] > 0 || (st == OK) == fits);
    n_full += st != OK;
    if (st == OK)
        write_rows(m, end);
    if (st == OK && below(2) == 0)
        kv_seq_settle(kv, &m->seq, m->n_computed);
}

static void op_share(struct mirror *m)
{
    kv_seq_share(kv, &m->seq, m->tokens, min_u32(m->n_computed, m->n_prompt));
}

/* ---- residence ---- */

static void op_spill(struct mirror *m)
{
    uint32_t n_slots = 1 + below(12), before = kv_available(kv), dram = kv_dram_available(kv);
    uint32_t gain = kv_spill_gain(kv, &m->seq, n_slots);
    status st = kv_seq_spill(kv, &m->seq, n_slots);
    if (st != OK) {
        CHECK(st == ERR_FULL && m->seq.residence == KV_RESIDENT);
        CHECK(gain == 0 || set->leaf_bytes > 0);
        CHECK(kv_available(kv) == before && kv_dram_available(kv) == dram);
        n_full++;
        return;
    }
    CHECK(set->blocks[LANE_DENSE][0] > 0 || gain == 0 || kv_available(kv) == before + gain);
    n_spills++;
}

/* Leaves things as they were, or does all of it. */
static void op_move(struct mirror *m, status (*move)(struct kv *, struct kv_seq *, uint32_t),
                    uint32_t n_slots, enum kv_residence to)
{
    enum kv_residence from = m->seq.residence;
    uint32_t before = kv_available(kv), dram = kv_dram_available(kv), slots = m->seq.n_slots;
    status st = move(kv, &m->seq, n_slots);
    CHECK(m->seq.residence == (st == OK ? to : from));
    CHECK(m->seq.n_slots == (st != OK ? slots : to == KV_SPILLED ? n_slots : 0));
    if (st == OK)
        return;
    CHECK(st == ERR_FULL && kv_available(kv) == before && kv_dram_available(kv) == dram);
    n_full++;
}

static status restore(struct kv *k, struct kv_seq *s, uint32_t n_slots)
{
    (void)n_slots;
    return kv_seq_restore(k, s);
}

static status pause(struct kv *k, struct kv_seq *s, uint32_t n_slots)
{
    (void)n_slots;
    return kv_seq_pause(k, s);
}

/* A step of a SPILLED sequence: pages are touched and fetched, and then slots hold what DRAM holds. */
static void touch_lane(struct mirror *m, uint32_t lane)
{
    struct hot_set *h = m->seq.hot;
    const struct kv_memory *mem = kv_memory(kv);
    uint32_t n_pages = m->seq.n_segments * (SEGMENT_ROWS / set->rows), pages[64], slots[64], n = 0;
    struct hot_fetch fetches[64];
    uint32_t most = min_u32(min_u32(h->n_slots, n_pages), 64);
    for (uint32_t page = below(3); page < n_pages && n < most; page += 1 + below(n_pages / 8 + 1))
        pages[n++] = page;
    uint32_t n_fetches = hot_touch(h, lane, pages, n, slots, fetches);
    for (uint32_t i = 0; i < n_fetches; i++)
        memcpy(rig_page(mem, LANE_SPARSE, fetches[i].to, lane),
               rig_page(mem, LANE_SPARSE, fetches[i].from | BLOCK_IN_DRAM, lane),
               mem->geo->page_bytes);
    for (uint32_t i = 0; i < n; i++)
        CHECK(slots[i] < h->n_slots);
    n_fetched += n_fetches;
}

static void check_slots(const struct mirror *m)
{
    const struct hot_set *h = m->seq.hot;
    const struct kv_memory *mem = kv_memory(kv);
    for (uint32_t lane = 0; lane < h->n_lanes; lane++)
        for (uint32_t slot = 0; slot < h->n_slots; slot++) {
            uint32_t page = h->slot_page[(size_t)lane * h->max_slots + slot];
            if (page == HOT_NO_PAGE)
                continue;
            CHECK(m->seq.table[LANE_SPARSE][page] == (h->dram_blocks[page] | BLOCK_IN_DRAM));
            CHECK(memcmp(rig_page(mem, LANE_SPARSE, h->slot_blocks[slot], lane),
                         rig_page(mem, LANE_SPARSE, m->seq.table[LANE_SPARSE][page], lane),
                         mem->geo->page_bytes) == 0);
        }
}

static void op_touch(struct mirror *m)
{
    for (uint32_t lane = 0; lane < m->seq.hot->n_lanes; lane++)
        touch_lane(m, lane);
    check_slots(m);
    kv_step(kv, (struct kv_seq *[]){&m->seq}, 1);
}

/* Whoever is written behind leaves HBM without a copy. */
static void op_write_behind(struct mirror *m)
{
    struct kv_counts before, after;
    uint32_t most = 1 + below(100);
    CHECK(kv_write_behind(kv, most) <= most);
    if (!m->open || m->seq.residence != KV_RESIDENT || kv_write_behind(kv, 100000) != 0)
        return;
    for (uint32_t i = 0; i < 1000 && kv_write_behind(kv, 64) > 0; i++)
        ;
    kv_counts(kv, &before);
    if (before.free[KV_DRAM] == 0 || kv_seq_spill(kv, &m->seq, 2) != OK)
        return;
    kv_counts(kv, &after);
    n_spills++;
    /* Only what it pushed out of HBM for its slots went down. */
    CHECK(after.moved_down - before.moved_down <= 2);
}

static void op_residence(struct mirror *m)
{
    uint32_t n_slots = 1 + below(20);
    switch (m->seq.residence) {
    case KV_RESIDENT:
        if (below(4) == 0)
            op_move(m, pause, 0, KV_PAUSED);
        else if (m->seq.n_segments > 0 || below(8) == 0)
            op_spill(m);
        return;
    case KV_SPILLED:
        if (below(3) == 0)
            op_move(m, kv_seq_resize, n_slots, KV_SPILLED);
        else if (below(2) == 0)
            op_move(m, restore, 0, KV_RESIDENT);
        else if (below(4) == 0)
            op_move(m, pause, 0, KV_PAUSED);
        else
            op_touch(m);
        return;
    case KV_PAUSED:
        if (below(2) == 0 || !m->seq.layout.seals)
            op_move(m, kv_seq_resume, 0, KV_RESIDENT);
        else
            op_move(m, kv_seq_resume, n_slots, KV_SPILLED);
        return;
    }
}

static void run_op(void)
{
    struct mirror *m = &seqs[below(MAX_SEQS)];
    if (below(500) == 0) {
        kv_drop_prefixes(kv);
    } else if (below(60) == 0) {
        op_write_behind(m);
    } else if (!m->open) {
        op_open(m);
    } else if ((m->n_computed == m->max_rows && below(4) == 0) || below(25) == 0) {
        if (below(2) == 0 && m->seq.residence != KV_PAUSED)
            op_share(m);
        kv_seq_close(kv, &m->seq);
        m->open = false;
    } else if (m->seq.residence == KV_PAUSED || below(4) == 0) {
        op_residence(m);
    } else if (m->n_computed < m->max_rows && below(3) > 0) {
        op_step(m);
    } else {
        op_share(m);
    }
    check_all(m);
}

static void close_all(void)
{
    for (int i = 0; i < MAX_SEQS; i++)
        if (seqs[i].open) {
            kv_seq_close(kv, &seqs[i].seq);
            seqs[i].open = false;
            check_all(NULL);
        }
    kv_drop_prefixes(kv);
    check_all(NULL);
}

static void run(const struct setting *setting, uint32_t n_ops)
{
    struct kv_counts c;
    struct lane_place lanes[4];
    struct kv_geometry geo = kv_geometry_make(setting->rows, 2, 2, RIG_HEAD_DIM);
    set = setting;
    kv_geometry_classify(&geo, set->classes, lanes, 16, 96);
    struct kv_config cfg = {.geo = geo,
                            .n_records = set->n_records,
                            .record_lane_bytes = RECORD_LANE_BYTES,
                            .leaf_bytes = set->leaf_bytes,
                            .prefix_caching = set->caching,
                            .secret = {rig_mix(&random_state), rig_mix(&random_state)},
                            .hash_bits = set->hash_bits};
    memcpy(cfg.blocks, set->blocks, sizeof cfg.blocks);
    CHECK(kv_create(&kv, &rig_backend, &cfg) == OK);
    n_rows_read = n_hits = n_unaligned_hits = n_seals = n_found = n_full = n_spills = n_fetched = 0;
    for (uint32_t i = 0; i < n_ops; i++)
        run_op();
    kv_counts(kv, &c);
    ok(true, "%s: after each of %u operations every row is what was computed", set->what, n_ops);
    printf("# hits %llu (%llu inside a segment), seals %llu (%llu found), refused %llu, down %llu, "
           "up %llu, spills %llu, restores %llu, pauses %llu, pages fetched %llu, rows read %llu\n",
           (unsigned long long)n_hits, (unsigned long long)n_unaligned_hits,
           (unsigned long long)n_seals, (unsigned long long)n_found, (unsigned long long)n_full,
           (unsigned long long)c.moved_down, (unsigned long long)c.moved_up,
           (unsigned long long)n_spills, (unsigned long long)c.restores,
           (unsigned long long)c.pauses, (unsigned long long)n_fetched,
           (unsigned long long)n_rows_read);
    ok(!set->caching || n_hits > n_ops / (set->blocks[LANE_STREAM][0] > 0 ? 2000 : 50),
       "%s: there were hits", set->what);
    ok(n_seals > n_ops / 1000, "%s: and segments were sealed", set->what);
    if (set->blocks[LANE_SPARSE][KV_DRAM] > 0 && set->leaf_bytes == 0) {
        ok(n_spills > n_ops / 200 && c.restores > n_ops / 1000, "%s: and spilled and restored",
           set->what);
        ok(n_fetched > n_ops / 100, "%s: and pages fetched into hot sets", set->what);
    }
    if (set->blocks[LANE_STREAM][KV_DRAM] + set->blocks[LANE_SPARSE][KV_DRAM] > 0)
        ok(c.pauses > n_ops / 500, "%s: and sequences paused", set->what);
    close_all();
    kv_counts(kv, &c);
    ok(c.free[KV_HBM] == c.total[KV_HBM] && c.free[KV_DRAM] == c.total[KV_DRAM],
       "%s: and all blocks come home", set->what);
    ok(c.table_bytes == 0 && c.record_bytes_used == 0, "%s: and tables and records", set->what);
    kv_destroy(kv);
    ok(rig_held_bytes == 0, "%s: and all memory", set->what);
}

/* ---- tables ---- */

static uint64_t table_bytes(void)
{
    struct kv_counts c;
    kv_counts(kv, &c);
    return c.table_bytes;
}

/* Opens, grows to n_rows, seals what is due; the rows' content does not matter. */
static void grow_and_seal(struct kv_seq *s, uint32_t max_rows, uint32_t n_rows)
{
    const struct kv_open o = {.max_rows = max_rows, .layout = layouts[1].kv};
    uint32_t n_hit;
    CHECK(kv_seq_open(kv, s, &o, 4, &n_hit) == OK);
    CHECK(kv_seq_grow(kv, s, n_rows) == OK);
    while (s->n_segments < kv_segments_due(n_rows)) {
        struct kv_seal seal;
        CHECK(kv_seq_seal_begin(kv, s, NULL, &seal) == OK);
        kv_seq_seal_end(kv, s, &seal);
    }
}

/* The shape of the default model at R = 8, whose pages are small, and so its tables large. */
static void tables_follow_what_is_held(void)
{
    enum { LONG = 1 << 17, ROWS = 5 * SEGMENT_ROWS + TAIL_ROWS, R = 8 };
    struct kv_config cfg = {.geo = kv_geometry_make(R, 30, 3, 64),
                            .blocks = {{LONG / R, LONG / R}},
                            .n_records = 32,
                            .secret = {1, 2}};
    struct kv_seq few, many;
    uint64_t resident[2], spilled[2];
    CHECK(kv_create(&kv, &rig_backend, &cfg) == OK);
    grow_and_seal(&few, ROWS, ROWS);
    resident[0] = table_bytes();
    CHECK(kv_seq_spill(kv, &few, 5 * SEGMENT_ROWS / R / 4) == OK);
    spilled[0] = table_bytes();
    kv_seq_close(kv, &few);
    ok(table_bytes() == 0, "closed sequences have no tables");
    grow_and_seal(&many, LONG, ROWS);
    resident[1] = table_bytes();
    CHECK(kv_seq_spill(kv, &many, 5 * SEGMENT_ROWS / R / 4) == OK);
    spilled[1] = table_bytes();
    kv_seq_close(kv, &many);
    double kv_bytes = (double)ROWS / R * (double)cfg.geo.block_bytes[LANE_SPARSE];
    printf("# tables of %d positions: RESIDENT %llu bytes (may grow to %d: %llu), SPILLED %llu "
           "(%llu): %.3f %% of the KV\n",
           ROWS, (unsigned long long)resident[0], LONG, (unsigned long long)resident[1],
           (unsigned long long)spilled[0], (unsigned long long)spilled[1],
           100 * (double)spilled[1] / kv_bytes);
    ok(resident[1] < 2 * resident[0], "RESIDENT tables follow what is held, not what might be");
    ok(spilled[1] < spilled[0] + spilled[0] / 10, "and so do those of a SPILLED sequence");
    ok((double)spilled[1] < 0.005 * kv_bytes, "which are less than half a percent of its KV");
    kv_destroy(kv);
}

int main(int argc, char **argv)
{
    static const struct setting settings[] = {
        {"two tiers", 32, {0}, {{260, 200}}, 24, 0, true, 0, 0},
        {"a small arena, two bits of hash, one permuting layout",
         32,
         {0},
         {{120, 150}},
         10,
         2,
         true,
         5,
         0},
        {"three classes of lanes",
         16,
         {LANE_SPARSE, LANE_DENSE, LANE_STREAM, LANE_SPARSE},
         {{420, 300}, {420, 200}, {200, 100}},
         20,
         0,
         true,
         0,
         0},
        {"no DRAM, few records", 32, {0}, {{200, 0}}, 6, 0, true, 0, 0},
        {"no prefix caching", 32, {0}, {{200, 60}}, 16, 0, false, 0, 0},
        {"HBM for less than a long sequence", 32, {0}, {{66, 300}}, 16, 0, true, 0, 0},
        {"hardly any records, no leaves", 32, {0}, {{150, 100}}, 3, 0, true, 0, 1},
        {"STREAM lanes alone", 32, {2, 2, 2, 2}, {{0, 0}, {0, 0}, {90, 40}}, 16, 0, true, 0, 0},
    };
    uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 0) : (uint64_t)time(NULL);
    uint32_t n_ops = argc > 2 ? (uint32_t)atoi(argv[2]) : TAP_SANITIZED ? 25000 : 100000;
    printf("# seed %llu\n", (unsigned long long)seed);
    fflush(stdout); /* an abort must not lose it */
    random_state = seed;
    for (size_t i = 0; i < ARRAY_LEN(settings); i++)
        run(&settings[i], n_ops / (uint32_t)ARRAY_LEN(settings));
    tables_follow_what_is_held();
    return tap_done();
}
