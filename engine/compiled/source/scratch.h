// Aligned scratch that only grows.
#pragma once

#include <cstdlib>
#include <memory>
#include <new>

namespace headlong {

class Scratch {
 public:
  void* bytes(size_t size) {
    if (size > size_) {
      memory_.reset();
      size_ = 0;
      void* fresh = nullptr;
      if (posix_memalign(&fresh, 64, size + 4096)) throw std::bad_alloc();
      memory_.reset(fresh);
      size_ = size;
    }
    return memory_.get();
  }
  float* floats(size_t count) { return (float*)bytes(count * sizeof(float)); }

 private:
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };

  std::unique_ptr<void, Free> memory_;
  size_t size_ = 0;
};

}  // namespace headlong
