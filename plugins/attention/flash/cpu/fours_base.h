// What decodes by matrix tiles have in common: up to four query vectors of a KV head, keys by the tile, weights of their scores.

#pragma once

#include "rows.h"

namespace {

// `Kernel` has score(tile, start), weigh<N, plain>(tile) and add_values(tile), and the keys' reader `keys`. Keys of a tile are
// scored before those of the tile before are weighed: neither waits for the other.
template <class Kernel, class Keys>
class FourLanes {
 public:
  static constexpr int kLanes = 4;

 protected:
  struct Tile {
    Keys keys;
    float* scores;  // [part, key, lane], floats or integers
    Ahead ahead[kTile / kGroup];
  };
  static constexpr Ahead kNothing[kTile / kGroup]{};
  // Memory is asked a little at a time, for requests beyond some ten hold up what follows: shares of a group's until it is scored
  // and until it is weighed.
  static constexpr int kScoring = 2, kWeighing = 8;

  const Call& c;
  const Item& item;
  const int dim, lanes;
  const float factor;  // of scores, before the power of two
  Scratch scratch;
  Tile tiles[2];
  const Ahead* ahead = kNothing;     // of each group: what is asked of memory while a tile is weighed and added up
  vf reference[kLanes], sum[kLanes];  // weights are 2 to the power of scores less the reference
  int oldest[kLanes], last[kLanes];   // keys that a lane sees
  int highest_oldest;

  // `parts`: of which a score is made.
  FourLanes(const Call& call, const Item& it, float* memory, int parts = 1)
      : c(call), item(it), dim(call.padded_dim), lanes(it.q_count * call.group),
        factor(call.softcap != 0 ? 1 : call.scale * kLog2e), scratch{memory} {
    for (Tile& tile : tiles) tile.scores = scratch.take<float>(parts * kTile * kLanes);
    for (int lane = 0; lane < kLanes; lane++) {
      const int real = std::min(lane, lanes - 1);
      oldest[lane] = c.window ? window_begin(c, item, real) : 0;
      last[lane] = std::min(position_of(c, item, real), item.key_last - 1);
      reference[lane] = fill(kLowest), sum[lane] = vf{};
    }
    highest_oldest = *std::max_element(oldest, oldest + kLanes);
  }

  Kernel& self() { return *(Kernel*)this; }
  const Kernel& self() const { return *(const Kernel*)this; }

  INLINE void attend_to_keys() {
    Tile *tile = &tiles[0], *coming = &tiles[1];
    score_and_look_ahead(*tile, self().keys.first());
    for (bool is_first = true, is_last = false; !is_last; is_first = false, std::swap(tile, coming)) {
      is_last = tile->keys.start + kTile >= item.key_last;
      if (is_first && !is_last) {
        for (int g = 0; g < tile->keys.groups; g++) tile->ahead[g].ask(Kernel::kScoring, Ahead::kAll);
      }
      if (!is_last) score_and_look_ahead(*coming, tile->keys.start + kTile);
      ahead = !is_last ? coming->ahead : is_first ? tile->ahead : kNothing;
      weigh(*tile, is_first);
      self().add_values(*tile);
    }
  }

  // A tile of fewer groups than the one before, whose groups look further, asks for nothing more.
  INLINE void score_and_look_ahead(Tile& tile, int start) {
    self().score(tile, start);
    for (int g = tile.keys.groups; g < kTile / kGroup; g++) tile.ahead[g] = {};
  }

  // Compilers do not know that tiles read and write memory.
  static INLINE void settle() { asm volatile("" ::: "memory"); }

  // Of lanes' rows of so many words [word, lane], `stride` floats from word to word.
  static INLINE void pack_words(const float* const (&from)[kLanes], int words, float* to, int stride = kLanes) {
    for (int k = 0; k < words; k += 4, to += 4 * stride) {
      __m128 a = _mm_loadu_ps(from[0] + k), b = _mm_loadu_ps(from[1] + k);
      __m128 d = _mm_loadu_ps(from[2] + k), e = _mm_loadu_ps(from[3] + k);
      _MM_TRANSPOSE4_PS(a, b, d, e);
      _mm_storeu_ps(to, a), _mm_storeu_ps(to + stride, b);
      _mm_storeu_ps(to + 2 * stride, d), _mm_storeu_ps(to + 3 * stride, e);
    }
  }

  void weigh(const Tile& tile, bool is_first) {
    const int start = tile.keys.start, end = start + tile.keys.groups * kGroup;
    const bool sees_all = start >= highest_oldest && end - 1 <= last[0] && end <= item.tree_start;
    const bool is_plain = sees_all && c.softcap == 0;
    switch (lanes) {
      case 1: return is_plain ? weigh<1, true>(tile, is_first) : weigh<1, false>(tile, is_first);
      case 2: return is_plain ? weigh<2, true>(tile, is_first) : weigh<2, false>(tile, is_first);
      case 3: return is_plain ? weigh<3, true>(tile, is_first) : weigh<3, false>(tile, is_first);
      default: return is_plain ? weigh<4, true>(tile, is_first) : weigh<4, false>(tile, is_first);
    }
  }

  // Scores of the tile into weights. The reference begins as the highest score of the first keys; it is raised where weights grow
  // too large, and then the tile is weighed again.
  template <int N, bool kPlain>
  INLINE void weigh(const Tile& tile, bool is_first) {
    if (is_first) {
      vf x[kLanes];
      self().template scores_of<N, kPlain>(tile, 0, x);
      for (int lane = 0; lane < N; lane++) reference[lane] = vmax(reference[lane], fill(max_of(x[lane])));
    }
    if (!self().template try_to_weigh<N, kPlain>(tile)) {
      raise_reference<N, kPlain>(tile);
      self().template try_to_weigh<N, kPlain>(tile);
    }
  }

  // Whether these scores are too high for the reference: sums of 2 to this power and more are floats yet.
  template <int N>
  INLINE bool is_too_high(const vf (&highest)[N]) const {
    constexpr float kRoom = 60;
    vf excess = highest[0] - reference[0];
    for (int lane = 1; lane < N; lane++) excess = vmax(excess, highest[lane] - reference[lane]);
    return any(excess > kRoom);
  }

  // To the highest score of each lane; what was added up before becomes less by as much.
  template <int N, bool kPlain>
  __attribute__((noinline)) void raise_reference(const Tile& tile) {
    vf highest[N], shrink[N];
    for (int lane = 0; lane < N; lane++) highest[lane] = reference[lane];
    for (int g = 0; g < tile.keys.groups; g++) {
      vf x[kLanes];
      self().template scores_of<N, kPlain>(tile, g, x);
      for (int lane = 0; lane < N; lane++) highest[lane] = vmax(highest[lane], x[lane]);
    }
    for (int lane = 0; lane < N; lane++) {
      const vf now = fill(max_of(highest[lane]));
      shrink[lane] = exp2v<false>(reference[lane] - now);
      sum[lane] *= shrink[lane];
      reference[lane] = now;
    }
    self().shrink_outputs(shrink);
  }

  // A lane's scaled scores of 16 keys, as softcap says and where it sees them.
  INLINE vf cap_and_hide(vf x, int first, int lane) const {
    if (c.softcap != 0) x = tanhv(x * (c.scale / c.softcap)) * (c.softcap * kLog2e);
    const vi key = lane_numbers() + first;
    const vf none = fill(-INFINITY);
    x = key < oldest[lane] ? none : x;
    x = key > last[lane] ? none : x;
    if (first + kGroup <= item.tree_start) return x;
    return _mm512_mask_blend_ps(__mmask16(nodes_seen(c, item, lane, first)), none, x);
  }

  // [16, lane] into [lane, 16].
  static INLINE void turn(vf a, vf b, vf d, vf e, vf (&to)[kLanes]) {
    const __m512i first_two = _mm512_set_epi32(29, 25, 21, 17, 13, 9, 5, 1, 28, 24, 20, 16, 12, 8, 4, 0);
    const __m512i last_two = _mm512_set_epi32(31, 27, 23, 19, 15, 11, 7, 3, 30, 26, 22, 18, 14, 10, 6, 2);
    const vf ab = _mm512_permutex2var_ps(a, first_two, b), de = _mm512_permutex2var_ps(d, first_two, e);
    const vf ab2 = _mm512_permutex2var_ps(a, last_two, b), de2 = _mm512_permutex2var_ps(d, last_two, e);
    to[0] = _mm512_shuffle_f32x4(ab, de, 0x44);
    to[1] = _mm512_shuffle_f32x4(ab, de, 0xee);
    to[2] = _mm512_shuffle_f32x4(ab2, de2, 0x44);
    to[3] = _mm512_shuffle_f32x4(ab2, de2, 0xee);
  }
};

}  // namespace
