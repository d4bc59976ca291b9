// A step cut into work items: see plan.cpp.

#pragma once

#include <functional>

#include "flash.h"

namespace flash {

// A plan is one buffer of 32 bit words: this, the items, the shared tokens, counters of splits that are done, the paths of all
// tokens in trees of drafts (num_paths of them), the partials.
struct Plan {
  int32_t num_items, num_shared, num_counters, num_tokens, window, isa;
  float scale, softcap;
  int32_t threads, run, has_sinks, num_paths, batch_invariant;  // run: items that a thread takes at once

  Item* items() { return (Item*)(this + 1); }
  SharedToken* shared() { return (SharedToken*)(items() + num_items); }
  int32_t* arrived() { return (int32_t*)(shared() + num_shared); }
  int32_t* ancestors() { return arrived() + num_counters; }
  float* partials() { return (float*)(ancestors() + 2 * num_paths); }
};

inline int64_t padded_dim(int64_t dim) { return (dim + 31) / 32 * 32; }

constexpr int64_t kCascadeAuto = -1, kCascadeNever = 0;

// The rows of a step: q_start [R + 1], ctx_len [R], blocks [R, blocks_stride]. With trees of drafts, else null: tree_start [R], the
// slot of each row's first node, or ctx_len; ancestors [T].
struct StepRows {
  const int32_t *q_start, *ctx_len, *blocks;
  int64_t num_rows, blocks_stride;
  const int32_t* tree_start;
  const int64_t* ancestors;
};

// num_splits: what the keys of a row are cut into, 0: as the threads need. cascade: keys that rows share are attended to once for
// all of them where it pays, never, or where they are so many. batch_invariant: a token gets the same bits in any step and item.
// All are served by tiles, which begin at multiples of kTile; each kInvariantPiece keys are added up by themselves, and then the
// pieces in their order, be they of one item or of several.
struct How {
  int64_t kv_heads, group, dim, block_size;
  float scale, softcap;
  int64_t window, num_splits, cascade, isa, threads;
  bool batch_invariant, has_sinks;
};

// Cuts a step into items, in the order in which lab/team.h gives them to threads, in memory of so many bytes as it asks for.
void plan(const StepRows& step, const How& how, const std::function<void*(int64_t)>& allocate);

}  // namespace flash
