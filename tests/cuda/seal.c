/* Sealing on the GPU against the CPU's. Where sums have the CPU's order they are compared exactly (bounds,
 * means of rows in position order). An order may differ where keys nearly tie, so sealed segments are
 * compared by what they say: every row once, digests of the rows as they lie, as tight as the CPU's; and
 * clusters far from each other are the very same. */
#include "tests/cuda/seal_world.h"

/* ---- descriptions ---- */

static struct digest_desc wave(uint32_t rows, uint32_t outliers)
{
    return (struct digest_desc){.order = ORDER_BISECT,
                                .kind = DIGEST_CENTROID,
                                .parts = SEGMENT_ROWS / rows,
                                .outliers = outliers,
                                .sinks = 16,
                                .values = true};
}

static struct digest_desc kmeans(uint32_t parts)
{
    return (struct digest_desc){.order = ORDER_KMEANS,
                                .kind = DIGEST_CENTROID,
                                .parts = parts,
                                .sinks = 16,
                                .values = true};
}

static struct digest_desc quest(uint32_t parts)
{
    return (struct digest_desc){
        .order = ORDER_KEEP, .kind = DIGEST_BOUNDS, .parts = parts, .sinks = 16};
}

static struct digest_desc codes_of(uint32_t rows, bool values)
{
    return (struct digest_desc){.order = ORDER_BISECT,
                                .kind = DIGEST_CODES,
                                .parts = SEGMENT_ROWS / rows,
                                .sinks = 16,
                                .values = values};
}

/* Clusters of 8 rows, far from each other; rows of one lie anywhere. */
static float separated_key(uint32_t lane, uint32_t row, uint32_t c)
{
    uint32_t cluster = row * 37 % SEGMENT_ROWS / 8 + row / SEGMENT_ROWS * 128;
    float sum =
        0; /* a tree: every bit of the number of a cluster adds a direction, the first ones most */
    for (uint32_t bit = 0, n = cluster % 128; bit < 7; bit++)
        sum += ldexpf(rig_noise(lane, 100 + bit + 8 * (n >> (7 - bit)), c), 4 - (int)bit) *
               (n >> (6 - bit) & 1 ? 1.0f : -1.0f);
    return sum + 0.01f * rig_noise(lane * 4096 + row, 6, c) + (c % 16 == 3 ? 5.0f : 0.0f);
}

/* ---- order ---- */

/* Blocks that nobody named. */
static bool spare_is_untouched(const struct rig *r)
{
    bool good = true;
    uint32_t n = r->s.segments * SEGMENT_ROWS / r->s.rows;
    for (uint32_t i = 0; i < n; i++) {
        const uint8_t *block = r->arena + r->spare[i] * r->geo.block_bytes[LANE_SPARSE];
        for (size_t k = 0; k < r->geo.block_bytes[LANE_SPARSE]; k++)
            good &= block[k] == 0xff;
    }
    return good;
}

static double same_places(const struct world *w)
{
    uint32_t same = 0, n = 0;
    for (uint32_t lane = 0; lane < w->cpu->s.layers * w->cpu->s.kv_heads; lane++)
        for (uint32_t seg = 0; seg < w->cpu->s.segments; seg++)
            for (uint32_t i = 0; i < SEGMENT_ROWS; i++, n++)
                same += positions(w->cpu, seg, lane)[i] == positions(w->dev, seg, lane)[i];
    return (double)same / n;
}

static void orders_are_as_good_as_the_cpus(void)
{
    struct {
        struct rig_shape s;
        struct digest_desc d;
        const char *name;
    } cases[] = {{{8, 2, 2, 128, 2}, wave(8, 1), "bisection"},
                 {{16, 1, 3, 128, 2}, wave(16, 0), "bisection"},
                 {{32, 1, 2, 128, 2}, wave(32, 0), "bisection"},
                 {{8, 1, 2, 64, 2}, wave(8, 2), "bisection"},
                 {{16, 1, 2, 64, 1}, wave(16, 1), "bisection"},
                 {{8, 1, 1, 36, 2}, wave(8, 1), "bisection"},
                 {{16, 1, 1, 96, 2}, wave(16, 1), "bisection"},
                 {{8, 1, 2, 256, 1}, wave(8, 1), "bisection"},
                 {{16, 1, 1, 160, 2}, wave(16, 1), "bisection"},
                 {{8, 1, 2, 128, 2}, kmeans(64), "k-means"},
                 {{16, 1, 1, 64, 2}, kmeans(100), "k-means"},
                 {{16, 1, 1, 36, 1}, kmeans(7), "k-means"},
                 {{16, 1, 1, 200, 1}, kmeans(64), "k-means"}};
    for (uint32_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct world *w = open_world(cases[i].s, cases[i].d, rig_key);
        seal_both(w);
        const char *name = cases[i].name;
        uint32_t rows = cases[i].s.rows, dim = cases[i].s.dim;
        ok(rows_are_a_permutation(w->dev, rig_key), "%s stores every row once, R = %u, head_dim %u",
           name, rows, dim);
        ok(spare_is_untouched(w->dev), "and touches no other block");
        double worst = 0;
        for (uint32_t lane = 0; lane < cases[i].s.layers * cases[i].s.kv_heads; lane++) {
            double off = spread(w->dev, lane) / spread(w->cpu, lane) - 1;
            worst = off > worst ? off : worst;
        }
        ok(worst < 0.01, "clusters are as tight as the CPU's within 1 %% (%.4f)", worst);
        printf("#   %.2f %% of the rows lie where the CPU has them\n", 100 * same_places(w));
        close_world(w);
    }
}

/* Each kernel, on as little as there is. */
static void each_kernel_once(void)
{
    struct digest_desc descs[] = {quest(128), kmeans(16), wave(8, 2), codes_of(8, true)};
    for (uint32_t i = 0; i < ARRAY_LEN(descs); i++)
        for (uint32_t dim = 64; dim <= 128 + 128 * (i == 3); dim *= 2) {
            printf("# order %u, kind %u, head_dim %u\n", descs[i].order, descs[i].kind, dim);
            struct world *w = open_world((struct rig_shape){8, 1, 1, dim, 1}, descs[i], rig_key);
            seal_both(w);
            double same = descs[i].order != ORDER_KEEP ? same_places(w) : 1;
            ok(same > 0.99, "order %u, kind %u, head_dim %u: the CPU's order (%.4f)",
               descs[i].order, descs[i].kind, dim, same);
            close_world(w);
        }
}

/* Rows that share a page with the same others in both. Which side of a split comes first hangs on which of
 * two rows is farther away, and between equal clusters on rounding: pages may lie elsewhere. */
static double same_clusters(const struct world *w)
{
    uint32_t same = 0, n = 0, rows = w->cpu->s.rows;
    for (uint32_t lane = 0; lane < w->cpu->s.layers * w->cpu->s.kv_heads; lane++)
        for (uint32_t seg = 0; seg < w->cpu->s.segments; seg++) {
            uint16_t first[2][SEGMENT_ROWS]; /* of the rows of a page, by position */
            for (uint32_t k = 0; k < 2; k++) {
                const uint16_t *p = positions(k == 0 ? w->cpu : w->dev, seg, lane);
                for (uint32_t i = 0; i < SEGMENT_ROWS; i++)
                    first[k][p[i] % SEGMENT_ROWS] = p[i / rows * rows]; /* sides keep their order */
            }
            for (uint32_t i = 0; i < SEGMENT_ROWS; i++, n++)
                same += first[0][i] == first[1][i];
        }
    return (double)same / n;
}

static void clear_clusters_are_found(void)
{
    for (uint32_t rows = 8; rows <= 32; rows *= 2)
        for (uint32_t dim = 64; dim <= 256; dim *= 2) {
            struct digest_desc d = wave(rows, 0);
            d.sinks = 0; /* else no cut lies between clusters */
            struct world *w = open_world((struct rig_shape){rows, 1, 2, dim, 2}, d, separated_key);
            seal_both(w);
            double same = same_clusters(w);
            ok(same == 1, "clusters far from each other are the CPU's, R = %u, head_dim %u (%.4f)",
               rows, dim, same);
            ok(rows_are_a_permutation(w->dev, separated_key), "and every row is stored once");
            close_world(w);
        }
}

/* ---- digests by definition, from the rows as the device stored them (tests/seal_checks.h) ---- */

static void digests_are_what_they_say(void)
{
    struct {
        const char *name;
        struct rig_shape s;
        struct digest_desc d;
    } cases[] = {{"R = 8, one outlier", {8, 1, 2, 128, 2}, wave(8, 1)},
                 {"R = 16, none", {16, 1, 1, 128, 2}, wave(16, 0)},
                 {"R = 8, none, four lanes", {8, 2, 2, 64, 2}, wave(8, 0)},
                 {"R = 32, none, head_dim 40", {32, 1, 1, 40, 1}, wave(32, 0)},
                 {"R = 16, none, head_dim 36", {16, 1, 1, 36, 1}, wave(16, 0)},
                 {"R = 16, two outliers", {16, 1, 1, 64, 1}, wave(16, 2)},
                 {"R = 32, head_dim 36", {32, 1, 1, 36, 2}, wave(32, 1)},
                 {"R = 8, head_dim 256", {8, 1, 1, 256, 1}, wave(8, 2)},
                 {"k-means", {8, 1, 1, 64, 2}, kmeans(64)},
                 {"k-means, 7 clusters", {16, 1, 1, 128, 2}, kmeans(7)}};
    for (uint32_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct world *w = open_world(cases[i].s, cases[i].d, rig_key);
        struct worst worst = {0};
        seal_both(w);
        for (uint32_t lane = 0; lane < cases[i].s.layers * cases[i].s.kv_heads; lane++)
            for (uint32_t seg = 0; seg < cases[i].s.segments; seg++)
                check_lane(w->dev, seg, lane, &worst);
        ok(worst.vectors < 0.51, "centroids and outliers within half a step of float64: %s (%.3f)",
           cases[i].name, worst.vectors);
        ok(worst.coarse < 0.51, "coarse digests within half a step: %s (%.3f)", cases[i].name,
           worst.coarse);
        ok(worst.values < 0.51, "mean values within half a step: %s (%.3f)", cases[i].name,
           worst.values);
        close_world(w);
    }
}

/* Greatest difference of u8 vectors, in steps; base and step within a millionth. */
static uint32_t steps_apart(const struct world *w, struct digest_vectors a, struct digest_vectors b,
                            uint32_t parts, uint32_t first)
{
    uint32_t dim = w->cpu->s.dim, worst = 0;
    for (uint32_t c = 0; c < dim; c++) {
        float range = 256 * a.step[c] + fabsf(a.base[c]);
        if (!(fabsf(a.base[c] - b.base[c]) <= 1e-6f * range &&
              fabsf(a.step[c] - b.step[c]) <= 1e-6f * range))
            return 256;
        for (uint32_t p = first; p < parts; p++) {
            int d = a.tiles[digest_byte(dim, p, c)] - b.tiles[digest_byte(dim, p, c)];
            worst = (uint32_t)abs(d) > worst ? (uint32_t)abs(d) : worst;
        }
    }
    return worst;
}

static void rows_in_their_order_have_the_cpus_digests(void)
{
    static const struct rig_shape shapes[] = {{8, 1, 2, 128, 2},
                                              {16, 2, 1, 128, 1},
                                              {32, 1, 1, 64, 2},
                                              {16, 1, 1, 36, 2},
                                              {8, 1, 1, 160, 2}};
    for (uint32_t i = 0; i < ARRAY_LEN(shapes); i++) {
        struct rig_shape s = shapes[i];
        struct world *w = open_world(s, quest(SEGMENT_ROWS / s.rows), rig_key);
        seal_both(w);
        bool same = memcmp(w->cpu->records, w->dev->records, w->cpu->record_total) == 0;
        ok(same, "bounds have the CPU's bits, R = %u, head_dim %u", s.rows, s.dim);
        bool kept = memcmp(w->cpu->arena, w->dev->arena, w->cpu->arena_bytes) == 0;
        ok(kept, "and pages stay as they are");
        close_world(w);
        struct digest_desc d = wave(s.rows, i % 3);
        d.order = ORDER_KEEP;
        d.parts = i == 1 ? SEGMENT_ROWS / 32 : d.parts;
        w = open_world(s, d, rig_key);
        seal_both(w);
        struct digest_layout l = digest_layout_of(s.dim, &d);
        uint32_t worst = 0;
        bool values = true;
        for (uint32_t lane = 0; lane < s.layers * s.kv_heads; lane++)
            for (uint32_t seg = 0; seg < s.segments; seg++) {
                const uint8_t *a = rig_record(w->cpu, seg, lane),
                              *b = rig_record(w->dev, seg, lane);
                uint32_t first = seg == 0 ? rig_sink_rows(w->cpu) * d.parts / SEGMENT_ROWS : 0;
                for (uint32_t k = 0; k < l.kinds; k++) {
                    uint32_t x = steps_apart(w, digest_vectors_of(a, &l, k),
                                             digest_vectors_of(b, &l, k), l.parts, first);
                    worst = x > worst ? x : worst;
                }
                uint32_t x = steps_apart(w, digest_vectors_at(a + l.coarse, s.dim),
                                         digest_vectors_at(b + l.coarse, s.dim),
                                         l.parts / DIGEST_COARSE, (first + 3) / DIGEST_COARSE);
                worst = x > worst ? x : worst;
                values = values && memcmp(a + l.values, b + l.values, l.bytes - l.values) == 0;
            }
        ok(worst <= 1, "centroids within a step of the CPU's, %u outliers (%u)", d.outliers, worst);
        ok(values, "mean values have the CPU's bits");
        close_world(w);
    }
}

/* ---- codes ---- */

static double scale_of(uint8_t code)
{
    return ldexp(1.0 + code % 8 / 8.0, code / 8 - CODES_SCALE_EXP);
}

static double number_at(const uint8_t *p, bool is_float, size_t i)
{
    float f;
    uint16_t h;
    if (is_float)
        memcpy(&f, p + i * sizeof f, sizeof f);
    else {
        memcpy(&h, p + i * sizeof h, sizeof h);
        f = bf16_to_f32(h);
    }
    return (double)f;
}

/* What codes leave of the rows' distances from their means, as a share of it: half 0: K, 1: V. */
static double left_by_codes(const struct rig *r, uint32_t seg, uint32_t lane, uint32_t half)
{
    struct digest_layout l = digest_layout_of(r->s.dim, &r->desc);
    const uint8_t *record = rig_record(r, seg, lane), *codes = record + l.codes;
    const uint8_t *basis = rig_record(r, 0, lane) + l.codes;
    uint32_t dim = r->s.dim, n = half == 0 ? CODES_K : CODES_V, rows = r->s.rows;
    double *x = rig_keys(r, r->blocks, lane, half == 1), all = 0, left = 0;
    struct digest_vectors vectors = digest_vectors_of(record, &l, 0);
    basis += half == 0 ? codes_k_basis(r->desc.values) : codes_v_basis(dim);
    const uint8_t *dirs = basis + n * sizeof(float);
    for (uint32_t row = seg == 0 ? rig_sink_rows(r) : 0; row < SEGMENT_ROWS; row++) {
        uint32_t p = row / rows, i = row % rows;
        double y[CODES_K];
        uint8_t scale = codes[half == 0 ? codes_k_scale(p, i, rows) : codes_v_scales() + row];
        for (uint32_t j = 0; j < n; j++) {
            uint32_t byte = codes[half == 0 ? codes_k_byte(p, i, j, rows) : codes_v_byte(row, j)];
            uint32_t level = byte >> codes_shift(half == 0 ? j : row) & 3;
            y[j] = scale_of(scale) * number_at(basis, true, j) * (double)CODES_STEP * (level - 1.5);
        }
        for (uint32_t c = 0; c < dim; c++) {
            double mean = half == 0 ? (double)digest_vector_get(&vectors, dim, p, c)
                                    : (double)digest_value_scale(record, &l, p) *
                                          digest_value(record, &l, p)[c];
            double d = x[((size_t)seg * SEGMENT_ROWS + row) * dim + c] - mean;
            all += d * d;
            for (uint32_t j = 0; j < n; j++)
                d -= y[j] * number_at(dirs, false, half == 0 ? c * CODES_K + j : j * dim + c);
            left += d * d;
        }
    }
    mem_free(x);
    return left / all;
}

static void codes_leave_no_more_than_the_cpus(void)
{
    static const struct rig_shape shapes[] = {
        {8, 1, 2, 128, 3}, {16, 1, 1, 128, 2}, {32, 1, 1, 64, 2}, {8, 2, 1, 64, 2},
        {8, 1, 1, 20, 1},  {16, 1, 1, 40, 2},  {8, 1, 1, 256, 1}, {16, 1, 1, 96, 1}};
    for (uint32_t i = 0; i < ARRAY_LEN(shapes); i++) {
        bool values = i != 1;
        struct rig_shape s = shapes[i];
        struct world *w = open_world(s, codes_of(s.rows, values), rig_key);
        seal_both(w);
        for (uint32_t half = 0; half < (values ? 2u : 1u); half++) {
            double worst = 0, a = 0, b = 0;
            for (uint32_t lane = 0; lane < s.layers * s.kv_heads; lane++)
                for (uint32_t seg = 0; seg < s.segments; seg++) {
                    a = left_by_codes(w->cpu, seg, lane, half);
                    b = left_by_codes(w->dev, seg, lane, half);
                    worst = b / a - 1 <= worst ? worst : b / a - 1;
                }
            ok(worst <= 0.02 && b < 0.9,
               "codes of %s err as the CPU's within 2 %%, R = %u, head_dim %u",
               half == 0 ? "K" : "V", s.rows, s.dim);
            printf("#   at most %.4f more; the last: %.4f, CPU %.4f\n", worst, b, a);
        }
        close_world(w);
    }
}

/* ---- places ---- */

static void sealing_in_place_equals_sealing_elsewhere(void)
{
    struct digest_desc descs[] = {wave(8, 1), kmeans(64), quest(128), codes_of(8, true)};
    struct rig_shape s = {8, 1, 2, 128, 2};
    for (uint32_t i = 0; i < ARRAY_LEN(descs); i++) {
        struct world *in = open_world(s, descs[i], rig_key),
                     *out = open_world(s, descs[i], rig_key);
        bool same = true, untouched = true;
        for (uint32_t seg = 0; seg < 2; seg++) {
            gpu_seal(in, seg, in->dev->blocks);
            gpu_seal(out, seg, out->dev->spare);
        }
        download(in);
        download(out);
        for (uint32_t b = 0; b < 2 * SEGMENT_ROWS / 8; b++)
            for (uint32_t lane = 0; lane < 2; lane++)
                same &=
                    memcmp(rig_page(in->dev, in->dev->blocks[b], lane),
                           rig_page(out->dev, out->dev->spare[b], lane), in->geo->page_bytes) == 0;
        for (uint32_t row = 0; row < 2 * SEGMENT_ROWS; row++)
            untouched &= *rig_at(out->dev, out->dev->blocks, 1, row, 5, false) ==
                         f32_to_bf16(rig_key(1, row, 5));
        bool digests = memcmp(in->dev->records, out->dev->records, in->dev->record_total) == 0;
        ok(same && digests, "in place and elsewhere: the same pages and digests, order %u, kind %u",
           descs[i].order, descs[i].kind);
        ok(untouched, "and the source keeps its rows");
        close_world(in);
        close_world(out);
    }
}

static void only_sparse_lanes_are_sealed(void)
{
    struct rig_shape s = {8, 1, 3, 128, 1};
    struct lane_place lanes[3] = {{LANE_SPARSE, 0}, {LANE_DENSE, 0}, {LANE_SPARSE, 1}};
    struct digest_desc d = codes_of(8, true);
    struct world *all = open_world(s, d, rig_key), *w = open_world(s, d, rig_key);
    struct rig *r = w->dev;
    seal_both(all);
    for (uint32_t i = 0; i < SEGMENT_ROWS / 8;
         i++) /* the second lane of blocks: what lane 2 holds */
        memcpy(rig_page(r, r->blocks[i], 1), rig_page(r, r->blocks[i], 2), r->geo.page_bytes);
    upload(w);
    w->geo->lanes = lanes;
    gpu_seal(w, 0, r->blocks);
    download(w);
    bool same = true;
    for (uint32_t i = 0; i < SEGMENT_ROWS / 8; i++)
        for (uint32_t lane = 0; lane < 2; lane++)
            same &=
                memcmp(rig_page(r, r->blocks[i], lane),
                       rig_page(all->dev, all->dev->blocks[i], 2 * lane), r->geo.page_bytes) == 0;
    const uint8_t *third = r->records + 2 * r->kv.record_lane_bytes;
    same &= memcmp(r->records, all->dev->records, r->kv.record_lane_bytes) == 0;
    same &= memcmp(r->records + r->kv.record_lane_bytes,
                   all->dev->records + 2 * r->kv.record_lane_bytes, r->kv.record_lane_bytes) == 0;
    ok(same, "a lane's result does not depend on the classes of the others");
    bool nothing = true;
    for (size_t i = 0; i < r->kv.record_lane_bytes; i++)
        nothing &= third[i] == 0xa5;
    ok(nothing, "nothing is written for lanes that are not sparse");
    close_world(all);
    close_world(w);
}

/* ---- odd rows ---- */

static float equal_key(uint32_t lane, uint32_t row, uint32_t c)
{
    (void)lane, (void)row;
    return 0.5f * (float)(1 + c % 5);
}

static float broken_key(uint32_t lane, uint32_t row, uint32_t c)
{
    if (row >= 100 && row < 140 && c % 7 == 0)
        return row % 2 ? NAN : -INFINITY;
    return rig_key(lane, row, c);
}

static void equal_rows_make_no_trouble(void)
{
    struct digest_desc descs[] = {wave(8, 1), kmeans(64), codes_of(8, true)};
    for (uint32_t d = 0; d < ARRAY_LEN(descs); d++)
        for (uint32_t dim = 64; dim <= 256; dim *= 2) {
            struct digest_layout l = digest_layout_of(dim, &descs[d]);
            struct world *w = open_world((struct rig_shape){8, 1, 1, dim, 1}, descs[d], equal_key);
            bool exact = true;
            seal_both(w);
            for (uint32_t p = 2; p < descs[d].parts; p++) {
                struct digest_vectors v = digest_vectors_of(rig_record(w->dev, 0, 0), &l, 0);
                uint32_t first, n = digest_rows(rig_record(w->dev, 0, 0), &descs[d], p, &first);
                for (uint32_t c = 0; c < dim; c++)
                    exact &= n == 0 || digest_vector_get(&v, dim, p, c) == equal_key(0, 0, c);
            }
            ok(rows_are_a_permutation(w->dev, equal_key) && exact,
               "equal keys: every row once, exact centroids, order %u, kind %u, head_dim %u",
               descs[d].order, descs[d].kind, dim);
            ok(same_places(w) == 1, "and the CPU's order");
            close_world(w);
        }
}

static void bad_numbers_stay_where_they_are(void)
{
    struct digest_desc descs[] = {wave(8, 1), wave(8, 2), kmeans(64), quest(128),
                                  codes_of(8, true)};
    for (uint32_t d = 0; d < ARRAY_LEN(descs); d++)
        for (uint32_t dim = 64; dim <= 256; dim *= 2) {
            struct world *w = open_world((struct rig_shape){8, 1, 1, dim, 1}, descs[d], broken_key);
            uint32_t n_bad = 0;
            seal_both(w);
            for (uint32_t row = 0; row < SEGMENT_ROWS; row++) {
                float k = bf16_to_f32(*rig_at(w->dev, w->dev->blocks, 0, row, 7, false));
                n_bad += isnan(k) || isinf(k);
            }
            is_int(n_bad, 40, "rows of NaN and infinity are stored like others");
            close_world(w);
        }
}

/* ---- back ---- */

static void unpermute_is_the_inverse(void)
{
    static const uint32_t lengths[] = {1024, 1, 8, 500, 1023};
    static const struct rig_shape shapes[] = {{8, 1, 2, 128, 2}, {16, 1, 2, 36, 2}};
    for (uint32_t k = 0; k < 2 * ARRAY_LEN(lengths); k++) {
        struct rig_shape s = shapes[k % 2];
        uint32_t n = lengths[k / 2], seg = k / 2 % 2, first = seg * SEGMENT_ROWS;
        struct world *w = open_world(s, k % 4 < 2 ? wave(s.rows, 1) : kmeans(64), rig_key);
        bool same = true, beyond = true;
        struct rig *r = w->dev;
        block_id from[SEGMENT_ROWS / 8];
        seal_both(w);
        /* some blocks come from the other arena, which here is device memory as well */
        void *dram = gpu->ops->alloc(gpu, r->arena_bytes);
        convert(w, true);
        gpu->ops->copy(gpu, dram, w->pages, r->arena_bytes);
        w->kv.dram[LANE_SPARSE] = dram;
        for (uint32_t i = 0; i < SEGMENT_ROWS / s.rows; i++)
            from[i] = r->blocks[first / s.rows + i] | (i % 3 != 0 ? BLOCK_IN_DRAM : 0);
        struct unpermute_args a = {.kv = &w->kv,
                                   .from = from,
                                   .to = r->spare + first / s.rows,
                                   .record = r->numbers[seg],
                                   .n_rows = n};
        gpu->ops->unpermute(gpu, &a);
        download(w);
        for (uint32_t lane = 0; lane < 2; lane++)
            for (uint32_t row = 0; row < SEGMENT_ROWS; row++)
                for (uint32_t c = 0; c < s.dim; c++) {
                    uint16_t x = *rig_at(r, r->spare, lane, first + row, c, false);
                    uint16_t y = *rig_at(r, r->spare, lane, first + row, c, true);
                    if (row >= n)
                        beyond &= x == 0xffff && y == 0xffff;
                    else
                        same &= x == f32_to_bf16(rig_key(lane, first + row, c)) &&
                                y == f32_to_bf16(rig_value(lane, first + row, c));
                }
        ok(same && beyond, "unpermute gives back the first %u rows and nothing else, R = %u", n,
           s.rows);
        gpu->ops->free(gpu, dram, r->arena_bytes);
        close_world(w);
    }
}

int main(int argc, char **argv)
{
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (spind_cuda_open(&gpu, 0) != OK) {
        printf("Bail out! %s\n", err_text());
        return 1;
    }
    if (tap_small() || (argc > 1 && strcmp(argv[1], "small") == 0)) {
        each_kernel_once();
        return tap_done();
    }
    orders_are_as_good_as_the_cpus();
    clear_clusters_are_found();
    digests_are_what_they_say();
    rows_in_their_order_have_the_cpus_digests();
    codes_leave_no_more_than_the_cpus();
    sealing_in_place_equals_sealing_elsewhere();
    only_sparse_lanes_are_sealed();
    equal_rows_make_no_trouble();
    bad_numbers_stay_where_they_are();
    unpermute_is_the_inverse();
    gpu->ops->close(gpu);
    return tap_done();
}
