// Keys and values of 8 bits, and sums of their products with other whole numbers, which no order of adding changes. A key's
// elements are kept plus 128, in groups of 32 with a scale each; a value's as they are, with one scale. A query is rounded to
// 16 bits of its largest element: 8 would add as much error as the keys have. The weights of 64 values are rounded to 8 bits
// of their largest, which adds little.
#pragma once

#include "vector.h"

namespace octavo::OCTAVO_VARIANT {

// An element of a cache of 8 bits.
struct int8 {
  uint8_t bits;
};

// Elements of a key that share a scale.
constexpr int64_t kCodeGroup = 32;
constexpr float kMostCode = 127.0f;
// The largest element of a query, of which upper and lower byte are signed, and of a weight, which has no sign.
constexpr float kMostQuery = 127 * 256 + 127, kMostWeight = 255.0f;
// What is less counts for nothing: its inverse might be no number.
constexpr float kLeastScale = 1e-30f;

OCTAVO_INLINE constexpr int64_t code_groups(int64_t head_dim) { return (head_dim + kCodeGroup - 1) / kCodeGroup; }

// Bytes beside a head's codes, for its scales: of a key one bf16 for each group, of a value one float.
OCTAVO_INLINE constexpr int64_t scale_bytes(int64_t head_dim) { return (2 * code_groups(head_dim) + 3) / 4 * 4; }

// The nearest whole numbers, even ones of two; for numbers up to 2^22.
OCTAVO_INLINE i32x16 nearest(const f32x16& values) {
  const f32x16 shifted = values + 12582912.0f;  // 1.5 * 2^23
  return bits_as<i32x16>(shifted) - 0x4b400000;
}

// The larger of each lane, and what lanes add up to; of registers or numbers.
struct Larger {
  template <typename Lanes>
  OCTAVO_INLINE Lanes operator()(const Lanes& a, const Lanes& b) const {
#if defined(__AVX512F__)
    // GCC would compare, and then move.
    if constexpr (std::is_same_v<Lanes, i32x16>) return (Lanes)_mm512_max_epi32((__m512i)a, (__m512i)b);
#endif
    return select(a > b, a, b);
  }
};
struct Added {
  template <typename Lanes>
  OCTAVO_INLINE Lanes operator()(const Lanes& a, const Lanes& b) const {
    return a + b;
  }
};

// All lanes in one: combine(two registers or numbers) gives what they have in common.
template <typename Lanes, typename Combine>
OCTAVO_INLINE int32_t folded(const Lanes& values, Combine combine) {
  if constexpr (kIsTwo<Lanes>) {
    return folded(combine(values.low, values.high), combine);
  } else {
    int32_t lanes[kRegisterLanes];
    store_bytes(lanes, values);
    for (int width = kRegisterLanes / 2; width > 0; width /= 2)
      for (int lane = 0; lane < width; lane++) lanes[lane] = combine(lanes[lane], lanes[lane + width]);
    return lanes[0];
  }
}

OCTAVO_INLINE int32_t largest_size(const i32x16& values) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epi32((__m512i)values);
#else
  return folded(values, Larger{});
#endif
}

OCTAVO_INLINE int32_t added(const i32x16& values) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)values);
#else
  return folded(values, Added{});
#endif
}

OCTAVO_INLINE float from_bits(int32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Without its sign, as bits: their order is that of the numbers, and a NaN is the largest.
OCTAVO_INLINE i32x16 size_bits(const f32x16& values) { return bits_as<i32x16>(values) & 0x7fffffff; }

// The largest of `count` elements, a multiple of 16, without their signs; a NaN if there is one.
template <typename T>
OCTAVO_INLINE float peak(const T* from, int64_t count) {
  i32x16 sizes{};
  for (int64_t i = 0; i < count; i += kLanes) sizes = Larger{}(size_bits(load(from + i)), sizes);
  return from_bits(largest_size(sizes));
}

// At least `value`, not negative, in the upper half of a float's bits; infinite and NaN stay so.
OCTAVO_INLINE uint16_t bf16_above(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  if (value != value) return 0x7fc0;
  return uint16_t((bits + 0xffffu) >> 16);
}

// What is kept as codes: keys, without a sign, which queries are multiplied with; values, with one, for weights.
enum class Kept { kKeys, kValues };

// Products of bytes are added four at a time where there is an instruction for it, those with the upper and with the lower
// byte of a query apart. Elsewhere bytes are widened, and multiplied two at a time or one by one.
#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__))
#define OCTAVO_BYTE_DOTS 1
template <Kept kept>
constexpr int kDotSums = kept == Kept::kKeys ? 2 : 1;
#else
template <Kept kept>
constexpr int kDotSums = 1;
#endif

// Sixteen queries' or weights' elements take as many words: `word_at` is the place of the `which`th of `kWords` that hold
// those from 4 * `four` on.
#if defined(OCTAVO_BYTE_DOTS)
template <Kept kept>
constexpr int kWords = kDotSums<kept>;
OCTAVO_INLINE constexpr int64_t word_at(int64_t four, int64_t which) { return four / 4 * kLanes + which * 4 + four % 4; }
#else
#if defined(__SSE2__)
template <Kept kept>
constexpr int kWords = 2;
#else
template <Kept kept>
constexpr int kWords = 4;
#endif
OCTAVO_INLINE constexpr int64_t word_at(int64_t four, int64_t which) { return four * 4 + which; }
#endif

// Sixteen whole numbers as `add_dots` reads them beside `codes`.
template <Kept kept>
OCTAVO_INLINE void store_words(int32_t* to, const i32x16& numbers) {
#if defined(OCTAVO_BYTE_DOTS)
  if constexpr (kept == Kept::kKeys) {
    store_bytes(to, converted<u8x16>((numbers + 128) >> 8));
    to += 4;
  }
  store_bytes(to, converted<u8x16>(numbers));
#else
  store_bytes(to, numbers);
#if defined(__SSE2__)
  for (int four = 0; four < 4; four++) {
    int32_t* at = to + 4 * four;
    at[0] = (at[0] & 0xffff) | at[2] * 0x10000, at[1] = (at[1] & 0xffff) | at[3] * 0x10000;
  }
#endif
#endif
}

#if !defined(OCTAVO_BYTE_DOTS) && defined(__SSE2__)
// Sums of the products of two numbers of 16 bits in each lane.
OCTAVO_INLINE i32xr two_products(i32xr a, i32xr b) {
#if defined(__AVX512F__)
  return (i32xr)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (i32xr)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
  return (i32xr)_mm_madd_epi16((__m128i)a, (__m128i)b);
#endif
}

typedef int16_t i16xh __attribute__((vector_size(4 * kRegisterLanes)));
#endif

template <Kept kept, int rows, int columns>
struct DotSums {
  static constexpr int kSumsOfOne = kDotSums<kept>, kParts_ = columns * kParts;
  i32xr parts[kSumsOfOne][rows][kParts_];

  // Every sum of row r starts at starts[r].
  OCTAVO_INLINE void start(const int32_t* starts, int64_t stride) {
    each<rows>(OCTAVO_EACH(r) {
      each<kParts_>(OCTAVO_EACH(p) {
        parts[kSumsOfOne - 1][r][p] = i32xr{} + starts[r * stride];
        if constexpr (kSumsOfOne > 1) parts[0][r][p] = i32xr{};
      });
    });
  }

  OCTAVO_INLINE void clear() {
    each<kSumsOfOne>(OCTAVO_EACH(s) {
      each<rows>(OCTAVO_EACH(r) { each<kParts_>(OCTAVO_EACH(p) { parts[s][r][p] = i32xr{}; }); });
    });
  }

  template <int r, int p>
  OCTAVO_INLINE f32xr total() const {
    i32xr sum = parts[kSumsOfOne - 1][r][p];
    if constexpr (kSumsOfOne > 1) sum = sum + (parts[0][r][p] << 8);
    return __builtin_convertvector(sum, f32xr);
  }
};

// sums[r][c] += the products of four elements: `left(r)` gives the place of word `which` of the row's, `right(c)` sixteen
// lanes of four codes.
template <Kept kept, int rows, int columns, typename LeftAt, typename RightAt>
OCTAVO_INLINE void add_dots(DotSums<kept, rows, columns>& sums, LeftAt left, RightAt right) {
  constexpr int parts = columns * kParts;
  const auto right_part = [&](auto p) __attribute__((always_inline)) {
    return load_as<i32xr>(right(p / kParts) + p % kParts * kRegisterLanes * 4);
  };
#if defined(OCTAVO_BYTE_DOTS)
  i32xr b[parts];
  each<parts>(OCTAVO_EACH(p) { b[p] = right_part(p); });
  each<rows>(OCTAVO_EACH(r) {
    each<kWords<kept>>(OCTAVO_EACH(which) {
      const i32xr a = i32xr{} + *left(r, which);
      each<parts>(OCTAVO_EACH(p) {
        i32xr& sum = sums.parts[which][r][p];
        const i32xr first = kept == Kept::kValues ? a : b[p], second = kept == Kept::kValues ? b[p] : a;
#if defined(__AVX512VNNI__)
        sum = (i32xr)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)first, (__m512i)second);
#else
        sum = (i32xr)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)first, (__m256i)second);
#endif
      });
    });
  });
#elif defined(__SSE2__)
  each<parts>(OCTAVO_EACH(p) {
    const i32xr bytes = right_part(p);
    each<kWords<kept>>(OCTAVO_EACH(which) {
      i32xr two;
      if constexpr (kept == Kept::kKeys) {
        two = (which ? (i32xr)((u32xr)bytes >> 8) : bytes) & 0x00ff00ff;
      } else {
        two = (i32xr)((i16xh)(which ? bytes : bytes << 8) >> 8);
      }
      each<rows>(OCTAVO_EACH(r) {
        sums.parts[0][r][p] = sums.parts[0][r][p] + two_products(two, i32xr{} + *left(r, which));
      });
    });
  });
#else
  each<parts>(OCTAVO_EACH(p) {
    const i32xr bytes = right_part(p);
    each<kWords<kept>>(OCTAVO_EACH(which) {
      const i32xr shifted = bytes << (24 - 8 * which);
      const i32xr one = kept == Kept::kKeys ? (i32xr)((u32xr)shifted >> 24) : shifted >> 24;
      each<rows>(OCTAVO_EACH(r) { sums.parts[0][r][p] = sums.parts[0][r][p] + one * *left(r, which); });
    });
  });
#endif
}

}  // namespace octavo::OCTAVO_VARIANT
