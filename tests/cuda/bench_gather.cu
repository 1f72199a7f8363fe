/* How fast do pages come from the DRAM arena? Gathers of 1 to 4096 pages of 4 and 8 KiB, whole blocks between
 * the tiers, and a layer's resolve with hits and misses, each beside what bounds it: a PCIe bus that gives
 * copies 55.5 GB/s and loads of the SMs 51.3 on an H200. And what a step feels of the arena's pinning. */
#include "kernels/core/splitmix.h"
#include "kernels/cuda/resolve.h"
#include "kernels/cuda_api.h"
#include "tests/cuda/kbench.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unistd.h>
#include <vector>

extern "C" {
#include "cache/residency.h"
extern const struct cuda_api spind_cuda_api;
}

static const double COPY_GBS = 55.5, ONE_PAGE_US = 23;
static struct cuda_backend *b;
static struct backend *be;
static uint64_t seed = 1;

static uint32_t below(uint32_t n)
{
    return (uint32_t)((splitmix_next(&seed) >> 32) * n >> 32);
}

static void must(bool good, const char *what)
{
    if (good && b->error == OK)
        return;
    fprintf(stderr, "%s: %s %s\n", what, b != NULL ? b->text : "", err_text());
    exit(1);
}

static float elapsed_us(cudaEvent_t from, cudaEvent_t to)
{
    float ms;
    must(cudaEventSynchronize(to) == cudaSuccess &&
             cudaEventElapsedTime(&ms, from, to) == cudaSuccess,
         "events");
    return ms * 1e3f;
}

/* ---- the arena ---- */

/* Launches and waits while the arena is being pinned: what a step would feel. */
static uint8_t *make_arena(size_t bytes)
{
    uint64_t t0 = clock_us(), worst = 0, slow = 0, n = 0;
    uint8_t *p = (uint8_t *)be->ops->alloc_host(be, bytes);
    must(p != NULL, "alloc_host");
    struct host_progress h = {};
    void *scratch = be->ops->alloc(be, 4096);
    while (!h.ended) {
        uint64_t t = clock_us();
        cudaMemsetAsync(scratch, 0, 4096, b->stream);
        cudaStreamSynchronize(b->stream);
        t = clock_us() - t;
        worst = t > worst ? t : worst;
        slow += t > 1000;
        n++;
        be->ops->host_progress(be, p, &h);
    }
    double s = (double)(clock_us() - t0) / 1e6;
    printf(
        "# pinned %.1f GiB in %.2f s, %.2f s per GiB; meanwhile %llu launches, %llu of them over "
        "1 ms, "
        "the slowest %.1f ms%s%s\n",
        (double)h.ready / 1073741824.0, s, s / ((double)h.ready / 1073741824.0),
        (unsigned long long)n, (unsigned long long)slow, (double)worst / 1e3,
        h.why != NULL ? ": " : "", h.why != NULL ? h.why : "");
    be->ops->free(be, scratch, 4096);
    return p;
}

/* ---- gathers ---- */

static const char *name_of(uint32_t count, size_t page_bytes)
{
    static char text[64];
    snprintf(text, sizeof text, "%u-pages/%zuKiB", count, page_bytes / 1024);
    return text;
}

static void bench_pages(const uint8_t *dram, size_t dram_bytes, uint8_t *hbm, size_t hbm_bytes,
                        size_t page_bytes)
{
    enum { LANES = 256, MOST = 4096, REPEATS = 15 };
    static const uint32_t counts[] = {0, 1, 32, 128, 512, 4096};
    size_t block = LANES * page_bytes;
    std::vector<struct hot_fetch> jobs(MOST);
    struct hot_fetch *device = (struct hot_fetch *)be->ops->alloc(be, MOST * sizeof *device);
    uint32_t *n = (uint32_t *)be->ops->alloc(be, 256), zero[2] = {0, 0};
    cudaEvent_t from, to;
    cudaEventCreate(&from);
    cudaEventCreate(&to);
    be->ops->copy(be, n, zero, 8);
    float idle = 0;
    for (uint32_t count : counts) {
        std::vector<float> us;
        for (uint32_t r = 0; r < REPEATS; r++) {
            for (struct hot_fetch &f : jobs)
                f = {below(LANES), below((uint32_t)(dram_bytes / block)),
                     below((uint32_t)(hbm_bytes / block))};
            be->ops->copy(be, device, jobs.data(), MOST * sizeof *device);
            be->ops->copy(be, n, &count, 4);
            cudaStreamSynchronize(b->stream);
            struct gather_call c;
            memset(&c, 0, sizeof c);
            c.jobs = device;
            c.n_jobs = n;
            c.dram = dram;
            c.hbm = hbm;
            c.block_bytes = block;
            c.page_bytes = page_bytes;
            cudaEventRecord(from, b->stream);
            gather_launch(b, &c);
            cudaEventRecord(to, b->stream);
            us.push_back(elapsed_us(from, to));
        }
        for (size_t i = 1; i < us.size(); i++)
            for (size_t j = i; j > 0 && us[j] < us[j - 1]; j--)
                std::swap(us[j], us[j - 1]);
        float t = us[us.size() / 2];
        if (count == 0)
            printf("# an empty launch: %.1f us\n", idle = t);
        else if (count == 1)
            kbench_time("gather", name_of(count, page_bytes), t, ONE_PAGE_US);
        else
            kbench_bytes("gather", name_of(count, page_bytes), t - idle,
                         (double)count * (double)page_bytes, KBENCH_PCIE_GBS);
    }
    must(be->ops->sync(be) == OK, "gather");
    be->ops->free(be, device, MOST * sizeof *device);
    be->ops->free(be, n, 256);
}

/* ---- blocks between the tiers ---- */

static void bench_blocks(uint8_t *dram, size_t dram_bytes, uint8_t *hbm, size_t hbm_bytes,
                         size_t block, bool in_order)
{
    enum { BLOCKS = 256 };
    for (int up = 0; up < 2; up++) {
        cudaEvent_t from, to;
        cudaEventCreate(&from);
        cudaEventCreate(&to);
        cudaStreamSynchronize(b->stream);
        uint64_t t0 = clock_us();
        cudaEventRecord(from, b->stream);
        for (uint32_t i = 0; i < BLOCKS; i++) {
            uint8_t *x = dram + (in_order ? i : below((uint32_t)(dram_bytes / block))) * block;
            uint8_t *y = hbm + (in_order ? i : below((uint32_t)(hbm_bytes / block))) * block;
            be->ops->copy(be, up ? y : x, up ? x : y, block);
        }
        cuda_flush(b);
        cudaEventRecord(to, b->stream);
        uint64_t host = clock_us() - t0;
        float us = elapsed_us(from, to);
        char shape[64];
        snprintf(shape, sizeof shape, "%zuKiB/%s", block / 1024,
                 in_order ? "in-a-row" : "anywhere");
        kbench_bytes(up ? "restore" : "spill", shape, us / BLOCKS, (double)block, COPY_GBS);
        printf("# %.1f us of the host per block\n", (double)host / BLOCKS);
    }
}

/* ---- resolve ---- */

/* seqs sequences of 8,192 pages in 256 lanes, hot sets of 820 slots, plans of 164 pages of which `miss`
 * percent were not in the plan before. */
static void bench_resolve(uint8_t *dram, uint32_t seqs, uint32_t dim, uint32_t miss)
{
    enum {
        LAYERS = 32,
        HEADS = 8,
        R = 16,
        PAGES = 8192,
        SLOTS = 820,
        N = 164,
        STEPS = 12,
        DRAM = 256
    };
    struct kv_geometry geo = {};
    geo.block_rows = R;
    geo.layers = LAYERS;
    geo.kv_heads = HEADS;
    geo.head_dim = dim;
    geo.page_bytes = (size_t)R * dim * 4;
    geo.n_lanes[LANE_SPARSE] = LAYERS * HEADS;
    geo.block_bytes[LANE_SPARSE] = LAYERS * HEADS * geo.page_bytes;
    size_t arena = geo.block_bytes[LANE_SPARSE] * SLOTS * seqs;
    struct kv_memory kv = {};
    kv.geo = &geo;
    kv.hbm[LANE_SPARSE] = be->ops->alloc(be, arena);
    kv.dram[LANE_SPARSE] = dram;
    must(kv.hbm[LANE_SPARSE] != NULL, "slots");
    struct leaf_pool *pool;
    must(leaf_pool_create(&pool, be, LAYERS * HEADS, 1ull << 36) == OK, "pool");
    std::vector<struct hot_set *> hot(seqs);
    std::vector<struct plan_row> rows(seqs);
    std::vector<uint32_t> slots(SLOTS), pages(PAGES), table(PAGES + 8);
    for (uint32_t q = 0; q < seqs; q++) {
        for (uint32_t i = 0; i < SLOTS; i++)
            slots[i] = q * SLOTS + i;
        for (uint32_t i = 0; i < PAGES; i++)
            pages[i] = below(DRAM);
        must(hot_set_open(&hot[q], be, pool, LAYERS * HEADS, PAGES) == OK &&
                 hot_set_resize(hot[q], be, slots.data(), SLOTS) == OK &&
                 hot_set_cover(hot[q], pool, pages.data(), PAGES) == OK,
             "hot set");
        rows[q] = {};
        rows[q].row = q;
        rows[q].pos = PAGES * R;
        rows[q].blocks = table.data();
        rows[q].hot = hot[q];
    }
    size_t per_layer = (size_t)seqs * HEADS * N;
    std::vector<uint32_t> plan(per_layer * LAYERS), n(seqs * HEADS * LAYERS, N);
    std::vector<bool> taken(PAGES);
    uint32_t *d_plan = (uint32_t *)be->ops->alloc(be, plan.size() * 4);
    uint32_t *d_n = (uint32_t *)be->ops->alloc(be, n.size() * 4);
    for (size_t at = 0; at < plan.size(); at++)
        plan[at] = (uint32_t)(at % N) * (PAGES / N);
    float *share = (float *)be->ops->alloc(be, per_layer * 4);
    uint32_t *est = (uint32_t *)be->ops->alloc(be, seqs * HEADS * 4);
    cudaEvent_t from, to;
    cudaEventCreate(&from);
    cudaEventCreate(&to);
    double sum = 0, copied = 0;
    struct hot_counts before = {}, after = {};
    for (uint32_t step = 0; step < STEPS; step++) {
        for (size_t at = 0; at < plan.size(); at++) /* stays in its stretch of pages: ascending */
            if (step > 0 && below(100) < miss)
                plan[at] = (uint32_t)(at % N) * (PAGES / N) + below(PAGES / N);
        be->ops->copy(be, d_plan, plan.data(), plan.size() * 4);
        be->ops->copy(be, d_n, n.data(), n.size() * 4);
        must(be->ops->sync(be) == OK, "sync");
        cudaEventRecord(from, b->stream);
        for (uint32_t l = 0; l < LAYERS; l++) {
            struct resolve_args a = {};
            a.kv = &kv;
            a.layer = l;
            a.rows = rows.data();
            a.n_rows = seqs;
            a.page_cap = N;
            a.estimate_cap = 1;
            a.pages = d_plan + l * per_layer;
            a.n_pages = d_n + l * seqs * HEADS;
            a.share = share;
            a.estimates = a.n_estimates = est;
            be->ops->resolve(be, &a);
        }
        cuda_flush(b);
        cudaEventRecord(to, b->stream);
        float us = elapsed_us(from, to);
        hot_sets_step(hot.data(), seqs);
        must(be->ops->sync(be) == OK, "resolve");
        for (uint32_t q = 0; q < seqs; q++)
            hot_set_collect(hot[q], step < 2 ? &before : &after);
        must(be->ops->sync(be) == OK, "counts");
        if (step >= 2)
            sum += us;
    }
    copied = (double)after.misses * (double)geo.page_bytes / (STEPS - 2);
    double us = sum / (STEPS - 2);
    char shape[64];
    snprintf(shape, sizeof shape, "B%u/%u-pages/%.0f%%-miss/%zuKiB", seqs, N,
             100.0 * (double)after.misses / (double)(after.hits + after.misses),
             geo.page_bytes / 1024);
    if (copied > 0)
        kbench_bytes("resolve", shape, us / LAYERS, copied / LAYERS, KBENCH_PCIE_GBS);
    else
        printf("# resolve %s: %.1f us\n", shape, us / LAYERS);
    for (uint32_t q = 0; q < seqs; q++)
        hot_set_close(hot[q], be, pool);
    leaf_pool_destroy(pool);
    be->ops->free(be, kv.hbm[LANE_SPARSE], arena);
    be->ops->free(be, d_plan, plan.size() * 4);
    be->ops->free(be, d_n, n.size() * 4);
    be->ops->free(be, share, per_layer * 4);
    be->ops->free(be, est, seqs * HEADS * 4);
}

int main(int argc, char **argv)
{
    size_t arena = (size_t)(argc > 1 ? atoi(argv[1]) : 6) << 30, hbm_bytes = (size_t)4 << 30;
    struct cuda_options o = {};
    if (spind_cuda_api.open(&be, &o) != OK) {
        printf("# %s\n", err_text());
        return 0;
    }
    b = (struct cuda_backend *)be;
    printf("# %s\n", be->ops->describe(be));
    uint8_t *dram = make_arena(arena);
    uint8_t *hbm = (uint8_t *)be->ops->alloc(be, hbm_bytes);
    must(hbm != NULL, "alloc");
    bench_pages(dram, arena, hbm, hbm_bytes, 4096);
    bench_pages(dram, arena, hbm, hbm_bytes, 8192);
    bench_blocks(dram, arena, hbm, hbm_bytes, 2 << 20, false);
    bench_blocks(dram, arena, hbm, hbm_bytes, 360 << 10, false);
    bench_blocks(dram, arena, hbm, hbm_bytes, 360 << 10, true);
    static const uint32_t misses[] = {0, 2, 5, 15};
    for (uint32_t miss : misses) {
        bench_resolve(dram, 1, 128, miss);
        bench_resolve(dram, 8, 128, miss);
        bench_resolve(dram, 64, 32, miss);
    }
    be->ops->free_host(be, dram, arena);
    be->ops->close(be);
    return 0;
}
