/* `spind locality` on traces whose answers are known otherwise. */
#include "engine/tool/lanes.h"
#include "engine/tool/sheet.h"
#include "engine/tool/tool.h"
#include "tests/tap.h"
#include "tests/trace_rig.h"

#include <fcntl.h>
#include <unistd.h>

enum { LAYERS = 2, HEADS = 2, SEQUENCES = 2, STEPS = 120, PICK = 20, WARM_UP = 32 };

static char folder[64], trace[96], other[96], json[96], markdown[96];

static struct trace_header header(uint32_t block_rows)
{
    return (struct trace_header){.layers = LAYERS,
                                 .kv_heads = HEADS,
                                 .block_rows = block_rows,
                                 .interval = 1,
                                 .budget = 0.05f,
                                 .model = "made up",
                                 .plugin = "wave"};
}

static struct replay_lane lane_at(uint32_t sequence, uint32_t layer, uint32_t head)
{
    struct trace_shape s = {400, PICK, STEPS, 1.0, 0.7, 0.3 + 0.4 * layer, 0.97, 0.3, 0};
    s.seed = 1 + sequence * 10 + layer * 2 + head;
    return rig_trace(&s);
}

/* Records as the engine tells them: step by step, layer by layer, the sequences of a step together.
 * Head 1 of layer 1 is not SPARSE. */
static void write_trace(const char *file, uint32_t n_steps, uint32_t block_rows)
{
    struct replay_lane lanes[SEQUENCES][LAYERS][HEADS];
    struct trace_header h = header(block_rows);
    struct trace_writer *w;
    CHECK(trace_create(&w, file, &h) == OK);
    for (uint32_t i = 0; i < SEQUENCES * LAYERS * HEADS; i++)
        lanes[i / 4][i / 2 % 2][i % 2] = lane_at(i / 4, i / 2 % 2, i % 2);
    for (uint32_t step = 0; step < n_steps; step++)
        for (uint32_t layer = 0; layer < LAYERS; layer++)
            for (uint32_t s = 0; s < SEQUENCES; s++)
                for (uint32_t head = 0; head < HEADS - (layer == 1); head++) {
                    const struct replay_lane *l = &lanes[s][layer][head];
                    trace_write(
                        w, &(struct trace_record){.sequence = 1000 + s,
                                                  .pos = 7000 + step,
                                                  .layer = layer,
                                                  .head = head,
                                                  .n_pages = l->first[step + 1] - l->first[step],
                                                  .pages = l->pages + l->first[step]});
                }
    for (uint32_t i = 0; i < SEQUENCES * LAYERS * HEADS; i++)
        rig_trace_free(&lanes[i / 4][i / 2 % 2][i % 2]);
    CHECK(trace_finish(w) == OK);
}

static void lanes_are_what_was_recorded(void)
{
    struct lanes *l;
    const char *files[] = {trace};
    bool same = true;
    CHECK(lanes_load(&l, files, 1) == OK);
    is_int(l->n_sequences, SEQUENCES, "sequences");
    for (uint32_t i = 0; i < SEQUENCES * LAYERS * HEADS; i++) {
        struct replay_lane got = lanes_get(l, i / 4, i / 2 % 2, i % 2);
        struct replay_lane want = lane_at(i / 4, i / 2 % 2, i % 2);
        if (i % 4 == 3)
            same &= got.n_steps == 0;
        else
            same &= got.n_steps == STEPS &&
                    memcmp(got.first, want.first, (STEPS + 1) * sizeof *got.first) == 0 &&
                    memcmp(got.pages, want.pages, got.first[STEPS] * sizeof *got.pages) == 0;
        rig_trace_free(&want);
    }
    ok(same, "every lane as it was recorded, and a lane without selections has none");
    lanes_free(l);
}

static double replayed(enum replay_policy policy, uint32_t slots)
{
    struct replay_args a = {policy, slots, WARM_UP, 1};
    uint64_t touches = 0, misses = 0;
    for (uint32_t i = 0; i < SEQUENCES * LAYERS * HEADS; i++) {
        struct replay_lane l = lane_at(i / 4, i / 2 % 2, i % 2);
        struct replay_count n;
        CHECK(replay_run(&l, &a, &n, NULL) == OK);
        touches += i % 4 == 3 ? 0 : n.touches;
        misses += i % 4 == 3 ? 0 : n.misses;
        rig_trace_free(&l);
    }
    return 1 - (double)misses / (double)touches;
}

static bool close_to(const cJSON *row, const char *key, double want)
{
    return fabs(sheet_number(row, key) - want) < 1e-9;
}

/* Runs the verb on words that end with a NULL; what it prints is thrown away. */
static int verb(const char *const *words)
{
    char text[8][96], *argv[8];
    int n = 0;
    for (; words[n] != NULL; n++) {
        snprintf(text[n], sizeof text[n], "%s", words[n]);
        argv[n] = text[n];
    }
    fflush(stdout);
    int out = dup(STDOUT_FILENO), null = open("/dev/null", O_WRONLY);
    CHECK(out >= 0 && null >= 0 && dup2(null, STDOUT_FILENO) >= 0);
    int rc = locality_verb(n, argv);
    fflush(stdout);
    CHECK(dup2(out, STDOUT_FILENO) >= 0 && close(out) == 0 && close(null) == 0);
    return rc;
}
#define VERB(...) verb((const char *const[]){__VA_ARGS__, NULL})

static void the_report_is_right(void)
{
    cJSON *sheet;
    is_int(VERB(trace, "--json", json, "--markdown", markdown, "--lanes"), 0, "it runs");
    CHECK(sheet_load(&sheet, json) == OK);
    const cJSON *rows = cJSON_GetObjectItem(sheet, "rows");
    bool good = cJSON_GetArraySize(rows) == 12;
    for (int m = 0; m < 12; m++) {
        const cJSON *row = cJSON_GetArrayItem(rows, m);
        uint32_t slots = (uint32_t)(m + 1) * PICK;
        good &= close_to(row, "lru", replayed(REPLAY_LRU, slots));
        good &= close_to(row, "belady", replayed(REPLAY_BELADY, slots));
        good &= close_to(row, "bucketed_1", replayed(REPLAY_BUCKETED, slots));
        double off = fabs(sheet_number(row, "predicted") - sheet_number(row, "bucketed_1"));
        good &= off < 0.03 || m >= 6; /* a curve seen at three times does not reach so far */
    }
    ok(good, "hit ratios as replayed here, and the curve is near");
    ok(close_to(sheet, "pages_mean", PICK) && close_to(sheet, "sequences", SEQUENCES) &&
           close_to(sheet, "lane_steps", SEQUENCES * 3 * (STEPS - WARM_UP)),
       "what was counted");
    const cJSON *intervals = cJSON_GetObjectItem(sheet, "intervals");
    const cJSON *two = cJSON_GetArrayItem(intervals, 1);
    ok(cJSON_GetArraySize(intervals) == 4 &&
           close_to(two, "reuse", (1 + sheet_number(two, "again")) / 2),
       "intervals of 1, 2, 4 and 8 steps");
    is_int(cJSON_GetArraySize(cJSON_GetObjectItem(sheet, "lanes")), 3, "lanes that select");
    is_int(cJSON_GetArraySize(cJSON_GetObjectItem(sheet, "layers")), LAYERS, "layers");
    ok(access(markdown, R_OK) == 0, "and a page of Markdown");
    cJSON_Delete(sheet);
}

static void wrong_words_and_files_are_refused(void)
{
    is_int(VERB("--json", json), 2, "no trace named");
    is_int(VERB("--warmup", "3", trace), 2, "an unknown option");
    is_int(VERB("/nonexistent"), 1, "no such file");
    write_trace(other, 40, 16);
    is_int(VERB(trace, other), 1, "traces of different shapes");
    is_int(VERB(other), 1, "too few steps");
    write_trace(other, 40, 8);
    is_int(VERB(trace, other), 0, "a short sequence beside long ones is left out");
}

int main(void)
{
    snprintf(folder, sizeof folder, "/tmp/spind-locality-XXXXXX");
    CHECK(mkdtemp(folder) != NULL);
    snprintf(trace, sizeof trace, "%s/trace", folder);
    snprintf(other, sizeof other, "%s/other", folder);
    snprintf(json, sizeof json, "%s/json", folder);
    snprintf(markdown, sizeof markdown, "%s/markdown", folder);
    write_trace(trace, STEPS, 8);
    lanes_are_what_was_recorded();
    the_report_is_right();
    wrong_words_and_files_are_refused();
    char *made[] = {trace, other, json, markdown};
    for (uint32_t i = 0; i < ARRAY_LEN(made); i++)
        unlink(made[i]);
    rmdir(folder);
    return tap_done();
}
