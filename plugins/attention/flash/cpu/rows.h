// What both kernels do with rows: read queries and tiles of keys and values, write outputs, merge split rows.

#pragma once

#include "simd.h"

namespace {

using flash::Call;
using flash::Item;
using flash::Type;
using flash::kAhead;
using flash::kDotLanes;
using flash::kGroup;
using flash::kTile;

// How products are made. A word is what one lane holds: a float, or a pair of bf16 whose products are summed into a float.
struct Float {
  typedef float Element;
  static constexpr Type kType = Type::f32;
  static constexpr int kPerWord = 1;
  static constexpr bool kTiles = false;
  typedef vf Words;
  static INLINE Words broadcast(const void* p) { return fill(*(const float*)p); }
  static INLINE vf madd(vf acc, Words a, Words b) { return acc + a * b; }
};

#if FLASH_WIDTH == 16 && defined(__AVX512BF16__)
struct Bf16 {
  typedef uint16_t Element;
  static constexpr Type kType = Type::bf16;
  static constexpr int kPerWord = 2;
  static constexpr bool kTiles = false;
  typedef __m512i Words;
  static INLINE Words broadcast(const void* p) { return _mm512_set1_epi32(load_as<int32_t>(p)); }
  static INLINE vf madd(vf acc, Words a, Words b) { return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b); }

  // Lane by lane the pair (x, y).
  static INLINE void store_pairs(float* to, vf x, vf y) {
    typedef uint16_t Index __attribute__((vector_size(64)));
    const Index order = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                         8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    _mm512_storeu_si512(to, _mm512_permutexvar_epi16((__m512i)order, (__m512i)_mm512_cvtne2ps_pbh(y, x)));
  }
};
#endif

INLINE int64_t size_of(Type type) { return type == Type::f32 ? 4 : 2; }

// Hands out pieces of a thread's scratch memory, each on its own cache lines.
struct Scratch {
  float* next;
  template <class T>
  T* take(size_t count) {
    T* piece = (T*)next;
    next += (count * sizeof(T) + 63) / 64 * 16;
    return piece;
  }
};

// A row of `count` values (a multiple of 8) from memory of any type.
template <class N>
INLINE void read_row(typename N::Element* to, const void* from, Type type, int count, int padded) {
  const char* source = (const char*)from;
  if (type == N::kType) {
    std::memcpy(to, source, count * sizeof(typename N::Element));
  } else if constexpr (N::kType == Type::f32) {
    int i = 0;
    for (; i + W <= count; i += W) store(to + i, load(source, i, type));
    if (i < count) {
      uint16_t rest[W] = {};
      std::memcpy(rest, source + 2 * i, 2 * (count - i));
      store(to + i, load(rest, 0, type));
    }
  }
  std::memset(to + count, 0, (padded - count) * sizeof(typename N::Element));
}

INLINE void write_row(void* to, const float* from, float factor, Type type, int count) {
  int i = 0;
  for (; i + W <= count; i += W) store(to, i, load(from + i) * factor, type);
  if (i < count) {
    float rest[W];
    store(rest, 0, load(from + i) * factor, type);
    std::memcpy((char*)to + i * size_of(type), rest, (count - i) * size_of(type));
  }
}

INLINE const void* query(const Call& c, const Item& item, int lane) {
  const int64_t token = item.q_first + lane / c.group, head = item.kv_head * c.group + lane % c.group;
  return (const char*)c.q + (token * c.q_stride_t + head * c.q_stride_n) * size_of(c.type);
}

INLINE void* output(const Call& c, const Item& item, int lane) {
  const int64_t token = item.q_first + lane / c.group, head = item.kv_head * c.group + lane % c.group;
  return (char*)c.out + (token * c.out_stride_t + head * c.out_stride_n) * size_of(c.type);
}

// The keys and values of an item, a tile at a time: each group of 16 is read where it lies, or gathered when it crosses blocks,
// is not whole, or must be converted. Rows that are not the item's are zero then, so that no stranger's NaN gets in.
template <class N>
struct Keys {
  typedef typename N::Element Element;
  const Call& c;
  const Item& item;
  const Item* next;
  Element* gathered;
  int groups;  // of the tile at hand
  const Element* k[kTile / kGroup];
  const Element* v[kTile / kGroup];

  Keys(const Call& call, const Item& it, const Item* following, Scratch& scratch)
      : c(call), item(it), next(following), gathered(scratch.take<Element>(2 * kTile * call.padded_dim)) {}

  int first() const { return item.key_first / kGroup * kGroup; }

  INLINE const char* key_row(const Item& of, int position) const {
    const int32_t block = c.blocks[of.row * c.blocks_stride + position / c.block_size];
    const int64_t head = int64_t(block) * c.num_kv_heads + of.kv_head;
    return (const char*)c.kv + (head * 2 * c.block_size + position % c.block_size) * c.padded_dim * size_of(c.kv_type);
  }

  INLINE void fetch(int start) {
    const int stop = start + kTile < item.key_last ? start + kTile : item.key_last;
    groups = (stop - start + kGroup - 1) / kGroup;
    const int64_t values = int64_t(c.block_size) * c.padded_dim;
    for (int g = 0; g < groups; g++) {
      const int p = start + g * kGroup;
      const bool whole = p >= item.key_first && p + kGroup <= item.key_last;
      if (whole && c.kv_type == N::kType && p % c.block_size + kGroup <= c.block_size) {
        k[g] = (const Element*)key_row(item, p);
        v[g] = k[g] + values;
      } else {
        gather(g, p);
      }
    }
    if (N::kTiles && groups % 2) gather(groups++, item.key_last);
  }

  void gather(int g, int first_position) {
    Element* keys = gathered + g * kGroup * c.padded_dim;
    Element* values = keys + kTile * c.padded_dim;
    for (int i = 0; i < kGroup; i++) {
      const int p = first_position + i, offset = i * c.padded_dim;
      const bool ours = p >= item.key_first && p < item.key_last;
      const char* row = ours ? key_row(item, p) : nullptr;
      const int count = ours ? c.padded_dim : 0;
      read_row<N>(keys + offset, row, c.kv_type, count, c.padded_dim);
      if (ours) row += int64_t(c.block_size) * c.padded_dim * size_of(c.kv_type);
      read_row<N>(values + offset, row, c.kv_type, count, c.padded_dim);
    }
    k[g] = keys;
    v[g] = values;
  }

  // Ask for the keys and values that lie kAhead after group g of the tile at hand, in the next item when this one ends before:
  // memory answers in the time that some groups take.
  INLINE void prefetch(int start, int g) const {
    constexpr int kIntoL2 = 2;  // measured: a tile's worth of requests is too much for the first level
    int p = start + kAhead + g * kGroup;
    const Item* of = &item;
    if (p >= item.key_last) {
      if (!next) return;
      p = next->key_first + (p - item.key_last) / kGroup * kGroup;
      if (p >= next->key_last) return;
      of = next;
    }
    const int64_t bytes = c.padded_dim * size_of(c.kv_type), values = c.block_size * bytes;
    const char* row = key_row(*of, p);
    for (int64_t i = 0; i < kGroup * bytes; i += 64) {
      __builtin_prefetch(row + i, 0, kIntoL2);
      __builtin_prefetch(row + values + i, 0, kIntoL2);
    }
  }
};

// Where a lane's result goes: divided and out, or, of a split row, among the partials.
INLINE void emit(const Call& c, const Item& item, int lane, float maximum, float sum, const float* values) {
  if (item.num_splits == 1) return write_row(output(c, item, lane), values, 1.0f / sum, c.type, c.dim);
  const int64_t lanes = item.q_count * c.group;
  float* part = c.partials + (item.partial + item.split * lanes + lane) * (c.padded_dim + 2);
  part[0] = maximum;
  part[1] = sum;
  std::memcpy(part + 2, values, c.padded_dim * 4);
}

// To be called when all lanes are emitted: the last split to arrive merges all of them, in the order of the keys.
INLINE void arrive(const Call& c, const Item& item, float* total) {
  if (item.num_splits == 1) return;
  int32_t* counter = c.arrived + item.counter;
  if (__atomic_add_fetch(counter, 1, __ATOMIC_ACQ_REL) != item.num_splits) return;
  *counter = 0;  // for the next layer
  const int lanes = item.q_count * c.group;
  const int64_t stride = c.padded_dim + 2;
  for (int lane = 0; lane < lanes; lane++) {
    const float* parts = c.partials + (item.partial + lane) * stride;
    float maximum = kLowest, sum = 0;
    for (int s = 0; s < item.num_splits; s++) maximum = std::max(maximum, parts[s * lanes * stride]);
    std::memset(total, 0, c.padded_dim * 4);
    for (int s = 0; s < item.num_splits; s++) {
      const float* part = parts + s * lanes * stride;
      const float weight = exp2v<false>(fill(part[0] - maximum))[0];
      sum += weight * part[1];
      for (int d = 0; d < c.padded_dim; d += W) store(total + d, load(total + d) + load(part + 2 + d) * weight);
    }
    write_row(output(c, item, lane), total, 1.0f / sum, c.type, c.dim);
  }
}

}  // namespace
