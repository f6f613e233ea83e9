// AVX2 with FMA: weights of 8 bits and inputs widened to 16, so that no product saturates.
#include "kernels.h"

#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>

namespace headlong {
namespace {

constexpr char kName[] = "avx2";
constexpr int kLanes = 8;
constexpr int kTileRows = 5;  // with 6 the compiler runs out of registers and keeps sums in memory
constexpr int kWideMix = 8, kMixedQueries = 1;
typedef float Vec __attribute__((vector_size(32)));
typedef uint64_t Words __attribute__((vector_size(32)));

inline Vec splat(float x) { return (Vec)_mm256_set1_ps(x); }
inline Vec fused(Vec a, Vec b, Vec c) { return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }

inline Words product32(Words a, Words b) { return (Words)_mm256_mul_epu32((__m256i)a, (__m256i)b); }

inline void quantise16(const float* x, float inverse, int16_t* out) {
  const __m256 factor = _mm256_set1_ps(inverse);
  __m256i a = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x), factor));
  __m256i b = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8), factor));
  // packs works within halves of 128 bits; the permutation puts its quarters back in order.
  _mm256_storeu_si256((__m256i*)out, _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8));
}

template <int kCount>
inline void int8_rows(const int8_t* weights, const int16_t* inputs, int32_t k, int32_t* totals) {
  __m256i low[kCount], high[kCount];
  for (int r = 0; r < kCount; r++) low[r] = high[r] = _mm256_setzero_si256();
  for (int32_t i = 0; i < k; i += 2) {
    const int8_t* at = weights + (size_t)i * kPanel;
    _mm_prefetch((const char*)at + 4096, _MM_HINT_T0);
    __m256i a = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)at));
    __m256i b = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(at + 16)));
    for (int r = 0; r < kCount; r++) {
      int32_t two;
      __builtin_memcpy(&two, inputs + (size_t)r * k + i, 4);
      __m256i x = _mm256_set1_epi32(two);
      low[r] = _mm256_add_epi32(low[r], _mm256_madd_epi16(a, x));
      high[r] = _mm256_add_epi32(high[r], _mm256_madd_epi16(b, x));
    }
  }
  for (int r = 0; r < kCount; r++) {
    _mm256_storeu_si256((__m256i*)(totals + r * kPanel), low[r]);
    _mm256_storeu_si256((__m256i*)(totals + r * kPanel + 8), high[r]);
  }
}

template <int kCount>
inline void float_rows(const float* weights, const float* inputs, int32_t k, float* products) {
  __m256 low[kCount], high[kCount];
  for (int r = 0; r < kCount; r++) low[r] = high[r] = _mm256_setzero_ps();
  for (int32_t i = 0; i < k; i++) {
    const float* at = weights + (size_t)i * kPanel;
    _mm_prefetch((const char*)at + 4096, _MM_HINT_T0);
    __m256 a = _mm256_loadu_ps(at), b = _mm256_loadu_ps(at + 8);
    for (int r = 0; r < kCount; r++) {
      __m256 x = _mm256_set1_ps(inputs[(size_t)r * k + i]);
      low[r] = _mm256_fmadd_ps(a, x, low[r]);
      high[r] = _mm256_fmadd_ps(b, x, high[r]);
    }
  }
  for (int r = 0; r < kCount; r++) {
    _mm256_storeu_ps(products + r * kPanel, low[r]);
    _mm256_storeu_ps(products + r * kPanel + 8, high[r]);
  }
}

#include "row_counts.h"
HEADLONG_ROW_COUNTS_5(int8_tile, int8_rows, const int8_t*, const int16_t*, int32_t*)
HEADLONG_ROW_COUNTS_5(float_tile, float_rows, const float*, const float*, float*)

#include "kernels_common.h"

}  // namespace

const Kernels* avx2_kernels() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &kernels : nullptr;
}

}  // namespace headlong
#else
namespace headlong {
const Kernels* avx2_kernels() { return nullptr; }
}  // namespace headlong
#endif
