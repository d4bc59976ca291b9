// The likeliest entries of rows of logits, with their log-probabilities: one pass for the largest, one for the sum.

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/TensorBase.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "lab/activation.h"
#include "lab/team.h"

namespace {

using at::Tensor;
using lab::BFloat16;
using lab::Floats;
using lab::Ids;
using lab::kLanes;

constexpr int64_t kAlone = 16384;  // logits that one thread is done with before another would have begun
constexpr float kLowest = -std::numeric_limits<float>::infinity();

// Sixteen entries from `at` on; past the end, and where there is no number, the lowest.
template <typename T>
Floats entries(const T* row, int64_t at, int64_t size) {
  Floats v;
  if (at + kLanes > size) {
    for (int64_t i = 0; i < kLanes; i++) {
      if constexpr (std::is_same_v<T, float>) {
        v[i] = at + i < size ? row[at + i] : kLowest;
      } else {
        v[i] = at + i < size ? lab::widen(row[at + i]) : kLowest;
      }
    }
  } else if constexpr (std::is_same_v<T, float>) {
    v = lab::load<Floats>(row + at);
  } else {
    v = lab::as_floats(__builtin_convertvector(lab::load<lab::Halves>(row + at), lab::Words) << 16);
  }
  return v == v ? v : lab::splat(kLowest);
}

inline bool any(Ids mask) {
  int32_t found = 0;
  for (int lane = 0; lane < kLanes; lane++) found |= mask[lane];
  return found != 0;
}

// The largest entries in descending order, of equal ones the first.
class Largest {
 public:
  Largest(float* values, int64_t* ids, int64_t most) : values_(values), ids_(ids), most_(most) {}

  bool is_full() const { return count_ == most_; }
  float least() const { return values_[most_ - 1]; }  // once it is full

  void offer(float value, int64_t id) {
    if (is_full() && !(value > least())) return;
    int64_t place = is_full() ? most_ - 1 : count_++;
    for (; place > 0 && value > values_[place - 1]; place--) values_[place] = values_[place - 1], ids_[place] = ids_[place - 1];
    values_[place] = value, ids_[place] = id;
  }

 private:
  float* values_;
  int64_t* ids_;
  const int64_t most_;
  int64_t count_ = 0;
};

template <typename T>
void top_of_row(const T* row, int64_t size, int64_t most, float* values, int64_t* ids) {
  Largest largest(values, ids, most);
  for (int64_t at = 0; at < size; at += kLanes) {
    const Floats v = entries(row, at, size);
    if (largest.is_full() && !any(v > largest.least())) continue;
    for (int64_t i = 0; i < std::min<int64_t>(kLanes, size - at); i++) largest.offer(v[i], at + i);
  }
  const Floats maximum = lab::splat(values[0]);
  Floats sums{};
  for (int64_t at = 0; at < size; at += kLanes) sums += lab::exponential(entries(row, at, size) - maximum);
  float sum = 0;
  for (int lane = 0; lane < kLanes; lane++) sum += sums[lane];
  const float total = values[0] + std::log(sum);
  for (int64_t i = 0; i < most; i++) values[i] = std::min(values[i] - total, 0.0f);
}

// logits (L, V), float32 or bfloat16, dense. Returns of each row the log-probabilities of its k likeliest entries (float32) and
// which they are (int64), the likeliest first.
std::tuple<Tensor, Tensor> top(const Tensor& logits, int64_t k) {
  TORCH_CHECK(logits.dim() == 2 && logits.is_contiguous() && k >= 1 && k <= logits.size(1), "top: k of dense logits (L, V)");
  const int64_t rows = logits.size(0), size = logits.size(1);
  Tensor values = at::detail::empty_cpu({rows, k}, at::kFloat), ids = at::detail::empty_cpu({rows, k}, at::kLong);
  const auto run = [&]<typename T>(const T* from) {
    const int64_t threads = rows * size <= kAlone ? 1 : at::get_num_threads();
    lab::in_runs(rows, threads, 1, [&](int64_t first, int64_t last, int64_t) {
      for (int64_t row = first; row < last; row++) {
        top_of_row(from + row * size, size, k, values.mutable_data_ptr<float>() + row * k, ids.mutable_data_ptr<int64_t>() + row * k);
      }
    });
  };
  if (logits.scalar_type() == at::kFloat) {
    run(logits.const_data_ptr<float>());
  } else {
    TORCH_CHECK(logits.scalar_type() == at::kBFloat16, "float32 or bfloat16 is needed");
    run(static_cast<const BFloat16*>(logits.const_data_ptr()));
  }
  return {values, ids};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(LAB_NAMESPACE, library) { library.def("top(Tensor logits, int k) -> (Tensor, Tensor)"); }

TORCH_LIBRARY_IMPL(LAB_NAMESPACE, CPU, library) { library.impl("top", TORCH_FN(top)); }
