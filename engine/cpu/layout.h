// The layout of what Python hands over, and what becomes of one row or head: norm, rotation, into the cache.

#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "vectors.h"

namespace {

// What a row is multiplied by before its weights are.
Vec norm_of(const float* row, float eps, int size) {
  Vec squares = zero();
  for (int i = 0; i < size; i += WIDTH) squares = fma(load(row + i), load(row + i), squares);
  return all(1.0f / std::sqrt(sum(squares) / size + eps));
}
void normalise(const float* row, const float* weight, float eps, int size, float* out) {
  const Vec scale = norm_of(row, eps, size);
  for (int i = 0; i < size; i += WIDTH) store(out + i, load(row + i) * scale * load(weight + i));
}
// The same, rounded to pairs; pair i goes to pairs[i * stride].
void normalise(const float* row, const float* weight, float eps, int size, Pair* pairs, int stride) {
  const Vec scale = norm_of(row, eps, size);
  for (int i = 0; i < size; i += WIDTH)
    to_pairs(load(row + i) * scale * load(weight + i), pairs + (size_t)i / 2 * stride, stride);
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
  void *keys, *values;  // [slots, H, E], [slots, H, V]
  const float* sinks;   // scores of each query head that take part and have no value
  float scaling, cap, input_eps, mlp_eps, query_eps, key_eps;
  int window;  // tokens that are seen, itself included; 0: all. cap: scores s become cap * tanh(s / cap); 0: none
  int gelu;
};

struct Stack {
  const Layer* layers;
  const float* norm;
  float eps;
  int count, hidden, query_heads, key_heads, head_size, value_size, intermediate;
  int half;  // weights and cache are bfloat16
  // Of a head: the first layer reads embeddings beside its states. Null: it does not.
  const float* embedding_norm;
  float embedding_eps;
  int from_normed;  // what the first layer adds to is its normed states
};

struct Rows {  // see engine/attention/rows.py
  int count;
  int page;  // slots of a page of the cache
  const int *slots, *keys, *home, *pages, *branch, *group, *common, *reach, *numbers;
  const int* kept;  // behind how many layers the states are wanted
  float* states;    // [T, kept_count, D]
  int kept_count;
};

// What drafts several levels on its own.
struct Drafter {
  const Stack* stack;
  const void* head;  // packed weights of the output layer
  const float* head_bias;
  const void* embedding;     // [V, D], as the stack's weights are stored
  const float* frequencies;  // [E / 2]: by how much each pair of dimensions is rotated at a position
  float rotary_scale;
  int page;
  // Of a head: what each row leads to, [slots, D], stored as weights are; null: states are embeddings.
  void* next;
  const int64_t* ids;  // which token each output stands for, in any order; null: its own number
  int outputs;
  int next_normed;  // what a row leads to is its normed state
};

}  // extern "C"
