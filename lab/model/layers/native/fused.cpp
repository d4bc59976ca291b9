// What lies between the linear layers of a decoder on the CPU: lookups in tables, norm with residual, rotation, gated activation.
// One pass each.
//
// A few rows are done by the calling thread alone: to wake others would take longer than the work.

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/TensorBase.h>
#include <torch/library.h>

#include <cmath>

#include "lab/activation.h"
#include "lab/team.h"

namespace {

using at::Tensor;
using lab::BFloat16;
using lab::Floats;
using lab::gelu_tanh;
using lab::kLanes;
using lab::rounded;
using lab::silu;

constexpr int64_t kAlone = 16384;  // elements that one thread is done with before another would have begun

template <typename F>
void for_rows(int64_t rows, int64_t elements, const F& row) {
  const int64_t threads = rows * elements <= kAlone ? 1 : at::get_num_threads();
  lab::in_runs(rows, threads, rows / (4 * threads), [&](int64_t first, int64_t last, int64_t) {
    for (int64_t r = first; r < last; r++) row(r);
  });
}

// The `lanes` first lanes, the rest zero.
inline Floats load_lanes(const float* from, int64_t lanes) {
  if (lanes >= kLanes) return lab::load<Floats>(from);
  Floats v{};
  std::memcpy(&v, from, lanes * sizeof(float));
  return v;
}

inline Floats load_lanes(const BFloat16* from, int64_t lanes) {
  lab::Halves halves{};
  if (lanes >= kLanes) {
    halves = lab::load<lab::Halves>(from);
  } else {
    std::memcpy(&halves, from, lanes * sizeof(BFloat16));
  }
  return lab::widen(halves);
}

inline void store_lanes(Floats v, float* to, int64_t lanes) {
  if (lanes >= kLanes) {
    std::memcpy(to, &v, sizeof v);
  } else {
    std::memcpy(to, &v, lanes * sizeof(float));
  }
}

inline void store_lanes(Floats v, BFloat16* to, int64_t lanes) {
  const lab::Halves halves = lab::narrow(v);
  if (lanes >= kLanes) {
    std::memcpy(to, &halves, sizeof halves);
  } else {
    std::memcpy(to, &halves, lanes * sizeof(BFloat16));
  }
}

inline float sum_of(Floats v) {
  float sum = 0;
  for (int lane = 0; lane < kLanes; lane++) sum += v[lane];
  return sum;
}

// Rows of up to two leading dimensions, the last one dense.
struct Rows {
  const Tensor& x;
  int64_t inner = x.dim() == 3 ? x.size(1) : 1;
  int64_t outer_stride = x.stride(0), inner_stride = x.dim() == 3 ? x.stride(1) : 0;

  int64_t count() const { return x.size(0) * inner; }
  int64_t at(int64_t row) const { return row / inner * outer_stride + row % inner * inner_stride; }
};

void check(const Tensor& x) {
  TORCH_CHECK((x.dim() == 2 || x.dim() == 3) && x.stride(-1) == 1, "rows must be dense, in one or two leading dimensions");
}

// The normed row is rounded to the weight's type W before they are multiplied.
template <typename T, typename W, bool kAdds>
void norm_rows(const Tensor& x, const Tensor* delta, const Tensor& weight, double eps, Tensor& y, Tensor* sum) {
  const int64_t size = x.size(-1);
  const W* w = static_cast<const W*>(weight.const_data_ptr());
  const Rows rows{x};
  for_rows(rows.count(), size, [&](int64_t row) {
    const T* from = static_cast<const T*>(x.const_data_ptr()) + rows.at(row);
    if constexpr (kAdds) {
      const T* other = static_cast<const T*>(delta->const_data_ptr()) + Rows{*delta}.at(row);
      T* added = static_cast<T*>(sum->mutable_data_ptr()) + row * size;
      for (int64_t i = 0; i < size; i += kLanes)
        store_lanes(load_lanes(from + i, size - i) + load_lanes(other + i, size - i), added + i, size - i);
      from = added;
    }
    Floats squares{};
    for (int64_t i = 0; i < size; i += kLanes) {
      const Floats v = load_lanes(from + i, size - i);
      squares += v * v;
    }
    const float scale = 1.0f / std::sqrt(sum_of(squares) / static_cast<float>(size) + static_cast<float>(eps));
    T* to = static_cast<T*>(y.mutable_data_ptr()) + row * size;
    for (int64_t i = 0; i < size; i += kLanes) {
      const Floats v = rounded<W>(load_lanes(from + i, size - i) * scale);
      store_lanes(v * load_lanes(w + i, size - i), to + i, size - i);
    }
  });
}

template <typename T>
void rotate_rows(const Tensor& x, const Tensor& cos, const Tensor& sin, Tensor& y) {
  const int64_t heads = x.size(1), size = x.size(2), half = cos.size(-1);
  for_rows(x.size(0), heads * size, [&](int64_t token) {
    const float* c = cos.const_data_ptr<float>() + token * half;
    const float* s = sin.const_data_ptr<float>() + token * half;
    const T* from = static_cast<const T*>(x.const_data_ptr()) + token * x.stride(0);
    T* to = static_cast<T*>(y.mutable_data_ptr()) + token * heads * size;
    for (int64_t head = 0; head < heads; head++, from += x.stride(1), to += size) {
      for (int64_t i = 0; i < half; i += kLanes) {
        const Floats first = load_lanes(from + i, half - i), second = load_lanes(from + half + i, half - i);
        const Floats cosine = load_lanes(c + i, half - i), sine = load_lanes(s + i, half - i);
        store_lanes(first * cosine - second * sine, to + i, half - i);
        store_lanes(second * cosine + first * sine, to + half + i, half - i);
      }
      if (2 * half < size) std::memcpy(to + 2 * half, from + 2 * half, (size - 2 * half) * sizeof(T));
    }
  });
}

template <typename T, typename F>
void activate_rows(const Tensor& x, Tensor& y, const F& activation) {
  const int64_t size = y.size(1);
  for_rows(x.size(0), 2 * size, [&](int64_t row) {
    const T* gate = static_cast<const T*>(x.const_data_ptr()) + row * x.stride(0);
    T* to = static_cast<T*>(y.mutable_data_ptr()) + row * size;
    for (int64_t i = 0; i < size; i += kLanes) {
      const Floats activated = rounded<T>(activation(load_lanes(gate + i, size - i)));
      store_lanes(activated * load_lanes(gate + size + i, size - i), to + i, size - i);
    }
  });
}

template <typename F>
void for_dtype(const Tensor& x, const F& run) {
  if (x.scalar_type() == at::kFloat) return run(static_cast<float*>(nullptr));
  TORCH_CHECK(x.scalar_type() == at::kBFloat16, "float32 or bfloat16 is needed");
  run(static_cast<BFloat16*>(nullptr));
}

#define OF(pointer) std::remove_pointer_t<decltype(pointer)>

template <bool kAdds>
void norm(const Tensor& x, const Tensor* delta, const Tensor& weight, double eps, Tensor& y, Tensor* sum) {
  TORCH_CHECK(weight.scalar_type() == at::kFloat || weight.scalar_type() == x.scalar_type(),
              "a norm's weight is float32 or of its input's dtype");
  for_dtype(x, [&](auto* t) {
    for_dtype(weight, [&](auto* w) { norm_rows<OF(t), OF(w), kAdds>(x, delta, weight, eps, y, sum); });
  });
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  check(x);
  Tensor y = at::detail::empty_cpu(x.sizes(), x.scalar_type());
  norm<false>(x, nullptr, weight, eps, y, nullptr);
  return y;
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& delta, const Tensor& weight, double eps) {
  check(x);
  check(delta);
  Tensor y = at::detail::empty_cpu(x.sizes(), x.scalar_type()), sum = at::detail::empty_cpu(x.sizes(), x.scalar_type());
  norm<true>(x, &delta, weight, eps, y, &sum);
  return {y, sum};
}

Tensor rotate(const Tensor& x, const Tensor& cos, const Tensor& sin) {
  check(x);
  TORCH_CHECK(x.dim() == 3 && cos.is_contiguous() && sin.is_contiguous(), "rotate takes x (T, X, H) and dense cos and sin");
  Tensor y = at::detail::empty_cpu(x.sizes(), x.scalar_type());
  for_dtype(x, [&](auto* t) { rotate_rows<OF(t)>(x, cos, sin, y); });
  return y;
}

template <typename F>
Tensor activated(const Tensor& x, const F& activation) {
  check(x);
  TORCH_CHECK(x.dim() == 2 && x.size(1) % 2 == 0, "gate and up must stand side by side");
  Tensor y = at::detail::empty_cpu({x.size(0), x.size(1) / 2}, x.scalar_type());
  for_dtype(x, [&](auto* t) { activate_rows<OF(t)>(x, y, activation); });
  return y;
}

Tensor silu_mul(const Tensor& x) {
  return activated(x, [](Floats v) { return silu(v); });
}

Tensor gelu_mul(const Tensor& x) {
  return activated(x, [](Floats v) { return gelu_tanh(v); });
}

template <typename Index>
void copy_rows(const Tensor& table, const Tensor& index, Tensor& y) {
  const int64_t size = table.size(1), bytes = size * table.element_size();
  const Index* at = index.const_data_ptr<Index>();
  const char* from = static_cast<const char*>(table.const_data_ptr());
  char* to = static_cast<char*>(y.mutable_data_ptr());
  for (int64_t i = 0; i < index.size(0); i++)
    TORCH_CHECK_INDEX(0 <= at[i] && at[i] < table.size(0), "take_rows: no row ", at[i], " of ", table.size(0));
  for_rows(index.size(0), size, [&](int64_t row) { std::memcpy(to + row * bytes, from + at[row] * bytes, bytes); });
}

// table (V, H) of any dtype, index (T) int32 or int64. Returns (T, H).
Tensor take_rows(const Tensor& table, const Tensor& index) {
  TORCH_CHECK(table.dim() == 2 && table.is_contiguous() && index.dim() == 1 && index.is_contiguous(),
              "take_rows takes a dense table (V, H) and a dense index (T)");
  Tensor y = at::detail::empty_cpu({index.size(0), table.size(1)}, table.scalar_type());
  if (index.scalar_type() == at::kInt) {
    copy_rows<int32_t>(table, index, y);
  } else {
    copy_rows<int64_t>(table, index, y);
  }
  return y;
}

}  // namespace

TORCH_LIBRARY(LAB_NAMESPACE, library) {
  library.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  library.def("add_rms_norm(Tensor x, Tensor delta, Tensor weight, float eps) -> (Tensor, Tensor)");
  library.def("rotate(Tensor x, Tensor cos, Tensor sin) -> Tensor");
  library.def("silu_mul(Tensor x) -> Tensor");
  library.def("gelu_mul(Tensor x) -> Tensor");
  library.def("take_rows(Tensor table, Tensor index) -> Tensor");
}

TORCH_LIBRARY_IMPL(LAB_NAMESPACE, CPU, library) {
  library.impl("rms_norm", TORCH_FN(rms_norm));
  library.impl("add_rms_norm", TORCH_FN(add_rms_norm));
  library.impl("rotate", TORCH_FN(rotate));
  library.impl("silu_mul", TORCH_FN(silu_mul));
  library.impl("gelu_mul", TORCH_FN(gelu_mul));
  library.impl("take_rows", TORCH_FN(take_rows));
}
