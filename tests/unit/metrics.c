/* api/metrics.c: the page that scrapers read. */
#include "tests/call_rig.h"
#include "tests/tap.h"

static const char *render(struct rig *g)
{
    static struct writer w;
    if (w.p == NULL)
        writer_init(&w);
    writer_reset(&w);
    metrics_render(g->a.metrics, &g->a, &w);
    return w.p;
}

static void has(struct rig *g, const char *line, const char *name)
{
    const char *page = render(g), *at = strstr(page, line);
    bool whole = at != NULL && (at == page || at[-1] == '\n') && at[strlen(line)] == '\n';
    if (!ok(whole, "%s", name))
        printf("# want the line: %s\n", line);
}

#define L           "{engine=\"0\",model_name=\"m\"}"
#define H(name, le) name "_bucket{engine=\"0\",model_name=\"m\",le=\"" le "\"}"

static void every_series_is_there_from_the_start(struct rig *g)
{
    static const char *const names[] = {"num_requests_running",
                                        "num_requests_waiting",
                                        "kv_cache_usage_perc",
                                        "gpu_cache_usage_perc",
                                        "num_preemptions_total",
                                        "prefix_cache_queries_total",
                                        "prefix_cache_hits_total",
                                        "gpu_prefix_cache_hits_total",
                                        "prompt_tokens_total",
                                        "generation_tokens_total",
                                        "corrupted_requests_total",
                                        "time_to_first_token_seconds_count",
                                        "inter_token_latency_seconds_sum",
                                        "time_per_output_token_seconds_count",
                                        "request_time_per_output_token_seconds_count",
                                        "e2e_request_latency_seconds_count",
                                        "request_queue_time_seconds_sum",
                                        "request_inference_time_seconds_count",
                                        "request_prefill_time_seconds_count",
                                        "request_decode_time_seconds_count",
                                        "request_prompt_tokens_sum",
                                        "request_generation_tokens_count",
                                        "request_max_num_generation_tokens_sum",
                                        "request_params_max_tokens_count",
                                        "request_params_n_count",
                                        "iteration_tokens_total_count",
                                        "request_num_preemptions_count",
                                        "request_prefill_kv_computed_tokens_count"};
    int missing = 0;
    for (size_t i = 0; i < ARRAY_LEN(names); i++) {
        char line[160];
        snprintf(line, sizeof line, "\nvllm:%s" L " 0.0\n", names[i]);
        if (strstr(render(g), line) == NULL) {
            printf("# missing: %s", line);
            missing++;
        }
    }
    is_int(missing, 0, "the names that dashboards read exist at zero");
    has(g,
        "vllm:request_success_total{engine=\"0\",model_name=\"m\",finished_reason=\"abort\"} 0.0",
        "so do the reasons");
    has(g, H("vllm:time_to_first_token_seconds", "0.001") " 0.0", "bounds print as Python floats");
    has(g, H("vllm:e2e_request_latency_seconds", "1.0") " 0.0", "1.0, not 1");
    has(g, H("vllm:time_to_first_token_seconds", "2560.0") " 0.0", "up to the last");
    has(g, H("vllm:request_prompt_tokens", "2000.0") " 0.0", "token bounds go up to the context");
    ok(strstr(render(g), H("vllm:request_prompt_tokens", "5000.0")) == NULL, "and not beyond");
    has(g, "# TYPE vllm:iteration_tokens_total histogram", "its name ends in total all the same");
}

static void every_line_has_the_form_of_the_format(struct rig *g)
{
    int bad = 0;
    for (const char *p = render(g), *end; *p != '\0'; p = end + 1) {
        end = strchr(p, '\n');
        char *rest, *space = memrchr(p, ' ', (size_t)(end - p));
        if (*p == '#')
            continue;
        strtod(space + 1, &rest);
        size_t name = strspn(p, "abcdefghijklmnopqrstuvwxyz0123456789_:");
        bad += rest != end || name == 0 || (p[name] != '{' && p[name] != ' ');
        bad += p[name] == '{' && space[-1] != '}';
    }
    is_int(bad, 0, "name, labels, value");
}

/* Two requests of 9 prompt tokens: one of 3 tokens in one choice, one of 2 in two choices. */
static void answers_are_counted_as_vllm_does(struct rig *g)
{
    struct exchange x, y;
    rig_open(&x);
    rig_open(&y);
    rig_start(g, &x, REQUEST_COMPLETION, "{\"prompt\":\"123456789\",\"max_tokens\":3}");
    rig_start(g, &y, REQUEST_COMPLETION,
              "{\"prompt\":\"123456789\",\"max_tokens\":2,\"n\":2,\"temperature\":1}");
    has(g, "vllm:num_requests_waiting" L " 3.0", "what is submitted waits");
    rig_scheduled(g, g->ids[0]);
    has(g, "vllm:num_requests_running" L " 1.0", "what is scheduled runs");
    rig_say(g, g->ids[0], "abc", 0);
    rig_done(g, g->ids[0], DONE_LENGTH, 0, 3);
    for (int i = 1; i < 3; i++) {
        rig_say(g, g->ids[i], "ab", 0);
        rig_done(g, g->ids[i], DONE_LENGTH, 0, 2);
    }
    calls_flush(&g->a);
    has(g,
        "vllm:request_success_total{engine=\"0\",model_name=\"m\",finished_reason=\"length\"} 3.0",
        "one success per choice");
    has(g, "vllm:prompt_tokens_total" L " 27.0", "prompt tokens per sequence");
    has(g, "vllm:generation_tokens_total" L " 7.0", "generated tokens");
    has(g, "vllm:request_prompt_tokens_sum" L " 27.0", "and their histogram");
    has(g, "vllm:time_to_first_token_seconds_count" L " 3.0", "a first token per choice");
    has(g, "vllm:inter_token_latency_seconds_count" L " 4.0", "a gap per token after the first");
    has(g, "vllm:time_per_output_token_seconds_count" L " 4.0", "under its old name too");
    has(g, "vllm:request_params_n_sum" L " 3.0", "n once per prompt");
    has(g, "vllm:request_max_num_generation_tokens_sum" L " 5.0", "the longest choice of a prompt");
    has(g, "vllm:request_queue_time_seconds_sum" L " 0.003", "queue time from the engine's clock");
    has(g, "vllm:request_inference_time_seconds_sum" L " 0.006", "inference is prefill and decode");
    has(g, "vllm:num_requests_running" L " 0.0", "the gauges are back at zero");
    has(g, "http_requests_total{handler=\"/v1/completions\",method=\"POST\",status=\"2xx\"} 2.0",
        "and HTTP is counted");
    rig_close(&x);
    rig_close(&y);
}

static void aborts_and_refusals_are_counted_once(struct rig *g)
{
    struct exchange x;
    rig_open(&x);
    rig_start(g, &x, REQUEST_COMPLETION, "{\"prompt\":\"a\"}");
    call_gone(&g->a, &x);
    rig_done(g, g->ids[3], DONE_CANCELLED, 0, 0);
    calls_flush(&g->a);
    has(g,
        "vllm:request_success_total{engine=\"0\",model_name=\"m\",finished_reason=\"abort\"} 1.0",
        "a client that left is one abort");
    metrics_rejected(g->a.metrics, "server_overloaded");
    metrics_rejected(g->a.metrics, "never heard of");
    has(g, "vllm:admission_rejections_total{engine=\"0\",model_name=\"m\",reason=\"other\"} 1.0",
        "labels come from a fixed list");
    for (int i = 0; i < 500; i++) {
        char handler[16];
        snprintf(handler, sizeof handler, "/%d", i);
        metrics_http(g->a.metrics, handler, "GET", 404, 0.2);
    }
    ok(strstr(render(g), "handler=\"/499\"") == NULL, "HTTP series are bounded");
    rig_close(&x);
}

static void steps_become_counters_and_gauges(struct rig *g)
{
    struct msg_step s = {
        .head = {MSG_STEP, sizeof s}, .blocks_total = {100, 0}, .blocks_free = {100, 0}};
    metrics_step(g->a.metrics, &s);
    has(g, "vllm:iteration_tokens_total_count" L " 0.0", "the state at start is not a step");
    s.steps = 1, s.step_us = 1500, s.prompt_tokens = 20, s.output_tokens = 1;
    s.cached_tokens = 16, s.queried_tokens = 36, s.preemptions = 2;
    s.blocks_free[0] = 50, s.blocks_cached[0] = 25;
    metrics_step(g->a.metrics, &s);
    has(g, "vllm:iteration_tokens_total_sum" L " 21.0", "prompt and generated tokens of a step");
    has(g, "vllm:iteration_tokens_total_count" L " 1.0", "one observation per step");
    has(g, "spind_step_seconds_sum" L " 0.0015", "and its time");
    has(g, "vllm:kv_cache_usage_perc" L " 0.25", "cached blocks are free for the asking");
    has(g, "vllm:prefix_cache_hits_total" L " 16.0", "prefix hits in tokens");
    has(g, "spind_kv_blocks{engine=\"0\",model_name=\"m\",tier=\"hbm\",state=\"cached\"} 25.0",
        "blocks by tier and state");
    has(g, "vllm:num_preemptions_total" L " 2.0", "preemptions");
    s.residence = (struct msg_residence){.spilled = 3,
                                         .moved_down = 70,
                                         .page_hits = 900,
                                         .page_misses = 60,
                                         .light_misses = 5,
                                         .leaf_bytes = 4096,
                                         .segments_found = 2,
                                         .unscored_selections = 7,
                                         .planned_rows = 12,
                                         .hot_slots = 64};
    metrics_step(g->a.metrics, &s);
#define M "engine=\"0\",model_name=\"m\","
    has(g, "spind_kv_sequences{" M "state=\"spilled\"} 3.0", "sequences by where they are");
    has(g, "spind_kv_blocks_copied_total{" M "to=\"dram\"} 70.0", "blocks copied");
    has(g, "spind_hot_pages_total{" M "outcome=\"hit\"} 900.0", "hits of hot sets");
    has(g, "spind_hot_pages_total{" M "outcome=\"miss\"} 55.0", "misses that were attended");
    has(g, "spind_hot_pages_total{" M "outcome=\"light\"} 5.0", "light misses");
    has(g, "spind_kv_metadata_bytes{" M "what=\"leaves\"} 4096.0", "bytes of leaves");
    has(g, "spind_segments_total{" M "how=\"found\"} 2.0", "segments found sealed");
    has(g, "spind_planned_rows_total" L " 12.0", "rows by plan");
    has(g, "spind_unscored_selections_total" L " 7.0", "selections without a score");
    has(g, "spind_hot_slots" L " 64.0", "slots granted");
}

int main(void)
{
    struct rig g;
    rig_init(&g, 1 << 16);
    every_series_is_there_from_the_start(&g);
    answers_are_counted_as_vllm_does(&g);
    aborts_and_refusals_are_counted_once(&g);
    steps_become_counters_and_gauges(&g);
    every_line_has_the_form_of_the_format(&g);
    rig_fini(&g);
    return tap_done();
}
