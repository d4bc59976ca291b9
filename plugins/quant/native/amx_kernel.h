// The product of bfloat16 by AMX tiles (16 rows x 32 inputs times 32 inputs x 16 outputs at a time).
#pragma once

#include "blocks.h"

#if defined(__AMX_BF16__) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace lab {

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileWeights = kDepth * kLanes;  // of one tile

// A thread needs the kernel's leave for the tiles' registers; all threads made later inherit it.
inline bool may_use_amx() {
  constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool granted = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  return granted;
}

// Tiles 0 to 3 are sums, 4 and 5 inputs, 6 and 7 weights.
inline void configure(int64_t rows) {
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } tiles;
  for (int t = 0; t < 8; t++) {
    tiles.row_bytes[t] = 64;
    tiles.rows[t] = t < 6 ? rows : kTileRows;
  }
  _tile_loadconfig(&tiles);
}

inline void ahead(const BFloat16* weights) {
  const char* at = reinterpret_cast<const char*>(weights) + 4096;
#pragma GCC unroll 16
  for (int line = 0; line < 16; line++) __builtin_prefetch(at + line * 64, 0, 3);
}

// The sums of one tile, rounded into the output.
inline void store_tile(const Linear<BFloat16>& linear, const float* sums, int64_t rows, int64_t row, int64_t block) {
  for (int64_t r = 0; r < rows; r++) store_block(linear, row + r, block, load<Floats>(sums + r * kLanes));
}

// The sums of two tiles side by side: whole cache lines of output where it is whole blocks wide.
inline void store_tiles(const Linear<BFloat16>& linear, const float* left, const float* right, int64_t row, int64_t block) {
  if ((block + 2) * kLanes > linear.outputs) {
    store_tile(linear, left, kTileRows, row, block);
    if ((block + 1) * kLanes < linear.outputs) store_tile(linear, right, kTileRows, row, block + 1);
    return;
  }
  BFloat16* to = linear.y + row * linear.outputs + block * kLanes;
  for (int64_t r = 0; r < kTileRows; r++, to += linear.outputs) {
    const __m512 low = _mm512_load_ps(left + r * kLanes), high = _mm512_load_ps(right + r * kLanes);
    _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(high, low));
  }
}

// Up to 16 rows, B blocks.
template <int B>
inline void few_rows(const Linear<BFloat16>& linear, int64_t block) {
  _tile_zero(0);
  if constexpr (B > 1) _tile_zero(1);
  if constexpr (B > 2) _tile_zero(2);
  if constexpr (B > 3) _tile_zero(3);
  const BFloat16* w = linear.block(block);
  const int64_t next = linear.depth * kLanes;
  for (int64_t i = 0; i < linear.depth; i += kDepth, w += kTileWeights) {
    _tile_loadd(4, linear.x + i, linear.x_stride * 2);
    ahead(w);
    _tile_loadd(6, w, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (B > 1) {
      ahead(w + next);
      _tile_loadd(7, w + next, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (B > 2) {
      ahead(w + 2 * next);
      _tile_loadd(6, w + 2 * next, 64);
      _tile_dpbf16ps(2, 4, 6);
    }
    if constexpr (B > 3) {
      ahead(w + 3 * next);
      _tile_loadd(7, w + 3 * next, 64);
      _tile_dpbf16ps(3, 4, 7);
    }
  }
  alignas(64) float sums[4][kTileRows * kLanes];
  _tile_stored(0, sums[0], 64);
  if constexpr (B > 1) _tile_stored(1, sums[1], 64);
  if constexpr (B > 2) _tile_stored(2, sums[2], 64);
  if constexpr (B > 3) _tile_stored(3, sums[3], 64);
  for (int b = 0; b < B; b++) store_tile(linear, sums[b], linear.rows, 0, block + b);
}

// 16 rows from `upper` and 16 from `lower` on (they may overlap), two blocks; `other` is `block` where there is no second.
// `Ahead`: whether the weights come from memory, and not from the rows before.
template <bool Ahead>
inline void many_rows(const Linear<BFloat16>& linear, int64_t upper, int64_t lower, int64_t block, int64_t other) {
  const BFloat16 *w0 = linear.block(block), *w1 = linear.block(other);
  const BFloat16 *x0 = linear.x + upper * linear.x_stride, *x1 = linear.x + lower * linear.x_stride;
  const int64_t stride = linear.x_stride * 2;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t i = 0; i < linear.depth; i += kDepth) {
    if constexpr (Ahead) {
      ahead(w0 + i * kLanes);
      ahead(w1 + i * kLanes);
    }
    _tile_loadd(4, x0 + i, stride);
    _tile_loadd(6, w0 + i * kLanes, 64);
    _tile_loadd(7, w1 + i * kLanes, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, x1 + i, stride);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  alignas(64) float sums[4][kTileRows * kLanes];
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
  _tile_stored(2, sums[2], 64);
  _tile_stored(3, sums[3], 64);
  if (other != block) {
    store_tiles(linear, sums[0], sums[1], upper, block);
    store_tiles(linear, sums[2], sums[3], lower, block);
  } else {
    store_tile(linear, sums[0], kTileRows, upper, block);
    store_tile(linear, sums[2], kTileRows, lower, block);
  }
}

// All rows of the blocks from `begin` to `end`.
inline void by_tiles(const Linear<BFloat16>& linear, int64_t begin, int64_t end) {
  const int64_t rows = linear.rows;
  configure(rows < kTileRows ? rows : kTileRows);
  if (rows <= kTileRows) {
    int64_t block = begin;
    for (; block + 4 <= end; block += 4) few_rows<4>(linear, block);
    for (; block < end; block++) few_rows<1>(linear, block);
  } else {
    // As many weights at a time (1 MiB) as stay in the second cache; 32 rows of inputs are in the first meanwhile, and the
    // output is written along its rows.
    int64_t panel = (int64_t{1} << 18) / (linear.depth * kLanes) * 2;
    panel = panel < 2 ? 2 : panel;
    for (int64_t first = begin; first < end; first += panel) {
      const int64_t stop = first + panel < end ? first + panel : end;
      for (int64_t row = 0; row < rows; row += 32) {
        // The last tiles reach back over rows already done instead of past the end.
        const int64_t upper = row + 16 <= rows ? row : rows - 16, lower = row + 32 <= rows ? row + 16 : rows - 16;
        for (int64_t block = first; block < stop; block += 2) {
          const int64_t other = block + 1 < stop ? block + 1 : block;
          row == 0 ? many_rows<true>(linear, upper, lower, block, other) : many_rows<false>(linear, upper, lower, block, other);
        }
      }
    }
  }
  _tile_release();
}

}  // namespace lab
#endif
