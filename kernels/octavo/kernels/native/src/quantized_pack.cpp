// Quantised weights into panels and back: bits are moved, no number is changed.
#include <cstring>

#include "quantized_layout.h"
#include "types.h"

namespace octavo {
namespace {

// Element `i` of 2^shift bytes, both ways.
struct Elements {
  char* at;
  int shift;
  char* operator[](int64_t i) const { return at + (i << shift); }
};

// The bits of one code.
struct Place {
  int64_t byte;
  int shift, mask;
};

// Writes bits to a panel, which is zero.
struct Pack {
  static void code(uint8_t* panel, Place low, uint8_t& code, int from) {
    panel[low.byte] |= uint8_t(((code >> from) & low.mask) << low.shift);
  }
  static void bytes(char* panel, char* value, int shift) { std::memcpy(panel, value, size_t(1) << shift); }
};

// Reads them; codes begin as zero.
struct Unpack {
  static void code(const uint8_t* panel, Place low, uint8_t& code, int from) {
    code |= uint8_t(((panel[low.byte] >> low.shift) & low.mask) << from);
  }
  static void bytes(const char* panel, char* value, int shift) { std::memcpy(value, panel, size_t(1) << shift); }
};

// One output of a panel; `output` is its row of the tensors.
template <typename Move>
void move_output(const WeightFormat& format, const QuantizedTensors& tensors, char* panel, int64_t lane, int64_t output) {
  const int64_t groups = tensors.inputs / kGroup, in_block = format.block_groups(tensors.group), blocks = groups / in_block;
  const int64_t half = lane / kHalfPanel, in_half = lane % kHalfPanel;
  const bool small = format.small_bytes() != 0, sixteens = format.scales == kSixteenScales;
  const int width = format.scales == kFloatScales ? 2 : 1;
  const Elements wide{small ? tensors.block_scales : tensors.scales, width};
  const Elements wide_mins{small ? tensors.block_mins : tensors.mins, width};
  const Elements scales{tensors.scales, 0}, mins{tensors.mins, 0};
  uint8_t* codes = (uint8_t*)tensors.codes + output * tensors.inputs;
  for (int64_t block = 0; block < blocks; block++) {
    Move::bytes(panel + (lane << width), wide[output * blocks + block], width);
    if (format.mins) Move::bytes(panel + format.scale_bytes() + (lane << width), wide_mins[output * blocks + block], width);
    panel += format.header_bytes();
    for (int64_t group = block * in_block; group < (block + 1) * in_block; group++) {
      uint8_t* at = (uint8_t*)panel + half * format.code_bytes();
      for (int64_t i = 0; i < kGroup; i++, codes++) {
        const int64_t step = i / kStep, byte = in_half * kStep + i % kStep;
        if (format.bits == 8) {
          Move::code(at, {step * kLine + byte, 0, 255}, *codes, 0);
          continue;
        }
        Move::code(at, {step / 2 * kLine + byte, int(step % 2) * 4, 15}, *codes, 0);
        if (format.bits == 5) Move::code(at, {kSteps / 2 * kLine + byte, int(step), 1}, *codes, 4);
        if (format.bits == 6)
          Move::code(at, {(kSteps / 2 + step / 4) * kLine + byte, int(step % 4) * 2, 3}, *codes, 4);
      }
      char* smalls = panel + 2 * format.code_bytes() + lane;
      if (sixteens) {
        Move::bytes(smalls, scales[(output * groups + group) * 2], 0);
        Move::bytes(smalls + kLine / 2, scales[(output * groups + group) * 2 + 1], 0);
      } else if (small) {
        Move::bytes(smalls, scales[output * groups + group], 0);
        if (format.mins) Move::bytes(smalls + kLine / 2, mins[output * groups + group], 0);
      }
      panel += format.group_bytes();
    }
  }
}

}  // namespace
}  // namespace octavo

using namespace octavo;

#define OCTAVO_EXPORT extern "C" __attribute__((visibility("default")))

// Gives the place of `format` in the list of those that there are kernels for; -1: there are none for it.
OCTAVO_EXPORT int32_t octavo_quantized_format(const WeightFormat* format) {
  for (size_t i = 0; i < kNumFormats; i++)
    if (kFormats[i] == *format) return int32_t(i);
  return -1;
}

OCTAVO_EXPORT int64_t octavo_quantized_panel_bytes(int32_t format, int64_t inputs, int64_t group) {
  return kFormats[format].panel_bytes(inputs, group);
}

// Of `rows` quantised rows.
OCTAVO_EXPORT int64_t octavo_quantized_rows_bytes(int64_t rows, int64_t inputs) {
  return row_blocks(rows, inputs) * int64_t(sizeof(RowBlock));
}

// Packs `panels` panels: output i of them is row order[i] of the tensors; none where that is negative.
OCTAVO_EXPORT void octavo_pack_quantized(int32_t format, const QuantizedTensors* tensors, const int64_t* order,
                                         char* packed, int64_t panels) {
  const WeightFormat& one = kFormats[format];
  const int64_t bytes = one.panel_bytes(tensors->inputs, tensors->group), columns = 2 * kHalfPanel;
#pragma omp parallel for schedule(static)
  for (int64_t panel = 0; panel < panels; panel++) {
    std::memset(packed + panel * bytes, 0, bytes);
    for (int64_t lane = 0; lane < columns; lane++)
      if (const int64_t output = order[panel * columns + lane]; output >= 0)
        move_output<Pack>(one, *tensors, packed + panel * bytes, lane, output);
  }
}

// Unpacks `count` outputs, the packed ones `places`, to the rows of the tensors, whose codes are zero.
OCTAVO_EXPORT void octavo_unpack_quantized(int32_t format, const QuantizedTensors* tensors, const int64_t* places,
                                           const char* packed, int64_t count) {
  const WeightFormat& one = kFormats[format];
  const int64_t bytes = one.panel_bytes(tensors->inputs, tensors->group), columns = 2 * kHalfPanel;
  for (int64_t i = 0; i < count; i++)
    move_output<Unpack>(one, *tensors, (char*)packed + places[i] / columns * bytes, places[i] % columns, i);
}
