// What the parts of the CPU kernels share: one call's arguments, its work items, and the table of an instruction set.
//
// The cache of a layer is kv[P, K, 2, B, DP]: for each block and KV head its keys, then its values, one piece of memory. DP is
// the head dim rounded up to 32; the rest of each row is zero. quantized.h says how it is with quantized caches.

#pragma once

#include <cstddef>
#include <cstdint>

#include "watch.h"

#if defined(__AVX512F__) && defined(__AVX512DQ__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define FLASH_HAS_AVX512
#endif

namespace flash {

enum class Type : int { f32, bf16, f16, i8, fp8 };

constexpr int kTile = 128;        // keys of one tile of the online softmax
constexpr int kGroup = 16;       // keys that are read through one base pointer
constexpr int kAhead = 128;      // keys between what is worked on and what memory is asked for
constexpr int kDotLanes = 8;     // up to so many query vectors of a KV head are served by dot products, more by tiles
constexpr int kMaxDim = 256;
constexpr int32_t kNoTree = INT32_MAX;
constexpr int kInvariantPiece = 512;  // keys, of a batch-invariant step; whole tiles
constexpr int kMaxLanes = 768;   // query vectors of one item: tokens times the query heads of a KV head

// A token whose keys are in part attended to together with those of other rows. Tokens of a row that are merged together, a
// unit, stand one after another. Its partials are [KV head, split, lane].
struct SharedToken {
  int32_t token;         // of the step
  int32_t partial;       // index of its first lane among the partials: of KV head 0, split 0
  int32_t lanes, splits; // of its unit
  int32_t counter;       // of its unit, for KV head 0
};

struct Call {
  const void* q;       // [T, N, D], the last dim dense
  void* out;           // [T, N, D], the last dim dense
  const void* kv;      // [P, K, 2, B, DP]
  const int32_t* blocks;  // [R, M]
  int64_t q_stride_t, q_stride_n, out_stride_t, out_stride_n, blocks_stride;
  float* lse;          // [T, N] natural logsumexp of the scores; null where nobody asks for it
  int64_t lse_stride_t;
  const SharedToken* shared;  // tokens of the items that serve several rows
  const int32_t* ancestors;  // [T, 2] the path of each token in its row's tree of drafts, 64 bits; null where there are no trees
  float* partials;     // of split rows: for each lane its maximum, its sum, and DP unnormalised outputs
  int32_t* arrived;    // splits of a row and KV head that are done
  Type type, kv_type;  // of q and out; of the cache
  int num_kv_heads, group, dim, padded_dim, block_size;
  int window;          // a token sees so many keys, itself included; 0: all
  float scale, softcap;  // softcap 0: none
  int64_t head_bytes;    // of the cache, for one block and KV head
  const float* fixed_scales;  // [2, K] of a quantized cache; null: they lie with each block
  const float* sinks;  // [N] scores that no key stands behind; null: none
  bool batch_invariant;  // see plan.h

  bool is_quantized() const { return kv_type == Type::i8 || kv_type == Type::fp8; }
  // Whether these query vectors are served by dot products or the like, whose sums are others than those of tiles.
  bool has_few(int lanes) const { return lanes <= kDotLanes && !batch_invariant; }
  // Whether products are of bf16, where the processor makes them: what is quantized is exact in it.
  bool has_bf16_products() const { return type == Type::bf16 && (kv_type == Type::bf16 || is_quantized()); }
};

// One piece of work: some tokens, one KV head with its group of query heads, a range of keys. A lane is one query vector;
// lane = token * group + head. The tokens are one row's, or of several rows that begin with the same blocks, for keys that all of
// them see.
struct Item {
  int32_t row, kv_head;          // whose block table is read
  int32_t q_first, q_count;      // tokens of the step; `shared` ones if they are of several rows
  int32_t is_shared;
  int32_t position;              // of the first token; shared ones count as being all at the one behind the last key
  int32_t key_first, key_last;   // keys to read: [key_first, key_last)
  int32_t split, num_splits;     // of shared tokens each unit knows its number; it is above 1
  int32_t partial;               // index of split 0's first lane among the partials; not of shared tokens
  int32_t counter;               // index into `arrived`; not of shared tokens
  int32_t cost;
  int32_t tree_start;            // keys from it on are nodes of the row's tree of drafts, seen by paths; kNoTree: there is none
};

// Floats of scratch memory that one thread may need; what is not touched costs nothing.
constexpr size_t kScratchFloats =
    size_t(kMaxLanes) * kMaxDim * 2       // packed queries and outputs
    + size_t(kTile) * kMaxDim * 2 * 3     // gathered keys and values of three tiles
    + size_t(kTile) * kMaxDim / 2 * 3     // packed values of three tiles
    + size_t(kTile) * 32 * 3 + 32 * 32 * 3  // weights and scores of a lane group
    + size_t(16) * kMaxDim * 2            // rows on their way in and out
    + size_t(kMaxLanes) * 5 + 4096;

#ifdef FLASH_WATCHED
inline void before_item(float* scratch) { forget(scratch, kScratchFloats); }
#else
inline void before_item(float*) {}
#endif

struct Kernels {
  const char* name;
  // So many items. `next` is likely to be what this thread is given after them; null when nothing is.
  void (*attend)(const Call&, const Item* items, int64_t count, const Item* next, float* scratch);
};

// Kernels that have nothing to prepare for several items.
template <void (*kAttend)(const Call&, const Item&, const Item* next, float* scratch)>
void attend_each(const Call& c, const Item* items, int64_t count, const Item* next, float* scratch) {
  for (int64_t i = 0; i < count; i++) {
    before_item(scratch);
    kAttend(c, items[i], i + 1 < count ? items + i + 1 : next, scratch);
  }
}

// Null where the compiler or its flags have no such instructions, and where faster ones serve as well: then they are built only
// with FLASH_EVERY_ISA.
const Kernels* portable_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();
const Kernels* avx512_bf16_kernels();
const Kernels* avx512_mixed_kernels();
const Kernels* amx_kernels();

}  // namespace flash
