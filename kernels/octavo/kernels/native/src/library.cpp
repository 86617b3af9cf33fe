// The C interface, and the choice of the best variant that this CPU runs.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include "pieces.h"
#include "quantized_layout.h"
#include "team.h"
#include "variant.h"

#define OCTAVO_EXPORT extern "C" __attribute__((visibility("default")))

namespace octavo {

#if defined(__x86_64__)
namespace amx { extern const Variant kVariant; }
namespace avx512_bf16 { extern const Variant kVariant; }
namespace avx512 { extern const Variant kVariant; }
namespace avx2 { extern const Variant kVariant; }
namespace avx512_vnni_exact { extern const Exact kExact; }
namespace avx512_exact { extern const Exact kExact; }
namespace avx_vnni_exact { extern const Exact kExact; }
namespace avx2_exact { extern const Exact kExact; }
#elif defined(__aarch64__)
namespace dotprod_exact { extern const Exact kExact; }
#endif
namespace portable { extern const Variant kVariant; }
namespace portable_exact { extern const Exact kExact; }

namespace {

#if defined(__x86_64__)
// Not all compilers know its name.
bool has_avx_vnni() {
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & (1u << 4)) != 0;
}

// Whether it multiplies tiles of bf16, and the system lets this process have the registers for them: it has to be asked.
bool has_amx() {
  constexpr unsigned kBF16 = 1u << 22, kTile = 1u << 24;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kBF16) && (d & kTile) &&
         syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

struct Choice {
  const char* name;
  const Variant* variant;
  const Exact* exact;
  bool runs;
};

// Best first.
const Choice* choices(size_t* count) {
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
  const bool bf16 = vnni && __builtin_cpu_supports("avx512bf16");
#endif
  static const Choice all[] = {
#if defined(__x86_64__)
      {"amx", &amx::kVariant, &avx512_vnni_exact::kExact, bf16 && has_amx()},
      {"avx512_bf16", &avx512_bf16::kVariant, &avx512_vnni_exact::kExact, bf16},
      {"avx512_vnni", &avx512::kVariant, &avx512_vnni_exact::kExact, vnni},
      {"avx512", &avx512::kVariant, &avx512_exact::kExact, avx512},
      {"avx_vnni", &avx2::kVariant, &avx_vnni_exact::kExact, avx2 && has_avx_vnni()},
      {"avx2", &avx2::kVariant, &avx2_exact::kExact, avx2},
#elif defined(__aarch64__)
      {"dotprod", &portable::kVariant, &dotprod_exact::kExact, (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0},
#endif
      {"portable", &portable::kVariant, &portable_exact::kExact, true},
  };
  *count = sizeof(all) / sizeof(all[0]);
  return all;
}

const Variant* chosen = nullptr;
const Exact* exact = nullptr;

}  // namespace
}  // namespace octavo

using namespace octavo;

// Chooses the variant called `name`, or the best for null. Gives its name, or null if this CPU does not run it.
OCTAVO_EXPORT const char* octavo_choose(const char* name) {
  size_t count;
  const Choice* all = choices(&count);
  for (size_t i = 0; i < count; i++) {
    if (!all[i].runs || (name && std::strcmp(name, all[i].name) != 0)) continue;
    chosen = all[i].variant, exact = all[i].exact;
    return all[i].name;
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

// From rows of x, which are quantised first.
OCTAVO_EXPORT void octavo_quantized_linear(const QuantizedLinear* op, const Quantize* quantize, const void* x, void* y,
                                           int64_t tokens, int32_t dtype, int32_t threads) {
  const int64_t panels = (op->linear.outputs + 2 * kHalfPanel - 1) / (2 * kHalfPanel);
  const Pieces pieces = Pieces::of(tokens, panels, quantized_row_bytes(quantize->size));
  const bool few = tokens <= kFewRows;
  const size_t blocks = row_blocks(tokens, quantize->size);
  const std::unique_ptr<RowBlock[]> all(few ? nullptr : new RowBlock[blocks]);
  std::atomic<int64_t> taken{0};
  on_team(threads, [&](int thread, int team) {
    const std::unique_ptr<RowBlock[]> own(few ? new RowBlock[blocks] : nullptr);
    RowBlock* rows = few ? own.get() : all.get();
    exact->quantize(*quantize, x, rows, few ? 0 : thread * tokens / team, few ? tokens : (thread + 1) * tokens / team, dtype);
    if (!few) {
#pragma omp barrier
    }
    const int64_t count = pieces.count(), some = std::max<int64_t>(1, count / (team * 16));
    for (int64_t first; (first = taken.fetch_add(some)) < count;)
      pieces.each(first, std::min(first + some, count), [&](Span span, int64_t panel, int64_t last) {
        exact->quantized_linear(*op, rows, y, span, panel, last, dtype);
      });
  });
}

OCTAVO_EXPORT void octavo_norm(const Norm* op, const void* x, void* y, int64_t tokens, int32_t dtype, int32_t threads) {
  chosen->norm(*op, x, y, tokens, dtype, threads, *exact);
}

OCTAVO_EXPORT void octavo_write(const void* key, const void* value, int64_t key_stride, int64_t value_stride,
                                const LayerCache* cache, const GroupStep* step, int64_t tokens, int64_t kv_heads,
                                int64_t head_dim, int32_t dtype, int32_t threads) {
  chosen->write(key, value, key_stride, value_stride, *cache, *step, tokens, kv_heads, head_dim, dtype, threads);
}

OCTAVO_EXPORT void octavo_attend(const Attention* op, const void* x, void* y, const GroupStep* step,
                                 const LayerCache* cache, int32_t dtype, int32_t threads) {
  chosen->attend(*op, x, y, *step, *cache, dtype, threads, *exact);
}

// The largest of each row of `logits`, [rows, size], and its place: of equal ones the first, of all a NaN.
OCTAVO_EXPORT void octavo_argmax(const float* logits, int64_t rows, int64_t size, float* values, int64_t* tokens,
                                    int32_t threads) {
  chosen->argmax(logits, rows, size, values, tokens, threads);
}

// To `weights`, [rows, size], e^((logit - largest) / divisor) of each of `logits`, none of which is above its row's `largest`;
// to `sums`, [rows, spans], the weights of every kWeightSpan neighbours added up.
OCTAVO_EXPORT void octavo_weigh(const float* logits, int64_t rows, int64_t size, const float* largest,
                                const float* divisors, float* weights, double* sums, int32_t threads) {
  const int64_t spans = (size + kWeightSpan - 1) / kWeightSpan;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t unit = 0; unit < rows * spans; unit++) {
    const int64_t row = unit / spans, first = unit % spans * kWeightSpan, place = row * size + first;
    sums[unit] = exact->floats->weigh(logits + place, largest[row], divisors[row], weights + place,
                              std::min(kWeightSpan, size - first));
  }
}

// cap * tanh(logit / cap) of `count` logits, in place.
OCTAVO_EXPORT void octavo_softcap(float* logits, int64_t count, float cap, int32_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t first = 0; first < count; first += kWeightSpan)
    exact->floats->softcap(logits + first, cap, std::min(kWeightSpan, count - first));
}

// Copies `num_moves` blocks of `block_bytes`, from block moves[2 i] of the source to block moves[2 i + 1] of the target. No
// source block may be a target.
OCTAVO_EXPORT void octavo_move_blocks(const char* source, char* target, const int64_t* moves, int64_t num_moves,
                                      int64_t block_bytes, int32_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t move = 0; move < num_moves; move++)
    std::memcpy(target + moves[2 * move + 1] * block_bytes, source + moves[2 * move] * block_bytes, block_bytes);
}

OCTAVO_EXPORT void octavo_run(const Run* run) { chosen->run(*run, *exact); }
