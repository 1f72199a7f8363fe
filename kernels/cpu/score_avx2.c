/* Scores for AVX2: bytes are widened to 16 bits; a multiply-add of pairs takes the query whole. */
#if defined(__AVX2__)
#include "kernels/cpu/score_vec.h"

V16_FN void store_query(struct score_query *q, uint32_t j, v16i x)
{
    __m256i packed = _mm256_packs_epi32(x.a, x.b);
    _mm256_storeu_si256((__m256i *)(void *)(q->x + j), _mm256_permute4x64_epi64(packed, 0xd8));
}

/* One query, one tile: a register holds 4 partitions of 4 channels, then 4 of 2 sums. */
static void one_tile(const uint8_t *tile, const uint8_t *ahead, uint32_t dim,
                     const struct score_query *q, int32_t *out)
{
    __m256i acc[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(),
                      _mm256_setzero_si256()};
    for (uint32_t c = 0; c < dim; c += 4, tile += 4 * (size_t)V16, ahead += 4 * (size_t)V16) {
        _mm_prefetch((const char *)ahead, _MM_HINT_T0);
        int64_t four;
        memcpy(&four, q->x + c, sizeof four);
        __m256i x = _mm256_set1_epi64x(four);
        V16_UNROLL for (int i = 0; i < 4; i++)
        {
            __m256i k = _mm256_cvtepu8_epi16(
                _mm_loadu_si128((const __m128i *)(const void *)(tile + (size_t)i * V16)));
            acc[i] = _mm256_add_epi32(acc[i], _mm256_madd_epi16(k, x));
        }
    }
    for (int i = 0; i < 2; i++) {
        __m256i sums =
            i == 0 ? _mm256_hadd_epi32(acc[0], acc[1]) : _mm256_hadd_epi32(acc[2], acc[3]);
        _mm256_storeu_si256((__m256i *)(void *)(out + (size_t)i * 8),
                            _mm256_permute4x64_epi64(sums, 0xd8));
    }
}

static void tile_dots(const uint8_t *first, const uint8_t *second, const uint8_t *ahead,
                      uint32_t dim, const struct score_query *q, uint32_t n,
                      int32_t (*out)[DOT_TILES * V16])
{
    for (uint32_t h = 0; h < n; h++) {
        one_tile(first, ahead, dim, &q[h], out[h]);
        one_tile(second, ahead + (size_t)dim * V16, dim, &q[h], out[h] + V16);
    }
}

const struct score_kernels score_avx2 = {.part = part, .choose = choose};
#endif
