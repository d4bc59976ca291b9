// y = x @ w^T for weights packed as blocks.h says, by the kernel that suits the number of rows and the CPU.

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/TensorBase.h>
#include <torch/library.h>

#include "amx_kernel.h"
#include "vector_kernel.h"

namespace {

using lab::BFloat16;
using lab::kLanes;
using lab::Linear;

int64_t amx_from_rows = 2;  // one row is read as fast by the vector kernel, which needs no configuration

template <typename T>
void blocks(const Linear<T>& linear, int64_t begin, int64_t end) {
  if constexpr (std::is_same_v<T, float>) {
    lab::by_vectors<lab::Fp32Step>(linear, begin, end);
  } else {
#if defined(__AMX_BF16__) && defined(__linux__)
    if (linear.rows >= amx_from_rows && lab::may_use_amx()) return lab::by_tiles(linear, begin, end);
#endif
    lab::by_vectors<lab::Bf16Step>(linear, begin, end);
  }
}

// Each thread takes an equal run of the blocks: it reads its own weights, and all inputs.
template <typename T>
void run(const Linear<T>& linear) {
  const int64_t num_blocks = (linear.outputs + kLanes - 1) / kLanes;
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), num_blocks);
  if (threads == 1 || at::in_parallel_region()) return blocks(linear, 0, num_blocks);
#pragma omp parallel num_threads(threads)
  {
    const int64_t thread = omp_get_thread_num(), team = omp_get_num_threads();
    blocks(linear, num_blocks * thread / team, num_blocks * (thread + 1) / team);
  }
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

template <typename T>
Linear<T> arguments(const at::Tensor& x, const at::Tensor& packed, at::Tensor& y) {
  return {static_cast<const T*>(x.const_data_ptr()), x.stride(0), static_cast<const T*>(packed.const_data_ptr()),
          static_cast<T*>(y.mutable_data_ptr()), x.size(0), x.size(1), y.size(1)};
}

// x (T, I) and `packed` (blocks, padded I, 16) of one dtype, float32 or bfloat16; returns (T, out_features).
at::Tensor linear(const at::Tensor& x, const at::Tensor& packed, int64_t out_features) {
  TORCH_CHECK(x.dim() == 2 && packed.dim() == 3 && packed.is_contiguous(), "linear takes x (T, I) and packed weights");
  TORCH_CHECK(x.scalar_type() == packed.scalar_type(), "linear takes inputs and weights of one dtype");
  TORCH_CHECK(x.size(1) <= packed.size(1) && out_features <= packed.size(0) * kLanes, "linear: sizes do not fit");
  at::Tensor y = at::detail::empty_cpu({x.size(0), out_features}, x.scalar_type());
  if (x.size(0) == 0) return y;
  const at::Tensor wide = padded(x, packed.size(1));
  if (x.scalar_type() == at::kFloat) {
    run(arguments<float>(wide, packed, y));
  } else {
    TORCH_CHECK(x.scalar_type() == at::kBFloat16, "linear takes float32 or bfloat16");
    run(arguments<BFloat16>(wide, packed, y));
  }
  return y;
}

// For tests and measurements: from how many rows on tiles are used. Returns what it was before.
int64_t set_amx_from_rows(int64_t rows) { return std::exchange(amx_from_rows, rows); }

}  // namespace

TORCH_LIBRARY(LAB_NAMESPACE, library) {
  library.def("linear(Tensor x, Tensor packed, int out_features) -> Tensor");
  library.def("set_amx_from_rows(int rows) -> int", &set_amx_from_rows);
}

TORCH_LIBRARY_IMPL(LAB_NAMESPACE, CPU, library) { library.impl("linear", TORCH_FN(linear)); }
