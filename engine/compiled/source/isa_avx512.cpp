// AVX-512 with VNNI: weights of 8 bits widened to 16, multiplied and summed exactly by one instruction.
#include "kernels.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
#include <immintrin.h>

namespace headlong {
namespace {

constexpr char kName[] = "avx512-vnni";
constexpr int kLanes = 16;
constexpr int kTileRows = 16;
constexpr int kWideMix[kQueries] = {4, 4, 4, 4};
typedef float Vec __attribute__((vector_size(64)));
typedef uint64_t Words __attribute__((vector_size(64)));

inline Vec splat(float x) { return (Vec)_mm512_set1_ps(x); }
inline Vec fused(Vec a, Vec b, Vec c) { return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }

inline Words product32(Words a, Words b) { return (Words)_mm512_mul_epu32((__m512i)a, (__m512i)b); }

inline void quantise16(const float* x, float inverse, int16_t* out) {
  __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x), _mm512_set1_ps(inverse)));
  _mm256_storeu_si256((__m256i*)out, _mm512_cvtsepi32_epi16(whole));
}

template <int kCount>
inline void int8_rows(const int8_t* weights, const int16_t* inputs, int32_t k, Ahead ahead, int32_t* totals) {
  __m512i sums[kCount];
  for (int r = 0; r < kCount; r++) sums[r] = _mm512_setzero_si512();
  for (int32_t i = 0; i < k; i += 2) {
    const int8_t* at = weights + (size_t)i * kPanel;
    __m512i w = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)at));
    ahead.fetch();
    for (int r = 0; r < kCount; r++) {
      int32_t two;
      __builtin_memcpy(&two, inputs + (size_t)r * k + i, 4);
      sums[r] = _mm512_dpwssd_epi32(sums[r], w, _mm512_set1_epi32(two));
    }
  }
  for (int r = 0; r < kCount; r++) _mm512_storeu_si512(totals + r * kPanel, sums[r]);
}

template <int kCount>
inline void float_rows(const float* weights, const float* inputs, int32_t k, Ahead ahead, float* products) {
  __m512 sums[kCount];
  for (int r = 0; r < kCount; r++) sums[r] = _mm512_setzero_ps();
  for (int32_t i = 0; i < k; i++) {
    __m512 w = _mm512_loadu_ps(weights + (size_t)i * kPanel);
    ahead.fetch();
    for (int r = 0; r < kCount; r++)
      sums[r] = _mm512_fmadd_ps(w, _mm512_set1_ps(inputs[(size_t)r * k + i]), sums[r]);
  }
  for (int r = 0; r < kCount; r++) _mm512_storeu_ps(products + r * kPanel, sums[r]);
}

#include "kernels_common.h"

}  // namespace

const Kernels* avx512_kernels() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512vnni")
             ? &kernels
             : nullptr;
}

}  // namespace headlong
#else
namespace headlong {
const Kernels* avx512_kernels() { return nullptr; }
}  // namespace headlong
#endif
