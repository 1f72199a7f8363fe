/* A plan from a config.json of Hugging Face (reference/models.md 2.4): the shape of a model whose weights
 * are made up.
 *
 * The text is a stranger: its size and depth are bounded before cJSON sees it, every number is checked
 * for being there, for its type and for its range (the same ranges as for GGUF) before anything is
 * computed from it, and what would change the model and is not served is refused by name. */
#include "engine/model/internal.h"
#include "engine/text/chat.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { FILE_MAX = 1 << 20, DEPTH_MAX = 32, NAME_BYTES = 64, WHOLE = 1 };

struct reader {
    const char *name; /* for errors */
    const cJSON *root;
};

/* ---- the text ---- */

static bool depth_ok(const char *p)
{
    int depth = 0;
    for (bool quoted = false; *p != '\0'; p++) {
        if (quoted) {
            if (*p == '\\' && p[1] != '\0')
                p++;
            else
                quoted = *p != '"';
            continue;
        }
        quoted = *p == '"';
        depth += (*p == '{' || *p == '[') - (*p == '}' || *p == ']');
        if (depth > DEPTH_MAX)
            return false;
    }
    return true;
}

/* cJSON takes a key twice and answers with the first one. */
static status check_twice(const struct reader *r)
{
    for (const cJSON *v = r->root->child; v != NULL; v = v->next)
        for (const cJSON *w = r->root->child; w != v; w = w->next)
            if (strcmp(v->string, w->string) == 0)
                return err(ERR_FORMAT, "%s: \"%.64s\" is there twice", r->name, v->string);
    return OK;
}

static status parse(struct reader *r, const char *text, size_t len)
{
    const char *end = text;
    enum { KEYS_MAX = 4096 };
    if (len >= 4 && memcmp(text, "GGUF", 4) == 0)
        return err(ERR_ARG,
                   "%s: a GGUF file, whose weights are served without --load-format dummy; "
                   "weights are made up for a config.json",
                   r->name);
    if (len > FILE_MAX)
        return err(ERR_FORMAT, "%s: larger than 1 MiB: not a config.json", r->name);
    if (strlen(text) != len)
        return err(ERR_FORMAT, "%s: not a text", r->name);
    if (!depth_ok(text))
        return err(ERR_FORMAT, "%s: values are nested deeper than %d", r->name, DEPTH_MAX);
    cJSON *root = cJSON_ParseWithLengthOpts(text, len + 1, &end, true);
    unsigned line = 1;
    for (const char *p = text; p < end; p++)
        line += *p == '\n';
    r->root = root;
    if (root == NULL)
        return err(ERR_FORMAT, "%s: line %u: not JSON", r->name, line);
    if (!cJSON_IsObject(root))
        return err(ERR_FORMAT, "%s: must be a JSON object", r->name);
    if (cJSON_GetArraySize(root) > KEYS_MAX)
        return err(ERR_FORMAT, "%s: more than %d keys", r->name, KEYS_MAX);
    return check_twice(r);
}

/* ---- members ---- */

/* NULL: absent, or null, which means the same. */
static const cJSON *member(const cJSON *o, const char *key)
{
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(o, key);
    return cJSON_IsNull(v) ? NULL : v;
}

static const char *text_of(const cJSON *v) /* "": not a string */
{
    return v != NULL && cJSON_IsString(v) ? v->valuestring : "";
}

static bool is_text(const cJSON *v, const char *text)
{
    return cJSON_IsString(v) && strcmp(text_of(v), text) == 0;
}

static status read_number(const struct reader *r, const cJSON *o, const char *key, double lo,
                          double hi, int whole, double *out)
{
    const cJSON *v = member(o, key);
    const char *kind = whole ? "a whole number" : "a number";
    if (v == NULL)
        return err(ERR_FORMAT, "%s: \"%s\" is missing", r->name, key);
    if (!cJSON_IsNumber(v))
        return err(ERR_FORMAT, "%s: \"%s\" must be %s from %.15g to %.15g", r->name, key, kind, lo,
                   hi);
    double x = v->valuedouble;
    if (!(x >= lo && x <= hi) || (whole && x != floor(x)))
        return err(ERR_FORMAT, "%s: \"%s\" is %.15g, must be %s from %.15g to %.15g", r->name, key,
                   x, kind, lo, hi);
    *out = x;
    return OK;
}

static status read_number_or(const struct reader *r, const cJSON *o, const char *key, double lo,
                             double hi, double fallback, double *out)
{
    *out = fallback;
    return member(o, key) == NULL ? OK : read_number(r, o, key, lo, hi, 0, out);
}

static status read_count(const struct reader *r, const char *key, uint32_t lo, uint32_t hi,
                         uint32_t *out)
{
    double x = 0;
    TRY(read_number(r, r->root, key, lo, hi, WHOLE, &x));
    *out = (uint32_t)x;
    return OK;
}

static status read_count_or(const struct reader *r, const char *key, uint32_t lo, uint32_t hi,
                            uint32_t fallback, uint32_t *out)
{
    *out = fallback;
    return member(r->root, key) == NULL ? OK : read_count(r, key, lo, hi, out);
}

/* A switch that is off, or absent; on, it would be another model. */
static status must_be_off(const struct reader *r, const char *key)
{
    const cJSON *v = member(r->root, key);
    if (v == NULL || cJSON_IsFalse(v))
        return OK;
    return err(ERR_FORMAT, "%s: \"%s\" is not served: it must be false", r->name, key);
}

/* ---- what the model is ---- */

static status read_family(struct plan *p, const struct reader *r)
{
    const cJSON *classes = member(r->root, "architectures"), *type = member(r->root, "model_type");
    const cJSON *first = cJSON_IsArray(classes) ? classes->child : NULL;
    if (cJSON_IsString(first))
        p->family = family_of_class(text_of(first));
    else if (cJSON_IsString(type))
        p->family = family_of_type(text_of(type));
    else
        return err(ERR_FORMAT, "%s: neither \"architectures\" nor \"model_type\" names the model",
                   r->name);
    if (p->family != NULL)
        return OK;
    return err(ERR_FORMAT, "%s: the architecture is \"%.64s\"; spind serves " FAMILY_NAMES, r->name,
               text_of(cJSON_IsString(first) ? first : type));
}

static status check_layer_types(const struct reader *r)
{
    const cJSON *list = member(r->root, "layer_types"), *v = NULL;
    cJSON_ArrayForEach(v, list) if (!is_text(v, "full_attention")) return err(
        ERR_FORMAT, "%s: \"layer_types\" other than full_attention are not served", r->name);
    return OK;
}

/* Qwen names a window and does not use it; Mistral uses the one that it names. */
static status check_window(const struct reader *r)
{
    const cJSON *used = member(r->root, "use_sliding_window");
    if (member(r->root, "sliding_window") == NULL || cJSON_IsFalse(used))
        return OK;
    return err(ERR_FORMAT, "%s: \"sliding_window\" is not served: it must be null", r->name);
}

static status check_strangers(const struct reader *r)
{
    const cJSON *act = member(r->root, "hidden_act");
    double part;
    if (act != NULL && !is_text(act, "silu"))
        return err(ERR_FORMAT, "%s: \"hidden_act\" is not served: it must be \"silu\"", r->name);
    TRY(must_be_off(r, "attention_bias"));
    TRY(must_be_off(r, "mlp_bias"));
    if (member(r->root, "quantization_config") != NULL)
        return err(ERR_FORMAT, "%s: \"quantization_config\" is not served: weights are bf16",
                   r->name);
    TRY(read_number_or(r, r->root, "partial_rotary_factor", 1, 1, 1, &part));
    TRY(check_window(r));
    return check_layer_types(r);
}

static status read_heads(struct plan *p, const struct reader *r)
{
    struct model_shape *s = &p->shape;
    TRY(read_count(r, "num_attention_heads", 1, MAX_HEADS, &s->heads));
    TRY(read_count_or(r, "num_key_value_heads", 1, MAX_HEADS, s->heads, &s->kv_heads));
    if (s->heads % s->kv_heads != 0)
        return err(ERR_FORMAT, "%s: %u heads cannot share %u KV heads evenly", r->name, s->heads,
                   s->kv_heads);
    if (member(r->root, "head_dim") == NULL && s->hidden % s->heads != 0)
        return err(ERR_FORMAT, "%s: \"hidden_size\" %u does not divide into %u heads", r->name,
                   s->hidden, s->heads);
    TRY(read_count_or(r, "head_dim", 2, MAX_HEAD_DIM, s->hidden / s->heads, &s->head_dim));
    if (s->head_dim % 2 != 0 || s->head_dim < 2 || s->head_dim > MAX_HEAD_DIM)
        return err(ERR_FORMAT, "%s: a head has %u numbers, allowed are even ones up to %d", r->name,
                   s->head_dim, (int)MAX_HEAD_DIM);
    p->attn_scale = 1.0f / sqrtf((float)s->head_dim);
    return OK;
}

static status read_llama3(struct plan *p, const struct reader *r, const cJSON *o)
{
    struct rope_llama3 *l = &p->llama3;
    TRY(read_number(r, o, "low_freq_factor", 1e-3, 1e6, 0, &l->low));
    TRY(read_number(r, o, "high_freq_factor", 1e-3, 1e6, 0, &l->high));
    TRY(read_number(r, o, "original_max_position_embeddings", 1, MAX_POSITIONS, WHOLE,
                    &l->original));
    if (l->high <= l->low)
        return err(ERR_FORMAT, "%s: \"high_freq_factor\" %g must be above \"low_freq_factor\" %g",
                   r->name, l->high, l->low);
    return read_number(r, o, "factor", 1e-3, 1e6, 0, &l->factor);
}

/* rope_theta and rope_scaling, or rope_parameters with both in it. */
static status read_rope(struct plan *p, const struct reader *r)
{
    const cJSON *both = member(r->root, "rope_parameters"), *o = member(r->root, "rope_scaling");
    const char *key = both != NULL ? "rope_parameters" : "rope_scaling";
    double theta, divisor = 1;
    if (both != NULL && member(both, "full_attention") != NULL)
        both = member(both, "full_attention");
    o = both != NULL ? both : o;
    if (o != NULL && !cJSON_IsObject(o))
        return err(ERR_FORMAT, "%s: \"%s\" must be an object or null", r->name, key);
    TRY(read_number_or(r, both != NULL ? both : r->root, "rope_theta", 1.0 + 1e-6, 1e12, 10000,
                       &theta));
    p->shape.rope_base = (float)theta;
    p->rope_divisor = 1;
    const cJSON *type = o == NULL ? NULL : member(o, "rope_type");
    type = type == NULL && o != NULL ? member(o, "type") : type;
    if (o == NULL || (type == NULL && o == both) || is_text(type, "default"))
        return OK;
    if (is_text(type, "llama3"))
        return read_llama3(p, r, o);
    if (!is_text(type, "linear"))
        return err(ERR_FORMAT,
                   "%s: \"%s\": rope_type \"%.32s\" is not served; default, linear and llama3 are",
                   r->name, key, text_of(type));
    TRY(read_number(r, o, "factor", 1e-3, 1e6, 0, &divisor));
    p->rope_divisor = (float)divisor;
    return OK;
}

static status read_shape(struct plan *p, const struct reader *r)
{
    struct model_shape *s = &p->shape;
    double eps;
    TRY(read_count(r, "num_hidden_layers", 1, MAX_LAYERS, &s->layers));
    TRY(read_count(r, "hidden_size", 1, MAX_HIDDEN, &s->hidden));
    TRY(read_count(r, "intermediate_size", 1, MAX_FF, &s->ff));
    TRY(read_count(r, "vocab_size", TOKENIZER_NUMBERED_MIN, MAX_VOCAB, &s->vocab));
    TRY(read_count(r, "max_position_embeddings", 1, MAX_POSITIONS, &s->max_positions));
    TRY(read_number_or(r, r->root, "rms_norm_eps", 1e-12, 0.1, 1e-6, &eps));
    s->norm_eps = (float)eps;
    TRY(read_heads(p, r));
    return read_rope(p, r);
}

/* ---- tensors without data ---- */

struct maker {
    struct plan *p;
    size_t n;
};

static const struct gguf_tensor *make(struct maker *k, uint32_t cols, uint32_t rows,
                                      const char *name)
{
    struct gguf_tensor *t = &k->p->made[k->n];
    char *at = k->p->names + k->n++ * NAME_BYTES;
    snprintf(at, NAME_BYTES, "%s", name);
    *t = (struct gguf_tensor){.name = {at, strlen(at)},
                              .type = DTYPE_BF16,
                              .n_dims = rows > 0 ? 2 : 1,
                              .ne = {cols, rows > 0 ? rows : 1, 1, 1},
                              .bytes = dtype_row_bytes(DTYPE_BF16, cols) * (rows > 0 ? rows : 1)};
    return t;
}

static const struct gguf_tensor *make_of(struct maker *k, uint32_t layer, uint32_t cols,
                                         uint32_t rows, const char *name)
{
    char full[NAME_BYTES];
    snprintf(full, sizeof full, "blk.%u.%s", layer, name);
    return make(k, cols, rows, full);
}

static void make_layer(struct maker *k, uint32_t i)
{
    const struct plan *p = k->p;
    const struct model_shape *s = &p->shape;
    uint32_t q = s->heads * s->head_dim, kv = s->kv_heads * s->head_dim;
    struct plan_layer *l = &k->p->layers[i];
    l->attn_norm = make_of(k, i, s->hidden, 0, "attn_norm.weight");
    l->ffn_norm = make_of(k, i, s->hidden, 0, "ffn_norm.weight");
    l->q = make_of(k, i, s->hidden, q, "attn_q.weight");
    l->k = make_of(k, i, s->hidden, kv, "attn_k.weight");
    l->v = make_of(k, i, s->hidden, kv, "attn_v.weight");
    l->out = make_of(k, i, q, s->hidden, "attn_output.weight");
    l->gate = make_of(k, i, s->hidden, s->ff, "ffn_gate.weight");
    l->up = make_of(k, i, s->hidden, s->ff, "ffn_up.weight");
    l->down = make_of(k, i, s->ff, s->hidden, "ffn_down.weight");
    if (p->family->qkv_bias) {
        l->bias[0] = make_of(k, i, q, 0, "attn_q.bias");
        l->bias[1] = make_of(k, i, kv, 0, "attn_k.bias");
        l->bias[2] = make_of(k, i, kv, 0, "attn_v.bias");
    }
    if (p->family->qk_norm) {
        l->q_norm = make_of(k, i, s->head_dim, 0, "attn_q_norm.weight");
        l->k_norm = make_of(k, i, s->head_dim, 0, "attn_k_norm.weight");
    }
}

static void make_all(struct plan *p, bool tied)
{
    const struct model_shape *s = &p->shape;
    size_t most = 3 + 14 * (size_t)s->layers;
    struct maker k = {.p = p};
    p->layers = mem_alloc(s->layers * sizeof *p->layers);
    p->made = mem_alloc(most * sizeof *p->made);
    p->names = mem_alloc(most * NAME_BYTES);
    p->embedding = make(&k, s->hidden, s->vocab, "token_embd.weight");
    p->final_norm = make(&k, s->hidden, 0, "output_norm.weight");
    if (!tied)
        p->head = make(&k, s->hidden, s->vocab, "output.weight");
    for (uint32_t i = 0; i < s->layers; i++)
        make_layer(&k, i);
    CHECK(k.n <= most);
}

/* ---- tokens ---- */

static status read_id(const struct plan *p, const struct reader *r, const cJSON *v, uint32_t *out)
{
    double x = cJSON_IsNumber(v) ? v->valuedouble : -1;
    if (!(x >= 0 && x < p->shape.vocab) || x != floor(x))
        return err(ERR_FORMAT, "%s: \"eos_token_id\" must be a token, 0 to %u, or a list of them",
                   r->name, p->shape.vocab - 1);
    *out = (uint32_t)x;
    return OK;
}

static status read_ends(struct dictionary *d, const struct plan *p, const struct reader *r)
{
    const cJSON *v = member(r->root, "eos_token_id"), *item = NULL;
    if (v != NULL && !cJSON_IsArray(v)) {
        d->n_end_ids = 1;
        return read_id(p, r, v, d->end_ids);
    }
    if (cJSON_GetArraySize(v) > (int)ARRAY_LEN(d->end_ids))
        return err(ERR_FORMAT, "%s: more than %zu \"eos_token_id\"", r->name,
                   ARRAY_LEN(d->end_ids));
    cJSON_ArrayForEach(item, v) TRY(read_id(p, r, item, &d->end_ids[d->n_end_ids++]));
    return OK;
}

static status read_all(struct plan *p, struct dictionary *d, const struct reader *r)
{
    const cJSON *tied = member(r->root, "tie_word_embeddings");
    TRY(read_family(p, r));
    TRY(check_strangers(r));
    TRY(read_shape(p, r));
    if (tied != NULL && !cJSON_IsBool(tied))
        return err(ERR_FORMAT, "%s: \"tie_word_embeddings\" must be true or false", r->name);
    TRY(read_ends(d, p, r));
    d->chat = chat_template_chatml();
    TRY(tokenizer_create_numbered(&d->tokenizer, p->shape.vocab, d->end_ids, d->n_end_ids));
    make_all(p, cJSON_IsTrue(tied));
    return OK;
}

status hf_plan_text(struct plan *p, struct dictionary *d, const char *text, size_t len,
                    const char *name)
{
    struct reader r = {.name = name};
    *p = (struct plan){0};
    *d = (struct dictionary){0};
    status st = parse(&r, text, len);
    if (st == OK)
        st = read_all(p, d, &r);
    cJSON_Delete((cJSON *)(uintptr_t)r.root);
    return st;
}

/* ---- the file ---- */

/* The config.json of a folder, or the file itself. */
static const char *config_path(const char *path, char buf[4096])
{
    struct stat st;
    if (stat(path, &st) != 0 || !S_ISDIR(st.st_mode))
        return path;
    snprintf(buf, 4096, "%.4000s/config.json", path);
    return buf;
}

/* NULL: errno says why. Only a regular file, which nobody has to be waited for (NONBLOCK: a FIFO). */
static FILE *open_file(const char *path)
{
    struct stat s;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0)
        return NULL;
    FILE *f = fstat(fd, &s) == 0 && S_ISREG(s.st_mode) ? fdopen(fd, "rb") : NULL;
    if (f == NULL) {
        close(fd);
        errno = EINVAL;
    }
    return f;
}

bool hf_is_config(const char *path)
{
    char buf[4096], text[256];
    FILE *f = open_file(config_path(path, buf));
    if (f == NULL)
        return false;
    size_t n = fread(text, 1, sizeof text - 1, f);
    fclose(f);
    text[n] = '\0';
    return text[strspn(text, " \t\r\n")] == '{';
}

status hf_plan(struct plan *p, struct dictionary *d, const char *path)
{
    char buf[4096];
    FILE *f = open_file(path = config_path(path, buf));
    if (f == NULL)
        return err(ERR_IO, "%s: %s", path,
                   errno == EINVAL ? "not a regular file" : strerror(errno));
    char *text = mem_alloc(FILE_MAX + 2);
    size_t len = fread(text, 1, FILE_MAX + 1, f);
    status st = ferror(f) ? err(ERR_IO, "%s: cannot be read", path) : OK;
    fclose(f);
    if (st == OK)
        st = hf_plan_text(p, d, text, len, path);
    mem_free(text);
    return st;
}
