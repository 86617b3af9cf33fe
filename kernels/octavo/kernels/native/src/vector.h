// What is done with sixteen lanes: bfloat16, reductions, exponentials.
#pragma once

#include "lanes.h"

namespace octavo::OCTAVO_VARIANT {

// A bfloat16 as its bits: the upper half of a float's.
struct bf16 {
  uint16_t bits;
};

OCTAVO_INLINE f32x16 load(const float* from) { return load_as<f32x16>(from); }

OCTAVO_INLINE f32x16 load(const bf16* from) {
  return bits_as<f32x16>(converted<u32x16>(load_as<u16x16>(from)) << 16);
}

OCTAVO_INLINE void store(float* to, const f32x16& values) { store_bytes(to, values); }

// Rounds to nearest, ties to even, in the upper halves; a NaN stays one. The lower halves hold anything.
OCTAVO_INLINE u32x16 rounded_to_bf16(const f32x16& values) {
  const u32x16 bits = bits_as<u32x16>(values);
  const u32x16 rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return select(values != values, bits | 0x400000u, rounded);
}

OCTAVO_INLINE u16x16 to_bf16(const f32x16& values) {
#if defined(__AVX512BF16__)
  return (u16x16)_mm512_cvtneps_pbh((__m512)values);
#else
  return converted<u16x16>(rounded_to_bf16(values) >> 16);
#endif
}

OCTAVO_INLINE void store(bf16* to, const f32x16& values) { store_bytes(to, to_bf16(values)); }

OCTAVO_INLINE float to_float(float value) { return value; }

OCTAVO_INLINE float to_float(bf16 value) {
  const uint32_t bits = uint32_t(value.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

OCTAVO_INLINE void store_one(float* to, float value) { *to = value; }

OCTAVO_INLINE void store_one(bf16* to, float value) {
  const u16x16 bits = to_bf16(broadcast(value));
  std::memcpy(to, &bits, sizeof(*to));
}

// Halves are added until one lane is left.
template <typename Lanes>
OCTAVO_INLINE float sum(const Lanes& values) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)values);
#else
  if constexpr (kIsTwo<Lanes>) {
    return sum(values.low + values.high);
  } else {
    float lanes[kRegisterLanes];
    store_bytes(lanes, values);
    for (int width = kRegisterLanes / 2; width > 0; width /= 2)
      for (int lane = 0; lane < width; lane++) lanes[lane] += lanes[lane + width];
    return lanes[0];
  }
#endif
}

template <typename Lanes>
OCTAVO_INLINE float largest(const Lanes& values) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)values);
#else
  if constexpr (kIsTwo<Lanes>) {
    return largest(vmax(values.low, values.high));
  } else {
    float result = values[0];
    for (int lane = 1; lane < kRegisterLanes; lane++) result = values[lane] > result ? values[lane] : result;
    return result;
  }
#endif
}

// The polynomial nearest to 2^r for r from -1/2 to 1/2: to 8e-5 relative for what is rounded to bf16 at once, else 2e-9.
template <bool coarse>
OCTAVO_INLINE f32x16 exp2_fraction(const f32x16& r) {
  if constexpr (coarse) {
    f32x16 p = r * 5.5171664930e-2f + 2.4261112188e-1f;
    p = p * r + 6.9326098622e-1f;
    return p * r + 9.9992807358e-1f;
  }
  f32x16 p = r * 1.5345811613e-4f + 1.3399931217e-3f;
  p = p * r + 9.6184889586e-3f;
  p = p * r + 5.5503287770e-2f;
  p = p * r + 2.4022646891e-1f;
  p = p * r + 6.9314720574e-1f;
  return p * r + 1.0000000006e+0f;
}

// 2^x; 0 where a float's normal numbers end; x at most 127. A NaN stays one.
template <bool coarse>
OCTAVO_INLINE f32x16 exp2(const f32x16& x) {
#if defined(__AVX512DQ__)
  const f32x16 r = (f32x16)_mm512_reduce_ps((__m512)x, 0);
  return (f32x16)_mm512_scalef_ps((__m512)exp2_fraction<coarse>(r), (__m512)(x - r));
#else
  const f32x16 least = broadcast(-126.0f);
  const f32x16 clamped = vmax(x, least);
  const f32x16 shift = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits.
  const f32x16 shifted = clamped + shift;
  const f32x16 p = exp2_fraction<coarse>(clamped - (shifted - shift));
  const f32x16 scaled = bits_as<f32x16>(bits_as<i32x16>(p) + (bits_as<i32x16>(shifted) << 23));
  return select(x != x, x, select(x < least, f32x16{}, scaled));
#endif
}

constexpr float kLog2E = 1.44269504f;

OCTAVO_INLINE f32x16 exp(const f32x16& x) { return exp2<false>(x * kLog2E); }

OCTAVO_INLINE f32x16 sigmoid(const f32x16& x) {
  // Beyond 88 the exponential would overflow; there the result is 0 or 1 in fp32 anyway.
  const f32x16 least = broadcast(-87.0f), most = broadcast(87.0f);
  const f32x16 bounded = select(x < least, least, select(x > most, most, x));
  const f32x16 result = 1.0f / (1.0f + exp(-bounded));
  return select(x != x, x, result);
}

OCTAVO_INLINE f32x16 tanh(const f32x16& x) { return 2.0f * sigmoid(2.0f * x) - 1.0f; }

// GELU by the error function, to 2e-7 of x (Abramowitz and Stegun, "Handbook of Mathematical Functions", 7.1.26).
template <typename Exp>
OCTAVO_INLINE f32x16 gelu_by(const f32x16& x, Exp exp_of) {
  const f32x16 z = vmax(x, -x) * 0.7071067812f;
  const f32x16 t = 1.0f / (1.0f + 0.3275911f * z);
  f32x16 p = t * 1.061405429f - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  // What is left beyond |x| of the normal distribution.
  const f32x16 tail = 0.5f * p * t * exp_of(-(z * z));
  return x * select(x < f32x16{}, tail, 1.0f - tail);
}

OCTAVO_INLINE f32x16 gelu(const f32x16& x) {
  return gelu_by(x, [](const f32x16& power) __attribute__((always_inline)) { return exp(power); });
}

}  // namespace octavo::OCTAVO_VARIANT
