// Sixteen float32 lanes in the compiler's own vector type: one AVX-512 register, or as many narrower ones as the CPU has.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#ifdef __AVX512BF16__
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

// As a value is once it has been stored in T.
template <typename T>
inline Floats rounded(Floats sum) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    return as_floats(__builtin_convertvector(narrow(sum), Words) << 16);
  } else {
    return sum;
  }
}

}  // namespace lab
