/* Linear layers of at most 8 rows with large weights: decode's time is the time to stream the weights once.
 *
 * Tensor cores do the sums (m16n8k16): 16 rows of W, a tile, on the M side, the input rows on the N side. A
 * block's 16 warps share a tile's inputs, a slice each (or, of many inputs, more tiles and fewer slices), and
 * add their sums up in shared memory. A block stays, and takes tile after tile from a counter.
 *
 * Weights come through a ring in shared memory, in whole lines of 128 bytes (64 bytes of a row at a time: 7 %
 * slower). Steps of 32 KiB: two or three of them keep memory busy, and more changed nothing; nor did tensor
 * copies in the place of cp.async. The first step goes out before the wait for the operation in front
 * (programmatic dependent launch), the others behind the loads of what that one wrote, which would have to queue
 * behind them: with 128 KiB in front of them inputs came 3 us later. A block takes more than half of the shared
 * memory, so that blocks that come early do not crowd where there is room.
 *
 * A block stages the inputs that it multiplies of all input rows, as bf16. Where these are many, blocks share
 * the inputs, a part each: sums go to memory, and the block that comes last adds them up. No clusters: on an H200
 * those of 4 and 8 leave 12 multiprocessors idle, and blocks wait for each other in every turn (gate and
 * up, 4 rows: 71 us instead of 63). Whatever the parts, sums are added in the same order, of 4
 * slices, and these in pairs: a row's bits depend on the row and the weight alone.
 *
 * RMSNorm: x * gain is staged, 1 / rms multiplies the result, and the sum of squares is a by-product. */
#include "kernels/cuda/linear.h"

#include <algorithm>
#include <string.h>

enum {
    ROWS = NARROW_ROWS,
    WARPS = 16,
    THREADS = 32 * WARPS,
    SLICES = WARPS,
    QUARTER = SLICES / 4,
    STEP = 64,       /* inputs of a step: 128 bytes of each of a tile's 16 rows */
    STEP_VECS = 128, /* its size in uint4 */
    DEEP = 3,        /* steps of a ring, where there is room; ... */
    SHALLOW = 2,     /* ... where there is not */
    EARLY = 1,       /* steps that are loaded before inputs */
    CHUNK = 128,     /* inputs that a warp stages at a time: 16 bytes a lane */
    ROW_PAD = 4,     /* lanes that store an accumulator hit different banks */
    TURNS = 4,       /* of which the groups are remembered */
    MAX_PARTS = 4,
    MAX_GROUPS = 1 << 16, /* where inputs are shared */
    MAX_SHARED = 227 << 10,
    /* Of a weight: this kernel takes longer to start than skinny.cu's, which reads a head at the memory's speed. */
    LEAST_BYTES = 8 << 20,
    MOST_ROWS = 1 << 16,
    PARTS_ROWS = 8192 /* few turns: the end of a turn is longer with parts */
};

struct narrow_args {
    const __nv_bfloat16 *w;
    const float *in, *gain; /* gain: NULL: no norm */
    float *out;
    const uint32_t *rows; /* of in; NULL: 0 and on */
    float *sums;          /* [groups][parts][n][rows of a group (twice for pair), sum of squares] */
    uint32_t *tickets, *arrived;    /* [MAX_PARTS]; [groups]; 0 between launches */
    uint32_t n, cols, pitch, steps; /* steps: the pitch in STEPs */
    uint32_t out_rows, groups;  /* out_rows: numbers of a row of out; groups: of 16 rows per part */
    uint32_t parts_log2, early; /* early: steps that are loaded before inputs */
    float eps;
    bool pair, add; /* pair: W is gate over up, out_rows each */
};

/* Shared memory before the ring and the staged inputs. */
struct alignas(16) partials {
    /* Of gate and up; or of this turn and the one before. */
    float sum[2][WARPS][ROWS][16 + ROW_PAD];
    float squares[SLICES][ROWS]; /* by slice of the block */
    uint32_t group[TURNS];       /* of a turn; groups and more: none */
    bool last;                   /* of the parts of a group to arrive */
};

/* bytes: 16, or 0 for zeros. */
__device__ static inline void copy16(uint4 *to, const __nv_bfloat16 *from, uint32_t bytes)
{
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(
                     (uint32_t)__cvta_generic_to_shared(to)),
                 "l"(from), "r"(bytes)
                 : "memory");
}

__device__ static inline void end_step(void)
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Of this warp's steps all but the last N are there. */
template <int N> __device__ static inline void wait_step(void)
{
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
    __syncwarp();
}

/* First step of a slice. */
__host__ __device__ static inline uint32_t slice_start(uint32_t steps, uint32_t slice)
{
    return (uint32_t)((uint64_t)steps * slice / SLICES);
}

__host__ __device__ static inline uint32_t slice_longest(uint32_t steps)
{
    return (steps + SLICES - 1) / SLICES;
}

/* Inputs between staged rows: room for the longest slice, and half a step, so that the two rows that a
 * quarter of a warp reads lie in different banks. */
__host__ __device__ static inline uint32_t staged_pitch(uint32_t steps)
{
    return slice_longest(steps) * STEP + STEP / 2;
}

__host__ __device__ static inline uint32_t slice_chunks(uint32_t steps)
{
    return (slice_longest(steps) * STEP + CHUNK - 1) / CHUNK;
}

/* Where this thread works. */
struct place {
    uint32_t warp, lane;
    uint32_t part, first, blocks; /* first: group of turn 0; blocks: of this part */
    uint32_t mine, slice, tile;   /* slice of the block, of all; tile of the group */
    uint32_t slices;              /* of the block */
};

__device__ static inline struct place find_place(const struct narrow_args &a)
{
    struct place at;
    at.warp = threadIdx.x / 32;
    at.lane = threadIdx.x % 32;
    at.part = blockIdx.x & ((1u << a.parts_log2) - 1);
    at.first = blockIdx.x >> a.parts_log2;
    at.blocks = gridDim.x >> a.parts_log2;
    at.slices = SLICES >> a.parts_log2;
    at.mine = at.warp & (at.slices - 1);
    at.slice = at.part * at.slices + at.mine;
    at.tile = at.warp / at.slices;
    return at;
}

/* A group that nobody has yet. The counter is 0 again when every block of the part was told once that there is
 * none. */
__device__ static inline uint32_t take_group(const struct narrow_args &a, const struct place &at)
{
    return at.blocks + atomicInc(a.tickets + at.part, a.groups - 1);
}

/* ---- loads ---- */

/* A warp's loads: a ring of DEPTH steps. A step that may not be loaded yet (inputs come first; the next group
 * is not known) is made up for by catch_up. */
struct feed {
    const __nv_bfloat16 *w[4]; /* this lane's 16 bytes of rows r, r + 4, r + 8, r + 12 at input 0 */
    uint32_t turn, known;      /* known: turns whose groups are */
    uint32_t k, left;          /* this lane's input; steps left of this tile */
    bool up, done;             /* up: the second tile of a pair */
    uint4 *ring;               /* [DEPTH][STEP_VECS] */
    uint32_t slot;             /* to read next */
    uint32_t behind;           /* steps to make up for */
    uint32_t put;              /* this lane's place in a step, in uint4 */
};

__device__ static inline void find_tile(const struct narrow_args &a, const struct place &at,
                                        struct feed &f, uint32_t group)
{
    uint32_t begin = slice_start(a.steps, at.slice);
    uint32_t row = (((group << a.parts_log2) + at.tile) << 4) + at.lane / 8;
    size_t from = f.up ? a.out_rows : 0;
#pragma unroll
    for (int i = 0; i < 4; i++)
        f.w[i] = a.w + (from + min(row + 4 * i, a.out_rows - 1)) * a.pitch;
    f.k = begin * STEP + at.lane % 8 * 8;
    f.left = slice_start(a.steps, at.slice + 1) - begin;
}

/* To the next tile; false: it is not known. */
__device__ static inline bool next_tile(const struct narrow_args &a, const struct place &at,
                                        struct feed &f, const uint32_t *groups)
{
    bool up = a.pair && !f.up;
    uint32_t turn = f.turn + !up;
    if (turn >= f.known)
        return false;
    f.up = up;
    f.turn = turn;
    uint32_t group = turn == 0 ? at.first : groups[turn % TURNS];
    f.done = group >= a.groups;
    if (!f.done)
        find_tile(a, at, f, group);
    return true;
}

/* One step; false: not now. Odd rows have their halves swapped, so that lanes that read two rows hit different
 * banks. */
__device__ static inline bool load_step(const struct narrow_args &a, const struct place &at,
                                        struct feed &f, const uint32_t *groups, uint32_t slot)
{
    if (f.left == 0 && !f.done && !next_tile(a, at, f, groups))
        return false;
    if (!f.done) {
        uint4 *to = f.ring + slot * STEP_VECS + f.put;
        uint32_t bytes = f.k < a.pitch ? 16 : 0;
#pragma unroll
        for (int i = 0; i < 4; i++)
            copy16(to + 32 * i, f.w[i] + f.k, bytes);
        f.k += STEP;
        f.left--;
    }
    end_step();
    return true;
}

template <int DEPTH>
__device__ static inline void catch_up(const struct narrow_args &a, const struct place &at,
                                       struct feed &f, const uint32_t *groups)
{
    for (; f.behind > 0; f.behind--) {
        uint32_t slot = f.slot + DEPTH - f.behind;
        if (!load_step(a, at, f, groups, slot >= DEPTH ? slot - DEPTH : slot))
            return;
    }
}

/* Behind the reading of a step. */
template <int DEPTH>
__device__ static inline void refill(const struct narrow_args &a, const struct place &at,
                                     struct feed &f, const uint32_t *groups)
{
    __syncwarp();
    uint32_t slot = f.slot;
    f.slot = slot + 1 == DEPTH ? 0 : slot + 1;
    if (f.behind == 0 && load_step(a, at, f, groups, slot))
        return;
    f.behind++;
    end_step();
}

/* ---- inputs ---- */

/* Four inputs from k on; zeros behind the end. */
__device__ static inline float4 load4(const float *x, uint32_t k, uint32_t cols)
{
    if (cols % 4 == 0)
        return k < cols ? __ldcg((const float4 *)(x + k)) : make_float4(0, 0, 0, 0);
    return make_float4(k < cols ? __ldcg(x + k) : 0, k + 1 < cols ? __ldcg(x + k + 1) : 0,
                       k + 2 < cols ? __ldcg(x + k + 2) : 0, k + 3 < cols ? __ldcg(x + k + 3) : 0);
}

/* A piece of a slice: CHUNK inputs of one input row. The warps of a slice take turns. */
struct spot {
    uint32_t row, chunk;
};

__device__ static inline void move_on(struct spot &s, uint32_t by, uint32_t n)
{
    for (s.row += by; s.row >= n; s.row -= n)
        s.chunk++;
}

/* The slices of this block of all input rows. pieces: scratch, [slices][chunks][n]. Ends before the barrier. */
template <int DEPTH>
__device__ static void stage(const struct narrow_args &a, const struct place &at,
                             struct partials *s, __nv_bfloat16 *x, float *pieces, struct feed &f)
{
    enum { AT_ONCE = 6 };
    uint32_t chunks = slice_chunks(a.steps), stride = staged_pitch(a.steps);
    uint32_t begin = slice_start(a.steps, at.slice) * STEP;
    uint32_t size = slice_start(a.steps, at.slice + 1) * STEP - begin, by = 1u << a.parts_log2;
    struct spot next = {0, 0};
    move_on(next, at.tile, a.n);
    while (next.chunk < chunks) {
        struct spot now = next;
        float4 v[AT_ONCE], g[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            uint32_t k = next.chunk * CHUNK + at.lane * 4;
            v[i] = g[i] = make_float4(0, 0, 0, 0);
            if (next.chunk < chunks && k < size) {
                uint32_t row = a.rows != NULL ? a.rows[next.row] : next.row;
                v[i] = load4(a.in + (size_t)row * a.cols, begin + k, a.cols);
                if (a.gain != NULL)
                    g[i] = load4(a.gain, begin + k, a.cols);
            }
            move_on(next, by, a.n);
        }
        catch_up<DEPTH>(a, at, f, s->group);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            uint32_t k = now.chunk * CHUNK + at.lane * 4;
            if (a.gain != NULL) {
                float sum = v[i].x * v[i].x + v[i].y * v[i].y + v[i].z * v[i].z + v[i].w * v[i].w;
                for (int d = 16; d > 0; d /= 2)
                    sum += __shfl_xor_sync(0xffffffffu, sum, d);
                if (at.lane == 0 && now.chunk < chunks)
                    pieces[(at.mine * chunks + now.chunk) * a.n + now.row] = sum;
                v[i] =
                    make_float4(v[i].x * g[i].x, v[i].y * g[i].y, v[i].z * g[i].z, v[i].w * g[i].w);
            }
            __nv_bfloat162 half[2] = {__floats2bfloat162_rn(v[i].x, v[i].y),
                                      __floats2bfloat162_rn(v[i].z, v[i].w)};
            if (now.chunk < chunks && k < size)
                *(uint2 *)(x + (at.mine * a.n + now.row) * stride + k) = *(const uint2 *)half;
            move_on(now, by, a.n);
        }
    }
    catch_up<DEPTH>(a, at, f, s->group);
}

/* Behind a barrier behind stage: what finish reads behind another. */
__device__ static void add_squares(const struct narrow_args &a, const struct place &at,
                                   struct partials *s, const float *pieces)
{
    uint32_t row = threadIdx.x % (ROWS), slice = threadIdx.x / (ROWS);
    if (a.gain == NULL || row >= a.n || slice >= at.slices)
        return;
    uint32_t chunks = slice_chunks(a.steps);
    float sum = 0;
    for (uint32_t i = 0; i < chunks; i++)
        sum += pieces[(slice * chunks + i) * a.n + row];
    s->squares[slice][row] = sum;
}

/* ---- sums ---- */

/* One tile; x: this lane's 16 bytes of input row g at the slice's first step. */
template <int DEPTH>
__device__ static inline void run_tile(const struct narrow_args &a, const struct place &at,
                                       struct feed &f, const uint32_t *groups,
                                       const __nv_bfloat16 *x, float (*sum)[16 + ROW_PAD])
{
    float c[4] = {};
    uint32_t g = at.lane / 4, t = at.lane % 4, get = g * 8 + (t ^ (g & 1) * 4);
    uint32_t steps = slice_start(a.steps, at.slice + 1) - slice_start(a.steps, at.slice);
    for (uint32_t i = 0; i < steps; i++, x += STEP) {
        const uint4 *here = f.ring + f.slot * STEP_VECS;
        wait_step<DEPTH - 1>();
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint4 lo = here[get ^ half * 4], hi = here[64 + (get ^ half * 4)];
            uint4 b = make_uint4(0, 0, 0, 0);
            if (g < a.n)
                b = *(const uint4 *)(x + half * (STEP / 2));
            mma(c, lo.x, hi.x, lo.y, hi.y, b.x, b.y);
            mma(c, lo.z, hi.z, lo.w, hi.w, b.z, b.w);
        }
        refill<DEPTH>(a, at, f, groups);
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
        sum[2 * t + i % 2][g + i / 2 * 8] = c[i];
}

/* v[0] + v[stride] + .. of the block's slices: of each QUARTER in order, and these in pairs. */
__device__ static inline float add_slices(const float *v, uint32_t stride, uint32_t slices)
{
    float sum[4];
#pragma unroll
    for (int q = 0; q < 4; q++) {
        sum[q] = 0;
#pragma unroll
        for (int i = 0; i < QUARTER; i++)
            if (q * QUARTER < slices)
                sum[q] += v[(q * QUARTER + i) * stride];
    }
    return slices == SLICES   ? (sum[0] + sum[1]) + (sum[2] + sum[3])
           : slices > QUARTER ? sum[0] + sum[1]
                              : sum[0];
}

/* The same of all parts' sums. */
__device__ static inline float add_parts(const float *v, size_t stride, uint32_t parts_log2)
{
    if (parts_log2 == 1)
        return __ldcg(v) + __ldcg(v + stride);
    return (__ldcg(v) + __ldcg(v + stride)) + (__ldcg(v + 2 * stride) + __ldcg(v + 3 * stride));
}

__device__ static inline void put_result(const struct narrow_args &a, uint32_t row, uint32_t r,
                                         float v, float up, float squares)
{
    float scale = a.gain != NULL ? rsqrtf(squares / (float)a.cols + a.eps) : 1.0f;
    float *to = a.out + (size_t)row * a.out_rows + r;
    v *= scale;
    if (a.pair)
        v = v / (1 + expf(-v)) * (up * scale);
    *to = a.add ? *to + v : v;
}

/* The block's sums of a group: results, or for the part that comes last. */
__device__ static void finish(const struct narrow_args &a, const struct place &at,
                              struct partials *s, uint32_t turn, uint32_t group)
{
    enum { OF_WARP = ROWS * (16 + ROW_PAD) };
    uint32_t rows_log2 = 4 + a.parts_log2, mask = (1u << rows_log2) - 1;
    uint32_t first = group << rows_log2, n = a.n << rows_log2;
    size_t wide = (size_t)(1 + a.pair << rows_log2) + 1, part = a.n * wide;
    float *sums = a.parts_log2 > 0 ? a.sums + (group << a.parts_log2) * part : NULL;
    for (uint32_t e = threadIdx.x; e < n; e += THREADS) {
        uint32_t row = e >> rows_log2, r = e & mask, tile = r / 16 * at.slices;
        const float *of = &s->sum[turn][tile][row][r % 16];
        float v = add_slices(of, OF_WARP, at.slices), up = 0, squares = 0;
        if (a.pair)
            up = add_slices(of + WARPS * OF_WARP, OF_WARP, at.slices);
        if (a.gain != NULL)
            squares = add_slices(&s->squares[0][row], ROWS, at.slices);
        if (a.parts_log2 == 0) {
            if (first + r < a.out_rows)
                put_result(a, row, first + r, v, up, squares);
            continue;
        }
        float *to = sums + at.part * part + row * wide;
        __stcg(to + r, v);
        if (a.pair)
            __stcg(to + mask + 1 + r, up);
        if (r == 0)
            __stcg(to + wide - 1, squares);
    }
    if (a.parts_log2 == 0)
        return;
    __threadfence();
    __syncthreads();
    uint32_t others = (1u << a.parts_log2) - 1;
    if (threadIdx.x == 0)
        s->last = atomicInc(a.arrived + group, others) == others;
    __syncthreads();
    if (!s->last)
        return;
    __threadfence();
    for (uint32_t e = threadIdx.x; e < n; e += THREADS) {
        uint32_t row = e >> rows_log2, r = e & mask;
        const float *from = sums + row * wide;
        if (first + r < a.out_rows)
            put_result(a, row, first + r, add_parts(from + r, part, a.parts_log2),
                       a.pair ? add_parts(from + mask + 1 + r, part, a.parts_log2) : 0,
                       add_parts(from + wide - 1, part, a.parts_log2));
    }
}

/* The operation before has ended; the one behind may start, and wait in its turn. */
__device__ static inline void wait_for_inputs(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

/* See the top. Bound by HBM: reads W once. Ops: linear, all modes. */
template <int DEPTH>
__global__ static void __launch_bounds__(THREADS, 1)
    narrow_kernel(const __grid_constant__ struct narrow_args a)
{
    extern __shared__ uint4 shared[];
    struct partials *s = (struct partials *)shared;
    struct place at = find_place(a);
    uint4 *rings = (uint4 *)(s + 1);
    float *pieces = (float *)(rings + WARPS * DEPTH * STEP_VECS);
    uint32_t n_pieces = (slice_chunks(a.steps) * a.n * at.slices + 3) & ~3u;
    __nv_bfloat16 *x = (__nv_bfloat16 *)(pieces + n_pieces);

    struct feed f = {};
    f.ring = rings + at.warp * DEPTH * STEP_VECS;
    f.put = at.lane / 8 * 8 + (at.lane % 8 ^ (at.lane / 8 & 1) * 4);
    f.known = 1;
    find_tile(a, at, f, at.first);
    f.done = f.left == 0; /* a slice of nothing */
    for (uint32_t i = 0; i < DEPTH; i++)
        if (i >= a.early || !load_step(a, at, f, s->group, i)) {
            f.behind++;
            end_step();
        }
    wait_for_inputs();
    uint32_t ticket = threadIdx.x == 0 ? take_group(a, at) : 0;
    stage<DEPTH>(a, at, s, x, pieces, f);
    if (threadIdx.x == 0)
        s->group[1] = ticket;
    __syncthreads();
    add_squares(a, at, s, pieces);

    uint32_t stride = staged_pitch(a.steps);
    const __nv_bfloat16 *mine =
        x + (size_t)(at.mine * a.n + at.lane / 4) * stride + at.lane % 4 * 8;
    for (uint32_t turn = 0, group = at.first; group < a.groups; turn++) {
        f.known = turn + 2;
        catch_up<DEPTH>(a, at, f, s->group);
        if (threadIdx.x == 0 && ticket < a.groups)
            ticket = take_group(a, at);
        uint32_t half = a.pair ? 0 : turn & 1;
        run_tile<DEPTH>(a, at, f, s->group, mine, s->sum[half][at.warp]);
        if (a.pair)
            run_tile<DEPTH>(a, at, f, s->group, mine, s->sum[1][at.warp]);
        if (threadIdx.x == 0)
            s->group[(turn + 2) % TURNS] = ticket;
        __syncthreads(); /* sums are there, and those of the turn before have been read */
        finish(a, at, s, half, group);
        if (a.pair)
            __syncthreads();
        group = s->group[(turn + 1) % TURNS];
    }
}

/* ---- host ---- */

/* As a command. */
struct narrow_call {
    struct narrow_args args;
    size_t shared; /* without the ring */
};

static uint32_t steps_of(const struct weight *w)
{
    return (w->pitch + STEP - 1) / STEP;
}

static size_t shared_bytes(uint32_t n, uint32_t steps, uint32_t parts_log2)
{
    size_t rows = (size_t)n * (SLICES >> parts_log2);
    size_t pieces = (rows * slice_chunks(steps) + 3) / 4 * 16;
    return sizeof(struct partials) + pieces + rows * staged_pitch(steps) * sizeof(__nv_bfloat16);
}

static size_t ring_bytes(uint32_t depth)
{
    return (size_t)WARPS * depth * STEP_VECS * sizeof(uint4);
}

/* More than that of MAX_PARTS: too much for a block. From measurements of 1, 2 and 4 parts. */
static uint32_t parts_log2_for(const struct linear_args *a)
{
    uint32_t steps = steps_of(a->w), n = a->n_rows;
    bool few = a->mode != LINEAR_SWIGLU && a->w->rows <= PARTS_ROWS;
    uint32_t log2 = few && n * steps >= 448 ? 2 : 0;
    while (1 << log2 <= MAX_PARTS &&
           shared_bytes(n, steps, log2) + ring_bytes(SHALLOW) > MAX_SHARED)
        log2++;
    return log2;
}

template <int DEPTH> static bool launch(struct cuda_backend *b, const struct narrow_call *call)
{
    const struct narrow_args *a = &call->args;
    cudaLaunchAttribute attr = {};
    attr.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attr.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t c = {};
    c.gridDim = dim3(std::min(a->groups, (uint32_t)b->sms >> a->parts_log2) << a->parts_log2);
    c.blockDim = dim3(THREADS);
    c.dynamicSmemBytes =
        std::max(call->shared + ring_bytes(DEPTH), (size_t)(MAX_SHARED / 2 + 1024));
    c.stream = b->stream;
    c.attrs = &attr;
    c.numAttrs = 1;
    return cuda_ok(b, cudaLaunchKernelEx(&c, narrow_kernel<DEPTH>, *a), "linear: narrow");
}

static void run_narrow(struct cuda_backend *b, const void *params)
{
    const struct narrow_call *call = (const struct narrow_call *)params;
    if (call->shared + ring_bytes(DEEP) <= MAX_SHARED)
        (void)launch<DEEP>(b, call);
    else
        (void)launch<SHALLOW>(b, call);
}

template <int DEPTH> static bool allow_shared(struct cuda_backend *b)
{
    return cuda_ok(b,
                   cudaFuncSetAttribute(narrow_kernel<DEPTH>,
                                        cudaFuncAttributeMaxDynamicSharedMemorySize, MAX_SHARED),
                   "linear: shared memory");
}

status cuda_narrow_open(struct cuda_backend *b)
{
    struct cuda_linear *l = b->linear;
    const size_t bytes = (MAX_PARTS + MAX_GROUPS) * sizeof(uint32_t);
    size_t have = 0;
    if (b->linear->clusters[1] == 0) /* before sm_90 */
        return OK;
    bool good = cuda_reserve(b, (void **)&l->counters, &have, bytes) &&
                cuda_ok(b, cudaMemset(l->counters, 0, bytes), "linear: counters") &&
                allow_shared<DEEP>(b) && allow_shared<SHALLOW>(b);
    return good ? OK : err(ERR_DEVICE, "%s", b->text);
}

/* Not by the number of rows, as long as they are few enough: bits must not depend on it. */
bool cuda_narrow_takes(const struct cuda_backend *b, const struct linear_args *a)
{
    struct linear_args most = *a;
    most.n_rows = ROWS;
    return b->linear->counters != NULL && a->n_rows <= ROWS && a->w->bytes >= LEAST_BYTES &&
           a->w->rows <= MOST_ROWS && a->w->pitch % STEP == 0 && steps_of(a->w) >= SLICES &&
           1 << parts_log2_for(&most) <= MAX_PARTS;
}

void cuda_narrow_run(struct cuda_backend *b, const struct linear_args *a, const uint32_t *rows)
{
    struct cuda_linear *l = b->linear;
    struct narrow_call c;
    memset(&c, 0, sizeof c);
    struct narrow_args *s = &c.args;
    s->w = a->w->values;
    s->in = (const float *)a->in;
    s->gain = (const float *)a->norm_gain;
    s->out = (float *)a->out;
    s->rows = rows;
    s->n = a->n_rows;
    s->cols = a->w->cols;
    s->pitch = a->w->pitch;
    s->steps = steps_of(a->w);
    s->pair = a->mode == LINEAR_SWIGLU;
    s->add = a->mode == LINEAR_ADD;
    s->out_rows = s->pair ? a->w->rows / 2 : a->w->rows;
    s->parts_log2 = parts_log2_for(a);
    uint32_t group_rows = 16u << s->parts_log2;
    s->groups = (s->out_rows + group_rows - 1) / group_rows;
    s->eps = a->norm_eps;
    s->early = EARLY;
    s->tickets = l->counters;
    s->arrived = l->counters + MAX_PARTS;
    if (s->parts_log2 > 0) {
        size_t wide = ((size_t)(1 + s->pair) * group_rows + 1) << s->parts_log2;
        if (!cuda_reserve(b, &l->sums, &l->sums_bytes,
                          cuda_bucket(s->groups * s->n * wide * sizeof(float))))
            return;
        s->sums = (float *)l->sums;
    }
    c.shared = shared_bytes(s->n, s->steps, s->parts_log2);
    cuda_do(b, run_narrow, &c, sizeof c);
}
