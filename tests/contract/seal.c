/* Sealing: every row once, digests against float64, the same bits everywhere, and back again. */
#include "tests/seal_checks.h"
#include "tests/tap.h"

#include <stdio.h>

static const struct rig_shape small = {8, 1, 2, 64, 2};

static struct digest_desc wave(uint32_t rows, uint32_t outliers)
{
    return (struct digest_desc){.order = ORDER_BISECT,
                                .kind = DIGEST_CENTROID,
                                .parts = SEGMENT_ROWS / rows,
                                .outliers = outliers,
                                .sinks = 16,
                                .values = true};
}

static struct digest_desc kmeans(void)
{
    return (struct digest_desc){
        .order = ORDER_KMEANS, .kind = DIGEST_CENTROID, .parts = 64, .sinks = 16, .values = true};
}

static struct digest_desc quest(uint32_t rows)
{
    return (struct digest_desc){
        .order = ORDER_KEEP, .kind = DIGEST_BOUNDS, .parts = SEGMENT_ROWS / rows, .sinks = 16};
}

static struct rig *sealed(const char *isa, uint32_t threads, struct rig_shape s,
                          struct digest_desc d)
{
    struct rig *r = rig_open(isa, threads, s, d);
    if (r == NULL)
        return NULL;
    rig_fill(r);
    rig_seal_all(r);
    return r;
}

/* ---- order ------------------------------------------------------------------------------------- */

static void every_row_is_stored_once(void)
{
    static const struct rig_shape shapes[] = {
        {8, 1, 2, 64, 2}, {16, 1, 1, 128, 1}, {32, 1, 1, 64, 2}, {8, 1, 1, 36, 1}};
    for (uint32_t i = 0; i < ARRAY_LEN(shapes); i++) {
        struct rig *r = sealed("auto", 1, shapes[i], wave(shapes[i].rows, 1));
        ok(rows_are_a_permutation(r, rig_key),
           "bisection stores every row once, R = %u, head_dim %u", shapes[i].rows, shapes[i].dim);
        rig_close(r);
        r = sealed("auto", 1, shapes[i], kmeans());
        ok(rows_are_a_permutation(r, rig_key), "k-means stores every row once, R = %u, head_dim %u",
           shapes[i].rows, shapes[i].dim);
        rig_close(r);
    }
}

static void clusters_are_tighter_than_neighbours_in_time(void)
{
    struct digest_desc pages = wave(16, 0);
    pages.order = ORDER_KEEP;
    struct rig_shape s = {16, 1, 1, 64, 2};
    struct rig *keep = sealed("auto", 1, s, pages), *bisect = sealed("auto", 1, s, wave(16, 0));
    struct rig *free_ = sealed("auto", 1, s, kmeans());
    double a = spread(keep, 0), b = spread(bisect, 0), c = spread(free_, 0);
    printf("# spread inside partitions: pages %.0f, bisection %.0f, k-means %.0f\n", a, b, c);
    ok(b < 0.6 * a, "bisected pages are tighter than consecutive ones");
    ok(c < 0.6 * a, "k-means clusters are tighter than consecutive pages");
    rig_close(keep);
    rig_close(bisect);
    rig_close(free_);
}

/* The naive algorithm in double: the same splits but where rounding decides. */
static void naive_bisect(const double *x, uint32_t dim, uint32_t *rows, uint32_t first, uint32_t n,
                         uint32_t page, const uint16_t *got, uint32_t *wrong)
{
    if (n <= page)
        return;
    uint32_t middle = first / page + 1;
    for (uint32_t c = middle; c < (first + n) / page; c++)
        middle = __builtin_ctz(c) > __builtin_ctz(middle) ? c : middle;
    uint32_t n_left = middle * page - first;
    double *total = mem_alloc(dim * 4 * sizeof *total), *p = total + dim, *q = p + dim,
           *sum = q + dim;
    double *proj = mem_alloc(n * sizeof *proj);
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t c = 0; c < dim; c++)
            total[c] += x[(size_t)rows[i] * dim + c];
    const double *from = total;
    for (int k = 0; k < 2; k++) {
        uint32_t far = 0;
        for (uint32_t i = 0; i < n; i++) {
            proj[i] = 0;
            for (uint32_t c = 0; c < dim; c++)
                proj[i] += x[(size_t)rows[i] * dim + c] * from[c];
            far = proj[i] < proj[far] ? i : far;
        }
        memcpy(k == 0 ? p : q, x + (size_t)rows[far] * dim, dim * sizeof *p);
        from = p;
    }
    for (int round = 0; round <= 4; round++) {
        double threshold = 0;
        uint32_t n_p = 0;
        memset(sum, 0, dim * sizeof *sum);
        for (uint32_t c = 0; c < dim; c++)
            threshold += (p[c] * p[c] - q[c] * q[c]) / 2;
        for (uint32_t i = 0; i < n; i++) {
            proj[i] = 0;
            for (uint32_t c = 0; c < dim; c++)
                proj[i] += x[(size_t)rows[i] * dim + c] * (p[c] - q[c]);
            n_p += proj[i] > threshold;
            for (uint32_t c = 0; c < dim && proj[i] > threshold; c++)
                sum[c] += x[(size_t)rows[i] * dim + c];
        }
        if (round == 4 || n_p == 0 || n_p == n)
            break;
        for (uint32_t c = 0; c < dim; c++) {
            p[c] = sum[c] / n_p;
            q[c] = (total[c] - sum[c]) / (n - n_p);
        }
    }
    uint32_t *out = mem_alloc(n * sizeof *out), left = 0, right = n_left;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t before = 0;
        for (uint32_t j = 0; j < n; j++)
            before += proj[j] < proj[i] || (proj[j] == proj[i] && j < i);
        out[before < n_left ? left++ : right++] = rows[i];
    }
    /* which half did it really go to? */
    for (uint32_t i = 0; i < n_left; i++) {
        bool found = false;
        for (uint32_t j = 0; j < n_left; j++)
            found |= got[first + j] == out[i];
        *wrong += !found;
    }
    memcpy(rows, out, n * sizeof *rows);
    if (*wrong == 0) { /* else the sub-trees hold other rows */
        naive_bisect(x, dim, rows, first, n_left, page, got, wrong);
        naive_bisect(x, dim, rows + n_left, first + n_left, n - n_left, page, got, wrong);
    }
    mem_free(out);
    mem_free(proj);
    mem_free(total);
}

static void bisection_is_the_one_of_the_reference(void)
{
    for (uint32_t rows = 8; rows <= 16; rows *= 2) {
        struct rig_shape s = {rows, 1, 1, 64, 2};
        struct rig *r = sealed("auto", 1, s, wave(rows, 1));
        for (uint32_t seg = 0; seg < 2; seg++) {
            uint32_t first = seg == 0 ? 16 : 0, wrong = 0, n = SEGMENT_ROWS - first;
            double *x = mem_alloc(SEGMENT_ROWS * 64 * sizeof *x);
            uint32_t *order = mem_alloc(SEGMENT_ROWS * sizeof *order);
            for (uint32_t c = 0; c < 64; c++) {
                double mean = 0;
                for (uint32_t i = first; i < SEGMENT_ROWS; i++) {
                    x[i * 64 + c] = bf16_to_f32(f32_to_bf16(rig_key(0, seg * SEGMENT_ROWS + i, c)));
                    mean += x[i * 64 + c] / n;
                }
                for (uint32_t i = first; i < SEGMENT_ROWS; i++)
                    x[i * 64 + c] -= mean;
            }
            for (uint32_t i = first; i < SEGMENT_ROWS; i++) {
                double square = 0;
                for (uint32_t c = 0; c < 64; c++)
                    square += x[i * 64 + c] * x[i * 64 + c];
                for (uint32_t c = 0; c < 64; c++)
                    x[i * 64 + c] /= sqrt(square);
                order[i] = i;
            }
            naive_bisect(x, 64, order + first, first, n, rows, positions(r, seg, 0), &wrong);
            ok(wrong == 0, "R = %u, segment %u: every split is the reference's", rows, seg);
            if (wrong > 0)
                printf("#   %u rows on the other side\n", wrong);
            mem_free(x);
            mem_free(order);
        }
        rig_close(r);
    }
}

/* ---- digests ------------------------------------------------------------------------------------ */

static void digests_are_what_they_say(void)
{
    struct {
        const char *name;
        struct rig_shape s;
        struct digest_desc d;
    } cases[] = {{"R = 8, one outlier", {8, 1, 2, 64, 2}, wave(8, 1)},
                 {"R = 16, none", {16, 1, 1, 128, 2}, wave(16, 0)},
                 {"R = 16, two outliers", {16, 1, 1, 64, 1}, wave(16, 2)},
                 {"R = 32, head_dim 36", {32, 1, 1, 36, 2}, wave(32, 1)},
                 {"k-means", {8, 1, 1, 64, 2}, kmeans()}};
    for (uint32_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct rig *r = sealed("auto", 1, cases[i].s, cases[i].d);
        struct worst w = {0};
        for (uint32_t lane = 0; lane < r->s.layers * r->s.kv_heads; lane++)
            for (uint32_t seg = 0; seg < r->s.segments; seg++)
                check_lane(r, seg, lane, &w);
        ok(w.vectors < 0.51, "centroids and outliers within half a step of float64: %s",
           cases[i].name);
        ok(w.coarse < 0.51, "coarse digests within half a step: %s", cases[i].name);
        ok(w.values < 0.51, "mean values within half a step: %s", cases[i].name);
        printf("#   off by %.3f, %.3f, %.3f steps\n", w.vectors, w.coarse, w.values);
        rig_close(r);
    }
}

static void bounds_are_the_least_and_the_greatest(void)
{
    struct rig_shape s = {16, 1, 2, 64, 2};
    struct rig *r = sealed("auto", 1, s, quest(16));
    struct digest_layout l = digest_layout_of(64, &r->desc);
    bool exact = true, kept = true;
    for (uint32_t lane = 0; lane < 2; lane++)
        for (uint32_t seg = 0; seg < 2; seg++) {
            const uint8_t *record = rig_record(r, seg, lane);
            const uint16_t *tiles = digest_bounds(record, &l);
            for (uint32_t p = seg == 0 ? 1 : 0; p < r->desc.parts; p++)
                for (uint32_t c = 0; c < 64; c++) {
                    float low = INFINITY, high = -INFINITY;
                    for (uint32_t i = 0; i < 16; i++) {
                        uint32_t row = seg * SEGMENT_ROWS + p * 16 + i;
                        float x = bf16_to_f32(*rig_at(r, r->blocks, lane, row, c, false));
                        kept &= x == bf16_to_f32(f32_to_bf16(rig_key(lane, row, c)));
                        low = x < low ? x : low;
                        high = x > high ? x : high;
                    }
                    const uint16_t *at = tiles + digest_bound(64, p, c);
                    exact &= bf16_to_f32(at[0]) == low && bf16_to_f32(at[32]) == high;
                    exact &= digest_magnitude(record, &l)[c] >= fabsf(low) &&
                             digest_magnitude(record, &l)[c] >= fabsf(high);
                }
        }
    ok(exact, "bounds are exactly the least and greatest of each channel");
    ok(kept, "rows stay in position order where the order is kept");
    rig_close(r);
}

/* ---- the same everywhere ------------------------------------------------------------------------- */

static bool same_state(const struct rig *a, const struct rig *b)
{
    return memcmp(a->records, b->records, a->record_total) == 0 &&
           memcmp(a->arena, b->arena, a->arena_bytes) == 0;
}

static void nothing_depends_on_threads_or_instruction_set(void)
{
    struct digest_desc descs[] = {wave(8, 1), wave(8, 2), kmeans(), quest(8)};
    static const char *const names[] = {"one outlier", "two outliers", "k-means", "bounds"};
    for (uint32_t i = 0; i < ARRAY_LEN(descs); i++) {
        struct rig *one = sealed("scalar", 1, small, descs[i]);
        for (uint32_t isa = 0; isa < ARRAY_LEN(rig_isas); isa++) {
            struct rig *r = sealed(rig_isas[isa], 3, small, descs[i]);
            if (r == NULL) {
                tap_skip("the same bits", rig_isas[isa]);
                continue;
            }
            ok(same_state(one, r), "%s with 3 threads gives the bits of one scalar thread: %s",
               rig_isas[isa], names[i]);
            rig_close(r);
        }
        rig_close(one);
    }
}

static void sealing_in_place_equals_sealing_elsewhere(void)
{
    struct digest_desc descs[] = {wave(8, 1), kmeans(), quest(8)};
    for (uint32_t i = 0; i < ARRAY_LEN(descs); i++) {
        struct rig *in = sealed("auto", 1, small, descs[i]);
        struct rig *out = rig_open("auto", 1, small, descs[i]);
        bool same = true, untouched = true;
        rig_fill(out);
        for (uint32_t seg = 0; seg < 2; seg++)
            rig_seal(out, seg, out->blocks, out->spare);
        for (uint32_t b = 0; b < 2 * SEGMENT_ROWS / 8; b++)
            for (uint32_t lane = 0; lane < 2; lane++)
                same &= memcmp(rig_page(in, in->blocks[b], lane),
                               rig_page(out, out->spare[b], lane), in->geo.page_bytes) == 0;
        for (uint32_t row = 0; row < 2 * SEGMENT_ROWS; row++)
            untouched &=
                *rig_at(out, out->blocks, 1, row, 5, false) == f32_to_bf16(rig_key(1, row, 5));
        ok(same && memcmp(in->records, out->records, in->record_total) == 0,
           "in place and out of place give the same pages and digests, order %u", descs[i].order);
        ok(untouched, "the source keeps its rows, order %u", descs[i].order);
        rig_close(in);
        rig_close(out);
    }
}

static void unpermute_is_the_inverse(void)
{
    static const uint32_t lengths[] = {1024, 1, 8, 500, 1023};
    struct digest_desc descs[] = {wave(8, 1), kmeans()};
    for (uint32_t d = 0; d < ARRAY_LEN(descs); d++)
        for (uint32_t i = 0; i < ARRAY_LEN(lengths); i++) {
            struct rig *r = sealed("auto", 2, small, descs[d]);
            uint32_t seg = i % 2, first = seg * SEGMENT_ROWS, n = lengths[i];
            bool same = true, beyond = true;
            struct unpermute_args a = {.kv = &r->kv,
                                       .from = r->blocks + first / 8,
                                       .to = r->spare + first / 8,
                                       .record = r->numbers[seg],
                                       .n_rows = n};
            r->be->ops->unpermute(r->be, &a);
            for (uint32_t lane = 0; lane < 2; lane++)
                for (uint32_t row = 0; row < SEGMENT_ROWS; row++)
                    for (uint32_t c = 0; c < 64; c++) {
                        uint16_t k = *rig_at(r, r->spare, lane, first + row, c, false);
                        uint16_t v = *rig_at(r, r->spare, lane, first + row, c, true);
                        if (row >= n)
                            beyond &= k == 0xffff && v == 0xffff;
                        else
                            same &= k == f32_to_bf16(rig_key(lane, first + row, c)) &&
                                    v == f32_to_bf16(rig_value(lane, first + row, c));
                    }
            ok(same && beyond, "unpermute gives back the first %u rows and nothing else", n);
            rig_close(r);
        }
}

static void unpermute_reads_from_dram(void)
{
    struct rig *r = sealed("auto", 1, small, wave(8, 1));
    block_id from[SEGMENT_ROWS / 8];
    bool same = true;
    r->dram = mem_alloc(r->arena_bytes);
    memcpy(r->dram, r->arena, r->arena_bytes);
    memset(r->arena, 0xff, r->arena_bytes);
    r->kv.dram[LANE_SPARSE] = r->dram;
    for (uint32_t i = 0; i < ARRAY_LEN(from); i++)
        from[i] = r->blocks[i] | (i % 3 != 0 ? BLOCK_IN_DRAM : 0);
    for (uint32_t i = 0; i < ARRAY_LEN(from); i += 3) /* a third is in HBM */
        for (uint32_t lane = 0; lane < 2; lane++)
            memcpy(rig_page(r, r->blocks[i], lane), rig_page(r, r->blocks[i] | BLOCK_IN_DRAM, lane),
                   r->geo.page_bytes);
    struct unpermute_args a = {&r->kv, from, r->spare, r->numbers[0], 700};
    r->be->ops->unpermute(r->be, &a);
    for (uint32_t row = 0; row < 700; row++)
        for (uint32_t c = 0; c < 64; c++)
            same &= *rig_at(r, r->spare, 1, row, c, false) == f32_to_bf16(rig_key(1, row, c));
    ok(same, "unpermute reads blocks of either tier");
    mem_free(r->dram);
    rig_close(r);
}

/* ---- odd rows ----------------------------------------------------------------------------------- */

static void only_sparse_lanes_are_sealed(void)
{
    struct rig_shape s = {8, 1, 3, 64, 1};
    struct lane_place lanes[3] = {{LANE_SPARSE, 0}, {LANE_DENSE, 0}, {LANE_SPARSE, 1}};
    struct rig *all = sealed("auto", 1, s, wave(8, 1)), *r = rig_open("auto", 2, s, wave(8, 1));
    bool same = true;
    rig_fill(r);
    r->geo.lanes = lanes;
    /* lane 2 of the policy is the second page of a block: give it what lane 2 holds */
    for (uint32_t i = 0; i < SEGMENT_ROWS / 8; i++)
        memcpy(rig_page(r, r->blocks[i], 2), rig_page(r, r->blocks[i], 2) + r->geo.page_bytes,
               r->geo.page_bytes);
    rig_seal_all(r);
    for (uint32_t i = 0; i < SEGMENT_ROWS / 8; i++) {
        same &= memcmp(rig_page(r, r->blocks[i], 0), rig_page(all, all->blocks[i], 0),
                       r->geo.page_bytes) == 0;
        same &= memcmp(rig_page(r, r->blocks[i], 2), rig_page(all, all->blocks[i], 2),
                       r->geo.page_bytes) == 0;
    }
    same &= memcmp(rig_record(r, 0, 2), rig_record(all, 0, 2), r->kv.record_lane_bytes) == 0;
    ok(same, "a lane's result does not depend on the classes of the others");
    const uint8_t *third = r->records + 2 * r->kv.record_lane_bytes;
    for (size_t i = 0; i < r->kv.record_lane_bytes; i++)
        same &= third[i] == 0xa5;
    ok(same, "nothing is written for lanes that are not sparse");
    rig_close(all);
    rig_close(r);
}

static void overwrite_keys(struct rig *r, uint32_t from, uint32_t to, float value)
{
    for (uint32_t row = from; row < to; row++)
        for (uint32_t c = 0; c < r->s.dim; c++)
            *rig_at(r, r->blocks, 0, row, c, false) = f32_to_bf16(value * (float)(1 + c % 5));
}

static void equal_rows_make_no_trouble(void)
{
    struct digest_desc descs[] = {wave(8, 1), kmeans()};
    struct rig_shape s = {8, 1, 1, 64, 1};
    for (uint32_t d = 0; d < ARRAY_LEN(descs); d++) {
        struct digest_layout l = digest_layout_of(64, &descs[d]);
        struct rig *r = rig_open("auto", 1, s, descs[d]);
        uint8_t seen[SEGMENT_ROWS] = {0};
        uint32_t n_seen = 0, n_empty = 0;
        bool finite = true;
        rig_fill(r);
        overwrite_keys(r, 0, SEGMENT_ROWS, 0.5f);
        rig_seal_all(r);
        for (uint32_t i = 0; i < SEGMENT_ROWS; i++) {
            uint16_t p = positions(r, 0, 0)[i];
            n_seen += p < SEGMENT_ROWS && !seen[p];
            seen[p % SEGMENT_ROWS] = 1;
        }
        for (uint32_t p = 2; p < r->desc.parts; p++) {
            struct digest_vectors v = digest_vectors_of(rig_record(r, 0, 0), &l, 0);
            uint32_t first, n = digest_rows(rig_record(r, 0, 0), &r->desc, p, &first);
            n_empty += n == 0;
            for (uint32_t c = 0; c < 64; c++)
                finite &= n == 0 || digest_vector_get(&v, 64, p, c) == 0.5f * (float)(1 + c % 5);
        }
        ok(n_seen == SEGMENT_ROWS && finite,
           "equal keys: every row once, exact centroids, order %u", descs[d].order);
        ok(descs[d].order != ORDER_KMEANS || n_empty >= 61,
           "k-means of equal keys has empty clusters");
        rig_close(r);
    }
}

static void bad_numbers_stay_where_they_are(void)
{
    struct digest_desc descs[] = {wave(8, 1), wave(16, 2), kmeans(), quest(8)};
    for (uint32_t d = 0; d < ARRAY_LEN(descs); d++) {
        struct rig_shape s = {descs[d].outliers == 2 ? 16 : 8, 1, 1, 64, 1};
        struct rig *r = rig_open("auto", 1, s, descs[d]);
        uint32_t n_bad = 0;
        rig_fill(r);
        for (uint32_t row = 100; row < 140; row++)
            for (uint32_t c = 0; c < 64; c += 7)
                *rig_at(r, r->blocks, 0, row, c, false) = row % 2 ? 0x7fc0 : 0xff80; /* NaN, -inf */
        rig_seal_all(r);
        for (uint32_t row = 0; row < SEGMENT_ROWS; row++) {
            uint16_t k = *rig_at(r, r->blocks, 0, row, 7, false);
            n_bad += k == 0x7fc0 || k == 0xff80;
        }
        is_int(n_bad, 40, "rows of NaN and infinity are stored like others");
        rig_close(r);
    }
}

int main(void)
{
    every_row_is_stored_once();
    clusters_are_tighter_than_neighbours_in_time();
    bisection_is_the_one_of_the_reference();
    digests_are_what_they_say();
    bounds_are_the_least_and_the_greatest();
    nothing_depends_on_threads_or_instruction_set();
    sealing_in_place_equals_sealing_elsewhere();
    unpermute_is_the_inverse();
    unpermute_reads_from_dram();
    only_sparse_lanes_are_sealed();
    equal_rows_make_no_trouble();
    bad_numbers_stay_where_they_are();
    return tap_done();
}
