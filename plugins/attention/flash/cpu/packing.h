// How tiles of queries, values and outputs are turned over and laid side by side for products of matrices.

#pragma once

#include "rows.h"

namespace {

// W words of W rows, so many words apart, turned over.
INLINE void turn_block(const float* from, float* to, int from_row = W, int to_row = W) {
  vf block[W];
#pragma GCC unroll 16
  for (int i = 0; i < W; i++) block[i] = load(from + i * from_row);
  transpose(block);
#pragma GCC unroll 16
  for (int i = 0; i < W; i++) store(to + i * to_row, block[i]);
}

#if FLASH_WIDTH == 16

// The values of an even key and of the next one, word by word beside each other.
INLINE void pack_pair(const uint16_t* even, int dim, float* to) {
  for (int d = 0; d < dim; d += 2 * W) {
    const __m512i x = _mm512_loadu_si512(even + d), y = _mm512_loadu_si512(even + dim + d);
    const vf a = (vf)_mm512_unpacklo_epi16(x, y), b = (vf)_mm512_unpackhi_epi16(x, y);
    store(to + d, __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23));
    store(to + d + W, __builtin_shufflevector(a, b, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31));
  }
}

// Two keys' values side by side: [pair, DP] words; or, if `kTurns`, [16 pairs, 16 dims] turned over and one after another, by way
// of `rows` [W, DP].
template <bool kTurns, class N>
INLINE void pack_values(const KeyTile<N>& tile, int dim, float* rows, float* values) {
  for (int g = 0; g < (tile.groups + 1) / 2 * 2; g++) {
    for (int i = 0; i < kGroup; i += 2) {
      const int pair = (g * kGroup + i) / 2;
      pack_pair(tile.v[g] + i * dim, dim, kTurns ? rows + pair % W * dim : values + pair * dim);
    }
    for (int d = 0; kTurns && g % 2 && d < dim; d += W) turn_block(rows + d, values + (g / 2 * dim + d) * W, dim);
  }
}

#endif

}  // namespace
