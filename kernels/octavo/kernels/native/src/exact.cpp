// What computes the same bits on every instruction set. Compiled for most, as variant.cpp is, but with -ffp-contract=off: no
// compiler may fuse what one has an instruction for and another has not.
#include "exact.h"

#include "code_attention.h"
#include "quantized.h"
#include "variant.h"

namespace octavo {
namespace OCTAVO_FLOATS { extern const ExactFloats kExactFloats; }

namespace OCTAVO_VARIANT {
namespace {

void quantize(const Quantize& op, const void* x, RowBlock* rows, int64_t first, int64_t last, int32_t dtype) {
  if (dtype == kBFloat16) return quantize_rows<bf16>(op, x, rows, first, last);
  quantize_rows<float>(op, x, rows, first, last);
}

void quantized_linear(const QuantizedLinear& op, const RowBlock* rows, void* y, Span span, int64_t first, int64_t last,
                      int32_t dtype) {
  if (dtype == kBFloat16) return quantized_panels<bf16>(op, rows, y, span, first, last);
  quantized_panels<float>(op, rows, y, span, first, last);
}

void attend_codes(const Attention& op, const void* x, void* y, const GroupStep& step, const LayerCache& cache,
                  const Unit& unit, float* room, int32_t dtype) {
  attend_unit<CodeDots>(op, x, y, step, cache, unit, room, dtype);
}

}  // namespace

extern const Exact kExact;
const Exact kExact = {quantize, quantized_linear, attend_codes, &OCTAVO_FLOATS::kExactFloats};

}  // namespace OCTAVO_VARIANT
}  // namespace octavo
