/* How rows that attend by position are cut: into splits, each of which leaves a partial result, and splits into CTAs.
 *
 * Splits lie at fixed positions, because results depend on them; so they suit every context. Those of the beginning
 * are short: a short context has enough of them to keep all SMs at work. They grow with the position, since each costs
 * a partial result to be folded: the splits that are there at some length are about what a CTA has where one sequence
 * of that length is all there is, at most (8 KV heads, 264 CTAs at once). Half as long, CTAs are more alike (1.11 of
 * even shares in the mean and not 1.15), but one sequence of 32,768 took 39.1 us and not 37.1, and 256 rows of a
 * prompt behind as many 687 and not 618.
 *
 * Who runs a split cannot be seen in a result. All CTAs of a decode step begin together, two on an SM, and the kernel
 * takes as long as the longest of them: with a CTA of 512 positions where others had 256 it took twice as long
 * (9,000 positions: 0.35 ms a step). So CTAs are made as many as run at once (or two or three times as many, where that
 * divides better), the longest as short as the splits allow, and the others as alike as that leaves them.
 * tests/unit/attend_split.c says how well. Compiled as C, too. */
#ifndef KERNELS_CUDA_ATTEND_SPLIT_H
#define KERNELS_CUDA_ATTEND_SPLIT_H

#include "kernels/core/core.h"

/* Positions of a split; where the splits of each size end. All are multiples of the first. */
enum {
    SPLIT_SHORT = 128,
    SHORT_END = 2048,
    SPLIT_MIDDLE = 256,
    MIDDLE_END = 8192,
    SPLIT_LONG = 512,
    LONG_END = 16384,
    SPLIT_LONGEST = 1024, /* of all others */
};

enum {
    SHORTS = SHORT_END / SPLIT_SHORT,
    MIDDLES = SHORTS + (MIDDLE_END - SHORT_END) / SPLIT_MIDDLE,
    LONGS = MIDDLES + (LONG_END - MIDDLE_END) / SPLIT_LONG,
};

/* Where in a stretch a split begins. */
CORE_FN uint32_t attend_split_begin(uint32_t split)
{
    return split <= SHORTS    ? split * SPLIT_SHORT
           : split <= MIDDLES ? SHORT_END + (split - SHORTS) * SPLIT_MIDDLE
           : split <= LONGS   ? MIDDLE_END + (split - MIDDLES) * SPLIT_LONG
                              : LONG_END + (split - LONGS) * SPLIT_LONGEST;
}

/* Whole splits among so many positions of a stretch. */
CORE_FN uint32_t attend_whole_splits(uint32_t positions)
{
    return positions <= SHORT_END    ? positions / SPLIT_SHORT
           : positions <= MIDDLE_END ? SHORTS + (positions - SHORT_END) / SPLIT_MIDDLE
           : positions <= LONG_END   ? MIDDLES + (positions - MIDDLE_END) / SPLIT_LONG
                                     : LONGS + (positions - LONG_END) / SPLIT_LONGEST;
}

/* Splits of a stretch of so many. */
CORE_FN uint32_t attend_splits(uint32_t positions)
{
    uint32_t n = attend_whole_splits(positions);
    return n + (attend_split_begin(n) < positions);
}

/* What a task attends: positions of two stretches, each with splits of its own; the first may be empty. */
struct attend_stretches {
    uint32_t first, second;
};

CORE_FN uint32_t attend_positions(struct attend_stretches s)
{
    return s.first + s.second;
}

CORE_FN uint32_t attend_splits_of(struct attend_stretches s)
{
    return attend_splits(s.first) + attend_splits(s.second);
}

/* Positions before a split; of the split behind the last: all. */
CORE_FN uint32_t attend_before(struct attend_stretches s, uint32_t split)
{
    const uint32_t n_first = attend_splits(s.first);
    const uint32_t of = split <= n_first ? s.first : s.second;
    uint32_t at = attend_split_begin(split <= n_first ? split : split - n_first);
    at = at < of ? at : of;
    return split <= n_first ? at : s.first + at;
}

/* The end of the splits from `split` on that have no more than `room` positions; one at least. */
CORE_FN uint32_t attend_cut_end(struct attend_stretches s, uint32_t split, uint32_t room)
{
    const uint32_t before = attend_before(s, split), all = attend_positions(s);
    if (room >= all - before)
        return attend_splits_of(s);
    const uint32_t target = before + room;
    const uint32_t end = target < s.first
                             ? attend_whole_splits(target)
                             : attend_splits(s.first) + attend_whole_splits(target - s.first);
    return end > split ? end : split + 1;
}

/* The beginning of the splits before `end` that have no more than `room` positions; one at least, where there is. */
CORE_FN uint32_t attend_cut_begin(struct attend_stretches s, uint32_t end, uint32_t room)
{
    const uint32_t until = attend_before(s, end);
    if (room >= until)
        return 0;
    const uint32_t target = until - room;
    const uint32_t begin = target <= s.first
                               ? attend_splits(target)
                               : attend_splits(s.first) + attend_splits(target - s.first);
    return begin < end ? begin : end - 1;
}

/* The positions of the longest of n CTAs, when it is as short as can be. */
CORE_FN uint32_t attend_cut_room(struct attend_stretches s, uint32_t n)
{
    const uint32_t all = attend_positions(s), splits = attend_splits_of(s);
    for (uint32_t room = (all + n - 1) / n;; room = (room / SPLIT_SHORT + 1) * SPLIT_SHORT) {
        uint32_t ctas = 0, longest = 0;
        for (uint32_t at = 0, end; at < splits && ctas <= n; at = end, ctas++) {
            end = attend_cut_end(s, at, room);
            const uint32_t size = attend_before(s, end) - attend_before(s, at);
            longest = size > longest ? size : longest;
        }
        if (ctas <= n)
            return longest;
    }
}

/* Cuts a task into at most n CTAs, n >= 1: ends[n] where each ends. The longest is as short as can be, the others are
 * alike as far as that allows. Returns how many there are. */
CORE_FN uint32_t attend_cut(struct attend_stretches s, uint32_t n, uint32_t *ends)
{
    const uint32_t all = attend_positions(s), splits = attend_splits_of(s);
    const uint32_t room = attend_cut_room(s, n);
    ends[n - 1] = splits;
    for (uint32_t i = n - 1; i > 0; i--) /* ends before which those behind would have too much */
        ends[i - 1] = attend_cut_begin(s, ends[i], room);
    uint32_t used = 0;
    for (uint32_t i = 0, from = 0; i < n && from < splits; i++) {
        const uint32_t even = (all - attend_before(s, from) + n - i - 1) / (n - i);
        const uint32_t end = attend_cut_end(s, from, even);
        from = end > ends[i] ? end : ends[i];
        ends[used++] = from;
    }
    return used;
}

/* Tasks that are alike. */
struct attend_work {
    struct attend_stretches of;
    uint32_t n;
};

/* CTAs of one task, where there are `ctas` for `all` positions. */
CORE_FN uint32_t attend_share(struct attend_stretches s, uint64_t ctas, uint64_t all)
{
    const uint64_t n = all > 0 ? ctas * attend_positions(s) / all : 0;
    return n > 0 ? (uint32_t)n : 1;
}

/* How many CTAs to aim at where `slots` run at once. To begin anew costs a CTA some positions' time; shares
 * that are long all the same are cut in two at least, so that who is early helps. */
CORE_FN uint32_t attend_aim(const struct attend_work *w, uint32_t n_works, uint32_t slots)
{
    enum { MOST_WAVES = 3, BEGIN = 32, WHOLE = 2 * SPLIT_LONGEST };
    uint64_t all = 0, least = ~0ull;
    uint32_t best = 1;
    for (uint32_t i = 0; i < n_works; i++)
        all += (uint64_t)w[i].n * attend_positions(w[i].of);
    for (uint32_t waves = all / slots > WHOLE ? 2 : 1; waves <= MOST_WAVES; waves++) {
        uint64_t ctas = 0, room = 0;
        for (uint32_t i = 0; i < n_works; i++) {
            const uint32_t n = attend_share(w[i].of, (uint64_t)slots * waves, all);
            const uint32_t longest = attend_cut_room(w[i].of, n);
            ctas += (uint64_t)w[i].n * n;
            room = longest > room ? longest : room;
        }
        const uint64_t takes = (ctas + slots - 1) / slots * (room + BEGIN);
        if (takes < least) {
            least = takes;
            best = waves;
        }
    }
    return slots * best;
}

#endif
