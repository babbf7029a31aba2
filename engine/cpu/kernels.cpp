// The decoder layers of a step by rows, computed by a team of threads in one call.
//
// Every output is one sum that is added up in one order: products over their inputs from the first to the last, scores
// and weighted values over keys in the order of their positions, in splits that lie at fixed positions. So a token's
// bits depend on nothing but the token and the text before it: not on how many rows there are, on how they are tiled,
// or on which thread computes them. Numbers between the products are float32; weights and cache may be bfloat16, and
// where the processor multiplies pairs of bfloat16 numbers, what goes into a product is rounded to it.
//
// Plain C interface, used through ctypes (engine/cpu/library.py), which also says how weights are packed. What computes
// returns 0, or 1 for want of memory for what its threads share; what a thread needs for itself is small.
//
// Legend: T rows, D hidden size, Q query heads, H key/value heads, E head size, V size of a head's values (E in these
// layers), I intermediate size, O outputs, K inputs of a product.

#include <algorithm>
#include <vector>

#include "attention.h"
#include "layout.h"
#include "levels.h"
#include "products.h"
#include "team.h"
#include "vectors.h"

namespace {

struct Step {
  const Stack* stack;
  const Rows* rows;
  float* hidden;  // [T, D], read and overwritten
  const float *embeddings, *cos, *sin;
  float* out;  // [T, D]: after the final norm
  std::vector<float> normed, qkv, found, gated;
  std::vector<Pair> pairs, gated_pairs;  // what goes into a product, where it is rounded for it
  Counters counters;
};

constexpr int PHASES = 9;  // of a layer, at most
constexpr int INSIDE = -1;

void compute(Step& step) {
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
  // Embeddings and states side by side, each normed for itself.
  const auto beside = [&](const Layer& layer) {
    each(tiles_of(count), [&](int number) {
      const Tile tile = tile_at(count, number);
      for (int m = 0; m < tile.count; ++m) {
        const size_t at = (size_t)(tile.first + m) * s.hidden;
        const float* embedding = step.embeddings + at;
        if (paired) {
          normalise(embedding, s.embedding_norm, s.embedding_eps, s.hidden, tile.words(pairs, 2 * s.hidden, m, 0),
                    tile.count);
          normalise(hidden + at, layer.input_norm, layer.input_eps, s.hidden,
                    tile.words(pairs, 2 * s.hidden, m, s.hidden), tile.count);
        } else {
          normalise(embedding, s.embedding_norm, s.embedding_eps, s.hidden, normed + 2 * at);
          normalise(hidden + at, layer.input_norm, layer.input_eps, s.hidden, normed + 2 * at + s.hidden);
        }
        if (s.from_normed) normalise(hidden + at, layer.input_norm, layer.input_eps, s.hidden, hidden + at);
      }
    });
  };
  for (int l = 0; l < s.count; ++l) {
    const Layer& layer = s.layers[l];
    const bool reads_both = l == 0 && s.embedding_norm;
    if (reads_both)
      beside(layer);
    else
      normalised(l, layer.input_norm, layer.input_eps);
    product(layer.qkv, layer.qkv_bias, reads_both ? 2 * s.hidden : s.hidden, Then::STORE, normed, pairs,
            {qkv, width, count});
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

void run_step(const Stack* stack, const Rows* rows, float* hidden, const float* embeddings, const float* cos,
              const float* sin, float* out) {
  static auto& step =
      *new Step{nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, {}, {}, {}, {}, {}, {}, Counters(0)};
  step.stack = stack, step.rows = rows, step.hidden = hidden, step.embeddings = embeddings;
  step.cos = cos, step.sin = sin, step.out = out;
  const size_t count = rows->count, read = stack->embedding_norm ? 2 * stack->hidden : stack->hidden;
  room(step.qkv, count * (stack->query_heads + 2 * stack->key_heads) * stack->head_size);
  room(step.found, count * stack->query_heads * stack->head_size);
  if (PAIRS && stack->half) {
    room(step.pairs, count * std::max<size_t>(read, stack->query_heads * stack->head_size) / 2);
    room(step.gated_pairs, count * stack->intermediate / 2);
  } else {
    room(step.normed, count * read);
    room(step.gated, count * stack->intermediate);
  }
  step.counters = Counters(stack->count * PHASES + 1);
  team->run([] { compute(step); });
}

void run_product(const Product& product, bool half, const float* x, int rows, float* out) {
  static auto& pairs = *new std::vector<Pair>;
  const bool paired = PAIRS && half;
  if (paired) room(pairs, (size_t)rows * product.inputs / 2);
  const int pieces = rounding_pieces(rows, product.inputs), threads = team->threads();
  Counters counters(2);
  team->run([&] {
    if (paired) {
      counters.each(0, pieces, threads, [&](int i) { round_piece(x, rows, product.inputs, i, pairs.data()); });
      team->barrier();
    }
    multiply(product, half, Then::STORE, x, pairs.data(), {out, product.outputs, rows}, counters, 1, threads);
  });
}

// A level of drafts: its rows without those that no place is behind, and what they say.
class DraftLevel {
 public:
  // Rows that are computed already.
  void first(const Launch& l, const float* logits) {
    find_rows(l);
    for (int m : rows_) logits_.push_back(logits + (size_t)m * l.vocabulary);
  }

  void say(const Launch& l) {
    Counters counters(1);
    team->run([&] {
      static thread_local std::vector<float> scores;
      counters.each(0, (int)rows_.size(), team->threads(), [&](int i) { find_draws(l, rows_[i], logits_[i], scores); });
    });
    next_level(l);
  }

  // The rows that were chosen last.
  void compute(const Launch& l, const Drafter& drafter) {
    const Stack& s = *drafter.stack;
    find_rows(l);
    const int count = (int)rows_.size();
    if (!count) return;
    const bool head = drafter.next;
    std::vector<float>& embedded = head ? embedded_ : hidden_;
    room(hidden_, (size_t)count * s.hidden);
    room(embedded, (size_t)count * s.hidden);
    room(normed_, (size_t)count * s.hidden);
    room(cos_, (size_t)count * s.head_size);
    room(sin_, (size_t)count * s.head_size);
    room(said_, (size_t)count * l.vocabulary);
    for (int t = 0; t < count; ++t) {
      const int m = rows_[t], half = s.head_size / 2;
      read(drafter.embedding, l.tokens[m], s, embedded.data() + (size_t)t * s.hidden);
      for (int i = 0; i < half; ++i) {
        const float angle = (float)(l.positions[m] - head) * drafter.frequencies[i], scale = drafter.rotary_scale;
        const float cos = as_stored(std::cos(angle) * scale, s.half), sin = as_stored(std::sin(angle) * scale, s.half);
        float *cosines = cos_.data() + (size_t)t * s.head_size, *sines = sin_.data() + (size_t)t * s.head_size;
        cosines[i] = cosines[half + i] = cos;
        sines[i] = sines[half + i] = sin;
      }
      logits_.push_back(said_.data() + (size_t)t * l.vocabulary);
    }
    const auto column = [&](int number, auto&& of_row) -> const int* {
      columns_[number].clear();
      for (int m : rows_) columns_[number].push_back(of_row(m));
      return columns_[number].data();
    };
    const Rows rows{.count = count,
                    .page = drafter.page,
                    .slots = column(0, [&](int m) { return l.slots[m]; }),
                    .keys = column(1, [&](int m) { return l.keys[m]; }),
                    .home = column(2, [&](int m) { return l.homes[m]; }),
                    .pages = column(3, [&](int m) { return l.pages[m]; }),
                    .branch = column(4, [&](int m) { return m * l.branch; }),
                    .group = column(5, [&](int m) { return l.groups[m]; }),
                    .common = column(6, [&](int m) { return l.commons[m]; }),
                    .reach = column(7, [](int) { return 0; }),
                    .numbers = l.numbers,
                    .kept = nullptr,
                    .states = nullptr,
                    .kept_count = 0};
    for (int t = 0; head && t < count; ++t)  // from where the token lies that this one hangs from
      read(drafter.next, slot_of(rows, t, rows.keys[t] - 2), s, hidden_.data() + (size_t)t * s.hidden);
    run_step(&s, &rows, hidden_.data(), embedded_.data(), cos_.data(), sin_.data(), normed_.data());
    const std::vector<float>& next = drafter.next_normed ? normed_ : hidden_;
    for (int t = 0; head && t < count; ++t)
      keep(next.data() + (size_t)t * s.hidden, drafter.next, (size_t)l.slots[rows_[t]] * s.hidden, s.hidden, s.half);
    const int outputs = drafter.ids ? drafter.outputs : l.vocabulary;
    std::vector<float>& product = drafter.ids ? own_ : said_;
    room(product, (size_t)count * outputs);
    run_product({drafter.head, drafter.head_bias, s.hidden, outputs}, s.half, normed_.data(), count, product.data());
    if (!drafter.ids) return;
    std::fill_n(said_.data(), (size_t)count * l.vocabulary, -INFINITY);
    for (int t = 0; t < count; ++t)
      for (int i = 0; i < outputs; ++i)
        if (drafter.ids[i] < l.vocabulary)
          said_[(size_t)t * l.vocabulary + drafter.ids[i]] = own_[(size_t)t * outputs + i];
  }

 private:
  void find_rows(const Launch& l) {
    rows_.clear();
    logits_.clear();
    for (int m = 0; m < l.rows(); ++m)
      if (l.place_weight[m] > 0.0) rows_.push_back(m);
  }

  static float as_stored(float x, bool half) { return half ? widened(rounded(x)) : x; }

  // A row of numbers that are stored as weights are.
  static void read(const void* table, int at, const Stack& s, float* out) {
    const size_t first = (size_t)at * s.hidden;
    if (!s.half) {
      std::copy_n(static_cast<const float*>(table) + first, s.hidden, out);
      return;
    }
    for (int i = 0; i < s.hidden; i += WIDTH) store(out + i, widened(static_cast<const uint16_t*>(table) + first + i));
  }

  std::vector<int> rows_;             // of the launch, that there are
  std::vector<int> columns_[8];       // of these alone, as attention reads them
  std::vector<const float*> logits_;  // what they said
  std::vector<float> hidden_, embedded_, normed_, cos_, sin_, said_, own_;
};

}  // namespace

extern "C" {

// Floats of a vector: weights are packed by it.
int paceline_width() { return WIDTH; }

// Whether weights in bfloat16 are packed by pairs of inputs.
int paceline_pairs() { return PAIRS; }

// All layers and the final norm of a step. `hidden` [T, D] is overwritten, `out` [T, D] written.
// Of a head `hidden` are its states, and then those behind its last layer; else `embeddings` may be null.
int paceline_step(const Stack* stack, const Rows* rows, float* hidden, const float* embeddings, const float* cos,
                  const float* sin, float* out, int threads) {
  return computed(threads, [&] { run_step(stack, rows, hidden, embeddings, cos, sin, out); });
}

// The attention of one layer alone: query [T, Q, E], to out [T, Q, V].
int paceline_attend(const Stack* stack, const Layer* layer, const Rows* rows, const float* query, float* out,
                    int threads) {
  return computed(threads, [&] {
    const Attention attention{*stack, *layer, *rows, query, stack->query_heads * stack->head_size, out};
    const AttentionPieces pieces(*stack, *rows, threads);
    Counters counters(1);
    team->run([&] { counters.each(0, pieces.count(), threads, [&](int i) { pieces.compute(attention, i); }); });
  });
}

// x [T, K] times packed weights, to out [T, O].
int paceline_product(const void* weights, const float* bias, int half, int inputs, int outputs, const float* x,
                     int rows, float* out, int threads) {
  return computed(threads, [&] { run_product({weights, bias, inputs, outputs}, half, x, rows, out); });
}

// Take in what a launch was told.
void paceline_begin(const Launch* launch) {
  for (int n = 0; n < launch->sessions; ++n) begin_session(*launch, n);
}

// For tests. What the rows of a level say: logits [M, stride], at least as many as there are tokens.
void paceline_expand(const Launch* launch, const float* logits, int stride) {
  std::vector<float> scores;
  for (int m = 0; m < launch->rows(); ++m) find_draws(*launch, m, logits + (size_t)m * stride, scores);
  next_level(*launch);
}

// All `levels` of a launch, the first of which said logits [M, vocabulary].
int paceline_launch(const Launch* launch, const Drafter* drafter, const float* logits, int levels, int threads) {
  return computed(threads, [&] {
    paceline_begin(launch);
    static auto& level = *new DraftLevel;
    level.first(*launch, logits);
    for (int done = 1; level.say(*launch), done < levels; ++done) level.compute(*launch, *drafter);
  });
}

}  // extern "C"
