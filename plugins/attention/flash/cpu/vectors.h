// Up to four query vectors over a cache of bf16 or fp8 by products of floats in vectors, for processors without matrix tiles: a
// product of bf16 pairs takes them as long as four of floats, and turning a pair into floats is two steps for all lanes.
//
// Numbers become floats in registers, 64 dims of a row as four vectors: they are in an order of their own, and so are queries
// and outputs.

#pragma once

#include "fours_base.h"

namespace {

// Where keys and values of up to kTile positions lie, in groups of 16, and their scales.
struct FloatTile {
  char* gathered;  // [2, kTile, DP]
  int start, groups;
  const char* k[kTile / kGroup];
  const char* v[kTile / kGroup];
  float k_scale[kTile], v_scale[kTile];
};

template <Type kFrom>
class FloatVectors : public FourLanes<FloatVectors<kFrom>, FloatTile> {
  typedef FourLanes<FloatVectors, FloatTile> Base;
  friend Base;
  using typename Base::Tile;
  using Base::c, Base::item, Base::dim, Base::lanes, Base::factor, Base::scratch, Base::tiles, Base::ahead, Base::sum;
  using Base::reference;

 public:
  using Base::kLanes;
  static bool takes(const Call& call) { return call.kv_type == kFrom && call.padded_dim % 64 == 0; }

  FloatVectors(const Call& call, const Item& it, const Item* next, float* memory)
      : Base(call, it, memory), keys{call, it, next} {
    for (Tile& tile : tiles) tile.keys.gathered = scratch.template take<char>(2 * kTile * dim * kSize);
    q = scratch.template take<float>(kLanes * dim);
    o = scratch.template take<float>(kLanes * dim);
    weights = scratch.template take<float>(kLanes * kTile);
    std::memset(o, 0, kLanes * dim * 4);
    for (int lane = 0; lane < lanes; lane++) read_query(lane);
  }

  void run() {
    this->attend_to_keys();
    for (int lane = 0; lane < lanes; lane++) {
      for (int d = 0; d < dim; d += 64) restore_dims(o + lane * dim + d, weights + d);
      emit(c, item, lane, reference[lane][0], sum_of(sum[lane]), weights);
    }
    arrive(c, item, o);
  }

 private:
  static constexpr int kScoring = 8, kWeighing = 10;
  static constexpr int kSize = kFrom == Type::bf16 ? 2 : 1;
  static constexpr bool kQuantized = kFrom != Type::bf16;

  Keys<Bf16, false> keys;
  float* q;        // [lane, DP]
  float* o;        // [lane, DP] weighted values
  float* weights;  // [lane, kTile]

  void read_query(int lane) {
    alignas(64) uint16_t row[kMaxDim];
    read_row<Bf16>(row, query(c, item, lane), c.type, c.dim, dim);
    for (int d = 0; d < dim; d += 64) {
      __m512i first = load_as<__m512i>(row + d), second = load_as<__m512i>(row + d + 32);
      if (kQuantized) {  // in the order that unpacking bytes leaves: of each 16 dims the first eight, then the others
        const __m512i low = _mm512_shuffle_i64x2(first, second, 0x88), high = _mm512_shuffle_i64x2(first, second, 0xdd);
        first = low, second = high;
      }
      vf x[4];
      split(first, x[0], x[1]);
      split(second, x[2], x[3]);
      for (int i = 0; i < 4; i++) store(q + lane * dim + d + i * W, x[i]);
    }
  }

  // Pairs of bf16 into the even and odd ones.
  static INLINE void split(__m512i pairs, vf& even, vf& odd) {
    even = (vf)_mm512_slli_epi32(pairs, 16), odd = (vf)_mm512_and_si512(pairs, _mm512_set1_epi32(int32_t(0xffff0000)));
  }

  // 64 dims of four rows.
  static INLINE void read_four(const char* from, int stride, vf (&x)[4][4]) {
    if constexpr (kQuantized) {
      Bf16::Bytes bytes[4];
      Bf16::bytes_of_four(from, stride, bytes);
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        split(_mm512_unpacklo_epi8(bytes[i].lower, bytes[i].upper), x[i][0], x[i][1]);
        split(_mm512_unpackhi_epi8(bytes[i].lower, bytes[i].upper), x[i][2], x[i][3]);
      }
    } else {
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        split(load_as<__m512i>(from + i * stride), x[i][0], x[i][1]);
        split(load_as<__m512i>(from + i * stride + 64), x[i][2], x[i][3]);
      }
    }
  }

  INLINE void score(Tile& tile, int start) {
    switch (lanes) {
      case 1: return score_lanes<1>(tile, start);
      case 2: return score_lanes<2>(tile, start);
      case 3: return score_lanes<3>(tile, start);
      default: return score_lanes<4>(tile, start);
    }
  }

  template <int N>
  void score_lanes(Tile& tile, int start) {
    tile.keys.start = start;
    tile.keys.groups = (std::min(start + kTile, item.key_last) - start + kGroup - 1) / kGroup;
    for (int g = 0; g < tile.keys.groups; g++) {
      tile.ahead[g] = keys.ahead(start, g);
      fetch_group(tile.keys, g);
      score_group<N>(tile.keys.k[g], tile.ahead[g], tile.scores + g * kGroup * kLanes);
    }
  }

  // Each group is read where it lies, or gathered when it crosses blocks or is not the item's as a whole: a stranger's numbers
  // may be anything.
  INLINE void fetch_group(FloatTile& tile, int g) const {
    const int p = tile.start + g * kGroup, offset = keys.offset_of(p), row = dim * kSize;
    const bool whole = p >= item.key_first && p + kGroup <= item.key_last;
    if (!whole || offset + kGroup > c.block_size) return gather(tile, g, p);
    const char* head = keys.head_of(item, p);
    tile.k[g] = head + offset * row;
    tile.v[g] = tile.k[g] + c.block_size * row;
    if (kQuantized) keys.template read_scales_of_group<kFrom>(tile, g * kGroup, head, offset);
  }

  void gather(FloatTile& tile, int g, int first_position) const {
    const int row = dim * kSize;
    char *k = tile.gathered + g * kGroup * row, *v = k + kTile * row;
    tile.k[g] = k, tile.v[g] = v;
    for (int i = 0; i < kGroup; i++, k += row, v += row) {
      const int p = first_position + i, at = g * kGroup + i;
      if (p < item.key_first || p >= item.key_last) {
        tile.k_scale[at] = tile.v_scale[at] = 0;
        std::memset(k, 0, row);
        std::memset(v, 0, row);
        continue;
      }
      if (kQuantized) keys.template read_scales<kFrom>(tile, at, keys.head_of(item, p), p % c.block_size);
      const char* from = keys.key_row(item, p);
      std::memcpy(k, from, row);
      std::memcpy(v, from + c.block_size * row, row);
    }
  }

  template <int N>
  INLINE void score_group(const char* k, const Ahead& ahead, float* to) const {
    vf fours[N][4];
#pragma GCC unroll 4
    for (int four = 0; four < 4; four++) {
      ahead.ask(four * kScoring / 4, (four + 1) * kScoring / 4);
      vf acc[N][4];
#pragma GCC unroll 4
      for (int lane = 0; lane < N; lane++) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) acc[lane][i] = vf{};
      }
      for (int d = 0; d < dim; d += 64) {
        vf x[4][4];
        read_four(k + (4 * four * dim + d) * kSize, dim * kSize, x);
#pragma GCC unroll 4
        for (int part = 0; part < 4; part++) {
#pragma GCC unroll 4
          for (int lane = 0; lane < N; lane++) {
            const vf y = load(q + lane * dim + d + part * W);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) acc[lane][i] += x[i][part] * y;
          }
        }
      }
#pragma GCC unroll 4
      for (int lane = 0; lane < N; lane++) fours[lane][four] = sums_within(acc[lane]);
    }
#pragma GCC unroll 4
    for (int lane = 0; lane < N; lane++) store(to + lane * kGroup, sums_across(fours[lane]));
  }

  // Of four vectors each 128 bits' sums, side by side.
  static INLINE vf sums_within(const vf (&x)[4]) {
    const __m512d a = (__m512d)(vf)(_mm512_unpacklo_ps(x[0], x[1]) + _mm512_unpackhi_ps(x[0], x[1]));
    const __m512d b = (__m512d)(vf)(_mm512_unpacklo_ps(x[2], x[3]) + _mm512_unpackhi_ps(x[2], x[3]));
    return (vf)_mm512_unpacklo_pd(a, b) + (vf)_mm512_unpackhi_pd(a, b);
  }

  // Of four vectors the sums of their four quarters, one after the other.
  static INLINE vf sums_across(const vf (&x)[4]) {
    const vf a = _mm512_shuffle_f32x4(x[0], x[1], 0x44) + _mm512_shuffle_f32x4(x[0], x[1], 0xee);
    const vf b = _mm512_shuffle_f32x4(x[2], x[3], 0x44) + _mm512_shuffle_f32x4(x[2], x[3], 0xee);
    return _mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xdd);
  }

  template <int N, bool kPlain>
  INLINE void scores_of(const Tile& tile, int g, vf (&x)[kLanes]) const {
    const vf by = kQuantized ? load(tile.keys.k_scale + g * kGroup) * factor : fill(factor);
#pragma GCC unroll 4
    for (int lane = 0; lane < N; lane++) {
      x[lane] = load(tile.scores + (g * kLanes + lane) * kGroup) * by;
      if (!kPlain) x[lane] = this->cap_and_hide(x[lane], tile.keys.start + g * kGroup, lane);
    }
  }

  template <int N, bool kPlain>
  INLINE bool try_to_weigh(const Tile& tile) {
    vf total[N], highest[N], ref[N];
    for (int lane = 0; lane < N; lane++) total[lane] = sum[lane], highest[lane] = fill(-INFINITY), ref[lane] = reference[lane];
    for (int g = 0; g < tile.keys.groups; g++) {
      vf x[kLanes];
      ahead[g].ask(kScoring, kWeighing);
      scores_of<N, kPlain>(tile, g, x);
#pragma GCC unroll 4
      for (int lane = 0; lane < N; lane++) {
        highest[lane] = vmax(highest[lane], x[lane]);
        const vf p = exp2v<true>(x[lane] - ref[lane]);
        total[lane] += p;
        store(weights + lane * kTile + g * kGroup, kQuantized ? p * load(tile.keys.v_scale + g * kGroup) : p);
      }
    }
    if (this->template is_too_high<N>(highest)) return false;
    for (int lane = 0; lane < N; lane++) sum[lane] = total[lane];
    return true;
  }

  template <int N>
  INLINE void shrink_outputs(const vf (&by)[N]) {
    for (int lane = 0; lane < N; lane++) {
      for (int d = 0; d < dim; d += W) store(o + lane * dim + d, load(o + lane * dim + d) * by[lane]);
    }
  }

  INLINE void add_values(Tile& tile) {
    switch (lanes) {
      case 1: return add_lanes<1>(tile);
      case 2: return add_lanes<2>(tile);
      case 3: return add_lanes<3>(tile);
      default: return add_lanes<4>(tile);
    }
  }

  template <int N>
  void add_lanes(Tile& tile) {
    constexpr int kLeft = Ahead::kAll - kWeighing;
    for (int d = 0; d < dim; d += 64) {
      vf sums[N][4];
#pragma GCC unroll 4
      for (int lane = 0; lane < N; lane++) {
#pragma GCC unroll 4
        for (int part = 0; part < 4; part++) sums[lane][part] = load(o + lane * dim + d + part * W);
      }
      for (int g = 0; g < tile.keys.groups; g++) {
#pragma GCC unroll 4
        for (int i = 0; i < kGroup; i += 4) {
          if (d == 0) ahead[g].ask(kWeighing + i * kLeft / kGroup, kWeighing + (i + 4) * kLeft / kGroup);
          vf x[4][4];
          read_four(tile.keys.v[g] + (i * dim + d) * kSize, dim * kSize, x);
#pragma GCC unroll 4
          for (int key = 0; key < 4; key++) {
#pragma GCC unroll 4
            for (int lane = 0; lane < N; lane++) {
              const vf weight = fill(weights[lane * kTile + g * kGroup + i + key]);
#pragma GCC unroll 4
              for (int part = 0; part < 4; part++) sums[lane][part] += x[key][part] * weight;
            }
          }
        }
      }
#pragma GCC unroll 4
      for (int lane = 0; lane < N; lane++) {
#pragma GCC unroll 4
        for (int part = 0; part < 4; part++) store(o + lane * dim + d + part * W, sums[lane][part]);
      }
    }
  }

  // What read_four makes of 64 dims, into their order.
  static INLINE void restore_dims(const float* from, float* to) {
    vf x[4];  // of each half the first and the second 16 of 32
    for (int i = 0; i < 4; i += 2) {
      const vf even = load(from + i * W), odd = load(from + (i + 1) * W);
      x[i] = __builtin_shufflevector(even, odd, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      x[i + 1] = __builtin_shufflevector(even, odd, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    }
    if (!kQuantized) {
      for (int i = 0; i < 4; i++) store(to + i * W, x[i]);
      return;
    }
    for (int i = 0; i < 2; i++) {  // eights from both halves in turn
      store(to + 2 * i * W, _mm512_shuffle_f32x4(x[i], x[i + 2], 0x44));
      store(to + (2 * i + 1) * W, _mm512_shuffle_f32x4(x[i], x[i + 2], 0xee));
    }
  }
};

}  // namespace
