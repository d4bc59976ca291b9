// The product of bfloat16 of many rows by multiply-adds of float32, where these are faster than products of pairs.
//
//   a panel  of weights, up to 1 MiB, stays in the second cache while all groups of rows pass over it
//   a group  of 12 rows is made float32 once for each panel, as steps of 16 inputs of each row: at fixed distances
//   weights  of two blocks are made float32 as they are loaded: two cheap instructions for all 12 rows
//
// A row's sum is always added up in the same order, so it does not depend on the rows beside it, as long as they are so many
// that this kernel is chosen.
#pragma once

#include "lab/products.h"
#include "scratch.h"
#include "vector_kernel.h"

#ifdef __AVX512F__
namespace lab {

constexpr int64_t kFloatRows = 12;  // with two blocks 24 sums in registers, beside the weights of two inputs

// Rows [row, row + R) of inputs as float32. Those past the last one repeat it.
template <int R>
inline void widen_rows(const Linear<BFloat16>& linear, int64_t row, int64_t end_row, float* to) {
  for (int r = 0; r < R; r++) {
    const BFloat16* from = linear.x + std::min(row + r, end_row - 1) * linear.x_stride;
    for (int64_t i = 0; i < linear.depth; i += kLanes) {
      const Floats wide = widen(load<Halves>(from + i));
      std::memcpy(to + i * R + r * kLanes, &wide, sizeof wide);
    }
  }
}

// Adds w * x to the sum. One instruction broadcasts x and multiplies; GCC 12 writes two, and moves sums between registers.
inline Floats add_product(Floats sum, Floats w, const float& x) {
  asm("vfmadd231ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(x));
  return sum;
}

// The sums of R rows and of the blocks `left` and `right`.
template <int R>
inline void multiply_floats(const float* x, const BFloat16* left, const BFloat16* right, int64_t depth, Floats (&out)[R][2]) {
  Floats sums[R][2];
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) sums[r][0] = sums[r][1] = zeros();
  for (int64_t i = 0; i < depth; i += kLanes, x += R * kLanes) {
    for (int64_t j = 0; j < kLanes; j += 2, left += 2 * kLanes, right += 2 * kLanes) {
      prefetch(left);
      prefetch(right);
      const Words pairs[2] = {load<Words>(left), load<Words>(right)};
      const Floats even[2] = {as_floats(pairs[0] << 16), as_floats(pairs[1] << 16)};
      const Floats odd[2] = {as_floats(pairs[0] & 0xffff0000), as_floats(pairs[1] & 0xffff0000)};
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        sums[r][0] = add_product(sums[r][0], even[0], x[r * kLanes + j]);
        sums[r][1] = add_product(sums[r][1], even[1], x[r * kLanes + j]);
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        sums[r][0] = add_product(sums[r][0], odd[0], x[r * kLanes + j + 1]);
        sums[r][1] = add_product(sums[r][1], odd[1], x[r * kLanes + j + 1]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) out[r][0] = sums[r][0], out[r][1] = sums[r][1];
}

template <int R, typename Sink>
inline void float_group(const Linear<BFloat16>& linear, Sink& sink, int64_t row, int64_t end_row, int64_t begin, int64_t end,
                        float* x) {
  widen_rows<R>(linear, row, end_row, x);
  const int64_t rows = std::min<int64_t>(R, end_row - row);
  for (int64_t block = begin; block < end; block += 2) {
    const bool has_right = block + 1 < end;
    Floats sums[R][2];
    multiply_floats<R>(x, linear.block(block), linear.block(has_right ? block + 1 : block), linear.depth, sums);
    for (int64_t r = 0; r < rows; r++) {
      sink.take(row + r, block, sums[r][0]);
      if (has_right) sink.take(row + r, block + 1, sums[r][1]);
    }
  }
}

template <typename Sink>
void by_floats(const Linear<BFloat16>& linear, const Share& share, Sink& sink) {
  static thread_local Scratch scratch;
  float* x = scratch.get<float>(kFloatRows * linear.depth);
  const int64_t panel = 2 * std::max<int64_t>(1, kPanel / (2 * kLanes * linear.depth));
  for (int64_t begin = share.first_block; begin < share.end_block; begin += panel) {
    const int64_t end = std::min(begin + panel, share.end_block);
    for (int64_t row = share.first_row; row < share.end_row; row += kFloatRows) {
      const int64_t rows = share.end_row - row;
      if (rows > 8) {
        float_group<12>(linear, sink, row, share.end_row, begin, end, x);
      } else if (rows > 4) {
        float_group<8>(linear, sink, row, share.end_row, begin, end, x);
      } else {
        float_group<4>(linear, sink, row, share.end_row, begin, end, x);
      }
    }
  }
}

}  // namespace lab
#endif
