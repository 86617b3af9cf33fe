// How a block's keys and values lie, per KV head: keys in groups of 16 tokens, so that a register holds one element of 16
// keys; values in the order in which the weights of successive tokens meet them. Of bfloat16 two neighbours in the summed
// dimension share a lane.
#pragma once

#include "products.h"
#include "types.h"

namespace octavo::OCTAVO_VARIANT {

template <typename T>
struct Layout {
  static constexpr int kPair = kDepth<T>;  // elements that share a lane

  // Of element `d` of the key in slot `slot` of a block.
  OCTAVO_INLINE static int64_t key(int64_t slot, int64_t d, int64_t head_dim) {
    return (slot / kLanes * head_dim + d / kPair * kPair) * kLanes + slot % kLanes * kPair + d % kPair;
  }

  OCTAVO_INLINE static int64_t value(int64_t slot, int64_t d, int64_t head_dim) {
    return (slot / kPair * head_dim + d) * kPair + slot % kPair;
  }
};

template <typename T>
OCTAVO_INLINE void write_token(const T* key, const T* value, T* keys, T* values, int64_t slot, int64_t head_dim) {
  for (int64_t d = 0; d < head_dim; d++) {
    keys[Layout<T>::key(slot, d, head_dim)] = key[d];
    values[Layout<T>::value(slot, d, head_dim)] = value[d];
  }
}

// Asks for the cache lines that `write_heads` will write to: a key is spread over many, and waiting for one after the other
// takes longer than all else about a token.
template <typename T>
void prefetch_heads(const LayerCache& cache, int64_t slot, int64_t block_size, int64_t kv_heads, int64_t head_dim) {
  const int64_t block = slot / block_size, offset = slot % block_size;
  constexpr int64_t line = 64 / sizeof(T);
  for (int64_t head = 0; head < kv_heads; head++) {
    const int64_t at = block * cache.block_stride + head * block_size * head_dim;
    const T* keys = (const T*)cache.keys + at + Layout<T>::key(offset, 0, head_dim);
    const T* values = (const T*)cache.values + at + Layout<T>::value(offset, 0, head_dim);
    for (int64_t i = 0; i < head_dim * kLanes; i += kLanes * kDepth<T>) __builtin_prefetch(keys + i, 1, 2);
    for (int64_t i = 0; i < head_dim * kDepth<T>; i += line) __builtin_prefetch(values + i, 1, 2);
  }
}

// One token's heads into its slot. `heads` apart by head_dim.
template <typename T>
void write_heads(const T* key, const T* value, const LayerCache& cache, int64_t slot, int64_t block_size,
                 int64_t kv_heads, int64_t head_dim) {
  const int64_t block = slot / block_size, offset = slot % block_size;
  for (int64_t head = 0; head < kv_heads; head++) {
    const int64_t at = block * cache.block_stride + head * block_size * head_dim;
    write_token(key + head * head_dim, value + head * head_dim, (T*)cache.keys + at, (T*)cache.values + at, offset,
                head_dim);
  }
}

}  // namespace octavo::OCTAVO_VARIANT
