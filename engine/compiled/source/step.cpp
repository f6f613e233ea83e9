// One step of a Llama-family model over the paged KV cache: every row of every request, in one call.
//
// C functions over plain structures, called from Python without the interpreter lock. All memory but scratch belongs to
// the caller. A team of threads runs the whole step together; what a thread computes never depends on which thread it is.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
#include <vector>

#include "kernels.h"
#include "pool.h"
#include "scratch.h"

using namespace headlong;

extern "C" {

// Weights of a decoder layer. qkv: the three projections above one another; gate_up: gate above up. q_norm, k_norm: of
// each head, or null. keys: [kv_heads, tiles, head_dim, 16]; values: [kv_heads, slots, head_dim]. window: 0 is none.
// first: entries before it do not exist.
struct HeadlongLayer {
  Matrix qkv, output, gate_up, down;
  const float *input_norm, *post_norm, *q_norm, *k_norm;
  float *keys, *values;
  int32_t window, first;
};

// join: of an MTP module alone, [hidden, 2 hidden], makes its input of a normed embedding and the normed state of the
// depth before; else its data is null.
struct HeadlongModel {
  int32_t hidden, intermediate, heads, kv_heads, head_dim, num_layers, num_tiles;
  float eps, attention_scale;
  const HeadlongLayer* layers;
  const float *final_norm, *cosine, *sine;  // cosine, sine: [positions, head_dim / 2]
  Matrix lm_head, join;
  const float *embedding_norm, *hidden_norm;
};

// One request's rows [first_row, first_row + num_rows) and the tiles of its KV entries.
struct HeadlongSegment {
  int32_t first_row, num_rows;
  const int32_t* tiles;
  int32_t num_entries;
};

// states: [rows, hidden], the embeddings on entry, overwritten. prefix, path_start, path: what each row sees (View).
// final: [rows, hidden] after the last norm. logits: [kept, vocabulary]. captures[i]: [rows, hidden] receives the output
// of layer capture_layers[i]. previous: [rows, hidden], the states that an MTP module joins with the embeddings.
// stores_only: the rows' keys and values of the first layer are stored, and nothing else is computed.
struct HeadlongStep {
  int32_t rows, segments, kept, num_captures;
  float* states;
  const int32_t *positions, *slots;
  const HeadlongSegment* requests;
  const int32_t *prefix, *path_start, *path, *kept_rows, *capture_layers;
  float *final, *logits;
  float* const* captures;
  const float* previous;
  int32_t stores_only;
};

}  // extern "C"

namespace {

constexpr int kWarmBytes = 16384;  // of a part: what memory brings while the threads meet

struct alignas(64) Counter {
  std::atomic<int32_t> next{0};
};

struct Engine {
  Engine(const HeadlongModel& model, const Kernels* kernels, int threads)
      : model(model),
        kernels(kernels),
        pool(threads),
        counters((model.num_layers * 5 + 2) * threads),
        scores(threads) {}

  HeadlongModel model;
  const Kernels* kernels;
  Pool pool;
  std::vector<Counter> counters;
  std::vector<Scratch> scores;
  Scratch inputs, scales, normed, qkv, mixed, gated, joined;
};

struct Task {
  int32_t segment, kv_head, first_query;
};

class Step {
 public:
  Step(Engine& engine, const HeadlongStep& step)
      : e_(engine), m_(engine.model), k_(*engine.kernels), s_(step), groups_(m_.heads / m_.kv_heads) {
    const size_t rows = std::max(s_.rows, s_.kept);
    const size_t widest = std::max({m_.hidden, m_.intermediate, m_.heads * m_.head_dim, m_.join.data ? m_.join.k : 0});
    rows_.data = e_.inputs.bytes(rows * widest * sizeof(float));
    rows_.scale = e_.scales.floats(rows);
    rows_.count = s_.rows;
    normed_ = e_.normed.floats(rows * m_.hidden);
    qkv_width_ = (m_.heads + 2 * m_.kv_heads) * m_.head_dim;
    qkv_ = e_.qkv.floats(rows * qkv_width_);
    mixed_ = e_.mixed.floats(rows * m_.heads * m_.head_dim);
    gated_ = e_.gated.floats(rows * m_.intermediate);
    if (m_.join.data) joined_ = e_.joined.floats((size_t)s_.rows * m_.join.k);
    plan_attention();
    // Here, where running out of memory is an error of this call, not in a thread, where it would be the end.
    for (auto& scratch : e_.scores) scratch.floats((size_t)kQueries * score_stride_);
    for (auto& counter : e_.counters) counter.next.store(0, std::memory_order_relaxed);
  }

  void thread(int t) {
    if (m_.join.data) run_join(t);
    if (s_.stores_only) return store_entries(t, 0);
    for (int layer = 0; layer < m_.num_layers; layer++) {
      run_layer(t, layer);
      for (int i = 0; i < s_.num_captures; i++)
        if (s_.capture_layers[i] == layer)
          each_row(t, s_.rows, [&](int r) { std::memcpy(s_.captures[i] + at(r), s_.states + at(r), hidden_bytes()); });
    }
    each_row(t, s_.rows, [&](int r) { k_.norm(s_.states + at(r), m_.final_norm, m_.eps, m_.hidden, s_.final + at(r)); });
    if (!s_.kept) return;
    warm(t, m_.lm_head, 0, panels(m_.lm_head.n));
    e_.pool.barrier();
    Rows kept = rows_;
    kept.count = s_.kept;
    each_row(t, s_.kept, [&](int r) {
      std::memcpy(normed_ + at(r), s_.final + at(s_.kept_rows[r]), hidden_bytes());
      k_.prepare(m_.lm_head, normed_ + at(r), r, kept);
    });
    e_.pool.barrier();
    share(t, m_.num_layers * 5, panels(m_.lm_head.n), [&](int begin, int end) {
      k_.linear(m_.lm_head, kept, begin, end, s_.logits, m_.lm_head.n, false);
    });
  }

 private:
  size_t at(int row) const { return (size_t)row * m_.hidden; }
  size_t hidden_bytes() const { return m_.hidden * sizeof(float); }
  static int panels(int n) { return (n + kPanel - 1) / kPanel; }

  template <typename F>
  void each_row(int t, int count, F&& f) {
    for (int r = t; r < count; r += e_.pool.size()) f(r);
  }

  // What is still to be taken of the part of thread ``owner``, in the piece of work ``counter``.
  std::atomic<int32_t>& next_of(int counter, int owner) { return e_.counters[counter * e_.pool.size() + owner].next; }

  int first_of(int t, int total) const { return (int)((int64_t)total * t / e_.pool.size()); }

  // Hands out [0, total) in pieces. Each thread begins with a part of its own, so that it finds what it fetched ahead;
  // then it takes what others have not come to.
  template <typename F>
  void share(int t, int counter, int total, F&& f) {
    const int threads = e_.pool.size();
    for (int turn = 0; turn < threads; turn++) {
      const int owner = (t + turn) % threads, first = first_of(owner, total), last = first_of(owner + 1, total);
      const int piece = std::max(1, (last - first) / 8);
      std::atomic<int32_t>& next = next_of(counter, owner);
      for (int at; (at = first + next.fetch_add(piece, std::memory_order_relaxed)) < last;)
        f(at, std::min(at + piece, last));
    }
  }

  // Has memory fetch the beginning of a thread's part of ``matrix`` while there is other work or nothing to do.
  void warm(int t, const Matrix& matrix, int first_panel, int total) const {
    const size_t first = first_panel + first_of(t, total);
    const char* at = (const char*)matrix.data + first * panel_bytes(matrix.k, matrix.is_int8);
    for (int i = 0; i < kWarmBytes; i += 64) __builtin_prefetch(at + i);
  }

  // The input of an MTP module, in place of the embeddings.
  void run_join(int t) {
    each_row(t, s_.rows, [&](int r) {
      float* row = joined_ + (size_t)r * m_.join.k;
      k_.norm(s_.states + at(r), m_.embedding_norm, m_.eps, m_.hidden, row);
      k_.norm(s_.previous + at(r), m_.hidden_norm, m_.eps, m_.hidden, row + m_.hidden);
      k_.prepare(m_.join, row, r, rows_);
    });
    warm(t, m_.join, 0, panels(m_.hidden));
    e_.pool.barrier();
    share(t, m_.num_layers * 5 + 1, panels(m_.hidden),
          [&](int begin, int end) { k_.linear(m_.join, rows_, begin, end, s_.states, m_.hidden, false); });
    e_.pool.barrier();
  }

  // A layer's keys and values of all rows; their queries too.
  void store_entries(int t, int index) {
    const HeadlongLayer& layer = m_.layers[index];
    const int counter = index * 5;
    warm(t, layer.qkv, 0, panels(layer.qkv.n));
    each_row(t, s_.rows, [&](int r) {
      k_.norm(s_.states + at(r), layer.input_norm, m_.eps, m_.hidden, normed_ + at(r));
      k_.prepare(layer.qkv, normed_ + at(r), r, rows_);
    });
    e_.pool.barrier();
    share(t, counter, panels(layer.qkv.n),
          [&](int begin, int end) { k_.linear(layer.qkv, rows_, begin, end, qkv_, qkv_width_, false); });
    e_.pool.barrier();
    each_row(t, s_.rows, [&](int r) { place(layer, r); });
    e_.pool.barrier();
  }

  void run_layer(int t, int index) {
    const HeadlongLayer& layer = m_.layers[index];
    const int mixed = m_.heads * m_.head_dim, counter = index * 5;
    store_entries(t, index);
    float* scores = e_.scores[t].floats((size_t)kQueries * score_stride_);
    std::atomic<int32_t>& next = next_of(counter + 1, 0);
    for (int task; (task = next.fetch_add(1, std::memory_order_relaxed)) < (int)tasks_.size();)
      attend(layer, tasks_[task], scores);
    warm(t, layer.output, 0, panels(layer.output.n));
    e_.pool.barrier();
    each_row(t, s_.rows, [&](int r) { k_.prepare(layer.output, mixed_ + (size_t)r * mixed, r, rows_); });
    e_.pool.barrier();
    share(t, counter + 2, panels(layer.output.n),
          [&](int begin, int end) { k_.linear(layer.output, rows_, begin, end, s_.states, m_.hidden, true); });
    e_.pool.barrier();
    run_mlp(t, index);
  }

  void run_mlp(int t, int index) {
    const HeadlongLayer& layer = m_.layers[index];
    warm(t, layer.gate_up, 0, panels(m_.intermediate));
    warm(t, layer.gate_up, panels(m_.intermediate), panels(m_.intermediate));
    each_row(t, s_.rows, [&](int r) {
      k_.norm(s_.states + at(r), layer.post_norm, m_.eps, m_.hidden, normed_ + at(r));
      k_.prepare(layer.gate_up, normed_ + at(r), r, rows_);
    });
    e_.pool.barrier();
    share(t, index * 5 + 3, panels(m_.intermediate),
          [&](int begin, int end) { k_.gated(layer.gate_up, rows_, begin, end, gated_, m_.intermediate); });
    e_.pool.barrier();
    warm(t, layer.down, 0, panels(layer.down.n));
    each_row(t, s_.rows, [&](int r) { k_.prepare(layer.down, gated_ + (size_t)r * m_.intermediate, r, rows_); });
    e_.pool.barrier();
    share(t, index * 5 + 4, panels(layer.down.n),
          [&](int begin, int end) { k_.linear(layer.down, rows_, begin, end, s_.states, m_.hidden, true); });
    e_.pool.barrier();
  }

  // Norms and turns a row's heads, and stores its key and value in its slot.
  void place(const HeadlongLayer& layer, int row) {
    const int size = m_.head_dim;
    const float* cosine = m_.cosine + (size_t)s_.positions[row] * (size / 2);
    const float* sine = m_.sine + (size_t)s_.positions[row] * (size / 2);
    float* head = qkv_ + (size_t)row * qkv_width_;
    for (int h = 0; h < m_.heads + m_.kv_heads; h++, head += size) {
      const float* norm = h < m_.heads ? layer.q_norm : layer.k_norm;
      if (norm) k_.norm(head, norm, m_.eps, size, head);
      k_.rope(head, cosine, sine, size);
      if (h < m_.heads) continue;
      float* keys = layer.keys + ((size_t)(h - m_.heads) * m_.num_tiles + s_.slots[row] / kTile) * size * kTile;
      for (int d = 0; d < size; d++) keys[d * kTile + s_.slots[row] % kTile] = head[d];
    }
    for (int h = 0; h < m_.kv_heads; h++, head += size)
      std::memcpy(layer.values + ((size_t)h * m_.num_tiles * kTile + s_.slots[row]) * size, head, size * sizeof(float));
  }

  void plan_attention() {
    int32_t most = 0;
    for (int i = 0; i < s_.segments; i++) {
      most = std::max(most, s_.requests[i].num_entries);
      for (int kv_head = 0; kv_head < m_.kv_heads; kv_head++)
        for (int query = 0; query < s_.requests[i].num_rows * groups_; query += kQueries)
          tasks_.push_back({i, kv_head, query});
    }
    score_stride_ = (most / kTile + 2) * kTile;
  }

  void attend(const HeadlongLayer& layer, const Task& which, float* scores) {
    const HeadlongSegment& request = s_.requests[which.segment];
    const size_t size = m_.head_dim;
    AttentionTask task;
    task.count = std::min(kQueries, request.num_rows * groups_ - which.first_query);
    task.head_dim = m_.head_dim;
    for (int q = 0; q < task.count; q++) {
      const int row = request.first_row + (which.first_query + q) / groups_;
      const int head = which.kv_head * groups_ + (which.first_query + q) % groups_;
      task.queries[q] = qkv_ + (size_t)row * qkv_width_ + head * size;
      task.outputs[q] = mixed_ + ((size_t)row * m_.heads + head) * size;
      const int32_t position = s_.positions[row];
      task.views[q].low = layer.window ? std::max(layer.first, position - layer.window + 1) : layer.first;
      task.views[q].prefix = s_.prefix[row];
      task.views[q].path_length = s_.path_start[row + 1] - s_.path_start[row];
      task.views[q].path = s_.path + s_.path_start[row];
    }
    task.keys = layer.keys + (size_t)which.kv_head * m_.num_tiles * size * kTile;
    task.values = layer.values + (size_t)which.kv_head * m_.num_tiles * kTile * size;
    task.tiles = request.tiles;
    task.scale = m_.attention_scale;
    task.scores = scores;
    task.score_stride = score_stride_;
    k_.attend(task);
  }

  Engine& e_;
  const HeadlongModel& m_;
  const Kernels& k_;
  const HeadlongStep& s_;
  const int groups_;
  Rows rows_;
  float *normed_, *qkv_, *mixed_, *gated_, *joined_ = nullptr;
  int32_t qkv_width_, score_stride_ = 0;
  std::vector<Task> tasks_;
};

}  // namespace

extern "C" {

// null if memory or threads ran out. The model's arrays must outlive the engine.
void* headlong_create(const HeadlongModel* model, const char* kernels, int32_t threads) {
  try {
    return new Engine(*model, chosen(kernels), threads);
  } catch (const std::exception&) {
    return nullptr;
  }
}

void headlong_destroy(void* engine) { delete (Engine*)engine; }

// Returns 1 if memory ran out; nothing was computed then.
int32_t headlong_step(void* engine, const HeadlongStep* step) {
  Engine& e = *(Engine*)engine;
  try {
    Step run(e, *step);
    e.pool.run([&run](int t) { run.thread(t); });
  } catch (const std::bad_alloc&) {
    return 1;
  }
  return 0;
}

// Copies KV entries of every layer from slots ``source`` to slots ``target``: all are read before any is written.
int32_t headlong_move(void* engine, const int32_t* source, const int32_t* target, int32_t count) {
  Engine& e = *(Engine*)engine;
  const HeadlongModel& m = e.model;
  const int32_t size = m.head_dim;
  try {
    std::vector<float> held((size_t)count * size);
    for (int32_t layer = 0; layer < m.num_layers; layer++)
      for (int32_t h = 0; h < m.kv_heads; h++) {
        float* keys = m.layers[layer].keys + (size_t)h * m.num_tiles * size * kTile;
        float* values = m.layers[layer].values + (size_t)h * m.num_tiles * kTile * size;
        auto key = [&](int32_t slot, int32_t d) -> float& {
          return keys[((size_t)(slot / kTile) * size + d) * kTile + slot % kTile];
        };
        for (int32_t i = 0; i < count; i++)
          for (int32_t d = 0; d < size; d++) held[(size_t)i * size + d] = key(source[i], d);
        for (int32_t i = 0; i < count; i++)
          for (int32_t d = 0; d < size; d++) key(target[i], d) = held[(size_t)i * size + d];
        for (int32_t i = 0; i < count; i++)
          std::memcpy(&held[(size_t)i * size], values + (size_t)source[i] * size, size * sizeof(float));
        for (int32_t i = 0; i < count; i++)
          std::memcpy(values + (size_t)target[i] * size, &held[(size_t)i * size], size * sizeof(float));
      }
  } catch (const std::bad_alloc&) {
    return 1;
  }
  return 0;
}

}  // extern "C"
