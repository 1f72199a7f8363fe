/* What does one token cost between the engine's event and the bytes of its SSE frame?
 *
 * 64 streams get one token each per batch, as from one engine step; writes go to memory. The aim is
 * 500,000 tokens/s on one core through the whole server, so the API may take a part of 2 us; the
 * floor printed beside it is copying a frame of that size. */
#include "tests/call_rig.h"

#include <time.h>

enum { STREAMS = 64, STEPS = 3900 };

/* CPU time: other processes do not count. */
static double cpu_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void play(const char *name, const char *json)
{
    static struct rig g;
    static struct exchange x[STREAMS];
    rig_init(&g, 1 << 20);
    g.a.cfg.max_queued_requests = STREAMS;
    size_t bytes = 0;
    for (int i = 0; i < STREAMS; i++) {
        rig_open(&x[i]);
        CHECK(rig_start(&g, &x[i], REQUEST_CHAT, json));
    }
    double start = cpu_seconds();
    for (uint32_t step = 0; step < STEPS; step++) {
        for (int i = 0; i < STREAMS; i++) {
            struct rig_event e = {.id = g.ids[i], .token = 'a' + step % 26, .index = step};
            rig_token(&g, &e);
        }
        calls_flush(&g.a);
        for (int i = 0; i < STREAMS; i++) {
            bytes += x[i].bytes.len;
            writer_reset(&x[i].bytes);
        }
    }
    double seconds = (cpu_seconds() - start), n = (double)STEPS * STREAMS;
    static char frame[4096], copy[4096];
    size_t size = (size_t)((double)bytes / n);
    start = cpu_seconds();
    for (uint32_t i = 0; i < STEPS * 16; i++) {
        memcpy(copy, frame, size < sizeof copy ? size : sizeof copy);
        __asm__ volatile("" ::"r"(copy) : "memory");
    }
    double floor_s = (cpu_seconds() - start) / (STEPS * 16.0);
    printf("%-28s %9.0f tokens/s %6.0f ns/token, frame %4zu B, copying it %3.0f ns\n", name,
           n / seconds, seconds / n * 1e9, size, floor_s * 1e9);
    for (int i = 0; i < STREAMS; i++) {
        call_gone(&g.a, &x[i]);
        rig_close(&x[i]);
    }
    rig_fini(&g);
}

int main(void)
{
    play("chat", "{\"prompt\":\"a\",\"stream\":true,\"max_tokens\":4000,\"ignore_eos\":true}");
    play("chat, 4 stop strings", "{\"prompt\":\"a\",\"stream\":true,\"max_tokens\":4000,"
                                 "\"stop\":[\"abd\",\"###\",\"END\",\"xyzzy\"]}");
    play("chat, running usage", "{\"prompt\":\"a\",\"stream\":true,\"max_tokens\":4000,"
                                "\"stream_options\":{\"include_usage\":true,"
                                "\"continuous_usage_stats\":true}}");
    play("chat, logprobs", "{\"prompt\":\"a\",\"stream\":true,\"max_tokens\":4000,\"logprobs\":0}");
    return 0;
}
