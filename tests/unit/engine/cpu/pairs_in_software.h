// Pairs of bfloat16 numbers as engine/cpu/vectors.h has them, for any processor: slow, and the sums are rounded otherwise.

constexpr bool PAIRS = true;
inline float number_of(uint32_t upper_half) {
  const uint32_t bits = upper_half << 16;
  float number;
  std::memcpy(&number, &bits, 4);
  return number;
}
inline uint16_t half_rounded(float number) {
  uint32_t bits;
  std::memcpy(&bits, &number, 4);
  return number != number ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
inline Vec multiply_add(Pair inputs, Vec weights, Vec sums) {
  uint32_t words[WIDTH];
  float low[WIDTH], high[WIDTH];
  std::memcpy(words, &weights, sizeof(words));
  for (int i = 0; i < WIDTH; ++i) low[i] = number_of(words[i] & 0xffff), high[i] = number_of(words[i] >> 16);
  return fma(all(number_of(inputs.second)), load(high), fma(all(number_of(inputs.first)), load(low), sums));
}
inline void to_pairs(Vec numbers, Pair* pairs) {
  float lanes[WIDTH];
  store(lanes, numbers);
  for (int i = 0; i < WIDTH / 2; ++i) pairs[i] = {half_rounded(lanes[2 * i]), half_rounded(lanes[2 * i + 1])};
}
inline Vec paired(const uint16_t* first, const uint16_t* second) {
  uint32_t words[WIDTH];
  for (int i = 0; i < WIDTH; ++i) words[i] = (first ? first[i] : 0) | (second ? (uint32_t)second[i] << 16 : 0);
  return load(reinterpret_cast<const float*>(words));
}
