// y = x @ w^T for weights packed as blocks.h says, by the kernel that suits the number of rows and the CPU.

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/TensorBase.h>
#include <torch/library.h>

#include "amx_kernel.h"
#include "floats_kernel.h"
#include "lab/team.h"
#include "vector_kernel.h"

namespace {

using lab::BFloat16;
using lab::kLanes;
using lab::Largest;
using lab::Linear;
using lab::Share;
using lab::Store;

int64_t amx_from_rows = 2;  // one row is read as fast by the vector kernel, which needs no configuration
int64_t floats_from_rows = 7;  // of fewer, products of pairs take no longer

template <typename T, typename Sink>
void compute(const Linear<T>& linear, const Share& share, Sink& sink) {
  if constexpr (std::is_same_v<T, float>) {
    lab::by_vectors<lab::Fp32Step>(linear, share, sink);
  } else {
#ifdef LAB_HAS_TILES
    if ((linear.rows >= amx_from_rows || linear.batch_invariant) && lab::may_use_tiles()) return lab::by_tiles(linear, share, sink);
#endif
#ifdef __AVX512F__
    const bool many = linear.rows >= floats_from_rows && !linear.batch_invariant;  // which takes one kernel for all rows
    if (many && lab::floats_are_faster()) return lab::by_floats(linear, share, sink);
#endif
    lab::by_vectors<lab::Bf16Step>(linear, share, sink);
  }
}

// How a product is divided into pieces: pairs of blocks, in each of some runs of rows. As long as the memory is what limits,
// weights are best read by one thread only. A thread with many rows rather reads more weights, and fewer inputs.
struct Division {
  int64_t rows, blocks, across, threads;
  int64_t most;  // pieces that a thread takes at once

  template <typename T>
  Division(const Linear<T>& linear, int64_t threads) : rows(linear.rows), blocks(linear.num_blocks()), across(1), threads(threads) {
    for (int64_t n = 2; n <= threads; n++)
      if (threads % n == 0 && rows / n >= kRowsOfThread) across = n;
    most = threads == 1 ? count() : std::max<int64_t>(2, count() / ((across > 1 ? kTurnsOfMany : kTurns) * threads));
  }

  int64_t pairs() const { return (blocks + 1) / 2; }
  int64_t count() const { return pairs() * across; }

  // The share of the pieces [first, last) that has the first of them, up to the end of its rows. Moves `first` past it.
  Share next(int64_t& first, int64_t last) const {
    const int64_t run = first / pairs(), pair = first % pairs(), end = std::min(pairs(), pair + last - first);
    first += end - pair;
    return {begin_of(run), begin_of(run + 1), 2 * pair, std::min(blocks, 2 * end)};
  }

 private:
  // Of many rows each turn passes by all inputs, which are as large as the second cache: with few turns, panels are large.
  static constexpr int64_t kRowsOfThread = 256, kTurns = 8, kTurnsOfMany = 2;

  int64_t begin_of(int64_t run) const {
    return std::min(rows, (rows + lab::kGroupRows - 1) / lab::kGroupRows * run / across * lab::kGroupRows);
  }
};

// Computes all shares, each with a sink that `sink_of()` makes and `done(member, sink)` gets.
template <typename T, typename SinkOf, typename Done>
void run(const Linear<T>& linear, const Division& division, const SinkOf& sink_of, const Done& done) {
  lab::in_runs(division.count(), division.threads, division.most, [&](int64_t first, int64_t last, int64_t member) {
    while (first < last) {
      auto sink = sink_of();
      compute(linear, division.next(first, last), sink);
      done(member, sink);
    }
  });
}

template <typename T, typename SinkOf>
void run(const Linear<T>& linear, const Division& division, const SinkOf& sink_of) {
  run(linear, division, sink_of, [](int64_t, const auto&) {});
}

// x with rows of `depth` inputs one after another, padded with zeros; x itself where that is so already.
at::Tensor padded(const at::Tensor& x, int64_t depth) {
  const int64_t inputs = x.size(1);
  if (x.stride(1) == 1 && inputs == depth) return x;
  at::Tensor wide = at::detail::empty_cpu({x.size(0), depth}, x.scalar_type());
  const auto size = x.element_size();
  const char* from = static_cast<const char*>(x.const_data_ptr());
  char* to = static_cast<char*>(wide.mutable_data_ptr());
  for (int64_t row = 0; row < x.size(0); row++, to += depth * size) {
    for (int64_t i = 0; i < inputs; i++)
      std::memcpy(to + i * size, from + (row * x.stride(0) + i * x.stride(1)) * size, size);
    std::memset(to + inputs * size, 0, (depth - inputs) * size);
  }
  return wide;
}

// x (T, I) and `packed` (blocks, padded I, 16) of one dtype, float32 or bfloat16.
void check(const at::Tensor& x, const at::Tensor& packed, int64_t out_features) {
  TORCH_CHECK(x.dim() == 2 && packed.dim() == 3 && packed.is_contiguous(), "linear takes x (T, I) and packed weights");
  TORCH_CHECK(x.scalar_type() == packed.scalar_type(), "linear takes inputs and weights of one dtype");
  TORCH_CHECK(x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16, "linear takes float32 or bfloat16");
  TORCH_CHECK(x.size(1) <= packed.size(1) && out_features <= packed.size(0) * kLanes, "linear: sizes do not fit");
}

template <typename T>
Linear<T> arguments(const at::Tensor& x, const at::Tensor& packed, int64_t out_features, bool batch_invariant) {
  return {static_cast<const T*>(x.const_data_ptr()), x.stride(0), static_cast<const T*>(packed.const_data_ptr()), x.size(0),
          packed.size(1), out_features, batch_invariant};
}

template <typename T>
void store_product(const at::Tensor& x, const at::Tensor& packed, at::Tensor& y, bool batch_invariant) {
  const Linear<T> linear = arguments<T>(x, packed, y.size(1), batch_invariant);
  run(linear, Division(linear, at::get_num_threads()),
      [&] { return Store<T>{static_cast<T*>(y.mutable_data_ptr()), linear.outputs}; });
}

// Returns (T, out_features).
at::Tensor linear(const at::Tensor& x, const at::Tensor& packed, int64_t out_features, bool batch_invariant) {
  check(x, packed, out_features);
  at::Tensor y = at::detail::empty_cpu({x.size(0), out_features}, x.scalar_type());
  if (y.numel() == 0) return y;
  const at::Tensor wide = padded(x, packed.size(1));
  x.scalar_type() == at::kFloat ? store_product<float>(wide, packed, y, batch_invariant)
                                : store_product<BFloat16>(wide, packed, y, batch_invariant);
  return y;
}

template <typename T>
void store_gated(const at::Tensor& x, const at::Tensor& packed, int64_t out_features, bool batch_invariant, at::Tensor& y) {
  const Linear<T> linear = arguments<T>(x, packed, out_features, batch_invariant);
  run(linear, Division(linear, at::get_num_threads()),
      [&] { return lab::Gated<T>(static_cast<T*>(y.mutable_data_ptr()), linear.rows, linear.outputs); });
}

// `packed` has blocks of gate and up in turn. Returns silu(gate) * up: (T, out_features / 2).
at::Tensor gated(const at::Tensor& x, const at::Tensor& packed, int64_t out_features, bool batch_invariant) {
  check(x, packed, out_features);
  TORCH_CHECK(out_features % (2 * kLanes) == 0 && out_features == packed.size(0) * kLanes, "gated takes whole pairs of blocks");
  at::Tensor y = at::detail::empty_cpu({x.size(0), out_features / 2}, x.scalar_type());
  if (y.numel() == 0) return y;
  const at::Tensor wide = padded(x, packed.size(1));
  x.scalar_type() == at::kFloat ? store_gated<float>(wide, packed, out_features, batch_invariant, y)
                                : store_gated<BFloat16>(wide, packed, out_features, batch_invariant, y);
  return y;
}

template <typename T>
void find_largest(const at::Tensor& x, const at::Tensor& packed, int64_t out_features, bool batch_invariant, int64_t* ids) {
  const Linear<T> linear = arguments<T>(x, packed, out_features, batch_invariant);
  const Division division(linear, at::get_num_threads());
  struct Best {
    int64_t id = -1;
    float value = 0;
  };
  std::vector<Best> best(division.threads * linear.rows);  // of each thread, row by row
  run(linear, division, [&] { return Largest<T>(linear.rows, out_features); }, [&](int64_t member, const Largest<T>& found) {
    for (int64_t row = 0; row < linear.rows; row++) {
      const auto [id, value] = found.of(row);
      Best& of_thread = best[member * linear.rows + row];
      Largest<T>::merge(of_thread.id, of_thread.value, id, value);
    }
  });
  for (int64_t row = 0; row < linear.rows; row++) {
    Best& all = best[row];
    for (int64_t thread = 1; thread < division.threads; thread++) {
      const Best& other = best[thread * linear.rows + row];
      Largest<T>::merge(all.id, all.value, other.id, other.value);
    }
    ids[row] = all.id;
  }
}

// Returns int64 (T): of each row of linear(...) the index of the largest value, the lowest of several, the first that is not a
// number if there is one. out_features is at least 1.
at::Tensor argmax(const at::Tensor& x, const at::Tensor& packed, int64_t out_features, bool batch_invariant) {
  check(x, packed, out_features);
  TORCH_CHECK(out_features > 0, "argmax: there is nothing to choose from");
  at::Tensor ids = at::detail::empty_cpu({x.size(0)}, at::kLong);
  if (x.size(0) == 0) return ids;
  const at::Tensor wide = padded(x, packed.size(1));
  int64_t* to = static_cast<int64_t*>(ids.mutable_data_ptr());
  x.scalar_type() == at::kFloat ? find_largest<float>(wide, packed, out_features, batch_invariant, to)
                                : find_largest<BFloat16>(wide, packed, out_features, batch_invariant, to);
  return ids;
}

// For tests and measurements: from how many rows on tiles are used. Returns what it was before.
int64_t set_amx_from_rows(int64_t rows) { return std::exchange(amx_from_rows, rows); }

// Likewise for products of floats, where these are faster.
int64_t set_floats_from_rows(int64_t rows) { return std::exchange(floats_from_rows, rows); }

}  // namespace

TORCH_LIBRARY(LAB_NAMESPACE, library) {
  library.def("linear(Tensor x, Tensor packed, int out_features, bool batch_invariant=False) -> Tensor");
  library.def("gated(Tensor x, Tensor packed, int out_features, bool batch_invariant=False) -> Tensor");
  library.def("argmax(Tensor x, Tensor packed, int out_features, bool batch_invariant=False) -> Tensor");
  library.def("set_amx_from_rows(int rows) -> int", &set_amx_from_rows);
  library.def("set_floats_from_rows(int rows) -> int", &set_floats_from_rows);
}

TORCH_LIBRARY_IMPL(LAB_NAMESPACE, CPU, library) {
  library.impl("linear", TORCH_FN(linear));
  library.impl("gated", TORCH_FN(gated));
  library.impl("argmax", TORCH_FN(argmax));
}
