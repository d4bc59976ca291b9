// For CPUs that multiply pairs of bf16: where queries and cache are bf16, products are of bf16 and sums in float32.

#include "flash.h"

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__) && defined(__AVX512DQ__) && defined(__AVX512BW__) && defined(__AVX512VL__)

#define FLASH_WIDTH 16
#include "dot.h"
#include "tile.h"

namespace flash {

static void attend(const Call& c, const Item& item, const Item* next, float* scratch) {
  const bool few = c.has_few(item.q_count * c.group);
  // What must be dequantized first is read faster as floats, whose products the processor makes at twice the rate.
  if (!c.has_bf16_products() || (few && c.is_quantized())) return avx512_kernels()->attend(c, &item, 1, next, scratch);
  if (few) return attend_dot<Bf16>(c, item, next, scratch);
  attend_tiles<Bf16>(c, item, next, scratch);
}

const Kernels* avx512_bf16_kernels() {
  static const Kernels kernels{"avx512_bf16", attend_each<attend>};
  return &kernels;
}

}  // namespace flash

#else
const flash::Kernels* flash::avx512_bf16_kernels() { return nullptr; }
#endif
