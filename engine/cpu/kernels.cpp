// The decoder layers of a step by rows, computed by a team of threads in one call.
//
// Every output is one sum that is added up in one order: products over their inputs from the first to the last, scores
// and weighted values over keys in the order of their positions, in splits that lie at fixed positions. So a token's
// bits depend on nothing but the token and the text before it: not on how many rows there are, on how they are tiled,
// or on which thread computes them. Numbers between the products are float32; weights and cache may be bfloat16, and
// where the processor multiplies pairs of bfloat16 numbers, what goes into a product is rounded to it.
//
// Plain C interface, used through ctypes (engine/cpu/library.py), which also says how weights are packed.
//
// Legend: T rows, D hidden size, Q query heads, H key/value heads, E head size, V size of a head's values (E in these
// layers), I intermediate size, O outputs, K inputs of a product.

#include <algorithm>
#include <mutex>
#include <vector>

#include "attention.h"
#include "layout.h"
#include "products.h"
#include "team.h"
#include "vectors.h"

namespace {

struct Step {
  const Stack* stack;
  const Rows* rows;
  float* hidden;  // [T, D], read and overwritten
  const float *cos, *sin;
  float* out;  // [T, D]: after the final norm
  std::vector<float> normed, qkv, found, gated;
  std::vector<Pair> pairs, gated_pairs;  // what goes into a product, where it is rounded for it
  Counters counters;
};

constexpr int PHASES = 9;  // of a layer, at most
constexpr int INSIDE = -1;

void compute(void* data, int) {
  Step& step = *static_cast<Step*>(data);
  const Stack& s = *step.stack;
  const int count = step.rows->count, threads = team->threads(), size = s.head_size;
  const int heads = s.query_heads + 2 * s.key_heads, width = heads * size, found_width = s.query_heads * size;
  const AttentionPieces pieces(s, *step.rows, threads);
  int phase = 0;
  const auto each = [&](int items, auto&& work) {
    step.counters.each(phase, items, threads, work);
    ++phase;
    team->barrier();
  };
  const bool paired = PAIRS && s.half;
  const auto product = [&](const void* weights, const float* bias, int inputs, Then then, const float* x,
                           const Pair* pairs, const Results& out) {
    const int outputs = then == Then::SILU || then == Then::GELU ? 2 * out.stride : out.stride;
    multiply({weights, bias, inputs, outputs}, s.half, then, x, pairs, out, step.counters, phase, threads);
    ++phase;
    team->barrier();
  };
  float *hidden = step.hidden, *normed = step.normed.data(), *qkv = step.qkv.data();
  float *found = step.found.data(), *gated = step.gated.data();
  Pair *pairs = step.pairs.data(), *gated_pairs = paired ? step.gated_pairs.data() : nullptr;
  const auto keep_states = [&](int layers, int t) {
    const Rows& rows = *step.rows;
    for (int k = 0; k < rows.kept_count; ++k)
      if (rows.kept[k] == layers)
        std::copy_n(hidden + (size_t)t * s.hidden, s.hidden,
                    rows.states + ((size_t)t * rows.kept_count + k) * s.hidden);
  };
  // Behind so many layers, or INSIDE of one.
  const auto normalised = [&](int layers, const float* weight, float eps) {
    if (!paired) {
      each(count, [&](int t) {
        const size_t at = (size_t)t * s.hidden;
        keep_states(layers, t);
        normalise(hidden + at, weight, eps, s.hidden, normed + at);
      });
      return;
    }
    each(tiles_of(count), [&](int number) {
      const Tile tile = tile_at(count, number);
      for (int m = 0; m < tile.count; ++m) {
        keep_states(layers, tile.first + m);
        normalise(hidden + (size_t)(tile.first + m) * s.hidden, weight, eps, s.hidden,
                  tile.words(pairs, s.hidden, m, 0), tile.count);
      }
    });
  };
  for (int l = 0; l < s.count; ++l) {
    const Layer& layer = s.layers[l];
    normalised(l, layer.input_norm, layer.input_eps);
    product(layer.qkv, layer.qkv_bias, s.hidden, Then::STORE, normed, pairs, {qkv, width, count});
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
    each(pieces.count(), [&](int i) { pieces.compute(attention, i); });
    if (paired)
      each(rounding_pieces(count, found_width), [&](int i) { round_piece(found, count, found_width, i, pairs); });
    product(layer.output, layer.output_bias, found_width, Then::ADD, found, pairs, {hidden, s.hidden, count});
    normalised(INSIDE, layer.mlp_norm, layer.mlp_eps);
    product(layer.gate_up, layer.gate_up_bias, s.hidden, layer.gelu ? Then::GELU : Then::SILU, normed, pairs,
            {gated, s.intermediate, count, gated_pairs});
    product(layer.down, layer.down_bias, s.intermediate, Then::ADD, gated, gated_pairs, {hidden, s.hidden, count});
  }
  each(count, [&](int t) {
    const size_t at = (size_t)t * s.hidden;
    keep_states(s.count, t);
    normalise(hidden + at, s.norm, s.eps, s.hidden, step.out + at);
  });
}

struct AttentionAlone {
  Attention attention;
  AttentionPieces pieces;
  Counters counters;
};

void attend_alone(void* data, int) {
  AttentionAlone& job = *static_cast<AttentionAlone*>(data);
  job.counters.each(0, job.pieces.count(), team->threads(), [&](int i) { job.pieces.compute(job.attention, i); });
}

struct Alone {
  Product product;
  bool half;
  const float* x;
  Pair* pairs;
  float* out;
  int rows;
  Counters counters;
};

void compute_alone(void* data, int) {
  Alone& job = *static_cast<Alone*>(data);
  if (PAIRS && job.half) {
    const int pieces = rounding_pieces(job.rows, job.product.inputs);
    job.counters.each(0, pieces, team->threads(),
                      [&](int i) { round_piece(job.x, job.rows, job.product.inputs, i, job.pairs); });
    team->barrier();
  }
  multiply(job.product, job.half, Then::STORE, job.x, job.pairs, {job.out, job.product.outputs, job.rows}, job.counters,
           1, team->threads());
}

}  // namespace

extern "C" {

// Floats of a vector: weights are packed by it.
int paceline_width() { return WIDTH; }

// Whether weights in bfloat16 are packed by pairs of inputs.
int paceline_pairs() { return PAIRS; }

// All layers and the final norm of a step. `hidden` [T, D] is overwritten, `out` [T, D] written.
void paceline_step(const Stack* stack, const Rows* rows, float* hidden, const float* cos, const float* sin,
                   float* out, int threads) {
  std::lock_guard<std::mutex> lock(one_at_a_time);
  team = team_of(threads);
  static Step step{nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, {}, {}, {}, {}, {}, {}, Counters(0)};
  step.stack = stack, step.rows = rows, step.hidden = hidden, step.cos = cos, step.sin = sin, step.out = out;
  const size_t count = rows->count;
  room(step.qkv, count * (stack->query_heads + 2 * stack->key_heads) * stack->head_size);
  room(step.found, count * stack->query_heads * stack->head_size);
  if (PAIRS && stack->half) {
    room(step.pairs, count * std::max(stack->hidden, stack->query_heads * stack->head_size) / 2);
    room(step.gated_pairs, count * stack->intermediate / 2);
  } else {
    room(step.normed, count * stack->hidden);
    room(step.gated, count * stack->intermediate);
  }
  step.counters = Counters(stack->count * PHASES + 1);
  team->run(compute, &step);
}

// The attention of one layer alone: query [T, Q, E], to out [T, Q, V].
void paceline_attend(const Stack* stack, const Layer* layer, const Rows* rows, const float* query, float* out,
                     int threads) {
  std::lock_guard<std::mutex> lock(one_at_a_time);
  team = team_of(threads);
  AttentionAlone job{{*stack, *layer, *rows, query, stack->query_heads * stack->head_size, out},
                     {*stack, *rows, threads}, Counters(1)};
  team->run(attend_alone, &job);
}

// x [T, K] times packed weights, to out [T, O].
void paceline_product(const void* weights, const float* bias, int half, int inputs, int outputs, const float* x,
                      int rows, float* out, int threads) {
  std::lock_guard<std::mutex> lock(one_at_a_time);
  team = team_of(threads);
  static std::vector<Pair> pairs;
  if (PAIRS && half) pairs.resize((size_t)rows * inputs / 2);
  Alone job{{weights, bias, inputs, outputs}, half != 0, x, pairs.data(), out, rows, Counters(2)};
  team->run(compute_alone, &job);
}

}  // extern "C"
