// Vectors of float32 as wide as the processor's, and how bfloat16 becomes them or is multiplied as it is.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace {

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
inline Vec times_power_of_two(Vec a, Vec n) { return _mm512_scalef_ps(a, n); }
// Whether any number of `a` is larger than that of `b`.
inline bool any_larger(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) != 0; }
// 0 where `a` is `value`, else `other`.
inline Vec zero_where(Vec a, float value, Vec other) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, all(value), _CMP_NEQ_UQ), other);
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
inline Vec times_power_of_two(Vec a, Vec n) {
  const __m256i power = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(power, 23)));
}
inline bool any_larger(Vec a, Vec b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)) != 0; }
// 0 where `a` is `value`, else `other`.
inline Vec zero_where(Vec a, float value, Vec other) {
  return _mm256_and_ps(_mm256_cmp_ps(a, all(value), _CMP_NEQ_UQ), other);
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

inline Vec multiply_add(float input, Vec weights, Vec sums) { return fma(all(input), weights, sums); }

// Two bfloat16 numbers, which some processors multiply by two others and add to a sum in one instruction.
struct Pair {
  uint16_t first, second;
};
#ifdef PAIRS_IN_SOFTWARE  // a header, for tests on other processors
#include PAIRS_IN_SOFTWARE
#elif defined(__AVX512BF16__)
constexpr bool PAIRS = true;
inline Vec multiply_add(Pair inputs, Vec weights, Vec sums) {
  int word;
  std::memcpy(&word, &inputs, 4);
  return _mm512_dpbf16_ps(sums, (__m512bh)_mm512_set1_epi32(word), (__m512bh)_mm512_castps_si512(weights));
}
// Rounded to nearest, ties to even.
inline void to_pairs(Vec numbers, Pair* pairs) {
  _mm256_storeu_si256((__m256i*)pairs, (__m256i)_mm512_cvtneps_pbh(numbers));
}
// Numbers of two rows side by side, one pair of each a word; no row: zeros.
inline Vec paired(const uint16_t* first, const uint16_t* second) {
  const auto words = [](const uint16_t* row) {
    return row ? _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)row)) : _mm512_setzero_si512();
  };
  return _mm512_castsi512_ps(_mm512_or_si512(words(first), _mm512_slli_epi32(words(second), 16)));
}
#else
constexpr bool PAIRS = false;
inline void to_pairs(Vec, Pair*) {}
inline Vec paired(const uint16_t*, const uint16_t*) { return zero(); }
#endif

// To pairs, of which number i goes to pairs[i * stride].
inline void to_pairs(Vec numbers, Pair* pairs, int stride) {
  Pair found[WIDTH / 2];
  to_pairs(numbers, found);
  for (int i = 0; i < WIDTH / 2; ++i) pairs[(size_t)i * stride] = found[i];
}
inline void to_pairs(const float* numbers, int size, Pair* pairs, int stride) {
  for (int i = 0; i < size; i += WIDTH) to_pairs(load(numbers + i), pairs + (size_t)i / 2 * stride, stride);
}

// Of all lanes: the upper half is added to the lower one, until one is left.
inline float sum(Vec v) {
#ifdef __AVX512F__
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
#else
  const __m256 eight = v;
#endif
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// WIDTH vectors as the columns of what were rows.
inline void transpose(Vec (&v)[WIDTH]) {
#ifdef __AVX512F__
  Vec a[16];
  for (int i = 0; i < 16; i += 2) a[i] = _mm512_unpacklo_ps(v[i], v[i + 1]), a[i + 1] = _mm512_unpackhi_ps(v[i], v[i + 1]);
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {
      const __m512d low = _mm512_castps_pd(a[i + j]), high = _mm512_castps_pd(a[i + 2 + j]);
      v[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
      v[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
    }
  for (int i = 0; i < 16; i += 8)
    for (int j = 0; j < 4; ++j) {
      a[i + j] = _mm512_shuffle_f32x4(v[i + j], v[i + 4 + j], 0x88);
      a[i + 4 + j] = _mm512_shuffle_f32x4(v[i + j], v[i + 4 + j], 0xdd);
    }
  for (int j = 0; j < 8; ++j) {
    v[j] = _mm512_shuffle_f32x4(a[j], a[8 + j], 0x88);
    v[8 + j] = _mm512_shuffle_f32x4(a[j], a[8 + j], 0xdd);
  }
#else
  Vec a[8];
  for (int i = 0; i < 8; i += 2) a[i] = _mm256_unpacklo_ps(v[i], v[i + 1]), a[i + 1] = _mm256_unpackhi_ps(v[i], v[i + 1]);
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; ++j) {
      const __m256d low = _mm256_castps_pd(a[i + j]), high = _mm256_castps_pd(a[i + 2 + j]);
      v[i + 2 * j] = _mm256_castpd_ps(_mm256_unpacklo_pd(low, high));
      v[i + 2 * j + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(low, high));
    }
  for (int j = 0; j < 4; ++j) {
    a[j] = _mm256_permute2f128_ps(v[j], v[4 + j], 0x20);
    a[4 + j] = _mm256_permute2f128_ps(v[j], v[4 + j], 0x31);
  }
  for (int j = 0; j < 8; ++j) v[j] = a[j];
#endif
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
  return times_power_of_two(y, n);
}

inline uint16_t rounded(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;  // NaN stays one
  return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
inline float widened(uint16_t x) {
  const uint32_t bits = (uint32_t)x << 16;
  float number;
  std::memcpy(&number, &bits, 4);
  return number;
}

}  // namespace
