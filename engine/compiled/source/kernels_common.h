// The kernels of one instruction set, written over a vector type that the including file defines:
//
//   kLanes, Vec (kLanes floats), splat, fused (a * b + c, rounded once where the hardware can), Words (kLanes / 2 whole
//   numbers of 64 bits), product32 (of their low halves), quantise16, kTileRows (rows of a product tile), int8_rows,
//   float_rows (products of so many rows), kWideMix (vectors of ``mix`` for 1, 2, ... queries).
//
// It is included once by each file of an instruction set, inside an unnamed namespace, and includes no standard header: an
// inline function of a standard header, compiled here for AVX-512, could replace the same one everywhere else.

typedef float Unaligned __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef int32_t IntVec __attribute__((vector_size(4 * kLanes)));
typedef int32_t UnalignedInt __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));

inline Vec load(const float* p) { return (Vec)(*(const Unaligned*)p); }
inline void store(float* p, Vec v) { *(Unaligned*)p = (Unaligned)v; }

inline float sum_of(Vec v) {
  float total = 0.f;
  for (int i = 0; i < kLanes; i++) total += v[i];
  return total;
}

inline float max_of(Vec v) {
  float best = v[0];
  for (int i = 1; i < kLanes; i++) best = v[i] > best ? v[i] : best;
  return best;
}

// exp(x) to about 1 ulp, by Cody-Waite reduction and a polynomial; 0 below -87, NaN stays NaN.
inline Vec exponential(Vec x) {
  const Vec low = splat(-87.f), high = splat(88.f);
  Vec inside = x > high ? high : x;
  inside = inside < low ? low : inside;
  const Vec magic = splat(12582912.f);  // adding it rounds to a whole number, held in the low bits
  Vec shifted = fused(inside, splat(1.44269504088896341f), magic);
  Vec whole = shifted - magic;
  Vec r = fused(whole, splat(-0.693145751953125f), inside);
  r = fused(whole, splat(-1.42860682030941723212e-6f), r);
  Vec p = splat(1.9875691500e-4f);
  p = fused(p, r, splat(1.3981999507e-3f));
  p = fused(p, r, splat(8.3334519073e-3f));
  p = fused(p, r, splat(4.1665795894e-2f));
  p = fused(p, r, splat(1.6666665459e-1f));
  p = fused(p, r, splat(5.0000001201e-1f));
  p = fused(p, r * r, r) + splat(1.f);
  IntVec bits = ((IntVec)shifted - (IntVec)magic) << 23;
  Vec result = (Vec)((IntVec)p + bits);
  return x < low ? splat(0.f) : result;
}

// v[from[lane]] for each lane.
inline Vec shuffled(Vec v, IntVec from) {
#ifdef __clang__
  Vec out;
  for (int lane = 0; lane < kLanes; lane++) out[lane] = v[from[lane]];
  return out;
#else
  return __builtin_shuffle(v, from);
#endif
}

// The transform of ``kVectors`` vectors, held in registers all the while.
template <int kVectors>
inline void rotate_part(float* part) {
  Vec v[kVectors];
#pragma GCC unroll 8
  for (int i = 0; i < kVectors; i++) v[i] = load(part + i * kLanes);
#pragma GCC unroll 4
  for (int h = 1; h < kLanes; h *= 2) {
    IntVec partner;
    Vec sign;
#pragma GCC unroll 16
    for (int lane = 0; lane < kLanes; lane++) {
      partner[lane] = lane ^ h;
      sign[lane] = lane & h ? -1.f : 1.f;
    }
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; i++) v[i] = fused(v[i], sign, shuffled(v[i], partner));
  }
#pragma GCC unroll 4
  for (int h = 1; h < kVectors; h *= 2)
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; i++)
      if (!(i & h)) {
        const Vec a = v[i], b = v[i + h];
        v[i] = a + b;
        v[i + h] = a - b;
      }
#pragma GCC unroll 8
  for (int i = 0; i < kVectors; i++) store(part + i * kLanes, v[i]);
}

// Fast Walsh-Hadamard transform, unnormalised, of each ``block`` (a power of two, at least 16) of the row.
void rotate(float* row, int32_t k, int32_t block) {
  const int32_t part = block < 8 * kLanes ? block : 8 * kLanes;
  for (int32_t at = 0; at < k; at += part) {
    switch (part / kLanes) {
      case 8: rotate_part<8>(row + at); break;
      case 4: rotate_part<4>(row + at); break;
      case 2: rotate_part<2>(row + at); break;
      default: rotate_part<1>(row + at);
    }
  }
  for (int32_t h = part; h < block; h *= 2)
    for (int32_t i = 0; i < k; i += 2 * h)
      for (int32_t j = i; j < i + h; j += kLanes) {
        Vec a = load(row + j), b = load(row + j + h);
        store(row + j, a + b);
        store(row + j + h, a - b);
      }
}

void prepare(const Matrix& matrix, float* source, int32_t row, const Rows& rows) {
  const int32_t k = matrix.k;
  if (!matrix.is_int8) {
    float* out = (float*)rows.data + (size_t)row * k;
    for (int32_t i = 0; i < k; i += kLanes) store(out + i, load(source + i));
    return;
  }
  if (matrix.rotation) rotate(source, k, matrix.rotation);
  Vec widest = splat(0.f);
  for (int32_t i = 0; i < k; i += kLanes) {
    Vec v = load(source + i), size = v < splat(0.f) ? -v : v;
    widest = size > widest ? size : widest;
  }
  const float most = max_of(widest), largest = (float)largest_input(k);
  const float inverse = most > 0.f ? largest / most : 0.f;
  int16_t* out = (int16_t*)rows.data + (size_t)row * k;
  for (int32_t i = 0; i < k; i += 16) quantise16(source + i, inverse, out + i);
  // A row that is not finite must not pass for one that is: NaN in the scale makes every product NaN.
  Vec check = splat(0.f);
  for (int32_t i = 0; i < k; i += kLanes) check += load(source + i) * splat(0.f);
  rows.scale[row] = most / largest + sum_of(check);
}

void norm(const float* x, const float* weight, float eps, int32_t size, float* out) {
  Vec squares = splat(0.f);
  for (int32_t i = 0; i < size; i += kLanes) {
    Vec v = load(x + i);
    squares = fused(v, v, squares);
  }
  Vec factor = splat(1.f / __builtin_sqrtf(sum_of(squares) / (float)size + eps));
  for (int32_t i = 0; i < size; i += kLanes) store(out + i, load(x + i) * factor * load(weight + i));
}

void rope(float* head, const float* cosine, const float* sine, int32_t head_dim) {
  const int32_t half = head_dim / 2;
  for (int32_t i = 0; i < half; i++) {
    float a = head[i], b = head[i + half];
    head[i] = a * cosine[i] - b * sine[i];
    head[i + half] = b * cosine[i] + a * sine[i];
  }
}

// Calls ``compute`` as it was compiled for ``count``, which is at most kCount: what it sums is then held in registers.
template <int kCount, typename Compute>
inline void with_count(int32_t count, const Compute& compute) {
  if constexpr (kCount == 1)
    compute.template operator()<1>();
  else if (count == kCount)
    compute.template operator()<kCount>();
  else
    with_count<kCount - 1>(count, compute);
}

// products: [count, 16] of rows [first, first + count) and one panel, scaled, without bias.
inline void product_tile(const Matrix& matrix, const Rows& rows, int32_t panel, int32_t first, int32_t count,
                         float* products) {
  const int32_t k = matrix.k;
  // The tiles of a panel share out the next one, so that memory works while they compute.
  const size_t bytes = panel_bytes(k, matrix.is_int8);
  const char* next = (const char*)matrix.data + (panel + 1) * bytes + bytes * first / rows.count;
  const int32_t turns = matrix.is_int8 ? k / 2 : k;  // of the loop over the inputs
  const Ahead ahead = {next, (int32_t)(bytes / turns) * count / rows.count + 1};
  if (!matrix.is_int8) {
    const float* weights = (const float*)matrix.data + (size_t)panel * k * kPanel;
    const float* inputs = (const float*)rows.data + (size_t)first * k;
    with_count<kTileRows>(count, [&]<int kCount>() { float_rows<kCount>(weights, inputs, k, ahead, products); });
    return;
  }
  const int8_t* weights = (const int8_t*)matrix.data + (size_t)panel * k * kPanel;
  int32_t totals[kTileRows * kPanel];
  const int16_t* inputs = (const int16_t*)rows.data + (size_t)first * k;
  with_count<kTileRows>(count, [&]<int kCount>() { int8_rows<kCount>(weights, inputs, k, ahead, totals); });
  const float* scale = matrix.scale + panel * kPanel;
  for (int32_t r = 0; r < count; r++) {
    const Vec row_scale = splat(rows.scale[first + r]);
    for (int32_t c = 0; c < kPanel; c += kLanes) {
      const IntVec total = *(const UnalignedInt*)(totals + r * kPanel + c);
      store(products + r * kPanel + c, __builtin_convertvector(total, Vec) * (row_scale * load(scale + c)));
    }
  }
}

// Rows of a tile when ``count`` of them are shared out evenly: 6 rows are 3 and 3 rather than 5 and 1.
inline int32_t tile_rows(int32_t count) {
  const int32_t tiles = (count + kTileRows - 1) / kTileRows;
  return (count + tiles - 1) / tiles;
}

void linear(const Matrix& matrix, const Rows& rows, int32_t begin, int32_t end, float* y, int32_t stride, bool adds) {
  const int32_t step = tile_rows(rows.count);
  float products[kTileRows * kPanel];
  for (int32_t panel = begin; panel < end; panel++) {
    const int32_t column = panel * kPanel;
    const int32_t width = matrix.n - column < kPanel ? matrix.n - column : kPanel;
    for (int32_t first = 0; first < rows.count; first += step) {
      const int32_t count = rows.count - first < step ? rows.count - first : step;
      product_tile(matrix, rows, panel, first, count, products);
      for (int32_t r = 0; r < count; r++) {
        float* out = y + (size_t)(first + r) * stride + column;
        const float* from = products + r * kPanel;
        if (width == kPanel) {
          for (int32_t c = 0; c < kPanel; c += kLanes) {
            const Vec value = matrix.bias ? load(from + c) + load(matrix.bias + column + c) : load(from + c);
            store(out + c, adds ? load(out + c) + value : value);
          }
          continue;
        }
        for (int32_t c = 0; c < width; c++) {
          float value = matrix.bias ? from[c] + matrix.bias[column + c] : from[c];
          out[c] = adds ? out[c] + value : value;
        }
      }
    }
  }
}

void gated(const Matrix& matrix, const Rows& rows, int32_t begin, int32_t end, float* y, int32_t stride) {
  const int32_t step = tile_rows(rows.count), half = matrix.n / 2;
  float gate[kTileRows * kPanel], up[kTileRows * kPanel];
  for (int32_t panel = begin; panel < end; panel++) {
    const int32_t column = panel * kPanel;
    for (int32_t first = 0; first < rows.count; first += step) {
      const int32_t count = rows.count - first < step ? rows.count - first : step;
      product_tile(matrix, rows, panel, first, count, gate);
      product_tile(matrix, rows, half / kPanel + panel, first, count, up);
      for (int32_t r = 0; r < count; r++)
        for (int32_t c = 0; c < kPanel; c += kLanes) {
          Vec g = load(gate + r * kPanel + c), u = load(up + r * kPanel + c);
          if (matrix.bias) {
            g += load(matrix.bias + column + c);
            u += load(matrix.bias + half + column + c);
          }
          store(y + (size_t)(first + r) * stride + column + c, g / (splat(1.f) + exponential(-g)) * u);
        }
    }
  }
}

// Raw scores of ``count`` queries with the keys of tiles [first, last), position by position.
template <int kCount>
inline void score_tiles(const AttentionTask& task, int32_t first, int32_t last) {
  constexpr int kParts = kTile / kLanes;
  const int32_t size = task.head_dim;
  for (int32_t t = first; t < last; t++) {
    const float* keys = task.keys + (size_t)task.tiles[t] * size * kTile;
    Vec totals[kCount][kParts];
    for (int q = 0; q < kCount; q++)
      for (int part = 0; part < kParts; part++) totals[q][part] = splat(0.f);
    for (int32_t d = 0; d < size; d++)
      for (int part = 0; part < kParts; part++) {
        Vec key = load(keys + d * kTile + part * kLanes);
        for (int q = 0; q < kCount; q++) totals[q][part] = fused(key, splat(task.queries[q][d]), totals[q][part]);
      }
    for (int q = 0; q < kCount; q++)
      for (int part = 0; part < kParts; part++)
        store(task.scores + (size_t)q * task.score_stride + t * kTile + part * kLanes,
              totals[q][part] * splat(task.scale));
  }
}

// Turns one query's raw scores into weights over positions [16 first, 16 last): hidden ones 0. Returns 1 / their sum.
inline float soften(float* scores, const View& view, int32_t first, int32_t last) {
  const float hidden = -__builtin_inff();
  const int32_t begin = first * kTile, end = last * kTile, length = view.prefix + view.path_length;
  for (int32_t j = begin; j < view.low; j++) scores[j] = hidden;
  // Ascending and never behind its target, so nothing is overwritten before it is read.
  for (int32_t i = 0; i < view.path_length; i++)
    scores[view.prefix + i] = view.prefix + i < view.low ? hidden : scores[view.path[i]];
  for (int32_t j = length; j < end; j++) scores[j] = hidden;
  Vec widest = splat(hidden);
  for (int32_t j = begin; j < end; j += kLanes) {
    Vec v = load(scores + j);
    widest = v > widest ? v : widest;
  }
  const Vec most = splat(max_of(widest));
  Vec total[kTile / kLanes];
  for (int part = 0; part < kTile / kLanes; part++) total[part] = splat(0.f);
  for (int32_t j = begin; j < end; j += kTile)
    for (int part = 0; part < kTile / kLanes; part++) {
      Vec weight = exponential(load(scores + j + part * kLanes) - most);
      store(scores + j + part * kLanes, weight);
      total[part] += weight;
    }
  float sum = 0.f;
  for (int part = 0; part < kTile / kLanes; part++) sum += sum_of(total[part]);
  return 1.f / sum;
}

// outputs[q][at ...] = the weighted values, ``kVectors`` vectors wide. The queries are mixed together up to the longest
// prefix, as the weights behind a query's own end are 0.
template <int kCount, int kVectors>
inline void mix(const AttentionTask& task, int32_t begin, int32_t end, int32_t at, const float* inverse) {
  const int32_t size = task.head_dim;
  Vec totals[kCount][kVectors];
  for (int q = 0; q < kCount; q++)
    for (int v = 0; v < kVectors; v++) totals[q][v] = splat(0.f);
  for (int32_t j = begin; j < end;) {
    const float* values = task.values + ((size_t)task.tiles[j / kTile] * kTile + j % kTile) * size + at;
    const int32_t stop = (j / kTile + 1) * kTile < end ? (j / kTile + 1) * kTile : end;
    for (; j < stop; j++, values += size)
      for (int v = 0; v < kVectors; v++) {
        Vec value = load(values + v * kLanes);
        for (int q = 0; q < kCount; q++)
          totals[q][v] = fused(value, splat(task.scores[(size_t)q * task.score_stride + j]), totals[q][v]);
      }
  }
  for (int q = 0; q < kCount; q++) {
    const View& view = task.views[q];
    for (int32_t i = 0; i < view.path_length; i++) {
      const int32_t entry = view.path[i];
      const float* values = task.values + ((size_t)task.tiles[entry / kTile] * kTile + entry % kTile) * size + at;
      const Vec weight = splat(task.scores[(size_t)q * task.score_stride + view.prefix + i]);
      for (int v = 0; v < kVectors; v++) totals[q][v] = fused(load(values + v * kLanes), weight, totals[q][v]);
    }
    for (int v = 0; v < kVectors; v++)
      store(task.outputs[q] + at + v * kLanes, totals[q][v] * splat(inverse[q]));
  }
}

template <int kCount>
inline void mix_all(const AttentionTask& task, int32_t begin, int32_t end, const float* inverse) {
  constexpr int kWide = kWideMix[kCount - 1];
  int32_t at = 0;
  for (; at + kWide * kLanes <= task.head_dim; at += kWide * kLanes) mix<kCount, kWide>(task, begin, end, at, inverse);
  for (; at < task.head_dim; at += kTile) mix<kCount, kTile / kLanes>(task, begin, end, at, inverse);
}

void attend(const AttentionTask& task) {
  int32_t low = task.views[0].low, prefix = 0, entries = 0;
  for (int q = 0; q < task.count; q++) {
    const View& view = task.views[q];
    low = view.low < low ? view.low : low;
    prefix = view.prefix > prefix ? view.prefix : prefix;
    const int32_t most = view.path_length ? view.path[view.path_length - 1] + 1 : view.prefix;
    entries = most > entries ? most : entries;
  }
  entries = prefix > entries ? prefix : entries;
  const int32_t first = low / kTile, last = (entries + kTile - 1) / kTile;
  with_count<kQueries>(task.count, [&]<int kCount>() { score_tiles<kCount>(task, first, last); });
  float inverse[kQueries];
  for (int q = 0; q < task.count; q++)
    inverse[q] = soften(task.scores + (size_t)q * task.score_stride, task.views[q], first, last);
  // Drafted rows all have the longest prefix, so their paths come after it, in order of position.
  with_count<kQueries>(task.count, [&]<int kCount>() { mix_all<kCount>(task, low, prefix, inverse); });
}

#include "sampling_common.h"

void pack_float(const float* source, int32_t n, int32_t k, void* packed) {
  float* out = (float*)packed;
  for (int32_t panel = 0; panel < (n + kPanel - 1) / kPanel; panel++)
    for (int32_t i = 0; i < k; i++)
      for (int32_t c = 0; c < kPanel; c++) {
        const int32_t column = panel * kPanel + c;
        *out++ = column < n ? source[(size_t)column * k + i] : 0.f;
      }
}

// Pairs of consecutive inputs of 16 outputs: [panel, k / 2, 16, 2].
void pack_int8(const int8_t* quantised, int32_t n, int32_t k, void* packed) {
  int8_t* out = (int8_t*)packed;
  for (int32_t panel = 0; panel < (n + kPanel - 1) / kPanel; panel++)
    for (int32_t i = 0; i < k; i += 2)
      for (int32_t c = 0; c < kPanel; c++)
        for (int32_t j = 0; j < 2; j++) {
          const int32_t column = panel * kPanel + c;
          *out++ = column < n ? quantised[(size_t)column * k + i + j] : (int8_t)0;
        }
}

size_t packed_bytes(int32_t n, int32_t k, int32_t is_int8) {
  return (n + kPanel - 1) / kPanel * panel_bytes(k, is_int8);
}

const Kernels kernels = {kName, packed_bytes, pack_int8, pack_float, rotate, prepare,
                         norm,  rope,         linear,    gated,      attend, exponential_sum, gumbel_argmax};
