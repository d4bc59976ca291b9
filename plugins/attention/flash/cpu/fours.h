// Up to four query vectors (decodes, where a KV head serves few query heads), by matrix tiles, which make in a cycle or two what
// a vector unit takes ten for.
//
// Scores[key][lane] = keys x queries take the keys as they lie in the cache, and a vector of scores is four keys' of four lanes.
// Outputs[lane][dim] = weights x values take the weights turned, and the values of two keys side by side, which needs no turning.

#pragma once

#include "rows.h"

namespace {

struct Fours {
  static constexpr int kLanes = 4, kKeys = W / kLanes;  // lanes, and keys of a vector of scores
  static constexpr int kChunk = 2 * kGroup;             // keys of one product with values

  // Tiles 0 to 3: sums of values, [lane, 16 dims]. 4: scores, [key, lane]. 5: queries, [pair of dims, lane]. 6: keys,
  // [key, 32 dims], or values, [pair of keys, 16 dims]. 7: weights, [lane, 32 keys].
  static void configure() {
    struct alignas(64) Config {
      uint8_t palette, start_row, reserved[14];
      uint16_t row_bytes[16];
      uint8_t rows[16];
    };
    static constexpr Config kConfig{1, 0, {}, {64, 64, 64, 64, 4 * kLanes, 4 * kLanes, 64, 64},
                                    {kLanes, kLanes, kLanes, kLanes, 16, 16, 16, kLanes}};
    _tile_loadconfig(&kConfig);
  }

  // Compilers do not know that tiles read and write memory.
  static INLINE void settle() { asm volatile("" ::: "memory"); }

  const Call& c;
  const Item& item;
  const int dim, lanes;
  Scratch scratch;
  Keys<Bf16, false> keys;
  KeyTile<Bf16> tile;
  float* q;           // [DP / 2, lane] pairs of dims
  float* o;           // [lane, DP], in the order that unpacking leaves
  float* scores;      // [kTile, lane]
  uint16_t* weights;  // [chunk, lane, kChunk]
  float* values;      // [chunk, DP / 16, pair of keys, 16] pairs of keys
  vf maximum, sum;    // of lane i % 4
  vi oldest, last;    // keys that lane i % 4 sees
  const bool quantized;

  Fours(const Call& call, const Item& it, const Item* next, float* memory)
      : c(call), item(it), dim(call.padded_dim), lanes(it.q_count * call.group), scratch{memory}, keys{call, it, next},
        maximum(fill(kLowest)), sum(vf{}), quantized(call.is_quantized()) {
    tile.gathered = scratch.take<uint16_t>(2 * kTile * dim);
    q = scratch.take<float>(dim / 2 * kLanes);
    o = scratch.take<float>(kLanes * dim);
    scores = scratch.take<float>(kTile * kLanes);
    weights = scratch.take<uint16_t>(kTile * kLanes);
    values = scratch.take<float>(kTile / 2 * dim);
    std::memset(o, 0, kLanes * dim * 4);
    for (int i = 0; i < W; i++) {
      const int position = position_of(c, item, std::min(i % kLanes, lanes - 1));
      oldest[i] = c.window ? window_begin(c, item, std::min(i % kLanes, lanes - 1)) : 0;
      last[i] = std::min(position, item.key_last - 1);
    }
    pack_queries();
  }

  void run() {
    for (int start = keys.first(); start < item.key_last; start += kTile) {
      keys.begin(start, tile);
      for (int g = 0; g < 2 * num_chunks(); g++) {
        if (g < tile.groups) {
          keys.prefetch(start, g);
          keys.fetch_group(tile, g);
          score(g);
        }
        pack_values(g);  // meanwhile, for it does not wait for the scores
      }
      soften(start);
      add_values();
    }
    const vf total = over_keys(sum, [](vf a, vf b) { return a + b; });
    for (int lane = 0; lane < lanes; lane++) {
      restore_order(o + lane * dim, dim);
      emit(c, item, lane, maximum[lane], total[lane], o + lane * dim);
    }
    arrive(c, item, o);
  }

 private:
  // Lanes past the last are zero.
  void pack_queries() {
    uint16_t* elements = tile.gathered;
    for (int lane = 0; lane < kLanes; lane++) {
      const bool real = lane < lanes;
      read_row<Bf16>(elements + lane * dim, real ? query(c, item, lane) : nullptr, c.type, real ? c.dim : 0, dim);
    }
    const float* rows = (const float*)elements;
    const int words = dim / 2;
    for (int k = 0; k < words; k += 4) {
      __m128 a = _mm_loadu_ps(rows + k), b = _mm_loadu_ps(rows + words + k);
      __m128 d = _mm_loadu_ps(rows + 2 * words + k), e = _mm_loadu_ps(rows + 3 * words + k);
      _MM_TRANSPOSE4_PS(a, b, d, e);
      float* to = q + k * kLanes;
      _mm_storeu_ps(to, a), _mm_storeu_ps(to + 4, b), _mm_storeu_ps(to + 8, d), _mm_storeu_ps(to + 12, e);
    }
  }

  INLINE void score(int g) {
    settle();
    _tile_zero(4);
    for (int d = 0; d < dim; d += 32) {
      _tile_loadd(6, tile.k[g] + d, dim * 2);
      _tile_loadd(5, q + d / 2 * kLanes, 4 * kLanes);
      _tile_dpbf16ps(4, 6, 5);
    }
    _tile_stored(4, scores + g * kGroup * kLanes, 4 * kLanes);
    settle();
  }

  INLINE int num_chunks() const { return (tile.groups + 1) / 2; }

  INLINE void pack_values(int g) {
    float* to = values + (g / 2 * dim + g % 2 * (kGroup / 2)) * W;
    for (int i = 0; i < kGroup; i += 2, to += W) {
      const uint16_t* even = tile.v[g] + i * dim;
      for (int d = 0; d < dim; d += 32) {
        const __m512i x = _mm512_loadu_si512(even + d), y = _mm512_loadu_si512(even + dim + d);
        store(to + d * W, (vf)_mm512_unpacklo_epi16(x, y));
        store(to + (d + W) * W, (vf)_mm512_unpackhi_epi16(x, y));
      }
    }
  }

  // What four vectors of 128 bits have in common, lane by lane.
  template <class Both>
  static INLINE vf over_keys(vf x, Both both) {
    x = both(x, (vf)_mm512_shuffle_f32x4(x, x, 0x4e));
    return both(x, (vf)_mm512_shuffle_f32x4(x, x, 0xb1));
  }

  // Of four keys' numbers each for all four lanes.
  static INLINE vf for_lanes(const float* numbers) {
    const __m512i each = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
    return _mm512_permutexvar_ps(each, _mm512_castps128_ps512(_mm_loadu_ps(numbers)));
  }

  // Scores of the tile into weights, and smaller sums where a score is the highest so far.
  INLINE void soften(int start) {
    const int count = num_chunks() * kChunk;
    if (tile.groups % 2) std::memset(tile.v_scale + tile.groups * kGroup, 0, kGroup * 4);
    const float factor = c.softcap != 0 ? 1 : c.scale * kLog2e;
    const bool masked = start < highest_oldest() || start + count - 1 > last[0] || start + count > item.tree_start;
    vf highest = fill(kLowest);
    for (int k = 0; k < count; k += kKeys) {
      vf x = load(scores + k * kLanes);
      if (quantized) x *= for_lanes(tile.k_scale + k);
      if (c.softcap != 0) x = tanhv(x * (c.scale / c.softcap)) * (c.softcap * kLog2e);
      x *= factor;
      if (masked) x = mask(x, start + k);
      if (start + k + kKeys > item.tree_start) x = hide_nodes(x, start + k);
      store(scores + k * kLanes, x);
      highest = vmax(highest, x);
    }
    const vf now = vmax(maximum, over_keys(highest, vmax));
    if (any(now > maximum)) {
      const vf shrink = exp2v<false>(maximum - now);
      for (int lane = 0; lane < lanes; lane++) {
        for (int d = 0; d < dim; d += W) store(o + lane * dim + d, load(o + lane * dim + d) * shrink[lane]);
      }
      sum *= shrink;
      maximum = now;
    }
    for (int k = 0; k < count; k += kChunk) weigh(k);
  }

  INLINE int highest_oldest() const { return std::max(std::max(oldest[0], oldest[1]), std::max(oldest[2], oldest[3])); }

  INLINE vf mask(vf x, int first) const {
    const vi key = lane_numbers() / kLanes + first;
    const vf none = fill(-INFINITY);
    x = key < oldest ? none : x;
    return key > last ? none : x;
  }

  // Minus infinity for the nodes that are not on a lane's path.
  INLINE vf hide_nodes(vf x, int first) const {
    vi seen{};
    for (int i = 0; i < W; i++) {
      if (i % kLanes < lanes) seen[i] = nodes_seen(c, item, i % kLanes, first) >> (i / kLanes) & 1;
    }
    return seen != 0 ? x : fill(-INFINITY);
  }

  // 2 to the power of a chunk's scores, turned into rows of weights, one for each lane.
  INLINE void weigh(int first) {
    const __m512i by_lane = _mm512_set_epi16(31, 27, 23, 19, 15, 11, 7, 3, 30, 26, 22, 18, 14, 10, 6, 2,  //
                                             29, 25, 21, 17, 13, 9, 5, 1, 28, 24, 20, 16, 12, 8, 4, 0);
    __m512i eights[4];  // of eight keys, [lane, key]
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      const __m512bh both = _mm512_cvtne2ps_pbh(weight(first + (2 * i + 1) * kKeys), weight(first + 2 * i * kKeys));
      eights[i] = _mm512_permutexvar_epi16(by_lane, (__m512i)both);
    }
    const __m512i a = _mm512_shuffle_i32x4(eights[0], eights[1], 0x44), b = _mm512_shuffle_i32x4(eights[2], eights[3], 0x44);
    const __m512i d = _mm512_shuffle_i32x4(eights[0], eights[1], 0xee), e = _mm512_shuffle_i32x4(eights[2], eights[3], 0xee);
    uint16_t* to = weights + first * kLanes;
    _mm512_storeu_si512(to, _mm512_shuffle_i32x4(a, b, 0x88));
    _mm512_storeu_si512(to + kChunk, _mm512_shuffle_i32x4(a, b, 0xdd));
    _mm512_storeu_si512(to + 2 * kChunk, _mm512_shuffle_i32x4(d, e, 0x88));
    _mm512_storeu_si512(to + 3 * kChunk, _mm512_shuffle_i32x4(d, e, 0xdd));
  }

  INLINE vf weight(int k) {
    const vf p = exp2v<true>(load(scores + k * kLanes) - maximum);
    sum += p;
    return quantized ? p * for_lanes(tile.v_scale + k) : p;
  }

  INLINE void add_values() {
    settle();
    int d = 0;
    for (; d + 64 <= dim; d += 64) add_dims<4>(d);
    if (d < dim) add_dims<2>(d);
    settle();
  }

  // Weighted values of 16 dims for each of so many tiles, from d on.
  template <int kTiles>
  INLINE void add_dims(int d) {
    const float* to = o + d;
    _tile_loadd(0, to, dim * 4);
    _tile_loadd(1, to + W, dim * 4);
    if constexpr (kTiles == 4) {
      _tile_loadd(2, to + 2 * W, dim * 4);
      _tile_loadd(3, to + 3 * W, dim * 4);
    }
    for (int chunk = 0; chunk < num_chunks(); chunk++) {
      const float* from = values + (chunk * dim + d) * W;
      _tile_loadd(7, weights + chunk * kChunk * kLanes, kChunk * 2);
      _tile_loadd(6, from, 64);
      _tile_dpbf16ps(0, 7, 6);
      _tile_loadd(6, from + W * W, 64);
      _tile_dpbf16ps(1, 7, 6);
      if constexpr (kTiles == 4) {
        _tile_loadd(6, from + 2 * W * W, 64);
        _tile_dpbf16ps(2, 7, 6);
        _tile_loadd(6, from + 3 * W * W, 64);
        _tile_dpbf16ps(3, 7, 6);
      }
    }
    _tile_stored(0, (void*)to, dim * 4);
    _tile_stored(1, (void*)(to + W), dim * 4);
    if constexpr (kTiles == 4) {
      _tile_stored(2, (void*)(to + 2 * W), dim * 4);
      _tile_stored(3, (void*)(to + 3 * W), dim * 4);
    }
  }
};

}  // namespace
