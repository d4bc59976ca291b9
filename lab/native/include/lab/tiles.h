// Matrix tiles (AMX): the processor's, or with -DLAB_EMULATED_TILES others in memory, so that what is written for tiles runs in
// tests where the processor has none. What the manual calls a fault ends the process here, too.
#pragma once

#if defined(__linux__) && defined(__x86_64__) && defined(__AVX512F__)
#if defined(LAB_EMULATED_TILES) || (defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__))
#define LAB_HAS_TILES
#endif
#endif

#ifdef LAB_HAS_TILES
#include <immintrin.h>

#ifndef LAB_EMULATED_TILES
#include <sys/syscall.h>
#include <unistd.h>

namespace lab {

// A process has to ask Linux for the tiles' registers; all threads made later inherit its leave.
inline bool may_use_tiles() {
  constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool granted = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  return granted;
}

}  // namespace lab

#else
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace lab {

inline bool may_use_tiles() { return true; }

// One thread's tiles, by Intel's Software Developer's Manual, volume 2 (LDTILECFG, TILELOADD, TDPBF16PS and their kin).
class EmulatedTiles {
 public:
  static EmulatedTiles& own() {
    static thread_local EmulatedTiles tiles;
    return tiles;
  }

  void configure(const void* config) {
    const uint8_t* bytes = (const uint8_t*)config;
    if (bytes[0] != 1) fault("an unknown palette");
    std::memset(this, 0, sizeof *this);
    for (int i = 2; i < 64; i++) {
      const bool is_reserved = i < 16 || (i >= 32 && i < 48) || i >= 56;
      if (is_reserved && bytes[i]) fault("a reserved byte of the configuration is set");
    }
    for (int t = 0; t < kTiles; t++) {
      std::memcpy(&row_bytes_[t], bytes + 16 + 2 * t, 2);
      rows_[t] = bytes[48 + t];
      if (rows_[t] > kRows || row_bytes_[t] > kBytes) fault("a tile is configured too large");
    }
  }

  void release() { std::memset(this, 0, sizeof *this); }

  void load(int t, const void* from, int64_t stride) {
    zero(t);
    for (int r = 0; r < rows_[t]; r++) std::memcpy(at_[t][r], (const char*)from + r * stride, row_bytes_[t]);
  }

  void store(int t, void* to, int64_t stride) const {
    check(t);
    for (int r = 0; r < rows_[t]; r++) std::memcpy((char*)to + r * stride, at_[t][r], row_bytes_[t]);
  }

  void zero(int t) {
    check(t);
    std::memset(at_[t], 0, sizeof at_[t]);
  }

  void multiply_bf16(int to, int a, int b) {
    check_product(to, a, b);
    const __m512i upper = _mm512_set1_epi32(int(0xffff0000));
    for (int m = 0; m < rows_[to]; m++) {
      __m512 even = _mm512_setzero_ps(), odd = even;
      for (int k = 0; k < rows_[b]; k++) {
        const __m512i x = word(a, m, k), y = _mm512_load_si512(at_[b][k]);
        even = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(x, 16)), _mm512_castsi512_ps(_mm512_slli_epi32(y, 16)), even);
        odd = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(x, upper)), _mm512_castsi512_ps(_mm512_and_si512(y, upper)), odd);
      }
      _mm512_store_ps(at_[to][m], _mm512_add_ps(_mm512_load_ps(at_[to][m]), _mm512_add_ps(even, odd)));
    }
  }

  // Bytes of `a` with a sign or without, those of `b` with one.
  template <bool kSigned>
  void multiply_bytes(int to, int a, int b) {
    check_product(to, a, b);
    for (int m = 0; m < rows_[to]; m++) {
      __m512i sum = _mm512_load_si512(at_[to][m]);
      for (int k = 0; k < rows_[b]; k++) {
        __m512i x = word(a, m, k), y = _mm512_load_si512(at_[b][k]);
        for (int i = 0; i < 4; i++) {
          const __m512i high = _mm512_slli_epi32(x, 24 - 8 * i);
          const __m512i left = kSigned ? _mm512_srai_epi32(high, 24) : _mm512_srli_epi32(high, 24);
          const __m512i right = _mm512_srai_epi32(_mm512_slli_epi32(y, 24 - 8 * i), 24);
          sum = _mm512_add_epi32(sum, _mm512_mullo_epi32(left, right));
        }
      }
      _mm512_store_si512(at_[to][m], sum);
    }
  }

 private:
  static constexpr int kTiles = 8, kRows = 16, kBytes = 64;

  [[noreturn]] static void fault(const char* what) {
    std::fprintf(stderr, "emulated tiles: %s\n", what);
    std::abort();
  }

  void check(int t) const {
    if (!rows_[t] || !row_bytes_[t]) fault("a tile that is not configured was used");
  }

  void check_product(int to, int a, int b) const {
    for (int t : {to, a, b}) check(t);
    if (to == a || to == b || a == b) fault("a product names a tile twice");
    const bool fits = rows_[to] == rows_[a] && row_bytes_[to] == row_bytes_[b] && row_bytes_[a] == 4 * rows_[b];
    if (!fits) fault("the tiles of a product do not fit each other");
  }

  __m512i word(int t, int row, int k) const {
    int32_t x;
    std::memcpy(&x, at_[t][row] + 4 * k, 4);
    return _mm512_set1_epi32(x);
  }

  alignas(64) uint8_t at_[kTiles][kRows][kBytes];
  int rows_[kTiles];
  uint16_t row_bytes_[kTiles];
};

}  // namespace lab

// The compiler's own are macros or functions of these names.
#undef _tile_loadconfig
#undef _tile_release
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#undef _tile_dpbusd
#define _tile_loadconfig(config) lab::EmulatedTiles::own().configure(config)
#define _tile_release() lab::EmulatedTiles::own().release()
#define _tile_loadd(t, from, stride) lab::EmulatedTiles::own().load(t, from, stride)
#define _tile_stream_loadd(t, from, stride) lab::EmulatedTiles::own().load(t, from, stride)
#define _tile_stored(t, to, stride) lab::EmulatedTiles::own().store(t, to, stride)
#define _tile_zero(t) lab::EmulatedTiles::own().zero(t)
#define _tile_dpbf16ps(to, a, b) lab::EmulatedTiles::own().multiply_bf16(to, a, b)
#define _tile_dpbssd(to, a, b) lab::EmulatedTiles::own().multiply_bytes<true>(to, a, b)
#define _tile_dpbusd(to, a, b) lab::EmulatedTiles::own().multiply_bytes<false>(to, a, b)
#endif
#endif
