// Functions of sixteen lanes that give the same bits on every instruction set: each product and each sum is rounded by
// itself, no instruction approximates, and lanes are added in one order. For sources that are compiled with
// -ffp-contract=off.
#pragma once

#include "vector.h"

#if !defined(OCTAVO_EXACT)
#error "OCTAVO_EXACT says that no compiler may fuse products and sums here"
#endif

namespace octavo::OCTAVO_VARIANT::exact {

// 2^x; 0 where a float's normal numbers end; x at most 127. A NaN stays one.
template <bool coarse = false>
OCTAVO_INLINE f32x16 exp2(const f32x16& x) {
  const f32x16 least = broadcast(-126.0f);
#if defined(__AVX512DQ__)
  const f32x16 r = (f32x16)_mm512_reduce_ps((__m512)x, 0);
  const __mmask16 kept = _mm512_cmp_ps_mask((__m512)x, (__m512)least, _CMP_NLT_UQ);
  return (f32x16)_mm512_maskz_scalef_ps(kept, (__m512)exp2_fraction<coarse>(r), (__m512)(x - r));
#else
  const f32x16 clamped = vmax(x, least);
  const f32x16 shift = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits.
  const f32x16 shifted = clamped + shift;
  const f32x16 p = exp2_fraction<coarse>(clamped - (shifted - shift));
  const f32x16 scaled = bits_as<f32x16>(bits_as<i32x16>(p) + (bits_as<i32x16>(shifted) << 23));
  return select(x != x, x, select(x < least, f32x16{}, scaled));
#endif
}

OCTAVO_INLINE f32x16 exp(const f32x16& x) { return exact::exp2(x * kLog2E); }

OCTAVO_INLINE f32x16 sigmoid(const f32x16& x) {
  // Beyond 88 the exponential would overflow; there the result is 0 or 1 in fp32 anyway.
  const f32x16 least = broadcast(-87.0f), most = broadcast(87.0f);
  const f32x16 bounded = select(x < least, least, select(x > most, most, x));
  return select(x != x, x, 1.0f / (1.0f + exact::exp(-bounded)));
}

OCTAVO_INLINE f32x16 tanh(const f32x16& x) { return 2.0f * exact::sigmoid(2.0f * x) - 1.0f; }

OCTAVO_INLINE f32x16 silu(const f32x16& x) { return x * exact::sigmoid(x); }

OCTAVO_INLINE f32x16 gelu(const f32x16& x) {
  return gelu_by(x, [](const f32x16& power) __attribute__((always_inline)) { return exact::exp(power); });
}

// GELU, its tanh form.
OCTAVO_INLINE f32x16 gelu_tanh(const f32x16& x) {
  const f32x16 inner = 0.7978845608f * (x + 0.044715f * x * x * x);
  return 0.5f * x * (1.0f + exact::tanh(inner));
}

// Halves are added until one lane is left.
OCTAVO_INLINE float sum(const f32x16& values) {
  float lanes[kLanes];
  store_bytes(lanes, values);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int lane = 0; lane < width; lane++) lanes[lane] = lanes[lane] + lanes[lane + width];
  return lanes[0];
}

// The largest; lanes hold no NaN.
OCTAVO_INLINE float largest(const f32x16& values) { return octavo::OCTAVO_VARIANT::largest(values); }

}  // namespace octavo::OCTAVO_VARIANT::exact
