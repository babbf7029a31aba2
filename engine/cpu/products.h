// Rows times packed weights: each output is one sum over its inputs from the first to the last, however many rows there
// are. engine/cpu/library.py says how weights are packed.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "team.h"
#include "vectors.h"

namespace {

constexpr int PANEL = 2 * WIDTH;  // outputs that are computed together
constexpr int ROWS = WIDTH == 16 ? 12 : 6;
constexpr int ROW_BLOCK = 16 * ROWS;
constexpr int AHEAD = WIDTH == 16 ? 4096 : 2048;  // bytes
constexpr int DEPTH = 256;  // inputs at a time where there are several tiles of rows
constexpr bool NEXT_NEAREST = WIDTH == 8;  // whether the first cache has room for the next so many meanwhile

// Two vectors of a panel: of one input, the weights of its first and second WIDTH outputs. In bfloat16 these lie side
// by side, each two in one word; or a word holds those of two inputs, which then count as one here and everywhere below.
inline void weights_at(const float* panel, int k, Vec& first, Vec& second) {
  first = load(panel + (size_t)k * PANEL);
  second = load(panel + (size_t)k * PANEL + WIDTH);
}
inline void weights_at(const uint16_t* panel, int k, Vec& first, Vec& second) {
  first = low_halves(panel + (size_t)k * PANEL);
  second = high_halves(panel + (size_t)k * PANEL);
}
inline void weights_at(const Pair* panel, int k, Vec& first, Vec& second) {
  weights_at(reinterpret_cast<const float*>(panel), k, first, second);
}

template <bool NEAREST>  // into the first cache, else the second
inline void fetch(const char* line) {
  _mm_prefetch(line, NEAREST ? _MM_HINT_T0 : _MM_HINT_T1);
}

using Half = std::conditional_t<PAIRS, Pair, uint16_t>;  // how weights in bfloat16 are held
template <typename W>
using Input = std::conditional_t<std::is_same_v<W, Pair>, Pair, float>;
template <typename W>
const Input<W>* as_input(const float* x, const Pair* pairs) {
  if constexpr (std::is_same_v<W, Pair>)
    return pairs;
  else
    return x;
}

// M rows times P panels over inputs [0, depth): sums are taken up from and left in `sums` [P][M][PANEL]. With each input
// LINES of the cache are fetched, from `ahead` on and `ahead_step` bytes further each time; a branch would cost more than
// fetching a line twice.
template <typename W, int M, int P, int LINES, bool NEAREST>
inline void tile(const Input<W>* x, int stride, const W* panels, size_t panel_size, int depth, float* sums, bool fresh,
                 const char* ahead, int ahead_step) {
  Vec acc[P][M][2];
  for (int p = 0; p < P; ++p)
    for (int m = 0; m < M; ++m)
      for (int v = 0; v < 2; ++v) acc[p][m][v] = fresh ? zero() : load(sums + ((p * M + m) * 2 + v) * WIDTH);
#pragma GCC unroll 4
  for (int k = 0; k < depth; ++k) {
    if (P > 1 && M > 1)  // sums of one row leave time for what the processor fetches
      for (int p = 0; p < P; ++p)
        fetch<NEXT_NEAREST>(reinterpret_cast<const char*>(panels + p * panel_size + (size_t)k * PANEL) + AHEAD / 2);
    for (int line = 0; line < LINES; ++line) fetch<NEAREST>(ahead + (size_t)k * ahead_step + 64 * line);
    Vec w[P][2];
    for (int p = 0; p < P; ++p) weights_at(panels + p * panel_size, k, w[p][0], w[p][1]);
    for (int m = 0; m < M; ++m) {
      const Input<W> input = std::is_same_v<W, Pair> ? x[(size_t)k * M + m] : x[(size_t)m * stride + k];
      for (int p = 0; p < P; ++p)
        for (int v = 0; v < 2; ++v) acc[p][m][v] = multiply_add(input, w[p][v], acc[p][m][v]);
    }
  }
  for (int p = 0; p < P; ++p)
    for (int m = 0; m < M; ++m)
      for (int v = 0; v < 2; ++v) store(sums + ((p * M + m) * 2 + v) * WIDTH, acc[p][m][v]);
}

template <typename W, int P, int LINES, bool NEAREST>
void tile_of(int rows, const Input<W>* x, int stride, const W* panels, size_t panel_size, int depth, float* sums,
             bool fresh, const char* ahead, int ahead_step) {
  switch (rows) {
#define CASE(M)                                                                                            \
  case M:                                                                                                  \
    if constexpr (M <= ROWS && M * P <= 2 * ROWS)                                                          \
      tile<W, M, P, LINES, NEAREST>(x, stride, panels, panel_size, depth, sums, fresh, ahead, ahead_step); \
    break;
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#undef CASE
  }
}

template <typename W>
constexpr int ONE = PANEL * sizeof(W);  // bytes of a panel's weights of one input

// Rows are divided into tiles as even as can be, ROW_BLOCK rows for themselves.
struct Tile {
  int first, count;
  // What goes into a product of pairs, x [T, inputs] rounded to them: of each tile the words of its rows side by side, so
  // that they lie in one line of the cache. Here are those of row m of the tile from input k on, each `count` apart.
  Pair* words(Pair* pairs, int inputs, int m, int k) const {
    return pairs + (size_t)first * inputs / 2 + (size_t)k / 2 * count + m;
  }
};
inline int tiles_of(int rows) { return (rows + ROWS - 1) / ROWS; }
inline Tile tile_at(int rows, int number) {
  const auto start = [rows](int tile) {
    const int block = tile / (ROW_BLOCK / ROWS) * ROW_BLOCK, within = std::min(ROW_BLOCK, rows - block);
    return within > 0 ? block + within * (tile % (ROW_BLOCK / ROWS)) / tiles_of(within) : rows;
  };
  return {start(number), start(number + 1) - start(number)};
}

// Rounds x [T, inputs]. There are rounding_pieces() to do, in any order.
inline int rounding_pieces(int rows, int inputs) { return tiles_of(rows) * ((inputs + DEPTH - 1) / DEPTH); }
inline void round_piece(const float* x, int rows, int inputs, int piece, Pair* pairs) {
  const int from = piece / tiles_of(rows) * DEPTH;
  const Tile tile = tile_at(rows, piece % tiles_of(rows));
  for (int m = 0; m < tile.count; ++m)
    to_pairs(x + (size_t)(tile.first + m) * inputs + from, std::min(DEPTH, inputs - from),
             tile.words(pairs, inputs, m, from), tile.count);
}

enum class Then { STORE, ADD, SILU, GELU };  // what becomes of a sum

struct Product {
  const void* weights;  // [panels][K][PANEL], see engine/cpu/library.py
  const float* bias;    // [O] or none
  int inputs, outputs;
  template <typename W>
  int words() const { return std::is_same_v<W, Pair> ? inputs / 2 : inputs; }  // of a row of x
};

// Where a product goes: [T, stride]; or, where the next one multiplies pairs, rounded to them.
struct Results {
  float* numbers;
  int stride, rows;
  Pair* pairs = nullptr;
};

// One row of a panel's sums to `out`.
inline void finish(const Product& product, Then then, const float* sums, int panel, float* out) {
  const int first = panel * PANEL;
  const float* bias = product.bias ? product.bias + first : nullptr;
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

// Of one row of a panel, which has a vector of gates and one of what they let through.
inline Vec gated(const Product& product, Then then, const float* sums, int panel) {
  Vec gate = load(sums), up = load(sums + WIDTH);
  if (product.bias) {
    const float* bias = product.bias + panel * PANEL;
    gate = gate + load(bias), up = up + load(bias + WIDTH);
  }
  Vec inner = gate;
  if (then == Then::GELU)  // gelu by tanh: gate * sigmoid(2 * inner)
    inner = all(1.5957691216f) * fma(all(0.044715f) * gate * gate, gate, gate);
  return gate / (all(1.0f) + exponential(zero() - inner)) * up;
}

// A panel's sums of the rows of a tile, [count][PANEL], to where they belong.
inline void finish(const Product& product, Then then, const float* sums, int panel, const Results& out, Tile tile) {
  for (int m = 0; m < tile.count; ++m, sums += PANEL) {
    if (out.pairs) {
      to_pairs(gated(product, then, sums, panel), tile.words(out.pairs, out.stride, m, panel * WIDTH), tile.count);
      continue;
    }
    float* numbers = out.numbers + (size_t)(tile.first + m) * out.stride;
    if (then == Then::SILU || then == Then::GELU)
      store(numbers + panel * WIDTH, gated(product, then, sums, panel));
    else
      finish(product, then, sums, panel, numbers);
  }
}

// A few rows, one tile: each panel is read once, several at a time so that one sum need not wait for another.
template <typename W, int P>
void few_rows(const Product& product, Then then, const Input<W>* x, const Results& out, int from, int to) {
  const int inputs = product.words<W>(), rows = out.rows;
  const size_t panel_size = (size_t)inputs * PANEL;
  const W* weights = static_cast<const W*>(product.weights);
  float sums[2 * ROWS * PANEL];
  int panel = from;
  for (; panel + P <= to; panel += P) {
    const W* first = weights + panel * panel_size;
    tile_of<W, P, P == 1 ? (ONE<W> + 63) / 64 : 0, true>(rows, x, inputs, first, panel_size, inputs, sums, true,
                                                         reinterpret_cast<const char*>(first) + AHEAD, ONE<W>);
    for (int p = 0; p < P; ++p) finish(product, then, sums + p * rows * PANEL, panel + p, out, {0, rows});
  }
  if constexpr (P > 1)
    if (panel < to) few_rows<W, 1>(product, then, x, out, panel, to);
}

// Many rows, from `first` on: a piece of a panel is used by all tiles while it is in the cache, and the next one is
// fetched meanwhile.
template <typename W>
void many_rows(const Product& product, Then then, const Input<W>* x, int first, const Results& out, int from, int to) {
  const int inputs = product.words<W>(), rows = std::min(ROW_BLOCK, out.rows - first);
  const size_t panel_size = (size_t)inputs * PANEL;
  const W* weights = static_cast<const W*>(product.weights);
  const int tiles = tiles_of(rows);
  static thread_local float sums[ROW_BLOCK * PANEL];
  x += (size_t)first * inputs;
  for (int panel = from; panel < to; ++panel) {
    for (int k = 0; k < inputs; k += DEPTH) {
      const int depth = std::min(DEPTH, inputs - k);
      const W* piece = weights + panel * panel_size + (size_t)k * PANEL;
      const char* next = reinterpret_cast<const char*>(piece + (size_t)depth * PANEL);
      const int share = ONE<W> / tiles;  // each tile fetches its part of it
      for (int t = 0; t < tiles; ++t) {
        const auto [row, count] = tile_at(rows, t);
        const Input<W>* in = x + (size_t)row * inputs + (std::is_same_v<W, Pair> ? (size_t)k * count : k);
        tile_of<W, 1, 1, NEXT_NEAREST>(count, in, inputs, piece, panel_size, depth, sums + row * PANEL, k == 0,
                                       next + (size_t)t * share * depth, share);
      }
    }
    for (int t = 0; t < tiles; ++t) {
      const auto [row, count] = tile_at(rows, t);
      finish(product, then, sums + row * PANEL, panel, out, {first + row, count});
    }
  }
}

// Panels that so many rows read at once.
template <typename W>
int panels_at_once(int rows) {
  return rows == 1 ? 4 : rows <= ROWS / 2 - (sizeof(W) == 2) ? 2 : 1;
}

template <typename W>
void panels(const Product& product, Then then, const Input<W>* x, const Results& out, int from, int to) {
  const int rows = out.rows, at_once = panels_at_once<W>(rows);
  if (at_once == 4) return few_rows<W, 4>(product, then, x, out, from, to);
  if (at_once == 2) return few_rows<W, 2>(product, then, x, out, from, to);
  if (rows <= ROWS) return few_rows<W, 1>(product, then, x, out, from, to);
  for (int row = 0; row < rows; row += ROW_BLOCK) many_rows<W>(product, then, x, row, out, from, to);
}

// This thread's part of x [T, K] times the weights.
template <typename W>
void multiply(const Product& product, Then then, const Input<W>* x, const Results& out, Counters& counters, int phase,
              int threads) {
  const int total = (product.outputs + PANEL - 1) / PANEL;
  counters.hand_out(phase, total, threads, panels_at_once<W>(out.rows),
                    [&](int from, int to) { panels<W>(product, then, x, out, from, to); });
}

// The same, of weights in bfloat16 (`half`) or float32; `pairs` is x rounded, where pairs are multiplied.
inline void multiply(const Product& product, bool half, Then then, const float* x, const Pair* pairs,
                     const Results& out, Counters& counters, int phase, int threads) {
  if (half)
    multiply<Half>(product, then, as_input<Half>(x, pairs), out, counters, phase, threads);
  else
    multiply<float>(product, then, x, out, counters, phase, threads);
}

}  // namespace
