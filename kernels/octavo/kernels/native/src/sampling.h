// What the choice of tokens takes of rows of logits.
#pragma once

#include <algorithm>
#include <limits>

#include "exact.h"
#include "types.h"

namespace octavo::OCTAVO_VARIANT {

// e^((logit - largest) / divisor) of at most kWeightSpan logits, none of which is above `largest`. Gives their sum.
OCTAVO_INLINE float weigh_span(const float* logits, float largest, float divisor, float* weights, int64_t size) {
  f32x16 sum{};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const f32x16 weight = exact::exp((load(logits + i) - broadcast(largest)) / broadcast(divisor));
    store(weights + i, weight);
    sum = sum + weight;
  }
  if (i < size) {
    float lanes[kLanes];
    std::fill(lanes, lanes + kLanes, -std::numeric_limits<float>::infinity());
    std::copy(logits + i, logits + size, lanes);
    const f32x16 weight = exact::exp((load(lanes) - broadcast(largest)) / broadcast(divisor));
    store(lanes, weight);
    std::copy(lanes, lanes + (size - i), weights + i);
    sum = sum + weight;
  }
  return exact::sum(sum);
}

// cap * tanh(logit / cap), in place.
OCTAVO_INLINE void softcap_span(float* logits, float cap, int64_t size) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes)
    store(logits + i, broadcast(cap) * exact::tanh(load(logits + i) / broadcast(cap)));
  if (i == size) return;
  float lanes[kLanes] = {};
  std::copy(logits + i, logits + size, lanes);
  store(lanes, broadcast(cap) * exact::tanh(load(lanes) / broadcast(cap)));
  std::copy(lanes, lanes + (size - i), logits + i);
}

}  // namespace octavo::OCTAVO_VARIANT
