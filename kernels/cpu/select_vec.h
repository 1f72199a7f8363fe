/* Selection for one row and one KV head, once for every instruction set (vec16.h).
 *
 * Scores of the group become one rank per partition; the best are found by a threshold, not by a
 * sort: a threshold is searched by halves, counting with compares of whole vectors, first among all,
 * then among the few between the last two. A border is a pair (key, index): ties go to the smaller
 * partition, and both lists come out in ascending order by one walk. Only what must be walked in
 * order of rank is sorted: partitions of different sizes, and those below a top_p.
 *
 * Bound by the exponential of every score, then by about 6 compares per vector and border. */
#include "kernels/cpu/select.h"
#include "kernels/cpu/vec16.h"

/* Everything better than this (or equal) is chosen; nothing if index is 0. */
struct border {
    int32_t key;
    uint32_t end; /* of those with an equal key: indices below this */
};

struct ranked {
    uint32_t index, key; /* key: unsigned, greater is better */
};

struct select_state {
    const struct select_lane *l;
    const struct select_args *a;
    uint32_t n, first;  /* partitions; the first of them outside the sinks' pages */
    uint32_t n_ranked;  /* partitions with a score */
    uint32_t part_rows; /* 0: they differ */
    uint32_t sink_rows;
    bool raw;   /* ranks are logits, not probabilities */
    float best; /* greatest rank */
    int32_t best_key;
    float *rank;   /* [n + 16]; -inf: no candidate */
    int32_t *keys; /* [n + 16]: ranks as integers of the same order; INT32_MIN: no candidate */
    int32_t *some; /* [n + 16] */
    struct ranked *sorted, *spare; /* [n + 16] */
    uint16_t *has;                 /* [n / 16 + 1] masks: some head has a score */
    float *e;                      /* [group][n + 16] */
};

/* ---- ranks -------------------------------------------------------------------------------------- */

/* 16 scores of a head; -inf before the first and behind the last partition. NaN counts as -inf. */
V16_FN v16f scores_at(const struct select_state *s, uint32_t h, uint32_t i)
{
    v16_mask m = v16_first_lanes(s->n - i);
    v16f none = v16_set1(-INFINITY), x;
    const float *p = s->l->scores + (size_t)h * s->a->stride + i;
    if (i < s->first)
        m &= ~v16_first_lanes(s->first - i);
    if (s->n - i < V16) {
        float some[V16] = {0};
        memcpy(some, p, (s->n - i) * sizeof *some);
        x = v16_load(some);
    } else {
        x = v16_load(p);
    }
    return v16_pick(m & v16_gt(x, none), x, none);
}

/* e[h] = exponentials of a head's scores, relative to the greatest; returns their sum, with the known
 * mass. */
static float exponentials(struct select_state *s, uint32_t h)
{
    float *e = s->e + (size_t)h * (s->n + V16);
    v16f top = v16_set1(-3e38f), total = v16_zero(), none = v16_set1(-INFINITY);
    for (uint32_t i = 0; i < s->n; i += V16) {
        v16f x = scores_at(s, h, i);
        top = v16_max(x, top);
        s->has[i / V16] |= (uint16_t)v16_gt(x, none);
        v16_store(e + i, x);
    }
    float most = v16_hmax(top);
    v16f log2e = v16_set1(1.44269504f), shift = v16_set1(-1.44269504f * most);
    for (uint32_t i = 0; i < s->n; i += V16) {
        v16f x = v16_exp2(v16_fma(v16_load(e + i), log2e, shift));
        total = v16_add(total, x);
        v16_store(e + i, x);
    }
    if (s->l->known == NULL)
        return v16_hsum(total);
    float rest[V16];
    v16_store(rest, v16_exp(v16_set1(s->l->known[h] - most)));
    return v16_hsum(total) + rest[0];
}

/* rank = greatest or sum, over the heads, of the softmax over the partitions (and the known mass). */
static void rank_probabilities(struct select_state *s)
{
    uint32_t group = s->a->group, stride = s->n + V16;
    bool sum = s->a->reduce == REDUCE_SUM_PROB;
    v16f none = v16_set1(-INFINITY);
    memset(s->has, 0, (s->n + V16 - 1) / V16 * sizeof *s->has);
    for (uint32_t h = 0; h < group; h++) {
        float z = exponentials(s, h);
        v16f factor = v16_set1(z > 0 ? 1.0f / z : 0.0f);
        const float *e = s->e + (size_t)h * stride;
        for (uint32_t i = 0; i < s->n; i += V16) {
            v16f x = v16_mul(v16_load(e + i), factor);
            if (h > 0)
                x = sum ? v16_add(v16_load(s->rank + i), x) : v16_max(v16_load(s->rank + i), x);
            if (h + 1 == group)
                x = v16_pick(s->has[i / V16], x, none);
            v16_store(s->rank + i, x);
        }
    }
}

static void rank_raw(struct select_state *s)
{
    uint32_t group = s->a->reduce == REDUCE_NATIVE ? 1 : s->a->group;
    v16f factor = v16_set1(1.0f / (float)group);
    for (uint32_t i = 0; i < s->n; i += V16) {
        v16f r = scores_at(s, 0, i);
        for (uint32_t h = 1; h < group; h++) {
            v16f x = scores_at(s, h, i);
            r = s->a->reduce == REDUCE_MAX_RAW ? v16_max(r, x) : v16_add(r, x);
        }
        v16_store(s->rank + i, s->a->reduce == REDUCE_MEAN_RAW ? v16_mul(r, factor) : r);
    }
}

/* Numbers as integers of the same order; -0 is 0. */
V16_FN v16i keys_of(v16f x)
{
    v16i bits = v16_bits(v16_add(x, v16_zero()));
    return v16i_xor(bits, v16i_and(v16i_sar(bits, 31), v16i_set1(0x7fffffff)));
}

/* keys, n_ranked, best, best_key */
static void make_keys(struct select_state *s)
{
    v16f best = v16_set1(-INFINITY), none = best;
    s->n_ranked = 0;
    for (uint32_t i = 0; i < s->n; i += V16) {
        v16f r = v16_load(s->rank + i);
        v16_mask has = v16_gt(r, none);
        v16f none_key = v16_of_bits(v16i_set1(INT32_MIN));
        v16i_store(s->keys + i, v16_bits(v16_pick(has, v16_of_bits(keys_of(r)), none_key)));
        s->n_ranked += (uint32_t)__builtin_popcount(has);
        best = v16_max(r, best);
    }
    s->best = v16_hmax(best);
    int32_t key[V16];
    v16i_store(key, keys_of(v16_set1(s->best)));
    s->best_key = key[0];
}

/* No partition has a score (a plug-in's fault, or a query that is not a number): all are worth the same,
 * so that ties go to the first ones. A selection is never empty. */
static void rank_equal(struct select_state *s)
{
    for (uint32_t i = 0; i < s->n + V16; i++)
        s->rank[i] = i < s->first || i >= s->n ? -INFINITY : 1.0f;
}

/* ---- borders ------------------------------------------------------------------------------------ */

static uint32_t count_above(const int32_t *keys, uint32_t n, int32_t key)
{
    v16i k = v16i_set1(key), even = v16i_set1(0), odd = even;
    uint32_t i = 0;
    for (; i + V16 < n; i += 2 * V16) {
        even = v16i_count_gt(even, v16i_load(keys + i), k);
        odd = v16i_count_gt(odd, v16i_load(keys + i + V16), k);
    }
    if (i < n)
        even = v16i_count_gt(even, v16i_load(keys + i), k);
    return v16i_total(v16i_add(even, odd));
}

/* Candidates left while a border is searched: the keys in [low, high), if not all keys. */
struct search {
    int64_t low, high;        /* at least k keys are >= low, fewer than k are >= high */
    uint32_t at_low, at_high; /* how many are */
    const int32_t *keys;      /* [n], padded with INT32_MIN */
    uint32_t n, beyond;       /* beyond: keys >= high that are not among `keys` */
};

/* Keeps the keys in [low, high) alone, once they are few. */
static void narrow(struct select_state *s, struct search *x)
{
    uint32_t n = 0;
    v16i low = v16i_set1((int32_t)x->low - 1), high = v16i_set1((int32_t)(x->high - 1));
    for (uint32_t i = 0; i < x->n; i += V16) {
        v16i keys = v16i_load(x->keys + i);
        v16_mask in = v16i_gt(keys, low) & ~v16i_gt(keys, high);
        if (in == 0)
            continue;
        v16i_compress(s->some + n, in, keys);
        n += (uint32_t)__builtin_popcount(in);
    }
    v16i_store(s->some + n, v16i_set1(INT32_MIN));
    x->keys = s->some;
    x->n = n;
    x->beyond = x->at_high;
}

/* The border that exactly k candidates meet, 1 <= k <= n_ranked. Any key that k keys are greater than
 * is one: the search ends as soon as it meets one, and goes to the end only among equals. It starts
 * below the best rank by a factor of 2^16, where most borders are not far. */
static struct border border_of(struct select_state *s, uint32_t k)
{
    enum { FEW = 64, OCTAVES = 16 };
    struct search x = {.low = (int64_t)INT32_MIN + 1,
                       .high = (int64_t)s->best_key + 1,
                       .at_low = s->n_ranked,
                       .keys = s->keys,
                       .n = s->n};
    int64_t middle = x.high - ((int64_t)OCTAVES << 23);
    if (s->n_ranked == k)
        return (struct border){INT32_MIN, 0};
    while (x.high - x.low > 1) {
        if (middle <= x.low || middle >= x.high)
            middle = x.low + (x.high - x.low) / 2;
        uint32_t count = x.beyond + count_above(x.keys, x.n, (int32_t)(middle - 1));
        if (count == k)
            return (struct border){(int32_t)(middle - 1), 0};
        if (count > k) {
            x.low = middle;
            x.at_low = count;
        } else {
            x.high = middle;
            x.at_high = count;
        }
        if (x.keys == s->keys && x.at_low - x.at_high <= FEW && x.n > 2 * FEW)
            narrow(s, &x);
        middle = x.low;
    }
    struct border b = {.key = (int32_t)x.low};
    uint32_t ties = k - x.at_high;
    for (uint32_t i = 0; ties > 0; i += V16) {
        v16_mask eq = v16i_eq(v16i_load(s->keys + i), v16i_set1(b.key));
        for (; eq != 0 && ties > 0; eq &= eq - 1, ties--)
            b.end = i + (uint32_t)__builtin_ctz(eq) + 1;
    }
    return b;
}

static bool within(const struct select_state *s, const struct border *b, uint32_t i)
{
    int32_t key = s->keys[i];
    return key > b->key || (i < b->end && key == b->key);
}

/* Those of 16 partitions that are within a border. */
V16_FN v16_mask within_of(v16i keys, const struct border *b, uint32_t i)
{
    v16_mask m = v16i_gt(keys, v16i_set1(b->key));
    if (b->end > i)
        m |= v16i_eq(keys, v16i_set1(b->key)) & v16_first_lanes(b->end - i);
    return m;
}

/* ---- how many ------------------------------------------------------------------------------------ */

static uint32_t part_row_count(const struct select_state *s, uint32_t i, uint32_t *first)
{
    const struct digest_desc *d = &s->a->desc;
    const uint8_t *record = NULL;
    if (d->order == ORDER_KMEANS)
        record = digest_lane(s->a->kv, s->l->row->records[i / d->parts], s->a->layer, s->l->head);
    return digest_rows(record, d, i % d->parts, first);
}

/* The candidates within a border by rank, ties by index: bytes of the key from the last to the first,
 * each pass keeping the order of the one before. Returns how many. */
static uint32_t sort_within(struct select_state *s, const struct border *b)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < s->n; i++)
        if (within(s, b, i))
            s->sorted[n++] = (struct ranked){i, ~((uint32_t)s->keys[i] ^ 0x80000000u)};
    for (uint32_t shift = 0; shift < 32; shift += 8) {
        uint32_t at[256] = {0}, sum = 0;
        for (uint32_t i = 0; i < n; i++)
            at[s->sorted[i].key >> shift & 0xff]++;
        for (uint32_t i = 0; i < 256; i++) {
            uint32_t count = at[i];
            at[i] = sum;
            sum += count;
        }
        for (uint32_t i = 0; i < n; i++)
            s->spare[at[s->sorted[i].key >> shift & 0xff]++] = s->sorted[i];
        struct ranked *swap = s->sorted;
        s->sorted = s->spare;
        s->spare = swap;
    }
    return n;
}

/* Sum of all ranks as shares of the mass. */
static float total_mass(const struct select_state *s)
{
    v16f sum = v16_zero(), none = v16_set1(-INFINITY);
    for (uint32_t i = 0; i < s->n; i += V16) {
        v16f r = v16_load(s->rank + i);
        v16f x = s->raw ? v16_exp(v16_sub(r, v16_set1(s->best))) : r;
        sum = v16_add(sum, v16_pick(v16_gt(r, none), x, v16_zero()));
    }
    return v16_hsum(sum);
}

static float mass_of_rank(const struct select_state *s, float rank)
{
    if (!s->raw)
        return rank;
    float one[V16];
    v16_store(one, v16_exp(v16_set1(rank - s->best)));
    return one[0];
}

/* How many of the best fit the budget and top_p: at least one. */
static uint32_t count_selected(struct select_state *s)
{
    const struct plan_row *row = s->l->row;
    uint32_t limit = s->part_rows > 0 ? row->budget / s->part_rows : row->budget;
    limit = limit < 1 ? 1 : limit < s->n_ranked ? limit : s->n_ranked;
    if (s->part_rows > 0 && row->top_p >= 1)
        return limit;
    struct border b = border_of(s, limit);
    uint32_t n = sort_within(s, &b), rows = 0, first, i;
    float wanted = row->top_p < 1 ? row->top_p * total_mass(s) : INFINITY, mass = 0;
    for (i = 0; i < n; i++) {
        rows += part_row_count(s, s->sorted[i].index, &first);
        if (i > 0 && (rows > row->budget || mass >= wanted))
            break;
        mass += mass_of_rank(s, s->rank[s->sorted[i].index]);
    }
    return i;
}

/* ---- lists -------------------------------------------------------------------------------------- */

V16_FN v16f shares_at(const struct select_state *s, uint32_t i)
{
    v16f r = v16_load(s->rank + i);
    if (s->raw)
        return v16_exp(v16_sub(r, v16_set1(s->best)));
    return v16_mul(r, v16_set1(s->best > 0 ? 1.0f / s->best : 0.0f));
}

static uint32_t put_sinks(const struct select_state *s)
{
    const struct select_lane *l = s->l;
    uint32_t n = s->n > 0 ? s->sink_rows / s->a->kv->geo->block_rows : 0; /* else: in the tail */
    CHECK(n <= s->a->page_cap);
    for (uint32_t i = 0; i < n; i++) {
        l->pages[i] = i;
        l->share[i] = 1.0f;
        if (l->masks != NULL)
            l->masks[i] = 0xffffffffu >> (32 - s->a->kv->geo->block_rows);
    }
    return n;
}

/* Adds rows [row, row + n) of the sequence to the list, of which the last page may have some. */
static uint32_t put_rows(const struct select_state *s, uint32_t n_pages, uint32_t row, uint32_t n,
                         float share)
{
    const struct select_lane *l = s->l;
    uint32_t rows = s->a->kv->geo->block_rows;
    for (uint32_t end = row + n; row < end;) {
        uint32_t page = row / rows, at = row % rows, some = rows - at;
        some = some < end - row ? some : end - row;
        if (n_pages == 0 || l->pages[n_pages - 1] < page) {
            CHECK(n_pages < s->a->page_cap);
            l->pages[n_pages] = page;
            l->masks[n_pages] = 0;
            l->share[n_pages++] = share;
        }
        /* pages before the last one are the sinks': whole already */
        if (l->pages[n_pages - 1] == page) {
            l->masks[n_pages - 1] |= 0xffffffffu >> (32 - some) << at;
            if (l->share[n_pages - 1] < share)
                l->share[n_pages - 1] = share;
        }
        row += some;
    }
    return n_pages;
}

static uint32_t put_parts(const struct select_state *s, uint32_t n_pages, v16_mask m, uint32_t i)
{
    float share[V16];
    v16_store(share, shares_at(s, i));
    for (; m != 0; m &= m - 1) {
        uint32_t lane = (uint32_t)__builtin_ctz(m), p = i + lane, first;
        uint32_t n = part_row_count(s, p, &first);
        uint32_t row = p / s->a->desc.parts * SEGMENT_ROWS + first;
        n_pages = put_rows(s, n_pages, row, n, share[lane]);
    }
    return n_pages;
}

V16_FN uint32_t put_pages(const struct select_state *s, uint32_t n_pages, v16_mask m, uint32_t i,
                          v16i index)
{
    uint32_t n = (uint32_t)__builtin_popcount(m);
    CHECK(n_pages + n <= s->a->page_cap);
    v16i_compress(s->l->pages + n_pages, m, v16i_add(index, v16i_set1((int32_t)i)));
    v16i_compress(s->l->share + n_pages, m, v16_bits(shares_at(s, i)));
    for (uint32_t k = 0; s->l->masks != NULL && k < n; k++)
        s->l->masks[n_pages + k] = 0xffffffffu >> (32 - s->a->kv->geo->block_rows);
    return n_pages + n;
}

/* Both lists, ascending. */
static void put_lists(const struct select_state *s, const struct border *chosen,
                      const struct border *rest)
{
    static const int32_t counting[V16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const struct select_lane *l = s->l;
    uint32_t n_pages = put_sinks(s), n_estimates = 0;
    v16i index = v16i_load(counting);
    for (uint32_t i = 0; i < s->n && s->n_ranked > 0; i += V16) {
        v16i keys = v16i_load(s->keys + i);
        v16_mask out = within_of(keys, rest, i), in = within_of(keys, chosen, i);
        if (out == 0)
            continue;
        if (in != 0 && s->a->map == MAP_PAGE)
            n_pages = put_pages(s, n_pages, in, i, index);
        else if (in != 0)
            n_pages = put_parts(s, n_pages, in, i);
        out &= ~in;
        if (out == 0)
            continue;
        v16i_compress(l->estimates + n_estimates, out, v16i_add(index, v16i_set1((int32_t)i)));
        n_estimates += (uint32_t)__builtin_popcount(out);
    }
    *l->n_pages = n_pages;
    *l->n_estimates = n_estimates;
}

static void set_up(struct select_state *s, const struct select_lane *l)
{
    const struct select_args *a = l->a;
    const struct digest_desc *d = &a->desc;
    uint32_t rows = a->kv->geo->block_rows;
    *s = (struct select_state){.l = l, .a = a, .n = l->row->n_segments * d->parts};
    s->part_rows = d->order == ORDER_KMEANS ? 0 : SEGMENT_ROWS / d->parts;
    s->sink_rows = (d->sinks + rows - 1) / rows * rows;
    s->first = s->part_rows > 0 ? s->sink_rows / s->part_rows : 0;
    s->raw = a->reduce != REDUCE_MAX_PROB && a->reduce != REDUCE_SUM_PROB;
    uint32_t *at = l->work, size = s->n + V16;
    s->rank = (float *)(void *)at;
    s->keys = (int32_t *)(void *)(at + size);
    s->some = (int32_t *)(void *)(at + 2 * (size_t)size);
    s->has = (uint16_t *)(void *)(at + 3 * (size_t)size);
    s->sorted = (struct ranked *)(void *)(at + 4 * (size_t)size);
    s->spare = (struct ranked *)(void *)(at + 6 * (size_t)size);
    s->e = (float *)(void *)(at + 8 * (size_t)size);
}

static void lane(const struct select_lane *l)
{
    struct select_state s;
    struct border chosen = {INT32_MAX, 0}, rest;
    set_up(&s, l);
    if (s.n > 0) {
        if (s.raw)
            rank_raw(&s);
        else
            rank_probabilities(&s);
        make_keys(&s);
    }
    bool scored = s.n_ranked > 0;
    if (s.n > 0 && !scored) {
        if (l->a->unscored != NULL)
            __atomic_fetch_add(l->a->unscored, 1, __ATOMIC_RELAXED);
        rank_equal(&s);
        make_keys(&s);
    }
    rest = chosen;
    if (s.n_ranked > 0) {
        uint32_t n = count_selected(&s), more = scored ? l->row->estimate : 0;
        uint32_t left = s.n_ranked - n;
        more = more < l->a->estimate_cap ? more : l->a->estimate_cap;
        more = more < left ? more : left;
        chosen = border_of(&s, n);
        rest = more > 0 ? border_of(&s, n + more) : chosen;
    }
    put_lists(&s, &chosen, &rest);
}
