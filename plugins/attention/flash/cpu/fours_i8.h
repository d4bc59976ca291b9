// Up to four query vectors over a cache of int8, by matrix tiles of bytes.
//
// Outputs = weights x values, where a word of the values is four dims of one key: each lane has four rows, with the weight beside
// each of them and nothing beside others.

#pragma once

#include "bytes.h"

namespace {

class ByteFours : public ByteLanes<ByteFours> {
 public:
  ByteFours(const Call& call, const Item& it, const Item* next, float* memory)
      : ByteLanes(call, it, next, memory, 2), rows(4 * lanes) {
    q = scratch.take<float>(2 * dim / 4 * kLanes);
    o = scratch.take<float>(4 * kLanes * dim / 4);
    parts = scratch.take<int32_t>(2 * 4 * kLanes * W);
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
  friend ByteLanes;
  friend Base;

  static constexpr int kColumns = 2 * kLanes;  // the upper bytes of all lanes' queries, then the lower ones

  const int rows;
  float* q;           // [DP / 4, upper and lower byte, lane] fours of dims
  float* o;           // [DP / 64, row, 16] weighted values: four rows of a lane, of each four dims the first, second and so on
  int32_t* parts;     // [upper and lower byte, row, 16] of a tile
  uint32_t* weights;  // [group, upper and lower byte, row, key] words with one byte that is not zero

  INLINE void load_queries(int d) const {
    _tile_loadd(2, q + d / 4 * kColumns, 4 * kColumns);
  }

  // Lanes past the last are zero.
  void pack_queries() {
    alignas(64) int8_t bytes[2][kLanes][kMaxDim] = {};
    for (int lane = 0; lane < lanes; lane++) read_query(lane, bytes[0][lane], bytes[1][lane]);
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
    aim(of, start);
    for (int g = 0; g < of.groups; g++) {
      tile.ahead[g] = keys.ahead(start, g);
      tile.ahead[g].ask(0, kScoring);
      fetch_group(of, g);
      score_group(of.k[g], (int32_t*)tile.scores + g * kGroup * kColumns);
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

  template <int N>
  INLINE void whole_scores(const Tile& tile, int g, vf (&x)[kLanes]) const {
    const float* from = tile.scores + g * kGroup * kColumns;
    const auto whole = [&](int i) {  // of four keys
      const vf two = load(from + 2 * i * W), next_two = load(from + (2 * i + 1) * W);
      return join((vi)_mm512_shuffle_f32x4(two, next_two, 0x88), (vi)_mm512_shuffle_f32x4(two, next_two, 0xdd), 7);
    };
    turn(whole(0), whole(1), whole(2), whole(3), x);
  }

  // Each byte is put beside each of four dims in turn.
  INLINE void put_weights(int lane, int g, __m512i upper, __m512i lower) {
    uint32_t* to = weights + (g * 2 * rows + lane * 4) * kGroup;
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      _mm512_store_si512(to + i * kGroup, _mm512_slli_epi32(upper, 8 * i));
      _mm512_store_si512(to + (rows + i) * kGroup, _mm512_slli_epi32(lower, 8 * i));
    }
  }

  INLINE void add_values(const Tile& tile) {
    for (int d = 0; d < dim; d += 64) {
      settle();
      _tile_zero(0);
      _tile_zero(1);
      for (int g = 0; g < tile.keys.groups; g++) {
        if (d == 0) ahead[g].ask(kWeighing, Ahead::kAll);
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
        const vf whole = join(load_as<vi>(parts + row * W), load_as<vi>(parts + (rows + row) * W), 8);
        store(to, load(to) + whole * unit[row / 4]);
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
