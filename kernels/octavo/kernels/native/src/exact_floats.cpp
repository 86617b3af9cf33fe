// What computes the same bits on every instruction set, of floats alone: compiled as exact.cpp is, but not again where an
// instruction set adds only instructions for whole numbers or bfloat16.
#include "attention.h"
#include "sampling.h"
#include "small_ops.h"
#include "variant.h"

namespace octavo::OCTAVO_VARIANT {
namespace {

// Products of bf16 are exact however they are added up, but not where an instruction adds two of them at once: no `Left`
// is bf16 here.
void attend(const Attention& op, const void* x, void* y, const GroupStep& step, const LayerCache& cache, const Unit& unit,
            float* room) {
  with_type(cache.dtype, OCTAVO_EACH(c) {
    attend_unit<Floats<decltype(c), float>>(op, x, y, step, cache, unit, room, kFloat32);
  });
}

}  // namespace

extern const ExactFloats kExactFloats;
const ExactFloats kExactFloats = {norm_rows<float>, rope_write_rows<float>, attend, weigh_span, softcap_span};

}  // namespace octavo::OCTAVO_VARIANT
