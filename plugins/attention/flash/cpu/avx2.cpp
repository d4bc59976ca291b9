// For CPUs with AVX2, FMA and F16C.

#include "flash.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && (defined(FLASH_EVERY_ISA) || !defined(FLASH_HAS_AVX512))

#define FLASH_WIDTH 8
#include "dot.h"
#include "tile.h"

namespace flash {

static void attend(const Call& c, const Item& item, const Item* next, float* scratch) {
  if (c.has_few(item.q_count * c.group)) return attend_dot<Float>(c, item, next, scratch);
  attend_tiles<Float>(c, item, next, scratch);
}

const Kernels* avx2_kernels() {
  static const Kernels kernels{"avx2", attend_each<attend>};
  return &kernels;
}

}  // namespace flash

#else
const flash::Kernels* flash::avx2_kernels() { return nullptr; }
#endif
