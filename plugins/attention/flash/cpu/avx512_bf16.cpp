// For CPUs that multiply pairs of bf16: where queries and cache are bf16, products are of bf16 and sums in float32; or, where the
// CPU makes products of floats faster, those of few query vectors only.

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

// Intel's processors take two cycles for a vector of bf16 products, four times as long as for one of floats, so that floats are
// multiplied at twice the rate. That pays where keys and values, once made floats, serve more than one vector of lanes.
static void attend_mixed(const Call& c, const Item& item, const Item* next, float* scratch) {
  const bool pays = item.q_count * c.group > W && !c.batch_invariant;  // whose bits must not go by an item's lanes
  pays ? avx512_kernels()->attend(c, &item, 1, next, scratch) : attend(c, item, next, scratch);
}

const Kernels* avx512_bf16_kernels() {
  static const Kernels kernels{"avx512_bf16", attend_each<attend>};
  return &kernels;
}

const Kernels* avx512_mixed_kernels() {
  static const Kernels kernels{"avx512_mixed", attend_each<attend_mixed>};
  return __builtin_cpu_is("intel") ? &kernels : nullptr;
}

}  // namespace flash

#else
const flash::Kernels* flash::avx512_bf16_kernels() { return nullptr; }
const flash::Kernels* flash::avx512_mixed_kernels() { return nullptr; }
#endif
