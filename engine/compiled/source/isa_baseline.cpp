// Whatever the compiler makes of plain vectors of four floats: any CPU.
#include "kernels.h"

namespace headlong {
namespace {

constexpr char kName[] = "baseline";
constexpr int kLanes = 4;
constexpr int kTileRows = 5;
constexpr int kWideMix[kQueries] = {8, 4, 4, 4};
typedef float Vec __attribute__((vector_size(16)));
typedef uint64_t Words __attribute__((vector_size(16)));

inline Vec splat(float x) { return Vec{x, x, x, x}; }
inline Vec fused(Vec a, Vec b, Vec c) { return a * b + c; }

inline Words product32(Words a, Words b) { return (a & 0xffffffffu) * (b & 0xffffffffu); }

inline void quantise16(const float* x, float inverse, int16_t* out) {
  for (int i = 0; i < 16; i++) out[i] = (int16_t)__builtin_rintf(x[i] * inverse);
}

template <int kCount>
inline void int8_rows(const int8_t* weights, const int16_t* inputs, int32_t k, Ahead, int32_t* totals) {
  for (int i = 0; i < kCount * kPanel; i++) totals[i] = 0;
  for (int32_t i = 0; i < k; i += 2) {
    const int8_t* at = weights + (size_t)i * kPanel;
    for (int r = 0; r < kCount; r++) {
      const int32_t a = inputs[(size_t)r * k + i], b = inputs[(size_t)r * k + i + 1];
      for (int c = 0; c < kPanel; c++) totals[r * kPanel + c] += a * at[2 * c] + b * at[2 * c + 1];
    }
  }
}

template <int kCount>
inline void float_rows(const float* weights, const float* inputs, int32_t k, Ahead, float* products) {
  for (int i = 0; i < kCount * kPanel; i++) products[i] = 0.f;
  for (int32_t i = 0; i < k; i++)
    for (int r = 0; r < kCount; r++)
      for (int c = 0; c < kPanel; c++)
        products[r * kPanel + c] += weights[(size_t)i * kPanel + c] * inputs[(size_t)r * k + i];
}

#include "kernels_common.h"

}  // namespace

const Kernels* baseline_kernels() { return &kernels; }

}  // namespace headlong
