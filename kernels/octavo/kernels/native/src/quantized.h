// y = x W^T + b with quantised weights and rows. Products of codes are added exactly, group by group; then, groups in their
// order, a sum gets scale of the weight * scale of the row * that, and min of the weight * what the row's group adds up to.
// Each of these products and sums is rounded by itself, so that a row's result depends neither on the rows beside it nor
// on the instruction set.
#pragma once

#include <algorithm>
#include <array>
#include <vector>

#include "codes.h"
#include "dots.h"
#include "epilogue.h"
#include "exact.h"
#include "quantized_layout.h"
#include "quantized_rows.h"
#include "types.h"

namespace octavo::OCTAVO_VARIANT {

// Rows that one pass over a packed panel may serve, the most first: their sums, of integers and of floats, share the
// registers with the codes.
#if defined(__AVX512F__)
constexpr int kRowCounts[] = {8, 4, 2, 1};
#else
constexpr int kRowCounts[] = {4, 2, 1};
#endif
constexpr size_t kNumRowCounts = sizeof(kRowCounts) / sizeof(int);

// So few rows take as long as reading does: codes are read in the order of their addresses, which the CPU foresees. For
// more they are asked for, so many bytes ahead.
constexpr int kReadingRows = 2;
constexpr int64_t kBytesAhead = 8192;

// From so many rows on the codes of a panel are unpacked once for all of them, some groups at a time, which stay in the
// nearest cache meanwhile; of so many at a time.
constexpr int64_t kWidenedRows = 16, kMostRows = 8 * RowBlock::kRows, kWideGroups = 16;
#if defined(__AVX512F__)
constexpr int kWideRows = 6;
#else
constexpr int kWideRows = 4;
#endif
static_assert(RowBlock::kRows % kWideRows == 0);

// --- Weights ---

// What a format's codes are. Formats that share them may differ in offsets, mins and where scales lie.
template <int bits_, bool table_ = false>
struct Codes {
  static constexpr int kBits = bits_;
  static constexpr bool kSixteens = bits_ == 6, kTable = table_;
  static constexpr int64_t kBytes = bits_ * kLine;
  // As they are multiplied.
  using Sum = Dots<table_ ? 8 : bits_>;
};

// The codes of one step, of the outputs of one register.
template <typename F, int step>
OCTAVO_INLINE u8xr codes_of(const uint8_t* half, const uint8_t* table) {
  constexpr int kLower = kSteps / 2 * kLine;
  if constexpr (F::kBits == 8) return load_as<u8xr>(half + step * kLine);
  const u8xr pair = load_as<u8xr>(half + step / 2 * kLine);
  const u8xr lower = (step % 2 ? moved_up<-4>(pair) : pair) & 15;
  if constexpr (F::kTable) return looked_up(table, lower);
  if constexpr (F::kBits == 5) return lower | (moved_up<4 - step>(load_as<u8xr>(half + kLower)) & 16);
  if constexpr (F::kBits == 6)
    return lower | (moved_up<4 - 2 * (step % 4)>(load_as<u8xr>(half + kLower + step / 4 * kLine)) & 48);
  return lower;
}

OCTAVO_INLINE f32xr floats(const uint16_t* halves) {
#if defined(__AVX512F__)
  return (f32xr)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)halves));
#elif defined(__F16C__)
  return (f32xr)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)halves));
#else
  // Exponents move from 16's place to 32's, and the difference of their zeros is multiplied; scales are finite.
  const u32xr bits = __builtin_convertvector(load_as<u16xr>(halves), u32xr);
  const f32xr sizes = (f32xr)((bits & 0x7fffu) << 13) * 0x1p112f;
  return (f32xr)((u32xr)sizes | (bits & 0x8000u) << 16);
#endif
}

OCTAVO_INLINE f32xr floats(const float* values) { return load_as<f32xr>(values); }

// Scales of the outputs of one register, and their mins, or the scales of the second halves.
struct Factors {
  f32xr scales, others;
};

// Those of the outputs from `output` on, in a group with these small scales, of a block with this header.
template <typename F>
OCTAVO_INLINE Factors factors_of(const WeightFormat& format, const char* header, const char* small, int64_t output) {
  const char* mins = header + format.scale_bytes();
  small += output;
  if (!F::kSixteens && format.scales == kFloatScales) {
    const int64_t at = output * sizeof(float);
    return {floats((const float*)(header + at)), format.mins ? floats((const float*)(mins + at)) : f32xr{}};
  }
  const int64_t at = output * sizeof(uint16_t);
  const f32xr wide = floats((const uint16_t*)(header + at));
  // These products are exact: of 11 bits and 8.
  if constexpr (F::kSixteens) return {wide * floats_of<int8_t>(small), wide * floats_of<int8_t>(small + kLine / 2)};
  const f32xr wide_mins = format.mins ? floats((const uint16_t*)(mins + at)) : f32xr{};
  if (format.scales == kHalfScales) return {wide, wide_mins};
  return {wide * floats_of<uint8_t>(small), -(wide_mins * floats_of<uint8_t>(small + kLine / 2))};
}

// One group of some rows of a block, from one of them on.
struct RowsAt {
  const int8_t* from;
  const RowGroup* first;

  OCTAVO_INLINE const int8_t* codes(int r) const { return from + r * kGroup; }
  OCTAVO_INLINE const RowGroup& group(int r) const { return first[r]; }
};

// One group of rows of any blocks.
template <int rows>
struct RowsApart {
  const int8_t* from[rows];
  const RowGroup* at[rows];

  OCTAVO_INLINE const int8_t* codes(int r) const { return from[r]; }
  OCTAVO_INLINE const RowGroup& group(int r) const { return *at[r]; }
};

// Registers of outputs that are multiplied together: what a row is spread over serves all of them.
constexpr int kWidth = 2;

// What several rows add up to for one panel: in registers, or, of many rows, in memory, and those of integers in registers.
template <int rows>
struct PanelSums {
  static constexpr bool kInMemory = rows * kWidth > kSums / 2;
  f32xr held[kInMemory ? 1 : kHalves * kParts][kInMemory ? 1 : rows];
  float* results;  // [rows, kPanel]

  OCTAVO_INLINE explicit PanelSums(float* to) : results(to) {
    if constexpr (!kInMemory)
      each<kHalves * kParts>(OCTAVO_EACH(p) {
        each<rows>(OCTAVO_EACH(r) { held[p][r] = load_as<f32xr>(at(p, r)); });
      });
  }
  OCTAVO_INLINE float* at(int p, int r) const { return results + r * kPanel + p * kRegisterLanes; }
  OCTAVO_INLINE void set(int p, int r, f32xr value) {
    if constexpr (kInMemory) {
      store_bytes(at(p, r), value);
    } else {
      held[p][r] = value;
    }
  }
  OCTAVO_INLINE f32xr get(int p, int r) const {
    if constexpr (kInMemory) {
      return load_as<f32xr>(at(p, r));
    } else {
      return held[p][r];
    }
  }
  OCTAVO_INLINE void finish() {
    if constexpr (!kInMemory)
      each<kHalves * kParts>(OCTAVO_EACH(p) { each<rows>(OCTAVO_EACH(r) { store_bytes(at(p, r), held[p][r]); }); });
  }
};

// Adds to the sums of each row what one group, or half of one, gives for the registers from `p` on. `group`: its codes.
template <typename F, int first, int steps, int rows, typename Rows>
OCTAVO_INLINE void add_steps(PanelSums<rows>& sums, int p, const uint8_t* group, const uint8_t* table, int32_t offset,
                             const f32xr (&scales)[kWidth], const Rows& x) {
  using Sum = typename F::Sum;
  Sum dots[kWidth][rows];
  // What the offset takes away from row r.
  const auto start_of = [&](auto r) __attribute__((always_inline)) {
    const RowGroup& row = x.group(r);
    int32_t begin = steps == kSteps ? row.start : first ? row.start - row.first_start : row.first_start;
    if (offset != kByteOffset) begin = begin / kByteOffset * offset;
    return in_all_lanes(begin);
  };
  each<rows>(OCTAVO_EACH(r) {
    const i32xr start = Sum::kOffset && !Sum::kStartsLast ? start_of(r) : i32xr{};
    each<kWidth>(OCTAVO_EACH(w) { dots[w][r].begin(start); });
  });
  const auto codes_at = [&](auto s, int w) __attribute__((always_inline)) {
    const int half = (p + w) / kParts, part = (p + w) % kParts;
    return Sum::prepared(codes_of<F, first + s>(group + half * F::kBytes + part * 4 * kRegisterLanes, table));
  };
  const auto four_of = [&](auto s, int r) __attribute__((always_inline)) { return spread(x.codes(r) + (first + s) * kStep); };
  if constexpr (rows <= kReadingRows) {
    each<kWidth>(OCTAVO_EACH(w) {
      each<steps>(OCTAVO_EACH(s) {
        const typename Sum::Codes codes = codes_at(s, w);
        each<rows>(OCTAVO_EACH(r) { dots[w][r].template add<s>(codes, four_of(s, r)); });
      });
      // What follows must not be read before.
      asm volatile("" ::: "memory");
    });
  } else {
    each<steps>(OCTAVO_EACH(s) {
      typename Sum::Codes codes[kWidth];
      each<kWidth>(OCTAVO_EACH(w) { codes[w] = codes_at(s, w); });
      each<rows>(OCTAVO_EACH(r) {
        const i8xr four = four_of(s, r);
        each<kWidth>(OCTAVO_EACH(w) { dots[w][r].template add<s>(codes[w], four); });
      });
    });
  }
  each<rows>(OCTAVO_EACH(r) {
    const float scale = x.group(r).scale;
    const i32xr start = Sum::kStartsLast ? start_of(r) : i32xr{};
    each<kWidth>(OCTAVO_EACH(w) {
      const i32xr dot = Sum::kStartsLast ? dots[w][r].end() + start : dots[w][r].end();
      const f32xr sum = __builtin_convertvector(dot, f32xr);
      sums.set(p + w, r, sums.get(p + w, r) + (scales[w] * scale) * sum);
    });
  });
}

// The same of a whole group, with what follows from its mins.
template <typename F, int rows, typename Rows>
OCTAVO_INLINE void add_group(PanelSums<rows>& sums, int p, const uint8_t* codes, const uint8_t* table, int32_t offset,
                             const f32xr (&scales)[kWidth], const f32xr (&others)[kWidth], bool mins, const Rows& x) {
  if constexpr (F::kSixteens) {
    add_steps<F, 0, kSteps / 2>(sums, p, codes, table, offset, scales, x);
    add_steps<F, kSteps / 2, kSteps / 2>(sums, p, codes, table, offset, others, x);
  } else {
    add_steps<F, 0, kSteps>(sums, p, codes, table, offset, scales, x);
    if (mins)
      each<rows>(OCTAVO_EACH(r) {
        const float sum = x.group(r).scaled_sum;
        each<kWidth>(OCTAVO_EACH(w) { sums.set(p + w, r, sums.get(p + w, r) + others[w] * sum); });
      });
  }
}

struct ExactActivate {
  static constexpr bool kMultiplies = true;

  OCTAVO_INLINE f32x16 operator()(int activation, f32x16 x) const {
    if (activation == kSilu) return exact::silu(x);
    return activation == kGelu ? exact::gelu(x) : exact::gelu_tanh(x);
  }
};

// Where the sums of one panel go, for all rows.
struct Outputs {
  const Linear& op;
  char* y;
  int64_t column;
  char* at;  // the first row's
  int64_t stride, width;  // bytes
  void (*store_rows)(const Outputs& to, int64_t row, int64_t count, const float* sums);

  // Asks for what `finish` will write, or add to.
  OCTAVO_INLINE void fetch(int64_t row, int64_t count) const {
    for (const char* from = at + row * stride; count > 0; count--, from += stride)
      for (int64_t byte = 0; byte < width; byte += kLine) __builtin_prefetch(from + byte, 1);
  }
  // `sums`: [count, kPanel].
  OCTAVO_INLINE void finish(int64_t row, int64_t count, const float* sums) const { store_rows(*this, row, count, sums); }
};

template <typename T>
void store_rows(const Outputs& to, int64_t row, int64_t count, const float* sums) {
  // A copy of its own, which no store can change, is not read again for each row.
  const Linear op = to.op;
  for (int64_t r = 0; r < count; r++, sums += kPanel)
    finish_panel<T>(op, to.y, row + r, to.column, load(sums), load(sums + kLanes), ExactActivate{});
}

template <typename T>
Outputs outputs_of(const Linear& op, void* y, int64_t panel) {
  const int64_t size = op.epilogue == kStoreFloat ? sizeof(float) : sizeof(T), gates = op.epilogue == kGate ? 2 : 1;
  const int64_t column = panel * kPanel, width = kPanel / gates * size;
  return {op, (char*)y, column, (char*)y + panel * width, op.y_stride * size, width, store_rows<T>};
}

// The groups of a packed panel, one after the other.
template <typename F>
class Groups {
 public:
  Groups(const QuantizedLinear& op, const char* panel)
      : format_(kFormats[op.format]), in_block_(format_.block_groups(op.group)), panel_(panel), at_(panel) {
    if constexpr (F::kTable)
      for (int i = 0; i < 16; i++) table_[i] = uint8_t(op.values[i] + kByteOffset);
  }

  OCTAVO_INLINE void next() {
    if (left_ == 0) {
      header_ = at_, at_ += format_.header_bytes(), left_ = in_block_;
    }
    codes_ = at_, at_ += format_.group_bytes(), left_--;
  }

  // Goes to a group; `next` goes on from there.
  OCTAVO_INLINE void seek(int64_t group) {
    const int64_t block = group / in_block_, before = group % in_block_;
    header_ = panel_ + block * (format_.header_bytes() + in_block_ * format_.group_bytes());
    at_ = header_ + format_.header_bytes() + before * format_.group_bytes(), left_ = in_block_ - before;
    next();
  }

  OCTAVO_INLINE const uint8_t* codes() const { return (const uint8_t*)codes_; }
  // What follows the present one, and about what a group takes.
  OCTAVO_INLINE const char* end() const { return at_; }
  OCTAVO_INLINE int64_t bytes() const { return format_.group_bytes() + format_.header_bytes() / in_block_; }
  OCTAVO_INLINE const uint8_t* table() const { return table_; }
  OCTAVO_INLINE int32_t offset() const { return F::kTable ? kByteOffset : format_.offset; }
  OCTAVO_INLINE bool mins() const { return format_.mins; }
  OCTAVO_INLINE Factors factors(int64_t output) const {
    return factors_of<F>(format_, header_, codes_ + 2 * F::kBytes, output);
  }

 private:
  const WeightFormat& format_;
  const int64_t in_block_;
  const char* const panel_;
  int64_t left_ = 0;
  const char *at_, *header_ = nullptr, *codes_ = nullptr;
  alignas(16) uint8_t table_[16];
};

// Adds the products of one panel's groups with some rows of their blocks, from row `row` of each on, to `results`,
// [rows, kPanel].
template <typename F, int rows>
void quantized_tile(const QuantizedLinear& op, const char* panel, const RowBlock* blocks, int64_t row, float* results) {
  Groups<F> groups(op, panel);
  PanelSums<rows> sums(results);
  for (int64_t group = 0; group < op.linear.inputs / kGroup; group++, blocks++) {
    groups.next();
    if constexpr (rows > kReadingRows)
      each<2 * F::kBytes / kLine + 1>(OCTAVO_EACH(line) {
        __builtin_prefetch(groups.codes() + line * kLine + kBytesAhead, 0, 1);
      });
    each<kHalves * kParts / kWidth, !PanelSums<rows>::kInMemory>(OCTAVO_EACH(pair) {
      // What rows are spread over is read again: kept, it would take registers that there are not.
      asm volatile("" ::: "memory");
      const RowsAt x{blocks->codes[row], blocks->groups + row};
      f32xr scales[kWidth], others[kWidth];
      each<kWidth>(OCTAVO_EACH(w) {
        const Factors factors = groups.factors((pair * kWidth + w) * kRegisterLanes);
        scales[w] = factors.scales, others[w] = factors.others;
      });
      add_group<F>(sums, pair * kWidth, groups.codes(), groups.table(), groups.offset(), scales, others, groups.mins(), x);
    });
  }
  sums.finish();
}

using QuantizedTile = void (*)(const QuantizedLinear&, const char*, const RowBlock*, int64_t, float*);

template <typename F, size_t... counts>
constexpr auto packed_tiles(std::index_sequence<counts...>) {
  return std::array<QuantizedTile, kNumRowCounts>{quantized_tile<F, kRowCounts[counts]>...};
}

// One for each of `kRowCounts`.
template <typename F>
constexpr auto kPackedTiles = packed_tiles<F>(std::make_index_sequence<kNumRowCounts>{});

// --- Codes of a byte each ---

// A group whose codes have a byte each and whose scales are floats: taken apart once for many rows.
struct WideGroup {
  static constexpr int kBytes = kHalves * kSteps * kLine;
  const uint8_t* codes;  // [kHalves][kSteps][kLine]
  alignas(kLine) float scales[kPanel], others[kPanel];
};

// Codes as a `WideGroup` has them. Where all are multiplied alike they have the offset of 8 bits, whatever they had.
template <int bits, bool sixteens>
struct WideCodes {
  static constexpr int kBits = 8;
  static constexpr bool kSixteens = sixteens, kTable = false;
  static constexpr int64_t kBytes = kBits * kLine;
  using Sum = Dots<bits>;
};

template <typename F>
using WideOf = WideCodes<kDotsAlike ? 8 : F::kTable ? 8 : F::kBits, F::kSixteens>;

// The present one of `groups`. Codes that have a byte each stay where they are, others go to `room`.
template <typename F>
void widen(const Groups<F>& groups, WideGroup& to, uint8_t* room) {
  const uint8_t more = kDotsAlike ? uint8_t(kByteOffset - groups.offset()) : 0;
  to.codes = F::kBits == 8 ? groups.codes() : room;
  each<kHalves * kParts, kParts == 1>(OCTAVO_EACH(p) {
    const int half = p / kParts, part = p % kParts * 4 * kRegisterLanes;
    if constexpr (F::kBits < 8)
      each<kSteps>(OCTAVO_EACH(s) {
        const u8xr codes = codes_of<F, s>(groups.codes() + half * F::kBytes + part, groups.table());
        store_bytes(room + (half * kSteps + s) * kLine + part, codes + more);
      });
    const Factors factors = groups.factors(p * kRegisterLanes);
    store_bytes(to.scales + p * kRegisterLanes, factors.scales);
    store_bytes(to.others + p * kRegisterLanes, factors.others);
  });
}

// Adds what one group gives, for all outputs.
template <typename F, int rows, typename Rows>
OCTAVO_INLINE void add_wide(PanelSums<rows>& sums, const WideGroup& weights, int32_t offset, bool mins, const Rows& x) {
  each<kHalves * kParts / kWidth, !PanelSums<rows>::kInMemory>(OCTAVO_EACH(pair) {
    asm volatile("" ::: "memory");
    f32xr scales[kWidth], others[kWidth];
    each<kWidth>(OCTAVO_EACH(w) {
      const int at = (pair * kWidth + w) * kRegisterLanes;
      scales[w] = load_as<f32xr>(weights.scales + at), others[w] = load_as<f32xr>(weights.others + at);
    });
    add_group<F>(sums, pair * kWidth, weights.codes, nullptr, offset, scales, others, mins, x);
  });
}

// As `quantized_tile`, of `count` groups.
template <typename F, int rows>
void wide_tile(const WideGroup* weights, int64_t count, int32_t offset, bool mins, const RowBlock* blocks, int64_t row,
               float* results) {
  if (kDotsAlike) offset = kByteOffset;
  PanelSums<rows> sums(results);
  for (int64_t group = 0; group < count; group++, blocks++, weights++)
    add_wide<F>(sums, *weights, offset, mins, RowsAt{blocks->codes[row], blocks->groups + row});
  sums.finish();
}

using WideTile = void (*)(const WideGroup*, int64_t, int32_t, bool, const RowBlock*, int64_t, float*);

template <typename F, size_t... counts>
constexpr auto wide_tiles(std::index_sequence<counts...>) {
  return std::array<WideTile, sizeof...(counts)>{wide_tile<F, int(counts) + 1>...};
}

// One for each number of rows.
template <typename F>
constexpr auto kWideTiles = wide_tiles<WideOf<F>>(std::make_index_sequence<kWideRows>{});

// Which of the first `count` rows of a stripe are rounded twice in one group, a bit each.
OCTAVO_INLINE uint32_t twice_among(const uint8_t* twice, int64_t count) {
  static_assert(RowBlock::kRows == 3 * sizeof(uint64_t));
  uint64_t flags[3];
  std::memcpy(flags, twice, sizeof(flags));
  if (!(flags[0] | flags[1] | flags[2])) return 0;
  uint32_t bits = 0;
  // Each byte's lowest bit comes to its place in the highest byte of the product.
  for (int i = 0; i < 3; i++)
    bits |= uint32_t((flags[i] & 0x0101010101010101u) * 0x0102040810204080u >> 56) << 8 * i;
  return bits & ((1u << count) - 1);
}

// Where the rest of one group of a row is, and what its products are added to.
struct Rest {
  const int8_t* codes;
  const RowGroup* group;
  float* results;  // [kPanel]
};

// As many rests as are multiplied at a time: one alone would wait for each of its sums.
constexpr int kRests = 4;

// Adds what one group gives for some rests.
template <typename F, int rows>
void rest_tile(const WideGroup& weights, int32_t offset, bool mins, const Rest* rests) {
  if (kDotsAlike) offset = kByteOffset;
  alignas(kLine) float results[rows][kPanel];
  RowsApart<rows> x;
  each<rows>(OCTAVO_EACH(r) {
    x.from[r] = rests[r].codes, x.at[r] = rests[r].group;
    std::memcpy(results[r], rests[r].results, sizeof(results[r]));
  });
  PanelSums<rows> sums(results[0]);
  add_wide<F>(sums, weights, offset, mins, x);
  sums.finish();
  each<rows>(OCTAVO_EACH(r) { std::memcpy(rests[r].results, results[r], sizeof(results[r])); });
}

using RestTile = void (*)(const WideGroup&, int32_t, bool, const Rest*);

template <typename F, size_t... counts>
constexpr auto rest_tiles(std::index_sequence<counts...>) {
  return std::array<RestTile, sizeof...(counts)>{rest_tile<F, int(counts) + 1>...};
}

// One for each number of rests.
template <typename F>
constexpr auto kRestTiles = rest_tiles<WideOf<F>>(std::make_index_sequence<kRests>{});

// The groups of which any row of `span` has a rest. `span` begins with a stripe.
inline std::vector<int64_t> groups_with_rests(const RowBlock* rows, int64_t groups, Span span) {
  std::vector<int64_t> some;
  for (int64_t group = 0; group < groups; group++)
    for (int64_t start = span.begin; start < span.end; start += RowBlock::kRows)
      if (twice_among(RowStripe::of((RowBlock*)rows, start, groups).twice[group],
                      std::min<int64_t>(span.end - start, RowBlock::kRows))) {
        some.push_back(group);
        break;
      }
  return some;
}

// Rows that pass by one panel, fewer than `kWidenedRows` or at most `kMostRows`. They begin with a stripe.
struct PassingRows {
  const RowBlock* rows;
  Span span;
  std::vector<int64_t> with_rests;  // groups

  PassingRows(const RowBlock* all, int64_t groups, Span some)
      : rows(all), span(some), with_rests(groups_with_rests(all, groups, some)) {}
};

// Adds what the rests of rows give for one panel to `results`, [rows, kPanel], group after group.
template <typename F>
void add_rests(const QuantizedLinear& op, const char* panel, const PassingRows& x, float* results) {
  const int64_t all = op.linear.inputs / kGroup, begin = x.span.begin, end = x.span.end;
  Groups<F> groups(op, panel);
  alignas(kLine) uint8_t room[WideGroup::kBytes];
  WideGroup wide;
  Rest rests[kRests];
  for (const int64_t group : x.with_rests) {
    groups.seek(group);
    bool widened = false;
    int count = 0;
    const auto add = [&] {
      if (!widened) widen(groups, wide, room), widened = true;
      kRestTiles<F>[count - 1](wide, groups.offset(), groups.mins(), rests);
      count = 0;
    };
    for (int64_t start = begin; start < end; start += RowBlock::kRows) {
      const RowStripe stripe = RowStripe::of((RowBlock*)x.rows, start, all);
      uint32_t twice = twice_among(stripe.twice[group], std::min<int64_t>(end - start, RowBlock::kRows));
      for (; twice; twice &= twice - 1) {
        const int row = __builtin_ctz(twice);
        const RowBlock& block = stripe.rests[group];
        rests[count++] = {block.codes[row], block.groups + row, results + (start - begin + row) * kPanel};
        if (count == kRests) add();
      }
    }
    if (count) add();
  }
}

// --- Few rows ---

// One panel for rows of which there are fewer than a stripe has, as many at a time as there are tiles for. What their rests
// give comes last.
template <typename F>
void packed_rows(const QuantizedLinear& op, const char* panel, const PassingRows& x, const Outputs& to) {
  const RowStripe stripe = RowStripe::of((RowBlock*)x.rows, x.span.begin, op.linear.inputs / kGroup);
  const int64_t count = x.span.count();
  alignas(kLine) float sums[kWidenedRows * kPanel];
  std::memset(sums, 0, count * kPanel * sizeof(float));
  for (int64_t row = 0; row < count;) {
    int which = 0;
    while (kRowCounts[which] > count - row) which++;
    kPackedTiles<F>[which](op, panel, stripe.blocks, row, sums + row * kPanel);
    row += kRowCounts[which];
  }
  add_rests<F>(op, panel, x, sums);
  to.finish(x.span.begin, count, sums);
}

// --- Many rows ---

// What is fetched step by step.
class Fetched {
 public:
  Fetched(const char* at, int64_t bytes, int64_t steps) : at_(at), end_(at + bytes), step_((bytes + steps - 1) / steps) {}

  OCTAVO_INLINE void step() {
    const char* until = std::min(at_ + step_, end_);
    for (; at_ < until; at_ += kLine) __builtin_prefetch(at_, 0, 2);
  }

 private:
  const char *at_, *const end_;
  const int64_t step_;
};

// One panel. Its groups are unpacked some at a time, which stay in the nearest cache while rows pass by. What their rests
// give comes last.
template <typename F>
void widened_rows(const QuantizedLinear& op, const char* panel, const PassingRows& x, const Outputs& to) {
  const int64_t all = op.linear.inputs / kGroup, passes = (all + kWideGroups - 1) / kWideGroups, rows = x.span.count();
  alignas(kLine) uint8_t room[kWideGroups][WideGroup::kBytes];
  WideGroup wide[kWideGroups];
  alignas(kLine) float sums[kMostRows * kPanel];
  std::memset(sums, 0, rows * kPanel * sizeof(float));
  Groups<F> groups(op, panel);
  for (int64_t pass = 0; pass < passes; pass++) {
    const int64_t first = pass * all / passes, count = (pass + 1) * all / passes - first;
    for (int64_t group = 0; group < count; group++) groups.next(), widen(groups, wide[group], room[group]);
    // Few rows do not hide what the next pass takes to arrive: it is fetched while these are multiplied.
    Fetched ahead(groups.end(), count * groups.bytes(), (rows + kWideRows - 1) / kWideRows);
    for (int64_t start = 0; start < rows; start += RowBlock::kRows) {
      const RowStripe stripe = RowStripe::of((RowBlock*)x.rows, x.span.begin + start, all);
      const int64_t some = std::min<int64_t>(rows - start, RowBlock::kRows);
      float* at = sums + start * kPanel;
      if (pass + 1 == passes) to.fetch(x.span.begin + start, some);
      for (int64_t row = 0; row < some; row += kWideRows) {
        ahead.step();
        kWideTiles<F>[std::min<int64_t>(some - row, kWideRows) - 1](wide, count, groups.offset(), groups.mins(),
                                                                    stripe.blocks + first, row, at + row * kPanel);
      }
    }
  }
  add_rests<F>(op, panel, x, sums);
  to.finish(x.span.begin, rows, sums);
}

using QuantizedPanel = void (*)(const QuantizedLinear&, const char*, const PassingRows&, const Outputs&);

struct QuantizedTiles {
  QuantizedPanel few, many;
};

template <typename F>
constexpr QuantizedTiles kTilesOf = {packed_rows<F>, widened_rows<F>};

inline const QuantizedTiles& tiles_of(const WeightFormat& format) {
  if (format.table) return kTilesOf<Codes<4, true>>;
  switch (format.bits) {
    case 4: return kTilesOf<Codes<4>>;
    case 5: return kTilesOf<Codes<5>>;
    case 6: return kTilesOf<Codes<6>>;
    default: return kTilesOf<Codes<8>>;
  }
}

// The panels from `first` to `last` for the rows of `span`, which begins with a stripe: as many rows at a time as stay in a
// cache with the panels.
template <typename T>
void quantized_panels(const QuantizedLinear& op, const RowBlock* rows, void* y, Span span, int64_t first, int64_t last) {
  const WeightFormat& format = kFormats[op.format];
  const QuantizedTiles& tiles = tiles_of(format);
  const int64_t panel_bytes = format.panel_bytes(op.linear.inputs, op.group);
  for (int64_t begin = span.begin; begin < span.end; begin += kMostRows) {
    const PassingRows x(rows, op.linear.inputs / kGroup, {begin, std::min(begin + kMostRows, span.end)});
    for (int64_t panel = first; panel < last; panel++)
      (x.span.count() < kWidenedRows ? tiles.few : tiles.many)(
          op, (const char*)op.linear.weight + panel * panel_bytes, x, outputs_of<T>(op.linear, y, panel));
  }
}

}  // namespace octavo::OCTAVO_VARIANT
