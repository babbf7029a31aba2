// The decoder layers of a step by rows, computed by a team of threads in one call.
//
// Every output is one sum that is added up in one order: products over their inputs from the first to the last, scores
// and weighted values over keys in the order of their positions, in splits that lie at fixed positions. So a token's
// bits depend on nothing but the token and the text before it: not on how many rows there are, on how they are tiled,
// or on which thread computes them. Numbers between the products are float32; weights and cache may be bfloat16.
//
// Plain C interface, used through ctypes (engine/cpu/library.py), which also says how weights are packed.
//
// Legend: T rows, D hidden size, Q query heads, H key/value heads, E head size, I intermediate size, O outputs,
// K inputs of a product.

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace {

// -- vectors ----------------------------------------------------------------------------------------------------------

#ifdef __AVX512F__
constexpr int WIDTH = 16;
using Vec = __m512;
inline Vec zero() { return _mm512_setzero_ps(); }
inline Vec all(float x) { return _mm512_set1_ps(x); }
inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec larger(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec smaller(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline Vec nearest(Vec a) { return _mm512_roundscale_ps(a, 0); }
inline Vec power_of_two(Vec n) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
inline Vec low_halves(const uint16_t* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16));
}
inline Vec high_halves(const uint16_t* p) {
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(0xffff0000)));
}
inline Vec widened(const uint16_t* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
#else
constexpr int WIDTH = 8;
using Vec = __m256;
inline Vec zero() { return _mm256_setzero_ps(); }
inline Vec all(float x) { return _mm256_set1_ps(x); }
inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec larger(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec smaller(Vec a, Vec b) { return _mm256_min_ps(a, b); }
inline Vec nearest(Vec a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vec power_of_two(Vec n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
inline Vec low_halves(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256((const __m256i*)p), 16));
}
inline Vec high_halves(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256((const __m256i*)p), _mm256_set1_epi32(0xffff0000)));
}
inline Vec widened(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
#endif

inline float sum(Vec v) {
  float lanes[WIDTH];
  store(lanes, v);
  for (int half = WIDTH / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

inline float maximum(Vec v) {
  float lanes[WIDTH];
  store(lanes, v);
  return *std::max_element(lanes, lanes + WIDTH);
}

// e^x to about one unit in the last place (Cephes' expf), from -87.3 to 88. NaN stays NaN: of the two operands of a
// comparison with one, the processor takes the second.
inline Vec exponential(Vec x) {
  x = larger(all(-87.3f), smaller(all(88.0f), x));
  Vec n = nearest(x * all(1.44269504f));
  Vec r = fma(n, all(-0.693359375f), x);
  r = fma(n, all(2.12194440e-4f), r);
  Vec y = all(1.9875691500e-4f);
  y = fma(y, r, all(1.3981999507e-3f));
  y = fma(y, r, all(8.3334519073e-3f));
  y = fma(y, r, all(4.1665795894e-2f));
  y = fma(y, r, all(1.6666665459e-1f));
  y = fma(y, r, all(5.0000001201e-1f));
  y = fma(y, r * r, r) + all(1.0f);
  return y * power_of_two(n);
}

inline uint16_t rounded(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;  // NaN stays one
  return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

// -- a team of threads ------------------------------------------------------------------------------------------------

inline void pause_or_yield(int& spins) {
  if (++spins < 4000)
    _mm_pause();
  else
    std::this_thread::yield();  // the machine is busy: whoever is waited for may need this core
}

class Team {
 public:
  explicit Team(int threads) : threads_(threads) {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { serve(i); });
  }

  ~Team() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopped_ = true;
      generation_.fetch_add(1);
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
  }

  int threads() const { return threads_; }

  // Have every thread call run(job, its number); returns when all have.
  void run(void (*job)(void*, int), void* data) {
    if (threads_ > 1) {
      job_ = job;
      data_ = data;
      working_.store(threads_ - 1);
      {
        std::lock_guard<std::mutex> lock(mutex_);
        generation_.fetch_add(1);
      }
      wake_.notify_all();
    }
    job(data, 0);
    for (int spins = 0; working_.load(std::memory_order_acquire);) pause_or_yield(spins);
  }

  // Nobody goes on before all are here.
  void barrier() {
    if (threads_ == 1) return;
    const unsigned phase = phase_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
    } else {
      for (int spins = 0; phase_.load(std::memory_order_acquire) == phase;) pause_or_yield(spins);
    }
  }

 private:
  void serve(int number) {
    unsigned seen = 0;
    while (true) {
      // Steps follow one another: look for the next one for a while before the core is given back.
      for (int spins = 0; generation_.load(std::memory_order_acquire) == seen && spins < SPINS; ++spins) _mm_pause();
      if (generation_.load(std::memory_order_acquire) == seen) {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return generation_.load() != seen; });
      }
      seen = generation_.load(std::memory_order_acquire);
      if (stopped_) return;
      job_(data_, number);
      working_.fetch_sub(1, std::memory_order_release);
    }
  }

  static constexpr int SPINS = 500;
  const int threads_;
  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<unsigned> generation_{0};
  bool stopped_ = false;
  void (*job_)(void*, int) = nullptr;
  void* data_ = nullptr;
  std::atomic<int> working_{0};
  std::atomic<int> arrived_{0};
  std::atomic<unsigned> phase_{0};
};

std::mutex one_at_a_time;
Team* team = nullptr;  // of the call that computes

// The team of so many threads; its threads sleep while another computes.
Team* team_of(int threads) {
  static std::map<int, std::unique_ptr<Team>> teams;
  auto& found = teams[threads];
  if (!found) found = std::make_unique<Team>(threads);
  return found.get();
}

// Items of a phase, handed out to whoever is free.
class Counters {
 public:
  explicit Counters(int phases) : next_(phases) {
    for (auto& each : next_) each.store(0, std::memory_order_relaxed);
  }
  // The first of so many items to do next in this phase.
  int take(int phase, int items) { return next_[phase].fetch_add(items, std::memory_order_relaxed); }

 private:
  std::vector<std::atomic<int>> next_;
};

// -- products ---------------------------------------------------------------------------------------------------------

constexpr int PANEL = 2 * WIDTH;  // outputs that are computed together
constexpr int ROWS = WIDTH == 16 ? 12 : 6;
constexpr int ROW_BLOCK = 16 * ROWS;
constexpr int AHEAD = 2048;  // bytes
constexpr int DEPTH = 256;  // inputs at a time where there are several tiles of rows

// Two vectors of a panel: of one input, the weights of its first and second WIDTH outputs. In bfloat16 these lie side
// by side, each pair in one word.
inline void weights_at(const float* panel, int k, Vec& first, Vec& second) {
  first = load(panel + (size_t)k * PANEL);
  second = load(panel + (size_t)k * PANEL + WIDTH);
}
inline void weights_at(const uint16_t* panel, int k, Vec& first, Vec& second) {
  first = low_halves(panel + (size_t)k * PANEL);
  second = high_halves(panel + (size_t)k * PANEL);
}

// M rows times P panels over inputs [0, depth): sums are taken up from and left in `sums` [P][M][PANEL].
template <typename W, int M, int P>
inline void tile(const float* x, int stride, const W* panels, size_t panel_size, int depth, float* sums, bool fresh,
                 const char* ahead, int ahead_step) {
  Vec acc[P][M][2];
  for (int p = 0; p < P; ++p)
    for (int m = 0; m < M; ++m)
      for (int v = 0; v < 2; ++v) acc[p][m][v] = fresh ? zero() : load(sums + ((p * M + m) * 2 + v) * WIDTH);
#pragma GCC unroll 4
  for (int k = 0; k < depth; ++k) {
    if (P > 1 && M > 1 && (sizeof(W) == 4 || !(k & 1)))  // sums of one row leave time for what the processor fetches
      for (int p = 0; p < P; ++p)
        _mm_prefetch(reinterpret_cast<const char*>(panels + p * panel_size + (size_t)k * PANEL) + AHEAD / 2,
                     _MM_HINT_T0);
    if (ahead_step && !(k & 1)) {
      const char* line = ahead + (size_t)(k >> 1) * ahead_step;
      _mm_prefetch(line, _MM_HINT_T0);
      if (ahead_step > 64) _mm_prefetch(line + 64, _MM_HINT_T0);
    }
    Vec w[P][2];
    for (int p = 0; p < P; ++p) weights_at(panels + p * panel_size, k, w[p][0], w[p][1]);
    for (int m = 0; m < M; ++m) {
      const Vec input = all(x[(size_t)m * stride + k]);
      for (int p = 0; p < P; ++p) {
        acc[p][m][0] = fma(input, w[p][0], acc[p][m][0]);
        acc[p][m][1] = fma(input, w[p][1], acc[p][m][1]);
      }
    }
  }
  for (int p = 0; p < P; ++p)
    for (int m = 0; m < M; ++m)
      for (int v = 0; v < 2; ++v) store(sums + ((p * M + m) * 2 + v) * WIDTH, acc[p][m][v]);
}

template <typename W, int P>
void tile_of(int rows, const float* x, int stride, const W* panels, size_t panel_size, int depth, float* sums,
             bool fresh, const char* ahead, int ahead_step) {
  switch (rows) {
#define CASE(M)                                                                                   \
  case M:                                                                                         \
    if constexpr (M <= ROWS && M * P <= 2 * ROWS)                                                 \
      tile<W, M, P>(x, stride, panels, panel_size, depth, sums, fresh, ahead, ahead_step);        \
    break;
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#undef CASE
  }
}

enum class Then { STORE, ADD, SILU, GELU };  // what becomes of a sum

struct Product {
  const void* weights;  // [panels][K][PANEL], see engine/cpu/library.py
  const float* bias;    // [O] or none
  int inputs, outputs;
};

// One row of a panel's sums to where it belongs. `out` has `stride` columns a row.
inline void finish(const Product& product, Then then, const float* sums, int panel, float* out) {
  const int first = panel * PANEL;
  const float* bias = product.bias ? product.bias + first : nullptr;
  if (then == Then::SILU || then == Then::GELU) {
    Vec gate = load(sums), up = load(sums + WIDTH);
    if (bias) gate = gate + load(bias), up = up + load(bias + WIDTH);
    Vec inner = gate;
    if (then == Then::GELU)  // gelu by tanh: gate * sigmoid(2 * inner)
      inner = all(1.5957691216f) * fma(all(0.044715f) * gate * gate, gate, gate);
    store(out + panel * WIDTH, gate / (all(1.0f) + exponential(zero() - inner)) * up);
    return;
  }
  const int count = std::min(PANEL, product.outputs - first);
  out += first;
  if (count == PANEL) {
    for (int v = 0; v < PANEL; v += WIDTH) {
      Vec value = load(sums + v);
      if (bias) value = value + load(bias + v);
      if (then == Then::ADD) value = load(out + v) + value;
      store(out + v, value);
    }
    return;
  }
  for (int i = 0; i < count; ++i) {
    const float value = bias ? sums[i] + bias[i] : sums[i];
    out[i] = then == Then::ADD ? out[i] + value : value;
  }
}

// A few rows: each panel is read once, several at a time so that one sum need not wait for another.
template <typename W, int P>
void few_rows(const Product& product, Then then, const float* x, int rows, float* out, int stride, int from, int to) {
  const size_t panel_size = (size_t)product.inputs * PANEL;
  const W* weights = static_cast<const W*>(product.weights);
  float sums[2 * ROWS * PANEL];
  int panel = from;
  for (; panel + P <= to; panel += P) {
    const W* first = weights + panel * panel_size;
    tile_of<W, P>(rows, x, product.inputs, first, panel_size, product.inputs, sums, true,
                  reinterpret_cast<const char*>(first) + AHEAD, P == 1 ? 2 * PANEL * sizeof(W) : 0);
    for (int p = 0; p < P; ++p)
      for (int m = 0; m < rows; ++m)
        finish(product, then, sums + (p * rows + m) * PANEL, panel + p, out + (size_t)m * stride);
  }
  if constexpr (P > 1)
    if (panel < to) few_rows<W, 1>(product, then, x, rows, out, stride, panel, to);
}

// Many rows: a piece of a panel is used by all tiles while it is in the cache, and the next one is fetched meanwhile.
template <typename W>
void many_rows(const Product& product, Then then, const float* x, int rows, float* out, int stride, int from, int to) {
  const size_t panel_size = (size_t)product.inputs * PANEL;
  const W* weights = static_cast<const W*>(product.weights);
  const int tiles = (rows + ROWS - 1) / ROWS;
  static thread_local float sums[ROW_BLOCK * PANEL];
  for (int panel = from; panel < to; ++panel) {
    for (int k = 0; k < product.inputs; k += DEPTH) {
      const int depth = std::min(DEPTH, product.inputs - k);
      const W* piece = weights + panel * panel_size + (size_t)k * PANEL;
      const char* next = reinterpret_cast<const char*>(piece + (size_t)depth * PANEL);
      // Every other input a line is fetched: so many bytes for each tile, one after the other.
      const int share = tiles <= 4 ? (int)(2 * PANEL * sizeof(W)) / tiles : 0;
      for (int t = 0, row = 0; t < tiles; ++t) {
        const int count = rows * (t + 1) / tiles - row;
        tile_of<W, 1>(count, x + (size_t)row * product.inputs + k, product.inputs, piece, panel_size, depth,
                      sums + row * PANEL, k == 0, next + (size_t)t * share * (depth / 2), share);
        row += count;
      }
    }
    for (int m = 0; m < rows; ++m) finish(product, then, sums + m * PANEL, panel, out + (size_t)m * stride);
  }
}

template <typename W>
void panels(const Product& product, Then then, const float* x, int rows, float* out, int stride, int from, int to) {
  if (rows == 1) return few_rows<W, 4>(product, then, x, rows, out, stride, from, to);
  if (rows == 2 || (rows == 3 && sizeof(W) == 4)) return few_rows<W, 2>(product, then, x, rows, out, stride, from, to);
  if (rows <= ROWS) return few_rows<W, 1>(product, then, x, rows, out, stride, from, to);
  for (int row = 0; row < rows; row += ROW_BLOCK)
    many_rows<W>(product, then, x + (size_t)row * product.inputs, std::min(ROW_BLOCK, rows - row),
                 out + (size_t)row * stride, stride, from, to);
}

// This thread's part of x [T, K] times the weights, to out [T, stride].
void multiply(const Product& product, bool half, Then then, const float* x, int rows, float* out, int stride,
              Counters& counters, int phase, int threads) {
  const int total = (product.outputs + PANEL - 1) / PANEL;
  const int block = std::max(1, std::min(total / (threads * 4), 16) / 4 * 4);
  for (int from; (from = counters.take(phase, block)) < total;) {
    const int to = std::min(from + block, total);
    if (half)
      panels<uint16_t>(product, then, x, rows, out, stride, from, to);
    else
      panels<float>(product, then, x, rows, out, stride, from, to);
  }
}

// -- norms and rotation -----------------------------------------------------------------------------------------------

void normalise(const float* row, const float* weight, float eps, int size, float* out) {
  Vec squares = zero();
  for (int i = 0; i < size; i += WIDTH) squares = fma(load(row + i), load(row + i), squares);
  const Vec scale = all(1.0f / std::sqrt(sum(squares) / size + eps));
  for (int i = 0; i < size; i += WIDTH) store(out + i, load(row + i) * scale * load(weight + i));
}

void rotate(float* head, const float* cos, const float* sin, int size) {
  const int half = size / 2;
  for (int i = 0; i < half; i += WIDTH) {
    const Vec left = load(head + i), right = load(head + half + i);
    store(head + i, left * load(cos + i) - right * load(sin + i));
    store(head + half + i, right * load(cos + half + i) + left * load(sin + half + i));
  }
}

void keep(const float* head, void* cache, size_t at, int size, bool half) {
  if (!half) {
    std::memcpy(static_cast<float*>(cache) + at, head, size * sizeof(float));
    return;
  }
  uint16_t* out = static_cast<uint16_t*>(cache) + at;
  for (int i = 0; i < size; ++i) out[i] = rounded(head[i]);
}

}  // namespace

// -- what Python sees: the fields are those of engine/cpu/library.py --------------------------------------------------

extern "C" {

struct Layer {
  const void *qkv, *output, *gate_up, *down;
  const float *qkv_bias, *output_bias, *gate_up_bias, *down_bias;
  const float *input_norm, *mlp_norm, *query_norm, *key_norm;
  void *keys, *values;  // [slots, H, E]
  float scaling, input_eps, mlp_eps, query_eps, key_eps;
  int window;  // tokens that are seen, itself included; 0: all
  int gelu;
};

struct Stack {
  const Layer* layers;
  const float* norm;
  float eps;
  int count, hidden, query_heads, key_heads, head_size, intermediate;
  int half;  // weights and cache are bfloat16
};

struct Rows {  // see engine/attention/rows.py
  int count;
  int page;  // slots of a page of the cache
  const int *slots, *keys, *home, *pages, *branch, *group, *common, *numbers;
};

}  // extern "C"

namespace {

// -- attention --------------------------------------------------------------------------------------------------------

constexpr int SPLIT = 256;  // positions whose scores are computed together; splits lie at multiples of it
constexpr float LOWEST = -std::numeric_limits<float>::infinity();

struct Attention {
  const Stack& stack;
  const Layer& layer;
  const Rows& rows;
  const float* query;  // [T, stride], queries first
  int stride;
  float* out;  // [T, Q * E]
};

// Memory of one thread.
struct Workspace {
  std::vector<float> keys, values, scores, sums, totals, part;
};

int slot_of(const Attention& a, int row, int position) {
  const Rows& rows = a.rows;
  if (position >= rows.home[row]) return rows.numbers[rows.branch[row] + position - rows.home[row]];
  return rows.numbers[rows.pages[row] + position / rows.page] * rows.page + position % rows.page;
}

// Where a key (or value) is as float32: in the cache itself, or written out to `copy`.
const float* widened_at(const void* cache, size_t at, int size, bool half, float* copy) {
  if (!half) return static_cast<const float*>(cache) + at;
  const uint16_t* source = static_cast<const uint16_t*>(cache) + at;
  for (int i = 0; i < size; i += WIDTH) store(copy + i, widened(source + i));
  return copy;
}

// Scores of one query and WIDTH keys. Every product is added up in the same order, whichever of the keys it is.
inline void scores_of(const float* query, const float* const* keys, int size, float scale, float* out) {
  Vec acc[WIDTH];
  for (int j = 0; j < WIDTH; ++j) acc[j] = zero();
  for (int i = 0; i < size; i += WIDTH) {
    const Vec q = load(query + i);
    for (int j = 0; j < WIDTH; ++j) acc[j] = fma(q, load(keys[j] + i), acc[j]);
  }
#ifdef __AVX512F__
  for (int j = 0; j < WIDTH; ++j) out[j] = sum(acc[j]) * scale;
#else
  const Vec a = _mm256_hadd_ps(_mm256_hadd_ps(acc[0], acc[1]), _mm256_hadd_ps(acc[2], acc[3]));
  const Vec b = _mm256_hadd_ps(_mm256_hadd_ps(acc[4], acc[5]), _mm256_hadd_ps(acc[6], acc[7]));
  const __m128 low = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 high = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
  store(out, _mm256_set_m128(high, low) * all(scale));
#endif
}

// out [size] = sum over keys of weight * value, from the first to the last.
inline void weigh(const float* weights, const float* const* values, int count, int size, float* out) {
  constexpr int AT_ONCE = 8;
  int i = 0;
  for (; i + AT_ONCE * WIDTH <= size; i += AT_ONCE * WIDTH) {
    Vec acc[AT_ONCE];
    for (auto& each : acc) each = zero();
    for (int k = 0; k < count; ++k) {
      const Vec weight = all(weights[k]);
      for (int v = 0; v < AT_ONCE; ++v) acc[v] = fma(weight, load(values[k] + i + v * WIDTH), acc[v]);
    }
    for (int v = 0; v < AT_ONCE; ++v) store(out + i + v * WIDTH, acc[v]);
  }
  for (; i < size; i += WIDTH) {
    Vec acc = zero();
    for (int k = 0; k < count; ++k) acc = fma(all(weights[k]), load(values[k] + i), acc);
    store(out + i, acc);
  }
}

// One key head for the rows that read common keys together, the first of which is `first`.
void attend(const Attention& a, int first, int head, Workspace& space) {
  const Stack& s = a.stack;
  const int size = s.head_size, per_key = s.query_heads / s.key_heads, members = a.rows.group[first];
  const int heads = members * per_key, common = a.rows.common[first];
  space.keys.resize((size_t)(SPLIT + SPLIT) * size);
  space.values.resize((size_t)(SPLIT + SPLIT) * size);
  space.scores.resize((size_t)heads * SPLIT);
  space.sums.assign((size_t)heads * size, 0.0f);
  space.totals.assign(heads, 0.0f);
  space.part.resize(size);
  std::vector<float> maxima(heads, LOWEST);
  static thread_local const float *keys[SPLIT + WIDTH], *values[SPLIT + WIDTH];
  int longest = 0, nearest_start = std::numeric_limits<int>::max();
  for (int m = 0; m < members; ++m) {
    const int seen = a.rows.keys[first + m];
    longest = std::max(longest, seen);
    nearest_start = std::min(nearest_start, a.layer.window ? std::max(0, seen - a.layer.window) : 0);
  }
  for (int start = nearest_start / SPLIT * SPLIT; start < longest; start += SPLIT) {
    const auto place = [&](int row, int i, int copy) {
      const size_t at = ((size_t)slot_of(a, row, start + i) * s.key_heads + head) * size;
      keys[i] = widened_at(a.layer.keys, at, size, s.half, space.keys.data() + (size_t)copy * size);
      values[i] = widened_at(a.layer.values, at, size, s.half, space.values.data() + (size_t)copy * size);
    };
    const int shared = std::clamp(common - start, 0, SPLIT);
    for (int i = 0; i < shared; ++i) place(first, i, i);
    const int together = shared / WIDTH * WIDTH;  // scored for all rows while the keys are near
    for (int i = 0; i < together; i += WIDTH)
      for (int h = 0; h < heads; ++h) {
        const int row = first + h / per_key;
        const float* query = a.query + (size_t)row * a.stride + (size_t)(head * per_key + h % per_key) * size;
        scores_of(query, keys + i, size, a.layer.scaling, space.scores.data() + (size_t)h * SPLIT + i);
      }
    for (int m = 0; m < members; ++m) {
      const int row = first + m, seen = a.rows.keys[row];
      const int count = std::min(seen - start, SPLIT);
      const int hidden = a.layer.window ? std::clamp(seen - a.layer.window - start, 0, SPLIT) : 0;
      if (count <= hidden) continue;
      for (int i = shared; i < count; ++i) place(row, i, SPLIT + i);
      for (int i = count; i < (count + WIDTH - 1) / WIDTH * WIDTH; ++i) keys[i] = keys[0];
      for (int g = 0; g < per_key; ++g) {
        const int h = m * per_key + g;
        const float* query = a.query + (size_t)row * a.stride + (size_t)(head * per_key + g) * size;
        float* scores = space.scores.data() + (size_t)h * SPLIT;
        for (int i = together; i < count; i += WIDTH)
          scores_of(query, keys + i, size, a.layer.scaling, scores + i);
        const int padded = (count + WIDTH - 1) / WIDTH * WIDTH;
        std::fill(scores, scores + hidden, LOWEST);
        std::fill(scores + count, scores + padded, LOWEST);
        Vec top = all(LOWEST);
        for (int i = 0; i < padded; i += WIDTH) top = larger(top, load(scores + i));
        const float peak = maximum(top);
        Vec total = zero();
        for (int i = 0; i < padded; i += WIDTH) {
          const Vec weight = exponential(load(scores + i) - all(peak));
          store(scores + i, weight);
        }
        std::fill(scores, scores + hidden, 0.0f);
        std::fill(scores + count, scores + padded, 0.0f);
        for (int i = 0; i < padded; i += WIDTH) total = total + load(scores + i);
        weigh(scores + hidden, values + hidden, count - hidden, size, space.part.data());
        // Splits are added from the first to the last.
        const float before = maxima[h], now = std::max(before, peak);
        const float old_scale = before == LOWEST ? 0.0f : std::exp(before - now), new_scale = std::exp(peak - now);
        float* sums = space.sums.data() + (size_t)h * size;
        for (int i = 0; i < size; i += WIDTH)
          store(sums + i, fma(load(space.part.data() + i), all(new_scale), load(sums + i) * all(old_scale)));
        space.totals[h] = space.totals[h] * old_scale + sum(total) * new_scale;
        maxima[h] = now;
      }
    }
  }
  for (int h = 0; h < heads; ++h) {
    const int row = first + h / per_key;
    float* out = a.out + ((size_t)row * s.query_heads + head * per_key + h % per_key) * size;
    const Vec total = all(space.totals[h]);
    for (int i = 0; i < size; i += WIDTH) store(out + i, load(space.sums.data() + (size_t)h * size + i) / total);
  }
}

// -- a step -----------------------------------------------------------------------------------------------------------

struct Step {
  const Stack* stack;
  const Rows* rows;
  float* hidden;  // [T, D], read and overwritten
  const float *cos, *sin;
  float* out;  // [T, D]: after the final norm
  std::vector<int> leaders;
  std::vector<float> normed, qkv, found, gated;
  Counters counters;
};

constexpr int PHASES = 8;  // of a layer

void compute(void* data, int) {
  Step& step = *static_cast<Step*>(data);
  const Stack& s = *step.stack;
  const int count = step.rows->count, threads = team->threads(), size = s.head_size;
  const int heads = s.query_heads + 2 * s.key_heads, width = heads * size, found_width = s.query_heads * size;
  static thread_local Workspace space;
  int phase = 0;
  const auto each = [&](int items, auto&& work) {
    const int block = std::max(1, items / (threads * 4));
    for (int from; (from = step.counters.take(phase, block)) < items;)
      for (int i = from; i < std::min(from + block, items); ++i) work(i);
    ++phase;
    team->barrier();
  };
  const auto product = [&](const void* weights, const float* bias, int inputs, int outputs, Then then, const float* x,
                           float* out, int stride) {
    multiply({weights, bias, inputs, outputs}, s.half, then, x, count, out, stride, step.counters, phase,
             threads);
    ++phase;
    team->barrier();
  };
  float *hidden = step.hidden, *normed = step.normed.data(), *qkv = step.qkv.data();
  float *found = step.found.data(), *gated = step.gated.data();
  for (int l = 0; l < s.count; ++l) {
    const Layer& layer = s.layers[l];
    each(count, [&](int t) {
      const size_t at = (size_t)t * s.hidden;
      normalise(hidden + at, layer.input_norm, layer.input_eps, s.hidden, normed + at);
    });
    product(layer.qkv, layer.qkv_bias, s.hidden, width, Then::STORE, normed, qkv, width);
    each(count * heads, [&](int i) {
      const int t = i / heads, h = i % heads;
      float* own = qkv + (size_t)t * width + (size_t)h * size;
      const bool query = h < s.query_heads, key = !query && h < s.query_heads + s.key_heads;
      if (query && layer.query_norm) normalise(own, layer.query_norm, layer.query_eps, size, own);
      if (key && layer.key_norm) normalise(own, layer.key_norm, layer.key_eps, size, own);
      if (query || key) rotate(own, step.cos + (size_t)t * size, step.sin + (size_t)t * size, size);
      if (query) return;
      const int place = key ? h - s.query_heads : h - s.query_heads - s.key_heads;
      const size_t at = ((size_t)step.rows->slots[t] * s.key_heads + place) * size;
      keep(own, key ? layer.keys : layer.values, at, size, s.half);
    });
    const Attention attention{s, layer, *step.rows, qkv, width, found};
    each((int)step.leaders.size() * s.key_heads,
         [&](int i) { attend(attention, step.leaders[i / s.key_heads], i % s.key_heads, space); });
    product(layer.output, layer.output_bias, found_width, s.hidden, Then::ADD, found, hidden, s.hidden);
    each(count, [&](int t) {
      const size_t at = (size_t)t * s.hidden;
      normalise(hidden + at, layer.mlp_norm, layer.mlp_eps, s.hidden, normed + at);
    });
    product(layer.gate_up, layer.gate_up_bias, s.hidden, 2 * s.intermediate, layer.gelu ? Then::GELU : Then::SILU,
            normed, gated, s.intermediate);
    product(layer.down, layer.down_bias, s.intermediate, s.hidden, Then::ADD, gated, hidden, s.hidden);
  }
  each(count, [&](int t) {
    const size_t at = (size_t)t * s.hidden;
    normalise(hidden + at, s.norm, s.eps, s.hidden, step.out + at);
  });
}

struct Alone {
  Product product;
  bool half;
  const float* x;
  float* out;
  int rows;
  Counters counters;
};

void compute_alone(void* data, int) {
  Alone& job = *static_cast<Alone*>(data);
  multiply(job.product, job.half, Then::STORE, job.x, job.rows, job.out, job.product.outputs, job.counters, 0,
           team->threads());
}

}  // namespace

extern "C" {

// Floats of a vector: weights are packed by it.
int paceline_width() { return WIDTH; }

// All layers and the final norm of a step. `hidden` [T, D] is overwritten, `out` [T, D] written.
void paceline_step(const Stack* stack, const Rows* rows, float* hidden, const float* cos, const float* sin,
                   float* out, int threads) {
  std::lock_guard<std::mutex> lock(one_at_a_time);
  team = team_of(threads);
  static Step step{nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, {}, {}, {}, {}, {}, Counters(0)};
  step.stack = stack, step.rows = rows, step.hidden = hidden, step.cos = cos, step.sin = sin, step.out = out;
  step.leaders.clear();
  for (int t = 0; t < rows->count; ++t)
    if (rows->group[t]) step.leaders.push_back(t);
  const size_t count = rows->count;
  const auto room = [](std::vector<float>& memory, size_t size) {
    if (memory.size() < size) memory.resize(size);
  };
  room(step.normed, count * stack->hidden);
  room(step.qkv, count * (stack->query_heads + 2 * stack->key_heads) * stack->head_size);
  room(step.found, count * stack->query_heads * stack->head_size);
  room(step.gated, count * stack->intermediate);
  step.counters = Counters(stack->count * PHASES + 1);
  team->run(compute, &step);
}

// x [T, K] times packed weights, to out [T, O].
void paceline_product(const void* weights, const float* bias, int half, int inputs, int outputs, const float* x,
                      int rows, float* out, int threads) {
  std::lock_guard<std::mutex> lock(one_at_a_time);
  team = team_of(threads);
  Alone job{{weights, bias, inputs, outputs}, half != 0, x, out, rows, Counters(1)};
  team->run(compute_alone, &job);
}

}  // extern "C"
