// Sixteen floats at a time, written once with the compiler's vector extensions: a 512-bit register, two of 256 bits or
// four of 128, whatever the variant being compiled has. Only what they cannot say uses intrinsics.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#ifndef OCTAVO_VARIANT
#error "OCTAVO_VARIANT names the instruction set that this file is compiled for"
#endif

#define OCTAVO_INLINE inline __attribute__((always_inline))

namespace octavo::OCTAVO_VARIANT {

constexpr int kLanes = 16;

// How many f32x16 of sums the registers hold beside what is multiplied.
#if defined(__AVX512F__)
constexpr int kSums = 24;
#elif defined(__AVX2__) || defined(__aarch64__)
constexpr int kSums = 6;
#else
constexpr int kSums = 2;
#endif

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

// A bfloat16 as its bits: the upper half of a float's.
struct bf16 {
  uint16_t bits;
};

template <typename Vector>
OCTAVO_INLINE Vector load_as(const void* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof(vector));
  return vector;
}

OCTAVO_INLINE f32x16 broadcast(float value) { return f32x16{} + value; }

OCTAVO_INLINE f32x16 load(const float* from) { return load_as<f32x16>(from); }

OCTAVO_INLINE f32x16 load(const bf16* from) {
  return (f32x16)(__builtin_convertvector(load_as<u16x16>(from), u32x16) << 16);
}

OCTAVO_INLINE void store(float* to, f32x16 values) { std::memcpy(to, &values, sizeof(values)); }

// Rounds to nearest, ties to even; a NaN stays one.
OCTAVO_INLINE u16x16 to_bf16(f32x16 values) {
#if defined(__AVX512BF16__)
  return (u16x16)_mm512_cvtneps_pbh((__m512)values);
#else
  const u32x16 bits = (u32x16)values;
  const u32x16 rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  const u32x16 chosen = (u32x16)(values != values ? (i32x16)(bits | 0x400000u) : (i32x16)rounded);
  return __builtin_convertvector(chosen >> 16, u16x16);
#endif
}

OCTAVO_INLINE void store(bf16* to, f32x16 values) {
  const u16x16 bits = to_bf16(values);
  std::memcpy(to, &bits, sizeof(bits));
}

OCTAVO_INLINE float to_float(float value) { return value; }

OCTAVO_INLINE float to_float(bf16 value) {
  const uint32_t bits = uint32_t(value.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

OCTAVO_INLINE void store_one(float* to, float value) { *to = value; }

OCTAVO_INLINE void store_one(bf16* to, float value) { to->bits = to_bf16(broadcast(value))[0]; }

OCTAVO_INLINE f32x16 vmax(f32x16 a, f32x16 b) { return a > b ? a : b; }

OCTAVO_INLINE float sum(f32x16 values) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)values);
#else
  float lanes[kLanes];
  store(lanes, values);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int lane = 0; lane < width; lane++) lanes[lane] += lanes[lane + width];
  return lanes[0];
#endif
}

OCTAVO_INLINE float largest(f32x16 values) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)values);
#else
  float result = values[0];
  for (int lane = 1; lane < kLanes; lane++) result = values[lane] > result ? values[lane] : result;
  return result;
#endif
}

// The polynomial nearest to 2^r for r from -1/2 to 1/2: to 8e-5 relative for what is rounded to bf16 at once, else 2e-9.
template <bool coarse>
OCTAVO_INLINE f32x16 exp2_fraction(f32x16 r) {
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
OCTAVO_INLINE f32x16 exp2(f32x16 x) {
#if defined(__AVX512DQ__)
  const f32x16 r = (f32x16)_mm512_reduce_ps((__m512)x, 0);
  return (f32x16)_mm512_scalef_ps((__m512)exp2_fraction<coarse>(r), (__m512)(x - r));
#else
  const f32x16 least = broadcast(-126.0f);
  const f32x16 clamped = vmax(x, least);
  const f32x16 shift = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits.
  const f32x16 shifted = clamped + shift;
  const f32x16 p = exp2_fraction<coarse>(clamped - (shifted - shift));
  const f32x16 scaled = (f32x16)((i32x16)p + ((i32x16)shifted << 23));
  return x != x ? x : x < least ? f32x16{} : scaled;
#endif
}

constexpr float kLog2E = 1.44269504f;

OCTAVO_INLINE f32x16 exp(f32x16 x) { return exp2<false>(x * kLog2E); }

OCTAVO_INLINE f32x16 sigmoid(f32x16 x) {
  // Beyond 88 the exponential would overflow; there the result is 0 or 1 in fp32 anyway.
  const f32x16 bounded = x < broadcast(-87.0f) ? broadcast(-87.0f) : x > broadcast(87.0f) ? broadcast(87.0f) : x;
  const f32x16 result = 1.0f / (1.0f + exp(-bounded));
  return x != x ? x : result;
}

OCTAVO_INLINE f32x16 tanh(f32x16 x) { return 2.0f * sigmoid(2.0f * x) - 1.0f; }

// What a dot product reads of its first operand in one step: one float, or a pair of bfloat16 that share a register lane.
template <typename T>
struct Step;

template <>
struct Step<float> {
  static constexpr int kDepth = 1;
  using Operand = f32x16;
  OCTAVO_INLINE static Operand operand(const float* from) { return broadcast(*from); }
  OCTAVO_INLINE static f32x16 add(f32x16 sum, Operand a, const float* b) { return sum + a * load(b); }
};

template <>
struct Step<bf16> {
  static constexpr int kDepth = 2;
#if defined(__AVX512BF16__)
  using Operand = __m512i;
  OCTAVO_INLINE static Operand operand(const bf16* from) {
    int32_t pair;
    std::memcpy(&pair, from, sizeof(pair));
    return _mm512_set1_epi32(pair);
  }
  OCTAVO_INLINE static f32x16 add(f32x16 sum, Operand a, const bf16* b) {
    return (f32x16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)_mm512_loadu_si512(b));
  }
#else
  struct Operand {
    f32x16 even, odd;
  };
  OCTAVO_INLINE static Operand operand(const bf16* from) {
    return {broadcast(to_float(from[0])), broadcast(to_float(from[1]))};
  }
  OCTAVO_INLINE static f32x16 add(f32x16 sum, Operand a, const bf16* b) {
    const u32x16 pairs = load_as<u32x16>(b);
    sum = sum + a.even * (f32x16)(pairs << 16);
    return sum + a.odd * (f32x16)(pairs & 0xffff0000u);
  }
#endif
};

}  // namespace octavo::OCTAVO_VARIANT
