// The C interface, and the choice of the best variant that this CPU runs.
#include <cstring>

#include "variant.h"

#define OCTAVO_EXPORT extern "C" __attribute__((visibility("default")))

namespace octavo {

#if defined(__x86_64__)
namespace avx512_bf16 { extern const Variant kVariant; }
namespace avx512 { extern const Variant kVariant; }
namespace avx2 { extern const Variant kVariant; }
#endif
namespace portable { extern const Variant kVariant; }

namespace {

struct Choice {
  const Variant* variant;
  bool runs;
};

// Best first.
const Choice* choices(size_t* count) {
  static const Choice all[] = {
#if defined(__x86_64__)
      {&avx512_bf16::kVariant, __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
                                   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")},
      {&avx512::kVariant, __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                              __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")},
      {&avx2::kVariant, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")},
#endif
      {&portable::kVariant, true},
  };
  *count = sizeof(all) / sizeof(all[0]);
  return all;
}

const Variant* chosen = nullptr;

}  // namespace
}  // namespace octavo

using namespace octavo;

// Chooses the variant called `name`, or the best for null. Gives its name, or null if this CPU does not run it.
OCTAVO_EXPORT const char* octavo_choose(const char* name) {
  size_t count;
  const Choice* all = choices(&count);
  for (size_t i = 0; i < count; i++) {
    if (!all[i].runs || (name && std::strcmp(name, all[i].variant->name) != 0)) continue;
    chosen = all[i].variant;
    return chosen->name;
  }
  return nullptr;
}

// What the sources were when this was compiled.
OCTAVO_EXPORT const char* octavo_sources() { return OCTAVO_SOURCES; }

OCTAVO_EXPORT void octavo_pack_weight(const void* weight, void* packed, int64_t outputs, int64_t inputs, int32_t dtype) {
  chosen->pack_weight(weight, packed, outputs, inputs, dtype);
}

OCTAVO_EXPORT void octavo_linear(const Linear* op, const void* x, void* y, int64_t tokens, int32_t dtype,
                                 int32_t threads) {
  chosen->linear(*op, x, y, tokens, dtype, threads);
}

OCTAVO_EXPORT void octavo_norm(const Norm* op, const void* x, void* y, int64_t tokens, int32_t dtype, int32_t threads) {
  chosen->norm(*op, x, y, tokens, dtype, threads);
}

OCTAVO_EXPORT void octavo_write(const void* key, const void* value, int64_t key_stride, int64_t value_stride,
                                const LayerCache* cache, const GroupStep* step, int64_t tokens, int64_t kv_heads,
                                int64_t head_dim, int32_t dtype, int32_t threads) {
  chosen->write(key, value, key_stride, value_stride, *cache, *step, tokens, kv_heads, head_dim, dtype, threads);
}

OCTAVO_EXPORT void octavo_attend(const Attention* op, const void* x, void* y, const GroupStep* step,
                                 const LayerCache* cache, int32_t dtype, int32_t threads) {
  chosen->attend(*op, x, y, *step, *cache, dtype, threads);
}

// The largest of each row of `logits`, [rows, size], and its place: of equal ones the first, of all a NaN.
OCTAVO_EXPORT void octavo_argmax(const float* logits, int64_t rows, int64_t size, float* values, int64_t* tokens,
                                    int32_t threads) {
  chosen->argmax(logits, rows, size, values, tokens, threads);
}

// Copies `num_moves` blocks of `block_bytes`, from block moves[2 i] of the source to block moves[2 i + 1] of the target. No
// source block may be a target.
OCTAVO_EXPORT void octavo_move_blocks(const char* source, char* target, const int64_t* moves, int64_t num_moves,
                                      int64_t block_bytes, int32_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t move = 0; move < num_moves; move++)
    std::memcpy(target + moves[2 * move + 1] * block_bytes, source + moves[2 * move] * block_bytes, block_bytes);
}

OCTAVO_EXPORT void octavo_run(const Run* run) { chosen->run(*run); }
