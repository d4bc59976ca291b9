// Up to four query vectors (decodes, where a KV head serves few query heads), by matrix tiles of bf16, which make in a cycle or
// two what a vector unit takes ten for. Keys and values are read as they lie in the cache.
//
// Scores[key][lane] = keys x queries. Outputs = weights x values, where a word of the values is two dims of one key: beside a
// weight in a word's lower half and nothing in its upper one, a product is with the even dims, the other way round with the odd
// ones. So each lane has two rows, and values need no turning. (A NaN among a key's values spoils two dims for that.)

#pragma once

#include "fours_base.h"

namespace {

class Fours : public FourLanes<Fours, KeyTile<Bf16>> {
 public:
  Fours(const Call& call, const Item& it, const Item* next, float* memory)
      : FourLanes(call, it, memory), rows(2 * lanes), is_quantized(call.is_quantized()), keys{call, it, next} {
    for (Tile& tile : tiles) tile.keys.gathered = scratch.take<uint16_t>(2 * kTile * dim), tile.keys.kept = 2;
    q = scratch.take<float>(dim / 2 * kLanes);
    o = scratch.take<float>(2 * kLanes * dim);
    weights = scratch.take<uint32_t>(2 * kLanes * kTile);
    pack_queries();
  }

  // With the matrix tiles as `configure` leaves them.
  void run() {
    if (is_common()) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_loadd(3, q, 4 * kLanes);
      _tile_loadd(5, q + 16 * kLanes, 4 * kLanes);
    } else {
      std::memset(o, 0, rows * dim * 4);
    }
    attend_to_keys();
    if (is_common()) store_sums();
    for (int lane = 0; lane < lanes; lane++) {
      float* row = (float*)weights;
      for (int d = 0; d < dim; d += 2 * W) interleave(o + d * rows / 2 + lane * W, row + d);
      emit(c, item, lane, reference[lane][0], sum_of(sum[lane]), row);
    }
    arrive(c, item, o);
  }

  // For items of as many lanes. Tiles 0 to 3: sums of values, [row, 16 pairs of dims]; 3 and 5: queries, [pair of dims, lane]; 4:
  // scores, [key, lane]; 6: keys or values, [key, 32 dims]; 7: weights, [row, key].
  void configure() const {
    struct alignas(64) Config {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 4 * kLanes, 4 * kLanes, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    for (int sums : {0, 1, 2, 3, 7}) config.rows[sums] = rows;
    if (is_common()) config.row_bytes[3] = 4 * kLanes, config.rows[3] = 16;
    _tile_loadconfig(&config);
  }

 private:
  friend FourLanes;

  const int rows;
  const bool is_quantized;
  Keys<Bf16, false, true> keys;
  float* q;           // [DP / 2, lane] pairs of dims
  float* o;           // [DP / 32, row, 16] weighted values: of a lane the even dims, and `lanes` rows further the odd ones
  uint32_t* weights;  // [group, row, key] a bf16 in the lower half of a word, and `lanes` rows further in the upper half

  // Sums and queries of this head dim stay in their tiles.
  bool is_common() const { return dim == 64; }

  // Lanes past the last are zero.
  void pack_queries() {
    uint16_t* copies = tiles[0].keys.gathered;
    const float* from[kLanes];
    for (int lane = 0; lane < kLanes; lane++) {
      from[lane] = (const float*)(lane < lanes ? query(c, item, lane) : nullptr);
      if (lane < lanes && c.dim == dim) continue;
      read_row<Bf16>(copies + lane * dim, from[lane], c.type, lane < lanes ? c.dim : 0, dim);
      from[lane] = (const float*)(copies + lane * dim);
    }
    pack_words(from, dim / 2, q);
  }

  INLINE void score(Tile& tile, int start) {
    keys.aim(start, tile.keys);
    keys.fetch_group(tile.keys, 0);
    for (int g = 0; g < tile.keys.groups; g++) {
      tile.ahead[g] = keys.ahead(start, g);
      tile.ahead[g].ask(0, kScoring);
      if (g + 1 < tile.keys.groups) keys.fetch_group(tile.keys, g + 1);
      const uint16_t* k = tile.keys.k[g];
      settle();
      _tile_zero(4);
      if (is_common()) {
        _tile_loadd(6, k, 128);
        _tile_dpbf16ps(4, 6, 3);
        _tile_loadd(6, k + 32, 128);
        _tile_dpbf16ps(4, 6, 5);
      } else {
        for (int d = 0; d < dim; d += 32) {
          _tile_loadd(6, k + d, dim * 2);
          _tile_loadd(5, q + d / 2 * kLanes, 4 * kLanes);
          _tile_dpbf16ps(4, 6, 5);
        }
      }
      _tile_stored(4, tile.scores + g * kGroup * kLanes, 4 * kLanes);
      settle();
    }
  }

  // Of a group's keys the scores of each lane, scaled.
  template <int N, bool kPlain>
  INLINE void scores_of(const Tile& tile, int g, vf (&x)[kLanes]) const {
    const float* from = tile.scores + g * kGroup * kLanes;
    turn(load(from), load(from + W), load(from + 2 * W), load(from + 3 * W), x);
    const vf by = is_quantized ? load(tile.keys.k_scale + g * kGroup) * factor : fill(factor);
#pragma GCC unroll 4
    for (int lane = 0; lane < N; lane++) {
      x[lane] *= by;
      if (!kPlain) x[lane] = cap_and_hide(x[lane], tile.keys.start + g * kGroup, lane);
    }
  }

  template <int N, bool kPlain>
  INLINE bool try_to_weigh(const Tile& tile) {
    vf total[N], highest[N], ref[N];
    for (int lane = 0; lane < N; lane++) total[lane] = sum[lane], highest[lane] = fill(-INFINITY), ref[lane] = reference[lane];
    for (int g = 0; g < tile.keys.groups; g++) {
      vf x[kLanes];
      ahead[g].ask(kScoring, is_common() ? kWeighing : Ahead::kAll);
      scores_of<N, kPlain>(tile, g, x);
      uint32_t* to = weights + g * rows * kGroup;
      const vf v_scale = is_quantized ? load(tile.keys.v_scale + g * kGroup) : fill(1);
#pragma GCC unroll 4
      for (int lane = 0; lane < N; lane++) {
        highest[lane] = vmax(highest[lane], x[lane]);
        const vf p = exp2v<true>(x[lane] - ref[lane]);
        total[lane] += p;
        const vu rounded = ((vu)(p * v_scale) + 0x8000) & 0xffff0000;
        store((float*)to + lane * kGroup, (vf)(rounded >> 16));
        store((float*)to + (N + lane) * kGroup, (vf)rounded);
      }
    }
    if (is_too_high<N>(highest)) return false;
    for (int lane = 0; lane < N; lane++) sum[lane] = total[lane];
    return true;
  }

  template <int N>
  INLINE void shrink_outputs(const vf (&by)[N]) {
    if (is_common()) store_sums();
    for (int lane = 0; lane < N; lane++) {
      for (int at = lane * W; at < rows * dim / 2; at += N * W) store(o + at, load(o + at) * by[lane]);
    }
    if (is_common()) load_sums();
  }

  // The even dims from `from`, the odd ones from `lanes` rows further.
  INLINE void interleave(const float* from, float* to) const {
    const vf even = load(from), odd = load(from + lanes * W);
    store(to, __builtin_shufflevector(even, odd, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23));
    store(to + W, __builtin_shufflevector(even, odd, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31));
  }

  INLINE void add_values(Tile& tile) {
    settle();
    if (is_common()) {
      const uint16_t* coming = keys.values(tile.keys, 0, 0);
      for (int g = 0; g < tile.keys.groups; g++) {
        const uint16_t* v = coming;
        ahead[g].ask(kWeighing, Ahead::kAll);
        // A tile is not loaded from what was stored just before.
        if (g + 1 < tile.keys.groups) coming = keys.values(tile.keys, g + 1, (g + 1) % 2);
        settle();
        _tile_loadd(7, weights + g * rows * kGroup, 64);
        _tile_loadd(6, v, 128);
        _tile_dpbf16ps(0, 7, 6);
        _tile_loadd(6, v + 32, 128);
        _tile_dpbf16ps(1, 7, 6);
        settle();
      }
    } else {
      int d = 0;
      for (int g = 0; g < tile.keys.groups; g++) tile.keys.v[g] = keys.values(tile.keys, g, g);
      settle();
      for (; d + 128 <= dim; d += 128) add_dims<4>(tile.keys, d);
      if (dim - d == 96) add_dims<3>(tile.keys, d);
      if (dim - d == 64) add_dims<2>(tile.keys, d);
      if (dim - d == 32) add_dims<1>(tile.keys, d);
    }
    settle();
  }

  // Weighted values of 32 dims for each of so many tiles, from d on.
  template <int kTiles>
  INLINE void add_dims(const KeyTile<Bf16>& tile, int d) {
    float* to = o + d / 2 * rows;
    _tile_loadd(0, to, 64);
    if constexpr (kTiles > 1) _tile_loadd(1, to + rows * W, 64);
    if constexpr (kTiles > 2) _tile_loadd(2, to + 2 * rows * W, 64);
    if constexpr (kTiles > 3) _tile_loadd(3, to + 3 * rows * W, 64);
    for (int g = 0; g < tile.groups; g++) {
      const uint16_t* from = tile.v[g] + d;
      _tile_loadd(7, weights + g * rows * kGroup, 64);
      _tile_loadd(6, from, dim * 2);
      _tile_dpbf16ps(0, 7, 6);
      if constexpr (kTiles > 1) {
        _tile_loadd(6, from + 32, dim * 2);
        _tile_dpbf16ps(1, 7, 6);
      }
      if constexpr (kTiles > 2) {
        _tile_loadd(6, from + 64, dim * 2);
        _tile_dpbf16ps(2, 7, 6);
      }
      if constexpr (kTiles > 3) {
        _tile_loadd(6, from + 96, dim * 2);
        _tile_dpbf16ps(3, 7, 6);
      }
    }
    _tile_stored(0, to, 64);
    if constexpr (kTiles > 1) _tile_stored(1, to + rows * W, 64);
    if constexpr (kTiles > 2) _tile_stored(2, to + 2 * rows * W, 64);
    if constexpr (kTiles > 3) _tile_stored(3, to + 3 * rows * W, 64);
  }

  // Of the common head dim, whose sums are in tiles 0 and 1.
  INLINE void store_sums() {
    settle();
    _tile_stored(0, o, 64);
    _tile_stored(1, o + rows * W, 64);
    settle();
  }

  INLINE void load_sums() {
    settle();
    _tile_loadd(0, o, 64);
    _tile_loadd(1, o + rows * W, 64);
    settle();
  }
};

}  // namespace
