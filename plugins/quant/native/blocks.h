// How a weight of O outputs and I inputs is stored: in blocks of 16 outputs, each block one stream read front to back.
//
//   float32    block[i][o]          input i, output o of 16
//   bfloat16   block[i / 2][o][2]   pairs of inputs, as the dot product instructions of AVX-512 and the tiles of AMX want them
//
// I is padded with zeros to a multiple of 32 (the depth of an AMX tile in bfloat16), O to one of 16. A block of 32 inputs is
// then exactly one AMX tile of 1 KiB. The same copy serves every number of rows.
#pragma once

#include "lab/vectors.h"

namespace lab {

constexpr int64_t kDepth = 32;  // what the inputs are padded to

template <typename T>
struct Linear {
  const T* x;        // M rows of `depth` inputs
  int64_t x_stride;  // from row to row
  const T* weights;  // blocks
  int64_t rows;      // M
  int64_t depth;     // I, padded
  int64_t outputs;   // O
  bool batch_invariant = false;  // a row's sums must not depend on the number of rows, whatever that costs

  const T* block(int64_t b) const { return weights + b * depth * kLanes; }
  int64_t num_blocks() const { return (outputs + kLanes - 1) / kLanes; }
};

constexpr int64_t kGroupRows = 32;    // rows whose sums AMX has in its registers together
constexpr int64_t kPanel = 1 << 19;   // weights that many rows pass over at a time, 1 MiB: half of the second cache

// What one thread computes of a product: all sums of these rows and blocks.
struct Share {
  int64_t first_row, end_row, first_block, end_block;
};

inline void store(Floats sum, float* to, int64_t lanes) { std::memcpy(to, &sum, lanes * sizeof(float)); }

inline void store(Floats sum, BFloat16* to, int64_t lanes) {
  const Halves halves = narrow(sum);
  std::memcpy(to, &halves, lanes * sizeof(BFloat16));
}

}  // namespace lab
