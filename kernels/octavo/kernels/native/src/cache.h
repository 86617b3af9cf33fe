// How a block's keys and values lie, per KV head: keys in groups of 16 tokens, so that a register holds one element of 16
// keys; values in the order in which the weights of successive tokens meet them. Of bfloat16 two neighbours in the summed
// dimension share a lane, of 8 bits four. A head's scales of 8 bits come after all its codes: of keys by 16 tokens, in these
// by group, a bf16 for each token; of values a float for each token.
#pragma once

#include "codes.h"
#include "products.h"
#include "types.h"

namespace octavo::OCTAVO_VARIANT {

// Elements of a token and head in a cache, with what its scales take.
template <typename C>
OCTAVO_INLINE constexpr int64_t width(int64_t head_dim) {
  return std::is_same_v<C, int8> ? head_dim + scale_bytes(head_dim) : head_dim;
}

template <typename T>
struct Layout {
  static constexpr int kPair = kShared<T>;  // elements that share a lane

  // Of element `d` of the key in slot `slot` of a block.
  OCTAVO_INLINE static int64_t key(int64_t slot, int64_t d, int64_t head_dim) {
    return (slot / kLanes * head_dim + d / kPair * kPair) * kLanes + slot % kLanes * kPair + d % kPair;
  }

  OCTAVO_INLINE static int64_t value(int64_t slot, int64_t d, int64_t head_dim) {
    return (slot / kPair * head_dim + d) * kPair + slot % kPair;
  }
};

// Where the scales of a head of a block lie whose codes begin at `codes`: of keys those of the 16 tokens that `slot` is
// among, of values that of `slot`.
template <typename Byte>
OCTAVO_INLINE auto key_scales(Byte* codes, int64_t slot, int64_t block_size, int64_t head_dim) {
  using Scale = std::conditional_t<std::is_const_v<Byte>, const bf16, bf16>;
  return (Scale*)(codes + block_size * head_dim) + slot / kLanes * kLanes * code_groups(head_dim);
}

template <typename Byte>
OCTAVO_INLINE auto value_scale(Byte* codes, int64_t slot, int64_t block_size, int64_t head_dim) {
  using Scale = std::conditional_t<std::is_const_v<Byte>, const float, float>;
  return (Scale*)(codes + block_size * head_dim) + slot;
}

// The codes of elements of `scale`, sixteen at a time. A scale that is no number gives any.
template <typename T>
OCTAVO_INLINE i32x16 codes_of(const T* from, float scale) {
  return nearest(load(from) / (scale < kLeastScale ? 1.0f : scale));
}

template <typename T, typename C>
OCTAVO_INLINE void write_token(const T* key, const T* value, C* keys, C* values, int64_t slot, int64_t,
                               int64_t head_dim) {
  if constexpr (std::is_same_v<T, C>) {
    for (int64_t d = 0; d < head_dim; d++) {
      keys[Layout<C>::key(slot, d, head_dim)] = key[d];
      values[Layout<C>::value(slot, d, head_dim)] = value[d];
    }
  } else {
    C rounded[2][kLanes];
    for (int64_t first = 0; first < head_dim; first += kLanes) {
      store(rounded[0], load(key + first));
      store(rounded[1], load(value + first));
      for (int64_t d = 0; d < kLanes; d++) {
        keys[Layout<C>::key(slot, first + d, head_dim)] = rounded[0][d];
        values[Layout<C>::value(slot, first + d, head_dim)] = rounded[1][d];
      }
    }
  }
}

template <typename T>
OCTAVO_INLINE void write_token(const T* key, const T* value, int8* keys, int8* values, int64_t slot, int64_t block_size,
                               int64_t head_dim) {
  int32_t codes[kLanes];
  bf16* scales = key_scales(keys, slot, block_size, head_dim);
  for (int64_t group = 0; group < head_dim; group += kCodeGroup) {
    const int64_t end = group + kCodeGroup < head_dim ? group + kCodeGroup : head_dim;
    // Rounded up, so that no code is beyond the largest.
    const bf16 scale{bf16_above(peak(key + group, end - group) / kMostCode)};
    scales[group / kCodeGroup * kLanes + slot % kLanes] = scale;
    for (int64_t first = group; first < end; first += kLanes) {
      store_bytes(codes, codes_of(key + first, to_float(scale)) + 128);
      for (int64_t d = 0; d < kLanes; d++)
        keys[Layout<int8>::key(slot, first + d, head_dim)].bits = uint8_t(codes[d]);
    }
  }
  const float scale = peak(value, head_dim) / kMostCode;
  *value_scale(values, slot, block_size, head_dim) = scale;
  for (int64_t first = 0; first < head_dim; first += kLanes) {
    store_bytes(codes, codes_of(value + first, scale));
    for (int64_t d = 0; d < kLanes; d++) values[Layout<int8>::value(slot, first + d, head_dim)].bits = uint8_t(codes[d]);
  }
}

// Asks for the cache lines that `write_heads` will write to: a key is spread over many, and waiting for one after the other
// takes longer than all else about a token.
template <typename C>
void prefetch_heads(const LayerCache& cache, int64_t slot, int64_t block_size, int64_t kv_heads, int64_t head_dim) {
  const int64_t block = slot / block_size, offset = slot % block_size;
  constexpr int64_t line = 64 / sizeof(C);
  for (int64_t head = 0; head < kv_heads; head++) {
    const int64_t at = block * cache.block_stride + head * block_size * width<C>(head_dim);
    const C* keys = (const C*)cache.keys + at;
    const C* values = (const C*)cache.values + at;
    const C* key = keys + Layout<C>::key(offset, 0, head_dim);
    const C* value = values + Layout<C>::value(offset, 0, head_dim);
    for (int64_t i = 0; i < head_dim * kLanes; i += kLanes * kShared<C>) __builtin_prefetch(key + i, 1, 2);
    for (int64_t i = 0; i < head_dim * kShared<C>; i += line) __builtin_prefetch(value + i, 1, 2);
    if constexpr (std::is_same_v<C, int8>) {
      __builtin_prefetch(key_scales(keys, offset, block_size, head_dim), 1, 2);
      __builtin_prefetch(value_scale(values, offset, block_size, head_dim), 1, 2);
    }
  }
}

// One token's heads into its slot. `heads` apart by head_dim.
template <typename C, typename T>
void write_heads(const T* key, const T* value, const LayerCache& cache, int64_t slot, int64_t block_size,
                 int64_t kv_heads, int64_t head_dim) {
  const int64_t block = slot / block_size, offset = slot % block_size;
  for (int64_t head = 0; head < kv_heads; head++) {
    const int64_t at = block * cache.block_stride + head * block_size * width<C>(head_dim);
    write_token(key + head * head_dim, value + head * head_dim, (C*)cache.keys + at, (C*)cache.values + at, offset,
                block_size, head_dim);
  }
}

// Whether the keys and values of `rows` rows, whose slots lie one behind the other, fill a sixteen of tokens from its first on.
OCTAVO_INLINE bool fill_tile(const int64_t* slots, int64_t rows) {
  if (rows < kLanes || slots[0] < 0 || slots[0] % kLanes) return false;
  for (int row = 1; row < kLanes; row++)
    if (slots[row] != slots[0] + row) return false;
  return true;
}

// The heads of sixteen tokens into their slots, of which the first begins a sixteen: rows of `stride`. Written line by line;
// token by token, each key goes to as many lines as it has elements.
template <typename T>
void write_tile(const T* key, const T* value, int64_t stride, const LayerCache& cache, int64_t slot, int64_t block_size,
                int64_t kv_heads, int64_t head_dim) {
  constexpr int pair = kShared<T>;
  const int64_t block = slot / block_size, offset = slot % block_size;
  for (int64_t head = 0; head < kv_heads; head++, key += head_dim, value += head_dim) {
    const int64_t at = block * cache.block_stride + (head * block_size + offset) * head_dim;
    T* keys = (T*)cache.keys + at;
    T* values = (T*)cache.values + at;
    for (int64_t d = 0; d < head_dim; d += pair)
      for (int token = 0; token < kLanes; token++, keys += pair) std::memcpy(keys, key + token * stride + d, pair * sizeof(T));
    for (int token = 0; token < kLanes; token += pair) {
      const T* from = value + token * stride;
      if constexpr (pair == 1) {
        std::memcpy(values, from, head_dim * sizeof(T));
      } else {
        for (int64_t d = 0; d < head_dim; d++) values[2 * d] = from[d], values[2 * d + 1] = from[stride + d];
      }
      values += pair * head_dim;
    }
  }
}

template <typename T>
constexpr DType kTypeOf = std::is_same_v<T, float> ? kFloat32 : kBFloat16;

// Calls function(an element of `dtype`), of which computations have two.
template <typename Function>
OCTAVO_INLINE void with_type(int32_t dtype, Function function) {
  if (dtype == kBFloat16) return function(bf16{});
  function(float{});
}

// Calls function(an element of the cache's type) where a computation of T may read such a cache.
template <typename T, typename Function>
OCTAVO_INLINE void with_cache(const LayerCache& cache, Function function) {
  if (cache.dtype == kInt8) return function(int8{});
  if constexpr (std::is_same_v<T, float>)
    if (cache.dtype == kBFloat16) return function(bf16{});
  function(T{});
}

}  // namespace octavo::OCTAVO_VARIANT
