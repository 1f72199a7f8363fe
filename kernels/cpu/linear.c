/* `linear`: packs activations, shares the groups of a matrix among the workers, stores the results.
 *
 * One pool_run per operation. Tokens go in chunks of CHUNK_TOKENS whose planes stay in L2; in a chunk
 * each worker packs some tokens, waits at one barrier, and multiplies. There are two buffers, so
 * packing the next chunk needs no second barrier: who writes a buffer has passed the barrier of the
 * chunk between, and so has everyone who read it. A single token is packed by every worker for
 * itself: that costs less than the barrier.
 *
 * Most groups are given out beforehand, because a worker that walks one long stretch of memory keeps
 * its prefetcher busy; the last ones are taken one by one, so that a worker that started late or lost
 * its core does not hold up the step. Which worker computes what never changes a result.
 *
 * Bound by memory for 1 or 2 tokens (the weights are read once per call), by vpdpbusd for more. */
#include "kernels/cpu/linear.h"

#include <string.h>

enum { CHUNK_TOKENS = 8 * TOKENS_MAX, UNITS_AT_ONCE = 8 };

/* Room for the packed form of some tokens. */
struct act_room {
    int8_t *q;
    struct act_scale *sc;
    float *x; /* only once a weight of a float type exists */
};

struct act_scratch {
    uint32_t max_blocks, n_threads;
    bool floats;
    uint8_t *memory;
    size_t bytes;
    struct act_room shared[2]; /* CHUNK_TOKENS each */
    struct act_room *own;      /* [n_threads] one token each */
    float **row;               /* [n_threads][max_blocks * 32] a row after its norm */
};

struct linear_job {
    const struct linear_args *args;
    const struct linear_kernels *k;
    const struct weight *w;
    struct act_scratch *s;
    struct pool *pool;
    uint32_t n_units;             /* groups, or pairs of gate and up groups */
    uint32_t n_share;             /* units of each worker given beforehand */
    uint32_t tail_units, n_tails; /* the others, in pieces: units per piece, pieces per chunk */
    uint32_t n_chunks, out_cols;
};

status cpu_linear_open(struct cpu_backend *b)
{
    static const struct linear_kernels *const kernels[] = {&linear_scalar, &linear_avx2,
                                                           &linear_avx512};
    b->linear = kernels[b->isa];
    struct act_scratch *s = mem_alloc(sizeof *s);
    s->n_threads = pool_threads(b->pool);
    s->own = mem_alloc(s->n_threads * sizeof *s->own);
    s->row = mem_alloc(s->n_threads * sizeof *s->row);
    b->scratch = s;
    return OK;
}

void cpu_linear_close(struct cpu_backend *b)
{
    struct act_scratch *s = b->scratch;
    if (s == NULL)
        return;
    b->base.ops->free(&b->base, s->memory, s->bytes);
    mem_free(s->own);
    mem_free(s->row);
    mem_free(s);
    b->scratch = NULL;
}

/* Bytes of a room; where at is not NULL, lays it out there. */
static size_t lay_room(struct act_room *r, uint8_t *at, uint32_t n_tokens,
                       const struct act_scratch *s)
{
    size_t n = (size_t)n_tokens * s->max_blocks;
    size_t q_bytes = n * 2 * TILE_COLS, sc_bytes = (n * sizeof *r->sc + 63) & ~(size_t)63;
    if (at != NULL) {
        r->q = (int8_t *)at;
        r->sc = (struct act_scale *)(void *)(at + q_bytes);
        r->x = (float *)(void *)(at + q_bytes + sc_bytes);
    }
    return q_bytes + sc_bytes + (s->floats ? n * TILE_COLS * sizeof *r->x : 0);
}

status cpu_linear_reserve(struct cpu_backend *b, const struct weight *w)
{
    struct act_scratch *s = b->scratch, want = *s;
    want.floats |= w->any_float;
    if (w->n_blocks > want.max_blocks)
        want.max_blocks = w->n_blocks;
    if (want.max_blocks == s->max_blocks && want.floats == s->floats)
        return OK;
    size_t row_bytes = (size_t)want.max_blocks * TILE_COLS * sizeof(float);
    size_t chunk_bytes = lay_room(NULL, NULL, CHUNK_TOKENS, &want);
    size_t own_bytes = lay_room(NULL, NULL, 1, &want);
    want.bytes = 2 * chunk_bytes + s->n_threads * (own_bytes + row_bytes);
    want.memory = b->base.ops->alloc(&b->base, want.bytes);
    if (want.memory == NULL)
        return ERR_MEMORY;
    b->base.ops->free(&b->base, s->memory, s->bytes);
    *s = want;
    lay_room(&s->shared[0], s->memory, CHUNK_TOKENS, s);
    lay_room(&s->shared[1], s->memory + chunk_bytes, CHUNK_TOKENS, s);
    uint8_t *at = s->memory + 2 * chunk_bytes;
    for (uint32_t i = 0; i < s->n_threads; i++, at += own_bytes + row_bytes) {
        lay_room(&s->own[i], at, 1, s);
        s->row[i] = (float *)(void *)(at + own_bytes);
    }
    return OK;
}

/* First token of block i, when n tokens are cut into blocks of nearly equal size. */
static uint32_t block_start(uint32_t n, uint32_t i)
{
    uint32_t n_blocks = (n + TOKENS_MAX - 1) / TOKENS_MAX;
    return n * i / n_blocks;
}

/* Packs token t of n (input row `row`) into its place in a room. */
static void pack_token(const struct linear_job *j, const struct act_room *room, uint32_t n,
                       uint32_t t, size_t row, uint32_t worker)
{
    const struct linear_args *a = j->args;
    const struct weight *w = j->w;
    const float *x = (const float *)a->in + (a->rows != NULL ? a->rows[row] : row) * w->cols;
    if (a->norm_gain != NULL || w->cols % TILE_COLS != 0) {
        float *copy = j->s->row[worker];
        if (a->norm_gain != NULL)
            j->k->norm(x, a->norm_gain, a->norm_eps, w->cols, copy);
        else
            memcpy(copy, x, w->cols * sizeof *copy);
        memset(copy + w->cols, 0, ((size_t)w->n_blocks * TILE_COLS - w->cols) * sizeof *copy);
        x = copy;
    }
    uint32_t block = 0;
    while (t >= block_start(n, block + 1))
        block++;
    uint32_t start = block_start(n, block), size = block_start(n, block + 1) - start;
    size_t at = (size_t)start * w->n_blocks + (t - start);
    if (w->any_int)
        j->k->quantize(x, w->n_blocks, size, room->q + at * 2 * TILE_COLS, room->sc + at);
    if (w->any_float)
        for (uint32_t b = 0; b < w->n_blocks; b++)
            memcpy(room->x + (at + (size_t)b * size) * TILE_COLS, x + (size_t)b * TILE_COLS,
                   TILE_COLS * sizeof *x);
}

static const struct weight_tiles *part_of(const struct weight *w, uint32_t group)
{
    const struct weight_tiles *p = w->parts;
    while (group >= p->first_group + p->n_groups)
        p++;
    return p;
}

static const uint8_t *tiles_of(const struct linear_job *j, uint32_t group)
{
    if (group >= j->w->n_groups)
        return NULL;
    const struct weight_tiles *p = part_of(j->w, group);
    return p->groups + (group - p->first_group) * p->group_bytes;
}

static void dot_group(const struct linear_job *j, uint32_t group, uint32_t next,
                      struct act_block *block, out_tile y)
{
    block->next = tiles_of(j, next);
    j->k->dot[part_of(j->w, group)->form](tiles_of(j, group), j->w->n_blocks, block, y);
}

/* One unit for one block of tokens, whose first is input row `first`; unit `next` will follow. */
static void run_unit(const struct linear_job *j, uint32_t unit, uint32_t next,
                     struct act_block *block, size_t first)
{
    _Alignas(64) out_tile y, up;
    bool pair = j->args->mode == LINEAR_SWIGLU;
    const struct weight_tiles *p = part_of(j->w, unit);
    uint32_t row = (unit - p->first_group) * TILE_ROWS;
    uint32_t end = pair ? j->out_cols : p->rows;
    struct out_args o = {.mode = j->args->mode,
                         .n = block->n,
                         .n_rows = end - row < TILE_ROWS ? end - row : TILE_ROWS,
                         .out = (float *)j->args->out + first * j->out_cols + p->first_row + row,
                         .stride = j->out_cols};
    for (uint32_t t = 0; t < o.n;
         t++) /* each token's row is another page: fetch while we multiply */
        __builtin_prefetch(o.out + t * o.stride, 1);
    dot_group(j, unit, pair ? unit + j->n_units : next, block, y);
    if (pair)
        dot_group(j, unit + j->n_units, next, block, up);
    j->k->store(&o, y, up);
}

/* Units [u0, u1) for the n tokens of a chunk: some units at a time, whose tiles then come from L2 for
 * every block of tokens but the first; a block's planes come from L1 for every unit but the first.
 * The worker goes on with unit `next`. */
static void run_units(const struct linear_job *j, const struct act_room *room, size_t first,
                      uint32_t n, uint32_t u0, uint32_t u1, uint32_t next)
{
    for (uint32_t from = u0; from < u1; from += UNITS_AT_ONCE) {
        uint32_t to = u1 - from < UNITS_AT_ONCE ? u1 : from + UNITS_AT_ONCE;
        for (uint32_t i = 0, t0 = 0; t0 < n; i++) {
            uint32_t t1 = block_start(n, i + 1);
            size_t at = (size_t)t0 * j->w->n_blocks;
            struct act_block block = {.q = room->q + at * 2 * TILE_COLS,
                                      .sc = room->sc + at,
                                      .x = room->x + at * TILE_COLS,
                                      .n = t1 - t0};
            uint32_t after = t1 < n ? from : to < u1 ? to : next;
            for (uint32_t u = from; u < to; u++)
                run_unit(j, u, u + 1 < to ? u + 1 : after, &block, first + t0);
            t0 = t1;
        }
    }
}

/* First unit of a piece of the tail of this chunk; none is beyond all groups. */
static uint32_t piece_start(const struct linear_job *j, uint32_t piece)
{
    return piece < j->n_tails ? j->n_share * j->s->n_threads + piece * j->tail_units : UINT32_MAX;
}

/* A worker's share of a chunk, then pieces of the tail. It always holds the piece it will run next
 * (*held, counted over all chunks), so that its tiles can be fetched while it runs the one before. */
static void run_chunk(const struct linear_job *j, const struct act_room *room, uint32_t chunk,
                      uint32_t n, uint32_t worker, uint32_t *held)
{
    size_t first = (size_t)chunk * CHUNK_TOKENS;
    uint32_t total = j->n_chunks * j->n_tails, base = chunk * j->n_tails;
    run_units(j, room, first, n, j->n_share * worker, j->n_share * (worker + 1),
              piece_start(j, *held - base));
    while (*held - base < j->n_tails) {
        uint32_t u0 = piece_start(j, *held - base), u1 = u0 + j->tail_units;
        *held = pool_next(j->pool, total);
        run_units(j, room, first, n, u0, u1 < j->n_units ? u1 : j->n_units,
                  piece_start(j, *held - base));
    }
}

static void fetch_first(const struct linear_job *j, uint32_t unit)
{
    enum { LINES = 32 }; /* as many as fit on the way from L3 while a token is packed */
    const uint8_t *tiles = tiles_of(j, unit);
    for (uint32_t i = 0; i < LINES && tiles != NULL; i++)
        __builtin_prefetch(tiles + (size_t)i * 64);
}

static void linear_worker(void *arg, uint32_t worker)
{
    const struct linear_job *j = arg;
    uint32_t n_rows = j->args->n_rows, n_threads = j->s->n_threads;
    uint32_t held = 0;
    fetch_first(j, j->n_share * worker);
    for (uint32_t c = 0; c < j->n_chunks; c++) {
        size_t first = (size_t)c * CHUNK_TOKENS;
        uint32_t n = n_rows - first < CHUNK_TOKENS ? (uint32_t)(n_rows - first) : CHUNK_TOKENS;
        const struct act_room *room = n_rows == 1 ? &j->s->own[worker] : &j->s->shared[c & 1];
        for (uint32_t t = n_rows == 1 ? 0 : worker; t < n; t += n_threads)
            pack_token(j, room, n, t, first + t, worker);
        if (n_rows != 1)
            pool_barrier(j->pool, worker);
        if (c == 0)
            held = pool_next(j->pool, j->n_chunks * j->n_tails);
        run_chunk(j, room, c, n, worker, &held);
    }
}

/* Gate and up must meet lane by lane. */
static bool pairs_up(const struct weight *w)
{
    return (w->n_parts == 2 && w->parts[0].rows == w->parts[1].rows) ||
           (w->n_parts == 1 && w->rows % (2 * TILE_ROWS) == 0);
}

void cpu_linear(struct backend *be, const struct linear_args *a)
{
    struct cpu_backend *b = (struct cpu_backend *)be;
    cpu_plan_flush(b);
    bool pair = a->mode == LINEAR_SWIGLU;
    CHECK(!pair || pairs_up(a->w));
    struct linear_job j = {.args = a,
                           .k = b->linear,
                           .w = a->w,
                           .s = b->scratch,
                           .pool = b->pool,
                           .n_units = pair ? a->w->n_groups / 2 : a->w->n_groups,
                           .n_chunks = (a->n_rows + CHUNK_TOKENS - 1) / CHUNK_TOKENS,
                           .out_cols = pair ? a->w->rows / 2 : a->w->rows};
    uint32_t n_threads = j.s->n_threads;
    j.n_share = n_threads == 1 ? j.n_units : j.n_units * 7 / 8 / n_threads;
    uint32_t tail = j.n_units - j.n_share * n_threads;
    j.tail_units = tail / (16 * n_threads) + 1;
    j.n_tails = (tail + j.tail_units - 1) / j.tail_units;
    if (a->n_rows != 0)
        pool_run(b->pool, linear_worker, &j);
}
