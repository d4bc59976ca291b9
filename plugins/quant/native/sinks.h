// Where sums go: into the output, through an activation, or into the largest of their row. A kernel hands over each sum once, rows in any order, the
// blocks of a row in ascending order.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "blocks.h"
#include "lab/activation.h"

namespace lab {

// Writes the sums, in the output's dtype.
template <typename T>
struct Store {
  T* y;             // rows of `outputs`
  int64_t outputs;

  // Sixteen outputs of one row; the last block may hold fewer.
  void take(int64_t row, int64_t block, Floats sum) const {
    const int64_t first = block * kLanes, left = outputs - first;
    T* to = y + row * outputs + first;
    if (left >= kLanes) {
      store(sum, to, kLanes);  // a constant size becomes one instruction
    } else {
      store(sum, to, left);
    }
  }

#ifdef __AVX512BF16__
  // For two blocks side by side, of which the second may be past the end: a whole cache line of a row at once.
  struct Pair {
    T* to;
    int64_t outputs;
    __mmask32 lanes;

    void take(int64_t row, Floats low, Floats high) const {
      _mm512_mask_storeu_epi16(to + row * outputs, lanes, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
    }
  };

  Pair pair(int64_t row, int64_t block) const {
    const int64_t first = block * kLanes, left = outputs - first;
    const uint64_t lanes = left >= 2 * kLanes ? ~uint64_t{0} : (uint64_t{1} << left) - 1;
    return {y + row * outputs + first, outputs, static_cast<__mmask32>(lanes)};
  }
#endif
};

// Writes silu(gate) * up, gate and up being the sums of an even block and of the one behind it. All of `outputs` are stored as
// half as many; they are whole pairs of blocks, and a thread has both blocks of its pairs.
template <typename T>
struct Gated {
  T* y;             // rows of `outputs` / 2
  int64_t outputs;
  std::vector<Floats> gates;  // of each row, until its up comes

  Gated(T* y, int64_t num_rows, int64_t outputs) : y(y), outputs(outputs), gates(num_rows) {}

  void combine(int64_t row, int64_t block, Floats gate, Floats up) const {
    const Floats activated = rounded<T>(silu(rounded<T>(gate)));
    store(activated * rounded<T>(up), y + row * (outputs / 2) + block / 2 * kLanes, kLanes);
  }

  void take(int64_t row, int64_t block, Floats sum) {
    if (block % 2 == 0) {
      gates[row] = sum;
    } else {
      combine(row, block - 1, gates[row], sum);
    }
  }

  struct Pair {
    const Gated& gated;
    int64_t row, block;

    void take(int64_t from_row, Floats low, Floats high) const { gated.combine(row + from_row, block, low, high); }
  };

  Pair pair(int64_t row, int64_t block) const { return {*this, row, block}; }
};

// Keeps the largest sum of each row and the lowest output that has it, the sums rounded to T first. Not a number is larger
// than all numbers. Lane by lane while sums come, over the lanes in the end.
template <typename T>
struct Largest {
  struct Lanes {
    Floats values;
    Ids ids;
  };
  int64_t outputs;
  std::vector<Lanes> rows;

  Largest(int64_t num_rows, int64_t outputs) : outputs(outputs), rows(num_rows, Lanes{zeros(), Ids{} - 1}) {}

  void take(int64_t row, int64_t block, Floats sum) {
    const Ids ids = kCount + static_cast<int32_t>(block * kLanes);
    const Floats value = rounded<T>(sum);
    Lanes& best = rows[row];
    // An id of -1 stands for no sum yet. Comparisons with what is not a number are false.
    const Ids larger = ((value > best.values) | ((value != value) & (best.values == best.values)) | (best.ids < 0)) &
                       (ids < static_cast<int32_t>(outputs));
    best.values = larger ? value : best.values;
    best.ids = larger ? ids : best.ids;
  }

  struct Pair {
    Largest& largest;
    int64_t row, block;

    void take(int64_t from_row, Floats low, Floats high) const {
      largest.take(row + from_row, block, low);
      largest.take(row + from_row, block + 1, high);
    }
  };

  Pair pair(int64_t row, int64_t block) { return {*this, row, block}; }

  // The row's output, and its sum; -1 when no sum came.
  std::pair<int64_t, float> of(int64_t row) const {
    int64_t id = -1;
    float value = 0;
    for (int lane = 0; lane < kLanes; lane++) merge(id, value, rows[row].ids[lane], rows[row].values[lane]);
    return {id, value};
  }

  // The better of two: the larger, among equals the lower id.
  static void merge(int64_t& id, float& value, int64_t other_id, float other) {
    if (other_id < 0) return;
    const bool equal = other == value || (other != other && value != value);
    const bool larger = other > value || (other != other && value == value);
    if (id < 0 || larger || (equal && other_id < id)) id = other_id, value = other;
  }
};

}  // namespace lab
