/* Attention of a prompt's chunk: K and V of its lanes side by side, then cuDNN's kernel over them.
 *
 * cuDNN could find pages by itself, but takes a kernel of less than half the speed then (H200, 32 heads of
 * 128, 8192 to 65536 positions: 248 to 277 TFLOP/s with pages of 8, 16 or 32, against 571 to 631). One
 * pass over HBM that lays pages side by side costs about a hundredth of a chunk of 8192 rows; it also
 * frees cuDNN from caring for page size, lane class, and blocks in DRAM, which are read in place.
 *
 * A plan of cuDNN's serves any number of positions, but computes all the rows it was made for: so there is
 * one for each number of rows, rounded up by a sixteenth at most. The first takes a second (the library
 * loads its parts and compiles the kernel), later ones 0.04 s. A thread makes the first while the caller
 * does something else; only the engine thread asks, and it joins the thread before it touches what
 * the thread made.
 *
 * Keys and values that do not fit into SCRATCH_BYTES (beyond 262,144 positions of 8 heads of 128) go by
 * some KV heads at a time. */
#include "kernels/cuda/prefill.h"

#include "kernels/cuda/cudnn.h"

#include <algorithm>
#include <pthread.h>
#include <string.h>

namespace
{

enum {
    /* Fewer: our own kernel. With 256 rows it is as fast; with 512 it takes 1.7 times as long, but its bits do
     * not depend on how a prompt is cut, and tests/cuda/attend.c cuts up to 517. */
    LEAST_ROWS = 520,
    MOST_ROWS = 8192, /* of one call of cuDNN */
    TILE_ROWS = 128,  /* of its kernel */
    MAX_POSITIONS = 1 << 20,
    FIRST_POSITIONS = 1 << 14, /* room for so many at first */
    SCRATCH_BYTES = 1 << 30,
    MAX_PLANS = 128,
    MAX_KV_HEADS = 64,
    WORKSPACE_BYTES = 1 << 20,
    COPY_THREADS = 256,
    AT_ONCE = 8, /* 16-byte loads of a lane in flight */
};

/* What a plan is made for, beside what is the same for all: head_dim and the strides that follow. */
struct plan_key {
    uint32_t heads, kv_heads, dim, rows;
    uint32_t all_heads; /* of q's rows */
};

struct plan_entry {
    struct plan_key key;
    struct cudnn_plan *plan; /* NULL: cuDNN has none */
};

enum opening { NOT_YET, RUNNING, OPEN, NOWHERE };

} /* namespace */

struct cuda_prefill {
    enum opening state;
    pthread_t thread;
    int device;
    struct plan_key first; /* for the thread to begin with */
    struct cudnn *cudnn;
    struct plan_entry plans[MAX_PLANS];
    uint32_t n_plans, least_rows;
    void *q, *o, *kv, *lse, *workspace; /* scratch */
    size_t q_bytes, o_bytes, kv_bytes, lse_bytes, workspace_bytes;
    bool no_memory;    /* there was none for scratch: never again */
    uint64_t promised; /* 1 + the last step in which it took rows */
};

namespace
{

/* ---- kernels ---- */

/* What is new in every step; the parts that cuDNN reads are aligned as it wants. */
struct lengths {
    int32_t n_rows, pad1[3], n_positions, pad2[3];
    uint32_t first_row, pad3[3];
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
    struct cudnn_plan *plan;
    void *workspace;
    float scale;
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
 * zeros up to the end of cuDNN's last tile: 0 times what lies there must be 0. Bound by HBM: 2 bytes in and
 * 2 out per number. Op: attend. */
__global__ void side_by_side_kernel(const __grid_constant__ struct prefill_call c,
                                    uint32_t first_head)
{
    const uint32_t page = blockIdx.x * (COPY_THREADS / 32) + threadIdx.x / 32;
    const uint32_t rows = 1u << c.page_shift, n = (uint32_t)c.lengths->n_positions;
    const uint32_t first = page << c.page_shift, row_chunks = c.dim / 8;
    if (first >= (n + TILE_ROWS) / TILE_ROWS * TILE_ROWS)
        return;
    struct cuda_lane lane = c.lanes[c.kv_head[first_head + blockIdx.y]];
    const uint4 *from = NULL;
    if (first < n) {
        block_id id = c.tables[lane.class_][page];
        const uint8_t *base = id & BLOCK_IN_DRAM ? c.dram[lane.class_] : c.hbm[lane.class_];
        from = (const uint4 *)(base + (size_t)(id & ~BLOCK_IN_DRAM) * c.block_bytes[lane.class_] +
                               lane.index * c.page_bytes);
    }
    const uint32_t half = rows * row_chunks; /* 16-byte chunks of K */
    for (uint32_t at = threadIdx.x % 32; at < 2 * half; at += 32 * AT_ONCE) {
        uint4 v[AT_ONCE];
#pragma unroll
        for (uint32_t u = 0; u < AT_ONCE; u++) {
            uint32_t i = at + 32 * u, row = (i < half ? i : i - half) / row_chunks;
            v[u] = make_uint4(0, 0, 0, 0);
            if (i < 2 * half && first + row < n)
                v[u] = from[i];
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
    pack_kernel<<<c->rows, COPY_THREADS, 0, b->stream>>>(*c);
    for (uint32_t h = 0; h < c->kv_heads; h += c->heads_at_once) {
        side_by_side_kernel<<<dim3((c->pages + warps - 1) / warps, c->heads_at_once), COPY_THREADS,
                              0, b->stream>>>(*c, h);
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
        const char *wrong = cudnn_run(c->plan, &d, b->stream);
        if (wrong != NULL)
            (void)cuda_ok(b, cudaErrorUnknown, wrong);
    }
    unpack_kernel<<<c->rows, COPY_THREADS, 0, b->stream>>>(*c);
    (void)cuda_launched(b, "attend (prefill)");
}

/* ---- plans ---- */

struct cudnn_plan *make_plan(struct cudnn *cudnn, const struct plan_key *k)
{
    struct cudnn_shape s = {};
    s.batch = 1;
    s.heads = k->heads;
    s.kv_heads = k->kv_heads;
    s.dim = k->dim;
    s.rows = k->rows;
    s.positions = MAX_POSITIONS;
    s.q_row = (size_t)k->all_heads * k->dim;
    s.q_head = k->dim;
    s.q_batch = s.q_row * k->rows;
    s.kv_row = (size_t)k->kv_heads * k->dim;
    s.kv_head = k->dim;
    s.kv_batch = s.kv_row * s.positions;
    struct cudnn_plan *p = cudnn_plan_create(cudnn, &s);
    if (p == NULL || cudnn_workspace(p) <= WORKSPACE_BYTES)
        return p;
    cudnn_plan_destroy(p);
    return NULL;
}

/* The thread: opens the library and makes one plan, since the first takes longest. */
void *open_library(void *arg)
{
    struct cuda_prefill *f = (struct cuda_prefill *)arg;
    const char *why;
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    (void)cudaSetDevice(f->device);
    (void)cudaThreadExchangeStreamCaptureMode(&mode); /* the engine thread may be capturing */
    if ((f->cudnn = cudnn_open(&why)) == NULL)
        return NULL;
    f->plans[0].key = f->first;
    f->plans[0].plan = make_plan(f->cudnn, &f->first);
    f->n_plans = 1;
    return NULL;
}

void wait_for_library(struct cuda_prefill *f)
{
    if (f->state != RUNNING)
        return;
    pthread_join(f->thread, NULL);
    f->state = f->cudnn != NULL ? OPEN : NOWHERE;
}

/* NULL: cuDNN does not take it. */
struct cudnn_plan *find_plan(struct cuda_prefill *f, const struct plan_key *k)
{
    for (uint32_t i = 0; i < f->n_plans; i++)
        if (memcmp(&f->plans[i].key, k, sizeof *k) == 0)
            return f->plans[i].plan;
    if (f->n_plans == MAX_PLANS)
        return NULL;
    struct plan_entry *e = &f->plans[f->n_plans++];
    e->key = *k;
    e->plan = make_plan(f->cudnn, k);
    return e->plan;
}

/* At most a sixteenth more, in tiles of cuDNN's kernel. */
uint32_t bucket_of_rows(uint32_t n)
{
    uint32_t unit = TILE_ROWS;
    while (n > 16 * unit)
        unit *= 2;
    return (n + unit - 1) / unit * unit;
}

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

/* How many of n KV heads have their keys and values in scratch at a time: a divisor of n. 0: not even one
 * fits. */
uint32_t heads_at_once(const struct kv_geometry *g, uint32_t n, uint32_t room)
{
    size_t head = (size_t)room * g->head_dim * 4;
    for (uint32_t m = n; m > 0; m--)
        if (n % m == 0 && m * head <= SCRATCH_BYTES)
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

struct plan_key key_for(const struct attend_args *a, uint32_t n_rows, uint32_t n_positions)
{
    const struct kv_geometry *g = a->kv->geo;
    struct plan_key k;
    memset(&k, 0, sizeof k);
    uint32_t n = our_heads(a, NULL), group = a->heads / g->kv_heads;
    k.kv_heads = heads_at_once(g, n, room_for(n_positions));
    k.heads = k.kv_heads * group;
    k.dim = g->head_dim;
    k.rows = bucket_of_rows(n_rows);
    k.all_heads = n * group;
    return k;
}

void begin_opening(struct cuda_backend *b, const struct attend_args *a)
{
    struct cuda_prefill *f = b->prefill;
    f->first = key_for(a, MOST_ROWS, FIRST_POSITIONS);
    f->device = b->device;
    bool started = pthread_create(&f->thread, NULL, open_library, f) == 0;
    f->state = started ? RUNNING : NOWHERE;
}

/* As cuda_reserve, but to have no memory is no error: there is another way. */
bool reserve(struct cuda_backend *b, void **p, size_t *have, size_t need)
{
    if (need <= *have)
        return true;
    if (*p != NULL) {
        cuda_flush(b);
        if (!cuda_ok(b, cudaStreamSynchronize(b->stream), "waiting to grow scratch"))
            return false;
        cudaFree(*p);
        *p = NULL;
        *have = 0;
    }
    if (cudaMalloc(p, need) != cudaSuccess) {
        (void)cudaGetLastError();
        *p = NULL;
        return false;
    }
    *have = need;
    return true;
}

bool reserve_all(struct cuda_backend *b, const struct attend_args *a, const struct plan_key *k,
                 uint32_t n_positions)
{
    struct cuda_prefill *f = b->prefill;
    size_t row = (size_t)a->heads * k->dim * sizeof(__nv_bfloat16);
    size_t kv = ((size_t)room_for(n_positions) + TILE_ROWS) * k->kv_heads * k->dim * 4;
    bool good = reserve(b, &f->q, &f->q_bytes, k->rows * row) &&
                reserve(b, &f->o, &f->o_bytes, k->rows * row) &&
                reserve(b, &f->kv, &f->kv_bytes, kv) &&
                reserve(b, &f->lse, &f->lse_bytes, (size_t)a->heads * k->rows * sizeof(float)) &&
                reserve(b, &f->workspace, &f->workspace_bytes, WORKSPACE_BYTES);
    f->no_memory = !good;
    if (!good &&
        f->promised == b->n_steps + 1) /* rows of this step are in nobody else's list: it fails */
        (void)cuda_ok(b, cudaErrorMemoryAllocation, "attention of a prompt");
    return good;
}

bool is_our_shape(const struct attend_args *a, const struct batch_seq *q)
{
    const struct kv_geometry *g = a->kv->geo;
    return !q->planned && (g->head_dim == 64 || g->head_dim == 128) && a->heads <= COPY_THREADS &&
           g->kv_heads <= MAX_KV_HEADS && our_heads(a, NULL) > 0 &&
           q->first_pos + q->n_rows <= MAX_POSITIONS;
}

/* Rows [at, at + n) of a sequence. */
void queue_rows(struct cuda_backend *b, const struct attend_args *a, const struct batch_seq *q,
                uint32_t at, uint32_t n)
{
    struct cuda_prefill *f = b->prefill;
    const struct kv_geometry *g = a->kv->geo;
    uint32_t end = q->first_pos + at + n, rows = g->block_rows;
    struct plan_key k = key_for(a, n, end);
    struct lengths lengths = {};
    lengths.n_rows = (int32_t)n;
    lengths.n_positions = (int32_t)end;
    lengths.first_row = q->first_row + at;
    struct prefill_call c;
    memset(&c, 0, sizeof c);
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
    c.dim = g->head_dim;
    c.group = a->heads / g->kv_heads;
    c.heads = a->heads;
    c.kv_heads = our_heads(a, c.kv_head);
    c.heads_at_once = k.kv_heads;
    c.rows = k.rows;
    c.pages = (uint32_t)cuda_bucket((end + TILE_ROWS + rows - 1) / rows);
    c.q_stride = (size_t)(a->heads + 2 * g->kv_heads) * g->head_dim;
    c.qkv = (const float *)a->qkv;
    c.out = (float *)a->out;
    c.lse = a->lse;
    c.q = (__nv_bfloat16 *)f->q;
    c.o = (__nv_bfloat16 *)f->o;
    c.k = (__nv_bfloat16 *)f->kv;
    c.v = c.k + ((size_t)room_for(end) + TILE_ROWS) * k.kv_heads * k.dim;
    c.stats = (float *)f->lse;
    c.plan = find_plan(f, &k);
    c.workspace = f->workspace;
    c.scale = a->scale;
    cuda_do(b, run_prefill, &c, sizeof c);
}

} /* namespace */

/* ---- the promises of prefill.h ---- */

bool cuda_prefill_takes(struct cuda_backend *b, const struct attend_args *a,
                        const struct batch_seq *q)
{
    struct cuda_prefill *f = b->prefill;
    if ((q->n_rows < f->least_rows && f->state != NOT_YET) || f->no_memory || !is_our_shape(a, q))
        return false;
    if (f->state == NOT_YET)
        begin_opening(b, a);
    if (q->n_rows < f->least_rows)
        return false;
    wait_for_library(f);
    if (f->state != OPEN)
        return false;
    for (uint32_t at = 0; at < q->n_rows; at += MOST_ROWS) {
        uint32_t n = std::min(q->n_rows - at, (uint32_t)MOST_ROWS), end = q->first_pos + at + n;
        struct plan_key k = key_for(a, n, end);
        if (k.kv_heads == 0 || find_plan(f, &k) == NULL || !reserve_all(b, a, &k, end))
            return false;
    }
    f->promised = b->n_steps + 1;
    return true;
}

void cuda_prefill(struct cuda_backend *b, const struct attend_args *a, const struct batch_seq *q)
{
    for (uint32_t at = 0; at < q->n_rows; at += MOST_ROWS)
        queue_rows(b, a, q, at, std::min(q->n_rows - at, (uint32_t)MOST_ROWS));
}

void cuda_prefill_least(struct cuda_backend *b, uint32_t rows)
{
    b->prefill->least_rows = rows;
}

status cuda_prefill_open(struct cuda_backend *b)
{
    b->prefill = (struct cuda_prefill *)mem_alloc(sizeof *b->prefill);
    b->prefill->least_rows = LEAST_ROWS;
    return OK;
}

void cuda_prefill_close(struct cuda_backend *b)
{
    struct cuda_prefill *f = b->prefill;
    if (f == NULL)
        return;
    wait_for_library(f);
    for (uint32_t i = 0; i < f->n_plans; i++)
        cudnn_plan_destroy(f->plans[i].plan);
    cudnn_close(f->cudnn);
    void *scratch[] = {f->q, f->o, f->kv, f->lse, f->workspace};
    for (size_t i = 0; i < ARRAY_LEN(scratch); i++)
        cudaFree(scratch[i]);
    mem_free(f);
    b->prefill = NULL;
}
