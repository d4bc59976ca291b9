// A step cut into work items: see plan.cpp.

#pragma once

#include <ATen/ATen.h>

#include "flash.h"

namespace flash {

// A plan is one buffer of 32 bit words: this, the items, the shared tokens, counters of splits that are done, the partials.
struct Plan {
  int32_t num_items, num_shared, num_counters, num_tokens, window, isa;
  float scale, softcap;
  int32_t threads;

  Item* items() { return (Item*)(this + 1); }
  SharedToken* shared() { return (SharedToken*)(items() + num_items); }
  int32_t* arrived() { return (int32_t*)(shared() + num_shared); }
  float* partials() { return (float*)(arrived() + num_counters); }
};

inline int64_t padded_dim(int64_t dim) { return (dim + 31) / 32 * 32; }

constexpr int64_t kCascadeAuto = -1, kCascadeNever = 0;

// Cuts a step into items, the dearest first.
//
// q_start [R + 1], ctx_len [R] and blocks [R, M] int32. num_splits: what the keys of a row are cut into, 0: as the threads need.
// cascade: keys that rows share are attended to once for all of them where it pays, never, or where they are so many.
at::Tensor plan(const at::Tensor& q_start, const at::Tensor& ctx_len, const at::Tensor& blocks, int64_t kv_heads, int64_t group,
                int64_t dim, int64_t block_size, double scale, double softcap, int64_t window, int64_t num_splits,
                int64_t cascade, int64_t isa);

}  // namespace flash
