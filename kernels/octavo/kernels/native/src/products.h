// Sums of products in registers: what weights, keys and values have in common. Each sum takes its products one after the
// other, in the same order for one row as for many.
#pragma once

#include "vector.h"

namespace octavo::OCTAVO_VARIANT {

// Products that a sum takes at once of what lies in memory: of bf16 two, which share a lane.
template <typename T>
constexpr int kDepth = std::is_same_v<T, bf16> ? 2 : 1;

// Elements of keys and values that share a lane of 32 bits.
template <typename T>
constexpr int kShared = sizeof(T) == 1 ? 4 : kDepth<T>;

// A loop over products. Where registers are few it is a function of its own: compilers share them out by the function, and
// take them from the loop for what stands around it.
#if defined(__AVX512F__)
#define OCTAVO_LOOP OCTAVO_INLINE
#else
#define OCTAVO_LOOP __attribute__((noinline))
#endif

// What the left side, whose elements are broadcast, is read as. Only one instruction multiplies bf16 itself; for all others
// the left side is made floats once instead of each time that it is read.
#if defined(__AVX512BF16__)
template <typename T>
using Left = T;
#else
template <typename T>
using Left = float;
#endif

template <typename T>
constexpr bool kWidens = !std::is_same_v<Left<T>, T>;

// Sums that registers hold beside what is multiplied: pairs that are taken apart on the way want some themselves.
template <typename T>
constexpr int kHeld = kParts > 1 && kWidens<T> ? kSums * 2 / 3 : kSums;

// A float's nearest bf16 as the left side reads it.
OCTAVO_INLINE void store_rounded(bf16*, bf16* to, const f32x16& values) { store(to, values); }
OCTAVO_INLINE void store_rounded(float*, float* to, const f32x16& values) { store(to, values); }
OCTAVO_INLINE void store_rounded(bf16*, float* to, const f32x16& values) {
  store(to, bits_as<f32x16>(rounded_to_bf16(values) & 0xffff0000u));
}

// `count` elements, a multiple of 16, as the left side reads them beside `Right`.
template <typename Right, typename T, typename To>
OCTAVO_INLINE void round_left(const T* from, To* to, int64_t count) {
  if constexpr (std::is_same_v<T, To> && std::is_same_v<T, Right>) {
    std::memcpy(to, from, count * sizeof(T));
  } else {
    for (int64_t i = 0; i < count; i += kLanes) store_rounded((Right*)nullptr, to + i, load(from + i));
  }
}

// `count` elements as the left side reads them.
template <typename T>
OCTAVO_INLINE void copy_left(const T* from, T* to, int64_t count) {
  std::memcpy(to, from, count * sizeof(T));
}

OCTAVO_INLINE void copy_left(const bf16* from, float* to, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, load(from + i));
  for (; i < count; i++) to[i] = to_float(from[i]);
}

template <int rows, int columns>
struct Sums {
  f32xr parts[rows][columns * kParts];

  OCTAVO_INLINE void clear() {
    each<rows>(OCTAVO_EACH(r) { each<columns * kParts>(OCTAVO_EACH(p) { parts[r][p] = f32xr{}; }); });
  }

  OCTAVO_INLINE void load(const float* from, int64_t stride) {
    each<rows>(OCTAVO_EACH(r) {
      each<columns * kParts>(OCTAVO_EACH(p) { parts[r][p] = load_as<f32xr>(from + r * stride + p * kRegisterLanes); });
    });
  }

  OCTAVO_INLINE void scale(const float* factors) {
    each<rows>(OCTAVO_EACH(r) {
      each<columns * kParts>(OCTAVO_EACH(p) { parts[r][p] = parts[r][p] * factors[r]; });
    });
  }

  OCTAVO_INLINE void store(float* to, int64_t stride) const {
    each<rows>(OCTAVO_EACH(r) {
      each<columns * kParts>(OCTAVO_EACH(p) { store_bytes(to + r * stride + p * kRegisterLanes, parts[r][p]); });
    });
  }
};

// Of a pair of bf16 in each lane the first or the second as a float; of floats themselves.
template <int which>
OCTAVO_INLINE f32xr part_of(const float* from) {
  return load_as<f32xr>(from);
}

template <int which>
OCTAVO_INLINE f32xr part_of(const bf16* from) {
  const u32xr pairs = load_as<u32xr>(from);
  return which ? (f32xr)(pairs & 0xffff0000u) : (f32xr)(pairs << 16);
}

// a * b + c. A product of bf16 is exact, so that it does not show whether it was rounded; one of floats must be rounded
// everywhere or nowhere.
template <typename T>
OCTAVO_INLINE f32xr add_product(f32xr a, f32xr b, f32xr c) {
#if defined(OCTAVO_EXACT)
  if constexpr (std::is_same_v<T, float>) return a * b + c;
#endif
  return multiply_add(a, b, c);
}

// sums[r][c] += left(r)[k] * right(c)[k] for one step of `kDepth` elements k. `left(r)` points to the row's, `right(c)` to
// sixteen lanes of them.
template <typename T, int rows, int columns, typename LeftAt, typename RightAt>
OCTAVO_INLINE void add_products(Sums<rows, columns>& sums, LeftAt left, RightAt right) {
#if defined(__AVX512BF16__)
  if constexpr (std::is_same_v<decltype(left(0)), const bf16*>) {
    each<rows>(OCTAVO_EACH(r) {
      int32_t pair;
      std::memcpy(&pair, left(r), sizeof(pair));
      const __m512i a = _mm512_set1_epi32(pair);
      each<columns>(OCTAVO_EACH(c) {
        sums.parts[r][c] = (f32xr)_mm512_dpbf16_ps((__m512)sums.parts[r][c], (__m512bh)a,
                                                   (__m512bh)_mm512_loadu_si512(right(c)));
      });
    });
    return;
  }
#endif
  constexpr int parts = columns * kParts;
  each<kDepth<T>>(OCTAVO_EACH(k) {
    // The second of pairs is read again: kept from the first, it would take registers that there are not.
    if constexpr (k > 0 && kParts > 1) asm volatile("" ::: "memory");
    const auto part = [&](auto p) __attribute__((always_inline)) {
      return part_of<k>(right(p / kParts) + p % kParts * kRegisterLanes * kDepth<T>);
    };
    // The outer loop's operands come and go one by one; the inner one's stay in registers meanwhile.
    if constexpr (kParts == 1 || rows >= parts) {
      f32xr b[parts];
      each<parts>(OCTAVO_EACH(p) { b[p] = part(p); });
      each<rows>(OCTAVO_EACH(r) {
        const f32xr a = filled<f32xr>(to_float(left(r)[k]));
        each<parts>(OCTAVO_EACH(p) { sums.parts[r][p] = add_product<T>(a, b[p], sums.parts[r][p]); });
      });
    } else {
      f32xr a[rows];
      each<rows>(OCTAVO_EACH(r) { a[r] = filled<f32xr>(to_float(left(r)[k])); });
      each<parts>(OCTAVO_EACH(p) {
        const f32xr b = part(p);
        each<rows>(OCTAVO_EACH(r) { sums.parts[r][p] = add_product<T>(a[r], b, sums.parts[r][p]); });
      });
    }
  });
}

}  // namespace octavo::OCTAVO_VARIANT
