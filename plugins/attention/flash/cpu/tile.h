// Many query vectors (prefill, chunks, drafts, one KV head for many): tiles of scores as matrix products.
//
// Everything is transposed: a column of registers' lanes is a query vector. Scores[key][lane] = keys x queries needs no packing of
// the keys, whose elements are broadcast from the cache; maxima and sums run down the lanes without crossing them; and
// outputs[dim][lane] = values x weights takes the weights as they were made. Queries are packed once for all tiles.

#pragma once

#include "rows.h"

namespace {

// C[m][lane] (+)= sum over words k of A[m][k] * B[k][lane], for `rows` rows. Strides of A in words; B and C have NV * W lanes.
template <class N, int NV>
INLINE void multiply(const int32_t* a, int64_t a_row, int64_t a_word, int words, const float* b, float* c, int rows, bool add) {
  constexpr int MR = W == 16 ? 8 : 4, L = NV * W;
  for (int m = 0; m < rows; m += MR, a += MR * a_row, c += MR * L) {
    vf acc[MR][NV];
#pragma GCC unroll 8
    for (int r = 0; r < MR; r++)
#pragma GCC unroll 2
      for (int v = 0; v < NV; v++) acc[r][v] = add ? load(c + r * L + v * W) : vf{};
    for (int k = 0; k < words; k++) {
      typename N::Words x[NV];
#pragma GCC unroll 2
      for (int v = 0; v < NV; v++) x[v] = load_as<typename N::Words>(b + k * L + v * W);
#pragma GCC unroll 8
      for (int r = 0; r < MR; r++) {
        const auto y = N::broadcast(a + r * a_row + k * a_word);
#pragma GCC unroll 2
        for (int v = 0; v < NV; v++) acc[r][v] = N::madd(acc[r][v], y, x[v]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < MR; r++)
#pragma GCC unroll 2
      for (int v = 0; v < NV; v++) store(c + r * L + v * W, acc[r][v]);
  }
}

template <class N, int NV>
struct Tiles {
  typedef typename N::Element Element;
  static constexpr int L = NV * W;  // lanes that are worked on together
  static constexpr float kSlack = 8;  // a maximum may be outgrown by so many powers of two before sums are rescaled

  const Call& c;
  const Item& item;
  const int dim, words, lanes, lane_groups;  // words: of a head dim
  Scratch scratch;
  Keys<N> keys;
  float* q;          // [lane group, words, L] packed
  float* o;          // [lane group, DP, L]
  float* maximum;    // [lane group, L]
  float* sum;        // [lane group, L]
  float* scores;     // [kTile, L]
  float* weights;    // [kTile / per word, L]
  float* values;     // packed values of the tile, where they need packing
  float* rows;       // [W, DP]
  Element* elements; // [W, DP]

  Tiles(const Call& call, const Item& it, const Item* next, float* memory)
      : c(call), item(it), dim(c.padded_dim), words(dim / N::kPerWord), lanes(it.q_count * c.group),
        lane_groups((lanes + L - 1) / L), scratch{memory}, keys(call, it, next, scratch) {
    q = scratch.take<float>(lane_groups * words * L);
    o = scratch.take<float>(lane_groups * dim * L);
    maximum = scratch.take<float>(lane_groups * L);
    sum = scratch.take<float>(lane_groups * L);
    scores = scratch.take<float>(kTile * L);
    weights = scratch.take<float>(kTile / N::kPerWord * L);
    values = scratch.take<float>(kTile / N::kPerWord * dim);
    rows = scratch.take<float>(W * dim);
    elements = scratch.take<Element>(W * dim);
    std::memset(o, 0, lane_groups * dim * L * 4);
    std::memset(sum, 0, lane_groups * L * 4);
    std::fill_n(maximum, lane_groups * L, kLowest);
  }

  void run() {
    for (int first = 0; first < lane_groups * L; first += W) pack_queries(first);
    for (int start = keys.first(); start < item.key_last; start += kTile) {
      keys.fetch(start);
      for (int g = 0; g < keys.groups; g++) keys.prefetch(start, g);
      if constexpr (N::kPerWord == 2) pack_values();
      for (int group = 0; group < lane_groups; group++) tile(start, group);
    }
    for (int first = 0; first < lanes; first += W) finish(first);
    arrive(c, item, rows);
  }

  // W lanes from `first` on; lanes past the last are zero.
  void pack_queries(int first) {
    for (int i = 0; i < W; i++) {
      const bool real = first + i < lanes;
      read_row<N>(elements + i * dim, real ? query(c, item, first + i) : nullptr, c.type, real ? c.dim : 0, dim);
    }
    const float* from = (const float*)elements;
    float* to = q + first / L * words * L + first % L;
    for (int k = 0; k < words; k += W) {
      vf block[W];
#pragma GCC unroll 16
      for (int i = 0; i < W; i++) block[i] = load(from + i * words + k);
      transpose(block);
#pragma GCC unroll 16
      for (int i = 0; i < W; i++) store(to + (k + i) * L, block[i]);
    }
  }

  INLINE int position_of(int lane) const { return item.position + lane / c.group; }

  INLINE void tile(int start, int group) {
    const int first = group * L, last = std::min(lanes, first + L) - 1;
    const int oldest = position_of(first), newest = position_of(last), stop = start + keys.groups * kGroup;
    if (start > newest || (c.window && stop - 1 <= oldest - c.window)) return;
    score(q + group * words * L);
    const bool masked = stop - 1 > oldest || stop > item.key_last || (c.window && start <= newest - c.window);
    float* into = o + group * dim * L;
    soften(start, first, masked, into);
    add_values(into);
  }

  INLINE void score(const float* queries) {
    if constexpr (N::kTiles) {
      N::template scores<NV>(keys.k, keys.groups, dim, queries, scores);
    } else {
      for (int g = 0; g < keys.groups; g++) {
        multiply<N, NV>((const int32_t*)keys.k[g], words, 1, words, queries, scores + g * kGroup * L, kGroup, false);
      }
    }
  }

  INLINE void add_values(float* into) {
    const int count = keys.groups * kGroup;
    if constexpr (N::kTiles) {
      N::template add_values<NV>(values, count, dim, weights, into);
    } else if constexpr (N::kPerWord == 2) {
      multiply<N, NV>((const int32_t*)values, 1, dim, count / 2, weights, into, dim, true);
    } else {
      for (int g = 0; g < keys.groups; g++) {
        multiply<N, NV>((const int32_t*)keys.v[g], 1, dim, kGroup, weights + g * kGroup * L, into, dim, true);
      }
    }
  }

  // Scores of the tile into weights. The maximum is only a common reference: while none is outgrown by far, it stays.
  INLINE void soften(int start, int first, bool masked, float* into) {
    const int count = keys.groups * kGroup;
    float factor = c.scale * kLog2e;
    if (c.softcap != 0) {
      for (int i = 0; i < count * L; i += W) {
        store(scores + i, tanhv(load(scores + i) * (c.scale / c.softcap)) * (c.softcap * kLog2e));
      }
      factor = 1;
    }
    if (masked) mask(start, first);
    vf now[NV];
    bool rose = false;
#pragma GCC unroll 2
    for (int v = 0; v < NV; v++) {
      const float* s = scores + v * W;
      vf highest[4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) highest[j] = load(s + j * L);
      for (int k = 4; k < count; k += 4) {
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) highest[j] = vmax(highest[j], load(s + (k + j) * L));
      }
      const vf before = load(maximum + first + v * W);
      now[v] = vmax(before, vmax(vmax(highest[0], highest[1]), vmax(highest[2], highest[3])) * factor);
      rose |= any(now[v] > before + kSlack);
    }
    if (rose) shrink(first, now, into);
#pragma GCC unroll 2
    for (int v = 0; v < NV; v++) {
      const int at = first + v * W;
      store(sum + at, load(sum + at) + weigh(scores + v * W, count, factor, load(maximum + at), v));
    }
  }

  // Take new maxima: what was summed before becomes smaller.
  INLINE void shrink(int first, const vf (&now)[NV], float* into) {
    vf by[NV];
#pragma GCC unroll 2
    for (int v = 0; v < NV; v++) {
      const int at = first + v * W;
      by[v] = exp2v<false>(load(maximum + at) - now[v]);
      store(maximum + at, now[v]);
      store(sum + at, load(sum + at) * by[v]);
    }
    for (int d = 0; d < dim; d++) {
#pragma GCC unroll 2
      for (int v = 0; v < NV; v++) store(into + d * L + v * W, load(into + d * L + v * W) * by[v]);
    }
  }

  // 2 to the power of the scores of one vector of lanes, stored as the second product takes them; their sum.
  INLINE vf weigh(const float* s, int count, float factor, vf maximum, int v) {
    vf added[2] = {vf{}, vf{}};
    for (int k = 0; k < count; k += 2) {
      const vf x = exp2v<N::kPerWord == 2>(load(s + k * L) * factor - maximum);
      const vf y = exp2v<N::kPerWord == 2>(load(s + (k + 1) * L) * factor - maximum);
      added[0] += x;
      added[1] += y;
      if constexpr (N::kPerWord == 1) {
        store(weights + k * L + v * W, x);
        store(weights + (k + 1) * L + v * W, y);
      } else {
        N::store_pairs(weights + k / 2 * L + v * W, x, y);
      }
    }
    return added[0] + added[1];
  }

  INLINE void mask(int start, int first) {
    const vf none = fill(-INFINITY);
#pragma GCC unroll 2
    for (int v = 0; v < NV; v++) {
      vi position;
      for (int i = 0; i < W; i++) position[i] = position_of(first + v * W + i);
      const vi oldest = c.window ? position - (c.window - 1) : vi{};
      const vi end = vi{} + (item.key_last - 1);
      const vi last = position < end ? position : end;
      for (int k = 0; k < keys.groups * kGroup; k++) {
        const vi key = vi{} + (start + k);
        float* s = scores + k * L + v * W;
        vf x = load(s);
        x = key > last ? none : x;
        x = key < oldest ? none : x;
        store(s, x);
      }
    }
  }

  // Two keys' values side by side: [pair, DP] words, or for matrix tiles [16 pairs, 16 dims] turned over and one after another.
  INLINE void pack_values() {
#if FLASH_WIDTH == 16
    for (int g = 0; g < keys.groups; g++) {
      for (int i = 0; i < kGroup; i += 2) {
        const int pair = (g * kGroup + i) / 2;
        pack_pair(keys.v[g] + i * dim, N::kTiles ? rows + pair % W * dim : values + pair * dim);
      }
      if (N::kTiles && g % 2) turn(values + g / 2 * W * dim);
    }
#endif
  }

#if FLASH_WIDTH == 16
  INLINE void pack_pair(const Element* even, float* to) {
    for (int d = 0; d < dim; d += 2 * W) {
      const __m512i x = _mm512_loadu_si512(even + d), y = _mm512_loadu_si512(even + dim + d);
      const vf a = (vf)_mm512_unpacklo_epi16(x, y), b = (vf)_mm512_unpackhi_epi16(x, y);
      store(to + d, __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23));
      store(to + d + W, __builtin_shufflevector(a, b, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31));
    }
  }

  INLINE void turn(float* to) {
    for (int d = 0; d < dim; d += W) {
      vf block[W];
#pragma GCC unroll 16
      for (int i = 0; i < W; i++) block[i] = load(rows + i * dim + d);
      transpose(block);
#pragma GCC unroll 16
      for (int i = 0; i < W; i++) store(to + d * W + i * W, block[i]);
    }
  }
#endif

  // Outputs of W lanes from `first` on, turned back into rows.
  INLINE void finish(int first) {
    const float* from = o + first / L * dim * L + first % L;
    for (int d = 0; d < dim; d += W) {
      vf block[W];
#pragma GCC unroll 16
      for (int i = 0; i < W; i++) block[i] = load(from + (d + i) * L);
      transpose(block);
#pragma GCC unroll 16
      for (int i = 0; i < W; i++) store(rows + i * dim + d, block[i]);
    }
    for (int i = 0; i < W && first + i < lanes; i++) {
      emit(c, item, first + i, maximum[first + i], sum[first + i], rows + i * dim);
    }
  }
};

template <class N>
void attend_tiles(const Call& c, const Item& item, const Item* next, float* scratch) {
  if (item.q_count * c.group <= W) return Tiles<N, 1>(c, item, next, scratch).run();
  Tiles<N, 2>(c, item, next, scratch).run();
}

}  // namespace
