/* Row codes for AVX-512: two planes of a block are a register; heads share the loads of codes. */
#if defined(__AVX512F__)
#include "kernels/cpu/codes_vec.h"

/* n is known to the compiler: 4 n sums in registers. Sums of bytes: x as 16 bits is even + 256 odd,
 * so both sums fall out of two additions. */
static inline __attribute__((always_inline)) void sums_of(const uint8_t *block,
                                                          const struct codes_query *q,
                                                          const uint32_t n,
                                                          uint16_t (*out)[CODES_BLOCK_ROWS])
{
    __m512i both[CODES_HEADS][2], odd[CODES_HEADS][2], mask = _mm512_set1_epi8(15);
    V16_UNROLL for (uint32_t h = 0; h < n; h++) both[h][0] = both[h][1] = odd[h][0] = odd[h][1] =
        _mm512_setzero_si512();
    V16_UNROLL for (uint32_t j = 0; j < CODES_PLANES; j += 2)
    {
        __m512i x = _mm512_loadu_si512(block + (size_t)j * CODES_PLANE_BYTES);
        __m512i nibbles[2] = {_mm512_and_si512(x, mask),
                              _mm512_and_si512(_mm512_srli_epi16(x, 4), mask)};
        V16_UNROLL for (uint32_t h = 0; h < n; h++)
        {
            __m512i t = _mm512_loadu_si512(q[h].table[j]);
            V16_UNROLL for (uint32_t i = 0; i < 2; i++)
            {
                __m512i y = _mm512_shuffle_epi8(t, nibbles[i]);
                both[h][i] = _mm512_add_epi16(both[h][i], y);
                odd[h][i] = _mm512_add_epi16(odd[h][i], _mm512_srli_epi16(y, 8));
            }
        }
    }
    V16_UNROLL for (uint32_t h = 0; h < n; h++) V16_UNROLL for (uint32_t i = 0; i < 2; i++)
    {
        __m512i even = _mm512_sub_epi16(both[h][i], _mm512_slli_epi16(odd[h][i], 8));
        __m256i *to = (__m256i *)(void *)(out[h] + (size_t)i * 2 * CODES_PAGES);
        _mm256_storeu_si256(
            to, _mm256_add_epi16(_mm512_castsi512_si256(even), _mm512_extracti64x4_epi64(even, 1)));
        _mm256_storeu_si256(to + 1, _mm256_add_epi16(_mm512_castsi512_si256(odd[h][i]),
                                                     _mm512_extracti64x4_epi64(odd[h][i], 1)));
    }
}

static void block_sums(const uint8_t *block, const struct codes_query *q, uint32_t n,
                       uint16_t (*out)[CODES_BLOCK_ROWS])
{
    if (n == 4)
        sums_of(block, q, 4, out);
    else if (n == 3)
        sums_of(block, q, 3, out);
    else if (n == 2)
        sums_of(block, q, 2, out);
    else
        sums_of(block, q, 1, out);
}

const struct codes_kernels codes_avx512 = {seal, query, masses, estimate};
#endif
