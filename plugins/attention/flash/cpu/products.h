// How the kernels make products, and what they are made of: weights of scores, and numbers of a quantized cache.

#pragma once

#include "simd.h"

namespace {

using flash::Type;

// How products are made. A word is what one lane holds: a float, or a pair of bf16 whose products are summed into a float.
struct Float {
  typedef float Element;
  static constexpr Type kType = Type::f32;
  static constexpr int kPerWord = 1;
  static constexpr bool kTiles = false;
  typedef vf Words;
  static INLINE Words broadcast(const void* p) { return fill(*(const float*)p); }
  static INLINE vf madd(vf acc, Words a, Words b) { return acc + a * b; }
  static INLINE vf reference(vf highest) { return highest; }

  // Numbers of a quantized cache, over unit_of(kFrom).
  template <Type kFrom>
  static INLINE void widen(const int8_t* from, float* to, int count) {
    for (int i = 0; i < count; i += W) store(to + i, load(from, i, kFrom));
  }

  // 2 to the power of scores times a factor, less a reference; see Tiles::Weighing.
  struct Weights {
    vf by, highest;
    INLINE void refer(float factor, vf reference) { by = fill(factor), highest = reference; }
    // Of two keys' scores, rows of L.
    template <int L>
    INLINE void make(const float* scores, float* to, vf& sum) const {
      const vf x = exp2v<false>(load(scores) * by - highest), y = exp2v<false>(load(scores + L) * by - highest);
      store(to, x);
      store(to + L, y);
      sum += x + y;
    }
  };
};

#if FLASH_WIDTH == 16 && defined(__AVX512BF16__) && defined(__AVX512VBMI__)
struct Bf16 {
  typedef uint16_t Element;
  static constexpr Type kType = Type::bf16;
  static constexpr int kPerWord = 2;
  static constexpr bool kTiles = false;
  typedef __m512i Words;
  static INLINE Words broadcast(const void* p) { return _mm512_set1_epi32(load_as<int32_t>(p)); }
  static INLINE vf madd(vf acc, Words a, Words b) { return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b); }

  // 2 to the power of `x * by - highest`, of two scores of each lane, rounded to bf16 and side by side. The exponent is made as
  // a whole number of 128ths, which adding kWhole leaves in the lowest bits of a float: above them it is the exponent of a bf16
  // then, and below nearly its fraction, which is 2^f - 1 and not f. The table has the difference for each of the 128 fractions.
  struct Weights {
    static constexpr float kWhole = 0x1.8p23f;
    vf by, offset;
    __m512i below, below_64;
    INLINE void refer(float factor, vf reference) {
      by = fill(factor * 128);
      offset = (kWhole + 127 * 128) - reference * 128;
      below = _mm512_load_si512(kBelow), below_64 = _mm512_load_si512(kBelow + 64);
    }
    INLINE vf bits(const float* x) const {
      return _mm512_max_ps(_mm512_min_ps(load(x) * by + offset, fill(kWhole + 0x7f80)), fill(kWhole));
    }
    template <int L>
    INLINE void make(const float* scores, float* to, vf& sum) const {
      const __m512i both = pair(bits(scores), bits(scores + L));
      const __m512i made = _mm512_sub_epi16(both, _mm512_maskz_permutex2var_epi8(0x5555'5555'5555'5555, below, both, below_64));
      store(to, (vf)made);
      sum = madd(sum, made, ones());
    }
  };
  alignas(64) static constexpr uint8_t kBelow[128] = {
      0, 0, 1, 1, 1, 1, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 6, 6, 6, 6, 6, 7, 7, 7, 7, 7, 8, 8, 8, 8, 8, 8, 9, 9, 9,
      9, 9, 9, 9, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11,
      11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 10, 10, 10, 10, 10, 10, 10, 10, 10, 9, 9, 9, 9, 9, 9, 9, 8, 8, 8, 8, 8, 7,
      7, 7, 7, 7, 6, 6, 6, 6, 5, 5, 5, 4, 4, 4, 3, 3, 3, 3, 2, 2, 1, 1, 1, 0};

  // Lane by lane the lower halves of x and y.
  static INLINE Words pair(vf x, vf y) {
    const __m512i lower = _mm512_set4_epi32(0x0d0c'0000, 0x0908'0000, 0x0504'0000, 0x0100'0000);
    return _mm512_mask_shuffle_epi8((__m512i)x, 0xcccc'cccc'cccc'cccc, (__m512i)y, lower);
  }
  static INLINE vf reference(vf highest) { return _mm512_roundscale_ps(highest, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC); }

  // The halves of the bf16 that each magnitude of a quantized cache is, over unit_of(kFrom): it is exact.
  struct Halves {
    uint8_t lower[128], upper[128];
    constexpr Halves(Type from) : lower(), upper() {
      for (int i = 0; i < 128; i++) {
        float value = i;
        if (from == Type::fp8) {
          value = (i >= 8 ? i % 8 + 8 : i) * 0x1p-17f;
          for (int exponent = 1; exponent < i / 8; exponent++) value *= 2;
        }
        const uint32_t bits = i == 127 && from == Type::fp8 ? 0x7fc0'0000 : __builtin_bit_cast(uint32_t, value);
        lower[i] = bits >> 16;
        upper[i] = bits >> 24;
      }
    }
  };

  static constexpr int kAtOnce = 128;  // numbers of a quantized cache

  // Numbers of a quantized cache, over unit_of(kFrom); `count` is a multiple of kAtOnce.
  template <Type kFrom>
  static INLINE void widen(const int8_t* from, uint16_t* to, int count) {
    for (int i = 0; i < count; i += kAtOnce) {
      if (kFrom == Type::fp8 && widen_normal(from + i, to + i)) continue;
      widen_by_table<kFrom>(from + i, to + i);
    }
  }

  // Lower and upper bytes of 64 words into their places. The bytes are of numbers in the order that `in_turn` makes.
  static INLINE void interleave(__m512i lower, __m512i upper, uint16_t* to) {
    _mm512_storeu_si512(to, _mm512_unpacklo_epi8(lower, upper));
    _mm512_storeu_si512(to + 32, _mm512_unpackhi_epi8(lower, upper));
  }
  static INLINE __m512i in_turn(const int8_t* from) {
    return _mm512_permutexvar_epi64(_mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0), _mm512_loadu_si512(from));
  }

  // Of 64 numbers each the lower and the upper byte of the bf16 that it is.
  struct Bytes {
    __m512i lower, upper;
    INLINE void store(uint16_t* to) const { interleave(lower, upper, to); }
  };

#ifdef __GFNI__
  // Twice the magnitude of e4m3 and 2, as a byte: 16 and less of subnormal numbers, zero and NaN.
  static INLINE __m512i kind_of(__m512i x) { return _mm512_add_epi8(_mm512_add_epi8(x, x), _mm512_set1_epi8(2)); }
  static INLINE bool are_normal(__m512i kinds) { return _mm512_cmple_epu8_mask(kinds, _mm512_set1_epi8(16)) == 0; }

  // Of other e4m3. A bf16 over 2^8 has the exponent 112 higher: below the sign in the upper byte is 0111 and the upper three
  // bits of the exponent, in the lower one its last bit and the fraction. They are made by matrices whose rows say which bit of
  // x each of them is, from the highest.
  static INLINE Bytes normal_bytes(__m512i x) {
    return {_mm512_gf2p8affine_epi64_epi8(x, _mm512_set1_epi64(0x0000000001020408), 0),
            _mm512_gf2p8affine_epi64_epi8(x, _mm512_set1_epi64(0x1020400000000080), 0x38)};
  }
#endif

  static INLINE bool widen_normal(const int8_t* from, uint16_t* to) {
#ifdef __GFNI__
    const __m512i x[2] = {in_turn(from), in_turn(from + 64)};
    if (__builtin_expect(!are_normal(_mm512_min_epu8(kind_of(x[0]), kind_of(x[1]))), false)) return false;
    for (int i = 0; i < 2; i++) normal_bytes(x[i]).store(to + 64 * i);
    return true;
#else
    return false;
#endif
  }

  template <Type kFrom>
  static INLINE void widen_by_table(const int8_t* from, uint16_t* to) {
    for (int i = 0; i < kAtOnce; i += 64) bytes_by_table<kFrom>(in_turn(from + i)).store(to + i);
  }

  template <Type kFrom>
  static INLINE Bytes bytes_by_table(__m512i x) {
    alignas(64) static constexpr Halves kHalves(kFrom);
    const __m512i sign = _mm512_set1_epi8(int8_t(0x80));
    const __m512i low0 = _mm512_loadu_si512(kHalves.lower), low1 = _mm512_loadu_si512(kHalves.lower + 64);
    const __m512i high0 = _mm512_loadu_si512(kHalves.upper), high1 = _mm512_loadu_si512(kHalves.upper + 64);
    const __m512i magnitude = kFrom == Type::i8 ? _mm512_abs_epi8(x) : x;
    const __m512i positive = _mm512_permutex2var_epi8(high0, magnitude, high1);
    const __m512i upper = _mm512_ternarylogic_epi64(positive, x, sign, 0xf8);  // positive | (x & sign)
    return {_mm512_permutex2var_epi8(low0, magnitude, low1), upper};
  }

  // 64 numbers each of four rows of e4m3, as they lie there.
  static INLINE void bytes_of_four(const char* from, int stride, Bytes (&to)[4]) {
    __m512i x[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) x[i] = _mm512_loadu_si512(from + i * stride);
#ifdef __GFNI__
    __m512i kinds = kind_of(x[0]);
#pragma GCC unroll 4
    for (int i = 1; i < 4; i++) kinds = _mm512_min_epu8(kinds, kind_of(x[i]));
    if (__builtin_expect(are_normal(kinds), true)) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) to[i] = normal_bytes(x[i]);
      return;
    }
#endif
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) to[i] = bytes_by_table<Type::fp8>(x[i]);
  }

  static INLINE Words ones() { return _mm512_set1_epi32(0x3f80'3f80); }
};
#endif

}  // namespace
