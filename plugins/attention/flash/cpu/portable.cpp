// For any CPU: vectors of four floats in the compiler's own spelling.

#include "flash.h"

#if defined(FLASH_EVERY_ISA) || !(defined(__AVX2__) && defined(__FMA__) && defined(__F16C__))

#define FLASH_WIDTH 4
#include "dot.h"
#include "tile.h"

namespace flash {

static void attend(const Call& c, const Item& item, const Item* next, float* scratch) {
  if (c.has_few(item.q_count * c.group)) return attend_dot<Float>(c, item, next, scratch);
  attend_tiles<Float>(c, item, next, scratch);
}

const Kernels* portable_kernels() {
  static const Kernels kernels{"portable", attend_each<attend>};
  return &kernels;
}

}  // namespace flash

#else
const flash::Kernels* flash::portable_kernels() { return nullptr; }
#endif
