/* RazorAttention's policy (arXiv 2407.15891; reference/algorithms.md A.3) as `spind calibrate` measures
 * and writes it: lanes that look back at the previous copy of a token (echo) or at what came after it
 * (induction) keep every row; the others keep sinks and recent rows. The file holds the scores, so
 * that a person can see why a lane is kept, and may edit "keep". */
#include "sparse/head_policy_file.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define FORMAT "spind razor policy, version 1"

/* ---- reading ---- */

static status bad(const char *file, const char *what)
{
    return err(ERR_FORMAT, "%s: %s", file, what);
}

static bool is_one(const cJSON *v)
{
    return cJSON_IsTrue(v) || (cJSON_IsNumber(v) && v->valuedouble == 1);
}

static bool is_zero(const cJSON *v)
{
    return cJSON_IsFalse(v) || (cJSON_IsNumber(v) && v->valuedouble == 0);
}

static status read_keep(const char *file, const cJSON *keep, uint32_t layers, uint32_t kv_heads,
                        uint8_t *classes)
{
    uint32_t i = 0;
    if (!cJSON_IsArray(keep) || cJSON_GetArraySize(keep) != (int)layers)
        return err(ERR_FORMAT, "%s: \"keep\" must have %u lines, one per layer", file, layers);
    for (const cJSON *line = keep->child; line != NULL; line = line->next) {
        if (!cJSON_IsArray(line) || cJSON_GetArraySize(line) != (int)kv_heads)
            return err(ERR_FORMAT, "%s: layer %u of \"keep\" must have %u numbers, one per KV head",
                       file, i / kv_heads, kv_heads);
        for (const cJSON *v = line->child; v != NULL; v = v->next, i++) {
            if (!is_one(v) && !is_zero(v))
                return err(ERR_FORMAT, "%s: layer %u of \"keep\": every number must be 0 or 1",
                           file, i / kv_heads);
            classes[i] = is_one(v) ? LANE_SPARSE : LANE_STREAM;
        }
    }
    return OK;
}

static status read_policy(const char *file, const cJSON *o, uint32_t layers, uint32_t kv_heads,
                          uint8_t *classes, uint32_t *sinks, uint32_t *recent)
{
    const cJSON *format = cJSON_GetObjectItemCaseSensitive(o, "format");
    uint32_t their_layers, their_heads;
    if (!cJSON_IsObject(o))
        return bad(file, "not a JSON object");
    if (!cJSON_IsString(format) || strcmp(format->valuestring, FORMAT) != 0)
        return bad(file, "\"format\" must be \"" FORMAT "\": not written by spind calibrate");
    TRY(head_policy_rows(file, o, "layers", 0, &their_layers));
    TRY(head_policy_rows(file, o, "kv_heads", 0, &their_heads));
    if (their_layers != layers || their_heads != kv_heads)
        return head_policy_other_shape(file, their_layers, their_heads, layers, kv_heads);
    TRY(head_policy_rows(file, o, "sinks", POLICY_SINKS, sinks));
    TRY(head_policy_rows(file, o, "recent", POLICY_RECENT, recent));
    return read_keep(file, cJSON_GetObjectItemCaseSensitive(o, "keep"), layers, kv_heads, classes);
}

status head_policy_razor(const struct head_policy_config *c, uint32_t layers, uint32_t kv_heads,
                         uint8_t *classes, uint32_t *sinks, uint32_t *recent)
{
    status st;
    char *text = head_policy_text(c->file, &st);
    if (text == NULL)
        return st;
    cJSON *o = cJSON_ParseWithOpts(text, NULL, true);
    st = read_policy(c->file, o, layers, kv_heads, classes, sinks, recent);
    cJSON_Delete(o);
    mem_free(text);
    return st;
}

/* ---- writing ---- */

static void write_name(FILE *f, const char *name)
{
    cJSON *s = cJSON_CreateString(name);
    char *quoted = s == NULL ? NULL : cJSON_PrintUnformatted(s);
    fputs(quoted == NULL ? "null" : quoted, f);
    cJSON_free(quoted);
    cJSON_Delete(s);
}

static void write_scores(FILE *f, const char *name, const struct head_scores *s, const float *x)
{
    fprintf(f, ",\n  \"%s\": [", name);
    for (uint32_t l = 0; l < s->layers; l++)
        for (uint32_t h = 0; h < s->kv_heads; h++)
            fprintf(f, "%s%.6g%s",
                    h > 0   ? ", "
                    : l > 0 ? ",\n    ["
                            : "\n    [",
                    (double)x[l * s->kv_heads + h], h + 1 == s->kv_heads ? "]" : "");
    fprintf(f, "\n  ]");
}

static void write_policy(FILE *f, const char *model, const struct head_scores *s,
                         const float shares[2], const uint8_t *keep)
{
    uint32_t n = s->layers * s->kv_heads, kept = 0;
    for (uint32_t i = 0; i < n; i++)
        kept += keep[i];
    fprintf(f, "{\n  \"format\": \"" FORMAT "\",\n  \"model\": ");
    write_name(f, model);
    fprintf(f, ",\n  \"layers\": %u,\n  \"kv_heads\": %u", s->layers, s->kv_heads);
    fprintf(f, ",\n  \"induction_share\": %g,\n  \"echo_share\": %g", (double)shares[0],
            (double)shares[1]);
    fprintf(f, ",\n  \"kept\": %u,\n  \"sinks\": %d,\n  \"recent\": %d", kept, POLICY_SINKS,
            POLICY_RECENT);
    fprintf(f, ",\n  \"keep\": [");
    for (uint32_t i = 0; i < n; i++)
        fprintf(f, "%s%u%s",
                i % s->kv_heads > 0 ? ", "
                : i > 0             ? ",\n    ["
                                    : "\n    [",
                keep[i], (i + 1) % s->kv_heads == 0 ? "]" : "");
    fprintf(f, "\n  ]");
    write_scores(f, "induction", s, s->induction);
    write_scores(f, "echo", s, s->echo);
    fprintf(f, "\n}\n");
}

static status check_scores(const struct head_scores *s, const float shares[2])
{
    for (uint32_t i = 0; i < s->layers * s->kv_heads; i++)
        if (!isfinite(s->echo[i]) || !isfinite(s->induction[i]))
            return err(ERR_ARG, "the scores of layer %u, KV head %u are not finite",
                       i / s->kv_heads, i % s->kv_heads);
    for (int i = 0; i < 2; i++)
        if (!(shares[i] >= 0) || !(shares[i] <= 1))
            return err(ERR_ARG, "a share of lanes must be 0 to 1, got %g", (double)shares[i]);
    return OK;
}

static uint32_t lanes_of(float share, uint32_t n)
{
    return (uint32_t)ceil((double)share * n - 1e-4);
}

/* Written beside it and renamed, so that nobody reads half a policy. */
status head_policy_write(const char *file, const char *model, const struct head_scores *s,
                         float induction_share, float echo_share)
{
    const float shares[2] = {induction_share, echo_share};
    uint32_t n = s->layers * s->kv_heads;
    char part[4096];
    TRY(check_scores(s, shares));
    if (snprintf(part, sizeof part, "%s.part", file) >= (int)sizeof part)
        return err(ERR_ARG, "%.64s...: a name too long for a file", file);
    FILE *f = fopen(part, "we");
    if (f == NULL)
        return err(ERR_IO, "%s: %s", part, strerror(errno));
    uint8_t *keep = mem_alloc(n + 1);
    head_policy_best(s->induction, n, lanes_of(induction_share, n), keep);
    head_policy_best(s->echo, n, lanes_of(echo_share, n), keep);
    write_policy(f, model, s, shares, keep);
    mem_free(keep);
    bool good = ferror(f) == 0;
    good = fclose(f) == 0 && good;
    if (good && rename(part, file) == 0)
        return OK;
    status st = err(ERR_IO, "%s: %s", file, strerror(errno));
    unlink(part);
    return st;
}
