// Vectors of floats for the instruction set that the including file names: FLASH_WIDTH floats each, 16, 8 or 4.
//
// Included once per translation unit, after FLASH_WIDTH is defined; everything is in an anonymous namespace, since each unit has
// its own. Where an operation has no portable spelling that compilers turn into one instruction, it is written with intrinsics.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "flash.h"

#define INLINE inline __attribute__((always_inline))

namespace {

constexpr int W = FLASH_WIDTH;
typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef uint16_t vh __attribute__((vector_size(2 * W)));

constexpr float kLog2e = 1.44269504088896341f;
constexpr float kLowest = -0x1p100f;

template <class V>
INLINE V load_as(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

INLINE vf load(const float* p) { return load_as<vf>(p); }
INLINE void store(float* p, vf v) { std::memcpy(p, &v, sizeof v); }
INLINE vf fill(float x) { return x - vf{}; }

INLINE float from_bf16(uint16_t x) {
  const uint32_t bits = uint32_t(x) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}

INLINE vf load_bf16(const uint16_t* p) { return (vf)(__builtin_convertvector(load_as<vh>(p), vu) << 16); }

// Rounds to nearest even. NaN stays NaN: its payload gets a bit that rounding cannot carry away.
INLINE void store_bf16(uint16_t* p, vf v) {
#if FLASH_WIDTH == 16 && defined(__AVX512BF16__)
  const __m256bh h = _mm512_cvtneps_pbh(v);
  std::memcpy(p, &h, sizeof h);
#else
  const vu bits = (vu)v;
  const vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const vu quiet = (bits >> 16) | 0x40;
  const vh h = __builtin_convertvector(v == v ? rounded : quiet, vh);
  std::memcpy(p, &h, sizeof h);
#endif
}

#if FLASH_WIDTH == 16

INLINE vf vmax(vf a, vf b) { return _mm512_max_ps(a, b); }
INLINE vf load_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
INLINE void store_f16(uint16_t* p, vf v) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

// 2 to the power of x; exact zero for minus infinity, infinity for what is too large. The polynomial is on [0, 1), fitted to the least relative error.
template <bool kRough>
INLINE vf exp2v(vf x) {
  const vf r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // x - floor(x)
  vf p;
  if constexpr (kRough) {
    p = fill(0.07802451401948929f);
    p = p * r + 0.2260671705007553f;
    p = p * r + 0.6958335638046265f;
    p = p * r + 0.9999251961708069f;
  } else {
    p = fill(0.0018775765784084797f);
    p = p * r + 0.008989340625703335f;
    p = p * r + 0.05582631751894951f;
    p = p * r + 0.24015361070632935f;
    p = p * r + 0.6931530833244324f;
    p = p * r + 0.9999999403953552f;
  }
  return _mm512_scalef_ps(p, x);
}

#else

#if FLASH_WIDTH == 8
INLINE vf vmax(vf a, vf b) { return _mm256_max_ps(a, b); }
INLINE vf vmin(vf a, vf b) { return _mm256_min_ps(a, b); }
INLINE vf floorv(vf a) { return _mm256_floor_ps(a); }
INLINE vf load_f16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
INLINE void store_f16(uint16_t* p, vf v) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#else
INLINE vf vmax(vf a, vf b) { return a > b ? a : b; }
INLINE vf vmin(vf a, vf b) { return a < b ? a : b; }
INLINE vf floorv(vf a) {
  const vf whole = __builtin_convertvector(__builtin_convertvector(a, vi), vf);
  return whole > a ? whole - 1.0f : whole;
}
INLINE vf load_f16(const uint16_t* p) {
  vf v;
  for (int i = 0; i < W; i++) {
    _Float16 x;
    std::memcpy(&x, p + i, 2);
    v[i] = float(x);
  }
  return v;
}
INLINE void store_f16(uint16_t* p, vf v) {
  for (int i = 0; i < W; i++) {
    const _Float16 x = _Float16(v[i]);
    std::memcpy(p + i, &x, 2);
  }
}
#endif

template <bool kRough>
INLINE vf exp2v(vf x) {
  const vf bounded = vmin(vmax(x, fill(-126.0f)), fill(128.0f));
  const vf whole = floorv(bounded);
  const vf r = bounded - whole;
  vf p = fill(0.0018775765784084797f);
  p = p * r + 0.008989340625703335f;
  p = p * r + 0.05582631751894951f;
  p = p * r + 0.24015361070632935f;
  p = p * r + 0.6931530833244324f;
  p = p * r + 0.9999999403953552f;
  const vf power = (vf)((__builtin_convertvector(whole, vi) + 127) << 23);
  return x < -126.0f ? vf{} : p * power;
}

#endif

// What loading a number of a quantized cache leaves to be multiplied with.
constexpr float unit_of(flash::Type type) { return type == flash::Type::fp8 ? 256.0f : 1.0f; }

typedef int8_t vb __attribute__((vector_size(W)));

INLINE vf load_i8(const int8_t* p) {
#if FLASH_WIDTH == 16
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif FLASH_WIDTH == 8
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
  return __builtin_convertvector(__builtin_convertvector(load_as<vb>(p), vi), vf);
#endif
}

// With the exponent in its place the bits are those of a half float; sign extension leaves a second sign beside the first.
INLINE vf load_fp8(const int8_t* p) {
#if FLASH_WIDTH == 16
  const __m256i x = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)), 7);
  return _mm512_cvtph_ps(_mm256_and_si256(x, _mm256_set1_epi16(int16_t(0xbfff))));
#elif FLASH_WIDTH == 8
  const __m128i x = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)p)), 7);
  return _mm256_cvtph_ps(_mm_and_si128(x, _mm_set1_epi16(int16_t(0xbfff))));
#else
  const vi x = __builtin_convertvector(load_as<vb>(p), vi), bits = (x & 0x7f) << 20;
  const vf ordinary = (vf)(bits + (112 << 23)), small = (vf)(bits + (113 << 23)) - 0x1p-14f;
  const vf magnitude = (x & 0x78) == 0 ? small : ordinary;
  return (vf)((vi)magnitude | (x & int32_t(0x80000000)));
#endif
}

INLINE vf load(const void* p, int64_t i, flash::Type type) {
  switch (type) {
    case flash::Type::f32: return load((const float*)p + i);
    case flash::Type::bf16: return load_bf16((const uint16_t*)p + i);
    case flash::Type::i8: return load_i8((const int8_t*)p + i);
    case flash::Type::fp8: return load_fp8((const int8_t*)p + i);
    default: return load_f16((const uint16_t*)p + i);
  }
}

INLINE void store(void* p, int64_t i, vf v, flash::Type type) {
  switch (type) {
    case flash::Type::f32: return store((float*)p + i, v);
    case flash::Type::bf16: return store_bf16((uint16_t*)p + i, v);
    default: return store_f16((uint16_t*)p + i, v);
  }
}

INLINE vf tanhv(vf x) {
  const vf e = exp2v<false>(vmax(-vmax(-x, fill(-20.0f)), fill(-20.0f)) * (2.0f * kLog2e));
  return (e - 1.0f) / (e + 1.0f);
}

// Halves of width H exchanged between two vectors: `low` keeps a's first half of each piece of 2H and takes b's first into the
// second, `high` does the same with the second halves. Both the transposition and the sums across vectors are made of them.
template <int H, int... I>
INLINE vf low_of(vf a, vf b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, (I % (2 * H) < H ? I : W + I - H)...);
}
template <int H, int... I>
INLINE vf high_of(vf a, vf b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, (I % (2 * H) < H ? I + H : W + I)...);
}
template <int H>
INLINE vf low(vf a, vf b) { return low_of<H>(a, b, std::make_integer_sequence<int, W>()); }
template <int H>
INLINE vf high(vf a, vf b) { return high_of<H>(a, b, std::make_integer_sequence<int, W>()); }

template <int H = W / 2>
INLINE void transpose(vf (&r)[W]) {
#pragma GCC unroll 16
  for (int i = 0; i < W; i++) {
    if (i % (2 * H) < H) {
      const vf a = r[i], b = r[i + H];
      r[i] = low<H>(a, b);
      r[i + H] = high<H>(a, b);
    }
  }
  if constexpr (H > 1) transpose<H / 2>(r);
}

// Lane i of the result is the sum of r[i]'s lanes.
template <int H = W / 2>
INLINE vf sums(vf (&r)[W]) {
#pragma GCC unroll 16
  for (int i = 0; i < H; i++) r[i] = low<H>(r[i], r[i + H]) + high<H>(r[i], r[i + H]);
  if constexpr (H > 1) return sums<H / 2>(r);
  return r[0];
}

#if FLASH_WIDTH == 16
INLINE float max_of(vf v) { return _mm512_reduce_max_ps(v); }
INLINE float sum_of(vf v) { return _mm512_reduce_add_ps(v); }
#else
INLINE float max_of(vf v) {
  float m = v[0];
  for (int i = 1; i < W; i++) m = v[i] > m ? v[i] : m;
  return m;
}
INLINE float sum_of(vf v) {
  float s = 0;
  for (int i = 0; i < W; i++) s += v[i];
  return s;
}
#endif

// Whether any lane of a comparison is true.
INLINE bool any(vi x) {
#if FLASH_WIDTH == 16
  return _mm512_test_epi32_mask((__m512i)x, (__m512i)x) != 0;
#elif FLASH_WIDTH == 8
  return _mm256_movemask_ps((__m256)x) != 0;
#else
  return (x[0] | x[1] | x[2] | x[3]) != 0;
#endif
}

INLINE vi lane_numbers() {
  vi v;
  for (int i = 0; i < W; i++) v[i] = i;
  return v;
}

}  // namespace
