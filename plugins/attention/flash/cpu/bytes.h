// What decodes over a cache of int8 have in common, be their products by matrix tiles or by vectors: keys and values are read
// as they lie in the cache, whole numbers stand for queries and weights.
//
// A query is a whole number of 15 bits times a scale, as two bytes: scores are exact in it. A weight, times the scale of its
// values, is a whole number of 16 bits, over the largest of a tile, as two bytes again.

#pragma once

#include "fours_base.h"

namespace {

// The keys and values of up to kTile positions, in groups of 16.
struct ByteTile {
  int8_t* gathered;  // [2, kTile, DP]
  int start, groups;
  const int8_t* k[kTile / kGroup];
  const int8_t* v[kTile / kGroup];
  float k_scale[kTile], v_scale[kTile];
};

// `Kernel` has what FourLanes asks for, but try_to_weigh(tile): instead whole_scores(tile, g, x), of a group's keys the scores
// of each lane before scales, and put_weights(lane, g, upper, lower), the bytes of 16 weights as words.
template <class Kernel>
class ByteLanes : public FourLanes<Kernel, ByteTile> {
 public:
  typedef FourLanes<Kernel, ByteTile> Base;
  using typename Base::Tile;
  using Base::kLanes;
  static bool takes(const Call& call) { return call.kv_type == Type::i8 && call.padded_dim % 64 == 0; }

 protected:
  friend Base;
  using Base::c, Base::item, Base::dim, Base::lanes, Base::factor, Base::scratch, Base::tiles, Base::ahead, Base::sum;
  using Base::reference, Base::self;

  Keys<Bf16, false> keys;
  float q_scale[kLanes];  // what a whole number among scores stands for, before keys' scales
  vf unit[kLanes];    // what a whole number among weights stands for
  float* scaled;      // [lane, kTile] weights

  ByteLanes(const Call& call, const Item& it, const Item* next, float* memory, int parts)
      : Base(call, it, memory, parts), keys{call, it, next} {
    for (Tile& tile : tiles) tile.keys.gathered = scratch.template take<int8_t>(2 * kTile * dim);
    scaled = scratch.template take<float>(kLanes * kTile);
  }

  // A lane's query, [DP] upper and lower bytes.
  void read_query(int lane, int8_t* upper, int8_t* lower) {
    alignas(64) uint16_t row[kMaxDim];
    read_row<Bf16>(row, query(c, item, lane), c.type, c.dim, dim);
    vf highest{}, zero{};
    for (int d = 0; d < dim; d += W) {
      const vf x = load_bf16(row + d);
      highest = vmax(highest, vmax(x, -x));
      zero += x * 0.0f;  // NaN if x is infinite or NaN
    }
    const float most = max_of(highest), scale = most > 0 ? most / 16319 : 1;
    q_scale[lane] = (scale + sum_of(zero)) * factor;
    for (int d = 0; d < dim; d += W) {
      const __m512i whole = _mm512_cvtps_epi32(load_bf16(row + d) * (1 / scale));
      const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(64)), 7);
      const __m512i low = _mm512_sub_epi32(whole, _mm512_slli_epi32(high, 7));
      _mm_store_si128((__m128i*)(upper + d), _mm512_cvtepi32_epi8(high));
      _mm_store_si128((__m128i*)(lower + d), _mm512_cvtepi32_epi8(low));
    }
  }

  INLINE void aim(ByteTile& tile, int start) const {
    tile.start = start;
    tile.groups = (std::min(start + kTile, item.key_last) - start + kGroup - 1) / kGroup;
  }

  // Each group is read where it lies, or gathered when it crosses blocks. A stranger's scales are zero.
  INLINE void fetch_group(ByteTile& tile, int g) const {
    const int p = tile.start + g * kGroup, offset = keys.offset_of(p);
    if (offset + kGroup > c.block_size) return gather(tile, g, p);
    const char* head = keys.head_of(item, p);
    tile.k[g] = (const int8_t*)head + offset * dim;
    tile.v[g] = tile.k[g] + c.block_size * dim;
    keys.template read_scales_of_group<Type::i8>(tile, g * kGroup, head, offset);
    if (p >= item.key_first && p + kGroup <= item.key_last) return;
    for (int i = 0; i < kGroup; i++) {
      if (p + i < item.key_first || p + i >= item.key_last) tile.k_scale[g * kGroup + i] = tile.v_scale[g * kGroup + i] = 0;
    }
  }

  void gather(ByteTile& tile, int g, int first_position) const {
    int8_t *k = tile.gathered + g * kGroup * dim, *v = k + kTile * dim;
    tile.k[g] = k, tile.v[g] = v;
    for (int i = 0; i < kGroup; i++, k += dim, v += dim) {
      const int p = first_position + i, at = g * kGroup + i;
      if (p < item.key_first || p >= item.key_last) {
        tile.k_scale[at] = tile.v_scale[at] = 0;
        std::memset(k, 0, dim);
        std::memset(v, 0, dim);
        continue;
      }
      keys.template read_scales<Type::i8>(tile, at, keys.head_of(item, p), p % c.block_size);
      const char* row = keys.key_row(item, p);
      std::memcpy(k, row, dim);
      std::memcpy(v, row + c.block_size * dim, dim);
    }
  }

  // Of a group's keys the scores of each lane, scaled.
  template <int N, bool kPlain>
  INLINE void scores_of(const Tile& tile, int g, vf (&x)[kLanes]) const {
    self().template whole_scores<N>(tile, g, x);
    const vf k_scale = load(tile.keys.k_scale + g * kGroup);
#pragma GCC unroll 4
    for (int lane = 0; lane < N; lane++) {
      x[lane] *= k_scale * q_scale[lane];
      if (!kPlain) x[lane] = this->cap_and_hide(x[lane], tile.keys.start + g * kGroup, lane);
    }
  }

  template <int N, bool kPlain>
  INLINE bool try_to_weigh(const Tile& tile) {
    vf total[N], highest[N], ref[N], most[N], zero[N];
    for (int lane = 0; lane < N; lane++) {
      total[lane] = sum[lane], highest[lane] = fill(-INFINITY), ref[lane] = reference[lane];
      most[lane] = fill(0x1p-100f), zero[lane] = vf{};
    }
    for (int g = 0; g < tile.keys.groups; g++) {
      vf x[kLanes];
      ahead[g].ask(Kernel::kScoring, Kernel::kWeighing);
      scores_of<N, kPlain>(tile, g, x);
      const vf v_scale = load(tile.keys.v_scale + g * kGroup);
#pragma GCC unroll 4
      for (int lane = 0; lane < N; lane++) {
        highest[lane] = vmax(highest[lane], x[lane]);
        const vf p = exp2v<true>(x[lane] - ref[lane]), weight = p * v_scale;
        total[lane] += p;
        most[lane] = vmax(most[lane], weight);
        zero[lane] += weight * 0.0f;  // NaN if a weight is infinite or NaN
        store(scaled + lane * kTile + g * kGroup, weight);
      }
    }
    if (this->template is_too_high<N>(highest)) return false;
    for (int lane = 0; lane < N; lane++) {
      const float largest = max_of(most[lane]), most_whole = 255 * 256;
      sum[lane] = total[lane];
      unit[lane] = fill(largest / most_whole + sum_of(zero[lane]));
      split_weights(lane, tile.keys.groups, most_whole / largest);
    }
    return true;
  }

  // A lane's weights as whole numbers of two bytes.
  INLINE void split_weights(int lane, int groups, float by) {
    for (int g = 0; g < groups; g++) {
      const __m512i whole = _mm512_cvtps_epi32(load(scaled + lane * kTile + g * kGroup) * by);
      self().put_weights(lane, g, _mm512_srli_epi32(whole, 8), _mm512_and_si512(whole, _mm512_set1_epi32(255)));
    }
  }

  // What two sums of bytes came to, in `unit`s.
  static INLINE vf join(vi upper, vi lower, int bits) { return __builtin_convertvector((upper << bits) + lower, vf); }
};

}  // namespace
