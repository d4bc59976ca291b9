// Up to four query vectors over a cache of int8 by products of bytes in vectors (VNNI), for processors without matrix tiles.
//
// Scores: a word is four dims of one key. Words of four keys are turned, so that little is left to be summed across vectors.
// Products take one side without a sign: keys are 128 higher, and scores as much lower in the end.
// Outputs: a word is four keys of one dim, by the same four keys' weights.

#pragma once

#include "bytes.h"

namespace {

class ByteVectors : public ByteLanes<ByteVectors> {
 public:
  ByteVectors(const Call& call, const Item& it, const Item* next, float* memory)
      : ByteLanes(call, it, next, memory, 1) {
    q = scratch.take<int8_t>(2 * kLanes * 4 * dim);
    o = scratch.take<float>(kLanes * dim);
    weights = scratch.take<uint8_t>(2 * kLanes * kTile);
    std::memset(o, 0, kLanes * dim * 4);
    for (int lane = 0; lane < lanes; lane++) pack_query(lane);
  }

  void run() {
    attend_to_keys();
    for (int lane = 0; lane < lanes; lane++) {
      for (int d = 0; d < dim; d += 64) restore_dims(o + lane * dim + d, scaled + d);
      emit(c, item, lane, reference[lane][0], sum_of(sum[lane]), scaled);
    }
    arrive(c, item, o);
  }

 private:
  friend ByteLanes;
  friend Base;
  static constexpr int kScoring = 8, kWeighing = 10;

  int8_t* q;               // [upper and lower byte, lane, DP / 64, 4, 64] words, each four times side by side
  int32_t start_of[kLanes];  // what scores begin with
  float* o;          // [lane, DP / 64, 4, 16] weighted values: of each four of dims the first, second and so on
  uint8_t* weights;  // [upper and lower byte, lane, kTile]

  void pack_query(int lane) {
    alignas(64) int8_t bytes[2][kMaxDim];
    read_query(lane, bytes[0], bytes[1]);
    int32_t sums[2] = {};
    for (int part = 0; part < 2; part++) {
      int8_t* to = q + (part * kLanes + lane) * 4 * dim;
      for (int d = 0; d < dim; d += 64, to += 256) {
        const auto x = load_as<__m512i>(bytes[part] + d);
        sums[part] += _mm512_reduce_add_epi32(_mm512_dpbusd_epi32(__m512i{}, _mm512_set1_epi8(1), x));
        _mm512_store_si512(to, _mm512_shuffle_epi32(x, _MM_PERM_AAAA));
        _mm512_store_si512(to + 64, _mm512_shuffle_epi32(x, _MM_PERM_BBBB));
        _mm512_store_si512(to + 128, _mm512_shuffle_epi32(x, _MM_PERM_CCCC));
        _mm512_store_si512(to + 192, _mm512_shuffle_epi32(x, _MM_PERM_DDDD));
      }
    }
    start_of[lane] = -128 * ((sums[0] << 7) + sums[1]);
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
    aim(tile.keys, start);
    for (int g = 0; g < tile.keys.groups; g++) {
      tile.ahead[g] = keys.ahead(start, g);
      fetch_group(tile.keys, g);
      score_group<N>(tile.keys.k[g], tile.ahead[g], tile.scores + g * kGroup * kLanes);
    }
  }

  template <int N>
  INLINE void score_group(const int8_t* k, const Ahead& ahead, float* to) const {
    vf fours[N][4];
#pragma GCC unroll 4
    for (int four = 0; four < 4; four++) {
      ahead.ask(four * kScoring / 4, (four + 1) * kScoring / 4);
      __m512i upper[N], lower[N];
#pragma GCC unroll 4
      for (int lane = 0; lane < N; lane++) upper[lane] = lower[lane] = __m512i{};
      for (int d = 0; d < dim; d += 64) {
        vf words[4];
        turn_words(k + 4 * four * dim + d, words);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
#pragma GCC unroll 4
          for (int lane = 0; lane < N; lane++) {
            const int8_t* with = q + lane * 4 * dim + 4 * d + i * 64;
            upper[lane] = _mm512_dpbusd_epi32(upper[lane], (__m512i)words[i], load_as<__m512i>(with));
            lower[lane] = _mm512_dpbusd_epi32(lower[lane], (__m512i)words[i], load_as<__m512i>(with + kLanes * 4 * dim));
          }
        }
      }
#pragma GCC unroll 4
      for (int lane = 0; lane < N; lane++) fours[lane][four] = (vf)(((vi)upper[lane] << 7) + (vi)lower[lane]);
    }
#pragma GCC unroll 4
    for (int lane = 0; lane < N; lane++) {
      const vf(&x)[4] = fours[lane];
      const vi ab = (vi)_mm512_shuffle_f32x4(x[0], x[1], 0x44) + (vi)_mm512_shuffle_f32x4(x[0], x[1], 0xee);
      const vi de = (vi)_mm512_shuffle_f32x4(x[2], x[3], 0x44) + (vi)_mm512_shuffle_f32x4(x[2], x[3], 0xee);
      const vi whole = (vi)_mm512_shuffle_f32x4((vf)ab, (vf)de, 0x88) + (vi)_mm512_shuffle_f32x4((vf)ab, (vf)de, 0xdd);
      store(to + lane * kGroup, __builtin_convertvector(whole + start_of[lane], vf));
    }
  }

  // Of four keys 64 dims, 128 higher: in each 128 bits of words[i] the word i of those of each key.
  INLINE void turn_words(const int8_t* k, vf (&words)[4]) const {
    vf x[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) x[i] = (vf)(load_as<vi>(k + i * dim) ^ int32_t(0x80808080));
    const __m512d a = (__m512d)_mm512_unpacklo_ps(x[0], x[1]), a2 = (__m512d)_mm512_unpackhi_ps(x[0], x[1]);
    const __m512d b = (__m512d)_mm512_unpacklo_ps(x[2], x[3]), b2 = (__m512d)_mm512_unpackhi_ps(x[2], x[3]);
    words[0] = (vf)_mm512_unpacklo_pd(a, b), words[1] = (vf)_mm512_unpackhi_pd(a, b);
    words[2] = (vf)_mm512_unpacklo_pd(a2, b2), words[3] = (vf)_mm512_unpackhi_pd(a2, b2);
  }

  template <int N>
  INLINE void whole_scores(const Tile& tile, int g, vf (&x)[kLanes]) const {
#pragma GCC unroll 4
    for (int lane = 0; lane < N; lane++) x[lane] = load(tile.scores + (g * kLanes + lane) * kGroup);
  }

  INLINE void put_weights(int lane, int g, __m512i upper, __m512i lower) {
    uint8_t* to = weights + lane * kTile + g * kGroup;
    _mm_store_si128((__m128i*)to, _mm512_cvtepi32_epi8(upper));
    _mm_store_si128((__m128i*)(to + kLanes * kTile), _mm512_cvtepi32_epi8(lower));
  }

  INLINE void add_values(const Tile& tile) {
    switch (lanes) {
      case 1: return add_lanes<1>(tile);
      case 2: return add_lanes<2>(tile);
      case 3: return add_lanes<3>(tile);
      default: return add_lanes<4>(tile);
    }
  }

  template <int N>
  void add_lanes(const Tile& tile) {
    for (int d = 0; d < dim; d += 64) {
      add_half<N, false>(tile, d);
      add_half<N, true>(tile, d);
    }
  }

  // Of every 16 dims from d on the first or the second eight.
  template <int N, bool kSecond>
  INLINE void add_half(const Tile& tile, int d) {
    const auto pair = [](__m512i a, __m512i b) { return kSecond ? _mm512_unpackhi_epi8(a, b) : _mm512_unpacklo_epi8(a, b); };
    __m512i upper[N][2], lower[N][2];
#pragma GCC unroll 4
    for (int lane = 0; lane < N; lane++) {
      for (int half = 0; half < 2; half++) upper[lane][half] = lower[lane][half] = __m512i{};
    }
    for (int g = 0; g < tile.keys.groups; g++) {
#pragma GCC unroll 4
      for (int i = 0; i < kGroup; i += 4) {
        if (d == 0) ask_for_values(g, i / 4 + 4 * kSecond);
        const int8_t* v = tile.keys.v[g] + i * dim + d;
        const __m512i a = pair(load_as<__m512i>(v), load_as<__m512i>(v + dim));
        const __m512i b = pair(load_as<__m512i>(v + 2 * dim), load_as<__m512i>(v + 3 * dim));
        const __m512i words[2] = {_mm512_unpacklo_epi16(a, b), _mm512_unpackhi_epi16(a, b)};
#pragma GCC unroll 4
        for (int lane = 0; lane < N; lane++) {
          const uint8_t* from = weights + lane * kTile + g * kGroup + i;
          const __m512i high = _mm512_set1_epi32(load_as<int32_t>(from));
          const __m512i low = _mm512_set1_epi32(load_as<int32_t>(from + kLanes * kTile));
          for (int half = 0; half < 2; half++) {
            upper[lane][half] = _mm512_dpbusd_epi32(upper[lane][half], high, words[half]);
            lower[lane][half] = _mm512_dpbusd_epi32(lower[lane][half], low, words[half]);
          }
        }
      }
    }
#pragma GCC unroll 4
    for (int lane = 0; lane < N; lane++) {
      for (int half = 0; half < 2; half++) {
        float* to = o + lane * dim + d + (2 * kSecond + half) * W;
        store(to, load(to) + join((vi)upper[lane][half], (vi)lower[lane][half], 8) * unit[lane]);
      }
    }
  }

  INLINE void ask_for_values(int g, int step) const {
    constexpr int kLeft = Ahead::kAll - kWeighing;
    ahead[g].ask(kWeighing + step * kLeft / 8, kWeighing + (step + 1) * kLeft / 8);
  }

  template <int N>
  INLINE void shrink_outputs(const vf (&by)[N]) {
    for (int lane = 0; lane < N; lane++) {
      for (int d = 0; d < dim; d += W) store(o + lane * dim + d, load(o + lane * dim + d) * by[lane]);
    }
  }

  // Fours of dims, 16 from each vector, into the order of the dims.
  static INLINE void restore_dims(const float* from, float* to) {
    const vf a = load(from), b = load(from + W), d = load(from + 2 * W), e = load(from + 3 * W);
    const vf low = _mm512_shuffle_f32x4(a, b, 0x44), low2 = _mm512_shuffle_f32x4(d, e, 0x44);
    const vf high = _mm512_shuffle_f32x4(a, b, 0xee), high2 = _mm512_shuffle_f32x4(d, e, 0xee);
    store(to, _mm512_shuffle_f32x4(low, low2, 0x88));
    store(to + W, _mm512_shuffle_f32x4(low, low2, 0xdd));
    store(to + 2 * W, _mm512_shuffle_f32x4(high, high2, 0x88));
    store(to + 3 * W, _mm512_shuffle_f32x4(high, high2, 0xdd));
  }
};

}  // namespace
