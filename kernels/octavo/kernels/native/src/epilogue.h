// What follows a product, while its sums are in registers: bias, scale, adding to the output, activation(gate) * up.
#pragma once

#include "types.h"
#include "vector.h"

namespace octavo::OCTAVO_VARIANT {

// Output columns that lie side by side in a packed weight.
constexpr int kPanel = 32;
constexpr int kHalves = kPanel / kLanes;

template <typename Out>
OCTAVO_INLINE void put(Out* to, f32x16 values, int64_t left) {
  if (left >= kLanes) {
    store(to, values);
  } else {
    float lanes[kLanes];
    store(lanes, values);
    for (int lane = 0; lane < left; lane++) store_one(to + lane, lanes[lane]);
  }
}

template <typename T>
OCTAVO_INLINE f32x16 get(const T* from, int64_t left) {
  if (left >= kLanes) return load(from);
  float lanes[kLanes] = {};
  for (int lane = 0; lane < left; lane++) lanes[lane] = to_float(from[lane]);
  return load(lanes);
}

// One row's sums of one half panel, with what follows the product, into the output. `Activate` computes
// activate(activation, x), and says whether `kMultiply` is among what may follow.
template <typename T, typename Activate>
OCTAVO_INLINE void finish(const Linear& op, void* y, int64_t row, int64_t column, f32x16 sum, Activate activate) {
  const int64_t left = op.outputs - column;
  if (left <= 0) return;
  if (op.bias) sum = sum + load(op.bias + column);
  if (op.scale != 1.0f) sum = sum * op.scale;
  if (op.epilogue == kActivate) sum = activate(op.activation, sum);
  if (op.epilogue == kStoreFloat) {
    put((float*)y + row * op.y_stride + column, sum, left);
    return;
  }
  T* to = (T*)y + row * op.y_stride + column;
  if (op.epilogue == kAdd) sum = sum + get(to, left);
  if constexpr (Activate::kMultiplies)
    if (op.epilogue == kMultiply) sum = activate(op.activation, sum) * get(to, left);
  put(to, sum, left);
}

// Sums of one row and panel, with what follows the product, into the output.
template <typename T, typename Activate>
OCTAVO_INLINE void finish_panel(const Linear& op, void* y, int64_t row, int64_t column, f32x16 first, f32x16 second,
                                Activate activate) {
  if (op.epilogue != kGate) {
    finish<T>(op, y, row, column, first, activate);
    finish<T>(op, y, row, column + kLanes, second, activate);
    return;
  }
  // A panel holds 16 gates beside their 16 ups; biases likewise.
  if (op.bias) first = first + load(op.bias + column), second = second + load(op.bias + column + kLanes);
  const int64_t half = column / 2;
  put((T*)y + row * op.y_stride + half, activate(op.activation, first) * second, op.outputs / 2 - half);
}

}  // namespace octavo::OCTAVO_VARIANT
