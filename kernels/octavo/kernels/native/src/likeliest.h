// The largest of a row and its place, as greedy decoding wants it.
#pragma once

#include "vector.h"

namespace octavo::OCTAVO_VARIANT {

// Of equal ones the first; a NaN counts as the largest of all.
OCTAVO_INLINE int64_t likeliest(const float* row, int64_t size) {
  f32x16 peak = broadcast(-__builtin_inff()), broken{};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const f32x16 values = load(row + i);
    peak = vmax(values, peak);
    broken = broken + (values - values);  // NaN for NaN; for an infinity too, which is looked for in its turn.
  }
  float best = largest(peak);
  for (int64_t j = i; j < size; j++) best = row[j] > best ? row[j] : best;
  if (sum(broken) != 0.0f || sum(broken) != sum(broken))
    for (int64_t j = 0; j < size; j++)
      if (row[j] != row[j]) return j;
  for (int64_t j = i; j < size; j++)
    if (row[j] != row[j]) return j;
  for (int64_t j = 0; j < size; j++)
    if (row[j] == best) return j;
  return 0;
}

}  // namespace octavo::OCTAVO_VARIANT
