/* Row codes for AVX2: a plane of a block is a register. */
#if defined(__AVX2__)
#include "kernels/cpu/codes_vec.h"

/* Sums of bytes: x as 16 bits is even + 256 odd, so both sums fall out of two additions. */
static inline __attribute__((always_inline)) void add_bytes(__m256i *both, __m256i *odd, __m256i x)
{
    *both = _mm256_add_epi16(*both, x);
    *odd = _mm256_add_epi16(*odd, _mm256_srli_epi16(x, 8));
}

static void block_sums(const uint8_t *block, const struct codes_query *q, uint32_t n,
                       uint16_t (*out)[CODES_BLOCK_ROWS])
{
    __m256i mask = _mm256_set1_epi8(15), zero = _mm256_setzero_si256();
    for (uint32_t h = 0; h < n; h++) {
        __m256i both[2] = {zero, zero}, odd[2] = {zero, zero};
        for (uint32_t j = 0; j < CODES_PLANES; j++) {
            const uint8_t *plane = block + (size_t)j * CODES_PLANE_BYTES;
            __m256i t = _mm256_loadu_si256((const __m256i *)(const void *)q[h].table[j]);
            __m256i x = _mm256_loadu_si256((const __m256i *)(const void *)plane);
            __m256i high = _mm256_and_si256(_mm256_srli_epi16(x, 4), mask);
            add_bytes(&both[0], &odd[0], _mm256_shuffle_epi8(t, _mm256_and_si256(x, mask)));
            add_bytes(&both[1], &odd[1], _mm256_shuffle_epi8(t, high));
        }
        for (uint32_t i = 0; i < 2; i++) {
            __m256i even = _mm256_sub_epi16(both[i], _mm256_slli_epi16(odd[i], 8));
            __m256i *to = (__m256i *)(void *)(out[h] + (size_t)i * 2 * CODES_PAGES);
            _mm256_storeu_si256(to, even);
            _mm256_storeu_si256(to + 1, odd[i]);
        }
    }
}

const struct codes_kernels codes_avx2 = {seal, query, masses, estimate};
#endif
