// For CPUs with AVX-512 (F, DQ, BW, VL): products in float32 whatever the cache holds.

#include "flash.h"

#ifdef FLASH_HAS_AVX512

#define FLASH_WIDTH 16
#include "dot.h"
#include "tile.h"

namespace flash {

static void attend(const Call& c, const Item& item, const Item* next, float* scratch) {
  if (c.has_few(item.q_count * c.group)) return attend_dot<Float>(c, item, next, scratch);
  attend_tiles<Float>(c, item, next, scratch);
}

const Kernels* avx512_kernels() {
  static const Kernels kernels{"avx512", attend_each<attend>};
  return &kernels;
}

}  // namespace flash

#else
const flash::Kernels* flash::avx512_kernels() { return nullptr; }
#endif
