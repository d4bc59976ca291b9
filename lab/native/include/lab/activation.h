// The activations of gated feed-forward layers.
#pragma once

#include "vectors.h"

namespace lab {

// e to the power of x: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2], to about one unit in the last place.
inline Floats exponential(Floats x) {
  x = at_least(-87.0f, at_most(88.0f, x));
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number, which the low bits then hold
  const Floats shifted = x * 1.44269504088896341f + kMagic;
  const Floats n = shifted - kMagic;
  const Floats r = (x - n * 0.693145751953125f) - n * 1.42860677e-6f;
  Floats p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return as_floats(as_words(p) + (as_words(shifted) << 23));
}

// x times the sigmoid of z.
inline Floats gated(Floats x, Floats z) {
  const Floats divisor = exponential(-z) + 1.0f;
#ifdef __AVX512F__
  Floats inverse = (Floats)_mm512_rcp14_ps((__m512)divisor);
  inverse = inverse * (2.0f - divisor * inverse);
  return x * inverse;
#else
  return x / divisor;
#endif
}

inline Floats silu(Floats x) { return gated(x, x); }

// x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))), which is x times the sigmoid of twice that angle.
inline Floats gelu_tanh(Floats x) { return gated(x, x * (x * x * 0.07135481627159886f + 1.5957691216057308f)); }

}  // namespace lab
