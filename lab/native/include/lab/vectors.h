// Sixteen float32 lanes in the compiler's own vector type: one AVX-512 register, or as many narrower ones as the CPU has.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace lab {

constexpr int kLanes = 16;

typedef float Floats __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef int32_t Ids __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

template <typename V>
inline V load(const void* from) {
  V v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

constexpr Ids kCount = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

inline Floats zeros() { return Floats{}; }

inline Floats as_floats(Words w) {
  Floats f;
  std::memcpy(&f, &w, sizeof f);
  return f;
}

inline Words as_words(Floats f) {
  Words w;
  std::memcpy(&w, &f, sizeof w);
  return w;
}

// One value in all lanes.
inline Floats splat(float value) { return value - Floats{}; }

// The lesser and the greater of a value and a bound. What is not a number stays so.
inline Floats at_most(float bound, Floats x) {
#ifdef __AVX512F__
  return (Floats)_mm512_min_ps((__m512)splat(bound), (__m512)x);
#else
  return x > bound ? splat(bound) : x;
#endif
}

inline Floats at_least(float bound, Floats x) {
#ifdef __AVX512F__
  return (Floats)_mm512_max_ps((__m512)splat(bound), (__m512)x);
#else
  return x < bound ? splat(bound) : x;
#endif
}

// bfloat16, kept as its bits.
struct BFloat16 {
  uint16_t bits;
};

inline float widen(BFloat16 value) {
  const uint32_t word = uint32_t{value.bits} << 16;
  float f;
  std::memcpy(&f, &word, sizeof f);
  return f;
}

// To bfloat16, to nearest even; not a number stays one.
inline Halves narrow(Floats f) {
#ifdef __AVX512BF16__
  return (Halves)_mm512_cvtneps_pbh((__m512)f);
#else
  const Words w = as_words(f);
  const Words rounded = (w + 0x7fff + ((w >> 16) & 1)) >> 16;
  return __builtin_convertvector(f == f ? rounded : (w >> 16) | 0x40, Halves);
#endif
}

inline Floats widen(Halves halves) {
#ifdef __AVX512F__
  return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)halves), 16);  // GCC 12 makes four instructions of the two
#else
  return as_floats(__builtin_convertvector(halves, Words) << 16);
#endif
}

// As a value is once it has been stored in T.
template <typename T>
inline Floats rounded(Floats sum) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    return widen(narrow(sum));
  } else {
    return sum;
  }
}

}  // namespace lab
