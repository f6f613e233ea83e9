// Work beside the step, shared out among a team of threads: single products, sampled tokens, candidates of draft heads.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <new>
#include <vector>

#include "kernels.h"
#include "pool.h"
#include "scratch.h"

using namespace headlong;

namespace {

struct Team {
  Team(const Kernels* kernels, int threads) : kernels(kernels), pool(threads) {}

  // Calls f(i) for 0 <= i < count, on the caller's thread alone where waking the others would not pay.
  template <typename F>
  void each(int count, bool alone, F&& f) {
    if (alone || pool.size() == 1) {
      for (int i = 0; i < count; i++) f(i);
      return;
    }
    std::atomic<int> next{0};
    pool.run([&](int) {
      for (int i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) f(i);
    });
  }

  const Kernels* kernels;
  Pool pool;
  Scratch inputs, copy, scales;
};

// Scalar Philox4x32-10 (engine/sampler/noise.py): the noise of one token.
double noise_of(const NoiseKey& key, uint32_t token) {
  uint32_t c0 = token / 4, c1 = key.position, c2 = key.stream, c3 = 0;
  uint32_t k0 = (uint32_t)key.seed, k1 = (uint32_t)(key.seed >> 32);
  for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
    const uint64_t low = (uint64_t)c0 * 0xD2511F53u, high = (uint64_t)c2 * 0xCD9E8D57u;
    c0 = (uint32_t)(high >> 32) ^ c1 ^ k0;
    c1 = (uint32_t)high;
    c2 = (uint32_t)(low >> 32) ^ c3 ^ k1;
    c3 = (uint32_t)low;
  }
  const uint32_t words[] = {c0, c1, c2, c3};
  return -std::log(-std::log((words[token % 4] + 0.5) * 2.3283064365386962890625e-10));
}

struct Candidate {
  double score;
  int32_t index;
  bool operator<(const Candidate& other) const {
    return score != other.score ? score > other.score : index < other.index;
  }
};

// The best ``count`` of what it was given, best first; of equal scores the lowest index.
class Best {
 public:
  explicit Best(size_t count) : count_(count) { kept_.reserve(count + 1); }
  void offer(double score, int32_t index) {
    const Candidate one{score, index};
    if (kept_.size() == count_ && !(one < kept_.back())) return;
    kept_.insert(std::upper_bound(kept_.begin(), kept_.end(), one), one);
    if (kept_.size() > count_) kept_.pop_back();
  }
  const std::vector<Candidate>& kept() const { return kept_; }

 private:
  size_t count_;
  std::vector<Candidate> kept_;
};

// Indices of the ``count`` largest finite scores; of equals at the border the lowest.
std::vector<int32_t> largest(const float* scores, int32_t n, int32_t count) {
  std::vector<float> finite;
  finite.reserve(n);
  for (int32_t i = 0; i < n; i++)
    if (scores[i] > -INFINITY) finite.push_back(scores[i]);
  float border = -INFINITY;
  if ((int32_t)finite.size() > count) {
    std::nth_element(finite.begin(), finite.begin() + (count - 1), finite.end(), std::greater<float>());
    border = finite[count - 1];
  }
  std::vector<int32_t> above, equal;
  for (int32_t i = 0; i < n; i++) {
    if (scores[i] > border) above.push_back(i);
    else if (scores[i] == border && border > -INFINITY) equal.push_back(i);
  }
  equal.resize(std::min<size_t>(equal.size(), count - std::min<size_t>(count, above.size())));
  above.insert(above.end(), equal.begin(), equal.end());
  std::sort(above.begin(), above.end());
  return above;
}

}  // namespace

extern "C" {

// One row of scores of a draft head. key: null where no noise is added. count: how many candidates are wanted at most.
// indices, confidences: room for them, best first; found receives how many there are.
struct HeadlongOffer {
  const float* scores;
  const NoiseKey* key;
  int32_t count;
  int32_t* indices;
  float* confidences;
  int32_t found;
};

// null if memory or threads ran out.
void* headlong_team(const char* kernels, int32_t threads) {
  try {
    return new Team(chosen(kernels), threads);
  } catch (const std::exception&) {
    return nullptr;
  }
}

void headlong_disband(void* team) { delete (Team*)team; }

// y [rows, n] = x [rows, k] times the packed weight, plus its bias. Returns 1 if memory ran out.
int32_t headlong_linear(void* team, const Matrix* matrix, const float* x, int32_t rows, float* y) {
  Team& t = *(Team*)team;
  const size_t k = matrix->k;
  try {
    Rows ready{t.inputs.bytes(rows * k * sizeof(float)), t.scales.floats(rows), rows};
    float* copy = t.copy.floats(rows * k);
    std::memcpy(copy, x, rows * k * sizeof(float));
    for (int32_t r = 0; r < rows; r++) t.kernels->prepare(*matrix, copy + r * k, r, ready);
    const int panels = (matrix->n + kPanel - 1) / kPanel, pieces = std::min(panels, t.pool.size() * 8);
    const bool is_small = (size_t)rows * k * matrix->n < (2u << 20);
    t.each(pieces, is_small, [&](int i) {
      t.kernels->linear(*matrix, ready, panels * i / pieces, panels * (i + 1) / pieces, y, matrix->n, false);
    });
  } catch (const std::bad_alloc&) {
    return 1;
  }
  return 0;
}

// tokens[i]: the Gumbel-max sample of row i of ``logits`` [rows, vocab] under keys[i].
void headlong_sample(void* team, const float* logits, int32_t rows, int32_t vocab, const NoiseKey* keys,
                     int32_t* tokens) {
  Team& t = *(Team*)team;
  t.each(rows, rows == 1, [&](int row) {
    tokens[row] = t.kernels->gumbel_argmax(logits + (size_t)row * vocab, vocab, keys[row]);
  });
}

// Fills each of the offers over the n tokens ``ids``: the likeliest, with their share in the whole; with noise, the
// likeliest of the ``noised`` largest once it is added, with their share among these. Returns 1 if memory ran out.
int32_t headlong_candidates(void* team, const int64_t* ids, int32_t n, int32_t noised, HeadlongOffer* offers,
                            int32_t rows) {
  Team& t = *(Team*)team;
  std::atomic<bool> failed{false};
  auto fill = [&](HeadlongOffer& offer) {
    Best best(offer.count);
    double highest = -INFINITY, total = 0.0;
    if (offer.key) {
      const std::vector<int32_t> near = largest(offer.scores, n, noised);
      std::vector<double> scores(near.size());
      for (size_t i = 0; i < near.size(); i++) {
        scores[i] = offer.scores[near[i]] + noise_of(*offer.key, (uint32_t)ids[near[i]]);
        highest = std::max(highest, scores[i]);
        best.offer(scores[i], near[i]);
      }
      for (double score : scores) total += std::exp(score - highest);
    } else {
      float most;
      total = t.kernels->exponential_sum(offer.scores, n, &most);
      highest = most;
      for (int32_t i = 0; i < n; i++)
        if (offer.scores[i] > -INFINITY) best.offer(offer.scores[i], i);
    }
    offer.found = (int32_t)best.kept().size();
    for (int32_t i = 0; i < offer.found; i++) {
      offer.indices[i] = best.kept()[i].index;
      offer.confidences[i] = (float)(std::exp(best.kept()[i].score - highest) / total);
    }
  };
  t.each(rows, rows == 1, [&](int row) {
    try {
      fill(offers[row]);
    } catch (const std::bad_alloc&) {
      failed = true;
    }
  });
  return failed;
}

}  // extern "C"
