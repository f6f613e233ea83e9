// Part of kernels_common.h: noise, the Gumbel-max sample, and what the candidates of draft heads need.

float exponential_sum(const float* x, int32_t n, float* most) {
  float highest = x[0];
  for (int32_t i = 0; i < n; i++) highest = x[i] > highest ? x[i] : highest;
  *most = highest;
  if (!(highest * 0.f == 0.f)) return 0.f;
  Vec total = splat(0.f);
  int32_t i = 0;
  for (; i + kLanes <= n; i += kLanes) total += exponential(load(x + i) - splat(highest));
  float sum = sum_of(total);
  for (; i < n; i++) sum += exponential(splat(x[i] - highest))[0];
  return sum;
}

constexpr int kNoiseChunk = 256;  // tokens whose noise is made together

// Bits of the noise of tokens [4 block, 4 block + kNoiseChunk): Philox4x32-10, as engine/sampler/noise.py defines it.
// Words hold 32 bits in their low halves; what stands above is never read.
inline void noise_bits(const NoiseKey& key, uint32_t block, uint32_t* bits) {
  constexpr int kBlocks = kLanes / 2;
  const Words first = Words{} + 0xD2511F53u, second = Words{} + 0xCD9E8D57u;
  for (int at = 0; at < kNoiseChunk / 4; at += kBlocks) {
    Words c0{}, c1 = Words{} + key.position, c2 = Words{} + key.stream, c3 = Words{};
    for (int lane = 0; lane < kBlocks; lane++) c0[lane] = block + at + lane;
    uint32_t k0 = (uint32_t)key.seed, k1 = (uint32_t)(key.seed >> 32);
    for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
      const Words low = product32(c0, first), high = product32(c2, second);
      c0 = (high >> 32) ^ c1 ^ k0;
      c2 = (low >> 32) ^ c3 ^ k1;
      c1 = high;
      c3 = low;
    }
    // The four words of a block belong to consecutive tokens.
    const Words even = (c0 & 0xffffffffu) | (c1 << 32), odd = (c2 & 0xffffffffu) | (c3 << 32);
    uint64_t pairs[kLanes];
    for (int lane = 0; lane < kBlocks; lane++) {
      pairs[2 * lane] = even[lane];
      pairs[2 * lane + 1] = odd[lane];
    }
    __builtin_memcpy(bits + 4 * at, pairs, sizeof(pairs));
  }
}

inline double gumbel(uint32_t bits) {
  return -__builtin_log(-__builtin_log(((double)bits + 0.5) * 2.3283064365386962890625e-10));
}

// The token with the largest logit + noise, the lowest of equals; exactly, though few tokens' logarithms are taken. A
// token beats ``best`` only if its u is at least exp(-exp(logit - best)), so only if 1 - u <= exp(logit - best); and
// the bits of a float, read as a whole number, are never above its logarithm by more than rounding.
int32_t gumbel_argmax(const float* logits, int32_t vocab, const NoiseKey& key) {
  alignas(64) uint32_t bits[kNoiseChunk];
  alignas(64) float padded[kNoiseChunk];
  int32_t winner = 0;
  for (int32_t v = 1; v < vocab; v++) winner = logits[v] > logits[winner] ? v : winner;
  noise_bits(key, winner / kNoiseChunk * (kNoiseChunk / 4), bits);
  double best = logits[winner] + gumbel(bits[winner % kNoiseChunk]);
  for (int32_t first = 0; first < vocab; first += kNoiseChunk) {
    const int32_t count = vocab - first < kNoiseChunk ? vocab - first : kNoiseChunk;
    const float* z = logits + first;
    if (count < kNoiseChunk) {
      for (int32_t i = 0; i < kNoiseChunk; i++) padded[i] = i < count ? z[i] : -__builtin_inff();
      z = padded;
    }
    Vec highest = load(z);
    for (int i = kLanes; i < kNoiseChunk; i += kLanes) highest = load(z + i) > highest ? load(z + i) : highest;
    if (max_of(highest) + 22.3 < best) continue;  // no noise is above 22.2
    noise_bits(key, first / 4, bits);
    const float near = (float)best, slack = 1e-3f + 1e-6f * __builtin_fabsf(near);
    IntVec possible = IntVec{};
    for (int i = 0; i < kNoiseChunk; i += kLanes) {
      const IntVec rest = (IntVec)(~*(const UnalignedInt*)(bits + i)) >> 1 & 0x7fffffff;
      const Vec size = __builtin_convertvector((IntVec)__builtin_convertvector(rest, Vec), Vec);
      const Vec least = size * splat(1.1920928955078125e-7f) - splat(158.f);
      possible |= least <= (load(z + i) - splat(near)) * splat(1.44269504088896341f) + splat(slack);
    }
    int32_t any = 0;
    for (int lane = 0; lane < kLanes; lane++) any |= possible[lane];
    if (!any) continue;
    for (int32_t i = 0; i < count; i++) {
      const float rest = (float)((~bits[i] >> 1) & 0x7fffffff);
      int32_t whole;
      __builtin_memcpy(&whole, &rest, 4);
      if ((float)whole * 1.1920928955078125e-7f - 158.f > (z[i] - near) * 1.44269504088896341f + slack) continue;
      const double score = z[i] + gumbel(bits[i]);
      if (score > best || (score == best && first + i < winner)) best = score, winner = first + i;
    }
  }
  return winner;
}
