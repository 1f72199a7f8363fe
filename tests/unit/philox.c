/* Philox against the known-answer vectors that Random123 publishes, and the uniform made of it. */
#include "kernels/core/philox.h"
#include "tests/tap.h"

static int kat(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1,
               const uint32_t want[4])
{
    struct philox_words r =
        philox4x32((struct philox_words){{c0, c1, c2, c3}}, (uint64_t)k1 << 32 | k0);
    return memcmp(r.w, want, sizeof r.w) == 0;
}

static void the_published_vectors_are_reproduced(void)
{
    static const uint32_t zero[4] = {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8};
    static const uint32_t ones[4] = {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd};
    static const uint32_t pi[4] = {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1};
    ok(kat(0, 0, 0, 0, 0, 0, zero), "all zeros give the published words");
    ok(kat(~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ones), "all ones give the published words");
    ok(kat(0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xa4093822, 0x299f31d0, pi),
       "the digits of pi give the published words");
}

static void the_uniform_lies_in_the_unit_interval_and_is_even(void)
{
    enum { N = 100000 };
    uint32_t bins[16] = {0};
    int inside = 1;
    for (uint32_t i = 0; i < N; i++) {
        double u = philox_uniform(42, i & 3, i >> 2);
        inside &= u >= 0 && u < 1;
        bins[(int)(u * 16) & 15]++;
    }
    double chi = 0;
    for (int b = 0; b < 16; b++)
        chi += (bins[b] - N / 16.0) * (bins[b] - N / 16.0) / (N / 16.0);
    ok(inside, "every uniform lies in [0, 1)");
    ok(chi < 37.7, "sixteen bins are even (chi-square %.1f, 37.7 at 1 in 1,000)", chi);
}

static void seed_choice_and_position_all_matter(void)
{
    double u = philox_uniform(7, 1, 2);
    ok(u == philox_uniform(7, 1, 2), "the same counter gives the same number");
    ok(u != philox_uniform(8, 1, 2), "another seed gives another number");
    ok(u != philox_uniform(7 | 1ull << 40, 1, 2), "the upper half of the seed matters");
    ok(u != philox_uniform(7, 2, 2), "another choice gives another number");
    ok(u != philox_uniform(7, 1, 3), "another position gives another number");
}

int main(void)
{
    the_published_vectors_are_reproduced();
    the_uniform_lies_in_the_unit_interval_and_is_even();
    seed_choice_and_position_all_matter();
    return tap_done();
}
