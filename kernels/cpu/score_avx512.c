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
V16_FN void dots_of(const uint8_t *first, const uint8_t *second, const uint8_t *ahead, uint32_t dim,
                    const struct score_query *q, const uint32_t n, int32_t (*out)[DOT_TILES * V16])
{
    __m512i high[SCORE_HEADS][DOT_TILES], low[SCORE_HEADS][DOT_TILES];
    V16_UNROLL for (uint32_t h = 0; h < n; h++) high[h][0] = high[h][1] = low[h][0] = low[h][1] =
        _mm512_setzero_si512();
    for (uint32_t c = 0; c < dim; c += 4, first += 64, second += 64, ahead += 64) {
        __m512i a = _mm512_loadu_si512(first), b = _mm512_loadu_si512(second);
        _mm_prefetch((const char *)ahead, _MM_HINT_T0);
        _mm_prefetch((const char *)ahead + (size_t)dim * V16, _MM_HINT_T0);
        V16_UNROLL for (uint32_t h = 0; h < n; h++)
        {
            int32_t four[2];
            memcpy(&four[0], q[h].plane[0] + c, 4);
            memcpy(&four[1], q[h].plane[1] + c, 4);
            __m512i x = _mm512_set1_epi32(four[0]), y = _mm512_set1_epi32(four[1]);
            high[h][0] = _mm512_dpbusd_epi32(high[h][0], a, x);
            high[h][1] = _mm512_dpbusd_epi32(high[h][1], b, x);
            low[h][0] = _mm512_dpbusd_epi32(low[h][0], a, y);
            low[h][1] = _mm512_dpbusd_epi32(low[h][1], b, y);
        }
    }
    V16_UNROLL for (uint32_t h = 0; h < n; h++)
    {
        v16i_store(out[h], v16i_add(v16i_shl(high[h][0], 7), low[h][0]));
        v16i_store(out[h] + V16, v16i_add(v16i_shl(high[h][1], 7), low[h][1]));
    }
}

static void tile_dots(const uint8_t *first, const uint8_t *second, const uint8_t *ahead,
                      uint32_t dim, const struct score_query *q, uint32_t n,
                      int32_t (*out)[DOT_TILES * V16])
{
    if (n == 4)
        dots_of(first, second, ahead, dim, q, 4, out);
    else if (n == 3)
        dots_of(first, second, ahead, dim, q, 3, out);
    else if (n == 2)
        dots_of(first, second, ahead, dim, q, 2, out);
    else
        dots_of(first, second, ahead, dim, q, 1, out);
}

const struct score_kernels score_avx512 = {.part = part, .choose = choose};
#endif
