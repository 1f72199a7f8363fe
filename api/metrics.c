/* The numbers behind /metrics and their page in Prometheus's text format (metrics.h).
 *
 * Histograms are a table: a name, help, bounds. Counters that the engine keeps as totals are shown
 * as they came in its last MSG_STEP; what a client can see (tokens, requests, latencies) is counted
 * here, so that a page read right after an answer already includes it. */
#include "api/call.h"
#include "api/histogram.h"

#include <dirent.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

enum { MAX_HTTP = 64, N_REASONS = 4 };

enum histogram_id {
    /* the first METRIC_PHASES are enum metric_phase */
    HIST_PROMPT = METRIC_PHASES,
    HIST_GENERATION,
    HIST_MAX_GENERATION,
    HIST_MAX_TOKENS,
    HIST_PREFILL_COMPUTED,
    HIST_N,
    HIST_ITERATION,
    HIST_PREEMPTIONS,
    HIST_STEP,
    N_HISTOGRAMS
};

struct http_series {
    char handler[48], method[8];
    int class; /* 2 for 2xx */
    uint64_t count;
};

struct http_time {
    char handler[48], method[8];
    struct histogram time;
};

static const char *const finish_reasons[N_REASONS] = {"stop", "length", "abort", "error"};
static const char *const rejections[] = {
    "server_overloaded",       "queue_timeout",       "shutting_down", "loading_model",
    "context_length_exceeded", "rate_limit_exceeded", "other"};

struct metrics {
    struct writer labels; /* engine="0",model_name="..." */
    struct histogram hist[N_HISTOGRAMS];
    uint64_t prompt_tokens, generated_tokens, corrupted;
    uint64_t finished[N_REASONS], rejected[ARRAY_LEN(rejections)];
    struct http_series http[MAX_HTTP];
    struct http_time http_times[MAX_HTTP];
    uint32_t n_http, n_http_times;
    struct msg_step step; /* the last one */
    double start_unix_s;
};

static const double bounds_a[] = {.001, .005, .01, .02, .04, .06, .08, .1, .25, .5,  .75,
                                  1,    2.5,  5,   7.5, 10,  20,  40,  80, 160, 640, 2560};
/* vLLM's, and four finer ones: a small model makes a token in 1 ms. */
static const double bounds_b[] = {.001, .0025, .005, .0075, .01, .025, .05, .075, .1, .15, .2, .3,
                                  .4,   .5,    .75,  1,     2.5, 5,    7.5, 10,   20, 40,  80};
static const double bounds_c[] = {.1, .2, .3, .5, .8, 1,   1.5, 2,   2.5, 5,    10,  15,
                                  20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680};
static const double bounds_n[] = {1, 2, 5, 10, 20};
static const double bounds_rows[] = {1,   8,    16,   32,   64,   128,  256,
                                     512, 1024, 2048, 4096, 8192, 16384};
static const double bounds_preempt[] = {0, 1, 2, 5, 10};
static const double bounds_step[] = {.0001, .00025, .0005, .001, .0025, .005, .01, .025,
                                     .05,   .1,     .25,   .5,   1,     2.5,  5,   10};
static const double bounds_http[] = {.1, .5, 1, 5, 30};

#define BOUNDS(b) b, ARRAY_LEN(b)
#define TOKENS    NULL, 0 /* 1, 2, 5, 10 ... up to the context */

static const struct histogram_desc {
    const char *name, *alias, *help;
    const double *bounds;
    size_t n;
} descs[N_HISTOGRAMS] = {
    [METRIC_TTFT] = {"vllm:time_to_first_token_seconds", NULL,
                     "Time from arrival to the first token.", BOUNDS(bounds_a)},
    [METRIC_ITL] = {"vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds",
                    "Time between tokens of one answer.", BOUNDS(bounds_b)},
    [METRIC_TPOT] = {"vllm:request_time_per_output_token_seconds", NULL,
                     "Mean time per output token of an answer.", BOUNDS(bounds_b)},
    [METRIC_E2E] = {"vllm:e2e_request_latency_seconds", NULL, "Time from arrival to the end.",
                    BOUNDS(bounds_c)},
    [METRIC_QUEUE] = {"vllm:request_queue_time_seconds", NULL, "Time in the queue.",
                      BOUNDS(bounds_c)},
    [METRIC_INFERENCE] = {"vllm:request_inference_time_seconds", NULL, "Prefill and decode.",
                          BOUNDS(bounds_c)},
    [METRIC_PREFILL] = {"vllm:request_prefill_time_seconds", NULL,
                        "Time from first scheduled to first token.", BOUNDS(bounds_c)},
    [METRIC_DECODE] = {"vllm:request_decode_time_seconds", NULL, "Time from first to last token.",
                       BOUNDS(bounds_c)},
    [HIST_PROMPT] = {"vllm:request_prompt_tokens", NULL, "Prompt tokens.", TOKENS},
    [HIST_GENERATION] = {"vllm:request_generation_tokens", NULL, "Generated tokens.", TOKENS},
    [HIST_MAX_GENERATION] = {"vllm:request_max_num_generation_tokens", NULL,
                             "Generated tokens of a prompt's longest choice.", TOKENS},
    [HIST_MAX_TOKENS] = {"vllm:request_params_max_tokens", NULL, "The request's max_tokens.",
                         TOKENS},
    [HIST_PREFILL_COMPUTED] = {"vllm:request_prefill_kv_computed_tokens", NULL,
                               "Prompt tokens that were computed, not found in the cache.", TOKENS},
    [HIST_N] = {"vllm:request_params_n", NULL, "The request's n.", BOUNDS(bounds_n)},
    [HIST_ITERATION] = {"vllm:iteration_tokens_total", NULL, "Tokens of one engine step.",
                        BOUNDS(bounds_rows)},
    [HIST_PREEMPTIONS] = {"vllm:request_num_preemptions", NULL, "Preemptions of a sequence.",
                          BOUNDS(bounds_preempt)},
    [HIST_STEP] = {"spind_step_seconds", NULL, "Duration of an engine step.", BOUNDS(bounds_step)},
};

/* --- counting ----------------------------------------------------------------------------------- */

/* A label's value: backslash, quote and line feed escaped. */
static void write_label(struct writer *w, const char *s)
{
    for (; *s != '\0'; s++) {
        if (*s == '\\' || *s == '"')
            write_bytes(w, "\\", 1);
        if (*s == '\n')
            write_text(w, "\\n");
        else
            write_bytes(w, s, 1);
    }
}

status metrics_create(struct metrics **out, const char *model_name, const struct engine_info *info)
{
    struct metrics *m = mem_try_alloc(sizeof *m);
    if (m == NULL)
        return err(ERR_MEMORY, "metrics: no memory");
    writer_init(&m->labels);
    write_text(&m->labels, "engine=\"0\",model_name=\"");
    write_label(&m->labels, model_name);
    write_text(&m->labels, "\"");
    double context = info != NULL ? info->max_model_len : 1e6;
    for (size_t i = 0; i < N_HISTOGRAMS; i++)
        histogram_init(&m->hist[i], descs[i].bounds, descs[i].n, context);
    m->start_unix_s = (double)time(NULL);
    *out = m;
    return OK;
}

void metrics_destroy(struct metrics *m)
{
    if (m == NULL)
        return;
    writer_fini(&m->labels);
    mem_free(m);
}

void metrics_time(struct metrics *m, enum metric_phase phase, double seconds)
{
    histogram_add(&m->hist[phase], seconds);
}

void metrics_tokens(struct metrics *m, uint64_t prompt, uint64_t generated)
{
    m->prompt_tokens += prompt;
    m->generated_tokens += generated;
}

void metrics_choice(struct metrics *m, const struct metric_choice *c)
{
    for (size_t i = 0; i < N_REASONS; i++)
        if (strcmp(c->reason, finish_reasons[i]) == 0)
            m->finished[i]++;
    histogram_add(&m->hist[HIST_PROMPT], c->prompt_tokens);
    histogram_add(&m->hist[HIST_GENERATION], c->output_tokens);
    histogram_add(&m->hist[HIST_MAX_TOKENS], c->max_tokens);
}

void metrics_prompt(struct metrics *m, uint32_t n, uint32_t max_output)
{
    histogram_add(&m->hist[HIST_N], n);
    histogram_add(&m->hist[HIST_MAX_GENERATION], max_output);
}

static void observe_span(struct metrics *m, enum metric_phase phase, uint64_t from, uint64_t to)
{
    if (from > 0 && to >= from)
        histogram_add(&m->hist[phase], (double)(to - from) * 1e-6);
}

void metrics_done(struct metrics *m, const struct msg_done *d)
{
    observe_span(m, METRIC_QUEUE, d->submitted_us, d->scheduled_us);
    histogram_add(&m->hist[HIST_PREEMPTIONS], d->n_preempted);
    if (d->first_us == 0)
        return; /* it never made a token */
    observe_span(m, METRIC_PREFILL, d->scheduled_us, d->first_us);
    observe_span(m, METRIC_DECODE, d->first_us, d->last_us);
    observe_span(m, METRIC_INFERENCE, d->scheduled_us, d->last_us);
    histogram_add(&m->hist[HIST_PREFILL_COMPUTED], (double)d->n_prompt - d->n_cached);
}

void metrics_corrupted(struct metrics *m)
{
    m->corrupted++;
}

void metrics_rejected(struct metrics *m, const char *reason)
{
    size_t i = 0;
    while (i + 1 < ARRAY_LEN(rejections) && (reason == NULL || strcmp(reason, rejections[i]) != 0))
        i++;
    m->rejected[i]++;
}

static struct histogram *http_time(struct metrics *m, const char *handler, const char *method)
{
    for (uint32_t i = 0; i < m->n_http_times; i++)
        if (strcmp(m->http_times[i].handler, handler) == 0 &&
            strcmp(m->http_times[i].method, method) == 0)
            return &m->http_times[i].time;
    if (m->n_http_times == MAX_HTTP)
        return NULL;
    struct http_time *t = &m->http_times[m->n_http_times++];
    snprintf(t->handler, sizeof t->handler, "%s", handler);
    snprintf(t->method, sizeof t->method, "%s", method);
    histogram_init(&t->time, BOUNDS(bounds_http), 0);
    return &t->time;
}

/* Routes and methods are few; beyond MAX_HTTP series the last one takes the rest. */
void metrics_http(struct metrics *m, const char *handler, const char *method, int http_status,
                  double seconds)
{
    int class = http_status / 100;
    struct histogram *t = http_time(m, handler, method);
    if (t != NULL)
        histogram_add(t, seconds);
    for (uint32_t i = 0; i < m->n_http; i++) {
        struct http_series *s = &m->http[i];
        bool same = strcmp(s->handler, handler) == 0 && strcmp(s->method, method) == 0;
        if ((same && s->class == class) || i + 1 == MAX_HTTP) {
            s->count++;
            return;
        }
    }
    struct http_series *s = &m->http[m->n_http++];
    *s = (struct http_series){.class = class, .count = 1};
    snprintf(s->handler, sizeof s->handler, "%s", handler);
    snprintf(s->method, sizeof s->method, "%s", method);
}

void metrics_step(struct metrics *m, const struct msg_step *s)
{
    uint64_t before = m->step.prompt_tokens + m->step.output_tokens;
    if (s->steps > m->step.steps) {
        histogram_add(&m->hist[HIST_ITERATION],
                      (double)(s->prompt_tokens + s->output_tokens - before));
        histogram_add(&m->hist[HIST_STEP], (double)s->step_us * 1e-6);
    }
    m->step = *s;
}

/* --- the page ----------------------------------------------------------------------------------- */

/* extra: further labels without braces, or NULL */
static void write_sample(const struct metrics *m, struct writer *w, const char *name,
                         const char *extra, double v)
{
    write_format(w, "%s{%s%s%s} ", name, m->labels.p, extra ? "," : "", extra ? extra : "");
    histogram_write_number(w, v);
    write_bytes(w, "\n", 1);
}

static void write_one(const struct metrics *m, struct writer *w, const char *type, const char *name,
                      const char *help, double v)
{
    histogram_write_head(w, name, type, help);
    write_sample(m, w, name, NULL, v);
}

static void write_histograms(const struct metrics *m, struct writer *w)
{
    for (size_t i = 0; i < N_HISTOGRAMS; i++) {
        histogram_write_head(w, descs[i].name, "histogram", descs[i].help);
        histogram_write(w, descs[i].name, m->labels.p, &m->hist[i]);
        if (descs[i].alias == NULL)
            continue;
        histogram_write_head(w, descs[i].alias, "histogram", descs[i].help);
        histogram_write(w, descs[i].alias, m->labels.p, &m->hist[i]);
    }
}

static void write_queue(const struct metrics *m, const struct api *a, struct writer *w)
{
    const struct msg_step *s = &m->step;
    /* The API's own counts move with every event; the engine's only with its next step. */
    double running = a->calls ? a->calls->n_running : s->running;
    double waiting = a->calls ? a->calls->n_queued : s->waiting;
    double total = (double)s->blocks_total[0];
    double used = total - (double)(s->blocks_free[0] + s->blocks_cached[0]);
    double usage = total > 0 ? used / total : 0;
    write_one(m, w, "gauge", "vllm:num_requests_running", "Sequences being computed.", running);
    write_one(m, w, "gauge", "vllm:num_requests_waiting", "Sequences in the queue.", waiting);
    histogram_write_head(w, "vllm:num_requests_waiting_by_reason", "gauge",
                         "Sequences in the queue.");
    write_sample(m, w, "vllm:num_requests_waiting_by_reason", "reason=\"capacity\"", waiting);
    write_sample(m, w, "vllm:num_requests_waiting_by_reason", "reason=\"deferred\"", 0);
    write_one(m, w, "gauge", "vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.",
              usage);
    write_one(m, w, "gauge", "vllm:gpu_cache_usage_perc", "Share of KV blocks in use, 0 to 1.",
              usage);
    histogram_write_head(w, "vllm:engine_sleep_state", "gauge", "The engine's sleep state.");
    write_sample(m, w, "vllm:engine_sleep_state", "sleep_state=\"awake\"", 1);
    write_sample(m, w, "vllm:engine_sleep_state", "sleep_state=\"weights_offloaded\"", 0);
    write_sample(m, w, "vllm:engine_sleep_state", "sleep_state=\"discard_all\"", 0);
}

static void write_counters(const struct metrics *m, struct writer *w)
{
    const struct msg_step *s = &m->step;
    const struct {
        const char *name, *help;
        uint64_t v;
    } c[] = {
        {"vllm:num_preemptions_total", "Preemptions.", s->preemptions},
        {"vllm:prefix_cache_queries_total", "Prompt tokens looked up.", s->queried_tokens},
        {"vllm:prefix_cache_hits_total", "Prompt tokens found.", s->cached_tokens},
        {"vllm:gpu_prefix_cache_queries_total", "Prompt tokens looked up.", s->queried_tokens},
        {"vllm:gpu_prefix_cache_hits_total", "Prompt tokens found.", s->cached_tokens},
        {"vllm:external_prefix_cache_queries_total", "Tokens looked up in offload tiers.", 0},
        {"vllm:external_prefix_cache_hits_total", "Tokens found in offload tiers.", 0},
        {"vllm:prompt_tokens_total", "Prompt tokens processed.", m->prompt_tokens},
        {"vllm:prompt_tokens_cached_total", "Of these: from the cache.", s->cached_tokens},
        {"vllm:generation_tokens_total", "Tokens generated.", m->generated_tokens},
        {"vllm:corrupted_requests_total", "Sequences with non-finite logits.", m->corrupted},
    };
    for (size_t i = 0; i < ARRAY_LEN(c); i++)
        write_one(m, w, "counter", c[i].name, c[i].help, (double)c[i].v);
    const char *source = "vllm:prompt_tokens_by_source_total";
    histogram_write_head(w, source, "counter", "Prompt tokens by where their KV came from.");
    write_sample(m, w, source, "source=\"local_compute\"", (double)s->prompt_tokens);
    write_sample(m, w, source, "source=\"local_cache_hit\"", (double)s->cached_tokens);
    write_sample(m, w, source, "source=\"external_kv_transfer\"", 0);
}

static void write_reasons(const struct metrics *m, struct writer *w)
{
    char label[64];
    histogram_write_head(w, "vllm:request_success_total", "counter", "Answers by how they ended.");
    for (size_t i = 0; i < N_REASONS; i++) {
        snprintf(label, sizeof label, "finished_reason=\"%s\"", finish_reasons[i]);
        write_sample(m, w, "vllm:request_success_total", label, (double)m->finished[i]);
    }
    histogram_write_head(w, "vllm:admission_rejections_total", "counter", "Requests refused.");
    for (size_t i = 0; i < ARRAY_LEN(rejections); i++) {
        snprintf(label, sizeof label, "reason=\"%s\"", rejections[i]);
        write_sample(m, w, "vllm:admission_rejections_total", label, (double)m->rejected[i]);
    }
}

static void write_config(const struct metrics *m, const struct engine_info *info, struct writer *w)
{
    char labels[256];
    if (info == NULL)
        return;
    snprintf(labels, sizeof labels,
             "block_size=\"%u\",cache_dtype=\"%s\",enable_prefix_caching=\"%s\","
             "num_cpu_blocks=\"%llu\",num_gpu_blocks=\"%llu\"",
             info->block_rows, kv_type_name(info->kv_type), info->prefix_caching ? "True" : "False",
             (unsigned long long)info->kv_blocks[1], (unsigned long long)info->kv_blocks[0]);
    histogram_write_head(w, "vllm:cache_config_info", "gauge", "The KV cache's configuration.");
    write_sample(m, w, "vllm:cache_config_info", labels, 1);
}

static void write_http(const struct metrics *m, struct writer *w)
{
    histogram_write_head(w, "http_requests_total", "counter", "HTTP requests.");
    for (uint32_t i = 0; i < m->n_http; i++)
        write_format(w,
                     "http_requests_total{handler=\"%s\",method=\"%s\",status=\"%dxx\"} %llu.0\n",
                     m->http[i].handler, m->http[i].method, m->http[i].class,
                     (unsigned long long)m->http[i].count);
    histogram_write_head(w, "http_request_duration_seconds", "histogram", "Time to the last byte.");
    for (uint32_t i = 0; i < m->n_http_times; i++) {
        char labels[128];
        snprintf(labels, sizeof labels, "handler=\"%s\",method=\"%s\"", m->http_times[i].handler,
                 m->http_times[i].method);
        histogram_write(w, "http_request_duration_seconds", labels, &m->http_times[i].time);
    }
}

/* --- our own ------------------------------------------------------------------------------------ */

static void write_blocks(const struct metrics *m, struct writer *w)
{
    static const char *const tiers[2] = {"hbm", "dram"};
    const struct msg_step *s = &m->step;
    histogram_write_head(w, "spind_kv_blocks", "gauge", "KV blocks by tier and state.");
    for (int t = 0; t < 2; t++) {
        uint64_t unused = s->blocks_free[t] + s->blocks_cached[t];
        const struct {
            const char *state;
            uint64_t v;
        } v[] = {{"free", s->blocks_free[t]},
                 {"cached", s->blocks_cached[t]},
                 {"used", s->blocks_total[t] > unused ? s->blocks_total[t] - unused : 0}};
        for (size_t i = 0; i < ARRAY_LEN(v); i++) {
            char label[64];
            snprintf(label, sizeof label, "tier=\"%s\",state=\"%s\"", tiers[t], v[i].state);
            write_sample(m, w, "spind_kv_blocks", label, (double)v[i].v);
        }
    }
    write_one(m, w, "gauge", "spind_kv_table_bytes", "Block tables.", (double)s->table_bytes);
}

struct state_of {
    const char *state;
    uint64_t v;
};

/* One series per state, under one name. */
static void write_states(const struct metrics *m, struct writer *w, const char *type,
                         const char *name, const char *label, const char *help,
                         const struct state_of *v, size_t n)
{
    char text[64];
    histogram_write_head(w, name, type, help);
    for (size_t i = 0; i < n; i++) {
        snprintf(text, sizeof text, "%s=\"%s\"", label, v[i].state);
        write_sample(m, w, name, text, (double)v[i].v);
    }
}

#define STATES(type, name, label, help, ...)                                            \
    write_states(m, w, type, name, label, help, (const struct state_of[]){__VA_ARGS__}, \
                 ARRAY_LEN(((const struct state_of[]){__VA_ARGS__})))

/* Two tiers and what is attended of them (cache/kv.h and engine/message.h name the terms). */
static void write_residence(const struct metrics *m, struct writer *w)
{
    const struct msg_residence *r = &m->step.residence;
    STATES("gauge", "spind_kv_sequences", "state", "Sequences by where their KV is.",
           {"resident", r->resident}, {"spilled", r->spilled}, {"paused", r->paused});
    STATES("counter", "spind_kv_changes_total", "change", "Changes of where a sequence's KV is.",
           {"spill", r->spills}, {"restore", r->restores}, {"pause", r->pauses});
    STATES("counter", "spind_kv_blocks_copied_total", "to",
           "Whole blocks copied between the tiers.", {"dram", r->moved_down}, {"hbm", r->moved_up});
    STATES("counter", "spind_hot_pages_total", "outcome",
           "Selected pages of spilled sequences; light: estimated for being absent.",
           {"hit", r->page_hits}, {"miss", r->page_misses - r->light_misses},
           {"light", r->light_misses});
    STATES("gauge", "spind_kv_metadata_bytes", "what", "Bytes about KV, in use.",
           {"leaves", r->leaf_bytes}, {"index", r->index_bytes}, {"digests", r->digest_bytes},
           {"maps", r->map_bytes});
    STATES("counter", "spind_segments_total", "how", "Segments that became partitions.",
           {"sealed", r->segments_sealed}, {"found", r->segments_found});
    write_one(m, w, "counter", "spind_layer_major_prompts_total",
              "Prompts longer than HBM whose reading layer by layer began.", (double)r->by_layers);
    write_one(m, w, "gauge", "spind_layer_major_progress",
              "Share of such a prompt that is read by now; 0: there is none.",
              (double)r->layers_permille / 1000);
    write_one(m, w, "counter", "spind_kv_blocks_written_behind_total",
              "Blocks copied to host memory before it was needed.", (double)r->written_behind);
    write_one(m, w, "gauge", "spind_kv_dram_pinned_bytes",
              "Bytes of the DRAM arena that may be used by now; pinned behind the start on a GPU.",
              (double)r->dram_ready);
    write_one(m, w, "counter", "spind_hot_fetched_bytes_total", "Pages fetched from host memory.",
              (double)r->fetched_bytes);
    write_one(m, w, "gauge", "spind_hot_slots", "HBM blocks granted to hot sets.",
              (double)r->hot_slots);
    write_one(m, w, "counter", "spind_planned_rows_total", "Rows that attended by plan.",
              (double)r->planned_rows);
    write_one(m, w, "counter", "spind_unscored_selections_total",
              "Selections without a score from the plug-in: the first pages were attended.",
              (double)r->unscored_selections);
    write_one(m, w, "counter", "spind_truncated_selections_total",
              "Selections that did not fit; always 0.", (double)r->truncated_selections);
}

/* How a device runs steps (kernels/backend.h). */
static void write_steps(const struct metrics *m, struct writer *w)
{
    const struct step_counts *c = &m->step.counts;
    STATES("counter", "spind_device_steps_total", "how",
           "Steps of a GPU: in one launch, recorded for that, command by command.",
           {"replayed", c->replayed}, {"recorded", c->captured}, {"listed", c->listed});
    write_one(m, w, "gauge", "spind_device_graphs", "Recorded steps that are kept.",
              (double)c->graphs);
    write_one(m, w, "gauge", "spind_device_graph_bytes", "Their device memory.",
              (double)c->graph_bytes);
    write_one(m, w, "counter", "spind_device_graphs_dropped_total",
              "Recorded steps that made room for others.", (double)c->dropped);
    write_one(m, w, "counter", "spind_device_graphs_refused_total",
              "Steps that could not be recorded.", (double)c->refused);
    write_one(
        m, w, "counter", "spind_device_slow_prompt_steps_total",
        "Steps in which a prompt was attended by a slower kernel: its plan was not made yet, or "
        "cannot be, or memory was short.",
        (double)c->slow);
}

#undef STATES

static void write_server(const struct metrics *m, const struct api *a, struct writer *w)
{
    const struct server_stats *s = &a->server;
    uint64_t now = clock_us(), heard = a->engine_heard_us;
    const struct {
        const char *type, *name, *help;
        double v;
    } v[] = {
        {"gauge", "spind_loop_lag_seconds", "Worst delay of the event loop, last interval.",
         (double)s->loop_lag_us * 1e-6},
        {"gauge", "spind_stream_unsent_bytes", "Bytes of streams that clients have not taken.",
         (double)s->stream_unsent_bytes},
        {"gauge", "spind_connections", "Open connections.", s->connections},
        {"counter", "spind_connections_accepted_total", "Accepted.", (double)s->accepted},
        {"counter", "spind_connections_refused_total", "Refused.", (double)s->refused},
        {"counter", "spind_requests_total", "HTTP requests read.", (double)s->requests},
        {"counter", "spind_received_bytes_total", "From clients.", (double)s->bytes_in},
        {"counter", "spind_sent_bytes_total", "To clients.", (double)s->bytes_out},
        {"gauge", "spind_calls_active", "Generation requests not answered to the last byte.",
         a->calls ? calls_active(a->calls) : 0},
        {"gauge", "spind_engine_heartbeat_age_seconds", "Since the engine's last report.",
         heard > 0 && now > heard ? (double)(now - heard) * 1e-6 : 0},
        {"counter", "spind_steps_total", "Engine steps.", (double)m->step.steps},
    };
    for (size_t i = 0; i < ARRAY_LEN(v); i++)
        write_one(m, w, v[i].type, v[i].name, v[i].help, v[i].v);
}

static double resident_bytes(void)
{
    unsigned long long size, resident = 0;
    FILE *f = fopen("/proc/self/statm", "re");
    if (f == NULL)
        return 0;
    if (fscanf(f, "%llu %llu", &size, &resident) != 2)
        resident = 0;
    fclose(f);
    return (double)resident * (double)sysconf(_SC_PAGESIZE);
}

static double open_files(void)
{
    double n = 0;
    DIR *d = opendir("/proc/self/fd");
    if (d == NULL)
        return 0;
    while (readdir(d) != NULL)
        n++;
    closedir(d);
    return n - 3; /* ".", "..", and the one that reads */
}

static void write_process(const struct metrics *m, struct writer *w)
{
    struct rusage u = {0};
    getrusage(RUSAGE_SELF, &u);
    double cpu = (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
                 (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) * 1e-6;
    const struct {
        const char *type, *name, *help;
        double v;
    } v[] = {
        {"gauge", "process_resident_memory_bytes", "Resident memory.", resident_bytes()},
        {"counter", "process_cpu_seconds_total", "User and system time.", cpu},
        {"gauge", "process_open_fds", "Open file descriptors.", open_files()},
        {"gauge", "process_start_time_seconds", "Start, in Unix time.", m->start_unix_s},
    };
    for (size_t i = 0; i < ARRAY_LEN(v); i++) {
        histogram_write_head(w, v[i].name, v[i].type, v[i].help);
        write_format(w, "%s ", v[i].name);
        histogram_write_number(w, v[i].v);
        write_bytes(w, "\n", 1);
    }
}

void metrics_render(struct metrics *m, const struct api *a, struct writer *out)
{
    write_queue(m, a, out);
    write_counters(m, out);
    write_reasons(m, out);
    write_config(m, a->info, out);
    write_histograms(m, out);
    write_http(m, out);
    write_blocks(m, out);
    write_residence(m, out);
    write_steps(m, out);
    write_server(m, a, out);
    if (a->roster != NULL)
        metrics_tenants_render(a->roster, out);
    write_process(m, out);
}
