/* The process: one libuv loop that owns sockets and the API, a helper thread that loads the engine
 * while /health already answers 503, and the engine's own thread, heard through its mailbox.
 *
 *   bind -> load (thread) -> ready -> serve -> SIGTERM: drain -> nothing left, or out of time -> exit
 *
 * Everything in struct server belongs to the loop thread, except what load_engine writes before it
 * signals `loaded`. */
#include "server/serve.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "kernels/log.h"
#include "server/work.h"

enum {
    TICK_MS = 100,
    TICK_US = 100000,
    SECOND_US = 1000000,
    LAG_WINDOW_TICKS = 100,    /* the worst lag of 10 to 20 s is reported: scrapes are rare */
    GOODBYE_US = 1000000,      /* for the last error events to leave */
    DESCRIPTORS_RESERVED = 64, /* logs, epoll, model, listeners, connections turned away */
};

enum phase { LOADING, SERVING, DRAINING, LEAVING };

struct server {
    struct config cfg;
    const struct outside *outside;
    uv_loop_t loop;
    uv_async_t mail, loaded;
    uv_timer_t tick;
    uv_signal_t sigterm, sigint, sighup;
    uv_thread_t loader;
    bool loader_running;
    struct api *api;
    struct engine *engine;
    struct net net;
    enum phase phase;
    int exit_code;
    int leave_code; /* of a drain that ends as it should */
    uint64_t start_us, last_tick_us, drain_until_us, leave_by_us, said_us;
    uint64_t lag_us, lag_before_us; /* worst of this window and of the one before */
    uint32_t lag_ticks;
    time_t date_s;
    status load_status; /* written by the loader */
    char load_error[512];
};

/* ---- getting ready ---- */

static void engine_wake(void *arg)
{
    uv_async_send(&((struct server *)arg)->mail);
}

static void load_engine(void *arg)
{
    struct server *s = arg;
    s->load_status = engine_create(&s->engine, &s->cfg.engine, engine_wake, s);
    snprintf(s->load_error, sizeof s->load_error, "%s", s->load_status == OK ? "" : err_text());
    uv_async_send(&s->loaded);
}

static void notify_systemd(const char *path)
{
    static const char text[] = "READY=1";
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    size_t len = path == NULL ? 0 : strlen(path);
    if (len == 0 || len >= sizeof to.sun_path)
        return;
    memcpy(to.sun_path, path, len);
    if (path[0] == '@')
        to.sun_path[0] = '\0'; /* an abstract address */
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || sendto(fd, text, sizeof text - 1, 0, (struct sockaddr *)&to,
                         (socklen_t)(offsetof(struct sockaddr_un, sun_path) + len)) < 0)
        log_line(LOG_WARN, "NOTIFY_SOCKET: %s", strerror(errno));
    if (fd >= 0)
        close(fd);
}

static void tell_ready(struct server *s)
{
    static const char text[] = "READY=1\n";
    char address[128];
    net_address(&s->net, address, sizeof address);
    log_line(LOG_INFO, "ready in %llu ms", (unsigned long long)(clock_us() - s->start_us) / 1000);
    log_line(LOG_INFO, "listening on %s", address);
    notify_systemd(s->outside->env("NOTIFY_SOCKET"));
    if (s->cfg.ready_fd > 2) {
        if (write((int)s->cfg.ready_fd, text, sizeof text - 1) < 0)
            log_line(LOG_WARN, "--ready-fd %u: %s", s->cfg.ready_fd, strerror(errno));
        close((int)s->cfg.ready_fd);
    }
}

static void leave(struct server *s, int code)
{
    s->exit_code = code;
    s->phase = LEAVING;
    uv_stop(&s->loop);
}

static void on_loaded(uv_async_t *h)
{
    struct server *s = h->data;
    uv_thread_join(&s->loader);
    s->loader_running = false;
    if (s->load_status == OK) {
        api_engine_ready(s->api, engine_info(s->engine), engine_mailbox(s->engine));
        s->load_status = engine_start(s->engine);
        if (s->load_status != OK)
            snprintf(s->load_error, sizeof s->load_error, "%s", err_text());
    }
    if (s->load_status != OK) {
        log_line(LOG_ERROR, "cannot serve: %s", s->load_error);
        leave(s, EXIT_FAILED);
        return;
    }
    s->phase = SERVING;
    tell_ready(s);
}

static void on_mail(uv_async_t *h)
{
    struct server *s = h->data;
    s->net.env.now_us = clock_us();
    if (s->phase == SERVING || s->phase == DRAINING)
        api_events(s->api);
}

/* ---- time ---- */

static void measure_lag(struct server *s, uint64_t now)
{
    uint64_t due = s->last_tick_us + TICK_US;
    if (s->last_tick_us != 0 && now > due && now - due > s->lag_us)
        s->lag_us = now - due;
    s->last_tick_us = now;
    if (++s->lag_ticks < LAG_WINDOW_TICKS)
        return;
    s->lag_before_us = s->lag_us;
    s->lag_us = s->lag_ticks = 0;
}

static void keep_date(struct server *s)
{
    time_t t = time(NULL);
    if (t == s->date_s)
        return;
    s->date_s = t;
    http_text_date(s->net.env.date, (uint64_t)t);
}

static void drain_tick(struct server *s, uint64_t now)
{
    uint32_t active = api_n_active(s->api);
    if (active == 0 &&
        (net_unsent(&s->net) == 0 || (s->leave_by_us != 0 && now > s->leave_by_us))) {
        log_line(LOG_INFO, "drained");
        leave(s, s->leave_code);
    } else if (s->leave_by_us != 0 && now > s->leave_by_us) {
        leave(s, s->leave_code);
    } else if (s->leave_by_us == 0 && now >= s->drain_until_us) {
        if (active > 0)
            log_line(LOG_WARN, "drain timeout: %u requests are cut off", active);
        api_abort_all(s->api, "shutting_down", "The server is shutting down");
        s->leave_by_us = now + GOODBYE_US;
    } else if (now - s->said_us >= SECOND_US) {
        log_line(LOG_INFO, "draining: %u running", active);
        s->said_us = now;
    }
}

static void start_drain(struct server *s, uint64_t now, uint64_t drain_us, int code)
{
    s->phase = DRAINING;
    s->leave_code = code;
    s->drain_until_us = now + drain_us;
    s->said_us = now;
    api_drain(s->api);
    net_drain(&s->net);
    drain_tick(s, now);
}

static void on_tick(uv_timer_t *t)
{
    struct server *s = t->data;
    struct server_stats stats;
    uint64_t now = clock_us();
    s->net.env.now_us = now;
    measure_lag(s, now);
    keep_date(s);
    net_tick(&s->net);
    net_stats(&s->net, &stats);
    stats.loop_lag_us = s->lag_us > s->lag_before_us ? s->lag_us : s->lag_before_us;
    api_set_server_stats(s->api, &stats);
    api_tick(s->api, now);
    if (s->phase == SERVING && api_engine_dead(s->api)) {
        log_line(LOG_ERROR, "leaving: whoever supervises this process should start it again");
        start_drain(s, now, 0, EXIT_ENGINE);
    }
    if (s->phase == DRAINING)
        drain_tick(s, now);
}

/* ---- signals ---- */

static void on_signal(uv_signal_t *h, int signo)
{
    struct server *s = h->data;
    const char *name = signo == SIGTERM ? "SIGTERM" : "SIGINT";
    if (s->phase == LOADING) { /* nobody waits for an answer, and loading cannot be interrupted */
        log_line(LOG_INFO, "%s while loading: leaving", name);
        log_stop();
        _exit(EXIT_OK);
    }
    if (s->phase != SERVING) {
        log_line(LOG_WARN, "second signal: leaving at once");
        log_stop();
        _exit(128 + signo);
    }
    uint32_t active = api_n_active(s->api);
    log_line(LOG_INFO, "%s: draining: %u running, at most %.1f s", name, active,
             (double)s->cfg.drain_us / 1e6);
    start_drain(s, s->net.env.now_us = clock_us(), s->cfg.drain_us, EXIT_OK);
}

static void on_reload(uv_signal_t *h, int signo)
{
    struct server *s = h->data;
    (void)signo;
    if (s->phase == LOADING || s->phase == SERVING)
        api_reload(s->api);
}

/* ---- start and end ---- */

static void random_bytes(uint8_t *p, size_t n)
{
    CHECK(getrandom(p, n, 0) == (ssize_t)n); /* up to 256 bytes it neither blocks nor fails */
}

/* A descriptor per connection and some to spare, so that the cap answers 503 before the kernel
 * answers EMFILE. */
static void fit_descriptors(struct config *cfg)
{
    struct rlimit r;
    if (getrlimit(RLIMIT_NOFILE, &r) != 0)
        return;
    if (r.rlim_cur < r.rlim_max) {
        struct rlimit more = {r.rlim_max, r.rlim_max};
        if (setrlimit(RLIMIT_NOFILE, &more) == 0)
            r = more;
    }
    uint64_t spare = DESCRIPTORS_RESERVED + NET_TURNED_AWAY_MAX;
    uint64_t room = r.rlim_cur > spare + 1 ? r.rlim_cur - spare : 1;
    if (cfg->net.max_connections <= room)
        return;
    log_line(LOG_WARN, "--max-connections lowered from %u to %llu: ulimit -n is %llu",
             cfg->net.max_connections, (unsigned long long)room, (unsigned long long)r.rlim_cur);
    cfg->net.max_connections = (uint32_t)room;
}

static void harden(void)
{
    struct rlimit none = {0, 0};
    signal(SIGPIPE, SIG_IGN);
    setrlimit(RLIMIT_CORE, &none); /* a core file would hold prompts and keys */
}

static int check_model(const struct config *cfg)
{
    if (strcmp(cfg->device, "mock") == 0)
        return EXIT_OK;
    if (cfg->engine.model == NULL) {
        fprintf(stderr, "spind: no model given. Try: spind serve FILE.gguf ('make serve' gets a "
                        "small one), or --device mock\n");
        return EXIT_USAGE;
    }
    if (access(cfg->engine.model, R_OK) == 0)
        return EXIT_OK;
    fprintf(stderr, "spind: %s: %s. Pass the path of a GGUF file; 'make serve' gets a small one\n",
            cfg->engine.model, strerror(errno));
    return EXIT_FAILED;
}

static void init_handles(struct server *s)
{
    CHECK(uv_loop_init(&s->loop) == 0);
    CHECK(uv_async_init(&s->loop, &s->mail, on_mail) == 0);
    CHECK(uv_async_init(&s->loop, &s->loaded, on_loaded) == 0);
    CHECK(uv_timer_init(&s->loop, &s->tick) == 0);
    CHECK(uv_signal_init(&s->loop, &s->sigterm) == 0);
    CHECK(uv_signal_init(&s->loop, &s->sigint) == 0);
    CHECK(uv_signal_init(&s->loop, &s->sighup) == 0);
    s->mail.data = s->loaded.data = s->tick.data = s->sigterm.data = s->sigint.data =
        s->sighup.data = s;
    uv_timer_start(&s->tick, on_tick, TICK_MS, TICK_MS);
    uv_signal_start(&s->sigterm, on_signal, SIGTERM);
    uv_signal_start(&s->sigint, on_signal, SIGINT);
    if (s->cfg.api.tenants_file != NULL) /* without a file it ends the process, as ever */
        uv_signal_start(&s->sighup, on_reload, SIGHUP);
    work_init(&s->loop);
    keep_date(s);
}

static void init_env(struct server *s)
{
    const struct config *cfg = &s->cfg;
    s->net.env.api = s->api;
    s->net.env.limits = cfg->limits;
    s->net.env.random = random_bytes;
    s->net.env.rules = (struct rules){.check_host = !config_has_keys(cfg),
                                      .allow_ip_hosts = !config_is_loopback(cfg),
                                      .hosts = cfg->hosts.v,
                                      .n_hosts = cfg->hosts.n,
                                      .origins = cfg->origins.v,
                                      .n_origins = cfg->origins.n};
}

static status open_server(struct server *s)
{
    char address[128];
    init_handles(s);
    s->cfg.api.version = s->outside->version;
    TRY(api_create(&s->api, &s->cfg.api));
    init_env(s);
    TRY(net_open(&s->net, &s->loop, &s->cfg.net));
    net_address(&s->net, address, sizeof address);
    log_line(LOG_INFO, "bound to %s, loading", address);
    int rc = uv_thread_create(&s->loader, load_engine, s);
    if (rc != 0)
        return err(ERR_MEMORY, "cannot start a thread: %s", uv_strerror(rc));
    s->loader_running = true;
    return OK;
}

static void close_handle(uv_handle_t *h, void *arg)
{
    (void)arg;
    if (!uv_is_closing(h))
        uv_close(h, NULL);
}

/* The API cancels what is left while the engine still listens; then the engine ends. */
static void close_server(struct server *s)
{
    if (s->loader_running)
        uv_thread_join(&s->loader);
    net_close(&s->net);
    uv_walk(&s->loop, close_handle, NULL);
    uv_run(&s->loop, UV_RUN_DEFAULT);
    if (s->engine != NULL)
        engine_destroy(s->engine);
    if (s->api != NULL)
        api_destroy(s->api);
    CHECK(uv_loop_close(&s->loop) == 0);
}

static void log_arguments(const struct server *s)
{
    const struct config *cfg = &s->cfg;
    char text[1536];
    log_line(LOG_INFO, "spind %s", s->outside->version);
    config_describe(cfg, text, sizeof text);
    if (text[0] != '\0')
        log_line(LOG_INFO, "non-default args: %s", text);
    if (!config_has_keys(cfg) && !config_is_loopback(cfg))
        log_line(LOG_WARN, "listening beyond this machine without an API key");
}

static int run(struct server *s)
{
    s->start_us = clock_us();
    int rc = check_model(&s->cfg);
    if (rc != EXIT_OK)
        return rc;
    log_arguments(s);
    harden();
    fit_descriptors(&s->cfg);
    if (open_server(s) == OK) {
        uv_run(&s->loop, UV_RUN_DEFAULT);
    } else {
        log_stop(); /* the reason is the last line */
        fprintf(stderr, "spind: %s\n", err_text());
        s->exit_code = EXIT_FAILED;
    }
    close_server(s);
    return s->exit_code;
}

static enum log_level level_of(const char *name)
{
    switch (name[0]) {
    case 'd': return LOG_DEBUG;
    case 'w': return LOG_WARN;
    case 'e': return LOG_ERROR;
    default: return LOG_INFO;
    }
}

int serve_run(int argc, char **argv, const struct outside *out)
{
    struct server *s = mem_alloc(sizeof *s);
    int rc = EXIT_OK;
    s->outside = out;
    if (config_load(&s->cfg, argc, argv, out->env) != OK) {
        fprintf(stderr, "spind: %s\n", err_text());
        rc = EXIT_USAGE;
    } else if (s->cfg.action == CONFIG_HELP) {
        config_print_help(&s->cfg);
    } else if (s->cfg.action == CONFIG_PRINT) {
        config_print(&s->cfg);
    } else if (config_check_open(&s->cfg) != OK) {
        fprintf(stderr, "spind: %s\n", err_text());
        rc = EXIT_CONFIG;
    } else {
        log_set_level(level_of(s->cfg.log_level));
        if (log_start() != OK) /* lines then go out one by one, and may wait for their reader */
            log_line(LOG_WARN, "%s", err_text());
        rc = run(s);
        log_stop();
    }
    config_fini(&s->cfg);
    mem_free(s);
    return rc;
}
