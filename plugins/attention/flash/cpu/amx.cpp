// For CPUs with matrix tiles (AMX): the products of bf16 tiles, everything else as with AVX-512.

#include "flash.h"
#include "lab/tiles.h"

#if defined(LAB_HAS_TILES) && defined(__AVX512BF16__) && defined(__AVX512VBMI__)

#define FLASH_WIDTH 16
#include "fours.h"
#include "fours_i8.h"
#include "tile.h"

namespace {

// Eight tiles of 16 rows of 64 bytes: 0 to 3 are sums, 4 and 5 rows of the left matrix, 6 and 7 of the right one. With few lanes 1
// and 3 are sums of values and 7 weights, which have no more rows than there are lanes.
struct Amx : Bf16 {
  static constexpr bool kTiles = true;

  static void configure(int lanes) {  // up to 16
    struct alignas(64) Config {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    for (int of_lanes : {1, 3, 7}) config.rows[of_lanes] = lanes;
    _tile_loadconfig(&config);
  }

  // Compilers do not know that a tile load reads memory: what was stored must be there before it.
  static INLINE void settle() { asm volatile("" ::: "memory"); }

  // Keys of two groups as left tiles straight from the cache, packed queries as right tiles. `meanwhile` is called between
  // products: what it does goes on while they are made, which processors look too few instructions ahead to see for themselves.
  template <int NV, class Meanwhile>
  static INLINE Meanwhile scores(const uint16_t* const* k, int dim, const float* queries, float* to, Meanwhile meanwhile) {
    constexpr int L = NV * W;
    settle();
    zero<NV>();
    for (int d = 0; d < dim; d += 32) {
      _tile_loadd(4, k[0] + d, dim * 2);
      _tile_loadd(5, k[1] + d, dim * 2);
      meanwhile = multiply<NV>(queries + d / 2 * L, d + 32 < dim ? nullptr : to, meanwhile);
    }
    return meanwhile;
  }

  // Outputs of 32 dims: turned values as left tiles, weights as right tiles. `stride`: floats from a chunk's values to the next's.
  template <int NV, class Meanwhile>
  static INLINE Meanwhile add_values(const float* values, int stride, int chunks, const float* weights, float* into,
                                Meanwhile meanwhile) {
    constexpr int L = NV * W;
    settle();
    load_sums<NV>(into);
    for (int chunk = 0; chunk < chunks; chunk++) {
      const float* tile = values + chunk * stride;
      _tile_loadd(4, tile, 64);
      _tile_loadd(5, tile + W * W, 64);
      meanwhile = multiply<NV>(weights + chunk * W * L, chunk + 1 < chunks ? nullptr : into, meanwhile);
    }
    return meanwhile;
  }

  // The same outputs, [lane, DP]: weights as left tiles, [lane, pair of keys], pairs of keys' values as right ones, [pair, DP].
  template <class Meanwhile>
  static INLINE Meanwhile add_values_by_lanes(const float* values, int dim, int chunks, const float* weights, float* into,
                                              Meanwhile meanwhile) {
    settle();
    _tile_loadd(1, into, dim * 4);
    _tile_loadd(3, into + W, dim * 4);
    for (int chunk = 0; chunk < chunks; chunk++, values += W * dim, weights += W * W) {
      _tile_loadd(7, weights, 64);
      _tile_loadd(6, values, dim * 4);
      _tile_dpbf16ps(1, 7, 6);
      meanwhile.step();
      _tile_loadd(6, values + W, dim * 4);
      _tile_dpbf16ps(3, 7, 6);
      meanwhile.step();
    }
    _tile_stored(1, into, dim * 4);
    _tile_stored(3, into + W, dim * 4);
    settle();
    return meanwhile;
  }

  template <int NV>
  static INLINE void zero() {
    _tile_zero(0);
    _tile_zero(2);
    if constexpr (NV == 2) {
      _tile_zero(1);
      _tile_zero(3);
    }
  }

  // Both left tiles times NV right ones. Each sum is stored when it is whole, where `to` is given.
  template <int NV, class Meanwhile>
  static INLINE Meanwhile multiply(const float* right, float* to, Meanwhile meanwhile) {
    float* lower = to + NV * W * W;
    _tile_loadd(6, right, NV * 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (NV == 2) _tile_loadd(7, right + W, NV * 64);
    meanwhile.step();
    if (to) _tile_stored(0, to, NV * 64);
    _tile_dpbf16ps(2, 5, 6);
    meanwhile.step();
    if (to) _tile_stored(2, lower, NV * 64);
    if constexpr (NV == 2) {
      _tile_dpbf16ps(1, 4, 7);
      meanwhile.step();
      if (to) _tile_stored(1, to + W, NV * 64);
      _tile_dpbf16ps(3, 5, 7);
      meanwhile.step();
      if (to) _tile_stored(3, lower + W, NV * 64);
    }
    settle();
    return meanwhile;
  }

  template <int NV>
  static INLINE void load_sums(const float* upper) {
    const float* lower = upper + NV * W * W;
    _tile_loadd(0, upper, NV * 64);
    _tile_loadd(2, lower, NV * 64);
    if constexpr (NV == 2) {
      _tile_loadd(1, upper + W, NV * 64);
      _tile_loadd(3, lower + W, NV * 64);
    }
  }
};

}  // namespace

namespace flash {

// Of up to four lanes.
template <class Kernel>
static void attend_few(const Call& c, const Item& item, const Item* next, float* scratch, bool must_configure) {
  Kernel kernel(c, item, next, scratch);
  if (must_configure) kernel.configure();
  kernel.run();
}

// Tiles are configured where items of other lanes come than before: it takes some 200 cycles, a tenth of a decode over 128 keys.
static void attend(const Call& c, const Item* items, int64_t count, const Item* next, float* scratch) {
  int configured = 0;  // what tiles are configured for: 1 to 16 lanes of many, or 1 to 4 of few, as negative numbers
  for (const Item *item = items, *end = items + count; item < end; item++) {
    const Item* after = item + 1 < end ? item + 1 : next;
    const int lanes = item->q_count * c.group;
    const bool few = c.has_few(lanes);
    if (!c.has_bf16_products() || (few && lanes > Fours::kLanes)) {
      avx512_bf16_kernels()->attend(c, item, 1, after, scratch);
      continue;
    }
    before_item(scratch);
    const int wanted = few ? -lanes : std::min(lanes, W);
    if (!few) {
      if (wanted != configured) Amx::configure(wanted);
      attend_tiles<Amx>(c, *item, after, scratch);
    } else if (ByteFours::takes(c)) {
      attend_few<ByteFours>(c, *item, after, scratch, wanted != configured);
    } else {
      attend_few<Fours>(c, *item, after, scratch, wanted != configured);
    }
    configured = wanted;
  }
  if (configured) _tile_release();
}

const Kernels* amx_kernels() {
  static const Kernels kernels{"amx", attend};
  return lab::may_use_tiles() ? &kernels : nullptr;
}

}  // namespace flash

#else
const flash::Kernels* flash::amx_kernels() { return nullptr; }
#endif
