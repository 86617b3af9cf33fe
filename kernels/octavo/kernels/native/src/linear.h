// y = x W^T + b with weights packed once: for one row as for hundreds, each output is one sum over the inputs in their
// order, so a row's result does not depend on the rows beside it.
#pragma once

#include "types.h"
#include "vector.h"

namespace octavo::OCTAVO_VARIANT {

// Output columns that lie side by side in a packed weight: two registers of sums per row.
constexpr int kPanel = 32;
// Most rows of x that one pass over a panel serves.
constexpr int kMaxRows = kSums / 2;

OCTAVO_INLINE f32x16 activate(int activation, f32x16 x) {
  if (activation == kSilu) return x * sigmoid(x);
  // GELU, its tanh form.
  const f32x16 inner = 0.7978845608f * (x + 0.044715f * x * x * x);
  return 0.5f * x * (1.0f + tanh(inner));
}

// `rows` x `panels` panels of sums over all inputs, each in its own register.
template <typename T, int rows, int panels>
OCTAVO_INLINE void multiply(const T* x, int64_t x_stride, const T* packed, int64_t panel_size, int64_t inputs,
                            f32x16 (&sums)[rows][2 * panels]) {
  constexpr int depth = Step<T>::kDepth;
  for (int row = 0; row < rows; row++)
    for (int half = 0; half < 2 * panels; half++) sums[row][half] = f32x16{};
  for (int64_t k = 0; k < inputs; k += depth) {
    const T* w = packed + k * kPanel;
#pragma GCC unroll 4
    for (int panel = 0; panel < panels; panel++) __builtin_prefetch((const char*)(w + panel * panel_size) + 2048, 0, 1);
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++) {
      const auto a = Step<T>::operand(x + row * x_stride + k);
#pragma GCC unroll 8
      for (int half = 0; half < 2 * panels; half++) {
        const T* b = w + (half / 2) * panel_size + (half % 2) * kLanes * depth;
        sums[row][half] = Step<T>::add(sums[row][half], a, b);
      }
    }
  }
}

template <typename Out>
OCTAVO_INLINE void put(Out* to, f32x16 values, int64_t left) {
  if (left >= kLanes) {
    store(to, values);
  } else {
    for (int lane = 0; lane < left; lane++) store_one(to + lane, values[lane]);
  }
}

template <typename T>
OCTAVO_INLINE f32x16 get(const T* from, int64_t left) {
  if (left >= kLanes) return load(from);
  f32x16 values{};
  for (int lane = 0; lane < left; lane++) values[lane] = to_float(from[lane]);
  return values;
}

// One row's sums of one half panel, with what follows the product, into the output.
template <typename T>
OCTAVO_INLINE void finish(const Linear& op, void* y, int64_t row, int64_t column, f32x16 sum) {
  const int64_t left = op.outputs - column;
  if (left <= 0) return;
  if (op.bias) sum = sum + load(op.bias + column);
  if (op.scale != 1.0f) sum = sum * op.scale;
  if (op.epilogue == kStoreFloat) {
    put((float*)y + row * op.y_stride + column, sum, left);
    return;
  }
  T* to = (T*)y + row * op.y_stride + column;
  if (op.epilogue == kAdd) sum = sum + get(to, left);
  put(to, sum, left);
}

template <typename T, int rows, int panels>
OCTAVO_INLINE void tile(const Linear& op, const T* x, void* y, int64_t row, int64_t panel) {
  f32x16 sums[rows][2 * panels];
  const int64_t panel_size = op.inputs * kPanel;
  multiply<T, rows, panels>(x + row * op.x_stride, op.x_stride, (const T*)op.weight + panel * panel_size, panel_size,
                            op.inputs, sums);
  for (int r = 0; r < rows; r++) {
    for (int p = 0; p < panels; p++) {
      const int64_t column = (panel + p) * kPanel;
      if (op.epilogue == kGate) {
        // A panel holds 16 gates beside their 16 ups; biases likewise.
        f32x16 gate = sums[r][2 * p], up = sums[r][2 * p + 1];
        if (op.bias) gate = gate + load(op.bias + column), up = up + load(op.bias + column + kLanes);
        const int64_t half = column / 2;
        put((T*)y + (row + r) * op.y_stride + half, activate(op.activation, gate) * up, op.outputs / 2 - half);
      } else {
        finish<T>(op, y, row + r, column, sums[r][2 * p]);
        finish<T>(op, y, row + r, column + kLanes, sums[r][2 * p + 1]);
      }
    }
  }
}

// All rows for the panels from `first` to `last`, at most `kMaxRows` rows and `panels` panels at a time.
template <typename T, int rows, int panels>
void some_panels(const Linear& op, const T* x, void* y, int64_t row, int64_t first, int64_t last) {
  int64_t panel = first;
  for (; panel + panels <= last; panel += panels) tile<T, rows, panels>(op, x, y, row, panel);
  for (; panel < last; panel++) tile<T, rows, 1>(op, x, y, row, panel);
}

template <typename T, int rows>
void rows_of(const Linear& op, const T* x, void* y, int64_t row, int64_t first, int64_t last) {
  constexpr int fitting = kMaxRows / rows;
  constexpr int panels = fitting >= 4 ? 4 : fitting >= 2 ? 2 : 1;
  some_panels<T, rows, panels>(op, x, y, row, first, last);
}

template <typename T>
using RowsFunction = void (*)(const Linear&, const T*, void*, int64_t, int64_t, int64_t);

template <typename T, size_t... counts>
constexpr auto rows_functions(std::index_sequence<counts...>) {
  return std::array<RowsFunction<T>, sizeof...(counts)>{rows_of<T, int(counts) + 1>...};
}

// The panels from `first` to `last` for all `tokens` rows. A panel stays in the cache while the rows pass by.
template <typename T>
void linear(const Linear& op, const void* x, void* y, int64_t tokens, int64_t first, int64_t last) {
  static constexpr auto functions = rows_functions<T>(std::make_index_sequence<kMaxRows>{});
  const int64_t passes = (tokens + kMaxRows - 1) / kMaxRows;
  const int64_t step = passes > 1 ? 1 : last - first;
  for (int64_t panel = first; panel < last; panel += step) {
    for (int64_t pass = 0; pass < passes; pass++) {
      const int64_t row = pass * tokens / passes, end = (pass + 1) * tokens / passes;
      functions[end - row - 1](op, (const T*)x, y, row, panel, panel + step);
    }
  }
}

}  // namespace octavo::OCTAVO_VARIANT
