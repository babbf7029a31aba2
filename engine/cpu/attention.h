// Attention over the paged cache. Scores and weighted values are added up over keys in the order of their positions, in
// splits that lie at fixed positions.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

#include "layout.h"
#include "team.h"
#include "vectors.h"

namespace {

constexpr int SPLIT = 256;  // positions whose scores are computed together; splits lie at multiples of it
constexpr int SUMS = WIDTH;  // as many as are kept in registers
constexpr float LOWEST = -std::numeric_limits<float>::infinity();

struct Attention {
  const Stack& stack;
  const Layer& layer;
  const Rows& rows;
  const float* query;  // [T, stride], queries first
  int stride;
  float* out;  // [T, Q * V]
};

// A word of keys, values or weights: a number, or two where the processor multiplies pairs of bfloat16. Keys and queries
// hold neighbouring dimensions of a position in a word, values and weights those of neighbouring positions.
template <typename N>
constexpr int PER = std::is_same_v<N, Pair> ? 2 : 1;
using HalfWord = std::conditional_t<PAIRS, Pair, float>;  // where the cache is bfloat16

// Memory of one thread, for some key heads of a group of rows and a split of positions.
template <typename N>
struct Workspace {
  std::vector<size_t> at;             // which head of the cache, counted over all slots, is the first at each position
  std::vector<float> columns;         // WIDTH keys of a head by columns: [E / PER][WIDTH] words
  std::vector<const N*> queries;      // of each head
  std::vector<N> words;               // of each query, where pairs are multiplied: its own, then those of its weights
  std::vector<float> scores;          // of each query [SPLIT]; as weights, where numbers are multiplied
  std::vector<float> sums, part;      // of each query, of all splits and of this one: [V]
  std::vector<float> totals, maxima;  // of each query
  std::vector<float> split_totals, split_maxima;
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

// Have keys or values fetched that are read soon. Into the second cache: of lines on their way to the first one a core
// has room for few (some 24), and it waits where one more is asked for.
template <typename C>
inline void fetch(const C* cache, size_t at, int size) {
  const char* line = reinterpret_cast<const char*>(cache + at);
  for (size_t byte = 0; byte < size * sizeof(C); byte += 64) _mm_prefetch(line + byte, _MM_HINT_T1);
}

inline Vec numbers_at(const uint16_t* cache, size_t at) { return widened(cache + at); }
inline Vec numbers_at(const float* cache, size_t at) { return load(cache + at); }

// Keys of a head at WIDTH places of the cache by columns: [size / PER][WIDTH].
template <typename N, typename C>
inline void to_columns(const C* cache, const size_t* at, int head, int size, float* columns) {
  size_t from[WIDTH];
  for (int j = 0; j < WIDTH; ++j) from[j] = (at[j] + head) * size;
  for (int i = 0; i < size / PER<N>; i += WIDTH) {
    Vec rows[WIDTH];
    for (int j = 0; j < WIDTH; ++j) {
      if constexpr (PER<N> == 2)
        rows[j] = load(reinterpret_cast<const float*>(cache + from[j]) + i);
      else
        rows[j] = numbers_at(cache, from[j] + i);
    }
    transpose(rows);
    for (int j = 0; j < WIDTH; ++j) store(columns + (i + j) * WIDTH, rows[j]);
  }
}

// out [R][SPLIT] = scores of R queries and WIDTH keys, whose products are added up from the first to the last.
template <typename N, int R>
inline void score(const N* const* queries, const float* columns, int words, float scale, float* out) {
  Vec acc[R];
  for (int r = 0; r < R; ++r) acc[r] = zero();
  for (int i = 0; i < words; ++i) {
    const Vec key = load(columns + i * WIDTH);
    for (int r = 0; r < R; ++r) acc[r] = multiply_add(queries[r][i], key, acc[r]);
  }
  for (int r = 0; r < R; ++r) store(out + r * SPLIT, acc[r] * all(scale));
}
template <typename N>
inline void score_all(const N* const* queries, int count, const float* columns, int words, float scale, float* out) {
  int q = 0;
  for (; q + 8 <= count; q += 8) score<N, 8>(queries + q, columns, words, scale, out + q * SPLIT);
  if (q + 4 <= count) score<N, 4>(queries + q, columns, words, scale, out + q * SPLIT), q += 4;
  if (q + 2 <= count) score<N, 2>(queries + q, columns, words, scale, out + q * SPLIT), q += 2;
  if (q < count) score<N, 1>(queries + q, columns, words, scale, out + q * SPLIT);
}

// The scores of the positions [hidden, count) of a split become weights; those of the others, up to a whole vector, 0.
template <typename N>
inline void softmax(float* scores, int hidden, int count, float cap, N* weights, float& peak, float& total) {
  const int filled = padded(count), first = hidden / WIDTH * WIDTH;
  for (int i = first; cap > 0.0f && i < filled; i += WIDTH) {  // tanh(x) = 1 - 2 / (e^2x + 1)
    const Vec power = exponential(load(scores + i) * all(2.0f / cap));
    store(scores + i, all(cap) - all(2.0f * cap) / (power + all(1.0f)));
  }
  std::fill(scores, scores + hidden, LOWEST);
  std::fill(scores + count, scores + filled, LOWEST);
  Vec top = all(LOWEST), sums = zero();
  for (int i = first; i < filled; i += WIDTH) top = larger(top, load(scores + i));
  peak = maximum(top);
  for (int i = 0; i < filled; i += WIDTH) {
    const Vec score = load(scores + i), weight = zero_where(score, LOWEST, exponential(score - all(peak)));
    sums = sums + weight;
    if constexpr (PER<N> == 2)
      to_pairs(weight, weights + i / 2);
    else
      store(weights + i, weight);
  }
  total = sum(sums);
}

// Values of a head in the cache.
template <typename C>
struct Values {
  const C* cache;
  const size_t* at;  // of each position of a split
  int head, size;
  const C* operator()(int position, int i) const { return cache + (at[position] + head) * size + i; }
};

// Word k of the values, of whose positions only the first or the second may count.
template <typename N, typename C>
inline Vec value_word(const Values<C>& values, int k, int i, bool first, bool second) {
  if constexpr (PER<N> == 2)
    return paired(first ? values(2 * k, i) : nullptr, second ? values(2 * k + 1, i) : nullptr);
  else
    return numbers_at(values(k, i), 0);
}

// out [R][size] += over the positions [from, to), from the first to the last, weights [R][SPLIT / PER] * values.
template <typename N, typename C, int R, int V>
inline void weigh_part(const N* weights, const Values<C>& values, int from, int to, int i, float* out) {
  Vec acc[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) acc[r][v] = load(out + r * values.size + i + v * WIDTH);
  const auto add = [&](int k, bool first, bool second) {
    Vec value[V];
    for (int v = 0; v < V; ++v) value[v] = value_word<N>(values, k, i + v * WIDTH, first, second);
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) acc[r][v] = multiply_add(weights[r * (SPLIT / PER<N>) + k], value[v], acc[r][v]);
  };
  int k = from / PER<N>;
  if (from % PER<N>) add(k++, false, true);
  for (; k < to / PER<N>; ++k) add(k, true, true);
  if (to % PER<N> && to > from) add(k, true, false);
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) store(out + r * values.size + i + v * WIDTH, acc[r][v]);
}
template <typename N, int R, typename C>
inline void weigh_rows(const N* weights, const Values<C>& values, int from, int to, float* out) {
  constexpr int MOST = std::min(4, SUMS / R), MANY = MOST * WIDTH, TWO = 2 * WIDTH;
  const int size = values.size;
  int i = 0;
  for (; i + MANY <= size; i += MANY) weigh_part<N, C, R, MOST>(weights, values, from, to, i, out);
  if (MANY > TWO && i + TWO <= size) weigh_part<N, C, R, 2>(weights, values, from, to, i, out), i += TWO;
  for (; i < size; i += WIDTH) weigh_part<N, C, R, 1>(weights, values, from, to, i, out);
}
template <typename N, typename C>
inline void weigh(const N* weights, int count, const Values<C>& values, int from, int to, float* out) {
  if (from >= to) return;
  constexpr int STRIDE = SPLIT / PER<N>;
  const int size = values.size;
  int q = 0;
  for (; q + 8 <= count; q += 8) weigh_rows<N, 8>(weights + q * STRIDE, values, from, to, out + q * size);
  if (q + 4 <= count) weigh_rows<N, 4>(weights + q * STRIDE, values, from, to, out + q * size), q += 4;
  if (q + 2 <= count) weigh_rows<N, 2>(weights + q * STRIDE, values, from, to, out + q * size), q += 2;
  if (q < count) weigh_rows<N, 1>(weights + q * STRIDE, values, from, to, out + q * size);
}

// How many key heads are read side by side: they lie so in the cache, and the processor sees such reads coming.
inline int heads_together(const Stack& s, int leaders, int threads) {
  int heads = std::max(1, 128 / s.head_size);
  while (heads > 1 && leaders * ((s.key_heads + heads - 1) / heads) < 2 * threads) heads /= 2;
  return std::min(heads, s.key_heads);
}

// Key heads `from` to `to` for the rows that read common keys together, the first of which is `first`.
template <typename N, typename C>
inline void attend(const Attention& a, int first, int from, int to) {
  static thread_local Workspace<N> space;
  const Stack& s = a.stack;
  const int size = s.head_size, value_size = s.value_size, per_key = s.query_heads / s.key_heads;
  const int members = a.rows.group[first], heads = to - from;
  const int queries = members * per_key, common = std::max(a.rows.common[first], a.rows.reach[first]);
  const int words = size / PER<N>, all_queries = heads * queries;
  const C *keys = static_cast<const C*>(a.layer.keys), *values = static_cast<const C*>(a.layer.values);
  const auto row_of = [&](int q) { return first + q % queries / per_key; };
  const auto head_of = [&](int q) { return (from + q / queries) * per_key + q % per_key; };
  room(space.at, SPLIT);
  room(space.columns, (size_t)words * WIDTH);
  room(space.scores, (size_t)all_queries * SPLIT);
  if (PER<N> == 2) room(space.words, (size_t)all_queries * (words + SPLIT / 2));
  room(space.part, (size_t)all_queries * value_size);
  room(space.split_totals, all_queries);
  room(space.split_maxima, all_queries);
  space.sums.assign((size_t)all_queries * value_size, 0.0f);
  space.totals.assign(all_queries, a.layer.sinks ? 1.0f : 0.0f);
  space.maxima.assign(all_queries, LOWEST);
  for (int q = 0; a.layer.sinks && q < all_queries; ++q) space.maxima[q] = a.layer.sinks[head_of(q)];
  space.queries.clear();
  for (int q = 0; q < all_queries; ++q) {
    const float* query = a.query + (size_t)row_of(q) * a.stride + (size_t)head_of(q) * size;
    if constexpr (PER<N> == 2) {
      to_pairs(query, size, &space.words[(size_t)q * words], 1);
      space.queries.push_back(&space.words[(size_t)q * words]);
    } else {
      space.queries.push_back(query);
    }
  }
  N* weights;
  if constexpr (PER<N> == 2)
    weights = &space.words[(size_t)all_queries * words];
  else
    weights = space.scores.data();
  int longest = 0, nearest_start = std::numeric_limits<int>::max();
  for (int m = 0; m < members; ++m) {
    const int seen = a.rows.keys[first + m];
    longest = std::max(longest, seen);
    nearest_start = std::min(nearest_start, a.layer.window ? std::max(0, seen - a.layer.window) : 0);
  }
  for (int start = nearest_start / SPLIT * SPLIT; start < longest; start += SPLIT) {
    // Score positions [begin, end) of this split, begin at a whole vector, whose slots are slot(position), by `count`
    // queries of each head from `first` on.
    const auto score_keys = [&](int begin, int end, int query, int count, auto&& slot) {
      const auto find = [&](int block) {
        for (int i = block; i < std::min(block + WIDTH, end); ++i) {
          space.at[i] = (size_t)slot(start + i) * s.key_heads + from;
          fetch(keys, space.at[i] * size, heads * size);
          fetch(values, space.at[i] * value_size, heads * value_size);
        }
      };
      find(begin), find(begin + WIDTH);
      for (int block = begin; block < end; block += WIDTH) {
        find(block + 2 * WIDTH);
        for (int i = end; i < block + WIDTH; ++i) space.at[i] = space.at[block];
        for (int h = 0; h < heads; ++h) {
          to_columns<N>(keys, &space.at[block], h, size, space.columns.data());
          const int q = h * queries + query;
          score_all(&space.queries[q], count, space.columns.data(), words, a.layer.scaling,
                    &space.scores[(size_t)q * SPLIT + block]);
        }
      }
    };
    const int shared = std::clamp(common - start, 0, SPLIT);
    const auto seen_by = [&](int m) { return std::min(a.rows.keys[first + m] - start, SPLIT); };
    const auto hidden_from = [&](int m) {
      return a.layer.window ? std::clamp(a.rows.keys[first + m] - a.layer.window - start, 0, SPLIT) : 0;
    };
    const auto slot = [&](int m, int position) {
      return position < start + shared ? paged_slot(a.rows, first, position) : slot_of(a.rows, first + m, position);
    };
    // Scored for all rows while the keys are near; where some have keys of their own, up to the last whole vector.
    const int together = longest - start > shared ? shared / WIDTH * WIDTH : padded(shared);
    score_keys(0, std::min(together, shared), 0, queries, [&](int position) { return slot(0, position); });
    int weighed = shared / PER<N> * PER<N>;  // positions that all rows see that see any of this split
    for (int m = 0; m < members; ++m) {
      const int count = seen_by(m), hidden = hidden_from(m);
      if (count <= hidden) continue;
      weighed = hidden ? 0 : std::min(weighed, count / PER<N> * PER<N>);
      score_keys(together, count, m * per_key, per_key, [&](int position) { return slot(m, position); });
      for (int q = m * per_key; q < all_queries; q += queries)
        for (int g = q; g < q + per_key; ++g)
          softmax(&space.scores[(size_t)g * SPLIT], hidden, count, a.layer.cap, weights + (size_t)g * SPLIT / PER<N>,
                  space.split_maxima[g], space.split_totals[g]);
    }
    std::fill_n(space.part.begin(), (size_t)all_queries * value_size, 0.0f);
    for (int h = 0; h < heads; ++h)
      weigh(weights + (size_t)h * queries * SPLIT / PER<N>, queries, Values<C>{values, space.at.data(), h, value_size},
            0, weighed, &space.part[(size_t)h * queries * value_size]);
    for (int m = 0; m < members; ++m) {
      const int count = seen_by(m), hidden = hidden_from(m);
      if (count <= hidden) continue;
      for (int i = weighed; members > 1 && i < count; ++i)  // again: another row's are there by now
        space.at[i] = (size_t)slot(m, start + i) * s.key_heads + from;
      for (int q = m * per_key; q < all_queries; q += queries) {
        weigh(weights + (size_t)q * SPLIT / PER<N>, per_key,
              Values<C>{values, space.at.data(), q / queries, value_size}, std::max(hidden, weighed), count,
              &space.part[(size_t)q * value_size]);
        for (int g = q; g < q + per_key; ++g) {
          const float before = space.maxima[g], peak = space.split_maxima[g], now = std::max(before, peak);
          const float old_scale = before == LOWEST ? 0.0f : std::exp(before - now), new_scale = std::exp(peak - now);
          float* sums = &space.sums[(size_t)g * value_size];
          const float* part = &space.part[(size_t)g * value_size];
          for (int i = 0; i < value_size; i += WIDTH)
            store(sums + i, fma(load(part + i), all(new_scale), load(sums + i) * all(old_scale)));
          space.totals[g] = space.totals[g] * old_scale + space.split_totals[g] * new_scale;
          space.maxima[g] = now;
        }
      }
    }
  }
  for (int q = 0; q < all_queries; ++q) {
    float* out = a.out + ((size_t)row_of(q) * s.query_heads + head_of(q)) * value_size;
    const Vec total = all(space.totals[q]);
    for (int i = 0; i < value_size; i += WIDTH) store(out + i, load(&space.sums[(size_t)q * value_size + i]) / total);
  }
}

// What is computed at once: some key heads for a group of rows. There are `blocks` such pieces for each of the leaders.
struct AttentionPieces {
  AttentionPieces(const Stack& stack, const Rows& rows, int threads) {
    for (int t = 0; t < rows.count; ++t)
      if (rows.group[t]) leaders.push_back(t);
    together = heads_together(stack, (int)leaders.size(), threads);
    blocks = (stack.key_heads + together - 1) / together;
  }
  int count() const { return (int)leaders.size() * blocks; }
  void compute(const Attention& a, int piece) const {
    const int from = piece % blocks * together, to = std::min(from + together, a.stack.key_heads);
    const auto attend_as = a.stack.half ? attend<HalfWord, uint16_t> : attend<float, float>;
    attend_as(a, leaders[piece / blocks], from, to);
  }

  std::vector<int> leaders;  // of groups, the first row
  int together, blocks;
};

}  // namespace
