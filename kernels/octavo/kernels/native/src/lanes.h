// Sixteen floats or integers at a time, in whole registers of the instruction set being compiled for: one of 512 bits, two
// of 256 or four of 128. (The compilers' own vectors of 512 bits would do for the first only: what is wider than a register
// lives in memory, and every operation on it loads and stores.)
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#ifndef OCTAVO_VARIANT
#error "OCTAVO_VARIANT names the instruction set that this file is compiled for"
#endif

#define OCTAVO_INLINE inline __attribute__((always_inline))
// A lambda [&](auto i) that leaves no call behind.
#define OCTAVO_EACH(i) [&](auto i) __attribute__((always_inline))

namespace octavo::OCTAVO_VARIANT {

constexpr int kLanes = 16;

// How many f32x16 of sums the registers hold beside what is multiplied.
#if defined(__AVX512F__)
constexpr int kSums = 24;
#elif defined(__AVX2__) || defined(__aarch64__)
constexpr int kSums = 6;
#else
constexpr int kSums = 3;
#endif

#if defined(__AVX512F__)
constexpr int kRegisterLanes = 16;
#elif defined(__AVX2__)
constexpr int kRegisterLanes = 8;
#else
constexpr int kRegisterLanes = 4;
#endif
// Registers of an f32x16.
constexpr int kParts = kLanes / kRegisterLanes;

typedef float f32xr __attribute__((vector_size(4 * kRegisterLanes)));
typedef int32_t i32xr __attribute__((vector_size(4 * kRegisterLanes)));
typedef uint32_t u32xr __attribute__((vector_size(4 * kRegisterLanes)));
typedef uint16_t u16xr __attribute__((vector_size(2 * kRegisterLanes)));
typedef uint8_t u8xl __attribute__((vector_size(kRegisterLanes)));

// Halves with names: an array in their place would be looked up in memory.
template <typename Half>
struct Two {
  Half low, high;
};

template <typename Register, int parts>
struct LanesOf {
  using Type = Two<typename LanesOf<Register, parts / 2>::Type>;
};

template <typename Register>
struct LanesOf<Register, 1> {
  using Type = Register;
};

using f32x16 = LanesOf<f32xr, kParts>::Type;
using i32x16 = LanesOf<i32xr, kParts>::Type;
using u32x16 = LanesOf<u32xr, kParts>::Type;
using u16x16 = LanesOf<u16xr, kParts>::Type;
using u8x16 = LanesOf<u8xl, kParts>::Type;

template <typename Lanes>
constexpr bool kIsTwo = false;
template <typename Half>
constexpr bool kIsTwo<Two<Half>> = true;

#define OCTAVO_LANEWISE(op)                                                                                             \
  template <typename Half, typename Other>                                                                              \
  OCTAVO_INLINE auto operator op(const Two<Half>& a, const Two<Other>& b)->Two<decltype(a.low op b.low)> {              \
    return {a.low op b.low, a.high op b.high};                                                                          \
  }                                                                                                                     \
  template <typename Half, typename Scalar, std::enable_if_t<std::is_arithmetic_v<Scalar>, int> = 0>                    \
  OCTAVO_INLINE auto operator op(const Two<Half>& a, Scalar b)->Two<decltype(a.low op b)> {                             \
    return {a.low op b, a.high op b};                                                                                   \
  }                                                                                                                     \
  template <typename Half, typename Scalar, std::enable_if_t<std::is_arithmetic_v<Scalar>, int> = 0>                    \
  OCTAVO_INLINE auto operator op(Scalar a, const Two<Half>& b)->Two<decltype(a op b.low)> {                             \
    return {a op b.low, a op b.high};                                                                                   \
  }

OCTAVO_LANEWISE(+)
OCTAVO_LANEWISE(-)
OCTAVO_LANEWISE(*)
OCTAVO_LANEWISE(/)
OCTAVO_LANEWISE(&)
OCTAVO_LANEWISE(|)
OCTAVO_LANEWISE(<<)
OCTAVO_LANEWISE(>>)
OCTAVO_LANEWISE(<)
OCTAVO_LANEWISE(<=)
OCTAVO_LANEWISE(>)
OCTAVO_LANEWISE(>=)
OCTAVO_LANEWISE(!=)
#undef OCTAVO_LANEWISE

template <typename Half>
OCTAVO_INLINE Two<Half> operator-(const Two<Half>& a) {
  return {-a.low, -a.high};
}

// The same bits as another type of as many lanes of the same size.
template <typename To, typename From>
OCTAVO_INLINE To bits_as(const From& from) {
  if constexpr (kIsTwo<From>) {
    using Half = decltype(To::low);
    return {bits_as<Half>(from.low), bits_as<Half>(from.high)};
  } else {
    return (To)from;
  }
}

// The same numbers as another type of as many lanes.
template <typename To, typename From>
OCTAVO_INLINE To converted(const From& from) {
  if constexpr (kIsTwo<From>) {
    using Half = decltype(To::low);
    return {converted<Half>(from.low), converted<Half>(from.high)};
  } else {
    return __builtin_convertvector(from, To);
  }
}

// Lane by lane `yes` where `mask` is set, else `no`.
template <typename Mask, typename Lanes>
OCTAVO_INLINE Lanes select(const Mask& mask, const Lanes& yes, const Lanes& no) {
  if constexpr (kIsTwo<Lanes>) {
    return {select(mask.low, yes.low, no.low), select(mask.high, yes.high, no.high)};
  } else {
    return mask ? yes : no;
  }
}

template <typename Lanes>
OCTAVO_INLINE Lanes load_as(const void* from) {
  Lanes lanes;
  if constexpr (kIsTwo<Lanes>) {
    using Half = decltype(lanes.low);
    lanes.low = load_as<Half>(from);
    lanes.high = load_as<Half>((const char*)from + sizeof(Half));
  } else {
    std::memcpy(&lanes, from, sizeof(lanes));
  }
  return lanes;
}

template <typename Lanes>
OCTAVO_INLINE void store_bytes(void* to, const Lanes& lanes) {
  if constexpr (kIsTwo<Lanes>) {
    store_bytes(to, lanes.low);
    store_bytes((char*)to + sizeof(lanes.low), lanes.high);
  } else {
    std::memcpy(to, &lanes, sizeof(lanes));
  }
}

// Every lane `value`.
template <typename Lanes>
OCTAVO_INLINE Lanes filled(float value) {
  if constexpr (kIsTwo<Lanes>) {
    using Half = decltype(Lanes::low);
    return {filled<Half>(value), filled<Half>(value)};
  } else {
    return value - Lanes{};  // No operation is left of it; of 0 + value there would be, for -0.
  }
}

OCTAVO_INLINE f32x16 broadcast(float value) { return filled<f32x16>(value); }

// The larger; `b` where one is a NaN.
template <typename Lanes>
OCTAVO_INLINE Lanes vmax(const Lanes& a, const Lanes& b) {
  if constexpr (kIsTwo<Lanes>) {
    return {vmax(a.low, b.low), vmax(a.high, b.high)};
  } else {
#if defined(__AVX512F__) || !defined(__x86_64__)
    return a > b ? a : b;
#elif defined(__AVX2__)
    return (Lanes)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return (Lanes)_mm_max_ps((__m128)a, (__m128)b);
#endif
  }
}

// a * b + c, rounded once where there is an instruction for it.
OCTAVO_INLINE f32xr multiply_add(f32xr a, f32xr b, f32xr c) {
#if defined(__AVX512F__)
  return (f32xr)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (f32xr)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

template <typename Function, int... i>
OCTAVO_INLINE void each_of(Function function, std::integer_sequence<int, i...>) {
  (function(std::integral_constant<int, i>{}), ...);
}

// Calls `function` with 0 to `count` - 1, each known to the compiler, so that what it indexes may stay in registers. Where
// nothing does (`known` is false), a loop is all that is compiled.
template <int count, bool known = true, typename Function>
OCTAVO_INLINE void each(Function function) {
  if constexpr (known) {
    each_of(function, std::make_integer_sequence<int, count>{});
  } else {
#pragma GCC unroll 1
    for (int i = 0; i < count; i++) function(i);
  }
}

}  // namespace octavo::OCTAVO_VARIANT
