// Which products a processor makes faster.
#pragma once

namespace lab {

// Whether products of float32 are made faster than those of pairs of bfloat16. Intel's processors take two cycles for a vector
// of pairs, four times as long as for one of floats.
inline bool floats_are_faster() {
#ifdef __AVX512BF16__
  static const bool is_intel = __builtin_cpu_is("intel");
  return is_intel;
#else
  return true;
#endif
}

}  // namespace lab
