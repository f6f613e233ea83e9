// Which kernels this CPU has, and weights packed for them.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <vector>

#include "kernels.h"

using namespace headlong;

namespace headlong {

const Kernels* chosen(const char* name) {
  for (const Kernels* kernels : {avx512_kernels(), avx2_kernels(), baseline_kernels()})
    if (kernels && (!name || !*name || !std::strcmp(kernels->name, name))) return kernels;
  return nullptr;
}

}  // namespace headlong

extern "C" {

// Name of the kernels that ``wanted`` (null or "": the best ones) gives on this CPU; null where there are none.
const char* headlong_kernels(const char* wanted) {
  const Kernels* kernels = chosen(wanted);
  return kernels ? kernels->name : nullptr;
}

size_t headlong_packed_bytes(const char* kernels, int32_t n, int32_t k, int32_t is_int8) {
  return chosen(kernels)->packed_bytes(n, k, is_int8);
}

// Packs a weight [n, k]. For int8 each output is rotated (``rotation`` inputs at a time; 0: not) and gets a scale of its
// own, its largest value being 127. scale: room for n rounded up to 16. Returns 1 if memory ran out.
int32_t headlong_pack(const char* kernels_name, const float* source, int32_t n, int32_t k, int32_t is_int8,
                      int32_t rotation, void* packed, float* scale) {
  const Kernels* kernels = chosen(kernels_name);
  if (!is_int8) {
    kernels->pack_float(source, n, k, packed);
    return 0;
  }
  try {
    std::vector<int8_t> quantised((size_t)n * k);
    std::vector<float> row(k);
    for (int32_t i = 0; i < n; i++) {
      std::memcpy(row.data(), source + (size_t)i * k, k * sizeof(float));
      if (rotation) kernels->rotate(row.data(), k, rotation);
      float most = 0.f;
      for (float value : row) most = std::max(most, std::fabs(value));
      const float step = most / 127.f;
      for (int32_t j = 0; j < k; j++)
        quantised[(size_t)i * k + j] = step > 0.f ? (int8_t)std::lrintf(row[j] / step) : (int8_t)0;
      // The transform is unnormalised on both sides: together they are ``rotation`` times too large.
      scale[i] = rotation ? step / (float)rotation : step;
    }
    for (int32_t i = n; i % kPanel; i++) scale[i] = 0.f;
    kernels->pack_int8(quantised.data(), n, k, packed);
  } catch (const std::bad_alloc&) {
    return 1;
  }
  return 0;
}

}  // extern "C"
