/* `spind bench serve` (load.h): the words, the workloads, the run with its progress. */
#include "api/load/load.h"

#include "api/load/user.h"
#include "engine/tool/args.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

enum { PROGRESS_MS = 1000, PROGRESS_EVERY = 10 }; /* seconds between lines where nobody looks */

/* vllm-*: shared/peer/vllm_longctx.py's, draw for draw. */
static const struct load_spec workloads[] = {
    {.name = "poisson", .users = 100, .turns = 1, .rate = 1, .in = 1024, .out = 128},
    {.name = "sessions",
     .users = 8,
     .turns = 3,
     .keeps = true,
     .stagger = 0.5,
     .pause = 2,
     .document = 4096,
     .in = 256,
     .out = 256},
    {.name = "stream", .users = 16, .turns = 4, .in = 128, .out = 256},
    {.name = "long", .users = 16, .turns = 1, .in = 512, .out = 8192},
    {.name = "shared", .users = 64, .turns = 1, .rate = 4, .shared = 4096, .in = 256, .out = 128},
    {.name = "vllm-poisson",
     .users = 24,
     .turns = 1,
     .rate = 0.15,
     .in = 64000,
     .out = 1024,
     .seed = 3,
     .first_id = 1000,
     .last_id = 120000},
    {.name = "vllm-sessions",
     .users = 20,
     .turns = 3,
     .keeps = true,
     .stagger = 0.5,
     .pause = 2,
     .document = 64000,
     .in = 256,
     .out = 256,
     .seed = 2,
     .first_id = 1000,
     .last_id = 120000},
};

/* Of the others: in every vocabulary of size, beyond the special ones. */
enum { FIRST_ID = 1000, LAST_ID = 32000 };

struct load {
    struct load_spec spec;
    const char *workload, *url, *key, *json, *svg, *kind;
    struct args_list slo, range;
    uint32_t timeout_s;
    bool any_length, quiet;
    struct wire_target target;
    uv_loop_t loop;
    uv_timer_t progress;
    uv_signal_t interrupt;
    struct crowd crowd;
    struct tally tally;
    uint32_t n_ticks;

    /* The same load once more, beside users who ask without end: */
    struct load_spec flood; /* users 0: nobody */
    const char *flood_key;
    double flood_lead; /* seconds that they are ahead */
    struct wire_target flood_target;
    struct crowd flood_crowd;
    struct tally beside, flood_tally; /* tally is of the load alone, then */
};

/* ---- words ---- */

static const struct load_spec *find_workload(const char *name)
{
    for (size_t i = 0; i < ARRAY_LEN(workloads); i++)
        if (strcmp(workloads[i].name, name) == 0)
            return &workloads[i];
    return NULL;
}

/* The other words are changes of it, wherever it stands. */
static const char *workload_named(int argc, char **argv)
{
    const char *name = "poisson";
    for (int i = 0; i < argc; i++) {
        if (strncmp(argv[i], "--workload=", 11) == 0)
            name = argv[i] + 11;
        else if (strcmp(argv[i], "--workload") == 0 && i + 1 < argc)
            name = argv[i + 1];
    }
    return name;
}

/* "2s", "50ms", or milliseconds. */
static bool read_time(const char *text, double *us)
{
    char *end;
    double v = strtod(text, &end);
    double unit = strcmp(end, "s") == 0 ? 1e6 : strcmp(end, "ms") == 0 || *end == '\0' ? 1e3 : 0;
    *us = v * unit;
    return end != text && isfinite(v) && *us > 0;
}

static status read_slo(struct load *l)
{
    for (uint32_t i = 0; i < l->slo.n; i++) {
        const char *word = l->slo.v[i];
        double *to = strncmp(word, "ttft=", 5) == 0   ? &l->spec.slo_ttft_us
                     : strncmp(word, "tpot=", 5) == 0 ? &l->spec.slo_tpot_us
                                                      : NULL;
        if (to == NULL || !read_time(word + 5, to))
            return err(ERR_ARG,
                       "--slo %s: wanted is ttft=TIME or tpot=TIME, such as ttft=2s,"
                       "tpot=50ms",
                       word);
    }
    return OK;
}

static status read_range(struct load *l)
{
    char *end[2];
    if (l->range.n == 0)
        return OK;
    double lo = strtod(l->range.v[0], &end[0]);
    double hi = l->range.n == 2 ? strtod(l->range.v[1], &end[1]) : -1;
    if (l->range.n != 2 || *end[0] || *end[1] || !(lo >= 0 && lo < hi && hi <= INT32_MAX))
        return err(ERR_ARG, "--id-range: wanted are two numbers, first,behind-the-last");
    l->spec.first_id = (uint32_t)lo;
    l->spec.last_id = (uint32_t)hi;
    return OK;
}

static status read_kind(struct load *l)
{
    struct load_spec *s = &l->spec;
    s->chat = strcmp(l->kind, "chat") == 0;
    s->text = s->chat || strcmp(l->kind, "text") == 0;
    if (!s->text && strcmp(l->kind, "ids") != 0)
        return err(ERR_ARG, "--prompt-kind %s: there are ids, text and chat", l->kind);
    if (s->extra != NULL &&
        (s->extra[0] != '{' || s->extra[strlen(s->extra) - 1] != '}' || strlen(s->extra) < 5))
        return err(ERR_ARG, "--extra: wanted is a JSON object, such as {\"top_k\":5}");
    if (s->shared + s->document + s->in == 0)
        return err(ERR_ARG, "a prompt of no token");
    return OK;
}

/* Its prompts are drawn as those of the load, from another seed. */
static status read_flood(struct load *l)
{
    const struct load_spec *s = &l->spec;
    l->flood.name = "flood";
    l->flood.turns = 2; /* of which there is no last: each is composed when it is asked */
    l->flood.insists = true;
    l->flood.seed = s->seed + 1;
    l->flood.first_id = s->first_id;
    l->flood.last_id = s->last_id;
    l->flood.text = s->text;
    l->flood.chat = s->chat;
    l->flood.model = s->model;
    return wire_resolve(&l->flood_target, l->url, s->chat ? "chat/completions" : "completions",
                        l->flood_key != NULL ? l->flood_key : l->key);
}

static status check(struct load *l)
{
    if (find_workload(l->workload) == NULL)
        return err(ERR_ARG,
                   "--workload %s: there are poisson, sessions, stream, long, shared, "
                   "vllm-poisson and vllm-sessions",
                   l->workload);
    TRY(read_slo(l));
    TRY(read_range(l));
    TRY(read_kind(l));
    if (l->flood.users > 0)
        TRY(read_flood(l));
    else if (l->flood_key != NULL)
        return err(ERR_ARG, "--flood-key: wanted is --flood-users, too");
    return wire_resolve(&l->target, l->url, l->spec.chat ? "chat/completions" : "completions",
                        l->key);
}

/* ---- the run ---- */

static void tell(struct load *l, bool last)
{
    const struct tally *t = l->crowd.tally;
    uint64_t now = clock_us();
    if (now < t->started_us) /* the flood alone */
        return;
    double s = (double)(now - t->started_us) / 1e6;
    uint64_t over = t->all.n_good + t->all.n_failed;
    uint64_t of = (uint64_t)l->spec.users * l->spec.turns;
    bool looked_at = isatty(STDERR_FILENO) != 0;
    if (l->quiet || (!looked_at && !last && ++l->n_ticks % PROGRESS_EVERY != 0))
        return;
    fprintf(stderr, "%s%.0f s: %llu of %llu answers, %u being written, %llu failed, %.0f tok/s%s",
            looked_at ? "\r\x1b[K" : "", s, (unsigned long long)over, (unsigned long long)of,
            l->crowd.n_asking, (unsigned long long)t->all.n_failed,
            s > 0 ? (double)t->tokens_seen / s : 0, looked_at && !last ? "" : "\n");
}

static void close_own(struct load *l)
{
    if (!uv_is_closing((uv_handle_t *)&l->progress))
        uv_close((uv_handle_t *)&l->progress, NULL);
    if (!uv_is_closing((uv_handle_t *)&l->interrupt))
        uv_close((uv_handle_t *)&l->interrupt, NULL);
}

static void on_progress(uv_timer_t *timer)
{
    tell(timer->data, false);
}

static void on_interrupt(uv_signal_t *signal, int number)
{
    struct load *l = signal->data;
    (void)number;
    l->crowd.tally->interrupted = true;
    user_crowd_stop(&l->crowd);
}

/* Each user is a connection. */
static void raise_limit(uint32_t users)
{
    struct rlimit r;
    if (getrlimit(RLIMIT_NOFILE, &r) != 0 || r.rlim_cur >= users + 64)
        return;
    r.rlim_cur = r.rlim_max < users + 64 ? r.rlim_max : users + 64;
    (void)setrlimit(RLIMIT_NOFILE, &r);
}

static struct crowd crowd_of(struct load *l, const struct load_spec *spec, struct tally *tally,
                             const struct wire_target *target)
{
    tally->spec = spec;
    tally->any_length = l->any_length;
    return (struct crowd){.loop = &l->loop, .spec = spec, .target = target, .tally = tally};
}

/* The users of the flood come first, and stop when those of the load are done. */
static void start_crowds(struct load *l, struct tally *tally, bool flooded)
{
    uint64_t lead_us = flooded ? (uint64_t)(l->flood_lead * 1e6) : 0;
    l->crowd = crowd_of(l, &l->spec, tally, &l->target);
    l->crowd.prompts = flooded; /* or the prefix cache would know them */
    user_crowd_init(&l->crowd);
    tally->started_us = clock_us() + lead_us;
    if (flooded) {
        l->flood_crowd = crowd_of(l, &l->flood, &l->flood_tally, &l->flood_target);
        l->crowd.beside = &l->flood_crowd;
        user_crowd_init(&l->flood_crowd);
        l->flood_tally.started_us = clock_us();
        user_crowd_start(&l->flood_crowd, 0);
    }
    user_crowd_start(&l->crowd, lead_us);
}

/* The loop until nobody is left; then our own handles, which do not keep it alive. */
static void run(struct load *l, struct tally *tally, bool flooded)
{
    CHECK(uv_loop_init(&l->loop) == 0);
    CHECK(uv_timer_init(&l->loop, &l->progress) == 0);
    CHECK(uv_signal_init(&l->loop, &l->interrupt) == 0);
    l->progress.data = l->interrupt.data = l;
    l->n_ticks = 0;
    start_crowds(l, tally, flooded);
    uv_timer_start(&l->progress, on_progress, PROGRESS_MS, PROGRESS_MS);
    uv_signal_start(&l->interrupt, on_interrupt, SIGINT);
    uv_unref((uv_handle_t *)&l->progress);
    uv_unref((uv_handle_t *)&l->interrupt);
    uv_run(&l->loop, UV_RUN_DEFAULT);
    tally->ended_us = l->flood_tally.ended_us = clock_us();
    if (tally->started_us > tally->ended_us) /* interrupted before it began */
        tally->started_us = tally->ended_us;
    tell(l, true);
    close_own(l);
    uv_run(&l->loop, UV_RUN_DEFAULT);
    CHECK(uv_loop_close(&l->loop) == 0);
    user_crowd_fini(&l->crowd);
    if (flooded)
        user_crowd_fini(&l->flood_crowd);
}

static void tell_workload(const struct load *l)
{
    const struct load_spec *s = &l->spec;
    printf("%s on %s: %u users", s->name, l->url, s->users);
    if (s->rate > 0)
        printf(" at %g/s", s->rate);
    else if (s->stagger > 0)
        printf(", %g s apart", s->stagger);
    printf(", %u turn%s", s->turns, s->turns > 1 ? "s" : "");
    if (s->turns > 1)
        printf("%s, %g s between", s->keeps ? " of one conversation" : "", s->pause);
    printf(":");
    if (s->shared > 0)
        printf(" %u tokens that all share,", s->shared);
    if (s->document > 0)
        printf(" a document of %u,", s->document);
    printf(" %u in, %u out; prompts as %s, seed %u\n\n", s->in, s->out, l->kind, s->seed);
    fflush(stdout);
}

static void help(const struct args_option *options, uint32_t n)
{
    printf("spind bench serve --url http://HOST:PORT [OPTIONS]\n\n"
           "A load on an OpenAI server. Workloads, whose numbers the other options change:\n");
    for (size_t i = 0; i < ARRAY_LEN(workloads); i++) {
        const struct load_spec *s = &workloads[i];
        printf("  %-14s %u users, %u turns, rate %g/s, shared %u, document %u, in %u, out %u\n",
               s->name, s->users, s->turns, s->rate, s->shared, s->document, s->in, s->out);
    }
    printf("\n");
    args_print(options, n);
}

enum { GO_ON = -1 };

/* GO_ON, or an exit status: everything is said. */
static int read_words(struct load *l, int argc, char **argv)
{
    struct load_spec *s = &l->spec;
    const double most = 1 << 30;
    bool wants_help = false;
    const struct args_option options[] = {
        {"url", ARGS_TEXT, &l->url, 0, 0, "the server; /v1 is added where no path is given"},
        {"api-key", ARGS_TEXT, &l->key, 0, 0, "its key"},
        {"model", ARGS_TEXT, &s->model, 0, 0, "the model's name, where the server wants one"},
        {"workload", ARGS_TEXT, &l->workload, 0, 0, "see above (poisson)"},
        {"users", ARGS_COUNT, &s->users, 1, 100000, "users; with one turn: requests"},
        {"requests", ARGS_COUNT, &s->users, 1, 100000, "the same"},
        {"turns", ARGS_COUNT, &s->turns, 1, 100000, "requests of each user"},
        {"keep", ARGS_FLAG, &s->keeps, 0, 0, "a turn's prompt holds all that was said before"},
        {"rate", ARGS_NUMBER, &s->rate, 0, 1e6, "arrivals a second (Poisson); 0: see stagger"},
        {"stagger", ARGS_NUMBER, &s->stagger, 0, 1e6, "seconds between arrivals"},
        {"pause", ARGS_NUMBER, &s->pause, 0, 1e6, "seconds after an answer"},
        {"shared", ARGS_COUNT, &s->shared, 0, most, "first tokens that all prompts share"},
        {"document", ARGS_COUNT, &s->document, 0, most, "tokens of each user's own document"},
        {"in", ARGS_COUNT, &s->in, 0, most, "new tokens of a turn"},
        {"out", ARGS_COUNT, &s->out, 1, most, "tokens of an answer (ignore_eos is sent)"},
        {"seed", ARGS_COUNT, &s->seed, 0, UINT32_MAX, "of arrivals and prompts"},
        {"id-range", ARGS_LIST, &l->range, 0, 0, "ids are drawn from [A,B)"},
        {"prompt-kind", ARGS_TEXT, &l->kind, 0, 0, "ids, text or chat: how prompts are sent"},
        {"temperature", ARGS_NUMBER, &s->temperature, 0, 2, "of the sampling (0: greedy)"},
        {"extra", ARGS_TEXT, &s->extra, 0, 0, "more members of the body: {\"sparse\":{...}}"},
        {"any-length", ARGS_FLAG, &l->any_length, 0, 0, "answers may be shorter than asked"},
        {"timeout", ARGS_COUNT, &l->timeout_s, 1, 1e6, "seconds of silence that fail an answer"},
        {"slo", ARGS_LIST, &l->slo, 0, 0, "ttft=TIME,tpot=TIME: what goodput counts"},
        {"flood-users", ARGS_COUNT, &l->flood.users, 1, 100000,
         "once more, beside so many who ask without end: how much slower is that?"},
        {"flood-key", ARGS_TEXT, &l->flood_key, 0, 0, "their key: that of another tenant"},
        {"flood-in", ARGS_COUNT, &l->flood.in, 1, most, "tokens of their prompts (8192)"},
        {"flood-out", ARGS_COUNT, &l->flood.out, 1, most, "tokens of their answers (256)"},
        {"flood-lead", ARGS_NUMBER, &l->flood_lead, 0, 1e6, "seconds that they come earlier (5)"},
        {"json", ARGS_TEXT, &l->json, 0, 0, "write all numbers to this file"},
        {"svg", ARGS_TEXT, &l->svg, 0, 0, "draw the distributions into this file"},
        {"quiet", ARGS_FLAG, &l->quiet, 0, 0, "no progress on stderr"},
    };
    status st = args_parse(options, ARRAY_LEN(options), argc, argv, NULL, &wants_help);
    if (wants_help) {
        help(options, ARRAY_LEN(options));
        return 0;
    }
    if (st == OK)
        st = check(l);
    if (st == OK)
        return GO_ON;
    fprintf(stderr, "spind bench serve: %s\n", err_text());
    return st == ERR_ARG ? 2 : 1;
}

static void set_presets(struct load *l, const char *workload)
{
    const struct load_spec *preset = find_workload(workload);
    l->spec = preset != NULL ? *preset : workloads[0];
    if (l->spec.last_id == 0) {
        l->spec.first_id = FIRST_ID;
        l->spec.last_id = LAST_ID;
    }
    l->workload = "poisson";
    l->url = "http://127.0.0.1:8000";
    l->kind = "ids";
    l->timeout_s = 600;
    l->flood.in = 8192;
    l->flood.out = 256;
    l->flood_lead = 5;
}

static bool is_bad(const struct tally *t)
{
    return t->all.n_failed > 0 || t->n_unfinished > 0 || t->interrupted;
}

/* Once, or once alone and once beside the flood. */
static status run_all(struct load *l)
{
    const bool flooded = l->flood.users > 0;
    run(l, &l->tally, false);
    if (!flooded || l->tally.interrupted)
        return tally_report(&l->tally, NULL, NULL, l->url, l->json, l->svg);
    run(l, &l->beside, true);
    return tally_report(&l->beside, &l->tally, &l->flood_tally, l->url, l->json, l->svg);
}

int load_verb(int argc, char **argv)
{
    struct load *l = mem_alloc(sizeof *l);
    set_presets(l, workload_named(argc, argv));
    int code = read_words(l, argc, argv);
    if (code != GO_ON) {
        mem_free(l);
        return code;
    }
    l->target.timeout_s = l->flood_target.timeout_s = l->timeout_s;
    raise_limit(l->spec.users + l->flood.users);
    tell_workload(l);
    status st = run_all(l);
    if (st != OK)
        fprintf(stderr, "spind bench serve: %s\n", err_text());
    code = st != OK || is_bad(&l->tally) || is_bad(&l->beside);
    tally_fini(&l->tally);
    tally_fini(&l->beside);
    tally_fini(&l->flood_tally);
    mem_free(l);
    return code;
}
