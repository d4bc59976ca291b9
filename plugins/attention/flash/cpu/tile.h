// Many query vectors (prefill, chunks, drafts, one KV head for many): tiles of scores as matrix products.
//
// Everything is transposed: a column of registers' lanes is a query vector. Scores[key][lane] = keys x queries needs no packing of
// the keys, whose elements are broadcast from the cache; maxima and sums run down the lanes without crossing them; and
// outputs[dim][lane] = values x weights takes the weights as they were made. Queries are packed once for all tiles.

#pragma once

#include "masks.h"
#include "multiply.h"
#include "packing.h"

namespace {

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
  const int dim, words;  // words: of a head dim
  Scratch scratch;
  const Masks<NV, kChunk> masks;
  const int lanes, lane_groups;
  Keys<N, true> keys;
  KeyTile<N> tiles[kSlots];
  float* packed[kSlots];
  int slot = 0, next_start, next_group, stop;  // stop: keys before it are at hand
  float* q;          // [lane group, words, L] packed
  float* o;          // [lane group, DP, L], or [L, DP]
  float* maximum;    // [lane group, L]; a reference that no seen score exceeds by far, once there is one
  float* sum;        // [lane group, L]
  float* scores[3];  // [kChunk, L]; the last one is for units that are done again
  float* weights[2];
  float* rows;       // [W, DP]
  Element* elements; // [W, DP]
  bool* begun;       // [lane group]
  Part* totals = nullptr;  // [lane] of the pieces before, where keys are attended to in several

  Tiles(const Call& call, const Item& it, const Item* next, float* memory)
      : c(call), item(it), dim(c.padded_dim), words(dim / N::kPerWord), scratch{memory}, masks(c, item, scratch),
        lanes(masks.lanes), lane_groups(masks.lane_groups), keys{call, it, next} {
    q = scratch.take<float>(lane_groups * words * L);
    o = scratch.take<float>(lane_groups * dim * L);
    maximum = scratch.take<float>(lane_groups * L);
    sum = scratch.take<float>(lane_groups * L);
    begun = scratch.take<bool>(lane_groups);
    for (float*& piece : scores) piece = scratch.take<float>(kChunk * L);
    for (float*& piece : weights) piece = scratch.take<float>(kTile / N::kPerWord * L);
    for (float*& piece : packed) piece = scratch.take<float>(N::kPerWord == 2 ? kTile / 2 * dim : 0);
    for (KeyTile<N>& tile : tiles) tile.gathered = scratch.take<Element>(2 * kTile * dim);
    rows = scratch.take<float>(W * dim);
    elements = scratch.take<Element>(W * dim);
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
      const int seen = std::min(tile.groups * kGroup, masks.newest(next_group) + 1 - tile.start);
      if (seen <= 0 || masks.left_behind(next_group, tile.start + tile.groups * kGroup)) continue;
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
    if constexpr (N::kPerWord == 2) pack_values<N::kTiles && !kByLanes>(tile, dim, rows, packed[slot]);
  }

  template <class Meanwhile>
  INLINE Meanwhile score(const Unit& unit, int chunk, float* to, Meanwhile meanwhile) {
    const float* queries = q + unit.group * words * L;
    const Element* const* k = unit.tile->k + 2 * chunk;
    if constexpr (N::kTiles) {
      return N::template scores<NV>(k, dim, queries, to, meanwhile);
    } else {
      for (int g = 0; g < 2; g++) {
        multiply<N, NV>(k + g, 1, 0, words, 1, words, queries, to + g * kGroup * L, kGroup, false);
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
      const Element* values = (const Element*)unit.values;
      multiply<N, NV>(&values, 1, d, 1, dim, unit.chunks * kGroup, unit.weights, into, kDims, true);
    } else {
      multiply<N, NV>(unit.tile->v, 2 * unit.chunks, d, 1, dim, kGroup, unit.weights, into, kDims, true);
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

  // Softcap and mask, where there are any.
  INLINE void prepare(const Unit& unit, int chunk, float* s) {
    if (c.softcap != 0) {
      for (int i = 0; i < kChunk * L; i += W) {
        store(s + i, tanhv(load(s + i) * (c.scale / c.softcap)) * (c.softcap * kLog2e));
      }
    }
    const int start = unit.tile->start + chunk * kChunk;
    if (masks.hides(unit.group, start)) masks.apply(unit.group, start, s);
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
