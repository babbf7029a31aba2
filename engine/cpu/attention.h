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
  const int *slots, *keys, *home, *pages, *branch, *group, *common, *numbers;
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

// Have a key or a value fetched that is read soon: one head's lie apart, so the processor does not see them coming.
inline void fetch(const void* cache, size_t at, int size, bool half) {
  const size_t bytes = half ? 2 : 4;
  const char* line = static_cast<const char*>(cache) + at * bytes;
  for (size_t byte = 0; byte < size * bytes; byte += 64) _mm_prefetch(line + byte, _MM_HINT_T0);
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
    const auto place = [&](int row, int i, int copy, int end) {
      const auto where = [&](int j) { return ((size_t)slot_of(a, row, start + j) * s.key_heads + head) * size; };
      const size_t at = where(i);
      if (i + SOON < end) {
        const size_t next = where(i + SOON);
        fetch(a.layer.keys, next, size, s.half);
        fetch(a.layer.values, next, size, s.half);
      }
      keys[i] = widened_at(a.layer.keys, at, size, s.half, space.keys.data() + (size_t)copy * size);
      values[i] = widened_at(a.layer.values, at, size, s.half, space.values.data() + (size_t)copy * size);
    };
    const int shared = std::clamp(common - start, 0, SPLIT);
    for (int i = 0; i < shared; ++i) place(first, i, i, shared);
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
      for (int i = shared; i < count; ++i) place(row, i, SPLIT + i, count);
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

}  // namespace
