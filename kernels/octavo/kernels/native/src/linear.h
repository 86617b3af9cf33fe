// y = x W^T + b with weights packed once: for one row as for hundreds, each output is one sum over the inputs in their
// order, so a row's result does not depend on the rows beside it.
#pragma once

#include <algorithm>

#include "epilogue.h"
#include "products.h"
#include "types.h"
#if defined(__AMX_BF16__)
#include "tiles.h"
#endif

namespace octavo::OCTAVO_VARIANT {

// Most rows of x that one pass over a panel serves: with 512 bits a whole panel at a time, else half of one.
template <typename T>
constexpr int kMaxRows = kParts == 1 ? kSums / 2 : kHeld<T>;
// Inputs that are multiplied before the next columns' turn: those of all rows stay in the cache meanwhile.
constexpr int kInputs = 256;

struct Activate {
  static constexpr bool kMultiplies = false;

  OCTAVO_INLINE f32x16 operator()(int activation, f32x16 x) const {
    if (activation == kSilu) return x * sigmoid(x);
    if (activation == kGelu) return gelu(x);
    // GELU, its tanh form.
    const f32x16 inner = 0.7978845608f * (x + 0.044715f * x * x * x);
    return 0.5f * x * (1.0f + tanh(inner));
  }
};

// Adds the products of `inputs` elements of each row to the sums at `to`, rows of `to_stride`; where they are the `first`,
// what is there before does not count. Column c is in panel c / 2, `panel_size` after the one before; from one input to the
// next it is `pitch` columns.
template <typename T, int rows, int columns, int pitch, bool first = false>
OCTAVO_LOOP void multiply(const Left<T>* x, int64_t x_stride, const T* packed, int64_t panel_size, int64_t inputs,
                          float* to, int64_t to_stride) {
  constexpr int depth = kDepth<T>;
  Sums<rows, columns> sums;
  if constexpr (first) {
    sums.clear();
  } else {
    sums.load(to, to_stride);
  }
  for (int64_t k = 0; k < inputs; k += depth) {
    const T* w = packed + k * pitch;
    if constexpr (pitch == kPanel)
      each<(columns + 1) / kHalves>(OCTAVO_EACH(p) { __builtin_prefetch((const char*)(w + p * panel_size) + 2048, 0, 1); });
    add_products<T>(
        sums, OCTAVO_EACH(row) { return x + row * x_stride + k; },
        OCTAVO_EACH(column) { return w + (column / kHalves) * panel_size + (column % kHalves) * kLanes * depth; });
  }
  sums.store(to, to_stride);
}

// Asks for the lines that `rows` rows' outputs of some panels go to. Of many rows' none is in a near cache, and stores leave
// in their order: each would wait for the one before it.
template <typename T, int rows, int panels>
OCTAVO_INLINE void expect_outputs(const Linear& op, void* y, int64_t row, int64_t panel) {
  const int64_t size = op.epilogue == kStoreFloat ? sizeof(float) : sizeof(T);
  const int64_t width = op.epilogue == kGate ? kPanel / 2 : kPanel;
  const char* to = (const char*)y + (row * op.y_stride + panel * width) * size;
  for (int r = 0; r < rows; r++, to += op.y_stride * size)
    for (int64_t byte = 0; byte < panels * width * size; byte += 64) __builtin_prefetch(to + byte, 1, 3);
}

template <typename T, int rows, int panels>
OCTAVO_INLINE void tile(const Linear& op, const T* x, void* y, int64_t row, int64_t panel) {
  // Columns at a time whose sums fit into registers.
  constexpr int all = panels * kHalves, held = kHeld<T> / rows, columns = held < all ? held : all, stride = all * kLanes;
  // Where all do and no input is widened first, all inputs at once.
  constexpr bool whole = columns == all && !kWidens<T>;
  const int64_t some = whole ? op.inputs : kInputs;
  const int64_t panel_size = op.inputs * kPanel;
  alignas(64) float results[rows * stride];
  if constexpr (!whole) std::memset(results, 0, sizeof(results));
  alignas(64) float wide[kWidens<T> ? rows * kInputs : 1];
  expect_outputs<T, rows, panels>(op, y, row, panel);
  x += row * op.x_stride;
  for (int64_t first = 0; first < op.inputs; first += some) {
    const int64_t inputs = std::min(some, op.inputs - first);
    if constexpr (kWidens<T>)
      for (int r = 0; r < rows; r++) copy_left(x + r * op.x_stride + first, wide + r * kInputs, inputs);
    for (int column = 0; column < all; column += columns) {
      const T* packed = (const T*)op.weight + (panel + column / kHalves) * panel_size + first * kPanel +
                        (column % kHalves) * kLanes * kDepth<T>;
      const Left<T>* left;
      int64_t left_stride = kInputs;
      if constexpr (kWidens<T>) {
        left = wide;
      } else {
        left = x + first, left_stride = op.x_stride;
      }
      multiply<T, rows, columns, kPanel, whole>(left, left_stride, packed, panel_size, inputs, results + column * kLanes,
                                                stride);
    }
  }
  for (int r = 0; r < rows; r++)
    for (int p = 0; p < panels; p++) {
      const float* at = results + r * stride + p * kPanel;
      finish_panel<T>(op, y, row + r, (panel + p) * kPanel, load(at), load(at + kLanes), Activate{});
    }
}

// `rows` rows, at most `kMaxRows`, for the panels from `first` to `last`, `panels` at a time.
template <typename T, int rows, int panels>
void some_panels(const Linear& op, const T* x, void* y, int64_t row, int64_t first, int64_t last) {
  int64_t panel = first;
  for (; panel + panels <= last; panel += panels) tile<T, rows, panels>(op, x, y, row, panel);
  for (; panel < last; panel++) tile<T, rows, 1>(op, x, y, row, panel);
}

template <typename T, int rows>
void rows_of(const Linear& op, const T* x, void* y, int64_t row, int64_t first, int64_t last) {
  constexpr int fitting = kHeld<T> / kHalves / rows;
  constexpr int panels = fitting >= 4 ? 4 : fitting >= 2 ? 2 : 1;
  some_panels<T, rows, panels>(op, x, y, row, first, last);
}

template <typename T>
using RowsFunction = void (*)(const Linear&, const T*, void*, int64_t, int64_t, int64_t);

template <typename T, size_t... counts>
constexpr auto rows_functions(std::index_sequence<counts...>) {
  return std::array<RowsFunction<T>, sizeof...(counts)>{rows_of<T, int(counts) + 1>...};
}

#if !defined(__AVX512F__)
// Many rows where registers are few: so many inputs of one panel at a time as stay in the nearest cache, as floats, for all
// rows in turns, whose sums lie in memory meanwhile.
constexpr int kTileRows = kSums, kManyRows = 16 * kTileRows;

template <typename T>
struct ManyRows {
  alignas(64) float sums[kHalves][kManyRows * kLanes];
  alignas(64) float weights[kHalves][kInputs * kLanes];
  alignas(64) float x[kWidens<T> ? kManyRows * kInputs : 1];
};

// `inputs` rows of a panel as floats, its halves apart.
template <typename T>
OCTAVO_INLINE void unpack(const T* packed, int64_t inputs, float (*weights)[kInputs * kLanes]) {
  for (int64_t k = 0; k < inputs; k += kDepth<T>)
    each<kHalves>(OCTAVO_EACH(half) {
      each<kDepth<T>>(OCTAVO_EACH(which) {
        each<kParts>(OCTAVO_EACH(p) {
          constexpr int at = p * kRegisterLanes;
          store_bytes(weights[half] + (k + which) * kLanes + at,
                      part_of<which>(packed + k * kPanel + (half * kLanes + at) * kDepth<T>));
        });
      });
    });
}

using TileFunction = void (*)(const float*, int64_t, const float*, int64_t, int64_t, float*, int64_t);

template <size_t... counts>
constexpr auto tile_functions(std::index_sequence<counts...>) {
  return std::array<TileFunction, sizeof...(counts)>{multiply<float, int(counts) + 1, 1, kLanes>...};
}

template <typename T>
void many_rows(const Linear& op, const T* x, void* y, int64_t first_row, int64_t rows, int64_t panel, ManyRows<T>& room) {
  static constexpr auto functions = tile_functions(std::make_index_sequence<kTileRows>{});
  const T* packed = (const T*)op.weight + panel * op.inputs * kPanel;
  const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
  x += first_row * op.x_stride;
  std::memset(room.sums, 0, sizeof(room.sums));
  for (int64_t first = 0; first < op.inputs; first += kInputs) {
    const int64_t inputs = std::min<int64_t>(kInputs, op.inputs - first);
    unpack(packed + first * kPanel, inputs, room.weights);
    const float* left = room.x;
    int64_t stride = kInputs;
    if constexpr (kWidens<T>) {
      for (int64_t r = 0; r < rows; r++) copy_left(x + r * op.x_stride + first, room.x + r * kInputs, inputs);
    } else {
      left = x + first, stride = op.x_stride;
    }
    for (int half = 0; half < kHalves; half++)
      for (int64_t tile = 0; tile < tiles; tile++) {
        const int64_t row = tile * rows / tiles, end = (tile + 1) * rows / tiles;
        functions[end - row - 1](left + row * stride, stride, room.weights[half], 0, inputs,
                                 room.sums[half] + row * kLanes, kLanes);
      }
  }
  for (int64_t r = 0; r < rows; r++)
    finish_panel<T>(op, y, first_row + r, panel * kPanel, load(room.sums[0] + r * kLanes), load(room.sums[1] + r * kLanes),
                    Activate{});
}
#endif

// The panels from `first` to `last` for some rows. A panel stays in the cache while the rows pass by.
template <typename T>
void linear(const Linear& op, const void* x, void* y, Span rows, int64_t first, int64_t last) {
#if defined(__AMX_BF16__)
  if constexpr (std::is_same_v<T, bf16>) {
    linear_tiles(op, (const T*)x, y, rows, first, last, Activate{});
    return;
  }
#endif
  static constexpr auto functions = rows_functions<T>(std::make_index_sequence<kMaxRows<T>>{});
  const int64_t passes = (rows.count() + kMaxRows<T> - 1) / kMaxRows<T>;
#if !defined(__AVX512F__)
  if (passes > 4) {
    ManyRows<T> room;
    for (int64_t panel = first; panel < last; panel++)
      for (int64_t row = rows.begin; row < rows.end; row += kManyRows)
        many_rows(op, (const T*)x, y, row, std::min<int64_t>(kManyRows, rows.end - row), panel, room);
    return;
  }
#endif
  const int64_t step = passes > 1 ? 1 : last - first;
  for (int64_t panel = first; panel < last; panel += step) {
    for (int64_t pass = 0; pass < passes; pass++) {
      const int64_t row = pass * rows.count() / passes, end = (pass + 1) * rows.count() / passes;
      functions[end - row - 1](op, (const T*)x, y, rows.begin + row, panel, panel + step);
    }
  }
}

}  // namespace octavo::OCTAVO_VARIANT
