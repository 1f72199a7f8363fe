/* Three roads for a piece, all with the same result:
 *   - the cache: nearly every piece of ordinary text has been seen before;
 *   - up to 32 symbols: arrays on the stack, the lowest rank found by looking at all of them. It is
 *     quadratic, and at this size nothing is faster;
 *   - longer: a linked list of symbols and a heap of pairs, n log n, because anybody can send
 *     200,000 equal letters, which are one piece.
 *
 * The cache has a fixed number of slots, each the size of a cache line; a piece goes where its hash
 * says and replaces what was there. It cannot grow, whatever users send. */
#include "engine/text/bpe.h"

enum {
    MERGES_MAX = 1 << 22,
    SHORT_MAX = 32,   /* symbols */
    KEEP_MAX = 4096,  /* symbols for which the scratch has memory; longer pieces borrow it */
    NO_RANK = -1,     /* as uint32_t: after every rank */
    PIECE_BYTES = 30, /* what a cache slot of 64 bytes holds */
    PIECE_IDS = 8
};

struct bpe_piece {
    uint8_t len, n; /* len 0: empty */
    char bytes[PIECE_BYTES];
    uint32_t ids[PIECE_IDS];
};

struct bpe_symbol {
    uint32_t id, rank;  /* rank: of the pair with the next one; NO_RANK: none */
    int32_t prev, next; /* -1: the end */
};

static uint64_t pair_of(uint32_t left, uint32_t right)
{
    return (uint64_t)left << 32 | right;
}

/* The merge of a pair, or the empty slot where it would be. */
static struct bpe_merge *merge_slot(const struct bpe *b, uint64_t pair)
{
    uint32_t at = (uint32_t)((pair ^ pair >> 29) * 0x9e3779b97f4a7c15u >> 32) & b->mask;
    while (b->merges[at].pair != pair && b->merges[at].pair != UINT64_MAX)
        at = (at + 1) & b->mask;
    return &b->merges[at];
}

static uint32_t rank_of(const struct bpe *b, uint32_t left, uint32_t right)
{
    return merge_slot(b, pair_of(left, right))->rank; /* an empty slot has NO_RANK */
}

/* "left right": one space, which byte-mapped names cannot hold. */
static status add_merge(struct bpe *b, const struct tokens *v, uint32_t rank, struct text_view text,
                        char *bytes)
{
    const char *space = text.len == 0 ? NULL : memchr(text.p, ' ', text.len);
    size_t left_len = space == NULL ? 0 : (size_t)(space - text.p);
    size_t right_len = space == NULL ? 0 : text.len - left_len - 1;
    if (left_len == 0 || right_len == 0 || memchr(space + 1, ' ', right_len) != NULL)
        return err(ERR_FORMAT, "merge %u is not two tokens with a space between them", rank);
    size_t n_left = tokens_unmap((struct text_view){text.p, left_len}, bytes);
    struct text_view rest = {space + 1, right_len};
    size_t n_right = tokens_unmap(rest, bytes + n_left);
    uint32_t left = tokens_find(v, (struct text_view){bytes, n_left});
    uint32_t right = tokens_find(v, (struct text_view){bytes + n_left, n_right});
    uint32_t result = tokens_find(v, (struct text_view){bytes, n_left + n_right});
    if (left == TOKEN_NONE || right == TOKEN_NONE)
        return err(ERR_FORMAT, "merge %u: its %s half is not a token", rank,
                   left == TOKEN_NONE ? "left" : "right");
    if (result == TOKEN_NONE)
        return err(ERR_FORMAT, "merge %u: its result is not a token", rank);
    struct bpe_merge *m = merge_slot(b, pair_of(left, right));
    if (m->rank != (uint32_t)NO_RANK)
        return err(ERR_FORMAT, "merges %u and %u are the same", m->rank, rank);
    *m = (struct bpe_merge){pair_of(left, right), rank, result};
    b->results[rank] = result;
    return OK;
}

static status add_merges(struct bpe *b, const struct tokens *v, const struct tokenizer_source *src)
{
    size_t room = 0;
    for (uint32_t i = 0; i < src->n_merges; i++) {
        size_t len = src->merge(src->ctx, i).len;
        room = len > room ? len : room;
    }
    char *bytes = mem_alloc(room);
    status st = OK;
    for (uint32_t i = 0; i < src->n_merges && st == OK; i++)
        st = add_merge(b, v, i, src->merge(src->ctx, i), bytes);
    mem_free(bytes);
    return st;
}

status bpe_init(struct bpe *b, const struct tokens *v, const struct tokenizer_source *src)
{
    if (src->n_merges > MERGES_MAX)
        return err(ERR_FORMAT, "%u merges; up to %d can be read", src->n_merges, MERGES_MAX);
    uint32_t n_slots = 64;
    while (n_slots < 2 * src->n_merges)
        n_slots *= 2;
    *b = (struct bpe){.mask = n_slots - 1};
    b->merges = mem_alloc(n_slots * sizeof *b->merges);
    memset(b->merges, 0xff, n_slots * sizeof *b->merges); /* empty, and of NO_RANK */
    b->results = mem_alloc(src->n_merges * sizeof *b->results);
    status st = add_merges(b, v, src);
    if (st != OK)
        bpe_fini(b);
    return st;
}

void bpe_fini(struct bpe *b)
{
    mem_free(b->merges);
    mem_free(b->results);
    *b = (struct bpe){0};
}

void bpe_scratch_init(struct bpe_scratch *s)
{
    s->cache = mem_alloc(BPE_CACHE_SLOTS * sizeof *s->cache);
    s->symbols = mem_alloc(KEEP_MAX * sizeof *s->symbols);
    s->heap = mem_alloc((size_t)2 * KEEP_MAX * sizeof *s->heap);
}

void bpe_scratch_fini(struct bpe_scratch *s)
{
    mem_free(s->cache);
    mem_free(s->symbols);
    mem_free(s->heap);
    *s = (struct bpe_scratch){0};
}

void bpe_scratch_forget(struct bpe_scratch *s)
{
    memset(s->cache, 0, BPE_CACHE_SLOTS * sizeof *s->cache);
}

static status no_room(const struct id_sink *sink)
{
    return err(ERR_FULL, "the text has more than %zu tokens", sink->room);
}

static status put_ids(struct id_sink *sink, const uint32_t *ids, size_t n)
{
    if (n > sink->room - sink->n)
        return no_room(sink);
    for (size_t i = 0; i < n; i++)
        sink->ids[sink->n++] = ids[i];
    return OK;
}

/* One symbol per byte that has a token. */
static size_t symbols_of(const struct tokens *v, struct text_view piece, uint32_t *ids)
{
    size_t n = 0;
    for (size_t i = 0; i < piece.len; i++) {
        uint32_t id = v->byte_ids[(unsigned char)piece.p[i]];
        if (id != TOKEN_NONE)
            ids[n++] = id;
    }
    return n;
}

/* Merges up to SHORT_MAX symbols in place; returns how many are left. */
static size_t merge_short(const struct bpe *b, uint32_t *ids, size_t n)
{
    uint32_t ranks[SHORT_MAX]; /* of (i, i + 1); the last is NO_RANK */
    for (size_t i = 0; i + 1 < n; i++)
        ranks[i] = rank_of(b, ids[i], ids[i + 1]);
    while (n > 1) {
        size_t best = 0;
        for (size_t i = 1; i + 1 < n; i++)
            best = ranks[i] < ranks[best] ? i : best;
        if (ranks[best] == (uint32_t)NO_RANK)
            break;
        ids[best] = b->results[ranks[best]];
        n--;
        for (size_t i = best + 1; i < n; i++) {
            ids[i] = ids[i + 1];
            ranks[i - 1] = ranks[i];
        }
        if (best + 1 < n)
            ranks[best] = rank_of(b, ids[best], ids[best + 1]);
        if (best > 0)
            ranks[best - 1] = rank_of(b, ids[best - 1], ids[best]);
    }
    return n;
}

static void heap_push(uint64_t *heap, size_t *n, uint64_t x)
{
    size_t at = (*n)++;
    for (; at > 0 && heap[(at - 1) / 2] > x; at = (at - 1) / 2)
        heap[at] = heap[(at - 1) / 2];
    heap[at] = x;
}

static uint64_t heap_pop(uint64_t *heap, size_t *n)
{
    uint64_t top = heap[0], x = heap[--*n];
    size_t at = 0;
    for (size_t child; (child = 2 * at + 1) < *n; at = child) {
        if (child + 1 < *n && heap[child + 1] < heap[child])
            child++;
        if (heap[child] >= x)
            break;
        heap[at] = heap[child];
    }
    heap[at] = x;
    return top;
}

/* Ranks the pair that begins at `at`, and queues it: (rank, position), so ties go left. */
static void rank_pair(const struct bpe *b, struct bpe_symbol *sym, int32_t at, uint64_t *heap,
                      size_t *n_heap)
{
    if (at < 0)
        return;
    struct bpe_symbol *s = &sym[at];
    s->rank = s->next < 0 ? (uint32_t)NO_RANK : rank_of(b, s->id, sym[s->next].id);
    if (s->rank != (uint32_t)NO_RANK)
        heap_push(heap, n_heap, (uint64_t)s->rank << 32 | (uint32_t)at);
}

/* Merges n symbols. A queued pair is stale when its symbol has another rank by now: a symbol only
 * grows, so the same rank is the same pair. Each merge takes one entry and adds two at most, so the
 * heap never holds 2n. */
static void merge_long(const struct bpe *b, struct bpe_symbol *sym, size_t n, uint64_t *heap)
{
    size_t n_heap = 0;
    for (size_t i = 0; i < n; i++) {
        sym[i].prev = (int32_t)i - 1;
        sym[i].next = i + 1 < n ? (int32_t)i + 1 : -1;
    }
    for (size_t i = 0; i < n; i++)
        rank_pair(b, sym, (int32_t)i, heap, &n_heap);
    while (n_heap > 0) {
        uint64_t top = heap_pop(heap, &n_heap);
        int32_t at = (int32_t)(uint32_t)top;
        struct bpe_symbol *left = &sym[at];
        if (left->rank != top >> 32)
            continue;
        struct bpe_symbol *right = &sym[left->next];
        left->id = b->results[left->rank];
        left->next = right->next;
        right->rank = (uint32_t)NO_RANK;
        if (left->next >= 0)
            sym[left->next].prev = at;
        rank_pair(b, sym, at, heap, &n_heap);
        rank_pair(b, sym, left->prev, heap, &n_heap);
    }
}

static status encode_long(const struct bpe *b, const struct tokens *v, struct bpe_scratch *s,
                          struct text_view piece, struct id_sink *sink)
{
    struct bpe_symbol *sym = s->symbols;
    uint64_t *heap = s->heap;
    status st = OK;
    bool borrow = piece.len > KEEP_MAX;
    if (borrow) {
        sym = piece.len > INT32_MAX ? NULL : mem_try_alloc(piece.len * sizeof *sym);
        heap = sym == NULL ? NULL : mem_try_alloc(2 * piece.len * sizeof *heap);
        if (heap == NULL) {
            st = err(ERR_MEMORY, "no memory to merge a piece of %zu bytes", piece.len);
            goto out;
        }
    }
    size_t n = 0;
    for (size_t i = 0; i < piece.len; i++) {
        uint32_t id = v->byte_ids[(unsigned char)piece.p[i]];
        if (id != TOKEN_NONE)
            sym[n++].id = id;
    }
    merge_long(b, sym, n, heap);
    for (int32_t i = n == 0 ? -1 : 0; i >= 0 && st == OK; i = sym[i].next)
        st = put_ids(sink, &sym[i].id, 1);
out:
    if (borrow) {
        mem_free(sym);
        mem_free(heap);
    }
    return st;
}

static status encode_short(const struct bpe *b, const struct tokens *v, struct bpe_piece *slot,
                           struct text_view piece, struct id_sink *sink)
{
    uint32_t ids[SHORT_MAX];
    size_t n = merge_short(b, ids, symbols_of(v, piece, ids));
    if (piece.len <= PIECE_BYTES && n <= PIECE_IDS) {
        slot->len = (uint8_t)piece.len;
        slot->n = (uint8_t)n;
        memcpy(slot->bytes, piece.p, piece.len);
        memcpy(slot->ids, ids, n * sizeof *ids);
    }
    return put_ids(sink, ids, n);
}

status bpe_encode(const struct bpe *b, const struct tokens *v, struct bpe_scratch *s,
                  struct text_view piece, struct id_sink *sink)
{
    uint64_t hash = tokens_hash(piece.p, piece.len);
    struct bpe_piece *slot = &s->cache[hash % BPE_CACHE_SLOTS];
    if (slot->len == piece.len && !memcmp(slot->bytes, piece.p, piece.len))
        return put_ids(sink, slot->ids, slot->n);
    if (b->ignore_merges) {
        uint32_t id = tokens_find(v, piece);
        if (id != TOKEN_NONE)
            return put_ids(sink, &id, 1);
    }
    if (piece.len > SHORT_MAX)
        return encode_long(b, v, s, piece, sink);
    return encode_short(b, v, slot, piece, sink);
}
