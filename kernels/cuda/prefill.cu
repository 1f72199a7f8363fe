/* Attention of a prompt's chunk: K and V of its lanes side by side, then cuDNN's kernel over them.
 *
 * cuDNN could find pages by itself, but takes a kernel of less than half the speed then (H200, 32 heads of
 * 128, 8192 to 65536 positions: 248 to 277 TFLOP/s with pages of 8, 16 or 32, against 571 to 631). One
 * pass over HBM that lays pages side by side costs about a hundredth of a chunk of 8192 rows; it also
 * frees cuDNN from caring for page size, lane class, and blocks in DRAM, which are read in place.
 *
 * Plans come from a thread (prefill_plan.cu): one for rows anywhere, and for a chunk where chunks usually are an
 * exact one, which is faster (cudnn.h) and whose last bits may differ.
 *
 * cuDNN reads and writes bf16. Between append and the product behind attention nobody else reads q and the result
 * (append_args.to_attend): then append leaves q here as bf16 and the product takes the result from here; else both
 * are converted.
 *
 * Keys and values that do not fit into SCRATCH_BYTES (beyond 262,144 positions of 8 heads of 128), or for which there
 * was no memory, go by some KV heads at a time; what fits in no way is our own kernel's. Nobody else's rows suffer. */
#include "kernels/cuda/prefill.h"

#include "kernels/cuda/attend.h"
#include "kernels/cuda/fp8.h"
#include "kernels/cuda/prefill_plan.h"

#include <algorithm>
#include <stdio.h>
#include <string.h>

namespace
{

enum {
    /* Fewer: our own kernel. With 256 rows it is as fast; with 512 it takes 1.7 times as long, but its bits do
     * not depend on how a prompt is cut, and tests/cuda/attend.c cuts up to 517. */
    LEAST_ROWS = 520,
    FIRST_POSITIONS = 1 << 14, /* room for so many at first */
    SCRATCH_BYTES = 1 << 30,
    MAX_KV_HEADS = 64,
    PATIENT_ROWS = 2048,
    MORE_ROWS = 512, /* of a plan than asked for, at most */
    COPY_THREADS = 256,
    AT_ONCE = 8,     /* 16-byte loads of a lane in flight */
    PATIENCE_S = 10, /* for a plan, which takes a second at most */
};

} /* namespace */

struct cuda_prefill {
    struct prefill_plans *plans; /* NULL: nobody asked yet, or there is no thread for it */
    bool asked;
    struct prefill_progress at; /* as a step finds it: one step has one answer */
    uint64_t looked;            /* 1 + that step */
    uint32_t least_rows;
    void *q, *o, *kv, *lse, *workspace; /* scratch */
    size_t q_bytes, o_bytes, kv_bytes, lse_bytes, workspace_bytes;
    /* There was no memory: for so many bytes of kv, for so many rows of a call, for q and results of all rows. Not
     * asked for again; what is less goes on. */
    size_t too_much;
    uint32_t too_many;
    bool never_passes;
    bool was_refused; /* somebody has our own kernel for it */
    /* 1 + the last step in which our own kernel served what this is for, without plan or memory; how many did. */
    uint64_t slow, n_slow;
    /* The append that left q here, by batch row. */
    const void *qkv;
    uint32_t layer;
    uint64_t step; /* 1 + its step; 0: none */
    struct prefill_passed passed;
    const void *passed_as; /* out of the attend */
    bool told_ready, told_missing, told_passes;
    const char *told_trouble;
    char news[256];
};

namespace
{

/* ---- kernels ---- */

/* What is new in every step; the parts that cuDNN reads are aligned as it wants. */
struct lengths {
    int32_t n_rows, pad1[3], n_positions, pad2[3];
    uint32_t first_row, zero_to; /* zero_to: positions that do not exist are zeros up to here */
    uint32_t pad3[2];
};

/* As a command. */
struct prefill_call {
    const struct lengths *lengths;
    const block_id *tables[LANE_CLASSES];
    const struct cuda_lane *lanes; /* [kv_heads] of the layer */
    const uint8_t *hbm[LANE_CLASSES], *dram[LANE_CLASSES];
    size_t block_bytes[LANE_CLASSES], page_bytes;
    uint32_t page_shift, dim, group;
    uint32_t heads;                /* of a row of q and out */
    uint32_t kv_heads;             /* those that are not STREAM: ... */
    uint8_t kv_head[MAX_KV_HEADS]; /* ... these; q, o, k and v have them alone */
    uint32_t heads_at_once;        /* KV heads */
    uint32_t rows;                 /* of the plan */
    uint32_t pages;                /* bucket of those to lay side by side */
    size_t q_stride;               /* of the activations' rows */
    const float *qkv;
    float *out, *lse;
    __nv_bfloat16 *q, *o, *k, *v;
    float *stats;
    struct cudnn *cudnn;
    struct cudnn_plan *plan;
    void *workspace;
    float scale;
    bool fp8;
    bool passes; /* q is there as bf16, and the result stays so */
};

/* Where number i of a packed row lies in a row of activations. */
__device__ static inline uint32_t number_at(const struct prefill_call &c, uint32_t i)
{
    uint32_t width = c.group * c.dim, head = i / width;
    return c.kv_head[head] * width + i % width;
}

/* A block per row: its queries as bf16, rows without gaps. Bound by HBM: 6 bytes per number. Op: attend. */
__global__ void pack_kernel(const __grid_constant__ struct prefill_call c)
{
    if (blockIdx.x >= (uint32_t)c.lengths->n_rows)
        return;
    const uint32_t n = c.kv_heads * c.group * c.dim;
    const float *from = c.qkv + (c.lengths->first_row + blockIdx.x) * c.q_stride;
    __nv_bfloat16 *to = c.q + (size_t)blockIdx.x * n;
    for (uint32_t i = threadIdx.x * 4; i < n; i += COPY_THREADS * 4) {
        float4 v = *(const float4 *)(from + number_at(c, i));
        __nv_bfloat162 half[2] = {__floats2bfloat162_rn(v.x, v.y), __floats2bfloat162_rn(v.z, v.w)};
        *(uint2 *)(to + i) = *(const uint2 *)half;
    }
}

/* And back. */
__global__ void unpack_kernel(const __grid_constant__ struct prefill_call c)
{
    if (blockIdx.x >= (uint32_t)c.lengths->n_rows)
        return;
    const uint32_t n = c.kv_heads * c.group * c.dim, t = threadIdx.x;
    const size_t row = c.lengths->first_row + blockIdx.x;
    const __nv_bfloat16 *from = c.o + (size_t)blockIdx.x * n;
    float *to = c.out + row * c.heads * c.dim;
    for (uint32_t i = t * 4; i < n; i += COPY_THREADS * 4) {
        uint2 raw = *(const uint2 *)(from + i);
        float2 a = __bfloat1622float2(*(const __nv_bfloat162 *)&raw.x);
        float2 b = __bfloat1622float2(*(const __nv_bfloat162 *)&raw.y);
        *(float4 *)(to + number_at(c, i)) = make_float4(a.x, a.y, b.x, b.y);
    }
    if (c.lse != NULL && t < c.kv_heads * c.group)
        c.lse[row * c.heads + c.kv_head[t / c.group] * c.group + t % c.group] =
            c.stats[(size_t)t * c.rows + blockIdx.x];
}

/* A warp per page, K and V of one KV head, number first_head + blockIdx.y of ours. Positions that do not exist become
 * zeros up to the end of what cuDNN reads: 0 times what lies there must be 0. Bound by HBM: 2 bytes in (FP8: 1) and
 * 2 out per number. Op: attend. */
template <bool FP8>
__global__ void side_by_side_kernel(const __grid_constant__ struct prefill_call c,
                                    uint32_t first_head)
{
    const uint32_t page = blockIdx.x * (COPY_THREADS / 32) + threadIdx.x / 32;
    const uint32_t rows = 1u << c.page_shift, n = (uint32_t)c.lengths->n_positions;
    const uint32_t first = page << c.page_shift, row_chunks = c.dim / 8;
    if (first >= c.lengths->zero_to)
        return;
    struct cuda_lane lane = c.lanes[c.kv_head[first_head + blockIdx.y]];
    const uint8_t *from = NULL;
    if (first < n) {
        block_id id = c.tables[lane.class_][page];
        const uint8_t *base = id & BLOCK_IN_DRAM ? c.dram[lane.class_] : c.hbm[lane.class_];
        from = base + (size_t)(id & ~BLOCK_IN_DRAM) * c.block_bytes[lane.class_] +
               lane.index * c.page_bytes;
    }
    const uint32_t half = rows * row_chunks; /* chunks of 8 numbers of K */
    for (uint32_t at = threadIdx.x % 32; at < 2 * half; at += 32 * AT_ONCE) {
        uint4 v[AT_ONCE];
#pragma unroll
        for (uint32_t u = 0; u < AT_ONCE; u++) {
            uint32_t i = at + 32 * u, row = (i < half ? i : i - half) / row_chunks;
            v[u] = make_uint4(0, 0, 0, 0);
            if (i < 2 * half && first + row < n)
                v[u] = FP8 ? fp8_widen8(((const uint2 *)from)[i]) : ((const uint4 *)from)[i];
        }
#pragma unroll
        for (uint32_t u = 0; u < AT_ONCE; u++) {
            uint32_t i = at + 32 * u, of = i < half ? i : i - half, row = of / row_chunks;
            __nv_bfloat16 *to = (i < half ? c.k : c.v) +
                                ((size_t)(first + row) * c.heads_at_once + blockIdx.y) * c.dim;
            if (i < 2 * half)
                *(uint4 *)(to + of % row_chunks * 8) = v[u];
        }
    }
}

void run_prefill(struct cuda_backend *b, const void *params)
{
    const struct prefill_call *c = (const struct prefill_call *)params;
    const uint32_t group = c->group, warps = COPY_THREADS / 32;
    if (!c->passes)
        pack_kernel<<<c->rows, COPY_THREADS, 0, b->stream>>>(*c);
    for (uint32_t h = 0; h < c->kv_heads; h += c->heads_at_once) {
        const dim3 grid((c->pages + warps - 1) / warps, c->heads_at_once);
        if (c->fp8)
            side_by_side_kernel<true><<<grid, COPY_THREADS, 0, b->stream>>>(*c, h);
        else
            side_by_side_kernel<false><<<grid, COPY_THREADS, 0, b->stream>>>(*c, h);
        struct cudnn_data d = {};
        d.q = c->q + (size_t)h * group * c->dim;
        d.k = c->k;
        d.v = c->v;
        d.o = c->o + (size_t)h * group * c->dim;
        d.lse = c->stats + (size_t)h * group * c->rows;
        d.n_rows = &c->lengths->n_rows;
        d.n_positions = &c->lengths->n_positions;
        d.workspace = c->workspace;
        d.scale = c->scale;
        const char *wrong = cudnn_run(c->cudnn, c->plan, &d, b->stream);
        if (wrong != NULL)
            (void)cuda_ok(b, cudaErrorUnknown, wrong);
    }
    if (!c->passes)
        unpack_kernel<<<c->rows, COPY_THREADS, 0, b->stream>>>(*c);
    (void)cuda_launched(b, "attend (prefill)");
}

/* ---- plans ---- */

/* KV heads of the layer that are not STREAM; list: NULL, or room for MAX_KV_HEADS. */
uint32_t our_heads(const struct attend_args *a, uint8_t *list)
{
    uint32_t n = 0;
    for (uint32_t h = 0; h < a->kv->geo->kv_heads; h++)
        if (kv_lane(a->kv->geo, a->layer, h).class_ != LANE_STREAM) {
            if (list != NULL)
                list[n] = (uint8_t)h;
            n++;
        }
    return n;
}

/* Keys and values of so many heads, and a tile of zeros. */
size_t kv_bytes(uint32_t room, uint32_t heads, uint32_t dim)
{
    return ((size_t)room + PLAN_TILE_ROWS) * heads * dim * 4;
}

/* How many of n KV heads have their keys and values in scratch at a time: a divisor of n. 0: not even one
 * fits. */
uint32_t heads_at_once(const struct cuda_prefill *f, uint32_t dim, uint32_t n, uint32_t room)
{
    for (uint32_t m = n; m > 0; m--)
        if (n % m == 0 && (size_t)room * m * dim * 4 <= SCRATCH_BYTES &&
            kv_bytes(room, m, dim) < f->too_much)
            return m;
    return 0;
}

/* Positions that scratch must hold for n: a power of two, and a tile of zeros. */
uint32_t room_for(uint32_t n)
{
    uint32_t room = FIRST_POSITIONS;
    while (room < n)
        room *= 2;
    return room;
}

struct plan_key key_for(const struct cuda_prefill *f, const struct attend_args *a, uint32_t n_rows,
                        uint32_t n_positions)
{
    const struct kv_geometry *g = a->kv->geo;
    struct plan_key k;
    memset(&k, 0, sizeof k);
    uint32_t n = our_heads(a, NULL), group = a->heads / g->kv_heads;
    k.kv_heads = heads_at_once(f, g->head_dim, n, room_for(n_positions));
    k.heads = k.kv_heads * group;
    k.dim = g->head_dim;
    k.rows = prefill_plan_rows(n_rows);
    k.all_heads = n * group;
    k.first = PLAN_ANYWHERE;
    return k;
}

struct cudnn_plan *get_plan(struct cuda_prefill *f, const struct plan_key *k)
{
    return prefill_plans_get(f->plans, k, f->at.n_made, PATIENCE_S);
}

/* The plan for rows from `first` on: an exact one if there is one. Where a prompt's whole chunks end its last one
 * begins, and prompts of that length may come again: then one is wished for. All layers of a step have the same, for
 * an exact one's last bits may differ. *k becomes its key. */
struct cudnn_plan *plan_for(struct cuda_prefill *f, struct plan_key *k, uint32_t first)
{
    struct plan_key exact = *k;
    exact.first = first;
    if (first % PLAN_MOST_ROWS == 0 && k->heads == k->all_heads) {
        bool wish = first > 0 && k->rows >= PLAN_MOST_ROWS / 8;
        struct cudnn_plan *p = prefill_plans_find(f->plans, &exact, f->at.n_made, wish);
        if (p != NULL) {
            *k = exact;
            return p;
        }
    }
    return get_plan(f, k);
}

void begin_opening(struct cuda_backend *b, const struct attend_args *a)
{
    struct cuda_prefill *f = b->prefill;
    const struct plan_key like = key_for(f, a, PLAN_MOST_ROWS, FIRST_POSITIONS);
    f->asked = true;
    f->plans = prefill_plans_create(b->device, &like);
    if (f->plans == NULL)
        f->at.why = "no thread";
}

/* As cuda_reserve, but to have no memory is no error: there is another way, and what was there before is there again,
 * since rows of this step may be promised that it suffices for. */
bool reserve(struct cuda_backend *b, void **p, size_t *have, size_t need)
{
    const size_t had = *have;
    if (need <= had)
        return true;
    if (*p != NULL) {
        cuda_flush(b);
        if (!cuda_ended(b, NULL, "waiting to grow scratch"))
            return false;
        cudaFree(*p);
        *p = NULL;
        *have = 0;
    }
    if (cudaMalloc(p, need) == cudaSuccess) {
        *have = need;
        return true;
    }
    (void)cudaGetLastError();
    *p = NULL;
    if (had > 0 && cuda_ok(b, cudaMalloc(p, had), "attention of a prompt"))
        *have = had;
    return false;
}

/* Scratch for rows of the key up to n_positions. False: there is no memory for so much. */
bool reserve_all(struct cuda_backend *b, const struct attend_args *a, const struct plan_key *k,
                 uint32_t n_positions)
{
    struct cuda_prefill *f = b->prefill;
    const size_t row = (size_t)a->heads * k->dim * sizeof(__nv_bfloat16);
    const size_t kv = kv_bytes(room_for(n_positions), k->kv_heads, k->dim);
    if (!reserve(b, &f->q, &f->q_bytes, k->rows * row) ||
        !reserve(b, &f->o, &f->o_bytes, k->rows * row) ||
        !reserve(b, &f->lse, &f->lse_bytes, (size_t)a->heads * k->rows * sizeof(float)) ||
        !reserve(b, &f->workspace, &f->workspace_bytes, PLAN_WORKSPACE_BYTES)) {
        f->too_many = k->rows;
        return false;
    }
    if (!reserve(b, &f->kv, &f->kv_bytes, kv)) {
        f->too_much = kv;
        return false;
    }
    return true;
}

/* Once a step. */
void look(struct cuda_backend *b)
{
    struct cuda_prefill *f = b->prefill;
    if (f->plans != NULL && f->looked != b->n_steps + 1)
        prefill_plans_look(f->plans, &f->at);
    f->looked = b->n_steps + 1;
}

/* While plans are still made ahead nobody waits for one, but for much to attend: our own kernel serves. */
bool has_plan(struct cuda_prefill *f, const struct plan_key *k)
{
    if (f->at.ready || (f->at.n_made > 0 && k->rows >= PATIENT_ROWS))
        return get_plan(f, k) != NULL;
    return prefill_plans_find(f->plans, k, f->at.n_made, true) != NULL;
}

/* The rows of a piece of a sequence, behind which are n_positions, have a plan and scratch. */
bool takes_piece(struct cuda_backend *b, const struct attend_args *a, uint32_t n_rows,
                 uint32_t n_positions)
{
    struct cuda_prefill *f = b->prefill;
    do { /* with fewer heads at a time, where memory was short */
        const struct plan_key k = key_for(f, a, n_rows, n_positions);
        if (k.kv_heads == 0 || k.rows >= f->too_many) {
            f->was_refused = true;
            return false;
        }
        if (!has_plan(f, &k))
            return false;
        if (reserve_all(b, a, &k, n_positions))
            return true;
    } while (b->error == OK);
    return false;
}

/* Notes that our own kernel serves what this is for. */
bool is_slow(struct cuda_backend *b)
{
    struct cuda_prefill *f = b->prefill;
    f->n_slow += f->slow != b->n_steps + 1;
    f->slow = b->n_steps + 1;
    return false;
}

bool is_our_shape(const struct attend_args *a, const struct batch_seq *q)
{
    const struct kv_geometry *g = a->kv->geo;
    return !q->planned && (g->head_dim == 64 || g->head_dim == 128) && a->heads <= COPY_THREADS &&
           g->kv_heads <= MAX_KV_HEADS && our_heads(a, NULL) > 0 &&
           q->first_pos + q->n_rows <= PLAN_POSITIONS;
}

/* Whether append has left q of this layer here. */
bool passes(const struct cuda_backend *b, const struct attend_args *a)
{
    const struct cuda_prefill *f = b->prefill;
    return f->step == b->n_steps + 1 && f->qkv == a->qkv && f->layer == a->layer;
}

/* Rows whose result is here now: in the order of the batch, so that what cuDNN writes beyond a sequence's last row
 * is the next one's, or nobody's. */
void add_passed(struct cuda_prefill *f, uint32_t first, uint32_t n)
{
    struct prefill_passed *p = &f->passed;
    if (p->n > 0 && p->first[p->n - 1] + p->rows[p->n - 1] == first) {
        p->rows[p->n - 1] += n;
        return;
    }
    CHECK(p->n < PREFILL_STRETCHES);
    p->first[p->n] = first;
    p->rows[p->n++] = n;
}

/* Rows [at, at + n) of a sequence. */
void queue_rows(struct cuda_backend *b, const struct attend_args *a, const struct batch_seq *q,
                uint32_t at, uint32_t n)
{
    struct cuda_prefill *f = b->prefill;
    const struct kv_geometry *g = a->kv->geo;
    uint32_t end = q->first_pos + at + n, rows = g->block_rows;
    struct plan_key k = key_for(f, a, n, end);
    struct prefill_call c;
    memset(&c, 0, sizeof c);
    c.plan = plan_for(f, &k, q->first_pos + at);
    struct lengths lengths = {};
    lengths.n_rows = (int32_t)n;
    lengths.n_positions = (int32_t)end;
    lengths.first_row = q->first_row + at;
    lengths.zero_to = k.first != PLAN_ANYWHERE
                          ? k.first + k.rows
                          : (end + PLAN_TILE_ROWS) / PLAN_TILE_ROWS * PLAN_TILE_ROWS;
    c.lengths = (const struct lengths *)cuda_stage(b, &lengths, sizeof lengths);
    const struct cuda_lane *lanes = cuda_lanes(b, g);
    if (c.lengths == NULL || lanes == NULL)
        return;
    c.lanes = lanes + (size_t)a->layer * g->kv_heads;
    for (int i = 0; i < LANE_CLASSES; i++) {
        if (i != LANE_STREAM && g->n_lanes[i] > 0)
            c.tables[i] = cuda_table(b, q->blocks[i], (q->first_pos + q->n_rows + rows - 1) / rows);
        c.hbm[i] = (const uint8_t *)a->kv->hbm[i];
        c.dram[i] = (const uint8_t *)a->kv->dram[i];
        c.block_bytes[i] = g->block_bytes[i];
    }
    c.page_bytes = g->page_bytes;
    c.page_shift = (uint32_t)__builtin_ctz(rows);
    c.fp8 = g->type == KV_E4M3;
    c.dim = g->head_dim;
    c.group = a->heads / g->kv_heads;
    c.heads = a->heads;
    c.kv_heads = our_heads(a, c.kv_head);
    c.heads_at_once = k.kv_heads;
    c.rows = k.rows;
    c.pages = (uint32_t)cuda_bucket((lengths.zero_to + rows - 1) / rows);
    c.q_stride = (size_t)(a->heads + 2 * g->kv_heads) * g->head_dim;
    c.qkv = (const float *)a->qkv;
    c.out = (float *)a->out;
    c.lse = a->lse;
    c.passes = passes(b, a);
    const size_t before = c.passes ? (size_t)lengths.first_row * k.all_heads * k.dim : 0;
    c.q = (__nv_bfloat16 *)f->q + before;
    c.o = (__nv_bfloat16 *)f->o + before;
    c.k = (__nv_bfloat16 *)f->kv;
    c.v = c.k + ((size_t)room_for(end) + PLAN_TILE_ROWS) * k.kv_heads * k.dim;
    c.stats = (float *)f->lse;
    c.cudnn = f->at.cudnn;
    c.workspace = f->workspace;
    c.scale = a->scale;
    cuda_do(b, run_prefill, &c, sizeof c);
}

} /* namespace */

/* ---- the promises of prefill.h ---- */

/* Our own kernel reads all keys and values again for every CUDA_MANY queries: not over PCIe. */
static uint32_t least_rows(const struct cuda_prefill *f, const struct attend_args *a,
                           const struct batch_seq *q)
{
    uint32_t once = CUDA_MANY / (a->heads / a->kv->geo->kv_heads) + 1;
    return q->spilled && once < f->least_rows && f->least_rows != ~0u ? once : f->least_rows;
}

bool cuda_prefill_takes(struct cuda_backend *b, const struct attend_args *a,
                        const struct batch_seq *q)
{
    struct cuda_prefill *f = b->prefill;
    const uint32_t least = least_rows(f, a, q);
    if ((q->n_rows < least && f->asked) || !is_our_shape(a, q))
        return false;
    if (!f->asked)
        begin_opening(b, a);
    if (q->n_rows < least)
        return false;
    look(b);
    if (f->at.cudnn == NULL)
        return is_slow(b);
    for (uint32_t at = 0; at < q->n_rows; at += PLAN_MOST_ROWS) {
        uint32_t n = std::min(q->n_rows - at, (uint32_t)PLAN_MOST_ROWS);
        if (!takes_piece(b, a, n, q->first_pos + at + n))
            return is_slow(b);
    }
    return true;
}

__nv_bfloat16 *cuda_prefill_accept(struct cuda_backend *b, const struct append_args *a)
{
    struct cuda_prefill *f = b->prefill;
    struct attend_args like = {};
    like.kv = a->kv;
    like.layer = a->layer;
    like.heads = a->heads;
    uint32_t n_rows = 0;
    bool any = false;
    f->step = 0;
    f->passed.n = 0;
    if (f->never_passes || !a->to_attend || our_heads(&like, NULL) != a->kv->geo->kv_heads)
        return NULL;
    for (uint32_t i = 0; i < a->n_seqs; i++) {
        n_rows = std::max(n_rows, a->seqs[i].first_row + a->seqs[i].n_rows);
        any = (a->seqs[i].n_rows > 0 && cuda_prefill_takes(b, &like, &a->seqs[i])) || any;
    }
    size_t bytes = (n_rows + (size_t)MORE_ROWS) * a->heads * a->kv->geo->head_dim * 2;
    if (!any)
        return NULL;
    f->never_passes =
        !reserve(b, &f->q, &f->q_bytes, bytes) || !reserve(b, &f->o, &f->o_bytes, bytes);
    if (f->never_passes) /* for all layers and steps: scratch of the rows of a call may still fit */
        return NULL;
    f->step = b->n_steps + 1;
    f->qkv = a->qkv;
    f->layer = a->layer;
    return (__nv_bfloat16 *)f->q;
}

const struct prefill_passed *cuda_prefill_passed(const struct cuda_backend *b, const void *out)
{
    const struct cuda_prefill *f = b->prefill;
    return f->step == b->n_steps + 1 && f->passed.n > 0 && f->passed_as == out ? &f->passed : NULL;
}

void cuda_prefill(struct cuda_backend *b, const struct attend_args *a, const struct batch_seq *q)
{
    struct cuda_prefill *f = b->prefill;
    for (uint32_t at = 0; at < q->n_rows; at += PLAN_MOST_ROWS)
        queue_rows(b, a, q, at, std::min(q->n_rows - at, (uint32_t)PLAN_MOST_ROWS));
    if (!passes(b, a))
        return;
    CHECK(a->lse == NULL);
    f->passed.o = (__nv_bfloat16 *)f->o;
    f->passed_as = a->out;
    add_passed(f, q->first_row, q->n_rows);
}

/* What is new and bad, into f->news. */
static bool bad_news(struct cuda_prefill *f)
{
    const char *missing = f->at.why != NULL ? f->at.why
                          : f->was_refused  ? "no memory for keys and values side by side: lower "
                                              "--gpu-memory-utilization or --kv-hbm"
                                            : NULL;
    if (!f->told_missing && missing != NULL) {
        f->told_missing = true;
        snprintf(f->news, sizeof f->news,
                 "attention of prompts goes without cuDNN, at half speed: %s", missing);
        return true;
    }
    if (f->told_trouble != f->at.trouble) {
        f->told_trouble = f->at.trouble;
        if (f->at.trouble == NULL) /* it is over */
            return false;
        snprintf(f->news, sizeof f->news,
                 "attention of some prompts goes without cuDNN, at half speed: %s", f->at.trouble);
        return true;
    }
    if (!f->told_passes && f->never_passes) {
        f->told_passes = true;
        snprintf(f->news, sizeof f->news,
                 "attention of prompts converts what it reads and writes, a few %% slower: no "
                 "memory for a batch of it as bf16");
        return true;
    }
    return false;
}

const char *cuda_prefill_news(struct cuda_backend *b, bool *bad)
{
    struct cuda_prefill *f = b->prefill;
    look(b);
    if ((*bad = bad_news(f)))
        return f->news;
    if (f->told_ready || !f->at.ready)
        return NULL;
    f->told_ready = true;
    snprintf(f->news, sizeof f->news,
             "%u plans for attention of prompts were made in %.1f s, behind the start",
             f->at.n_ahead, f->at.seconds);
    return f->news;
}

uint64_t cuda_prefill_slow(const struct cuda_backend *b)
{
    return b->prefill->n_slow;
}

void cuda_prefill_least(struct cuda_backend *b, uint32_t rows)
{
    b->prefill->least_rows = rows;
}

status cuda_prefill_open(struct cuda_backend *b)
{
    b->prefill = (struct cuda_prefill *)mem_alloc(sizeof *b->prefill);
    b->prefill->least_rows = LEAST_ROWS;
    b->prefill->too_much = SIZE_MAX;
    b->prefill->too_many = UINT32_MAX;
    return OK;
}

void cuda_prefill_close(struct cuda_backend *b)
{
    struct cuda_prefill *f = b->prefill;
    if (f == NULL)
        return;
    prefill_plans_destroy(f->plans);
    void *scratch[] = {f->q, f->o, f->kv, f->lse, f->workspace};
    for (size_t i = 0; i < ARRAY_LEN(scratch); i++)
        cudaFree(scratch[i]);
    mem_free(f);
    b->prefill = NULL;
}
