// The product of bfloat16 by AMX tiles: 16 rows x 32 inputs times 32 inputs x 16 outputs at a time.
//
// A tile product takes 16 cycles and a tile is 1 KiB, so with 32 rows x 32 outputs in the registers (two tiles of inputs and
// two of weights for four products) 64 bytes a cycle are wanted, more than the second cache gives. So of many rows
//
//   a panel  of weights, up to 1 MiB, stays in the second cache while all groups of 32 rows pass over it; meanwhile the next
//            one is asked for, evenly spread over the products
//   a group  of 32 rows, in slices of up to 576 inputs, stays in the first cache while the panel passes by it with the
//            streaming load, which does not displace it; sums of several slices wait in memory
//   sums     of a group and two blocks are rounded and handed over between the products of the next two blocks
//
// Up to 16 rows are limited by the memory alone. A sum is always added up in the same order, so it depends neither on the
// number of rows nor on the number of threads.
#pragma once

#include "lab/tiles.h"
#include "scratch.h"
#include "sinks.h"

#ifdef LAB_HAS_TILES

namespace lab {

constexpr int64_t kTileRows = 16;
constexpr int64_t kTile = kDepth * kLanes;      // values of a tile, 1 KiB
constexpr int64_t kPart = kTileRows * kLanes;   // sums of a tile, 1 KiB
constexpr int64_t kSliceSteps = 18;             // tiles; of a group 36 KiB, three quarters of the first cache
constexpr int64_t kLine = 64;

// Tiles of sums and of inputs have so many rows, those of weights (6 and 7) sixteen.
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
  asm volatile("" : : "r"(&tiles) : "memory");  // the intrinsic tells the compiler of its first 8 bytes only
  _tile_loadconfig(&tiles);
}

// Weights that are fetched ahead of their use.
struct Ahead {
  const char *at, *end;

  void ask(int64_t lines) {
    for (const char* stop = std::min(end, at + lines * kLine); at < stop; at += kLine) _mm_prefetch(at, _MM_HINT_T1);
  }
};

// Asks for the tile that comes 4 KiB later in the stream, past the end of the page, where the CPU's own fetching stops.
inline void near_ahead(const BFloat16* weights) {
  const char* at = reinterpret_cast<const char*>(weights) + 4096;
#pragma GCC unroll 16
  for (int line = 0; line < 16; line++) __builtin_prefetch(at + line * 64, 0, 3);
}

// The sums of a group of rows and a pair of blocks. They are handed over while the next ones are computed.
struct alignas(64) Sums {
  float values[4 * kPart];  // upper rows: both blocks; lower rows: both blocks
  int64_t row = 0, rows = 0, block = 0;

  template <typename Pair>
  void hand_over(const Pair& pair, int64_t r) const {
    const float* at = values + r / kTileRows * 2 * kPart + r % kTileRows * kLanes;
    pair.take(r, load<Floats>(at), load<Floats>(at + kPart));
  }

  template <typename Sink>
  void hand_over(Sink& sink) {
    const auto pair = sink.pair(row, block);
    for (int64_t r = 0; r < rows; r++) hand_over(pair, r);
    rows = 0;
  }
};

// Rows of inputs, in place or copied.
struct Inputs {
  const BFloat16* at;
  int64_t stride, step;  // from row to row, from 32 inputs to the next 32
};

// One slice of a pair of blocks for one group of rows.
struct Slice {
  Inputs x;
  const BFloat16 *left, *right;
  int64_t steps;
  const float* from;  // sums of the slices before; null for the first
  float* to;
};

// Tiles 0 to 3 are sums, 4 and 5 inputs, 6 and 7 weights. `Tiles`: how many tiles of rows the group has.
template <int Tiles, typename Sink>
inline void multiply(const Slice& slice, Sums& before, Sink& sink, Ahead& ahead, int64_t lines) {
  if (slice.from) {
    _tile_loadd(0, slice.from, 64);
    _tile_loadd(1, slice.from + kPart, 64);
    if constexpr (Tiles > 1) _tile_loadd(2, slice.from + 2 * kPart, 64);
    if constexpr (Tiles > 1) _tile_loadd(3, slice.from + 3 * kPart, 64);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (Tiles > 1) _tile_zero(2);
    if constexpr (Tiles > 1) _tile_zero(3);
  }
  const BFloat16 *x = slice.x.at, *lower = x + kTileRows * slice.x.stride, *left = slice.left, *right = slice.right;
  const int64_t stride = slice.x.stride * 2, move = slice.x.step;
  // Asked for all at once, lines would wait for each other in the buffers that the loads of tiles need, too.
  const int64_t few = lines / 8, rest = lines - 7 * few;
  const auto step = [&] {
    _tile_loadd(4, x, stride);
    ahead.ask(few);
    _tile_stream_loadd(6, left, 64);
    ahead.ask(few);
    _tile_stream_loadd(7, right, 64);
    ahead.ask(few);
    _tile_dpbf16ps(0, 4, 6);
    ahead.ask(few);
    if constexpr (Tiles > 1) _tile_loadd(5, lower, stride);
    ahead.ask(few);
    _tile_dpbf16ps(1, 4, 7);
    ahead.ask(few);
    if constexpr (Tiles > 1) _tile_dpbf16ps(2, 5, 6);
    ahead.ask(few);
    if constexpr (Tiles > 1) _tile_dpbf16ps(3, 5, 7);
    x += move, lower += move, left += kTile, right += kTile;
    ahead.ask(rest);
  };
  int64_t i = 0;
  if (before.rows == kGroupRows && slice.steps >= kGroupRows / 2) {
    const auto pair = sink.pair(before.row, before.block);
    for (; i < kGroupRows / 2; i++) {
      step();
      before.hand_over(pair, 2 * i);
      before.hand_over(pair, 2 * i + 1);
    }
    before.rows = 0;
  } else {
    before.hand_over(sink);
  }
  for (; i < slice.steps; i++) step();
  _tile_stored(0, slice.to, 64);
  _tile_stored(1, slice.to + kPart, 64);
  if constexpr (Tiles > 1) _tile_stored(2, slice.to + 2 * kPart, 64);
  if constexpr (Tiles > 1) _tile_stored(3, slice.to + 3 * kPart, 64);
}

// The product of a share, panel by panel: a panel of weights stays in the second cache while the groups of rows pass over it.
// Behind the last one that is asked for which comes next in memory: likely it is this thread's next share.
template <typename Sink>
class ByPanels {
 public:
  ByPanels(const Linear<BFloat16>& linear, const Share& share, Sink& sink)
      : linear_(linear), share_(share), sink_(sink), steps_(linear.depth / kDepth),
        slices_((steps_ + kSliceSteps - 1) / kSliceSteps),
        groups_((share.end_row - share.first_row + kGroupRows - 1) / kGroupRows) {
    const int64_t pair = 2 * kLanes * linear.depth;
    pairs_ = std::clamp<int64_t>(kPanel / pair, 1, groups_);
    lines_ = (2 * kTile * 2 / kLine + groups_ - 1) / groups_;
    static thread_local Scratch partial, copied;
    partial_ = partial.get<float>(pairs_ * 4 * kPart);
    copied_ = copied.get<BFloat16>(kGroupRows * linear.depth);
  }

  void run() {
    Ahead ahead{};
    for (int64_t begin = share_.first_block; begin < share_.end_block; begin += 2 * pairs_) {
      const int64_t end = std::min(begin + 2 * pairs_, share_.end_block);
      ahead = {reinterpret_cast<const char*>(linear_.block(end)),
               reinterpret_cast<const char*>(linear_.block(std::min(end + 2 * pairs_, linear_.num_blocks())))};
      for (int64_t row = share_.first_row; row < share_.end_row; row += kGroupRows) group(row, begin, end, ahead);
    }
    sums_[current_].hand_over(sink_);
  }

 private:
  void group(int64_t row, int64_t begin, int64_t end, Ahead& ahead) {
    const int64_t rows = std::min(kGroupRows, share_.end_row - row);
    const Inputs x = inputs(row, rows);
    for (int64_t slice = 0; slice < slices_; slice++) {
      const int64_t from = steps_ * slice / slices_, to = steps_ * (slice + 1) / slices_;
      for (int64_t block = begin; block < end; block += 2) {
        const bool is_last = slice + 1 == slices_;
        Sums& next = sums_[current_ ^ 1];
        float* partial = partial_ + (block - begin) / 2 * 4 * kPart;
        const Slice part = {{x.at + from * x.step, x.stride, x.step},
                            linear_.block(block) + from * kTile,
                            linear_.block(std::min(block + 1, end - 1)) + from * kTile,
                            to - from,
                            slice ? partial : nullptr,
                            is_last ? next.values : partial};
        rows > kTileRows ? multiply<2>(part, sums_[current_], sink_, ahead, lines_)
                         : multiply<1>(part, sums_[current_], sink_, ahead, lines_);
        if (!is_last) continue;
        next.row = row, next.rows = rows, next.block = block;
        current_ ^= 1;
      }
    }
  }

  // In place where there are rows enough and their stride spreads them over the caches; else a copy.
  Inputs inputs(int64_t row, int64_t rows) {
    const BFloat16* from = linear_.x + row * linear_.x_stride;
    if (rows == kGroupRows && linear_.x_stride % 1024 != 0) return {from, linear_.x_stride, kDepth};
    for (int64_t step = 0; step < steps_; step++)
      for (int64_t r = 0; r < rows; r++)
        _mm512_store_si512(copied_ + (step * kGroupRows + r) * kDepth,
                           _mm512_loadu_si512(from + r * linear_.x_stride + step * kDepth));
    return {copied_, kDepth, kGroupRows * kDepth};
  }

  const Linear<BFloat16>& linear_;
  const Share& share_;
  Sink& sink_;
  const int64_t steps_, slices_, groups_;
  int64_t pairs_, lines_;  // of a panel; cache lines of the next panel to ask for in each step
  float* partial_;
  BFloat16* copied_;
  Sums sums_[2];
  int current_ = 0;
};

// Up to 16 rows, B blocks: read as so many streams at once, which the CPU fetches faster than one.
template <int B, typename Sink>
inline void few_rows(const Linear<BFloat16>& linear, const Share& share, int64_t block, Sink& sink) {
  const int64_t next = linear.depth * kLanes, rows = share.end_row - share.first_row;
  const BFloat16 *x = linear.x + share.first_row * linear.x_stride, *w = linear.block(block);
  _tile_zero(0);
  if constexpr (B > 1) _tile_zero(1);
  if constexpr (B > 2) _tile_zero(2);
  if constexpr (B > 3) _tile_zero(3);
  for (int64_t i = 0; i < linear.depth; i += kDepth, w += kTile) {
    _tile_loadd(4, x + i, linear.x_stride * 2);
    near_ahead(w);
    _tile_loadd(6, w, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (B > 1) {
      near_ahead(w + next);
      _tile_loadd(7, w + next, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (B > 2) {
      near_ahead(w + 2 * next);
      _tile_loadd(6, w + 2 * next, 64);
      _tile_dpbf16ps(2, 4, 6);
    }
    if constexpr (B > 3) {
      near_ahead(w + 3 * next);
      _tile_loadd(7, w + 3 * next, 64);
      _tile_dpbf16ps(3, 4, 7);
    }
  }
  alignas(64) float sums[B][kPart];
  _tile_stored(0, sums[0], 64);
  if constexpr (B > 1) _tile_stored(1, sums[1], 64);
  if constexpr (B > 2) _tile_stored(2, sums[2], 64);
  if constexpr (B > 3) _tile_stored(3, sums[3], 64);
  for (int64_t r = 0; r < rows; r++)
    for (int b = 0; b < B; b++) sink.take(share.first_row + r, block + b, load<Floats>(sums[b] + r * kLanes));
}

template <typename Sink>
void by_tiles(const Linear<BFloat16>& linear, const Share& share, Sink& sink) {
  const int64_t rows = share.end_row - share.first_row;
  configure(std::min(rows, kTileRows));
  if (rows <= kTileRows) {
    int64_t block = share.first_block;
    for (; block + 4 <= share.end_block; block += 4) few_rows<4>(linear, share, block, sink);
    for (; block + 2 <= share.end_block; block += 2) few_rows<2>(linear, share, block, sink);
    for (; block < share.end_block; block++) few_rows<1>(linear, share, block, sink);
  } else {
    ByPanels<Sink>(linear, share, sink).run();
  }
  _tile_release();
}

}  // namespace lab
#endif
