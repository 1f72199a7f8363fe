/* The extension "sparse" of a request: what it sets, what it leaves to the server, and the exact text
 * of every refusal. */
#include "tests/catalog_rig.h"
#include "tests/request_rig.h"

static struct catalog catalog;
static uint32_t serve_rows = 8; /* of a page */

static void serve(const char *plugin, const char *const *options, uint32_t n_options)
{
    const struct kv_geometry geo = {
        .block_rows = serve_rows, .layers = 2, .kv_heads = 3, .head_dim = 64, .page_bytes = 2048};
    const struct catalog_wish w = {.plugin = plugin,
                                   .options = options,
                                   .n_options = n_options,
                                   .budget = 0.1,
                                   .top_p = 1,
                                   .interval = 1};
    struct sparse_choice c;
    uint32_t offered;
    CHECK(catalog_choose(&w, &c, &offered) == OK && offered == CATALOG_AUTO);
    CHECK(catalog_make(&catalog, &rig_plans, &geo, &c, 100, offered) == OK);
    info.catalog = &catalog;
}

static struct request *sparse(enum body_kind kind, const char *members)
{
    char all[1024];
    snprintf(all, sizeof all, "\"sparse\":%s", members);
    return parse_with(kind, all);
}

static void refused(const char *members, const char *param, const char *code, const char *text)
{
    for (int kind = BODY_COMPLETION; kind <= BODY_CHAT; kind *= 2) {
        struct request *r = sparse((enum body_kind)kind, members);
        bool good = r == NULL && e.status == 400 && strcmp(e.param, param) == 0 &&
                    strcmp(e.code, code) == 0 && strcmp(e.message, text) == 0;
        if (!ok(good, "%s %.60s", kind == BODY_CHAT ? "chat" : "completion", members))
            printf("#   %s, %s: %s\n", r ? "accepted" : e.param, r || !e.code ? "" : e.code,
                   r ? "" : e.message);
        request_free(r);
    }
}

static const struct sparse_plugin *plugin_of(const struct request *r)
{
    return sparse_at(r->sparse.plugin);
}

static void what_is_absent_is_the_servers(void)
{
    static const char *const options[] = {"estimate=0.5", "outliers=2"};
    serve("wave", options, 2);
    struct request *r = parse_with(C, "");
    ok(r && strcmp(plugin_of(r)->name, "wave") == 0 && r->sparse.budget == 0.1f &&
           r->sparse.values[1] == 0.5 && r->sparse.values[0] == 2 && r->sparse_min_context == 100,
       "no extension: all of it");
    request_free(r);
    r = sparse(H, "null");
    ok(r && r->sparse.values[1] == 0.5, "null is absent");
    request_free(r);
    r = sparse(H, "{}");
    ok(r && r->sparse.values[1] == 0.5 && r->sparse.budget == 0.1f, "nothing in it");
    request_free(r);
    r = sparse(C, "{\"budget\":0.02}");
    ok(r && r->sparse.budget == 0.02f && r->sparse.values[1] == 0.5, "its options stay");
    request_free(r);
    r = sparse(C, "{\"plugin\":\"wave\",\"budget\":null,\"estimate\":null}");
    ok(r && r->sparse.budget == 0.1f && r->sparse.values[1] == 0.5,
       "the same plug-in, and nulls, change nothing");
    request_free(r);
    catalog.preset.miss_threshold = 0.5f;
    catalog.preset.min_rows = 512;
    r = sparse(C, "{\"plugin\":\"quest\"}");
    ok(r && strcmp(plugin_of(r)->name, "quest") == 0 && r->sparse.budget == 0.1f &&
           r->sparse.min_rows == 512 && r->sparse.values[0] == REDUCE_MAX_PROB &&
           r->sparse.miss_threshold == 0,
       "another plug-in: the server's budget and minimum, its own presets, nothing estimated");
    request_free(r);
    catalog.preset.miss_threshold = 0;
    catalog.preset.min_rows = 0;
}

static void what_is_said_arrives(void)
{
    serve("dense", NULL, 0);
    struct request *r = sparse(
        C, "{\"budget\":300,\"min_rows\":1024,\"estimate\":0.125,\"interval\":2.0,\"top_p\":0.9,"
           "\"miss_threshold\":0.05,\"min_context\":0,\"balance\":true,\"outliers\":1,"
           "\"reduce\":\"sum_prob\",\"coarse_group\":4,\"plugin\":\"wave\"}");
    ok(r && strcmp(plugin_of(r)->name, "wave") == 0 && r->sparse.budget == 300 &&
           r->sparse.min_rows == 1024 && r->sparse.interval == 2 && r->sparse.top_p == 0.9f &&
           r->sparse.miss_threshold == 0.05f && r->sparse_min_context == 0,
       "what every plug-in has, whatever the order of keys");
    ok(r && r->sparse.values[0] == 1 && r->sparse.values[1] == 0.125 && r->sparse.values[2] == 1 &&
           r->sparse.values[3] == 4 && r->sparse.values[5] == REDUCE_SUM_PROB,
       "and what wave has");
    request_free(r);
    r = sparse(H, "{\"plugin\":\"dense\",\"budget\":null}");
    ok(r && r->sparse.plugin == 0, "dense may be asked for");
    request_free(r);
    r = sparse(H, "{\"min_context\":2147483647,\"plugin\":\"oracle\",\"layout\":\"wave\"}");
    ok(r && r->sparse_min_context == INT32_MAX && r->sparse.values[0] == 1, "the largest minimum");
    request_free(r);
}

#define BUDGET                                                                                 \
    "sparse.budget must be a share of the context, above 0 to 1, or more than 1: a number of " \
    "rows, at most 1073741824; got "

static void mistakes_are_named(void)
{
    static const struct {
        const char *members, *param, *code, *text;
    } bad[] = {
        {"5", "sparse", "invalid_type", "`sparse` must be an object."},
        {"\"wave\"", "sparse", "invalid_type", "`sparse` must be an object."},
        {"[]", "sparse", "invalid_type", "`sparse` must be an object."},
        {"{\"plugin\":\"wawe\"}", "sparse.plugin", "invalid_value",
         "sparse.plugin: unknown plug-in \"wawe\"; there are dense, oracle, quest, wave."},
        {"{\"plugin\":3}", "sparse.plugin", "invalid_type", "`sparse.plugin` must be a string."},
        {"{\"budget\":0}", "sparse.budget", "invalid_value", BUDGET "0."},
        {"{\"budget\":-0.5}", "sparse.budget", "invalid_value", BUDGET "-0.5."},
        {"{\"budget\":1e300}", "sparse.budget", "invalid_value", BUDGET "inf."},
        {"{\"budget\":\"5%\"}", "sparse.budget", "invalid_type",
         "`sparse.budget` must be a number."},
        {"{\"interval\":0}", "sparse.interval", "invalid_value",
         "sparse.interval must be a whole number, 1 to 1024, got 0."},
        {"{\"interval\":1025}", "sparse.interval", "invalid_value",
         "sparse.interval must be a whole number, 1 to 1024, got 1025."},
        {"{\"interval\":1e300}", "sparse.interval", "invalid_value",
         "sparse.interval must be a whole number, 1 to 1024, got 1e+300."},
        {"{\"interval\":1.5}", "sparse.interval", "invalid_type",
         "`sparse.interval` must be an integer."},
        {"{\"min_rows\":-1}", "sparse.min_rows", "invalid_value",
         "sparse.min_rows must be a whole number, 0 to 1073741824, got -1."},
        {"{\"min_rows\":1073741825}", "sparse.min_rows", "invalid_value",
         "sparse.min_rows must be a whole number, 0 to 1073741824, got 1.07374182e+09."},
        {"{\"min_rows\":0.5}", "sparse.min_rows", "invalid_type",
         "`sparse.min_rows` must be an integer."},
        {"{\"min_rows\":1024,\"plugin\":\"dense\"}", "sparse.min_rows", "invalid_value",
         "sparse.min_rows has no effect with plug-in dense; sparse.plugin may be one of dense, "
         "oracle, quest, wave."},
        {"{\"top_p\":0}", "sparse.top_p", "invalid_value",
         "sparse.top_p must be a number above 0, at most 1, got 0."},
        {"{\"top_p\":true}", "sparse.top_p", "invalid_type", "`sparse.top_p` must be a number."},
        {"{\"miss_threshold\":1.5}", "sparse.miss_threshold", "invalid_value",
         "sparse.miss_threshold must be a number, 0 to 1, got 1.5."},
        {"{\"min_context\":-1}", "sparse.min_context", "invalid_value",
         "sparse.min_context must be a whole number, 0 to 2147483647, got -1."},
        {"{\"min_context\":2147483648}", "sparse.min_context", "invalid_value",
         "sparse.min_context must be a whole number, 0 to 2147483647, got 2.14748365e+09."},
        {"{\"min_context\":0.5}", "sparse.min_context", "invalid_type",
         "`sparse.min_context` must be an integer."},
        {"{\"estimat\":1}", "sparse.estimat", "unknown_parameter",
         "sparse: unknown option \"estimat\" of plug-in wave, which has outliers, estimate, "
         "balance, coarse_group, coarse_open, reduce, codes, known, values, and with every plug-in "
         "budget, "
         "min_rows, interval, top_p, miss_threshold and min_context."},
        {"{\"plugin\":\"quest\",\"estimate\":0.5}", "sparse.estimate", "unknown_parameter",
         "sparse: unknown option \"estimate\" of plug-in quest, which has reduce, and with every "
         "plug-in budget, min_rows, interval, top_p, miss_threshold and min_context."},
        {"{\"plugin\":\"dense\",\"estimate\":0.5}", "sparse.estimate", "invalid_value",
         "sparse.estimate has no effect with plug-in dense; sparse.plugin may be one of dense, "
         "oracle, quest, wave."},
        {"{\"budget\":0.5,\"plugin\":\"dense\"}", "sparse.budget", "invalid_value",
         "sparse.budget has no effect with plug-in dense; sparse.plugin may be one of dense, "
         "oracle, quest, wave."},
        {"{\"estimate\":1.5}", "sparse.estimate", "invalid_value",
         "sparse.estimate must be a number, 0 to 1, got 1.5."},
        {"{\"estimate\":\"0.5\"}", "sparse.estimate", "invalid_type",
         "`sparse.estimate` must be a number."},
        {"{\"outliers\":3}", "sparse.outliers", "invalid_value",
         "sparse.outliers must be a whole number, 0 to 2, got 3."},
        {"{\"outliers\":-1}", "sparse.outliers", "invalid_value",
         "sparse.outliers must be a whole number, 0 to 2, got -1."},
        {"{\"outliers\":0.5}", "sparse.outliers", "invalid_type",
         "`sparse.outliers` must be an integer."},
        {"{\"balance\":1}", "sparse.balance", "invalid_type",
         "`sparse.balance` must be a boolean."},
        {"{\"reduce\":\"max\"}", "sparse.reduce", "invalid_value",
         "sparse.reduce must be one of max_prob|sum_prob|mean_raw|max_raw, got max."},
        {"{\"reduce\":1}", "sparse.reduce", "invalid_type", "`sparse.reduce` must be a string."},
        {"{\"coarse_group\":5}", "sparse", "invalid_value",
         "sparse: coarse_group must be 0, 4, 8, 16 or 32, got 5."},
        {"{\"plugin\":\"quest\",\"miss_threshold\":0.1}", "sparse", "invalid_value",
         "sparse: miss_threshold must be 0 with plug-in quest, got 0.1: it keeps nothing from "
         "which a page could be estimated."},
        {"{\"outliers\":2}", "sparse", "invalid_value",
         "sparse: the digests of plug-in wave with these options take 34816 bytes per lane and "
         "segment; the server was started for at most 32768 (--sparse-offer)."},
    };
    serve("wave", NULL, 0);
    for (size_t i = 0; i < ARRAY_LEN(bad); i++)
        refused(bad[i].members, bad[i].param, bad[i].code, bad[i].text);
    char members[256];
    snprintf(members, sizeof members, "{\"%0100d\":1}", 0);
    struct request *r = sparse(C, members);
    ok(r == NULL && strlen(e.message) < 300, "a long key is cut");
    request_free(r);
}

static void a_dense_server_wants_a_plugin_named(void)
{
    serve("dense", NULL, 0);
    refused(
        "{\"budget\":0.05}", "sparse.budget", "invalid_value",
        "sparse.budget has no effect with plug-in dense, the server's; sparse.plugin may be one "
        "of dense, oracle, quest, wave.");
    info.catalog = NULL;
    refused("{\"plugin\":\"wave\"}", "sparse", "unsupported_parameter",
            "sparse is not currently supported by this server.");
}

static void a_device_without_digests_is_dense(void)
{
    serve("dense", NULL, 0);
    catalog.digest_bytes = NULL;
    catalog.device = "mock";
    refused("{\"plugin\":\"wave\"}", "sparse", "invalid_value",
            "sparse: plug-in wave cannot run on device mock: only dense can.");
    struct request *r = sparse(C, "{\"plugin\":\"dense\"}");
    ok(r != NULL, "dense can");
    request_free(r);
}

static uint64_t rig_memory(struct backend *be)
{
    (void)be;
    return 0;
}

static void keep_line(void *arg, const char *text)
{
    snprintf(arg, 512, "%s", text);
}

/* Pages of 16 rows, whose bounds are larger than centroids. */
static void offer(const char *plugin, const char *const *offers, uint32_t n, bool own_memory)
{
    const struct kv_geometry geo = {
        .block_rows = 16, .layers = 2, .kv_heads = 3, .head_dim = 64, .page_bytes = 4096};
    const struct catalog_wish w = {.plugin = plugin,
                                   .offers = offers,
                                   .n_offers = n,
                                   .budget = 0.1,
                                   .top_p = 1,
                                   .interval = 1};
    struct backend_ops ops = rig_ops;
    const struct backend device = {&ops};
    struct sparse_choice c;
    uint32_t offered;
    if (own_memory)
        ops.memory = rig_memory;
    CHECK(catalog_choose(&w, &c, &offered) == OK);
    CHECK(catalog_make(&catalog, &device, &geo, &c, 0, offered) == OK);
    info.catalog = &catalog;
}

static void there_is_room_for_what_is_offered(void)
{
    enum { MAP = SEGMENT_ROWS * 2, CENTROIDS = MAP + 64 * 2 * 64, BOUNDS = 64 * 4 * 64 };
    static const char *const wave[] = {"wave"}, *const both[] = {"wave", "quest"},
                             *const all[] = {"all"}, *const wrong[] = {"qest"};
    char line[512];
    offer("wave", NULL, 0, false);
    is_int(catalog.record_lane_bytes, BOUNDS,
           "in the machine's memory, room for digests of all: it costs nothing until it is used");
    offer("wave", NULL, 0, true);
    is_int(catalog.record_lane_bytes, CENTROIDS, "in a device's, of the server's own plug-in");
    refused("{\"plugin\":\"quest\"}", "sparse", "invalid_value",
            "sparse: the digests of plug-in quest with these options take 16384 bytes per lane and "
            "segment; the server was started for at most 10240 (--sparse-offer).");
    refused("{\"plugin\":\"wave\",\"outliers\":1}", "sparse", "invalid_value",
            "sparse: the digests of plug-in wave with these options take 14336 bytes per lane and "
            "segment; the server was started for at most 10240 (--sparse-offer).");
    struct request *r = sparse(C, "{\"plugin\":\"oracle\",\"layout\":\"wave\"}");
    ok(r != NULL, "others that need no more are served: %s", r == NULL ? e.message : "oracle");
    request_free(r);
    catalog_tell(&catalog, keep_line, line);
    ok(strcmp(line, "digests have 10240 bytes per segment and lane; requests may name dense, "
                    "oracle, wave; no room for quest (16384 bytes): --sparse-offer") == 0,
       "which is told: %s", line);
    serve_rows = 16;
    static const char *const bare[] = {"estimate=0", "values=off"};
    serve("wave", bare, 2);
    catalog.record_lane_bytes = MAP + 64 * 64; /* as where that alone is offered */
    catalog_tell(&catalog, keep_line, line);
    ok(strstr(line, "may name dense, oracle, wave; no room for quest") != NULL,
       "the server's own may be named, which has its options then: %s", line);
    offer("dense", NULL, 0, true);
    is_int(catalog.record_lane_bytes, BOUNDS, "of all, where the server has none of its own");
    offer("wave", both, 2, true);
    is_int(catalog.record_lane_bytes, BOUNDS, "what is offered has room");
    catalog_tell(&catalog, keep_line, line);
    ok(strcmp(line, "digests have 16384 bytes per segment and lane; requests may name dense, "
                    "oracle, quest, wave") == 0,
       "and is told: %s", line);
    offer("wave", all, 1, true);
    is_int(catalog.record_lane_bytes, BOUNDS, "all is all");
    offer("wave", wave, 1, false);
    is_int(catalog.record_lane_bytes, CENTROIDS, "and no more is offered than was said");
    offer("quest", wave, 1, true);
    is_int(catalog.record_lane_bytes, BOUNDS, "the server's own always has room");
    const struct catalog_wish w = {
        .plugin = "wave", .offers = wrong, .n_offers = 1, .budget = 0.1, .top_p = 1, .interval = 1};
    struct sparse_choice c;
    uint32_t offered;
    ok(catalog_choose(&w, &c, &offered) == ERR_ARG &&
           strcmp(err_text(), "--sparse-offer: unknown plug-in \"qest\"; there are dense, oracle, "
                              "quest, wave") == 0,
       "what is not there cannot be offered: %s", err_text());
}

int main(void)
{
    set_up();
    what_is_absent_is_the_servers();
    what_is_said_arrives();
    mistakes_are_named();
    a_dense_server_wants_a_plugin_named();
    a_device_without_digests_is_dense();
    there_is_room_for_what_is_offered();
    return tap_done();
}
