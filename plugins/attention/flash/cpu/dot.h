// Few query vectors (decodes): scores are dot products along the head dim, so keys and values are read once and in order.

#pragma once

#include "rows.h"

namespace {

template <class N, int M>
struct Dot {
  typedef typename N::Element Element;
  static constexpr int kWide = W * N::kPerWord;  // elements of one vector

  const Call& c;
  const Item& item;
  Scratch scratch;
  Keys<N, false> keys;
  KeyTile<N> tile;
  Element* q;       // [M, DP]
  float* o;         // [M, DP]; of bf16 in the order that unpacking leaves
  float* scores;    // [M, kTile]
  Element* weights; // [M, kTile]
  float maximum[M];
  vf sum[M];
  const bool quantized;  // keys and values are without their scales, which scores and weights take

  Dot(const Call& call, const Item& it, const Item* next, float* memory)
      : c(call), item(it), scratch{memory}, keys{call, it, next}, quantized(call.is_quantized()) {
    const int dim = c.padded_dim;
    tile.gathered = scratch.take<Element>(2 * kTile * dim);
    q = scratch.take<Element>(M * dim);
    o = scratch.take<float>(M * dim);
    scores = scratch.take<float>(M * kTile);
    weights = scratch.take<Element>(M * kTile);
    for (int m = 0; m < M; m++) {
      read_row<N>(q + m * dim, query(c, item, m), c.type, c.dim, dim);
      maximum[m] = kLowest;
      sum[m] = vf{};
    }
    std::memset(o, 0, M * dim * 4);
  }

  void run() {
    for (int start = keys.first(); start < item.key_last; start += kTile) {
      keys.fetch(start, tile);
      for (int g = 0; g < tile.groups; g++) {
        keys.prefetch(start, g);
        for (int i = 0; i < kGroup; i += W) score(g, i);
      }
      float shrink[M];
      for (int m = 0; m < M; m++) shrink[m] = soften(start, m);
      add_values<0>(shrink);
    }
    finish();
  }

  // W keys of a group against all queries.
  INLINE void score(int g, int i) {
    const int dim = c.padded_dim;
    const Element* k = tile.k[g] + i * dim;
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
      vf acc[W];
#pragma GCC unroll 16
      for (int r = 0; r < W; r++) acc[r] = vf{};
      for (int d = 0; d < dim; d += kWide) {
        const auto x = load_as<typename N::Words>(q + m * dim + d);
#pragma GCC unroll 16
        for (int r = 0; r < W; r++) acc[r] = N::madd(acc[r], load_as<typename N::Words>(k + r * dim + d), x);
      }
      const vf score = sums(acc);
      store(scores + m * kTile + g * kGroup + i, quantized ? score * load(tile.k_scale + g * kGroup + i) : score);
    }
  }

  // Scores of the tile into weights; the factor by which what was summed before shrinks.
  INLINE float soften(int start, int m) {
    float* s = scores + m * kTile;
    const int count = tile.groups * kGroup;
    const int position = position_of(c, item, m);
    const int oldest = c.window ? window_begin(c, item, m) : 0;
    const int last = std::min(position, item.key_last - 1);
    float factor = c.scale * kLog2e;
    if (c.softcap != 0) {
      for (int i = 0; i < count; i += W) {
        store(s + i, tanhv(load(s + i) * (c.scale / c.softcap)) * (c.softcap * kLog2e));
      }
      factor = 1;
    }
    if (start + count > item.tree_start) hide_nodes(start, m, s);
    vf highest = fill(kLowest);
    const vf none = fill(-INFINITY);
    if (start < oldest || start + count - 1 > last) {
      for (int i = 0; i < count; i += W) {
        const vi key = lane_numbers() + (start + i);
        vf x = load(s + i) * factor;
        x = key < oldest ? none : x;
        x = key > last ? none : x;
        store(s + i, x);
        highest = vmax(highest, x);
      }
    } else {
      for (int i = 0; i < count; i += W) {
        const vf x = load(s + i) * factor;
        store(s + i, x);
        highest = vmax(highest, x);
      }
    }
    const float before = maximum[m];
    const float now = std::max(before, max_of(highest));
    const float shrink = now > before ? exp2v<false>(fill(before - now))[0] : 1.0f;
    vf added = vf{};
    for (int i = 0; i < count; i += W) {
      const vf p = exp2v<N::kPerWord == 2>(load(s + i) - now);
      added += p;
      store(weights + m * kTile, i, quantized ? p * load(tile.v_scale + i) : p, N::kType);
    }
    sum[m] = sum[m] * shrink + added;
    maximum[m] = now;
    return shrink;
  }

  // Scores of the nodes that are not on the query's path.
  void hide_nodes(int start, int m, float* s) const {
    for (int i = 0; i < tile.groups * kGroup; i += 32) {
      const uint32_t seen = nodes_seen(c, item, m, start + i);
      for (int k = 0; k < 32 && i + k < tile.groups * kGroup; k++) {
        if (!(seen >> k & 1)) s[i + k] = -INFINITY;
      }
    }
  }

  // Weighted values of the tile for the queries from M0 on, as many at a time as there are registers.
  template <int M0>
  INLINE void add_values(const float (&shrink)[M]) {
    constexpr int kMost = W == 16 ? 8 : 3;
    constexpr int MB = M - M0 < kMost ? M - M0 : kMost;
    const int dim = c.padded_dim;
    for (int d = 0; d < dim; d += 2 * kWide / N::kPerWord) {
      float* into = o + M0 * dim + d;
      vf a[MB], b[MB];
#pragma GCC unroll 8
      for (int m = 0; m < MB; m++) {
        a[m] = load(into + m * dim) * shrink[M0 + m];
        b[m] = load(into + m * dim + W) * shrink[M0 + m];
      }
      for (int g = 0; g < tile.groups; g++) {
        const Element* v = tile.v[g] + d;
        const Element* p = weights + M0 * kTile + g * kGroup;
#pragma GCC unroll 4
        for (int i = 0; i < kGroup; i += N::kPerWord) {
          typename N::Words x, y;
          read_values(v + i * dim, dim, x, y);
#pragma GCC unroll 8
          for (int m = 0; m < MB; m++) {
            const auto weight = N::broadcast(p + m * kTile + i);
            a[m] = N::madd(a[m], weight, x);
            b[m] = N::madd(b[m], weight, y);
          }
        }
      }
#pragma GCC unroll 8
      for (int m = 0; m < MB; m++) {
        store(into + m * dim, a[m]);
        store(into + m * dim + W, b[m]);
      }
    }
    if constexpr (M0 + MB < M) add_values<M0 + MB>(shrink);
  }

  // 2 W dims of one key, or of two keys side by side.
  static INLINE void read_values(const Element* v, int dim, typename N::Words& x, typename N::Words& y) {
    if constexpr (N::kPerWord == 1) {
      x = load(v);
      y = load(v + W);
    } else {
#if FLASH_WIDTH == 16
      const __m512i even = _mm512_loadu_si512(v), odd = _mm512_loadu_si512(v + dim);
      x = _mm512_unpacklo_epi16(even, odd);
      y = _mm512_unpackhi_epi16(even, odd);
#endif
    }
  }

  INLINE void finish() {
    const int dim = c.padded_dim;
    for (int m = 0; m < M; m++) {
      if constexpr (N::kPerWord == 2) restore_order(o + m * dim, dim);
      emit(c, item, m, maximum[m], sum_of(sum[m]), o + m * dim);
    }
    arrive(c, item, o);
  }
};

template <class N, int M = 1>
void attend_dot(const Call& c, const Item& item, const Item* next, float* scratch) {
  if (item.q_count * c.group == M) return Dot<N, M>(c, item, next, scratch).run();
  if constexpr (M < kDotLanes) attend_dot<N, M + 1>(c, item, next, scratch);
}

}  // namespace
