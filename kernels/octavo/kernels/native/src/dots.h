// Sums of products of small integers, exact: unsigned codes of weights, a register of four inputs by as many outputs as it
// has lanes, times the signed ones of a row, whose four are in every lane.
#pragma once

#include "lanes.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace octavo::OCTAVO_VARIANT {

typedef uint8_t u8xr __attribute__((vector_size(4 * kRegisterLanes)));
typedef int8_t i8xr __attribute__((vector_size(4 * kRegisterLanes)));
typedef uint16_t u16xb __attribute__((vector_size(4 * kRegisterLanes)));
typedef int16_t i16xr __attribute__((vector_size(4 * kRegisterLanes)));

// Every lane `value`.
OCTAVO_INLINE i32xr in_all_lanes(int32_t value) {
#if defined(__AVX512F__)
  return (i32xr)_mm512_set1_epi32(value);
#elif defined(__AVX2__)
  return (i32xr)_mm256_set1_epi32(value);
#else
  return i32xr{} + value;
#endif
}

// Every lane the four bytes at `from`.
OCTAVO_INLINE i8xr spread(const int8_t* from) {
  int32_t four;
  std::memcpy(&four, from, sizeof(four));
  return (i8xr)in_all_lanes(four);
}

// Bits moved within each byte: what comes from the neighbour must be masked out.
template <int by>
OCTAVO_INLINE u8xr moved_up(u8xr bytes) {
  return by >= 0 ? (u8xr)((u16xb)bytes << (by >= 0 ? by : 0)) : (u8xr)((u16xb)bytes >> (by >= 0 ? 0 : -by));
}

// table[i] for each byte i below 16.
OCTAVO_INLINE u8xr looked_up(const uint8_t* table, u8xr indices) {
#if defined(__AVX512BW__)
  const __m512i all = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table));
  return (u8xr)_mm512_shuffle_epi8(all, (__m512i)indices);
#elif defined(__AVX2__)
  const __m256i all = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
  return (u8xr)_mm256_shuffle_epi8(all, (__m256i)indices);
#elif defined(__aarch64__)
  return (u8xr)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)indices);
#else
  uint8_t bytes[sizeof(indices)];
  store_bytes(bytes, indices);
#pragma GCC unroll 1
  for (size_t i = 0; i < sizeof(bytes); i++) bytes[i] = table[bytes[i]];
  return load_as<u8xr>(bytes);
#endif
}

// What is added to `sum` until here is added before what follows: compilers would take all products first, where they may
// change the order, and sixteen registers do not hold them.
#if defined(__AVX512F__)
#define OCTAVO_IN_TURN(sum)
#else
#define OCTAVO_IN_TURN(sum) asm("" : "+x"(sum))
#endif

// One row's sums over the steps of a group or of half of one. Codes have `bits` bits; of 8 they stand for 128 less, so
// that instructions for signed ones serve. Otherwise sums begin with what their offset takes away, or, `kStartsLast`, end
// with it.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)

// Whether codes of any bits are multiplied by the same instructions.
constexpr bool kDotsAlike = true;

template <int bits>
struct Dots {
  static constexpr bool kOffset = true, kStartsLast = false;
  using Codes = u8xr;
  i32xr total;

  OCTAVO_INLINE static Codes prepared(u8xr codes) { return codes; }
  OCTAVO_INLINE void begin(i32xr start) { total = start; }
  template <int step>
  OCTAVO_INLINE void add(const Codes& codes, i8xr x) {
#if defined(__AVX512VNNI__)
    total = (i32xr)_mm512_dpbusd_epi32((__m512i)total, (__m512i)codes, (__m512i)x);
#else
    total = (i32xr)_mm256_dpbusd_avx_epi32((__m256i)total, (__m256i)codes, (__m256i)x);
#endif
  }
  OCTAVO_INLINE i32xr end() const { return total; }
};

#elif defined(__AVX2__)

constexpr bool kDotsAlike = false;

// Products of neighbours, added in 16 bits; those added in 32.
#if defined(__AVX512BW__)
OCTAVO_INLINE i16xr pairs(u8xr a, i8xr b) { return (i16xr)_mm512_maddubs_epi16((__m512i)a, (__m512i)b); }
OCTAVO_INLINE i32xr pairs_added(i16xr a) { return (i32xr)_mm512_madd_epi16((__m512i)a, _mm512_set1_epi16(1)); }
#else
OCTAVO_INLINE i16xr pairs(u8xr a, i8xr b) { return (i16xr)_mm256_maddubs_epi16((__m256i)a, (__m256i)b); }
OCTAVO_INLINE i32xr pairs_added(i16xr a) { return (i32xr)_mm256_madd_epi16((__m256i)a, _mm256_set1_epi16(1)); }
#endif

template <int bits>
struct Dots {
  // Sixteen registers hold these sums of pairs, and little else until the end.
  static constexpr bool kOffset = true, kStartsLast = kRegisterLanes < kLanes;
  // Steps whose sums of pairs 16 bits hold.
  static constexpr int kHeld = 32767 / (((1 << bits) - 1) * 127 * 2);
  using Codes = u8xr;
  i32xr total;
  i16xr part;

  OCTAVO_INLINE static Codes prepared(u8xr codes) { return codes; }
  OCTAVO_INLINE void begin(i32xr start) { total = start; }
  template <int step>
  OCTAVO_INLINE void add(const Codes& codes, i8xr x) {
    if constexpr (step % kHeld == 0) {
      if constexpr (step > 0) total = total + pairs_added(part);
      part = pairs(codes, x);
    } else {
      part = part + pairs(codes, x);
    }
    OCTAVO_IN_TURN(part);
  }
  OCTAVO_INLINE i32xr end() const { return total + pairs_added(part); }
};

// Codes may be too large for sums of two: their sign goes to the row's.
template <>
struct Dots<8> {
  static constexpr bool kOffset = false, kStartsLast = false;
  struct Codes {
    i8xr values;
    u8xr sizes;
#if defined(__AVX512BW__)
    __mmask64 negative;
#endif
  };
  i32xr total;

  OCTAVO_INLINE static Codes prepared(u8xr codes) {
    const i8xr values = (i8xr)(codes ^ 0x80);
#if defined(__AVX512BW__)
    return {values, (u8xr)_mm512_abs_epi8((__m512i)values), _mm512_movepi8_mask((__m512i)values)};
#else
    return {values, (u8xr)_mm256_abs_epi8((__m256i)values)};
#endif
  }
  OCTAVO_INLINE void begin(i32xr start) { total = start; }
  template <int step>
  OCTAVO_INLINE void add(const Codes& codes, i8xr x) {
#if defined(__AVX512BW__)
    x = (i8xr)_mm512_mask_sub_epi8((__m512i)x, codes.negative, _mm512_setzero_si512(), (__m512i)x);
#else
    x = (i8xr)_mm256_sign_epi8((__m256i)x, (__m256i)codes.values);
#endif
    total = total + pairs_added(pairs(codes.sizes, x));
    OCTAVO_IN_TURN(total);
  }
  OCTAVO_INLINE i32xr end() const { return total; }
};

#else

constexpr bool kDotsAlike = false;

#if defined(__SSE2__)
// Four bytes of each lane as 16 bits, of the first two lanes and of the last two.
OCTAVO_INLINE i32xr four_products(i8xr codes, i8xr x) {
  const __m128i zero = _mm_setzero_si128(), wide = _mm_srai_epi16(_mm_unpacklo_epi8(zero, (__m128i)x), 8);
  const __m128i low = _mm_madd_epi16(_mm_srai_epi16(_mm_unpacklo_epi8(zero, (__m128i)codes), 8), wide);
  const __m128i high = _mm_madd_epi16(_mm_srai_epi16(_mm_unpackhi_epi8(zero, (__m128i)codes), 8), wide);
  const __m128 even = _mm_shuffle_ps((__m128)low, (__m128)high, 0x88), odd = _mm_shuffle_ps((__m128)low, (__m128)high, 0xdd);
  return (i32xr)_mm_add_epi32((__m128i)even, (__m128i)odd);
}
#elif defined(__aarch64__)
OCTAVO_INLINE i32xr four_products(i8xr codes, i8xr x) {
  const int16x8_t low = vmull_s8(vget_low_s8((int8x16_t)codes), vget_low_s8((int8x16_t)x));
  const int16x8_t high = vmull_high_s8((int8x16_t)codes, (int8x16_t)x);
  return (i32xr)vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high));
}
#else
OCTAVO_INLINE i32xr four_products(i8xr codes, i8xr x) {
  i32xr sums{};
  for (int lane = 0; lane < kRegisterLanes; lane++)
    for (int i = 0; i < 4; i++) sums[lane] += int32_t(codes[4 * lane + i]) * x[4 * lane + i];
  return sums;
}
#endif

template <int bits>
struct Dots {
  static constexpr bool kOffset = bits < 8, kStartsLast = false;
  using Codes = i8xr;
  i32xr total;

  OCTAVO_INLINE static Codes prepared(u8xr codes) { return (i8xr)(bits < 8 ? codes : codes ^ 0x80); }
  OCTAVO_INLINE void begin(i32xr start) { total = start; }
  template <int step>
  OCTAVO_INLINE void add(const Codes& codes, i8xr x) {
#if defined(__ARM_FEATURE_DOTPROD)
    total = (i32xr)vdotq_s32((int32x4_t)total, (int8x16_t)codes, (int8x16_t)x);
#else
    total = total + four_products(codes, x);
#endif
  }
  OCTAVO_INLINE i32xr end() const { return total; }
};

#endif

}  // namespace octavo::OCTAVO_VARIANT
