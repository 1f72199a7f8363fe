/* Scores for AVX-512 VNNI: 64 products of bytes an instruction, the query in two planes of int8. */
#if defined(__AVX512F__)
#include "kernels/cpu/score_vec.h"

V16_FN void store_query(struct score_query *q, uint32_t j, v16i x)
{
    __m512i high = _mm512_srai_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(64)), 7);
    __m512i low = _mm512_sub_epi32(x, _mm512_slli_epi32(high, 7));
    _mm_storeu_si128((__m128i *)(void *)(q->plane[0] + j), _mm512_cvtepi32_epi8(high));
    _mm_storeu_si128((__m128i *)(void *)(q->plane[1] + j), _mm512_cvtepi32_epi8(low));
}

/* n is known to the compiler: 4 n sums in registers. */
static inline __attribute__((always_inline)) void dots_of(const uint8_t *first,
                                                          const uint8_t *second, uint32_t dim,
                                                          const struct score_query *q,
                                                          const uint32_t n,
                                                          int32_t (*out)[DOT_TILES * V16])
{
    __m512i acc[SCORE_HEADS][2][DOT_TILES];
    for (uint32_t h = 0; h < n; h++)
        for (uint32_t i = 0; i < 2; i++)
            acc[h][i][0] = acc[h][i][1] = _mm512_setzero_si512();
    for (uint32_t c = 0; c < dim; c += 4) {
        __m512i a = _mm512_loadu_si512(first + (size_t)c * V16);
        __m512i b = _mm512_loadu_si512(second + (size_t)c * V16);
        for (uint32_t h = 0; h < n; h++)
            for (uint32_t i = 0; i < 2; i++) {
                int32_t four;
                memcpy(&four, q[h].plane[i] + c, sizeof four);
                __m512i x = _mm512_set1_epi32(four);
                acc[h][i][0] = _mm512_dpbusd_epi32(acc[h][i][0], a, x);
                acc[h][i][1] = _mm512_dpbusd_epi32(acc[h][i][1], b, x);
            }
    }
    for (uint32_t h = 0; h < n; h++)
        for (uint32_t t = 0; t < DOT_TILES; t++)
            _mm512_storeu_si512(out[h] + (size_t)t * V16,
                                _mm512_add_epi32(_mm512_slli_epi32(acc[h][0][t], 7), acc[h][1][t]));
}

static void tile_dots(const uint8_t *first, const uint8_t *second, uint32_t dim,
                      const struct score_query *q, uint32_t n, int32_t (*out)[DOT_TILES * V16])
{
    if (n == 4)
        dots_of(first, second, dim, q, 4, out);
    else if (n == 3)
        dots_of(first, second, dim, q, 3, out);
    else if (n == 2)
        dots_of(first, second, dim, q, 2, out);
    else
        dots_of(first, second, dim, q, 1, out);
}

const struct score_kernels score_avx512 = {.part = part, .choose = choose};
#endif
