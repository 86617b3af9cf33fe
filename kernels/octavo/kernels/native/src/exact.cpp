// What computes the same bits on every instruction set. Compiled once for each, as variant.cpp is, but with
// -ffp-contract=off: no compiler may fuse what one has an instruction for and another has not.
#include "exact.h"

#include "code_attention.h"
#include "quantized.h"
#include "small_ops.h"
#include "variant.h"

namespace octavo::OCTAVO_VARIANT {
namespace {

void quantize(const Quantize& op, const void* x, RowBlock* rows, int64_t first, int64_t last, int32_t dtype) {
  if (dtype == kBFloat16) return quantize_rows<bf16>(op, x, rows, first, last);
  quantize_rows<float>(op, x, rows, first, last);
}

void quantized_linear(const QuantizedLinear& op, const RowBlock* rows, void* y, int64_t tokens, int64_t first, int64_t last,
                      int32_t dtype) {
  if (dtype == kBFloat16) return quantized_panels<bf16>(op, rows, y, tokens, first, last);
  quantized_panels<float>(op, rows, y, tokens, first, last);
}

// Products of bf16 are exact however they are added up, but not where an instruction adds two of them at once: that one is
// taken unless `exact` forbids it.
template <typename T>
void attend(const Attention& op, const void* x, void* y, const GroupStep& step, const LayerCache& cache,
            const Unit& unit, float* room) {
  if (cache.dtype == kInt8) return attend_unit<T, CodeDots>(op, x, y, step, cache, unit, room);
  if constexpr (std::is_same_v<T, float>) {
    if (cache.dtype == kFloat32) return attend_unit<T, Floats<float, float>>(op, x, y, step, cache, unit, room);
    if (!op.exact) return attend_unit<T, Floats<bf16, Left<bf16>>>(op, x, y, step, cache, unit, room);
    attend_unit<T, Floats<bf16, float>>(op, x, y, step, cache, unit, room);
  }
}

void attend_any(const Attention& op, const void* x, void* y, const GroupStep& step, const LayerCache& cache,
                const Unit& unit, float* room, int32_t dtype) {
  (dtype == kBFloat16 ? attend<bf16> : attend<float>)(op, x, y, step, cache, unit, room);
}

}  // namespace

extern const Exact kExact;
const Exact kExact = {OCTAVO_VARIANT_NAME, quantize,    quantized_linear, norm_rows<float>,
                      rope_write_rows<float>, attend_any};

}  // namespace octavo::OCTAVO_VARIANT
