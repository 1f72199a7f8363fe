/* Weights in tiles: packing at load, and single rows back out for `embed`.
 *
 * Every number keeps its exact value: nibbles stay nibbles, 5-, 6- and 8-bit numbers become bytes,
 * scales stay f16 where the file has f16 and become f32 where they are products (Q4_K, Q6_K). So a
 * row read back here equals dtype_decode's to the bit. Packing runs on all workers, because the time
 * from start to ready is promised; it is bound by the scattered byte stores, about 0.1 s per 100 MB
 * and core. */
#include "kernels/core/dummy.h"
#include "kernels/cpu/linear.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>

const struct tile_info tile_infos[TILE_FORMS] = {
#define X(name, scales, values) [name] = {scales, values},
    TILE_FORM_LIST(X)
#undef X
};

/* 32 numbers of one row between file and tile. */
struct block32 {
    float d[2], m; /* d[1]: of the second 16 */
    uint8_t q[TILE_COLS];
};

static float read_f16(const uint8_t *p)
{
    uint16_t h;
    memcpy(&h, p, sizeof h);
    return f16_to_f32(h);
}

static void read_nibbles(const uint8_t *qs, uint8_t *q)
{
    for (int j = 0; j < 16; j++) {
        q[j] = qs[j] & 15;
        q[j + 16] = qs[j] >> 4;
    }
}

static void read_q5(const uint8_t *src, bool has_min, struct block32 *b)
{
    const uint8_t *qs = src + (has_min ? 8 : 6);
    uint32_t qh;
    memcpy(&qh, qs - 4, sizeof qh);
    read_nibbles(qs, b->q);
    for (int j = 0; j < TILE_COLS; j++)
        b->q[j] = (uint8_t)((b->q[j] | (qh >> j & 1) << 4) + (has_min ? 128 : 128 - 16));
}

/* Sub-block j (of 8) of a Q4_K block. */
static void read_q4_k(const uint8_t *src, uint32_t j, struct block32 *b)
{
    const uint8_t *s = src + 4, *qs = src + 16 + 32 * (size_t)(j / 2);
    int sc = j < 4 ? s[j] & 63 : (s[j + 4] & 15) | (s[j - 4] >> 6) << 4;
    int mn = j < 4 ? s[j + 4] & 63 : (s[j + 4] >> 4) | (s[j] >> 6) << 4;
    b->d[0] = read_f16(src) * (float)sc;
    b->m = -(read_f16(src + 2) * (float)mn);
    for (int l = 0; l < TILE_COLS; l++)
        b->q[l] = j & 1 ? qs[l] >> 4 : qs[l] & 15;
}

/* Numbers 32 j .. 32 j + 31 of a Q6_K block. */
static void read_q6_k(const uint8_t *src, uint32_t j, struct block32 *b)
{
    size_t half = j / 4, part = j % 4;
    const uint8_t *ql = src + 64 * half + 32 * (part & 1), *qh = src + 128 + 32 * half;
    const int8_t *sc = (const int8_t *)(src + 192 + 8 * half + 2 * part);
    float d = read_f16(src + 208);
    b->d[0] = d * (float)sc[0];
    b->d[1] = d * (float)sc[1];
    for (int l = 0; l < TILE_COLS; l++) {
        int low = part < 2 ? ql[l] & 15 : ql[l] >> 4;
        b->q[l] = (uint8_t)((low | (qh[l] >> 2 * part & 3) << 4) - 32 + 128);
    }
}

/* Block `at` (of 32 numbers) of a row. */
static void read_block(enum dtype t, const uint8_t *row, uint32_t at, struct block32 *b)
{
    const struct dtype_info *info = dtype_find(t);
    const uint8_t *src = row + (size_t)at * TILE_COLS / info->block * info->bytes;
    *b = (struct block32){0};
    switch (t) {
    case DTYPE_Q4_K: read_q4_k(src, at % 8, b); return;
    case DTYPE_Q6_K: read_q6_k(src, at % 8, b); return;
    case DTYPE_Q4_0:
        read_nibbles(src + 2, b->q);
        b->m = -8 * read_f16(src);
        break;
    case DTYPE_Q4_1:
        read_nibbles(src + 4, b->q);
        b->m = read_f16(src + 2);
        break;
    case DTYPE_Q5_0: read_q5(src, false, b); break;
    case DTYPE_Q5_1:
        read_q5(src, true, b);
        b->m = read_f16(src + 2);
        break;
    case DTYPE_Q8_0:
        for (int j = 0; j < TILE_COLS; j++)
            b->q[j] = src[2 + j] ^ 0x80;
        break;
    default: CHECK(!"a block format");
    }
    b->d[0] = read_f16(src);
}

static void put_f16(uint8_t *p, float f)
{
    uint16_t h = f32_to_f16(f); /* exact: it was an f16, or 8 times one that fits */
    memcpy(p, &h, sizeof h);
}

static void put_block(enum tile_form form, uint8_t *scales, uint8_t *values, uint32_t row,
                      const struct block32 *b)
{
    bool nibbles = form == TILE_Q4 || form == TILE_Q4_WIDE;
    for (uint32_t g = 0; g < (nibbles ? 4u : 8u); g++)
        for (uint32_t c = 0; c < 4; c++)
            values[g * 64 + row * 4 + c] =
                nibbles ? (uint8_t)(b->q[g * 4 + c] | b->q[16 + g * 4 + c] << 4) : b->q[g * 4 + c];
    if (form == TILE_Q4_WIDE || form == TILE_Q8_HALF) {
        memcpy(scales + row * sizeof(float), &b->d[0], sizeof(float));
        memcpy(scales + (TILE_ROWS + row) * sizeof(float), form == TILE_Q4_WIDE ? &b->m : &b->d[1],
               sizeof(float));
        return;
    }
    put_f16(scales + row * sizeof(uint16_t), b->d[0]);
    if (form != TILE_Q8)
        put_f16(scales + (TILE_ROWS + row) * sizeof(uint16_t), b->m);
}

/* Scales and values of tile `at` of a group. */
static void find_tile(enum tile_form form, uint8_t *group, uint32_t n_blocks, uint32_t at,
                      uint8_t **scales, uint8_t **values)
{
    const struct tile_info *info = &tile_infos[form];
    if (form == TILE_Q8) {
        *values = group + (size_t)at * info->value_bytes;
        *scales = group + (size_t)n_blocks * info->value_bytes + (size_t)at * info->scale_bytes;
        return;
    }
    *scales = group + (size_t)at * (info->value_bytes + info->scale_bytes);
    *values = *scales + info->scale_bytes;
}

/* Rows of a float type: number k of row r goes to [k][r]. False: not finite. */
static bool pack_float_row(const struct weight_tiles *p, const struct weight_part *from,
                           const uint8_t *src, uint32_t cols, uint8_t *group, uint32_t row)
{
    uint32_t bytes = p->form == TILE_F32 ? 4 : 2;
    for (uint32_t k = 0; k < cols; k++) {
        float v;
        dtype_decode(from->type, src + (size_t)k * bytes, 1, &v);
        if (!isfinite(v))
            return false;
        memcpy(group + ((size_t)k * TILE_ROWS + row) * bytes, src + (size_t)k * bytes, bytes);
    }
    return true;
}

/* A row without a file. */
static void make_row(const struct weight_part *from, uint32_t cols, uint32_t row, uint8_t *group)
{
    const uint64_t first = row * dummy_row_words(cols);
    const float scale = dummy_scale(cols);
    uint64_t word = 0;
    for (uint32_t k = 0; k < cols; k++) {
        if (k % 4 == 0)
            word = dummy_word(from->seed, first + k / 4);
        uint16_t v = f32_to_bf16(dummy_value(word, k % 4, scale));
        memcpy(group + ((size_t)k * TILE_ROWS + row % TILE_ROWS) * sizeof v, &v, sizeof v);
    }
}

static bool pack_row(const struct weight *w, const struct weight_tiles *p,
                     const struct weight_part *from, uint32_t row)
{
    if (from->data == NULL) {
        make_row(from, w->cols, row, p->groups + row / TILE_ROWS * p->group_bytes);
        return true;
    }
    uint32_t file_row = from->row_from != NULL ? from->row_from[row] : row;
    const uint8_t *src =
        (const uint8_t *)from->data + file_row * dtype_row_bytes(from->type, w->cols);
    uint8_t *group = p->groups + row / TILE_ROWS * p->group_bytes;
    if (tile_is_float(p->form))
        return pack_float_row(p, from, src, w->cols, group, row % TILE_ROWS);
    for (uint32_t i = 0; i < w->n_blocks; i++) {
        struct block32 b;
        uint8_t *scales, *values;
        read_block(from->type, src, i, &b);
        if (!isfinite(b.d[0]) || !isfinite(b.d[1]) || !isfinite(b.m))
            return false;
        find_tile(p->form, group, w->n_blocks, i, &scales, &values);
        put_block(p->form, scales, values, row % TILE_ROWS, &b);
    }
    return true;
}

struct pack_job {
    struct pool *pool;
    const struct weight *w;
    const struct weight_desc *desc;
    atomic_uint bad_row; /* of the whole weight; UINT32_MAX: none */
};

static void pack_groups(void *arg, uint32_t worker)
{
    (void)worker;
    struct pack_job *job = arg;
    const struct weight *w = job->w;
    for (uint32_t g; (g = pool_next(job->pool, w->n_groups)) < w->n_groups;) {
        uint32_t part = 0;
        while (g >= w->parts[part].first_group + w->parts[part].n_groups)
            part++;
        const struct weight_tiles *p = &w->parts[part];
        uint32_t first = (g - p->first_group) * TILE_ROWS;
        for (uint32_t r = first; r < p->rows && r < first + TILE_ROWS; r++)
            if (!pack_row(w, p, &job->desc->parts[part], r))
                atomic_store(&job->bad_row, p->first_row + r);
    }
}

/* A Q4_0 block is a Q4_1 block with m = -8 d, if that is still an f16. */
static bool eight_d_fits(const struct weight_part *p, uint32_t cols)
{
    size_t row_bytes = dtype_row_bytes(DTYPE_Q4_0, cols);
    for (uint32_t r = 0; r < p->rows; r++) {
        const uint8_t *row = p->data;
        row += (p->row_from != NULL ? p->row_from[r] : r) * row_bytes;
        for (size_t at = 0; at < row_bytes; at += 18)
            if (!(fabsf(read_f16(row + at)) <= 8188))
                return false;
    }
    return true;
}

static enum tile_form choose_form(const struct weight_part *p, uint32_t cols)
{
    switch (p->type) {
    case DTYPE_F32: return TILE_F32;
    case DTYPE_F16: return TILE_F16;
    case DTYPE_BF16: return TILE_BF16;
    case DTYPE_Q4_0: return eight_d_fits(p, cols) ? TILE_Q4 : TILE_Q4_WIDE;
    case DTYPE_Q4_1: return TILE_Q4;
    case DTYPE_Q5_0: return TILE_Q8;
    case DTYPE_Q5_1: return TILE_Q8_MIN;
    case DTYPE_Q8_0: return TILE_Q8;
    case DTYPE_Q4_K: return TILE_Q4_WIDE;
    case DTYPE_Q6_K: return TILE_Q8_HALF;
    }
    CHECK(!"a known dtype");
    return TILE_F32;
}

/* Shapes of all parts; the bytes they need. */
static status plan_parts(struct weight *w, const struct weight_desc *d)
{
    for (uint32_t i = 0; i < d->n_parts; i++) {
        const struct weight_part *from = &d->parts[i];
        const struct dtype_info *info = dtype_find((uint32_t)from->type);
        if (info == NULL || d->cols == 0 || d->cols % info->block != 0)
            return err(ERR_FORMAT, "%s: rows of %u numbers cannot be of type %s", from->name,
                       d->cols, info != NULL ? info->name : "?");
        CHECK(from->data != NULL || (from->type == DTYPE_BF16 && from->row_from == NULL));
        struct weight_tiles *p = &w->parts[i];
        p->form = choose_form(from, d->cols);
        p->rows = from->rows;
        p->first_row = w->rows;
        p->first_group = w->n_groups;
        p->n_groups = (from->rows + TILE_ROWS - 1) / TILE_ROWS;
        p->group_bytes = tile_group_bytes(p->form, w->n_blocks);
        w->rows += p->rows;
        w->n_groups += p->n_groups;
        w->bytes += p->n_groups * p->group_bytes;
        *(tile_is_float(p->form) ? &w->any_float : &w->any_int) = true;
    }
    return OK;
}

static status pack_all(struct cpu_backend *b, struct weight *w, const struct weight_desc *d)
{
    struct pack_job job = {.pool = b->pool, .w = w, .desc = d};
    atomic_init(&job.bad_row, UINT32_MAX);
    pool_run(b->pool, pack_groups, &job);
    uint32_t bad = atomic_load(&job.bad_row);
    if (bad == UINT32_MAX)
        return OK;
    uint32_t part = 0;
    while (bad >= w->parts[part].first_row + w->parts[part].rows)
        part++;
    return err(ERR_FORMAT, "%s: output row %u holds a scale that is not a finite number",
               d->parts[part].name, bad - w->parts[part].first_row);
}

status cpu_weight_create(struct backend *be, const struct weight_desc *d, struct weight **out)
{
    struct cpu_backend *b = (struct cpu_backend *)be;
    CHECK(d->n_parts >= 1 && d->n_parts <= ARRAY_LEN(d->parts));
    struct weight *w = mem_alloc(sizeof *w);
    w->cols = d->cols;
    w->n_blocks = (d->cols + TILE_COLS - 1) / TILE_COLS;
    w->n_parts = d->n_parts;
    status st = plan_parts(w, d);
    if (st == OK) {
        w->memory = be->ops->alloc(be, w->bytes);
        st = w->memory != NULL ? cpu_linear_reserve(b, w) : ERR_MEMORY;
    }
    uint8_t *at = w->memory;
    for (uint32_t i = 0; st == OK && i < w->n_parts; i++) {
        w->parts[i].groups = at;
        at += w->parts[i].n_groups * w->parts[i].group_bytes;
    }
    if (st == OK)
        st = pack_all(b, w, d);
    if (st != OK) {
        cpu_weight_destroy(be, w);
        return st;
    }
    *out = w;
    return OK;
}

void cpu_weight_destroy(struct backend *be, struct weight *w)
{
    if (w == NULL)
        return;
    be->ops->free(be, w->memory, w->bytes);
    mem_free(w);
}

size_t cpu_weight_bytes(const struct weight *w)
{
    return w->bytes;
}

/* 32 numbers of one row, as dtype_decode gives them. */
static void unpack_block(enum tile_form form, const uint8_t *scales, const uint8_t *values,
                         uint32_t row, float *y)
{
    bool nibbles = form == TILE_Q4 || form == TILE_Q4_WIDE;
    float d[2], m = 0;
    if (form == TILE_Q4_WIDE || form == TILE_Q8_HALF) {
        memcpy(&d[0], scales + row * sizeof(float), sizeof(float));
        memcpy(&d[1], scales + (TILE_ROWS + row) * sizeof(float), sizeof(float));
        m = nibbles ? d[1] : 0;
    } else {
        d[0] = read_f16(scales + row * sizeof(uint16_t));
        m = form == TILE_Q8 ? 0 : read_f16(scales + (TILE_ROWS + row) * sizeof(uint16_t));
    }
    if (form != TILE_Q8_HALF)
        d[1] = d[0];
    for (uint32_t k = 0; k < TILE_COLS; k++) {
        uint8_t v = values[(nibbles ? k / 4 % 4 : k / 4) * 64 + row * 4 + k % 4];
        int q = !nibbles ? (int)v - 128 : k < 16 ? v & 15 : v >> 4;
        y[k] = d[k / 16] * (float)q + m;
    }
}

static void unpack_row(const struct weight *w, uint32_t row, float *y)
{
    const struct weight_tiles *p = w->parts;
    CHECK(row < w->rows);
    while (row >= p->first_row + p->rows)
        p++;
    row -= p->first_row;
    uint8_t *group = p->groups + row / TILE_ROWS * p->group_bytes;
    uint32_t bytes = p->form == TILE_F32 ? 4 : 2;
    enum dtype t = p->form == TILE_F32 ? DTYPE_F32 : p->form == TILE_F16 ? DTYPE_F16 : DTYPE_BF16;
    if (tile_is_float(p->form)) {
        for (uint32_t k = 0; k < w->cols; k++)
            dtype_decode(t, group + ((size_t)k * TILE_ROWS + row % TILE_ROWS) * bytes, 1, y + k);
        return;
    }
    for (uint32_t i = 0; i < w->n_blocks; i++) {
        uint8_t *scales, *values;
        find_tile(p->form, group, w->n_blocks, i, &scales, &values);
        unpack_block(p->form, scales, values, row % TILE_ROWS, y + (size_t)i * TILE_COLS);
    }
}

/* A row is some hundred numbers: not worth waking the workers. */
void cpu_embed(struct backend *be, const struct embed_args *a)
{
    (void)be;
    for (uint32_t i = 0; i < a->n_rows; i++)
        unpack_row(a->table, a->tokens[i], (float *)a->out + (size_t)i * a->table->cols);
}
