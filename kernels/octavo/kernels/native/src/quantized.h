// y = x W^T + b with quantised weights and rows. Products of codes are added exactly, group by group; then, groups in their
// order, a sum gets scale of the weight * scale of the row * that, and min of the weight * what the row's group adds up to.
// Each of these products and sums is rounded by itself, so that a row's result depends neither on the rows beside it nor
// on the instruction set.
#pragma once

#include <algorithm>
#include <array>

#include "dots.h"
#include "epilogue.h"
#include "exact.h"
#include "quantized_layout.h"
#include "types.h"

namespace octavo::OCTAVO_VARIANT {

// Rows that one pass over a panel may serve, the most first: their sums, of integers and of floats, share the registers
// with the codes.
#if defined(__AVX512F__)
constexpr int kRowCounts[] = {12, 8, 4, 2, 1};
#else
constexpr int kRowCounts[] = {4, 2, 1};
#endif

// --- Rows ---

OCTAVO_INLINE int32_t largest_of(const i32x16& values) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epi32((__m512i)values);
#else
  int32_t lanes[kLanes];
  store_bytes(lanes, values);
  int32_t result = lanes[0];
  for (int32_t lane : lanes) result = std::max(result, lane);
  return result;
#endif
}

OCTAVO_INLINE int32_t sum_of(const i32x16& values) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)values);
#else
  int32_t lanes[kLanes];
  store_bytes(lanes, values);
  int32_t result = 0;
  for (int32_t lane : lanes) result += lane;
  return result;
#endif
}

// The lowest byte of each lane.
OCTAVO_INLINE void store_low_bytes(int8_t* to, const i32x16& values) {
#if defined(__AVX512F__)
  _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)values));
#else
  int32_t lanes[kLanes];
  store_bytes(lanes, values);
  for (int lane = 0; lane < kLanes; lane++) to[lane] = int8_t(lanes[lane]);
#endif
}

// One group. Scaled, the largest is 127; the others are rounded to nearest, ties to even. Where one is infinite or a NaN,
// the scale is a NaN, and so is all that it meets. What is smaller than `kTiny` counts as zero: its scale would overflow.
template <typename T>
OCTAVO_INLINE void quantize_group(const T* x, int8_t (&codes)[kGroup], RowGroup& group) {
  constexpr float kTiny = 1e-30f;
  const f32x16 values[2] = {load(x), load(x + kLanes)};
  const i32x16 sizes[2] = {bits_as<i32x16>(values[0]) & 0x7fffffff, bits_as<i32x16>(values[1]) & 0x7fffffff};
  // As bits, sizes have the order of their numbers, infinity and NaN above all.
  const int32_t bits = largest_of(select(sizes[0] > sizes[1], sizes[0], sizes[1]));
  float most;
  std::memcpy(&most, &bits, sizeof(most));
  const bool finite = bits < 0x7f800000, zero = most < kTiny;
  const float factor = finite && !zero ? 127.0f / most : 0.0f;
  int32_t sums[2];
  for (int half = 0; half < 2; half++) {
    // 1.5 * 2^23: adding it rounds to an integer in the low bits.
    const f32x16 shifted = values[half] * factor + 12582912.0f;
    const i32x16 scaled = bits_as<i32x16>(shifted) - 0x4b400000;
    const i32x16 kept = finite ? scaled : i32x16{};
    store_low_bytes(codes + half * kLanes, kept);
    sums[half] = sum_of(kept);
  }
  group.scale = finite ? zero ? 0.0f : most / 127.0f : __builtin_nanf("");
  group.scaled_sum = group.scale * float(sums[0] + sums[1]);
  group.minus_sum = -(sums[0] + sums[1]);
  group.minus_first = -sums[0];
}

// Rows `first` to `last` of x to the same rows of `rows`.
template <typename T>
void quantize_rows(const Quantize& op, const void* x, RowBlock* rows, int64_t first, int64_t last) {
  const int64_t groups = op.size / kGroup;
  for (int64_t row = first; row < last; row++) {
    const T* from = (const T*)x + row * op.x_stride;
    RowBlock* to = rows + row / RowBlock::kRows * groups;
    const int64_t place = row % RowBlock::kRows;
    for (int64_t group = 0; group < groups; group++)
      quantize_group(from + group * kGroup, to[group].codes[place], to[group].groups[place]);
  }
}

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

template <typename Small>
OCTAVO_INLINE f32xr floats_of(const char* from) {
#if defined(__AVX512F__)
  const __m128i small = _mm_loadu_si128((const __m128i*)from);
  return (f32xr)_mm512_cvtepi32_ps(std::is_signed_v<Small> ? _mm512_cvtepi8_epi32(small) : _mm512_cvtepu8_epi32(small));
#else
  typedef Small Lanes __attribute__((vector_size(kRegisterLanes)));
  return __builtin_convertvector(__builtin_convertvector(load_as<Lanes>(from), i32xr), f32xr);
#endif
}

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
  const int8_t* codes;
  const RowGroup* groups;
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
    each<kHalves * kParts>(OCTAVO_EACH(p) { each<rows>(OCTAVO_EACH(r) { set<p, r>(f32xr{}); }); });
  }
  template <int p, int r>
  OCTAVO_INLINE float* at() const { return results + r * kPanel + p * kRegisterLanes; }
  template <int p, int r>
  OCTAVO_INLINE void set(f32xr value) {
    if constexpr (kInMemory) {
      store_bytes(at<p, r>(), value);
    } else {
      held[p][r] = value;
    }
  }
  template <int p, int r>
  OCTAVO_INLINE f32xr get() const {
    if constexpr (kInMemory) {
      return load_as<f32xr>(at<p, r>());
    } else {
      return held[p][r];
    }
  }
  OCTAVO_INLINE void finish() {
    if constexpr (!kInMemory)
      each<kHalves * kParts>(OCTAVO_EACH(p) { each<rows>(OCTAVO_EACH(r) { store_bytes(at<p, r>(), held[p][r]); }); });
  }
};

// Adds to the sums of each row what one group, or half of one, gives for the registers from `p` on. `group`: its codes.
template <typename F, int p, int rows, int first, int steps>
OCTAVO_INLINE void add_steps(PanelSums<rows>& sums, const uint8_t* group, const uint8_t* table, int32_t offset,
                             const f32xr (&scales)[kWidth], const RowsAt& x) {
  using Sum = typename F::Sum;
  Sum dots[kWidth][rows];
  each<rows>(OCTAVO_EACH(r) {
    const RowGroup& row = x.groups[r];
    const int32_t minus = steps == kSteps ? row.minus_sum : first ? row.minus_sum - row.minus_first : row.minus_first;
    const i32xr start = Sum::kOffset ? in_all_lanes(minus) * offset : i32xr{};
    each<kWidth>(OCTAVO_EACH(w) { dots[w][r].begin(start); });
  });
  each<steps>(OCTAVO_EACH(s) {
    typename Sum::Codes codes[kWidth];
    each<kWidth>(OCTAVO_EACH(w) {
      constexpr int half = (p + w) / kParts, part = (p + w) % kParts;
      codes[w] = Sum::prepared(codes_of<F, first + s>(group + half * F::kBytes + part * 4 * kRegisterLanes, table));
    });
    each<rows>(OCTAVO_EACH(r) {
      const i8xr four = spread(x.codes + r * kGroup + (first + s) * kStep);
      each<kWidth>(OCTAVO_EACH(w) { dots[w][r].template add<s>(codes[w], four); });
    });
  });
  each<rows>(OCTAVO_EACH(r) {
    const float scale = x.groups[r].scale;
    each<kWidth>(OCTAVO_EACH(w) {
      const f32xr sum = __builtin_convertvector(dots[w][r].end(), f32xr);
      sums.template set<p + w, r>(sums.template get<p + w, r>() + (scales[w] * scale) * sum);
    });
  });
}

template <typename F, int p, int rows>
OCTAVO_INLINE void add_group(PanelSums<rows>& sums, const WeightFormat& format, const char* header, const char* group,
                             const uint8_t* table, const RowsAt& x) {
  f32xr scales[kWidth], others[kWidth];
  each<kWidth>(OCTAVO_EACH(w) {
    const Factors factors = factors_of<F>(format, header, group + 2 * F::kBytes, (p + w) * kRegisterLanes);
    scales[w] = factors.scales, others[w] = factors.others;
  });
  const uint8_t* codes = (const uint8_t*)group;
  const int32_t offset = F::kTable ? 128 : format.offset;
  if constexpr (F::kSixteens) {
    add_steps<F, p, rows, 0, kSteps / 2>(sums, codes, table, offset, scales, x);
    add_steps<F, p, rows, kSteps / 2, kSteps / 2>(sums, codes, table, offset, others, x);
  } else {
    add_steps<F, p, rows, 0, kSteps>(sums, codes, table, offset, scales, x);
    if (format.mins)
      each<rows>(OCTAVO_EACH(r) {
        const float sum = x.groups[r].scaled_sum;
        each<kWidth>(OCTAVO_EACH(w) { sums.template set<p + w, r>(sums.template get<p + w, r>() + others[w] * sum); });
      });
  }
}

// The sums of `rows` rows of blocks, from row `row` of each on, for one panel: [rows, kPanel].
template <typename F, int rows>
void quantized_tile(const QuantizedLinear& op, const char* weight, const RowBlock* blocks, int64_t row, float* results) {
  const WeightFormat& format = kFormats[op.format];
  const int64_t inputs = op.linear.inputs, in_block = format.block_groups(op.group);
  const int64_t header_bytes = format.header_bytes(), group_bytes = format.group_bytes();
  alignas(16) uint8_t table[16];
  if constexpr (F::kTable)
    for (int i = 0; i < 16; i++) table[i] = uint8_t(op.values[i] + 128);
  PanelSums<rows> sums(results);
  for (int64_t left = inputs / kGroup; left > 0; left -= in_block) {
    const char* header = weight;
    weight += header_bytes;
    for (int64_t group = 0; group < in_block; group++) {
      if constexpr (rows < kRowCounts[0])
        each<2 * F::kBytes / kLine + 1>(OCTAVO_EACH(line) { __builtin_prefetch(weight + line * kLine + 2048, 0, 1); });
      each<kHalves * kParts / kWidth>(OCTAVO_EACH(pair) {
        // What rows are spread over is read again: kept, it would take registers that there are not.
        asm volatile("" ::: "memory");
        const RowsAt x{blocks->codes[row], blocks->groups + row};
        add_group<F, pair * kWidth, rows>(sums, format, header, weight, table, x);
      });
      weight += group_bytes;
      blocks++;
    }
  }
  sums.finish();
}

using QuantizedTile = void (*)(const QuantizedLinear&, const char*, const RowBlock*, int64_t, float*);

// One for each of `kRowCounts`.
template <typename F, size_t... counts>
OCTAVO_INLINE const QuantizedTile* tiles_of(std::index_sequence<counts...>) {
  static constexpr QuantizedTile tiles[] = {quantized_tile<F, kRowCounts[counts]>...};
  return tiles;
}

template <typename F>
OCTAVO_INLINE const QuantizedTile* tiles_of() {
  return tiles_of<F>(std::make_index_sequence<sizeof(kRowCounts) / sizeof(int)>{});
}

// None for a format that `kFormats` does not have.
inline const QuantizedTile* tiles_of(const WeightFormat& format) {
  if (format.table) return tiles_of<Codes<4, true>>();
  switch (format.bits) {
    case 4: return tiles_of<Codes<4>>();
    case 5: return tiles_of<Codes<5>>();
    case 6: return tiles_of<Codes<6>>();
    default: return tiles_of<Codes<8>>();
  }
}

struct ExactActivate {
  static constexpr bool kMultiplies = true;

  OCTAVO_INLINE f32x16 operator()(int activation, f32x16 x) const {
    return activation == kSilu ? exact::silu(x) : exact::gelu_tanh(x);
  }
};

// The panels from `first` to `last` for all `tokens` rows. A panel stays in the cache while the rows pass by.
template <typename T>
void quantized_panels(const QuantizedLinear& op, const RowBlock* rows, void* y, int64_t tokens, int64_t first,
                      int64_t last) {
  const QuantizedTile* tiles = tiles_of(kFormats[op.format]);
  const int64_t panel_bytes = kFormats[op.format].panel_bytes(op.linear.inputs, op.group);
  const int64_t groups = op.linear.inputs / kGroup;
  alignas(64) float results[kRowCounts[0] * kPanel];
  for (int64_t panel = first; panel < last; panel++) {
    const char* weight = (const char*)op.linear.weight + panel * panel_bytes;
    for (int64_t row = 0; row < tokens;) {
      const int64_t place = row % RowBlock::kRows, left = std::min(tokens - row, RowBlock::kRows - place);
      int which = 0;
      while (kRowCounts[which] > left) which++;
      tiles[which](op, weight, rows + row / RowBlock::kRows * groups, place, results);
      for (int64_t r = 0; r < kRowCounts[which]; r++, row++) {
        const float* sums = results + r * kPanel;
        finish_panel<T>(op.linear, y, row, panel * kPanel, load(sums), load(sums + kLanes), ExactActivate{});
      }
    }
  }
}

}  // namespace octavo::OCTAVO_VARIANT
