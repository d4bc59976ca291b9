// Products of matrices by vectors, for CPUs without matrix tiles.

#pragma once

#include "products.h"

namespace {

// C[m][lane] (+)= sum over words k of A[m][k] * B[k][lane], for `rows` rows. A's words come in pieces, each of so many words, whose
// addresses are given and `offset` behind them. Strides of A in words; B and C have NV * W lanes.
template <class N, int NV>
INLINE void multiply(const typename N::Element* const* pieces, int count, int64_t offset, int64_t a_row, int64_t a_word, int words,
                     const float* b, float* c, int rows, bool add) {
  constexpr int MR = W == 16 ? 8 : 4, L = NV * W;
  for (int m = 0; m < rows; m += MR, offset += MR * a_row, c += MR * L) {
    vf acc[MR][NV];
#pragma GCC unroll 8
    for (int r = 0; r < MR; r++)
#pragma GCC unroll 2
      for (int v = 0; v < NV; v++) acc[r][v] = add ? load(c + r * L + v * W) : vf{};
    const float* right = b;
    for (int piece = 0; piece < count; piece++) {
      const int32_t* a = (const int32_t*)pieces[piece] + offset;
      for (int k = 0; k < words; k++, a += a_word, right += L) {
        typename N::Words x[NV];
#pragma GCC unroll 2
        for (int v = 0; v < NV; v++) x[v] = load_as<typename N::Words>(right + v * W);
#pragma GCC unroll 8
        for (int r = 0; r < MR; r++) {
          const auto y = N::broadcast(a + r * a_row);
#pragma GCC unroll 2
          for (int v = 0; v < NV; v++) acc[r][v] = N::madd(acc[r][v], y, x[v]);
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < MR; r++)
#pragma GCC unroll 2
      for (int v = 0; v < NV; v++) store(c + r * L + v * W, acc[r][v]);
  }
}

}  // namespace
