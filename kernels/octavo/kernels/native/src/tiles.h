// Products of bf16 in the tile registers of AMX: sixteen rows by thirty-two inputs against as many inputs by sixteen outputs.
// The unit adds up the products of thirty-two inputs before it adds them to a sum, and takes what is below the normal numbers
// for zero. Vectors round elsewhere, so tiles multiply any number of rows, one too.
#pragma once

#include <algorithm>

#include "epilogue.h"
#include "types.h"

namespace octavo::OCTAVO_VARIANT {

constexpr int64_t kTileRows = 16, kTileInputs = 32;
// From one pair of a packed weight's inputs to the next.
constexpr int64_t kPairBytes = kPanel * 2 * sizeof(bf16);

// Compilers believe that the instructions for tiles read no memory: what they are to read must be there before.
OCTAVO_INLINE void written(const void* memory) { asm volatile("" : : "r"(memory) : "memory"); }

// This thread's tiles, while this lives: 0 to 3 are sums, 4 and 5 hold rows, 6 and 7 weights.
class Tiles {
 public:
  explicit Tiles(int64_t rows) {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int tile = 0; tile < 8; tile++) config.row_bytes[tile] = 64, config.rows[tile] = tile < 6 ? rows : kTileRows;
    written(&config);
    _tile_loadconfig(&config);
  }
  Tiles(const Tiles&) = delete;
  ~Tiles() { _tile_release(); }
};

// Adds the products of `inputs`, a multiple of `kTileInputs`, to the sums: of the rows at `x` with one panel or two, or of
// those at `x` and at `more` with one.
template <int row_tiles, int panels>
OCTAVO_INLINE void multiply_tiles(const bf16* x, const bf16* more, int64_t x_stride, const bf16* packed, int64_t panel_size,
                                  int64_t inputs) {
  static_assert(row_tiles == 1 || panels == 1);
  constexpr int64_t kAhead = 8192;
  for (int64_t k = 0; k < inputs; k += kTileInputs) {
    const bf16* w = packed + k * kPanel;
    if constexpr (row_tiles == 1)
      each<panels>(OCTAVO_EACH(p) {
        each<kTileInputs>(
            OCTAVO_EACH(line) { __builtin_prefetch((const char*)(w + p * panel_size) + kAhead + line * 64, 0, 2); });
      });
    // Many rows pass by one panel, which is to stay in the nearest cache.
    if constexpr (row_tiles == 2)
      _tile_stream_loadd(4, x + k, x_stride);
    else
      _tile_loadd(4, x + k, x_stride);
    _tile_loadd(6, w, kPairBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, w + kPanel, kPairBytes);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (row_tiles == 2) {
      _tile_stream_loadd(5, more + k, x_stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    if constexpr (panels == 2) {
      _tile_loadd(6, w + panel_size, kPairBytes);
      _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(7, w + panel_size + kPanel, kPairBytes);
      _tile_dpbf16ps(3, 4, 7);
    }
  }
}

// As many rows of the last inputs as a tile has, with zeros after them.
struct LastInputs {
  alignas(64) bf16 x[2][kTileRows * kTileInputs];
  alignas(64) bf16 packed[2][kTileInputs * kPanel];
};

// Tiles of rows that begin at `row` and at `other`, whose first `done` rows have their results: `rows` each.
template <int row_tiles, int panels, typename Activate>
void some_tiles(const Linear& op, const bf16* x, void* y, const int64_t (&starts)[2], const int64_t (&done)[2], int64_t rows,
                int64_t panel, Activate activate) {
  const int64_t panel_size = op.inputs * kPanel, whole = op.inputs / kTileInputs * kTileInputs, rest = op.inputs - whole;
  const bf16* packed = (const bf16*)op.weight + panel * panel_size;
  const bf16* left[2] = {x + starts[0] * op.x_stride, x + starts[1] * op.x_stride};
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  multiply_tiles<row_tiles, panels>(left[0], left[1], op.x_stride * sizeof(bf16), packed, panel_size, whole);
  if (rest) {
    LastInputs last{};
    for (int tile = 0; tile < row_tiles; tile++)
      for (int64_t row = 0; row < rows; row++)
        std::memcpy(last.x[tile] + row * kTileInputs, left[tile] + row * op.x_stride + whole, rest * sizeof(bf16));
    for (int p = 0; p < panels; p++)
      std::memcpy(last.packed[p], packed + p * panel_size + whole * kPanel, rest * kPanel * sizeof(bf16));
    written(&last);
    multiply_tiles<row_tiles, panels>(last.x[0], last.x[1], kTileInputs * sizeof(bf16), last.packed[0], kTileInputs * kPanel,
                                      kTileInputs);
  }
  alignas(64) float results[4][kTileRows * kLanes];
  _tile_stored(0, results[0], 64);
  _tile_stored(1, results[1], 64);
  if constexpr (row_tiles * panels == 2) {
    _tile_stored(2, results[2], 64);
    _tile_stored(3, results[3], 64);
  }
  for (int pair = 0; pair < row_tiles * panels; pair++) {
    const int tile = row_tiles == 2 ? pair : 0, p = panels == 2 ? pair : 0;
    for (int64_t row = done[tile]; row < rows; row++)
      finish_panel<bf16>(op, y, starts[tile] + row, (panel + p) * kPanel, load(results[2 * pair] + row * kLanes),
                         load(results[2 * pair + 1] + row * kLanes), activate);
  }
}

// The panels from `first` to `last` for some rows. Where these do not fill tiles, the last begins with rows of the one
// before it: tiles are configured once.
template <typename Activate>
void linear_tiles(const Linear& op, const bf16* x, void* y, Span span, int64_t first, int64_t last, Activate activate) {
  const int64_t tokens = span.count();
  if (tokens == 0) return;
  const int64_t rows = std::min(tokens, kTileRows), count = (tokens + kTileRows - 1) / kTileRows;
  const Tiles tiles(rows);
  const int64_t step = count == 1 ? 2 : 1;
  for (int64_t panel = first; panel < last; panel += step)
    for (int64_t tile = 0; tile < count; tile += 2) {
      int64_t starts[2], done[2];
      for (int i = 0; i < 2; i++) {
        const int64_t start = std::min((tile + i) * kTileRows, tokens - rows);
        starts[i] = span.begin + start;
        done[i] = (tile + i) * kTileRows - start;
      }
      if (tile + 1 < count)
        some_tiles<2, 1>(op, x, y, starts, done, rows, panel, activate);
      else if (panel + 1 < last && step == 2)
        some_tiles<1, 2>(op, x, y, starts, done, rows, panel, activate);
      else
        some_tiles<1, 1>(op, x, y, starts, done, rows, panel, activate);
    }
}

}  // namespace octavo::OCTAVO_VARIANT
