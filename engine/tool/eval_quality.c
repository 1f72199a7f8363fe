/* `spind eval quality`: everything that docs/quality.md says, in one command. With --cache, a piece
 * that this very program has measured before on the same model, text and words is not measured again,
 * so a run that was interrupted goes on where it was. */
#include "engine/tool/quality.h"
#include "engine/tool/tool.h"
#include "kernels/core/sha256.h"
#include "kernels/log.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    ROOM = 512,
    KEY_BYTES = 1024,
    KL_TOKENS = 192,
    QUICK_CONTEXT = 1600,
    QUICK_COUNT = 2,
    QUICK_PERIOD = 300
};

/* ---- what a piece is measured with ---- */

static status settings_of(struct eval *e, const struct quality_piece *p)
{
    e->n_settings = 0;
    for (uint32_t i = 0; i < QUALITY_LINES && p->lines[i].plugin; i++) {
        const struct quality_line *l = &p->lines[i];
        bool dense = strcmp(l->plugin, "dense") == 0;
        for (uint32_t b = 0; b < p->n_budgets; b++)
            if ((b == 0 || !dense) && (dense || e->geo->n_lanes[LANE_SPARSE] > 0))
                TRY(eval_add_setting(e, NULL, l->plugin, l->options, quality_budgets[b]));
    }
    return OK;
}

static status open_for(struct eval *e, const struct quality_piece *p)
{
    uint32_t room = e->context + ROOM;
    TRY(eval_open(e, room));
    TRY(eval_read_text(e, room));
    return settings_of(e, p);
}

/* --quick: one segment and a tail, and no more than two of anything. */
static uint32_t length(const struct eval *e, uint32_t tokens)
{
    return e->quick && tokens > QUICK_CONTEXT ? QUICK_CONTEXT : tokens;
}

static uint32_t count(const struct eval *e, uint32_t n)
{
    return e->quick && n > QUICK_COUNT ? QUICK_COUNT : n;
}

static void words_of(struct eval *e, const struct quality_piece *p)
{
    e->block_rows = p->block_rows;
    e->kv_type = p->kv_type;
    e->context = length(e, p->context);
    e->tokens = e->depths = e->samples = e->rows = count(e, p->count);
    e->lengths.n = e->tasks.n = e->plugins.n = e->options.n = e->budgets.n = e->modes.n = 0;
}

/* Rows from `from` on belong to this. */
static void mark(cJSON *rows, int from, const char *key, const char *text, double number)
{
    cJSON *row;
    int i = 0;
    cJSON_ArrayForEach(row, rows)
    {
        if (i++ < from)
            continue;
        if (text != NULL)
            cJSON_AddStringToObject(row, key, text);
        else
            cJSON_AddNumberToObject(row, key, number);
    }
}

/* ---- kinds ---- */

static status plain(struct eval *e, const struct quality_piece *p, uint32_t steps,
                    status (*rows_of)(struct eval *, cJSON *), cJSON *rows)
{
    TRY(open_for(e, p));
    eval_expect(e, steps ? steps : e->n_settings);
    return rows_of(e, rows);
}

static status contexts(struct eval *e, const struct quality_piece *p, cJSON *rows)
{
    /* Segments and a tail of 64. The last one is beyond the model's own positions. */
    static const struct {
        uint32_t context;
        double rope_scale;
    } at[] = {{2112, 1}, {4160, 1}, {7232, 1}, {14400, 2}};
    double scale = e->rope_scale;
    status st = OK;
    for (size_t i = 0; i < ARRAY_LEN(at) && st == OK; i++) {
        int from = cJSON_GetArraySize(rows);
        e->context = length(e, at[i].context);
        e->rope_scale = at[i].rope_scale;
        st = plain(e, p, 0, eval_kl_rows, rows);
        mark(rows, from, "rope_scale", NULL, at[i].rope_scale);
    }
    e->rope_scale = scale;
    return st;
}

/* A third and two thirds into the text, or two texts of other seeds. */
static status places(struct eval *e, const struct quality_piece *p, cJSON *rows)
{
    enum { PLACES = 2 };
    char place[32];
    uint32_t offset = e->offset, seed = e->seed;
    status st = OK;
    for (uint32_t i = 1; i <= PLACES && st == OK; i++) {
        int from = cJSON_GetArraySize(rows);
        e->offset = offset;
        e->seed = seed + (e->text_file == NULL ? i : 0);
        if ((st = open_for(e, p)) != OK)
            break;
        uint32_t left = e->n_text_tokens - offset - e->context - ROOM;
        e->offset = offset + (e->text_file ? left / (PLACES + 1) * i : 0);
        eval_expect(e, e->n_settings);
        st = eval_kl_rows(e, rows);
        snprintf(place, sizeof place, "%s %u", e->text_file ? "from token" : "seed",
                 e->text_file ? e->offset : e->seed);
        mark(rows, from, "place", place, 0);
    }
    e->offset = offset;
    e->seed = seed;
    return st;
}

/* Pass keys by the settings that made the rows from `from` on, beside their KL. */
static status add_keys(struct eval *e, const struct quality_piece *p, cJSON *rows, int from)
{
    static const char *const keys[] = {"asked", "right"};
    cJSON *found = cJSON_CreateArray();
    e->depths = count(e, p->count);
    eval_expect(e, e->depths);
    status st = eval_passkey_rows(e, found);
    for (int i = 0; i < cJSON_GetArraySize(found) && st == OK; i++)
        for (size_t k = 0; k < ARRAY_LEN(keys); k++)
            cJSON_AddNumberToObject(cJSON_GetArrayItem(rows, from + i), keys[k],
                                    sheet_number(cJSON_GetArrayItem(found, i), keys[k]));
    cJSON_Delete(found);
    return st;
}

static status one_policy(struct eval *e, const struct quality_piece *p, float **reference,
                         cJSON *rows)
{
    int from = cJSON_GetArraySize(rows);
    e->tokens = count(e, KL_TOKENS);
    TRY(open_for(e, p));
    if (*reference == NULL) {
        size_t n = (size_t)e->tokens * eval_run_info(e->run)->shape.vocab;
        *reference = mem_alloc(n * sizeof **reference);
        TRY(eval_kl_dense(e, *reference));
    }
    e->reference = *reference;
    eval_expect(e, e->n_settings);
    TRY(eval_kl_rows(e, rows));
    mark(rows, from, "policy", e->policy, 0);
    mark(rows, from, "lanes_stream", NULL, e->geo->n_lanes[LANE_STREAM]);
    mark(rows, from, "lanes_sparse", NULL, e->geo->n_lanes[LANE_SPARSE]);
    return add_keys(e, p, rows, from);
}

static status policies(struct eval *e, const struct quality_piece *p, cJSON *rows)
{
    static const char *const names[] = {"none", "streaming", "razor"};
    char file[] = "/tmp/spind-razor-XXXXXX";
    const char *policy = e->policy, *policy_file = e->policy_file;
    float *reference = NULL;
    int fd = mkstemp(file);
    status st = fd >= 0 ? OK : err(ERR_IO, "%s: %s", file, strerror(errno));
    if (st != OK)
        return st;
    close(fd);
    st = calibrate_policy(e->model, e->isa, e->threads, e->quick ? QUICK_PERIOD : 0, file);
    for (size_t i = 0; i < ARRAY_LEN(names) && st == OK; i++) {
        e->policy = names[i];
        e->policy_file = strcmp(names[i], "razor") == 0 ? file : NULL;
        st = one_policy(e, p, &reference, rows);
    }
    unlink(file);
    mem_free(reference);
    e->reference = NULL;
    e->policy = policy;
    e->policy_file = policy_file;
    return st;
}

static status ruler(struct eval *e, const struct quality_piece *p, cJSON *rows)
{
    e->lengths.v[e->lengths.n++] = e->quick ? "1600" : "2048";
    if (!e->quick)
        e->lengths.v[e->lengths.n++] = "7200";
    for (uint32_t i = 0; i < tasks_count(); i++) /* the others are pieces of their own */
        if (strcmp(tasks_name(i), "passkey") != 0 && strcmp(tasks_name(i), "turns") != 0)
            e->tasks.v[e->tasks.n++] = tasks_name(i);
    return plain(e, p, e->lengths.n * e->tasks.n * e->samples, eval_ruler_rows, rows);
}

static status planted(struct eval *e, cJSON *rows)
{
    static const char *const lengths[] = {"8192", "32768", "131072"}, *const compared[] = {"wave",
                                                                                           "quest"};
    for (size_t i = 0; i < (e->quick ? 1 : ARRAY_LEN(lengths)); i++)
        e->lengths.v[e->lengths.n++] = lengths[i];
    for (size_t i = 0; i < ARRAY_LEN(compared); i++)
        e->plugins.v[e->plugins.n++] = compared[i];
    e->budgets.v[e->budgets.n++] = "0.02";
    return eval_planted_rows(e, rows);
}

static status kl(struct eval *e, const struct quality_piece *p, cJSON *rows)
{
    float *reference = NULL;
    status st = eval_kl_reference(e, &reference);
    if (st == OK)
        st = plain(e, p, 0, eval_kl_rows, rows);
    mem_free(reference);
    e->reference = NULL;
    return st;
}

static status measure(struct eval *e, const struct quality_piece *p, cJSON *rows)
{
    words_of(e, p);
    switch (p->kind) {
    case QUALITY_KL: return kl(e, p, rows);
    case QUALITY_CONTEXTS: return contexts(e, p, rows);
    case QUALITY_PLACES: return places(e, p, rows);
    case QUALITY_POLICIES: return policies(e, p, rows);
    case QUALITY_PASSKEY: return plain(e, p, e->depths, eval_passkey_rows, rows);
    case QUALITY_RULER: return ruler(e, p, rows);
    case QUALITY_TURNS: return plain(e, p, e->samples, eval_turns_rows, rows);
    case QUALITY_ROBUSTNESS: return plain(e, p, 0, eval_robustness_rows, rows);
    default: return planted(e, rows);
    }
}

/* ---- pieces already measured ---- */

/* The first half of the digest of a file's bytes: a copy is the same file, an edited one is not. */
static status digest_of(const char *path, char out[SHA256_BYTES + 1])
{
    static unsigned char bytes[1 << 16];
    unsigned char digest[SHA256_BYTES];
    struct sha256 c;
    size_t n;
    FILE *f = fopen(path, "rb");
    if (f == NULL)
        return err(ERR_IO, "%s: %s", path, strerror(errno));
    sha256_init(&c);
    while ((n = fread(bytes, 1, sizeof bytes, f)) > 0)
        sha256_add(&c, bytes, n);
    bool whole = !ferror(f);
    fclose(f);
    sha256_done(&c, digest);
    for (int i = 0; i < SHA256_BYTES / 2; i++)
        snprintf(out + 2 * (size_t)i, 3, "%02x", digest[i]);
    return whole ? OK : err(ERR_IO, "%s cannot be read", path);
}

/* What must be equal for a number to be the same. The program knows its pieces and its presets. */
static status key_of(const struct eval *e, char out[KEY_BYTES])
{
    char self[SHA256_BYTES + 1], model[SHA256_BYTES + 1], text[SHA256_BYTES + 1] = "generated";
    char policy[SHA256_BYTES + 1] = "";
    TRY(digest_of("/proc/self/exe", self));
    TRY(digest_of(e->model, model));
    if (e->text_file != NULL)
        TRY(digest_of(e->text_file, text));
    if (e->policy_file != NULL)
        TRY(digest_of(e->policy_file, policy));
    snprintf(
        out, KEY_BYTES,
        "%sprogram %s, model %s, text %s + %u, seed %u, %s, isa %s, exempt layers %u, interval %u, "
        "top-p %g, rope scale %g, policy %s %s",
        e->quick ? "quick, " : "", self, model, text, e->offset, e->seed, sheet_machine(),
        e->isa ? e->isa : "auto", e->exempt_layers, e->interval, e->top_p, e->rope_scale,
        e->policy ? e->policy : "none", policy);
    return OK;
}

static bool is_wanted(const struct eval *e, const char *piece)
{
    bool wanted = e->pieces.n == 0;
    for (uint32_t i = 0; i < e->pieces.n; i++)
        wanted = wanted || strcmp(e->pieces.v[i], piece) == 0;
    return wanted;
}

static status check_pieces(const struct eval *e)
{
    char known[256] = "";
    for (uint32_t i = 0; i < quality_n_pieces; i++) {
        size_t at = strlen(known);
        snprintf(known + at, sizeof known - at, "%s%s", i ? ", " : "", quality_pieces[i].name);
    }
    for (uint32_t k = 0; k < e->pieces.n; k++) {
        uint32_t i = 0;
        while (i < quality_n_pieces && strcmp(e->pieces.v[k], quality_pieces[i].name) != 0)
            i++;
        if (i == quality_n_pieces)
            return err(ERR_ARG, "--piece %s: there are %s", e->pieces.v[k], known);
    }
    return OK;
}

/* A sheet of the piece: from the cache, or measured now; NULL: neither, and not wanted. */
static status piece_of(struct eval *e, const struct quality_piece *p, const char *key, cJSON **out)
{
    char file[4096];
    snprintf(file, sizeof file, "%s/%s.json", e->cache ? e->cache : "", p->name);
    if (e->cache && sheet_load(out, file) == OK) {
        if (strcmp(sheet_text(*out, "key"), key) == 0)
            return OK;
        cJSON_Delete(*out);
        *out = NULL;
    }
    if (!is_wanted(e, p->name))
        return OK;
    *out = sheet_create(p->name);
    cJSON_AddStringToObject(*out, "key", key);
    uint64_t start = clock_us();
    TRY(measure(e, p, cJSON_GetObjectItem(*out, "rows")));
    double seconds = (double)(clock_us() - start) / 1e6;
    cJSON_AddNumberToObject(*out, "seconds", seconds);
    log_line(LOG_INFO, "%s: measured in %.0f s", p->name, seconds);
    if (e->cache && mkdir(e->cache, 0777) != 0 && errno != EEXIST)
        return err(ERR_IO, "%s: %s", e->cache, strerror(errno));
    return sheet_save(*out, e->cache ? file : NULL);
}

static status run_pieces(struct eval *e, cJSON **sheets)
{
    char key[KEY_BYTES];
    cJSON *all = cJSON_AddObjectToObject(e->sheet, "pieces");
    TRY(key_of(e, key));
    for (uint32_t i = 0; i < quality_n_pieces; i++) {
        status st = piece_of(e, &quality_pieces[i], key, &sheets[i]);
        if (sheets[i] != NULL) /* the document owns them */
            cJSON_AddItemToObject(all, quality_pieces[i].name, sheets[i]);
        TRY(st);
    }
    return OK;
}

static status run(struct eval *e)
{
    if (e->out == NULL)
        return err(ERR_ARG, "--out FOLDER: where quality.md goes");
    if (e->model == NULL)
        return err(ERR_ARG, "no model given and the default one is not there: --model FILE.gguf");
    TRY(check_pieces(e));
    cJSON **sheets = mem_alloc(quality_n_pieces * sizeof *sheets);
    status st = run_pieces(e, sheets);
    if (st == OK)
        st = quality_report(e, sheets);
    mem_free(sheets);
    return st;
}

const struct eval_command eval_quality = {"quality", "everything for docs/quality.md, in --out",
                                          NULL, run};
