// For CPUs that multiply pairs of bf16 and fours of bytes: where queries are bf16, and the cache is or is quantized. Sums are in
// float32. Where the CPU makes products of floats faster, those of pairs are for few query vectors only.

#include "flash.h"

#if defined(FLASH_HAS_AVX512) && defined(__AVX512BF16__) && defined(__AVX512VBMI__) && defined(__AVX512VNNI__)

#define FLASH_WIDTH 16
#include "dot.h"
#include "lab/products.h"
#include "tile.h"
#include "vectors.h"
#include "vectors_i8.h"

namespace flash {

// Up to four lanes, and more by dot products.
static void attend_few(const Call& c, const Item& item, const Item* next, float* scratch) {
  if (item.q_count * c.group <= ByteVectors::kLanes) {
    if (ByteVectors::takes(c)) return ByteVectors(c, item, next, scratch).run();
    if (FloatVectors<Type::bf16>::takes(c)) return FloatVectors<Type::bf16>(c, item, next, scratch).run();
    if (FloatVectors<Type::fp8>::takes(c)) return FloatVectors<Type::fp8>(c, item, next, scratch).run();
  }
  // What must be dequantized first is read faster as floats, whose products the processor makes at twice the rate.
  if (c.is_quantized()) return avx512_kernels()->attend(c, &item, 1, next, scratch);
  attend_dot<Bf16>(c, item, next, scratch);
}

static void attend(const Call& c, const Item& item, const Item* next, float* scratch) {
  if (!c.has_bf16_products()) return avx512_kernels()->attend(c, &item, 1, next, scratch);
  if (c.has_few(item.q_count * c.group)) return attend_few(c, item, next, scratch);
  attend_tiles<Bf16>(c, item, next, scratch);
}

// Where the processor multiplies floats at twice the rate. That pays where keys and values, once made floats, serve more than
// one vector of lanes.
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
  return lab::floats_are_faster() ? &kernels : nullptr;
}

}  // namespace flash

#else
const flash::Kernels* flash::avx512_bf16_kernels() { return nullptr; }
const flash::Kernels* flash::avx512_mixed_kernels() { return nullptr; }
#endif
