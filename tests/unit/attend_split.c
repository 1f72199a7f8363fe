/* How attention by position is shared out among CTAs (kernels/cuda/attend_split.h): every position once, and nobody
 * waits for a straggler. The SMs are an H200's, the heads Llama-3.1-8B's. */
#include "kernels/cuda/attend_split.h"
#include "tests/tap.h"

enum { SMS = 132, SLOTS = 2 * SMS, KV_HEADS = 8 };
enum { CONTEXT = 131072, MAX_BATCH = 8, MAX_CTAS = 4096 };

static void splits_follow_each_other(void)
{
    bool ordered = true, counted = true;
    for (uint32_t i = 0; attend_split_begin(i) < 4 * CONTEXT; i++)
        ordered &= attend_split_begin(i + 1) > attend_split_begin(i) &&
                   (attend_split_begin(i + 1) - attend_split_begin(i)) % SPLIT_SHORT == 0;
    for (uint32_t n = 0; n < CONTEXT; n++) {
        const uint32_t whole = attend_whole_splits(n), all = attend_splits(n);
        counted &= attend_split_begin(whole) <= n && attend_split_begin(whole + 1) > n &&
                   all == whole + (attend_split_begin(whole) < n);
    }
    ok(ordered, "splits follow each other without a gap, each of whole short ones");
    ok(counted, "the splits of every length are as many as begin before its end");
}

static void every_split_is_in_one_cta(void)
{
    static const uint32_t lengths[] = {1,    5,    127,   128,   129,    1000,    4095,   4096,
                                       4097, 9001, 16385, 33000, 131072, 1 << 20, 4000001};
    static const uint32_t firsts[] = {0, 1, 16, 64, 128, 300};
    static uint32_t ends[MAX_CTAS];
    bool once = true, held = true, kept = true;
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++)
        for (size_t f = 0; f < sizeof firsts / sizeof *firsts; f++)
            for (uint32_t n = 1; n < 140; n += n < 40 ? 1 : 7) {
                const struct attend_stretches s = {firsts[f], lengths[i]};
                const uint32_t used = attend_cut(s, n, ends), room = attend_cut_room(s, n);
                uint32_t from = 0;
                for (uint32_t c = 0; c < used; from = ends[c++]) {
                    once &= ends[c] > from;
                    held &= attend_before(s, ends[c]) - attend_before(s, from) <= room;
                }
                once &= from == attend_splits_of(s) && attend_before(s, from) == s.first + s.second;
                kept &= used >= 1 && used <= n;
            }
    ok(once, "every split is in one CTA, whatever is cut into however many");
    ok(held, "no CTA is longer than the longest must be");
    ok(kept, "there are no more of them than there may be");
}

/* What is left to do on every SM, two CTAs at a time that share its speed, the next when one ends. */
struct sm {
    double left[2], at;
};

static double next_end(const struct sm *m)
{
    if (m->left[0] <= 0 || m->left[1] <= 0)
        return m->at + (m->left[0] > 0 ? m->left[0] : m->left[1]);
    return m->at + 2 * (m->left[0] < m->left[1] ? m->left[0] : m->left[1]);
}

static void move_to(struct sm *m, double at)
{
    const bool both = m->left[0] > 0 && m->left[1] > 0;
    const double done = (at - m->at) / (both ? 2 : 1);
    for (int i = 0; i < 2; i++)
        m->left[i] = m->left[i] > done + 1e-6 ? m->left[i] - done : 0;
    m->at = at;
}

/* When the last of these CTAs ends, of what would be their time if SMs shared them to the last position. */
static double straggle(const uint32_t *ctas, uint32_t n)
{
    static struct sm sms[SMS];
    double last = 0, all = 0;
    uint32_t next = 0;
    memset(sms, 0, sizeof sms);
    for (uint32_t i = 0; i < n; i++)
        all += ctas[i];
    for (; next < n && next < SLOTS; next++)
        sms[next % SMS].left[next / SMS] = ctas[next];
    for (;;) {
        struct sm *first = NULL;
        for (uint32_t i = 0; i < SMS; i++)
            if ((sms[i].left[0] > 0 || sms[i].left[1] > 0) &&
                (first == NULL || next_end(&sms[i]) < next_end(first)))
                first = &sms[i];
        if (first == NULL)
            return last * SMS / all;
        last = next_end(first);
        move_to(first, last);
        for (int i = 0; i < 2; i++)
            if (first->left[i] <= 0 && next < n)
                first->left[i] = ctas[next++];
    }
}

static int longer(const void *a, const void *b)
{
    const uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x < y) - (x > y);
}

/* The CTAs of a decode step of these sequences, in the order in which attend_list.cu has them. */
static uint32_t list_ctas(const uint32_t *contexts, uint32_t batch, uint32_t *ctas)
{
    static uint32_t ends[MAX_CTAS];
    struct attend_work w[MAX_BATCH];
    uint64_t all = 0;
    uint32_t n = 0;
    for (uint32_t i = 0; i < batch; i++) {
        w[i] = (struct attend_work){{0, contexts[i]}, KV_HEADS};
        all += (uint64_t)KV_HEADS * contexts[i];
    }
    const uint32_t aim = attend_aim(w, batch, SLOTS);
    for (uint32_t i = 0; i < batch; i++) {
        const uint32_t used = attend_cut(w[i].of, attend_share(w[i].of, aim, all), ends);
        for (uint32_t c = 0; c < used * KV_HEADS; c++) {
            const uint32_t cta = c % used, from = cta > 0 ? ends[cta - 1] : 0;
            ctas[n++] = attend_before(w[i].of, ends[cta]) - attend_before(w[i].of, from);
        }
    }
    qsort(ctas, n, sizeof *ctas, longer);
    return n;
}

static void nobody_waits_for_a_straggler(uint32_t from, uint32_t to, double most)
{
    static uint32_t ctas[MAX_CTAS];
    for (uint32_t batch = 1; batch <= MAX_BATCH; batch++) {
        double worst = 0, sum = 0;
        uint32_t worst_at = 0, n_contexts = 0, contexts[MAX_BATCH];
        for (uint32_t context = from; context <= to; context += context / 37, n_contexts++) {
            for (uint32_t i = 0; i < batch; i++)
                contexts[i] = context;
            const double s = straggle(ctas, list_ctas(contexts, batch, ctas));
            sum += s;
            worst_at = s > worst ? context : worst_at;
            worst = s > worst ? s : worst;
        }
        ok(worst < most && sum / n_contexts < 1 + (most - 1) * 0.45,
           "%u sequences of %u to %u: %.3f of the time that even shares take, at worst %.2f (of "
           "%u positions)",
           batch, from, to, sum / n_contexts, worst, worst_at);
    }
}

static void sequences_of_all_lengths_share_the_sms(void)
{
    static uint32_t ctas[MAX_CTAS];
    double worst = 0, sum = 0;
    uint32_t random = 1;
    enum { CASES = 200 };
    for (uint32_t i = 0; i < CASES; i++) {
        uint32_t contexts[MAX_BATCH];
        for (uint32_t k = 0; k < MAX_BATCH; k++) { /* from 2K to 131K, as many of each octave */
            random = random * 1664525 + 1013904223;
            contexts[k] = (2048 + (random >> 21)) << (random >> 8) % 6;
        }
        const double s = straggle(ctas, list_ctas(contexts, 2 + i % (MAX_BATCH - 1), ctas));
        sum += s;
        worst = s > worst ? s : worst;
    }
    ok(worst < 1.4 && sum / CASES < 1.1, "%d batches of any lengths: %.3f, at worst %.2f", CASES,
       sum / CASES, worst);
}

int main(void)
{
    splits_follow_each_other();
    every_split_is_in_one_cta();
    nobody_waits_for_a_straggler(4096, 8191, 1.6); /* splits are long beside the shares */
    nobody_waits_for_a_straggler(8192, CONTEXT, 1.45);
    sequences_of_all_lengths_share_the_sms();
    return tap_done();
}
