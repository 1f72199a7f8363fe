/* Layer by layer (layer_major.h).
 *
 * The loan. A block of the SPARSE arena holds a page of every SPARSE lane; lent, it holds as many pages of one
 * layer: those of `per` blocks of the prompt, per being the number of SPARSE layers. So pages of a layer have block
 * numbers of their own in the arena as it is, and the backend's operations read them through a table and a geometry
 * of one layer.
 *
 * Sealing. Segments could be sealed one by one, as they are in a geometry of one layer; a backend that is strict
 * about borders has that. But a GPU takes nearly as long for the few lanes of a layer as for all lanes of the model.
 * So where borders may be crossed a layer is sealed when it is complete, and segments stand in for layers: block j of
 * `per` segments share a place, so that 64 (SEGMENT_ROWS / R) places look like one segment with all its layers. One
 * call seals them, into a record that is lent too, from which each segment's part goes to its own record. The
 * first segment, whose sinks stay in order and which codes of later ones depend on, is sealed by itself. */
#include "engine/layer_major.h"

#include "engine/model/model.h"
#include "engine/residence.h"
#include "engine/sched.h"

enum { RECORD_GROUP, RECORD_FIRST, N_RECORDS };

/* What a prompt takes of the loan, in order: groups, pages apart from them, rows. */
struct layout {
    uint32_t per;              /* SPARSE layers */
    uint32_t segment_blocks;   /* of the prompt: SEGMENT_ROWS / R */
    uint32_t blocks, segments; /* segments: sealed in the end */
    uint32_t n_grouped;        /* segments 1 .. n_grouped are sealed in groups of `per` */
    uint32_t first_apart, first_row, n_places;
};

struct layer_major {
    struct sched *s;
    struct sequence *q;
    struct layout shape;
    struct kv_loan loan;
    uint32_t n_rows, chunk, layers;
    size_t row_bytes;        /* of the residual stream */
    uint32_t layer, row;     /* where the next unit begins */
    uint32_t n_sealed;       /* segments of this layer */
    block_id *table;         /* [blocks] of the geometry of one layer */
    struct kv_geometry geo;  /* of one SPARSE layer */
    struct kv_memory memory; /* of this layer, if it is SPARSE */
    struct batch_seq
        seqs[LAYER_MAJOR_AT_ONCE]; /* by turns: the backend reads them until it has synced */
    uint32_t turn;
};

static uint32_t ceil_div(uint64_t a, uint64_t b)
{
    return (uint32_t)((a + b - 1) / b);
}

/* ---- the shape ---- */

/* SPARSE layers; 0: lanes of another class beside SPARSE ones in a layer, or STREAM lanes. */
static uint32_t sparse_layers(const struct kv_geometry *g)
{
    uint32_t n = 0;
    for (uint32_t l = 0; l < g->layers; l++) {
        struct lane_place first = kv_lane(g, l, 0);
        for (uint32_t h = 0; h < g->kv_heads; h++) {
            struct lane_place p = kv_lane(g, l, h);
            if (p.class_ != first.class_ || p.class_ == LANE_STREAM)
                return 0;
            if (p.class_ == LANE_SPARSE)
                CHECK(p.index == n * g->kv_heads + h); /* as kv_geometry_classify numbers them */
        }
        n += first.class_ == LANE_SPARSE;
    }
    return n;
}

static struct layout layout_of(const struct sched *s, const struct sequence *q)
{
    const struct kv_geometry *g = kv_geometry(s->kv);
    struct layout l = {.per = sparse_layers(g), .segment_blocks = SEGMENT_ROWS / g->block_rows};
    if (l.per == 0)
        return l;
    l.blocks = ceil_div(q->n_prompt, g->block_rows);
    l.segments = kv_segments_due(q->n_prompt);
    l.n_grouped = s->loose && l.segments > 0 ? l.segments - 1 : 0;
    l.first_apart = ceil_div(l.n_grouped, l.per) * l.segment_blocks;
    l.first_row = l.first_apart + ceil_div(l.blocks - l.n_grouped * l.segment_blocks, l.per);
    l.n_places =
        l.first_row + ceil_div((uint64_t)q->n_prompt * s->row_bytes, g->block_bytes[LANE_SPARSE]);
    return l;
}

static uint32_t hbm_blocks(const struct sched *s)
{
    struct kv_counts c;
    kv_counts(s->kv, &c);
    return c.total[KV_HBM];
}

/* HBM blocks while the prompt is read, or for the first of its answer, when tail and hot set have grown into what was
 * lent. */
static uint32_t blocks_needed(const struct sched *s, const struct sequence *q,
                              const struct layout *l)
{
    const uint32_t r = kv_geometry(s->kv)->block_rows, longest = q->n_prompt + q->max_tokens;
    const uint32_t sealed = l->segments * l->segment_blocks;
    uint32_t rows = q->n_tokens + SCHED_FIRST_OUTPUT;
    rows = rows < longest ? rows : longest;
    uint32_t tail = ceil_div(rows, r) - sealed, most = ceil_div(SEGMENT_ROWS + TAIL_ROWS, r);
    uint32_t reading = l->n_places + l->blocks - sealed + residence_min_slots(s, q, 0);
    uint32_t then = (tail < most ? tail : most) + residence_min_slots(s, q, rows);
    return reading > then ? reading : then;
}

/* All but whether there is room. */
static bool is_of_the_kind(const struct sched *s, const struct sequence *q, uint32_t n_hit,
                           struct layout *l)
{
    if (s->row_bytes == 0 || q->in == NULL || sequence_scores_prompt(q) || q->n_filled > 0 ||
        !residence_can_spill(s, q))
        return false;
    if (n_hit + q->kv.n_cut * kv_geometry(s->kv)->block_rows > q->n_prompt / LAYER_MAJOR_MOST_HIT)
        return false; /* what was cut can still be had */
    *l = layout_of(s, q);
    return l->per > 0 && l->blocks > hbm_blocks(s);
}

bool layer_major_suits(const struct sched *s, const struct sequence *q, uint32_t n_hit)
{
    struct layout l;
    return is_of_the_kind(s, q, n_hit, &l) && blocks_needed(s, q, &l) <= hbm_blocks(s);
}

uint32_t layer_major_lacks(const struct sched *s, const struct sequence *q, uint32_t n_hit)
{
    struct layout l;
    uint32_t need = is_of_the_kind(s, q, n_hit, &l) ? blocks_needed(s, q, &l) : 0;
    return need > hbm_blocks(s) ? need - hbm_blocks(s) : 0;
}

/* ---- begin and end ---- */

/* Beside what those that run will still take: who is not read yet waits, and not who answers. */
static uint64_t blocks_missing(const struct sched *s, const struct sequence *q,
                               const struct layout *l)
{
    uint64_t need = blocks_needed(s, q, l) + residence_reserved(s), there = kv_available(s->kv);
    return need > there ? need - there : 0;
}

/* Where in the loan block i of the prompt has its pages of a layer; *apart: blocks so far that are in no group. */
static block_id page_block(const struct layer_major *lm, uint32_t i, uint32_t *apart)
{
    const struct layout *l = &lm->shape;
    uint32_t segment = i / l->segment_blocks, k = segment - 1, at, number;
    if (segment == 0 || segment > l->n_grouped) {
        at = l->first_apart + *apart / l->per;
        number = (*apart)++ % l->per;
    } else {
        at = k / l->per * l->segment_blocks + i % l->segment_blocks;
        number = k % l->per;
    }
    return lm->loan.places[at] * l->per + number;
}

static void make_memory(struct layer_major *lm)
{
    lm->geo = *kv_geometry(lm->s->kv);
    lm->geo.layers = 1;
    lm->geo.lanes = NULL; /* all SPARSE, in order */
    for (int c = 0; c < LANE_CLASSES; c++) {
        lm->geo.n_lanes[c] = c == LANE_SPARSE ? lm->geo.kv_heads : 0;
        lm->geo.block_bytes[c] = lm->geo.n_lanes[c] * lm->geo.page_bytes;
    }
    lm->memory = *kv_memory(lm->s->kv);
    lm->memory.geo = &lm->geo;
}

static status make(struct sched *s, struct sequence *q, const struct layout *l)
{
    struct kv_loan loan;
    uint32_t n_records = l->n_grouped > 0 ? N_RECORDS : 0, apart = 0;
    TRY(kv_seq_lay(s->kv, &q->kv, q->n_prompt, residence_min_slots(s, q, 0)));
    TRY(kv_loan_take(s->kv, l->n_places, n_records, &loan));
    struct layer_major *lm = mem_try_alloc(sizeof *lm);
    block_id *table = mem_try_alloc(l->blocks * sizeof *table);
    if (lm == NULL || table == NULL) {
        mem_free(lm);
        mem_free(table);
        kv_loan_end(s->kv);
        return err(ERR_MEMORY, "no memory for the table of %u blocks", l->blocks);
    }
    *lm = (struct layer_major){.s = s,
                               .q = q,
                               .shape = *l,
                               .loan = loan,
                               .n_rows = q->n_prompt,
                               .chunk = sched_chunk(s),
                               .layers = kv_geometry(s->kv)->layers,
                               .row_bytes = s->row_bytes,
                               .table = table};
    for (uint32_t i = 0; i < l->blocks; i++)
        table[i] = page_block(lm, i, &apart);
    make_memory(lm);
    q->layers = lm;
    s->deep = q;
    s->n_deep++;
    return OK;
}

status layer_major_begin(struct sched *s, struct sequence *q)
{
    const struct layout l = layout_of(s, q);
    CHECK(s->deep == NULL && q->layers == NULL);
    while (blocks_missing(s, q, &l) > 0 && residence_squeeze(s, RESIDENCE_ANYBODY))
        ;
    uint64_t missing = blocks_missing(s, q, &l);
    if (missing > 0)
        return err(ERR_FULL, "%llu blocks of HBM are missing to read a prompt layer by layer",
                   (unsigned long long)missing);
    return make(s, q, &l);
}

void layer_major_end(struct sched *s, struct sequence *q)
{
    if (q->layers == NULL)
        return;
    CHECK(s->deep == q);
    kv_loan_end(s->kv);
    mem_free(q->layers->table);
    mem_free(q->layers);
    q->layers = NULL;
    s->deep = NULL;
}

/* ---- copies ---- */

/* Pieces of `bytes`, at a constant distance on either side. */
struct pieces {
    char *to;
    const char *from;
    size_t bytes;
    ptrdiff_t to_step, from_step;
    uint32_t n;
};

static void copy_pieces(struct backend *be, const struct pieces *p)
{
    ptrdiff_t bytes = (ptrdiff_t)p->bytes;
    if (p->n > 1 && p->to_step == bytes && p->from_step == bytes) {
        be->ops->copy(be, p->to, p->from, p->n * p->bytes);
        return;
    }
    for (uint32_t i = 0; i < p->n; i++)
        be->ops->copy(be, p->to + i * p->to_step, p->from + i * p->from_step, p->bytes);
}

/* One more piece: of the run that there is, or of a new one. */
static void add_piece(struct backend *be, struct pieces *p, char *to, const char *from)
{
    if (p->n == 1) {
        p->to_step = to - p->to;
        p->from_step = from - p->from;
    }
    bool fits =
        p->n == 0 || (to == p->to + p->n * p->to_step && from == p->from + p->n * p->from_step);
    if (!fits) {
        copy_pieces(be, p);
        p->n = 0;
    }
    if (p->n == 0) {
        p->to = to;
        p->from = from;
    }
    p->n++;
}

/* The layer's pages of blocks [first, end) to where the sequence has them. */
static void put_pages(const struct layer_major *lm, struct backend *be, uint32_t first,
                      uint32_t end)
{
    const struct kv_memory *kv = kv_memory(lm->s->kv);
    const size_t block = kv->geo->block_bytes[LANE_SPARSE];
    const size_t at = kv_page_offset(kv->geo, lm->layer, 0);
    const block_id *home = lm->q->kv.table[LANE_SPARSE];
    struct pieces p = {.bytes = lm->geo.block_bytes[LANE_SPARSE]};
    for (uint32_t i = first; i < end; i++) {
        bool down = (home[i] & BLOCK_IN_DRAM) != 0;
        char *arena = down ? kv->dram[LANE_SPARSE] : kv->hbm[LANE_SPARSE];
        const char *from = (const char *)kv->hbm[LANE_SPARSE] + lm->table[i] * p.bytes;
        add_piece(be, &p, arena + (home[i] & ~BLOCK_IN_DRAM) * block + at, from);
    }
    copy_pieces(be, &p);
}

/* n rows of the residual stream between the loan and `rows`. */
static void move_rows(const struct layer_major *lm, struct backend *be, char *rows, uint32_t n,
                      bool in)
{
    const struct kv_memory *kv = kv_memory(lm->s->kv);
    const size_t unit = kv->geo->block_bytes[LANE_SPARSE];
    const block_id *places = lm->loan.places + lm->shape.first_row;
    uint64_t at = lm->row * (uint64_t)lm->row_bytes;
    for (uint64_t left = n * (uint64_t)lm->row_bytes, bytes; left > 0;
         left -= bytes, at += bytes, rows += bytes) {
        uint64_t i = at / unit, end = i + 1;
        while (end * unit < at + left && places[end] == places[end - 1] + 1)
            end++;
        bytes = end * unit - at < left ? end * unit - at : left;
        char *lent = (char *)kv->hbm[LANE_SPARSE] + places[i] * unit + at % unit;
        if (in)
            be->ops->copy(be, rows, lent, bytes);
        else
            be->ops->copy(be, lent, rows, bytes);
    }
}

/* ---- sealing ---- */

/* This layer's part of a record; or, of one that is lent, the part of a group's member. */
static char *record_part(const struct layer_major *lm, uint32_t record, uint32_t first_lane)
{
    const struct kv_memory *kv = kv_memory(lm->s->kv);
    return (char *)kv->records + record * kv->record_bytes + first_lane * kv->record_lane_bytes;
}

static void seal_alone(struct layer_major *lm, uint32_t segment)
{
    const struct sequence *q = lm->q;
    const block_id *blocks = lm->table + (size_t)segment * lm->shape.segment_blocks;
    attention_seal_in(lm->s->at, q->in, &lm->memory, segment, q->kv.records[segment],
                      q->kv.records[0], blocks, blocks);
}

/* Segments first + 1 .. of one group. */
static void seal_group(struct layer_major *lm, struct backend *be, uint32_t first)
{
    const struct layout *l = &lm->shape;
    const struct kv_memory *kv = kv_memory(lm->s->kv);
    const size_t bytes = kv->record_lane_bytes * lm->geo.kv_heads;
    const block_id *places = lm->loan.places + (size_t)(first / l->per) * l->segment_blocks;
    attention_seal_in(lm->s->at, lm->q->in, kv, 1 /* any but the first */,
                      lm->loan.records[RECORD_GROUP], lm->loan.records[RECORD_FIRST], places,
                      places);
    const uint32_t lane = kv_lane(kv->geo, lm->layer, 0).index;
    for (uint32_t g = 0; g < l->per && first + g < l->n_grouped && kv->record_bytes > 0; g++)
        be->ops->copy(be, record_part(lm, lm->q->kv.records[first + g + 1], lane),
                      record_part(lm, lm->loan.records[RECORD_GROUP], g * lm->geo.kv_heads), bytes);
}

/* The first segment's record, for every member of a group. */
static void spread_first(struct layer_major *lm, struct backend *be)
{
    const struct kv_memory *kv = kv_memory(lm->s->kv);
    const uint32_t lane = kv_lane(kv->geo, lm->layer, 0).index;
    for (uint32_t g = 0; g < lm->shape.per && kv->record_bytes > 0; g++)
        be->ops->copy(be, record_part(lm, lm->loan.records[RECORD_FIRST], g * lm->geo.kv_heads),
                      record_part(lm, lm->q->kv.records[0], lane),
                      kv->record_lane_bytes * lm->geo.kv_heads);
}

/* What is due now that lm->row rows of the layer are there, and then away with it. */
static void seal_layer(struct layer_major *lm, struct backend *be)
{
    const struct layout *l = &lm->shape;
    bool ends = lm->row == lm->n_rows, groups = l->n_grouped > 0;
    uint32_t due = groups && !ends ? 0 : kv_segments_due(lm->row), first = lm->n_sealed;
    for (; lm->n_sealed < due && !(groups && lm->n_sealed > 0); lm->n_sealed++)
        seal_alone(lm, lm->n_sealed);
    if (groups && ends) {
        spread_first(lm, be);
        for (uint32_t i = 0; i < l->n_grouped; i += l->per)
            seal_group(lm, be, i);
        lm->n_sealed = due;
    }
    put_pages(lm, be, first * l->segment_blocks,
              ends ? l->blocks : lm->n_sealed * l->segment_blocks);
}

/* ---- units ---- */

uint32_t layer_major_next(const struct layer_major *lm, bool *last)
{
    uint32_t n = lm->n_rows - lm->row;
    n = n < lm->chunk ? n : lm->chunk;
    if (lm->shape.n_grouped == 0) {
        uint32_t border = kv_next_border(lm->row) - lm->row;
        n = n < border ? n : border;
    }
    *last = lm->layer + 1 == lm->layers && lm->row + n == lm->n_rows;
    return n;
}

const void *layer_major_run(struct layer_major *lm, struct backend *be, struct model *m,
                            const uint32_t *logit_rows, uint32_t n_logits)
{
    bool last;
    const uint32_t n = layer_major_next(lm, &last);
    const struct lane_place lane = kv_lane(kv_geometry(lm->s->kv), lm->layer, 0);
    const bool sparse = lane.class_ == LANE_SPARSE;
    struct batch_seq *seq = &lm->seqs[lm->turn++ % LAYER_MAJOR_AT_ONCE];
    size_t row_bytes;
    char *rows = model_rows(m, &row_bytes);
    CHECK(row_bytes == lm->row_bytes);
    *seq = (struct batch_seq){.n_rows = n, .first_pos = lm->row};
    seq->blocks[LANE_DENSE] = sparse ? NULL : lm->q->kv.table[LANE_DENSE];
    seq->blocks[LANE_SPARSE] = sparse ? lm->table : lm->q->kv.table[LANE_SPARSE];
    if (sparse && lm->memory.record_bytes > 0)
        lm->memory.records = record_part(lm, 0, lane.index);
    const struct batch b = {.kv = sparse ? &lm->memory : kv_memory(lm->s->kv),
                            .n_rows = n,
                            .n_seqs = 1,
                            .n_logits = n_logits,
                            .tokens = lm->q->tokens + lm->row,
                            .seqs = seq,
                            .logit_rows = logit_rows};
    if (lm->layer > 0)
        move_rows(lm, be, rows, n, true);
    const void *logits = model_layer(m, &b, lm->layer, sparse ? 0 : lm->layer);
    if (lm->layer + 1 < lm->layers)
        move_rows(lm, be, rows, n, false);
    lm->row += n;
    if (sparse)
        seal_layer(lm, be);
    if (last) {
        lm->s->segments_sealed += lm->shape.segments;
        kv_seq_laid(lm->s->kv, &lm->q->kv);
    }
    if (lm->row == lm->n_rows) {
        lm->layer++;
        lm->row = lm->n_sealed = 0;
    }
    return logits;
}

void layer_major_progress(const struct layer_major *lm, uint64_t *done, uint64_t *all)
{
    *done = (uint64_t)lm->layer * lm->n_rows + lm->row;
    *all = (uint64_t)lm->layers * lm->n_rows;
}
