// Which keys the query vectors of an item see.

#pragma once

#include "rows.h"

namespace {

// Lanes in groups of NV vectors, keys in chunks of so many.
template <int NV, int kChunk>
struct Masks {
  static constexpr int L = NV * W;
  const Call& c;
  const Item& item;
  const int lanes, lane_groups;
  int32_t* position;  // [lane group, L]
  int32_t* begins;    // [lane group, L] the first key by the window, where there is one

  Masks(const Call& call, const Item& it, Scratch& scratch)
      : c(call), item(it), lanes(it.q_count * c.group), lane_groups((lanes + L - 1) / L),
        position(scratch.take<int32_t>(lane_groups * L)), begins(scratch.take<int32_t>(lane_groups * L)) {
    for (int lane = 0; lane < lane_groups * L; lane++) {
      position[lane] = position_of(c, item, lane);
      begins[lane] = c.window ? window_begin(c, item, std::min(lane, lanes - 1)) : 0;
    }
  }

  INLINE int oldest(int group) const { return position[group * L]; }
  INLINE int newest(int group) const { return position[std::min(lanes, (group + 1) * L) - 1]; }

  // Whether the group sees none of the keys before `stop`, for its window begins behind them.
  INLINE bool left_behind(int group, int stop) const {
    return c.window && stop <= std::min(oldest(group), item.tree_start) - c.window + 1;
  }

  // Whether some lane of the group does not see some key of the chunk.
  INLINE bool hides(int group, int start) const {
    const int stop = start + kChunk;
    return stop - 1 > oldest(group) || stop > item.key_last || stop > item.tree_start ||
           (c.window && start <= newest(group) - c.window);
  }

  // The scores [kChunk, L] of what the lanes do not see become minus infinity.
  void apply(int group, int start, float* scores) const {
    const int first = group * L;
    if (start + kChunk > item.tree_start) hide_nodes(first, start, scores);
    const vf none = fill(-INFINITY);
#pragma GCC unroll 2
    for (int v = 0; v < NV; v++) {
      const vi at = load_as<vi>(position + first + v * W);
      const vi begin = load_as<vi>(begins + first + v * W);
      const vi end = vi{} + (item.key_last - 1);
      const vi last = at < end ? at : end;
      for (int k = 0; k < kChunk; k++) {
        const vi key = vi{} + (start + k);
        float* s = scores + k * L + v * W;
        vf x = load(s);
        x = key > last ? none : x;
        x = key < begin ? none : x;
        store(s, x);
      }
    }
  }

  // Scores of the nodes that are not on a lane's path.
  void hide_nodes(int first, int start, float* scores) const {
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
};

}  // namespace
