/* Scores in portable C. */
#include "kernels/cpu/score_vec.h"

V16_FN void store_query(struct score_query *q, uint32_t j, v16i x)
{
    for (uint32_t i = 0; i < V16; i++)
        q->x[j + i] = (int16_t)x.x[i];
}

static void tile_dots(const uint8_t *first, const uint8_t *second, const uint8_t *ahead,
                      uint32_t dim, const struct score_query *q, uint32_t n,
                      int32_t (*out)[DOT_TILES * V16])
{
    const uint8_t *tile[DOT_TILES] = {first, second};
    (void)ahead;
    memset(out, 0, n * sizeof *out);
    for (uint32_t t = 0; t < DOT_TILES; t++)
        for (uint32_t c = 0; c < dim; c++)
            for (uint32_t i = 0; i < V16; i++) {
                int32_t key = tile[t][digest_byte(dim, i, c)];
                for (uint32_t h = 0; h < n; h++)
                    out[h][t * V16 + i] += key * q[h].x[c];
            }
}

const struct score_kernels score_scalar = {.part = part, .choose = choose};
