/* cache/kv.h, sealing and residence, case by case at R = 8. The long random comparison with a model is
 * tests/contract/kv.c. */
#include "tests/kv_rig.h"
#include "tests/tap.h"

enum {
    R = 8,
    SEGMENT_BLOCKS = SEGMENT_ROWS / R,
    TAIL_BLOCKS = TAIL_ROWS / R,
    ROWS = 2 * SEGMENT_ROWS + TAIL_ROWS + R, /* two segments are sealed */
    BLOCKS = ROWS / R,
    HBM = 4 * SEGMENT_BLOCKS,
    DRAM = 4 * SEGMENT_BLOCKS,
    RECORDS = 3,
    SLOTS = 12,
};

static const struct digest_desc permuting = {.order = ORDER_BISECT};
static const struct kv_layout waves = {.layout_id = 5, .digest_id = 5, .seals = true};

static struct kv *kv;
static uint32_t tokens[ROWS];

static void start(void)
{
    const struct kv_config cfg = {.geo = kv_geometry_make(R, 1, 2, RIG_HEAD_DIM),
                                  .blocks = {{HBM, DRAM}},
                                  .n_records = RECORDS,
                                  .record_lane_bytes = SEGMENT_ROWS * sizeof(uint16_t) + 64,
                                  .prefix_caching = true,
                                  .secret = {3, 4}};
    CHECK(kv_create(&kv, &rig_backend, &cfg) == OK);
    for (uint32_t i = 0; i < ROWS; i++)
        tokens[i] = 1000 + i;
}

static struct kv_counts counts(void)
{
    struct kv_counts c;
    kv_counts(kv, &c);
    return c;
}

static void stop(void)
{
    kv_audit(kv, NULL, 0);
    kv_drop_prefixes(kv);
    struct kv_counts c = counts();
    ok(c.free[KV_HBM] == HBM && c.free[KV_DRAM] == DRAM && c.record_bytes_used == 0,
       "at the end every block and every record is free again");
    kv_destroy(kv);
}

static void audit(struct kv_seq *s)
{
    kv_audit(kv, &s, 1);
}

static uint32_t open_seq(struct kv_seq *s, uint32_t n, uint32_t max_hit)
{
    const struct kv_open o = {
        .tokens = tokens, .n = n, .max_rows = ROWS, .max_hit = max_hit, .layout = waves};
    uint32_t n_hit = 0;
    CHECK(kv_seq_open(kv, s, &o, SLOTS, &n_hit) == OK);
    return n_hit;
}

static void compute(struct kv_seq *s, uint32_t from, uint32_t to)
{
    CHECK(kv_seq_grow(kv, s, to) == OK);
    for (uint32_t p = from; p < to; p++)
        for (uint32_t lane = 0; lane < 2; lane++)
            rig_put(kv_memory(kv), LANE_SPARSE, s->table[LANE_SPARSE][p / R], lane, p % R,
                    rig_row_of(tokens[p], LANE_SPARSE, lane));
}

/* Whether it had to be computed. */
static bool seal_next(struct kv_seq *s)
{
    struct kv_seal seal;
    CHECK(kv_seq_seal_begin(kv, s, tokens, &seal) == OK);
    if (!seal.found)
        rig_seal(&rig_backend, &(struct seal_args){.kv = kv_memory(kv),
                                                   .desc = permuting,
                                                   .from = seal.from,
                                                   .to = seal.to,
                                                   .segment = seal.segment,
                                                   .record = seal.record});
    kv_seq_seal_end(kv, s, &seal);
    return !seal.found;
}

/* A sequence of ROWS rows, sealed as it comes to the borders, and offered to others. */
static void run_seq(struct kv_seq *s)
{
    CHECK(open_seq(s, ROWS, 0) == 0);
    for (uint32_t at = 0; at < ROWS;) {
        uint32_t to = kv_next_border(at) < ROWS ? kv_next_border(at) : ROWS;
        while (s->n_segments < kv_segments_due(at))
            seal_next(s);
        compute(s, at, to);
        at = to;
    }
    kv_seq_share(kv, s, tokens, ROWS);
    audit(s);
}

/* The row of position p in every lane, through table, record and map. */
static bool holds(const struct kv_seq *s, uint32_t p)
{
    const struct kv_memory *m = kv_memory(kv);
    uint32_t segment = p / SEGMENT_ROWS, row = p;
    bool same = true;
    for (uint32_t lane = 0; lane < 2; lane++) {
        for (uint32_t i = 0; segment < s->n_segments && i < SEGMENT_ROWS; i++) {
            uint16_t pos;
            memcpy(&pos, rig_record(m, s->records[segment], lane) + 2 * i, sizeof pos);
            if (pos == p % SEGMENT_ROWS)
                row = segment * SEGMENT_ROWS + i;
        }
        struct rig_row want = rig_row_of(tokens[p], LANE_SPARSE, lane);
        struct rig_row got = rig_get(m, LANE_SPARSE, s->table[LANE_SPARSE][row / R], lane, row % R);
        same = same && got.k == want.k && got.v == want.v;
    }
    return same;
}

static bool holds_all(const struct kv_seq *s, uint32_t n)
{
    bool all = true;
    for (uint32_t p = 0; p < n; p++)
        all = all && holds(s, p);
    return all;
}

/* ---- cases ---- */

static void a_segment_is_due_behind_its_tail(void)
{
    is_int(kv_segments_due(SEGMENT_ROWS), 0, "1,024 rows: nothing is sealed");
    is_int(kv_segments_due(SEGMENT_ROWS + TAIL_ROWS - 1), 0, "nor at 1,087");
    is_int(kv_segments_due(SEGMENT_ROWS + TAIL_ROWS), 1, "the row at 1,088 sees one segment");
    is_int(kv_segments_due(2 * SEGMENT_ROWS + TAIL_ROWS), 2, "that at 2,112 two");
    is_int(kv_next_border(0), 1088, "the first border");
    is_int(kv_next_border(1087), 1088, "of whoever stands before it");
    is_int(kv_next_border(1088), 2112, "behind it comes the next");
}

static void sealing_permutes_and_keeps_every_row(void)
{
    struct kv_seq s;
    start();
    open_seq(&s, ROWS, 0);
    compute(&s, 0, SEGMENT_ROWS + TAIL_ROWS);
    is_int(counts().record_bytes_used, 0, "no record before the seal");
    is_int(seal_next(&s), true, "the first segment is computed");
    audit(&s);
    is_int(s.n_segments, 1, "and counted");
    ok(counts().record_bytes_used == kv_memory(kv)->record_bytes, "it takes one record");
    struct rig_row want = rig_row_of(tokens[0], LANE_SPARSE, 0);
    ok(rig_get(kv_memory(kv), LANE_SPARSE, s.table[LANE_SPARSE][0], 0, 0).k != want.k &&
           holds_all(&s, SEGMENT_ROWS + TAIL_ROWS),
       "rows lie elsewhere, and none is lost");
    kv_seq_close(kv, &s);
    stop();
}

static void a_group_is_found_by_its_prefix(void)
{
    struct kv_seq a, b;
    start();
    run_seq(&a);
    is_int(counts().active, BLOCKS, "one sequence");
    /* A hit that ends behind the segment's tail takes the group as it is. */
    is_int(open_seq(&b, ROWS, SEGMENT_ROWS + TAIL_ROWS + R), SEGMENT_ROWS + TAIL_ROWS + R,
           "a prompt hits beyond the first segment");
    is_int(b.n_segments, 1, "which it has sealed");
    ok(b.records[0] == a.records[0] && b.table[LANE_SPARSE][0] == a.table[LANE_SPARSE][0],
       "group and record are shared");
    kv_seq_close(kv, &b);
    /* One that ends inside the segment gets rows in position order, in blocks of its own. */
    is_int(open_seq(&b, ROWS, SEGMENT_ROWS / 2), SEGMENT_ROWS / 2, "a hit may end inside a group");
    is_int(b.n_segments, 0, "then nothing is sealed");
    ok(b.table[LANE_SPARSE][0] != a.table[LANE_SPARSE][0] && holds_all(&b, SEGMENT_ROWS / 2),
       "its rows are copies in position order");
    /* When it comes to the border itself, the group is there. */
    compute(&b, SEGMENT_ROWS / 2, SEGMENT_ROWS + TAIL_ROWS);
    is_int(seal_next(&b), false, "and its own seal finds what the other one sealed");
    ok(b.records[0] == a.records[0], "with its record");
    kv_seq_close(kv, &b);
    audit(&a);
    kv_seq_close(kv, &a);
    stop();
}

static void records_can_run_out(void)
{
    struct kv_seq a, b;
    struct kv_seal seal;
    start();
    run_seq(&a);
    is_int(counts().record_bytes_used, 2 * kv_memory(kv)->record_bytes, "two of three records");
    tokens[0]++; /* another text */
    open_seq(&b, ROWS, ROWS - 1);
    tokens[0]--;
    kv_seq_close(kv, &a);
    is_int(counts().record_bytes_used, 2 * kv_memory(kv)->record_bytes,
           "the index keeps the records of its groups");
    for (uint32_t i = 0; i < 2; i++) { /* the second drops a group for its record, and blocks */
        compute(&b, i * SEGMENT_ROWS + (i > 0) * TAIL_ROWS, (i + 1) * SEGMENT_ROWS + TAIL_ROWS);
        is_int(kv_seq_seal_begin(kv, &b, NULL, &seal), OK, "there is a record for a segment");
        kv_seq_seal_end(kv, &b, &seal);
        audit(&b);
    }
    ok(counts().record_bytes_used <= RECORDS * kv_memory(kv)->record_bytes,
       "never more than three");
    kv_seq_close(kv, &b);
    stop();
}

static void spilling_moves_what_is_sealed(void)
{
    struct kv_seq s;
    start();
    run_seq(&s);
    uint32_t sealed = 2 * SEGMENT_BLOCKS, before = kv_available(kv);
    is_int(kv_spill_gain(kv, &s, SLOTS), sealed - SLOTS, "all that is sealed but the hot set");
    is_int(kv_seq_spill(kv, &s, SLOTS), OK, "a sequence spills");
    audit(&s);
    is_int(kv_available(kv), before + sealed - SLOTS, "and frees just that");
    is_int(s.n_slots, SLOTS, "its hot set has the slots it asked for");
    ok((s.table[LANE_SPARSE][0] & BLOCK_IN_DRAM) != 0 &&
           (s.table[LANE_SPARSE][sealed] & BLOCK_IN_DRAM) == 0,
       "sealed blocks are in DRAM, the tail is in HBM");
    ok(holds_all(&s, ROWS), "no row is lost");
    is_int(kv_seq_resize(kv, &s, 2 * SLOTS), OK, "a hot set grows");
    is_int(kv_available(kv), before + sealed - 2 * SLOTS, "by what it takes");
    is_int(kv_seq_resize(kv, &s, HOT_MAX_SLOTS + 1), ERR_FULL, "not beyond what slots can count");
    is_int(s.n_slots, 2 * SLOTS, "then nothing changed");
    is_int(kv_seq_restore(kv, &s), OK, "it is restored");
    audit(&s);
    is_int(kv_available(kv), before, "all of it in HBM");
    ok(s.hot == NULL && (s.table[LANE_SPARSE][0] & BLOCK_IN_DRAM) == 0 && holds_all(&s, ROWS),
       "with every row");
    kv_seq_close(kv, &s);
    stop();
}

static void a_pause_leaves_hbm(void)
{
    struct kv_seq s;
    start();
    run_seq(&s);
    is_int(kv_seq_pause(kv, &s), OK, "a sequence is paused");
    audit(&s);
    is_int(kv_available(kv), HBM, "nothing of it is left in HBM");
    is_int(kv_seq_resume(kv, &s, SLOTS), OK, "it comes back with the least hot set");
    is_int(s.residence, KV_SPILLED, "SPILLED");
    ok(s.n_slots == SLOTS && holds_all(&s, ROWS), "with every row");
    is_int(kv_available(kv), HBM - SLOTS - (BLOCKS - 2 * SEGMENT_BLOCKS),
           "its slots and its tail are in HBM");
    kv_seq_close(kv, &s);
    stop();
}

int main(void)
{
    a_segment_is_due_behind_its_tail();
    sealing_permutes_and_keeps_every_row();
    a_group_is_found_by_its_prefix();
    records_can_run_out();
    spilling_moves_what_is_sealed();
    a_pause_leaves_hbm();
    return tap_done();
}
