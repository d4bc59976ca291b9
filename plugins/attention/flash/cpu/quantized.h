// Quantized caches: what is stored times a scale is the value. The numbers are int8, or fp8 with 4 bits of exponent and 3 of mantissa.
//
// kv[P, K, S]: of each block and KV head the keys [B, DP], the values [B, DP], then the scales of the keys [B] and of the values
// [B] in bf16. Or, with scales that are fixed for the layer, kv[P + 1, K, 2, B, DP], where the last block begins with the scales
// of the keys [K] and of the values [K] in float32.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "flash.h"

namespace flash {

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

inline float largest(Type type) { return type == Type::i8 ? 127.0f : 448.0f; }

// Of a row: its largest magnitude over the largest number, rounded up to bf16. NaN and infinity stay what they are.
inline uint16_t scale_of(const float* x, int count, Type type) {
  uint32_t highest = 0;  // as an integer, which orders magnitudes as numbers and NaN above them
  for (int i = 0; i < count; i++) highest = std::max(highest, bits_of(x[i]) & 0x7fffffff);
  if (highest > 0x7f800000) return 0x7fc0;
  const float wanted = float_of(highest) / largest(type);
  return uint16_t(std::max<uint32_t>((bits_of(wanted) + 0xffff) >> 16, 0x0080));
}

// x over the scale, clipped and rounded to the nearest number, ties to even.
inline int8_t to_i8(float x, float scale) {
  constexpr float kWhole = 12582912.0f;  // beside it a float has no fraction
  const float y = std::min(std::max(x / scale, -127.0f), 127.0f);
  return int8_t(int32_t(bits_of(y + kWhole)) - int32_t(bits_of(kWhole)));
}

inline int8_t to_fp8(float x, float scale) {
  constexpr float kStep = 16384.0f;  // beside it a float has the steps of the smallest numbers, 2^-9
  const float y = std::min(std::max(x / scale, -448.0f), 448.0f);
  const uint32_t magnitude = bits_of(y) & 0x7fffffff, sign = bits_of(y) >> 31 << 7;
  const uint32_t rounded = ((magnitude + 0x7ffff + ((magnitude >> 20) & 1)) >> 20) - (120 << 3);
  const uint32_t small = bits_of(float_of(magnitude) + kStep) - bits_of(kStep);
  return int8_t((magnitude < bits_of(0x1p-6f) ? small : rounded) | sign);
}

inline void quantize(const float* x, int count, float scale, Type type, int8_t* to) {
  if (type == Type::i8) {
    for (int i = 0; i < count; i++) to[i] = to_i8(x[i], scale);
  } else {
    for (int i = 0; i < count; i++) to[i] = to_fp8(x[i], scale);
  }
}

}  // namespace flash
