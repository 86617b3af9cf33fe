// The functions that exist once per instruction set: those of `Variant` as fast as they can be, those of `Exact` and
// `ExactFloats` to the same bits on all.
#pragma once

#include "quantized_layout.h"
#include "types.h"

namespace octavo {

// What an operation asks for that is `exact`, whose rows are fp32.
struct ExactFloats {
  void (*norm_rows)(const Norm& op, const void* x, void* y, int64_t first, int64_t last);
  void (*rope_write_rows)(const RopeWrite& op, void* x, const int64_t* positions, const GroupStep& step,
                          const LayerCache& cache, int64_t first, int64_t last);
  // Over a cache of floats.
  void (*attend_unit)(const Attention& op, const void* x, void* y, const GroupStep& step, const LayerCache& cache,
                      const Unit& unit, float* room);
  // To `weights`, e^((logit - largest) / divisor) of at most kWeightSpan logits, none of which is above `largest`. Gives
  // their sum.
  float (*weigh)(const float* logits, float largest, float divisor, float* weights, int64_t size);
  // cap * tanh(logit / cap), in place.
  void (*softcap)(float* logits, float cap, int64_t size);
};

struct Exact {
  // Rows `first` to `last` of x to the same rows of `rows`.
  void (*quantize)(const Quantize& op, const void* x, RowBlock* rows, int64_t first, int64_t last, int32_t dtype);
  // Panels `first` to `last` of y, of the type that x had, from the quantised rows of `span`, which begins with a stripe.
  void (*quantized_linear)(const QuantizedLinear& op, const RowBlock* rows, void* y, Span span, int64_t first, int64_t last,
                           int32_t dtype);
  // Over a cache of 8 bits.
  void (*attend_codes)(const Attention& op, const void* x, void* y, const GroupStep& step, const LayerCache& cache,
                       const Unit& unit, float* room, int32_t dtype);
  const ExactFloats* floats;
};

struct Variant {
  // Packed as `Linear::weight`: panels of 32 outputs, in each the inputs in their order. `weight`: [outputs, inputs].
  void (*pack_weight)(const void* weight, void* packed, int64_t outputs, int64_t inputs, int32_t dtype);
  void (*linear)(const Linear& op, const void* x, void* y, int64_t tokens, int32_t dtype, int32_t threads);
  void (*norm)(const Norm& op, const void* x, void* y, int64_t tokens, int32_t dtype, int32_t threads,
               const Exact& exact);
  void (*write)(const void* key, const void* value, int64_t key_stride, int64_t value_stride, const LayerCache& cache,
                const GroupStep& step, int64_t tokens, int64_t kv_heads, int64_t head_dim, int32_t dtype,
                int32_t threads);
  void (*attend)(const Attention& op, const void* x, void* y, const GroupStep& step, const LayerCache& cache,
                 int32_t dtype, int32_t threads, const Exact& exact);
  void (*argmax)(const float* logits, int64_t rows, int64_t size, float* values, int64_t* tokens, int32_t threads);
  void (*run)(const Run& run, const Exact& exact);
};

}  // namespace octavo
