/* Sealing one lane of a segment, once for every instruction set: read the rows, order them
 * (seal_order_vec.h), digest every partition, write the pages.
 *
 * Bound by the order: 84 passes over 1,024 rows for a bisection into pages of 8. */
#include "kernels/cpu/seal_order_vec.h"
#include "kernels/dtype.h"

/* Everything about a lane; memory is carved out of its worker's scratch. */
struct seal_state {
    const struct seal_lane *a;
    struct order_state order;
    struct kmeans kmeans;
    uint32_t dim, stride, rows;
    uint16_t *keys, *values;      /* [SEGMENT_ROWS][stride], by position */
    float *vectors[DIGEST_KINDS]; /* [parts][stride] */
    float *coarse, *means;        /* [parts / DIGEST_COARSE][stride]; [parts][stride]: of V */
    float *low, *high;            /* [stride] */
    float *codes_work;
};

static float *carve(float **at, size_t floats)
{
    float *p = *at;
    *at += floats;
    return p;
}

static void set_up(struct seal_state *s, const struct seal_lane *a)
{
    struct order_state *o = &s->order;
    float *at = a->work;
    size_t parts = digest_tiles(a->desc->parts) * (size_t)DIGEST_TILE;
    s->a = a;
    s->dim = o->dim = a->geo->head_dim;
    s->stride = o->stride = seal_stride(s->dim);
    s->rows = o->rows = a->geo->block_rows;
    size_t rows = (size_t)SEGMENT_ROWS * s->stride;
    s->keys = (uint16_t *)(void *)carve(&at, rows / 2);
    s->values = (uint16_t *)(void *)carve(&at, rows / 2);
    o->x[0] = carve(&at, rows);
    o->x[1] = carve(&at, rows);
    for (uint32_t i = 0; i < DIGEST_KINDS; i++)
        s->vectors[i] = carve(&at, parts * s->stride);
    s->coarse = carve(&at, parts * s->stride);
    s->means = carve(&at, parts * s->stride);
    float **vectors[] = {&o->mean, &o->a, &o->b, &o->axis, &o->sums, &s->low, &s->high};
    for (uint32_t i = 0; i < ARRAY_LEN(vectors); i++)
        *vectors[i] = carve(&at, s->stride);
    o->dots = carve(&at, SEGMENT_ROWS + V16);
    o->weight = carve(&at, SEGMENT_ROWS + V16);
    o->target = (uint16_t *)(void *)carve(&at, SEGMENT_ROWS / 2);
    o->position[0] = (uint16_t *)(void *)carve(&at, SEGMENT_ROWS / 2);
    o->position[1] = (uint16_t *)(void *)carve(&at, SEGMENT_ROWS / 2);
    o->order = (uint16_t *)(void *)carve(&at, SEGMENT_ROWS / 2);
    /* k-means does not move rows: the other buffer is free, and holds parts <= SEGMENT_ROWS rows */
    struct kmeans *k = &s->kmeans;
    k->parts = a->desc->parts;
    k->padded = (uint32_t)parts;
    k->across = o->x[1];
    k->centroids = s->vectors[0];
    k->sums = s->vectors[1];
    k->cluster = o->position[0];
    k->counts = (uint32_t *)(void *)carve(&at, parts);
    if (a->desc->kind == DIGEST_CODES)
        s->codes_work = carve(&at, codes_work_floats(s->dim));
    CHECK(at <= a->work + seal_work_floats(s->dim, a->desc));
}

static const uint8_t *from_page(const struct seal_lane *a, uint32_t page)
{
    return a->from + a->from_blocks[page] * a->geo->block_bytes[LANE_SPARSE];
}

/* A page of e4m3 to rows of bf16. */
static void read_page8(const struct seal_state *s, const uint8_t *page, uint16_t *keys,
                       uint16_t *values)
{
    const uint16_t *wide = s->a->tables->bf16;
    for (uint32_t i = 0; i < s->dim; i += 2)
        for (uint32_t r = 0; r < s->rows; r++, page += 2) {
            keys[(size_t)r * s->stride + i] = wide[page[0]];
            keys[(size_t)r * s->stride + i + 1] = wide[page[1]];
        }
    for (uint32_t r = 0; r < s->rows; r += 2)
        for (uint32_t j = 0; j < s->dim; j++, page += 2) {
            values[(size_t)r * s->stride + j] = wide[page[0]];
            values[(size_t)(r + 1) * s->stride + j] = wide[page[1]];
        }
}

/* The inverse: rows order[0 .. R). */
static void write_page8(const struct seal_state *s, const uint16_t *order, uint8_t *page)
{
    const uint8_t *narrow = s->a->tables->e4m3;
    for (uint32_t i = 0; i < s->dim; i += 2)
        for (uint32_t r = 0; r < s->rows; r++, page += 2) {
            const uint16_t *key = s->keys + (size_t)order[r] * s->stride + i;
            page[0] = narrow[key[0] >> 4];
            page[1] = narrow[key[1] >> 4];
        }
    for (uint32_t r = 0; r < s->rows; r += 2) {
        const uint16_t *even = s->values + (size_t)order[r] * s->stride;
        const uint16_t *odd = s->values + (size_t)order[r + 1] * s->stride;
        for (uint32_t j = 0; j < s->dim; j++, page += 2) {
            page[0] = narrow[even[j] >> 4];
            page[1] = narrow[odd[j] >> 4];
        }
    }
}

/* K[dim / 2][R][2] and V[R / 2][dim][2] to rows by position, padded with zeros. */
static void read_rows(const struct seal_state *s)
{
    uint32_t dim = s->dim, rows = s->rows;
    if (s->stride != dim) {
        memset(s->keys, 0, (size_t)SEGMENT_ROWS * s->stride * 2);
        memset(s->values, 0, (size_t)SEGMENT_ROWS * s->stride * 2);
    }
    for (uint32_t p = 0; p < SEGMENT_ROWS / rows; p++) {
        const uint8_t *page = from_page(s->a, p);
        const uint32_t *k = (const void *)page;
        const uint32_t *v = (const void *)(page + (size_t)rows * dim * 2);
        uint16_t *keys = s->keys + (size_t)p * rows * s->stride;
        uint16_t *values = s->values + (size_t)p * rows * s->stride;
        if (s->a->geo->type == KV_E4M3) {
            read_page8(s, page, keys, values);
            continue;
        }
        for (uint32_t i = 0; i < dim / 2; i++)
            for (uint32_t r = 0; r < rows; r++)
                memcpy(keys + (size_t)r * s->stride + 2 * (size_t)i, &k[i * rows + r], 4);
        for (uint32_t r = 0; r < rows; r += 2, v += dim) {
            uint16_t *even = values + (size_t)r * s->stride, *odd = even + s->stride;
            uint32_t j = 0;
            for (; j + V16 <= dim; j += V16) {
                v16i pairs = v16i_load(v + j);
                v16i_store_u16(even + j, pairs);
                v16i_store_u16(odd + j, v16i_shr(pairs, 16));
            }
            for (; j < dim; j++) {
                even[j] = (uint16_t)v[j];
                odd[j] = (uint16_t)(v[j] >> 16);
            }
        }
    }
}

/* The inverse, in the order of storage. */
static void write_rows(const struct seal_state *s)
{
    uint32_t dim = s->dim, rows = s->rows;
    for (uint32_t p = 0; p < SEGMENT_ROWS / rows; p++) {
        uint8_t *page = s->a->to + s->a->to_blocks[p] * s->a->geo->block_bytes[LANE_SPARSE];
        uint32_t *k = (void *)page, *v = (void *)(page + (size_t)rows * dim * 2);
        const uint16_t *order = s->order.order + (size_t)p * rows;
        if (s->a->geo->type == KV_E4M3) {
            write_page8(s, order, page);
            continue;
        }
        for (uint32_t r = 0; r < rows; r++) {
            const uint16_t *key = s->keys + (size_t)order[r] * s->stride;
            for (uint32_t i = 0; i < dim / 2; i++)
                memcpy(&k[i * rows + r], key + 2 * (size_t)i, 4);
        }
        for (uint32_t r = 0; r < rows; r += 2, v += dim) {
            const uint16_t *even = s->values + (size_t)order[r] * s->stride;
            const uint16_t *odd = s->values + (size_t)order[r + 1] * s->stride;
            uint32_t j = 0;
            for (; j + V16 <= dim; j += V16)
                v16i_store(v + j,
                           v16i_or(v16i_load_u16(even + j), v16i_shl(v16i_load_u16(odd + j), 16)));
            for (; j < dim; j++)
                v[j] = even[j] | (uint32_t)odd[j] << 16;
        }
    }
}

/* ---- digests -------------------------------------------------------------------------------- */

/* Partitions that lie in the sinks' pages, or have no rows, have no digest. */
static bool has_digest(const struct seal_state *s, uint32_t p, uint32_t *first, uint32_t *n)
{
    *n = digest_rows(s->a->record, s->a->desc, p, first);
    return *n > 0 && *first + *n > s->a->sink_rows;
}

/* out = mean of rows [first, first + n) of storage but those in `skip`. */
static void rows_mean(const struct seal_state *s, const uint16_t *rows, uint32_t first, uint32_t n,
                      const uint32_t *skip, uint32_t n_skip, float *out)
{
    v16f count = v16_set1((float)(n - n_skip)); /* divided by: exact for equal rows */
    for (uint32_t j = 0; j < s->stride; j += V16) {
        v16f acc = v16_zero();
        for (uint32_t i = 0; i < n; i++) {
            if ((n_skip > 0 && i == skip[0]) || (n_skip > 1 && i == skip[1]))
                continue;
            uint32_t position = s->order.order[first + i];
            acc = v16_add(acc, v16_load_bf16(rows + (size_t)position * s->stride + j));
        }
        v16_store(out + j, v16_div(acc, count));
    }
}

/* The `n_far` rows of a partition farthest from its mean, farthest first, ties to the first. */
static void farthest(const struct seal_state *s, uint32_t first, uint32_t n, const float *mean,
                     uint32_t *far, uint32_t n_far)
{
    float best[2] = {-1.0f, -1.0f};
    far[0] = 0;
    far[1] = 1;
    for (uint32_t i = 0; i < n; i++) {
        const uint16_t *key = s->keys + (size_t)s->order.order[first + i] * s->stride;
        v16f acc = v16_zero();
        for (uint32_t j = 0; j < s->stride; j += V16) {
            v16f x = v16_sub(v16_load_bf16(key + j), v16_load(mean + j));
            acc = v16_fma(x, x, acc);
        }
        float square = v16_hsum(acc);
        if (square > best[0]) {
            best[1] = best[0];
            far[1] = far[0];
            best[0] = square;
            far[0] = i;
        } else if (n_far > 1 && square > best[1]) {
            best[1] = square;
            far[1] = i;
        }
    }
    if (far[1] == far[0]) /* all at least as close as nothing: NaN keys */
        far[1] = far[0] == 0;
}

static void load_key(const struct seal_state *s, uint32_t row, float *out)
{
    const uint16_t *key = s->keys + (size_t)s->order.order[row] * s->stride;
    for (uint32_t j = 0; j < s->stride; j += V16)
        v16_store(out + j, v16_load_bf16(key + j));
}

/* Rounds [parts][stride] floats to a kind of digest vectors. has: which of them count; the others
 * become base. */
static void write_vectors(const struct seal_state *s, const float *x, uint32_t parts,
                          const uint8_t *has, struct digest_vectors out)
{
    uint32_t dim = s->dim, stride = s->stride, n = 0;
    for (uint32_t j = 0; j < stride; j += V16) {
        v16f low = v16_set1(3e38f), high = v16_set1(-3e38f);
        n = 0;
        for (uint32_t p = 0; p < parts; p++)
            if (has[p]) {
                low = v16_min(v16_load(x + (size_t)p * stride + j), low);
                high = v16_max(v16_load(x + (size_t)p * stride + j), high);
                n++;
            }
        v16_store(s->low + j, n > 0 ? low : v16_zero());
        v16_store(s->high + j,
                  n > 0 ? v16_mul(v16_sub(high, low), v16_set1(1.0f / 255)) : v16_zero());
    }
    memcpy(out.base, s->low, dim * sizeof *out.base);
    memcpy(out.step, s->high, dim * sizeof *out.step);
    for (uint32_t j = 0; j < stride; j++)
        s->high[j] = s->high[j] > 1e-30f ? 1.0f / s->high[j] : 0.0f;
    memset(out.tiles, 0, (size_t)digest_tiles(parts) * DIGEST_TILE * dim);
    for (uint32_t p = 0; p < parts; p++)
        for (uint32_t j = 0; j < stride && has[p]; j += V16) {
            v16f t = v16_sub(v16_load(x + (size_t)p * stride + j), v16_load(s->low + j));
            t = v16_mul(t, v16_load(s->high + j));
            t = v16_min(v16_max(t, v16_zero()), v16_set1(255.0f));
            int32_t code[V16];
            v16i_store(code, v16_to_int(t));
            for (uint32_t i = 0; i < V16 && j + i < dim; i += 4) {
                uint32_t four = (uint32_t)code[i] | (uint32_t)code[i + 1] << 8 |
                                (uint32_t)code[i + 2] << 16 | (uint32_t)code[i + 3] << 24;
                memcpy(out.tiles + digest_byte(dim, p, j + i), &four, 4);
            }
        }
}

static void digest_centroids(const struct seal_state *s)
{
    const struct digest_layout *l = &s->a->layout;
    uint32_t parts = l->parts, outliers = l->kinds - 1, stride = s->stride;
    uint8_t has[SEGMENT_ROWS];
    for (uint32_t p = 0; p < parts; p++) {
        uint32_t first, n, far[2];
        has[p] = has_digest(s, p, &first, &n);
        if (!has[p])
            continue;
        float *centroid = s->vectors[0] + (size_t)p * stride;
        rows_mean(s, s->keys, first, n, NULL, 0, centroid);
        if (outliers == 0)
            continue;
        farthest(s, first, n, centroid, far, outliers);
        rows_mean(s, s->keys, first, n, far, outliers, centroid);
        for (uint32_t i = 0; i < outliers; i++)
            load_key(s, first + far[i], s->vectors[1 + i] + (size_t)p * stride);
    }
    for (uint32_t i = 0; i < l->kinds; i++)
        write_vectors(s, s->vectors[i], parts, has, digest_vectors_of(s->a->record, l, i));
    if (l->coarse == 0)
        return;
    for (uint32_t g = 0; g < parts / DIGEST_COARSE; g++) {
        float *out = s->coarse + (size_t)g * stride, n = 0;
        memset(out, 0, stride * sizeof *out);
        for (uint32_t p = g * DIGEST_COARSE; p < (g + 1) * DIGEST_COARSE; p++) {
            const float *x = s->vectors[0] + (size_t)p * stride;
            for (uint32_t j = 0; j < stride && has[p]; j += V16)
                v16_store(out + j, v16_add(v16_load(out + j), v16_load(x + j)));
            n += has[p];
        }
        has[g] = n > 0; /* g <= p: nobody asks again */
        scale_to(out, out, n > 0 ? 1.0f / n : 0.0f, stride);
    }
    write_vectors(s, s->coarse, parts / DIGEST_COARSE, has,
                  digest_vectors_at(s->a->record + l->coarse, s->dim));
}

/* Keys are bf16 here, so their least and greatest are exact. */
static void digest_minmax(const struct seal_state *s)
{
    const struct digest_layout *l = &s->a->layout;
    uint16_t *tiles = digest_bounds(s->a->record, l);
    float *magnitude = digest_magnitude(s->a->record, l);
    memset(magnitude, 0, s->dim * sizeof *magnitude);
    memset(tiles, 0, (size_t)digest_tiles(l->parts) * DIGEST_TILE * s->dim * 4);
    for (uint32_t p = 0; p < l->parts; p++) {
        uint32_t first, n;
        if (!has_digest(s, p, &first, &n))
            continue;
        load_key(s, first, s->low);
        load_key(s, first, s->high);
        for (uint32_t i = 1; i < n; i++) {
            const uint16_t *key = s->keys + (size_t)s->order.order[first + i] * s->stride;
            for (uint32_t j = 0; j < s->stride; j += V16) {
                v16f x = v16_load_bf16(key + j);
                v16_store(s->low + j, v16_min(x, v16_load(s->low + j)));
                v16_store(s->high + j, v16_max(x, v16_load(s->high + j)));
            }
        }
        for (uint32_t c = 0; c < s->dim; c++) {
            size_t at = digest_bound(s->dim, p, c);
            float most =
                fabsf(s->low[c]) > fabsf(s->high[c]) ? fabsf(s->low[c]) : fabsf(s->high[c]);
            tiles[at] = f32_to_bf16(s->low[c]);
            tiles[at + 2 * (size_t)DIGEST_TILE] = f32_to_bf16(s->high[c]);
            magnitude[c] = most > magnitude[c] ? most : magnitude[c];
        }
    }
}

static void digest_values(const struct seal_state *s)
{
    const struct digest_layout *l = &s->a->layout;
    int8_t *rows = (int8_t *)(s->a->record + l->values);
    float *scales = (float *)(void *)(s->a->record + l->scales);
    for (uint32_t p = 0; p < l->parts; p++) {
        uint32_t first, n;
        memset(rows + (size_t)p * s->dim, 0, s->dim);
        scales[p] = 0.0f;
        if (!has_digest(s, p, &first, &n))
            continue;
        float *mean = s->means, inverse;
        rows_mean(s, s->values, first, n, NULL, 0, mean);
        v16f top = v16_zero();
        for (uint32_t j = 0; j < s->stride; j += V16) {
            v16f x = v16_load(mean + j);
            top = v16_max(v16_max(x, v16_sub(v16_zero(), x)), top);
        }
        scales[p] = v16_hmax(top) / 127.0f;
        inverse = scales[p] > 1e-30f ? 1.0f / scales[p] : 0.0f;
        for (uint32_t j = 0; j < s->stride; j += V16) {
            int32_t code[V16];
            v16f x = v16_mul(v16_load(mean + j), v16_set1(inverse));
            x = v16_min(v16_max(x, v16_set1(-127.0f)), v16_set1(127.0f));
            v16i_store(code, v16_to_int(x));
            for (uint32_t i = 0; i < V16 && j + i < s->dim; i++)
                rows[(size_t)p * s->dim + j + i] = (int8_t)code[i];
        }
    }
}

/* What codes are distances from: means as they can be read back. */
static void digest_codes(const struct seal_state *s)
{
    const struct seal_lane *a = s->a;
    const struct digest_layout *l = &a->layout;
    struct digest_vectors v = digest_vectors_of(a->record, l, 0);
    float *means = s->vectors[0];
    for (uint32_t p = 0; p < l->parts; p++)
        for (uint32_t c = 0; c < s->dim; c++)
            means[(size_t)p * s->stride + c] = digest_vector_get(&v, s->dim, p, c);
    memset(s->means, 0, (size_t)l->parts * s->stride * sizeof *s->means);
    for (uint32_t p = 0; p < l->parts && l->values != 0; p++)
        for (uint32_t c = 0; c < s->dim; c++)
            s->means[(size_t)p * s->stride + c] =
                digest_value_scale(a->record, l, p) * (float)digest_value(a->record, l, p)[c];
    a->codes->seal(&(struct codes_lane){.dim = s->dim,
                                        .stride = s->stride,
                                        .parts = l->parts,
                                        .part_rows = s->rows,
                                        .sink_rows = a->sink_rows,
                                        .order = s->order.order,
                                        .keys = s->keys,
                                        .values = s->values,
                                        .means = means,
                                        .v_means = l->values != 0 ? s->means : NULL,
                                        .codes = a->record + l->codes,
                                        .basis = a->first_record + l->codes,
                                        .work = s->codes_work});
}

static void lane(const struct seal_lane *a)
{
    struct seal_state s;
    const struct digest_desc *d = a->desc;
    bool moves = false;
    set_up(&s, a);
    read_rows(&s);
    if (d->order == ORDER_BISECT) {
        order_bisect(&s.order, s.keys, a->sink_rows);
    } else if (d->order == ORDER_KMEANS) {
        memset(s.kmeans.across, 0, (size_t)s.kmeans.padded * s.dim * sizeof *s.kmeans.across);
        order_kmeans(&s.order, &s.kmeans, s.keys, a->sink_rows,
                     (uint16_t *)(void *)(a->record + a->layout.first_row));
    } else {
        for (uint32_t i = 0; i < SEGMENT_ROWS; i++)
            s.order.order[i] = (uint16_t)i;
    }
    if (d->order != ORDER_KEEP)
        memcpy(a->record, s.order.order, SEGMENT_ROWS * sizeof *s.order.order);
    if (d->kind == DIGEST_CENTROID || d->kind == DIGEST_CODES)
        digest_centroids(&s);
    else if (d->kind == DIGEST_BOUNDS)
        digest_minmax(&s);
    if (d->values)
        digest_values(&s);
    if (d->kind == DIGEST_CODES)
        digest_codes(&s);
    for (uint32_t p = 0; p < SEGMENT_ROWS / s.rows; p++)
        moves |= a->from_blocks[p] != a->to_blocks[p];
    if (moves || d->order != ORDER_KEEP)
        write_rows(&s);
}
