/* cuDNN's graph of causal attention with true lengths in device memory: 22 operations, and two more that
 * find pages; with the shape's own lengths 16. Which they are, in which order, cuDNN's own front end showed (reference/kernels.md B6): the
 * library knows the pattern and compiles one kernel for it. */
#include "kernels/cuda/cudnn.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#if __has_include(<cudnn.h>)
#include <cudnn.h>

namespace
{

enum { OLDEST = 90700, MAX_OPS = 32, MAX_PARTS = 160, MAX_CONFIGS = 4, MAX_NAMES = 16 };

/* Names of tensors in the graph. */
enum {
    Q = 1,
    K,
    V,
    O,
    LSE,
    ROWS = 7,
    POSITIONS,
    K_PAGES,
    V_PAGES,
    SCALE = 20,
    HIDDEN,
    BEYOND,
    SHAPE_ROWS,
    SHAPE_POSITIONS
};

typedef cudnnBackendDescriptor_t part;

/* What a run is told without device memory. */
struct by_value {
    float scale, beyond;
    int32_t rows, positions;
};

} /* namespace */

struct cudnn {
    void *library;
    cudnnHandle_t handle;
    size_t (*version)(void);
    cudnnStatus_t (*create_handle)(cudnnHandle_t *);
    cudnnStatus_t (*destroy_handle)(cudnnHandle_t);
    cudnnStatus_t (*set_stream)(cudnnHandle_t, cudaStream_t);
    void (*last_error)(char *, size_t);
    cudnnStatus_t (*create)(cudnnBackendDescriptorType_t, part *);
    cudnnStatus_t (*destroy)(part);
    cudnnStatus_t (*set)(part, cudnnBackendAttributeName_t, cudnnBackendAttributeType_t, int64_t,
                         const void *);
    cudnnStatus_t (*get)(part, cudnnBackendAttributeName_t, cudnnBackendAttributeType_t, int64_t,
                         int64_t *, void *);
    cudnnStatus_t (*finalize)(part);
    cudnnStatus_t (*execute)(cudnnHandle_t, part, part);
    char text[512];
};

struct cudnn_plan {
    struct cudnn *c;
    struct cudnn_shape shape;
    part parts[MAX_PARTS], plan;
    uint32_t n_parts;
    int64_t workspace;
};

namespace
{

/* ---- the library ---- */

bool find_symbols(struct cudnn *c)
{
    const struct {
        const char *name;
        void *to;
    } all[] = {
        {"cudnnGetVersion", &c->version},
        {"cudnnCreate", &c->create_handle},
        {"cudnnDestroy", &c->destroy_handle},
        {"cudnnSetStream", &c->set_stream},
        {"cudnnGetLastErrorString", &c->last_error},
        {"cudnnBackendCreateDescriptor", &c->create},
        {"cudnnBackendDestroyDescriptor", &c->destroy},
        {"cudnnBackendSetAttribute", &c->set},
        {"cudnnBackendGetAttribute", &c->get},
        {"cudnnBackendFinalize", &c->finalize},
        {"cudnnBackendExecute", &c->execute},
    };
    for (size_t i = 0; i < ARRAY_LEN(all); i++) {
        void *found = dlsym(c->library, all[i].name);
        if (found == NULL)
            return false;
        memcpy(all[i].to, &found, sizeof found);
    }
    return true;
}

/* ---- building a graph ----
 *
 * Builders do nothing after the first failure, whose text stays in the library's struct. */

struct builder {
    struct cudnn *c;
    struct cudnn_plan *p;
    const struct cudnn_shape *s;
    part ops[MAX_OPS];
    uint32_t n_ops;
    int64_t next_id;
    bool bad;
};

void must(struct builder *g, cudnnStatus_t st, const char *what)
{
    if (st == CUDNN_STATUS_SUCCESS || g->bad)
        return;
    char text[400] = "";
    g->c->last_error(text, sizeof text);
    snprintf(g->c->text, sizeof g->c->text, "cuDNN: %s: status %d: %.400s", what, (int)st, text);
    g->bad = true;
}

part make(struct builder *g, cudnnBackendDescriptorType_t type)
{
    part p = NULL;
    if (g->bad)
        return NULL;
    CHECK(g->p->n_parts < MAX_PARTS);
    must(g, g->c->create(type, &p), "descriptor");
    g->p->parts[g->p->n_parts++] = p;
    return p;
}

void set(struct builder *g, part p, cudnnBackendAttributeName_t name,
         cudnnBackendAttributeType_t type, int64_t n, const void *v)
{
    if (!g->bad)
        must(g, g->c->set(p, name, type, n, v), "attribute");
}

void set_part(struct builder *g, part p, cudnnBackendAttributeName_t name, part v)
{
    if (v != NULL)
        set(g, p, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &v);
}

part seal(struct builder *g, part p, const char *what)
{
    if (!g->bad)
        must(g, g->c->finalize(p), what);
    return p;
}

struct dims {
    int64_t n[4], stride[4];
};

enum tensor_kind { STORED, VIRTUAL, BY_VALUE };

part tensor(struct builder *g, int64_t id, cudnnDataType_t type, struct dims d,
            enum tensor_kind kind)
{
    part t = make(g, CUDNN_BACKEND_TENSOR_DESCRIPTOR);
    int64_t align = 16;
    bool is_virtual = kind == VIRTUAL, by_value = kind == BY_VALUE;
    if (id == 0)
        id = g->next_id++;
    set(g, t, CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &type);
    set(g, t, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, 4, d.n);
    set(g, t, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, 4, d.stride);
    set(g, t, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, 1, &id);
    set(g, t, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, 1, &align);
    set(g, t, CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, 1, &is_virtual);
    set(g, t, CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, 1, &by_value);
    return seal(g, t, "tensor");
}

/* Dense strides. */
struct dims dense(int64_t a, int64_t b, int64_t c, int64_t d)
{
    return {{a, b, c, d}, {b * c * d, c * d, d, 1}};
}

/* A matrix of scores that nobody stores: [batch][heads][rows][positions]. */
part scores(struct builder *g, cudnnDataType_t type)
{
    const struct cudnn_shape *s = g->s;
    return tensor(g, 0, type, dense(s->batch, s->heads, s->rows, s->positions), VIRTUAL);
}

part row_sums(struct builder *g, int64_t id)
{
    const struct cudnn_shape *s = g->s;
    return tensor(g, id, CUDNN_DATA_FLOAT, dense(s->batch, s->heads, s->rows, 1),
                  id == 0 ? VIRTUAL : STORED);
}

void add_op(struct builder *g, part op, const char *what)
{
    CHECK(g->n_ops < MAX_OPS);
    g->ops[g->n_ops++] = seal(g, op, what);
}

/* y = mode(x, b), or with t mode(x, b, t); axis: of GEN_INDEX. Returns y. */
part pointwise(struct builder *g, cudnnPointwiseMode_t mode, int64_t axis, part x, part b, part t,
               part y)
{
    cudnnDataType_t type = CUDNN_DATA_FLOAT;
    part how = make(g, CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
    set(g, how, CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, 1, &mode);
    set(g, how, CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, 1, &type);
    if (mode == CUDNN_POINTWISE_GEN_INDEX)
        set(g, how, CUDNN_ATTR_POINTWISE_AXIS, CUDNN_TYPE_INT64, 1, &axis);
    seal(g, how, "pointwise");
    part op = make(g, CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
    set_part(g, op, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, how);
    set_part(g, op, CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x);
    set_part(g, op, CUDNN_ATTR_OPERATION_POINTWISE_BDESC, b);
    set_part(g, op, CUDNN_ATTR_OPERATION_POINTWISE_TDESC, t);
    set_part(g, op, CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y);
    add_op(g, op, "pointwise operation");
    return y;
}

part binary(struct builder *g, cudnnPointwiseMode_t mode, part x, part b, cudnnDataType_t type)
{
    return pointwise(g, mode, -1, x, b, NULL, scores(g, type));
}

part reduce(struct builder *g, cudnnReduceTensorOp_t mode, part x)
{
    cudnnDataType_t type = CUDNN_DATA_FLOAT;
    part how = make(g, CUDNN_BACKEND_REDUCTION_DESCRIPTOR), y = row_sums(g, 0);
    set(g, how, CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, 1, &mode);
    set(g, how, CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &type);
    seal(g, how, "reduction");
    part op = make(g, CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
    set_part(g, op, CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x);
    set_part(g, op, CUDNN_ATTR_OPERATION_REDUCTION_YDESC, y);
    set_part(g, op, CUDNN_ATTR_OPERATION_REDUCTION_DESC, how);
    add_op(g, op, "reduction operation");
    return y;
}

/* c = a b; rows, columns, inputs: true numbers of them, or NULL. */
void multiply(struct builder *g, part a, part b, part c, part rows, part columns, part inputs)
{
    cudnnDataType_t type = CUDNN_DATA_FLOAT;
    double zero = 0;
    part how = make(g, CUDNN_BACKEND_MATMUL_DESCRIPTOR);
    set(g, how, CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &type);
    if (columns != NULL)
        set(g, how, CUDNN_ATTR_MATMUL_PADDING_VALUE, CUDNN_TYPE_DOUBLE, 1, &zero);
    seal(g, how, "product");
    part op = make(g, CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
    set_part(g, op, CUDNN_ATTR_OPERATION_MATMUL_ADESC, a);
    set_part(g, op, CUDNN_ATTR_OPERATION_MATMUL_BDESC, b);
    set_part(g, op, CUDNN_ATTR_OPERATION_MATMUL_CDESC, c);
    set_part(g, op, CUDNN_ATTR_OPERATION_MATMUL_DESC, how);
    set_part(g, op, CUDNN_ATTR_OPERATION_MATMUL_GEMM_M_OVERRIDE_DESC, rows);
    set_part(g, op, CUDNN_ATTR_OPERATION_MATMUL_GEMM_N_OVERRIDE_DESC, columns);
    set_part(g, op, CUDNN_ATTR_OPERATION_MATMUL_GEMM_K_OVERRIDE_DESC, inputs);
    add_op(g, op, "product operation");
}

/* K or V: as it lies, or found by pages. turned: dim before positions. */
part keys(struct builder *g, int64_t id, int64_t table_id, part positions, bool turned)
{
    const struct cudnn_shape *s = g->s;
    int64_t n = s->positions, dim = s->dim;
    struct dims d = {{s->batch, s->kv_heads, n, dim},
                     {(int64_t)s->kv_batch, (int64_t)s->kv_head, (int64_t)s->kv_row, 1}};
    if (s->page_rows != 0)
        d = dense(s->batch, 1, n, dim);
    if (turned)
        d = {{d.n[0], d.n[1], dim, n}, {d.stride[0], d.stride[1], 1, d.stride[2]}};
    if (s->page_rows == 0)
        return tensor(g, id, CUDNN_DATA_BFLOAT16, d, STORED);
    int64_t stride = (int64_t)s->page_stride;
    struct dims pages = {{s->n_pages, 1, s->page_rows, dim},
                         {stride, (int64_t)s->page_rows * dim, dim, 1}};
    part container = tensor(g, id, CUDNN_DATA_BFLOAT16, pages, STORED);
    part table =
        tensor(g, table_id, CUDNN_DATA_INT32, dense(s->batch, 1, n / s->page_rows, 1), STORED);
    part y = tensor(g, 0, CUDNN_DATA_BFLOAT16, d, VIRTUAL);
    part op = make(g, CUDNN_BACKEND_OPERATION_PAGED_CACHE_LOAD_DESCRIPTOR);
    set_part(g, op, CUDNN_ATTR_OPERATION_PAGED_CACHE_LOAD_CONTAINER_DESC, container);
    set_part(g, op, CUDNN_ATTR_OPERATION_PAGED_CACHE_LOAD_PAGE_TABLE_DESC, table);
    set_part(g, op, CUDNN_ATTR_OPERATION_PAGED_CACHE_LOAD_SEQUENCE_DESC, positions);
    set_part(g, op, CUDNN_ATTR_OPERATION_PAGED_CACHE_LOAD_YDESC, y);
    add_op(g, op, "pages");
    return y;
}

/* Scores of what exists; everything else is as good as -infinity. */
part mask_missing(struct builder *g, part x, part rows, part positions)
{
    const cudnnDataType_t whole = CUDNN_DATA_INT32, truth = CUDNN_DATA_BOOLEAN;
    part hidden = tensor(g, HIDDEN, CUDNN_DATA_FLOAT, dense(1, 1, 1, 1), BY_VALUE);
    part row = pointwise(g, CUDNN_POINTWISE_GEN_INDEX, 2, x, NULL, NULL, scores(g, whole));
    part pos = pointwise(g, CUDNN_POINTWISE_GEN_INDEX, 3, x, NULL, NULL, scores(g, whole));
    part is_row = binary(g, CUDNN_POINTWISE_CMP_LT, row, rows, truth);
    part is_pos = binary(g, CUDNN_POINTWISE_CMP_LT, pos, positions, truth);
    part exists = binary(g, CUDNN_POINTWISE_LOGICAL_AND, is_row, is_pos, truth);
    return pointwise(g, CUDNN_POINTWISE_BINARY_SELECT, -1, x, hidden, exists,
                     scores(g, CUDNN_DATA_FLOAT));
}

/* Of what is not later than the row. */
part mask_later(struct builder *g, part x, part rows, part positions)
{
    const cudnnDataType_t whole = CUDNN_DATA_INT32, truth = CUDNN_DATA_BOOLEAN;
    part beyond = tensor(g, BEYOND, CUDNN_DATA_FLOAT, dense(1, 1, 1, 1), BY_VALUE);
    part row = pointwise(g, CUDNN_POINTWISE_GEN_INDEX, 2, x, NULL, NULL, scores(g, whole));
    part pos = pointwise(g, CUDNN_POINTWISE_GEN_INDEX, 3, x, NULL, NULL, scores(g, whole));
    row = binary(g, CUDNN_POINTWISE_ADD, row, positions, whole);
    row = binary(g, CUDNN_POINTWISE_SUB, row, rows, whole);
    part seen = binary(g, CUDNN_POINTWISE_CMP_GE, row, pos, truth);
    return pointwise(g, CUDNN_POINTWISE_BINARY_SELECT, -1, x, beyond, seen,
                     scores(g, CUDNN_DATA_FLOAT));
}

part softmax(struct builder *g, part x)
{
    part most = reduce(g, CUDNN_REDUCE_TENSOR_MAX, x);
    x = binary(g, CUDNN_POINTWISE_SUB, x, most, CUDNN_DATA_FLOAT);
    x = binary(g, CUDNN_POINTWISE_EXP, x, NULL, CUDNN_DATA_FLOAT);
    part sum = reduce(g, CUDNN_REDUCE_TENSOR_ADD, x);
    part log = pointwise(g, CUDNN_POINTWISE_LOG, -1, sum, NULL, NULL, row_sums(g, 0));
    pointwise(g, CUDNN_POINTWISE_ADD, -1, most, log, NULL, row_sums(g, LSE));
    return binary(g, CUDNN_POINTWISE_DIV, x, sum, CUDNN_DATA_BFLOAT16);
}

void build_graph(struct builder *g)
{
    const struct cudnn_shape *s = g->s;
    struct dims lengths = dense(s->batch, 1, 1, 1);
    struct dims qd = {{s->batch, s->heads, s->rows, s->dim},
                      {(int64_t)s->q_batch, (int64_t)s->q_head, (int64_t)s->q_row, 1}};
    const cudnnDataType_t whole = CUDNN_DATA_INT32;
    part rows = NULL, positions = NULL; /* where they are the shape's nobody asks */
    if (!s->exact) {
        rows = tensor(g, ROWS, whole, lengths, STORED);
        positions = tensor(g, POSITIONS, whole, lengths, STORED);
    }
    part q = tensor(g, Q, CUDNN_DATA_BFLOAT16, qd, STORED);
    part o = tensor(g, O, CUDNN_DATA_BFLOAT16, qd, STORED);
    part scale = tensor(g, SCALE, CUDNN_DATA_FLOAT, dense(1, 1, 1, 1), BY_VALUE);
    part k = keys(g, K, K_PAGES, positions, true), x = scores(g, CUDNN_DATA_FLOAT);
    multiply(g, q, k, x, rows, positions, NULL);
    x = binary(g, CUDNN_POINTWISE_MUL, x, scale, CUDNN_DATA_FLOAT);
    if (s->exact) {
        part n_rows = tensor(g, SHAPE_ROWS, whole, dense(1, 1, 1, 1), BY_VALUE);
        part n_positions = tensor(g, SHAPE_POSITIONS, whole, dense(1, 1, 1, 1), BY_VALUE);
        x = mask_later(g, x, n_rows, n_positions);
    } else {
        x = mask_later(g, mask_missing(g, x, rows, positions), rows, positions);
    }
    x = softmax(g, x);
    multiply(g, x, keys(g, V, V_PAGES, positions, false), o, rows, NULL, positions);
}

/* The first configuration that cuDNN proposes and can compile. */
void choose_kernel(struct builder *g)
{
    part graph = make(g, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
    set(g, graph, CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, g->n_ops, g->ops);
    set(g, graph, CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, 1, &g->c->handle);
    seal(g, graph, "graph");
    part heur = make(g, CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
    cudnnBackendHeurMode_t mode = CUDNN_HEUR_MODE_A;
    set_part(g, heur, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph);
    set(g, heur, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1, &mode);
    seal(g, heur, "heuristics");
    part configs[MAX_CONFIGS];
    for (int i = 0; i < MAX_CONFIGS; i++)
        configs[i] = make(g, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
    int64_t n = 0;
    if (!g->bad)
        must(g,
             g->c->get(heur, CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR,
                       MAX_CONFIGS, &n, configs),
             "no kernel for this graph");
    if (!g->bad && n == 0)
        must(g, CUDNN_STATUS_NOT_SUPPORTED, "no kernel for this graph");
    for (int64_t i = 0; i < n; i++) {
        g->bad = false;
        part plan = make(g, CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
        set(g, plan, CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, 1, &g->c->handle);
        set_part(g, plan, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, configs[i]);
        seal(g, plan, "compiling");
        int64_t one = 0;
        if (!g->bad)
            must(g,
                 g->c->get(plan, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1,
                           &one, &g->p->workspace),
                 "workspace");
        g->p->plan = plan;
        if (!g->bad)
            return;
    }
}

} /* namespace */

/* ---- the promises of cudnn.h ---- */

struct cudnn *cudnn_open(const char **why)
{
    struct cudnn *c = (struct cudnn *)mem_alloc(sizeof *c);
    *why = NULL;
    c->library = dlopen("libcudnn.so.9", RTLD_NOW | RTLD_LOCAL);
    if (c->library == NULL)
        *why = "libcudnn.so.9 is not found";
    else if (!find_symbols(c))
        *why = "libcudnn.so.9 lacks functions";
    else if (c->version() < OLDEST || c->version() == 91000 || c->version() == 91001)
        *why = "libcudnn.so.9 is older than 9.7, or 9.10.0 or 9.10.1";
    else if (c->create_handle(&c->handle) != CUDNN_STATUS_SUCCESS)
        *why = "cuDNN does not start";
    if (*why == NULL)
        return c;
    cudnn_close(c);
    return NULL;
}

void cudnn_close(struct cudnn *c)
{
    if (c == NULL)
        return;
    if (c->handle != NULL)
        c->destroy_handle(c->handle);
    if (c->library != NULL)
        dlclose(c->library);
    mem_free(c);
}

const char *cudnn_text(const struct cudnn *c)
{
    return c->text;
}

struct cudnn_plan *cudnn_plan_create(struct cudnn *c, const struct cudnn_shape *s)
{
    struct cudnn_plan *p = (struct cudnn_plan *)mem_alloc(sizeof *p);
    p->c = c;
    p->shape = *s;
    struct builder g = {};
    g.c = c;
    g.p = p;
    g.s = &p->shape;
    g.next_id = 100;
    build_graph(&g);
    choose_kernel(&g);
    if (!g.bad)
        return p;
    cudnn_plan_destroy(p);
    return NULL;
}

void cudnn_plan_destroy(struct cudnn_plan *p)
{
    if (p == NULL)
        return;
    while (p->n_parts > 0)
        p->c->destroy(p->parts[--p->n_parts]);
    mem_free(p);
}

size_t cudnn_workspace(const struct cudnn_plan *p)
{
    return (size_t)p->workspace;
}

/* What a plan reads and writes, by name. Returns how many. */
static int64_t name_all(const struct cudnn_plan *p, const struct cudnn_data *d,
                        const struct by_value *v, int64_t *ids, const void **at)
{
    const struct {
        int64_t id;
        const void *at;
        bool wanted;
    } all[] = {
        {Q, d->q, true},
        {K, d->k, true},
        {V, d->v, true},
        {O, d->o, true},
        {LSE, d->lse, true},
        {SCALE, &v->scale, true},
        {BEYOND, &v->beyond, true},
        {ROWS, d->n_rows, !p->shape.exact},
        {POSITIONS, d->n_positions, !p->shape.exact},
        {HIDDEN, &v->beyond, !p->shape.exact},
        {SHAPE_ROWS, &v->rows, p->shape.exact},
        {SHAPE_POSITIONS, &v->positions, p->shape.exact},
        {K_PAGES, d->pages, p->shape.page_rows != 0},
        {V_PAGES, d->pages, p->shape.page_rows != 0},
    };
    static_assert(ARRAY_LEN(all) <= MAX_NAMES, "room for names");
    int64_t n = 0;
    for (size_t i = 0; i < ARRAY_LEN(all); i++)
        if (all[i].wanted) {
            ids[n] = all[i].id;
            at[n++] = all[i].at;
        }
    return n;
}

const char *cudnn_run(struct cudnn *c, struct cudnn_plan *p, const struct cudnn_data *d,
                      cudaStream_t stream)
{
    const struct by_value v = {d->scale, -1e38f, (int32_t)p->shape.rows,
                               (int32_t)p->shape.positions};
    int64_t ids[MAX_NAMES];
    const void *at[MAX_NAMES];
    int64_t n = name_all(p, d, &v, ids, at);
    part pack = NULL;
    cudnnStatus_t st = c->set_stream(c->handle, stream);
    if (st == CUDNN_STATUS_SUCCESS)
        st = c->create(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, &pack);
    if (st == CUDNN_STATUS_SUCCESS)
        st = c->set(pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, n, ids);
    if (st == CUDNN_STATUS_SUCCESS)
        st = c->set(pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, n, at);
    if (st == CUDNN_STATUS_SUCCESS)
        st = c->set(pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &d->workspace);
    if (st == CUDNN_STATUS_SUCCESS)
        st = c->finalize(pack);
    if (st == CUDNN_STATUS_SUCCESS)
        st = c->execute(c->handle, p->plan, pack);
    if (pack != NULL)
        c->destroy(pack);
    if (st == CUDNN_STATUS_SUCCESS)
        return NULL;
    char text[400] = "";
    c->last_error(text, sizeof text);
    snprintf(c->text, sizeof c->text, "cuDNN: run: status %d: %.400s", (int)st, text);
    return c->text;
}

#else

struct cudnn *cudnn_open(const char **why)
{
    *why = "this library was built without cudnn.h";
    return NULL;
}

void cudnn_close(struct cudnn *c)
{
    (void)c;
}

struct cudnn_plan *cudnn_plan_create(struct cudnn *c, const struct cudnn_shape *s)
{
    (void)c;
    (void)s;
    return NULL;
}

void cudnn_plan_destroy(struct cudnn_plan *p)
{
    (void)p;
}

size_t cudnn_workspace(const struct cudnn_plan *p)
{
    (void)p;
    return 0;
}

const char *cudnn_text(const struct cudnn *c)
{
    (void)c;
    return "";
}

const char *cudnn_run(struct cudnn *c, struct cudnn_plan *p, const struct cudnn_data *d,
                      cudaStream_t stream)
{
    (void)c;
    (void)p;
    (void)d;
    (void)stream;
    return "no cuDNN";
}

#endif
