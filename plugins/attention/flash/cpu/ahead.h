// What is asked of memory before it is needed.

#pragma once

#include "simd.h"
#include "watch.h"

namespace {

using flash::may_ask;

// Keys, values and scales of a group, to be asked for.
struct Ahead {
  const char *keys = nullptr, *values = nullptr;  // null: nothing is asked for
  const char* scales = nullptr;                   // null: there are none behind a block's values
  int bytes = 0, scale_bytes = 0;

  static constexpr int kAll = 16;  // parts

  // The parts from `begin` to `end` of it.
  INLINE void ask(int begin, int end) const {
    constexpr int kIntoL2 = 2;  // measured: a tile's worth of requests is too much for the first level
    if (!keys) return;
    if (scales && begin == 0 && may_ask(scales, 0, scale_bytes + 2)) {
      __builtin_prefetch(scales, 0, kIntoL2);
      __builtin_prefetch(scales + scale_bytes, 0, kIntoL2);
    }
    const int from = bytes * begin / kAll / 64 * 64, to = bytes * end / kAll / 64 * 64;
    if (!may_ask(keys, from, to) || !may_ask(values, from, to)) return;
    for (int i = from; i < to; i += 64) {
      __builtin_prefetch(keys + i, 0, kIntoL2);
      __builtin_prefetch(values + i, 0, kIntoL2);
    }
  }
};

}  // namespace
