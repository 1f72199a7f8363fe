/* DuoAttention's published patterns (mit-han-lab/duo-attention, attn_patterns/; reference/algorithms.md
 * A.2): full_attention_heads.tsv, a table of gates, a line per layer and a column per KV head, and
 * config.json beside it with sink_size and recent_size. The published code breaks ties of gates by
 * random noise; here the lane of the smaller index keeps its rows, so that two servers agree. */
#include "sparse/head_policy_file.h"

#include <cjson/cJSON.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { MAX_LANES = 1 << 16 };

struct table {
    float *gates; /* [layers][heads] */
    uint32_t layers, heads;
};

/* Adds the numbers of one line. */
static status read_line(const char *file, uint32_t line, char *text, struct table *t, uint32_t *n)
{
    uint32_t columns = 0;
    char *rest = NULL;
    for (char *word = strtok_r(text, " \t\r,", &rest); word != NULL;
         word = strtok_r(NULL, " \t\r,", &rest)) {
        char *end;
        double x = strtod(word, &end);
        if (*end != '\0' || !isfinite(x))
            return err(ERR_FORMAT, "%s: line %u: \"%.32s\" is not a number", file, line, word);
        if (*n == MAX_LANES)
            return err(ERR_FORMAT, "%s: more than %d gates", file, MAX_LANES);
        t->gates[(*n)++] = (float)fmin(fmax(x, 0), 1);
        columns++;
    }
    if (columns == 0)
        return OK;
    if (t->layers > 0 && columns != t->heads)
        return err(ERR_FORMAT, "%s: line %u has %u gates, those before it have %u", file, line,
                   columns, t->heads);
    t->heads = columns;
    t->layers++;
    return OK;
}

static status read_table(const char *file, struct table *t)
{
    status st;
    char *text = head_policy_text(file, &st), *rest;
    uint32_t line = 0, n = 0;
    for (char *p = text; st == OK && p != NULL; p = rest) {
        size_t len = strcspn(p, "\n");
        rest = p[len] == '\0' ? NULL : p + len + 1;
        p[len] = '\0';
        line++;
        if (p[strspn(p, " \t")] != '#') /* a comment, to numpy.loadtxt */
            st = read_line(file, line, p, t, &n);
    }
    mem_free(text);
    return st == OK && t->layers == 0 ? err(ERR_FORMAT, "%s: no gates in it", file) : st;
}

/* config.json beside the table; its absence means the method's own defaults. */
static status read_config(const char *file, float *sparsity, uint32_t *sinks, uint32_t *recent)
{
    struct stat unused;
    status st;
    if (stat(file, &unused) != 0)
        return OK;
    char *text = head_policy_text(file, &st);
    if (text == NULL)
        return st;
    cJSON *o = cJSON_ParseWithOpts(text, NULL, true);
    mem_free(text);
    if (!cJSON_IsObject(o)) {
        cJSON_Delete(o);
        return err(ERR_FORMAT, "%s: not a JSON object", file);
    }
    st = head_policy_rows(file, o, "sink_size", POLICY_SINKS, sinks);
    if (st == OK)
        st = head_policy_rows(file, o, "recent_size", POLICY_RECENT, recent);
    const cJSON *s = cJSON_GetObjectItemCaseSensitive(o, "sparsity");
    if (st == OK && cJSON_IsNumber(s) && s->valuedouble >= 0 && s->valuedouble <= 1)
        *sparsity = (float)s->valuedouble;
    cJSON_Delete(o);
    return st;
}

/* As many as numpy.quantile puts below its cut: the paper's own thresholds come out. */
static uint32_t streaming_lanes(float sparsity, uint32_t n)
{
    if (sparsity <= 0)
        return 0;
    if (sparsity >= 1)
        return n;
    return (uint32_t)ceil((double)sparsity * (n - 1) - 1e-4); /* 0.7f is more than 0.7 */
}

static status names(const char *asked, char *table, char *config, size_t room)
{
    struct stat st;
    const char *slash = strrchr(asked, '/');
    bool folder = stat(asked, &st) == 0 && S_ISDIR(st.st_mode);
    int len = folder ? (int)strlen(asked) : slash == NULL ? 1 : (int)(slash - asked);
    const char *base = folder || slash != NULL ? asked : ".";
    int a = folder ? snprintf(table, room, "%s/full_attention_heads.tsv", asked)
                   : snprintf(table, room, "%s", asked);
    int b = snprintf(config, room, "%.*s/config.json", len, base);
    if (a < 0 || b < 0 || (size_t)a >= room || (size_t)b >= room)
        return err(ERR_ARG, "%.64s...: a name too long for a file", asked);
    return OK;
}

status head_policy_duo(const struct head_policy_config *c, uint32_t layers, uint32_t kv_heads,
                       uint8_t *classes, uint32_t *sinks, uint32_t *recent)
{
    char file[4096], config[4096];
    float sparsity = 0.5f;
    uint32_t n = layers * kv_heads;
    TRY(names(c->file, file, config, sizeof file));
    TRY(read_config(config, &sparsity, sinks, recent));
    if (c->sparsity >= 0)
        sparsity = c->sparsity;
    struct table t = {.gates = mem_alloc(MAX_LANES * sizeof(float))};
    status st = read_table(file, &t);
    if (st == OK && (t.layers != layers || t.heads != kv_heads))
        st = head_policy_other_shape(file, t.layers, t.heads, layers, kv_heads);
    if (st == OK) {
        uint8_t *keeps = mem_alloc(n);
        head_policy_best(t.gates, n, n - streaming_lanes(sparsity, n), keeps);
        for (uint32_t i = 0; i < n; i++)
            classes[i] = keeps[i] != 0 ? LANE_SPARSE : LANE_STREAM;
        mem_free(keeps);
    }
    mem_free(t.gates);
    return st;
}
