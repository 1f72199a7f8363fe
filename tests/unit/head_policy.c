/* Head policies: classes of lanes, DuoAttention's published files, and the files that calibration
 * writes; every way in which a file can be wrong has its own text. */
#include "sparse/head_policy.h"
#include "tests/tap.h"

#include <math.h>
#include <sys/stat.h>
#include <unistd.h>

enum { LAYERS = 4, HEADS = 3, LANES = LAYERS * HEADS };

static char folder[64];
static uint8_t classes[LANES];
static uint32_t sinks, recent;

static const char *path(const char *name)
{
    static char at[2][256];
    static int turn;
    turn = !turn;
    snprintf(at[turn], sizeof at[turn], "%s/%s", folder, name);
    return at[turn];
}

static const char *put(const char *name, const char *text)
{
    FILE *f = fopen(path(name), "w");
    CHECK(f != NULL);
    fputs(text, f);
    fclose(f);
    return path(name);
}

static status make(struct head_policy_config c)
{
    memset(classes, 99, sizeof classes);
    sinks = recent = 1;
    return head_policy_make(&c, LAYERS, HEADS, classes, &sinks, &recent);
}

static void fails(struct head_policy_config c, status want, const char *text, const char *name)
{
    char full[512];
    status st = make(c);
    snprintf(full, sizeof full, "%s%s%s", c.file != NULL ? c.file : "", c.file != NULL ? ": " : "",
             text);
    if (!ok(st == want && strcmp(err_text(), full) == 0, "%s", name))
        printf("#   got %s: %s\n#   want %s\n", status_name(st), err_text(), full);
}

/* One letter per lane: S(parse), D(ense), r(ing). */
static void classes_are(const char *want, const char *name)
{
    char got[LANES + 1] = "";
    for (int i = 0; i < LANES; i++)
        got[i] = classes[i] < LANE_CLASSES ? "SDr"[classes[i]] : '?';
    if (!ok(strcmp(got, want) == 0, "%s", name))
        printf("#   got %s, want %s\n", got, want);
}

static void names_alone(void)
{
    ok(make((struct head_policy_config){"none", NULL, -1, 0, 0, 0}) == OK, "none");
    classes_are("SSSSSSSSSSSS", "  every lane is sparse");
    ok(make((struct head_policy_config){"none", NULL, -1, 2, 0, 0}) == OK, "none, 2 layers exempt");
    classes_are("DDDDDDSSSSSS", "  whose lanes are dense");
    ok(make((struct head_policy_config){"none", NULL, -1, 99, 0, 0}) == OK, "more than there are");
    classes_are("DDDDDDDDDDDD", "  all of them");
    ok(make((struct head_policy_config){"streaming", NULL, -1, 2, 0, 0}) == OK && sinks == 64 &&
           recent == 256,
       "streaming: 64 sinks, 256 recent rows");
    classes_are("rrrrrrrrrrrr", "  no lane keeps all, exempt or not");
    ok(make((struct head_policy_config){"streaming", NULL, -1, 2, 16, 1024}) == OK && sinks == 16 &&
           recent == 1024,
       "or as asked");
    ok(make((struct head_policy_config){0}) == OK, "zeros");
    classes_are("SSSSSSSSSSSS", "  are no policy");
    fails((struct head_policy_config){"duet", NULL, -1, 2, 0, 0}, ERR_ARG,
          "unknown head policy \"duet\"; there are none, streaming, duo, razor", "unknown");
    fails((struct head_policy_config){"duo", NULL, -1, 2, 0, 0}, ERR_ARG,
          "head policy duo needs a file", "no file");
    fails((struct head_policy_config){"none", NULL, 0.5f, 2, 0, 0}, ERR_ARG,
          "a sparsity can be chosen for head policy duo alone, not for none", "a sparsity of none");
    fails((struct head_policy_config){"streaming", NULL, -1, 2, 8, 256}, ERR_ARG,
          "sinks and recent rows of a head policy must be multiples of 16, got 8 and 256",
          "half a page");
}

#define E "00000000000000000e"
static const char table[] = "6.0" E "-01\t0.0" E "+00\t9.7" E "-01\n" /* as numpy.savetxt writes */
                            "9.9" E "-01\t0.0" E "+00\t8.1" E "-01\n"
                            "0.0" E "+00\t9.9" E "-01\t0.0" E "+00\n"
                            "8.4" E "-01\t7.4" E "-02\t2.2" E "-01\n";

static struct head_policy_config duo(const char *file, float sparsity)
{
    return (struct head_policy_config){"duo", file, sparsity, 0, 0, 0};
}

static void published_patterns_are_read(void)
{
    put("full_attention_heads.tsv", table);
    put("config.json", "{\"model_name\": \"m\", \"lr\": 0.02, \"sink_size\": 128, \"recent_size\": "
                       "250, \"sparsity\": null, \"deploy_sink_size\": null}");
    ok(make(duo(folder, -1)) == OK && sinks == 128 && recent == 256,
       "a folder, its window in whole pages: %u, %u", sinks, recent);
    classes_are("SrSSrSrSrSrr", "  half of the lanes stream, those of the lowest gates");
    ok(make(duo(path("full_attention_heads.tsv"), 0.25f)) == OK, "the table's own name");
    /* Of four zeros, three stream: the first, of the smallest index, stays. */
    classes_are("SSSSrSrSrSSS", "  a quarter; ties stay by index");
    ok(make(duo(folder, 0)) == OK, "sparsity 0");
    classes_are("SSSSSSSSSSSS", "  keeps all");
    ok(make(duo(folder, 1)) == OK, "sparsity 1");
    classes_are("rrrrrrrrrrrr", "  none");
    struct head_policy_config c = duo(folder, -1);
    c.exempt_layers = 1, c.sinks = 16, c.recent = 32;
    ok(make(c) == OK && sinks == 16 && recent == 32, "a window that is asked for wins");
    classes_are("DrDSrSrSrSrr", "  what an exempt layer keeps is dense; what streams, streams");
    put("config.json", "{\"sink_size\": 0, \"recent_size\": 0, \"sparsity\": 1}");
    ok(make(duo(folder, -1)) == OK && sinks == 0 && recent == 16,
       "no sinks, a page of recent rows");
    classes_are("rrrrrrrrrrrr", "  a file's own sparsity");
    unlink(path("config.json"));
    ok(make(duo(folder, -1)) == OK && sinks == 64 && recent == 256, "no config: 64 and 256");
    /* The share is the one numpy.quantile cuts at. */
    int bad = 0;
    for (int k = 0; k <= 12; k++) {
        int n = 0, want = k == 0 ? 0 : k == 12 ? 12 : (int)ceil(k / 12.0 * 11 - 1e-9);
        CHECK(make(duo(folder, (float)k / 12)) == OK);
        for (int i = 0; i < LANES; i++)
            n += classes[i] == LANE_STREAM;
        bad += n != want;
    }
    is_int(bad, 0, "as many stream as numpy.quantile cuts");
}

static void tables_can_be_wrong(void)
{
    static const struct {
        const char *text, *error;
    } bad[] = {
        {"", "no gates in it"},
        {"\n\n# nothing\n", "no gates in it"},
        {"1 1 1\n1 1\n", "line 2 has 2 gates, those before it have 3"},
        {"1 1 1\n1 1 x1\n", "line 2: \"x1\" is not a number"},
        {"1 1 1\n\n1 nan 1\n", "line 3: \"nan\" is not a number"},
        {"1 1 1\n1 inf 1\n", "line 2: \"inf\" is not a number"},
        {"1 1 1\n1 1 1\n1 1 1\n",
         "made for a model of 3 layers with 3 KV heads; this one has 4 with 3"},
        {"1 1\n1 1\n1 1\n1 1\n",
         "made for a model of 4 layers with 2 KV heads; this one has 4 with 3"},
    };
    for (size_t i = 0; i < ARRAY_LEN(bad); i++)
        fails(duo(put("bad.tsv", bad[i].text), -1), ERR_FORMAT, bad[i].error, bad[i].error);
    fails(duo(path("none.tsv"), -1), ERR_IO, "No such file or directory", "no such file");
    put("good.tsv", "# gates\n1 0.5,0.25\n-3\t7\t0\r\n\n0 0 0\n1 1 1");
    ok(make(duo(path("good.tsv"), -1)) == OK, "blanks, commas, notes, values to be clipped");
    classes_are("SSrrSrrrrSSS", "  in order");
    FILE *f = fopen(path("zero.tsv"), "w");
    fwrite("1 1\0001", 1, 5, f);
    fclose(f);
    fails(duo(path("zero.tsv"), -1), ERR_FORMAT, "not a text", "zero bytes");
    f = fopen(path("large.tsv"), "w");
    for (int i = 0; i < 70000; i++)
        fputs("1 ", f);
    fclose(f);
    fails(duo(path("large.tsv"), -1), ERR_FORMAT, "more than 65536 gates", "too many gates");
    CHECK(truncate(path("large.tsv"), (4 << 20) + 1) == 0);
    fails(duo(path("large.tsv"), -1), ERR_FORMAT, "larger than 4194304 bytes", "too many bytes");
    put("config.json", "{\"sink_size\": -1}");
    ok(make(duo(path("good.tsv"), -1)) == ERR_FORMAT &&
           strstr(err_text(), "config.json: \"sink_size\" must be a whole number, 0 to 1048576"),
       "a bad sink_size");
    put("config.json", "{\"recent_size\": \"256\"}");
    ok(make(duo(path("good.tsv"), -1)) == ERR_FORMAT &&
           strstr(err_text(), "config.json: \"recent_size\" must be a whole number, 0 to 1048576"),
       "a bad recent_size");
    put("config.json", "{\"sink_size\": 1");
    ok(make(duo(path("good.tsv"), -1)) == ERR_FORMAT &&
           strstr(err_text(), "config.json: not a JSON object"),
       "a broken config");
    unlink(path("config.json"));
}

static struct head_policy_config razor(const char *file)
{
    return (struct head_policy_config){"razor", file, -1, 0, 0, 0};
}

static void what_calibration_writes_is_read(void)
{
    static const float induction[LANES] = {.1f, .2f, .9f, .8f, 0, 0, .5f, .5f, 0, 0, 0, .3f};
    static const float echo[LANES] = {0, 0, 0, 0, .7f, .1f, 0, 0, 0, 0, 0, 0};
    struct head_scores s = {LAYERS, HEADS, echo, induction};
    const char *file = path("razor.json");
    ok(head_policy_write(file, "a \"model\"\n", &s, 0.25f, 0.05f) == OK, "a policy is written");
    ok(make(razor(file)) == OK && sinks == 64 && recent == 256, "and read");
    /* A quarter of 12 is 3: .9, .8 and the first .5; one twentieth is one lane: the echo of .7. */
    classes_are("rrSSSrSrrrrr", "  the best by induction, and the best by echo");
    ok(head_policy_write(file, "m", &s, 0, 0) == OK && make(razor(file)) == OK, "no lane kept");
    classes_are("rrrrrrrrrrrr", "  all stream");
    ok(head_policy_write(file, "m", &s, 1, 0) == OK && make(razor(file)) == OK, "every lane kept");
    classes_are("SSSSSSSSSSSS", "  none streams");
    static const float broken[LANES] = {[7] = NAN};
    s.echo = broken;
    ok(head_policy_write(file, "m", &s, 1, 0) == ERR_ARG &&
           strcmp(err_text(), "the scores of layer 2, KV head 1 are not finite") == 0,
       "scores that are no numbers");
    s.echo = echo;
    ok(head_policy_write(file, "m", &s, 1.5f, 0) == ERR_ARG &&
           strcmp(err_text(), "a share of lanes must be 0 to 1, got 1.5") == 0,
       "a share of more than all");
    ok(head_policy_write("/nonexistent/x", "m", &s, 1, 0) == ERR_IO, "a folder that is not there");
    ok(make(razor(file)) == OK && access(path("razor.json.part"), F_OK) != 0,
       "failures leave the old file, and nothing else");
}

#define HEAD "{\"format\": \"spind razor policy, version 1\", \"layers\": 4, \"kv_heads\": 3"

static void policies_can_be_wrong(void)
{
    static const struct {
        const char *text, *error;
    } bad[] = {
        {"", "not a JSON object"},
        {"[]", "not a JSON object"},
        {"{} x", "not a JSON object"},
        {"{}",
         "\"format\" must be \"spind razor policy, version 1\": not written by spind calibrate"},
        {"{\"format\": \"spind razor policy, version 2\"}",
         "\"format\" must be \"spind razor policy, version 1\": not written by spind calibrate"},
        {"{\"format\": \"spind razor policy, version 1\", \"layers\": 32, \"kv_heads\": 8}",
         "made for a model of 32 layers with 8 KV heads; this one has 4 with 3"},
        {HEAD "}", "\"keep\" must have 4 lines, one per layer"},
        {HEAD ", \"keep\": [[1,1,1],[1,1,1],[1,1,1]]}",
         "\"keep\" must have 4 lines, one per layer"},
        {HEAD ", \"keep\": [[1,1,1],[1,1],[1,1,1],[1,1,1]]}",
         "layer 1 of \"keep\" must have 3 numbers, one per KV head"},
        {HEAD ", \"keep\": [[1,1,1],[1,1,1],[1,1,1],7]}",
         "layer 3 of \"keep\" must have 3 numbers, one per KV head"},
        {HEAD ", \"keep\": [[1,1,1],[1,1,1],[1,1,2],[1,1,1]]}",
         "layer 2 of \"keep\": every number must be 0 or 1"},
        {HEAD ", \"sinks\": 1.5}", "\"sinks\" must be a whole number, 0 to 1048576"},
    };
    for (size_t i = 0; i < ARRAY_LEN(bad); i++)
        fails(razor(put("bad.json", bad[i].text)), ERR_FORMAT, bad[i].error, bad[i].error);
    fails(razor(path("none.json")), ERR_IO, "No such file or directory", "no such file");
    put("hand.json", HEAD ", \"recent\": 100, \"keep\": [[1,0,true],[0,0,0],[1,1,1],[0,false,1]]}");
    ok(make(razor(path("hand.json"))) == OK && recent == 112, "one that somebody edited");
    classes_are("SrSrrrSSSrrS", "  as it says");
}

int main(void)
{
    char remove[128];
    snprintf(folder, sizeof folder, "/tmp/spind-heads-%d", (int)getpid());
    CHECK(mkdir(folder, 0700) == 0);
    names_alone();
    published_patterns_are_read();
    tables_can_be_wrong();
    what_calibration_writes_is_read();
    policies_can_be_wrong();
    snprintf(remove, sizeof remove, "rm -r %s", folder);
    return system(remove) != 0 || tap_done();
}
