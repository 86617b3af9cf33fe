// What Python hands over, by pointer: plain structs that `octavo.kernels.native.structs` repeats field by field.
#pragma once

#include <array>
#include <cstdint>
#include <utility>

namespace octavo {

enum DType : int32_t { kFloat32 = 0, kBFloat16 = 1, kInt8 = 2 };
enum Epilogue : int32_t { kStore = 0, kAdd = 1, kGate = 2, kStoreFloat = 3, kMultiply = 4, kActivate = 5 };
enum Activation : int32_t { kSilu = 0, kGeluTanh = 1, kGelu = 2 };

// y = scale * (x W^T + b), stored, added to what y holds, or as activation(gate) * up of fused gates and ups; under
// kMultiply, of quantised weights only, y is activation(that) * what y holds; under kActivate y is activation(that). Weights are packed as `pack_weight` does;
// biases are fp32, padded to whole panels and, under kGate, in the weight's order.
struct Linear {
  const void* weight;
  const float* bias;
  int64_t inputs, outputs;
  int64_t x_stride, y_stride;
  int32_t epilogue, activation;
  float scale;
};

// A linear operation on rows that a `Quantize` has made, with a weight as `quantized_pack.cpp` packs it.
struct QuantizedLinear {
  Linear linear;
  int64_t group;  // inputs that share a scale
  int32_t format;  // as `octavo_quantized_format` gives it
  int8_t values[16];  // what codes mean, of a format that has a table
};

// A quantised weight as it comes, without gaps: codes [outputs, inputs], one to a byte, and what its format has of the rest.
struct QuantizedTensors {
  char* codes;
  char* scales;
  char* mins;
  char* block_scales;
  char* block_mins;
  int64_t inputs, group;
};

// Rows of x as small integers with scales, which linear operations read. Groups whose scale is more than `twice_above` times the
// mean of their row's are rounded twice: what the first integers leave of them is quantised too. 0: all; infinity: none.
struct Quantize {
  int64_t size, x_stride;
  float twice_above;
};

// x / rms(x) * weight over rows of `size`, stored or, times `scale`, added to what y holds; `y` may be `x`. A norm that is
// `centred` (LayerNorm) is stored: (x - mean(x)) / rms(x - mean(x)) * weight + bias.
struct Norm {
  const float* weight;
  const float* bias;  // null: none
  int64_t size, x_stride, y_stride;
  float eps, scale;
  int32_t epilogue;
  int32_t exact;  // 1, of fp32: rounded alike on every instruction set
  int32_t centred;
};

// Rotary embedding and optional norms of queries and keys, in place, and the write of keys and values into the cache.
// A row of x holds queries, keys, values, head after head.
struct RopeWrite {
  const float* cos;  // [positions, rotary_dim / 2]; null: no rotation
  const float* sin;
  const float* query_norm;  // [head_dim]; null: no norm
  const float* key_norm;
  int64_t rotary_dim, query_heads, kv_heads, head_dim, x_stride;
  float eps;
  int32_t exact;  // as `Norm::exact`
};

// Queries are the first heads of a row of x. Where it is `two_sided`, each token attends to those after it as to those
// before it.
struct Attention {
  const float* sinks;  // [query_heads] or null
  int64_t query_heads, kv_heads, head_dim, x_stride, y_stride;
  float scale, softcap;
  int32_t exact;  // as `Norm::exact`
  int32_t two_sided;
};

// Keys and values of one layer: [num_blocks][kv_heads][block_size x head_dim], the innermost as in cache.h, of `dtype`,
// which need not be the computation's. Blocks are `block_stride` elements apart: between them lie the same blocks of other
// layers.
struct LayerCache {
  void* keys;
  void* values;
  int64_t block_stride;
  int32_t dtype;
};

// Consecutive tokens of one sequence in this step, for one KV head: what one thread attends for at a time.
struct Unit {
  int32_t sequence, kv_head, first_token, last_token;
};

// Some rows, one after the other.
struct Span {
  int64_t begin, end;

  constexpr int64_t count() const { return end - begin; }
};

// One step in one KV group.
struct GroupStep {
  const int64_t* slots;         // [tokens]
  const int64_t* block_tables;  // [sequences, table_stride]
  const int64_t* contexts;      // [sequences]: tokens in the cache once the step has written its own
  const int64_t* first_tokens;  // [sequences + 1]: rows of x
  const Unit* units;
  int64_t num_units, table_stride, block_size, window;
};

// The logits that are weighed together, and whose weights are first added up together, in fp32.
constexpr int64_t kWeightSpan = 256;

enum OpKind : int32_t { kLinear = 0, kNorm = 1, kRopeWrite = 2, kAttention = 3, kQuantize = 4, kQuantizedLinear = 5 };

// Elements from `offset` on in each row of a buffer.
struct BufferAt {
  int64_t buffer, offset;
};

struct Op {
  int32_t kind, layer;
  BufferAt in, out;
  union {
    Linear linear;
    Norm norm;
    RopeWrite rope_write;
    Attention attention;
    Quantize quantize;
    QuantizedLinear quantized_linear;
  };
};

struct Layer {
  LayerCache cache;
  int64_t group;
};

// One pass over all operations. Buffers hold [tokens, ...] in the computation's type; `nanoseconds`, if not null, [ops],
// gets what each operation took.
struct Run {
  const Op* ops;
  int64_t num_ops;
  void* const* buffers;
  const int64_t* positions;
  const GroupStep* groups;
  const Layer* layers;
  int64_t* nanoseconds;
  int64_t tokens;
  int32_t dtype, threads;
};

}  // namespace octavo
