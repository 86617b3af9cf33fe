// What a product is cut into: panels of a weight for spans of rows.
#pragma once

#include <algorithm>
#include <cstdint>

#include "types.h"

namespace octavo {

// `panels` for each span of `rows` rows: all of them for one span before the next, so that what its rows hold stays in a
// cache that threads share, however many rows there are.
struct Pieces {
  int64_t tokens, panels, rows;

  // `row_bytes`: what a row holds that every panel reads.
  static Pieces of(int64_t tokens, int64_t panels, int64_t row_bytes) {
    // A multiple of what kernels take at a time.
    constexpr int64_t kCache = 4 << 20, kRows = 192;
    const int64_t most = std::max(kCache / row_bytes, kRows), spans = std::max<int64_t>(1, (tokens + most - 1) / most);
    return {tokens, panels, std::max(((tokens + spans - 1) / spans + kRows - 1) / kRows * kRows, kRows)};
  }

  int64_t count() const { return (tokens + rows - 1) / rows * panels; }

  // Calls function(span of rows, first panel, last panel) for the pieces from `first` to `last`.
  template <typename Function>
  void each(int64_t first, int64_t last, Function function) const {
    while (first < last) {
      const int64_t begin = first / panels * rows, panel = first % panels, end = std::min(panels, panel + last - first);
      function(Span{begin, std::min(tokens, begin + rows)}, panel, end);
      first += end - panel;
    }
  }
};

}  // namespace octavo
