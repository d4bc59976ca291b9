// The product by vector instructions: R rows times B blocks of outputs are kept in registers while the inputs pass by.
#pragma once

#include "sinks.h"

namespace lab {

// The rows and the blocks of a full group: as many sums as the registers hold beside weights and inputs.
#if defined(__AVX512F__)
constexpr int kGroup = 6, kBlocks = 4;  // 24 of 32 registers
#elif defined(__AVX2__) || defined(__aarch64__)
constexpr int kGroup = 6, kBlocks = 1;  // 12 of 16 half as wide, 24 of 32 a quarter as wide
#else
constexpr int kGroup = 2, kBlocks = 1;  // 8 of 16 a quarter as wide
#endif

constexpr int64_t kAhead = 4096;  // bytes that are asked for ahead of use: past the end of the page, where the CPU's own stops

inline void prefetch(const void* at) { __builtin_prefetch(static_cast<const char*>(at) + kAhead, 0, 3); }

// One step takes two inputs: of bfloat16 a pair, of float32 one after the other.
struct Bf16Step {
  using T = BFloat16;
#ifdef __AVX512BF16__
  using Weights = __m512bh;
  using Input = __m512bh;
  static Weights weights(const T* w) { return (__m512bh)_mm512_loadu_si512(w); }
  static Input input(const T* x) { return (__m512bh)_mm512_set1_epi32(load<int32_t>(x)); }
  static Floats add(Floats sum, Weights w, Input x) { return (Floats)_mm512_dpbf16_ps((__m512)sum, w, x); }
#else
  struct Pair {
    Floats first, second;
  };
  using Weights = Pair;
  using Input = Pair;
  static Weights weights(const T* w) {
    const Words words = load<Words>(w);
    return {as_floats(words << 16), as_floats(words & 0xffff0000)};
  }
  static Input input(const T* x) { return {splat(widen(x[0])), splat(widen(x[1]))}; }
  static Floats add(Floats sum, const Weights& w, const Input& x) { return sum + w.first * x.first + w.second * x.second; }
#endif
  static void ahead(const T* w) { prefetch(w); }
};

struct Fp32Step {
  using T = float;
  struct Pair {
    Floats first, second;
  };
  using Weights = Pair;
  using Input = Pair;
  static Weights weights(const T* w) { return {load<Floats>(w), load<Floats>(w + kLanes)}; }
  static Input input(const T* x) { return {splat(x[0]), splat(x[1])}; }
  static Floats add(Floats sum, const Weights& w, const Input& x) { return sum + w.first * x.first + w.second * x.second; }
  static void ahead(const T* w) {
    prefetch(w);
    prefetch(w + kLanes);
  }
};

// R rows from `row` on, B blocks from `block` on, U sums for each so that the additions need not wait for one another.
// `Ahead`: whether the weights come from memory, and not from a group of rows before.
template <typename Step, int R, int B, int U, bool Ahead, typename Sink>
inline void tile(const Linear<typename Step::T>& linear, Sink& sink, int64_t row, int64_t block) {
  using T = typename Step::T;
  const T* weights[B];
  const T* x[R];
  Floats sums[R][B][U];
  for (int b = 0; b < B; b++) weights[b] = linear.block(block + b);
  for (int r = 0; r < R; r++) x[r] = linear.x + (row + r) * linear.x_stride;
  for (int r = 0; r < R; r++)
    for (int b = 0; b < B; b++)
      for (int u = 0; u < U; u++) sums[r][b][u] = zeros();
  for (int64_t i = 0; i < linear.depth; i += 2 * U) {
#pragma GCC unroll 8
    for (int u = 0; u < U; u++) {
      const int64_t at = i + 2 * u;
      typename Step::Weights w[B];
#pragma GCC unroll 8
      for (int b = 0; b < B; b++) {
        const T* from = weights[b] + at * kLanes;
        if constexpr (Ahead) Step::ahead(from);
        w[b] = Step::weights(from);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const typename Step::Input input = Step::input(x[r] + at);
#pragma GCC unroll 8
        for (int b = 0; b < B; b++) sums[r][b][u] = Step::add(sums[r][b][u], w[b], input);
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int b = 0; b < B; b++) {
      Floats sum = sums[r][b][0];
      for (int u = 1; u < U; u++) sum += sums[r][b][u];
      sink.take(row + r, block + b, sum);
    }
}

template <typename Step, int R, int B, int U, bool Ahead, typename Sink>
inline void panel(const Linear<typename Step::T>& linear, Sink& sink, int64_t row, int64_t begin, int64_t end) {
  end - begin == B ? tile<Step, R, B, U, Ahead>(linear, sink, row, begin) : tile<Step, R, 1, U, Ahead>(linear, sink, row, begin);
}

template <typename Step, int R, int B, int U, typename Sink>
inline void group(const Linear<typename Step::T>& linear, Sink& sink, int64_t row, int64_t begin, int64_t end, bool is_first) {
  is_first ? panel<Step, R, B, U, true>(linear, sink, row, begin, end) : panel<Step, R, B, U, false>(linear, sink, row, begin, end);
}

template <typename Step, typename Sink>
void by_vectors(const Linear<typename Step::T>& linear, const Share& share, Sink& sink) {
  // A panel of weights stays in the first caches while all groups of rows pass over it.
  for (int64_t begin = share.first_block, end; begin < share.end_block; begin = end) {
    end = begin + kBlocks <= share.end_block ? begin + kBlocks : begin + 1;
    int64_t row = share.first_row;
    for (; row + kGroup <= share.end_row; row += kGroup)
      group<Step, kGroup, kBlocks, 1>(linear, sink, row, begin, end, row == share.first_row);
    const bool is_first = row == share.first_row;
    switch (share.end_row - row) {
      case 1:
        linear.batch_invariant ? group<Step, 1, kBlocks, 1>(linear, sink, row, begin, end, is_first)
                               : group<Step, 1, kBlocks, 2>(linear, sink, row, begin, end, is_first);
        break;
      case 2: group<Step, 2, kBlocks, 1>(linear, sink, row, begin, end, is_first); break;
      case 3: group<Step, 3, kBlocks, 1>(linear, sink, row, begin, end, is_first); break;
      case 4: group<Step, 4, kBlocks, 1>(linear, sink, row, begin, end, is_first); break;
      case 5: group<Step, 5, kBlocks, 1>(linear, sink, row, begin, end, is_first); break;
    }
  }
}

}  // namespace lab
