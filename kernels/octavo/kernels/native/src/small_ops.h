// What stands between the products of a layer: norms and rotary embedding, row by row.
#pragma once

#include <cmath>

#include "cache.h"
#include "types.h"
#include "vector.h"

namespace octavo::OCTAVO_VARIANT {

template <typename T>
OCTAVO_INLINE float inverse_rms(const T* x, int64_t size, float eps) {
  f32x16 squares{};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const f32x16 values = load(x + i);
    squares = squares + values * values;
  }
  float total = sum(squares);
  for (; i < size; i++) total += to_float(x[i]) * to_float(x[i]);
  return 1.0f / std::sqrt(total / float(size) + eps);
}

template <typename T>
OCTAVO_INLINE void rms_norm(const T* x, T* y, const float* weight, int64_t size, float eps) {
  const float factor = inverse_rms(x, size, eps);
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) store(y + i, load(x + i) * factor * load(weight + i));
  for (; i < size; i++) store_one(y + i, to_float(x[i]) * factor * weight[i]);
}

template <typename T>
OCTAVO_INLINE void add_rms_norm(const T* x, T* y, const float* weight, int64_t size, float eps, float scale) {
  const float factor = inverse_rms(x, size, eps) * scale;
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) store(y + i, load(y + i) + load(x + i) * factor * load(weight + i));
  for (; i < size; i++) store_one(y + i, to_float(y[i]) + to_float(x[i]) * factor * weight[i]);
}

template <typename T>
OCTAVO_INLINE void layer_norm(const T* x, T* y, const Norm& op) {
  const int64_t size = op.size;
  f32x16 sums{};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) sums = sums + load(x + i);
  float total = sum(sums);
  for (; i < size; i++) total += to_float(x[i]);
  const float mean = total / float(size);
  f32x16 squares{};
  for (i = 0; i + kLanes <= size; i += kLanes) {
    const f32x16 values = load(x + i) - mean;
    squares = squares + values * values;
  }
  float spread = sum(squares);
  for (; i < size; i++) spread += (to_float(x[i]) - mean) * (to_float(x[i]) - mean);
  const float factor = 1.0f / std::sqrt(spread / float(size) + op.eps);
  for (i = 0; i + kLanes <= size; i += kLanes) {
    const f32x16 values = (load(x + i) - mean) * factor * load(op.weight + i);
    store(y + i, op.bias ? values + load(op.bias + i) : values);
  }
  for (; i < size; i++) {
    const float value = (to_float(x[i]) - mean) * factor * op.weight[i];
    store_one(y + i, op.bias ? value + op.bias[i] : value);
  }
}

template <typename T>
void norm_rows(const Norm& op, const void* x, void* y, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; row++) {
    const T* from = (const T*)x + row * op.x_stride;
    T* to = (T*)y + row * op.y_stride;
    if (op.centred) {
      layer_norm(from, to, op);
    } else if (op.epilogue == kAdd) {
      add_rms_norm(from, to, op.weight, op.size, op.eps, op.scale);
    } else {
      rms_norm(from, to, op.weight, op.size, op.eps);
    }
  }
}

template <typename T>
OCTAVO_INLINE void rotate(T* head, const float* cos, const float* sin, int64_t half) {
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const f32x16 a = load(head + i), b = load(head + half + i), c = load(cos + i), s = load(sin + i);
    store(head + i, a * c - b * s);
    store(head + half + i, b * c + a * s);
  }
  for (; i < half; i++) {
    const float a = to_float(head[i]), b = to_float(head[half + i]);
    store_one(head + i, a * cos[i] - b * sin[i]);
    store_one(head + half + i, b * cos[i] + a * sin[i]);
  }
}

// Norms and rotation of one row's queries and keys.
template <typename T>
OCTAVO_INLINE void rope_row(const RopeWrite& op, T* heads, int64_t position) {
  const int64_t half = op.rotary_dim / 2, d = op.head_dim;
  if (!op.query_norm && !op.key_norm && !op.cos) return;
  for (int64_t head = 0; head < op.query_heads + op.kv_heads; head++) {
    T* at = heads + head * d;
    const float* norm = head < op.query_heads ? op.query_norm : op.key_norm;
    if (norm) rms_norm(at, at, norm, d, op.eps);
    if (op.cos) rotate(at, op.cos + position * half, op.sin + position * half, half);
  }
}

template <typename T>
void rope_write_rows(const RopeWrite& op, void* x, const int64_t* positions, const GroupStep& step,
                     const LayerCache& cache, int64_t first, int64_t last) {
  const int64_t d = op.head_dim;
  for (int64_t row = first; row < last;) {
    T* heads = (T*)x + row * op.x_stride;
    const T* key = heads + op.query_heads * d;
    if (cache.dtype == kTypeOf<T> && fill_tile(step.slots + row, last - row)) {
      for (int i = 0; i < kLanes; i++) rope_row(op, heads + i * op.x_stride, positions[row + i]);
      write_tile(key, key + op.kv_heads * d, op.x_stride, cache, step.slots[row], step.block_size, op.kv_heads, d);
      row += kLanes;
      continue;
    }
    with_cache<T>(cache, [&](auto c) __attribute__((always_inline)) {
      prefetch_heads<decltype(c)>(cache, step.slots[row], step.block_size, op.kv_heads, d);
    });
    rope_row(op, heads, positions[row]);
    with_cache<T>(cache, [&](auto c) __attribute__((always_inline)) {
      write_heads<decltype(c)>(key, key + op.kv_heads * d, cache, step.slots[row], step.block_size, op.kv_heads, d);
    });
    row++;
  }
}

}  // namespace octavo::OCTAVO_VARIANT
