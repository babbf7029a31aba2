// Norms, rotation and attention over the paged cache, and the layout of what Python hands over.
//
// Scores and weighted values are added up over keys in the order of their positions, in splits that lie at fixed
// positions.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "team.h"
#include "vectors.h"

namespace {

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
  const int *slots, *keys, *home, *pages, *branch, *group, *common, *reach, *numbers;
  const int* kept;  // behind how many layers the states are wanted
  float* states;    // [T, kept_count, D]
  int kept_count;
};

}  // extern "C"

namespace {

// -- attention --------------------------------------------------------------------------------------------------------

constexpr int SPLIT = 256;  // positions whose scores are computed together; splits lie at multiples of it
constexpr int SOON = 8;  // positions ahead that are fetched
constexpr float LOWEST = -std::numeric_limits<float>::infinity();

struct Attention {
  const Stack& stack;
  const Layer& layer;
  const Rows& rows;
  const float* query;  // [T, stride], queries first
  int stride;
  float* out;  // [T, Q * E]
};

// Memory of one thread, for some key heads of a group of rows and a split of positions.
struct Workspace {
  std::vector<size_t> at;                  // where in the cache each position is, of the first of the heads
  std::vector<float> keys;                 // of each head by columns: [SPLIT / WIDTH][E][WIDTH]
  std::vector<float> copies;               // of each head the values as float32: [SPLIT][E]
  std::vector<const float*> values;        // of each head where they are: [SPLIT]
  std::vector<const float*> queries;       // of each head
  std::vector<float> scores, sums, totals, maxima, part;  // of each query: [SPLIT], [E], one, one, and one [E]
};

inline int padded(int count) { return (count + WIDTH - 1) / WIDTH * WIDTH; }  // to whole vectors

// Where the page table of a row's sequence says that a position is.
inline int paged_slot(const Rows& rows, int row, int position) {
  return rows.numbers[rows.pages[row] + position / rows.page] * rows.page + position % rows.page;
}
inline int slot_of(const Rows& rows, int row, int position) {
  if (position >= rows.home[row]) return rows.numbers[rows.branch[row] + position - rows.home[row]];
  return paged_slot(rows, row, position);
}

// Where a value is as float32: in the cache itself, or written out to `copy`.
inline const float* value_at(const void* cache, size_t at, int size, bool half, float* copy) {
  if (!half) return static_cast<const float*>(cache) + at;
  const uint16_t* source = static_cast<const uint16_t*>(cache) + at;
  for (int i = 0; i < size; i += WIDTH) store(copy + i, widened(source + i));
  return copy;
}

// Have keys or values fetched that are read soon.
inline void fetch(const void* cache, size_t at, int size, bool half) {
  const size_t bytes = half ? 2 : 4;
  const char* line = static_cast<const char*>(cache) + at * bytes;
  for (size_t byte = 0; byte < size * bytes; byte += 64) _mm_prefetch(line + byte, _MM_HINT_T0);
}

inline Vec widened_at(const void* cache, size_t at, bool half) {
  return half ? widened(static_cast<const uint16_t*>(cache) + at) : load(static_cast<const float*>(cache) + at);
}

// Keys at WIDTH places of the cache by columns: [size][WIDTH].
inline void to_columns(const void* cache, const size_t* at, size_t head, int size, bool half, float* columns) {
  for (int i = 0; i < size; i += WIDTH) {
    Vec rows[WIDTH];
    for (int j = 0; j < WIDTH; ++j) rows[j] = widened_at(cache, at[j] + head + i, half);
    transpose(rows);
    for (int j = 0; j < WIDTH; ++j) store(columns + (i + j) * WIDTH, rows[j]);
  }
}

// out [R][SPLIT] = scores of R queries and B times WIDTH keys, whose products are added up from the first to the last.
template <int R, int B>
inline void score_part(const float* const* queries, const float* columns, int size, float scale, float* out) {
  Vec acc[R][B];
  for (int r = 0; r < R; ++r)
    for (int b = 0; b < B; ++b) acc[r][b] = zero();
  for (int i = 0; i < size; ++i) {
    Vec key[B];
    for (int b = 0; b < B; ++b) key[b] = load(columns + ((size_t)b * size + i) * WIDTH);
    for (int r = 0; r < R; ++r) {
      const Vec query = all(queries[r][i]);
      for (int b = 0; b < B; ++b) acc[r][b] = fma(query, key[b], acc[r][b]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int b = 0; b < B; ++b) store(out + r * SPLIT + b * WIDTH, acc[r][b] * all(scale));
}
template <int R>
inline void score(const float* const* queries, const float* columns, int blocks, int size, float scale, float* out) {
  constexpr int MOST = WIDTH == 16 ? 4 : 2;  // as many sums as there are registers for
  int b = 0;
  for (; b + MOST <= blocks; b += MOST)
    score_part<R, MOST>(queries, columns + (size_t)b * size * WIDTH, size, scale, out + b * WIDTH);
  for (; b < blocks; ++b) score_part<R, 1>(queries, columns + (size_t)b * size * WIDTH, size, scale, out + b * WIDTH);
}
inline void score_all(const float* const* queries, int count, const float* columns, int blocks, int size, float scale,
                      float* out) {
  int q = 0;
  for (; q + 4 <= count; q += 4) score<4>(queries + q, columns, blocks, size, scale, out + q * SPLIT);
  if (q + 2 <= count) score<2>(queries + q, columns, blocks, size, scale, out + q * SPLIT), q += 2;
  if (q < count) score<1>(queries + q, columns, blocks, size, scale, out + q * SPLIT);
}

// out [R][size] = sums over keys of weights [R][SPLIT] * values, from the first to the last.
template <int R, int V>
inline void weigh_part(const float* weights, const float* const* values, int count, int size, int i, float* out) {
  Vec acc[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) acc[r][v] = zero();
  for (int k = 0; k < count; ++k) {
    Vec value[V];
    for (int v = 0; v < V; ++v) value[v] = load(values[k] + i + v * WIDTH);
    for (int r = 0; r < R; ++r) {
      const Vec weight = all(weights[r * SPLIT + k]);
      for (int v = 0; v < V; ++v) acc[r][v] = fma(weight, value[v], acc[r][v]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) store(out + r * size + i + v * WIDTH, acc[r][v]);
}
template <int R>
inline void weigh(const float* weights, const float* const* values, int count, int size, float* out) {
  int i = 0;
  for (; i + 4 * WIDTH <= size; i += 4 * WIDTH) weigh_part<R, 4>(weights, values, count, size, i, out);
  if (i + 2 * WIDTH <= size) weigh_part<R, 2>(weights, values, count, size, i, out), i += 2 * WIDTH;
  if (i < size) weigh_part<R, 1>(weights, values, count, size, i, out);
}

// The scores of a split, of query heads [first, first + heads) that read the same keys, become weights, and what
// they weigh is added to what the splits before it came to.
inline void softmax_and_weigh(Workspace& space, size_t first, int heads, const float* const* values, int hidden,
                              int count, int size) {
  const int filled = padded(count);
  for (int g = 0; g < heads;) {
    const int at_once = heads - g >= 4 ? 4 : heads - g >= 2 ? 2 : 1;
    float* all_scores = &space.scores[(first + g) * SPLIT];
    float peaks[4], totals[4];
    for (int r = 0; r < at_once; ++r) {
      float* scores = all_scores + r * SPLIT;
      std::fill(scores, scores + hidden, LOWEST);
      std::fill(scores + count, scores + filled, LOWEST);
      Vec top = all(LOWEST), total = zero();
      for (int i = 0; i < filled; i += WIDTH) top = larger(top, load(scores + i));
      peaks[r] = maximum(top);
      for (int i = 0; i < filled; i += WIDTH) store(scores + i, exponential(load(scores + i) - all(peaks[r])));
      std::fill(scores, scores + hidden, 0.0f);
      std::fill(scores + count, scores + filled, 0.0f);
      for (int i = 0; i < filled; i += WIDTH) total = total + load(scores + i);
      totals[r] = sum(total);
    }
    const auto weigh_all = at_once == 4 ? weigh<4> : at_once == 2 ? weigh<2> : weigh<1>;
    weigh_all(all_scores + hidden, values + hidden, count - hidden, size, space.part.data());
    for (int r = 0; r < at_once; ++r) {
      const size_t h = first + g + r;
      const float before = space.maxima[h], now = std::max(before, peaks[r]);
      const float old_scale = before == LOWEST ? 0.0f : std::exp(before - now), new_scale = std::exp(peaks[r] - now);
      float* sums = &space.sums[h * size];
      const float* part = &space.part[(size_t)r * size];
      for (int i = 0; i < size; i += WIDTH)
        store(sums + i, fma(load(part + i), all(new_scale), load(sums + i) * all(old_scale)));
      space.totals[h] = space.totals[h] * old_scale + totals[r] * new_scale;
      space.maxima[h] = now;
    }
    g += at_once;
  }
}

// How many key heads are read side by side: they lie so in the cache, and the processor sees such reads coming.
inline int heads_together(const Stack& s, int leaders, int threads) {
  int heads = std::max(1, 128 / s.head_size);
  while (heads > 1 && leaders * ((s.key_heads + heads - 1) / heads) < 2 * threads) heads /= 2;
  return std::min(heads, s.key_heads);
}

// Key heads `from` to `to` for the rows that read common keys together, the first of which is `first`.
inline void attend(const Attention& a, int first, int from, int to, Workspace& space) {
  const Stack& s = a.stack;
  const int size = s.head_size, per_key = s.query_heads / s.key_heads, members = a.rows.group[first], heads = to - from;
  const int queries = members * per_key, common = std::max(a.rows.common[first], a.rows.reach[first]);
  const size_t of_head = (size_t)SPLIT * size;
  room(space.at, SPLIT);
  room(space.keys, heads * of_head);
  if (s.half) room(space.copies, heads * of_head);
  room(space.values, (size_t)heads * SPLIT);
  room(space.scores, (size_t)heads * queries * SPLIT);
  space.sums.assign((size_t)heads * queries * size, 0.0f);
  space.totals.assign(heads * queries, 0.0f);
  space.maxima.assign(heads * queries, LOWEST);
  room(space.part, 4 * (size_t)size);
  space.queries.clear();
  for (int h = from; h < to; ++h)
    for (int q = 0; q < queries; ++q)
      space.queries.push_back(a.query + (size_t)(first + q / per_key) * a.stride +
                              (size_t)(h * per_key + q % per_key) * size);
  int longest = 0, nearest_start = std::numeric_limits<int>::max();
  for (int m = 0; m < members; ++m) {
    const int seen = a.rows.keys[first + m];
    longest = std::max(longest, seen);
    nearest_start = std::min(nearest_start, a.layer.window ? std::max(0, seen - a.layer.window) : 0);
  }
  for (int start = nearest_start / SPLIT * SPLIT; start < longest; start += SPLIT) {
    // Find positions [begin, end) of this split, whose slots are slot(position).
    const auto place = [&](int begin, int end, auto&& slot) {
      const auto find = [&](int i) {
        if (i >= end) return;
        space.at[i] = ((size_t)slot(start + i) * s.key_heads + from) * size;
        fetch(a.layer.keys, space.at[i], heads * size, s.half);
        fetch(a.layer.values, space.at[i], heads * size, s.half);
      };
      for (int i = begin; i < begin + SOON; ++i) find(i);
      for (int i = begin; i < end; ++i) {
        find(i + SOON);
        for (int h = 0; h < heads; ++h)
          space.values[h * SPLIT + i] = value_at(a.layer.values, space.at[i] + (size_t)h * size, size, s.half,
                                                 space.copies.data() + h * of_head + (size_t)i * size);
      }
      for (int i = end; i < padded(end); ++i) space.at[i] = space.at[0];
    };
    const auto turn = [&](int h, int begin, int end) {
      for (int i = begin; i < end; i += WIDTH)
        to_columns(a.layer.keys, &space.at[i], (size_t)h * size, size, s.half,
                   &space.keys[h * of_head + (size_t)i * size]);
    };
    const int shared = std::clamp(common - start, 0, SPLIT);
    place(0, shared, [&](int position) { return paged_slot(a.rows, first, position); });
    // Scored for all rows while the keys are near; where some have keys of their own, up to the last whole vector.
    const int together = longest - start > shared ? shared / WIDTH * WIDTH : padded(shared);
    for (int h = 0; h < heads; ++h) {
      turn(h, 0, together);
      score_all(&space.queries[h * queries], queries, &space.keys[h * of_head], together / WIDTH, size,
                a.layer.scaling, &space.scores[(size_t)h * queries * SPLIT]);
    }
    for (int m = 0; m < members; ++m) {
      const int row = first + m, seen = a.rows.keys[row], count = std::min(seen - start, SPLIT);
      const int hidden = a.layer.window ? std::clamp(seen - a.layer.window - start, 0, SPLIT) : 0;
      if (count <= hidden) continue;
      if (count > shared) place(shared, count, [&](int position) { return slot_of(a.rows, row, position); });
      for (int h = 0; h < heads; ++h) {
        const size_t q = (size_t)h * queries + m * per_key;
        if (count > together) {
          turn(h, together, padded(count));
          score_all(&space.queries[q], per_key, &space.keys[h * of_head + (size_t)together * size],
                    (padded(count) - together) / WIDTH, size, a.layer.scaling, &space.scores[q * SPLIT + together]);
        }
        softmax_and_weigh(space, q, per_key, &space.values[h * SPLIT], hidden, count, size);
      }
    }
  }
  for (int h = 0; h < heads; ++h)
    for (int q = 0; q < queries; ++q) {
      const int row = first + q / per_key;
      float* out = a.out + ((size_t)row * s.query_heads + (from + h) * per_key + q % per_key) * size;
      const size_t at = (size_t)h * queries + q;
      const Vec total = all(space.totals[at]);
      for (int i = 0; i < size; i += WIDTH) store(out + i, load(&space.sums[at * size + i]) / total);
    }
}

}  // namespace
