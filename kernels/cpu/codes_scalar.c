/* Row codes in portable C. */
#include "kernels/cpu/codes_vec.h"

static void block_sums(const uint8_t *block, const struct codes_query *q, uint32_t n,
                       uint16_t (*out)[CODES_BLOCK_ROWS])
{
    memset(out, 0, n * sizeof *out);
    for (uint32_t j = 0; j < CODES_PLANES; j++)
        for (uint32_t b = 0; b < CODES_PLANE_BYTES; b++) {
            uint32_t x = block[j * CODES_PLANE_BYTES + b];
            uint32_t low = b % 2 * CODES_PAGES + b / 2, high = low + 2 * CODES_PAGES;
            for (uint32_t h = 0; h < n; h++) {
                out[h][low] = (uint16_t)(out[h][low] + q[h].table[j][0][x & 15]);
                out[h][high] = (uint16_t)(out[h][high] + q[h].table[j][0][x >> 4]);
            }
        }
}

const struct codes_kernels codes_scalar = {seal, query, masses, estimate};
