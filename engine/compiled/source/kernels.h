// What one instruction set offers: packing, products and row operations over raw pointers.
//
// Every result depends on its own row alone: a sum runs over k (or over positions) in one fixed order, whatever rows
// are computed beside it, and no kernel splits a sum by the number of rows. That is what makes a step deterministic.
#pragma once

#include <cstddef>
#include <cstdint>

namespace headlong {

constexpr int kPanel = 16;    // output columns of one packed panel
constexpr int kTile = 16;     // tokens of one tile of the KV cache
constexpr int kQueries = 4;   // queries that attention computes together

// A weight [n, k] packed in panels of 16 outputs. scale: one an output (int8 only). rotation: inputs are multiplied by
// a Hadamard matrix of that size, block by block, before they are quantised; 0 is none.
struct Matrix {
  const void* data;
  const float* scale;
  const float* bias;
  int32_t n;
  int32_t k;
  int32_t rotation;
  int32_t is_int8;
};

inline size_t panel_bytes(int32_t k, bool is_int8) { return (size_t)k * kPanel * (is_int8 ? 1 : sizeof(float)); }

// Rows ready to be multiplied. data: [rows, k], int16_t for int8 weights, else float. scale: one a row (int8 weights
// only), its quantisation step.
struct Rows {
  void* data;
  float* scale;
  int32_t count;
};

// What a product tile fetches into the cache for the tiles after it, ``step`` bytes in each step over its inputs. The
// address may lie behind the weights: fetching from there does nothing.
struct Ahead {
  const char* at;
  int32_t step;

  void fetch() {
    __builtin_prefetch(at);
    at += step;
  }
};

// Inputs of int8 weights are whole numbers of up to this size: 16 bits cost what 8 would (the products are of 16 bits
// either way), and no sum of k products leaves 32 bits, so it is exact in any order.
inline int32_t largest_input(int32_t k) {
  const int32_t safe = (int32_t)(2147483647LL / (127LL * k));
  return safe < 32767 ? safe : 32767;
}

// What one query row may see of its request's KV cache: positions [low, prefix), then the ``path_length`` entries
// ``path`` (indices into the request's entries, ascending), which stand at positions prefix, prefix + 1, ...
struct View {
  int32_t low;
  int32_t prefix;
  int32_t path_length;
  const int32_t* path;
};

// Attention of up to kQueries queries with one KV head. keys: [tiles, head_dim, 16]; values: [slots, head_dim];
// tiles[t]: the tile that holds the request's entries 16 t to 16 t + 15. scores: [kQueries, score_stride] of scratch.
struct AttentionTask {
  int32_t count;
  int32_t head_dim;
  const float* queries[kQueries];
  float* outputs[kQueries];
  View views[kQueries];
  const float* keys;
  const float* values;
  const int32_t* tiles;
  float scale;
  float* scores;
  int32_t score_stride;
};

// Which noise (engine/sampler/noise.py): it is a function of this and the token.
struct NoiseKey {
  uint64_t seed;
  uint32_t position;
  uint32_t stream;
};

struct Kernels {
  const char* name;
  size_t (*packed_bytes)(int32_t n, int32_t k, int32_t is_int8);
  // source: [n, k] floats. For int8: already rotated and quantised as whole numbers in ``quantised``.
  void (*pack_int8)(const int8_t* quantised, int32_t n, int32_t k, void* packed);
  void (*pack_float)(const float* source, int32_t n, int32_t k, void* packed);
  void (*rotate)(float* row, int32_t k, int32_t block);
  // Makes row ``row`` of ``rows`` from ``source`` (which it may overwrite), rotated and quantised as ``matrix`` wants.
  void (*prepare)(const Matrix& matrix, float* source, int32_t row, const Rows& rows);
  void (*norm)(const float* x, const float* weight, float eps, int32_t size, float* out);
  void (*rope)(float* head, const float* cosine, const float* sine, int32_t head_dim);
  // y[row, 16 p ...] = (or +=) the products of panels [begin, end) with all rows.
  void (*linear)(const Matrix& matrix, const Rows& rows, int32_t begin, int32_t end, float* y, int32_t stride, bool adds);
  // y = silu(gate) * up, where the first half of the panels is gate and the second is up.
  void (*gated)(const Matrix& matrix, const Rows& rows, int32_t begin, int32_t end, float* y, int32_t stride);
  void (*attend)(const AttentionTask& task);
  // The sum of exp(x - most) over a row of any length, and ``most``, its maximum; 0 where that is not finite.
  float (*exponential_sum)(const float* x, int32_t n, float* most);
  // logits: [vocab], none of them NaN, at least one finite.
  int32_t (*gumbel_argmax)(const float* logits, int32_t vocab, const NoiseKey& key);
};

// The kernels called ``name`` (null or "": the best ones) if this CPU has them, else null.
const Kernels* chosen(const char* name);

const Kernels* baseline_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();

}  // namespace headlong
