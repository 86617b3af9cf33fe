// The largest of a row and its place, as greedy decoding wants it.
#pragma once

#include <algorithm>

#include "vector.h"

namespace octavo::OCTAVO_VARIANT {

// The first place from `begin` to `end` with `value`, or with a NaN if that is one.
OCTAVO_INLINE int64_t find(const float* row, int64_t begin, int64_t end, float value) {
  for (int64_t i = begin; i < end; i++)
    if (row[i] == value || (row[i] != row[i] && value != value)) return i;
  return begin;
}

// The largest of `count` values; a NaN if there is one.
OCTAVO_INLINE float peak_of(const float* values, int64_t count) {
  f32x16 peak = broadcast(-__builtin_inff());
  i32x16 broken{};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const f32x16 some = load(values + i);
    peak = vmax(some, peak);
    broken = broken | (some != some);
  }
  float best = largest(peak);
  int32_t lanes[kLanes];
  store_bytes(lanes, broken);
  for (int32_t lane : lanes)
    if (lane) return __builtin_nanf("");
  for (; i < count; i++) {
    if (values[i] != values[i]) return values[i];
    best = std::max(best, values[i]);
  }
  return best;
}

// Of equal ones the first; a NaN counts as the largest of all.
OCTAVO_INLINE int64_t argmax(const float* row, int64_t size) {
  constexpr int64_t kSpan = 1024;
  float best = -__builtin_inff();
  int64_t place = 0;
  for (int64_t begin = 0; begin < size; begin += kSpan) {
    const int64_t end = std::min(begin + kSpan, size);
    const float peak = peak_of(row + begin, end - begin);
    if (peak != peak) return find(row, begin, end, peak);
    if (peak > best) best = peak, place = begin;
  }
  return find(row, place, std::min(place + kSpan, size), best);
}

}  // namespace octavo::OCTAVO_VARIANT
