// Up to four query vectors over a cache of int8, by matrix tiles of bytes: keys and values are read as they lie in the cache.
//
// A query is a whole number of 15 bits times a scale, as two bytes: scores are exact in it. A weight, times the scale of its
// values, is a whole number of 16 bits, over the largest of a tile, as two bytes again. Outputs = weights x values, where a word
// of the values is four dims of one key: each lane has four rows, with the weight beside each of them and nothing beside others.

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

class ByteFours : public FourLanes<ByteFours, ByteTile> {
 public:
  static bool takes(const Call& call) { return call.kv_type == Type::i8 && call.padded_dim % 64 == 0; }

  ByteFours(const Call& call, const Item& it, const Item* next, float* memory)
      : FourLanes(call, it, memory, 2), rows(4 * lanes), keys{call, it, next} {
    for (Tile& tile : tiles) tile.keys.gathered = scratch.take<int8_t>(2 * kTile * dim);
    q = scratch.take<float>(2 * dim / 4 * kLanes);
    o = scratch.take<float>(4 * kLanes * dim / 4);
    parts = scratch.take<int32_t>(2 * 4 * kLanes * W);
    scaled = scratch.take<float>(kLanes * kTile);
    weights = scratch.take<uint32_t>(2 * 4 * kLanes * kTile);
    std::memset(o, 0, rows * dim);
    pack_queries();
  }

  // With the matrix tiles as `configure` leaves them.
  void run() {
    if (dim == 64) load_queries(0);
    attend_to_keys();
    for (int lane = 0; lane < lanes; lane++) {
      for (int d = 0; d < dim; d += 64) interleave(o + d / 4 * rows + lane * 4 * W, scaled + d);
      emit(c, item, lane, reference[lane][0], sum_of(sum[lane]), scaled);
    }
    arrive(c, item, o);
  }

  // For items of as many lanes. Tiles 0 and 1: sums of values, [row, 16 fours of dims], of weights' upper and lower bytes; 2:
  // queries, [four of dims, column]; 4: scores, [key, column]; 5 and 7: weights, [row, key]; 6: keys or values, [key, 64 dims].
  void configure() const {
    struct alignas(64) Config {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 4 * kColumns, 64, 4 * kColumns, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    for (int tile : {0, 1, 5, 7}) config.rows[tile] = rows;
    _tile_loadconfig(&config);
  }

 private:
  friend FourLanes;

  static constexpr int kColumns = 2 * kLanes;  // the upper bytes of all lanes' queries, then the lower ones

  const int rows;
  Keys<Bf16, false> keys;
  float q_scale[kLanes];  // what a whole number among scores stands for, before keys' scales
  vf unit[kLanes];    // what a whole number among weights stands for
  float* q;           // [DP / 4, upper and lower byte, lane] fours of dims
  float* o;           // [DP / 64, row, 16] weighted values: four rows of a lane, of each four dims the first, second and so on
  int32_t* parts;     // [upper and lower byte, row, 16] of a tile
  float* scaled;      // [lane, kTile] weights
  uint32_t* weights;  // [group, upper and lower byte, row, key] words with one byte that is not zero

  INLINE void load_queries(int d) const {
    _tile_loadd(2, q + d / 4 * kColumns, 4 * kColumns);
  }

  // Lanes past the last are zero.
  void pack_queries() {
    alignas(64) int8_t bytes[2][kLanes][kMaxDim] = {};
    alignas(64) uint16_t row[kMaxDim];
    for (int lane = 0; lane < lanes; lane++) {
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
        const __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(64)), 7);
        const __m512i lower = _mm512_sub_epi32(whole, _mm512_slli_epi32(upper, 7));
        _mm_store_si128((__m128i*)(bytes[0][lane] + d), _mm512_cvtepi32_epi8(upper));
        _mm_store_si128((__m128i*)(bytes[1][lane] + d), _mm512_cvtepi32_epi8(lower));
      }
    }
    for (int d = 0; d < dim; d += 64) {
      for (int part = 0; part < 2; part++) {
        const float* from[kLanes];
        for (int lane = 0; lane < kLanes; lane++) from[lane] = (const float*)(bytes[part][lane] + d);
        pack_words(from, 16, q + d / 4 * kColumns + part * kLanes, kColumns);
      }
    }
  }

  INLINE void score(Tile& tile, int start) {
    ByteTile& of = tile.keys;
    of.start = start;
    of.groups = (std::min(start + kTile, item.key_last) - start + kGroup - 1) / kGroup;
    for (int g = 0; g < of.groups; g++) {
      tile.ahead[g] = keys.ahead(start, g);
      tile.ahead[g].ask(0, kScoring);
      fetch_group(of, g);
      score_group(of.k[g], (int32_t*)tile.scores + g * kGroup * kColumns);
    }
  }

  // Each group is read where it lies, or gathered when it crosses blocks. A stranger's scales are zero.
  INLINE void fetch_group(ByteTile& tile, int g) const {
    const int p = tile.start + g * kGroup, offset = p % c.block_size;
    if (offset + kGroup > c.block_size) return gather(tile, g, p);
    const char* head = keys.head_of(item, p);
    tile.k[g] = (const int8_t*)head + offset * dim;
    tile.v[g] = tile.k[g] + c.block_size * dim;
    keys.read_scales_of_group<Type::i8>(tile, g * kGroup, head, offset);
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
      keys.read_scales<Type::i8>(tile, at, keys.head_of(item, p), p % c.block_size);
      const char* row = keys.key_row(item, p);
      std::memcpy(k, row, dim);
      std::memcpy(v, row + c.block_size * dim, dim);
    }
  }

  INLINE void score_group(const int8_t* k, int32_t* to) const {
    settle();
    _tile_zero(4);
    for (int d = 0; d < dim; d += 64) {
      if (dim > 64) load_queries(d);
      _tile_loadd(6, k + d, dim);
      _tile_dpbssd(4, 6, 2);
    }
    _tile_stored(4, to, 4 * kColumns);
    settle();
  }

  // Of a group's keys the scores of each lane, scaled.
  template <int N, bool kPlain>
  INLINE void scores_of(const Tile& tile, int g, vf (&x)[kLanes]) const {
    const float* from = tile.scores + g * kGroup * kColumns;
    const auto whole = [&](int i) {  // of four keys
      const vf two = load(from + 2 * i * W), next_two = load(from + (2 * i + 1) * W);
      const vi upper = (vi)_mm512_shuffle_f32x4(two, next_two, 0x88), lower = (vi)_mm512_shuffle_f32x4(two, next_two, 0xdd);
      return __builtin_convertvector((upper << 7) + lower, vf);
    };
    turn(whole(0), whole(1), whole(2), whole(3), x);
    const vf k_scale = load(tile.keys.k_scale + g * kGroup);
#pragma GCC unroll 4
    for (int lane = 0; lane < N; lane++) {
      x[lane] *= k_scale * q_scale[lane];
      if (!kPlain) x[lane] = cap_and_hide(x[lane], tile.keys.start + g * kGroup, lane);
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
      ahead[g].ask(kScoring, kWeighing);
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
    if (is_too_high<N>(highest)) return false;
    for (int lane = 0; lane < N; lane++) {
      const float largest = max_of(most[lane]), most_whole = 255 * 256;
      sum[lane] = total[lane];
      unit[lane] = fill(largest / most_whole + sum_of(zero[lane]));
      split_weights(lane, tile.keys.groups, most_whole / largest);
    }
    return true;
  }

  // A lane's weights as whole numbers, whose bytes are put beside each of four dims in turn.
  INLINE void split_weights(int lane, int groups, float by) {
    uint32_t* to = weights + lane * 4 * kGroup;
    for (int g = 0; g < groups; g++, to += 2 * rows * kGroup) {
      const __m512i whole = _mm512_cvtps_epi32(load(scaled + lane * kTile + g * kGroup) * by);
      const __m512i upper = _mm512_srli_epi32(whole, 8), lower = _mm512_and_si512(whole, _mm512_set1_epi32(255));
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        _mm512_store_si512(to + i * kGroup, _mm512_slli_epi32(upper, 8 * i));
        _mm512_store_si512(to + (rows + i) * kGroup, _mm512_slli_epi32(lower, 8 * i));
      }
    }
  }

  INLINE void add_values(const Tile& tile) {
    for (int d = 0; d < dim; d += 64) {
      settle();
      _tile_zero(0);
      _tile_zero(1);
      for (int g = 0; g < tile.keys.groups; g++) {
        if (d == 0) ahead[g].ask(kWeighing, 1);
        const uint32_t* from = weights + g * 2 * rows * kGroup;
        _tile_loadd(6, tile.keys.v[g] + d, dim);
        _tile_loadd(7, from, 64);
        _tile_dpbusd(0, 7, 6);
        _tile_loadd(5, from + rows * kGroup, 64);
        _tile_dpbusd(1, 5, 6);
      }
      _tile_stored(0, parts, 64);
      _tile_stored(1, parts + rows * W, 64);
      settle();
      float* to = o + d / 4 * rows;
      for (int row = 0; row < rows; row++, to += W) {
        const vi whole = (load_as<vi>(parts + row * W) << 8) + load_as<vi>(parts + (rows + row) * W);
        store(to, load(to) + __builtin_convertvector(whole, vf) * unit[row / 4]);
      }
    }
  }

  template <int N>
  INLINE void shrink_outputs(const vf (&by)[N]) {
    for (int row = 0; row < rows * dim / 64; row++) store(o + row * W, load(o + row * W) * by[row % rows / 4]);
  }

  // Four rows of 16 into 64 dims.
  static INLINE void interleave(const float* from, float* to) {
    const vf a = load(from), b = load(from + W), d = load(from + 2 * W), e = load(from + 3 * W);
    const __m512d ab = (__m512d)_mm512_unpacklo_ps(a, b), ab2 = (__m512d)_mm512_unpackhi_ps(a, b);
    const __m512d de = (__m512d)_mm512_unpacklo_ps(d, e), de2 = (__m512d)_mm512_unpackhi_ps(d, e);
    // Of each piece of 128 bits the first four dims, the second four and so on.
    const vf first = (vf)_mm512_unpacklo_pd(ab, de), second = (vf)_mm512_unpackhi_pd(ab, de);
    const vf third = (vf)_mm512_unpacklo_pd(ab2, de2), fourth = (vf)_mm512_unpackhi_pd(ab2, de2);
    const vf low = _mm512_shuffle_f32x4(first, second, 0x44), low2 = _mm512_shuffle_f32x4(third, fourth, 0x44);
    const vf high = _mm512_shuffle_f32x4(first, second, 0xee), high2 = _mm512_shuffle_f32x4(third, fourth, 0xee);
    store(to, _mm512_shuffle_f32x4(low, low2, 0x88));
    store(to + W, _mm512_shuffle_f32x4(low, low2, 0xdd));
    store(to + 2 * W, _mm512_shuffle_f32x4(high, high2, 0x88));
    store(to + 3 * W, _mm512_shuffle_f32x4(high, high2, 0xdd));
  }
};

}  // namespace
