// AVX2 with FMA: weights of 8 bits and inputs widened to 16, so that no product saturates.
#include "kernels.h"

#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>

namespace headlong {
namespace {

constexpr char kName[] = "avx2";
constexpr int kLanes = 8;
constexpr int kTileRows = 6;  // 12 sums, two weights and two temporaries: all sixteen registers
constexpr int kWideMix[kQueries] = {8, 4, 4, 2};
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

typedef int32_t Pair __attribute__((may_alias));

// One row's share of a turn of the loop over the inputs. Spelt out, because the compiler does not see that the
// temporaries fit, and keeps some of the sums in memory.
inline void add_products(__m256i a, __m256i b, const int16_t* two, __m256i& low, __m256i& high) {
  __m256i x, y;
  asm("vpbroadcastd %4, %2\n\t"
      "vpmaddwd %2, %5, %3\n\t"
      "vpmaddwd %2, %6, %2\n\t"
      "vpaddd %3, %0, %0\n\t"
      "vpaddd %2, %1, %1"
      : "+x"(low), "+x"(high), "=&x"(x), "=&x"(y)
      : "m"(*(const Pair*)two), "x"(a), "x"(b));
}

inline void add_products(__m256 a, __m256 b, const float* one, __m256& low, __m256& high) {
  __m256 x;
  asm("vbroadcastss %3, %2\n\t"
      "vfmadd231ps %2, %4, %0\n\t"
      "vfmadd231ps %2, %5, %1"
      : "+x"(low), "+x"(high), "=&x"(x)
      : "m"(*one), "x"(a), "x"(b));
}

// The loops over rows are unrolled early, and each is a function of its own: only then do all sums get registers.
template <int kCount>
__attribute__((noinline)) void int8_rows(const int8_t* weights, const int16_t* inputs, int32_t k, Ahead ahead,
                                         int32_t* totals) {
  __m256i low[kCount], high[kCount];
#pragma GCC unroll 6
  for (int r = 0; r < kCount; r++) low[r] = high[r] = _mm256_setzero_si256();
  for (int32_t i = 0; i < k; i += 2) {
    const int8_t* at = weights + (size_t)i * kPanel;
    ahead.fetch();
    const __m256i a = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)at));
    const __m256i b = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(at + 16)));
#pragma GCC unroll 6
    for (int r = 0; r < kCount; r++) add_products(a, b, inputs + (size_t)r * k + i, low[r], high[r]);
  }
#pragma GCC unroll 6
  for (int r = 0; r < kCount; r++) {
    _mm256_storeu_si256((__m256i*)(totals + r * kPanel), low[r]);
    _mm256_storeu_si256((__m256i*)(totals + r * kPanel + 8), high[r]);
  }
}

template <int kCount>
__attribute__((noinline)) void float_rows(const float* weights, const float* inputs, int32_t k, Ahead ahead,
                                          float* products) {
  __m256 low[kCount], high[kCount];
#pragma GCC unroll 6
  for (int r = 0; r < kCount; r++) low[r] = high[r] = _mm256_setzero_ps();
  for (int32_t i = 0; i < k; i++) {
    const float* at = weights + (size_t)i * kPanel;
    ahead.fetch();
    const __m256 a = _mm256_loadu_ps(at), b = _mm256_loadu_ps(at + 8);
#pragma GCC unroll 6
    for (int r = 0; r < kCount; r++) add_products(a, b, inputs + (size_t)r * k + i, low[r], high[r]);
  }
#pragma GCC unroll 6
  for (int r = 0; r < kCount; r++) {
    _mm256_storeu_ps(products + r * kPanel, low[r]);
    _mm256_storeu_ps(products + r * kPanel + 8, high[r]);
  }
}

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
