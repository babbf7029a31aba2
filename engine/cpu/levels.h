// Several levels of draft trees: what may follow each place of a level, and which rows the next one has.
//
// engine/levels/level_ops.py defines it; what a launch is told and keeps lies as engine/levels/level_memory.py says.
// Noise has the bits of engine/sampling/noise.py in the integers; logarithms may differ in the last place.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "layout.h"
#include "vectors.h"

extern "C" {

struct Launch {
  int sessions, width, children, leaves, levels, group, spare, vocabulary;
  int record, branch, stops, told;  // numbers that are told of a session, slots of a branch, stop tokens, see TOLD
  int noisy;
  int ranks, bins, distances, rivals, no_leaf, given;
  double min_confidence, min_odds, max_odds;
  const int64_t* depths;  // [distances - 1]
  const double* odds;     // factors by rank, then slopes and offsets
  // Fields of the first session; those of the next are `record` further.
  const double *factor, *temperature, *min_weight, *weight, *leaf_weight;
  const int64_t *seed, *max_width, *max_children, *position, *max_end, *table, *stop, *leaf_token, *slot;
  const int64_t *given_end, *given_home, *given_branch;
  const int64_t* before;  // tokens of the text before the first in the cache
  // What goes on from level to level.
  int64_t *level, *branches, *home, *end;  // [N], [N, L, B], [N, L], [N, L]
  double* leaf_chance;                     // [N, P]
  int64_t* token;                          // [N, P]
  double *place_weight, *found;            // [N, W], [K, N, W, X]
  // Rows of a level, of which `numbers` are the branches first.
  int *tokens, *positions, *slots, *keys, *homes, *pages, *groups, *commons, *numbers;

  int rows() const { return sessions * width; }
  int places() const { return leaves + levels * width; }
  int drafts() const { return leaves + levels * width * children; }
  double* found_at(int64_t at_level, int row) const {
    return found + (at_level * rows() + row) * (told + 2 * children);
  }
};

}  // extern "C"

namespace {

constexpr int KEPT = 32;  // best draws of a row, at most
constexpr int NO_LIMIT = 1 << 30;

inline uint64_t splitmix64(uint64_t x) {
  x += 0x9E3779B97F4A7C15;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}
// Vectors of 32-bit integers, as many as of floats.
using Words = uint32_t __attribute__((vector_size(4 * WIDTH)));
using Ints = int32_t __attribute__((vector_size(4 * WIDTH)));

inline Words mix32(Words x) {
  x = (x ^ (x >> 16)) * 0x21F0AAADu;
  x = (x ^ (x >> 15)) * 0xD35A2D97u;
  return x ^ (x >> 15);
}
inline Vec where(Ints mask, Vec yes, Vec no) {
  return (Vec)(((Words)mask & (Words)yes) | (~(Words)mask & (Words)no));
}

// Of positive numbers (Cephes' logf).
inline Vec logarithm(Vec x) {
  const Words bits = (Words)x;
  Vec m = (Vec)((bits & 0x7fffffu) | 0x3f000000u);  // x = m * 2^e, m from a half to one
  const Ints low = (Ints)(m < all(0.707106781186547524f));
  const Vec e = __builtin_convertvector((Ints)(bits >> 23) - 126 + low, Vec);
  m = where(low, m + m, m) - all(1.0f);
  Vec y = all(7.0376836292e-2f);
  for (float c : {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f, -1.6668057665e-1f,
                  2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f})
    y = fma(y, m, all(c));
  const Vec z = m * m;
  y = y * m * z + e * all(-2.12194440e-4f) - all(0.5f) * z;
  return m + y + e * all(0.693359375f);
}

// Of tokens under a key: -log(-log1p(-u)).
inline Vec gumbel(uint64_t key, Words tokens) {
  const Words words = mix32(mix32(tokens * 0x9E3779B9u + (uint32_t)key) ^ (uint32_t)(key >> 32));
  const Ints values = (Ints)words;
  Vec uniform = __builtin_convertvector(values, Vec) + all(0.5f) + where(values < 0, all(4294967296.0f), zero());
  uniform = smaller(uniform * all(2.3283064365386963e-10f), all(0.999999940395355224609375f));
  // What rounding takes from the difference is put right again.
  const Vec left = all(1.0f) - uniform;
  const Ints none = (Ints)(left == all(1.0f));
  const Vec lost = uniform / where(none, all(1.0f), all(1.0f) - left);
  return zero() - logarithm(where(none, uniform, zero() - logarithm(left) * lost));
}

// The best draws of row m, its confidences, and whether its logits are numbers, to `found`.
inline void find_draws(const Launch& l, int m, const float* logits, std::vector<float>& scores) {
  const int count = l.vocabulary, whole = (count + WIDTH - 1) / WIDTH * WIDTH, kept = l.children + l.rivals;
  const int n = m / l.width;
  const int64_t level = l.level[n];
  const double told_temperature = l.temperature[(size_t)n * l.record];
  if ((int)scores.size() < whole) scores.resize(whole);
  float* score = scores.data();
  std::copy_n(logits, count, score);
  std::fill(score + count, score + whole, -INFINITY);
  Vec highest = all(-INFINITY);
  for (int v = 0; v < whole; v += WIDTH) highest = larger(load(score + v), highest);
  const float largest = maximum(highest);
  Vec exponentials = zero();
  for (int v = 0; v < whole; v += WIDTH)
    exponentials = exponentials + exponential(load(score + v) - all(largest));
  const float total = sum(exponentials);  // no number if a logit is none
  const bool sound = std::isfinite(largest) && total == total;
  if (l.noisy && sound) {
    const Vec temperature = all(told_temperature == 0.0 ? 1.0f : (float)told_temperature);
    const int64_t end = l.end[(size_t)n * l.places() + l.leaves + level * l.width + m % l.width];
    const uint64_t key = splitmix64(splitmix64((uint64_t)(l.seed[(size_t)n * l.record] ^ end)));
    Words tokens;
    for (int i = 0; i < WIDTH; ++i) tokens[i] = i;
    for (int v = 0; v < whole; v += WIDTH, tokens += WIDTH) {
      const Vec scaled = (load(score + v) - all(largest)) / temperature;
      store(score + v, told_temperature == 0.0 ? scaled : scaled + gumbel(key, tokens));
    }
  }
  float best[KEPT];
  int token[KEPT];
  std::fill_n(best, kept, -INFINITY);
  std::fill_n(token, kept, 0);
  for (int v = 0; sound && v < whole; v += WIDTH) {
    if (!any_larger(load(score + v), all(best[kept - 1]))) continue;
    for (int i = v; i < v + WIDTH; ++i) {
      if (!(score[i] > best[kept - 1])) continue;
      int at = kept - 1;
      for (; at > 0 && score[i] > best[at - 1]; --at) best[at] = best[at - 1], token[at] = token[at - 1];
      best[at] = score[i], token[at] = i;
    }
  }
  const bool by_rivals = l.noisy && told_temperature != 0.0;
  double of_best = 0.0;
  for (int i = 0; i < kept; ++i) of_best += std::exp(best[i] - best[0]);
  const double base = by_rivals ? best[0] + std::log(of_best) : (l.noisy ? 0.0f : largest) + std::log(total);
  double* out = l.found_at(level, m);
  out[1] = sound;
  out[2] = 0.0;
  for (int i = 0; i < l.children; ++i) {
    const float confidence = sound ? (float)std::exp(best[i] - base) : 0.0f;
    out[2] += sound && best[i] > -INFINITY;
    out[l.told + i] = token[i];
    out[l.told + l.children + i] = std::clamp(confidence, 1.17549435e-38f, 1.0f);
  }
}

inline void begin_session(const Launch& l, int n) {
  const size_t start = (size_t)n * l.record, given = l.leaves + l.width, at_place = (size_t)n * l.places();
  double* chance = l.leaf_chance + (size_t)n * l.drafts();
  std::fill_n(chance, l.drafts(), 0.0);
  std::copy_n(l.leaf_weight + start, l.leaves, chance);
  std::copy_n(l.leaf_token + start, l.leaves, l.token + (size_t)n * l.drafts());
  for (size_t g = 0; g < given; ++g) {
    const int64_t end = l.given_end[start + g], home = l.given_home[start + g];
    l.end[at_place + g] = end, l.home[at_place + g] = home;
    int64_t* branch = l.branches + (at_place + g) * l.branch;
    for (int b = 0; b < l.branch; ++b) branch[b] = b < end - home ? l.numbers[l.given_branch[start + g] + b] : 0;
  }
  for (int w = 0; w < l.width; ++w) {
    const double weight = l.weight[start + w];
    l.place_weight[n * l.width + w] = weight;
    *l.found_at(0, n * l.width + w) = weight == 0.0 ? l.no_leaf : l.given;
    l.pages[n * l.width + w] = (int)l.table[start];
  }
  l.level[n] = 0;
}

// Leaves of what may follow a place. Each draft is asked about only where those before it are wrong.
inline void add_leaves(const Launch& l, int n, int w) {
  const size_t start = (size_t)n * l.record;
  const int64_t level = l.level[n];
  const double *factors = l.odds, *slopes = factors + l.ranks, *offsets = slopes + l.ranks * l.bins * l.distances;
  const double *said = l.found_at(level, n * l.width + w), *own = l.factor + start;
  const double place_weight = l.place_weight[n * l.width + w], least = l.min_weight[start];
  const int64_t end = l.end[(size_t)n * l.places() + l.leaves + level * l.width + w], ahead = end - l.position[start];
  int distance = 0;
  for (int i = 0; i + 1 < l.distances; ++i) distance += ahead >= l.depths[i];
  const int there = (int)std::min((double)l.max_children[start], said[2]);
  const size_t first = (size_t)n * l.drafts() + l.leaves + (level * l.width + w) * l.children;
  double before = 0.0, left = 1.0;
  bool taken = true;
  for (int number = 0; number < l.children; ++number) {
    const int rank = std::min(number, l.ranks - 1);
    const int64_t draft = (int64_t)said[l.told + number];
    const double confidence = std::clamp(said[l.told + l.children + number], l.min_confidence, 1.0);
    const double claim = confidence / std::max(1.0 - before, confidence);
    const int cell = (rank * l.bins + std::clamp((int)(claim * l.bins), 0, l.bins - 1)) * l.distances + distance;
    double odds = std::min(claim * factors[rank], 1.0) * slopes[cell];
    odds = std::clamp(odds + offsets[cell], l.min_odds, l.max_odds);
    odds = std::max(left * std::clamp(odds * own[rank], l.min_odds, l.max_odds), l.min_confidence);
    const double chance = place_weight * odds;
    taken = taken && number < there && (!number || chance >= least);
    bool opened = taken && end < l.max_end[start] && chance >= least;
    for (int i = 0; i < l.stops; ++i) opened = opened && draft != l.stop[start + i];
    l.leaf_chance[first + number] = opened ? chance : 0.0;
    l.token[first + number] = draft;
    before += confidence, left -= odds;
  }
}

// Rows of the next level: of the best leaves, the first among equals. Those there are come first.
inline void choose_rows(const Launch& l, int n) {
  const size_t start = (size_t)n * l.record, at_place = (size_t)n * l.places();
  const int64_t level = l.level[n];
  double* chance = l.leaf_chance + (size_t)n * l.drafts();
  for (int w = 0; w < l.width; ++w) {
    double* best = std::max_element(chance, chance + l.drafts());
    const bool active = w < l.max_width[start] && *best > 0.0;
    const int chosen = (int)(best - chance), row = n * l.width + w;
    const size_t above = at_place + (chosen < l.leaves ? chosen : l.leaves + (chosen - l.leaves) / l.children);
    const size_t here = at_place + l.leaves + (level + 1) * l.width + w;
    const int64_t home = active ? l.home[above] : 0, end = active ? l.end[above] + 1 : 0;
    const int64_t slot = l.slot[start + level * l.width + w];
    l.place_weight[row] = active ? *best : 0.0;
    if (active) *best = 0.0;
    *l.found_at(level + 1, row) = active ? chosen : l.no_leaf;
    l.home[here] = home, l.end[here] = end;
    int64_t* branch = l.branches + here * l.branch;
    for (int b = 0; b < l.branch; ++b) branch[b] = active ? l.branches[above * l.branch + b] : 0;
    if (active) branch[std::clamp<int64_t>(end - 1 - home, 0, l.branch - 1)] = slot;
    for (int b = 0; b < l.branch; ++b) l.numbers[row * l.branch + b] = (int)branch[b];
    l.tokens[row] = active ? (int)l.token[(size_t)n * l.drafts() + chosen] : 0;
    l.positions[row] = (int)std::max<int64_t>(end - 1, 0);
    l.slots[row] = active ? (int)slot : l.spare + row;
    const int64_t before = active ? l.before[start] : 0;
    l.keys[row] = (int)(end - before), l.homes[row] = (int)(home - before);
  }
  for (int w = 0; w < l.width; w += l.group) {
    const int leader = n * l.width + w;
    int size = 0, common = NO_LIMIT;
    for (int row = leader; row < leader + l.group; ++row)
      if (l.place_weight[row] > 0.0) ++size, common = std::min(common, l.homes[row]);
    for (int row = leader; row < leader + l.group; ++row) {
      l.groups[row] = row == leader ? size : 0;
      l.commons[row] = l.place_weight[row] > 0.0 ? common : 0;
    }
  }
  l.level[n] = level + 1;
}

// Leaves of what the rows of a level said, and the rows of the next one.
inline void next_level(const Launch& l) {
  for (int n = 0; n < l.sessions; ++n) {
    for (int w = 0; w < l.width; ++w) add_leaves(l, n, w);
    if (l.level[n] + 1 < l.levels) choose_rows(l, n);
  }
}

}  // namespace
