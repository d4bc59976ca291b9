// What both kernels do with rows: read queries and tiles of keys and values, write outputs, merge split rows.

#pragma once

#include "ahead.h"
#include "products.h"

namespace {

using flash::Call;
using flash::Item;
using flash::kAhead;
using flash::kDotLanes;
using flash::kGroup;
using flash::kInvariantPiece;
using flash::kMaxDim;
using flash::kTile;

INLINE int64_t size_of(Type type) { return type == Type::f32 ? 4 : type == Type::i8 || type == Type::fp8 ? 1 : 2; }

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

// The token of the step that a lane belongs to.
INLINE int64_t token_of(const Call& c, const Item& item, int lane) {
  const int64_t at = item.q_first + lane / c.group;
  return item.is_shared ? c.shared[at].token : at;
}

INLINE int position_of(const Call& c, const Item& item, int lane) {
  return item.is_shared ? item.position : item.position + lane / c.group;
}

// The path of a lane's token in its row's tree of drafts: bit i is node i, its own included.
INLINE uint64_t path_of(const Call& c, const Item& item, int lane) {
  return load_as<uint64_t>(c.ancestors + 2 * token_of(c, item, lane));
}

// The first key that a lane sees by its window. The position in the text of a tree's node goes by its depth.
INLINE int window_begin(const Call& c, const Item& item, int lane) {
  int position = position_of(c, item, lane);
  if (position >= item.tree_start) position = item.tree_start - 1 + __builtin_popcountll(path_of(c, item, lane));
  return position - c.window + 1;
}

// Which of the 32 keys from `start` on a lane sees, as far as its row's tree of drafts says: bit k is key start + k.
INLINE uint32_t nodes_seen(const Call& c, const Item& item, int lane, int start) {
  const int before = item.tree_start - start;  // keys that are no nodes
  if (before >= 32) return ~0u;
  const uint64_t path = path_of(c, item, lane);
  if (before > 0) return uint32_t(path << before) | ((1u << before) - 1);
  return before > -64 ? uint32_t(path >> -before) : 0;
}

INLINE const void* query(const Call& c, const Item& item, int lane) {
  const int64_t token = token_of(c, item, lane), head = item.kv_head * c.group + lane % c.group;
  return (const char*)c.q + (token * c.q_stride_t + head * c.q_stride_n) * size_of(c.type);
}

// The keys and values of up to kTile positions, in groups of 16.
template <class N>
struct KeyTile {
  typedef typename N::Element Element;
  Element* gathered;  // [2, kTile, DP]
  int start, groups;
  int kept = kTile / kGroup;  // groups whose gathered keys are kept: those of later ones take their place
  const Element* k[kTile / kGroup];
  const Element* v[kTile / kGroup];
  const int8_t* stored_v[kTile / kGroup];  // values that Keys::values has yet to widen; null: there are none
  float k_scale[kTile], v_scale[kTile];  // of a quantized cache
};

// The keys and values of an item, a tile at a time: each group is read where it lies, or gathered when it crosses blocks or must
// be converted. Of a group that is not whole the values are always gathered: a weight of zero does not take away a stranger's
// NaN. Keys past the end may be anything: their scores are masked. Quantized ones are gathered, times their scales if `kScaled`.
// `kLate`: values of whole groups are widened when they are asked for, so that what waits for it stays in the first-level cache.
template <class N, bool kScaled, bool kLate = false>
struct Keys {
  typedef typename N::Element Element;
  const Call& c;
  const Item& item;
  const Item* next;

  const int shift = c.block_size & (c.block_size - 1) ? -1 : __builtin_ctz(c.block_size);  // divisions are slow

  int first() const { return item.key_first / kGroup * kGroup; }
  INLINE int block_of(int position) const { return shift >= 0 ? position >> shift : position / c.block_size; }
  INLINE int offset_of(int position) const { return shift >= 0 ? position & (c.block_size - 1) : position % c.block_size; }

  // The block's keys, values and scales of the item's KV head.
  INLINE const char* head_of(const Item& of, int position) const {
    const int32_t block = c.blocks[of.row * c.blocks_stride + block_of(position)];
    return (const char*)c.kv + (int64_t(block) * c.num_kv_heads + of.kv_head) * c.head_bytes;
  }

  INLINE const char* key_row(const Item& of, int position) const {
    return head_of(of, position) + offset_of(position) * c.padded_dim * size_of(c.kv_type);
  }

  INLINE void fetch(int start, KeyTile<N>& tile) const {
    begin(start, tile);
    for (int g = 0; g < tile.groups; g++) fetch_group(tile, g);
  }

  INLINE void aim(int start, KeyTile<N>& tile) const {
    const int stop = start + kTile < item.key_last ? start + kTile : item.key_last;
    tile.start = start;
    tile.groups = (stop - start + kGroup - 1) / kGroup;
  }

  INLINE void begin(int start, KeyTile<N>& tile) const {
    aim(start, tile);
    if (tile.groups % 2) {  // scores are made of two groups
      const int g = tile.groups;
      tile.k[g] = tile.gathered + g * kGroup * c.padded_dim;
      tile.v[g] = values_of(tile, g);
      std::memset(tile.gathered + g * kGroup * c.padded_dim, 0, kGroup * c.padded_dim * sizeof(Element));
      std::memset(values_of(tile, g), 0, kGroup * c.padded_dim * sizeof(Element));
    }
  }

  INLINE void fetch_group(KeyTile<N>& tile, int g) const {
    tile.stored_v[g] = nullptr;
    const int p = tile.start + g * kGroup;
    const bool whole = p >= item.key_first && p + kGroup <= item.key_last;
    const bool in_one_block = offset_of(p) + kGroup <= c.block_size;
    if (c.kv_type == N::kType && in_one_block) {
      tile.k[g] = (const Element*)key_row(item, p);
      tile.v[g] = tile.k[g] + int64_t(c.block_size) * c.padded_dim;
      if (!whole) tile.v[g] = gather_some(tile, g, p);
    } else if (c.is_quantized()) {
      const bool as_one = !kScaled && whole && in_one_block;
      c.kv_type == Type::i8 ? widen<Type::i8>(tile, g, p, as_one) : widen<Type::fp8>(tile, g, p, as_one);
    } else {
      gather(tile, g, p);
    }
  }

  INLINE Element* keys_of(KeyTile<N>& tile, int g) const { return tile.gathered + g % tile.kept * kGroup * c.padded_dim; }
  INLINE Element* values_of(KeyTile<N>& tile, int g) const { return tile.gathered + (kTile + g * kGroup) * c.padded_dim; }

  // Of a fetched group, widened into the place of group `place` if need be.
  INLINE const Element* values(KeyTile<N>& tile, int g, int place) const {
    if (!kLate || !tile.stored_v[g]) return tile.v[g];
    Element* to = values_of(tile, place);
    const int8_t* from = tile.stored_v[g];
    const int count = kGroup * c.padded_dim;
    c.kv_type == Type::i8 ? N::template widen<Type::i8>(from, to, count) : N::template widen<Type::fp8>(from, to, count);
    return to;
  }

  // The item's values of a group that lies in one block, zero elsewhere.
  INLINE const Element* gather_some(KeyTile<N>& tile, int g, int first_position) const {
    constexpr int kWide = 64 / sizeof(Element);  // DP is a multiple of 32
    typedef Element Wide __attribute__((vector_size(64)));
    Element* values = values_of(tile, g);
    for (int i = 0; i < kGroup; i++) {
      const bool ours = first_position + i >= item.key_first && first_position + i < item.key_last;
      for (int d = i * c.padded_dim; d < (i + 1) * c.padded_dim; d += kWide) {
        const Wide x = ours ? load_as<Wide>(tile.v[g] + d) : Wide{};
        std::memcpy(values + d, &x, sizeof x);
      }
    }
    return values;
  }

  void gather(KeyTile<N>& tile, int g, int first_position) const {
    Element *keys = keys_of(tile, g), *values = values_of(tile, g);
    for (int i = 0; i < kGroup; i++) {
      const int p = first_position + i, offset = i * c.padded_dim;
      const bool ours = p >= item.key_first && p < item.key_last;
      const char* row = ours ? key_row(item, p) : nullptr;
      const int count = ours ? c.padded_dim : 0;
      read_row<N>(keys + offset, row, c.kv_type, count, c.padded_dim);
      if (ours) row += int64_t(c.block_size) * c.padded_dim * size_of(c.kv_type);
      read_row<N>(values + offset, row, c.kv_type, count, c.padded_dim);
    }
    tile.k[g] = keys;
    tile.v[g] = values;
  }

  // A group of a quantized cache: rows as elements, and their scales. A stranger's are zero. `as_one`: it lies in one block.
  template <Type kFrom>
  void widen(KeyTile<N>& tile, int g, int first_position, bool as_one) const {
    const int dim = c.padded_dim, values = c.block_size * dim;
    Element *k = keys_of(tile, g), *v = values_of(tile, g);
    tile.k[g] = k;
    tile.v[g] = v;
    if (as_one) {
      const char* head = head_of(item, first_position);
      const int offset = first_position % c.block_size;
      read_scales_of_group<kFrom>(tile, g * kGroup, head, offset);
      const int8_t* rows = (const int8_t*)head + offset * dim;
      N::template widen<kFrom>(rows, k, kGroup * dim);
      if (!kLate) return N::template widen<kFrom>(rows + values, v, kGroup * dim);
      tile.stored_v[g] = rows + values;
      return;
    }
    const char* head = nullptr;
    int offset = 0;
    for (int i = 0; i < kGroup; i++, offset++, k += dim, v += dim) {
      const int p = first_position + i, at = g * kGroup + i;
      if (p < item.key_first || p >= item.key_last) {
        tile.k_scale[at] = tile.v_scale[at] = 0;
        std::memset(k, 0, dim * sizeof(Element));
        std::memset(v, 0, dim * sizeof(Element));
        continue;
      }
      if (!head || offset == c.block_size) {
        head = head_of(item, p);
        offset = p % c.block_size;
      }
      read_scales<kFrom>(tile, at, head, offset);
      const int8_t* row = (const int8_t*)head + offset * dim;
      widen_row<kFrom>(row, k, tile.k_scale[at]);
      widen_row<kFrom>(row + values, v, tile.v_scale[at]);
    }
  }

  template <Type kFrom, class Scaled>
  INLINE void read_scales_of_group(Scaled& tile, int at, const char* head, int offset) const {
    const uint16_t* scales = (const uint16_t*)(head + 2 * c.block_size * c.padded_dim) + offset;
    for (int i = 0; i < kGroup; i += W) {
      const vf k = c.fixed_scales ? fill(c.fixed_scales[item.kv_head]) : load_bf16(scales + i);
      const vf v = c.fixed_scales ? fill(c.fixed_scales[c.num_kv_heads + item.kv_head]) : load_bf16(scales + c.block_size + i);
      store(tile.k_scale + at + i, k * unit_of(kFrom));
      store(tile.v_scale + at + i, v * unit_of(kFrom));
    }
  }

  template <Type kFrom, class Scaled>
  INLINE void read_scales(Scaled& tile, int at, const char* head, int offset) const {
    float k, v;
    if (c.fixed_scales) {
      k = c.fixed_scales[item.kv_head];
      v = c.fixed_scales[c.num_kv_heads + item.kv_head];
    } else {
      const uint16_t* scales = (const uint16_t*)(head + 2 * c.block_size * c.padded_dim);
      k = from_bf16(scales[offset]);
      v = from_bf16(scales[c.block_size + offset]);
    }
    tile.k_scale[at] = k * unit_of(kFrom);
    tile.v_scale[at] = v * unit_of(kFrom);
  }

  template <Type kFrom>
  INLINE void widen_row(const int8_t* from, Element* to, float scale) const {
    for (int d = 0; d < c.padded_dim; d += W) {
      const vf x = load(from, d, kFrom);
      store(to, d, kScaled ? x * scale : x, N::kType);
    }
  }

  // What lies kAhead after group g of the tile at hand, in the next item when this one ends before: memory answers in the time
  // that some groups take. An item that is shorter than that asks for the next one's, group by group. Of a group that crosses
  // blocks it is what lies in the first that is the item's.
  INLINE Ahead ahead(int start, int g) const {
    const int end = (item.key_last + kGroup - 1) / kGroup * kGroup;
    int p = start + g * kGroup + std::min(kAhead, end - first());
    const Item* of = &item;
    if (p >= end) {
      if (!next) return {};
      p = std::max(next->key_first, next->key_first / kGroup * kGroup + p - end);
      if (p >= next->key_last) return {};
      of = next;
    }
    const int offset = offset_of(p), rows = std::min(kGroup, c.block_size - offset);
    const int64_t bytes = c.padded_dim * size_of(c.kv_type), values = c.block_size * bytes;
    const char *head = head_of(*of, p), *row = head + offset * bytes;
    const char* scales = c.is_quantized() && !c.fixed_scales ? head + 2 * (values + offset) : nullptr;
    return {row, row + values, scales, int(rows * bytes), int(2 * c.block_size)};
  }

  INLINE void prefetch(int start, int g) const { ahead(start, g).ask(0, Ahead::kAll); }
};

// The result of one query vector: its values over the sum of their weights, and what the weights sum up to. A sink is one weight
// more, of no value.
__attribute__((noinline)) void finish_lane(const Call& c, int64_t token, int64_t head, float maximum, float sum,
                                           const float* values) {
  float factor = 1;
  if (c.sinks) {
    const float sink = c.sinks[head] * kLog2e, highest = std::max(maximum, sink);
    factor = exp2v<false>(fill(maximum - highest))[0];
    sum = sum * factor + exp2v<false>(fill(sink - highest))[0];
    maximum = highest;
  }
  void* to = (char*)c.out + (token * c.out_stride_t + head * c.out_stride_n) * size_of(c.type);
  write_row(to, values, factor / sum, c.type, c.dim);
  if (c.lse) c.lse[token * c.lse_stride_t + head] = (maximum + std::log2(sum)) * (1 / kLog2e);
}

// Unpacking pairs of bf16 works within 128 bits: of 32 outputs the first half are the first four of every eight dims.
INLINE void restore_order(float* row, int dim) {
#if FLASH_WIDTH == 16
  for (int d = 0; d < dim; d += 2 * W) {
    const vf a = load(row + d), b = load(row + d + W);
    store(row + d, __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23));
    store(row + d + W, __builtin_shufflevector(a, b, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31));
  }
#endif
}

INLINE float* part_of(const Call& c, const Item& item, int lane) {
  int64_t part = item.partial + int64_t(item.split) * item.q_count * c.group + lane;
  if (item.is_shared) {
    const flash::SharedToken& of = c.shared[item.q_first + lane / c.group];
    part = of.partial + (int64_t(item.kv_head) * of.splits + item.split) * of.lanes + lane % c.group;
  }
  return c.partials + part * (c.padded_dim + 2);
}

// Where a lane's result goes: out, or, of a split row, among the partials.
__attribute__((noinline)) void emit(const Call& c, const Item& item, int lane, float maximum, float sum, const float* values) {
  if (item.num_splits == 1) {
    return finish_lane(c, token_of(c, item, lane), item.kv_head * c.group + lane % c.group, maximum, sum, values);
  }
  float* part = part_of(c, item, lane);
  part[0] = maximum;
  part[1] = sum;
  std::memcpy(part + 2, values, c.padded_dim * 4);
}

// Whether this was the last one of so many; the counter is ready for the next layer then.
INLINE bool is_last(int32_t* counter, int count) {
  if (__atomic_add_fetch(counter, 1, __ATOMIC_ACQ_REL) != count) return false;
  *counter = 0;
  return true;
}

// What a query vector came to of some keys: the reference of its weights, their sum, DP unnormalised outputs.
struct Part {
  float maximum, sum;
  float* values;
  bool is_empty() const { return maximum == kLowest; }
};

// Adds a part to those before it. One function for all, so that it is rounded in the same way wherever the parts come from.
__attribute__((noinline)) void add_part(Part& total, const Part& part, int dim) {
  if (part.is_empty()) return;
  if (total.is_empty()) {
    std::memcpy(total.values, part.values, dim * 4);
    total.maximum = part.maximum, total.sum = part.sum;
    return;
  }
  const float highest = std::max(total.maximum, part.maximum);
  const float kept = total.maximum == highest ? 1.0f : exp2v<false>(fill(total.maximum - highest))[0];
  const float by = part.maximum == highest ? 1.0f : exp2v<false>(fill(part.maximum - highest))[0];
  total.maximum = highest;
  total.sum = total.sum * kept + part.sum * by;
  for (int d = 0; d < dim; d += W) store(total.values + d, load(total.values + d) * kept + load(part.values + d) * by);
}

// All parts of some lanes of a KV head, in the order of the keys. `first`: the first lane's part of split 0.
__attribute__((noinline)) void merge(const Call& c, int64_t token, int kv_head, int64_t first, int lanes, int splits,
                                     float* total) {
  const int64_t stride = c.padded_dim + 2;
  for (int lane = 0; lane < lanes; lane++) {
    Part merged{kLowest, 0, total};
    std::memset(total, 0, c.padded_dim * 4);
    for (int s = 0; s < splits; s++) {
      float* part = c.partials + (first + s * lanes + lane) * stride;
      add_part(merged, {part[0], part[1], part + 2}, c.padded_dim);
    }
    finish_lane(c, token + lane / c.group, kv_head * c.group + lane % c.group, merged.maximum, merged.sum, total);
  }
}

// To be called when all lanes are emitted: the last split of a unit to arrive merges all of them.
__attribute__((noinline)) void arrive(const Call& c, const Item& item, float* total) {
  if (item.num_splits == 1) return;
  if (!item.is_shared) {
    if (!is_last(c.arrived + item.counter, item.num_splits)) return;
    return merge(c, item.q_first, item.kv_head, item.partial, item.q_count * c.group, item.num_splits, total);
  }
  for (int at = item.q_first; at < item.q_first + item.q_count; at += c.shared[at].lanes / c.group) {
    const flash::SharedToken& unit = c.shared[at];
    if (!is_last(c.arrived + unit.counter + item.kv_head, unit.splits)) continue;
    const int64_t first = unit.partial + int64_t(item.kv_head) * unit.splits * unit.lanes;
    merge(c, unit.token, item.kv_head, first, unit.lanes, unit.splits, total);
  }
}

}  // namespace
