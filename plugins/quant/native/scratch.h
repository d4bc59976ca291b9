// Memory that kernels copy inputs to.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

namespace lab {

// Memory of this thread that lasts until the thread ends, so that no product asks the system for any.
class Scratch {
 public:
  template <typename T>
  T* get(int64_t count) {
    const size_t size = (count * sizeof(T) + 4095) / 4096 * 4096;
    if (size > size_) {
      memory_.reset(static_cast<char*>(std::aligned_alloc(4096, size)));
      if (!memory_) throw std::bad_alloc();
      std::memset(memory_.get(), 0, size);
      size_ = size;
    }
    return reinterpret_cast<T*>(memory_.get());
  }

 private:
  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };
  std::unique_ptr<char, Free> memory_;
  size_t size_ = 0;
};

}  // namespace lab
