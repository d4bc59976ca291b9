// What is asked of memory ahead of its use. A request that goes astray is slow and not wrong, so no result tells of it: built with
// FLASH_WATCHED, each is held against the blocks that belong to the call, and memory that nobody wrote holds what cannot pass for
// an address, a count or a result.

#pragma once

#include <cstddef>
#include <cstdint>
#ifdef FLASH_WATCHED
#include <atomic>
#include <cstring>
#include <vector>
#endif

namespace flash {

#ifdef FLASH_WATCHED

// The blocks of the call at hand, one at a time, and the requests of all calls.
struct Watch {
  static inline const char* cache = nullptr;
  static inline int64_t block_bytes = 1;
  static inline std::vector<bool> blocks;
  static inline std::atomic<int64_t> asked{0}, astray{0};

  static void begin(const void* cache_of_call, int64_t bytes) {
    cache = (const char*)cache_of_call, block_bytes = bytes;
    blocks.clear();
  }

  static void add(int64_t block) {
    if (block >= int64_t(blocks.size())) blocks.resize(block + 1);
    blocks[block] = true;
  }

  static bool owns(const char* from, int64_t first, int64_t last) {
    const int64_t at = int64_t(from) - int64_t(cache) + first, block = at / block_bytes;
    if (first > last || at < 0 || block >= int64_t(blocks.size()) || !blocks[block]) return false;
    return at % block_bytes + (last - first) <= block_bytes;
  }
};

// Bytes `first` to `last` behind `from` are in one block of the call.
inline bool may_ask(const char* from, int64_t first, int64_t last) {
  const bool is_owned = Watch::owns(from, first, last);
  ++(is_owned ? Watch::asked : Watch::astray);
  return is_owned;
}

// Of scratch memory all is NaN, and the stack holds large numbers.
inline __attribute__((noinline)) void forget(float* scratch, size_t count) {
  std::memset(scratch, 0xff, count * sizeof(float));
  char stack[1 << 16];
  std::memset(stack, 0x5a, sizeof stack);
  asm volatile("" ::"r"(stack) : "memory");
}

#else

constexpr bool may_ask(const char*, int64_t, int64_t) { return true; }

#endif

}  // namespace flash
