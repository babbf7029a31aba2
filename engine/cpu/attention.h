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
constexpr int SOON = 8;  // positions ahead that are fetched
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
  std::vector<float> keys;            // of each head by columns: [SPLIT / WIDTH][E / PER][WIDTH] words
  std::vector<float> copies;          // of each head the values as words: [SPLIT / PER][V]
  std::vector<const float*> values;   // of each head where they are: [SPLIT / PER]
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

// Have keys or values fetched that are read soon.
inline void fetch(const void* cache, size_t at, int size, bool half) {
  const size_t bytes = half ? 2 : 4;
  const char* line = static_cast<const char*>(cache) + at * bytes;
  for (size_t byte = 0; byte < size * bytes; byte += 64) _mm_prefetch(line + byte, _MM_HINT_T0);
}

inline Vec widened_at(const void* cache, size_t at, bool half) {
  return half ? widened(static_cast<const uint16_t*>(cache) + at) : load(static_cast<const float*>(cache) + at);
}

// Where the values of a word are that holds head `head` of the positions at[0] and, if there is a `second`, at[1]: in the
// cache itself, or written out to `copy`.
template <typename N>
inline const float* value_at(const void* cache, const size_t* at, int head, bool second, int size, bool half,
                             float* copy) {
  if (!half) return static_cast<const float*>(cache) + (at[0] + head) * size;
  const uint16_t* source = static_cast<const uint16_t*>(cache) + (at[0] + head) * size;
  const uint16_t* other = second ? static_cast<const uint16_t*>(cache) + (at[1] + head) * size : nullptr;
  for (int i = 0; i < size; i += WIDTH) {
    if constexpr (PER<N> == 2)
      store(copy + i, paired(source + i, second ? other + i : nullptr));
    else
      store(copy + i, widened(source + i));
  }
  return copy;
}

// Keys of a head at WIDTH places of the cache by columns: [size / PER][WIDTH].
template <typename N>
inline void to_columns(const void* cache, const size_t* at, int head, int size, bool half, float* columns) {
  size_t from[WIDTH];
  for (int j = 0; j < WIDTH; ++j) from[j] = (at[j] + head) * size;
  for (int i = 0; i < size / PER<N>; i += WIDTH) {
    Vec rows[WIDTH];
    for (int j = 0; j < WIDTH; ++j)
      rows[j] = PER<N> == 2 ? load(static_cast<const float*>(cache) + from[j] / 2 + i)
                            : widened_at(cache, from[j] + i, half);
    transpose(rows);
    for (int j = 0; j < WIDTH; ++j) store(columns + (i + j) * WIDTH, rows[j]);
  }
}

// out [R][SPLIT] = scores of R queries and B times WIDTH keys, whose products are added up from the first to the last.
template <typename N, int R, int B>
inline void score_part(const N* const* queries, const float* columns, int words, float scale, float* out) {
  Vec acc[R][B];
  for (int r = 0; r < R; ++r)
    for (int b = 0; b < B; ++b) acc[r][b] = zero();
  for (int i = 0; i < words; ++i) {
    Vec key[B];
    for (int b = 0; b < B; ++b) key[b] = load(columns + ((size_t)b * words + i) * WIDTH);
    for (int r = 0; r < R; ++r)
      for (int b = 0; b < B; ++b) acc[r][b] = multiply_add(queries[r][i], key[b], acc[r][b]);
  }
  for (int r = 0; r < R; ++r)
    for (int b = 0; b < B; ++b) store(out + r * SPLIT + b * WIDTH, acc[r][b] * all(scale));
}
template <typename N, int R>
inline void score(const N* const* queries, const float* columns, int blocks, int words, float scale, float* out) {
  constexpr int MOST = SUMS / 4;
  int b = 0;
  for (; b + MOST <= blocks; b += MOST)
    score_part<N, R, MOST>(queries, columns + (size_t)b * words * WIDTH, words, scale, out + b * WIDTH);
  for (; b < blocks; ++b)
    score_part<N, R, 1>(queries, columns + (size_t)b * words * WIDTH, words, scale, out + b * WIDTH);
}
template <typename N>
inline void score_all(const N* const* queries, int count, const float* columns, int blocks, int words, float scale,
                      float* out) {
  int q = 0;
  for (; q + 4 <= count; q += 4) score<N, 4>(queries + q, columns, blocks, words, scale, out + q * SPLIT);
  if (q + 2 <= count) score<N, 2>(queries + q, columns, blocks, words, scale, out + q * SPLIT), q += 2;
  if (q < count) score<N, 1>(queries + q, columns, blocks, words, scale, out + q * SPLIT);
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

// out [R][size] += over the positions [from, to), from the first to the last, weights [R][SPLIT / PER] * values. What a
// word holds before or behind them counts as zero.
template <typename N, int R, int V>
inline void weigh_part(const N* weights, const float* const* values, int from, int to, int size, int i, float* out) {
  Vec acc[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) acc[r][v] = load(out + r * size + i + v * WIDTH);
  const auto add = [&](int k, auto&& kept) {
    Vec value[V];
    for (int v = 0; v < V; ++v) value[v] = kept(load(values[k] + i + v * WIDTH));
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) acc[r][v] = multiply_add(weights[r * (SPLIT / PER<N>) + k], value[v], acc[r][v]);
  };
  int k = from / PER<N>;
  if (from % PER<N>) add(k++, [](Vec words) { return half_of(words, true); });
  for (; k < to / PER<N>; ++k) add(k, [](Vec words) { return words; });
  if (to % PER<N> && to > from) add(k, [](Vec words) { return half_of(words, false); });
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) store(out + r * size + i + v * WIDTH, acc[r][v]);
}
template <typename N, int R>
inline void weigh_rows(const N* weights, const float* const* values, int from, int to, int size, float* out) {
  constexpr int MOST = std::min(4, SUMS / R);
  int i = 0;
  for (; i + MOST * WIDTH <= size; i += MOST * WIDTH) weigh_part<N, R, MOST>(weights, values, from, to, size, i, out);
  for (; i < size; i += WIDTH) weigh_part<N, R, 1>(weights, values, from, to, size, i, out);
}
template <typename N>
inline void weigh(const N* weights, int count, const float* const* values, int from, int to, int size, float* out) {
  if (from >= to) return;
  constexpr int STRIDE = SPLIT / PER<N>;
  int q = 0;
  for (; q + 8 <= count; q += 8) weigh_rows<N, 8>(weights + q * STRIDE, values, from, to, size, out + q * size);
  if (q + 4 <= count) weigh_rows<N, 4>(weights + q * STRIDE, values, from, to, size, out + q * size), q += 4;
  if (q + 2 <= count) weigh_rows<N, 2>(weights + q * STRIDE, values, from, to, size, out + q * size), q += 2;
  if (q < count) weigh_rows<N, 1>(weights + q * STRIDE, values, from, to, size, out + q * size);
}

// How many key heads are read side by side: they lie so in the cache, and the processor sees such reads coming.
inline int heads_together(const Stack& s, int leaders, int threads) {
  int heads = std::max(1, 128 / s.head_size);
  while (heads > 1 && leaders * ((s.key_heads + heads - 1) / heads) < 2 * threads) heads /= 2;
  return std::min(heads, s.key_heads);
}

// Key heads `from` to `to` for the rows that read common keys together, the first of which is `first`.
template <typename N>
inline void attend(const Attention& a, int first, int from, int to) {
  static thread_local Workspace<N> space;
  const Stack& s = a.stack;
  const int size = s.head_size, value_size = s.value_size, per_key = s.query_heads / s.key_heads;
  const int members = a.rows.group[first], heads = to - from;
  const int queries = members * per_key, common = std::max(a.rows.common[first], a.rows.reach[first]);
  const int words = size / PER<N>, all_queries = heads * queries;
  const size_t of_head = (size_t)SPLIT * size / PER<N>, values_of_head = (size_t)SPLIT * value_size / PER<N>;
  const auto row_of = [&](int q) { return first + q % queries / per_key; };
  const auto head_of = [&](int q) { return (from + q / queries) * per_key + q % per_key; };
  room(space.at, SPLIT);
  room(space.keys, heads * of_head);
  if (s.half) room(space.copies, heads * values_of_head);
  room(space.values, (size_t)heads * SPLIT / PER<N>);
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
    // Find positions [begin, end) of this split, whose slots are slot(position).
    const auto place = [&](int begin, int end, auto&& slot) {
      begin -= begin % PER<N>;
      const auto find = [&](int i) {
        if (i >= end) return;
        space.at[i] = (size_t)slot(start + i) * s.key_heads + from;
        fetch(a.layer.keys, space.at[i] * size, heads * size, s.half);
        fetch(a.layer.values, space.at[i] * value_size, heads * value_size, s.half);
      };
      for (int i = begin; i < begin + SOON; ++i) find(i);
      for (int i = begin; i < end; i += PER<N>) {
        for (int j = 0; j < PER<N>; ++j) find(i + SOON + j);
        for (int h = 0; h < heads; ++h)
          space.values[(h * SPLIT + i) / PER<N>] =
              value_at<N>(a.layer.values, &space.at[i], h, i + 1 < end, value_size, s.half,
                          space.copies.data() + h * values_of_head + (size_t)i / PER<N> * value_size);
      }
      for (int i = end; i < padded(end); ++i) space.at[i] = space.at[0];
    };
    const auto turn = [&](int h, int begin, int end) {
      for (int i = begin; i < end; i += WIDTH)
        to_columns<N>(a.layer.keys, &space.at[i], h, size, s.half,
                      &space.keys[h * of_head + (size_t)i * words]);
    };
    const int shared = std::clamp(common - start, 0, SPLIT);
    const auto seen_by = [&](int m) { return std::min(a.rows.keys[first + m] - start, SPLIT); };
    const auto hidden_from = [&](int m) {
      return a.layer.window ? std::clamp(a.rows.keys[first + m] - a.layer.window - start, 0, SPLIT) : 0;
    };
    const auto place_own = [&](int m) {
      if (seen_by(m) > shared)
        place(shared, seen_by(m), [&](int position) { return slot_of(a.rows, first + m, position); });
    };
    place(0, shared, [&](int position) { return paged_slot(a.rows, first, position); });
    // Scored for all rows while the keys are near; where some have keys of their own, up to the last whole vector.
    const int together = longest - start > shared ? shared / WIDTH * WIDTH : padded(shared);
    for (int h = 0; h < heads; ++h) {
      turn(h, 0, together);
      score_all(&space.queries[h * queries], queries, &space.keys[h * of_head], together / WIDTH, words,
                a.layer.scaling, &space.scores[(size_t)h * queries * SPLIT]);
    }
    int weighed = shared / PER<N> * PER<N>;  // positions that all rows see that see any of this split
    for (int m = 0; m < members; ++m) {
      const int count = seen_by(m), hidden = hidden_from(m);
      if (count <= hidden) continue;
      weighed = hidden ? 0 : std::min(weighed, count / PER<N> * PER<N>);
      place_own(m);
      for (int q = m * per_key; q < all_queries; q += queries)
        for (int g = q; g < q + per_key; ++g) {
          float* scores = &space.scores[(size_t)g * SPLIT];
          const int h = g / queries;
          if (count > together && g == q) {
            turn(h, together, padded(count));
            score_all(&space.queries[g], per_key, &space.keys[h * of_head + (size_t)together * words],
                      (padded(count) - together) / WIDTH, words, a.layer.scaling, scores + together);
          }
          softmax(scores, hidden, count, a.layer.cap, weights + (size_t)g * SPLIT / PER<N>, space.split_maxima[g],
                  space.split_totals[g]);
        }
    }
    std::fill_n(space.part.begin(), (size_t)all_queries * value_size, 0.0f);
    for (int h = 0; h < heads; ++h)
      weigh(weights + (size_t)h * queries * SPLIT / PER<N>, queries, &space.values[h * SPLIT / PER<N>], 0, weighed,
            value_size, &space.part[(size_t)h * queries * value_size]);
    for (int m = 0; m < members; ++m) {
      const int count = seen_by(m), hidden = hidden_from(m);
      if (count <= hidden) continue;
      if (members > 1) place_own(m);  // again: another row's are there by now
      for (int q = m * per_key; q < all_queries; q += queries) {
        weigh(weights + (size_t)q * SPLIT / PER<N>, per_key, &space.values[q / queries * SPLIT / PER<N>],
              std::max(hidden, weighed), count, value_size, &space.part[(size_t)q * value_size]);
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
    const auto attend_as = a.stack.half ? attend<HalfWord> : attend<float>;
    attend_as(a, leaders[piece / blocks], from, to);
  }

  std::vector<int> leaders;  // of groups, the first row
  int together, blocks;
};

}  // namespace
