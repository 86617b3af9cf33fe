// How quantised weights and rows lie in memory, whatever the instruction set.
//
// A weight is panels of 32 outputs, each read from front to back. A panel is blocks of inputs that share a header; a block
// is groups of 32 inputs. Of a group come the codes of 16 outputs, those of the next 16, then what small scales it has.
//
// Codes lie so that a register holds the same four inputs, a *step*, of neighbouring outputs, a lane each. Of a step's 64
// codes, code k of output l is in byte 4 l + k of a line of 64 bytes. Eight bits: a line for each step. Fewer: the lower
// four bits of two steps share a line, the even one low; after these four lines come the upper bits: of 5 bits one line,
// in bit s those of step s; of 6 bits two lines, in bits 2 (s % 4) of line s / 4 those of step s.
#pragma once

#include <cstddef>
#include <cstdint>

namespace octavo {

constexpr int kGroup = 32, kSteps = 8, kStep = 4, kHalfPanel = 16, kLine = 64;
// Groups of a block that has small scales.
constexpr int kBlockGroups = 8;

// What scales are: a header of fp16 for each group; a header of fp16 for each block, and integers for each group, uint8,
// or for each half of one, int8; a header of fp32 for blocks of any size.
enum Scales : int32_t { kHalfScales = 0, kGroupScales = 1, kSixteenScales = 2, kFloatScales = 3 };

struct WeightFormat {
  int32_t bits, offset, scales, mins, table;

  constexpr bool operator==(const WeightFormat& other) const {
    return bits == other.bits && offset == other.offset && scales == other.scales && mins == other.mins &&
           table == other.table;
  }
  // Of 16 outputs of a group.
  constexpr int64_t code_bytes() const { return bits * kLine; }
  // Scales of 32 outputs, then mins or the scales of the second halves.
  constexpr int64_t small_bytes() const { return scales == kGroupScales || scales == kSixteenScales ? kLine : 0; }
  constexpr int64_t group_bytes() const { return 2 * code_bytes() + small_bytes(); }
  // Scales of 32 outputs, then their mins.
  constexpr int64_t scale_bytes() const { return scales == kFloatScales ? 2 * kLine : kLine; }
  constexpr int64_t header_bytes() const { return scale_bytes() * (mins ? 2 : 1); }
  // `group`: inputs that share a scale where scales are fp32.
  constexpr int64_t block_groups(int64_t group) const {
    return scales == kHalfScales ? 1 : scales == kFloatScales ? group / kGroup : kBlockGroups;
  }
  constexpr int64_t panel_bytes(int64_t inputs, int64_t group) const {
    const int64_t groups = inputs / kGroup;
    return groups / block_groups(group) * header_bytes() + groups * group_bytes();
  }
};

// Those that there are kernels for: bits, offset, scales, whether there are mins, whether codes look up values.
constexpr WeightFormat kFormats[] = {
    {4, 8, kHalfScales, 0, 0},  {4, 0, kHalfScales, 1, 0},    {4, 0, kHalfScales, 0, 1},  {5, 16, kHalfScales, 0, 0},
    {5, 0, kHalfScales, 1, 0},  {8, 128, kHalfScales, 0, 0},  {4, 0, kGroupScales, 1, 0}, {5, 0, kGroupScales, 1, 0},
    {6, 32, kSixteenScales, 0, 0}, {8, 128, kFloatScales, 0, 0}, {4, 0, kFloatScales, 1, 0},
};
constexpr size_t kNumFormats = sizeof(kFormats) / sizeof(kFormats[0]);

// The offset of codes of 8 bits.
constexpr int32_t kByteOffset = 128;

// A group of a row: it stands for `scale` * its codes. `start` is what that offset takes away from their products with a
// weight's, `first_start` from those of the first half.
struct RowGroup {
  float scale, scaled_sum;
  int32_t start, first_start;
};

// The same group of some rows, which are multiplied together, so that those of all rows lie side by side.
struct RowBlock {
  static constexpr int kRows = 24;
  int8_t codes[kRows][kGroup];
  RowGroup groups[kRows];
};

// As many quantised rows as a `RowBlock` has: what all groups of them are rounded to, then what that leaves of those that
// are rounded twice (of others anything), then which these are. Rows are an array of such stripes.
struct RowStripe {
  static constexpr int kFlags = 32;  // bytes
  RowBlock* blocks;  // [groups]
  RowBlock* rests;   // [groups]
  uint8_t (*twice)[kFlags];  // [groups][kRows], 1 or 0

  static constexpr int64_t size(int64_t groups) {
    return 2 * groups + (groups * kFlags + int64_t(sizeof(RowBlock)) - 1) / int64_t(sizeof(RowBlock));
  }
  static RowStripe of(RowBlock* rows, int64_t row, int64_t groups) {
    RowBlock* at = rows + row / RowBlock::kRows * size(groups);
    return {at, at + groups, (uint8_t (*)[kFlags])(at + 2 * groups)};
  }
};

// What so many quantised rows take.
constexpr int64_t row_blocks(int64_t rows, int64_t inputs) {
  return (rows + RowBlock::kRows - 1) / RowBlock::kRows * RowStripe::size(inputs / kGroup);
}

// What products read of a row, but for rests.
constexpr int64_t quantized_row_bytes(int64_t inputs) {
  return inputs / kGroup * int64_t(sizeof(RowBlock)) / RowBlock::kRows;
}

// Rows that each thread quantises for itself, sooner than all could wait for each other's.
constexpr int64_t kFewRows = 8;

}  // namespace octavo
