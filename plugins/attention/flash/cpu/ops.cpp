// The operators: write keys and values into the cache, attend as a step's plan says.

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "lab/team.h"
#include "plan.h"
#include "quantized.h"
#include "watch.h"

namespace flash {
namespace {

using at::Tensor;

Type type_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case at::kFloat: return Type::f32;
    case at::kBFloat16: return Type::bf16;
    case at::kHalf: return Type::f16;
    case at::kChar: return Type::i8;
    case at::kFloat8_e4m3fn: return Type::fp8;
    default: TORCH_CHECK(false, "flash: no kernels for ", t.scalar_type());
  }
}

// From the fastest to the plainest.
std::vector<const Kernels*> usable_kernels() {
  std::vector<const Kernels*> usable;
  for (const Kernels* k : {amx_kernels(), avx512_mixed_kernels(), avx512_bf16_kernels(), avx512_kernels(), avx2_kernels(),
                           portable_kernels()}) {
    if (k) usable.push_back(k);
  }
  return usable;
}

std::vector<std::string> isas() {
  std::vector<std::string> names;
  for (const Kernels* k : usable_kernels()) names.emplace_back(k->name);
  return names;
}

float* scratch() {
  thread_local const std::unique_ptr<float[]> memory(new float[kScratchFloats + 16]);
  return (float*)((reinterpret_cast<uintptr_t>(memory.get()) + 63) / 64 * 64);
}

template <class From, class To>
void convert(const void* from, void* to, int count) {
  for (int i = 0; i < count; i++) ((To*)to)[i] = static_cast<To>(static_cast<float>(((const From*)from)[i]));
}

template <class From>
auto convert_from(Type to) {
  return to == Type::f32 ? convert<From, float> : to == Type::bf16 ? convert<From, at::BFloat16> : convert<From, at::Half>;
}

auto converter(Type from, Type to) {
  return from == Type::f32 ? convert_from<float>(to) : from == Type::bf16 ? convert_from<at::BFloat16>(to) : convert_from<at::Half>(to);
}

// A row of bytes, in pieces of a cache line; the compiler's own copy of an unknown length is a call.
inline void copy_bytes(const char* from, char* to, int64_t bytes) {
  struct Line { char bytes[64]; };
  int64_t i = 0;
  for (; i + 64 <= bytes; i += 64) {
    Line line;
    std::memcpy(&line, from + i, 64);
    std::memcpy(to + i, &line, 64);
  }
  if (i < bytes) std::memcpy(to + i, from + i, bytes - i);
}

constexpr int64_t kWriteBytes = 1 << 17;  // less than this is written before other threads wake up
constexpr int64_t kWriteAhead = 4;  // tokens between the one that is written and the one whose places are asked for

// The cache's sizes and where its parts lie.
struct Layout {
  int64_t heads, block_size, padded, head_bytes;
  Type type;
  bool has_fixed_scales;
};

Layout layout_of(const Tensor& kv, int64_t dim) {
  const int64_t padded = padded_dim(dim);
  TORCH_CHECK(kv.is_contiguous(), "flash: the cache must be dense");
  if (kv.dim() == 3) return {kv.size(1), kv.size(2) / (2 * padded + 4), padded, kv.size(2), type_of(kv), false};
  const Type type = type_of(kv);
  return {kv.size(1), kv.size(3), padded, 2 * kv.size(3) * padded * kv.element_size(), type, type == Type::i8 || type == Type::fp8};
}

const float* fixed_scales(const Tensor& kv, const Layout& layout) {
  return (const float*)((const char*)kv.const_data_ptr() + (kv.size(0) - 1) * layout.heads * layout.head_bytes);
}

// Sinks [N] are in blocks of their own, before that of the fixed scales.
const float* sinks_of(const Tensor& kv, const Layout& layout, int64_t num_heads) {
  const int64_t bytes = layout.heads * layout.head_bytes, blocks = (4 * num_heads + bytes - 1) / bytes;
  return (const float*)((const char*)kv.const_data_ptr() + (kv.size(0) - layout.has_fixed_scales - blocks) * bytes);
}

// Keys or values of a step.
struct Source {
  const char* data;
  int64_t token_bytes, head_bytes;
  Type type;
  Source(const Tensor& x)
      : data((const char*)x.const_data_ptr()), token_bytes(x.stride(0) * x.element_size()),
        head_bytes(x.stride(1) * x.element_size()), type(type_of(x)) {}
  const char* row(int64_t token, int64_t head) const { return data + token * token_bytes + head * head_bytes; }
};

// A row into a quantized cache. `block`: the memory of its block and head; `scale`: the fixed one, null where it is to be made.
void write_quantized(const Source& source, const char* values, int64_t dim, const Layout& to, char* block, int64_t half,
                     int64_t offset, const float* scale) {
  alignas(64) float row[kMaxDim];
  converter(source.type, Type::f32)(values, row, dim);
  int8_t* stored = (int8_t*)block + (half * to.block_size + offset) * to.padded;
  float by;
  if (scale) {
    by = *scale;
  } else {
    const uint16_t made = scale_of(row, dim, to.type);
    std::memcpy(block + 2 * to.block_size * to.padded + 2 * (half * to.block_size + offset), &made, 2);
    by = float_of(uint32_t(made) << 16);
  }
  quantize(row, dim, by, to.type, stored);
  std::memset(stored + dim, 0, to.padded - dim);
}

// k and v [T, K, D], the last dim dense, into kv [P, K, 2, B, DP] or one of quantized.h at slots [T]; slot -1 is skipped.
void write(const Tensor& k, const Tensor& v, const Tensor& kv, const Tensor& slots) {
  TORCH_CHECK(k.stride(2) == 1 && v.stride(2) == 1, "flash: keys and values must be dense in the head dim");
  const int64_t dim = k.size(2), tokens = slots.numel();
  const Layout to = layout_of(kv, dim);
  const int64_t size = kv.element_size(), row_bytes = to.padded * size;
  const bool is_quantized = to.type == Type::i8 || to.type == Type::fp8;
  const Source sources[2] = {k, v};
  const auto convert_row = is_quantized ? nullptr : converter(sources[0].type, to.type);
  const float* scales = to.has_fixed_scales ? fixed_scales(kv, to) : nullptr;
  const int64_t* slot = slots.const_data_ptr<int64_t>();
  char* cache = (char*)kv.data_ptr();
  const auto place_of = [&](int64_t token, int64_t head) {
    return cache + (slot[token] / to.block_size * to.heads + head) * to.head_bytes;
  };
  // A step of decodes writes a line here and a line there, each far from the CPU: they are fetched side by side.
  const auto ask = [&](int64_t token) {
    if (slot[token] < 0) return;
    for (int64_t head = 0; head < to.heads; head++) {
      const char* row = place_of(token, head) + slot[token] % to.block_size * row_bytes;
      const char* value_row = row + to.block_size * row_bytes;
      if (!may_ask(row, 0, row_bytes) || !may_ask(value_row, 0, row_bytes)) continue;
      for (int64_t i = 0; i < row_bytes; i += 64) {
        __builtin_prefetch(row + i, 1);
        __builtin_prefetch(value_row + i, 1);
      }
    }
  };
  const auto write_token = [&](int64_t token) {
    if (slot[token] < 0) return;
    const int64_t offset = slot[token] % to.block_size;
    for (int64_t head = 0; head < to.heads; head++) {
      char* place = place_of(token, head);
      for (int64_t half = 0; half < 2; half++) {
        const char* values = sources[half].row(token, head);
        if (is_quantized) {
          const float* scale = scales ? scales + half * to.heads + head : nullptr;
          write_quantized(sources[half], values, dim, to, place, half, offset, scale);
          continue;
        }
        char* row = place + (half * to.block_size + offset) * row_bytes;
        if (sources[half].type == to.type) {
          copy_bytes(values, row, dim * size);
        } else {
          convert_row(values, row, dim);
        }
        if (dim < to.padded) std::memset(row + dim * size, 0, (to.padded - dim) * size);
      }
    }
  };
#ifdef FLASH_WATCHED
  Watch::begin(cache, to.heads * to.head_bytes);
  for (int64_t token = 0; token < tokens; token++) {
    if (slot[token] >= 0) Watch::add(slot[token] / to.block_size);
  }
#endif
  const int64_t threads = tokens * to.heads * row_bytes * 2 < kWriteBytes ? 1 : at::get_num_threads();
  lab::in_runs(tokens, threads, tokens / (4 * threads), [&](int64_t first, int64_t last, int64_t) {
    for (int64_t token = first; token < std::min(last, first + kWriteAhead); token++) ask(token);
    for (int64_t token = first; token < last; token++) {
      if (token + kWriteAhead < last) ask(token + kWriteAhead);
      write_token(token);
    }
  });
}

// What `kv` holds at the slots `from` to the slots `to`, both [X], scales of tokens included; all is read before any is written.
void move(const Tensor& kv, const Tensor& from, const Tensor& to, int64_t dim) {
  const Layout of = layout_of(kv, dim);
  const int64_t row_bytes = of.padded * kv.element_size(), count = from.numel();
  const int64_t scale_bytes = (of.type == Type::i8 || of.type == Type::fp8) && !of.has_fixed_scales ? 2 : 0;
  const int64_t values_bytes = 2 * of.block_size * row_bytes;
  std::vector<char> kept(count * of.heads * 2 * (row_bytes + scale_bytes));
  char* cache = (char*)kv.data_ptr();
  const auto each = [&](const Tensor& slots, const auto& copy) {
    char* at = kept.data();
    for (int64_t i = 0; i < count; i++) {
      const int64_t slot = slots.const_data_ptr<int64_t>()[i], block = slot / of.block_size, offset = slot % of.block_size;
      for (int64_t half = 0; half < 2 * of.heads; half++) {
        char* place = cache + (block * of.heads + half / 2) * of.head_bytes;
        const int64_t row = half % 2 * of.block_size + offset;
        copy(place + row * row_bytes, at, row_bytes);
        copy(place + values_bytes + row * scale_bytes, at + row_bytes, scale_bytes);
        at += row_bytes + scale_bytes;
      }
    }
  };
  each(from, [](char* cached, char* own, int64_t bytes) { std::memcpy(own, cached, bytes); });
  each(to, [](char* cached, char* own, int64_t bytes) { std::memcpy(cached, own, bytes); });
}

// q_start [R + 1], ctx_len [R] and blocks [R, M] int32; the others as How and StepRows have them. Returns a Plan's memory.
Tensor plan_step(const Tensor& q_start, const Tensor& ctx_len, const Tensor& blocks, int64_t kv_heads, int64_t group, int64_t dim,
                 int64_t block_size, double scale, double softcap, int64_t window, int64_t num_splits, int64_t cascade, int64_t isa,
                 bool batch_invariant, bool has_sinks, const std::optional<Tensor>& tree_start, const std::optional<Tensor>& ancestors) {
  const StepRows step{q_start.const_data_ptr<int32_t>(),
                      ctx_len.const_data_ptr<int32_t>(),
                      blocks.const_data_ptr<int32_t>(),
                      ctx_len.numel(),
                      blocks.stride(0),
                      tree_start ? tree_start->const_data_ptr<int32_t>() : nullptr,
                      ancestors ? ancestors->const_data_ptr<int64_t>() : nullptr};
  const How how{kv_heads, group, dim, block_size, float(scale), float(softcap), window, num_splits, cascade, isa,
                at::get_num_threads(), batch_invariant, has_sinks};
  Tensor made;
  plan(step, how, [&](int64_t bytes) {
    made = Tensor(at::detail::empty_cpu({bytes / 4}, at::kInt));
    return made.data_ptr();
  });
  return made;
}

// q and out [T, N, D]; kv as `write` fills it; blocks [R, M] int32. Tokens after those of the plan are padding: zero.
// lse [T, N] float32, where it is wanted.
void attend_lse(const Tensor& q, const Tensor& kv, const Tensor& blocks, const Tensor& made, const Tensor& out,
                const std::optional<Tensor>& lse) {
  TORCH_CHECK(q.stride(2) == 1 && out.stride(2) == 1 && (blocks.stride(1) == 1 || blocks.size(1) == 1),
              "flash: queries, outputs and block tables must be dense in their last dim");
  TORCH_CHECK(q.scalar_type() == out.scalar_type() && q.size(2) <= kMaxDim, "flash: wrong outputs or head dim");
  Plan& plan = *(Plan*)made.data_ptr();
  Call c{};
  c.q = q.const_data_ptr();
  c.out = out.data_ptr();
  c.kv = kv.const_data_ptr();
  c.blocks = blocks.const_data_ptr<int32_t>();
  c.q_stride_t = q.stride(0), c.q_stride_n = q.stride(1);
  c.out_stride_t = out.stride(0), c.out_stride_n = out.stride(1);
  c.blocks_stride = blocks.stride(0);
  if (lse) c.lse = lse->data_ptr<float>(), c.lse_stride_t = lse->stride(0);
  c.shared = plan.shared(), c.partials = plan.partials(), c.arrived = plan.arrived();
  c.ancestors = plan.num_paths ? plan.ancestors() : nullptr;
  const Layout layout = layout_of(kv, q.size(2));
  c.type = type_of(q), c.kv_type = layout.type;
  c.num_kv_heads = layout.heads, c.group = q.size(1) / layout.heads, c.dim = q.size(2), c.padded_dim = layout.padded;
  c.block_size = layout.block_size, c.head_bytes = layout.head_bytes, c.window = plan.window;
  c.fixed_scales = layout.has_fixed_scales ? fixed_scales(kv, layout) : nullptr;
  c.sinks = plan.has_sinks ? sinks_of(kv, layout, q.size(1)) : nullptr;
  c.scale = plan.scale, c.softcap = plan.softcap, c.batch_invariant = plan.batch_invariant;
  static const std::vector<const Kernels*> usable = usable_kernels();
  const Kernels& kernels = *usable.at(plan.isa);
  const Item* items = plan.items();
#ifdef FLASH_WATCHED
  Watch::begin(c.kv, layout.heads * layout.head_bytes);
  for (const Item* item = items; item < items + plan.num_items; item++) {
    for (int p = item->key_first; p < item->key_last; p++) Watch::add(c.blocks[item->row * c.blocks_stride + p / c.block_size]);
  }
#endif
  lab::in_runs(plan.num_items, plan.threads, plan.run, [&](int64_t first, int64_t last, int64_t) {
    kernels.attend(c, items + first, last - first, last < plan.num_items ? items + last : nullptr, scratch());
  });
  if (plan.num_tokens < out.size(0)) out.slice(0, plan.num_tokens).zero_();
}

void attend(const Tensor& q, const Tensor& kv, const Tensor& blocks, const Tensor& made, const Tensor& out) {
  attend_lse(q, kv, blocks, made, out, std::nullopt);
}

// What the items of a plan read, in keys of one KV head.
int64_t keys_read(const Tensor& made) {
  Plan& plan = *(Plan*)made.data_ptr();
  int64_t keys = 0;
  for (int i = 0; i < plan.num_items; i++) keys += plan.items()[i].key_last - plan.items()[i].key_first;
  return keys;
}

}  // namespace
}  // namespace flash

#define DEFINE_LIBRARY(name, m) TORCH_LIBRARY(name, m)
DEFINE_LIBRARY(LAB_NAMESPACE, m) {
  m.def("isas() -> str[]", flash::isas);
  m.def("write(Tensor k, Tensor v, Tensor(a!) kv, Tensor slots) -> ()", flash::write);
  m.def("plan(Tensor q_start, Tensor ctx_len, Tensor blocks, int kv_heads, int group, int dim, int block_size, float scale,"
        " float softcap, int window, int num_splits, int cascade, int isa, bool batch_invariant, bool has_sinks,"
        " Tensor? tree_start, Tensor? ancestors) -> Tensor", flash::plan_step);
  m.def("move(Tensor(a!) kv, Tensor from_slots, Tensor to_slots, int dim) -> ()", flash::move);
#ifdef FLASH_WATCHED
  m.def("watched() -> (int, int)", [] { return std::tuple<int64_t, int64_t>(flash::Watch::asked, flash::Watch::astray); });
#endif
  m.def("keys_read(Tensor plan) -> int", flash::keys_read);
  m.def("attend(Tensor q, Tensor kv, Tensor blocks, Tensor(a!) plan, Tensor(b!) out) -> ()", flash::attend);
  m.def("attend_lse(Tensor q, Tensor kv, Tensor blocks, Tensor(a!) plan, Tensor(b!) out, Tensor(c!) lse) -> ()",
        [](const at::Tensor& q, const at::Tensor& kv, const at::Tensor& blocks, const at::Tensor& made, const at::Tensor& out,
           const at::Tensor& lse) { flash::attend_lse(q, kv, blocks, made, out, lse); });
}
