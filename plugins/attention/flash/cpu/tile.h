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

// The work is a stream of units: a tile of keys against one group of lanes. While a unit's scores become weights, the matrix
// products of its neighbours are under way, since they wait for nothing of it: scores of the next chunk of keys, and the values
// of the unit before. No tile is then loaded that was stored just before.
template <class N, int NV>
struct Tiles {
  typedef typename N::Element Element;
  static constexpr int L = NV * W;            // lanes that are worked on together
  static constexpr int kChunk = 2 * kGroup;   // keys whose scores are made together
  static constexpr int kSlots = 3;            // tiles of keys that the units at hand may be of
  // With few lanes matrix tiles take weights from the left, so that values need no turning: outputs are [lane, DP] then.
  static constexpr bool kByLanes = N::kTiles && NV == 1;
  static constexpr float kLimit = 0x1p60f;    // a sum of weights beyond it asks for a higher maximum

  struct Unit {
    const KeyTile<N>* tile;
    const float* values;  // packed values of the tile, where they need packing
    float* weights;       // [kTile / per word, L]
    int group, chunks;
    vf sum[NV];
  };

  const Call& c;
  const Item& item;
  const int dim, words, lanes, lane_groups;  // words: of a head dim
  Scratch scratch;
  Keys<N, true> keys;
  KeyTile<N> tiles[kSlots];
  float* packed[kSlots];
  int slot = 0, next_start, next_group, stop;  // stop: keys before it are at hand
  float* q;          // [lane group, words, L] packed
  float* o;          // [lane group, DP, L], or [L, DP]
  float* maximum;    // [lane group, L]; a reference that no seen score exceeds by far, once there is one
  float* sum;        // [lane group, L]
  int32_t* position; // [lane group, L]
  int32_t* begins;   // [lane group, L] the first key by the window, where there is one
  float* scores[3];  // [kChunk, L]; the last one is for units that are done again
  float* weights[2];
  float* rows;       // [W, DP]
  Element* elements; // [W, DP]
  bool* begun;       // [lane group]
  Part* totals = nullptr;  // [lane] of the pieces before, where keys are attended to in several

  Tiles(const Call& call, const Item& it, const Item* next, float* memory)
      : c(call), item(it), dim(c.padded_dim), words(dim / N::kPerWord), lanes(it.q_count * c.group),
        lane_groups((lanes + L - 1) / L), scratch{memory}, keys{call, it, next} {
    q = scratch.take<float>(lane_groups * words * L);
    o = scratch.take<float>(lane_groups * dim * L);
    maximum = scratch.take<float>(lane_groups * L);
    sum = scratch.take<float>(lane_groups * L);
    position = scratch.take<int32_t>(lane_groups * L);
    begins = scratch.take<int32_t>(lane_groups * L);
    begun = scratch.take<bool>(lane_groups);
    for (float*& piece : scores) piece = scratch.take<float>(kChunk * L);
    for (float*& piece : weights) piece = scratch.take<float>(kTile / N::kPerWord * L);
    for (float*& piece : packed) piece = scratch.take<float>(N::kPerWord == 2 ? kTile / 2 * dim : 0);
    for (KeyTile<N>& tile : tiles) tile.gathered = scratch.take<Element>(2 * kTile * dim);
    rows = scratch.take<float>(W * dim);
    elements = scratch.take<Element>(W * dim);
    for (int lane = 0; lane < lane_groups * L; lane++) {
      position[lane] = position_of(c, item, lane);
      begins[lane] = c.window ? window_begin(c, item, std::min(lane, lanes - 1)) : 0;
    }
  }

  void run() {
    for (int first = 0; first < lane_groups * L; first += W) pack_queries(first);
    if (c.batch_invariant) {
      run_by_pieces();
    } else {
      run_over(keys.first(), item.key_last);
      for (int first = 0; first < lanes; first += W) finish(first);
    }
    arrive(c, item, rows);
  }

  // As plan.h says of batch-invariant steps. Whatever is beside a lane, and which keys of those that it does not see are read,
  // changes nothing for it: their weights are zero, and its reference is its own.
  void run_by_pieces() {
    int start = keys.first() / kTile * kTile, end = (start / kInvariantPiece + 1) * kInvariantPiece;
    if (end < item.key_last) {
      totals = scratch.take<Part>(lanes);
      float* values = scratch.take<float>(lanes * dim);
      for (int lane = 0; lane < lanes; lane++) totals[lane] = {kLowest, 0, values + lane * dim};
    }
    for (; start < item.key_last; start = end, end += kInvariantPiece) {
      run_over(start, std::min(end, item.key_last));
      for (int first = 0; first < lanes; first += W) finish(first);
    }
    for (int lane = 0; totals && lane < lanes; lane++) {
      emit(c, item, lane, totals[lane].maximum, totals[lane].sum, totals[lane].values);
    }
  }

  void run_over(int start, int end) {
    std::memset(o, 0, lane_groups * dim * L * 4);
    std::memset(sum, 0, lane_groups * L * 4);
    std::memset(begun, 0, lane_groups);
    std::fill_n(maximum, lane_groups * L, kLowest);
    next_start = start - kTile;
    next_group = lane_groups;
    stop = end;
    Unit before{}, unit{}, after{};
    bool more = advance(unit, 0);
    if (more) score(unit, 0, scores[0], Nothing{});
    for (int turn = 0; more; turn++) {
      more = advance(after, turn + 1);
      soften(before, unit, more ? &after : nullptr);
      before = unit;
      unit = after;
    }
    for (int d = 0; before.chunks && d < dim; d += kDims) add_values(before, d, Nothing{});
  }

  // W lanes from `first` on; lanes past the last are zero.
  void pack_queries(int first) {
    for (int i = 0; i < W; i++) {
      const bool real = first + i < lanes;
      read_row<N>(elements + i * dim, real ? query(c, item, first + i) : nullptr, c.type, real ? c.dim : 0, dim);
    }
    const float* from = (const float*)elements;
    float* to = q + first / L * words * L + first % L;
    for (int k = 0; k < words; k += W) turn_block(from + k, to + k * L, words, L);
  }

  INLINE int oldest(int group) const { return position[group * L]; }
  INLINE int newest(int group) const { return position[std::min(lanes, (group + 1) * L) - 1]; }

  // The next unit that has anything to see; its tile is fetched and packed when it is the first of it. False: none is left.
  INLINE bool advance(Unit& unit, int turn) {
    for (;; next_group++) {
      if (next_group >= lane_groups) {
        if (next_start + kTile >= stop) return false;
        next_start += kTile;
        next_group = 0;
        fetch();
      }
      const KeyTile<N>& tile = tiles[slot];
      const int seen = std::min(tile.groups * kGroup, newest(next_group) + 1 - tile.start);
      const int first_seen = std::min(oldest(next_group), item.tree_start) - c.window + 1;
      const bool left_behind = c.window && tile.start + tile.groups * kGroup <= first_seen;
      if (seen <= 0 || left_behind) continue;
      unit.tile = &tile;
      unit.values = packed[slot];
      unit.weights = weights[turn % 2];
      unit.group = next_group++;
      unit.chunks = (seen + kChunk - 1) / kChunk;
      return true;
    }
  }

  void fetch() {
    slot = (slot + 1) % kSlots;
    KeyTile<N>& tile = tiles[slot];
    keys.begin(next_start, tile);
    for (int g = 0; g < tile.groups; g++) {
      const int first = next_start + g * kGroup;
      first < keys.first() ? keys.gather(tile, g, first) : keys.fetch_group(tile, g);  // what no lane sees is not read
      keys.prefetch(next_start, g);
    }
    if constexpr (N::kPerWord == 2) pack_values(tiles[slot], packed[slot]);
  }

  template <class Meanwhile>
  INLINE Meanwhile score(const Unit& unit, int chunk, float* to, Meanwhile meanwhile) {
    const float* queries = q + unit.group * words * L;
    const Element* const* k = unit.tile->k + 2 * chunk;
    if constexpr (N::kTiles) {
      return N::template scores<NV>(k, dim, queries, to, meanwhile);
    } else {
      for (int g = 0; g < 2; g++) {
        multiply<N, NV>((const int32_t*)k[g], words, 1, words, queries, to + g * kGroup * L, kGroup, false);
      }
    }
    return meanwhile;
  }

  static constexpr int kDims = 32;  // dims of outputs that are worked on together

  template <class Meanwhile>
  INLINE Meanwhile add_values(const Unit& unit, int d, Meanwhile meanwhile) {
    float* into = o + (unit.group * dim + d) * L;
    if constexpr (kByLanes) {
      return N::add_values_by_lanes(unit.values + d, dim, unit.chunks, unit.weights, o + d, meanwhile);
    } else if constexpr (N::kTiles) {
      return N::template add_values<NV>(unit.values + d * W, W * dim, unit.chunks, unit.weights, into, meanwhile);
    } else if constexpr (N::kPerWord == 2) {
      multiply<N, NV>((const int32_t*)unit.values + d, 1, dim, unit.chunks * kGroup, unit.weights, into, kDims, true);
    } else {
      for (int g = 0; g < 2 * unit.chunks; g++) {
        const float* some = unit.weights + g * kGroup * L;
        multiply<N, NV>((const int32_t*)unit.tile->v[g] + d, 1, dim, kGroup, some, into, kDims, true);
      }
    }
    return meanwhile;
  }

  // Scores of the unit into weights, between the values of the unit before and the scores of the next chunk.
  INLINE void soften(const Unit& before, Unit& unit, const Unit* after) {
    if (!begun[unit.group] || (c.window && c.batch_invariant && any_begins(unit))) begin(unit);
#pragma GCC unroll 2
    for (int v = 0; v < NV; v++) unit.sum[v] = vf{};
    const int num_parts = before.chunks ? dim / kDims : 0;
    int done = 0;
    for (int chunk = 0; chunk < unit.chunks; chunk++) {
      float* at_hand = scores[0];
      std::swap(scores[0], scores[1]);
      const bool last = chunk + 1 == unit.chunks;
      Weighing weighing(*this, unit, chunk, at_hand);
      if (!last || after) weighing = score(last ? *after : unit, last ? 0 : chunk + 1, scores[0], weighing);
      for (; done * unit.chunks < num_parts * (chunk + 1); done++) weighing = add_values(before, done * kDims, weighing);
      weighing.finish(unit);
    }
    bool beyond = false;
#pragma GCC unroll 2
    for (int v = 0; v < NV; v++) {
      float* total = sum + unit.group * L + v * W;
      const vf now = load(total) + unit.sum[v];
      beyond |= any(now > kLimit);
      unit.sum[v] = now;
    }
    if (beyond) return raise(unit);
#pragma GCC unroll 2
    for (int v = 0; v < NV; v++) store(sum + unit.group * L + v * W, unit.sum[v]);
  }

  // Whether lanes of a window that comes later have seen nothing yet.
  INLINE bool any_begins(const Unit& unit) const {
    bool found = false;
#pragma GCC unroll 2
    for (int v = 0; v < NV; v++) found |= any(load(maximum + unit.group * L + v * W) == kLowest);
    return found;
  }

  // The highest seen score of the group's first chunk is where the maxima begin of lanes that have none.
  INLINE void begin(const Unit& unit) {
    begun[unit.group] = true;
    std::memcpy(scores[2], scores[0], kChunk * L * 4);
    vf highest[NV];
#pragma GCC unroll 2
    for (int v = 0; v < NV; v++) highest[v] = fill(kLowest);
    raise_to(unit, 0, scores[2], highest);
#pragma GCC unroll 2
    for (int v = 0; v < NV; v++) {
      float* to = maximum + unit.group * L + v * W;
      store(to, load(to) == kLowest ? N::reference(highest[v]) : load(to));
    }
  }

  // Do a unit again with the true maxima of the lanes whose sums are beyond the limit: what was summed before becomes smaller.
  __attribute__((noinline)) void raise(Unit& unit) {
    const int first = unit.group * L;
    float* into = o + unit.group * dim * L;
    vf highest[NV];
    vi is_high[NV];
#pragma GCC unroll 2
    for (int v = 0; v < NV; v++) {
      highest[v] = load(maximum + first + v * W);
      is_high[v] = unit.sum[v] > kLimit;
      unit.sum[v] = vf{};
    }
    for (int chunk = 0; chunk < unit.chunks; chunk++) {
      score(unit, chunk, scores[2], Nothing{});
      raise_to(unit, chunk, scores[2], highest);
    }
    vf by[NV];
#pragma GCC unroll 2
    for (int v = 0; v < NV; v++) {
      const vf before = load(maximum + first + v * W);
      highest[v] = is_high[v] ? N::reference(highest[v]) : before;
      by[v] = is_high[v] ? exp2v<false>(before - highest[v]) : fill(1);
      store(maximum + first + v * W, highest[v]);
    }
    for (int d = 0; d < dim && !kByLanes; d++) {
#pragma GCC unroll 2
      for (int v = 0; v < NV; v++) store(into + d * L + v * W, load(into + d * L + v * W) * by[v]);
    }
    for (int at = 0; at < W * dim && kByLanes; at += W) store(o + at, load(o + at) * by[0][at / dim]);
    for (int chunk = 0; chunk < unit.chunks; chunk++) {
      score(unit, chunk, scores[2], Nothing{});
      Weighing(*this, unit, chunk, scores[2]).finish(unit);
    }
#pragma GCC unroll 2
    for (int v = 0; v < NV; v++) {
      float* total = sum + first + v * W;
      store(total, load(total) * by[v] + unit.sum[v]);
    }
  }

  INLINE float factor() const { return c.softcap != 0 ? 1.0f : c.scale * kLog2e; }

  INLINE bool is_masked(const Unit& unit, int chunk) const {
    const int start = unit.tile->start + chunk * kChunk, stop = start + kChunk;
    return stop - 1 > oldest(unit.group) || stop > item.key_last || stop > item.tree_start ||
           (c.window && start <= newest(unit.group) - c.window);
  }

  // Softcap and mask, where there are any.
  INLINE void prepare(const Unit& unit, int chunk, float* s) {
    if (c.softcap != 0) {
      for (int i = 0; i < kChunk * L; i += W) {
        store(s + i, tanhv(load(s + i) * (c.scale / c.softcap)) * (c.softcap * kLog2e));
      }
    }
    if (is_masked(unit, chunk)) mask(unit.tile->start + chunk * kChunk, unit.group * L, s);
  }

  INLINE void raise_to(const Unit& unit, int chunk, float* s, vf (&highest)[NV]) {
    prepare(unit, chunk, s);
    for (int k = 0; k < kChunk; k++) {
#pragma GCC unroll 2
      for (int v = 0; v < NV; v++) highest[v] = vmax(highest[v], load(s + k * L + v * W) * factor());
    }
  }

  // 2 to the power of a chunk's scores, stored as the second product takes them, and added to the unit's sums: some keys a step.
  struct Nothing {
    INLINE void step() {}
  };

  struct Weighing {
    static constexpr int kStep = 2;  // keys
    typename N::Weights first, second;  // of the lanes of the first vector, of the second; spelt out, for registers have no index
    vf first_sum, second_sum;
    const float *next, *end;
    float *to, *begin;

    INLINE Weighing(Tiles& of, const Unit& unit, int chunk, float* scores)
        : next(scores), end(scores + kChunk * L), to(unit.weights + chunk * kChunk / N::kPerWord * L), begin(to) {
      of.prepare(unit, chunk, scores);
      const float* maximum = of.maximum + unit.group * L;
      first.refer(of.factor(), load(maximum));
      second.refer(of.factor(), load(maximum + (NV - 1) * W));
      first_sum = unit.sum[0];
      second_sum = unit.sum[NV - 1];
    }

    INLINE void step() {
      if (next == end) return;
      first.template make<L>(next, to, first_sum);
      if constexpr (NV == 2) second.template make<L>(next + W, to + W, second_sum);
      next += kStep * L;
      to += kStep * L / N::kPerWord;
    }

    INLINE void finish(Unit& unit) {
      while (next != end) step();
      unit.sum[NV - 1] = second_sum;
      unit.sum[0] = first_sum;
      if constexpr (kByLanes) turn_block(begin, begin);
    }
  };

  void mask(int start, int first, float* scores) {
    if (start + kChunk > item.tree_start) hide_nodes(start, first, scores);
    const vf none = fill(-INFINITY);
#pragma GCC unroll 2
    for (int v = 0; v < NV; v++) {
      const vi at = load_as<vi>(position + first + v * W);
      const vi oldest = load_as<vi>(begins + first + v * W);
      const vi end = vi{} + (item.key_last - 1);
      const vi last = at < end ? at : end;
      for (int k = 0; k < kChunk; k++) {
        const vi key = vi{} + (start + k);
        float* s = scores + k * L + v * W;
        vf x = load(s);
        x = key > last ? none : x;
        x = key < oldest ? none : x;
        store(s, x);
      }
    }
  }

  // Scores of the nodes that are not on a lane's path.
  void hide_nodes(int start, int first, float* scores) {
    alignas(64) uint32_t seen[L];
    for (int i = 0; i < L; i++) seen[i] = first + i < lanes ? nodes_seen(c, item, first + i, start) : 0;
    const vf none = fill(-INFINITY);
    for (int k = 0; k < kChunk; k++) {
      for (int v = 0; v < NV; v++) {
        float* s = scores + k * L + v * W;
        store(s, (load_as<vi>(seen + v * W) >> k & 1) != 0 ? load(s) : none);
      }
    }
  }

  // Two keys' values side by side: [pair, DP] words, or for matrix tiles [16 pairs, 16 dims] turned over and one after another.
  void pack_values(const KeyTile<N>& tile, float* values) {
    constexpr bool kTurns = N::kTiles && !kByLanes;
#if FLASH_WIDTH == 16
    for (int g = 0; g < (tile.groups + 1) / 2 * 2; g++) {
      for (int i = 0; i < kGroup; i += 2) {
        const int pair = (g * kGroup + i) / 2;
        pack_pair(tile.v[g] + i * dim, kTurns ? rows + pair % W * dim : values + pair * dim);
      }
      if (kTurns && g % 2) turn(values + g / 2 * W * dim);
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
    for (int d = 0; d < dim; d += W) turn_block(rows + d, to + d * W, dim);
  }
#endif

  // W words of W rows, so many words apart, turned over.
  static INLINE void turn_block(const float* from, float* to, int from_row = W, int to_row = W) {
    vf block[W];
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) block[i] = load(from + i * from_row);
    transpose(block);
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) store(to + i * to_row, block[i]);
  }

  // Outputs of W lanes from `first` on, as rows.
  INLINE void finish(int first) {
    const float* from = o + first / L * dim * L + first % L;
    for (int d = 0; d < dim && !kByLanes; d += W) turn_block(from + d * L, rows + d, L, dim);
    float* turned = kByLanes ? o : rows;
    for (int i = 0; i < W && first + i < lanes; i++) {
      const Part part{maximum[first + i], sum[first + i], turned + i * dim};
      if (totals) {
        add_part(totals[first + i], part, dim);
      } else {
        emit(c, item, first + i, part.maximum, part.sum, part.values);
      }
    }
  }
};

template <class N>
void attend_tiles(const Call& c, const Item& item, const Item* next, float* scratch) {
  if (item.q_count * c.group <= W) return Tiles<N, 1>(c, item, next, scratch).run();
  Tiles<N, 2>(c, item, next, scratch).run();
}

}  // namespace
